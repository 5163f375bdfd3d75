//! The book of the stock: what lies on which shelf, what should, and what is to be done about it. Knows no task and waits for nothing.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use proto::Language;
use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use crate::demand::{Demand, PoolBudget, Wish, allot};
use crate::op::{Realm, Size, Tenant};
use crate::provision::{FIRST_KERNEL, Shape};
use crate::registry::LiveSandbox;
use crate::tenancy::Tenancy;

/// What was just taken is used at once: a refill leaves it the processor for so long, where enough are left.
const LULL: Duration = Duration::from_millis(10);
/// How often it is looked whether less is needed.
const TICK: Duration = Duration::from_secs(5);

/// Memory of a ready sandbox and the time to make one, until they are measured.
fn guess(kind: SandboxKind) -> (u64, Duration) {
    let (bytes, pace) = match kind.language {
        Language::Python => (16 << 20, Duration::from_millis(20)),
        Language::Javascript | Language::Typescript => (48 << 20, Duration::from_millis(150)),
    };
    if kind.browser { (bytes + (90 << 20), pace + Duration::from_millis(400)) } else { (bytes, pace) }
}

/// A sandbox nobody has used. Dropped, it is destroyed.
pub(crate) struct ReadySandbox {
    pub(crate) id: String,
    pub(super) place: Option<Arc<LiveSandbox>>,
    pub(super) born: Instant,
    /// Its interpreter runs the statement of the health check.
    pub(super) checking: bool,
    pub(super) healthy: bool,
    pub(super) bytes: Option<u64>,
    /// Tells the stock when it dies.
    pub(super) _watch: AbortOnDropHandle<()>,
}

impl ReadySandbox {
    pub(super) fn is_fit(&self) -> bool {
        let lives = |place: &Arc<LiveSandbox>| {
            let guest = &place.guest;
            !guest.is_lost() && !guest.has_exited(FIRST_KERNEL) && !guest.browser_has_exited()
        };
        self.healthy && self.place.as_ref().is_some_and(lives)
    }

    /// From here on it is a context's, and its end too.
    pub(crate) fn leave(mut self) -> Option<Arc<LiveSandbox>> {
        self.place.take()
    }
}

impl Drop for ReadySandbox {
    fn drop(&mut self) {
        if let Some(place) = self.place.take() {
            place.dismiss("its session is over");
        }
    }
}

/// What tells shelves apart. All else of a sandbox's shape follows from tenant and realm.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct ShelfKey {
    pub(super) tenant: Tenant,
    pub(super) realm: Realm,
    pub(super) kind: SandboxKind,
}

/// What of a sandbox a context may choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct SandboxKind {
    pub(crate) size: Option<Size>,
    /// Of its interpreter.
    pub(crate) language: Language,
    /// With a browser that was started.
    pub(crate) browser: bool,
}

impl ShelfKey {
    pub(super) fn of(tenancy: &Tenancy, kind: SandboxKind) -> Self {
        let (tenant, config) = (tenancy.tenant.tenant.clone(), tenancy.config());
        Self { tenant, realm: config.realm, kind: SandboxKind { size: kind.size.or(config.default_size), ..kind } }
    }
}

pub(super) struct Shelf {
    /// Also keeps the tenant, whose groups these sandboxes are in, from being forgotten.
    pub(super) tenancy: Arc<Tenancy>,
    pub(super) shape: Shape,
    pub(super) kind: SandboxKind,
    /// Ordered by the operator.
    pub(super) least: usize,
    /// Wished for without demand.
    pub(super) usual: usize,
    /// However great the demand.
    pub(super) most: usize,
    /// The oldest first.
    pub(super) ready: VecDeque<ReadySandbox>,
    /// Refills that were begun, also those that still wait for their moment.
    pub(super) refills: usize,
    /// Of these, sandboxes being made.
    pub(super) building: usize,
    /// Who takes what is being made; never more than that.
    pub(super) waiting: VecDeque<oneshot::Sender<ReadySandbox>>,
    pub(super) demand: Demand,
    pub(super) last_taken: Instant,
    /// Of one refill.
    pub(super) bytes: u64,
    pub(super) pace: Duration,
    /// After a failure.
    pub(super) pause: Duration,
    pub(super) retry: Instant,
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
            pause: Duration::ZERO,
            retry: now,
        }
    }

    /// How long a session is used: it is replaced a little before its time is over.
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
        self.ready.iter().filter(|session| now.duration_since(session.born) < lifetime).count()
    }

    pub(super) fn take_ready(&mut self) -> Option<ReadySandbox> {
        let at = self.ready.iter().position(|session| !session.checking && session.is_fit())?;
        self.ready.remove(at)
    }

    fn take_where(&mut self, unwanted: impl Fn(&ReadySandbox) -> bool) -> Option<ReadySandbox> {
        let at = self.ready.iter().position(|session| !session.checking && unwanted(session))?;
        self.ready.remove(at)
    }

    /// To who waits for it, else to the others.
    pub(super) fn put(&mut self, mut session: ReadySandbox) {
        while let Some(waiting) = self.waiting.pop_front() {
            match waiting.send(session) {
                Ok(()) => return,
                Err(unwanted) => session = unwanted,
            }
        }
        self.ready.push_back(session);
    }

    /// Who waited for it does without; the next is tried after a pause.
    pub(super) fn failed(&mut self, now: Instant) {
        self.waiting.pop_front();
        self.pause = (self.pause * 2).clamp(Duration::from_secs(1), Duration::from_secs(60));
        self.retry = now + self.pause;
    }

    pub(super) fn learn(&mut self, took: Duration, bytes: Option<u64>) {
        self.pace = (self.pace * 3 + took) / 4;
        self.bytes = bytes.map_or(self.bytes, |bytes| (self.bytes * 3 + bytes) / 4);
        self.pause = Duration::ZERO;
    }
}

#[derive(Default)]
pub(super) struct Shelves {
    pub(super) all: HashMap<ShelfKey, Shelf>,
    pub(super) refills: usize,
}

/// What is to be done now, and when to look again.
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
            while let Some(unfit) = shelf.take_where(|session| !session.is_fit()) {
                tracing::info!(session = unfit.id, "a session is gone");
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
                tracing::debug!(session = old.id, "a session is no longer needed, or replaced before it expires");
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

    /// How many each shelf should have; the most recently used first.
    pub(super) fn targets(&self, now: Instant, room: PoolBudget) -> Vec<(ShelfKey, usize)> {
        let mut shelves: Vec<(&ShelfKey, &Shelf)> = self.all.iter().collect();
        shelves.sort_by_key(|(_, shelf)| (shelf.least == 0, std::cmp::Reverse(shelf.last_taken)));
        let wishes: Vec<Wish> = shelves.iter().map(|(_, shelf)| shelf.wish(now)).collect();
        let given = allot(&wishes, room);
        shelves.into_iter().map(|(key, _)| key.clone()).zip(given).collect()
    }

    /// The shelf that has the least of what it should have.
    fn neediest(&self, targets: &[(ShelfKey, usize)], now: Instant) -> Option<ShelfKey> {
        let needs = |(key, target): &(ShelfKey, usize)| {
            let shelf = self.all.get(key)?;
            let has = shelf.young(now) + shelf.refills;
            (has < *target && shelf.retry <= now).then(|| (has * 1000 / target, key.clone()))
        };
        targets.iter().filter_map(needs).min_by_key(|(filled, _)| *filled).map(|(_, key)| key)
    }

    /// When a moment has passed since the last was taken; none if too few are left to wait for that.
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
        let expiries = shelf.ready.iter().map(|session| session.born + lifetime);
        // Demand that falls asks for less; what never changes is not looked at.
        let tick = (shelf.demand.wish(now) > shelf.least.max(shelf.usual)).then_some(now + TICK);
        let next = expiries.chain([shelf.retry]).filter(|at| *at > now).chain(tick).min();
        self.wake = [self.wake, next].into_iter().flatten().min();
    }
}
