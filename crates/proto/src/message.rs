//! Messages. Closed enums; a message the other side does not know ends the connection.
//!
//! The guest is not trusted: the host bounds and checks whatever it reads from here, and nothing in a message is a host path,
//! a secret or an instruction.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::browser::{BrowserAction, BrowserReply, BrowserSpec};

/// A kernel inside one sandbox; chosen by the host.
pub type KernelId = u32;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Language {
    Python,
    Javascript,
    Typescript,
}

impl Language {
    pub fn name(self) -> &'static str {
        match self {
            Self::Python => "python",
            Self::Javascript => "javascript",
            Self::Typescript => "typescript",
        }
    }
}

/// How to start an interpreter. Paths are those inside the sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelSpec {
    pub language: Language,
    /// Interpreter, its flags and the driver file.
    pub argv: Vec<String>,
    /// The whole environment; nothing is inherited.
    pub env: BTreeMap<String, String>,
    pub cwd: String,
    /// Descriptors 1 and 2 are the same pipe: all comes as `Stdout`, in the order written.
    pub merge_output: bool,
}

/// Which directory a path of a file operation is below. Absolute paths are accepted if they are below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Root {
    /// `/workspace`.
    Workspace,
    /// `/data`.
    Data,
    /// Long output that was kept whole: files by their names in `KeptOutput`, which cannot be written. They go after a while.
    Outputs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ListOrder {
    /// Everything, directories included, by path.
    Path,
    /// Regular files only, the most recently modified first.
    Newest,
}

/// When a call has to end. Counted by the guest from the moment it starts the work, and by the host again from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deadline {
    pub after_ms: u64,
    /// Between the interrupt and the kill.
    pub grace_ms: u64,
}

/// Host to guest. The frame's `call` names the request; its answers carry the same number.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "t", rename_all = "snake_case", deny_unknown_fields)]
pub enum ToGuest {
    /// First on each connection. Answer: `Hello`.
    Hello { version: u32 },
    /// Answer: `KernelReady`, or `Failed`. A `warm` kernel is not executed: it is the oldest fork of the warm interpreter that was
    /// put into the sandbox and not yet taken. It gets environment, directory and descriptors as any other.
    StartKernel { kernel: KernelId, spec: KernelSpec, warm: bool },
    /// Kills the kernel and its process group. Answer: `Done`.
    StopKernel { kernel: KernelId },
    /// Runs one cell. Answers: output frames, `Event`s, `Gap`s, then exactly one `RunEnd` (or `Failed`).
    /// At most `forward_bytes` of each stream are sent on; of the rest the guest keeps the tail and counts.
    /// A stream of more than `keep_over` bytes is kept whole as a file, up to `MAX_KEPT`.
    Run {
        kernel: KernelId,
        code: String,
        /// Environment variables for this one cell, besides those of the kernel; see `check_environment`.
        env: BTreeMap<String, String>,
        deadline: Deadline,
        forward_bytes: u64,
        keep_over: Option<u64>,
    },
    /// Runs a command, beside the cells and at most `MAX_COMMANDS` others. Answers: output frames, `Gap`s, then exactly one
    /// `RunEnd` (or `Failed`).
    Exec {
        argv: Vec<String>,
        /// The whole environment; nothing is inherited.
        env: BTreeMap<String, String>,
        cwd: String,
        /// As in `KernelSpec`.
        merge_output: bool,
        deadline: Deadline,
        forward_bytes: u64,
        keep_over: Option<u64>,
    },
    /// Interrupts the call of this number (a `Run` or `Exec`), then kills after its grace time. No answer of its own:
    /// the interrupted call ends with `Cancelled`.
    Interrupt,
    /// `size` bytes follow in `File` frames of the same call. Directories are made. Answer: `Written`, or `Failed`
    /// (which may come before all bytes were sent; the rest is then ignored).
    WriteFile { root: Root, path: String, size: u64 },
    /// Answers: `FileStart`, `File` frames with at most `length` bytes from `offset` on, `Done`; or `Failed`.
    /// A file larger than `max_size` is `TooLarge`.
    ReadFile { root: Root, path: String, offset: u64, length: u64, max_size: Option<u64> },
    /// Answer: `Files`, or `Failed`. Entries below `path`, the first `max_entries` in this order.
    ListFiles { root: Root, path: String, max_entries: u32, order: ListOrder },
    /// Takes the browser's driver that was put into the sandbox, and lets it start the browser with a blank page. Answer:
    /// `BrowserReady`, or `Failed`. One that is there already ends.
    StartBrowser { spec: BrowserSpec },
    /// Answer: `BrowserReply`, or `Failed` where there is no browser. One after the other. `uploads` are files below `/workspace` that the
    /// browser may read for this call, by the names in `Browse::Upload`. `after_ms` ends it in the driver.
    Browse { ask: BrowserAction, uploads: Vec<String>, after_ms: u64 },
    /// Answer: `Done`.
    Ping,
}

/// Guest to host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "t", rename_all = "snake_case")]
pub enum FromGuest {
    Hello {
        version: u32,
    },
    KernelReady {
        version: String,
    },
    Event {
        event: KernelEvent,
    },
    /// What background processes printed since the last cell; sent at the start of a run, before its own output.
    LateOutput {
        stdout: String,
        stderr: String,
        dropped: u64,
    },
    /// At this point of the stream `bytes` were left out.
    Gap {
        stream: Stream,
        bytes: u64,
    },
    RunEnd {
        end: RunEnd,
    },
    /// A kernel ended while no cell ran in it (call 0).
    KernelExited {
        kernel: KernelId,
        how: Ended,
    },
    Written {
        size: u64,
    },
    /// Of the whole file. Who reads a file in ranges sees by the other two that it is still the same one.
    FileStart {
        size: u64,
        /// Nanoseconds since 1970.
        modified_ns: i64,
        inode: u64,
    },
    /// `total` counts all entries, for `Newest` all regular files.
    Files {
        entries: Vec<FileEntry>,
        total: u64,
    },
    BrowserReady {
        version: String,
    },
    Browsed {
        browsed: Box<BrowserReply>,
    },
    /// The browser ended by itself (call 0).
    BrowserExited,
    Done,
    Failed {
        failure: GuestFailure,
        message: String,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stream {
    Stdout,
    Stderr,
}

/// What a cell shows besides its streams.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "t", rename_all = "snake_case")]
pub enum KernelEvent {
    /// The value of the last expression, as a mime bundle.
    Result {
        data: MimeBundle,
    },
    Display {
        data: MimeBundle,
        id: Option<String>,
        update: bool,
    },
    Clear {
        wait: bool,
    },
    Error {
        name: String,
        value: String,
        text: String,
    },
    /// An error outside a cell (timer, unhandled rejection); with `ago`, what threads and timers of the cell so many before this one
    /// have written.
    Late {
        text: String,
        ago: Option<u64>,
    },
}

pub type MimeBundle = BTreeMap<String, serde_json::Value>;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunEnd {
    pub status: RunStatus,
    pub micros: u64,
    pub stdout_bytes: u64,
    pub stderr_bytes: u64,
    pub stdout_kept: Option<KeptOutput>,
    pub stderr_kept: Option<KeptOutput>,
}

/// A stream that was kept as a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptOutput {
    /// Of the file, below [`Root::Outputs`].
    pub name: String,
    /// How many are in the file, from the beginning of the stream on.
    pub bytes: u64,
}

/// How a cell or a command ended. Each is a distinct, honest outcome.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "t", rename_all = "snake_case")]
pub enum RunStatus {
    Ok,
    /// The code raised; an `Error` event went before (not for commands).
    Error,
    /// `exit()` in a cell (the kernel lives on).
    Exit {
        code: i32,
    },
    /// The deadline passed; the kernel lives on if the interrupt was heeded.
    TimedOut {
        state_kept: bool,
    },
    /// The host asked for an interrupt.
    Cancelled {
        state_kept: bool,
    },
    /// The code interrupted itself, or an interrupt came from elsewhere.
    Interrupted,
    /// The process running the cell is gone: state lost. For a command: how it ended.
    Ended {
        how: Ended,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "t", rename_all = "snake_case")]
pub enum Ended {
    Exited { code: i32 },
    Signaled { signal: i32 },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Relative to the directory that was asked for.
    pub path: String,
    pub size: u64,
    pub kind: FileKind,
    /// Seconds since 1970.
    pub modified: i64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FileKind {
    File,
    Directory,
    Symlink,
    Other,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GuestFailure {
    /// The path leads out, is not valid, or is not the kind of thing asked for.
    InvalidPath,
    NotFound,
    TooLarge,
    NoSpace,
    /// No such kernel, or it is busy, or it could not be started.
    Kernel,
    /// As many commands as may run at once do.
    Busy,
    /// There is no browser, or it cannot be started.
    Browser,
    /// A variable's name or value is not one, or there are too many. No value is told.
    Environment,
    /// Anything else the system refused.
    Io,
}
