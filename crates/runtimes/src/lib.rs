//! Finds the language runtimes, or prepares them once with visible progress. Sandboxes then use them read-only and
//! offline.
//!
//! `python`, `node` and `browser` know where each runtime comes from, `trust` decides which programs code could change,
//! `chosen` remembers which packages a runtime has to contain, `store` stores each runtime completely or not at all, and
//! `kernel` defines how a sandbox starts it. The drivers belong to the guest. This crate reads no environment and no
//! configuration; its caller passes both in.
#![warn(unreachable_pub)]

pub mod browser;
mod chosen;
mod kernel;
pub mod node;
mod process;
pub mod python;
mod store;
mod trust;

use std::ffi::OsString;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use chosen::{Chosen, Wanted};
use node::Node;
use python::Python;
use store::{Lock, Runtime};
use tokio::sync::watch;

pub use chosen::Preset;
pub use trust::{Resolved, libraries};

const STEPS: usize = 5;

/// The operator's settings for the runtimes.
#[derive(Debug, Clone, PartialEq)]
pub struct RuntimeConfig {
    /// Directory of the prepared runtimes.
    pub dir: PathBuf,
    pub python: Option<PathBuf>,
    /// Preset of the configuration, which overrides the one that a set-up has chosen.
    pub preset: Option<Preset>,
    /// Python packages besides those of the preset.
    pub packages: Vec<String>,
    pub node: NodeChoice,
    pub threads: u32,
    /// Whether interpreters are forked from a zygote.
    pub warm: bool,
    /// Modules that the zygote imports.
    pub preload: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeChoice {
    /// The Node of this machine if it is new enough, otherwise the pinned one.
    Auto,
    Pinned,
    Path(PathBuf),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BrowserChoice {
    /// Chromium, if this machine has it.
    Auto,
    Off,
    Path(PathBuf),
}

/// The part of the server's environment that a set-up needs.
#[derive(Debug, Clone, Default)]
pub struct HostEnvironment {
    pub home: Option<PathBuf>,
    /// Directories in which programs are looked for.
    pub path: Vec<PathBuf>,
    /// Directories without symlinks that code can write to. No program is executed from them.
    pub writable: Vec<PathBuf>,
    /// Variables that are passed on to `pip` and `npm`.
    pub handed_on: Vec<(&'static str, OsString)>,
}

/// The options of one `sandpool setup`. Later set-ups keep its choice of the preset and of packages.
#[derive(Debug, Clone, Default)]
pub struct SetupRequest {
    /// Whether to prepare runtimes again that are ready.
    pub force: bool,
    pub preset: Option<Preset>,
    /// Packages to add, for Python, or for JavaScript if the name begins with `npm:`.
    pub add: Vec<String>,
    /// Packages to remove, which an earlier set-up added.
    pub remove: Vec<String>,
}

/// The runtimes of this machine, ready for use. Node and its packages may be missing, with the reason; Python may not.
#[derive(Debug)]
pub struct Prepared {
    pub python: Python,
    pub node: Result<Node, SetupError>,
    /// Packages for JavaScript; `None` if none are wanted.
    pub node_packages: Result<Option<Runtime>, SetupError>,
}

#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    #[error("no usable Python 3.11 to 3.14 found; install one with its venv module (on Debian: apt-get install python3 python3-venv), or name one with `--python PATH`{}", list(.0))]
    NoPython(Vec<String>),
    #[error("no usable Node: {0}; install Node 22 or newer, or npm (on Debian: apt-get install npm)")]
    NoNode(String),
    #[error(
        "packages for JavaScript need `npm`, which this machine does not have; install it (on Debian: apt-get install npm), or leave these packages out with `sandpool setup --preset slim`"
    )]
    NoNpm,
    #[error("`{0}` is not the name of a package; write `polars`, `polars==1.2.3`, or `npm:lodash` for JavaScript")]
    NoPackageName(String),
    #[error("`{0}` was not added by `sandpool setup --add`")]
    NotAdded(String),
    #[error("no usable Chromium found; install its headless shell (on Debian: apt-get install chromium-headless-shell), or name the binary of a Chromium with `browser` in sandpool.toml{}", list(.0))]
    NoBrowser(Vec<String>),
    #[error("{name}: {why}")]
    Tool { name: String, why: String },
    #[error("runtime `{}` was changed since it was prepared (expected {expected}, found {found}); run `sandpool setup --force`", dir.display())]
    Modified { dir: PathBuf, expected: String, found: String },
    #[error("runtime `{}` was changed or copied since an earlier version of sandpool prepared it (expected {expected}, found {found}); run `sandpool setup --force`", dir.display())]
    ModifiedOrCopied { dir: PathBuf, expected: String, found: String },
    #[error("`{}`: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
}

fn list(tried: &[String]) -> String {
    tried.iter().map(|one| format!("\n  {one}")).collect()
}

impl SetupError {
    fn io(path: &Path) -> impl Fn(std::io::Error) -> Self {
        move |source| Self::Io { path: path.into(), source }
    }

    fn tool(name: &str, why: &str) -> Self {
        Self::Tool { name: name.into(), why: why.into() }
    }
}

/// Progress of the preparation, shown on stderr and to clients that ask meanwhile. The texts contain no path, because
/// clients must not see one.
pub struct Progress {
    now: watch::Sender<String>,
}

impl Progress {
    pub fn new() -> (Self, watch::Receiver<String>) {
        let (now, watcher) = watch::channel(String::from("starting"));
        (Self { now }, watcher)
    }

    fn step(&self, step: usize, what: &str) {
        self.say(&format!("[{step}/{STEPS}] {what}"));
    }

    fn say(&self, line: &str) {
        if *self.now.borrow() != line {
            let _ = writeln!(std::io::stderr(), "{line}");
            self.now.send_replace(line.into());
        }
    }
}

/// Everything that the steps of a set-up need.
struct Setup<'a> {
    config: &'a RuntimeConfig,
    wanted: &'a Wanted,
    env: &'a HostEnvironment,
    progress: &'a Progress,
    lock: &'a Lock,
}

/// Uses the runtimes that exist and prepares those that are missing.
pub async fn prepare(
    config: &RuntimeConfig,
    env: &HostEnvironment,
    progress: &Progress,
) -> Result<Prepared, SetupError> {
    match find(config, env).await? {
        Some(ready) => Ok(ready),
        None => set_up_available(config, env, progress, &SetupRequest::default()).await,
    }
}

/// Prepares what is missing for the request, and remembers its choices once Python is ready. Before the first download
/// it checks that nothing is missing that only the operator can install.
pub async fn set_up(
    config: &RuntimeConfig,
    env: &HostEnvironment,
    progress: &Progress,
    request: &SetupRequest,
) -> Result<Prepared, SetupError> {
    let wanted = Chosen::read(&config.dir)?.after(request)?.wanted(config);
    node::check_npm(config, &wanted, env, request.force)?;
    set_up_available(config, env, progress, request).await
}

/// Prepares what is missing, and does without Node and its packages if they cannot be prepared.
async fn set_up_available(
    config: &RuntimeConfig,
    env: &HostEnvironment,
    progress: &Progress,
    request: &SetupRequest,
) -> Result<Prepared, SetupError> {
    let force = request.force;
    let lock = Lock::take(&config.dir, progress).await?;
    lock.remove_rubbish()?;
    let chosen = Chosen::read(&config.dir)?.after(request)?;
    let wanted = &chosen.wanted(config);
    let setup = Setup { config, wanted, env, progress, lock: &lock };
    // The previous holder of the lock may have prepared exactly this runtime.
    let base = if force { None } else { python::find_base(config, wanted, env).await };
    let fetches_node = matches!(node::find(config, env).await, Ok(None));
    let megabytes = if base.is_none() { python::megabytes(wanted.preset) } else { 0 }
        + if fetches_node { node::MEGABYTES } else { 0 };
    if megabytes > 0 {
        let preset = wanted.preset.name();
        progress
            .say(&format!("downloads at most {megabytes} MB (preset `{preset}`), less what pip and npm have cached"));
    }
    let base = match base {
        Some(runtime) => runtime,
        None => python::build(&setup).await?,
    };
    let added = python::prepare_added(&base, &setup, force).await?;
    chosen.write(&config.dir)?;
    let node = prepare_node(&setup, force).await;
    let node_packages = node::prepare_packages(&setup, force).await;
    progress.step(5, "checking");
    let python = Python { base, added };
    python.verify().await?;
    progress.say("runtimes are ready");
    Ok(Prepared { python, node, node_packages })
}

async fn prepare_node(setup: &Setup<'_>, force: bool) -> Result<Node, SetupError> {
    setup.progress.step(4, "finding Node");
    match node::find(setup.config, setup.env).await? {
        Some(node @ Node::Host { .. }) => Ok(node),
        Some(node) if !force => Ok(node),
        _ => node::build(setup).await,
    }
}

/// Returns the existing runtimes, verified. It downloads nothing, so that the start of a server can wait for it.
/// Missing packages for JavaScript are no reason to download either.
pub async fn find(config: &RuntimeConfig, env: &HostEnvironment) -> Result<Option<Prepared>, SetupError> {
    let wanted = Chosen::read(&config.dir)?.wanted(config);
    let python = async {
        let Some(python) = python::find(config, env).await? else { return Ok(None) };
        python.verify().await.map(|()| Some(python))
    };
    let (python, node) = tokio::join!(python, node::find(config, env));
    let Some(python) = python? else { return Ok(None) };
    let node = match node {
        Ok(Some(node)) => node.verify().map(|()| node),
        // A wrong path that the operator named cannot be repaired here; anything else can be prepared.
        Err(error) if matches!(config.node, NodeChoice::Path(_)) => Err(error),
        Ok(None) | Err(_) => return Ok(None),
    };
    let node_packages = node::find_packages(config, &wanted);
    Ok(Some(Prepared { python, node, node_packages }))
}

#[cfg(test)]
mod tests {
    use testkit::scratch::Scratch;

    use super::*;

    pub(crate) fn config(preset: Option<Preset>, packages: &[&str]) -> RuntimeConfig {
        RuntimeConfig {
            dir: PathBuf::new(),
            python: None,
            preset,
            packages: packages.iter().map(|&name| name.into()).collect(),
            node: NodeChoice::Auto,
            threads: 1,
            warm: true,
            preload: Vec::new(),
        }
    }

    #[tokio::test]
    async fn a_set_up_without_the_npm_that_it_needs_ends_before_it_does_anything() {
        let place = Scratch::new();
        let config = RuntimeConfig { dir: place.0.clone(), ..config(None, &[]) };
        let (env, (progress, said)) = (HostEnvironment::default(), Progress::new());
        let javascript =
            SetupRequest { preset: Some(Preset::Slim), add: vec!["npm:lodash".into()], ..SetupRequest::default() };
        for request in [SetupRequest::default(), javascript] {
            let ended = set_up(&config, &env, &progress, &request).await;
            assert!(matches!(ended, Err(SetupError::NoNpm)), "{ended:?}");
        }
        assert_eq!((&**said.borrow(), std::fs::read_dir(&place.0).unwrap().count()), ("starting", 0));
        let slim = SetupRequest { preset: Some(Preset::Slim), ..SetupRequest::default() };
        let slim = Chosen::default().after(&slim).unwrap().wanted(&config);
        assert!(node::check_npm(&config, &slim, &env, true).is_ok(), "it has no packages for JavaScript");
    }
}
