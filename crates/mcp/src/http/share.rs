//! Limits how many requests one tenant may have in flight, so that the waiting calls of one tenant cannot occupy all
//! connections.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use engine::op::Tenant;

pub(super) struct Shares {
    most: usize,
    /// Requests in flight by tenant; a tenant without any has no entry.
    in_flight: Mutex<HashMap<Tenant, usize>>,
}

/// One request in flight. The request is over when this value is dropped.
pub(super) struct Share {
    shares: Arc<Shares>,
    tenant: Tenant,
}

impl Shares {
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most, in_flight: Mutex::default() })
    }

    fn in_flight(&self) -> MutexGuard<'_, HashMap<Tenant, usize>> {
        self.in_flight.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn take(self: &Arc<Self>, tenant: &Tenant) -> Option<Share> {
        let mut in_flight = self.in_flight();
        let count = in_flight.get(tenant).copied().unwrap_or(0);
        (count < self.most).then(|| {
            in_flight.insert(tenant.clone(), count + 1);
            Share { shares: self.clone(), tenant: tenant.clone() }
        })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut in_flight = self.shares.in_flight();
        match in_flight.get_mut(&self.tenant) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(in_flight.remove(&self.tenant)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_each_tenant_s_own_and_is_given_back() {
        let shares = Shares::new(2);
        let (blue, green) = (Tenant("blue".into()), Tenant("green".into()));
        let first = shares.take(&blue).unwrap();
        let second = shares.take(&blue).unwrap();
        assert!(shares.take(&blue).is_none());
        assert!(shares.take(&green).is_some());
        drop(first);
        assert!(shares.take(&blue).is_some());
        drop(second);
        assert!(shares.in_flight().is_empty(), "nothing is remembered of who has no requests");
    }
}
