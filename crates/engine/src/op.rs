//! The whole interface of the engine: one closed enum in, one closed enum out.
//!
//! Knows no MCP and no dialect. A dialect lowers its arguments to an `Op` and renders an `Outcome`, both without side effects.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

// What the outside sees of the wire: a dialect renders these, and must not import `proto` itself.
pub use proto::{Ended, FileEntry, FileKind, Language, MimeBundle, Stream};

/// Who asks, and how to reach them while the work goes on. Built by the transport.
#[derive(Debug, Clone)]
pub struct Call {
    pub tenant: Tenant,
    pub cancel: CancellationToken,
    pub events: EventSink,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tenant(pub String);

impl Tenant {
    /// The one tenant of stdio and of a server without tokens.
    pub fn local() -> Self {
        Self("local".into())
    }
}

/// The one upward call: progress and output while an operation runs. Bounded; a slow reader loses events, never delays a cell.
#[derive(Debug, Clone, Default)]
pub struct EventSink(pub Option<tokio::sync::mpsc::Sender<Event>>);

impl EventSink {
    pub fn send(&self, event: Event) {
        if let Some(sender) = &self.0 {
            let _ = sender.try_send(event);
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    Output {
        stream: Stream,
        text: String,
    },
    /// The call waits, and for what.
    Waiting {
        why: String,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    CreateContext {
        name: String,
        language: Language,
        description: String,
    },
    ListContexts,
    /// `context` is an id, or a name that only one context has.
    StopContext {
        context: String,
    },
    RunCode {
        context: String,
        code: String,
        timeout: Option<Duration>,
    },
    WriteFile {
        context: String,
        path: String,
        content: Vec<u8>,
    },
    ReadFile {
        context: String,
        path: String,
    },
    ListFiles {
        context: String,
        path: String,
    },
    Health,
}

impl Op {
    /// The context it is about.
    pub fn context(&self) -> Option<&str> {
        match self {
            Self::CreateContext { .. } | Self::ListContexts | Self::Health => None,
            Self::StopContext { context }
            | Self::RunCode { context, .. }
            | Self::WriteFile { context, .. }
            | Self::ReadFile { context, .. }
            | Self::ListFiles { context, .. } => Some(context),
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    Created(ContextInfo),
    /// Newest first.
    Contexts(Vec<ContextInfo>),
    Stopped {
        context_id: String,
    },
    Ran(Ran),
    Written {
        path: String,
        size: u64,
    },
    File {
        path: String,
        content: Vec<u8>,
    },
    Files {
        entries: Vec<FileEntry>,
        total: u64,
    },
    Health(Health),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContextInfo {
    pub id: String,
    pub name: String,
    pub description: String,
    pub language: Language,
    /// Seconds since 1970.
    pub created_at: u64,
    pub last_used: u64,
    pub isolation: sandbox::Isolation,
}

/// The result of a cell, bounded.
#[derive(Debug, Clone, PartialEq)]
pub struct Ran {
    pub stdout: Captured,
    pub stderr: Captured,
    /// The last value.
    pub value: Option<MimeBundle>,
    pub displays: Vec<MimeBundle>,
    pub error: Option<CellError>,
    /// What processes left behind by earlier cells printed meanwhile.
    pub late: Option<String>,
    /// What was lost since the last run: variables, or files too.
    pub notice: Option<String>,
    pub end: RunOutcome,
    /// Of the cell itself, as the guest measured it.
    pub duration: Duration,
}

/// Text of one stream: whole, or head and tail with what is left out named between them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Captured {
    pub text: String,
    pub total_bytes: u64,
    pub truncated: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CellError {
    pub name: String,
    pub value: String,
    pub text: String,
}

/// How it ended. `state_kept`: the variables are still there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RunOutcome {
    Ok,
    Error,
    Exit {
        code: i32,
    },
    TimedOut {
        after: Duration,
        state_kept: bool,
    },
    Cancelled {
        state_kept: bool,
    },
    Interrupted,
    /// The kernel killed the interpreter for memory.
    OutOfMemory {
        limit_bytes: u64,
    },
    /// The interpreter ended: exit, signal, crash. State is lost, files are kept.
    Ended {
        how: Ended,
    },
    /// The sandbox itself is gone (guest died, or spoke nonsense): state and files are lost.
    SandboxLost {
        why: String,
    },
}

/// The six fields of the health check, measured.
#[derive(Debug, Clone, PartialEq)]
pub struct Health {
    pub interpreter_ready: bool,
    pub interpreter_status: &'static str,
    pub session_pool_size: usize,
    pub session_pool_available: usize,
    pub all_sessions_healthy: bool,
    pub startup_time_seconds: f64,
}

impl Health {
    pub(crate) fn log(&self) {
        tracing::info!(
            interpreter_ready = self.interpreter_ready,
            interpreter_status = self.interpreter_status,
            session_pool_size = self.session_pool_size,
            session_pool_available = self.session_pool_available,
            all_sessions_healthy = self.all_sessions_healthy,
            startup_time_seconds = self.startup_time_seconds,
            "health"
        );
    }
}

/// What the outside may read. `Display` is safe to show: no host path, no foreign id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    #[error("context not found: `{0}`")]
    ContextNotFound(String),
    #[error("context name `{name}` is shared by {}", .ids.join(", "))]
    AmbiguousName { name: String, ids: Vec<String> },
    #[error("at most {0} contexts; stop one first")]
    ContextLimit(usize),
    #[error("all sessions were busy for {0:?}; retry later")]
    Busy(Duration),
    #[error("{0} runs wait already; retry later")]
    QueueFull(usize),
    #[error("not ready: {0}")]
    NotReady(String),
    #[error("cannot create a context: {0}")]
    CreateFailed(String),
    #[error("cannot stop the context: {0}")]
    StopFailed(String),
    #[error("no such file: `{0}`")]
    FileNotFound(String),
    #[error("invalid path `{path}`: {why}")]
    InvalidPath { path: String, why: String },
    #[error("file `{path}` is larger than {limit} bytes")]
    FileTooLarge { path: String, limit: u64 },
    #[error("no space left in the sandbox's quota")]
    NoSpace,
    #[error("cancelled")]
    Cancelled,
    #[error("shutting down")]
    ShuttingDown,
    #[error("the sandbox failed: {0}")]
    Sandbox(String),
}
