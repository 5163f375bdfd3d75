//! This module opens the directory for installed packages in a workspace of the host that sandboxes share. Code can
//! change everything in such a workspace, at any time, so nothing here follows a symlink.

use std::os::fd::OwnedFd;

use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, Result};

use crate::spec::SHARED_PACKAGES;
use crate::sys;

const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Opens the directory, and creates it if it does not exist. A process that may become any user creates it as the owner
/// of the workspace.
pub(super) fn open(workspace: &OwnedFd, as_owner: bool) -> Result<OwnedFd> {
    if !as_owner {
        return open_or_create(workspace);
    }
    let found = rustix::fs::fstat(workspace)?;
    sys::with_file_ids(found.st_uid, found.st_gid, || open_or_create(workspace))
}

fn open_or_create(workspace: &OwnedFd) -> Result<OwnedFd> {
    let mut dir = workspace.try_clone().map_err(|_| Errno::MFILE)?;
    for (number, name) in SHARED_PACKAGES.split('/').enumerate() {
        let is_new = match rustix::fs::mkdirat(&dir, name, Mode::from_raw_mode(0o755)) {
            Err(Errno::EXIST) => false,
            made => made.map(|()| true)?,
        };
        dir = rustix::fs::openat(&dir, name, DIRECTORY, Mode::empty())?;
        if is_new && number == 0 {
            ignore_in_git(&dir);
        }
    }
    Ok(dir)
}

/// Keeps the packages out of version control. They can be used without that.
fn ignore_in_git(dir: &OwnedFd) {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    if let Ok(file) = rustix::fs::openat(dir, ".gitignore", flags, Mode::from_raw_mode(0o644)) {
        let _ = rustix::io::write(&file, b"*\n");
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, chown, symlink};
    use std::path::Path;

    use rustix::fs::CWD;

    use super::*;

    #[test]
    fn w66_packages_have_a_directory_of_the_workspaces_owner_and_follow_no_symlink() {
        let (dir, outside) = (crate::test_dir("packages"), crate::test_dir("packages-outside"));
        let is_root = rustix::process::geteuid().is_root();
        if is_root {
            chown(&dir, Some(4711), Some(4712)).unwrap();
        }
        let open = || open(&rustix::fs::openat(CWD, &dir, DIRECTORY, Mode::empty()).unwrap(), is_root);
        let owner = |path: &Path| fs::metadata(path).map(|found| (found.uid(), found.gid())).unwrap();
        for _ in 0..2 {
            open().unwrap();
            let ignored = dir.join(".sandpool/.gitignore");
            assert_eq!(fs::read_to_string(&ignored).unwrap(), "*\n");
            let made = [dir.join(".sandpool"), dir.join(SHARED_PACKAGES), ignored];
            assert!(made.iter().all(|path| owner(path) == owner(&dir)));
        }
        // What code can leave there instead.
        for name in [".sandpool", SHARED_PACKAGES] {
            let path = dir.join(name);
            fs::remove_dir_all(&path).unwrap();
            symlink(&outside, &path).unwrap();
            assert_eq!(open().unwrap_err(), Errno::NOTDIR, "{name}");
            fs::remove_file(&path).unwrap();
            fs::write(&path, "").unwrap();
            assert_eq!(open().unwrap_err(), Errno::NOTDIR, "{name}");
            fs::remove_file(&path).unwrap();
            open().unwrap();
        }
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
        // Files are created as before.
        fs::write(dir.join("f"), "").unwrap();
        assert_eq!(fs::metadata(dir.join("f")).unwrap().uid(), rustix::process::geteuid().as_raw());
        fs::remove_dir_all(dir).unwrap();
        fs::remove_dir_all(outside).unwrap();
    }
}
