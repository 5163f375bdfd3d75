//! This module counts the sockets of sandboxes. A connection that waits to be accepted is charged to no cgroup and
//! stays when its client is gone, so the launcher ends a sandbox that has too many sockets.

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant};

use rustix::process::Pid;

/// Maximum number of sockets of a sandbox. Each uses about 8 kB of kernel memory, and 16 kB more with unread data.
pub(crate) const MOST: u64 = 10_000;

/// Default interval between two counts of all sandboxes.
const PAUSE: Duration = Duration::from_millis(500);
/// Interval between counts of the sandboxes that have more than [`MANY`] sockets: a program can create tens of
/// thousands in a second.
const SHORT: Duration = Duration::from_millis(100);
const MANY: u64 = MOST / 10;
/// Minimum interval after a count, as a multiple of the time that the count took. A slow count (of many sandboxes, or on
/// a busy machine) delays the next one by no more than [`LONGEST`], or sandboxes could exceed the limit for long.
const COST: u32 = 20;
const LONGEST: Duration = Duration::from_secs(1);

/// Schedules the counts.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    /// Time of the next count of all sandboxes.
    next: Option<Instant>,
    /// The sandboxes that have more than [`MANY`] sockets, and the time at which they are counted next.
    many: BTreeSet<u64>,
    soon: Option<Instant>,
}

impl Watch {
    /// Starts counting, because there is a sandbox.
    pub(crate) fn begin(&mut self) {
        self.next.get_or_insert_with(|| Instant::now() + PAUSE);
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.next.into_iter().chain(self.soon).min()
    }

    /// Returns the keys of the sandboxes that have too many sockets, if a count is due. Without sandboxes, no further
    /// count is scheduled.
    pub(crate) fn tick(&mut self, processes: impl Iterator<Item = (u64, Pid)>) -> Vec<u64> {
        self.tick_with(Instant::now, processes, count)
    }

    fn tick_with(
        &mut self,
        now: impl Fn() -> Instant,
        processes: impl Iterator<Item = (u64, Pid)>,
        count: impl Fn(Pid) -> Option<u64>,
    ) -> Vec<u64> {
        let begun = now();
        let is_due = |time: Option<Instant>| time.is_some_and(|time| time <= begun);
        let all = is_due(self.next);
        if !all && !is_due(self.soon) {
            return vec![];
        }
        let known = std::mem::take(&mut self.many);
        let (mut counted, mut found) = (0, Vec::new());
        for (key, pid) in processes.filter(|(key, _)| all || known.contains(key)) {
            counted += 1;
            let sockets = count(pid).unwrap_or(0);
            if sockets > MANY {
                self.many.insert(key);
            }
            if sockets > MOST {
                found.push(key);
            }
        }
        let ended = now();
        let each = (ended - begun) / counted.max(1);
        let after = |usual: Duration, number: u32| {
            Some(ended + usual.max((each * number * COST).min(LONGEST))).filter(|_| number > 0)
        };
        if all {
            self.next = after(PAUSE, counted);
        }
        self.soon = after(SHORT, self.many.len() as u32);
        found
    }
}

/// Returns the number of sockets in the network namespace of this process.
fn count(pid: Pid) -> Option<u64> {
    allocated(&fs::read_to_string(format!("/proc/{}/net/sockstat", pid.as_raw_nonzero())).ok()?)
}

/// Parses the line `sockets: used 31`, which counts sockets of every family that are not freed. The `inuse` figure of
/// `TCP:` does not include connections that were reset but still wait to be accepted.
fn allocated(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("sockets: used "))?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::*;

    #[test]
    fn sockets_of_every_family_are_counted() {
        assert_eq!(
            allocated("sockets: used 31\nTCP: inuse 5 orphan 0 tw 7 alloc 9 mem 1\nUDP: inuse 2 mem 0\n"),
            Some(31)
        );
        assert_eq!(allocated(""), None);
    }

    /// W51: a slow count delays the next one by a second at most, and sandboxes with many sockets are counted between
    /// two counts of all.
    #[test]
    fn w51_a_slow_count_delays_the_next_one_by_no_more_than_a_second() {
        let (start, passed, sockets) = (Instant::now(), Cell::new(PAUSE), Cell::new(MANY + 1));
        let asked = RefCell::new(Vec::new());
        let slow = |pid: Pid| {
            asked.borrow_mut().push(pid.as_raw_pid());
            passed.set(passed.get() + Duration::from_millis(2));
            Some(if pid.as_raw_pid() == 7 { sockets.get() } else { 3 })
        };
        let all = || (1..=1000_i32).map(|n| (u64::from(n.unsigned_abs()), Pid::from_raw(n).unwrap()));
        let mut watch = Watch { next: Some(start + PAUSE), ..Watch::default() };
        let mut look = |at: Option<Instant>| {
            passed.set(at.map_or(Duration::ZERO, |at| at - start));
            asked.borrow_mut().clear();
            let found = watch.tick_with(|| start + passed.get(), all(), slow);
            (found, asked.borrow().clone(), watch.next.unwrap() - start, watch.soon.map(|soon| soon - start))
        };
        // Counting all takes two seconds, so a twentieth of the time would be a pause of forty.
        let (found, counted, next, soon) = look(Some(start + PAUSE));
        assert_eq!((found, counted.len(), passed.get()), (vec![], 1000, Duration::from_millis(2500)));
        assert_eq!((next, soon), (passed.get() + LONGEST, Some(passed.get() + SHORT)));
        assert!(look(Some(start + Duration::from_millis(2550))).1.is_empty(), "too early");
        sockets.set(MOST + 1);
        let (found, counted, later, again) = look(soon.map(|soon| start + soon));
        assert_eq!((found, counted, later), (vec![7], vec![7], next));
        // It has gone by the next time; what remains is the count of all.
        sockets.set(0);
        let (found, counted, _, soon) = look(again.map(|again| start + again));
        assert_eq!((found, counted, soon), (vec![], vec![7], None));
        assert_eq!(look(Some(start + next)).1.len(), 1000);
        assert!(watch.tick_with(|| start + LONGEST * 9, std::iter::empty(), slow).is_empty());
        assert_eq!(watch.deadline(), None, "without sandboxes nothing is counted");
    }
}
