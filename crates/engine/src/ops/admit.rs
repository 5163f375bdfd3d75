//! Admission of a run: first the turn in its context, then the permits of its realm and tenant.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use tokio::sync::{OwnedMutexGuard, OwnedSemaphorePermit};
use tokio_util::sync::CancellationToken;

use super::{OpContext, ResolvedContext};
use crate::context::ContextState;
use crate::keyed::Turn;
use crate::op::{Call, EngineError, Event};

/// Time after which the caller is informed that it waits.
const TELL_WAITING: Duration = Duration::from_secs(1);

/// The permits of one run. Dropping them gives them back.
pub(super) struct Permits {
    _realm: OwnedSemaphorePermit,
    _tenant: Option<OwnedSemaphorePermit>,
    running: Arc<AtomicUsize>,
}

impl Drop for Permits {
    fn drop(&mut self) {
        self.running.fetch_sub(1, Ordering::SeqCst);
    }
}

impl OpContext {
    pub(super) async fn admit(
        &self,
        call: &Call,
        entered: &mut ResolvedContext,
    ) -> Result<(OwnedMutexGuard<ContextState>, Permits), EngineError> {
        let turn = entered.context.turn.clone();
        self.admit_to(call, entered, turn, "an earlier run in this context is not finished").await
    }

    /// Waits for the turn first and then for the permits, so a run that waits for an earlier one in its context takes
    /// no permit from others.
    pub(super) async fn admit_to<T>(
        &self,
        call: &Call,
        entered: &mut ResolvedContext,
        turn: Arc<tokio::sync::Mutex<T>>,
        why: &str,
    ) -> Result<(OwnedMutexGuard<T>, Permits), EngineError> {
        let making = entered.making.take();
        let context = &entered.context;
        let mut turn = pin!(turn.lock_owned());
        // Polling the lock once puts this call into its queue. Only then may the next call enter the context.
        let had = match poll_fn(|cx| Poll::Ready(turn.as_mut().poll(cx))).await {
            Poll::Ready(home) => Some(home),
            Poll::Pending => None,
        };
        drop::<Option<Turn<()>>>(making);
        let permits = had.is_some().then(|| self.try_permits()).flatten();
        let had = match (had, permits) {
            (Some(home), Some(permits)) => return Ok((home, permits)),
            // A turn that was obtained is kept, because another run would go first otherwise.
            (had, _) => had,
        };
        let _queued = self.enqueue()?;
        let over = (&context.gone, context.not_found());
        let home = match had {
            Some(home) => home,
            None => self.wait(call, &over, why, turn).await?,
        };
        Ok((home, self.permits(call, &over).await?))
    }

    pub(super) fn enqueue(&self) -> Result<crate::tenancy::Queued, EngineError> {
        let length = self.inner.config.queue_length;
        self.tenancy.enqueue(length).ok_or(EngineError::QueueFull(length))
    }

    pub(super) fn try_permits(&self) -> Option<Permits> {
        let realm = self.tenancy.permits.clone().try_acquire_owned().ok()?;
        let tenant = match &self.tenancy.tenant.runs {
            Some(runs) => Some(runs.clone().try_acquire_owned().ok()?),
            None => None,
        };
        Some(self.had(realm, tenant))
    }

    fn had(&self, realm: OwnedSemaphorePermit, tenant: Option<OwnedSemaphorePermit>) -> Permits {
        let running = self.inner.running.clone();
        running.fetch_add(1, Ordering::SeqCst);
        Permits { _realm: realm, _tenant: tenant, running }
    }

    /// Waits for the permits, for `queue_wait` at most.
    pub(super) async fn permits(
        &self,
        call: &Call,
        over: &(&CancellationToken, EngineError),
    ) -> Result<Permits, EngineError> {
        let queue_wait = self.inner.config.queue_wait;
        let acquiring = async {
            let realm = self.tenancy.permits.clone().acquire_owned().await;
            let tenant = match &self.tenancy.tenant.runs {
                Some(runs) => Some(runs.clone().acquire_owned().await),
                None => None,
            };
            Ok(self.had(realm?, tenant.transpose()?))
        };
        let why = format!("all {} sessions are busy", self.tenancy.config().runs_at_once);
        match self.wait(call, over, &why, tokio::time::timeout(queue_wait, acquiring)).await? {
            Ok(Ok(permits)) => Ok(permits),
            Ok(Err::<_, tokio::sync::AcquireError>(_)) => Err(EngineError::ShuttingDown),
            Err(_) => Err(EngineError::Busy(queue_wait)),
        }
    }

    /// Waits for `work` and informs the caller after a while. Gives up when the object of the wait (`over`), the call
    /// or the engine ends.
    pub(super) async fn wait<T>(
        &self,
        call: &Call,
        over: &(&CancellationToken, EngineError),
        why: &str,
        work: impl Future<Output = T>,
    ) -> Result<T, EngineError> {
        let mut work = pin!(work);
        let mut tell = pin!(tokio::time::sleep(TELL_WAITING));
        let mut told = false;
        loop {
            tokio::select! {
                biased;
                () = over.0.cancelled() => return Err(over.1.clone()),
                () = call.cancel.cancelled() => return Err(EngineError::Cancelled),
                () = self.inner.closing.cancelled() => return Err(EngineError::ShuttingDown),
                done = &mut work => return Ok(done),
                () = &mut tell, if !told => {
                    told = true;
                    call.events.send(Event::Waiting { why: why.into() });
                }
            }
        }
    }
}
