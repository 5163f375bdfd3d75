//! The registry: the list of every sandbox that exists, and the only code that creates and destroys sandboxes.
//!
//! A sandbox is listed from the moment the back end returns it until the back end confirms that nothing of it is left.
//! So no sandbox can leak, neither through a dropped call nor through a lost guest or a failed start.

use std::collections::{BTreeMap, HashMap};
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::Poll;
use std::time::Duration;

use proto::{Ended, FromGuest, KernelId, KernelSpec, Language, ToGuest};
use sandbox::{Backend, BackendError, Isolation, Sandbox, SandboxSpec};
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::task::TaskTracker;

use crate::browser::{BrowserStatus, Browsers, Counters};
use crate::config::EngineConfig;
use crate::guest::{GuestClient, GuestLost, lock};
use crate::metering::{self, Meter, SandboxMeter, TenantUsage};
use crate::op::{Network, StageInProgress, Tenant};
use crate::sandbox_egress::{DenialSinks, EgressSpec, RunEgress, SandboxEgress};

const STATS_WAIT: Duration = Duration::from_secs(2);
/// Maximum time to read the counters of all sandboxes.
const METER_WAIT: Duration = Duration::from_secs(20);
/// Maximum time that a caller waits for a destruction, which is retried later if it takes longer.
const DESTROY_WAIT: Duration = Duration::from_secs(30);

#[derive(Clone)]
pub(crate) struct Registry {
    shared: Arc<RegistryInner>,
}

struct RegistryInner {
    backend: Arc<dyn Backend>,
    tasks: TaskTracker,
    /// Sandboxes by a number assigned here, because a listed sandbox may not be connected yet, or no longer.
    sandboxes: Mutex<HashMap<u64, Arc<RegistryEntry>>>,
    next: AtomicU64,
    closed: AtomicBool,
    start_timeout: Duration,
    denial_sinks: DenialSinks,
    browsers: Counters,
    meter: Meter,
}

struct RegistryEntry {
    sandbox: Box<dyn Sandbox>,
    /// Tenant whose use is metered, if it is known.
    tenant: Option<Tenant>,
    meter: SandboxMeter,
    disk_bytes: u64,
    /// Directory to which a browser downloads.
    downloads: &'static str,
    /// Egress of the sandbox, which is closed before the sandbox ends.
    egress: Option<SandboxEgress>,
    /// Connection to the guest, set once the guest was greeted.
    guest: OnceLock<GuestClient>,
    /// True once the end of the sandbox was ordered. The destruction is retried periodically until `destroyed` is true.
    doomed: AtomicBool,
    destroyed: tokio::sync::Mutex<bool>,
    /// Permit of the tenant for one ending sandbox. It is given back when nothing of this sandbox is left.
    ending_permit: Mutex<Option<OwnedSemaphorePermit>>,
    /// True if a fork of the zygote waits in the sandbox, false if none was obtained, `None` if none was requested.
    forked: Mutex<Option<bool>>,
    browser: Mutex<BrowserStatus>,
    /// Statistics of a sandbox whose guest is lost, taken before the sandbox is destroyed.
    last_stats: tokio::sync::OnceCell<Option<sandbox::Stats>>,
}

impl RegistryEntry {
    /// Forks the zygote into the sandbox for its next kernel if the language is Python, unless a fork was requested
    /// before.
    async fn fork_zygote(&self, language: Option<Language>) {
        if language != Some(Language::Python) || lock(&self.forked).is_some() {
            return;
        }
        let forked = self.sandbox.fork_zygote().await.is_ok();
        *lock(&self.forked) = Some(forked);
    }

    /// Returns the statistics of the sandbox, or `None` if they take too long: a caller or the next run would have to
    /// wait.
    async fn stats(&self) -> Option<sandbox::Stats> {
        tokio::time::timeout(STATS_WAIT, self.sandbox.stats()).await.ok()?.ok()
    }

    fn counters(&self, stats: Option<sandbox::Stats>) -> metering::Counters {
        let network_bytes = self.egress.as_ref().map_or(0, SandboxEgress::bytes);
        let (cpu_usec, memory_bytes) = stats.map(|stats| (stats.cpu_usec, stats.memory_bytes)).unwrap_or_default();
        metering::Counters { cpu_usec, memory_bytes, network_bytes }
    }

    async fn destroy(&self, meter: &Meter) -> Result<(), BackendError> {
        self.doomed.store(true, Ordering::SeqCst);
        // The egress is closed first: nothing may leave on behalf of a sandbox that is over, however long its end
        // takes.
        self.egress.iter().for_each(SandboxEgress::close);
        let destroying = async {
            let mut destroyed = self.destroyed.lock().await;
            if !*destroyed {
                let last = self.sandbox.destroy().await?;
                *destroyed = true;
                meter.count_last(&self.meter, self.counters(last));
            }
            Ok(())
        };
        let late = |_| Err(BackendError::Launcher(format!("no answer within {DESTROY_WAIT:?}")));
        tokio::time::timeout(DESTROY_WAIT, destroying).await.unwrap_or_else(late)
    }
}

/// The reason why a sandbox could not be created or used. `public` may be shown to clients, `log` is for the operator.
#[derive(Debug, Clone)]
pub(crate) struct SandboxFailure {
    pub(crate) public: String,
    pub(crate) log: String,
    /// True if another sandbox has the kept volume.
    pub(crate) in_use: bool,
}

impl SandboxFailure {
    pub(crate) fn new(public: impl Into<String>) -> Self {
        let public = public.into();
        Self { log: public.clone(), public, in_use: false }
    }

    /// Returns a failure whose reason is only for the log.
    pub(crate) fn logged(public: &str, log: String) -> Self {
        Self { public: public.into(), log, in_use: false }
    }
}

impl From<GuestLost> for SandboxFailure {
    fn from(lost: GuestLost) -> Self {
        Self::new(lost.0)
    }
}

impl From<BackendError> for SandboxFailure {
    fn from(error: BackendError) -> Self {
        let in_use = matches!(error, BackendError::InUse);
        let public = match &error {
            BackendError::InUse => "another server has these files at the moment; retry later".into(),
            BackendError::BelowFloor { got, floor, .. } => {
                format!("isolation level `{got:?}` is below the configured floor `{floor:?}`")
            }
            BackendError::NoSpace(why) => format!("{why}; free space or end contexts, then retry"),
            // Other errors may contain paths of the host.
            _ => "the back end failed; the server's log says why".into(),
        };
        Self { public, log: error.to_string(), in_use }
    }
}

impl Registry {
    pub(crate) fn new(
        backend: Arc<dyn Backend>,
        tasks: TaskTracker,
        config: &EngineConfig,
        denial_sinks: DenialSinks,
    ) -> Self {
        let shared = RegistryInner {
            backend,
            tasks,
            sandboxes: Mutex::default(),
            next: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            start_timeout: config.start_timeout,
            denial_sinks,
            browsers: Counters::default(),
            meter: Meter::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Creates a sandbox and greets its guest. Meanwhile it forks the zygote into the sandbox if `first`, the language
    /// of the first kernel, is Python. The work is done in a separate task, so a caller that goes away half-way leaves
    /// nothing behind.
    pub(crate) async fn create(
        &self,
        spec: SandboxSpec,
        first: Option<Language>,
        egress: Option<EgressSpec>,
        tenant: Option<Tenant>,
    ) -> Result<Arc<LiveSandbox>, SandboxFailure> {
        let registry = self.clone();
        let (sender, receiver) = tokio::sync::oneshot::channel();
        self.shared.tasks.spawn(async move {
            let created = registry.create_here(&spec, first, egress, tenant).await;
            if let Err(Ok(unwanted)) = sender.send(created) {
                let _ = unwanted.destroy("nobody waits for the sandbox any more").await;
            }
        });
        receiver.await.unwrap_or_else(|_| Err(SandboxFailure::new("the sandbox could not be made")))
    }

    async fn create_here(
        &self,
        spec: &SandboxSpec,
        first: Option<Language>,
        egress: Option<EgressSpec>,
        tenant: Option<Tenant>,
    ) -> Result<Arc<LiveSandbox>, SandboxFailure> {
        let shared = &self.shared;
        if shared.closed.load(Ordering::SeqCst) {
            return Err(SandboxFailure::new("shutting down"));
        }
        let creating = tokio::time::timeout(shared.start_timeout, shared.backend.create(spec));
        let sandbox = creating.await.map_err(|_| {
            SandboxFailure::new(format!("the back end made no sandbox within {:?}", shared.start_timeout))
        })??;
        let number = shared.next.fetch_add(1, Ordering::Relaxed);
        let (egress, closed) = match egress.map(|spec| shared.open_egress(&*sandbox, spec)).transpose() {
            Ok(egress) => (egress, None),
            Err(failure) => (None, Some(failure)),
        };
        let entry = Arc::new(RegistryEntry {
            sandbox,
            tenant,
            meter: SandboxMeter::default(),
            disk_bytes: spec.limits.disk_bytes,
            downloads: spec.downloads(),
            egress,
            guest: OnceLock::new(),
            doomed: AtomicBool::new(false),
            destroyed: tokio::sync::Mutex::new(false),
            ending_permit: Mutex::default(),
            forked: Mutex::default(),
            browser: Mutex::default(),
            last_stats: tokio::sync::OnceCell::new(),
        });
        lock(&shared.sandboxes).insert(number, entry.clone());
        // A sandbox whose egress cannot be opened must not run.
        if let Some(failure) = closed {
            let _ = self.destroy(number, &entry).await;
            return Err(failure);
        }
        let (connected, ()) = tokio::join!(connect(&entry, shared.start_timeout), entry.fork_zygote(first));
        match connected {
            Ok(guest) => {
                let _ = entry.guest.set(guest.clone());
                let sandbox = Arc::new(LiveSandbox { number, entry, guest, registry: self.clone() });
                // The end of the connection, whatever its reason, ends the sandbox.
                let watched = sandbox.clone();
                shared.tasks.spawn(async move {
                    let lost = watched.guest.lost().await;
                    let stale = watched.guest.stale_frames();
                    tracing::debug!(sandbox = watched.entry.sandbox.id(), why = %lost, stale, "sandbox over");
                    // If a caller has ordered the end, that caller destroys the sandbox and waits for the result.
                    if !watched.entry.doomed.load(Ordering::SeqCst) {
                        // They say whether the sandbox was ended for its memory.
                        watched.stats().await;
                        let _ = watched.destroy(&lost.0).await;
                    }
                });
                if shared.closed.load(Ordering::SeqCst) {
                    let _ = sandbox.destroy("shutting down").await;
                    return Err(SandboxFailure::new("shutting down"));
                }
                Ok(sandbox)
            }
            Err(failure) => {
                let _ = self.destroy(number, &entry).await;
                Err(failure)
            }
        }
    }

    /// Destroys a sandbox. It stays listed until that succeeds, so that the destruction can be retried.
    async fn destroy(&self, number: u64, entry: &RegistryEntry) -> Result<(), SandboxFailure> {
        match entry.destroy(&self.shared.meter).await {
            Ok(()) => {
                lock(&self.shared.sandboxes).remove(&number);
                lock(&entry.ending_permit).take();
                Ok(())
            }
            Err(error) => {
                tracing::error!(sandbox = entry.sandbox.id(), %error, "cannot destroy a sandbox");
                Err(error.into())
            }
        }
    }

    /// Removes the orphans that dead servers left behind.
    pub(crate) async fn reap_orphans(&self) {
        if let Err(error) = self.shared.backend.reap_orphans().await {
            tracing::warn!(%error, "cannot remove what dead servers left behind");
        }
    }

    /// Retries destructions that failed before.
    pub(crate) async fn retry(&self) {
        let all = self.entries();
        for (number, entry) in all.into_iter().filter(|(_, entry)| entry.doomed.load(Ordering::SeqCst)) {
            let _ = self.destroy(number, &entry).await;
        }
    }

    /// Reads the counters of all sandboxes in use, and returns what each tenant used since the last call.
    pub(crate) async fn take_usage(&self) -> BTreeMap<Tenant, TenantUsage> {
        let meter = &self.shared.meter;
        let reading = async {
            for (_, entry) in self.entries().into_iter().filter(|(_, entry)| entry.meter.counts()) {
                // Without statistics the next reading covers this time, too.
                if let Some(stats) = entry.stats().await {
                    meter.count(&entry.meter, entry.counters(Some(stats)));
                }
            }
        };
        let _ = tokio::time::timeout(METER_WAIT, reading).await;
        meter.take()
    }

    fn entries(&self) -> Vec<(u64, Arc<RegistryEntry>)> {
        lock(&self.shared.sandboxes).iter().map(|(number, entry)| (*number, entry.clone())).collect()
    }

    pub(crate) fn backend(&self) -> &dyn Backend {
        &*self.shared.backend
    }

    pub(crate) fn count(&self) -> usize {
        lock(&self.shared.sandboxes).len()
    }

    pub(crate) fn browsers(&self) -> Browsers {
        let runs = |entry: &RegistryEntry| {
            let exited = entry.guest.get().is_none_or(|guest| guest.is_lost() || guest.browser_has_exited());
            matches!(*lock(&entry.browser), BrowserStatus::Runs { .. }) && !exited
        };
        let running = lock(&self.shared.sandboxes).values().filter(|entry| runs(entry)).count();
        let Counters { started, died } = &self.shared.browsers;
        Browsers { running, started: started.load(Ordering::Relaxed), died: died.load(Ordering::Relaxed) }
    }

    /// Returns the number of sandboxes whose end was ordered.
    pub(crate) fn ending(&self) -> usize {
        lock(&self.shared.sandboxes).values().filter(|entry| entry.doomed.load(Ordering::SeqCst)).count()
    }

    /// Destroys all remaining sandboxes, then shuts the back end down. No sandbox is created afterwards.
    pub(crate) async fn shutdown(&self) {
        self.shared.closed.store(true, Ordering::SeqCst);
        let mut destroying = tokio::task::JoinSet::new();
        for (number, entry) in self.entries() {
            entry.guest.get().map(|guest| guest.close("the server is shutting down"));
            let registry = self.clone();
            destroying.spawn(async move { registry.destroy(number, &entry).await.is_ok() });
        }
        while destroying.join_next().await.is_some() {}
        self.shared.backend.shutdown().await;
    }
}

impl RegistryInner {
    fn open_egress(&self, sandbox: &dyn Sandbox, spec: EgressSpec) -> Result<SandboxEgress, SandboxFailure> {
        let public = "the sandbox has no way out to the network; the server's log says why";
        let none = |log: String| SandboxFailure::logged(public, log);
        let egress = spec
            .egress
            .clone()
            .ok_or_else(|| none("the sandbox has a network policy, but the server has no egress proxy".into()))?;
        let listener = sandbox
            .take_egress_listener()
            .ok_or_else(|| none("the sandbox handed over no socket for its egress".into()))?;
        let opened = SandboxEgress::open(&egress, listener, spec, self.denial_sinks.clone());
        opened.map_err(|error| none(format!("the sandbox's egress cannot be opened: {error}")))
    }
}

async fn connect(entry: &RegistryEntry, wait: Duration) -> Result<GuestClient, SandboxFailure> {
    let connecting = tokio::time::timeout(wait, entry.sandbox.connect());
    let stream =
        connecting.await.map_err(|_| SandboxFailure::new(format!("the guest was not there within {wait:?}")))??;
    Ok(GuestClient::open(stream).await?)
}

/// A live sandbox with the connection to its guest.
pub(crate) struct LiveSandbox {
    number: u64,
    entry: Arc<RegistryEntry>,
    pub(crate) guest: GuestClient,
    registry: Registry,
}

impl LiveSandbox {
    pub(crate) fn isolation(&self) -> &Isolation {
        self.entry.sandbox.isolation()
    }

    /// Returns the limit of the sandbox's disk.
    pub(crate) fn disk_bytes(&self) -> u64 {
        self.entry.disk_bytes
    }

    pub(crate) fn downloads(&self) -> &'static str {
        self.entry.downloads
    }

    pub(crate) fn browser(&self) -> &Mutex<BrowserStatus> {
        &self.entry.browser
    }

    pub(crate) fn browsers(&self) -> &Counters {
        &self.registry.shared.browsers
    }

    pub(crate) async fn enter_browser(&self) -> Result<(), SandboxFailure> {
        Ok(self.entry.sandbox.enter_browser().await?)
    }

    pub(crate) fn has_egress(&self) -> bool {
        self.entry.egress.is_some()
    }

    pub(crate) fn egress_spec(&self) -> Option<&EgressSpec> {
        self.entry.egress.as_ref().map(SandboxEgress::spec)
    }

    /// Assigns the sandbox to a context or a conversation, to which its denials and its use are then attributed.
    pub(crate) fn belongs_to(&self, id: &str) {
        self.is_used();
        self.entry.egress.iter().for_each(|egress| egress.belongs_to(id));
    }

    /// Begins to meter the sandbox for its tenant.
    pub(crate) fn is_used(&self) {
        self.entry.tenant.iter().for_each(|tenant| self.entry.meter.begin(tenant));
    }

    /// Returns the network of a run, which lasts until the returned value is dropped.
    pub(crate) fn run_egress(&self, network: Network, stage: &StageInProgress) -> RunEgress<'_> {
        RunEgress::through(self.entry.egress.as_ref(), network, stage)
    }

    pub(crate) async fn stats(&self) -> Option<sandbox::Stats> {
        match self.guest.is_lost() {
            true => *self.entry.last_stats.get_or_init(|| self.entry.stats()).await,
            false => self.entry.stats().await,
        }
    }

    /// Returns the number of bytes that the sandbox exchanged with the outside.
    pub(crate) fn network_bytes(&self) -> u64 {
        self.entry.counters(None).network_bytes
    }

    pub(crate) async fn browser_oom_kills(&self) -> Option<u64> {
        self.stats().await.map(|stats| stats.browser_oom_kills)
    }

    /// Returns the memory of the processes and in-memory files of the sandbox, if the host counts it.
    pub(crate) async fn memory_bytes(&self) -> Option<u64> {
        self.stats().await?.memory_bytes
    }

    /// Orders the end of the sandbox without waiting for it.
    pub(crate) fn dismiss(self: Arc<Self>, why: &'static str) {
        let tasks = self.registry.shared.tasks.clone();
        tasks.spawn(async move { self.destroy(why).await });
    }

    /// Orders the end of the sandbox and returns when no call can reach it any more. The destruction continues in the
    /// background and keeps `permit` until it is complete. An error that occurs at once is returned.
    pub(crate) async fn end(
        self: Arc<Self>,
        why: &'static str,
        permit: OwnedSemaphorePermit,
    ) -> Result<(), SandboxFailure> {
        let tasks = self.registry.shared.tasks.clone();
        self.keep_until_gone(permit);
        let mut ending = Box::pin(async move { self.destroy(why).await });
        match poll_fn(|context| Poll::Ready(ending.as_mut().poll(context))).await {
            Poll::Ready(ended) => ended,
            Poll::Pending => {
                tasks.spawn(ending);
                Ok(())
            }
        }
    }

    /// Keeps a permit until nothing of the sandbox is left, however many attempts that takes.
    pub(crate) fn keep_until_gone(&self, permit: OwnedSemaphorePermit) {
        *lock(&self.entry.ending_permit) = Some(permit);
    }

    /// Ends everything that runs in the sandbox and returns when nothing of it is left. Callers see `why` as the
    /// reason.
    pub(crate) async fn destroy(&self, why: &str) -> Result<(), SandboxFailure> {
        self.entry.doomed.store(true, Ordering::SeqCst);
        self.guest.close(why);
        self.registry.destroy(self.number, &self.entry).await
    }

    /// Returns the sandbox if its kernel was started, and destroys it otherwise.
    pub(crate) async fn if_started(
        self: Arc<Self>,
        started: Result<(), SandboxFailure>,
    ) -> Result<Arc<Self>, SandboxFailure> {
        if started.is_err() {
            let _ = self.destroy("its interpreter did not start").await;
        }
        started.map(|()| self)
    }

    /// Starts a kernel as a fork of the zygote if there is one, otherwise from scratch.
    pub(crate) async fn start_kernel(&self, kernel: KernelId, spec: KernelSpec) -> Result<String, SandboxFailure> {
        self.entry.fork_zygote(Some(spec.language)).await;
        if spec.language == Language::Python && lock(&self.entry.forked).take() == Some(true) {
            match self.ask_for_kernel(kernel, spec.clone(), true).await {
                Err(failure) if !self.guest.is_lost() => tracing::warn!(why = failure.log, "no fork; starting anew"),
                result => return result,
            }
        }
        self.ask_for_kernel(kernel, spec, false).await
    }

    async fn ask_for_kernel(&self, kernel: KernelId, spec: KernelSpec, warm: bool) -> Result<String, SandboxFailure> {
        self.guest.take_exited(kernel);
        match self.guest.ask(&ToGuest::StartKernel { kernel, spec, warm }, self.registry.shared.start_timeout).await? {
            FromGuest::KernelReady { version } => Ok(version),
            // The message contains the path of the interpreter, which is the same on the host.
            FromGuest::Failed { message, .. } => Err(SandboxFailure::logged(
                "the interpreter did not start; the server's log says why",
                format!("the interpreter did not start: {}", one_line(&message)),
            )),
            _ => Err(self.guest.close("the guest answered something else").into()),
        }
    }

    pub(crate) async fn stop_kernel(&self, kernel: KernelId) -> Result<(), SandboxFailure> {
        match self.guest.ask(&ToGuest::StopKernel { kernel }, Duration::from_secs(10)).await? {
            FromGuest::Done => Ok(()),
            FromGuest::Failed { message, .. } => Err(SandboxFailure::new(one_line(&message))),
            _ => Err(self.guest.close("the guest answered something else").into()),
        }
    }
}

/// Turns text from a guest into one line of bounded length that may be part of a message.
pub(crate) fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(500).collect()
}

pub(crate) fn describe(how: Ended) -> String {
    match how {
        Ended::Exited { code } => format!("exit status {code}"),
        Ended::Signaled { signal } => format!("signal {signal}"),
    }
}
