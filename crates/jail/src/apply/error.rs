//! This module defines the errors of a plan: each names the step's syscall and path.

use std::path::{Path, PathBuf};
use std::{fmt, io};

use rustix::io::Errno;

use crate::volume;

/// A syscall that a plan can make, named in error messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Syscall {
    Bind,
    Chdir,
    Clone,
    Chmod,
    Chown,
    Dup,
    Execveat,
    Fsconfig,
    Fsmount,
    Fsopen,
    Fstatfs,
    Ioctl,
    Keyctl,
    Listen,
    Mkdir,
    Mknod,
    MountPrivate,
    MountSetattr,
    MoveMount,
    Open,
    OpenTree,
    PivotRoot,
    Prctl,
    Recv,
    Send,
    Setgroups,
    Setpriority,
    Sethostname,
    Setpgid,
    Setresgid,
    Setresuid,
    Setns,
    Setsid,
    Socket,
    Stat,
    Symlink,
    Umount,
    Unlink,
    Unshare,
    Write,
}

impl fmt::Display for Syscall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", format!("{self:?}").to_lowercase())
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum ApplyError {
    #[error("{call} `{}`: {errno}", at.display())]
    Call { call: Syscall, at: PathBuf, errno: Errno },
    #[error("`{}` is not what it has to be: {why}", at.display())]
    Wrong { at: PathBuf, why: &'static str },
    #[error("`{}` belongs to root or to root's group; give it to others, or share it read-only", at.display())]
    RootsDirectory { at: PathBuf },
    #[error(transparent)]
    Volume(#[from] volume::VolumeError),
    #[error("{0}")]
    Rlimits(String),
    #[error("capabilities: {0}")]
    Capabilities(String),
    #[error("landlock: {0}")]
    Landlock(String),
    #[error("seccomp: {0}")]
    Seccomp(io::Error),
    #[error("the launcher is gone")]
    LauncherGone,
    #[error("a failure was asked for")]
    Asked,
}

pub(crate) trait At<T> {
    fn at(self, call: Syscall, path: &Path) -> Result<T, ApplyError>;
}

impl<T> At<T> for Result<T, Errno> {
    fn at(self, call: Syscall, path: &Path) -> Result<T, ApplyError> {
        self.map_err(|errno| ApplyError::Call { call, at: path.to_owned(), errno })
    }
}

impl<T> At<T> for io::Result<T> {
    fn at(self, call: Syscall, path: &Path) -> Result<T, ApplyError> {
        self.map_err(|e| e.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)).at(call, path)
    }
}

pub(crate) fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        text = format!("{text}: {source}");
        next = source.source();
    }
    text
}
