//! This module contains the seccomp policy as data: which syscalls are allowed, and why. It knows no BPF.
//!
//! The policy is an allow-list. A syscall that no rule names gets `ENOSYS`, the error of a Linux kernel that is too
//! old: every runtime has a fallback for that, and a syscall that Linux adds tomorrow is refused today. A syscall that
//! a program may make in good faith but must not have is named and gets `EPERM`, with the reason beside it.
//!
//! The table is Rust code and not a file to be parsed: a misspelt name is a compile error, the numbers are libc's for
//! the target architecture, and there is no parser between the policy and the Linux kernel. `Display` prints the table;
//! the snapshot beside the tests is the text to review.

use libc::c_long;

/// The filter's answer to a syscall.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    Allow,
    Kill,
    Eperm,
    Enosys,
    Einval,
    Enotty,
    Eafnosupport,
    Eprotonosupport,
    Enoprotoopt,
    Eopnotsupp,
    /// Reports success without doing anything. It answers requests that programs do not need but that make them give up
    /// when refused.
    Ignore,
}
use Action::*;

/// The syscalls for one purpose. The first matching clause decides; if none matches, `otherwise` applies.
#[derive(Debug)]
pub(crate) struct Rule {
    pub why: &'static str,
    pub calls: &'static [SyscallEntry],
    pub clauses: &'static [Clause],
    pub otherwise: Action,
}

impl Rule {
    /// Returns whether the rule allows anything.
    pub(crate) fn allows(&self) -> bool {
        self.otherwise == Allow || self.clauses.iter().any(|clause| clause.then == Allow)
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct SyscallEntry {
    pub name: &'static str,
    pub number: c_long,
}

/// A list of tests with an answer; it matches if all tests hold.
#[derive(Debug)]
pub(crate) struct Clause {
    pub tests: &'static [Test],
    pub then: Action,
}

/// A test that holds if `argument & mask` is one of `values`. Only the low 32 bits are compared: every argument tested
/// below is an `int` in the Linux kernel too (or flags that end at bit 31), so the high half has no meaning there
/// either. For pointers both halves are tested ([`HIGH`]).
#[derive(Debug)]
pub(crate) struct Test {
    pub argument: u8,
    pub mask: u32,
    pub values: &'static [Value],
}

/// An inclusive range of values, in most cases a single number.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Value {
    pub name: &'static str,
    pub low: u32,
    pub high: u32,
}

/// The answer to a syscall that no rule names.
pub(crate) const UNNAMED: Action = Enosys;

/// The answer to a syscall of another architecture (i386 through `int 0x80` on x86-64). There are no 32-bit programs in
/// a sandbox, so such a call is an attempt to find a filter that reads the wrong table.
pub(crate) const FOREIGN: Action = Kill;

macro_rules! calls {
    ($($name:ident)*) => { &[$(SyscallEntry { name: stringify!($name), number: numbers::$name }),*] };
}

macro_rules! values {
    ($($name:ident)*) => { &[$(Value { name: stringify!($name), low: libc::$name as u32, high: libc::$name as u32 }),*] };
}

const fn value(name: &'static str, number: u32) -> Value {
    Value { name, low: number, high: number }
}

const fn range(name: &'static str, low: u32, high: u32) -> Value {
    Value { name, low, high }
}

const ALL: u32 = u32::MAX;

/// Returns a test of a whole argument.
const fn argument(argument: u8, values: &'static [Value]) -> Test {
    masked(argument, ALL, values)
}

/// Returns a test of some bits of an argument.
const fn masked(argument: u8, mask: u32, values: &'static [Value]) -> Test {
    Test { argument, mask, values }
}

/// Flag that is added to an argument's index to select its upper half.
pub(crate) const HIGH: u8 = 0x80;

macro_rules! allow {
    ($why:literal, $($name:ident)*) => { Rule { why: $why, calls: calls!($($name)*), clauses: &[], otherwise: Allow } };
}

macro_rules! refuse {
    ($why:literal, $action:ident, $($name:ident)*) => {
        Rule { why: $why, calls: calls!($($name)*), clauses: &[], otherwise: $action }
    };
}

const NAMESPACES: u32 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET) as u32;

/// RWF_HIPRI, DSYNC, SYNC, APPEND, NOAPPEND and ATOMIC.
const RWF: u32 = 0x77;

/// SCHED_RESET_ON_FORK, which may accompany a scheduling policy.
const RESET_ON_FORK: u32 = 0x4000_0000;

const SET_ID_BITS: u32 = libc::S_ISUID | libc::S_ISGID;

/// The flags of `open` with which it creates a file: O_CREAT, and O_TMPFILE without O_DIRECTORY, which is a part of it.
const CREATES: u32 = (libc::O_CREAT | (libc::O_TMPFILE & !libc::O_DIRECTORY)) as u32;

const NOTHING: &[Value] = &[value("none", 0)];
const NULL: &[Value] = &[value("null", 0)];
const SELF: &[Value] = &[value("self", 0)];

pub(crate) const RULES: &[Rule] = &[
    // Syscalls that are allowed unconditionally.
    allow!(
        "bytes in and out of descriptors that are already open",
        SYS_read SYS_write SYS_readv SYS_writev SYS_pread64 SYS_pwrite64 SYS_preadv SYS_pwritev
        SYS_lseek SYS_close SYS_close_range SYS_dup SYS_dup3 SYS_flock SYS_pipe2 SYS_copy_file_range
        SYS_fsync SYS_fdatasync SYS_ftruncate SYS_readahead
    ),
    allow!(
        "files by name: decided by the mounts, landlock and the file modes, which see the resolved path",
        SYS_openat SYS_openat2 SYS_faccessat SYS_faccessat2 SYS_newfstatat SYS_fstat SYS_statx SYS_statfs SYS_fstatfs
        SYS_readlinkat SYS_getdents64 SYS_getcwd SYS_chdir SYS_fchdir SYS_mkdirat SYS_unlinkat SYS_renameat SYS_renameat2
        SYS_linkat SYS_symlinkat SYS_fchmod SYS_fchmodat SYS_fchmodat2 SYS_fchown SYS_fchownat SYS_truncate SYS_utimensat
        SYS_umask
    ),
    allow!(
        "extended attributes (tar, cp -a, git); trusted.* and security.* need a capability nobody has",
        SYS_getxattr SYS_lgetxattr SYS_fgetxattr SYS_setxattr SYS_lsetxattr SYS_fsetxattr SYS_listxattr SYS_llistxattr
        SYS_flistxattr SYS_removexattr SYS_lremovexattr SYS_fremovexattr
    ),
    #[cfg(target_arch = "x86_64")]
    allow!(
        "the older names of the same calls, which x86-64 programs still use",
        SYS_open SYS_creat SYS_access SYS_stat SYS_lstat SYS_readlink SYS_getdents SYS_mkdir SYS_rmdir SYS_unlink SYS_rename
        SYS_link SYS_symlink SYS_chmod SYS_chown SYS_lchown SYS_utime SYS_utimes SYS_futimesat SYS_dup2 SYS_pipe SYS_select
        SYS_poll SYS_epoll_create SYS_epoll_wait SYS_eventfd SYS_signalfd SYS_inotify_init SYS_fork SYS_vfork SYS_getpgrp
        SYS_alarm SYS_pause SYS_time SYS_getrlimit SYS_sync_file_range
    ),
    #[cfg(target_arch = "x86_64")]
    allow!("thread-local storage, AMX permission, shadow stacks of the process itself", SYS_arch_prctl),
    allow!(
        "waiting: poll, epoll, events, timers, changes of files",
        SYS_pselect6 SYS_ppoll SYS_epoll_create1 SYS_epoll_ctl SYS_epoll_pwait SYS_epoll_pwait2 SYS_eventfd2 SYS_signalfd4
        SYS_timerfd_create SYS_timerfd_settime SYS_timerfd_gettime SYS_inotify_init1 SYS_inotify_add_watch
        SYS_inotify_rm_watch
    ),
    allow!(
        "memory of the process itself, whose size the cgroup limits",
        SYS_munmap SYS_mprotect SYS_mremap SYS_msync SYS_brk SYS_mlock SYS_mlock2 SYS_munlock SYS_munlockall
        SYS_membarrier SYS_mseal
    ),
    allow!(
        "protection keys: V8 guards its code pages with them where the CPU can",
        SYS_pkey_alloc SYS_pkey_free SYS_pkey_mprotect
    ),
    allow!(
        "threads and locks",
        SYS_futex SYS_futex_waitv SYS_set_robust_list SYS_get_robust_list SYS_set_tid_address SYS_rseq SYS_gettid
        SYS_sched_yield SYS_getcpu
    ),
    allow!(
        "processes: programs are run, waited for and grouped; the pid namespace ends at the sandbox",
        SYS_execve SYS_execveat SYS_exit SYS_exit_group SYS_wait4 SYS_waitid SYS_getpid SYS_getppid SYS_getpgid SYS_setpgid
        SYS_getsid SYS_setsid SYS_pidfd_open SYS_pidfd_send_signal
    ),
    allow!(
        "signals: the pid namespace contains only processes of the sandbox, and PID 1 ignores signals that it does not \
         handle",
        SYS_kill SYS_tkill SYS_tgkill SYS_rt_sigaction SYS_rt_sigprocmask SYS_rt_sigpending SYS_rt_sigsuspend
        SYS_rt_sigtimedwait SYS_rt_sigqueueinfo SYS_rt_tgsigqueueinfo SYS_rt_sigreturn SYS_sigaltstack SYS_restart_syscall
    ),
    allow!(
        "reading the clock, sleeping, timers of the process",
        SYS_clock_gettime SYS_clock_getres SYS_clock_nanosleep SYS_nanosleep SYS_gettimeofday SYS_times SYS_getitimer
        SYS_setitimer SYS_timer_create SYS_timer_settime SYS_timer_gettime SYS_timer_getoverrun SYS_timer_delete
    ),
    allow!(
        "identity: without capabilities, a process can only set the ids that it already has",
        SYS_getuid SYS_geteuid SYS_getgid SYS_getegid SYS_getresuid SYS_getresgid SYS_getgroups SYS_setuid SYS_setgid
        SYS_setreuid SYS_setregid SYS_setresuid SYS_setresgid SYS_setfsuid SYS_setfsgid SYS_capget
    ),
    allow!("Chromium gives up capabilities that it does not have, and does not start if that is refused", SYS_capset),
    allow!(
        "scheduling of own processes; real-time and negative nice are refused by the rlimits, which are 0 and hard",
        SYS_sched_getaffinity SYS_sched_setaffinity SYS_sched_getattr SYS_sched_setattr SYS_sched_getparam
        SYS_sched_setparam SYS_sched_getscheduler SYS_sched_get_priority_max SYS_sched_get_priority_min
        SYS_sched_rr_get_interval SYS_getpriority SYS_setpriority SYS_ioprio_get SYS_ioprio_set
    ),
    allow!("facts about the system", SYS_uname SYS_sysinfo SYS_getrusage SYS_getrandom),
    allow!(
        "sockets, once `socket` has let the family through",
        SYS_bind SYS_connect SYS_listen SYS_accept SYS_accept4 SYS_shutdown SYS_getsockname SYS_getpeername SYS_recvfrom
        SYS_recvmsg SYS_recvmmsg
    ),
    allow!(
        "System V shared memory and semaphores (PostgreSQL, X11): the ipc namespace is the sandbox's own",
        SYS_shmat SYS_shmdt SYS_shmctl SYS_semget SYS_semop SYS_semtimedop SYS_semctl
    ),
    allow!(
        "a process may confine itself further: landlock layers can only take rights away",
        SYS_landlock_create_ruleset SYS_landlock_add_rule SYS_landlock_restrict_self
    ),
    // Syscalls that are allowed depending on their arguments.
    Rule {
        why: "like preadv and pwritev, except RWF_NOWAIT, which reveals whether others have recently read a file (its \
              pages are in memory), and flags that do not exist yet; the error is that of a kernel that does not know \
              the flag",
        calls: calls!(SYS_preadv2 SYS_pwritev2),
        clauses: &[Clause { tests: &[masked(5, !RWF, NOTHING)], then: Allow }],
        otherwise: Eopnotsupp,
    },
    Rule {
        why: "advice about reading, except dropping the pages of a file that others read too: their return would \
              reveal who reads it",
        calls: calls!(SYS_fadvise64),
        clauses: &[Clause { tests: &[argument(3, values!(POSIX_FADV_DONTNEED))], then: Ignore }],
        otherwise: Allow,
    },
    Rule {
        why: "querying what the kernel supports. Code may not install a filter: its compiled form is charged to no \
              cgroup and counts against one limit for the whole host (net.core.bpf_jit_limit), beyond which no new \
              sandbox would get its filter. The error is that of a kernel without filters, which man-db and sshd \
              accept",
        calls: calls!(SYS_seccomp),
        clauses: &[Clause {
            tests: &[argument(0, values!(SECCOMP_GET_ACTION_AVAIL SECCOMP_GET_NOTIF_SIZES))],
            then: Allow,
        }],
        otherwise: Einval,
    },
    Rule {
        why: "threads and processes, never a namespace: a user namespace is the first step of most kernel exploits",
        calls: calls!(SYS_clone),
        clauses: &[Clause { tests: &[masked(0, NAMESPACES, NOTHING)], then: Allow }],
        otherwise: Eperm,
    },
    Rule {
        why: "unix sockets, TCP and UDP. Not one family or protocol more: vsock reaches the hypervisor, alg, key, rxrpc, xfrm, \
              smc, l2tp and the like are where the exploits were found, and answers of netlink that nobody reads are kernel \
              memory that no cgroup counts (interfaces::library lists the interfaces instead)",
        calls: calls!(SYS_socket),
        clauses: &[
            Clause { tests: &[argument(0, values!(AF_UNIX))], then: Allow },
            Clause {
                tests: &[
                    argument(0, values!(AF_INET AF_INET6)),
                    masked(1, 0xf, values!(SOCK_STREAM SOCK_DGRAM)),
                    argument(2, values!(IPPROTO_IP IPPROTO_TCP IPPROTO_UDP)),
                ],
                then: Allow,
            },
            Clause {
                tests: &[argument(0, values!(AF_INET AF_INET6)), masked(1, 0xf, values!(SOCK_STREAM SOCK_DGRAM))],
                // Go tries MPTCP first, and falls back to TCP only on this error.
                then: Eprotonosupport,
            },
            Clause { tests: &[argument(0, values!(AF_INET AF_INET6))], then: Eperm },
        ],
        otherwise: Eafnosupport,
    },
    Rule {
        why: "pairs of unix sockets",
        calls: calls!(SYS_socketpair),
        clauses: &[Clause { tests: &[argument(0, values!(AF_UNIX))], then: Allow }],
        otherwise: Eafnosupport,
    },
    Rule {
        why: "the options that programs use. Not those that put another protocol under a socket (in-kernel TLS, ESP), attach BPF, \
              pass pages by reference, join groups, take flow labels of the whole host, or fill queues that no cgroup counts: \
              errors, transmit time stamps, corked datagrams",
        calls: calls!(SYS_setsockopt),
        clauses: &[
            // No cgroup counts the buffer of a socket that waits to be accepted; the kernel's default size is enough.
            Clause { tests: &[SOL_SOCKET, option(values!(SO_RCVBUF))], then: Ignore },
            Clause { tests: &[SOL_SOCKET, option(SOCKET_OPTIONS)], then: Allow },
            Clause { tests: &[level(values!(IPPROTO_TCP)), option(TCP_OPTIONS)], then: Allow },
            // glibc's resolver treats a refusal as a broken socket.
            Clause { tests: &[level(values!(IPPROTO_IP)), option(values!(IP_RECVERR))], then: Ignore },
            Clause { tests: &[level(values!(IPPROTO_IP)), option(IP_OPTIONS)], then: Allow },
            Clause { tests: &[level(values!(IPPROTO_IPV6)), option(values!(IPV6_RECVERR))], then: Ignore },
            Clause { tests: &[level(values!(IPPROTO_IPV6)), option(IPV6_OPTIONS)], then: Allow },
        ],
        otherwise: Enoprotoopt,
    },
    Rule {
        why: "every option may be read, except TCP_ZEROCOPY_RECEIVE, which maps received pages into the process",
        calls: calls!(SYS_getsockopt),
        clauses: &[Clause {
            tests: &[level(values!(IPPROTO_TCP)), option(&[value("TCP_ZEROCOPY_RECEIVE", 35)])],
            then: Enoprotoopt,
        }],
        otherwise: Allow,
    },
    Rule {
        why: "sending, except a datagram in parts, which waits in memory that no cgroup counts, and pages by reference",
        calls: calls!(SYS_sendto SYS_sendmmsg),
        clauses: &[Clause { tests: &[masked(3, SEND_FLAGS, NOTHING)], then: Allow }],
        otherwise: Eopnotsupp,
    },
    Rule {
        why: "like sendto",
        calls: calls!(SYS_sendmsg),
        clauses: &[Clause { tests: &[masked(2, SEND_FLAGS, NOTHING)], then: Allow }],
        otherwise: Eopnotsupp,
    },
    Rule {
        why: "holes in files, but no blocks in advance: a volume would count them although its image does not contain \
              them, so the disk could be full when they are written. Libraries write zeros instead",
        calls: calls!(SYS_fallocate),
        clauses: &[Clause {
            tests: &[argument(
                1,
                &[value("punch_hole", (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE) as u32)],
            )],
            then: Allow,
        }],
        otherwise: Eopnotsupp,
    },
    Rule {
        why: "terminals, sockets and files as programs use them. Not TIOCSTI and TIOCLINUX (typing into a terminal), TIOCSETD \
              (line disciplines), and nothing of a file system (where its blocks lie on the disk, subvolumes, project ids, \
              encryption keys) or of a device; the answer is a device's own to what it does not know",
        calls: calls!(SYS_ioctl),
        clauses: &[Clause { tests: &[argument(1, IOCTLS)], then: Allow }],
        otherwise: Enotty,
    },
    Rule {
        why: "names, death signals, own restrictions. Not PR_SET_MM (rewrites what /proc says of a process), not \
              PR_SET_MEMORY_MERGE (pages compared with those of other tenants), nothing new; the answer is the kernel's to an \
              option it does not know",
        calls: calls!(SYS_prctl),
        clauses: &[Clause { tests: &[argument(0, PRCTLS)], then: Allow }],
        otherwise: Einval,
    },
    Rule {
        why: "memory, but not from the host's pool of huge pages: no memory limit counts those; libraries take ordinary pages instead",
        calls: calls!(SYS_mmap),
        clauses: &[Clause { tests: &[masked(3, libc::MAP_HUGETLB as u32, values!(MAP_HUGETLB))], then: Einval }],
        otherwise: Allow,
    },
    Rule {
        why: "like mmap",
        calls: calls!(SYS_memfd_create),
        clauses: &[Clause { tests: &[masked(1, libc::MFD_HUGETLB, values!(MFD_HUGETLB))], then: Einval }],
        otherwise: Allow,
    },
    Rule {
        why: "like mmap; the kernel lets any process have as many huge pages as it may lock",
        calls: calls!(SYS_shmget),
        clauses: &[Clause { tests: &[masked(2, libc::SHM_HUGETLB as u32, values!(SHM_HUGETLB))], then: Einval }],
        otherwise: Allow,
    },
    Rule {
        why: "descriptors, but no leases: in single mode, a lease on a file of a runtime would block others that open \
              it",
        calls: calls!(SYS_fcntl),
        clauses: &[Clause { tests: &[argument(1, values!(F_SETLEASE F_NOTIFY))], then: Einval }],
        otherwise: Allow,
    },
    Rule {
        why: "advice, except to merge pages (KSM), which would reveal to one tenant what another has in memory, and to \
              drop pages that others have mapped too",
        calls: calls!(SYS_madvise),
        clauses: &[Clause { tests: &[argument(2, values!(MADV_MERGEABLE MADV_HWPOISON MADV_PAGEOUT))], then: Einval }],
        otherwise: Allow,
    },
    Rule {
        why: "own limits only: the kernel lets a process set those of any other with its uid, PID 1 included, and does not ask \
              whether that one is dumpable. The one for core files is only read: at 0 instead of ours a crash would start the \
              host's core_pattern helper, as root (the answer is one that programs which mean well take for \"not here\")",
        calls: calls!(SYS_prlimit64),
        clauses: &[
            Clause {
                tests: &[
                    argument(1, values!(RLIMIT_CORE)),
                    argument(2, NULL),
                    argument(2 | HIGH, NULL),
                    argument(0, SELF),
                ],
                then: Allow,
            },
            Clause { tests: &[argument(1, values!(RLIMIT_CORE))], then: Einval },
            Clause { tests: &[argument(0, SELF)], then: Allow },
        ],
        otherwise: Eperm,
    },
    #[cfg(target_arch = "x86_64")]
    Rule {
        why: "like prlimit64",
        calls: calls!(SYS_setrlimit),
        clauses: &[Clause { tests: &[argument(0, values!(RLIMIT_CORE))], then: Einval }],
        otherwise: Allow,
    },
    Rule {
        why: "ordinary scheduling, not real time",
        calls: calls!(SYS_sched_setscheduler),
        clauses: &[Clause {
            tests: &[masked(1, !RESET_ON_FORK, values!(SCHED_OTHER SCHED_BATCH SCHED_IDLE))],
            then: Allow,
        }],
        otherwise: Eperm,
    },
    Rule {
        why: "querying and resetting it. Other values turn address randomisation off, emulate other systems or weaken \
              memory protection",
        calls: calls!(SYS_personality),
        clauses: &[Clause { tests: &[argument(0, &[value("PER_LINUX", 0), value("query", ALL)])], then: Allow }],
        otherwise: Eperm,
    },
    #[cfg(target_arch = "x86_64")]
    Rule {
        why: "pipes, sockets and plain files by name, no device nodes (0:0 is a whiteout to overlayfs)",
        calls: calls!(SYS_mknod),
        clauses: &[Clause { tests: &[masked(1, libc::S_IFMT, NODES)], then: Allow }],
        otherwise: Eperm,
    },
    Rule {
        why: "like mknod",
        calls: calls!(SYS_mknodat),
        clauses: &[Clause { tests: &[masked(2, libc::S_IFMT, NODES)], then: Allow }],
        otherwise: Eperm,
    },
    // Syscalls that are refused with the error that makes programs use a fallback.
    refuse!("its flags lie in memory, which a filter cannot read; glibc falls back to clone", Enosys, SYS_clone3),
    refuse!(
        "performs other syscalls without making them, past any filter; Node and liburing fall back",
        Enosys,
        SYS_io_uring_setup SYS_io_uring_enter SYS_io_uring_register SYS_io_setup SYS_io_submit SYS_io_getevents
        SYS_io_destroy SYS_io_cancel
    ),
    refuse!(
        "page-cache pages by reference into pipes and sockets: the way of Dirty Pipe and Copy Fail; copying programs fall back \
         to read and write",
        Enosys,
        SYS_splice SYS_tee SYS_vmsplice
    ),
    refuse!(
        "the same from a file into a socket. EINVAL is the error of a file system without support, on which libuv, \
         Java, Go and Rust fall back; Python falls back on any error",
        Einval,
        SYS_sendfile
    ),
    refuse!(
        "reveals which pages of a file are in memory, truthfully if the file belongs to the same user; libunwind uses \
         msync instead",
        Enosys,
        SYS_mincore
    ),
    refuse!(
        "flushes every file system of the host; fsync suffices for a program in a sandbox",
        Enosys,
        SYS_sync SYS_syncfs
    ),
    refuse!(
        "placement of memory on NUMA nodes; libnuma and OpenBLAS treat ENOSYS as a machine without such nodes",
        Enosys,
        SYS_get_mempolicy SYS_set_mempolicy SYS_mbind SYS_migrate_pages SYS_move_pages
    ),
    // Syscalls that are refused.
    refuse!(
        "mounts are made before the sandbox begins",
        Eperm,
        SYS_mount SYS_umount2 SYS_pivot_root SYS_chroot SYS_fsopen SYS_fsconfig SYS_fsmount SYS_fspick SYS_open_tree
        SYS_move_mount SYS_mount_setattr
    ),
    refuse!("namespaces are made before the sandbox begins", Eperm, SYS_unshare SYS_setns),
    refuse!(
        "handles open files that no path leads to (Shocker)",
        Eperm,
        SYS_open_by_handle_at SYS_name_to_handle_at
    ),
    refuse!(
        "access to another process: the same uid would suffice, which PID 1 and, in single mode, the browser have. A \
         debugger inside is not worth that, nor ptrace's history of kernel bugs",
        Eperm,
        SYS_ptrace SYS_process_vm_readv SYS_process_vm_writev SYS_process_madvise SYS_process_mrelease SYS_pidfd_getfd SYS_kcmp
    ),
    refuse!(
        "keyrings are per uid, not per namespace, and request_key starts a program on the host",
        Eperm,
        SYS_add_key SYS_request_key SYS_keyctl
    ),
    refuse!(
        "the kernel's own machinery: programs in it, counters of it, faults handled by a process (the exploit writer's pause key)",
        Eperm,
        SYS_bpf SYS_perf_event_open SYS_userfaultfd SYS_syslog SYS_fanotify_init SYS_fanotify_mark SYS_lookup_dcookie
    ),
    refuse!(
        "the host's modules, kernel, swap, quotas, accounting",
        Eperm,
        SYS_init_module SYS_finit_module SYS_delete_module SYS_kexec_load SYS_kexec_file_load SYS_reboot SYS_swapon SYS_swapoff
        SYS_acct SYS_quotactl SYS_quotactl_fd SYS_vhangup
    ),
    refuse!(
        "the host's clock and names",
        Eperm,
        SYS_settimeofday SYS_clock_settime SYS_clock_adjtime SYS_adjtimex SYS_sethostname SYS_setdomainname
    ),
    #[cfg(target_arch = "x86_64")]
    refuse!("ports and segments of the CPU", Eperm, SYS_ioperm SYS_iopl SYS_modify_ldt),
    refuse!(
        "groups, and memory that cannot be reclaimed",
        Eperm,
        SYS_setgroups SYS_mlockall SYS_memfd_secret
    ),
];

/// Rules in place of those of [`RULES`], for processes that may write to files of the host. A set-uid file there belongs
/// to the owner of the directory, and other users of the host could execute it as that owner. `openat2` has its mode in
/// memory, which a filter cannot read; a file that it creates is empty. Every way to fill it takes the bits away, except
/// the set-gid bit of a file that its group may not execute, and without `setxattr` nothing adds that right afterwards.
pub(crate) const HOST_FILES: &[Rule] = &[
    Rule {
        why: "modes, but no set-uid and set-gid bits on files of the host",
        calls: calls!(SYS_fchmod),
        clauses: &[Clause { tests: &[masked(1, SET_ID_BITS, NOTHING)], then: Allow }],
        otherwise: Eperm,
    },
    Rule {
        why: "like fchmod",
        calls: calls!(SYS_fchmodat SYS_fchmodat2),
        clauses: &[Clause { tests: &[masked(2, SET_ID_BITS, NOTHING)], then: Allow }],
        otherwise: Eperm,
    },
    Rule {
        why: "like fchmod; the mode means something only with a flag that creates a file",
        calls: calls!(SYS_openat),
        clauses: &[
            Clause { tests: &[masked(3, SET_ID_BITS, NOTHING)], then: Allow },
            Clause { tests: &[masked(2, CREATES, NOTHING)], then: Allow },
        ],
        otherwise: Eperm,
    },
    refuse!(
        "an access control list changes the mode of a file and keeps its set-gid bit; the answer is that of a file system \
         without attributes, with which programs that copy files go on",
        Eopnotsupp,
        SYS_setxattr SYS_lsetxattr SYS_fsetxattr
    ),
    Rule {
        why: "like fchmod, and like mknodat without shared volumes",
        calls: calls!(SYS_mknodat),
        clauses: &[Clause { tests: &[masked(2, libc::S_IFMT, NODES), masked(2, SET_ID_BITS, NOTHING)], then: Allow }],
        otherwise: Eperm,
    },
    #[cfg(target_arch = "x86_64")]
    Rule {
        why: "like fchmod",
        calls: calls!(SYS_chmod SYS_creat),
        clauses: &[Clause { tests: &[masked(1, SET_ID_BITS, NOTHING)], then: Allow }],
        otherwise: Eperm,
    },
    #[cfg(target_arch = "x86_64")]
    Rule {
        why: "like openat",
        calls: calls!(SYS_open),
        clauses: &[
            Clause { tests: &[masked(2, SET_ID_BITS, NOTHING)], then: Allow },
            Clause { tests: &[masked(1, CREATES, NOTHING)], then: Allow },
        ],
        otherwise: Eperm,
    },
    #[cfg(target_arch = "x86_64")]
    Rule {
        why: "like mknodat",
        calls: calls!(SYS_mknod),
        clauses: &[Clause { tests: &[masked(1, libc::S_IFMT, NODES), masked(1, SET_ID_BITS, NOTHING)], then: Allow }],
        otherwise: Eperm,
    },
];

/// The subset of the code's syscalls that a browser and its driver need. A page attacks the renderer first, so the
/// renderer gets as little of the Linux kernel as it works with. The other syscalls get `EPERM`: other users,
/// device-like files, System V, terminals, real-time scheduling, attributes, filters installed by the browser itself.
/// The list was recorded from runs of both builds of Chromium, and the newer names of the same syscalls were added.
pub(crate) const BROWSER: &[SyscallEntry] = calls!(
    SYS_read SYS_write SYS_readv SYS_writev SYS_pread64 SYS_pwrite64 SYS_lseek SYS_close SYS_close_range SYS_dup SYS_dup3 SYS_fcntl
    SYS_flock SYS_pipe2 SYS_fsync SYS_fdatasync SYS_ftruncate SYS_fallocate SYS_fadvise64 SYS_ioctl
    SYS_openat SYS_faccessat SYS_faccessat2 SYS_newfstatat SYS_fstat SYS_statx SYS_statfs SYS_fstatfs SYS_readlinkat SYS_getdents64
    SYS_getcwd SYS_chdir SYS_fchdir SYS_mkdirat SYS_unlinkat SYS_renameat SYS_renameat2 SYS_linkat SYS_symlinkat SYS_fchmod
    SYS_fchmodat SYS_utimensat SYS_umask
    SYS_ppoll SYS_epoll_create1 SYS_epoll_ctl SYS_epoll_pwait SYS_eventfd2 SYS_timerfd_create SYS_timerfd_settime
    SYS_inotify_init1 SYS_inotify_add_watch SYS_inotify_rm_watch
    SYS_mmap SYS_munmap SYS_mprotect SYS_mremap SYS_madvise SYS_brk SYS_membarrier SYS_mseal SYS_memfd_create
    SYS_pkey_alloc SYS_pkey_free SYS_pkey_mprotect
    SYS_futex SYS_set_robust_list SYS_get_robust_list SYS_set_tid_address SYS_rseq SYS_gettid SYS_sched_yield SYS_getcpu
    SYS_clone SYS_execve SYS_execveat SYS_exit SYS_exit_group SYS_wait4 SYS_waitid SYS_getpid SYS_getppid SYS_getpgid SYS_setpgid
    SYS_setsid SYS_pidfd_open SYS_pidfd_send_signal SYS_prctl SYS_prlimit64
    SYS_kill SYS_tgkill SYS_rt_sigaction SYS_rt_sigprocmask SYS_rt_sigsuspend SYS_rt_sigreturn SYS_sigaltstack SYS_restart_syscall
    SYS_clock_gettime SYS_clock_getres SYS_clock_nanosleep SYS_nanosleep SYS_gettimeofday SYS_timer_create SYS_timer_settime
    SYS_timer_delete
    SYS_getuid SYS_geteuid SYS_getgid SYS_getegid SYS_getresuid SYS_getresgid SYS_getgroups SYS_capget SYS_capset
    SYS_sched_getaffinity SYS_sched_setaffinity SYS_sched_getattr SYS_sched_setattr SYS_sched_getparam SYS_sched_getscheduler
    SYS_sched_setscheduler SYS_getpriority SYS_setpriority
    SYS_uname SYS_sysinfo SYS_getrusage SYS_getrandom
    SYS_socket SYS_socketpair SYS_bind SYS_connect SYS_listen SYS_accept SYS_accept4 SYS_shutdown SYS_getsockname SYS_getpeername
    SYS_getsockopt SYS_setsockopt SYS_sendto SYS_recvfrom SYS_sendmsg SYS_recvmsg SYS_sendmmsg SYS_recvmmsg
    SYS_landlock_create_ruleset SYS_landlock_add_rule SYS_landlock_restrict_self
);

/// The older syscalls that only x86-64 has.
#[cfg(target_arch = "x86_64")]
pub(crate) const BROWSER_OLD: &[SyscallEntry] = calls!(
    SYS_open SYS_creat SYS_access SYS_stat SYS_lstat SYS_readlink SYS_mkdir SYS_rmdir SYS_unlink SYS_rename SYS_link SYS_symlink
    SYS_chmod SYS_dup2 SYS_pipe SYS_poll SYS_epoll_create SYS_epoll_wait SYS_eventfd SYS_inotify_init SYS_fork SYS_vfork
    SYS_getrlimit SYS_arch_prctl
);
#[cfg(not(target_arch = "x86_64"))]
pub(crate) const BROWSER_OLD: &[SyscallEntry] = &[];

const NODES: &[Value] = &[
    value("unset", 0),
    value("S_IFREG", libc::S_IFREG),
    value("S_IFIFO", libc::S_IFIFO),
    value("S_IFSOCK", libc::S_IFSOCK),
];

/// Flags of `send` that are refused.
const SEND_FLAGS: u32 = (libc::MSG_MORE | libc::MSG_ZEROCOPY) as u32;

const SOL_SOCKET: Test = level(values!(SOL_SOCKET));

const fn level(values: &'static [Value]) -> Test {
    argument(1, values)
}

const fn option(values: &'static [Value]) -> Test {
    argument(2, values)
}

const SOCKET_OPTIONS: &[Value] = &[
    value("SO_REUSEADDR", 2),
    range("SO_DONTROUTE..SO_SNDBUF", 5, 7),
    range("SO_KEEPALIVE..SO_PASSCRED", 9, 16),
    range("SO_RCVLOWAT..SO_SNDTIMEO", 18, 21),
    value("SO_BINDTODEVICE", 25),
    value("SO_TIMESTAMP", 29),
    range("SO_PASSSEC, SO_TIMESTAMPNS, SO_MARK", 34, 36),
    value("SO_RXQ_OVFL", 40),
    value("SO_PEEK_OFF", 42),
    value("SO_INCOMING_CPU", 49),
    range("SO_TIMESTAMP_NEW, SO_TIMESTAMPNS_NEW", 63, 64),
    range("SO_RCVTIMEO_NEW, SO_SNDTIMEO_NEW", 66, 67),
    value("SO_PASSPIDFD", 76),
    value("SO_PASSRIGHTS", 83),
];

const TCP_OPTIONS: &[Value] = &[
    range("TCP_NODELAY..TCP_WINDOW_CLAMP", 1, 10),
    range("TCP_QUICKACK, TCP_CONGESTION", 12, 13),
    range("TCP_THIN_LINEAR_TIMEOUTS..TCP_USER_TIMEOUT", 16, 18),
    value("TCP_FASTOPEN", 23),
    value("TCP_NOTSENT_LOWAT", 25),
    value("TCP_FASTOPEN_CONNECT", 30),
    value("TCP_INQ", 36),
];

const IP_OPTIONS: &[Value] = &[
    range("IP_TOS, IP_TTL", 1, 2),
    value("IP_PKTINFO", 8),
    value("IP_MTU_DISCOVER", 10),
    range("IP_RECVTTL, IP_RECVTOS", 12, 13),
    value("IP_FREEBIND", 15),
    range("IP_RECVORIGDSTADDR, IP_MINTTL", 20, 21),
    range("IP_BIND_ADDRESS_NO_PORT, IP_RECVFRAGSIZE", 24, 25),
    range("IP_MULTICAST_IF, IP_MULTICAST_TTL, IP_MULTICAST_LOOP", 32, 34),
    range("IP_MULTICAST_ALL..IP_LOCAL_PORT_RANGE", 49, 51),
];

const IPV6_OPTIONS: &[Value] = &[
    range("IPV6_UNICAST_HOPS..IPV6_MULTICAST_LOOP", 16, 19),
    range("IPV6_MTU_DISCOVER, IPV6_MTU", 23, 24),
    value("IPV6_V6ONLY", 26),
    value("IPV6_MULTICAST_ALL", 29),
    range("IPV6_RECVPKTINFO..IPV6_HOPLIMIT", 49, 52),
    value("IPV6_RECVPATHMTU", 60),
    value("IPV6_DONTFRAG", 62),
    range("IPV6_RECVTCLASS, IPV6_TCLASS", 66, 67),
    value("IPV6_AUTOFLOWLABEL", 70),
    range("IPV6_ADDR_PREFERENCES..IPV6_FREEBIND", 72, 78),
];

/// The ioctl numbers of `asm-generic/ioctls.h`, which are the same on both architectures.
const IOCTLS: &[Value] = &[
    range("TCGETS..TIOCOUTQ", 0x5401, 0x5411),
    range("TIOCGWINSZ, TIOCSWINSZ", 0x5413, 0x5414),
    value("FIONREAD", 0x541b),
    range("TIOCPKT, FIONBIO, TIOCNOTTY", 0x5420, 0x5422),
    range("TIOCGETD, TCSBRKP", 0x5424, 0x5425),
    range("TIOCSBRK, TIOCCBRK, TIOCGSID", 0x5427, 0x5429),
    value("TIOCGPTPEER", 0x5441),
    range("FIONCLEX, FIOCLEX, FIOASYNC", 0x5450, 0x5452),
    value("FIOQSIZE", 0x5460),
    value("TCGETS2", 0x802c_542a),
    range("TCSETS2, TCSETSW2, TCSETSF2", 0x402c_542b, 0x402c_542d),
    value("TIOCGPTN", 0x8004_5430),
    value("TIOCSPTLCK", 0x4004_5431),
    value("TIOCGDEV", 0x8004_5432),
    value("TIOCSIG", 0x4004_5436),
    range("TIOCGPKT, TIOCGPTLCK", 0x8004_5438, 0x8004_5439),
    value("TIOCGEXCL", 0x8004_5440),
    range("FIOSETOWN..SIOCGSTAMPNS", 0x8901, 0x8907),
    value("SIOCGIFNAME", 0x8910),
    range("SIOCGIFCONF, SIOCGIFFLAGS", 0x8912, 0x8913),
    value("SIOCGIFADDR", 0x8915),
    value("SIOCGIFDSTADDR", 0x8917),
    value("SIOCGIFBRDADDR", 0x8919),
    value("SIOCGIFNETMASK", 0x891b),
    value("SIOCGIFMETRIC", 0x891d),
    value("SIOCGIFMTU", 0x8921),
    value("SIOCGIFHWADDR", 0x8927),
    value("SIOCGIFINDEX", 0x8933),
    value("SIOCGIFTXQLEN", 0x8942),
    value("SIOCETHTOOL (psutil)", 0x8946),
    value("SIOCOUTQNSD", 0x894b),
    value("FICLONE", 0x4004_9409),
    value("FICLONERANGE", 0x4020_940d),
    value("FS_IOC_GETFLAGS", 0x8008_6601),
    value("RNDGETENTCNT", 0x8004_5200),
];

const PRCTLS: &[Value] = &[
    range("PR_SET_PDEATHSIG..PR_SET_DUMPABLE", 1, 4),
    range("PR_GET_KEEPCAPS, PR_SET_KEEPCAPS", 7, 8),
    range("PR_SET_NAME, PR_GET_NAME", 15, 16),
    value("PR_GET_SECCOMP", 21),
    range("PR_CAPBSET_READ, PR_CAPBSET_DROP", 23, 24),
    range("PR_GET_SECUREBITS..PR_GET_TIMERSLACK", 27, 30),
    range("PR_SET_CHILD_SUBREAPER..PR_GET_THP_DISABLE", 36, 42),
    value("PR_CAP_AMBIENT", 47),
    range("PR_SVE_SET_VL..PR_GET_TAGGED_ADDR_CTRL", 50, 56),
    range("PR_SME_SET_VL..PR_GET_MDWE", 63, 66),
    value("PR_SET_VMA", 0x5356_4d41),
    value("PR_SET_PTRACER", 0x5961_6d61),
];

/// The syscall numbers of libc, and those that libc lacks.
#[allow(non_upper_case_globals, reason = "the names are libc's")]
mod numbers {
    pub(super) use libc::*;

    #[cfg(target_arch = "aarch64")]
    pub(super) const SYS_renameat: c_long = 38;
    #[cfg(target_arch = "aarch64")]
    pub(super) const SYS_fchmodat2: c_long = 452;
}
