//! Lists the contexts of the tenant, newest first, without waiting for anything.

use super::OpContext;
use crate::op::Outcome;

impl OpContext {
    pub(super) fn list_contexts(&self) -> Outcome {
        Outcome::Contexts(self.tenancy.list())
    }
}
