//! Calculates how many sandboxes should wait ready. This module knows no sandbox and no clock: demand goes in, numbers
//! come out.
//!
//! The launcher's spares follow a simpler rule (`jail/pool.rs`): they are cheap and alike, so doubling after a miss is
//! enough. A ready sandbox costs memory and its refill takes long, so this module considers the pace of the refills and
//! divides a budget among tenants.

use std::time::Duration;

use tokio::time::Instant;

/// Time without demand after which the wish that a burst has raised is half as large.
const HALF_LIFE: Duration = Duration::from_secs(120);
/// Peak below which the wish is zero. The last sandbox of a shelf stays for three half-lives.
const NOTHING: f64 = 0.125;

/// Demand for one shelf: the largest number of sandboxes taken ahead of the refills, and how long ago that was.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Demand {
    /// Number of sandboxes that were taken and, at the pace of the refills, not yet created again.
    behind: f64,
    /// Largest value of `behind`, halved with time.
    peak: f64,
    at: Instant,
}

impl Demand {
    pub(crate) fn none(now: Instant) -> Self {
        Self { behind: 0.0, peak: 0.0, at: now }
    }

    /// Records that one sandbox was requested. `refill` is the time until one more is created.
    pub(crate) fn took(&mut self, now: Instant, refill: Duration) {
        let passed = now.saturating_duration_since(self.at);
        let refilled = passed.as_secs_f64() / refill.as_secs_f64().max(1e-6);
        self.peak = self.peak_at(now);
        self.behind = (self.behind - refilled).max(0.0) + 1.0;
        self.peak = self.peak.max(self.behind);
        self.at = now;
    }

    /// Returns the number of sandboxes that the worst recent demand would have needed, rounded up.
    pub(crate) fn wish(&self, now: Instant) -> usize {
        let peak = self.peak_at(now);
        // A conversion of a float to an integer saturates.
        if peak < NOTHING { 0 } else { peak.ceil() as usize }
    }

    fn peak_at(&self, now: Instant) -> f64 {
        let passed = now.saturating_duration_since(self.at);
        self.peak * (-passed.as_secs_f64() / HALF_LIFE.as_secs_f64()).exp2()
    }
}

/// The number of ready sandboxes that one shelf asks for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wish {
    /// Number of sandboxes that the operator ordered. They are created whatever the budget is.
    pub(crate) least: usize,
    pub(crate) wish: usize,
    /// Memory of one sandbox.
    pub(crate) bytes: u64,
}

/// Bounds on all shelves together.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PoolBudget {
    pub(crate) count: usize,
    pub(crate) bytes: u64,
}

/// Returns how many sandboxes each shelf gets: first those that the operator ordered, then one each in turn until all
/// wishes are met or the budget is used up. Earlier wishes come first.
pub(crate) fn allot(wishes: &[Wish], budget: PoolBudget) -> Vec<usize> {
    let mut given: Vec<usize> = wishes.iter().map(|wish| wish.least).collect();
    let mut count: usize = given.iter().sum();
    let mut bytes: u64 = wishes.iter().map(|wish| (wish.least as u64).saturating_mul(wish.bytes)).sum();
    loop {
        let before = count;
        for (given, wish) in given.iter_mut().zip(wishes) {
            let more = bytes.saturating_add(wish.bytes);
            if *given < wish.wish && count < budget.count && more <= budget.bytes {
                (*given, count, bytes) = (*given + 1, count + 1, more);
            }
        }
        if count == before {
            return given;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const REFILL: Duration = Duration::from_millis(10);

    fn asked(times_ms: &[u64]) -> (Demand, Instant) {
        let mut now = Instant::now();
        let mut demand = Demand::none(now);
        for ms in times_ms {
            now += Duration::from_millis(*ms);
            demand.took(now, REFILL);
        }
        (demand, now)
    }

    #[test]
    fn a_burst_is_remembered_whole_and_then_halved_until_nothing_is_left() {
        let (demand, now) = asked(&[0; 50]);
        assert_eq!(demand.wish(now), 50);
        assert_eq!(demand.wish(now + HALF_LIFE), 25);
        assert_eq!(demand.wish(now + 8 * HALF_LIFE), 1);
        assert_eq!(demand.wish(now + 9 * HALF_LIFE), 0);
    }

    #[test]
    fn who_asks_no_faster_than_refills_come_needs_one() {
        let (demand, now) = asked(&[10; 1000]);
        assert_eq!(demand.wish(now), 1);
        let (demand, now) = asked(&[5; 100]);
        assert_eq!(demand.wish(now), 51, "half of them come too early");
    }

    #[test]
    fn room_is_shared_one_by_one() {
        let wish = |least, wish| Wish { least, wish, bytes: 10 };
        let plenty = PoolBudget { count: 100, bytes: 1 << 30 };
        assert_eq!(allot(&[wish(3, 1), wish(0, 5), wish(0, 0)], plenty), [3, 5, 0]);
        assert_eq!(allot(&[wish(3, 1), wish(0, 50), wish(0, 4)], PoolBudget { count: 12, ..plenty }), [3, 5, 4]);
        assert_eq!(allot(&[wish(0, 50), wish(0, 50)], PoolBudget { bytes: 55, ..plenty }), [3, 2]);
        assert_eq!(
            allot(&[wish(3, 9), wish(0, 9)], PoolBudget { count: 0, ..plenty }),
            [3, 0],
            "what is ordered is made"
        );
        assert_eq!(allot(&[], plenty), [0; 0]);
    }

    proptest! {
        #[test]
        fn a_wish_is_never_more_than_was_asked_for_and_falls_while_nobody_asks(
            times in prop::collection::vec(0u64..50, 0..100), later in 0u64..10_000,
        ) {
            let (demand, now) = asked(&times);
            prop_assert!(demand.wish(now) <= times.len());
            let then = now + Duration::from_secs(later);
            prop_assert!(demand.wish(then) <= demand.wish(now));
            prop_assert!(demand.wish(then + 20 * HALF_LIFE) == 0);
        }

        #[test]
        fn bounds_hold_for_whatever_was_not_ordered(
            wishes in prop::collection::vec((0usize..5, 0usize..200, 0u64..100), 0..20), count in 0usize..100, bytes in 0u64..5000,
        ) {
            let wishes: Vec<Wish> = wishes.into_iter().map(|(least, wish, bytes)| Wish { least, wish, bytes }).collect();
            let given = allot(&wishes, PoolBudget { count, bytes });
            let ordered: usize = wishes.iter().map(|wish| wish.least).sum();
            let cost = |of: &dyn Fn(usize) -> usize| -> u64 { wishes.iter().enumerate().map(|(n, w)| of(n) as u64 * w.bytes).sum() };
            prop_assert!(given.iter().sum::<usize>() <= count.max(ordered));
            prop_assert!(cost(&|n| given[n]) <= bytes.max(cost(&|n| wishes[n].least)));
            for (given, wish) in given.iter().zip(&wishes) {
                prop_assert!((wish.least..=wish.wish.max(wish.least)).contains(given));
            }
        }
    }
}
