//! Serves files by their links over HTTP: `GET` and `HEAD` of `/files/<key>/<path>`, in pieces, with ranges and
//! conditions. The module `upload` receives files.
//!
//! The key is the permission, so no token is needed, and a wrong address gets the same answer as a file that does not
//! exist. All content comes from a sandbox: a browser may save it, but must never show it as a page of this server.
//! Everything except `EngineFiles` knows the engine only as a `Store`.

use std::future::Future;
use std::sync::Arc;
use std::time::SystemTime;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::routing::any;
use dialects::links::{Address, Signed, Signer};
use dialects::mime;
use engine::{Engine, EngineError, LinkedFile};
use futures_util::stream::{Stream, try_unfold};
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::request::Parts;
use http::{Method, Response, StatusCode};
use mcp::http::Peer;
use telemetry::observe::Observer;
use telemetry::transfer::{Direction, Transfer};

mod conditions;
mod disposition;
mod limit;
mod multipart;
mod upload;

use conditions::{Decision, Version};
pub use limit::TransferLimits;
use limit::{Permit, Permits};

/// Bytes that are read at a time. A download never has more in memory.
const PIECE: u64 = 256 * 1024;

/// The source of files.
trait Store: Send + Sync + 'static {
    type File: StoredFile;

    /// Returns the owner used for download accounting, or `None` for an unknown key.
    fn owner(&self, key: &str) -> Option<String>;

    fn open(&self, key: &str, path: &str) -> impl Future<Output = Result<Self::File, EngineError>> + Send;
}

/// A file that the store found. Reading fails as soon as the path no longer leads to the same file.
trait StoredFile: Send + Sync + 'static {
    fn stat(&self) -> Stat;

    /// Reads exactly `length` bytes, which may be at most 1 MiB.
    fn read(&self, offset: u64, length: u32) -> impl Future<Output = Result<Vec<u8>, EngineError>> + Send;
}

/// The engine's files.
struct EngineFiles(Engine);

impl Store for EngineFiles {
    type File = LinkedFile;

    fn owner(&self, key: &str) -> Option<String> {
        self.0.owner_of_link(key)
    }

    async fn open(&self, key: &str, path: &str) -> Result<LinkedFile, EngineError> {
        self.0.open_file(key, path).await
    }
}

impl StoredFile for LinkedFile {
    fn stat(&self) -> Stat {
        Stat { size: self.size, modified_ns: self.modified_ns, inode: self.inode }
    }

    async fn read(&self, offset: u64, length: u32) -> Result<Vec<u8>, EngineError> {
        Self::read(self, offset, u64::from(length)).await
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stat {
    pub size: u64,
    /// Time of the last change in nanoseconds since 1970. Code in a sandbox can set it to any value.
    pub modified_ns: i64,
    pub inode: u64,
}

#[derive(Clone, Default)]
pub struct Settings {
    /// If there is a signer, only links that it signed are served.
    pub signer: Option<Signer>,
    pub limits: TransferLimits,
    /// Observer that counts and records what moves.
    pub observer: Arc<Observer>,
}

/// Returns the router of the files and uploads. It has to be merged into another router, not nested, because it reads
/// addresses from the path as it was sent.
pub fn router(engine: Engine, settings: Settings) -> Router {
    routes(EngineFiles(engine.clone()), settings.clone()).merge(upload::router(engine, settings))
}

fn routes<S: Store>(store: S, settings: Settings) -> Router {
    let files = Arc::new(FileServer::new(store, settings));
    let answer = any(move |request: http::Request<Body>| {
        let files = files.clone();
        async move { files.answer(&request.into_parts().0).await }
    });
    Router::new().route("/files", answer.clone()).route("/files/", answer.clone()).route("/files/{*rest}", answer)
}

/// Answers the requests for files.
struct FileServer<S> {
    store: S,
    settings: Settings,
    permits: Permits,
}

impl<S: Store> FileServer<S> {
    fn new(store: S, settings: Settings) -> Self {
        Self { store, permits: Permits::new(settings.limits), settings }
    }

    async fn answer(&self, request: &Parts) -> Response<Body> {
        self.serve(request).await.unwrap_or_else(DownloadRefusal::response)
    }

    async fn serve(&self, request: &Parts) -> Result<Response<Body>, DownloadRefusal> {
        if !matches!(request.method, Method::GET | Method::HEAD) {
            return Err(DownloadRefusal::Method);
        }
        let now = SystemTime::now();
        let address = Address::parse(request.uri.path()).ok_or(DownloadRefusal::NotFound)?;
        self.check_signature(&address, request.uri.query().unwrap_or_default(), now)?;
        let owner = self.store.owner(&address.key).ok_or(DownloadRefusal::NotFound)?;
        let permit = self.permits.take(&address.key, &owner).ok_or(DownloadRefusal::Busy)?;
        let file = self.store.open(&address.key, &address.path).await?;
        let stat = file.stat();
        let version = Version::of(&stat, now);
        let range = match conditions::decide(&request.method, &request.headers, &version, stat.size, now) {
            Decision::Failed => return Err(DownloadRefusal::Changed),
            Decision::Unsatisfiable => return Err(DownloadRefusal::Range { size: stat.size }),
            Decision::NotModified => {
                return Ok(response(StatusCode::NOT_MODIFIED, version.headers(), Body::empty()));
            }
            Decision::Whole => None,
            Decision::Part(range) => Some(range),
        };
        let mut headers = version.headers();
        describe(&mut headers, &address.path);
        let (status, bytes) = match range {
            None => (StatusCode::OK, 0..stat.size),
            Some(range) => {
                let text = format!("bytes {}-{}/{}", range.start, range.end - 1, stat.size);
                headers.insert(header::CONTENT_RANGE, plain(text));
                (StatusCode::PARTIAL_CONTENT, range)
            }
        };
        headers.insert(header::CONTENT_LENGTH, (bytes.end - bytes.start).into());
        let body = if request.method == Method::HEAD {
            Body::empty()
        } else {
            let peer = request.extensions.get::<Peer>().map(|peer| peer.0);
            let transfer = Transfer::begin(&self.settings.observer, Direction::Download, &address.key, peer);
            Body::from_stream(pieces(Download { file, at: bytes.start, end: bytes.end, transfer, _permit: permit }))
        };
        Ok(response(status, headers, body))
    }

    fn check_signature(&self, address: &Address, query: &str, now: SystemTime) -> Result<(), DownloadRefusal> {
        let Some(signer) = &self.settings.signer else { return Ok(()) };
        let now = now.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
        match signer.check(address, query, now) {
            Signed::Valid => Ok(()),
            Signed::Expired => Err(DownloadRefusal::Expired),
            Signed::Wrong => Err(DownloadRefusal::NotFound),
        }
    }
}

struct Download<F> {
    file: F,
    at: u64,
    end: u64,
    transfer: Transfer,
    _permit: Permit,
}

/// Streams the file in pieces. The header has announced the length, so a piece that fails or is too short ends the
/// connection: the client notices the short body, and two versions of a file are never mixed.
fn pieces<F: StoredFile>(download: Download<F>) -> impl Stream<Item = Result<Bytes, Broken>> + Send + 'static {
    try_unfold(download, |mut download| async move {
        let length = (download.end - download.at).min(PIECE);
        if length == 0 {
            download.transfer.complete();
            return Ok(None);
        }
        let piece = download.file.read(download.at, length as u32).await.map_err(|error| Broken(error.to_string()))?;
        if piece.len() as u64 != length {
            return Err(Broken(format!("{} bytes instead of {length}", piece.len())));
        }
        download.at += length;
        download.transfer.add(length);
        // The connection may not ask for more than the announced length.
        if download.at == download.end {
            download.transfer.complete();
        }
        Ok(Some((Bytes::from(piece), download)))
    })
}

#[derive(Debug, thiserror::Error)]
#[error("a download was broken off: {0}")]
struct Broken(String);

/// Sets the headers that say what the file is and how it may be used.
fn describe(headers: &mut HeaderMap, path: &str) {
    let name = path.rsplit('/').next().unwrap_or(path);
    let mime = mime::of(name);
    let charset = if mime.starts_with("text/") { "; charset=utf-8" } else { "" };
    headers.insert(header::CONTENT_TYPE, plain(format!("{mime}{charset}")));
    headers.insert(header::CONTENT_DISPOSITION, plain(disposition::attachment(name)));
    headers.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
}

/// Converts text that is valid in a header by construction.
fn plain(text: String) -> HeaderValue {
    HeaderValue::try_from(text).unwrap_or(HeaderValue::from_static(""))
}

/// Headers of every answer. Other sites may embed the files, because no cookie is sent whose effect they could observe.
const SAFE: [(HeaderName, &str); 4] = [
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::CONTENT_SECURITY_POLICY, "sandbox; default-src 'none'"),
    (HeaderName::from_static("cross-origin-resource-policy"), "cross-origin"),
    (header::REFERRER_POLICY, "no-referrer"),
];

fn response(status: StatusCode, headers: HeaderMap, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    for (name, value) in SAFE {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

/// The reason why an answer contains no file.
#[derive(Debug)]
enum DownloadRefusal {
    Method,
    NotFound,
    /// The link was valid once, so its holder may learn that it has expired.
    Expired,
    /// `If-Match` or `If-Unmodified-Since` does not hold.
    Changed,
    /// The file is larger than the operator allows for links.
    TooLarge,
    Range {
        size: u64,
    },
    Busy,
    Failed,
}

impl From<EngineError> for DownloadRefusal {
    fn from(error: EngineError) -> Self {
        use EngineError as E;
        match error {
            E::ContextNotFound(_) | E::FileNotFound(_) | E::InvalidPath { .. } => Self::NotFound,
            E::FileTooLarge { .. } => Self::TooLarge,
            E::Busy(_) | E::NotStarted { .. } | E::QueueFull(_) | E::InUse(_) | E::OverLimit { .. } => Self::Busy,
            E::NotReady(_) | E::Cancelled | E::ShuttingDown => Self::Busy,
            other => {
                tracing::warn!(error = %other, "a file could not be opened");
                Self::Failed
            }
        }
    }
}

impl DownloadRefusal {
    fn response(self) -> Response<Body> {
        let (status, text) = match self {
            Self::Method => (StatusCode::METHOD_NOT_ALLOWED, "files can be read, and nothing else\n"),
            Self::NotFound => (StatusCode::NOT_FOUND, "no such file\n"),
            Self::Expired => (StatusCode::FORBIDDEN, "this link has expired; ask for a new one\n"),
            Self::Changed => (StatusCode::PRECONDITION_FAILED, "the file is not the one that was asked for\n"),
            Self::TooLarge => (StatusCode::FORBIDDEN, "the file is too large for a link\n"),
            Self::Range { .. } => (StatusCode::RANGE_NOT_SATISFIABLE, "the file has no such range\n"),
            Self::Busy => (StatusCode::SERVICE_UNAVAILABLE, "too many downloads; try again\n"),
            Self::Failed => (StatusCode::INTERNAL_SERVER_ERROR, "the file could not be read\n"),
        };
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
        headers.insert(header::CONTENT_LENGTH, text.len().into());
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        match self {
            Self::Method => drop(headers.insert(header::ALLOW, HeaderValue::from_static("GET, HEAD"))),
            Self::Range { size } => drop(headers.insert(header::CONTENT_RANGE, plain(format!("bytes */{size}")))),
            Self::Busy => drop(headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"))),
            _ => (),
        }
        response(status, headers, Body::from(text))
    }
}

#[cfg(test)]
mod tests;
