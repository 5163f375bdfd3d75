//! Something in the browser of a context.

use super::World;
use crate::op::{Browse, Call, EngineError, Outcome};

impl World {
    pub(super) async fn browse(&self, _call: &Call, _browse: Browse) -> Result<Outcome, EngineError> {
        Err(EngineError::NoBrowser("not yet".into()))
    }
}
