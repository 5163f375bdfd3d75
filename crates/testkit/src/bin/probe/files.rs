//! Files, devices, /proc and /sys, descriptors.

use std::collections::VecDeque;
use std::fs;
use std::path::{Path, PathBuf};

use crate::sys::{OWN_FDS, Result, absent, allowed, at, at_mut, blocked, call, judge, name, open, str_at, text};
use crate::{Args, Attack, Found};

pub const ATTACKS: &[(&str, Attack)] = &[
    ("write_usr", |_| judge(make_and_remove("/usr/.sandpool-probe"))),
    ("core_pattern", |_| judge(open("/proc/sys/kernel/core_pattern", libc::O_WRONLY))),
    ("sysctl_sweep", |_| writable(&["/proc/sys"])),
    ("cgroup_release_agent", |_| cgroup(&["release_agent", "notify_on_release"])),
    ("cgroup_write", |_| cgroup(&["cgroup.procs", "tasks", "memory.max", "memory.limit_in_bytes", "pids.max"])),
    ("sysfs_write", |_| {
        writable(&[
            "/sys/kernel/uevent_helper",
            "/sys/kernel/mm",
            "/sys/block",
            "/sys/module",
            "/sys/devices/system/cpu",
        ])
    }),
    ("mknod_chr", |_| mknod(libc::S_IFCHR, 0x103)),
    ("mknod_blk", |_| mknod(libc::S_IFBLK, 0x700)),
    ("whiteout", |_| mknod(libc::S_IFCHR, 0)),
    ("mkfifo", |_| mknod(libc::S_IFIFO, 0)),
    ("read_kcore", |_| read("/proc/kcore")),
    ("read_kallsyms", |_| read("/proc/kallsyms")),
    ("read_keys", |_| read("/proc/keys")),
    ("read_timer_list", |_| read("/proc/timer_list")),
    ("read_sched_debug", |_| read("/proc/sched_debug")),
    ("read_slabinfo", |_| read("/proc/slabinfo")),
    ("read_vmallocinfo", |_| read("/proc/vmallocinfo")),
    ("read_config", |_| read("/proc/config.gz")),
    // Opening is what needs the permission; reading might wait, and takes the messages away from others.
    ("read_kmsg", |_| opened("/proc/kmsg", libc::O_RDONLY)),
    ("sysrq", |_| opened("/proc/sysrq-trigger", libc::O_WRONLY)),
    ("read_locks", |_| read_locks()),
    ("host_counters", |_| host_counters()),
    // Whether the first byte of a program is in memory. It is: it was just read.
    ("rwf_nowait", |_| {
        of_a_program(|fd| {
            let mut byte = [0u8; 1];
            let slice = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
            let _ = call(libc::SYS_preadv2, [fd, at(&slice), 1, 0, 0, 0]);
            call(libc::SYS_preadv2, [fd, at(&slice), 1, 0, 0, 8])
        })
    }),
    ("preadv2", |_| {
        of_a_program(|fd| {
            let mut byte = [0u8; 1];
            let slice = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
            call(libc::SYS_preadv2, [fd, at(&slice), 1, 0, 0, 0])
        })
    }),
    // FS_IOC_FIEMAP of the whole file, with no room for the answers: their number is one.
    ("fiemap", |_| {
        of_a_program(|fd| {
            let mut request = [0u64, u64::MAX, 0, 0];
            call(libc::SYS_ioctl, [fd, 0xc020_660b, at_mut(&mut request)])
        })
    }),
    ("many_ptys", |_| many_ptys()),
    ("directory_fd", |_| descriptors(|target| target.is_dir())),
    ("leaked_fds", |_| descriptors(|_| true)),
    ("cwd_escape", cwd_escape),
    ("open_by_handle", |_| judge(open_by_handle())),
    ("hardlink", |_| judge(hardlink())),
    ("overlay_xattr", |_| judge(overlay_xattr())),
    ("secrets", secrets),
];

fn make_and_remove(path: &str) -> Result {
    let fd = open(path, libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL)?;
    fs::remove_file(path).map_err(|e| e.raw_os_error().unwrap_or(0))?;
    Ok(fd)
}

/// Counts what opens for writing below the paths. Nothing is written.
fn writable(paths: &[&str]) -> Found {
    let (mut seen, mut open_for_writing) = (0, Vec::new());
    let mut waiting: VecDeque<PathBuf> = paths.iter().map(PathBuf::from).collect();
    while let Some(path) = waiting.pop_front() {
        let Ok(found) = fs::symlink_metadata(&path) else { continue };
        if found.is_dir() {
            waiting.extend(fs::read_dir(&path).into_iter().flatten().flatten().map(|e| e.path()));
        } else if found.is_file() {
            seen += 1;
            if let Ok(fd) = open(&path.to_string_lossy(), libc::O_WRONLY | libc::O_NONBLOCK) {
                let _ = call(libc::SYS_close, [fd as usize]);
                open_for_writing.push(path);
            }
        }
        if seen > 20_000 {
            break;
        }
    }
    match (seen, open_for_writing.first()) {
        (0, _) => absent("nothing there"),
        (_, None) => blocked(format!("none of {seen} files")),
        (_, Some(first)) => allowed(format!("{} of {seen}, such as {}", open_for_writing.len(), first.display())),
    }
}

fn cgroup(names: &[&str]) -> Found {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mounted =
        table.lines().filter(|l| l.contains(" - cgroup")).filter_map(|l| l.split(' ').nth(4)).map(PathBuf::from);
    let mut roots: Vec<PathBuf> = mounted.chain(["/sys/fs/cgroup".into()]).filter(|p| p.exists()).collect();
    // A level below as well: limits do not exist at the top.
    let below: Vec<PathBuf> =
        roots.iter().flat_map(fs::read_dir).flatten().flatten().map(|e| e.path()).filter(|p| p.is_dir()).collect();
    roots.extend(below);
    let mut tried = 0;
    for path in roots.iter().flat_map(|root| names.iter().map(move |n| root.join(n))).filter(|p| p.exists()) {
        tried += 1;
        if open(&path.to_string_lossy(), libc::O_WRONLY).is_ok() {
            return allowed(path.display().to_string());
        }
    }
    if tried == 0 { absent("no cgroup file system") } else { blocked(format!("none of {tried} files")) }
}

fn mknod(kind: u32, device: usize) -> Found {
    let path = format!("/tmp/probe-node-{}", std::process::id());
    let made =
        call(libc::SYS_mknodat, [libc::AT_FDCWD as usize, str_at(&text(&path)), (kind | 0o600) as usize, device]);
    // A null device must also open; the others are made to be harmless, not to be opened.
    let found = match made {
        Ok(_) if device == 0x103 => judge(open(&path, libc::O_RDWR)),
        other => judge(other),
    };
    let _ = fs::remove_file(&path);
    found
}

fn read(path: &str) -> Found {
    let mut buffer = [0u8; 64];
    let fd = match open(path, libc::O_RDONLY | libc::O_NONBLOCK) {
        Ok(fd) => fd,
        failed => return judge(failed),
    };
    match call(libc::SYS_read, [fd as usize, at_mut(&mut buffer), buffer.len()]) {
        Ok(0) => blocked("empty"),
        Ok(n) => allowed(format!("{n} bytes")),
        Err(e) => blocked(name(e)),
    }
}

fn of_a_program(attempt: impl FnOnce(usize) -> Result) -> Found {
    judge(open("/usr/bin/env", libc::O_RDONLY).and_then(|fd| attempt(fd as usize)))
}

/// With a lock of our own there is at least one to be seen.
fn read_locks() -> Found {
    let path = format!("/tmp/probe-lock-{}", std::process::id());
    let locked = open(&path, libc::O_RDWR | libc::O_CREAT)
        .and_then(|fd| call(libc::SYS_flock, [fd as usize, libc::LOCK_EX as usize]));
    let found = locked.map_or_else(|e| absent(name(e)), |_| read("/proc/locks"));
    let _ = fs::remove_file(&path);
    found
}

/// What moves when anybody on the host does anything.
fn host_counters() -> Found {
    let figures = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let moved = ["/proc/vmstat", "/proc/sys/fs/file-nr", "/proc/sys/fs/inode-nr", "/proc/sys/fs/dentry-state"]
        .into_iter()
        .find(|path| figures(path).split_whitespace().filter_map(|word| word.parse::<u64>().ok()).any(|n| n > 1000));
    moved.map_or_else(|| blocked("nothing counts"), allowed)
}

fn many_ptys() -> Found {
    let opened = (0..64).map_while(|_| open("/dev/ptmx", libc::O_RDWR | libc::O_NOCTTY).ok()).count();
    if opened == 64 { allowed("64 terminals") } else { blocked(format!("{opened} terminals")) }
}

fn opened(path: &str, flags: i32) -> Found {
    let Ok(found) = fs::metadata(path) else { return absent("not there") };
    use std::os::unix::fs::{FileTypeExt, MetadataExt};
    if found.file_type().is_char_device() && found.rdev() == 0x103 {
        return blocked("masked by /dev/null");
    }
    judge(open(path, flags | libc::O_NONBLOCK))
}

/// Descriptors that the process was born with, besides the three it has to have.
fn descriptors(matches: impl Fn(&Path) -> bool) -> Found {
    let mut found = Vec::new();
    for number in 0..OWN_FDS {
        let path = format!("/proc/self/fd/{number}");
        let Ok(target) = fs::read_link(&path) else { continue };
        let standard = number <= 2;
        if (!standard || fs::metadata(&path).is_ok_and(|m| m.is_dir())) && matches(Path::new(&path)) {
            found.push(format!("{number} -> {}", target.display()));
        }
    }
    if found.is_empty() { blocked("none") } else { allowed(found.join(", ")) }
}

fn cwd_escape(_: &Args) -> Found {
    let cwd = fs::read_link("/proc/self/cwd").unwrap_or_default();
    if cwd.to_string_lossy().contains("(unreachable)") {
        return allowed(cwd.display().to_string());
    }
    // Up as far as it goes must be the root, and not what lies above it.
    let up = "../".repeat(64);
    let same = |a: &str, b: &str| {
        use std::os::unix::fs::MetadataExt;
        fs::metadata(a)
            .and_then(|a| Ok((a, fs::metadata(b)?)))
            .is_ok_and(|(a, b)| (a.dev(), a.ino()) == (b.dev(), b.ino()))
    };
    // Outside there is no root to escape from but the host's: reaching its files is the success.
    if !same(&up, "/") || fs::File::open(format!("{up}etc/shadow")).is_ok() {
        return allowed(format!("from {} to the host's root", cwd.display()));
    }
    blocked(format!("{} stays below /", cwd.display()))
}

fn open_by_handle() -> Result {
    #[repr(C)]
    struct Handle {
        bytes: u32,
        kind: i32,
        data: [u8; 128],
    }
    let mut handle = Handle { bytes: 128, kind: 0, data: [0; 128] };
    let mut mount = 0i32;
    let at_cwd = libc::AT_FDCWD as usize;
    call(libc::SYS_name_to_handle_at, [at_cwd, str_at(&text("/usr")), at_mut(&mut handle), at_mut(&mut mount), 0])?;
    let root = open("/usr", libc::O_RDONLY | libc::O_DIRECTORY)?;
    call(libc::SYS_open_by_handle_at, [root as usize, at(&handle), libc::O_RDONLY as usize])
}

fn hardlink() -> Result {
    let link = "/usr/.sandpool-probe-link";
    fs::hard_link("/usr/bin/env", link)
        .and_then(|()| fs::remove_file(link))
        .map(|()| 0)
        .map_err(|e| e.raw_os_error().unwrap_or(0))
}

fn overlay_xattr() -> Result {
    let path = format!("/tmp/probe-xattr-{}", std::process::id());
    fs::write(&path, "").map_err(|e| e.raw_os_error().unwrap_or(0))?;
    let words = [text(&path), text("trusted.overlay.opaque"), text("y")];
    let [file, attribute, value] = words.each_ref().map(str_at);
    let result = call(libc::SYS_setxattr, [file, attribute, value, 1, 0]);
    let _ = fs::remove_file(&path);
    result
}

/// What no sandbox has any business with. Existing is enough for sockets and directories, reading for files.
fn secrets(_: &Args) -> Found {
    let paths = [
        "/etc/shadow",
        "/etc/sudoers",
        "/etc/ssh",
        "/root",
        "/home",
        "/var/run/docker.sock",
        "/run/docker.sock",
        "/run/containerd/containerd.sock",
        "/var/lib/sandpool",
        "/var/lib/docker",
        "/var/log",
        "/boot",
        "/etc/kubernetes",
        "/run/secrets",
        "/etc/machine-id",
        "/dev/mem",
        "/dev/kmsg",
        "/dev/vda",
        "/dev/fuse",
        "/dev/kvm",
        "/dev/net/tun",
    ];
    let found: Vec<&str> =
        paths.into_iter().filter(|p| fs::read_dir(p).is_ok() || fs::File::open(p).is_ok() || is_socket(p)).collect();
    if found.is_empty() { blocked(format!("none of {}", paths.len())) } else { allowed(found.join(" ")) }
}

fn is_socket(path: &str) -> bool {
    use std::os::unix::fs::FileTypeExt;
    fs::metadata(path).is_ok_and(|m| m.file_type().is_socket())
}
