//! This module handles the v2 hierarchy: it finds the cgroup below which the server may create a tree, and prepares it.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use rustix::fs::Access;
use rustix::process::Pid;
use serde::{Deserialize, Serialize};

use super::layout::{OwnTree, try_mkdir};
use super::{Absence, Controller, Mount, Version, directory, lists, members, memberships, mounts, named, under, write};

/// The v2 hierarchy as the server sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unified {
    /// The mount point.
    pub top: PathBuf,
    /// The directory of the server's own cgroup.
    pub own: PathBuf,
    /// The server's own cgroup relative to the mount point, as an absolute path.
    pub path: PathBuf,
}

/// A v2 cgroup that can hold a tree.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct AttachPoint {
    pub(super) base: PathBuf,
    pub(super) controllers: Vec<Controller>,
}

impl Unified {
    /// Returns the hierarchy of this process if v2 is mounted.
    pub(crate) fn find(root: &Path) -> Option<Self> {
        let read = |p: &str| fs::read_to_string(root.join(p)).unwrap_or_default();
        Self::of(root, &memberships(&read("proc/self/cgroup")), &mounts(&read("proc/self/mountinfo")))
    }

    pub(super) fn of(root: &Path, memberships: &[(Vec<String>, PathBuf)], mounts: &[Mount]) -> Option<Self> {
        let (_, path) = memberships.iter().find(|(c, _)| c.is_empty())?;
        let shown = |mount: &Mount| Some((under(root, &mount.point), directory(root, mount, path)?));
        let mounts = mounts.iter().filter(|m| m.kind == Version::V2).filter_map(shown);
        let (top, own) = mounts.into_iter().find(|(_, own)| own.is_dir())?;
        let path = Path::new("/").join(own.strip_prefix(&top).unwrap_or(Path::new("")));
        Some(Self { top, own, path })
    }

    /// Iterates from the server's own cgroup up to the topmost visible one.
    pub(crate) fn ancestors(&self) -> impl Iterator<Item = &Path> {
        self.own.ancestors().take_while(|dir| dir.starts_with(&self.top))
    }

    /// Returns the cgroup of the systemd unit that contains this process.
    pub(crate) fn unit(&self) -> Option<&Path> {
        self.ancestors().find(|dir| *dir != self.top && is_unit(dir))
    }

    /// Finds the nearest cgroup that may hold a tree: one without foreign processes, within the server's own unit if
    /// that unit is delegated. A unit that is not delegated belongs to systemd, which ends a service when a process in
    /// it, at any depth, is killed for lack of memory. Without a unit (in a container or under another init) only the
    /// server's own cgroup qualifies, because the one above may have fewer limits.
    pub(super) fn attach_point(
        &self,
        root: &Path,
        wanted: &[Controller],
        ours: OwnTree<'_>,
    ) -> Result<AttachPoint, Absence> {
        let unit = self.unit();
        let last = match unit {
            None => &self.own,
            Some(unit) if is_delegated(unit, ours.scope) => unit,
            Some(unit) => {
                let why = format!("the unit `{}` is not delegated, so its cgroup belongs to systemd", name_of(unit));
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
                "start the server alone in its cgroup: by `exec` in the script that starts it, or in a separate unit",
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
            Some(memory) => Err(self.missing_controller(dir, *memory)),
            None => Ok(usable),
        }
    }

    pub(super) fn missing_controller(&self, dir: &Path, controller: Controller) -> Absence {
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
pub(crate) fn is_unit(path: &Path) -> bool {
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
    let handed_over =
        || own != 0 && owner(unit) == Some(own) && unit.parent().and_then(owner).is_some_and(|uid| uid != own);
    marked("user.delegate") || marked("trusted.delegate") || handed_over()
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
pub(super) const LEAF: &str = "sandpool-server";

/// Claims the attach point: enables the controllers for children of its cgroup in a single write, after moving our own
/// processes out of the way. Reverts everything on failure.
pub(super) fn claim(root: &Path, point: &AttachPoint, ours: OwnTree<'_>) -> Result<Option<Claimed>, Absence> {
    let AttachPoint { base, controllers } = point;
    let lacking = || controllers.iter().copied().filter(|c| !lists(base, "cgroup.subtree_control", *c));
    let claimed = Claimed { base: base.clone(), enabled: lacking().collect(), existing: children(base) };
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

pub(super) fn signed(sign: char, controllers: &[Controller]) -> String {
    controllers.iter().map(|c| format!("{sign}{}", c.name())).collect::<Vec<_>>().join(" ")
}

/// The changes that were made to a v2 cgroup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Claimed {
    base: PathBuf,
    enabled: Vec<Controller>,
    /// Child cgroups that existed before the claim and worked without the controllers.
    existing: Vec<PathBuf>,
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
    pub(super) fn release(&self) {
        let leaf = self.base.join(LEAF);
        if children(&self.base).iter().any(|dir| *dir != leaf && !self.existing.contains(dir)) {
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
