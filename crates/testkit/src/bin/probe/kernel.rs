//! The kernel's own machinery: keys, BPF, counters, the clock, modules, other doors to the same calls.

use crate::sys::{Result, absent, at, at_mut, call, judge, open, reached, str_at, text};
#[cfg(target_arch = "x86_64")]
use crate::sys::{allowed, blocked, name};
use crate::{Args, Attack, Found};

const PROCESS_KEYRING: usize = -2isize as usize;
const SESSION_KEYRING: usize = -3isize as usize;

pub const ATTACKS: &[(&str, Attack)] = &[
    ("add_key", |_| judge(add_key())),
    // KEYCTL_GET_KEYRING_ID, creating it if need be.
    ("keyctl", |_| judge(call(libc::SYS_keyctl, [0, SESSION_KEYRING, 1]))),
    // KEYCTL_GET_PERSISTENT of the own uid.
    ("keyctl_persistent", |_| judge(call(libc::SYS_keyctl, [22, -1isize as usize, PROCESS_KEYRING]))),
    ("request_key", |_| {
        let _ = add_key();
        let words = [text("user"), text("sandpool-probe")];
        // Without call-out information: nothing is started on the host.
        judge(call(libc::SYS_request_key, [str_at(&words[0]), str_at(&words[1]), 0, 0]))
    }),
    ("bpf_map", |_| {
        // BPF_MAP_CREATE of an array: type 2, key 4, value 4, one entry.
        let attributes: [u32; 20] = std::array::from_fn(|i| [2, 4, 4, 1].get(i).copied().unwrap_or(0));
        judge(call(libc::SYS_bpf, [0, at(&attributes), size_of_val(&attributes)]))
    }),
    ("bpf_sockfilter", bpf_sockfilter),
    ("userfaultfd", |_| judge(call(libc::SYS_userfaultfd, [(libc::O_CLOEXEC | 1) as usize]))),
    ("perf_event_self", |_| judge(perf(0, -1))),
    ("perf_event_cpu", |_| judge(perf(-1, 0))),
    // SYSLOG_ACTION_SIZE_UNREAD.
    ("dmesg", |_| judge(call(libc::SYS_syslog, [9, 0, 0]))),
    ("io_uring", |_| {
        let mut parameters = [0u32; 30];
        judge(call(libc::SYS_io_uring_setup, [1, at_mut(&mut parameters)]))
    }),
    ("i386_getpid", |_| int80(20, [0; 3])),
    ("i386_keyctl", |_| int80(288, [0, -3i32 as u32, 1])),
    ("i386_vsock", |_| int80(359, [libc::AF_VSOCK as u32, libc::SOCK_STREAM as u32, 0])),
    ("i386_userns", |_| int80(310, [libc::CLONE_NEWUSER as u32, 0, 0])),
    ("i386_socketcall", i386_socketcall),
    ("x32_getpid", |_| judge(call(0x4000_0000 | 39, []))),
    ("clock_settime", |_| {
        let now = clock();
        judge(call(libc::SYS_clock_settime, [libc::CLOCK_REALTIME as usize, at(&now)]))
    }),
    ("settimeofday", |_| {
        let [seconds, nanos] = clock();
        let now = [seconds, nanos / 1000];
        judge(call(libc::SYS_settimeofday, [at(&now), 0]))
    }),
    ("sethostname", |_| set_name(libc::SYS_sethostname, "/proc/sys/kernel/hostname")),
    ("setdomainname", |_| set_name(libc::SYS_setdomainname, "/proc/sys/kernel/domainname")),
    ("swapon", |_| reached(call(libc::SYS_swapon, [str_at(&text("/sandpool-probe")), 0]), &[libc::ENOENT])),
    ("acct", |_| reached(call(libc::SYS_acct, [str_at(&text("/sandpool-probe"))]), &[libc::ENOENT])),
    // Q_SETQUOTA of users on a device that is not there.
    ("quotactl", |_| {
        let device = text("/sandpool-probe");
        let set = 0x80_0008usize << 8;
        reached(call(libc::SYS_quotactl, [set, str_at(&device), 0, 0]), &[libc::ENOENT, libc::ENODEV, libc::ENOTBLK])
    }),
    ("reboot", |_| reached(call(libc::SYS_reboot, [1, 2, 3, 0]), &[libc::EINVAL])),
    ("kexec_load", |_| reached(call(libc::SYS_kexec_load, [0, 0, 0, 0xff]), &[libc::EINVAL])),
    ("init_module", |_| {
        let empty = text("");
        reached(call(libc::SYS_init_module, [str_at(&empty), 0, str_at(&empty)]), &[libc::ENOEXEC, libc::EINVAL])
    }),
    ("delete_module", |_| {
        let name = text("sandpool_probe");
        reached(call(libc::SYS_delete_module, [str_at(&name), libc::O_NONBLOCK as usize]), &[libc::ENOENT])
    }),
    ("iopl", iopl),
    ("tiocsti", tiocsti),
    ("no_randomize", |_| judge(call(libc::SYS_personality, [0x004_0000]))),
    ("read_implies_exec", |_| judge(call(libc::SYS_personality, [0x040_0000]))),
    ("fanotify", |_| judge(call(libc::SYS_fanotify_init, [0, 0]))),
];

fn add_key() -> Result {
    let words = [text("user"), text("sandpool-probe"), text("x")];
    let [kind, description, payload] = words.each_ref().map(str_at);
    call(libc::SYS_add_key, [kind, description, payload, 1, PROCESS_KEYRING])
}

fn bpf_sockfilter(_: &Args) -> Found {
    // mov r0, 0; exit.
    let program: [u64; 2] = [0xb7, 0x95];
    let licence = text("GPL");
    // BPF_PROG_LOAD: type 1 (socket filter), instruction count, instructions, licence.
    let attributes: [u64; 16] = std::array::from_fn(|i| match i {
        0 => 1 | 2 << 32,
        1 => at(&program) as u64,
        2 => str_at(&licence) as u64,
        _ => 0,
    });
    judge(call(libc::SYS_bpf, [5, at(&attributes), size_of_val(&attributes)]))
}

fn perf(pid: i32, cpu: i32) -> Result {
    // struct perf_event_attr: type 1 (software), size 64; config 0 (cpu clock).
    let attributes: [u64; 8] = [1 | 64 << 32, 0, 0, 0, 0, 0, 0, 0];
    call(libc::SYS_perf_event_open, [at(&attributes), pid as usize, cpu as usize, -1isize as usize, 0])
}

fn clock() -> [i64; 2] {
    let mut now = [0i64; 2];
    let _ = call(libc::SYS_clock_gettime, [libc::CLOCK_REALTIME as usize, at_mut(&mut now)]);
    now
}

fn set_name(number: i64, file: &str) -> Found {
    let Ok(current) = std::fs::read_to_string(file) else { return absent("the present name cannot be read") };
    let current = current.trim();
    judge(call(number, [str_at(&text(current)), current.len()]))
}

#[cfg(target_arch = "x86_64")]
fn iopl(_: &Args) -> Found {
    judge(call(libc::SYS_iopl, [3]))
}

#[cfg(not(target_arch = "x86_64"))]
fn iopl(_: &Args) -> Found {
    absent("x86 only")
}

/// The 32-bit gate: other numbers, which a filter that does not look at the architecture takes for 64-bit ones.
#[cfg(target_arch = "x86_64")]
fn int80(number: u32, [b, c, d]: [u32; 3]) -> Found {
    let mut result: i32 = number as i32;
    // SAFETY: rbx belongs to the compiler and is put back; the gate clobbers r8 to r11.
    unsafe {
        std::arch::asm!(
            "push rbx", "mov ebx, {b:e}", "int 0x80", "pop rbx",
            b = in(reg) b, inout("eax") result, in("ecx") c, in("edx") d,
            out("r8") _, out("r9") _, out("r10") _, out("r11") _,
        );
    }
    if result >= 0 { allowed(format!("returned {result}")) } else { blocked(name(-result)) }
}

#[cfg(not(target_arch = "x86_64"))]
fn int80(_: u32, _: [u32; 3]) -> Found {
    absent("x86 only")
}

/// Its arguments lie in memory that a 32-bit pointer reaches.
#[cfg(target_arch = "x86_64")]
fn i386_socketcall(_: &Args) -> Found {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_32BIT;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let Ok(page) = call(libc::SYS_mmap, [0, 4096, protection as usize, flags as usize, -1isize as usize, 0]) else {
        return absent("no low memory");
    };
    let arguments = [libc::AF_VSOCK as u32, libc::SOCK_STREAM as u32, 0];
    // SAFETY: the page was just mapped for writing and is larger.
    unsafe { std::ptr::copy_nonoverlapping(arguments.as_ptr(), page as *mut u32, arguments.len()) };
    int80(102, [1, page as u32, 0])
}

#[cfg(not(target_arch = "x86_64"))]
fn i386_socketcall(_: &Args) -> Found {
    absent("x86 only")
}

fn tiocsti(_: &Args) -> Found {
    let Ok(master) = open("/dev/ptmx", libc::O_RDWR | libc::O_NOCTTY) else { return absent("no ptmx") };
    let unlock = 0i32;
    let _ = call(libc::SYS_ioctl, [master as usize, libc::TIOCSPTLCK as usize, at(&unlock)]);
    // Becomes this session's terminal, so that typing into it is permitted where the kernel permits it at all.
    let _ = call(libc::SYS_setsid, []);
    let Ok(slave) = call(libc::SYS_ioctl, [master as usize, libc::TIOCGPTPEER as usize, libc::O_RDWR as usize]) else {
        return absent("no terminal");
    };
    let _ = call(libc::SYS_ioctl, [slave as usize, libc::TIOCSCTTY as usize, 0]);
    let letter = b'x';
    judge(call(libc::SYS_ioctl, [slave as usize, libc::TIOCSTI as usize, at(&letter)]))
}
