//! Mouse actions.

use std::time::Duration;

use proto::browser::{BrowseResult, MouseButton};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::{Act, ActResult, button_name};
use crate::cdp;
use crate::settle;
use crate::snapshot::{Element, Need, Point};

/// Maximum time until a frame notices the pointer. A page may keep the event from us, so the click follows anyway.
const REACH_WAIT: Duration = Duration::from_secs(2);
const LOOK_AGAIN: Duration = Duration::from_millis(20);

impl Act<'_> {
    pub(crate) async fn click(&mut self, at: &str, button: MouseButton, double: bool) -> ActResult {
        let (element, point) = self.ready(at, Need::Click).await?;
        self.reach(&element, point).await?;
        let moment = settle::moment(&self.page);
        let mut events = vec![mouse("mouseMoved", point, "none", 0)];
        for count in 1..=if double { 2 } else { 1 } {
            events.push(mouse("mousePressed", point, button_name(button), count));
            events.push(mouse("mouseReleased", point, button_name(button), count));
        }
        self.dispatch(events).await?;
        self.reader.hit(&self.page, &element).await?;
        settle::after(&self.page, moment).await;
        // The browser reports a download only when the host has answered. Until then, nothing in the page shows that
        // one was started.
        if !settle::is_changed(&self.page, moment)
            && self.reader.apply(&self.page, &element, SAVES, &[]).await.unwrap_or(false)
            && !settle::is_changed(&self.page, moment)
        {
            self.page.state.change(|state| state.downloads.expect(state.clock));
        }
        Ok(BrowseResult::Done)
    }

    pub(crate) async fn hover(&mut self, at: &str) -> ActResult {
        let (_, point) = self.ready(at, Need::Click).await?;
        let moment = settle::moment(&self.page);
        self.dispatch(vec![mouse("mouseMoved", point, "none", 0)]).await?;
        settle::after(&self.page, moment).await;
        Ok(BrowseResult::Done)
    }

    /// Moves the pointer to an element whose frame has a separate process, until that process notices the pointer. The
    /// browser knows the position of such a frame only some time after the frame has loaded. Until then, the document
    /// around the frame gets the events.
    async fn reach(&mut self, element: &Element, point: Point) -> Result<(), cdp::CdpError> {
        if *element.frame.session == *self.page.session {
            return Ok(());
        }
        let end = Instant::now() + REACH_WAIT.min(self.left());
        // A pointer that stays where it is causes no event.
        for shift in [0.0, 0.5].into_iter().cycle() {
            self.dispatch(vec![mouse("mouseMoved", Point { y: point.y + shift, ..point }, "none", 0)]).await?;
            if self.reader.has_felt_pointer(&self.page, element).await || Instant::now() >= end {
                break;
            }
            sleep(LOOK_AGAIN).await;
        }
        Ok(())
    }

    /// Sends all events at once, because the browser keeps their order. They go to the tab's first session, whichever
    /// frame is at the point.
    async fn dispatch(&self, events: Vec<Value>) -> Result<(), cdp::CdpError> {
        let session = Some(&*self.page.session);
        let sent: Vec<_> =
            events.into_iter().map(|event| self.page.cdp.send(session, "Input.dispatchMouseEvent", event)).collect();
        for one in sent {
            // The page may be gone by the second of two clicks.
            match one.read::<Value>().await {
                Ok(_) | Err(cdp::CdpError::Refused(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    pub(crate) async fn scroll(&mut self, at: Option<&str>, right: i32, down: i32) -> ActResult {
        let moment = settle::moment(&self.page);
        match at {
            Some(at) => {
                let (element, _) = self.ready(at, Need::Seen).await?;
                if (right, down) != (0, 0) {
                    let arguments = [right.into(), down.into()];
                    let _: Value = self.reader.apply(&self.page, &element, SCROLL, &arguments).await?;
                }
            }
            None => {
                let expression = format!("({SCROLL})(null, {right}, {down})");
                let _: Option<Value> = self.page.peek(&expression, self.left()).await;
            }
        }
        settle::after(&self.page, moment).await;
        Ok(BrowseResult::Done)
    }
}

/// Function that returns whether a click on the element saves a file.
const SAVES: &str = "element => !!element.closest?.('a[download]')";

/// Function that scrolls the innermost ancestor that can be scrolled in that direction, starting from the element or
/// from the element in the middle of the window.
const SCROLL: &str = include_str!("../js/scroll.js");

fn mouse(kind: &str, at: Point, button: &str, count: u32) -> Value {
    json!({ "type": kind, "x": at.x, "y": at.y, "button": button, "clickCount": count })
}
