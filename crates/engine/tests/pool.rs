//! The sessions of the pool, and the start and the end of the engine.

mod support;

use std::sync::Arc;
use std::time::Duration;

use engine::op::Health;
use engine::{Engine, EngineError};
use support::*;
use testkit::fake::FakeBackend;
use tokio::time::Instant;

#[tokio::test(start_paused = true)]
async fn health_is_measured() {
    let backend = FakeBackend::new();
    let engine = Engine::new(config(), Arc::new(backend.clone()));
    let before = health(&engine).await;
    assert_eq!((before.ready, before.state, before.pool_size), (false, "CREATING", 0));
    engine.start_pool(runtimes(), &|_| {}).await.unwrap();
    let ready = health(&engine).await;
    let expected = Health {
        ready: true,
        state: "READY",
        pool_size: 3,
        pool_available: 3,
        pool_is_healthy: true,
        startup: ready.startup,
    };
    assert_eq!(ready, expected);
    assert_eq!(backend.runs(), ["pass", "pass", "pass"], "a statement in each");
    engine.shutdown(Duration::ZERO).await;
    assert_eq!(health(&engine).await.state, "STOPPING");
}

#[tokio::test(start_paused = true)]
async fn the_pool_refills_behind_a_new_context() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    for n in 1..=10 {
        create(&engine, "a").await;
        eventually("the pool is full again", || backend.living() == 3 + n).await;
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!((health(&engine).await.pool_available, engine.sandboxes()), (3, 13));
}

#[tokio::test(start_paused = true)]
async fn an_empty_pool_still_makes_contexts() {
    let backend = FakeBackend::new();
    let engine = engine_with(&backend, agentrun(|realm| realm.pool_size = 1)).await;
    let created = tokio::join!(create(&engine, "a"), create(&engine, "b"), create(&engine, "c"));
    assert!(created.0 != created.1 && created.1 != created.2);
}

#[tokio::test(start_paused = true)]
async fn a_killed_session_is_noticed_within_a_second_and_rebuilt() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    run(&engine, &id, "set x 1").await;
    eventually("the pool is full", || backend.created() == 4).await;
    let killed = Instant::now();
    backend.kill(2);
    eventually("another is made", || backend.created() == 5).await;
    assert!(killed.elapsed() < Duration::from_secs(1));
    eventually("the dead one is gone", || backend.living() == 4).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(health(&engine).await.pool_available, 3);
    assert_eq!(text(&run(&engine, &id, "get x").await.stdout), "1\n");
}

#[tokio::test(start_paused = true)]
async fn sessions_are_replaced_before_they_expire_and_contexts_keep_their_variables() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    run(&engine, &id, "set x 1").await;
    eventually("the pool is full", || backend.created() == 4).await;
    tokio::time::sleep(Duration::from_secs(59 * 60 - 5)).await;
    assert_eq!(backend.created(), 4);
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!((backend.created(), backend.living()), (7, 4), "before the sixty minutes are over");
    assert_eq!(health(&engine).await.pool_available, 3);
    assert_eq!(text(&run(&engine, &id, "get x").await.stdout), "1\n");
}

#[tokio::test(start_paused = true)]
async fn each_session_is_checked_every_five_minutes_and_the_unfit_are_replaced() {
    let backend = FakeBackend::scripted({
        let checks = std::sync::atomic::AtomicUsize::new(0);
        move |call, request, wire| {
            let proto::ToGuest::Run { code, .. } = request else { return None };
            // The fifth check is the second of the second round.
            if code != "pass" || checks.fetch_add(1, std::sync::atomic::Ordering::SeqCst) != 4 {
                return None;
            }
            let wire = wire.clone();
            Some(Box::pin(async move { wire.end(call, proto::RunStatus::Error).await }))
        }
    });
    let engine = engine(&backend).await;
    tokio::time::sleep(Duration::from_secs(301)).await;
    eventually("the unfit one is replaced", || backend.created() == 4 && backend.living() == 3).await;
    assert_eq!(backend.runs().len(), 3 + 3 + 1, "a statement in each, twice, and in the new one");
    assert!(health(&engine).await.pool_is_healthy);
}

#[tokio::test(start_paused = true)]
async fn a_failed_session_is_tried_three_times_at_the_start() {
    let backend = FakeBackend::new();
    backend.fail_next_creates(2);
    let engine = engine(&backend).await;
    assert_eq!(health(&engine).await.pool_size, 3);

    let backend = FakeBackend::new();
    backend.fail_next_kernels(1000);
    let error = Engine::start(config(), runtimes(), Arc::new(backend.clone())).await.err().unwrap();
    assert_eq!(error.to_string(), "the sandbox failed: the interpreter did not start: told to fail");
    assert_eq!((backend.created(), backend.living(), backend.was_shut_down()), (9, 0, true));
}

#[tokio::test(start_paused = true)]
async fn the_pool_recovers_when_the_back_end_does() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    backend.fail_next_creates(5);
    backend.kill(0);
    backend.kill(1);
    eventually("it fails for a while", || backend.living() == 1).await;
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert_eq!(backend.living(), 3);
    assert!(health(&engine).await.pool_is_healthy);
}

#[tokio::test(start_paused = true)]
async fn before_it_is_ready_a_call_waits_and_then_hears_what_is_missing() {
    let backend = FakeBackend::new();
    let engine = Engine::new(config(), Arc::new(backend.clone()));
    engine.set_status("fetching Python packages, 40 %");
    let begun = Instant::now();
    let early = engine.execute(&call(), create_op("a")).await;
    assert_eq!(early, Err(EngineError::NotReady("fetching Python packages, 40 %".into())));
    assert_eq!(begun.elapsed().as_secs(), 30);
    // A realm may let its calls wait for as long as a sandbox may take to start.
    let begun = Instant::now();
    let later = engine.execute(&call_in(dialects::microsandbox::REALM), create_op("a")).await;
    assert!(matches!(later, Err(EngineError::NotReady(_))), "{later:?}");
    assert_eq!(begun.elapsed().as_secs(), 180);

    let waiting = {
        let engine = engine.clone();
        tokio::spawn(async move { engine.execute(&call(), create_op("b")).await })
    };
    tokio::time::sleep(Duration::from_secs(5)).await;
    engine.start_pool(runtimes(), &|_| {}).await.unwrap();
    assert!(waiting.await.unwrap().is_ok());

    let failed = Engine::new(config(), Arc::new(FakeBackend::new()));
    failed.set_failed("no Python was found");
    assert_eq!(failed.execute(&call(), create_op("a")).await, Err(EngineError::NotReady("no Python was found".into())));
}

/// HOSTILE F04.
#[tokio::test(start_paused = true)]
async fn a_shutdown_lets_running_code_end_and_refuses_the_rest() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    let running = spawn_run(&engine, call(), &id, "sleep 5000\nprint done");
    begun(&backend, "sleep 5000\nprint done").await;
    let queued = spawn_run(&engine, call(), &id, "print queued");
    tokio::time::sleep(Duration::from_millis(10)).await;
    let ending = {
        let engine = engine.clone();
        tokio::spawn(async move { engine.shutdown(Duration::from_secs(30)).await })
    };
    assert_eq!(queued.await.unwrap(), Err(EngineError::ShuttingDown));
    assert_eq!(engine.execute(&call(), create_op("b")).await, Err(EngineError::ShuttingDown));
    assert_eq!(text(&ran(running.await.unwrap()).stdout), "done\n");
    ending.await.unwrap();
    assert_eq!((backend.living(), backend.was_shut_down(), engine.sandboxes()), (0, true, 0));
}

#[tokio::test(start_paused = true)]
async fn after_the_grace_time_or_a_second_order_everything_ends_with_an_answer() {
    for twice in [false, true] {
        let backend = FakeBackend::new();
        let engine = engine(&backend).await;
        let id = create(&engine, "a").await;
        let running = spawn_run(&engine, call(), &id, "hang");
        begun(&backend, "hang").await;
        let started = Instant::now();
        let ending = {
            let engine = engine.clone();
            tokio::spawn(async move { engine.shutdown(Duration::from_secs(20)).await })
        };
        tokio::time::sleep(Duration::from_secs(1)).await;
        if twice {
            engine.shutdown(Duration::from_secs(20)).await;
        }
        ending.await.unwrap();
        assert_eq!(started.elapsed().as_secs(), if twice { 1 } else { 20 });
        assert_eq!(lost(&ran(running.await.unwrap())), "the server is shutting down");
        assert_eq!(backend.living(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_nobody_waits_for_goes_on() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let given_up = tokio::time::timeout(Duration::ZERO, engine.shutdown(Duration::from_secs(1))).await;
    assert!(given_up.is_err());
    eventually("it ends all the same", || backend.living() == 0 && backend.was_shut_down()).await;
    engine.shutdown(Duration::ZERO).await;
}

#[tokio::test(start_paused = true)]
async fn two_hundred_contexts_leave_nothing_behind() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    for n in 0..200 {
        let id = create(&engine, &format!("c{n}")).await;
        run(&engine, &id, "print 1").await;
        engine.execute(&call(), stop_op(&id)).await.unwrap();
    }
    eventually("only the pool is left", || backend.living() == 3 && engine.sandboxes() == 3).await;
    engine.shutdown(Duration::ZERO).await;
    assert_eq!(backend.living(), 0);
}

/// A back end that fails fast must not be asked as fast.
#[tokio::test(start_paused = true)]
async fn a_session_that_cannot_be_replaced_is_tried_again_with_pauses() {
    let backend = FakeBackend::new();
    let config = agentrun(|realm| realm.session_ttl = Duration::from_secs(100));
    let engine = engine_with(&backend, config).await;
    backend.fail_next_creates(1000);
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert_eq!(backend.created(), 3, "a thousand failures in half a minute");
    assert_eq!(health(&engine).await.pool_available, 3, "the old ones still serve");
}

/// HOSTILE A43: interpreters lie at the same path inside and outside.
#[tokio::test(start_paused = true)]
async fn an_interpreter_that_does_not_start_is_not_named_to_the_caller() {
    let backend = FakeBackend::scripted(|call, request, wire| {
        let wire = wire.clone();
        let proto::ToGuest::StartKernel { spec, .. } = request else { return None };
        (spec.language == proto::Language::Javascript).then(|| -> std::pin::Pin<Box<dyn Future<Output = ()> + Send>> {
            Box::pin(async move {
                let message = "cannot start `/srv/runtimes/node`: not there".into();
                wire.send(call, &proto::FromGuest::Failed { failure: proto::GuestFailure::Kernel, message }).await;
            })
        })
    });
    let engine = engine(&backend).await;
    let language = proto::Language::Javascript;
    let op = engine::Op::CreateContext(engine::op::NewContext::named("a", language));
    let error = engine.execute(&call(), op).await.unwrap_err().to_string();
    assert!(error.contains("the interpreter did not start") && !error.contains("/srv"), "{error}");
}
