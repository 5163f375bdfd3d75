//! This module defines browser actions and their replies. The guest only passes them on; the driver next to the browser
//! does the work.
//!
//! A page that has taken over the browser can forge everything here, so the host bounds and checks it like any other
//! message of the guest.

use serde::{Deserialize, Serialize};

/// Describes how to start the browser. All paths are paths inside the sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BrowserSpec {
    /// Path of the binary itself, not of a wrapper script.
    pub program: String,
    /// Whether `program` is Chromium's headless shell. The shell needs no `--headless`, has a single page view and no
    /// policies, and uses a third of the memory.
    pub shell: bool,
    /// Address of the proxy for everything except the sandbox's loopback: `127.0.0.1:3128`. Without a proxy the browser
    /// reaches only loopback.
    pub proxy: Option<String>,
    /// Home directory of the browser, initially empty, for its profile, cache and temporary files.
    pub home: String,
    /// Configuration of fontconfig to use instead of the system's.
    pub fontconfig: Option<String>,
    /// Directory of the files that can be opened as pages: `/workspace`.
    pub workspace: String,
    /// Directory for downloads: `/workspace/downloads`, or another one if a directory of the host is the workspace.
    pub downloads: String,
    /// Directory with the files of a certificate database (`cert9.db`, `key4.db`, `pkcs11.txt`) that the browser
    /// trusts. The driver copies them into the browser's home.
    pub nssdb: Option<String>,
}

/// Messages from the guest to the driver, in frames like those between host and guest. The guest sends one request at a
/// time; the frame's number identifies it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "t", rename_all = "snake_case")]
pub enum ToDriver {
    /// The guest sends this message first. The driver replies with `Ready` or `Failed`.
    Start { spec: BrowserSpec },
    /// Performs a browser action. The driver replies with `Browsed`. `uploads` is the directory that contains the files
    /// of an upload. `changes` is the maximum number of characters about what the action changed on the page; with 0
    /// nothing is reported about it.
    Browse { ask: BrowserAction, after_ms: u64, uploads: Option<String>, changes: u32 },
    /// Answers a `FromDriver::ReadFile` of this number: the size of the whole file. A data frame with the bytes follows,
    /// which is empty at the end of the file.
    File { size: u64 },
    /// Answers a `FromDriver::ReadFile` of this number: there is no such file, or the driver may not have it.
    NoFile,
    /// Cancels the request with this number, which the driver then answers as `Cancelled`.
    Cancel,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "t", rename_all = "snake_case")]
pub enum FromDriver {
    Ready {
        version: String,
    },
    Browsed {
        browsed: Box<BrowserReply>,
    },
    Failed {
        message: String,
    },
    /// Asks for a part of a file in the directory of the page that was opened last with `BrowserAction::OpenFile`, and for
    /// none after another address was opened. The driver chooses the number, and sends one at a time.
    ReadFile {
        path: String,
        offset: u64,
    },
}

/// Identifies an element by a `ref_N` of a snapshot, or by a target that matches exactly one element: a CSS selector, which
/// may contain `:has-text("Go")`, or `text=Go`, `"Go"`, `button "Go"`, `role=button[name="Go"]` or an XPath expression.
pub(crate) type Locator = String;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "t", rename_all = "snake_case")]
pub enum BrowserAction {
    /// Opens the URL in the current tab.
    Open { url: String },
    /// Opens the file, whose path is relative to `/workspace`, in the current tab. The page may read the files below its
    /// directory until another address is opened.
    OpenFile { path: String },
    /// Clicks the element.
    Click { at: Locator, button: MouseButton, double: bool },
    /// Replaces the text of the field, or appends to it. `keys` sends each character as a key press, for pages that
    /// listen to key events.
    Type { at: Locator, text: String, append: bool, submit: bool, keys: bool },
    /// Presses a key such as `Enter` or `Control+A`, in the element or, without one, at the current focus.
    Press { key: String, at: Option<Locator> },
    /// Selects options of a `select` element, by value or by visible text.
    Select { at: Locator, options: Vec<String> },
    /// Moves the mouse over the element.
    Hover { at: Locator },
    /// Scrolls the element into view, then scrolls by the distance if it is not zero. Without an element, scrolls the
    /// page by the distance.
    Scroll { at: Option<Locator>, right: i32, down: i32 },
    /// Goes back in the history of the tab.
    Back,
    /// Goes forward in the history of the tab.
    Forward,
    /// Loads the page again.
    Reload,
    /// Waits until the text appears on the page, or until it disappears if `gone` is set.
    Wait { text: String, gone: bool },
    /// Puts files into a file input. The guest has copied the files to a directory that the browser may read; `files`
    /// contains their names in it.
    Upload { at: Locator, files: Vec<String> },
    /// Lists, opens, shows or closes tabs.
    Tab { tab: TabAsk },
    /// Evaluates JavaScript in the page's main world and returns the result as JSON.
    Evaluate { expression: String },
    /// Returns the outline of the page.
    Snapshot(SnapshotAsk),
    /// Returns a picture of the element, of the window, or of the whole page.
    Screenshot { at: Option<Locator>, full_page: bool },
    /// Returns what the page wrote to its console and requested from the network since it was opened, newest last.
    Log { max_lines: u32 },
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
    /// Maximum number of characters of text and elements together.
    pub max_chars: u32,
    /// Position at which an earlier snapshot stopped, taken from its `next`.
    pub from: Option<String>,
    /// Restricts the snapshot to what is new or has changed since the snapshot with this number.
    pub since: Option<u64>,
    /// Restricts the snapshot to lines that contain this text, together with their position.
    pub find: Option<String>,
    /// Restricts the snapshot to this element and its contents.
    pub within: Option<Locator>,
    /// Maximum number of characters of text, if the text and the elements of the page are returned separately, as the
    /// `workbench` document specifies. Otherwise one outline contains both.
    pub apart: Option<u32>,
}

/// Reply to one browser action.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BrowserReply {
    /// The current page, or `None` if the browser is gone.
    pub page: Option<PageInfo>,
    /// Page events since the last reply, oldest first; at most [`MAX_HAPPENED`].
    pub happened: Vec<PageEvent>,
    pub result: Result<BrowseResult, BrowseError>,
    pub extras: ReplyExtras,
}

/// Parts of a reply that only some dialects show.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ReplyExtras {
    /// Lines such as `[ref_3] button "Go"` for the elements that a locator may mean, if it does not match exactly one.
    pub candidates: Vec<String>,
    /// What the action changed on the page, if the request asked for it: new lines of the outline marked with `+`, removed
    /// ones marked with `-`.
    pub changed: Option<String>,
}

pub const MAX_HAPPENED: usize = 50;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageInfo {
    pub url: String,
    pub title: String,
    /// Number of the current tab. `tabs` is the number of all tabs.
    pub tab: u32,
    pub tabs: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "t", rename_all = "snake_case")]
pub enum PageEvent {
    /// The page opened a dialog, and the driver answered it: it accepts `alert` and `beforeunload` dialogs and
    /// dismisses all others.
    Dialog { kind: String, message: String },
    /// A page opened another page, which is now a tab.
    Popup { tab: u32, url: String },
    /// A page opened another page, which the driver closed because there were too many.
    PopupClosed { url: String },
    /// A download ended. `path` is relative to `/workspace`, or absolute, and set once the file is there; `error` is set if the
    /// download failed.
    Download { url: String, path: Option<String>, size: u64, error: Option<String> },
    /// The process of the page died.
    Crashed { url: String },
    /// Any other event worth reporting, such as a refused permission or a file chooser that no action requested.
    Note { text: String },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "t", rename_all = "snake_case")]
pub enum BrowseResult {
    /// The action was performed; it has no other result.
    Done,
    /// The outline of the page.
    Snapshot(Snapshot),
    /// A screenshot as a PNG in base64.
    Screenshot { png: String, width: u32, height: u32, clipped: bool },
    /// Value of an expression as JSON text, truncated at the driver's limit.
    Value { json: String, truncated: bool },
    /// All tabs.
    Tabs { tabs: Vec<TabInfo> },
    /// The newest lines of the page's log, and how many older ones were dropped.
    Log { lines: Vec<String>, dropped: u64 },
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
    /// Number of this snapshot, for use in `SnapshotAsk::since`.
    pub number: u64,
    /// Readable text of the page, if `SnapshotAsk::apart` requested it separately.
    pub text: String,
    /// Whether the page has more text than `text`.
    pub text_is_cut: bool,
    /// Lines such as `[ref_3] button "Sign in"`, in reading order.
    pub elements: String,
    /// Position at which the next part begins, if the snapshot is incomplete.
    pub next: Option<String>,
    /// Lines that have disappeared, if the request had `SnapshotAsk::since`.
    pub removed: Vec<String>,
    /// Notes about parts of the page that cannot be read, such as a closed shadow root, a canvas or a frame that does
    /// not answer. Each note occurs once.
    pub notes: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BrowseError {
    pub why: BrowseFailure,
    /// One sentence that includes the browser's own error text, if there is one.
    pub message: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BrowseFailure {
    /// No element matches the locator.
    NotFound,
    /// The element of this ref no longer exists, or never existed.
    Stale,
    /// Several elements match the locator.
    Ambiguous,
    /// The element exists, but is hidden, disabled, moving, covered or of the wrong kind.
    NotReady,
    /// The page could not be opened.
    Navigation,
    /// The time ran out. Everything done up to then stays done.
    TimedOut,
    /// The process of the page died. The next call gets a new page.
    Crashed,
    /// The expression threw an exception.
    Threw,
    /// The request is invalid, for example because of its selector, key or tab.
    Invalid,
    Cancelled,
    /// The browser is gone or does not respond. It can be started again.
    NoBrowser,
}
