//! How many sockets a sandbox has. A connection that waits to be accepted is charged to nobody, and stays when its client has
//! gone: what bounds them is that a sandbox with too many sockets is ended.

use std::fs;
use std::time::{Duration, Instant};

use rustix::process::Pid;

/// Of one sandbox; some 8 kB of the kernel's memory each, and 16 kB more with data that nobody reads.
pub const MOST: u64 = 10_000;

const PAUSE: Duration = Duration::from_millis(500);
/// While somebody has more than a tenth of [`MOST`]: a program can make tens of thousands in a second.
const SHORT: Duration = Duration::from_millis(100);
/// After a look this many times as long as it took.
const COST: u32 = 20;

/// When to look.
#[derive(Debug, Default)]
pub struct Watch {
    next: Option<Instant>,
}

impl Watch {
    /// There is somebody to look at.
    pub fn begin(&mut self) {
        self.next.get_or_insert_with(|| Instant::now() + PAUSE);
    }

    pub fn deadline(&self) -> Option<Instant> {
        self.next
    }

    /// Which of these have too many, if it is time. Without anybody to look at there is no next time.
    pub fn tick(&mut self, processes: impl Iterator<Item = (u64, Pid)>) -> Vec<u64> {
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

/// In the network of this process.
fn count(pid: Pid) -> Option<u64> {
    allocated(&fs::read_to_string(format!("/proc/{}/net/sockstat", pid.as_raw_nonzero())).ok()?)
}

/// Of the line `sockets: used 31`: sockets of every family that have not been freed. The `inuse` of `TCP:` leaves out connections that
/// were reset, which wait to be accepted all the same.
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
