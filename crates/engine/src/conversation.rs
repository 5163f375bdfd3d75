//! Conversations: their files outlive every sandbox. One sandbox at a time has them; who needs one takes a turn.
//!
//! A sandbox in which no code has run is left for the next who needs the files, for a few seconds. Of code's own there is one a call;
//! in a conversation that goes on, the next one is made before it is asked for.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use proto::{KernelId, KernelSpec, Language};
use sandbox::{Group, KeptVolume};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use crate::config::{KeptConfig, RealmConfig};
use crate::context::unix_now;
use crate::engine::Inner;
use crate::guest::lock;
use crate::keyed::{Keyed, KeyedState, Turn};
use crate::op::{EngineError, NoticeKind, Tenant};
use crate::provision::{FIRST_KERNEL, Shape, rehearse};
use crate::registry::{LiveSandbox, SandboxFailure};
use crate::tenancy::Tenancy;

/// How long a sandbox without code stays after its last use.
pub(crate) const PARKED: Duration = Duration::from_secs(10);
/// How many there may be; with one more the longest unused one goes.
const MAX_PARKED: usize = 16;
/// A call that follows another within this time is likely to be followed by a third.
const GOES_ON: Duration = Duration::from_secs(60);
/// What is made before it is asked for waits so long for those who wait.
const BEHIND: Duration = Duration::from_millis(100);
/// How long it may take until there is room for one.
const PARKING_WAIT: Duration = Duration::from_secs(30);
/// How often parked sandboxes are looked at.
pub(crate) const PARKING_SWEEP: Duration = Duration::from_secs(2);
/// How often kept files are.
pub(crate) const KEPT_SWEEP: Duration = Duration::from_secs(60 * 60);

pub(crate) struct Conversations {
    /// By key.
    pub(crate) turns: Keyed<ParkingSlot>,
    parking: Arc<Semaphore>,
    known: Mutex<ConversationIndex>,
}

#[derive(Default)]
struct ConversationIndex {
    /// Volumes that existed when the back end was last asked.
    kept: HashSet<String>,
    /// Who used which conversation since the engine began.
    owners: HashMap<String, ConversationOwner>,
}

struct ConversationOwner {
    tenant: Tenant,
    conversation: String,
    last_used: Instant,
    /// Of code.
    last_call: Option<Instant>,
}

/// What is left between two turns.
#[derive(Default)]
pub(crate) struct ParkingSlot {
    parked: Option<ParkedSandbox>,
}

struct ParkedSandbox {
    place: Arc<LiveSandbox>,
    shape: Shape,
    /// Of its interpreter, if it has one.
    language: Option<Language>,
    since: Instant,
    _room: OwnedSemaphorePermit,
}

impl KeyedState for ParkingSlot {
    fn is_nothing(&self) -> bool {
        self.parked.is_none()
    }
}

impl Default for Conversations {
    fn default() -> Self {
        Self { turns: Keyed::default(), parking: Arc::new(Semaphore::new(MAX_PARKED)), known: Mutex::default() }
    }
}

impl Conversations {
    /// Remembers whose it is. Refused when the tenant has too many.
    pub(crate) fn note(&self, key: &str, tenancy: &Tenancy, conversation: &str) -> Result<(), EngineError> {
        let (tenant, most) = (&tenancy.tenant.tenant, tenancy.config().max_contexts);
        let (last_used, mut known) = (Instant::now(), lock(&self.known));
        if let Some(owner) = known.owners.get_mut(key) {
            owner.last_used = last_used;
            return Ok(());
        }
        if known.owners.values().filter(|owner| owner.tenant == *tenant).count() >= most {
            return Err(EngineError::OverLimit { what: "max_contexts", limit: most.to_string() });
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

    /// Code is called; whether that has happened shortly before.
    pub(crate) fn goes_on(&self, key: &str) -> bool {
        let before = lock(&self.known).owners.get_mut(key).and_then(|owner| owner.last_call.replace(Instant::now()));
        before.is_some_and(|before| before.elapsed() < GOES_ON)
    }

    pub(crate) fn exists(&self, key: &str) -> bool {
        let known = lock(&self.known);
        known.kept.contains(key) || known.owners.contains_key(key)
    }

    pub(crate) fn owner(&self, key: &str) -> Option<Tenant> {
        lock(&self.known).owners.get(key).map(|owner| owner.tenant.clone())
    }

    /// What the back end had at that moment. What was last used before that and is not there was never made.
    fn learn(&self, asked: Instant, kept: HashSet<String>) {
        let waited_for = self.turns.names();
        let mut known = lock(&self.known);
        known.owners.retain(|key, owner| kept.contains(key) || owner.last_used >= asked || waited_for.contains(key));
        known.kept = kept;
    }

    /// By the clock that never jumps: that of the volumes' times does.
    fn used_within(&self, key: &str, time: Duration) -> bool {
        lock(&self.known).owners.get(key).is_some_and(|owner| owner.last_used.elapsed() < time)
    }

    pub(crate) fn count(&self) -> usize {
        lock(&self.known).owners.len()
    }
}

impl Inner {
    /// A sandbox for a conversation's files, in which no code runs. Left there for the next.
    pub(crate) async fn place_for_data(
        &self,
        turn: &mut Turn<ParkingSlot>,
        shape: &Shape,
    ) -> Result<Arc<LiveSandbox>, SandboxFailure> {
        if let Some(parked) = turn.parked.as_mut().filter(|parked| !parked.place.guest.is_lost()) {
            parked.since = Instant::now();
            return Ok(parked.place.clone());
        }
        turn.parked = None;
        let room = self.parking_room().await?;
        let provisioner = self.provisioner().map_err(|error| SandboxFailure::new(error.to_string()))?;
        let place = provisioner.sandbox(shape, None).await?;
        let since = Instant::now();
        turn.parked =
            Some(ParkedSandbox { place: place.clone(), shape: shape.clone(), language: None, since, _room: room });
        Ok(place)
    }

    /// A sandbox for code: one in which none has run yet, with an interpreter started as told. The caller destroys it.
    pub(crate) async fn place_for_code(
        &self,
        turn: &mut Turn<ParkingSlot>,
        shape: &Shape,
        kernel: KernelSpec,
    ) -> Result<(Arc<LiveSandbox>, KernelId), SandboxFailure> {
        let provisioner = self.provisioner().map_err(|error| SandboxFailure::new(error.to_string()))?;
        let _hurry = provisioner.hurry();
        let (place, number) = match turn.parked.take() {
            Some(ParkedSandbox { place, shape: of, language, .. }) if of == *shape && !place.guest.is_lost() => {
                if language == Some(kernel.language) && !place.guest.has_exited(FIRST_KERNEL) {
                    return Ok((place, FIRST_KERNEL));
                }
                (place, if language.is_some() { FIRST_KERNEL + 1 } else { FIRST_KERNEL })
            }
            parked => {
                if let Some(parked) = parked {
                    // Only one sandbox at a time can have the files.
                    parked.place.destroy("its files are needed elsewhere").await?;
                }
                (provisioner.create_in_background(shape, Some(kernel.language)).await?, FIRST_KERNEL)
            }
        };
        match provisioner.start_as_told(&place, number, kernel).await {
            Ok(()) => Ok((place, number)),
            Err(failure) => {
                let _ = place.destroy("its interpreter did not start").await;
                Err(failure)
            }
        }
    }

    /// Makes the sandbox of the next call, behind everybody who waits. Nothing comes of it where there is no room, or the call is
    /// there already.
    pub(crate) async fn prepare(&self, key: &str, shape: Shape, kernel: KernelSpec) {
        let Ok(provisioner) = self.provisioner() else { return };
        provisioner.nobody_waits(BEHIND).await;
        let Ok(room) = self.conversations.parking.clone().try_acquire_owned() else { return };
        let Some(mut turn) = self.conversations.turns.try_turn(key) else { return };
        if turn.parked.is_some() {
            return;
        }
        let language = kernel.language;
        let making = async {
            let place = provisioner.create_in_background(&shape, Some(language)).await?;
            let started = match provisioner.start_as_told(&place, FIRST_KERNEL, kernel).await {
                Ok(()) => rehearse(&place, language).await.map_err(SandboxFailure::new),
                Err(failure) => Err(failure),
            };
            match started {
                Ok(()) => Ok(place),
                Err(failure) => {
                    let _ = place.destroy("its interpreter did not start").await;
                    Err(failure)
                }
            }
        };
        match making.await {
            Ok(place) => {
                let since = Instant::now();
                turn.parked = Some(ParkedSandbox { place, shape, language: Some(language), since, _room: room });
            }
            Err(SandboxFailure { log, .. }) => tracing::debug!(why = log, "nothing could be made for the next call"),
        }
    }

    async fn parking_room(&self) -> Result<OwnedSemaphorePermit, SandboxFailure> {
        let parking = &self.conversations.parking;
        if let Ok(room) = parking.clone().try_acquire_owned() {
            return Ok(room);
        }
        self.unpark(Duration::ZERO, 1).await;
        let waiting = tokio::time::timeout(PARKING_WAIT, parking.clone().acquire_owned()).await;
        waiting
            .ok()
            .and_then(Result::ok)
            .ok_or_else(|| SandboxFailure::new("too many files are read at once; retry later"))
    }

    /// Destroys sandboxes nobody has used for so long, at most as many, those unused for the longest time first.
    pub(crate) async fn unpark(&self, unused: Duration, most: usize) {
        let turns = &self.conversations.turns;
        let free = turns.names().into_iter().filter_map(|name| turns.try_turn(&name));
        let mut old: Vec<(Instant, Turn<ParkingSlot>)> = free
            .filter_map(|turn| turn.parked.as_ref().map(|parked| parked.since).map(|since| (since, turn)))
            .filter(|(since, _)| since.elapsed() >= unused)
            .collect();
        old.sort_by_key(|(since, _)| *since);
        old.truncate(most);
        for (_, mut turn) in old {
            if let Some(parked) = turn.parked.take() {
                let _ = parked.place.destroy("nobody needs its files at the moment").await;
            }
        }
    }

    /// Deletes the files of conversations nobody has used for long, and learns which there are.
    pub(crate) async fn sweep_kept(&self, realm: &RealmConfig, kept: KeptConfig) {
        let (backend, asked) = (self.live.backend(), Instant::now());
        let all = match backend.kept().await {
            Ok(all) => all,
            Err(error) => return tracing::warn!(%error, "cannot list the files of conversations"),
        };
        let oldest = unix_now().saturating_sub(kept.stays.as_secs());
        self.conversations.learn(asked, all.iter().map(|volume| volume.name.clone()).collect());
        for volume in all.into_iter().filter(|volume| volume.last_used < oldest) {
            // Whoever has a turn uses it now.
            let Some(turn) = self.conversations.turns.try_turn(&volume.name) else { continue };
            if !turn.is_nothing() || self.conversations.used_within(&volume.name, kept.stays) {
                continue;
            }
            match backend.discard(&volume.name).await {
                Ok(()) => self.forgotten(&volume.name, realm),
                Err(error) => tracing::debug!(%error, "the files of a conversation cannot be deleted now"),
            }
        }
    }

    fn forgotten(&self, key: &str, realm: &RealmConfig) {
        let mut known = lock(&self.conversations.known);
        known.kept.remove(key);
        let owner = known.owners.remove(key);
        drop(known);
        tracing::info!(key = &key[..key.len().min(8)], "the files of an old conversation are deleted");
        if let Some(ConversationOwner { tenant, conversation, .. }) = owner {
            self.notify_of(tenant, realm.realm, &conversation, NoticeKind::Expired);
        }
    }
}

impl Shape {
    pub(crate) fn with_data(tenancy: &Tenancy, key: &str, kept: KeptConfig) -> Self {
        let KeptConfig { bytes, inodes, .. } = kept;
        let volume = KeptVolume { name: key.into(), bytes, inodes };
        Self {
            kept: Some(volume),
            limits: tenancy.config().limits,
            exit: None,
            browser: None,
            ..Self::of(tenancy, None)
        }
    }

    /// For a link to files whose tenant is not known: the key alone says that they may be read.
    pub(crate) fn for_link(realm: &RealmConfig, key: &str, kept: KeptConfig) -> Self {
        let KeptConfig { bytes, inodes, .. } = kept;
        let group = |name: &str| Group { name: name.into(), memory_bytes: None, cpu_millis: None };
        Self {
            groups: vec![group("links"), group(realm.realm.0)],
            limits: realm.limits,
            volumes: Vec::new(),
            kept: Some(KeptVolume { name: key.into(), bytes, inodes }),
            exit: None,
            browser: None,
        }
    }
}
