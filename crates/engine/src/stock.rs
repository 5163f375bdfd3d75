//! What waits ready: sandboxes with a started and warmed interpreter, so that a new context need not wait for one.
//!
//! Each tenant, tool set, size and language in use has a shelf of its own: a sandbox cannot be moved into other groups later. How
//! many lie there follows from demand (`demand`); refills go one after the other, behind everybody who waits. A session (the
//! word of the `agentrun` document) is made here, in which no code of anybody's has run, and leaves for good with the context that
//! takes it: nothing turns a used sandbox into a session.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use proto::{Deadline, FromGuest, Language, RunStatus, ToGuest};
use sandbox::Limits;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use crate::config::EngineConfig;
use crate::demand::{Demand, Room, Wish, allot};
use crate::guest::{Answer, lock};
use crate::holdings::Holdings;
use crate::live::{Failure, Place};
use crate::maker::{FIRST_KERNEL, Maker, Shape};
use crate::op::{Realm, Tenant};

const CHECK_DEADLINE: Duration = Duration::from_secs(5);
const START_ATTEMPTS: u32 = 3;
/// A refill waits no longer for a moment in which nobody waits.
const POSTPONED: Duration = Duration::from_millis(100);
/// What was just taken is used at once: a refill leaves it the processor for so long, where enough are left.
const LULL: Duration = Duration::from_millis(10);
/// How often it is looked whether less is needed.
const TICK: Duration = Duration::from_secs(5);
/// Of the JavaScript shelf beside the sessions of the operator, as long as there is room.
const JAVASCRIPT: usize = 1;

/// Leaves nothing behind in the interpreter: an expression would be remembered as the last value.
fn statement(language: Language) -> &'static str {
    match language {
        Language::Python => "pass",
        Language::Javascript | Language::Typescript => ";",
    }
}

/// Memory of a ready sandbox and the time to make one, until they are measured.
fn guess(language: Language) -> (u64, Duration) {
    match language {
        Language::Python => (16 << 20, Duration::from_millis(20)),
        Language::Javascript | Language::Typescript => (48 << 20, Duration::from_millis(150)),
    }
}

/// A sandbox nobody has used. Dropped, it is destroyed.
pub(crate) struct Session {
    pub(crate) id: String,
    place: Option<Arc<Place>>,
    born: Instant,
    /// Its interpreter runs the statement of the health check.
    checking: bool,
    healthy: bool,
    bytes: Option<u64>,
    /// Tells the stock when it dies.
    _watch: AbortOnDropHandle<()>,
}

impl Session {
    fn is_fit(&self) -> bool {
        let lives = |place: &Arc<Place>| !place.guest.is_lost() && !place.guest.has_exited(FIRST_KERNEL);
        self.healthy && self.place.as_ref().is_some_and(lives)
    }

    /// From here on it is a context's, and its end too.
    pub(crate) fn leave(mut self) -> Option<Arc<Place>> {
        self.place.take()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if let Some(place) = self.place.take() {
            place.dismiss("its session is over");
        }
    }
}

/// What tells shelves apart. All else of a sandbox's shape follows from tenant and realm.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    tenant: Tenant,
    realm: Realm,
    memory_bytes: u64,
    cpu_millis: u32,
    language: Language,
}

impl Key {
    fn of(holdings: &Holdings, limits: &Limits, language: Language) -> Self {
        let Limits { memory_bytes, cpu_millis, .. } = *limits;
        let (tenant, realm) = (holdings.tenant.tenant.clone(), holdings.config().realm);
        Self { tenant, realm, memory_bytes, cpu_millis, language }
    }
}

struct Shelf {
    /// Also keeps the tenant, whose groups these sandboxes are in, from being forgotten.
    holdings: Arc<Holdings>,
    shape: Shape,
    language: Language,
    /// Ordered by the operator; and wished for without demand.
    least: usize,
    usual: usize,
    /// The oldest first.
    ready: VecDeque<Session>,
    /// Refills that were begun, also those that still wait for their moment.
    refills: usize,
    /// Of these, sandboxes being made.
    building: usize,
    /// Who takes what is being made; never more than that.
    waiting: VecDeque<oneshot::Sender<Session>>,
    demand: Demand,
    last_taken: Instant,
    /// Of one refill.
    bytes: u64,
    pace: Duration,
    /// After a failure.
    pause: Duration,
    retry: Instant,
}

impl Shelf {
    fn new(holdings: &Arc<Holdings>, limits: Limits, language: Language) -> Self {
        let (now, (bytes, pace)) = (Instant::now(), guess(language));
        Self {
            shape: Shape::of(holdings, limits),
            holdings: holdings.clone(),
            language,
            least: 0,
            usual: 0,
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
        let ttl = self.holdings.config().session_ttl;
        ttl - (ttl / 10).min(Duration::from_secs(60))
    }

    fn wish(&self, now: Instant) -> Wish {
        Wish { least: self.least, wish: self.demand.wish(now).max(self.usual), bytes: self.bytes }
    }

    fn is_over(&self, now: Instant) -> bool {
        let wish = self.wish(now);
        wish.least + wish.wish + self.refills + self.ready.len() == 0
    }

    fn young(&self, now: Instant) -> usize {
        let lifetime = self.lifetime();
        self.ready.iter().filter(|session| now.duration_since(session.born) < lifetime).count()
    }

    fn take_ready(&mut self) -> Option<Session> {
        let at = self.ready.iter().position(|session| !session.checking && session.is_fit())?;
        self.ready.remove(at)
    }

    fn take_where(&mut self, unwanted: impl Fn(&Session) -> bool) -> Option<Session> {
        let at = self.ready.iter().position(|session| !session.checking && unwanted(session))?;
        self.ready.remove(at)
    }

    /// To who waits for it, else to the others.
    fn put(&mut self, mut session: Session) {
        while let Some(waiting) = self.waiting.pop_front() {
            match waiting.send(session) {
                Ok(()) => return,
                Err(unwanted) => session = unwanted,
            }
        }
        self.ready.push_back(session);
    }

    fn learn(&mut self, took: Duration, bytes: Option<u64>) {
        self.pace = (self.pace * 3 + took) / 4;
        self.bytes = bytes.map_or(self.bytes, |bytes| (self.bytes * 3 + bytes) / 4);
        self.pause = Duration::ZERO;
    }
}

#[derive(Default)]
struct Shelves {
    all: HashMap<Key, Shelf>,
    refills: usize,
}

/// What is to be done now, and when to look again.
#[derive(Default)]
struct Orders {
    unwanted: Vec<Session>,
    refills: Vec<Key>,
    wake: Option<Instant>,
}

impl Shelves {
    fn plan(&mut self, now: Instant, room: Room, at_once: usize) -> Orders {
        let mut orders = Orders::default();
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
            orders.look_again(shelf, *target, now);
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
    fn targets(&self, now: Instant, room: Room) -> Vec<(Key, usize)> {
        let mut shelves: Vec<(&Key, &Shelf)> = self.all.iter().collect();
        shelves.sort_by_key(|(_, shelf)| (shelf.least == 0, std::cmp::Reverse(shelf.last_taken)));
        let wishes: Vec<Wish> = shelves.iter().map(|(_, shelf)| shelf.wish(now)).collect();
        let given = allot(&wishes, room);
        shelves.into_iter().map(|(key, _)| key.clone()).zip(given).collect()
    }

    /// The shelf that has the least of what it should have.
    fn neediest(&self, targets: &[(Key, usize)], now: Instant) -> Option<Key> {
        let needs = |(key, target): &(Key, usize)| {
            let shelf = self.all.get(key)?;
            let has = shelf.young(now) + shelf.refills;
            (has < *target && shelf.retry <= now).then(|| (has * 1000 / target, key.clone()))
        };
        targets.iter().filter_map(needs).min_by_key(|(filled, _)| *filled).map(|(_, key)| key)
    }
}

impl Orders {
    fn look_again(&mut self, shelf: &Shelf, target: usize, now: Instant) {
        let lifetime = shelf.lifetime();
        let expiries = shelf.ready.iter().map(|session| session.born + lifetime);
        let tick = (target > shelf.least || shelf.wish(now).wish > shelf.usual).then_some(now + TICK);
        let next = expiries.chain([shelf.retry]).filter(|at| *at > now).chain(tick).min();
        self.wake = [self.wake, next].into_iter().flatten().min();
    }
}

#[derive(Clone)]
pub(crate) struct Stock {
    shared: Arc<Shared>,
}

struct Shared {
    maker: Arc<Maker>,
    config: Arc<EngineConfig>,
    /// The shelf of the sessions that the operator ordered.
    ordered: Key,
    size: usize,
    shelves: Mutex<Shelves>,
    /// Something changed: a session was taken, made or lost.
    changed: Notify,
    tasks: TaskTracker,
    closing: CancellationToken,
    taken: Taken,
}

/// How new contexts came to their sandboxes, since the engine began.
#[derive(Default)]
struct Taken {
    ready: AtomicU64,
    handed_over: AtomicU64,
    made: AtomicU64,
}

pub(crate) struct Sessions {
    pub(crate) there: usize,
    pub(crate) available: usize,
    pub(crate) healthy: bool,
}

/// What waits ready, of all tenants together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ready {
    pub wanted: usize,
    pub available: usize,
    pub memory_bytes: u64,
    /// New contexts that took one, that got one which was just being made, and for which one had to be made.
    pub taken: u64,
    pub handed_over: u64,
    pub made: u64,
}

impl Stock {
    /// Empty; with a shelf for the sessions of the operator, and one beside it for JavaScript.
    pub(crate) fn new(
        maker: Arc<Maker>,
        config: Arc<EngineConfig>,
        holdings: &Arc<Holdings>,
        tasks: TaskTracker,
        closing: CancellationToken,
    ) -> Self {
        let realm = holdings.config();
        let (size, limits) = (realm.sessions(), realm.limits_of(None));
        let ordered = Key::of(holdings, &limits, Language::Python);
        let mut shelves = Shelves::default();
        if size > 0 {
            let shelf = Shelf { least: size, ..Shelf::new(holdings, limits, Language::Python) };
            shelves.all.insert(ordered.clone(), shelf);
            if maker.runtimes.runs(Language::Javascript) {
                let shelf = Shelf { usual: JAVASCRIPT, ..Shelf::new(holdings, limits, Language::Javascript) };
                shelves.all.insert(Key { language: Language::Javascript, ..ordered.clone() }, shelf);
            }
        }
        let shared = Shared {
            maker,
            config,
            ordered,
            size,
            shelves: Mutex::new(shelves),
            changed: Notify::new(),
            tasks,
            closing,
            taken: Taken::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    pub(crate) fn size(&self) -> usize {
        self.shared.size
    }

    /// A session for a context like this, at once or as soon as one is made that was begun before. None: the caller makes a sandbox.
    pub(crate) async fn take(&self, holdings: &Arc<Holdings>, limits: Limits, language: Language) -> Option<Session> {
        let (shared, now) = (&self.shared, Instant::now());
        let at_once = self.at_once();
        let coming = {
            let mut shelves = lock(&shared.shelves);
            let shelf = shelves.all.entry(Key::of(holdings, &limits, language));
            let shelf = shelf.or_insert_with(|| Shelf::new(holdings, limits, language));
            shelf.demand.took(now, shelf.pace / at_once as u32);
            shelf.last_taken = now;
            if let Some(session) = shelf.take_ready() {
                shared.changed.notify_one();
                shared.taken.ready.fetch_add(1, Ordering::Relaxed);
                return Some(session);
            }
            shelf.waiting.retain(|waiting| !waiting.is_closed());
            if shelf.building > shelf.waiting.len() {
                let (sender, coming) = oneshot::channel();
                shelf.waiting.push_back(sender);
                Some(coming)
            } else {
                None
            }
        };
        shared.changed.notify_one();
        let _hurry = shared.maker.hurry();
        let session = match coming {
            // The one that was begun earlier is there sooner, unless it fails.
            Some(coming) => coming.await.ok(),
            None => None,
        };
        let how = if session.is_some() { &shared.taken.handed_over } else { &shared.taken.made };
        how.fetch_add(1, Ordering::Relaxed);
        session
    }

    fn at_once(&self) -> usize {
        self.shared.config.refills_at_once.max(1)
    }

    fn room(&self) -> Room {
        Room { count: self.shared.config.ready_max, bytes: self.shared.config.ready_memory_bytes }
    }

    /// Those that the operator ordered, in the words of the `agentrun` document: a pool of fixed size.
    pub(crate) fn sessions(&self) -> Sessions {
        let (shelves, size) = (lock(&self.shared.shelves), self.shared.size);
        let ready = shelves.all.get(&self.shared.ordered).map(|shelf| &shelf.ready);
        let there = ready.map_or(0, VecDeque::len).min(size);
        let available = ready.map_or(0, |ready| ready.iter().filter(|s| s.is_fit()).count()).min(size);
        Sessions { there, available, healthy: available == there && (available > 0 || size == 0) }
    }

    pub(crate) fn count(&self) -> Ready {
        let taken = |how: &AtomicU64| how.load(Ordering::Relaxed);
        let Taken { ready, handed_over, made } = &self.shared.taken;
        let shelves = lock(&self.shared.shelves);
        let all = || shelves.all.values().flat_map(|shelf| shelf.ready.iter().map(move |session| (shelf, session)));
        Ready {
            wanted: shelves.targets(Instant::now(), self.room()).iter().map(|(_, target)| target).sum(),
            available: all().filter(|(_, session)| session.is_fit()).count(),
            memory_bytes: all().map(|(shelf, session)| session.bytes.unwrap_or(shelf.bytes)).sum(),
            taken: taken(ready),
            handed_over: taken(handed_over),
            made: taken(made),
        }
    }
}

/// The start: what the operator ordered is made at once, and checked, before anybody asks.
impl Stock {
    /// Sandboxes for the sessions of the start. Interpreters come later.
    pub(crate) async fn first_sandboxes(&self) -> Vec<Result<Arc<Place>, Failure>> {
        let shape = lock(&self.shared.shelves).all.get(&self.shared.ordered).map(|shelf| shelf.shape.clone());
        let Some(shape) = shape else { return Vec::new() };
        let make = |maker: Arc<Maker>, shape: Shape| async move { maker.unhurried_sandbox(&shape).await };
        let making: Vec<_> =
            (0..self.shared.size).map(|_| tokio::spawn(make(self.shared.maker.clone(), shape.clone()))).collect();
        let mut made = Vec::new();
        for sandbox in making {
            made.push(sandbox.await.unwrap_or_else(|_| Err(given_up())));
        }
        made
    }

    /// Makes sessions of them, all at once, each tried three times. `made` hears of each in order.
    pub(crate) async fn fill(
        &self,
        sandboxes: Vec<Result<Arc<Place>, Failure>>,
        mut made: impl FnMut(usize, &str),
    ) -> Result<(), Failure> {
        let building: Vec<_> = sandboxes
            .into_iter()
            .map(|sandbox| {
                let stock = self.clone();
                self.shared.tasks.spawn(async move { stock.build_stubbornly(Some(sandbox)).await })
            })
            .collect();
        let mut failed = None;
        for (number, task) in building.into_iter().enumerate() {
            match task.await.unwrap_or_else(|_| Err(given_up())) {
                Ok(session) => {
                    made(number + 1, &session.id);
                    self.put_ordered(session);
                }
                Err(failure) => failed = Some(failure),
            }
        }
        failed.map_or(Ok(()), Err)
    }

    async fn build_stubbornly(&self, mut first: Option<Result<Arc<Place>, Failure>>) -> Result<Session, Failure> {
        let mut last = Failure::new("not tried");
        let shape = lock(&self.shared.shelves).all.get(&self.shared.ordered).map(|shelf| shelf.shape.clone());
        let Some(shape) = shape else { return Err(last) };
        for attempt in 1..=START_ATTEMPTS {
            let sandbox = match first.take() {
                Some(sandbox) => sandbox,
                None => self.shared.maker.unhurried_sandbox(&shape).await,
            };
            let started = match sandbox {
                Ok(place) => self.shared.maker.first_kernel(place, Language::Python).await,
                Err(failure) => Err(failure),
            };
            match started {
                Ok(place) => return Ok(self.session(place)),
                Err(failure) => {
                    tracing::warn!(attempt, why = failure.log, "a session could not be made");
                    last = failure;
                }
            }
        }
        Err(last)
    }

    fn put_ordered(&self, session: Session) {
        if let Some(shelf) = lock(&self.shared.shelves).all.get_mut(&self.shared.ordered) {
            shelf.put(session);
        }
    }

    /// What fails the check is made anew, up to three times.
    pub(crate) async fn check_and_repair(&self) -> Result<(), Failure> {
        for _ in 0..START_ATTEMPTS {
            if self.check().await {
                return Ok(());
            }
            let missing = {
                let mut shelves = lock(&self.shared.shelves);
                let Some(shelf) = shelves.all.get_mut(&self.shared.ordered) else { return Ok(()) };
                shelf.ready.retain(Session::is_fit);
                self.shared.size - shelf.ready.len().min(self.shared.size)
            };
            for _ in 0..missing {
                let session = self.build_stubbornly(None).await?;
                self.put_ordered(session);
            }
        }
        if self.check().await { Ok(()) } else { Err(Failure::new("sessions keep failing their health check")) }
    }
}

impl Stock {
    /// Keeps the shelves as full as they should be, young and healthy, until the engine closes.
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

    async fn refill(self, key: Key) {
        let mut refill = Refill { stock: &self, key: &key, builds: false };
        refill.wait_for_a_moment().await;
        if self.shared.closing.is_cancelled() {
            return;
        }
        let Some((shape, language)) = refill.begin() else { return };
        let begun = Instant::now();
        match refill.build(&shape, language).await {
            Ok(session) => {
                let took = begun.elapsed();
                refill.done(|shelf| {
                    shelf.learn(took, session.bytes);
                    shelf.put(session);
                });
            }
            Err(why) => {
                // What a shutdown cuts off has not failed.
                if !self.shared.closing.is_cancelled() {
                    tracing::warn!(why, "a session could not be made; trying again");
                }
                refill.done(|shelf| {
                    // Who waited for it does without.
                    shelf.waiting.pop_front();
                    shelf.pause = next_pause(shelf.pause);
                    shelf.retry = Instant::now() + shelf.pause;
                });
            }
        }
    }

    /// A session that dies is noticed by the end of its connection, at once.
    fn session(&self, place: Arc<Place>) -> Session {
        let (shared, guest) = (self.shared.clone(), place.guest.clone());
        let watch = self.shared.tasks.spawn(async move {
            guest.lost_or_exited(FIRST_KERNEL).await;
            shared.changed.notify_one();
        });
        Session {
            id: format!("session-{}", uuid::Uuid::new_v4().simple()),
            place: Some(place),
            born: Instant::now(),
            checking: false,
            healthy: true,
            bytes: None,
            _watch: AbortOnDropHandle::new(watch),
        }
    }

    /// Runs a statement in each session, one after the other; the unfit are replaced by `keep`. Whether all are well.
    async fn check(&self) -> bool {
        let sessions: Vec<(Key, String)> = {
            let shelves = lock(&self.shared.shelves);
            let of = |(key, shelf): (&Key, &Shelf)| shelf.ready.iter().map(|s| (key.clone(), s.id.clone())).collect();
            shelves.all.iter().flat_map::<Vec<_>, _>(of).collect()
        };
        let mut all = true;
        for (key, id) in sessions {
            let place = self.with(&key, &id, |session| {
                session.checking = true;
                session.place.clone()
            });
            let Some(place) = place.flatten() else { continue };
            let result = run_statement(&place, key.language).await;
            if let Err(why) = &result {
                tracing::warn!(session = id, why, "a session failed its health check");
                all = false;
            }
            let bytes = place.memory_bytes().await;
            self.with(&key, &id, |session| {
                (session.checking, session.healthy, session.bytes) = (false, result.is_ok(), bytes);
            });
        }
        if !all {
            self.shared.changed.notify_one();
        }
        all
    }

    fn with<T>(&self, key: &Key, id: &str, act: impl FnOnce(&mut Session) -> T) -> Option<T> {
        let mut shelves = lock(&self.shared.shelves);
        shelves.all.get_mut(key)?.ready.iter_mut().find(|session| session.id == id).map(act)
    }
}

/// One session on its way to a shelf. Dropped, it is counted no longer.
struct Refill<'a> {
    stock: &'a Stock,
    key: &'a Key,
    builds: bool,
}

impl Refill<'_> {
    /// Behind everybody who waits and, as long as half of the shelf is left, a moment after the last one was taken: but not for ever.
    async fn wait_for_a_moment(&self) {
        let shared = &self.stock.shared;
        let latest = Instant::now() + POSTPONED;
        shared.maker.nobody_waits(POSTPONED).await;
        let room = self.stock.room();
        let lull = || lock(&shared.shelves).lull(self.key, room).filter(|lull| *lull < latest);
        while let Some(lull) = lull() {
            tokio::time::sleep_until(lull).await;
            shared.maker.nobody_waits(latest.saturating_duration_since(Instant::now())).await;
        }
    }

    fn begin(&mut self) -> Option<(Shape, Language)> {
        let mut shelves = lock(&self.stock.shared.shelves);
        let shelf = shelves.all.get_mut(self.key)?;
        shelf.building += 1;
        self.builds = true;
        Some((shelf.shape.clone(), shelf.language))
    }

    async fn build(&self, shape: &Shape, language: Language) -> Result<Session, String> {
        let maker = &self.stock.shared.maker;
        let place = maker.unhurried_sandbox(shape).await.map_err(|failure| failure.log)?;
        let place = maker.first_kernel(place, language).await.map_err(|failure| failure.log)?;
        let mut session = self.stock.session(place.clone());
        // Who waits for it warms it with its own first cell.
        if !self.is_waited_for() {
            run_statement(&place, language).await?;
            session.bytes = place.memory_bytes().await;
        }
        Ok(session)
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

impl Shelves {
    /// When a moment has passed since the last was taken; none if too few are left to wait for that.
    fn lull(&self, key: &Key, room: Room) -> Option<Instant> {
        let (shelf, now) = (self.all.get(key)?, Instant::now());
        let target = self.targets(now, room).into_iter().find(|(of, _)| of == key)?.1;
        let lull = shelf.last_taken + LULL;
        (2 * shelf.young(now) >= target && lull > now).then_some(lull)
    }
}

fn given_up() -> Failure {
    Failure::new("making a session was given up")
}

fn next_pause(last: Duration) -> Duration {
    (last * 2).clamp(Duration::from_secs(1), Duration::from_secs(60))
}

async fn run_statement(place: &Place, language: Language) -> Result<(), String> {
    let deadline = Deadline { after_ms: CHECK_DEADLINE.as_millis() as u64, grace_ms: 1000 };
    let request = ToGuest::Run {
        kernel: FIRST_KERNEL,
        code: statement(language).into(),
        env: std::collections::BTreeMap::new(),
        deadline,
        forward_bytes: 1024,
        keep_over: None,
    };
    let checking = async {
        let mut run = place.guest.call(&request).await.map_err(|lost| lost.0)?;
        loop {
            match run.next().await.map_err(|lost| lost.0)? {
                Answer::Message(FromGuest::RunEnd { end }) if end.status == RunStatus::Ok => return Ok(()),
                Answer::Message(FromGuest::RunEnd { end }) => {
                    return Err(format!("the statement ended as {:?}", end.status));
                }
                Answer::Message(FromGuest::Failed { message, .. }) => return Err(crate::live::one_line(&message)),
                _ => {}
            }
        }
    };
    let wait = CHECK_DEADLINE + Duration::from_secs(3);
    tokio::time::timeout(wait, checking).await.unwrap_or_else(|_| Err(format!("no answer within {wait:?}")))
}
