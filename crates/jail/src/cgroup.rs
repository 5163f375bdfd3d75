//! Memory, cpu and process limits on cgroup v1, v2 and both at once.
//!
//! A tree `sandpool-<label>/<group>/…/<sandbox>` under the server's own cgroup of each hierarchy: the operator's limits on the
//! server hold for its sandboxes too. A sandbox with a browser has two below its own, `code` and `browser`, since on v2 processes
//! live in leaves only; the limits of the sandbox hold for both together, those of the browser for it alone, and of processes the code
//! has the rest. Every path goes through a given file-system root, so that layouts this machine does
//! not have are tested against a directory.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Controller {
    Memory,
    Cpu,
    Pids,
}

impl Controller {
    pub const ALL: [Self; 3] = [Self::Memory, Self::Cpu, Self::Pids];

    pub fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Cpu => "cpu",
            Self::Pids => "pids",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Version {
    V1,
    V2,
}

/// One hierarchy that carries at least one controller we use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hierarchy {
    pub version: Version,
    pub controllers: Vec<Controller>,
    /// Where our tree hangs: the server's own cgroup, or on v2 the nearest one above it that may have children with limits.
    pub base: PathBuf,
}

/// A cgroup around sandboxes, shared by those that name it below the same outer ones.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    pub name: String,
    pub limits: Limits,
}

/// What can be limited here, and why the rest cannot.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Layout {
    pub hierarchies: Vec<Hierarchy>,
    pub absent: BTreeMap<Controller, String>,
}

/// Limits of one cgroup; `None` leaves the kernel's default, no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Limits {
    pub memory_bytes: Option<u64>,
    pub cpu_millis: Option<u32>,
    pub pids: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Usage {
    pub memory_bytes: Option<u64>,
    pub pids: Option<u32>,
    /// But for the browser's.
    pub oom_kills: u64,
    pub browser_oom_kills: u64,
}

struct Mount {
    root: PathBuf,
    point: PathBuf,
    kind: Version,
    options: Vec<String>,
}

impl Layout {
    /// Reads `/proc/self/cgroup` and `/proc/self/mountinfo` below `root` and tries out where a tree can hang. `ours` are the
    /// processes of this server, which may be moved into a cgroup of their own where v2 asks for that.
    pub fn detect(root: &Path, ours: &[Pid]) -> Self {
        let read = |p: &str| fs::read_to_string(root.join(p)).unwrap_or_default();
        let memberships = memberships(&read("proc/self/cgroup"));
        let mounts = mounts(&read("proc/self/mountinfo"));
        let mut layout = Self::default();
        let mut wanted = Vec::new();
        for controller in Controller::ALL {
            match v1_base(root, controller, &memberships, &mounts) {
                Some(Ok(base)) => layout.add(Version::V1, controller, base),
                Some(Err(why)) => drop(layout.absent.insert(controller, why)),
                None => wanted.push(controller),
            }
        }
        let own = memberships.iter().find(|(c, _)| c.is_empty());
        match (own, mounts.iter().find(|m| m.kind == Version::V2)) {
            (Some((_, path)), Some(mount)) => {
                let top = under(root, &mount.point);
                layout.add_v2(&top, &directory(root, mount, path), &wanted, ours);
            }
            _ => layout.absent.extend(wanted.iter().map(|c| (*c, "no cgroup v2 hierarchy is mounted".to_owned()))),
        }
        layout
    }

    /// A process is in one v2 cgroup only, so one base has to serve all controllers: the nearest with the most.
    fn add_v2(&mut self, top: &Path, own: &Path, wanted: &[Controller], ours: &[Pid]) {
        let mut best: Option<(PathBuf, Vec<Controller>)> = None;
        for dir in own.ancestors().take_while(|dir| dir.starts_with(top)) {
            let usable: Vec<_> = wanted.iter().copied().filter(|c| v2_usable(dir, *c, ours)).collect();
            if best.as_ref().map_or(0, |(_, most)| most.len()) < usable.len() && try_mkdir(dir).is_ok() {
                best = Some((dir.to_owned(), usable));
            }
        }
        let (base, usable) = best.unwrap_or_default();
        for controller in wanted {
            let name = controller.name();
            if usable.contains(controller) {
                self.add(Version::V2, *controller, base.clone());
            } else if lists(top, "cgroup.controllers", *controller) {
                let why = format!("the cgroup v2 controller `{name}` is not delegated to `{}`", own.display());
                self.absent.insert(*controller, why);
            } else {
                self.absent.insert(*controller, format!("cgroup v2 has no controller `{name}` here"));
            }
        }
    }

    fn add(&mut self, version: Version, controller: Controller, base: PathBuf) {
        match self.hierarchies.iter_mut().find(|h| h.base == base) {
            Some(hierarchy) => hierarchy.controllers.push(controller),
            None => self.hierarchies.push(Hierarchy { version, controllers: vec![controller], base }),
        }
    }

    pub fn has(&self, controller: Controller) -> bool {
        self.hierarchies.iter().any(|h| h.controllers.contains(&controller))
    }

    /// The same layout, with our own directory in each hierarchy as the base.
    pub fn tree(&self, label: &str) -> Tree {
        let mut hierarchies = self.hierarchies.clone();
        for hierarchy in &mut hierarchies {
            hierarchy.base.push(format!("sandpool-{label}"));
        }
        Tree { hierarchies }
    }
}

/// `controllers → path` of `/proc/self/cgroup`; v2 has the empty controller list.
fn memberships(text: &str) -> Vec<(Vec<String>, PathBuf)> {
    let line = |l: &str| {
        let mut parts = l.splitn(3, ':').skip(1);
        let controllers = parts.next()?.split(',').filter(|c| !c.is_empty()).map(str::to_owned).collect();
        Some((controllers, PathBuf::from(parts.next()?)))
    };
    text.lines().filter_map(line).collect()
}

fn mounts(text: &str) -> Vec<Mount> {
    let line = |l: &str| {
        let (left, right) = l.split_once(" - ")?;
        let left: Vec<&str> = left.split(' ').collect();
        let right: Vec<&str> = right.split(' ').collect();
        let kind = match *right.first()? {
            "cgroup" => Version::V1,
            "cgroup2" => Version::V2,
            _ => return None,
        };
        let options = right.get(2)?.split(',').map(str::to_owned).collect();
        Some(Mount { root: left.get(3)?.into(), point: left.get(4)?.into(), kind, options })
    };
    text.lines().filter_map(line).collect()
}

fn v1_base(
    root: &Path,
    controller: Controller,
    memberships: &[(Vec<String>, PathBuf)],
    mounts: &[Mount],
) -> Option<Result<PathBuf, String>> {
    let name = controller.name();
    let (_, path) = memberships.iter().find(|(c, _)| c.iter().any(|c| c == name))?;
    let Some(mount) = mounts.iter().find(|m| m.kind == Version::V1 && m.options.iter().any(|o| o == name)) else {
        return Some(Err(format!("the cgroup v1 controller `{name}` is not mounted")));
    };
    let base = directory(root, mount, path);
    Some(match try_mkdir(&base) {
        Ok(()) => Ok(base),
        Err(e) => Err(format!("cannot make a cgroup in `{}`: {e}", base.display())),
    })
}

/// `path` as seen through the mount: below its root, or the mount point itself when a cgroup namespace hides the way.
fn directory(root: &Path, mount: &Mount, path: &Path) -> PathBuf {
    let point = under(root, &mount.point);
    match path.strip_prefix(&mount.root) {
        Ok(rest) if !rest.components().any(|c| c == std::path::Component::ParentDir) => {
            let mut directory = point;
            directory.extend(rest.components());
            directory
        }
        _ => point,
    }
}

fn under(root: &Path, absolute: &Path) -> PathBuf {
    root.join(absolute.strip_prefix("/").unwrap_or(absolute))
}

fn try_mkdir(base: &Path) -> io::Result<()> {
    let probe = base.join(format!("sandpool-probe-{}", std::process::id()));
    fs::create_dir(&probe)?;
    fs::remove_dir(probe)
}

fn lists(dir: &Path, file: &str, controller: Controller) -> bool {
    fs::read_to_string(dir.join(file)).is_ok_and(|text| text.split_whitespace().any(|c| c == controller.name()))
}

/// Whether children of `dir` can have limits of this kind, after enabling them if need be. v2 forbids that for a cgroup that has
/// processes itself (the topmost one excepted); when those are only ours, they move into a child.
fn v2_usable(dir: &Path, controller: Controller, ours: &[Pid]) -> bool {
    if !lists(dir, "cgroup.controllers", controller) {
        return false;
    }
    let enabled = || lists(dir, "cgroup.subtree_control", controller);
    let enable = || fs::write(dir.join("cgroup.subtree_control"), format!("+{}", controller.name()));
    if enabled() || (enable().is_ok() && enabled()) {
        return true;
    }
    let present = members(dir);
    if present.is_empty() || present.iter().any(|pid| !ours.contains(pid)) {
        return false;
    }
    let leaf = dir.join("sandpool-server");
    let _ = fs::create_dir(&leaf);
    let moved = present.iter().all(|p| fs::write(leaf.join("cgroup.procs"), p.as_raw_nonzero().to_string()).is_ok());
    moved && enable().is_ok() && enabled()
}

/// Our own part of each hierarchy.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Tree {
    hierarchies: Vec<Hierarchy>,
}

impl Tree {
    /// The top directory of our tree in each hierarchy.
    pub fn tops(&self) -> Vec<PathBuf> {
        self.hierarchies.iter().map(|h| h.base.clone()).collect()
    }

    /// `groups` from the outermost on; `split` when a browser has a part of its own.
    pub fn sandbox(&self, groups: &[Group], sandbox: &str, split: bool) -> Cgroup {
        let dir = |h: &Hierarchy| around(h, groups).pop().unwrap_or_else(|| h.base.clone()).join(sandbox);
        Cgroup { dirs: self.hierarchies.iter().map(|h| (h.clone(), dir(h))).collect(), split }
    }

    /// Makes the tops, which stay as long as the server.
    pub fn open(&self) -> io::Result<()> {
        self.hierarchies.iter().try_for_each(|h| make(h, &h.base, Limits::default(), Kind::Group))
    }

    /// Makes the sandbox's cgroup with its limits, and those of its groups that do not exist yet.
    pub fn create(&self, groups: &[Group], sandbox: (&str, Limits), browser: Option<Limits>) -> io::Result<Cgroup> {
        let cgroup = self.sandbox(groups, sandbox.0, browser.is_some());
        let kind = if browser.is_some() { Kind::Split } else { Kind::Leaf };
        for (hierarchy, dir) in &cgroup.dirs {
            // The groups are mostly there, and every look at them costs as much as making one.
            match make(hierarchy, dir, sandbox.1, kind) {
                Err(e) if e.kind() == ErrorKind::NotFound && !dir.exists() => {
                    for (parent, group) in around(hierarchy, groups).iter().zip(groups) {
                        make(hierarchy, parent, group.limits, Kind::Group)?;
                    }
                    make(hierarchy, dir, sandbox.1, kind)?;
                }
                other => other?,
            }
            if let Some(limits) = browser {
                // Memory is lent to whoever needs it; processes that the other part may need are not.
                let pids = sandbox.1.pids.zip(limits.pids).map(|(all, browsers)| all.saturating_sub(browsers));
                make(hierarchy, &dir.join(CODE), Limits { pids, ..Limits::default() }, Kind::Leaf)?;
                make(hierarchy, &dir.join(BROWSER), limits, Kind::Leaf)?;
            }
        }
        Ok(cgroup)
    }

    /// Removes what is empty of the groups, from the innermost on; what is in use stays.
    pub fn tidy(&self, groups: &[Group]) {
        for hierarchy in &self.hierarchies {
            let _ = around(hierarchy, groups).iter().rev().try_for_each(fs::remove_dir);
        }
    }
}

/// The directories of the groups, from the outermost on.
fn around(hierarchy: &Hierarchy, groups: &[Group]) -> Vec<PathBuf> {
    let deeper = |dir: &mut PathBuf, group: &Group| {
        dir.push(&group.name);
        Some(dir.clone())
    };
    groups.iter().scan(hierarchy.base.clone(), deeper).collect()
}

fn named(dir: &Path) -> impl FnOnce(io::Error) -> io::Error + '_ {
    move |e| io::Error::new(e.kind(), format!("`{}`: {e}", dir.display()))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Around sandboxes.
    Group,
    /// A sandbox's own, in two parts.
    Split,
    /// With processes in it.
    Leaf,
}

fn make(hierarchy: &Hierarchy, dir: &Path, limits: Limits, kind: Kind) -> io::Result<()> {
    match fs::create_dir(dir) {
        // A group is shared. A sandbox's own is new, or somebody else decides what is in it and under which limits.
        Err(e) if kind == Kind::Group && e.kind() == ErrorKind::AlreadyExists => return Ok(()),
        other => other.map_err(named(dir))?,
    }
    if hierarchy.version == Version::V2 && kind != Kind::Leaf {
        let enable: Vec<String> = hierarchy.controllers.iter().map(|c| format!("+{}", c.name())).collect();
        write(dir, "cgroup.subtree_control", &enable.join(" "))?;
    }
    hierarchy.controllers.iter().try_for_each(|c| set(hierarchy.version, *c, dir, limits))
}

fn write(dir: &Path, file: &str, value: &str) -> io::Result<()> {
    let path = dir.join(file);
    fs::write(&path, value).map_err(named(&path))
}

/// v1 counts the buffers of sockets apart from memory (TCP and UDP, whatever the file's name says), and only in a cgroup in which this
/// was written once: also in one that has no limit of its own. Absent where the kernel has no v1 accounting; `doctor` says so.
fn socket_buffers(dir: &Path, memory: Option<u64>) -> io::Result<()> {
    let limit = memory.map_or_else(|| "-1".to_owned(), |bytes| (bytes / SOCKET_SHARE).to_string());
    match fs::write(dir.join(SOCKET_LIMIT), limit) {
        Err(e) if e.kind() != ErrorKind::NotFound && e.kind() != ErrorKind::PermissionDenied => {
            Err(named(&dir.join(SOCKET_LIMIT))(e))
        }
        _ => Ok(()),
    }
}

/// Of the memory limit, what socket buffers may take besides.
const SOCKET_SHARE: u64 = 4;
pub const SOCKET_LIMIT: &str = "memory.kmem.tcp.limit_in_bytes";

fn set(version: Version, controller: Controller, dir: &Path, limits: Limits) -> io::Result<()> {
    const PERIOD: u64 = 100_000;
    match (version, controller) {
        (Version::V1, Controller::Memory) => {
            socket_buffers(dir, limits.memory_bytes)?;
            let Some(bytes) = limits.memory_bytes else { return Ok(()) };
            write(dir, "memory.limit_in_bytes", &bytes.to_string())?;
            // Memory and swap together; absent when the kernel does not account swap, and then swap is not limited.
            match fs::write(dir.join("memory.memsw.limit_in_bytes"), bytes.to_string()) {
                Err(e) if e.kind() != ErrorKind::NotFound && e.kind() != ErrorKind::PermissionDenied => {
                    Err(named(&dir.join("memory.memsw.limit_in_bytes"))(e))
                }
                _ => Ok(()),
            }
        }
        (Version::V2, Controller::Memory) => {
            let Some(bytes) = limits.memory_bytes else { return Ok(()) };
            write(dir, "memory.max", &bytes.to_string())?;
            match fs::write(dir.join("memory.swap.max"), "0") {
                Err(e) if e.kind() != ErrorKind::NotFound && e.kind() != ErrorKind::PermissionDenied => {
                    Err(named(&dir.join("memory.swap.max"))(e))
                }
                _ => Ok(()),
            }
        }
        (_, Controller::Cpu) => {
            let Some(millis) = limits.cpu_millis else { return Ok(()) };
            let quota = (u64::from(millis) * PERIOD / 1000).max(1000);
            if version == Version::V2 {
                return write(dir, "cpu.max", &format!("{quota} {PERIOD}"));
            }
            write(dir, "cpu.cfs_period_us", &PERIOD.to_string())?;
            match write(dir, "cpu.cfs_quota_us", &quota.to_string()) {
                // v1 takes no more than a cgroup above has, and then that one is the limit.
                Err(e) if e.kind() == ErrorKind::InvalidInput => Ok(()),
                other => other,
            }
        }
        (_, Controller::Pids) => limits.pids.map_or(Ok(()), |pids| write(dir, "pids.max", &pids.to_string())),
    }
}

/// The parts of a sandbox that has a browser.
const CODE: &str = "code";
const BROWSER: &str = "browser";

/// The directories of one sandbox, one per hierarchy.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Cgroup {
    dirs: Vec<(Hierarchy, PathBuf)>,
    split: bool,
}

/// The directories in which processes of one kind live, one per hierarchy.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Part {
    dirs: Vec<(Version, PathBuf)>,
}

impl Cgroup {
    /// Where the guest and what it starts live.
    pub fn code(&self) -> Part {
        if self.split { self.part(CODE) } else { self.part("") }
    }

    /// Where the browser lives, if there is room for one.
    pub fn browser(&self) -> Option<Part> {
        self.split.then(|| self.part(BROWSER))
    }

    fn part(&self, name: &str) -> Part {
        let below = |dir: &Path| if name.is_empty() { dir.to_owned() } else { dir.join(name) };
        Part { dirs: self.dirs.iter().map(|(h, dir)| (h.version, below(dir))).collect() }
    }

    fn dir(&self, controller: Controller) -> Option<(Version, &Path)> {
        let found = self.dirs.iter().find(|(h, _)| h.controllers.contains(&controller))?;
        Some((found.0.version, &found.1))
    }

    /// The kernel's figures of what it holds for this sandbox, parts included.
    pub fn memory_stat(&self) -> Option<PathBuf> {
        self.dir(Controller::Memory).map(|(_, dir)| dir.join("memory.stat"))
    }

    pub fn usage(&self) -> Usage {
        let number = |dir: &Path, file: &str| fs::read_to_string(dir.join(file)).ok()?.trim().parse::<u64>().ok();
        let mut usage = Usage::default();
        if let Some((version, dir)) = self.dir(Controller::Memory) {
            let (current, events) = match version {
                Version::V1 => ("memory.usage_in_bytes", "memory.oom_control"),
                Version::V2 => ("memory.current", "memory.events"),
            };
            usage.memory_bytes = number(dir, current);
            let kills = |dir: &Path| counter(&fs::read_to_string(dir.join(events)).unwrap_or_default(), "oom_kill");
            usage.oom_kills = kills(dir);
            if self.split {
                usage.browser_oom_kills = kills(&dir.join(BROWSER));
                // v1 counts each directory's own, v2 those below it too.
                usage.oom_kills = match version {
                    Version::V1 => usage.oom_kills + kills(&dir.join(CODE)),
                    Version::V2 => usage.oom_kills.saturating_sub(usage.browser_oom_kills),
                };
            }
        }
        if let Some((_, dir)) = self.dir(Controller::Pids) {
            usage.pids = number(dir, "pids.current").and_then(|n| u32::try_from(n).ok());
        }
        usage
    }

    /// Removes the directories; `Err` with one that is still busy (dead processes leave a cgroup a moment after they are reaped).
    pub fn remove(&self) -> Result<(), (PathBuf, io::Error)> {
        let mut busy = Ok(());
        for (_, dir) in &self.dirs {
            let parts = if self.split { &[CODE, BROWSER][..] } else { &[] };
            for dir in parts.iter().map(|part| dir.join(part)).chain([dir.clone()]) {
                match fs::remove_dir(&dir) {
                    Err(e) if e.kind() != ErrorKind::NotFound => busy = Err((dir, e)),
                    _ => {}
                }
            }
        }
        busy
    }
}

impl Part {
    /// Whether there is no cgroup at all.
    pub fn is_empty(&self) -> bool {
        self.dirs.is_empty()
    }

    /// v1: what a process that begins here writes `0` into. By `tasks`, from the process itself: any other way takes a lock that
    /// costs milliseconds.
    pub fn tasks(&self) -> Vec<PathBuf> {
        self.dirs.iter().filter(|(version, _)| *version == Version::V1).map(|(_, dir)| dir.join("tasks")).collect()
    }

    /// v2: the directory in which a process is born.
    pub fn v2(&self) -> Option<&Path> {
        self.dirs.iter().find(|(version, _)| *version == Version::V2).map(|(_, dir)| dir.as_path())
    }

    /// Kills whoever is in it, and whoever those have made meanwhile. True when nobody is left.
    pub fn kill(&self) -> bool {
        const TURNS: usize = 100;
        for turn in 0..TURNS {
            let found: Vec<_> =
                self.dirs.iter().flat_map(|(_, dir)| members(dir).into_iter().map(move |pid| (dir, pid))).collect();
            if found.is_empty() {
                return true;
            }
            found.into_iter().for_each(|(dir, pid)| kill_member(dir, pid));
            // The dead leave a moment later.
            std::thread::sleep(std::time::Duration::from_millis(turn.min(10) as u64));
        }
        false
    }
}

fn counter(text: &str, name: &str) -> u64 {
    let value = |line: &str| line.split_once(' ').filter(|(n, _)| *n == name).and_then(|(_, v)| v.trim().parse().ok());
    text.lines().find_map(value).unwrap_or(0)
}

/// Kills every process in the tree at `top` and removes its directories: what a dead server left. True when nothing remains.
pub fn sweep(top: &Path) -> bool {
    let Ok(entries) = fs::read_dir(top) else { return !top.exists() };
    let mut gone = true;
    for entry in entries.flatten().filter(|e| e.file_type().is_ok_and(|t| t.is_dir())) {
        gone &= sweep(&entry.path());
    }
    for pid in members(top) {
        kill_member(top, pid);
    }
    gone && fs::remove_dir(top).is_ok()
}

fn members(dir: &Path) -> Vec<Pid> {
    let text = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
    text.lines().filter_map(|l| Pid::from_raw(l.parse().ok()?)).collect()
}

/// The number may have passed to somebody else since it was read: hold the process first, then look whether it is (still) a member.
fn kill_member(dir: &Path, pid: Pid) {
    if let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty())
        && members(dir).contains(&pid)
    {
        let _ = pidfd_send_signal(pidfd, Signal::KILL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { memory_bytes: Some(64 << 20), cpu_millis: Some(1500), pids: Some(32) };

    fn put(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// Every file below `root/sys` that is not part of the fixture, with its content.
    fn written(dir: &Path, base: &Path, out: &mut Vec<String>) {
        let mut entries: Vec<_> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
        entries.sort();
        for path in entries {
            let shown = path.strip_prefix(base).unwrap().display().to_string();
            if path.is_dir() {
                written(&path, base, out);
            } else if shown.contains("sandpool-") {
                out.push(format!("{shown} = {}", fs::read_to_string(&path).unwrap()));
            }
        }
    }

    fn groups() -> Vec<Group> {
        let memory = |memory| Limits { memory_bytes: Some(memory), ..Limits::default() };
        let group = |name: &str, limits| Group { name: name.into(), limits };
        vec![group("g", memory(1 << 30)), group("h", Limits { cpu_millis: Some(500), ..memory(1 << 29) })]
    }

    fn create_in(root: &Path) -> (Layout, Vec<String>) {
        let layout = Layout::detect(root, &[]);
        layout.tree("t").open().unwrap();
        layout.tree("t").create(&groups(), ("s", LIMITS), None).unwrap();
        let browser = Limits { memory_bytes: Some(48 << 20), cpu_millis: None, pids: Some(24) };
        layout.tree("t").create(&groups(), ("b", LIMITS), Some(browser)).unwrap();
        let mut out = Vec::new();
        written(&root.join("sys"), root, &mut out);
        (layout, out)
    }

    #[test]
    fn v2_hangs_below_the_nearest_cgroup_that_may_have_children_with_limits() {
        let root = crate::test_dir("cg2");
        put(&root, "proc/self/cgroup", "0::/user.slice/server.scope\n");
        put(&root, "proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n");
        put(&root, "sys/fs/cgroup/cgroup.controllers", "cpuset cpu io memory pids\n");
        put(&root, "sys/fs/cgroup/user.slice/cgroup.controllers", "cpu memory pids\n");
        put(&root, "sys/fs/cgroup/user.slice/cgroup.subtree_control", "cpu memory pids\n");
        put(&root, "sys/fs/cgroup/user.slice/server.scope/cgroup.procs", "4\n");
        let (layout, out) = create_in(&root);
        assert!(layout.absent.is_empty());
        insta::assert_snapshot!(out.join("\n"), @r"
        sys/fs/cgroup/user.slice/sandpool-t/cgroup.subtree_control = +memory +cpu +pids
        sys/fs/cgroup/user.slice/sandpool-t/g/cgroup.subtree_control = +memory +cpu +pids
        sys/fs/cgroup/user.slice/sandpool-t/g/h/b/browser/memory.max = 50331648
        sys/fs/cgroup/user.slice/sandpool-t/g/h/b/browser/memory.swap.max = 0
        sys/fs/cgroup/user.slice/sandpool-t/g/h/b/browser/pids.max = 24
        sys/fs/cgroup/user.slice/sandpool-t/g/h/b/cgroup.subtree_control = +memory +cpu +pids
        sys/fs/cgroup/user.slice/sandpool-t/g/h/b/code/pids.max = 8
        sys/fs/cgroup/user.slice/sandpool-t/g/h/b/cpu.max = 150000 100000
        sys/fs/cgroup/user.slice/sandpool-t/g/h/b/memory.max = 67108864
        sys/fs/cgroup/user.slice/sandpool-t/g/h/b/memory.swap.max = 0
        sys/fs/cgroup/user.slice/sandpool-t/g/h/b/pids.max = 32
        sys/fs/cgroup/user.slice/sandpool-t/g/h/cgroup.subtree_control = +memory +cpu +pids
        sys/fs/cgroup/user.slice/sandpool-t/g/h/cpu.max = 50000 100000
        sys/fs/cgroup/user.slice/sandpool-t/g/h/memory.max = 536870912
        sys/fs/cgroup/user.slice/sandpool-t/g/h/memory.swap.max = 0
        sys/fs/cgroup/user.slice/sandpool-t/g/h/s/cpu.max = 150000 100000
        sys/fs/cgroup/user.slice/sandpool-t/g/h/s/memory.max = 67108864
        sys/fs/cgroup/user.slice/sandpool-t/g/h/s/memory.swap.max = 0
        sys/fs/cgroup/user.slice/sandpool-t/g/h/s/pids.max = 32
        sys/fs/cgroup/user.slice/sandpool-t/g/memory.max = 1073741824
        sys/fs/cgroup/user.slice/sandpool-t/g/memory.swap.max = 0
        ");
        let cgroup = layout.tree("t").sandbox(&groups(), "s", false);
        let code = cgroup.code();
        assert_eq!((code.tasks(), cgroup.browser()), (vec![], None));
        assert!(code.v2().unwrap().ends_with("user.slice/sandpool-t/g/h/s"));
        let split = layout.tree("t").sandbox(&groups(), "b", true);
        assert!(split.code().v2().unwrap().ends_with("user.slice/sandpool-t/g/h/b/code"));
        assert!(split.browser().unwrap().v2().unwrap().ends_with("user.slice/sandpool-t/g/h/b/browser"));
        put(&root, "sys/fs/cgroup/user.slice/sandpool-t/g/h/s/memory.events", "low 0\nhigh 0\noom 3\noom_kill 2\n");
        assert_eq!(cgroup.usage().oom_kills, 2);
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn hybrid_takes_each_controller_from_where_it_is() {
        let root = crate::test_dir("hybrid");
        put(&root, "proc/self/cgroup", "4:memory:/box/a\n3:pids:/\n2:cpu,cpuacct:/\n1:name=systemd:/\n0::/\n");
        put(
            &root,
            "proc/self/mountinfo",
            "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
             35 31 0:32 /box /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
             41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
        );
        for dir in ["cpu,cpuacct", "memory/a", "unified"] {
            fs::create_dir_all(root.join("sys/fs/cgroup").join(dir)).unwrap();
        }
        let (layout, out) = create_in(&root);
        insta::assert_snapshot!(out.join("\n"), @r"
        sys/fs/cgroup/cpu,cpuacct/sandpool-t/g/h/b/cpu.cfs_period_us = 100000
        sys/fs/cgroup/cpu,cpuacct/sandpool-t/g/h/b/cpu.cfs_quota_us = 150000
        sys/fs/cgroup/cpu,cpuacct/sandpool-t/g/h/cpu.cfs_period_us = 100000
        sys/fs/cgroup/cpu,cpuacct/sandpool-t/g/h/cpu.cfs_quota_us = 50000
        sys/fs/cgroup/cpu,cpuacct/sandpool-t/g/h/s/cpu.cfs_period_us = 100000
        sys/fs/cgroup/cpu,cpuacct/sandpool-t/g/h/s/cpu.cfs_quota_us = 150000
        sys/fs/cgroup/memory/a/sandpool-t/g/h/b/browser/memory.kmem.tcp.limit_in_bytes = 12582912
        sys/fs/cgroup/memory/a/sandpool-t/g/h/b/browser/memory.limit_in_bytes = 50331648
        sys/fs/cgroup/memory/a/sandpool-t/g/h/b/browser/memory.memsw.limit_in_bytes = 50331648
        sys/fs/cgroup/memory/a/sandpool-t/g/h/b/code/memory.kmem.tcp.limit_in_bytes = -1
        sys/fs/cgroup/memory/a/sandpool-t/g/h/b/memory.kmem.tcp.limit_in_bytes = 16777216
        sys/fs/cgroup/memory/a/sandpool-t/g/h/b/memory.limit_in_bytes = 67108864
        sys/fs/cgroup/memory/a/sandpool-t/g/h/b/memory.memsw.limit_in_bytes = 67108864
        sys/fs/cgroup/memory/a/sandpool-t/g/h/memory.kmem.tcp.limit_in_bytes = 134217728
        sys/fs/cgroup/memory/a/sandpool-t/g/h/memory.limit_in_bytes = 536870912
        sys/fs/cgroup/memory/a/sandpool-t/g/h/memory.memsw.limit_in_bytes = 536870912
        sys/fs/cgroup/memory/a/sandpool-t/g/h/s/memory.kmem.tcp.limit_in_bytes = 16777216
        sys/fs/cgroup/memory/a/sandpool-t/g/h/s/memory.limit_in_bytes = 67108864
        sys/fs/cgroup/memory/a/sandpool-t/g/h/s/memory.memsw.limit_in_bytes = 67108864
        sys/fs/cgroup/memory/a/sandpool-t/g/memory.kmem.tcp.limit_in_bytes = 268435456
        sys/fs/cgroup/memory/a/sandpool-t/g/memory.limit_in_bytes = 1073741824
        sys/fs/cgroup/memory/a/sandpool-t/g/memory.memsw.limit_in_bytes = 1073741824
        sys/fs/cgroup/memory/a/sandpool-t/memory.kmem.tcp.limit_in_bytes = -1
        ");
        assert_eq!(layout.absent[&Controller::Pids], "the cgroup v1 controller `pids` is not mounted");
        let split = layout.tree("t").sandbox(&groups(), "b", true);
        let (code, browser) = (split.code(), split.browser().unwrap());
        assert_eq!((code.tasks().len(), browser.tasks().len(), browser.v2()), (2, 2, None));
        assert!(browser.tasks()[0].ends_with("memory/a/sandpool-t/g/h/b/browser/tasks"));
        // Each directory counts its own there.
        for (part, kills) in [("", 1), ("code", 2), ("browser", 4)] {
            let file = Path::new("sys/fs/cgroup/memory/a/sandpool-t/g/h/b").join(part).join("memory.oom_control");
            put(&root, file.to_str().unwrap(), &format!("oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n"));
        }
        assert_eq!((split.usage().oom_kills, split.usage().browser_oom_kills), (3, 4));
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn without_cgroups_each_controller_says_why_it_is_absent() {
        let root = crate::test_dir("nocg");
        put(&root, "proc/self/cgroup", "0::/\n");
        put(&root, "proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
        put(&root, "sys/fs/cgroup/cgroup.controllers", "\n");
        let layout = Layout::detect(&root, &[]);
        assert!(layout.hierarchies.is_empty());
        assert_eq!(layout.absent[&Controller::Memory], "cgroup v2 has no controller `memory` here");
        fs::remove_dir_all(root).unwrap();
    }
}
