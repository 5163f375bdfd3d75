//! Memory, CPU and process limits on cgroup v1, on v2, and on both at once.
//!
//! The server creates a tree `sandpool-<label>/<group>/…/<sandbox>` under its own cgroup of each hierarchy, and never
//! above that cgroup or its systemd unit: the operator's limits on the server also apply to its sandboxes. A sandbox
//! with a browser has two child cgroups, `code` and `browser`, because on v2 only leaves may contain processes. The
//! limits of the sandbox apply to both together and those of the browser to the browser alone; the process limit of the
//! code is the remainder.
//!
//! [`Layout::look`] only reads. [`Layout::claim`] changes a v2 cgroup so that it can hold a tree, and
//! [`Layout::release`] reverts that. Every path goes through a given file-system root, so that tests can use a
//! directory to imitate layouts that this machine does not have.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use rustix::fs::Access;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

use crate::instance;
use crate::scope::{self, Manager};

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

/// A hierarchy that has at least one of the controllers we use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hierarchy {
    pub version: Version,
    pub controllers: Vec<Controller>,
    /// Parent of our tree: the server's own cgroup, or on v2 an empty one above it in the same delegated unit.
    pub base: PathBuf,
}

/// A cgroup around sandboxes. Sandboxes that name the same group below the same outer groups share it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    pub name: String,
    pub limits: CgroupLimits,
}

/// The reason why a controller cannot be used, and a remedy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Absence {
    pub why: String,
    pub what_to_do: String,
}

impl Absence {
    pub fn new(why: impl Into<String>, what_to_do: impl Into<String>) -> Self {
        Self { why: why.into(), what_to_do: what_to_do.into() }
    }
}

/// The controllers that can be used here, and the reasons why the others cannot.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Layout {
    pub hierarchies: Vec<Hierarchy>,
    pub absent: BTreeMap<Controller, Absence>,
    /// Whether the v2 hierarchy is that of a scope which has not been requested from systemd yet.
    pub scope_to_come: bool,
    pub claimed: Option<Claimed>,
}

/// The changes that were made to a v2 cgroup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claimed {
    base: PathBuf,
    enabled: Vec<Controller>,
    /// Child cgroups that existed before the claim and worked without the controllers.
    beside: Vec<PathBuf>,
}

/// Limits of one cgroup. `None` keeps the Linux kernel's default, which is no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct CgroupLimits {
    pub memory_bytes: Option<u64>,
    pub cpu_millis: Option<u32>,
    pub pids: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Usage {
    pub memory_bytes: Option<u64>,
    pub pids: Option<u32>,
    /// Number of processes killed for lack of memory, except those of the browser.
    pub oom_kills: u64,
    pub browser_oom_kills: u64,
    /// The memory limit that caused a kill, if the Linux kernel's counters identify it.
    pub oom_limit_bytes: Option<u64>,
}

struct Mount {
    root: PathBuf,
    point: PathBuf,
    kind: Version,
    options: Vec<String>,
}

/// The v2 hierarchy as the server sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unified {
    /// The mount point.
    pub top: PathBuf,
    /// The directory of the server's own cgroup.
    pub own: PathBuf,
    /// The server's own cgroup relative to the mount point, as an absolute path.
    pub path: PathBuf,
}

/// A v2 cgroup that can hold a tree.
#[derive(Debug, PartialEq, Eq)]
struct AttachPoint {
    base: PathBuf,
    controllers: Vec<Controller>,
}

/// The cgroups that the server may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CgroupSource {
    /// Use the server's own cgroup, or else a scope requested from systemd.
    #[default]
    Systemd,
    /// Use only the server's own cgroup.
    Given,
    /// Use no cgroup. A trial run must leave the system unchanged.
    Nothing,
}

/// The processes that may be moved, and the unit that is known to be delegated.
#[derive(Debug, Clone, Copy, Default)]
pub struct OwnTree<'a> {
    /// The server and its launcher. Their descendants count as well.
    pub pids: &'a [Pid],
    /// The name of a scope that systemd created for us.
    pub scope: Option<&'a str>,
}

impl Layout {
    /// Determines what the server can use on this machine. Changes nothing unless `claim` is set, which makes it ready
    /// for use.
    pub fn obtain(source: CgroupSource, pids: &[Pid], claim: bool) -> Self {
        let root = Path::new("/");
        if source == CgroupSource::Nothing {
            let why = Absence::new("this server is to have no cgroup", "");
            return Self { absent: Controller::ALL.map(|c| (c, why.clone())).into(), ..Self::default() };
        }
        let found = Self::find(root, OwnTree { pids, scope: None }, claim);
        let unified = Unified::find(root).filter(|unified| {
            unified.unit().is_some() && lists(&unified.top, "cgroup.controllers", Controller::Memory)
        });
        match unified {
            Some(unified) if !found.has(Controller::Memory) => found.or_scope(&unified, source, pids, claim),
            _ => found,
        }
    }

    /// Extends this layout with a systemd scope, or with the reason why there is none.
    fn or_scope(self, unified: &Unified, source: CgroupSource, pids: &[Pid], claim: bool) -> Self {
        let root = Path::new("/");
        let manager = Manager::find(root, unified, rustix::process::getuid().as_raw());
        let manager = match manager {
            Err(Absence { why, what_to_do }) => return self.without_scope(&why, &what_to_do),
            Ok(_) if source == CgroupSource::Given => {
                return self.without_scope("systemd is not to be asked for a scope", "set `systemd_scope = true`");
            }
            Ok(manager) => manager,
        };
        if !claim {
            return match manager.answers() {
                Ok(()) => self.with_scope_to_come(&manager),
                Err(no) => self.without_scope(&no, scope::REACH),
            };
        }
        let asked = instance::random_name().map_err(|e| e.to_string()).and_then(|random| {
            let name = format!("sandpool-{random}.scope");
            manager.start_scope(&name).map(|()| name)
        });
        match asked {
            Ok(name) => Self::claim(root, OwnTree { pids, scope: Some(&name) }),
            Err(no) => self.without_scope(&no, scope::REACH),
        }
    }

    fn without_scope(mut self, no: &str, what_to_do: &str) -> Self {
        for absence in self.absent.values_mut() {
            absence.why = format!("{}; {no}", absence.why);
            absence.what_to_do = what_to_do.into();
        }
        self
    }

    fn with_scope_to_come(mut self, manager: &Manager) -> Self {
        let like = &manager.like;
        for controller in self.absent.keys().copied().collect::<Vec<_>>() {
            if lists(like, "cgroup.controllers", controller) {
                self.absent.remove(&controller);
                self.add(Version::V2, controller, like.clone());
            }
        }
        self.scope_to_come = true;
        self
    }

    /// Determines where a tree could be attached, without changing anything.
    pub fn look(root: &Path, ours: OwnTree<'_>) -> Self {
        Self::find(root, ours, false)
    }

    /// Prepares the cgroups that are to hold a tree. Controllers that cannot be prepared are listed as absent, and
    /// their cgroups are left unchanged.
    pub fn claim(root: &Path, ours: OwnTree<'_>) -> Self {
        Self::find(root, ours, true)
    }

    fn find(root: &Path, ours: OwnTree<'_>, claim: bool) -> Self {
        let read = |p: &str| fs::read_to_string(root.join(p)).unwrap_or_default();
        let memberships = memberships(&read("proc/self/cgroup"));
        let mounts = mounts(&read("proc/self/mountinfo"));
        let mut layout = Self::default();
        let mut wanted = Vec::new();
        for controller in Controller::ALL {
            match v1_base(root, controller, &memberships, &mounts, claim) {
                Some(Ok(base)) => layout.add(Version::V1, controller, base),
                Some(Err(why)) => drop(layout.absent.insert(controller, why)),
                None => wanted.push(controller),
            }
        }
        if wanted.is_empty() {
            return layout;
        }
        let Some(unified) = Unified::of(root, &memberships, &mounts) else {
            let why = match mounts.iter().any(|m| m.kind == Version::V2) {
                true => "the cgroup v2 hierarchy that is mounted does not show the server's own cgroup",
                false => "no cgroup v2 hierarchy is mounted",
            };
            let why = Absence::new(why, "mount cgroup2 at /sys/fs/cgroup, in the server's own cgroup namespace");
            layout.absent.extend(wanted.iter().map(|c| (*c, why.clone())));
            return layout;
        };
        let place = unified.place(root, &wanted, ours).and_then(|place| {
            if claim {
                layout.claimed = take(root, &place, ours)?;
            }
            Ok(place)
        });
        match place {
            Ok(place) => {
                for controller in wanted {
                    if place.controllers.contains(&controller) {
                        layout.add(Version::V2, controller, place.base.clone());
                    } else {
                        layout.absent.insert(controller, unified.not_given(&place.base, controller));
                    }
                }
            }
            Err(why) => layout.absent.extend(wanted.into_iter().map(|c| {
                let has = lists(&unified.top, "cgroup.controllers", c);
                (c, if has { why.clone() } else { unified.not_given(&unified.top, c) })
            })),
        }
        layout
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

    /// Returns this layout with our directory in each hierarchy as the base.
    pub fn tree(&self, label: &str) -> Tree {
        let mut hierarchies = self.hierarchies.clone();
        for hierarchy in &mut hierarchies {
            hierarchy.base.push(format!("sandpool-{label}"));
        }
        Tree { hierarchies }
    }

    /// Reverts the changes of [`Self::claim`] after the tree was removed.
    pub fn release(&self) {
        if let Some(claimed) = &self.claimed {
            claimed.release();
        }
    }
}

impl Unified {
    /// Returns the hierarchy of this process if v2 is mounted.
    pub fn find(root: &Path) -> Option<Self> {
        let read = |p: &str| fs::read_to_string(root.join(p)).unwrap_or_default();
        Self::of(root, &memberships(&read("proc/self/cgroup")), &mounts(&read("proc/self/mountinfo")))
    }

    fn of(root: &Path, memberships: &[(Vec<String>, PathBuf)], mounts: &[Mount]) -> Option<Self> {
        let (_, path) = memberships.iter().find(|(c, _)| c.is_empty())?;
        let shown = |mount: &Mount| Some((under(root, &mount.point), directory(root, mount, path)?));
        let mounts = mounts.iter().filter(|m| m.kind == Version::V2).filter_map(shown);
        let (top, own) = mounts.into_iter().find(|(_, own)| own.is_dir())?;
        let path = Path::new("/").join(own.strip_prefix(&top).unwrap_or(Path::new("")));
        Some(Self { top, own, path })
    }

    /// Iterates from the server's own cgroup up to the topmost visible one.
    pub fn ancestors(&self) -> impl Iterator<Item = &Path> {
        self.own.ancestors().take_while(|dir| dir.starts_with(&self.top))
    }

    /// Returns the cgroup of the systemd unit that contains this process.
    pub fn unit(&self) -> Option<&Path> {
        self.ancestors().find(|dir| *dir != self.top && is_unit(dir))
    }

    /// Finds the nearest cgroup that may hold a tree: one without foreign processes, within the server's own unit if
    /// that unit is delegated. A unit that is not delegated belongs to systemd, which ends a service when a process in
    /// it, at any depth, is killed for lack of memory. Without a unit (in a container or under another init) only the
    /// server's own cgroup qualifies, because the one above may have fewer limits.
    fn place(&self, root: &Path, wanted: &[Controller], ours: OwnTree<'_>) -> Result<AttachPoint, Absence> {
        let unit = self.unit();
        let last = match unit {
            None => &self.own,
            Some(unit) if is_delegated(unit, ours.scope) => unit,
            Some(unit) => {
                let why = format!("the unit `{}` is not delegated, so that its cgroup is systemd's", name_of(unit));
                return Err(Absence::new(why, "set `Delegate=yes` in the unit"));
            }
        };
        let mut first = None;
        for dir in self.ancestors().take_while(|dir| dir.starts_with(last)) {
            match self.usable(root, dir, wanted, ours.pids) {
                Ok(controllers) => return Ok(AttachPoint { base: dir.to_owned(), controllers }),
                Err(why) => drop(first.get_or_insert(why)),
            }
        }
        Err(first.unwrap_or_else(|| Absence::new("there is no cgroup to use", "")))
    }

    /// Returns the controllers that can limit children of `dir`, or an error if memory is not among them: enabling only
    /// cpu and pids would turn a cgroup that contains processes into a threaded one.
    fn usable(&self, root: &Path, dir: &Path, wanted: &[Controller], ours: &[Pid]) -> Result<Vec<Controller>, Absence> {
        let shown = dir.display();
        if let Ok(kind) = fs::read_to_string(dir.join("cgroup.type"))
            && kind.trim() != "domain"
        {
            let why = format!("the cgroup `{shown}` is `{}`, in which memory cannot be limited", kind.trim());
            return Err(Absence::new(why, "start the server in another cgroup"));
        }
        if !is_topmost(dir)
            && let Some(stranger) = strangers(root, dir, ours).into_iter().next()
        {
            let why = format!("other processes than the server's are in the cgroup `{shown}` ({stranger})");
            return Err(Absence::new(
                why,
                "start the server alone in its cgroup: by `exec` in the script that starts it, or in a unit of its own",
            ));
        }
        for file in ["", "cgroup.subtree_control", "cgroup.procs"] {
            let path = dir.join(file);
            if let Err(e) = rustix::fs::access(&path, Access::WRITE_OK) {
                let why = format!("`{}` cannot be written: {}", path.display(), io::Error::from(e));
                return Err(Absence::new(why, "give the container a writable cgroup, or the server a delegated unit"));
            }
        }
        let usable: Vec<_> = wanted.iter().copied().filter(|c| lists(dir, "cgroup.controllers", *c)).collect();
        match wanted.iter().find(|c| **c == Controller::Memory && !usable.contains(c)) {
            Some(memory) => Err(self.not_given(dir, *memory)),
            None => Ok(usable),
        }
    }

    fn not_given(&self, dir: &Path, controller: Controller) -> Absence {
        let name = controller.name();
        if !lists(&self.top, "cgroup.controllers", controller) {
            let why = format!("cgroup v2 has no controller `{name}` here");
            return Absence::new(why, "boot a kernel that has it, without `cgroup_disable=` on its command line");
        }
        let why = format!("the cgroup v2 controller `{name}` is not delegated to `{}`", dir.display());
        Absence::new(
            why,
            format!(
                "name it in `Delegate=` of the units around (`Delegate=memory cpu pids`), or enable `{name}` in the cgroups above"
            ),
        )
    }
}

fn name_of(dir: &Path) -> String {
    dir.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Recognises a unit by its name. systemd creates cgroups with these names, and other programs use them only for
/// systemd units.
pub fn is_unit(path: &Path) -> bool {
    path.extension().is_some_and(|kind| kind == "service" || kind == "scope")
}

/// Returns whether systemd leaves this unit's cgroup alone. systemd marks such cgroups; for a system service with
/// `User=` it also gives the cgroup to that user.
fn is_delegated(unit: &Path, scope: Option<&str>) -> bool {
    use std::os::unix::fs::MetadataExt;
    if scope.is_some_and(|scope| unit.file_name().is_some_and(|name| name == scope)) {
        return true;
    }
    let marked = |name: &str| {
        let mut value = [0; 8];
        rustix::fs::getxattr(unit, name, &mut value).is_ok_and(|length| value[..length] == *b"1")
    };
    let owner = |dir: &Path| fs::metadata(dir).map(|found| found.uid()).ok();
    let own = rustix::process::getuid().as_raw();
    let given = || own != 0 && owner(unit) == Some(own) && unit.parent().and_then(owner).is_some_and(|uid| uid != own);
    marked("user.delegate") || marked("trusted.delegate") || given()
}

/// Returns whether this is the root cgroup of the machine, the only one that may have both processes and limited
/// children.
fn is_topmost(dir: &Path) -> bool {
    !dir.join("cgroup.type").exists()
}

/// Returns the lines of `cgroup.procs` that belong neither to us nor to our descendants. Processes of another pid
/// namespace are listed as `0`.
fn strangers(root: &Path, dir: &Path, ours: &[Pid]) -> Vec<String> {
    let text = match fs::read_to_string(dir.join("cgroup.procs")) {
        Ok(text) => text,
        Err(e) if e.kind() == ErrorKind::NotFound => return Vec::new(),
        Err(e) => return vec![e.to_string()],
    };
    let known = |line: &str| line.parse().ok().and_then(Pid::from_raw).is_some_and(|pid| descends(root, pid, ours));
    let shown = |line: &str| {
        let name = fs::read_to_string(root.join("proc").join(line).join("comm")).unwrap_or_default();
        format!("process {line} {}", name.trim()).trim_end().to_owned()
    };
    text.lines().filter(|line| !known(line)).map(shown).collect()
}

/// Returns whether a process is one of `ours` or a descendant of them.
fn descends(root: &Path, mut pid: Pid, ours: &[Pid]) -> bool {
    const DEEPEST: usize = 64;
    for _ in 0..DEEPEST {
        if ours.contains(&pid) {
            return true;
        }
        let stat = fs::read_to_string(root.join("proc").join(pid.as_raw_nonzero().to_string()).join("stat"));
        // The process name in parentheses may contain any character.
        let parent = stat.ok().and_then(|text| text.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok());
        match parent.and_then(Pid::from_raw) {
            Some(parent) => pid = parent,
            None => return false,
        }
    }
    false
}

/// Cgroup to which the server's processes move when its own cgroup becomes the parent of the tree.
const LEAF: &str = "sandpool-server";

/// Enables the controllers for children of the base in a single write, after moving our own processes out of the way.
/// Reverts everything on failure.
fn take(root: &Path, place: &AttachPoint, ours: OwnTree<'_>) -> Result<Option<Claimed>, Absence> {
    let AttachPoint { base, controllers } = place;
    let lacking = || controllers.iter().copied().filter(|c| !lists(base, "cgroup.subtree_control", *c));
    let claimed = Claimed { base: base.clone(), enabled: lacking().collect(), beside: children(base) };
    let fail = |e: io::Error| {
        claimed.release();
        Absence::new(format!("the cgroup `{}` cannot be used: {e}", base.display()), "see `sandpool doctor`")
    };
    if !claimed.enabled.is_empty() {
        if !is_topmost(base) {
            claimed.move_into_leaf(root, ours.pids).map_err(fail)?;
        }
        write(base, "cgroup.subtree_control", &signed('+', &claimed.enabled)).map_err(fail)?;
        let kind = fs::read_to_string(base.join("cgroup.type")).unwrap_or_else(|_| "domain".into());
        if kind.trim() != "domain" {
            return Err(fail(io::Error::other(format!("it has become `{}`", kind.trim()))));
        }
    }
    try_mkdir(base).map_err(fail)?;
    Ok((!claimed.enabled.is_empty()).then_some(claimed))
}

fn children(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter(|e| e.file_type().is_ok_and(|t| t.is_dir())).map(|e| e.path()).collect()
}

fn signed(sign: char, controllers: &[Controller]) -> String {
    controllers.iter().map(|c| format!("{sign}{}", c.name())).collect::<Vec<_>>().join(" ")
}

impl Claimed {
    fn move_into_leaf(&self, root: &Path, ours: &[Pid]) -> io::Result<()> {
        // Processes that are started during the move may stay behind, so it is repeated.
        const TURNS: usize = 10;
        let leaf = self.base.join(LEAF);
        for _ in 0..TURNS {
            let present = members(&self.base);
            if present.is_empty() {
                return Ok(());
            }
            if !leaf.exists() {
                fs::create_dir(&leaf).map_err(named(&leaf))?;
            }
            for pid in present.into_iter().filter(|pid| descends(root, *pid, ours)) {
                match fs::write(leaf.join("cgroup.procs"), pid.as_raw_nonzero().to_string()) {
                    // The process has ended in the meantime.
                    Err(e) if e.raw_os_error() == Some(libc::ESRCH) => {}
                    other => other.map_err(named(&leaf))?,
                }
            }
        }
        Err(io::Error::other("other processes are in it"))
    }

    /// Reverts the claim, unless another program has created cgroups beside ours in the meantime. It may need the
    /// controllers, so they then stay enabled.
    fn release(&self) {
        let leaf = self.base.join(LEAF);
        if children(&self.base).iter().any(|dir| *dir != leaf && !self.beside.contains(dir)) {
            return;
        }
        let enabled: Vec<_> =
            self.enabled.iter().copied().filter(|c| lists(&self.base, "cgroup.subtree_control", *c)).collect();
        if !enabled.is_empty() && write(&self.base, "cgroup.subtree_control", &signed('-', &enabled)).is_err() {
            return;
        }
        for pid in members(&leaf) {
            let _ = write(&self.base, "cgroup.procs", &pid.as_raw_nonzero().to_string());
        }
        let _ = fs::remove_dir(leaf);
    }
}

/// Parses the controllers and the path of each line of `/proc/self/cgroup`. The list of controllers is empty for v2.
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
    claim: bool,
) -> Option<Result<PathBuf, Absence>> {
    let name = controller.name();
    let (_, path) = memberships.iter().find(|(c, _)| c.iter().any(|c| c == name))?;
    let Some(mount) = mounts.iter().find(|m| m.kind == Version::V1 && m.options.iter().any(|o| o == name)) else {
        return Some(Err(Absence::new(
            format!("the cgroup v1 controller `{name}` is not mounted"),
            format!("mount it: `mount -t cgroup -o {name} cgroup /sys/fs/cgroup/{name}`"),
        )));
    };
    let Some(base) = directory(root, mount, path) else {
        return Some(Err(Absence::new(
            format!("the cgroup v1 controller `{name}` that is mounted does not show the server's own cgroup"),
            "mount it in the server's own cgroup namespace",
        )));
    };
    let writable = rustix::fs::access(&base, Access::WRITE_OK).map_err(io::Error::from);
    Some(match writable.and_then(|()| if claim { try_mkdir(&base) } else { Ok(()) }) {
        Ok(()) => Ok(base),
        Err(e) => Err(Absence::new(
            format!("cannot make a cgroup in `{}`: {e}", base.display()),
            "start the server as root with a writable cgroup, or boot with cgroup v2 (`systemd.unified_cgroup_hierarchy=1`)",
        )),
    })
}

/// Translates `path` through the mount. Returns `None` if a cgroup namespace hides it: the mount then does not show the
/// server's own cgroup, and a tree there would escape its limits.
fn directory(root: &Path, mount: &Mount, path: &Path) -> Option<PathBuf> {
    let hidden = |path: &Path| path.components().any(|c| c == std::path::Component::ParentDir);
    if hidden(&mount.root) {
        return None;
    }
    let rest = path.strip_prefix(&mount.root).ok().filter(|rest| !hidden(rest))?;
    let mut directory = under(root, &mount.point);
    directory.extend(rest.components());
    Some(directory)
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

/// Our part of each hierarchy.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Tree {
    hierarchies: Vec<Hierarchy>,
}

impl Tree {
    /// Returns the top directory of our tree in each hierarchy.
    pub fn tops(&self) -> Vec<PathBuf> {
        self.hierarchies.iter().map(|h| h.base.clone()).collect()
    }

    /// Returns the cgroup of a sandbox without creating it. `groups` starts with the outermost; `split` gives the
    /// browser a separate part.
    pub fn sandbox(&self, groups: &[Group], sandbox: &str, split: bool) -> Cgroup {
        let dir = |h: &Hierarchy| around(h, groups).pop().unwrap_or_else(|| h.base.clone()).join(sandbox);
        Cgroup { dirs: self.hierarchies.iter().map(|h| (h.clone(), dir(h))).collect(), split }
    }

    /// Creates the top directories, which exist as long as the server.
    pub fn open(&self) -> io::Result<()> {
        self.hierarchies.iter().try_for_each(|h| make(h, &h.base, CgroupLimits::default(), CgroupKind::Group))
    }

    /// Creates the sandbox's cgroup with its limits, and those of its groups that do not exist yet.
    pub fn create(
        &self,
        groups: &[Group],
        sandbox: (&str, CgroupLimits),
        browser: Option<CgroupLimits>,
    ) -> io::Result<Cgroup> {
        let cgroup = self.sandbox(groups, sandbox.0, browser.is_some());
        let kind = if browser.is_some() { CgroupKind::Split } else { CgroupKind::Leaf };
        for (hierarchy, dir) in &cgroup.dirs {
            // The groups usually exist, and checking each of them would cost as much as creating one.
            match make(hierarchy, dir, sandbox.1, kind) {
                Err(e) if e.kind() == ErrorKind::NotFound && !dir.exists() => {
                    for (parent, group) in around(hierarchy, groups).iter().zip(groups) {
                        make(hierarchy, parent, group.limits, CgroupKind::Group)?;
                    }
                    make(hierarchy, dir, sandbox.1, kind)?;
                }
                other => other?,
            }
            if let Some(limits) = browser {
                // Both parts share the memory of the sandbox, but the processes of one part must not use up those of
                // the other.
                let pids = sandbox.1.pids.zip(limits.pids).map(|(all, browsers)| all.saturating_sub(browsers));
                make(hierarchy, &dir.join(CODE), CgroupLimits { pids, ..CgroupLimits::default() }, CgroupKind::Leaf)?;
                make(hierarchy, &dir.join(BROWSER), limits, CgroupKind::Leaf)?;
            }
        }
        Ok(cgroup)
    }

    /// Removes the groups that are empty, from the innermost outwards. Groups in use stay.
    pub fn tidy(&self, groups: &[Group]) {
        for hierarchy in &self.hierarchies {
            let _ = around(hierarchy, groups).iter().rev().try_for_each(fs::remove_dir);
        }
    }
}

/// Returns the directories of the groups, outermost first.
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
enum CgroupKind {
    /// A cgroup around sandboxes.
    Group,
    /// The cgroup of a sandbox that has separate parts for code and browser.
    Split,
    /// A cgroup that contains processes.
    Leaf,
}

fn make(hierarchy: &Hierarchy, dir: &Path, limits: CgroupLimits, kind: CgroupKind) -> io::Result<()> {
    match fs::create_dir(dir) {
        // Only groups are shared. A sandbox's cgroup must be new, or another process could control its members and
        // limits.
        Err(e) if kind == CgroupKind::Group && e.kind() == ErrorKind::AlreadyExists => return Ok(()),
        other => other.map_err(named(dir))?,
    }
    if hierarchy.version == Version::V2 && kind != CgroupKind::Leaf {
        let enable: Vec<String> = hierarchy.controllers.iter().map(|c| format!("+{}", c.name())).collect();
        write(dir, "cgroup.subtree_control", &enable.join(" "))?;
    }
    hierarchy.controllers.iter().try_for_each(|c| set(hierarchy.version, *c, dir, limits))
}

fn write(dir: &Path, file: &str, value: &str) -> io::Result<()> {
    let path = dir.join(file);
    fs::write(&path, value).map_err(named(&path))
}

/// Limits the socket buffers of a v1 cgroup. v1 counts them apart from memory (TCP and UDP, despite the file's name),
/// and only in a cgroup in which this file was written once, so it is written even without a limit. A Linux kernel
/// without v1 accounting lacks the file; `doctor` reports that.
fn socket_buffers(dir: &Path, memory: Option<u64>) -> io::Result<()> {
    let limit = memory.map_or_else(|| "-1".to_owned(), |bytes| (bytes / SOCKET_SHARE).to_string());
    match fs::write(dir.join(SOCKET_LIMIT), limit) {
        Err(e) if e.kind() != ErrorKind::NotFound && e.kind() != ErrorKind::PermissionDenied => {
            Err(named(&dir.join(SOCKET_LIMIT))(e))
        }
        _ => Ok(()),
    }
}

/// Divisor of the memory limit that gives the additional limit for socket buffers.
const SOCKET_SHARE: u64 = 4;
pub const SOCKET_LIMIT: &str = "memory.kmem.tcp.limit_in_bytes";

fn set(version: Version, controller: Controller, dir: &Path, limits: CgroupLimits) -> io::Result<()> {
    const PERIOD: u64 = 100_000;
    match (version, controller) {
        (Version::V1, Controller::Memory) => {
            socket_buffers(dir, limits.memory_bytes)?;
            let Some(bytes) = limits.memory_bytes else { return Ok(()) };
            write(dir, "memory.limit_in_bytes", &bytes.to_string())?;
            // Limits memory and swap together. The file is absent if the Linux kernel does not account swap, which is
            // then unlimited.
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
                // v1 accepts no quota above that of a parent cgroup. The parent's quota is then the limit.
                Err(e) if e.kind() == ErrorKind::InvalidInput => Ok(()),
                other => other,
            }
        }
        (_, Controller::Pids) => limits.pids.map_or(Ok(()), |pids| write(dir, "pids.max", &pids.to_string())),
    }
}

/// Names of the two parts of a sandbox that has a browser.
const CODE: &str = "code";
const BROWSER: &str = "browser";

/// The cgroup directories of one sandbox, one per hierarchy.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Cgroup {
    dirs: Vec<(Hierarchy, PathBuf)>,
    split: bool,
}

/// The directories that contain the processes of one part of a sandbox, one per hierarchy.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CgroupPart {
    dirs: Vec<(Version, PathBuf)>,
}

impl Cgroup {
    /// Returns the part that contains the guest and the processes it starts.
    pub fn code(&self) -> CgroupPart {
        if self.split { self.part(CODE) } else { self.part("") }
    }

    /// Returns the part that contains the browser, if the sandbox has one.
    pub fn browser(&self) -> Option<CgroupPart> {
        self.split.then(|| self.part(BROWSER))
    }

    fn part(&self, name: &str) -> CgroupPart {
        let below = |dir: &Path| if name.is_empty() { dir.to_owned() } else { dir.join(name) };
        CgroupPart { dirs: self.dirs.iter().map(|(h, dir)| (h.version, below(dir))).collect() }
    }

    fn dir(&self, controller: Controller) -> Option<(Version, &Path)> {
        let found = self.dirs.iter().find(|(h, _)| h.controllers.contains(&controller))?;
        Some((found.0.version, &found.1))
    }

    /// Returns the path of the memory statistics of this sandbox, including its parts.
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
            if usage.oom_kills > 0 {
                usage.oom_limit_bytes = hit_limit(version, dir);
            }
            if self.split {
                usage.browser_oom_kills = kills(&dir.join(BROWSER));
                // v1 counts the kills of each directory separately; v2 includes those of its children.
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

    /// Removes the directories. Returns one that is still busy as an error: dead processes leave a cgroup a moment
    /// after they are reaped.
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

impl CgroupPart {
    /// Returns whether no hierarchy is in use.
    pub fn is_empty(&self) -> bool {
        self.dirs.is_empty()
    }

    /// Returns the v1 files into which a process writes `0` to join. It has to join by itself and through `tasks`:
    /// every other way takes a lock that costs milliseconds.
    pub fn tasks(&self) -> Vec<PathBuf> {
        self.dirs.iter().filter(|(version, _)| *version == Version::V1).map(|(_, dir)| dir.join("tasks")).collect()
    }

    /// Returns the v2 directory in which a process is created.
    pub fn v2(&self) -> Option<&Path> {
        self.dirs.iter().find(|(version, _)| *version == Version::V2).map(|(_, dir)| dir.as_path())
    }

    /// Kills all members, including those that are forked in the meantime. Returns true if none is left.
    pub fn kill(&self) -> bool {
        const TURNS: usize = 100;
        for turn in 0..TURNS {
            let found: Vec<_> =
                self.dirs.iter().flat_map(|(_, dir)| members(dir).into_iter().map(move |pid| (dir, pid))).collect();
            if found.is_empty() {
                return true;
            }
            found.into_iter().for_each(|(dir, pid)| kill_member(dir, pid));
            // Killed processes leave the cgroup a moment later.
            std::thread::sleep(std::time::Duration::from_millis(turn.min(10) as u64));
        }
        false
    }
}

/// Returns the memory limit that was hit: the nearest one, from the sandbox's cgroup upwards, that has led to a kill.
/// v1 counts only how often a limit was reached, which the page cache may have caused before another limit led to the
/// kill.
fn hit_limit(version: Version, dir: &Path) -> Option<u64> {
    /// Upper bound of real limits; v1 shows a larger number if there is no limit.
    const MOST: u64 = 1 << 60;
    let read = |dir: &Path, file: &str| fs::read_to_string(dir.join(file)).unwrap_or_default();
    let limit = match version {
        Version::V1 => "memory.limit_in_bytes",
        Version::V2 => "memory.max",
    };
    let was_hit = |dir: &&Path| match version {
        Version::V1 => ["memory.failcnt", "memory.memsw.failcnt"]
            .iter()
            .any(|file| read(dir, file).trim().parse::<u64>().is_ok_and(|count| count > 0)),
        Version::V2 => counter(&read(dir, "memory.events.local"), "oom") > 0,
    };
    let hit = dir.ancestors().take_while(|dir| dir.join(limit).exists()).find(was_hit)?;
    read(hit, limit).trim().parse().ok().filter(|bytes| *bytes < MOST)
}

fn counter(text: &str, name: &str) -> u64 {
    let value = |line: &str| line.split_once(' ').filter(|(n, _)| *n == name).and_then(|(_, v)| v.trim().parse().ok());
    text.lines().find_map(value).unwrap_or(0)
}

/// Kills every process in the tree that a dead server left at `top` and removes its directories. Returns true if
/// nothing remains.
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

/// Kills a process if it is still a member. Its pid may have been reused since it was read, so the process is pinned by
/// a pidfd before the membership is checked.
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

    const LIMITS: CgroupLimits = CgroupLimits { memory_bytes: Some(64 << 20), cpu_millis: Some(1500), pids: Some(32) };

    fn put(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// Collects every file that is not part of the fixture, with its content.
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
        let memory = |memory| CgroupLimits { memory_bytes: Some(memory), ..CgroupLimits::default() };
        let group = |name: &str, limits| Group { name: name.into(), limits };
        vec![group("g", memory(1 << 30)), group("h", CgroupLimits { cpu_millis: Some(500), ..memory(1 << 29) })]
    }

    fn create_in(root: &Path) -> (Layout, Vec<String>) {
        let layout = Layout::claim(root, OwnTree { pids: &[], scope: Some("server.scope") });
        layout.tree("t").open().unwrap();
        layout.tree("t").create(&groups(), ("s", LIMITS), None).unwrap();
        let browser = CgroupLimits { memory_bytes: Some(48 << 20), cpu_millis: None, pids: Some(24) };
        layout.tree("t").create(&groups(), ("b", LIMITS), Some(browser)).unwrap();
        let mut out = Vec::new();
        written(&root.join("sys"), root, &mut out);
        (layout, out)
    }

    #[test]
    fn v2_hangs_below_the_own_delegated_unit() {
        let root = crate::test_dir("cg2");
        put(&root, "proc/self/cgroup", "0::/user.slice/server.scope\n");
        put(&root, "proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n");
        put(&root, "sys/fs/cgroup/cgroup.controllers", "cpuset cpu io memory pids\n");
        put(&root, "sys/fs/cgroup/user.slice/cgroup.controllers", "cpu memory pids\n");
        put(&root, "sys/fs/cgroup/user.slice/cgroup.subtree_control", "cpu memory pids\n");
        let unit = "sys/fs/cgroup/user.slice/server.scope";
        let files =
            [("type", "domain\n"), ("controllers", "cpu memory pids\n"), ("procs", ""), ("subtree_control", "")];
        files.iter().for_each(|(file, text)| put(&root, &format!("{unit}/cgroup.{file}"), text));
        let (layout, out) = create_in(&root);
        assert_eq!(layout.absent, BTreeMap::new());
        let enabled = fs::read_to_string(root.join(unit).join("cgroup.subtree_control")).unwrap();
        assert_eq!(enabled, "+memory +cpu +pids", "in one write");
        insta::assert_snapshot!(out.join("\n"), @r"
        sys/fs/cgroup/user.slice/server.scope/sandpool-t/cgroup.subtree_control = +memory +cpu +pids
        sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/cgroup.subtree_control = +memory +cpu +pids
        sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/h/b/browser/memory.max = 50331648
        sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/h/b/browser/memory.swap.max = 0
        sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/h/b/browser/pids.max = 24
        sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/h/b/cgroup.subtree_control = +memory +cpu +pids
        sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/h/b/code/pids.max = 8
        sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/h/b/cpu.max = 150000 100000
        sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/h/b/memory.max = 67108864
        sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/h/b/memory.swap.max = 0
        sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/h/b/pids.max = 32
        sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/h/cgroup.subtree_control = +memory +cpu +pids
        sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/h/cpu.max = 50000 100000
        sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/h/memory.max = 536870912
        sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/h/memory.swap.max = 0
        sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/h/s/cpu.max = 150000 100000
        sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/h/s/memory.max = 67108864
        sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/h/s/memory.swap.max = 0
        sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/h/s/pids.max = 32
        sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/memory.max = 1073741824
        sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/memory.swap.max = 0
        ");
        let cgroup = layout.tree("t").sandbox(&groups(), "s", false);
        let code = cgroup.code();
        assert_eq!((code.tasks(), cgroup.browser()), (vec![], None));
        assert!(code.v2().unwrap().ends_with("server.scope/sandpool-t/g/h/s"));
        let split = layout.tree("t").sandbox(&groups(), "b", true);
        assert!(split.code().v2().unwrap().ends_with("server.scope/sandpool-t/g/h/b/code"));
        assert!(split.browser().unwrap().v2().unwrap().ends_with("server.scope/sandpool-t/g/h/b/browser"));
        put(
            &root,
            "sys/fs/cgroup/user.slice/server.scope/sandpool-t/g/h/s/memory.events",
            "low 0\nhigh 0\noom 3\noom_kill 2\n",
        );
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
        assert_eq!(layout.absent[&Controller::Pids].why, "the cgroup v1 controller `pids` is not mounted");
        let split = layout.tree("t").sandbox(&groups(), "b", true);
        let (code, browser) = (split.code(), split.browser().unwrap());
        assert_eq!((code.tasks().len(), browser.tasks().len(), browser.v2()), (2, 2, None));
        assert!(browser.tasks()[0].ends_with("memory/a/sandpool-t/g/h/b/browser/tasks"));
        // On v1 each directory counts only its own kills.
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
        let layout = Layout::look(&root, OwnTree::default());
        assert!(layout.hierarchies.is_empty());
        assert_eq!(layout.absent[&Controller::Memory].why, "cgroup v2 has no controller `memory` here");
        fs::remove_dir_all(root).unwrap();
    }

    /// Imitates a machine that has only v2. `own` is the path of the server's own cgroup; `cgroups` lists cgroups with
    /// the content of their `cgroup.procs`.
    fn unified(name: &str, own: &str, cgroups: &[(&str, &str)]) -> PathBuf {
        let root = crate::test_dir(name);
        put(&root, "proc/self/cgroup", &format!("0::{own}\n"));
        put(&root, "proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n");
        for (dir, processes) in cgroups {
            let dir = format!("sys/fs/cgroup{dir}");
            put(&root, &format!("{dir}/cgroup.controllers"), "cpuset cpu io memory pids\n");
            put(&root, &format!("{dir}/cgroup.subtree_control"), "");
            put(&root, &format!("{dir}/cgroup.procs"), processes);
            if dir != "sys/fs/cgroup" {
                put(&root, &format!("{dir}/cgroup.type"), "domain\n");
            }
        }
        root
    }

    /// Marks a cgroup as delegated in the way systemd does, with a `trusted` attribute where the file system has no
    /// `user` attributes.
    fn delegate(root: &Path, dir: &str) {
        let path = root.join("sys/fs/cgroup").join(dir);
        let set = |name: &str| rustix::fs::setxattr(&path, name, b"1", rustix::fs::XattrFlags::empty());
        set("user.delegate").or_else(|_| set("trusted.delegate")).unwrap();
    }

    fn everything(dir: &Path) -> Vec<(PathBuf, String)> {
        let entries = fs::read_dir(dir).unwrap().map(|e| e.unwrap().path());
        let mut found: Vec<_> = entries
            .flat_map(|path| match path.is_dir() {
                true => [vec![(path.clone(), String::new())], everything(&path)].concat(),
                false => vec![(path.clone(), fs::read_to_string(&path).unwrap())],
            })
            .collect();
        found.sort();
        found
    }

    fn why(layout: &Layout) -> String {
        assert_eq!(layout.hierarchies, []);
        let Absence { why, what_to_do } = &layout.absent[&Controller::Memory];
        assert!(Controller::ALL.iter().all(|c| layout.absent[c] == layout.absent[&Controller::Memory]));
        format!("{why} → {what_to_do}")
    }

    const FOUR: Pid = Pid::from_raw(4).unwrap();

    /// W38, W40, W46 of the hostile list.
    #[test]
    fn w38_a_cgroup_shared_with_others_is_left_as_it_is_and_none_above_it_is_taken() {
        let shared = ("/a.slice/server.service", "4\n7\n9\n");
        let unit = unified("w38", "/a.slice/server.service", &[("", ""), ("/a.slice", ""), shared]);
        delegate(&unit, "a.slice/server.service");
        let container = unified("w38c", "/", &[("", "4\n9\n")]);
        // A container sees this cgroup as the topmost, although it is not the root of the machine.
        put(&container, "sys/fs/cgroup/cgroup.type", "domain\n");
        let plain = unified("w38p", "/a/b", &[("", ""), ("/a", ""), ("/a/b", "0\n4\n")]);
        for (root, cgroup, who) in [
            (unit, "/a.slice/server.service", "process 9 bash"),
            (container, "/", "process 9 bash"),
            (plain, "/a/b", "process 0"),
        ] {
            put(&root, "proc/9/comm", "bash\n");
            put(&root, "proc/9/stat", "9 (ba) sh) S 1 9 9 0\n");
            put(&root, "proc/7/stat", "7 (pip) S 4 7 7 0\n");
            let before = everything(&root);
            for find in [Layout::look, Layout::claim] {
                let found = why(&find(&root, OwnTree { pids: &[FOUR], scope: None }));
                let dir = root.join("sys/fs/cgroup").join(&cgroup[1..]);
                let dir = dir.display().to_string();
                let dir = dir.trim_end_matches('/');
                let expected = format!("other processes than the server's are in the cgroup `{dir}` ({who}) → ");
                assert!(found.replace("/`", "`").starts_with(&expected), "{found}\n{expected}");
                assert!(found.contains("alone in its cgroup") && !found.contains("writable"), "{found}");
                assert_eq!(everything(&root), before);
            }
            fs::remove_dir_all(root).unwrap();
        }
    }

    /// W40: a cgroup namespace without its own mount sees that of the host, whose root lies above the namespace's root.
    #[test]
    fn w40_a_mount_that_does_not_show_the_own_cgroup_is_not_used() {
        let root = unified("w40n", "/", &[("", "4\n")]);
        let mountinfo = "30 23 0:26 /../../.. /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";
        put(&root, "proc/self/mountinfo", mountinfo);
        let before = everything(&root);
        let found = why(&Layout::claim(&root, OwnTree { pids: &[FOUR], scope: None }));
        assert!(found.contains("does not show the server's own cgroup"), "{found}");
        let own_mount = "31 30 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        put(&root, "proc/self/mountinfo", &[mountinfo, own_mount].concat());
        assert!(Layout::look(&root, OwnTree::default()).has(Controller::Memory));
        put(&root, "proc/self/mountinfo", mountinfo);
        assert_eq!(everything(&root), before);
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn w38_a_threaded_cgroup_and_one_without_memory_are_no_base() {
        let root = unified("w38t", "/a", &[("", ""), ("/a", "")]);
        put(&root, "sys/fs/cgroup/a/cgroup.type", "domain threaded\n");
        assert!(why(&Layout::claim(&root, OwnTree::default())).contains("is `domain threaded`"));
        put(&root, "sys/fs/cgroup/a/cgroup.type", "domain\n");
        put(&root, "sys/fs/cgroup/a/cgroup.controllers", "cpu pids\n");
        assert!(why(&Layout::claim(&root, OwnTree::default())).contains("`memory` is not delegated to"));
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn w38_looking_changes_nothing_and_a_claim_that_fails_is_taken_back() {
        let root = unified("w38l", "/a", &[("", ""), ("/a", "")]);
        let before = everything(&root);
        assert!(Layout::look(&root, OwnTree::default()).has(Controller::Memory));
        assert_eq!(everything(&root), before);
        // Writing to this directory fails, as does writing to a cgroup that another process has just entered.
        let control = root.join("sys/fs/cgroup/a/cgroup.subtree_control");
        fs::remove_file(&control).unwrap();
        fs::create_dir(&control).unwrap();
        let before = everything(&root);
        assert!(why(&Layout::claim(&root, OwnTree::default())).contains("cannot be used"));
        assert_eq!(everything(&root), before);
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn w38_what_was_claimed_is_taken_back_unless_somebody_has_come_to_need_it() {
        let root = unified("w38r", "/a", &[("", ""), ("/a", ""), ("/a/before", "")]);
        let before = everything(&root);
        let base = root.join("sys/fs/cgroup/a");
        let control = base.join("cgroup.subtree_control");
        let claim = || {
            fs::write(&control, "").unwrap();
            let layout = Layout::claim(&root, OwnTree::default());
            assert_eq!(fs::read_to_string(&control).unwrap(), "+memory +cpu +pids");
            // Imitates what the Linux kernel would store.
            fs::write(&control, "memory cpu pids\n").unwrap();
            layout
        };
        let layout = claim();
        fs::create_dir(base.join(LEAF)).unwrap();
        layout.release();
        assert_eq!(fs::read_to_string(&control).unwrap(), "-memory -cpu -pids");
        fs::write(&control, "").unwrap();
        assert_eq!(everything(&root), before);
        let layout = claim();
        fs::create_dir(base.join("since")).unwrap();
        layout.release();
        assert_eq!(fs::read_to_string(&control).unwrap(), "memory cpu pids\n");
        fs::remove_dir_all(root).unwrap();
    }

    /// W39: systemd ends a service if a process in or below its cgroup is killed for lack of memory, unless the cgroup
    /// is delegated.
    #[test]
    fn w39_a_unit_that_is_not_delegated_is_not_used() {
        let own = "/system.slice/a.service";
        let root = unified("w39", own, &[("", ""), ("/system.slice", ""), (own, "4\n")]);
        let ours = OwnTree { pids: &[FOUR], scope: None };
        let before = everything(&root);
        assert_eq!(
            why(&Layout::claim(&root, ours)),
            "the unit `a.service` is not delegated, so that its cgroup is systemd's → set `Delegate=yes` in the unit"
        );
        assert_eq!(everything(&root), before);
        delegate(&root, &own[1..]);
        let found = Layout::look(&root, ours);
        assert_eq!(found.hierarchies[0].base, root.join("sys/fs/cgroup").join(&own[1..]));
        fs::remove_dir_all(root).unwrap();
    }

    /// W40: `DelegateSubgroup=` puts the server beside the place for its tree. Nothing above the unit is used.
    #[test]
    fn w40_a_tree_hangs_in_the_unit_and_never_above_it() {
        let cgroups = [
            ("", ""),
            ("/system.slice", ""),
            ("/system.slice/a.service", ""),
            ("/system.slice/a.service/own", "4\n9\n"),
        ];
        let root = unified("w40", "/system.slice/a.service/own", &cgroups);
        delegate(&root, "system.slice/a.service");
        let unit = root.join("sys/fs/cgroup/system.slice/a.service");
        let found = Layout::claim(&root, OwnTree { pids: &[FOUR], scope: None });
        assert_eq!(found.hierarchies.iter().map(|h| &h.base).collect::<Vec<_>>(), [&unit]);
        put(&unit, "cgroup.procs", "9\n");
        put(&unit, "cgroup.subtree_control", "");
        let before = everything(&root);
        assert!(why(&Layout::claim(&root, OwnTree { pids: &[FOUR], scope: None })).contains("process 9"));
        assert_eq!(everything(&root), before);
        fs::remove_dir_all(root).unwrap();
    }

    /// W45: reports the limit that was hit, whether that of the sandbox or one around it, and none if it is uncertain.
    #[test]
    fn w45_a_kill_names_the_limit_that_was_hit() {
        let root = crate::test_dir("w45");
        let limits = |version, dirs: &[(&str, &str, &str)]| {
            let (limit, hits) = match version {
                Version::V1 => ("memory.limit_in_bytes", "memory.failcnt"),
                Version::V2 => ("memory.max", "memory.events.local"),
            };
            for (dir, bytes, hit) in dirs {
                put(&root, &format!("{dir}/{limit}"), &format!("{bytes}\n"));
                put(&root, &format!("{dir}/{hits}"), &format!("{hit}\n"));
            }
            hit_limit(version, &root.join("unit/group/box"))
        };
        let hit = "low 0\noom 1\noom_kill 1";
        let not = "low 0\noom 0\noom_kill 1";
        use Version::{V1, V2};
        assert_eq!(
            limits(V2, &[("unit", "250", hit), ("unit/group", "max", not), ("unit/group/box", "900", not)]),
            Some(250)
        );
        assert_eq!(limits(V2, &[("unit/group/box", "900", hit)]), Some(900));
        assert_eq!(limits(V2, &[("unit", "250", not), ("unit/group/box", "900", not)]), None, "above what can be seen");
        let none = "9223372036854771712";
        assert_eq!(
            limits(V1, &[("unit", none, "0"), ("unit/group", "800", "3"), ("unit/group/box", "900", "0")]),
            Some(800)
        );
        assert_eq!(limits(V1, &[("unit/group/box", "900", "1")]), Some(900), "the nearest");
        fs::remove_dir_all(root).unwrap();
    }
}
