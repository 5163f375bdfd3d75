//! Runs in the background.

use std::time::Duration;

use engine::op::{LimitKind, RunCode, RunOutcome, RunProgress, StoppedContext, Waiting};
use engine::{Engine, EngineError, Event, Op, Outcome, Tenant};
use testkit::fake::FakeBackend;
use tokio::time::Instant;

use crate::support::*;

async fn start(engine: &Engine, context: &str, code: &str) -> String {
    let op = Op::RunCode(RunCode { background: true, ..RunCode::new(existing(context), code) });
    match engine.execute(&call(), op).await {
        Ok(Outcome::Started(info)) => info.run,
        other => panic!("{other:?}"),
    }
}

async fn wait(engine: &Engine, run: &str, cursor: Option<u64>, wait: u64) -> RunProgress {
    let op = Op::WaitRun { run: run.into(), cursor, wait: Duration::from_secs(wait) };
    match engine.execute(&call(), op).await {
        Ok(Outcome::Progress(progress)) => progress,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn output_is_read_with_a_cursor_and_the_result_stays() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    let run = start(&engine, &id, "print one\nsleep 5000\nerror two\nset x 1").await;
    assert!(run.starts_with("run-"), "{run}");
    let first = wait(&engine, &run, None, 1).await;
    assert_eq!((first.output.as_str(), first.cursor, first.end), ("one\n", 4, None));
    let nothing = wait(&engine, &run, Some(4), 1).await;
    assert_eq!((nothing.output.as_str(), nothing.cursor), ("", 4));
    let end = wait(&engine, &run, Some(4), 50).await;
    assert_eq!((end.output.as_str(), end.cursor), ("two\n", 8));
    let ended = end.end.unwrap().unwrap();
    assert_eq!((&ended.end, text(&ended.stdout), text(&ended.stderr)), (&RunOutcome::Ok, "one\n", "two\n"));
    assert!(end.ended_at.is_some() && !end.command && end.context_id == id);
    assert_eq!(wait(&engine, &run, None, 0).await.output, "one\ntwo\n", "from the beginning again");
    assert_eq!(text(&crate::support::run(&engine, &id, "get x").await.stdout), "1\n");
    tokio::time::sleep(Duration::from_secs(3601)).await;
    let forgotten = engine.execute(&call(), Op::CancelRun { run: run.clone() }).await;
    assert_eq!(forgotten, Err(EngineError::RunNotFound(run)));
}

#[tokio::test(start_paused = true)]
async fn it_takes_its_turn_before_what_is_asked_for_next() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    let runs: Vec<String> =
        [start(&engine, &id, "sleep 100\nprint 0").await, start(&engine, &id, "sleep 50\nprint 1").await].into();
    assert_eq!(crate::support::run(&engine, &id, "print 2").await.end, RunOutcome::Ok);
    let cells: Vec<String> = backend.runs().into_iter().filter(|code| code != "pass").collect();
    assert_eq!(cells, ["sleep 100\nprint 0", "sleep 50\nprint 1", "print 2"]);
    for run in runs {
        assert!(wait(&engine, &run, None, 0).await.end.is_some());
    }
}

#[tokio::test(start_paused = true)]
async fn it_is_queued_until_the_run_before_it_has_ended_and_its_time_counts_from_then() {
    let backend = FakeBackend::new();
    let engine = engine_with(&backend, agentrun(|realm| realm.waiting_counts = true)).await;
    let id = create(&engine, "a").await;
    let first = start(&engine, &id, "sleep 5000").await;
    assert!(wait(&engine, &first, None, 0).await.queued.is_none());
    let mut run = RunCode::new(existing(&id), "sleep 2000\nprint second");
    (run.background, run.timeout) = (true, Some(Duration::from_secs(3)));
    let Ok(Outcome::Started(second)) = engine.execute(&call(), Op::RunCode(run)).await else { panic!() };
    assert!(matches!(second.queued, Some(Waiting::Run { .. })));
    assert!(wait(&engine, &second.run, None, 1).await.queued.is_some());
    let progress = wait(&engine, &second.run, None, 5).await;
    assert!(progress.queued.is_none() && progress.end.is_none(), "{progress:?}");
    let end = wait(&engine, &second.run, None, 5).await.end.unwrap().unwrap();
    assert_eq!((end.end, text(&end.stdout)), (RunOutcome::Ok, "second\n"));
}

#[tokio::test(start_paused = true)]
async fn a_call_that_waits_says_for_what_and_gives_up_at_its_timeout() {
    let backend = FakeBackend::new();
    let config = agentrun(|realm| {
        (realm.waiting_counts, realm.timeout, realm.max_timeout) =
            (true, Duration::from_secs(100), Duration::from_secs(100));
    });
    let engine = engine_with(&backend, config).await;
    let id = create(&engine, "a").await;
    let first = start(&engine, &id, "sleep 60000").await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    let (caller, mut events) = followed();
    let mut run = RunCode::new(existing(&id), "print never");
    run.timeout = Some(Duration::from_secs(5));
    let waiting = spawn_op(&engine, &caller, Op::RunCode(run));
    let waits = Waiting::Run { run: first.clone(), running: Duration::from_secs(11) };
    assert_eq!(waits.to_string(), format!("the background run {first} has been running in this context for 11 s"));
    assert_eq!(events.recv().await, Some(Event::Waiting(waits)));
    let refused = EngineError::NotStarted {
        timeout: Duration::from_secs(5),
        running: Some(Duration::from_secs(15)),
        run: Some(first),
    };
    assert_eq!(waiting.await.unwrap(), Err(refused));

    let before = Instant::now();
    let mut run = RunCode::new(existing(&id), "hang");
    run.timeout = Some(Duration::from_secs(50));
    let ended = ran(engine.execute(&call(), Op::RunCode(run)).await);
    assert_eq!(ended.end, RunOutcome::TimedOut { after: Duration::from_secs(50), state_kept: true });
    assert_eq!(before.elapsed().as_secs(), 50, "45 s of waiting are a part of it");
    assert!(!backend.runs().contains(&"print never".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn a_stop_ends_what_runs_where_the_realm_says_so() {
    let backend = FakeBackend::new();
    let engine =
        engine_with(&backend, agentrun(|realm| (realm.stop_ends_runs, realm.one_run_at_a_time) = (true, false))).await;
    let id = create(&engine, "a").await;
    let cell = spawn_run(&engine, call(), &id, "sleep 50000");
    begun(&backend, "sleep 50000").await;
    let mut server = shell(existing(&id), "sleep 40000");
    server.background = true;
    let Ok(Outcome::Started(server)) = engine.execute(&call(), Op::RunCommand(server)).await else { panic!() };
    let before = Instant::now();
    let stopped = engine.execute(&call(), stop_op(&id)).await;
    let expected = StoppedContext { context_id: id, ended_runs: vec![server.run.clone()], ended_calls: 1 };
    assert_eq!(stopped, Ok(Outcome::Stopped(expected)));
    assert!(before.elapsed() < Duration::from_secs(5), "{:?}", before.elapsed());
    assert_eq!(lost(&ran(cell.await.unwrap())), "its context was stopped");
    let end = wait(&engine, &server.run, None, 5).await.end.unwrap().unwrap();
    assert_eq!(lost(&end), "its context was stopped");
}

#[tokio::test(start_paused = true)]
async fn a_stop_lets_nothing_start_in_a_sandbox_that_is_being_made() {
    let backend = FakeBackend::new();
    let engine = engine_with(&backend, agentrun(|realm| realm.stop_ends_runs = true)).await;
    let id = create(&engine, "a").await;
    (0..backend.created()).for_each(|number| backend.kill(number));
    backend.slow_down(Duration::from_secs(10), Duration::ZERO);
    tokio::time::sleep(Duration::from_secs(1)).await;
    let late = spawn_op(&engine, &call(), command_op(&id, "print late"));
    tokio::time::sleep(Duration::from_secs(1)).await;
    let stopped = engine.execute(&call(), stop_op(&id)).await;
    assert!(matches!(stopped, Ok(Outcome::Stopped(_))), "{stopped:?}");
    assert_eq!(late.await.unwrap(), Err(EngineError::ContextNotFound(id)));
    assert!(!backend.runs().contains(&"print late".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn a_run_without_a_permit_stays_queued_as_long_as_it_takes() {
    let backend = FakeBackend::new();
    let engine = engine_with(&backend, agentrun(|realm| realm.runs_at_once = 1)).await;
    let (a, b) = (create(&engine, "a").await, create(&engine, "b").await);
    let first = start(&engine, &a, "sleep 60000").await;
    let second = start(&engine, &b, "print second").await;
    let waits = wait(&engine, &second, None, 50).await;
    assert!(waits.queued.is_some() && waits.end.is_none(), "{waits:?}");
    let end = wait(&engine, &second, None, 50).await.end.unwrap().unwrap();
    assert_eq!(text(&end.stdout), "second\n");
    assert!(wait(&engine, &first, None, 0).await.end.is_some());
}

#[tokio::test(start_paused = true)]
async fn what_is_lost_under_it_is_told_to_the_next_call() {
    let backend = FakeBackend::new();
    let engine = engine_with(&backend, agentrun(|realm| realm.one_run_at_a_time = false)).await;
    let id = create(&engine, "a").await;
    crate::support::run(&engine, &id, "set x 1").await;
    let mut server = shell(existing(&id), "sleep 40000");
    server.background = true;
    let Ok(Outcome::Started(server)) = engine.execute(&call(), Op::RunCommand(server)).await else { panic!() };
    (0..backend.created()).for_each(|number| backend.kill(number));
    assert!(matches!(wait(&engine, &server.run, None, 5).await.end, Some(Ok(_))));
    let next = crate::support::run(&engine, &id, "get x").await;
    assert!(next.notice.as_deref().unwrap_or_default().contains("variables and files are gone"), "{next:?}");
}

#[tokio::test(start_paused = true)]
async fn it_is_cancelled_by_order_by_the_end_of_its_context_and_by_the_engines() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let (a, b, c) = (create(&engine, "a").await, create(&engine, "b").await, create(&engine, "c").await);
    let by_order = start(&engine, &a, "hang a").await;
    begun(&backend, "hang a").await;
    let cancelled = engine.execute(&call(), Op::CancelRun { run: by_order.clone() }).await;
    assert_eq!(cancelled, Ok(Outcome::Cancelled { run: by_order.clone(), was_running: true }));
    let end = wait(&engine, &by_order, None, 50).await.end.unwrap().unwrap();
    assert_eq!(end.end, RunOutcome::Cancelled { state_kept: true });
    let again = engine.execute(&call(), Op::CancelRun { run: by_order.clone() }).await;
    assert_eq!(again, Ok(Outcome::Cancelled { run: by_order, was_running: false }));

    let with_context = start(&engine, &b, "hang b").await;
    begun(&backend, "hang b").await;
    engine.execute(&call(), stop_op(&b)).await.unwrap();
    let end = wait(&engine, &with_context, None, 50).await.end.unwrap().unwrap();
    assert_eq!(lost(&end), "its context was stopped", "no variables are said to be kept");

    start(&engine, &c, "hang c").await;
    begun(&backend, "hang c").await;
    assert_eq!(engine.counts().background_runs, 1);
    engine.shutdown(Duration::from_secs(30)).await;
    assert_eq!((backend.living(), engine.counts().background_runs), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_context_with_a_background_run_is_not_idle() {
    let backend = FakeBackend::new();
    let config = agentrun(|realm| realm.idle_timeout = Some(Duration::from_secs(60)));
    let engine = engine_with(&backend, config).await;
    let id = create(&engine, "a").await;
    let run = start(&engine, &id, "sleep 600000\nprint done").await;
    tokio::time::sleep(Duration::from_secs(590)).await;
    let Ok(Outcome::Contexts(all)) = engine.execute(&call(), Op::ListContexts).await else { panic!() };
    assert_eq!((all[0].id.as_str(), all[0].busy), (id.as_str(), true));
    assert_eq!(wait(&engine, &run, None, 50).await.output, "done\n", "longer than a cell may take");
}

#[tokio::test(start_paused = true)]
async fn runs_are_bounded_and_nobody_elses() {
    let backend = FakeBackend::new();
    let engine = engine_with(&backend, with_realm(dialects::agentrun::REALM, |realm| realm.runs_at_once = 200)).await;
    let id = create(&engine, "a").await;
    let first = start(&engine, &id, "hang").await;
    for _ in 0..99 {
        start(&engine, &id, "hang").await;
    }
    let op = Op::RunCode(RunCode { background: true, ..RunCode::new(existing(&id), "hang") });
    let over = engine.execute(&call(), op.clone()).await;
    assert_eq!(over, Err(EngineError::OverLimit { what: LimitKind::BackgroundRuns, limit: "100".into() }));
    let look = Op::WaitRun { run: first.clone(), cursor: None, wait: Duration::ZERO };
    for stranger in [call_of(&Tenant("stranger".into())), call_in(dialects::sandpool::REALM)] {
        let none = Err(EngineError::RunNotFound(first.clone()));
        assert_eq!(engine.execute(&stranger, look.clone()).await, none);
        assert_eq!(engine.execute(&stranger, Op::CancelRun { run: first.clone() }).await, none);
    }
    engine.execute(&call(), Op::CancelRun { run: first.clone() }).await.unwrap();
    wait(&engine, &first, None, 50).await;
    assert!(matches!(engine.execute(&call(), op).await, Ok(Outcome::Started(_))), "an ended one made room");
}

#[tokio::test(start_paused = true)]
async fn a_client_that_goes_away_does_not_end_it() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    let caller = call();
    let op = Op::RunCode(RunCode { background: true, ..RunCode::new(existing(&id), "sleep 1000\nprint done") });
    let Ok(Outcome::Started(info)) = engine.execute(&caller, op).await else { panic!() };
    caller.cancel.cancel();
    drop(caller);
    assert_eq!(wait(&engine, &info.run, None, 50).await.output, "done\n");
}

/// W22: a result that cannot be told now for want of memory is there for the next look.
#[tokio::test(start_paused = true)]
async fn w22_a_look_that_finds_no_memory_loses_nothing() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    let memory = engine::Memory::new(1 << 20, 1 << 20);
    let of_tenant = || engine::op::Call { memory: memory.hold_all_of(&call().tenant), ..call() };
    let (run, look) = (format!("print {}", "x".repeat(16 << 10)), of_tenant());
    let background = RunCode { background: true, ..RunCode::new(existing(&id), &run) };
    let Ok(Outcome::Started(info)) = engine.execute(&of_tenant(), Op::RunCode(background)).await else { panic!() };
    assert!(wait(&engine, &info.run, None, 50).await.end.unwrap().is_ok());

    let others = memory.hold_all_of(&call().tenant);
    let rest = (1 << 20) - memory.held().0 - (8 << 10);
    others.add(rest).unwrap();
    let op = || Op::WaitRun { run: info.run.clone(), cursor: None, wait: Duration::ZERO };
    let over = engine.execute(&look, op()).await;
    assert!(matches!(over, Err(EngineError::OverLimit { what: LimitKind::CallMemory, .. })), "{over:?}");
    drop(others);
    assert!(matches!(engine.execute(&look, op()).await, Ok(Outcome::Progress(progress)) if progress.end.is_some()));
}

/// W22: a refused run is not one of those that a tenant may have.
#[tokio::test(start_paused = true)]
async fn w22_a_run_that_finds_no_memory_takes_no_place() {
    let backend = FakeBackend::new();
    let engine = engine_with(&backend, with_realm(dialects::agentrun::REALM, |realm| realm.runs_at_once = 200)).await;
    let id = create(&engine, "a").await;
    let memory = engine::Memory::new(1 << 20, 1 << 20);
    let large = format!("print {}", "x".repeat(1 << 20));
    let background = |code: &str| Op::RunCode(RunCode { background: true, ..RunCode::new(existing(&id), code) });
    let call = engine::op::Call { memory: memory.hold_all_of(&call().tenant), ..call() };
    call.memory.add(512 << 10).unwrap();
    for _ in 0..150 {
        let over = engine.execute(&call, background(&large)).await;
        assert!(matches!(over, Err(EngineError::OverLimit { what: LimitKind::CallMemory, .. })), "{over:?}");
    }
    assert!(
        matches!(engine.execute(&call, background("print 1")).await, Ok(Outcome::Started(_))),
        "a small one begins"
    );
}
