//! Events on the wire, and the streams that carry them.

use std::convert::Infallible;
use std::future::Future;
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use futures_util::stream::unfold;
use http::{HeaderValue, Response, header};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// How soon a client should come back for the rest of a stream, in milliseconds.
const RETRY_MS: u32 = 1000;

/// Where the events of a stream come from.
pub(super) trait EventSource: Send + 'static {
    /// The next event as it goes over the wire; `None` when there are no more. Giving up the wait loses nothing.
    fn next(&mut self) -> impl Future<Output = Option<Bytes>> + Send;
}

/// One message. JSON has no line breaks in it.
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

/// Gives the client an id to come back with before there is anything to say.
pub(super) fn priming(id: &str) -> Bytes {
    format!("id: {id}\nretry: {RETRY_MS}\ndata: \n\n").into()
}

/// A response that goes on until the source has no more, or until `end`. Dropped when the client is gone.
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
            // A comment: proxies and idle deadlines see that the call lives.
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
