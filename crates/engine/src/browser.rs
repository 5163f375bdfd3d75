//! The browser of one sandbox: whether it runs, how it is started, and its counters.
//!
//! `ops/browse.rs` sends browser actions to the guest, and [`bounded`] checks the answers.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use proto::browser::BrowserSpec;
use proto::{FromGuest, ToGuest};

use crate::config::{BrowserCommand, WORKSPACE};
use crate::guest::lock;
use crate::registry::{LiveSandbox, SandboxFailure, one_line};

pub(crate) mod bounded;

/// Maximum time for the browser to start.
const START: Duration = Duration::from_secs(30);
/// Home directory of the browser inside the sandbox, which code has no reason to access.
const HOME: &str = "/browser";

/// The state of a sandbox's browser.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum BrowserStatus {
    /// No browser was ever started.
    #[default]
    Absent,
    /// The browser runs. `oom_kills` is the number of browser processes of the sandbox killed for memory so far.
    Runs { oom_kills: u64 },
    /// The browser ended or was given up.
    Over,
}

/// Numbers of browsers. `started` and `died` count since the engine started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Browsers {
    pub running: usize,
    pub started: u64,
    /// Browsers that ended by themselves or stopped answering.
    pub died: u64,
}

#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) started: AtomicU64,
    pub(crate) died: AtomicU64,
}

impl BrowserCommand {
    pub(crate) fn spec(&self, proxy: bool, nssdb: Option<String>, downloads: &str) -> BrowserSpec {
        BrowserSpec {
            program: self.program.to_string_lossy().into_owned(),
            shell: self.shell,
            proxy: proxy.then(|| sandbox::PROXY.to_string()),
            home: HOME.into(),
            fontconfig: self.fontconfig.as_ref().map(|path| path.to_string_lossy().into_owned()),
            workspace: WORKSPACE.into(),
            downloads: downloads.into(),
            nssdb: nssdb.filter(|_| proxy),
        }
    }

    /// Reads the program once, so that the first start need not wait for the disk.
    pub(crate) fn pre_read(program: PathBuf) {
        let read = std::fs::File::open(program).and_then(|mut file| std::io::copy(&mut file, &mut std::io::sink()));
        if let Err(error) = read {
            tracing::debug!(%error, "the browser's program cannot be read in advance");
        }
    }
}

impl LiveSandbox {
    pub(crate) fn browser_runs(&self) -> bool {
        matches!(*lock(self.browser()), BrowserStatus::Runs { .. }) && !self.guest.browser_has_exited()
    }

    /// Starts a browser, which replaces a running one. The caller makes sure that no other call does so at the same
    /// time.
    pub(crate) async fn start_browser(&self, spec: BrowserSpec) -> Result<(), SandboxFailure> {
        self.mark_browser_over();
        let starting = async {
            match self.try_browser(&spec).await? {
                Ok(oom_kills) => Ok(oom_kills),
                // Chromium occasionally ends while it starts, and a second attempt loses nothing.
                Err(why) => {
                    tracing::warn!(why, "the browser did not start; trying once more");
                    self.try_browser(&spec).await?.map_err(|why| not_started(&why))
                }
            }
        };
        let late = |_| Err(not_started(&format!("it was not there within {START:?}")));
        let oom_kills = tokio::time::timeout(START, starting).await.unwrap_or_else(late)?;
        *lock(self.browser()) = BrowserStatus::Runs { oom_kills };
        self.browsers().started.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Starts a browser and returns `oom_kills` of its status, or the guest's reason why it did not start.
    async fn try_browser(&self, spec: &BrowserSpec) -> Result<Result<u64, String>, SandboxFailure> {
        let (entered, kills) = tokio::join!(self.enter_browser(), self.browser_oom_kills());
        entered?;
        self.guest.expect_browser();
        match self.guest.ask(&ToGuest::StartBrowser { spec: spec.clone() }, START).await? {
            FromGuest::BrowserReady { .. } => Ok(Ok(kills.unwrap_or(0))),
            // The message may contain paths of the host, so it is only for the log.
            FromGuest::Failed { message, .. } => Ok(Err(one_line(&message))),
            _ => Err(self.guest.close("the guest answered something else").into()),
        }
    }

    /// Returns whether a process of the browser was killed for memory since the browser started or since this function
    /// was last called.
    pub(crate) async fn browser_was_oom_killed(&self) -> bool {
        let BrowserStatus::Runs { oom_kills: before } = *lock(self.browser()) else { return false };
        let Some(oom_kills) = self.browser_oom_kills().await else { return false };
        *lock(self.browser()) = BrowserStatus::Runs { oom_kills };
        oom_kills > before
    }

    /// Marks the browser as over, so that the next call starts another, and returns whether it ran until now.
    pub(crate) fn mark_browser_over(&self) -> bool {
        let mut browser = lock(self.browser());
        let ran = matches!(*browser, BrowserStatus::Runs { .. });
        if ran {
            *browser = BrowserStatus::Over;
            self.browsers().died.fetch_add(1, Ordering::Relaxed);
        }
        ran
    }
}

fn not_started(why: &str) -> SandboxFailure {
    let log = format!("the browser did not start: {why}");
    SandboxFailure::logged("it did not start; the server's log says why", log)
}
