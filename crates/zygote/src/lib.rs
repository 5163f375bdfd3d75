//! What the warm interpreter loads to be forked into sandboxes, and the one function it calls.
//!
//! The interpreter (Z) stays outside; a kernel (Y) is a copy of it inside. Between them is X, which shares Z's memory and lives in the
//! sandbox's pid namespace for a moment: it forks Y and ends, so that Y's parent becomes the sandbox's PID 1, which gets its exit
//! status and can be killed without waiting for anybody here. Y then gives up everything ([`jail::own`]) before any Python runs in it.
//!
//! Knows nothing of Python but three functions that it is given.
#![allow(unsafe_code)] // Forks by hand; see `spawn`.

mod spawn;

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};

use jail::own::{self, Door, Own};
use jail::warm::{Order, Said};
use jail::{process, seccomp, sys, wire};
use rustix::net::SendFlags;

use spawn::{Failure, Park, Signals, Spawned};

/// What an interpreter has to do before and after a fork.
#[derive(Clone, Copy)]
struct Hooks {
    before: extern "C" fn(),
    after_parent: extern "C" fn(),
    after_child: extern "C" fn(),
}

/// Says that the interpreter is ready and forks it whenever the launcher asks.
///
/// Returns -1 in the interpreter when the launcher is gone or it cannot be forked, which is then said on standard error; in a kernel,
/// the descriptor of its channel to the guest, when every restriction is in force.
///
/// # Safety
/// `launcher` is the socket to the launcher, and nobody else's. The caller holds the interpreter's lock and has one thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sandpool_zygote_serve(
    launcher: c_int,
    before: extern "C" fn(),
    after_parent: extern "C" fn(),
    after_child: extern "C" fn(),
) -> c_int {
    // SAFETY: open, by contract, for as long as this process uses it.
    let launcher = unsafe { BorrowedFd::borrow_raw(launcher) };
    match serve(launcher, Hooks { before, after_parent, after_child }) {
        Ok(channel) => channel.map_or(-1, OwnedFd::into_raw_fd),
        Err(e) => {
            let message = format!("the warm interpreter cannot be forked: {e}");
            eprintln!("{message}");
            let _ = wire::send(launcher, &Said::Failed { step: 0, message }, &[]);
            -1
        }
    }
}

/// `None` when the launcher is gone.
fn serve(launcher: BorrowedFd<'_>, hooks: Hooks) -> io::Result<Option<OwnedFd>> {
    let threads = std::fs::read_dir("/proc/self/task")?.count();
    if threads != 1 {
        return Err(io::Error::other(format!("it has {threads} threads")));
    }
    if let Some(shared) = shared_memory(&std::fs::read_to_string("/proc/self/maps")?) {
        return Err(io::Error::other(format!("its kernels would write to the same memory: `{shared}`")));
    }
    // While X shares its memory nobody in a sandbox may look at it, whoever that is outside.
    process::set_not_dumpable()?;
    seccomp::compile(seccomp::Profile::Code);
    let park = Park::new()?;
    // One buffer for good: what is written between two forks is no longer shared with the kernels.
    let mut buffer = vec![0; wire::BUFFER];
    wire::send(launcher, &Said::Ready, &[])?;
    loop {
        let Some((order, fds)) = wire::receive_into::<Order>(&mut buffer, launcher)? else { return Ok(None) };
        let Order { number, v2, steps } = order;
        match fork(&park, fds, v2, &steps, hooks) {
            Ok(Forked::Kernel(channel)) => {
                // Its number is closed, and may be another's by now.
                std::mem::forget(park);
                return Ok(Some(channel));
            }
            Ok(Forked::Made { pid, process }) => {
                wire::send(launcher, &Said::Forked { number, pid }, &[process.as_fd()])?;
            }
            Err(Failure::Refused(message)) => wire::send(launcher, &Said::Refused { number, message }, &[])?,
            Err(Failure::Broken(e)) => return Err(e),
        }
    }
}

/// A mapping that stays one after a fork, and can be written: a way from sandbox to sandbox.
fn shared_memory(maps: &str) -> Option<&str> {
    let written = |line: &&str| line.split(' ').nth(1).is_some_and(|mode| mode.contains('w') && mode.ends_with('s'));
    maps.lines().find(written)
}

enum Forked {
    Kernel(OwnedFd),
    Made { pid: u32, process: OwnedFd },
}

fn fork(park: &Park, fds: Vec<OwnedFd>, v2: bool, steps: &[Own], hooks: Hooks) -> Result<Forked, Failure> {
    let mut fds = fds.into_iter();
    let missing = || Failure::Refused("a descriptor is missing".into());
    let (channel, guest) = (fds.next().ok_or_else(missing)?, fds.next().ok_or_else(missing)?);
    let cgroup = if v2 { Some(fds.next().ok_or_else(missing)?) } else { None };
    let door = Door { guest, tasks: fds.collect(), channel };
    (hooks.before)();
    let signals = Signals::block();
    let spawned = spawn::spawn(park, door.guest.as_fd(), cgroup.as_ref().map(AsFd::as_fd));
    if let Ok(Spawned::Kernel) = spawned {
        // Closed with everything else.
        std::mem::forget(cgroup);
        let channel = become_kernel(door, steps);
        signals.restore();
        (hooks.after_child)();
        return Ok(Forked::Kernel(channel));
    }
    signals.restore();
    (hooks.after_parent)();
    match spawned? {
        Spawned::Made { pid, process } => Ok(Forked::Made { pid, process }),
        Spawned::Kernel => sys::leave(FAILED),
    }
}

/// What a kernel that could not be held leaves with.
const FAILED: c_int = 70;

fn become_kernel(door: Door, steps: &[Own]) -> OwnedFd {
    spawn::restore_rseq();
    own::enter(door, steps, &[]).unwrap_or_else(|(message, channel)| {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let _ = rustix::net::send(&channel, message.as_bytes(), flags);
        sys::leave(FAILED)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_kernels_would_share_is_seen() {
        let own = "7f00-7f01 rw-p 0000 00:00 0 [heap]\n7f02-7f03 r--s 0000 08:01 42 /usr/lib/gconv-modules.cache\n";
        assert_eq!(shared_memory(own), None);
        let shared = "7f04-7f05 rw-s 0000 00:01 9 /dev/zero (deleted)";
        assert_eq!(shared_memory(&format!("{own}{shared}\n")), Some(shared));
    }
}
