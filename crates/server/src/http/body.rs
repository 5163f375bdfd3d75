//! Reading a request's body: bounded by itself, by its time, and together with all others.

use std::time::Duration;

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use http_body_util::BodyExt;
use hyper::body::{Body as _, Incoming};
use serde_json::Value;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;

use super::{SERVER_ERROR, refuse, refused};
use crate::mcp::message::{self, Fault};

/// Room is counted in pages.
const PAGE: usize = 4096;

/// Of each body, what takes no room that others could need. However large the bodies of some are, small ones get in.
const FREE: usize = 64 << 10;

/// Bytes kept of a body that is too long, to find the id of its request.
const HEAD: usize = 4096;

/// How long a client may go on writing a body that nobody wants.
const LINGER: Duration = Duration::from_secs(2);

/// How much more than the limit is read and thrown away: a client that is still writing does not see our answer.
const DRAIN: usize = 4;

pub(super) struct Bodies {
    limit: usize,
    deadline: Duration,
    room: Semaphore,
}

impl Bodies {
    pub(super) fn new(limit: usize, deadline: Duration, together: usize) -> Self {
        Self { limit, deadline, room: Semaphore::new(together.div_ceil(PAGE)) }
    }

    pub(super) async fn read(&self, headers: &HeaderMap, body: Incoming) -> Result<Bytes, Response<Body>> {
        match timeout(self.deadline, self.collect(headers, body)).await {
            Ok(result) => result,
            Err(_) => {
                let why = format!("the body was not complete within {} s", self.deadline.as_secs_f32());
                Err(closing(refused(StatusCode::REQUEST_TIMEOUT, why)))
            }
        }
    }

    async fn collect(&self, headers: &HeaderMap, mut body: Incoming) -> Result<Bytes, Response<Body>> {
        if headers.contains_key(header::TRANSFER_ENCODING) && headers.contains_key(header::CONTENT_LENGTH) {
            return Err(closing(refused(
                StatusCode::BAD_REQUEST,
                "Content-Length and Transfer-Encoding exclude each other",
            )));
        }
        let mut whole = BytesMut::new();
        let mut room: Option<SemaphorePermit<'_>> = None;
        let mut length = 0;
        while let Some(frame) = body.frame().await {
            let Ok(frame) = frame else {
                return Err(closing(refused(StatusCode::BAD_REQUEST, "the body broke off")));
            };
            let Ok(data) = frame.into_data() else { continue };
            length += data.len();
            if length > self.limit {
                return Err(self.too_long(length, &whole, &data, body).await);
            }
            let pages = length.saturating_sub(FREE).div_ceil(PAGE);
            let held = room.as_ref().map_or(0, SemaphorePermit::num_permits);
            if pages > held {
                let Ok(more) = self.room.try_acquire_many((pages - held) as u32) else {
                    drop((whole, room));
                    self.drain(length, &mut body).await;
                    return Err(closing(busy("too many large requests at once; retry later")));
                };
                match &mut room {
                    None => room = Some(more),
                    Some(room) => room.merge(more),
                }
            }
            whole.extend_from_slice(&data);
        }
        Ok(whole.freeze())
    }

    async fn too_long(&self, length: usize, whole: &[u8], data: &[u8], mut body: Incoming) -> Response<Body> {
        let head: Vec<u8> = whole.iter().chain(data).take(HEAD).copied().collect();
        let length = self.drain(length, &mut body).await;
        closing(refuse(StatusCode::PAYLOAD_TOO_LARGE, &message::too_long(length, self.limit, &head, &[])))
    }

    /// Reads what is left and keeps none of it. How long the body is, as far as it was read.
    async fn drain(&self, mut length: usize, body: &mut Incoming) -> usize {
        while length < self.limit.saturating_mul(DRAIN) && !body.is_end_stream() {
            match body.frame().await {
                Some(Ok(frame)) => length += frame.data_ref().map_or(0, Bytes::len),
                _ => break,
            }
        }
        length
    }

    /// The body of a request that is refused anyway: a client that still writes would see a broken connection, not the refusal.
    pub(super) async fn unwanted(&self, mut body: Incoming) {
        let _ = timeout(LINGER, self.drain(0, &mut body)).await;
    }
}

pub(super) fn busy(why: &str) -> Response<Body> {
    let mut response = refuse(StatusCode::SERVICE_UNAVAILABLE, &Fault::new(Value::Null, SERVER_ERROR, why));
    response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    response
}

/// What comes next on the connection is not known to be a request.
fn closing(mut response: Response<Body>) -> Response<Body> {
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}
