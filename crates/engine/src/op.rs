//! The whole interface of the engine: one closed enum in, one closed enum out.
//!
//! Knows no MCP and no dialect. A dialect lowers its arguments to an `Op` and renders an `Outcome`, both without side effects.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

// What the outside sees of the wire: a dialect renders these, and must not import `proto` itself.
pub use proto::browser;
pub use proto::{Ended, FileEntry, FileKind, Language, MimeBundle, Stream};
pub use sandbox::SharedVolume;

use crate::memory::Hold;

/// Who asks, under which rules, and how to reach them while the work goes on. Built by the transport.
#[derive(Debug, Clone)]
pub struct Call {
    pub tenant: Tenant,
    pub realm: Realm,
    /// The client's connection where there is one that lasts (the process over stdio, a session over HTTP): what
    /// [`Which::Current`] goes by.
    pub connection: Option<String>,
    pub cancel: CancellationToken,
    pub events: EventSink,
    /// The memory that the call takes in this process.
    pub memory: Hold,
}

/// One tool set's corner of the engine: a context is seen only from the realm it was made in. Limits, lifetimes and the look of
/// ids are its own ([`crate::config::RealmConfig`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Realm(pub &'static str);

impl Realm {
    pub const SANDPOOL: Self = Self("sandpool");
    pub const AGENTRUN: Self = Self("agentrun");
    pub const MICROSANDBOX: Self = Self("microsandbox");
    pub const WORKBENCH: Self = Self("workbench");
    pub const CONVERSATION: Self = Self("conversation");
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

#[derive(Debug, Clone, PartialEq)]
pub enum Op {
    CreateContext(NewContext),
    ListContexts,
    StopContext {
        which: ContextSelector,
    },
    RunCode(RunCode),
    RunCommand(RunCommand),
    /// Something in the browser of a context.
    Browse(Browse),
    /// A fresh interpreter for this call alone, with the conversation's `/data`.
    RunOnce(RunOnce),
    /// What a background run printed since `cursor`; waits up to `wait` for its end. (Not for the next line: whoever asks again
    /// for each of them pays for every answer.)
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
    /// The file behind a link, if it is the tenant's own; at most `max_bytes`.
    ReadLink {
        key: String,
        path: String,
        max_bytes: u64,
    },
    /// The newest files of the tenant's contexts in this realm.
    RecentFiles,
    /// The host directories that sandboxes of this realm share.
    ListVolumes,
    /// The languages that can be run, and with what.
    ListRuntimes,
    Health,
}

/// Which context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ContextSelector {
    /// An id, or a name that only one context has; an id wins.
    Named(String),
    /// Exactly this id.
    Id(String),
    /// The one that this connection made; without a connection, the tenant's only one.
    Current,
    /// None that exists.
    New,
}

/// A context, made when it is not there and `make` says how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    pub which: ContextSelector,
    pub make: Option<NewContext>,
}

impl Target {
    /// One that has to exist.
    pub fn existing(which: ContextSelector) -> Self {
        Self { which, make: None }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewContext {
    /// Chosen by the caller; otherwise the engine makes one.
    pub id: Option<String>,
    pub name: String,
    pub description: String,
    /// Of code that names none.
    pub language: Language,
    /// Otherwise the realm's own limits.
    pub size: Option<Size>,
    /// Takes the place of the one that this connection made before.
    pub replace: bool,
    /// Its browser is going to be used.
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

/// Processors and memory of a context.
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
    /// Otherwise that of the context. In a realm whose contexts have one language each, another one is refused.
    pub language: Option<Language>,
    pub code: String,
    pub timeout: Option<Duration>,
    /// For this run only.
    pub env: Environment,
    pub network: Network,
    /// Answers at once with [`Outcome::Started`].
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

/// A call's say about the network: it can only narrow what the operator gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Network {
    /// What the realm gives, or nothing in a realm whose calls have to ask for it.
    #[default]
    Usual,
    /// Nothing.
    Off,
    /// What the realm gives; an error where that is nothing.
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

/// Never printed.
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
    /// As in [`RunCode`]: only checked, or used for a context that is made.
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
    /// Files below `/workspace` for [`browser::Browse::Upload`].
    pub uploads: Vec<String>,
    /// Of the action itself.
    pub timeout: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// For `/bin/sh -c`.
    Shell(String),
    /// A program and its arguments, with no shell between.
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

/// What has files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileOwner {
    /// `/workspace` of a context.
    Context(Target),
    /// `/data` of a conversation; made when it is not there.
    Conversation(String),
}

#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    Created(ContextInfo),
    /// As [`Self::Created`]; the one that this connection had before, with this id, is gone. See [`NewContext::replace`].
    Replaced {
        context: ContextInfo,
        old: String,
    },
    /// Newest first.
    Contexts(Vec<ContextInfo>),
    Stopped {
        context_id: String,
    },
    Ran(Box<Ran>),
    Browsed(Box<Browsed>),
    /// A background run begins.
    Started(RunInfo),
    /// Of a background run.
    Progress(RunProgress),
    Cancelled {
        run: String,
        /// It had not ended yet.
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
        /// The whole file's. Of one too large for an answer there is no `content`.
        size: u64,
        key: String,
    },
    Files(FileListing),
    Recent(Vec<RecentFile>),
    Volumes(Vec<SharedVolume>),
    Runtimes(Vec<RuntimeInfo>),
    Health(Health),
}

/// Entries of a listing. With a `key` and a path a link is made: `/files/<key>/<path>`.
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
    /// `native/python-3.11`.
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
    /// A command, not code.
    pub command: bool,
    /// Seconds since 1970.
    pub started_at: u64,
    /// Once it has ended.
    pub ended_at: Option<u64>,
    /// Both streams in the order in which they arrived, since the cursor that was asked for.
    pub output: String,
    /// Bytes since that cursor that are no longer kept.
    pub dropped: u64,
    /// Where the next call goes on.
    pub cursor: u64,
    /// Set once it has ended: an outcome, or why there is none.
    pub end: Option<Result<Box<Ran>, EngineError>>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct ContextInfo {
    pub id: String,
    pub name: String,
    pub description: String,
    pub language: Language,
    /// Seconds since 1970.
    pub created_at: u64,
    pub last_used: u64,
    /// Something runs in it, or waits for its turn.
    pub busy: bool,
    pub size: Option<Size>,
    pub limits: sandbox::Limits,
    pub isolation: sandbox::Isolation,
    /// The permission to read its files, as in a link; 64 hex digits.
    pub key: String,
}

/// The result of a cell or a command, bounded.
#[derive(Debug, Clone, PartialEq)]
pub struct Ran {
    pub context: ContextInfo,
    /// The context was made for this run.
    pub created: bool,
    /// What is in the conversation's `/data` now, newest first.
    pub files: Option<FileListing>,
    pub stdout: Captured,
    pub stderr: Captured,
    /// The last value.
    pub value: Option<MimeBundle>,
    pub displays: Vec<MimeBundle>,
    pub error: Option<CellError>,
    /// What processes left behind by earlier cells printed since the last one.
    pub late: Option<String>,
    /// What threads and timers of earlier cells printed, each with a line that says of which.
    pub strays: Option<String>,
    /// What was lost since the last run: variables, or files too.
    pub notice: Option<String>,
    /// What was not let out to the network meanwhile, a sentence each.
    pub denied: Vec<String>,
    pub end: RunOutcome,
    /// Of the cell itself, as the guest measured it.
    pub duration: Duration,
}

/// What came of something in the browser, bounded.
#[derive(Debug, Clone, PartialEq)]
pub struct Browsed {
    pub context: ContextInfo,
    /// The context was made for this call.
    pub created: bool,
    /// What was lost since the last call.
    pub notice: Option<String>,
    pub page: Option<browser::PageInfo>,
    pub happened: Vec<browser::PageEvent>,
    pub result: Result<browser::BrowseResult, browser::BrowseError>,
    /// What was not let out to the network meanwhile, a sentence each.
    pub denied: Vec<String>,
    pub duration: Duration,
}

/// Text of one stream: whole, or head and tail with what is left out named between them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Captured {
    pub text: String,
    pub total_bytes: u64,
    pub truncated: bool,
    /// The whole, kept for a while: the key and the name of a link.
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

/// How it ended. `state_kept`: the variables are still there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RunOutcome {
    Ok,
    Error,
    /// `exit()` in a cell, which leaves the interpreter alive; or a command that ended with another status than 0.
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
        /// The limit that was hit, if that can be told: it may be one around the server.
        limit_bytes: Option<u64>,
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
    /// A limit of the operator's or of the tenant's, by its name.
    #[error("over the limit `{what}` of {limit}")]
    OverLimit { what: &'static str, limit: String },
    /// `ids`: those of the tenant, where no connection tells which is meant.
    #[error("no context of this connection, and none or several of the tenant: {}", .ids.join(", "))]
    NoCurrent { ids: Vec<String> },
    #[error("context `{context}` runs {}, not {}", .is.name(), .asked.name())]
    OtherLanguage { context: String, is: Language, asked: Language },
    #[error("network access is off: {0}")]
    NetworkOff(String),
    /// There is none on this machine, or it could not be started.
    #[error("no browser: {0}")]
    NoBrowser(String),
    #[error("run not found: `{0}`")]
    RunNotFound(String),
    #[error("environment variable refused: {0}")]
    InvalidEnvironment(String),
    /// Another server has the conversation's files at the moment.
    #[error("in use: {0}")]
    InUse(String),
    #[error("all sessions were busy for {0:?}; retry later")]
    Busy(Duration),
    #[error("{0} runs wait already; retry later")]
    QueueFull(usize),
    #[error("not ready: {0}")]
    NotReady(String),
    /// What was asked for has been done.
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

/// What one tenant may have, in all realms together; `None` is the operator's general limit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Quota {
    pub contexts: Option<usize>,
    /// Runs that execute at once.
    pub runs: Option<usize>,
    /// Of all sandboxes together: a cgroup around them.
    pub memory_bytes: Option<u64>,
    /// Narrows what the realms give.
    pub network: Option<egress::Policy>,
}

/// What happened without being asked for, or besides an answer: for the journal and the metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    pub tenant: Tenant,
    pub realm: Realm,
    /// Context, session or conversation.
    pub id: String,
    pub what: NoticeKind,
    /// What there is to say of it: of a denial the sentence.
    pub detail: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NoticeKind {
    Created,
    Stopped,
    /// Nobody used it for so long.
    Expired,
    /// It made room for another.
    Evicted,
    /// Its sandbox was lost.
    Lost,
    TimedOut,
    OutOfMemory,
    Crashed,
    /// Something was not let out to the network.
    Denied,
    /// The browser of a context ended, or did not answer any more.
    BrowserDied,
}
