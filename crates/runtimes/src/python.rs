//! Finds and queries a Python interpreter of this machine, and builds an environment on it from a pinned and hashed
//! list.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use super::process::Tool;
use super::store::{self, Marker, Runtime};
use super::{HostEnvironment, RuntimeConfig, Setup, SetupError};

/// Supported versions with their package lists, in order of preference.
const LISTS: &[(&str, &str)] = &[
    ("3.13", include_str!("../pinned/python-3.13.txt")),
    ("3.12", include_str!("../pinned/python-3.12.txt")),
    ("3.11", include_str!("../pinned/python-3.11.txt")),
    ("3.14", include_str!("../pinned/python-3.14.txt")),
];

/// The properties that an interpreter reports about itself. In a virtual environment, `base` and `prefix` are those of
/// the interpreter behind it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct Interpreter {
    version: (u32, u32, u32),
    implementation: String,
    base: PathBuf,
    prefix: PathBuf,
    ensurepip: bool,
    pip: bool,
}

const QUESTION: &str = include_str!("python/question.py");

/// A program that imports every package once, so that broken ones are noticed now, and reports the versions.
const CHECK: &str = include_str!("python/check.py");

/// A program that runs at each start of Python. matplotlib needs a writable directory and builds its font list there,
/// which takes seconds; this puts a symlink to the list made at set-up into the writable directory.
const SITE: &str = include_str!("python/site.py");

/// Pinned pip for the code in sandboxes, installed if the environment is created without pip.
const PIP: &str = "pip==25.3 --hash=sha256:9655943313a94722b7774661c21049070f6bbb0a1516bf02f7c8d5d9201514cd\n";

/// Returns a prepared environment that fits the configuration, if there is one. It is not verified yet.
pub async fn find(config: &RuntimeConfig) -> Option<Runtime> {
    let wanted = match &config.python {
        Some(path) => Some(ask(path).await.ok()?.base),
        None => None,
    };
    let fits = |runtime: &Runtime| {
        let list = list_for(&runtime.marker.version);
        let base = runtime.marker.base.as_deref();
        list.is_some_and(|list| runtime.marker.recipe == recipe(list, &config.packages))
            && wanted.as_deref().is_none_or(|wanted| base == Some(wanted))
    };
    store::complete(&config.dir, "python-").into_iter().find(fits)
}

/// Checks that the environment still uses the interpreter for which it was made, and that its files are unchanged.
pub async fn verify(runtime: &Runtime) -> Result<(), SetupError> {
    let files = tokio::task::spawn_blocking({
        let runtime = runtime.clone();
        move || runtime.verify()
    });
    let now = ask(&runtime.dir.join("bin/python")).await.ok().map(|found| found.short());
    let then = short(&runtime.marker.version);
    if now.as_deref() != Some(then) {
        let now = now.unwrap_or_else(|| "missing".into());
        let dir = runtime.dir.clone();
        return Err(SetupError::Modified { dir, expected: format!("Python {then}"), found: format!("Python {now}") });
    }
    files.await.unwrap_or_else(|lost| Err(SetupError::tool("the check of the runtime", &lost.to_string())))
}

/// Returns the version of the interpreter on which a set-up would build.
pub async fn available(config: &RuntimeConfig, env: &HostEnvironment) -> Result<String, SetupError> {
    choose(config, env).await.map(|found| found.full())
}

pub(crate) async fn build(setup: &Setup<'_>) -> Result<Runtime, SetupError> {
    let Setup { config, env, progress, lock } = setup;
    progress.step(1, "finding Python");
    let python = choose(config, env).await?;
    let version = python.full();
    let list = list_for(&version).ok_or_else(|| SetupError::NoPython(vec![python.unsupported()]))?;
    let recipe = recipe(list, &config.packages);
    let name =
        format!("python-{}-{}", python.short(), &store::recipe(&[&recipe, &python.base.to_string_lossy()])[..12]);
    let dir = lock.start(&name)?;
    progress.step(1, &format!("making an environment for Python {version}"));
    let mut venv = vec!["-I", "-m", "venv"];
    venv.extend((!python.ensurepip).then_some("--without-pip"));
    tool("python -m venv", &python.base, env).args(venv).args([&dir]).run(|_| ()).await?;
    install(&python, &dir, list, setup).await?;
    progress.step(3, "compiling Python packages");
    let packages = finish(&dir, setup).await?;
    let marker = Marker {
        recipe,
        version,
        base: Some(python.base),
        base_prefix: Some(python.prefix),
        packages,
        ..Marker::default()
    };
    lock.finish(dir, marker)
}

async fn install(python: &Interpreter, dir: &Path, list: &str, setup: &Setup<'_>) -> Result<(), SetupError> {
    let Setup { config, env, progress, .. } = setup;
    let requirements = dir.join("requirements.txt");
    fs::write(&requirements, list).map_err(SetupError::io(&requirements))?;
    let total = pins(list).count();
    let mut seen = 0;
    progress.step(2, &format!("installing Python packages … {total} to fetch"));
    pip(python, dir, env)
        .args(["--require-hashes", "--no-deps", "--requirement"])
        .args([&requirements])
        .run(|line| {
            if let Some(package) = line.strip_prefix("Collecting ") {
                seen += 1;
                let package = package.split([' ', ';']).next().unwrap_or_default().replacen("==", " ", 1);
                progress.step(2, &format!("installing Python packages … {package} ({seen} of {total})"));
            } else if line.starts_with("Installing collected packages") {
                progress.step(2, &format!("installing Python packages … unpacking {total}"));
            }
        })
        .await?;
    if !python.ensurepip {
        let own = dir.join("pip.txt");
        fs::write(&own, PIP).map_err(SetupError::io(&own))?;
        let hashed = ["--require-hashes", "--no-deps", "--requirement"];
        pip(python, dir, env).args(hashed).args([&own]).run(|_| ()).await?;
    }
    if config.packages.is_empty() {
        return Ok(());
    }
    progress
        .say(&format!("warning: `{}` from `runtimes.packages` are not pinned to hashes", config.packages.join("`, `")));
    // A constraint with hashes would demand hashes for everything.
    let constraints = dir.join("constraints.txt");
    let pinned: String = pins(list).map(|pin| format!("{pin}\n")).collect();
    fs::write(&constraints, pinned).map_err(SetupError::io(&constraints))?;
    let pip = pip(python, dir, env).args(["--constraint"]).args([&constraints]).args(["--"]).args(&config.packages);
    pip.run(|line| {
        if let Some(package) = line.strip_prefix("Collecting ") {
            progress.step(2, &format!("installing your Python packages … {package}"));
        }
    })
    .await
    .map(drop)
}

/// Compiles bytecode and builds the font list now, because sandboxes see the environment read-only. Returns the
/// installed packages.
async fn finish(dir: &Path, setup: &Setup<'_>) -> Result<BTreeMap<String, String>, SetupError> {
    let Setup { env, progress, .. } = setup;
    let python = dir.join("bin/python");
    let mut libraries = fs::read_dir(dir.join("lib")).map_err(SetupError::io(dir))?.flatten();
    let site = libraries
        .find_map(|entry| Some(entry.path().join("site-packages")).filter(|path| path.is_dir()))
        .ok_or_else(|| SetupError::tool("python -m venv", "made no site-packages"))?;
    fs::write(site.join("_sandpool_site.py"), SITE).map_err(SetupError::io(&site))?;
    fs::write(site.join("sandpool.pth"), "import _sandpool_site\n").map_err(SetupError::io(&site))?;
    // The tests of the packages, a third of all files, are left out. Some files are not meant to compile; those that
    // matter are imported below.
    let compile = ["-I", "-m", "compileall", "-q", "-j", "0", "-x", "/tests/", "--invalidation-mode", "unchecked-hash"];
    let _ = tool("python -m compileall", &python, env).args(compile).args([&site]).run(|_| ()).await;
    progress.step(3, "checking Python packages and building the font list");
    let cache = dir.join("share/matplotlib-cache");
    fs::create_dir_all(&cache).map_err(SetupError::io(&cache))?;
    let check =
        tool("the check of the Python packages", &python, env).env("MPLCONFIGDIR", &cache).env("MPLBACKEND", "agg");
    let report = check.args(["-I", "-B", "-c", CHECK]).run(|_| ()).await?;
    let last = report.lines().last().unwrap_or_default();
    serde_json::from_str(last).map_err(|error| SetupError::tool("the check of the Python packages", &error.to_string()))
}

fn pip(python: &Interpreter, dir: &Path, env: &HostEnvironment) -> Tool {
    let inside = dir.join("bin/python");
    let pip = if python.ensurepip {
        tool("pip", &inside, env).args(["-I", "-m", "pip"])
    } else {
        tool("pip", &python.base, env).args(["-I", "-m", "pip", "--python"]).args([&inside])
    };
    pip.args(["install", "--only-binary", ":all:", "--no-compile", "--no-input", "--disable-pip-version-check"])
        .args(["--progress-bar", "off", "--no-warn-script-location"])
        .env("PIP_ROOT_USER_ACTION", "ignore")
}

fn tool(name: &str, program: &Path, env: &HostEnvironment) -> Tool {
    Tool::new(name, program).environment(env)
}

/// Returns the first usable interpreter, preferring those that can create a complete environment without help.
async fn choose(config: &RuntimeConfig, env: &HostEnvironment) -> Result<Interpreter, SetupError> {
    let candidates = match &config.python {
        Some(path) => vec![path.clone()],
        None => candidates(env),
    };
    let (mut usable, mut refused): (Vec<Interpreter>, Vec<String>) = (Vec::new(), Vec::new());
    for path in candidates {
        match ask(&path).await {
            Ok(found) if usable.contains(&found) => {}
            Ok(found) if list_for(&found.full()).is_none() || found.implementation != "cpython" => {
                refused.push(found.unsupported())
            }
            Ok(found) if !found.ensurepip && !found.pip => refused.push(format!(
                "Python {} at `{}` has neither `ensurepip` nor `pip` (on Debian: apt-get install python{}-venv)",
                found.full(),
                found.base.display(),
                found.short()
            )),
            Ok(found) if exposes_home(&found.prefix, env) => refused.push(format!(
                "Python at `{}` is installed in `{}` itself, which a sandbox would then see",
                found.base.display(),
                found.prefix.display()
            )),
            Ok(found) => usable.push(found),
            Err(error) => refused.push(format!("`{}`: {error}", path.display())),
        }
    }
    let best = usable.iter().position(|found| found.ensurepip).unwrap_or(0);
    usable.into_iter().nth(best).ok_or(SetupError::NoPython(refused))
}

/// Returns whether this prefix would expose the home directory. Each sandbox sees the prefix of the interpreter, so the
/// prefix must not contain the home directory.
pub(crate) fn exposes_home(prefix: &Path, env: &HostEnvironment) -> bool {
    let special = prefix == Path::new("/usr");
    !special && (prefix.parent().is_none() || env.home.as_deref().is_some_and(|home| home.starts_with(prefix)))
}

fn candidates(env: &HostEnvironment) -> Vec<PathBuf> {
    let usual = ["/usr/local/bin", "/usr/bin"].map(PathBuf::from);
    let dirs: Vec<PathBuf> = env.path.iter().cloned().chain(usual).collect();
    let names = LISTS.iter().map(|(version, _)| format!("python{version}")).chain(["python3".into()]);
    let mut found: Vec<PathBuf> =
        names.flat_map(|name| dirs.iter().map(move |dir| dir.join(&name)).collect::<Vec<_>>()).collect();
    for versions in [".pyenv/versions", ".local/share/uv/python", ".asdf/installs/python"] {
        let Some(dir) = env.home.as_deref().map(|home| home.join(versions)) else { continue };
        let mut installed: Vec<PathBuf> =
            fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
        installed.sort();
        found.extend(installed.into_iter().rev().map(|dir| dir.join("bin/python3")));
    }
    let mut seen = std::collections::BTreeSet::new();
    found.retain(|path| is_binary(path) && path.canonicalize().is_ok_and(|real| seen.insert(real)));
    found
}

/// Returns whether a file is a binary. A shim of pyenv, asdf or the like is a script: it is slow, and it depends on the
/// environment and the directory in which it is started.
pub(crate) fn is_binary(path: &Path) -> bool {
    let mut magic = [0; 4];
    fs::File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok() && &magic == b"\x7fELF"
}

async fn ask(python: &Path) -> Result<Interpreter, SetupError> {
    let answer = Tool::new("python", python).args(["-I", "-c", QUESTION]).ask(Duration::from_secs(20)).await?;
    serde_json::from_str(&answer).map_err(|error| SetupError::tool("python", &error.to_string()))
}

impl Interpreter {
    fn full(&self) -> String {
        format!("{}.{}.{}", self.version.0, self.version.1, self.version.2)
    }

    fn short(&self) -> String {
        format!("{}.{}", self.version.0, self.version.1)
    }

    fn unsupported(&self) -> String {
        format!("{} {} at `{}` is not supported", self.implementation, self.full(), self.base.display())
    }
}

fn short(version: &str) -> &str {
    version.rsplit_once('.').map_or(version, |(short, _)| short)
}

fn list_for(version: &str) -> Option<&'static str> {
    LISTS.iter().find(|(known, _)| *known == short(version)).map(|(_, list)| *list)
}

fn recipe(list: &str, packages: &[String]) -> String {
    let mut packages = packages.to_vec();
    packages.sort();
    store::recipe(&[list, &packages.join(" "), SITE])
}

/// Returns `name==version` for each package of a list.
fn pins(list: &str) -> impl Iterator<Item = &str> {
    let starts = list.lines().filter(|line| line.contains("==") && !line.starts_with('#'));
    starts.filter_map(|line| line.split([' ', ';']).next())
}

#[cfg(test)]
mod tests {
    use testkit::scratch::Scratch;

    use super::*;

    #[test]
    fn each_list_pins_every_package_with_hashes_and_names_no_index() {
        let asked = include_str!("../pinned/python.in").lines().filter(|line| !line.starts_with('#'));
        let asked: Vec<&str> = asked.map(|line| line.split(['>', '<', '=']).next().unwrap()).collect();
        for (version, list) in LISTS {
            for name in &asked {
                assert!(pins(list).any(|pin| pin.starts_with(&format!("{name}=="))), "{name} for Python {version}");
            }
            for line in list.lines().filter(|line| !line.starts_with('#')) {
                let line = line.trim_end_matches(" \\").trim_start();
                assert!(line.starts_with("--hash=sha256:") || line.contains("=="), "{version}: {line}");
            }
            let joined = list.replace("\\\n", " ");
            let unhashed = joined.lines().find(|line| line.contains("==") && !line.contains("--hash=sha256:"));
            assert_eq!(unhashed, None, "Python {version}");
        }
    }

    #[test]
    fn a_shim_is_not_an_interpreter() {
        let scratch = Scratch::new();
        let shim = scratch.write("python3", "#!/bin/sh\nexec python3 \"$@\"\n");
        assert!(!is_binary(&shim));
        assert!(is_binary(Path::new("/bin/sh")));
    }

    #[test]
    fn a_prefix_that_holds_the_home_directory_is_refused() {
        let env = HostEnvironment { home: Some("/home/u".into()), ..HostEnvironment::default() };
        assert!(exposes_home(Path::new("/"), &env));
        assert!(exposes_home(Path::new("/home"), &env));
        assert!(exposes_home(Path::new("/home/u"), &env));
        assert!(!exposes_home(Path::new("/home/u/.pyenv/versions/3.13.0"), &env));
        assert!(!exposes_home(Path::new("/usr"), &env));
    }
}
