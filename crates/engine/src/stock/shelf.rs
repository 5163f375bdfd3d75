//! The bookkeeping of the stock: what is on each shelf, what should be there, and what to do about it. This module
//! starts no tasks and waits for nothing.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use proto::Language;
use sandbox::Backoff;
use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use crate::demand::{Demand, PoolBudget, Wish, allot};
use crate::op::{Realm, Size, Tenant};
use crate::provision::{FIRST_KERNEL, Shape};
use crate::registry::LiveSandbox;
use crate::tenancy::Tenancy;

/// Time after a sandbox was taken in which refills leave it the processor, if enough sandboxes are left on the shelf.
const LULL: Duration = Duration::from_millis(10);
/// Pause after a failed refill. It doubles with each further failure, up to [`LONGEST_PAUSE`].
const PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Interval between checks whether a shelf needs fewer sandboxes.
const TICK: Duration = Duration::from_secs(5);

/// Returns estimates of the memory of a ready sandbox and of the time to create one, until both are measured.
fn guess(kind: SandboxKind) -> (u64, Duration) {
    let (bytes, pace) = match kind.language {
        Language::Python => (16 << 20, Duration::from_millis(20)),
        Language::Javascript | Language::Typescript => (48 << 20, Duration::from_millis(150)),
    };
    if kind.browser { (bytes + (90 << 20), pace + Duration::from_millis(400)) } else { (bytes, pace) }
}

/// A sandbox in which no tenant's code has run. Dropping it destroys the sandbox.
pub(crate) struct ReadySandbox {
    pub(crate) id: String,
    pub(super) sandbox: Option<Arc<LiveSandbox>>,
    pub(super) born: Instant,
    /// True while the kernel runs the statement of the health check.
    pub(super) checking: bool,
    pub(super) healthy: bool,
    pub(super) bytes: Option<u64>,
    /// Notifies the stock when the sandbox dies.
    pub(super) _watch: AbortOnDropHandle<()>,
}

impl ReadySandbox {
    pub(super) fn is_fit(&self) -> bool {
        let lives = |sandbox: &Arc<LiveSandbox>| {
            let guest = &sandbox.guest;
            !guest.is_lost() && !guest.has_exited(FIRST_KERNEL) && !guest.browser_has_exited()
        };
        self.healthy && self.sandbox.as_ref().is_some_and(lives)
    }

    /// Hands the sandbox over to a context, which is then responsible for its end.
    pub(crate) fn leave(mut self) -> Option<Arc<LiveSandbox>> {
        self.sandbox.take()
    }
}

impl Drop for ReadySandbox {
    fn drop(&mut self) {
        if let Some(sandbox) = self.sandbox.take() {
            sandbox.dismiss("its session is over");
        }
    }
}

/// Identifies a shelf. All other properties of a sandbox follow from the tenant and the realm.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct ShelfKey {
    pub(super) tenant: Tenant,
    pub(super) realm: Realm,
    pub(super) kind: SandboxKind,
}

/// The properties of a sandbox that a context may choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct SandboxKind {
    pub(crate) size: Option<Size>,
    /// Language of its kernel.
    pub(crate) language: Language,
    /// True if a browser is started in it.
    pub(crate) browser: bool,
}

impl ShelfKey {
    pub(super) fn of(tenancy: &Tenancy, kind: SandboxKind) -> Self {
        let (tenant, config) = (tenancy.tenant.tenant.clone(), tenancy.config());
        Self { tenant, realm: config.realm, kind: SandboxKind { size: kind.size.or(config.default_size), ..kind } }
    }
}

pub(super) struct Shelf {
    /// Tenancy of the shelf. It also keeps the tenant, in whose groups these sandboxes are, from being forgotten.
    pub(super) tenancy: Arc<Tenancy>,
    pub(super) shape: Shape,
    pub(super) kind: SandboxKind,
    /// Number of sandboxes that the operator ordered.
    pub(super) least: usize,
    /// Number of sandboxes wanted without any demand.
    pub(super) usual: usize,
    /// Maximum number of sandboxes, however great the demand.
    pub(super) most: usize,
    /// Ready sandboxes, oldest first.
    pub(super) ready: VecDeque<ReadySandbox>,
    /// Number of refills that were begun, including those that still wait for their moment.
    pub(super) refills: usize,
    /// Number of refills that are creating their sandbox.
    pub(super) building: usize,
    /// Callers that take the sandboxes being created; never more than `building`.
    pub(super) waiting: VecDeque<oneshot::Sender<ReadySandbox>>,
    pub(super) demand: Demand,
    pub(super) last_taken: Instant,
    /// Average memory of one refill (`bytes`) and average time that it takes (`pace`).
    pub(super) bytes: u64,
    pub(super) pace: Duration,
    /// Delays refills after a failed one.
    pub(super) backoff: Backoff<Instant>,
}

impl Shelf {
    pub(super) fn new(tenancy: &Arc<Tenancy>, kind: SandboxKind) -> Self {
        let (now, (bytes, pace)) = (Instant::now(), guess(kind));
        Self {
            shape: Shape::of(tenancy, kind.size),
            tenancy: tenancy.clone(),
            kind,
            least: 0,
            usual: 0,
            most: if kind.browser { tenancy.config().browsers_ready } else { usize::MAX },
            ready: VecDeque::new(),
            refills: 0,
            building: 0,
            waiting: VecDeque::new(),
            demand: Demand::none(now),
            last_taken: now,
            bytes,
            pace,
            backoff: Backoff::new(PAUSE, LONGEST_PAUSE),
        }
    }

    /// Returns the age at which a ready sandbox is replaced, which is a little less than `session_ttl`.
    fn lifetime(&self) -> Duration {
        let ttl = self.tenancy.config().session_ttl;
        ttl - (ttl / 10).min(Duration::from_secs(60))
    }

    fn wish(&self, now: Instant) -> Wish {
        Wish { least: self.least, wish: self.demand.wish(now).max(self.usual).min(self.most), bytes: self.bytes }
    }

    fn is_over(&self, now: Instant) -> bool {
        let wish = self.wish(now);
        wish.least + wish.wish + self.refills + self.ready.len() == 0
    }

    fn young(&self, now: Instant) -> usize {
        let lifetime = self.lifetime();
        self.ready.iter().filter(|ready| now.duration_since(ready.born) < lifetime).count()
    }

    pub(super) fn take_ready(&mut self) -> Option<ReadySandbox> {
        self.take_where(ReadySandbox::is_fit)
    }

    fn take_where(&mut self, is_meant: impl Fn(&ReadySandbox) -> bool) -> Option<ReadySandbox> {
        let at = self.ready.iter().position(|ready| !ready.checking && is_meant(ready))?;
        self.ready.remove(at)
    }

    /// Hands the sandbox to the first caller that waits for one, or puts it on the shelf.
    pub(super) fn put(&mut self, mut ready: ReadySandbox) {
        while let Some(waiting) = self.waiting.pop_front() {
            match waiting.send(ready) {
                Ok(()) => return,
                Err(unwanted) => ready = unwanted,
            }
        }
        self.ready.push_back(ready);
    }

    /// Puts a sandbox that was created with this shape on the shelf if sandboxes of the shelf still have it. Otherwise
    /// the first waiting caller gets none.
    pub(super) fn put_if_fit(&mut self, ready: ReadySandbox, shape: &Shape) {
        if self.shape == *shape {
            self.put(ready);
        } else {
            self.waiting.pop_front();
        }
    }

    /// Takes over the rules that are in force for the tenancy. Ready sandboxes that do not fit them are destroyed.
    pub(super) fn renew(&mut self, tenancy: &Arc<Tenancy>) {
        let shape = Shape::of(tenancy, self.kind.size);
        if shape != self.shape {
            self.ready.clear();
        }
        (self.tenancy, self.shape) = (tenancy.clone(), shape);
    }

    /// Empties the shelf of a tenant that was removed, except for what the operator ordered.
    pub(super) fn close(&mut self) {
        if self.least + self.usual == 0 {
            self.ready.clear();
        }
        self.demand = Demand::none(Instant::now());
    }

    /// Records a failed refill. The first waiting caller gets no sandbox, and the next refill follows after a pause.
    pub(super) fn failed(&mut self, now: Instant) {
        self.waiting.pop_front();
        self.backoff.failed(now);
    }

    pub(super) fn learn(&mut self, took: Duration, bytes: Option<u64>) {
        self.pace = (self.pace * 3 + took) / 4;
        self.bytes = bytes.map_or(self.bytes, |bytes| (self.bytes * 3 + bytes) / 4);
        self.backoff.reset();
    }
}

#[derive(Default)]
pub(super) struct Shelves {
    pub(super) all: HashMap<ShelfKey, Shelf>,
    pub(super) refills: usize,
}

/// The actions to take now, and the time of the next check.
#[derive(Default)]
pub(super) struct StockPlan {
    pub(super) unwanted: Vec<ReadySandbox>,
    pub(super) refills: Vec<ShelfKey>,
    pub(super) wake: Option<Instant>,
}

impl Shelves {
    pub(super) fn plan(&mut self, now: Instant, room: PoolBudget, at_once: usize) -> StockPlan {
        let mut orders = StockPlan::default();
        for shelf in self.all.values_mut() {
            while let Some(unfit) = shelf.take_where(|ready| !ready.is_fit()) {
                tracing::info!(session = unfit.id, "a ready sandbox is gone");
                orders.unwanted.push(unfit);
            }
        }
        self.all.retain(|_, shelf| !shelf.is_over(now));
        let targets = self.targets(now, room);
        for (key, target) in &targets {
            let Some(shelf) = self.all.get_mut(key) else { continue };
            while shelf.ready.len() > *target
                && let Some(old) = shelf.take_where(|_| true)
            {
                tracing::debug!(session = old.id, "a ready sandbox is no longer needed, or replaced before it expires");
                orders.unwanted.push(old);
            }
            orders.look_again(shelf, now);
        }
        while self.refills < at_once
            && let Some(key) = self.neediest(&targets, now)
            && let Some(shelf) = self.all.get_mut(&key)
        {
            shelf.refills += 1;
            self.refills += 1;
            orders.refills.push(key);
        }
        orders
    }

    /// Returns how many sandboxes each shelf should have, most recently used shelf first after those that the operator
    /// ordered.
    pub(super) fn targets(&self, now: Instant, room: PoolBudget) -> Vec<(ShelfKey, usize)> {
        let mut shelves: Vec<(&ShelfKey, &Shelf)> = self.all.iter().collect();
        shelves.sort_by_key(|(_, shelf)| (shelf.least == 0, std::cmp::Reverse(shelf.last_taken)));
        let wishes: Vec<Wish> = shelves.iter().map(|(_, shelf)| shelf.wish(now)).collect();
        let given = allot(&wishes, room);
        shelves.into_iter().map(|(key, _)| key.clone()).zip(given).collect()
    }

    /// Returns the shelf with the smallest share of the sandboxes that it should have.
    fn neediest(&self, targets: &[(ShelfKey, usize)], now: Instant) -> Option<ShelfKey> {
        let needs = |(key, target): &(ShelfKey, usize)| {
            let shelf = self.all.get(key)?;
            let has = shelf.young(now) + shelf.refills;
            (has < *target && shelf.backoff.allows(now)).then(|| (has * 1000 / target, key.clone()))
        };
        targets.iter().filter_map(needs).min_by_key(|(filled, _)| *filled).map(|(_, key)| key)
    }

    /// Returns when `LULL` has passed since the last sandbox was taken. Returns `None` if it has passed already, or if
    /// too few sandboxes are left to wait for it.
    pub(super) fn lull(&self, key: &ShelfKey, room: PoolBudget) -> Option<Instant> {
        let (shelf, now) = (self.all.get(key)?, Instant::now());
        let target = self.targets(now, room).into_iter().find(|(of, _)| of == key)?.1;
        let lull = shelf.last_taken + LULL;
        (2 * shelf.young(now) >= target && lull > now).then_some(lull)
    }
}

impl StockPlan {
    fn look_again(&mut self, shelf: &Shelf, now: Instant) {
        let lifetime = shelf.lifetime();
        let expiries = shelf.ready.iter().map(|ready| ready.born + lifetime);
        // Falling demand lowers the target, so it is checked periodically. A target that cannot fall needs no check.
        let tick = (shelf.demand.wish(now) > shelf.least.max(shelf.usual)).then_some(now + TICK);
        let next = expiries.chain(shelf.backoff.retry_at()).filter(|at| *at > now).chain(tick).min();
        self.wake = [self.wake, next].into_iter().flatten().min();
    }
}
