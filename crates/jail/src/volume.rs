//! This module makes the volumes of a sandbox in root mode: an ext4 file system in a sparse file, copied from a
//! template that is made once per size.
//!
//! A kept image is locked through the same open file description that its loop device holds: the lock ends when the
//! device releases the image, not when a process ends, so that an image is never mounted twice, whichever process dies
//! first.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags, SeekFrom, Timespec, Timestamps, UTIME_NOW, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::sys::loop_device;

#[derive(Debug, thiserror::Error)]
pub(crate) enum VolumeError {
    #[error("template `{}`: {source}", path.display())]
    Template { path: PathBuf, source: io::Error },
    #[error("mkfs.ext4: {0}")]
    Mkfs(String),
    #[error("copying to `{}`: {source}", path.display())]
    Copy { path: PathBuf, source: io::Error },
    #[error("loop device `{path}`: {errno}")]
    Loop { path: String, errno: Errno },
    #[error("image `{}`: {errno}", path.display())]
    Image { path: PathBuf, errno: Errno },
    #[error("another sandbox has it")]
    InUse,
    #[error("it was discarded a moment ago")]
    Discarded,
}

/// The purpose of a file system in an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// The file system ends with its sandbox.
    Own,
    /// The file system has to survive a crash.
    Kept,
}

impl Purpose {
    fn name(self) -> &'static str {
        match self {
            Self::Own => "ext4",
            Self::Kept => "ext4-kept",
        }
    }

    fn options(self) -> &'static [&'static str] {
        match self {
            // There is no journal, because nothing in this file system has to survive a crash.
            Self::Own => {
                &["-O", "^has_journal,^resize_inode,^metadata_csum,^uninit_bg", "-E", "nodiscard,root_owner=0:0"]
            }
            // The journal has the smallest possible size. Tables are not filled with zeros, because they are holes in a
            // new file.
            Self::Kept => &[
                "-O",
                "has_journal,^resize_inode",
                "-J",
                "size=4",
                "-E",
                "nodiscard,root_owner=0:0,lazy_itable_init=1,lazy_journal_init=1",
            ],
        }
    }
}

/// Minimum size of a kept volume. A smaller one has hardly any room beside the journal.
pub(crate) const SMALLEST_KEPT: u64 = 16 << 20;

/// How long to wait for an image whose sandbox is about to end. The sandboxes of a launcher that died end shortly after
/// it.
const PATIENCE: Duration = Duration::from_secs(3);
/// How long to wait for an image that is to be removed. A loop device releases its image a few clock ticks after it has
/// reported so, and another launcher that has parked the image does so when it notices that we opened it.
const MOMENT: Duration = Duration::from_millis(250);
/// Interval at which a waiting process opens the image again. A launcher that has parked the image notices when it is
/// opened, but it ignores opens that happened while a sandbox still had the image.
const KNOCK: Duration = Duration::from_millis(30);

/// Returns the path of `mkfs.ext4`, if it is installed. The launcher has no search path.
pub(crate) fn mkfs() -> Option<PathBuf> {
    ["/usr/sbin", "/sbin", "/usr/bin", "/bin", "/usr/local/sbin"]
        .iter()
        .map(|dir| Path::new(dir).join("mkfs.ext4"))
        .find(|path| path.exists())
}

/// Returns the template for this size, and makes it if it does not exist. A rename puts the template in place, so it is
/// never incomplete.
pub(crate) fn template(dir: &Path, purpose: Purpose, bytes: u64, inodes: u64) -> Result<PathBuf, VolumeError> {
    let name = format!("{}-{bytes}-{inodes}", purpose.name());
    let path = dir.join(format!("{name}.img"));
    if path.exists() {
        return Ok(path);
    }
    let failed = |source| VolumeError::Template { path: path.clone(), source };
    fs::create_dir_all(dir).map_err(failed)?;
    let half = dir.join(format!(".{name}-{}", std::process::id()));
    let made = make(&half, purpose, bytes, inodes).and_then(|()| fs::rename(&half, &path).map_err(failed));
    if made.is_err() {
        let _ = fs::remove_file(&half);
    }
    made.map(|()| path)
}

#[allow(
    clippy::disallowed_methods,
    reason = "the one helper program of a sandbox's creation, with a fixed path and no input"
)]
fn make(path: &Path, purpose: Purpose, bytes: u64, inodes: u64) -> Result<(), VolumeError> {
    let failed = |source| VolumeError::Template { path: path.to_owned(), source };
    let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path).map_err(failed)?;
    file.set_len(bytes).map_err(failed)?;
    let mkfs = mkfs().ok_or_else(|| VolumeError::Mkfs("not installed".into()))?;
    let output = Command::new(mkfs)
        // No table is reserved for growth, because the file system never grows (`^resize_inode` in the options).
        .args(["-q", "-F", "-m", "0", "-b", "4096", "-N", &inodes.to_string()])
        .args(purpose.options())
        .arg(path)
        .env_clear()
        .stdin(Stdio::null())
        .output()
        .map_err(|e| VolumeError::Mkfs(e.to_string()))?;
    if !output.status.success() {
        return Err(VolumeError::Mkfs(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
    }
    Ok(())
}

/// Copies a sparse file without its holes, and shares the blocks if the file system supports that.
pub(crate) fn copy_sparse(from: &Path, to: &Path) -> Result<(), VolumeError> {
    copy(from, to).map_err(|source| VolumeError::Copy { path: to.to_owned(), source })
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let source = File::open(from)?;
    let target = OpenOptions::new().write(true).read(true).create_new(true).mode(0o600).open(to)?;
    if rustix::fs::ioctl_ficlone(&target, &source).is_ok() {
        return Ok(());
    }
    let length = source.metadata()?.len();
    target.set_len(length)?;
    let mut at = 0;
    while at < length {
        let start = match rustix::fs::seek(&source, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(Errno::NXIO) => break,
            Err(e) => return Err(e.into()),
        };
        let end = rustix::fs::seek(&source, SeekFrom::Hole(start))?;
        copy_range(&source, &target, start, end)?;
        at = end;
    }
    Ok(())
}

fn copy_range(source: &File, target: &File, mut start: u64, end: u64) -> io::Result<()> {
    let mut buffer = vec![0; 64 << 10];
    while start < end {
        let want = buffer.len().min((end - start) as usize);
        let got = rustix::io::pread(source, &mut buffer[..want], start)?;
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        std::os::unix::fs::FileExt::write_all_at(target, &buffer[..got], start)?;
        start += got as u64;
    }
    Ok(())
}

/// A loop device with the image attached. It is kept open, so that it does not release the image before it is mounted.
#[derive(Debug)]
pub(crate) struct Attached {
    pub number: u32,
    pub path: String,
    _device: OwnedFd,
}

/// Opens and locks an image for exclusive use. Waits a little for a holder of the lock that is about to end.
pub(crate) fn lock_image(image: &Path) -> Result<OwnedFd, VolumeError> {
    let at = |errno| VolumeError::Image { path: image.to_owned(), errno };
    let file = open_image(image)?;
    lock_within(&file, image, PATIENCE)?;
    if rustix::fs::fstat(&file).map_err(at)?.st_nlink == 0 {
        return Err(VolumeError::Discarded);
    }
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    rustix::fs::futimens(&file, &Timestamps { last_access: now, last_modification: now }).map_err(at)?;
    Ok(file)
}

/// Removes an image that is not in use, if it exists. This happens under the image's lock, so that no sandbox can take
/// the image in the meantime.
pub(crate) fn remove_image(image: &Path) -> Result<(), VolumeError> {
    let at = |errno| VolumeError::Image { path: image.to_owned(), errno };
    let file = match open_image(image) {
        Err(VolumeError::Image { errno: Errno::NOENT, .. }) => return Ok(()),
        other => other?,
    };
    lock_within(&file, image, MOMENT)?;
    match rustix::fs::unlink(image) {
        Err(Errno::NOENT) => Ok(()),
        other => other.map_err(at),
    }
}

/// Returns whether nothing has the image locked at the moment.
pub(crate) fn is_free(image: &Path) -> Result<bool, VolumeError> {
    match lock_within(&open_image(image)?, image, MOMENT) {
        Err(VolumeError::InUse) => Ok(false),
        other => other.map(|()| true),
    }
}

fn lock_within(file: &OwnedFd, image: &Path, patience: Duration) -> Result<(), VolumeError> {
    let until = Instant::now() + patience;
    let mut knock = Instant::now() + KNOCK;
    loop {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) if Instant::now() < until => {
                if Instant::now() > knock {
                    drop(open_image(image));
                    knock += KNOCK;
                }
                std::thread::sleep(Duration::from_millis(2));
            }
            Err(Errno::WOULDBLOCK) => return Err(VolumeError::InUse),
            other => return other.map_err(|errno| VolumeError::Image { path: image.to_owned(), errno }),
        }
    }
}

pub(crate) fn open_image(image: &Path) -> Result<OwnedFd, VolumeError> {
    rustix::fs::open(image, OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty())
        .map_err(|errno| VolumeError::Image { path: image.to_owned(), errno })
}

/// Attaches an image to a free loop device. The device holds the open file description of `image`, and with it any lock
/// on that.
pub(crate) fn attach_loop(image: &OwnedFd) -> Result<Attached, VolumeError> {
    const TRIES: usize = 64;
    let at = |path: &str| {
        let path = path.to_owned();
        move |errno| VolumeError::Loop { path, errno }
    };
    let open = |path: &str| rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(at(path));
    let control = open("/dev/loop-control")?;
    for _ in 0..TRIES {
        let number = loop_device::free_number(&control).map_err(at("/dev/loop-control"))?;
        let path = format!("/dev/loop{number}");
        let device = open(&path)?;
        match loop_device::configure(&device, image.as_raw_fd()) {
            Ok(()) => return Ok(Attached { number, path, _device: device }),
            // Another process took the free device first.
            Err(Errno::BUSY) => {}
            Err(errno) => return Err(at(&path)(errno)),
        }
    }
    Err(at("/dev/loop-control")(Errno::BUSY))
}

/// Checks that a loop device is available: a container may have the control file but not the devices that it creates.
pub(crate) fn loop_devices() -> Result<(), Errno> {
    let open = |path: &str| rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
    let number = loop_device::free_number(open("/dev/loop-control")?)?;
    open(&format!("/dev/loop{number}")).map(drop)
}

/// Identifies a loop device during one attachment: another launcher may take the same number for the same image right
/// afterwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Device {
    pub number: u32,
    /// The Linux kernel's sequence number of the disk; Linux before 5.15 does not report it.
    sequence: Option<u64>,
}

impl Device {
    pub(crate) fn of(number: u32) -> Self {
        let text = fs::read_to_string(format!("/sys/block/loop{number}/diskseq"));
        Self { number, sequence: text.ok().and_then(|text| text.trim().parse().ok()) }
    }
}

/// Returns whether the file system on a loop device has encountered an error.
pub(crate) fn has_errors(number: u32) -> bool {
    let count = fs::read_to_string(format!("/sys/fs/ext4/loop{number}/errors_count"));
    count.is_ok_and(|count| count.trim() != "0")
}

/// Returns the path of the image that is attached to a loop device, if any.
pub(crate) fn loop_backing(number: u32) -> Option<PathBuf> {
    let text = fs::read_to_string(format!("/sys/block/loop{number}/loop/backing_file")).ok()?;
    let path = text.trim_end_matches('\n');
    Some(PathBuf::from(path.strip_suffix(" (deleted)").unwrap_or(path)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileExt, MetadataExt};

    #[test]
    fn a_copy_has_the_same_bytes_and_the_same_holes() {
        let dir = crate::test_dir("sparse");
        let (a, b) = (dir.join("a"), dir.join("b"));
        let file = File::create(&a).unwrap();
        file.set_len(64 << 20).unwrap();
        file.write_all_at(b"one", 8 << 20).unwrap();
        file.write_all_at(b"two", 40 << 20).unwrap();
        copy_sparse(&a, &b).unwrap();
        assert!(fs::read(&a).unwrap() == fs::read(&b).unwrap());
        assert!(fs::metadata(&b).unwrap().blocks() < 1000);
        fs::remove_dir_all(dir).unwrap();
    }
}
