//! What a process does to itself to be held by a sandbox, as a list: the guest at the end of its plan, and whoever has a child in a
//! running sandbox before that child is born.
//!
//! One list for both, so that neither can have more than the other. Nothing here mounts anything, and nothing needs the launcher.

use std::fmt;
use std::fs;
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::thread::{Gid, Uid};
use serde::{Deserialize, Serialize};

use crate::apply::{ApplyError, At, Syscall, with_sources};
use crate::ids::{BROWSER, INSIDE};
use crate::seccomp::Profile;
use crate::{landlock, process, rlimits, seccomp, sys};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ConfineStep {
    /// Out of the launcher's session and process group: both reach across pid namespaces (signals, nice, the autogroup).
    Session,
    DropGroups,
    SetIds {
        id: u32,
    },
    SessionKeyring,
    /// `processes` only where no cgroup counts them.
    Rlimits {
        processes: Option<u64>,
    },
    /// A memory kill shall take the interpreter, not its guest.
    OfferToOomKiller,
    DropCapabilities,
    NotDumpable,
    /// After a change of ids `/proc/self` is root's, and nothing could be done with it.
    Dumpable,
    NoNewPrivileges,
    Landlock {
        run: Vec<PathBuf>,
        /// Besides the sandbox's own.
        write: Vec<PathBuf>,
    },
    BrowserLandlock {
        run: Vec<PathBuf>,
    },
    Seccomp {
        profile: Profile,
    },
}

impl fmt::Display for ConfineStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Session => write!(f, "new session"),
            Self::DropGroups => write!(f, "drop groups"),
            Self::SetIds { id } => write!(f, "uid and gid {id}"),
            Self::SessionKeyring => write!(f, "new session keyring"),
            Self::Rlimits { processes: None } => write!(f, "rlimits"),
            Self::Rlimits { processes: Some(processes) } => write!(f, "rlimits, {processes} processes"),
            Self::OfferToOomKiller => write!(f, "offer to the memory killer"),
            Self::DropCapabilities => write!(f, "drop capabilities"),
            Self::NotDumpable => write!(f, "not dumpable"),
            Self::Dumpable => write!(f, "dumpable"),
            Self::NoNewPrivileges => write!(f, "no new privileges"),
            Self::Landlock { run, write } => {
                write!(f, "landlock")?;
                run.iter().try_for_each(|p| write!(f, " {}", p.display()))?;
                write.iter().try_for_each(|p| write!(f, " write {}", p.display()))
            }
            Self::BrowserLandlock { run } => {
                write!(f, "landlock of a browser")?;
                run.iter().try_for_each(|p| write!(f, " {}", p.display()))
            }
            Self::Seccomp { profile: Profile::Code } => write!(f, "seccomp"),
            Self::Seccomp { profile: Profile::Browser } => write!(f, "seccomp of a browser"),
        }
    }
}

impl ConfineStep {
    pub fn apply(&self) -> Result<(), ApplyError> {
        let nowhere = Path::new("");
        match self {
            Self::Session => rustix::process::setsid().map(drop).at(Syscall::Setsid, nowhere),
            Self::DropGroups => rustix::thread::set_thread_groups(&[]).at(Syscall::Setgroups, nowhere),
            Self::SetIds { id } => set_ids(*id),
            Self::SessionKeyring => sys::new_session_keyring().at(Syscall::Keyctl, nowhere),
            Self::Rlimits { processes } => {
                let limits = rlimits::Rlimits { processes: *processes, ..rlimits::Rlimits::default() };
                limits.apply().map_err(|e| ApplyError::Rlimits(with_sources(&e)))
            }
            Self::OfferToOomKiller => {
                let path = Path::new("/proc/self/oom_score_adj");
                fs::write(path, process::KERNEL_OOM_SCORE).at(Syscall::Write, path)
            }
            Self::DropCapabilities => crate::caps::drop_all().map_err(|e| ApplyError::Capabilities(with_sources(&e))),
            Self::NotDumpable => process::set_not_dumpable().at(Syscall::Prctl, Path::new("dumpable")),
            Self::Dumpable => process::set_dumpable().at(Syscall::Prctl, Path::new("dumpable")),
            Self::NoNewPrivileges => process::set_no_new_privs().at(Syscall::Prctl, Path::new("no_new_privs")),
            Self::Landlock { run, write } => restrict(&landlock::LandlockRules::sandbox(run, write)),
            Self::BrowserLandlock { run } => restrict(&landlock::LandlockRules::browser(run)),
            Self::Seccomp { profile } => seccomp::install(seccomp::compile(*profile)).map_err(ApplyError::Seccomp),
        }
    }
}

fn restrict(rules: &landlock::LandlockRules) -> Result<(), ApplyError> {
    rules.restrict().map(drop).map_err(|e| ApplyError::Landlock(with_sources(&e)))
}

fn set_ids(id: u32) -> Result<(), ApplyError> {
    debug_assert!([INSIDE, BROWSER].contains(&id));
    let (uid, gid) = (Uid::from_raw(id), Gid::from_raw(id));
    rustix::thread::set_thread_res_gid(gid, gid, gid).at(Syscall::Setresgid, Path::new(""))?;
    rustix::thread::set_thread_res_uid(uid, uid, uid).at(Syscall::Setresuid, Path::new(""))
}

/// The namespaces of a sandbox that a process joins. The pid namespace is that of its children.
const NAMESPACES: i32 = libc::CLONE_NEWUSER
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWPID;

/// What a process comes with that is to have a child in a sandbox.
#[derive(Debug)]
pub struct SandboxEntry {
    /// The sandbox's PID 1.
    pub guest: OwnedFd,
    /// Of v1 cgroups, to write itself into.
    pub tasks: Vec<OwnedFd>,
    /// To the guest; the one thing the child keeps.
    pub channel: OwnedFd,
}

/// Above the numbers that a kernel gets its descriptors at.
const CHANNEL: i32 = 10;

/// Gives up everything the calling, forked, single-threaded process has besides what a sandbox has, but for what it is to `keep`.
///
/// The process itself stays outside of the sandbox's pid namespace, where nobody inside can see, stop or kill it; its children are
/// born inside, with every namespace and every restriction of the sandbox from their first instruction. Where it fails the process
/// has to end.
pub fn enter(door: SandboxEntry, steps: &[ConfineStep], keep: &[BorrowedFd<'_>]) -> Result<OwnedFd, String> {
    let channel = step_inside(door, keep).map_err(|error| format!("cannot enter the sandbox: {error}"))?;
    steps.iter().try_for_each(|step| step.apply().map_err(|error| format!("`{step}`: {error}")))?;
    Ok(channel)
}

/// In the process that was born inside and stays: leads a group of its own and closes all but what it is to `keep`.
pub fn arrive(keep: &[BorrowedFd<'_>]) -> Result<(), ApplyError> {
    rustix::process::setpgid(None, None).at(Syscall::Setpgid, Path::new(""))?;
    sys::close_all_but(keep).at(Syscall::Dup, Path::new(""))
}

/// Joins the namespaces of a sandbox.
pub fn join(guest: &OwnedFd) -> Result<(), ApplyError> {
    sys::join_namespaces(guest.as_fd(), NAMESPACES).at(Syscall::Setns, Path::new("guest"))
}

fn step_inside(door: SandboxEntry, keep: &[BorrowedFd<'_>]) -> Result<OwnedFd, ApplyError> {
    let SandboxEntry { guest, tasks, channel } = door;
    for tasks in tasks {
        rustix::io::write(&tasks, b"0").at(Syscall::Write, Path::new("tasks"))?;
        // Closed below, with all others.
        let _ = tasks.into_raw_fd();
    }
    sys::close_all_but(&[&[guest.as_fd(), channel.as_fd()], keep].concat()).at(Syscall::Dup, Path::new(""))?;
    join(&guest)?;
    drop(guest);
    let null = Path::new("/dev/null");
    let fd = rustix::fs::open(null, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).at(Syscall::Open, null)?;
    for number in 0..3 {
        sys::place(fd.as_fd(), number).at(Syscall::Dup, null)?;
    }
    rustix::io::fcntl_dupfd_cloexec(&channel, CHANNEL).at(Syscall::Dup, Path::new("channel"))
}
