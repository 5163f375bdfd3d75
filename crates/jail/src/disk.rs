//! The disk budget: what volumes on disk may still take of the file system that holds their images.
//!
//! An image is sparse, so a file system inside it believes in room that the host may not have. When the host has none, the kernel
//! loses what it had accepted from the code. The budget prevents it: the room inside a volume that the host cannot back is marked as
//! reserved (`reserved_clusters` of ext4), and a write there fails with `ENOSPC`, at once and in the process that writes. As long as
//! everything fits, nothing is reserved and one `statvfs` a second is all it costs. `docs/decisions/disk-budget.md` has the reasons.

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

/// What an operator wants to stay free; `None` is 5 % of the file system, at least 1 GB and at most 8 GB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct KeepFree(pub Option<u64>);

impl KeepFree {
    fn of(self, total: u64) -> u64 {
        self.0.unwrap_or((total / 20).clamp(1 << 30, 8 << 30))
    }
}

/// The file system of the images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskRoom {
    pub free: u64,
    /// The floor: what stays free.
    pub keep: u64,
}

impl DiskRoom {
    /// `dir` need not exist yet: what does exist above it counts.
    pub fn of(dir: &Path, keep: KeepFree) -> io::Result<Self> {
        let there = dir.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
        let found = statvfs(there)?;
        let (free, total) = (found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize);
        Ok(Self { free, keep: keep.of(total) })
    }

    pub fn above_floor(self) -> u64 {
        self.free.saturating_sub(self.keep)
    }

    /// Whether something new may be begun. The text is for the operator and for callers alike.
    pub fn admits(self) -> Result<(), String> {
        if self.above_floor() >= NEWCOMER {
            return Ok(());
        }
        let (free, keep) = (self.free >> 20, self.keep >> 20);
        Err(format!("the server's disk is full: {free} MB are free, {keep} MB have to stay free"))
    }
}

/// What has to be above the floor for a new sandbox: the tables of its file system, and a little.
const NEWCOMER: u64 = 16 << 20;
/// Room for a newcomer that is worth more than a look at all volumes.
const PLENTY: u64 = 64 << 20;
/// A change that is smaller is not worth a write.
const GRAIN: u64 = 1 << 20;

/// How often the file system is looked at: while everything fits, while it does not, and when little is left.
const CALM: Duration = Duration::from_secs(1);
const BUSY: Duration = Duration::from_millis(250);
const TIGHT: Duration = Duration::from_millis(50);
/// Looking at all volumes may take a twentieth of the launcher's time. A single look that was held up (by a disk that syncs, say) delays
/// the next one by no more than [`LONGEST`], or volumes would be refused room that is there.
const COST: u32 = 20;
const LONGEST: Duration = Duration::from_secs(1);
/// How often space that code has freed is asked back from the images when little is left.
const TRIM: Duration = Duration::from_secs(5);

#[derive(Debug)]
struct Volume {
    /// Of the image.
    size: u64,
    /// A directory on it, as the launcher can reach it.
    at: PathBuf,
    /// Where the kernel says what it holds for the code that writes to it.
    stat: Option<PathBuf>,
    /// What of its room the code cannot have; `None` as long as that is the kernel's business alone.
    reserved: Option<u64>,
    /// The fewest free inodes that were seen. These have never been used: their tables are not in the image yet.
    unused_inodes: u64,
}

#[derive(Debug)]
pub struct Budget {
    dir: PathBuf,
    keep: KeepFree,
    ledger: Ledger,
    volumes: BTreeMap<Device, Volume>,
    /// Everything fits, even when every volume is filled.
    ample: bool,
    /// What is left for newcomers until the next look.
    pool: u64,
    next: Option<Instant>,
    trimmed: Option<Instant>,
}

impl Budget {
    /// `dir` holds the images; in `shared`, which is the same for all servers of this host, they tell each other what they lend.
    pub fn new(dir: &Path, shared: &Path, keep: KeepFree, name: &str) -> Self {
        let device = fs::metadata(dir).map_or(0, |found| found.dev());
        let ledger = Ledger { dir: shared.join(format!("disk-{device:x}")), name: name.to_owned(), own: None };
        // Its files are there from the beginning, so that nobody takes them for something a sandbox left.
        drop(ledger.turn());
        let (dir, volumes) = (dir.to_owned(), BTreeMap::new());
        Self { dir, keep, ledger, volumes, ample: false, pool: 0, next: None, trimmed: None }
    }

    pub fn admits(&self) -> Result<(), String> {
        // A file system that cannot be asked says so to whoever writes to it.
        DiskRoom::of(&self.dir, self.keep).map_or(Ok(()), DiskRoom::admits)
    }

    /// A volume that code is about to get. Refused when it could take more than there is.
    pub fn add(&mut self, device: Device, at: PathBuf, stat: Option<PathBuf>) -> Result<(), String> {
        let Some(size) = device_size(device) else { return Err(format!("/dev/loop{} has no size", device.number)) };
        let volume = Volume { size, at, stat, reserved: None, unused_inodes: u64::MAX };
        // One that was parked may still have the limits of its last use.
        let _ = reserve(device, volume.usual());
        self.volumes.insert(device, volume);
        self.next.get_or_insert_with(|| Instant::now() + CALM);
        let give = self.pool / 2;
        if self.ample && size <= give {
            self.pool -= size;
            return Ok(());
        }
        if !self.ample && give >= PLENTY && self.limit(device, give) {
            self.pool -= give;
            return Ok(());
        }
        if self.balance().is_none() {
            return Err("another server is dividing the disk among its volumes; try again".into());
        }
        if self.ample || self.volumes.get(&device).is_some_and(|volume| volume.reserved.is_some()) {
            return Ok(());
        }
        Err("the server's disk cannot hold all volumes, and this kernel does not let them be bounded".into())
    }

    /// Nobody can write to it any more.
    pub fn remove(&mut self, device: Device) {
        if self.volumes.remove(&device).is_some() && self.volumes.is_empty() {
            (self.ample, self.pool, self.next) = (false, 0, None);
            self.ledger.close();
        }
    }

    /// When [`Budget::tick`] is to be called.
    pub fn deadline(&self) -> Option<Instant> {
        self.next
    }

    /// Answers directories on volumes whose free blocks should go back to the host, when little is left.
    pub fn tick(&mut self) -> Vec<OwnedFd> {
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

    /// Shares what is above the floor among all volumes. `None` when it could not be done now; it is tried again soon.
    fn balance(&mut self) -> Option<Duration> {
        let begun = Instant::now();
        let wait = self.share_out();
        self.next = Some(Instant::now() + wait.unwrap_or(TIGHT).max((begun.elapsed() * COST).min(LONGEST)));
        wait
    }

    /// When to look again; `None` when it could not be done now.
    fn share_out(&mut self) -> Option<Duration> {
        let room = DiskRoom::of(&self.dir, self.keep).ok()?;
        let _turn = self.ledger.turn()?;
        let others = self.ledger.others();
        let above = room.above_floor().saturating_sub(others.bytes);
        let count = self.volumes.len() as u64;
        let sizes: u64 = self.volumes.values().map(|volume| volume.size).sum();
        self.ample = sizes <= above;
        if self.ample {
            self.volumes.iter_mut().for_each(|(device, volume)| volume.release(*device));
            self.pool = (above - sizes) / 2;
            self.ledger.tell(LedgerEntry { bytes: sizes + self.pool, volumes: count });
            return Some(CALM);
        }
        let seen: BTreeMap<Device, u64> =
            self.volumes.iter().filter_map(|(device, volume)| Some((*device, volume.free(*device)?))).collect();
        // What was accepted inside and is not in the images yet will still be taken from what is free. No volume can have more of
        // it than it has in use or than waits in the memory of its sandbox.
        let unwritten: u64 = self
            .volumes
            .iter()
            .map(|(device, volume)| {
                let used = volume.size.saturating_sub(seen.get(device).copied().unwrap_or(0));
                used.min(volume.unwritten().unwrap_or(u64::MAX))
            })
            .sum();
        // Nor are the tables of inodes that were never used: code that makes files takes them without taking a free block. Most
        // volumes never do, so that many idle ones leave the others three quarters of the room.
        let tables: u64 = self.volumes.iter_mut().map(|(device, volume)| volume.unused_tables(*device)).sum();
        let under_way = unwritten + tables.min(room.above_floor() / 4);
        // Looked at afterwards: what gets written meanwhile counts twice, and not never.
        let room = DiskRoom::of(&self.dir, self.keep).ok()?;
        let rest = room.above_floor().saturating_sub(others.bytes).saturating_sub(under_way);
        // An eighth stays for newcomers, and another server's volumes are worth as much as ours.
        let fair = room.above_floor() / (others.volumes + count).max(1) * count;
        let lent = (rest - rest / 8).min(fair);
        let shares = shares(lent, &seen.values().copied().collect::<Vec<_>>());
        for ((device, free), share) in seen.iter().zip(&shares) {
            if let Some(volume) = self.volumes.get_mut(device) {
                volume.limit(*device, *free, *share);
            }
        }
        self.pool = rest / 8;
        let bytes = under_way + shares.iter().sum::<u64>() + self.pool;
        self.ledger.tell(LedgerEntry { bytes, volumes: count });
        Some(if shares.iter().any(|share| *share < PLENTY) { TIGHT } else { BUSY })
    }

    fn limit(&mut self, device: Device, headroom: u64) -> bool {
        let Some(volume) = self.volumes.get_mut(&device) else { return false };
        volume.free(device).is_some_and(|free| volume.limit(device, free, headroom))
    }
}

impl Volume {
    /// The path leads through a process, whose number may be another's by now.
    fn is_on(&self, device: Device) -> bool {
        const LOOP: u32 = 7;
        let number = |dev| (rustix::fs::major(dev), rustix::fs::minor(dev));
        fs::metadata(&self.at).is_ok_and(|found| number(found.dev()) == (LOOP, device.number))
    }

    /// What is free inside, whether or not it is reserved.
    fn free(&self, device: Device) -> Option<u64> {
        let found = statvfs(&self.at).ok().filter(|_| self.is_on(device))?;
        Some(found.f_bfree * found.f_frsize)
    }

    /// What tables of inodes can still take.
    fn unused_tables(&mut self, device: Device) -> u64 {
        let Some(found) = statvfs(&self.at).ok().filter(|_| self.is_on(device)) else { return 0 };
        self.unused_inodes = self.unused_inodes.min(found.f_ffree);
        self.unused_inodes * INODE
    }

    /// What its sandbox has written and the disk does not have yet, here or elsewhere.
    fn unwritten(&self) -> Option<u64> {
        waiting(&fs::read_to_string(self.stat.as_ref()?).ok()?)
    }

    /// Of what is free now, code may take so much. False where the kernel does not let us say so.
    fn limit(&mut self, device: Device, free: u64, headroom: u64) -> bool {
        let wanted = free.saturating_sub(headroom).max(self.usual());
        // A little more than was said before can wait; a little less cannot.
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
        if self.reserved.is_some() && reserve(device, self.usual()) {
            self.reserved = None;
        }
    }

    /// What ext4 reserves by itself: 2 %, at most 4096 blocks.
    fn usual(&self) -> u64 {
        (self.size / 50).min(4096 * BLOCK)
    }
}

const BLOCK: u64 = 4096;
/// Of an inode in its table.
const INODE: u64 = 256;

fn reserve(device: Device, bytes: u64) -> bool {
    let path = format!("/sys/fs/ext4/loop{}/reserved_clusters", device.number);
    fs::write(path, bytes.div_ceil(BLOCK).to_string()).is_ok()
}

fn device_size(device: Device) -> Option<u64> {
    let sectors = fs::read_to_string(format!("/sys/block/loop{}/size", device.number)).ok()?;
    sectors.trim().parse::<u64>().ok().map(|sectors| sectors * 512)
}

/// The bytes that wait to be written, of the `memory.stat` of a cgroup and all below it: v1's `total_dirty`, v2's `file_dirty`.
fn waiting(stat: &str) -> Option<u64> {
    let value = |names: [&str; 2]| {
        let mut words = stat.lines().filter_map(|line| line.split_once(' '));
        words.find(|(name, _)| names.contains(name))?.1.trim().parse::<u64>().ok()
    };
    Some(value(["total_dirty", "file_dirty"])? + value(["total_writeback", "file_writeback"])?)
}

/// `room` divided among volumes with so much free: equally, but none gets more than it can use.
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

/// What a server has promised to its volumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct LedgerEntry {
    bytes: u64,
    volumes: u64,
}

/// The promises of all servers of this host, a file each, locked as long as its server lives.
#[derive(Debug)]
struct Ledger {
    dir: PathBuf,
    name: String,
    own: Option<File>,
}

impl Ledger {
    /// One server at a time looks and promises. `None` when it is another's turn.
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

    /// What the others have promised. Those of the dead are removed.
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

    fn tell(&mut self, entry: LedgerEntry) {
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
        one.tell(LedgerEntry { bytes: 1000, volumes: 2 });
        one.tell(LedgerEntry { bytes: 10, volumes: 1 });
        two.tell(LedgerEntry { bytes: 5, volumes: 1 });
        assert_eq!(three.others(), LedgerEntry { bytes: 15, volumes: 2 });
        assert_eq!(two.others(), LedgerEntry { bytes: 10, volumes: 1 });
        one.close();
        // A server that was killed lets go of its lock and leaves its file.
        two.own = None;
        three.tell(LedgerEntry { bytes: 1, volumes: 1 });
        assert_eq!(three.others(), LedgerEntry::default());
        assert_eq!(ledger("four").others(), LedgerEntry { bytes: 1, volumes: 1 });
        fs::remove_dir_all(dir).unwrap();
    }
}
