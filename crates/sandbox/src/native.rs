//! This module implements the back end that needs only the Linux kernel: a launcher process of the server creates its
//! sandboxes.
//!
//! This side only talks to the launcher and connects to guests; the `jail` crate does the confining. `main` begins
//! with:
//!
//! ```no_run
//! # fn start(config: sandbox::native::NativeConfig) -> Result<(), Box<dyn std::error::Error>> {
//! sandbox::native::launcher_entry(); // never returns in the launcher
//! let launcher = sandbox::native::spawn_launcher()?; // while there is one thread
//! tokio::runtime::Runtime::new()?.block_on(async {
//!     let (native, isolation) = sandbox::native::Native::start(launcher, config).await?;
//! # Ok(()) })
//! # }
//! ```

use std::collections::HashMap;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use jail::cgroup::{self, Controller};
use jail::kept_volumes::KeptVolumeRequest;
use jail::launcher::{Process, Spawned};
use jail::spec::{self, FileSpec};
use jail::survey::Survey;
use jail::wire::{self, Create, LauncherCall, LauncherReply, LauncherRequest, LauncherResponse, Start, StartZygote};
use rustix::fs::{Mode as FileMode, OFlags};
use tokio::io::Interest;
use tokio::net::{UnixDatagram, UnixStream};
use tokio::sync::{oneshot, watch};
use tokio::task::AbortHandle;

pub use jail::cgroup::CgroupSource as Cgroups;
pub use jail::disk::{DiskRoom, KeepFree};
pub use jail::heap::{return_free_pages, return_large_blocks};
pub use jail::ids::Mode;
pub use jail::survey::{Fact, FactState};
pub use jail::zygote::Rotation;

use crate::stream::Stream;
use crate::{
    Backend, BackendError, BrowserRoom, Group, GuestStream, Isolation, KeptVolume, KeptVolumeInfo, Level, PROXY,
    Sandbox, SandboxSpec, SharedVolume, Stats, ZygoteSpec, ZygoteStatus,
};

/// Runs the launcher if this process is one, in which case it never returns. Otherwise it returns at once. `main` must
/// call it first.
pub fn launcher_entry() {
    jail::launcher::entry();
}

/// Protects the memory of this process from core files, from the host's `core_pattern` helper and from other processes
/// of the same user.
pub fn keep_memory_private() -> io::Result<()> {
    jail::rlimits::no_cores()?;
    jail::process::set_not_dumpable()
}

/// A launcher that has been started and waits for its configuration. It ends when this value is dropped.
#[derive(Debug)]
pub struct Launcher {
    spawned: Spawned,
    program: PathBuf,
}

/// Starts the launcher from the current executable. The first launcher must be started while the process has only one
/// thread.
pub fn spawn_launcher() -> io::Result<Launcher> {
    spawn_launcher_from(Path::new("/proc/self/exe"))
}

/// Starts the launcher from another executable that calls [`launcher_entry`]. Tests need it because their `main`
/// belongs to the test harness.
pub fn spawn_launcher_from(program: &Path) -> io::Result<Launcher> {
    Ok(Launcher { spawned: jail::launcher::spawn_program(program)?, program: program.to_owned() })
}

/// Result of a survey, as `doctor` prints it: every layer, and either the resulting level or the reason why nothing
/// would start.
#[derive(Debug)]
pub struct Examination {
    pub mode: Mode,
    pub facts: Vec<Fact>,
    pub outcome: Result<Isolation, BackendError>,
}

impl Launcher {
    /// Surveys the host without starting anything. Blocks until the launcher replies.
    pub fn survey(&self, mode: Option<Mode>, cgroups: Cgroups) -> Result<Examination, BackendError> {
        let socket = &self.spawned.socket;
        let request = LauncherRequest { id: 0, call: LauncherCall::Survey { mode, cgroups } };
        wire::send(socket, &request, &[]).map_err(lost)?;
        match wire::receive::<LauncherResponse>(socket).map_err(lost)? {
            Some((LauncherResponse { reply: LauncherReply::Survey(survey), .. }, _)) => Ok(examination(*survey)),
            _ => Err(BackendError::Launcher("it did not answer".into())),
        }
    }
}

fn examination(survey: Survey) -> Examination {
    let outcome = match &survey.refusal {
        Some(no) => Err(BackendError::Unavailable { why: no.why.clone(), hint: no.hint.clone() }),
        None => Ok(isolation_of(&survey)),
    };
    Examination { mode: survey.mode, facts: survey.facts, outcome }
}

/// Derives the isolation level from a survey. Without limits on memory and processes the level is `Basic`. If only a
/// second line of defence is missing, the level is `Reduced`.
fn isolation_of(survey: &Survey) -> Isolation {
    let has = |c| survey.cgroup.has(c);
    let lowers = |f: &&Fact| {
        f.state != FactState::On
            && (f.layer.starts_with("cgroup ")
                || ["landlock", "host uid per sandbox", "own inodes", "socket buffers", "network limits"]
                    .contains(&&*f.layer))
    };
    let line = |f: &Fact| match &*f.what_to_do {
        "" => format!("{}: {}", f.layer, f.why),
        todo => format!("{}: {} ({todo})", f.layer, f.why),
    };
    let missing: Vec<String> = survey.facts.iter().filter(lowers).map(line).collect();
    let level = if !has(Controller::Memory) || !has(Controller::Pids) {
        Level::Basic
    } else if missing.is_empty() {
        Level::Full
    } else {
        Level::Reduced
    };
    Isolation { level, missing }
}

/// Source of the guest program, or of the library that the warm interpreter loads.
#[derive(Debug, Clone)]
pub enum GuestBinary {
    /// The bytes are part of the server's executable, as in a release.
    Bytes(&'static [u8]),
    /// The file was built next to the server in a development tree.
    Path(PathBuf),
}

impl GuestBinary {
    /// Loads the binary into a descriptor whose content nobody can change. `seal` creates the descriptor.
    fn load(
        &self,
        dir: &Path,
        seal: fn(&[u8], &Path) -> io::Result<OwnedFd>,
        package: &str,
    ) -> Result<OwnedFd, BackendError> {
        let read;
        let bytes = match self {
            Self::Bytes(bytes) => bytes,
            Self::Path(path) => {
                read = std::fs::read(path).map_err(|e| BackendError::Unavailable {
                    why: format!("`{}` cannot be read: {e}", path.display()),
                    hint: format!("build it: `cargo build -p {package}`"),
                })?;
                &read[..]
            }
        };
        seal(bytes, dir).map_err(|e| BackendError::Launcher(format!("cannot prepare `{package}`: {e}")))
    }
}

#[derive(Debug, Clone)]
pub struct NativeConfig {
    pub state_dir: PathBuf,
    /// Directory in which uid slots are locked, the same for all servers. `None` selects a default that
    /// nobody but root or this user can write to.
    pub runtime_dir: Option<PathBuf>,
    pub guest: GuestBinary,
    /// Library that the warm interpreter loads so that it can be forked.
    pub zygote: GuestBinary,
    /// Label that becomes part of the names of the server's cgroups; it consists of characters from `[a-z0-9-]`.
    pub label: String,
    /// Whether only one server may use the state directory (`serve`). Otherwise many servers run side by side
    /// (`stdio`).
    pub exclusive: bool,
    pub mode: Option<Mode>,
    pub cgroups: Cgroups,
    /// Lowest acceptable isolation level. The back end refuses to start below it.
    pub floor: Level,
    /// Maximum number of spares of each kind. Use [`SPARES`] unless there is a reason not to.
    pub spares: usize,
    /// Whether another launcher is started when one dies.
    pub restarts: bool,
    /// Space that volumes leave free on the file system of the state directory; [`KeepFree::default`] unless the
    /// operator sets it.
    pub keep_free: KeepFree,
}

/// Default number of spares. It is enough for a burst of calls and costs little: a spare is a mounted image and an
/// empty network namespace.
pub const SPARES: usize = 8;

/// Returns the runtime directory, which is the same for every server of this host (as root) or of this user. Nobody
/// else can write to it; a name in `/tmp` could be taken by another user. Without a login session or a home directory,
/// the runtime directory lies in this server's state directory, where other servers do not look.
fn default_runtime_dir(state_dir: &Path) -> PathBuf {
    let uid = rustix::process::getuid().as_raw();
    if uid == 0 {
        return "/run/sandpool".into();
    }
    let passwd = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    runtime_dir_of(uid, Path::new("/run/user"), &passwd, state_dir)
}

fn runtime_dir_of(uid: u32, sessions: &Path, passwd: &str, state_dir: &Path) -> PathBuf {
    use std::os::unix::fs::MetadataExt;
    let own = |dir: &PathBuf| std::fs::metadata(dir).is_ok_and(|found| found.is_dir() && found.uid() == uid);
    // The fields are name:password:uid:gid:comment:home:shell. This takes the home of the account and ignores the
    // environment of this process.
    let fields = |line: &str| line.split(':').map(str::to_owned).collect::<Vec<_>>();
    let account = passwd.lines().map(fields).find(|fields| fields.get(2).is_some_and(|f| *f == uid.to_string()));
    let home = account.and_then(|fields| fields.get(5).map(PathBuf::from)).filter(own);
    let session = Some(sessions.join(uid.to_string())).filter(own).map(|dir| dir.join("sandpool"));
    session.or(home.map(|dir| dir.join(".local/state/sandpool/run"))).unwrap_or_else(|| state_dir.join("run"))
}

/// Connection to a launcher. It closes when its last owner is dropped, and the launcher then destroys everything it
/// created.
#[derive(Debug)]
struct LauncherConnection {
    shared: Arc<LauncherChannel>,
    reader: AbortHandle,
}

#[derive(Debug)]
struct LauncherChannel {
    /// Packet socket. Tokio provides only its readiness; `wire` reads and writes it.
    socket: UnixDatagram,
    next: AtomicU64,
    /// Senders for the calls that wait for a reply, by request id; `None` once the launcher is gone.
    waiting: Mutex<Option<HashMap<u64, oneshot::Sender<LauncherAnswer>>>>,
    /// Becomes true once the launcher is gone.
    ended: watch::Sender<bool>,
}

/// A reply of the launcher with the descriptors that came with it.
type LauncherAnswer = (LauncherReply, Vec<OwnedFd>);

impl Drop for LauncherConnection {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

fn lost(e: impl std::fmt::Display) -> BackendError {
    BackendError::Launcher(e.to_string())
}

fn unexpected(reply: LauncherReply) -> BackendError {
    match reply {
        LauncherReply::Failed { message } => BackendError::Launcher(message),
        other => BackendError::Launcher(format!("unexpected answer `{other:?}`")),
    }
}

impl LauncherChannel {
    fn waiting(&self) -> MutexGuard<'_, Option<HashMap<u64, oneshot::Sender<LauncherAnswer>>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn read(&self) {
        let receive = || wire::receive::<LauncherResponse>(&self.socket);
        while let Ok(Some((response, fds))) = self.socket.async_io(Interest::READABLE, receive).await {
            let waiter = self.waiting().as_mut().and_then(|w| w.remove(&response.id));
            if let Some(waiter) = waiter {
                let _ = waiter.send((response.reply, fds));
            }
        }
        // Dropping the senders ends the channel of every waiting call, which reports that the launcher is gone.
        *self.waiting() = None;
        self.ended.send_replace(true);
    }
}

impl LauncherConnection {
    fn open(socket: OwnedFd) -> io::Result<Self> {
        let socket = std::os::unix::net::UnixDatagram::from(socket);
        socket.set_nonblocking(true)?;
        let shared = Arc::new(LauncherChannel {
            socket: UnixDatagram::from_std(socket)?,
            next: AtomicU64::new(1),
            waiting: Mutex::new(Some(HashMap::new())),
            ended: watch::Sender::new(false),
        });
        let reader = tokio::spawn({
            let shared = Arc::clone(&shared);
            async move { shared.read().await }
        });
        Ok(Self { shared, reader: reader.abort_handle() })
    }

    fn is_gone(&self) -> bool {
        *self.shared.ended.borrow()
    }

    async fn call(&self, call: LauncherCall, fds: &[BorrowedFd<'_>]) -> Result<LauncherReply, BackendError> {
        self.exchange(call, fds).await.map(|(reply, _)| reply)
    }

    async fn exchange(&self, call: LauncherCall, fds: &[BorrowedFd<'_>]) -> Result<LauncherAnswer, BackendError> {
        let gone = || BackendError::Launcher("it has ended".into());
        let id = self.shared.next.fetch_add(1, Ordering::Relaxed);
        let (tell, told) = oneshot::channel();
        self.shared.waiting().as_mut().ok_or_else(gone)?.insert(id, tell);
        let request = LauncherRequest { id, call };
        let socket = &self.shared.socket;
        let sent = socket.async_io(Interest::WRITABLE, || wire::send(socket, &request, fds)).await;
        if let Err(e) = sent {
            self.shared.waiting().as_mut().map(|w| w.remove(&id));
            return Err(lost(e));
        }
        told.await.map_err(|_| gone())
    }

    /// Sends a call without waiting for the reply, for values that are being dropped. If the socket is full, a spawned
    /// task waits for room.
    fn post(self: &Arc<Self>, call: LauncherCall) {
        let id = self.shared.next.fetch_add(1, Ordering::Relaxed);
        let request = LauncherRequest { id, call };
        let full = wire::send(&self.shared.socket, &request, &[]).is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock);
        if full && let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let link = Arc::clone(self);
            // Without a runtime the message can be lost: the connection closes soon, and the launcher then destroys
            // everything.
            runtime.spawn(async move { drop(link.call(request.call, &[]).await) });
        }
    }
}

/// The native back end after its start.
#[derive(Debug)]
pub struct Native {
    running: Arc<Running>,
    survey: Survey,
}

/// State that outlives a single launcher.
#[derive(Debug)]
struct Running {
    program: PathBuf,
    config: NativeConfig,
    runtime_dir: PathBuf,
    isolation: Isolation,
    at: Mutex<CurrentLauncher>,
    /// Specification of the warm interpreter, which the next launcher starts too.
    warm: Mutex<Option<(ZygoteSpec, Rotation)>>,
    state: watch::Sender<LauncherStatus>,
}

/// The current launcher.
#[derive(Debug)]
struct CurrentLauncher {
    link: Arc<LauncherConnection>,
    instance: Arc<OwnedFd>,
    process: Option<Process>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LauncherStatus {
    Yes,
    /// The launcher has ended, and another is being started.
    Restarting,
    /// Launchers kept ending, and no further attempt is made.
    Ended,
    /// The server is shutting the back end down.
    Closing,
}

/// Minimum lifetime of a stable launcher. The end of a launcher that lived shorter counts together with the ends before
/// it.
const STABLE: Duration = Duration::from_secs(60);
/// Number of ends in a row after which no other launcher is started.
const MOST_ENDS: u32 = 5;
/// Pause before the second attempt in a row. It doubles with each further attempt.
const PAUSE: Duration = Duration::from_millis(200);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Native {
    pub async fn start(launcher: Launcher, config: NativeConfig) -> Result<(Self, Isolation), BackendError> {
        let Launcher { spawned, program } = launcher;
        let runtime_dir = config.runtime_dir.clone().unwrap_or_else(|| default_runtime_dir(&config.state_dir));
        let (at, survey) = begin(spawned, &config, &runtime_dir).await?;
        let isolation = isolation_of(&survey);
        let ended = at.link.shared.ended.subscribe();
        let running = Arc::new(Running {
            program,
            config,
            runtime_dir,
            isolation: isolation.clone(),
            at: Mutex::new(at),
            warm: Mutex::default(),
            state: watch::Sender::new(LauncherStatus::Yes),
        });
        if running.config.restarts {
            tokio::spawn(supervise(Arc::downgrade(&running), ended));
        }
        Ok((Self { running, survey }, isolation))
    }

    fn link(&self) -> Arc<LauncherConnection> {
        self.running.link()
    }

    pub fn mode(&self) -> Mode {
        self.survey.mode
    }

    /// Returns every isolation layer of this host, as found at the start.
    pub fn survey(&self) -> &[Fact] {
        &self.survey.facts
    }

    /// Returns the ids of all sandboxes, including those that are being created or destroyed.
    pub async fn list(&self) -> Result<Vec<String>, BackendError> {
        match self.link().call(LauncherCall::List, &[]).await? {
            LauncherReply::List(ids) => Ok(ids),
            other => Err(unexpected(other)),
        }
    }

    /// Creates a sandbox like [`Backend::create`]. In debug builds `fail_at` makes the step of that number fail, for
    /// tests of the rollback.
    pub async fn create_failing(
        &self,
        spec: &SandboxSpec,
        fail_at: Option<usize>,
    ) -> Result<Box<dyn Sandbox>, BackendError> {
        let id = uuid::Uuid::new_v4().simple().to_string();
        let (link, instance) = {
            let at = lock(&self.running.at);
            (Arc::clone(&at.link), Arc::clone(&at.instance))
        };
        // If this future is dropped before the reply arrives, dropping `sandbox` destroys what the launcher creates for
        // it.
        let mut sandbox = NativeSandbox {
            id: id.clone(),
            isolation: self.running.isolation.clone(),
            link: Arc::clone(&link),
            instance,
            egress: Mutex::default(),
            destroyed: AtomicBool::new(false),
        };
        let (reply, fds) = link.exchange(LauncherCall::Create(Box::new(order(id, spec, fail_at))), &[]).await?;
        match reply {
            LauncherReply::Created { notes } => {
                *sandbox.egress() = fds.into_iter().next().map(TcpListener::from);
                notes.iter().for_each(|note| tracing::warn!("{note}"));
                sandbox.isolation.missing.extend(notes);
                Ok(Box::new(sandbox))
            }
            LauncherReply::InUse => {
                sandbox.destroyed.store(true, Ordering::Relaxed);
                Err(BackendError::InUse)
            }
            LauncherReply::NoSpace { message } => {
                sandbox.destroyed.store(true, Ordering::Relaxed);
                Err(BackendError::NoSpace(message))
            }
            LauncherReply::Failed { message } => {
                sandbox.destroyed.store(true, Ordering::Relaxed);
                Err(BackendError::Create(message))
            }
            other => Err(unexpected(other)),
        }
    }
}

impl Native {
    /// Starts the warm interpreter like [`Backend::warm`]. `rotation` decides when a new interpreter replaces it, for
    /// tests of the replacement.
    pub async fn warm_rotating(&self, spec: &ZygoteSpec, rotation: Rotation) -> Result<(), BackendError> {
        *lock(&self.running.warm) = Some((spec.clone(), rotation));
        self.running.warm(spec, rotation).await
    }
}

/// Sends a launcher its configuration, and rejects a host whose isolation level is below the floor.
async fn begin(
    spawned: Spawned,
    config: &NativeConfig,
    runtime_dir: &Path,
) -> Result<(CurrentLauncher, Survey), BackendError> {
    let Spawned { socket, process } = spawned;
    let guest = config.guest.load(runtime_dir, jail::image::guest, "sandpool-guest")?;
    let link = LauncherConnection::open(socket).map_err(lost)?;
    let start = Start {
        state_dir: config.state_dir.clone(),
        runtime_dir: runtime_dir.to_owned(),
        label: config.label.clone(),
        exclusive: config.exclusive,
        mode: config.mode,
        cgroups: config.cgroups,
        spares: config.spares,
        keep_free: config.keep_free,
    };
    let (instance, survey) = match link.call(LauncherCall::Start(start), &[guest.as_fd()]).await? {
        LauncherReply::Started { instance, survey } => (instance, *survey),
        LauncherReply::Unavailable { why, hint } => return Err(BackendError::Unavailable { why, hint }),
        other => return Err(unexpected(other)),
    };
    let isolation = isolation_of(&survey);
    if isolation.level < config.floor {
        let missing = isolation.missing.join("; ");
        return Err(BackendError::BelowFloor { got: isolation.level, floor: config.floor, missing });
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let instance = rustix::fs::open(&instance, flags, FileMode::empty()).map_err(lost)?;
    Ok((CurrentLauncher { link: Arc::new(link), instance: Arc::new(instance), process: Some(process) }, survey))
}

/// Starts another launcher when one ends unexpectedly. The old launcher's sandboxes and mounts are gone with it; the
/// next launcher removes the cgroups and files that it left.
async fn supervise(running: Weak<Running>, mut ended: watch::Receiver<bool>) {
    let mut ends = 0;
    loop {
        let since = Instant::now();
        // An error means that nobody uses the launcher any more.
        if ended.wait_for(|ended| *ended).await.is_err() {
            return;
        }
        if since.elapsed() >= STABLE {
            ends = 0;
        }
        let Some(running) = running.upgrade() else { return };
        match running.restart(&mut ends).await {
            Some(next) => ended = next,
            None => return,
        }
        tokio::spawn(async move { running.warm_again().await });
    }
}

impl Running {
    fn link(&self) -> Arc<LauncherConnection> {
        Arc::clone(&lock(&self.at).link)
    }

    fn becomes(&self, next: LauncherStatus) -> bool {
        self.state.send_if_modified(|state| {
            let open = *state != LauncherStatus::Closing;
            if open {
                *state = next;
            }
            open
        })
    }

    async fn restart(&self, ends: &mut u32) -> Option<watch::Receiver<bool>> {
        if !self.becomes(LauncherStatus::Restarting) {
            return None;
        }
        tracing::error!("the launcher has ended, and every sandbox with it; another launcher is started");
        loop {
            *ends += 1;
            if *ends >= MOST_ENDS {
                tracing::error!("the launcher has ended {MOST_ENDS} times in a row; it is not started again");
                self.becomes(LauncherStatus::Ended);
                return None;
            }
            if *ends > 1 {
                tokio::time::sleep(PAUSE * 2_u32.pow(*ends - 2)).await;
            }
            let started = match spawn_launcher_from(&self.program) {
                Ok(Launcher { spawned, .. }) => begin(spawned, &self.config, &self.runtime_dir).await,
                Err(e) => Err(lost(e)),
            };
            match started {
                Ok((at, _)) => {
                    let ended = at.link.shared.ended.subscribe();
                    let mut place = lock(&self.at);
                    // If the back end is closing, the new launcher ends with its connection.
                    return self.becomes(LauncherStatus::Yes).then(|| {
                        *place = at;
                        ended
                    });
                }
                Err(e) => tracing::error!("the launcher cannot be started again: {e}"),
            }
        }
    }

    async fn warm(&self, spec: &ZygoteSpec, rotation: Rotation) -> Result<(), BackendError> {
        let library = self.config.zygote.load(&self.runtime_dir, jail::image::library, "sandpool-zygote")?;
        let ZygoteSpec { argv, env, runtime, files } = spec.clone();
        let warm = StartZygote { argv, env, runtime, files: order_files(files), rotation };
        match self.link().call(LauncherCall::Warm(Box::new(warm)), &[library.as_fd()]).await? {
            LauncherReply::Done => Ok(()),
            LauncherReply::Unavailable { why, hint } => Err(BackendError::Unavailable { why, hint }),
            other => Err(unexpected(other)),
        }
    }

    async fn warm_again(&self) {
        let wanted = lock(&self.warm).clone();
        if let Some((spec, rotation)) = wanted
            && let Err(error) = self.warm(&spec, rotation).await
        {
            tracing::warn!(%error, "no warm interpreter: Python kernels are started anew, which takes longer");
        }
    }
}

fn order_files(files: Vec<(PathBuf, Vec<u8>)>) -> Vec<FileSpec> {
    files.into_iter().map(|(path, bytes)| FileSpec { path, content: bytes.into() }).collect()
}

fn order(sandbox: String, spec: &SandboxSpec, fail_at: Option<usize>) -> Create {
    let SandboxSpec { groups, limits, runtime, files, volumes, kept, egress, browser } = spec;
    Create {
        sandbox,
        groups: groups.iter().map(order_group).collect(),
        limits: cgroup::CgroupLimits {
            memory_bytes: Some(limits.memory_bytes),
            cpu_millis: Some(limits.cpu_millis),
            pids: Some(limits.pids),
        },
        disk_bytes: limits.disk_bytes,
        disk_inodes: limits.disk_inodes,
        runtime: runtime.clone(),
        files: order_files(files.clone()),
        shared: volumes.iter().map(order_volume).collect(),
        kept: kept.as_ref().map(order_kept),
        browser: browser.map(|BrowserRoom { memory_bytes, pids }| cgroup::CgroupLimits {
            memory_bytes: Some(memory_bytes),
            cpu_millis: None,
            pids: Some(pids),
        }),
        egress: egress.then_some(PROXY),
        fail_at,
    }
}

fn order_volume(volume: &SharedVolume) -> spec::SharedVolumeSpec {
    let SharedVolume { host, inside, read_only } = volume.clone();
    spec::SharedVolumeSpec { host, inside, read_only }
}

fn order_kept(kept: &KeptVolume) -> KeptVolumeRequest {
    let KeptVolume { name, bytes, inodes } = kept.clone();
    KeptVolumeRequest { name, bytes, inodes }
}

fn order_group(group: &Group) -> cgroup::Group {
    let Group { name, memory_bytes, cpu_millis } = group;
    let limits = cgroup::CgroupLimits { memory_bytes: *memory_bytes, cpu_millis: *cpu_millis, pids: None };
    cgroup::Group { name: name.clone(), limits }
}

#[async_trait]
impl Backend for Native {
    fn name(&self) -> &'static str {
        "native"
    }

    async fn preflight(&self) -> Result<Isolation, BackendError> {
        Ok(self.running.isolation.clone())
    }

    fn is_up(&self) -> bool {
        *self.running.state.borrow() == LauncherStatus::Yes
    }

    async fn given_up(&self) -> String {
        let mut state = self.running.state.subscribe();
        let given_up = state.wait_for(|state| *state == LauncherStatus::Ended).await.is_ok();
        if !given_up {
            std::future::pending::<()>().await;
        }
        format!("the launcher has ended {MOST_ENDS} times in a row; the log says why")
    }

    async fn create(&self, spec: &SandboxSpec) -> Result<Box<dyn Sandbox>, BackendError> {
        self.create_failing(spec, None).await
    }

    async fn warm(&self, spec: &ZygoteSpec) -> Result<(), BackendError> {
        self.warm_rotating(spec, Rotation::default()).await
    }

    async fn warmth(&self) -> Option<ZygoteStatus> {
        match self.link().call(LauncherCall::Warmth, &[]).await {
            Ok(LauncherReply::Warmth { ready, forks, restarts, not_imported }) => {
                Some(ZygoteStatus { ready, forks, restarts, not_imported })
            }
            _ => None,
        }
    }

    async fn kept(&self) -> Result<Vec<KeptVolumeInfo>, BackendError> {
        match self.link().call(LauncherCall::Kept, &[]).await? {
            LauncherReply::Kept(kept) => {
                Ok(kept.into_iter().map(|k| KeptVolumeInfo { name: k.name, last_used: k.last_used }).collect())
            }
            other => Err(unexpected(other)),
        }
    }

    async fn discard(&self, name: &str) -> Result<(), BackendError> {
        match self.link().call(LauncherCall::Discard { name: name.to_owned() }, &[]).await? {
            LauncherReply::Done => Ok(()),
            LauncherReply::InUse => Err(BackendError::InUse),
            other => Err(unexpected(other)),
        }
    }

    async fn reap_orphans(&self) -> Result<(), BackendError> {
        match self.link().call(LauncherCall::SweepOthers, &[]).await? {
            LauncherReply::Done => Ok(()),
            other => Err(unexpected(other)),
        }
    }

    async fn shutdown(&self) {
        self.running.state.send_replace(LauncherStatus::Closing);
        let (link, process) = {
            let mut at = lock(&self.running.at);
            (Arc::clone(&at.link), at.process.take())
        };
        let _ = link.call(LauncherCall::Shutdown, &[]).await;
        if let Some(process) = process {
            // The launcher ends right after its reply.
            let _ = tokio::task::spawn_blocking(move || process.wait()).await;
        }
    }
}

#[derive(Debug)]
struct NativeSandbox {
    id: String,
    isolation: Isolation,
    link: Arc<LauncherConnection>,
    instance: Arc<OwnedFd>,
    /// Listening socket for the egress, until `take_egress_listener` takes it.
    egress: Mutex<Option<TcpListener>>,
    destroyed: AtomicBool,
}

impl NativeSandbox {
    fn egress(&self) -> MutexGuard<'_, Option<TcpListener>> {
        self.egress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for NativeSandbox {
    fn drop(&mut self) {
        if !*self.destroyed.get_mut() {
            self.link.post(LauncherCall::Destroy { sandbox: std::mem::take(&mut self.id) });
        }
    }
}

#[async_trait]
impl Sandbox for NativeSandbox {
    fn id(&self) -> &str {
        &self.id
    }

    fn isolation(&self) -> &Isolation {
        &self.isolation
    }

    async fn connect(&self) -> Result<GuestStream, BackendError> {
        // This goes through the directory's descriptor because the whole path may be too long for a socket address.
        let path = format!("/proc/self/fd/{}/{}/guest.sock", self.instance.as_raw_fd(), self.id);
        let stream = UnixStream::connect(path).await.and_then(UnixStream::into_std).and_then(Stream::new);
        Ok(Box::new(stream.map_err(|_| BackendError::Gone(self.id.clone()))?))
    }

    async fn fork_zygote(&self) -> Result<(), BackendError> {
        match self.link.call(LauncherCall::Fork { sandbox: self.id.clone() }, &[]).await? {
            LauncherReply::Done => Ok(()),
            LauncherReply::Unavailable { why, hint } => Err(BackendError::Unavailable { why, hint }),
            LauncherReply::Gone => Err(BackendError::Gone(self.id.clone())),
            other => Err(unexpected(other)),
        }
    }

    async fn enter_browser(&self) -> Result<(), BackendError> {
        match self.link.call(LauncherCall::EnterBrowser { sandbox: self.id.clone() }, &[]).await? {
            LauncherReply::Done => Ok(()),
            LauncherReply::Gone => Err(BackendError::Gone(self.id.clone())),
            other => Err(unexpected(other)),
        }
    }

    fn take_egress_listener(&self) -> Option<TcpListener> {
        self.egress().take()
    }

    async fn stats(&self) -> Result<Stats, BackendError> {
        match self.link.call(LauncherCall::Stats { sandbox: self.id.clone() }, &[]).await? {
            LauncherReply::Stats(usage) => {
                let cgroup::Usage { memory_bytes, pids, oom_kills, browser_oom_kills, oom_limit_bytes } = usage;
                Ok(Stats { memory_bytes, pids, oom_kills, browser_oom_kills, oom_limit_bytes })
            }
            _ => Err(BackendError::Gone(self.id.clone())),
        }
    }

    async fn destroy(&self) -> Result<(), BackendError> {
        if self.destroyed.load(Ordering::Relaxed) {
            return Ok(());
        }
        drop(self.take_egress_listener());
        match self.link.call(LauncherCall::Destroy { sandbox: self.id.clone() }, &[]).await {
            Ok(LauncherReply::Done) => {}
            Ok(other) => return Err(unexpected(other)),
            // The sandbox ended together with its launcher.
            Err(_) if self.link.is_gone() => {}
            Err(e) => return Err(e),
        }
        self.destroyed.store(true, Ordering::Relaxed);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jail::cgroup::{Hierarchy, Layout, Version};
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    #[tokio::test]
    async fn a_thousand_dropped_sandboxes_are_all_taken_back_by_a_launcher_that_is_busy() {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let link = Arc::new(LauncherConnection::open(ours).unwrap());
        for number in 0..1000 {
            link.post(LauncherCall::Destroy { sandbox: number.to_string() });
        }
        let read = move || {
            let request = |_| wire::receive::<LauncherRequest>(&theirs).unwrap().unwrap().0.call;
            (0..1000).map(request).filter(|call| matches!(call, LauncherCall::Destroy { .. })).count()
        };
        assert_eq!(tokio::task::spawn_blocking(read).await.unwrap(), 1000);
    }

    /// W19
    #[test]
    fn w19_nobody_else_can_take_the_directory_of_a_users_servers() {
        let uid = rustix::process::getuid().as_raw();
        let dir = std::env::temp_dir().join(format!("sandpool-runtime-dir-{}", std::process::id()));
        let (home, sessions, state) = (dir.join("home"), dir.join("sessions"), dir.join("state"));
        std::fs::create_dir_all(&home).unwrap();
        std::fs::create_dir_all(&sessions).unwrap();
        let passwd = format!("other:x:4242:4242::/srv:/bin/sh\nme:x:{uid}:{uid}:me:{}:/bin/sh\n", home.display());
        let of = |passwd: &str| runtime_dir_of(uid, &sessions, passwd, &state);
        assert_eq!(of(""), state.join("run"), "neither session nor home");
        assert_eq!(of(&passwd), home.join(".local/state/sandpool/run"));
        assert_eq!(of(&passwd.replace("/home:", "/nowhere:")), state.join("run"), "a home that is not there");
        std::fs::create_dir(sessions.join(uid.to_string())).unwrap();
        assert_eq!(of(&passwd), sessions.join(uid.to_string()).join("sandpool"));
        // A session directory or a home that belongs to somebody else is not trusted.
        let theirs =
            runtime_dir_of(uid + 1, &dir, &passwd.replace(&format!(":{uid}:"), &format!(":{}:", uid + 1)), &state);
        assert_eq!(theirs, state.join("run"));
        for found in [of(""), of(&passwd), theirs] {
            assert!(found.starts_with(&dir), "a name that everybody can make: {}", found.display());
        }
        std::fs::remove_dir_all(dir).unwrap();
    }

    fn survey(controllers: &[Controller], off: &[&str]) -> Survey {
        let fact = |layer: &str, state| Fact { layer: layer.into(), state, why: "why".into(), what_to_do: "do".into() };
        let layers = [
            "landlock",
            "host uid per sandbox",
            "own inodes",
            "socket buffers",
            "network limits",
            "cgroup memory",
            "cgroup cpu",
            "cgroup pids",
            "open files",
        ];
        let state = |layer| if off.contains(layer) { FactState::Off } else { FactState::On };
        let hierarchy = Hierarchy { version: Version::V2, controllers: controllers.to_vec(), base: "/sys".into() };
        Survey {
            mode: Mode::Root,
            refusal: None,
            facts: layers.iter().map(|layer| fact(layer, state(layer))).collect(),
            cgroup: Layout { hierarchies: vec![hierarchy], ..Layout::default() },
            landlock: None,
            ext4: true,
            sub: None,
            counts_processes: true,
        }
    }

    #[test]
    fn the_level_falls_with_what_is_missing_and_says_what() {
        use Controller::{Cpu, Memory, Pids};
        let level = |controllers: &[Controller], off: &[&str]| {
            let found = isolation_of(&survey(controllers, off));
            (found.level, found.missing)
        };
        assert_eq!(level(&[Memory, Cpu, Pids], &["open files"]), (Level::Full, vec![]));
        assert_eq!(level(&[Memory, Cpu, Pids], &["landlock"]), (Level::Reduced, vec!["landlock: why (do)".into()]));
        assert_eq!(level(&[Memory, Cpu, Pids], &["host uid per sandbox"]).0, Level::Reduced);
        assert_eq!(level(&[Memory, Cpu, Pids], &["socket buffers"]).0, Level::Reduced);
        assert_eq!(level(&[Memory, Cpu, Pids], &["own inodes"]).0, Level::Reduced);
        assert_eq!(level(&[Memory, Cpu, Pids], &["network limits"]).0, Level::Reduced);
        assert_eq!(level(&[Memory, Pids], &["cgroup cpu"]).0, Level::Reduced);
        assert_eq!(level(&[Memory, Cpu], &["cgroup pids"]).0, Level::Basic);
        assert_eq!(level(&[], &["cgroup memory", "cgroup cpu", "cgroup pids"]).1.len(), 3);
    }
}
