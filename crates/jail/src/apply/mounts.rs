//! This module applies the steps that build the tree of mounts.
//!
//! All mounts are handled through descriptors: a mount is created or copied detached, receives its attributes, and is
//! only then attached to a target that was opened beneath the new root without following symlinks. A mounted file
//! system therefore cannot redirect a later step.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::{fs, io};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags,
};

use crate::sys;

use super::{ApplyError, ApplyState, At, Syscall};

/// Mount attributes of every part of the host that a sandbox sees.
pub(super) const SEALED: u64 = sys::RDONLY | sys::NOSUID | sys::NODEV;

impl ApplyState {
    pub(super) fn root(&self) -> Result<BorrowedFd<'_>, ApplyError> {
        self.root.as_ref().map(AsFd::as_fd).ok_or(ApplyError::Wrong { at: "/".into(), why: "there is no new root yet" })
    }

    /// Opens `path` in the new root and refuses symlinks in every component.
    pub(super) fn target(&self, path: &Path) -> Result<OwnedFd, ApplyError> {
        let below = path.strip_prefix("/").unwrap_or(path);
        let below = if below.as_os_str().is_empty() { Path::new(".") } else { below };
        let how = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let flags = OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        rustix::fs::openat2(self.root()?, below, flags, Mode::empty(), how).at(Syscall::Open, path)
    }

    pub(super) fn parent<'p>(&self, path: &'p Path) -> Result<(OwnedFd, &'p std::ffi::OsStr), ApplyError> {
        let wrong = || ApplyError::Wrong { at: path.to_owned(), why: "it has no parent" };
        Ok((self.target(path.parent().ok_or_else(wrong)?)?, path.file_name().ok_or_else(wrong)?))
    }

    pub(super) fn mkdir(&self, path: &Path, mode: u32) -> Result<(), ApplyError> {
        let (parent, name) = self.parent(path)?;
        rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(mode)).at(Syscall::Mkdir, path)
    }

    pub(super) fn file(&self, path: &Path, content: &[u8]) -> Result<(), ApplyError> {
        let (parent, name) = self.parent(path)?;
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(parent, name, flags, Mode::from_raw_mode(0o444)).at(Syscall::Open, path)?;
        io::Write::write_all(&mut fs::File::from(fd), content).at(Syscall::Write, path)
    }

    pub(super) fn new_root(&mut self, at: &Path, bytes: u64, inodes: u64) -> Result<(), ApplyError> {
        let root = detached_tmpfs(bytes, inodes, "0755")?;
        attach(&root, &open_dir(at)?, at)?;
        self.root = Some(root);
        Ok(())
    }

    pub(super) fn new_mount(
        &self,
        kind: &str,
        path: &Path,
        options: &[(&str, Option<&str>)],
        extra: u64,
    ) -> Result<(), ApplyError> {
        let mount = detached(kind, options, sys::NOSUID | extra)?;
        attach(&mount, &self.target(path)?, path)
    }

    pub(super) fn tmpfs(&self, path: &Path, bytes: u64, inodes: u64, mode: &str) -> Result<(), ApplyError> {
        attach(&detached_tmpfs(bytes, inodes, mode)?, &self.target(path)?, path)
    }

    pub(super) fn bind_read_only(&self, path: &Path) -> Result<(), ApplyError> {
        let flags = OpenTreeFlags::AT_RECURSIVE;
        let tree = copy_of(CWD, path, path, flags)?;
        self.show(&tree, path)
    }

    /// Attaches a tree of mounts, read-only, at a path that does not exist yet.
    pub(super) fn show(&self, tree: &OwnedFd, path: &Path) -> Result<(), ApplyError> {
        sys::mount_setattr(tree.as_fd(), SEALED, true).at(Syscall::MountSetattr, path)?;
        let found = rustix::fs::fstat(tree).at(Syscall::Stat, path)?;
        if FileType::from_raw_mode(found.st_mode) == FileType::Directory {
            self.mkdir(path, 0o755)?;
        } else {
            self.file(path, b"")?;
        }
        attach(tree, &self.target(path)?, path)
    }

    /// Mounts a newly created device node, or the host's node if none can be created. The device number must match.
    pub(super) fn device(&mut self, path: &Path, number: (u32, u32)) -> Result<(), ApplyError> {
        let tree = match self.own_node(path, number)? {
            Some(tree) => tree,
            None => copy_of(CWD, path, path, OpenTreeFlags::empty())?,
        };
        check_device(&tree, number, path)?;
        sys::mount_setattr(tree.as_fd(), sys::RDONLY | sys::NOSUID | sys::NOEXEC, false)
            .at(Syscall::MountSetattr, path)?;
        self.file(path, b"")?;
        attach(&tree, &self.target(path)?, path)
    }

    pub(super) fn proc(&mut self, path: &Path) -> Result<(), ApplyError> {
        self.new_mount("proc", path, &[], sys::NODEV | sys::NOEXEC)?;
        let target = self.target(path)?;
        let found = rustix::fs::fstatfs(&target).at(Syscall::Fstatfs, path)?;
        if found.f_type != rustix::fs::PROC_SUPER_MAGIC {
            return Err(ApplyError::Wrong { at: path.to_owned(), why: "no proc file system" });
        }
        // Opened before anything covers `/proc`: a descriptor from this mount stays writable later.
        self.user_limits = Some(self.target(&path.join("sys/user"))?);
        Ok(())
    }

    /// Covers a file with the sandbox's `/dev/null`, and verifies the result by opening the path again.
    pub(super) fn mask_file(&mut self, path: &Path) -> Result<(), ApplyError> {
        let Some(target) = self.proc_target(path)? else { return Ok(()) };
        let null = match self.null.take() {
            Some(null) => null,
            None => {
                let null = self.target(Path::new("/dev/null"))?;
                check_device(&null, (1, 3), path)?;
                null
            }
        };
        let copy = copy_of(null.as_fd(), Path::new(""), path, OpenTreeFlags::AT_EMPTY_PATH)?;
        self.null = Some(null);
        attach(&copy, &target, path)?;
        check_device(&self.target(path)?, (1, 3), path)
    }

    /// Covers a directory with an empty read-only directory.
    pub(super) fn mask_dir(&mut self, path: &Path) -> Result<(), ApplyError> {
        let Some(target) = self.proc_target(path)? else { return Ok(()) };
        let empty = match self.empty.take() {
            Some(empty) => empty,
            None => {
                let at = Path::new("/.empty");
                self.mkdir(at, 0o555)?;
                self.target(at)?
            }
        };
        let tree = copy_of(empty.as_fd(), Path::new(""), path, OpenTreeFlags::AT_EMPTY_PATH)?;
        self.empty = Some(empty);
        sys::mount_setattr(tree.as_fd(), sys::RDONLY | sys::NOEXEC, false).at(Syscall::MountSetattr, path)?;
        attach(&tree, &target, path)
    }

    /// Covers a file with a new one that cannot be reached under any other name.
    pub(super) fn proc_file(&self, path: &Path, content: &[u8]) -> Result<(), ApplyError> {
        let Some(target) = self.proc_target(path)? else { return Ok(()) };
        let at = Path::new("/.proc-file");
        self.file(at, content)?;
        let tree = copy_of(self.target(at)?.as_fd(), Path::new(""), path, OpenTreeFlags::AT_EMPTY_PATH)?;
        sys::mount_setattr(tree.as_fd(), SEALED | sys::NOEXEC, false).at(Syscall::MountSetattr, path)?;
        attach(&tree, &target, path)?;
        // Unlink only after attaching, because an unlinked file cannot be attached.
        let (root, name) = self.parent(at)?;
        rustix::fs::unlinkat(root, name, AtFlags::empty()).at(Syscall::Unlink, path)
    }

    pub(super) fn read_only(&self, path: &Path) -> Result<(), ApplyError> {
        let Some(target) = self.proc_target(path)? else { return Ok(()) };
        let flags = OpenTreeFlags::AT_EMPTY_PATH | OpenTreeFlags::AT_RECURSIVE;
        let tree = copy_of(target.as_fd(), Path::new(""), path, flags)?;
        sys::mount_setattr(tree.as_fd(), sys::RDONLY, true).at(Syscall::MountSetattr, path)?;
        attach(&tree, &target, path)
    }

    /// Opens a path in the sandbox's `/proc`. Returns `None` if this Linux kernel or this namespace does not have it.
    fn proc_target(&self, path: &Path) -> Result<Option<OwnedFd>, ApplyError> {
        let target = match self.target(path) {
            Err(ApplyError::Call { errno: Errno::NOENT, .. }) => return Ok(None),
            other => other?,
        };
        let found = rustix::fs::fstatfs(&target).at(Syscall::Fstatfs, path)?;
        if found.f_type != rustix::fs::PROC_SUPER_MAGIC {
            return Err(ApplyError::Wrong { at: path.to_owned(), why: "it does not lie in a proc file system" });
        }
        Ok(Some(target))
    }

    pub(super) fn pivot_root(&mut self) -> Result<(), ApplyError> {
        let root = self.root.take().ok_or(ApplyError::Wrong { at: "/".into(), why: "there is no new root yet" })?;
        (self.null, self.empty) = (None, None);
        let here = Path::new("/");
        rustix::process::fchdir(&root).at(Syscall::Chdir, here)?;
        // Both roots are now mounted at the same path. The old root is on top and is unmounted.
        rustix::process::pivot_root(".", ".").at(Syscall::PivotRoot, here)?;
        rustix::mount::unmount(".", UnmountFlags::DETACH).at(Syscall::Umount, here)?;
        rustix::process::chdir("/").at(Syscall::Chdir, here)
    }
}

pub(super) fn private_mounts() -> Result<(), ApplyError> {
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", private).at(Syscall::MountPrivate, Path::new("/"))
}

/// Mounts a tmpfs on a directory for the launcher itself.
pub(crate) fn mount_tmpfs(at: &Path, bytes: u64, inodes: u64) -> Result<(), ApplyError> {
    attach(&detached_tmpfs(bytes, inodes, "0755")?, &open_dir(at)?, at)
}

fn detached_tmpfs(bytes: u64, inodes: u64, mode: &str) -> Result<OwnedFd, ApplyError> {
    let (bytes, inodes) = (bytes.to_string(), inodes.to_string());
    let options = [("size", Some(bytes.as_str())), ("nr_inodes", Some(inodes.as_str())), ("mode", Some(mode))];
    detached("tmpfs", &options, sys::NOSUID | sys::NODEV)
}

pub(super) fn open_dir(path: &Path) -> Result<OwnedFd, ApplyError> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    rustix::fs::open(path, flags, Mode::empty()).at(Syscall::Open, path)
}

/// Creates a file system that is attached nowhere.
pub(super) fn detached(kind: &str, options: &[(&str, Option<&str>)], attributes: u64) -> Result<OwnedFd, ApplyError> {
    let at = Path::new(kind);
    let fs = rustix::mount::fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC).at(Syscall::Fsopen, at)?;
    for (key, value) in options {
        let set = match value {
            Some(value) => rustix::mount::fsconfig_set_string(&fs, *key, *value),
            None => rustix::mount::fsconfig_set_flag(&fs, *key),
        };
        set.at(Syscall::Fsconfig, Path::new(key))?;
    }
    rustix::mount::fsconfig_create(&fs).at(Syscall::Fsconfig, at)?;
    let attributes = MountAttrFlags::from_bits_retain(attributes as u32);
    rustix::mount::fsmount(&fs, FsMountFlags::FSMOUNT_CLOEXEC, attributes).at(Syscall::Fsmount, at)
}

/// Creates a detached copy of the mount at `path`.
pub(super) fn copy_of(
    dir: BorrowedFd<'_>,
    path: &Path,
    shown: &Path,
    flags: OpenTreeFlags,
) -> Result<OwnedFd, ApplyError> {
    let flags = flags | OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    rustix::mount::open_tree(dir, path, flags).at(Syscall::OpenTree, shown)
}

pub(super) fn attach(mount: &OwnedFd, target: &OwnedFd, shown: &Path) -> Result<(), ApplyError> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    rustix::mount::move_mount(mount, "", target, "", flags).at(Syscall::MoveMount, shown)
}

fn check_device(fd: &OwnedFd, number: (u32, u32), at: &Path) -> Result<(), ApplyError> {
    let found = rustix::fs::fstat(fd).at(Syscall::Stat, at)?;
    let is_char = FileType::from_raw_mode(found.st_mode) == FileType::CharacterDevice;
    if !is_char || (rustix::fs::major(found.st_rdev), rustix::fs::minor(found.st_rdev)) != number {
        return Err(ApplyError::Wrong { at: at.to_owned(), why: "it is a different device than its name says" });
    }
    Ok(())
}
