//! For the tests of the native back end: an executable that can be the launcher, a guest that runs shell lines, and a server that
//! an ordinary user starts.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use jail::zygote::{Arrival, Fork};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{WaitId, WaitIdOptions, waitid};
use sandbox::native::{Cgroups, GuestBinary, Mode, Native, NativeConfig};
use sandbox::{
    Backend, BackendError, BrowserRoom, FileSpec, Group, KeptVolume, Level, Limits, Sandbox, SandboxSpec, SharedVolume,
    ZygoteSpec,
};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt};

fn main() {
    sandbox::native::launcher_entry();
    let args: Vec<String> = std::env::args().collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["sandpool-guest"] => guest(),
        ["sandpool-guest", "browser"] => driver(),
        [_, "serve", mode, state_dir, ref lines @ ..] => serve(mode, state_dir, lines),
        [_, "keep", mode, state_dir, ref lines @ ..] => keep(mode, state_dir, lines),
        [_, "swell", mode, state_dir, program, ref ways @ ..] => swell(mode, state_dir, program, ways),
        [_, "hoard", mode, state_dir] => hoard(mode, state_dir),
        [_, "share", mode, state_dir, host, line] => share(mode, state_dir, host, line),
        [_, "floor", mode, state_dir] => floor(mode, state_dir),
        [_, "warm", mode, state_dir, ref lines @ ..] => warm(mode, state_dir, lines),
        [_, "browse", mode, state_dir, ref lines @ ..] => browse(mode, state_dir, lines),
        [_, "watch", mode, state_dir] => watch(mode, state_dir),
        [_, "disturb", mode, state_dir, signal] => disturb(mode, state_dir, signal),
        [_, "private", mode, state_dir] => private(mode, state_dir),
        [_, "forks", state_dir, count, driver, ref argv @ ..] => forks(state_dir, count.parse().unwrap(), driver, argv),
        [_, "survey"] => survey(),
        [_, "bench", state_dir, count] => bench(state_dir, count.parse().unwrap(), spec()),
        [_, "bench", state_dir, count, "kept"] => bench(state_dir, count.parse().unwrap(), keeping()),
        _ => {
            eprintln!(
                "usage: native_helper serve|keep root|sub|single STATE_DIR LINE... | survey | bench STATE_DIR N [kept]"
            )
        }
    }
}

/// PID 1: answers each connection with the output of the shell line it sends.
fn guest() {
    let listener = UnixListener::from(jail::inherited::take_fd(3).unwrap());
    let forks = Arc::new(jail::inherited::take_fd(4).unwrap());
    let taken = Arc::default();
    for stream in listener.incoming() {
        let stream = stream.unwrap();
        let (forks, taken) = (Arc::clone(&forks), Arc::clone(&taken));
        std::thread::spawn(move || {
            let mut line = String::new();
            BufReader::new(stream.try_clone().unwrap()).read_line(&mut line).unwrap();
            match line.trim().strip_prefix('@') {
                Some(order) => forked(order, stream, &forks, &taken),
                None => answer(&line, "/workspace", stream),
            }
        });
    }
}

/// Kernels that were forked into the sandbox, by their numbers.
type Taken = Mutex<BTreeMap<u32, (Fork, Option<OwnedFd>)>>;

/// `take` the oldest and say its number; `equip N` with this connection for 1 to 4; `drive N LINE` runs a shell line as a driver;
/// `let-go N` closes a driver's leash; say how N ended, when it has (`end N`).
fn forked(order: &str, mut stream: UnixStream, forks: &OwnedFd, taken: &Taken) {
    let (word, rest) = order.split_once(' ').unwrap_or((order, "0"));
    let (number, line) = rest.split_once(' ').unwrap_or((rest, ""));
    let number: u32 = number.parse().unwrap();
    match word {
        "drive" => {
            let channel = taken.lock().unwrap()[&number].0.channel.try_clone().unwrap();
            drive(UnixStream::from(channel), line, &mut stream);
        }
        "take" => match Arrival::receive(forks) {
            Ok(arrival) => {
                let (fork, leash) = match arrival {
                    Arrival::Kernel(fork) => (fork, None),
                    Arrival::Driver(fork, leash) => (fork, Some(leash)),
                };
                writeln!(stream, "{}", fork.pid).unwrap();
                taken.lock().unwrap().insert(fork.pid, (fork, leash));
            }
            Err(e) => writeln!(stream, "{e}").unwrap(),
        },
        "equip" => equip(&taken.lock().unwrap()[&number].0.channel, &stream),
        "let-go" => drop(taken.lock().unwrap().get_mut(&number).unwrap().1.take()),
        _ => {
            let (Fork { process, .. }, _leash) = taken.lock().unwrap().remove(&number).unwrap();
            let ended = waitid(WaitId::PidFd(process.as_fd()), WaitIdOptions::EXITED).unwrap().unwrap();
            writeln!(stream, "{:?} {:?}", ended.exit_status(), ended.terminating_signal()).unwrap();
        }
    }
}

/// A driver of a browser that runs shell lines instead: each answered with what it printed, up to a NUL.
fn driver() {
    let _leash = jail::inherited::take_fd(4).unwrap();
    let guest = UnixStream::from(jail::inherited::take_fd(3).unwrap());
    for line in BufReader::new(guest.try_clone().unwrap()).lines() {
        answer(&line.unwrap(), "/browser", guest.try_clone().unwrap());
        (&guest).write_all(&[0]).unwrap();
    }
}

fn drive(mut channel: UnixStream, line: &str, stream: &mut UnixStream) {
    if writeln!(channel, "{line}").is_err() {
        return writeln!(stream, "ended").unwrap();
    }
    let mut said = Vec::new();
    let _ = BufReader::new(channel).read_until(0, &mut said);
    let whole = said.pop_if(|byte| *byte == 0).is_some();
    stream.write_all(&said).unwrap();
    if !whole {
        writeln!(stream, "ended").unwrap();
    }
}

fn equip(channel: &OwnedFd, stream: &UnixStream) {
    let fds = [stream.as_fd(); 4];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&fds));
    let packet = IoSlice::new(br#"{"env":{"PATH":"/usr/bin:/bin"},"cwd":"/workspace"}"#);
    if sendmsg(channel, &[packet], &mut control, SendFlags::NOSIGNAL).is_err() {
        let mut words = [0; 1024];
        let (got, _) = rustix::net::recv(channel, &mut words, RecvFlags::DONTWAIT).unwrap_or_default();
        let mut stream = stream;
        writeln!(stream, "ended: {}", String::from_utf8_lossy(&words[..got])).unwrap();
    }
}

#[allow(clippy::disallowed_methods, reason = "a test's guest")]
fn answer(line: &str, directory: &str, stream: UnixStream) {
    let output = || Stdio::from(OwnedFd::from(stream.try_clone().unwrap()));
    let status = Command::new("/bin/sh")
        .args(["-c", line])
        .env("PATH", "/usr/bin:/bin:/usr/sbin")
        .current_dir(directory)
        .stdin(Stdio::null())
        .stdout(output())
        .stderr(output())
        .status();
    match status {
        Ok(status) if status.success() => {}
        other => drop(writeln!(&stream, "[{other:?}]")),
    }
}

/// Starts a server, makes a sandbox, prints what each line prints inside, destroys everything.
fn serve(mode: &str, state_dir: &str, lines: &[&str]) {
    let launcher = sandbox::native::spawn_launcher().unwrap();
    let config = config(state_dir, mode_of(mode));
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
        let (native, isolation) = Native::start(launcher, config).await.unwrap();
        eprintln!("mode {} level {:?}", native.mode(), isolation.level);
        let sandbox = native.create(&spec()).await.unwrap();
        for line in lines {
            say(&*sandbox, line).await;
        }
        sandbox.destroy().await.unwrap();
        native.shutdown().await;
    });
}

/// Prints what the line prints inside.
async fn say(sandbox: &dyn Sandbox, line: &str) {
    let mut stream = sandbox.connect().await.unwrap();
    stream.write_all(format!("{line}\n").as_bytes()).await.unwrap();
    let mut text = Vec::new();
    stream.read_to_end(&mut text).await.unwrap();
    std::io::stderr().write_all(&text).unwrap();
}

/// Runs the program in sandboxes that no cgroup limits, in each of the ways, and says how each sandbox ended. A
/// neighbour goes on.
fn swell(mode: &str, state_dir: &str, program: &str, ways: &[&str]) {
    let launcher = sandbox::native::spawn_launcher().unwrap();
    let config = NativeConfig { cgroups: Cgroups::Nothing, ..config(state_dir, mode_of(mode)) };
    let program = std::fs::read(program).unwrap();
    let spec = SandboxSpec { files: vec![("/opt/sandpool/swell.py".into(), program).into()], ..spec() };
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
        let (native, isolation) = Native::start(launcher, config).await.unwrap();
        eprintln!("level {:?} unheld {:?}", isolation.level, isolation.unheld);
        let neighbour = native.create(&spec).await.unwrap();
        for way in ways {
            let sandbox = native.create(&spec).await.unwrap();
            say(&*sandbox, &format!("python3 /opt/sandpool/swell.py {way}")).await;
            let stats = sandbox.stats().await.unwrap();
            eprintln!("{way}: ended at {:?}", stats.ended_at_bytes.map(|bytes| bytes >> 20));
            say(&*neighbour, "echo neighbour").await;
            sandbox.destroy().await.unwrap();
        }
        neighbour.destroy().await.unwrap();
        native.shutdown().await;
    });
}

/// Each line in a sandbox of its own, all with the same kept volume; then what there is and what can be had twice.
fn keep(mode: &str, state_dir: &str, lines: &[&str]) {
    let launcher = sandbox::native::spawn_launcher().unwrap();
    let config = config(state_dir, mode_of(mode));
    let spec = keeping();
    let name = spec.kept.clone().unwrap().name;
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
        let (native, _) = Native::start(launcher, config).await.unwrap();
        for line in lines {
            // Others come and go meanwhile, and so do the uids.
            let other = native.create(&self::spec()).await.unwrap();
            let sandbox = native.create(&spec).await.unwrap();
            say(&*sandbox, line).await;
            assert!(matches!(native.create(&spec).await, Err(BackendError::InUse)));
            assert!(matches!(native.discard(&name).await, Err(BackendError::InUse)));
            sandbox.destroy().await.unwrap();
            other.destroy().await.unwrap();
        }
        assert_eq!(native.kept().await.unwrap().iter().map(|k| &k.name).collect::<Vec<_>>(), [&name]);
        native.discard(&name).await.unwrap();
        native.discard(&name).await.unwrap();
        assert_eq!(native.kept().await.unwrap(), []);
        native.shutdown().await;
    });
}

/// Fills one kept volume after the other until there is no room for another, and says how much they hold; then what is possible
/// without it.
fn hoard(mode: &str, state_dir: &str) {
    let launcher = sandbox::native::spawn_launcher().unwrap();
    let config = config(state_dir, mode_of(mode));
    let tenant = &format!("hoarder-{}", std::process::id());
    // Its kept volumes may have half of it.
    let group = |name: &str| Group { name: name.into(), memory_bytes: Some(64 << 20), cpu_millis: None };
    let numbered = |tenant: &str, number: usize| {
        let kept = KeptVolume { name: format!("{number:064x}"), bytes: 16 << 20, inodes: 10_000, workspace: None };
        SandboxSpec { groups: vec![group(tenant)], kept: Some(kept), ..spec() }
    };
    let fill =
        "dd if=/dev/zero of=/data/x bs=64k 2>/dev/null; stat -c %s /data/x; echo x 2>/dev/null > /data/y || echo full";
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
        let (native, _) = Native::start(launcher, config).await.unwrap();
        let mut number = 0;
        let refused = loop {
            match native.create(&numbered(tenant, number)).await {
                Ok(sandbox) => {
                    say(&*sandbox, fill).await;
                    sandbox.destroy().await.unwrap();
                    number += 1;
                }
                Err(error) => break error,
            }
            assert!(number < 30, "there is no end of it");
        };
        assert!(matches!(refused, BackendError::NoSpace(_)), "{refused:?}");
        // No sandbox of the tenant is left.
        eprintln!("charged {}", charged(tenant).map_or(-1, |bytes| (bytes >> 20) as i64));
        let first = native.create(&numbered(tenant, 0)).await.unwrap();
        say(&*first, "echo more 2>/dev/null >> /data/x || echo full; rm /data/x && echo removed").await;
        first.destroy().await.unwrap();
        for other in [tenant, "other"] {
            number += 1;
            let sandbox = native.create(&numbered(other, number)).await.unwrap();
            say(&*sandbox, "echo another > /data/f && cat /data/f").await;
            sandbox.destroy().await.unwrap();
        }
        for kept in native.kept().await.unwrap() {
            native.discard(&kept.name).await.unwrap();
        }
        eprintln!("charged {}", charged(tenant).map_or(-1, |bytes| (bytes >> 20) as i64));
        native.shutdown().await;
    });
}

/// The memory that is charged to the cgroup of this name, if there is one.
#[allow(clippy::disallowed_methods, reason = "looks for a directory")]
fn charged(group: &str) -> Option<u64> {
    let found = Command::new("find").args(["/sys/fs/cgroup", "-type", "d", "-name", group]).output().unwrap();
    let found = String::from_utf8(found.stdout).unwrap();
    let files =
        found.lines().flat_map(|dir| ["memory.usage_in_bytes", "memory.current"].map(|file| format!("{dir}/{file}")));
    files.filter_map(|file| std::fs::read_to_string(file).ok()?.trim().parse().ok()).next()
}

fn share(mode: &str, state_dir: &str, host: &str, line: &str) {
    let launcher = sandbox::native::spawn_launcher().unwrap();
    let config = config(state_dir, mode_of(mode));
    let volume =
        |inside: &str, read_only| SharedVolume { host: PathBuf::from(host), inside: PathBuf::from(inside), read_only };
    let spec = SandboxSpec { volumes: vec![volume("/rw", false), volume("/ro", true)], ..spec() };
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
        let (native, _) = Native::start(launcher, config).await.unwrap();
        let sandbox = native.create(&spec).await.unwrap();
        say(&*sandbox, line).await;
        let notes = sandbox.isolation().missing.iter().filter(|line| line.contains("with directories of the host"));
        eprintln!("{} notes", notes.count());
        sandbox.destroy().await.unwrap();
        native.shutdown().await;
    });
}

/// Prints what lines of Python print, each in a kernel of its own, forked from a warm interpreter.
fn warm(mode: &str, state_dir: &str, lines: &[&str]) {
    let launcher = sandbox::native::spawn_launcher().unwrap();
    let config = config(state_dir, mode_of(mode));
    let interpreter = interpreter();
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
        let (native, _) = Native::start(launcher, config).await.unwrap();
        eprintln!("mode {}", native.mode());
        native.start_zygote(&interpreter).await.unwrap();
        let sandbox = native.create(&spec()).await.unwrap();
        for line in lines {
            let (_, mut stream) = kernel(&*sandbox).await;
            stream.write_all(format!("{line}\nraise SystemExit\n").as_bytes()).await.unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).await.unwrap();
            eprint!("{text}");
        }
        sandbox.destroy().await.unwrap();
        native.shutdown().await;
    });
}

fn interpreter() -> ZygoteSpec {
    let script = PathBuf::from("/opt/sandpool/warm.py");
    ZygoteSpec {
        argv: ["/usr/bin/python3", "-I", "-B", script.to_str().unwrap()].map(str::to_owned).to_vec(),
        env: BTreeMap::new(),
        runtime: vec![],
        files: vec![(script, include_bytes!("../tests/native/warm.py").to_vec()).into()],
    }
}

/// Code that runs inside while things happen to its sandbox, from `/opt/sandpool`.
fn attacked() -> SandboxSpec {
    let file = |name: &str, text: &[u8]| FileSpec::from((PathBuf::from("/opt/sandpool").join(name), text.to_vec()));
    let files = vec![
        file("watch.py", include_bytes!("../tests/native/watch.py")),
        file("disturb.py", include_bytes!("../tests/native/disturb.py")),
    ];
    let limits = Limits { memory_bytes: 1 << 30, pids: 200, ..spec().limits };
    let browser = Some(BrowserRoom { memory_bytes: 256 << 20, pids: 50 });
    SandboxSpec { files, limits, browser, ..spec() }
}

/// Waits until the code inside has made its file.
async fn wait_inside(sandbox: &dyn Sandbox, file: &str) {
    let mut stream = sandbox.connect().await.unwrap();
    let line = format!("until [ -e {file} ]; do sleep 0.01; done\n");
    stream.write_all(line.as_bytes()).await.unwrap();
    stream.read_to_end(&mut Vec::new()).await.unwrap();
}

/// Prints what code inside sees of everybody who comes in: kernels and drivers of browsers.
fn watch(mode: &str, state_dir: &str) {
    let launcher = sandbox::native::spawn_launcher().unwrap();
    let config = config(state_dir, mode_of(mode));
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
        let (native, _) = Native::start(launcher, config).await.unwrap();
        eprintln!("mode {}", native.mode());
        native.start_zygote(&interpreter()).await.unwrap();
        let sandbox = native.create(&attacked()).await.unwrap();
        let watching = say(&*sandbox, "python3 /opt/sandpool/watch.py");
        let coming = async {
            wait_inside(&*sandbox, "/workspace/begun").await;
            for _ in 0..30 {
                sandbox.fork_zygote().await.unwrap();
            }
            for _ in 0..10 {
                sandbox.enter_browser().await.unwrap();
            }
            say(&*sandbox, "touch /workspace/stop").await;
        };
        tokio::join!(watching, coming);
        sandbox.destroy().await.unwrap();
        native.shutdown().await;
    });
}

/// Code in one sandbox sends a signal to everybody it can reach while kernels come; another sandbox has its own meanwhile.
fn disturb(mode: &str, state_dir: &str, signal: &str) {
    let launcher = sandbox::native::spawn_launcher().unwrap();
    let config = config(state_dir, mode_of(mode));
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
        let (native, _) = Native::start(launcher, config).await.unwrap();
        eprintln!("mode {}", native.mode());
        native.start_zygote(&interpreter()).await.unwrap();
        let (attacker, neighbour) = (native.create(&attacked()).await.unwrap(), native.create(&spec()).await.unwrap());
        let mut disturbing = tokio::io::BufReader::new(attacker.connect().await.unwrap());
        let line = format!("exec python3 /opt/sandpool/disturb.py {signal}\n");
        disturbing.write_all(line.as_bytes()).await.unwrap();
        assert_eq!(disturbing.read_line(&mut String::new()).await.unwrap(), "begun\n".len());
        let attacked = async {
            loop {
                // Whether it gets a kernel is the attacker's own business.
                let _ = attacker.fork_zygote().await;
            }
        };
        let served = async {
            for _ in 0..10 {
                let (_, mut stream) = kernel(&*neighbour).await;
                stream.write_all(b"print('served', flush=True)\nraise SystemExit\n").await.unwrap();
                let mut text = String::new();
                stream.read_to_string(&mut text).await.unwrap();
                eprint!("{text}");
            }
        };
        tokio::select! {
            () = attacked => {}
            () = served => {}
        }
        let status = native.zygote_status().await.unwrap();
        eprintln!("ready {} restarts {}", status.ready, status.restarts);
        native.shutdown().await;
    });
}

/// Prints what another process of the same user is told that wants to look into a server.
#[allow(clippy::disallowed_methods, reason = "the other process")]
fn private(mode: &str, state_dir: &str) {
    sandbox::native::keep_memory_private().unwrap();
    let launcher = sandbox::native::spawn_launcher().unwrap();
    let config = config(state_dir, mode_of(mode));
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
        let (native, _) = Native::start(launcher, config).await.unwrap();
        eprintln!("mode {}", native.mode());
        let output = Command::new("cat").arg(format!("/proc/{}/environ", std::process::id())).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        eprintln!("{}", said.trim().rsplit(": ").next().unwrap_or_default());
        let sandbox = native.create(&spec()).await.unwrap();
        say(&*sandbox, "id -u").await;
        sandbox.destroy().await.unwrap();
        native.shutdown().await;
    });
}

/// Prints what lines print inside: as the code, and after `browser:` as a browser, which is put there anew for each.
fn browse(mode: &str, state_dir: &str, lines: &[&str]) {
    let launcher = sandbox::native::spawn_launcher().unwrap();
    let config = config(state_dir, mode_of(mode));
    let limits =
        Limits { memory_bytes: 1 << 30, pids: 600, disk_bytes: 256 << 20, disk_inodes: 10_000, ..spec().limits };
    let room = BrowserRoom { memory_bytes: 768 << 20, pids: 500 };
    let page = include_bytes!("../tests/native/page.html").to_vec();
    let files = vec![(PathBuf::from("/opt/sandpool/page.html"), page).into()];
    let spec = SandboxSpec { limits, files, browser: Some(room), ..spec() };
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
        let (native, _) = Native::start(launcher, config).await.unwrap();
        let sandbox = native.create(&spec).await.unwrap();
        let notes = sandbox.isolation().missing.iter().filter(|line| line.starts_with("browser: "));
        eprintln!("mode {}, {} notes", native.mode(), notes.count());
        for line in lines {
            match line.strip_prefix("browser:") {
                None => say(&*sandbox, line).await,
                Some(line) => {
                    sandbox.enter_browser().await.unwrap();
                    let mut stream = sandbox.connect().await.unwrap();
                    stream.write_all(b"@take\n").await.unwrap();
                    let mut pid = String::new();
                    stream.read_to_string(&mut pid).await.unwrap();
                    say(&*sandbox, &format!("@drive {} {line}", pid.trim())).await;
                }
            }
        }
        sandbox.destroy().await.unwrap();
        native.shutdown().await;
    });
}

/// Forks a kernel, equips it and waits for its first line.
async fn kernel(sandbox: &dyn Sandbox) -> (String, tokio::io::BufReader<sandbox::GuestStream>) {
    sandbox.fork_zygote().await.unwrap();
    let mut stream = sandbox.connect().await.unwrap();
    stream.write_all(b"@take\n").await.unwrap();
    let mut pid = String::new();
    stream.read_to_string(&mut pid).await.unwrap();
    let mut stream = tokio::io::BufReader::new(sandbox.connect().await.unwrap());
    stream.write_all(format!("@equip {}\n", pid.trim()).as_bytes()).await.unwrap();
    stream.read_line(&mut String::new()).await.unwrap();
    (pid.trim().to_owned(), stream)
}

/// How long a fork takes until its guest can have it and until it is ready, against starting `/bin/true`.
#[allow(clippy::disallowed_methods, reason = "the yardstick")]
fn forks(state_dir: &str, count: usize, driver: &str, argv: &[&str]) {
    let launcher = sandbox::native::spawn_launcher().unwrap();
    let config = config(state_dir, None);
    let argv: Vec<String> = argv.iter().map(|&a| a.to_owned()).collect();
    let runtime: Vec<PathBuf> = argv[0].split("/bin/").next().map(PathBuf::from).into_iter().collect();
    let files = vec![FileSpec::from((PathBuf::from("/opt/sandpool/driver.py"), std::fs::read(driver).unwrap()))];
    // What the kernels are given: with another the driver starts anew.
    let env = [("PATH".to_owned(), "/usr/bin:/bin".to_owned())].into();
    let spec = SandboxSpec { runtime: runtime.clone(), files: files.clone(), ..spec() };
    tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap().block_on(async {
        let (native, _) = Native::start(launcher, config).await.unwrap();
        native.start_zygote(&ZygoteSpec { argv, env, runtime, files }).await.unwrap();
        let mut rows: [Vec<f64>; 3] = Default::default();
        let ms = |since: std::time::Instant| since.elapsed().as_secs_f64() * 1e3;
        for _ in 0..count {
            let at = std::time::Instant::now();
            Command::new("/bin/true").status().unwrap();
            rows[0].push(ms(at));
            let sandbox = native.create(&spec).await.unwrap();
            let at = std::time::Instant::now();
            sandbox.fork_zygote().await.unwrap();
            rows[1].push(ms(at));
            sandbox.destroy().await.unwrap();
            let sandbox = native.create(&spec).await.unwrap();
            let at = std::time::Instant::now();
            let _kernel = kernel(&*sandbox).await;
            rows[2].push(ms(at));
            sandbox.destroy().await.unwrap();
        }
        for (name, row) in ["fork+exec true", "fork_zygote", "fork_zygote to ready"].iter().zip(&mut rows) {
            row.sort_by(f64::total_cmp);
            eprintln!("{name}: min {:.2} median {:.2} p90 {:.2} ms", row[0], row[count / 2], row[count * 9 / 10]);
        }
        native.shutdown().await;
    });
}

fn mode_of(name: &str) -> Option<Mode> {
    match name {
        "sub" => Some(Mode::Sub),
        "single" => Some(Mode::Single),
        _ => None,
    }
}

/// Asks for everything, and says what the server answers.
fn floor(mode: &str, state_dir: &str) {
    let launcher = sandbox::native::spawn_launcher().unwrap();
    let config = NativeConfig { floor: Level::Full, ..config(state_dir, mode_of(mode)) };
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
        match Native::start(launcher, config).await {
            Ok((native, isolation)) => {
                eprintln!("started at {:?}", isolation.level);
                native.shutdown().await;
            }
            Err(e) => eprintln!("{e}"),
        }
    });
}

fn config(state_dir: &str, mode: Option<Mode>) -> NativeConfig {
    NativeConfig {
        state_dir: PathBuf::from(state_dir),
        runtime_dir: None,
        guest: GuestBinary::Path(std::env::current_exe().unwrap()),
        zygote: GuestBinary::Path(std::env::current_exe().unwrap().with_file_name("libsandpool_zygote.so")),
        // The test that started this program finds its cgroups by this label.
        label: format!("test-{}", std::os::unix::process::parent_id()),
        exclusive: false,
        mode,
        cgroups: Cgroups::default(),
        floor: Level::Basic,
        spares: sandbox::native::SPARES,
        restarts: false,
        keep_free: sandbox::native::KeepFree::default(),
    }
}

fn spec() -> SandboxSpec {
    SandboxSpec {
        groups: vec![Group { name: "g".into(), memory_bytes: None, cpu_millis: None }],
        limits: Limits { memory_bytes: 256 << 20, cpu_millis: 1000, pids: 64, disk_bytes: 64 << 20, disk_inodes: 2000 },
        runtime: vec![],
        files: vec![("/opt/sandpool/hello.txt".into(), b"hello".to_vec()).into()],
        volumes: vec![],
        kept: None,
        egress: false,
        browser: None,
    }
}

fn keeping() -> SandboxSpec {
    let kept = KeptVolume { name: "0af9".repeat(16), bytes: 16 << 20, inodes: 200, workspace: None };
    SandboxSpec { kept: Some(kept), ..spec() }
}

fn survey() {
    let launcher = sandbox::native::spawn_launcher().unwrap();
    let found = launcher.survey(None, Cgroups::default()).unwrap();
    for fact in &found.facts {
        eprintln!("{:?} {}: {} {}", fact.state, fact.layer, fact.why, fact.what_to_do);
    }
    eprintln!("{:?}", found.outcome);
}

/// Creation, first answer and destruction, against starting `/bin/true`.
#[allow(clippy::disallowed_methods, reason = "the yardstick")]
fn bench(state_dir: &str, count: usize, spec: SandboxSpec) {
    let launcher = sandbox::native::spawn_launcher().unwrap();
    let config = config(state_dir, None);
    tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap().block_on(async {
        let (native, _) = Native::start(launcher, config).await.unwrap();
        let mut rows: [Vec<f64>; 4] = Default::default();
        let ms = |since: std::time::Instant| since.elapsed().as_secs_f64() * 1e3;
        for _ in 0..count {
            let at = std::time::Instant::now();
            Command::new("/bin/true").status().unwrap();
            rows[0].push(ms(at));
            let at = std::time::Instant::now();
            let sandbox = native.create(&spec).await.unwrap();
            rows[1].push(ms(at));
            let mut stream = sandbox.connect().await.unwrap();
            stream.write_all(b"\n").await.unwrap();
            stream.read_to_end(&mut Vec::new()).await.unwrap();
            rows[2].push(ms(at));
            let at = std::time::Instant::now();
            sandbox.destroy().await.unwrap();
            rows[3].push(ms(at));
        }
        for (name, row) in ["fork+exec true", "create", "create+sh", "destroy"].iter().zip(&mut rows) {
            row.sort_by(f64::total_cmp);
            eprintln!("{name}: min {:.2} median {:.2} p90 {:.2} ms", row[0], row[count / 2], row[count * 9 / 10]);
        }
        native.shutdown().await;
    });
}
