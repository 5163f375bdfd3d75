//! Limits calls per second with one token bucket for each tenant. A bucket is filled at the tenant's rate and has room
//! for the calls of one second.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Maximum number of tenants with a bucket. An identity provider may know more users than there is memory for.
const MOST: usize = 10_000;

#[derive(Default)]
pub(crate) struct Buckets(Mutex<HashMap<String, Bucket>>);

#[derive(Clone, Copy)]
struct Bucket {
    tokens: f64,
    filled: Instant,
}

impl Buckets {
    /// Takes one call from the tenant's bucket, or returns how long the tenant has to wait for it.
    pub(crate) fn take(&self, tenant: &str, per_second: f64, now: Instant) -> Result<(), Duration> {
        let depth = per_second.max(1.0);
        let mut buckets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !buckets.contains_key(tenant) && buckets.len() >= MOST {
            forget(&mut buckets);
        }
        let bucket = buckets.entry(tenant.into()).or_insert(Bucket { tokens: depth, filled: now });
        let elapsed = now.saturating_duration_since(bucket.filled).as_secs_f64();
        *bucket = Bucket { tokens: (bucket.tokens + elapsed * per_second).min(depth), filled: now };
        if bucket.tokens < 1.0 {
            return Err(Duration::from_secs_f64((1.0 - bucket.tokens) / per_second));
        }
        bucket.tokens -= 1.0;
        Ok(())
    }
}

/// Makes room by removing the least recently used half of the buckets. A tenant that returns starts with a full bucket.
fn forget(buckets: &mut HashMap<String, Bucket>) {
    let mut times: Vec<Instant> = buckets.values().map(|bucket| bucket.filled).collect();
    let middle = times.len() / 2;
    let (_, median, _) = times.select_nth_unstable(middle);
    let median = *median;
    buckets.retain(|_, bucket| bucket.filled > median);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_of_one_second_is_let_through_and_then_the_rate_holds() {
        let (buckets, start) = (Buckets::default(), Instant::now());
        let at = |ms: u64| start + Duration::from_millis(ms);
        for _ in 0..4 {
            assert_eq!(buckets.take("blue", 4.0, at(0)), Ok(()));
        }
        assert_eq!(buckets.take("blue", 4.0, at(0)), Err(Duration::from_millis(250)));
        assert_eq!(buckets.take("green", 4.0, at(0)), Ok(()), "another tenant's bucket is another");
        assert_eq!(buckets.take("blue", 4.0, at(250)), Ok(()));
        assert!(buckets.take("blue", 4.0, at(250)).is_err());
        let after_an_hour = (0..10).filter(|_| buckets.take("blue", 4.0, at(3_600_000)).is_ok()).count();
        assert_eq!(after_an_hour, 4);
    }

    #[test]
    fn less_than_one_a_second_still_lets_one_through() {
        let (buckets, start) = (Buckets::default(), Instant::now());
        assert_eq!(buckets.take("blue", 0.1, start), Ok(()));
        assert_eq!(buckets.take("blue", 0.1, start), Err(Duration::from_secs(10)));
    }

    #[test]
    fn the_number_of_buckets_is_bounded() {
        let (buckets, start) = (Buckets::default(), Instant::now());
        for n in 0..3 * MOST as u64 {
            let _ = buckets.take(&format!("t{n}"), 1.0, start + Duration::from_micros(n));
        }
        let left = buckets.0.lock().unwrap();
        assert!(left.len() <= MOST && left.contains_key("t29999"), "{}", left.len());
    }
}
