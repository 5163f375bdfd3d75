//! Access to one page: its frames, each with our isolated world, and calls into them.

use std::rc::Rc;
use std::time::Duration;

use proto::{BrowseError, BrowseFailure};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::cdp::{self, Cdp};
use crate::snapshot::{CallError, Frame, TabAccess};
use crate::state::{self, SharedState};

/// The page of a tab. It is cheap to clone, and the tab may already be closed.
#[derive(Clone)]
pub(crate) struct Page {
    pub cdp: Cdp,
    pub state: SharedState,
    /// Number of the tab that has the page.
    pub tab: u32,
    /// DevTools session of the root frame.
    pub session: Rc<str>,
}

impl TabAccess for Page {
    fn frames(&self) -> Vec<Frame> {
        self.state.borrow().frames(self.tab)
    }

    async fn call(&self, session: &str, method: &str, params: Value) -> Result<Value, CallError> {
        self.cdp.call(Some(session), method, params).await.map_err(|error| match error {
            cdp::CdpError::Refused(_) => CallError::Refused,
            error => CallError::Failed(error.into()),
        })
    }
}

impl From<cdp::CdpError> for BrowseError {
    fn from(error: cdp::CdpError) -> Self {
        let why = match error {
            cdp::CdpError::Gone | cdp::CdpError::TimedOut | cdp::CdpError::Unreadable(_) => BrowseFailure::NoBrowser,
            cdp::CdpError::TooLarge => BrowseFailure::Invalid,
            cdp::CdpError::Refused(_) => BrowseFailure::NotReady,
        };
        Self { why, message: error.to_string() }
    }
}

pub(crate) fn failure(why: BrowseFailure, message: impl Into<String>) -> BrowseError {
    BrowseError { why, message: message.into() }
}

impl Page {
    /// Calls a method in the page's own DevTools session.
    pub(crate) async fn ask<T: DeserializeOwned>(&self, method: &str, params: Value) -> Result<T, cdp::CdpError> {
        self.cdp.call(Some(&self.session), method, params).await
    }

    /// Reads the state of the tab. Returns `None` if the tab is closed.
    pub(crate) fn look<T>(&self, look: impl FnOnce(&state::TabState) -> T) -> Option<T> {
        self.state.borrow().tabs.get(&self.tab).map(look)
    }

    /// Evaluates an expression in our isolated world of the root frame. Returns `None` if the isolated world is gone,
    /// or does not answer within `timeout`.
    pub(crate) async fn peek<T: DeserializeOwned>(&self, expression: &str, timeout: Duration) -> Option<T> {
        #[derive(Deserialize)]
        struct Evaluated {
            result: Remote,
        }
        #[derive(Deserialize)]
        struct Remote {
            value: Value,
        }
        let root = self.frames().into_iter().find(|frame| frame.parent.is_none())?;
        let params = json!({
            "expression": expression, "uniqueContextId": root.world, "returnByValue": true, "awaitPromise": true,
        });
        let sent = self.cdp.send(Some(&root.session), "Runtime.evaluate", params);
        let evaluated: Evaluated = sent.within(timeout).await.ok()?;
        serde_json::from_value(evaluated.result.value).ok()
    }
}
