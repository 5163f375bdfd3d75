//! Contexts and who owns them: lookup, turns, permits, the queue.
//!
//! A context belongs to one tenant and is looked up nowhere else. Its runs take turns in order of arrival; a turn is waited for
//! without a permit, so that a busy context never blocks the others of its tenant.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use proto::{Ended, KernelId, Language};
use sandbox::{Group, Isolation};
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::config::EngineConfig;
use crate::guest::lock;
use crate::live::Place;
use crate::op::{ContextInfo, EngineError, Tenant};

/// Where a context lives at the moment. Only who has the turn may change it.
#[derive(Default)]
pub(crate) struct Home {
    pub(crate) place: Option<Arc<Place>>,
    /// The running interpreter; none after it died, until the next run.
    pub(crate) kernel: Option<KernelId>,
    pub(crate) last_kernel: KernelId,
    /// Memory kills of the sandbox already accounted for.
    pub(crate) oom_kills: u64,
    /// What the next run has to be told: variables, or files too, were lost since the last one.
    pub(crate) notice: Option<String>,
}

pub(crate) struct Context {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) description: String,
    pub(crate) language: Language,
    pub(crate) created_at: u64,
    number: u64,
    /// Fair: first come, first served.
    pub(crate) turn: Arc<tokio::sync::Mutex<Home>>,
    /// Set once `stop` was asked for; those who wait for a turn give up.
    pub(crate) gone: CancellationToken,
    state: Mutex<State>,
}

struct State {
    /// The same place as in `Home`, for file operations, which need no turn.
    place: Option<Arc<Place>>,
    isolation: Isolation,
    last_used: u64,
    last_active: Instant,
    files_under_way: usize,
}

impl Context {
    pub(crate) fn new(name: String, language: Language, description: String, home: Home, isolation: Isolation) -> Self {
        let now = unix_now();
        Self {
            id: format!("ctx-{}", uuid::Uuid::new_v4()),
            name,
            description,
            language,
            created_at: now,
            number: 0,
            gone: CancellationToken::new(),
            state: Mutex::new(State {
                place: home.place.clone(),
                isolation,
                last_used: now,
                last_active: Instant::now(),
                files_under_way: 0,
            }),
            turn: Arc::new(tokio::sync::Mutex::new(home)),
        }
    }

    pub(crate) fn info(&self) -> ContextInfo {
        let state = lock(&self.state);
        ContextInfo {
            id: self.id.clone(),
            name: self.name.clone(),
            description: self.description.clone(),
            language: self.language,
            created_at: self.created_at,
            last_used: state.last_used,
            busy: self.turn.try_lock().is_err(),
            size: None,
            limits: sandbox::Limits { memory_bytes: 0, cpu_millis: 0, pids: 0, disk_bytes: 0, disk_inodes: 0 },
            isolation: state.isolation.clone(),
            key: String::new(),
        }
    }

    pub(crate) fn not_found(&self) -> EngineError {
        EngineError::ContextNotFound(self.id.clone())
    }

    /// A run ended.
    pub(crate) fn used(&self) {
        let mut state = lock(&self.state);
        state.last_used = state.last_used.max(unix_now());
        state.last_active = Instant::now();
    }

    pub(crate) fn moved(&self, place: &Arc<Place>) {
        let mut state = lock(&self.state);
        state.isolation = place.isolation().clone();
        state.place = Some(place.clone());
    }

    pub(crate) fn live_place(&self) -> Option<Arc<Place>> {
        lock(&self.state).place.clone().filter(|place| !place.guest.is_lost())
    }

    /// Keeps the context from counting as idle while a file operation goes on.
    pub(crate) fn file_use(self: &Arc<Self>) -> FileUse {
        lock(&self.state).files_under_way += 1;
        FileUse(self.clone())
    }

    fn is_idle(&self, limit: Duration) -> bool {
        let state = lock(&self.state);
        state.files_under_way == 0 && self.turn.try_lock().is_ok() && state.last_active.elapsed() >= limit
    }
}

pub(crate) struct FileUse(Arc<Context>);

impl Drop for FileUse {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.files_under_way -= 1;
        state.last_active = Instant::now();
    }
}

/// What one tenant has.
pub(crate) struct Holdings {
    pub(crate) group: Group,
    /// One per run that may execute at once.
    pub(crate) permits: Arc<Semaphore>,
    waiting: AtomicUsize,
    contexts: Mutex<Contexts>,
}

#[derive(Default)]
struct Contexts {
    by_id: HashMap<String, Arc<Context>>,
    /// Being created, or being stopped: they take a place among `max_contexts` but are not found.
    unlisted: usize,
    created: u64,
}

impl Holdings {
    fn new(tenant: &Tenant, config: &EngineConfig) -> Self {
        // Only the one built-in name goes to the back end as it is; others could collide or be no valid name.
        let name =
            if *tenant == Tenant::local() { "local".into() } else { format!("t-{}", uuid::Uuid::new_v4().simple()) };
        Self {
            group: Group { name, memory_bytes: config.group_memory_bytes, cpu_millis: config.group_cpu_millis },
            permits: Arc::new(Semaphore::new(config.pool_size.max(1))),
            waiting: AtomicUsize::new(0),
            contexts: Mutex::default(),
        }
    }

    /// A place among the contexts, before there is one.
    pub(crate) fn reserve(self: &Arc<Self>, limit: usize) -> Result<Reservation, EngineError> {
        let mut contexts = lock(&self.contexts);
        if contexts.by_id.len() + contexts.unlisted >= limit {
            return Err(EngineError::ContextLimit(limit));
        }
        contexts.unlisted += 1;
        Ok(Reservation(self.clone()))
    }

    /// By id; or by name if only one has it. Exact bytes, nothing folded or trimmed.
    pub(crate) fn find(&self, wanted: &str) -> Result<Arc<Context>, EngineError> {
        let context = lock(&self.contexts).find(wanted)?;
        lock(&context.state).last_active = Instant::now();
        Ok(context)
    }

    /// Takes a context out: from here on nobody finds it and those in its queue give up.
    pub(crate) fn remove(self: &Arc<Self>, wanted: &str) -> Result<Removed, EngineError> {
        let mut contexts = lock(&self.contexts);
        let context = contexts.find(wanted)?;
        Ok(contexts.remove(context, self))
    }

    /// Takes out what nobody used for so long.
    pub(crate) fn remove_idle(self: &Arc<Self>, limit: Duration) -> Vec<Removed> {
        let mut contexts = lock(&self.contexts);
        let idle: Vec<Arc<Context>> = contexts.by_id.values().filter(|c| c.is_idle(limit)).cloned().collect();
        idle.into_iter().map(|context| contexts.remove(context, self)).collect()
    }

    pub(crate) fn list(&self) -> Vec<ContextInfo> {
        let mut all: Vec<Arc<Context>> = lock(&self.contexts).by_id.values().cloned().collect();
        all.sort_by_key(|context| std::cmp::Reverse(context.number));
        all.iter().map(|context| context.info()).collect()
    }

    /// A place in the queue; `None` when it is full.
    pub(crate) fn enqueue(self: &Arc<Self>, limit: usize) -> Option<Queued> {
        let queued = Queued(self.clone());
        let before = self.waiting.fetch_add(1, Ordering::SeqCst);
        (before < limit).then_some(queued)
    }
}

impl Contexts {
    fn remove(&mut self, context: Arc<Context>, holdings: &Arc<Holdings>) -> Removed {
        self.by_id.remove(&context.id);
        self.unlisted += 1;
        context.gone.cancel();
        Removed { context, _place: Reservation(holdings.clone()) }
    }

    fn find(&self, wanted: &str) -> Result<Arc<Context>, EngineError> {
        if let Some(context) = self.by_id.get(wanted) {
            return Ok(context.clone());
        }
        let mut named: Vec<&Arc<Context>> = self.by_id.values().filter(|c| c.name == wanted).collect();
        match named.as_slice() {
            [] => Err(EngineError::ContextNotFound(wanted.into())),
            [only] => Ok((*only).clone()),
            _ => {
                named.sort_by_key(|c| std::cmp::Reverse(c.number));
                Err(EngineError::AmbiguousName {
                    name: wanted.into(),
                    ids: named.iter().map(|c| c.id.clone()).collect(),
                })
            }
        }
    }
}

/// A context on its way out. It keeps its place among `max_contexts` until its sandbox is gone.
pub(crate) struct Removed {
    pub(crate) context: Arc<Context>,
    _place: Reservation,
}

pub(crate) struct Reservation(Arc<Holdings>);

impl Reservation {
    pub(crate) fn fill(self, mut context: Context) -> Arc<Context> {
        let mut contexts = lock(&self.0.contexts);
        contexts.created += 1;
        context.number = contexts.created;
        let context = Arc::new(context);
        contexts.by_id.insert(context.id.clone(), context.clone());
        drop(contexts);
        context
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        lock(&self.0.contexts).unlisted -= 1;
    }
}

pub(crate) struct Queued(Arc<Holdings>);

impl Drop for Queued {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::SeqCst);
    }
}

#[derive(Default)]
pub(crate) struct Tenants {
    all: Mutex<HashMap<Tenant, Arc<Holdings>>>,
}

impl Tenants {
    pub(crate) fn of(&self, tenant: &Tenant, config: &EngineConfig) -> Arc<Holdings> {
        let mut all = lock(&self.all);
        all.entry(tenant.clone()).or_insert_with(|| Arc::new(Holdings::new(tenant, config))).clone()
    }

    pub(crate) fn all(&self) -> Vec<(Tenant, Arc<Holdings>)> {
        lock(&self.all).iter().map(|(tenant, holdings)| (tenant.clone(), holdings.clone())).collect()
    }
}

impl Home {
    /// The interpreter ended; files are still there.
    pub(crate) fn kernel_ended(&mut self) {
        self.kernel = None;
    }

    pub(crate) fn kernel_ended_between_runs(&mut self, how: Ended) {
        self.kernel = None;
        let how = crate::live::describe(how);
        self.notice =
            Some(format!("[the interpreter ended between two calls ({how}): variables are lost, files are kept]"));
    }
}

pub(crate) fn unix_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
