//! Kernels that are forked from a warm interpreter: a small one, whose kernels run the lines they read.

use sandbox::ZygoteSpec;
use sandbox::native::Rotation;
use tokio::io::{AsyncBufReadExt, BufReader};

use super::*;

pub fn python() -> ZygoteSpec {
    let script = PathBuf::from("/opt/sandpool/warm.py");
    let argv = ["/usr/bin/python3", "-I", "-B", script.to_str().unwrap()];
    ZygoteSpec {
        argv: argv.map(str::to_owned).to_vec(),
        env: [("LANG".to_owned(), "C.UTF-8".to_owned())].into(),
        runtime: vec![],
        files: vec![(script, include_bytes!("warm.py").to_vec()).into()],
    }
}

/// A kernel that was forked into a sandbox and is connected.
pub struct Kernel {
    /// Inside.
    pid: u32,
    stream: BufReader<sandbox::GuestStream>,
}

async fn line(stream: &mut BufReader<sandbox::GuestStream>) -> String {
    let mut line = String::new();
    let read = stream.read_line(&mut line);
    tokio::time::timeout(Duration::from_secs(20), read).await.expect("an answer in time").unwrap();
    line.trim_end().to_owned()
}

/// Forks a kernel that waits for what it is to be.
async fn fork(sandbox: &dyn Sandbox) -> u32 {
    sandbox.fork_zygote().await.unwrap();
    let said = sh(sandbox, "@take").await;
    said.trim().parse().unwrap_or_else(|_| panic!("{said}"))
}

impl Kernel {
    async fn equip(sandbox: &dyn Sandbox, pid: u32) -> Self {
        let mut stream = BufReader::new(sandbox.connect().await.unwrap());
        stream.write_all(format!("@equip {pid}\n").as_bytes()).await.unwrap();
        assert_eq!(line(&mut stream).await, "ready");
        Self { pid, stream }
    }

    pub async fn new(sandbox: &dyn Sandbox) -> Self {
        let pid = fork(sandbox).await;
        Self::equip(sandbox, pid).await
    }

    /// What a line of Python prints.
    async fn run(&mut self, code: &str) -> String {
        self.stream.write_all(format!("{code}\n").as_bytes()).await.unwrap();
        line(&mut self.stream).await
    }
}

/// The number on the host of a process that has `inner` in the sandbox of which `outer` is the guest.
fn on_host(guest: u32, inner: u32) -> u32 {
    let is_it = |pid: &u32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let last =
            |name: &str| status.lines().find_map(|l| l.strip_prefix(name))?.split_whitespace().last()?.parse().ok();
        last("PPid:") == Some(guest) && last("NSpid:") == Some(inner)
    };
    descendants().into_keys().find(is_it).unwrap_or_else(|| panic!("no child {inner} of {guest}"))
}

/// The guest of a sandbox that has no other process.
async fn guest_of(sandbox: &dyn Sandbox) -> u32 {
    let own = sh(sandbox, "readlink /proc/self/ns/pid").await;
    let namespace =
        |pid: &u32| fs::read_link(format!("/proc/{pid}/ns/pid")).is_ok_and(|l| l.to_str() == Some(own.trim()));
    descendants().into_keys().find(namespace).unwrap()
}

fn status_of(pid: u32) -> BTreeMap<String, String> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let pair =
        |line: &str| line.split_once(':').map(|(name, value)| (name.to_owned(), value.trim().replace('\t', " ")));
    status.lines().filter_map(pair).collect()
}

#[tokio::test]
async fn a_forked_kernel_is_a_child_of_the_guest_and_ends_as_one() {
    if !root() {
        return;
    }
    let place = Place::new("fork");
    let native = start(&place.0).await;
    let sandbox = native.create(&spec()).await.unwrap();
    assert!(matches!(sandbox.fork_zygote().await, Err(BackendError::Unavailable { .. })));
    native.start_zygote(&python()).await.unwrap();
    let mut kernel = Kernel::new(&*sandbox).await;
    let said =
        kernel.run("print(os.getpid(), os.getppid(), os.getuid(), os.getcwd(), dict(os.environ), flush=True)").await;
    assert_eq!(said, format!("{} 1 1000 /workspace {{'PATH': '/usr/bin:/bin'}}", kernel.pid));
    kernel.stream.write_all(b"os._exit(7)\n").await.unwrap();
    assert_eq!(sh(&*sandbox, &format!("@end {}", kernel.pid)).await, "Some(7) None\n");
    // Other processes of the sandbox reach it, and its guest above all.
    let other = Kernel::new(&*sandbox).await;
    assert_eq!(sh(&*sandbox, &format!("kill -KILL {}", other.pid)).await, "");
    assert_eq!(sh(&*sandbox, &format!("@end {}", other.pid)).await, "None Some(9)\n");
    native.shutdown().await;
    wait_for("the end of the launcher", || descendants().is_empty());
}

#[tokio::test]
async fn a_forked_kernel_is_held_before_it_reads_anything() {
    if !root() {
        return;
    }
    let place = Place::new("held");
    let native = start(&place.0).await;
    native.start_zygote(&python()).await.unwrap();
    let sandbox = native.create(&spec()).await.unwrap();
    let guest = guest_of(&*sandbox).await;
    let inner = fork(&*sandbox).await;
    let kernel = on_host(guest, inner);
    // It sleeps until its guest says what it is to be.
    wait_for("the kernel", || {
        fs::read_to_string(format!("/proc/{kernel}/wchan")).is_ok_and(|w| w.contains("skb") || w.contains("recv"))
            || fs::read_to_string(format!("/proc/{kernel}/syscall")).is_ok_and(|s| s.starts_with("47 "))
    });
    let (held, by) = (status_of(kernel), status_of(guest));
    for name in [
        "Uid",
        "Gid",
        "Groups",
        "CapInh",
        "CapPrm",
        "CapEff",
        "CapBnd",
        "CapAmb",
        "NoNewPrivs",
        "Seccomp",
        "Seccomp_filters",
    ] {
        assert_eq!(held[name], by[name], "{name}");
    }
    assert_eq!((&*held["NoNewPrivs"], &*held["Seccomp"], &*held["CapBnd"]), ("1", "2", "0000000000000000"));
    // SIGPIPE and SIGXFSZ, as Python has it; the last two are the C library's own.
    assert!(held["SigIgn"].ends_with("1001000"), "{}", held["SigIgn"]);
    assert_eq!(held["SigBlk"].trim_start_matches('0'), "");
    for name in ["user", "mnt", "pid", "net", "ipc", "uts", "cgroup"] {
        let of = |pid| fs::read_link(format!("/proc/{pid}/ns/{name}")).unwrap();
        assert_eq!(of(kernel), of(guest), "{name}");
    }
    let read = |file: &str| [kernel, guest].map(|pid| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap());
    for file in ["cgroup", "limits", "sessionid", "loginuid"] {
        let [of_kernel, of_guest] = read(file);
        assert_eq!(of_kernel, of_guest, "{file}");
    }
    assert_eq!(read("oom_score_adj")[0], "500\n");
    // It leads its group, and nobody leads its session, which is no other process's.
    let number = |pid: rustix::process::Pid| pid.as_raw_nonzero().get() as u32;
    let id = rustix::process::Pid::from_raw(kernel as i32);
    assert_eq!(number(rustix::process::getpgid(id).unwrap()), kernel);
    let session = number(rustix::process::getsid(id).unwrap());
    assert!(session != kernel && !descendants().contains_key(&session), "{session}");
    // Nothing is open but the channel, and `/dev/null` is the sandbox's own.
    let open: BTreeMap<u32, String> = fs::read_dir(format!("/proc/{kernel}/fd"))
        .unwrap()
        .flatten()
        .map(|fd| {
            (fd.file_name().to_str().unwrap().parse().unwrap(), fs::read_link(fd.path()).unwrap().display().to_string())
        })
        .collect();
    let kinds: Vec<&str> = open.values().map(|to| to.split(':').next().unwrap()).collect();
    assert_eq!(kinds, ["/dev/null", "/dev/null", "/dev/null", "socket"], "{open:?}");
    // Its program lies on a mount that nobody can write to.
    let program = fs::OpenOptions::new().write(true).open(format!("/proc/{kernel}/exe"));
    assert!(
        program.is_err_and(|e| e.kind() == std::io::ErrorKind::ReadOnlyFilesystem
            || e.kind() == std::io::ErrorKind::ExecutableFileBusy)
    );

    let mut kernel = Kernel::equip(&*sandbox, inner).await;
    for (attempt, refused) in [
        ("open('/proc/1/environ').read()", "PermissionError"),
        ("os.listdir('/proc/1/fd')", "PermissionError"),
        ("open('/proc/self/exe', 'r+b')", "OSError"),
        ("open('/proc/self/exe', 'rb')", "PermissionError"),
        ("open('/usr/x', 'w')", "OSError"),
        ("os.setuid(0)", "OSError"),
        (
            "os.unshare(os.CLONE_NEWUSER) if hasattr(os, 'unshare') else ctypes.CDLL(None).unshare(0x10000000) and (_ for _ in ()).throw(PermissionError)",
            "PermissionError",
        ),
        ("os.chroot('/tmp')", "PermissionError"),
        ("socket.socket(socket.AF_PACKET, socket.SOCK_RAW)", "OSError"),
    ] {
        let code = format!(
            "exec('try:\\n {}\\nexcept BaseException as e: print(type(e).__mro__, flush=True)\\nelse: print(\"WORKED\", flush=True)')",
            attempt.replace('\'', "\\'")
        );
        let said = kernel.run(&code).await;
        assert!(said.contains(refused), "{attempt}: {said}");
    }
    native.shutdown().await;
}

/// W06: what a forked kernel still has of the warm interpreter is no file that others use.
#[tokio::test]
async fn w06_a_forked_kernel_does_not_see_who_else_runs_its_program() {
    if !root() {
        return;
    }
    let place = Place::new("warm-inodes");
    let native = start(&place.0).await;
    native.start_zygote(&python()).await.unwrap();
    let (one, other) = (native.create(&spec()).await.unwrap(), native.create(&spec()).await.unwrap());
    let mut kernel = Kernel::new(&*one).await;
    let watch = "libc = ctypes.CDLL(None); queue = libc.inotify_init1(os.O_NONBLOCK); \
                 print(libc.inotify_add_watch(queue, b'/proc/self/exe', 0xfff) > 0, flush=True)";
    assert_eq!(kernel.run(watch).await, "True");
    assert_eq!(sh(&*other, "python3 -c 'print(1)'").await, "1\n");
    assert!(fs::read("/usr/bin/python3").is_ok());
    Kernel::new(&*other).await;
    let seen = "exec('try: print(os.read(queue, 4096), flush=True)\\nexcept BlockingIOError: print(0, flush=True)')";
    assert_eq!(kernel.run(seen).await, "0");
    native.shutdown().await;
}

#[tokio::test]
async fn two_hundred_kernels_in_five_sandboxes_are_where_they_belong() {
    if !root() {
        return;
    }
    let place = Place::new("many");
    let native = start_without_spares(&place.0).await;
    native.start_zygote(&python()).await.unwrap();
    let spec = SandboxSpec { limits: Limits { pids: 100, memory_bytes: 512 << 20, ..LIMITS }, ..spec() };
    let mut sandboxes = Vec::new();
    for _ in 0..5 {
        sandboxes.push(native.create(&spec).await.unwrap());
    }
    let count = || (descendants().len(), Left::count(&place.0).descriptors);
    let before = count();
    let ours: Vec<String> = {
        let mut names = Vec::new();
        for sandbox in &sandboxes {
            names.push(sh(&**sandbox, "readlink /proc/self/ns/pid").await);
        }
        names
    };
    for round in 0..40 {
        let forks = sandboxes.iter().map(|sandbox| fork(&**sandbox));
        let mut pids = Vec::new();
        for fork in forks {
            pids.push(fork.await);
        }
        for ((sandbox, pid), name) in sandboxes.iter().zip(pids).zip(&ours) {
            let mut kernel = Kernel::equip(&**sandbox, pid).await;
            let said =
                kernel.run("print(os.getpid(), os.getppid(), os.readlink('/proc/self/ns/pid'), flush=True)").await;
            assert_eq!(said, format!("{pid} 1 {}", name.trim()), "round {round}");
            drop(kernel);
            assert_eq!(sh(&**sandbox, &format!("@end {pid}")).await, "Some(0) None\n");
        }
    }
    let after = count();
    assert_eq!(after, before);
    assert_eq!(
        native.zygote_status().await,
        Some(sandbox::ZygoteStatus { ready: true, forks: 200, ..sandbox::ZygoteStatus::default() })
    );
    native.shutdown().await;
}

/// Of this server, by the name it runs under.
fn interpreters() -> Vec<u32> {
    let warm = |pid: &u32| fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.ends_with(b"warm.py\0"));
    let outside = |pid: &u32| uid_of(*pid) == Some(0);
    descendants().into_keys().filter(warm).filter(outside).collect()
}

#[tokio::test]
async fn an_interpreter_that_dies_is_started_again_and_what_it_made_lives_on() {
    if !root() {
        return;
    }
    let place = Place::new("again");
    let native = start(&place.0).await;
    native.start_zygote(&python()).await.unwrap();
    let sandbox = native.create(&spec()).await.unwrap();
    let mut old = Kernel::new(&*sandbox).await;
    let waiting = fork(&*sandbox).await;
    let [first] = interpreters()[..] else { panic!("{:?}", interpreters()) };
    kill(first);
    wait_for("another interpreter", || interpreters().iter().any(|pid| *pid != first));
    // Until it is ready there are none, and that is said.
    loop {
        match sandbox.fork_zygote().await {
            Ok(()) => break,
            Err(BackendError::Unavailable { .. }) => tokio::time::sleep(Duration::from_millis(10)).await,
            Err(other) => panic!("{other}"),
        }
    }
    assert_eq!(old.run("print(1, flush=True)").await, "1");
    assert_eq!(Kernel::equip(&*sandbox, waiting).await.run("print(2, flush=True)").await, "2");
    let new = sh(&*sandbox, "@take").await.trim().parse().unwrap();
    assert_eq!(Kernel::equip(&*sandbox, new).await.run("print(3, flush=True)").await, "3");
    assert_eq!(
        native.zygote_status().await,
        Some(sandbox::ZygoteStatus { ready: true, forks: 3, restarts: 1, ..sandbox::ZygoteStatus::default() })
    );
    native.shutdown().await;
    wait_for("the end of the launcher", || descendants().is_empty());
}

#[tokio::test]
async fn an_interpreter_that_made_many_is_replaced_while_it_serves() {
    if !root() {
        return;
    }
    let place = Place::new("rotate");
    let native = start(&place.0).await;
    let rotation = Rotation { forks: 3, not_before: Duration::ZERO, after: Duration::from_secs(3600) };
    native.start_zygote_rotating(&python(), rotation).await.unwrap();
    let sandbox = native.create(&spec()).await.unwrap();
    let [first] = interpreters()[..] else { panic!("{:?}", interpreters()) };
    let mut made = 0;
    while interpreters().contains(&first) {
        let pid = fork(&*sandbox).await;
        drop(Kernel::equip(&*sandbox, pid).await);
        assert_eq!(sh(&*sandbox, &format!("@end {pid}")).await, "Some(0) None\n");
        made += 1;
        assert!(made < 10_000);
    }
    assert!(made >= 3);
    let status = native.zygote_status().await.unwrap();
    assert_eq!((status.ready, status.restarts), (true, 0));
    native.shutdown().await;
}

#[tokio::test]
async fn an_interpreter_that_does_not_start_is_told_with_its_reason() {
    if !root() {
        return;
    }
    let place = Place::new("not");
    let native = start(&place.0).await;
    let with = |script: &str| {
        let mut spec = python();
        spec.files[0].content = script.as_bytes().to_vec().into();
        spec
    };
    for (spec, reason) in [
        (with("import nothing_of_this_name"), "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        (with("import os; os._exit(3)"), "it did not say why"),
        (
            with(&format!(
                "import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n{}",
                include_str!("warm.py")
            )),
            "it has 2 threads",
        ),
        (ZygoteSpec { argv: vec!["/usr/bin/nothing".into()], ..python() }, "`/usr/bin/nothing`: No such file"),
        (ZygoteSpec { runtime: vec!["/no/such/place".into()], ..python() }, "/no/such/place"),
    ] {
        match native.start_zygote(&spec).await {
            Err(BackendError::Unavailable { why, .. }) => assert!(why.contains(reason), "{why}"),
            other => panic!("{reason}: {other:?}"),
        }
    }
    // W42 of the hostile list: what an interpreter could not import is known.
    let without = format!(
        "import os\nos.write(3, b'j' + b'{{\"not_imported\": {{\"numpy\": \"why\"}}}}')\n{}",
        include_str!("warm.py")
    );
    native.start_zygote(&with(&without)).await.unwrap();
    let not_imported = native.zygote_status().await.unwrap().not_imported;
    assert_eq!(not_imported, [("numpy".to_owned(), "why".to_owned())].into());
    // Another one takes its place.
    native.start_zygote(&python()).await.unwrap();
    assert_eq!(native.zygote_status().await.unwrap().not_imported, [].into());
    let sandbox = native.create(&spec()).await.unwrap();
    Kernel::new(&*sandbox).await;
    native.shutdown().await;
    wait_for("the end of the launcher", || descendants().is_empty());
}

#[tokio::test]
async fn a_sandbox_ends_at_once_whatever_is_being_forked_into_it() {
    if !root() {
        return;
    }
    let place = Place::new("end");
    let native = start(&place.0).await;
    native.start_zygote(&python()).await.unwrap();
    let before = Left::count(&place.0);
    for round in 0..30 {
        let sandbox = native.create(&spec()).await.unwrap();
        let waiting = fork(&*sandbox).await;
        assert!(waiting > 1);
        let (forked, destroyed) = tokio::join!(sandbox.fork_zygote(), sandbox.destroy());
        destroyed.unwrap();
        assert!(
            forked.is_ok() || matches!(forked, Err(BackendError::Gone(_) | BackendError::Unavailable { .. })),
            "round {round}: {forked:?}"
        );
        assert!(matches!(sandbox.fork_zygote().await, Err(BackendError::Gone(_))));
    }
    assert_eq!(native.zygote_status().await.map(|status| (status.ready, status.restarts)), Some((true, 0)));
    wait_for("everything gone", || Left::count(&place.0).processes == before.processes);
    native.shutdown().await;
}

/// The modes that a server can have here, each with what a helper says that was started in it with these words.
fn in_every_mode(name: &str, words: &[&str], mut check: impl FnMut(&str, &str)) {
    let place = place_for_all(name);
    for mode in ["root"].into_iter().chain(modes()) {
        let state = place.0.join(mode);
        let words = [&[words[0], mode, state.to_str().unwrap()], &words[1..]].concat();
        let output = if mode == "root" { as_root(&place, &words) } else { as_user(&place, &words) };
        let Some(output) = output else { return };
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{mode}: {said}");
        let said = said.strip_prefix(&format!("mode {mode}\n")).unwrap_or_else(|| panic!("{mode}: {said}"));
        check(mode, said);
    }
    wait_for("the end of the launcher", || descendants().is_empty());
}

/// W02, W13, W14: while kernels and browsers are brought in, code inside compares whoever it can see with itself, in what anybody may
/// read: mounts, network, cgroups, id maps, capabilities, filters.
#[test]
fn w02_w13_w14_whoever_comes_into_a_sandbox_has_nothing_more_than_it_from_the_first_moment() {
    if root() {
        in_every_mode("watched", &["watch"], |mode, said| assert_eq!(said, "seen True\n", "{mode}"));
    }
}

/// W05, W09: 19 stops, 9 kills.
#[test]
fn w05_w09_code_that_stops_or_kills_what_comes_in_disturbs_no_neighbour() {
    if !root() {
        return;
    }
    for signal in ["19", "9"] {
        in_every_mode(&format!("disturbed-{signal}"), &["disturb", signal], |mode, said| {
            assert_eq!(said, format!("{}ready true restarts 0\n", "served\n".repeat(10)), "{mode} {signal}");
        });
    }
}

/// W05, W10: however a guest ends (for memory, by a signal), the interpreter that was just forking into its sandbox stays.
#[tokio::test]
async fn w05_w10_a_guest_that_dies_while_kernels_come_costs_nobody_the_interpreter() {
    if !root() {
        return;
    }
    let place = Place::new("killed");
    let native = start(&place.0).await;
    native.start_zygote(&python()).await.unwrap();
    let first = interpreters();
    let neighbour = native.create(&spec()).await.unwrap();
    for _ in 0..30 {
        let sandbox = native.create(&spec()).await.unwrap();
        let others = descendants();
        let own = sh(&*sandbox, "readlink /proc/self/ns/pid").await;
        let of_it =
            |pid: &u32| fs::read_link(format!("/proc/{pid}/ns/pid")).is_ok_and(|l| l.to_str() == Some(own.trim()));
        let guest = others.into_keys().find(of_it).unwrap();
        let killed = async {
            tokio::task::yield_now().await;
            kill(guest);
        };
        // One of them may come before the end, or none.
        let _ = tokio::join!(sandbox.fork_zygote(), sandbox.fork_zygote(), killed, sandbox.fork_zygote());
        fork(&*neighbour).await;
    }
    assert_eq!(interpreters(), first);
    let status = native.zygote_status().await.unwrap();
    assert_eq!((status.ready, status.restarts), (true, 0));
    native.shutdown().await;
    wait_for("the end of the launcher", || descendants().is_empty());
}

#[test]
fn an_ordinary_user_forks_kernels_with_and_without_subordinate_ids() {
    if !root() {
        return;
    }
    let place = place_for_all("user-warm");
    let lines = [
        "print(os.getppid(), os.getuid(), os.getgroups(), sorted(os.listdir('/proc/self/fd')), flush=True)",
        "print([l.split()[1] for l in open('/proc/self/status') if l.split(':')[0] in ('CapEff', 'CapBnd', 'NoNewPrivs', 'Seccomp')], flush=True)",
        "print([os.readlink('/proc/self/ns/' + n) == os.readlink('/proc/%d/ns/%s' % (os.getpid(), n)) for n in ('pid', 'net')], flush=True)",
        "print(os.access('/proc/1/environ', os.R_OK), os.access('/usr/bin/python3', os.W_OK), open('/workspace/x', 'w').write('abc'), flush=True)",
        "print(os.kill(1, 0), flush=True)",
    ];
    for mode in modes() {
        let state = place.0.join(mode);
        let words = ["warm", mode, state.to_str().unwrap()];
        let Some(output) = as_user(&place, &[&words[..], &lines[..]].concat()) else { return };
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}");
        let groups = if mode == "sub" { "[]" } else { "[65534]" };
        let said = said.replace(groups, "[]");
        assert_eq!(
            said,
            format!(
                "mode {mode}\n1 1000 [] ['0', '1', '2', '3', '4', '5']\n\
                 ['0000000000000000', '0000000000000000', '1', '2']\n[True, True]\nFalse False 3\nNone\n"
            )
        );
        assert!(fs::read_dir(state.join("instances")).unwrap().next().is_none());
    }
    wait_for("the end of the launcher", || descendants().is_empty());
}
