//! A new context: a session of the pool becomes its sandbox.

use proto::Language;

use super::World;
use crate::context::Context;
use crate::op::{Call, EngineError, Outcome};

/// Dialects have stricter rules; this only keeps nonsense out of the tables.
const MAX_NAME: usize = 1024;
const MAX_DESCRIPTION: usize = 64 << 10;

impl World {
    pub(super) async fn create_context(
        &self,
        call: &Call,
        name: String,
        language: Language,
        description: String,
    ) -> Result<Outcome, EngineError> {
        if name.is_empty() || name.len() > MAX_NAME || name.chars().any(char::is_control) {
            return Err(EngineError::CreateFailed("the name is empty, too long or has control characters".into()));
        }
        if description.len() > MAX_DESCRIPTION {
            return Err(EngineError::CreateFailed(format!("the description is longer than {MAX_DESCRIPTION} bytes")));
        }
        let reservation = self.holdings.reserve(self.inner.config.max_contexts)?;
        let home = self.settle(language).await?;
        let Some(place) = home.place.clone() else { return Err(EngineError::CreateFailed("no sandbox".into())) };
        if call.cancel.is_cancelled() {
            // Nobody would learn its id.
            let _ = place.destroy("the call that made it was cancelled").await;
            return Err(EngineError::Cancelled);
        }
        let isolation = place.isolation().clone();
        let context = reservation.fill(Context::new(name, language, description, home, isolation));
        Ok(Outcome::Created(context.info()))
    }
}
