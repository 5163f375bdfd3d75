//! The specification of a sandbox as data: everything that `crate::plan` needs, so that the plan is a pure function
//! of it.
//!
//! `Host::detect` inspects the host once; no later step does.

use std::collections::BTreeMap;
use std::fs;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::AsFd;
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::cgroup::Group;
use crate::ids::IdMap;
use crate::kept_volumes::KeptVolumeRequest;

/// Specification of a sandbox. The operator decides everything in it; no tool argument does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxSpec {
    /// Groups around the sandbox, outermost first (a tenant, then one of its realms). They become nested parent
    /// cgroups. There are one to three.
    pub groups: Vec<Group>,
    pub limits: Limits,
    /// Host directories and files of the language runtimes, shown read-only at the same path.
    pub runtime: Vec<PathBuf>,
    /// Files that are written into the sandbox's root before it is sealed, such as the drivers.
    pub files: Vec<FileSpec>,
    /// Host directories that the operator shares with sandboxes.
    pub volumes: Vec<SharedVolumeSpec>,
    /// Kept volume that holds `/data` or `/workspace` and outlives the sandbox. Only one sandbox at a time may use it.
    pub kept: Option<KeptVolumeRequest>,
    /// Whether a socket listens inside on [`PROXY`]. It is handed out once. Without it the sandbox has only loopback.
    pub egress: bool,
    /// Limits of a browser next to the code, if there is to be one. The browser gets a separate uid, a separate home,
    /// and a share of memory and processors.
    pub browser: Option<BrowserRoom>,
}

/// Address at which a sandbox with egress finds its proxy.
pub const PROXY: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 3128);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    pub memory_bytes: u64,
    /// Processor limit in thousandths of a core.
    pub cpu_millis: u32,
    pub pids: u32,
    pub disk_bytes: u64,
    pub disk_inodes: u64,
}

/// Part of the sandbox's limits that its browser may use at most. The code may use the remaining processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BrowserRoom {
    pub memory_bytes: u64,
    pub pids: u32,
}

/// Specification of the warm interpreter. It is started once, imports its libraries, runs no tenant's code, and is then
/// forked into sandboxes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ZygoteSpec {
    /// Interpreter, its flags, the driver and the driver's arguments. All paths are paths inside a sandbox.
    pub argv: Vec<String>,
    /// Complete environment: that of the kernels, without the packages that only confined processes may use.
    pub env: BTreeMap<String, String>,
    /// Same as in [`SandboxSpec`], because the warm interpreter lives in a root like that of a sandbox.
    pub runtime: Vec<PathBuf>,
    pub files: Vec<FileSpec>,
}

/// Status of the warm interpreter, counted since the launcher was started.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ZygoteStatus {
    /// Whether it can be forked now.
    pub ready: bool,
    pub forks: u64,
    /// Number of times it died and was started again.
    pub restarts: u64,
    /// Modules that it failed to import, and why.
    pub not_imported: BTreeMap<String, String>,
}

/// The specification as the launcher completes it: with the sandbox's ids, its directories and the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct JailSpec {
    pub map: IdMap,
    pub host: Host,
    /// Directories and files of the language runtimes, shown read-only at the same paths.
    pub runtime: Vec<PathBuf>,
    /// Files that are written into the root before it becomes read-only.
    pub files: Vec<FileSpec>,
    pub volume: Volume,
    /// Kept volume for `/data` or `/workspace`; without one, both are on the volume.
    pub kept: Option<KeptVolumeSpec>,
    /// Where the packages of a kept `/workspace` are shown; `None` if the kept volume is for `/data`.
    pub kept_packages: Option<PathBuf>,
    pub shared: Vec<SharedVolumeSpec>,
    /// Limits of a browser beside the code; `None` if the sandbox cannot have a browser.
    pub browser: Option<BrowserJail>,
    /// Address at which the egress socket listens in the sandbox's network namespace. The socket is handed to the
    /// launcher.
    pub egress: Option<SocketAddrV4>,
    pub shm_bytes: u64,
    /// The v1 `tasks` files into which the first process writes itself. On v2 the process is created in its cgroup.
    pub cgroup_tasks: Vec<PathBuf>,
    /// Maximum number of processes where no cgroup counts them. The Linux kernel then counts the processes of this user
    /// in this user namespace.
    pub processes: Option<u64>,
    /// The sandbox's directory on the host, which contains the guest's socket and the volume.
    pub dir: PathBuf,
    /// The directory on which the root is mounted during the creation, in a separate mount namespace.
    pub mount_point: PathBuf,
}

/// The browser's part of the sandbox. [`JailSpec::map`] defines its uid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BrowserJail {
    /// Maximum number of processes of the browser alone; see [`JailSpec::processes`].
    pub processes: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileSpec {
    pub path: PathBuf,
    pub content: Content,
}

impl FileSpec {
    /// Returns a symbolic link at `path`, which leads to another path inside the sandbox.
    pub fn link(path: PathBuf, to: PathBuf) -> Self {
        Self { path, content: Content::Link { to } }
    }
}

impl From<(PathBuf, Vec<u8>)> for FileSpec {
    fn from((path, bytes): (PathBuf, Vec<u8>)) -> Self {
        Self { path, content: bytes.into() }
    }
}

/// Content of a file, or where a link leads; text stays readable in JSON.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Content {
    Text(String),
    Bytes(Vec<u8>),
    Link { to: PathBuf },
}

impl Content {
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Text(text) => text.as_bytes(),
            Self::Bytes(bytes) => bytes,
            Self::Link { to } => to.as_os_str().as_encoded_bytes(),
        }
    }
}

impl From<Vec<u8>> for Content {
    fn from(bytes: Vec<u8>) -> Self {
        String::from_utf8(bytes).map_or_else(|e| Self::Bytes(e.into_bytes()), Self::Text)
    }
}

impl std::fmt::Debug for Content {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.as_bytes().len())
    }
}

/// The file system of `/workspace`, `/data` and `/tmp`: a single volume, so that one quota applies to all of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Volume {
    /// An ext4 file system in a sparse file: on disk and not charged to memory. It needs root.
    Ext4 { template: PathBuf, image: PathBuf },
    /// A file system in memory, charged to the sandbox.
    Tmpfs { bytes: u64, inodes: u64 },
}

/// A kept volume for `/data`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum KeptVolumeSpec {
    /// An ext4 file system with a journal in a sparse file, created first if there is a template. It needs root.
    Ext4 { template: Option<PathBuf>, image: PathBuf },
    /// The same kind of file system, still mounted since its last use; its directory is passed as a descriptor.
    Mounted { image: PathBuf },
    /// A file system in memory that the launcher has mounted at `at` and keeps for as long as it lives.
    Memory { at: PathBuf },
}

/// A directory of the host that the operator shares with sandboxes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedVolumeSpec {
    pub host: PathBuf,
    pub inside: PathBuf,
    pub read_only: bool,
}

/// The layout of the host's system directories, and the host's files that a sandbox needs to see.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Host {
    /// Paths that are shown read-only at the same path.
    pub binds: Vec<PathBuf>,
    /// Symlinks and their targets, such as `/bin → usr/bin` on merged systems.
    pub symlinks: Vec<(PathBuf, PathBuf)>,
    /// Files below `/proc` that read as empty.
    pub masked_files: Vec<PathBuf>,
    /// Directories below `/proc` that appear empty.
    pub masked_dirs: Vec<PathBuf>,
    /// Files below `/proc` that are replaced by ours.
    pub proc_files: Vec<FileSpec>,
    /// Paths below `/proc` that are read-only.
    pub read_only: Vec<PathBuf>,
    /// Whether the Linux kernel supports IPv6.
    pub ipv6: bool,
    /// Maximum number of pseudo-terminals of a sandbox.
    pub ptys: u32,
}

const SYSTEM: &[&str] = &["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"];

/// The parts of `/etc` that programs need to find libraries, certificates, fonts and the time zone. User names, host
/// names and passwords come from our files instead.
const ETC: &[&str] = &[
    "/etc/alternatives",
    "/etc/ca-certificates",
    "/etc/crypto-policies",
    "/etc/fonts",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/os-release",
    "/etc/pki/ca-trust",
    "/etc/pki/tls/certs",
    "/etc/protocols",
    "/etc/services",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
];

/// Files that disclose information about the host or the Linux kernel's internals. Files that do not exist when a
/// sandbox is created are skipped, because Linux kernels differ.
const MASKED_FILES: &[&str] = &[
    "/proc/allocinfo",
    "/proc/bootconfig",
    "/proc/buddyinfo",
    "/proc/cgroups",
    "/proc/cmdline",
    "/proc/config.gz",
    "/proc/consoles",
    "/proc/diskstats",
    "/proc/interrupts",
    "/proc/iomem",
    "/proc/ioports",
    "/proc/kallsyms",
    "/proc/kcore",
    "/proc/key-users",
    "/proc/keys",
    "/proc/kmsg",
    "/proc/kpagecgroup",
    "/proc/kpagecount",
    "/proc/kpageflags",
    "/proc/latency_stats",
    "/proc/locks",
    "/proc/mdstat",
    "/proc/modules",
    "/proc/mtrr",
    "/proc/pagetypeinfo",
    "/proc/partitions",
    "/proc/sched_debug",
    "/proc/schedstat",
    "/proc/slabinfo",
    "/proc/softirqs",
    "/proc/swaps",
    "/proc/sysrq-trigger",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/vmallocinfo",
    "/proc/vmcore",
    "/proc/zoneinfo",
];
const MASKED_DIRS: &[&str] = &[
    "/proc/acpi",
    "/proc/asound",
    "/proc/bus",
    "/proc/driver",
    "/proc/dynamic_debug",
    "/proc/fs",
    "/proc/irq",
    "/proc/pressure",
    "/proc/scsi",
];
const READ_ONLY: &[&str] = &["/proc/sys"];
/// Replacements for counters of the whole host that programs read: the expected entries exist and never change. In
/// `/proc/sys` a null device would not do, since it can be opened for writing.
const PROC_FILES: &[(&str, &str)] = &[
    ("/proc/vmstat", "pgpgin 0\npgpgout 0\npswpin 0\npswpout 0\npgfault 0\npgmajfault 0\noom_kill 0\n"),
    ("/proc/sys/fs/dentry-state", "0\t0\t45\t0\t0\t0\n"),
    ("/proc/sys/fs/file-nr", "0\t0\t0\n"),
    ("/proc/sys/fs/inode-nr", "0\t0\n"),
    ("/proc/sys/fs/inode-state", "0\t0\t0\t0\t0\t0\t0\n"),
    ("/proc/sys/kernel/pty/nr", "0\n"),
];

/// Number of sandboxes that have to use all their pseudo-terminals to exhaust the pool. The Linux kernel has one pool
/// and reserves `kernel.pty.reserve` of it for the host, which leaves 3,072 of 4,096 with the default settings: eight
/// per sandbox.
const SANDBOXES_THAT_EXHAUST_PTYS: u32 = 384;
const MOST_PTYS: u32 = 8;

fn ptys(root: &Path) -> u32 {
    let figure = |name: &str| fs::read_to_string(root.join("proc/sys/kernel/pty").join(name)).ok()?.trim().parse().ok();
    let pool = figure("max").unwrap_or(4096u32).saturating_sub(figure("reserve").unwrap_or(1024));
    (pool / SANDBOXES_THAT_EXHAUST_PTYS).clamp(1, MOST_PTYS)
}

impl Host {
    /// Inspects the host. `root` is `/`, or a directory with a test fixture.
    pub(crate) fn detect(root: &Path) -> Self {
        let on_host = |path: &str| root.join(path.trim_start_matches('/'));
        let mut host = Self::default();
        for path in SYSTEM.iter().chain(ETC) {
            match fs::symlink_metadata(on_host(path)) {
                Ok(found) if found.is_symlink() => host.add_symlink(root, path),
                Ok(_) => host.binds.push(path.into()),
                Err(_) => {}
            }
        }
        let paths = |list: &[&str]| list.iter().map(PathBuf::from).collect();
        host.masked_files = paths(MASKED_FILES);
        host.masked_dirs = paths(MASKED_DIRS);
        let file = |(path, text): &(&str, &str)| FileSpec { path: path.into(), content: Content::Text((*text).into()) };
        host.proc_files = PROC_FILES.iter().map(file).collect();
        host.read_only = paths(READ_ONLY);
        host.ipv6 = on_host("/proc/net/if_inet6").exists();
        host.ptys = ptys(root);
        host
    }

    /// Keeps a symlink into `/usr`, which is visible anyway; any other symlink is replaced by a bind of its target.
    fn add_symlink(&mut self, root: &Path, path: &str) {
        let Ok(target) = fs::read_link(root.join(path.trim_start_matches('/'))) else { return };
        let absolute = normal(&Path::new(path).parent().unwrap_or(Path::new("/")).join(&target));
        if absolute.starts_with("/usr") {
            self.symlinks.push((path.into(), target));
        } else if root.join(path.trim_start_matches('/')).exists() {
            self.binds.push(path.into());
        }
    }

    /// Returns whether `path` is already visible through one of the binds or symlinks.
    pub(crate) fn shows(&self, path: &Path) -> bool {
        self.binds.iter().chain(self.symlinks.iter().map(|(link, _)| link)).any(|shown| path.starts_with(shown))
    }
}

/// Removes `.` and `..` from the path without looking at the file system.
fn normal(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(out.pop()),
            Component::CurDir => {}
            other => out.push(other),
        }
    }
    out
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SpecError {
    #[error("`{0}` is not an absolute path without `..`")]
    NotAbsolute(PathBuf),
    #[error("`{0}` lies where a sandbox has its own files")]
    Reserved(PathBuf),
}

/// The directory in which code starts, and to which file paths are relative. It is removed with the sandbox.
pub const WORKSPACE: &str = "/workspace";
/// The directory with the files of a conversation, which can be on a kept volume.
pub const DATA: &str = "/data";
/// The directory in the workspace to which a browser downloads.
const DOWNLOADS: &str = "/workspace/downloads";

/// The directory for downloads if a directory of the host is the workspace: the browser, which is another user, may not
/// write there.
const DOWNLOADS_BESIDE_HOST_FILES: &str = "/tmp/downloads";

impl SandboxSpec {
    /// Returns the directory to which a browser downloads.
    pub fn downloads(&self) -> &'static str {
        downloads(&self.volumes)
    }
}

fn downloads(shared: &[SharedVolumeSpec]) -> &'static str {
    match shared.iter().any(|shared| shared.inside == Path::new(WORKSPACE)) {
        true => DOWNLOADS_BESIDE_HOST_FILES,
        false => DOWNLOADS,
    }
}

/// Paths that belong to the sandbox; nothing of the host may be shown there.
const RESERVED: &[&str] = &["/proc", "/sys", "/dev", WORKSPACE, DATA, "/etc"];

/// Additional reserved paths in a sandbox with a browser.
const RESERVED_FOR_BROWSER: &[&str] = &["/browser", "/uploads"];

/// Additional paths over which no shared volume may be shown, because they exist during the creation.
const RESERVED_FROM_SHARED: &[&str] = &["/.volume", "/.kept", "/.empty", "/.layers", "/.proc-file"];

/// The directories of the sandbox's volume. A shared volume may be shown in them, and in place of the first two.
const SHARED_ON_VOLUME: &[&str] = &[WORKSPACE, DATA, "/tmp"];

/// Where installed packages are in a shared volume that is shown in place of the workspace.
pub const SHARED_PACKAGES: &str = ".sandpool/packages";

/// Returns the host's directory of the workspace among `all` in which this shared volume is the directory for packages.
/// Code can remove or replace that directory, so it is created again for each sandbox and is not required.
pub(crate) fn workspace_of<'a>(packages: &SharedVolumeSpec, all: &'a [SharedVolumeSpec]) -> Option<&'a Path> {
    let workspaces = all.iter().filter(|shared| shared.inside == Path::new(WORKSPACE) && !shared.read_only);
    let mut hosts = workspaces.map(|workspace| workspace.host.as_path());
    hosts.find(|host| packages.host == host.join(SHARED_PACKAGES))
}

impl SharedVolumeSpec {
    /// Returns the directory of the sandbox's volume in which, or in place of which, this directory is shown.
    pub(crate) fn on_volume(&self) -> Option<&'static Path> {
        SHARED_ON_VOLUME.iter().map(Path::new).find(|dir| self.inside.starts_with(dir))
    }
}

impl JailSpec {
    pub(crate) fn downloads(&self) -> &'static str {
        downloads(&self.shared)
    }

    /// Returns the directory that is on the kept volume.
    pub(crate) fn kept_dir(&self) -> Option<&'static str> {
        self.kept.as_ref().map(|_| if self.kept_packages.is_some() { WORKSPACE } else { DATA })
    }

    /// Rejects paths that would cover the sandbox's own parts or lead out of them.
    pub(crate) fn check(&self) -> Result<(), SpecError> {
        let paths = self.runtime.iter().chain(self.files.iter().map(|f| &f.path));
        for path in paths {
            check_form(path)?;
            if self.reserved().any(|r| path.starts_with(r)) || path == Path::new("/tmp") {
                return Err(SpecError::Reserved(path.clone()));
            }
        }
        self.shared.iter().enumerate().try_for_each(|(number, shared)| self.check_shared(number, shared))
    }

    fn reserved(&self) -> impl Iterator<Item = &Path> {
        let browser = if self.browser.is_some() { RESERVED_FOR_BROWSER } else { &[] };
        RESERVED.iter().chain(browser).map(Path::new)
    }

    /// Rejects a shared volume that would hide a part of the sandbox, or in which a part of the sandbox would be
    /// created.
    fn check_shared(&self, number: usize, shared: &SharedVolumeSpec) -> Result<(), SpecError> {
        let inside = shared.inside.as_path();
        check_form(inside)?;
        let on_volume = shared.on_volume();
        // Runtimes can be below `/tmp`, the whole `/data` can be a kept volume, and the browser's downloads are its own.
        let kept = self.kept_dir().filter(|dir| *dir == DATA || inside == Path::new(dir));
        let browser = self.browser.as_ref().map(|_| self.downloads());
        let fixed = [Some("/tmp").filter(|tmp| inside == Path::new(tmp)), kept, browser];
        let own = self.reserved().filter(|own| Some(*own) != on_volume);
        let own = own.chain(RESERVED_FROM_SHARED.iter().copied().chain(fixed.into_iter().flatten()).map(Path::new));
        let host = self.host.binds.iter().chain(self.host.symlinks.iter().map(|(link, _)| link));
        let files = self.files.iter().map(|f| &f.path);
        let others = self.shared[..number].iter().map(|s| &s.inside);
        let mut taken = own.chain(host.chain(&self.runtime).chain(files).chain(others).map(PathBuf::as_path));
        if taken.any(|path| path.starts_with(inside) || inside.starts_with(path)) {
            return Err(SpecError::Reserved(inside.to_owned()));
        }
        Ok(())
    }
}

/// Returns whether a file or directory is on a file system that shows the Linux kernel and holds no files of anybody.
pub fn is_kernel_file_system(found: impl AsFd) -> bool {
    const KERNELS: [u64; 23] = [
        0x9fa0,      // proc
        0x6265_6572, // sysfs
        0x0027_e0eb, // cgroup
        0x6367_7270, // cgroup2
        0x1cd1,      // devpts
        0x6462_6720, // debugfs
        0x7472_6163, // tracefs
        0x7363_6673, // securityfs
        0xf97c_ff8c, // selinuxfs
        0x4341_5d53, // smackfs
        0x5a3c_69f0, // apparmorfs
        0x6165_676c, // pstore
        0xcafe_4a11, // bpf
        0x6265_6570, // configfs
        0xde5e_81e4, // efivarfs
        0x4249_4e4d, // binfmt_misc
        0x1980_0202, // mqueue
        0x9584_58f6, // hugetlbfs
        0x6e73_6673, // nsfs
        0x5049_4446, // pidfs
        0x6573_5543, // fusectl
        0x0765_5821, // resctrl
        0x6c6f_6f70, // binder
    ];
    // The number is signed on some architectures; the upper half is then a copy of its sign.
    rustix::fs::fstatfs(found).is_ok_and(|found| KERNELS.contains(&(found.f_type as u64 & 0xffff_ffff)))
}

fn check_form(path: &Path) -> Result<(), SpecError> {
    if !path.is_absolute() || normal(path) != *path || path == Path::new("/") {
        return Err(SpecError::NotAbsolute(path.to_owned()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Covers W17 of the hostile list.
    #[test]
    fn a_sandbox_has_so_few_terminals_that_hundreds_do_not_exhaust_the_hosts() {
        let root = crate::test_dir("ptys");
        let dir = root.join("proc/sys/kernel/pty");
        fs::create_dir_all(&dir).unwrap();
        for (max, reserve, each) in [(4096, 1024, 8), (32_768, 1024, 8), (1792, 1024, 2), (1024, 1024, 1), (0, 1024, 1)]
        {
            fs::write(dir.join("max"), format!("{max}\n")).unwrap();
            fs::write(dir.join("reserve"), format!("{reserve}\n")).unwrap();
            assert_eq!(Host::detect(&root).ptys, each, "{max} {reserve}");
        }
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn text_stays_readable_on_the_wire_and_bytes_survive() {
        for (bytes, json) in [(b"x = 1".to_vec(), "\"x = 1\""), (vec![0xff, 0], "[255,0]")] {
            let content = Content::from(bytes.clone());
            assert_eq!(serde_json::to_string(&content).unwrap(), json);
            assert_eq!(serde_json::from_str::<Content>(json).unwrap().as_bytes(), bytes);
        }
    }
}
