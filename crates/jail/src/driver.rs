//! This module puts a browser driver into a running sandbox: the guest's own program, as another user, in a separate
//! cgroup.
//!
//! This takes four processes, of which one stays. The helper is the launcher's child and never enters the sandbox; it
//! kills the remains of an earlier browser. The helper's child starts in the browser's cgroup, joins the namespaces and
//! confines itself ([`crate::confine`]), still outside of the sandbox's pid namespace, where it is invisible to the
//! sandbox. It forks an intermediate process into the sandbox, which forks the driver and exits, so that the driver
//! becomes a child of the guest. The driver then executes the program. The launcher only watches: it receives a report
//! when the driver exists, and the connection closes when the driver's program runs.

use std::convert::Infallible;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, kill_process, pidfd_open, pidfd_send_signal, waitpid};
use serde::{Deserialize, Serialize};

use crate::cgroup::CgroupPart;
use crate::confine::{self, ConfineStep, SandboxEntry};
use crate::ids::BROWSER;
use crate::token::Token;
use crate::zygote::Fork;
use crate::{apply, process, sys, wire};

/// Time from the request to the running program, generous enough for a busy machine.
const ENTRY_TIME: Duration = Duration::from_secs(20);
/// Maximum number of sandboxes that receive a driver at the same time.
const AT_ONCE: usize = 64;

/// Everything needed to start a driver.
#[derive(Debug)]
pub(crate) struct DriverSpec {
    pub request: u64,
    /// The launcher's number of the sandbox.
    pub sandbox: u64,
    /// The pidfd of the sandbox's PID 1, and the descriptor of the guest's program.
    pub guest: OwnedFd,
    pub program: OwnedFd,
    /// The browser's cgroups and the previous driver. That driver, and every process still in the cgroups, is killed
    /// first.
    pub part: CgroupPart,
    pub previous: Option<OwnedFd>,
    /// The v2 cgroup in which the driver starts, and the `tasks` files of the v1 cgroups that it joins by itself.
    pub v2: Option<OwnedFd>,
    pub tasks: Vec<OwnedFd>,
    pub steps: Vec<ConfineStep>,
}

/// The result of starting a driver.
#[derive(Debug)]
pub(crate) struct DriverOutcome {
    pub request: u64,
    pub sandbox: u64,
    /// The driver and its leash, both to be handed to the guest, or the reason for the failure.
    pub made: Result<(Fork, OwnedFd), String>,
}

/// A message to the launcher.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum DriverReport {
    /// The driver exists. `pid` is its pid in the sandbox; a pidfd is attached.
    Made { pid: u32 },
    /// The driver could not be started.
    Failed { message: String },
}

#[derive(Debug)]
struct PendingDriver {
    request: u64,
    sandbox: u64,
    helper: Option<OwnedFd>,
    /// Connection that closes when every process on the other side has closed it. The last one is the driver, when it
    /// executes its program.
    control: OwnedFd,
    /// The guest's end of the connection to the driver.
    channel: OwnedFd,
    /// Pipe that ends the driver when its last writer is closed.
    leash: OwnedFd,
    until: Instant,
    made: Option<(u32, OwnedFd)>,
    failed: Option<String>,
}

/// The drivers that are being started.
#[derive(Debug, Default)]
pub(crate) struct PendingDrivers {
    entries: Vec<PendingDriver>,
}

impl PendingDrivers {
    /// Starts a driver and registers its reports in `epoll`. Returns the helper process, which the caller has to reap.
    pub(crate) fn begin(&mut self, epoll: &OwnedFd, wanted: DriverSpec) -> io::Result<(Pid, OwnedFd)> {
        if self.entries.iter().any(|entry| entry.sandbox == wanted.sandbox) {
            return Err(io::Error::other("a browser is being started already"));
        }
        if self.entries.len() >= AT_ONCE {
            return Err(io::Error::other(format!("{AT_ONCE} browsers are being started already; try again")));
        }
        let (ours, control) = wire::connection()?;
        let (channel, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        let (leash_end, leash) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let (request, sandbox) = (wanted.request, wanted.sandbox);
        Token::Driver.watch(epoll, &ours)?;
        let (pid, pidfd) = sys::spawn_child(0, None, || help(wanted, &control, theirs, &leash_end))?;
        // Nothing may fail from here on, because the new process has to be recorded.
        let (until, helper) = (Instant::now() + ENTRY_TIME, pidfd.try_clone().ok());
        self.entries.push(PendingDriver {
            request,
            sandbox,
            helper,
            control: ours,
            channel,
            leash,
            until,
            made: None,
            failed: None,
        });
        Ok((pid, pidfd))
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.entries.iter().map(|entry| entry.until).min()
    }

    /// Returns the results of the drivers that have started, failed or exceeded their time.
    pub(crate) fn outcomes(&mut self) -> Vec<DriverOutcome> {
        self.entries.extract_if(.., PendingDriver::is_over).map(PendingDriver::outcome).collect()
    }
}

impl PendingDriver {
    fn is_over(&mut self) -> bool {
        loop {
            match wire::receive::<DriverReport>(&self.control) {
                Ok(Some((DriverReport::Made { pid }, fds))) => {
                    self.made = fds.into_iter().next().map(|process| (pid, process))
                }
                Ok(Some((DriverReport::Failed { message }, _))) => self.failed = Some(message),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Ok(None) | Err(_) => return true,
            }
        }
        let late = Instant::now() >= self.until;
        if late {
            self.failed = Some("it took too long".into());
        }
        late
    }

    fn outcome(self) -> DriverOutcome {
        let Self { request, sandbox, helper, channel, leash, made, failed, .. } = self;
        let made = match (made, failed) {
            (Some((pid, process)), None) => Ok((Fork { pid, process, channel }, leash)),
            (made, failed) => {
                // Kill the processes that are still being set up.
                for process in made.iter().map(|(_, process)| process).chain(&helper) {
                    let _ = pidfd_send_signal(process, Signal::KILL);
                }
                Err(failed.unwrap_or_else(|| "the sandbox is ending".into()))
            }
        };
        DriverOutcome { request, sandbox, made }
    }
}

/// Runs in the helper and, in the end, in the driver. Returns only on failure, after reporting it to the launcher.
fn help(wanted: DriverSpec, control: &OwnedFd, channel: OwnedFd, leash: &OwnedFd) {
    if let Err(message) = make(wanted, control, channel, leash) {
        let _ = wire::send(control, &DriverReport::Failed { message }, &[]);
    }
}

fn make(wanted: DriverSpec, control: &OwnedFd, channel: OwnedFd, leash: &OwnedFd) -> Result<(), String> {
    let DriverSpec { guest, program, part, previous, v2, tasks, steps, .. } = wanted;
    let failed = |what: &'static str| move |e: rustix::io::Errno| format!("{what}: {e}");
    let keep: Vec<_> = [&guest, &program, control, &channel, leash]
        .into_iter()
        .chain(&previous)
        .chain(&v2)
        .chain(&tasks)
        .map(AsFd::as_fd)
        .collect();
    sys::separate_child(&keep).map_err(failed("descriptors"))?;
    apply::ordinary_priority().map_err(|e| e.to_string())?;
    process::set_not_dumpable().map_err(|e| e.to_string())?;
    if let Some(previous) = &previous {
        let _ = pidfd_send_signal(previous, Signal::KILL);
    }
    if !part.kill() {
        return Err("the previous browser does not end".into());
    }
    if part.is_empty() {
        kill_by_uid(&guest, &steps)?;
    }
    let enter = || {
        let entry = SandboxEntry { guest, tasks, channel };
        let entered = confine::enter(entry, &steps, &[&program, control, leash].map(AsFd::as_fd));
        let Err(message) = entered.and_then(|channel| bring_in(&channel, [&program, control, leash]));
        let _ = wire::send(control, &DriverReport::Failed { message }, &[]);
    };
    let (pid, _) = sys::spawn_child(0, v2.as_ref().map(AsFd::as_fd), enter).map_err(failed("fork"))?;
    let _ = waitpid(Some(pid), WaitOptions::empty());
    Ok(())
}

/// Kills the previous browser by its uid if no cgroup identifies its processes, unless it shares the uid of the code.
fn kill_by_uid(guest: &OwnedFd, steps: &[ConfineStep]) -> Result<(), String> {
    let browser_id = ConfineStep::SetIds { id: BROWSER };
    if !steps.contains(&browser_id) {
        return Ok(());
    }
    let failed = |e: rustix::io::Errno| format!("the previous browser does not end: {e}");
    let wait = |pid| waitpid(Some(pid), WaitOptions::empty()).map(drop);
    match sys::fork().map_err(failed)? {
        Some(pid) => wait(pid).map_err(failed),
        None => {
            // Drop the capabilities first: with them the kill would also reach the processes of the code.
            let steps = [browser_id, ConfineStep::DropCapabilities];
            let entered = confine::join(guest).is_ok() && steps.iter().all(|step| step.apply().is_ok());
            if entered && process::set_not_dumpable().is_ok() {
                // The target processes are visible only from inside the pid namespace.
                match sys::fork() {
                    Ok(Some(pid)) => drop(wait(pid)),
                    Ok(None) => drop(sys::kill_own()),
                    Err(_) => {}
                }
            }
            sys::leave(0)
        }
    }
}

/// Exit status of a process that failed to become the driver.
const FAILED: i32 = 70;

/// Runs in the confined process: forks the intermediate process, waits for it and exits. Returns only on failure.
fn bring_in(channel: &OwnedFd, keep: [&OwnedFd; 3]) -> Result<Infallible, String> {
    match sys::fork().map_err(|e| format!("fork into the sandbox: {e}"))? {
        Some(intermediate) => {
            let _ = waitpid(Some(intermediate), WaitOptions::empty());
            sys::leave(0)
        }
        None => {
            fork_and_end(keep[1])?;
            become_driver(channel, keep)
        }
    }
}

/// Runs in the intermediate process and ends it. Returns in the driver, or if the driver cannot be created.
fn fork_and_end(control: &OwnedFd) -> Result<(), String> {
    // The driver gets a new session without leading it, because a leader that opens a terminal is tied to it.
    rustix::process::setsid().map_err(|e| format!("session: {e}"))?;
    let Some(pid) = sys::fork().map_err(|e| format!("fork in the sandbox: {e}"))? else { return Ok(()) };
    // This process is the parent and has not reaped the driver, so the pid is still the driver's.
    let driver = pidfd_open(pid, PidfdFlags::empty()).map_err(|e| {
        let _ = kill_process(pid, Signal::KILL);
        format!("the driver: {e}")
    })?;
    let sent = wire::send(control, &DriverReport::Made { pid: pid.as_raw_nonzero().get() as u32 }, &[driver.as_fd()]);
    if sent.is_err() {
        let _ = pidfd_send_signal(&driver, Signal::KILL);
    }
    sys::leave(i32::from(sent.is_err()))
}

/// Sets up the descriptors (0 to 2 are `/dev/null`, 3 is the guest, 4 is the leash, all others are closed) and executes
/// the program. Returns only on failure.
fn become_driver(channel: &OwnedFd, keep: [&OwnedFd; 3]) -> Result<Infallible, String> {
    let [program, control, leash] = keep;
    confine::arrive(&[channel, program, control, leash].map(AsFd::as_fd)).map_err(|e| e.to_string())?;
    let failed = |e: rustix::io::Errno| format!("`sandpool-guest`: {e}");
    sys::kill_self_when_closed(leash.as_fd()).map_err(failed)?;
    let [program, control] = sys::hand_over(&[(3, channel), (4, leash)], [program, control]).map_err(failed)?;
    let error = sys::execveat(program.as_fd(), &[CString::from(c"sandpool-guest"), CString::from(c"browser")]);
    let message = failed(error);
    let _ = wire::send(&control, &DriverReport::Failed { message }, &[]);
    sys::leave(FAILED)
}
