//! The results of operations.

use std::time::Duration;

use proto::{Ended, FileEntry, FoundLines, Language, MimeBundle, browser};
use sandbox::SharedVolume;

use super::{EngineError, Size, Waiting};

#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    Created(ContextInfo),
    /// A context was created as in [`Self::Created`], and the connection's previous context with the id `old` was
    /// removed. See [`super::NewContext::replace`].
    Replaced {
        context: ContextInfo,
        old: String,
    },
    /// The contexts of the tenant in this realm, newest first.
    Contexts(Vec<ContextInfo>),
    Stopped(StoppedContext),
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
        /// Size of the whole file. [`super::Op::ReadFile`] leaves `content` empty if it is too large for an answer.
        size: u64,
        /// Key of the link to the file; empty if no link leads to its directory.
        key: String,
    },
    Files(FileListing),
    Edited(Edited),
    Found(FoundLines),
    UploadLink(UploadLink),
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

/// Result of an edit. If `replaced` is 0, the file is as it was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Edited {
    pub path: String,
    /// How often the text occurs in the file.
    pub found: u64,
    pub replaced: u64,
    /// Lines of the first occurrences, counted from 1.
    pub lines: Vec<u64>,
    /// Size of the file after the edit.
    pub size: u64,
}

/// A link by which one file can be uploaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UploadLink {
    /// The secret part of the link's address.
    pub id: String,
    pub path: String,
    pub max_bytes: u64,
    /// Time in seconds since 1970 after which the link is useless.
    pub expires_at: u64,
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

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StoppedContext {
    pub context_id: String,
    /// Background runs that the stop ended.
    pub ended_runs: Vec<String>,
    /// Number of other calls that the stop ended.
    pub ended_calls: usize,
}

#[derive(Debug, Clone, PartialEq)]
pub struct RunInfo {
    pub run: String,
    /// What the run waits for, if it has not begun.
    pub queued: Option<Waiting>,
    pub context: ContextInfo,
    pub created: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub struct RunProgress {
    pub run: String,
    pub context_id: String,
    /// True for a command, false for code.
    pub command: bool,
    /// What the run waits for, if it has not begun.
    pub queued: Option<Waiting>,
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
    /// Directories of the host that the operator mounts into the context.
    pub mounts: Vec<SharedVolume>,
    /// Key of the links to the context's files, which is the permission to read them; 64 hexadecimal digits.
    pub key: String,
}

/// The bounded result of a cell or a command.
#[derive(Debug, Clone, PartialEq)]
pub struct Ran {
    pub context: ContextInfo,
    /// True if the context was created for this run.
    pub created: bool,
    /// True if the run failed because a variable, a module or a file is missing, in a context that a call created
    /// because it needed one, and no earlier answer said that the context is new.
    pub misses_earlier: bool,
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
    /// The reason why the sandbox has no network, if it has none.
    pub network_off: Option<&'static str>,
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
            misses_earlier: false,
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
            network_off: None,
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
    pub extras: browser::ReplyExtras,
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
    /// The sandbox was ended because it exceeded its memory limit, which no cgroup holds on this host. Variables and
    /// files are lost.
    SandboxOutOfMemory {
        limit_bytes: u64,
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
