//! A back end whose guests follow a script: for everything a real guest does too seldom, or never.
//!
//! Without a script its guests are well-behaved and understand a small language, one statement a line, in cells and in commands:
//! `print TEXT`, `error TEXT`, `sleep MS`, `hang` (until interrupted or past its deadline), `deaf` (never answers again),
//! `raise NAME`, `die SIGNAL`, `exit CODE`, `flood BYTES`, `set NAME TEXT`, `get NAME`, `env NAME`, `write PATH TEXT`,
//! `read PATH`, `fetch NAME` (through the sandbox's egress; prints the status). Paths below `/data` are in the sandbox's kept volume, if
//! it has one. A program other than `/bin/sh` is not found.

use std::collections::{BTreeMap, HashMap};
use std::net::{SocketAddr, TcpListener};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use proto::ToGuest;
use sandbox::{
    Backend, BackendError, GuestStream, Isolation, KeptVolumeInfo, Level, Sandbox, SandboxSpec, Stats, UnheldLimits,
};
use tokio::sync::Notify;

mod browser;
mod guest;

pub use guest::Wire;
use guest::serve;

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
    /// The processor time that each sandbox has used.
    cpu_usec: Mutex<Option<u64>>,
    oom_kills: AtomicU64,
    browser_oom_kills: AtomicU64,
    oom_limit_hidden: AtomicBool,
    over_memory: AtomicBool,
    /// No socket comes out of sandboxes that should have one.
    no_egress: AtomicBool,
    /// What was asked of browsers, in the order in which it began, and how they were started.
    browsed: Mutex<Vec<proto::browser::BrowserAction>>,
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

    /// The processor time that each sandbox has used from now on, in microseconds; none is counted before.
    pub fn set_cpu_usec(&self, cpu_usec: u64) {
        *lock(&self.shared.cpu_usec) = Some(cpu_usec);
    }

    pub fn set_oom_kills(&self, kills: u64) {
        self.shared.oom_kills.store(kills, Ordering::SeqCst);
    }

    pub fn set_browser_oom_kills(&self, kills: u64) {
        self.shared.browser_oom_kills.store(kills, Ordering::SeqCst);
    }

    /// Nobody can tell any more which limit a kill was for; otherwise it is the least around the sandbox.
    pub fn hide_oom_limit(&self) {
        self.shared.oom_limit_hidden.store(true, Ordering::SeqCst);
    }

    /// Ends every sandbox because it exceeded its memory.
    pub fn end_for_memory(&self) {
        self.shared.over_memory.store(true, Ordering::SeqCst);
        (0..self.created()).for_each(|number| self.kill(number));
    }

    /// No socket comes out of sandboxes that are made from now on.
    pub fn withhold_egress(&self, withhold: bool) {
        self.shared.no_egress.store(withhold, Ordering::SeqCst);
    }

    /// Where the egress of a sandbox listens, counted in the order they were made.
    pub fn egress(&self, number: usize) -> Option<SocketAddr> {
        lock(&self.shared.sandboxes)[number].egress_at
    }

    pub fn fail_next_browsers(&self, count: u32) {
        self.shared.fail_browsers.store(count, Ordering::SeqCst);
    }

    pub fn slow_browsers(&self, start: Duration) {
        *lock(&self.shared.slow_browsers) = start;
    }

    pub fn browsed(&self) -> Vec<proto::browser::BrowserAction> {
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
            memory_bytes: {
                let around = spec.groups.iter().filter_map(|group| group.memory_bytes);
                around.fold(spec.limits.memory_bytes, u64::min)
            },
            files: [Arc::default(), volume.unwrap_or_default(), Arc::default(), Arc::default()],
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

    async fn kept(&self) -> Result<Vec<KeptVolumeInfo>, BackendError> {
        // A volume takes a tenth of its quota.
        let of = |name: &String| self.specs().into_iter().filter_map(|spec| spec.kept).find(|kept| kept.name == *name);
        let kept = |(name, last_used): (&String, &u64)| KeptVolumeInfo {
            name: name.clone(),
            last_used: *last_used,
            owner: of(name).and_then(|kept| Some(kept.workspace?.owner)),
            used_bytes: of(name).map_or(0, |kept| kept.bytes / 10),
        };
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
    Isolation {
        level: Level::Basic,
        missing: vec!["everything: a back end for tests".into()],
        unheld: UnheldLimits::default(),
    }
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
    /// The least limit around it.
    memory_bytes: u64,
    files: [Arc<Files>; 4],
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
        proto::Root::Tmp => 3,
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

    fn take_egress_listener(&self) -> Option<TcpListener> {
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
        let browser_oom_kills = self.0.backend.shared.browser_oom_kills.load(Ordering::SeqCst);
        let hidden = self.0.backend.shared.oom_limit_hidden.load(Ordering::SeqCst);
        let oom_limit_bytes = (oom_kills > 0 && !hidden).then_some(self.0.memory_bytes);
        let over = self.0.backend.shared.over_memory.load(Ordering::SeqCst);
        let ended_at_bytes = over.then_some(self.0.memory_bytes);
        let cpu_usec = *lock(&self.0.backend.shared.cpu_usec);
        let memory_bytes = Some(8 << 20);
        Ok(Stats { memory_bytes, pids: None, cpu_usec, oom_kills, browser_oom_kills, oom_limit_bytes, ended_at_bytes })
    }

    async fn destroy(&self) -> Result<Option<Stats>, BackendError> {
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
        self.stats().await.map(Some)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
