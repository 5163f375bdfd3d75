//! Performs actions in the browser of a context. Actions in one browser run one after the other, but beside the code of
//! the context and not after it, so that a page can be opened while code serves it.
//!
//! However an action goes, the next one finds a browser: a dead browser is started again, one that does not answer is
//! given up, and the next result says what was lost.

use std::sync::Arc;
use std::time::Duration;

use proto::browser::{BrowseError, BrowseFailure, BrowserAction as Ask, BrowserReply as Answered, PageInfo};
use proto::{FromGuest, GuestFailure, ToGuest};
use tokio::time::Instant;

use super::{NETWORK_OFF, OpContext, ResolvedContext, check_path, file_error};
use crate::browser::bounded::bounded;
use crate::config::BrowserCommand;
use crate::context::{BrowserUse, Context, ContextLease};
use crate::guest::{BoundedCall, CallEnd, GuestReply, ReplySink};
use crate::op::{Browse, Browsed, Call, EngineError, Network, NoticeKind, Outcome};
use crate::registry::{LiveSandbox, one_line};
use crate::sandbox_egress::sentences;

/// Time that the host allows beyond the timeout of the action. The guest allows less, so that it can report what
/// happened.
const BACKSTOP: Duration = Duration::from_secs(5);
const MAX_UPLOADS: usize = 100;
const FOR_MEMORY: &str = " (a process of the sandbox was killed for memory meanwhile)";
const RESTARTED: &str = "[the browser was restarted: pages and logins are gone]";

impl OpContext {
    pub(super) async fn browse(&self, call: &Call, browse: Browse) -> Result<Outcome, EngineError> {
        self.browser_command()?;
        let Browse { mut target, ask, uploads, timeout } = browse;
        uploads.iter().try_for_each(|path| check_path(path))?;
        if uploads.len() > MAX_UPLOADS {
            return Err(EngineError::OverLimit { what: "files_of_one_upload", limit: MAX_UPLOADS.to_string() });
        }
        target.make.iter_mut().for_each(|make| make.browser = true);
        let entered = self.enter(call, target, None).await?;
        let nobodys = entered.nobodys();
        let result =
            self.browse_in(call, entered, BrowseRequest { ask, uploads, timeout: self.time_to_browse(timeout) }).await;
        self.dismiss_if_nobodys(nobodys, result.is_err());
        result.map(|browsed| Outcome::Browsed(Box::new(browsed)))
    }

    fn time_to_browse(&self, wanted: Duration) -> Duration {
        let config = self.tenancy.config();
        wanted.clamp(Duration::from_millis(1), config.max_timeout.max(config.timeout))
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

    /// Starts the browser of a context that is going to need it. Only calls that use the browser wait for the start.
    pub(super) fn expect_browsing(&self, context: &ContextLease) {
        let (world, context) = (self.clone(), context.context().clone());
        self.inner.tasks.spawn(async move {
            let _turn = context.browsing.lock().await;
            let Some(sandbox) = context.live_sandbox().filter(|sandbox| !sandbox.browser_runs()) else { return };
            let Ok(provisioner) = world.inner.provisioner() else { return };
            let _hurry = provisioner.hurry();
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
        mut entered: ResolvedContext,
        asked: BrowseRequest,
    ) -> Result<Browsed, EngineError> {
        let running = entered.context.run();
        let turn = entered.context.browsing.clone();
        let why = "an earlier call in this browser is not finished";
        let (mut browsing, permits) = self.admit_to(call, &mut entered, turn, why).await?;
        let context = entered.context.context().clone();
        let visit = BrowseAttempt { world: self, call, context: &context, asked: &asked };
        let result = visit.make(&mut browsing).await;
        context.used();
        drop((permits, running));
        let mut browsed = result?;
        browsed.notice = browsing.notice.take();
        browsed.created = entered.news.tell();
        browsed.context = context.info();
        Ok(browsed)
    }
}

struct BrowseRequest {
    ask: Ask,
    uploads: Vec<String>,
    timeout: Duration,
}

/// A browser action that has its turn.
struct BrowseAttempt<'a> {
    world: &'a OpContext,
    call: &'a Call,
    context: &'a Context,
    asked: &'a BrowseRequest,
}

/// The reply to a browser action, or the reason why the guest refused it.
type BrowseReply = Result<Box<Answered>, (GuestFailure, String)>;

struct BrowseSink;

impl ReplySink for BrowseSink {
    type Answer = BrowseReply;

    fn take(&mut self, reply: GuestReply) -> Result<Option<BrowseReply>, &'static str> {
        match reply {
            GuestReply::Message(FromGuest::Browsed { browsed }) => Ok(Some(Ok(browsed))),
            GuestReply::Message(FromGuest::Failed { failure, message }) => Ok(Some(Err((failure, one_line(&message))))),
            _ => Err("the guest answered a browser's call with something else"),
        }
    }
}

impl BrowseAttempt<'_> {
    async fn make(&self, browsing: &mut BrowserUse) -> Result<Browsed, EngineError> {
        let sandbox = self.ready_browser(browsing).await?;
        if self.call.cancel.is_cancelled() {
            return Err(EngineError::Cancelled);
        }
        browsing.used = true;
        let BrowseRequest { ask, uploads, timeout } = self.asked;
        let after_ms = timeout.as_millis() as u64;
        let request = ToGuest::Browse { ask: ask.clone(), uploads: uploads.clone(), after_ms };
        let (inner, guest) = (&self.world.inner, &sandbox.guest);
        let bounded = BoundedCall { inner, call: self.call, guest, timeout: *timeout, backstop: BACKSTOP };
        let (begun, egress) = (Instant::now(), sandbox.run_egress(Network::Usual));
        let ending = bounded.run(&request, &mut BrowseSink).await;
        let (duration, (denials, more)) = (begun.elapsed(), egress.denials());
        let mut answered = self.conclude(ending, &sandbox).await?;
        let online = sandbox.has_egress();
        match &mut answered.result {
            Err(error) => explain(error, &denials, online),
            Ok(_) => {
                if let Some(denial) = refused(&self.asked.ask, answered.page.as_ref(), &denials) {
                    let message = one_line(&denial.sentence);
                    answered.result = Err(BrowseError { why: BrowseFailure::Navigation, message });
                }
            }
        }
        let Answered { page, happened, result } = answered;
        let denied = sentences(&denials, more);
        let (context, created, notice) = (self.context.info(), false, None);
        Ok(Browsed { context, created, notice, page, happened, result, denied, duration })
    }

    /// Returns the context's sandbox with a running browser in it.
    async fn ready_browser(&self, browsing: &mut BrowserUse) -> Result<Arc<LiveSandbox>, EngineError> {
        let sandbox = self.world.sandbox_for_files(self.call, self.context).await?;
        if let Some(old) = browsing.sandbox.replace(sandbox.clone())
            && !Arc::ptr_eq(&old, &sandbox)
        {
            let why = old.guest.why_lost().0;
            browsing.notice = Some(format!("[the sandbox was lost ({why}): files, pages and logins are gone]"));
            browsing.used = false;
        }
        if sandbox.browser_runs() {
            return Ok(sandbox);
        }
        if browsing.used {
            // A death that was reported when it happened is not reported to the journal again.
            if sandbox.browser_is_over() {
                self.died("it ended between two calls");
            }
            browsing.notice.get_or_insert_with(|| RESTARTED.into());
        }
        // If this call gives up on the start, the next call replaces that browser.
        let provisioner = self.world.inner.provisioner()?;
        let _hurry = provisioner.hurry();
        let starting = provisioner.start_browser(&sandbox);
        self.world.unless_over(self.call, starting).await?.map_err(|failure| {
            tracing::warn!(context = self.context.id, why = failure.log, "no browser");
            EngineError::NoBrowser(failure.public)
        })?;
        Ok(sandbox)
    }

    /// Decides what the end means for the browser.
    async fn conclude(&self, ending: CallEnd<BrowseReply>, sandbox: &LiveSandbox) -> Result<Answered, EngineError> {
        let failed = |why, message: String| {
            Ok(Answered { page: None, happened: Vec::new(), result: Err(BrowseError { why, message }) })
        };
        match ending {
            CallEnd::Answered(Ok(answered)) => {
                let mut answered = bounded(&self.asked.ask, *answered);
                match &mut answered.result {
                    Err(BrowseError { why: BrowseFailure::NoBrowser, message }) => {
                        let message = self.gone(sandbox, message).await;
                        return failed(BrowseFailure::NoBrowser, message);
                    }
                    Err(BrowseError { why: BrowseFailure::Crashed, message }) if sandbox.browser_outgrew().await => {
                        message.push_str(FOR_MEMORY);
                    }
                    _ => {}
                }
                Ok(answered)
            }
            CallEnd::Answered(Err((GuestFailure::Browser, why))) => {
                let message = self.gone(sandbox, &why).await;
                failed(BrowseFailure::NoBrowser, message)
            }
            CallEnd::Answered(Err((failure, message))) => {
                let limit = self.world.inner.config.max_file_bytes;
                let paths = self.asked.uploads.join(", ");
                Err(file_error(&paths, limit, FromGuest::Failed { failure, message }, sandbox))
            }
            CallEnd::Unsendable(why) => failed(BrowseFailure::Invalid, format!("too long for one call: {why}")),
            CallEnd::Silent { cancelled } => {
                let timeout = self.asked.timeout;
                let why = if cancelled { "was cancelled" } else { "took too long" };
                let message =
                    self.gone(sandbox, &format!("the call {why} and it did not answer within {timeout:?}")).await;
                failed(if cancelled { BrowseFailure::Cancelled } else { BrowseFailure::TimedOut }, message)
            }
            CallEnd::Lost(why) => {
                let message = format!("the sandbox was lost ({why}): variables, files and pages are gone");
                failed(BrowseFailure::NoBrowser, message)
            }
        }
    }

    /// Gives the browser up, and returns a message with the reason as far as it is known.
    async fn gone(&self, sandbox: &LiveSandbox, why: &str) -> String {
        let outgrew = sandbox.browser_outgrew().await;
        let why = format!("{why}{}", if outgrew { FOR_MEMORY } else { "" });
        sandbox.browser_is_over();
        self.died(&why);
        format!("the browser is gone: {why}; the next call starts another")
    }

    fn died(&self, why: &str) {
        let OpContext { inner, tenancy } = self.world;
        inner.notify_with(tenancy, &self.context.id, NoticeKind::BrowserDied, why);
    }
}

/// Errors of a browser whose proxy does not let it through. They do not contain the reason.
const NOT_LET_OUT: [&str; 4] =
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

/// Returns the denial that a page shows. Over plain HTTP the browser takes a denial for the page's own response, which
/// is not the requested page.
fn refused<'a>(ask: &Ask, shown: Option<&PageInfo>, denials: &'a [egress::Denial]) -> Option<&'a egress::Denial> {
    let opens = matches!(ask, Ask::Open { .. } | Ask::Back | Ask::Forward | Ask::Reload);
    let url = &shown.filter(|_| opens)?.url;
    let asked = format!("GET {}", url.split(['?', '#']).next().unwrap_or(url));
    denials.iter().find(|denial| match denial.what.strip_suffix("...") {
        Some(beginning) => asked.starts_with(beginning),
        None => denial.what == asked,
    })
}

/// Adds the reason why a page could not be opened if the browser does not know it.
fn explain(error: &mut BrowseError, denials: &[egress::Denial], online: bool) {
    if error.why != BrowseFailure::Navigation {
        return;
    }
    let says = |any: &[&str]| any.iter().any(|name| error.message.contains(name));
    let why = match denials.last() {
        Some(denial) if says(&NOT_LET_OUT) => one_line(&denial.sentence),
        None if !online && says(&NO_NETWORK) => format!("network access is off: {NETWORK_OFF}"),
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
        let is_refused = |ask: &Ask, url: &str| {
            let page = PageInfo { url: url.into(), title: String::new(), tab: 1, tabs: 1 };
            refused(ask, Some(&page), &denials).is_some()
        };
        let open = Ask::Open { url: String::new() };
        assert!(is_refused(&open, "http://evil.test/a?b#c") && is_refused(&open, "http://evil.test/longer"));
        assert!(!is_refused(&open, "http://evil.test/ab") && !is_refused(&open, "http://good.test/a"));
        assert!(!is_refused(&Ask::Log { max_lines: 1 }, "http://evil.test/a"), "it opens nothing");
    }
}
