//! This crate defines the interface to sandboxes: a `Backend` creates a `Sandbox`, and a sandbox provides a byte stream
//! to its guest.
//!
//! The crate knows how sandboxes are isolated, not what runs in them: the engine speaks `proto` over the stream. The
//! two traits and the stream are the only places in the program that use `dyn`.
#![warn(unreachable_pub)]

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite};

pub mod native;
mod stream;

pub use jail::cgroup::Group;
/// Memory and processes of one sandbox, and how many of its processes were killed since it was created.
pub use jail::cgroup::Usage as Stats;
pub use jail::kept_volumes::KeptVolumeRecord as KeptVolumeInfo;
/// The kept volume of a sandbox. Its name is 64 lower-case hexadecimal digits. A new volume is created with this size;
/// an existing one keeps its size.
pub use jail::kept_volumes::KeptVolumeRequest as KeptVolume;
pub use jail::kept_volumes::{
    KeptWorkspace, StoredWorkspace, WORKSPACE_PREFIX, WorkspaceOwner, remove_workspace, workspaces,
};
pub use jail::pool::Backoff;
/// A directory of the host. In the sandbox, the files of its owner belong to the sandbox's user.
pub use jail::spec::SharedVolumeSpec as SharedVolume;
pub use jail::spec::{
    BrowserRoom, DATA, FileSpec, Limits, PROXY, SHARED_PACKAGES, SandboxSpec, WORKSPACE, ZygoteSpec, ZygoteStatus,
    is_kernel_file_system,
};

pub trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}
pub type GuestStream = Box<dyn Duplex>;

/// Isolation levels of a sandbox, weakest first. The configured floor rejects anything lower.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Namespaces, seccomp and quotas apply, but no cgroup limits memory or processes. A watchdog ends a sandbox after
    /// it exceeded its memory, which does not protect the host from code that is faster or hides memory.
    Basic,
    /// Memory and process limits apply, but a second line of defence is missing, such as landlock or a separate host
    /// uid for each sandbox.
    Reduced,
    /// Every layer applies.
    Full,
}

/// The isolation level together with what is missing and why, for `doctor`, the log and each context.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Isolation {
    pub level: Level,
    /// One line for each missing layer: what is missing, why, and what to do about it.
    pub missing: Vec<String>,
    pub unheld: UnheldLimits,
}

/// The limits of a sandbox that nothing on this host holds, so that no figure may be reported for them. Time, memory
/// and disk always are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct UnheldLimits {
    pub cpu: bool,
    pub processes: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    #[error("{why} ({hint})")]
    Unavailable { why: String, hint: String },
    #[error("cannot create a sandbox: {0}")]
    Create(String),
    #[error("isolation level `{got:?}` is below the configured floor `{floor:?}`: {missing}")]
    BelowFloor { got: Level, floor: Level, missing: String },
    /// Another sandbox uses the kept volume, under this server or under another server of the same state directory.
    #[error("the kept volume is in use by another sandbox")]
    InUse,
    /// There is no disk space left. The text is suitable for callers.
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
    async fn create(&self, spec: &SandboxSpec) -> Result<Box<dyn Sandbox>, BackendError>;
    /// Starts the warm interpreter, replacing an earlier one, and returns when it can be forked. An interpreter that
    /// dies is started again.
    async fn start_zygote(&self, _spec: &ZygoteSpec) -> Result<(), BackendError> {
        Err(no_zygote())
    }
    /// Returns the status of the warm interpreter, or `None` if the back end has none.
    async fn zygote_status(&self) -> Option<ZygoteStatus> {
        None
    }
    /// Returns the kept volumes and when each was last used.
    async fn kept(&self) -> Result<Vec<KeptVolumeInfo>, BackendError>;
    /// Deletes a kept volume. Idempotent. Fails with [`BackendError::InUse`] while a sandbox uses the volume.
    async fn discard(&self, name: &str) -> Result<(), BackendError>;
    /// Destroys the orphans of dead servers. A label identifies the owner, so nothing that belongs to a live server is
    /// touched.
    async fn reap_orphans(&self) -> Result<(), BackendError> {
        Ok(())
    }
    /// Returns whether sandboxes can be created at the moment.
    fn is_up(&self) -> bool {
        true
    }
    /// Waits until the back end has permanently lost the ability to create sandboxes, then returns the reason.
    async fn given_up(&self) -> String {
        std::future::pending().await
    }
    /// Destroys every sandbox and waits until nothing is left. Kept volumes remain.
    async fn shutdown(&self);
}

#[async_trait]
pub trait Sandbox: Send + Sync {
    /// Returns the unguessable id of the sandbox, which is also the label of everything that belongs to it.
    fn id(&self) -> &str;
    fn isolation(&self) -> &Isolation;
    async fn connect(&self) -> Result<GuestStream, BackendError>;
    /// Puts a fork of the warm interpreter into the sandbox, as a child of its guest and confined like everything else
    /// in it. The guest takes it with the next kernel that is started as `warm`.
    async fn fork_zygote(&self) -> Result<(), BackendError> {
        Err(no_zygote())
    }
    /// Returns the socket that listens on [`PROXY`] inside, on the first call only. The caller must close it when the
    /// sandbox ends, because it keeps the sandbox's network namespace alive.
    fn take_egress_listener(&self) -> Option<std::net::TcpListener> {
        None
    }
    /// Puts a browser driver into the sandbox, confined as [`SandboxSpec::browser`] specifies. The guest takes it with
    /// `StartBrowser`; an earlier driver that was never taken ends.
    async fn enter_browser(&self) -> Result<(), BackendError> {
        Err(BackendError::Unavailable {
            why: "this back end has no browsers".into(),
            hint: "use the native back end".into(),
        })
    }
    async fn stats(&self) -> Result<Stats, BackendError>;
    /// Destroys the sandbox and returns when none of its processes, mounts, cgroups and directories is left.
    /// Idempotent. The first success returns the last statistics, if they are known.
    async fn destroy(&self) -> Result<Option<Stats>, BackendError>;
}

fn no_zygote() -> BackendError {
    BackendError::Unavailable {
        why: "this back end has no warm interpreters".into(),
        hint: "kernels are started anew, which takes longer".into(),
    }
}
