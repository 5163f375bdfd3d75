//! This module defines the messages as closed enums. An unknown message ends the connection.
//!
//! The host does not trust the guest: it bounds and checks everything it reads. No message contains a host path, a
//! secret or an instruction.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::browser::{BrowserAction, BrowserReply, BrowserSpec};

/// Number of a kernel within one sandbox, chosen by the host.
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

/// Describes how to start a kernel. All paths are paths inside the sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelSpec {
    pub language: Language,
    /// Interpreter, its flags and the path of the driver file.
    pub argv: Vec<String>,
    /// Complete environment of the process, which inherits nothing.
    pub env: BTreeMap<String, String>,
    pub cwd: String,
    /// If set, descriptors 1 and 2 are the same pipe, and all output arrives as `Stdout` in the order in which it was
    /// written.
    pub merge_output: bool,
}

/// Directory that contains the path of a file operation. Absolute paths are accepted if they lie below this directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Root {
    /// The directory `/workspace`.
    Workspace,
    /// The directory `/data`.
    Data,
    /// The directory `/tmp`.
    Tmp,
    /// Kept output, addressed by the names in `KeptOutput`. These files are read-only and expire after a while.
    Outputs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ListOrder {
    /// Lists all entries, including directories, sorted by path.
    Path,
    /// Lists only regular files, most recently modified first.
    Newest,
    /// Lists the entries of `depth` levels, sorted by path. What is below them is only counted, and so is the content of
    /// directories with fetched or generated files, such as `node_modules`.
    Levels { depth: u32 },
}

/// Time limit of a call. The guest counts from the moment it starts the work; the host enforces the limit again from
/// outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deadline {
    pub after_ms: u64,
    /// Time between the interrupt and the kill.
    pub grace_ms: u64,
}

/// Messages from the host to the guest. The frame's `call` identifies the request; its replies carry the same number.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "t", rename_all = "snake_case", deny_unknown_fields)]
pub enum ToGuest {
    /// The host sends this message first on each connection. The guest replies with `Hello`.
    Hello { version: u32 },
    /// Starts a kernel. The guest replies with `KernelReady` or `Failed`. A `warm` kernel is not executed: the guest
    /// takes the oldest fork of the warm interpreter that was put into the sandbox and is still unused, and gives it
    /// the same environment, directory and descriptors as any other kernel.
    StartKernel { kernel: KernelId, spec: KernelSpec, warm: bool },
    /// Kills the kernel and its process group. The guest replies with `Done`.
    StopKernel { kernel: KernelId },
    /// Runs one cell. The guest replies with output frames, `Event`s and `Gap`s, then with exactly one `RunEnd` (or
    /// `Failed`). It forwards at most `forward_bytes` of each stream; of the rest it stores the tail and counts the
    /// bytes. A stream of more than `keep_over` bytes becomes kept output, a file of at most `MAX_KEPT` bytes.
    Run {
        kernel: KernelId,
        code: String,
        /// Environment variables for this cell, in addition to those of the kernel; see `check_environment`.
        env: BTreeMap<String, String>,
        deadline: Deadline,
        forward_bytes: u64,
        keep_over: Option<u64>,
    },
    /// Runs a command while cells and at most `MAX_COMMANDS - 1` other commands may be running. The guest replies with
    /// output frames and `Gap`s, then with exactly one `RunEnd` (or `Failed`).
    Exec {
        argv: Vec<String>,
        /// Complete environment of the process, which inherits nothing.
        env: BTreeMap<String, String>,
        cwd: String,
        /// Merges the two output streams, as in `KernelSpec`.
        merge_output: bool,
        deadline: Deadline,
        forward_bytes: u64,
        keep_over: Option<u64>,
    },
    /// Interrupts the `Run` or `Exec` call with this number and kills it after its grace time. This message has no
    /// reply: the interrupted call ends with `Cancelled`. It also ends a `StreamFile` or `SearchFiles` call, which then
    /// has no reply.
    Interrupt,
    /// Writes a file, creating missing directories. The host sends `size` bytes in `File` frames of the same call. The
    /// guest replies with `Written` or `Failed`. `Failed` may arrive before all bytes were sent; the guest then ignores
    /// the rest.
    WriteFile { root: Root, path: String, size: u64 },
    /// Writes a file whose size is not known in advance, creating missing directories. The host sends at most `max_size`
    /// bytes in `File` frames of the same call and then `EndFile`. The guest replies as for `WriteFile`. `Interrupt`
    /// removes what was written; the guest then sends no reply.
    StreamFile { root: Root, path: String, max_size: u64 },
    /// Ends the file of the `StreamFile` call with this number, which then gets its name.
    EndFile,
    /// Replaces `old` with `new` in a text file if `old` occurs exactly once, or everywhere if `all` is set. The guest
    /// replies with `Edited` or `Failed`. A file that is larger than `max_size`, or would be, fails with `TooLarge`.
    EditFile { root: Root, path: String, old: String, new: String, all: bool, max_size: u64 },
    /// Searches the names and the lines of the files below `path`. The guest replies with `Found` or `Failed`.
    SearchFiles { root: Root, path: String, query: SearchQuery },
    /// Reads a file. The guest replies with `FileStart`, then `File` frames with at most `length` bytes starting at
    /// `offset`, then `Done`; or with `Failed`. A file larger than `max_size` fails with `TooLarge`.
    ReadFile { root: Root, path: String, offset: u64, length: u64, max_size: Option<u64> },
    /// Lists the entries below `path`: the first `max_entries` in the given order. The guest replies with `Files` or
    /// `Failed`.
    ListFiles { root: Root, path: String, max_entries: u32, order: ListOrder },
    /// Takes the browser driver that was put into the sandbox and has it start the browser with a blank page. The guest
    /// replies with `BrowserReady` or `Failed`. It first ends a browser that is already running.
    StartBrowser { spec: BrowserSpec },
    /// Performs one browser action at a time. The guest replies with `Browsed`, or with `Failed` if there is no
    /// browser. `uploads` lists files below `/workspace` that the browser may read for this call, under the names in
    /// `BrowserAction::Upload`. The driver ends the action after `after_ms`. `changes` is the maximum number of
    /// characters about what the action changed on the page.
    Browse { ask: BrowserAction, uploads: Vec<String>, after_ms: u64, changes: u32 },
    /// Checks that the guest responds. The guest replies with `Done`.
    Ping,
}

/// Messages from the guest to the host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "t", rename_all = "snake_case")]
pub enum FromGuest {
    /// Replies to the host's `Hello` with the guest's version of the protocol.
    Hello { version: u32 },
    /// The kernel runs; `version` is that of its interpreter.
    KernelReady { version: String },
    /// Something that the cell produced.
    Event { event: KernelEvent },
    /// Output that background processes wrote after the last cell. The guest sends it at the start of a run, before the
    /// run's own output.
    LateOutput { stdout: String, stderr: String, dropped: u64 },
    /// The guest left out `bytes` bytes of the stream at this point.
    Gap { stream: Stream, bytes: u64 },
    /// The cell or command has ended.
    RunEnd { end: RunEnd },
    /// A kernel ended while it ran no cell. The frame's call is 0.
    KernelExited { kernel: KernelId, how: Ended },
    /// The file was written.
    Written { size: u64 },
    /// Describes the whole file. A client that reads a file in ranges compares `modified_ns` and `inode` to detect that
    /// the file was replaced or changed.
    FileStart {
        size: u64,
        /// Modification time in nanoseconds since 1970.
        modified_ns: i64,
        inode: u64,
    },
    /// Result of a listing. `total` counts all entries, or all regular files for `ListOrder::Newest`, even if `entries`
    /// contains fewer.
    Files { entries: Vec<FileEntry>, total: u64 },
    /// Result of an edit. If `replaced` is 0, the file is as it was.
    Edited {
        /// How often the text occurs.
        found: u64,
        replaced: u64,
        /// Lines of the first occurrences, counted from 1.
        lines: Vec<u64>,
        /// Size of the file after the edit.
        size: u64,
    },
    /// Result of a search.
    Found { found: FoundLines },
    /// The browser shows a blank page; `version` is the browser's own.
    BrowserReady { version: String },
    /// The browser action has ended.
    Browsed { browsed: Box<BrowserReply> },
    /// The browser ended without a request. The frame's call is 0.
    BrowserExited,
    /// The call has succeeded and has no other result.
    Done,
    /// The call has failed.
    Failed { failure: GuestFailure, message: String },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stream {
    Stdout,
    Stderr,
}

/// Something a cell produces besides its output streams.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "t", rename_all = "snake_case")]
pub enum KernelEvent {
    /// Value of the last expression, as a MIME bundle.
    Result { data: MimeBundle },
    /// Something that the code displays, or a new version of what it displayed under this id.
    Display { data: MimeBundle, id: Option<String>, update: bool },
    /// The code clears what it displayed, at once or when it displays something else.
    Clear { wait: bool },
    /// The error that ended the cell.
    Error { name: String, value: String, text: String },
    /// An error outside a cell, such as one from a timer or an unhandled rejection. If `ago` is set, the text is
    /// instead output from threads and timers of an earlier cell, `ago` cells before this one.
    Late { text: String, ago: Option<u64> },
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

/// Describes an output stream that was kept as a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptOutput {
    /// Name of the file below [`Root::Outputs`].
    pub name: String,
    /// Number of bytes in the file, counted from the beginning of the stream.
    pub bytes: u64,
}

/// Describes how a cell or a command ended. Each variant is a distinct outcome, so that none is reported as another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "t", rename_all = "snake_case")]
pub enum RunStatus {
    /// The code ran to its end.
    Ok,
    /// The code raised an error. For a cell, an `Error` event was sent before; for a command there is none.
    Error,
    /// The cell called `exit()`. The kernel continues to run.
    Exit { code: i32 },
    /// The deadline passed. The kernel continues to run if it obeyed the interrupt.
    TimedOut { state_kept: bool },
    /// The host requested an interrupt.
    Cancelled { state_kept: bool },
    /// The code interrupted itself, or an interrupt came from another source.
    Interrupted,
    /// The process that ran the cell ended, so its state is lost. For a command, this is its normal end.
    Ended { how: Ended },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "t", rename_all = "snake_case")]
pub enum Ended {
    Exited { code: i32 },
    Signaled { signal: i32 },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Path relative to the requested directory.
    pub path: String,
    pub size: u64,
    pub kind: FileKind,
    /// Modification time in seconds since 1970.
    pub modified: i64,
    /// Number of entries below a directory that was not listed, but counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub below: Option<u64>,
}

/// Describes what a search looks for, and its bounds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SearchQuery {
    /// Pattern of file names with `*`, `**`, `?`, `[…]` and `{a,b}`. It applies to the path below the searched directory
    /// if it contains a slash, and to the last component otherwise. Without a pattern every name fits.
    pub glob: Option<String>,
    /// Text to find in lines, literally or as a regular expression. Without a text the names are the result.
    pub text: Option<String>,
    pub regex: bool,
    pub max_lines: u32,
    /// Maximum number of bytes of all paths and lines of the result together.
    pub max_bytes: u32,
    pub after_ms: u64,
}

/// The lines, or the names, that a search found, in the order of their paths.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FoundLines {
    pub lines: Vec<FoundLine>,
    /// Number of files whose name fitted and that were read or listed.
    pub files: u64,
    /// Number of files with a fitting name that were not read, because they are binary, too large or unreadable.
    pub skipped: u64,
    /// The bound that ended the search early.
    pub stopped: Option<SearchBound>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FoundLine {
    /// Path relative to the searched directory.
    pub path: String,
    /// Line number counted from 1, or 0 if the name is the result.
    pub line: u64,
    /// The line, or the part of a long line around the place that was found.
    pub text: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SearchBound {
    Time,
    /// The number of files and directories, or the number of bytes that are read.
    Size,
    Results,
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
    /// The path leads outside the root, is invalid, or names something of the wrong kind.
    InvalidPath,
    NotFound,
    TooLarge,
    NoSpace,
    /// The server's disk, on which the volume lies, is full, although the volume is not.
    DiskFull,
    /// The kernel does not exist, is busy, or could not be started.
    Kernel,
    /// The maximum number of commands, or of searches, is already running.
    Busy,
    /// There is no browser, or it cannot be started.
    Browser,
    /// A variable has an invalid name or value, or there are too many variables. The message contains no values.
    Environment,
    /// The pattern of a search is invalid or too large.
    Pattern,
    /// The operating system refused the operation for any other reason.
    Io,
}
