//! Tabs. Browser actions apply to the tab that is shown.

use std::time::Duration;

use proto::BrowseFailure;
use proto::browser::{BrowseResult, TabAsk, TabInfo};
use serde::Deserialize;
use serde_json::json;

use super::{Act, ActResult, navigate};
use crate::cdp::{self, Cdp};
use crate::page::{Page, failure};
use crate::state::{BrowserState, MAX_TABS, SharedState};

/// Timeout for creating or closing a tab.
const TAB_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Created {
    target_id: String,
}

/// Creates a tab with a blank page, and shows it.
pub(crate) async fn create(cdp: &Cdp, state: &SharedState) -> Result<Page, cdp::CdpError> {
    state.change(|state| state.creating = true);
    let created =
        cdp.send(None, "Target.createTarget", json!({ "url": "about:blank" })).within::<Created>(TAB_TIMEOUT).await;
    let ready_tab = match created {
        Ok(Created { target_id }) => {
            let ready = |state: &BrowserState| {
                let (&number, tab) = state.tabs.iter().find(|(_, tab)| *tab.target == *target_id)?;
                let has_world = tab.frames.values().any(|frame| frame.world.is_some());
                has_world.then(|| (number, tab.session.clone()))
            };
            tokio::time::timeout(TAB_TIMEOUT, state.wait(ready)).await.map_err(|_| cdp::CdpError::TimedOut)
        }
        Err(error) => Err(error),
    };
    state.change(|state| state.creating = false);
    let (tab, session) = ready_tab?;
    state.change(|state| {
        state.shown = tab;
        let Some(ours) = state.tabs.get_mut(&tab) else { return };
        (ours.is_popup, ours.is_unreported) = (false, false);
    });
    Ok(Page { cdp: cdp.clone(), state: state.clone(), tab, session })
}

impl Act<'_> {
    pub(crate) async fn tab(&mut self, ask: &TabAsk) -> ActResult {
        match ask {
            TabAsk::List => {}
            TabAsk::New { url } => {
                if self.page.state.borrow().tabs.len() >= MAX_TABS {
                    let message = format!("there are `{MAX_TABS}` tabs already; close one");
                    return Err(failure(BrowseFailure::Invalid, message));
                }
                url.as_deref().map_or(Ok(()), navigate::check)?;
                self.page = create(&self.page.cdp, &self.page.state).await?;
                if let Some(url) = url {
                    self.open(url).await?;
                }
            }
            TabAsk::Select { tab } => {
                let session = self.session_of(*tab)?;
                self.page.state.change(|state| state.shown = *tab);
                self.page.cdp.tell(Some(&session), "Page.bringToFront", json!({}));
            }
            TabAsk::Close { tab } => self.close(*tab).await?,
        }
        Ok(BrowseResult::Tabs { tabs: list(&self.page.state.borrow()) })
    }

    fn session_of(&self, tab: u32) -> Result<std::rc::Rc<str>, proto::BrowseError> {
        let state = self.page.state.borrow();
        let known = state.tabs.get(&tab).map(|tab| tab.session.clone());
        known.ok_or_else(|| failure(BrowseFailure::Invalid, format!("there is no tab `{tab}`")))
    }

    async fn close(&mut self, tab: u32) -> Result<(), proto::BrowseError> {
        self.session_of(tab)?;
        let state = self.page.state.clone();
        let target = state.borrow().tabs.get(&tab).map(|tab| tab.target.to_string());
        self.page.cdp.tell(None, "Target.closeTarget", json!({ "targetId": target }));
        let closed = state.wait(|state| (!state.tabs.contains_key(&tab)).then_some(()));
        if tokio::time::timeout(TAB_TIMEOUT, closed).await.is_err() {
            return Err(failure(BrowseFailure::NotReady, format!("tab `{tab}` does not close")));
        }
        if state.borrow().tabs.is_empty() {
            self.page = create(&self.page.cdp, &state).await?;
        }
        Ok(())
    }
}

fn list(state: &BrowserState) -> Vec<TabInfo> {
    let shown = state.shown();
    let tab = |(&tab, known): (&u32, &crate::state::TabState)| TabInfo {
        tab,
        url: state.workspace.shown(known.url.clone()),
        title: known.title.clone(),
        shown: Some(tab) == shown,
    };
    state.tabs.iter().map(tab).collect()
}
