//! This module measures the memory of sandboxes that no cgroup limits, so that the launcher can end one that exceeds
//! its limit.
//!
//! A measurement first adds up what the processes have resident, which is cheap and an upper bound: forked processes
//! share pages. Only if the bound exceeds a limit, the proportional shares are read, for which the Linux kernel walks
//! the page tables. Files in memory count as well: those of the sandbox's tmpfs, memfds, and System V segments.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, Dir, Mode, OFlags, fstatfs, openat, readlinkat, statat};
use rustix::process::{Pid, WaitOptions};

use crate::cgroup::Group;
use crate::sys;

/// Longest and shortest interval between two measurements of a sandbox.
const PAUSE: Duration = Duration::from_millis(250);
const SHORT: Duration = Duration::from_millis(10);
/// The growth per second that decides how soon a sandbox is measured again: it cannot use up what is left of its limit
/// in between. Two processors that only fill pages reach about half of it.
const GROWTH: u64 = 8 << 30;
/// Minimum interval after a measurement, as a multiple of the time that it took, up to [`LONGEST`].
const COST: u32 = 10;
const LONGEST: Duration = Duration::from_millis(500);
/// Number of consecutive measurements that may fail. A sandbox that cannot be measured has no limit.
const FAILURES: u32 = 40;
/// Growth of the files in memory of the whole machine after which memfds and System V segments are looked for.
const SEARCH_AFTER: u64 = 32 << 20;
/// Maximum number of descriptors of a sandbox that are examined in one search.
const MAX_DESCRIPTORS: usize = 1 << 16;
/// Number of consecutive measurements in which a process does not count that looks like its parent.
const DOUBTS: u32 = 5;

/// A sandbox that runs, and its limits.
#[derive(Clone, Copy)]
pub(crate) struct WatchedSandbox<'a> {
    pub key: u64,
    pub pid: Pid,
    pub pidfd: BorrowedFd<'a>,
    pub limit: u64,
    pub groups: &'a [Group],
}

/// The reason why a sandbox has to be ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Excess {
    /// Its memory, or that of a group in which it has the most, exceeds this limit.
    Over {
        limit: u64,
        used: u64,
    },
    Unmeasurable,
}

/// The means of measuring, which tests replace.
trait Meter {
    /// Returns an upper bound of the memory that the sandbox uses.
    fn bound(&mut self, sandbox: &WatchedSandbox<'_>) -> io::Result<u64>;
    /// Returns the memory that the sandbox uses.
    fn exact(&mut self, sandbox: &WatchedSandbox<'_>) -> io::Result<u64>;
    fn now(&self) -> Instant;
}

/// Schedules the measurements and keeps the last results.
#[derive(Debug, Default)]
pub(crate) struct MemoryWatch {
    records: BTreeMap<u64, MemoryRecord>,
    machine: Machine,
}

#[derive(Debug)]
struct MemoryRecord {
    due: Instant,
    /// The last measurement: a bound, or the exact value if the bound exceeded a limit.
    bytes: u64,
    failures: u32,
}

impl MemoryWatch {
    pub(crate) fn begin(&mut self, key: u64) {
        self.records.insert(key, MemoryRecord { due: Instant::now() + SHORT, bytes: 0, failures: 0 });
    }

    pub(crate) fn forget(&mut self, key: u64) {
        self.records.remove(&key);
        self.machine.hidden.remove(&key);
        self.machine.lookalikes.remove(&key);
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.records.values().map(|record| record.due).min()
    }

    /// Returns the last measurement of a sandbox.
    fn bytes(&self, key: u64) -> Option<u64> {
        self.records.get(&key).map(|record| record.bytes)
    }

    /// Measures the sandboxes that are due and returns those that have to be ended.
    pub(crate) fn tick(&mut self, sandboxes: &[WatchedSandbox<'_>]) -> Vec<(u64, Excess)> {
        let now = Instant::now();
        if self.records.values().all(|record| record.due > now) {
            return Vec::new();
        }
        let mut machine = std::mem::take(&mut self.machine);
        machine.look(sandboxes);
        let found = self.tick_with(&mut machine, sandboxes);
        self.machine = machine;
        found
    }

    fn tick_with(&mut self, meter: &mut impl Meter, sandboxes: &[WatchedSandbox<'_>]) -> Vec<(u64, Excess)> {
        let begun = meter.now();
        let mut found = BTreeMap::new();
        let mut measured = Vec::new();
        for sandbox in sandboxes {
            let Some(record) = self.records.get_mut(&sandbox.key).filter(|record| record.due <= begun) else {
                continue;
            };
            measured.push(sandbox);
            let bytes = meter.bound(sandbox).and_then(|bound| match bound > sandbox.limit {
                true => meter.exact(sandbox),
                false => Ok(bound),
            });
            match bytes {
                Ok(bytes) => (record.bytes, record.failures) = (bytes, 0),
                Err(_) => record.failures += 1,
            }
            if record.bytes > sandbox.limit {
                found.insert(sandbox.key, Excess::Over { limit: sandbox.limit, used: record.bytes });
            } else if record.failures > FAILURES {
                found.insert(sandbox.key, Excess::Unmeasurable);
            }
        }
        let left = self.judge_groups(meter, sandboxes, &mut found);
        // A key whose sandbox does not run any more is not measured again.
        let running: BTreeSet<u64> = sandboxes.iter().map(|sandbox| sandbox.key).collect();
        self.records.retain(|key, _| running.contains(key) && !found.contains_key(key));
        let ended = meter.now();
        // All sandboxes together cost no more than this part of the time.
        let each = (ended - begun) / (measured.len() as u32).max(1);
        let cost = (each * COST * self.records.len() as u32).min(LONGEST);
        for sandbox in measured {
            let Some(record) = self.records.get_mut(&sandbox.key) else { continue };
            let group = left.get(&sandbox.key).copied().unwrap_or(u64::MAX);
            let left = sandbox.limit.saturating_sub(record.bytes).min(group);
            let micros = u64::try_from(u128::from(left) * 1_000_000 / u128::from(GROWTH)).unwrap_or(u64::MAX);
            record.due = ended + Duration::from_micros(micros).clamp(SHORT, PAUSE).max(cost);
        }
        found.into_iter().collect()
    }

    /// Finds the groups that exceed their limit, and in each of them the sandbox that has the most. Returns what is
    /// left to each sandbox of the limits of its groups.
    fn judge_groups(
        &mut self,
        meter: &mut impl Meter,
        sandboxes: &[WatchedSandbox<'_>],
        found: &mut BTreeMap<u64, Excess>,
    ) -> BTreeMap<u64, u64> {
        let mut groups: BTreeMap<Vec<&str>, (u64, Vec<&WatchedSandbox<'_>>)> = BTreeMap::new();
        for sandbox in sandboxes.iter().filter(|sandbox| !found.contains_key(&sandbox.key)) {
            for (depth, group) in sandbox.groups.iter().enumerate() {
                let Some(limit) = group.memory_bytes else { continue };
                let path = sandbox.groups[..=depth].iter().map(|group| group.name.as_str()).collect();
                groups.entry(path).or_insert((limit, Vec::new())).1.push(sandbox);
            }
        }
        let mut left: BTreeMap<u64, u64> = BTreeMap::new();
        for (limit, members) in groups.into_values() {
            let bytes = |watch: &Self, sandbox: &WatchedSandbox<'_>| watch.bytes(sandbox.key).unwrap_or(0);
            let sum = |watch: &Self| members.iter().map(|sandbox| bytes(watch, sandbox)).sum::<u64>();
            if sum(self) > limit {
                for sandbox in &members {
                    if let (Ok(exact), Some(record)) = (meter.exact(sandbox), self.records.get_mut(&sandbox.key)) {
                        record.bytes = exact;
                    }
                }
            }
            let used = sum(self);
            if used > limit
                && let Some(largest) = members.iter().max_by_key(|sandbox| bytes(self, sandbox))
            {
                found.insert(largest.key, Excess::Over { limit, used });
            }
            for sandbox in &members {
                let own = left.entry(sandbox.key).or_insert(u64::MAX);
                *own = (*own).min(limit.saturating_sub(used));
            }
        }
        left
    }
}

/// What is known about files in memory that no process maps and no mount shows.
#[derive(Debug, Default)]
struct Machine {
    /// Files in memory of the whole machine at the last search.
    shared: u64,
    /// The keys of the sandboxes that have to be searched, because the machine's files in memory have grown.
    to_search: BTreeSet<u64>,
    /// The result of the last search, by the keys of the sandboxes.
    hidden: BTreeMap<u64, u64>,
    lookalikes: BTreeMap<u64, Lookalikes>,
}

/// Processes that look like their parent, and how often they were found so. Such a process may run in its parent's memory:
/// a program that starts another one lends it its memory until the other one is executed. A fork shares its pages, so
/// that little is missed in the meantime.
#[derive(Debug, Default)]
struct Lookalikes {
    before: BTreeMap<String, u32>,
    now: BTreeMap<String, u32>,
}

impl Lookalikes {
    /// Returns whether a process that looks like its parent counts.
    fn counts(&mut self, name: &str) -> bool {
        let times = self.before.get(name).map_or(1, |times| times + 1);
        self.now.insert(name.to_owned(), times);
        times > DOUBTS
    }

    /// Ends a measurement. Processes that were not found in it are forgotten.
    fn turn(&mut self) {
        self.before = std::mem::take(&mut self.now);
    }
}

impl Machine {
    /// Finds out whether it is time for a search.
    fn look(&mut self, sandboxes: &[WatchedSandbox<'_>]) {
        let shared = fs::read_to_string("/proc/meminfo").ok().and_then(|text| kilobytes(&text, "Shmem")).unwrap_or(0);
        let has_grown = shared > self.shared.saturating_add(SEARCH_AFTER);
        if has_grown {
            self.to_search = sandboxes.iter().map(|sandbox| sandbox.key).collect();
        }
        if has_grown || shared < self.shared {
            self.shared = shared;
        }
    }

    fn search(&mut self, sandbox: &WatchedSandbox<'_>, processes: &Processes) -> u64 {
        let found = processes.memfds() + segments(sandbox.pidfd);
        self.hidden.insert(sandbox.key, found);
        found
    }
}

impl Meter for Machine {
    fn bound(&mut self, sandbox: &WatchedSandbox<'_>) -> io::Result<u64> {
        let processes = Processes::of(sandbox.pid)?;
        let hidden = match self.to_search.remove(&sandbox.key) {
            true => self.search(sandbox, &processes),
            false => self.hidden.get(&sandbox.key).copied().unwrap_or(0),
        };
        let of_processes =
            |process: &MeasuredProcess| process.status.anonymous + process.status.shared + process.status.tables;
        let resident: u64 = processes.all.iter().map(of_processes).sum();
        Ok(resident + in_memory_files(sandbox.pid) + hidden)
    }

    fn exact(&mut self, sandbox: &WatchedSandbox<'_>) -> io::Result<u64> {
        let processes = Processes::of(sandbox.pid)?;
        let hidden = self.search(sandbox, &processes);
        let used = processes.measure(self.lookalikes.entry(sandbox.key).or_default());
        Ok(used + in_memory_files(sandbox.pid) + hidden)
    }

    fn now(&self) -> Instant {
        Instant::now()
    }
}

/// The processes of a sandbox, read in the `/proc` of its pid namespace.
struct Processes {
    proc: OwnedFd,
    all: Vec<MeasuredProcess>,
}

struct MeasuredProcess {
    name: String,
    status: Status,
}

/// Figures of `/proc/<pid>/status`, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Status {
    parent: u64,
    size: u64,
    /// Anonymous memory, resident or swapped out.
    anonymous: u64,
    shared: u64,
    tables: u64,
}

impl Processes {
    fn of(pid: Pid) -> io::Result<Self> {
        // The root of a sandbox is sealed, so that no code in it can put anything else at this path.
        let path = format!("/proc/{}/root/proc", pid.as_raw_nonzero());
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let proc = rustix::fs::open(path, flags, Mode::empty())?;
        if fstatfs(&proc)?.f_type != libc::PROC_SUPER_MAGIC {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut all = Vec::new();
        for entry in Dir::read_from(&proc)?.flatten() {
            let Ok(name) = entry.file_name().to_str() else { continue };
            // A process that has just ended has no figures.
            if name.bytes().all(|byte| byte.is_ascii_digit())
                && let Ok(text) = read(proc.as_fd(), &format!("{name}/status"))
            {
                all.push(MeasuredProcess { name: name.to_owned(), status: Status::parse(&text) });
            }
        }
        Ok(Self { proc, all })
    }

    /// Adds up the shares of the processes. A process that looks like its parent does not count if the parent waits for
    /// it, or if it is new.
    fn measure(&self, lookalikes: &mut Lookalikes) -> u64 {
        let statuses: BTreeMap<&str, &Status> = self.all.iter().map(|one| (&*one.name, &one.status)).collect();
        let mut waiting: BTreeMap<u64, usize> = BTreeMap::new();
        let mut counts = |MeasuredProcess { name, status }: &&MeasuredProcess| {
            if !statuses.get(&*status.parent.to_string()).is_some_and(|parent| parent.is_like(status)) {
                return true;
            }
            let left = waiting.entry(status.parent).or_insert_with(|| self.waiting_threads(status.parent));
            match left.checked_sub(1) {
                Some(fewer) => {
                    *left = fewer;
                    false
                }
                None => lookalikes.counts(name),
            }
        };
        let used = self.all.iter().filter(|process| counts(process)).map(|process| self.share(process)).sum();
        lookalikes.turn();
        used
    }

    /// Returns the number of threads that wait as one does that has lent its memory: without reacting to signals.
    fn waiting_threads(&self, process: u64) -> usize {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let Ok(tasks) = openat(&self.proc, format!("{process}/task"), flags, Mode::empty()) else { return 0 };
        let Ok(entries) = Dir::read_from(&tasks) else { return 0 };
        let waits =
            |name: &str| read(tasks.as_fd(), &format!("{name}/stat")).is_ok_and(|text| state(&text) == Some("D"));
        entries.flatten().filter(|entry| entry.file_name().to_str().is_ok_and(waits)).count()
    }

    /// Returns the proportional share of a process in its memory, without files that are counted elsewhere.
    fn share(&self, MeasuredProcess { name, status }: &MeasuredProcess) -> u64 {
        let rollup = match read(self.proc.as_fd(), &format!("{name}/smaps_rollup")) {
            Ok(text) => text,
            // The process has ended since its status was read.
            Err(e) if e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(libc::ESRCH) => return 0,
            Err(_) => return status.anonymous + status.shared + status.tables,
        };
        let of = |field: &str| kilobytes(&rollup, field);
        let (Some(anonymous), Some(shared)) = (of("Pss_Anon"), of("Pss_Shmem")) else { return 0 };
        let shared = if shared == 0 { 0 } else { self.shared_anonymous(name).unwrap_or(shared) };
        anonymous + of("SwapPss").unwrap_or(0) + shared + status.tables
    }

    /// Returns the share of a process in the memory that it maps as shared and that belongs to no file.
    fn shared_anonymous(&self, name: &str) -> Option<u64> {
        Some(anonymous_mappings(&read(self.proc.as_fd(), &format!("{name}/smaps")).ok()?))
    }

    /// Returns the sizes of the memfds that are open in the sandbox, each once.
    fn memfds(&self) -> u64 {
        let mut seen = BTreeMap::new();
        let mut left = MAX_DESCRIPTORS;
        for MeasuredProcess { name, .. } in &self.all {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let Ok(dir) = openat(&self.proc, format!("{name}/fd"), flags, Mode::empty()) else { continue };
            let Ok(entries) = Dir::read_from(&dir) else { continue };
            for entry in entries.flatten().take(left) {
                left -= 1;
                let is_memfd = readlinkat(&dir, entry.file_name(), Vec::new())
                    .is_ok_and(|target| target.to_bytes().starts_with(b"/memfd:"));
                if is_memfd && let Ok(found) = statat(&dir, entry.file_name(), AtFlags::empty()) {
                    seen.insert((found.st_dev, found.st_ino), found.st_blocks as u64 * 512);
                }
            }
        }
        seen.values().sum()
    }
}

impl Status {
    /// Returns whether two processes may have the same memory. Threads change the figures between two readings.
    fn is_like(&self, other: &Self) -> bool {
        let near = |a: u64, b: u64| a.abs_diff(b) <= a.max(b) / 8;
        near(self.size, other.size) && near(self.anonymous, other.anonymous) && self.anonymous > 0
    }

    fn parse(text: &str) -> Self {
        let of = |field: &str| kilobytes(text, field).unwrap_or(0);
        let parent = text.lines().find_map(|line| line.strip_prefix("PPid:")?.trim().parse().ok());
        Self {
            parent: parent.unwrap_or(0),
            size: of("VmSize"),
            anonymous: of("RssAnon") + of("VmSwap"),
            shared: of("RssShmem"),
            tables: of("VmPTE"),
        }
    }
}

fn read(dir: BorrowedFd<'_>, path: &str) -> io::Result<String> {
    let file = openat(dir, path, OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    let mut text = Vec::new();
    File::from(file).read_to_end(&mut text)?;
    // The name of a program may contain anything.
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Returns the value of the line `field: 12 kB`, in bytes.
fn kilobytes(text: &str, field: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    value.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|kilobytes| kilobytes << 10)
}

/// Returns the state in the `stat` of a thread. The name before it may contain anything.
fn state(stat: &str) -> Option<&str> {
    stat.rsplit_once(')')?.1.split_whitespace().next()
}

/// Adds up the shares in mappings of `/dev/zero`, which is how `smaps` names shared memory without a file.
fn anonymous_mappings(smaps: &str) -> u64 {
    let (mut sum, mut counts) = (0, false);
    for line in smaps.lines() {
        match line.split_once(' ') {
            Some((range, _)) if range.contains('-') => counts = line.ends_with(" /dev/zero (deleted)"),
            _ if counts => sum += kilobytes(line, "Pss").unwrap_or(0),
            _ => {}
        }
    }
    sum
}

/// Returns the size of the files on the file systems of a sandbox that are in memory.
fn in_memory_files(pid: Pid) -> u64 {
    let used = |dir: &str| {
        let path = format!("/proc/{}/root/{dir}", pid.as_raw_nonzero());
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let found = fstatfs(rustix::fs::open(path, flags, Mode::empty()).ok()?).ok()?;
        let used = (found.f_blocks - found.f_bfree) * found.f_bsize.unsigned_abs();
        (found.f_type == libc::TMPFS_MAGIC).then_some(used)
    };
    ["tmp", "dev/shm"].into_iter().filter_map(used).sum()
}

/// Returns the size of the System V segments of a sandbox. `/proc/sysvipc` shows those of the reader's namespace, and the
/// launcher of an ordinary user could not leave that of a sandbox again, so a child reads it.
fn segments(sandbox: BorrowedFd<'_>) -> u64 {
    let Ok((read, write)) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC) else { return 0 };
    match sys::fork() {
        Ok(None) => {
            if sys::join_namespaces(sandbox, libc::CLONE_NEWIPC).is_ok() {
                let text = fs::read_to_string("/proc/sysvipc/shm").unwrap_or_default();
                let _ = rustix::io::write(&write, &resident_segments(&text).to_ne_bytes());
            }
            sys::leave(0)
        }
        Ok(Some(child)) => {
            drop(write);
            let mut bytes = [0; 8];
            let found = File::from(read).read_exact(&mut bytes).map_or(0, |()| u64::from_ne_bytes(bytes));
            let _ = rustix::process::waitpid(Some(child), WaitOptions::empty());
            found
        }
        Err(_) => 0,
    }
}

/// Adds up the last two columns of `/proc/sysvipc/shm`: bytes that are resident, and bytes that are swapped out.
fn resident_segments(text: &str) -> u64 {
    let size =
        |line: &str| line.split_whitespace().rev().take(2).filter_map(|word| word.parse::<u64>().ok()).sum::<u64>();
    text.lines().skip(1).map(size).sum()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const MB: u64 = 1 << 20;

    #[test]
    fn figures_of_proc_are_read() {
        let status = "Name:\ta b\nPPid:\t7\nVmSize:\t    4096 kB\nVmPTE:\t      48 kB\nVmSwap:\t       4 kB\n\
                      RssAnon:\t      12 kB\nRssFile:\t    9999 kB\nRssShmem:\t       8 kB\n";
        let expected = Status { parent: 7, size: 4 * MB, anonymous: 16 << 10, shared: 8 << 10, tables: 48 << 10 };
        assert_eq!(Status::parse(status), expected);
        assert_eq!(Status::parse("Name:\tkthread\n"), Status::default());
        assert_eq!(state("12 (a) b (c) D 1 2 3"), Some("D"));
        let smaps = "7f00-7f10 rw-s 00000000 00:01 5   /dev/zero (deleted)\nRss:  8 kB\nPss:  4 kB\nPss_Dirty: 4 kB\n\
                     7f20-7f30 rw-s 00000000 00:01 6   /dev/shm/x\nPss:  64 kB\n";
        assert_eq!(anonymous_mappings(smaps), 4 << 10);
        let shm = "       key      shmid perms  size  cpid  lpid nattch uid gid cuid cgid atime dtime ctime rss swap\n\
                   0 1 600 4096 1 1 0 0 0 0 0 0 0 0 4096 0\n0 2 600 8192 1 1 0 0 0 0 0 0 0 0 4096 4096\n";
        assert_eq!(resident_segments(shm), 12288);
    }

    #[test]
    fn this_process_is_measured() {
        let text = fs::read_to_string("/proc/self/status").unwrap();
        let status = Status::parse(&text);
        assert!(status.anonymous > 0 && status.size > status.anonymous, "{status:?}");
        let rollup = fs::read_to_string("/proc/self/smaps_rollup").unwrap();
        assert!(kilobytes(&rollup, "Pss_Anon").is_some_and(|bytes| bytes > 0), "{rollup}");
        assert!(status.is_like(&status) && !status.is_like(&Status { size: status.size * 2, ..status }));
    }

    /// A machine of which a test says everything.
    struct Scripted {
        bound: BTreeMap<u64, u64>,
        exact: BTreeMap<u64, u64>,
        asked: Vec<u64>,
        now: Cell<Instant>,
        takes: Duration,
    }

    impl Meter for Scripted {
        fn bound(&mut self, sandbox: &WatchedSandbox<'_>) -> io::Result<u64> {
            self.now.set(self.now.get() + self.takes);
            self.bound.get(&sandbox.key).copied().ok_or_else(|| io::ErrorKind::PermissionDenied.into())
        }

        fn exact(&mut self, sandbox: &WatchedSandbox<'_>) -> io::Result<u64> {
            self.asked.push(sandbox.key);
            Ok(self.exact[&sandbox.key])
        }

        fn now(&self) -> Instant {
            self.now.get()
        }
    }

    struct Bench {
        watch: MemoryWatch,
        meter: Scripted,
        null: File,
        groups: Vec<Group>,
    }

    impl Bench {
        fn new(keys: &[u64], group: Option<u64>) -> Self {
            let mut watch = MemoryWatch::default();
            keys.iter().for_each(|key| watch.begin(*key));
            let now = Cell::new(Instant::now() + SHORT);
            let meter = Scripted {
                bound: BTreeMap::new(),
                exact: BTreeMap::new(),
                asked: Vec::new(),
                now,
                takes: Duration::ZERO,
            };
            let groups = vec![Group { name: "t".into(), memory_bytes: group, cpu_millis: None }];
            Self { watch, meter, null: File::open("/dev/null").unwrap(), groups }
        }

        /// One tick, whenever it is due. Every sandbox has a limit of 1,000 MB.
        fn tick(&mut self) -> Vec<(u64, Excess)> {
            let due = self.watch.records.values().map(|record| record.due).max().unwrap_or(self.meter.now.get());
            self.meter.now.set(due.max(self.meter.now.get()));
            let keys: Vec<u64> = self.watch.records.keys().copied().collect();
            let (pidfd, groups) = (self.null.as_fd(), self.groups.as_slice());
            let of = |key| WatchedSandbox { key, pid: Pid::INIT, pidfd, limit: 1000 * MB, groups };
            self.watch.tick_with(&mut self.meter, &keys.into_iter().map(of).collect::<Vec<_>>())
        }

        fn pause(&self, key: u64) -> Duration {
            self.watch.records[&key].due - self.meter.now.get()
        }
    }

    #[test]
    fn a_sandbox_is_measured_the_sooner_the_less_is_left_to_it() {
        let mut bench = Bench::new(&[1, 2], None);
        bench.meter.bound = [(1, 10 * MB), (2, 999 * MB)].into();
        assert_eq!(bench.tick(), []);
        assert!(bench.pause(1) > Duration::from_millis(100) && bench.pause(1) <= PAUSE, "{:?}", bench.pause(1));
        assert_eq!(bench.pause(2), SHORT);
        // What a measurement costs stays a small part of the time.
        bench.meter.takes = Duration::from_millis(20);
        assert_eq!(bench.tick(), []);
        assert_eq!(bench.pause(2), Duration::from_millis(400));
    }

    #[test]
    fn shared_pages_do_not_count_twice() {
        let mut bench = Bench::new(&[1], None);
        bench.meter.bound = [(1, 4000 * MB)].into();
        bench.meter.exact = [(1, 600 * MB)].into();
        assert_eq!(bench.tick(), []);
        assert_eq!((bench.watch.bytes(1), bench.meter.asked.len()), (Some(600 * MB), 1));
        bench.meter.exact = [(1, 1001 * MB)].into();
        assert_eq!(bench.tick(), [(1, Excess::Over { limit: 1000 * MB, used: 1001 * MB })]);
        assert_eq!(bench.watch.deadline(), None, "it is not measured again");
    }

    #[test]
    fn a_process_that_looks_like_its_parent_counts_only_if_it_stays() {
        let mut lookalikes = Lookalikes::default();
        for _ in 0..DOUBTS {
            assert!(!lookalikes.counts("7"));
            lookalikes.turn();
        }
        assert!(lookalikes.counts("7") && !lookalikes.counts("8"));
        lookalikes.turn();
        // It is gone, and another process has its number.
        lookalikes.turn();
        assert!(!lookalikes.counts("7"));
    }

    #[test]
    fn the_largest_sandbox_of_a_group_that_exceeds_its_limit_is_ended() {
        let mut bench = Bench::new(&[1, 2, 3], Some(1500 * MB));
        bench.meter.bound = [(1, 600 * MB), (2, 700 * MB), (3, 500 * MB)].into();
        bench.meter.exact = [(1, 400 * MB), (2, 500 * MB), (3, 400 * MB)].into();
        assert_eq!(bench.tick(), [], "their shares together are less");
        bench.meter.exact = [(1, 600 * MB), (2, 700 * MB), (3, 500 * MB)].into();
        assert_eq!(bench.tick(), [(2, Excess::Over { limit: 1500 * MB, used: 1800 * MB })]);
        assert_eq!(bench.tick(), []);
    }

    #[test]
    fn a_sandbox_that_cannot_be_measured_is_ended() {
        let mut bench = Bench::new(&[1], None);
        for _ in 0..FAILURES {
            assert_eq!(bench.tick(), []);
        }
        assert_eq!(bench.tick(), [(1, Excess::Unmeasurable)]);
    }
}
