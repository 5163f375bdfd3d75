//! The engine with the real guest and a real Python, without walls.
//!
//! Needs `SANDPOOL_TEST_PYTHON`: a Python with ipython, and matplotlib for the figures.

mod support;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::op::{Command, Ended, RunCode, RunCommand, RunOutcome};
use engine::{Engine, EngineConfig, EngineError, Event, KernelCommand, Op, Outcome, Runtimes};
use support::*;
use testkit::inprocess::InProcess;

/// Removed when the test ends.
struct Base(PathBuf);

impl Drop for Base {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[expect(clippy::disallowed_methods, reason = "tests are told by the environment what they may use")]
fn python() -> Option<String> {
    let python = std::env::var("SANDPOOL_TEST_PYTHON").ok();
    assert!(python.is_some() || std::env::var_os("CI").is_none(), "SANDPOOL_TEST_PYTHON is not set");
    if python.is_none() {
        eprintln!("SKIP: SANDPOOL_TEST_PYTHON is not set");
    }
    python
}

async fn start(config: EngineConfig) -> Option<(Engine, Base)> {
    let python = python()?;
    let base = std::env::temp_dir().join(format!("sandpool-test-{}", uuid::Uuid::new_v4().simple()));
    let driver = "/opt/sandpool/driver.py";
    let env =
        [("PATH", "/usr/bin:/bin"), ("LANG", "C.UTF-8"), ("MPLBACKEND", "module://matplotlib_inline.backend_inline")];
    let python = KernelCommand {
        argv: [python.as_str(), "-I", "-B", "-X", "utf8", driver].map(String::from).to_vec(),
        env: env.map(|(name, value)| (name.into(), value.into())).into(),
        ..KernelCommand::default()
    };
    let files = vec![(driver.into(), guest::kernels::PYTHON_DRIVER.into())];
    let backend = Arc::new(InProcess::new(&base, Vec::new()));
    let runtimes = Runtimes { python, node: None, browser: None, files, links: Vec::new(), unpinned: Vec::new() };
    let engine = Engine::start(config, runtimes, backend).await.expect("the engine starts");
    Some((engine, Base(base)))
}

#[tokio::test(flavor = "multi_thread")]
async fn state_is_kept_and_contexts_are_apart() {
    let Some((engine, base)) = start(usual()).await else { return };
    let (alice, bob) = (create(&engine, "alice").await, create(&engine, "bob").await);
    assert_eq!(run(&engine, &alice, "x = 42").await.end, RunOutcome::Ok);
    let printed = run(&engine, &alice, "print(x)\nx + 1").await;
    assert_eq!((text(&printed.stdout), &printed.end), ("42\n", &RunOutcome::Ok));
    assert_eq!(printed.value.unwrap()["text/plain"], "43");
    let missing = run(&engine, &bob, "print(x)").await;
    let error = missing.error.unwrap();
    assert_eq!((missing.end, error.name.as_str()), (RunOutcome::Error, "NameError"));
    assert!(error.text.starts_with("Traceback (most recent call last):"), "{}", error.text);
    let fresh = run(&engine, &bob, "_").await;
    assert_eq!(
        fresh.value.map(|value| value["text/plain"].clone()),
        Some("''".into()),
        "the health check leaves no value"
    );
    engine.shutdown(Duration::ZERO).await;
    assert_eq!(std::fs::read_dir(&base.0).unwrap().count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_time_out_keeps_variables_and_a_cancel_too() {
    let Some((engine, _base)) = start(agentrun(|realm| realm.timeout = Duration::from_secs(1))).await else {
        return;
    };
    let id = create(&engine, "a").await;
    let timed_out = run(&engine, &id, "x = 1\nwhile True: pass").await;
    assert_eq!(timed_out.end, RunOutcome::TimedOut { after: Duration::from_secs(1), state_kept: true });
    let caller = call();
    let running = spawn_run(&engine, caller.clone(), &id, "import time\nprint('on', flush=True)\ntime.sleep(100)");
    tokio::time::sleep(Duration::from_millis(300)).await;
    caller.cancel.cancel();
    assert_eq!(ran(running.await.unwrap()).end, RunOutcome::Cancelled { state_kept: true });
    assert_eq!(text(&run(&engine, &id, "print(x)").await.stdout), "1\n");
    engine.shutdown(Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_costs_variables_and_keeps_files() {
    let Some((engine, _base)) = start(usual()).await else { return };
    let id = create(&engine, "a").await;
    let write = Op::WriteFile { owner: files_of(&id), path: "d/in.txt".into(), content: b"kept".to_vec() };
    assert!(matches!(engine.execute(&call(), write).await, Ok(Outcome::Written { size: 4, .. })));
    let crashed = run(&engine, &id, "x = 1\nimport os, signal\nos.kill(os.getpid(), signal.SIGSEGV)").await;
    assert!(matches!(crashed.end, RunOutcome::Ended { .. }), "{crashed:?}");
    let next = run(&engine, &id, "print(open('d/in.txt').read(), 'x' in globals())").await;
    assert_eq!(text(&next.stdout), "kept False\n");
    run(&engine, &id, "open('out.txt', 'w').write('from python')").await;
    let read = Op::ReadFile { owner: files_of(&id), path: "out.txt".into() };
    let Ok(Outcome::File { content, .. }) = engine.execute(&call(), read).await else { panic!() };
    assert_eq!(content, b"from python");
    let list = Op::ListFiles { owner: files_of(&id), path: String::new(), depth: None };
    let Ok(Outcome::Files(engine::op::FileListing { entries, .. })) = engine.execute(&call(), list).await else {
        panic!()
    };
    let paths: Vec<&str> = entries.iter().map(|entry| entry.path.as_str()).collect();
    assert_eq!(paths, ["d", "d/in.txt", "out.txt"]);
    let outside = Op::ReadFile { owner: files_of(&id), path: "../../../etc/passwd".into() };
    assert!(matches!(
        engine.execute(&call(), outside).await,
        Err(EngineError::InvalidPath { .. } | EngineError::FileNotFound(_))
    ));
    engine.shutdown(Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_is_cut_and_counted() {
    let Some((engine, _base)) = start(usual()).await else { return };
    let id = create(&engine, "a").await;
    let flooded = run(&engine, &id, "print('head')\nprint('x' * 50_000_000)\nprint('tail')").await;
    assert_eq!(flooded.stdout.total_bytes, 50_000_000 + 11);
    assert!(
        flooded.stdout.truncated
            && flooded.stdout.text.starts_with("head\n")
            && flooded.stdout.text.ends_with("tail\n")
    );
    assert!(flooded.stdout.text.chars().count() < 20_100);
    engine.shutdown(Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_figure_comes_back_as_a_picture() {
    let Some((engine, _base)) = start(usual()).await else { return };
    let id = create(&engine, "a").await;
    let plotted = run(&engine, &id, "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nNone").await;
    assert_eq!(plotted.end, RunOutcome::Ok, "{plotted:?}");
    assert!(plotted.displays.iter().any(|display| display.contains_key("image/png")), "{:?}", plotted.displays);
    engine.shutdown(Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn output_is_followed_while_it_is_printed() {
    let Some((engine, _base)) = start(usual()).await else { return };
    let id = create(&engine, "a").await;
    let (caller, mut events) = followed();
    let running =
        spawn_run(&engine, caller, &id, "import time\nprint('first', flush=True)\ntime.sleep(1.5)\nprint('second')");
    let began = Instant::now();
    let first = events.recv().await;
    assert_eq!(first, Some(Event::Output { stream: proto::Stream::Stdout, text: "first\n".into() }));
    assert!(began.elapsed() < Duration::from_secs(1) && !running.is_finished());
    assert_eq!(text(&ran(running.await.unwrap()).stdout), "first\nsecond\n");
    engine.shutdown(Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_see_the_files_of_cells_and_end_as_they_end() {
    let Some((engine, _base)) = start(agentrun(|realm| realm.timeout = Duration::from_secs(2))).await else { return };
    let id = create(&engine, "a").await;
    run(&engine, &id, "x = 1\nopen('f', 'w').write('from a cell')").await;
    let command = async |line: &str| ran(engine.execute(&call(), command_op(&id, line)).await);
    let seen = command("cat f; echo err >&2; python3 -c 'print(6 * 7)'").await;
    assert_eq!((text(&seen.stdout), text(&seen.stderr), &seen.end), ("from a cell42\n", "err\n", &RunOutcome::Ok));
    assert_eq!(command("exit 3").await.end, RunOutcome::Exit { code: 3 });
    assert_eq!(command("kill -9 $$").await.end, RunOutcome::Ended { how: Ended::Signaled { signal: 9 } });
    let timed_out = command("sleep 100").await.end;
    assert_eq!(timed_out, RunOutcome::TimedOut { after: Duration::from_secs(2), state_kept: true });
    let missing = RunCommand { command: Command::Argv(vec!["no-such-program".into()]), ..shell(existing(&id), "") };
    let missing = ran(engine.execute(&call(), Op::RunCommand(missing)).await);
    assert_eq!(missing.end, RunOutcome::Exit { code: 127 });
    assert_eq!(text(&missing.stderr), "no-such-program: command not found\n");
    assert_eq!(text(&run(&engine, &id, "print(x)").await.stdout), "1\n");
    engine.shutdown(Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn variables_for_one_run_are_gone_after_it() {
    let Some((engine, _base)) = start(usual()).await else { return };
    let id = create(&engine, "a").await;
    let code =
        "import os, subprocess\nprint(os.environ.get('MINE'), flush=True)\nsubprocess.run(['sh', '-c', 'echo $MINE'])";
    let mut with = RunCode::new(existing(&id), code);
    with.env.0.insert("MINE".into(), "yes".into());
    let seen = ran(engine.execute(&call(), Op::RunCode(with)).await);
    assert_eq!(text(&seen.stdout), "yes\nyes\n");
    assert_eq!(text(&run(&engine, &id, "print(os.environ.get('MINE'))").await.stdout), "None\n");
    engine.shutdown(Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn long_output_and_files_are_read_through_links() {
    let Some((engine, _base)) = start(usual()).await else { return };
    let id = create(&engine, "a").await;
    let long = run(&engine, &id, "print('x' * 2_500_000)\nopen('f.bin', 'wb').write(bytes(range(256)) * 10_000)").await;
    let kept = long.stdout.kept.expect("kept whole");
    let whole = engine.open_file(&kept.key, &kept.name).await.unwrap();
    assert_eq!(whole.size, 2_500_001);
    assert_eq!(whole.read(2_499_999, 100).await.unwrap(), b"x\n");
    let file = engine.open_file(&long.context.key, "f.bin").await.unwrap();
    assert_eq!((file.size, file.read(255, 2).await.unwrap()), (2_560_000, vec![255, 0]));
    run(&engine, &id, "open('f.bin', 'wb').write(b'another')").await;
    assert!(file.read(0, 1).await.is_err(), "it is another file now");
    for path in ["../../etc/passwd", "/etc/passwd", "", ".", "f.bin/x", "no"] {
        let missing = engine.open_file(&long.context.key, path).await.map(drop);
        assert_eq!(missing, Err(EngineError::FileNotFound(path.into())));
    }
    engine.shutdown(Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_too_large_for_an_answer_is_told_by_its_size_and_its_link() {
    let config = EngineConfig { max_file_bytes: 3, max_link_bytes: 5, ..usual() };
    let Some((engine, _base)) = start(config).await else { return };
    let id = create(&engine, "a").await;
    let code = "for n in (3, 4, 6):\n    open(str(n), 'w').write('x' * n)";
    assert_eq!(run(&engine, &id, code).await.end, RunOutcome::Ok);
    let read = async |path: &str| {
        let read = engine.execute(&call(), Op::ReadFile { owner: files_of(&id), path: path.into() }).await?;
        let Outcome::File { content, size, .. } = read else { panic!("{read:?}") };
        Ok((content, size))
    };
    assert_eq!(read("3").await, Ok((b"xxx".to_vec(), 3)));
    assert_eq!(read("4").await, Ok((Vec::new(), 4)));
    assert_eq!(read("6").await, Err(EngineError::FileTooLarge { path: "6".into(), limit: 5 }));
}
