//! The fork into a sandbox's pid namespace, by way of a process that shares our memory.
//!
//! A plain fork would leave us as the parent, and the sandbox's PID 1 could not die before we have reaped; a second one would copy the
//! page tables again. X is made as by vfork (no copy, we stand still until it ends); it forks Y and ends. X can be stopped or killed by
//! code in the sandbox: that costs this process, which is here for one kernel, and nobody else.

use std::ffi::{c_int, c_long, c_uint, c_ulong, c_void};
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr;

pub enum Spawned {
    /// We are the kernel.
    Kernel,
    /// It has this number in the sandbox.
    Made { pid: u32, process: OwnedFd },
}

unsafe extern "C" {
    /// clone(`flags`) of a child that shares memory and stack with us: calls `body(arg)` in it, which must not return there.
    /// Returns what the kernel returned (an error as a negative number), and, in a process that `body` has forked and that returned
    /// from it, what `body` returned.
    fn sandpool_vspawn(
        flags: c_ulong,
        body: extern "C" fn(*mut SpawnReport) -> c_long,
        arg: *mut SpawnReport,
    ) -> c_long;
}

// In assembly, because the child goes on with our stack while our own frame has to stay as it is: nothing at or above the stack
// pointer of the system call is written by it. What has to survive the call is in registers that the kernel keeps for both.
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

/// What X leaves in the memory that it shares with us.
#[repr(C)]
#[derive(Debug, Default)]
struct SpawnReport {
    pid: c_int,
    process: c_int,
    error: c_int,
}

/// In X, and at its end in Y.
extern "C" fn fork_and_end(message: *mut SpawnReport) -> c_long {
    // SAFETY: points into the frame of `spawn`, which stands still until X ends. X has one thread and no handler can run in it, all
    // signals being blocked; the C library's fork takes care of its own state in Y.
    unsafe {
        let message = &mut *message;
        // Y is to be in a session of its own without leading it: a leader that opens a terminal is tied to it and dies with it.
        if libc::setsid() < 0 {
            message.error = *libc::__errno_location();
            libc::_exit(1)
        }
        let pid = libc::fork();
        if pid == 0 {
            return 0;
        }
        if pid < 0 {
            message.error = *libc::__errno_location();
            libc::_exit(1)
        }
        // As its parent X knows that the number is still Y's; afterwards only the descriptor says so.
        message.process = libc::syscall(libc::SYS_pidfd_open, pid, 0) as c_int;
        if message.process < 0 {
            message.error = *libc::__errno_location();
            libc::kill(pid, libc::SIGKILL);
            libc::_exit(1)
        }
        message.pid = pid;
        libc::_exit(0)
    }
}

/// A kernel where our children are born. Returns twice, like a fork.
pub fn spawn() -> io::Result<Spawned> {
    // By clone, whose flags the sandbox's filter can read. X's descriptors are ours: what it opens for us outlives it.
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_FILES | libc::SIGCHLD;
    let mut message = SpawnReport::default();
    // SAFETY: `fork_and_end` keeps the contract of the function, and `message` outlives X.
    let result = unsafe { sandpool_vspawn(flags as c_ulong, fork_and_end, &raw mut message) };
    match result {
        0 => return Ok(Spawned::Kernel),
        ..0 => return Err(io::Error::from_raw_os_error(-result as c_int)),
        // SAFETY: a null status is allowed. X has ended, or we would not be here.
        1.. => unsafe { libc::waitpid(result as c_int, ptr::null_mut(), libc::__WALL) },
    };
    match message {
        SpawnReport { error, .. } if error != 0 => Err(io::Error::from_raw_os_error(error)),
        SpawnReport { pid: pid @ 1.., process, .. } => {
            // SAFETY: X has opened it in our table, and nobody else knows it.
            let process = unsafe { OwnedFd::from_raw_fd(process) };
            Ok(Spawned::Made { pid: pid as u32, process })
        }
        // If it got so far that there is a kernel, that one sees the end of its channel and ends.
        _ => Err(io::Error::other("a process of the sandbox, or its end, killed the fork")),
    }
}

/// No signal is handled while X has our memory; in Y none before it is held.
pub struct Signals {
    before: libc::sigset_t,
}

impl Signals {
    pub fn block() -> Self {
        // SAFETY: both sets are initialised, by `sigfillset` and by the call.
        unsafe {
            let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
            Self { before }
        }
    }

    pub fn restore(self) {
        // SAFETY: the mask as it was.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, ptr::null_mut()) };
    }
}

#[cfg(target_arch = "x86_64")]
const RSEQ_SIGNATURE: u32 = 0x5305_3053;
#[cfg(target_arch = "aarch64")]
const RSEQ_SIGNATURE: u32 = 0xd428_bc00;

/// A process that shares memory with another loses its registration of restartable sequences, and its fork inherits that; the C
/// library would read the number of a processor that it was on long ago. Without its own registration there is nothing to restore.
pub fn restore_rseq() {
    // SAFETY: both symbols are constants of the C library where it has them. The area is this thread's own, the library's registration
    // of it is gone, and the arguments are those that it used.
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
    // SAFETY: the ABI has the thread pointer's own address there.
    unsafe { std::arch::asm!("mov {}, fs:0", out(reg) pointer, options(nostack, preserves_flags, readonly)) };
    pointer
}

#[cfg(target_arch = "aarch64")]
fn thread_pointer() -> usize {
    let pointer;
    // SAFETY: reads a register.
    unsafe { std::arch::asm!("mrs {}, tpidr_el0", out(reg) pointer, options(nostack, preserves_flags, nomem)) };
    pointer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fork_returns_in_the_kernel_and_tells_its_parent_who_that_is() {
        // In a process of its own: what returns as the kernel must not be a second test process.
        match jail::sys::clone3(0, None).unwrap() {
            jail::sys::Cloned::Child => match spawn() {
                Ok(Spawned::Kernel) => jail::sys::leave(7),
                Ok(Spawned::Made { pid, process }) => {
                    // X is gone, so that the kernel is another's child, and its descriptor still says when it ends.
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
                // Nobody's uid, which may have no process.
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
