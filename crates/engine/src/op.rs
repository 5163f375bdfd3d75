//! Defines the whole interface of the engine: one closed enum goes in, one closed enum comes out.
//!
//! This module knows no MCP and no dialect. A dialect lowers its arguments to an [`Op`] and renders an [`Outcome`],
//! both without side effects.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

// Types of the wire protocol that are part of this interface. A dialect renders them and must not import `proto`
// itself.
pub use proto::browser;
pub use proto::{Ended, FileEntry, FileKind, Language, MimeBundle, Stream};
pub use sandbox::SharedVolume;

use crate::memory::Hold;

/// Describes one request: its tenant, the rules that apply, and how to reach the client while the work goes on. The
/// transport builds it.
#[derive(Debug, Clone)]
pub struct Call {
    pub tenant: Tenant,
    pub realm: Realm,
    /// Id of the client's connection, if it has one that lasts: the process over stdio, or a session over HTTP.
    /// [`ContextSelector::Current`] refers to it.
    pub connection: Option<String>,
    pub cancel: CancellationToken,
    pub events: EventSink,
    /// Memory that the call occupies in this process.
    pub memory: Hold,
}

/// A dialect's part of the engine. A context is visible only in the realm in which it was created. Each realm has
/// limits, lifetimes and id prefixes, which are set in [`crate::config::RealmConfig`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Realm(pub &'static str);

#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tenant(pub String);

impl Tenant {
    /// Returns the only tenant of stdio and of a server without tokens.
    pub fn local() -> Self {
        Self("local".into())
    }
}

/// Sends progress and output to the client while an operation runs; the only call from the engine upwards. The channel
/// is bounded: a slow reader loses events but never delays a cell.
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
    /// The call waits; `why` says for what.
    Waiting {
        why: String,
    },
}

#[derive(Debug, Clone, PartialEq)]
pub enum Op {
    CreateContext(NewContext),
    ListContexts,
    StopContext {
        which: ContextSelector,
    },
    RunCode(RunCode),
    RunCommand(RunCommand),
    /// Performs an action in the browser of a context.
    Browse(Browse),
    /// Runs code in a fresh kernel for this call alone, with the conversation's `/data`.
    RunOnce(RunOnce),
    /// Returns the output of a background run since `cursor`, after waiting up to `wait` for the run to end. It does
    /// not wait for the next line of output, because a client that asks again for every line pays for every answer.
    WaitRun {
        run: String,
        cursor: Option<u64>,
        wait: Duration,
    },
    CancelRun {
        run: String,
    },
    WriteFile {
        place: FileOwner,
        path: String,
        content: Vec<u8>,
    },
    ReadFile {
        place: FileOwner,
        path: String,
    },
    ListFiles {
        place: FileOwner,
        path: String,
    },
    /// Reads the file behind a link if it belongs to the tenant, and returns at most `max_bytes` of it.
    ReadLink {
        key: String,
        path: String,
        max_bytes: u64,
    },
    /// Lists the newest files of the tenant's contexts in this realm.
    RecentFiles,
    /// Lists the host directories that are shared with sandboxes of this realm.
    ListVolumes,
    /// Lists the languages that can be run, with the version of each runtime.
    ListRuntimes,
    Health,
}

/// Selects a context of the tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ContextSelector {
    /// Selects by id, or by a name that only one context has. An id takes precedence over a name.
    Named(String),
    /// Selects by this exact id.
    Id(String),
    /// Selects the context that this connection created last; without a connection, the only context of the tenant.
    Current,
    /// Selects no existing context, so that a new one is created.
    New,
}

/// Selects a context, which is created as `make` describes if it does not exist.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    pub which: ContextSelector,
    pub make: Option<NewContext>,
}

impl Target {
    /// Selects a context that has to exist.
    pub fn existing(which: ContextSelector) -> Self {
        Self { which, make: None }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewContext {
    /// Id chosen by the caller; the engine generates one if it is absent.
    pub id: Option<String>,
    pub name: String,
    pub description: String,
    /// Language of code that does not name one.
    pub language: Language,
    /// Size of the context; without one the realm's limits apply.
    pub size: Option<Size>,
    /// If true, the new context replaces the one that this connection created before.
    pub replace: bool,
    /// If true, the client is going to use the browser of the context.
    pub browser: bool,
}

impl NewContext {
    pub fn named(name: impl Into<String>, language: Language) -> Self {
        Self {
            id: None,
            name: name.into(),
            description: String::new(),
            language,
            size: None,
            replace: false,
            browser: false,
        }
    }
}

/// Named choice of processors and memory of a context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Size {
    Small,
    Medium,
    Large,
}

impl Size {
    pub const ALL: [Self; 3] = [Self::Small, Self::Medium, Self::Large];

    pub fn name(self) -> &'static str {
        match self {
            Self::Small => "small",
            Self::Medium => "medium",
            Self::Large => "large",
        }
    }

    pub fn cpus(self) -> u32 {
        match self {
            Self::Small => 1,
            Self::Medium => 2,
            Self::Large => 4,
        }
    }

    pub fn memory_mb(self) -> u64 {
        1024 * u64::from(self.cpus())
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunCode {
    pub target: Target,
    /// Language of the code; defaults to that of the context. A realm whose contexts have one language each rejects any
    /// other.
    pub language: Option<Language>,
    pub code: String,
    pub timeout: Option<Duration>,
    /// Environment variables for this run only.
    pub env: Environment,
    pub network: Network,
    /// If true, the call returns at once with [`Outcome::Started`].
    pub background: bool,
}

impl RunCode {
    pub fn new(target: Target, code: impl Into<String>) -> Self {
        Self {
            target,
            language: None,
            code: code.into(),
            timeout: None,
            env: Environment::default(),
            network: Network::Usual,
            background: false,
        }
    }
}

/// A call's choice about the network. It can only narrow what the operator allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Network {
    /// Uses the network of the realm, or none in a realm whose calls have to ask for it.
    #[default]
    Usual,
    /// Uses no network.
    Off,
    /// Uses the network of the realm, and fails if the realm has none.
    On,
}

impl Network {
    pub fn asked(network: Option<bool>) -> Self {
        match network {
            None => Self::Usual,
            Some(false) => Self::Off,
            Some(true) => Self::On,
        }
    }
}

/// Environment variables of a run. `Debug` prints only how many there are.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Environment(pub BTreeMap<String, String>);

impl std::fmt::Debug for Environment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} variables", self.0.len())
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunCommand {
    pub target: Target,
    /// Language of the context, as in [`RunCode`]. It is only compared with an existing context, or used for one that
    /// is created.
    pub language: Option<Language>,
    pub command: Command,
    pub timeout: Option<Duration>,
    pub env: Environment,
    pub network: Network,
    pub background: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Browse {
    pub target: Target,
    pub ask: browser::BrowserAction,
    /// Files below `/workspace` for [`browser::BrowserAction::Upload`].
    pub uploads: Vec<String>,
    /// Time allowed for the action itself; starting the browser is not included.
    pub timeout: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// A line for `/bin/sh -c`.
    Shell(String),
    /// A program and its arguments, run without a shell.
    Argv(Vec<String>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunOnce {
    pub conversation: String,
    pub language: Language,
    pub code: String,
    pub env: Environment,
    pub network: Network,
}

/// The owner of the files that an operation reads or writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileOwner {
    /// A context with its `/workspace`.
    Context(Target),
    /// A conversation with its `/data`, which is created if it does not exist.
    Conversation(String),
}

#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    Created(ContextInfo),
    /// A context was created as in [`Self::Created`], and the connection's previous context with the id `old` was
    /// removed. See [`NewContext::replace`].
    Replaced {
        context: ContextInfo,
        old: String,
    },
    /// The contexts of the tenant in this realm, newest first.
    Contexts(Vec<ContextInfo>),
    Stopped {
        context_id: String,
    },
    Ran(Box<Ran>),
    Browsed(Box<Browsed>),
    /// A background run was started.
    Started(RunInfo),
    /// The state and the new output of a background run.
    Progress(RunProgress),
    Cancelled {
        run: String,
        /// True if the run had not ended yet.
        was_running: bool,
    },
    Written {
        path: String,
        size: u64,
        key: String,
    },
    File {
        path: String,
        content: Vec<u8>,
        /// Size of the whole file. [`Op::ReadFile`] leaves `content` empty if the file is too large for an answer.
        size: u64,
        key: String,
    },
    Files(FileListing),
    Recent(Vec<RecentFile>),
    Volumes(Vec<SharedVolume>),
    Runtimes(Vec<RuntimeInfo>),
    Health(Health),
}

/// Entries of a directory. The link to an entry is `/files/<key>/<path>`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileListing {
    pub entries: Vec<FileEntry>,
    pub total: u64,
    pub key: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecentFile {
    pub key: String,
    pub path: String,
    pub size: u64,
    pub modified: i64,
    pub context_id: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuntimeInfo {
    pub language: Language,
    /// Name of the back end and the runtime, for example `native/python-3.11`.
    pub name: String,
}

#[derive(Debug, Clone, PartialEq)]
pub struct RunInfo {
    pub run: String,
    pub context: ContextInfo,
    pub created: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub struct RunProgress {
    pub run: String,
    pub context_id: String,
    /// True for a command, false for code.
    pub command: bool,
    /// Start of the run in seconds since 1970.
    pub started_at: u64,
    /// End of the run in seconds since 1970, once it has ended.
    pub ended_at: Option<u64>,
    /// Output of both streams in order of arrival, from the requested cursor on.
    pub output: String,
    /// Number of bytes after the requested cursor that are no longer stored.
    pub dropped: u64,
    /// Cursor from which the next call continues.
    pub cursor: u64,
    /// Result of the run once it has ended, or the reason why there is none.
    pub end: Option<Result<Box<Ran>, EngineError>>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct ContextInfo {
    pub id: String,
    pub name: String,
    pub description: String,
    pub language: Language,
    /// Time of creation in seconds since 1970.
    pub created_at: u64,
    pub last_used: u64,
    /// True while something runs in the context or waits for its turn.
    pub busy: bool,
    pub size: Option<Size>,
    pub limits: sandbox::Limits,
    pub isolation: sandbox::Isolation,
    /// Key of the links to the context's files, which is the permission to read them; 64 hexadecimal digits.
    pub key: String,
}

/// The bounded result of a cell or a command.
#[derive(Debug, Clone, PartialEq)]
pub struct Ran {
    pub context: ContextInfo,
    /// True if the context was created for this run.
    pub created: bool,
    /// Current files in the conversation's `/data`, newest first.
    pub files: Option<FileListing>,
    pub stdout: Captured,
    pub stderr: Captured,
    /// Value of the last expression.
    pub value: Option<MimeBundle>,
    pub displays: Vec<MimeBundle>,
    pub error: Option<CellError>,
    /// Output that processes left behind by earlier cells printed since the last cell.
    pub late: Option<String>,
    /// Output of threads and timers of earlier cells. A line before each piece says which cell it came from.
    pub strays: Option<String>,
    /// Message about what was lost since the last run: variables, or files as well.
    pub notice: Option<String>,
    /// Denials of the network during the run, one sentence each.
    pub denied: Vec<String>,
    pub end: RunOutcome,
    /// Duration of the cell or command as the guest measured it, but never more than the host measured.
    pub duration: Duration,
}

impl Ran {
    /// Returns the result of a run that showed nothing.
    pub(crate) fn empty(context: ContextInfo, end: RunOutcome) -> Self {
        Self {
            context,
            created: false,
            files: None,
            stdout: Captured::default(),
            stderr: Captured::default(),
            value: None,
            displays: Vec::new(),
            error: None,
            late: None,
            strays: None,
            notice: None,
            denied: Vec::new(),
            end,
            duration: Duration::ZERO,
        }
    }
}

/// The bounded result of a browser action.
#[derive(Debug, Clone, PartialEq)]
pub struct Browsed {
    pub context: ContextInfo,
    /// True if the context was created for this call.
    pub created: bool,
    /// Message about what was lost since the last call.
    pub notice: Option<String>,
    pub page: Option<browser::PageInfo>,
    pub happened: Vec<browser::PageEvent>,
    pub result: Result<browser::BrowseResult, browser::BrowseError>,
    /// Denials of the network during the action, one sentence each.
    pub denied: Vec<String>,
    pub duration: Duration,
}

/// Text of one stream: all of it, or its head and tail with a note between them about what is left out.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Captured {
    pub text: String,
    pub total_bytes: u64,
    pub truncated: bool,
    /// Link to the whole output, which is kept for a while.
    pub kept: Option<KeptOutput>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptOutput {
    pub key: String,
    pub name: String,
    pub bytes: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CellError {
    pub name: String,
    pub value: String,
    pub text: String,
}

/// The way in which a run ended. `state_kept` is true if the variables still exist.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RunOutcome {
    Ok,
    Error,
    /// A cell called `exit()`, which leaves the kernel alive, or a command ended with a status other than 0.
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
    /// The Linux kernel killed the language kernel or the command for memory.
    OutOfMemory {
        /// The limit that was reached, which may be one around the sandbox; `None` if it cannot be determined.
        limit_bytes: Option<u64>,
    },
    /// The language kernel exited, was killed by a signal or crashed. Variables are lost, files are kept.
    Ended {
        how: Ended,
    },
    /// The sandbox is gone because its guest died or violated the protocol. Variables and files are lost.
    SandboxLost {
        why: String,
    },
}

/// A step of the engine's start, for the log.
#[derive(Debug)]
pub enum StartupStep<'a> {
    /// The start has begun; `id` names this engine.
    Begun {
        id: &'a str,
    },
    /// Interpreters can be started.
    Warm,
    /// The pool is being filled with this many sandboxes.
    Filling {
        size: usize,
    },
    /// A sandbox of the pool is ready; numbers begin at 1.
    Created {
        number: usize,
        id: &'a str,
    },
    /// The pool is being checked.
    Checking,
    Checked {
        available: usize,
        size: usize,
    },
    /// Calls are served.
    Ready {
        took: Duration,
        available: usize,
    },
    Failed {
        error: &'a EngineError,
    },
}

/// Condition of the engine and its pool.
#[derive(Debug, Clone, PartialEq)]
pub struct Health {
    pub ready: bool,
    /// `CREATING`, `READY`, `FAILED` or `STOPPING`.
    pub state: &'static str,
    pub pool_size: usize,
    pub pool_available: usize,
    pub pool_is_healthy: bool,
    /// Time that the start took, or has taken so far.
    pub startup: Duration,
}

impl Health {
    pub(crate) fn log(&self) {
        tracing::info!(
            interpreter_ready = self.ready,
            interpreter_status = self.state,
            session_pool_size = self.pool_size,
            session_pool_available = self.pool_available,
            all_sessions_healthy = self.pool_is_healthy,
            startup_time_seconds = self.startup.as_secs_f64(),
            "health"
        );
    }
}

/// An error that a client may see. `Display` is safe to show: it contains no host path and no id of another tenant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    #[error("context not found: `{0}`")]
    ContextNotFound(String),
    #[error("context name `{name}` is shared by {}", .ids.join(", "))]
    AmbiguousName { name: String, ids: Vec<String> },
    #[error("at most {0} contexts; stop one first")]
    ContextLimit(usize),
    /// The operation would exceed a limit of the operator or a quota of the tenant, which `what` names.
    #[error("over the limit `{what}` of {limit}")]
    OverLimit { what: &'static str, limit: String },
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
    #[error("all sessions were busy for {0:?}; retry later")]
    Busy(Duration),
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

/// Bounds on what one tenant may have in all realms together. `None` stands for the operator's general limit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Quota {
    pub contexts: Option<usize>,
    /// Maximum number of runs that execute at the same time.
    pub runs: Option<usize>,
    /// Memory of all sandboxes of the tenant together, enforced by a cgroup around them.
    pub memory_bytes: Option<u64>,
    /// Policy that narrows the network of the realms.
    pub network: Option<egress::Policy>,
}

/// Something that happened unasked, or in addition to an answer. Notices are for the journal and the metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    pub tenant: Tenant,
    pub realm: Realm,
    /// Id of the context or the conversation; empty for a sandbox in which no code has run yet.
    pub id: String,
    pub what: NoticeKind,
    /// Further information; for a denial, the sentence that explains it.
    pub detail: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NoticeKind {
    Created,
    Stopped,
    /// The context or the conversation was removed because it was not used for too long.
    Expired,
    /// The context was stopped to make room for another one.
    Evicted,
    /// The sandbox of the context was lost.
    Lost,
    TimedOut,
    OutOfMemory,
    Crashed,
    /// The network denied a request of the sandbox.
    Denied,
    /// The browser of the context ended or stopped answering.
    BrowserDied,
}
