//! This module wraps the syscalls that no safe crate offers in safe functions. Other modules decide policy.

use std::ffi::{CStr, CString, c_char, c_int, c_long};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::ptr;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, Signal};

type Result<T> = std::result::Result<T, Errno>;

fn last() -> Errno {
    io::Error::last_os_error().raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)
}

fn check(result: c_long) -> Result<c_long> {
    if result < 0 { Err(last()) } else { Ok(result) }
}

/// `clone_args` of clone3(2), which the C library's headers have only on some targets.
#[repr(C, align(8))]
#[derive(Default)]
pub(crate) struct CloneArgs {
    pub flags: u64,
    pub pidfd: u64,
    pub child_tid: u64,
    pub parent_tid: u64,
    pub exit_signal: u64,
    pub stack: u64,
    pub stack_size: u64,
    pub tls: u64,
    pub set_tid: u64,
    pub set_tid_size: u64,
    pub cgroup: u64,
}

pub(crate) const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

pub enum Cloned {
    Child,
    Parent { pid: Pid, pidfd: OwnedFd },
}

/// Forks a process with new namespaces, a pidfd and, on cgroup v2, a cgroup. The caller must be the only thread of its
/// process: the child continues with a copy of any locks that other threads held.
pub fn clone3(namespaces: c_int, cgroup: Option<BorrowedFd<'_>>) -> Result<Cloned> {
    let mut pidfd: RawFd = -1;
    let mut args = CloneArgs {
        flags: (namespaces | libc::CLONE_PIDFD) as u64,
        pidfd: ptr::from_mut(&mut pidfd) as u64,
        exit_signal: libc::SIGCHLD as u64,
        ..CloneArgs::default()
    };
    if let Some(cgroup) = cgroup {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = cgroup.as_raw_fd() as u64;
    }
    // SAFETY: without CLONE_VM the child has its own copy of the memory and of this stack, as after fork(2). `args` is
    // a complete `clone_args`, and `pidfd` is written only before the call returns.
    let pid = check(unsafe { libc::syscall(libc::SYS_clone3, ptr::from_ref(&args), size_of::<CloneArgs>()) })?;
    match Pid::from_raw(pid as i32) {
        None => Ok(Cloned::Child),
        // SAFETY: the kernel has just created this descriptor for us.
        Some(pid) => Ok(Cloned::Parent { pid, pidfd: unsafe { OwnedFd::from_raw_fd(pidfd) } }),
    }
}

/// Runs `work` with the file permissions of this user, who also owns the files that it creates.
pub(crate) fn with_file_ids<T>(uid: u32, gid: u32, work: impl FnOnce() -> T) -> T {
    let set = |uid: u32, gid: u32| {
        // SAFETY: both calls change only ids of the calling thread. They report no errors: without the privilege the
        // ids stay as they are.
        unsafe {
            libc::setfsgid(gid);
            libc::setfsuid(uid);
        }
    };
    set(uid, gid);
    let result = work();
    set(rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    result
}

/// Runs `work` in a process that [`clone3`] creates, and returns the pid and the pidfd of that process. The process
/// exits when `work` returns or panics: it neither runs its parent's destructors nor unwinds into its parent's loop.
/// Its exit status is ignored.
pub(crate) fn spawn_child(
    namespaces: c_int,
    cgroup: Option<BorrowedFd<'_>>,
    work: impl FnOnce(),
) -> Result<(Pid, OwnedFd)> {
    match clone3(namespaces, cgroup)? {
        Cloned::Child => {
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            leave(1)
        }
        Cloned::Parent { pid, pidfd } => Ok((pid, pidfd)),
    }
}

/// Separates a child of the launcher from it: the child gets the default signals, dies with the launcher and closes all
/// of the launcher's descriptors except `keep`.
pub(crate) fn separate_child(keep: &[BorrowedFd<'_>]) -> Result<()> {
    default_signals();
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    close_all_but(keep)
}

/// Forks a process for a short-lived helper, under the same condition as [`clone3`].
pub(crate) fn fork() -> Result<Option<Pid>> {
    // SAFETY: the process has one thread (launcher), or the child only makes async-signal-safe calls (the callers'
    // contract).
    let pid = check(c_long::from(unsafe { libc::fork() }))?;
    Ok(Pid::from_raw(pid as i32))
}

/// Exits without running destructors or exit handlers, as a forked child has to.
pub fn leave(code: c_int) -> ! {
    // SAFETY: `_exit` has no preconditions.
    unsafe { libc::_exit(code) }
}

/// Kills every process that this one may signal, except itself and PID 1. The caller must have no capabilities and a
/// uid that owns no other processes.
pub(crate) fn kill_own() -> Result<()> {
    // SAFETY: the arguments are plain numbers.
    check(c_long::from(unsafe { libc::kill(-1, libc::SIGKILL) })).map(drop)
}

/// Blocks until the process is killed. Used by a process that exists only to keep its namespace alive.
pub(crate) fn wait_until_killed() -> ! {
    loop {
        // SAFETY: `pause` has no preconditions.
        unsafe { libc::pause() };
    }
}

/// Moves the calling, single-threaded process into new namespaces.
pub(crate) fn unshare(namespaces: c_int) -> Result<()> {
    // SAFETY: only CLONE_NEW* flags are passed, so memory and descriptors stay shared as they are.
    check(c_long::from(unsafe { libc::unshare(namespaces) })).map(drop)
}

pub(crate) const RDONLY: u64 = libc::MOUNT_ATTR_RDONLY;
pub(crate) const NOSUID: u64 = libc::MOUNT_ATTR_NOSUID;
pub(crate) const NODEV: u64 = libc::MOUNT_ATTR_NODEV;
pub(crate) const NOEXEC: u64 = libc::MOUNT_ATTR_NOEXEC;

/// Adds attributes to the mount behind `fd`, and to those below it if `recursive`. Attributes are never removed, so the
/// ones that the host locked remain.
pub(crate) fn mount_setattr(fd: BorrowedFd<'_>, set: u64, recursive: bool) -> Result<()> {
    set_mount(
        fd,
        libc::mount_attr { attr_set: set, attr_clr: 0, propagation: libc::MS_PRIVATE, userns_fd: 0 },
        recursive,
    )
}

/// Shows the files of a detached mount, and of those below it, with owners mapped according to a user namespace.
pub(crate) fn mount_idmap(fd: BorrowedFd<'_>, namespace: BorrowedFd<'_>) -> Result<()> {
    let userns_fd = u64::try_from(namespace.as_raw_fd()).map_err(|_| Errno::BADF)?;
    set_mount(fd, libc::mount_attr { attr_set: libc::MOUNT_ATTR_IDMAP, attr_clr: 0, propagation: 0, userns_fd }, true)
}

fn set_mount(fd: BorrowedFd<'_>, attr: libc::mount_attr, recursive: bool) -> Result<()> {
    let flags = libc::AT_EMPTY_PATH | if recursive { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: the path is an empty C string and `attr` is a complete `mount_attr`; both outlive the call.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            fd.as_raw_fd(),
            c"".as_ptr(),
            flags,
            ptr::from_ref(&attr),
            size_of::<libc::mount_attr>(),
        )
    };
    check(done).map(drop)
}

/// Marks every descriptor from `first` on close-on-exec.
fn close_on_exec_from(first: RawFd) -> Result<()> {
    const CLOEXEC: libc::c_uint = 4;
    // SAFETY: only the close-on-exec flag changes; no descriptor becomes invalid in this program.
    check(unsafe { libc::syscall(libc::SYS_close_range, first, libc::c_uint::MAX, CLOEXEC) }).map(drop)
}

/// Closes all descriptors of a forked child except the standard three and `keep`. Owners of closed descriptors must not
/// be used or dropped afterwards: such a child ends by [`leave`] or executes another program.
pub(crate) fn close_all_but(keep: &[BorrowedFd<'_>]) -> Result<()> {
    let mut kept: Vec<u32> =
        keep.iter().filter_map(|fd| u32::try_from(fd.as_raw_fd()).ok()).filter(|n| *n > 2).collect();
    kept.sort_unstable();
    let mut first = 3;
    for number in kept.into_iter().chain([u32::MAX]) {
        if first < number {
            // SAFETY: the descriptors between two kept ones belong to owners that this process has given up, by
            // contract.
            check(unsafe { libc::syscall(libc::SYS_close_range, first, number - 1, 0) })?;
        }
        first = number.saturating_add(1);
    }
    Ok(())
}

/// Number of descriptors that a program can receive: 0 to 4.
const HANDED_OVER: RawFd = 5;

/// Duplicates `fd` to a number below [`HANDED_OVER`], at which the next program expects it.
fn duplicate_to(fd: &OwnedFd, number: RawFd) -> Result<()> {
    // SAFETY: the caller reserves the numbers 0 to 4 for the descriptors it hands over; no owned descriptor has one of
    // them.
    check(c_long::from(unsafe { libc::dup2(fd.as_raw_fd(), number) })).map(drop)
}

/// Duplicates `fd` to a number above those that [`hand_over`] assigns.
fn move_up(fd: &OwnedFd) -> Result<OwnedFd> {
    rustix::io::fcntl_dupfd_cloexec(fd, 64)
}

/// Gives each of `fds` the number at which the next program expects it, and marks all other descriptors close-on-exec.
/// Returns copies of `keep` that the caller can use until it executes that program. Until then it must not drop an owner
/// of one of these numbers, which would close the descriptor that was placed there.
pub(crate) fn hand_over<const N: usize>(fds: &[(RawFd, &OwnedFd)], keep: [&OwnedFd; N]) -> Result<[OwnedFd; N]> {
    let kept: Vec<OwnedFd> = keep.into_iter().map(move_up).collect::<Result<_>>()?;
    let moved: Vec<OwnedFd> = fds.iter().map(|(_, fd)| move_up(fd)).collect::<Result<_>>()?;
    for ((number, _), fd) in fds.iter().zip(&moved) {
        duplicate_to(fd, *number)?;
    }
    close_on_exec_from(HANDED_OVER)?;
    kept.try_into().map_err(|_| Errno::INVAL)
}

/// Opens `/dev/null` with a number above those that [`hand_over`] assigns.
pub(crate) fn open_null() -> Result<OwnedFd> {
    move_up(&rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?)
}

/// Replaces the descriptors with these numbers, which are open and have no owner, by `/dev/null`.
pub(crate) fn place_null(mut numbers: Range<RawFd>) -> Result<()> {
    let null = open_null()?;
    numbers.try_for_each(|number| duplicate_to(&null, number))
}

/// Replaces this program by the one behind `fd`, with these arguments and an empty environment. Returns only on
/// failure.
pub(crate) fn execveat(fd: BorrowedFd<'_>, args: &[CString]) -> Errno {
    let argv: Vec<*const c_char> = args.iter().map(|a| a.as_ptr()).chain([ptr::null()]).collect();
    let envp: [*const c_char; 1] = [ptr::null()];
    // SAFETY: `argv` and `envp` are null-terminated arrays of C strings that outlive the call.
    unsafe {
        libc::syscall(
            libc::SYS_execveat,
            fd.as_raw_fd(),
            c"".as_ptr(),
            argv.as_ptr(),
            envp.as_ptr(),
            libc::AT_EMPTY_PATH,
        )
    };
    last()
}

/// Replaces this program by the one at `path`, with these arguments and this environment. Returns only on failure.
pub(crate) fn execve(path: &CStr, args: &[CString], environment: &[CString]) -> Errno {
    let array = |list: &[CString]| list.iter().map(|a| a.as_ptr()).chain([ptr::null()]).collect::<Vec<_>>();
    let (argv, envp) = (array(args), array(environment));
    // SAFETY: `argv` and `envp` are null-terminated arrays of C strings that outlive the call.
    unsafe { libc::execve(path.as_ptr(), argv.as_ptr(), envp.as_ptr()) };
    last()
}

/// Moves the calling, single-threaded process into namespaces of the process behind `pidfd`. A pid namespace applies
/// only to its children.
pub(crate) fn join_namespaces(pidfd: BorrowedFd<'_>, namespaces: c_int) -> Result<()> {
    // SAFETY: the call changes what the process sees, and none of its memory.
    check(c_long::from(unsafe { libc::setns(pidfd.as_raw_fd(), namespaces) })).map(drop)
}

/// Makes the kernel kill this process when the last writer of the pipe is gone, also after an `exec`. The signal counts
/// as sent by the process to itself, whichever process the last writer was.
pub(crate) fn kill_self_when_closed(pipe: BorrowedFd<'_>) -> Result<()> {
    const F_SETSIG: c_int = 10;
    let fd = pipe.as_raw_fd();
    // SAFETY: the arguments are plain numbers and only set what the kernel does when the pipe changes.
    unsafe {
        check(c_long::from(libc::fcntl(fd, F_SETSIG, libc::SIGKILL)))?;
        check(c_long::from(libc::fcntl(fd, libc::F_SETOWN, libc::getpid())))?;
        check(c_long::from(libc::fcntl(fd, libc::F_SETFL, libc::O_ASYNC))).map(drop)
    }
}

/// Leaves the session keyring of the process that started us, because keyrings are not part of a namespace. A kernel
/// without keyrings is accepted.
pub(crate) fn new_session_keyring() -> Result<()> {
    // SAFETY: a null name asks for a new anonymous keyring.
    match check(unsafe { libc::syscall(libc::SYS_keyctl, libc::KEYCTL_JOIN_SESSION_KEYRING, ptr::null::<c_char>()) }) {
        Ok(_) | Err(Errno::NOSYS) => Ok(()),
        Err(e) => Err(e),
    }
}

/// Brings up the loopback interface of the current network namespace.
pub(crate) fn loopback_up() -> Result<()> {
    let socket = rustix::net::socket_with(
        rustix::net::AddressFamily::INET,
        rustix::net::SocketType::DGRAM,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )?;
    // SAFETY: an all-zero `ifreq` is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_name[0] = b'l' as c_char;
    request.ifr_name[1] = b'o' as c_char;
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as i16;
    // SAFETY: SIOCSIFFLAGS reads one `ifreq`, which outlives the call.
    check(c_long::from(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, ptr::from_ref(&request)) }))
        .map(drop)
}

/// Settings of a network namespace that bound the socket buffers that no cgroup counts. The kernel charges no cgroup
/// for the data of a connection that waits to be accepted: such a connection gets little room until a program reads
/// from it, and only a limited number can wait at one socket ([`crate::sockets`] ends a sandbox that creates too many).
/// Copies of sent data with a time stamp would wait in another uncharged queue, so none are made.
pub(crate) const NETWORK_LIMITS: &[(&str, &str)] = &[
    ("ipv4/tcp_rmem", "4096 16384 1048576"),
    ("ipv4/tcp_max_tw_buckets", "4096"),
    ("core/optmem_max", "20480"),
    ("core/tstamp_allow_data", "0"),
    ("core/somaxconn", "512"),
];

/// Applies [`NETWORK_LIMITS`] to the current network namespace, as far as the kernel has them per namespace and
/// `/proc/sys` is writable. Returns the ones that could not be set as bits, which `doctor` reports.
pub(crate) fn limit_network() -> u8 {
    let set = |(name, value): &(&str, &str)| std::fs::write(Path::new("/proc/sys/net").join(name), value);
    NETWORK_LIMITS.iter().enumerate().filter(|(_, limit)| set(limit).is_err()).fold(0, |bits, (n, _)| bits | 1 << n)
}

/// Leaves a real-time scheduling policy or I/O class, if the process has one.
pub(crate) fn ordinary_scheduling() -> Result<()> {
    const PROCESS: c_int = 1;
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: the call reads the policy of the calling process.
    let policy = unsafe { libc::sched_getscheduler(0) } & !libc::SCHED_RESET_ON_FORK;
    if [libc::SCHED_FIFO, libc::SCHED_RR, libc::SCHED_DEADLINE].contains(&policy) {
        // SAFETY: `parameters` outlives the call.
        check(c_long::from(unsafe { libc::sched_setscheduler(0, libc::SCHED_OTHER, ptr::from_ref(&parameters)) }))?;
    }
    // SAFETY: the arguments are plain numbers. Class and level 0 mean that the I/O priority follows the nice value; a
    // kernel without I/O priorities returns ENOSYS.
    match check(unsafe { libc::syscall(libc::SYS_ioprio_set, PROCESS, 0, 0) }) {
        Ok(_) | Err(Errno::NOSYS) => Ok(()),
        Err(e) => Err(e),
    }
}

/// Ignores a signal. Used for signals that would end the launcher before it has cleaned up.
pub fn ignore(signal: c_int) {
    // SAFETY: SIG_IGN installs no code.
    unsafe { libc::signal(signal, libc::SIG_IGN) };
}

/// Resets a signal to its default action.
pub fn by_default(signal: c_int) {
    // SAFETY: SIG_DFL installs no code.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
}

/// Resets all signals to the default and unblocks them, as programs expect at their start.
pub(crate) fn default_signals() {
    // SAFETY: SIG_DFL installs no code; `sigemptyset` initialises the set before it is used.
    unsafe {
        for signal in 1..32 {
            libc::signal(signal, libc::SIG_DFL);
        }
        let mut none = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &none, ptr::null_mut());
    }
}

/// Locks one byte of a file for its open file description. Returns false if another description has locked it; locks of
/// the same description do not conflict.
pub(crate) fn try_lock_byte(file: BorrowedFd<'_>, byte: u32) -> Result<bool> {
    match set_lock(file, byte, libc::F_WRLCK) {
        Err(Errno::AGAIN | Errno::ACCESS) => Ok(false),
        other => other.map(|()| true),
    }
}

pub(crate) fn unlock_byte(file: BorrowedFd<'_>, byte: u32) -> Result<()> {
    set_lock(file, byte, libc::F_UNLCK)
}

fn set_lock(file: BorrowedFd<'_>, byte: u32, kind: c_int) -> Result<()> {
    // SAFETY: all zeros is a valid value of this plain struct.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as i16;
    lock.l_whence = libc::SEEK_SET as i16;
    lock.l_start = libc::off_t::from(byte);
    lock.l_len = 1;
    // SAFETY: F_OFD_SETLK reads one `flock`, which outlives the call.
    check(c_long::from(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, ptr::from_ref(&lock)) })).map(drop)
}

/// Reaps one dead child, if there is any.
pub(crate) fn reap_any() -> Option<Pid> {
    // SAFETY: a null status pointer is allowed.
    Pid::from_raw(unsafe { libc::waitpid(-1, ptr::null_mut(), libc::WNOHANG | libc::__WALL) }.max(0))
}

/// Returns the newest landlock ABI of the kernel, or `None` if landlock is absent or switched off.
pub(crate) fn landlock_abi() -> Option<u32> {
    const VERSION: u32 = 1;
    // SAFETY: with the version flag the kernel reads no attributes and expects null and 0.
    let abi = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, ptr::null::<u8>(), 0usize, VERSION) };
    u32::try_from(abi).ok().filter(|abi| *abi > 0)
}

/// Returns the syscalls that the creation of a sandbox needs and that this kernel (or a filter around us) does not
/// have.
pub(crate) fn missing_calls() -> Vec<&'static str> {
    let none = ptr::null::<u8>();
    // SAFETY: each call gets an invalid length, flag or descriptor, so that it fails before it reads or changes
    // anything.
    let tried = unsafe {
        [
            ("fsopen (5.2)", check(libc::syscall(libc::SYS_fsopen, none, u32::MAX))),
            ("open_tree (5.2)", check(libc::syscall(libc::SYS_open_tree, -1, none, u32::MAX))),
            ("move_mount (5.2)", check(libc::syscall(libc::SYS_move_mount, -1, none, -1, none, u32::MAX))),
            ("clone3 (5.3)", check(libc::syscall(libc::SYS_clone3, none, 0usize))),
            ("pidfd_open (5.3)", check(libc::syscall(libc::SYS_pidfd_open, -1, 0))),
            ("openat2 (5.6)", check(libc::syscall(libc::SYS_openat2, -1, none, none, 0usize))),
            ("close_range (5.9)", check(libc::syscall(libc::SYS_close_range, u32::MAX, 0, 0))),
            ("mount_setattr (5.12)", check(libc::syscall(libc::SYS_mount_setattr, -1, none, 0, none, 0usize))),
        ]
    };
    tried.into_iter().filter(|(_, result)| *result == Err(Errno::NOSYS)).map(|(name, _)| name).collect()
}

/// Returns whether the kernel supports seccomp filters that kill the process.
pub(crate) fn seccomp_available() -> bool {
    let action: u32 = libc::SECCOMP_RET_KILL_PROCESS;
    // SAFETY: the kernel reads one `u32`.
    unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_ACTION_AVAIL, 0, ptr::from_ref(&action)) == 0 }
}

/// Returns blocks that are free in a file system to the storage below it.
pub(crate) fn trim(dir: BorrowedFd<'_>) -> Result<()> {
    #[repr(C)]
    struct Range {
        start: u64,
        length: u64,
        least: u64,
    }
    const FITRIM: libc::Ioctl = 0xC018_5879_u32 as libc::Ioctl;
    let mut range = Range { start: 0, length: u64::MAX, least: 0 };
    // SAFETY: FITRIM reads and writes one `fstrim_range`, which has the layout of `Range`.
    check(unsafe { libc::ioctl(dir.as_raw_fd(), FITRIM, ptr::from_mut(&mut range)) }.into()).map(drop)
}

/// Loop devices, as described in loop(4).
pub(crate) mod loop_device {
    use super::{AsFd, AsRawFd, Errno, OwnedFd, RawFd, Result, check, ptr};

    const CTL_GET_FREE: libc::Ioctl = 0x4C82;
    const CONFIGURE: libc::Ioctl = 0x4C0A;
    const AUTOCLEAR: u32 = 4;

    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Info {
        device: u64,
        inode: u64,
        rdevice: u64,
        offset: u64,
        sizelimit: u64,
        number: u32,
        encrypt_type: u32,
        encrypt_key_size: u32,
        flags: u32,
        file_name: [u8; 64],
        crypt_name: [u8; 64],
        encrypt_key: [u8; 32],
        init: [u64; 2],
    }

    #[repr(C)]
    struct LoopConfig {
        fd: u32,
        block_size: u32,
        info: Info,
        reserved: [u64; 8],
    }

    pub(crate) fn free_number(control: impl AsFd) -> Result<u32> {
        // SAFETY: the request takes no argument.
        let number = check(unsafe { libc::ioctl(control.as_fd().as_raw_fd(), CTL_GET_FREE) }.into())?;
        Ok(number as u32)
    }

    /// Attaches `file` to the device, which releases it automatically once the device is neither open nor mounted.
    pub(crate) fn configure(device: &OwnedFd, file: RawFd) -> Result<()> {
        // SAFETY: all zeros is a valid value of these plain structs.
        let mut config: LoopConfig = unsafe { std::mem::zeroed() };
        config.fd = u32::try_from(file).map_err(|_| Errno::BADF)?;
        config.info.flags = AUTOCLEAR;
        // SAFETY: LOOP_CONFIGURE reads one `loop_config`, which has the layout of `LoopConfig`.
        check(unsafe { libc::ioctl(device.as_raw_fd(), CONFIGURE, ptr::from_ref(&config)) }.into()).map(drop)
    }
}
