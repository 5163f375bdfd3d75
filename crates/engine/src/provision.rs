//! How sandboxes are made and interpreters started in them, for contexts that wait and for those kept ready. Who waits goes first.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use proto::{Deadline, FromGuest, KernelId, KernelSpec, Language, RunStatus, ToGuest};
use sandbox::{BrowserRoom, Group, KeptVolume, Limits, SandboxSpec, SharedVolume};
use tokio::sync::watch;

use crate::config::{EngineConfig, RealmConfig, Runtimes};
use crate::guest::GuestReply;
use crate::op::Size;
use crate::registry::{LiveSandbox, Registry, SandboxFailure};
use crate::sandbox_egress::EgressSpec;
use crate::tenancy::Tenancy;

/// The first interpreter of a sandbox.
pub(crate) const FIRST_KERNEL: KernelId = 1;
const CHECK_DEADLINE: Duration = Duration::from_secs(5);

/// What makes one sandbox differ from another.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Shape {
    pub(crate) groups: Vec<Group>,
    pub(crate) limits: Limits,
    pub(crate) volumes: Vec<SharedVolume>,
    pub(crate) kept: Option<KeptVolume>,
    /// Without it there is nothing but the sandbox's own loopback.
    pub(crate) exit: Option<EgressSpec>,
    /// Room for a browser, where there is one.
    pub(crate) browser: Option<BrowserRoom>,
}

impl Shape {
    /// Of a context.
    pub(crate) fn of(tenancy: &Tenancy, size: Option<Size>) -> Self {
        let config = tenancy.config();
        let limits = config.limits_of(size);
        Self {
            groups: tenancy.groups(),
            limits,
            browser: config.browser_room(&limits),
            volumes: config.volumes.clone(),
            kept: None,
            // One that lasts longer than a call has none where each call has to ask for it.
            exit: tenancy.exit(size).filter(|_| !config.network_on_call),
        }
    }
}

pub(crate) struct Provisioner {
    live: Registry,
    config: Arc<EngineConfig>,
    pub(crate) runtimes: Runtimes,
    /// How many callers wait for something that is being made.
    waiting: watch::Sender<usize>,
}

/// While it is there, somebody waits for something to be made.
pub(crate) struct WaitingGuard<'a>(&'a Provisioner);

impl Drop for WaitingGuard<'_> {
    fn drop(&mut self) {
        self.0.waiting.send_modify(|waiting| *waiting -= 1);
    }
}

impl Provisioner {
    pub(crate) fn new(live: Registry, config: Arc<EngineConfig>, runtimes: Runtimes) -> Self {
        Self { live, config, runtimes, waiting: watch::Sender::new(0) }
    }

    pub(crate) fn hurry(&self) -> WaitingGuard<'_> {
        self.waiting.send_modify(|waiting| *waiting += 1);
        WaitingGuard(self)
    }

    /// Returns when nobody waits, but after `most` at the latest.
    pub(crate) async fn nobody_waits(&self, most: Duration) {
        let mut watching = self.waiting.subscribe();
        let _ = tokio::time::timeout(most, watching.wait_for(|waiting| *waiting == 0)).await;
    }

    /// For a caller that waits; `first` is the language of the interpreter it is going to start in it, if that is known.
    pub(crate) async fn sandbox(
        &self,
        shape: &Shape,
        first: Option<Language>,
    ) -> Result<Arc<LiveSandbox>, SandboxFailure> {
        let _hurry = self.hurry();
        self.create_in_background(shape, first).await
    }

    /// For a caller that waits.
    pub(crate) async fn start_kernel(
        &self,
        place: &LiveSandbox,
        kernel: KernelId,
        language: Language,
    ) -> Result<(), SandboxFailure> {
        let _hurry = self.hurry();
        self.unhurried_kernel(place, kernel, language).await
    }

    /// A sandbox with an interpreter, for a caller that waits; on failure nothing is left of it.
    pub(crate) async fn started(&self, shape: &Shape, language: Language) -> Result<Arc<LiveSandbox>, SandboxFailure> {
        let _hurry = self.hurry();
        let place = self.create_in_background(shape, Some(language)).await?;
        self.first_kernel(place, language).await
    }

    pub(crate) async fn create_in_background(
        &self,
        shape: &Shape,
        first: Option<Language>,
    ) -> Result<Arc<LiveSandbox>, SandboxFailure> {
        let Shape { groups, limits, volumes, kept, exit, browser } = shape.clone();
        let browser = browser.filter(|_| self.runtimes.browser.is_some());
        let (runtime, mut files) = (self.runtimes.binds(browser.is_some()), self.runtimes.files.clone());
        files.extend(self.furnishing(exit.as_ref()).await.iter().flat_map(|furnishing| furnishing.files.clone()));
        // The code's are not to be fewer for it.
        let pids = limits.pids + browser.map_or(0, |room| room.pids);
        let (egress, limits) = (exit.is_some(), Limits { pids, ..limits });
        let spec = SandboxSpec { groups, limits, runtime, files, volumes, kept, egress, browser };
        self.live.make(spec, first, exit).await
    }

    /// What a sandbox with this way out has to have.
    async fn furnishing(&self, exit: Option<&EgressSpec>) -> Option<Arc<egress::SandboxSetup>> {
        Some(self.config.egress.as_ref()?.furnishing(&exit?.tenant.0).await)
    }

    /// Contexts of this realm can have a browser.
    pub(crate) fn browses(&self, realm: &RealmConfig) -> bool {
        realm.browser.is_some() && self.runtimes.browser.is_some()
    }

    /// For a caller that waits.
    pub(crate) async fn start_browser(&self, place: &LiveSandbox) -> Result<(), SandboxFailure> {
        let _hurry = self.hurry();
        self.unhurried_browser(place).await
    }

    pub(crate) async fn unhurried_browser(&self, place: &LiveSandbox) -> Result<(), SandboxFailure> {
        let command = self.runtimes.browser.as_ref().ok_or_else(|| SandboxFailure::new("no browser is installed"))?;
        let nssdb = self.furnishing(place.exit()).await.and_then(|furnishing| furnishing.nssdb.clone());
        place.start_browser(command.spec(place.has_way_out(), nssdb)).await
    }

    /// What everything that is started in a sandbox like this has in its environment, besides.
    pub(crate) async fn env_of(&self, place: &LiveSandbox) -> BTreeMap<String, String> {
        self.furnishing(place.exit()).await.map(|furnishing| furnishing.env.clone()).unwrap_or_default()
    }

    /// The same sandbox with its first interpreter; on failure nothing is left of it.
    pub(crate) async fn first_kernel(
        &self,
        place: Arc<LiveSandbox>,
        language: Language,
    ) -> Result<Arc<LiveSandbox>, SandboxFailure> {
        if let Err(failure) = self.unhurried_kernel(&place, FIRST_KERNEL, language).await {
            let _ = place.destroy("its interpreter did not start").await;
            return Err(failure);
        }
        Ok(place)
    }

    async fn unhurried_kernel(
        &self,
        place: &LiveSandbox,
        kernel: KernelId,
        language: Language,
    ) -> Result<(), SandboxFailure> {
        let spec = self.runtimes.kernel(language, &self.config.cwd);
        let spec = spec.ok_or_else(|| SandboxFailure::new("no JavaScript runtime is installed"))?;
        self.start_as_told(place, kernel, spec).await
    }

    /// `spec` need not say what follows from the sandbox.
    pub(crate) async fn start_as_told(
        &self,
        place: &LiveSandbox,
        kernel: KernelId,
        mut spec: KernelSpec,
    ) -> Result<(), SandboxFailure> {
        spec.env.extend(self.env_of(place).await);
        place.start_kernel(kernel, spec).await.map(drop)
    }
}

/// Leaves nothing behind in the interpreter: an expression would be remembered as the last value.
fn statement(language: Language) -> &'static str {
    match language {
        Language::Python => "pass",
        Language::Javascript | Language::Typescript => ";",
    }
}

/// Runs a statement in the first interpreter: the first cell of somebody's is not the first of all, and whether it is well is known.
pub(crate) async fn rehearse(place: &LiveSandbox, language: Language) -> Result<(), String> {
    let deadline = Deadline { after_ms: CHECK_DEADLINE.as_millis() as u64, grace_ms: 1000 };
    let request = ToGuest::Run {
        kernel: FIRST_KERNEL,
        code: statement(language).into(),
        env: BTreeMap::new(),
        deadline,
        forward_bytes: 1024,
        keep_over: None,
    };
    let checking = async {
        let mut run = place.guest.call(&request).await.map_err(|lost| lost.0)?;
        loop {
            match run.next().await.map_err(|lost| lost.0)? {
                GuestReply::Message(FromGuest::RunEnd { end }) if end.status == RunStatus::Ok => return Ok(()),
                GuestReply::Message(FromGuest::RunEnd { end }) => {
                    return Err(format!("the statement ended as {:?}", end.status));
                }
                GuestReply::Message(FromGuest::Failed { message, .. }) => {
                    return Err(crate::registry::one_line(&message));
                }
                _ => {}
            }
        }
    };
    let wait = CHECK_DEADLINE + Duration::from_secs(3);
    tokio::time::timeout(wait, checking).await.unwrap_or_else(|_| Err(format!("no answer within {wait:?}")))
}
