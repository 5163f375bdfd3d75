//! This module defines the steps of a plan.

use std::fmt;
use std::net::SocketAddrV4;
use std::path::PathBuf;

use crate::confine::ConfineStep;
use crate::ids::IdMap;
use crate::spec::{FileSpec, SharedVolumeSpec, Volume};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Op {
    /// Writes the process into a v1 cgroup.
    JoinCgroup(PathBuf),
    /// Applies a step that changes only the process itself.
    Confine(ConfineStep),
    /// Resets scheduling and memory-killer settings that the operator may have given to the server: a negative nice
    /// value, real-time scheduling, protection from the memory killer.
    OrdinaryPriority,
    /// Unshares the cgroup namespace. This happens after the process has joined its cgroup, which then is the root of
    /// the namespace, so that no name of ours is visible inside.
    CgroupNamespace,
    /// Binds the guest's socket in the sandbox's directory, from the sandbox's network namespace.
    Listen(PathBuf),
    /// Listens in the sandbox's network namespace and passes the socket to the launcher: connections are accepted
    /// outside of the sandbox.
    Egress(SocketAddrV4),
    /// Makes the mounts of the new namespace private, so that none of ours reaches the host.
    PrivateMounts,
    /// Mounts the tmpfs that becomes the root of the sandbox.
    NewRoot { at: PathBuf, bytes: u64, inodes: u64 },
    /// Creates a directory.
    Dir { path: PathBuf, mode: u32 },
    /// Creates a symlink.
    Symlink { path: PathBuf, target: PathBuf },
    /// Writes a file.
    File(FileSpec),
    /// Shows the host's files at the path on inodes that belong to the sandbox alone.
    Layer(PathBuf),
    /// Unmounts the overlays, which stay alive through what is shown of them.
    HideLayers,
    /// Binds the host's own inodes at the path.
    BindReadOnly(PathBuf),
    /// Shows a new device node, or the host's if none can be created.
    Device { path: PathBuf, number: (u32, u32) },
    /// Mounts a separate instance of the pseudo-terminals.
    Devpts { path: PathBuf, max: u32 },
    /// Mounts a tmpfs of a fixed size.
    Tmpfs { path: PathBuf, bytes: u64, inodes: u64 },
    /// Mounts `/proc` of the sandbox's pid namespace.
    Proc(PathBuf),
    /// Covers a file in `/proc` with `/dev/null`.
    MaskFile(PathBuf),
    /// Covers a directory in `/proc` with an empty one.
    MaskDir(PathBuf),
    /// Covers a file in `/proc` with one of ours.
    ProcFile(FileSpec),
    /// Covers the boot id with a random one, different in each sandbox.
    BootId(PathBuf),
    /// Makes a mount read-only.
    ReadOnly(PathBuf),
    /// Mounts the volume on a directory that `HideVolume` removes later.
    Volume(Volume),
    /// Shows a directory of the volume at `path`.
    VolumeDir { path: PathBuf, mode: u32 },
    /// Removes the directory on which the volume was mounted.
    HideVolume,
    /// Changes the owner of a directory of the volume to the sandbox's ids.
    VolumeOwner { path: PathBuf, owner: u32, group: u32 },
    /// Creates a directory below one of the volume's, once that one belongs to the sandbox.
    SharedDir { path: PathBuf, mode: u32, owner: u32, group: u32 },
    /// Mounts a kept image, copied from the template if there is one, on a directory that `HideKept` removes later. The
    /// image stays locked until it is unmounted.
    KeptImage { template: Option<PathBuf>, image: PathBuf },
    /// Shows the single directory of the kept image at `path`, with its files mapped to `owner`. It gets this mode, and
    /// these directories below it are created if they do not exist and nothing is in their way.
    KeptDir { path: PathBuf, owner: u32, mode: Option<u32>, below: Vec<PathBuf> },
    /// Creates a directory on a kept volume in memory if it does not exist and nothing is in its way.
    KeptPoint { path: PathBuf, owner: u32 },
    /// Shows a directory of a volume at a second path.
    ShowAt { from: PathBuf, path: PathBuf },
    /// Removes the directory on which the kept image was mounted.
    HideKept,
    /// Shows a kept image that is still mounted from its last use.
    KeptMounted(PathBuf),
    /// Passes a second mount of the kept volume to the launcher, which may park the volume for the next sandbox.
    HoldKept(PathBuf),
    /// Binds a kept volume in memory, which the launcher has mounted at `at`.
    KeptBind { at: PathBuf, path: PathBuf, owner: u32 },
    /// Shows a directory of the host. With an `owner`, files of the directory's owner appear as files of `owner`. It is
    /// left out if its place on a kept workspace is not a directory.
    Share { shared: SharedVolumeSpec, owner: Option<u32> },
    /// Shows the directory for packages in this workspace of the host in the same way, after creating it if it does not
    /// exist. It is left out if code has replaced it.
    SharePackages { workspace: PathBuf, shared: SharedVolumeSpec, owner: Option<u32> },
    /// Makes the new root the root of the process and detaches the old one.
    PivotRoot,
    /// Makes the root itself read-only.
    SealRoot,
    /// Sets the host name in the sandbox's uts namespace.
    Hostname(String),
    /// Limits what the sandbox's sockets may hold, and turns on the loopback interface.
    LoopbackUp,
    /// Creates the user namespace as the sandbox's host uid, not as root. The Linux kernel charges its per-user
    /// counters (inotify, pending signals, locked memory) to the creator as well, so one sandbox could otherwise
    /// exhaust root's limits. The launcher writes the maps.
    UserNamespace(IdMap),
    /// Forbids namespaces below this one and limits the sandbox to a share of the per-user counters.
    UserLimits,
    /// Has the Linux kernel kill the process when the launcher ends.
    DieWithLauncher,
    /// Arranges the descriptors: 0 and 1 are `/dev/null`, 2 is the launcher's log, 3 is the listening socket, and 4 is
    /// the channel from which forked kernels arrive. All others are closed.
    Descriptors,
    /// Executes the guest.
    Exec,
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::JoinCgroup(tasks) => write!(f, "join {}", tasks.display()),
            Self::Confine(step) => write!(f, "{step}"),
            Self::OrdinaryPriority => write!(f, "ordinary priority"),
            Self::CgroupNamespace => write!(f, "unshare cgroup"),
            Self::Listen(dir) => write!(f, "listen {}/guest.sock", dir.display()),
            Self::Egress(address) => write!(f, "listen {address}, hand out"),
            Self::PrivateMounts => write!(f, "private mounts"),
            Self::NewRoot { at, bytes, inodes } => {
                write!(f, "root tmpfs {bytes} bytes {inodes} inodes on {}", at.display())
            }
            Self::Dir { path, mode } => write!(f, "dir {} {mode:o}", path.display()),
            Self::Symlink { path, target } => write!(f, "symlink {} -> {}", path.display(), target.display()),
            Self::File(FileSpec { path, content }) => write!(f, "file {} {content:?}", path.display()),
            Self::Layer(path) => write!(f, "layer {} ro,nosuid,nodev", path.display()),
            Self::HideLayers => write!(f, "hide layers"),
            Self::BindReadOnly(path) => write!(f, "bind {} ro,nosuid,nodev", path.display()),
            Self::Device { path, number: (major, minor) } => write!(f, "device {} {major}:{minor}", path.display()),
            Self::Devpts { path, max } => write!(f, "devpts {} max {max}", path.display()),
            Self::Tmpfs { path, bytes, inodes } => write!(f, "tmpfs {} {bytes} bytes {inodes} inodes", path.display()),
            Self::Proc(path) => write!(f, "proc {}", path.display()),
            Self::MaskFile(path) => write!(f, "mask file {}", path.display()),
            Self::MaskDir(path) => write!(f, "mask dir {}", path.display()),
            Self::ProcFile(FileSpec { path, content }) => write!(f, "file over {} {content:?}", path.display()),
            Self::BootId(path) => write!(f, "boot id over {}", path.display()),
            Self::ReadOnly(path) => write!(f, "read-only {}", path.display()),
            Self::Volume(Volume::Ext4 { template, image }) => {
                write!(f, "volume ext4 {} from {}", image.display(), template.display())
            }
            Self::Volume(Volume::Tmpfs { bytes, inodes }) => {
                write!(f, "volume tmpfs {bytes} bytes {inodes} inodes")
            }
            Self::VolumeDir { path, mode } => write!(f, "volume dir {} {mode:o}", path.display()),
            Self::HideVolume => write!(f, "hide volume"),
            Self::VolumeOwner { path, owner, group } => {
                write!(f, "volume dir {} owner {owner}", path.display())?;
                if group == owner { Ok(()) } else { write!(f, ":{group}") }
            }
            Self::SharedDir { path, mode, owner, group } => {
                write!(f, "dir {} {mode:o} owner {owner}:{group}", path.display())
            }
            Self::KeptImage { template, image } => {
                write!(f, "kept ext4 {}", image.display())?;
                template.iter().try_for_each(|t| write!(f, " from {}", t.display()))
            }
            Self::KeptDir { path, owner, mode, below } => {
                write!(f, "kept dir {} shown as {owner}", path.display())?;
                mode.iter().try_for_each(|mode| write!(f, " mode {mode:o}"))?;
                below.iter().try_for_each(|dir| write!(f, " with {}", dir.display()))
            }
            Self::KeptPoint { path, owner } => write!(f, "kept dir {} owner {owner}", path.display()),
            Self::ShowAt { from, path } => write!(f, "show {} at {}", from.display(), path.display()),
            Self::HideKept => write!(f, "hide kept"),
            Self::KeptMounted(path) => write!(f, "kept, still mounted, on {}", path.display()),
            Self::HoldKept(path) => write!(f, "hold {}", path.display()),
            Self::KeptBind { at, path, owner } => {
                write!(f, "kept {} on {} owner {owner}", at.display(), path.display())
            }
            Self::Share { shared: SharedVolumeSpec { host, inside, read_only }, owner }
            | Self::SharePackages { shared: SharedVolumeSpec { host, inside, read_only }, owner, .. } => {
                let created = if matches!(self, Self::Share { .. }) { "" } else { "created " };
                let access = if *read_only { "ro" } else { "rw" };
                write!(f, "share {created}{} on {} {access},nosuid,nodev", host.display(), inside.display())?;
                owner.iter().try_for_each(|owner| write!(f, " shown as {owner}"))
            }
            Self::PivotRoot => write!(f, "pivot root"),
            Self::SealRoot => write!(f, "root read-only"),
            Self::Hostname(name) => write!(f, "hostname {name}"),
            Self::LoopbackUp => write!(f, "loopback up"),
            Self::UserNamespace(map) => {
                write!(f, "unshare user as {}, map {}", map.outer(), map.lines().replace('\n', ", "))
            }
            Self::UserLimits => write!(f, "user limits"),
            Self::DieWithLauncher => write!(f, "die with launcher"),
            Self::Descriptors => write!(f, "descriptors 0 1 2 3 4"),
            Self::Exec => write!(f, "exec guest"),
        }
    }
}
