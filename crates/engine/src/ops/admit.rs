//! Admission of a run: first the turn of its kernel, if it is a cell, then the permits of its realm and tenant.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use tokio::sync::{OwnedMutexGuard, OwnedSemaphorePermit};
use tokio_util::sync::CancellationToken;

use super::{OpContext, ResolvedContext};
use crate::context::{CellTurn, Occupied};
use crate::keyed::Turn;
use crate::op::{Call, EngineError, Event, Stage, StageInProgress, Waiting};
use crate::tenancy::Queued;

/// Time after which a call informs its client that it waits.
const INFORM_AFTER: Duration = Duration::from_secs(1);

/// The permits of one run. Dropping this value gives them back.
pub(super) struct Permits {
    _realm: OwnedSemaphorePermit,
    _tenant: Option<OwnedSemaphorePermit>,
    running: Arc<AtomicUsize>,
}

/// A run that may start. Dropping this value lets the next run start.
pub(super) struct Admitted {
    /// The turn of a cell. It is dropped in this order: the turn is given on when nobody is named as its occupant any
    /// more.
    _turn: Option<(Occupied, OwnedMutexGuard<()>)>,
    _permits: Permits,
}

impl CellTurn {
    /// Says what a cell waits for that waits for this turn.
    pub(crate) fn why(&self) -> Waiting {
        match self.occupant().map(|occupant| (occupant.run, occupant.since.elapsed())) {
            Some((Some(run), running)) => Waiting::Run { run, running },
            Some((None, running)) => Waiting::Call { running },
            None => Waiting::Other("an earlier run in this context is not finished".into()),
        }
    }
}

impl Drop for Permits {
    fn drop(&mut self) {
        self.running.fetch_sub(1, Ordering::SeqCst);
    }
}

impl OpContext {
    /// Waits for the turn of a cell, and for the permits of the run. A command needs no turn. `run` is the id of a
    /// background run.
    pub(super) async fn admit(
        &self,
        call: &Call,
        resolved: &mut ResolvedContext,
        turn: Option<CellTurn>,
        run: Option<String>,
    ) -> Result<Admitted, EngineError> {
        // Nobody waits for the answer of a background run, so it may wait as long as it takes.
        let queue_wait = run.is_none().then_some(self.inner.config.queue_wait);
        let Some(turn) = turn else {
            resolved.creation_turn = None;
            let over = (&resolved.context.gone, resolved.context.not_found());
            return Ok(Admitted { _turn: None, _permits: self.permits(call, queue_wait, &over).await? });
        };
        let why = || match self.tenancy.config().waiting_counts {
            true => turn.why(),
            false => Waiting::Other("an earlier run in this context is not finished".into()),
        };
        let (guard, permits) = self.admit_to(call, resolved, turn.turn.clone(), queue_wait, why).await?;
        Ok(Admitted { _turn: Some((turn.occupy(run), guard)), _permits: permits })
    }

    /// Waits for `turn` first and then for the permits, so that a run that waits for an earlier one in its context
    /// takes no permit from others.
    pub(super) async fn admit_to<T>(
        &self,
        call: &Call,
        resolved: &mut ResolvedContext,
        turn: Arc<tokio::sync::Mutex<T>>,
        queue_wait: Option<Duration>,
        why: impl Fn() -> Waiting,
    ) -> Result<(OwnedMutexGuard<T>, Permits), EngineError> {
        let creation_turn = resolved.creation_turn.take();
        let context = &resolved.context;
        let mut turn = pin!(turn.lock_owned());
        // Polling the lock once puts this call into its queue. Only then may the next call enter the context.
        let obtained = match poll_fn(|cx| Poll::Ready(turn.as_mut().poll(cx))).await {
            Poll::Ready(guard) => Some(guard),
            Poll::Pending => None,
        };
        drop::<Option<Turn<()>>>(creation_turn);
        let over = (&context.gone, context.not_found());
        // The turn is not given up while the run waits for permits, because another run would go first otherwise.
        if let Some(guard) = obtained {
            return Ok((guard, self.permits(call, queue_wait, &over).await?));
        }
        let _queued = self.enqueue()?;
        let guard = self.wait(call, &over, why, turn).await?;
        Ok((guard, self.wait_for_permits(call, queue_wait, &over).await?))
    }

    /// Takes a place in the queue of the tenant, until the returned value is dropped.
    pub(super) fn enqueue(&self) -> Result<(Queued, StageInProgress), EngineError> {
        let length = self.inner.config.queue_length;
        let queued = self.tenancy.enqueue(length).ok_or(EngineError::QueueFull(length))?;
        Ok((queued, self.stages.begin(Stage::Queue)))
    }

    fn try_permits(&self) -> Option<Permits> {
        let realm = self.tenancy.permits.clone().try_acquire_owned().ok()?;
        let tenant = match self.tenancy.tenant.runs() {
            Some(runs) => Some(runs.try_acquire_owned().ok()?),
            None => None,
        };
        Some(self.issue(realm, tenant))
    }

    fn issue(&self, realm: OwnedSemaphorePermit, tenant: Option<OwnedSemaphorePermit>) -> Permits {
        let running = self.inner.running.clone();
        running.fetch_add(1, Ordering::SeqCst);
        Permits { _realm: realm, _tenant: tenant, running }
    }

    /// Returns the permits, or waits for them in the queue.
    pub(super) async fn permits(
        &self,
        call: &Call,
        queue_wait: Option<Duration>,
        over: &(&CancellationToken, EngineError),
    ) -> Result<Permits, EngineError> {
        if let Some(permits) = self.try_permits() {
            return Ok(permits);
        }
        let _queued = self.enqueue()?;
        self.wait_for_permits(call, queue_wait, over).await
    }

    /// Waits for the permits, for `queue_wait` at most if there is one.
    async fn wait_for_permits(
        &self,
        call: &Call,
        queue_wait: Option<Duration>,
        over: &(&CancellationToken, EngineError),
    ) -> Result<Permits, EngineError> {
        let acquiring = async {
            let realm = self.tenancy.permits.clone().acquire_owned().await;
            let tenant = match self.tenancy.tenant.runs() {
                Some(runs) => Some(runs.acquire_owned().await),
                None => None,
            };
            Ok(self.issue(realm?, tenant.transpose()?))
        };
        let why = || Waiting::Permits(self.tenancy.config().runs_at_once);
        let queue_wait = queue_wait.unwrap_or(Duration::MAX);
        match self.wait(call, over, why, tokio::time::timeout(queue_wait, acquiring)).await? {
            Ok(Ok(permits)) => Ok(permits),
            Ok(Err::<_, tokio::sync::AcquireError>(_)) => Err(EngineError::ShuttingDown),
            Err(_) => Err(EngineError::Busy(queue_wait)),
        }
    }

    /// Waits for `work`, and informs the client after a while. Gives up if the call is cancelled, if the engine closes,
    /// or with the error of `over` if the token of `over` is cancelled.
    pub(super) async fn wait<T>(
        &self,
        call: &Call,
        over: &(&CancellationToken, EngineError),
        why: impl Fn() -> Waiting,
        work: impl Future<Output = T>,
    ) -> Result<T, EngineError> {
        let mut work = pin!(work);
        let mut inform = pin!(tokio::time::sleep(INFORM_AFTER));
        let mut has_informed = false;
        loop {
            tokio::select! {
                biased;
                () = over.0.cancelled() => return Err(over.1.clone()),
                () = call.cancel.cancelled() => return Err(EngineError::Cancelled),
                () = self.inner.closing.cancelled() => return Err(EngineError::ShuttingDown),
                done = &mut work => {
                    if has_informed {
                        call.events.send(Event::Resumed);
                    }
                    return Ok(done);
                }
                () = &mut inform, if !has_informed => {
                    has_informed = true;
                    call.events.send(Event::Waiting(why()));
                }
            }
        }
    }
}
