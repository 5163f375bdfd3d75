//! Conversations. Their files outlive every sandbox, and only one sandbox at a time has them, so calls take turns.
//!
//! A sandbox in which no code has run stays parked for a few seconds, for the next call that needs the files. Code runs
//! in a new sandbox for each call. If calls follow each other quickly, the next sandbox is created in advance.
//!
//! Unlike the launcher's parked volumes (`jail/pool.rs`), parked sandboxes are bounded for each tenant. While a call
//! uses one, the turn of its conversation protects it from being displaced.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use proto::{KernelId, KernelSpec, Language};
use sandbox::{Group, KeptVolume};
use text::unix_now;
use tokio::time::Instant;

use crate::config::{KeptConfig, RealmConfig};
use crate::engine::Inner;
use crate::guest::lock;
use crate::keyed::{Keyed, KeyedState, Turn};
use crate::op::{ContextInfo, EngineError, LimitKind, NoticeKind, Realm, Tenant};
use crate::provision::{FIRST_KERNEL, Shape, rehearse};
use crate::registry::{LiveSandbox, SandboxFailure};
use crate::tenancy::Tenancy;
use crate::workspaces;

/// Time that a parked sandbox, in which no code has run, stays after its last use.
pub(crate) const PARKED: Duration = Duration::from_secs(10);
/// Maximum number of parked sandboxes of all tenants. A tenant gets at most half of them.
const MAX_PARKED: usize = 32;
/// If a call follows another within this time, a third call is likely to follow.
const FOLLOW_UP: Duration = Duration::from_secs(60);
/// Maximum time for which the creation of a sandbox in advance yields to callers that wait for a sandbox.
const PREPARE_WAIT: Duration = Duration::from_millis(100);
/// Maximum time to wait for room to park a sandbox.
const PARKING_WAIT: Duration = Duration::from_secs(30);
/// Interval at which a call that waits for room looks for a parked sandbox to displace.
const PARKING_LOOK: Duration = Duration::from_millis(50);
/// Interval between searches for parked sandboxes to destroy.
pub(crate) const PARKING_SWEEP: Duration = Duration::from_secs(2);
/// Interval between searches for kept volumes to delete.
pub(crate) const KEPT_SWEEP: Duration = Duration::from_secs(60 * 60);

#[derive(Default)]
pub(crate) struct Conversations {
    /// Turns and parked sandboxes by the key of the conversation.
    pub(crate) turns: Keyed<ParkingSlot>,
    parking: ParkingPermits,
    known: Mutex<ConversationIndex>,
    /// Calls that run code, by the key of the conversation.
    running: Arc<Mutex<HashMap<String, ConversationRun>>>,
}

/// Code that runs in a conversation.
#[derive(Clone)]
pub(crate) struct ConversationRun {
    pub(crate) tenant: Tenant,
    pub(crate) realm: Realm,
    pub(crate) info: ContextInfo,
    pub(crate) sandbox: Arc<LiveSandbox>,
}

/// Lists a run until it is dropped.
#[must_use]
pub(crate) struct ListedRun {
    running: Arc<Mutex<HashMap<String, ConversationRun>>>,
    key: String,
}

impl Drop for ListedRun {
    fn drop(&mut self) {
        lock(&self.running).remove(&self.key);
    }
}

/// The permits for parked sandboxes of all tenants. A tenant gets no permit while it has as many as are free, so that
/// tenants that take all they can leave some to the next one.
#[derive(Default)]
struct ParkingPermits {
    held: Arc<Mutex<HashMap<ParkingOwner, usize>>>,
    /// Calls that wait for a permit, by owner. Only the first call of each owner looks for room.
    waiting: Keyed<()>,
}

/// The tenant whose permit a parked sandbox uses. All links of unknown tenants share one owner, `None`.
type ParkingOwner = Option<Tenant>;

/// Permission to park one sandbox. Dropping it gives the permit back.
#[must_use]
struct ParkingPermit {
    held: Arc<Mutex<HashMap<ParkingOwner, usize>>>,
    owner: ParkingOwner,
}

impl ParkingPermits {
    fn take(&self, owner: &ParkingOwner) -> Option<ParkingPermit> {
        let mut held = lock(&self.held);
        let free = MAX_PARKED - held.values().sum::<usize>();
        let own = held.get(owner).copied().unwrap_or(0);
        if own >= free {
            return None;
        }
        held.insert(owner.clone(), own + 1);
        Some(ParkingPermit { held: self.held.clone(), owner: owner.clone() })
    }

    fn held_by(&self, owner: &ParkingOwner) -> usize {
        lock(&self.held).get(owner).copied().unwrap_or(0)
    }
}

impl Drop for ParkingPermit {
    fn drop(&mut self) {
        let mut held = lock(&self.held);
        if let Some(own) = held.get_mut(&self.owner) {
            *own -= 1;
            if *own == 0 {
                held.remove(&self.owner);
            }
        }
    }
}

#[derive(Default)]
struct ConversationIndex {
    /// Names of the kept volumes that existed when the back end last listed them.
    kept: HashSet<String>,
    /// Owners of the conversations that were used since the engine started.
    owners: HashMap<String, ConversationOwner>,
}

struct ConversationOwner {
    tenant: Tenant,
    conversation: String,
    last_used: Instant,
    /// Time of the last call that ran code.
    last_call: Option<Instant>,
}

/// The state of a conversation between two turns: its parked sandbox, if it has one.
#[derive(Default)]
pub(crate) struct ParkingSlot {
    parked: Option<ParkedSandbox>,
}

struct ParkedSandbox {
    sandbox: Arc<LiveSandbox>,
    shape: Shape,
    /// Language of its kernel, if it has one.
    language: Option<Language>,
    since: Instant,
    permit: ParkingPermit,
}

impl ParkingSlot {
    /// Destroys the parked sandbox, if there is one.
    async fn clear(&mut self) {
        if let Some(parked) = self.parked.take() {
            let _ = parked.sandbox.destroy("nobody needs its files at the moment").await;
        }
    }
}

impl KeyedState for ParkingSlot {
    fn is_empty(&self) -> bool {
        self.parked.is_none()
    }
}

impl Conversations {
    /// Records the use of a conversation and its tenant. Fails if the tenant has too many conversations.
    pub(crate) fn register(&self, key: &str, tenancy: &Tenancy, conversation: &str) -> Result<(), EngineError> {
        let (tenant, most) = (&tenancy.tenant.tenant, tenancy.config().max_contexts);
        let (last_used, mut known) = (Instant::now(), lock(&self.known));
        if let Some(owner) = known.owners.get_mut(key) {
            owner.last_used = last_used;
            return Ok(());
        }
        if known.owners.values().filter(|owner| owner.tenant == *tenant).count() >= most {
            return Err(EngineError::OverLimit { what: LimitKind::MaxContexts, limit: most.to_string() });
        }
        let owner = ConversationOwner {
            tenant: tenant.clone(),
            conversation: conversation.to_owned(),
            last_used,
            last_call: None,
        };
        known.owners.insert(key.to_owned(), owner);
        Ok(())
    }

    /// Records a run, and returns whether the conversation had another one shortly before.
    pub(crate) fn record_run(&self, key: &str) -> bool {
        let before = lock(&self.known).owners.get_mut(key).and_then(|owner| owner.last_call.replace(Instant::now()));
        before.is_some_and(|before| before.elapsed() < FOLLOW_UP)
    }

    pub(crate) fn exists(&self, key: &str) -> bool {
        let known = lock(&self.known);
        known.kept.contains(key) || known.owners.contains_key(key)
    }

    pub(crate) fn owner(&self, key: &str) -> Option<Tenant> {
        lock(&self.known).owners.get(key).map(|owner| owner.tenant.clone())
    }

    /// Returns the tenant and the id of a conversation.
    pub(crate) fn named(&self, key: &str) -> Option<(Tenant, String)> {
        lock(&self.known).owners.get(key).map(|owner| (owner.tenant.clone(), owner.conversation.clone()))
    }

    /// Records the volumes that the back end had at the time `asked`. A conversation that was last used before that
    /// time and has no volume is forgotten, because its files were never created.
    fn update(&self, asked: Instant, kept: HashSet<String>) {
        let in_use = self.turns.names();
        let mut known = lock(&self.known);
        known.owners.retain(|key, owner| kept.contains(key) || owner.last_used >= asked || in_use.contains(key));
        known.kept = kept;
    }

    /// Returns whether the conversation was used within `time`. This uses the monotonic clock, because the clock behind
    /// the times of the volumes may jump.
    fn used_within(&self, key: &str, time: Duration) -> bool {
        lock(&self.known).owners.get(key).is_some_and(|owner| owner.last_used.elapsed() < time)
    }

    /// Lists a run for the operator. A conversation has at most one, because its calls take turns.
    pub(crate) fn list(&self, run: ConversationRun) -> ListedRun {
        let key = run.info.key.clone();
        lock(&self.running).insert(key.clone(), run);
        ListedRun { running: self.running.clone(), key }
    }

    pub(crate) fn running(&self) -> Vec<ConversationRun> {
        lock(&self.running).values().cloned().collect()
    }

    pub(crate) fn count(&self) -> usize {
        lock(&self.known).owners.len()
    }
}

impl Inner {
    /// Returns a sandbox for the files of a conversation, in which no code runs. It stays parked for the next call.
    pub(crate) async fn sandbox_for_data(
        &self,
        turn: &mut Turn<ParkingSlot>,
        shape: &Shape,
    ) -> Result<Arc<LiveSandbox>, SandboxFailure> {
        if let Some(parked) = turn.parked.as_mut().filter(|parked| !parked.sandbox.guest.is_lost()) {
            parked.since = Instant::now();
            parked.sandbox.is_used();
            return Ok(parked.sandbox.clone());
        }
        turn.parked = None;
        let permit = self.parking_permit(&self.parking_owner(shape)).await?;
        let provisioner = self.provisioner().map_err(|error| SandboxFailure::new(error.to_string()))?;
        let _waiting = provisioner.caller_waits();
        let sandbox = provisioner.create(shape, None).await?;
        sandbox.is_used();
        let since = Instant::now();
        turn.parked =
            Some(ParkedSandbox { sandbox: sandbox.clone(), shape: shape.clone(), language: None, since, permit });
        Ok(sandbox)
    }

    /// Returns a sandbox in which no code has run, with a kernel started as `kernel` specifies. The caller destroys it.
    pub(crate) async fn sandbox_for_code(
        &self,
        turn: &mut Turn<ParkingSlot>,
        shape: &Shape,
        kernel: KernelSpec,
    ) -> Result<(Arc<LiveSandbox>, KernelId), SandboxFailure> {
        let provisioner = self.provisioner().map_err(|error| SandboxFailure::new(error.to_string()))?;
        let _waiting = provisioner.caller_waits();
        let (sandbox, number) = match turn.parked.take() {
            Some(ParkedSandbox { sandbox, shape: of, language, .. }) if of == *shape && !sandbox.guest.is_lost() => {
                if language == Some(kernel.language) && !sandbox.guest.has_exited(FIRST_KERNEL) {
                    return Ok((sandbox, FIRST_KERNEL));
                }
                (sandbox, if language.is_some() { FIRST_KERNEL + 1 } else { FIRST_KERNEL })
            }
            parked => {
                if let Some(parked) = parked {
                    // Only one sandbox at a time can have the files.
                    parked.sandbox.destroy("its files are needed elsewhere").await?;
                }
                (provisioner.create(shape, Some(kernel.language)).await?, FIRST_KERNEL)
            }
        };
        let started = provisioner.start_kernel_as(&sandbox, number, kernel).await;
        Ok((sandbox.if_started(started).await?, number))
    }

    /// Creates the sandbox of the next call, after everything that callers wait for. Does nothing if there is no room,
    /// or if the next call has already arrived.
    pub(crate) async fn prepare(&self, key: &str, shape: Shape, kernel: KernelSpec) {
        let Ok(provisioner) = self.provisioner() else { return };
        provisioner.yield_to_callers(PREPARE_WAIT).await;
        let Some(permit) = self.conversations.parking.take(&self.parking_owner(&shape)) else { return };
        let Some(mut turn) = self.conversations.turns.try_turn(key) else { return };
        if turn.parked.is_some() {
            return;
        }
        let language = kernel.language;
        let creating = async {
            let sandbox = provisioner.create(&shape, Some(language)).await?;
            let started = match provisioner.start_kernel_as(&sandbox, FIRST_KERNEL, kernel).await {
                Ok(()) => rehearse(&sandbox, language).await.map_err(SandboxFailure::new),
                Err(failure) => Err(failure),
            };
            sandbox.if_started(started).await
        };
        match creating.await {
            Ok(sandbox) => {
                let since = Instant::now();
                turn.parked = Some(ParkedSandbox { sandbox, shape, language: Some(language), since, permit });
            }
            Err(SandboxFailure { log, .. }) => {
                tracing::debug!(why = log, "no sandbox could be created for the next call")
            }
        }
    }

    fn parking_owner(&self, shape: &Shape) -> ParkingOwner {
        shape.kept.as_ref().and_then(|volume| self.conversations.owner(&volume.name))
    }

    /// Waits for a permit to park a sandbox, and displaces parked sandboxes that no call uses.
    async fn parking_permit(&self, owner: &ParkingOwner) -> Result<ParkingPermit, SandboxFailure> {
        let (parking, until) = (&self.conversations.parking, Instant::now() + PARKING_WAIT);
        let full = || SandboxFailure::new("too many files are read at once; retry later");
        let queue = owner.as_ref().map_or("", |tenant| tenant.0.as_str());
        let _first = tokio::time::timeout_at(until, parking.waiting.turn(queue)).await.map_err(|_| full())?;
        loop {
            if let Some(permit) = parking.take(owner) {
                return Ok(permit);
            }
            if Instant::now() >= until {
                return Err(full());
            }
            if !self.displace(owner).await {
                tokio::time::sleep(PARKING_LOOK).await;
            }
        }
    }

    /// Destroys a parked sandbox that no call uses, to make room for `owner`: the oldest one of the owner that has the
    /// most. Only `owner` itself and owners that have more are considered. Returns whether there was one.
    async fn displace(&self, owner: &ParkingOwner) -> bool {
        let parking = &self.conversations.parking;
        let own = parking.held_by(owner);
        let candidates = self.unused_parked().into_iter().filter_map(|(since, turn)| {
            let of = &turn.parked.as_ref()?.permit.owner;
            let held = parking.held_by(of);
            (of == owner || held > own).then_some((held, Reverse(since), turn))
        });
        match candidates.max_by_key(|(held, since, _)| (*held, *since)) {
            Some((.., mut turn)) => {
                turn.clear().await;
                true
            }
            None => false,
        }
    }

    /// Destroys parked sandboxes that were unused for at least `unused`, oldest first.
    pub(crate) async fn unpark(&self, unused: Duration) {
        let mut old = self.unused_parked();
        old.retain(|(since, _)| since.elapsed() >= unused);
        old.sort_by_key(|(since, _)| *since);
        for (_, mut turn) in old {
            turn.clear().await;
        }
    }

    /// Returns the turns of conversations with a parked sandbox that no call uses, and the time of its last use.
    fn unused_parked(&self) -> Vec<(Instant, Turn<ParkingSlot>)> {
        let turns = &self.conversations.turns;
        let free = turns.names().into_iter().filter_map(|name| turns.try_turn(&name));
        free.filter_map(|turn| Some((turn.parked.as_ref()?.since, turn))).collect()
    }

    /// Deletes the files of conversations that were unused for too long, and records which conversations exist.
    pub(crate) async fn sweep_kept(&self, realm: Realm, kept: KeptConfig) {
        let (backend, asked) = (self.registry.backend(), Instant::now());
        let all = match backend.kept().await {
            Ok(all) => all.into_iter().filter(|volume| !workspaces::is_workspace(&volume.name)).collect::<Vec<_>>(),
            Err(error) => return tracing::warn!(%error, "cannot list the files of conversations"),
        };
        let oldest = unix_now().saturating_sub(kept.stays.as_secs());
        self.conversations.update(asked, all.iter().map(|volume| volume.name.clone()).collect());
        for volume in all.into_iter().filter(|volume| volume.last_used < oldest) {
            // If the turn is taken, a call uses the volume.
            let Some(turn) = self.conversations.turns.try_turn(&volume.name) else { continue };
            if !turn.is_empty() || self.conversations.used_within(&volume.name, kept.stays) {
                continue;
            }
            match backend.discard(&volume.name).await {
                Ok(()) => self.forget(&volume.name, realm),
                Err(error) => tracing::debug!(%error, "the files of a conversation cannot be deleted now"),
            }
        }
    }

    fn forget(&self, key: &str, realm: Realm) {
        let mut known = lock(&self.conversations.known);
        known.kept.remove(key);
        let owner = known.owners.remove(key);
        drop(known);
        tracing::info!(key = &key[..key.len().min(8)], "the files of an old conversation are deleted");
        if let Some(ConversationOwner { tenant, conversation, .. }) = owner {
            self.notify_of(tenant, realm, &conversation, NoticeKind::Expired);
        }
    }
}

impl KeptConfig {
    fn volume(self, key: &str) -> KeptVolume {
        KeptVolume { name: key.into(), bytes: self.bytes, inodes: self.inodes, workspace: None }
    }
}

impl Shape {
    pub(crate) fn with_data(tenancy: &Tenancy, key: &str, kept: KeptConfig) -> Self {
        let (kept, limits) = (Some(kept.volume(key)), tenancy.config().limits);
        Self { kept, limits, egress: None, browser: None, ..Self::of(tenancy, None) }
    }

    /// Returns the shape of a sandbox for a link to files whose tenant is unknown. The key alone is the permission to
    /// read them.
    pub(crate) fn for_link(realm: &RealmConfig, key: &str, kept: KeptConfig) -> Self {
        let group = |name: &str| Group { name: name.into(), memory_bytes: None, cpu_millis: None };
        Self {
            tenant: None,
            groups: vec![group("links"), group(realm.realm.0)],
            limits: realm.limits,
            volumes: Vec::new(),
            kept: Some(kept.volume(key)),
            egress: None,
            browser: None,
        }
    }
}
