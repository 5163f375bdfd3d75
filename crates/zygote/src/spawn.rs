//! This module forks into a sandbox's pid namespace, by way of a process that shares our memory.
//!
//! After a plain fork we would be the parent, and the sandbox's PID 1 could not die before we have reaped the child; a
//! second fork would copy the page tables again. X is created as by vfork (no copy, and we are suspended until it
//! ends); it forks Y and ends. Code in the sandbox can stop or kill X: that affects only this process, which exists for
//! one kernel.

use std::ffi::{c_int, c_long, c_uint, c_ulong, c_void};
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr;

pub(crate) enum Spawned {
    /// The current process is the kernel.
    Kernel,
    /// The kernel was created and has this pid in the sandbox.
    Made { pid: u32, process: OwnedFd },
}

unsafe extern "C" {
    /// Calls `clone(flags)` for a child that shares memory and stack with us, and calls `body(arg)` in the child, where
    /// `body` must not return. Returns the Linux kernel's result (an error as a negative number). In a process that
    /// `body` has forked and that returned from `body`, returns the result of `body`.
    fn sandpool_vspawn(
        flags: c_ulong,
        body: extern "C" fn(*mut SpawnReport) -> c_long,
        arg: *mut SpawnReport,
    ) -> c_long;
}

// This is assembly because the child continues on our stack while our frame has to stay intact: the child writes
// nothing at or above the stack pointer of the syscall. Values that have to survive the call are in registers that the
// Linux kernel preserves for both.
#[cfg(target_arch = "x86_64")]
std::arch::global_asm!(
    ".globl sandpool_vspawn",
    ".hidden sandpool_vspawn",
    ".type sandpool_vspawn,@function",
    "sandpool_vspawn:",
    "    push rbx",
    "    push r12",
    "    sub rsp, 8", // the ABI's alignment at the call
    "    mov rbx, rsi",
    "    mov r12, rdx",
    "    xor esi, esi", // the stack: ours
    "    xor edx, edx",
    "    xor r10d, r10d",
    "    xor r8d, r8d",
    "    mov eax, {clone}",
    "    syscall",
    "    test rax, rax",
    "    jnz 1f",
    "    mov rdi, r12",
    "    call rbx",
    "1:  add rsp, 8",
    "    pop r12",
    "    pop rbx",
    "    ret",
    ".size sandpool_vspawn, .-sandpool_vspawn",
    clone = const libc::SYS_clone,
);

#[cfg(target_arch = "aarch64")]
std::arch::global_asm!(
    ".globl sandpool_vspawn",
    ".hidden sandpool_vspawn",
    ".type sandpool_vspawn,%function",
    "sandpool_vspawn:",
    "    stp x29, x30, [sp, #-32]!",
    "    stp x19, x20, [sp, #16]",
    "    mov x29, sp",
    "    mov x19, x1",
    "    mov x20, x2",
    "    mov x1, xzr", // the stack: ours
    "    mov x2, xzr",
    "    mov x3, xzr",
    "    mov x4, xzr",
    "    mov x8, #{clone}",
    "    svc #0",
    "    cbnz x0, 1f",
    "    mov x0, x20",
    "    blr x19",
    "1:  ldp x19, x20, [sp, #16]",
    "    ldp x29, x30, [sp], #32",
    "    ret",
    ".size sandpool_vspawn, .-sandpool_vspawn",
    clone = const libc::SYS_clone,
);

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("the warm interpreter is forked by code that this architecture does not have yet");

/// The report that X leaves for us in the shared memory.
#[repr(C)]
#[derive(Debug, Default)]
struct SpawnReport {
    pid: c_int,
    process: c_int,
    error: c_int,
}

/// Runs in X, which ends in this function; only Y returns from it.
extern "C" fn fork_and_end(report: *mut SpawnReport) -> c_long {
    // SAFETY: the pointer leads into the frame of `spawn`, which is suspended until X ends. X has one thread, and no
    // handler can run in it because all signals are blocked; the C library's fork handles its own state in Y.
    unsafe {
        let report = &mut *report;
        // Y has to be in a new session without leading it: a session leader that opens a terminal is tied to it and
        // dies with it.
        if libc::setsid() < 0 {
            report.error = *libc::__errno_location();
            libc::_exit(1)
        }
        let pid = libc::fork();
        if pid == 0 {
            return 0;
        }
        if pid < 0 {
            report.error = *libc::__errno_location();
            libc::_exit(1)
        }
        // As the parent, X knows that the pid is still Y's; afterwards only the descriptor identifies Y.
        report.process = libc::syscall(libc::SYS_pidfd_open, pid, 0) as c_int;
        if report.process < 0 {
            report.error = *libc::__errno_location();
            libc::kill(pid, libc::SIGKILL);
            libc::_exit(1)
        }
        report.pid = pid;
        libc::_exit(0)
    }
}

/// Creates a kernel in the pid namespace of our children. Returns twice, like a fork.
pub(crate) fn spawn() -> io::Result<Spawned> {
    // This uses `clone`, whose flags the sandbox's filter can read. X shares our descriptor table, so the descriptor
    // that it opens for us outlives it.
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_FILES | libc::SIGCHLD;
    let mut report = SpawnReport::default();
    // SAFETY: `fork_and_end` fulfils the contract of the function, and `report` outlives X.
    let result = unsafe { sandpool_vspawn(flags as c_ulong, fork_and_end, &raw mut report) };
    match result {
        0 => return Ok(Spawned::Kernel),
        ..0 => return Err(io::Error::from_raw_os_error(-result as c_int)),
        // SAFETY: a null status is allowed. X has ended, because the call has returned.
        1.. => unsafe { libc::waitpid(result as c_int, ptr::null_mut(), libc::__WALL) },
    };
    match report {
        SpawnReport { error, .. } if error != 0 => Err(io::Error::from_raw_os_error(error)),
        SpawnReport { pid: pid @ 1.., process, .. } => {
            // SAFETY: X has opened it in our descriptor table, and nothing else uses it.
            let process = unsafe { OwnedFd::from_raw_fd(process) };
            Ok(Spawned::Made { pid: pid as u32, process })
        }
        // If a kernel was created nevertheless, it sees the end of its channel and ends.
        _ => Err(io::Error::other("a process of the sandbox, or its end, killed the fork")),
    }
}

/// Blocks all signals: no handler may run while X shares our memory, nor in Y before it is confined.
pub(crate) struct Signals {
    before: libc::sigset_t,
}

impl Signals {
    pub(crate) fn block() -> Self {
        // SAFETY: `sigfillset` initialises one set, the call the other.
        unsafe {
            let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
            Self { before }
        }
    }

    pub(crate) fn restore(self) {
        // SAFETY: this restores the previous mask.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, ptr::null_mut()) };
    }
}

#[cfg(target_arch = "x86_64")]
const RSEQ_SIGNATURE: u32 = 0x5305_3053;
#[cfg(target_arch = "aarch64")]
const RSEQ_SIGNATURE: u32 = 0xd428_bc00;

/// Registers restartable sequences again. A process that shares memory with another loses its registration, and its
/// fork inherits that; the C library would then read the number of a processor that the process has left long ago. If
/// the C library has not registered any, there is nothing to restore.
pub(crate) fn restore_rseq() {
    // SAFETY: where the C library has these symbols, both are constants. The area belongs to this thread, the library's
    // registration of it is gone, and the arguments are the ones that the library used.
    unsafe {
        let offset = libc::dlsym(libc::RTLD_DEFAULT, c"__rseq_offset".as_ptr()).cast::<isize>();
        let size = libc::dlsym(libc::RTLD_DEFAULT, c"__rseq_size".as_ptr()).cast::<c_uint>();
        if offset.is_null() || size.is_null() || *size == 0 {
            return;
        }
        let area = thread_pointer().wrapping_add_signed(*offset) as *mut c_void;
        libc::syscall(libc::SYS_rseq, area, (*size).max(32), 0, RSEQ_SIGNATURE);
    }
}

#[cfg(target_arch = "x86_64")]
fn thread_pointer() -> usize {
    let pointer;
    // SAFETY: the ABI stores the thread pointer's own address there.
    unsafe { std::arch::asm!("mov {}, fs:0", out(reg) pointer, options(nostack, preserves_flags, readonly)) };
    pointer
}

#[cfg(target_arch = "aarch64")]
fn thread_pointer() -> usize {
    let pointer;
    // SAFETY: the instruction reads a register.
    unsafe { std::arch::asm!("mrs {}, tpidr_el0", out(reg) pointer, options(nostack, preserves_flags, nomem)) };
    pointer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fork_returns_in_the_kernel_and_tells_its_parent_who_that_is() {
        // This runs in a forked child: the process that returns as the kernel must not become a second test process.
        match jail::sys::clone3(0, None).unwrap() {
            jail::sys::Cloned::Child => match spawn() {
                Ok(Spawned::Kernel) => jail::sys::leave(7),
                Ok(Spawned::Made { pid, process }) => {
                    // X is gone, so the kernel has another parent, and its descriptor still reports its end.
                    let mut fds = [rustix::event::PollFd::new(&process, rustix::event::PollFlags::IN)];
                    let ended = rustix::event::poll(&mut fds, None).is_ok();
                    jail::sys::leave(if ended && pid > 1 { 0 } else { 2 })
                }
                Err(_) => jail::sys::leave(3),
            },
            jail::sys::Cloned::Parent { pid, .. } => {
                let status = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty()).unwrap();
                assert_eq!(status.unwrap().1.exit_status(), Some(0));
            }
        }
    }

    #[test]
    fn a_fork_that_the_kernel_refuses_is_not_taken_for_the_kernel() {
        use rustix::process::{Resource, Rlimit, setrlimit};
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIP: needs root");
            return;
        }
        match jail::sys::clone3(0, None).unwrap() {
            jail::sys::Cloned::Child => {
                // A uid that belongs to no user and may have no process.
                let nobody = rustix::process::Uid::from_raw(3_999_999_999);
                let limit = Rlimit { current: Some(0), maximum: Some(0) };
                let alone = setrlimit(Resource::Nproc, limit).is_ok()
                    && rustix::thread::set_thread_res_uid(nobody, nobody, nobody).is_ok();
                match spawn() {
                    Err(e) if alone && e.raw_os_error() == Some(libc::EAGAIN) => jail::sys::leave(0),
                    _ => jail::sys::leave(1),
                }
            }
            jail::sys::Cloned::Parent { pid, .. } => {
                let status = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty()).unwrap();
                assert_eq!(status.unwrap().1.exit_status(), Some(0));
            }
        }
    }
}
