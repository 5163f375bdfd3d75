//! Detects when a page has settled after an action: after the next animation frame, and after the requests that it
//! then makes, within time limits.

use std::time::Duration;

use tokio::time::{Instant, timeout};

use crate::page::Page;
use crate::state::{BrowserState, Stage, StateCell, shorten};

/// Maximum wait for a page that is being replaced after an action.
pub(crate) const REPLACED_WAIT: Duration = Duration::from_secs(5);
/// Maximum wait for the requests that an action started.
const REQUESTS_WAIT: Duration = Duration::from_secs(1);
/// Maximum wait for the rest of an opened page to load once its document is there.
const LOADING_WAIT: Duration = Duration::from_secs(5);
/// Maximum wait for a download to begin after a click on a link that saves its target. The page may have prevented it.
const EXPECTED_WAIT: Duration = Duration::from_secs(3);
/// Maximum wait for a response to become the document of a frame or a download.
const UNDECIDED_WAIT: Duration = Duration::from_secs(10);
/// Maximum wait for the end of downloads.
const DOWNLOAD_WAIT: Duration = Duration::from_secs(10);
/// Maximum wait for an animation frame. A page that is not painted has none.
const FRAME_WAIT: Duration = Duration::from_millis(300);

const NEXT_FRAME: &str = "new Promise(done => {
    const late = setTimeout(done, 50, 0);
    requestAnimationFrame(() => { clearTimeout(late); done(0); });
})";

/// Waits for the next animation frame of the page.
pub(crate) async fn frame(page: &Page) {
    let _: Option<u8> = page.peek(NEXT_FRAME, FRAME_WAIT).await;
}

/// Returns the current moment, for use with [`after`].
pub(crate) fn moment(page: &Page) -> u64 {
    page.state.borrow().clock
}

/// Waits for the navigation and the requests that began after `moment`. [`downloads`] waits for the downloads.
pub(crate) async fn after(page: &Page, moment: u64) {
    frame(page).await;
    for _ in 0..2 {
        let (busy, asking) = (page.look(|tab| tab.busy), page.look(|tab| tab.is_asking_since(moment)));
        if busy == Some(true) {
            let idle = |state: &BrowserState| state.tabs.get(&page.tab).is_none_or(|tab| !tab.busy).then_some(());
            let _ = timeout(REPLACED_WAIT, page.state.wait(idle)).await;
        } else if asking == Some(true) {
            let quiet = |state: &BrowserState| {
                let tab = state.tabs.get(&page.tab);
                tab.is_none_or(|tab| tab.busy || !tab.is_asking_since(moment)).then_some(())
            };
            let _ = timeout(REQUESTS_WAIT, page.state.wait(quiet)).await;
        } else {
            return;
        }
        // The new content is drawn in the next frame.
        frame(page).await;
    }
}

/// Returns whether another document or a download has arrived, or is on its way, since `moment`.
pub(crate) fn is_changed(page: &Page, moment: u64) -> bool {
    let state = page.state.borrow();
    page.look(|tab| tab.busy) != Some(false) || state.is_undecided_since(moment) || state.downloads.begun_since(moment)
}

/// Waits for the downloads that an action caused, so that its reply reports them: first until each of them has begun,
/// then for their end. Returns at once if the action caused none.
pub(crate) async fn downloads(state: &StateCell, moment: u64, until: Instant) {
    let bound = |wait: Duration| wait.min(until.saturating_duration_since(Instant::now()));
    let decided = |state: &BrowserState| (state.gone || !state.is_undecided_since(moment)).then_some(());
    let _ = timeout(bound(UNDECIDED_WAIT), state.wait(decided)).await;
    let begun = |state: &BrowserState| (state.gone || !state.downloads.is_expected_since(moment)).then_some(());
    if timeout(bound(EXPECTED_WAIT), state.wait(begun)).await.is_err() {
        state.change(|state| state.downloads.expect_none());
    }
    let ended = |state: &BrowserState| (state.gone || !state.downloads.is_running_since(moment)).then_some(());
    if timeout(bound(DOWNLOAD_WAIT), state.wait(ended)).await.is_err() {
        state.change(|state| {
            for url in state.downloads.addresses_since(moment) {
                state.note(format!(
                    "the download of `{}` is still running; a later call reports its end",
                    shorten(&url, 300)
                ));
            }
        });
    }
}

/// Waits for the document of this loader, or for one that replaced it. Returns whether it has loaded completely.
pub(crate) async fn loaded(page: &Page, loader: &str) -> bool {
    let reached = |stage: Stage| {
        move |state: &BrowserState| {
            let tab = state.tabs.get(&page.tab)?;
            let replaced = !tab.busy && tab.replaced.iter().any(|one| one == loader);
            (tab.stage >= stage && (tab.loader == loader || replaced)).then_some(())
        }
    };
    page.state.wait(reached(Stage::Interactive)).await;
    timeout(LOADING_WAIT, page.state.wait(reached(Stage::Loaded))).await.is_ok()
}

#[cfg(test)]
mod tests {
    use proto::browser::PageEvent;

    use super::*;
    use crate::downloads::Downloads;
    use crate::state::NetworkRequest;

    /// The browser aborts the navigation at once, and may take any time to report the download.
    #[tokio::test(start_paused = true)]
    async fn a_download_that_is_reported_late_belongs_to_the_action_that_caused_it() {
        let state = StateCell::new(Downloads::new("/", "/nowhere"));
        let moment = state.change(|state| {
            state.add_tab("target", "session", String::new());
            let moment = state.tick();
            let now = state.tick();
            state.tabs.get_mut(&1).unwrap().add_answer("loader".into(), "target".into(), 200, now);
            moment
        });
        let until = Instant::now() + Duration::from_secs(60);
        let late = async {
            // Each step leaves the waiting code a chance to give up.
            tokio::task::yield_now().await;
            state.change(|state| {
                let now = state.tick();
                state.decide_download("target");
                assert!(state.downloads.begin(now, "guid", "http://a.test/a.csv", "a.csv"));
            });
            tokio::task::yield_now().await;
            state.change(|state| {
                let ended = state.downloads.cancelled("guid").unwrap();
                state.happened(ended);
            });
        };
        tokio::join!(downloads(&state, moment, until), late);
        let happened = state.change(BrowserState::take_happened);
        assert!(matches!(&happened[..], [PageEvent::Download { .. }]), "{happened:?}");
        // A response without content, and one from before the action, are not waited for.
        let moment = state.change(|state| {
            let now = state.tick();
            let tab = state.tabs.get_mut(&1).unwrap();
            tab.add_answer("empty".into(), "target".into(), 204, now + 1);
            tab.add_answer("old".into(), "target".into(), 200, now);
            now
        });
        let begun = Instant::now();
        downloads(&state, moment, until).await;
        assert_eq!(begun.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn requests_of_a_tab_that_the_action_closed_are_not_waited_for() {
        let state = StateCell::new(Downloads::new("/", "/nowhere"));
        let (_theirs, ours) = std::io::pipe().unwrap();
        let (cdp, _) = crate::cdp::Cdp::new(tokio::net::unix::pipe::Sender::from_owned_fd(ours.into()).unwrap());
        let tab = state.change(|state| {
            let tab = state.add_tab("target", "session", String::new());
            let request = NetworkRequest { born: 1, line: String::new(), lasting: false, status: None };
            state.tabs.get_mut(&tab).unwrap().add_request("request".into(), request);
            tab
        });
        let page = Page { cdp, state: state.clone(), tab, session: "session".into() };
        let close = async {
            tokio::task::yield_now().await;
            state.change(|state| state.forget_tab(tab));
        };
        let begun = Instant::now();
        tokio::join!(after(&page, 0), close);
        assert_eq!(begun.elapsed(), Duration::ZERO);
    }
}
