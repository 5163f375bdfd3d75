//! The places in the queue of the journal, shared among those whose entries wait.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Maximum number of entries of the server that wait. They are short, and clients do not decide how many there are: one
/// for each tenant and minute, and one for each command of the operator.
const OF_SERVER: usize = 10_000;

/// Who caused an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cause {
    /// A client of the tenant that the entry names, or one whose tenant is not known.
    Client,
    /// The server or its operator.
    Server,
}

/// The places of all entries. A tenant gets no further place while it has as many as are free. So a tenant that takes all
/// that it can leaves as many to the others, and tenants that do so together end up with equal shares.
#[derive(Debug)]
pub(super) struct Places {
    of_clients: usize,
    waiting: Mutex<Waiting>,
}

/// The numbers of entries that wait.
#[derive(Debug, Default)]
struct Waiting {
    of_server: usize,
    of_clients: usize,
    by_tenant: HashMap<String, usize>,
}

impl Places {
    pub(super) fn new(of_clients: usize) -> Self {
        Self { of_clients, waiting: Mutex::default() }
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place for an entry about this tenant, and returns whether there was one.
    pub(super) fn take(&self, cause: Cause, tenant: Option<&str>) -> bool {
        let mut waiting = self.waiting();
        if cause == Cause::Server {
            let is_free = waiting.of_server < OF_SERVER;
            waiting.of_server += usize::from(is_free);
            return is_free;
        }
        let free = self.of_clients - waiting.of_clients;
        // No tenant has the empty name.
        let tenant = tenant.unwrap_or_default();
        match waiting.by_tenant.get_mut(tenant) {
            Some(own) if *own >= free => return false,
            Some(own) => *own += 1,
            None if free == 0 => return false,
            None => drop(waiting.by_tenant.insert(tenant.to_owned(), 1)),
        }
        waiting.of_clients += 1;
        true
    }

    /// Gives the place of an entry back that does not wait any more.
    pub(super) fn give_back(&self, cause: Cause, tenant: Option<&str>) {
        let mut waiting = self.waiting();
        if cause == Cause::Server {
            waiting.of_server -= 1;
            return;
        }
        waiting.of_clients -= 1;
        let tenant = tenant.unwrap_or_default();
        if let Some(own) = waiting.by_tenant.get_mut(tenant) {
            *own -= 1;
            if *own == 0 {
                waiting.by_tenant.remove(tenant);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn w90_tenants_that_take_all_they_can_leave_places_and_give_them_back() {
        let places = Places::new(100);
        let fill = |tenant| (0..1000).filter(|_| places.take(Cause::Client, tenant)).count();
        assert_eq!([Some("blue"), Some("green"), None, Some("red")].map(fill), [50, 25, 13, 6]);
        assert!(places.take(Cause::Server, Some("blue")));
        (0..50).for_each(|_| places.give_back(Cause::Client, Some("blue")));
        places.give_back(Cause::Server, Some("blue"));
        assert_eq!(fill(Some("white")), 28, "half of what is free");
        for (tenant, count) in [(Some("green"), 25), (None, 13), (Some("red"), 6), (Some("white"), 28)] {
            (0..count).for_each(|_| places.give_back(Cause::Client, tenant));
        }
        let waiting = places.waiting();
        assert!((waiting.of_server, waiting.of_clients) == (0, 0) && waiting.by_tenant.is_empty(), "{waiting:?}");
    }
}
