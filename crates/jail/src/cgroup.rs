//! This module limits memory, processors and processes with cgroup v1, v2, or both at once.
//!
//! The server creates a tree `sandpool-<label>/<group>/…/<sandbox>` under its own cgroup of each hierarchy, and never
//! above that cgroup or its systemd unit: the operator's limits on the server also apply to its sandboxes. A sandbox
//! with a browser has two child cgroups, `code` and `browser`, because on v2 only leaves may contain processes. The
//! limits of the sandbox apply to both together and those of the browser to the browser alone; the process limit of the
//! code is the remainder.
//!
//! Finding a layout only reads files. Claiming it changes a v2 cgroup so that it can hold a tree, and releasing it
//! reverts that. Every path goes through a given file-system root, so that tests can imitate layouts that this machine
//! does not have.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

use crate::spec::{BrowserRoom, Limits};

mod layout;
mod tree;
mod v2;

pub use layout::{CgroupSource, Layout};
pub(crate) use tree::{Cgroup, CgroupPart, SOCKET_LIMIT, Tree};
pub(crate) use v2::{Unified, is_unit};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Controller {
    Memory,
    Cpu,
    Pids,
    /// Counts processor time and limits nothing. Only v1 has it; v2 counts in every cgroup.
    Accounting,
}

impl Controller {
    /// The controllers that limit sandboxes.
    pub(crate) const ALL: [Self; 3] = [Self::Memory, Self::Cpu, Self::Pids];

    pub fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Cpu => "cpu",
            Self::Pids => "pids",
            Self::Accounting => "cpuacct",
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
    /// Name of the group; it matches `[a-z0-9-]{1,64}`.
    pub name: String,
    pub memory_bytes: Option<u64>,
    pub cpu_millis: Option<u32>,
}

/// The reason why a controller cannot be used, and a remedy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Absence {
    pub why: String,
    pub what_to_do: String,
}

impl Absence {
    pub(crate) fn new(why: impl Into<String>, what_to_do: impl Into<String>) -> Self {
        Self { why: why.into(), what_to_do: what_to_do.into() }
    }
}

/// Limits of one cgroup. `None` keeps the Linux kernel's default, which is no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct CgroupLimits {
    pub memory_bytes: Option<u64>,
    pub cpu_millis: Option<u32>,
    pub pids: Option<u32>,
}

impl From<Limits> for CgroupLimits {
    fn from(Limits { memory_bytes, cpu_millis, pids, .. }: Limits) -> Self {
        Self { memory_bytes: Some(memory_bytes), cpu_millis: Some(cpu_millis), pids: Some(pids) }
    }
}

impl From<BrowserRoom> for CgroupLimits {
    fn from(BrowserRoom { memory_bytes, pids }: BrowserRoom) -> Self {
        Self { memory_bytes: Some(memory_bytes), cpu_millis: None, pids: Some(pids) }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Usage {
    pub memory_bytes: Option<u64>,
    pub pids: Option<u32>,
    /// Processor time used since the sandbox was created, in microseconds.
    pub cpu_usec: Option<u64>,
    /// Number of processes killed for lack of memory, except those of the browser.
    pub oom_kills: u64,
    pub browser_oom_kills: u64,
    /// The memory limit that caused a kill, if the Linux kernel's counters identify it.
    pub oom_limit_bytes: Option<u64>,
    /// The memory limit at which the launcher ended the sandbox, where no cgroup limits its memory.
    pub ended_at_bytes: Option<u64>,
}

struct Mount {
    root: PathBuf,
    point: PathBuf,
    kind: Version,
    options: Vec<String>,
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

fn lists(dir: &Path, file: &str, controller: Controller) -> bool {
    fs::read_to_string(dir.join(file)).is_ok_and(|text| text.split_whitespace().any(|c| c == controller.name()))
}

fn named(dir: &Path) -> impl FnOnce(io::Error) -> io::Error + '_ {
    move |e| io::Error::new(e.kind(), format!("`{}`: {e}", dir.display()))
}

fn write(dir: &Path, file: &str, value: &str) -> io::Result<()> {
    let path = dir.join(file);
    fs::write(&path, value).map_err(named(&path))
}

/// Kills every process in the tree that a dead server left at `top` and removes its directories. Returns true if
/// nothing remains.
pub(crate) fn sweep(top: &Path) -> bool {
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
mod tests;
