//! The steps that make a sandbox, as a list: printed, compared and then applied by one loop ([`crate::apply`]).
//!
//! A pure function of the spec. The order is the design: mounts and network first, by a process that is root in the launcher's
//! user namespace; then the sandbox's own user namespace, in which even every capability reaches neither; then everything is
//! given up; the guest last.

use std::collections::BTreeSet;
use std::fmt;
use std::net::SocketAddrV4;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::ids::{INSIDE, IdMap};
use crate::own::Own;
use crate::spec::{Content, JailSpec, Kept, Shared, Volume};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    /// Writes itself into a v1 cgroup.
    JoinCgroup {
        tasks: PathBuf,
    },
    /// What the process does to itself alone.
    Own(Own),
    /// Nothing of what an operator may have given the server: no negative nice, no real time, no shelter from the memory killer.
    OrdinaryPriority,
    /// After joining: its root is then the sandbox's own cgroup, and no name of ours shows inside.
    CgroupNamespace,
    /// Binds the guest's socket in the sandbox's directory, in the sandbox's network namespace.
    Listen {
        dir: PathBuf,
    },
    /// Listens in the sandbox's network namespace, and gives the socket away: whoever accepts on it is outside.
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
    ReadOnly {
        path: PathBuf,
    },
    /// Mounts the volume on a directory that nobody sees later.
    Volume {
        volume: Volume,
    },
    /// A directory of the volume at `path`.
    VolumeDir {
        path: PathBuf,
        mode: u32,
    },
    HideVolume,
    /// Gives a directory of the volume to the sandbox.
    VolumeOwner {
        path: PathBuf,
        owner: u32,
    },
    /// Mounts a kept image, made from the template if there is one, on another such directory. Locked until it is unmounted.
    KeptImage {
        template: Option<PathBuf>,
        image: PathBuf,
    },
    /// Its one directory at `path`, its files shown as those of `owner`.
    KeptDir {
        path: PathBuf,
        owner: u32,
    },
    HideKept,
    /// A kept image that is still mounted.
    KeptMounted {
        path: PathBuf,
    },
    /// A second mount of it for the launcher, which may keep the volume ready for the next sandbox.
    HoldKept {
        path: PathBuf,
    },
    /// A volume that the launcher holds.
    KeptBind {
        at: PathBuf,
        path: PathBuf,
        owner: u32,
    },
    /// A directory of the host. With an `owner`, what the directory's owner has in it is shown as that one's.
    Share {
        shared: Shared,
        owner: Option<u32>,
    },
    PivotRoot,
    SealRoot,
    Hostname {
        name: String,
    },
    LoopbackUp,
    /// Made by the sandbox's own host uid, not by root: the kernel charges what it counts per user (inotify, pending signals,
    /// locked memory) to the maker too, so that one sandbox could use up root's. The launcher writes the maps.
    UserNamespace {
        map: IdMap,
    },
    /// No namespaces below this one, and a share of what is counted per user.
    UserLimits,
    DieWithLauncher,
    /// 0 and 1 on `/dev/null`, 2 to the launcher's log, 3 the listening socket, 4 where forked kernels come from, nothing else.
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
            Self::BindReadOnly { path } => write!(f, "bind {} ro,nosuid,nodev", path.display()),
            Self::Device { path, number: (major, minor) } => write!(f, "device {} {major}:{minor}", path.display()),
            Self::Devpts { path, max } => write!(f, "devpts {} max {max}", path.display()),
            Self::Tmpfs { path, bytes, inodes } => write!(f, "tmpfs {} {bytes} bytes {inodes} inodes", path.display()),
            Self::Proc { path } => write!(f, "proc {}", path.display()),
            Self::MaskFile { path } => write!(f, "mask file {}", path.display()),
            Self::MaskDir { path } => write!(f, "mask dir {}", path.display()),
            Self::ReadOnly { path } => write!(f, "read-only {}", path.display()),
            Self::Volume { volume: Volume::Ext4 { template, image } } => {
                write!(f, "volume ext4 {} from {}", image.display(), template.display())
            }
            Self::Volume { volume: Volume::Tmpfs { bytes, inodes } } => {
                write!(f, "volume tmpfs {bytes} bytes {inodes} inodes")
            }
            Self::VolumeDir { path, mode } => write!(f, "volume dir {} {mode:o}", path.display()),
            Self::HideVolume => write!(f, "hide volume"),
            Self::VolumeOwner { path, owner } => write!(f, "volume dir {} owner {owner}", path.display()),
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
            Self::Share { shared: Shared { host, inside, read_only }, owner } => {
                let access = if *read_only { "ro" } else { "rw" };
                write!(f, "share {} on {} {access},nosuid,nodev", host.display(), inside.display())?;
                owner.iter().try_for_each(|owner| write!(f, " shown as {owner}"))
            }
            Self::PivotRoot => write!(f, "pivot root"),
            Self::SealRoot => write!(f, "root read-only"),
            Self::Hostname { name } => write!(f, "hostname {name}"),
            Self::LoopbackUp => write!(f, "loopback up"),
            Self::UserNamespace { map } => write!(f, "unshare user as {}, map {}", map.outer(), map.line()),
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
    /// The steps that are the same for every sandbox of a kind, so that they can be done before one is asked for ([`crate::spare`]):
    /// root, volume, devices, network.
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

/// What may lie on a volume that outlives the sandbox.
const DATA: &str = "/data";

const SHM_INODES: u64 = 10_000;

/// Our own `/etc`: the host's would tell about its users and its network, and names there mean other ids.
fn etc(hostname: &str) -> [(&'static str, String); 6] {
    [
        ("passwd", "sandbox:x:1000:1000:sandbox:/workspace:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n".into()),
        ("group", "sandbox:x:1000:\nnogroup:x:65534:\n".into()),
        ("hosts", format!("127.0.0.1 localhost {hostname}\n::1 localhost\n")),
        ("hostname", format!("{hostname}\n")),
        ("resolv.conf", String::new()),
        ("nsswitch.conf", "passwd: files\ngroup: files\nhosts: files\nservices: files\nprotocols: files\n".into()),
    ]
}

/// The steps of one sandbox, in order.
pub fn plan(spec: &JailSpec) -> Plan {
    let mut steps = Steps::default();
    steps.ops.extend(spec.cgroup_tasks.iter().map(|tasks| Op::JoinCgroup { tasks: tasks.clone() }));
    steps.ops.extend([Op::Own(Own::Session), Op::OrdinaryPriority, Op::CgroupNamespace, Op::PrivateMounts]);
    let base = steps.ops.len();
    let (bytes, inodes) = root_size(spec);
    steps.ops.push(Op::NewRoot { at: spec.mount_point.clone(), bytes, inodes });
    system(spec, &mut steps);
    volume(spec, &mut steps);
    runtime(spec, &mut steps);
    dev(spec, &mut steps);
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

/// The steps of the warm interpreter: a root like a sandbox's in which nothing of the host can be written. It keeps the launcher's
/// rights, which it needs to enter sandboxes.
pub fn warm(spec: &JailSpec) -> Plan {
    let mut steps = Steps::default();
    let (bytes, inodes) = root_size(spec);
    steps.ops.extend([Op::Own(Own::Session), Op::OrdinaryPriority, Op::PrivateMounts]);
    steps.ops.push(Op::NewRoot { at: spec.mount_point.clone(), bytes, inodes });
    system(spec, &mut steps);
    steps.dir(Path::new("/tmp"));
    steps.ops.push(Op::Tmpfs { path: "/tmp".into(), bytes: spec.shm_bytes, inodes: SHM_INODES });
    runtime(spec, &mut steps);
    devices(&mut steps);
    // Its own numbers are the launcher's, so this is the one it has to see.
    steps.ops.push(Op::BindReadOnly { path: "/proc".into() });
    steps.ops.extend([Op::PivotRoot, Op::SealRoot, Op::Own(Own::SessionKeyring), Op::DieWithLauncher]);
    Plan { ops: steps.ops, base: 0..0 }
}

/// Ops, and the directories that exist so far.
#[derive(Default)]
struct Steps {
    ops: Vec<Op>,
    dirs: BTreeSet<PathBuf>,
}

impl Steps {
    /// The directory and those above it, each once.
    fn dir(&mut self, path: &Path) {
        let Some(parent) = path.parent() else { return };
        self.dir(parent);
        if self.dirs.insert(path.to_owned()) {
            self.ops.push(Op::Dir { path: path.to_owned(), mode: 0o755 });
        }
    }

    /// An op that makes a file at `path`.
    fn file(&mut self, path: &Path, op: Op) {
        if let Some(parent) = path.parent() {
            self.dir(parent);
        }
        self.ops.push(op);
    }
}

/// Our own files, with room for the directories and mount points around them.
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
    ((1 << 20) + content.next_multiple_of(4096), 256 + inodes)
}

fn system(spec: &JailSpec, steps: &mut Steps) {
    for path in &spec.host.binds {
        steps.file(path, Op::BindReadOnly { path: path.clone() });
    }
    for (path, target) in &spec.host.symlinks {
        steps.file(path, Op::Symlink { path: path.clone(), target: target.clone() });
    }
    for (name, text) in etc(&spec.hostname) {
        let path = Path::new("/etc").join(name);
        steps.file(&path, Op::File { path: path.clone(), content: Content::Text(text) });
    }
}

/// Where what the sandbox writes is shown, and with which modes.
const VOLUME_DIRS: [(&str, u32); 3] = [("/workspace", 0o755), (DATA, 0o755), ("/tmp", 0o1777)];

fn volume_dirs(spec: &JailSpec) -> impl Iterator<Item = (&'static str, u32)> {
    VOLUME_DIRS.into_iter().filter(|(path, _)| *path != DATA || spec.kept.is_none())
}

fn volume(spec: &JailSpec, steps: &mut Steps) {
    steps.ops.push(Op::Volume { volume: spec.volume.clone() });
    VOLUME_DIRS.iter().for_each(|(path, _)| steps.dir(Path::new(path)));
    steps.ops.extend(volume_dirs(spec).map(|(path, mode)| Op::VolumeDir { path: path.into(), mode }));
    steps.ops.push(Op::HideVolume);
}

/// What belongs to this sandbox and to no other.
fn owned(spec: &JailSpec, steps: &mut Steps) {
    let owner = spec.map.outer();
    steps.ops.extend(volume_dirs(spec).map(|(path, _)| Op::VolumeOwner { path: path.into(), owner }));
    match spec.kept.clone() {
        Some(Kept::Ext4 { template, image }) => {
            let dir = Op::KeptDir { path: DATA.into(), owner };
            let hold = Op::HoldKept { path: DATA.into() };
            steps.ops.extend([Op::KeptImage { template, image }, dir, Op::HideKept, hold]);
        }
        Some(Kept::Mounted { .. }) => {
            steps.ops.extend([Op::KeptMounted { path: DATA.into() }, Op::HoldKept { path: DATA.into() }]);
        }
        Some(Kept::Held { at }) => steps.ops.push(Op::KeptBind { at, path: DATA.into(), owner }),
        None => {}
    }
    let share = |shared: &Shared| Op::Share { shared: shared.clone(), owner: spec.map.remapped() };
    steps.ops.extend(spec.shared.iter().map(share));
}

/// After the volume: a runtime may lie below `/tmp`.
fn runtime(spec: &JailSpec, steps: &mut Steps) {
    for path in shown_runtime(spec) {
        steps.file(path, Op::BindReadOnly { path: path.clone() });
    }
    for file in &spec.files {
        steps.file(&file.path, Op::File { path: file.path.clone(), content: file.content.clone() });
    }
}

/// The runtime paths that no other bind shows already; parents before what lies below them.
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
    steps.ops.push(Op::Devpts { path: "/dev/pts".into(), max: spec.ptys });
    steps.ops.push(Op::Symlink { path: "/dev/ptmx".into(), target: "pts/ptmx".into() });
    steps.dir(Path::new("/dev/shm"));
    steps.ops.push(Op::Tmpfs { path: "/dev/shm".into(), bytes: spec.shm_bytes, inodes: SHM_INODES });
}

fn proc(spec: &JailSpec, steps: &mut Steps) {
    steps.ops.push(Op::Proc { path: "/proc".into() });
    steps.ops.extend(spec.host.masked_files.iter().map(|path| Op::MaskFile { path: path.clone() }));
    steps.ops.extend(spec.host.masked_dirs.iter().map(|path| Op::MaskDir { path: path.clone() }));
    steps.ops.extend(spec.host.read_only.iter().map(|path| Op::ReadOnly { path: path.clone() }));
}

fn give_up(spec: &JailSpec, steps: &mut Steps) {
    steps.ops.extend([Op::UserNamespace { map: spec.map }, Op::UserLimits]);
    steps.ops.extend(identity(spec).map(Op::Own));
    // Ids before the death signal: the kernel forgets the signal when ids change.
    if spec.die_with_launcher {
        steps.ops.push(Op::DieWithLauncher);
    }
    steps.ops.extend([Op::Own(limits(spec)), Op::Descriptors, Op::Own(Own::NotDumpable)]);
    steps.ops.extend(confinement(spec).map(Op::Own));
    steps.ops.push(Op::Exec);
}

/// The steps of a kernel that is forked into the finished sandbox: what its guest gave up, in the same order. Unlike the guest it may
/// be looked at by code in the sandbox, which is going to run in it; but not before it is held. That is said again after the change
/// of ids, which on a host with `fs.suid_dumpable = 1` undoes it.
pub fn entry(spec: &JailSpec) -> Vec<Own> {
    let last = [Own::Dumpable, Own::OfferToOomKiller];
    identity(spec).chain([limits(spec), Own::NotDumpable]).chain(confinement(spec)).chain(last).collect()
}

fn identity(spec: &JailSpec) -> impl Iterator<Item = Own> {
    let groups = spec.map.may_set_groups().then_some(Own::DropGroups);
    groups.into_iter().chain([Own::SetIds { id: INSIDE }, Own::SessionKeyring])
}

fn limits(spec: &JailSpec) -> Own {
    Own::Rlimits { processes: spec.processes }
}

fn confinement(spec: &JailSpec) -> impl Iterator<Item = Own> {
    let shared = |read_only| spec.shared.iter().filter(move |s| s.read_only == read_only).map(|s| s.inside.clone());
    let run = readable(spec).into_iter().chain(shared(true)).collect();
    let write = shared(false).collect();
    [Own::DropCapabilities, Own::NoNewPrivileges, Own::Landlock { run, write }, Own::Seccomp].into_iter()
}

/// What may be read and run: system, runtimes, the files we wrote.
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
    use crate::spec::{FileSpec, Host};

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
                read_only: paths(&["/proc/sys"]),
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
            egress: None,
            shm_bytes: 32 << 20,
            ptys: 64,
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

    /// With everything that may be there besides.
    fn with_volumes(mode: Mode) -> JailSpec {
        let spec = spec(mode);
        let share =
            |host: &str, inside: &str, read_only| Shared { host: host.into(), inside: inside.into(), read_only };
        let kept = match mode {
            Mode::Root => Kept::Ext4 {
                template: Some("/state/templates/ext4-kept-1.img".into()),
                image: spec.dir.join("kept.img"),
            },
            Mode::Sub | Mode::Single => Kept::Held { at: "/state/instances/i/kept/0af9".into() },
        };
        let shared = vec![share("/srv/in", "/shared/in", true), share("/srv/out", "/shared/out", false)];
        JailSpec { kept: Some(kept), shared, egress: Some("127.0.0.1:3128".parse().unwrap()), ..spec }
    }

    /// Only what is there because of that, and the other way round.
    fn difference(mode: Mode) -> String {
        let lines = |spec: &JailSpec| plan(spec).to_string().lines().map(str::to_owned).collect::<Vec<_>>();
        let (without, with) = (lines(&spec(mode)), lines(&with_volumes(mode)));
        let gone = without.iter().filter(|l| !with.contains(l)).map(|l| format!("- {l}"));
        let new = with.iter().filter(|l| !without.contains(l)).map(|l| format!("+ {l}"));
        gone.chain(new).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn shared_and_kept_volumes_and_a_way_out_change_the_plan_like_this() {
        insta::assert_snapshot!(difference(Mode::Root), @r"
        -   root tmpfs 1056768 bytes 281 inodes on /state/instances/i/root
        -   volume dir /data 755
        - volume dir /data owner 1879048199
        - landlock /etc /home/u/rt/node /opt/sandpool/driver.py /tmp/rt /usr
        +   root tmpfs 1056768 bytes 287 inodes on /state/instances/i/root
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
        -   root tmpfs 1056768 bytes 281 inodes on /state/instances/i/root
        -   volume dir /data 755
        - volume dir /data owner 8
        - landlock /etc /home/u/rt/node /opt/sandpool/driver.py /tmp/rt /usr
        +   root tmpfs 1056768 bytes 287 inodes on /state/instances/i/root
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
            let shared = vec![Shared { host: "/srv".into(), inside: inside.into(), read_only: false }];
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
        // Of its own: a session from the start, and who may look at it.
        let differs =
            |own: &Own| matches!(own, Own::Session | Own::NotDumpable | Own::Dumpable | Own::OfferToOomKiller);
        for mode in [Mode::Root, Mode::Sub, Mode::Single] {
            let spec = with_volumes(mode);
            let own = |op| if let Op::Own(own) = op { Some(own) } else { None };
            let guest: Vec<Own> = plan(&spec).ops.into_iter().filter_map(own).filter(|own| !differs(own)).collect();
            let kernel: Vec<Own> = entry(&spec).into_iter().filter(|own| !differs(own)).collect();
            assert_eq!(kernel, guest, "{mode}");
            let held = entry(&spec).iter().position(|own| *own == Own::Seccomp);
            assert!(held < entry(&spec).iter().position(|own| *own == Own::Dumpable));
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
            assert_eq!(ops[ops.len() - 2], Op::Own(Own::Seccomp));
        }
    }
}
