//! Detects when a page has settled after an action: after the next animation frame, and after the requests that it
//! then makes, within time limits.

use std::time::Duration;

use tokio::time::timeout;

use crate::page::Page;
use crate::state::{BrowserState, Stage};

/// Maximum wait for a page that is being replaced after an action.
pub(crate) const REPLACED_WAIT: Duration = Duration::from_secs(5);
/// Maximum wait for the requests that an action started, and for the end of downloads.
const REQUESTS_WAIT: Duration = Duration::from_secs(1);
/// Maximum wait for the rest of an opened page to load once its document is there.
const LOADING_WAIT: Duration = Duration::from_secs(5);
/// Maximum wait for a download to begin after a click on a link that saves its target.
const DOWNLOAD_WAIT: Duration = Duration::from_secs(3);
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

/// Waits for the navigation, the requests and the downloads that began after `moment`.
pub(crate) async fn after(page: &Page, moment: u64) {
    frame(page).await;
    for _ in 0..2 {
        let (busy, asking) = (page.look(|tab| tab.busy), page.look(|tab| tab.is_asking_since(moment)));
        if busy == Some(true) {
            let idle = |state: &BrowserState| state.tabs.get(&page.tab).is_none_or(|tab| !tab.busy).then_some(());
            let _ = timeout(REPLACED_WAIT, page.state.wait(idle)).await;
        } else if asking == Some(true) || page.state.borrow().downloads.is_running_since(moment) {
            let quiet = |state: &BrowserState| {
                let tab = state.tabs.get(&page.tab)?;
                (tab.busy || !tab.is_asking_since(moment) && !state.downloads.is_running_since(moment)).then_some(())
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
    page.look(|tab| tab.busy) != Some(false) || page.state.borrow().downloads.begun_since(moment)
}

/// Waits for a download to begin, and then for its end.
pub(crate) async fn download(page: &Page, moment: u64) {
    let begun = |state: &BrowserState| state.downloads.begun_since(moment).then_some(());
    if timeout(DOWNLOAD_WAIT, page.state.wait(begun)).await.is_ok() {
        let ended = |state: &BrowserState| (!state.downloads.is_running_since(moment)).then_some(());
        let _ = timeout(REQUESTS_WAIT, page.state.wait(ended)).await;
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
