//! This module provides our programs as immutable descriptors, for roots that do not contain them.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fchmod, fcntl_add_seals, memfd_create};
use rustix::io::Errno;

/// Returns the guest's program. It is executable but not readable, so that the Linux kernel makes the guest undumpable
/// from its first instruction.
pub fn guest(program: &[u8], dir: &Path) -> io::Result<OwnedFd> {
    sealed("sandpool-guest", program, dir, (0o111, OFlags::PATH))
}

/// Returns the library that the warm interpreter loads.
pub fn library(library: &[u8], dir: &Path) -> io::Result<OwnedFd> {
    sealed("sandpool-zygote", library, dir, (0o555, OFlags::RDONLY))
}

const TRIES: u32 = 100;

/// Creates a sealed memfd. If memfds may not be executed (`vm.memfd_noexec=2`), uses a file below `dir` instead, opened
/// with the given flags.
fn sealed(name: &str, content: &[u8], dir: &Path, (mode, open): (u32, OFlags)) -> io::Result<OwnedFd> {
    let base = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memfd = match memfd_create(name, base | MemfdFlags::EXEC) {
        // Linux before 6.3 does not know this flag, and every memfd can be executed.
        Err(Errno::INVAL) => memfd_create(name, base)?,
        Err(Errno::ACCESS) => return on_disk(name, content, dir, (mode, open)),
        other => other?,
    };
    let mut file = File::from(memfd);
    file.write_all(content)?;
    fchmod(&file, Mode::from_raw_mode(mode))?;
    seal(&file)?;
    // The seal of the mode also exists only since Linux 6.3.
    let _ = fcntl_add_seals(&file, SealFlags::EXEC);
    fcntl_add_seals(&file, SealFlags::SEAL)?;
    Ok(file.into())
}

/// Seals the content. The Linux kernel refuses while it briefly holds one of the pages elsewhere (for migration, or
/// queued for an LRU list), which happens under load.
fn seal(file: &File) -> io::Result<()> {
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    for _ in 0..TRIES {
        match fcntl_add_seals(file, seals) {
            Err(Errno::BUSY) => std::thread::sleep(Duration::from_millis(20)),
            other => return Ok(other?),
        }
    }
    Ok(fcntl_add_seals(file, seals)?)
}

fn on_disk(name: &str, content: &[u8], dir: &Path, (mode, open): (u32, OFlags)) -> io::Result<OwnedFd> {
    crate::ids::private_dir(dir)?;
    let path = dir.join(format!(".{name}-{}", std::process::id()));
    std::fs::write(&path, content)?;
    rustix::fs::chmod(&path, Mode::from_raw_mode(mode))?;
    let fd = rustix::fs::open(&path, open | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty());
    std::fs::remove_file(&path)?;
    Ok(fd?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sealed_program_cannot_be_changed() {
        let fd = guest(b"#!nothing", Path::new("/tmp")).unwrap();
        assert_eq!(rustix::io::write(&fd, b"x"), Err(Errno::PERM));
        assert_eq!(rustix::fs::ftruncate(&fd, 0), Err(Errno::PERM));
        assert_eq!(fchmod(&fd, Mode::from_raw_mode(0o666)), Err(Errno::PERM));
    }
}
