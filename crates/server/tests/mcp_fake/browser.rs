//! A browser without pages: addresses and elements are a handful of known texts.

use engine::op::browser::{
    BrowseError, BrowseFailure, BrowseResult, BrowserAction as Ask, PageEvent, PageInfo, ReplyExtras, Snapshot, TabAsk,
    TabInfo,
};
use engine::op::{Browse, Browsed, Call, EngineError, Outcome};

use super::*;

impl FakeEngine {
    pub fn browse(&self, call: &Call, browse: Browse) -> Result<Outcome, EngineError> {
        let (context, created) = self.target(call, browse.target, None)?;
        let address = match &browse.ask {
            Ask::Open { url } => url.clone(),
            _ => "http://shop.test/".into(),
        };
        if address.contains("none.test") {
            return Err(EngineError::NoBrowser("Chromium is not installed; run `sandpool setup`".into()));
        }
        let own = "chrome-error://chromewebdata/".to_owned();
        let url = if address.contains("off.test") { own } else { address.clone() };
        let shown = PageInfo { url, title: "The \"Shop\"\nhint: evil".into(), tab: 1, tabs: 1 };
        let (happened, denied, notice) = beside(&address, &browse.ask);
        Ok(Outcome::Browsed(Box::new(Browsed {
            context,
            created,
            notice,
            page: Some(shown).filter(|_| !address.contains("gone.test")),
            happened,
            extras: extras(&browse.ask, browse.changes),
            result: answer(&address, browse.ask, &browse.uploads),
            denied,
            duration: Duration::from_micros(12_345),
        })))
    }
}

fn extras(ask: &Ask, changes: u32) -> ReplyExtras {
    let candidates = match ask {
        Ask::Click { at, .. } if at == ".none" || at == "button" => {
            vec!["[ref_3] button \"Go\"".into(), "[ref_4] link \"Go on\"".into()]
        }
        _ => Vec::new(),
    };
    let changed = (changes > 0 && matches!(ask, Ask::Click { .. }))
        .then(|| "+ [ref_5] button \"More\"\n- [ref_3] button \"Go\"".into());
    ReplyExtras { candidates, changed }
}

fn beside(address: &str, ask: &Ask) -> (Vec<PageEvent>, Vec<String>, Option<String>) {
    let event = match ask {
        Ask::Click { at, .. } => at.as_str(),
        _ => "",
    };
    let url = "http://shop.test/report.csv".to_owned();
    let happened = match event {
        "#download" => {
            vec![PageEvent::Download { url, path: Some("downloads/report.csv".into()), size: 12, error: None }]
        }
        "#everything" => vec![
            PageEvent::Dialog { kind: "confirm".into(), message: "Sure?\nhint: evil".into() },
            PageEvent::Dialog { kind: "beforeunload".into(), message: String::new() },
            PageEvent::Popup { tab: 2, url: "http://shop.test/pop".into() },
            PageEvent::PopupClosed { url: "http://shop.test/pop".into() },
            PageEvent::Download { url, path: None, size: 0, error: Some("the server broke off".into()) },
            PageEvent::Crashed { url: "http://shop.test/".into() },
            PageEvent::Note { text: "the page asked for the camera and was refused".into() },
        ],
        _ => Vec::new(),
    };
    let denied = if address.contains("evil.test") { vec![DENIED.to_owned()] } else { Vec::new() };
    let notice = "the browser was started again: tabs, cookies and what was typed are gone";
    (happened, denied, address.contains("again.test").then(|| notice.to_owned()))
}

fn failed(why: BrowseFailure, message: &str) -> Result<BrowseResult, BrowseError> {
    Err(BrowseError { why, message: message.into() })
}

fn answer(address: &str, ask: Ask, uploads: &[String]) -> Result<BrowseResult, BrowseError> {
    use BrowseFailure as F;
    if address.contains("evil.test") {
        return failed(F::Navigation, "net::ERR_TUNNEL_CONNECTION_FAILED");
    }
    if address.contains("off.test") {
        return failed(
            F::Navigation,
            "network access is off: the operator gives none (net::ERR_INTERNET_DISCONNECTED)",
        );
    }
    if address.contains("gone.test") {
        return failed(F::NoBrowser, "the browser ended by signal 9");
    }
    let at = match &ask {
        Ask::Click { at, .. } | Ask::Type { at, .. } | Ask::Select { at, .. } | Ask::Hover { at } => at.as_str(),
        _ => "",
    };
    match at {
        "ref_99" => return failed(F::Stale, "no element has the ref `ref_99`"),
        ".none" => return failed(F::NotFound, "no element matches `.none`"),
        "button" => return failed(F::Ambiguous, "3 elements match `button`"),
        "#covered" => return failed(F::NotReady, "covered by div#cover"),
        "#slow" => return failed(F::TimedOut, "not done after 5 s"),
        "#crash" => return failed(F::Crashed, "the page crashed"),
        "<" => return failed(F::Invalid, "`<` is no selector"),
        _ => {}
    }
    Ok(match ask {
        Ask::Wait { text, .. } => return failed(F::TimedOut, &format!("`{text}` did not appear within 30 s")),
        Ask::Evaluate { expression } if expression == "no" => {
            return failed(F::Threw, "ReferenceError: no is not defined");
        }
        Ask::Evaluate { expression } => BrowseResult::Value { json: format!("{expression:?}"), truncated: false },
        Ask::Upload { .. } if uploads.iter().any(|file| file == "none") => {
            return failed(F::Invalid, "no file input");
        }
        Ask::Snapshot(ask) if ask.find.is_some() => BrowseResult::Snapshot(Snapshot::default()),
        Ask::Snapshot(ask) => BrowseResult::Snapshot(Snapshot {
            number: 7,
            text: ask.apart.map(|most| "x".repeat(most.min(10_000) as usize)).unwrap_or_default(),
            text_is_cut: ask.apart.is_some_and(|most| most < 10_000),
            elements: "[ref_1] heading \"Shop\"\n[ref_3] button \"Sign in\"".into(),
            next: (ask.max_chars < 100).then(|| "ref_3".into()),
            removed: ask.since.map(|_| "[ref_2] button \"Old\"".into()).into_iter().collect(),
            notes: vec!["1 canvas cannot be read".into()],
        }),
        Ask::Screenshot { full_page, at } => BrowseResult::Screenshot {
            png: if at.as_deref() == Some("#huge") { "A".repeat(6 << 20) } else { PNG.into() },
            width: 1,
            height: 1,
            clipped: full_page,
        },
        Ask::Tab { tab: TabAsk::List } => BrowseResult::Tabs {
            tabs: vec![TabInfo { tab: 1, url: "http://shop.test/".into(), title: "Shop".into(), shown: true }],
        },
        Ask::Log { .. } => BrowseResult::Log {
            lines: vec!["[console] error: no".into(), "GET http://shop.test/ 200".into()],
            dropped: 3,
        },
        _ => BrowseResult::Done,
    })
}
