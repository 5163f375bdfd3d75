//! This module keeps a launcher running: it configures each one, and starts another when one ends.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use jail::launcher::{Process, Spawned};
use jail::survey::Survey;
use jail::wire::{LauncherCall, LauncherReply, Start};
use jail::zygote::Rotation;
use rustix::fs::{Mode as FileMode, OFlags};
use tokio::sync::watch;

use super::connection::{LauncherConnection, lock, lost, refusal};
use super::{Launcher, NativeConfig, isolation_of, spawn_launcher_from};
use crate::{BackendError, Isolation, ZygoteSpec};

/// State that outlives a single launcher.
#[derive(Debug)]
pub(super) struct Running {
    pub program: PathBuf,
    pub config: NativeConfig,
    pub runtime_dir: PathBuf,
    pub isolation: Isolation,
    pub current: Mutex<CurrentLauncher>,
    /// Specification of the warm interpreter, which the next launcher starts too.
    pub zygote: Mutex<Option<(ZygoteSpec, Rotation)>>,
    pub state: watch::Sender<LauncherStatus>,
}

/// The current launcher.
#[derive(Debug)]
pub(super) struct CurrentLauncher {
    pub connection: Arc<LauncherConnection>,
    pub instance: Arc<OwnedFd>,
    pub process: Option<Process>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LauncherStatus {
    /// The launcher serves requests.
    Up,
    /// The launcher has ended, and another is being started.
    Restarting,
    /// Launchers kept ending, and no further attempt is made.
    Ended,
    /// The server is shutting the back end down.
    Closing,
}

/// Minimum lifetime of a stable launcher. The end of one that lived shorter is added to the ends before it.
const STABLE: Duration = Duration::from_secs(60);
/// Number of ends in a row after which no other launcher is started.
pub(super) const MOST_ENDS: u32 = 5;
/// Pause before the second attempt in a row. It doubles with each further attempt.
const PAUSE: Duration = Duration::from_millis(200);

/// Sends a launcher its configuration, and rejects a host whose isolation level is below the floor.
pub(super) async fn begin(
    spawned: Spawned,
    config: &NativeConfig,
    runtime_dir: &Path,
) -> Result<(CurrentLauncher, Survey), BackendError> {
    let Spawned { socket, process } = spawned;
    let guest = config.guest.load(runtime_dir, jail::image::guest, "sandpool-guest")?;
    let connection = LauncherConnection::open(socket).map_err(lost)?;
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
    let (instance, survey) = match connection.call(LauncherCall::Start(start), &[guest.as_fd()]).await? {
        LauncherReply::Started { instance, survey } => (instance, *survey),
        other => return Err(refusal(other)),
    };
    let isolation = isolation_of(&survey.cgroup, &survey.facts);
    if isolation.level < config.floor {
        let missing = isolation.missing.join("; ");
        return Err(BackendError::BelowFloor { got: isolation.level, floor: config.floor, missing });
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let instance = rustix::fs::open(&instance, flags, FileMode::empty()).map_err(lost)?;
    Ok((
        CurrentLauncher { connection: Arc::new(connection), instance: Arc::new(instance), process: Some(process) },
        survey,
    ))
}

/// Starts another launcher when one ends unexpectedly. The old launcher's sandboxes and mounts are gone with it; the
/// next launcher removes the cgroups and files that it left.
pub(super) async fn supervise(running: Weak<Running>, mut ended: watch::Receiver<bool>) {
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
        tokio::spawn(async move { running.restart_zygote().await });
    }
}

impl Running {
    pub(super) fn connection(&self) -> Arc<LauncherConnection> {
        Arc::clone(&lock(&self.current).connection)
    }

    /// Changes the status, unless the back end is closing. Returns whether it did.
    fn set_status(&self, next: LauncherStatus) -> bool {
        self.state.send_if_modified(|state| {
            let open = *state != LauncherStatus::Closing;
            if open {
                *state = next;
            }
            open
        })
    }

    async fn restart(&self, ends: &mut u32) -> Option<watch::Receiver<bool>> {
        if !self.set_status(LauncherStatus::Restarting) {
            return None;
        }
        tracing::error!("the launcher has ended, and every sandbox with it; another launcher is started");
        loop {
            *ends += 1;
            if *ends >= MOST_ENDS {
                tracing::error!("the launcher has ended {MOST_ENDS} times in a row; it is not started again");
                self.set_status(LauncherStatus::Ended);
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
                Ok((next, _)) => {
                    let ended = next.connection.ended();
                    let mut current = lock(&self.current);
                    // If the back end is closing, the new launcher ends with its connection.
                    return self.set_status(LauncherStatus::Up).then(|| {
                        *current = next;
                        ended
                    });
                }
                Err(e) => tracing::error!("the launcher cannot be started again: {e}"),
            }
        }
    }

    pub(super) async fn start_zygote(&self, spec: &ZygoteSpec, rotation: Rotation) -> Result<(), BackendError> {
        let library = self.config.zygote.load(&self.runtime_dir, jail::image::library, "sandpool-zygote")?;
        let warm = LauncherCall::Warm { spec: Box::new(spec.clone()), rotation };
        self.connection().order(warm, &[library.as_fd()]).await
    }

    async fn restart_zygote(&self) {
        let wanted = lock(&self.zygote).clone();
        if let Some((spec, rotation)) = wanted
            && let Err(error) = self.start_zygote(&spec, rotation).await
        {
            tracing::warn!(%error, "no warm interpreter: Python kernels are started anew, which takes longer");
        }
    }
}
