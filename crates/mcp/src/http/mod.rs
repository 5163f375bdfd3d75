//! The transport of `sandpool serve`: MCP's Streamable HTTP, with all five revisions on one endpoint, in front of any
//! rmcp service.
//!
//! The transport uses rmcp's service loop and model, but not its HTTP service. That service takes only a
//! `ServerHandler` (so that a result can have no member that rmcp's types lack), creates a worker of some 50 kB for
//! each `initialize`, does not know the caller when it creates a session, and keeps a long call silent until its first
//! message. Here a request goes directly to its handler or through a service loop created for it, and a session is a
//! small record of its tenant, the negotiated parameters and the calls in flight.
//!
//! A call has one cancellation token, which the handler finds in its context. Each line cancels those below it:
//!
//! ```text
//! halt                 the server's grace period is over
//! └─ the call's token  its connection closed, the client withdrew it, or its session ended: the exchange is dropped
//!    └─ the engine's   the future of `Engine::execute` was dropped
//! ```
//!
//! A cancelled call is not dropped but driven to its end, so that it is logged and leaves nothing behind: the exchange
//! does so for its handler, and `Engine::execute` for callers that have no exchange. A panic ends one call: the engine
//! turns its own panics into errors, and `Guarded` catches those of handlers. See decision 038.
//!
//! The transport does not know dialects, tokens or files. They are passed in as [`Endpoint`]s, an [`Authenticator`] and
//! further routes.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use engine::{Hold, Memory, Tenant};
use futures_util::future::BoxFuture;
use http::request::Parts;
use http::{HeaderMap, Response, StatusCode, header};
use rmcp::RoleServer;
use rmcp::model::JsonObject;
use rmcp::service::{DynService, Service};
use serde_json::Value;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::message::Fault;
use crate::{Caller, ErrorStyle, Guarded};

mod body;
mod connection;
mod counters;
mod direct;
mod endpoint;
mod exchange;
mod guard;
mod log;
mod replay;
mod revision;
mod session;
mod share;
mod sse;
mod turns;

pub use connection::Peer;
pub use counters::{Counters, HttpTotals};
pub use log::{HTTP_LOG, HttpEvent};

/// Options of the transport. They are plain data: this module reads no file and no environment variable for them.
#[derive(Debug, Clone)]
pub struct HttpOptions {
    /// Names and addresses by which clients reach the server, with or without a port. Loopback names and the address
    /// that a client connected to are always accepted; `*` accepts any host.
    pub allowed_hosts: Vec<String>,
    /// Origins from which browsers may send requests. If empty, loopback origins and those of `allowed_hosts` are
    /// accepted.
    pub allowed_origins: Vec<String>,
    pub cors: bool,
    /// Whether callers need no token. `cors` then never accepts every origin, only those that `allowed_origins`
    /// describes.
    pub open: bool,
    pub max_connections: usize,
    pub max_header: usize,
    pub max_body: usize,
    /// Memory budgets for requests, results and answers: one for each tenant and one for all tenants together.
    pub memory: Memory,
    pub header_deadline: Duration,
    pub body_deadline: Duration,
    /// Maximum time between two requests of a connection.
    pub idle_deadline: Duration,
    /// Maximum time for which a client may not read its answer.
    pub write_deadline: Duration,
    /// Maximum number of requests of one tenant that are answered at once, streams included.
    pub max_requests_per_tenant: usize,
    pub max_sessions: usize,
    pub max_sessions_per_tenant: usize,
    /// Time after which a session without a call in flight ends.
    pub session_idle: Duration,
    /// How long an answer may take before the transport starts a stream for it, if the client accepts a stream.
    pub patience: Duration,
    /// Interval between two signs of life on a stream.
    pub keep_alive: Duration,
    /// How long a call continues for a client that lost its stream and may resume it.
    pub resume_within: Duration,
    /// How long calls in flight may continue after a shutdown.
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

/// Identifies the caller of a request. The transport asks it for every request below `/mcp`, right after the checks of
/// host and origin and before anything else, and again for each further message of a batch. If the version has changed
/// when the body of a request has arrived, the transport lets it confirm the caller.
pub trait Authenticator: Send + Sync + 'static {
    /// Returns the caller; the transport sets the caller's connection later.
    fn admit(&self, parts: &Parts, peer: SocketAddr) -> Result<Caller, Denied>;

    /// Returns a number that changes whenever a caller that was admitted may no longer be admitted.
    fn version(&self) -> u64 {
        0
    }

    /// Refuses a request that would no longer be admitted as one of this caller. It does not count the request again.
    fn confirm(&self, _parts: &Parts, _peer: SocketAddr, _caller: &Caller) -> Result<(), Denied> {
        Ok(())
    }

    /// Learns that a request of this tenant was refused because the tenant uses too much at the moment.
    fn throttled(&self, _tenant: &Tenant, _peer: SocketAddr, _why: &str) {}
}

/// The answer to a caller that was not admitted.
#[derive(Debug, Clone)]
pub struct Denied {
    pub status: StatusCode,
    pub headers: Box<HeaderMap>,
    pub body: Value,
}

pub type Status = dyn Fn(Caller) -> BoxFuture<'static, Value> + Send + Sync;
type Schemas = dyn Fn(&str) -> Option<Arc<JsonObject>> + Send + Sync;
type Make = dyn Fn(Caller, Hold, ErrorStyle) -> Box<dyn DynService<RoleServer>> + Send + Sync;

/// One endpoint, `/mcp/<name>`.
pub struct Endpoint {
    make: Box<Make>,
    schemas: Box<Schemas>,
    status: Box<Status>,
    direct: bool,
    errors: ErrorStyle,
    open_stream: bool,
}

impl Endpoint {
    /// Creates an endpoint. `make` returns the service for one request, given its caller and its memory. `status`
    /// returns the document that a plain GET shows.
    pub fn new<S: Service<RoleServer>>(
        make: impl Fn(Caller, Hold) -> S + Send + Sync + 'static,
        status: impl Fn(Caller) -> BoxFuture<'static, Value> + Send + Sync + 'static,
    ) -> Self {
        let make = move |caller, hold, errors| {
            let guarded = Guarded { service: make(caller, hold), halt: None, errors };
            Box::new(guarded) as Box<dyn DynService<RoleServer>>
        };
        Self {
            make: Box::new(make),
            schemas: Box::new(|_| None),
            status: Box::new(status),
            direct: false,
            errors: ErrorStyle::default(),
            open_stream: false,
        }
    }

    /// Sets how errors are worded.
    pub fn with_errors(mut self, errors: ErrorStyle) -> Self {
        self.errors = errors;
        self
    }

    /// Sets whether the stream that belongs to no request opens for clients without a session, too.
    pub fn with_open_stream(mut self, open_stream: bool) -> Self {
        self.open_stream = open_stream;
        self
    }

    /// Returns the service for one request.
    fn service(&self, caller: Caller, hold: Hold) -> Box<dyn DynService<RoleServer>> {
        (self.make)(caller, hold, self.errors)
    }

    /// Declares that the service sends no requests to its clients and that its notifications go through the request's
    /// [`crate::Outlet`]. Such a service needs no service loop, which costs several times as much as a short call.
    pub fn direct(mut self) -> Self {
        self.direct = true;
        self
    }

    /// Sets the look-up of tools' input schemas, which may require arguments to be repeated in headers
    /// (`x-mcp-header`).
    pub fn with_schemas(mut self, schemas: impl Fn(&str) -> Option<Arc<JsonObject>> + Send + Sync + 'static) -> Self {
        self.schemas = Box::new(schemas);
        self
    }
}

/// Everything that the server serves.
pub struct App {
    pub options: HttpOptions,
    pub counters: Counters,
    /// Logs an event of a request.
    pub log: fn(HttpEvent<'_>),
    pub authenticator: Arc<dyn Authenticator>,
    /// Endpoints by name; each is served at `/mcp/<name>`.
    pub endpoints: BTreeMap<String, Endpoint>,
    /// Name of the endpoint that is served at `/mcp`.
    pub default: String,
    /// Routes for everything that is not below `/mcp`. Host and origin are checked before these routes, callers are
    /// not. The request's extensions contain a [`Peer`].
    pub routes: axum::Router,
}

impl HttpOptions {
    /// Rejects malformed hosts and origins, which would otherwise be ignored silently.
    pub fn check(&self) -> Result<(), String> {
        guard::check(self)
    }
}

/// Serves until `shutdown`, then lets calls in flight end within the grace period, or cancels them at once when `now`
/// is cancelled. When this returns, all connections are closed and all calls have ended or were cancelled.
pub async fn serve(listener: TcpListener, app: App, shutdown: CancellationToken, now: CancellationToken) {
    connection::serve(listener, app, shutdown, now).await;
}

/// Returns a refusal by the transport itself. Its body is a JSON-RPC error, which clients can read.
fn refuse(status: StatusCode, fault: &Fault) -> Response<Body> {
    let mut response = json(status, fault.encode());
    response.extensions_mut().insert(fault.clone());
    response
}

/// Words a refusal as its endpoint does.
fn reworded(mut response: Response<Body>, errors: ErrorStyle) -> Response<Body> {
    if let Some(fault) = response.extensions_mut().remove::<Fault>() {
        *response.body_mut() = errors.encode(&fault).into();
    }
    response
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

/// Error code for conditions for which JSON-RPC defines no code.
const SERVER_ERROR: i32 = -32000;

/// Returns a refusal that does not concern a particular message.
fn refused(status: StatusCode, why: impl Into<String>) -> Response<Body> {
    refuse(status, &Fault::new(Value::Null, SERVER_ERROR, why))
}
