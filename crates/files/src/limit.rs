//! Limits how many downloads, or uploads, run at once: for one key, for one owner and in total.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

#[derive(Debug, Clone, Copy)]
pub struct TransferLimits {
    pub per_key: usize,
    /// Limit for one owner, so that the slow readers of one owner cannot keep all others out.
    pub per_owner: usize,
    pub total: usize,
}

impl Default for TransferLimits {
    /// Allows more downloads for a key than the six connections that a browser opens to one host.
    fn default() -> Self {
        Self { per_key: 8, per_owner: 32, total: 256 }
    }
}

#[derive(Clone)]
pub(crate) struct Permits {
    limits: TransferLimits,
    running: Arc<Mutex<Running>>,
}

/// Running downloads by key and by owner. A key or an owner without downloads has no entry.
#[derive(Default)]
struct Running {
    keys: HashMap<String, usize>,
    owners: HashMap<String, usize>,
}

/// The right to one download. It ends when this value is dropped.
pub(crate) struct Permit {
    key: String,
    owner: String,
    permits: Permits,
}

impl Permits {
    pub(crate) fn new(limits: TransferLimits) -> Self {
        Self { limits, running: Arc::default() }
    }

    pub(crate) fn take(&self, key: &str, owner: &str) -> Option<Permit> {
        let TransferLimits { per_key, per_owner, total } = self.limits;
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let count = |all: &HashMap<String, usize>, one: &str| all.get(one).copied().unwrap_or(0);
        if running.owners.values().sum::<usize>() >= total
            || count(&running.owners, owner) >= per_owner
            || count(&running.keys, key) >= per_key
        {
            return None;
        }
        *running.keys.entry(key.to_owned()).or_default() += 1;
        *running.owners.entry(owner.to_owned()).or_default() += 1;
        Some(Permit { key: key.to_owned(), owner: owner.to_owned(), permits: self.clone() })
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut running = self.permits.running.lock().unwrap_or_else(PoisonError::into_inner);
        give_back(&mut running.keys, &self.key);
        give_back(&mut running.owners, &self.owner);
    }
}

fn give_back(all: &mut HashMap<String, usize>, one: &str) {
    match all.get_mut(one) {
        Some(count) if *count > 1 => *count -= 1,
        _ => drop(all.remove(one)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_can_take_what_all_share_and_what_ends_is_given_back() {
        let permits = Permits::new(TransferLimits { per_key: 2, per_owner: 3, total: 4 });
        let first = permits.take("a", "x").unwrap();
        let second = permits.take("a", "x").unwrap();
        assert!(permits.take("a", "x").is_none(), "of one key");
        let other = permits.take("b", "x").unwrap();
        assert!(permits.take("c", "x").is_none(), "of one owner");
        let _last = permits.take("d", "y").unwrap();
        assert!(permits.take("e", "z").is_none(), "in all");
        drop(first);
        assert!(permits.take("a", "x").is_some());
        drop((second, other));
        let running = permits.running.lock().unwrap();
        assert_eq!((running.keys.len(), running.owners.len()), (1, 1), "nothing is remembered of who has no downloads");
    }
}
