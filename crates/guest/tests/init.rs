//! The binary as PID 1 of a pid namespace: adoption, orphans, signals.

mod harness;

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use command_fds::{CommandFdExt, FdMapping};
use harness::*;
use proto::{Ended, FromGuest, Language, RunStatus, ToGuest};

/// A guest in its own pid namespace, listening on a socket in a directory.
struct Init {
    scratch: Scratch,
    unshare: Child,
}

impl Init {
    fn start(arguments: &[&str]) -> Option<Self> {
        Self::start_as(&[&[env!("CARGO_BIN_EXE_sandpool-guest")], arguments].concat())
    }

    /// With a `/tmp` of one MiB.
    fn start_on_small_tmp() -> Option<Self> {
        // The guest may itself lie below /tmp; in this mount namespace nobody misses the other program.
        let script = "mount --bind \"$0\" /usr/bin/false && mount -t tmpfs -o size=1m none /tmp && exec /usr/bin/false";
        Self::start_as(&["/bin/sh", "-c", script, env!("CARGO_BIN_EXE_sandpool-guest")])
    }

    #[allow(clippy::disallowed_methods, reason = "stands for the launcher")]
    fn start_as(guest: &[&str]) -> Option<Self> {
        let allowed = Command::new("unshare").args(["--pid", "--fork", "--mount-proc", "true"]).output();
        if !allowed.is_ok_and(|output| output.status.success()) {
            assert!(std::env::var_os("CI").is_none(), "pid namespaces are needed in CI");
            eprintln!("SKIP: no pid namespace can be made here");
            return None;
        }
        let scratch = Scratch::new();
        let listener = UnixListener::bind(scratch.path().join("s")).unwrap();
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--kill-child", "--mount-proc"]);
        command.args(guest).env_clear();
        command.fd_mappings(vec![FdMapping { parent_fd: listener.into(), child_fd: 3 }]).unwrap();
        Some(Self { unshare: command.spawn().unwrap(), scratch })
    }

    fn socket(&self) -> PathBuf {
        self.scratch.path().join("s")
    }

    fn connect(&self) -> Client {
        let mut client = Client::over(UnixStream::connect(self.socket()).unwrap());
        client.hello();
        client
    }

    /// The guest's pid out here.
    fn pid(&self) -> i32 {
        let children = format!("/proc/{0}/task/{0}/children", self.unshare.id());
        let start = Instant::now();
        loop {
            let pid = std::fs::read_to_string(&children).unwrap();
            if let Ok(pid) = pid.trim().parse() {
                return pid;
            }
            assert!(start.elapsed() < PATIENCE);
        }
    }

    fn ends_within(&mut self, patience: Duration) -> bool {
        let start = Instant::now();
        while start.elapsed() < patience {
            if self.unshare.try_wait().unwrap().is_some() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        false
    }
}

impl Drop for Init {
    fn drop(&mut self) {
        let _ = self.unshare.kill();
        let _ = self.unshare.wait();
    }
}

#[test]
fn a_later_host_finds_the_kernel_as_the_earlier_one_left_it() {
    let Some(init) = Init::start(&[]) else { return };
    let mut first = init.connect();
    let keeping = fake("globals().setdefault('kept', [])\nexec(code)\nev(t='done',n=n,status='ok')");
    first.started(1, &keeping);
    first.run("kept.append('here')");
    drop(first);
    let mut second = init.connect();
    assert_eq!(second.run("out(str(kept))").out(), "['here']");
    // A host that is replaced while its cell runs: the cell is interrupted, here killed, the next host starts anew.
    second.begin("time.sleep(60)", proto::Deadline { after_ms: 60_000, grace_ms: 100 }, 0);
    second.call(&ToGuest::Ping);
    let mut third = init.connect();
    let gone = |client: &mut Client| client.run("pass").failed.as_deref() == Some("there is no kernel `1`");
    let start = Instant::now();
    while !gone(&mut third) {
        assert!(start.elapsed() < PATIENCE);
    }
    third.started(1, &keeping);
    third.nothing_left();
}

#[test]
fn orphans_are_reaped_and_zombies_do_not_pile_up() {
    // R25
    let Some(init) = Init::start(&[]) else { return };
    let mut client = init.connect();
    let script = "for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do (true & (true &) ) & done; wait; (sleep 0.05 &); exit 6";
    for _ in 0..5 {
        let call = client.exec(script, LONG, 0);
        assert_eq!(client.finish(call).status(), &RunStatus::Ended { how: Ended::Exited { code: 6 } });
    }
    let zombies = |pid: i32| {
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        let is_zombie =
            |pid: &&str| std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|s| s.contains(") Z "));
        children.split_whitespace().filter(is_zombie).count()
    };
    let start = Instant::now();
    while zombies(init.pid()) > 0 {
        assert!(start.elapsed() < Duration::from_secs(2), "{} zombies", zombies(init.pid()));
    }
    client.nothing_left();
}

#[test]
fn cells_cannot_end_or_stop_their_guest() {
    // G06, G07
    let Some(init) = Init::start(&[]) else { return };
    let mut client = init.connect();
    client.started(1, &exec_fake());
    let ran = client.run("os.kill(1, 9); os.kill(1, 19); os.kill(1, 2); out(str(os.getppid()))");
    assert_eq!((ran.status(), ran.out().as_str()), (&RunStatus::Ok, "1"));
    let ran = client.run("os.kill(-1, 9); time.sleep(5)");
    assert!(matches!(ran.status(), RunStatus::Ok | RunStatus::Ended { .. }), "{:?}", ran.status());
    client.nothing_left();
}

#[test]
fn w05_a_cell_cannot_forge_a_signal_that_ends_its_guest() {
    let Some(init) = Init::start(&[]) else { return };
    let mut client = init.connect();
    client.started(1, &exec_fake());
    // `siginfo_t` of a SIGTERM from a process that has no number in this namespace, with each code that a sender may claim.
    let forged = "import ctypes, struct, signal; libc = ctypes.CDLL(None, use_errno=True); \
                  info = lambda code: struct.pack('=iiii', 15, 0, code, 0) + struct.pack('=ii', 0, 0) + bytes(104); \
                  out(str([libc.syscall(129 if os.uname().machine == 'x86_64' else 138, 1, 15, info(code)) for code in (-1, -2, -3, -4, -5, -60)])); \
                  out(str([libc.syscall(424, os.pidfd_open(1), 15, info(code), 0) for code in (-1, -5)]))";
    let ran = client.run(forged);
    assert_eq!((ran.status(), ran.out().as_str()), (&RunStatus::Ok, "[0, 0, 0, 0, 0, 0][0, 0]"));
    // What the kernel itself sends when a pipe becomes readable, to whom and with which signal the code says.
    let asked = "import fcntl; r, w = os.pipe(); fcntl.fcntl(r, fcntl.F_SETOWN, 1); fcntl.fcntl(r, 10, 15); \
                 fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK); os.write(w, b'x'); out('asked')";
    assert_eq!(client.run(asked).out(), "asked");
    assert_eq!(client.run("os.kill(1, 15); out('and plainly')").out(), "and plainly");
    // It reads its signals before it answers.
    client.call(&ToGuest::Ping);
    assert_eq!(client.run("out(str(os.getppid()))").out(), "1");
    client.nothing_left();
}

#[test]
fn the_guest_executes_itself_to_transpile() {
    let Some(init) = Init::start(&[]) else { return };
    let mut client = init.connect();
    client.started(1, &fake_in(Language::Typescript, "out(code)\nev(t='done',n=n,status='ok')"));
    assert_eq!(client.run("let a: number = 1").out(), "let a = 1;\n");
    // Whatever happens to the child, the next cell gets a new one.
    let call = client.exec("kill -9 -1", LONG, 0);
    client.finish(call);
    assert!(matches!(client.answer(0), FromGuest::KernelExited { .. }));
    client.started(1, &fake_in(Language::Typescript, "out(code)\nev(t='done',n=n,status='ok')"));
    assert_eq!(client.run("let b: number = 2").out(), "let b = 2;\n");
    client.nothing_left();
}

#[test]
fn its_descriptors_and_signal_mask_are_not_its_childrens() {
    let Some(init) = Init::start(&[]) else { return };
    let mut client = init.connect();
    let probe =
        "grep SigBlk /proc/self/status; ls -l /proc/self/fd | grep -cE 'socket|anon_inode'; wc -c </proc/1/environ";
    let call = client.exec(probe, LONG, 1000);
    assert_eq!(client.finish(call).out(), "SigBlk:\t0000000000000000\n0\n0\n");
}

#[test]
fn on_a_full_volume_nothing_is_kept_and_the_run_goes_on() {
    let Some(init) = Init::start_on_small_tmp() else { return };
    let mut client = init.connect();
    let mut run = |script: &str| {
        let call = client.exec_with(script, LONG, 1000, Some(10), false);
        let end = client.finish(call).end.unwrap();
        assert_eq!(end.status, RunStatus::Ended { how: Ended::Exited { code: 0 } });
        (end.stdout_bytes, end.stdout_kept.map(|kept| kept.bytes))
    };
    assert_eq!(run("dd if=/dev/zero of=/tmp/fill bs=4096 2>/dev/null; seq 20000"), (108_894, None));
    assert_eq!(run("rm /tmp/fill; seq 20000"), (108_894, Some(108_894)));
    // A quarter of the volume, not more.
    let (bytes, kept) = run("head -c 1000000 /dev/zero");
    assert!(bytes == 1_000_000 && kept.is_some_and(|kept| (128 << 10..=256 << 10).contains(&kept)), "{kept:?}");
    client.nothing_left();
}

#[test]
fn sigterm_and_loneliness_end_it() {
    let Some(mut init) = Init::start(&[]) else { return };
    let mut client = init.connect();
    client.started(1, &exec_fake());
    rustix::process::kill_process(rustix::process::Pid::from_raw(init.pid()).unwrap(), rustix::process::Signal::TERM)
        .unwrap();
    assert!(init.ends_within(Duration::from_secs(5)));
    assert_eq!(client.frame(), None);

    let Some(mut init) = Init::start(&["--grace", "1"]) else { return };
    let client = init.connect();
    assert!(!init.ends_within(Duration::from_millis(1500)), "it ended under its host");
    drop(client);
    assert!(init.ends_within(Duration::from_secs(5)));
}
