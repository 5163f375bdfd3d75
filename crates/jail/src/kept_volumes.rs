//! This module manages kept volumes: volumes that outlive their sandboxes and are found by name, such as the `/data` of
//! a conversation or the workspace of a named context.
//!
//! As root they are images in the state directory and persist. A new image gets its name only when its sandbox runs, so
//! that a creation that fails leaves nothing behind. Where images cannot be used, volumes are in memory, mounted in the
//! launcher's mount namespace, and last as long as the launcher. Each of those has a separate host uid, because older
//! Linux kernels offer no way to map its files from one sandbox's uid to the next one's.
//!
//! The memory of a volume is no longer bounded by the limit of the sandbox that wrote it. It has a budget, for each
//! tenant and for all tenants together: a volume can grow by no more than half of what is left. No volume is discarded
//! to make room, because its owner was promised how long it stays. A new one is refused instead, and the files of the
//! others can still be read and deleted.
//!
//! After its sandbox has ended, an image stays mounted for a while for the next one: the launcher holds a mount of it
//! that is attached nowhere, together with the uid to which its files are mapped. This mount keeps the image locked;
//! the launcher releases it as soon as another process opens the image.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::inotify;
use rustix::fs::{AtFlags, CWD, RenameFlags, Timespec, Timestamps, UTIME_NOW};
use rustix::io::Errno;
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use serde::{Deserialize, Serialize};

use crate::cgroup::Group;
use crate::ids::{Mode, Slot, Slots, private_dir};
use crate::pool::Parking;
use crate::spec::KeptVolumeSpec;
use crate::volume::{self, Device, Purpose};
use crate::{apply, sys};

/// The kept volume that the specification of a sandbox asks for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptVolumeRequest {
    pub name: String,
    pub bytes: u64,
    pub inodes: u64,
    /// The context whose workspace it is; `None` for the `/data` of a conversation.
    pub workspace: Option<KeptWorkspace>,
}

/// The workspace of a context that outlives its sandboxes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptWorkspace {
    pub owner: WorkspaceOwner,
    /// Path inside the sandbox at which the volume's directory for installed packages is shown.
    pub packages: PathBuf,
}

/// The owner of a workspace. A file beside the image contains it, so that `sandpool workspace` can list workspaces
/// without a server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkspaceOwner {
    pub tenant: String,
    pub dialect: String,
    pub context: String,
}

/// Describes a kept volume that exists.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptVolumeRecord {
    pub name: String,
    /// Time of the last use, in seconds since 1970.
    pub last_used: u64,
    /// The owner of a workspace; `None` for the files of a conversation.
    pub owner: Option<WorkspaceOwner>,
    /// Bytes that it takes on the disk or in memory.
    pub used_bytes: u64,
}

/// Describes a workspace in a state directory, whether a server runs there or not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct StoredWorkspace {
    pub name: String,
    pub owner: WorkspaceOwner,
    /// Maximum number of bytes that the workspace may hold.
    pub quota_bytes: u64,
    /// Number of bytes that the image takes on the disk.
    pub used_bytes: u64,
    /// Time of the last use, in seconds since 1970.
    pub last_used: u64,
    /// Whether a server has it open.
    pub in_use: bool,
}

/// Prefix of the names of workspaces, which tells them from the files of conversations.
pub const WORKSPACE_PREFIX: &str = "w-";

/// Returns the workspaces of contexts in a state directory.
pub fn workspaces(state_dir: &Path) -> io::Result<Vec<StoredWorkspace>> {
    let dir = state_dir.join("data");
    let stored = |record: KeptVolumeRecord| {
        let image = dir.join(file_name(&record.name));
        let found = fs::metadata(&image).ok()?;
        let in_use = matches!(volume::is_free(&image), Ok(false));
        Some(StoredWorkspace {
            owner: record.owner?,
            name: record.name,
            quota_bytes: found.size(),
            used_bytes: record.used_bytes,
            last_used: record.last_used,
            in_use,
        })
    };
    Ok(list_images(&dir)?.into_iter().filter_map(stored).collect())
}

/// Removes a workspace. Returns false if a server has it open.
pub fn remove_workspace(state_dir: &Path, name: &str) -> io::Result<bool> {
    check_name(name)?;
    remove_stored(&state_dir.join("data"), name)
}

fn remove_stored(dir: &Path, name: &str) -> io::Result<bool> {
    match volume::remove_image(&dir.join(file_name(name))) {
        Err(volume::VolumeError::InUse) => return Ok(false),
        other => other.map_err(io::Error::other)?,
    }
    remove_label(dir, name);
    Ok(true)
}

fn label_name(name: &str) -> String {
    format!("{name}.json")
}

fn remove_label(dir: &Path, name: &str) {
    let _ = fs::remove_file(dir.join(label_name(name)));
}

fn read_label(dir: &Path, name: &str) -> Option<WorkspaceOwner> {
    serde_json::from_slice(&fs::read(dir.join(label_name(name))).ok()?).ok()
}

/// Keeps a volume in use by one sandbox.
#[derive(Debug)]
pub(crate) struct VolumeLease {
    pub name: String,
    pub owner: Option<WorkspaceOwner>,
    /// Whether the volume was created for this sandbox, which does not run yet.
    pub new: bool,
    pub source: KeptVolumeSpec,
    /// Slot number of the volume's host uid, if the volume determines the uid of its sandbox.
    pub slot: Option<u32>,
    /// The mount and uid with which the volume was parked, if it was.
    pub parked: Option<ParkedVolume>,
}

/// An image that is still mounted although no sandbox has it.
#[derive(Debug)]
pub(crate) struct ParkedVolume {
    pub mount: OwnedFd,
    /// The slot whose host uid its files are mapped to.
    pub slot: Slot,
    pub device: Device,
}

#[derive(Debug)]
pub(crate) struct VolumeStore {
    backing: StoreBacking,
}

#[derive(Debug)]
enum StoreBacking {
    Disk { dir: PathBuf, templates: PathBuf, parked_volumes: ParkedVolumes },
    Memory { dir: PathBuf, volumes: BTreeMap<String, MemoryVolume>, unshared: bool, budget: u64 },
}

#[derive(Debug)]
struct MemoryVolume {
    last_used: u64,
    owner: Option<WorkspaceOwner>,
    slot: Option<Slot>,
    /// The cgroups around the sandbox that created it, outermost first. The first one is the tenant's.
    groups: Vec<Group>,
    /// Bytes of memory that it has, or may take while a sandbox has it.
    charge: u64,
}

/// The limits of a volume in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct MemorySize {
    bytes: u64,
    inodes: u64,
}

/// Memory that an inode of a tmpfs takes, with its name.
const INODE: u64 = 1024;
const PAGE: u64 = 4096;
/// Smallest room in the budget for which a new volume is created.
const LEAST: u64 = 1 << 20;

impl MemorySize {
    fn charge(self) -> u64 {
        self.bytes + self.inodes * INODE
    }

    /// Returns what the volume has in use.
    fn used(at: &Path) -> io::Result<Self> {
        let found = rustix::fs::statvfs(at)?;
        let bytes = (found.f_blocks - found.f_bfree) * found.f_frsize;
        Ok(Self { bytes, inodes: found.f_files - found.f_ffree })
    }

    /// Returns the limits for a volume that uses `self`. `room` is what the volume uses and the unused part of the
    /// budget together; the volume may grow by half of the unused part. A file with content takes a page, so there are
    /// no more inodes than pages.
    fn grown(self, wanted: &KeptVolumeRequest, room: u64) -> Self {
        let target = self.charge() + room.saturating_sub(self.charge()) / 2;
        let bytes = wanted.bytes.min(target / 5 * 4).min(target - self.inodes * INODE) / PAGE * PAGE;
        // A tmpfs treats zero as no limit.
        let bytes = bytes.max(self.bytes).max(PAGE);
        let inodes = wanted.inodes.min(bytes / PAGE).min(target.saturating_sub(bytes) / INODE);
        Self { bytes, inodes: inodes.max(self.inodes).max(1) }
    }
}

/// Maximum number of images that stay mounted.
const MAX_PARKED: usize = 16;
/// How long an image stays mounted after its sandbox has ended.
const PARKED: Duration = Duration::from_secs(30);
/// How long an image stays mounted where inotify is not available, so that nothing reports that another process wants
/// the image. This is shorter than the time for which others wait for it.
const PARKED_UNWATCHED: Duration = Duration::from_secs(1);

/// The parked images by name.
#[derive(Debug)]
struct ParkedVolumes {
    volumes: Parking<String, ParkedVolume, Instant>,
    /// The inotify descriptor that reports which images are opened.
    watch: Option<OwnedFd>,
}

/// Name of a new image in its sandbox's directory until the sandbox runs.
const NEW: &str = "kept.img";

impl VolumeStore {
    /// Creates an empty store. `instance` is the launcher's instance directory, `memory` the memory of the machine or
    /// of the server's cgroup.
    pub(crate) fn new(on_disk: bool, mode: Mode, state_dir: &Path, instance: &Path, memory: u64) -> Self {
        let backing = if on_disk {
            let (dir, templates) = (state_dir.join("data"), state_dir.join("templates"));
            StoreBacking::Disk {
                dir,
                templates,
                parked_volumes: ParkedVolumes { volumes: Parking::new(MAX_PARKED), watch: None },
            }
        } else {
            // The launcher of an ordinary user has already moved into a separate mount namespace at its start.
            let (dir, unshared) = (instance.join("kept"), mode != Mode::Root);
            StoreBacking::Memory { dir, volumes: BTreeMap::new(), unshared, budget: memory / 4 }
        };
        Self { backing }
    }

    /// Leases a volume to the sandbox whose directory is `dir`, and creates it if it does not exist. Whether another
    /// sandbox has the image is detected later, when this sandbox locks it.
    pub(crate) fn lease(
        &mut self,
        wanted: &KeptVolumeRequest,
        dir: &Path,
        groups: &[Group],
        slots: Option<&mut Slots>,
    ) -> io::Result<VolumeLease> {
        check_name(&wanted.name)?;
        let name = wanted.name.clone();
        let (new, source, slot, parked) = match &mut self.backing {
            StoreBacking::Disk { dir: all, templates, parked_volumes } => {
                private_dir(all)?;
                let image = all.join(file_name(&name));
                match parked_volumes.volumes.take(&name) {
                    Some(parked) => (false, KeptVolumeSpec::Mounted { image }, Some(parked.slot.number), Some(parked)),
                    None if image.exists() => (false, on_disk(None, image), None, None),
                    None => (true, new_image(templates, wanted, dir)?, None, None),
                }
            }
            StoreBacking::Memory { dir: all, volumes, unshared, budget } => {
                let at = all.join(&name);
                let room = room(*budget, volumes, &name, groups);
                let new = !volumes.contains_key(&name);
                if new {
                    if room < LEAST {
                        return Err(io::Error::new(io::ErrorKind::StorageFull, VolumesFull));
                    }
                    unshare_mounts(unshared)?;
                    private_dir(all)?;
                    volumes.insert(name.clone(), MemoryVolume::mount(wanted, &at, groups, room, slots)?);
                } else if let Some(volume) = volumes.get_mut(&name) {
                    volume.resize(wanted, &at, room)?;
                }
                let slot = volumes.get(&name).and_then(|volume| volume.slot.as_ref()).map(|slot| slot.number);
                (new, KeptVolumeSpec::Memory { at }, slot, None)
            }
        };
        let owner = wanted.workspace.as_ref().map(|workspace| workspace.owner.clone());
        Ok(VolumeLease { name, owner, new, source, slot, parked })
    }

    /// Gives a new image its name once its sandbox runs, which makes the volume available to others. Returns false if
    /// another launcher has created a volume of that name in the meantime.
    pub(crate) fn settle(&self, lease: &mut VolumeLease) -> io::Result<bool> {
        if let (StoreBacking::Disk { dir, .. }, KeptVolumeSpec::Ext4 { image, .. }) = (&self.backing, &mut lease.source)
            && lease.new
        {
            let named = dir.join(file_name(&lease.name));
            if let Some(owner) = &lease.owner {
                fs::write(dir.join(label_name(&lease.name)), serde_json::to_vec(owner)?)?;
            }
            match rustix::fs::renameat_with(CWD, &*image, CWD, &named, RenameFlags::NOREPLACE) {
                Err(Errno::EXIST) => return Ok(false),
                other => other?,
            }
            *image = named;
        }
        lease.new = false;
        Ok(true)
    }

    /// Ends a lease when nothing of its sandbox is left. A new volume is removed if its sandbox never ran.
    pub(crate) fn take_back(&mut self, lease: &VolumeLease) {
        match (&mut self.backing, &lease.source) {
            (StoreBacking::Disk { .. }, KeptVolumeSpec::Ext4 { image, .. } | KeptVolumeSpec::Mounted { image })
                if !lease.new =>
            {
                let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
                let times = Timestamps { last_access: now, last_modification: now };
                // Another launcher may have discarded the image since then.
                let _ = rustix::fs::utimensat(CWD, image, &times, AtFlags::SYMLINK_NOFOLLOW);
            }
            (StoreBacking::Memory { dir, volumes, .. }, _) => {
                if lease.new {
                    unmount(dir, &lease.name);
                    volumes.remove(&lease.name);
                } else if let Some(volume) = volumes.get_mut(&lease.name) {
                    volume.last_used = now();
                    volume.charge = MemorySize::used(&dir.join(&lease.name)).map_or(volume.charge, MemorySize::charge);
                }
            }
            (StoreBacking::Disk { .. }, _) => {}
        }
    }

    /// Returns the cgroups that the memory of a volume is charged to, if it is in memory.
    pub(crate) fn groups_of(&self, name: &str) -> Option<Vec<Group>> {
        let StoreBacking::Memory { volumes, .. } = &self.backing else { return None };
        volumes.get(name).map(|volume| volume.groups.clone())
    }

    /// Returns whether the memory of a volume is charged to these cgroups. When they are removed, the charge is lost.
    pub(crate) fn is_charged_to(&self, groups: &[Group]) -> bool {
        let StoreBacking::Memory { volumes, .. } = &self.backing else { return false };
        let names = |groups: &[Group]| groups.iter().map(|group| group.name.clone()).collect::<Vec<_>>();
        let wanted = names(groups);
        volumes.values().any(|volume| names(&volume.groups) == wanted)
    }

    pub(crate) fn list(&self) -> io::Result<Vec<KeptVolumeRecord>> {
        match &self.backing {
            StoreBacking::Disk { dir, .. } => list_images(dir),
            StoreBacking::Memory { volumes, .. } => {
                let kept = |(name, volume): (&String, &MemoryVolume)| KeptVolumeRecord {
                    name: name.clone(),
                    last_used: volume.last_used,
                    owner: volume.owner.clone(),
                    used_bytes: volume.charge,
                };
                Ok(volumes.iter().map(kept).collect())
            }
        }
    }

    /// Removes the image of a parked volume and returns the volume. Nothing else has the image, so its name can be
    /// removed at once.
    pub(crate) fn discard_parked(&mut self, name: &str) -> Option<ParkedVolume> {
        let StoreBacking::Disk { dir, .. } = &self.backing else { return None };
        let (image, label) = (dir.join(file_name(name)), dir.join(label_name(name)));
        self.unpark(name).inspect(|_| [image, label].into_iter().for_each(|file| drop(fs::remove_file(file))))
    }

    /// Removes a kept volume. Returns false if a sandbox of another launcher has it; the caller has to check its own
    /// sandboxes. A volume that does not exist is not an error.
    pub(crate) fn discard(&mut self, name: &str) -> io::Result<bool> {
        check_name(name)?;
        match &mut self.backing {
            StoreBacking::Disk { dir, .. } => remove_stored(dir, name),
            StoreBacking::Memory { dir, volumes, .. } => {
                if volumes.contains_key(name) {
                    unmount(dir, name);
                    volumes.remove(name);
                }
                Ok(true)
            }
        }
    }

    /// Parks the volume of a sandbox that has ended, for the next one. Returns the volumes that the caller has to
    /// unmount in exchange.
    pub(crate) fn park(&mut self, name: String, parked: ParkedVolume) -> Vec<ParkedVolume> {
        let StoreBacking::Disk { dir, parked_volumes, .. } = &mut self.backing else { return vec![parked] };
        let time = if parked_volumes.watches(dir) { PARKED } else { PARKED_UNWATCHED };
        parked_volumes.volumes.park(name, parked, Instant::now() + time).collect()
    }

    /// Removes a volume from the parked ones and returns it, for the caller to unmount.
    fn unpark(&mut self, name: &str) -> Option<ParkedVolume> {
        let StoreBacking::Disk { parked_volumes, .. } = &mut self.backing else { return None };
        parked_volumes.volumes.take(name)
    }

    /// Removes and returns the volumes whose parking time is over.
    pub(crate) fn expired(&mut self) -> Vec<ParkedVolume> {
        let StoreBacking::Disk { parked_volumes, .. } = &mut self.backing else { return vec![] };
        parked_volumes.volumes.expired(Instant::now()).collect()
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        let StoreBacking::Disk { parked_volumes, .. } = &self.backing else { return None };
        parked_volumes.volumes.next_expiry()
    }

    /// Returns the descriptor that becomes readable when a process opens an image.
    pub(crate) fn watch(&self) -> Option<&OwnedFd> {
        let StoreBacking::Disk { parked_volumes, .. } = &self.backing else { return None };
        parked_volumes.watch.as_ref()
    }

    /// Removes and returns the parked volumes whose images were opened since the last call. The launcher itself does
    /// not open parked images, so every such event comes from another process.
    pub(crate) fn wanted_by_others(&mut self) -> Vec<ParkedVolume> {
        let StoreBacking::Disk { parked_volumes: ParkedVolumes { watch: Some(watch), .. }, .. } = &self.backing else {
            return vec![];
        };
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut reader = inotify::Reader::new(watch, &mut buffer);
        let mut names = Vec::new();
        while let Ok(event) = reader.next() {
            let name = event.file_name().and_then(|name| name.to_str().ok());
            names.extend(name.and_then(|name| name.strip_suffix(".img")).map(str::to_owned));
        }
        names.iter().filter_map(|name| self.unpark(name)).collect()
    }

    /// Unmounts the volumes in memory, so that the launcher's directory can be removed.
    pub(crate) fn close(&mut self) {
        if let StoreBacking::Memory { dir, volumes, .. } = &mut self.backing {
            for name in std::mem::take(volumes).keys() {
                unmount(dir, name);
            }
        }
    }
}

impl ParkedVolumes {
    fn watches(&mut self, dir: &Path) -> bool {
        if self.watch.is_none() {
            let flags = inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK;
            let watch = inotify::init(flags).and_then(|fd| {
                inotify::add_watch(&fd, dir, inotify::WatchFlags::OPEN)?;
                Ok(fd)
            });
            self.watch = watch.ok();
        }
        self.watch.is_some()
    }
}

/// The budget has no room for a new volume.
#[derive(Debug, thiserror::Error)]
#[error("the files of conversations have all the memory that they may take; delete files of other ones")]
pub(crate) struct VolumesFull;

impl MemoryVolume {
    fn mount(
        wanted: &KeptVolumeRequest,
        at: &Path,
        groups: &[Group],
        room: u64,
        slots: Option<&mut Slots>,
    ) -> io::Result<Self> {
        let slot = slots.map(Slots::take).transpose()?;
        let size = MemorySize { bytes: 0, inodes: 0 }.grown(wanted, room);
        private_dir(at)?;
        apply::mount_tmpfs(at, size.bytes, size.inodes).map_err(io::Error::other).inspect_err(|_| {
            let _ = fs::remove_dir(at);
        })?;
        let owner = wanted.workspace.as_ref().map(|workspace| workspace.owner.clone());
        Ok(Self { last_used: now(), owner, slot, groups: groups.to_vec(), charge: size.charge() })
    }

    /// Sets the limits for the next sandbox.
    fn resize(&mut self, wanted: &KeptVolumeRequest, at: &Path, room: u64) -> io::Result<()> {
        let size = MemorySize::used(at)?.grown(wanted, room);
        let options = CString::new(format!("size={},nr_inodes={}", size.bytes, size.inodes))?;
        rustix::mount::mount_remount(at, MountFlags::NOSUID | MountFlags::NODEV, options.as_c_str())?;
        self.charge = size.charge();
        Ok(())
    }
}

/// Returns the memory that the volume `name` may use, including what it uses already: what the other volumes leave of
/// the budget, of which one tenant gets at most half. If a group has a memory limit, half of it is left to sandboxes.
fn room(budget: u64, volumes: &BTreeMap<String, MemoryVolume>, name: &str, groups: &[Group]) -> u64 {
    let tenant = |groups: &[Group]| groups.first().map(|group| group.name.clone());
    // A request through a link has no tenant, so an existing volume counts for the tenant that created it.
    let groups = volumes.get(name).map_or(groups, |volume| &volume.groups);
    let owner = tenant(groups);
    let others = || volumes.iter().filter(|(other, _)| *other != name).map(|(_, volume)| volume);
    let all: u64 = others().map(|volume| volume.charge).sum();
    let own: u64 = others().filter(|volume| tenant(&volume.groups) == owner).map(|volume| volume.charge).sum();
    let limit = groups.iter().filter_map(|group| group.memory_bytes).min().unwrap_or(u64::MAX);
    budget.saturating_sub(all).min((budget / 2).min(limit / 2).saturating_sub(own))
}

/// Returns the memory that this machine has, or less if a cgroup around these directories has a lower limit.
pub(crate) fn memory_of_machine(cgroups: &[PathBuf]) -> u64 {
    let read = |dir: &Path, file| fs::read_to_string(dir.join(file)).ok()?.trim().parse::<u64>().ok();
    let limit = |dir: &Path| read(dir, "memory.max").or_else(|| read(dir, "memory.limit_in_bytes"));
    let limits = cgroups.iter().flat_map(|dir| dir.ancestors()).filter_map(limit);
    let found = rustix::system::sysinfo();
    limits.chain([found.totalram * u64::from(found.mem_unit)]).min().unwrap_or(0)
}

/// Moves root's launcher into a new mount namespace. In the host's mount namespace a mount would outlive the launcher.
/// The new namespace still receives the mounts of the host.
fn unshare_mounts(unshared: &mut bool) -> io::Result<()> {
    if !*unshared {
        sys::unshare(libc::CLONE_NEWNS)?;
        rustix::mount::mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?;
        *unshared = true;
    }
    Ok(())
}

fn unmount(dir: &Path, name: &str) {
    let at = dir.join(name);
    let _ = rustix::mount::unmount(&at, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
    let _ = fs::remove_dir(at);
}

fn new_image(templates: &Path, wanted: &KeptVolumeRequest, dir: &Path) -> io::Result<KeptVolumeSpec> {
    if wanted.bytes < volume::SMALLEST_KEPT {
        return Err(io::Error::other(format!("a kept volume has at least `{}` bytes", volume::SMALLEST_KEPT)));
    }
    let template = volume::template(templates, Purpose::Kept, wanted.bytes, wanted.inodes).map_err(io::Error::other)?;
    Ok(on_disk(Some(template), dir.join(NEW)))
}

fn on_disk(template: Option<PathBuf>, image: PathBuf) -> KeptVolumeSpec {
    KeptVolumeSpec::Ext4 { template, image }
}

fn file_name(name: &str) -> String {
    format!("{name}.img")
}

fn list_images(dir: &Path) -> io::Result<Vec<KeptVolumeRecord>> {
    let entries = match fs::read_dir(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
        other => other?,
    };
    let kept = |entry: fs::DirEntry| {
        let name = entry.file_name().to_str()?.strip_suffix(".img")?.to_owned();
        check_name(&name).ok()?;
        // An image that was removed in the meantime is not listed.
        let found = entry.metadata().ok()?;
        let (last_used, used_bytes) = (u64::try_from(found.mtime()).unwrap_or(0), found.blocks() * 512);
        let owner = name.starts_with(WORKSPACE_PREFIX).then(|| read_label(dir, &name)).flatten();
        Some(KeptVolumeRecord { name, last_used, owner, used_bytes })
    };
    let mut all: Vec<KeptVolumeRecord> = entries.flatten().filter_map(kept).collect();
    all.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(all)
}

fn now() -> u64 {
    SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs())
}

fn check_name(name: &str) -> io::Result<()> {
    let fine = |c: char| c.is_ascii_digit() || ('a'..='f').contains(&c);
    let digits = name.strip_prefix(WORKSPACE_PREFIX).unwrap_or(name);
    if digits.len() != 64 || !digits.chars().all(fine) {
        return Err(io::Error::other(format!("`{name}` is not a name of 64 lower-case hexadecimal digits")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_digest_is_a_name() {
        assert!(check_name(&"0af9".repeat(16)).is_ok());
        assert!(check_name(&format!("w-{}", "0af9".repeat(16))).is_ok());
        for name in ["w-", "w-w-", "", "..", &"0AF9".repeat(16), &"0".repeat(63), &"0".repeat(65), &"../x".repeat(16)] {
            assert!(check_name(name).is_err(), "{name}");
        }
    }

    #[test]
    fn images_are_listed_by_name_and_a_discarded_one_is_gone() {
        let dir = crate::test_dir("kept");
        let mut store = VolumeStore::new(true, Mode::Root, &dir, &dir.join("i"), 0);
        assert_eq!(store.list().unwrap(), vec![]);
        let (a, b) = ("a".repeat(64), "b".repeat(64));
        fs::create_dir(dir.join("data")).unwrap();
        for name in [&b, &a, "other"] {
            fs::write(dir.join("data").join(file_name(name)), "").unwrap();
        }
        let names = |store: &VolumeStore| store.list().unwrap().into_iter().map(|k| k.name).collect::<Vec<_>>();
        assert_eq!(names(&store), [a.clone(), b.clone()]);
        let _held = volume::lock_image(&dir.join("data").join(file_name(&b))).unwrap();
        assert!(!store.discard(&b).unwrap());
        assert!(store.discard(&a).unwrap() && store.discard(&a).unwrap());
        assert_eq!(names(&store), [b]);
        fs::remove_dir_all(dir).unwrap();
    }

    fn wanted() -> KeptVolumeRequest {
        KeptVolumeRequest { name: "a".repeat(64), bytes: 128 << 20, inodes: 100_000, workspace: None }
    }

    fn groups(tenant: &str, memory_bytes: Option<u64>) -> Vec<Group> {
        vec![
            Group { name: tenant.into(), memory_bytes, cpu_millis: None },
            Group { name: "conversation".into(), memory_bytes: None, cpu_millis: None },
        ]
    }

    /// W49: a tenant leaves a full volume in one conversation after the other.
    #[test]
    fn w49_volumes_in_memory_have_a_budget_for_each_tenant_and_for_all() {
        const BUDGET: u64 = 1 << 30;
        let mut volumes = BTreeMap::new();
        let mut fill = |tenant: &str, limit: Option<u64>| {
            let (before, groups) = (volumes.len(), groups(tenant, limit));
            for n in 0..1000 {
                let name = format!("{tenant}{n}");
                let room = room(BUDGET, &volumes, &name, &groups);
                if room < LEAST {
                    break;
                }
                // Code takes all that it is given, as content or as files without any.
                let charge = MemorySize { bytes: 0, inodes: 0 }.grown(&wanted(), room).charge();
                let groups = groups.clone();
                volumes.insert(name, MemoryVolume { last_used: 0, owner: None, slot: None, groups, charge });
            }
            let own = volumes.iter().filter(|(name, _)| name.starts_with(tenant));
            (volumes.len() - before, own.map(|(_, held)| held.charge).sum::<u64>())
        };
        let (count, held) = fill("blue", None);
        assert!(count > 3 && held <= BUDGET / 2, "{count} volumes, {held} bytes");
        let (count, held) = fill("green", Some(256 << 20));
        assert!(count > 3 && held <= 128 << 20, "half of its quota: {count} volumes, {held} bytes");
        let (count, held) = fill("red", None);
        let all: u64 = volumes.values().map(|held| held.charge).sum();
        assert!(count > 3 && all <= BUDGET, "what is left: {count} volumes, {held} bytes, {all} in all");
        // One that exists is lent all the same, and cannot grow.
        let blue = groups("blue", None);
        let own = volumes["blue0"].charge;
        assert!(room(BUDGET, &volumes, "blue0", &blue) < own + LEAST);
        assert_eq!(
            room(BUDGET, &volumes, "blue0", &groups("links", None)),
            room(BUDGET, &volumes, "blue0", &blue),
            "a link opens it as its tenant's"
        );
    }

    #[test]
    fn a_volume_in_memory_grows_by_half_of_the_room_and_never_loses_what_it_has() {
        let empty = MemorySize { bytes: 0, inodes: 0 };
        let whole = MemorySize { bytes: 128 << 20, inodes: 32 << 10 };
        assert_eq!(empty.grown(&wanted(), 1 << 40), whole, "a file with content takes a page");
        for used in
            [empty, MemorySize { bytes: 1 << 20, inodes: 9000 }, MemorySize { bytes: 100 << 20, inodes: 25_000 }]
        {
            for room in [0, LEAST, 3 << 20, 50 << 20, 200 << 20, 1 << 30] {
                let size = used.grown(&wanted(), room);
                assert!(size.bytes >= used.bytes.max(1) && size.inodes >= used.inodes.max(1), "{used:?} {room}");
                let (most, least) = (room.max(used.charge()), PAGE + INODE);
                assert!(size.charge() <= most.max(least), "{used:?} {room}: {size:?}");
            }
        }
    }
}
