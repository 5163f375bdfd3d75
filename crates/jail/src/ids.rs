//! This module determines the identity of a sandbox on the host: modes, id maps, and the slots that keep two servers
//! from sharing a uid.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use crate::sys;

/// The uid and gid of every process in a sandbox except its browser.
pub(crate) const INSIDE: u32 = 1000;
/// The uid and gid of a sandbox's browser, if the host has an id for it.
pub(crate) const BROWSER: u32 = 1001;

/// First host uid of sandboxes in root mode. It lies above the ranges that distributions use for users, subordinate ids
/// and systemd's containers, and the range ends below the limit of a signed integer.
pub const ROOT_BASE: u32 = 1_879_048_192;
const ROOT_SLOTS: u32 = 65_536;

/// Owner of a kept volume's files on disk, independent of the slot of the sandbox that uses them. No process ever has
/// this id. If the files belonged to root or to a user, a set-uid file in an image that is mounted by hand would let
/// its caller become that user.
pub(crate) const KEPT: u32 = ROOT_BASE + ROOT_SLOTS;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// The server was started by root. Every sandbox has a distinct host uid.
    Root,
    /// An ordinary user has newuidmap and a subordinate range. Every sandbox has a distinct host uid from that range.
    Sub,
    /// An ordinary user lacks newuidmap or a subordinate range. Every sandbox runs as that user on the host.
    Single,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Root => "root",
            Self::Sub => "sub",
            Self::Single => "single",
        })
    }
}

/// A sandbox's `uid_map` and `gid_map`: maps [`INSIDE`], and [`BROWSER`] if it is used, to ids of the launcher's user
/// namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct IdMap {
    mode: Mode,
    outer: u32,
    browser: Option<u32>,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum MapError {
    #[error("refusing to map a sandbox to host uid 0")]
    HostRoot,
    #[error("refusing to map files of root to a sandbox")]
    RootsFiles,
    #[error("mode `{mode}` has no slot `{slot}`")]
    NoSuchSlot { mode: Mode, slot: u32 },
}

impl IdMap {
    /// Creates the map of a slot. `owner` is the host uid of the launcher, which in single mode is also that of the
    /// sandbox.
    pub(crate) fn new(mode: Mode, slot: u32, slots: u32, owner: u32) -> Result<Self, MapError> {
        let outer = outer(mode, slot, slots)?;
        if outer == 0 && (mode != Mode::Single || owner == 0) {
            return Err(MapError::HostRoot);
        }
        Ok(Self { mode, outer, browser: None })
    }

    /// Adds an id for a browser, which must differ from that of the code.
    pub(crate) fn with_browser(self, slot: u32, slots: u32) -> Result<Self, MapError> {
        match outer(self.mode, slot, slots)? {
            0 => Err(MapError::HostRoot),
            id if id == self.outer => Err(MapError::NoSuchSlot { mode: self.mode, slot }),
            id => Ok(Self { browser: Some(id), ..self }),
        }
    }

    /// Gives the code of the sandbox the id of an ordinary user's launcher, which is that user on the host. Only so can
    /// it use the user's own directories: Linux lets only root map their files to another id.
    pub(crate) fn as_owner(self, owner: u32) -> Result<Self, MapError> {
        if owner == 0 || self.mode == Mode::Root { Err(MapError::HostRoot) } else { Ok(Self { outer: 0, ..self }) }
    }

    /// Returns whether the code of the sandbox is the server's user on the host.
    pub(crate) fn is_owner(self) -> bool {
        self.outer == 0
    }

    /// Returns the sandbox's id as the launcher sees it, to which volumes are chowned.
    pub(crate) fn outer(self) -> u32 {
        self.outer
    }

    /// Returns the browser's id as the launcher sees it. Without a separate id it is that of the code.
    pub(crate) fn outer_browser(self) -> u32 {
        self.browser.unwrap_or(self.outer)
    }

    /// Returns the browser's id inside the sandbox.
    pub(crate) fn browser(self) -> u32 {
        if self.browser.is_some() { BROWSER } else { INSIDE }
    }

    pub(crate) fn lines(self) -> String {
        let browser = self.browser.map(|outer| format!("\n{BROWSER} {outer} 1")).unwrap_or_default();
        format!("{INSIDE} {} 1{browser}", self.outer)
    }

    /// Returns the id to which files are mapped if the launcher is privileged to map them, which is only the case in
    /// root mode.
    pub(crate) fn remapped(self) -> Option<u32> {
        (self.mode == Mode::Root).then_some(self.outer)
    }

    /// Returns whether setgroups is allowed. In single mode the Linux kernel forbids it, and the user's supplementary
    /// groups stay.
    pub(crate) fn may_set_groups(self) -> bool {
        self.mode != Mode::Single
    }
}

/// Returns the id of a slot as the launcher sees it.
fn outer(mode: Mode, slot: u32, slots: u32) -> Result<u32, MapError> {
    if slot >= slots {
        return Err(MapError::NoSuchSlot { mode, slot });
    }
    Ok(match mode {
        Mode::Root => ROOT_BASE + slot,
        // In the launcher's namespace 0 is the user and 1 is the first id of the subordinate range.
        Mode::Sub => 1 + slot,
        Mode::Single => 0,
    })
}

/// The map of an idmapped mount: files of `uid` and `gid` appear as the sandbox's own, and files that the sandbox
/// creates belong to `uid` and `gid`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Remap {
    uid: u32,
    gid: u32,
    outer: u32,
}

impl Remap {
    /// Maps the on-disk `uid` and `gid` to the sandbox's host id `outer`. Refuses root, because a set-uid file that a
    /// sandbox creates in a shared directory would then belong to root on the host.
    pub(crate) fn new(uid: u32, gid: u32, outer: u32) -> Result<Self, MapError> {
        if uid == 0 || gid == 0 { Err(MapError::RootsFiles) } else { Ok(Self { uid, gid, outer }) }
    }

    pub(crate) fn uid_line(self) -> String {
        format!("{} {} 1", self.uid, self.outer)
    }

    pub(crate) fn gid_line(self) -> String {
        format!("{} {} 1", self.gid, self.outer)
    }
}

/// A range of subordinate ids, as in `/etc/subuid`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SubRange {
    pub start: u32,
    pub count: u32,
}

/// Returns the first usable range of `name` or `uid` in the text of `/etc/subuid` or `/etc/subgid`.
pub(crate) fn sub_range(text: &str, name: &str, uid: u32) -> Option<SubRange> {
    let mine = |who: &str| who == name || who.parse() == Ok(uid);
    text.lines().find_map(|line| {
        let mut parts = line.split(':');
        let who = parts.next()?;
        let range = SubRange { start: parts.next()?.trim().parse().ok()?, count: parts.next()?.trim().parse().ok()? };
        (mine(who) && range.start > 0 && range.count > 0).then_some(range)
    })
}

/// Proposes a range of the usual size for another user. It overlaps with no range in the texts of `/etc/subuid` and
/// `/etc/subgid`, with no id in those of `/etc/passwd` and `/etc/group`, and with no id that servers of root give to
/// sandboxes.
pub(crate) fn free_range(sub: [&str; 2], names: [&str; 2]) -> Option<SubRange> {
    const FIRST: u32 = 100_000;
    const COUNT: u32 = 65_536;
    let number = |part: Option<&str>| part?.trim().parse::<u64>().ok();
    let range = |line: &str| {
        let mut parts = line.split(':').skip(1);
        let (start, count) = (number(parts.next())?, number(parts.next())?);
        Some(start..start.saturating_add(count))
    };
    let single = |line: &str| number(line.split(':').nth(2)).map(|id| id..id + 1);
    let roots = u64::from(ROOT_BASE)..u64::from(KEPT) + 1;
    let taken: Vec<std::ops::Range<u64>> = (sub.iter().flat_map(|text| text.lines().filter_map(range)))
        .chain(names.iter().flat_map(|text| text.lines().filter_map(single)))
        .chain([roots])
        .collect();
    let free = |start: &u32| {
        let (start, end) = (u64::from(*start), u64::from(*start) + u64::from(COUNT));
        taken.iter().all(|taken| taken.end <= start || end <= taken.start)
    };
    // The upper half of the ids is left to others: systemd's dynamic users, containers, and -1.
    let start = (FIRST..ROOT_BASE).step_by(COUNT as usize).find(free)?;
    Some(SubRange { start, count: COUNT })
}

/// Returns the login name of `uid` in the text of `/etc/passwd`.
pub(crate) fn login_name(passwd: &str, uid: u32) -> Option<&str> {
    passwd.lines().find_map(|line| {
        let mut parts = line.split(':');
        let name = parts.next()?;
        (parts.nth(1)?.parse() == Ok(uid)).then_some(name)
    })
}

/// Numbers protected by locks that all servers of this host (root mode) or of this user (sub mode) share. Each number
/// is a byte of one file.
#[derive(Debug)]
pub(crate) struct Slots {
    file: Arc<File>,
    /// Numbers taken by this process, because the locks only exclude other processes.
    taken: Arc<Mutex<BTreeSet<u32>>>,
    count: u32,
    next: u32,
}

/// A taken number. It becomes free when this value is dropped or the process dies.
#[derive(Debug)]
pub(crate) struct Slot {
    pub number: u32,
    file: Arc<File>,
    taken: Arc<Mutex<BTreeSet<u32>>>,
}

impl Drop for Slot {
    fn drop(&mut self) {
        let _ = sys::unlock_byte(self.file.as_fd(), self.number);
        self.taken.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.number);
    }
}

impl Slots {
    /// Opens the shared file. `subordinate` is the number of available ids in sub mode.
    pub(crate) fn open(dir: &Path, mode: Mode, subordinate: u32) -> io::Result<Self> {
        private_dir(dir)?;
        let count = match mode {
            Mode::Root => ROOT_SLOTS,
            Mode::Sub => subordinate.min(ROOT_SLOTS),
            Mode::Single => ROOT_SLOTS,
        };
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
            .open(dir.join("uids"))?;
        Ok(Self { file: Arc::new(file), taken: Arc::default(), count, next: 0 })
    }

    pub(crate) fn count(&self) -> u32 {
        self.count
    }

    /// Takes the next free number in a cycle, not the lowest, so that a uid is not reused right after its last owner
    /// died.
    pub(crate) fn take(&mut self) -> io::Result<Slot> {
        for _ in 0..self.count {
            let number = self.next;
            self.next = (self.next + 1) % self.count;
            if self.try_take(number)? {
                return Ok(Slot { number, file: Arc::clone(&self.file), taken: Arc::clone(&self.taken) });
            }
        }
        Err(io::Error::other(format!("all `{}` host uids are taken", self.count)))
    }

    fn try_take(&self, number: u32) -> io::Result<bool> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let free = !taken.contains(&number) && sys::try_lock_byte(self.file.as_fd(), number)?;
        if free {
            taken.insert(number);
        }
        Ok(free)
    }
}

/// Creates a directory that only this user can enter, or checks that the existing one belongs to this user, since it
/// may lie in a world-writable directory.
pub(crate) fn private_dir(dir: &Path) -> io::Result<()> {
    if let Some(parent) = dir.parent()
        && !parent.exists()
    {
        private_dir(parent)?;
    }
    match DirBuilder::new().mode(0o700).create(dir) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
        other => other?,
    }
    let found = fs::symlink_metadata(dir)?;
    let me = rustix::process::geteuid().as_raw();
    if !found.is_dir() || found.uid() != me || found.mode() & 0o022 != 0 {
        return Err(io::Error::other(format!(
            "`{}` is not a directory that belongs to uid `{me}` and that only it can write",
            dir.display()
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_is_never_host_uid_0() {
        assert_eq!(IdMap::new(Mode::Single, 0, 1, 0), Err(MapError::HostRoot));
        assert_eq!(IdMap::new(Mode::Root, 0, 1, 0).unwrap().lines(), "1000 1879048192 1");
        assert_eq!(IdMap::new(Mode::Sub, 0, 1, 1000).unwrap().lines(), "1000 1 1");
        assert_eq!(IdMap::new(Mode::Single, 5, 9, 1000).unwrap().lines(), "1000 0 1");
        assert_eq!(Remap::new(0, 5, 7), Err(MapError::RootsFiles));
        assert_eq!(Remap::new(5, 0, 7), Err(MapError::RootsFiles));
        assert_eq!(Remap::new(5, 6, 7).map(|r| (r.uid_line(), r.gid_line())), Ok(("5 7 1".into(), "6 7 1".into())));
        assert_eq!(IdMap::new(Mode::Sub, 9, 9, 1000), Err(MapError::NoSuchSlot { mode: Mode::Sub, slot: 9 }));
        let as_owner = |mode, owner| IdMap::new(mode, 0, 9, 1000).unwrap().as_owner(owner);
        assert_eq!(as_owner(Mode::Sub, 1000).unwrap().lines(), "1000 0 1");
        assert_eq!(as_owner(Mode::Sub, 1000).unwrap().with_browser(4, 9).unwrap().lines(), "1000 0 1\n1001 5 1");
        assert!(as_owner(Mode::Sub, 1000).unwrap().is_owner() && as_owner(Mode::Single, 1000).unwrap().is_owner());
        assert!(!IdMap::new(Mode::Sub, 0, 1, 1000).unwrap().is_owner());
        assert_eq!(as_owner(Mode::Sub, 0), Err(MapError::HostRoot));
        assert_eq!(as_owner(Mode::Root, 1000), Err(MapError::HostRoot));
    }

    #[test]
    fn a_browser_has_an_id_of_its_own_or_none() {
        let map = |mode, browser| IdMap::new(mode, 3, 9, 1000).unwrap().with_browser(browser, 9);
        assert_eq!(map(Mode::Root, 4).unwrap().lines(), "1000 1879048195 1\n1001 1879048196 1");
        assert_eq!(map(Mode::Sub, 0).unwrap().lines(), "1000 4 1\n1001 1 1");
        assert_eq!(map(Mode::Sub, 3), Err(MapError::NoSuchSlot { mode: Mode::Sub, slot: 3 }));
        assert_eq!(map(Mode::Sub, 9), Err(MapError::NoSuchSlot { mode: Mode::Sub, slot: 9 }));
        assert_eq!(map(Mode::Single, 4), Err(MapError::HostRoot));
    }

    #[test]
    fn a_sub_range_is_found_by_name_or_number_and_never_starts_at_0() {
        let text = "root:0:65536\nann:100000:65536\n1001:200000:10\nbad line\n";
        assert_eq!(sub_range(text, "ann", 1000), Some(SubRange { start: 100_000, count: 65_536 }));
        assert_eq!(sub_range(text, "bob", 1001), Some(SubRange { start: 200_000, count: 10 }));
        assert_eq!(sub_range(text, "root", 0), None);
        assert_eq!(sub_range(text, "eve", 7), None);
        assert_eq!(login_name("root:x:0:0::/:/bin/sh\nann:x:1000:1000::/:/bin/sh", 1000), Some("ann"));
    }

    #[test]
    fn two_servers_never_hold_the_same_slot_and_a_dropped_one_comes_free() {
        let dir = crate::test_dir("slots");
        let mut a = Slots::open(&dir, Mode::Sub, 4).unwrap();
        let mut b = Slots::open(&dir, Mode::Sub, 4).unwrap();
        let (x, y, z) = (a.take().unwrap(), b.take().unwrap(), a.take().unwrap());
        assert_eq!([x.number, y.number, z.number], [0, 1, 2]);
        let last = b.take().unwrap();
        assert!(a.take().is_err() && b.take().is_err(), "one's own are as taken as others'");
        drop(x);
        assert_eq!(Slots::open(&dir, Mode::Sub, 4).unwrap().take().unwrap().number, 0);
        drop((y, z, last));
        fs::remove_dir_all(dir).unwrap();
    }

    /// W43 of the hostile list.
    #[test]
    fn w43_the_range_that_is_proposed_is_nobodys() {
        let text = |range: SubRange| format!("{}+{}", range.start, range.count);
        let free = |subuid: &str, subgid: &str, passwd: &str| text(free_range([subuid, subgid], [passwd, ""]).unwrap());
        assert_eq!(free("", "", "root:x:0:0::/:/bin/sh\n"), "100000+65536");
        assert_eq!(free("dev:100000:65536\n", "", ""), "165536+65536");
        assert_eq!(free("dev:100000:65536\n", "dev:100000:65536\nb:165536:65536\n", ""), "231072+65536");
        assert_eq!(free("# a line\ndev:90000:20000\n", "", "far:x:170000:1::/:\n"), "231072+65536");
    }
}
