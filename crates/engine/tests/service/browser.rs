//! The browser of a context: one, in order, beside the code, and there again whatever happened to it.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use engine::op::browser::{BrowseFailure, BrowseResult, BrowserAction as Ask, SnapshotAsk};
use engine::op::{
    Browse, Browsed, ContextSelector, Network, NewContext, NoticeKind, Realm, RunCode, RunOutcome, Target,
};
use engine::{BrowserCommand, Browsers, Call, Engine, EngineConfig, EngineError, Op, Outcome, Runtimes};
use proto::{FromGuest, Language, ToGuest};
use testkit::fake::FakeBackend;
use tokio::time::Instant;

use crate::network::{everywhere, pages};
use crate::support::*;

const RESTARTED: &str = "[the browser was restarted: pages and logins are gone]";

fn with_browser() -> Runtimes {
    let browser = BrowserCommand {
        label: "chromium-1".into(),
        program: PathBuf::from("/opt/chromium/shell"),
        shell: true,
        fontconfig: None,
        binds: vec!["/opt/chromium".into()],
    };
    Runtimes { browser: Some(browser), ..runtimes() }
}

async fn browsing_with(backend: &FakeBackend, config: EngineConfig) -> Engine {
    Engine::start(config, with_browser(), Arc::new(backend.clone())).await.expect("the engine starts")
}

async fn browsing(backend: &FakeBackend) -> Engine {
    browsing_with(backend, EngineConfig { pool_realm: dialects::sandpool::REALM, ..config() }).await
}

fn caller() -> Call {
    call_in(dialects::sandpool::REALM)
}

fn make(name: &str) -> Target {
    let make = Some(NewContext::named(name, Language::Python));
    Target { which: ContextSelector::Named(name.into()), make }
}

fn ask(context: &str, ask: Ask) -> Op {
    Op::Browse(Browse { target: make(context), ask, uploads: Vec::new(), changes: 0, timeout: Duration::from_secs(30) })
}

fn open(context: &str, url: &str) -> Op {
    ask(context, Ask::Open { url: url.into() })
}

fn browsed(result: Result<Outcome, EngineError>) -> Browsed {
    match result {
        Ok(Outcome::Browsed(browsed)) => *browsed,
        other => panic!("did not browse: {other:?}"),
    }
}

async fn go(engine: &Engine, context: &str, url: &str) -> Browsed {
    browsed(engine.execute(&caller(), open(context, url)).await)
}

fn failure(browsed: &Browsed) -> (BrowseFailure, &str) {
    let error = browsed.result.as_ref().expect_err("it failed");
    (error.why, &error.message)
}

async fn opened(backend: &FakeBackend, url: &str) {
    let asked = Ask::Open { url: url.into() };
    eventually("the page is asked for", || backend.browsed().contains(&asked)).await;
}

#[tokio::test(start_paused = true)]
async fn however_many_ask_there_is_one_browser_and_it_is_asked_in_their_order() {
    let backend = FakeBackend::new();
    backend.slow_browsers(Duration::from_secs(1));
    let engine = browsing(&backend).await;
    let urls: Vec<String> = (0..8).map(|n| format!("http://page/{n}")).collect();
    let calls: Vec<_> = urls.iter().map(|url| spawn_op(&engine, &caller(), open("c", url))).collect();
    let mut created = 0;
    for (call, url) in calls.into_iter().zip(&urls) {
        let browsed = browsed(call.await.unwrap());
        created += usize::from(browsed.created);
        let page = browsed.page.unwrap();
        assert_eq!((&page.url, browsed.result, browsed.notice), (url, Ok(BrowseResult::Done), None));
    }
    let asked: Vec<Ask> = urls.into_iter().map(|url| Ask::Open { url }).collect();
    assert_eq!((backend.browsed(), backend.browsers().len(), created), (asked, 1, 1));
    assert_eq!(engine.counts().browsers, Browsers { running: 1, started: 1, died: 0 });
    let started = &backend.browsers()[0];
    assert_eq!((started.program.as_str(), started.shell, &started.proxy), ("/opt/chromium/shell", true, &None));
    assert_eq!((started.home.as_str(), started.downloads.as_str()), ("/browser", "/workspace/downloads"));
    let spec = backend.specs().pop().unwrap();
    assert!(spec.browser.is_some() && spec.runtime.contains(&"/opt/chromium".into()), "{spec:?}");
}

#[tokio::test(start_paused = true)]
async fn code_and_browser_work_side_by_side() {
    let backend = FakeBackend::new();
    let engine = browsing(&backend).await;
    go(&engine, "c", "http://page/").await;
    let running = spawn_op(&engine, &caller(), run_op("c", "sleep 20000\nprint served"));
    begun(&backend, "sleep 20000\nprint served").await;
    let (before, page) = (Instant::now(), go(&engine, "c", "http://127.0.0.1:8000/").await);
    assert!(page.result.is_ok() && page.context.busy && before.elapsed() < Duration::from_secs(1));
    let slow = spawn_op(&engine, &caller(), open("c", "fake:sleep 25000"));
    opened(&backend, "fake:sleep 25000").await;
    assert_eq!(ran(running.await.unwrap()).end, RunOutcome::Ok);
    assert!(!slow.is_finished());
    assert!(browsed(slow.await.unwrap()).result.is_ok());
    assert_eq!(backend.created(), 4, "one of the pool's, which is replaced");
}

#[tokio::test(start_paused = true)]
async fn a_browser_that_dies_is_told_and_started_again() {
    let backend = FakeBackend::new();
    let engine = browsing(&backend).await;
    go(&engine, "c", "http://page/").await;
    let mut notices = engine.notices();
    let crashed = go(&engine, "c", "fake:crash").await;
    assert_eq!(
        failure(&crashed),
        (
            BrowseFailure::NoBrowser,
            "the browser is gone: the browser ended with signal 9; the next call starts another"
        )
    );
    let next = go(&engine, "c", "http://page/2").await;
    assert_eq!((next.result.is_ok(), next.notice.as_deref()), (true, Some(RESTARTED)));
    assert_eq!(go(&engine, "c", "http://page/3").await.notice, None, "told once");

    assert!(go(&engine, "c", "fake:exit").await.result.is_ok());
    eventually("its end is heard of", || engine.counts().browsers.running == 0).await;
    assert_eq!(go(&engine, "c", "http://page/4").await.notice.as_deref(), Some(RESTARTED));

    backend.set_oom_kills(7);
    backend.set_browser_oom_kills(1);
    let (why, message) = (go(&engine, "c", "fake:crash").await, "was killed for memory");
    assert!(failure(&why).1.contains(message), "{why:?}");
    go(&engine, "c", "http://page/5").await;
    backend.set_oom_kills(8);
    let crashed = go(&engine, "c", "fake:crash").await;
    assert!(!failure(&crashed).1.contains(message), "those were the one before and the code: {crashed:?}");
    let told: Vec<_> = std::iter::from_fn(|| notices.try_recv().ok()).map(|n| (n.what, n.detail.unwrap())).collect();
    assert_eq!(told.len(), 4, "{told:?}");
    assert!(told.iter().all(|(what, _)| *what == NoticeKind::BrowserDied), "{told:?}");
    assert_eq!(engine.counts().browsers, Browsers { running: 0, started: 4, died: 4 });
    assert_eq!(backend.living(), 3, "the sandbox stayed");
}

#[tokio::test(start_paused = true)]
async fn deadlines_come_from_the_inside_out() {
    let backend = FakeBackend::new();
    let engine = browsing(&backend).await;
    let began = Instant::now();
    let slow = go(&engine, "c", "fake:hang").await;
    assert_eq!((failure(&slow), began.elapsed().as_secs()), ((BrowseFailure::TimedOut, "timed out"), 30));
    assert_eq!(go(&engine, "c", "http://page/").await.notice, None, "it is still the same browser");
    let began = Instant::now();
    let deaf = go(&engine, "c", "fake:deaf").await;
    assert_eq!((failure(&deaf).0, began.elapsed().as_secs()), (BrowseFailure::TimedOut, 35));
    let next = go(&engine, "c", "http://page/").await;
    assert_eq!((next.result.is_ok(), next.notice.as_deref(), backend.browsers().len()), (true, Some(RESTARTED), 2));
    let op = Browse {
        target: make("c"),
        ask: Ask::Open { url: "fake:hang".into() },
        uploads: Vec::new(),
        changes: 0,
        timeout: Duration::MAX,
    };
    let began = Instant::now();
    browsed(engine.execute(&caller(), Op::Browse(op)).await);
    assert_eq!(began.elapsed().as_secs(), 1800, "no longer than a run may ask for");
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_call_ends_whether_the_browser_hears_of_it_or_not() {
    let backend = FakeBackend::new();
    let engine = browsing(&backend).await;
    for (url, started) in [("fake:hang", 1), ("fake:deaf", 2)] {
        let caller = caller();
        let running = spawn_op(&engine, &caller, open("c", url));
        opened(&backend, url).await;
        let began = Instant::now();
        caller.cancel.cancel();
        assert_eq!(failure(&browsed(running.await.unwrap())).0, BrowseFailure::Cancelled);
        assert!(began.elapsed() <= Duration::from_secs(5));
        assert!(go(&engine, "c", "http://page/").await.result.is_ok());
        assert_eq!(backend.browsers().len(), started);
    }
    backend.slow_browsers(Duration::from_secs(20));
    let starting = caller();
    let call = spawn_op(&engine, &starting, open("other", "http://page/"));
    eventually("it is started", || engine.counts().runs == 1).await;
    let began = Instant::now();
    starting.cancel.cancel();
    assert_eq!(call.await.unwrap(), Err(EngineError::Cancelled));
    assert!(began.elapsed() < Duration::from_secs(1));
    backend.slow_browsers(Duration::ZERO);
    assert!(go(&engine, "other", "http://page/").await.result.is_ok());

    let (first, waiting) = (spawn_op(&engine, &caller(), open("c", "fake:hang")), caller());
    opened(&backend, "fake:hang").await;
    let second = spawn_op(&engine, &waiting, open("c", "http://never/"));
    tokio::time::sleep(Duration::from_millis(10)).await;
    waiting.cancel.cancel();
    assert_eq!(second.await.unwrap(), Err(EngineError::Cancelled));
    first.await.unwrap().unwrap();
    assert!(!backend.browsed().contains(&Ask::Open { url: "http://never/".into() }));
}

#[tokio::test(start_paused = true)]
async fn a_browser_that_was_taken_over_is_believed_nothing_and_costs_nothing() {
    let backend = FakeBackend::new();
    let engine = browsing(&backend).await;
    assert_eq!(failure(&go(&engine, "c", "fake:lie").await).0, BrowseFailure::Crashed);
    let loud = go(&engine, "c", "fake:shout").await;
    let page = loud.page.unwrap();
    assert_eq!((page.url.chars().count(), page.title.chars().count(), loud.happened.len()), (2048, 500, 50));
    let long = format!("{:?}", loud.happened);
    assert!(long.len() < 150_000 && !long.contains("\\u{1b}"));
    let snapshot = Ask::Snapshot(SnapshotAsk { max_chars: 10, ..SnapshotAsk::default() });
    let Ok(BrowseResult::Snapshot(shown)) = browsed(engine.execute(&caller(), ask("c", snapshot)).await).result else {
        panic!("no snapshot")
    };
    assert!(shown.text.chars().count() <= 1010);
    assert_eq!(backend.living(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_answers_something_else_loses_its_sandbox() {
    let backend = FakeBackend::scripted(|call, request, wire| {
        let wire = wire.clone();
        match request {
            ToGuest::Browse { ask: Ask::Back, .. } => Some(Box::pin(async move {
                wire.send(call, &FromGuest::Written { size: 1 }).await;
            })),
            _ => None,
        }
    });
    let engine = browsing(&backend).await;
    go(&engine, "c", "http://page/").await;
    let lost = browsed(engine.execute(&caller(), ask("c", Ask::Back)).await);
    assert!(failure(&lost).1.contains("the sandbox was lost"), "{lost:?}");
    let next = go(&engine, "c", "http://page/").await;
    assert!(next.notice.as_deref().unwrap().contains("files, pages and logins are gone"), "{next:?}");
    assert_eq!(go(&engine, "c", "http://page/").await.notice, None);
    let code = ran(engine.execute(&caller(), run_op("c", "print")).await);
    assert!(code.notice.unwrap().contains("variables and files are gone"), "code is told for itself");
}

#[tokio::test(start_paused = true)]
async fn where_there_is_no_browser_what_to_do_is_said() {
    let backend = FakeBackend::new();
    let without = engine_with(&backend, config()).await;
    let refused = without.execute(&caller(), open("c", "http://page/")).await.unwrap_err().to_string();
    assert!(refused.contains("apt install chromium-headless-shell"), "{refused}");
    let spec = backend.specs().pop().unwrap();
    assert_eq!(spec.browser, None, "no room for what is not there");
    let engine = browsing(&backend).await;
    let refused = engine.execute(&call(), open("c", "http://page/")).await.unwrap_err().to_string();
    assert_eq!(refused, "no browser: sandboxes of `agentrun` have none");

    backend.fail_next_browsers(2);
    let refused = engine.execute(&caller(), open("c", "http://page/")).await.unwrap_err().to_string();
    assert_eq!(refused, "no browser: it did not start; the server's log says why");
    let next = go(&engine, "c", "http://page/").await;
    assert_eq!((next.result.is_ok(), next.created, next.notice), (true, true, None), "nothing was lost");
    backend.fail_next_browsers(2);
    let target = Target { which: ContextSelector::New, ..make("") };
    let op = Browse { target, ask: Ask::Back, uploads: Vec::new(), changes: 0, timeout: Duration::from_secs(1) };
    engine.execute(&caller(), Op::Browse(op)).await.unwrap_err();
    assert_eq!(engine.counts().contexts[&dialects::sandpool::REALM], 1, "what was made for it alone is gone");
}

#[tokio::test(start_paused = true)]
async fn a_browser_that_ends_at_its_start_is_started_once_more() {
    let backend = FakeBackend::new();
    let engine = browsing(&backend).await;
    backend.fail_next_browsers(1);
    let opened = go(&engine, "c", "http://page/").await;
    assert_eq!((opened.result.is_ok(), opened.notice), (true, None));
}

#[tokio::test(start_paused = true)]
async fn only_files_of_the_context_are_uploaded() {
    let backend = FakeBackend::new();
    let engine = browsing(&backend).await;
    go(&engine, "c", "http://page/").await;
    let upload = |paths: &[&str]| {
        let asked = Ask::Upload { at: "ref_1".into(), files: paths.iter().map(|&path| path.into()).collect() };
        let uploads = paths.iter().map(|&path| path.into()).collect();
        Op::Browse(Browse { target: make("c"), ask: asked, uploads, changes: 0, timeout: Duration::from_secs(5) })
    };
    let missing = engine.execute(&caller(), upload(&["a.txt", "b.txt"])).await;
    assert_eq!(missing, Err(EngineError::FileNotFound("a.txt, b.txt".into())));
    ran(engine.execute(&caller(), run_op("c", "write a.txt 1")).await);
    assert!(browsed(engine.execute(&caller(), upload(&["a.txt"])).await).result.is_ok());
    let odd = engine.execute(&caller(), upload(&["a\0b"])).await;
    assert!(matches!(odd, Err(EngineError::InvalidPath { .. })), "{odd:?}");
    let many = engine.execute(&caller(), upload(&["a.txt"; 101])).await;
    assert!(matches!(many, Err(EngineError::OverLimit { .. })), "{many:?}");
}

#[tokio::test(start_paused = true)]
async fn a_stop_waits_for_the_browser_and_those_behind_give_up() {
    let backend = FakeBackend::new();
    let mut config = EngineConfig { pool_realm: dialects::sandpool::REALM, ..config() };
    config.realms.iter_mut().for_each(|realm| realm.stop_ends_runs = false);
    let engine = browsing_with(&backend, config).await;
    go(&engine, "c", "http://page/").await;
    let first = spawn_op(&engine, &caller(), open("c", "fake:sleep 3000"));
    opened(&backend, "fake:sleep 3000").await;
    let target = Target::existing(ContextSelector::Named("c".into()));
    let op = Browse { target, ask: Ask::Back, uploads: Vec::new(), changes: 0, timeout: Duration::from_secs(1) };
    let second = spawn_op(&engine, &caller(), Op::Browse(op));
    tokio::time::sleep(Duration::from_millis(10)).await;
    let stopping = spawn_op(&engine, &caller(), stop_op("c"));
    assert!(matches!(second.await.unwrap(), Err(EngineError::ContextNotFound(_))));
    assert!(browsed(first.await.unwrap()).result.is_ok());
    stopping.await.unwrap().unwrap();
    eventually("its sandbox goes", || backend.living() == 3).await;
    assert_eq!(engine.counts().browsers.running, 0);
}

#[tokio::test(start_paused = true)]
async fn calls_in_browsers_count_among_the_runs_of_a_tenant() {
    let backend = FakeBackend::new();
    let mut config = EngineConfig { pool_realm: dialects::sandpool::REALM, ..config() };
    config.realm_mut(dialects::sandpool::REALM).unwrap().runs_at_once = 2;
    let engine = browsing_with(&backend, config).await;
    let calls: Vec<_> =
        ["a", "b", "c"].map(|name| spawn_op(&engine, &caller(), open(name, "fake:sleep 1000"))).into_iter().collect();
    eventually("two of them run", || backend.browsed().len() == 2).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!((backend.browsed().len(), engine.counts().runs), (2, 2));
    for call in calls {
        assert!(browsed(call.await.unwrap()).result.is_ok());
    }
}

#[tokio::test]
async fn a_page_that_is_not_let_out_says_so_also_while_a_run_has_closed_the_way() {
    let (backend, at) = (FakeBackend::new(), pages().await);
    let engine =
        browsing_with(&backend, EngineConfig { pool_realm: dialects::sandpool::REALM, ..everywhere(at) }).await;
    let mut notices = engine.notices();
    let page = format!("fake:fetch pages.test:{}", at.port());
    assert!(go(&engine, "c", &page).await.result.is_ok());
    assert_eq!(backend.browsers()[0].proxy.as_deref(), Some("127.0.0.1:3128"));
    let denied = go(&engine, "c", "fake:fetch evil.test").await;
    let (why, message) = failure(&denied);
    assert!(why == BrowseFailure::Navigation && message.starts_with(&denied.denied[0]), "{denied:?}");
    assert!(message.contains("evil.test") && message.ends_with("(net::ERR_TUNNEL_CONNECTION_FAILED)"), "{message}");

    let running = caller();
    let op = RunCode { network: Network::Off, ..RunCode::new(existing("c"), "hang") };
    let run = spawn_op(&engine, &running, Op::RunCode(op));
    begun(&backend, "hang").await;
    let closed = go(&engine, "c", &page).await;
    assert_eq!((failure(&closed).0, closed.denied.len()), (BrowseFailure::Navigation, 1));
    running.cancel.cancel();
    ran(run.await.unwrap());
    assert!(go(&engine, "c", &page).await.result.is_ok());
    let told = std::iter::from_fn(|| notices.try_recv().ok()).filter(|notice| notice.what == NoticeKind::Denied);
    assert_eq!(told.map(|notice| notice.id).collect::<Vec<_>>(), vec![denied.context.id; 2]);
}

/// With a stock that follows demand.
async fn adapting(backend: &FakeBackend, realm: Realm, browsers_ready: usize) -> Engine {
    let mut config = EngineConfig { pool_realm: realm, refills_at_once: 1, ..usual() };
    config.realm_mut(realm).unwrap().browsers_ready = browsers_ready;
    let engine = browsing_with(backend, config).await;
    full(&engine).await;
    engine
}

async fn full(engine: &Engine) {
    let ready = || engine.counts().ready;
    eventually("as many are ready as are wanted", || ready().available == ready().wanted).await;
}

#[tokio::test(start_paused = true)]
async fn where_contexts_are_made_for_their_browser_one_waits_from_the_start() {
    let backend = FakeBackend::new();
    let engine = adapting(&backend, dialects::workbench::REALM, 1).await;
    assert_eq!((backend.browsers().len(), engine.counts().browsers.running), (1, 1));
    let caller = call_in(dialects::workbench::REALM);
    backend.fail_next_creates(1000);
    backend.fail_next_browsers(1000);
    let new = NewContext { browser: true, ..NewContext::named("", Language::Python) };
    let id = created(engine.execute(&caller, Op::CreateContext(new.clone())).await).id;
    let target = Target::existing(ContextSelector::Id(id.clone()));
    let op = |target| Browse {
        target,
        ask: Ask::Open { url: "http://page/".into() },
        uploads: Vec::new(),
        changes: 0,
        timeout: Duration::from_secs(5),
    };
    let first = browsed(engine.execute(&caller, Op::Browse(op(target.clone()))).await);
    assert_eq!((first.result.is_ok(), first.notice), (true, None));
    let code = ran(engine.execute(&caller, Op::RunCode(engine::op::RunCode::new(target, "print 1"))).await);
    assert_eq!(text(&code.stdout), "1\n", "with the interpreter that waited along");
    backend.fail_next_browsers(0);
    let plain = created(engine.execute(&caller, Op::CreateContext(new)).await);
    assert_ne!(plain.id, id, "with none left, one without a browser serves");
    eventually("and is given one meanwhile", || engine.counts().browsers.running == 2).await;

    backend.fail_next_creates(0);
    full(&engine).await;
    assert_eq!(engine.counts().browsers.running, 3, "two in use, one ready");
    backend.kill(backend.created() - 1);
    full(&engine).await;
    eventually("one that dies is replaced", || engine.counts().browsers.running == 3).await;
}

#[tokio::test(start_paused = true)]
async fn a_tenant_that_uses_browsers_finds_one_ready_but_no_more_than_allowed() {
    let backend = FakeBackend::new();
    let engine = adapting(&backend, dialects::sandpool::REALM, 2).await;
    assert_eq!(backend.browsers().len(), 0, "nobody has asked for one");
    let calls: Vec<_> = (0..10).map(|n| spawn_op(&engine, &caller(), open(&format!("c{n}"), "http://page/"))).collect();
    for call in calls {
        assert!(browsed(call.await.unwrap()).result.is_ok());
    }
    full(&engine).await;
    assert_eq!(engine.counts().browsers.running, 10 + 2);
    backend.fail_next_browsers(1000);
    for name in ["x", "y"] {
        assert!(go(&engine, name, "http://page/").await.result.is_ok(), "it was there");
    }
    backend.fail_next_browsers(0);
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(engine.counts().browsers.running, 12, "without demand none waits");
}
