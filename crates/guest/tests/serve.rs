//! The guest over a socket, with kernels that are small programs: honest ones, broken ones and hostile ones.

mod harness;

use harness::*;
use proto::{Deadline, Ended, Failure, FileKind, FromGuest, KernelSpec, Language, RunStatus, Stream, ToGuest};

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

#[test]
fn files_are_written_read_and_listed_beneath_the_root() {
    let root = Scratch::new();
    let mut client = Client::raw(guest::Config { root: root.path().to_owned(), ..config() });
    client.hello();
    let bytes: Vec<u8> = (0..3_000_000u32).map(|i| (i * 7) as u8).collect();
    let call = client.send(&ToGuest::WriteFile { path: "a/b/c.bin".into(), size: bytes.len() as u64 });
    client.send_file(call, &bytes);
    assert_eq!(client.answer(call), FromGuest::Written { size: bytes.len() as u64 });
    let absolute = root.path().join("empty").to_str().unwrap().to_owned();
    assert_eq!(client.call(&ToGuest::WriteFile { path: absolute, size: 0 }), FromGuest::Written { size: 0 });

    assert_eq!(client.read_file("a/b/c.bin", u64::MAX), Ok(bytes));
    assert_eq!(client.read_file("empty", 0), Ok(Vec::new()));
    assert_eq!(client.read_file("a/b/c.bin", 10).unwrap_err().0, Failure::TooLarge);
    assert_eq!(client.read_file("none", 10).unwrap_err().0, Failure::NotFound);
    assert_eq!(client.read_file("a", 10).unwrap_err().0, Failure::InvalidPath);
    assert_eq!(client.read_file("/etc/passwd", 10).unwrap_err().0, Failure::InvalidPath);
    assert_eq!(client.read_file("a/../../x", 10).unwrap_err().0, Failure::InvalidPath);
    std::os::unix::fs::symlink("/etc/passwd", root.path().join("out")).unwrap();
    assert_eq!(client.read_file("out", 10_000).unwrap_err().0, Failure::InvalidPath);

    let listed = |client: &mut Client, path: &str, max_entries| {
        let answer = client.call(&ToGuest::ListFiles { path: path.into(), max_entries });
        let FromGuest::Files { entries, total } = answer else { panic!("{answer:?}") };
        (entries.into_iter().map(|e| (e.path, e.kind)).collect::<Vec<_>>(), total)
    };
    let all = [
        ("a", FileKind::Directory),
        ("a/b", FileKind::Directory),
        ("a/b/c.bin", FileKind::File),
        ("empty", FileKind::File),
        ("out", FileKind::Symlink),
    ];
    let all = all.map(|(path, kind)| (path.to_owned(), kind));
    assert_eq!(listed(&mut client, "", 100), (all.to_vec(), 5));
    assert_eq!(listed(&mut client, root.path().to_str().unwrap(), 2), (all[..2].to_vec(), 5));
    assert_eq!(listed(&mut client, "a/b", 9), (vec![("c.bin".to_owned(), FileKind::File)], 1));
    client.nothing_left();
    client.bye();
}

#[test]
fn bytes_for_a_refused_file_come_to_nothing() {
    let root = Scratch::new();
    let mut client = Client::raw(guest::Config { root: root.path().to_owned(), ..config() });
    client.hello();
    let call = client.send(&ToGuest::WriteFile { path: "../x".into(), size: 300_000 });
    client.send_file(call, &[0; 300_000]);
    assert!(matches!(client.answer(call), FromGuest::Failed { failure: Failure::InvalidPath, .. }));
    client.nothing_left();
    // A host that goes away in the middle leaves nothing.
    let call = client.send(&ToGuest::WriteFile { path: "half".into(), size: 300_000 });
    client.send_file(call, &[0; 100_000]);
    client.call(&ToGuest::Ping);
    client.bye();
    assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
}
