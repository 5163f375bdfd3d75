//! This module applies the steps that mount volumes: the sandbox's volume, a kept one and shared directories.

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mount::{OpenTreeFlags, UnmountFlags};
use rustix::process::{Signal, WaitId, WaitIdOptions};
use rustix::thread::{Gid, Uid};

use crate::ids::{self, Remap};
use crate::spec::{SHARED_PACKAGES, SharedVolumeSpec, Volume, WORKSPACE, is_kernel_file_system};
use crate::{sys, volume};

use super::mounts::{SEALED, attach, copy_of, detached};
use super::{ApplyError, ApplyState, At, SetupEvent, Syscall, packages, write_existing};

/// Temporary mount points of the volumes while their directories are created.
pub(super) const VOLUME: &str = "/.volume";
pub(super) const KEPT: &str = "/.kept";

impl ApplyState {
    pub(super) fn volume(&self, volume: &Volume) -> Result<(), ApplyError> {
        let at = Path::new(VOLUME);
        self.mkdir(at, 0o700)?;
        match volume {
            Volume::Tmpfs { bytes, inodes } => self.tmpfs(at, *bytes, *inodes, "0755"),
            Volume::Ext4 { template, image } => {
                volume::copy_sparse(template, image)?;
                let device = volume::attach_loop(&volume::open_image(image)?)?;
                self.report(&SetupEvent::Loop { device: volume::Device::of(device.number) }, &[])?;
                // The loop device keeps the file open. Without a name the file disappears with the sandbox, even if the
                // launcher dies first, and the Linux kernel frees its blocks instead of the launcher.
                fs::remove_file(image).at(Syscall::Unlink, image)?;
                // This volume does not outlive the sandbox, so it needs no protection against a power failure.
                let options = [
                    ("source", Some(device.path.as_str())),
                    ("barrier", Some("0")),
                    ("errors", Some("remount-ro")),
                    ("noinit_itable", None),
                ];
                self.new_mount("ext4", at, &options, sys::NODEV)
            }
        }
    }

    pub(super) fn volume_dir(&self, path: &Path, mode: u32) -> Result<(), ApplyError> {
        let name = path.file_name().ok_or(ApplyError::Wrong { at: path.to_owned(), why: "it has no name" })?;
        let made = Path::new(VOLUME).join(name);
        self.mkdir(&made, mode)?;
        let fd = self.target(&made)?;
        set_mode(&fd, mode, path)?;
        let tree = copy_of(fd.as_fd(), Path::new(""), path, OpenTreeFlags::AT_EMPTY_PATH)?;
        attach(&tree, &self.target(path)?, path)
    }

    pub(super) fn kept_image(&self, template: Option<&Path>, image: &Path) -> Result<(), ApplyError> {
        if let Some(template) = template {
            volume::copy_sparse(template, image)?;
        }
        let device = volume::attach_loop(&volume::lock_image(image)?)?;
        self.report(&SetupEvent::KeptLoop { device: volume::Device::of(device.number) }, &[])?;
        let at = Path::new(KEPT);
        self.mkdir(at, 0o700)?;
        // Unlike the sandbox's own volume, a kept volume uses barriers. The inode tables are holes and may remain so.
        let options = [("source", Some(device.path.as_str())), ("errors", Some("remount-ro")), ("noinit_itable", None)];
        self.new_mount("ext4", at, &options, sys::NODEV)
    }

    /// Shows a directory below the root of the file system. The root itself contains `lost+found` and stays owned by
    /// root.
    pub(super) fn kept_dir(
        &self,
        path: &Path,
        owner: u32,
        mode: Option<u32>,
        below: &[PathBuf],
    ) -> Result<(), ApplyError> {
        let made = Path::new(KEPT).join("data");
        self.kept_point(&made, ids::KEPT)?;
        let fd = self.target(&made)?;
        if let Some(mode) = mode {
            set_mode(&fd, mode, path)?;
        }
        below.iter().try_for_each(|dir| self.kept_mount_point(&made.join(dir), ids::KEPT))?;
        let tree = copy_of(fd.as_fd(), Path::new(""), path, OpenTreeFlags::AT_EMPTY_PATH)?;
        let remap = Remap::new(ids::KEPT, ids::KEPT, owner)
            .map_err(|_| ApplyError::Wrong { at: path.to_owned(), why: "its files are root's" })?;
        sys::mount_idmap(tree.as_fd(), namespace_of(remap)?.as_fd()).at(Syscall::MountSetattr, path)?;
        attach(&tree, &self.target(path)?, path)
    }

    /// Creates a directory on a kept volume if nothing has its name. A crash during an earlier setup may have happened
    /// between `mkdir` and `chown`.
    pub(super) fn kept_point(&self, path: &Path, owner: u32) -> Result<(), ApplyError> {
        match self.mkdir(path, 0o755) {
            Err(ApplyError::Call { errno: Errno::EXIST, .. }) => {}
            other => other?,
        }
        let dir = self.target(path)?;
        let found = rustix::fs::fstat(&dir).at(Syscall::Stat, path)?;
        if found.st_uid == 0 { chown(&dir, (owner, owner), path) } else { Ok(()) }
    }

    /// Creates a directory of a kept workspace over which something is to be shown. Code may have put something else
    /// there or above, or have filled the volume. Nothing is shown there then, and the sandbox is created anyway.
    pub(super) fn kept_mount_point(&self, path: &Path, owner: u32) -> Result<(), ApplyError> {
        match self.kept_point(path, owner) {
            Err(ApplyError::Call { .. }) => Ok(()),
            other => other,
        }
    }

    /// Shows a directory at a second path, unless code has replaced it by something else.
    pub(super) fn show_at(&self, from: &Path, path: &Path) -> Result<(), ApplyError> {
        let (Some(dir), Some(target)) = (self.directory(from)?, self.directory(path)?) else { return Ok(()) };
        let tree = copy_of(dir.as_fd(), Path::new(""), from, OpenTreeFlags::AT_EMPTY_PATH)?;
        attach(&tree, &target, path)
    }

    /// Opens a directory in the new root. Returns `None` if there is something else, or nothing.
    fn directory(&self, path: &Path) -> Result<Option<OwnedFd>, ApplyError> {
        let dir = match self.target(path) {
            Err(ApplyError::Call { errno: Errno::NOENT | Errno::LOOP | Errno::NOTDIR, .. }) => return Ok(None),
            other => other?,
        };
        let found = rustix::fs::fstat(&dir).at(Syscall::Stat, path)?;
        Ok((FileType::from_raw_mode(found.st_mode) == FileType::Directory).then_some(dir))
    }

    /// Attaches a parked mount. It is already mapped, because the owner is the same as in its last use.
    pub(super) fn kept_mounted(&mut self, path: &Path) -> Result<(), ApplyError> {
        let missing = || ApplyError::Wrong { at: path.to_owned(), why: "there is no mount to take" };
        attach(&self.kept.take().ok_or_else(missing)?, &self.target(path)?, path)
    }

    /// Binds a directory whose owner is always the same, so it needs no id mapping.
    pub(super) fn kept_bind(&self, at: &Path, path: &Path, owner: u32) -> Result<(), ApplyError> {
        let tree = copy_of(CWD, at, at, OpenTreeFlags::AT_SYMLINK_NOFOLLOW)?;
        chown(&tree, (owner, owner), path)?;
        attach(&tree, &self.target(path)?, path)
    }

    /// Shows a directory of the host. See [`Self::show_shared`].
    pub(super) fn share(&mut self, shared: &SharedVolumeSpec, owner: Option<u32>) -> Result<(), ApplyError> {
        let dir = open_shared(&shared.host)?;
        if self.directory(&shared.inside)?.is_some() {
            return self.show_shared(&dir, shared, owner);
        }
        let message = format!(
            "the mount `{}` is left out: code has put something else in its place on the kept workspace",
            shared.inside.display()
        );
        self.report(&SetupEvent::Note { message }, &[])
    }

    /// Shows the directory for packages that is in a shared workspace. Without it, packages are on the sandbox's own
    /// volume.
    pub(super) fn share_packages(
        &mut self,
        workspace: &Path,
        shared: &SharedVolumeSpec,
        owner: Option<u32>,
    ) -> Result<(), ApplyError> {
        let opened = packages::open(&open_shared(workspace)?, owner.is_some()).at(Syscall::Open, &shared.host);
        let why = match opened.and_then(|dir| self.show_shared(&dir, shared, owner)) {
            Err(ApplyError::Call { errno, .. }) => errno.to_string(),
            Err(ApplyError::RootsDirectory { .. }) => "it belongs to root".to_owned(),
            other => return other,
        };
        let message = format!(
            "`{WORKSPACE}/{SHARED_PACKAGES}` cannot be used for packages ({why}): packages that are installed do not outlive \
             the sandbox (delete what is there, and the next sandbox has a new directory)"
        );
        self.report(&SetupEvent::Note { message }, &[])
    }

    /// Shows a directory of the host and the file systems that are mounted below it, except those of the Linux kernel:
    /// a `proc` of the host would show the host's processes.
    fn show_shared(&mut self, dir: &OwnedFd, shared: &SharedVolumeSpec, owner: Option<u32>) -> Result<(), ApplyError> {
        if is_kernel_file_system(dir) {
            return Err(ApplyError::Wrong { at: shared.host.clone(), why: "it shows the Linux kernel, not files" });
        }
        let below = self.mounted_below(&shared.host)?;
        let inside = |mounted: &Path| match mounted.strip_prefix(&shared.host) {
            Ok(name) => shared.inside.join(name),
            Err(_) => shared.inside.clone(),
        };
        let Some(owner) = owner else {
            // In the mount namespace of an ordinary user, file systems can only be shown together with those mounted
            // below them.
            self.share_tree(shared, dir)?;
            return below.iter().try_for_each(|mounted| self.cover_kernels(&inside(mounted)));
        };
        // The owner of the directory counts for everything that is mounted below it.
        let found = rustix::fs::fstat(dir).at(Syscall::Stat, &shared.host)?;
        let remap = match Remap::new(found.st_uid, found.st_gid, owner) {
            Ok(remap) => Some(remap),
            // World-readable files can be read without a mapping.
            Err(_) if shared.read_only => None,
            Err(_) => return Err(ApplyError::RootsDirectory { at: shared.host.clone() }),
        };
        self.share_one(shared, dir, &shared.inside, remap)?;
        for mounted in below {
            // What cannot be opened now is no longer there.
            let Ok(found) = open_without_symlinks(&mounted, OFlags::empty()) else { continue };
            if is_kernel_file_system(&found) {
                // Something has to be mounted there: otherwise code could remove the directory, and the Linux kernel
                // would then unmount what the host has mounted on it.
                self.cover(&found, &inside(&mounted))?;
            } else {
                self.share_one(shared, &found, &inside(&mounted), remap)?;
            }
        }
        Ok(())
    }

    fn share_tree(&self, shared: &SharedVolumeSpec, dir: &OwnedFd) -> Result<(), ApplyError> {
        let flags = OpenTreeFlags::AT_EMPTY_PATH | OpenTreeFlags::AT_RECURSIVE;
        let tree = copy_of(dir.as_fd(), Path::new(""), &shared.host, flags)?;
        sys::mount_setattr(tree.as_fd(), shared_attributes(shared), true).at(Syscall::MountSetattr, &shared.host)?;
        attach(&tree, &self.target(&shared.inside)?, &shared.inside)
    }

    fn share_one(
        &self,
        shared: &SharedVolumeSpec,
        dir: &OwnedFd,
        inside: &Path,
        remap: Option<Remap>,
    ) -> Result<(), ApplyError> {
        let tree = copy_of(dir.as_fd(), Path::new(""), &shared.host, OpenTreeFlags::AT_EMPTY_PATH)?;
        sys::mount_setattr(tree.as_fd(), shared_attributes(shared), false).at(Syscall::MountSetattr, &shared.host)?;
        if let Some(remap) = remap {
            self.show_as(&tree, shared, remap)?;
        }
        if inside == shared.inside {
            return attach(&tree, &self.target(inside)?, inside);
        }
        self.reached(inside)?.map_or(Ok(()), |target| attach(&tree, &target, inside))
    }

    /// Opens a place below a shared directory. Returns `None` if code that has the directory too has moved it away, if
    /// another mount covers it, or if the user may not look there.
    fn reached(&self, path: &Path) -> Result<Option<OwnedFd>, ApplyError> {
        match self.target(path) {
            Err(ApplyError::Call { errno: Errno::NOENT | Errno::LOOP | Errno::NOTDIR | Errno::ACCESS, .. }) => Ok(None),
            other => other.map(Some),
        }
    }

    /// Hides a file system of the Linux kernel below a shared directory, if one is shown there.
    fn cover_kernels(&self, path: &Path) -> Result<(), ApplyError> {
        match self.reached(path)? {
            Some(found) if is_kernel_file_system(&found) => self.cover(&found, path),
            _ => Ok(()),
        }
    }

    /// Shows something empty, of the kind of `found`, at a path below a shared directory.
    fn cover(&self, found: &OwnedFd, path: &Path) -> Result<(), ApplyError> {
        let Some(target) = self.reached(path)? else { return Ok(()) };
        let is_directory = |fd: &OwnedFd| -> Result<bool, ApplyError> {
            let found = rustix::fs::fstat(fd).at(Syscall::Stat, path)?;
            Ok(FileType::from_raw_mode(found.st_mode) == FileType::Directory)
        };
        let covers_directory = is_directory(found)?;
        if covers_directory != is_directory(&target)? {
            return Ok(());
        }
        let cover = if covers_directory {
            let options = [("size", Some("4096")), ("nr_inodes", Some("1")), ("mode", Some("0555"))];
            detached("tmpfs", &options, SEALED | sys::NOEXEC)?
        } else {
            let null = self.target(Path::new("/dev/null"))?;
            copy_of(null.as_fd(), Path::new(""), path, OpenTreeFlags::AT_EMPTY_PATH)?
        };
        attach(&cover, &target, path)
    }

    /// Maps the directory's owner to the sandbox: the owner's files belong to the sandbox inside, and files that the
    /// sandbox creates belong to that owner on the host.
    fn show_as(&self, tree: &OwnedFd, shared: &SharedVolumeSpec, remap: Remap) -> Result<(), ApplyError> {
        match sys::mount_idmap(tree.as_fd(), namespace_of(remap)?.as_fd()) {
            Err(Errno::INVAL | Errno::PERM | Errno::OPNOTSUPP) => {
                let inside = shared.inside.display();
                let message = format!(
                    "shared volume `{inside}`: its file system, or one mounted in it, cannot show files with other owners, so that \
                     a sandbox has there what everybody has (use ext4, xfs or btrfs)"
                );
                self.report(&SetupEvent::Note { message }, &[])
            }
            other => other.at(Syscall::MountSetattr, &shared.host),
        }
    }

    /// Unmounts a volume from its temporary mount point. The copies of its directories keep it alive.
    pub(super) fn hide(&self, volume: &str) -> Result<(), ApplyError> {
        let at = Path::new(volume);
        rustix::process::fchdir(self.root()?).at(Syscall::Chdir, at)?;
        rustix::mount::unmount(&volume[1..], UnmountFlags::DETACH | UnmountFlags::NOFOLLOW).at(Syscall::Umount, at)?;
        rustix::fs::unlinkat(self.root()?, &volume[1..], AtFlags::REMOVEDIR).at(Syscall::Umount, at)?;
        rustix::process::chdir("/").at(Syscall::Chdir, Path::new("/"))
    }
}

/// Opens a shared directory only once, so that a concurrent rename cannot change which directory is shown.
fn open_shared(host: &Path) -> Result<OwnedFd, ApplyError> {
    open_without_symlinks(host, OFlags::DIRECTORY).at(Syscall::Open, host)
}

/// Opens a path of the host. Symlinks are refused in every component: code may have put one into a shared directory.
fn open_without_symlinks(path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let how = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    rustix::fs::openat2(CWD, path, OFlags::PATH | OFlags::CLOEXEC | flags, Mode::empty(), how)
}

fn shared_attributes(shared: &SharedVolumeSpec) -> u64 {
    sys::NOSUID | sys::NODEV | if shared.read_only { sys::RDONLY } else { 0 }
}

/// Sets the mode explicitly, because `mkdir` applies the umask and ignores the sticky bit.
pub(super) fn set_mode(fd: &OwnedFd, mode: u32, shown: &Path) -> Result<(), ApplyError> {
    let proc = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(fd));
    rustix::fs::chmod(&proc, Mode::from_raw_mode(mode)).at(Syscall::Chmod, shown)
}

pub(super) fn chown(fd: &OwnedFd, (owner, group): (u32, u32), shown: &Path) -> Result<(), ApplyError> {
    let (uid, gid) = (Uid::from_raw(owner), Gid::from_raw(group));
    rustix::fs::chownat(fd, "", Some(uid), Some(gid), AtFlags::EMPTY_PATH).at(Syscall::Chown, shown)
}

/// Creates a user namespace with these id maps, for an idmapped mount. A process has to live in it while the maps are
/// written.
fn namespace_of(remap: Remap) -> Result<OwnedFd, ApplyError> {
    let (_, pidfd) = sys::spawn_child(libc::CLONE_NEWUSER, None, || sys::wait_until_killed())
        .at(Syscall::Clone, Path::new("user"))?;
    let made = write_remap(&pidfd, remap);
    rustix::process::pidfd_send_signal(&pidfd, Signal::KILL).at(Syscall::Clone, Path::new("user"))?;
    rustix::process::waitid(WaitId::PidFd(pidfd.as_fd()), WaitIdOptions::EXITED)
        .at(Syscall::Clone, Path::new("user"))?;
    made
}

fn write_remap(pidfd: &OwnedFd, remap: Remap) -> Result<OwnedFd, ApplyError> {
    // Read the pid that the host's `/proc` uses, which differs from the pid in this pid namespace.
    let info = PathBuf::from(format!("/proc/self/fdinfo/{}", std::os::fd::AsRawFd::as_raw_fd(pidfd)));
    let text = fs::read_to_string(&info).at(Syscall::Open, &info)?;
    let number = text.lines().find_map(|l| l.strip_prefix("Pid:")).map(str::trim);
    let number = number.ok_or(ApplyError::Wrong { at: info, why: "there is no number in it" })?;
    let proc = Path::new("/proc").join(number);
    write_existing(&proc.join("uid_map"), remap.uid_line().as_bytes())?;
    write_existing(&proc.join("gid_map"), remap.gid_line().as_bytes())?;
    let at = proc.join("ns/user");
    rustix::fs::open(&at, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).at(Syscall::Open, &at)
}
