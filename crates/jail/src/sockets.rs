//! Counts the sockets of a sandbox. A connection that waits to be accepted is charged to no cgroup and stays when its
//! client is gone, so the bound on them is that a sandbox with too many sockets is ended.

use std::fs;
use std::time::{Duration, Instant};

use rustix::process::Pid;

/// Maximum number of sockets of a sandbox. Each uses about 8 kB of kernel memory, and 16 kB more with unread data.
pub(crate) const MOST: u64 = 10_000;

/// Default interval between two counts.
const PAUSE: Duration = Duration::from_millis(500);
/// Interval while a sandbox has more than a tenth of [`MOST`]: a program can create tens of thousands in a second.
const SHORT: Duration = Duration::from_millis(100);
/// Minimum interval after a count, as a multiple of the time that the count took.
const COST: u32 = 20;

/// Schedules the counts.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    next: Option<Instant>,
}

impl Watch {
    /// Starts counting, because there is a sandbox.
    pub(crate) fn begin(&mut self) {
        self.next.get_or_insert_with(|| Instant::now() + PAUSE);
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.next
    }

    /// Returns the keys of the sandboxes that have too many sockets, if a count is due. Without sandboxes, no further
    /// count is scheduled.
    pub(crate) fn tick(&mut self, processes: impl Iterator<Item = (u64, Pid)>) -> Vec<u64> {
        let begun = Instant::now();
        if self.next.is_none_or(|next| begun < next) {
            return vec![];
        }
        let (mut most, mut found) = (None, Vec::new());
        for (key, pid) in processes {
            let sockets = count(pid).unwrap_or(0);
            most = most.max(Some(sockets));
            if sockets > MOST {
                found.push(key);
            }
        }
        let pause = |most| if most > MOST / 10 { SHORT } else { PAUSE };
        self.next = most.map(|most| Instant::now() + pause(most).max(begun.elapsed() * COST));
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
    use super::*;

    #[test]
    fn sockets_of_every_family_are_counted() {
        assert_eq!(
            allocated("sockets: used 31\nTCP: inuse 5 orphan 0 tw 7 alloc 9 mem 1\nUDP: inuse 2 mem 0\n"),
            Some(31)
        );
        assert_eq!(allocated(""), None);
    }
}
