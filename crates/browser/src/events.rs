//! Handles the events of the browser, and responds at once to those that need it: dialogs, popups, file choosers and
//! downloads.
//!
//! A response must never wait for one of our requests: a click that opens a dialog does not finish before the dialog
//! is closed.

use proto::browser::PageEvent;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::cdp::{Cdp, Event};
use crate::snapshot::{SCRIPT, WORLD};
use crate::state::{
    BrowserState, CdpSession, FrameState, IsolatedWorld, MAX_TABS, MAX_URL, NetworkRequest, Stage, shorten,
};
use crate::workspace::RequestPaused;

/// Maximum length of the text of a dialog.
const MAX_DIALOG: usize = 500;
/// Maximum number of closed popups that are reported individually.
const MAX_CLOSED: usize = 20;

/// Script that reports the title of a page when it has loaded. A request for the title would have to wait, because a
/// page that has just loaded is busy with its layout.
const TITLE_SCRIPT: &str = "if (window === top) addEventListener('load', () => sandpoolTitle(document.title));";
/// Name of the function through which the script reports the title.
const TITLE_BINDING: &str = "sandpoolTitle";

/// Returns whether pages may show this address. A page that navigates to any other address is left at once.
pub(crate) fn is_allowed(url: &str) -> bool {
    let scheme = url.split(':').next().unwrap_or_default();
    let allowed = ["http", "https", "data", "blob"];
    allowed.iter().any(|one| scheme.eq_ignore_ascii_case(one)) || is_blank(url)
}

fn is_blank(url: &str) -> bool {
    let page = url.split(['#', '?']).next().unwrap_or_default();
    url.is_empty() || ["about:blank", "about:srcdoc"].iter().any(|one| page.eq_ignore_ascii_case(one))
}

/// Returns whether this is the error page that the browser shows when an address could not be opened.
fn is_error_page(url: &str) -> bool {
    url.starts_with("chrome-error:")
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Detached {
    session_id: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Target {
    target_id: String,
    r#type: String,
    title: String,
    url: String,
    opener_id: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Attached {
    session_id: String,
    target_info: Target,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct TargetChanged {
    target_info: Target,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct FrameEvent {
    frame_id: String,
    #[serde(default)]
    parent_frame_id: Option<String>,
    #[serde(default)]
    reason: String,
    #[serde(default)]
    navigation_type: String,
    #[serde(default)]
    url: String,
    #[serde(default)]
    loader_id: String,
    #[serde(default)]
    name: String,
}

#[derive(Deserialize)]
struct Navigated {
    frame: NavigatedFrame,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct NavigatedFrame {
    id: String,
    parent_id: Option<String>,
    loader_id: String,
    url: String,
    #[serde(default)]
    url_fragment: String,
}

#[derive(Deserialize)]
struct ContextCreated {
    context: ExecutionContext,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ExecutionContext {
    id: u64,
    unique_id: String,
    name: String,
    aux_data: Option<AuxData>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct AuxData {
    frame_id: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ContextDestroyed {
    execution_context_unique_id: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RequestSent {
    request_id: String,
    request: SentRequest,
    #[serde(default)]
    r#type: String,
}

#[derive(Deserialize)]
struct SentRequest {
    url: String,
    method: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ResponseReceived {
    request_id: String,
    loader_id: String,
    #[serde(default)]
    frame_id: String,
    response: Response,
}

#[derive(Deserialize)]
struct Response {
    status: u16,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Finished {
    request_id: String,
    #[serde(default)]
    error_text: Option<String>,
}

#[derive(Deserialize)]
struct Dialog {
    r#type: String,
    message: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Download {
    guid: String,
    #[serde(default)]
    frame_id: String,
    #[serde(default)]
    url: String,
    #[serde(default)]
    suggested_filename: String,
    #[serde(default)]
    state: String,
    #[serde(default)]
    received_bytes: f64,
    /// Total size of the download, or 0 if it is unknown.
    #[serde(default)]
    total_bytes: f64,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct BindingCalled {
    name: String,
    payload: String,
    execution_context_id: u64,
}

#[derive(Deserialize)]
struct Console {
    r#type: String,
    args: Vec<Argument>,
}

#[derive(Deserialize)]
struct Argument {
    value: Option<Value>,
    description: Option<String>,
    r#type: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Thrown {
    exception_details: Exception,
}

#[derive(Deserialize)]
pub(crate) struct Exception {
    text: String,
    exception: Option<ThrownValue>,
}

#[derive(Deserialize)]
struct ThrownValue {
    description: Option<String>,
    value: Option<Value>,
}

impl Exception {
    /// Returns the text that the page's console would show.
    pub(crate) fn sentence(self) -> String {
        let thrown = self.exception.map(|thrown| (thrown.description, thrown.value));
        match thrown {
            Some((Some(description), _)) => description,
            Some((None, Some(value))) => format!("{} {value}", self.text),
            _ => self.text,
        }
    }
}

/// Updates the state with an event, and responds to it if necessary.
pub(crate) fn take(state: &mut BrowserState, cdp: &Cdp, event: &Event<'_>) {
    let taken = match event.session {
        None => on_browser_event(state, cdp, event),
        Some(session) => on_session_event(state, cdp, session, event),
    };
    // `None` means that the event could not be read, or that it belongs to a tab that is closed.
    let _ = taken;
}

fn on_browser_event(state: &mut BrowserState, cdp: &Cdp, event: &Event<'_>) -> Option<()> {
    match event.method {
        "Target.attachedToTarget" => page_attached(state, cdp, event.params()?),
        "Target.targetInfoChanged" => {
            let TargetChanged { target_info } = event.params()?;
            let tab = state.tabs.values_mut().find(|tab| *tab.target == *target_info.target_id)?;
            tab.title = shorten(&target_info.title, MAX_URL);
        }
        "Target.detachedFromTarget" => {
            let Detached { session_id } = event.params()?;
            let tab = state.sessions.get(&*session_id)?.tab;
            state.forget_tab(tab);
        }
        "Browser.downloadWillBegin" => {
            let begun: Download = event.params()?;
            let now = state.tick();
            state.decide_download(&begun.frame_id);
            let url = state.workspace.shown(begun.url);
            if !state.downloads.begin(now, &begun.guid, &url, &begun.suggested_filename) {
                cdp.tell(None, "Browser.cancelDownload", json!({ "guid": begun.guid }));
                state.note("more downloads than may run at once were cancelled");
            }
        }
        "Browser.downloadProgress" => {
            let progress: Download = event.params()?;
            let ended = match progress.state.as_str() {
                "completed" => state.downloads.completed(&progress.guid),
                "canceled" => state.downloads.cancelled(&progress.guid),
                _ => {
                    // These are floating-point numbers, like all numbers in JavaScript.
                    let (received, announced) = (progress.received_bytes as u64, progress.total_bytes as u64);
                    if !state.downloads.progress(&progress.guid, received, announced) {
                        cdp.tell(None, "Browser.cancelDownload", json!({ "guid": progress.guid }));
                    }
                    None
                }
            };
            state.happened(ended?);
        }
        _ => {}
    }
    Some(())
}

fn page_attached(state: &mut BrowserState, cdp: &Cdp, attached: Attached) {
    let Attached { session_id, target_info: target } = attached;
    if state.tabs.len() >= MAX_TABS + usize::from(state.creating) {
        // The page that opened the new one waits until the new one runs.
        cdp.tell(Some(&session_id), "Runtime.runIfWaitingForDebugger", json!({}));
        cdp.tell(None, "Target.closeTarget", json!({ "targetId": target.target_id }));
        if state.closed_popups.len() < MAX_CLOSED {
            state.closed_popups.push(shorten(&target.url, MAX_URL));
        } else {
            end_storm(state, cdp, target.opener_id.as_deref());
        }
        return;
    }
    let number = state.add_tab(&target.target_id, &session_id, target.url);
    if let Some(tab) = state.tabs.get_mut(&number) {
        // The tab counts as a popup until the driver finds that it created the tab itself.
        (tab.is_popup, tab.is_unreported) = (true, true);
    }
    if let Some(served) = &state.workspace.served {
        cdp.tell(Some(&session_id), "Fetch.enable", served.interception());
    }
    configure(cdp, &session_id);
}

/// Crashes the process of a page that opens too many windows. The page cannot be closed normally, because it is always
/// busy with the next window.
fn end_storm(state: &mut BrowserState, cdp: &Cdp, opener: Option<&str>) {
    state.note("a page that opened too many others was ended");
    if let Some(tab) = state.tabs.values().find(|tab| Some(&*tab.target) == opener && !tab.crashed) {
        cdp.tell(Some(&tab.session), "Page.crash", json!({}));
    }
}

/// Configures a DevTools session before its page runs. The page waits for the last command.
fn configure(cdp: &Cdp, session: &str) {
    let session = Some(session);
    cdp.tell(session, "Page.enable", json!({}));
    cdp.tell(session, "Page.setLifecycleEventsEnabled", json!({ "enabled": true }));
    cdp.tell(session, "Runtime.enable", json!({}));
    cdp.tell(session, "Network.enable", json!({ "maxTotalBufferSize": 0, "maxResourceBufferSize": 0 }));
    // This has to precede the first document. Otherwise each role or name requested later would build the whole tree.
    cdp.tell(session, "Accessibility.enable", json!({}));
    cdp.tell(session, "Inspector.enable", json!({}));
    cdp.tell(session, "Runtime.addBinding", json!({ "name": TITLE_BINDING, "executionContextName": WORLD }));
    let source = format!("{SCRIPT}{TITLE_SCRIPT}");
    let world = json!({ "source": source, "worldName": WORLD, "runImmediately": true });
    cdp.tell(session, "Page.addScriptToEvaluateOnNewDocument", world);
    let attach = json!({
        "autoAttach": true, "waitForDebuggerOnStart": true, "flatten": true, "filter": [{ "type": "iframe" }],
    });
    cdp.tell(session, "Target.setAutoAttach", attach);
    cdp.tell(session, "Page.setInterceptFileChooserDialog", json!({ "enabled": true }));
    cdp.tell(session, "Emulation.setFocusEmulationEnabled", json!({ "enabled": true }));
    cdp.tell(session, "Runtime.runIfWaitingForDebugger", json!({}));
}

fn on_session_event(state: &mut BrowserState, cdp: &Cdp, session: &str, event: &Event<'_>) -> Option<()> {
    let (area, _) = event.method.split_once('.')?;
    match area {
        "Page" => on_page_event(state, cdp, session, event),
        "Network" => on_network_event(state, session, event),
        "Runtime" => on_runtime_event(state, session, event),
        "Target" => on_target_event(state, cdp, session, event),
        "Fetch" => on_fetch_event(state, cdp, session, event),
        "Inspector" if event.method == "Inspector.targetCrashed" => crashed(state, cdp, session),
        _ => None,
    }
}

fn crashed(state: &mut BrowserState, cdp: &Cdp, session: &str) -> Option<()> {
    let shown = state.shown;
    let number = state.sessions.get(session)?.tab;
    let tab = state.tabs.get_mut(&number)?;
    if *tab.session != *session {
        // Only the process of a frame crashed, and the page continues without it.
        tab.frames.values_mut().filter(|frame| *frame.session == *session).for_each(|frame| frame.world = None);
        return Some(());
    }
    tab.crashed = true;
    tab.busy = false;
    tab.frames.values_mut().for_each(|frame| frame.world = None);
    if tab.is_popup && number != shown {
        // The popup may have shared its process with the page that opened it, and no client has looked at it yet.
        cdp.tell(None, "Target.closeTarget", json!({ "targetId": &*tab.target }));
    }
    let url = tab.url.clone();
    state.happened(PageEvent::Crashed { url });
    Some(())
}

fn on_page_event(state: &mut BrowserState, cdp: &Cdp, session: &str, event: &Event<'_>) -> Option<()> {
    let born = state.tick();
    match event.method {
        "Page.javascriptDialogOpening" => {
            let Dialog { r#type: kind, message } = event.params()?;
            let accept = matches!(kind.as_str(), "beforeunload" | "alert");
            cdp.tell(Some(session), "Page.handleJavaScriptDialog", json!({ "accept": accept }));
            state.happened(PageEvent::Dialog { kind, message: shorten(&message, MAX_DIALOG) });
            return Some(());
        }
        "Page.fileChooserOpened" => {
            state.note("the page asked for a file; give it one with an upload into its file input");
            return Some(());
        }
        _ => {}
    }
    let (session_id, _) = state.sessions.get_key_value(session)?;
    let session_id = session_id.clone();
    let tab = state.tab_of(session)?;
    match event.method {
        "Page.frameAttached" => {
            let frame: FrameEvent = event.params()?;
            tab.add_frame(&frame.frame_id, Some(&frame.parent_frame_id?), &session_id, born);
        }
        "Page.frameDetached" => {
            let frame: FrameEvent = event.params()?;
            // A swapped frame continues in another session.
            if frame.reason != "swap" && !tab.is_root(&frame.frame_id) {
                tab.undecided.retain(|_, document| document.frame != frame.frame_id);
                tab.remove_frame(&frame.frame_id);
            }
        }
        "Page.frameNavigated" => {
            let Navigated { frame } = event.params()?;
            navigated(tab, &session_id, &frame, born);
            if !is_allowed(&frame.url) && !is_error_page(&frame.url) {
                cdp.tell(Some(&tab.session.clone()), "Page.navigate", json!({ "url": "about:blank" }));
                state.note(format!("the page went to `{}`, which is not shown", shorten(&frame.url, 200)));
            }
        }
        "Page.navigatedWithinDocument" => {
            let frame: FrameEvent = event.params()?;
            if tab.is_root(&frame.frame_id) {
                tab.url = shorten(&frame.url, MAX_URL);
            }
        }
        "Page.frameStartedNavigating" | "Page.frameStartedLoading" | "Page.frameRequestedNavigation" => {
            let frame: FrameEvent = event.params()?;
            let same_document = frame.navigation_type.contains("ameDocument");
            if event.method == "Page.frameStartedNavigating" && !same_document {
                // The frame has given up the document before.
                tab.undecided.retain(|_, document| document.frame != frame.frame_id);
            }
            if tab.is_root(&frame.frame_id) && !same_document {
                tab.busy = true;
            }
        }
        "Page.frameStoppedLoading" | "Page.frameClearedScheduledNavigation" => {
            let frame: FrameEvent = event.params()?;
            if tab.is_root(&frame.frame_id) {
                tab.busy = false;
            }
        }
        "Page.lifecycleEvent" => {
            let frame: FrameEvent = event.params()?;
            if tab.is_root(&frame.frame_id) && tab.loader == frame.loader_id {
                match frame.name.as_str() {
                    "DOMContentLoaded" => tab.stage = tab.stage.max(Stage::Interactive),
                    "load" => tab.stage = Stage::Loaded,
                    _ => {}
                }
            }
        }
        _ => {}
    }
    Some(())
}

fn navigated(tab: &mut crate::state::TabState, session: &std::rc::Rc<str>, frame: &NavigatedFrame, born: u64) {
    tab.undecided.remove(&frame.loader_id);
    tab.remove_frames_in(&frame.id);
    tab.add_frame(&frame.id, frame.parent_id.as_deref(), session, born);
    if tab.is_root(&frame.id) {
        tab.url = shorten(&format!("{}{}", frame.url, frame.url_fragment), MAX_URL);
        tab.replace(&frame.loader_id);
        tab.stage = Stage::Started;
        tab.moved = born;
        tab.is_titled = false;
        tab.crashed = false;
        tab.requests.retain(|id, _| *id == frame.loader_id);
        tab.log.clear();
    }
}

fn on_runtime_event(state: &mut BrowserState, session: &str, event: &Event<'_>) -> Option<()> {
    let (session, _) = state.sessions.get_key_value(session)?;
    let session = session.clone();
    let tab = state.tab_of(&session)?;
    let in_session = |frame: &&mut FrameState| frame.session == session;
    match event.method {
        "Runtime.executionContextCreated" => {
            let ContextCreated { context } = event.params()?;
            if context.name == WORLD {
                let frame = tab.frames.get_mut(&*context.aux_data?.frame_id?)?;
                frame.world = Some(IsolatedWorld { context: context.id, unique: context.unique_id });
                frame.session = session;
            }
        }
        "Runtime.executionContextDestroyed" => {
            let ContextDestroyed { execution_context_unique_id: id } = event.params()?;
            let gone = tab.frames.values_mut().filter(in_session);
            gone.filter(|frame| frame.world.as_ref().is_some_and(|world| world.unique == id))
                .for_each(|frame| frame.world = None);
        }
        "Runtime.executionContextsCleared" => {
            tab.frames.values_mut().filter(in_session).for_each(|frame| frame.world = None);
        }
        "Runtime.bindingCalled" => {
            let BindingCalled { name, payload, execution_context_id } = event.params()?;
            let root = tab.frames.get(&tab.target)?;
            let ours = root.world.as_ref().is_some_and(|world| world.context == execution_context_id);
            if name == TITLE_BINDING && ours && tab.session == session {
                tab.title = shorten(&payload, MAX_URL);
                tab.is_titled = true;
            }
        }
        "Runtime.consoleAPICalled" => {
            let Console { r#type: kind, args } = event.params()?;
            let parts: Vec<String> = args.into_iter().take(20).map(Argument::text).collect();
            tab.log.push(&format!("[{kind}] {}", parts.join(" ")));
        }
        "Runtime.exceptionThrown" => {
            let Thrown { exception_details } = event.params()?;
            tab.log.push(&format!("[exception] {}", exception_details.sentence()));
        }
        _ => {}
    }
    Some(())
}

impl Argument {
    fn text(self) -> String {
        match (self.value, self.description) {
            (Some(Value::String(text)), _) => shorten(&text, 1000),
            (Some(value), _) => value.to_string(),
            (None, Some(description)) => shorten(&description, 1000),
            (None, None) => self.r#type,
        }
    }
}

fn on_network_event(state: &mut BrowserState, session: &str, event: &Event<'_>) -> Option<()> {
    let born = state.tick();
    let tab = state.tab_of(session)?;
    match event.method {
        "Network.requestWillBeSent" => {
            let RequestSent { request_id, request, r#type: kind } = event.params()?;
            let lasting = matches!(kind.as_str(), "EventSource" | "WebSocket" | "Ping" | "Media" | "Prefetch");
            let line = format!("{} {}", request.method, shorten(&request.url, 300));
            tab.add_request(request_id, NetworkRequest { born, line, lasting, status: None });
        }
        "Network.responseReceived" => {
            let ResponseReceived { request_id, loader_id, frame_id, response } = event.params()?;
            if request_id == loader_id {
                tab.add_answer(loader_id, frame_id, response.status, born);
            }
            tab.requests.get_mut(&request_id)?.status = Some(response.status);
        }
        "Network.loadingFinished" | "Network.loadingFailed" => {
            let Finished { request_id, error_text } = event.params()?;
            let request = tab.requests.remove(&request_id)?;
            let status = request.status.map_or_else(|| "no answer".to_owned(), |status| status.to_string());
            let end = error_text.unwrap_or(status);
            tab.log.push(&format!("[network] {} → {end}", request.line));
        }
        _ => {}
    }
    Some(())
}

/// Answers a request to the private origin of a page of the workspace, or refuses it.
fn on_fetch_event(state: &mut BrowserState, cdp: &Cdp, session: &str, event: &Event<'_>) -> Option<()> {
    let paused: RequestPaused = event.params()?;
    let (request, is_document, url) = (paused.request_id.clone(), paused.is_document(), paused.url().to_owned());
    let tab = state.sessions.get(session).and_then(|session| state.tabs.get(&session.tab));
    if !tab.is_some_and(|tab| state.workspace.take(session, tab, paused)) {
        // An aborted navigation leaves the page as it is. An error page would be part of the tab's history, from which
        // the client could reach the address that was refused.
        let reason = if is_document { "Aborted" } else { "AccessDenied" };
        cdp.tell(Some(session), "Fetch.failRequest", json!({ "requestId": request, "errorReason": reason }));
        if is_document {
            state.note(format!("the page may not open `{}`", shorten(&state.workspace.shown(url), 200)));
        }
    }
    Some(())
}

/// Handles frames that have a separate DevTools session.
fn on_target_event(state: &mut BrowserState, cdp: &Cdp, session: &str, event: &Event<'_>) -> Option<()> {
    match event.method {
        "Target.attachedToTarget" => {
            let Attached { session_id, target_info } = event.params()?;
            if target_info.r#type != "iframe" {
                return None;
            }
            let tab = state.sessions.get(session)?.tab;
            let target: std::rc::Rc<str> = target_info.target_id.into();
            let own: std::rc::Rc<str> = session_id.into();
            state.sessions.insert(own.clone(), CdpSession { tab, target: target.clone() });
            let frame = state.tabs.get_mut(&tab)?.frames.get_mut(&target);
            if let Some(frame) = frame {
                frame.session = own.clone();
                frame.world = None;
            }
            configure(cdp, &own);
        }
        "Target.detachedFromTarget" => {
            let Detached { session_id } = event.params()?;
            let CdpSession { tab, target } = state.sessions.remove(&*session_id)?;
            let tab = state.tabs.get_mut(&tab)?;
            if tab.frames.get(&target).is_some_and(|frame| *frame.session == *session_id && frame.parent.is_some()) {
                tab.remove_frames_in(&target);
                tab.frames.get_mut(&target)?.world = None;
            }
        }
        _ => {}
    }
    Some(())
}
