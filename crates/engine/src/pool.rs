//! The sessions: sandboxes with a started Python interpreter, kept ready so that a new context need not wait for one.
//!
//! A session is real: it has an id, an age and a health that is measured by running a statement in it. A context takes one
//! out for good, and the pool makes another. State of contexts is never in the pool.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use proto::{Deadline, FromGuest, KernelId, Language, RunStatus, ToGuest};
use sandbox::{Group, KeptVolume, Limits, SandboxSpec, SharedVolume};
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::{EngineConfig, RealmConfig, Runtimes};
use crate::guest::{Answer, lock};
use crate::holdings::Holdings;
use crate::live::{Failure, Live, Place};

/// The kernel of a session, started before anybody has asked for it.
pub(crate) const FIRST_KERNEL: KernelId = 1;
/// Leaves nothing behind in the interpreter: an expression would be remembered as the last value.
const STATEMENT: &str = "pass";
const CHECK_DEADLINE: Duration = Duration::from_secs(5);
const START_ATTEMPTS: u32 = 3;

pub(crate) struct Session {
    pub(crate) id: String,
    pub(crate) place: Arc<Place>,
    born: Instant,
    /// Out for a moment: its interpreter runs the statement of the health check.
    checking: bool,
    healthy: bool,
}

impl Session {
    fn is_fit(&self) -> bool {
        self.healthy && !self.place.guest.is_lost() && !self.place.guest.has_exited(FIRST_KERNEL)
    }
}

/// What makes one sandbox differ from another. A session serves only who needs one exactly like it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Shape {
    pub(crate) groups: Vec<Group>,
    pub(crate) limits: Limits,
    pub(crate) volumes: Vec<SharedVolume>,
    pub(crate) kept: Option<KeptVolume>,
}

impl Shape {
    pub(crate) fn of(holdings: &Holdings, limits: Limits) -> Self {
        Self { groups: holdings.groups(), limits, volumes: holdings.config().volumes.clone(), kept: None }
    }
}

/// How sandboxes are made; shared by the pool and by contexts that need a new one.
pub(crate) struct Maker {
    pub(crate) live: Live,
    pub(crate) config: Arc<EngineConfig>,
    pub(crate) runtimes: Runtimes,
}

impl Maker {
    pub(crate) async fn sandbox(&self, shape: &Shape) -> Result<Arc<Place>, Failure> {
        let Shape { groups, limits, volumes, kept } = shape.clone();
        let (runtime, files) = (self.runtimes.binds(), self.runtimes.files.clone());
        self.live.make(SandboxSpec { groups, limits, runtime, files, volumes, kept }).await
    }

    pub(crate) async fn start_kernel(
        &self,
        place: &Place,
        kernel: KernelId,
        language: Language,
    ) -> Result<(), Failure> {
        let spec = self.runtimes.kernel(language, &self.config.cwd);
        let spec = spec.ok_or_else(|| Failure::new("no JavaScript runtime is installed"))?;
        place.start_kernel(kernel, spec).await.map(drop)
    }

    /// A sandbox with an interpreter; on failure nothing is left of it.
    pub(crate) async fn started(&self, shape: &Shape, language: Language) -> Result<Arc<Place>, Failure> {
        let place = self.sandbox(shape).await?;
        if let Err(failure) = self.start_kernel(&place, FIRST_KERNEL, language).await {
            let _ = place.destroy("its interpreter did not start").await;
            return Err(failure);
        }
        Ok(place)
    }
}

#[derive(Clone)]
pub(crate) struct Pool {
    shared: Arc<Shared>,
}

struct Shared {
    maker: Arc<Maker>,
    shape: Shape,
    size: usize,
    ttl: Duration,
    sessions: Mutex<Vec<Session>>,
    /// Something changed: a session was taken, or lost.
    changed: Notify,
    tasks: TaskTracker,
    closing: CancellationToken,
}

pub(crate) struct Count {
    pub(crate) sessions: usize,
    pub(crate) available: usize,
    pub(crate) healthy: bool,
}

impl Pool {
    pub(crate) fn new(
        maker: Arc<Maker>,
        shape: Shape,
        realm: &RealmConfig,
        tasks: TaskTracker,
        closing: CancellationToken,
    ) -> Self {
        let shared = Shared {
            maker,
            shape,
            size: realm.sessions(),
            ttl: realm.session_ttl,
            sessions: Mutex::default(),
            changed: Notify::new(),
            tasks,
            closing,
        };
        Self { shared: Arc::new(shared) }
    }

    /// Fills the pool, all sessions at once, each tried three times. `made` hears of each in order.
    pub(crate) async fn fill(&self, mut made: impl FnMut(usize, &str)) -> Result<(), Failure> {
        let mut building: Vec<_> = (0..self.shared.size)
            .map(|_| {
                let pool = self.clone();
                self.shared.tasks.spawn(async move { pool.build_stubbornly().await })
            })
            .collect();
        let mut failed = None;
        for (number, task) in building.iter_mut().enumerate() {
            match task.await.unwrap_or_else(|_| Err(Failure::new("making a session was given up"))) {
                Ok(session) => {
                    made(number + 1, &session.id);
                    self.add(session);
                }
                Err(failure) => failed = Some(failure),
            }
        }
        failed.map_or(Ok(()), Err)
    }

    async fn build_stubbornly(&self) -> Result<Session, Failure> {
        let mut last = Failure::new("not tried");
        for attempt in 1..=START_ATTEMPTS {
            match self.build().await {
                Ok(session) => return Ok(session),
                Err(failure) => {
                    tracing::warn!(attempt, why = failure.log, "a session could not be made");
                    last = failure;
                }
            }
        }
        Err(last)
    }

    async fn build(&self) -> Result<Session, Failure> {
        let place = self.shared.maker.started(&self.shared.shape, Language::Python).await?;
        let id = format!("session-{}", uuid::Uuid::new_v4().simple());
        Ok(Session { id, place, born: Instant::now(), checking: false, healthy: true })
    }

    fn add(&self, session: Session) {
        // A session that dies is noticed by the end of its connection, at once.
        let (pool, place) = (self.clone(), session.place.clone());
        self.shared.tasks.spawn(async move {
            tokio::select! {
                () = place.guest.lost_or_exited(FIRST_KERNEL) => pool.shared.changed.notify_one(),
                () = pool.shared.closing.cancelled() => {}
            }
        });
        lock(&self.shared.sessions).push(session);
    }

    /// The oldest session that is fit, if they have this shape; the pool refills behind it.
    pub(crate) fn take(&self, shape: &Shape) -> Option<Session> {
        if self.shared.shape != *shape {
            return None;
        }
        let mut sessions = lock(&self.shared.sessions);
        let at = sessions.iter().position(|s| !s.checking && s.is_fit())?;
        let session = sessions.remove(at);
        drop(sessions);
        self.shared.changed.notify_one();
        Some(session)
    }

    pub(crate) fn count(&self) -> Count {
        let sessions = lock(&self.shared.sessions);
        let available = sessions.iter().filter(|s| s.is_fit()).count();
        let healthy = available == sessions.len() && (available > 0 || self.shared.size == 0);
        Count { sessions: sessions.len(), available, healthy }
    }

    /// Runs a statement in each session; the unfit are destroyed and replaced by `keep`.
    pub(crate) async fn check(&self) -> bool {
        let places: Vec<(String, Arc<Place>)> = {
            let mut sessions = lock(&self.shared.sessions);
            sessions.iter_mut().for_each(|s| s.checking = true);
            sessions.iter().map(|s| (s.id.clone(), s.place.clone())).collect()
        };
        let mut checks = tokio::task::JoinSet::new();
        for (id, place) in places {
            checks.spawn(async move {
                let result = run_statement(&place).await;
                (id, result)
            });
        }
        let mut all = true;
        while let Some(Ok((id, result))) = checks.join_next().await {
            if let Err(why) = &result {
                tracing::warn!(session = id, why, "a session failed its health check");
            }
            all &= result.is_ok();
            if let Some(session) = lock(&self.shared.sessions).iter_mut().find(|s| s.id == id) {
                session.checking = false;
                session.healthy = result.is_ok();
            }
        }
        if !all {
            self.shared.changed.notify_one();
        }
        all
    }

    /// The check of the start: what fails is made anew, up to three times.
    pub(crate) async fn check_and_repair(&self) -> Result<(), Failure> {
        for _ in 0..START_ATTEMPTS {
            if self.check().await {
                return Ok(());
            }
            self.remove_unfit();
            while lock(&self.shared.sessions).len() < self.shared.size {
                let session = self.build_stubbornly().await?;
                self.add(session);
            }
        }
        if self.check().await { Ok(()) } else { Err(Failure::new("sessions keep failing their health check")) }
    }

    /// Keeps the pool full, young and healthy until the engine closes.
    pub(crate) async fn keep(self) {
        let shared = &self.shared;
        let mut next_check = Instant::now() + shared.maker.config.health_interval;
        let mut pause = Duration::ZERO;
        loop {
            let complete = self.sweep().await && self.refill().await;
            pause = if complete { Duration::ZERO } else { next_pause(pause) };
            let wake = if pause.is_zero() { self.next_expiry().min(next_check) } else { Instant::now() + pause };
            tokio::select! {
                () = shared.closing.cancelled() => return,
                () = shared.changed.notified(), if pause.is_zero() => {}
                () = tokio::time::sleep_until(wake) => {}
            }
            if Instant::now() >= next_check {
                self.check().await;
                next_check = Instant::now() + shared.maker.config.health_interval;
            }
        }
    }

    /// How long a session is used: it is replaced a little before its time is over.
    fn lifetime(&self) -> Duration {
        let ttl = self.shared.ttl;
        ttl - (ttl / 10).min(Duration::from_secs(60))
    }

    fn next_expiry(&self) -> Instant {
        let oldest = lock(&self.shared.sessions).iter().map(|s| s.born).min().unwrap_or_else(Instant::now);
        oldest + self.lifetime()
    }

    /// Removes what is dead or unfit at once, and replaces what is old one by one, the new before the old is gone. False when
    /// a session could not be made.
    async fn sweep(&self) -> bool {
        self.remove_unfit();
        let lifetime = self.lifetime();
        for _ in 0..self.shared.size {
            if !lock(&self.shared.sessions).iter().any(|s| s.born.elapsed() >= lifetime) {
                return true;
            }
            if !self.build_one().await {
                return false;
            }
            if let Some(old) = self.remove_one(|s| !s.checking && s.born.elapsed() >= lifetime) {
                tracing::info!(session = old.id, "a session is replaced before it expires");
                self.discard(old);
            }
        }
        true
    }

    /// False when a session could not be made.
    async fn refill(&self) -> bool {
        while lock(&self.shared.sessions).len() < self.shared.size {
            if !self.build_one().await {
                return false;
            }
        }
        true
    }

    async fn build_one(&self) -> bool {
        if self.shared.closing.is_cancelled() {
            return false;
        }
        match self.build().await {
            Ok(session) => self.add(session),
            Err(failure) => {
                // What a shutdown cuts off has not failed.
                if !self.shared.closing.is_cancelled() {
                    tracing::warn!(why = failure.log, "a session could not be made; trying again");
                }
                return false;
            }
        }
        true
    }

    fn remove_unfit(&self) {
        let unfit: Vec<Session> = lock(&self.shared.sessions).extract_if(.., |s| !s.checking && !s.is_fit()).collect();
        for session in unfit {
            tracing::info!(session = session.id, "a session is gone; making another");
            self.discard(session);
        }
    }

    fn remove_one(&self, unfit: impl Fn(&Session) -> bool) -> Option<Session> {
        let mut sessions = lock(&self.shared.sessions);
        let at = sessions.iter().position(unfit)?;
        Some(sessions.remove(at))
    }

    fn discard(&self, session: Session) {
        self.shared.tasks.spawn(async move {
            let _ = session.place.destroy("its session is over").await;
        });
    }
}

fn next_pause(last: Duration) -> Duration {
    (last * 2).clamp(Duration::from_secs(1), Duration::from_secs(60))
}

async fn run_statement(place: &Place) -> Result<(), String> {
    let deadline = Deadline { after_ms: CHECK_DEADLINE.as_millis() as u64, grace_ms: 1000 };
    let request = ToGuest::Run {
        kernel: FIRST_KERNEL,
        code: STATEMENT.into(),
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
