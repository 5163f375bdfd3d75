//! The guest over a socket, with kernels that are small programs: honest ones, broken ones and hostile ones.

mod harness;

use harness::*;
use proto::{Deadline, Ended, Failure, FromGuest, KernelSpec, Language, RunStatus, Stream, ToGuest};

const SHORT: Deadline = Deadline { after_ms: 300, grace_ms: 300 };

#[test]
fn a_cell_runs_and_its_output_comes_in_order() {
    let mut client = Client::new();
    client.started(1, &exec_fake());
    let ran = client.run(
        "out('a\\n'); ev(t='display',n=n,data={'text/plain':'d'}); out('b\\n'); os.write(2,b'e\\n')\n\
         ev(t='result',n=n,data={'text/plain':'1'})",
    );
    assert_eq!(ran.order, ["out a", "display", "out b", "err e", "result"]);
    assert_eq!(ran.status(), &RunStatus::Ok);
    let end = ran.end.unwrap();
    assert_eq!((end.stdout_bytes, end.stderr_bytes), (4, 2));
    client.nothing_left();
    client.bye();
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
    let answer = client.call(&ToGuest::Exec { argv, env: env(), cwd: "/".into(), deadline: LONG, forward_bytes: 0 });
    let FromGuest::Failed { failure: Failure::NotFound, message } = answer else { panic!("{answer:?}") };
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
fn a_kernel_that_cannot_start_says_why() {
    let mut client = Client::new();
    let spec = |argv: &[&str]| KernelSpec {
        language: Language::Python,
        argv: argv.iter().map(|s| (*s).to_owned()).collect(),
        env: env(),
        cwd: "/".into(),
    };
    let mut told = |argv: &[&str]| match client.start(1, &spec(argv)) {
        FromGuest::Failed { failure: Failure::Kernel, message } => message,
        other => panic!("{other:?}"),
    };
    assert!(told(&["/no/such"]).starts_with("cannot start `/no/such`: No such file"));
    assert_eq!(
        told(&["sh", "-c", "echo no such module >&2; exit 4"]),
        "the kernel exited with status `4` before it was ready:\nno such module"
    );
    assert_eq!(told(&["sh", "-c", "kill -9 $$"]), "the kernel was ended by signal `9` before it was ready");
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
