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

mod connection;
mod running;
mod sandbox;

use std::io;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use jail::cgroup::{Controller, Layout};
use jail::launcher::Spawned;
use jail::survey::{HOST_UID, PROCESSES, Survey};
use jail::wire::{self, Create, LauncherCall, LauncherReply, LauncherRequest, LauncherResponse};
use tokio::sync::watch;

pub use jail::cgroup::CgroupSource as Cgroups;
pub use jail::disk::{DiskRoom, KeepFree};
pub use jail::heap::{return_free_pages, return_large_blocks};
pub use jail::ids::Mode;
pub use jail::survey::{Fact, FactState};
pub use jail::zygote::Rotation;

use self::connection::{LauncherConnection, lock, lost, refusal};
use self::running::{LauncherStatus, MOST_ENDS, Running, begin, supervise};
use self::sandbox::NativeSandbox;
use crate::{
    Backend, BackendError, Isolation, KeptVolumeInfo, Level, Sandbox, SandboxSpec, UnheldLimits, ZygoteSpec,
    ZygoteStatus,
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
            _ => Err(BackendError::Launcher("it did not reply to the survey".into())),
        }
    }
}

fn examination(survey: Survey) -> Examination {
    let outcome = match &survey.refusal {
        Some(no) => Err(BackendError::Unavailable { why: no.why.clone(), hint: no.hint.clone() }),
        None => Ok(isolation_of(&survey.cgroup, &survey.facts)),
    };
    Examination { mode: survey.mode, facts: survey.facts, outcome }
}

/// Derives the isolation level from a survey. Without limits on memory and processes the level is `Basic`. If only a
/// second line of defence is missing, the level is `Reduced`.
fn isolation_of(cgroup: &Layout, facts: &[Fact]) -> Isolation {
    let lowers = |f: &&Fact| {
        f.state != FactState::On
            && (f.layer.starts_with("cgroup ")
                || ["landlock", HOST_UID, "own inodes", "socket buffers", "network limits"].contains(&&*f.layer))
    };
    let line = |f: &Fact| match &*f.what_to_do {
        "" => format!("{}: {}", f.layer, f.why),
        todo => format!("{}: {} ({todo})", f.layer, f.why),
    };
    let missing: Vec<String> = facts.iter().filter(lowers).map(line).collect();
    let level = if !cgroup.has(Controller::Memory) || !cgroup.has(Controller::Pids) {
        Level::Basic
    } else if missing.is_empty() {
        Level::Full
    } else {
        Level::Reduced
    };
    let processes = facts.iter().any(|fact| fact.layer == PROCESSES && fact.state != FactState::On);
    Isolation { level, missing, unheld: UnheldLimits { cpu: !cgroup.has(Controller::Cpu), processes } }
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

/// The native back end after its start.
#[derive(Debug)]
pub struct Native {
    running: Arc<Running>,
    survey: Survey,
}

impl Native {
    pub async fn start(launcher: Launcher, config: NativeConfig) -> Result<(Self, Isolation), BackendError> {
        let Launcher { spawned, program } = launcher;
        let runtime_dir = config.runtime_dir.clone().unwrap_or_else(|| default_runtime_dir(&config.state_dir));
        let (current, survey) = begin(spawned, &config, &runtime_dir).await?;
        let isolation = isolation_of(&survey.cgroup, &survey.facts);
        let ended = current.connection.ended();
        let running = Arc::new(Running {
            program,
            config,
            runtime_dir,
            isolation: isolation.clone(),
            current: Mutex::new(current),
            zygote: Mutex::default(),
            state: watch::Sender::new(LauncherStatus::Up),
        });
        if running.config.restarts {
            tokio::spawn(supervise(Arc::downgrade(&running), ended));
        }
        Ok((Self { running, survey }, isolation))
    }

    fn connection(&self) -> Arc<LauncherConnection> {
        self.running.connection()
    }

    pub fn mode(&self) -> Mode {
        self.survey.mode
    }

    /// Returns whether volumes are images on disk, so that kept ones outlive the server.
    pub fn has_volumes_on_disk(&self) -> bool {
        self.survey.ext4
    }

    /// Returns every isolation layer of this host, as found at the start.
    pub fn survey(&self) -> &[Fact] {
        &self.survey.facts
    }

    /// Creates a sandbox like [`Backend::create`]. In debug builds `fail_at` makes the step of that number fail, for
    /// tests of the rollback.
    pub async fn create_failing(
        &self,
        spec: &SandboxSpec,
        fail_at: Option<usize>,
    ) -> Result<Box<dyn Sandbox>, BackendError> {
        let id = uuid::Uuid::new_v4().simple().to_string();
        let (connection, instance) = {
            let current = lock(&self.running.current);
            (Arc::clone(&current.connection), Arc::clone(&current.instance))
        };
        // If this future is dropped before the reply arrives, dropping `sandbox` destroys what the launcher creates for
        // it.
        let mut sandbox = NativeSandbox {
            id: id.clone(),
            isolation: self.running.isolation.clone(),
            connection: Arc::clone(&connection),
            instance,
            egress: Mutex::default(),
            destroyed: AtomicBool::new(false),
        };
        let create = Create { sandbox: id, spec: spec.clone(), fail_at };
        let (reply, fds) = connection.exchange(LauncherCall::Create(Box::new(create)), &[]).await?;
        let error = match reply {
            LauncherReply::Created { notes, is_owner } => {
                *lock(&sandbox.egress) = fds.into_iter().next().map(TcpListener::from);
                notes.iter().for_each(|note| tracing::warn!("{note}"));
                if is_owner {
                    sandbox.isolation.level = sandbox.isolation.level.min(Level::Reduced);
                }
                sandbox.isolation.missing.extend(notes);
                let Isolation { level: got, missing, .. } = &sandbox.isolation;
                if *got < self.running.config.floor {
                    let missing = missing.join("; ");
                    return Err(BackendError::BelowFloor { got: *got, floor: self.running.config.floor, missing });
                }
                return Ok(Box::new(sandbox));
            }
            LauncherReply::Failed { message } => BackendError::Create(message),
            reply @ (LauncherReply::InUse | LauncherReply::NoSpace { .. }) => refusal(reply),
            other => return Err(refusal(other)),
        };
        // The launcher has already removed everything that it created.
        sandbox.destroyed.store(true, Ordering::Relaxed);
        Err(error)
    }

    /// Starts the warm interpreter like [`Backend::start_zygote`]. `rotation` decides when a new interpreter replaces
    /// it, for tests of the replacement.
    pub async fn start_zygote_rotating(&self, spec: &ZygoteSpec, rotation: Rotation) -> Result<(), BackendError> {
        *lock(&self.running.zygote) = Some((spec.clone(), rotation));
        self.running.start_zygote(spec, rotation).await
    }
}

#[async_trait]
impl Backend for Native {
    fn name(&self) -> &'static str {
        "native"
    }

    fn is_up(&self) -> bool {
        *self.running.state.borrow() == LauncherStatus::Up
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

    async fn start_zygote(&self, spec: &ZygoteSpec) -> Result<(), BackendError> {
        self.start_zygote_rotating(spec, Rotation::default()).await
    }

    async fn zygote_status(&self) -> Option<ZygoteStatus> {
        match self.connection().call(LauncherCall::ZygoteStatus, &[]).await {
            Ok(LauncherReply::ZygoteStatus(status)) => Some(status),
            _ => None,
        }
    }

    async fn kept(&self) -> Result<Vec<KeptVolumeInfo>, BackendError> {
        match self.connection().call(LauncherCall::Kept, &[]).await? {
            LauncherReply::Kept(kept) => Ok(kept),
            other => Err(refusal(other)),
        }
    }

    async fn discard(&self, name: &str) -> Result<(), BackendError> {
        self.connection().order(LauncherCall::Discard { name: name.to_owned() }, &[]).await
    }

    async fn reap_orphans(&self) -> Result<(), BackendError> {
        self.connection().order(LauncherCall::SweepOthers, &[]).await
    }

    async fn shutdown(&self) {
        self.running.state.send_replace(LauncherStatus::Closing);
        let (connection, process) = {
            let mut current = lock(&self.running.current);
            (Arc::clone(&current.connection), current.process.take())
        };
        let _ = connection.call(LauncherCall::Shutdown, &[]).await;
        if let Some(process) = process {
            // The launcher ends right after its reply.
            let _ = tokio::task::spawn_blocking(move || process.wait()).await;
        }
    }
}

#[cfg(test)]
mod tests;
