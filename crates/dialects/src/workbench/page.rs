//! Renders the answers of the browser tools: the page, or a failure with a hint that names the next call.

use engine::op::Outcome;
use engine::op::browser::{BrowseError, BrowseFailure, BrowseResult, PageInfo, Snapshot};
use serde::Serialize;
use serde_json::{Value, json};
use text::clipped;

use super::render::{failure_line, mismatch};
use super::text_length;
use crate::args;
use crate::shared::browse::{self, Barrier, PageNotes};
use crate::shared::schema::{array, object_with, string};
use crate::shared::untrusted;
use crate::shared::{TEXT_BUDGET, one_line};
use crate::{Answer, Block, RenderInput};

#[derive(Serialize)]
struct PageFacts {
    #[serde(flatten)]
    told: UntrustedPart,
    #[serde(flatten)]
    own: TrustedPart,
}

/// Members that the page wrote or that may contain text of the page.
#[derive(Serialize)]
struct UntrustedPart {
    url: String,
    title: String,
    #[serde(flatten)]
    seen: Option<SnapshotPart>,
    #[serde(flatten)]
    beside: PageNotes,
}

/// Members that this server wrote.
#[derive(Default, Serialize)]
struct TrustedPart {
    /// Says what was lost since the last call.
    #[serde(skip_serializing_if = "Option::is_none")]
    notice: Option<String>,
}

/// The members of a snapshot.
#[derive(Serialize)]
struct SnapshotPart {
    text: String,
    elements: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    notes: Vec<String>,
}

fn schema_with(members: Value, optional: &[&str]) -> Value {
    let mut members = members;
    if let Some(members) = members.as_object_mut() {
        members.extend(PageNotes::schema());
        members.extend([untrusted::schema()]);
    }
    object_with(members, &[&PageNotes::NAMES, optional, &[untrusted::MEMBER]].concat())
}

pub(super) fn page_schema() -> Value {
    schema_with(json!({ "url": string(), "title": string() }), &[])
}

pub(super) fn snapshot_schema() -> Value {
    let members = json!({
        "url": string(),
        "title": string(),
        "text": string(),
        "elements": string(),
        "notes": array(string()),
    });
    schema_with(members, &["notes"])
}

pub(super) fn browsed(scene: &RenderInput<'_>, outcome: Outcome) -> Answer {
    let Outcome::Browsed(mut browsed) = outcome else { return mismatch(scene) };
    let (beside, own) = (PageNotes::of(&browsed), TrustedPart { notice: browsed.notice.take() });
    let (page, barrier) = (browse::page_of(&mut browsed), Barrier::of(&browsed));
    let mut answer = match &mut browsed.result {
        Ok(BrowseResult::Snapshot(snapshot)) => {
            let seen = seen(scene, std::mem::take(snapshot));
            shown(scene, page, Some(seen), beside, own)
        }
        Ok(_) => shown(scene, page, None, beside, own),
        Err(error) => failed(scene, error, barrier, &beside, &own),
    };
    answer.blocks.extend(browse::downloads(scene, &browsed));
    answer
}

fn shown(
    scene: &RenderInput<'_>,
    page: Option<PageInfo>,
    seen: Option<SnapshotPart>,
    beside: PageNotes,
    own: TrustedPart,
) -> Answer {
    let how = page.as_ref().map(|page| scene.fence.inline(&browse::shown(page))).unwrap_or_default();
    let (url, title) = page.map(|page| (one_line(&page.url), one_line(&page.title))).unwrap_or_default();
    let facts = PageFacts { told: UntrustedPart { url, title, seen, beside }, own };
    // The first line and the JSON that the document demands, marked so that it still has both.
    let text = format!("{} ok: {how}\n{}", scene.tool, scene.fence.json(&facts.own, &facts.told));
    let mut answer = Answer { blocks: vec![Block::Text(text)], ..Answer::json(&facts) };
    untrusted::name_members(&mut answer.structured, &json!(facts.told));
    answer
}

/// Returns the beginning of the text, and the elements.
fn seen(scene: &RenderInput<'_>, snapshot: Snapshot) -> SnapshotPart {
    let most = text_length(scene.args).ok().and_then(|most| usize::try_from(most).ok()).unwrap_or(TEXT_BUDGET);
    let cut = snapshot.text.char_indices().nth(most).map(|(at, _)| at);
    let mut notes: Vec<String> = snapshot.notes.iter().map(|note| one_line(note)).collect();
    if cut.is_some() {
        notes.push(format!("text has its first {most} characters: call browser_snapshot with a larger maxTextLen"));
    }
    if snapshot.next.is_some() {
        notes.push("the page has more elements than these: use a CSS selector for one that is not listed".into());
    }
    SnapshotPart {
        text: snapshot.text[..cut.unwrap_or(snapshot.text.len())].to_owned(),
        // The browser respects the requested length; an attacker who has taken it over may not.
        elements: clipped(&snapshot.elements, most.saturating_add(2 * TEXT_BUDGET)).into_owned(),
        notes,
    }
}

/// Renders a failure as the document's two lines, with the remaining facts in JSON below them.
fn failed(
    scene: &RenderInput<'_>,
    error: &BrowseError,
    barrier: Barrier,
    beside: &PageNotes,
    own: &TrustedPart,
) -> Answer {
    let mut text = failure_line(scene, &why(scene, error), &hint(scene, error.why, barrier));
    if !beside.is_empty() || own.notice.is_some() {
        text = format!("{text}\n{}", scene.fence.json(own, beside));
    }
    let page = json!({ "error": error.message });
    let mut structured = page.clone();
    untrusted::name_members(&mut structured, &page);
    Answer { blocks: vec![Block::Text(text)], structured, ..Answer::default() }.failed()
}

fn why(scene: &RenderInput<'_>, error: &BrowseError) -> String {
    let what = match error.why {
        BrowseFailure::NotFound | BrowseFailure::Stale => "element not found".into(),
        // The browser's messages may contain text of the page. They are bounded here, so that the closing mark is not
        // cut off.
        _ => scene.fence.inline(&browse::brief(&error.message)),
    };
    let asked = ["selector", "url"].into_iter().find_map(|name| Some((name, args::text(scene.args, name).ok()??)));
    match asked {
        Some((_, value)) if what.contains(value) => what,
        Some((name, value)) => format!("{what} ({name}=\"{}\")", one_line(value)),
        None => what,
    }
}

fn hint(scene: &RenderInput<'_>, why: BrowseFailure, barrier: Barrier) -> String {
    use BrowseFailure as F;
    let tool = scene.tool;
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
