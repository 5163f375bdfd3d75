//! One tenant that runs the audit's attacks all at once, each on a thread of its own, until it is told to stop.
//!
//! The attacks expect to be refused, cut off or killed, so they ignore what they are answered. Each counts its rounds, which shows that it
//! really ran.

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use testkit::http::{Account, BOTH, Era, Mcp, Wire, request};

use crate::support::eventually;

/// Quotas under which all attacks can run at the same time.
pub const QUOTAS: &str = "{ contexts = 60, runs = 40, memory_mb = 1024 }";

/// Python that attacks from inside a sandbox. Each runs in a context of its own and is ended by its time limit.
const PROGRAMS: &[(&str, &str)] = &[
    (
        "busy threads",
        "import threading\ndef spin():\n    while True: pass\n\
         for _ in range(16): threading.Thread(target=spin, daemon=True).start()\nspin()",
    ),
    ("memory", "x = []\nwhile True:\n    try: x.append(bytearray(b'1') * (1 << 20))\n    except MemoryError: x = []"),
    (
        "full disk",
        "import os\nwhile True:\n    try:\n        with open('fill', 'wb') as f:\n\
         \x20           while True: f.write(b'0' * (1 << 20)); os.fsync(f.fileno())\n    except OSError: pass",
    ),
    (
        "fork bomb",
        "import os, time\nwhile True:\n    try:\n        if os.fork() == 0: time.sleep(1); os._exit(0)\n\
         \x20   except OSError: time.sleep(0.01)",
    ),
    ("output", "while True: print('x' * 10000)"),
    // W01 and W03: buffers that nobody reads.
    (
        "unread netlink answers",
        "import socket, struct, time\nkept = []\nwhile True:\n    try:\n\
         \x20       s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); s.setblocking(False); kept.append(s)\n\
         \x20       while True: s.send(struct.pack('=IHHII', 16, 22, 0x301, 1, 0) + b'\\0' * 16)\n\
         \x20   except OSError: time.sleep(0.001)",
    ),
    (
        "unread datagrams",
        "import socket, time\nkept = []\nwhile True:\n    try:\n\
         \x20       s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('127.0.0.1', 0)); kept.append(s)\n\
         \x20       for _ in range(64): s.sendto(b'x' * 8000, s.getsockname())\n    except OSError: time.sleep(0.001)",
    ),
    // W05: PID 1 is told to end by a signal that pretends to come from outside.
    (
        "forged signals",
        "import ctypes, platform, signal, struct\nlibc = ctypes.CDLL(None)\n\
         number = 129 if platform.machine() == 'x86_64' else 138\n\
         info = ctypes.create_string_buffer(struct.pack('=iiiiII', signal.SIGTERM, 0, -1, 0, 0, 0), 128)\n\
         while True: libc.syscall(number, 1, int(signal.SIGTERM), info)",
    ),
    // W06 and W07.
    (
        "locks and watches",
        "import ctypes, fcntl, glob, os, time\nlibc = ctypes.CDLL(None)\nwatch = libc.inotify_init()\nkept = []\n\
         for path in glob.glob('/usr/bin/*')[:2000] + ['/etc/passwd']:\n\
         \x20   libc.inotify_add_watch(watch, path.encode(), 0xfff)\n    try:\n\
         \x20       file = os.open(path, os.O_RDONLY); fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB); kept.append(file)\n\
         \x20   except OSError: pass\ntime.sleep(60)",
    ),
    // W24.
    (
        "slow names",
        "import threading, urllib.request\ndef ask(n):\n    while True:\n        n += 1\n\
         \x20       try: urllib.request.urlopen(f'http://slow-{n}.test/', timeout=30)\n        except OSError: pass\n\
         for n in range(48): threading.Thread(target=ask, args=(n * 100000,), daemon=True).start()\n\
         threading.Event().wait()",
    ),
];

pub struct Noise {
    over: Arc<AtomicBool>,
    only: Option<&'static str>,
    attacks: Vec<Attack>,
}

struct Attack {
    name: &'static str,
    progress: Arc<Progress>,
    thread: JoinHandle<()>,
}

/// What an attack's thread shares with the test.
struct Progress {
    over: Arc<AtomicBool>,
    rounds: AtomicU64,
}

impl Progress {
    /// Repeats `round` until the noise is over.
    fn repeat(&self, mut round: impl FnMut()) {
        while !self.over.load(Ordering::SeqCst) {
            round();
            if self.rounds.fetch_add(1, Ordering::SeqCst) == 0 {
                // Somebody else's client has a machine of its own. On this one it gives way to the server, but not
                // before its first round, for which the test waits: a busy machine has no time for the lowest priority.
                let _ = rustix::process::setpriority_process(None, 19);
            }
        }
    }
}

impl Noise {
    /// All attacks, or the one that is named. `pages`: the root of a site that the sandboxes' browsers may open.
    pub fn start(account: &Account, pages: &str, only: Option<&'static str>) -> Self {
        let mut noise = Self { over: Arc::default(), attacks: Vec::new(), only };
        for (name, code) in PROGRAMS {
            noise.attack(name, account, |account, progress| run(account, code, progress));
        }
        noise.attack("short contexts", account, short_contexts);
        noise.attack("pipelined lists", account, pipelined_lists);
        noise.attack("large arguments", account, large_arguments);
        noise.attack("unread answers", account, unread_answers);
        noise.attack("endless bodies", account, endless_bodies);
        let pages = pages.to_owned();
        noise.attack("crashing pages", account, move |account, progress| crashing_pages(account, &pages, progress));
        noise
    }

    fn attack(
        &mut self,
        name: &'static str,
        account: &Account,
        attack: impl FnOnce(&Account, &Progress) + Send + 'static,
    ) {
        if self.only.is_some_and(|only| only != name) {
            return;
        }
        let progress = Arc::new(Progress { over: self.over.clone(), rounds: AtomicU64::new(0) });
        let (account, own) = (account.clone(), progress.clone());
        let thread = std::thread::spawn(move || attack(&account, &own));
        self.attacks.push(Attack { name, progress, thread });
    }

    /// Waits until each attack has made a whole round, which shows that it runs.
    pub fn begun(&self) {
        for attack in &self.attacks {
            let rounds = &attack.progress.rounds;
            eventually(&format!("a round of `{}`", attack.name), || rounds.load(Ordering::SeqCst) > 0);
        }
    }

    /// Ends all attacks, with the contexts in which they may go on alone, and returns how many rounds each of them made.
    pub fn stop(self, account: &Account) -> Vec<(&'static str, u64)> {
        self.over.store(true, Ordering::SeqCst);
        let ended = self.attacks.into_iter().map(|attack| {
            attack.thread.join().expect(attack.name);
            (attack.name, attack.progress.rounds.load(Ordering::SeqCst))
        });
        let ended = ended.collect();
        let mut client = Mcp::new(account, "sandpool", Era::Bare);
        let contexts = client.good("list_contexts", json!({}))["contexts"].clone();
        for context in contexts.as_array().expect("a list") {
            call(&mut client, "stop_context", json!({ "context": context["context"] }));
        }
        ended
    }
}

/// A call whose answer does not matter, even if there is none.
fn call(client: &mut Mcp, tool: &str, arguments: Value) -> Option<Value> {
    let answer = client.try_request("tools/call", json!({ "name": tool, "arguments": arguments })).ok();
    if answer.is_none() {
        client.reconnect();
    }
    answer
}

fn run(account: &Account, code: &str, progress: &Progress) {
    let mut client = Mcp::new(account, "sandpool", Era::Bare);
    let mut context = json!(null);
    progress.repeat(|| {
        if context.is_null() {
            let made = call(&mut client, "create_context", json!({})).unwrap_or_default();
            context = made["result"]["structuredContent"]["context"].clone();
        }
        let ran = call(&mut client, "run_code", json!({ "code": code, "context": context, "timeout": 3 }));
        // A context that was lost is replaced, so that the attack goes on.
        if ran.is_none_or(|ran| ran.to_string().contains("lost")) {
            context = json!(null);
        }
    });
}

/// W05: kernels are forked all the time while another context forges signals; each attacks at once.
fn short_contexts(account: &Account, progress: &Progress) {
    let (_, forged) = PROGRAMS.iter().find(|(name, _)| *name == "forged signals").expect("the attack");
    let mut client = Mcp::new(account, "sandpool", Era::Bare);
    progress.repeat(|| {
        let made = call(&mut client, "create_context", json!({})).unwrap_or_default();
        let context = made["result"]["structuredContent"]["context"].clone();
        call(&mut client, "run_code", json!({ "code": forged, "context": context, "timeout": 1 }));
        call(&mut client, "stop_context", json!({ "context": context }));
    });
}

/// One request as bytes.
fn raw(account: &Account, body: &str) -> Vec<u8> {
    let token = account.token.as_deref().unwrap_or_default();
    let length = body.len();
    format!(
        "POST /mcp/sandpool HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\n\
         content-type: application/json\r\naccept: {BOTH}\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .into_bytes()
}

/// W29: thousands of requests on one connection, sent before the first answer is read; for some seconds, since the tenant's other
/// attacks hold them up, too.
fn pipelined_lists(account: &Account, progress: &Progress) {
    let many = raw(account, &request(1, "tools/list", json!({})).to_string()).repeat(2000);
    progress.repeat(|| {
        let Ok(mut stream) = TcpStream::connect(account.address) else { return };
        let Ok(mut reader) = stream.try_clone() else { return };
        let _ = stream.set_write_timeout(Some(Duration::from_secs(5)));
        let reading = std::thread::spawn(move || std::io::copy(&mut reader, &mut std::io::sink()));
        let _ = stream.write_all(&many);
        let end = Instant::now() + Duration::from_secs(5);
        while !reading.is_finished() && Instant::now() < end && !progress.over.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = stream.shutdown(std::net::Shutdown::Both);
        let _ = reading.join();
    });
}

/// W22: calls that wait, each with megabytes of arguments that no tool has.
fn large_arguments(account: &Account, progress: &Progress) {
    let arguments = json!({ "run": "run-of-nobody", "wait": 10, "unknown": "x".repeat(16 << 20) });
    let body = request(1, "tools/call", json!({ "name": "wait_run", "arguments": arguments })).to_string();
    let bytes = raw(account, &body);
    progress.repeat(|| {
        let held: Vec<TcpStream> = (0..8)
            .filter_map(|_| {
                let mut stream = TcpStream::connect(account.address).ok()?;
                stream.set_write_timeout(Some(Duration::from_secs(5))).ok()?;
                stream.write_all(&bytes).ok()?;
                Some(stream)
            })
            .collect();
        drop(held);
    });
}

/// W22: long answers that are never read.
fn unread_answers(account: &Account, progress: &Progress) {
    let mut client = Mcp::new(account, "sandpool", Era::Bare);
    let made = call(&mut client, "create_context", json!({})).unwrap_or_default();
    let context = made["result"]["structuredContent"]["context"].clone();
    let code = "open('long.txt', 'w').write('x' * (2 << 20))";
    call(&mut client, "run_code", json!({ "code": code, "context": context }));
    let arguments = json!({ "path": "long.txt", "context": context });
    let body = request(1, "tools/call", json!({ "name": "read_file", "arguments": arguments })).to_string();
    let bytes = raw(account, &body);
    progress.repeat(|| {
        let mut held: Vec<TcpStream> = (0..40).filter_map(|_| TcpStream::connect(account.address).ok()).collect();
        held.iter_mut().for_each(|stream| drop(stream.write_all(&bytes)));
        // The answers are on their way when the last of them has begun to arrive.
        if let Some(last) = held.last() {
            let _ = last.set_read_timeout(Some(Duration::from_secs(2)));
            let _ = last.peek(&mut [0]);
        }
    });
}

/// W30: a chunked body without an end.
fn endless_bodies(account: &Account, progress: &Progress) {
    let token = account.token.as_deref().unwrap_or_default();
    let head = format!(
        "POST /mcp/sandpool HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\n\
         content-type: application/json\r\naccept: {BOTH}\r\ntransfer-encoding: chunked\r\n\r\n"
    );
    let chunk = format!("10000\r\n{}\r\n", " ".repeat(0x10000));
    progress.repeat(|| {
        let Ok(mut wire) = Wire::open(account.address) else { return };
        let mut sent = wire.write(head.as_bytes());
        // 64 MB at most, and no more once the server hangs up.
        for _ in 0..1000 {
            sent = sent.and_then(|()| wire.write(chunk.as_bytes()));
        }
    });
}

/// B11: pages whose renderer dies, loops or eats memory.
fn crashing_pages(account: &Account, pages: &str, progress: &Progress) {
    let mut client = Mcp::new(account, "sandpool", Era::Bare);
    let made = call(&mut client, "create_context", json!({})).unwrap_or_default();
    let context = made["result"]["structuredContent"]["context"].clone();
    progress.repeat(|| {
        call(&mut client, "browser_open", json!({ "url": pages, "context": context, "timeout": 5 }));
        for expression in ["let a = []; for (;;) a.push(new Array(1e6).fill(1))", "for (;;);"] {
            let act = json!({ "action": "evaluate", "expression": expression, "context": context, "timeout": 3 });
            call(&mut client, "browser_act", act);
        }
    });
}

/// A name server that answers `quick…` with loopback and never answers `slow…`.
pub struct Names {
    pub address: IpAddr,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Names {
    /// On a loopback address of its own, since a resolver's configuration has no place for a port. Needs the right to bind port 53.
    pub fn start() -> std::io::Result<Self> {
        let address = IpAddr::V4(Ipv4Addr::new(127, 53, (std::process::id() >> 8) as u8, std::process::id() as u8));
        let socket = UdpSocket::bind(SocketAddr::new(address, 53))?;
        socket.set_read_timeout(Some(Duration::from_millis(100)))?;
        let over = Arc::<AtomicBool>::default();
        let flag = over.clone();
        let thread = std::thread::spawn(move || {
            let mut question = [0; 512];
            while !flag.load(Ordering::SeqCst) {
                let Ok((length, from)) = socket.recv_from(&mut question) else { continue };
                if let Some(answer) = answer(&question[..length]) {
                    let _ = socket.send_to(&answer, from);
                }
            }
        });
        Ok(Self { address, over, thread: Some(thread) })
    }
}

impl Drop for Names {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// The answer to a question for an `A` record of a name that begins with `quick`; an empty answer to its other questions.
fn answer(question: &[u8]) -> Option<Vec<u8>> {
    let name = question.get(12..)?;
    if !name.get(1..)?.starts_with(b"quick") {
        return None;
    }
    // The name's end, then type and class.
    let end = 12 + name.iter().position(|byte| *byte == 0)? + 5;
    let is_a = question.get(end - 4..end - 2)? == [0, 1];
    let mut answer = question[..end].to_vec();
    answer[2..12].copy_from_slice(&[0x81, 0x80, 0, 1, 0, u8::from(is_a), 0, 0, 0, 0]);
    if is_a {
        answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4, 127, 0, 0, 1]);
    }
    Some(answer)
}
