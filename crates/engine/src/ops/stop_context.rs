//! The end of a context: it vanishes at once, its running code ends by itself, then its sandbox goes.

use super::{World, unless_cancelled};
use crate::holdings::Removed;
use crate::op::{Call, EngineError, Happened, Outcome, Which};

impl World {
    pub(super) async fn stop_context(&self, call: &Call, which: &Which) -> Result<Outcome, EngineError> {
        let removed = self.holdings.remove(which, call.connection.as_deref())?;
        let context_id = removed.context.id.clone();
        self.inner.taken_out(&self.holdings, &removed, Happened::Stopped);
        unless_cancelled(call, finish(removed), &self.inner).await?;
        Ok(Outcome::Stopped { context_id })
    }
}

/// Waits for the turn, which the running code holds no longer than its own deadline, and destroys the sandbox.
pub(crate) async fn finish(removed: Removed) -> Result<(), EngineError> {
    let mut home = removed.context.turn.lock().await;
    let Some(place) = home.place.take() else { return Ok(()) };
    place.destroy("its context was stopped").await.map_err(|failure| EngineError::StopFailed(failure.public))
}
