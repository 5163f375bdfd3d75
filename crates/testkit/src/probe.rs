//! The hostile rows of the kernel group (`K`) and those of the audit (`W`) that a program inside can try, as a table: what the probe tries, and what has to come of it inside a sandbox.
//!
//! Outside, run plainly as root, each attempt has to succeed, or the probe proves nothing; what a kernel was built without cannot
//! be shown there, and the report says so. The program itself is `src/bin/probe`; rows that no program inside can try are in
//! [`ELSEWHERE`], each with the place that holds it.

use serde::{Deserialize, Serialize};

/// One line of the probe's output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    pub row: String,
    pub name: String,
    pub outcome: Outcome,
    pub detail: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    Allowed,
    Blocked,
    /// There is nothing here to try it on: no such file, no such process.
    Absent,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expect {
    /// Blocked or absent.
    Refused,
    /// Ordinary work that a clumsy sandbox would break; allowed inside as well.
    Works,
}
use Expect::{Refused, Works};

#[derive(Debug, Clone, Copy)]
pub struct Attempt {
    pub row: &'static str,
    pub name: &'static str,
    pub what: &'static str,
    pub inside: Expect,
}

const fn attempt(row: &'static str, name: &'static str, what: &'static str, inside: Expect) -> Attempt {
    Attempt { row, name, what, inside }
}

pub const ATTEMPTS: &[Attempt] = &[
    attempt("K01", "userns", "unshare into a new user namespace", Refused),
    attempt("K01", "clone_userns", "clone into a new user namespace", Refused),
    attempt("K02", "clone3_userns", "clone3 into a new user namespace", Refused),
    attempt("K02", "fifty_threads", "start fifty threads", Works),
    attempt("K04", "mount_tmpfs", "mount a tmpfs", Refused),
    attempt("K04", "mount_bind", "bind one directory over another", Refused),
    attempt("K04", "mount_proc", "mount a second /proc", Refused),
    attempt("K04", "mount_overlay", "mount an overlay", Refused),
    attempt("K04", "chroot", "chroot", Refused),
    attempt("K04", "pivot_root", "pivot_root", Refused),
    attempt("K05", "fsopen", "fsopen, fsconfig and fsmount of a tmpfs", Refused),
    attempt("K05", "open_tree", "clone the mount tree of /", Refused),
    attempt("K05", "move_mount", "attach a cloned mount", Refused),
    attempt("K05", "mount_setattr", "change the attributes of a mount", Refused),
    attempt("K05", "fspick", "fspick of /", Refused),
    attempt("K06", "umount_proc", "unmount /proc", Refused),
    attempt("K06", "umount_masked", "unmount what covers a masked file or directory", Refused),
    attempt("K07", "remount_rw", "remount / read-write", Refused),
    attempt("K07", "write_usr", "make a file in /usr", Refused),
    attempt("K09", "setns_self", "setns to the process's own namespaces", Refused),
    attempt("K09", "setns_target", "setns to the target's namespaces", Refused),
    attempt("K10", "ptrace_target", "PTRACE_SEIZE of the target", Refused),
    attempt("K10", "prlimit_target", "set the target's resource limits", Refused),
    attempt("K11", "vm_readv_target", "read the target's memory with process_vm_readv", Refused),
    attempt("K11", "vm_writev_target", "write the target's memory with process_vm_writev", Refused),
    attempt("K11", "mem_target", "open /proc/PID/mem of the target for writing", Refused),
    attempt("K11", "environ_target", "read the target's environment", Refused),
    attempt("K11", "kcmp_target", "compare descriptors with the target's", Refused),
    attempt("K12", "pidfd_getfd", "take a descriptor out of the target", Refused),
    attempt("K12", "fd_target", "open a descriptor of the target through /proc/PID/fd", Refused),
    attempt("K14", "add_key", "add a key to a keyring", Refused),
    attempt("K14", "keyctl", "ask for the session keyring", Refused),
    attempt("K14", "keyctl_persistent", "ask for the uid's persistent keyring", Refused),
    attempt("K15", "request_key", "request a key", Refused),
    attempt("K16", "bpf_map", "make a BPF map", Refused),
    attempt("K16", "bpf_sockfilter", "load a BPF program", Refused),
    attempt("K16", "userfaultfd", "handle page faults in user space", Refused),
    attempt("K17", "perf_event_self", "count events of the process", Refused),
    attempt("K17", "perf_event_cpu", "count events of a cpu", Refused),
    attempt("K17", "dmesg", "read the kernel's log with syslog", Refused),
    attempt("K19", "io_uring", "set up an io_uring", Refused),
    attempt("K20", "sock_vsock", "open an AF_VSOCK socket", Refused),
    attempt("K21", "sock_alg", "open an AF_ALG socket", Refused),
    attempt("K21", "splice", "splice a file's pages into a pipe", Refused),
    attempt("K21", "vmsplice", "vmsplice memory into a pipe", Refused),
    attempt("K21", "sendfile", "sendfile a file's pages into a socket (W12)", Refused),
    attempt("K21", "zerocopy", "send pages by reference with SO_ZEROCOPY (W12)", Refused),
    attempt("K22", "sock_nl_xfrm", "open a netlink XFRM socket", Refused),
    attempt("K22", "sock_nl_netfilter", "open a netlink NETFILTER socket", Refused),
    attempt("K22", "sock_nl_audit", "open a netlink AUDIT socket", Refused),
    attempt("K22", "sock_nl_uevent", "open a netlink KOBJECT_UEVENT socket", Refused),
    attempt("K22", "sock_nl_generic", "open a netlink GENERIC socket", Refused),
    attempt("K22", "sock_nl_route", "open a netlink ROUTE socket (W01)", Refused),
    attempt("K22", "sock_key", "open an AF_KEY socket", Refused),
    attempt("K22", "sock_rxrpc", "open an AF_RXRPC socket", Refused),
    attempt("K22", "sock_sweep", "open any socket that is not unix, TCP or UDP", Refused),
    attempt("K22", "tcp_ulp", "put another protocol under a TCP socket", Refused),
    attempt("K22", "udp_encap", "turn a UDP socket into an ESP tunnel", Refused),
    attempt("K24", "sock_packet", "open an AF_PACKET socket", Refused),
    attempt("K24", "sock_raw_icmp", "open a raw ICMP socket", Refused),
    attempt("K24", "sock_tcp", "open a TCP socket", Works),
    attempt("K25", "i386_getpid", "getpid through int 0x80", Refused),
    attempt("K25", "i386_keyctl", "keyctl through int 0x80", Refused),
    attempt("K25", "i386_vsock", "an AF_VSOCK socket through int 0x80", Refused),
    attempt("K25", "i386_userns", "a user namespace through int 0x80", Refused),
    attempt("K26", "x32_getpid", "getpid by its x32 number", Refused),
    attempt("K27", "i386_socketcall", "an AF_VSOCK socket through the 32-bit socketcall", Refused),
    attempt("K29", "no_new_privs", "run without no_new_privs", Refused),
    attempt("K29", "setuid0", "become uid 0", Refused),
    attempt("K29", "setuid_binary", "gain from a set-uid program", Refused),
    attempt("K29", "capabilities", "have a capability in any set", Refused),
    attempt("K30", "core_pattern", "open /proc/sys/kernel/core_pattern for writing", Refused),
    attempt("K31", "core_limit", "allow oneself a core dump", Refused),
    attempt("K31", "core_dump", "crash and leave a core", Refused),
    attempt("K32", "sysctl_sweep", "open anything in /proc/sys for writing", Refused),
    attempt("K34", "cgroup_release_agent", "open a release_agent or notify_on_release for writing", Refused),
    attempt("K34", "cgroup_mount", "mount a cgroup file system", Refused),
    attempt("K35", "cgroup_write", "open cgroup.procs or a limit for writing", Refused),
    attempt("K36", "sysfs_write", "open anything of the kernel's in /sys for writing", Refused),
    attempt("K37", "mknod_chr", "make a character device and open it", Refused),
    attempt("K37", "mknod_blk", "make a block device", Refused),
    attempt("K37", "mkfifo", "make a named pipe", Works),
    attempt("K39", "read_kcore", "read /proc/kcore", Refused),
    attempt("K39", "read_kallsyms", "read /proc/kallsyms", Refused),
    attempt("K39", "read_keys", "read /proc/keys", Refused),
    attempt("K39", "read_timer_list", "read /proc/timer_list", Refused),
    attempt("K39", "read_sched_debug", "read /proc/sched_debug", Refused),
    attempt("K39", "read_slabinfo", "read /proc/slabinfo", Refused),
    attempt("K39", "read_vmallocinfo", "read /proc/vmallocinfo", Refused),
    attempt("K39", "read_config", "read /proc/config.gz", Refused),
    attempt("K39", "read_kmsg", "read /proc/kmsg", Refused),
    attempt("K39", "sysrq", "open /proc/sysrq-trigger for writing", Refused),
    attempt("K44", "directory_fd", "find a directory among the descriptors", Refused),
    attempt("K44", "cwd_escape", "find the working directory outside the root", Refused),
    attempt("K45", "leaked_fds", "find any descriptor but 0, 1 and 2", Refused),
    attempt("K47", "open_by_handle", "open a file by its handle", Refused),
    attempt("K52", "hardlink", "make a hard link to a file of the base", Refused),
    attempt("K56", "overlay_xattr", "set a trusted.overlay attribute", Refused),
    attempt("K56", "whiteout", "make an overlay whiteout (device 0:0)", Refused),
    attempt("K57", "overlay_paths", "find host paths in mountinfo", Refused),
    attempt("K57", "statmount", "ask for mounts with listmount", Refused),
    attempt("K59", "sched_fifo", "take real-time scheduling", Refused),
    attempt("K59", "sched_attr_fifo", "take real-time scheduling with sched_setattr", Refused),
    attempt("K59", "nice_negative", "take a negative nice value", Refused),
    attempt("K59", "ioprio_rt", "take real-time disk priority", Refused),
    attempt("K59", "mlockall", "lock all memory", Refused),
    attempt("K60", "oom_score_adj", "exempt oneself from the memory killer", Refused),
    attempt("K60", "oom_score_adj_raise", "offer oneself to the memory killer", Works),
    attempt("K61", "write_root_grandchild", "make a file in / from a child of a child, after exec", Refused),
    attempt("K62", "own_filter", "unshare after installing an own filter that allows everything", Refused),
    attempt("K62", "filter_loads", "load an own filter with seccomp (W04)", Refused),
    attempt("K62", "filter_prctl", "load an own filter with prctl (W04)", Refused),
    attempt("K62", "socket_filter", "attach a filter to a socket (W04)", Refused),
    attempt("K62", "reuseport_filter", "attach a filter to a group of sockets (W04)", Refused),
    attempt("K62", "seccomp_listener", "install a filter with a listener", Refused),
    attempt("K64", "memfd_exec", "run a program from a memfd", Works),
    attempt("K64", "tmp_exec", "run a program from /tmp", Works),
    attempt("K64", "jit", "write code into memory and run it", Works),
    attempt("K64", "memfd_exec_gain", "have capabilities or no filter after running from a memfd", Refused),
    attempt("K65", "clock_settime", "set the clock (to what it is)", Refused),
    attempt("K65", "settimeofday", "set the time (to what it is)", Refused),
    attempt("K65", "sethostname", "set the host name (to what it is)", Refused),
    attempt("K65", "setdomainname", "set the domain name (to what it is)", Refused),
    attempt("K65", "swapon", "swap onto a file that is not there", Refused),
    attempt("K65", "acct", "account to a file that is not there", Refused),
    attempt("K65", "quotactl", "change quotas of a device that is not there", Refused),
    attempt("K65", "reboot", "reboot with a wrong magic number", Refused),
    attempt("K65", "kexec_load", "load a kernel with impossible flags", Refused),
    attempt("K65", "init_module", "load an empty module", Refused),
    attempt("K65", "delete_module", "unload a module that is not there", Refused),
    attempt("K65", "iopl", "change the I/O privilege level", Refused),
    attempt("K65", "tiocsti", "type into a terminal with TIOCSTI", Refused),
    attempt("K65", "no_randomize", "turn address randomisation off (W16)", Refused),
    attempt("K65", "read_implies_exec", "make all memory executable with personality", Refused),
    attempt("K65", "fanotify", "watch a whole mount with fanotify", Refused),
    attempt("K66", "abstract_socket", "connect to the canary's abstract socket", Refused),
    attempt("K67", "kill_victim", "signal a process of the host", Refused),
    attempt("K70", "secrets", "read host files that no sandbox should have", Refused),
    attempt("W11", "read_locks", "read everybody's locks in /proc/locks", Refused),
    attempt("W15", "host_counters", "find a counter of the whole host that moves with the files others use", Refused),
    attempt("W15", "rwf_nowait", "ask with RWF_NOWAIT whether a program is in memory", Refused),
    attempt("W15", "preadv2", "read a program with preadv2", Works),
    attempt("W15", "fiemap", "ask where a program lies on the disk", Refused),
    attempt("W17", "many_ptys", "open 64 terminals", Refused),
];

/// Rows that no program inside can show alone: where each is held instead.
pub const ELSEWHERE: &[(&str, &str)] = &[
    ("K40", "`jail apply::tests`: what covers a secret file has to be the null device"),
    ("K41", "`jail apply::tests`: a link for /dev, a node or /dev/pts is not followed"),
    ("K42", "`jail apply::tests`: a /proc that is a link or no proc file system"),
    (
        "K46",
        "`tests/probe.rs`: descriptors sent by the guest are discarded by the kernel, since the host reads without room for them",
    ),
    ("K49", "`jail::beneath` tests: the host changes nothing by a path the guest can change"),
    ("K50", "`jail::beneath` tests: a swapper with RENAME_EXCHANGE"),
    ("K51", "`jail::beneath` tests, and file operations in `tests/probe.rs`"),
    ("K54", "`tests/probe.rs`: a tree made to resist is gone after destroy"),
    ("K55", "`tests/probe.rs`: the host's mount table before and after"),
    ("K69", "`tests/probe.rs`: files of the base read around the page cache and through it, after everything else"),
];

/// Every `K` row there is, and the `W` rows that are tried; a test holds that each is tried or held elsewhere.
pub const ROWS: &[&str] = &[
    "K01", "K02", "K04", "K05", "K06", "K07", "K09", "K10", "K11", "K12", "K14", "K15", "K16", "K17", "K19", "K20",
    "K21", "K22", "K24", "K25", "K26", "K27", "K29", "K30", "K31", "K32", "K34", "K35", "K36", "K37", "K39", "K40",
    "K41", "K42", "K44", "K45", "K46", "K47", "K49", "K50", "K51", "K52", "K54", "K55", "K56", "K57", "K59", "K60",
    "K61", "K62", "K64", "K65", "K66", "K67", "K69", "K70", "W11", "W15", "W17",
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_row_is_tried_or_held_elsewhere_and_no_attempt_has_two_meanings() {
        let tried: BTreeSet<&str> = ATTEMPTS.iter().map(|a| a.row).collect();
        let held: BTreeSet<&str> = ELSEWHERE.iter().map(|(row, _)| *row).collect();
        let all: BTreeSet<&str> = tried.union(&held).copied().collect();
        assert_eq!(all, ROWS.iter().copied().collect());
        assert_eq!(tried.intersection(&held).count(), 0);
        let names: BTreeSet<&str> = ATTEMPTS.iter().map(|a| a.name).collect();
        assert_eq!(names.len(), ATTEMPTS.len());
    }
}
