//! This module manages the server's tree of cgroups: groups, sandboxes and their parts, with limits and counters.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::v2::signed;
use super::{CgroupLimits, Controller, Group, Hierarchy, Usage, Version, kill_member, members, named, write};

/// Our part of each hierarchy.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Tree {
    pub(super) hierarchies: Vec<Hierarchy>,
}

impl Tree {
    /// Returns the top directory of our tree in each hierarchy.
    pub(crate) fn tops(&self) -> Vec<PathBuf> {
        self.hierarchies.iter().map(|h| h.base.clone()).collect()
    }

    /// Returns the cgroup of a sandbox without creating it. `groups` starts with the outermost; `split` gives the
    /// browser a separate part.
    pub(crate) fn sandbox(&self, groups: &[Group], sandbox: &str, split: bool) -> Cgroup {
        let dir = |h: &Hierarchy| group_dirs(h, groups).pop().unwrap_or_else(|| h.base.clone()).join(sandbox);
        Cgroup { dirs: self.hierarchies.iter().map(|h| (h.clone(), dir(h))).collect(), split }
    }

    /// Creates the top directories, which exist as long as the server.
    pub(crate) fn open(&self) -> io::Result<()> {
        self.hierarchies.iter().try_for_each(|h| make(h, &h.base, CgroupLimits::default(), CgroupKind::Group))
    }

    /// Creates the sandbox's cgroup with its limits, and those of its groups that do not exist yet.
    pub(crate) fn create(
        &self,
        groups: &[Group],
        sandbox: (&str, CgroupLimits),
        browser: Option<CgroupLimits>,
    ) -> io::Result<Cgroup> {
        let cgroup = self.sandbox(groups, sandbox.0, browser.is_some());
        let kind = if browser.is_some() { CgroupKind::Split } else { CgroupKind::Leaf };
        for (hierarchy, dir) in &cgroup.dirs {
            // The groups usually exist, and checking each of them would cost as much as creating one.
            match make(hierarchy, dir, sandbox.1, kind) {
                Err(e) if e.kind() == ErrorKind::NotFound && !dir.exists() => {
                    for (parent, group) in group_dirs(hierarchy, groups).iter().zip(groups) {
                        let Group { memory_bytes, cpu_millis, .. } = *group;
                        let limits = CgroupLimits { memory_bytes, cpu_millis, pids: None };
                        make(hierarchy, parent, limits, CgroupKind::Group)?;
                    }
                    make(hierarchy, dir, sandbox.1, kind)?;
                }
                other => other?,
            }
            if let Some(limits) = browser {
                // Both parts share the memory of the sandbox, but the processes of one part must not use up those of
                // the other.
                let pids = sandbox.1.pids.zip(limits.pids).map(|(all, browsers)| all.saturating_sub(browsers));
                make(hierarchy, &dir.join(CODE), CgroupLimits { pids, ..CgroupLimits::default() }, CgroupKind::Leaf)?;
                make(hierarchy, &dir.join(BROWSER), limits, CgroupKind::Leaf)?;
            }
        }
        Ok(cgroup)
    }

    /// Removes the groups that are empty, from the innermost outwards. Groups in use stay.
    pub(crate) fn tidy(&self, groups: &[Group]) {
        for hierarchy in &self.hierarchies {
            let _ = group_dirs(hierarchy, groups).iter().rev().try_for_each(fs::remove_dir);
        }
    }
}

/// Returns the directories of the groups, outermost first.
fn group_dirs(hierarchy: &Hierarchy, groups: &[Group]) -> Vec<PathBuf> {
    let deeper = |dir: &mut PathBuf, group: &Group| {
        dir.push(&group.name);
        Some(dir.clone())
    };
    groups.iter().scan(hierarchy.base.clone(), deeper).collect()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CgroupKind {
    /// A cgroup around sandboxes.
    Group,
    /// The cgroup of a sandbox that has separate parts for code and browser.
    Split,
    /// A cgroup that contains processes.
    Leaf,
}

fn make(hierarchy: &Hierarchy, dir: &Path, limits: CgroupLimits, kind: CgroupKind) -> io::Result<()> {
    match fs::create_dir(dir) {
        // Only groups are shared. A sandbox's cgroup must be new, or another process could control its members and
        // limits.
        Err(e) if kind == CgroupKind::Group && e.kind() == ErrorKind::AlreadyExists => return Ok(()),
        other => other.map_err(named(dir))?,
    }
    if hierarchy.version == Version::V2 && kind != CgroupKind::Leaf {
        write(dir, "cgroup.subtree_control", &signed('+', &hierarchy.controllers))?;
    }
    hierarchy.controllers.iter().try_for_each(|c| set(hierarchy.version, *c, dir, limits))
}

/// Limits the socket buffers of a v1 cgroup. v1 counts them apart from memory (TCP and UDP, despite the file's name),
/// and only in a cgroup in which this file was written once, so it is written even without a limit. A Linux kernel
/// without v1 accounting lacks the file; `doctor` reports that.
fn socket_buffers(dir: &Path, memory: Option<u64>) -> io::Result<()> {
    let limit = memory.map_or_else(|| "-1".to_owned(), |bytes| (bytes / SOCKET_SHARE).to_string());
    write_if_there(dir, SOCKET_LIMIT, &limit)
}

/// Writes to a file that not every Linux kernel has.
fn write_if_there(dir: &Path, file: &str, value: &str) -> io::Result<()> {
    match write(dir, file, value) {
        Err(e) if e.kind() != ErrorKind::NotFound && e.kind() != ErrorKind::PermissionDenied => Err(e),
        _ => Ok(()),
    }
}

/// Divisor of the memory limit that gives the additional limit for socket buffers.
const SOCKET_SHARE: u64 = 4;
pub(crate) const SOCKET_LIMIT: &str = "memory.kmem.tcp.limit_in_bytes";

fn set(version: Version, controller: Controller, dir: &Path, limits: CgroupLimits) -> io::Result<()> {
    const PERIOD: u64 = 100_000;
    match (version, controller) {
        (Version::V1, Controller::Memory) => {
            socket_buffers(dir, limits.memory_bytes)?;
            let Some(bytes) = limits.memory_bytes else { return Ok(()) };
            write(dir, "memory.limit_in_bytes", &bytes.to_string())?;
            // Limits memory and swap together. The file is absent if the Linux kernel does not account swap, which is
            // then unlimited.
            write_if_there(dir, "memory.memsw.limit_in_bytes", &bytes.to_string())
        }
        (Version::V2, Controller::Memory) => {
            let Some(bytes) = limits.memory_bytes else { return Ok(()) };
            write(dir, "memory.max", &bytes.to_string())?;
            write_if_there(dir, "memory.swap.max", "0")
        }
        (_, Controller::Cpu) => {
            let Some(millis) = limits.cpu_millis else { return Ok(()) };
            let quota = (u64::from(millis) * PERIOD / 1000).max(1000);
            if version == Version::V2 {
                return write(dir, "cpu.max", &format!("{quota} {PERIOD}"));
            }
            write(dir, "cpu.cfs_period_us", &PERIOD.to_string())?;
            match write(dir, "cpu.cfs_quota_us", &quota.to_string()) {
                // v1 accepts no quota above that of a parent cgroup. The parent's quota is then the limit.
                Err(e) if e.kind() == ErrorKind::InvalidInput => Ok(()),
                other => other,
            }
        }
        (_, Controller::Accounting) => Ok(()),
        (_, Controller::Pids) => limits.pids.map_or(Ok(()), |pids| write(dir, "pids.max", &pids.to_string())),
    }
}

/// Names of the two parts of a sandbox that has a browser.
const CODE: &str = "code";
const BROWSER: &str = "browser";

/// The cgroup directories of one sandbox, one per hierarchy.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Cgroup {
    dirs: Vec<(Hierarchy, PathBuf)>,
    split: bool,
}

/// The directories that contain the processes of one part of a sandbox, one per hierarchy.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct CgroupPart {
    dirs: Vec<(Version, PathBuf)>,
}

impl Cgroup {
    /// Returns the part that contains the guest and the processes it starts.
    pub(crate) fn code(&self) -> CgroupPart {
        if self.split { self.part(CODE) } else { self.part("") }
    }

    /// Returns the part that contains the browser, if the sandbox has one.
    pub(crate) fn browser(&self) -> Option<CgroupPart> {
        self.split.then(|| self.part(BROWSER))
    }

    fn part(&self, name: &str) -> CgroupPart {
        let below = |dir: &Path| if name.is_empty() { dir.to_owned() } else { dir.join(name) };
        CgroupPart { dirs: self.dirs.iter().map(|(h, dir)| (h.version, below(dir))).collect() }
    }

    fn dir(&self, controller: Controller) -> Option<(Version, &Path)> {
        let found = self.dirs.iter().find(|(h, _)| h.controllers.contains(&controller))?;
        Some((found.0.version, &found.1))
    }

    /// Returns the path of the memory statistics of this sandbox, including its parts.
    pub(crate) fn memory_stat(&self) -> Option<PathBuf> {
        self.dir(Controller::Memory).map(|(_, dir)| dir.join("memory.stat"))
    }

    pub(crate) fn usage(&self) -> Usage {
        let number = |dir: &Path, file: &str| fs::read_to_string(dir.join(file)).ok()?.trim().parse::<u64>().ok();
        let mut usage = Usage::default();
        if let Some((version, dir)) = self.dir(Controller::Memory) {
            let (current, events) = match version {
                Version::V1 => ("memory.usage_in_bytes", "memory.oom_control"),
                Version::V2 => ("memory.current", "memory.events"),
            };
            usage.memory_bytes = number(dir, current);
            let kills = |dir: &Path| counter(&fs::read_to_string(dir.join(events)).unwrap_or_default(), "oom_kill");
            usage.oom_kills = kills(dir);
            if usage.oom_kills > 0 {
                usage.oom_limit_bytes = hit_limit(version, dir);
            }
            if self.split {
                usage.browser_oom_kills = kills(&dir.join(BROWSER));
                // v1 counts the kills of each directory separately; v2 includes those of its children.
                usage.oom_kills = match version {
                    Version::V1 => usage.oom_kills + kills(&dir.join(CODE)),
                    Version::V2 => usage.oom_kills.saturating_sub(usage.browser_oom_kills),
                };
            }
        }
        if let Some((_, dir)) = self.dir(Controller::Pids) {
            usage.pids = number(dir, "pids.current").and_then(|n| u32::try_from(n).ok());
        }
        usage.cpu_usec = self.cpu_usec();
        usage
    }

    /// Returns the processor time used since the cgroup was created, in microseconds, if a hierarchy counts it.
    pub(crate) fn cpu_usec(&self) -> Option<u64> {
        let read = |dir: &Path, file: &str| fs::read_to_string(dir.join(file)).ok();
        if let Some((_, dir)) = self.dir(Controller::Accounting) {
            return read(dir, "cpuacct.usage")?.trim().parse::<u64>().ok().map(|nanoseconds| nanoseconds / 1000);
        }
        let (_, dir) = self.dirs.iter().find(|(h, _)| h.version == Version::V2)?;
        let text = read(dir, "cpu.stat")?;
        text.lines().find_map(|line| line.strip_prefix("usage_usec ")?.trim().parse().ok())
    }

    /// Removes the directories. Returns one that is still busy as an error: dead processes leave a cgroup a moment
    /// after they are reaped.
    pub(crate) fn remove(&self) -> Result<(), (PathBuf, io::Error)> {
        let mut busy = Ok(());
        for (_, dir) in &self.dirs {
            let parts = if self.split { &[CODE, BROWSER][..] } else { &[] };
            for dir in parts.iter().map(|part| dir.join(part)).chain([dir.clone()]) {
                match fs::remove_dir(&dir) {
                    Err(e) if e.kind() != ErrorKind::NotFound => busy = Err((dir, e)),
                    _ => {}
                }
            }
        }
        busy
    }
}

impl CgroupPart {
    /// Returns whether no hierarchy is in use.
    pub(crate) fn is_empty(&self) -> bool {
        self.dirs.is_empty()
    }

    /// Returns the v1 files into which a process writes `0` to join. It has to join by itself and through `tasks`:
    /// every other way takes a lock that costs milliseconds.
    pub(crate) fn tasks(&self) -> Vec<PathBuf> {
        self.dirs.iter().filter(|(version, _)| *version == Version::V1).map(|(_, dir)| dir.join("tasks")).collect()
    }

    /// Returns the v2 directory in which a process is created.
    pub(crate) fn v2(&self) -> Option<&Path> {
        self.dirs.iter().find(|(version, _)| *version == Version::V2).map(|(_, dir)| dir.as_path())
    }

    /// Opens the files of [`Self::tasks`].
    pub(crate) fn open_tasks(&self) -> Result<Vec<OwnedFd>, Errno> {
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        self.tasks().iter().map(|path| rustix::fs::open(path, flags, Mode::empty())).collect()
    }

    /// Opens the directory of [`Self::v2`].
    pub(crate) fn open_v2(&self) -> Result<Option<OwnedFd>, Errno> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        self.v2().map(|dir| rustix::fs::open(dir, flags, Mode::empty())).transpose()
    }

    /// Kills all members, including those that are forked in the meantime. Returns true if none is left.
    pub(crate) fn kill(&self) -> bool {
        const TURNS: usize = 100;
        for turn in 0..TURNS {
            let found: Vec<_> =
                self.dirs.iter().flat_map(|(_, dir)| members(dir).into_iter().map(move |pid| (dir, pid))).collect();
            if found.is_empty() {
                return true;
            }
            found.into_iter().for_each(|(dir, pid)| kill_member(dir, pid));
            // Killed processes leave the cgroup a moment later.
            std::thread::sleep(std::time::Duration::from_millis(turn.min(10) as u64));
        }
        false
    }
}

/// Returns the memory limit that was hit: the nearest one, from the sandbox's cgroup upwards, that has led to a kill.
/// v1 counts only how often a limit was reached, which the page cache may have caused before another limit led to the
/// kill.
pub(super) fn hit_limit(version: Version, dir: &Path) -> Option<u64> {
    /// Upper bound of real limits; v1 shows a larger number if there is no limit.
    const MOST: u64 = 1 << 60;
    let read = |dir: &Path, file: &str| fs::read_to_string(dir.join(file)).unwrap_or_default();
    let limit = match version {
        Version::V1 => "memory.limit_in_bytes",
        Version::V2 => "memory.max",
    };
    let was_hit = |dir: &&Path| match version {
        Version::V1 => ["memory.failcnt", "memory.memsw.failcnt"]
            .iter()
            .any(|file| read(dir, file).trim().parse::<u64>().is_ok_and(|count| count > 0)),
        Version::V2 => counter(&read(dir, "memory.events.local"), "oom") > 0,
    };
    let hit = dir.ancestors().take_while(|dir| dir.join(limit).exists()).find(was_hit)?;
    read(hit, limit).trim().parse().ok().filter(|bytes| *bytes < MOST)
}

fn counter(text: &str, name: &str) -> u64 {
    let value = |line: &str| line.split_once(' ').filter(|(n, _)| *n == name).and_then(|(_, v)| v.trim().parse().ok());
    text.lines().find_map(value).unwrap_or(0)
}
