//! Renders the outcome of browser actions: the page, its page events, and the denials.
//!
//! Titles, addresses and messages come from the page: each is put on one line and bounded.

use std::time::Duration;

use engine::op::Browsed;
use engine::op::browser::{BrowseError, BrowseFailure, PageEvent, PageInfo};

use super::one_line;
use crate::output::{output, unless_empty};
use crate::{Block, RenderInput};

/// Usual timeouts of opening a page, of one action, and of looking at the page.
pub(crate) const OPENING: Duration = Duration::from_secs(30);
pub(crate) const ACTING: Duration = Duration::from_secs(5);
pub(crate) const LOOKING: Duration = Duration::from_secs(10);

output! {
    /// Holds the page events and denials that an answer reports beside its result. Pages can influence all of it.
    #[derive(Default)]
    struct PageNotes { happened: Option<Vec<String>>, denied: Option<Vec<String>> }
}

impl PageNotes {
    pub fn of(browsed: &Browsed) -> Self {
        let happened = browsed.happened.iter().map(sentence).collect();
        Self { happened: unless_empty(happened), denied: unless_empty(browsed.denied.clone()) }
    }

    pub fn is_empty(&self) -> bool {
        self.happened.is_none() && self.denied.is_none()
    }
}

fn sentence(happened: &PageEvent) -> String {
    let address = |url: &str| one_line(url);
    match happened {
        PageEvent::Dialog { kind, message } => {
            let answered = if kind == "beforeunload" { "accepted" } else { "dismissed" };
            let said = if message.is_empty() { String::new() } else { format!(": {}", one_line(message)) };
            format!("a dialog ({}) was {answered}{said}", one_line(kind))
        }
        PageEvent::Popup { tab, url } => format!("the page opened tab {tab}: {}", address(url)),
        PageEvent::PopupClosed { url } => format!("a page was closed, there are too many tabs: {}", address(url)),
        PageEvent::Download { path: Some(path), size, url, error: None } => {
            format!("downloaded {} ({size} bytes) from {}", one_line(path), address(url))
        }
        PageEvent::Download { url, error, .. } => {
            let why = error.as_deref().unwrap_or("it did not end");
            format!("the download of {} failed: {}", address(url), one_line(why))
        }
        PageEvent::Crashed { url } => format!("the page crashed: {}", address(url)),
        PageEvent::Note { text } => one_line(text),
    }
}

/// Returns the page that is shown. After a failed navigation that is the previous page or the browser's error page,
/// neither of which concerns the client, so the result is `None`.
pub(crate) fn page_of(browsed: &mut Browsed) -> Option<PageInfo> {
    let is_open = !matches!(&browsed.result, Err(BrowseError { why: BrowseFailure::Navigation, .. }));
    browsed.page.take().filter(|_| is_open)
}

/// What in the network keeps a page from being opened, as opposed to a fault of the page.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Barrier {
    Denied,
    /// The sandbox has no network access at all.
    Off,
    None,
}

impl Barrier {
    pub fn of(browsed: &Browsed) -> Self {
        let is_off = |error: &BrowseError| error.message.starts_with("network access is off");
        match &browsed.result {
            Err(error) if is_off(error) => Self::Off,
            Err(_) if !browsed.denied.is_empty() => Self::Denied,
            _ => Self::None,
        }
    }
}

/// Returns links to the files that the page downloaded into the workspace. There are none to other files.
pub(crate) fn downloads(input: &RenderInput<'_>, browsed: &Browsed) -> Vec<Block> {
    let done = browsed.happened.iter().filter_map(|happened| match happened {
        PageEvent::Download { path: Some(path), size, error: None, .. } if !path.starts_with('/') => {
            Some((path, *size))
        }
        _ => None,
    });
    input.fence.blocks(done.filter_map(|(path, size)| input.link(&browsed.context.key, path, Some(size))).collect())
}

/// Returns the beginning of a message, for a line that contains more than the message.
pub(crate) fn brief(message: &str) -> String {
    const MOST: usize = 400;
    let line = one_line(message);
    match line.char_indices().nth(MOST) {
        Some((cut, _)) => format!("{}…", &line[..cut]),
        None => line,
    }
}

/// Formats a page as `https://example.com (Example)`.
pub(crate) fn shown(page: &PageInfo) -> String {
    match page.title.as_str() {
        "" => one_line(&page.url),
        title => format!("{} ({})", one_line(&page.url), one_line(title)),
    }
}
