//! Commands in the sandbox of a context.

use std::time::Duration;

use engine::op::{Command, ContextSelector, NewContext, RunCommand, RunOutcome, Target};
use engine::{EngineConfig, EngineError, Op, Outcome};
use proto::{Ended, Language};
use testkit::fake::FakeBackend;
use tokio::time::Instant;

use crate::support::*;

/// A realm in which commands run beside cells and beside each other.
fn side_by_side() -> EngineConfig {
    agentrun(|realm| (realm.one_run_at_a_time, realm.runs_at_once) = (false, 10))
}

#[tokio::test(start_paused = true)]
async fn each_end_of_a_command_is_told_apart() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    run(&engine, &id, "set x 1\nwrite f from a cell").await;
    let command = async |line: &str| ran(engine.execute(&call(), command_op(&id, line)).await);
    let ok = command("print out\nerror err\nread f").await;
    assert_eq!((text(&ok.stdout), text(&ok.stderr), ok.end), ("out\nfrom a cell", "err\n", RunOutcome::Ok));
    assert_eq!(command("exit 3").await.end, RunOutcome::Exit { code: 3 });
    assert_eq!(command("die 15").await.end, RunOutcome::Ended { how: Ended::Signaled { signal: 15 } });
    let timed_out = command("hang").await.end;
    assert_eq!(timed_out, RunOutcome::TimedOut { after: Duration::from_secs(30), state_kept: true });
    // It has its turn once what was killed before is accounted for.
    assert_eq!(command("print on").await.end, RunOutcome::Ok);
    backend.set_oom_kills(1);
    assert!(matches!(command("die 9").await.end, RunOutcome::OutOfMemory { .. }));
    assert_eq!(text(&run(&engine, &id, "get x").await.stdout), "1\n", "variables are not a command's to lose");

    let caller = call();
    let running = spawn_op(&engine, &caller, command_op(&id, "hang on"));
    begun(&backend, "hang on").await;
    caller.cancel.cancel();
    assert_eq!(ran(running.await.unwrap()).end, RunOutcome::Cancelled { state_kept: true });
}

#[tokio::test(start_paused = true)]
async fn a_program_that_is_not_there_is_a_result_as_in_a_shell() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    for argv in [vec!["nosuch".to_owned(), "-x".into()], vec![], vec!["a\0b".into()]] {
        let op = RunCommand { command: Command::Argv(argv.clone()), ..shell(existing(&id), "") };
        let missing = ran(engine.execute(&call(), Op::RunCommand(op)).await);
        let (code, said) = match argv.first().map(String::as_str) {
            Some("nosuch") => (127, "nosuch: command not found\n"),
            None => (127, ": command not found\n"),
            _ => (126, "the command has a zero byte\n"),
        };
        assert_eq!((missing.end, text(&missing.stderr)), (RunOutcome::Exit { code }, said));
    }
}

#[tokio::test(start_paused = true)]
async fn a_command_sees_interpreters_first_in_its_path_and_the_files_of_cells() {
    let backend = FakeBackend::new();
    let command = |name: &str| engine::KernelCommand {
        argv: vec![format!("/opt/{name}/bin/{name}")],
        env: [("PATH".to_owned(), "/usr/bin:/opt/node/bin:/bin".to_owned()), ("LANG".into(), "C.UTF-8".into())].into(),
        ..Default::default()
    };
    let runtimes = engine::Runtimes {
        python: command("python"),
        node: Some(command("node")),
        browser: None,
        files: vec![],
        links: vec![],
        unpinned: vec![],
    };
    let backend_again = std::sync::Arc::new(backend.clone());
    let engine = engine::Engine::start(config(), runtimes, backend_again).await.unwrap();
    let id = create(&engine, "a").await;
    assert_eq!(run(&engine, &id, "write f x").await.end, RunOutcome::Ok);
    let mut op = shell(existing(&id), "read f\nenv PATH\nenv HOME\nenv MINE");
    op.env.0.insert("MINE".into(), "yes".into());
    let seen = ran(engine.execute(&call(), Op::RunCommand(op)).await);
    let path = "/opt/python/bin:/opt/node/bin:/usr/bin:/bin";
    assert_eq!(text(&seen.stdout), format!("x{path}\n/workspace\nyes\n"));
}

/// The scripted guest knows no bash.
#[tokio::test(start_paused = true)]
async fn without_bash_a_line_for_it_runs_in_the_plain_shell() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    let run = RunCommand { command: Command::Bash("print x\nexit 3".into()), ..shell(existing(&id), "") };
    let ended = ran(engine.execute(&call(), Op::RunCommand(run)).await);
    assert_eq!((ended.end, text(&ended.stdout)), (RunOutcome::Exit { code: 3 }, "x\n"));
}

#[tokio::test(start_paused = true)]
async fn commands_run_beside_cells_and_beside_each_other() {
    let backend = FakeBackend::new();
    let engine = engine_with(&backend, side_by_side()).await;
    let id = create(&engine, "a").await;
    let cell = spawn_run(&engine, call(), &id, "sleep 20000");
    begun(&backend, "sleep 20000").await;
    let mut server = shell(existing(&id), "sleep 10000\nprint served");
    server.background = true;
    let Ok(Outcome::Started(started)) = engine.execute(&call(), Op::RunCommand(server)).await else { panic!() };
    assert!(started.queued.is_none());
    let before = Instant::now();
    let quick = ran(engine.execute(&call(), Op::RunCommand(shell(existing(&id), "print quick"))).await);
    assert_eq!(text(&quick.stdout), "quick\n");
    assert!(before.elapsed() < Duration::from_secs(1));
    assert_eq!(ran(cell.await.unwrap()).end, RunOutcome::Ok);
    let info = engine.execute(&call(), Op::ListContexts).await;
    assert!(matches!(info, Ok(Outcome::Contexts(all)) if !all[0].busy), "both have ended");
}

#[tokio::test(start_paused = true)]
async fn where_one_run_goes_at_a_time_a_command_waits_for_a_cell() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    let cell = spawn_run(&engine, call(), &id, "sleep 2000\nwrite f from the cell");
    begun(&backend, "sleep 2000\nwrite f from the cell").await;
    let read = ran(engine.execute(&call(), command_op(&id, "read f")).await);
    assert_eq!(text(&read.stdout), "from the cell");
    assert_eq!(ran(cell.await.unwrap()).end, RunOutcome::Ok);
}

/// Each memory kill explains the end of one run.
#[tokio::test(start_paused = true)]
async fn a_run_that_is_killed_by_hand_is_not_called_out_of_memory_because_another_was() {
    let backend = FakeBackend::new();
    let engine = engine_with(&backend, side_by_side()).await;
    let id = create(&engine, "a").await;
    let by_hand = spawn_op(&engine, &call(), command_op(&id, "sleep 3000\ndie 9"));
    tokio::time::sleep(Duration::from_secs(1)).await;
    backend.set_oom_kills(1);
    let for_memory = ran(engine.execute(&call(), command_op(&id, "die 9")).await);
    assert!(matches!(for_memory.end, RunOutcome::OutOfMemory { .. }), "{:?}", for_memory.end);
    let killed = RunOutcome::Ended { how: Ended::Signaled { signal: 9 } };
    assert_eq!(ran(by_hand.await.unwrap()).end, killed);
}

#[tokio::test(start_paused = true)]
async fn a_command_does_not_wait_longer_than_its_timeout_for_a_sandbox_that_another_run_makes() {
    let backend = FakeBackend::new();
    let engine = engine_with(&backend, side_by_side()).await;
    let id = create(&engine, "a").await;
    (0..backend.created()).for_each(|number| backend.kill(number));
    backend.slow_down(Duration::from_secs(20), Duration::ZERO);
    tokio::time::sleep(Duration::from_secs(1)).await;
    let first = spawn_op(&engine, &call(), command_op(&id, "print first"));
    tokio::time::sleep(Duration::from_secs(1)).await;
    let (before, timeout) = (Instant::now(), Duration::from_secs(2));
    let second = RunCommand { timeout: Some(timeout), ..shell(existing(&id), "print second") };
    let refused = engine.execute(&call(), Op::RunCommand(second)).await;
    assert_eq!((refused, before.elapsed().as_secs()), (Err(EngineError::Busy(timeout)), 2));
    assert_eq!(text(&ran(first.await.unwrap()).stdout), "first\n");
    assert!(!backend.runs().contains(&"print second".to_owned()));
}

/// The lost sandbox of one run may have been replaced by another run before the first one ends.
#[tokio::test(start_paused = true)]
async fn runs_that_lose_their_sandbox_together_leave_its_successor_alone() {
    let backend = FakeBackend::new();
    let engine = engine_with(&backend, side_by_side()).await;
    let id = create(&engine, "a").await;
    let (cell, command) = (
        spawn_run(&engine, call(), &id, "sleep 50000"),
        spawn_op(&engine, &call(), Op::RunCommand(shell(existing(&id), "sleep 50000"))),
    );
    begun(&backend, "sleep 50000").await;
    tokio::time::sleep(Duration::from_millis(10)).await;
    (0..backend.created()).for_each(|number| backend.kill(number));
    for ended in [ran(cell.await.unwrap()), ran(command.await.unwrap())] {
        assert!(matches!(ended.end, RunOutcome::SandboxLost { .. }), "{:?}", ended.end);
    }
    assert_eq!(run(&engine, &id, "set x 1").await.end, RunOutcome::Ok);
    assert_eq!(text(&run(&engine, &id, "get x").await.stdout), "1\n");
}

/// Where no cgroup holds the memory limit, a sandbox that exceeds it is ended, which explains the end of every run in
/// it.
#[tokio::test(start_paused = true)]
async fn runs_whose_sandbox_was_ended_for_its_memory_say_so() {
    let backend = FakeBackend::new();
    let engine = engine_with(&backend, side_by_side()).await;
    let id = create(&engine, "a").await;
    let (cell, command) = (
        spawn_run(&engine, call(), &id, "sleep 50000"),
        spawn_op(&engine, &call(), Op::RunCommand(shell(existing(&id), "sleep 50000"))),
    );
    begun(&backend, "sleep 50000").await;
    tokio::time::sleep(Duration::from_millis(10)).await;
    backend.end_for_memory();
    for ended in [ran(cell.await.unwrap()), ran(command.await.unwrap())] {
        assert_eq!(ended.end, RunOutcome::SandboxOutOfMemory { limit_bytes: 2048 << 20 });
    }
    assert_eq!(run(&engine, &id, "print on").await.end, RunOutcome::Ok);
    // Between two runs.
    backend.end_for_memory();
    tokio::time::sleep(Duration::from_millis(10)).await;
    let notice = run(&engine, &id, "print on").await.notice.unwrap();
    let expected =
        "[the sandbox was lost (it used more than its limit of 2048 MB of memory): variables and files are gone]";
    assert_eq!(notice, expected);
}

#[tokio::test(start_paused = true)]
async fn a_context_made_for_a_command_starts_no_interpreter_until_code_comes() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let caller = call_in(dialects::microsandbox::REALM);
    let before = backend.kernels().len();
    let make = Some(NewContext::named("", Language::Javascript));
    let target = Target { which: ContextSelector::Id("s".into()), make };
    let made = ran(engine.execute(&caller, Op::RunCommand(shell(target.clone(), "print 1"))).await);
    assert_eq!((made.created, made.context.language, backend.kernels().len()), (true, Language::Javascript, before));
    let other = RunCommand { language: Some(Language::Python), ..shell(target.clone(), "print 1") };
    let refused = engine.execute(&caller, Op::RunCommand(other)).await;
    assert!(matches!(refused, Err(EngineError::OtherLanguage { .. })), "{refused:?}");
    let code = engine::op::RunCode::new(target, "print js");
    assert_eq!(text(&ran(engine.execute(&caller, Op::RunCode(code)).await).stdout), "js\n");
    assert_eq!(backend.kernels().pop().unwrap().language, Language::Javascript);
}

#[tokio::test(start_paused = true)]
async fn a_command_may_take_longer_than_a_cell() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let caller = call_in(dialects::microsandbox::REALM);
    let make = Some(NewContext::named("", Language::Python));
    let target = Target { which: ContextSelector::Id("s".into()), make };
    let op = RunCommand { timeout: Some(Duration::from_secs(1000)), ..shell(target.clone(), "sleep 900000") };
    assert_eq!(ran(engine.execute(&caller, Op::RunCommand(op)).await).end, RunOutcome::Ok);
    let cell = engine::op::RunCode {
        timeout: Some(Duration::from_secs(1000)),
        ..engine::op::RunCode::new(target, "sleep 900000")
    };
    let end = ran(engine.execute(&caller, Op::RunCode(cell)).await).end;
    assert_eq!(end, RunOutcome::TimedOut { after: Duration::from_secs(300), state_kept: true });
}
