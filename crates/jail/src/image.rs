//! The guest's program as a descriptor that nobody can change, for a root that does not contain it.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fchmod, fcntl_add_seals, memfd_create};
use rustix::io::Errno;

/// A sealed memfd with the program. Executable but not readable, so that the kernel makes the guest undumpable from its first
/// instruction on. Where memfds may not be executed (`vm.memfd_noexec=2`) a file below `dir` takes its place.
pub fn guest(program: &[u8], dir: &Path) -> io::Result<OwnedFd> {
    let base = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memfd = match memfd_create("sandpool-guest", base | MemfdFlags::EXEC) {
        // Before 6.3 the flag is unknown and every memfd can be executed.
        Err(Errno::INVAL) => memfd_create("sandpool-guest", base)?,
        Err(Errno::ACCESS) => return on_disk(program, dir),
        other => other?,
    };
    let mut file = File::from(memfd);
    file.write_all(program)?;
    fchmod(&file, Mode::from_raw_mode(0o111))?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    fcntl_add_seals(&file, seals)?;
    // The mode's seal came with 6.3 as well.
    let _ = fcntl_add_seals(&file, SealFlags::EXEC);
    fcntl_add_seals(&file, SealFlags::SEAL)?;
    Ok(file.into())
}

fn on_disk(program: &[u8], dir: &Path) -> io::Result<OwnedFd> {
    crate::ids::private_dir(dir)?;
    let path = dir.join(format!(".guest-{}", std::process::id()));
    std::fs::write(&path, program)?;
    rustix::fs::chmod(&path, Mode::from_raw_mode(0o111))?;
    let fd = rustix::fs::open(&path, OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty());
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
