//! Bounds the replies of a browser before they are passed on. A page that has taken over the browser can send anything.

use proto::browser::{
    BrowseError, BrowseFailure, BrowseResult, BrowserAction, BrowserReply, MAX_HAPPENED, PageEvent, PageInfo,
    ReplyExtras, Snapshot, SnapshotAsk, TabAsk, TabInfo,
};

/// Maximum number of characters of a URL. `TITLE`, `LINE` and `NAME` bound other texts.
const URL: usize = 2048;
const TITLE: usize = 500;
const LINE: usize = 2000;
const NAME: usize = 300;
/// Maximum number of characters of a snapshot, whatever was requested.
const SNAPSHOT: usize = 400_000;
/// Number of characters that a snapshot may have beyond the requested number.
const MARGIN: usize = 1000;
const VALUE: usize = 100_000;
/// Maximum number of base64 characters of a picture.
const PICTURE: usize = 12 << 20;
/// Beginning of every PNG file in base64.
const PNG: &str = "iVBORw0KGgo";
/// Maximum number of tabs in a list. `LOG`, `REMOVED`, `NOTES` and `CANDIDATES` bound other lists.
const TABS: usize = 100;
const LOG: usize = 1000;
const REMOVED: usize = 500;
const NOTES: usize = 50;
const CANDIDATES: usize = 5;

/// Returns the reply with bounded content. A result that does not match the action becomes an error.
pub(crate) fn bounded(ask: &BrowserAction, changes: u32, browsed: BrowserReply) -> BrowserReply {
    let result = match browsed.result {
        Ok(result) => checked(ask, result),
        Err(BrowseError { why, message }) => Err(BrowseError { why, message: line(&message, LINE) }),
    };
    BrowserReply {
        page: browsed.page.map(|page| PageInfo { url: line(&page.url, URL), title: line(&page.title, TITLE), ..page }),
        happened: browsed.happened.into_iter().take(MAX_HAPPENED).map(happened).collect(),
        result,
        extras: extras(&browsed.extras, changes),
    }
}

fn extras(extras: &ReplyExtras, changes: u32) -> ReplyExtras {
    let candidates = extras.candidates.iter().take(CANDIDATES).map(|candidate| line(candidate, NAME)).collect();
    let most = (changes as usize).saturating_add(MARGIN).min(SNAPSHOT);
    let changed = extras.changed.as_ref().filter(|_| changes > 0).map(|changed| text(changed, most));
    ReplyExtras { candidates, changed }
}

fn checked(ask: &BrowserAction, result: BrowseResult) -> Result<BrowseResult, BrowseError> {
    match (ask, result) {
        (BrowserAction::Snapshot(ask), BrowseResult::Snapshot(shown)) => {
            Ok(BrowseResult::Snapshot(snapshot(ask, shown)))
        }
        (BrowserAction::Screenshot { .. }, BrowseResult::Screenshot { png, width, height, clipped })
            if is_png(&png) =>
        {
            Ok(BrowseResult::Screenshot { png, width, height, clipped })
        }
        (BrowserAction::Evaluate { .. }, BrowseResult::Value { json, truncated }) => {
            let is_longer = json.chars().nth(VALUE).is_some();
            Ok(BrowseResult::Value { json: text(&json, VALUE), truncated: truncated || is_longer })
        }
        (BrowserAction::Tab { .. }, BrowseResult::Tabs { tabs }) => {
            Ok(BrowseResult::Tabs { tabs: tabs.into_iter().take(TABS).map(tab).collect() })
        }
        (BrowserAction::Log { max_lines }, BrowseResult::Log { lines, dropped }) => {
            let most = LOG.min(*max_lines as usize);
            let dropped = dropped.saturating_add(lines.len().saturating_sub(most) as u64);
            // The newest lines are the last ones.
            let newest = lines.len().saturating_sub(most);
            Ok(BrowseResult::Log { lines: lines[newest..].iter().map(|said| line(said, LINE)).collect(), dropped })
        }
        (ask, BrowseResult::Done) if is_done_without_result(ask) => Ok(BrowseResult::Done),
        _ => Err(BrowseError {
            why: BrowseFailure::Crashed,
            message: "the browser's answer is none to what was asked; the page may have taken it over".into(),
        }),
    }
}

fn is_done_without_result(ask: &BrowserAction) -> bool {
    match ask {
        BrowserAction::Snapshot(_)
        | BrowserAction::Screenshot { .. }
        | BrowserAction::Evaluate { .. }
        | BrowserAction::Log { .. } => false,
        BrowserAction::Tab { tab } => *tab != TabAsk::List,
        BrowserAction::Open { .. }
        | BrowserAction::OpenFile { .. }
        | BrowserAction::Click { .. }
        | BrowserAction::Type { .. }
        | BrowserAction::Press { .. }
        | BrowserAction::Select { .. }
        | BrowserAction::Hover { .. }
        | BrowserAction::Scroll { .. }
        | BrowserAction::Back
        | BrowserAction::Forward
        | BrowserAction::Reload
        | BrowserAction::Wait { .. }
        | BrowserAction::Upload { .. } => true,
    }
}

fn snapshot(ask: &SnapshotAsk, shown: Snapshot) -> Snapshot {
    let most = (ask.max_chars as usize).saturating_add(MARGIN).min(SNAPSHOT);
    Snapshot {
        number: shown.number,
        text: text(&shown.text, most),
        text_is_cut: shown.text_is_cut,
        elements: text(&shown.elements, most),
        next: shown.next.map(|next| line(&next, NAME)),
        removed: shown.removed.iter().take(REMOVED).map(|gone| line(gone, NAME)).collect(),
        notes: shown.notes.iter().take(NOTES).map(|note| line(note, LINE)).collect(),
    }
}

fn tab(tab: TabInfo) -> TabInfo {
    TabInfo { url: line(&tab.url, URL), title: line(&tab.title, TITLE), ..tab }
}

fn happened(what: PageEvent) -> PageEvent {
    match what {
        PageEvent::Dialog { kind, message } => {
            PageEvent::Dialog { kind: line(&kind, NAME), message: line(&message, LINE) }
        }
        PageEvent::Popup { tab, url } => PageEvent::Popup { tab, url: line(&url, URL) },
        PageEvent::PopupClosed { url } => PageEvent::PopupClosed { url: line(&url, URL) },
        PageEvent::Download { url, path, size, error } => PageEvent::Download {
            url: line(&url, URL),
            path: path.map(|path| line(&path, URL)),
            size,
            error: error.map(|error| line(&error, LINE)),
        },
        PageEvent::Crashed { url } => PageEvent::Crashed { url: line(&url, URL) },
        PageEvent::Note { text } => PageEvent::Note { text: line(&text, LINE) },
    }
}

fn is_png(base64: &str) -> bool {
    let sized = base64.len() <= PICTURE && base64.len().is_multiple_of(4);
    let digits = base64.trim_end_matches('=').bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'/'));
    sized && digits && base64.starts_with(PNG)
}

fn line(text: &str, most: usize) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(most).collect()
}

fn text(text: &str, most: usize) -> String {
    text.chars().filter(|c| !c.is_control() || matches!(c, '\n' | '\t')).take(most).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(ask: &BrowserAction, result: BrowseResult) -> Result<BrowseResult, BrowseFailure> {
        let browsed =
            BrowserReply { page: None, happened: Vec::new(), result: Ok(result), extras: ReplyExtras::default() };
        bounded(ask, 0, browsed).result.map_err(|error| error.why)
    }

    #[test]
    fn an_answer_to_something_else_is_none() {
        let picture = |png: &str| BrowseResult::Screenshot { png: png.into(), width: 1, height: 1, clipped: false };
        let shot = BrowserAction::Screenshot { at: None, full_page: false };
        assert!(answer(&shot, picture("iVBORw0KGgoA")).is_ok());
        for lie in
            ["", "iVBORw0KGgo", "iVBORw0K<script>", "PHN2Zz48L3N2Zz4=", &format!("{PNG}A{}", "A".repeat(PICTURE))]
        {
            assert_eq!(answer(&shot, picture(lie)), Err(BrowseFailure::Crashed), "{:.20}", lie);
        }
        assert_eq!(answer(&shot, BrowseResult::Done), Err(BrowseFailure::Crashed));
        assert_eq!(answer(&BrowserAction::Back, BrowseResult::Tabs { tabs: Vec::new() }), Err(BrowseFailure::Crashed));
        assert_eq!(answer(&BrowserAction::Back, BrowseResult::Done), Ok(BrowseResult::Done));
    }

    #[test]
    fn nothing_is_longer_than_it_may_be_and_nothing_steers_a_terminal() {
        let long = "\u{1b}[2Jé\r\n".repeat(200_000);
        let page = PageInfo { url: long.clone(), title: long.clone(), tab: 1, tabs: 1 };
        let download =
            PageEvent::Download { url: long.clone(), path: Some(long.clone()), size: 1, error: Some(long.clone()) };
        let shown = Snapshot {
            number: 1,
            text: long.clone(),
            text_is_cut: true,
            elements: long.clone(),
            next: Some(long.clone()),
            removed: vec![long.clone(); 10],
            notes: vec![long.clone(); 10],
        };
        let ask = BrowserAction::Snapshot(SnapshotAsk { max_chars: 100, ..SnapshotAsk::default() });
        let extras = ReplyExtras { candidates: vec![long.clone(); 20], changed: Some(long.clone()) };
        let (happened, result) = (vec![download; 60], Ok(BrowseResult::Snapshot(shown)));
        let browsed = BrowserReply { page: Some(page), happened, result, extras };
        let bounded = bounded(&ask, 100, browsed);
        assert_eq!((bounded.happened.len(), bounded.extras.candidates.len()), (MAX_HAPPENED, CANDIDATES));
        let whole = serde_json::to_string(&bounded).unwrap();
        assert!(whole.len() < 600_000, "{}", whole.len());
        assert_eq!(bounded.extras.changed.map(|changed| changed.chars().count()), Some(100 + MARGIN));
        assert!(!whole.contains("\\u001b") && !whole.contains("\\r"));
        let Ok(BrowseResult::Snapshot(shown)) = bounded.result else { panic!() };
        assert_eq!(shown.text.chars().count(), 100 + MARGIN);
        assert!(shown.text.contains('\n'));
    }
}
