//! Namespaces and mounts.

use std::fs;

use crate::sys::{
    Result, absent, allowed, at, at_mut, blocked, call, judge, kill, name, open, reached, str_at, text, wait,
};
use crate::{Args, Attack, Found};

pub const ATTACKS: &[(&str, Attack)] = &[
    ("userns", |_| judge(call(libc::SYS_unshare, [libc::CLONE_NEWUSER as usize]))),
    ("clone_userns", |_| {
        fork_like(call(libc::SYS_clone, [(libc::CLONE_NEWUSER | libc::SIGCHLD) as usize, 0, 0, 0, 0]))
    }),
    ("clone3_userns", clone3_userns),
    ("mount_tmpfs", |_| private(|| mount("tmpfs", "/tmp", "tmpfs", 0, ""))),
    ("mount_bind", |_| private(|| mount("/usr", "/tmp", "", libc::MS_BIND, ""))),
    ("mount_proc", |_| private(|| mount("proc", "/tmp", "proc", 0, ""))),
    ("mount_overlay", |_| private(|| mount("overlay", "/tmp", "overlay", 0, "lowerdir=/usr:/etc"))),
    ("chroot", |_| judge(call(libc::SYS_chroot, [str_at(&text("/usr"))]))),
    ("pivot_root", |_| private(pivot_root)),
    ("fsopen", |_| private(fsopen)),
    ("open_tree", |_| private(|| open_tree().map(i64::from))),
    ("move_mount", |_| private(move_mount)),
    ("mount_setattr", |_| private(mount_setattr)),
    ("fspick", |_| private(|| call(libc::SYS_fspick, [libc::AT_FDCWD as usize, str_at(&text("/")), 0]))),
    ("umount_proc", |_| private(|| umount("/proc"))),
    ("umount_masked", |_| private(umount_masked)),
    ("remount_rw", |_| private(|| mount("", "/", "", libc::MS_REMOUNT | libc::MS_BIND, ""))),
    ("setns_self", |_| setns("/proc/self/ns")),
    ("setns_target", |a| crate::processes::with_target(a, |pid| setns(&format!("/proc/{pid}/ns")))),
    ("cgroup_mount", |_| private(|| mount("cgroup2", "/tmp", "cgroup2", 0, ""))),
    ("overlay_paths", overlay_paths),
    ("statmount", listmount),
];

/// In a mount namespace of the child's own where that can be had, so that the host keeps its mounts.
fn private(attempt: impl FnOnce() -> Result) -> Found {
    own_namespace();
    judge(attempt())
}

fn own_namespace() {
    if call(libc::SYS_unshare, [libc::CLONE_NEWNS as usize]).is_ok() {
        mount("", "/", "", libc::MS_REC | libc::MS_PRIVATE, "").expect("a private copy of the mounts");
    }
}

fn mount(source: &str, target: &str, kind: &str, flags: u64, data: &str) -> Result {
    let words = [source, target, kind, data].map(text);
    let [source, target, kind, data] = words.each_ref().map(|w| if w.is_empty() { 0 } else { str_at(w) });
    call(libc::SYS_mount, [source, target, kind, flags as usize, data])
}

fn umount(path: &str) -> Result {
    call(libc::SYS_umount2, [str_at(&text(path)), libc::MNT_DETACH as usize])
}

/// The child of a clone that worked ends at once.
fn fork_like(result: Result) -> Found {
    match result {
        Ok(0) => crate::sys::exit(0),
        Ok(pid) => {
            wait(pid as i32);
            allowed("a child in a new user namespace")
        }
        failed => judge(failed),
    }
}

fn clone3_userns(_: &Args) -> Found {
    // struct clone_args: flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls.
    let args: [u64; 8] = [libc::CLONE_NEWUSER as u64, 0, 0, 0, libc::SIGCHLD as u64, 0, 0, 0];
    fork_like(call(libc::SYS_clone3, [at(&args), size_of_val(&args)]))
}

fn pivot_root() -> Result {
    let temporary = "/tmp";
    // Outside it needs a mount of its own to turn to; refused inside, this changes nothing.
    let _ = mount("tmpfs", temporary, "tmpfs", 0, "");
    call(libc::SYS_pivot_root, [str_at(&text(temporary)), str_at(&text(temporary))])
}

fn fsopen() -> Result {
    const CREATE: usize = 6; // FSCONFIG_CMD_CREATE
    let fs = call(libc::SYS_fsopen, [str_at(&text("tmpfs")), 0])?;
    call(libc::SYS_fsconfig, [fs as usize, CREATE, 0, 0, 0])?;
    call(libc::SYS_fsmount, [fs as usize, 0, 0])
}

fn open_tree() -> std::result::Result<i32, i32> {
    const CLONE: usize = 1; // OPEN_TREE_CLONE
    call(libc::SYS_open_tree, [libc::AT_FDCWD as usize, str_at(&text("/usr")), CLONE]).map(|fd| fd as i32)
}

fn move_mount() -> Result {
    const FROM_EMPTY_PATH: usize = 4;
    // Where the tree cannot be had the call itself is still to be refused.
    let tree = open_tree().unwrap_or(0);
    let at = libc::AT_FDCWD as usize;
    call(libc::SYS_move_mount, [tree as usize, str_at(&text("")), at, str_at(&text("/tmp")), FROM_EMPTY_PATH])
}

fn mount_setattr() -> Result {
    // struct mount_attr: attr_set (MOUNT_ATTR_NOATIME is 0x10; noexec 8), attr_clr, propagation, userns_fd.
    let attributes: [u64; 4] = [8, 0, 0, 0];
    let at_cwd = libc::AT_FDCWD as usize;
    call(libc::SYS_mount_setattr, [at_cwd, str_at(&text("/")), 0, at(&attributes), size_of_val(&attributes)])
}

fn umount_masked() -> Result {
    let masked = ["/proc/kcore", "/proc/keys", "/proc/sys", "/proc/acpi", "/proc/bus", "/proc/timer_list"];
    // Outside nothing is masked: cover one file to have something to uncover.
    let _ = mount("/dev/null", "/proc/keys", "", libc::MS_BIND, "");
    let tried: Vec<Result> = masked.iter().map(|path| umount(path)).collect();
    tried.iter().find(|r| r.is_ok()).or(tried.first()).copied().unwrap_or(Err(libc::ENOENT))
}

fn setns(dir: &str) -> Found {
    let mut worst = absent("no namespace could be opened");
    for kind in ["uts", "ipc", "net", "mnt", "pid", "user", "cgroup"] {
        let found = match open(&format!("{dir}/{kind}"), libc::O_RDONLY) {
            Ok(fd) => judge(call(libc::SYS_setns, [fd as usize, 0])),
            Err(e) => blocked(format!("opening {kind}: {}", name(e))),
        };
        if found.0 == testkit::probe::Outcome::Allowed {
            return found;
        }
        worst = found;
    }
    worst
}

fn overlay_paths(_: &Args) -> Found {
    own_namespace();
    let _ = mount("overlay", "/tmp", "overlay", 0, "lowerdir=/usr:/etc");
    let Ok(table) = fs::read_to_string("/proc/self/mountinfo") else { return absent("no mountinfo") };
    let telling = |line: &&str| names_a_layer(line) || line.contains("upperdir=") || line.contains("/home/");
    match table.lines().find(telling) {
        Some(line) => allowed(line),
        None => blocked(format!("{} mounts, no host path", table.lines().count())),
    }
}

/// A layer that was named by a descriptor says nothing about where it lies.
fn names_a_layer(line: &str) -> bool {
    let layers = line.split_once("lowerdir=").map(|(_, rest)| rest.split([',', ' ']).next().unwrap_or_default());
    layers.is_some_and(|layers| layers.split(':').any(|layer| !layer.starts_with("/proc/self/fd/")))
}

fn listmount(_: &Args) -> Found {
    // struct mnt_id_req of the first version: size, spare, mnt_id (LSMT_ROOT), param.
    #[repr(C)]
    struct Request {
        size: u32,
        spare: u32,
        mount: u64,
        parameter: u64,
    }
    let request = Request { size: 24, spare: 0, mount: u64::MAX, parameter: 0 };
    let mut ids = [0u64; 64];
    reached(call(458, [at(&request), at_mut(&mut ids), ids.len(), 0]), &[])
}

/// Used by the attempts that leave a process behind.
pub fn end(pid: i32) {
    let _ = kill(pid, libc::SIGKILL);
    wait(pid);
}
