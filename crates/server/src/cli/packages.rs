//! The directory for installed packages in a directory that contexts have as their workspace.

use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, RenameFlags, ResolveFlags, Uid};
use rustix::io::Errno;

/// Where it is in the workspace.
pub(super) const DIR: &str = ".sandpool/packages";

/// Creates the directory, unless it exists, with the owner of the workspace, and returns its path. Code may have written
/// to the workspace before, so this follows no symlink.
pub(super) fn prepare(workspace: &Path) -> io::Result<PathBuf> {
    let mut parent = rustix::fs::openat2(CWD, workspace, FLAGS, Mode::empty(), ResolveFlags::NO_SYMLINKS)?;
    for (number, name) in DIR.split('/').enumerate() {
        let (dir, is_new) = open_or_create(&parent, name)?;
        if is_new && number == 0 {
            ignore_in_git(&dir)?;
        }
        parent = dir;
    }
    Ok(workspace.join(DIR))
}

const FLAGS: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Opens a directory below `parent`, and says whether it was created. A new one gets its name once it has its owner.
fn open_or_create(parent: &OwnedFd, name: &str) -> io::Result<(OwnedFd, bool)> {
    match rustix::fs::openat(parent, name, FLAGS, Mode::empty()) {
        Err(Errno::NOENT) => {}
        other => return Ok((other?, false)),
    }
    let unnamed = format!(".sandpool-{}", uuid::Uuid::new_v4().simple());
    rustix::fs::mkdirat(parent, &unnamed, Mode::from_raw_mode(0o755))?;
    let dir = rustix::fs::openat(parent, &unnamed, FLAGS, Mode::empty())?;
    let renamed = own_like(&dir, parent)
        .and_then(|()| rustix::fs::renameat_with(parent, &unnamed, parent, name, RenameFlags::NOREPLACE));
    if let Err(error) = renamed {
        let _ = rustix::fs::unlinkat(parent, &unnamed, AtFlags::REMOVEDIR);
        return match error {
            // Another server was faster.
            Errno::EXIST => Ok((rustix::fs::openat(parent, name, FLAGS, Mode::empty())?, false)),
            other => Err(other.into()),
        };
    }
    Ok((dir, true))
}

/// Gives a file the owner of another one. Only root has to, and may.
fn own_like(file: &OwnedFd, other: &OwnedFd) -> rustix::io::Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    let found = rustix::fs::fstat(other)?;
    debug_assert!(FileType::from_raw_mode(found.st_mode) == FileType::Directory);
    rustix::fs::fchown(file, Some(Uid::from_raw(found.st_uid)), Some(Gid::from_raw(found.st_gid)))
}

/// Keeps the packages out of version control.
fn ignore_in_git(dir: &OwnedFd) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::openat(dir, ".gitignore", flags, Mode::from_raw_mode(0o644)) {
        Err(Errno::EXIST) => Ok(()),
        file => {
            let file = file?;
            own_like(&file, dir)?;
            std::fs::File::from(file).write_all(b"*\n")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, symlink};
    use testkit::scratch::Scratch;

    #[test]
    fn packages_have_a_directory_of_the_workspaces_owner_and_follow_no_symlink() {
        let dir = Scratch::new();
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&dir.0, Some(4711), Some(4712)).unwrap();
        }
        let owner = |path: &Path| std::fs::metadata(path).map(|found| (found.uid(), found.gid())).unwrap();
        for _ in 0..2 {
            let made = prepare(&dir.0).unwrap();
            assert_eq!(made, dir.0.join(".sandpool/packages"));
            let ignored = dir.0.join(".sandpool/.gitignore");
            assert_eq!(std::fs::read_to_string(&ignored).unwrap(), "*\n");
            assert!([&made, &ignored].into_iter().all(|path| owner(path) == owner(&dir.0)));
            assert_eq!(std::fs::read_dir(&dir.0).unwrap().count(), 1, "nothing else is left");
        }
        std::fs::remove_dir_all(dir.0.join(".sandpool")).unwrap();
        let outside = Scratch::new();
        symlink(&outside.0, dir.0.join(".sandpool")).unwrap();
        assert!(prepare(&dir.0).is_err());
        assert_eq!(std::fs::read_dir(&outside.0).unwrap().count(), 0);
    }
}
