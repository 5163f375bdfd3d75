//! A client that sends exactly the bytes it is told to, and a server for it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::routing::get;
use engine::op::Tenant;
use futures_util::FutureExt;
use http::request::Parts;
use http::{HeaderMap, HeaderValue, StatusCode};
use mcp::http::{App, Authenticator, Counters, Denied, Endpoint, HttpOptions, serve};
use mcp::{Caller, Membership};
use serde_json::{Value, json};
pub use testkit::http::Answer;
use testkit::http::Connection;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::toy::Toy;

const WATCHDOG: Duration = Duration::from_secs(30);

pub async fn in_time<T>(future: impl Future<Output = T>) -> T {
    timeout(WATCHDOG, future).await.expect("in time")
}

/// Waits for what has to become true.
pub async fn eventually(what: &str, condition: impl Fn() -> bool) {
    let waited = timeout(WATCHDOG, async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    assert!(waited.await.is_ok(), "never: {what}");
}

/// The tenant is what a header says, and nobody may pass who says so. The hasty one has ten requests.
#[derive(Default)]
pub struct TestGate {
    hasty: AtomicUsize,
    version: AtomicU64,
    members: Mutex<HashMap<String, Membership>>,
    removed: Mutex<HashSet<String>>,
}

impl TestGate {
    /// Removes a tenant as a reload does.
    pub fn remove(&self, tenant: &str) {
        self.removed.lock().unwrap().insert(tenant.into());
        self.version.fetch_add(1, Ordering::SeqCst);
        if let Some(membership) = self.members.lock().unwrap().remove(tenant) {
            membership.end();
        }
    }

    /// Whether a request of this tenant was admitted since it was added.
    pub fn knows(&self, tenant: &str) -> bool {
        self.members.lock().unwrap().contains_key(tenant)
    }

    /// Adds a removed tenant again.
    pub fn add(&self, tenant: &str) {
        self.removed.lock().unwrap().remove(tenant);
        self.version.fetch_add(1, Ordering::SeqCst);
    }
}

impl Authenticator for TestGate {
    fn admit(&self, parts: &Parts, _: SocketAddr) -> Result<Caller, Denied> {
        let tenant = parts.headers.get("x-tenant").map_or("local", |value| value.to_str().unwrap());
        if tenant == "nobody" || self.removed.lock().unwrap().contains(tenant) {
            return Err(unknown());
        }
        if tenant == "hasty" && self.hasty.fetch_add(1, Ordering::SeqCst) >= 10 {
            let headers = HeaderMap::from_iter([(http::header::RETRY_AFTER, HeaderValue::from_static("1"))]);
            let body = json!({ "error": "too fast" });
            return Err(Denied { status: StatusCode::TOO_MANY_REQUESTS, headers: Box::new(headers), body });
        }
        let mut members = self.members.lock().unwrap();
        let membership = members.entry(tenant.into()).or_insert_with(Membership::begin).clone();
        Ok(Caller { tenant: Tenant(tenant.into()), connection: None, show_host_paths: false, membership })
    }

    fn version(&self) -> u64 {
        self.version.load(Ordering::SeqCst)
    }

    fn confirm(&self, parts: &Parts, peer: SocketAddr, caller: &Caller) -> Result<(), Denied> {
        let now = self.admit(parts, peer)?;
        (now.membership == caller.membership).then_some(()).ok_or_else(unknown)
    }
}

fn unknown() -> Denied {
    let headers = HeaderMap::from_iter([(http::header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"))]);
    let body = json!({ "error": "who are you" });
    Denied { status: StatusCode::UNAUTHORIZED, headers: Box::new(headers), body }
}

pub struct Server {
    pub address: SocketAddr,
    pub toy: Toy,
    pub gate: Arc<TestGate>,
    pub counters: Counters,
    pub shutdown: CancellationToken,
    pub now: CancellationToken,
    pub task: JoinHandle<()>,
}

impl Server {
    pub async fn start() -> Self {
        Self::with(HttpOptions::default()).await
    }

    pub async fn with(options: HttpOptions) -> Self {
        let toy = Toy::default();
        let served = toy.clone();
        Self::serving(options, toy, move || {
            let toy = served.clone();
            Endpoint::new(
                move |caller, _| toy.of(caller),
                |caller| std::future::ready(json!({ "status": "fine", "tenant": caller.tenant.0 })).boxed(),
            )
            .with_schemas(Toy::schema)
        })
        .await
    }

    pub async fn serving(options: HttpOptions, toy: Toy, endpoint: impl Fn() -> Endpoint) -> Self {
        let (counters, gate) = (Counters::default(), Arc::<TestGate>::default());
        let app = App {
            options,
            counters: counters.clone(),
            log: telemetry::logging::lines::log_http,
            authenticator: gate.clone(),
            endpoints: BTreeMap::from([("toy".to_owned(), endpoint()), ("other".to_owned(), endpoint())]),
            default: "toy".into(),
            routes: axum::Router::new().route("/healthz", get(async || "ok")),
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (shutdown, now) = (CancellationToken::new(), CancellationToken::new());
        let task = tokio::spawn(serve(listener, app, shutdown.clone(), now.clone()));
        Self { address, toy, gate, counters, shutdown, now, task }
    }

    pub async fn client(&self) -> Client {
        Client::connect(self.address).await
    }

    /// One request on a connection of its own.
    pub async fn post(&self, headers: &[(&str, &str)], body: &Value) -> Answer {
        self.client().await.post(headers, body).await
    }

    pub async fn stop(self) {
        self.shutdown.cancel();
        in_time(self.task).await.unwrap();
    }
}

/// A connection on which nothing may take long, and an answer that is missing ends the test.
pub struct Client(Connection<TcpStream>);

impl Client {
    pub async fn connect(address: SocketAddr) -> Self {
        Self(Connection::open(address).await.unwrap())
    }

    pub async fn write(&mut self, bytes: &[u8]) {
        // The server may have had enough of us.
        let _ = self.0.write(bytes).await;
    }

    pub async fn send(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) {
        let _ = self.0.send(method, path, headers, body).await;
    }

    pub async fn ask(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        self.send(method, path, headers, body).await;
        self.answer().await
    }

    pub async fn send_json(&mut self, headers: &[(&str, &str)], body: &Value) {
        let headers = [&[("content-type", "application/json")], headers].concat();
        self.send("POST", "/mcp", &headers, body.to_string().as_bytes()).await;
    }

    pub async fn post(&mut self, headers: &[(&str, &str)], body: &Value) -> Answer {
        self.send_json(headers, body).await;
        self.answer().await
    }

    /// Status line and headers.
    pub async fn head(&mut self) -> Answer {
        in_time(self.0.head()).await.unwrap()
    }

    pub async fn answer(&mut self) -> Answer {
        in_time(self.0.answer()).await.unwrap()
    }

    /// The next piece of a chunked body.
    pub async fn chunk(&mut self) -> Option<Vec<u8>> {
        in_time(self.0.chunk()).await.unwrap()
    }

    /// The next event of a stream that carries a message, with its id; signs of life are skipped.
    pub async fn event(&mut self) -> Option<(Option<String>, Value)> {
        loop {
            let chunk = String::from_utf8(self.chunk().await?).unwrap();
            let field = |name: &str| chunk.lines().find_map(|line| line.strip_prefix(name).map(str::to_owned));
            match field("data: ").filter(|data| !data.is_empty()) {
                Some(data) => return Some((field("id: "), serde_json::from_str(&data).unwrap())),
                None => continue,
            }
        }
    }

    /// Everything until the server closes.
    pub async fn rest(&mut self) -> String {
        String::from_utf8_lossy(&in_time(self.0.rest()).await).into_owned()
    }

    /// The server has closed, and there is nothing more to read.
    pub async fn is_closed(&mut self) -> bool {
        in_time(self.0.peek()).await.is_empty()
    }

    /// Whether the server has said anything by now.
    pub async fn has_something(&mut self) -> bool {
        timeout(Duration::from_millis(1), self.0.peek()).await.is_ok()
    }

    pub async fn half_close(&mut self) {
        self.0.half_close().await.unwrap();
    }
}

pub const BOTH: (&str, &str) = ("accept", "application/json, text/event-stream");

pub fn request(id: impl Into<Value>, method: &str, params: Value) -> Value {
    json!({ "jsonrpc": "2.0", "id": id.into(), "method": method, "params": params })
}

pub fn call(id: impl Into<Value>, tool: &str, arguments: Value) -> Value {
    request(id, "tools/call", json!({ "name": tool, "arguments": arguments }))
}

pub fn notification(method: &str, params: Value) -> Value {
    json!({ "jsonrpc": "2.0", "method": method, "params": params })
}

pub fn initialize(version: &str) -> Value {
    let info = json!({ "name": "test", "version": "1" });
    request(0, "initialize", json!({ "protocolVersion": version, "capabilities": { "roots": {} }, "clientInfo": info }))
}

/// A session, by its id.
pub async fn session(server: &Server, version: &str, headers: &[(&str, &str)]) -> String {
    let answer = server.post(&[&[BOTH], headers].concat(), &initialize(version)).await;
    assert_eq!(answer.json()["result"]["protocolVersion"], version);
    answer.header("mcp-session-id").expect("a session").to_owned()
}

/// A request of 2026-07-28 with its headers.
pub fn modern(id: impl Into<Value>, method: &str, mut params: Value) -> (Vec<(String, String)>, Value) {
    let mut headers = vec![
        ("mcp-protocol-version".to_owned(), "2026-07-28".to_owned()),
        ("mcp-method".to_owned(), method.to_owned()),
        (BOTH.0.to_owned(), BOTH.1.to_owned()),
    ];
    if let Some(name) = params["name"].as_str() {
        headers.push(("mcp-name".into(), name.into()));
    }
    params["_meta"]["io.modelcontextprotocol/protocolVersion"] = "2026-07-28".into();
    params["_meta"]["io.modelcontextprotocol/clientCapabilities"] = json!({});
    params["_meta"]["io.modelcontextprotocol/clientInfo"] = json!({ "name": "test", "version": "1" });
    (headers, request(id, method, params))
}

pub fn borrowed(headers: &[(String, String)]) -> Vec<(&str, &str)> {
    headers.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect()
}
