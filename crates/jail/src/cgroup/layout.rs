//! This module finds, claims and releases the controllers that the server can use on this machine.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::Access;
use rustix::process::Pid;
use serde::{Deserialize, Serialize};

use crate::instance;
use crate::scope::{self, Manager};

use super::tree::Tree;
use super::v2::{self, Claimed, Unified};
use super::{Absence, Controller, Hierarchy, Mount, Version, directory, lists, memberships, mounts};

/// The controllers that can be used here, and the reasons why the others cannot.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Layout {
    pub hierarchies: Vec<Hierarchy>,
    pub(crate) absent: BTreeMap<Controller, Absence>,
    /// Whether the v2 hierarchy is that of a scope which has not been requested from systemd yet.
    pub scope_to_come: bool,
    pub(crate) claimed: Option<Claimed>,
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
pub(crate) struct OwnTree<'a> {
    /// The server and its launcher. Their descendants count as well.
    pub pids: &'a [Pid],
    /// The name of a scope that systemd created for us.
    pub scope: Option<&'a str>,
}

impl Layout {
    /// Determines what the server can use on this machine. Changes nothing unless `claim` is set, which makes it ready
    /// for use.
    pub(crate) fn obtain(source: CgroupSource, pids: &[Pid], claim: bool) -> Self {
        let root = Path::new("/");
        if source == CgroupSource::Nothing {
            let why = Absence::new("cgroups are turned off for this server", "");
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
                return self
                    .without_scope("requesting a scope from systemd is turned off", "set `systemd_scope = true`");
            }
            Ok(manager) => manager,
        };
        if !claim {
            return match manager.answers() {
                Ok(()) => self.with_scope_to_come(&manager),
                Err(no) => self.without_scope(&no, scope::REACH),
            };
        }
        let started = instance::random_name().map_err(|e| e.to_string()).and_then(|random| {
            let name = format!("sandpool-{random}.scope");
            manager.start_scope(&name).map(|()| name)
        });
        match started {
            Ok(name) => Self::find(root, OwnTree { pids, scope: Some(&name) }, true),
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

    /// Determines where a tree could be attached. With `claim`, the cgroups are also prepared to hold one; controllers
    /// that cannot be prepared are listed as absent, and their cgroups are left unchanged.
    pub(super) fn find(root: &Path, ours: OwnTree<'_>, claim: bool) -> Self {
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
        if let Some(Ok(base)) = v1_base(root, Controller::Accounting, &memberships, &mounts, claim) {
            layout.add(Version::V1, Controller::Accounting, base);
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
        let point = unified.attach_point(root, &wanted, ours).and_then(|point| {
            if claim {
                layout.claimed = v2::claim(root, &point, ours)?;
            }
            Ok(point)
        });
        match point {
            Ok(point) => {
                for controller in wanted {
                    if point.controllers.contains(&controller) {
                        layout.add(Version::V2, controller, point.base.clone());
                    } else {
                        layout.absent.insert(controller, unified.missing_controller(&point.base, controller));
                    }
                }
            }
            Err(why) => layout.absent.extend(wanted.into_iter().map(|c| {
                let has = lists(&unified.top, "cgroup.controllers", c);
                (c, if has { why.clone() } else { unified.missing_controller(&unified.top, c) })
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
    pub(crate) fn tree(&self, label: &str) -> Tree {
        let mut hierarchies = self.hierarchies.clone();
        for hierarchy in &mut hierarchies {
            hierarchy.base.push(format!("sandpool-{label}"));
        }
        Tree { hierarchies }
    }

    /// Reverts the changes of a claim after the tree was removed.
    pub(crate) fn release(&self) {
        if let Some(claimed) = &self.claimed {
            claimed.release();
        }
    }
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

pub(super) fn try_mkdir(base: &Path) -> io::Result<()> {
    let probe = base.join(format!("sandpool-probe-{}", std::process::id()));
    fs::create_dir(&probe)?;
    fs::remove_dir(probe)
}
