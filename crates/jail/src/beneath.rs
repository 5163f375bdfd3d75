//! This module opens files that a sandbox can change: beneath a directory and never outside of it.
//!
//! The Linux kernel resolves every path once, against an open directory (`openat2` with `RESOLVE_BENEATH`), and the
//! opened file is the one that is used. No path is checked by name first, so there is no moment in which a symlink
//! could be inserted. Symlinks that stay beneath the directory are followed, except as the last component of a path
//! that is written. Only regular files are opened. The caller handles absolute paths: it strips the root's prefix or
//! refuses them.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{self, AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

#[derive(Debug, thiserror::Error)]
pub enum BeneathError {
    #[error("`{path}` does not exist", path = path.display())]
    NotFound { path: PathBuf },
    #[error("`{path}` {why}", path = path.display())]
    InvalidPath { path: PathBuf, why: &'static str },
    #[error("no space left for `{path}`", path = path.display())]
    NoSpace { path: PathBuf },
    #[error("no space left for `{path}`: the server's disk is full, although this volume is not", path = path.display())]
    DiskFull { path: PathBuf },
    #[error("`{path}` could not be written: its volume is damaged, and what was written last may be lost", path = path.display())]
    Damaged { path: PathBuf },
    #[error("`{path}` is on a file system that can only be read", path = path.display())]
    ReadOnly { path: PathBuf },
    #[error("cannot open `{path}`", path = path.display())]
    Io { path: PathBuf, source: io::Error },
}

pub(crate) type Result<T> = std::result::Result<T, BeneathError>;

/// An open directory, which gives access to everything beneath it.
#[derive(Debug)]
pub struct Root(OwnedFd);

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirEntry {
    /// Path relative to the listed directory.
    pub path: PathBuf,
    pub kind: EntryKind,
    pub size: u64,
    /// Modification time in seconds since 1970.
    pub modified: i64,
    /// Number of entries below a directory that [`Root::list_levels`] counted instead of listing them.
    pub below: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryKind {
    File,
    Directory,
    Symlink,
    Other,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listing {
    /// The first `max` entries in the requested order.
    pub entries: Vec<DirEntry>,
    /// Number of entries that were counted. The walk stops at a bound; see `Walk::is_over`.
    pub total: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SortOrder {
    Path,
    Newest,
}

/// Maximum number of entries that a walk visits, so that a maliciously large tree costs a bounded time.
pub(crate) const MAX_VISITED: u64 = 200_000;
/// Maximum length of the paths of these entries together. Long ones take time to sort, and memory until they are
/// visited.
const MAX_PATH_BYTES: u64 = 64 << 20;
/// Maximum number of components that the Linux kernel resolves to open the directories of a walk: each is opened from
/// the top, which takes a thousand times as long if it is a thousand levels deep.
const MAX_RESOLVED: u64 = 2_000_000;

const RESOLVE: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_MAGICLINKS);
const DIRECTORY: OFlags = OFlags::DIRECTORY.union(OFlags::RDONLY).union(OFlags::CLOEXEC);
/// Mode of a file that is not complete.
const PRIVATE: Mode = Mode::RUSR.union(Mode::WUSR);

impl Root {
    /// Opens the root itself. This path is trusted, because nothing in a sandbox can change it.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        fs::open(dir, DIRECTORY, Mode::empty()).map(Self).map_err(|e| error(dir, e))
    }

    /// Opens a regular file for reading. Refuses pipes, sockets and devices immediately instead of blocking on them.
    pub fn read_file(&self, path: impl AsRef<Path>) -> Result<File> {
        let path = checked(path.as_ref())?;
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let fd = self.resolve(path, flags, RESOLVE).map_err(|e| error(path, e))?;
        let stat = fs::fstat(&fd).map_err(|e| error(path, e))?;
        if kind(&stat) != FileType::RegularFile {
            return Err(invalid(path, "is not a regular file"));
        }
        Ok(File::from(fd))
    }

    /// Starts a file that appears under its name, complete, when it is committed. Creates missing parent directories.
    pub fn create_file(&self, path: impl AsRef<Path>) -> Result<NewFile> {
        let path = checked(path.as_ref())?;
        let name = path.file_name().ok_or_else(|| invalid(path, "names no file"))?;
        if path.as_os_str().as_bytes().ends_with(b"/") {
            return Err(invalid(path, "names a directory"));
        }
        let parent = self.make_dirs(path.parent().unwrap_or(Path::new(""))).map_err(|e| error(path, e))?;
        let mode = match fs::statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if kind(&stat) == FileType::RegularFile => Mode::from_raw_mode(stat.st_mode & 0o777),
            Ok(_) => return Err(invalid(path, "is there and is not a regular file")),
            Err(Errno::NOENT) => Mode::from_raw_mode(0o644),
            Err(e) => return Err(error(path, e)),
        };
        NewFile::begin(parent, name, path, mode).map_err(|e| error(path, e))
    }

    /// Lists everything below a directory, sorted by path. Symlinks are listed, not followed.
    pub fn list(&self, path: impl AsRef<Path>, max: usize) -> Result<Listing> {
        self.walk(path.as_ref(), max, SortOrder::Path)
    }

    /// Lists the regular files below a directory, most recently modified first.
    pub fn list_newest(&self, path: impl AsRef<Path>, max: usize) -> Result<Listing> {
        self.walk(path.as_ref(), max, SortOrder::Newest)
    }

    /// Lists one directory without what is below its subdirectories, sorted by name.
    pub fn list_one(&self, path: impl AsRef<Path>, max: usize) -> Result<Listing> {
        let path = path.as_ref();
        self.walk_at(path, max, SortOrder::Path)?.run_once().map_err(|e| error(path, e))
    }

    /// Lists the entries of `depth` levels, sorted by path. What is below them is counted, and so is the content of
    /// directories with one of the names `closed`.
    pub fn list_levels(&self, path: impl AsRef<Path>, max: usize, depth: u32, closed: &[&str]) -> Result<Listing> {
        let path = path.as_ref();
        self.walk_at(path, max, SortOrder::Path)?.run_levels(depth as usize, closed).map_err(|e| error(path, e))
    }

    fn walk(&self, path: &Path, max: usize, order: SortOrder) -> Result<Listing> {
        self.walk_at(path, max, order)?.run().map_err(|e| error(path, e))
    }

    fn walk_at(&self, path: &Path, max: usize, order: SortOrder) -> Result<Walk> {
        let start = if path.as_os_str().is_empty() { Path::new(".") } else { checked(path)? };
        let top = self.resolve(start, DIRECTORY, RESOLVE).map_err(|e| error(path, e))?;
        Ok(Walk {
            top: Root(top),
            max,
            order,
            visited: 0,
            path_bytes: 0,
            resolved: 0,
            total: 0,
            entries: BTreeMap::new(),
        })
    }

    fn resolve(&self, path: &Path, flags: OFlags, resolve: ResolveFlags) -> rustix::io::Result<OwnedFd> {
        // EAGAIN means that something was renamed during the resolution. Code that renames all the time gets an error.
        for _ in 0..64 {
            match fs::openat2(&self.0, path, flags, Mode::empty(), resolve) {
                Err(Errno::AGAIN | Errno::INTR) => {}
                done => return done,
            }
        }
        Err(Errno::AGAIN)
    }

    /// Opens a directory and creates its missing components. Each component is created in its open parent, where its
    /// name cannot lead elsewhere, and then opened from the root again, so that the Linux kernel keeps it beneath the
    /// root.
    fn make_dirs(&self, path: &Path) -> rustix::io::Result<OwnedFd> {
        let mut parent = self.resolve(Path::new("."), DIRECTORY, RESOLVE)?;
        let mut prefix = PathBuf::new();
        for part in path.components() {
            let Component::Normal(name) = part else { continue };
            prefix.push(name);
            parent = match self.resolve(&prefix, DIRECTORY, RESOLVE) {
                Err(Errno::NOENT) => {
                    match fs::mkdirat(&parent, name, Mode::from_raw_mode(0o755)) {
                        Ok(()) => {}
                        // Another process created it first, or the name is a dangling symlink. Opening it distinguishes
                        // the two.
                        Err(Errno::EXIST) => {}
                        Err(e) => return Err(e),
                    }
                    self.resolve(&prefix, DIRECTORY, RESOLVE)?
                }
                opened => opened?,
            };
        }
        Ok(parent)
    }
}

impl From<OwnedFd> for Root {
    fn from(directory: OwnedFd) -> Self {
        Self(directory)
    }
}

impl From<Root> for OwnedFd {
    fn from(root: Root) -> Self {
        root.0
    }
}

impl AsFd for Root {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A file that does not have its final name yet. Dropping it without a commit removes it.
#[derive(Debug)]
pub struct NewFile {
    file: File,
    parent: OwnedFd,
    /// Name until the commit, on a file system that has no files without a name. Elsewhere the Linux kernel removes an
    /// abandoned file, even if this process is killed.
    temporary: Option<String>,
    path: PathBuf,
}

impl NewFile {
    fn begin(parent: OwnedFd, name: &OsStr, path: &Path, mode: Mode) -> rustix::io::Result<Self> {
        if name.len() > 255 {
            return Err(Errno::NAMETOOLONG);
        }
        let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
        let (file, temporary) = match fs::openat(&parent, ".", flags, PRIVATE) {
            Ok(file) => (File::from(file), None),
            Err(_) => create_temporary(&parent).map(|(file, name)| (file, Some(name)))?,
        };
        let new = Self { file, parent, temporary, path: path.to_owned() };
        fs::fchmod(&new.file, mode)?;
        Ok(new)
    }

    /// Gives the file its name and replaces an existing file. A symlink of that name is replaced, never followed.
    /// Content and name are synced before this returns, because the Linux kernel can lose data that it has only
    /// accepted.
    pub fn commit(mut self) -> Result<()> {
        self.publish().map_err(|e| self.write_error(e))
    }

    fn publish(&mut self) -> rustix::io::Result<()> {
        fs::fdatasync(&self.file)?;
        if self.temporary.is_none() && self.link().is_err() {
            self.copy()?;
        }
        let Some(temporary) = &self.temporary else { return Err(Errno::NOENT) };
        fs::renameat(&self.parent, temporary, &self.parent, self.path.file_name().unwrap_or_default())?;
        self.temporary = None;
        fs::fsync(&self.parent)
    }

    /// Gives a file without a name a temporary one, because a link cannot replace a file.
    fn link(&mut self) -> rustix::io::Result<()> {
        let (name, open) = (temporary_name()?, format!("/proc/self/fd/{}", self.file.as_raw_fd()));
        fs::linkat(fs::CWD, open, &self.parent, &name, AtFlags::SYMLINK_FOLLOW)?;
        self.temporary = Some(name);
        Ok(())
    }

    /// Replaces a file without a name, which the file system refuses to link, by one with a temporary name.
    fn copy(&mut self) -> rustix::io::Result<()> {
        let (mut copy, name) = create_temporary(&self.parent)?;
        self.temporary = Some(name);
        fs::fchmod(&copy, Mode::from_raw_mode(fs::fstat(&self.file)?.st_mode & 0o777))?;
        let copied = self.file.rewind().and_then(|()| io::copy(&mut self.file, &mut copy));
        copied.map_err(|failed| Errno::from_io_error(&failed).unwrap_or(Errno::IO))?;
        fs::fdatasync(&copy)
    }

    /// Converts the error of a failed write to an error of this module.
    pub fn explain(&self, failed: &io::Error) -> BeneathError {
        self.write_error(Errno::from_io_error(failed).unwrap_or(Errno::IO))
    }

    fn write_error(&self, errno: Errno) -> BeneathError {
        let path = || self.path.clone();
        match errno {
            // The volume has free blocks that it may not use, so the disk below it is full.
            Errno::NOSPC
                if fs::fstatvfs(&self.parent).is_ok_and(|v| v.f_bavail == 0 && v.f_bfree > v.f_blocks / 16) =>
            {
                BeneathError::DiskFull { path: path() }
            }
            // A file was begun there, so the file system has become read-only after an error.
            Errno::IO | Errno::ROFS => BeneathError::Damaged { path: path() },
            other => error(&self.path, other),
        }
    }
}

impl Write for NewFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary {
            // A failure cannot be handled here, and nothing depends on it.
            let _ = fs::unlinkat(&self.parent, temporary, AtFlags::empty());
        }
    }
}

fn create_temporary(parent: &OwnedFd) -> rustix::io::Result<(File, String)> {
    let name = temporary_name()?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok((fs::openat(parent, &name, flags, PRIVATE)?.into(), name))
}

/// Returns a random name, so that sandboxed code cannot claim it beforehand.
fn temporary_name() -> rustix::io::Result<String> {
    let mut random = [0; 8];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
    Ok(format!(".sandpool-{:016x}", u64::from_ne_bytes(random)))
}

/// The state of a directory walk. Only one directory is open at a time and each is opened from the top, so depth costs
/// no descriptors.
struct Walk {
    top: Root,
    max: usize,
    order: SortOrder,
    visited: u64,
    /// Length of the paths of the visited entries.
    path_bytes: u64,
    /// Number of components of the directories that were opened.
    resolved: u64,
    total: u64,
    /// Entries in output order: by time for [`SortOrder::Newest`], then by path.
    entries: BTreeMap<(Reverse<(i64, i64)>, PathBuf), DirEntry>,
}

impl Walk {
    /// Returns whether a bound is reached.
    fn is_over(&self) -> bool {
        self.visited >= MAX_VISITED || self.path_bytes >= MAX_PATH_BYTES || self.resolved >= MAX_RESOLVED
    }

    fn visit_top(&mut self) -> rustix::io::Result<Vec<PathBuf>> {
        self.visit(Path::new("."), self.top.0.try_clone().map_err(|_| Errno::MFILE)?)
    }

    fn run_once(mut self) -> rustix::io::Result<Listing> {
        self.visit_top()?;
        Ok(self.listing())
    }

    fn run(mut self) -> rustix::io::Result<Listing> {
        let mut waiting = self.visit_top()?;
        while let Some(dir) = waiting.pop() {
            if self.is_over() {
                break;
            }
            waiting.extend(self.visit_dir(&dir));
        }
        Ok(self.listing())
    }

    /// Lists first, then counts, so that a large directory that is only counted takes no room from others.
    fn run_levels(mut self, depth: usize, closed: &[&str]) -> rustix::io::Result<Listing> {
        let is_closed = |dir: &Path| {
            let name = dir.file_name().unwrap_or_default();
            dir.components().count() >= depth || closed.iter().any(|closed| name == *closed)
        };
        let (mut counted, mut waiting): (Vec<_>, Vec<_>) =
            self.visit_top()?.into_iter().partition(|dir| is_closed(dir));
        while let Some(dir) = waiting.pop().filter(|_| !self.is_over()) {
            let (closed, open): (Vec<_>, Vec<_>) = self.visit_dir(&dir).into_iter().partition(|dir| is_closed(dir));
            counted.extend(closed);
            waiting.extend(open);
        }
        let (entries, total) = (std::mem::take(&mut self.entries), self.total);
        self.max = 0;
        let mut below = BTreeMap::new();
        for top in counted {
            let before = self.visited;
            let mut waiting = vec![top.clone()];
            while let Some(dir) = waiting.pop().filter(|_| !self.is_over()) {
                waiting.extend(self.visit_dir(&dir));
            }
            below.insert(top, self.visited - before);
        }
        let with_count = |entry: DirEntry| DirEntry { below: below.get(&entry.path).copied(), ..entry };
        Ok(Listing { entries: entries.into_values().map(with_count).collect(), total })
    }

    /// Records the entries of a directory and returns its subdirectories. A directory that was removed or replaced, is
    /// unreadable, or is too deep for a path has none.
    fn visit_dir(&mut self, dir: &Path) -> Vec<PathBuf> {
        self.resolved += dir.components().count() as u64;
        let opened = self.top.resolve(dir, DIRECTORY, RESOLVE | ResolveFlags::NO_SYMLINKS);
        opened.and_then(|fd| self.visit(dir, fd)).unwrap_or_default()
    }

    fn listing(self) -> Listing {
        Listing { entries: self.entries.into_values().collect(), total: self.total }
    }

    /// Records the entries of one directory and returns its subdirectories.
    fn visit(&mut self, dir: &Path, fd: OwnedFd) -> rustix::io::Result<Vec<PathBuf>> {
        let mut below = Vec::new();
        for item in Dir::read_from(&fd)? {
            let item = item?;
            let name = OsStr::from_bytes(item.file_name().to_bytes());
            if name == "." || name == ".." {
                continue;
            }
            // The entry was removed in the meantime.
            let Ok(stat) = fs::statat(&fd, name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            let path = if dir == Path::new(".") { PathBuf::from(name) } else { dir.join(name) };
            if kind(&stat) == FileType::Directory {
                below.push(path.clone());
            }
            self.visited += 1;
            self.path_bytes += path.as_os_str().len() as u64;
            self.record(path, &stat);
            if self.is_over() {
                break;
            }
        }
        Ok(below)
    }

    fn record(&mut self, path: PathBuf, stat: &Stat) {
        let kind = match kind(stat) {
            FileType::RegularFile => EntryKind::File,
            FileType::Directory => EntryKind::Directory,
            FileType::Symlink => EntryKind::Symlink,
            _ => EntryKind::Other,
        };
        let time = match self.order {
            SortOrder::Path => (0, 0),
            SortOrder::Newest if kind == EntryKind::File => (stat.st_mtime, stat.st_mtime_nsec as i64),
            SortOrder::Newest => return,
        };
        self.total += 1;
        let size = if kind == EntryKind::File { stat.st_size as u64 } else { 0 };
        self.entries
            .insert((Reverse(time), path.clone()), DirEntry { path, kind, size, modified: stat.st_mtime, below: None });
        if self.entries.len() > self.max {
            self.entries.pop_last();
        }
    }
}

fn kind(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

/// Rejects paths that are invalid whatever is on the disk. `..` is refused even if it would stay beneath the root:
/// after a symlink it does not lead to the directory that the path suggests.
fn checked(path: &Path) -> Result<&Path> {
    if path.as_os_str().is_empty() {
        return Err(invalid(path, "is empty"));
    }
    if path.as_os_str().as_bytes().contains(&0) {
        return Err(invalid(path, "contains a NUL"));
    }
    for part in path.components() {
        match part {
            Component::Normal(_) | Component::CurDir => {}
            Component::ParentDir => return Err(invalid(path, "contains `..`")),
            Component::RootDir | Component::Prefix(_) => return Err(invalid(path, "is absolute")),
        }
    }
    Ok(path)
}

fn invalid(path: &Path, why: &'static str) -> BeneathError {
    BeneathError::InvalidPath { path: path.to_owned(), why }
}

fn error(path: &Path, errno: Errno) -> BeneathError {
    match errno {
        Errno::NOENT => BeneathError::NotFound { path: path.to_owned() },
        Errno::XDEV => invalid(path, "leads out"),
        Errno::LOOP => invalid(path, "is a link that cannot be followed"),
        Errno::NOTDIR => invalid(path, "goes through something that is not a directory"),
        Errno::ISDIR => invalid(path, "is a directory"),
        Errno::NAMETOOLONG => invalid(path, "is too long"),
        Errno::NXIO | Errno::NODEV => invalid(path, "is not a regular file"),
        Errno::INVAL | Errno::ILSEQ => invalid(path, "is not a name this file system can hold"),
        Errno::ACCESS | Errno::PERM => invalid(path, "is there, but its permissions do not allow this"),
        Errno::ROFS => BeneathError::ReadOnly { path: path.to_owned() },
        Errno::NOSPC | Errno::DQUOT => BeneathError::NoSpace { path: path.to_owned() },
        other => BeneathError::Io { path: path.to_owned(), source: other.into() },
    }
}

#[cfg(test)]
mod tests;
