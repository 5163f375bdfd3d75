//! The browser actions, one file for each kind.

mod keyboard;
mod keys;
mod look;
mod navigate;
mod pointer;
mod tabs;

use std::time::Duration;

use proto::browser::{BrowseResult, MouseButton};
use proto::{BrowseError, BrowseFailure, BrowserAction};
use tokio::time::Instant;

use crate::page::Page;
use crate::snapshot::{Element, Need, Point, Reader};

pub(crate) use tabs::create;

/// Maximum wait for an element named by a selector to appear.
const APPEAR_WAIT: Duration = Duration::from_secs(1);
/// Pause between two searches for an element.
const SEARCH_PAUSE: Duration = Duration::from_millis(30);
/// Part of a request's time that is reserved for reporting why the time was not enough.
const MARGIN: Duration = Duration::from_millis(100);

/// A request that is being performed.
pub(crate) struct Act<'a> {
    pub page: Page,
    pub reader: &'a mut Reader,
    pub until: Instant,
    /// Directory that contains the files for an upload.
    pub uploads: Option<&'a str>,
}

type ActResult = Result<BrowseResult, BrowseError>;

impl Act<'_> {
    pub(crate) async fn run(&mut self, ask: &BrowserAction) -> ActResult {
        match ask {
            BrowserAction::Open { url } => self.open(url).await,
            BrowserAction::OpenFile { path } => self.open_file(path).await,
            BrowserAction::Back => self.travel(-1).await,
            BrowserAction::Forward => self.travel(1).await,
            BrowserAction::Reload => self.reload().await,
            BrowserAction::Click { at, button, double } => self.click(at, *button, *double).await,
            BrowserAction::Hover { at } => self.hover(at).await,
            BrowserAction::Scroll { at, right, down } => self.scroll(at.as_deref(), *right, *down).await,
            BrowserAction::Type { at, text, append, submit, keys } => {
                self.type_text(at, keyboard::Typing { text, append: *append, submit: *submit, keys: *keys }).await
            }
            BrowserAction::Press { key, at } => self.press(key, at.as_deref()).await,
            BrowserAction::Select { at, options } => self.select(at, options).await,
            BrowserAction::Upload { at, files } => self.upload(at, files).await,
            BrowserAction::Wait { text, gone } => self.wait_for(text, *gone).await,
            BrowserAction::Tab { tab } => self.tab(tab).await,
            BrowserAction::Evaluate { expression } => self.evaluate(expression).await,
            BrowserAction::Snapshot(ask) => self.reader.snapshot(&self.page, ask).await.map(BrowseResult::Snapshot),
            BrowserAction::Screenshot { at, full_page } => self.screenshot(at.as_deref(), *full_page).await,
            BrowserAction::Log { max_lines } => Ok(self.log(*max_lines).await),
        }
    }

    /// Returns the remaining time of the request, minus the time reserved for reporting a failure.
    fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now()).saturating_sub(MARGIN)
    }

    /// Finds an element, and waits for it to appear.
    async fn find(&mut self, at: &str) -> Result<Element, BrowseError> {
        let end = Instant::now() + APPEAR_WAIT.min(self.left());
        loop {
            match self.reader.find(&self.page, at).await {
                Err(error) if error.why == BrowseFailure::NotFound && Instant::now() < end => {
                    tokio::time::sleep(SEARCH_PAUSE).await;
                }
                found => return found,
            }
        }
    }

    /// Finds an element, waits until it is ready, and returns it with its position.
    async fn ready(&mut self, at: &str, need: Need) -> Result<(Element, Point), BrowseError> {
        let element = self.find(at).await?;
        let point = self.reader.ready(&self.page, &element, need, self.left()).await?;
        Ok((element, point))
    }
}

fn button_name(button: MouseButton) -> &'static str {
    match button {
        MouseButton::Left => "left",
        MouseButton::Middle => "middle",
        MouseButton::Right => "right",
    }
}
