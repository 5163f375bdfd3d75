//! The contexts of the tenant, newest first. Waits for nothing.

use super::OpContext;
use crate::op::Outcome;

impl OpContext {
    pub(super) fn list_contexts(&self) -> Outcome {
        Outcome::Contexts(self.tenancy.list())
    }
}
