//! The network of sandboxes: off unless the operator gives one, never without its gate, narrowed by a run, and what it turns away told.

use std::net::SocketAddr;
use std::time::Duration;

use egress::{Egress, EgressConfig, Policy, Secret, Table, Value};
use engine::op::{
    ContextSelector, Environment, Network, NewContext, Notice, NoticeKind, Quota, Ran, Realm, RunCode, RunOnce, Size,
    Target,
};
use engine::{Call, Engine, EngineConfig, EngineError, Op, Outcome, Tenant};
use proto::Language;
use testkit::fake::FakeBackend;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::support::*;

/// A server of this machine's that answers everything; `pages.test` is its name.
pub async fn pages() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let _ = stream.read(&mut [0; 4096]).await;
                let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok";
                let _ = stream.write_all(answer).await;
            });
        }
    });
    at
}

fn policy(name: &str, allow: &[&str], at: SocketAddr) -> Policy {
    Policy::of(Table {
        name: name.into(),
        allow: allow.iter().map(|&host| host.into()).collect(),
        private: vec![at.to_string()],
        ..Table::default()
    })
}

fn online(at: SocketAddr) -> EngineConfig {
    let hosts = ["pages.test", "other.test"].map(|name| (name.to_owned(), at.ip())).into();
    let egress = Egress::new(EgressConfig { hosts, ..EgressConfig::default() }).unwrap();
    EngineConfig { egress: Some(egress), ..config() }
}

/// Where every realm may reach `pages.test` and `other.test`.
pub fn everywhere(at: SocketAddr) -> EngineConfig {
    let mut config = online(at);
    for realm in &mut config.realms {
        realm.network = Some(policy("general", &["pages.test", "other.test"], at));
    }
    config
}

fn fetch(name: &str, at: SocketAddr) -> String {
    format!("fetch {name}:{}", at.port())
}

fn denials(notices: &mut tokio::sync::broadcast::Receiver<Notice>) -> Vec<Notice> {
    let all = std::iter::from_fn(|| notices.try_recv().ok());
    all.filter(|notice| notice.what == NoticeKind::Denied).collect()
}

async fn run_with(engine: &Engine, context: &str, code: &str, network: Network) -> Ran {
    let op = RunCode { network, ..RunCode::new(existing(context), code) };
    ran(engine.execute(&call(), Op::RunCode(op)).await)
}

#[tokio::test]
async fn what_the_policy_allows_goes_out_and_the_rest_is_told() {
    let (backend, at) = (FakeBackend::new(), pages().await);
    let engine = engine_with(&backend, everywhere(at)).await;
    let mut notices = engine.notices();
    let id = create(&engine, "c").await;
    let allowed = run(&engine, &id, &fetch("pages.test", at)).await;
    assert_eq!((text(&allowed.stdout), allowed.denied), ("200\n", vec![]));
    let denied = run(&engine, &id, "fetch evil.test\nfetch evil.test").await;
    assert_eq!(text(&denied.stdout), "403\n403\n");
    assert_eq!(denied.denied.len(), 1, "{:?}", denied.denied);
    assert!(denied.denied[0].contains("evil.test"), "{:?}", denied.denied);
    let command = ran(engine.execute(&call(), command_op(&id, "fetch worse.test\nenv HTTP_PROXY")).await);
    assert!(command.denied[0].contains("worse.test"), "{:?}", command.denied);
    assert_eq!(text(&command.stdout), "403\nhttp://127.0.0.1:3128\n");
    assert_eq!(run(&engine, &id, "print").await.denied, Vec::<String>::new(), "only its own");
    let told = denials(&mut notices);
    let facts = |notice: &Notice| (notice.tenant.0.clone(), notice.realm, notice.id.clone());
    assert_eq!(told.iter().map(facts).collect::<Vec<_>>(), vec![("local".into(), dialects::agentrun::REALM, id); 2]);
    assert!(told[0].detail.as_ref().unwrap().contains("evil.test"), "{told:?}");
    assert_eq!((engine.counts().denials, engine.counts().traffic.connections), (3, 4));
    assert!(engine.counts().traffic.bytes > 50, "{:?}", engine.counts().traffic);
    let kernel = backend.kernels().pop().unwrap();
    assert_eq!(kernel.env["HTTP_PROXY"], "http://127.0.0.1:3128");
    assert!(backend.specs().iter().all(|spec| spec.egress));
}

#[tokio::test]
async fn with_less_than_was_ordered_no_sandbox_is_made() {
    let (backend, at) = (FakeBackend::new(), pages().await);
    let engine = engine_with(&backend, everywhere(at)).await;
    backend.withhold_egress(true);
    let caller = call_in(dialects::sandpool::REALM);
    let refused = engine.execute(&caller, create_op("c")).await;
    let Err(EngineError::CreateFailed(why)) = refused else { panic!("{refused:?}") };
    assert_eq!(why, "the sandbox has no way out to the network; the server's log says why");
    eventually("nothing is left of it", || backend.living() == 3).await;
    backend.withhold_egress(false);
    created(engine.execute(&caller, create_op("c")).await);

    let without_proxy = EngineConfig { egress: None, ..everywhere(at) };
    let started = Engine::start(without_proxy, runtimes(), std::sync::Arc::new(FakeBackend::new())).await;
    assert!(started.is_err());
    let mut wrong = everywhere(at);
    for realm in &mut wrong.realms {
        realm.network = Some(policy("wrong", &["not a name"], at));
    }
    assert!(Engine::start(wrong, runtimes(), std::sync::Arc::new(FakeBackend::new())).await.is_err());
}

#[tokio::test]
async fn without_a_policy_there_is_no_way_out_and_the_setting_is_named() {
    let (backend, at) = (FakeBackend::new(), pages().await);
    let engine = engine_with(&backend, online(at)).await;
    let id = create(&engine, "c").await;
    for network in [Network::Usual, Network::Off] {
        assert_eq!(text(&run_with(&engine, &id, &fetch("pages.test", at), network).await.stdout), "nothing\n");
    }
    let op = RunCode { network: Network::On, ..RunCode::new(existing(&id), "print") };
    let refused = engine.execute(&call(), Op::RunCode(op)).await.unwrap_err().to_string();
    assert!(refused.contains("`network.default`") && refused.contains("`--network-allow`"), "{refused}");
    assert!(backend.specs().iter().all(|spec| !spec.egress));
    assert!(backend.kernels().iter().all(|kernel| !kernel.env.contains_key("HTTP_PROXY")));
}

#[tokio::test]
async fn a_run_without_network_closes_it_while_it_runs() {
    let (backend, at) = (FakeBackend::new(), pages().await);
    let engine = engine_with(&backend, everywhere(at)).await;
    let id = create(&engine, "c").await;
    let page = fetch("pages.test", at);
    let off = run_with(&engine, &id, &page, Network::Off).await;
    assert_eq!((text(&off.stdout), off.denied.len()), ("403\n", 1), "{:?}", off.denied);
    for network in [Network::Usual, Network::On] {
        assert_eq!(text(&run_with(&engine, &id, &page, network).await.stdout), "200\n");
    }
    // Whatever else is in the sandbox is closed in as well, until the run is over.
    let turned_away = async || {
        let mut denied = 0;
        for number in 0..backend.created() {
            let mut stream = TcpStream::connect(backend.egress(number).unwrap()).await.unwrap();
            let host = format!("pages.test:{}", at.port());
            let request = format!("GET http://{host}/ HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.unwrap();
            denied += usize::from(answer.starts_with("HTTP/1.1 403"));
        }
        denied
    };
    let caller = call();
    let op = RunCode { network: Network::Off, ..RunCode::new(existing(&id), "hang") };
    let running = spawn_op(&engine, &caller, Op::RunCode(op));
    begun(&backend, "hang").await;
    assert_eq!(turned_away().await, 1, "of this context, and of no other");
    caller.cancel.cancel();
    let ran = ran(running.await.unwrap());
    assert_eq!(ran.denied.len(), 1);
    assert_eq!(turned_away().await, 0);
}

#[tokio::test]
async fn the_way_out_closes_with_the_sandbox() {
    let (backend, at) = (FakeBackend::new(), pages().await);
    let engine = engine_with(&backend, everywhere(at)).await;
    let id = create(&engine, "c").await;
    run(&engine, &id, "print").await;
    let way_out = (0..backend.created()).map(|number| backend.egress(number).unwrap()).collect::<Vec<_>>();
    // However long the rest of the end takes.
    backend.hang_destroys(true);
    engine.execute(&call(), stop_op(&id)).await.unwrap();
    let is_closed = async |at: SocketAddr| TcpStream::connect(at).await.is_err();
    let mut closed = 0;
    for _ in 0..1000 {
        closed = 0;
        for at in &way_out {
            closed += usize::from(is_closed(*at).await);
        }
        if closed == 1 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(closed, 1, "that of the context, and of no other");
}

fn once(network: Network, code: &str) -> Op {
    Op::RunOnce(RunOnce {
        conversation: "talk".into(),
        language: Language::Python,
        code: code.into(),
        env: Environment::default(),
        network,
    })
}

#[tokio::test]
async fn a_conversation_has_a_network_only_in_the_calls_that_ask_for_it() {
    let (backend, at) = (FakeBackend::new(), pages().await);
    let engine = engine_with(&backend, everywhere(at)).await;
    let (caller, page) = (call_in(dialects::conversation::REALM), fetch("pages.test", at));
    let mut notices = engine.notices();
    // Twice each: the sandbox of the next call is made in advance when a conversation goes on.
    let calls = [Network::Usual, Network::On, Network::On, Network::Off, Network::Usual, Network::On];
    for network in calls.into_iter().chain(calls) {
        let call = ran(engine.execute(&caller, once(network, &page)).await);
        let expected = if network == Network::On { "200\n" } else { "nothing\n" };
        assert_eq!(text(&call.stdout), expected, "{network:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let denied = ran(engine.execute(&caller, once(Network::On, "fetch evil.test")).await);
    assert_eq!(denied.denied.len(), 1);
    let told = denials(&mut notices);
    assert_eq!((told.len(), told[0].id.as_str(), told[0].realm), (1, "talk", dialects::conversation::REALM));

    let engine = engine_with(&FakeBackend::new(), online(at)).await;
    let refused = engine.execute(&caller, once(Network::On, &page)).await;
    assert!(matches!(refused, Err(EngineError::NetworkOff(_))), "{refused:?}");
}

#[tokio::test]
async fn a_tenant_and_a_size_can_only_narrow_what_the_tool_set_gives() {
    let (backend, at) = (FakeBackend::new(), pages().await);
    let mut config = everywhere(at);
    let narrow = Tenant("narrow".into());
    let quota = Quota { network: Some(policy("theirs", &["other.test", "evil.test"], at)), ..Quota::default() };
    config.quotas.insert(narrow.clone(), quota);
    let realm = config.realm_mut(dialects::microsandbox::REALM).unwrap();
    realm.network_of.insert(Size::Small, policy("small", &["pages.test"], at));
    let engine = engine_with(&backend, config).await;
    let reached = async |tenant: &Tenant, realm: Realm, size: Option<Size>| {
        let caller = Call { realm, ..call_of(tenant) };
        let new = NewContext { size, ..NewContext::named("", Language::Python) };
        let target = Target { which: ContextSelector::New, make: Some(new) };
        let code: Vec<String> = ["pages.test", "other.test", "evil.test"].iter().map(|name| fetch(name, at)).collect();
        let ran = ran(engine.execute(&caller, Op::RunCode(RunCode::new(target, code.join("\n")))).await);
        ran.stdout.text.split_whitespace().map(|status| status == "200").collect::<Vec<bool>>()
    };
    let local = Tenant::local();
    assert_eq!(reached(&local, dialects::sandpool::REALM, None).await, [true, true, false]);
    assert_eq!(reached(&narrow, dialects::sandpool::REALM, None).await, [false, true, false]);
    assert_eq!(reached(&local, dialects::microsandbox::REALM, Some(Size::Large)).await, [true, true, false]);
    assert_eq!(
        reached(&local, dialects::microsandbox::REALM, None).await,
        [true, false, false],
        "small where none is named"
    );
    assert_eq!(reached(&narrow, dialects::microsandbox::REALM, Some(Size::Small)).await, [false, false, false]);
}

/// W28: a sandbox, and everything that is started in it, has the placeholders of its own tenant's secrets.
#[tokio::test]
async fn w28_a_sandbox_has_nothing_of_another_tenants_secrets() {
    let (backend, at) = (FakeBackend::new(), pages().await);
    let tenants = ["blue", "red"].map(|name| Tenant(name.into()));
    let secret = |tenant: &Tenant| Secret {
        name: format!("{}_KEY", tenant.0.to_uppercase()),
        hosts: vec![format!("{}-only.test", tenant.0)],
        header: "Authorization".into(),
        format: None,
        tenants: vec![tenant.0.clone()],
        value: Value::parse("a-very-secret-value".into()).unwrap(),
    };
    let secrets = tenants.iter().map(secret).collect();
    let egress = Egress::new(EgressConfig { secrets, ..EgressConfig::default() }).unwrap();
    let engine = engine_with(&backend, EngineConfig { egress: Some(egress), ..everywhere(at) }).await;
    for tenant in &tenants {
        let caller = Call { realm: dialects::sandpool::REALM, ..call_of(tenant) };
        let other = if tenant.0 == "blue" { "RED_KEY" } else { "BLUE_KEY" };
        let target = Target { which: ContextSelector::New, make: Some(NewContext::named("", Language::Python)) };
        let own = format!("{}_KEY", tenant.0.to_uppercase());
        let context = ran(engine.execute(&caller, Op::RunCode(RunCode::new(target, "print"))).await).context;
        let kernel = backend.kernels().into_iter().rfind(|kernel| kernel.env.contains_key(&own));
        assert!(!kernel.expect("its own").env.contains_key(other));
        ran(engine.execute(&caller, command_op(&context.id, "print")).await);
        let command = backend.environments().pop().unwrap();
        assert!(command.contains_key(&own) && !command.contains_key(other), "{command:?}");
    }
    for kernel in backend.kernels() {
        assert!(!(kernel.env.contains_key("BLUE_KEY") && kernel.env.contains_key("RED_KEY")), "{:?}", kernel.env);
    }
    // Each has an authority of its own, for its own hosts.
    let authority =
        |spec: &sandbox::SandboxSpec| spec.files.iter().find(|file| file.path.ends_with("authority.pem")).cloned();
    let authorities: std::collections::BTreeSet<Vec<u8>> =
        backend.specs().iter().filter_map(authority).map(|file| file.content.as_bytes().to_vec()).collect();
    assert_eq!(authorities.len(), 2);
}

#[tokio::test]
async fn a_flood_of_denials_floods_neither_the_result_nor_the_journal() {
    let (backend, at) = (FakeBackend::new(), pages().await);
    let engine = engine_with(&backend, everywhere(at)).await;
    let mut notices = engine.notices();
    let id = create(&engine, "c").await;
    let code: Vec<String> = (0..50).map(|n| format!("fetch evil{n}.test")).collect();
    let flood = run(&engine, &id, &code.join("\n")).await;
    assert_eq!(flood.denied.len(), 11);
    assert_eq!(flood.denied[10], "and 40 more that were not let out");
    assert_eq!((denials(&mut notices).len(), engine.counts().denials), (20, 50));
}

#[tokio::test]
async fn what_waits_ready_has_its_own_way_out() {
    let (backend, at) = (FakeBackend::new(), pages().await);
    let engine = engine_with(&backend, EngineConfig { ready_max: 64, ..everywhere(at) }).await;
    let mut notices = engine.notices();
    let caller = Call { realm: dialects::sandpool::REALM, ..call_of(&Tenant("blue".into())) };
    created(engine.execute(&caller, create_op("first")).await);
    let ready = || engine.counts().ready;
    eventually("one is ready", || ready().available == ready().wanted).await;
    backend.fail_next_creates(1000);
    let Ok(Outcome::Created(context)) = engine.execute(&caller, create_op("second")).await else { panic!() };
    let code = format!("{}\nfetch evil.test", fetch("pages.test", at));
    let ran = ran(engine.execute(&caller, run_op(&context.id, &code)).await);
    assert_eq!(text(&ran.stdout), "200\n403\n");
    let told = denials(&mut notices);
    assert_eq!((told[0].tenant.0.as_str(), &told[0].id), ("blue", &context.id));
}
