//! How many TCP sockets a sandbox has. A connection that waits to be accepted is charged to nobody, and stays when its client has
//! gone: what bounds them is that a sandbox with too many is ended.

use std::fs;
use std::time::{Duration, Instant};

use rustix::process::Pid;

/// Of one sandbox; some 8 kB of the kernel's memory each, and 16 kB more with data that nobody reads.
pub const MOST: u64 = 10_000;

const PAUSE: Duration = Duration::from_secs(1);
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
        let (mut any, mut found) = (false, Vec::new());
        for (key, pid) in processes {
            any = true;
            if count(pid).is_some_and(|sockets| sockets > MOST) {
                found.push(key);
            }
        }
        self.next = any.then(|| Instant::now() + PAUSE.max(begun.elapsed() * COST));
        found
    }
}

/// In the network of this process.
fn count(pid: Pid) -> Option<u64> {
    let read = |name: &str| fs::read_to_string(format!("/proc/{}/net/{name}", pid.as_raw_nonzero()));
    Some(in_use(&read("sockstat").ok()?) + in_use(&read("sockstat6").unwrap_or_default()))
}

/// `TCP: inuse 5 orphan 0 tw 0 alloc 9 mem 1`, `TCP6: inuse 3`.
fn in_use(text: &str) -> u64 {
    let line = text.lines().find(|line| line.starts_with("TCP: ") || line.starts_with("TCP6: "));
    line.and_then(|line| line.split(' ').nth(2)?.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_in_use_are_read() {
        assert_eq!(in_use("sockets: used 31\nTCP: inuse 5 orphan 0 tw 7 alloc 9 mem 1\nUDP: inuse 2 mem 0\n"), 5);
        assert_eq!(in_use("TCP6: inuse 3\nUDP6: inuse 1\n"), 3);
        assert_eq!(in_use(""), 0);
    }
}
