//! Places to run things: `Backend` makes a `Sandbox`, a sandbox hands out a byte stream to its guest.
//!
//! Knows what isolates, not what is run: the stream's content is `proto`, spoken by the engine. The only `dyn` seams of the
//! program are the two traits and the stream.

use std::path::PathBuf;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite};

pub mod native;

pub trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}
pub type GuestStream = Box<dyn Duplex>;

/// What a sandbox is to be. Everything in it was decided by the operator, nothing by a tool argument.
#[derive(Debug, Clone, PartialEq)]
pub struct SandboxSpec {
    /// A budget shared by all sandboxes that name the same group (a tenant): a parent cgroup.
    pub group: Group,
    pub limits: Limits,
    /// Host directories and files of the language runtimes, shown read-only at the same path.
    pub runtime: Vec<PathBuf>,
    /// Files written into the sandbox's root before it is sealed (drivers): absolute path inside, content.
    pub files: Vec<(PathBuf, Vec<u8>)>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Group {
    /// `[a-z0-9-]{1,64}`.
    pub name: String,
    pub memory_bytes: Option<u64>,
    pub cpu_millis: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    pub memory_bytes: u64,
    /// Thousandths of a core.
    pub cpu_millis: u32,
    pub pids: u32,
    pub disk_bytes: u64,
    pub disk_inodes: u64,
}

/// How strongly a sandbox is held, weakest first. A configured floor refuses what lies below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Namespaces, seccomp and quotas, but no memory or process limit by cgroup.
    Basic,
    /// Limits hold; a second line is missing (landlock, or a host uid of the sandbox's own).
    Reduced,
    /// Everything.
    Full,
}

/// The level with what is missing and why, for `doctor`, the log and each context.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Isolation {
    pub level: Level,
    /// One line each: what is missing, why, what to do.
    pub missing: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    pub memory_bytes: Option<u64>,
    pub pids: Option<u32>,
    /// Processes of this sandbox that the kernel killed for memory, since it was made.
    pub oom_kills: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    #[error("{why} ({hint})")]
    Unavailable { why: String, hint: String },
    #[error("cannot create a sandbox: {0}")]
    Create(String),
    #[error("isolation level `{got:?}` is below the configured floor `{floor:?}`: {missing}")]
    BelowFloor { got: Level, floor: Level, missing: String },
    #[error("sandbox `{0}` is gone")]
    Gone(String),
    #[error("launcher: {0}")]
    Launcher(String),
}

#[async_trait]
pub trait Backend: Send + Sync {
    fn name(&self) -> &'static str;
    /// Says in plain words why this host cannot run this back end, or how well it can.
    async fn preflight(&self) -> Result<Isolation, BackendError>;
    async fn create(&self, spec: &SandboxSpec) -> Result<Box<dyn Sandbox>, BackendError>;
    /// Destroys everything and waits until nothing is left.
    async fn shutdown(&self);
}

#[async_trait]
pub trait Sandbox: Send + Sync {
    /// Unguessable; also the label of everything that belongs to it.
    fn id(&self) -> &str;
    fn isolation(&self) -> &Isolation;
    async fn connect(&self) -> Result<GuestStream, BackendError>;
    async fn stats(&self) -> Result<Stats, BackendError>;
    /// Idempotent; returns when no process, mount, cgroup or directory of it is left.
    async fn destroy(&self) -> Result<(), BackendError>;
}
