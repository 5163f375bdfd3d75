//! This module computes the list of steps that creates a sandbox. The list can be printed and compared; one loop
//! applies it ([`crate::apply`]).
//!
//! A plan is a pure function of the specification. The order of the steps is essential: first a process that is root in
//! the launcher's user namespace sets up mounts and network; then it enters the sandbox's user namespace, in which not
//! even all capabilities give access to either; then it gives up all privileges; the guest is executed last.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::confine::ConfineStep;
use crate::ids::{BROWSER, INSIDE};
use crate::interfaces;
use crate::seccomp::Profile;
use crate::spec::{Content, DATA, FileSpec, JailSpec, KeptVolumeSpec, WORKSPACE, workspace_of};

mod op;

pub(crate) use op::Op;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plan {
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

const HOSTNAME: &str = "sandbox";

const SHM_INODES: u64 = 10_000;

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Returns the files of the sandbox's `/etc`. The host's files would disclose its users and its network, and the names
/// in them stand for other ids.
fn etc(spec: &JailSpec) -> Vec<FileSpec> {
    let (mut passwd, mut group) = (String::new(), String::new());
    let browser = (spec.map.browser() == BROWSER).then_some(("browser", BROWSER, "/browser", "/bin/false"));
    for (name, id, home, shell) in [("sandbox", INSIDE, WORKSPACE, "/bin/sh")].into_iter().chain(browser) {
        passwd.push_str(&format!("{name}:x:{id}:{id}:{name}:{home}:{shell}\n"));
        group.push_str(&format!("{name}:x:{id}:\n"));
    }
    let text = [
        ("passwd", passwd + "nobody:x:65534:65534:nobody:/:/bin/false\n"),
        ("group", group + "nogroup:x:65534:\n"),
        ("hosts", format!("127.0.0.1 localhost {HOSTNAME}\n::1 localhost\n")),
        ("hostname", format!("{HOSTNAME}\n")),
        ("resolv.conf", String::new()),
        ("nsswitch.conf", "passwd: files\ngroup: files\nhosts: files\nservices: files\nprotocols: files\n".into()),
        ("ld.so.preload", format!("{}\n", interfaces::PATH)),
    ];
    let file = |(name, text): (&str, String)| (Path::new("/etc").join(name), text.into_bytes());
    let library = (interfaces::PATH.into(), interfaces::library(spec.host.ipv6));
    text.into_iter().map(file).chain([library]).map(FileSpec::from).collect()
}

/// Returns the steps of one sandbox, in order.
pub(crate) fn plan(spec: &JailSpec) -> Plan {
    let mut steps = Steps::default();
    steps.ops.extend(spec.cgroup_tasks.iter().cloned().map(Op::JoinCgroup));
    steps.ops.extend([Op::Confine(ConfineStep::Session), Op::OrdinaryPriority, Op::CgroupNamespace, Op::PrivateMounts]);
    let base = steps.ops.len();
    let (bytes, inodes) = root_size(spec);
    steps.ops.push(Op::NewRoot { at: spec.mount_point.clone(), bytes, inodes });
    system(spec, &mut steps);
    volume(spec, &mut steps);
    runtime(spec, &mut steps);
    dev(spec, &mut steps);
    steps.ops.push(Op::HideLayers);
    steps.dir(Path::new("/proc"));
    let beside_volume = spec.shared.iter().filter(|shared| shared.on_volume().is_none());
    beside_volume.for_each(|shared| steps.dir(&shared.inside));
    steps.ops.push(Op::LoopbackUp);
    let base = base..steps.ops.len();
    steps.ops.push(Op::Listen(spec.dir.clone()));
    steps.ops.extend(spec.egress.map(Op::Egress));
    owned(spec, &mut steps);
    proc(spec, &mut steps);
    steps.ops.extend([Op::PivotRoot, Op::SealRoot, Op::Hostname(HOSTNAME.into())]);
    give_up(spec, &mut steps);
    Plan { ops: steps.ops, base }
}

/// Returns the steps of the warm interpreter: a root like a sandbox's, in which no file of the host can be written. The
/// interpreter keeps the launcher's privileges, which it needs to enter sandboxes.
pub(crate) fn warm(spec: &JailSpec) -> Plan {
    let mut steps = Steps::default();
    let (bytes, inodes) = root_size(spec);
    steps.ops.extend([Op::Confine(ConfineStep::Session), Op::OrdinaryPriority, Op::PrivateMounts]);
    steps.ops.push(Op::NewRoot { at: spec.mount_point.clone(), bytes, inodes });
    system(spec, &mut steps);
    steps.dir(Path::new("/tmp"));
    steps.ops.push(Op::Tmpfs { path: "/tmp".into(), bytes: spec.shm_bytes, inodes: SHM_INODES });
    runtime(spec, &mut steps);
    devices(&mut steps);
    steps.ops.push(Op::HideLayers);
    // The interpreter is in the launcher's pid namespace, so it needs the `/proc` of that namespace.
    steps.ops.push(Op::BindReadOnly("/proc".into()));
    steps.ops.extend([Op::PivotRoot, Op::SealRoot, Op::Confine(ConfineStep::SessionKeyring), Op::DieWithLauncher]);
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

    fn write(&mut self, file: FileSpec) {
        let path = file.path.clone();
        let op = match &file.content {
            Content::Link { to } => Op::Symlink { path: path.clone(), target: to.clone() },
            Content::Text(_) | Content::Bytes(_) => Op::File(file),
        };
        self.file(&path, op);
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
        steps.file(path, Op::Layer(path.clone()));
    }
    for (path, target) in &spec.host.symlinks {
        steps.file(path, Op::Symlink { path: path.clone(), target: target.clone() });
    }
    etc(spec).into_iter().for_each(|file| steps.write(file));
}

/// A directory of the volume: the path at which it is shown, its mode, and its owner and group.
struct VolumeDir {
    path: &'static str,
    mode: u32,
    owner_and_group: [VolumeUser; 2],
}

#[derive(Clone, Copy)]
enum VolumeUser {
    Code,
    Browser,
}

const fn code_dir(path: &'static str, mode: u32) -> VolumeDir {
    VolumeDir { path, mode, owner_and_group: [VolumeUser::Code; 2] }
}

const VOLUME_DIRS: &[VolumeDir] = &[code_dir(WORKSPACE, 0o755), code_dir(DATA, 0o755), code_dir("/tmp", 0o1777)];

/// The directories in a sandbox with a browser, which is a different user. It gets a home, a directory from which it
/// reads what the guest gives it, and search permission on `/workspace`, so that it reaches its downloads but nothing
/// else there.
const VOLUME_DIRS_WITH_BROWSER: &[VolumeDir] = &[
    code_dir(WORKSPACE, 0o711),
    code_dir(DATA, 0o700),
    code_dir("/tmp", 0o1777),
    VolumeDir { path: "/browser", mode: 0o700, owner_and_group: [VolumeUser::Browser; 2] },
    VolumeDir { path: "/uploads", mode: 0o750, owner_and_group: [VolumeUser::Code, VolumeUser::Browser] },
];

/// Mode of the downloads. The code owns the directory, so that it can delete the files that the browser left there.
const DOWNLOADS_MODE: u32 = 0o770;

fn volume_dirs(spec: &JailSpec) -> impl Iterator<Item = &'static VolumeDir> {
    if spec.browser.is_some() { VOLUME_DIRS_WITH_BROWSER } else { VOLUME_DIRS }.iter()
}

/// Returns the directories that are on the volume of the sandbox, not on a kept volume.
fn on_volume(spec: &JailSpec) -> impl Iterator<Item = &'static VolumeDir> {
    volume_dirs(spec).filter(|dir| Some(dir.path) != spec.kept_dir())
}

fn volume(spec: &JailSpec, steps: &mut Steps) {
    steps.ops.push(Op::Volume(spec.volume.clone()));
    volume_dirs(spec).for_each(|dir| steps.dir(Path::new(dir.path)));
    steps.ops.extend(on_volume(spec).map(|dir| Op::VolumeDir { path: dir.path.into(), mode: dir.mode }));
    steps.ops.push(Op::HideVolume);
}

/// Adds the steps whose result belongs to this sandbox alone and cannot be prepared in advance.
fn owned(spec: &JailSpec, steps: &mut Steps) {
    let owner = spec.map.outer();
    let outer = |user| match user {
        VolumeUser::Code => owner,
        VolumeUser::Browser => spec.map.outer_browser(),
    };
    for VolumeDir { path, owner_and_group, .. } in on_volume(spec) {
        let [owner, group] = owner_and_group.map(outer);
        steps.ops.push(Op::VolumeOwner { path: path.into(), owner, group });
    }
    let keeps_workspace = spec.kept_dir() == Some(WORKSPACE);
    if spec.browser.is_some() {
        let path = if keeps_workspace { DOWNLOADS_BESIDE } else { spec.downloads() };
        let (mode, group) = (DOWNLOADS_MODE, spec.map.outer_browser());
        steps.ops.push(Op::SharedDir { path: path.into(), mode, owner, group });
    }
    if keeps_workspace {
        kept_workspace(spec, steps);
    } else if let Some(kept) = spec.kept.clone() {
        kept_data(kept, owner, steps);
    }
    shared_dirs(spec, steps);
    for shared in spec.shared.iter().cloned() {
        let (owner, workspace) = (spec.map.remapped(), workspace_of(&shared, &spec.shared).map(Path::to_owned));
        steps.ops.push(match workspace {
            Some(workspace) => Op::SharePackages { workspace, shared, owner },
            None => Op::Share { shared, owner },
        });
    }
}

fn kept_data(kept: KeptVolumeSpec, owner: u32, steps: &mut Steps) {
    let path = PathBuf::from(DATA);
    match kept {
        KeptVolumeSpec::Ext4 { template, image } => {
            let dir = Op::KeptDir { path: path.clone(), owner, mode: None, below: vec![] };
            steps.ops.extend([Op::KeptImage { template, image }, dir, Op::HideKept, Op::HoldKept(path)]);
        }
        KeptVolumeSpec::Mounted { .. } => steps.ops.extend([Op::KeptMounted(path.clone()), Op::HoldKept(path)]),
        KeptVolumeSpec::Memory { at } => steps.ops.push(Op::KeptBind { at, path, owner }),
    }
}

/// Name of the directory for installed packages on a kept workspace.
const KEPT_PACKAGES: &str = ".packages";
/// Where downloads are if the workspace is a kept volume, whose files can belong to one user only. They are shown in the
/// workspace and are not kept.
const DOWNLOADS_BESIDE: &str = "/tmp/.downloads";

/// Shows the kept volume as the workspace. It is not parked: the mount points in it have to be created anew, in case
/// that code removed them.
fn kept_workspace(spec: &JailSpec, steps: &mut Steps) {
    let (path, owner) = (PathBuf::from(WORKSPACE), spec.map.outer());
    let downloads = spec.browser.map(|_| PathBuf::from(spec.downloads()));
    let shared = spec.shared.iter().map(|shared| &shared.inside).filter(|inside| inside.starts_with(WORKSPACE));
    let points = shared.cloned().chain([path.join(KEPT_PACKAGES)]).chain(downloads.clone());
    let mut below = BTreeSet::new();
    for point in points {
        let inside = point.strip_prefix(WORKSPACE).unwrap_or(&point);
        below.extend(inside.ancestors().filter(|dir| !dir.as_os_str().is_empty()).map(Path::to_owned));
    }
    let below: Vec<PathBuf> = below.into_iter().collect();
    match spec.kept.clone() {
        Some(KeptVolumeSpec::Ext4 { template, image }) => {
            let mode = volume_dirs(spec).find(|dir| dir.path == WORKSPACE).map(|dir| dir.mode);
            let dir = Op::KeptDir { path: path.clone(), owner, mode, below };
            steps.ops.extend([Op::KeptImage { template, image }, dir, Op::HideKept]);
        }
        Some(KeptVolumeSpec::Memory { at }) => {
            steps.ops.push(Op::KeptBind { at, path: path.clone(), owner });
            steps.ops.extend(below.into_iter().map(|dir| Op::KeptPoint { path: path.join(dir), owner }));
        }
        // Only a parked volume is still mounted.
        Some(KeptVolumeSpec::Mounted { .. }) | None => {}
    }
    if let Some(packages) = spec.kept_packages.clone() {
        steps.ops.push(Op::SharedDir { path: packages.clone(), mode: 0o755, owner, group: owner });
        steps.ops.push(Op::ShowAt { from: path.join(KEPT_PACKAGES), path: packages });
    }
    steps.ops.extend(downloads.map(|path| Op::ShowAt { from: DOWNLOADS_BESIDE.into(), path }));
}

/// Creates the directories on the sandbox's volume over which shared volumes are mounted. They are the code's, like
/// everything else there.
fn shared_dirs(spec: &JailSpec, steps: &mut Steps) {
    let (owner, mode) = (spec.map.outer(), 0o755);
    let kept = spec.kept_dir().map(Path::new);
    for shared in &spec.shared {
        let Some(top) = shared.on_volume().filter(|top| Some(*top) != kept) else { continue };
        let below: Vec<&Path> = shared.inside.ancestors().take_while(|dir| *dir != top).collect();
        for path in below.into_iter().rev() {
            if steps.dirs.insert(path.to_owned()) {
                steps.ops.push(Op::SharedDir { path: path.to_owned(), mode, owner, group: owner });
            }
        }
    }
}

/// Shows the runtimes and our files. This follows the volume, because a runtime may be below `/tmp`.
fn runtime(spec: &JailSpec, steps: &mut Steps) {
    for path in shown_runtime(spec) {
        steps.file(path, Op::Layer(path.clone()));
    }
    spec.files.iter().cloned().for_each(|file| steps.write(file));
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
    steps.ops.push(Op::Proc("/proc".into()));
    steps.ops.extend(spec.host.masked_files.iter().cloned().map(Op::MaskFile));
    steps.ops.extend(spec.host.masked_dirs.iter().cloned().map(Op::MaskDir));
    steps.ops.extend(spec.host.read_only.iter().cloned().map(Op::ReadOnly));
    // This comes last because these files are mounted over the entries that are visible after the steps above.
    steps.ops.extend(spec.host.proc_files.iter().cloned().map(Op::ProcFile));
    steps.ops.push(Op::BootId(BOOT_ID.into()));
}

fn give_up(spec: &JailSpec, steps: &mut Steps) {
    steps.ops.extend([Op::UserNamespace(spec.map), Op::UserLimits]);
    steps.ops.extend(identity(spec, INSIDE).map(Op::Confine));
    // Ids change before the death signal is set: the Linux kernel clears the signal when ids change.
    steps.ops.push(Op::DieWithLauncher);
    let limits = ConfineStep::Rlimits { processes: spec.processes };
    steps.ops.extend([Op::Confine(limits), Op::Descriptors, Op::Confine(ConfineStep::NotDumpable)]);
    steps.ops.extend(confinement(spec).map(Op::Confine));
    steps.ops.push(Op::Exec);
}

/// Returns the steps by which a process confines itself before it forks a kernel into the finished sandbox. They are
/// the steps of the guest in the same order. `NotDumpable` follows the change of ids, which undoes it on a host with
/// `fs.suid_dumpable = 1`.
pub(crate) fn entry(spec: &JailSpec) -> Vec<ConfineStep> {
    let own = [ConfineStep::Rlimits { processes: spec.processes }, ConfineStep::NotDumpable];
    identity(spec, INSIDE).chain(own).chain(confinement(spec)).collect()
}

/// Returns the steps of [`entry`] for the browser driver: another user with fewer rights.
pub(crate) fn browser_entry(spec: &JailSpec) -> Option<Vec<ConfineStep>> {
    let browser = spec.browser?;
    // Processes with the code's uid are counted together with the code.
    let processes = if spec.map.browser() == BROWSER { browser.processes } else { spec.processes };
    let own = [ConfineStep::Rlimits { processes }, ConfineStep::NotDumpable];
    let landlock = ConfineStep::BrowserLandlock { run: readable(spec), downloads: spec.downloads().into() };
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
    let writes_host_files = shared(false).next().is_some();
    let profile = if writes_host_files { Profile::CodeOnHostFiles } else { Profile::Code };
    confined(ConfineStep::Landlock { run, write }, profile)
}

fn confined(landlock: ConfineStep, profile: Profile) -> impl Iterator<Item = ConfineStep> {
    [ConfineStep::DropCapabilities, ConfineStep::NoNewPrivileges, landlock, ConfineStep::Seccomp { profile }]
        .into_iter()
}

/// Returns the paths that can be read and executed: the system, the runtimes, and our files.
fn readable(spec: &JailSpec) -> Vec<PathBuf> {
    let system = spec.host.binds.iter().filter(|p| !p.starts_with("/etc")).cloned();
    let runtime = shown_runtime(spec).into_iter().cloned();
    // What a link leads to is readable or not by itself.
    let files = spec.files.iter().filter(|f| !matches!(f.content, Content::Link { .. })).map(|f| f.path.clone());
    let paths: BTreeSet<PathBuf> = system.chain([PathBuf::from("/etc")]).chain(runtime).chain(files).collect();
    paths.into_iter().collect()
}

#[cfg(test)]
mod tests;
