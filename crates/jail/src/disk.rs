//! This module implements the disk budget: it limits how much volumes on disk may still take of the file system that
//! holds their images.
//!
//! An image is sparse, so the file system inside it counts on space that the host may not have. When the host runs out
//! of space, the Linux kernel loses data that it had already accepted from the code. The budget prevents this: the
//! space inside a volume that the host cannot back is marked as reserved (`reserved_clusters` of ext4), and a write
//! there fails with `ENOSPC`, immediately and in the process that writes. As long as everything fits, nothing is
//! reserved and the only cost is one `statvfs` per second. `docs/decisions/037-disk-budget.md` has the reasons.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags, flock, statvfs};

use crate::ids::private_dir;
use crate::volume::Device;

/// Bytes that the operator wants to keep free. `None` means 5 % of the file system, at least 1 GB and at most 8 GB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct KeepFree(pub Option<u64>);

impl KeepFree {
    fn of(self, total: u64) -> u64 {
        self.0.unwrap_or((total / 20).clamp(1 << 30, 8 << 30))
    }
}

/// The space on the file system that holds the images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskRoom {
    pub free: u64,
    /// The floor: bytes that have to stay free.
    pub keep: u64,
}

impl DiskRoom {
    /// Measures the file system of `dir`. If `dir` does not exist yet, its nearest existing ancestor is used.
    pub fn of(dir: &Path, keep: KeepFree) -> io::Result<Self> {
        let existing = dir.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
        let found = statvfs(existing)?;
        let (free, total) = (found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize);
        Ok(Self { free, keep: keep.of(total) })
    }

    pub(crate) fn above_floor(self) -> u64 {
        self.free.saturating_sub(self.keep)
    }

    /// Checks whether a new sandbox or spare may be started. Operators and callers both see the error text.
    pub fn admits(self) -> Result<(), String> {
        if self.above_floor() >= NEWCOMER {
            return Ok(());
        }
        let (free, keep) = (self.free >> 20, self.keep >> 20);
        Err(format!("the server's disk is full: {free} MB are free, {keep} MB have to stay free"))
    }
}

/// Space above the floor that a new sandbox needs: the tables of its file system, and a little more.
const NEWCOMER: u64 = 16 << 20;
/// Space that a volume needs when a sandbox gets it, so that programs start in it and write their first files.
const FIRST_SHARE: u64 = 4 << 20;
/// Space that suffices for a new volume, so that the other volumes need not be examined first.
const PLENTY: u64 = 64 << 20;
/// Smallest increase of a volume's space that is worth a write.
const GRAIN: u64 = 1 << 20;

/// Intervals between two checks of the file system: while everything fits, while it does not, and when little is left.
const CALM: Duration = Duration::from_secs(1);
const BUSY: Duration = Duration::from_millis(250);
const TIGHT: Duration = Duration::from_millis(50);
/// Minimum interval after a check, as a multiple of the time that the check took: the checks use at most a twentieth of
/// the launcher's time. A slow check (for example while the disk syncs) delays the next one by no more than
/// [`LONGEST`], or volumes would be refused space that is available.
const COST: u32 = 20;
const LONGEST: Duration = Duration::from_secs(1);
/// Interval at which freed space is reclaimed from the images when little is left.
const TRIM: Duration = Duration::from_secs(5);

#[derive(Debug)]
struct Volume {
    /// Size of the image in bytes.
    size: u64,
    /// A directory on the volume, under a path that the launcher can reach.
    at: PathBuf,
    /// The `memory.stat` file of the sandbox's cgroup, which shows the data that waits to be written.
    stat: Option<PathBuf>,
    /// Bytes that the code cannot use. `None` as long as only the Linux kernel's own reservation applies.
    reserved: Option<u64>,
    /// Smallest number of free inodes seen so far. These inodes were never used, so their tables are not in the image
    /// yet.
    unused_inodes: u64,
}

#[derive(Debug)]
pub(crate) struct Budget {
    dir: PathBuf,
    keep: KeepFree,
    ledger: Ledger,
    volumes: BTreeMap<Device, Volume>,
    /// Whether everything fits even if every volume is filled.
    ample: bool,
    /// Bytes available to new volumes until the next check.
    pool: u64,
    /// Bytes of inode tables that neither the space above the floor nor half of the floor could hold.
    unbacked: u64,
    next: Option<Instant>,
    trimmed: Option<Instant>,
}

impl Budget {
    /// Creates a budget for the images in `dir`. All servers of this host use the same `shared` directory, in which
    /// they record the space that they have promised.
    pub(crate) fn new(dir: &Path, shared: &Path, keep: KeepFree, name: &str) -> Self {
        let device = fs::metadata(dir).map_or(0, |found| found.dev());
        let ledger = Ledger { dir: shared.join(format!("disk-{device:x}")), name: name.to_owned(), own: None };
        // Create the files immediately, so that they are not mistaken for remains of a sandbox.
        drop(ledger.turn());
        let (dir, volumes) = (dir.to_owned(), BTreeMap::new());
        Self { dir, keep, ledger, volumes, ample: false, pool: 0, unbacked: 0, next: None, trimmed: None }
    }

    pub(crate) fn admits(&self) -> Result<(), String> {
        // If the file system cannot be queried, the next write to it reports the problem.
        DiskRoom::of(&self.dir, self.keep).map_or(Ok(()), DiskRoom::admits)
    }

    /// Adds a volume before code gets it. Refuses a volume that could take more space than there is.
    pub(crate) fn add(&mut self, device: Device, at: PathBuf, stat: Option<PathBuf>) -> Result<(), String> {
        let Some(size) = device_size(device) else { return Err(format!("/dev/loop{} has no size", device.number)) };
        let volume = Volume { size, at, stat, reserved: None, unused_inodes: u64::MAX };
        // A volume that was parked may still have the reservation of its last use.
        let _ = reserve(device, volume.default_reservation());
        self.volumes.insert(device, volume);
        self.next.get_or_insert_with(|| Instant::now() + CALM);
        let give = self.pool / 2;
        if self.ample && size <= give {
            self.pool -= size;
            return Ok(());
        }
        let tables = self.volumes.get_mut(&device).map_or(0, |volume| volume.unused_tables(device));
        if !self.ample && give >= PLENTY + tables && self.limit(device, give - tables) {
            self.pool -= give;
            return Ok(());
        }
        if self.balance().is_none() {
            return Err("another server is dividing the disk among its volumes; try again".into());
        }
        if self.unbacked > 0 {
            return Err("the server's disk is full: it has no room for the files that another volume may have".into());
        }
        if self.ample {
            return Ok(());
        }
        let Some((volume, reserved)) = self.volumes.get(&device).and_then(|volume| Some((volume, volume.reserved?)))
        else {
            return Err(
                "the server's disk cannot hold all volumes, and this kernel does not let them be bounded".into()
            );
        };
        let free = volume.free(device).unwrap_or(0);
        match (has_room(free, reserved, volume.default_reservation()), DiskRoom::of(&self.dir, self.keep)) {
            // What other servers were promised and do not use, they give back at their next check.
            (false, Ok(room)) if room.above_floor() < PLENTY * self.volumes.len() as u64 => Err(format!(
                "the server's disk is full: {} MB are free, other sandboxes may use the rest, and {} MB have to stay free",
                room.free >> 20,
                room.keep >> 20
            )),
            (_, _) => Ok(()),
        }
    }

    /// Removes a volume to which nothing can write any more.
    pub(crate) fn remove(&mut self, device: Device) {
        if self.volumes.remove(&device).is_some() && self.volumes.is_empty() {
            (self.ample, self.pool, self.next) = (false, 0, None);
            self.ledger.close();
        }
    }

    /// Returns the time at which [`Budget::tick`] has to be called.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.next
    }

    /// Checks the disk if it is time. When little is left, returns directories on the volumes whose free blocks should
    /// go back to the host.
    pub(crate) fn tick(&mut self) -> Vec<OwnedFd> {
        if self.next.is_none_or(|next| Instant::now() < next) {
            return vec![];
        }
        let wait = self.balance();
        if wait.is_some_and(|wait| wait != TIGHT) || self.trimmed.is_some_and(|last| last.elapsed() < TRIM) {
            return vec![];
        }
        self.trimmed = Some(Instant::now());
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let alive = self.volumes.iter().filter(|(device, volume)| volume.is_on(**device));
        alive.filter_map(|(_, volume)| rustix::fs::open(&volume.at, flags, Mode::empty()).ok()).collect()
    }

    /// Divides the space above the floor among all volumes. Returns `None` if that is impossible now; it is retried
    /// soon.
    fn balance(&mut self) -> Option<Duration> {
        let begun = Instant::now();
        let wait = self.divide();
        self.next = Some(Instant::now() + wait.unwrap_or(TIGHT).max((begun.elapsed() * COST).min(LONGEST)));
        wait
    }

    /// Divides the space and returns the time until the next check, or `None` if that is impossible now.
    fn divide(&mut self) -> Option<Duration> {
        let room = DiskRoom::of(&self.dir, self.keep).ok()?;
        let _turn = self.ledger.turn()?;
        let others = self.ledger.others();
        let above = room.above_floor().saturating_sub(others.bytes);
        let count = self.volumes.len() as u64;
        let sizes: u64 = self.volumes.values().map(|volume| volume.size).sum();
        self.ample = sizes <= above;
        if self.ample {
            self.unbacked = 0;
            self.volumes.iter_mut().for_each(|(device, volume)| volume.release(*device));
            self.pool = (above - sizes) / 2;
            self.ledger.publish(LedgerEntry { bytes: sizes + self.pool, volumes: count });
            return Some(CALM);
        }
        let free_bytes: BTreeMap<Device, u64> =
            self.volumes.iter().filter_map(|(device, volume)| Some((*device, volume.free(*device)?))).collect();
        // Data that was accepted inside and is not in the images yet will still take free space. A volume cannot have
        // more of it than it has in use, or than waits in the memory of its sandbox.
        let unwritten: u64 = self
            .volumes
            .iter()
            .map(|(device, volume)| {
                let used = volume.size.saturating_sub(free_bytes.get(device).copied().unwrap_or(0));
                used.min(volume.unwritten().unwrap_or(u64::MAX))
            })
            .sum();
        // The tables of inodes that were never used are not in the images either: code that creates files takes them
        // without taking a free block.
        let tables: u64 = self.volumes.iter_mut().map(|(device, volume)| volume.unused_tables(*device)).sum();
        // Another server's volumes have the same claim to the floor.
        let backed = room.keep / 2 / (others.volumes + count).max(1) * count;
        self.unbacked = tables.saturating_sub(backed + room.above_floor());
        let under_way = unwritten + counted_tables(tables, backed, room.above_floor());
        // Measure the space afterwards: data written in the meantime is then counted twice instead of not at all.
        let room = DiskRoom::of(&self.dir, self.keep).ok()?;
        let rest = room.above_floor().saturating_sub(others.bytes).saturating_sub(under_way);
        // An eighth stays available to new volumes, and another server's volumes count as much as ours.
        let fair = room.above_floor() / (others.volumes + count).max(1) * count;
        let budget = (rest - rest / 8).min(fair);
        let shares = shares(budget, &free_bytes.values().copied().collect::<Vec<_>>());
        for ((device, free), share) in free_bytes.iter().zip(&shares) {
            if let Some(volume) = self.volumes.get_mut(device) {
                volume.limit(*device, *free, *share);
            }
        }
        self.pool = rest / 8;
        let bytes = under_way + shares.iter().sum::<u64>() + self.pool;
        self.ledger.publish(LedgerEntry { bytes, volumes: count });
        Some(if shares.iter().any(|share| *share < PLENTY) { TIGHT } else { BUSY })
    }

    fn limit(&mut self, device: Device, headroom: u64) -> bool {
        let Some(volume) = self.volumes.get_mut(&device) else { return false };
        volume.free(device).is_some_and(|free| volume.limit(device, free, headroom))
    }
}

impl Volume {
    /// Returns whether the path still leads to this device. It leads through a process, whose pid may have been reused.
    fn is_on(&self, device: Device) -> bool {
        const LOOP: u32 = 7;
        let number = |dev| (rustix::fs::major(dev), rustix::fs::minor(dev));
        fs::metadata(&self.at).is_ok_and(|found| number(found.dev()) == (LOOP, device.number))
    }

    /// Returns the free bytes inside, whether reserved or not.
    fn free(&self, device: Device) -> Option<u64> {
        let found = statvfs(&self.at).ok().filter(|_| self.is_on(device))?;
        Some(found.f_bfree * found.f_frsize)
    }

    /// Returns the bytes that inode tables can still take.
    fn unused_tables(&mut self, device: Device) -> u64 {
        let Some(found) = statvfs(&self.at).ok().filter(|_| self.is_on(device)) else { return 0 };
        self.unused_inodes = self.unused_inodes.min(found.f_ffree);
        self.unused_inodes * INODE
    }

    /// Returns the bytes that the sandbox has written, to this volume or elsewhere, and that are not on the disk yet.
    fn unwritten(&self) -> Option<u64> {
        waiting(&fs::read_to_string(self.stat.as_ref()?).ok()?)
    }

    /// Lets code take `headroom` of the free bytes. Returns false if the Linux kernel does not allow the reservation.
    fn limit(&mut self, device: Device, free: u64, headroom: u64) -> bool {
        let wanted = free.saturating_sub(headroom).max(self.default_reservation());
        // A small increase can wait; a decrease cannot.
        if self.reserved.is_some_and(|now| now == wanted || (wanted < now && now - wanted < GRAIN)) {
            return true;
        }
        let done = reserve(device, wanted);
        if done {
            self.reserved = Some(wanted);
        }
        done
    }

    fn release(&mut self, device: Device) {
        if self.reserved.is_some() && reserve(device, self.default_reservation()) {
            self.reserved = None;
        }
    }

    /// Returns what ext4 reserves by default: 2 %, at most 4096 blocks.
    fn default_reservation(&self) -> u64 {
        (self.size / 50).min(4096 * BLOCK)
    }
}

/// Returns whether code can use enough of the free bytes of a volume, of which some are reserved. A volume that is full
/// of its own files, with only `usual` reserved, has room: its code may delete them.
fn has_room(free: u64, reserved: u64, usual: u64) -> bool {
    free.saturating_sub(reserved) >= FIRST_SHARE.min(free.saturating_sub(usual))
}

const BLOCK: u64 = 4096;
/// Size of an inode in its table.
const INODE: u64 = 256;

fn reserve(device: Device, bytes: u64) -> bool {
    let path = format!("/sys/fs/ext4/loop{}/reserved_clusters", device.number);
    fs::write(path, bytes.div_ceil(BLOCK).to_string()).is_ok()
}

fn device_size(device: Device) -> Option<u64> {
    let sectors = fs::read_to_string(format!("/sys/block/loop{}/size", device.number)).ok()?;
    sectors.trim().parse::<u64>().ok().map(|sectors| sectors * 512)
}

/// Returns the bytes that wait to be written, from the `memory.stat` of a cgroup and its children: `total_dirty` and
/// `total_writeback` of v1, `file_dirty` and `file_writeback` of v2.
fn waiting(stat: &str) -> Option<u64> {
    let value = |names: [&str; 2]| {
        let mut words = stat.lines().filter_map(|line| line.split_once(' '));
        words.find(|(name, _)| names.contains(name))?.1.trim().parse::<u64>().ok()
    };
    Some(value(["total_dirty", "file_dirty"])? + value(["total_writeback", "file_writeback"])?)
}

/// Returns how many bytes the space above the floor, `above`, has to set aside for unused inode tables. Most volumes
/// never fill theirs, so half of the floor may back them (`backed`). The bytes that it cannot back are counted even if
/// little is left above the floor, or code that fills the disk and then the tables would take the whole floor.
fn counted_tables(tables: u64, backed: u64, above: u64) -> u64 {
    tables.saturating_sub(backed).max(tables.min(above / 4))
}

/// Divides `room` equally among volumes with these numbers of free bytes, but gives none more than it can use.
fn shares(room: u64, free: &[u64]) -> Vec<u64> {
    let mut order: Vec<usize> = (0..free.len()).collect();
    order.sort_by_key(|&n| free[n]);
    let (mut left, mut shares) = (room, vec![0; free.len()]);
    for (done, &n) in order.iter().enumerate() {
        shares[n] = free[n].min(left / (free.len() - done) as u64);
        left -= shares[n];
    }
    shares
}

/// The space that a server has promised to its volumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct LedgerEntry {
    bytes: u64,
    volumes: u64,
}

/// The promises of all servers of this host. Each server has a file that is locked as long as the server lives.
#[derive(Debug)]
struct Ledger {
    dir: PathBuf,
    name: String,
    own: Option<File>,
}

impl Ledger {
    /// Waits for the lock under which one server at a time reads and changes promises. Returns `None` if another server
    /// keeps it.
    fn turn(&self) -> Option<File> {
        private_dir(&self.dir).ok()?;
        let turn = open(&self.dir.join("turn")).ok()?;
        for _ in 0..100 {
            if flock(&turn, FlockOperation::NonBlockingLockExclusive).is_ok() {
                return Some(turn);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        None
    }

    /// Returns the sum of the other servers' promises and removes the files of dead servers.
    fn others(&self) -> LedgerEntry {
        let mut sum = LedgerEntry::default();
        for file in fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            if file.file_name() == "turn" || file.file_name() == self.name.as_str() {
                continue;
            }
            let Ok(other) = open(&file.path()) else { continue };
            if flock(&other, FlockOperation::NonBlockingLockExclusive).is_ok() {
                let _ = fs::remove_file(file.path());
            } else if let Some(entry) = read_entry(&other) {
                sum = LedgerEntry { bytes: sum.bytes + entry.bytes, volumes: sum.volumes + entry.volumes };
            }
        }
        sum
    }

    fn publish(&mut self, entry: LedgerEntry) {
        if self.own.is_none() {
            let own = open(&self.dir.join(&self.name)).ok();
            self.own = own.filter(|own| flock(own, FlockOperation::NonBlockingLockExclusive).is_ok());
        }
        if let Some(own) = &self.own {
            let _ = own.write_all_at(format!("{:>20} {:>20}\n", entry.bytes, entry.volumes).as_bytes(), 0);
        }
    }

    fn close(&mut self) {
        if self.own.take().is_some() {
            let _ = fs::remove_file(self.dir.join(&self.name));
        }
    }
}

fn open(path: &Path) -> io::Result<File> {
    let mut options = fs::OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    options.custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC).open(path)
}

fn read_entry(file: &File) -> Option<LedgerEntry> {
    let mut text = [0; 42];
    file.read_exact_at(&mut text, 0).ok()?;
    let mut words = std::str::from_utf8(&text).ok()?.split_whitespace().map(str::parse);
    Some(LedgerEntry { bytes: words.next()?.ok()?, volumes: words.next()?.ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_volume_cannot_use_is_for_the_others() {
        assert_eq!(shares(100, &[10, 1000, 1000]), [10, 45, 45]);
        assert_eq!(shares(100, &[1000, 5, 20]), [75, 5, 20]);
        assert_eq!(shares(0, &[7, 7]), [0, 0]);
        assert_eq!(shares(10, &[]), Vec::<u64>::new());
    }

    /// W50: code fills the disk with data and then makes as many files as its volumes have inodes.
    #[test]
    fn w50_a_full_disk_still_has_room_for_the_inode_tables() {
        let (keep, tables) = (1 << 30, 25_600_000);
        let backed = keep / 2;
        for (volumes, space) in [(1, 1 << 30), (42, 20 << 30), (100, 4 << 30), (700, 20 << 30), (1000, 100 << 30)] {
            let (tables, mut above): (u64, u64) = (volumes * tables, space);
            assert!(tables <= backed + above, "else no such volume is admitted");
            // Each time it looks the budget gives the rest to data, and code takes it.
            for _ in 0..100 {
                above = counted_tables(tables, backed, above);
            }
            assert!(tables <= backed + above, "{volumes} volumes: {tables} bytes of tables, {above} left for them");
        }
        assert_eq!(counted_tables(100, 50, 1000), 100, "while there is room they do not need the floor");
        assert_eq!(counted_tables(100, 50, 200), 50);
    }

    #[test]
    fn a_volume_that_the_disk_cannot_back_has_no_room_for_a_sandbox() {
        const MB: u64 = 1 << 20;
        assert!(has_room(1000 * MB, 996 * MB, 16 * MB));
        assert!(!has_room(1000 * MB, 997 * MB, 16 * MB));
        assert!(!has_room(1000 * MB, 1000 * MB, 16 * MB));
        // What a volume lacks because of its own files is no reason.
        assert!(has_room(17 * MB, 16 * MB, 16 * MB));
        assert!(has_room(10 * MB, 16 * MB, 16 * MB));
    }

    #[test]
    fn what_waits_to_be_written_is_read_in_both_forms() {
        let v1 = "cache 9\ndirty 1\nwriteback 2\ntotal_cache 9\ntotal_dirty 4096\ntotal_writeback 8192\n";
        assert_eq!(waiting(v1), Some(12_288));
        assert_eq!(waiting("anon 5\nfile_dirty 10\nfile_writeback 20\n"), Some(30));
        assert_eq!(waiting("anon 5\n"), None);
    }

    #[test]
    fn the_floor_is_a_gigabyte_or_a_twentieth_unless_it_is_set() {
        assert_eq!(KeepFree(None).of(10 << 30), 1 << 30);
        assert_eq!(KeepFree(None).of(100 << 30), 5 << 30);
        assert_eq!(
            KeepFree(None).of(2000 << 30),
            8 << 30,
            "a large disk that is nearly full still has room for sandboxes"
        );
        assert_eq!(KeepFree(Some(7)).of(100 << 30), 7);
        let room = DiskRoom { free: 120 << 20, keep: 100 << 20 };
        assert_eq!((room.above_floor(), room.admits()), (20 << 20, Ok(())));
        let full = DiskRoom { free: 90 << 20, keep: 100 << 20 };
        assert_eq!(full.above_floor(), 0);
        assert_eq!(full.admits().unwrap_err(), "the server's disk is full: 90 MB are free, 100 MB have to stay free");
    }

    #[test]
    fn servers_know_what_the_others_have_promised_as_long_as_they_live() {
        let dir = crate::test_dir("ledger");
        let ledger = |name: &str| Ledger { dir: dir.join("disk"), name: name.into(), own: None };
        let (mut one, mut two, mut three) = (ledger("one"), ledger("two"), ledger("three"));
        let turn = one.turn().unwrap();
        assert!(two.turn().is_none(), "one at a time");
        drop(turn);
        one.publish(LedgerEntry { bytes: 1000, volumes: 2 });
        one.publish(LedgerEntry { bytes: 10, volumes: 1 });
        two.publish(LedgerEntry { bytes: 5, volumes: 1 });
        assert_eq!(three.others(), LedgerEntry { bytes: 15, volumes: 2 });
        assert_eq!(two.others(), LedgerEntry { bytes: 10, volumes: 1 });
        one.close();
        // A killed server releases its lock and leaves its file.
        two.own = None;
        three.publish(LedgerEntry { bytes: 1, volumes: 1 });
        assert_eq!(three.others(), LedgerEntry::default());
        assert_eq!(ledger("four").others(), LedgerEntry { bytes: 1, volumes: 1 });
        fs::remove_dir_all(dir).unwrap();
    }
}
