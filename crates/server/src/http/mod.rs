//! The transport of `sandpool serve`: MCP's Streamable HTTP, all five revisions on one endpoint, in front of any rmcp service.
//!
//! Of rmcp this uses the service loop and the model, not its HTTP service, which takes only a `ServerHandler` (no member beside
//! those of its own types can leave it), makes a worker of some 50 kB for each `initialize`, knows no caller when it makes a
//! session, and keeps a long call silent until its first message. Here a request goes straight to its handler, or through a
//! service loop of its own, and a session is a small record: who opened it, what was negotiated, what is in flight.
//!
//! Knows nothing of dialects, tokens or files: these come in as [`Endpoint`]s, a [`Authenticator`] and further routes.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use engine::{Hold, Memory};
use futures_util::future::BoxFuture;
use http::request::Parts;
use http::{HeaderMap, Response, StatusCode, header};
use rmcp::RoleServer;
use rmcp::model::JsonObject;
use rmcp::service::{DynService, Service};
use serde_json::Value;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::mcp::Guarded;
use crate::mcp::message::Fault;
use crate::metrics::Metrics;

mod body;
mod connection;
mod direct;
mod endpoint;
mod exchange;
mod guard;
mod replay;
mod revision;
mod session;
mod share;
mod sse;
mod turns;

pub use crate::mcp::Caller;
pub use connection::Peer;

/// Plain data; nothing here is read from anywhere.
#[derive(Debug, Clone)]
pub struct HttpOptions {
    /// Names and addresses by which clients reach us, with or without a port, besides loopback ones and the address they
    /// connected to; `*` for any.
    pub allowed_hosts: Vec<String>,
    /// Origins of browsers that may ask. Without any: loopback ones and those of `allowed_hosts`.
    pub allowed_origins: Vec<String>,
    pub cors: bool,
    /// Callers need no token: `cors` then opens the server to loopback origins only.
    pub open: bool,
    pub max_connections: usize,
    pub max_header: usize,
    pub max_body: usize,
    /// What requests, results and answers may take, of each tenant and of all.
    pub memory: Memory,
    pub header_deadline: Duration,
    pub body_deadline: Duration,
    /// Between two requests of a connection.
    pub idle_deadline: Duration,
    /// How long a client may not read.
    pub write_deadline: Duration,
    /// So many requests of one tenant are answered at once, streams included.
    pub max_requests_per_tenant: usize,
    pub max_sessions: usize,
    pub max_sessions_per_tenant: usize,
    /// How long a session without a call in flight is kept.
    pub session_idle: Duration,
    /// How long an answer may take before a stream is begun for it, if the client takes one.
    pub patience: Duration,
    /// Between two signs of life on a stream.
    pub keep_alive: Duration,
    /// How long a call goes on for a client that lost its stream and may come back for it.
    pub resume_within: Duration,
    /// How long calls in flight may go on after a shutdown.
    pub grace: Duration,
}

impl Default for HttpOptions {
    fn default() -> Self {
        Self {
            allowed_hosts: Vec::new(),
            allowed_origins: Vec::new(),
            cors: false,
            open: false,
            max_connections: 1000,
            max_header: 32 << 10,
            max_body: 24 << 20,
            memory: Memory::new(256 << 20, 1 << 30),
            header_deadline: Duration::from_secs(10),
            body_deadline: Duration::from_secs(30),
            idle_deadline: Duration::from_secs(75),
            write_deadline: Duration::from_secs(30),
            max_requests_per_tenant: 500,
            max_sessions: 10_000,
            max_sessions_per_tenant: 1000,
            session_idle: Duration::from_secs(1800),
            patience: Duration::from_millis(500),
            keep_alive: Duration::from_secs(15),
            resume_within: Duration::from_secs(15),
            grace: Duration::from_secs(30),
        }
    }
}

/// Decides who calls. Asked for every request below `/mcp` before anything else is looked at, and again for each further message
/// of a batch.
pub trait Authenticator: Send + Sync + 'static {
    /// The connection of the [`Caller`] is filled in later.
    fn admit(&self, parts: &Parts, peer: SocketAddr) -> Result<Caller, Denied>;
}

/// The answer to a caller who is not let in.
#[derive(Debug, Clone)]
pub struct Denied {
    pub status: StatusCode,
    pub headers: Box<HeaderMap>,
    pub body: Value,
}

pub type Status = dyn Fn(Caller) -> BoxFuture<'static, Value> + Send + Sync;
type Make = dyn Fn(Caller, Hold) -> Box<dyn DynService<RoleServer>> + Send + Sync;
type Schemas = dyn Fn(&str) -> Option<Arc<JsonObject>> + Send + Sync;

/// One `/mcp/<name>`.
pub struct Endpoint {
    make: Box<Make>,
    schemas: Box<Schemas>,
    status: Box<Status>,
    direct: bool,
}

impl Endpoint {
    /// `make` gives the service for one request, of this caller and with the memory that it holds. `status` is what a plain GET
    /// shows.
    pub fn new<S: Service<RoleServer>>(
        make: impl Fn(Caller, Hold) -> S + Send + Sync + 'static,
        status: impl Fn(Caller) -> BoxFuture<'static, Value> + Send + Sync + 'static,
    ) -> Self {
        let make = move |caller, hold| Box::new(Guarded(make(caller, hold))) as Box<dyn DynService<RoleServer>>;
        Self { make: Box::new(make), schemas: Box::new(|_| None), status: Box::new(status), direct: false }
    }

    /// The service asks its clients nothing, and what it says before an answer goes through the request's [`crate::mcp::Outlet`]: it
    /// needs no service loop, which costs several times what a short call does.
    pub fn direct(mut self) -> Self {
        self.direct = true;
        self
    }

    /// The input schemas of tools, for those that want arguments repeated in headers (`x-mcp-header`).
    pub fn with_schemas(mut self, schemas: impl Fn(&str) -> Option<Arc<JsonObject>> + Send + Sync + 'static) -> Self {
        self.schemas = Box::new(schemas);
        self
    }
}

/// All that is served.
pub struct App {
    pub options: HttpOptions,
    pub metrics: Metrics,
    pub gate: Arc<dyn Authenticator>,
    /// By name; `/mcp/<name>` leads to each.
    pub endpoints: BTreeMap<String, Endpoint>,
    /// The one at `/mcp`.
    pub default: String,
    /// Everything that is not below `/mcp`. Host and origin are checked before, callers are not: a [`Peer`] is in the
    /// extensions.
    pub routes: axum::Router,
}

impl HttpOptions {
    /// What is no host or no origin would be left out without a word.
    pub fn check(&self) -> Result<(), String> {
        guard::check(self)
    }
}

/// Serves until `shutdown`, then lets calls in flight end within the grace, or at once when `now` comes. When it returns all
/// connections are closed and all calls have ended or were cancelled.
pub async fn serve(listener: TcpListener, app: App, shutdown: CancellationToken, now: CancellationToken) {
    connection::serve(listener, app, shutdown, now).await;
}

/// A refusal of the transport itself. The body is an error of JSON-RPC, which is what clients can read.
fn refuse(status: StatusCode, fault: &Fault) -> Response<Body> {
    json(status, fault.encode())
}

fn json(status: StatusCode, bytes: impl Into<Body>) -> Response<Body> {
    let mut response = Response::new(bytes.into());
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    response
}

fn empty(status: StatusCode) -> Response<Body> {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = status;
    response
}

/// For what JSON-RPC has no code of its own.
const SERVER_ERROR: i32 = -32000;

/// A refusal that is about no message in particular.
fn refused(status: StatusCode, why: impl Into<String>) -> Response<Body> {
    refuse(status, &Fault::new(Value::Null, SERVER_ERROR, why))
}
