//! Which context a call means, and contexts made on demand.

use std::collections::BTreeSet;
use std::time::Duration;

use engine::op::{ContextSelector, NewContext, Ran, RunCode, RunOutcome, Size, StoppedContext, Target};
use engine::{Call, Engine, EngineError, Op, Outcome};
use proto::Language;
use testkit::fake::FakeBackend;

use crate::support::*;

fn session() -> Call {
    call_in(dialects::microsandbox::REALM)
}

fn on_demand(which: ContextSelector) -> Target {
    Target { which, make: Some(NewContext::named("", Language::Python)) }
}

fn run_in(which: ContextSelector, code: &str) -> Op {
    Op::RunCode(RunCode::new(on_demand(which), code))
}

async fn run_session(engine: &Engine, which: ContextSelector, code: &str) -> Ran {
    ran(engine.execute(&session(), run_in(which, code)).await)
}

#[tokio::test(start_paused = true)]
async fn a_context_made_on_demand_has_the_chosen_id_and_says_that_it_is_new() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let first = run_session(&engine, ContextSelector::Id("mine".into()), "set x 1").await;
    assert_eq!((first.context.id.as_str(), first.created, first.context.busy), ("mine", true, false));
    let second = run_session(&engine, ContextSelector::Id("mine".into()), "get x").await;
    assert_eq!((text(&second.stdout), second.created), ("1\n", false));
    let (a, b) = (
        run_session(&engine, ContextSelector::New, "print").await,
        run_session(&engine, ContextSelector::New, "print").await,
    );
    assert!(a.created && b.created && a.context.id != b.context.id);
    assert!(a.context.id.starts_with("session-"), "{}", a.context.id);
    let missing = Op::RunCode(RunCode::new(Target::existing(ContextSelector::Id("other".into())), "print"));
    assert_eq!(engine.execute(&session(), missing).await, Err(EngineError::ContextNotFound("other".into())));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn however_many_ask_for_it_at_once_it_is_made_once_and_they_run_in_their_order() {
    for _ in 0..20 {
        let backend = FakeBackend::new();
        let engine = engine(&backend).await;
        let caller = session();
        let codes: Vec<String> = (0..20).map(|n| format!("print {n}")).collect();
        let mut running: Vec<_> = codes
            .iter()
            .map(|code| Box::pin(engine.execute(&caller, run_in(ContextSelector::Id("one".into()), code))))
            .collect();
        let mut created = 0;
        std::future::poll_fn(|cx| {
            running.retain_mut(|run| match run.as_mut().poll(cx) {
                std::task::Poll::Pending => true,
                std::task::Poll::Ready(result) => {
                    created += usize::from(ran(result).created);
                    false
                }
            });
            if running.is_empty() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
        })
        .await;
        assert_eq!(created, 1);
        let cells: Vec<String> = backend.runs().into_iter().filter(|code| code != "pass").collect();
        assert_eq!(cells, codes);
        assert_eq!(engine.sandboxes(), 4);
    }
}

#[tokio::test(start_paused = true)]
async fn when_it_cannot_be_made_the_next_who_waits_tries_again() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    backend.fail_next_creates(1);
    let caller = session();
    let (first, second) = tokio::join!(
        engine.execute(&caller, run_in(ContextSelector::Id("one".into()), "print 1")),
        engine.execute(&caller, run_in(ContextSelector::Id("one".into()), "print 2")),
    );
    assert!(matches!(first, Err(EngineError::CreateFailed(_))), "{first:?}");
    assert_eq!(text(&ran(second).stdout), "2\n");
}

/// An expired session that was made anew by a call without an answer must not look like the one that was there before.
#[tokio::test(start_paused = true)]
async fn what_a_failed_call_made_is_told_as_new_by_the_next_and_only_once() {
    let backend = FakeBackend::new();
    let config = with_realm(dialects::microsandbox::REALM, |realm| realm.runs_at_once = 1);
    let engine = engine_with(&backend, config).await;
    let mine = |code: &str| run_in(ContextSelector::Id("mine".into()), code);
    let busy = spawn_op(&engine, &session(), run_in(ContextSelector::Id("other".into()), "sleep 90000"));
    begun(&backend, "sleep 90000").await;
    assert!(matches!(engine.execute(&session(), mine("print 1")).await, Err(EngineError::Busy(_))));
    assert!(matches!(
        engine.execute(&session(), run_in(ContextSelector::New, "print")).await,
        Err(EngineError::Busy(_))
    ));
    let Ok(Outcome::Contexts(all)) = engine.execute(&session(), Op::ListContexts).await else { panic!() };
    let ids: Vec<&str> = all.iter().map(|context| context.id.as_str()).collect();
    assert_eq!(ids, ["mine", "other"], "one whose id nobody learned is not left");
    let cancelled = session();
    let waiting = spawn_op(&engine, &cancelled, mine("print 2"));
    tokio::time::sleep(Duration::from_secs(5)).await;
    cancelled.cancel.cancel();
    assert_eq!(waiting.await.unwrap(), Err(EngineError::Cancelled));
    assert_eq!(ran(busy.await.unwrap()).end, RunOutcome::Ok);
    let told: Vec<bool> = vec![
        ran(engine.execute(&session(), mine("print 3")).await).created,
        ran(engine.execute(&session(), mine("print 4")).await).created,
    ];
    assert_eq!(told, [true, false]);
}

#[tokio::test(start_paused = true)]
async fn the_current_context_is_the_connections_own_or_the_tenants_only_one() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let of = |connection: &str| Call { connection: Some(connection.into()), ..call_in(dialects::workbench::REALM) };
    let nobody = call_in(dialects::workbench::REALM);
    let current = |code: &str| Op::RunCode(RunCode::new(Target::existing(ContextSelector::Current), code));
    let make = Op::CreateContext(NewContext::named("", Language::Python));
    assert_eq!(engine.execute(&of("a"), current("print")).await, Err(EngineError::NoCurrent { ids: vec![] }));
    let a = created(engine.execute(&of("a"), make.clone()).await).id;
    assert!(a.starts_with("sbx-"), "{a}");
    assert_eq!(ran(engine.execute(&nobody, current("print")).await).context.id, a, "the only one");
    let b = created(engine.execute(&of("b"), make.clone()).await).id;
    assert_eq!(ran(engine.execute(&of("a"), current("print")).await).context.id, a);
    assert_eq!(ran(engine.execute(&of("b"), current("print")).await).context.id, b);
    let several = engine.execute(&nobody, current("print")).await;
    assert_eq!(several, Err(EngineError::NoCurrent { ids: vec![b.clone(), a.clone()] }));
    let stopped = engine.execute(&of("b"), Op::StopContext { which: ContextSelector::Current }).await;
    assert_eq!(stopped, Ok(Outcome::Stopped(StoppedContext { context_id: b, ..StoppedContext::default() })));
    let none = engine.execute(&of("b"), current("print")).await;
    assert_eq!(none, Err(EngineError::NoCurrent { ids: vec![] }), "another connection's is not touched");
    let none = engine.execute(&of("b"), Op::StopContext { which: ContextSelector::Current }).await;
    assert_eq!(none, Err(EngineError::NoCurrent { ids: vec![] }));
}

#[tokio::test(start_paused = true)]
async fn a_second_one_of_the_same_connection_replaces_the_first_and_says_so() {
    let backend = FakeBackend::new();
    let mut config = with_realm(dialects::workbench::REALM, |realm| realm.max_contexts = 1);
    config.quota.contexts = Some(1);
    let engine = engine_with(&backend, config).await;
    let caller = Call { connection: Some("a".into()), ..call_in(dialects::workbench::REALM) };
    let make = Op::CreateContext(NewContext { replace: true, ..NewContext::named("", Language::Python) });
    let first = created(engine.execute(&caller, make.clone()).await).id;
    let Ok(Outcome::Replaced { context, old }) = engine.execute(&caller, make.clone()).await else { panic!() };
    assert!(old == first && context.id != first);
    let Ok(Outcome::Contexts(all)) = engine.execute(&caller, Op::ListContexts).await else { panic!() };
    assert_eq!(all.iter().map(|c| c.id.as_str()).collect::<Vec<_>>(), [context.id.as_str()]);
    eventually("the old sandbox is gone", || engine.sandboxes() == 4).await;
}

#[tokio::test(start_paused = true)]
async fn one_with_the_same_id_replaces_it_too_and_of_many_at_once_one_is_left() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let caller = Call { connection: Some("a".into()), ..call_in(dialects::workbench::REALM) };
    let make = |id: Option<&str>| {
        let id = id.map(str::to_owned);
        Op::CreateContext(NewContext { id, replace: true, ..NewContext::named("", Language::Python) })
    };
    created(engine.execute(&caller, make(Some("x"))).await);
    let run = |code: &str| run_in(ContextSelector::Current, code);
    assert_eq!(ran(engine.execute(&caller, run("set v 1")).await).end, RunOutcome::Ok);
    let Ok(Outcome::Replaced { context, old }) = engine.execute(&caller, make(Some("x"))).await else { panic!() };
    assert_eq!((context.id.as_str(), old.as_str()), ("x", "x"));
    assert_eq!(ran(engine.execute(&caller, run("get v")).await).end, RunOutcome::Error, "a new one");
    let other = Call { connection: Some("b".into()), ..caller.clone() };
    let taken = engine.execute(&other, make(Some("x"))).await;
    assert!(matches!(taken, Err(EngineError::CreateFailed(_))), "{taken:?}");

    let together: Vec<_> = (0..5).map(|_| spawn_op(&engine, &caller, make(None))).collect();
    for creating in together {
        assert!(matches!(creating.await.unwrap(), Ok(Outcome::Replaced { .. })));
    }
    let Ok(Outcome::Contexts(all)) = engine.execute(&caller, Op::ListContexts).await else { panic!() };
    assert_eq!(all.len(), 1);
    eventually("the old sandboxes are gone", || engine.sandboxes() == 4).await;
}

/// Else the new one would wait half an hour for the code of the old one.
#[tokio::test(start_paused = true)]
async fn a_background_run_does_not_hold_up_the_one_that_replaces_its_context() {
    let backend = FakeBackend::new();
    let engine = engine_with(&backend, with_realm(dialects::workbench::REALM, |realm| realm.max_contexts = 1)).await;
    let caller = Call { connection: Some("a".into()), ..call_in(dialects::workbench::REALM) };
    let make = Op::CreateContext(NewContext { replace: true, ..NewContext::named("", Language::Python) });
    created(engine.execute(&caller, make.clone()).await);
    let run = RunCode { background: true, ..RunCode::new(Target::existing(ContextSelector::Current), "hang") };
    let Ok(Outcome::Started(_)) = engine.execute(&caller, Op::RunCode(run)).await else { panic!() };
    begun(&backend, "hang").await;
    let replaced = tokio::time::timeout(Duration::from_secs(60), engine.execute(&caller, make)).await;
    assert!(matches!(replaced, Ok(Ok(Outcome::Replaced { .. }))), "{replaced:?}");
}

#[tokio::test(start_paused = true)]
async fn a_size_is_what_the_sandbox_is_made_with() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let sized = NewContext { size: Some(Size::Large), ..NewContext::named("", Language::Python) };
    let info = created(engine.execute(&session(), Op::CreateContext(sized)).await);
    assert_eq!((info.size, info.limits.memory_bytes, info.limits.cpu_millis), (Some(Size::Large), 4096 << 20, 4000));
    let spec = backend.specs().pop().unwrap();
    assert_eq!((spec.limits, spec.groups.len()), (info.limits, 2));
    assert_eq!(spec.groups[1].name, "microsandbox");
}

#[tokio::test(start_paused = true)]
async fn no_size_goes_beyond_what_the_operator_allows_and_the_usual_one_is_kept_ready() {
    let backend = FakeBackend::new();
    let mut config = with_realm(dialects::microsandbox::REALM, |realm| realm.limits.memory_bytes = 2048 << 20);
    config.pool_realm = dialects::microsandbox::REALM;
    let engine = engine_with(&backend, config).await;
    let of = |size| Op::CreateContext(NewContext { size: Some(size), ..NewContext::named("", Language::Python) });
    let large = created(engine.execute(&session(), of(Size::Large)).await).limits;
    assert_eq!((large.memory_bytes, large.cpu_millis), (2048 << 20, 4000));
    assert_eq!(backend.created(), 4, "no session has that size");
    backend.fail_next_creates(1000);
    let small = created(engine.execute(&session(), of(Size::Small)).await).limits;
    assert_eq!((small.memory_bytes, small.cpu_millis), (1024 << 20, 1000), "a session of the pool");
}

#[tokio::test(start_paused = true)]
async fn an_id_is_taken_once_and_ids_are_their_own_in_each_realm() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let chosen =
        |id: &str| Op::CreateContext(NewContext { id: Some(id.into()), ..NewContext::named("n", Language::Python) });
    let first = created(engine.execute(&session(), chosen("x")).await);
    let twin = engine.execute(&session(), chosen("x")).await;
    assert!(matches!(twin, Err(EngineError::CreateFailed(_))), "{twin:?}");
    let elsewhere = created(engine.execute(&call_in(dialects::sandpool::REALM), chosen("x")).await);
    assert_eq!((first.id.as_str(), elsewhere.id.as_str()), ("x", "x"));
    assert_ne!(first.key, elsewhere.key);
    let keys: BTreeSet<String> = [first.key, elsewhere.key].into();
    assert!(keys.iter().all(|key| key.len() == 64));
    engine.execute(&session(), Op::StopContext { which: ContextSelector::Id("x".into()) }).await.unwrap();
    let theirs = Op::RunCode(RunCode::new(Target::existing(ContextSelector::Id("x".into())), "print 1"));
    assert_eq!(ran(engine.execute(&call_in(dialects::sandpool::REALM), theirs).await).end, RunOutcome::Ok);
}
