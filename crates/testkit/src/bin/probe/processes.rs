//! Other processes, privileges, scheduling, programs.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::Command;

use testkit::probe::Outcome;

use crate::mounts::end;
use crate::sys::{
    OWN_FDS, Result, absent, allowed, at, at_mut, blocked, call, errno, exit, fork, judge, kill, name, open, reached,
    str_at, text,
};
use crate::{Args, Attack, Found};

pub const ATTACKS: &[(&str, Attack)] = &[
    ("fifty_threads", fifty_threads),
    ("ptrace_target", |a| {
        with_target(a, |pid| judge(call(libc::SYS_ptrace, [libc::PTRACE_SEIZE as usize, pid as usize, 0, 0])))
    }),
    ("prlimit_target", |a| with_target(a, prlimit)),
    ("vm_readv_target", |a| with_target(a, |pid| vm(libc::SYS_process_vm_readv, pid))),
    ("vm_writev_target", |a| with_target(a, |pid| vm(libc::SYS_process_vm_writev, pid))),
    ("mem_target", |a| with_target(a, |pid| judge(open(&format!("/proc/{pid}/mem"), libc::O_RDWR)))),
    ("environ_target", |a| with_target(a, environ)),
    ("kcmp_target", |a| {
        with_target(a, |pid| judge(call(libc::SYS_kcmp, [std::process::id() as usize, pid as usize, 0, 0, 0])))
    }),
    ("pidfd_getfd", |a| with_target(a, pidfd_getfd)),
    ("fd_target", |a| with_target(a, fd_target)),
    ("no_new_privs", |_| match call(libc::SYS_prctl, [libc::PR_GET_NO_NEW_PRIVS as usize]) {
        Ok(0) => allowed("not set"),
        other => blocked(format!("set: {other:?}")),
    }),
    ("setuid0", |_| judge(call(libc::SYS_setresuid, [0, 0, 0]))),
    ("setuid_binary", setuid_binary),
    ("capabilities", |_| held(&own_status())),
    ("core_limit", |_| judge(core_limit())),
    ("core_dump", core_dump),
    ("sched_fifo", |_| {
        let priority = 1;
        judge(call(libc::SYS_sched_setscheduler, [0, libc::SCHED_FIFO as usize, at(&priority)]))
    }),
    ("sched_attr_fifo", sched_attr_fifo),
    ("nice_negative", |_| judge(call(libc::SYS_setpriority, [0, 0, -5isize as usize]))),
    // IOPRIO_WHO_PROCESS, self, class real-time.
    ("ioprio_rt", |_| judge(call(libc::SYS_ioprio_set, [1, 0, 1 << 13]))),
    ("mlockall", |_| judge(call(libc::SYS_mlockall, [libc::MCL_CURRENT as usize]))),
    ("oom_score_adj", |_| oom_score_adj("-1000")),
    ("oom_score_adj_raise", |_| oom_score_adj("900")),
    ("write_root_grandchild", write_root_grandchild),
    ("own_filter", own_filter),
    ("filter_loads", |_| judge(install_filter(0))),
    ("filter_prctl", |_| judge(filter_by_prctl())),
    ("seccomp_listener", |_| judge(install_filter(libc::SECCOMP_FILTER_FLAG_NEW_LISTENER as usize))),
    ("memfd_exec", |_| match memfd_status() {
        Ok(status) => allowed(status.replace('\n', ", ")),
        Err(e) => blocked(name(e)),
    }),
    ("memfd_exec_gain", |_| match memfd_status() {
        Ok(status) => held(&status),
        Err(e) => blocked(name(e)),
    }),
    ("tmp_exec", tmp_exec),
    ("jit", jit),
    ("kill_victim", |a| match a.victim {
        0 => absent("no victim was named"),
        pid => judge(kill(pid, 0)),
    }),
];

/// Attacks the target that was named, or a child of the attempt's own.
pub fn with_target(args: &Args, attack: impl FnOnce(i32) -> Found) -> Found {
    if args.target != 0 {
        return attack(args.target);
    }
    let pid = fork();
    if pid == 0 {
        let _ = call(libc::SYS_close_range, [OWN_FDS as usize, u32::MAX as usize, 0]);
        let _ = call(libc::SYS_prctl, [libc::PR_SET_PDEATHSIG as usize, libc::SIGKILL as usize]);
        loop {
            std::thread::sleep(std::time::Duration::from_secs(1));
        }
    }
    let found = attack(pid);
    end(pid);
    found
}

fn fifty_threads(_: &Args) -> Found {
    let threads: Vec<_> = (0..50).map(|n| std::thread::Builder::new().stack_size(64 << 10).spawn(move || n)).collect();
    let sum = threads.into_iter().flatten().filter_map(|t| t.join().ok()).sum::<i32>();
    if sum == 49 * 50 / 2 { allowed("fifty threads ran") } else { blocked(format!("only {sum}")) }
}

fn prlimit(pid: i32) -> Found {
    let limit = [u64::from(u16::MAX), u64::from(u16::MAX)];
    let mut old = [0u64; 2];
    let fetched = call(libc::SYS_prlimit64, [pid as usize, libc::RLIMIT_SIGPENDING as usize, 0, at_mut(&mut old)]);
    let lower = if fetched.is_ok() { old } else { limit };
    judge(call(libc::SYS_prlimit64, [pid as usize, libc::RLIMIT_SIGPENDING as usize, at(&lower), 0]))
}

/// Eight bytes of the target at an address of ours: a forked child has the same there, PID 1 may not; EFAULT means let in.
fn vm(number: i64, pid: i32) -> Found {
    let here = [0u8; 8];
    let vector = [at(&here), here.len()];
    reached(call(number, [pid as usize, at(&vector), 1, at(&vector), 1, 0]), &[libc::EFAULT])
}

fn environ(pid: i32) -> Found {
    match fs::read(format!("/proc/{pid}/environ")) {
        Ok(bytes) => allowed(format!("{} bytes", bytes.len())),
        Err(e) => judge(Err(e.raw_os_error().unwrap_or(0))),
    }
}

fn pidfd_getfd(pid: i32) -> Found {
    match call(libc::SYS_pidfd_open, [pid as usize, 0]) {
        Ok(pidfd) => judge(call(libc::SYS_pidfd_getfd, [pidfd as usize, 0, 0])),
        Err(e) => blocked(format!("pidfd_open: {}", name(e))),
    }
}

fn fd_target(pid: i32) -> Found {
    let opened: Vec<Result> =
        (0..8).map(|n| open(&format!("/proc/{pid}/fd/{n}"), libc::O_RDONLY | libc::O_NONBLOCK)).collect();
    match opened.iter().position(Result::is_ok) {
        Some(n) => allowed(format!("descriptor {n}")),
        None => judge(opened[0]),
    }
}

fn own_status() -> String {
    fs::read_to_string("/proc/self/status").unwrap_or_default()
}

/// Allowed when the status shows anything that a sandboxed process must not have.
fn held(status: &str) -> Found {
    let value = |key: &str| status.lines().find_map(|l| l.strip_prefix(key)).map(str::trim).unwrap_or("?").to_owned();
    let sets = ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"];
    let kept: Vec<String> = sets
        .iter()
        .map(|s| (s, value(s)))
        .filter(|(_, v)| !v.trim_matches('0').is_empty())
        .map(|(s, v)| format!("{s}{v}"))
        .collect();
    if !kept.is_empty() {
        return allowed(kept.join(" "));
    }
    if value("Seccomp:") == "0" {
        return allowed("no filter");
    }
    if value("NoNewPrivs:") == "0" {
        return allowed("no_new_privs is off");
    }
    blocked(format!("no capabilities, Seccomp {}", value("Seccomp:")))
}

fn setuid_binary(_: &Args) -> Found {
    use std::os::unix::fs::MetadataExt;
    let mut seen = 0;
    for dir in ["/usr/bin", "/usr/sbin", "/usr/lib", "/bin", "/sbin"] {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            let Ok(file) = entry.metadata() else { continue };
            if !file.is_file() || file.mode() & 0o6000 == 0 {
                continue;
            }
            seen += 1;
            let mut stat = std::mem::MaybeUninit::<libc::statvfs>::zeroed();
            // SAFETY: the path is a C string and `stat` has room; it is all zero, hence valid, when the call fails.
            let flags = unsafe {
                libc::statvfs(text(&entry.path().to_string_lossy()).as_ptr(), stat.as_mut_ptr());
                stat.assume_init().f_flag
            };
            let no_new_privs = call(libc::SYS_prctl, [libc::PR_GET_NO_NEW_PRIVS as usize]) == Ok(1);
            if flags & libc::ST_NOSUID == 0 || !no_new_privs {
                let guards = format!("nosuid {}, no_new_privs {no_new_privs}", flags & libc::ST_NOSUID != 0);
                return allowed(format!("{}: {guards}", entry.path().display()));
            }
        }
    }
    blocked(format!("{seen} set-uid files, all on nosuid mounts and under no_new_privs"))
}

fn core_limit() -> Result {
    let page = [4096u64, 4096];
    call(libc::SYS_prlimit64, [0, libc::RLIMIT_CORE as usize, at(&page), 0])
}

/// Crashes only where no core can come of it or where there is nobody to take it.
fn core_dump(_: &Args) -> Found {
    let pattern = fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap_or_default();
    if core_limit().is_ok() {
        return allowed(format!("a core would go to `{}`", pattern.trim()));
    }
    let pid = fork();
    if pid == 0 {
        let _ = kill(std::process::id() as i32, libc::SIGQUIT);
        exit(0);
    }
    let status = crate::sys::wait(pid);
    if libc::WCOREDUMP(status) { allowed("core dumped") } else { blocked(format!("status {status:#x}, no core")) }
}

fn sched_attr_fifo(_: &Args) -> Found {
    #[repr(C)]
    struct Attributes {
        size: u32,
        policy: u32,
        flags: u64,
        nice: i32,
        priority: u32,
        rest: [u64; 3],
    }
    let fifo = Attributes { size: 48, policy: libc::SCHED_FIFO as u32, flags: 0, nice: 0, priority: 1, rest: [0; 3] };
    judge(call(libc::SYS_sched_setattr, [0, at(&fifo), 0]))
}

fn oom_score_adj(value: &str) -> Found {
    match fs::write("/proc/self/oom_score_adj", value) {
        Ok(()) => allowed(value),
        Err(e) => judge(Err(e.raw_os_error().unwrap_or(0))),
    }
}

#[allow(clippy::disallowed_methods, reason = "running programs is what is tried")]
fn program(path: &str) -> Command {
    Command::new(path)
}

fn own_program() -> String {
    std::env::current_exe().map_or_else(|_| "/proc/self/exe".into(), |p| p.to_string_lossy().into_owned())
}

fn write_root_grandchild(_: &Args) -> Found {
    let script = format!("{} --write /sandpool-probe; exit $?", own_program());
    match program("/bin/sh").args(["-c", &script]).status() {
        Ok(status) if status.success() => allowed("made a file in /"),
        Ok(status) => blocked(name(status.code().unwrap_or(0))),
        Err(e) => absent(format!("no shell: {e}")),
    }
}

/// A filter of one instruction: allow.
fn install_filter(flags: usize) -> Result {
    with_filter(|filter| call(libc::SYS_seccomp, [libc::SECCOMP_SET_MODE_FILTER as usize, flags, filter]))
}

fn filter_by_prctl() -> Result {
    let mode = libc::SECCOMP_MODE_FILTER as usize;
    with_filter(|filter| call(libc::SYS_prctl, [libc::PR_SET_SECCOMP as usize, mode, filter]))
}

/// Calls with the address of a filter that allows everything.
fn with_filter(install: impl FnOnce(usize) -> Result) -> Result {
    #[repr(C)]
    struct Program {
        length: u16,
        instructions: usize,
    }
    let allow: [u16; 4] = [libc::BPF_RET as u16, 0, 0, 0x7fff];
    let filter = Program { length: 1, instructions: at(&allow) };
    call(libc::SYS_prctl, [libc::PR_SET_NO_NEW_PRIVS as usize, 1])?;
    install(at(&filter))
}

fn own_filter(_: &Args) -> Found {
    let installed = install_filter(0);
    let (outcome, detail) = judge(call(libc::SYS_unshare, [libc::CLONE_NEWUSER as usize]));
    (outcome, format!("filter {installed:?}, then unshare: {detail}"))
}

/// Runs the probe from a memfd and returns what it says of itself.
fn memfd_status() -> std::result::Result<String, i32> {
    let image = fs::read(own_program()).map_err(|e| e.raw_os_error().unwrap_or(0))?;
    let fd = call(libc::SYS_memfd_create, [str_at(&text("probe")), 0])?;
    let path = format!("/proc/self/fd/{fd}");
    let written = fs::write(&path, &image).and_then(|()| program(&path).arg("--status").output());
    let output = written.map_err(|e| e.raw_os_error().unwrap_or(0))?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn tmp_exec(_: &Args) -> Found {
    let path = format!("/tmp/probe-copy-{}", std::process::id());
    let ran = fs::copy(own_program(), &path).and_then(|_| program(&path).arg0("copy").arg("--list").output());
    let _ = fs::remove_file(&path);
    match ran {
        Ok(output) if output.status.success() => allowed("ran"),
        other => blocked(format!("{other:?}")),
    }
}

fn jit(_: &Args) -> Found {
    #[cfg(target_arch = "x86_64")]
    const FORTY_TWO: &[u8] = &[0xb8, 42, 0, 0, 0, 0xc3]; // mov eax, 42; ret
    #[cfg(target_arch = "aarch64")]
    const FORTY_TWO: &[u8] = &[0x40, 0x05, 0x80, 0x52, 0xc0, 0x03, 0x5f, 0xd6]; // mov w0, #42; ret
    // SAFETY: the page is ours, holds a whole function of no arguments, and is executable before it is called.
    let answer = unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let page = libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
        if page == libc::MAP_FAILED {
            return blocked(name(errno()));
        }
        std::ptr::copy_nonoverlapping(FORTY_TWO.as_ptr(), page.cast(), FORTY_TWO.len());
        if libc::mprotect(page, 4096, libc::PROT_READ | libc::PROT_EXEC) != 0 {
            return blocked(name(errno()));
        }
        std::mem::transmute::<*mut libc::c_void, extern "C" fn() -> i32>(page)()
    };
    (if answer == 42 { Outcome::Allowed } else { Outcome::Blocked }, format!("{answer}"))
}
