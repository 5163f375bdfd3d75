//! The volume of a sandbox as root: an ext4 file system in a sparse file, copied from a template that is made once a size.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{Mode, OFlags, SeekFrom};
use rustix::io::Errno;

use crate::sys::loop_device;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("template `{}`: {source}", path.display())]
    Template { path: PathBuf, source: io::Error },
    #[error("mkfs.ext4: {0}")]
    Mkfs(String),
    #[error("copying to `{}`: {source}", path.display())]
    Copy { path: PathBuf, source: io::Error },
    #[error("loop device `{path}`: {errno}")]
    Loop { path: String, errno: Errno },
}

/// Where mkfs.ext4 is, if anywhere; the launcher has no search path.
pub fn mkfs() -> Option<PathBuf> {
    ["/usr/sbin", "/sbin", "/usr/bin", "/bin", "/usr/local/sbin"]
        .iter()
        .map(|dir| Path::new(dir).join("mkfs.ext4"))
        .find(|path| path.exists())
}

/// The template for this size, made if it is not there. Complete or absent: it appears by a rename.
pub fn template(dir: &Path, bytes: u64, inodes: u64) -> Result<PathBuf, Error> {
    let path = dir.join(format!("ext4-{bytes}-{inodes}.img"));
    if path.exists() {
        return Ok(path);
    }
    let failed = |source| Error::Template { path: path.clone(), source };
    fs::create_dir_all(dir).map_err(failed)?;
    let half = dir.join(format!(".ext4-{bytes}-{inodes}-{}", std::process::id()));
    let made = make(&half, bytes, inodes).and_then(|()| fs::rename(&half, &path).map_err(failed));
    if made.is_err() {
        let _ = fs::remove_file(&half);
    }
    made.map(|()| path)
}

#[allow(
    clippy::disallowed_methods,
    reason = "the one helper program of a sandbox's creation, with a fixed path and no input"
)]
fn make(path: &Path, bytes: u64, inodes: u64) -> Result<(), Error> {
    let failed = |source| Error::Template { path: path.to_owned(), source };
    let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path).map_err(failed)?;
    file.set_len(bytes).map_err(failed)?;
    let mkfs = mkfs().ok_or_else(|| Error::Mkfs("not installed".into()))?;
    let output = Command::new(mkfs)
        .args(["-q", "-F", "-m", "0", "-b", "4096"])
        // No journal: nothing here has to survive a crash. No reserved table: it never grows.
        .args(["-O", "^has_journal,^resize_inode,^metadata_csum,^uninit_bg"])
        .args(["-E", "nodiscard,root_owner=0:0"])
        .args(["-N", &inodes.to_string()])
        .arg(path)
        .env_clear()
        .stdin(Stdio::null())
        .output()
        .map_err(|e| Error::Mkfs(e.to_string()))?;
    if !output.status.success() {
        return Err(Error::Mkfs(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
    }
    Ok(())
}

/// Copies a sparse file without its holes; shares the blocks where the file system can.
pub fn copy_sparse(from: &Path, to: &Path) -> Result<(), Error> {
    copy(from, to).map_err(|source| Error::Copy { path: to.to_owned(), source })
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

/// A loop device with the image in it; open, so that it does not let go of the image before it is mounted.
#[derive(Debug)]
pub struct Attached {
    pub number: u32,
    pub path: String,
    _device: OwnedFd,
}

pub fn attach_loop(image: &Path) -> Result<Attached, Error> {
    const TRIES: usize = 64;
    let at = |path: &str| {
        let path = path.to_owned();
        move |errno| Error::Loop { path, errno }
    };
    let open = |path: &str| rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(at(path));
    let shown = image.display().to_string();
    let file = rustix::fs::open(image, OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty())
        .map_err(at(&shown))?;
    let control = open("/dev/loop-control")?;
    for _ in 0..TRIES {
        let number = loop_device::free_number(&control).map_err(at("/dev/loop-control"))?;
        let path = format!("/dev/loop{number}");
        let device = open(&path)?;
        match loop_device::configure(&device, file.as_raw_fd()) {
            Ok(()) => return Ok(Attached { number, path, _device: device }),
            // Somebody else took the free one first.
            Err(Errno::BUSY) => {}
            Err(errno) => return Err(at(&path)(errno)),
        }
    }
    Err(at("/dev/loop-control")(Errno::BUSY))
}

/// Whether a device can be had at all: a container may have the control file and not the devices that it makes.
pub fn loop_devices() -> Result<(), Errno> {
    let open = |path: &str| rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
    let number = loop_device::free_number(open("/dev/loop-control")?)?;
    open(&format!("/dev/loop{number}")).map(drop)
}

/// The image a loop device holds, if it holds one.
pub fn loop_backing(number: u32) -> Option<PathBuf> {
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
