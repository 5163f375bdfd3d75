//! When a page is done with what was done to it: after a frame, and after what it then asks the network for, within bounds.

use std::time::Duration;

use tokio::time::timeout;

use crate::page::Page;
use crate::state::{BrowserState, Stage};

/// A page that is replaced is waited for this long after an action.
pub const REPLACED: Duration = Duration::from_secs(5);
/// Requests that an action began, and downloads.
const ASKING: Duration = Duration::from_secs(1);
/// After its document is there, a page that was opened may go on loading this long.
const LOADING: Duration = Duration::from_secs(5);
/// A click on a link that saves its target is given this long to begin a download.
const BEGINNING: Duration = Duration::from_secs(3);
/// A frame is not waited for longer: a page that is not painted has none.
const FRAME: Duration = Duration::from_millis(300);

const NEXT_FRAME: &str = "new Promise(done => {
    const late = setTimeout(done, 50, 0);
    requestAnimationFrame(() => { clearTimeout(late); done(0); });
})";

/// The page's next frame.
pub async fn frame(page: &Page) {
    let _: Option<u8> = page.peek(NEXT_FRAME, FRAME).await;
}

/// The present moment, for `after`.
pub fn moment(page: &Page) -> u64 {
    page.state.borrow().clock
}

/// Waits for what was begun since that moment.
pub async fn after(page: &Page, moment: u64) {
    frame(page).await;
    for _ in 0..2 {
        let (busy, asking) = (page.look(|tab| tab.busy), page.look(|tab| tab.is_asking_since(moment)));
        if busy == Some(true) {
            let idle = |state: &BrowserState| state.tabs.get(&page.tab).is_none_or(|tab| !tab.busy).then_some(());
            let _ = timeout(REPLACED, page.state.wait(idle)).await;
        } else if asking == Some(true) || page.state.borrow().downloads.is_running_since(moment) {
            let quiet = |state: &BrowserState| {
                let tab = state.tabs.get(&page.tab)?;
                (tab.busy || !tab.is_asking_since(moment) && !state.downloads.is_running_since(moment)).then_some(())
            };
            let _ = timeout(ASKING, page.state.wait(quiet)).await;
        } else {
            return;
        }
        // What came is drawn.
        frame(page).await;
    }
}

/// Whether another document, or a download, came or is coming since that moment.
pub fn is_changed(page: &Page, moment: u64) -> bool {
    page.look(|tab| tab.busy) != Some(false) || page.state.borrow().downloads.begun_since(moment)
}

/// Waits for a download that is about to begin, and for its end.
pub async fn download(page: &Page, moment: u64) {
    let begun = |state: &BrowserState| state.downloads.begun_since(moment).then_some(());
    if timeout(BEGINNING, page.state.wait(begun)).await.is_ok() {
        let ended = |state: &BrowserState| (!state.downloads.is_running_since(moment)).then_some(());
        let _ = timeout(ASKING, page.state.wait(ended)).await;
    }
}

/// Waits for the document of this loader, or one that took its place; whether all of it is there.
pub async fn loaded(page: &Page, loader: &str) -> bool {
    let reached = |stage: Stage| {
        move |state: &BrowserState| {
            let tab = state.tabs.get(&page.tab)?;
            let replaced = !tab.busy && tab.replaced.iter().any(|one| one == loader);
            (tab.stage >= stage && (tab.loader == loader || replaced)).then_some(())
        }
    };
    page.state.wait(reached(Stage::Interactive)).await;
    timeout(LOADING, page.state.wait(reached(Stage::Loaded))).await.is_ok()
}
