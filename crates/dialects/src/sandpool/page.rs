//! Renders the answers of the browser tools: one object for all of them, with the members that apply.

use engine::op::browser::{BrowseError, BrowseFailure, BrowseResult, Snapshot};
use engine::op::{EngineError, Outcome};
use serde::Serialize;
use serde_json::{Value, json};
use text::clipped;

use super::browser::max_chars;
use super::render::{mismatch, sentence};
use crate::shared::browse::{self, Barrier, PageNotes};
use crate::shared::run::Picture;
use crate::shared::schema::{array, boolean, integer, object, object_with, string};
use crate::shared::untrusted;
use crate::shared::{TEXT_BUDGET, one_line};
use crate::{Answer, Block, RenderInput, Reply};

#[derive(Default, Serialize)]
struct PageOutput {
    #[serde(flatten)]
    own: TrustedMembers,
    #[serde(flatten)]
    told: UntrustedMembers,
}

/// Members that this server wrote.
#[derive(Default, Serialize)]
struct TrustedMembers {
    success: bool,
    /// Advice on what to do next.
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
    /// The tab that is shown, present if there are several.
    #[serde(skip_serializing_if = "Option::is_none")]
    tab: Option<u32>,
    /// Number of a snapshot, for the argument `since`.
    #[serde(skip_serializing_if = "Option::is_none")]
    snapshot: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    width: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    height: Option<u32>,
    /// Says what was lost since the last call.
    #[serde(skip_serializing_if = "Option::is_none")]
    notice: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    context: Option<String>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    context_created: bool,
}

/// Members that the page wrote or that may contain text of the page.
#[derive(Default, Serialize)]
struct UntrustedMembers {
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    url: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    title: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tabs: Option<Vec<TabRow>>,
    /// Result of an expression, as JSON text.
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    log: Option<Vec<String>>,
    /// Where the next part of a snapshot begins, for the argument `from`.
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    removed: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    notes: Vec<String>,
    #[serde(flatten)]
    beside: PageNotes,
}

impl PageOutput {
    /// Returns the object, and its text in which the part of the page is marked.
    fn answer(&self, scene: &RenderInput<'_>) -> Answer {
        self.answer_with(scene, json!({}))
    }

    /// Like `answer`, with additional members of the page in the object, but not in its text.
    fn answer_with(&self, scene: &RenderInput<'_>, more: Value) -> Answer {
        let text = scene.fence.json(&self.own, &self.told);
        let mut answer = Answer { blocks: vec![Block::Text(text)], ..Answer::json(self) };
        let mut page = json!(self.told);
        if let (Value::Object(object), Value::Object(page), Value::Object(more)) =
            (&mut answer.structured, &mut page, more)
        {
            object.extend(more.clone());
            page.extend(more);
        }
        untrusted::name_members(&mut answer.structured, &page);
        answer
    }
}

#[derive(Serialize)]
struct TabRow {
    tab: u32,
    url: String,
    title: String,
    shown: bool,
}

/// Returns the schema of the members that all browser tools share, and of these members.
fn with(more: Value) -> Value {
    let mut members = json!({
        "success": boolean(),
        "error": string(),
        "note": string(),
        "url": string(),
        "title": string(),
        "tab": integer(),
        "context": string(),
        "context_created": boolean(),
    });
    let (Some(all), Value::Object(more)) = (members.as_object_mut(), more) else { return members };
    all.extend(PageNotes::schema());
    all.extend([untrusted::schema()]);
    all.extend(more);
    let names: Vec<String> = all.keys().filter(|name| *name != "success").cloned().collect();
    object_with(members, &names.iter().map(String::as_str).collect::<Vec<_>>())
}

pub(super) fn opened_schema() -> Value {
    with(json!({}))
}

pub(super) fn acted_schema() -> Value {
    let tab = object(json!({ "tab": integer(), "url": string(), "title": string(), "shown": boolean() }));
    with(json!({ "value": string(), "tabs": array(tab), "log": array(string()) }))
}

pub(super) fn snapshot_schema() -> Value {
    with(json!({
        "elements": string(),
        "snapshot": integer(),
        "next": string(),
        "removed": array(string()),
        "notes": array(string()),
    }))
}

pub(super) fn screenshot_schema() -> Value {
    with(json!({ "width": integer(), "height": integer() }))
}

pub(super) fn browsed(scene: &RenderInput<'_>, outcome: Outcome) -> Answer {
    let Outcome::Browsed(mut browsed) = outcome else { return mismatch() };
    let (shown, barrier) = (browse::page_of(&mut browsed), Barrier::of(&browsed));
    let beside = PageNotes::of(&browsed);
    let links = browse::downloads(scene, &browsed);
    let own = TrustedMembers {
        success: browsed.result.is_ok(),
        notice: browsed.notice,
        context: Some(browsed.context.id),
        context_created: browsed.created,
        ..TrustedMembers::default()
    };
    let mut page = PageOutput { own, told: UntrustedMembers { beside, ..UntrustedMembers::default() } };
    if let Some(shown) = shown {
        page.told.url = Some(one_line(&shown.url));
        page.told.title = Some(one_line(&shown.title)).filter(|title| !title.is_empty());
        page.own.tab = (shown.tabs > 1).then_some(shown.tab);
    }
    let mut answer = match browsed.result {
        Ok(result) => done(scene, page, result),
        Err(error) => failed(scene, page, &error, barrier),
    };
    answer.blocks.extend(links);
    answer
}

fn done(scene: &RenderInput<'_>, mut page: PageOutput, result: BrowseResult) -> Answer {
    match result {
        BrowseResult::Done => {}
        BrowseResult::Snapshot(snapshot) => return seen(scene, page, snapshot),
        BrowseResult::Screenshot { png, width, height, clipped } => {
            (page.own.width, page.own.height) = (Some(width), Some(height));
            return pictured(scene, page, &png, clipped);
        }
        BrowseResult::Value { json, truncated } => {
            page.told.value = Some(clipped(&json, TEXT_BUDGET).into_owned());
            if truncated {
                page.own.note =
                    Some("The value is cut: return less of it, or write it to the page and take a snapshot.".into());
            }
        }
        BrowseResult::Tabs { tabs } => {
            let row = |tab: engine::op::browser::TabInfo| TabRow {
                tab: tab.tab,
                url: one_line(&tab.url),
                title: one_line(&tab.title),
                shown: tab.shown,
            };
            page.told.tabs = Some(tabs.into_iter().map(row).collect());
        }
        BrowseResult::Log { lines, dropped } => {
            let (newest, left_out) = newest(&lines);
            let dropped = dropped.saturating_add(left_out);
            page.told.log = Some(newest);
            page.own.note = (dropped > 0).then(|| format!("{dropped} earlier lines are left out."));
        }
    }
    page.answer(scene)
}

/// Returns as many of the last lines as fit, and the number of those that do not.
fn newest(lines: &[String]) -> (Vec<String>, u64) {
    let mut left = TEXT_BUDGET;
    let fitting = lines.iter().rev().map(|line| one_line(line)).take_while(|line| {
        let length = line.chars().count();
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
fn seen(scene: &RenderInput<'_>, mut page: PageOutput, snapshot: Snapshot) -> Answer {
    let most = max_chars(scene.args).ok().and_then(|most| usize::try_from(most).ok()).unwrap_or(TEXT_BUDGET);
    // The browser respects the requested length; an attacker who has taken it over may not.
    let elements = clipped(&snapshot.elements, most.saturating_mul(2)).into_owned();
    page.own.snapshot = Some(snapshot.number);
    page.told.removed = snapshot.removed.iter().map(|line| one_line(line)).collect();
    page.told.notes = snapshot.notes.iter().map(|line| one_line(line)).collect();
    page.told.next = snapshot.next.map(|next| one_line(&next));
    let mut answer = page.answer_with(scene, json!({ "elements": elements }));
    // Some hosts refuse an empty text.
    let shown = if elements.is_empty() { "(no lines)".to_owned() } else { elements };
    answer.blocks.insert(0, Block::Text(scene.fence.lines(&shown)));
    answer
}

fn pictured(scene: &RenderInput<'_>, mut page: PageOutput, png: &str, clipped: bool) -> Answer {
    if clipped {
        page.own.note = Some("The page is longer than the picture: scroll, or take the picture of an element.".into());
    }
    match Picture::of("image/png", png) {
        Picture::Shown(block) => {
            let mut answer = page.answer(scene);
            answer.blocks.extend(scene.fence.blocks(vec![block]));
            answer
        }
        Picture::LeftOut(why) => {
            let error = format!("the picture is left out: {why}");
            let note = "Take a picture of one element with target, or without full_page.".to_owned();
            (page.own.success, page.own.note, page.told.error) = (false, Some(note), Some(error));
            page.answer(scene).unsuccessful()
        }
    }
}

fn failed(scene: &RenderInput<'_>, mut page: PageOutput, error: &BrowseError, barrier: Barrier) -> Answer {
    page.own.note = Some(next(error.why, barrier).into());
    page.told.error = Some(one_line(&error.message));
    page.answer(scene).unsuccessful()
}

fn next(why: BrowseFailure, barrier: Barrier) -> &'static str {
    use BrowseFailure as F;
    match why {
        F::NotFound | F::Stale => "Call browser_snapshot and use one of the refs it returns.",
        F::Ambiguous => {
            "Call browser_snapshot and use the ref of the one you mean, or a selector that matches it alone."
        }
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
    let told = UntrustedMembers { error: Some(sentence(error)), ..UntrustedMembers::default() };
    Answer::json(&PageOutput { told, ..PageOutput::default() }).unsuccessful().into()
}
