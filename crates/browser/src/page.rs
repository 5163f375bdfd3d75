//! One page, as those see it who read and move it: its frames, each with a world of our own in it, and calls into those.

use std::rc::Rc;
use std::time::Duration;

use proto::{BrowseError, BrowseFailure};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::cdp::{self, Cdp};
use crate::snapshot::{CallError, Frame, TabAccess};
use crate::state::{self, SharedState};

/// A tab's page. Cheap to clone; the tab may be gone.
#[derive(Clone)]
pub struct Page {
    pub cdp: Cdp,
    pub state: SharedState,
    /// The tab's number.
    pub tab: u32,
    /// Of the root frame.
    pub session: Rc<str>,
}

impl TabAccess for Page {
    fn frames(&self) -> Vec<Frame> {
        self.state.borrow().frames(self.tab)
    }

    async fn call(&self, session: &str, method: &str, params: Value) -> Result<Value, CallError> {
        self.cdp.call(Some(session), method, params).await.map_err(|error| match error {
            cdp::CdpError::Refused(message) => CallError::Refused(message),
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

pub fn failure(why: BrowseFailure, message: impl Into<String>) -> BrowseError {
    BrowseError { why, message: message.into() }
}

impl Page {
    /// A call to the page's own session.
    pub async fn ask<T: DeserializeOwned>(&self, method: &str, params: Value) -> Result<T, cdp::CdpError> {
        self.cdp.call(Some(&self.session), method, params).await
    }

    /// A look at the tab, while it is there.
    pub fn look<T>(&self, look: impl FnOnce(&state::TabState) -> T) -> Option<T> {
        self.state.borrow().tabs.get(&self.tab).map(look)
    }

    /// An expression in our world of the root frame; nothing if that is gone, or busy for longer than this.
    pub async fn peek<T: DeserializeOwned>(&self, expression: &str, patience: Duration) -> Option<T> {
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
        let evaluated: Evaluated = sent.within(patience).await.ok()?;
        serde_json::from_value(evaluated.result.value).ok()
    }
}
