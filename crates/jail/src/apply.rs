//! Applies a plan in the process that becomes the guest. One loop runs the steps; every error names the step, the
//! syscall and the path.
//!
//! All mounts are handled through descriptors: a mount is created or copied detached, receives its attributes, and is
//! only then attached to a target that was opened beneath the new root without following symlinks. A mounted file
//! system therefore cannot redirect a later step.

use std::ffi::CString;
use std::fmt;
use std::fs;
use std::io;
use std::net::SocketAddrV4;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags,
};
use rustix::net::RecvFlags;
use rustix::process::{Signal, WaitId, WaitIdOptions};
use rustix::thread::{Gid, Uid};
use serde::{Deserialize, Serialize};

use crate::ids::{self, Remap};
use crate::plan::{Op, Plan};
use crate::spec::{SharedVolumeSpec, Volume};
use crate::{sys, volume, wire};

mod layers;

/// A syscall that a plan can make, named in error messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Syscall {
    Bind,
    Chdir,
    Clone,
    Chmod,
    Chown,
    Dup,
    Execveat,
    Fsconfig,
    Fsmount,
    Fsopen,
    Fstatfs,
    Ioctl,
    Keyctl,
    Listen,
    Mkdir,
    Mknod,
    MountPrivate,
    MountSetattr,
    MoveMount,
    Open,
    OpenTree,
    PivotRoot,
    Prctl,
    Recv,
    Send,
    Setgroups,
    Setpriority,
    Sethostname,
    Setpgid,
    Setresgid,
    Setresuid,
    Setns,
    Setsid,
    Socket,
    Stat,
    Symlink,
    Umount,
    Unlink,
    Unshare,
    Write,
}

impl fmt::Display for Syscall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", format!("{self:?}").to_lowercase())
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    #[error("{call} `{}`: {errno}", at.display())]
    Call { call: Syscall, at: PathBuf, errno: Errno },
    #[error("`{}` is not what it has to be: {why}", at.display())]
    Wrong { at: PathBuf, why: &'static str },
    #[error("`{}` belongs to root or to root's group; give it to others, or share it read-only", at.display())]
    RootsDirectory { at: PathBuf },
    #[error(transparent)]
    Volume(#[from] volume::VolumeError),
    #[error("{0}")]
    Rlimits(String),
    #[error("capabilities: {0}")]
    Capabilities(String),
    #[error("landlock: {0}")]
    Landlock(String),
    #[error("seccomp: {0}")]
    Seccomp(io::Error),
    #[error("the launcher is gone")]
    LauncherGone,
    #[error("a failure was asked for")]
    Asked,
}

pub(crate) trait At<T> {
    fn at(self, call: Syscall, path: &Path) -> Result<T, ApplyError>;
}

impl<T> At<T> for Result<T, Errno> {
    fn at(self, call: Syscall, path: &Path) -> Result<T, ApplyError> {
        self.map_err(|errno| ApplyError::Call { call, at: path.to_owned(), errno })
    }
}

impl<T> At<T> for io::Result<T> {
    fn at(self, call: Syscall, path: &Path) -> Result<T, ApplyError> {
        self.map_err(|e| e.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)).at(call, path)
    }
}

/// A message that the new process sends to the launcher during setup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SetupEvent {
    Loop {
        device: volume::Device,
    },
    /// The spare is complete. Its root and its network namespace are attached as descriptors. This is the last message.
    Prepared,
    KeptLoop {
        device: volume::Device,
    },
    /// A mount of the kept volume for the launcher is attached as a descriptor.
    KeptHeld,
    /// The listening socket of the sandbox's egress is attached as a descriptor.
    Egress,
    /// A protection is weaker than it could be. The sandbox is created anyway.
    Note {
        message: String,
    },
    /// Another sandbox uses the kept volume. This is the last message.
    InUse,
    /// The process waits for the launcher to write its id maps.
    WantsMaps,
    /// The process is about to execute the guest, which closes the connection.
    Exec,
    Failed {
        step: usize,
        message: String,
    },
}

/// The descriptors that the launcher hands to a new process.
#[derive(Debug)]
pub struct Handles {
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
pub struct PreparedBase {
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
pub const SOCKET: &str = "guest.sock";

/// Runs the plan. Returns only if a step failed, after reporting the failure to the launcher.
pub fn run(plan: &Plan, handles: Handles, fail_at: Option<usize>) {
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
pub fn prepare(plan: &Plan, control: OwnedFd) {
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
pub fn finish(plan: &Plan, control: OwnedFd) -> bool {
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
            Op::JoinCgroup { tasks } => write_existing(tasks, b"0"),
            Op::Own(own) => own.apply(),
            Op::OrdinaryPriority => ordinary_priority(),
            Op::CgroupNamespace => sys::unshare(libc::CLONE_NEWCGROUP).at(Syscall::Unshare, Path::new("cgroup")),
            Op::Listen { dir } => self.listen(dir),
            Op::Egress { address } => self.report(&SetupEvent::Egress, &[listen_on(*address)?.as_fd()]),
            Op::PrivateMounts => private_mounts(),
            Op::NewRoot { at, bytes, inodes } => self.new_root(at, *bytes, *inodes),
            Op::Dir { path, mode } => self.mkdir(path, *mode),
            Op::Symlink { path, target } => {
                let (parent, name) = self.parent(path)?;
                rustix::fs::symlinkat(target, parent, name).at(Syscall::Symlink, path)
            }
            Op::File { path, content } => self.file(path, content.as_bytes()),
            Op::Layer { path } => self.layer(path),
            Op::HideLayers => self.hide_layers(),
            Op::BindReadOnly { path } => self.bind_read_only(path),
            Op::Device { path, number } => self.device(path, *number),
            Op::Devpts { path, max } => {
                let options = [("newinstance", None), ("ptmxmode", Some("0666")), ("mode", Some("0600"))];
                let max = max.to_string();
                self.new_mount("devpts", path, &[&options[..], &[("max", Some(max.as_str()))]].concat(), sys::NOEXEC)
            }
            Op::Tmpfs { path, bytes, inodes } => self.tmpfs(path, *bytes, *inodes, "1777"),
            Op::Proc { path } => self.proc(path),
            Op::MaskFile { path } => self.mask_file(path),
            Op::MaskDir { path } => self.mask_dir(path),
            Op::ProcFile { path, content } => self.proc_file(path, content.as_bytes()),
            Op::BootId { path } => {
                // The Linux kernel generates a new UUID, in the same format as a boot id, on every read of this file.
                let source = Path::new("/proc/sys/kernel/random/uuid");
                self.proc_file(path, &fs::read(source).at(Syscall::Open, source)?)
            }
            Op::ReadOnly { path } => self.read_only(path),
            Op::Volume { volume } => self.volume(volume),
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
            Op::KeptDir { path, owner } => self.kept_dir(path, *owner),
            Op::HideKept => self.hide(KEPT),
            Op::KeptMounted { path } => self.kept_mounted(path),
            Op::HoldKept { path } => {
                let hold = copy_of(self.target(path)?.as_fd(), Path::new(""), path, OpenTreeFlags::AT_EMPTY_PATH)?;
                self.report(&SetupEvent::KeptHeld, &[hold.as_fd()])
            }
            Op::KeptBind { at, path, owner } => self.kept_bind(at, path, *owner),
            Op::Share { shared, owner } => self.share(shared, *owner),
            Op::PivotRoot => self.pivot_root(),
            Op::SealRoot => {
                let root = open_dir(Path::new("/"))?;
                sys::mount_setattr(root.as_fd(), sys::RDONLY | sys::NOSUID | sys::NODEV, false)
                    .at(Syscall::MountSetattr, Path::new("/"))
            }
            Op::Hostname { name } => {
                rustix::system::sethostname(name.as_bytes()).at(Syscall::Sethostname, Path::new(name.as_str()))
            }
            Op::LoopbackUp => {
                // Limits that cannot be set are ignored here; `doctor` reports them.
                let _ = sys::limit_network();
                sys::loopback_up().at(Syscall::Ioctl, Path::new("lo"))
            }
            Op::UserNamespace { map } => self.user_namespace(map.outer()),
            Op::UserLimits => self.user_limits(),
            Op::DieWithLauncher => self.die_with_launcher(),
            Op::Descriptors => self.descriptors(),
            Op::Exec => self.exec(),
        }
    }

    fn report(&self, report: &SetupEvent, fds: &[BorrowedFd<'_>]) -> Result<(), ApplyError> {
        wire::send(&self.control, report, fds).at(Syscall::Send, Path::new("launcher"))
    }

    fn root(&self) -> Result<BorrowedFd<'_>, ApplyError> {
        self.root.as_ref().map(AsFd::as_fd).ok_or(ApplyError::Wrong { at: "/".into(), why: "there is no new root yet" })
    }

    /// Opens `path` in the new root and refuses symlinks in every component.
    fn target(&self, path: &Path) -> Result<OwnedFd, ApplyError> {
        let below = path.strip_prefix("/").unwrap_or(path);
        let below = if below.as_os_str().is_empty() { Path::new(".") } else { below };
        let how = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let flags = OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        rustix::fs::openat2(self.root()?, below, flags, Mode::empty(), how).at(Syscall::Open, path)
    }

    fn parent<'p>(&self, path: &'p Path) -> Result<(OwnedFd, &'p std::ffi::OsStr), ApplyError> {
        let wrong = || ApplyError::Wrong { at: path.to_owned(), why: "it has no parent" };
        Ok((self.target(path.parent().ok_or_else(wrong)?)?, path.file_name().ok_or_else(wrong)?))
    }

    fn mkdir(&self, path: &Path, mode: u32) -> Result<(), ApplyError> {
        let (parent, name) = self.parent(path)?;
        rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(mode)).at(Syscall::Mkdir, path)
    }

    fn file(&self, path: &Path, content: &[u8]) -> Result<(), ApplyError> {
        let (parent, name) = self.parent(path)?;
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(parent, name, flags, Mode::from_raw_mode(0o444)).at(Syscall::Open, path)?;
        io::Write::write_all(&mut fs::File::from(fd), content).at(Syscall::Write, path)
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

    fn new_root(&mut self, at: &Path, bytes: u64, inodes: u64) -> Result<(), ApplyError> {
        let (bytes, inodes) = (bytes.to_string(), inodes.to_string());
        let options = [("size", Some(bytes.as_str())), ("nr_inodes", Some(inodes.as_str())), ("mode", Some("0755"))];
        let root = detached("tmpfs", &options, sys::NOSUID | sys::NODEV)?;
        attach(&root, &open_dir(at)?, at)?;
        self.root = Some(root);
        Ok(())
    }

    fn new_mount(
        &self,
        kind: &str,
        path: &Path,
        options: &[(&str, Option<&str>)],
        extra: u64,
    ) -> Result<(), ApplyError> {
        let mount = detached(kind, options, sys::NOSUID | extra)?;
        attach(&mount, &self.target(path)?, path)
    }

    fn tmpfs(&self, path: &Path, bytes: u64, inodes: u64, mode: &str) -> Result<(), ApplyError> {
        let (bytes, inodes) = (bytes.to_string(), inodes.to_string());
        let options = [("size", Some(bytes.as_str())), ("nr_inodes", Some(inodes.as_str())), ("mode", Some(mode))];
        self.new_mount("tmpfs", path, &options, sys::NODEV)
    }

    fn bind_read_only(&self, path: &Path) -> Result<(), ApplyError> {
        let flags = OpenTreeFlags::AT_RECURSIVE;
        let tree = copy_of(CWD, path, path, flags)?;
        self.show(&tree, path)
    }

    /// Attaches a tree of mounts, read-only, at a path that does not exist yet.
    fn show(&self, tree: &OwnedFd, path: &Path) -> Result<(), ApplyError> {
        sys::mount_setattr(tree.as_fd(), SEALED, true).at(Syscall::MountSetattr, path)?;
        let found = rustix::fs::fstat(tree).at(Syscall::Stat, path)?;
        if FileType::from_raw_mode(found.st_mode) == FileType::Directory {
            self.mkdir(path, 0o755)?;
        } else {
            self.file(path, b"")?;
        }
        attach(tree, &self.target(path)?, path)
    }

    /// Mounts a newly created device node, or the host's node if none can be created. The device number must match.
    fn device(&mut self, path: &Path, number: (u32, u32)) -> Result<(), ApplyError> {
        let tree = match self.own_node(path, number)? {
            Some(tree) => tree,
            None => copy_of(CWD, path, path, OpenTreeFlags::empty())?,
        };
        check_device(&tree, number, path)?;
        sys::mount_setattr(tree.as_fd(), sys::RDONLY | sys::NOSUID | sys::NOEXEC, false)
            .at(Syscall::MountSetattr, path)?;
        self.file(path, b"")?;
        attach(&tree, &self.target(path)?, path)
    }

    fn proc(&mut self, path: &Path) -> Result<(), ApplyError> {
        self.new_mount("proc", path, &[], sys::NODEV | sys::NOEXEC)?;
        let target = self.target(path)?;
        let found = rustix::fs::fstatfs(&target).at(Syscall::Fstatfs, path)?;
        if found.f_type != rustix::fs::PROC_SUPER_MAGIC {
            return Err(ApplyError::Wrong { at: path.to_owned(), why: "no proc file system" });
        }
        // Opened before anything covers `/proc`: a descriptor from this mount stays writable later.
        self.user_limits = Some(self.target(&path.join("sys/user"))?);
        Ok(())
    }

    /// Covers a file with the sandbox's `/dev/null`, and verifies the result by opening the path again.
    fn mask_file(&mut self, path: &Path) -> Result<(), ApplyError> {
        let Some(target) = self.proc_target(path)? else { return Ok(()) };
        let null = match self.null.take() {
            Some(null) => null,
            None => {
                let null = self.target(Path::new("/dev/null"))?;
                check_device(&null, (1, 3), path)?;
                null
            }
        };
        let copy = copy_of(null.as_fd(), Path::new(""), path, OpenTreeFlags::AT_EMPTY_PATH)?;
        self.null = Some(null);
        attach(&copy, &target, path)?;
        check_device(&self.target(path)?, (1, 3), path)
    }

    /// Covers a directory with an empty read-only directory.
    fn mask_dir(&mut self, path: &Path) -> Result<(), ApplyError> {
        let Some(target) = self.proc_target(path)? else { return Ok(()) };
        let empty = match self.empty.take() {
            Some(empty) => empty,
            None => {
                let at = Path::new("/.empty");
                self.mkdir(at, 0o555)?;
                self.target(at)?
            }
        };
        let tree = copy_of(empty.as_fd(), Path::new(""), path, OpenTreeFlags::AT_EMPTY_PATH)?;
        self.empty = Some(empty);
        sys::mount_setattr(tree.as_fd(), sys::RDONLY | sys::NOEXEC, false).at(Syscall::MountSetattr, path)?;
        attach(&tree, &target, path)
    }

    /// Covers a file with a new one that cannot be reached under any other name.
    fn proc_file(&self, path: &Path, content: &[u8]) -> Result<(), ApplyError> {
        let Some(target) = self.proc_target(path)? else { return Ok(()) };
        let at = Path::new("/.proc-file");
        self.file(at, content)?;
        let tree = copy_of(self.target(at)?.as_fd(), Path::new(""), path, OpenTreeFlags::AT_EMPTY_PATH)?;
        sys::mount_setattr(tree.as_fd(), SEALED | sys::NOEXEC, false).at(Syscall::MountSetattr, path)?;
        attach(&tree, &target, path)?;
        // Unlink only after attaching, because an unlinked file cannot be attached.
        let (root, name) = self.parent(at)?;
        rustix::fs::unlinkat(root, name, AtFlags::empty()).at(Syscall::Unlink, path)
    }

    fn read_only(&self, path: &Path) -> Result<(), ApplyError> {
        let Some(target) = self.proc_target(path)? else { return Ok(()) };
        let flags = OpenTreeFlags::AT_EMPTY_PATH | OpenTreeFlags::AT_RECURSIVE;
        let tree = copy_of(target.as_fd(), Path::new(""), path, flags)?;
        sys::mount_setattr(tree.as_fd(), sys::RDONLY, true).at(Syscall::MountSetattr, path)?;
        attach(&tree, &target, path)
    }

    /// Opens a path in the sandbox's `/proc`. Returns `None` if this Linux kernel or this namespace does not have it.
    fn proc_target(&self, path: &Path) -> Result<Option<OwnedFd>, ApplyError> {
        let target = match self.target(path) {
            Err(ApplyError::Call { errno: Errno::NOENT, .. }) => return Ok(None),
            other => other?,
        };
        let found = rustix::fs::fstatfs(&target).at(Syscall::Fstatfs, path)?;
        if found.f_type != rustix::fs::PROC_SUPER_MAGIC {
            return Err(ApplyError::Wrong { at: path.to_owned(), why: "it does not lie in a proc file system" });
        }
        Ok(Some(target))
    }

    fn volume(&self, volume: &Volume) -> Result<(), ApplyError> {
        let at = Path::new(VOLUME);
        self.mkdir(at, 0o700)?;
        match volume {
            Volume::Tmpfs { bytes, inodes } => self.tmpfs(at, *bytes, *inodes, "0755"),
            Volume::Ext4 { template, image } => {
                volume::copy_sparse(template, image)?;
                let device = volume::attach_loop(&volume::open_image(image)?)?;
                self.report(&SetupEvent::Loop { device: volume::Device::of(device.number) }, &[])?;
                // The loop device keeps the file open. Without a name the file disappears with the sandbox, even if the
                // launcher dies first, and the Linux kernel frees its blocks instead of the launcher.
                fs::remove_file(image).at(Syscall::Unlink, image)?;
                // This volume does not outlive the sandbox, so it needs no protection against a power failure.
                let options = [
                    ("source", Some(device.path.as_str())),
                    ("barrier", Some("0")),
                    ("errors", Some("remount-ro")),
                    ("noinit_itable", None),
                ];
                self.new_mount("ext4", at, &options, sys::NODEV)
            }
        }
    }

    fn volume_dir(&self, path: &Path, mode: u32) -> Result<(), ApplyError> {
        let name = path.file_name().ok_or(ApplyError::Wrong { at: path.to_owned(), why: "it has no name" })?;
        let made = Path::new(VOLUME).join(name);
        self.mkdir(&made, mode)?;
        let fd = self.target(&made)?;
        set_mode(&fd, mode, path)?;
        let tree = copy_of(fd.as_fd(), Path::new(""), path, OpenTreeFlags::AT_EMPTY_PATH)?;
        attach(&tree, &self.target(path)?, path)
    }

    fn kept_image(&self, template: Option<&Path>, image: &Path) -> Result<(), ApplyError> {
        if let Some(template) = template {
            volume::copy_sparse(template, image)?;
        }
        let device = volume::attach_loop(&volume::lock_image(image)?)?;
        self.report(&SetupEvent::KeptLoop { device: volume::Device::of(device.number) }, &[])?;
        let at = Path::new(KEPT);
        self.mkdir(at, 0o700)?;
        // Unlike the sandbox's own volume, a kept volume uses barriers. The inode tables are holes and may remain so.
        let options = [("source", Some(device.path.as_str())), ("errors", Some("remount-ro")), ("noinit_itable", None)];
        self.new_mount("ext4", at, &options, sys::NODEV)
    }

    /// Shows a directory below the root of the file system. The root itself contains `lost+found` and stays owned by
    /// root.
    fn kept_dir(&self, path: &Path, owner: u32) -> Result<(), ApplyError> {
        let made = Path::new(KEPT).join("data");
        match self.mkdir(&made, 0o755) {
            Err(ApplyError::Call { errno: Errno::EXIST, .. }) => {}
            other => other?,
        }
        let fd = self.target(&made)?;
        // A crash during an earlier setup may have happened between `mkdir` and `chown`.
        if rustix::fs::fstat(&fd).at(Syscall::Stat, path)?.st_uid != ids::KEPT {
            chown(&fd, (ids::KEPT, ids::KEPT), path)?;
        }
        let tree = copy_of(fd.as_fd(), Path::new(""), path, OpenTreeFlags::AT_EMPTY_PATH)?;
        let remap = Remap::new(ids::KEPT, ids::KEPT, owner)
            .map_err(|_| ApplyError::Wrong { at: path.to_owned(), why: "its files are root's" })?;
        sys::mount_idmap(tree.as_fd(), namespace_of(remap)?.as_fd()).at(Syscall::MountSetattr, path)?;
        attach(&tree, &self.target(path)?, path)
    }

    /// Attaches a parked mount. It is already mapped, because the owner is the same as in its last use.
    fn kept_mounted(&mut self, path: &Path) -> Result<(), ApplyError> {
        let missing = || ApplyError::Wrong { at: path.to_owned(), why: "there is no mount to take" };
        attach(&self.kept.take().ok_or_else(missing)?, &self.target(path)?, path)
    }

    /// Binds a directory whose owner is always the same, so it needs no id mapping.
    fn kept_bind(&self, at: &Path, path: &Path, owner: u32) -> Result<(), ApplyError> {
        let tree = copy_of(CWD, at, at, OpenTreeFlags::AT_SYMLINK_NOFOLLOW)?;
        chown(&tree, (owner, owner), path)?;
        attach(&tree, &self.target(path)?, path)
    }

    fn share(&self, shared: &SharedVolumeSpec, owner: Option<u32>) -> Result<(), ApplyError> {
        let SharedVolumeSpec { host, inside, read_only } = shared;
        // Open the directory only once, so that a concurrent rename cannot change which directory is shown.
        let dir = open_dir(host)?;
        let flags = OpenTreeFlags::AT_EMPTY_PATH | OpenTreeFlags::AT_RECURSIVE;
        let tree = copy_of(dir.as_fd(), Path::new(""), host, flags)?;
        let access = if *read_only { sys::RDONLY } else { 0 };
        sys::mount_setattr(tree.as_fd(), sys::NOSUID | sys::NODEV | access, true).at(Syscall::MountSetattr, host)?;
        if let Some(owner) = owner {
            self.show_as(&tree, shared, owner)?;
        }
        attach(&tree, &self.target(inside)?, inside)
    }

    /// Maps the directory's owner to the sandbox: the owner's files belong to the sandbox inside, and files that the
    /// sandbox creates belong to that owner on the host.
    fn show_as(&self, tree: &OwnedFd, shared: &SharedVolumeSpec, owner: u32) -> Result<(), ApplyError> {
        let found = rustix::fs::fstat(tree).at(Syscall::Stat, &shared.host)?;
        let remap = match Remap::new(found.st_uid, found.st_gid, owner) {
            Ok(remap) => remap,
            // World-readable files can be read without a mapping.
            Err(_) if shared.read_only => return Ok(()),
            Err(_) => return Err(ApplyError::RootsDirectory { at: shared.host.clone() }),
        };
        match sys::mount_idmap(tree.as_fd(), namespace_of(remap)?.as_fd()) {
            Err(Errno::INVAL | Errno::PERM | Errno::OPNOTSUPP) => {
                let inside = shared.inside.display();
                let message = format!(
                    "shared volume `{inside}`: its file system, or one mounted in it, cannot show files with other owners, so that \
                     a sandbox has there what everybody has (use ext4, xfs or btrfs)"
                );
                self.report(&SetupEvent::Note { message }, &[])
            }
            other => other.at(Syscall::MountSetattr, &shared.host),
        }
    }

    /// Unmounts a volume from its temporary place. The copies of its directories keep it alive.
    fn hide(&self, volume: &str) -> Result<(), ApplyError> {
        let at = Path::new(volume);
        rustix::process::fchdir(self.root()?).at(Syscall::Chdir, at)?;
        rustix::mount::unmount(&volume[1..], UnmountFlags::DETACH | UnmountFlags::NOFOLLOW).at(Syscall::Umount, at)?;
        rustix::fs::unlinkat(self.root()?, &volume[1..], AtFlags::REMOVEDIR).at(Syscall::Umount, at)?;
        rustix::process::chdir("/").at(Syscall::Chdir, Path::new("/"))
    }

    fn pivot_root(&mut self) -> Result<(), ApplyError> {
        let root = self.root.take().ok_or(ApplyError::Wrong { at: "/".into(), why: "there is no new root yet" })?;
        (self.null, self.empty) = (None, None);
        let here = Path::new("/");
        rustix::process::fchdir(&root).at(Syscall::Chdir, here)?;
        // Both roots are now mounted at the same place. The old root is on top and is unmounted.
        rustix::process::pivot_root(".", ".").at(Syscall::PivotRoot, here)?;
        rustix::mount::unmount(".", UnmountFlags::DETACH).at(Syscall::Umount, here)?;
        rustix::process::chdir("/").at(Syscall::Chdir, here)
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
        let nothing = || ApplyError::Wrong { at: "3".into(), why: "there is no program to run" };
        let Program { guest, log, forks } = self.program.as_mut().ok_or_else(nothing)?;
        let no_socket = || ApplyError::Wrong { at: "3".into(), why: "there is no socket" };
        let listener = self.listener.as_ref().ok_or_else(no_socket)?;
        let null = sys::open_null().at(Syscall::Open, at)?;
        let fds = [(0, &null), (1, &null), (2, log), (3, listener), (4, forks)];
        [self.control, *guest] = sys::hand_over(&fds, [&self.control, guest]).at(Syscall::Dup, at)?;
        Ok(())
    }

    fn exec(&self) -> Result<(), ApplyError> {
        self.report(&SetupEvent::Exec, &[])?;
        let nothing = || ApplyError::Wrong { at: "3".into(), why: "there is no program to run" };
        let guest = &self.program.as_ref().ok_or_else(nothing)?.guest;
        let name = CString::from(c"sandpool-guest");
        Err(sys::execveat(guest.as_fd(), &[name])).at(Syscall::Execveat, Path::new("guest"))
    }
}

/// Mount attributes of every part of the host that a sandbox sees.
const SEALED: u64 = sys::RDONLY | sys::NOSUID | sys::NODEV;

/// Temporary mount points of the volumes while their directories are created.
const VOLUME: &str = "/.volume";
const KEPT: &str = "/.kept";

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

fn private_mounts() -> Result<(), ApplyError> {
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", private).at(Syscall::MountPrivate, Path::new("/"))
}

/// Sets the mode explicitly, because `mkdir` applies the umask and ignores the sticky bit.
fn set_mode(fd: &OwnedFd, mode: u32, shown: &Path) -> Result<(), ApplyError> {
    let proc = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(fd));
    rustix::fs::chmod(&proc, Mode::from_raw_mode(mode)).at(Syscall::Chmod, shown)
}

fn chown(fd: &OwnedFd, (owner, group): (u32, u32), shown: &Path) -> Result<(), ApplyError> {
    let (uid, gid) = (Uid::from_raw(owner), Gid::from_raw(group));
    rustix::fs::chownat(fd, "", Some(uid), Some(gid), AtFlags::EMPTY_PATH).at(Syscall::Chown, shown)
}

/// Creates a user namespace with these id maps, for an idmapped mount. A process has to live in it while the maps are
/// written.
fn namespace_of(remap: Remap) -> Result<OwnedFd, ApplyError> {
    let (_, pidfd) = sys::spawn_child(libc::CLONE_NEWUSER, None, || sys::wait_for_the_end())
        .at(Syscall::Clone, Path::new("user"))?;
    let made = write_remap(&pidfd, remap);
    rustix::process::pidfd_send_signal(&pidfd, Signal::KILL).at(Syscall::Clone, Path::new("user"))?;
    rustix::process::waitid(WaitId::PidFd(pidfd.as_fd()), WaitIdOptions::EXITED)
        .at(Syscall::Clone, Path::new("user"))?;
    made
}

fn write_remap(pidfd: &OwnedFd, remap: Remap) -> Result<OwnedFd, ApplyError> {
    // Read the pid that the host's `/proc` uses, which differs from the pid in this pid namespace.
    let info = PathBuf::from(format!("/proc/self/fdinfo/{}", std::os::fd::AsRawFd::as_raw_fd(pidfd)));
    let text = fs::read_to_string(&info).at(Syscall::Open, &info)?;
    let number = text.lines().find_map(|l| l.strip_prefix("Pid:")).map(str::trim);
    let number = number.ok_or(ApplyError::Wrong { at: info, why: "there is no number in it" })?;
    let proc = Path::new("/proc").join(number);
    write_existing(&proc.join("uid_map"), remap.uid_line().as_bytes())?;
    write_existing(&proc.join("gid_map"), remap.gid_line().as_bytes())?;
    let at = proc.join("ns/user");
    rustix::fs::open(&at, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).at(Syscall::Open, &at)
}

/// Mounts a tmpfs on a directory for the launcher itself.
pub fn mount_tmpfs(at: &Path, bytes: u64, inodes: u64) -> Result<(), ApplyError> {
    let (bytes, inodes) = (bytes.to_string(), inodes.to_string());
    let options = [("size", Some(bytes.as_str())), ("nr_inodes", Some(inodes.as_str())), ("mode", Some("0755"))];
    let mount = detached("tmpfs", &options, sys::NOSUID | sys::NODEV)?;
    attach(&mount, &open_dir(at)?, at)
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

fn open_dir(path: &Path) -> Result<OwnedFd, ApplyError> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    rustix::fs::open(path, flags, Mode::empty()).at(Syscall::Open, path)
}

/// Creates a file system that is attached nowhere.
fn detached(kind: &str, options: &[(&str, Option<&str>)], attributes: u64) -> Result<OwnedFd, ApplyError> {
    let at = Path::new(kind);
    let fs = rustix::mount::fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC).at(Syscall::Fsopen, at)?;
    for (key, value) in options {
        let set = match value {
            Some(value) => rustix::mount::fsconfig_set_string(&fs, *key, *value),
            None => rustix::mount::fsconfig_set_flag(&fs, *key),
        };
        set.at(Syscall::Fsconfig, Path::new(key))?;
    }
    rustix::mount::fsconfig_create(&fs).at(Syscall::Fsconfig, at)?;
    let attributes = MountAttrFlags::from_bits_retain(attributes as u32);
    rustix::mount::fsmount(&fs, FsMountFlags::FSMOUNT_CLOEXEC, attributes).at(Syscall::Fsmount, at)
}

/// Creates a detached copy of the mount at `path`.
fn copy_of(dir: BorrowedFd<'_>, path: &Path, shown: &Path, flags: OpenTreeFlags) -> Result<OwnedFd, ApplyError> {
    let flags = flags | OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    rustix::mount::open_tree(dir, path, flags).at(Syscall::OpenTree, shown)
}

fn attach(mount: &OwnedFd, target: &OwnedFd, shown: &Path) -> Result<(), ApplyError> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    rustix::mount::move_mount(mount, "", target, "", flags).at(Syscall::MoveMount, shown)
}

fn check_device(fd: &OwnedFd, number: (u32, u32), at: &Path) -> Result<(), ApplyError> {
    let found = rustix::fs::fstat(fd).at(Syscall::Stat, at)?;
    let is_char = FileType::from_raw_mode(found.st_mode) == FileType::CharacterDevice;
    if !is_char || (rustix::fs::major(found.st_rdev), rustix::fs::minor(found.st_rdev)) != number {
        return Err(ApplyError::Wrong { at: at.to_owned(), why: "another device than its name says" });
    }
    Ok(())
}

pub(crate) fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        text = format!("{text}: {source}");
        next = source.source();
    }
    text
}
