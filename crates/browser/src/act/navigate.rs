//! Navigation from page to page.

use std::time::Duration;

use proto::browser::BrowseResult;
use proto::{BrowseError, BrowseFailure};
use serde::Deserialize;
use serde_json::json;

use super::{Act, ActResult};
use crate::events::is_allowed;
use crate::page::failure;
use crate::settle;
use crate::state::shorten;
use crate::workspace::Served;

const ABORTED: &str = "net::ERR_ABORTED";
/// Time in which the browser reports a crash after it has aborted a navigation.
const CRASH_REPORT_WAIT: Duration = Duration::from_millis(300);

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Navigated {
    loader_id: Option<String>,
    error_text: Option<String>,
    #[serde(default)]
    is_download: bool,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct History {
    current_index: i64,
    entries: Vec<HistoryEntry>,
}

#[derive(Deserialize)]
struct HistoryEntry {
    id: i64,
    url: String,
}

impl Act<'_> {
    pub(crate) async fn open(&mut self, url: &str) -> ActResult {
        let url = &cleaned(url);
        check(url)?;
        self.close_files();
        self.navigate(url).await
    }

    /// Opens a file of the workspace under a separate origin.
    pub(crate) async fn open_file(&mut self, path: &str) -> ActResult {
        let served = Served::new(path).map_err(|error| {
            failure(BrowseFailure::Navigation, format!("`{}` cannot be shown: {error}", shorten(path, 200)))
        })?;
        let (url, interception) = (served.page.clone(), served.interception());
        self.close_files();
        self.page.state.change(|state| state.workspace.served = Some(served));
        let _: serde_json::Value = self.page.ask("Fetch.enable", interception).await?;
        self.lead_to(&url);
        self.navigate(&url).await
    }

    /// Records where the client leads the tab.
    fn lead_to(&self, url: &str) {
        self.page.state.change(|state| {
            state.tabs.get_mut(&self.page.tab).into_iter().for_each(|tab| tab.led_to = Some(url.to_owned()));
        });
    }

    /// Stops serving the files of the page that was opened before.
    fn close_files(&self) {
        let served = self.page.state.change(|state| state.workspace.served.take());
        if served.is_some() {
            let state = self.page.state.borrow();
            state.tabs.values().for_each(|tab| self.page.cdp.tell(Some(&tab.session), "Fetch.disable", json!({})));
        }
    }

    async fn navigate(&mut self, url: &str) -> ActResult {
        let moment = settle::moment(&self.page);
        let navigated: Navigated = self.page.ask("Page.navigate", json!({ "url": url })).await?;
        if navigated.is_download || self.page.state.borrow().downloads.begun_since(moment) {
            if !self.page.state.borrow().downloads.begun_since(moment) {
                self.page.state.change(|state| state.downloads.expect(state.clock));
            }
            return Ok(BrowseResult::Done);
        }
        if let Some(text) = navigated.error_text {
            if text == ABORTED {
                // This error also occurs if the page's process has just crashed. The report of the crash then ends this
                // action.
                tokio::time::sleep(CRASH_REPORT_WAIT).await;
            }
            let shown = self.page.state.borrow().workspace.shown(url.to_owned());
            return Err(failure(BrowseFailure::Navigation, sentence(&shown, &text)));
        }
        match navigated.loader_id {
            Some(loader) => self.wait_until_loaded(&loader).await,
            // Only the fragment of the address has changed.
            None => settle::frame(&self.page).await,
        }
        Ok(BrowseResult::Done)
    }

    async fn wait_until_loaded(&mut self, loader: &str) {
        let whole = settle::loaded(&self.page, loader).await;
        self.page.state.change(|state| {
            if !whole {
                state.note("parts of the page are still loading");
            }
            let status = state.tabs.get(&self.page.tab).and_then(crate::state::TabState::status);
            if let Some(status) = status.filter(|status| *status >= 400) {
                state.note(format!("the server answered with status `{status}`"));
            }
        });
    }

    pub(crate) async fn travel(&mut self, by: i64) -> ActResult {
        let history: History = self.page.ask("Page.getNavigationHistory", json!({})).await?;
        let index = history.current_index.checked_add(by).and_then(|index| usize::try_from(index).ok());
        let Some(entry) = index.and_then(|index| history.entries.get(index)) else {
            let which = if by < 0 { "before" } else { "after" };
            return Err(failure(BrowseFailure::Navigation, format!("there is no page {which} this one")));
        };
        self.lead_to(&entry.url);
        let moment = settle::moment(&self.page);
        let _: serde_json::Value = self.page.ask("Page.navigateToHistoryEntry", json!({ "entryId": entry.id })).await?;
        self.wait_until_moved(moment).await
    }

    pub(crate) async fn reload(&mut self) -> ActResult {
        if let Some(url) = self.page.look(|tab| tab.url.clone()) {
            self.lead_to(&url);
        }
        let moment = settle::moment(&self.page);
        let _: serde_json::Value = self.page.ask("Page.reload", json!({})).await?;
        self.wait_until_moved(moment).await
    }

    /// Waits until the tab has navigated since `moment`.
    async fn wait_until_moved(&mut self, moment: u64) -> ActResult {
        let tab = self.page.tab;
        let moved = self
            .page
            .state
            .wait(|state| state.tabs.get(&tab).filter(|tab| tab.moved > moment).map(|tab| tab.loader.clone()));
        let loader = moved.await;
        self.wait_until_loaded(&loader).await;
        Ok(BrowseResult::Done)
    }
}

/// Returns the address without the characters that the browser removes before it looks at the scheme.
fn cleaned(url: &str) -> String {
    let inner = url.trim_matches(|c: char| c <= ' ');
    inner.chars().filter(|c| !matches!(c, '\t' | '\n' | '\r')).collect()
}

/// Accepts only addresses of web pages, and rejects the browser's own pages, files of the sandbox and disguised
/// scripts.
pub(super) fn check(url: &str) -> Result<(), BrowseError> {
    let url = &cleaned(url);
    let shown = shorten(url, 200);
    if !url.contains(':') {
        return Err(failure(
            BrowseFailure::Invalid,
            format!("`{shown}` is not an address; give it whole, such as `https://example.com/`"),
        ));
    }
    if !is_allowed(url) || url.to_ascii_lowercase().starts_with("blob:") {
        return Err(failure(
            BrowseFailure::Navigation,
            format!("`{shown}` is not opened: only http, https, data and about:blank are"),
        ));
    }
    Ok(())
}

fn sentence(url: &str, text: &str) -> String {
    let shown = shorten(url, 200);
    match text {
        ABORTED => format!("`{shown}` shows no page: {text}"),
        _ => format!("`{shown}` could not be opened: {text}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// B01: addresses of files, of the browser's own pages and of scripts are refused.
    #[test]
    fn only_addresses_of_web_pages_are_opened() {
        for url in ["http://a.test/", "HTTPS://a.test", "about:blank", "data:text/html,x"] {
            assert!(check(url).is_ok(), "{url}");
        }
        for url in [
            "file:///etc/passwd",
            "FILE:///etc/passwd",
            "chrome://version",
            "devtools://devtools",
            "about:version",
            "",
            "javascript:alert(1)",
            "view-source:http://a.test/",
            "blob:http://a.test/1",
            "example.com",
            "java\nscript:alert(1)",
            "\u{1}fi\tle:///etc/passwd",
            " file:///etc/passwd",
            "filesystem:http://a.test/x",
            "about:srcdocx",
        ] {
            assert!(check(url).is_err(), "{url}");
        }
    }
}
