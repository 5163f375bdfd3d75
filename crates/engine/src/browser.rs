//! The browser of one sandbox: whether it runs, how it is started, and what is counted of it.
//!
//! What it is asked goes to the guest (`ops/browse.rs`); what it answers is checked in [`bounded`].

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use proto::browser::BrowserSpec;
use proto::{FromGuest, ToGuest};

use crate::config::{BrowserCommand, WORKSPACE};
use crate::guest::lock;
use crate::registry::{LiveSandbox, SandboxFailure, one_line};

pub(crate) mod bounded;

/// A browser that is not there after this time is not waited for.
const START: Duration = Duration::from_secs(30);
/// Its home inside the sandbox, where code has no business.
const HOME: &str = "/browser";

/// What a sandbox has of a browser.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum BrowserStatus {
    /// None was ever started.
    #[default]
    Absent,
    /// Since so many processes of the sandbox's browsers were killed for memory.
    Runs { oom_kills: u64 },
    /// It ended, or was given up.
    Over,
}

/// Since the engine began, but for those that run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Browsers {
    pub running: usize,
    pub started: u64,
    /// Ended by themselves, or did not answer any more.
    pub died: u64,
}

#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) started: AtomicU64,
    pub(crate) died: AtomicU64,
}

impl BrowserCommand {
    pub(crate) fn spec(&self, proxy: bool, nssdb: Option<String>) -> BrowserSpec {
        BrowserSpec {
            program: self.program.to_string_lossy().into_owned(),
            shell: self.shell,
            proxy: proxy.then(|| sandbox::PROXY.to_string()),
            home: HOME.into(),
            downloads: format!("{WORKSPACE}/downloads"),
            nssdb: nssdb.filter(|_| proxy),
        }
    }

    /// Reads it once, so that the first start need not wait for the disk.
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

    /// Takes the place of one that is there. Who asks for it makes sure that nobody else does.
    pub(crate) async fn start_browser(&self, spec: BrowserSpec) -> Result<(), SandboxFailure> {
        self.browser_is_over();
        let starting = async {
            let (entered, kills) = tokio::join!(self.enter_browser(), self.browser_oom_kills());
            entered?;
            self.guest.expect_browser();
            match self.guest.ask(&ToGuest::StartBrowser { spec }, START).await? {
                FromGuest::BrowserReady { .. } => Ok(kills.unwrap_or(0)),
                // It may name paths, which are those of the host.
                FromGuest::Failed { message, .. } => Err(not_started(&one_line(&message))),
                _ => Err(self.guest.close("the guest answered something else").into()),
            }
        };
        let late = |_| Err(not_started(&format!("it was not there within {START:?}")));
        let oom_kills = tokio::time::timeout(START, starting).await.unwrap_or_else(late)?;
        *lock(self.browser()) = BrowserStatus::Runs { oom_kills };
        self.browsers().started.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Whether a process of it was killed for memory since the browser was started, or since that was asked last.
    pub(crate) async fn browser_outgrew(&self) -> bool {
        let BrowserStatus::Runs { oom_kills: before } = *lock(self.browser()) else { return false };
        let Some(oom_kills) = self.browser_oom_kills().await else { return false };
        *lock(self.browser()) = BrowserStatus::Runs { oom_kills };
        oom_kills > before
    }

    /// The next call starts another. Whether it ran until now.
    pub(crate) fn browser_is_over(&self) -> bool {
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
    SandboxFailure {
        public: "it did not start; the server's log says why".into(),
        log: format!("the browser did not start: {why}"),
        in_use: false,
    }
}
