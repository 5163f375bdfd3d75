//! Finds and queries a Python interpreter of this machine, and builds an environment on it from a pinned and hashed
//! list.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use super::chosen::{Chosen, Preset, Wanted};
use super::kernel::PYTHON;
use super::process::Tool;
use super::store::{self, Marker, Runtime};
use super::{HostEnvironment, RuntimeConfig, Setup, SetupError};

/// Supported versions with their package lists, in order of preference. The part up to the line of [`DATA`] is the list
/// of the preset `slim`.
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

/// Beginning of the line before the packages that only the preset `data` has. The line contains their size.
const DATA: &str = "# data: ";
/// Beginning of the line with the size of the other packages.
const SLIM: &str = "# slim: ";

const QUESTION: &str = include_str!("python/question.py");

/// A program that imports every package once, so that broken ones are noticed now, and reports the versions.
const CHECK: &str = include_str!("python/check.py");

/// A program that prints the packages in a directory.
const PACKAGES: &str = include_str!("python/packages.py");

/// A program that runs at each start of Python. matplotlib needs a writable directory and builds its font list there,
/// which takes seconds; this puts a symlink to the list made at set-up into the writable directory. It also opens the
/// packages that the operator added.
const SITE: &str = include_str!("python/site.py");

/// Lines for the end of modules that draw text. With them these modules fall back to the font for Chinese, Japanese and
/// Korean, also if the code, a style or seaborn chooses other font families.
const FALLBACK_FONTS: [(&str, &str); 2] = [
    ("matplotlib/font_manager.py", include_str!("python/matplotlib_font.py")),
    ("vl_convert/__init__.py", include_str!("python/vl_convert_font.py")),
];

/// Package that contains this font.
const FONT_PACKAGE: &str = "noto_cjk_sans_otc";
/// Configuration of fontconfig, in the runtime, that offers this font to browsers and other programs.
const FONTCONFIG: &str = "share/fonts.conf";

/// Pinned pip for the code in sandboxes, installed if the environment is created without pip.
const PIP: &str = "pip==25.3 --hash=sha256:9655943313a94722b7774661c21049070f6bbb0a1516bf02f7c8d5d9201514cd\n";

/// A prepared environment, and the packages that the operator added to it. The packages are in a separate directory, so
/// adding one changes no file that a server uses.
#[derive(Debug, Clone)]
pub struct Python {
    pub base: Runtime,
    pub(crate) added: Option<Runtime>,
}

/// Returns the prepared environment that fits the configuration and the choices, if there is one. It is not verified
/// yet.
pub async fn find(config: &RuntimeConfig, env: &HostEnvironment) -> Result<Option<Python>, SetupError> {
    let wanted = Chosen::read(&config.dir)?.wanted(config);
    let Some(base) = find_base(config, &wanted, env).await else { return Ok(None) };
    let added = find_added(&base, config, &wanted);
    Ok((wanted.python.is_empty() || added.is_some()).then_some(Python { base, added }))
}

pub(crate) async fn find_base(config: &RuntimeConfig, wanted: &Wanted, env: &HostEnvironment) -> Option<Runtime> {
    let interpreter = match &config.python {
        Some(path) => Some(ask(path).await.ok()?.base),
        None => None,
    };
    let fits = |runtime: &Runtime| {
        let list = list_for(&runtime.marker.version, wanted.preset);
        let base = runtime.marker.base.as_deref();
        list.is_some_and(|list| runtime.marker.recipe == recipe(list))
            && interpreter.as_deref().is_none_or(|wanted| base == Some(wanted))
            && !env.can_be_changed(&runtime.dir.join("bin/python"))
    };
    store::complete(&config.dir, "python-").into_iter().find(fits)
}

fn find_added(base: &Runtime, config: &RuntimeConfig, wanted: &Wanted) -> Option<Runtime> {
    let recipe = added_recipe(base, wanted);
    let mut found = store::complete(&config.dir, "added-").into_iter();
    found.find(|runtime| !wanted.python.is_empty() && runtime.marker.recipe == recipe)
}

impl Python {
    /// Returns the version of the interpreter.
    pub fn version(&self) -> &str {
        self.base.version()
    }

    /// Returns the installed packages with their versions.
    pub fn packages(&self) -> BTreeMap<String, String> {
        let added = self.added.iter().flat_map(|added| added.packages().clone());
        self.base.packages().clone().into_iter().chain(added).collect()
    }

    /// Returns the directory of the added packages, if there are any, for a sandbox that shows them as `dir`.
    pub(crate) fn added_site(&self, dir: &Path) -> Option<PathBuf> {
        self.added.as_ref().map(|_| site_of(dir, self.version()))
    }

    /// Returns the configuration of fontconfig that offers the runtime's font.
    pub(crate) fn fontconfig(&self) -> PathBuf {
        self.base.dir.join(FONTCONFIG)
    }

    /// Checks that the environment still uses the interpreter for which it was made, and that its files are unchanged.
    pub async fn verify(&self) -> Result<(), SetupError> {
        let runtime = &self.base;
        let files = tokio::task::spawn_blocking({
            let python = self.clone();
            move || python.base.verify().and_then(|()| python.added.iter().try_for_each(Runtime::verify))
        });
        let now = ask(&runtime.dir.join("bin/python")).await.ok().map(|found| found.short());
        let then = short(&runtime.marker.version);
        if now.as_deref() != Some(then) {
            let now = now.unwrap_or_else(|| "missing".into());
            let dir = runtime.dir.clone();
            let (expected, found) = (format!("Python {then}"), format!("Python {now}"));
            return Err(SetupError::Modified { dir, expected, found });
        }
        files.await.unwrap_or_else(|lost| Err(SetupError::tool("the check of the runtime", &lost.to_string())))
    }
}

/// Returns the version of the interpreter on which a set-up would build.
pub async fn available(config: &RuntimeConfig, env: &HostEnvironment) -> Result<String, SetupError> {
    choose(config, env).await.map(|found| found.full())
}

pub(crate) async fn build(setup: &Setup<'_>) -> Result<Runtime, SetupError> {
    let Setup { config, wanted, env, progress, lock } = setup;
    progress.step(1, "finding Python");
    let python = choose(config, env).await?;
    let version = python.full();
    let list = list_for(&version, wanted.preset).ok_or_else(|| SetupError::NoPython(vec![python.unsupported()]))?;
    let recipe = recipe(list);
    let name =
        format!("python-{}-{}", python.short(), &store::recipe(&[&recipe, &python.base.to_string_lossy()])[..12]);
    let dir = lock.start(&name)?;
    progress.step(1, &format!("making an environment for Python {version}"));
    let mut venv = vec!["-I", "-m", "venv"];
    venv.extend((!python.ensurepip).then_some("--without-pip"));
    tool("python -m venv", &python.base, env).args(venv).args([&dir]).run(|_| ()).await?;
    install(&python, &dir, list, setup).await?;
    progress.step(3, "compiling Python packages");
    let packages = finish(&dir, &version, setup).await?;
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
    let Setup { env, progress, .. } = setup;
    let requirements = dir.join("requirements.txt");
    fs::write(&requirements, list).map_err(SetupError::io(&requirements))?;
    let total = pins(list).count();
    let mut seen = 0;
    progress.step(2, &format!("installing Python packages … {total} to fetch"));
    pip(python.outside(), dir, env)
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
        pip(python.outside(), dir, env).args(hashed).args([&own]).run(|_| ()).await?;
    }
    Ok(())
}

/// Returns the packages that the operator added to `base`, and installs them if they are not there.
pub(crate) async fn prepare_added(
    base: &Runtime,
    setup: &Setup<'_>,
    force: bool,
) -> Result<Option<Runtime>, SetupError> {
    let Setup { config, wanted, progress, .. } = setup;
    if wanted.python.is_empty() {
        return Ok(None);
    }
    match find_added(base, config, wanted).filter(|_| !force) {
        Some(runtime) => Ok(Some(runtime)),
        None => {
            let names = wanted.python.join("`, `");
            progress.say(&format!("warning: `{names}` were added and are not pinned to hashes"));
            add(base, setup).await.map(Some)
        }
    }
}

/// Installs the added packages beside `base`, which satisfies requirements and is not changed.
async fn add(base: &Runtime, setup: &Setup<'_>) -> Result<Runtime, SetupError> {
    let Setup { wanted, env, progress, lock, .. } = setup;
    let version = &base.marker.version;
    let recipe = added_recipe(base, wanted);
    let dir = lock.start(&format!("added-{}-{}", short(version), &recipe[..12]))?;
    let site = site_of(&dir, version);
    fs::create_dir_all(&site).map_err(SetupError::io(&site))?;
    // A constraint with hashes would demand hashes for everything.
    let constraints = dir.join("constraints.txt");
    let pinned: String = base.packages().iter().map(|(name, version)| format!("{name}=={version}\n")).collect();
    fs::write(&constraints, pinned).map_err(SetupError::io(&constraints))?;
    let pip = pip(None, &base.dir, env).args(["--prefix"]).args([&dir]);
    let pip = pip.args(["--constraint"]).args([&constraints]).args(["--"]).args(&wanted.python);
    pip.run(|line| {
        if let Some(package) = line.strip_prefix("Collecting ") {
            progress.step(2, &format!("installing your Python packages … {package}"));
        }
    })
    .await?;
    name_interpreter(&dir, &base.dir)?;
    let python = base.dir.join("bin/python");
    compile(&python, &site, env).await;
    let list = tool("python", &python, env).args(["-I", "-B", "-c", PACKAGES]).args([&site]);
    let packages = packages_in(&list.run(|_| ()).await?)?;
    lock.finish(dir, Marker { recipe, version: version.clone(), packages, ..Marker::default() })
}

/// Compiles bytecode and builds the font list now, because sandboxes see the environment read-only. Returns the
/// installed packages.
async fn finish(dir: &Path, version: &str, setup: &Setup<'_>) -> Result<BTreeMap<String, String>, SetupError> {
    let Setup { env, progress, .. } = setup;
    let (python, site) = (dir.join("bin/python"), site_of(dir, version));
    if !site.is_dir() {
        return Err(SetupError::tool("python -m venv", "made no site-packages"));
    }
    fs::write(site.join("_sandpool_site.py"), SITE).map_err(SetupError::io(&site))?;
    fs::write(site.join("sandpool.pth"), "import _sandpool_site\n").map_err(SetupError::io(&site))?;
    for (path, lines) in FALLBACK_FONTS.map(|(name, lines)| (site.join(name), lines)) {
        if path.exists() {
            let mut file = fs::OpenOptions::new().append(true).open(&path).map_err(SetupError::io(&path))?;
            file.write_all(lines.as_bytes()).map_err(SetupError::io(&path))?;
        }
    }
    name_interpreter(dir, dir)?;
    compile(&python, &site, env).await;
    progress.step(3, "checking Python packages and building the font lists");
    let cache = dir.join("share/matplotlib-cache");
    fs::create_dir_all(&cache).map_err(SetupError::io(&cache))?;
    offer_font(dir, &site, env).await?;
    let check = tool("the check of the Python packages", &python, env);
    let check = check.env("MPLCONFIGDIR", &cache).env("MPLBACKEND", "agg").env("FONTCONFIG_FILE", dir.join(FONTCONFIG));
    let report = check.args(["-I", "-B", "-c", CHECK]).run(|_| ()).await?;
    packages_in(&report)
}

/// Lets the scripts of `dir` start the interpreter of the environment `base` by its name inside sandboxes. The path that
/// `pip` writes into them would not exist there any more if the runtime was copied to another place.
fn name_interpreter(dir: &Path, base: &Path) -> Result<(), SetupError> {
    let bin = dir.join("bin");
    let Ok(entries) = fs::read_dir(&bin) else { return Ok(()) };
    for path in entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_file())).map(|e| e.path()) {
        let content = fs::read(&path).map_err(SetupError::io(&path))?;
        if let Ok(script) = String::from_utf8(content) {
            let named = script.replace(&*base.to_string_lossy(), PYTHON);
            fs::write(&path, named).map_err(SetupError::io(&path))?;
        }
    }
    Ok(())
}

/// Writes the configuration of fontconfig and the cache of the font. Without the cache, every start of a browser would
/// build it.
async fn offer_font(dir: &Path, site: &Path, env: &HostEnvironment) -> Result<(), SetupError> {
    let (path, cache) = (dir.join(FONTCONFIG), dir.join("share/fontconfig-cache"));
    fs::create_dir_all(&cache).map_err(SetupError::io(&cache))?;
    let escaped = |path: &Path| path.to_string_lossy().replace('&', "&amp;").replace('<', "&lt;");
    let text = format!(
        "<?xml version=\"1.0\"?>\n<!DOCTYPE fontconfig SYSTEM \"urn:fontconfig:fonts.dtd\">\n<fontconfig>\n  \
         <dir>{}</dir>\n  <cachedir>{}</cachedir>\n  \
         <include ignore_missing=\"yes\">/etc/fonts/fonts.conf</include>\n</fontconfig>\n",
        escaped(&site.join(FONT_PACKAGE)),
        escaped(&cache)
    );
    fs::write(&path, text).map_err(SetupError::io(&path))?;
    // Without this program a browser reads the font itself when it starts.
    let _ = tool("fc-cache", Path::new("fc-cache"), env).env("FONTCONFIG_FILE", &path).run(|_| ()).await;
    Ok(())
}

/// Compiles what is in `site`. The tests of the packages, a third of all files, are left out. Some files are not meant
/// to compile; those that matter are imported by [`CHECK`].
async fn compile(python: &Path, site: &Path, env: &HostEnvironment) {
    let compile = ["-I", "-m", "compileall", "-q", "-j", "0", "-x", "/tests/", "--invalidation-mode", "unchecked-hash"];
    let _ = tool("python -m compileall", python, env).args(compile).args([site]).run(|_| ()).await;
}

fn packages_in(report: &str) -> Result<BTreeMap<String, String>, SetupError> {
    let last = report.lines().last().unwrap_or_default();
    serde_json::from_str(last).map_err(|error| SetupError::tool("the check of the Python packages", &error.to_string()))
}

fn site_of(dir: &Path, version: &str) -> PathBuf {
    dir.join(format!("lib/python{}/site-packages", short(version)))
}

/// Returns the `pip` of the environment in `dir`, or of the interpreter `outside`, with the options of every
/// installation.
fn pip(outside: Option<&Path>, dir: &Path, env: &HostEnvironment) -> Tool {
    let inside = dir.join("bin/python");
    let pip = match outside {
        None => tool("pip", &inside, env).args(["-I", "-m", "pip"]),
        Some(base) => tool("pip", base, env).args(["-I", "-m", "pip", "--python"]).args([&inside]),
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
        if env.can_be_changed(&path) {
            refused.push(format!("`{}` is in a writable mount, where code can change it", path.display()));
            continue;
        }
        match ask(&path).await {
            Ok(found) if usable.contains(&found) => {}
            Ok(found) if !is_supported(&found.full()) || found.implementation != "cpython" => {
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

    /// Returns this interpreter if an environment on it has no `pip` at first.
    fn outside(&self) -> Option<&Path> {
        (!self.ensurepip).then_some(&self.base)
    }

    fn unsupported(&self) -> String {
        format!("{} {} at `{}` is not supported", self.implementation, self.full(), self.base.display())
    }
}

fn short(version: &str) -> &str {
    version.rsplit_once('.').map_or(version, |(short, _)| short)
}

fn is_supported(version: &str) -> bool {
    LISTS.iter().any(|(known, _)| *known == short(version))
}

/// Returns the pinned packages of a preset for a version.
fn list_for(version: &str, preset: Preset) -> Option<&'static str> {
    let (_, list) = LISTS.iter().find(|(known, _)| *known == short(version))?;
    match preset {
        Preset::Data => Some(list),
        Preset::Slim => list.split(DATA).next(),
    }
}

/// Returns the size of the download of a preset in megabytes, for the version of Python for which it is largest.
pub(crate) fn megabytes(preset: Preset) -> u32 {
    let parts: &[&str] = match preset {
        Preset::Slim => &[SLIM],
        Preset::Data => &[SLIM, DATA],
    };
    let size = |list: &str, part: &str| -> u32 {
        let line = list.lines().find_map(|line| line.strip_prefix(part));
        line.and_then(|line| line.split(' ').next()?.parse().ok()).unwrap_or(0)
    };
    LISTS.iter().map(|(_, list)| parts.iter().map(|part| size(list, part)).sum()).max().unwrap_or(0)
}

fn recipe(list: &str) -> String {
    let [(_, matplotlib), (_, vl_convert)] = FALLBACK_FONTS;
    store::recipe(&[list, SITE, matplotlib, vl_convert, PYTHON])
}

/// Returns the recipe of the packages that are added to `base`.
fn added_recipe(base: &Runtime, wanted: &Wanted) -> String {
    store::recipe(&[&base.marker.recipe, &base.dir.to_string_lossy(), &wanted.python.join(" ")])
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

    fn asked(text: &'static str) -> impl Iterator<Item = &'static str> {
        let names = text.lines().filter(|line| !line.starts_with(['#', '-']));
        names.map(|line| line.split(['>', '<', '=']).next().unwrap())
    }

    #[test]
    fn each_list_pins_every_package_with_hashes_and_names_no_index() {
        let slim: Vec<&str> = asked(include_str!("../pinned/slim.in")).collect();
        let data: Vec<&str> = asked(include_str!("../pinned/data.in")).chain(slim.iter().copied()).collect();
        for (version, whole) in LISTS {
            for (preset, asked) in [(Preset::Slim, &slim), (Preset::Data, &data)] {
                let list = list_for(&format!("{version}.0"), preset).unwrap();
                for name in asked {
                    let pinned = pins(list).any(|pin| pin.starts_with(&format!("{name}==")));
                    assert!(pinned, "{name} for Python {version}, {preset:?}");
                }
            }
            assert!(!list_for(&format!("{version}.0"), Preset::Slim).unwrap().contains("plotly"));
            for line in whole.lines().filter(|line| !line.starts_with('#')) {
                let line = line.trim_end_matches(" \\").trim_start();
                assert!(line.starts_with("--hash=sha256:") || line.contains("=="), "{version}: {line}");
            }
            let joined = whole.replace("\\\n", " ");
            let unhashed = joined.lines().find(|line| line.contains("==") && !line.contains("--hash=sha256:"));
            assert_eq!(unhashed, None, "Python {version}");
        }
    }

    #[test]
    fn a_set_up_downloads_less_than_400_megabytes() {
        let (slim, data) = (megabytes(Preset::Slim), megabytes(Preset::Data));
        assert!(100 < slim && slim < data && data + crate::node::MEGABYTES < 400, "{slim} {data}");
    }

    #[test]
    fn a_shim_is_not_an_interpreter() {
        let scratch = Scratch::new();
        let shim = scratch.write("python3", "#!/bin/sh\nexec python3 \"$@\"\n");
        assert!(!is_binary(&shim));
        assert!(is_binary(Path::new("/bin/sh")));
    }

    #[test]
    fn the_scripts_of_a_runtime_do_not_name_its_place_on_the_host() {
        let scratch = Scratch::new();
        let base = scratch.0.join("python-3.11-0");
        fs::create_dir_all(base.join("bin")).unwrap();
        // The second form is that of `pip` for a path that is too long for a first line.
        let forms = [
            ("pip", "#!{}/bin/python\nimport pip\n"),
            ("f2py", "#!/bin/sh\n'''exec' \"{}/bin/python\" \"$0\" \"$@\"\n' '''\n"),
        ];
        for (name, form) in forms {
            fs::write(base.join("bin").join(name), form.replace("{}", &base.to_string_lossy())).unwrap();
        }
        fs::write(base.join("bin/tool"), b"\x7fELF\xff").unwrap();
        std::os::unix::fs::symlink("/bin/true", base.join("bin/python")).unwrap();
        name_interpreter(&base, &base).unwrap();
        for (name, form) in forms {
            assert_eq!(fs::read_to_string(base.join("bin").join(name)).unwrap(), form.replace("{}", PYTHON), "{name}");
        }
        assert_eq!(fs::read(base.join("bin/tool")).unwrap(), b"\x7fELF\xff");
        assert!(base.join("bin/python").is_symlink());
    }

    /// W64: code that can write to `~/.pyenv` puts an interpreter there. It would be executed outside of a sandbox.
    #[tokio::test]
    async fn w64_an_interpreter_that_code_can_change_is_not_executed() {
        let scratch = Scratch::new();
        let home = scratch.0.canonicalize().unwrap();
        let bin = home.join(".pyenv/versions/3.13.0/bin");
        fs::create_dir_all(&bin).unwrap();
        fs::copy("/bin/echo", bin.join("python3")).unwrap();
        let mut env = HostEnvironment { home: Some(home.clone()), ..HostEnvironment::default() };
        let mut config = RuntimeConfig { dir: home.join("runtimes"), ..crate::tests::config(None, &[]) };
        assert!(candidates(&env).contains(&bin.join("python3")));
        env.writable = vec![home.join(".pyenv")];
        config.python = Some(bin.join("python3"));
        let refused = choose(&config, &env).await.err().unwrap().to_string();
        assert!(refused.contains("is in a writable mount, where code can change it"), "{refused}");
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
