//! A DevTools client over Chromium's pipe. Messages are JSON, each terminated by a NUL byte. Calls are pipelined, and
//! events are passed to one function.
//!
//! This module knows nothing about pages. A page may have written what arrives here, so a message is buffered only up
//! to [`MAX_MESSAGE`].

use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::pipe;
use tokio::sync::{mpsc, oneshot};

/// Maximum length of a message. The rest of a longer one is discarded as it arrives, and the call that waits for it
/// fails.
const MAX_MESSAGE: usize = 64 << 20;
const READ: usize = 64 << 10;

#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum CdpError {
    #[error("the browser is gone")]
    Gone,
    #[error("the browser's answer is too large")]
    TooLarge,
    #[error("the browser does not answer")]
    TimedOut,
    #[error("{0}")]
    Refused(String),
    #[error("the browser's answer cannot be read: {0}")]
    Unreadable(String),
}

/// A message that the browser sends without being asked.
pub(crate) struct Event<'a> {
    pub session: Option<&'a str>,
    pub method: &'a str,
    params: &'a RawValue,
}

impl<'a> Event<'a> {
    /// Parses the parameters. Returns `None` if they do not have the expected form, because an event that cannot be
    /// read is no reason to stop.
    pub(crate) fn params<T: Deserialize<'a>>(&self) -> Option<T> {
        serde_json::from_str(self.params.get()).ok()
    }
}

type CdpResult = Result<Box<RawValue>, CdpError>;

/// A connection to the browser. Clones share the same connection.
#[derive(Clone)]
pub(crate) struct Cdp(Rc<Inner>);

struct Inner {
    next: Cell<u64>,
    waiting: RefCell<HashMap<u64, oneshot::Sender<CdpResult>>>,
    out: mpsc::UnboundedSender<Vec<u8>>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct CdpRequest<'a, P> {
    id: u64,
    method: &'a str,
    params: P,
    #[serde(skip_serializing_if = "Option::is_none")]
    session_id: Option<&'a str>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct CdpMessage<'a> {
    id: Option<u64>,
    #[serde(borrow)]
    result: Option<&'a RawValue>,
    error: Option<CdpErrorBody>,
    #[serde(borrow)]
    method: Option<Cow<'a, str>>,
    #[serde(borrow)]
    params: Option<&'a RawValue>,
    #[serde(borrow)]
    session_id: Option<Cow<'a, str>>,
}

#[derive(Deserialize)]
struct CdpErrorBody {
    message: String,
}

impl Cdp {
    /// Creates a client. Nothing is sent unless the returned future runs.
    pub(crate) fn new(to_browser: pipe::Sender) -> (Self, impl Future<Output = ()>) {
        let (out, queue) = mpsc::unbounded_channel();
        let inner = Inner { next: Cell::new(1), waiting: RefCell::default(), out };
        (Self(Rc::new(inner)), write(to_browser, queue))
    }

    /// Sends a request immediately. The answer can be awaited later, or not at all.
    pub(crate) fn send(&self, session: Option<&str>, method: &str, params: impl Serialize) -> Pending {
        let id = self.0.next.replace(self.0.next.get() + 1);
        let (answer, receiver) = oneshot::channel();
        let sent =
            serde_json::to_vec(&CdpRequest { id, method, params, session_id: session }).is_ok_and(|mut bytes| {
                bytes.push(0);
                self.0.out.send(bytes).is_ok()
            });
        if sent {
            self.0.waiting.borrow_mut().insert(id, answer);
        }
        Pending { id, receiver, cdp: self.clone() }
    }

    /// Sends a request and ignores the answer.
    pub(crate) fn tell(&self, session: Option<&str>, method: &str, params: impl Serialize) {
        drop(self.send(session, method, params));
    }

    pub(crate) async fn call<T: DeserializeOwned>(
        &self,
        session: Option<&str>,
        method: &str,
        params: impl Serialize,
    ) -> Result<T, CdpError> {
        self.send(session, method, params).read().await
    }

    /// Reads until the browser closes its end. After that, every call fails.
    pub(crate) async fn pump(&self, mut from_browser: pipe::Receiver, mut event: impl FnMut(Event<'_>)) {
        let mut splitter = Splitter::new(MAX_MESSAGE);
        loop {
            match from_browser.read_buf(splitter.room()).await {
                Ok(0) | Err(_) => break,
                Ok(_) => splitter.drain(|piece| match piece {
                    Piece::Message(bytes) => self.dispatch(bytes, &mut event),
                    Piece::TooLarge(beginning) => self.too_large(beginning),
                }),
            }
        }
        // Dropping the senders makes all pending calls fail.
        self.0.waiting.borrow_mut().clear();
    }

    fn dispatch(&self, bytes: &[u8], event: &mut impl FnMut(Event<'_>)) {
        let Ok(message) = serde_json::from_slice::<CdpMessage<'_>>(bytes) else { return };
        if let Some(id) = message.id {
            let answer = match (message.result, message.error) {
                (Some(result), None) => Ok(result.to_owned()),
                (_, Some(refusal)) => Err(CdpError::Refused(refusal.message)),
                (None, None) => Err(CdpError::Unreadable("neither result nor error".into())),
            };
            self.answer(id, answer);
        } else if let (Some(method), Some(params)) = (&message.method, message.params) {
            event(Event { session: message.session_id.as_deref(), method, params });
        }
    }

    /// Fails the call that an oversized answer belongs to. An answer begins with the number of its call.
    fn too_large(&self, beginning: &[u8]) {
        let digits = beginning.strip_prefix(br#"{"id":"#).unwrap_or_default().split(|byte| *byte == b',').next();
        let id = digits.and_then(|digits| std::str::from_utf8(digits).ok()).and_then(|digits| digits.parse().ok());
        if let Some(id) = id {
            self.answer(id, Err(CdpError::TooLarge));
        }
    }

    fn answer(&self, id: u64, answer: CdpResult) {
        let waiting = self.0.waiting.borrow_mut().remove(&id);
        if let Some(waiting) = waiting {
            // The call may have been dropped, in which case no one needs the answer.
            let _ = waiting.send(answer);
        }
    }
}

async fn write(mut to_browser: pipe::Sender, mut queue: mpsc::UnboundedReceiver<Vec<u8>>) {
    while let Some(bytes) = queue.recv().await {
        if to_browser.write_all(&bytes).await.is_err() {
            return;
        }
    }
}

/// A call that has not been answered yet.
pub(crate) struct Pending {
    id: u64,
    receiver: oneshot::Receiver<CdpResult>,
    cdp: Cdp,
}

impl Pending {
    pub(crate) async fn read<T: DeserializeOwned>(self) -> Result<T, CdpError> {
        let answer = self.await?;
        serde_json::from_str(answer.get()).map_err(|error| CdpError::Unreadable(error.to_string()))
    }

    pub(crate) async fn within<T: DeserializeOwned>(self, time: Duration) -> Result<T, CdpError> {
        tokio::time::timeout(time, self.read()).await.unwrap_or(Err(CdpError::TimedOut))
    }
}

impl Future for Pending {
    type Output = CdpResult;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<CdpResult> {
        Pin::new(&mut self.receiver).poll(context).map(|answer| answer.unwrap_or(Err(CdpError::Gone)))
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.cdp.0.waiting.borrow_mut().remove(&self.id);
    }
}

/// Splits a stream of bytes at the NULs, however the bytes arrive. It examines each byte once.
struct Splitter {
    buffer: Vec<u8>,
    searched: usize,
    limit: usize,
    /// True in the middle of a message that exceeds the limit.
    skipping: bool,
}

enum Piece<'a> {
    Message(&'a [u8]),
    /// The beginning of a message that was discarded.
    TooLarge(&'a [u8]),
}

impl Splitter {
    fn new(limit: usize) -> Self {
        Self { buffer: Vec::with_capacity(READ), searched: 0, limit, skipping: false }
    }

    /// Returns the buffer to append new bytes to.
    fn room(&mut self) -> &mut Vec<u8> {
        self.buffer.reserve(READ);
        &mut self.buffer
    }

    fn drain(&mut self, mut piece: impl FnMut(Piece<'_>)) {
        let mut start = 0;
        while let Some(length) = self.buffer[self.searched..].iter().position(|byte| *byte == 0) {
            let end = self.searched + length;
            if !std::mem::take(&mut self.skipping) {
                piece(Piece::Message(&self.buffer[start..end]));
            }
            start = end + 1;
            self.searched = start;
        }
        self.buffer.drain(..start);
        if self.skipping {
            self.buffer.clear();
        } else if self.buffer.len() > self.limit {
            piece(Piece::TooLarge(&self.buffer[..64.min(self.buffer.len())]));
            self.skipping = true;
            self.buffer.clear();
        }
        if self.buffer.is_empty() {
            self.buffer.shrink_to(READ);
        }
        self.searched = self.buffer.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(splitter: &mut Splitter, bytes: &[u8]) -> Vec<String> {
        let mut pieces = Vec::new();
        splitter.room().extend_from_slice(bytes);
        splitter.drain(|piece| {
            pieces.push(match piece {
                Piece::Message(bytes) => String::from_utf8_lossy(bytes).into_owned(),
                Piece::TooLarge(bytes) => format!("too large: {}", String::from_utf8_lossy(bytes)),
            });
        });
        pieces
    }

    #[test]
    fn messages_are_found_however_they_are_cut() {
        let mut splitter = Splitter::new(100);
        assert_eq!(pieces(&mut splitter, b"one\0two\0th"), ["one", "two"]);
        assert_eq!(pieces(&mut splitter, b"r"), [""; 0]);
        assert_eq!(pieces(&mut splitter, b"ee\0"), ["three"]);
    }

    #[test]
    fn of_a_message_over_the_limit_nothing_is_kept_and_the_next_is_read() {
        let mut splitter = Splitter::new(10);
        assert_eq!(pieces(&mut splitter, br#"{"id":7,"result"#), [r#"too large: {"id":7,"result"#]);
        assert_eq!(pieces(&mut splitter, &[b'x'; 1000]), [""; 0]);
        assert!(splitter.buffer.is_empty());
        assert_eq!(pieces(&mut splitter, b"xx\0next\0"), ["next"]);
    }
}
