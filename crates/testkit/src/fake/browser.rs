//! A browser without a browser. Every page it opens has its address as its title and its text; a click, a key and the like do nothing.
//!
//! Pages of its own, for what a real one does too seldom: `fake:crash` (the browser ends during the call), `fake:exit` (after it),
//! `fake:hang` (until interrupted or past its time), `fake:deaf` (never answers), `fake:sleep MS`, `fake:error TEXT` (cannot be opened),
//! `fake:lie` (an answer to something else), `fake:shout` (one too long), `fake:fetch NAME` (through the sandbox's egress).

use std::sync::atomic::Ordering;
use std::time::Duration;

use proto::browser::{
    BrowseError, BrowseFailure, BrowseResult, BrowserAction, BrowserReply, BrowserSpec, PageEvent, PageInfo,
    ReplyExtras, Snapshot, TabAsk, TabInfo,
};
use proto::{FromGuest, GuestFailure};
use tokio::sync::Notify;

use super::guest::{Guest, fetch};
use super::{lock, take_one};

/// What is open; the last is shown.
pub struct Tabs(Vec<String>);

impl Tabs {
    fn page(&self) -> PageInfo {
        let (url, number) = (self.0.last().cloned().unwrap_or_default(), self.0.len() as u32);
        PageInfo { title: url.clone(), url, tab: number, tabs: number }
    }

    fn list(&self) -> Vec<TabInfo> {
        let numbered = (1u32..).zip(&self.0);
        let tab = |(tab, url): (u32, &String)| TabInfo {
            tab,
            url: url.clone(),
            title: url.clone(),
            shown: tab as usize == self.0.len(),
        };
        numbered.map(tab).collect()
    }
}

/// How a call ends.
enum End {
    Answer(Result<BrowseResult, BrowseError>),
    /// The browser ends with it.
    Crash,
    /// The browser ends after it.
    Exit,
}

impl Guest {
    pub(super) async fn start_browser(&self, call: u64, spec: BrowserSpec) {
        let arrived = self.drivers.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok();
        let slow = *lock(&self.shared.slow_browsers);
        if !slow.is_zero() {
            tokio::time::sleep(slow).await;
        }
        if !arrived || take_one(&self.shared.fail_browsers) {
            return self.no_browser(call, "told to fail at /host/path").await;
        }
        lock(&self.shared.browsers).push(spec);
        *self.browser.lock().await = Some(Tabs(vec!["about:blank".into()]));
        self.wire.send(call, &FromGuest::BrowserReady { version: "fake/1".into() }).await;
    }

    async fn no_browser(&self, call: u64, why: &str) {
        let message = why.to_owned();
        self.wire.send(call, &FromGuest::Failed { failure: GuestFailure::Browser, message }).await;
    }

    pub(super) async fn browse(
        &self,
        call: u64,
        asked: (BrowserAction, Vec<String>),
        after_ms: u64,
        interrupt: &Notify,
    ) {
        let (ask, uploads) = asked;
        let missing = |path: &&String| !lock(&self.files[0]).contains_key(path.as_str());
        if uploads.iter().any(|path| missing(&path)) {
            return self.not_found(call).await;
        }
        let mut browser = self.browser.lock().await;
        let Some(tabs) = browser.as_mut() else { return self.no_browser(call, "there is no browser").await };
        if matches!(&ask, BrowserAction::Open { url } if url == "fake:deaf") {
            drop(browser);
            return std::future::pending().await;
        }
        let end = tokio::select! {
            end = self.visit(ask, tabs) => end,
            () = interrupt.notified() => End::Answer(Err(error(BrowseFailure::Cancelled, "cancelled"))),
            () = tokio::time::sleep(Duration::from_millis(after_ms)) => {
                End::Answer(Err(error(BrowseFailure::TimedOut, "timed out")))
            }
        };
        lock(&self.interrupts).remove(&call);
        let page = Some(tabs.page());
        match end {
            End::Crash => {
                *browser = None;
                self.no_browser(call, "the browser ended with signal 9").await;
            }
            End::Exit => {
                *browser = None;
                let (happened, result, extras) = (Vec::new(), Ok(BrowseResult::Done), ReplyExtras::default());
                self.answer_browsed(call, BrowserReply { page, happened, result, extras }).await;
                self.wire.send(0, &FromGuest::BrowserExited).await;
            }
            End::Answer(result) => {
                let loud = PageEvent::Note { text: "\x1b!".repeat(5000) };
                let shouts = tabs.page().url.starts_with("fake:shout");
                let happened = if shouts { vec![loud; 100] } else { Vec::new() };
                self.answer_browsed(call, BrowserReply { page, happened, result, extras: ReplyExtras::default() })
                    .await;
            }
        }
    }

    async fn answer_browsed(&self, call: u64, browsed: BrowserReply) {
        self.wire.send(call, &FromGuest::Browsed { browsed: Box::new(browsed) }).await;
    }

    async fn visit(&self, ask: BrowserAction, tabs: &mut Tabs) -> End {
        let result = match ask {
            BrowserAction::Open { url } => return self.open(url, tabs).await,
            BrowserAction::Snapshot(_) => {
                BrowseResult::Snapshot(Snapshot { text: tabs.page().url, ..Snapshot::default() })
            }
            BrowserAction::Screenshot { .. } => {
                BrowseResult::Screenshot { png: "iVBORw0KGgoA".into(), width: 1, height: 1, clipped: false }
            }
            BrowserAction::Evaluate { expression } => {
                BrowseResult::Value { json: format!("{expression:?}"), truncated: false }
            }
            BrowserAction::Log { .. } => BrowseResult::Log { lines: tabs.0.clone(), dropped: 0 },
            BrowserAction::Tab { tab } => {
                match tab {
                    TabAsk::New { url } => tabs.0.push(url.unwrap_or_else(|| "about:blank".into())),
                    TabAsk::Close { .. } if tabs.0.len() > 1 => drop(tabs.0.pop()),
                    TabAsk::List | TabAsk::Select { .. } | TabAsk::Close { .. } => {}
                }
                BrowseResult::Tabs { tabs: tabs.list() }
            }
            _ => BrowseResult::Done,
        };
        End::Answer(Ok(result))
    }

    async fn open(&self, url: String, tabs: &mut Tabs) -> End {
        let (word, rest) = url.split_once(' ').unwrap_or((&url, ""));
        let failed = |why: &str| End::Answer(Err(error(BrowseFailure::Navigation, why)));
        match word {
            "fake:crash" => return End::Crash,
            "fake:exit" => return End::Exit,
            "fake:hang" => std::future::pending::<()>().await,
            "fake:sleep" => tokio::time::sleep(Duration::from_millis(rest.parse().expect("a number"))).await,
            "fake:error" => return failed(rest),
            "fake:lie" => return End::Answer(Ok(BrowseResult::Tabs { tabs: Vec::new() })),
            "fake:fetch" => {
                let status = fetch(self.egress, rest).await;
                if status != "200" {
                    return failed("net::ERR_TUNNEL_CONNECTION_FAILED");
                }
            }
            _ => {}
        }
        if let Some(shown) = tabs.0.last_mut() {
            *shown = if word == "fake:shout" { url.repeat(1000) } else { url };
        }
        End::Answer(Ok(BrowseResult::Done))
    }
}

fn error(why: BrowseFailure, message: &str) -> BrowseError {
    BrowseError { why, message: message.into() }
}
