//! This module contains policies for things that are made in advance or parked: how many are wanted, when to try again,
//! and what to give up.
//!
//! Nothing here knows what is pooled or reads a clock. A moment is an argument of any type that has an order and to
//! which a duration can be added, such as an `Instant` of `std` or of an executor.
//!
//! The engine's stock also uses [`Backoff`]. It calculates its demand differently (`engine/demand.rs`), because it
//! knows how long a refill takes and divides a budget. The engine parks the sandboxes of conversations differently
//! (`engine/conversation.rs`), because tenants share the room for them fairly.

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::ops::Add;
use std::time::Duration;

/// Delays the next attempt after a failure. The pause doubles with each failure, up to a maximum.
#[derive(Debug, Clone, Copy)]
pub struct Backoff<T> {
    first: Duration,
    longest: Duration,
    pause: Duration,
    retry: Option<T>,
}

impl<T: Copy + Ord + Add<Duration, Output = T>> Backoff<T> {
    pub fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest, pause: first, retry: None }
    }

    /// Records a failure, after which the next attempt has to wait.
    pub fn failed(&mut self, now: T) {
        self.retry = Some(now + self.pause);
        self.pause = (self.pause * 2).min(self.longest);
    }

    /// Forgets all failures.
    pub fn reset(&mut self) {
        *self = Self::new(self.first, self.longest);
    }

    /// Returns the time of the next attempt if the last one has failed.
    pub fn retry_at(&self) -> Option<T> {
        self.retry
    }

    pub fn allows(&self, now: T) -> bool {
        self.retry.is_none_or(|at| now >= at)
    }

    /// Returns true once for each failure, when the next attempt is due.
    pub(crate) fn take_due(&mut self, now: T) -> bool {
        self.retry.take_if(|at| now >= *at).is_some()
    }
}

/// Time without a request after which the wanted number is halved. The last one stays wanted for [`FORGET`].
const LULL: Duration = Duration::from_secs(30);
const FORGET: Duration = Duration::from_secs(600);

/// The number of things of one kind that should be ready. It doubles when a request finds none and is halved when there
/// are no requests.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RecentDemand<T> {
    pub(crate) wanted: usize,
    /// Time of the last request.
    pub(crate) asked: T,
    /// Time of the last change of `wanted`.
    since: T,
}

impl<T: Copy + Ord + Add<Duration, Output = T>> RecentDemand<T> {
    /// Records the first request.
    pub(crate) fn new(wanted: usize, now: T) -> Self {
        Self { wanted, asked: now, since: now }
    }

    /// Records a request. If nothing was `ready` for it, twice as many are wanted from now on, up to `most`.
    pub(crate) fn request(&mut self, ready: bool, most: usize, now: T) {
        self.asked = now;
        if !ready {
            (self.wanted, self.since) = ((self.wanted * 2).min(most), now);
        }
    }

    /// Returns the time at which fewer are wanted if there is no request before.
    pub(crate) fn falls_at(&self) -> T {
        self.asked.max(self.since) + if self.wanted > 1 { LULL } else { FORGET }
    }

    /// Halves the wanted number if its time has come. Returns whether it did.
    pub(crate) fn fall(&mut self, now: T) -> bool {
        let due = now >= self.falls_at();
        if due {
            (self.wanted, self.since) = (self.wanted / 2, now);
        }
        due
    }
}

/// Values that wait under a key for their next user, each until a given time. There are at most `most` of them.
#[derive(Debug)]
pub(crate) struct Parking<K, V, T> {
    most: usize,
    parked: BTreeMap<K, (V, T)>,
}

impl<K: Ord + Clone, V, T: Copy + Ord + Add<Duration, Output = T>> Parking<K, V, T> {
    pub(crate) fn new(most: usize) -> Self {
        Self { most, parked: BTreeMap::new() }
    }

    /// Parks a value. Returns the values that it displaces: the previous value of this key and, if there are now too
    /// many, the value that would expire next.
    pub(crate) fn park(&mut self, key: K, value: V, until: T) -> impl Iterator<Item = V> {
        let before = self.parked.insert(key, (value, until)).map(|(value, _)| value);
        let next = self.parked.iter().min_by_key(|(_, (_, until))| *until).map(|(key, _)| key.clone());
        let over = next.filter(|_| self.parked.len() > self.most).and_then(|key| self.take(&key));
        before.into_iter().chain(over)
    }

    pub(crate) fn take<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        self.parked.remove(key).map(|(value, _)| value)
    }

    /// Removes and returns the values whose time is over.
    pub(crate) fn expired(&mut self, now: T) -> impl Iterator<Item = V> {
        self.parked.extract_if(.., move |_, (_, until)| *until <= now).map(|(_, (value, _))| value)
    }

    pub(crate) fn next_expiry(&self) -> Option<T> {
        self.parked.values().map(|(_, until)| *until).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_pause_doubles_with_each_failure_up_to_the_longest() {
        let mut backoff = Backoff::new(SECOND, 5 * SECOND);
        assert!(backoff.allows(Duration::ZERO) && !backoff.take_due(Duration::MAX));
        let mut now = Duration::ZERO;
        for pause in [1, 2, 4, 5, 5] {
            backoff.failed(now);
            assert_eq!(backoff.retry_at(), Some(now + pause * SECOND));
            assert!(!backoff.allows(now) && !backoff.take_due(now));
            now += pause * SECOND;
            assert!(backoff.allows(now) && backoff.take_due(now) && !backoff.take_due(now));
        }
        backoff.reset();
        backoff.failed(now);
        assert_eq!(backoff.retry_at(), Some(now + SECOND));
    }

    #[test]
    fn demand_doubles_with_each_miss_and_is_halved_while_nobody_asks() {
        let mut demand = RecentDemand::new(2, Duration::ZERO);
        demand.request(true, 10, SECOND);
        assert_eq!((demand.wanted, demand.falls_at()), (2, SECOND + LULL));
        for (wanted, now) in [(4, 2), (8, 3), (10, 4)] {
            demand.request(false, 10, now * SECOND);
            assert_eq!(demand.wanted, wanted);
        }
        let mut now = 4 * SECOND;
        for wanted in [5, 2, 1] {
            assert!(!demand.fall(now));
            now += LULL;
            assert!(demand.fall(now));
            assert_eq!(demand.wanted, wanted);
        }
        assert!(!demand.fall(now + LULL), "the last one stays longer");
        assert!(demand.fall(now + FORGET));
        assert_eq!(demand.wanted, 0);
    }

    #[test]
    fn what_is_parked_goes_when_it_is_taken_replaced_over_or_too_much() {
        let mut parking = Parking::new(2);
        let mut park = |key, value, until: u32| parking.park(key, value, until * SECOND).collect::<Vec<_>>();
        assert_eq!(park('a', 1, 3), [0; 0]);
        assert_eq!(park('b', 2, 1), [0; 0]);
        assert_eq!(park('a', 3, 4), [1]);
        assert_eq!(park('c', 4, 2), [2], "the one that would have gone next");
        assert_eq!(park('d', 5, 1), [5], "the new one, if that would go first");
        assert_eq!(parking.next_expiry(), Some(2 * SECOND));
        assert_eq!(parking.expired(SECOND).count(), 0);
        assert_eq!(parking.expired(2 * SECOND).collect::<Vec<_>>(), [4]);
        assert_eq!((parking.take(&'a'), parking.take(&'a'), parking.next_expiry()), (Some(3), None, None));
    }
}
