//! The end of a context: it vanishes at once, its running code ends by itself, then its sandbox goes, behind the answer.

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

/// Waits for the turns, which running code and a browser's call hold no longer than their own deadlines, and orders the end of the sandbox. Where too many
/// of the tenant's are on their way out already, waits for the end as well and keeps its place among the limits meanwhile.
pub(crate) async fn finish(removed: Removed) -> Result<(), EngineError> {
    const WHY: &str = "its context was stopped";
    let _browsing = removed.context.browsing.lock().await;
    let Some(place) = removed.context.turn.lock().await.place.take() else { return Ok(()) };
    let ended = match removed.ending() {
        Some(room) => place.end(WHY, room).await,
        None => place.destroy(WHY).await,
    };
    ended.map_err(|failure| EngineError::StopFailed(failure.public))
}
