//! Creates sandboxes and starts kernels in them, for callers and for the stock. Callers that wait go first.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use proto::{Deadline, FromGuest, KernelId, KernelSpec, Language, RunStatus, ToGuest};
use sandbox::{BrowserRoom, FileSpec, Group, KeptVolume, Limits, SandboxSpec, SharedVolume};
use tokio::sync::watch;

use crate::config::{EngineConfig, RealmConfig, Runtimes};
use crate::guest::GuestReply;
use crate::op::{Size, Tenant};
use crate::registry::{LiveSandbox, Registry, SandboxFailure};
use crate::sandbox_egress::EgressSpec;
use crate::tenancy::Tenancy;

/// Id of the first kernel of a sandbox.
pub(crate) const FIRST_KERNEL: KernelId = 1;
const CHECK_DEADLINE: Duration = Duration::from_secs(5);

/// The properties in which one sandbox differs from another.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Shape {
    /// Tenant whose use is metered, if it is known.
    pub(crate) tenant: Option<Tenant>,
    pub(crate) groups: Vec<Group>,
    pub(crate) limits: Limits,
    pub(crate) volumes: Vec<SharedVolume>,
    pub(crate) kept: Option<KeptVolume>,
    /// Egress of the sandbox; without one it has only its own loopback interface.
    pub(crate) egress: Option<EgressSpec>,
    /// Room for a browser, if the sandbox may have one.
    pub(crate) browser: Option<BrowserRoom>,
}

impl Shape {
    /// Returns the shape of a context's sandbox.
    pub(crate) fn of(tenancy: &Tenancy, size: Option<Size>) -> Self {
        let config = tenancy.config();
        let limits = config.limits_of(size);
        Self {
            tenant: Some(tenancy.tenant.tenant.clone()),
            groups: tenancy.groups(),
            limits,
            browser: config.browser_room(&limits),
            volumes: config.volumes.iter().chain(tenancy.mounts()).cloned().collect(),
            kept: None,
            // A sandbox that outlives a call has no egress in a realm where each call has to ask for it.
            egress: tenancy.egress(size).filter(|_| !config.network_on_call),
        }
    }
}

pub(crate) struct Provisioner {
    registry: Registry,
    config: Arc<EngineConfig>,
    pub(crate) runtimes: Runtimes,
    /// Number of callers that wait for a sandbox, a kernel or a browser.
    waiting: watch::Sender<usize>,
}

/// Counts one waiting caller until it is dropped.
pub(crate) struct WaitingGuard<'a>(&'a Provisioner);

impl Drop for WaitingGuard<'_> {
    fn drop(&mut self) {
        self.0.waiting.send_modify(|waiting| *waiting -= 1);
    }
}

impl Provisioner {
    pub(crate) fn new(registry: Registry, config: Arc<EngineConfig>, runtimes: Runtimes) -> Self {
        Self { registry, config, runtimes, waiting: watch::Sender::new(0) }
    }

    /// Counts the caller as one that waits, so that the work of the stock yields to it.
    pub(crate) fn caller_waits(&self) -> WaitingGuard<'_> {
        self.waiting.send_modify(|waiting| *waiting += 1);
        WaitingGuard(self)
    }

    /// Returns when no caller waits, but after `at_most` at the latest.
    pub(crate) async fn yield_to_callers(&self, at_most: Duration) {
        let mut watching = self.waiting.subscribe();
        let _ = tokio::time::timeout(at_most, watching.wait_for(|waiting| *waiting == 0)).await;
    }

    /// Creates a sandbox. `first` is the language of the kernel that the caller is going to start, if that is known.
    pub(crate) async fn create(
        &self,
        shape: &Shape,
        first: Option<Language>,
    ) -> Result<Arc<LiveSandbox>, SandboxFailure> {
        let Shape { tenant, groups, limits, volumes, kept, egress, browser } = shape.clone();
        let browser = browser.filter(|_| self.runtimes.browser.is_some());
        let (runtime, mut files) = (self.runtimes.binds(browser.is_some()), self.runtimes.files());
        let trusted = setup(egress.as_ref()).await;
        files.extend(trusted.iter().flat_map(|setup| setup.files.clone()).map(FileSpec::from));
        // The browser's processes are added to the limit, so that code may start as many as without a browser.
        let pids = limits.pids + browser.map_or(0, |room| room.pids);
        let limits = Limits { pids, ..limits };
        let spec = SandboxSpec { groups, limits, runtime, files, volumes, kept, egress: egress.is_some(), browser };
        self.registry.create(spec, first, egress, tenant).await
    }

    /// Returns whether contexts of this realm can have a browser.
    pub(crate) fn browses(&self, realm: &RealmConfig) -> bool {
        realm.browser.is_some() && self.runtimes.browser.is_some()
    }

    pub(crate) async fn start_browser(&self, sandbox: &LiveSandbox) -> Result<(), SandboxFailure> {
        let command = self.runtimes.browser.as_ref().ok_or_else(|| SandboxFailure::new("no browser is installed"))?;
        let nssdb = setup(sandbox.egress_spec()).await.and_then(|setup| setup.nssdb.clone());
        sandbox.start_browser(command.spec(sandbox.has_egress(), nssdb, sandbox.downloads())).await
    }

    /// Returns the additional environment variables that every program in this sandbox needs.
    pub(crate) async fn env_of(&self, sandbox: &LiveSandbox) -> BTreeMap<String, String> {
        setup(sandbox.egress_spec()).await.map(|setup| setup.env.clone()).unwrap_or_default()
    }

    /// Starts the first kernel of a sandbox and returns the sandbox. On failure nothing is left of it.
    pub(crate) async fn first_kernel(
        &self,
        sandbox: Arc<LiveSandbox>,
        language: Language,
    ) -> Result<Arc<LiveSandbox>, SandboxFailure> {
        let started = self.start_kernel(&sandbox, FIRST_KERNEL, language).await;
        sandbox.if_started(started).await
    }

    pub(crate) async fn start_kernel(
        &self,
        sandbox: &LiveSandbox,
        kernel: KernelId,
        language: Language,
    ) -> Result<(), SandboxFailure> {
        let spec = self.runtimes.kernel(language, &self.config.cwd);
        let spec = spec.ok_or_else(|| SandboxFailure::new("no JavaScript runtime is installed"))?;
        self.start_kernel_as(sandbox, kernel, spec).await
    }

    /// Starts a kernel as `spec` describes, with the additional environment variables of the sandbox.
    pub(crate) async fn start_kernel_as(
        &self,
        sandbox: &LiveSandbox,
        kernel: KernelId,
        mut spec: KernelSpec,
    ) -> Result<(), SandboxFailure> {
        spec.env.extend(self.env_of(sandbox).await);
        sandbox.start_kernel(kernel, spec).await.map(drop)
    }
}

/// Returns the files and environment variables that a sandbox with this egress needs.
async fn setup(egress: Option<&EgressSpec>) -> Option<Arc<egress::SandboxSetup>> {
    let EgressSpec { egress, tenant, .. } = egress?;
    Some(egress.as_ref()?.setup(&tenant.0).await)
}

/// Returns a statement that leaves nothing behind in the kernel. An expression would be remembered as the last value.
fn statement(language: Language) -> &'static str {
    match language {
        Language::Python => "pass",
        Language::Javascript | Language::Typescript => ";",
    }
}

/// Runs a statement in the first kernel. It warms the kernel up before a tenant's first cell, and shows whether the
/// kernel is healthy.
pub(crate) async fn rehearse(sandbox: &LiveSandbox, language: Language) -> Result<(), String> {
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
        let mut run = sandbox.guest.call(&request).await.map_err(|lost| lost.0)?;
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
