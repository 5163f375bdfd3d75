//! This module handles the request for a sandbox, up to the process that builds it.

use std::fs::DirBuilder;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::DirBuilderExt;
use std::time::Instant;

use crate::apply::{self, Handles};
use crate::cgroup::{CgroupLimits, Usage};
use crate::ids::{IdMap, Mode, Slots};
use crate::kept_volumes::{KeptVolumeRequest, ParkedVolume, VolumeLease, VolumesFull};
use crate::launcher::failed;
use crate::plan::{self, Plan, plan};
use crate::spare::Spare;
use crate::spec::{BrowserJail, JailSpec, Limits, PROXY, SandboxSpec, SharedVolumeSpec, Volume, workspace_of};
use crate::survey::ProcessBound;
use crate::sys;
use crate::token::{Token, WatchedFd};
use crate::volume::{self, Purpose};
use crate::wire::{self, Create, LauncherReply};
use crate::zygote;

use super::{
    BUILD_TIME, BuildStep, Keeper, LAUNCHER_STEPS, MAX_GROUPS, NAMESPACES, NAMESPACES_WITH_A_SPARE, Phase, ReusedParts,
    SandboxRecord, check_name,
};

impl Keeper {
    pub(super) fn create(&mut self, request: u64, create: Create) -> io::Result<()> {
        let Create { sandbox: id, spec, fail_at } = create;
        check_name(&id)?;
        self.check_shared(&spec)?;
        if let Some(KeptVolumeRequest { name, .. }) = &spec.kept
            && self.is_leased(name)
        {
            self.reply(request, LauncherReply::InUse);
            return Ok(());
        }
        if spec.groups.is_empty() || spec.groups.len() > MAX_GROUPS {
            return Err(io::Error::other(format!("a sandbox has one to {MAX_GROUPS} groups around it")));
        }
        spec.groups.iter().try_for_each(|group| check_name(&group.name))?;
        if self.ending.is_some() || self.find(&id).is_some() {
            return Err(io::Error::other("the launcher is ending, or the sandbox exists"));
        }
        if let Err(message) = self.admits() {
            self.reply(request, LauncherReply::NoSpace { message });
            return Ok(());
        }
        let mut sandbox = SandboxRecord {
            dir: self.instance.dir.join(&id),
            cgroup: self.tree.sandbox(&spec.groups, &id, spec.browser.is_some()),
            id,
            groups: spec.groups.clone(),
            memory_limit: spec.limits.memory_bytes,
            ended_at_bytes: None,
            map: IdMap::new(Mode::Single, 0, 1, u32::MAX).map_err(io::Error::other)?,
            slot: None,
            browser_slot: None,
            pid: None,
            pidfd: None,
            control: None,
            forks: None,
            entry: Vec::new(),
            browser_entry: None,
            driver: None,
            log: None,
            logged: 0,
            volume: None,
            kept: None,
            kept_loop: None,
            kept_mount: None,
            egress: None,
            notes: self.notes(&spec),
            fail_at,
            last_usage: Usage::default(),
            busy: None,
            phase: Phase::Building { request, until: Instant::now() + BUILD_TIME, exec: false },
        };
        let key = self.next;
        self.next += 1;
        let built = self.build(key, &mut sandbox, &spec);
        self.deadlines.extend(sandbox.phase.until().map(|until| (until, key)));
        self.ids.insert(sandbox.id.clone(), key);
        self.pids.extend(sandbox.pid.map(|pid| (pid, key)));
        self.sandboxes.insert(key, sandbox);
        if let Err(e) = built {
            // Everything created so far is removed like any sandbox; the reply follows when nothing is left.
            let message = e.to_string();
            // A client reads this refusal. Other errors that say ENOSPC may name paths of the host.
            let full = e.get_ref().is_some_and(|why| why.is::<VolumesFull>());
            self.end(key, Some((request, if full { LauncherReply::NoSpace { message } } else { failed(message) })));
        }
        Ok(())
    }

    fn build(&mut self, key: u64, sandbox: &mut SandboxRecord, spec: &SandboxSpec) -> io::Result<()> {
        sandbox.fail_in_test(BuildStep::Directory)?;
        DirBuilder::new().mode(0o700).create(&sandbox.dir)?;
        sandbox.fail_in_test(BuildStep::Kept)?;
        sandbox.kept = spec.kept.as_ref().map(|wanted| self.lease_volume(sandbox, wanted, spec)).transpose()?;
        sandbox.fail_in_test(BuildStep::Slot)?;
        let volume_slot = sandbox.kept.as_ref().and_then(|lease| lease.slot);
        let slots = self.slots.as_ref().map_or(1, Slots::count);
        let slot = match &mut self.slots {
            Some(slots) if volume_slot.is_none() => Some(slots.take()?),
            _ => None,
        };
        let number = volume_slot.or(slot.as_ref().map(|s| s.number)).unwrap_or(0);
        sandbox.map = IdMap::new(self.survey.mode, number, slots, self.owner).map_err(io::Error::other)?;
        if self.has_owners_uid(spec) {
            sandbox.map = sandbox.map.as_owner(self.owner).map_err(io::Error::other)?;
        }
        if let (Some(_), Some(slots)) = (&spec.browser, &mut self.slots) {
            let slot = slots.take()?;
            sandbox.map = sandbox.map.with_browser(slot.number, slots.count()).map_err(io::Error::other)?;
            sandbox.browser_slot = Some(slot);
        }
        let parked = sandbox.kept.as_mut().and_then(|lease| lease.parked.take());
        let (mounted, device, parked) = match parked {
            Some(ParkedVolume { mount, slot, device }) => (Some(mount), Some(device), Some(slot)),
            None => (None, None, None),
        };
        (sandbox.slot, sandbox.kept_loop) = (slot.or(parked), device);
        sandbox.fail_in_test(BuildStep::Template)?;
        let volume = self.volume(sandbox, spec)?;
        sandbox.fail_in_test(BuildStep::Cgroup)?;
        let (limits, browser) = (spec.limits.into(), spec.browser.map(CgroupLimits::from));
        sandbox.cgroup = self.tree.create(&spec.groups, (&sandbox.id, limits), browser)?;
        let spec = self.complete(sandbox, spec, volume);
        spec.check().map_err(io::Error::other)?;
        let plan = plan(&spec);
        (sandbox.entry, sandbox.browser_entry) = (plan::entry(&spec), plan::browser_entry(&spec));
        // Steps that a spare has already run cannot fail here. A test of such a failure therefore gets no spare.
        let own =
            sandbox.fail_at.and_then(|step| step.checked_sub(LAUNCHER_STEPS)).is_some_and(|s| plan.base.contains(&s));
        let spare = if own { None } else { self.spares.take(&spec) };
        sandbox.fail_in_test(BuildStep::Spare)?;
        let prepared = spare.map(|Spare { prepared, volume, notes }| {
            sandbox.volume = volume;
            sandbox.notes.extend(notes);
            prepared
        });
        sandbox.fail_in_test(BuildStep::Clone)?;
        self.launch(key, sandbox, &plan, (prepared, mounted))
    }

    /// Rejects shared directories that contain the sockets of other sandboxes, the images of their volumes or the locks
    /// of their uids.
    fn check_shared(&self, spec: &SandboxSpec) -> io::Result<()> {
        // The packages of a workspace are in the workspace, and may not exist yet.
        let required = spec.volumes.iter().filter(|shared| workspace_of(shared, &spec.volumes).is_none());
        for SharedVolumeSpec { host, .. } in required {
            let absent = |e: io::Error| io::Error::other(format!("shared directory `{}`: {e}", host.display()));
            let real = host.canonicalize().map_err(absent)?;
            let ours = self.private.iter().filter_map(|dir| dir.canonicalize().ok());
            if ours.into_iter().any(|dir| dir.starts_with(&real) || real.starts_with(dir)) {
                return Err(io::Error::other(format!("`{}` holds the server's own files", host.display())));
            }
        }
        Ok(())
    }

    /// Returns whether the code of a sandbox has the uid of the server's user in place of a subordinate one: the files
    /// of shared directories are that user's.
    fn has_owners_uid(&self, spec: &SandboxSpec) -> bool {
        self.survey.mode == Mode::Sub && !spec.volumes.is_empty()
    }

    fn notes(&self, spec: &SandboxSpec) -> Vec<String> {
        let shared = format!(
            "{}: a sandbox with directories of the host is your own user on the host, so that files there are yours \
             (start the server as root, or remove the mounts)",
            crate::survey::HOST_UID
        );
        let same_uid = self.survey.mode == Mode::Single && spec.browser.is_some();
        let browser = match self.survey.landlock {
            Some(_) => "browser: it has the code's uid, and landlock alone keeps it from the code's files",
            None => "browser: it has the code's uid, and without landlock the code's files too",
        };
        let browser = format!("{browser} (use newuidmap, or start the server as root)");
        let notes = [self.has_owners_uid(spec).then_some(shared), same_uid.then_some(browser)];
        notes.into_iter().flatten().collect()
    }

    pub(super) fn is_leased(&self, name: &str) -> bool {
        self.sandboxes.values().filter_map(|sandbox| sandbox.kept.as_ref()).any(|lease| lease.name == name)
    }

    fn lease_volume(
        &mut self,
        sandbox: &SandboxRecord,
        wanted: &KeptVolumeRequest,
        spec: &SandboxSpec,
    ) -> io::Result<VolumeLease> {
        let bytes = if self.survey.ext4 { wanted.bytes } else { wanted.bytes.min(half_the_memory(spec)) };
        let wanted = KeptVolumeRequest { bytes, ..wanted.clone() };
        self.store.lease(&wanted, &sandbox.dir, &spec.groups, self.slots.as_mut())
    }

    fn volume(&self, sandbox: &SandboxRecord, spec: &SandboxSpec) -> io::Result<Volume> {
        let Limits { disk_bytes, disk_inodes, .. } = spec.limits;
        if self.survey.ext4 {
            let dir = self.instance.state_dir.join("templates");
            let template = volume::template(&dir, Purpose::Own, disk_bytes, disk_inodes);
            let template = template.map_err(io::Error::other)?;
            return Ok(Volume::Ext4 { template, image: sandbox.image() });
        }
        Ok(Volume::Tmpfs { bytes: disk_bytes.min(half_the_memory(spec)), inodes: disk_inodes })
    }

    fn complete(&self, sandbox: &SandboxRecord, spec: &SandboxSpec, volume: Volume) -> JailSpec {
        JailSpec {
            map: sandbox.map,
            host: self.host.clone(),
            runtime: spec.runtime.clone(),
            files: spec.files.clone(),
            volume,
            kept: sandbox.kept.as_ref().map(|lease| lease.source.clone()),
            kept_packages: spec.kept.as_ref().and_then(|kept| Some(kept.workspace.as_ref()?.packages.clone())),
            shared: spec.volumes.clone(),
            browser: spec.browser.map(|room| BrowserJail { processes: self.process_limit(room.pids) }),
            egress: spec.egress.then_some(PROXY),
            shm_bytes: half_the_memory(spec),
            cgroup_tasks: sandbox.cgroup.code().tasks(),
            processes: self.process_limit(spec.limits.pids),
            dir: sandbox.dir.clone(),
            mount_point: self.mount_point.clone(),
        }
    }

    fn process_limit(&self, pids: u32) -> Option<u64> {
        (self.survey.process_bound() == ProcessBound::Rlimit).then_some(pids.into())
    }

    fn launch(
        &self,
        key: u64,
        sandbox: &mut SandboxRecord,
        plan: &Plan,
        (prepared, kept): ReusedParts,
    ) -> io::Result<()> {
        let ((ours, control), (log_end, log)) = (wire::connection()?, wire::log_pipe()?);
        let guest = self.guest.try_clone()?;
        let (forks_end, forks) = zygote::guest_channel()?;
        let fail_at =
            sandbox.fail_at.filter(|_| cfg!(debug_assertions)).and_then(|step| step.checked_sub(LAUNCHER_STEPS));
        let cgroup = sandbox.cgroup.code().open_v2()?;
        let namespaces = if prepared.is_some() { NAMESPACES_WITH_A_SPARE } else { NAMESPACES };
        let handles = Handles { control, guest, log, forks, prepared, kept };
        let build = || build_in_child(plan, handles, fail_at);
        let (pid, pidfd) = sys::spawn_child(namespaces, cgroup.as_ref().map(AsFd::as_fd), build)?;
        sandbox.pid = Some(pid);
        for (which, fd) in [(WatchedFd::Control, &ours), (WatchedFd::Process, &pidfd), (WatchedFd::Log, &log_end)] {
            Token::Sandbox(which, key).watch(&self.epoll, fd)?;
        }
        sandbox.pidfd = Some(pidfd);
        sandbox.control = Some(ours);
        sandbox.forks = Some(forks_end);
        sandbox.log = Some(log_end);
        Ok(())
    }
}

/// Closes the launcher's descriptors and runs the plan. With the other end of its own connection open, this process
/// would wait forever for a dead launcher; with the server's connection and the locks open, that death would go
/// unnoticed.
fn build_in_child(plan: &Plan, handles: Handles, fail_at: Option<usize>) {
    let prepared = handles.prepared.iter().flat_map(|prepared| [prepared.root.as_fd(), prepared.network.as_fd()]);
    let Handles { control, guest, log, forks, .. } = &handles;
    let kept = handles.kept.iter().map(AsFd::as_fd);
    let keep: Vec<_> = [control, guest, log, forks].map(AsFd::as_fd).into_iter().chain(prepared).chain(kept).collect();
    if sys::separate_child(&keep).is_ok() {
        apply::run(plan, handles, fail_at);
    }
}

/// Returns half of the memory limit, for volumes that are charged to the sandbox's memory. A full volume has to return
/// ENOSPC before memory runs out and a process is killed.
fn half_the_memory(spec: &SandboxSpec) -> u64 {
    spec.limits.memory_bytes / 2
}
