//! The stock: ready sandboxes with a started and warmed kernel, so that a new context need not wait for one.
//!
//! There is one shelf for each tenant, realm, size and language in use, with and without a started browser, because a
//! sandbox cannot be moved into other groups later. The number of sandboxes on a shelf follows from its demand
//! (`demand`). Refills have a lower priority than everything that callers wait for. No tenant's code has run in a ready
//! sandbox, and it never returns from the context that takes it. The `agentrun` document calls it a session.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use proto::Language;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use crate::config::EngineConfig;
use crate::demand::PoolBudget;
use crate::guest::lock;
use crate::provision::{FIRST_KERNEL, Provisioner, Shape, rehearse};
use crate::registry::{LiveSandbox, SandboxFailure};
use crate::tenancy::{Tenancies, Tenancy};

mod shelf;

pub(crate) use shelf::SandboxKind;
use shelf::{ReadySandbox, Shelf, ShelfKey, Shelves};

const START_ATTEMPTS: u32 = 3;
/// Maximum time for which a refill yields to callers that wait for a sandbox.
const REFILL_WAIT: Duration = Duration::from_millis(100);
/// Number of ready sandboxes with a JavaScript kernel beside those that the operator ordered, if the budget allows it.
const JAVASCRIPT: usize = 1;

#[derive(Clone)]
pub(crate) struct Stock {
    shared: Arc<StockInner>,
}

struct StockInner {
    provisioner: Arc<Provisioner>,
    config: Arc<EngineConfig>,
    /// Shelf of the ready sandboxes that the operator ordered.
    ordered: ShelfKey,
    shape: Shape,
    /// Number of ready sandboxes that the operator ordered.
    size: usize,
    shelves: Mutex<Shelves>,
    /// Notified when a ready sandbox was taken, created or lost.
    changed: Notify,
    tasks: TaskTracker,
    closing: CancellationToken,
    taken: TakenCounters,
}

/// Counts the ways in which new contexts got their sandboxes since the engine started.
#[derive(Default)]
struct TakenCounters {
    ready: AtomicU64,
    handed_over: AtomicU64,
    made: AtomicU64,
}

pub(crate) struct PoolHealth {
    pub(crate) total: usize,
    pub(crate) available: usize,
    pub(crate) healthy: bool,
}

/// Ready sandboxes of all tenants together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ready {
    pub wanted: usize,
    pub available: usize,
    pub memory_bytes: u64,
    /// Number of new contexts that took a ready sandbox (`taken`), that got one which was already being created
    /// (`handed_over`), and for which one had to be created (`made`).
    pub taken: u64,
    pub handed_over: u64,
    pub made: u64,
}

impl Stock {
    /// Creates an empty stock with a shelf for the sandboxes that the operator ordered, and where they are available
    /// one for JavaScript and one with browsers.
    pub(crate) fn new(
        provisioner: Arc<Provisioner>,
        config: Arc<EngineConfig>,
        tenancy: &Arc<Tenancy>,
        tasks: TaskTracker,
        closing: CancellationToken,
    ) -> Self {
        let realm = tenancy.config();
        let size = realm.ordered_sandboxes();
        let python = SandboxKind { size: None, language: Language::Python, browser: false };
        let ordered = ShelfKey::of(tenancy, python);
        let mut shelves = Shelves::default();
        if size > 0 {
            shelves.all.insert(ordered.clone(), Shelf { least: size, ..Shelf::new(tenancy, python) });
            let mut usual = |kind: SandboxKind, usual: usize| {
                let shelf = Shelf { usual, ..Shelf::new(tenancy, kind) };
                shelves.all.insert(ShelfKey::of(tenancy, kind), shelf);
            };
            if provisioner.runtimes.runs(Language::Javascript) {
                usual(SandboxKind { language: Language::Javascript, ..python }, JAVASCRIPT);
            }
            if realm.browser_first && provisioner.browses(realm) {
                usual(SandboxKind { browser: true, ..python }, realm.browsers_ready);
            }
        }
        let shared = StockInner {
            provisioner,
            config,
            ordered,
            shape: Shape::of(tenancy, None),
            size,
            shelves: Mutex::new(shelves),
            changed: Notify::new(),
            tasks,
            closing,
            taken: TakenCounters::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    pub(crate) fn size(&self) -> usize {
        self.shared.size
    }

    /// Takes a ready sandbox for a context of this kind, or waits for one that is already being created. `None` means
    /// that the caller has to create a sandbox.
    pub(crate) async fn take(&self, tenancy: &Arc<Tenancy>, kind: SandboxKind) -> Option<ReadySandbox> {
        let shared = &self.shared;
        // A call does not wait for a sandbox with a browser, because a browser started in any other sandbox is ready
        // just as soon.
        if kind.browser
            && let Ok(ready) = self.take_ready(tenancy, kind, |_| ())
        {
            return Some(ready);
        }
        let coming = self.take_ready(tenancy, SandboxKind { browser: false, ..kind }, |shelf| {
            shelf.waiting.retain(|waiting| !waiting.is_closed());
            (shelf.building > shelf.waiting.len()).then(|| {
                let (sender, coming) = oneshot::channel();
                shelf.waiting.push_back(sender);
                coming
            })
        });
        let coming = match coming {
            Ok(ready) => return Some(ready),
            Err(coming) => coming,
        };
        let _waiting = shared.provisioner.caller_waits();
        let ready = match coming {
            // A sandbox that is already being created is ready sooner than a new one, unless it fails.
            Some(coming) => coming.await.ok(),
            None => None,
        };
        let how = if ready.is_some() { &shared.taken.handed_over } else { &shared.taken.made };
        how.fetch_add(1, Ordering::Relaxed);
        ready
    }

    /// Takes a ready sandbox from the shelf, or returns the result of `otherwise` if there is none.
    fn take_ready<T>(
        &self,
        tenancy: &Arc<Tenancy>,
        kind: SandboxKind,
        otherwise: impl FnOnce(&mut Shelf) -> T,
    ) -> Result<ReadySandbox, T> {
        let (shared, now) = (&self.shared, Instant::now());
        let at_once = self.at_once();
        let mut shelves = lock(&shared.shelves);
        let shelf = shelves.all.entry(ShelfKey::of(tenancy, kind)).or_insert_with(|| Shelf::new(tenancy, kind));
        // A tenant that was removed and added again is another one.
        if !Arc::ptr_eq(&shelf.tenancy, tenancy) {
            shelf.renew(tenancy);
        }
        shelf.demand.took(now, shelf.pace / at_once as u32);
        shelf.last_taken = now;
        shared.changed.notify_one();
        match shelf.take_ready() {
            Some(ready) => {
                shared.taken.ready.fetch_add(1, Ordering::Relaxed);
                Ok(ready)
            }
            None => Err(otherwise(shelf)),
        }
    }

    /// Adapts the shelves to the rules in force, and destroys the ready sandboxes that do not fit them.
    pub(crate) fn renew(&self, tenants: &Tenancies) {
        for (key, shelf) in &mut lock(&self.shared.shelves).all {
            match tenants.known(&key.tenant, key.realm) {
                Some(tenancy) => shelf.renew(&tenancy),
                None => shelf.close(),
            }
        }
        self.shared.changed.notify_one();
    }

    fn at_once(&self) -> usize {
        self.shared.config.refills_at_once.max(1)
    }

    fn room(&self) -> PoolBudget {
        PoolBudget { count: self.shared.config.ready_max, bytes: self.shared.config.ready_memory_bytes }
    }

    /// Returns the state of the ready sandboxes that the operator ordered, which the `agentrun` document describes as a
    /// pool of fixed size.
    pub(crate) fn pool_health(&self) -> PoolHealth {
        let (shelves, size) = (lock(&self.shared.shelves), self.shared.size);
        let ready = shelves.all.get(&self.shared.ordered).map(|shelf| &shelf.ready);
        let total = ready.map_or(0, VecDeque::len).min(size);
        let available = ready.map_or(0, |ready| ready.iter().filter(|s| s.is_fit()).count()).min(size);
        PoolHealth { total, available, healthy: available == total && (available > 0 || size == 0) }
    }

    pub(crate) fn count(&self) -> Ready {
        let taken = |how: &AtomicU64| how.load(Ordering::Relaxed);
        let TakenCounters { ready, handed_over, made } = &self.shared.taken;
        let shelves = lock(&self.shared.shelves);
        let all = || shelves.all.values().flat_map(|shelf| shelf.ready.iter().map(move |ready| (shelf, ready)));
        Ready {
            wanted: shelves.targets(Instant::now(), self.room()).iter().map(|(_, target)| target).sum(),
            available: all().filter(|(_, ready)| ready.is_fit()).count(),
            memory_bytes: all().map(|(shelf, ready)| ready.bytes.unwrap_or(shelf.bytes)).sum(),
            taken: taken(ready),
            handed_over: taken(handed_over),
            made: taken(made),
        }
    }
}

/// These methods start the stock: the ordered sandboxes are created and checked before the first call.
impl Stock {
    /// Creates the ordered sandboxes without kernels.
    pub(crate) async fn first_sandboxes(&self) -> Vec<Result<Arc<LiveSandbox>, SandboxFailure>> {
        let create = |shared: Arc<StockInner>| async move { shared.provisioner.create(&shared.shape, None).await };
        let creating: Vec<_> = (0..self.shared.size).map(|_| tokio::spawn(create(self.shared.clone()))).collect();
        let mut created = Vec::new();
        for sandbox in creating {
            created.push(sandbox.await.unwrap_or_else(|_| Err(panicked())));
        }
        created
    }

    /// Starts kernels in these sandboxes, all at the same time, with three attempts each. `created` is called for each
    /// sandbox in order.
    pub(crate) async fn fill(
        &self,
        sandboxes: Vec<Result<Arc<LiveSandbox>, SandboxFailure>>,
        mut created: impl FnMut(usize, &str),
    ) -> Result<(), SandboxFailure> {
        let building: Vec<_> = sandboxes
            .into_iter()
            .map(|sandbox| {
                let stock = self.clone();
                self.shared.tasks.spawn(async move { stock.build_with_retries(Some(sandbox)).await })
            })
            .collect();
        let mut failed = None;
        for (number, task) in building.into_iter().enumerate() {
            match task.await.unwrap_or_else(|_| Err(panicked())) {
                Ok(ready) => {
                    created(number + 1, &ready.id);
                    self.put_ordered(ready);
                }
                Err(failure) => failed = Some(failure),
            }
        }
        failed.map_or(Ok(()), Err)
    }

    async fn build_with_retries(
        &self,
        mut first: Option<Result<Arc<LiveSandbox>, SandboxFailure>>,
    ) -> Result<ReadySandbox, SandboxFailure> {
        let mut last = SandboxFailure::new("not tried");
        let StockInner { provisioner, shape, .. } = &*self.shared;
        for attempt in 1..=START_ATTEMPTS {
            let sandbox = match first.take() {
                Some(sandbox) => sandbox,
                None => provisioner.create(shape, Some(Language::Python)).await,
            };
            let started = match sandbox {
                Ok(sandbox) => provisioner.first_kernel(sandbox, Language::Python).await,
                Err(failure) => Err(failure),
            };
            match started {
                Ok(sandbox) => return Ok(self.ready_sandbox(sandbox)),
                Err(failure) => {
                    tracing::warn!(attempt, why = failure.log, "a ready sandbox could not be created");
                    last = failure;
                }
            }
        }
        Err(last)
    }

    fn put_ordered(&self, ready: ReadySandbox) {
        if let Some(shelf) = lock(&self.shared.shelves).all.get_mut(&self.shared.ordered) {
            shelf.put(ready);
        }
    }

    /// Checks the ordered sandboxes and replaces those that fail, up to three times.
    pub(crate) async fn check_and_repair(&self) -> Result<(), SandboxFailure> {
        for _ in 0..START_ATTEMPTS {
            if self.check().await {
                return Ok(());
            }
            let missing = {
                let mut shelves = lock(&self.shared.shelves);
                let Some(shelf) = shelves.all.get_mut(&self.shared.ordered) else { return Ok(()) };
                shelf.ready.retain(ReadySandbox::is_fit);
                self.shared.size - shelf.ready.len().min(self.shared.size)
            };
            for _ in 0..missing {
                let ready = self.build_with_retries(None).await?;
                self.put_ordered(ready);
            }
        }
        if self.check().await { Ok(()) } else { Err(SandboxFailure::new("sessions keep failing their health check")) }
    }
}

impl Stock {
    /// Keeps the shelves filled with young and healthy sandboxes until the engine closes.
    pub(crate) async fn keep(self) {
        let shared = &self.shared;
        let mut next_check = Instant::now() + shared.config.health_interval;
        while !shared.closing.is_cancelled() {
            let orders = lock(&shared.shelves).plan(Instant::now(), self.room(), self.at_once());
            drop(orders.unwanted);
            for key in orders.refills {
                shared.tasks.spawn(self.clone().refill(key));
            }
            let wake = orders.wake.unwrap_or(next_check).min(next_check);
            tokio::select! {
                () = shared.closing.cancelled() => return,
                () = shared.changed.notified() => {}
                () = tokio::time::sleep_until(wake) => {}
            }
            if Instant::now() >= next_check {
                let stock = self.clone();
                shared.tasks.spawn(async move { stock.check().await });
                next_check = Instant::now() + shared.config.health_interval;
            }
        }
    }

    async fn refill(self, key: ShelfKey) {
        let mut refill = Refill { stock: &self, key: &key, builds: false };
        refill.wait_for_lull().await;
        if self.shared.closing.is_cancelled() {
            return;
        }
        let Some((shape, kind)) = refill.begin() else { return };
        let begun = Instant::now();
        match refill.build(&shape, kind).await {
            Ok(ready) => {
                let took = begun.elapsed();
                refill.done(|shelf| {
                    shelf.learn(took, ready.bytes);
                    shelf.put_if_fit(ready, &shape);
                });
            }
            Err(why) => {
                // A creation that a shutdown interrupts has not failed.
                if !self.shared.closing.is_cancelled() {
                    tracing::warn!(why, "a ready sandbox could not be created; trying again");
                }
                refill.done(|shelf| shelf.failed(Instant::now()));
            }
        }
    }

    /// Turns a live sandbox into a ready one. A task notifies the stock if the sandbox dies.
    fn ready_sandbox(&self, sandbox: Arc<LiveSandbox>) -> ReadySandbox {
        let (shared, guest) = (self.shared.clone(), sandbox.guest.clone());
        let watch = self.shared.tasks.spawn(async move {
            guest.lost_or_exited(FIRST_KERNEL).await;
            shared.changed.notify_one();
        });
        ReadySandbox {
            id: format!("session-{}", uuid::Uuid::new_v4().simple()),
            sandbox: Some(sandbox),
            born: Instant::now(),
            checking: false,
            healthy: true,
            bytes: None,
            _watch: AbortOnDropHandle::new(watch),
        }
    }

    /// Runs a statement in each ready sandbox, one after the other, and returns whether all are healthy. `keep`
    /// replaces those that are not.
    async fn check(&self) -> bool {
        let all_ready: Vec<(ShelfKey, String)> = {
            let shelves = lock(&self.shared.shelves);
            let of =
                |(key, shelf): (&ShelfKey, &Shelf)| shelf.ready.iter().map(|s| (key.clone(), s.id.clone())).collect();
            shelves.all.iter().flat_map::<Vec<_>, _>(of).collect()
        };
        let mut all = true;
        for (key, id) in all_ready {
            let sandbox = self.with(&key, &id, |ready| {
                ready.checking = true;
                ready.sandbox.clone()
            });
            let Some(sandbox) = sandbox.flatten() else { continue };
            let result = rehearse(&sandbox, key.kind.language).await;
            if let Err(why) = &result {
                tracing::warn!(session = id, why, "a ready sandbox failed its health check");
                all = false;
            }
            let bytes = sandbox.memory_bytes().await;
            self.with(&key, &id, |ready| {
                (ready.checking, ready.healthy, ready.bytes) = (false, result.is_ok(), bytes);
            });
        }
        if !all {
            self.shared.changed.notify_one();
        }
        all
    }

    fn with<T>(&self, key: &ShelfKey, id: &str, act: impl FnOnce(&mut ReadySandbox) -> T) -> Option<T> {
        let mut shelves = lock(&self.shared.shelves);
        shelves.all.get_mut(key)?.ready.iter_mut().find(|ready| ready.id == id).map(act)
    }
}

/// A refill of a shelf with one sandbox. Dropping it removes it from the counts of the shelf.
struct Refill<'a> {
    stock: &'a Stock,
    key: &'a ShelfKey,
    builds: bool,
}

impl Refill<'_> {
    /// Waits until no caller waits and, while at least half of the shelf is left, until `LULL` has passed since the
    /// last sandbox was taken. It waits no longer than `REFILL_WAIT`.
    async fn wait_for_lull(&self) {
        let shared = &self.stock.shared;
        let latest = Instant::now() + REFILL_WAIT;
        shared.provisioner.yield_to_callers(REFILL_WAIT).await;
        let room = self.stock.room();
        let lull = || lock(&shared.shelves).lull(self.key, room).filter(|lull| *lull < latest);
        while let Some(lull) = lull() {
            tokio::time::sleep_until(lull).await;
            shared.provisioner.yield_to_callers(latest.saturating_duration_since(Instant::now())).await;
        }
    }

    fn begin(&mut self) -> Option<(Shape, SandboxKind)> {
        let mut shelves = lock(&self.stock.shared.shelves);
        let shelf = shelves.all.get_mut(self.key)?;
        shelf.building += 1;
        self.builds = true;
        Some((shelf.shape.clone(), shelf.kind))
    }

    async fn build(&self, shape: &Shape, kind: SandboxKind) -> Result<ReadySandbox, String> {
        let (provisioner, language) = (&self.stock.shared.provisioner, kind.language);
        let sandbox = provisioner.create(shape, Some(language)).await.map_err(|failure| failure.log)?;
        let sandbox = provisioner.first_kernel(sandbox, language).await.map_err(|failure| failure.log)?;
        let mut ready = self.stock.ready_sandbox(sandbox.clone());
        if kind.browser {
            provisioner.start_browser(&sandbox).await.map_err(|failure| failure.log)?;
        }
        // A caller that waits for the sandbox warms it with its first cell.
        if !self.is_waited_for() {
            rehearse(&sandbox, language).await?;
            ready.bytes = sandbox.memory_bytes().await;
        }
        Ok(ready)
    }

    fn is_waited_for(&self) -> bool {
        let shelves = lock(&self.stock.shared.shelves);
        shelves.all.get(self.key).is_some_and(|shelf| !shelf.waiting.is_empty())
    }

    fn done(mut self, then: impl FnOnce(&mut Shelf)) {
        let mut shelves = lock(&self.stock.shared.shelves);
        if let Some(shelf) = shelves.all.get_mut(self.key) {
            shelf.building -= usize::from(std::mem::take(&mut self.builds));
            then(shelf);
        }
    }
}

impl Drop for Refill<'_> {
    fn drop(&mut self) {
        let mut shelves = lock(&self.stock.shared.shelves);
        shelves.refills -= 1;
        if let Some(shelf) = shelves.all.get_mut(self.key) {
            shelf.refills -= 1;
            if self.builds {
                shelf.building -= 1;
                shelf.waiting.pop_front();
            }
        }
        drop(shelves);
        self.stock.shared.changed.notify_one();
    }
}

fn panicked() -> SandboxFailure {
    SandboxFailure::new("making a session was given up")
}
