//! Conversations: a fresh interpreter for each call, files that stay.

use std::time::Duration;

use engine::op::{Environment, FileListing, FileOwner, Ran, RunOnce, RunOutcome};
use engine::{Call, Engine, EngineError, Op, Outcome, Tenant};
use proto::Language;
use testkit::fake::FakeBackend;

use crate::support::*;

fn caller() -> Call {
    call_in(dialects::conversation::REALM)
}

fn once(conversation: &str, code: &str) -> Op {
    Op::RunOnce(RunOnce {
        conversation: conversation.into(),
        language: Language::Python,
        code: code.into(),
        env: Environment::default(),
        network: engine::op::Network::Usual,
    })
}

async fn run_once(engine: &Engine, conversation: &str, code: &str) -> Ran {
    ran(engine.execute(&caller(), once(conversation, code)).await)
}

fn paths(files: &Option<FileListing>) -> Vec<&str> {
    files.as_ref().unwrap().entries.iter().map(|entry| entry.path.as_str()).collect()
}

#[tokio::test(start_paused = true)]
async fn files_stay_and_nothing_else_does() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let first =
        run_once(&engine, "c1", "set x 1\nwrite /data/a.txt hello\nwrite /data/b.txt two\nprint out\nerror err").await;
    assert_eq!((text(&first.stdout), text(&first.stderr)), ("out\nerr\n", ""), "in the order written");
    assert_eq!((paths(&first.files), first.context.id.as_str()), (vec!["b.txt", "a.txt"], "c1"), "newest first");
    assert_eq!(first.files.unwrap().key, first.context.key);
    let second = run_once(&engine, "c1", "read /data/a.txt\nget x").await;
    assert_eq!((text(&second.stdout), &second.end), ("hello", &RunOutcome::Error));
    assert_eq!(paths(&run_once(&engine, "c2", "print").await.files), Vec::<&str>::new(), "another has its own");
    eventually("each sandbox ended with its call", || backend.living() == 3).await;
    let kernel = backend.kernels().pop().unwrap();
    assert_eq!((kernel.cwd.as_str(), kernel.merge_output), ("/data", true));
    let spec = backend.specs().pop().unwrap();
    assert_eq!(spec.kept.unwrap().bytes, 512 << 20);
}

#[tokio::test(start_paused = true)]
async fn calls_of_one_conversation_go_one_after_the_other_and_those_of_others_do_not_wait() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let codes: Vec<String> = (0..5).map(|n| format!("write /data/f {n}\nsleep 100")).collect();
    let running: Vec<_> = codes.iter().map(|code| spawn_op(&engine, &caller(), once("c", code))).collect();
    let others: Vec<_> =
        (0..4).map(|n| spawn_op(&engine, &caller(), once(&format!("other{n}"), "sleep 100"))).collect();
    for run in running.into_iter().chain(others) {
        assert_eq!(ran(run.await.unwrap()).end, RunOutcome::Ok);
    }
    let of_c: Vec<String> = backend.runs().into_iter().filter(|code| code.starts_with("write")).collect();
    assert_eq!(of_c, codes);
    assert_eq!(backend.most_running(), 5);
}

#[tokio::test(start_paused = true)]
async fn the_environment_is_for_one_call_and_has_the_address_of_the_files() {
    let backend = FakeBackend::new();
    let config = with_realm(dialects::conversation::REALM, |realm| {
        realm.env.insert("FILE_BASE_URL".into(), "http://host/files/{key}".into());
    });
    let engine = engine_with(&backend, config).await;
    let mut op = once("c", "env FILE_BASE_URL\nenv TOKEN");
    let Op::RunOnce(run) = &mut op else { panic!() };
    run.env.0.insert("TOKEN".into(), "t".into());
    let with = ran(engine.execute(&caller(), op.clone()).await);
    assert_eq!(text(&with.stdout), format!("http://host/files/{}\nt\n", with.context.key));
    assert_eq!(text(&run_once(&engine, "c", "env TOKEN").await.stdout), "(none)\n");
    let Op::RunOnce(run) = &mut op else { panic!() };
    run.network = engine::op::Network::On;
    assert!(matches!(engine.execute(&caller(), op).await, Err(EngineError::NetworkOff(_))));
}

#[tokio::test(start_paused = true)]
async fn ends_are_honest_and_the_next_call_works() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let timed_out = run_once(&engine, "c", "write /data/kept x\nhang").await;
    assert_eq!(timed_out.end, RunOutcome::TimedOut { after: Duration::from_secs(30), state_kept: false });
    assert_eq!(paths(&timed_out.files), ["kept"]);
    assert!(matches!(run_once(&engine, "c", "die 11").await.end, RunOutcome::Ended { .. }));
    let lost = run_once(&engine, "c", "deaf").await;
    assert!(matches!(lost.end, RunOutcome::SandboxLost { .. }) && lost.files.is_none(), "{lost:?}");
    let cancelled = caller();
    let running = spawn_op(&engine, &cancelled, once("c", "hang up"));
    begun(&backend, "hang up").await;
    cancelled.cancel.cancel();
    assert_eq!(ran(running.await.unwrap()).end, RunOutcome::Cancelled { state_kept: false });
    assert_eq!(text(&run_once(&engine, "c", "read /data/kept").await.stdout), "x");
    eventually("nothing is left", || backend.living() == 3).await;
}

#[tokio::test(start_paused = true)]
async fn a_burst_of_file_operations_uses_one_sandbox_which_then_serves_code_or_goes() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let owner = FileOwner::Conversation("c".into());
    for n in 0..5 {
        let write = Op::WriteFile { owner: owner.clone(), path: format!("f{n}"), content: vec![n] };
        assert!(matches!(engine.execute(&caller(), write).await, Ok(Outcome::Written { size: 1, .. })));
    }
    let list = Op::ListFiles { owner: owner.clone(), path: String::new(), depth: None };
    let Ok(Outcome::Files(files)) = engine.execute(&caller(), list).await else { panic!() };
    assert_eq!((files.entries.len(), backend.created()), (5, 4), "one besides the pool");
    assert_eq!(paths(&run_once(&engine, "c", "print").await.files).len(), 5);
    assert_eq!(backend.created(), 4, "no code had run in it");
    let read = Op::ReadFile { owner, path: "f3".into() };
    let Ok(Outcome::File { content, .. }) = engine.execute(&caller(), read).await else { panic!() };
    assert_eq!((content, backend.created()), (vec![3], 5), "code had run in the other");
    eventually("it goes after a few seconds", || backend.living() == 3).await;
}

#[tokio::test(start_paused = true)]
async fn a_conversation_that_goes_on_finds_its_next_sandbox_made_and_none_is_used_twice() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    run_once(&engine, "once", "print").await;
    eventually("nothing is made for a conversation of one call", || backend.living() == 3).await;
    assert_eq!(backend.created(), 4);
    for n in 0..10 {
        let call = run_once(&engine, "c", "get x\nprint").await;
        assert_eq!(call.end, RunOutcome::Error, "a new interpreter");
        run_once(&engine, "c", &format!("set x 1\nwrite {n} 1\nwrite /data/{n} 1")).await;
        let call = run_once(&engine, "c", &format!("read /data/{n}\nread {n}")).await;
        assert_eq!((text(&call.stdout), call.end), ("1", RunOutcome::Error), "only what is kept");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert_eq!((backend.living(), backend.created()), (4, 4 + 30 + 1), "one a call, and the next");
    backend.fail_next_creates(1000);
    assert_eq!(run_once(&engine, "c", "print").await.end, RunOutcome::Ok, "it is there");
    backend.fail_next_creates(0);
    run_once(&engine, "c", "print").await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let mut javascript = once("c", "print js");
    let Op::RunOnce(run) = &mut javascript else { panic!() };
    run.language = Language::Javascript;
    assert_eq!(text(&ran(engine.execute(&caller(), javascript).await).stdout), "js\n", "also in another language");
    eventually("when it is over nothing is left", || backend.living() == 3).await;
}

#[tokio::test(start_paused = true)]
async fn ids_are_exact_bytes_of_bounded_length() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    for odd in ["../../etc", "a\0b", " ", "é", "e\u{301}", &"会".repeat(256)] {
        assert_eq!(paths(&run_once(&engine, odd, "write /data/mine 1").await.files), ["mine"], "{odd:?}");
    }
    for wrong in ["", &"x".repeat(1025)] {
        let refused = engine.execute(&caller(), once(wrong, "print")).await;
        assert!(matches!(refused, Err(EngineError::CreateFailed(_))), "{refused:?}");
    }
    let names: Vec<String> = backend.specs().into_iter().filter_map(|spec| spec.kept).map(|kept| kept.name).collect();
    assert!(names.iter().all(|name| name.len() == 64 && name.bytes().all(|b| b.is_ascii_hexdigit())));
    assert!(
        matches!(engine.execute(&call(), once("c", "print")).await, Err(EngineError::CreateFailed(_)),),
        "only where conversations are kept"
    );
}

#[tokio::test(start_paused = true)]
async fn files_nobody_used_for_long_are_deleted_at_the_start_and_later() {
    let backend = FakeBackend::new();
    backend.set_last_used(&"0".repeat(64), 1);
    let stays = Duration::from_secs(2 * 3600);
    let config = with_realm(dialects::conversation::REALM, |realm| realm.kept.as_mut().unwrap().stays = stays);
    let engine = engine_with(&backend, config).await;
    use sandbox::Backend as _;
    assert!(backend.kept().await.unwrap().is_empty(), "before the first call");
    let mut notices = engine.notices();
    let key = run_once(&engine, "c", "write /data/f 1").await.context.key;
    run_once(&engine, "young", "write /data/f 1").await;
    backend.set_last_used(&key, 1);
    tokio::time::sleep(stays / 2 + Duration::from_secs(60)).await;
    assert_eq!(backend.kept().await.unwrap().len(), 2, "used an hour ago, whatever the time of day became since (F08)");
    tokio::time::sleep(stays).await;
    let left: Vec<String> = backend.kept().await.unwrap().into_iter().map(|kept| kept.name).collect();
    assert_eq!(left.len(), 1);
    assert!(!left.contains(&key));
    let told: Vec<_> = std::iter::from_fn(|| notices.try_recv().ok()).map(|n| (n.id, n.what)).collect();
    assert_eq!(told, [("c".to_owned(), engine::op::NoticeKind::Expired)]);
    assert_eq!(paths(&run_once(&engine, "c", "print").await.files), Vec::<&str>::new());
}

#[tokio::test(start_paused = true)]
async fn files_that_another_server_has_are_told_as_in_use() {
    let backend = FakeBackend::new();
    let config = engine::EngineConfig { file_secret: [1; 32], ..config() };
    let (ours, theirs) = (engine_with(&backend, config.clone()).await, engine_with(&backend, config).await);
    let running = spawn_op(&theirs, &caller(), once("c", "hang"));
    begun(&backend, "hang").await;
    let refused = ours.execute(&caller(), once("c", "print")).await;
    assert!(matches!(refused, Err(EngineError::InUse(_))), "{refused:?}");
    running.abort();
}

#[tokio::test(start_paused = true)]
async fn sessions_that_could_not_serve_a_conversation_are_not_made() {
    let backend = FakeBackend::new();
    let mut config = with_realm(dialects::conversation::REALM, |realm| realm.pool_size = 3);
    config.pool_realm = dialects::conversation::REALM;
    let engine = engine_with(&backend, config).await;
    let health = health(&engine).await;
    assert_eq!((backend.created(), health.pool_size, health.pool_is_healthy), (0, 0, true));
    assert_eq!(run_once(&engine, "c", "print").await.end, RunOutcome::Ok);
}

#[tokio::test(start_paused = true)]
async fn a_conversation_belongs_to_its_tenant() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let stranger = Call { tenant: Tenant("stranger".into()), ..caller() };
    run_once(&engine, "c", "write /data/secret 1").await;
    let theirs = ran(engine.execute(&stranger, once("c", "read /data/secret")).await);
    assert_eq!((theirs.end, paths(&theirs.files)), (RunOutcome::Error, vec![]));
}

fn upload(conversation: String) -> Op {
    Op::WriteFile { owner: FileOwner::Conversation(conversation), path: "f".into(), content: vec![1] }
}

/// W53, the attack from the audit: a tenant that writes to many conversations at once takes the room of parked
/// sandboxes from nobody else, and its own calls displace each other's sandboxes instead of waiting for their end.
#[tokio::test(start_paused = true)]
async fn w53_a_flood_of_uploads_leaves_room_to_other_tenants() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    backend.slow_down(Duration::from_millis(200), Duration::from_millis(200));
    let of = |name: &str| Call { tenant: Tenant(name.into()), ..caller() };
    let flood =
        |name: &str| -> Vec<_> { (0..100).map(|n| spawn_op(&engine, &of(name), upload(format!("c{n}")))).collect() };
    let red = flood("red");
    tokio::time::sleep(Duration::from_millis(100)).await;
    let quick = Duration::from_secs(1);
    let blue = tokio::time::timeout(quick, engine.execute(&of("blue"), upload("c".into()))).await;
    let Ok(Ok(Outcome::Written { key, .. })) = blue else { panic!("{blue:?}") };
    for run in red {
        let written = tokio::time::timeout(Duration::from_secs(8), run).await.expect("it displaces its own").unwrap();
        assert!(matches!(written, Ok(Outcome::Written { .. })), "{written:?}");
    }
    // However many tenants do the same, all of them get on, and so do links.
    let floods: Vec<_> = ["a", "b", "c", "d", "e", "f", "g", "h"].into_iter().flat_map(flood).collect();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let green = tokio::time::timeout(quick * 5, engine.execute(&of("green"), upload("c".into()))).await;
    assert!(matches!(green, Ok(Ok(Outcome::Written { .. }))), "{green:?}");
    assert_eq!(tokio::time::timeout(quick * 5, engine.open_file(&key, "f")).await.unwrap().unwrap().size, 1);
    for run in floods {
        let written = run.await.unwrap();
        assert!(matches!(written, Ok(Outcome::Written { .. })), "{written:?}");
    }
    assert!(backend.living() <= 3 + 32, "{}", backend.living());
    eventually("they go after a few seconds", || backend.living() == 3).await;
}

#[tokio::test(start_paused = true)]
async fn the_operator_sees_and_stops_code_that_runs_in_a_conversation() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    run_once(&engine, "c", "write /data/a.txt hello").await;
    assert!(engine.contexts().await.is_empty(), "nothing runs");
    let hanging = spawn_op(&engine, &caller(), once("c", "sleep 3000"));
    begun(&backend, "sleep 3000").await;
    let all = engine.contexts().await;
    let shown: Vec<_> = all.iter().map(|view| (&view.tenant, view.realm, view.info.id.as_str(), view.runs)).collect();
    assert_eq!(shown, [(&Tenant::local(), dialects::conversation::REALM, "c", 1)]);
    assert!(all[0].has_sandbox && all[0].stats.is_some());
    let stop = |tenant: &str, id: &str| engine.stop_context(&Tenant(tenant.into()), dialects::conversation::REALM, id);
    assert_eq!(stop("local", "other"), Err(EngineError::ContextNotFound("other".into())));
    assert_eq!(stop("green", "c"), Err(EngineError::ContextNotFound("c".into())));
    stop("local", "c").unwrap();
    let stopped = ran(hanging.await.unwrap());
    assert!(matches!(stopped.end, RunOutcome::SandboxLost { .. }), "{:?}", stopped.end);
    assert!(engine.contexts().await.is_empty());
    assert_eq!(text(&run_once(&engine, "c", "read /data/a.txt").await.stdout), "hello", "its files stay");
}

/// W94: the sandbox behind the files of a conversation is metered, although no code runs in it.
#[tokio::test(start_paused = true)]
async fn w94_a_sandbox_for_the_files_of_a_conversation_is_metered() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    backend.set_cpu_usec(700);
    let blue = Tenant("blue".into());
    let of_blue = Call { tenant: blue.clone(), ..caller() };
    engine.execute(&of_blue, upload("c".into())).await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let used = engine.take_usage().await;
    assert_eq!(used.get(&blue).and_then(|used| used.cpu_usec), Some(700), "{used:?}");
}
