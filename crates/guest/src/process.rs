//! This module starts, signals and reaps processes. It is the only place in the guest that does.
//!
//! A process is signalled only through its pidfd, or through its group while the group's leader is not yet reaped, so a
//! signal can never hit a recycled pid.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use command_fds::{CommandFdExt, FdMapping};
use proto::Ended;
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, WaitIdStatus, WaitStatus};

/// Describes a process to start. It inherits nothing: environment, directory and descriptors are all given here.
pub(crate) struct Launch<'a> {
    pub argv: &'a [String],
    pub env: &'a BTreeMap<String, String>,
    pub cwd: Option<&'a str>,
    /// Descriptors of the process. Descriptor 0 is `/dev/null` unless given.
    pub fds: ChildFds,
}

/// Descriptors of a child, with the number that each has in the child.
pub(crate) type ChildFds = Vec<(RawFd, OwnedFd)>;

/// A child process that is the leader of its process group.
#[derive(Debug)]
pub(crate) struct Process {
    pid: Pid,
    pidfd: OwnedFd,
    ended: Option<Ended>,
}

impl Process {
    #[allow(clippy::disallowed_methods, reason = "the guest's one place to start processes")]
    pub(crate) fn start(launch: Launch<'_>) -> io::Result<Self> {
        let Some((program, arguments)) = launch.argv.split_first() else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "empty argv"));
        };
        let mut command = Command::new(program);
        command.args(arguments).env_clear().envs(launch.env).process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        if let Some(cwd) = launch.cwd {
            command.current_dir(cwd);
        }
        let mappings = launch.fds.into_iter().map(|(child_fd, parent_fd)| FdMapping { parent_fd, child_fd }).collect();
        command.fd_mappings(mappings).map_err(io::Error::other)?;
        jail::inherited::unblock_in_child(&mut command);
        let child = command.spawn()?;
        let pid = Pid::from_child(&child);
        // The child cannot have been reaped yet, so the pid still belongs to it.
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
        Ok(Self { pid, pidfd, ended: None })
    }

    /// Adopts a child that the guest did not start.
    pub(crate) fn adopt(pid: u32, pidfd: OwnedFd) -> io::Result<Self> {
        let wrong = || io::Error::other(format!("`{pid}` is no process of this sandbox"));
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or_else(wrong)?;
        Ok(Self { pid, pidfd, ended: None })
    }

    pub(crate) fn pid(&self) -> Pid {
        self.pid
    }

    /// Returns the pidfd, which becomes readable once the process has ended.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        if self.ended.is_none() {
            // This fails only for a process that has just ended.
            let _ = rustix::process::pidfd_send_signal(&self.pidfd, signal);
        }
    }

    pub(crate) fn signal_group(&self, signal: Signal) {
        if self.ended.is_none() {
            let _ = rustix::process::kill_process_group(self.pid, signal);
        }
    }

    /// Kills what is left of the group of a process that has ended. The number of a group is not given away while the
    /// group has members.
    pub(crate) fn kill_group(&self) {
        let _ = rustix::process::kill_process_group(self.pid, Signal::KILL);
    }

    /// Kills the group, and also the process itself, which may have left its group.
    pub(crate) fn kill(&self) {
        self.signal_group(Signal::KILL);
        self.signal(Signal::KILL);
    }

    /// Marks the process for the OOM killer, so that a memory kill takes the process that grew and not the guest.
    pub(crate) fn offer_to_oom_killer(&self) {
        // A failure is ignored, because the limits hold without the mark.
        let path = format!("/proc/{}/oom_score_adj", self.pid.as_raw_nonzero());
        let _ = std::fs::write(path, jail::process::KERNEL_OOM_SCORE);
    }

    /// Reaps the process if it has ended, and returns how it ended.
    pub(crate) fn try_wait(&mut self) -> Option<Ended> {
        if self.ended.is_none() {
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
            self.ended = match rustix::process::waitid(WaitId::PidFd(self.pidfd.as_fd()), options) {
                Ok(status) => status.as_ref().map(ended_from_id),
                // PID 1 reaped the process before it was adopted, so how it ended is lost.
                Err(rustix::io::Errno::CHILD) if self.is_over() => Some(Ended::Signaled { signal: 9 }),
                Err(_) => None,
            };
        }
        self.ended
    }

    fn is_over(&self) -> bool {
        let mut fds = [rustix::event::PollFd::new(&self.pidfd, rustix::event::PollFlags::IN)];
        let at_once = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut fds, Some(&at_once)).is_ok_and(|ready| ready > 0)
    }

    /// Records the status that a wait for any child returned.
    pub(crate) fn reaped(&mut self, status: WaitStatus) {
        self.ended.get_or_insert(ended_from(status));
    }

    /// Continues a stopped process, so that code that stops an interpreter cannot make its caller wait.
    pub(crate) fn continue_if_stopped(&self) {
        let options = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG;
        if let Ok(Some(_)) = rustix::process::waitid(WaitId::PidFd(self.pidfd.as_fd()), options) {
            self.signal_group(Signal::CONT);
            self.signal(Signal::CONT);
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.ended.is_some() {
            return;
        }
        self.kill();
        // A killed process ends almost at once, unless the Linux kernel is in the middle of an operation for it; then
        // PID 1 reaps it later.
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        for _ in 0..100 {
            if !matches!(rustix::process::waitid(WaitId::PidFd(self.pidfd.as_fd()), options), Ok(None)) {
                return;
            }
            let mut fds = [rustix::event::PollFd::new(&self.pidfd, rustix::event::PollFlags::IN)];
            let _ = rustix::event::poll(&mut fds, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 10_000_000 }));
        }
    }
}

/// Reaps one child of PID 1 that has ended, regardless of which process started it.
pub(crate) fn reap_any() -> Option<(Pid, WaitStatus)> {
    rustix::process::wait(rustix::process::WaitOptions::NOHANG).ok().flatten()
}

fn ended_from_id(status: &WaitIdStatus) -> Ended {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => Ended::Exited { code },
        (_, signal) => Ended::Signaled { signal: signal.unwrap_or_default() },
    }
}

fn ended_from(status: WaitStatus) -> Ended {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => Ended::Exited { code },
        (_, signal) => Ended::Signaled { signal: signal.unwrap_or_default() },
    }
}
