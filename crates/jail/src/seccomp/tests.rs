use std::collections::{BTreeMap, BTreeSet};

use super::*;

/// Returns the policy as text, for reviews.
fn print() -> String {
    let text = |rules: &[Rule]| rules.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
    format!(
        "another architecture -> {}\nanything not named -> {}\n\n{}\nin place of these, with files of the host and for browsers:\n\n{}",
        policy::FOREIGN,
        policy::UNNAMED,
        text(RULES),
        text(policy::HOST_FILES)
    )
}

/// The data that a filter sees.
#[derive(Clone, Copy)]
struct Data {
    number: u32,
    arch: u32,
    args: [u64; 6],
}

impl Data {
    fn call(number: impl TryInto<u32, Error: std::fmt::Debug>, args: &[u64]) -> Self {
        let mut data = Self { number: number.try_into().unwrap(), arch: ARCHITECTURE, args: [0; 6] };
        data.args[..args.len()].copy_from_slice(args);
        data
    }

    fn word(&self, offset: u32) -> u32 {
        match offset {
            0 => self.number,
            4 => self.arch,
            _ => {
                let (index, high) = ((offset as usize - 16) / 8, offset % 8 == 4);
                (self.args[index] >> if high { 32 } else { 0 }) as u32
            }
        }
    }
}

/// Interprets the program as the kernel does, with the instructions that `seccomp_check_filter` accepts.
fn run(program: &[sock_filter], data: &Data) -> u32 {
    let (mut pc, mut accumulator) = (0, 0);
    loop {
        let i = &program[pc];
        pc += 1;
        let mut branch = |holds: bool| pc += usize::from(if holds { i.jt } else { i.jf });
        match u32::from(i.code) {
            0x20 => accumulator = data.word(i.k),
            0x54 => accumulator &= i.k,
            0x15 => branch(accumulator == i.k),
            0x25 => branch(accumulator > i.k),
            0x35 => branch(accumulator >= i.k),
            0x05 => pc += i.k as usize,
            0x06 => return i.k,
            other => panic!("unknown instruction {other:#x}"),
        }
    }
}

/// Evaluates the policy directly, without BPF, as the reference for the tests.
fn decide(profile: Profile, data: &Data) -> Action {
    if data.arch != ARCHITECTURE {
        return policy::FOREIGN;
    }
    let names_it = |rule: &&Rule| rule.calls.iter().any(|c| c.number == i64::from(data.number));
    let own = if profile == Profile::Code { None } else { policy::HOST_FILES.iter().find(names_it) };
    let Some(rule) = own.or(RULES.iter().find(names_it)) else {
        return policy::UNNAMED;
    };
    let browsers = policy::BROWSER.iter().chain(policy::BROWSER_OLD).any(|c| c.number == i64::from(data.number));
    if profile == Profile::Browser && rule.allows() && !browsers {
        return Action::Eperm;
    }
    let holds = |t: &Test| {
        let argument = data.args[usize::from(t.argument & !policy::HIGH)];
        let half = if t.argument & policy::HIGH == 0 { argument } else { argument >> 32 };
        let got = half as u32 & t.mask;
        t.values.iter().any(|v| (v.low..=v.high).contains(&got))
    };
    rule.clauses.iter().find(|c| c.tests.iter().all(holds)).map_or(rule.otherwise, |c| c.then)
}

/// Returns the answer for code. Checks that the filters of all profiles agree with the table, and that no other profile
/// is allowed what code is not.
fn answer_of(data: Data) -> Action {
    for profile in Profile::ALL {
        let code = run(&compile(profile).0, &data);
        let expected = decide(profile, &data);
        assert_eq!(code, expected.code(), "call {} {:x?} of {:#x}", data.number, data.args, data.arch);
    }
    let code = decide(Profile::Code, &data);
    assert!(code == Action::Allow || Profile::ALL.iter().all(|other| decide(*other, &data) != Action::Allow));
    code
}

fn all_calls() -> impl Iterator<Item = (&'static Rule, policy::SyscallEntry)> {
    RULES.iter().flat_map(|r| r.calls.iter().map(move |c| (r, *c)))
}

#[test]
fn every_number_of_every_architecture_is_answered_as_the_table_says() {
    let numbers = (0..1024).chain([0x4000_0000, 0x4000_0000 + 200, 0x4000_0200, 0x7fff_ffff, 0x8000_0000, u32::MAX]);
    for number in numbers {
        for arch in [ARCHITECTURE, 0x4000_0003, 0x4000_0028, 0xc000_00b7, 0xc000_003e, 0] {
            answer_of(Data { arch, ..Data::call(number, &[]) });
        }
    }
}

#[test]
fn every_argument_rule_is_answered_as_the_table_says_at_and_beside_each_value() {
    let host_files = policy::HOST_FILES.iter().flat_map(|r| r.calls.iter().map(move |c| (r, *c)));
    for (rule, call) in all_calls().chain(host_files).filter(|(r, _)| !r.clauses.is_empty()) {
        let mut interesting = BTreeSet::from([0, 1, 2, 0x0f, 0xffff, u64::from(u32::MAX)]);
        for value in rule.clauses.iter().flat_map(|c| c.tests).flat_map(|t| t.values) {
            for edge in [value.low, value.high] {
                interesting.extend([edge.wrapping_sub(1), edge, edge.wrapping_add(1)].map(u64::from));
            }
        }
        interesting.extend((0..32).map(|bit| 1 << bit));
        for a in &interesting {
            for b in &interesting {
                for c in [0, 6, 17, 31, 100, 132, 255, 262] {
                    answer_of(Data::call(call.number, &[*a, *b, c]));
                }
                answer_of(Data::call(call.number, &[*a, *b, *b]));
                // The high half must make no difference, except where the policy tests it.
                answer_of(Data::call(call.number, &[*a | 0xdead_beef << 32, *b | 1 << 32, *b | 1 << 63]));
            }
        }
    }
}

#[test]
fn no_call_is_named_twice_and_every_rule_says_why() {
    let mut seen: BTreeMap<i64, &str> = BTreeMap::new();
    for (rule, call) in all_calls() {
        assert_eq!(seen.insert(call.number, call.name), None, "`{}` is named twice", call.name);
        assert!(rule.why.len() > 5, "`{}` has no reason", call.name);
    }
}

#[test]
fn jumps_stay_within_reach_and_the_program_within_the_kernels_limit() {
    for program in Profile::ALL.map(|profile| &compile(profile).0) {
        assert!(program.len() < 800, "{} instructions", program.len());
        for (at, i) in program.iter().enumerate().filter(|(_, i)| i.code & 7 == 5) {
            let farthest = if i.code == 5 { i.k as usize } else { usize::from(i.jt.max(i.jf)) };
            assert!(at + 1 + farthest < program.len(), "instruction {at} jumps out");
        }
    }
    // `to_rest` in `emit_test` is a `u8`.
    assert!(RULES.iter().flat_map(|r| r.clauses).flat_map(|c| c.tests).all(|t| t.values.len() < 120));
}

#[cfg(target_arch = "x86_64")]
#[test]
fn what_the_runtimes_call_is_allowed_or_refused_on_purpose() {
    let seen: Vec<&str> = include_str!("seen.txt").lines().filter(|l| !l.starts_with('#')).collect();
    let refused: Vec<&str> = seen
        .iter()
        .copied()
        .filter(|name| {
            let named = all_calls().find(|(_, c)| c.name == format!("SYS_{name}"));
            named.is_none_or(|(r, _)| r.clauses.is_empty() && r.otherwise != Action::Allow)
        })
        .collect();
    insta::assert_snapshot!(refused.join(" "), @"clone3 get_mempolicy io_uring_enter io_uring_setup mbind sendfile set_mempolicy");

    // The other direction: a rule that allows only syscalls that no runtime was seen to make has to be deliberate.
    let unneeded: Vec<&str> = RULES
        .iter()
        .filter(|r| r.clauses.is_empty() && r.otherwise == Action::Allow)
        .filter(|r| r.calls.iter().all(|c| !seen.contains(&c.name.trim_start_matches("SYS_"))))
        .map(|r| r.why)
        .collect();
    insta::assert_snapshot!(unneeded.join("\n"), @"System V shared memory and semaphores (PostgreSQL, X11): the ipc namespace is the sandbox's own");
}

#[test]
fn what_a_browser_is_refused_beyond_the_code() {
    let own: Vec<&policy::SyscallEntry> = policy::BROWSER.iter().chain(policy::BROWSER_OLD).collect();
    let allowed: Vec<policy::SyscallEntry> =
        all_calls().filter(|(rule, _)| rule.allows()).map(|(_, call)| call).collect();
    // The list contains no syscall that the code may not make, and no duplicates.
    for (at, call) in own.iter().enumerate() {
        assert!(allowed.iter().any(|c| c.number == call.number), "`{}`", call.name);
        assert!(own[..at].iter().all(|c| c.number != call.number), "`{}` is named twice", call.name);
    }
    let refused = allowed.iter().filter(|call| own.iter().all(|c| c.number != call.number));
    let refused: Vec<&str> = refused.map(|call| call.name.trim_start_matches("SYS_")).collect();
    if cfg!(target_arch = "x86_64") {
        insta::assert_snapshot!(refused.join(" "), @r"
        preadv pwritev copy_file_range readahead openat2 fchmodat2 fchown fchownat truncate getxattr lgetxattr fgetxattr setxattr lsetxattr fsetxattr listxattr llistxattr flistxattr removexattr lremovexattr fremovexattr getdents chown lchown utime utimes futimesat select signalfd getpgrp alarm pause time sync_file_range pselect6 epoll_pwait2 signalfd4 timerfd_gettime msync mlock mlock2 munlock munlockall futex_waitv getsid tkill rt_sigpending rt_sigtimedwait rt_sigqueueinfo rt_tgsigqueueinfo times getitimer setitimer timer_gettime timer_getoverrun setuid setgid setreuid setregid setresuid setresgid setfsuid setfsgid sched_setparam sched_get_priority_max sched_get_priority_min sched_rr_get_interval ioprio_get ioprio_set shmat shmdt shmctl semget semop semtimedop semctl preadv2 pwritev2 seccomp shmget setrlimit personality mknod mknodat
        ");
    }
}

#[test]
fn the_policy_as_text() {
    insta::assert_snapshot!(print());
}

fn socket(family: i32, kind: i32, protocol: i32) -> Action {
    answer_of(Data::call(libc::SYS_socket, &[family as u64, kind as u64, protocol as u64]))
}

#[test]
fn families_and_protocols_are_allow_listed() {
    assert_eq!(socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0), Action::Allow);
    assert_eq!(socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_NONBLOCK, libc::IPPROTO_TCP), Action::Allow);
    assert_eq!(socket(libc::AF_INET6, libc::SOCK_DGRAM, 0), Action::Allow);
    assert_eq!(socket(libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_ICMP), Action::Eperm);
    assert_eq!(socket(libc::AF_INET, libc::SOCK_DGRAM, libc::IPPROTO_ICMP), Action::Eprotonosupport);
    assert_eq!(socket(libc::AF_INET, libc::SOCK_STREAM, 262), Action::Eprotonosupport); // MPTCP
    // W01: not even the netlink protocol that lists interfaces is allowed.
    for protocol in 0..32 {
        assert_eq!(socket(libc::AF_NETLINK, libc::SOCK_RAW, protocol), Action::Eafnosupport);
    }
    let allowed = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6];
    for family in (0..64).filter(|f| !allowed.contains(f)) {
        assert_eq!(socket(family, libc::SOCK_STREAM, 0), Action::Eafnosupport, "family {family}");
    }
}

#[test]
fn namespaces_devices_terminals_and_others_limits_are_refused() {
    let call = |number, args: &[u64]| answer_of(Data::call(number, args));
    assert_eq!(call(libc::SYS_clone, &[libc::SIGCHLD as u64]), Action::Allow);
    assert_eq!(call(libc::SYS_clone, &[libc::CLONE_NEWUSER as u64 | 17]), Action::Eperm);
    assert_eq!(call(libc::SYS_clone3, &[]), Action::Enosys);
    assert_eq!(call(libc::SYS_mknodat, &[0, 0, u64::from(libc::S_IFCHR | 0o666)]), Action::Eperm);
    assert_eq!(call(libc::SYS_mknodat, &[0, 0, u64::from(libc::S_IFIFO | 0o666)]), Action::Allow);
    for (request, expected) in
        [(0x5401, Action::Allow), (0x5412, Action::Enotty), (0x541c, Action::Enotty), (0x5423, Action::Enotty)]
    {
        assert_eq!(call(libc::SYS_ioctl, &[0, request]), expected, "{request:#x}");
    }
    assert_eq!(call(libc::SYS_prctl, &[35]), Action::Einval);
    assert_eq!(call(libc::SYS_prlimit64, &[0, 7]), Action::Allow);
    assert_eq!(call(libc::SYS_prlimit64, &[1, 7]), Action::Eperm);
    let core = u64::from(libc::RLIMIT_CORE);
    assert_eq!(call(libc::SYS_prlimit64, &[0, core, 0, 0x7fff_0000]), Action::Allow);
    // A pointer whose low half is 0 is not a null pointer.
    for new in [0x7fff_0000, 1 << 32, 0x7fff << 32] {
        assert_eq!(call(libc::SYS_prlimit64, &[0, core, new]), Action::Einval);
    }
    assert_eq!(call(libc::SYS_mmap, &[0, 4096, 3, 0x22]), Action::Allow);
    assert_eq!(call(libc::SYS_mmap, &[0, 2 << 20, 3, 0x22 | 0x40000]), Action::Einval);
    assert_eq!(call(libc::SYS_memfd_create, &[0, 5]), Action::Einval);
    assert_eq!(call(libc::SYS_shmget, &[0, 4096, 0o1600]), Action::Allow);
    assert_eq!(call(libc::SYS_shmget, &[0, 2 << 20, 0o5600]), Action::Einval);
    assert_eq!(call(libc::SYS_fcntl, &[3, 1024, 0]), Action::Einval);
}

/// A set-uid file in a shared volume would belong to the owner of the directory on the host.
#[test]
fn no_set_uid_file_is_made_among_files_of_the_host() {
    const CREATE: u64 = libc::O_CREAT as u64;
    const TEMPORARY: u64 = libc::O_TMPFILE as u64;
    let answers = |number: i64, args: &[u64]| {
        answer_of(Data::call(number, args));
        Profile::ALL.map(|profile| decide(profile, &Data::call(number, args)))
    };
    for bits in [0o4000, 0o2000, 0o6000] {
        let mode = bits | 0o755;
        let mut made = vec![
            (libc::SYS_fchmod, vec![3, mode]),
            (libc::SYS_fchmodat, vec![0, 0, mode]),
            (libc::SYS_fchmodat2, vec![0, 0, mode]),
            (libc::SYS_openat, vec![0, 0, CREATE | 1, mode]),
            (libc::SYS_openat, vec![0, 0, TEMPORARY | 1, mode]),
            (libc::SYS_mknodat, vec![0, 0, u64::from(libc::S_IFREG) | mode]),
            (libc::SYS_mknodat, vec![0, 0, mode]),
        ];
        #[cfg(target_arch = "x86_64")]
        made.extend([
            (libc::SYS_chmod, vec![0, mode]),
            (libc::SYS_creat, vec![0, mode]),
            (libc::SYS_open, vec![0, CREATE | 1, mode]),
            (libc::SYS_open, vec![0, TEMPORARY | 1, mode]),
            (libc::SYS_mknod, vec![0, mode]),
        ]);
        for (number, args) in made {
            assert_eq!(answers(number, &args), [Action::Allow, Action::Eperm, Action::Eperm], "{number} {args:?}");
        }
        // Without a flag that creates a file, whatever is in the register of the mode means nothing.
        assert_eq!(answers(libc::SYS_openat, &[0, 0, libc::O_DIRECTORY as u64, mode]), [Action::Allow; 3]);
    }
    assert_eq!(answers(libc::SYS_fchmod, &[3, 0o1777]), [Action::Allow; 3]);
    assert_eq!(answers(libc::SYS_openat, &[0, 0, CREATE, 0o777]), [Action::Allow; 3]);
    // W70: an access control list is a mode too.
    for number in [libc::SYS_setxattr, libc::SYS_lsetxattr, libc::SYS_fsetxattr] {
        assert_eq!(answers(number, &[]), [Action::Allow, Action::Eopnotsupp, Action::Eopnotsupp], "{number}");
    }
}

/// W04, W12: options that use memory charged to no cgroup, or that pass pages by reference.
#[test]
fn options_are_allow_listed_and_those_that_fill_uncharged_queues_do_nothing() {
    let set = |level: i32, option: i32| answer_of(Data::call(libc::SYS_setsockopt, &[3, level as u64, option as u64]));
    use libc::{IPPROTO_IP, IPPROTO_IPV6, IPPROTO_TCP, IPPROTO_UDP, SOL_SOCKET};
    for (level, option) in [
        (SOL_SOCKET, libc::SO_REUSEADDR),
        (SOL_SOCKET, libc::SO_REUSEPORT),
        (SOL_SOCKET, libc::SO_BROADCAST),
        (SOL_SOCKET, libc::SO_SNDBUF),
        (SOL_SOCKET, libc::SO_KEEPALIVE),
        (SOL_SOCKET, libc::SO_LINGER),
        (SOL_SOCKET, libc::SO_RCVTIMEO),
        (SOL_SOCKET, libc::SO_SNDTIMEO),
        (SOL_SOCKET, libc::SO_PASSCRED),
        (SOL_SOCKET, libc::SO_TIMESTAMP),
        (IPPROTO_TCP, libc::TCP_NODELAY),
        (IPPROTO_TCP, libc::TCP_CORK),
        (IPPROTO_TCP, libc::TCP_KEEPIDLE),
        (IPPROTO_TCP, libc::TCP_KEEPCNT),
        (IPPROTO_TCP, libc::TCP_DEFER_ACCEPT),
        (IPPROTO_TCP, libc::TCP_QUICKACK),
        (IPPROTO_TCP, libc::TCP_USER_TIMEOUT),
        (IPPROTO_IP, libc::IP_TOS),
        (IPPROTO_IP, libc::IP_TTL),
        (IPPROTO_IP, libc::IP_PKTINFO),
        (IPPROTO_IP, libc::IP_MULTICAST_TTL),
        (IPPROTO_IPV6, libc::IPV6_V6ONLY),
        (IPPROTO_IPV6, libc::IPV6_TCLASS),
        (IPPROTO_IPV6, libc::IPV6_RECVPKTINFO),
    ] {
        assert_eq!(set(level, option), Action::Allow, "{level} {option}");
    }
    for (level, option) in
        [(SOL_SOCKET, libc::SO_RCVBUF), (IPPROTO_IP, libc::IP_RECVERR), (IPPROTO_IPV6, libc::IPV6_RECVERR)]
    {
        assert_eq!(set(level, option), Action::Ignore, "{level} {option}");
    }
    for (level, option) in [
        (SOL_SOCKET, 26), // SO_ATTACH_FILTER
        (SOL_SOCKET, 50), // SO_ATTACH_BPF
        (SOL_SOCKET, 51), // SO_ATTACH_REUSEPORT_CBPF
        (SOL_SOCKET, 52), // SO_ATTACH_REUSEPORT_EBPF
        (SOL_SOCKET, 60), // SO_ZEROCOPY
        (SOL_SOCKET, 37), // SO_TIMESTAMPING
        (SOL_SOCKET, 65), // SO_TIMESTAMPING_NEW
        (SOL_SOCKET, 33), // SO_RCVBUFFORCE
        (IPPROTO_TCP, libc::TCP_ULP),
        (IPPROTO_TCP, libc::TCP_REPAIR),
        (IPPROTO_TCP, libc::TCP_MD5SIG),
        (IPPROTO_UDP, 1),   // UDP_CORK
        (IPPROTO_UDP, 100), // UDP_ENCAP
        (IPPROTO_IP, libc::IP_ADD_MEMBERSHIP),
        (IPPROTO_IP, libc::IP_ADD_SOURCE_MEMBERSHIP),
        (IPPROTO_IP, 42), // MCAST_JOIN_GROUP
        (IPPROTO_IPV6, libc::IPV6_ADD_MEMBERSHIP),
        (IPPROTO_IPV6, 32), // IPV6_FLOWLABEL_MGR
        (libc::SOL_NETLINK, 1),
        (libc::SOL_ALG, 1),
    ] {
        assert_eq!(set(level, option), Action::Enoprotoopt, "{level} {option}");
    }
    let call = |number, args: &[u64]| answer_of(Data::call(number, args));
    assert_eq!(call(libc::SYS_getsockopt, &[3, IPPROTO_TCP as u64, 35]), Action::Enoprotoopt);
    assert_eq!(call(libc::SYS_getsockopt, &[3, SOL_SOCKET as u64, libc::SO_RCVBUF as u64]), Action::Allow);
    for flag in [libc::MSG_MORE, libc::MSG_ZEROCOPY] {
        let flags = (flag | libc::MSG_NOSIGNAL) as u64;
        assert_eq!(call(libc::SYS_sendto, &[3, 0, 0, flags]), Action::Eopnotsupp);
        assert_eq!(call(libc::SYS_sendmmsg, &[3, 0, 0, flags]), Action::Eopnotsupp);
        assert_eq!(call(libc::SYS_sendmsg, &[3, 0, flags]), Action::Eopnotsupp);
    }
    for number in [libc::SYS_sendto, libc::SYS_sendmsg, libc::SYS_sendmmsg] {
        let flags = (libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT | libc::MSG_EOR) as u64;
        assert_eq!(call(number, &[3, 0, flags, flags]), Action::Allow);
    }
    assert_eq!(call(libc::SYS_sendfile, &[]), Action::Einval);
    assert_eq!(call(libc::SYS_copy_file_range, &[]), Action::Allow);
}

/// Covers W04 and W16 of the hostile list.
#[test]
fn no_filter_of_ones_own_and_no_other_personality() {
    let call = |number, args: &[u64]| answer_of(Data::call(number, args));
    assert_eq!(call(libc::SYS_seccomp, &[u64::from(libc::SECCOMP_GET_ACTION_AVAIL)]), Action::Allow);
    for operation in [libc::SECCOMP_SET_MODE_STRICT, libc::SECCOMP_SET_MODE_FILTER] {
        assert_eq!(call(libc::SYS_seccomp, &[u64::from(operation)]), Action::Einval);
    }
    assert_eq!(call(libc::SYS_prctl, &[libc::PR_SET_SECCOMP as u64, 2]), Action::Einval);
    assert_eq!(call(libc::SYS_prctl, &[libc::PR_GET_SECCOMP as u64]), Action::Allow);
    for allowed in [0, 0xffff_ffff] {
        assert_eq!(call(libc::SYS_personality, &[allowed]), Action::Allow);
    }
    for bit in 0..32 {
        assert_eq!(call(libc::SYS_personality, &[1 << bit]), Action::Eperm);
    }
}

/// Runs `attempt` in a forked child under the filter and returns its result.
fn under_the_filter(attempt: fn() -> i32) -> i32 {
    let program = compile(Profile::Code);
    // SAFETY: the child only makes syscalls, on its copy of the memory, and leaves by `_exit`.
    unsafe {
        let pid = libc::fork();
        if pid == 0 {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
            libc::_exit(if install(program).is_ok() { attempt() } else { 99 });
        }
        let mut status = 0;
        libc::waitpid(pid, &raw mut status, 0);
        if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { -libc::WTERMSIG(status) }
    }
}

fn errno_of(result: libc::c_long) -> i32 {
    if result == -1 { io::Error::last_os_error().raw_os_error().unwrap() } else { 0 }
}

#[test]
fn the_kernel_takes_the_program_and_answers_alike() {
    // SAFETY: these are raw syscalls with arguments that have no effect.
    unsafe {
        assert_eq!(under_the_filter(|| errno_of(libc::syscall(libc::SYS_getpid))), 0);
        assert_eq!(under_the_filter(|| errno_of(libc::syscall(libc::SYS_unshare, libc::CLONE_NEWUSER))), libc::EPERM);
        assert_eq!(under_the_filter(|| errno_of(libc::syscall(libc::SYS_clone3, 0, 0))), libc::ENOSYS);
        assert_eq!(under_the_filter(|| errno_of(libc::syscall(libc::SYS_socket, 38, 5, 0))), libc::EAFNOSUPPORT);
        assert_eq!(under_the_filter(|| errno_of(libc::syscall(9999))), libc::ENOSYS);
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn a_call_through_the_32_bit_gate_kills_and_an_x32_number_is_unknown() {
    let through_int_0x80 = || {
        let mut result: i32 = 20; // getpid of i386
        // SAFETY: `getpid` has no arguments, and the call gate clobbers only the declared registers.
        unsafe {
            std::arch::asm!("int 0x80", inout("eax") result, out("r8") _, out("r9") _, out("r10") _, out("r11") _)
        };
        i32::from(result <= 0)
    };
    assert_eq!(under_the_filter(through_int_0x80), -libc::SIGSYS);
    // SAFETY: this is `getpid` by its x32 number.
    assert_eq!(under_the_filter(|| errno_of(unsafe { libc::syscall(0x4000_0000 | libc::SYS_getpid) })), libc::ENOSYS);
}
