//! Stops a context. No call finds it any more, its running code is ended at once or ends by its own deadline, and its
//! sandbox is destroyed without delaying the answer.

use super::{OpContext, unless_cancelled};
use crate::op::{Call, ContextSelector, EngineError, NoticeKind, Outcome, StoppedContext};
use crate::tenancy::Removed;

impl OpContext {
    pub(super) async fn stop_context(&self, call: &Call, which: &ContextSelector) -> Result<Outcome, EngineError> {
        let removed = self.tenancy.remove(which, call.connection.as_deref())?;
        self.found.set(&removed.context.id);
        let (context_id, config) = (removed.context.id.clone(), self.tenancy.config());
        let (mut ended_runs, mut ended_calls) = (Vec::new(), 0);
        let ends_runs = config.stop_ends_runs;
        if ends_runs && removed.context.is_running() {
            ended_runs = self.tenancy.tenant.background.running_in(config.realm, &context_id);
            ended_calls = removed.context.running().saturating_sub(ended_runs.len());
            if let Some(sandbox) = removed.context.live_sandbox() {
                sandbox.guest.close(WHY);
            }
        }
        self.inner.context_removed(&self.tenancy, &removed, NoticeKind::Stopped);
        let ending = async move { if ends_runs { end(removed).await } else { finish(removed).await } };
        unless_cancelled(call, ending, &self.inner).await?;
        Ok(Outcome::Stopped(StoppedContext { context_id, ended_runs, ended_calls }))
    }
}

const WHY: &str = "its context was stopped";

/// Waits for the runs and the browser, and orders the end of the sandbox. Running code and browser actions last no longer
/// than their own deadlines.
pub(crate) async fn finish(removed: Removed) -> Result<(), EngineError> {
    let context = removed.context.clone();
    let _browser_turn = context.browser_turn.lock().await;
    let _runs = context.runs_over.write().await;
    end(removed).await
}

/// Orders the end of the sandbox. If too many sandboxes of the tenant are already ending, this function also waits for
/// the end, and the context keeps its share of the limits meanwhile.
pub(crate) async fn end(removed: Removed) -> Result<(), EngineError> {
    let Some(sandbox) = removed.context.state.lock().await.sandbox.take() else { return Ok(()) };
    let ended = match removed.ending() {
        Some(permit) => sandbox.end(WHY, permit).await,
        None => sandbox.destroy(WHY).await,
    };
    ended.map_err(|failure| EngineError::StopFailed(failure.public))
}
