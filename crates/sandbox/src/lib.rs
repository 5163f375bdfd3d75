//! Places to run things: `Backend` makes a `Sandbox`, a sandbox hands out a byte stream to its guest.
//!
//! Knows what isolates, not what is run: the stream's content is `proto`, spoken by the engine. The only `dyn` seams of the
//! program are the two traits and the stream.

use std::collections::BTreeMap;
use std::path::PathBuf;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite};

pub mod native;
mod stream;

pub trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}
pub type GuestStream = Box<dyn Duplex>;

/// What a sandbox is to be. Everything in it was decided by the operator, nothing by a tool argument.
#[derive(Debug, Clone, PartialEq)]
pub struct SandboxSpec {
    /// Budgets around it, outermost first (a tenant, then one of its tool sets): nested parent cgroups. One to three.
    pub groups: Vec<Group>,
    pub limits: Limits,
    /// Host directories and files of the language runtimes, shown read-only at the same path.
    pub runtime: Vec<PathBuf>,
    /// Files written into the sandbox's root before it is sealed (drivers): absolute path inside, content.
    pub files: Vec<(PathBuf, Vec<u8>)>,
    /// Host directories the operator shares with sandboxes.
    pub volumes: Vec<SharedVolume>,
    /// `/data` lies on a volume of its own that outlives the sandbox; only one sandbox at a time may have it.
    pub kept: Option<KeptVolume>,
    /// A socket listens inside on [`PROXY`], which is handed out once: [`Sandbox::take_egress_listener`]. Without it there is nothing but loopback.
    pub egress: bool,
    /// Room for a browser beside the code: a uid, a home and a share of memory and processors of its own.
    pub browser: Option<BrowserRoom>,
}

/// Where a sandbox with a way out finds it.
pub const PROXY: std::net::SocketAddrV4 = std::net::SocketAddrV4::new(std::net::Ipv4Addr::LOCALHOST, 3128);

/// What of the sandbox's limits its browser may have at most. Of processes the code has what is left then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BrowserRoom {
    pub memory_bytes: u64,
    pub pids: u32,
}

/// An interpreter that is started once, with everything imported and no code of anybody's run, and then forked into sandboxes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ZygoteSpec {
    /// Interpreter, its flags, the driver, and what the driver needs to know. Paths are those inside a sandbox.
    pub argv: Vec<String>,
    /// The whole environment: that of the kernels.
    pub env: BTreeMap<String, String>,
    /// As in [`SandboxSpec`]: it lives in a root like that of a sandbox.
    pub runtime: Vec<PathBuf>,
    pub files: Vec<(PathBuf, Vec<u8>)>,
}

/// A directory of the host, shown to sandboxes. What its owner has there belongs to the sandbox's user inside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedVolume {
    pub host: PathBuf,
    pub inside: PathBuf,
    pub read_only: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptVolume {
    /// 64 lower-case hexadecimal digits.
    pub name: String,
    /// What the volume is made with; one that exists keeps its size.
    pub bytes: u64,
    pub inodes: u64,
}

/// A kept volume that exists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptVolumeInfo {
    pub name: String,
    /// Seconds since 1970.
    pub last_used: u64,
}

/// A budget shared by all sandboxes that name the same group below the same outer groups.
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
    /// Processes of this sandbox that the kernel killed for memory, since it was made; but for those of its browser.
    pub oom_kills: u64,
    pub browser_oom_kills: u64,
    /// The limit that such a kill was for, the sandbox's own or one around it; `None` where it cannot be told.
    pub oom_limit_bytes: Option<u64>,
}

/// The warm interpreter, since the back end was started.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ZygoteStatus {
    /// It can be forked now.
    pub ready: bool,
    pub forks: u64,
    /// How often it died and was started again.
    pub restarts: u64,
    /// Modules that it was to import and could not, and why.
    pub not_imported: BTreeMap<String, String>,
}

#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    #[error("{why} ({hint})")]
    Unavailable { why: String, hint: String },
    #[error("cannot create a sandbox: {0}")]
    Create(String),
    #[error("isolation level `{got:?}` is below the configured floor `{floor:?}`: {missing}")]
    BelowFloor { got: Level, floor: Level, missing: String },
    /// Another sandbox has the kept volume, here or under another server of the same state directory.
    #[error("the kept volume is in use by another sandbox")]
    InUse,
    /// In words for callers.
    #[error("{0}")]
    NoSpace(String),
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
    /// Starts the warm interpreter, in place of an earlier one, and returns when it can be forked. One that dies is started again.
    async fn warm(&self, _spec: &ZygoteSpec) -> Result<(), BackendError> {
        Err(no_warmth())
    }
    /// How the warm interpreter is; `None` where the back end has none.
    async fn warmth(&self) -> Option<ZygoteStatus> {
        None
    }
    /// The kept volumes, with when each was last used.
    async fn kept(&self) -> Result<Vec<KeptVolumeInfo>, BackendError>;
    /// Deletes a kept volume. Idempotent; refused with [`BackendError::InUse`] while a sandbox has it.
    async fn discard(&self, name: &str) -> Result<(), BackendError>;
    /// Destroys what dead servers left behind; ownership is a label, so what lives is never touched.
    async fn reap_orphans(&self) -> Result<(), BackendError> {
        Ok(())
    }
    /// Whether sandboxes can be made at the moment.
    fn is_up(&self) -> bool {
        true
    }
    /// Returns when none can be made any more, whatever is tried, and says why.
    async fn given_up(&self) -> String {
        std::future::pending().await
    }
    /// Destroys everything and waits until nothing is left. Kept volumes stay.
    async fn shutdown(&self);
}

#[async_trait]
pub trait Sandbox: Send + Sync {
    /// Unguessable; also the label of everything that belongs to it.
    fn id(&self) -> &str;
    fn isolation(&self) -> &Isolation;
    async fn connect(&self) -> Result<GuestStream, BackendError>;
    /// Puts a fork of the warm interpreter into the sandbox, as a child of its guest and held like everything else in it. The guest
    /// takes it with the next kernel that is started as `warm`.
    async fn fork_zygote(&self) -> Result<(), BackendError> {
        Err(no_warmth())
    }
    /// The socket that listens on [`PROXY`] inside; the first to ask gets it. To be closed when the sandbox ends: it keeps the
    /// sandbox's network alive.
    fn take_egress_listener(&self) -> Option<std::net::TcpListener> {
        None
    }
    /// Puts the driver of a browser into the sandbox, held as [`SandboxSpec::browser`] says. The guest takes it with
    /// `StartBrowser`; one that was not taken ends.
    async fn enter_browser(&self) -> Result<(), BackendError> {
        Err(BackendError::Unavailable {
            why: "this back end has no browsers".into(),
            hint: "use the native back end".into(),
        })
    }
    async fn stats(&self) -> Result<Stats, BackendError>;
    /// Idempotent; returns when no process, mount, cgroup or directory of it is left.
    async fn destroy(&self) -> Result<(), BackendError>;
}

fn no_warmth() -> BackendError {
    BackendError::Unavailable {
        why: "this back end has no warm interpreters".into(),
        hint: "kernels are started anew, which takes longer".into(),
    }
}
