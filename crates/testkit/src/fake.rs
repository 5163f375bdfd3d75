//! A back end whose guests follow a script: for everything a real guest does too seldom, or never.
//!
//! Without a script its guests are well-behaved and understand a small language, one statement a line, in cells and in commands:
//! `print TEXT`, `error TEXT`, `sleep MS`, `hang` (until interrupted or past its deadline), `deaf` (never answers again),
//! `raise NAME`, `die SIGNAL`, `exit CODE`, `flood BYTES`, `set NAME TEXT`, `get NAME`, `env NAME`, `write PATH TEXT`,
//! `read PATH`, `fetch NAME` (through the sandbox's way out; prints the status). Paths below `/data` are in the sandbox's kept volume, if it has one. A program other than `/bin/sh` is not found.

use std::collections::{BTreeMap, HashMap};
use std::net::{SocketAddr, TcpListener};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use proto::{
    Deadline, Decoder, Ended, Failure, Frame, FromGuest, KernelEvent, KernelId, Kind, RunEnd, RunStatus, ToGuest,
};
use sandbox::{Backend, BackendError, GuestStream, Isolation, Kept, Level, Sandbox, SandboxSpec, Stats};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::net::TcpStream;
use tokio::sync::{Mutex as AsyncMutex, Notify};

mod browser;

use browser::Tabs;

type Work = Pin<Box<dyn Future<Output = ()> + Send>>;
/// Answers a request, or leaves it (`None`) to the well-behaved guest.
type Script = Arc<dyn Fn(u64, &ToGuest, &Wire) -> Option<Work> + Send + Sync>;

#[derive(Clone)]
pub struct FakeBackend {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    script: Mutex<Option<Script>>,
    sandboxes: Mutex<Vec<Arc<FakeSandbox>>>,
    created: AtomicUsize,
    fail_creates: AtomicU32,
    fail_kernels: AtomicU32,
    fail_destroys: AtomicBool,
    hang_destroys: AtomicBool,
    /// How long it takes to make and to destroy one.
    slow: Mutex<(Duration, Duration)>,
    oom_kills: AtomicU64,
    /// No socket comes out of sandboxes that should have one.
    no_egress: AtomicBool,
    /// What was asked of browsers, in the order in which it began, and how they were started.
    browsed: Mutex<Vec<proto::browser::Browse>>,
    browsers: Mutex<Vec<proto::browser::BrowserSpec>>,
    fail_browsers: AtomicU32,
    /// How long it takes to start a browser.
    slow_browsers: Mutex<Duration>,
    shut_down: AtomicBool,
    /// The code of every run, in the order in which it began.
    runs: Mutex<Vec<String>>,
    kernels: Mutex<Vec<proto::KernelSpec>>,
    specs: Mutex<Vec<SandboxSpec>>,
    /// Names of kept volumes and when each was last used.
    kept: Mutex<BTreeMap<String, u64>>,
    /// What is on them.
    volumes: Mutex<HashMap<String, Arc<Files>>>,
    /// Counts writes: what tells two versions of a file apart.
    writes: AtomicU64,
    env: Mutex<Vec<BTreeMap<String, String>>>,
    running: AtomicUsize,
    most_running: AtomicUsize,
}

impl FakeBackend {
    pub fn new() -> Self {
        Self { shared: Arc::default() }
    }

    /// With a script that sees each request first.
    pub fn scripted(script: impl Fn(u64, &ToGuest, &Wire) -> Option<Work> + Send + Sync + 'static) -> Self {
        let backend = Self::new();
        *lock(&backend.shared.script) = Some(Arc::new(script));
        backend
    }

    pub fn fail_next_creates(&self, count: u32) {
        self.shared.fail_creates.store(count, Ordering::SeqCst);
    }

    pub fn fail_next_kernels(&self, count: u32) {
        self.shared.fail_kernels.store(count, Ordering::SeqCst);
    }

    pub fn fail_destroys(&self, fail: bool) {
        self.shared.fail_destroys.store(fail, Ordering::SeqCst);
    }

    /// The orders to destroy that come meanwhile are never answered.
    pub fn hang_destroys(&self, hang: bool) {
        self.shared.hang_destroys.store(hang, Ordering::SeqCst);
    }

    /// How long it takes to make a sandbox, and to destroy one.
    pub fn slow_down(&self, create: Duration, destroy: Duration) {
        *lock(&self.shared.slow) = (create, destroy);
    }

    pub fn set_oom_kills(&self, kills: u64) {
        self.shared.oom_kills.store(kills, Ordering::SeqCst);
    }

    /// No socket comes out of sandboxes that are made from now on.
    pub fn withhold_egress(&self, withhold: bool) {
        self.shared.no_egress.store(withhold, Ordering::SeqCst);
    }

    /// Where the way out of a sandbox listens, counted in the order they were made.
    pub fn egress(&self, number: usize) -> Option<SocketAddr> {
        lock(&self.shared.sandboxes)[number].egress_at
    }

    pub fn fail_next_browsers(&self, count: u32) {
        self.shared.fail_browsers.store(count, Ordering::SeqCst);
    }

    pub fn slow_browsers(&self, start: Duration) {
        *lock(&self.shared.slow_browsers) = start;
    }

    pub fn browsed(&self) -> Vec<proto::browser::Browse> {
        lock(&self.shared.browsed).clone()
    }

    /// How browsers were started.
    pub fn browsers(&self) -> Vec<proto::browser::BrowserSpec> {
        lock(&self.shared.browsers).clone()
    }

    pub fn created(&self) -> usize {
        self.shared.created.load(Ordering::SeqCst)
    }

    /// Sandboxes that were made and not destroyed.
    pub fn living(&self) -> usize {
        lock(&self.shared.sandboxes).iter().filter(|s| !s.destroyed.load(Ordering::SeqCst)).count()
    }

    pub fn was_shut_down(&self) -> bool {
        self.shared.shut_down.load(Ordering::SeqCst)
    }

    pub fn runs(&self) -> Vec<String> {
        lock(&self.shared.runs).clone()
    }

    pub fn kernels(&self) -> Vec<proto::KernelSpec> {
        lock(&self.shared.kernels).clone()
    }

    pub fn specs(&self) -> Vec<SandboxSpec> {
        lock(&self.shared.specs).clone()
    }

    /// The environment of every command, and what every cell has for itself, in the order in which they began.
    pub fn environments(&self) -> Vec<BTreeMap<String, String>> {
        lock(&self.shared.env).clone()
    }

    /// Makes a kept volume look as if it had last been used then.
    pub fn set_last_used(&self, name: &str, seconds: u64) {
        lock(&self.shared.kept).insert(name.to_owned(), seconds);
    }

    fn has_kept(&self, name: &str) -> bool {
        let has = |s: &Arc<FakeSandbox>| s.kept.as_deref() == Some(name) && !s.destroyed.load(Ordering::SeqCst);
        lock(&self.shared.sandboxes).iter().any(has)
    }

    /// The most cells that ever ran at the same time, those aside that do nothing.
    pub fn most_running(&self) -> usize {
        self.shared.most_running.load(Ordering::SeqCst)
    }

    /// Ends the guest of a sandbox, counted in the order they were made.
    pub fn kill(&self, number: usize) {
        let sandbox = lock(&self.shared.sandboxes)[number].clone();
        sandbox.gone.notify_one();
    }
}

impl Default for FakeBackend {
    fn default() -> Self {
        Self::new()
    }
}

#[async_trait]
impl Backend for FakeBackend {
    fn name(&self) -> &'static str {
        "fake"
    }

    async fn preflight(&self) -> Result<Isolation, BackendError> {
        Ok(no_isolation())
    }

    async fn create(&self, spec: &SandboxSpec) -> Result<Box<dyn Sandbox>, BackendError> {
        let slow = lock(&self.shared.slow).0;
        if !slow.is_zero() {
            tokio::time::sleep(slow).await;
        }
        if take_one(&self.shared.fail_creates) {
            return Err(BackendError::Create("told to fail at /host/path".into()));
        }
        let kept = spec.kept.as_ref().map(|kept| kept.name.clone());
        if let Some(name) = &kept {
            if self.has_kept(name) {
                return Err(BackendError::InUse);
            }
            self.set_last_used(name, now());
        }
        let number = self.shared.created.fetch_add(1, Ordering::SeqCst);
        lock(&self.shared.specs).push(spec.clone());
        let volume = kept.as_ref().map(|name| lock(&self.shared.volumes).entry(name.clone()).or_default().clone());
        let egress = match spec.egress && !self.shared.no_egress.load(Ordering::SeqCst) {
            true => Some(TcpListener::bind("127.0.0.1:0").map_err(|e| BackendError::Create(e.to_string()))?),
            false => None,
        };
        let sandbox = Arc::new(FakeSandbox {
            egress_at: egress.as_ref().and_then(|socket| socket.local_addr().ok()),
            egress: Mutex::new(egress),
            drivers: Arc::default(),
            has_room: spec.browser.is_some(),
            files: [Arc::default(), volume.unwrap_or_default(), Arc::default()],
            id: format!("sbx-{number}"),
            isolation: no_isolation(),
            backend: self.clone(),
            kept,
            gone: Notify::new(),
            destroyed: AtomicBool::new(false),
        });
        lock(&self.shared.sandboxes).push(sandbox.clone());
        Ok(Box::new(Handle(sandbox)))
    }

    async fn kept(&self) -> Result<Vec<Kept>, BackendError> {
        let kept = |(name, last_used): (&String, &u64)| Kept { name: name.clone(), last_used: *last_used };
        Ok(lock(&self.shared.kept).iter().map(kept).collect())
    }

    async fn discard(&self, name: &str) -> Result<(), BackendError> {
        if self.has_kept(name) {
            return Err(BackendError::InUse);
        }
        lock(&self.shared.kept).remove(name);
        lock(&self.shared.volumes).remove(name);
        Ok(())
    }

    async fn shutdown(&self) {
        self.shared.shut_down.store(true, Ordering::SeqCst);
    }
}

fn now() -> u64 {
    std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs())
}

fn no_isolation() -> Isolation {
    Isolation { level: Level::Basic, missing: vec!["everything: a back end for tests".into()] }
}

fn take_one(count: &AtomicU32) -> bool {
    count.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok()
}

struct FakeSandbox {
    id: String,
    isolation: Isolation,
    backend: FakeBackend,
    kept: Option<String>,
    egress: Mutex<Option<TcpListener>>,
    egress_at: Option<SocketAddr>,
    /// Of browsers that were put in and not taken yet.
    drivers: Arc<AtomicU32>,
    has_room: bool,
    files: [Arc<Files>; 3],
    gone: Notify,
    destroyed: AtomicBool,
}

/// Of one directory.
type Files = Mutex<BTreeMap<String, File>>;

#[derive(Clone)]
struct File {
    content: Vec<u8>,
    number: u64,
}

/// The directory's place among those of a sandbox.
fn at(root: proto::Root) -> usize {
    match root {
        proto::Root::Workspace => 0,
        proto::Root::Data => 1,
        proto::Root::Outputs => 2,
    }
}

struct Handle(Arc<FakeSandbox>);

#[async_trait]
impl Sandbox for Handle {
    fn id(&self) -> &str {
        &self.0.id
    }

    fn isolation(&self) -> &Isolation {
        &self.0.isolation
    }

    async fn connect(&self) -> Result<GuestStream, BackendError> {
        let (ours, theirs) = tokio::io::duplex(64 << 10);
        let sandbox = self.0.clone();
        tokio::spawn(async move {
            let guest = serve(ours, &sandbox);
            tokio::select! {
                () = guest => {}
                () = sandbox.gone.notified() => {}
            }
        });
        Ok(Box::new(theirs))
    }

    fn take_egress(&self) -> Option<TcpListener> {
        lock(&self.0.egress).take()
    }

    async fn enter_browser(&self) -> Result<(), BackendError> {
        if !self.0.has_room {
            return Err(BackendError::Create("no room for a browser".into()));
        }
        self.0.drivers.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    async fn stats(&self) -> Result<Stats, BackendError> {
        let oom_kills = self.0.backend.shared.oom_kills.load(Ordering::SeqCst);
        Ok(Stats { memory_bytes: Some(8 << 20), pids: None, oom_kills })
    }

    async fn destroy(&self) -> Result<(), BackendError> {
        if self.0.backend.shared.hang_destroys.load(Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
        let slow = lock(&self.0.backend.shared.slow).1;
        if !slow.is_zero() {
            tokio::time::sleep(slow).await;
        }
        if self.0.backend.shared.fail_destroys.load(Ordering::SeqCst) {
            return Err(BackendError::Launcher("told to fail at /host/path".into()));
        }
        self.0.destroyed.store(true, Ordering::SeqCst);
        self.0.gone.notify_one();
        Ok(())
    }
}

/// The guest's end of the connection.
#[derive(Clone)]
pub struct Wire {
    writer: Arc<AsyncMutex<Option<tokio::io::WriteHalf<DuplexStream>>>>,
}

impl Wire {
    pub async fn send(&self, call: u64, message: &FromGuest) {
        let mut bytes = Vec::new();
        proto::encode_message(&mut bytes, call, message).expect("a short message");
        self.raw(&bytes).await;
    }

    pub async fn data(&self, kind: Kind, call: u64, payload: &[u8]) {
        let mut bytes = Vec::new();
        for chunk in payload.chunks(proto::MAX_CHUNK) {
            proto::encode(&mut bytes, kind, call, chunk);
        }
        self.raw(&bytes).await;
    }

    /// Anything at all. An error means that the host hung up, which is for the host's side of a test to look at.
    pub async fn raw(&self, bytes: &[u8]) {
        if let Some(writer) = self.writer.lock().await.as_mut() {
            let _ = writer.write_all(bytes).await;
        }
    }

    pub async fn hang_up(&self) {
        if let Some(mut writer) = self.writer.lock().await.take() {
            let _ = writer.shutdown().await;
        }
    }

    pub async fn end(&self, call: u64, status: RunStatus) {
        let end =
            RunEnd { status, micros: 1000, stdout_bytes: 0, stderr_bytes: 0, stdout_kept: None, stderr_kept: None };
        self.send(call, &FromGuest::RunEnd { end }).await;
    }
}

/// One well-behaved guest.
struct Guest {
    shared: Arc<Shared>,
    wire: Wire,
    interrupts: Mutex<HashMap<u64, Arc<Notify>>>,
    variables: Mutex<HashMap<KernelId, BTreeMap<String, String>>>,
    /// Environments of kernels.
    env: Mutex<HashMap<KernelId, BTreeMap<String, String>>>,
    files: [Arc<Files>; 3],
    egress: Option<SocketAddr>,
    drivers: Arc<AtomicU32>,
    browser: AsyncMutex<Option<Tabs>>,
}

/// A file on its way in.
struct Upload {
    root: proto::Root,
    path: String,
    size: usize,
    content: Vec<u8>,
}

/// What a cell or a command is run with.
struct Doing {
    code: String,
    /// None for a command.
    kernel: Option<KernelId>,
    env: BTreeMap<String, String>,
    deadline: Deadline,
    merged: bool,
    keep_over: Option<u64>,
}

async fn serve(stream: DuplexStream, sandbox: &FakeSandbox) {
    let (mut reader, writer) = tokio::io::split(stream);
    let wire = Wire { writer: Arc::new(AsyncMutex::new(Some(writer))) };
    let guest = Arc::new(Guest {
        shared: sandbox.backend.shared.clone(),
        wire,
        interrupts: Mutex::default(),
        variables: Mutex::default(),
        env: Mutex::default(),
        files: sandbox.files.clone(),
        egress: sandbox.egress_at,
        drivers: sandbox.drivers.clone(),
        browser: AsyncMutex::default(),
    });
    let mut decoder = Decoder::default();
    let mut buffer = vec![0; 64 << 10];
    let mut uploads: HashMap<u64, Upload> = HashMap::new();
    // Cells end with their guest.
    let mut cells = tokio::task::JoinSet::new();
    while let Ok(n @ 1..) = reader.read(&mut buffer).await {
        decoder.push(&buffer[..n]);
        while let Some(frame) = decoder.next_frame().expect("the host sends good frames") {
            guest.take(frame, &mut uploads, &mut cells).await;
        }
    }
}

impl Guest {
    async fn take(
        self: &Arc<Self>,
        frame: Frame,
        uploads: &mut HashMap<u64, Upload>,
        cells: &mut tokio::task::JoinSet<()>,
    ) {
        let call = frame.call;
        if frame.kind == Kind::File {
            let Some(upload) = uploads.get_mut(&call) else { return };
            upload.content.extend(frame.payload);
            return self.finish_upload(call, uploads).await;
        }
        let request: ToGuest = frame.message().expect("the host sends good messages");
        if let ToGuest::Run { code, .. } = &request {
            lock(&self.shared.runs).push(code.clone());
        }
        let script = lock(&self.shared.script).clone();
        if let Some(work) = script.and_then(|script| script(call, &request, &self.wire)) {
            cells.spawn(work);
            return;
        }
        match request {
            ToGuest::WriteFile { root, path, size } => {
                uploads.insert(call, Upload { root, path, size: size as usize, content: Vec::new() });
                self.finish_upload(call, uploads).await;
            }
            ToGuest::Run { kernel, code, env, deadline, keep_over, .. } => {
                lock(&self.shared.env).push(env.clone());
                let merged = lock(&self.variables).get(&kernel).is_some_and(|v| v.contains_key(MERGED));
                let mut whole = lock(&self.env).get(&kernel).cloned().unwrap_or_default();
                whole.extend(env);
                self.begin(call, Doing { code, kernel: Some(kernel), env: whole, deadline, merged, keep_over }, cells);
            }
            ToGuest::Exec { argv, env, deadline, merge_output, keep_over, .. } => {
                let [shell, _, code] = argv.as_slice() else { return self.not_found(call).await };
                if shell != "/bin/sh" {
                    return self.not_found(call).await;
                }
                lock(&self.shared.runs).push(code.clone());
                lock(&self.shared.env).push(env.clone());
                let code = code.clone();
                self.begin(call, Doing { code, kernel: None, env, deadline, merged: merge_output, keep_over }, cells);
            }
            ToGuest::StartBrowser { spec } => {
                let guest = self.clone();
                cells.spawn(async move { guest.start_browser(call, spec).await });
            }
            ToGuest::Browse { ask, uploads, after_ms } => {
                let interrupt = self.interrupt_of(call);
                lock(&self.shared.browsed).push(ask.clone());
                let guest = self.clone();
                cells.spawn(async move { guest.browse(call, (ask, uploads), after_ms, &interrupt).await });
            }
            ToGuest::Interrupt => {
                if let Some(interrupt) = lock(&self.interrupts).get(&call) {
                    interrupt.notify_one();
                }
            }
            other => self.answer(call, other).await,
        }
    }

    fn begin(self: &Arc<Self>, call: u64, doing: Doing, cells: &mut tokio::task::JoinSet<()>) {
        let (guest, interrupt) = (self.clone(), self.interrupt_of(call));
        cells.spawn(async move { guest.run(call, doing, &interrupt).await });
    }

    fn interrupt_of(&self, call: u64) -> Arc<Notify> {
        lock(&self.interrupts).entry(call).or_default().clone()
    }

    async fn not_found(&self, call: u64) {
        self.wire.send(call, &failed(Failure::NotFound)).await;
    }

    fn write(&self, root: proto::Root, path: &str, content: Vec<u8>) {
        let number = self.shared.writes.fetch_add(1, Ordering::SeqCst) + 1;
        lock(&self.files[at(root)]).insert(path.to_owned(), File { content, number });
    }

    async fn finish_upload(&self, call: u64, uploads: &mut HashMap<u64, Upload>) {
        if uploads.get(&call).is_some_and(|upload| upload.content.len() >= upload.size)
            && let Some(Upload { root, path, content, .. }) = uploads.remove(&call)
        {
            let size = content.len() as u64;
            self.write(root, &path, content);
            self.wire.send(call, &FromGuest::Written { size }).await;
        }
    }

    async fn answer(&self, call: u64, request: ToGuest) {
        let wire = &self.wire;
        match request {
            ToGuest::Hello { .. } => wire.send(call, &FromGuest::Hello { version: proto::VERSION }).await,
            ToGuest::StartKernel { .. } if take_one(&self.shared.fail_kernels) => {
                let message = "told to fail".into();
                wire.send(call, &FromGuest::Failed { failure: Failure::Kernel, message }).await;
            }
            ToGuest::StartKernel { kernel, spec, .. } => {
                let merged = spec.merge_output.then(|| (MERGED.to_owned(), String::new()));
                lock(&self.variables).insert(kernel, merged.into_iter().collect());
                lock(&self.env).insert(kernel, spec.env.clone());
                lock(&self.shared.kernels).push(spec);
                wire.send(call, &FromGuest::KernelReady { version: "1.0".into() }).await;
            }
            ToGuest::StopKernel { kernel } => {
                lock(&self.variables).remove(&kernel);
                wire.send(call, &FromGuest::Done).await;
            }
            ToGuest::ReadFile { root, path, offset, length, max_size } => {
                let file = lock(&self.files[at(root)]).get(&path).cloned();
                match file {
                    None => wire.send(call, &failed(Failure::NotFound)).await,
                    Some(file) if max_size.is_some_and(|most| file.content.len() as u64 > most) => {
                        wire.send(call, &failed(Failure::TooLarge)).await
                    }
                    Some(File { content, number }) => {
                        let size = content.len() as u64;
                        wire.send(call, &FromGuest::FileStart { size, modified_ns: number as i64, inode: number })
                            .await;
                        let from = content.len().min(offset as usize);
                        let to = from + (content.len() - from).min(length as usize);
                        wire.data(Kind::File, call, &content[from..to]).await;
                        wire.send(call, &FromGuest::Done).await;
                    }
                }
            }
            ToGuest::ListFiles { root, max_entries, order, .. } => {
                let entry = |(path, file): (&String, &File)| proto::FileEntry {
                    path: path.clone(),
                    size: file.content.len() as u64,
                    kind: proto::FileKind::File,
                    modified: file.number as i64,
                };
                let mut entries: Vec<_> = lock(&self.files[at(root)]).iter().map(entry).collect();
                if order == proto::Order::Newest {
                    entries.sort_by_key(|entry| std::cmp::Reverse(entry.modified));
                }
                let total = entries.len() as u64;
                entries.truncate(max_entries as usize);
                wire.send(call, &FromGuest::Files { entries, total }).await;
            }
            _ => wire.send(call, &FromGuest::Done).await,
        }
    }

    async fn run(&self, call: u64, doing: Doing, interrupt: &Notify) {
        if doing.kernel.is_some_and(|kernel| !lock(&self.variables).contains_key(&kernel)) {
            return self.wire.send(call, &failed(Failure::Kernel)).await;
        }
        let counts = usize::from(!matches!(doing.code.as_str(), "pass" | ";"));
        let running = self.shared.running.fetch_add(counts, Ordering::SeqCst) + counts;
        self.shared.most_running.fetch_max(running, Ordering::SeqCst);
        let status = tokio::select! {
            status = self.cell(call, &doing) => status,
            () = interrupt.notified() => RunStatus::Cancelled { state_kept: true },
            () = tokio::time::sleep(Duration::from_millis(doing.deadline.after_ms)), if !doing.code.contains("deaf") => {
                RunStatus::TimedOut { state_kept: true }
            }
        };
        self.shared.running.fetch_sub(counts, Ordering::SeqCst);
        lock(&self.interrupts).remove(&call);
        match (doing.kernel, &status) {
            (Some(kernel), RunStatus::Ended { .. }) => {
                lock(&self.variables).remove(&kernel);
            }
            (None, RunStatus::Ok) => return self.wire.end(call, exited(0)).await,
            (None, RunStatus::Exit { code }) => return self.wire.end(call, exited(*code)).await,
            _ => {}
        }
        if let Some(kept) = self.kept_output(&doing) {
            let (stdout_kept, stderr_kept) = (Some(kept), None);
            let end = RunEnd { status, micros: 1000, stdout_bytes: 0, stderr_bytes: 0, stdout_kept, stderr_kept };
            return self.wire.send(call, &FromGuest::RunEnd { end }).await;
        }
        self.wire.end(call, status).await;
    }

    /// What a flood of more than `keep_over` bytes leaves behind.
    fn kept_output(&self, doing: &Doing) -> Option<proto::KeptOutput> {
        let bytes: u64 = doing.code.strip_prefix("flood ")?.parse().ok()?;
        doing.keep_over.filter(|over| bytes > *over)?;
        let name = format!("out-{}.txt", self.shared.writes.load(Ordering::SeqCst));
        self.write(proto::Root::Outputs, &name, vec![b'x'; bytes as usize]);
        Some(proto::KeptOutput { name, bytes })
    }

    async fn cell(&self, call: u64, doing: &Doing) -> RunStatus {
        // A command has no variables of its own; it sees none.
        let kernel = doing.kernel.unwrap_or(KernelId::MAX);
        let errors = if doing.merged { Kind::Stdout } else { Kind::Stderr };
        for line in doing.code.lines() {
            let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
            match word {
                "print" => self.wire.data(Kind::Stdout, call, format!("{rest}\n").as_bytes()).await,
                "error" => self.wire.data(errors, call, format!("{rest}\n").as_bytes()).await,
                "sleep" => tokio::time::sleep(Duration::from_millis(rest.parse().expect("a number"))).await,
                "hang" => std::future::pending().await,
                "deaf" => {
                    lock(&self.interrupts).remove(&call);
                    std::future::pending().await
                }
                "raise" => {
                    let event =
                        KernelEvent::Error { name: rest.into(), value: String::new(), text: format!("{rest}\n") };
                    self.wire.send(call, &FromGuest::Event { event }).await;
                    return RunStatus::Error;
                }
                "die" => return RunStatus::Ended { how: Ended::Signaled { signal: rest.parse().expect("a number") } },
                "exit" => return RunStatus::Exit { code: rest.parse().expect("a number") },
                "flood" => {
                    let line = vec![b'x'; 64 << 10];
                    for _ in 0..rest.parse::<usize>().expect("a number") / line.len() {
                        self.wire.data(Kind::Stdout, call, &line).await;
                    }
                }
                "set" => {
                    let (name, value) = rest.split_once(' ').unwrap_or((rest, ""));
                    lock(&self.variables).entry(kernel).or_default().insert(name.into(), value.into());
                }
                "get" => {
                    let value = lock(&self.variables).get(&kernel).and_then(|v| v.get(rest).cloned());
                    let Some(value) = value else { return RunStatus::Error };
                    self.wire.data(Kind::Stdout, call, format!("{value}\n").as_bytes()).await;
                }
                "env" => {
                    let value = doing.env.get(rest).map_or("(none)", String::as_str);
                    self.wire.data(Kind::Stdout, call, format!("{value}\n").as_bytes()).await;
                }
                "fetch" => {
                    let status = fetch(self.egress, rest).await;
                    self.wire.data(Kind::Stdout, call, format!("{status}\n").as_bytes()).await;
                }
                "write" => {
                    let (path, text) = rest.split_once(' ').unwrap_or((rest, ""));
                    let (root, path) = place(path);
                    self.write(root, path, text.into());
                }
                "read" => {
                    let (root, path) = place(rest);
                    let content = lock(&self.files[at(root)]).get(path).map(|file| file.content.clone());
                    let Some(content) = content else { return RunStatus::Error };
                    self.wire.data(Kind::Stdout, call, &content).await;
                }
                _ => {}
            }
        }
        RunStatus::Ok
    }
}

/// A variable no code can name: the kernel's streams are one.
const MERGED: &str = "";

fn place(path: &str) -> (proto::Root, &str) {
    match path.strip_prefix("/data/") {
        Some(path) => (proto::Root::Data, path),
        None => (proto::Root::Workspace, path),
    }
}

/// Asks for a page through the way out, and says with which status it came.
async fn fetch(egress: Option<SocketAddr>, name: &str) -> String {
    let asking = async {
        let mut stream = TcpStream::connect(egress?).await.ok()?;
        let request = format!("GET http://{name}/ HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.ok()?;
        let mut answer = String::new();
        stream.take(1 << 20).read_to_string(&mut answer).await.ok()?;
        answer.split(' ').nth(1).map(str::to_owned)
    };
    asking.await.unwrap_or_else(|| "nothing".into())
}

fn exited(code: i32) -> RunStatus {
    RunStatus::Ended { how: Ended::Exited { code } }
}

fn failed(failure: Failure) -> FromGuest {
    FromGuest::Failed { failure, message: "no".into() }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
