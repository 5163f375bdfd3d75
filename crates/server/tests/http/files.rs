//! Files by their links and as resources, over the transport, out of the real engine (its sandboxes are scripted).

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use dialects::links::{Expiring, Links, Signer};
use dialects::{Options, agentrun};
use engine::op::{Call, ContextSelector, FileOwner, Language, NewContext, Op, Outcome, Target, Tenant};
use engine::{Engine, EngineConfig, KernelCommand, Runtimes};
use files::Settings;
use futures_util::FutureExt;
use mcp::http::{App, Endpoint, HttpOptions, serve};
use serde_json::{Value, json};
use server::handler::{Handlers, Surface};
use testkit::fake::FakeBackend;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::client::{Answer, BOTH, Client, TestGate, borrowed, modern, request};

pub struct Service {
    pub engine: Engine,
    pub address: SocketAddr,
    base: String,
    signer: Option<Signer>,
    shutdown: CancellationToken,
}

impl Service {
    pub async fn start(signer: Option<Signer>) -> Self {
        let command = KernelCommand { argv: vec!["python".into()], ..KernelCommand::default() };
        let runtimes = Runtimes {
            python: command,
            node: None,
            browser: None,
            files: Vec::new(),
            links: Vec::new(),
            unpinned: Vec::new(),
        };
        let backend = Arc::new(FakeBackend::new());
        let engine = Engine::start(
            EngineConfig { realms: dialects::realms(), pool_realm: agentrun::REALM, ..EngineConfig::default() },
            runtimes,
            backend,
        )
        .await
        .unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let service =
            Self { engine, address, base: format!("http://{address}"), signer, shutdown: CancellationToken::new() };
        let surface = Surface::new(&agentrun::DIALECT, None, Options::default(), service.links());
        let handlers = Handlers::new(Arc::new(service.engine.clone()), Arc::new(surface));
        let endpoint = Endpoint::new(
            move |caller, memory| handlers.of(caller, memory),
            |_| std::future::ready(Value::Null).boxed(),
        );
        let mut settings = Settings::default();
        settings.signer.clone_from(&service.signer);
        let app = App {
            counters: Default::default(),
            log: |_| {},
            options: HttpOptions::default(),
            authenticator: Arc::new(TestGate::default()),
            endpoints: BTreeMap::from([("agentrun".to_owned(), endpoint)]),
            default: "agentrun".into(),
            routes: files::router(service.engine.clone(), settings),
        };
        tokio::spawn(serve(listener, app, service.shutdown.clone(), CancellationToken::new()));
        service
    }

    pub fn links(&self) -> Links {
        let ttl = Duration::from_secs(60);
        let expiring = self.signer.clone().map(|signer| Expiring { signer, ttl, now: 0 });
        Links { base: Some(self.base.clone()), expiring }
    }

    pub async fn execute(&self, tenant: &str, op: Op) -> Outcome {
        let (tenant, realm) = (Tenant(tenant.into()), dialects::agentrun::REALM);
        let cancel = CancellationToken::new();
        let (events, memory, stages, found) = Default::default();
        let call = Call { tenant, realm, connection: None, cancel, events, memory, stages, found };
        self.engine.execute(&call, op).await.unwrap()
    }

    /// A context of this name, with one file; its key.
    async fn with_file(&self, tenant: &str, path: &str, content: &[u8]) -> String {
        self.execute(tenant, Op::CreateContext(NewContext::named("box", Language::Python))).await;
        self.write(tenant, path, content).await
    }

    async fn write(&self, tenant: &str, path: &str, content: &[u8]) -> String {
        let owner = FileOwner::workspace(Target::existing(ContextSelector::Named("box".into())));
        let op = Op::WriteFile { owner, path: path.into(), content: content.to_vec() };
        match self.execute(tenant, op).await {
            Outcome::Written { key, .. } => key,
            other => panic!("{other:?}"),
        }
    }

    pub async fn ask(&self, method: &str, target: &str, headers: &[(&str, &str)]) -> Answer {
        let target = target.strip_prefix(&self.base).unwrap_or(target);
        let mut client = Client::connect(self.address).await;
        client.ask(method, target, headers, b"").await
    }

    async fn mcp(&self, tenant: &str, method: &str, params: Value) -> Value {
        let headers = [BOTH, ("x-tenant", tenant)];
        Client::connect(self.address).await.post(&headers, &request(1, method, params)).await.json()
    }

    pub async fn end(self) {
        self.shutdown.cancel();
        self.engine.shutdown(Duration::ZERO).await;
    }
}

/// A27: a link needs no token, it is one. X20: it ends with what it leads to.
#[tokio::test]
async fn a_link_leads_to_the_file_until_its_context_is_gone() {
    let service = Service::start(None).await;
    let key = service.with_file("alice", "out/a b.csv", b"x,y\n1,2\n").await;
    let link = service.links().to(&key, "out/a b.csv").unwrap();
    let nobody = ("x-tenant", "nobody");
    let answer = service.ask("GET", &link, &[nobody]).await;
    assert_eq!((answer.status, answer.body.as_slice()), (200, b"x,y\n1,2\n".as_slice()));
    assert_eq!(answer.header("content-type"), Some("text/csv; charset=utf-8"));
    let etag = answer.header("etag").unwrap();
    let part = service.ask("GET", &link, &[("range", "bytes=4-6"), ("if-range", etag)]).await;
    assert_eq!((part.status, part.body.as_slice()), (206, b"1,2".as_slice()));
    assert_eq!(service.ask("GET", &link, &[("if-none-match", etag)]).await.status, 304);

    service.write("alice", "out/a b.csv", b"x,y\n3,4\n").await;
    let changed = service.ask("GET", &link, &[("range", "bytes=4-6"), ("if-range", etag)]).await;
    assert_eq!((changed.status, changed.body.as_slice()), (200, b"x,y\n3,4\n".as_slice()));

    let missing = service.ask("GET", &format!("/files/{}/x", "0".repeat(64)), &[]).await;
    assert_eq!(missing.status, 404);
    service.execute("alice", Op::StopContext { which: ContextSelector::Named("box".into()) }).await;
    let without_date = |answer: Answer| {
        let headers: Vec<_> = answer.headers.into_iter().filter(|(name, _)| name != "date").collect();
        (answer.status, headers, answer.body)
    };
    assert_eq!(without_date(service.ask("GET", &link, &[]).await), without_date(missing));
    service.end().await;
}

/// A22, A23 hold for files as for everything else.
#[tokio::test]
async fn a_link_is_not_served_to_another_host_name_or_a_foreign_page() {
    let service = Service::start(None).await;
    let key = service.with_file("alice", "a", b"1").await;
    let link = service.links().to(&key, "a").unwrap();
    assert_eq!(service.ask("GET", &link, &[("host", "evil.example")]).await.status / 100, 4);
    assert_eq!(service.ask("GET", &link, &[("origin", "http://evil.example")]).await.status / 100, 4);
    service.end().await;
}

#[tokio::test]
async fn where_links_end_what_an_answer_shows_is_signed() {
    let service = Service::start(Some(Signer::new(b"secret"))).await;
    let key = service.with_file("local", "a.txt", b"hello").await;
    let plain = Links { expiring: None, ..service.links() }.to(&key, "a.txt").unwrap();
    assert_eq!(service.ask("GET", &plain, &[]).await.status, 404);
    let listed = service.mcp("local", "resources/list", json!({})).await;
    let uri = listed["result"]["resources"][0]["uri"].as_str().unwrap();
    assert!(uri.starts_with(&format!("{plain}?expires=")), "{uri}");
    assert_eq!(service.ask("GET", uri, &[]).await.body, b"hello");
    service.end().await;
}

/// Legacy and modern, and whose file it is. A37: addresses that are not ours are never fetched.
#[tokio::test]
async fn files_are_resources_of_their_tenant() {
    let service = Service::start(None).await;
    let key = service.with_file("alice", "a.txt", b"hello").await;
    service.write("alice", "b.bin", b"\xff\x00").await;
    service.with_file("bob", "c.txt", b"bob's").await;
    let listed = service.mcp("alice", "resources/list", json!({})).await;
    let listed = listed["result"]["resources"].as_array().unwrap();
    let mut names: Vec<&str> = listed.iter().map(|resource| resource["name"].as_str().unwrap()).collect();
    names.sort_unstable();
    assert_eq!(names, ["a.txt", "b.bin"]);

    let uri = service.links().to(&key, "a.txt").unwrap();
    let content = json!([{ "uri": uri, "mimeType": "text/plain", "text": "hello" }]);
    let read = service.mcp("alice", "resources/read", json!({ "uri": uri })).await;
    assert_eq!(read["result"], json!({ "contents": content }));
    let (mut headers, body) = modern(1, "resources/read", json!({ "uri": uri }));
    headers.extend([("mcp-name".into(), uri.clone()), ("x-tenant".into(), "alice".into())]);
    let read = Client::connect(service.address).await.post(&borrowed(&headers), &body).await.json();
    assert_eq!((&read["result"]["contents"], &read["result"]["cacheScope"]), (&content, &json!("private")));
    let blob = service.mcp("alice", "resources/read", json!({ "uri": format!("sandpool://files/{key}/b.bin") })).await;
    assert_eq!(blob["result"]["contents"][0]["blob"], "/wA=");

    let templates = service.mcp("bob", "resources/templates/list", json!({})).await;
    assert_eq!(templates["result"]["resourceTemplates"].as_array().unwrap().len(), 2);
    let own = format!("sandpool://files/{key}/a.txt");
    let witness = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let elsewhere = format!("http://{}/files/{key}/a.txt", witness.local_addr().unwrap());
    let absent = format!("sandpool://files/{}/a.txt", "0".repeat(64));
    for uri in [&uri, &own, &absent, &elsewhere, "file:///etc/passwd", ""] {
        let error = service.mcp("bob", "resources/read", json!({ "uri": uri })).await;
        let expected = json!({ "code": -32002, "message": "Resource not found", "data": { "uri": uri } });
        assert_eq!(error["error"], expected);
    }
    assert!(witness.accept().now_or_never().is_none(), "somebody called");
    service.end().await;
}
