//! What the host looks like: what no attempt may change, and what nothing may leave behind.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Read};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

pub fn uid() -> u32 {
    rustix::process::getuid().as_raw()
}

/// What a sandbox loses sight of comes to us, where it is counted.
pub fn become_subreaper() -> io::Result<()> {
    Ok(rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?)
}

/// A listener on an abstract name of the host.
pub struct Canary {
    name: String,
    listener: UnixListener,
}

impl Canary {
    pub fn listen() -> io::Result<Self> {
        let name = format!("sandpool-canary-{}", std::process::id());
        let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name)?)?;
        listener.set_nonblocking(true)?;
        Ok(Self { name, listener })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn take_visitors(&self) -> usize {
        std::iter::from_fn(|| self.listener.accept().ok()).count()
    }
}

/// Names, settings, the clock, and files of the base through the page cache and around it.
#[derive(Debug, PartialEq, Eq)]
pub struct Facts(BTreeMap<String, String>);

const SETTINGS: &[&str] = &[
    "kernel/hostname",
    "kernel/domainname",
    "kernel/core_pattern",
    "kernel/core_uses_pid",
    "kernel/modprobe",
    "kernel/panic",
    "kernel/randomize_va_space",
    "kernel/sysrq",
    "kernel/unprivileged_bpf_disabled",
    "kernel/perf_event_paranoid",
    "kernel/pid_max",
    "kernel/threads-max",
    "kernel/yama/ptrace_scope",
    "vm/overcommit_memory",
    "vm/drop_caches",
    "vm/swappiness",
    "fs/suid_dumpable",
    "fs/protected_symlinks",
    "fs/file-max",
    "net/ipv4/ip_forward",
    "user/max_user_namespaces",
];
const BASE: &[&str] = &["/usr/bin/env", "/bin/sh", "/usr/bin/id"];

impl Facts {
    pub fn gather() -> Self {
        let mut facts = BTreeMap::new();
        for setting in SETTINGS {
            if let Ok(value) = fs::read_to_string(Path::new("/proc/sys").join(setting)) {
                facts.insert((*setting).to_owned(), value.trim().to_owned());
            }
        }
        for path in BASE {
            let cached = fs::read(path).map(|b| checksum(&b)).unwrap_or_default();
            facts.insert(format!("{path} in the cache"), cached.to_string());
            // Where the file system cannot do it the page cache is all there is.
            let stored = read_around_the_cache(Path::new(path)).map_or(cached, |b| checksum(&b));
            facts.insert(format!("{path} on the disk"), stored.to_string());
        }
        facts.insert("clock".into(), clock_offset().to_string());
        Self(facts)
    }

    pub fn compared_with(&self, before: &Self) -> String {
        let differs = |(k, v): &(&String, &String)| before.0.get(*k) != Some(*v);
        self.0.iter().filter(differs).map(|(k, v)| format!("{k} is now `{v}`")).collect::<Vec<_>>().join(", ")
    }
}

/// Boot time as the wall clock has it, to the minute: moves only when somebody sets the clock.
fn clock_offset() -> u64 {
    let since_boot = rustix::time::clock_gettime(rustix::time::ClockId::Boottime).tv_sec as u64;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    (now - since_boot + 30) / 60
}

/// FNV-1a: enough to see a change, and nothing to depend on.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, b| (sum ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3))
}

fn read_around_the_cache(path: &Path) -> io::Result<Vec<u8>> {
    const BLOCK: usize = 4096;
    let mut file = fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)?;
    let length = file.metadata()?.len() as usize;
    let mut space = vec![0; length.next_multiple_of(BLOCK) + BLOCK];
    let aligned = space.as_ptr().align_offset(BLOCK);
    let buffer = &mut space[aligned..aligned + length.next_multiple_of(BLOCK)];
    let mut filled = 0;
    while filled < length {
        match file.read(&mut buffer[filled..])? {
            0 => break,
            n => filled += n,
        }
    }
    Ok(buffer[..filled].to_vec())
}

/// What can be left behind.
#[derive(Debug, PartialEq, Eq)]
pub struct Left {
    processes: BTreeSet<String>,
    mounts: BTreeSet<String>,
    cgroups: BTreeSet<PathBuf>,
    loops: BTreeSet<String>,
    sockets_and_images: BTreeSet<PathBuf>,
}

impl Left {
    /// While the server runs: its own cgroups are there from its start, and are to go with it.
    pub fn before(state: &Path, label: &str) -> Self {
        Self { cgroups: BTreeSet::new(), ..Self::count(state, label) }
    }

    fn count(state: &Path, label: &str) -> Self {
        Self {
            processes: children(),
            mounts: lines("/proc/self/mountinfo"),
            cgroups: below(Path::new("/sys/fs/cgroup"), 6).filter(|p| p.to_string_lossy().contains(label)).collect(),
            loops: loops(state),
            sockets_and_images: below(state, 6)
                .filter(|p| p.ends_with("guest.sock") || p.ends_with("volume.img"))
                .collect(),
        }
    }

    /// Other programs of this machine mount and unmount too: a difference has to last to count.
    pub async fn count_when_settled(state: &Path, label: &str, before: &Self) -> Self {
        let deadline = Instant::now() + Duration::from_secs(5);
        loop {
            let now = Self::count(state, label);
            // The launcher, one child, was there before and has ended.
            let now = Self { processes: now.processes.difference(&before.processes).cloned().collect(), ..now };
            let settled = now.processes.is_empty()
                && now.mounts == before.mounts
                && now.cgroups.is_empty()
                && now.loops.is_empty();
            if settled || Instant::now() > deadline {
                return if now.processes.is_empty() {
                    Self { processes: before.processes.clone(), ..now }
                } else {
                    now
                };
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    pub fn compared_with(&self, before: &Self) -> String {
        if self == before { "as before".into() } else { format!("now {self:?}, before {before:?}") }
    }
}

fn lines(path: &str) -> BTreeSet<String> {
    fs::read_to_string(path).unwrap_or_default().lines().map(str::to_owned).collect()
}

/// Processes whose parent we are: the launcher, and what it lost.
fn children() -> BTreeSet<String> {
    let me = std::process::id().to_string();
    let stat = |dir: &fs::DirEntry| fs::read_to_string(dir.path().join("stat")).ok();
    let parent = |stat: &String| stat.rsplit(')').next()?.split_whitespace().nth(1).map(str::to_owned);
    let found = fs::read_dir("/proc").into_iter().flatten().flatten().filter_map(|d| stat(&d));
    found.filter(|s| parent(s).as_ref() == Some(&me)).filter_map(|s| s.split(' ').next().map(str::to_owned)).collect()
}

fn loops(state: &Path) -> BTreeSet<String> {
    let backing = |dir: &fs::DirEntry| fs::read_to_string(dir.path().join("loop/backing_file")).ok();
    let ours = |file: &String| file.starts_with(&*state.to_string_lossy());
    fs::read_dir("/sys/block").into_iter().flatten().flatten().filter_map(|d| backing(&d)).filter(ours).collect()
}

fn below(dir: &Path, depth: usize) -> Box<dyn Iterator<Item = PathBuf>> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    Box::new(entries.flat_map(move |e| {
        let (path, is_dir) = (e.path(), e.file_type().is_ok_and(|t| t.is_dir()));
        let deeper = if is_dir && depth > 0 { below(&path, depth - 1) } else { Box::new(std::iter::empty()) };
        std::iter::once(path).chain(deeper)
    }))
}
