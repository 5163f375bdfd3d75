//! The list of steps that creates a sandbox. The list can be printed and compared; one loop applies it
//! ([`crate::apply`]).
//!
//! A plan is a pure function of the specification. The order of the steps is essential: first a process that is root in
//! the launcher's user namespace sets up mounts and network; then it enters the sandbox's user namespace, in which not
//! even all capabilities give access to either; then it gives up all privileges; the guest is executed last.

use std::collections::BTreeSet;
use std::fmt;
use std::net::SocketAddrV4;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::confine::ConfineStep;
use crate::ids::{BROWSER, INSIDE, IdMap};
use crate::interfaces;
use crate::seccomp::Profile;
use crate::spec::{Content, FileSpec, JailSpec, KeptVolumeSpec, SharedVolumeSpec, Volume};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    /// Writes the process into a v1 cgroup.
    JoinCgroup {
        tasks: PathBuf,
    },
    /// Applies a step that changes only the process itself.
    Own(ConfineStep),
    /// Resets scheduling and memory-killer settings that the operator may have given to the server: a negative nice
    /// value, real-time scheduling, protection from the memory killer.
    OrdinaryPriority,
    /// Unshares the cgroup namespace. This happens after the process has joined its cgroup, which then is the root of
    /// the namespace, so that no name of ours is visible inside.
    CgroupNamespace,
    /// Binds the guest's socket in the sandbox's directory, from the sandbox's network namespace.
    Listen {
        dir: PathBuf,
    },
    /// Listens in the sandbox's network namespace and passes the socket to the launcher: connections are accepted
    /// outside of the sandbox.
    Egress {
        address: SocketAddrV4,
    },
    PrivateMounts,
    NewRoot {
        at: PathBuf,
        bytes: u64,
        inodes: u64,
    },
    Dir {
        path: PathBuf,
        mode: u32,
    },
    Symlink {
        path: PathBuf,
        target: PathBuf,
    },
    File {
        path: PathBuf,
        content: Content,
    },
    /// Shows the host's files at the path on inodes that belong to the sandbox alone.
    Layer {
        path: PathBuf,
    },
    HideLayers,
    /// Binds the host's own inodes at the path.
    BindReadOnly {
        path: PathBuf,
    },
    Device {
        path: PathBuf,
        number: (u32, u32),
    },
    Devpts {
        path: PathBuf,
        max: u32,
    },
    Tmpfs {
        path: PathBuf,
        bytes: u64,
        inodes: u64,
    },
    Proc {
        path: PathBuf,
    },
    MaskFile {
        path: PathBuf,
    },
    MaskDir {
        path: PathBuf,
    },
    /// Covers a file in `/proc` with one of ours.
    ProcFile {
        path: PathBuf,
        content: Content,
    },
    /// Covers the boot id with a random one, different in each sandbox.
    BootId {
        path: PathBuf,
    },
    ReadOnly {
        path: PathBuf,
    },
    /// Mounts the volume on a directory that `HideVolume` removes later.
    Volume {
        volume: Volume,
    },
    /// Shows a directory of the volume at `path`.
    VolumeDir {
        path: PathBuf,
        mode: u32,
    },
    HideVolume,
    /// Changes the owner of a directory of the volume to the sandbox's ids.
    VolumeOwner {
        path: PathBuf,
        owner: u32,
        group: u32,
    },
    /// Creates a directory below one of the volume's, once that one belongs to the sandbox.
    SharedDir {
        path: PathBuf,
        mode: u32,
        owner: u32,
        group: u32,
    },
    /// Mounts a kept image, copied from the template if there is one, on a directory that `HideKept` removes later. The
    /// image stays locked until it is unmounted.
    KeptImage {
        template: Option<PathBuf>,
        image: PathBuf,
    },
    /// Shows the single directory of the kept image at `path`, with its files mapped to `owner`.
    KeptDir {
        path: PathBuf,
        owner: u32,
    },
    HideKept,
    /// Shows a kept image that is still mounted from its last use.
    KeptMounted {
        path: PathBuf,
    },
    /// Passes a second mount of the kept volume to the launcher, which may park the volume for the next sandbox.
    HoldKept {
        path: PathBuf,
    },
    /// Binds a kept volume in memory, which the launcher has mounted at `at`.
    KeptBind {
        at: PathBuf,
        path: PathBuf,
        owner: u32,
    },
    /// Shows a directory of the host. With an `owner`, files of the directory's owner appear as files of `owner`.
    Share {
        shared: SharedVolumeSpec,
        owner: Option<u32>,
    },
    PivotRoot,
    SealRoot,
    Hostname {
        name: String,
    },
    LoopbackUp,
    /// Creates the user namespace as the sandbox's host uid, not as root. The Linux kernel charges its per-user
    /// counters (inotify, pending signals, locked memory) to the creator as well, so one sandbox could otherwise
    /// exhaust root's limits. The launcher writes the maps.
    UserNamespace {
        map: IdMap,
    },
    /// Forbids namespaces below this one and limits the sandbox to a share of the per-user counters.
    UserLimits,
    DieWithLauncher,
    /// Arranges the descriptors: 0 and 1 are `/dev/null`, 2 is the launcher's log, 3 is the listening socket, and 4 is
    /// the channel from which forked kernels arrive. All others are closed.
    Descriptors,
    Exec,
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::JoinCgroup { tasks } => write!(f, "join {}", tasks.display()),
            Self::Own(own) => write!(f, "{own}"),
            Self::OrdinaryPriority => write!(f, "ordinary priority"),
            Self::CgroupNamespace => write!(f, "unshare cgroup"),
            Self::Listen { dir } => write!(f, "listen {}/guest.sock", dir.display()),
            Self::Egress { address } => write!(f, "listen {address}, hand out"),
            Self::PrivateMounts => write!(f, "private mounts"),
            Self::NewRoot { at, bytes, inodes } => {
                write!(f, "root tmpfs {bytes} bytes {inodes} inodes on {}", at.display())
            }
            Self::Dir { path, mode } => write!(f, "dir {} {mode:o}", path.display()),
            Self::Symlink { path, target } => write!(f, "symlink {} -> {}", path.display(), target.display()),
            Self::File { path, content } => write!(f, "file {} {content:?}", path.display()),
            Self::Layer { path } => write!(f, "layer {} ro,nosuid,nodev", path.display()),
            Self::HideLayers => write!(f, "hide layers"),
            Self::BindReadOnly { path } => write!(f, "bind {} ro,nosuid,nodev", path.display()),
            Self::Device { path, number: (major, minor) } => write!(f, "device {} {major}:{minor}", path.display()),
            Self::Devpts { path, max } => write!(f, "devpts {} max {max}", path.display()),
            Self::Tmpfs { path, bytes, inodes } => write!(f, "tmpfs {} {bytes} bytes {inodes} inodes", path.display()),
            Self::Proc { path } => write!(f, "proc {}", path.display()),
            Self::MaskFile { path } => write!(f, "mask file {}", path.display()),
            Self::MaskDir { path } => write!(f, "mask dir {}", path.display()),
            Self::ProcFile { path, content } => write!(f, "file over {} {content:?}", path.display()),
            Self::BootId { path } => write!(f, "boot id over {}", path.display()),
            Self::ReadOnly { path } => write!(f, "read-only {}", path.display()),
            Self::Volume { volume: Volume::Ext4 { template, image } } => {
                write!(f, "volume ext4 {} from {}", image.display(), template.display())
            }
            Self::Volume { volume: Volume::Tmpfs { bytes, inodes } } => {
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
            Self::KeptDir { path, owner } => write!(f, "kept dir {} shown as {owner}", path.display()),
            Self::HideKept => write!(f, "hide kept"),
            Self::KeptMounted { path } => write!(f, "kept, still mounted, on {}", path.display()),
            Self::HoldKept { path } => write!(f, "hold {}", path.display()),
            Self::KeptBind { at, path, owner } => {
                write!(f, "kept {} on {} owner {owner}", at.display(), path.display())
            }
            Self::Share { shared: SharedVolumeSpec { host, inside, read_only }, owner } => {
                let access = if *read_only { "ro" } else { "rw" };
                write!(f, "share {} on {} {access},nosuid,nodev", host.display(), inside.display())?;
                owner.iter().try_for_each(|owner| write!(f, " shown as {owner}"))
            }
            Self::PivotRoot => write!(f, "pivot root"),
            Self::SealRoot => write!(f, "root read-only"),
            Self::Hostname { name } => write!(f, "hostname {name}"),
            Self::LoopbackUp => write!(f, "loopback up"),
            Self::UserNamespace { map } => {
                write!(f, "unshare user as {}, map {}", map.outer(), map.lines().replace('\n', ", "))
            }
            Self::UserLimits => write!(f, "user limits"),
            Self::DieWithLauncher => write!(f, "die with launcher"),
            Self::Descriptors => write!(f, "descriptors 0 1 2 3 4"),
            Self::Exec => write!(f, "exec guest"),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    pub ops: Vec<Op>,
    /// Range of the steps that are the same for every sandbox of a kind: root, volume, devices, network. They can be
    /// applied in advance ([`crate::spare`]).
    pub base: Range<usize>,
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |step: &usize| if self.base.contains(step) { "  " } else { "" };
        self.ops.iter().enumerate().try_for_each(|(step, op)| writeln!(f, "{}{op}", shown(&step)))
    }
}

const DEVICES: &[(&str, (u32, u32))] =
    &[("null", (1, 3)), ("zero", (1, 5)), ("full", (1, 7)), ("random", (1, 8)), ("urandom", (1, 9))];

/// The directory that can be on a kept volume.
const DATA: &str = "/data";

const SHM_INODES: u64 = 10_000;

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Returns the files of the sandbox's `/etc`. The host's files would disclose its users and its network, and the names
/// in them stand for other ids.
fn etc(spec: &JailSpec) -> Vec<(PathBuf, Content)> {
    let hostname = &spec.hostname;
    let (mut passwd, mut group) = (String::new(), String::new());
    let browser = (spec.map.browser() == BROWSER).then_some(("browser", BROWSER, "/browser", "/bin/false"));
    for (name, id, home, shell) in [("sandbox", INSIDE, "/workspace", "/bin/sh")].into_iter().chain(browser) {
        passwd.push_str(&format!("{name}:x:{id}:{id}:{name}:{home}:{shell}\n"));
        group.push_str(&format!("{name}:x:{id}:\n"));
    }
    let text = [
        ("passwd", passwd + "nobody:x:65534:65534:nobody:/:/bin/false\n"),
        ("group", group + "nogroup:x:65534:\n"),
        ("hosts", format!("127.0.0.1 localhost {hostname}\n::1 localhost\n")),
        ("hostname", format!("{hostname}\n")),
        ("resolv.conf", String::new()),
        ("nsswitch.conf", "passwd: files\ngroup: files\nhosts: files\nservices: files\nprotocols: files\n".into()),
        ("ld.so.preload", format!("{}\n", interfaces::PATH)),
    ];
    let text = text.into_iter().map(|(name, text)| (Path::new("/etc").join(name), Content::Text(text)));
    let library = Content::Bytes(interfaces::library(spec.host.ipv6));
    text.chain([(interfaces::PATH.into(), library)]).collect()
}

/// Returns the steps of one sandbox, in order.
pub fn plan(spec: &JailSpec) -> Plan {
    let mut steps = Steps::default();
    steps.ops.extend(spec.cgroup_tasks.iter().map(|tasks| Op::JoinCgroup { tasks: tasks.clone() }));
    steps.ops.extend([Op::Own(ConfineStep::Session), Op::OrdinaryPriority, Op::CgroupNamespace, Op::PrivateMounts]);
    let base = steps.ops.len();
    let (bytes, inodes) = root_size(spec);
    steps.ops.push(Op::NewRoot { at: spec.mount_point.clone(), bytes, inodes });
    system(spec, &mut steps);
    volume(spec, &mut steps);
    runtime(spec, &mut steps);
    dev(spec, &mut steps);
    steps.ops.push(Op::HideLayers);
    steps.dir(Path::new("/proc"));
    spec.shared.iter().for_each(|shared| steps.dir(&shared.inside));
    steps.ops.push(Op::LoopbackUp);
    let base = base..steps.ops.len();
    steps.ops.push(Op::Listen { dir: spec.dir.clone() });
    steps.ops.extend(spec.egress.map(|address| Op::Egress { address }));
    owned(spec, &mut steps);
    proc(spec, &mut steps);
    steps.ops.extend([Op::PivotRoot, Op::SealRoot, Op::Hostname { name: spec.hostname.clone() }]);
    give_up(spec, &mut steps);
    Plan { ops: steps.ops, base }
}

/// Returns the steps of the warm interpreter: a root like a sandbox's, in which no file of the host can be written. The
/// interpreter keeps the launcher's privileges, which it needs to enter sandboxes.
pub fn warm(spec: &JailSpec) -> Plan {
    let mut steps = Steps::default();
    let (bytes, inodes) = root_size(spec);
    steps.ops.extend([Op::Own(ConfineStep::Session), Op::OrdinaryPriority, Op::PrivateMounts]);
    steps.ops.push(Op::NewRoot { at: spec.mount_point.clone(), bytes, inodes });
    system(spec, &mut steps);
    steps.dir(Path::new("/tmp"));
    steps.ops.push(Op::Tmpfs { path: "/tmp".into(), bytes: spec.shm_bytes, inodes: SHM_INODES });
    runtime(spec, &mut steps);
    devices(&mut steps);
    steps.ops.push(Op::HideLayers);
    // The interpreter is in the launcher's pid namespace, so it needs the `/proc` of that namespace.
    steps.ops.push(Op::BindReadOnly { path: "/proc".into() });
    steps.ops.extend([Op::PivotRoot, Op::SealRoot, Op::Own(ConfineStep::SessionKeyring), Op::DieWithLauncher]);
    Plan { ops: steps.ops, base: 0..0 }
}

/// The steps, and the directories that they have created so far.
#[derive(Default)]
struct Steps {
    ops: Vec<Op>,
    dirs: BTreeSet<PathBuf>,
}

impl Steps {
    /// Creates the directory and its parents, each once.
    fn dir(&mut self, path: &Path) {
        let Some(parent) = path.parent() else { return };
        self.dir(parent);
        if self.dirs.insert(path.to_owned()) {
            self.ops.push(Op::Dir { path: path.to_owned(), mode: 0o755 });
        }
    }

    /// Adds a step that creates a file at `path`, after the file's parent directories.
    fn file(&mut self, path: &Path, op: Op) {
        if let Some(parent) = path.parent() {
            self.dir(parent);
        }
        self.ops.push(op);
    }
}

/// Returns bytes and inodes of the root file system: our files, with room for the directories and mount points around
/// them.
fn root_size(spec: &JailSpec) -> (u64, u64) {
    let content: u64 = spec.files.iter().map(|f| f.content.as_bytes().len() as u64 + 4096).sum();
    let depth = |p: &PathBuf| p.components().count() as u64;
    let inodes: u64 = spec
        .files
        .iter()
        .map(|f| &f.path)
        .chain(&spec.runtime)
        .chain(spec.shared.iter().map(|s| &s.inside))
        .map(depth)
        .sum();
    ((2 << 20) + content.next_multiple_of(4096), 256 + inodes)
}

fn system(spec: &JailSpec, steps: &mut Steps) {
    for path in &spec.host.binds {
        steps.file(path, Op::Layer { path: path.clone() });
    }
    for (path, target) in &spec.host.symlinks {
        steps.file(path, Op::Symlink { path: path.clone(), target: target.clone() });
    }
    for (path, content) in etc(spec) {
        steps.file(&path, Op::File { path: path.clone(), content });
    }
}

/// A directory of the volume: the path at which it is shown, its mode, and its owner and group.
struct VolumeDir {
    path: &'static str,
    mode: u32,
    whose: [VolumeUser; 2],
}

#[derive(Clone, Copy)]
enum VolumeUser {
    Code,
    Browser,
}

const fn own(path: &'static str, mode: u32) -> VolumeDir {
    VolumeDir { path, mode, whose: [VolumeUser::Code; 2] }
}

const VOLUME_DIRS: &[VolumeDir] = &[own("/workspace", 0o755), own(DATA, 0o755), own("/tmp", 0o1777)];

/// The directories in a sandbox with a browser, which is a different user. It gets a home, a directory from which it
/// reads what the guest gives it, and search permission on `/workspace`, so that it reaches its downloads but nothing
/// else there.
const VOLUME_DIRS_WITH_BROWSER: &[VolumeDir] = &[
    own("/workspace", 0o711),
    own(DATA, 0o700),
    own("/tmp", 0o1777),
    VolumeDir { path: "/browser", mode: 0o700, whose: [VolumeUser::Browser; 2] },
    VolumeDir { path: "/uploads", mode: 0o750, whose: [VolumeUser::Code, VolumeUser::Browser] },
];

/// Downloads directory of the browser. The code owns it, so that it can delete the files that the browser left there.
const DOWNLOADS: (&str, u32) = ("/workspace/downloads", 0o770);

fn volume_dirs(spec: &JailSpec) -> impl Iterator<Item = &'static VolumeDir> {
    if spec.browser.is_some() { VOLUME_DIRS_WITH_BROWSER } else { VOLUME_DIRS }.iter()
}

/// Returns the directories that are on the volume of the sandbox, not on a kept volume.
fn on_volume(spec: &JailSpec) -> impl Iterator<Item = &'static VolumeDir> {
    volume_dirs(spec).filter(|dir| dir.path != DATA || spec.kept.is_none())
}

fn volume(spec: &JailSpec, steps: &mut Steps) {
    steps.ops.push(Op::Volume { volume: spec.volume.clone() });
    volume_dirs(spec).for_each(|dir| steps.dir(Path::new(dir.path)));
    steps.ops.extend(on_volume(spec).map(|dir| Op::VolumeDir { path: dir.path.into(), mode: dir.mode }));
    steps.ops.push(Op::HideVolume);
}

/// Adds the steps whose result belongs to this sandbox alone and cannot be prepared in advance.
fn owned(spec: &JailSpec, steps: &mut Steps) {
    let owner = spec.map.outer();
    let outer = |whose| match whose {
        VolumeUser::Code => owner,
        VolumeUser::Browser => spec.map.outer_browser(),
    };
    for VolumeDir { path, whose, .. } in on_volume(spec) {
        let [owner, group] = whose.map(outer);
        steps.ops.push(Op::VolumeOwner { path: path.into(), owner, group });
    }
    if spec.browser.is_some() {
        let (path, mode) = DOWNLOADS;
        steps.ops.push(Op::SharedDir { path: path.into(), mode, owner, group: spec.map.outer_browser() });
    }
    match spec.kept.clone() {
        Some(KeptVolumeSpec::Ext4 { template, image }) => {
            let dir = Op::KeptDir { path: DATA.into(), owner };
            let hold = Op::HoldKept { path: DATA.into() };
            steps.ops.extend([Op::KeptImage { template, image }, dir, Op::HideKept, hold]);
        }
        Some(KeptVolumeSpec::Mounted { .. }) => {
            steps.ops.extend([Op::KeptMounted { path: DATA.into() }, Op::HoldKept { path: DATA.into() }]);
        }
        Some(KeptVolumeSpec::Held { at }) => steps.ops.push(Op::KeptBind { at, path: DATA.into(), owner }),
        None => {}
    }
    let share = |shared: &SharedVolumeSpec| Op::Share { shared: shared.clone(), owner: spec.map.remapped() };
    steps.ops.extend(spec.shared.iter().map(share));
}

/// Shows the runtimes and our files. This follows the volume, because a runtime may be below `/tmp`.
fn runtime(spec: &JailSpec, steps: &mut Steps) {
    for path in shown_runtime(spec) {
        steps.file(path, Op::Layer { path: path.clone() });
    }
    for file in &spec.files {
        steps.file(&file.path, Op::File { path: file.path.clone(), content: file.content.clone() });
    }
}

/// Returns the runtime paths that no other bind shows already, parents before the paths below them.
fn shown_runtime(spec: &JailSpec) -> Vec<&PathBuf> {
    let mut shown: Vec<&PathBuf> = Vec::new();
    let sorted: BTreeSet<&PathBuf> = spec.runtime.iter().collect();
    for path in sorted {
        if !spec.host.shows(path) && !shown.iter().any(|s| path.starts_with(s)) {
            shown.push(path);
        }
    }
    shown
}

fn devices(steps: &mut Steps) {
    for (name, number) in DEVICES {
        let path = Path::new("/dev").join(name);
        steps.file(&path, Op::Device { path: path.clone(), number: *number });
    }
}

fn dev(spec: &JailSpec, steps: &mut Steps) {
    devices(steps);
    for (name, target) in [
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ] {
        steps.ops.push(Op::Symlink { path: Path::new("/dev").join(name), target: target.into() });
    }
    steps.dir(Path::new("/dev/pts"));
    steps.ops.push(Op::Devpts { path: "/dev/pts".into(), max: spec.host.ptys });
    steps.ops.push(Op::Symlink { path: "/dev/ptmx".into(), target: "pts/ptmx".into() });
    steps.dir(Path::new("/dev/shm"));
    steps.ops.push(Op::Tmpfs { path: "/dev/shm".into(), bytes: spec.shm_bytes, inodes: SHM_INODES });
}

fn proc(spec: &JailSpec, steps: &mut Steps) {
    steps.ops.push(Op::Proc { path: "/proc".into() });
    steps.ops.extend(spec.host.masked_files.iter().map(|path| Op::MaskFile { path: path.clone() }));
    steps.ops.extend(spec.host.masked_dirs.iter().map(|path| Op::MaskDir { path: path.clone() }));
    steps.ops.extend(spec.host.read_only.iter().map(|path| Op::ReadOnly { path: path.clone() }));
    // This comes last because these files are mounted over the entries that are visible after the steps above.
    let over = |file: &FileSpec| Op::ProcFile { path: file.path.clone(), content: file.content.clone() };
    steps.ops.extend(spec.host.proc_files.iter().map(over));
    steps.ops.push(Op::BootId { path: BOOT_ID.into() });
}

fn give_up(spec: &JailSpec, steps: &mut Steps) {
    steps.ops.extend([Op::UserNamespace { map: spec.map }, Op::UserLimits]);
    steps.ops.extend(identity(spec, INSIDE).map(Op::Own));
    // Ids change before the death signal is set: the Linux kernel clears the signal when ids change.
    if spec.die_with_launcher {
        steps.ops.push(Op::DieWithLauncher);
    }
    let limits = ConfineStep::Rlimits { processes: spec.processes };
    steps.ops.extend([Op::Own(limits), Op::Descriptors, Op::Own(ConfineStep::NotDumpable)]);
    steps.ops.extend(confinement(spec).map(Op::Own));
    steps.ops.push(Op::Exec);
}

/// Returns the steps by which a process confines itself before it forks a kernel into the finished sandbox. They are
/// the steps of the guest in the same order. `NotDumpable` follows the change of ids, which undoes it on a host with
/// `fs.suid_dumpable = 1`.
pub fn entry(spec: &JailSpec) -> Vec<ConfineStep> {
    let own = [ConfineStep::Rlimits { processes: spec.processes }, ConfineStep::NotDumpable];
    identity(spec, INSIDE).chain(own).chain(confinement(spec)).collect()
}

/// The steps of a kernel once it is inside and confined. Unlike the guest it may be inspected by code in the sandbox,
/// because that code is going to run in it.
pub const ARRIVAL: [ConfineStep; 2] = [ConfineStep::Dumpable, ConfineStep::OfferToOomKiller];

/// Returns the steps of [`entry`] for the browser driver: another user with fewer rights.
pub fn browser_entry(spec: &JailSpec) -> Option<Vec<ConfineStep>> {
    // Processes with the code's uid are counted together with the code.
    let processes = if spec.map.browser() == BROWSER { spec.browser?.processes } else { spec.processes };
    let own = [ConfineStep::Rlimits { processes }, ConfineStep::NotDumpable];
    spec.browser?;
    let landlock = ConfineStep::BrowserLandlock { run: readable(spec) };
    Some(identity(spec, spec.map.browser()).chain(own).chain(confined(landlock, Profile::Browser)).collect())
}

fn identity(spec: &JailSpec, id: u32) -> impl Iterator<Item = ConfineStep> {
    let groups = spec.map.may_set_groups().then_some(ConfineStep::DropGroups);
    groups.into_iter().chain([ConfineStep::SetIds { id }, ConfineStep::SessionKeyring])
}

fn confinement(spec: &JailSpec) -> impl Iterator<Item = ConfineStep> {
    let shared = |read_only| spec.shared.iter().filter(move |s| s.read_only == read_only).map(|s| s.inside.clone());
    let run = readable(spec).into_iter().chain(shared(true)).collect();
    // The guest writes the files that the browser uploads.
    let uploads = spec.browser.map(|_| PathBuf::from("/uploads"));
    let write = shared(false).chain(uploads).collect();
    confined(ConfineStep::Landlock { run, write }, Profile::Code)
}

fn confined(landlock: ConfineStep, profile: Profile) -> impl Iterator<Item = ConfineStep> {
    [ConfineStep::DropCapabilities, ConfineStep::NoNewPrivileges, landlock, ConfineStep::Seccomp { profile }]
        .into_iter()
}

/// Returns the paths that can be read and executed: the system, the runtimes, and our files.
fn readable(spec: &JailSpec) -> Vec<PathBuf> {
    let system = spec.host.binds.iter().filter(|p| !p.starts_with("/etc")).cloned();
    let runtime = shown_runtime(spec).into_iter().cloned();
    let files = spec.files.iter().map(|f| f.path.clone());
    let paths: BTreeSet<PathBuf> = system.chain([PathBuf::from("/etc")]).chain(runtime).chain(files).collect();
    paths.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Mode;
    use crate::spec::{BrowserJail, Host};

    fn spec(mode: Mode) -> JailSpec {
        let paths = |list: &[&str]| list.iter().map(PathBuf::from).collect();
        let dir = PathBuf::from("/state/instances/i/s");
        JailSpec {
            hostname: "sandbox".into(),
            map: IdMap::new(mode, 7, 100, 1001).unwrap(),
            host: Host {
                binds: paths(&["/usr", "/etc/ld.so.cache", "/etc/ssl/certs"]),
                symlinks: vec![("/bin".into(), "usr/bin".into()), ("/lib".into(), "usr/lib".into())],
                masked_files: paths(&["/proc/kcore", "/proc/keys"]),
                masked_dirs: paths(&["/proc/acpi"]),
                proc_files: vec![FileSpec { path: "/proc/vmstat".into(), content: Content::Text("pswpin 0\n".into()) }],
                read_only: paths(&["/proc/sys"]),
                ipv6: true,
                ptys: 8,
            },
            runtime: paths(&["/home/u/rt/node/bin", "/home/u/rt/node", "/usr/lib/python3", "/bin/sh", "/tmp/rt"]),
            files: vec![FileSpec { path: "/opt/sandpool/driver.py".into(), content: Content::Text("pass".into()) }],
            volume: match mode {
                Mode::Root => {
                    Volume::Ext4 { template: "/state/templates/ext4-1.img".into(), image: dir.join("volume.img") }
                }
                Mode::Sub | Mode::Single => Volume::Tmpfs { bytes: 64 << 20, inodes: 1000 },
            },
            kept: None,
            shared: vec![],
            browser: None,
            egress: None,
            shm_bytes: 32 << 20,
            cgroup_tasks: if mode == Mode::Root {
                paths(&["/sys/fs/cgroup/pids/sandpool-t/g/s/tasks"])
            } else {
                vec![]
            },
            processes: if mode == Mode::Root { None } else { Some(64) },
            dir,
            mount_point: "/state/instances/i/root".into(),
            die_with_launcher: true,
        }
    }

    #[test]
    fn the_plan_of_each_mode_is_this_one() {
        insta::assert_snapshot!("plan_root", plan(&spec(Mode::Root)));
        insta::assert_snapshot!("plan_sub", plan(&spec(Mode::Sub)));
        insta::assert_snapshot!("plan_single", plan(&spec(Mode::Single)));
    }

    /// Returns a specification with all optional parts.
    fn with_volumes(mode: Mode) -> JailSpec {
        let spec = spec(mode);
        let share = |host: &str, inside: &str, read_only| SharedVolumeSpec {
            host: host.into(),
            inside: inside.into(),
            read_only,
        };
        let kept = match mode {
            Mode::Root => KeptVolumeSpec::Ext4 {
                template: Some("/state/templates/ext4-kept-1.img".into()),
                image: spec.dir.join("kept.img"),
            },
            Mode::Sub | Mode::Single => KeptVolumeSpec::Held { at: "/state/instances/i/kept/0af9".into() },
        };
        let shared = vec![share("/srv/in", "/shared/in", true), share("/srv/out", "/shared/out", false)];
        JailSpec { kept: Some(kept), shared, egress: Some("127.0.0.1:3128".parse().unwrap()), ..spec }
    }

    /// Returns the steps that differ between the plans with and without the optional parts.
    fn difference(mode: Mode) -> String {
        difference_to(mode, &with_volumes(mode))
    }

    fn difference_to(mode: Mode, with: &JailSpec) -> String {
        let lines = |spec: &JailSpec| plan(spec).to_string().lines().map(str::to_owned).collect::<Vec<_>>();
        let (without, with) = (lines(&spec(mode)), lines(with));
        let gone = without.iter().filter(|l| !with.contains(l)).map(|l| format!("- {l}"));
        let new = with.iter().filter(|l| !without.contains(l)).map(|l| format!("+ {l}"));
        gone.chain(new).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn shared_and_kept_volumes_and_a_way_out_change_the_plan_like_this() {
        insta::assert_snapshot!(difference(Mode::Root), @r"
        -   root tmpfs 2105344 bytes 281 inodes on /state/instances/i/root
        -   volume dir /data 755
        - volume dir /data owner 1879048199
        - landlock /etc /home/u/rt/node /opt/sandpool/driver.py /tmp/rt /usr
        +   root tmpfs 2105344 bytes 287 inodes on /state/instances/i/root
        +   dir /shared 755
        +   dir /shared/in 755
        +   dir /shared/out 755
        + listen 127.0.0.1:3128, hand out
        + kept ext4 /state/instances/i/s/kept.img from /state/templates/ext4-kept-1.img
        + kept dir /data shown as 1879048199
        + hide kept
        + hold /data
        + share /srv/in on /shared/in ro,nosuid,nodev shown as 1879048199
        + share /srv/out on /shared/out rw,nosuid,nodev shown as 1879048199
        + landlock /etc /home/u/rt/node /opt/sandpool/driver.py /tmp/rt /usr /shared/in write /shared/out
        ");
        insta::assert_snapshot!(difference(Mode::Sub), @r"
        -   root tmpfs 2105344 bytes 281 inodes on /state/instances/i/root
        -   volume dir /data 755
        - volume dir /data owner 8
        - landlock /etc /home/u/rt/node /opt/sandpool/driver.py /tmp/rt /usr
        +   root tmpfs 2105344 bytes 287 inodes on /state/instances/i/root
        +   dir /shared 755
        +   dir /shared/in 755
        +   dir /shared/out 755
        + listen 127.0.0.1:3128, hand out
        + kept /state/instances/i/kept/0af9 on /data owner 8
        + share /srv/in on /shared/in ro,nosuid,nodev
        + share /srv/out on /shared/out rw,nosuid,nodev
        + landlock /etc /home/u/rt/node /opt/sandpool/driver.py /tmp/rt /usr /shared/in write /shared/out
        ");
        assert_eq!(difference(Mode::Single), difference(Mode::Sub).replace("owner 8", "owner 0"));
    }

    fn with_browser(mode: Mode) -> JailSpec {
        let spec = spec(mode);
        let map = if mode == Mode::Single { spec.map } else { spec.map.with_browser(8, 100).unwrap() };
        JailSpec { map, browser: Some(BrowserJail { processes: spec.processes.map(|_| 32) }), ..spec }
    }

    #[test]
    fn room_for_a_browser_changes_the_plan_like_this() {
        insta::assert_snapshot!(difference_to(Mode::Root, &with_browser(Mode::Root)), @r"
        -   file /etc/passwd 88 bytes
        -   file /etc/group 33 bytes
        -   volume dir /workspace 755
        -   volume dir /data 755
        - unshare user as 1879048199, map 1000 1879048199 1
        - landlock /etc /home/u/rt/node /opt/sandpool/driver.py /tmp/rt /usr
        +   file /etc/passwd 136 bytes
        +   file /etc/group 49 bytes
        +   dir /browser 755
        +   dir /uploads 755
        +   volume dir /workspace 711
        +   volume dir /data 700
        +   volume dir /browser 700
        +   volume dir /uploads 750
        + volume dir /browser owner 1879048200
        + volume dir /uploads owner 1879048199:1879048200
        + dir /workspace/downloads 770 owner 1879048199:1879048200
        + unshare user as 1879048199, map 1000 1879048199 1, 1001 1879048200 1
        + landlock /etc /home/u/rt/node /opt/sandpool/driver.py /tmp/rt /usr write /uploads
        ");
        insta::assert_snapshot!(difference_to(Mode::Single, &with_browser(Mode::Single)), @r"
        -   volume dir /workspace 755
        -   volume dir /data 755
        - landlock /etc /home/u/rt/node /opt/sandpool/driver.py /tmp/rt /usr
        +   dir /browser 755
        +   dir /uploads 755
        +   volume dir /workspace 711
        +   volume dir /data 700
        +   volume dir /browser 700
        +   volume dir /uploads 750
        + volume dir /browser owner 0
        + volume dir /uploads owner 0
        + dir /workspace/downloads 770 owner 0:0
        + landlock /etc /home/u/rt/node /opt/sandpool/driver.py /tmp/rt /usr write /uploads
        ");
        let reserved = |inside: &str| {
            let shared = vec![SharedVolumeSpec { host: "/srv".into(), inside: inside.into(), read_only: true }];
            JailSpec { shared, ..with_browser(Mode::Root) }.check().is_err()
        };
        assert!(reserved("/browser") && reserved("/uploads/x") && !reserved("/browsers"));
    }

    #[test]
    fn a_browser_gives_up_what_the_guest_gave_up_and_more() {
        let steps = |mode| {
            let steps = browser_entry(&with_browser(mode)).unwrap();
            steps.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
        };
        insta::assert_snapshot!(steps(Mode::Root), @r"
        drop groups
        uid and gid 1001
        new session keyring
        rlimits
        not dumpable
        drop capabilities
        no new privileges
        landlock of a browser /etc /home/u/rt/node /opt/sandpool/driver.py /tmp/rt /usr
        seccomp of a browser
        ");
        insta::assert_snapshot!(steps(Mode::Single), @r"
        uid and gid 1000
        new session keyring
        rlimits, 64 processes
        not dumpable
        drop capabilities
        no new privileges
        landlock of a browser /etc /home/u/rt/node /opt/sandpool/driver.py /tmp/rt /usr
        seccomp of a browser
        ");
        assert_eq!(browser_entry(&spec(Mode::Root)), None);
    }

    #[test]
    fn a_shared_directory_hides_nothing_and_nothing_is_made_in_it() {
        for inside in [
            "/",
            "shared",
            "/shared/../etc",
            "/proc/x",
            "/dev/shm",
            "/data",
            "/data/x",
            "/workspace",
            "/etc/x",
            "/tmp",
            "/tmp/x",
            "/usr/local/x",
            "/bin",
            "/opt",
            "/opt/sandpool/driver.py/x",
            "/home",
            "/home/u/rt/node/x",
            "/.volume",
            "/.kept",
        ] {
            let shared = vec![SharedVolumeSpec { host: "/srv".into(), inside: inside.into(), read_only: false }];
            let spec = JailSpec { shared, ..spec(Mode::Root) };
            assert!(spec.check().is_err(), "{inside}");
        }
        let mut spec = with_volumes(Mode::Root);
        assert_eq!(spec.check(), Ok(()));
        spec.shared[1].inside = "/shared/in/deeper".into();
        assert!(spec.check().is_err());
    }

    #[test]
    fn nothing_of_the_host_is_shown_over_the_sandboxs_own_parts() {
        for path in ["/", "relative", "/usr/../etc", "/proc/sys", "/dev", "/workspace/x", "/tmp", "/etc/shadow"] {
            let spec = JailSpec { runtime: vec![path.into()], ..spec(Mode::Root) };
            assert!(spec.check().is_err(), "{path}");
        }
        assert_eq!(spec(Mode::Root).check(), Ok(()));
    }

    #[test]
    fn a_forked_kernel_gives_up_what_the_guest_gave_up_in_the_same_order() {
        // The exceptions: a kernel is in a new session from the start, and it differs in who may inspect it.
        let differs = |own: &ConfineStep| {
            matches!(
                own,
                ConfineStep::Session | ConfineStep::NotDumpable | ConfineStep::Dumpable | ConfineStep::OfferToOomKiller
            )
        };
        for mode in [Mode::Root, Mode::Sub, Mode::Single] {
            let spec = with_volumes(mode);
            let own = |op| if let Op::Own(own) = op { Some(own) } else { None };
            let guest: Vec<ConfineStep> =
                plan(&spec).ops.into_iter().filter_map(own).filter(|own| !differs(own)).collect();
            let kernel: Vec<ConfineStep> = entry(&spec).into_iter().filter(|own| !differs(own)).collect();
            assert_eq!(kernel, guest, "{mode}");
            // All of these steps are applied before the kernel is created inside; there it only becomes dumpable and a
            // target of the memory killer.
            assert_eq!(entry(&spec).last(), Some(&ConfineStep::Seccomp { profile: Profile::Code }));
            assert!(ARRIVAL.iter().all(differs));
        }
    }

    #[test]
    fn privileges_end_after_the_last_mount_and_the_guest_is_last() {
        for mode in [Mode::Root, Mode::Sub, Mode::Single] {
            let ops = plan(&with_volumes(mode)).ops;
            let user = ops.iter().position(|op| matches!(op, Op::UserNamespace { .. })).unwrap();
            let seal = ops.iter().position(|op| *op == Op::SealRoot).unwrap();
            assert!(seal < user);
            assert_eq!(ops.last(), Some(&Op::Exec));
            assert_eq!(ops[ops.len() - 2], Op::Own(ConfineStep::Seccomp { profile: Profile::Code }));
        }
    }
}
