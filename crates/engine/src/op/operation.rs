//! The operations with their arguments.

use std::collections::BTreeMap;
use std::time::Duration;

use proto::{Language, Root, browser};
use serde::{Deserialize, Serialize};

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
        owner: FileOwner,
        path: String,
        content: Vec<u8>,
    },
    ReadFile {
        owner: FileOwner,
        path: String,
    },
    ListFiles {
        owner: FileOwner,
        path: String,
        /// Number of levels to list, of which the rest is counted; `None` lists everything.
        depth: Option<u32>,
    },
    EditFile {
        owner: FileOwner,
        path: String,
        edit: Edit,
    },
    SearchFiles {
        owner: FileOwner,
        path: String,
        search: Search,
    },
    /// Makes a link by which one file can be uploaded to this path of the context's `/workspace`, once.
    UploadLink {
        target: Target,
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

impl Op {
    /// Returns whether the operation begins something new. The others read, wait, or end something.
    pub(crate) fn is_work(&self) -> bool {
        matches!(
            self,
            Self::CreateContext(_)
                | Self::RunCode(_)
                | Self::RunCommand(_)
                | Self::Browse(_)
                | Self::RunOnce(_)
                | Self::WriteFile { .. }
                | Self::EditFile { .. }
                | Self::UploadLink { .. }
        )
    }
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

/// Selects a context. If it does not exist and `make` is set, it is created as `make` describes.
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

/// A named choice of processors and memory for a context.
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
    /// Environment variables that only this run sees.
    pub env: Environment,
    pub network: Network,
    /// If true, the call returns at once with [`super::Outcome::Started`].
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
    /// Maximum number of characters about what the action changed on the page; 0 for no report.
    pub changes: u32,
    /// Time allowed for the action itself; starting the browser is not included.
    pub timeout: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// A line for `/bin/sh -c`.
    Shell(String),
    /// A line for `bash -c`, or for `/bin/sh -c` in a sandbox without bash.
    Bash(String),
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
    /// A context with one of its directories.
    Context(Target, Root),
    /// A conversation with its `/data`, which is created if it does not exist.
    Conversation(String),
}

impl FileOwner {
    /// Returns a context with its `/workspace`.
    pub fn workspace(target: Target) -> Self {
        Self::Context(target, Root::Workspace)
    }
}

/// A replacement of text in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Edit {
    /// Text that has to occur exactly once, unless `all` is set.
    pub old: String,
    pub new: String,
    pub all: bool,
}

/// What a search looks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Search {
    /// Pattern of file names; without one, every name fits.
    pub glob: Option<String>,
    /// Text in lines; without one, the names are the result.
    pub text: Option<String>,
    /// True if the text is a regular expression.
    pub regex: bool,
    /// Maximum size of the result in bytes.
    pub max_bytes: usize,
}
