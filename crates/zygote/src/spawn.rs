//! The fork into another pid namespace, by way of a process that shares our memory.
//!
//! A plain fork would leave us as the parent, and the sandbox's PID 1 could not die before we have reaped; a second fork would copy the
//! page tables twice. X is made as by vfork (no copy, we stand still until it ends) while our children are born in the sandbox's pid
//! namespace; X forks Y and ends.

use std::ffi::{c_int, c_long, c_uint, c_void};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use jail::sys::{self, CLONE_INTO_CGROUP, CloneArgs};

/// Why there is no kernel.
#[derive(Debug)]
pub enum Failure {
    /// This one cannot be had; the next may.
    Refused(String),
    /// Nobody knows in which state this process is.
    Broken(io::Error),
}

pub enum Spawned {
    /// We are the kernel.
    Kernel,
    /// It has this number in the sandbox.
    Made { pid: u32, process: OwnedFd },
}

unsafe extern "C" {
    /// clone3(`args`, `size`) of a child that shares memory and stack with us: calls `body(arg)` in it, which must not return there.
    /// Returns what the kernel returned (an error as a negative number), and, in a process that `body` has forked and that returned
    /// from it, what `body` returned.
    fn sandpool_vspawn(
        args: *const CloneArgs,
        size: usize,
        body: extern "C" fn(*mut Message) -> c_long,
        arg: *mut Message,
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
    "    mov rbx, rdx",
    "    mov r12, rcx",
    "    mov eax, {clone3}",
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
    clone3 = const libc::SYS_clone3,
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
    "    mov x19, x2",
    "    mov x20, x3",
    "    mov x8, #{clone3}",
    "    svc #0",
    "    cbnz x0, 1f",
    "    mov x0, x20",
    "    blr x19",
    "1:  ldp x19, x20, [sp, #16]",
    "    ldp x29, x30, [sp], #32",
    "    ret",
    ".size sandpool_vspawn, .-sandpool_vspawn",
    clone3 = const libc::SYS_clone3,
);

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("the warm interpreter is forked by code that this architecture does not have yet");

/// What X leaves in the memory that it shares with us.
#[repr(C)]
#[derive(Debug, Default)]
struct Message {
    pid: c_int,
    process: c_int,
    error: c_int,
}

/// In X, and at its end in Y.
extern "C" fn fork_and_end(message: *mut Message) -> c_long {
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

/// A kernel in the pid namespace of `guest`, and in the cgroup. Returns twice, like a fork.
pub fn spawn(park: &Park, guest: BorrowedFd<'_>, cgroup: Option<BorrowedFd<'_>>) -> Result<Spawned, Failure> {
    sys::join_namespaces(guest, libc::CLONE_NEWPID)
        .map_err(|e| Failure::Refused(format!("cannot fork into the sandbox: {e}")))?;
    // Its descriptors are ours: what X opens for us outlives it.
    let mut args = CloneArgs {
        flags: (libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_FILES) as u64,
        exit_signal: libc::SIGCHLD as u64,
        ..CloneArgs::default()
    };
    if let Some(cgroup) = cgroup {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = cgroup.as_raw_fd() as u64;
    }
    let mut message = Message::default();
    // SAFETY: `args` is a whole `clone_args`; `fork_and_end` keeps the contract of the function, and `message` outlives X.
    let result = unsafe { sandpool_vspawn(&raw const args, size_of::<CloneArgs>(), fork_and_end, &raw mut message) };
    if result == 0 {
        return Ok(Spawned::Kernel);
    }
    park.come_back().map_err(Failure::Broken)?;
    if result < 0 {
        let error = io::Error::from_raw_os_error(-result as c_int);
        return Err(Failure::Refused(format!("cannot fork into the sandbox: {error}")));
    }
    // SAFETY: a null status is allowed. X has ended, or we would not be here.
    unsafe { libc::waitpid(result as c_int, ptr::null_mut(), libc::__WALL) };
    match message {
        Message { error, .. } if error != 0 => {
            let error = io::Error::from_raw_os_error(error);
            Err(Failure::Refused(format!("cannot fork in the sandbox: {error}")))
        }
        Message { pid: pid @ 1.., process, .. } => {
            // SAFETY: X has opened it in our table, and nobody else knows it.
            let process = unsafe { OwnedFd::from_raw_fd(process) };
            Ok(Spawned::Made { pid: pid as u32, process })
        }
        // Killed with its sandbox, in the middle of a fork that has locks in memory that is ours.
        _ => Err(Failure::Broken(io::Error::other("a fork was killed half-way"))),
    }
}

/// Where our children would be born between two forks: in a pid namespace whose first process is dead, so nowhere. As an ordinary user
/// there is no way back into the host's, and a fork or a thread by accident fails.
pub struct Park {
    namespace: OwnedFd,
}

impl Park {
    pub fn new() -> io::Result<Self> {
        sys::unshare(libc::CLONE_NEWPID)?;
        // A namespace can be opened only once it has had a process.
        let Some(first) = sys::fork()? else { sys::wait_for_the_end() };
        let namespace = std::fs::File::open("/proc/thread-self/ns/pid_for_children").map(OwnedFd::from);
        rustix::process::kill_process(first, rustix::process::Signal::KILL)?;
        rustix::process::waitpid(Some(first), rustix::process::WaitOptions::empty())?;
        Ok(Self { namespace: namespace? })
    }

    fn come_back(&self) -> io::Result<()> {
        use std::os::fd::AsFd;
        Ok(sys::join_namespaces(self.namespace.as_fd(), libc::CLONE_NEWPID)?)
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
    use std::os::fd::AsFd;

    use rustix::process::{PidfdFlags, getpid, pidfd_open};

    use super::*;

    #[test]
    fn a_fork_that_the_kernel_refuses_is_not_taken_for_the_kernel() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIP: needs root");
            return;
        }
        // Where children are born is a thread's own.
        let attempt = || {
            let park = Park::new().unwrap();
            let (own, no_cgroup) =
                (pidfd_open(getpid(), PidfdFlags::empty()).unwrap(), std::fs::File::open("/").unwrap());
            let dead = std::fs::File::open("/").unwrap();
            for (guest, cgroup, why) in [
                (own.as_fd(), Some(no_cgroup.as_fd()), "Bad file descriptor"),
                (dead.as_fd(), None, "Invalid argument"),
            ] {
                match spawn(&park, guest, cgroup) {
                    Err(Failure::Refused(message)) => assert!(message.contains(why), "{message}"),
                    Err(Failure::Broken(error)) => panic!("{error}"),
                    Ok(Spawned::Made { pid, .. }) => panic!("{pid}"),
                    // Not by a panic: this would be a second test process.
                    Ok(Spawned::Kernel) => sys::leave(1),
                }
            }
            // And nothing can be born where it was left.
            assert!(sys::fork().is_err());
        };
        std::thread::spawn(attempt).join().unwrap();
    }
}
