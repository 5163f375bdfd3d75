//! This module applies a plan in the process that becomes the guest. One loop runs the steps; every error names the
//! step, the syscall and the path.

use std::ffi::CString;
use std::net::SocketAddrV4;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::{fmt, fs};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::OpenTreeFlags;
use rustix::net::RecvFlags;
use rustix::process::Signal;
use rustix::thread::Uid;
use serde::{Deserialize, Serialize};

use crate::plan::{Op, Plan};
use crate::spec::FileSpec;
use crate::{sys, volume, wire};

mod error;
mod layers;
mod mounts;
mod packages;
mod volumes;

use mounts::{attach, copy_of, open_dir, private_mounts};
use volumes::{KEPT, VOLUME, chown, set_mode};

pub(crate) use error::{ApplyError, Syscall};
pub(crate) use error::{At, with_sources};
pub(crate) use mounts::mount_tmpfs;

/// A message that the new process sends to the launcher during setup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum SetupEvent {
    /// The volume was attached to this loop device.
    Loop { device: volume::Device },
    /// The spare is complete. Its root and its network namespace are attached as descriptors. This is the last message.
    Prepared,
    /// The kept image was attached to this loop device.
    KeptLoop { device: volume::Device },
    /// A mount of the kept volume for the launcher is attached as a descriptor.
    KeptMount,
    /// The listening socket of the sandbox's egress is attached as a descriptor.
    Egress,
    /// A protection is weaker than it could be. The sandbox is created anyway.
    Note { message: String },
    /// Another sandbox uses the kept volume. This is the last message.
    InUse,
    /// The process waits for the launcher to write its id maps.
    WantsMaps,
    /// The process is about to execute the guest, which closes the connection.
    Exec,
    /// A step has failed. This is the last message.
    Failed { step: usize, message: String },
}

/// The descriptors that the launcher hands to a new process.
#[derive(Debug)]
pub(crate) struct Handles {
    pub control: OwnedFd,
    pub guest: OwnedFd,
    pub log: OwnedFd,
    /// Channel on which the guest receives kernels that were forked into its sandbox.
    pub forks: OwnedFd,
    /// The result of the plan's base if a spare already ran those steps.
    pub prepared: Option<PreparedBase>,
    /// The mount of a kept volume that was parked; it is attached nowhere.
    pub kept: Option<OwnedFd>,
}

/// The result of a plan's base: a tree of mounts that is attached nowhere, and a network namespace.
#[derive(Debug)]
pub(crate) struct PreparedBase {
    pub root: OwnedFd,
    pub network: OwnedFd,
}

/// The guest's program and the descriptors that it receives.
struct Program {
    guest: OwnedFd,
    log: OwnedFd,
    forks: OwnedFd,
}

struct ApplyState {
    control: OwnedFd,
    program: Option<Program>,
    kept: Option<OwnedFd>,
    root: Option<OwnedFd>,
    /// The sandbox's `/proc/sys/user`, opened before `/proc` is covered by read-only mounts.
    user_limits: Option<OwnedFd>,
    /// The file and the directory that cover hidden paths, each opened once.
    null: Option<OwnedFd>,
    empty: Option<OwnedFd>,
    listener: Option<OwnedFd>,
    /// The overlays through which the sandbox sees the host's files.
    layers: layers::Layers,
}

const NOWHERE: &str = "";

/// Name of the guest's socket in the sandbox's directory.
pub(crate) const SOCKET: &str = "guest.sock";

/// Runs the plan. Returns only if a step failed, after reporting the failure to the launcher.
pub(crate) fn run(plan: &Plan, handles: Handles, fail_at: Option<usize>) {
    let Handles { control, guest, log, forks, prepared, kept } = handles;
    let mut context = ApplyState { kept, ..ApplyState::new(control, Some(Program { guest, log, forks })) };
    let (before, after) = (0..plan.base.start, plan.base.end..plan.ops.len());
    match prepared {
        None => context.steps(plan, 0..plan.ops.len(), fail_at),
        Some(prepared) => {
            let taken = context.steps(plan, before, fail_at) && context.take(plan, prepared);
            taken && context.steps(plan, after, fail_at)
        }
    };
}

/// Runs the base of a plan in a process with separate mount and network namespaces, and hands the result to the
/// launcher.
pub(crate) fn prepare(plan: &Plan, control: OwnedFd) {
    let mut context = ApplyState::new(control, None);
    if let Err(error) = private_mounts() {
        return context.failed(0, Op::PrivateMounts, error);
    }
    if context.steps(plan, plan.base.clone(), None)
        && let Err(error) = context.hand_over()
    {
        context.failed(plan.base.end, "hand over", error);
    }
}

/// Runs a plan after which the process continues. Returns false if a step failed, after reporting it to the launcher.
pub(crate) fn finish(plan: &Plan, control: OwnedFd) -> bool {
    ApplyState::new(control, None).steps(plan, 0..plan.ops.len(), None)
}

impl ApplyState {
    fn new(control: OwnedFd, program: Option<Program>) -> Self {
        Self {
            control,
            program,
            kept: None,
            root: None,
            user_limits: None,
            null: None,
            empty: None,
            listener: None,
            layers: layers::Layers::default(),
        }
    }

    /// Runs a range of steps. Returns false if one failed, after reporting it to the launcher.
    fn steps(&mut self, plan: &Plan, steps: Range<usize>, fail_at: Option<usize>) -> bool {
        for step in steps {
            let op = &plan.ops[step];
            let done = if fail_at == Some(step) { Err(ApplyError::Asked) } else { self.apply(op) };
            if let Err(error) = done {
                self.failed(step, op, error);
                return false;
            }
        }
        true
    }

    fn failed(&self, step: usize, what: impl fmt::Display, error: ApplyError) {
        let report = match error {
            ApplyError::Volume(volume::VolumeError::InUse) => SetupEvent::InUse,
            error => SetupEvent::Failed { step, message: format!("`{what}`: {error}") },
        };
        let _ = self.report(&report, &[]);
    }

    fn take(&mut self, plan: &Plan, prepared: PreparedBase) -> bool {
        let step = plan.base.start;
        let taken = match &plan.ops[step] {
            Op::NewRoot { at, .. } => self.take_at(at, prepared),
            _ => Err(ApplyError::Wrong { at: "/".into(), why: "a plan's base begins with its root" }),
        };
        taken.map_err(|error| self.failed(step, "take a spare", error)).is_ok()
    }

    /// Attaches a spare's root. A detached tree may be attached in any mount namespace of the same user namespace.
    fn take_at(&mut self, at: &Path, prepared: PreparedBase) -> Result<(), ApplyError> {
        use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
        move_into_link_name_space(prepared.network.as_fd(), Some(LinkNameSpaceType::Network))
            .at(Syscall::Setns, Path::new("net"))?;
        attach(&prepared.root, &open_dir(at)?, at)?;
        self.root = Some(prepared.root);
        Ok(())
    }

    fn hand_over(&self) -> Result<(), ApplyError> {
        let flags = OpenTreeFlags::AT_EMPTY_PATH | OpenTreeFlags::AT_RECURSIVE;
        let root = copy_of(self.root()?, Path::new(""), Path::new("/"), flags)?;
        let at = Path::new("/proc/self/ns/net");
        let network = rustix::fs::open(at, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).at(Syscall::Open, at)?;
        self.report(&SetupEvent::Prepared, &[root.as_fd(), network.as_fd()])
    }

    fn apply(&mut self, op: &Op) -> Result<(), ApplyError> {
        match op {
            Op::JoinCgroup(tasks) => write_existing(tasks, b"0"),
            Op::Confine(step) => step.apply(),
            Op::OrdinaryPriority => ordinary_priority(),
            Op::CgroupNamespace => sys::unshare(libc::CLONE_NEWCGROUP).at(Syscall::Unshare, Path::new("cgroup")),
            Op::Listen(dir) => self.listen(dir),
            Op::Egress(address) => self.report(&SetupEvent::Egress, &[listen_on(*address)?.as_fd()]),
            Op::PrivateMounts => private_mounts(),
            Op::NewRoot { at, bytes, inodes } => self.new_root(at, *bytes, *inodes),
            Op::Dir { path, mode } => self.mkdir(path, *mode),
            Op::Symlink { path, target } => {
                let (parent, name) = self.parent(path)?;
                rustix::fs::symlinkat(target, parent, name).at(Syscall::Symlink, path)
            }
            Op::File(FileSpec { path, content }) => self.file(path, content.as_bytes()),
            Op::Layer(path) => self.layer(path),
            Op::HideLayers => self.hide_layers(),
            Op::BindReadOnly(path) => self.bind_read_only(path),
            Op::Device { path, number } => self.device(path, *number),
            Op::Devpts { path, max } => {
                let options = [("newinstance", None), ("ptmxmode", Some("0666")), ("mode", Some("0600"))];
                let max = max.to_string();
                self.new_mount("devpts", path, &[&options[..], &[("max", Some(max.as_str()))]].concat(), sys::NOEXEC)
            }
            Op::Tmpfs { path, bytes, inodes } => self.tmpfs(path, *bytes, *inodes, "1777"),
            Op::Proc(path) => self.proc(path),
            Op::MaskFile(path) => self.mask_file(path),
            Op::MaskDir(path) => self.mask_dir(path),
            Op::ProcFile(FileSpec { path, content }) => self.proc_file(path, content.as_bytes()),
            Op::BootId(path) => {
                // The Linux kernel generates a new UUID, in the same format as a boot id, on every read of this file.
                let source = Path::new("/proc/sys/kernel/random/uuid");
                self.proc_file(path, &fs::read(source).at(Syscall::Open, source)?)
            }
            Op::ReadOnly(path) => self.read_only(path),
            Op::Volume(volume) => self.volume(volume),
            Op::VolumeDir { path, mode } => self.volume_dir(path, *mode),
            Op::HideVolume => self.hide(VOLUME),
            Op::VolumeOwner { path, owner, group } => chown(&self.target(path)?, (*owner, *group), path),
            Op::SharedDir { path, mode, owner, group } => {
                self.mkdir(path, *mode)?;
                let dir = self.target(path)?;
                set_mode(&dir, *mode, path)?;
                chown(&dir, (*owner, *group), path)
            }
            Op::KeptImage { template, image } => self.kept_image(template.as_deref(), image),
            Op::KeptDir { path, owner, mode, below } => self.kept_dir(path, *owner, *mode, below),
            Op::KeptPoint { path, owner } => self.kept_mount_point(path, *owner),
            Op::ShowAt { from, path } => self.show_at(from, path),
            Op::HideKept => self.hide(KEPT),
            Op::KeptMounted(path) => self.kept_mounted(path),
            Op::HoldKept(path) => {
                let copy = copy_of(self.target(path)?.as_fd(), Path::new(""), path, OpenTreeFlags::AT_EMPTY_PATH)?;
                self.report(&SetupEvent::KeptMount, &[copy.as_fd()])
            }
            Op::KeptBind { at, path, owner } => self.kept_bind(at, path, *owner),
            Op::Share { shared, owner } => self.share(shared, *owner),
            Op::SharePackages { workspace, shared, owner } => self.share_packages(workspace, shared, *owner),
            Op::PivotRoot => self.pivot_root(),
            Op::SealRoot => {
                let root = open_dir(Path::new("/"))?;
                sys::mount_setattr(root.as_fd(), sys::RDONLY | sys::NOSUID | sys::NODEV, false)
                    .at(Syscall::MountSetattr, Path::new("/"))
            }
            Op::Hostname(name) => {
                rustix::system::sethostname(name.as_bytes()).at(Syscall::Sethostname, Path::new(name.as_str()))
            }
            Op::LoopbackUp => {
                // Limits that cannot be set are ignored here; `doctor` reports them.
                let _ = sys::limit_network();
                sys::loopback_up().at(Syscall::Ioctl, Path::new("lo"))
            }
            Op::UserNamespace(map) => self.user_namespace(map.outer()),
            Op::UserLimits => self.user_limits(),
            Op::DieWithLauncher => self.die_with_launcher(),
            Op::Descriptors => self.descriptors(),
            Op::Exec => self.exec(),
        }
    }

    fn report(&self, report: &SetupEvent, fds: &[BorrowedFd<'_>]) -> Result<(), ApplyError> {
        wire::send(&self.control, report, fds).at(Syscall::Send, Path::new("launcher"))
    }

    fn listen(&mut self, dir: &Path) -> Result<(), ApplyError> {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};
        let at = dir.join(SOCKET);
        // Bind to a name relative to the directory, because the full path may be too long for a socket address.
        rustix::process::chdir(dir).at(Syscall::Chdir, dir)?;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .at(Syscall::Socket, &at)?;
        let address = SocketAddrUnix::new(SOCKET).at(Syscall::Bind, &at)?;
        bind(&socket, &address).at(Syscall::Bind, &at)?;
        rustix::fs::chmod(SOCKET, Mode::from_raw_mode(0o600)).at(Syscall::Chmod, &at)?;
        listen(&socket, 16).at(Syscall::Listen, &at)?;
        rustix::process::chdir("/").at(Syscall::Chdir, Path::new("/"))?;
        self.listener = Some(socket);
        Ok(())
    }

    fn user_namespace(&self, owner: u32) -> Result<(), ApplyError> {
        become_owner(owner)?;
        sys::unshare(libc::CLONE_NEWUSER).at(Syscall::Unshare, Path::new("user"))?;
        self.report(&SetupEvent::WantsMaps, &[])?;
        let mut go = [0u8; 8];
        let (got, _) =
            rustix::net::recv(&self.control, &mut go, RecvFlags::empty()).at(Syscall::Recv, Path::new("launcher"))?;
        if got == 0 { Err(ApplyError::LauncherGone) } else { Ok(()) }
    }

    /// Sets the limits through the writable `/proc`. The files show the limits of the caller's user namespace.
    fn user_limits(&mut self) -> Result<(), ApplyError> {
        let unmounted = || ApplyError::Wrong { at: "/proc".into(), why: "it is not mounted yet" };
        let dir = self.user_limits.take().ok_or_else(unmounted)?;
        for (name, limit) in USER_LIMITS {
            let path = Path::new(name);
            match rustix::fs::openat(&dir, path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty()) {
                // A Linux kernel that does not know this kind of object has nothing to limit.
                Err(Errno::NOENT) => {}
                fd => drop(rustix::io::write(fd.at(Syscall::Open, path)?, limit.as_bytes()).at(Syscall::Write, path)?),
            }
        }
        Ok(())
    }

    fn die_with_launcher(&self) -> Result<(), ApplyError> {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let at = Path::new("parent death signal");
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).at(Syscall::Prctl, at)?;
        // If the launcher died just before this, no signal arrives, but its end of the connection is closed.
        let mut fds = [PollFd::new(&self.control, PollFlags::empty())];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).at(Syscall::Recv, Path::new("launcher"))?;
        if fds[0].revents().contains(PollFlags::HUP) { Err(ApplyError::LauncherGone) } else { Ok(()) }
    }

    fn descriptors(&mut self) -> Result<(), ApplyError> {
        let at = Path::new("/dev/null");
        let Program { guest, log, forks } = self.program.as_mut().ok_or_else(no_program)?;
        let no_socket = || ApplyError::Wrong { at: "3".into(), why: "there is no socket" };
        let listener = self.listener.as_ref().ok_or_else(no_socket)?;
        let null = sys::open_null().at(Syscall::Open, at)?;
        let fds = [(0, &null), (1, &null), (2, log), (3, listener), (4, forks)];
        [self.control, *guest] = sys::hand_over(&fds, [&self.control, guest]).at(Syscall::Dup, at)?;
        Ok(())
    }

    fn exec(&self) -> Result<(), ApplyError> {
        self.report(&SetupEvent::Exec, &[])?;
        let guest = &self.program.as_ref().ok_or_else(no_program)?.guest;
        let name = CString::from(c"sandpool-guest");
        Err(sys::execveat(guest.as_fd(), &[name])).at(Syscall::Execveat, Path::new("guest"))
    }
}

fn no_program() -> ApplyError {
    ApplyError::Wrong { at: "3".into(), why: "there is no program to run" }
}

/// Limits on resources that the Linux kernel counts per user, set for one sandbox. The seccomp policy refuses
/// namespaces as well, but it allows inotify, and in the modes of an ordinary user all sandboxes share that user's
/// quota (128 instances by default).
const USER_LIMITS: &[(&str, &str)] = &[
    ("max_user_namespaces", "0"),
    ("max_mnt_namespaces", "0"),
    ("max_pid_namespaces", "0"),
    ("max_net_namespaces", "0"),
    ("max_ipc_namespaces", "0"),
    ("max_uts_namespaces", "0"),
    ("max_cgroup_namespaces", "0"),
    ("max_time_namespaces", "0"),
    ("max_inotify_instances", "32"),
    ("max_inotify_watches", "32768"),
];

/// Maximum number of connections that wait to be accepted. A client beyond that has to retry.
const EGRESS_BACKLOG: i32 = 128;

fn listen_on(address: SocketAddrV4) -> Result<OwnedFd, ApplyError> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, listen, socket_with};
    let at = PathBuf::from(address.to_string());
    let socket =
        socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None).at(Syscall::Socket, &at)?;
    bind(&socket, &address).at(Syscall::Bind, &at)?;
    listen(&socket, EGRESS_BACKLOG).at(Syscall::Listen, &at)?;
    Ok(socket)
}

/// Resets scheduling, nice and OOM priority to ordinary values, whatever the server was given: no operator wants
/// foreign code to run with more. A positive nice value is kept.
pub(crate) fn ordinary_priority() -> Result<(), ApplyError> {
    let at = Path::new(NOWHERE);
    sys::ordinary_scheduling().at(Syscall::Setpriority, at)?;
    if rustix::process::getpriority_process(None).at(Syscall::Setpriority, at)? < 0 {
        rustix::process::setpriority_process(None, 0).at(Syscall::Setpriority, at)?;
    }
    // Written while the process still has the launcher's capabilities, because only then does the write also raise the
    // minimum that is allowed later.
    let oom = Path::new("/proc/self/oom_score_adj");
    if fs::read_to_string(oom).at(Syscall::Open, oom)?.starts_with('-') { write_existing(oom, b"0") } else { Ok(()) }
}

/// Switches to the sandbox's uid but keeps the capabilities, which the next steps need. In single mode the uid is
/// already the right one.
fn become_owner(owner: u32) -> Result<(), ApplyError> {
    let at = Path::new(NOWHERE);
    if owner == rustix::process::geteuid().as_raw() {
        return Ok(());
    }
    let uid = Uid::from_raw(owner);
    rustix::thread::set_keep_capabilities(true).at(Syscall::Prctl, at)?;
    rustix::thread::set_thread_res_uid(uid, uid, uid).at(Syscall::Setresuid, at)?;
    let mut sets = rustix::thread::capabilities(None).at(Syscall::Prctl, at)?;
    sets.effective = sets.permitted;
    rustix::thread::set_capabilities(None, sets).at(Syscall::Prctl, at)
}

fn write_existing(path: &Path, text: &[u8]) -> Result<(), ApplyError> {
    let fd = rustix::fs::open(path, OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty())
        .at(Syscall::Open, path)?;
    rustix::io::write(fd, text).at(Syscall::Write, path)?;
    Ok(())
}

#[cfg(test)]
mod tests;
