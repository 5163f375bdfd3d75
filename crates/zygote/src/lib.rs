//! This library is loaded by the warm interpreter, so that it can be forked into sandboxes. It exports one function.
//!
//! The interpreter (Z) stays outside and waits for no other process; a kernel (Y) is a copy of it inside. Two
//! short-lived processes are between them. W is a copy of Z, made for one kernel. It joins the sandbox's cgroups and
//! namespaces and confines itself ([`jail::confine`]). It does all that outside of the sandbox's pid namespace, where
//! no code can see it. X shares W's memory and is created inside: it forks Y and ends, so that the sandbox's PID 1
//! becomes the parent of Y. PID 1 thus gets Y's exit status and can be killed without waiting for any process here.
//!
//! Every process that is visible inside therefore has the namespaces and the restrictions of the sandbox from its first
//! instruction. Every process that code inside can stop, kill or have killed for memory (X, Y, and W together with X,
//! whose memory it shares) exists for that sandbox alone.
//!
//! The library knows nothing about Python except three functions that its caller passes.
#![warn(unreachable_pub)]
#![allow(unsafe_code)] // This crate forks by hand; see `spawn`.

mod spawn;

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};

use jail::confine::{self, ConfineStep, SandboxEntry};
use jail::sys::Cloned;
use jail::zygote::{ForkOrder, ZygoteMessage};
use jail::{process, seccomp, sys, wire};
use rustix::net::SendFlags;
use rustix::process::{Signal, pidfd_send_signal};

use spawn::{Signals, Spawned};

/// The functions of the interpreter that have to be called before and after a fork.
#[derive(Clone, Copy)]
struct Hooks {
    before: extern "C" fn(),
    after_parent: extern "C" fn(),
    after_child: extern "C" fn(),
}

/// Reports that the interpreter is ready, and forks it for every order of the launcher.
///
/// In the interpreter, returns -1 when the launcher is gone, or when the interpreter cannot be forked; the latter is
/// reported on standard error. In a kernel, returns the descriptor of its channel to the guest, once every restriction
/// is in force.
///
/// # Safety
/// `launcher` must be the socket to the launcher, which nothing else uses. The caller must hold the interpreter's lock
/// and have one thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sandpool_zygote_serve(
    launcher: c_int,
    before: extern "C" fn(),
    after_parent: extern "C" fn(),
    after_child: extern "C" fn(),
) -> c_int {
    // SAFETY: by contract the descriptor is open for as long as this process uses it.
    let launcher = unsafe { BorrowedFd::borrow_raw(launcher) };
    match serve(launcher, Hooks { before, after_parent, after_child }) {
        Ok(channel) => channel.map_or(-1, OwnedFd::into_raw_fd),
        Err(e) => {
            let message = format!("the warm interpreter cannot be forked: {e}");
            eprintln!("{message}");
            let _ = wire::send(launcher, &ZygoteMessage::Failed { step: 0, message }, &[]);
            -1
        }
    }
}

/// Serves orders. Returns the channel in a kernel, and `None` in the interpreter when the launcher is gone.
fn serve(launcher: BorrowedFd<'_>, hooks: Hooks) -> io::Result<Option<OwnedFd>> {
    let threads = std::fs::read_dir("/proc/self/task")?.count();
    if threads != 1 {
        return Err(io::Error::other(format!("it has {threads} threads")));
    }
    if let Some(shared) = shared_memory(&std::fs::read_to_string("/proc/self/maps")?) {
        return Err(io::Error::other(format!("its kernels would write to the same memory: `{shared}`")));
    }
    // No process may inspect the interpreter, or the copies of it on their way into a sandbox.
    process::set_not_dumpable()?;
    seccomp::compile(seccomp::Profile::Code);
    seccomp::compile(seccomp::Profile::CodeOnHostFiles);
    // Nothing waits for a W, so the Linux kernel reaps it.
    sys::ignore(libc::SIGCHLD);
    // One buffer is used throughout, because pages that are written between two forks are no longer shared with the
    // kernels.
    let mut buffer = vec![0; wire::BUFFER];
    wire::send(launcher, &ZygoteMessage::Ready, &[])?;
    loop {
        let Some((order, fds)) = wire::receive_into::<ForkOrder>(&mut buffer, launcher)? else { return Ok(None) };
        if let Some(channel) = fork(launcher, order, fds, hooks)? {
            return Ok(Some(channel));
        }
    }
}

/// Finds a mapping that is writable and stays shared after a fork, which would connect sandboxes with each other.
fn shared_memory(maps: &str) -> Option<&str> {
    let is_shared = |line: &&str| line.split(' ').nth(1).is_some_and(|mode| mode.contains('w') && mode.ends_with('s'));
    maps.lines().find(is_shared)
}

/// Makes W. Returns a channel in the kernel that results from it, and `None` in the interpreter.
fn fork(launcher: BorrowedFd<'_>, order: ForkOrder, fds: Vec<OwnedFd>, hooks: Hooks) -> io::Result<Option<OwnedFd>> {
    let ForkOrder { number, v2, steps } = order;
    let refused =
        |message: String| wire::send(launcher, &ZygoteMessage::Refused { number, message }, &[]).map(|()| None);
    let mut fds = fds.into_iter();
    let (Some(channel), Some(guest)) = (fds.next(), fds.next()) else {
        return refused("a descriptor is missing".into());
    };
    let cgroup = if v2 { fds.next() } else { None };
    let entry = SandboxEntry { guest, tasks: fds.collect(), channel };
    (hooks.before)();
    let signals = Signals::block();
    let cloned = sys::clone3(0, cgroup.as_ref().map(AsFd::as_fd));
    if let Ok(Cloned::Child) = cloned {
        // `confine::enter` closes the descriptor together with all others.
        std::mem::forget(cgroup);
        sys::by_default(libc::SIGCHLD);
        let channel = bring_in(launcher, number, entry, &steps);
        signals.restore();
        (hooks.after_child)();
        return Ok(Some(channel));
    }
    signals.restore();
    (hooks.after_parent)();
    match cloned {
        Ok(Cloned::Parent { pidfd, .. }) => {
            wire::send(launcher, &ZygoteMessage::Begun { number }, &[pidfd.as_fd()]).map(|()| None)
        }
        Ok(Cloned::Child) => sys::leave(FAILED),
        Err(error) => refused(format!("cannot fork: {error}")),
    }
}

/// Exit code of a process that did not become a kernel.
const FAILED: c_int = 70;

/// Enters the sandbox. W ends in this function; only Y returns from it.
fn bring_in(launcher: BorrowedFd<'_>, number: u64, entry: SandboxEntry, steps: &[ConfineStep]) -> OwnedFd {
    let refused = |message| -> ! {
        let _ = wire::send(launcher, &ZygoteMessage::Refused { number, message }, &[]);
        sys::leave(FAILED)
    };
    let channel = confine::enter(entry, steps, &[launcher]).unwrap_or_else(|message| refused(message));
    match spawn::spawn() {
        Ok(Spawned::Kernel) => {
            spawn::restore_rseq();
            if let Err(message) = confine::arrive_as_kernel(&[channel.as_fd()]) {
                let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
                let _ = rustix::net::send(&channel, message.as_bytes(), flags);
                sys::leave(FAILED)
            }
            channel
        }
        Ok(Spawned::Made { pid, process }) => {
            let sent = wire::send(launcher, &ZygoteMessage::Forked { number, pid }, &[process.as_fd()]);
            if let Err(error) = sent {
                let _ = pidfd_send_signal(&process, Signal::KILL);
                // The user may have too many descriptors in flight. A refusal has none, so the launcher does not wait
                // for a kernel in vain.
                refused(format!("cannot pass the kernel on: {error}"))
            }
            sys::leave(0)
        }
        Err(error) => refused(format!("cannot fork in the sandbox: {error}")),
    }
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
