//! Stops a context. No call finds it any more, its running code ends by its own deadline, and its sandbox is destroyed
//! without delaying the answer.

use super::{OpContext, unless_cancelled};
use crate::op::{Call, ContextSelector, EngineError, NoticeKind, Outcome};
use crate::tenancy::Removed;

impl OpContext {
    pub(super) async fn stop_context(&self, call: &Call, which: &ContextSelector) -> Result<Outcome, EngineError> {
        let removed = self.tenancy.remove(which, call.connection.as_deref())?;
        let context_id = removed.context.id.clone();
        self.inner.context_removed(&self.tenancy, &removed, NoticeKind::Stopped);
        unless_cancelled(call, finish(removed), &self.inner).await?;
        Ok(Outcome::Stopped { context_id })
    }
}

/// Waits for both turns and orders the end of the sandbox. Running code and browser actions keep their turns no longer
/// than their own deadlines. If too many sandboxes of the tenant are already ending, this function also waits for the
/// end, and the context keeps its share of the limits meanwhile.
pub(crate) async fn finish(removed: Removed) -> Result<(), EngineError> {
    const WHY: &str = "its context was stopped";
    let _browser_turn = removed.context.browser_turn.lock().await;
    let Some(sandbox) = removed.context.turn.lock().await.sandbox.take() else { return Ok(()) };
    let ended = match removed.ending() {
        Some(permit) => sandbox.end(WHY, permit).await,
        None => sandbox.destroy(WHY).await,
    };
    ended.map_err(|failure| EngineError::StopFailed(failure.public))
}
