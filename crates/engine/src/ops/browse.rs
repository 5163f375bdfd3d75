//! Performs actions in the browser of a context. Actions in one browser run one after the other, but at the same time
//! as the code of the context, so that a page can be opened while code serves it.
//!
//! However an action goes, the next one finds a browser: a dead browser is started again, one that does not answer is
//! given up, and the next result says what was lost.

use std::sync::Arc;
use std::time::Duration;

use proto::browser::{BrowseError, BrowseFailure, BrowserAction, BrowserReply, PageInfo, ReplyExtras};
use proto::{FromGuest, GuestFailure, ToGuest};
use tokio::time::Instant;

use super::{NETWORK_OFF, OpContext, ResolvedContext, check_path, file_error};
use crate::browser::bounded::bounded;
use crate::config::BrowserCommand;
use crate::context::{BrowserUse, Context, ContextLease};
use crate::guest::{BoundedCall, CallEnd, GuestReply, ReplySink};
use crate::op::{Browse, Browsed, Call, EngineError, LimitKind, Network, NoticeKind, Outcome, Stage, Waiting};
use crate::registry::{LiveSandbox, one_line};
use crate::sandbox_egress::sentences;

/// Time that the host allows beyond the timeout of the action. The guest allows less, so that it can still report what
/// happened.
const BACKSTOP: Duration = Duration::from_secs(5);
const MAX_UPLOADS: usize = 100;
const KILLED_FOR_MEMORY: &str = " (a process of the sandbox was killed for memory meanwhile)";
const RESTARTED: &str = "[the browser was restarted: pages and logins are gone]";

impl OpContext {
    pub(super) async fn browse(&self, call: &Call, browse: Browse) -> Result<Outcome, EngineError> {
        self.browser_command()?;
        let Browse { mut target, ask, uploads, changes, timeout } = browse;
        uploads.iter().try_for_each(|path| check_path(path))?;
        if let BrowserAction::OpenFile { path } = &ask {
            check_path(path)?;
        }
        if uploads.len() > MAX_UPLOADS {
            return Err(EngineError::OverLimit { what: LimitKind::UploadFiles, limit: MAX_UPLOADS.to_string() });
        }
        target.make.iter_mut().for_each(|make| make.browser = true);
        let resolved = self.resolve(call, target, None).await?;
        let exclusive = resolved.exclusive();
        let request = BrowseRequest { ask, uploads, changes, timeout: self.time_to_browse(timeout) };
        let result = self.browse_in(call, resolved, request).await;
        self.dismiss_exclusive(exclusive, result.is_err());
        result.map(|browsed| Outcome::Browsed(Box::new(browsed)))
    }

    fn time_to_browse(&self, wanted: Duration) -> Duration {
        let config = self.tenancy.config();
        wanted.clamp(Duration::from_millis(1), config.max_timeout)
    }

    /// Returns the browser of this realm, or an error if it has none.
    pub(super) fn browser_command(&self) -> Result<&BrowserCommand, EngineError> {
        let config = self.tenancy.config();
        if config.browser.is_none() {
            let why = format!("sandboxes of `{}` have none", config.realm.0);
            return Err(EngineError::NoBrowser(why));
        }
        let missing =
            "no Chromium on the server's machine; `apt install chromium-headless-shell` there, then restart it";
        self.inner.provisioner()?.runtimes.browser.as_ref().ok_or_else(|| EngineError::NoBrowser(missing.into()))
    }

    /// Starts the browser of a context before its first browser action. Only calls that use the browser wait for it.
    pub(super) fn start_browser_early(&self, context: &ContextLease) {
        let (ops, context) = (self.clone(), context.context().clone());
        self.inner.tasks.spawn(async move {
            let _turn = context.browser_turn.lock().await;
            let Some(sandbox) = context.live_sandbox().filter(|sandbox| !sandbox.browser_runs()) else { return };
            let Ok(provisioner) = ops.inner.provisioner() else { return };
            let _waiting = provisioner.caller_waits();
            let started = tokio::select! {
                started = provisioner.start_browser(&sandbox) => started,
                () = context.gone.cancelled() => return,
            };
            if let Err(failure) = started {
                tracing::warn!(context = context.id, why = failure.log, "no browser; the first call tries again");
            }
        });
    }

    async fn browse_in(
        &self,
        call: &Call,
        mut resolved: ResolvedContext,
        request: BrowseRequest,
    ) -> Result<Browsed, EngineError> {
        let running = resolved.context.run();
        let turn = resolved.context.browser_turn.clone();
        let why = || Waiting::Other("an earlier call in this browser is not finished".into());
        let (mut browser, permits) =
            self.admit_to(call, &mut resolved, turn, Some(self.inner.config.queue_wait), why).await?;
        let context = resolved.context.context().clone();
        let attempt = BrowseAttempt { ops: self, call, context: &context, request: &request };
        let result = attempt.run(&mut browser).await;
        context.used();
        drop((permits, running));
        let mut browsed = result?;
        browsed.notice = browser.notice.take();
        browsed.created = resolved.new_notice.report();
        browsed.context = context.info();
        Ok(browsed)
    }
}

struct BrowseRequest {
    ask: BrowserAction,
    uploads: Vec<String>,
    changes: u32,
    timeout: Duration,
}

/// A browser action that has its turn.
struct BrowseAttempt<'a> {
    ops: &'a OpContext,
    call: &'a Call,
    context: &'a Context,
    request: &'a BrowseRequest,
}

/// The reply to a browser action, or the reason why the guest refused it.
type BrowseAnswer = Result<Box<BrowserReply>, (GuestFailure, String)>;

struct BrowseSink;

impl ReplySink for BrowseSink {
    type Answer = BrowseAnswer;

    fn take(&mut self, reply: GuestReply) -> Result<Option<BrowseAnswer>, &'static str> {
        match reply {
            GuestReply::Message(FromGuest::Browsed { browsed }) => Ok(Some(Ok(browsed))),
            GuestReply::Message(FromGuest::Failed { failure, message }) => Ok(Some(Err((failure, one_line(&message))))),
            _ => Err("the guest answered a browser's call with something else"),
        }
    }
}

impl BrowseAttempt<'_> {
    async fn run(&self, browser: &mut BrowserUse) -> Result<Browsed, EngineError> {
        let sandbox = self.ready_browser(browser).await?;
        if self.call.cancel.is_cancelled() {
            return Err(EngineError::Cancelled);
        }
        browser.used = true;
        let BrowseRequest { ask, uploads, changes, timeout } = self.request;
        let after_ms = timeout.as_millis() as u64;
        let request = ToGuest::Browse { ask: ask.clone(), uploads: uploads.clone(), after_ms, changes: *changes };
        let (inner, guest) = (&self.ops.inner, &sandbox.guest);
        let bounded = BoundedCall { inner, call: self.call, guest, timeout: *timeout, backstop: BACKSTOP };
        let stage = self.call.stages.begin(Stage::Browser);
        let (begun, egress) = (Instant::now(), sandbox.run_egress(Network::Usual, &stage));
        let ending = bounded.run(&request, &mut BrowseSink).await;
        drop(stage);
        let (duration, (denials, more)) = (begun.elapsed(), egress.denials());
        let mut answered = self.conclude(ending, &sandbox).await?;
        let online = sandbox.has_egress();
        match &mut answered.result {
            Err(error) => explain(error, &denials, online),
            Ok(_) => {
                if let Some(denial) = shown_denial(&self.request.ask, answered.page.as_ref(), &denials) {
                    let message = one_line(&denial.sentence);
                    answered.result = Err(BrowseError { why: BrowseFailure::Navigation, message });
                }
            }
        }
        let BrowserReply { page, happened, result, extras } = answered;
        let denied = sentences(&denials, more);
        let (context, created, notice) = (self.context.info(), false, None);
        Ok(Browsed { context, created, notice, page, happened, result, extras, denied, duration })
    }

    /// Returns the context's sandbox with a running browser in it.
    async fn ready_browser(&self, browser: &mut BrowserUse) -> Result<Arc<LiveSandbox>, EngineError> {
        let sandbox = self.ops.sandbox_for_files(self.call, self.context).await?;
        if let Some(old) = browser.sandbox.replace(sandbox.clone())
            && !Arc::ptr_eq(&old, &sandbox)
        {
            let why = old.guest.why_lost().0;
            browser.notice = Some(format!("[the sandbox was lost ({why}): files, pages and logins are gone]"));
            browser.used = false;
        }
        if sandbox.browser_runs() {
            return Ok(sandbox);
        }
        if browser.used {
            // A death that was reported when it happened is not reported to the journal again.
            if sandbox.mark_browser_over() {
                self.report_death("it ended between two calls");
            }
            browser.notice.get_or_insert_with(|| RESTARTED.into());
        }
        // If this call gives up on the start, the next call replaces that browser.
        let provisioner = self.ops.inner.provisioner()?;
        let _waiting = provisioner.caller_waits();
        let starting = provisioner.start_browser(&sandbox);
        self.ops.unless_over(self.call, starting).await?.map_err(|failure| {
            tracing::warn!(context = self.context.id, why = failure.log, "no browser");
            EngineError::NoBrowser(failure.public)
        })?;
        Ok(sandbox)
    }

    /// Turns the end of the guest's call into a reply, and gives the browser up if it is gone or does not answer.
    async fn conclude(
        &self,
        ending: CallEnd<BrowseAnswer>,
        sandbox: &LiveSandbox,
    ) -> Result<BrowserReply, EngineError> {
        let failed = |why, message: String| {
            let (result, extras) = (Err(BrowseError { why, message }), ReplyExtras::default());
            Ok(BrowserReply { page: None, happened: Vec::new(), result, extras })
        };
        match ending {
            CallEnd::Answered(Ok(answered)) => {
                let mut answered = bounded(&self.request.ask, self.request.changes, *answered);
                match &mut answered.result {
                    Err(BrowseError { why: BrowseFailure::NoBrowser, message }) => {
                        let message = self.give_up_browser(sandbox, message).await;
                        return failed(BrowseFailure::NoBrowser, message);
                    }
                    Err(BrowseError { why: BrowseFailure::Crashed, message })
                        if sandbox.browser_was_oom_killed().await =>
                    {
                        message.push_str(KILLED_FOR_MEMORY);
                    }
                    _ => {}
                }
                Ok(answered)
            }
            CallEnd::Answered(Err((GuestFailure::Browser, why))) => {
                let message = self.give_up_browser(sandbox, &why).await;
                failed(BrowseFailure::NoBrowser, message)
            }
            CallEnd::Answered(Err((failure, message))) => {
                let limit = self.ops.inner.config.max_file_bytes;
                let paths = match &self.request.ask {
                    BrowserAction::OpenFile { path } => path.clone(),
                    _ => self.request.uploads.join(", "),
                };
                Err(file_error(&paths, limit, FromGuest::Failed { failure, message }, sandbox))
            }
            CallEnd::Unsendable(why) => failed(BrowseFailure::Invalid, format!("too long for one call: {why}")),
            CallEnd::Silent { cancelled } => {
                let timeout = self.request.timeout;
                let why = if cancelled { "was cancelled" } else { "took too long" };
                let message = self
                    .give_up_browser(sandbox, &format!("the call {why} and it did not answer within {timeout:?}"))
                    .await;
                failed(if cancelled { BrowseFailure::Cancelled } else { BrowseFailure::TimedOut }, message)
            }
            CallEnd::Lost(why) => {
                let message = format!("the sandbox was lost ({why}): variables, files and pages are gone");
                failed(BrowseFailure::NoBrowser, message)
            }
        }
    }

    /// Gives the browser up, and returns a message that contains the reason.
    async fn give_up_browser(&self, sandbox: &LiveSandbox, why: &str) -> String {
        let was_oom_killed = sandbox.browser_was_oom_killed().await;
        let why = format!("{why}{}", if was_oom_killed { KILLED_FOR_MEMORY } else { "" });
        sandbox.mark_browser_over();
        self.report_death(&why);
        format!("the browser is gone: {why}; the next call starts another")
    }

    fn report_death(&self, why: &str) {
        let OpContext { inner, tenancy, .. } = self.ops;
        inner.notify_with(tenancy, &self.context.id, NoticeKind::BrowserDied, why);
    }
}

/// Errors of a browser whose proxy denied the request. They do not contain the reason.
const PROXY_ERRORS: [&str; 4] =
    ["ERR_TUNNEL_CONNECTION_FAILED", "ERR_PROXY_CONNECTION_FAILED", "ERR_SOCKS_CONNECTION", "ERR_EMPTY_RESPONSE"];
/// Errors of a browser without any network.
const NO_NETWORK: [&str; 6] = [
    "ERR_INTERNET_DISCONNECTED",
    "ERR_NAME_NOT_RESOLVED",
    "ERR_ADDRESS_UNREACHABLE",
    "ERR_NETWORK_ACCESS_DENIED",
    "ERR_PROXY_CONNECTION_FAILED",
    "ERR_CONNECTION_FAILED",
];

/// Returns the denial that the browser shows in place of the page. Over plain HTTP, the browser takes the proxy's
/// denial for the response of the host.
fn shown_denial<'a>(
    ask: &BrowserAction,
    shown: Option<&PageInfo>,
    denials: &'a [egress::Denial],
) -> Option<&'a egress::Denial> {
    let opens = matches!(
        ask,
        BrowserAction::Open { .. } | BrowserAction::Back | BrowserAction::Forward | BrowserAction::Reload
    );
    let url = &shown.filter(|_| opens)?.url;
    let requested = format!("GET {}", url.split(['?', '#']).next().unwrap_or(url));
    denials.iter().find(|denial| match denial.what.strip_suffix("...") {
        Some(beginning) => requested.starts_with(beginning),
        None => denial.what == requested,
    })
}

/// Adds the reason why a page could not be opened if only the host knows it.
fn explain(error: &mut BrowseError, denials: &[egress::Denial], online: bool) {
    if error.why != BrowseFailure::Navigation {
        return;
    }
    let contains_any = |names: &[&str]| names.iter().any(|name| error.message.contains(name));
    let why = match denials.last() {
        Some(denial) if contains_any(&PROXY_ERRORS) => one_line(&denial.sentence),
        None if !online && contains_any(&NO_NETWORK) => format!("network access is off: {NETWORK_OFF}"),
        _ => return,
    };
    error.message = format!("{why} ({})", error.message);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_was_not_let_out_says_why() {
        let said = |message: &str, denials: &[egress::Denial], online| {
            let mut error = BrowseError { why: BrowseFailure::Navigation, message: message.into() };
            explain(&mut error, denials, online);
            error.message
        };
        let denial = egress::Denial { what: String::new(), rule: String::new(), sentence: "no way".into() };
        let denials = [denial];
        assert_eq!(
            said("net::ERR_TUNNEL_CONNECTION_FAILED", &denials, true),
            "no way (net::ERR_TUNNEL_CONNECTION_FAILED)"
        );
        assert_eq!(said("net::ERR_CONNECTION_REFUSED", &denials, true), "net::ERR_CONNECTION_REFUSED");
        assert_eq!(said("net::ERR_TUNNEL_CONNECTION_FAILED", &[], true), "net::ERR_TUNNEL_CONNECTION_FAILED");
        assert!(said("net::ERR_INTERNET_DISCONNECTED", &[], false).contains("`network.default`"));
        assert_eq!(said("net::ERR_CONNECTION_REFUSED", &[], false), "net::ERR_CONNECTION_REFUSED", "its own loopback");
    }

    #[test]
    fn a_denial_that_is_shown_as_a_page_is_not_the_page() {
        let denial = |what: &str| egress::Denial { what: what.into(), rule: String::new(), sentence: String::new() };
        let denials = [denial("GET http://evil.test/a"), denial("GET http://evil.test/long...")];
        let is_refused = |ask: &BrowserAction, url: &str| {
            let page = PageInfo { url: url.into(), title: String::new(), tab: 1, tabs: 1 };
            shown_denial(ask, Some(&page), &denials).is_some()
        };
        let open = BrowserAction::Open { url: String::new() };
        assert!(is_refused(&open, "http://evil.test/a?b#c") && is_refused(&open, "http://evil.test/longer"));
        assert!(!is_refused(&open, "http://evil.test/ab") && !is_refused(&open, "http://good.test/a"));
        assert!(!is_refused(&BrowserAction::Log { max_lines: 1 }, "http://evil.test/a"), "it opens nothing");
    }
}
