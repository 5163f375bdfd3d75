//! Contexts: who finds them, how they end, what they may be.

mod support;

use std::time::Duration;

use engine::op::{FileListing, NewContext, RunOutcome, StoppedContext};
use engine::{EngineError, Op, Outcome, Tenant};
use proto::Language;
use support::*;
use testkit::fake::FakeBackend;
use tokio::time::Instant;

#[tokio::test(start_paused = true)]
async fn a_context_is_found_by_id_or_by_a_name_it_alone_has() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let only = create(&engine, "only").await;
    let (older, newer) = (create(&engine, "twin").await, create(&engine, "twin").await);
    let named_like_an_id = create(&engine, &only).await;
    run(&engine, &only, "set x 1").await;
    assert_eq!(text(&run(&engine, "only", "get x").await.stdout), "1\n");
    let ambiguous = engine.execute(&call(), run_op("twin", "print 1")).await;
    assert_eq!(ambiguous, Err(EngineError::AmbiguousName { name: "twin".into(), ids: vec![newer, older] }));
    assert_eq!(text(&run(&engine, &only, "get x").await.stdout), "1\n", "an id wins over a name");
    assert!(named_like_an_id != only);
    assert_eq!(names(&engine).await, [only.as_str(), "twin", "twin", "only"]);
}

/// HOSTILE X24.
#[tokio::test(start_paused = true)]
async fn only_the_exact_bytes_are_found() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "Zoë").await;
    let confusable = [
        id.to_uppercase(),
        format!(" {id}"),
        format!("{id} "),
        id.replace("ctx-", "ctx-0"),
        format!("{id}\0"),
        "zoë".into(),
        "Zoe\u{308}".into(),
        "x".repeat(1 << 20),
        String::new(),
    ];
    for wanted in confusable {
        let missed = engine.execute(&call(), run_op(&wanted, "print 1")).await;
        assert_eq!(missed, Err(EngineError::ContextNotFound(wanted)));
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_of_one_tenant_exists_for_another() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "mine").await;
    let stranger = call_of(&Tenant("stranger".into()));
    let file = |path: &str| Op::ReadFile { owner: files_of(&id), path: path.into() };
    for op in [
        run_op(&id, "print 1"),
        stop_op(&id),
        stop_op("mine"),
        file("x"),
        Op::ListFiles { owner: files_of(&id), path: ".".into(), depth: None },
    ] {
        assert!(matches!(engine.execute(&stranger, op).await, Err(EngineError::ContextNotFound(_))));
    }
    assert_eq!(engine.execute(&stranger, Op::ListContexts).await, Ok(Outcome::Contexts(vec![])));
    engine.execute(&stranger, create_op("mine")).await.unwrap();
    let groups: std::collections::BTreeSet<String> =
        backend.specs().into_iter().map(|spec| spec.groups[0].name.clone()).collect();
    assert_eq!(groups.len(), 2, "a budget each");
    assert!(groups.iter().all(
        |name| name.len() <= 64 && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
    ));
}

#[tokio::test(start_paused = true)]
async fn creating_beyond_the_limit_is_refused_however_many_try_at_once() {
    let backend = FakeBackend::new();
    let config = agentrun(|realm| realm.max_contexts = 5);
    let engine = engine_with(&backend, config).await;
    let tries: Vec<_> = (0..20)
        .map(|_| {
            let engine = engine.clone();
            tokio::spawn(async move { engine.execute(&call(), create_op("many")).await })
        })
        .collect();
    let mut created = 0;
    for attempt in tries {
        match attempt.await.unwrap() {
            Ok(_) => created += 1,
            Err(error) => assert_eq!(error, EngineError::ContextLimit(5)),
        }
    }
    assert_eq!(created, 5);
}

#[tokio::test(start_paused = true)]
async fn a_javascript_context_takes_a_session_and_changes_its_interpreter() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let op = |language| Op::CreateContext(NewContext { description: "d".into(), ..NewContext::named("js", language) });
    for language in [Language::Javascript, Language::Typescript] {
        let Ok(Outcome::Created(info)) = engine.execute(&call(), op(language)).await else { panic!() };
        assert_eq!((info.language, info.description.as_str()), (language, "d"));
        assert_eq!(text(&run(&engine, &info.id, "print js").await.stdout), "js\n");
        assert!(backend.kernels().iter().any(|spec| spec.language == language && spec.argv == ["node"]));
    }
}

#[tokio::test(start_paused = true)]
async fn without_node_javascript_is_refused_and_nothing_is_lost() {
    let backend = FakeBackend::new();
    let without = engine::Runtimes { node: None, ..runtimes() };
    let engine = engine::Engine::start(config(), without, std::sync::Arc::new(backend.clone())).await.unwrap();
    let op = Op::CreateContext(NewContext::named("js", Language::Javascript));
    let refused = engine.execute(&call(), op).await;
    assert_eq!(refused, Err(EngineError::CreateFailed("no JavaScript runtime is installed".into())));
    assert_eq!(backend.created(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_failed_creation_names_no_host_path_and_leaves_nothing() {
    let backend = FakeBackend::new();
    let engine = engine_with(&backend, agentrun(|realm| realm.pool_size = 1)).await;
    backend.fail_next_creates(1000);
    create(&engine, "takes the session").await;
    let refused = engine.execute(&call(), create_op("too many")).await.unwrap_err();
    assert_eq!(refused, EngineError::CreateFailed("the back end failed; the server's log says why".into()));
    assert_eq!((names(&engine).await.len(), backend.living()), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_creation_that_was_cancelled_or_dropped_leaves_nothing() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let caller = call();
    caller.cancel.cancel();
    assert_eq!(engine.execute(&caller, create_op("a")).await, Err(EngineError::Cancelled));
    for polls in 0..20 {
        let caller = call();
        let mut creating = Box::pin(engine.execute(&caller, create_op("b")));
        for _ in 0..polls {
            tokio::select! {
                biased;
                created = &mut creating => {
                    let Ok(Outcome::Created(info)) = created else { panic!("{created:?}") };
                    engine.execute(&call(), stop_op(&info.id)).await.unwrap();
                    break;
                }
                () = tokio::task::yield_now() => {}
            }
        }
    }
    eventually("only the pool is left", || backend.living() == 3 && engine.sandboxes() == 3).await;
    assert!(names(&engine).await.is_empty());
}

#[tokio::test(start_paused = true)]
async fn stopping_waits_for_running_code_and_never_interrupts_it() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    let running = spawn_run(&engine, call(), &id, "sleep 5000\nprint done");
    begun(&backend, "sleep 5000\nprint done").await;
    let queued = spawn_run(&engine, call(), &id, "print queued");
    tokio::time::sleep(Duration::from_millis(10)).await;
    let started = Instant::now();
    let stopping = {
        let (engine, id) = (engine.clone(), id.clone());
        tokio::spawn(async move { engine.execute(&call(), stop_op(&id)).await })
    };
    let gone = Err(EngineError::ContextNotFound(id.clone()));
    assert_eq!(queued.await.unwrap(), gone);
    assert!(names(&engine).await.is_empty());
    assert_eq!(engine.execute(&call(), run_op(&id, "print 1")).await, gone);
    assert_eq!(engine.execute(&call(), stop_op(&id)).await, gone);
    assert!(started.elapsed() < Duration::from_secs(1));
    assert_eq!(
        stopping.await.unwrap(),
        Ok(Outcome::Stopped(StoppedContext { context_id: id.clone(), ..StoppedContext::default() }))
    );
    assert_eq!(started.elapsed().as_secs(), 4, "until the code has ended by itself");
    let finished = ran(running.await.unwrap());
    assert_eq!((text(&finished.stdout), finished.end), ("done\n", RunOutcome::Ok));
    assert_eq!(engine.execute(&call(), stop_op(&id)).await, gone);
    eventually("only the pool is left", || backend.living() == 3).await;
}

#[tokio::test(start_paused = true)]
async fn a_stop_by_name_answers_with_the_id() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "named").await;
    assert_eq!(
        engine.execute(&call(), stop_op("named")).await,
        Ok(Outcome::Stopped(StoppedContext { context_id: id, ..StoppedContext::default() }))
    );
    assert_eq!(engine.execute(&call(), stop_op("named")).await, Err(EngineError::ContextNotFound("named".into())));
}

#[tokio::test(start_paused = true)]
async fn a_stop_the_back_end_refuses_is_told_and_tried_again_later() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    backend.fail_destroys(true);
    let refused = engine.execute(&call(), stop_op(&id)).await;
    assert_eq!(refused, Err(EngineError::StopFailed("the back end failed; the server's log says why".into())));
    assert!(names(&engine).await.is_empty());
    backend.fail_destroys(false);
    eventually("the sandbox is destroyed after all", || backend.living() == 3).await;
}

#[tokio::test(start_paused = true)]
async fn idle_contexts_are_stopped_and_busy_ones_are_not() {
    let backend = FakeBackend::new();
    let config = agentrun(|realm| {
        realm.idle_timeout = Some(Duration::from_secs(60));
        realm.timeout = Duration::from_secs(200);
    });
    let engine = engine_with(&backend, config).await;
    let (idle, busy) = (create(&engine, "idle").await, create(&engine, "busy").await);
    let running = spawn_run(&engine, call(), &busy, "sleep 100000");
    begun(&backend, "sleep 100000").await;
    tokio::time::sleep(Duration::from_secs(90)).await;
    assert_eq!(names(&engine).await, ["busy"]);
    assert_eq!(engine.execute(&call(), run_op(&idle, "print 1")).await, Err(EngineError::ContextNotFound(idle)));
    assert_eq!(ran(running.await.unwrap()).end, RunOutcome::Ok);
}

#[tokio::test(start_paused = true)]
async fn files_go_in_and_out_while_a_cell_runs() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    let running = spawn_run(&engine, call(), &id, "sleep 20000");
    begun(&backend, "sleep 20000").await;
    let content: Vec<u8> = (0..3_000_000u32).map(|n| n as u8).collect();
    let write = Op::WriteFile { owner: files_of(&id), path: "d/f".into(), content: content.clone() };
    let size = content.len() as u64;
    let Ok(Outcome::Written { path, size: written, key }) = engine.execute(&call(), write).await else { panic!() };
    assert_eq!((path.as_str(), written), ("d/f", size));
    let read = Op::ReadFile { owner: files_of(&id), path: "d/f".into() };
    assert_eq!(engine.execute(&call(), read).await, Ok(Outcome::File { path: "d/f".into(), content, size, key }));
    let list = Op::ListFiles { owner: files_of(&id), path: ".".into(), depth: None };
    let Ok(Outcome::Files(FileListing { entries, total: 1, .. })) = engine.execute(&call(), list).await else {
        panic!()
    };
    assert_eq!((entries[0].path.as_str(), entries[0].size), ("d/f", size));
    assert!(!running.is_finished());
    let missing = Op::ReadFile { owner: files_of(&id), path: "no".into() };
    assert_eq!(engine.execute(&call(), missing).await, Err(EngineError::FileNotFound("no".into())));
    let large = Op::WriteFile { owner: files_of(&id), path: "big".into(), content: vec![0; (16 << 20) + 1] };
    assert_eq!(
        engine.execute(&call(), large).await,
        Err(EngineError::FileTooLarge { path: "big".into(), limit: 16 << 20 })
    );
}

#[tokio::test(start_paused = true)]
async fn where_names_are_unique_a_second_context_of_a_name_is_refused_however_many_ask_at_once() {
    let backend = FakeBackend::new();
    let engine = engine_with(&backend, agentrun(|realm| realm.unique_names = true)).await;
    let asked: Vec<_> = (0..5).map(|_| spawn_op(&engine, &call(), create_op("a"))).collect();
    let (mut made, mut taken) = (Vec::new(), Vec::new());
    for asked in asked {
        match asked.await.unwrap() {
            Ok(Outcome::Created(context)) => made.push(context.id),
            Err(EngineError::NameTaken { name, id }) if name == "a" => taken.push(id),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((made.len(), taken), (1, vec![made[0].clone(); 4]));
    assert_eq!(run(&engine, "a", "print found").await.end, RunOutcome::Ok);
    engine.execute(&call(), stop_op("a")).await.unwrap();
    assert!(engine.execute(&call(), create_op("a")).await.is_ok(), "the name is free again");
}
