//! This module shows the host's files to a sandbox on inodes that belong to the sandbox.
//!
//! A bind mount shows the host's inode, and inodes are what inotify watches and `flock` locks: sandboxes that share an
//! inode can watch and block each other and the host. An overlay without an upper layer shows the same files, backed by
//! the same pages of memory, on inodes that belong to this one mount. Where the Linux kernel allows it, one overlay
//! covers a whole file system, and the visible parts are cloned from it.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, StatxAttributes, StatxFlags};
use rustix::io::Errno;
use rustix::mount::OpenTreeFlags;

use crate::sys;

use super::mounts::{SEALED, attach, copy_of, detached, open_dir};
use super::volumes::set_mode;
use super::{ApplyError, ApplyState, At, SetupEvent, Syscall};

/// Temporary directory that holds the overlays and device nodes while parts of them are cloned.
const LAYERS: &str = "/.layers";

/// Maximum size of a file that is copied if no overlay can show it. In `/etc` this matters for the dynamic linker's
/// cache.
const MOST_COPIED: u64 = 256 << 10;

#[derive(Default)]
pub(super) struct Layers {
    /// Whether the tmpfs at [`LAYERS`] is mounted.
    mounted: bool,
    /// For each directory that was tried, its overlay or the error with which the Linux kernel refused it.
    over: BTreeMap<PathBuf, Result<OwnedFd, Errno>>,
    /// The host's mount points, read once.
    mount_points: Option<Vec<PathBuf>>,
    /// Paths that have to be shown on the host's inodes, with the reason.
    shared: Vec<(PathBuf, Errno)>,
}

impl ApplyState {
    /// Shows the host's `path`, and everything mounted below it, read-only at the same path of the new root.
    pub(super) fn layer(&mut self, path: &Path) -> Result<(), ApplyError> {
        let real = fs::canonicalize(path).at(Syscall::Open, path)?;
        let tree = match self.cut(&real)? {
            Ok(tree) => tree,
            Err(_) if is_small_file(&real) => return self.file(path, &fs::read(&real).at(Syscall::Open, path)?),
            Err(errno) => {
                self.layers.shared.push((path.to_owned(), errno));
                return self.bind_read_only(path);
            }
        };
        self.show(&tree, path)?;
        for mounted in self.mounted_below(&real)? {
            let inside = path.join(mounted.strip_prefix(&real).unwrap_or(&mounted));
            let tree = match self.cut(&mounted)? {
                Ok(tree) => tree,
                Err(errno) => {
                    self.layers.shared.push((inside.clone(), errno));
                    copy_of(CWD, &mounted, &mounted, OpenTreeFlags::empty())?
                }
            };
            sys::mount_setattr(tree.as_fd(), SEALED, false).at(Syscall::MountSetattr, &inside)?;
            attach(&tree, &self.target(&inside)?, &inside)?;
        }
        Ok(())
    }

    /// Clones `real` from the overlay over the highest possible directory of its file system. The mount namespace of an
    /// ordinary user refuses directories below which the host has mounted something, above all `/`; the next lower
    /// directory is then tried.
    fn cut(&mut self, real: &Path) -> Result<Result<OwnedFd, Errno>, ApplyError> {
        let top = self.mount_points()?.iter().filter(|at| real.starts_with(at)).max().cloned();
        let top = top.unwrap_or_else(|| "/".into());
        let lowest = if real.is_dir() { Some(real) } else { real.parent() };
        let mut dirs: Vec<&Path> =
            lowest.into_iter().flat_map(Path::ancestors).take_while(|dir| dir.starts_with(&top)).collect();
        dirs.reverse();
        let mut refused = Errno::NOTDIR;
        for dir in dirs {
            if !self.layers.over.contains_key(dir) {
                let made = self.overlay(dir)?;
                self.layers.over.insert(dir.to_owned(), made);
            }
            match &self.layers.over[dir] {
                Ok(overlay) => {
                    let below = real.strip_prefix(dir).unwrap_or(real);
                    let below = if below.as_os_str().is_empty() { Path::new(".") } else { below };
                    return copy_of(overlay.as_fd(), below, real, OpenTreeFlags::AT_SYMLINK_NOFOLLOW).map(Ok);
                }
                Err(errno) => refused = *errno,
            }
        }
        Ok(Err(refused))
    }

    /// Creates an overlay over one directory of the host. A refusal by the Linux kernel is returned as a value, not as
    /// a failure.
    fn overlay(&mut self, dir: &Path) -> Result<Result<OwnedFd, Errno>, ApplyError> {
        self.layers_mounted()?;
        let at = Path::new(LAYERS).join(self.layers.over.len().to_string());
        self.mkdir(&at, 0o700)?;
        // An overlay without an upper layer needs two lower layers. The second is the empty directory on which it is
        // mounted.
        let (lower, empty) = (open_dir(dir)?, self.target(&at)?);
        // Refer to the directories by descriptor number, because these options are visible inside in `mountinfo`.
        let layers = format!("/proc/self/fd/{}:/proc/self/fd/{}", lower.as_raw_fd(), empty.as_raw_fd());
        let options = [
            ("source", Some("system")),
            ("lowerdir", Some(layers.as_str())),
            // Ignore overlay attributes on the host's files, so that they cannot redirect anything.
            ("redirect_dir", Some("nofollow")),
            ("metacopy", Some("off")),
            ("index", Some("off")),
            // Use one device number for files and directories, as expected by programs that stay within one file
            // system.
            ("xino", Some("auto")),
        ];
        match detached("overlay", &options, SEALED) {
            Ok(overlay) => attach(&overlay, &empty, &at).map(|()| Ok(overlay)),
            Err(ApplyError::Call { errno, .. }) => Ok(Err(errno)),
            Err(other) => Err(other),
        }
    }

    /// Creates a device node. Returns `None` in a user namespace, which may not create one.
    pub(super) fn own_node(&mut self, path: &Path, (major, minor): (u32, u32)) -> Result<Option<OwnedFd>, ApplyError> {
        self.layers_mounted()?;
        let name = path.file_name().ok_or(ApplyError::Wrong { at: path.to_owned(), why: "it has no name" })?;
        let made = Path::new(LAYERS).join(name);
        let (dir, name) = self.parent(&made)?;
        let (mode, device) = (Mode::from_raw_mode(0o666), rustix::fs::makedev(major, minor));
        match rustix::fs::mknodat(&dir, name, FileType::CharacterDevice, mode, device) {
            Err(Errno::PERM) => return Ok(None),
            made => made.at(Syscall::Mknod, path)?,
        }
        let node = self.target(&made)?;
        set_mode(&node, 0o666, path)?;
        copy_of(node.as_fd(), Path::new(""), path, OpenTreeFlags::AT_EMPTY_PATH).map(Some)
    }

    fn layers_mounted(&mut self) -> Result<(), ApplyError> {
        if !self.layers.mounted {
            let at = Path::new(LAYERS);
            self.mkdir(at, 0o700)?;
            let options = [("size", Some("1048576")), ("nr_inodes", Some("1000")), ("mode", Some("0700"))];
            // Mounted without `nodev`, because device nodes are created here.
            self.new_mount("tmpfs", at, &options, sys::NOEXEC)?;
            self.layers.mounted = true;
        }
        Ok(())
    }

    /// Unmounts the overlays, which stay alive through the clones, and reports the paths that are shown on the host's
    /// inodes.
    pub(super) fn hide_layers(&mut self) -> Result<(), ApplyError> {
        let Layers { mounted, shared, .. } = std::mem::take(&mut self.layers);
        if mounted {
            self.hide(LAYERS)?;
        }
        let Some((_, errno)) = shared.first() else { return Ok(()) };
        let paths: Vec<_> = shared.iter().map(|(path, _)| format!("`{}`", path.display())).collect();
        let message = format!(
            "no overlay can be laid over {} ({errno}): sandboxes can watch and lock these files for each other and for the host",
            paths.join(", ")
        );
        self.report(&SetupEvent::Note { message }, &[])
    }

    fn mount_points(&mut self) -> Result<&[PathBuf], ApplyError> {
        let at = Path::new("/proc/self/mountinfo");
        if self.layers.mount_points.is_none() {
            self.layers.mount_points = Some(mount_points(&fs::read(at).at(Syscall::Open, at)?));
        }
        Ok(self.layers.mount_points.as_deref().unwrap_or_default())
    }

    /// Returns the visible mount points below `real`. Mount points covered by another mount are left out.
    pub(super) fn mounted_below(&mut self, real: &Path) -> Result<Vec<PathBuf>, ApplyError> {
        let below = |at: &&PathBuf| at.starts_with(real) && *at != real && is_mount_point(at);
        Ok(self.mount_points()?.iter().filter(below).cloned().collect())
    }
}

/// Returns whether a file is small enough to copy and readable by everybody. A copy does not preserve owner
/// permissions.
fn is_small_file(path: &Path) -> bool {
    let readable = |mode: u32| mode & 0o004 != 0;
    fs::metadata(path)
        .is_ok_and(|found| found.is_file() && found.len() <= MOST_COPIED && readable(found.permissions().mode()))
}

fn is_mount_point(path: &Path) -> bool {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    rustix::fs::statx(CWD, path, flags, StatxFlags::empty())
        .is_ok_and(|found| found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

/// Extracts the fifth field of each line, sorted so that parents come before their children.
fn mount_points(table: &[u8]) -> Vec<PathBuf> {
    let field = |line: &[u8]| line.split(|b| *b == b' ').nth(4).map(unescaped);
    let mut found: Vec<PathBuf> = table.split(|b| *b == b'\n').filter_map(field).collect();
    found.sort();
    found.dedup();
    found
}

/// Decodes a field in which blanks and similar characters are written as a backslash and three octal digits.
fn unescaped(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, after)) = rest.split_first() {
        let octal = after.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        let escaped = octal.filter(|_| *first == b'\\').and_then(|digits| u8::from_str_radix(digits, 8).ok());
        bytes.push(escaped.unwrap_or(*first));
        rest = if escaped.is_some() { &after[3..] } else { after };
    }
    OsString::from_vec(bytes).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_are_read_with_their_blanks_and_each_once() {
        let table = b"21 1 8:1 / / rw - ext4 /dev/sda1 rw\n22 21 0:5 / /usr/my\\040files rw - tmpfs t rw\n\
                      23 21 0:6 / /usr rw shared:1 - ext4 x rw\n24 23 0:7 / /usr rw - ext4 y rw\n";
        assert_eq!(mount_points(table), ["/", "/usr", "/usr/my files"].map(PathBuf::from));
    }
}
