//! How many downloads at once, of one key and in all.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

#[derive(Debug, Clone, Copy)]
pub struct Limits {
    pub per_key: usize,
    pub total: usize,
}

impl Default for Limits {
    /// A browser opens six connections to one host.
    fn default() -> Self {
        Self { per_key: 8, total: 64 }
    }
}

#[derive(Clone)]
pub struct Permits {
    limits: Limits,
    /// Downloads of each key; a key without any is not in it.
    running: Arc<Mutex<HashMap<String, usize>>>,
}

/// The right to one download; ends when it is dropped.
pub struct Permit {
    key: String,
    permits: Permits,
}

impl Permits {
    pub fn new(limits: Limits) -> Self {
        Self { limits, running: Arc::default() }
    }

    pub fn take(&self, key: &str) -> Option<Permit> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let total: usize = running.values().sum();
        let of_key = running.get(key).copied().unwrap_or(0);
        if total >= self.limits.total || of_key >= self.limits.per_key {
            return None;
        }
        running.insert(key.to_owned(), of_key + 1);
        Some(Permit { key: key.to_owned(), permits: self.clone() })
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut running = self.permits.running.lock().unwrap_or_else(PoisonError::into_inner);
        match running.get_mut(&self.key) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(running.remove(&self.key)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_key_cannot_take_what_all_share_and_what_ends_is_given_back() {
        let permits = Permits::new(Limits { per_key: 2, total: 3 });
        let first = permits.take("a").unwrap();
        let _second = permits.take("a").unwrap();
        assert!(permits.take("a").is_none(), "of one key");
        let other = permits.take("b").unwrap();
        assert!(permits.take("c").is_none(), "in all");
        drop(first);
        assert!(permits.take("a").is_some());
        drop(other);
        assert_eq!(permits.running.lock().unwrap().len(), 1, "nothing is remembered of a key without downloads");
    }
}
