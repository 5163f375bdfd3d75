//! The language runtimes: found, or prepared once with visible progress, then used read-only and offline.
//!
//! `python`, `node` and `browser` know where each comes from, `store` keeps what was built (whole or not at all), `kernel` says how a sandbox
//! starts them. What a driver does is the guest's matter.

pub mod browser;
mod kernel;
pub mod node;
mod process;
pub mod python;
pub mod store;

use std::io::Write as _;
use std::path::{Path, PathBuf};

pub use node::Node;
use store::Lock;
pub use store::Runtime;
use tokio::sync::watch;

use crate::config::{Environment, NodeChoice, RuntimeConfig};

const STEPS: usize = 5;

/// The runtimes of this machine, ready. JavaScript may be missing, with the reason; Python may not.
#[derive(Debug)]
pub struct Prepared {
    pub python: Runtime,
    pub node: Result<Node, SetupError>,
}

#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    #[error("no usable Python 3.11 to 3.14 found; install one with its venv module (on Debian: apt-get install python3 python3-venv), or name one with `--python PATH`{}", list(.0))]
    NoPython(Vec<String>),
    #[error("no usable Node: {0}; install Node 22 or newer, or npm (on Debian: apt-get install npm)")]
    NoNode(String),
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

/// What is going on, on stderr and for whoever asks meanwhile. Says nothing that a client must not read: no path.
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

/// Uses what is there and prepares what is not. `force` prepares anew in any case.
pub async fn prepare(
    config: &RuntimeConfig,
    env: &Environment,
    progress: &Progress,
    force: bool,
) -> Result<Prepared, SetupError> {
    if !force && let Some(ready) = find(config, env).await? {
        return Ok(ready);
    }
    let lock = Lock::take(&config.dir, progress).await?;
    lock.remove_rubbish()?;
    // Whoever held the lock may have prepared just this.
    let found = if force { None } else { python::find(config).await };
    let python = match found {
        Some(runtime) => runtime,
        None => python::build(&lock, config, env, progress).await?,
    };
    let node = prepare_node(&lock, config, env, progress, force).await;
    progress.step(5, "checking");
    python::verify(&python).await?;
    progress.say("runtimes are ready");
    Ok(Prepared { python, node })
}

async fn prepare_node(
    lock: &Lock,
    config: &RuntimeConfig,
    env: &Environment,
    progress: &Progress,
    force: bool,
) -> Result<Node, SetupError> {
    progress.step(4, "finding Node");
    match node::find(config, env).await? {
        Some(node @ Node::Host { .. }) => Ok(node),
        Some(node) if !force => Ok(node),
        _ => node::build(lock, env, progress).await,
    }
}

/// What is already there, verified. Nothing is fetched or changed. A server's start waits for it.
pub async fn find(config: &RuntimeConfig, env: &Environment) -> Result<Option<Prepared>, SetupError> {
    let python = async {
        let Some(runtime) = python::find(config).await else { return Ok(None) };
        python::verify(&runtime).await.map(|()| Some(runtime))
    };
    let (python, node) = tokio::join!(python, node::find(config, env));
    let Some(python) = python? else { return Ok(None) };
    let node = match node {
        Ok(Some(node)) => node.verify().map(|()| node),
        // A path that was named and is wrong stays wrong; anything else can be prepared.
        Err(error) if matches!(config.node, NodeChoice::Path(_)) => Err(error),
        Ok(None) | Err(_) => return Ok(None),
    };
    Ok(Some(Prepared { python, node }))
}
