//! Reading a request's body: bounded by itself, by its time, and by the memory that its tenant may hold.

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
use crate::mcp::message::{self, Fault};

/// Bytes kept of a body that is too long, to find the id of its request.
const HEAD: usize = 4096;

/// The body of a request that is refused anyway is read and thrown away if it is no longer than this: the connection can go on.
const SHORT: u64 = 64 << 10;

/// How long a client may take to write one.
const LINGER: Duration = Duration::from_secs(2);

pub(super) struct Bodies {
    limit: usize,
    deadline: Duration,
}

impl Bodies {
    pub(super) fn new(limit: usize, deadline: Duration) -> Self {
        Self { limit, deadline }
    }

    /// The body; what it takes is added to `hold` as it arrives.
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
        // It grows with what has come and was counted; an announcement costs nothing.
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

    /// Of a body that has no length of its own, what was read of it is told.
    fn too_long(&self, length: usize, head: &[u8]) -> Response<Body> {
        closing(refuse(StatusCode::PAYLOAD_TOO_LARGE, &message::too_long(length, self.limit, head, &[])))
    }

    /// A refusal of a request whose body nobody wants.
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

/// Bytes of a body that are read before others get a turn. A client on the same machine writes as fast as the body is read, so
/// reading would otherwise not end before the body does.
const STRETCH: usize = 128 << 10;

/// There is no memory for a request.
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

/// What comes next on the connection is not known to be a request.
fn closing(mut response: Response<Body>) -> Response<Body> {
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}
