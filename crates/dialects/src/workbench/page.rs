//! Renders the answers of the browser tools: the page, or a failure with a hint that names the next call.

use std::borrow::Cow;

use engine::op::Browsed;
use engine::op::browser::{BrowseError, BrowseFailure, BrowseResult, PageInfo, Snapshot};
use serde::Serialize;
use serde_json::{Value, json};
use text::clipped;

use super::render::failure_line;
use super::{MOST_SNAPSHOT_TEXT, SNAPSHOT_TEXT};
use crate::output::{object, output, unless_empty};
use crate::shared::browse::{self, Barrier, PageNotes};
use crate::shared::untrusted;
use crate::shared::{TEXT_BUDGET, one_line};
use crate::{Answer, Block, RenderInput};

output! {
    /// Holds the members that the page wrote or that may contain text of the page.
    struct ShownPage { url: String, title: String, happened: Option<Vec<String>>, denied: Option<Vec<String>> }

    /// Holds the members of a page with its snapshot.
    struct SeenPage {
        url: String,
        title: String,
        text: String,
        elements: String,
        notes: Option<Vec<String>>,
        happened: Option<Vec<String>>,
        denied: Option<Vec<String>>,
    }

    /// Holds the members that this server wrote.
    struct TrustedPart {
        /// Notice of what was lost since the last call.
        notice: Option<String>,
    }
}

pub(super) fn page_schema() -> Value {
    object(untrusted::members(TrustedPart::members(), ShownPage::members()))
}

pub(super) fn snapshot_schema() -> Value {
    object(untrusted::members(TrustedPart::members(), SeenPage::members()))
}

/// The arguments of a call that its answer depends on.
pub(super) struct PageRequest {
    /// Name of the argument that says where.
    pub field: Option<&'static str>,
    /// Number of characters of a page's text in a snapshot.
    pub text_length: u64,
}

impl PageRequest {
    pub fn new(field: &'static str) -> Self {
        Self { field: Some(field), text_length: SNAPSHOT_TEXT }
    }
}

pub(super) fn browsed(input: &RenderInput<'_>, request: &PageRequest, mut browsed: Browsed) -> Answer {
    let (notes, trusted) = (PageNotes::of(&browsed), TrustedPart { notice: browsed.notice.take() });
    let (page, barrier) = (browse::page_of(&mut browsed), Barrier::of(&browsed));
    let mut answer = match &mut browsed.result {
        Ok(result) => {
            let (url, title) =
                page.as_ref().map(|page| (one_line(&page.url), one_line(&page.title))).unwrap_or_default();
            let shown_page = ShownPage { url, title, happened: notes.happened, denied: notes.denied };
            match result {
                BrowseResult::Snapshot(snapshot) => {
                    shown(input, page, &seen(request, shown_page, std::mem::take(snapshot)), &trusted)
                }
                _ => shown(input, page, &shown_page, &trusted),
            }
        }
        Err(error) => {
            let line = failure_line(input, &why(input, request, error), &hint(input, error.why, barrier));
            failed(input, line, error, &notes, &trusted)
        }
    };
    answer.blocks.extend(browse::downloads(input, &browsed));
    answer
}

fn shown<P: Serialize>(
    input: &RenderInput<'_>,
    page: Option<PageInfo>,
    untrusted: &P,
    trusted: &TrustedPart,
) -> Answer {
    let how = page.map(|page| input.fence.inline(&browse::shown(&page))).unwrap_or_default();
    // The document demands a first line and JSON, so the marks are placed inside both.
    let text = format!("{} ok: {how}\n{}", input.tool, input.fence.json(trusted, untrusted));
    let structured = untrusted::structured(trusted, untrusted);
    Answer { blocks: vec![Block::Text(text)], structured, fits: true, ..Answer::default() }
}

/// Returns the page with the beginning of its text, and with its elements.
fn seen(request: &PageRequest, page: ShownPage, snapshot: Snapshot) -> SeenPage {
    let most = usize::try_from(request.text_length).unwrap_or(TEXT_BUDGET);
    let cut = snapshot.text.char_indices().nth(most).map(|(at, _)| at);
    let mut notes: Vec<String> = snapshot.notes.iter().map(|note| one_line(note)).collect();
    let text = &snapshot.text[..cut.unwrap_or(snapshot.text.len())];
    if snapshot.text_is_cut || cut.is_some() {
        let remedy = match request.text_length {
            MOST_SNAPSHOT_TEXT.. => ", the most there may be",
            _ => ": call browser_snapshot with a larger maxTextLen",
        };
        notes.push(format!("text has its first {} characters{remedy}", text.chars().count()));
    }
    if snapshot.next.is_some() {
        notes.push("the page has more elements than these: use a CSS selector for one that is not listed".into());
    }
    // The browser respects the requested length; an attacker who has taken it over may not.
    let elements = clipped(&snapshot.elements, most.saturating_add(2 * TEXT_BUDGET));
    if matches!(elements, Cow::Owned(_)) {
        notes.push("elements are cut".into());
    }
    SeenPage {
        url: page.url,
        title: page.title,
        text: text.to_owned(),
        elements: elements.into_owned(),
        notes: unless_empty(notes),
        happened: page.happened,
        denied: page.denied,
    }
}

/// Renders a failure as the document's two lines, with the remaining facts in JSON below them.
fn failed(
    input: &RenderInput<'_>,
    mut text: String,
    error: &BrowseError,
    notes: &PageNotes,
    trusted: &TrustedPart,
) -> Answer {
    if !notes.is_empty() || trusted.notice.is_some() {
        text = format!("{text}\n{}", input.fence.json(trusted, notes));
    }
    let structured = untrusted::structured(&json!({}), &json!({ "error": error.message }));
    Answer { blocks: vec![Block::Text(text)], structured, ..Answer::default() }.failed()
}

fn why(input: &RenderInput<'_>, request: &PageRequest, error: &BrowseError) -> String {
    let what = match error.why {
        BrowseFailure::NotFound | BrowseFailure::Stale => "element not found".into(),
        // The browser's messages may contain text of the page. They are bounded here, so that the closing mark is not
        // cut off.
        _ => input.fence.inline(&browse::brief(&error.message)),
    };
    match request.field.and_then(|name| Some((name, input.args.get(name)?.as_str()?))) {
        Some((_, value)) if what.contains(value) => what,
        Some((name, value)) => format!("{what} ({name}=\"{}\")", one_line(value)),
        None => what,
    }
}

fn hint(input: &RenderInput<'_>, why: BrowseFailure, barrier: Barrier) -> String {
    use BrowseFailure as F;
    let tool = input.tool;
    match why {
        F::NotFound | F::Stale => "call browser_snapshot first and use one of the returned refs".into(),
        F::Ambiguous => {
            "call browser_snapshot and use the ref of the one you mean, or a selector that matches it alone".into()
        }
        F::NotReady => {
            format!("call browser_snapshot to see what is in the way, deal with that, then call {tool} again")
        }
        F::Navigation if barrier == Barrier::Off => {
            "call browser_goto with a page that code_run serves, at http://localhost:PORT, or ask the operator for a network"
                .into()
        }
        F::Navigation if barrier == Barrier::Denied => {
            "call browser_goto with an address that is allowed; `denied` below says how the operator can allow this one"
                .into()
        }
        F::Navigation => "check the address and call browser_goto again".into(),
        F::TimedOut => format!("call browser_snapshot to see how far the page is, or call {tool} again"),
        F::Crashed | F::NoBrowser => "call browser_goto to open the page again".into(),
        F::Threw | F::Invalid => format!("correct the arguments and call {tool} again"),
        F::Cancelled => format!("call {tool} again if it should complete"),
    }
}
