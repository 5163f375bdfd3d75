//! The browser as a whole: starting it, serving one request at a time, and recovering when a page does not respond.

use std::future::Future;
use std::path::Path;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::time::Duration;

use proto::browser::{BrowseResult, PageEvent, ReplyExtras};
use proto::{BrowseError, BrowseFailure, BrowserAction, BrowserReply, BrowserSpec};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::process::Child;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::act::{self, Act};
use crate::cdp::{self, Cdp};
use crate::downloads::Downloads;
use crate::events;
use crate::launch::{self, Chromium};
use crate::page::{Page, failure};
use crate::settle;
use crate::snapshot::{OBJECTS, Reader};
use crate::state::{BrowserState, MAX_URL, SharedState, StateCell, shorten};
use crate::workspace::{self, FileChannel};

/// Timeout from starting the process to a blank page, on a busy machine.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// Timeout for reading the title of the page for a reply.
const TITLE_TIMEOUT: Duration = Duration::from_millis(300);
/// Timeout of the check whether a page is idle. An idle page answers at once.
const IDLE_TIMEOUT: Duration = Duration::from_millis(250);
/// Timeout for reading the page before and after an action, to find what the action changed.
const CHANGES_TIMEOUT: Duration = Duration::from_secs(2);
/// Report of an action that led to another page, whose address and title the reply contains.
const ANOTHER_PAGE: &str = "(another page)";
/// Timeout for terminating a script or a page.
const END_TIMEOUT: Duration = Duration::from_millis(600);

pub(crate) struct Driver {
    pub version: String,
    cdp: Cdp,
    state: SharedState,
    reader: Reader,
    process: Child,
    /// What the current request changed on the page.
    changed: Option<String>,
    /// True if the browser stopped answering and was killed for that reason.
    hung: bool,
}

/// One request to the driver.
#[derive(Clone, Copy)]
pub(crate) struct DriverRequest<'a> {
    pub ask: &'a BrowserAction,
    pub after: Duration,
    pub uploads: Option<&'a str>,
    /// Maximum number of characters about what the action changed on the page, or 0 to report nothing.
    pub changes: u32,
}

impl Driver {
    /// Starts the browser with a blank page.
    pub(crate) async fn start(spec: &BrowserSpec, files: Rc<FileChannel>) -> Result<Self, String> {
        let chromium = launch::start(spec).map_err(|error| format!("cannot start `{}`: {error}", spec.program))?;
        let Chromium { mut process, to, from } = chromium;
        let (cdp, writing) = Cdp::new(to);
        let state = StateCell::new(Downloads::new(&spec.workspace, &spec.downloads));
        tokio::task::spawn_local(writing);
        tokio::task::spawn_local(listen(cdp.clone(), state.clone(), from));
        let (queue, queued) = mpsc::unbounded_channel();
        state.change(|state| {
            let downloads = Path::new(&spec.downloads);
            let workspace = &mut state.workspace;
            let name = downloads.strip_prefix(&spec.workspace).ok();
            workspace.downloads = name.map(|name| name.display().to_string());
            workspace.root = spec.workspace.clone();
            workspace.queue = Some(queue);
        });
        tokio::task::spawn_local(workspace::serve_files(cdp.clone(), state.clone(), files, queued));
        match tokio::time::timeout(START_TIMEOUT, set_up(&cdp, &state, &spec.downloads)).await {
            Ok(Ok(version)) => {
                Ok(Self { version, cdp, state, reader: Reader::default(), process, changed: None, hung: false })
            }
            Ok(Err(cdp::CdpError::Gone)) => {
                Err(format!("the browser ended at its start: {}", how_it_ended(&mut process).await))
            }
            Ok(Err(error)) => Err(format!("the browser does not start: {error}")),
            Err(_) => Err(format!("the browser did not start within `{}` s", START_TIMEOUT.as_secs())),
        }
    }

    /// Waits until the browser has ended, and describes how it ended.
    pub(crate) async fn ended(&mut self) -> String {
        self.state.wait(|state| state.gone.then_some(())).await;
        how_it_ended(&mut self.process).await
    }

    /// Performs a browser action within its timeout and describes the page afterwards. Always returns a reply; a
    /// failure is part of it.
    pub(crate) async fn answer(
        &mut self,
        request: DriverRequest<'_>,
        cancelled: impl Future<Output = ()>,
    ) -> BrowserReply {
        let (until, mut cancelled) = (Instant::now() + request.after, pin!(cancelled));
        let opened = matches!(request.ask, BrowserAction::Open { .. } | BrowserAction::OpenFile { .. });
        let mut result = self.once(&request, cancelled.as_mut()).await;
        // An address can be opened without the previous page, so a crash of that page is no reason to fail.
        if let (true, Err(BrowseError { why: BrowseFailure::Crashed, .. })) = (opened, &result) {
            let again = DriverRequest { after: until.saturating_duration_since(Instant::now()), ..request };
            result = self.once(&again, cancelled).await;
        }
        let result = match result {
            // Only the call that finds the browser hung fails; the next call gets a new browser.
            Err(_) if self.hung => Err(failure(BrowseFailure::NoBrowser, "it did not answer any more, and was ended")),
            Err(_) if self.state.borrow().gone => {
                let message = format!("the browser ended: {}", how_it_ended(&mut self.process).await);
                Err(BrowseError { why: BrowseFailure::NoBrowser, message })
            }
            result => result,
        };
        let page = if self.hung { None } else { self.look(opened).await };
        let is_unclear = |error: &BrowseError| matches!(error.why, BrowseFailure::NotFound | BrowseFailure::Ambiguous);
        let candidates = self.reader.take_candidates();
        let candidates = if result.as_ref().is_err_and(is_unclear) { candidates } else { Vec::new() };
        let extras = ReplyExtras { candidates, changed: self.changed.take() };
        BrowserReply { page, happened: self.state.change(BrowserState::take_happened), result, extras }
    }

    /// Performs the action once in the page that is shown.
    async fn once(
        &mut self,
        request: &DriverRequest<'_>,
        cancelled: Pin<&mut impl Future<Output = ()>>,
    ) -> Result<BrowseResult, BrowseError> {
        match self.shown().await {
            Ok(page) => self.act(page, request, cancelled).await,
            Err(error) => Err(error.into()),
        }
    }

    async fn act(
        &mut self,
        page: Page,
        request: &DriverRequest<'_>,
        mut cancelled: Pin<&mut impl Future<Output = ()>>,
    ) -> Result<BrowseResult, BrowseError> {
        let until = Instant::now() + request.after;
        let moment = settle::moment(&page);
        let (state, tab, gesture) = (self.state.clone(), page.tab, is_gesture(request.ask));
        let stays = !matches!(request.ask, BrowserAction::Tab { .. });
        let reports = request.changes > 0 && is_reported(request.ask);
        let mut act = Act { page: page.clone(), reader: &mut self.reader, until, uploads: request.uploads };
        let result = tokio::select! {
            biased;
            result = async {
                if reports {
                    let _ = tokio::time::timeout(CHANGES_TIMEOUT, act.reader.note_page(&act.page)).await;
                }
                act.run(request.ask).await
            } => result,
            lost = lost(&state, tab) => Err(lost),
            () = closed(&state, tab), if stays => match gesture {
                // A button that closes its window has served its purpose.
                true => Ok(BrowseResult::Done),
                false => Err(failure(BrowseFailure::Stale, "the page has closed itself; another tab is shown")),
            },
            () = cancelled.as_mut() => Err(failure(BrowseFailure::Cancelled, "the request was cancelled")),
            () = tokio::time::sleep_until(until) => {
                let message = format!("not done within `{}` s", request.after.as_secs_f32());
                Err(failure(BrowseFailure::TimedOut, message))
            }
        };
        self.state.change(|state| state.tabs.values_mut().for_each(|tab| tab.led_to = None));
        if let Err(BrowseError { why: BrowseFailure::Cancelled | BrowseFailure::TimedOut, .. }) = result {
            let page = act.page.clone();
            self.recover(&page).await;
        }
        if gesture {
            self.show_popup(moment, until).await;
        }
        if !matches!(result, Err(BrowseError { why: BrowseFailure::Cancelled, .. })) {
            tokio::select! {
                () = settle::downloads(&self.state, moment, until) => {}
                () = cancelled => {}
            }
        }
        if reports && result.is_ok() {
            self.changed = self.changes(tab, request.changes, until).await;
        }
        result
    }

    /// Returns what changed since the client last knew the page of the tab.
    async fn changes(&mut self, tab: u32, max_chars: u32, until: Instant) -> Option<String> {
        let page = self.shown_page()?;
        if page.tab != tab {
            return Some(ANOTHER_PAGE.into());
        }
        let bound = until.min(Instant::now() + CHANGES_TIMEOUT);
        let changes = self.reader.changes(&page, max_chars as usize);
        let changed = tokio::time::timeout_at(bound, changes).await.ok()??;
        Some(changed.unwrap_or_else(|| ANOTHER_PAGE.into()))
    }

    /// Returns the page that is shown, whatever its state is.
    fn shown_page(&self) -> Option<Page> {
        let state = self.state.borrow();
        let tab = state.shown().filter(|_| !state.gone)?;
        let session = state.tabs.get(&tab)?.session.clone();
        Some(Page { cdp: self.cdp.clone(), state: self.state.clone(), tab, session })
    }

    /// Shows the popup that a gesture opened, because the client acted in order to see it.
    async fn show_popup(&self, moment: u64, until: Instant) {
        let popup = self.state.change(|state| {
            let popup =
                state.tabs.iter().find(|(_, tab)| tab.is_unreported && tab.born > moment).map(|(&tab, _)| tab)?;
            state.shown = popup;
            Some(popup)
        });
        let Some(popup) = popup else { return };
        let idle = |state: &BrowserState| {
            state.tabs.get(&popup).is_none_or(|tab| !tab.busy && !tab.url.is_empty()).then_some(())
        };
        let bound = settle::REPLACED_WAIT.min(until.saturating_duration_since(Instant::now()));
        let _ = tokio::time::timeout(bound, self.state.wait(idle)).await;
    }

    /// Returns the page that is shown, in a usable state.
    async fn shown(&mut self) -> Result<Page, cdp::CdpError> {
        if self.state.borrow().gone {
            return Err(cdp::CdpError::Gone);
        }
        let shown = {
            let state = self.state.borrow();
            state
                .shown()
                .and_then(|tab| Some((tab, state.tabs.get(&tab)?.session.clone(), state.tabs.get(&tab)?.crashed)))
        };
        match shown {
            None => act::create(&self.cdp, &self.state).await,
            Some((tab, session, crashed)) => {
                let page = Page { cdp: self.cdp.clone(), state: self.state.clone(), tab, session };
                if crashed { self.replace(&page).await } else { Ok(page) }
            }
        }
    }

    /// Closes a page that can no longer be used and puts a blank one in its place.
    async fn replace(&self, page: &Page) -> Result<Page, cdp::CdpError> {
        let target = page.look(|tab| tab.target.to_string());
        self.state.change(|state| state.forget_tab(page.tab));
        self.cdp.tell(None, "Target.closeTarget", json!({ "targetId": target }));
        act::create(&self.cdp, &self.state).await
    }

    /// Makes the page usable again after a request was cancelled or timed out.
    async fn recover(&mut self, page: &Page) {
        let Some(busy) = page.look(|tab| tab.busy) else { return };
        let session = Some(&*page.session);
        if busy {
            self.cdp.tell(session, "Page.stopLoading", json!({}));
        }
        if self.is_idle(page).await {
            return;
        }
        // This is sent now, so that a browser that is merely slow has as much time as possible to answer.
        let alive = self.cdp.send(None, "Browser.getVersion", json!({}));
        let ended = self.cdp.send(session, "Runtime.terminateExecution", json!({})).within::<Value>(END_TIMEOUT).await;
        if ended.is_ok() && self.is_idle(page).await {
            return;
        }
        self.cdp.tell(session, "Page.crash", json!({}));
        let crashed = self.state.wait(|state| state.tabs.get(&page.tab).is_none_or(|tab| tab.crashed).then_some(()));
        if tokio::time::timeout(END_TIMEOUT, crashed).await.is_err() {
            if let Err(cdp::CdpError::TimedOut) = alive.within::<Value>(IDLE_TIMEOUT).await {
                // The whole browser hangs, not only the page, so the next request would fail too.
                self.hung = true;
                let _ = self.process.start_kill();
                return;
            }
            // The page does not even crash; it is replaced at the next request.
            self.state.change(|state| {
                let Some(tab) = state.tabs.get_mut(&page.tab) else { return };
                tab.crashed = true;
                let url = tab.url.clone();
                state.happened(PageEvent::Crashed { url });
            });
        }
    }

    async fn is_idle(&self, page: &Page) -> bool {
        let nothing = json!({ "expression": "0" });
        let sent = self.cdp.send(Some(&page.session), "Runtime.evaluate", nothing);
        !matches!(sent.within::<Value>(IDLE_TIMEOUT).await, Err(cdp::CdpError::TimedOut))
    }

    /// Describes the page that is shown, without a long wait. For a page that was just `opened`, the title that the
    /// page reported while loading is enough.
    async fn look(&mut self, opened: bool) -> Option<proto::browser::PageInfo> {
        let page = self.shown_page()?;
        self.cdp.tell(Some(&page.session), "Runtime.releaseObjectGroup", json!({ "objectGroup": OBJECTS }));
        let known = page.look(|tab| tab.crashed || opened && tab.is_titled)?;
        let seen: Option<(String, String)> =
            if known { None } else { page.peek("[location.href, document.title]", TITLE_TIMEOUT).await };
        let (url, title) = match seen {
            Some((url, title)) => (shorten(&url, MAX_URL), shorten(&title, MAX_URL)),
            None => page.look(|tab| (tab.url.clone(), tab.title.clone()))?,
        };
        self.state.change(|state| {
            let known = state.tabs.get_mut(&page.tab)?;
            known.title.clone_from(&title);
            let (url, tabs) = (state.workspace.shown(url), state.tabs.len() as u32);
            Some(proto::browser::PageInfo { url, title, tab: page.tab, tabs })
        })
    }
}

fn is_gesture(ask: &BrowserAction) -> bool {
    matches!(ask, BrowserAction::Click { .. } | BrowserAction::Press { .. } | BrowserAction::Type { .. })
}

/// Returns whether an action changes the page that is shown. Other actions show another page, or only look.
fn is_reported(ask: &BrowserAction) -> bool {
    match ask {
        BrowserAction::Click { .. }
        | BrowserAction::Type { .. }
        | BrowserAction::Press { .. }
        | BrowserAction::Select { .. }
        | BrowserAction::Hover { .. }
        | BrowserAction::Scroll { .. }
        | BrowserAction::Wait { .. }
        | BrowserAction::Upload { .. } => true,
        BrowserAction::Open { .. }
        | BrowserAction::OpenFile { .. }
        | BrowserAction::Back
        | BrowserAction::Forward
        | BrowserAction::Reload
        | BrowserAction::Tab { .. }
        | BrowserAction::Evaluate { .. }
        | BrowserAction::Snapshot(_)
        | BrowserAction::Screenshot { .. }
        | BrowserAction::Log { .. } => false,
    }
}

/// Sends the initial requests and returns the version of the browser.
async fn set_up(cdp: &Cdp, state: &SharedState, downloads: &str) -> Result<String, cdp::CdpError> {
    #[derive(Deserialize)]
    struct Version {
        product: String,
    }
    let version = cdp.send(None, "Browser.getVersion", json!({}));
    cdp.tell(None, "Target.setDiscoverTargets", json!({ "discover": true, "filter": [{ "type": "page" }] }));
    let attach = json!({
        "autoAttach": true, "waitForDebuggerOnStart": true, "flatten": true, "filter": [{ "type": "page" }],
    });
    cdp.tell(None, "Target.setAutoAttach", attach);
    let save = json!({ "behavior": "allowAndName", "downloadPath": downloads, "eventsEnabled": true });
    cdp.tell(None, "Browser.setDownloadBehavior", save);
    act::create(cdp, state).await?;
    Ok(version.read::<Version>().await?.product)
}

async fn listen(cdp: Cdp, state: SharedState, from: tokio::net::unix::pipe::Receiver) {
    cdp.pump(from, |event| state.change(|known| events::take(known, &cdp, &event))).await;
    state.change(|state| state.gone = true);
}

/// Waits until the browser ends, or until the page of the tab or the page that is shown crashes.
async fn lost(state: &SharedState, tab: u32) -> BrowseError {
    let lost = |state: &BrowserState| {
        let crashed = |tab: &u32| state.tabs.get(tab).is_some_and(|tab| tab.crashed);
        if state.gone {
            Some(failure(BrowseFailure::NoBrowser, "the browser ended"))
        } else if crashed(&tab) || crashed(&state.shown) {
            Some(failure(BrowseFailure::Crashed, "the page crashed; the next call has a blank one"))
        } else {
            None
        }
    };
    state.wait(lost).await
}

/// Waits until the tab is closed and a short time longer, because the current action may still finish by itself.
async fn closed(state: &SharedState, tab: u32) {
    state.wait(|state| (!state.tabs.contains_key(&tab)).then_some(())).await;
    tokio::time::sleep(END_TIMEOUT).await;
}

async fn how_it_ended(process: &mut Child) -> String {
    // The process has closed its end of the pipe, so it is ending or is not a browser that speaks the protocol.
    match tokio::time::timeout(END_TIMEOUT, process.wait()).await {
        Ok(Ok(status)) => status.to_string(),
        Ok(Err(error)) => error.to_string(),
        Err(_) => "it closed its connection".into(),
    }
}
