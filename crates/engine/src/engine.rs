//! The engine itself: readiness, dispatch, periodic work and shutdown.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use egress::Traffic;
use sandbox::{Backend, ZygoteStatus};
use tokio::runtime::Handle;
use tokio::sync::{broadcast, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::browser::Browsers;
use crate::capture::weight_of;
use crate::config::{BrowserCommand, EngineConfig, RealmConfig, Runtimes};
use crate::conversation::{Conversations, KEPT_SWEEP, PARKED, PARKING_SWEEP};
use crate::links::LinkedFile;
use crate::op::{Call, EngineError, Health, Notice, NoticeKind, Op, Outcome, Realm, StartupStep, Tenant};
use crate::ops;
use crate::provision::Provisioner;
use crate::registry::{Registry, SandboxFailure};
use crate::sandbox_egress::DenialSinks;
use crate::stock::{Ready, Stock};
use crate::tenancy::{Removed, Tenancies, Tenancy};
use crate::upload::{Upload, UploadLinks, UploadOffer, UploadRefusal};

/// Time that a shutdown leaves calls to return their answers after their sandboxes were destroyed.
const LAST_ANSWERS: Duration = Duration::from_secs(5);
/// Interval between attempts to destroy sandboxes whose destruction failed.
const UPKEEP: Duration = Duration::from_secs(10);
/// Maximum time to wait for the status of the zygote, so that a status request does not wait for a busy back end.
const ZYGOTE_WAIT: Duration = Duration::from_secs(1);
/// Number of notices that a reader may fall behind before it misses some.
const NOTICES: usize = 1024;

/// Handle to an engine. It is cheap to clone, and all clones refer to the same engine.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) config: Arc<EngineConfig>,
    pub(crate) tenants: Tenancies,
    pub(crate) conversations: Conversations,
    pub(crate) upload_links: UploadLinks,
    pub(crate) registry: Registry,
    /// Parts of the engine that exist once it is ready.
    started: OnceLock<Started>,
    state: watch::Sender<Readiness>,
    born: Instant,
    /// Token that is cancelled when the engine closes: new calls are refused and waiting ones give up.
    pub(crate) closing: CancellationToken,
    close_started: AtomicBool,
    /// Token that is cancelled to cut the grace time of a shutdown short.
    skip_grace: CancellationToken,
    closed: watch::Sender<bool>,
    calls: TaskTracker,
    pub(crate) tasks: TaskTracker,
    notices: broadcast::Sender<Notice>,
    /// Number of denials of the network since the engine started.
    denials: Arc<AtomicU64>,
    /// Number of runs that have their permits.
    pub(crate) running: Arc<AtomicUsize>,
    /// Number of calls in progress that do work.
    pub(crate) working: Arc<AtomicUsize>,
    /// True while calls that begin work are refused.
    pub(crate) draining: AtomicBool,
}

/// Current numbers of everything that the engine manages.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts {
    pub contexts: BTreeMap<Realm, usize>,
    /// Number of contexts in which something runs or waits for its turn.
    pub busy: usize,
    /// Number of runs that execute in contexts and conversations.
    pub runs: usize,
    pub background_runs: usize,
    /// Number of conversations that were used since the engine started and whose files still exist.
    pub conversations: usize,
    /// Ready sandboxes that wait for contexts.
    pub ready: Ready,
    pub sandboxes: usize,
    /// Number of sandboxes among `sandboxes` whose end was ordered.
    pub ending: usize,
    /// Number of denials of the network since the engine started.
    pub denials: u64,
    /// Traffic through the egress of all sandboxes.
    pub traffic: Traffic,
    pub browsers: Browsers,
}

struct Started {
    provisioner: Arc<Provisioner>,
    stock: Stock,
    took: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Readiness {
    /// The engine is being prepared; the text says which step is under way and how far it is.
    Preparing(String),
    Ready,
    Failed(String),
}

impl Engine {
    /// Creates an engine that is not ready: its operations wait for a while and then fail with the status.
    /// [`Engine::start_pool`] makes it ready.
    pub fn new(config: EngineConfig, backend: Arc<dyn Backend>) -> Self {
        let (tasks, notices) = (TaskTracker::new(), broadcast::Sender::new(NOTICES));
        let denial_sinks = DenialSinks { notices: notices.clone(), denials: Arc::default() };
        let inner = Inner {
            denials: denial_sinks.denials.clone(),
            registry: Registry::new(backend, tasks.clone(), &config, denial_sinks),
            tenants: Tenancies::new(&config),
            conversations: Conversations::default(),
            upload_links: UploadLinks::default(),
            config: Arc::new(config),
            started: OnceLock::new(),
            state: watch::Sender::new(Readiness::Preparing("starting".into())),
            born: Instant::now(),
            closing: CancellationToken::new(),
            close_started: AtomicBool::new(false),
            skip_grace: CancellationToken::new(),
            closed: watch::Sender::new(false),
            calls: TaskTracker::new(),
            tasks,
            notices,
            running: Arc::default(),
            working: Arc::default(),
            draining: AtomicBool::new(false),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Starts an engine and returns it once it is ready. On failure it returns the reason and leaves nothing behind.
    pub async fn start(
        config: EngineConfig,
        runtimes: Runtimes,
        backend: Arc<dyn Backend>,
    ) -> Result<Self, EngineError> {
        let engine = Self::new(config, backend);
        if let Err(error) = engine.start_pool(runtimes, &|_| {}).await {
            engine.shutdown(Duration::ZERO).await;
            return Err(error);
        }
        Ok(engine)
    }

    /// Sets the status that operations report before the engine is ready, for example `fetching Python packages, 40 %`.
    pub fn set_status(&self, status: impl Into<String>) {
        let status = status.into();
        self.inner.state.send_if_modified(|state| match state {
            Readiness::Preparing(old) => {
                *old = status;
                true
            }
            Readiness::Ready | Readiness::Failed(_) => false,
        });
    }

    /// Marks the preparation as failed for good, so that operations fail at once with this reason.
    pub fn set_failed(&self, why: impl Into<String>) {
        self.inner.state.send_replace(Readiness::Failed(why.into()));
    }

    /// Returns whether calls are served at the moment.
    pub fn is_ready(&self) -> bool {
        *self.inner.state.borrow() == Readiness::Ready && self.is_up() && !self.is_draining()
    }

    /// Returns whether the back end can create sandboxes at the moment.
    pub fn is_up(&self) -> bool {
        self.inner.registry.backend().is_up()
    }

    /// Waits until the back end can no longer create sandboxes, and returns the reason.
    pub async fn given_up(&self) -> String {
        self.inner.registry.backend().given_up().await
    }

    pub(crate) fn inner(&self) -> &Arc<Inner> {
        &self.inner
    }

    pub fn config(&self) -> &EngineConfig {
        &self.inner.config
    }

    /// Returns the number of sandboxes that exist, ready ones and used ones together.
    pub fn sandboxes(&self) -> usize {
        self.inner.registry.count()
    }

    /// Subscribes to all later notices. A slow reader misses some of them.
    pub fn notices(&self) -> broadcast::Receiver<Notice> {
        self.inner.notices.subscribe()
    }

    pub fn counts(&self) -> Counts {
        let mut counts = Counts {
            contexts: self.inner.tenants.realms().map(|config| (config.realm, 0)).collect(),
            runs: self.inner.running.load(Ordering::SeqCst),
            background_runs: self.inner.tenants.tenants().iter().map(|tenant| tenant.background.running()).sum(),
            ready: self.inner.started.get().map(|started| started.stock.count()).unwrap_or_default(),
            ending: self.inner.registry.ending(),
            sandboxes: self.sandboxes(),
            denials: self.inner.denials.load(Ordering::Relaxed),
            traffic: self.inner.tenants.traffic(),
            browsers: self.inner.registry.browsers(),
            ..Counts::default()
        };
        for tenancy in self.inner.tenants.all() {
            let (contexts, busy) = tenancy.count();
            *counts.contexts.entry(tenancy.config().realm).or_default() += contexts;
            counts.busy += busy;
        }
        counts.conversations = self.inner.conversations.count();
        counts
    }

    /// Returns the status of the zygote, from which kernels are forked, if the back end has one and answers soon.
    pub async fn zygote_status(&self) -> Option<ZygoteStatus> {
        tokio::time::timeout(ZYGOTE_WAIT, self.inner.registry.backend().zygote_status()).await.ok().flatten()
    }

    /// Returns the number of contexts of this tenant in this realm, and how many of them run something.
    pub fn counts_of(&self, tenant: &Tenant, realm: Realm) -> (usize, usize) {
        self.inner.tenants.known(tenant, realm).map_or((0, 0), |tenancy| tenancy.count())
    }

    /// Applies the quotas and the network of another configuration, and ignores the rest of it. Quotas apply to contexts
    /// and runs that begin from now on, and the network to sandboxes that are created from now on.
    pub fn reload(&self, config: &EngineConfig) {
        self.inner.tenants.reload(config);
        if let Some(started) = self.inner.started.get() {
            started.stock.renew(&self.inner.tenants);
        }
    }

    /// Ends everything that belongs to a tenant: its contexts, its calls in progress and its background runs. Refuses
    /// its calls until a reload names it again. Returns the number of contexts that it had.
    pub fn remove_tenant(&self, tenant: &Tenant) -> usize {
        let mut contexts = 0;
        for tenancy in self.inner.tenants.remove(tenant) {
            for removed in tenancy.remove_all() {
                self.inner.end_now(&tenancy, removed, "its tenant was removed");
                contexts += 1;
            }
        }
        if let Some(started) = self.inner.started.get() {
            started.stock.renew(&self.inner.tenants);
        }
        contexts
    }

    /// Fills and checks the pool, and makes the engine ready. The error is for the operator and may contain paths of
    /// the host.
    pub async fn start_pool(
        &self,
        runtimes: Runtimes,
        report: &(dyn Fn(StartupStep<'_>) + Sync),
    ) -> Result<(), EngineError> {
        let result = self.inner.start_pool(runtimes, report).await;
        match &result {
            Ok(()) => {
                let health = self.inner.health();
                health.log();
                report(StartupStep::Ready { took: health.startup, available: health.pool_available });
            }
            Err(error) => {
                report(StartupStep::Failed { error });
                self.set_failed("the session pool could not be started; the server's log says why");
            }
        }
        result
    }

    /// Runs one operation and returns exactly one outcome. Dropping the future cancels the call, and a panic becomes an
    /// error.
    pub async fn execute(&self, call: &Call, op: Op) -> Result<Outcome, EngineError> {
        let inner = &self.inner;
        if op == Op::Health {
            return Ok(Outcome::Health(inner.health()));
        }
        if inner.closing.is_cancelled() {
            return Err(EngineError::ShuttingDown);
        }
        let _working = inner.begin_work(&op)?;
        inner.wait_until_ready(call).await?;
        let cancel = call.cancel.child_token();
        let dropped = cancel.clone().drop_guard();
        let (memory, call) = (call.memory.clone(), Call { cancel, ..call.clone() });
        // The future of an operation is large, so it is boxed before anything wraps it and would move it again.
        let work: OpFuture = Box::pin(catch_panic(Box::pin(ops::run(inner.clone(), call, op))));
        let result = DetachOnDrop { work: Some(work), calls: inner.calls.clone(), _counted: inner.calls.token() }.await;
        dropped.disarm();
        let outcome = result?;
        match memory.add(weight(&outcome)) {
            Ok(()) => Ok(outcome),
            // The output is still stored, so the next call can read it.
            Err(full) if matches!(outcome, Outcome::Progress(_)) => Err(full.into()),
            Err(full) => Err(EngineError::ResultDropped(full.to_string())),
        }
    }

    /// Returns the key of a conversation's files, whether the conversation exists or not.
    pub fn conversation_key(&self, tenant: &str, conversation: &str) -> String {
        crate::links::conversation_key(&self.inner.config.file_secret, &Tenant(tenant.into()), conversation)
    }

    /// Returns the owner of the file behind a link, for download accounting; `None` if the key leads nowhere.
    pub fn owner_of_link(&self, key: &str) -> Option<String> {
        self.inner.owner_of(key)
    }

    /// Returns the tenant and the id of the context or conversation that a link leads to, for the journal.
    pub fn context_of_link(&self, key: &str) -> Option<(Tenant, String)> {
        let of_context = self.inner.tenants.by_key(key).map(|(tenant, context, _)| (tenant, context.id.clone()));
        of_context.or_else(|| self.inner.conversations.named(key))
    }

    /// Opens the file behind a link. The key is the permission to read: an unknown key, a removed context and a missing
    /// file all give the same error.
    pub async fn open_file(&self, key: &str, path: &str) -> Result<LinkedFile, EngineError> {
        if self.inner.closing.is_cancelled() || ops::check_path(path).is_err() {
            return Err(EngineError::FileNotFound(path.chars().take(100).collect()));
        }
        catch_panic(self.inner.clone().open_link(key, path, None)).await
    }

    /// Returns what a link for an upload permits, without using it.
    pub fn upload_offer(&self, id: &str) -> Result<UploadOffer, UploadRefusal> {
        self.inner.upload_offer(id)
    }

    /// Begins the upload that a link permits. The id is the permission to write.
    pub async fn begin_upload(&self, id: &str) -> Result<Upload, UploadRefusal> {
        if self.inner.closing.is_cancelled() {
            return Err(UploadRefusal::Failed(EngineError::ShuttingDown));
        }
        self.inner.clone().begin_upload(id).await
    }

    /// Refuses new calls, lets running ones end within `grace` and destroys everything. A second call cuts the grace
    /// time short. The shutdown continues even if this future is dropped, which only waits for it.
    pub async fn shutdown(&self, grace: Duration) {
        let inner = &self.inner;
        let mut closed = inner.closed.subscribe();
        if inner.close_started.swap(true, Ordering::SeqCst) {
            inner.skip_grace.cancel();
        } else {
            inner.closing.cancel();
            tokio::spawn(close(inner.clone(), grace));
        }
        let _ = closed.wait_for(|closed| *closed).await;
    }
}

type OpFuture = Pin<Box<dyn Future<Output = Result<Outcome, EngineError>> + Send>>;

/// Drives a call as long as its caller waits. If it is dropped before the call has ended, the call continues in a
/// separate task, so that it ends in an orderly way whatever happens to the caller.
struct DetachOnDrop {
    work: Option<OpFuture>,
    calls: TaskTracker,
    _counted: TaskTrackerToken,
}

impl Future for DetachOnDrop {
    type Output = Result<Outcome, EngineError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(work) = &mut self.work else { return Poll::Ready(panicked()) };
        let result = ready!(work.as_mut().poll(cx));
        self.work = None;
        Poll::Ready(result)
    }
}

impl Drop for DetachOnDrop {
    fn drop(&mut self) {
        if let (Some(work), Ok(runtime)) = (self.work.take(), Handle::try_current()) {
            self.calls.spawn_on(work, &runtime);
        }
    }
}

/// Estimates the memory of those parts of an outcome that were not counted while they were collected. The content of
/// files and the displays of a run were counted.
fn weight(outcome: &Outcome) -> usize {
    use crate::op::browser::BrowseResult as B;
    match outcome {
        Outcome::Browsed(browsed) => match &browsed.result {
            Ok(B::Screenshot { png, .. }) => png.len(),
            Ok(B::Value { json, .. }) => json.len(),
            Ok(B::Snapshot(snapshot)) => snapshot.text.len(),
            _ => 0,
        },
        Outcome::Progress(progress) => {
            let ended = progress.end.as_ref().and_then(|end| end.as_ref().ok());
            progress.output.len() + ended.map_or(0, |ran| weight_of(ran))
        }
        Outcome::Found(found) => found.lines.iter().map(|line| line.path.len() + line.text.len() + 64).sum(),
        Outcome::Files(files) => files.entries.iter().map(|entry| entry.path.len() + 64).sum(),
        _ => 0,
    }
}

/// Returns the error of a call that panicked.
pub(crate) fn panicked<T>() -> Result<T, EngineError> {
    Err(EngineError::Sandbox("internal error; the call was given up".into()))
}

/// Runs `work` and turns a panic in it into an error.
pub(crate) async fn catch_panic<T>(work: impl Future<Output = Result<T, EngineError>>) -> Result<T, EngineError> {
    let mut work = pin!(work);
    poll_fn(|context| {
        let polled = catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(context)));
        polled.unwrap_or_else(|_| Poll::Ready(panicked()))
    })
    .await
}

async fn close(inner: Arc<Inner>, grace: Duration) {
    inner.calls.close();
    tokio::select! {
        () = inner.calls.wait() => {}
        () = tokio::time::sleep(grace) => {}
        () = inner.skip_grace.cancelled() => {}
    }
    inner.registry.shutdown().await;
    let _ = tokio::time::timeout(LAST_ANSWERS, inner.calls.wait()).await;
    inner.tasks.close();
    let _ = tokio::time::timeout(LAST_ANSWERS, inner.tasks.wait()).await;
    inner.closed.send_replace(true);
}

impl Inner {
    async fn start_pool(
        self: &Arc<Self>,
        runtimes: Runtimes,
        report: &(dyn Fn(StartupStep<'_>) + Sync),
    ) -> Result<(), EngineError> {
        let begun = Instant::now();
        report(StartupStep::Begun { id: &uuid::Uuid::new_v4().simple().to_string()[..12] });
        let provisioner = Arc::new(Provisioner::new(self.registry.clone(), self.config.clone(), runtimes));
        let tenancy = self.tenants.of(&self.config.pool_tenant, self.config.pool_realm)?;
        let (tasks, closing) = (self.tasks.clone(), self.closing.clone());
        let stock = Stock::new(provisioner.clone(), self.config.clone(), &tenancy, tasks, closing);
        // The zygote imports for a while; the sandboxes are created in the meantime.
        let ((), sandboxes) = tokio::join!(self.start_zygote(&provisioner), stock.first_sandboxes());
        report(StartupStep::Warm);

        let size = stock.size();
        report(StartupStep::Filling { size });
        let failed = |failure: SandboxFailure| EngineError::Sandbox(failure.log);
        stock.fill(sandboxes, |number, id| report(StartupStep::Created { number, id })).await.map_err(failed)?;

        report(StartupStep::Checking);
        stock.check_and_repair().await.map_err(failed)?;
        let available = stock.pool_health().available;
        report(StartupStep::Checked { available, size });
        let took = begun.elapsed();

        if let Some(browser) = &provisioner.runtimes.browser
            && provisioner.browses(tenancy.config())
        {
            let program = browser.program.clone();
            self.tasks.spawn_blocking(|| BrowserCommand::pre_read(program));
        }
        // The rules may have changed meanwhile.
        stock.renew(&self.tenants);
        self.tasks.spawn(stock.clone().keep());
        self.repeat(UPKEEP, |inner| async move { inner.upkeep().await });
        let orphans = self.config.orphan_interval;
        self.repeat(orphans, |inner| async move { inner.registry.reap_orphans().await });
        for realm in self.tenants.realms() {
            let RealmConfig { realm, kept, persist, idle_timeout, sweep_interval, .. } = *realm;
            if let Some(persist) = persist {
                // A server on stdio may live shorter than the interval.
                self.sweep_workspaces(persist).await;
                let every = KEPT_SWEEP.min(persist.stays);
                self.repeat(every, move |inner| async move { inner.sweep_workspaces(persist).await });
            }
            if let Some(kept) = kept {
                // Links to files of an earlier engine have to work from the first call on.
                self.sweep_kept(realm, kept).await;
                let every = KEPT_SWEEP.min(kept.stays);
                self.repeat(every, move |inner| async move { inner.sweep_kept(realm, kept).await });
                self.repeat(PARKING_SWEEP, |inner| async move { inner.unpark(PARKED).await });
            }
            if let Some(idle) = idle_timeout {
                // An idle time shorter than the interval must still be honoured.
                let every = sweep_interval.min(idle / 4).max(Duration::from_millis(100));
                self.repeat(every, move |inner| async move { inner.stop_idle(realm, idle) });
            }
        }
        if self.started.set(Started { provisioner, stock, took }).is_err() {
            return Err(EngineError::Sandbox("the engine was started twice".into()));
        }
        self.state.send_replace(Readiness::Ready);
        Ok(())
    }

    async fn start_zygote(&self, provisioner: &Provisioner) {
        if let Some(warm) = provisioner.runtimes.warm()
            && let Err(error) = self.registry.backend().start_zygote(&warm).await
        {
            tracing::warn!(%error, "no warm interpreter: Python kernels are started anew, which takes longer");
        }
    }

    async fn wait_until_ready(&self, call: &Call) -> Result<(), EngineError> {
        if *self.state.borrow() == Readiness::Ready {
            return Ok(());
        }
        let longest = self.config.realm(call.realm).map_or(Duration::ZERO, |realm| realm.ready_wait);
        let mut watching = self.state.subscribe();
        let ready = watching.wait_for(|state| !matches!(state, Readiness::Preparing(_)));
        let state = tokio::select! {
            biased;
            state = ready => state.map(|state| state.clone()).ok(),
            () = call.cancel.cancelled() => return Err(EngineError::Cancelled),
            () = self.closing.cancelled() => return Err(EngineError::ShuttingDown),
            () = tokio::time::sleep(longest) => None,
        };
        match state.unwrap_or_else(|| self.state.borrow().clone()) {
            Readiness::Ready => Ok(()),
            Readiness::Preparing(why) | Readiness::Failed(why) => Err(EngineError::NotReady(why)),
        }
    }

    pub(crate) fn provisioner(&self) -> Result<&Arc<Provisioner>, EngineError> {
        self.started.get().map(|s| &s.provisioner).ok_or_else(|| EngineError::NotReady("starting".into()))
    }

    pub(crate) fn stock(&self) -> Result<&Stock, EngineError> {
        self.started.get().map(|s| &s.stock).ok_or_else(|| EngineError::NotReady("starting".into()))
    }

    /// Repeats the work periodically until the engine closes.
    fn repeat<F>(self: &Arc<Self>, every: Duration, work: impl Fn(Arc<Self>) -> F + Send + 'static)
    where
        F: Future<Output = ()> + Send,
    {
        let inner = self.clone();
        self.tasks.spawn(async move {
            while tokio::time::timeout(every, inner.closing.cancelled()).await.is_err() {
                work(inner.clone()).await;
            }
        });
    }

    /// Retries failed destructions, and forgets old background runs and idle tenants.
    async fn upkeep(&self) {
        self.registry.retry().await;
        self.tenants.tenants().iter().for_each(|tenant| tenant.background.forget_old());
        self.tenants.forget_idle();
    }

    /// Stops contexts of one realm that were unused for too long.
    fn stop_idle(&self, realm: Realm, idle: Duration) {
        for tenancy in self.tenants.in_realm(realm) {
            for removed in tenancy.remove_idle(idle) {
                tracing::info!(context = removed.context.id, "an idle context is stopped");
                self.dismiss(&tenancy, removed, NoticeKind::Expired);
            }
        }
    }

    pub(crate) fn notify(&self, tenancy: &Tenancy, id: &str, what: NoticeKind) {
        self.notify_of(tenancy.tenant.tenant.clone(), tenancy.config().realm, id, what);
    }

    pub(crate) fn notify_of(&self, tenant: Tenant, realm: Realm, id: &str, what: NoticeKind) {
        // Sending fails if there is no subscriber, which is fine.
        let _ = self.notices.send(Notice { tenant, realm, id: id.into(), what, detail: None });
    }

    /// Sends a notice with further information.
    pub(crate) fn notify_with(&self, tenancy: &Tenancy, id: &str, what: NoticeKind, detail: &str) {
        let (tenant, realm) = (tenancy.tenant.tenant.clone(), tenancy.config().realm);
        let _ = self.notices.send(Notice { tenant, realm, id: id.into(), what, detail: Some(detail.into()) });
    }

    /// Sends the notice that a context was removed, and cancels its background runs so that the removal does not wait
    /// for them.
    pub(crate) fn context_removed(&self, tenancy: &Tenancy, removed: &Removed, why: NoticeKind) {
        self.notify(tenancy, &removed.context.id, why);
        tenancy.tenant.background.cancel_in(tenancy.config().realm, &removed.context.id);
    }

    /// Destroys a removed context without delaying the caller.
    pub(crate) fn dismiss(&self, tenancy: &Tenancy, removed: Removed, why: NoticeKind) {
        self.context_removed(tenancy, &removed, why);
        self.tasks.spawn(async move {
            let _ = ops::stop_context::finish(removed).await;
        });
    }

    /// Ends a removed context together with everything that runs in it, without delaying the caller.
    pub(crate) fn end_now(&self, tenancy: &Tenancy, removed: Removed, why: &'static str) {
        if let Some(sandbox) = removed.context.live_sandbox() {
            sandbox.guest.close(why);
        }
        tenancy.tenant.background.cancel_in(tenancy.config().realm, &removed.context.id);
        self.notify_with(tenancy, &removed.context.id, NoticeKind::Stopped, why);
        self.tasks.spawn(ops::stop_context::end(removed));
    }

    pub(crate) fn health(&self) -> Health {
        let state = match &*self.state.borrow() {
            _ if self.closing.is_cancelled() => "STOPPING",
            Readiness::Preparing(_) => "CREATING",
            Readiness::Ready => "READY",
            Readiness::Failed(_) => "FAILED",
        };
        let started = self.started.get();
        let pool = started.map(|s| s.stock.pool_health());
        Health {
            ready: state == "READY",
            state,
            pool_size: pool.as_ref().map_or(0, |pool| pool.total),
            pool_available: pool.as_ref().map_or(0, |pool| pool.available),
            pool_is_healthy: pool.is_some_and(|pool| pool.healthy),
            startup: started.map_or_else(|| self.born.elapsed(), |s| s.took),
        }
    }
}
