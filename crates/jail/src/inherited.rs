//! This module takes over what a process inherits from its parent: descriptors by number, and signals as a descriptor.
//!
//! It does not know the purpose of the descriptors.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Takes the descriptor `number` that the parent left open, and marks it close-on-exec.
///
/// Call this once per number at the start of the program, before other code can have opened that number.
pub fn take_fd(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: `F_SETFD` with a flag touches no memory; a number that is not open gives EBADF.
    if unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) } == -1 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is open (checked above), and by contract nothing else in this process owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Blocks the signals in the calling thread and returns a non-blocking, close-on-exec descriptor that delivers them.
///
/// This is for single-threaded programs. Children inherit the mask: see [`unblock_in_child`].
pub fn signal_fd(signals: &[i32]) -> io::Result<OwnedFd> {
    let set = signal_set(signals);
    // SAFETY: `set` is an initialised signal set; the old mask is not requested.
    let blocked = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()) };
    if blocked != 0 {
        return Err(io::Error::from_raw_os_error(blocked));
    }
    // SAFETY: `set` is an initialised signal set and outlives the call.
    let fd = unsafe { libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
    if fd == -1 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the Linux kernel has just returned this descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Makes the command start with an empty signal mask, whatever its parent has blocked.
pub fn unblock_in_child(command: &mut Command) -> &mut Command {
    let none = signal_set(&[]);
    let unblock = move || {
        // SAFETY: `none` is an initialised signal set.
        match unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &none, std::ptr::null_mut()) } {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    };
    // SAFETY: the closure calls one async-signal-safe function and allocates nothing.
    unsafe { command.pre_exec(unblock) }
}

fn signal_set(signals: &[i32]) -> libc::sigset_t {
    let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigemptyset` initialises the whole set, `sigaddset` refuses numbers that are no signals.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for &signal in signals {
            libc::sigaddset(set.as_mut_ptr(), signal);
        }
        set.assume_init()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_is_not_open_is_an_error() {
        assert_eq!(take_fd(1_000_000).unwrap_err().raw_os_error(), Some(libc::EBADF));
    }

    #[test]
    #[allow(clippy::disallowed_methods, reason = "the child is the thing under test")]
    fn a_child_starts_with_nothing_blocked() {
        // Use a separate thread, because the mask must not leak into other tests.
        let status = std::thread::spawn(|| {
            let _fd = signal_fd(&[libc::SIGTERM]).unwrap();
            let mut command = Command::new("grep");
            command.args(["-q", "^SigBlk:\t0000000000000000$", "/proc/self/status"]);
            unblock_in_child(&mut command).status().unwrap()
        });
        assert!(status.join().unwrap().success());
    }
}
