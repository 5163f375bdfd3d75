//! Actions that observe a page: screenshots, values, log lines, and waiting for a text.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use proto::browser::BrowseResult;
use proto::{BrowseError, BrowseFailure};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{Act, ActResult};
use crate::cdp;
use crate::events::Exception;
use crate::page::failure;
use crate::settle;
use crate::snapshot::Need;
use crate::state::shorten;

/// Maximum length of a side of a screenshot, in pixels.
const MAX_SIDE: f64 = 16_384.0;
/// Maximum length of a screenshot in base64. A larger one is taken again at a smaller scale.
const MAX_PICTURE: usize = 4 << 20;
const SMALLER: f64 = 0.6;
const MAX_TRIES: usize = 5;
/// Maximum length of a value as JSON, in characters.
const MAX_VALUE: usize = 200_000;
/// Beginning of the error for an expression with a top-level `await`. The error occurs before any of the expression
/// runs.
const AWAIT_AT_TOP: &str = "SyntaxError: await is only valid";
/// Minimum pause between two searches for a text. The pause is also at least twice as long as the last search took.
const SEARCH_PAUSE: Duration = Duration::from_millis(50);

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Metrics {
    css_visual_viewport: Viewport,
    css_content_size: Size,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Viewport {
    page_x: f64,
    page_y: f64,
    client_width: f64,
    client_height: f64,
}

#[derive(Deserialize)]
struct Size {
    width: f64,
    height: f64,
}

#[derive(Deserialize)]
struct Box {
    x: f64,
    y: f64,
    width: f64,
    height: f64,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Evaluated {
    result: Remote,
    exception_details: Option<Exception>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Remote {
    r#type: String,
    value: Option<Value>,
    unserializable_value: Option<String>,
}

impl Act<'_> {
    pub(crate) async fn screenshot(&mut self, at: Option<&str>, full_page: bool) -> ActResult {
        let element_box = match at {
            Some(at) => Some(self.box_of(at).await?),
            None => None,
        };
        let metrics: Metrics = self.page.ask("Page.getLayoutMetrics", json!({})).await?;
        let Metrics { css_visual_viewport: view, css_content_size: whole } = metrics;
        let asked = match element_box {
            Some(element_box) => Box { x: element_box.x + view.page_x, y: element_box.y + view.page_y, ..element_box },
            None if full_page => Box { x: 0.0, y: 0.0, width: whole.width, height: whole.height },
            None => Box { x: view.page_x, y: view.page_y, width: view.client_width, height: view.client_height },
        };
        let (width, height) = (asked.width.clamp(1.0, MAX_SIDE), asked.height.clamp(1.0, MAX_SIDE));
        let clipped = width < asked.width || height < asked.height;
        let beyond = full_page || at.is_some();
        let mut scale = 1.0;
        for _ in 0..MAX_TRIES {
            let clip = json!({ "x": asked.x, "y": asked.y, "width": width, "height": height, "scale": scale });
            let png = self.capture(clip, beyond).await;
            match png {
                Ok(png) if png.len() <= MAX_PICTURE => {
                    let (width, height) = size_of(&png).unwrap_or_default();
                    return Ok(BrowseResult::Screenshot { png, width, height, clipped: clipped || scale < 1.0 });
                }
                Ok(_) | Err(cdp::CdpError::TooLarge) => scale *= SMALLER,
                Err(error) => return Err(error.into()),
            }
        }
        Err(failure(BrowseFailure::Invalid, "the picture is too large, however small it is made"))
    }

    async fn capture(&self, clip: Value, beyond: bool) -> Result<String, cdp::CdpError> {
        #[derive(Deserialize)]
        struct Captured {
            data: String,
        }
        let params =
            json!({ "format": "png", "clip": clip, "captureBeyondViewport": beyond, "optimizeForSpeed": true });
        let captured: Captured = self.page.ask("Page.captureScreenshot", params).await?;
        Ok(captured.data)
    }

    /// Returns the position of an element in the window, in the coordinates of the root frame.
    async fn box_of(&mut self, at: &str) -> Result<Box, BrowseError> {
        let (element, point) = self.ready(at, Need::Seen).await?;
        if element.frame.parent.is_some() {
            let (x, y) = (point.x - point.width / 2.0, point.y - point.height / 2.0);
            return Ok(Box { x, y, width: point.width, height: point.height });
        }
        let rect = "element => element.getBoundingClientRect().toJSON()";
        self.reader.apply(&self.page, &element, rect, &[]).await
    }

    pub(crate) async fn evaluate(&mut self, expression: &str) -> ActResult {
        let mut evaluated = self.evaluate_in_page(expression).await?;
        if evaluated.result.r#type == "function" {
            // A client that passes a function wants the result of calling it.
            evaluated = self.evaluate_in_page(&format!("({expression})()")).await?;
        }
        if let Some(exception) = evaluated.exception_details {
            return Err(failure(BrowseFailure::Threw, shorten(&exception.sentence(), 2000)));
        }
        let Remote { value, unserializable_value, .. } = evaluated.result;
        let value = value.or(unserializable_value.map(Value::String)).unwrap_or_default();
        let json = value.to_string();
        let truncated = json.chars().nth(MAX_VALUE).is_some();
        let json = if truncated { json.chars().take(MAX_VALUE).collect() } else { json };
        Ok(BrowseResult::Value { json, truncated })
    }

    async fn evaluate_in_page(&self, expression: &str) -> Result<Evaluated, BrowseError> {
        let mut evaluated = self.evaluate_as(expression, false).await?;
        // Top-level `await` works in REPL mode only, which does not await a promise that is the result.
        let exception = evaluated.exception_details.take_if(|_| expression.contains("await"));
        match exception.map(Exception::sentence) {
            Some(text) if text.starts_with(AWAIT_AT_TOP) => self.evaluate_as(expression, true).await,
            Some(text) => Err(failure(BrowseFailure::Threw, shorten(&text, 2000))),
            None => Ok(evaluated),
        }
    }

    async fn evaluate_as(&self, expression: &str, await_at_top: bool) -> Result<Evaluated, BrowseError> {
        let params = json!({
            "expression": expression, "returnByValue": true, "awaitPromise": true, "userGesture": true,
            "replMode": await_at_top,
        });
        match self.page.ask("Runtime.evaluate", params).await {
            Err(cdp::CdpError::Refused(text)) => Err(failure(BrowseFailure::Threw, text)),
            Err(cdp::CdpError::TooLarge) => Err(failure(BrowseFailure::Threw, "the value is too large to be shown")),
            evaluated => Ok(evaluated?),
        }
    }

    pub(crate) async fn log(&self, max_lines: u32) -> BrowseResult {
        // Lines that the page has already written may still be on their way to the driver.
        settle::frame(&self.page).await;
        let (lines, dropped) = self.page.look(|tab| tab.log.last(max_lines as usize)).unwrap_or_default();
        let state = self.page.state.borrow();
        let lines = lines.into_iter().map(|line| state.workspace.shown_text(line)).collect();
        BrowseResult::Log { lines, dropped }
    }

    pub(crate) async fn wait_for(&mut self, text: &str, gone: bool) -> ActResult {
        let end = Instant::now() + self.left();
        loop {
            let begun = Instant::now();
            if self.reader.has_text(&self.page, text).await? != gone {
                return Ok(BrowseResult::Done);
            }
            if Instant::now() >= end {
                let state = if gone { "is still" } else { "is not" };
                let message = format!("`{}` {state} on the page", shorten(text, 200));
                return Err(failure(BrowseFailure::TimedOut, message));
            }
            tokio::time::sleep(SEARCH_PAUSE.max(begun.elapsed() * 2)).await;
        }
    }
}

/// Reads the width and the height from the first bytes of a PNG.
fn size_of(png: &str) -> Option<(u32, u32)> {
    let head = BASE64.decode(png.get(..32)?).ok()?;
    let number = |at: usize| head.get(at..)?.first_chunk().map(|bytes| u32::from_be_bytes(*bytes));
    Some((number(16)?, number(20)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_says_how_large_it_is() {
        let mut bytes = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR".to_vec();
        bytes.extend(1280u32.to_be_bytes());
        bytes.extend(800u32.to_be_bytes());
        assert_eq!(size_of(&BASE64.encode(&bytes)), Some((1280, 800)));
        assert_eq!(size_of("short"), None);
    }
}
