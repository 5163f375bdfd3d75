//! Receives files by links for uploads: `GET /upload/<id>` shows a form, `PUT` and the form's `POST` send the file.
//!
//! The id is the permission, so no token is needed. The file goes to the guest as it arrives. Looking at the form does
//! not use the link, because programs that preview links do so too.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::routing::any;
use dialects::links::upload_id;
use engine::{Engine, EngineError, UploadOffer, UploadRefusal};
use http::header::{self, HeaderName, HeaderValue};
use http::request::Parts;
use http::{Method, Response, StatusCode};
use http_body_util::BodyExt;
use mcp::http::Peer;
use telemetry::transfer::{Direction, Transfer};
use tokio::time::timeout;

use super::Settings;
use super::limit::{Permits, TransferLimits};
use super::multipart::FormFile;

/// Maximum time of one upload.
const UPLOAD_TIME: Duration = Duration::from_secs(30 * 60);
/// Maximum time in which no byte of an upload arrives.
const STALL_TIME: Duration = Duration::from_secs(60);
/// Maximum number of bytes of a form in addition to the file.
const FORM_OVERHEAD: u64 = 64 << 10;
/// Maximum numbers of uploads at once. A link allows one upload in any case.
const LIMITS: TransferLimits = TransferLimits { per_key: 1, per_owner: 8, total: 64 };

/// Headers of every answer. The page loads nothing, runs nothing, is shown in no frame, and its form can be sent only to
/// this server. The form's `Origin` would be `null` with a stricter referrer policy.
const SAFE: [(HeaderName, &str); 5] = [
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    ),
    (header::REFERRER_POLICY, "same-origin"),
    (header::CACHE_CONTROL, "no-store"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
];

pub(super) fn router(engine: Engine, settings: Settings) -> Router {
    let uploads = Arc::new(Uploads { engine, settings, permits: Permits::new(LIMITS) });
    let answer = any(move |request: http::Request<Body>| {
        let uploads = uploads.clone();
        async move { uploads.answer(request).await }
    });
    Router::new().route("/upload/{*rest}", answer)
}

struct Uploads {
    engine: Engine,
    settings: Settings,
    permits: Permits,
}

/// The reason why the server refuses a request to an upload link, or could not store the file.
#[derive(Debug, thiserror::Error)]
pub(super) enum UploadFailure {
    #[error("send the file with PUT, or with the form")]
    Method,
    #[error("there is no such upload link")]
    NotFound,
    #[error("this link was used; ask for a new one")]
    Used,
    #[error("this link has expired; ask for a new one")]
    Expired,
    #[error("another upload by this link is under way")]
    InUse,
    #[error("the sandbox of this link is gone; ask for a new link")]
    Gone,
    #[error("the request comes from a page of another site")]
    Foreign,
    #[error("send the whole file as it is, without Content-Range and Content-Encoding")]
    Partial,
    #[error("{0}")]
    Form(&'static str),
    #[error("the file is larger than {0} bytes")]
    TooLarge(u64),
    #[error("no space is left in the sandbox, whose disk has {} MB", .0 >> 20)]
    NoSpace(u64),
    #[error("no space is left on the server's disk")]
    HostDiskFull,
    #[error("the file cannot be stored under this name: {0}")]
    Name(String),
    #[error("the upload took too long")]
    Slow,
    #[error("the upload broke off")]
    Broken,
    #[error("too many uploads at once; try again")]
    Busy,
    #[error("the file could not be stored")]
    Failed,
}

impl UploadFailure {
    fn status(&self) -> StatusCode {
        match self {
            Self::Method => StatusCode::METHOD_NOT_ALLOWED,
            Self::NotFound => StatusCode::NOT_FOUND,
            Self::Used | Self::Expired | Self::Gone => StatusCode::GONE,
            Self::InUse => StatusCode::CONFLICT,
            Self::Foreign => StatusCode::FORBIDDEN,
            Self::Partial | Self::Form(_) | Self::Broken => StatusCode::BAD_REQUEST,
            Self::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::NoSpace(_) | Self::HostDiskFull => StatusCode::INSUFFICIENT_STORAGE,
            Self::Name(_) => StatusCode::UNPROCESSABLE_ENTITY,
            Self::Slow => StatusCode::REQUEST_TIMEOUT,
            Self::Busy => StatusCode::SERVICE_UNAVAILABLE,
            Self::Failed => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

impl From<UploadRefusal> for UploadFailure {
    fn from(refusal: UploadRefusal) -> Self {
        match refusal {
            UploadRefusal::Unknown => Self::NotFound,
            UploadRefusal::Used => Self::Used,
            UploadRefusal::Expired => Self::Expired,
            UploadRefusal::InUse => Self::InUse,
            UploadRefusal::Failed(EngineError::FileNotFound(_)) => Self::Gone,
            UploadRefusal::Failed(error) => error.into(),
        }
    }
}

impl From<EngineError> for UploadFailure {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::ContextNotFound(_) => Self::Gone,
            EngineError::FileTooLarge { limit, .. } => Self::TooLarge(limit),
            EngineError::NoSpace { disk_bytes } => Self::NoSpace(disk_bytes),
            EngineError::HostDiskFull(_) => Self::HostDiskFull,
            EngineError::InvalidPath { why, .. } => Self::Name(why),
            EngineError::ShuttingDown => Self::Busy,
            other => {
                tracing::warn!(error = %other, "an upload failed");
                Self::Failed
            }
        }
    }
}

/// The body of a request, which may not pause for long. Its bytes are counted as they arrive.
pub(super) struct Incoming(Body, Arc<Transfer>);

impl Incoming {
    pub(super) fn new(body: Body, transfer: Arc<Transfer>) -> Self {
        Self(body, transfer)
    }

    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, UploadFailure> {
        loop {
            let frame = timeout(STALL_TIME, self.0.frame()).await.map_err(|_| UploadFailure::Slow)?;
            let Some(frame) = frame.transpose().map_err(|_| UploadFailure::Broken)? else { return Ok(None) };
            if let Ok(data) = frame.into_data() {
                self.1.add(data.len() as u64);
                return Ok(Some(data));
            }
        }
    }
}

enum Content {
    Plain(Incoming),
    Form(FormFile),
}

impl Content {
    async fn next(&mut self) -> Result<Option<Bytes>, UploadFailure> {
        match self {
            Self::Plain(body) => body.next().await,
            Self::Form(file) => file.next().await,
        }
    }
}

impl Uploads {
    async fn answer(&self, request: http::Request<Body>) -> Response<Body> {
        let (parts, body) = request.into_parts();
        let html = accepts_html(&parts);
        let served = self.serve(&parts, body).await;
        served.unwrap_or_else(|failure| {
            let text = failure.to_string();
            let mut response = match html {
                true => page(failure.status(), "The file was not uploaded", &format!("<p>{}.</p>\n", escaped(&text))),
                false => plain(failure.status(), format!("{text}\n")),
            };
            if matches!(failure, UploadFailure::Method) {
                response.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET, HEAD, PUT, POST"));
            }
            // The client may still be sending; see the transport about the end of such connections.
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            response
        })
    }

    async fn serve(&self, parts: &Parts, body: Body) -> Result<Response<Body>, UploadFailure> {
        let id = upload_id(parts.uri.path()).filter(|_| parts.uri.query().is_none()).ok_or(UploadFailure::NotFound)?;
        let is_form = match parts.method {
            Method::GET | Method::HEAD => return Ok(form(&self.engine.upload_offer(id)?)),
            Method::PUT => false,
            Method::POST => true,
            _ => return Err(UploadFailure::Method),
        };
        check_origin(parts)?;
        let offer = self.engine.upload_offer(id)?;
        if parts.headers.contains_key(header::CONTENT_RANGE) || parts.headers.contains_key(header::CONTENT_ENCODING) {
            return Err(UploadFailure::Partial);
        }
        let announced = http_body_length(&body);
        let overhead = if is_form { FORM_OVERHEAD } else { 0 };
        if announced > offer.max_bytes.saturating_add(overhead) {
            return Err(UploadFailure::TooLarge(offer.max_bytes));
        }
        let _permit = self.permits.take(id, &offer.owner).ok_or(UploadFailure::Busy)?;
        let peer = parts.extensions.get::<Peer>().map(|peer| peer.0);
        let transfer = Arc::new(Transfer::begin(&self.settings.observer, Direction::Upload, &offer.key, peer));
        let storing = async {
            let body = Incoming::new(body, transfer.clone());
            let content = match is_form {
                true => Content::Form(FormFile::open(parts.headers.get(header::CONTENT_TYPE), body).await?),
                false => Content::Plain(body),
            };
            self.store(id, content).await
        };
        let size = timeout(UPLOAD_TIME, storing).await.map_err(|_| UploadFailure::Slow)??;
        transfer.complete();
        let text = format!("{size} bytes are stored as /workspace/{}", offer.path);
        Ok(match accepts_html(parts) {
            true => page(StatusCode::CREATED, "The file was uploaded", &format!("<p>{}.</p>\n", escaped(&text))),
            false => plain(StatusCode::CREATED, format!("{text}\n")),
        })
    }

    /// Sends the content to the guest. If this is dropped or fails, nothing of the file remains.
    async fn store(&self, id: &str, mut content: Content) -> Result<u64, UploadFailure> {
        let mut upload = self.engine.begin_upload(id).await?;
        let context_gone = upload.context_gone();
        let sending = async {
            while let Some(bytes) = content.next().await? {
                timeout(STALL_TIME, upload.send(&bytes)).await.map_err(|_| UploadFailure::Slow)??;
            }
            Ok::<_, UploadFailure>(())
        };
        tokio::select! {
            sent = sending => sent?,
            gone = context_gone => return Err(gone.into()),
        }
        Ok(upload.finish().await?)
    }
}

fn http_body_length(body: &Body) -> u64 {
    use axum::body::HttpBody as _;
    body.size_hint().lower()
}

/// Refuses what a page of another site makes a browser send. The transport has checked that the host is this server's.
fn check_origin(parts: &Parts) -> Result<(), UploadFailure> {
    let text = |name| parts.headers.get(name).map(|value: &HeaderValue| value.to_str().unwrap_or_default());
    let foreign = match (text(header::ORIGIN), text(header::HOST)) {
        (None, _) => false,
        (Some(origin), Some(host)) => origin.split_once("://").is_none_or(|(_, name)| !name.eq_ignore_ascii_case(host)),
        (Some(_), None) => true,
    };
    let site = parts.headers.get("sec-fetch-site").map(HeaderValue::as_bytes);
    let foreign = foreign || site.is_some_and(|site| !matches!(site, b"same-origin" | b"none"));
    if foreign { Err(UploadFailure::Foreign) } else { Ok(()) }
}

fn accepts_html(parts: &Parts) -> bool {
    let mut accepted = parts.headers.get_all(header::ACCEPT).iter();
    accepted.any(|value| value.to_str().is_ok_and(|value| value.contains("text/html")))
}

fn form(offer: &UploadOffer) -> Response<Body> {
    let UploadOffer { path, max_bytes, expires_at, .. } = offer;
    let expires = text::iso8601(i64::try_from(*expires_at).unwrap_or(i64::MAX));
    let body = format!(
        "<p>The file is stored as <code>/workspace/{}</code> in the sandbox of the assistant that gave you this link. It may \
         have up to {max_bytes} bytes. The link works once, until {expires}.</p>\n\
         <form method=\"post\" enctype=\"multipart/form-data\">\n\
         <p><label for=\"file\">File to upload</label> <input type=\"file\" id=\"file\" name=\"file\" required></p>\n\
         <p><button type=\"submit\">Upload</button></p>\n</form>\n",
        escaped(path)
    );
    page(StatusCode::OK, "Upload a file", &body)
}

fn page(status: StatusCode, title: &str, body: &str) -> Response<Body> {
    let html = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n<title>{title}</title>\n</head>\n<body>\n<main>\n\
         <h1>{title}</h1>\n{body}</main>\n</body>\n</html>\n"
    );
    response(status, "text/html; charset=utf-8", html)
}

fn plain(status: StatusCode, text: String) -> Response<Body> {
    response(status, "text/plain; charset=utf-8", text)
}

fn response(status: StatusCode, content_type: &'static str, text: String) -> Response<Body> {
    let mut response = Response::new(Body::from(text));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    for (name, value) in SAFE {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Escapes text for a page. Characters that could hide or reorder a name become visible.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            '\'' => escaped += "&#39;",
            '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}' => {
                escaped.push('\u{fffd}')
            }
            c if c.is_control() => escaped.push('\u{fffd}'),
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_name_becomes_markup_or_hides() {
        assert_eq!(escaped("<b a='x'>\"&\""), "&lt;b a=&#39;x&#39;&gt;&quot;&amp;&quot;");
        assert_eq!(escaped("a\u{202e}gpj.exe\n\0é"), "a\u{fffd}gpj.exe\u{fffd}\u{fffd}é");
    }

    #[test]
    fn only_this_site_and_programs_may_send() {
        let sent = |headers: &[(&str, &str)]| {
            let request = http::Request::post("/upload/x").header("host", "127.0.0.1:8000");
            let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
            check_origin(&request.body(()).unwrap().into_parts().0).is_ok()
        };
        assert!(sent(&[]));
        assert!(sent(&[("origin", "http://127.0.0.1:8000"), ("sec-fetch-site", "same-origin")]));
        assert!(!sent(&[("origin", "http://127.0.0.1:8001")]), "another server of this machine");
        assert!(!sent(&[("origin", "null")]));
        assert!(!sent(&[("origin", "https://evil.test")]));
        assert!(!sent(&[("sec-fetch-site", "cross-site")]));
        assert!(!sent(&[("sec-fetch-site", "same-site")]));
    }

    /// The server does not wait for a client that sends nothing more.
    #[tokio::test(start_paused = true)]
    async fn a_body_that_pauses_for_too_long_is_given_up() {
        let transfer = Arc::new(Transfer::begin(&Arc::default(), Direction::Upload, "", None));
        let body = Body::from_stream(futures_util::stream::pending::<Result<Bytes, std::io::Error>>());
        assert!(matches!(Incoming::new(body, transfer).next().await, Err(UploadFailure::Slow)));
    }
}
