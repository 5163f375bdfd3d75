//! Tenancies: the contexts, permits and queue of each tenant in each realm, and the limits on them.
//!
//! A context belongs to one tenant and one realm, and is looked up nowhere else.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use proto::Root;
use sandbox::{Group, SharedVolume};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::background::Runs;
use crate::config::{EngineConfig, Mount, RealmConfig};
use crate::context::{Context, ContextLease};
use crate::guest::lock;
use crate::keyed::Keyed;
use crate::op::{ContextInfo, ContextSelector, EngineError, LimitKind, Quota, Realm, Size, Tenant};
use crate::sandbox_egress::EgressSpec;

/// Maximum number of bytes that one tenant may be uploading into its sandboxes at the same time.
pub(crate) const UPLOADS: usize = 64 << 20;
/// Number of permits that means no limit, because a tenant never has that many runs.
const UNLIMITED: usize = 1 << 20;
/// Maximum number of a tenant's sandboxes that may be ending without counting as contexts. A call that ends one more
/// waits for its end.
const ENDING: usize = 64;

/// Time for which calls of a removed tenant are refused. A call that was admitted before the removal may still arrive.
const REFUSED: Duration = Duration::from_secs(10 * 60);

/// One realm, with the memory that all tenants use in it together.
pub(crate) struct RealmState {
    pub(crate) config: RealmConfig,
    /// Network of new sandboxes. It is taken from `config` at first, and a reload replaces it.
    network: Mutex<RealmNetwork>,
    memory: AtomicU64,
}

struct RealmNetwork {
    egress: Option<egress::Egress>,
    policy: Option<egress::Policy>,
    of_sizes: BTreeMap<Size, egress::Policy>,
}

impl RealmNetwork {
    fn new(realm: &RealmConfig, config: &EngineConfig) -> Self {
        Self { egress: config.egress.clone(), policy: realm.network.clone(), of_sizes: realm.network_of.clone() }
    }
}

/// One tenant across all realms.
pub(crate) struct TenantState {
    pub(crate) tenant: Tenant,
    rules: Mutex<TenantRules>,
    mounts: Vec<Mount>,
    contexts: AtomicUsize,
    /// One permit for each byte that the tenant may be uploading.
    pub(crate) uploads: Arc<Semaphore>,
    /// One permit for each sandbox that may be ending.
    ending: Arc<Semaphore>,
    pub(crate) background: Runs,
    /// Token that is cancelled when the tenant is removed.
    pub(crate) gone: CancellationToken,
}

/// The quota of a tenant and what follows from it. A reload changes them.
struct TenantRules {
    quota: Quota,
    /// Cgroup around new sandboxes. If the memory quota changes, new sandboxes get another cgroup, because those that
    /// exist were created under the old limit.
    group: Group,
    /// One permit for each run that may execute at the same time, if the quota limits them.
    runs: Option<Arc<Semaphore>>,
}

impl TenantRules {
    fn new(group_name: String, quota: Quota) -> Self {
        let group = Group { name: group_name, memory_bytes: quota.memory_bytes, cpu_millis: None };
        Self { group, runs: quota.runs.map(|runs| Arc::new(Semaphore::new(runs.max(1)))), quota }
    }

    fn set_quota(&mut self, quota: &Quota) {
        if quota.memory_bytes != self.quota.memory_bytes {
            self.group = Group { name: random_group(), memory_bytes: quota.memory_bytes, cpu_millis: None };
        }
        match (&self.runs, self.quota.runs.map(|runs| runs.max(1)), quota.runs.map(|runs| runs.max(1))) {
            (_, old, new) if old == new => {}
            (Some(runs), Some(old), Some(new)) if new > old => runs.add_permits(new - old),
            (Some(runs), Some(old), Some(new)) => {
                // Permits in use are taken away when their runs end, after the runs that wait already.
                let missing = old - new - runs.forget_permits(old - new);
                let (runs, missing) = (runs.clone(), u32::try_from(missing).unwrap_or(u32::MAX));
                tokio::spawn(async move { runs.acquire_many_owned(missing).await.map(OwnedSemaphorePermit::forget) });
            }
            (runs, _, new) => {
                // Runs that wait for the old permits need none any more.
                runs.iter().for_each(|runs| runs.add_permits(UNLIMITED));
                self.runs = new.map(|runs| Arc::new(Semaphore::new(runs)));
            }
        }
        self.quota = quota.clone();
    }
}

/// Returns a name for the cgroup of a tenant. The tenant's own name could collide there or be invalid.
fn random_group() -> String {
    format!("t-{}", uuid::Uuid::new_v4().simple())
}

/// The contexts, permits and queue of one tenant in one realm.
pub(crate) struct Tenancy {
    pub(crate) tenant: Arc<TenantState>,
    pub(crate) realm: Arc<RealmState>,
    /// One permit for each run that may execute at the same time.
    pub(crate) permits: Arc<Semaphore>,
    waiting: AtomicUsize,
    /// Turns to create contexts: of several calls for the same missing context, one creates it and the others find it.
    pub(crate) creation_turns: Keyed<()>,
    contexts: Mutex<ContextTable>,
    links: LinkIndex,
}

/// Index of the links: for each key, the tenancy and the id of the context, and which of its directories is meant.
type LinkIndex = Arc<Mutex<HashMap<String, (Weak<Tenancy>, String, Root)>>>;

#[derive(Default)]
struct ContextTable {
    by_id: HashMap<String, Arc<Context>>,
    /// Number of contexts that are being created or stopped. They count towards `max_contexts` but cannot be found.
    unlisted: usize,
    created: u64,
}

impl TenantState {
    fn new(tenant: &Tenant, quota: Quota, mounts: &[Mount]) -> Self {
        // Only the built-in name is passed to the back end as it is.
        let group_name = if *tenant == Tenant::local() { "local".into() } else { random_group() };
        Self {
            tenant: tenant.clone(),
            rules: Mutex::new(TenantRules::new(group_name, quota)),
            mounts: mounts.iter().filter(|mount| mount.is_for(tenant)).cloned().collect(),
            contexts: AtomicUsize::new(0),
            uploads: Arc::new(Semaphore::new(UPLOADS)),
            ending: Arc::new(Semaphore::new(ENDING)),
            background: Runs::default(),
            gone: CancellationToken::new(),
        }
    }

    fn most_contexts(&self) -> usize {
        lock(&self.rules).quota.contexts.unwrap_or(usize::MAX)
    }

    /// Returns the permits for runs that execute at the same time, if the tenant's quota limits them.
    pub(crate) fn runs(&self) -> Option<Arc<Semaphore>> {
        lock(&self.rules).runs.clone()
    }

    /// Takes a permit for one more sandbox that is ending.
    pub(crate) fn ending(&self) -> Option<OwnedSemaphorePermit> {
        self.ending.clone().try_acquire_owned().ok()
    }
}

impl Tenancy {
    fn new(tenant: Arc<TenantState>, realm: Arc<RealmState>, links: LinkIndex) -> Self {
        Self {
            permits: Arc::new(Semaphore::new(realm.config.runs_at_once.max(1))),
            tenant,
            realm,
            waiting: AtomicUsize::new(0),
            creation_turns: Keyed::default(),
            contexts: Mutex::default(),
            links,
        }
    }

    pub(crate) fn config(&self) -> &RealmConfig {
        &self.realm.config
    }

    /// Returns the groups around each sandbox, outermost first.
    pub(crate) fn groups(&self) -> Vec<Group> {
        let RealmConfig { realm, group_memory_bytes: memory_bytes, group_cpu_millis: cpu_millis, .. } =
            self.realm.config;
        vec![lock(&self.tenant.rules).group.clone(), Group { name: realm.0.into(), memory_bytes, cpu_millis }]
    }

    /// Returns how many contexts the tenant may have here.
    pub(crate) fn most_contexts(&self) -> usize {
        self.config().max_contexts.min(self.tenant.most_contexts())
    }

    /// Returns the directories of the host that the operator mounts into this tenant's contexts.
    pub(crate) fn mounts(&self) -> impl Iterator<Item = &SharedVolume> {
        let realm = self.config().realm;
        self.tenant.mounts.iter().filter(move |mount| mount.realms.contains(&realm)).map(|mount| &mount.volume)
    }

    /// Returns the egress of sandboxes of this size if the operator allows one. The policies of the size and of the
    /// tenant can only narrow it.
    pub(crate) fn egress(&self, size: Option<Size>) -> Option<EgressSpec> {
        let RealmConfig { realm, default_size, .. } = *self.config();
        let of_tenant = lock(&self.tenant.rules).quota.network.clone();
        let network = lock(&self.realm.network);
        let of_size = size.or(default_size).and_then(|size| network.of_sizes.get(&size));
        let policy = of_size.into_iter().chain(&of_tenant).fold(network.policy.clone()?, egress::Policy::and);
        Some(EgressSpec { egress: network.egress.clone(), tenant: self.tenant.tenant.clone(), realm, policy })
    }

    /// Returns whether the operator gives sandboxes of this realm a network.
    pub(crate) fn has_network(&self) -> bool {
        lock(&self.realm.network).policy.is_some()
    }

    /// Reserves room for a context before it is created.
    pub(crate) fn reserve(self: &Arc<Self>, memory: u64) -> Result<Reservation, Full> {
        let config = &self.realm.config;
        let mut contexts = lock(&self.contexts);
        let charge = if contexts.by_id.len() + contexts.unlisted >= config.max_contexts {
            Err(EngineError::ContextLimit(config.max_contexts))
        } else {
            Charge::take(&self.tenant, &self.realm, memory)
        };
        match charge {
            Ok(charge) => {
                contexts.unlisted += 1;
                Ok(Reservation { tenancy: self.clone(), charge: Some(charge) })
            }
            Err(error) => match contexts.least_used().filter(|_| config.evict_idle) {
                Some(idle) if self.would_fit(&contexts, memory) => Err(Full::Evict(contexts.remove(idle, self))),
                _ => Err(Full::Refused(error)),
            },
        }
    }

    /// Returns whether enough memory would be free without the idle contexts. Otherwise evicting them would achieve
    /// nothing.
    fn would_fit(&self, contexts: &ContextTable, memory: u64) -> bool {
        let most = self.realm.config.max_total_memory_bytes.unwrap_or(u64::MAX);
        let idle = contexts.by_id.values().filter(|context| context.idle_since().is_some());
        let idle: u64 = idle.map(|context| context.limits.memory_bytes).sum();
        let held = self.realm.memory.load(Ordering::SeqCst);
        held.saturating_sub(idle).saturating_add(memory) <= most
    }

    pub(crate) fn find(&self, wanted: &ContextSelector, connection: Option<&str>) -> Result<ContextLease, EngineError> {
        lock(&self.contexts).find(wanted, connection).map(|context| ContextLease::new(&context))
    }

    /// Removes a context: from here on no call finds it, and calls in its queue give up.
    pub(crate) fn remove(
        self: &Arc<Self>,
        wanted: &ContextSelector,
        connection: Option<&str>,
    ) -> Result<Removed, EngineError> {
        let mut contexts = lock(&self.contexts);
        let context = contexts.find(wanted, connection)?;
        Ok(contexts.remove(context, self))
    }

    /// Returns the context that this connection created last.
    pub(crate) fn created_by(&self, connection: &str) -> Option<Arc<Context>> {
        lock(&self.contexts).created_by(connection)
    }

    /// Removes exactly this context if it is still there.
    pub(crate) fn remove_exact(self: &Arc<Self>, context: &Arc<Context>) -> Option<Removed> {
        lock(&self.contexts).remove_exact(context, self)
    }

    /// Removes contexts that were idle for at least `limit`.
    pub(crate) fn remove_idle(self: &Arc<Self>, limit: Duration) -> Vec<Removed> {
        let mut contexts = lock(&self.contexts);
        let is_idle = |context: &Context| context.idle_since().is_some_and(|since| since.elapsed() >= limit);
        let idle: Vec<Arc<Context>> = contexts.by_id.values().filter(|c| is_idle(c)).cloned().collect();
        idle.into_iter().map(|context| contexts.remove(context, self)).collect()
    }

    /// Removes all contexts.
    pub(crate) fn remove_all(self: &Arc<Self>) -> Vec<Removed> {
        let mut contexts = lock(&self.contexts);
        let all: Vec<Arc<Context>> = contexts.by_id.values().cloned().collect();
        all.into_iter().map(|context| contexts.remove(context, self)).collect()
    }

    pub(crate) fn list(&self) -> Vec<ContextInfo> {
        self.newest_first().iter().map(|context| context.info()).collect()
    }

    pub(crate) fn newest_first(&self) -> Vec<Arc<Context>> {
        let mut all: Vec<Arc<Context>> = lock(&self.contexts).by_id.values().cloned().collect();
        all.sort_by_key(|context| std::cmp::Reverse(context.number));
        all
    }

    /// Returns up to `most` contexts that have a sandbox, most recently used first.
    pub(crate) fn recently_used(&self, most: usize) -> Vec<ContextLease> {
        let mut all = self.newest_first();
        all.retain(|context| context.live_sandbox().is_some());
        all.sort_by_key(|context| std::cmp::Reverse(context.last_used()));
        let contexts = lock(&self.contexts);
        let listed = all.into_iter().take(most).filter(|context| contexts.by_id.contains_key(&context.id));
        listed.map(|context| ContextLease::new(&context)).collect()
    }

    /// Returns the number of contexts, and how many of them have runs that execute or wait.
    pub(crate) fn count(&self) -> (usize, usize) {
        let contexts = lock(&self.contexts);
        (contexts.by_id.len(), contexts.by_id.values().filter(|context| context.is_running()).count())
    }

    fn has_contexts(&self) -> bool {
        let contexts = lock(&self.contexts);
        !contexts.by_id.is_empty() || contexts.unlisted > 0
    }

    /// Enters the queue, or returns `None` if it is full.
    pub(crate) fn enqueue(self: &Arc<Self>, limit: usize) -> Option<Queued> {
        let queued = Queued(self.clone());
        let before = self.waiting.fetch_add(1, Ordering::SeqCst);
        (before < limit).then_some(queued)
    }
}

impl ContextTable {
    fn remove_exact(&mut self, context: &Arc<Context>, tenancy: &Arc<Tenancy>) -> Option<Removed> {
        let there = self.by_id.get(&context.id).is_some_and(|there| Arc::ptr_eq(there, context));
        there.then(|| self.remove(context.clone(), tenancy))
    }

    fn remove(&mut self, context: Arc<Context>, tenancy: &Arc<Tenancy>) -> Removed {
        self.by_id.remove(&context.id);
        for key in [&context.keys.files, &context.keys.outputs] {
            lock(&tenancy.links).remove(key);
        }
        self.unlisted += 1;
        context.gone.cancel();
        let charge = lock(&context.charge).take();
        Removed { context, reservation: Reservation { tenancy: tenancy.clone(), charge } }
    }

    fn find(&self, wanted: &ContextSelector, connection: Option<&str>) -> Result<Arc<Context>, EngineError> {
        match wanted {
            ContextSelector::Id(id) => {
                self.by_id.get(id).cloned().ok_or_else(|| EngineError::ContextNotFound(id.clone()))
            }
            ContextSelector::Named(name) => self.named(name),
            ContextSelector::Current => self.current(connection),
            ContextSelector::New => Err(EngineError::NoCurrent { ids: Vec::new() }),
        }
    }

    /// Finds a context by id, or by name if only one has it. Names are compared byte by byte, without folding or
    /// trimming.
    fn named(&self, wanted: &str) -> Result<Arc<Context>, EngineError> {
        if let Some(context) = self.by_id.get(wanted) {
            return Ok(context.clone());
        }
        let named: Vec<&Arc<Context>> = self.by_id.values().filter(|c| c.name == wanted).collect();
        match named.as_slice() {
            [] => Err(EngineError::ContextNotFound(wanted.into())),
            [only] => Ok((*only).clone()),
            _ => Err(EngineError::AmbiguousName { name: wanted.into(), ids: ids(named) }),
        }
    }

    fn current(&self, connection: Option<&str>) -> Result<Arc<Context>, EngineError> {
        if let Some(connection) = connection {
            return self.created_by(connection).ok_or(EngineError::NoCurrent { ids: Vec::new() });
        }
        let mut all = self.by_id.values();
        match (all.next(), all.next()) {
            (Some(only), None) => Ok(only.clone()),
            _ => Err(EngineError::NoCurrent { ids: ids(self.by_id.values().collect()) }),
        }
    }

    fn created_by(&self, connection: &str) -> Option<Arc<Context>> {
        let made = self.by_id.values().filter(|c| c.connection.as_deref() == Some(connection));
        made.max_by_key(|c| c.number).cloned()
    }

    fn least_used(&self) -> Option<Arc<Context>> {
        let idle = self.by_id.values().filter_map(|context| Some((context.idle_since()?, context)));
        idle.min_by_key(|(since, context)| (*since, context.number)).map(|(_, context)| context.clone())
    }
}

/// Returns the ids, newest context first.
fn ids(mut contexts: Vec<&Arc<Context>>) -> Vec<String> {
    contexts.sort_by_key(|c| std::cmp::Reverse(c.number));
    contexts.iter().map(|c| c.id.clone()).collect()
}

/// The reason why there is no room for another context.
pub(crate) enum Full {
    /// This idle context was removed to make room. The room becomes available once its sandbox is gone.
    Evict(Removed),
    /// No context can be evicted.
    Refused(EngineError),
}

/// The share of one context in the limits that apply across tenants and realms. Dropping it gives the share back.
pub(crate) struct Charge {
    tenant: Arc<TenantState>,
    realm: Arc<RealmState>,
    memory: u64,
}

impl Charge {
    fn take(tenant: &Arc<TenantState>, realm: &Arc<RealmState>, memory: u64) -> Result<Self, EngineError> {
        let most = tenant.most_contexts();
        let one_more = |held: usize| (held < most).then_some(held + 1);
        if tenant.contexts.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_more).is_err() {
            return Err(EngineError::OverLimit { what: LimitKind::Contexts, limit: most.to_string() });
        }
        let mut charge = Self { tenant: tenant.clone(), realm: realm.clone(), memory: 0 };
        let most = realm.config.max_total_memory_bytes.unwrap_or(u64::MAX);
        let more = |held: u64| held.checked_add(memory).filter(|held| *held <= most);
        if realm.memory.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more).is_err() {
            return Err(EngineError::OverLimit { what: LimitKind::TotalMemory, limit: (most >> 20).to_string() });
        }
        charge.memory = memory;
        Ok(charge)
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.tenant.contexts.fetch_sub(1, Ordering::SeqCst);
        self.realm.memory.fetch_sub(self.memory, Ordering::SeqCst);
    }
}

/// A context that is being stopped. It keeps its share of the limits until it is dropped.
pub(crate) struct Removed {
    pub(crate) context: Arc<Context>,
    reservation: Reservation,
}

impl Removed {
    /// Takes a permit as [`TenantState::ending`] does.
    pub(crate) fn ending(&self) -> Option<OwnedSemaphorePermit> {
        self.reservation.tenancy.tenant.ending()
    }
}

/// Room for one context within the limits. Dropping it gives the room back.
pub(crate) struct Reservation {
    tenancy: Arc<Tenancy>,
    charge: Option<Charge>,
}

impl Reservation {
    /// Adds the context and removes `old`, which may have the same id. Returns `None` if another context has the id, or
    /// if the tenant was removed.
    pub(crate) fn fill(
        mut self,
        mut context: Context,
        old: Option<&Arc<Context>>,
    ) -> Option<(ContextLease, Option<Removed>)> {
        let mut contexts = lock(&self.tenancy.contexts);
        let is_old = |there: &Arc<Context>| old.is_some_and(|old| Arc::ptr_eq(old, there));
        if contexts.by_id.get(&context.id).is_some_and(|there| !is_old(there))
            || self.tenancy.tenant.gone.is_cancelled()
        {
            return None;
        }
        let removed = old.and_then(|old| contexts.remove_exact(old, &self.tenancy));
        contexts.created += 1;
        context.number = contexts.created;
        *lock(&context.charge) = self.charge.take();
        let context = Arc::new(context);
        contexts.by_id.insert(context.id.clone(), context.clone());
        for (key, root) in [(&context.keys.files, Root::Workspace), (&context.keys.outputs, Root::Outputs)] {
            let leads_to = (Arc::downgrade(&self.tenancy), context.id.clone(), root);
            lock(&self.tenancy.links).insert(key.clone(), leads_to);
        }
        let in_use = ContextLease::new(&context);
        drop(contexts);
        Some((in_use, removed))
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        lock(&self.tenancy.contexts).unlisted -= 1;
    }
}

/// A call in the queue of its tenancy. Dropping it leaves the queue.
pub(crate) struct Queued(Arc<Tenancy>);

impl Drop for Queued {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::SeqCst);
    }
}

pub(crate) struct Tenancies {
    realms: BTreeMap<Realm, Arc<RealmState>>,
    all: Mutex<TenancyTables>,
    links: LinkIndex,
}

#[derive(Default)]
struct TenancyTables {
    tenants: HashMap<Tenant, Arc<TenantState>>,
    tenancies: HashMap<(Tenant, Realm), Arc<Tenancy>>,
    /// Quota of every tenant without an entry in `quotas`.
    quota: Quota,
    quotas: BTreeMap<Tenant, Quota>,
    mounts: Vec<Mount>,
    /// Tenants that were removed, with the time until which their calls are refused.
    removed: HashMap<Tenant, Instant>,
}

impl TenancyTables {
    fn quota_of(&self, tenant: &Tenant) -> &Quota {
        self.quotas.get(tenant).unwrap_or(&self.quota)
    }
}

impl Tenancies {
    pub(crate) fn new(config: &EngineConfig) -> Self {
        let state = |realm: &RealmConfig| {
            let network = Mutex::new(RealmNetwork::new(realm, config));
            (realm.realm, Arc::new(RealmState { config: realm.clone(), network, memory: AtomicU64::new(0) }))
        };
        let EngineConfig { quota, quotas, mounts, .. } = config.clone();
        let all = TenancyTables { quota, quotas, mounts, ..TenancyTables::default() };
        Self { realms: config.realms.iter().map(state).collect(), all: Mutex::new(all), links: LinkIndex::default() }
    }

    /// Applies the quotas and networks of another configuration to everything that begins from now on.
    pub(crate) fn reload(&self, config: &EngineConfig) {
        for realm in &config.realms {
            if let Some(state) = self.realms.get(&realm.realm) {
                *lock(&state.network) = RealmNetwork::new(realm, config);
            }
        }
        let mut all = lock(&self.all);
        (all.quota, all.quotas) = (config.quota.clone(), config.quotas.clone());
        all.removed.retain(|tenant, _| !config.quotas.contains_key(tenant));
        for (tenant, state) in &all.tenants {
            lock(&state.rules).set_quota(all.quota_of(tenant));
        }
    }

    /// Forgets a tenant and refuses its calls. Returns its tenancies.
    pub(crate) fn remove(&self, tenant: &Tenant) -> Vec<Arc<Tenancy>> {
        let (mut all, now) = (lock(&self.all), Instant::now());
        all.removed.retain(|_, until| *until > now);
        all.removed.insert(tenant.clone(), now + REFUSED);
        if let Some(state) = all.tenants.remove(tenant) {
            state.gone.cancel();
        }
        let own = |of: &(Tenant, Realm), _: &mut Arc<Tenancy>| of.0 == *tenant;
        all.tenancies.extract_if(own).map(|(_, tenancy)| tenancy).collect()
    }

    /// Returns the totals of the traffic through the egress.
    pub(crate) fn traffic(&self) -> egress::Traffic {
        let egress = self.realms.values().find_map(|state| lock(&state.network).egress.clone());
        egress.map(|egress| egress.traffic()).unwrap_or_default()
    }

    pub(crate) fn of(&self, tenant: &Tenant, realm: Realm) -> Result<Arc<Tenancy>, EngineError> {
        let mut all = lock(&self.all);
        if let Some(tenancy) = all.tenancies.get(&(tenant.clone(), realm)) {
            return Ok(tenancy.clone());
        }
        let unknown = || EngineError::NotReady(format!("the tool set `{}` is not configured", realm.0));
        let state = self.realms.get(&realm).ok_or_else(unknown)?;
        if all.removed.get(tenant).is_some_and(|until| *until > Instant::now()) {
            return Err(EngineError::NotReady("the operator removed this tenant".into()));
        }
        let of_all_realms = match all.tenants.get(tenant) {
            Some(known) => known.clone(),
            None => {
                let state = Arc::new(TenantState::new(tenant, all.quota_of(tenant).clone(), &all.mounts));
                all.tenants.insert(tenant.clone(), state.clone());
                state
            }
        };
        let tenancy = Arc::new(Tenancy::new(of_all_realms, state.clone(), self.links.clone()));
        all.tenancies.insert((tenant.clone(), realm), tenancy.clone());
        Ok(tenancy)
    }

    /// Returns an existing tenancy and never creates one.
    pub(crate) fn known(&self, tenant: &Tenant, realm: Realm) -> Option<Arc<Tenancy>> {
        lock(&self.all).tenancies.get(&(tenant.clone(), realm)).cloned()
    }

    /// Returns the context to which a link key leads, its tenant, and which directory of the context is meant.
    pub(crate) fn by_key(&self, key: &str) -> Option<(Tenant, ContextLease, Root)> {
        let (tenancy, id, root) = lock(&self.links).get(key)?.clone();
        let tenancy = tenancy.upgrade()?;
        let context = tenancy.find(&ContextSelector::Id(id), None).ok()?;
        Some((tenancy.tenant.tenant.clone(), context, root))
    }

    pub(crate) fn realms(&self) -> impl Iterator<Item = &RealmConfig> {
        self.realms.values().map(|state| &state.config)
    }

    pub(crate) fn all(&self) -> Vec<Arc<Tenancy>> {
        lock(&self.all).tenancies.values().cloned().collect()
    }

    /// Forgets tenants without contexts and background runs. A tenant with ready sandboxes stays, because they belong
    /// to its groups.
    pub(crate) fn forget_idle(&self) {
        let mut all = lock(&self.all);
        let in_use = |tenancy: &Arc<Tenancy>| Arc::strong_count(tenancy) > 1 || tenancy.has_contexts();
        all.tenancies.retain(|_, tenancy| in_use(tenancy));
        all.tenants.retain(|_, state| Arc::strong_count(state) > 1 || !state.background.is_empty());
    }

    pub(crate) fn tenants(&self) -> Vec<Arc<TenantState>> {
        lock(&self.all).tenants.values().cloned().collect()
    }

    pub(crate) fn in_realm(&self, realm: Realm) -> Vec<Arc<Tenancy>> {
        let all = lock(&self.all);
        all.tenancies.iter().filter(|((_, of), _)| *of == realm).map(|(_, tenancy)| tenancy.clone()).collect()
    }
}
