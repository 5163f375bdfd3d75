//! What the browser of a sandbox is asked, and what it answers. The guest passes both on; the driver beside the browser does the work.
//!
//! Everything here can have been made up by a page that has taken over the browser: the host bounds and checks it like any other word
//! of the guest.

use serde::{Deserialize, Serialize};

/// How to start the browser. Paths are those inside the sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BrowserSpec {
    /// The binary itself, not a wrapper script.
    pub program: String,
    /// It needs no `--headless`, has one page view and no policies of its own: a third of the memory.
    pub shell: bool,
    /// Where everything but the sandbox's own loopback is asked for: `127.0.0.1:3128`. Without it there is nothing but loopback.
    pub proxy: Option<String>,
    /// Its own directory, empty at first: profile, cache, temporary files.
    pub home: String,
    /// Where downloads go: `/workspace/downloads`.
    pub downloads: String,
    /// Files of a certificate database (`cert9.db`, `key4.db`, `pkcs11.txt`) that the browser trusts; copied into its home.
    pub nssdb: Option<String>,
}

/// Guest to driver, in frames like those between host and guest. One request after the other; a frame's number names it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "t", rename_all = "snake_case")]
pub enum ToDriver {
    /// First. Answer: `Ready` or `Failed`.
    Start { spec: BrowserSpec },
    /// Answer: `BrowserReply`. `uploads` is the directory with the files of an upload.
    Browse { ask: BrowserAction, after_ms: u64, uploads: Option<String> },
    /// Ends the request of this number, which is then answered as `Cancelled`.
    Cancel,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "t", rename_all = "snake_case")]
pub enum FromDriver {
    Ready { version: String },
    Browsed { browsed: Box<BrowserReply> },
    Failed { message: String },
}

/// An element: a `ref_N` of a snapshot, or a CSS selector that matches one.
pub type Locator = String;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "t", rename_all = "snake_case")]
pub enum BrowserAction {
    /// In the current tab.
    Open {
        url: String,
    },
    Click {
        at: Locator,
        button: MouseButton,
        double: bool,
    },
    /// Replaces what stands in the field, or adds to it; `keys` sends each character as a key, for pages that listen to those.
    Type {
        at: Locator,
        text: String,
        append: bool,
        submit: bool,
        keys: bool,
    },
    /// `Enter`, `Control+A`; in the element, or where the focus is.
    Press {
        key: String,
        at: Option<Locator>,
    },
    /// Options of a select, by value or by what they show.
    Select {
        at: Locator,
        options: Vec<String>,
    },
    Hover {
        at: Locator,
    },
    /// The element into view; without a distance that is all.
    Scroll {
        at: Option<Locator>,
        right: i32,
        down: i32,
    },
    Back,
    Forward,
    Reload,
    /// Until the text is on the page, or no longer on it.
    Wait {
        text: String,
        gone: bool,
    },
    /// Into a file input. The guest has put the files where the browser may read them; these are their names there.
    Upload {
        at: Locator,
        files: Vec<String>,
    },
    Tab {
        tab: TabAsk,
    },
    /// JavaScript in the page's own world; what it comes to, as JSON.
    Evaluate {
        expression: String,
    },
    Snapshot(SnapshotAsk),
    Screenshot {
        at: Option<Locator>,
        full_page: bool,
    },
    /// What the page wrote to its console and asked the network for since it was opened, newest last.
    Log {
        max_lines: u32,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MouseButton {
    #[default]
    Left,
    Middle,
    Right,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "t", rename_all = "snake_case")]
pub enum TabAsk {
    List,
    New { url: Option<String> },
    Select { tab: u32 },
    Close { tab: u32 },
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SnapshotAsk {
    /// Characters of text and elements, together.
    pub max_chars: u32,
    /// Where an earlier one stopped: its `next`.
    pub from: Option<String>,
    /// Only what is new or other than in the snapshot of this number.
    pub since: Option<u64>,
    /// Only lines with this text, and where they are.
    pub find: Option<String>,
    /// Only this element and what is in it.
    pub within: Option<Locator>,
    /// The page's text and its elements apart, as the `workbench` document has them; otherwise one outline with both.
    pub apart: bool,
}

/// The answer to one request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BrowserReply {
    /// The page that is shown now; none when there is no browser any more.
    pub page: Option<PageInfo>,
    /// What happened since the last answer without being asked for, oldest first; at most [`MAX_HAPPENED`].
    pub happened: Vec<PageEvent>,
    pub result: Result<BrowseResult, BrowseError>,
}

pub const MAX_HAPPENED: usize = 50;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageInfo {
    pub url: String,
    pub title: String,
    /// The number of the tab that is shown, and how many there are.
    pub tab: u32,
    pub tabs: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "t", rename_all = "snake_case")]
pub enum PageEvent {
    /// Answered by itself: dismissed; a `beforeunload` accepted.
    Dialog { kind: String, message: String },
    /// A page opened another one; it is a tab now.
    Popup { tab: u32, url: String },
    /// Too many pages: it was closed.
    PopupClosed { url: String },
    /// `path` relative to `/workspace`, once it is there; `error` when it is not going to be.
    Download { url: String, path: Option<String>, size: u64, error: Option<String> },
    /// The page's own process died.
    Crashed { url: String },
    /// Whatever else is worth a line: a refused permission, a file chooser that nobody asked for.
    Note { text: String },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "t", rename_all = "snake_case")]
pub enum BrowseResult {
    Done,
    Snapshot(Snapshot),
    /// PNG in base64.
    Screenshot {
        png: String,
        width: u32,
        height: u32,
        clipped: bool,
    },
    /// JSON text of what an expression came to; cut at the budget of the request's message.
    Value {
        json: String,
        truncated: bool,
    },
    Tabs {
        tabs: Vec<TabInfo>,
    },
    Log {
        lines: Vec<String>,
        dropped: u64,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TabInfo {
    pub tab: u32,
    pub url: String,
    pub title: String,
    pub shown: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Snapshot {
    /// For `since`.
    pub number: u64,
    /// The readable text, where it was asked for apart.
    pub text: String,
    /// Lines such as `[ref_3] button "Sign in"`, in reading order.
    pub elements: String,
    /// Where the next part begins, when this is not all.
    pub next: Option<String>,
    /// With `since`: what is gone.
    pub removed: Vec<String>,
    /// What cannot be read, said once: a closed shadow root, a canvas, a frame that does not answer.
    pub notes: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BrowseError {
    pub why: BrowseFailure,
    /// One sentence; the browser's own text is in it where there is one.
    pub message: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BrowseFailure {
    /// No element matches.
    NotFound,
    /// The element of this ref is gone, or there never was one.
    Stale,
    /// Several match.
    Ambiguous,
    /// It is there, but hidden, disabled, moving, covered or of the wrong kind.
    NotReady,
    /// The page could not be opened.
    Navigation,
    /// The time is over; what was done so far stays done.
    TimedOut,
    /// The page's process died; the next call gets a fresh one.
    Crashed,
    /// An expression that threw.
    Threw,
    /// The request itself: a selector, a key or a tab that is none.
    Invalid,
    Cancelled,
    /// The browser is gone or does not answer; it can be started again.
    NoBrowser,
}
