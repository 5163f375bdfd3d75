//! Roots that mislead the process that builds them: symlinks and plain files where devices and file systems are expected
//! (rows K40 to K42 of the hostile list: CVE-2025-31133, CVE-2025-52565, CVE-2025-52881, CVE-2026-41579). The setup must
//! fail and must not touch the host. A plan builds its root from nothing, so each fixture is part of the plan.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::{Handles, SetupEvent, run};
use crate::plan::{Op, Plan};
use crate::spec::{Content, FileSpec};

fn dir(path: &str) -> Op {
    Op::Dir { path: path.into(), mode: 0o755 }
}

fn symlink(path: &str, target: &str) -> Op {
    Op::Symlink { path: path.into(), target: target.into() }
}

fn file(path: &str) -> Op {
    Op::File(FileSpec { path: path.into(), content: Content::Text(String::new()) })
}

fn device(path: &str) -> Op {
    Op::Device { path: path.into(), number: (1, 3) }
}

fn proc() -> Op {
    Op::Proc("/proc".into())
}

fn mask(path: &str) -> Op {
    Op::MaskFile(path.into())
}

fn null() -> OwnedFd {
    std::fs::File::open("/dev/null").unwrap().into()
}

/// Applies the steps in a mount namespace of this thread's own. `None` where the machine does not let us.
fn apply(name: &str, steps: &[Op]) -> Option<SetupEvent> {
    let at = std::env::temp_dir().join(format!("hostile-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&at).unwrap();
    let mut ops = vec![Op::PrivateMounts, Op::NewRoot { at: at.clone(), bytes: 1 << 20, inodes: 100 }];
    ops.extend_from_slice(steps);
    let (ours, control) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    let build = move || {
        // The file-system part of a thread is its own after this, so that no other test sees these mounts.
        crate::sys::unshare(libc::CLONE_NEWNS).ok()?;
        let handles = Handles { control, guest: null(), log: null(), forks: null(), prepared: None, kept: None };
        run(&Plan { ops, base: 0..0 }, handles, None);
        Some(())
    };
    let built = std::thread::spawn(build).join().unwrap();
    let _ = std::fs::remove_dir(&at);
    if built.is_none() {
        eprintln!("SKIP: needs CAP_SYS_ADMIN to make a mount namespace");
        return None;
    }
    // Nothing said: every step went through.
    Some(crate::wire::receive::<SetupEvent>(&ours).unwrap().map_or(SetupEvent::Exec, |(report, _)| report))
}

#[track_caller]
fn assert_fails_at_the_last(name: &str, steps: &[Op], because: &str) {
    let Some(report) = apply(name, steps) else { return };
    let SetupEvent::Failed { step, message } = report else { panic!("set-up went through: {report:?}") };
    assert_eq!(step, steps.len() + 1, "{message}");
    assert!(message.contains(because), "{message}");
}

#[test]
fn an_honest_root_is_built() {
    let steps = [dir("/dev"), device("/dev/null"), dir("/proc"), proc(), mask("/proc/keys")];
    assert!(matches!(apply("honest", &steps), None | Some(SetupEvent::Exec)));
}

#[test]
fn a_null_device_that_is_a_link_or_a_file_masks_nothing() {
    // K40: what covers a secret file has to be the device it is called.
    let link = [dir("/dev"), symlink("/dev/null", "/proc/version"), dir("/proc"), proc(), mask("/proc/keys")];
    assert_fails_at_the_last("null-link", &link, "is not what it has to be");
    let plain = [dir("/dev"), file("/dev/null"), dir("/proc"), proc(), mask("/proc/keys")];
    assert_fails_at_the_last("null-file", &plain, "is not what it has to be");
}

#[test]
fn a_dev_that_is_a_link_is_not_followed() {
    // K41: neither the directory nor the node.
    let outside = std::env::temp_dir().join(format!("hostile-dev-{}", std::process::id()));
    std::fs::create_dir_all(&outside).unwrap();
    let to = outside.to_str().unwrap();
    assert_fails_at_the_last("dev-link", &[symlink("/dev", to), device("/dev/null")], "Not a directory");
    let node: PathBuf = outside.join("console");
    let steps = [dir("/dev"), symlink("/dev/null", node.to_str().unwrap()), device("/dev/null")];
    assert_fails_at_the_last("node-link", &steps, "File exists");
    let pts = Op::Devpts { path: "/dev/pts".into(), max: 4 };
    assert_fails_at_the_last("pts-link", &[dir("/dev"), symlink("/dev/pts", to), pts], "movemount `/dev/pts`");
    assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 0, "something was made outside");
    std::fs::remove_dir(outside).unwrap();
}

#[test]
fn a_proc_that_is_a_link_or_no_proc_is_refused() {
    // K42: what is written to /proc later has to land in a proc file system.
    assert_fails_at_the_last("proc-link", &[dir("/tmp"), symlink("/proc", "/tmp"), proc()], "movemount `/proc`");
    let fake = Op::Tmpfs { path: "/proc".into(), bytes: 4096, inodes: 10 };
    let dev = [dir("/dev"), device("/dev/null")];
    let steps = [&dev[..], &[dir("/proc"), fake, file("/proc/keys"), mask("/proc/keys")]].concat();
    assert_fails_at_the_last("proc-fake", &steps, "proc file system");
    let read_only = Op::ReadOnly("/proc/sys".into());
    let steps = [dir("/proc"), symlink("/proc/sys", "/"), read_only];
    assert_fails_at_the_last("sys-link", &steps, "proc file system");
}

#[test]
fn a_runtime_path_cannot_be_laid_over_a_link() {
    let steps = [symlink("/opt", "/usr"), Op::BindReadOnly(Path::new("/opt/../usr").into())];
    if let Some(report) = apply("bind", &steps) {
        assert!(matches!(report, SetupEvent::Failed { .. }), "{report:?}");
    }
}
