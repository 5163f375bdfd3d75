//! What waits ready: for whom, how much, how it gets there, and that nothing of it was ever used.

use std::time::Duration;

use engine::op::{ContextSelector, NewContext, Realm, RunCode, RunOutcome, Size, Target};
use engine::{Call, Engine, EngineConfig, EngineError, Op, Outcome, Ready, Tenant};
use proptest::prelude::*;
use proto::Language::{self, Javascript, Python, Typescript};
use testkit::fake::FakeBackend;
use tokio::time::Instant;

use crate::support::*;

/// Of the pool's tenant and realm: the sessions, and one for JavaScript.
const USUAL: usize = 3 + 1;

fn of(tenant: &str, realm: Realm) -> Call {
    Call { realm, ..call_of(&Tenant(tenant.into())) }
}

fn new(language: Language) -> Op {
    Op::CreateContext(NewContext::named("", language))
}

fn ready(engine: &Engine) -> Ready {
    engine.counts().ready
}

/// Adapting, and full.
async fn adapting(backend: &FakeBackend) -> Engine {
    let engine = engine_with(backend, EngineConfig { refills_at_once: 1, ..usual() }).await;
    full(&engine).await;
    engine
}

async fn full(engine: &Engine) {
    eventually("as many are ready as are wanted", || ready(engine).available == ready(engine).wanted).await;
}

/// Many at once, all well.
async fn burst(engine: &Engine, caller: &Call, language: Language, count: usize) -> Vec<String> {
    let creating: Vec<_> = (0..count).map(|_| spawn_op(engine, caller, new(language))).collect();
    let mut ids = Vec::new();
    for create in creating {
        ids.push(created(create.await.unwrap()).id);
    }
    ids
}

async fn stop(engine: &Engine, caller: &Call, ids: Vec<String>) {
    for id in ids {
        engine.execute(caller, Op::StopContext { which: ContextSelector::Id(id) }).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn whoever_was_here_finds_one_ready_in_each_language_and_size() {
    let backend = FakeBackend::new();
    let engine = adapting(&backend).await;
    assert_eq!(ready(&engine).wanted, USUAL);
    let small = NewContext { size: Some(Size::Small), ..NewContext::named("", Python) };
    let ops = [
        (of("blue", dialects::sandpool::REALM), new(Python)),
        (of("blue", dialects::sandpool::REALM), new(Javascript)),
        (of("blue", dialects::agentrun::REALM), new(Typescript)),
        (of("green", dialects::sandpool::REALM), new(Python)),
        (of("green", dialects::microsandbox::REALM), Op::CreateContext(small)),
    ];
    for (caller, op) in &ops {
        created(engine.execute(caller, op.clone()).await);
    }
    full(&engine).await;
    assert_eq!(ready(&engine), Ready { wanted: USUAL + 5, available: USUAL + 5, made: 5, ..ready(&engine) });
    backend.fail_next_creates(1000);
    for (caller, op) in &ops {
        created(engine.execute(caller, op.clone()).await);
    }
    let local = call();
    created(engine.execute(&local, new(Javascript)).await);
    assert_eq!((ready(&engine).taken, ready(&engine).made), (6, 5));
    let medium = NewContext { size: Some(Size::Medium), ..NewContext::named("", Python) };
    let other = engine.execute(&of("green", dialects::microsandbox::REALM), Op::CreateContext(medium)).await;
    assert!(matches!(other, Err(EngineError::CreateFailed(_))), "no other size serves: {other:?}");
}

/// The groups around a sandbox cannot be changed: what waits for a tenant is in its own.
#[tokio::test(start_paused = true)]
async fn what_is_ready_lies_in_the_groups_of_who_takes_it() {
    let backend = FakeBackend::new();
    let engine = adapting(&backend).await;
    for tenant in ["blue", "green"] {
        for _ in 0..3 {
            created(engine.execute(&of(tenant, dialects::sandpool::REALM), new(Python)).await);
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }
    let count = |name: &str| backend.specs().iter().filter(|spec| spec.groups[0].name == name).count();
    let mut groups: Vec<String> = backend.specs().iter().map(|spec| spec.groups[0].name.clone()).collect();
    groups.sort();
    groups.dedup();
    let counts: Vec<usize> = groups.iter().map(|name| count(name)).collect();
    assert_eq!(counts, [USUAL, 4, 4], "three contexts and one ready each: {groups:?}");
}

#[tokio::test(start_paused = true)]
async fn an_interpreter_that_waits_has_run_a_cell_that_leaves_nothing() {
    let backend = FakeBackend::new();
    let engine = adapting(&backend).await;
    assert_eq!(backend.runs(), ["pass", "pass", "pass", ";"]);
    let languages: Vec<Language> = backend.kernels().iter().map(|kernel| kernel.language).collect();
    assert_eq!(languages, [Python, Python, Python, Javascript]);
    let id = created(engine.execute(&call(), new(Javascript)).await).id;
    assert_eq!(run(&engine, &id, "print 1").await.end, RunOutcome::Ok);
    full(&engine).await;
    assert_eq!(backend.kernels().len(), backend.created(), "nothing is exchanged");
}

#[tokio::test(start_paused = true)]
async fn after_a_burst_the_next_one_is_served_and_then_the_stock_shrinks() {
    let backend = FakeBackend::new();
    let engine = adapting(&backend).await;
    let caller = call_in(dialects::sandpool::REALM);
    burst(&engine, &caller, Python, 40).await;
    full(&engine).await;
    assert_eq!(ready(&engine).available, USUAL + 40);
    backend.fail_next_creates(100_000);
    burst(&engine, &caller, Python, 40).await;
    assert_eq!((ready(&engine).taken, ready(&engine).made), (40, 40));
    backend.fail_next_creates(0);
    full(&engine).await;
    tokio::time::sleep(Duration::from_secs(300)).await;
    let fewer = ready(&engine).available;
    assert!((USUAL + 1..USUAL + 20).contains(&fewer), "{fewer}");
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!((ready(&engine).available, ready(&engine).wanted), (USUAL, USUAL));
    assert_eq!(engine.sandboxes(), USUAL + 80, "contexts are not touched");
}

#[tokio::test(start_paused = true)]
async fn number_and_memory_of_all_together_are_bounded_and_shared_fairly() {
    let backend = FakeBackend::new();
    let config = EngineConfig { ready_max: 20, ..usual() };
    let engine = engine_with(&backend, config).await;
    burst(&engine, &call_in(dialects::sandpool::REALM), Python, 50).await;
    full(&engine).await;
    assert_eq!(ready(&engine).available, 20);
    burst(&engine, &of("blue", dialects::sandpool::REALM), Python, 5).await;
    full(&engine).await;
    assert_eq!(ready(&engine).available, 20, "the same for two");
    backend.fail_next_creates(100_000);
    burst(&engine, &of("blue", dialects::sandpool::REALM), Python, 5).await;

    let backend = FakeBackend::new();
    let config = EngineConfig { ready_memory_bytes: 160 << 20, ..usual() };
    let engine = engine_with(&backend, config).await;
    burst(&engine, &call_in(dialects::sandpool::REALM), Python, 50).await;
    full(&engine).await;
    let Ready { available, memory_bytes, .. } = ready(&engine);
    assert!(memory_bytes <= 160 << 20 && available > 3, "{available}, {memory_bytes}");
}

#[tokio::test(start_paused = true)]
async fn a_create_goes_before_refills_and_takes_the_one_that_is_just_being_made() {
    let backend = FakeBackend::new();
    let engine = adapting(&backend).await;
    let making = Duration::from_millis(1000);
    backend.slow_down(making, Duration::ZERO);
    let first = burst(&engine, &call(), Python, 3).await;
    assert_eq!(ready(&engine).taken, 3);
    // A refill is under way by now.
    tokio::time::sleep(making / 2).await;
    let begun = Instant::now();
    let together = burst(&engine, &call(), Python, 2).await;
    assert_eq!((ready(&engine).handed_over, ready(&engine).made), (1, 1));
    assert_eq!(begun.elapsed(), making, "the second one did not wait for a third");
    let begun = Instant::now();
    tokio::time::sleep(making / 2).await;
    create(&engine, "once more").await;
    assert!(begun.elapsed() < making, "sooner than to make one: {:?}", begun.elapsed());
    full(&engine).await;
    stop(&engine, &call(), [first, together].concat()).await;
}

/// A refill waits for who waits, but not for ever.
#[tokio::test(start_paused = true)]
async fn refills_go_on_under_steady_load() {
    let backend = FakeBackend::new();
    let engine = adapting(&backend).await;
    backend.slow_down(Duration::from_millis(400), Duration::ZERO);
    let caller = call_in(dialects::workbench::REALM);
    let mut ids = Vec::new();
    let loads: Vec<_> = (0..40)
        .map(|n| {
            let (engine, caller) = (engine.clone(), caller.clone());
            // Of a size nobody keeps ready: somebody always waits.
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_millis(n * 100)).await;
                let fresh = Call { tenant: Tenant(format!("t{n}")), ..caller };
                created(engine.execute(&fresh, new(Python)).await)
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(300)).await;
    ids.extend(burst(&engine, &call(), Python, 3).await);
    assert_eq!(ready(&engine).taken, 3);
    tokio::time::sleep(Duration::from_millis(1600)).await;
    assert!(health(&engine).await.pool_available > 0, "while others still come");
    assert!(loads.iter().any(|load| !load.is_finished()));
    for load in loads {
        load.await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_refill_that_fails_lets_go_who_waited_for_it() {
    let backend = FakeBackend::new();
    let engine = adapting(&backend).await;
    backend.slow_down(Duration::from_millis(500), Duration::ZERO);
    burst(&engine, &call(), Python, 3).await;
    backend.fail_next_creates(1);
    tokio::time::sleep(Duration::from_millis(250)).await;
    create(&engine, "a").await;
    assert_eq!((ready(&engine).handed_over, ready(&engine).made), (0, 1));
    full(&engine).await;
}

#[tokio::test(start_paused = true)]
async fn a_stop_answers_before_the_end_and_too_many_ends_wait() {
    let backend = FakeBackend::new();
    let engine = engine_with(&backend, agentrun(|realm| realm.max_contexts = 80)).await;
    let destroying = Duration::from_secs(10);
    let ids = burst(&engine, &call(), Python, 80).await;
    backend.slow_down(Duration::ZERO, destroying);
    let begun = Instant::now();
    stop(&engine, &call(), ids[..64].to_vec()).await;
    assert!(begun.elapsed() < Duration::from_secs(1));
    assert_eq!(engine.counts().ending, 64);
    eventually("the others are ready again", || backend.living() == 80 + 3).await;
    // What is ending is no context any more.
    let again = burst(&engine, &call(), Python, 64).await;
    let over = engine.execute(&call(), create_op("one more")).await;
    assert_eq!(over, Err(EngineError::ContextLimit(80)));
    // But there are never more than so many beyond the limit.
    stop(&engine, &call(), vec![ids[64].clone()]).await;
    assert!(begun.elapsed() >= destroying, "{:?}", begun.elapsed());
    assert!(backend.living() <= 80 + 64 + 3);
    stop(&engine, &call(), [&ids[65..], &again].concat()).await;
    let begun = Instant::now();
    engine.shutdown(Duration::ZERO).await;
    assert!(begun.elapsed() <= 3 * destroying);
    assert_eq!((backend.living(), engine.sandboxes()), (0, 0), "a shutdown waits for all of them");
}

/// HOSTILE X15, as far as it is the engine's: no sandbox becomes a context twice.
#[tokio::test(start_paused = true)]
async fn nothing_that_was_used_is_used_again() {
    let backend = FakeBackend::new();
    let engine = adapting(&backend).await;
    for n in 0..200 {
        let caller = of(["blue", "green"][n % 2], dialects::sandpool::REALM);
        let language = [Python, Javascript, Typescript][n % 3];
        let id = created(engine.execute(&caller, new(language)).await).id;
        let look = |code: &str| Op::RunCode(RunCode::new(Target::existing(ContextSelector::Id(id.clone())), code));
        for absent in ["get mark", "read mark"] {
            assert_eq!(ran(engine.execute(&caller, look(absent)).await).end, RunOutcome::Error, "{n}: {absent}");
        }
        let marked = ran(engine.execute(&caller, look("set mark 1\nwrite mark 1\nget mark\nread mark")).await);
        assert_eq!((marked.end, text(&marked.stdout)), (RunOutcome::Ok, "1\n1"));
        stop(&engine, &caller, vec![id]).await;
        tokio::time::sleep(Duration::from_millis(n as u64)).await;
    }
    full(&engine).await;
    assert!(ready(&engine).taken > 150, "{:?}", ready(&engine));
    eventually("only what is ready is left", || backend.living() == ready(&engine).available).await;
    assert_eq!(backend.created(), 200 + ready(&engine).available, "one for each context");
}

#[derive(Debug, Clone)]
enum Step {
    Create { tenant: usize, language: usize, count: usize },
    Stop { count: usize },
    Fail { creates: u32, kernels: u32 },
    Kill { which: usize },
    Slow { create_ms: u64, destroy_ms: u64 },
    Wait { ms: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..3usize, 0..3usize, 1..12usize).prop_map(|(tenant, language, count)| Step::Create { tenant, language, count }),
        3 => (1..20usize).prop_map(|count| Step::Stop { count }),
        1 => (0..5u32, 0..3u32).prop_map(|(creates, kernels)| Step::Fail { creates, kernels }),
        1 => any::<usize>().prop_map(|which| Step::Kill { which }),
        1 => (0..300u64, 0..300u64).prop_map(|(create_ms, destroy_ms)| Step::Slow { create_ms, destroy_ms }),
        2 => (0..400_000u64).prop_map(|ms| Step::Wait { ms }),
    ]
}

/// Bounds that hold at every moment.
fn check(engine: &Engine, backend: &FakeBackend, at_once: usize) {
    let counts = engine.counts();
    let contexts: usize = counts.contexts.values().sum();
    let most = 12 + 1;
    assert!(counts.ready.available <= most, "{counts:?}");
    assert!(counts.ready.memory_bytes <= 512 << 20, "{counts:?}");
    // Ready ones, refills, contexts, those being made for callers, and those on their way out.
    let callers = 12;
    let bound = most + at_once + contexts + callers + counts.ending;
    assert!(engine.sandboxes() <= bound && backend.living() <= bound, "{counts:?}, {} living", backend.living());
}

async fn play(steps: Vec<Step>) {
    let backend = FakeBackend::new();
    let config = EngineConfig { ready_max: 12, refills_at_once: 2, ..usual() };
    let engine = engine_with(&backend, config).await;
    let mut contexts: Vec<(Call, String)> = Vec::new();
    for step in steps {
        match step {
            Step::Create { tenant, language, count } => {
                let caller = of(["local", "blue", "green"][tenant], dialects::sandpool::REALM);
                let language = [Python, Javascript, Typescript][language];
                let creating: Vec<_> = (0..count).map(|_| spawn_op(&engine, &caller, new(language))).collect();
                for create in creating {
                    match create.await.unwrap() {
                        Ok(Outcome::Created(info)) => contexts.push((caller.clone(), info.id)),
                        Err(EngineError::CreateFailed(_)) => {}
                        other => panic!("{other:?}"),
                    }
                    check(&engine, &backend, 2);
                }
            }
            Step::Stop { count } => {
                for (caller, id) in contexts.split_off(contexts.len() - count.min(contexts.len())) {
                    stop(&engine, &caller, vec![id]).await;
                    check(&engine, &backend, 2);
                }
            }
            Step::Fail { creates, kernels } => {
                backend.fail_next_creates(creates);
                backend.fail_next_kernels(kernels);
            }
            Step::Kill { which } => backend.kill(which % backend.created()),
            Step::Slow { create_ms, destroy_ms } => {
                backend.slow_down(Duration::from_millis(create_ms), Duration::from_millis(destroy_ms));
            }
            Step::Wait { ms } => tokio::time::sleep(Duration::from_millis(ms)).await,
        }
        check(&engine, &backend, 2);
    }
    backend.fail_next_creates(0);
    backend.fail_next_kernels(0);
    for (caller, id) in contexts {
        stop(&engine, &caller, vec![id]).await;
    }
    tokio::time::sleep(Duration::from_secs(2 * 3600)).await;
    assert_eq!((ready(&engine).wanted, ready(&engine).available), (USUAL, USUAL), "idle, it is what was ordered");
    assert_eq!((engine.sandboxes(), backend.living(), engine.counts().ending), (USUAL, USUAL, 0), "nothing leaks");
    engine.shutdown(Duration::ZERO).await;
    assert_eq!(backend.living(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn whatever_comes_bounds_hold_and_nothing_leaks(steps in prop::collection::vec(step(), 1..25)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        runtime.block_on(play(steps));
    }
}
