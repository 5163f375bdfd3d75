//! The errors of operations.

use std::fmt;
use std::time::Duration;

use proto::Language;

/// An error that a client may see. `Display` is safe to show: it contains no host path and no id of another tenant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    #[error("context not found: `{0}`")]
    ContextNotFound(String),
    #[error("context name `{name}` is shared by {}", .ids.join(", "))]
    AmbiguousName { name: String, ids: Vec<String> },
    #[error("there is a context `{name}` already: `{id}`")]
    NameTaken { name: String, id: String },
    #[error("at most {0} contexts; stop one first")]
    ContextLimit(usize),
    /// The operation would exceed a limit of the operator or a quota of the tenant, which `what` names.
    #[error("over the limit `{what}` of {limit}")]
    OverLimit { what: LimitKind, limit: String },
    /// No context is current. `ids` lists the contexts of the tenant if no connection says which of them is meant.
    #[error("no context of this connection, and none or several of the tenant: {}", .ids.join(", "))]
    NoCurrent { ids: Vec<String> },
    #[error("context `{context}` runs {}, not {}", .is.name(), .asked.name())]
    OtherLanguage { context: String, is: Language, asked: Language },
    #[error("network access is off: {0}")]
    NetworkOff(String),
    /// The machine has no browser, the realm allows none, or the browser could not be started.
    #[error("no browser: {0}")]
    NoBrowser(String),
    #[error("run not found: `{0}`")]
    RunNotFound(String),
    #[error("environment variable refused: {0}")]
    InvalidEnvironment(String),
    /// Another server is using the conversation's files.
    #[error("in use: {0}")]
    InUse(String),
    #[error("no permit within {0:?}; retry later")]
    Busy(Duration),
    /// The run waited for its whole timeout. `running` is the time for which another run of its kernel has been
    /// running, and `run` the id of that run if it is in the background.
    #[error("not started within {timeout:?}, because another run is not finished")]
    NotStarted { timeout: Duration, running: Option<Duration>, run: Option<String> },
    #[error("{0} runs wait already; retry later")]
    QueueFull(usize),
    #[error("not ready: {0}")]
    NotReady(String),
    /// The operation was completed, but its result was dropped.
    #[error("it was done, but there is no room for its result: {0}")]
    ResultDropped(String),
    #[error("cannot create a context: {0}")]
    CreateFailed(String),
    #[error("cannot stop the context: {0}")]
    StopFailed(String),
    #[error("no such file: `{0}`")]
    FileNotFound(String),
    #[error("invalid path `{path}`: {why}")]
    InvalidPath { path: String, why: String },
    #[error("{0}")]
    InvalidPattern(String),
    #[error("file `{path}` is larger than {limit} bytes")]
    FileTooLarge { path: String, limit: u64 },
    #[error("no space left in the sandbox's quota")]
    NoSpace { disk_bytes: u64 },
    /// The disk of the server is full, although that of the sandbox is not.
    #[error("the sandbox failed: {0}")]
    HostDiskFull(String),
    #[error("cancelled")]
    Cancelled,
    #[error("shutting down")]
    ShuttingDown,
    #[error("the sandbox failed: {0}")]
    Sandbox(String),
}

/// The limits of the operator and quotas of a tenant that an operation can exceed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LimitKind {
    /// The contexts of a tenant in all realms.
    Contexts,
    /// The conversations of a tenant.
    MaxContexts,
    TotalMemory,
    CallMemory,
    BackgroundRuns,
    CommandsAtOnce,
    SearchesAtOnce,
    EditBytes,
    UploadFiles,
    UploadBytes,
    UploadLinks,
}

impl fmt::Display for LimitKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Contexts => "contexts",
            Self::MaxContexts => "max_contexts",
            Self::TotalMemory => "max_total_memory_mb",
            Self::CallMemory => "call_memory_mb",
            Self::BackgroundRuns => "background_runs",
            Self::SearchesAtOnce => "searches at once in a context",
            Self::CommandsAtOnce => "commands at once in a context",
            Self::EditBytes => "bytes_of_an_edit",
            Self::UploadFiles => "files_of_one_upload",
            Self::UploadBytes => "bytes_uploaded_at_once",
            Self::UploadLinks => "upload_links",
        })
    }
}
