//! The guest over a socket, with kernels that are small programs: honest ones, broken ones and hostile ones.

mod browser;
mod files;
mod harness;
mod outputs;

use std::os::unix::net::UnixStream;

use harness::*;
use proto::{Deadline, Ended, FromGuest, GuestFailure, KernelSpec, Language, RunStatus, Stream, ToGuest};

const SHORT: Deadline = Deadline { after_ms: 1_000, grace_ms: 1_000 };

#[test]
fn a_cell_runs_and_its_output_comes_in_order() {
    let mut client = Client::new();
    client.started(1, &exec_fake());
    let ran = client.run(
        "out('a\\n'); ev(t='display',n=n,data={'text/plain':'d'}); out('b\\n'); os.write(2,b'e\\n')\n\
         ev(t='result',n=n,data={'text/plain':'1'})",
    );
    // What was written before an event never comes after it. What was written after it may come before, on a slow machine.
    let at = |what: &str| ran.order.iter().position(|line| line.starts_with(what)).unwrap();
    assert!(
        at("out a") < at("display") && at("display") < at("result") && at("err e") < at("result"),
        "{:?}",
        ran.order
    );
    assert_eq!((ran.out().as_str(), ran.err().as_str()), ("a\nb\n", "e\n"));
    assert_eq!(ran.status(), &RunStatus::Ok);
    let end = ran.end.unwrap();
    assert_eq!((end.stdout_bytes, end.stderr_bytes), (4, 2));
    client.nothing_left();
    client.bye();
}

/// What a warm cell costs the guest, counted: it wakes for the request and for the end, and reads each pipe once at both.
#[test]
fn a_short_cell_wakes_the_guest_twice() {
    const CELLS: u64 = 10;
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    let guest = std::thread::spawn(move || {
        tell.send(rustix::thread::gettid()).unwrap();
        guest::serve(theirs, config())
    });
    let mut client = Client::over(ours);
    client.hello();
    client.started(1, &exec_fake());
    let task = format!("/proc/self/task/{}", told.recv().unwrap().as_raw_nonzero());
    let count = |file: &str, name: &str| -> u64 {
        let text = std::fs::read_to_string(format!("{task}/{file}")).unwrap();
        text.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().parse().unwrap()
    };
    // The best of many short rounds: on a busy machine a cell may take longer, and is looked after meanwhile.
    let rounds = (0..32).map(|_| {
        let counts = || (count("status", "voluntary_ctxt_switches:"), count("io", "syscr:"), count("io", "syscw:"));
        let before = counts();
        for _ in 0..CELLS {
            assert_eq!(client.run("out('1\\n')").out(), "1\n");
        }
        let after = counts();
        [after.0 - before.0, after.1 - before.1, after.2 - before.2]
    });
    let best = |one: [u64; 3], other: [u64; 3]| std::array::from_fn(|at| one[at].min(other[at]));
    let [wakes, reads, writes] = rounds.reduce(best).unwrap();
    assert!(wakes <= 2 * CELLS + CELLS / 4, "{wakes} wakes");
    assert!(reads <= 6 * CELLS + CELLS / 4, "{reads} reads");
    assert!(writes <= CELLS + CELLS / 4, "{writes} writes");
    drop(client);
    guest.join().unwrap().unwrap();
}

#[test]
fn a_command_ends_with_its_process_though_a_daemon_holds_its_pipes() {
    // R24
    let mut client = Client::new();
    let call = client.exec("sleep 30 & echo out; echo err >&2; exit 3", LONG, 1000);
    let ran = client.finish(call);
    assert!(ran.took < std::time::Duration::from_secs(2), "{:?}", ran.took);
    assert_eq!((ran.out().as_str(), ran.err().as_str()), ("out\n", "err\n"));
    assert_eq!(ran.status(), &RunStatus::Ended { how: Ended::Exited { code: 3 } });
    client.bye();
}

#[test]
fn a_command_that_is_not_there_is_a_failure_with_a_name() {
    let mut client = Client::new();
    let argv = vec!["/no/such".to_owned()];
    let answer = client.call(&ToGuest::Exec {
        argv,
        env: env(),
        cwd: "/".into(),
        merge_output: false,
        deadline: LONG,
        forward_bytes: 0,
        keep_over: None,
    });
    let FromGuest::Failed { failure: GuestFailure::NotFound, message } = answer else { panic!("{answer:?}") };
    assert!(message.starts_with("cannot start `/no/such`: "), "{message}");
    client.nothing_left();
}

#[test]
fn a_command_over_its_time_is_interrupted_and_one_that_ignores_it_is_killed() {
    let mut client = Client::new();
    let heeding = client.exec("sleep 30", SHORT, 1000);
    let ignoring = client.exec("trap '' INT; while :; do sleep 1; done", SHORT, 1000);
    assert_eq!(client.finish(heeding).status(), &RunStatus::TimedOut { state_kept: true });
    assert_eq!(client.finish(ignoring).status(), &RunStatus::TimedOut { state_kept: false });
    client.nothing_left();
}

#[test]
fn a_command_over_its_time_leaves_nothing_that_it_started() {
    let mut client = Client::new();
    // A shell's background processes ignore the interrupt.
    let call = client.exec("sleep 1000 & echo $!; wait", SHORT, 1000);
    let ran = client.finish(call);
    assert!(matches!(ran.status(), RunStatus::TimedOut { .. }), "{:?}", ran.status());
    let stat = format!("/proc/{}/stat", ran.out().trim());
    let is_over = || std::fs::read_to_string(&stat).map_or(true, |stat| stat.contains(") Z "));
    let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while !is_over() {
        assert!(std::time::Instant::now() < until, "it still runs");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    client.nothing_left();
}

#[test]
fn a_kernel_that_cannot_start_says_why() {
    let mut client = Client::new();
    for merge_output in [false, true] {
        let spec = |argv: &[&str]| KernelSpec {
            language: Language::Python,
            argv: argv.iter().map(|s| (*s).to_owned()).collect(),
            env: env(),
            cwd: "/".into(),
            merge_output,
        };
        let mut told = |argv: &[&str]| match client.start(1, &spec(argv)) {
            FromGuest::Failed { failure: GuestFailure::Kernel, message } => message,
            other => panic!("{other:?}"),
        };
        assert!(told(&["/no/such"]).starts_with("cannot start `/no/such`: No such file"));
        assert_eq!(
            told(&["sh", "-c", "echo no such module >&2; exit 4"]),
            "the kernel exited with status `4` before it was ready:\nno such module"
        );
        assert_eq!(told(&["sh", "-c", "kill -9 $$"]), "the kernel was ended by signal `9` before it was ready");
    }
    client.started(1, &exec_fake());
    client.nothing_left();
}

#[test]
fn a_flood_is_cut_counted_and_its_tail_kept() {
    // R14, R16
    let mut client = Client::new();
    client.started(1, &exec_fake());
    let call = client.begin("for _ in range(200): os.write(1, b'x'*100_000)\nout('END')", LONG, 100_000);
    let ran = client.finish(call);
    let total = 20_000_003;
    assert_eq!(ran.end.as_ref().unwrap().stdout_bytes, total);
    assert_eq!(ran.stdout.len(), 100_000 + 65_536);
    assert_eq!(ran.gaps, [(Stream::Stdout, total - 100_000 - 65_536)]);
    assert!(ran.stdout.ends_with(b"xxEND"));
    client.nothing_left();
}

#[test]
fn merged_streams_come_in_the_order_written() {
    let mut client = Client::new();
    let script = "for i in 0 1 2 3 4 5 6 7 8 9; do echo o$i; echo e$i >&2; done";
    let call = client.exec_with(script, LONG, 1000, Some(10), true);
    let ran = client.finish(call);
    let expected: String = (0..10).map(|i| format!("o{i}\ne{i}\n")).collect();
    assert_eq!((ran.out(), ran.err()), (expected.clone(), String::new()));
    let end = ran.end.unwrap();
    assert_eq!((end.stdout_bytes, end.stderr_bytes, end.stderr_kept), (60, 0, None));
    assert_eq!(end.stdout_kept.unwrap().bytes, 60);
    client.started(1, &KernelSpec { merge_output: true, ..exec_fake() });
    let ran = client.run("for i in range(10): out(f'o{i}\\n'); os.write(2, f'e{i}\\n'.encode())");
    assert_eq!((ran.out(), ran.err(), ran.status()), (expected, String::new(), &RunStatus::Ok));
    client.nothing_left();
}

#[test]
fn commands_run_beside_a_cell_and_each_other_but_not_without_end() {
    let mut client = Client::new();
    client.started(1, &exec_fake());
    let cell = client.begin("time.sleep(30)", Deadline { after_ms: 30_000, grace_ms: 50 }, 0);
    let sleeping: Vec<u64> = (0..proto::MAX_COMMANDS).map(|_| client.exec("echo on; sleep 30", LONG, 9)).collect();
    let refused = client.exec("echo no", LONG, 9);
    let FromGuest::Failed { failure: GuestFailure::Busy, message } = client.answer(refused) else { panic!() };
    assert_eq!(message, "`32` commands run already");
    client.wait_for_output(sleeping[3]);
    client.interrupt(sleeping[3]);
    assert_eq!(client.finish(sleeping[3]).status(), &RunStatus::Cancelled { state_kept: true });
    let call = client.exec("echo yes", LONG, 9);
    assert_eq!(client.finish(call).out(), "yes\n");
    sleeping.iter().for_each(|&call| client.interrupt(call));
    for (i, call) in sleeping.into_iter().enumerate().filter(|(i, _)| *i != 3) {
        assert_eq!(client.finish(call).status(), &RunStatus::Cancelled { state_kept: true }, "{i}");
    }
    client.interrupt(cell);
    assert_eq!(client.finish(cell).status(), &RunStatus::Cancelled { state_kept: false });
    client.nothing_left();
}

#[test]
fn a_cells_environment_is_checked_and_handed_on() {
    let mut client = Client::new();
    client.started(1, &fake("out(json.dumps(r.get('env')))\nev(t='done',n=n,status='ok')"));
    assert_eq!(client.run("").out(), "null");
    assert_eq!(client.run_with("", &[("B", "2"), ("_a1", "x\ny")]).out(), r#"{"B": "2", "_a1": "x\ny"}"#);
    let huge = "secret".repeat(20_000);
    for (name, value) in [("", "secret"), ("1", "secret"), ("A=secret", ""), ("A", "secret\0"), ("A", &huge)] {
        let refused = client.run_with("", &[(name, value)]).failed.unwrap();
        assert!(refused.contains("environment variable") && !refused.contains("secret"), "{refused}");
    }
    assert_eq!(client.run("").status(), &RunStatus::Ok);
    client.nothing_left();
    // It waits for the transpiler with the cell.
    let mut client = Client::new();
    client.started(1, &fake_in(Language::Typescript, "out(json.dumps(r.get('env')))\nev(t='done',n=n,status='ok')"));
    assert_eq!(client.run_with("1", &[("A", "b")]).out(), r#"{"A": "b"}"#);
    client.nothing_left();
}

// ---- hostile and broken kernels

#[test]
fn both_streams_flooded_are_cut_each_and_small_writes_are_batched() {
    // R15, R17
    let mut client = Client::new();
    client.started(1, &exec_fake());
    let call = client.begin("for _ in range(100_000): os.write(1, b'o'); os.write(2, b'e')", LONG, 50_000);
    let ran = client.finish(call);
    let end = ran.end.as_ref().unwrap();
    assert_eq!((end.stdout_bytes, end.stderr_bytes), (100_000, 100_000));
    assert_eq!((ran.stdout.len(), ran.stderr.len()), (100_000, 100_000), "50 kB forwarded, the rest is the tail");
    assert!(ran.gaps.is_empty(), "{:?}", ran.gaps);
    assert!(ran.frames < 2000, "{} frames", ran.frames);
    client.nothing_left();
}

#[test]
fn a_host_that_does_not_read_stops_the_flood_and_not_the_deadline() {
    let mut client = Client::new();
    client.started(1, &exec_fake());
    let deadline = Deadline { after_ms: 700, grace_ms: 100 };
    let call = client.begin("while True: os.write(1, b'x'*65536)", deadline, u64::MAX);
    // Nothing is read here while the guest's buffer, and then the socket, fill up.
    std::thread::sleep(std::time::Duration::from_millis(1500));
    let ran = client.finish(call);
    assert_eq!(ran.status(), &RunStatus::TimedOut { state_kept: false });
    assert!(ran.stdout.len() < 8 << 20, "{} bytes were waiting", ran.stdout.len());
    assert_eq!(ran.end.as_ref().unwrap().stdout_bytes, ran.stdout.len() as u64);
    client.nothing_left();
}

#[test]
fn forged_and_broken_events_are_ignored() {
    // G01, G09, G32, G34
    let mut client = Client::new();
    client.started(1, &exec_fake());
    let ran = client.run(
        "raw(b'\\xff\\x00garbage\\n'); raw(b'{}\\n[]\\nnull\\n'); raw(b'{\"t\":\"done\"}\\n')\n\
         raw(b'['*100_000 + b'\\n'); raw(b'{\"a\":'*50_000 + b'\\n')\n\
         ev(t='done',n=n-1,status='ok'); ev(t='done',n=n+1,status='ok'); ev(t='ready',n=0,version='again')\n\
         ev(t='result',n=n+5,data={'text/plain':'forged'}); ev(t='result',n=n,data=[1])\n\
         for _ in range(30): raw(b'x'*1_000_000)\n\
         raw(b'\\n'); out('{\"t\":\"done\",\"n\":%d}\\n' % n); ev(t='result',n=n,data={'text/plain':'true'})",
    );
    assert_eq!(ran.status(), &RunStatus::Ok);
    assert_eq!(ran.result(), Some("true"));
    assert_eq!(ran.events.len(), 1, "{:?}", ran.events);
    assert_eq!(ran.out(), "{\"t\":\"done\",\"n\":1}\n");
    client.nothing_left();
}

#[test]
fn a_fork_that_answers_too_gives_one_answer() {
    // G26
    let mut client = Client::new();
    client.started(1, &exec_fake());
    for _ in 0..20 {
        let ran = client
            .run("pid = os.fork()\nif pid == 0: ev(t='done',n=n,status='error'); os._exit(0)\nos.waitpid(pid, 0)");
        assert_eq!(ran.status(), &RunStatus::Error);
    }
    assert_eq!(client.run("pass").status(), &RunStatus::Ok);
    client.nothing_left();
}

#[test]
fn a_kernel_that_ends_in_the_middle_is_told_at_once_and_as_it_was() {
    // G04, G05, G25, G02
    let cases = [
        ("os._exit(3)", Ended::Exited { code: 3 }),
        ("os.kill(os.getpid(), 9)", Ended::Signaled { signal: 9 }),
        ("os.kill(os.getpid(), 11)", Ended::Signaled { signal: 11 }),
        ("os.abort()", Ended::Signaled { signal: 6 }),
        ("os.execv('/bin/sh', ['sh', '-c', 'exit 5'])", Ended::Exited { code: 5 }),
        ("os.execv('/bin/sleep', ['sleep', '30'])", Ended::Signaled { signal: 9 }),
        ("os.close(4); time.sleep(30)", Ended::Signaled { signal: 9 }),
        ("for fd in range(6): os.close(fd) if fd != 5 else None\ntime.sleep(30)", Ended::Signaled { signal: 9 }),
    ];
    let mut client = Client::new();
    for (code, how) in cases {
        client.started(1, &exec_fake());
        let ran = client.run(&format!("out('before')\n{code}"));
        assert_eq!(ran.status(), &RunStatus::Ended { how }, "{code}");
        assert_eq!(ran.out(), "before", "{code}");
        assert!(ran.took < std::time::Duration::from_secs(1), "{code} took {:?}", ran.took);
        assert_eq!(client.run("pass").failed.as_deref(), Some("there is no kernel `1`"));
    }
    client.nothing_left();
}

#[test]
fn a_stopped_kernel_is_continued() {
    // R22
    let mut client = Client::new();
    client.started(1, &exec_fake());
    let ran = client.run("os.kill(os.getpid(), signal.SIGSTOP); out('on')");
    assert_eq!((ran.status(), ran.out().as_str()), (&RunStatus::Ok, "on"));
    assert!(ran.took < std::time::Duration::from_secs(1), "{:?}", ran.took);
    // One that is stopped all the time meets the deadline.
    let code = "me = os.getpid()\nif os.fork() == 0:\n while os.getppid() == me: os.kill(me, 19); time.sleep(0.001)\n os._exit(0)\ntime.sleep(30)";
    let call = client.begin(code, Deadline { after_ms: 300, grace_ms: 200 }, 1000);
    assert_eq!(client.finish(call).status(), &RunStatus::TimedOut { state_kept: false });
    client.nothing_left();
}

#[test]
fn a_kernel_that_heeds_the_interrupt_keeps_its_state_and_one_that_does_not_is_killed() {
    let heeding = "try:\n signal.signal(signal.SIGINT, signal.default_int_handler); exec(code); status = 'ok'\n\
                   except KeyboardInterrupt: status = 'interrupted'\n\
                   signal.signal(signal.SIGINT, signal.SIG_IGN); ev(t='done',n=n,status=status)";
    let mut client = Client::new();
    client.started(1, &fake(heeding));
    let heeded = Deadline { after_ms: 1_000, grace_ms: 10_000 };
    let call = client.begin("time.sleep(30)", heeded, 1000);
    assert_eq!(client.finish(call).status(), &RunStatus::TimedOut { state_kept: true });
    // An interrupt before the cell has its handler would be ignored, so each cell says when it has one.
    let call = client.begin("out('begun'); time.sleep(30)", LONG, 1000);
    client.wait_for_output(call);
    client.interrupt(call);
    assert_eq!(client.finish(call).status(), &RunStatus::Cancelled { state_kept: true });
    assert_eq!(client.run("os.kill(os.getpid(), 2); time.sleep(1)").status(), &RunStatus::Interrupted);
    let call = client.begin("signal.signal(2, signal.SIG_IGN); out('begun'); time.sleep(30)", LONG, 1000);
    client.wait_for_output(call);
    let interrupted = std::time::Instant::now();
    client.interrupt(call);
    assert_eq!(client.finish(call).status(), &RunStatus::Cancelled { state_kept: false });
    assert!(interrupted.elapsed() >= std::time::Duration::from_millis(LONG.grace_ms), "{:?}", interrupted.elapsed());
    client.nothing_left();
}

#[test]
fn a_javascript_kernel_is_nudged_after_the_interrupt() {
    let body = "import select\nout(code)\nselect.select([5],[],[])\nev(t='done',n=n,status='interrupted')";
    let mut client = Client::new();
    client.started(1, &fake_in(Language::Javascript, body));
    let call = client.begin("var x = 1", SHORT, 1000);
    let ran = client.finish(call);
    assert_eq!((ran.status(), ran.out().as_str()), (&RunStatus::TimedOut { state_kept: true }, "let x = 1"));
    client.nothing_left();
}

#[test]
fn a_cell_that_does_not_compile_is_an_error_of_the_cell() {
    let mut client = Client::new();
    client.started(1, &fake_in(Language::Typescript, "out(code + str('map' in r))\nev(t='done',n=n,status='ok')"));
    let ran = client.run("let a: = 1");
    assert_eq!(ran.status(), &RunStatus::Error);
    let (name, value, text) = ran.error().unwrap();
    assert_eq!((name, value), ("SyntaxError", "Unexpected token"));
    assert_eq!(text, "cell-1.ts:1:8\nlet a: = 1\n       ^\n\nSyntaxError: Unexpected token\n");
    let ran = client.run("let a: number = 1");
    assert_eq!((ran.status(), ran.out().as_str()), (&RunStatus::Ok, "let a = 1;\nTrue"));
    client.nothing_left();
}

#[test]
fn a_cell_that_kills_the_transpiler_is_refused_and_the_next_one_works() {
    let mut client = Client::new();
    client.started(1, &fake_in(Language::Javascript, "out(code)\nev(t='done',n=n,status='ok')"));
    // Deep enough for any stack.
    let ran = client.run(&"(".repeat(5_000_000));
    assert_eq!(ran.status(), &RunStatus::Error);
    assert_eq!(ran.error().unwrap().0, "TranspilerError", "{:?}", ran.error());
    assert_eq!(client.run("1").out(), "1");
    client.nothing_left();
}

#[test]
fn a_transpiler_that_hangs_or_lies_costs_one_cell() {
    let scripts = [
        ("sleep 30", "the transpiler took too long over this code"),
        (
            "printf '\\377\\377\\377\\377\\377\\377\\377\\377\\377'; sleep 9",
            "the transpiler cannot be understood: the answer is too long",
        ),
        ("exit 1", "the transpiler ended over this code (is it nested very deeply?)"),
    ];
    for (script, why) in scripts {
        let transpiler = ["/bin/sh", "-c", &format!("head -c 13 >/dev/null; {script}")].map(String::from).to_vec();
        let mut client = Client::raw(guest::GuestConfig { transpiler, ..config() });
        client.hello();
        client.started(1, &fake_in(Language::Javascript, "ev(t='done',n=n,status='ok')"));
        let ran = client.run("1");
        assert_eq!(ran.status(), &RunStatus::Error);
        assert_eq!(ran.error().unwrap().1, why);
        // The deadline of the cell holds here too, and costs no state: the kernel never saw the cell.
        if script == "sleep 30" {
            let call = client.begin("1", SHORT, 100);
            assert_eq!(client.finish(call).status(), &RunStatus::TimedOut { state_kept: true });
            let call = client.begin("1", LONG, 100);
            client.interrupt(call);
            assert_eq!(client.finish(call).status(), &RunStatus::Cancelled { state_kept: true });
        }
        client.nothing_left();
    }
}

#[test]
fn what_a_background_process_prints_comes_with_the_next_cell() {
    let scratch = Scratch::new();
    let (go, printed) = (scratch.path().join("go"), scratch.path().join("printed"));
    // The cell's child waits for the end of the cell, prints, and says so.
    let behind = |print: &str| {
        format!(
            "if os.fork() == 0:\n while not os.path.exists({go:?}): time.sleep(0.002)\n \
             os.unlink({go:?}); {print}; open({printed:?}, 'w'); os._exit(0)"
        )
    };
    let mut client = Client::new();
    client.started(1, &exec_fake());
    let mut late_of = |print: &str| {
        let ran = client.run(&behind(print));
        assert_eq!((ran.status(), ran.out().as_str()), (&RunStatus::Ok, ""));
        std::fs::write(&go, "").unwrap();
        wait_for(&printed);
        let ran = client.run("out('now')");
        assert_eq!(ran.out(), "now");
        ran.late.unwrap()
    };
    assert_eq!(late_of("out('late'); os.write(2, b'err')"), ("late".into(), "err".into(), 0));
    // A flood between cells costs a bounded memory and is counted.
    let (stdout, _, dropped) = late_of("[os.write(1, b'y'*10_000) for _ in range(100)]; os.write(1, b'END')");
    assert!(stdout.ends_with("yEND") && stdout.len() == 65_536, "{}", stdout.len());
    assert_eq!(dropped, 1_000_003 - 65_536);
    client.nothing_left();
}

#[test]
fn errors_between_cells_wait_for_the_next_one() {
    let mut client = Client::new();
    client.started(1, &fake("ev(t='done',n=n,status='ok')\nfor i in range(50): ev(t='late',n=n,text='late %d' % i)"));
    client.run("");
    client.call(&ToGuest::Ping);
    let ran = loop {
        let ran = client.run("");
        if !ran.events.is_empty() {
            break ran;
        }
    };
    assert!(ran.events.len() >= 16, "{}", ran.events.len());
    client.bye();
}

#[test]
fn a_kernel_that_dies_idle_is_announced() {
    let mut client = Client::new();
    client.started(1, &fake("ev(t='done',n=n,status='ok')\ntime.sleep(0.05); os._exit(9)"));
    assert_eq!(client.run("").status(), &RunStatus::Ok);
    assert_eq!(client.answer(0), FromGuest::KernelExited { kernel: 1, how: Ended::Exited { code: 9 } });
    client.nothing_left();
}

#[test]
fn stopping_a_kernel_ends_what_runs_in_it_and_is_answered() {
    let mut client = Client::new();
    client.started(1, &exec_fake());
    let run = client.begin("time.sleep(30)", LONG, 0);
    let again = client.begin("pass", LONG, 0);
    assert_eq!(client.finish(again).failed.as_deref(), Some("the kernel is busy with another cell"));
    let stop = client.send(&ToGuest::StopKernel { kernel: 1 });
    assert_eq!(client.finish(run).status(), &RunStatus::Ended { how: Ended::Signaled { signal: 9 } });
    assert_eq!(client.answer(stop), FromGuest::Done);
    assert_eq!(client.call(&ToGuest::StopKernel { kernel: 1 }), FromGuest::Done);
    client.started(1, &exec_fake());
    assert_eq!(client.call(&ToGuest::StopKernel { kernel: 1 }), FromGuest::Done);
    client.nothing_left();
}

#[test]
fn random_cancel_points_give_one_end_each_and_leave_the_next_cell_clean() {
    // G29. The handler acts in a cell only, as a driver's does.
    let body = "try:\n  global_in = True; signal.signal(2, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()) if global_in else None)\n  \
                exec(code); global_in = False; status = 'ok'\nexcept KeyboardInterrupt:\n  global_in = False; status = 'interrupted'\n\
                ev(t='done',n=n,status=status)";
    let mut client = Client::new();
    client.started(1, &fake(body));
    let mut seed = 12345u64;
    for round in 0..300 {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let call = client.begin("time.sleep(0.002); out('x')", LONG, 1000);
        std::thread::sleep(std::time::Duration::from_micros((seed >> 33) % 4000));
        client.interrupt(call);
        let ran = client.finish(call);
        let status = ran.status();
        assert!(matches!(status, RunStatus::Ok | RunStatus::Cancelled { state_kept: true }), "{round}: {status:?}");
        let next = client.run("out('clean')");
        assert_eq!((next.status(), next.out().as_str()), (&RunStatus::Ok, "clean"), "{round}");
    }
    client.nothing_left();
}

#[test]
fn completion_that_races_the_deadline_gives_one_end() {
    // G30. The handler swallows the interrupt.
    let mut client = Client::new();
    client.started(1, &exec_fake());
    let (mut in_time, mut late) = (0, 0);
    for round in 0..400 {
        let deadline = Deadline { after_ms: 2 + round % 3, grace_ms: 2000 };
        let call = client.begin("time.sleep(0.003)", deadline, 1000);
        match client.finish(call).status() {
            RunStatus::Ok => in_time += 1,
            RunStatus::TimedOut { state_kept: true } => late += 1,
            other => panic!("{other:?}"),
        }
    }
    client.nothing_left();
    assert!(in_time > 0 && late > 0, "{in_time} in time, {late} late");
}

// ---- the connection

#[test]
fn a_host_of_another_version_is_told_and_left() {
    let mut client = Client::raw(config());
    let call = client.send(&ToGuest::Hello { version: 99 });
    let FromGuest::Failed { message, .. } = client.answer(call) else { panic!() };
    assert_eq!(message, format!("the guest speaks version `{}`, not `99`", proto::VERSION));
    assert_eq!(client.frame(), None);
}

#[test]
fn a_bad_frame_ends_the_connection() {
    let mut garbage = b"\x05\x00\x00\x00\x01\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00hello".to_vec();
    for bytes in [vec![0xff; 64], std::mem::take(&mut garbage)] {
        let mut client = Client::new();
        client.send_bytes(&bytes);
        assert_eq!(client.frame(), None);
    }
    // So does a request before the greeting.
    let mut client = Client::raw(config());
    client.send(&ToGuest::Ping);
    assert_eq!(client.frame(), None);
}

#[test]
fn no_process_outlives_the_connection_in_a_test() {
    let mut client = Client::new();
    client.started(1, &exec_fake());
    let pid: i32 = client.run("out(str(os.getpid()))").out().parse().unwrap();
    client.begin("time.sleep(30)", LONG, 0);
    client.exec("sleep 30", LONG, 0);
    client.bye();
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
}
