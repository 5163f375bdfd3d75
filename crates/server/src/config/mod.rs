//! One typed configuration: file < environment < flags, each value with where it came from.
//!
//! `settings` is the table of what can be set, `environment` the one reader of the environment, `resolve` puts the sources over
//! each other. Nothing else in the program reads a file, a variable or a flag to decide how to behave.

pub mod environment;
mod resolve;
pub mod settings;

use std::path::PathBuf;
use std::time::Duration;

pub use environment::Environment;
pub use resolve::{ConfigError, Effective, Given, Origin, Sources};
use sandbox::Level;

#[derive(Debug, Clone)]
pub struct Config {
    /// None: what suits the command.
    pub log: Option<String>,
    pub dialect: String,
    pub lang: Option<String>,
    pub floor: Level,
    pub state_dir: PathBuf,
    pub runtimes: RuntimeConfig,
    pub agentrun: Agentrun,
    /// The same values untyped, for `sandpool config`.
    pub effective: Effective,
}

#[derive(Debug, Clone, PartialEq)]
pub struct RuntimeConfig {
    pub dir: PathBuf,
    pub python: Option<PathBuf>,
    pub packages: Vec<String>,
    pub node: NodeChoice,
    pub threads: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeChoice {
    /// The machine's if it is new enough, else the pinned one.
    Auto,
    Pinned,
    Path(PathBuf),
}

#[derive(Debug, Clone, PartialEq)]
pub struct Agentrun {
    pub limits: DialectLimits,
    pub default_context: bool,
}

/// `[dialect.<id>]`.
#[derive(Debug, Clone, PartialEq)]
pub struct DialectLimits {
    pub timeout: Duration,
    pub memory_mb: u64,
    pub cpus: f64,
    pub pids: u32,
    pub disk_mb: u64,
    pub pool_size: usize,
    pub session_ttl: Duration,
    pub idle_timeout: Option<Duration>,
    pub max_contexts: usize,
    pub text_budget: usize,
    pub shutdown_grace: Duration,
}

impl Config {
    /// Reads the file the sources name, and puts everything together.
    pub fn load(sources: &Sources) -> Result<Self, ConfigError> {
        Self::typed(resolve::resolve(sources)?)
    }

    fn typed(effective: Effective) -> Result<Self, ConfigError> {
        let backends: Vec<String> = effective.get("backend")?;
        if backends != ["native"] {
            return Err(effective.error("backend", "`native` is the only back end of this version"));
        }
        Ok(Self {
            log: effective.get("log")?,
            dialect: effective.get("dialect.default")?,
            lang: effective.get("lang")?,
            floor: effective.get("floor")?,
            state_dir: effective.absolute("state_dir")?,
            runtimes: RuntimeConfig {
                dir: effective.absolute("runtimes.dir")?,
                python: effective.get("runtimes.python")?,
                packages: effective.get("runtimes.packages")?,
                node: match effective.get::<String>("runtimes.node")?.as_str() {
                    "auto" => NodeChoice::Auto,
                    "pinned" => NodeChoice::Pinned,
                    path => NodeChoice::Path(path.into()),
                },
                threads: effective.get("runtimes.threads")?,
            },
            agentrun: Agentrun {
                limits: DialectLimits::typed(&effective, "agentrun")?,
                default_context: effective.get("agentrun.default_context")?,
            },
            effective,
        })
    }
}

impl DialectLimits {
    fn typed(effective: &Effective, dialect: &str) -> Result<Self, ConfigError> {
        let key = |name: &str| format!("dialect.{dialect}.{name}");
        Ok(Self {
            timeout: effective.time(&key("timeout"))?,
            memory_mb: effective.get(&key("memory_mb"))?,
            cpus: effective.number(&key("cpus"))?,
            pids: effective.get(&key("pids"))?,
            disk_mb: effective.get(&key("disk_mb"))?,
            pool_size: effective.get(&key("pool_size"))?,
            session_ttl: effective.time(&key("session_ttl"))?,
            idle_timeout: effective.optional_time(&key("idle_timeout")),
            max_contexts: effective.get(&key("max_contexts"))?,
            text_budget: effective.get(&key("text_budget"))?,
            shutdown_grace: effective.time(&key("shutdown_grace"))?,
        })
    }
}
