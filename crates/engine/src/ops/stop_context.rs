//! Stops a context: it disappears at once, its running code ends by itself, and its sandbox is destroyed without
//! delaying the answer.

use super::{OpContext, unless_cancelled};
use crate::op::{Call, ContextSelector, EngineError, NoticeKind, Outcome};
use crate::tenancy::Removed;

impl OpContext {
    pub(super) async fn stop_context(&self, call: &Call, which: &ContextSelector) -> Result<Outcome, EngineError> {
        let removed = self.tenancy.remove(which, call.connection.as_deref())?;
        let context_id = removed.context.id.clone();
        self.inner.taken_out(&self.tenancy, &removed, NoticeKind::Stopped);
        unless_cancelled(call, finish(removed), &self.inner).await?;
        Ok(Outcome::Stopped { context_id })
    }
}

/// Waits for the turns and orders the end of the sandbox. Running code and browser actions hold their turns no longer
/// than their own deadlines. If too many sandboxes of the tenant are already ending, this also waits for the end, and
/// the context keeps its share of the limits meanwhile.
pub(crate) async fn finish(removed: Removed) -> Result<(), EngineError> {
    const WHY: &str = "its context was stopped";
    let _browsing = removed.context.browsing.lock().await;
    let Some(sandbox) = removed.context.turn.lock().await.sandbox.take() else { return Ok(()) };
    let ended = match removed.ending() {
        Some(room) => sandbox.end(WHY, room).await,
        None => sandbox.destroy(WHY).await,
    };
    ended.map_err(|failure| EngineError::StopFailed(failure.public))
}
