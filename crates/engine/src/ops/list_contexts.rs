//! The contexts of the tenant, newest first. Waits for nothing.

use super::World;
use crate::op::Outcome;

impl World {
    pub(super) fn list_contexts(&self) -> Outcome {
        Outcome::Contexts(self.holdings.list())
    }
}
