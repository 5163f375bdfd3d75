//! Server-sent events and the streams that carry them.

use std::convert::Infallible;
use std::future::Future;
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use futures_util::stream::unfold;
use http::{HeaderValue, Response, header};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// Time in milliseconds after which a client should reconnect for the rest of a stream.
const RETRY_MS: u32 = 1000;

/// The source of a stream's events.
pub(super) trait EventSource: Send + 'static {
    /// Returns the next event as it goes over the wire, or `None` when there are no more. The future is cancel safe.
    fn next(&mut self) -> impl Future<Output = Option<Bytes>> + Send;
}

/// Encodes one message as an event. JSON contains no line breaks, so one `data` line is enough.
pub(super) fn event(id: Option<&str>, message: &[u8]) -> Vec<u8> {
    let mut event = Vec::with_capacity(message.len() + 64);
    if let Some(id) = id {
        event.extend_from_slice(b"id: ");
        event.extend_from_slice(id.as_bytes());
        event.push(b'\n');
    }
    event.extend_from_slice(b"data: ");
    event.extend_from_slice(message);
    event.extend_from_slice(b"\n\n");
    event
}

/// Encodes an event that gives the client an id to resume with before there is any message.
pub(super) fn priming(id: &str) -> Bytes {
    format!("id: {id}\nretry: {RETRY_MS}\ndata: \n\n").into()
}

/// Returns a response that lasts until the source has no more events or `end` is cancelled. The source is dropped when
/// the client has disconnected.
pub(super) fn response<S: EventSource>(source: S, keep_alive: Duration, end: CancellationToken) -> Response<Body> {
    let events = unfold((source, end), move |(mut source, end)| async move {
        let next = tokio::select! {
            biased;
            next = timeout(keep_alive, source.next()) => next,
            () = end.cancelled() => Ok(None),
        };
        match next {
            Ok(Some(event)) => Some((Ok::<_, Infallible>(event), (source, end))),
            Ok(None) => None,
            // A comment shows proxies and idle deadlines that the call is still running.
            Err(_) => Some((Ok(Bytes::from_static(b": alive\n\n")), (source, end))),
        }
    });
    let mut response = Response::new(Body::from_stream(events));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache, no-transform"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}
