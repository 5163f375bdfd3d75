//! This module contains the steps by which a process confines itself to a sandbox. The guest applies them at the end of
//! its plan; a process that forks a child into a running sandbox applies them before the fork.
//!
//! Both use one list, so that neither can have more rights than the other. No step mounts anything or needs the
//! launcher.

use std::fmt;
use std::fs;
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::thread::{Gid, Uid};
use serde::{Deserialize, Serialize};

use crate::apply::{ApplyError, At, Syscall, with_sources};
use crate::ids::{BROWSER, INSIDE};
use crate::seccomp::Profile;
use crate::{landlock, process, rlimits, seccomp, sys};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ConfineStep {
    /// Leaves the launcher's session and process group, since both reach across pid namespaces (signals, nice, the
    /// autogroup).
    Session,
    /// Drops the supplementary groups.
    DropGroups,
    /// Sets all uids and gids of the process.
    SetIds { id: u32 },
    /// Replaces the session keyring by an empty one.
    SessionKeyring,
    /// Sets the rlimits. `processes` is set only if no cgroup counts processes.
    Rlimits { processes: Option<u64> },
    /// Makes the OOM killer prefer the interpreter to its guest.
    OfferToOomKiller,
    /// Drops all capabilities, for good.
    DropCapabilities,
    /// Keeps other processes of the same uid from inspecting the process.
    NotDumpable,
    /// Makes the process dumpable again. After a change of ids `/proc/self` belongs to root and would be unusable.
    Dumpable,
    /// Keeps programs from gaining privileges when they are executed.
    NoNewPrivileges,
    /// Restricts the paths of a process that runs code.
    Landlock {
        run: Vec<PathBuf>,
        /// Writable paths in addition to those of every sandbox.
        write: Vec<PathBuf>,
    },
    /// Restricts the paths of a browser and its driver.
    BrowserLandlock { run: Vec<PathBuf>, downloads: PathBuf },
    /// Installs the system-call filter.
    Seccomp { profile: Profile },
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
            Self::BrowserLandlock { run, .. } => {
                write!(f, "landlock of a browser")?;
                run.iter().try_for_each(|p| write!(f, " {}", p.display()))
            }
            Self::Seccomp { profile: Profile::Code } => write!(f, "seccomp"),
            Self::Seccomp { profile: Profile::CodeOnHostFiles } => write!(f, "seccomp without set-uid files"),
            Self::Seccomp { profile: Profile::Browser } => write!(f, "seccomp of a browser"),
        }
    }
}

impl ConfineStep {
    pub(crate) fn apply(&self) -> Result<(), ApplyError> {
        let no_path = Path::new("");
        match self {
            Self::Session => rustix::process::setsid().map(drop).at(Syscall::Setsid, no_path),
            Self::DropGroups => rustix::thread::set_thread_groups(&[]).at(Syscall::Setgroups, no_path),
            Self::SetIds { id } => set_ids(*id),
            Self::SessionKeyring => sys::new_session_keyring().at(Syscall::Keyctl, no_path),
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
            Self::BrowserLandlock { run, downloads } => restrict(&landlock::LandlockRules::browser(run, downloads)),
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

/// The steps of a kernel once it is inside and confined. Unlike the guest it may be inspected by code in the sandbox,
/// because that code is going to run in it.
pub(crate) const ARRIVAL: [ConfineStep; 2] = [ConfineStep::Dumpable, ConfineStep::OfferToOomKiller];

/// The namespaces of a sandbox that a process joins. Joining the pid namespace affects only its children.
const NAMESPACES: i32 = libc::CLONE_NEWUSER
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWPID;

/// The descriptors that a process needs to fork a child into a sandbox.
#[derive(Debug)]
pub struct SandboxEntry {
    /// Pidfd of the sandbox's PID 1.
    pub guest: OwnedFd,
    /// The `tasks` files of v1 cgroups, into which the process writes itself.
    pub tasks: Vec<OwnedFd>,
    /// Connection to the guest, the only descriptor of this struct that the child keeps.
    pub channel: OwnedFd,
}

/// Lowest number for the channel, above those at which a kernel receives its descriptors.
const CHANNEL: i32 = 10;

/// Reduces the calling process, which must be forked and single-threaded, to the rights of a sandbox and the
/// descriptors in `keep`.
///
/// The process itself stays outside of the sandbox's pid namespace, where code inside cannot see, stop or kill it. Its
/// children start inside, in every namespace and under every restriction of the sandbox from their first instruction.
/// If this fails, the process has to exit.
pub fn enter(entry: SandboxEntry, steps: &[ConfineStep], keep: &[BorrowedFd<'_>]) -> Result<OwnedFd, String> {
    let channel = step_inside(entry, keep).map_err(|error| format!("cannot enter the sandbox: {error}"))?;
    steps.iter().try_for_each(|step| step.apply().map_err(|error| format!("`{step}`: {error}")))?;
    Ok(channel)
}

/// Runs in the process that stays in the sandbox: makes it the leader of a new process group and closes every
/// descriptor except `keep`.
pub(crate) fn arrive(keep: &[BorrowedFd<'_>]) -> Result<(), ApplyError> {
    rustix::process::setpgid(None, None).at(Syscall::Setpgid, Path::new(""))?;
    sys::close_all_but(keep).at(Syscall::Dup, Path::new(""))
}

/// Calls `arrive` in a kernel and then applies the steps of `ARRIVAL`.
pub fn arrive_as_kernel(keep: &[BorrowedFd<'_>]) -> Result<(), String> {
    let confined = arrive(keep).and_then(|()| ARRIVAL.iter().try_for_each(ConfineStep::apply));
    confined.map_err(|error| error.to_string())
}

/// Joins the namespaces of a sandbox.
pub(crate) fn join(guest: &OwnedFd) -> Result<(), ApplyError> {
    sys::join_namespaces(guest.as_fd(), NAMESPACES).at(Syscall::Setns, Path::new("guest"))
}

fn step_inside(entry: SandboxEntry, keep: &[BorrowedFd<'_>]) -> Result<OwnedFd, ApplyError> {
    let SandboxEntry { guest, tasks, channel } = entry;
    for tasks in tasks {
        rustix::io::write(&tasks, b"0").at(Syscall::Write, Path::new("tasks"))?;
        // The descriptor is closed below, together with all others.
        let _ = tasks.into_raw_fd();
    }
    sys::close_all_but(&[&[guest.as_fd(), channel.as_fd()], keep].concat()).at(Syscall::Dup, Path::new(""))?;
    join(&guest)?;
    drop(guest);
    sys::place_null(0..3).at(Syscall::Dup, Path::new("/dev/null"))?;
    rustix::io::fcntl_dupfd_cloexec(&channel, CHANNEL).at(Syscall::Dup, Path::new("channel"))
}
