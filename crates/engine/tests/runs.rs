//! Runs: every way they end, order, permits, queue, cancellation.

mod support;

use std::time::Duration;

use engine::op::{RunCode, RunOutcome, Waiting};
use engine::{EngineConfig, EngineError, Event, Op, Outcome, Tenant};
use proto::{Ended, FromGuest, KernelEvent, Stream};
use support::*;
use testkit::fake::FakeBackend;
use tokio::time::Instant;

#[tokio::test(start_paused = true)]
async fn variables_are_kept_between_runs_and_not_shared_between_contexts() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let (alice, bob) = (create(&engine, "alice").await, create(&engine, "bob").await);
    assert_eq!(run(&engine, &alice, "set x 42").await.end, RunOutcome::Ok);
    assert_eq!(text(&run(&engine, &alice, "get x").await.stdout), "42\n");
    assert_eq!(run(&engine, &bob, "get x").await.end, RunOutcome::Error);
}

#[tokio::test(start_paused = true)]
async fn each_end_is_told_apart() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    let raised = run(&engine, &id, "print out\nerror err\nraise ValueError").await;
    assert_eq!((text(&raised.stdout), text(&raised.stderr)), ("out\n", "err\n"));
    assert_eq!((raised.end, raised.error.unwrap().name.as_str()), (RunOutcome::Error, "ValueError"));
    assert_eq!(run(&engine, &id, "exit 3").await.end, RunOutcome::Exit { code: 3 });
    let timed_out = run(&engine, &id, "set x 1\nhang").await;
    assert_eq!(timed_out.end, RunOutcome::TimedOut { after: Duration::from_secs(30), state_kept: true });
    assert_eq!(text(&run(&engine, &id, "get x").await.stdout), "1\n");
    let crashed = run(&engine, &id, "die 11").await;
    assert_eq!(crashed.end, RunOutcome::Ended { how: Ended::Signaled { signal: 11 } });
    assert_eq!(run(&engine, &id, "get x").await.end, RunOutcome::Error, "a new interpreter, in the same sandbox");
    assert_eq!(backend.created(), 4, "three sessions, and one for the context's place in the pool");
}

#[tokio::test(start_paused = true)]
async fn a_kill_is_out_of_memory_only_if_the_sandbox_counted_one() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    assert_eq!(run(&engine, &id, "die 9").await.end, RunOutcome::Ended { how: Ended::Signaled { signal: 9 } });
    backend.set_oom_kills(1);
    assert_eq!(run(&engine, &id, "die 9").await.end, RunOutcome::OutOfMemory { limit_bytes: Some(2048 << 20) });
    run(&engine, &id, "print on").await;
    let killed = run(&engine, &id, "die 9").await.end;
    assert_eq!(killed, RunOutcome::Ended { how: Ended::Signaled { signal: 9 } }, "the old kill is not counted twice");
}

/// W45 of the hostile list: a limit around the server was hit, of which nobody here knows.
#[tokio::test(start_paused = true)]
async fn w45_a_kill_by_a_limit_that_is_not_known_names_none() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    backend.set_oom_kills(1);
    backend.hide_oom_limit();
    assert_eq!(run(&engine, &id, "die 9").await.end, RunOutcome::OutOfMemory { limit_bytes: None });
}

#[tokio::test(start_paused = true)]
async fn a_guest_silent_past_the_deadline_costs_its_sandbox_and_says_so() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    let begun = Instant::now();
    let silent = run(&engine, &id, "deaf").await;
    assert!(lost(&silent).contains("timed out after 30s"), "files are lost too: {silent:?}");
    assert_eq!(begun.elapsed().as_secs(), 34, "deadline, grace, and two seconds for the guest");
    let next = run(&engine, &id, "print on").await;
    assert_eq!(text(&next.stdout), "on\n");
    assert_eq!((next.notice, next.late), (None, None), "it was told already");
}

#[tokio::test(start_paused = true)]
async fn cancelling_interrupts_the_cell_and_keeps_the_variables() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    run(&engine, &id, "set x 1").await;
    let caller = call();
    let running = spawn_run(&engine, caller.clone(), &id, "hang");
    begun(&backend, "hang").await;
    caller.cancel.cancel();
    assert_eq!(ran(running.await.unwrap()).end, RunOutcome::Cancelled { state_kept: true });
    assert_eq!(text(&run(&engine, &id, "get x").await.stdout), "1\n");
}

#[tokio::test(start_paused = true)]
async fn cancelling_a_deaf_cell_ends_within_the_grace_time() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    let caller = call();
    let running = spawn_run(&engine, caller.clone(), &id, "deaf");
    begun(&backend, "deaf").await;
    let cancelled = Instant::now();
    caller.cancel.cancel();
    assert!(lost(&ran(running.await.unwrap())).contains("cancelled"));
    assert_eq!(cancelled.elapsed().as_secs(), 4);
}

#[tokio::test(start_paused = true)]
async fn a_dropped_call_is_interrupted_and_the_next_run_waits_for_its_end() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    let running = spawn_run(&engine, call(), &id, "hang");
    begun(&backend, "hang").await;
    running.abort();
    assert_eq!(run(&engine, &id, "print next").await.end, RunOutcome::Ok);
}

/// HOSTILE G29, F29: whenever the cancellation comes, there is one outcome, and the next call is clean.
#[tokio::test(start_paused = true)]
async fn cancellations_at_any_moment_leave_everything_as_it_was() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let contexts = [create(&engine, "a").await, create(&engine, "b").await, create(&engine, "c").await];
    let mut running = Vec::new();
    for number in 0..300u64 {
        let caller = call();
        running.push(spawn_run(&engine, caller.clone(), &contexts[number as usize % 3], "sleep 3"));
        let cancel = caller.cancel;
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(number * 7 % 40)).await;
            cancel.cancel();
        });
        if number % 30 == 29 {
            for run in running.drain(..) {
                let result = run.await.unwrap();
                let fine = match &result {
                    Ok(Outcome::Ran(ran)) => {
                        matches!(ran.end, RunOutcome::Ok | RunOutcome::Cancelled { state_kept: true })
                    }
                    Err(EngineError::Cancelled) => true,
                    _ => false,
                };
                assert!(fine, "{result:?}");
            }
        }
    }
    for context in &contexts {
        assert_eq!(text(&run(&engine, context, "print clean").await.stdout), "clean\n");
    }
    assert_eq!(engine.sandboxes(), 6);
}

/// HOSTILE G30: the end and the deadline meet; one of the two is told.
#[tokio::test(start_paused = true)]
async fn an_end_at_the_deadline_is_one_outcome() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    for late in 0..50 {
        let mut run = RunCode::new(existing(&id), format!("sleep {}", 75 + late));
        run.timeout = Some(Duration::from_millis(100));
        let op = Op::RunCode(run);
        let end = ran(engine.execute(&call(), op).await).end;
        assert!(matches!(end, RunOutcome::Ok | RunOutcome::TimedOut { state_kept: true, .. }), "{end:?}");
    }
    assert_eq!(run(&engine, &id, "print on").await.end, RunOutcome::Ok);
}

#[tokio::test(start_paused = true)]
async fn runs_on_one_context_go_in_order_of_arrival() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    let codes: Vec<String> = (0..20).map(|n| format!("print {n}\nsleep {}", 20 - n)).collect();
    let mut running = Vec::new();
    for code in &codes {
        running.push(spawn_run(&engine, call(), &id, code));
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    for run in running {
        assert_eq!(ran(run.await.unwrap()).end, RunOutcome::Ok);
    }
    let cells: Vec<String> = backend.runs().into_iter().filter(|code| code != "pass").collect();
    assert_eq!(cells, codes);
}

/// A client may send the next call before it has the answer to the last: on many threads, too, they run in that order.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn runs_that_are_asked_for_at_once_go_in_the_order_they_were_asked_for() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    let codes: Vec<String> = (0..60).map(|n| format!("print {n}")).collect();
    let caller = call();
    let mut running: Vec<_> = codes.iter().map(|code| Box::pin(engine.execute(&caller, run_op(&id, code)))).collect();
    std::future::poll_fn(|context| {
        running.retain_mut(|run| run.as_mut().poll(context).is_pending());
        if running.is_empty() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
    let cells: Vec<String> = backend.runs().into_iter().filter(|code| code != "pass").collect();
    assert_eq!(cells, codes);
}

#[tokio::test(start_paused = true)]
async fn three_runs_execute_at_once_and_the_fourth_is_told_that_it_waits() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let mut running = Vec::new();
    for n in 0..3 {
        let id = create(&engine, "busy").await;
        let code = format!("sleep 5000\nprint {n}");
        running.push(spawn_run(&engine, call(), &id, &code));
        begun(&backend, &code).await;
    }
    let fourth = create(&engine, "fourth").await;
    let (caller, mut events) = followed();
    let waiting = spawn_run(&engine, caller, &fourth, "print four");
    assert_eq!(events.recv().await, Some(Event::Waiting(Waiting::Permits(3))));
    assert_eq!(names(&engine).await.len(), 4, "listing waits for nobody");
    assert_eq!(text(&ran(waiting.await.unwrap()).stdout), "four\n");
    assert_eq!(events.recv().await, Some(Event::Resumed));
    for run in running {
        assert_eq!(ran(run.await.unwrap()).end, RunOutcome::Ok);
    }
    assert_eq!(backend.most_running(), 3);
}

#[tokio::test(start_paused = true)]
async fn after_thirty_seconds_without_a_permit_a_run_is_refused_as_busy() {
    let backend = FakeBackend::new();
    let config = agentrun(|realm| realm.timeout = Duration::from_secs(100));
    let engine = engine_with(&backend, config).await;
    for n in 0..3 {
        let id = create(&engine, "busy").await;
        let code = format!("hang {n}");
        spawn_run(&engine, call(), &id, &code);
        begun(&backend, &code).await;
    }
    let fourth = create(&engine, "fourth").await;
    let begun = Instant::now();
    let refused = engine.execute(&call(), run_op(&fourth, "print 4")).await;
    assert_eq!(refused, Err(EngineError::Busy(Duration::from_secs(30))));
    assert_eq!(begun.elapsed().as_secs(), 30);
}

#[tokio::test(start_paused = true)]
async fn a_context_with_a_queue_takes_one_permit_only() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let (busy, other) = (create(&engine, "busy").await, create(&engine, "other").await);
    let mut running = Vec::new();
    for _ in 0..10 {
        running.push(spawn_run(&engine, call(), &busy, "sleep 1000"));
    }
    begun(&backend, "sleep 1000").await;
    let started = Instant::now();
    assert_eq!(run(&engine, &other, "print quick").await.end, RunOutcome::Ok);
    assert!(started.elapsed() < Duration::from_millis(100));
    for run in running {
        assert_eq!(ran(run.await.unwrap()).end, RunOutcome::Ok);
    }
}

/// HOSTILE F14.
#[tokio::test(start_paused = true)]
async fn the_queue_is_bounded_per_tenant() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "busy").await;
    let queued: Vec<_> = (0..200).map(|_| spawn_run(&engine, call(), &id, "sleep 100")).collect();
    let stranger = call_of(&Tenant("stranger".into()));
    let Ok(Outcome::Created(theirs)) = engine.execute(&stranger, create_op("mine")).await else { panic!() };
    assert_eq!(ran(engine.execute(&stranger, run_op(&theirs.id, "print 1")).await).end, RunOutcome::Ok);
    let (mut ok, mut busy) = (0, 0);
    for run in queued {
        match run.await.unwrap() {
            Ok(Outcome::Ran(_)) => ok += 1,
            Err(EngineError::QueueFull(100)) => busy += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((ok, busy), (101, 99));
}

#[tokio::test(start_paused = true)]
async fn cancelled_in_the_queue_a_run_never_starts() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    let first = spawn_run(&engine, call(), &id, "sleep 1000");
    begun(&backend, "sleep 1000").await;
    let caller = call();
    let second = spawn_run(&engine, caller.clone(), &id, "print never");
    tokio::time::sleep(Duration::from_millis(10)).await;
    caller.cancel.cancel();
    assert_eq!(second.await.unwrap(), Err(EngineError::Cancelled));
    assert_eq!(ran(first.await.unwrap()).end, RunOutcome::Ok);
    assert!(!backend.runs().contains(&"print never".to_owned()));
}

/// W54: a file operation in a context whose sandbox was lost waits for the next sandbox and not for the run in it. It
/// can be cancelled, and counts in the queue.
#[tokio::test(start_paused = true)]
async fn w54_a_file_operation_waits_for_a_sandbox_and_not_for_the_run_in_it() {
    let backend = FakeBackend::new();
    let config = EngineConfig { queue_length: 2, ..agentrun(|realm| realm.pool_size = 0) };
    let engine = engine_with(&backend, config).await;
    let id = create(&engine, "a").await;
    backend.kill(0);
    tokio::time::sleep(Duration::from_millis(10)).await;
    backend.slow_down(Duration::from_secs(5), Duration::ZERO);
    let running = spawn_run(&engine, call(), &id, "sleep 20000");
    tokio::time::sleep(Duration::from_millis(10)).await;
    let write = || Op::WriteFile { owner: files_of(&id), path: "f".into(), content: vec![1] };
    let caller = call();
    let cancelled = spawn_op(&engine, &caller, write());
    let waiting = spawn_op(&engine, &call(), write());
    tokio::time::sleep(Duration::from_millis(10)).await;
    assert_eq!(engine.execute(&call(), write()).await, Err(EngineError::QueueFull(2)));
    caller.cancel.cancel();
    let cancelled = tokio::time::timeout(Duration::from_millis(100), cancelled).await;
    assert_eq!(cancelled.expect("at once").unwrap(), Err(EngineError::Cancelled));
    begun(&backend, "sleep 20000").await;
    let written = tokio::time::timeout(Duration::from_secs(1), waiting).await.expect("beside the run").unwrap();
    assert!(matches!(written, Ok(Outcome::Written { .. })), "{written:?}");
    assert!(!running.is_finished());
    assert_eq!(ran(running.await.unwrap()).end, RunOutcome::Ok);

    backend.kill(1);
    tokio::time::sleep(Duration::from_millis(10)).await;
    let _running = spawn_run(&engine, call(), &id, "sleep 20000");
    tokio::time::sleep(Duration::from_millis(10)).await;
    let waiting = spawn_op(&engine, &call(), write());
    tokio::time::sleep(Duration::from_millis(10)).await;
    let stopping = engine.clone();
    tokio::spawn(async move { stopping.shutdown(Duration::from_secs(20)).await });
    let over = tokio::time::timeout(Duration::from_millis(100), waiting).await;
    assert_eq!(over.expect("at once").unwrap(), Err(EngineError::ShuttingDown));
}

/// HOSTILE R17: a thousand writes are a few events.
#[tokio::test(start_paused = true)]
async fn output_is_shown_while_the_cell_runs_in_a_few_events() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    let (caller, mut events) = followed();
    let code = format!("print first\nsleep 1000\n{}", "print x\nsleep 1\n".repeat(1000));
    let running = spawn_run(&engine, caller, &id, &code);
    assert_eq!(events.recv().await, Some(Event::Output { stream: Stream::Stdout, text: "first\n".into() }));
    assert!(!running.is_finished());
    let whole = ran(running.await.unwrap()).stdout.text;
    let mut shown = String::from("first\n");
    let mut count = 0;
    while let Some(Event::Output { text, .. }) = events.recv().await {
        shown.push_str(&text);
        count += 1;
    }
    assert_eq!(shown, whole);
    assert!(count <= 11, "{count} events in about a second");
}

#[tokio::test(start_paused = true)]
async fn code_beyond_the_limit_is_refused_with_a_reason() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    let refused = run(&engine, &id, &"#".repeat((8 << 20) + 1)).await;
    assert_eq!(refused.end, RunOutcome::Error);
    assert!(refused.error.unwrap().text.contains("at most 8388608"));
}

#[tokio::test(start_paused = true)]
async fn code_that_grows_too_long_on_the_wire_is_refused_with_a_reason() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    run(&engine, &id, "set x 1").await;
    let refused = run(&engine, &id, &"\u{1}".repeat(7 << 20)).await;
    assert_eq!(refused.end, RunOutcome::Error);
    assert_eq!(text(&run(&engine, &id, "get x").await.stdout), "1\n", "nothing is lost by it");
}

#[tokio::test(start_paused = true)]
async fn an_interpreter_that_ends_between_runs_is_replaced_and_the_next_run_says_so() {
    let backend = FakeBackend::scripted(|call, request, wire| {
        let proto::ToGuest::Run { code, kernel, .. } = request else { return None };
        let (wire, kernel) = (wire.clone(), *kernel);
        (code == "quit later").then(|| -> std::pin::Pin<Box<dyn Future<Output = ()> + Send>> {
            Box::pin(async move {
                wire.end(call, proto::RunStatus::Ok).await;
                wire.send(0, &FromGuest::KernelExited { kernel, how: Ended::Exited { code: 7 } }).await;
            })
        })
    });
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    run(&engine, &id, "set x 1\nprint").await;
    run(&engine, &id, "quit later").await;
    tokio::time::sleep(Duration::from_millis(10)).await;
    let next = run(&engine, &id, "get x").await;
    assert_eq!(next.end, RunOutcome::Error);
    assert_eq!(
        next.notice.as_deref(),
        Some("[the interpreter ended between two calls (exit status 7): variables are lost, files are kept]")
    );
}

#[tokio::test(start_paused = true)]
async fn an_interpreter_that_cannot_be_started_again_costs_the_sandbox_not_the_context() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    run(&engine, &id, "die 11").await;
    backend.fail_next_kernels(1);
    let next = run(&engine, &id, "print on").await;
    assert_eq!((text(&next.stdout), next.end), ("on\n", RunOutcome::Ok));
    assert!(next.notice.unwrap().contains("files are gone"));
}

/// Of two losses the greater is told.
#[tokio::test(start_paused = true)]
async fn an_interpreter_that_ended_and_cannot_be_started_again_has_taken_the_files_along() {
    let backend = FakeBackend::scripted(|call, request, wire| {
        let proto::ToGuest::Run { code, kernel, .. } = request else { return None };
        let (wire, kernel) = (wire.clone(), *kernel);
        (code == "quit later").then(|| -> std::pin::Pin<Box<dyn Future<Output = ()> + Send>> {
            Box::pin(async move {
                wire.end(call, proto::RunStatus::Ok).await;
                wire.send(0, &FromGuest::KernelExited { kernel, how: Ended::Exited { code: 7 } }).await;
            })
        })
    });
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    run(&engine, &id, "quit later").await;
    tokio::time::sleep(Duration::from_millis(10)).await;
    backend.fail_next_kernels(1);
    let notice = run(&engine, &id, "print on").await.notice.unwrap();
    assert!(notice.contains("files are gone") && !notice.contains("files are kept"), "{notice}");
}

#[tokio::test(start_paused = true)]
async fn displays_values_and_late_output_come_with_the_run() {
    let backend = FakeBackend::scripted(|call, request, wire| {
        let proto::ToGuest::Run { code, .. } = request else { return None };
        let wire = wire.clone();
        (code == "show").then(|| -> std::pin::Pin<Box<dyn Future<Output = ()> + Send>> {
            Box::pin(async move {
                let late = FromGuest::LateOutput { stdout: "tick".into(), stderr: "tock\n".into(), dropped: 0 };
                wire.send(call, &late).await;
                for (ago, text) in [(Some(1), "of a thread\n"), (Some(3), "of a timer"), (None, "an error\n")] {
                    let event = KernelEvent::Late { text: text.into(), ago };
                    wire.send(call, &FromGuest::Event { event }).await;
                }
                let bundle = |text: &str| proto::MimeBundle::from([("text/plain".into(), text.into())]);
                let display = KernelEvent::Display { data: bundle("a picture"), id: None, update: false };
                wire.send(call, &FromGuest::Event { event: display }).await;
                wire.send(call, &FromGuest::Event { event: KernelEvent::Result { data: bundle("42") } }).await;
                wire.end(call, proto::RunStatus::Ok).await;
            })
        })
    });
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    let shown = run(&engine, &id, "show").await;
    assert_eq!(shown.value.unwrap()["text/plain"], "42");
    assert_eq!(shown.displays[0]["text/plain"], "a picture");
    assert_eq!(shown.late.as_deref(), Some("tick\ntock\nan error\n"));
    // W26: neither in the output of this run nor without a word about whose it is.
    assert_eq!(
        shown.strays.as_deref(),
        Some(
            "[printed by what the call before this one left running]\nof a thread\n\
             [printed by what the call 3 before this one left running]\nof a timer\n"
        )
    );
    assert_eq!((shown.stdout.text.as_str(), shown.stderr.text.as_str()), ("", ""));
    assert_eq!(shown.duration, Duration::ZERO, "the clock stood still");
}
