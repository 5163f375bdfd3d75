//! Renders the answers of the browser tools: one object for all of them, with the members that apply.

use engine::op::browser::{BrowseError, BrowseFailure, BrowseResult, Snapshot};
use engine::op::{Browsed, EngineError};
use serde_json::Value;
use text::clipped;

use super::answer::{add_note, bounded};
use super::errors::sentence;
use super::{DEFAULT_CONTEXT, network};
use crate::output::{Output, object, output, unless_empty};
use crate::shared::browse::{self, Barrier, PageNotes};
use crate::shared::one_line;
use crate::shared::run::Picture;
use crate::shared::untrusted;
use crate::{Answer, Block, RenderInput, Reply};

output! {
    /// Holds the members that this server wrote.
    #[derive(Default)]
    struct TrustedMembers {
        success: bool,
        /// Advice on what to do next.
        note: Option<String>,
        /// The tab that is shown, present if there are several.
        tab: Option<u32>,
        /// Number of a snapshot, for the argument `since`.
        snapshot: Option<u64>,
        width: Option<u32>,
        height: Option<u32>,
        /// Notice of what was lost since the last call.
        notice: Option<String>,
        context: Option<String>,
        context_created: Option<bool>,
    }

    /// Holds the members that the page wrote or that may contain text of the page.
    #[derive(Default)]
    struct UntrustedMembers {
        error: Option<String>,
        url: Option<String>,
        title: Option<String>,
        tabs: Option<Vec<TabRow>>,
        /// Result of an expression, as JSON text.
        value: Option<String>,
        log: Option<Vec<String>>,
        /// The text of an answer has the outline in a separate block.
        elements: Option<String>,
        /// Where the next part of a snapshot begins, for the argument `from`.
        next: Option<String>,
        removed: Option<Vec<String>>,
        notes: Option<Vec<String>>,
        /// What an action changed: new lines of the outline begin with `+`, removed ones with `-`.
        changed: Option<String>,
        happened: Option<Vec<String>>,
        denied: Option<Vec<String>>,
    }

    struct TabRow { tab: u32, url: String, title: String, shown: Option<bool> }
    struct Failed { success: bool, error: String }
}

/// The members that only `browser_act` has, and those that the tools without a schema add.
pub(super) const OF_ACTIONS: [&str; 4] = ["changed", "log", "tabs", "value"];
const OF_OTHERS: [&str; 7] = ["elements", "height", "next", "notes", "removed", "snapshot", "width"];

/// Returns the schema of the members that all browser tools share, and of the members that `more` names.
pub(super) fn schema(more: &[&str]) -> Value {
    let mut members = untrusted::members(TrustedMembers::members(), UntrustedMembers::members());
    let is_special = |name: &str| OF_ACTIONS.contains(&name) || OF_OTHERS.contains(&name);
    members.retain(|(name, ..)| !is_special(name) || more.contains(name));
    object(members)
}

#[derive(Default)]
struct Page {
    trusted: TrustedMembers,
    untrusted: UntrustedMembers,
}

impl Page {
    /// Returns the answer: the object, and its text, in which the members of the page are marked.
    fn answer(&mut self, input: &RenderInput<'_>) -> Answer {
        let left_out = self.untrusted.fit(input.options.text_budget);
        add_note(&mut self.trusted.note, &left_out, "Ask for less at once.");
        let blocks = vec![Block::Text(input.fence.compact_json(&self.trusted, &self.untrusted))];
        Answer { blocks, structured: self.structured(), fits: true, ..Answer::default() }
    }

    fn structured(&self) -> Value {
        untrusted::structured(&self.trusted, &self.untrusted)
    }
}

/// Renders the result of an action; a snapshot has up to `most` characters.
pub(super) fn browsed(input: &RenderInput<'_>, mut browsed: Browsed, most: usize) -> Answer {
    let (shown, barrier) = (browse::page_of(&mut browsed), Barrier::of(&browsed));
    let PageNotes { happened, denied } = PageNotes::of(&browsed);
    let links = browse::downloads(input, &browsed);
    let trusted = TrustedMembers {
        success: browsed.result.is_ok(),
        notice: browsed.notice,
        context: (browsed.context.name != DEFAULT_CONTEXT).then_some(browsed.context.id),
        context_created: browsed.created.then_some(true),
        ..TrustedMembers::default()
    };
    let mut page = Page { trusted, untrusted: UntrustedMembers { happened, denied, ..UntrustedMembers::default() } };
    page.untrusted.changed = browsed.extras.changed.take();
    if let Some(shown) = shown {
        page.untrusted.url = Some(one_line(&shown.url));
        page.untrusted.title = Some(one_line(&shown.title)).filter(|title| !title.is_empty());
        page.trusted.tab = (shown.tabs > 1).then_some(shown.tab);
    }
    let mut answer = match browsed.result {
        Ok(result) => done(input, page, result, most),
        Err(error) => failed(input, page, &error, &browsed.extras.candidates, barrier),
    };
    answer.blocks.extend(links);
    answer
}

fn done(input: &RenderInput<'_>, mut page: Page, result: BrowseResult, most: usize) -> Answer {
    match result {
        BrowseResult::Done => {}
        BrowseResult::Snapshot(snapshot) => return seen(input, page, snapshot, most),
        BrowseResult::Screenshot { png, width, height, clipped } => {
            (page.trusted.width, page.trusted.height) = (Some(width), Some(height));
            return pictured(input, page, &png, clipped);
        }
        BrowseResult::Value { json, truncated } => {
            page.untrusted.value = Some(json);
            if truncated {
                page.trusted.note =
                    Some("The value is cut: return less of it, or write it to the page and take a snapshot.".into());
            }
        }
        BrowseResult::Tabs { tabs } => {
            let row = |tab: engine::op::browser::TabInfo| TabRow {
                tab: tab.tab,
                url: one_line(&tab.url),
                title: one_line(&tab.title),
                shown: tab.shown.then_some(true),
            };
            page.untrusted.tabs = Some(tabs.into_iter().map(row).collect());
        }
        BrowseResult::Log { lines, dropped } => {
            let (newest, left_out) = newest(&lines, input.options.text_budget);
            let dropped = dropped.saturating_add(left_out);
            page.untrusted.log = Some(newest);
            page.trusted.note = (dropped > 0).then(|| format!("{dropped} earlier lines are left out."));
        }
    }
    page.answer(input)
}

/// Returns as many of the last lines as fit into `most` characters with room for the page itself, and the number of those
/// that do not.
fn newest(lines: &[String], most: usize) -> (Vec<String>, u64) {
    let mut left = most / 10 * 9;
    let fitting = lines.iter().rev().map(|line| one_line(line)).take_while(|line| {
        let length = line.written() + 1;
        let fits = length <= left;
        left = left.saturating_sub(length);
        fits
    });
    let mut newest: Vec<String> = fitting.collect();
    newest.reverse();
    let left_out = lines.len() - newest.len();
    (newest, left_out as u64)
}

/// Renders a snapshot: the outline unchanged in a separate block, then the other facts. The object has both.
fn seen(input: &RenderInput<'_>, mut page: Page, snapshot: Snapshot, most: usize) -> Answer {
    let lines = |lines: Vec<String>| unless_empty(lines.iter().map(|line| one_line(line)).collect());
    // The browser respects the requested length; an attacker who has taken it over may not.
    let elements = clipped(&snapshot.elements, most.saturating_mul(2)).into_owned();
    page.trusted.snapshot = Some(snapshot.number);
    page.untrusted.removed = lines(snapshot.removed);
    page.untrusted.notes = lines(snapshot.notes);
    page.untrusted.next = snapshot.next.map(|next| one_line(&next));
    let mut answer = page.answer(input);
    // Some hosts refuse an empty text.
    let shown = if elements.is_empty() { "(no lines)" } else { &elements };
    answer.blocks.insert(0, Block::Text(input.fence.lines(shown)));
    page.untrusted.elements = Some(elements);
    Answer { structured: page.structured(), ..answer }
}

fn pictured(input: &RenderInput<'_>, mut page: Page, png: &str, clipped: bool) -> Answer {
    if clipped {
        page.trusted.note =
            Some("The page is longer than the picture: scroll, or take the picture of an element.".into());
    }
    match Picture::of("image/png", png) {
        Picture::Shown(block) => {
            let mut answer = page.answer(input);
            answer.blocks.extend(input.fence.blocks(vec![block]));
            answer
        }
        Picture::LeftOut(why) => {
            let error = format!("the picture is left out: {why}");
            let note = "Take a picture of one element with target, or without full_page.".to_owned();
            (page.trusted.success, page.trusted.note, page.untrusted.error) = (false, Some(note), Some(error));
            page.answer(input).unsuccessful()
        }
    }
}

/// Renders a failure. The error names the elements that an unclear target may mean, whose names the page has written.
fn failed(
    input: &RenderInput<'_>,
    mut page: Page,
    error: &BrowseError,
    candidates: &[String],
    barrier: Barrier,
) -> Answer {
    page.trusted.note = Some(next(error.why, barrier).into());
    let denied = page.untrusted.denied.as_deref().unwrap_or_default();
    let said = network::shortened(one_line(&error.message), denied);
    page.untrusted.error = Some(match candidates {
        [] => said,
        candidates => one_line(&format!("{said}; there are: {}", candidates.join("; "))),
    });
    page.answer(input).unsuccessful()
}

fn next(why: BrowseFailure, barrier: Barrier) -> &'static str {
    use BrowseFailure as F;
    match why {
        F::NotFound => {
            "Call browser_snapshot and use one of the refs it returns, or a target such as button \"Go\", text=Go, a CSS selector or //XPath."
        }
        F::Stale => "Call browser_snapshot and use one of the refs it returns.",
        F::Ambiguous => "Use the ref of the one you mean as target, or a target that matches it alone.",
        F::NotReady => "Call browser_snapshot to see what is in the way, deal with that, then try again.",
        F::Navigation if barrier == Barrier::Off => {
            "Open a page that code serves, at http://localhost:PORT, or ask the operator of this server for a network."
        }
        F::Navigation if barrier == Barrier::Denied => {
            "Open an address that is allowed; `denied` says how the operator can allow this one."
        }
        F::Navigation => "Check the address, then call browser_open again.",
        F::TimedOut => "Call browser_snapshot to see how far the page is, or try again with a longer timeout.",
        F::Crashed | F::NoBrowser => "Call browser_open to open the page again.",
        F::Threw => "Correct the expression, then try again.",
        F::Invalid => "Correct the arguments, then try again.",
        F::Cancelled => "Try again if it should complete.",
    }
}

/// Renders an error as the same object, for clients that read only its members.
pub(super) fn error(_: &RenderInput<'_>, error: &EngineError) -> Reply {
    Answer::compact(&Failed { success: false, error: bounded(&sentence(error)) }).unsuccessful().into()
}
