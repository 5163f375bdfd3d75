//! Reads the body of a request within three bounds: a length, a deadline, and the memory of its tenant's calls.

use std::time::Duration;

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use engine::Hold;
use engine::memory::Full;
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use http_body_util::BodyExt;
use hyper::body::{Body as _, Incoming};
use serde_json::Value;
use tokio::time::timeout;

use super::{SERVER_ERROR, refuse, refused};
use crate::message::{self, Fault};

/// Number of bytes that are read of a body that is too long, in order to find the id of its request.
const HEAD: usize = 4096;

/// Maximum length of a body that is read and discarded when its request is refused, so that the connection can be
/// reused.
const SHORT: u64 = 64 << 10;

/// Maximum time for which the server waits for the body of a refused request.
const LINGER: Duration = Duration::from_secs(2);

pub(super) struct Bodies {
    limit: usize,
    deadline: Duration,
}

impl Bodies {
    pub(super) fn new(limit: usize, deadline: Duration) -> Self {
        Self { limit, deadline }
    }

    /// Reads the body and adds its bytes to `hold` as they arrive.
    pub(super) async fn read(&self, headers: &HeaderMap, body: Incoming, hold: &Hold) -> Result<Bytes, Response<Body>> {
        match timeout(self.deadline, self.collect(headers, body, hold)).await {
            Ok(result) => result,
            Err(_) => {
                let why = format!("the body was not complete within {} s", self.deadline.as_secs_f32());
                Err(closing(refused(StatusCode::REQUEST_TIMEOUT, why)))
            }
        }
    }

    async fn collect(&self, headers: &HeaderMap, mut body: Incoming, hold: &Hold) -> Result<Bytes, Response<Body>> {
        if headers.contains_key(header::TRANSFER_ENCODING) && headers.contains_key(header::CONTENT_LENGTH) {
            return Err(closing(refused(
                StatusCode::BAD_REQUEST,
                "Content-Length and Transfer-Encoding exclude each other",
            )));
        }
        let announced = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
        if announced > self.limit {
            return Err(self.too_long(announced, &[]));
        }
        // The buffer grows with bytes that have arrived and were counted; an announced length alone costs no memory.
        let mut whole = BytesMut::with_capacity(announced.min(AT_FIRST));
        let mut pause = STRETCH;
        while let Some(frame) = body.frame().await {
            let Ok(frame) = frame else {
                return Err(closing(refused(StatusCode::BAD_REQUEST, "the body broke off")));
            };
            let Ok(data) = frame.into_data() else { continue };
            let length = whole.len() + data.len();
            if length > self.limit {
                let head: Vec<u8> = whole.iter().chain(&data).take(HEAD).copied().collect();
                return Err(self.too_long(length, &head));
            }
            hold.add(data.len()).map_err(|full| closing(over(full)))?;
            whole.extend_from_slice(&data);
            if whole.len() >= pause {
                pause = whole.len() + STRETCH;
                tokio::task::yield_now().await;
            }
        }
        Ok(whole.freeze())
    }

    /// Returns the refusal of a body over the limit. `length` is the announced length, or the number of bytes read of a
    /// body without one.
    fn too_long(&self, length: usize, head: &[u8]) -> Response<Body> {
        closing(refuse(StatusCode::PAYLOAD_TOO_LARGE, &message::too_long(length, self.limit, head, &[])))
    }

    /// Returns `refusal` for a request whose body is not needed. The connection closes unless a short body was read to
    /// its end.
    pub(super) async fn unread(&self, mut body: Incoming, refusal: Response<Body>) -> Response<Body> {
        let short = body.size_hint().upper().is_some_and(|length| length <= SHORT);
        let rest = async { while let Some(Ok(_)) = body.frame().await {} };
        match short && timeout(LINGER, rest).await.is_ok() {
            true => refusal,
            false => closing(refusal),
        }
    }
}

const AT_FIRST: usize = 64 << 10;

/// Bytes of a body that are read before other tasks get a turn. A client on the same machine writes as fast as the body
/// is read, so reading would otherwise not pause before the end of the body.
const STRETCH: usize = 128 << 10;

/// Returns the refusal of a request for which there is no memory.
pub(super) fn over(full: Full) -> Response<Body> {
    match full {
        Full::Tenant(_) => later(StatusCode::TOO_MANY_REQUESTS, full.to_string()),
        Full::All => later(StatusCode::SERVICE_UNAVAILABLE, full.to_string()),
    }
}

pub(super) fn busy(why: &str) -> Response<Body> {
    later(StatusCode::SERVICE_UNAVAILABLE, why)
}

fn later(status: StatusCode, why: impl Into<String>) -> Response<Body> {
    let mut response = refuse(status, &Fault::new(Value::Null, SERVER_ERROR, why));
    response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    response
}

/// Marks the connection to be closed, because the bytes that follow on it may not be a request.
fn closing(mut response: Response<Body>) -> Response<Body> {
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}
