//! This module handles a sandbox after its process was started: its set-up, its end, and the removal of its remains.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Instant;

use rustix::net::SendFlags;

use crate::apply::{self, SetupEvent};
use crate::disk::Budget;
use crate::kept_volumes::ParkedVolume;
use crate::launcher::{failed, relay, send_reply_with};
use crate::spare::Backing;
use crate::spec;
use crate::volume;
use crate::wire::{self, LauncherReply};

use super::{BuildStep, END_TIME, Keeper, LOG_BYTES, Phase, SandboxRecord};

impl Keeper {
    /// Handles a message from a process that is becoming a guest, or the end of its connection.
    pub(super) fn control(&mut self, key: u64) {
        let Some(sandbox) = self.sandboxes.get_mut(&key) else { return };
        let Some(control) = &sandbox.control else { return };
        let (report, fds) = wire::receive::<SetupEvent>(control).ok().flatten().unzip();
        let fds = fds.unwrap_or_default();
        match (report, &mut sandbox.phase) {
            (Some(SetupEvent::Loop { device }), _) => sandbox.volume = Some(Backing { device, image: sandbox.image() }),
            (Some(SetupEvent::KeptLoop { device }), _) => sandbox.kept_loop = Some(device),
            (Some(SetupEvent::KeptMount), _) => sandbox.kept_mount = fds.into_iter().next(),
            (Some(SetupEvent::Egress), _) => sandbox.egress = fds.into_iter().next(),
            (Some(SetupEvent::Note { message }), _) => sandbox.notes.push(message),
            (Some(SetupEvent::InUse), _) => self.fail_with(key, LauncherReply::InUse),
            (Some(SetupEvent::WantsMaps), _) => {
                if let Some(message) = self.disk.as_mut().and_then(|disk| add_to_budget(disk, sandbox).err()) {
                    return self.fail_with(key, LauncherReply::NoSpace { message });
                }
                if let Err(e) = sandbox.fail_in_test(BuildStep::Maps).and_then(|()| write_maps(sandbox)) {
                    self.fail(key, &format!("id maps: {e}"));
                }
            }
            (Some(SetupEvent::Exec), Phase::Building { exec, .. }) => *exec = true,
            (Some(SetupEvent::Failed { message, .. }), _) => self.fail(key, &message),
            (None, Phase::Building { exec: true, .. }) => self.started(key),
            (None, Phase::Building { .. }) => self.fail(key, "the process ended while it was being set up"),
            (_, _) => sandbox.control = None,
        }
    }

    /// Records that the guest has started, and replies to the request.
    fn started(&mut self, key: u64) {
        let Some(sandbox) = self.sandboxes.get_mut(&key) else { return };
        match sandbox.kept.as_mut().map_or(Ok(true), |lease| self.store.settle(lease)) {
            Ok(true) => {}
            Ok(false) => return self.fail_with(key, LauncherReply::InUse),
            Err(e) => return self.fail(key, &format!("the kept volume: {e}")),
        }
        sandbox.control = None;
        let (notes, egress) = (std::mem::take(&mut sandbox.notes), sandbox.egress.take());
        let created = LauncherReply::Created { notes, is_owner: sandbox.map.is_owner() };
        self.sockets.begin();
        self.memory.iter_mut().for_each(|watch| watch.begin(key));
        if let Phase::Building { request, until, .. } = std::mem::replace(&mut sandbox.phase, Phase::Running) {
            self.deadlines.remove(&(until, key));
            let fds: Vec<_> = egress.iter().map(AsFd::as_fd).collect();
            let _ = send_reply_with(&self.socket, request, created, &fds);
        }
    }

    pub(super) fn fail(&mut self, key: u64, message: &str) {
        self.fail_with(key, failed(message));
    }

    /// Ends a sandbox whose creation failed. The request is answered when nothing of it is left.
    fn fail_with(&mut self, key: u64, reply: LauncherReply) {
        let Some(sandbox) = self.sandboxes.get_mut(&key) else { return };
        sandbox.control = None;
        if let Phase::Building { request, .. } = sandbox.phase {
            self.end(key, Some((request, reply)));
        }
    }

    pub(super) fn guest_log(&mut self, key: u64) {
        let Some(sandbox) = self.sandboxes.get_mut(&key) else { return };
        let Some(pipe) = &sandbox.log else { return };
        let mut buffer = [0; 2048];
        match rustix::io::read(pipe, &mut buffer) {
            Ok(0) | Err(_) => sandbox.log = None,
            Ok(got) => {
                sandbox.logged += got;
                if sandbox.logged <= LOG_BYTES {
                    relay(&format!("guest {}", &sandbox.id[..sandbox.id.len().min(8)]), &buffer[..got]);
                }
            }
        }
    }

    /// Kills the sandbox. The reply follows when nothing of it is left.
    pub(super) fn end(&mut self, key: u64, reply: Option<(u64, LauncherReply)>) {
        let Some(sandbox) = self.sandboxes.get_mut(&key) else { return };
        if !matches!(sandbox.phase, Phase::Ending { .. }) {
            sandbox.last_usage = sandbox.cgroup.usage();
        }
        sandbox.kill();
        self.zygote.leave(key);
        let mut waiting: Vec<(u64, LauncherReply)> = reply.into_iter().collect();
        match &mut sandbox.phase {
            Phase::Ending { requests, .. } => return requests.append(&mut waiting),
            // The sandbox is destroyed before it was ready, so the request that created it is answered as well.
            Phase::Building { request, .. } if waiting.first().is_none_or(|(id, _)| id != request) => {
                waiting.push((*request, failed("the sandbox was destroyed while it was being made")));
            }
            Phase::Building { .. } | Phase::Running => {}
        }
        let until = Instant::now() + END_TIME;
        let before = std::mem::replace(&mut sandbox.phase, Phase::Ending { requests: waiting, until });
        // A volume with an error is read-only, which its flags do not always show. Mounting it anew repairs it, so it
        // is not parked.
        let has_errors = sandbox.kept_loop.is_some_and(|device| volume::has_errors(device.number));
        let is_writable = |mount: &OwnedFd| {
            let found = rustix::fs::fstatvfs(mount);
            !has_errors && found.is_ok_and(|found| !found.f_flag.contains(rustix::fs::StatVfsMountFlags::RDONLY))
        };
        let parks = matches!(before, Phase::Running)
            && self.ending.is_none()
            && sandbox.kept_mount.as_ref().is_some_and(is_writable);
        let unparked = sandbox.kept_mount.take_if(|_| !parks);
        if let Some(before) = before.until() {
            self.deadlines.remove(&(before, key));
        }
        self.deadlines.insert((until, key));
        if sandbox.pid.is_none() {
            self.leaving.insert(key);
        }
        if let Some(mount) = unparked {
            self.release_mounts(vec![mount]);
        }
    }

    /// Removes the remains of a dead sandbox. If something is still busy, the removal is retried soon.
    pub(super) fn finish(&mut self, key: u64) {
        if let Some(sandbox) = self.sandboxes.get_mut(&key) {
            // An earlier attempt may have removed the cgroup.
            sandbox.last_usage.cpu_usec = sandbox.cgroup.cpu_usec().or(sandbox.last_usage.cpu_usec);
            sandbox.busy = clear(sandbox);
            if sandbox.busy.is_none() {
                self.forget(key);
            }
        }
    }

    /// Answers the waiting requests with a failure when the deadline has passed. The removal is still retried.
    pub(super) fn late(&mut self, key: u64) {
        let Some(SandboxRecord { phase: Phase::Ending { requests, until }, busy, pid, .. }) =
            self.sandboxes.get_mut(&key)
        else {
            return;
        };
        *until = Instant::now() + END_TIME;
        self.deadlines.insert((*until, key));
        let busy = if pid.is_some() { "its process does not end" } else { busy.as_deref().unwrap_or("not removed") };
        let message = format!("the sandbox was killed, but {busy}; it is tried again");
        for (id, _) in std::mem::take(requests) {
            self.reply(id, failed(message.clone()));
        }
    }

    fn forget(&mut self, key: u64) {
        let Some(mut sandbox) = self.sandboxes.remove(&key) else { return };
        let phase = std::mem::replace(&mut sandbox.phase, Phase::Running);
        self.ids.remove(&sandbox.id);
        self.leaving.remove(&key);
        self.memory.iter_mut().for_each(|watch| watch.forget(key));
        if let Some(until) = phase.until() {
            self.deadlines.remove(&(until, key));
        }
        if let Some(disk) = &mut self.disk {
            volumes(&sandbox).for_each(|(device, _)| disk.remove(device));
        }
        if let Some(lease) = sandbox.kept.take() {
            self.store.take_back(&lease);
            if let (Some(mount), Some(slot), Some(device)) =
                (sandbox.kept_mount.take(), sandbox.slot.take(), sandbox.kept_loop)
            {
                self.park(lease.name, ParkedVolume { mount, slot, device });
            }
        }
        self.tidy(&sandbox.groups);
        let usage = sandbox.last_usage;
        // Free the uid and the descriptors before the requests are answered.
        drop(sandbox);
        if let Phase::Ending { requests, .. } = phase {
            for (id, reply) in requests {
                self.reply(
                    id,
                    if matches!(reply, LauncherReply::Done) { LauncherReply::Destroyed(usage) } else { reply },
                );
            }
        }
    }
}

/// Returns the on-disk volumes of a sandbox, with their directories inside it. A shared directory can be in place of
/// `/workspace`, but never of `/tmp`.
fn volumes(sandbox: &SandboxRecord) -> impl Iterator<Item = (volume::Device, &'static str)> {
    let own = sandbox.volume.as_ref().map(|backing| (backing.device, "tmp"));
    let is_workspace = sandbox.kept.as_ref().is_some_and(|lease| lease.owner.is_some());
    let kept_dir = if is_workspace { "workspace" } else { "data" };
    own.into_iter().chain(sandbox.kept_loop.map(|device| (device, kept_dir)))
}

/// Adds the sandbox's volumes to the disk budget before any code runs, while the process waits for its id maps in its
/// new root.
fn add_to_budget(disk: &mut Budget, sandbox: &SandboxRecord) -> Result<(), String> {
    let Some(pid) = sandbox.pid else { return Ok(()) };
    let root = PathBuf::from(format!("/proc/{}/root", pid.as_raw_nonzero()));
    let stat = sandbox.cgroup.memory_stat();
    volumes(sandbox).try_for_each(|(device, dir)| disk.add(device, root.join(dir), stat.clone()))
}

/// Removes cgroups and files and checks the loop devices. Returns the obstacle if something is still in use.
fn clear(sandbox: &SandboxRecord) -> Option<String> {
    if let Err((path, e)) = sandbox.cgroup.remove() {
        return Some(format!("the cgroup `{}` cannot be removed: {e}", path.display()));
    }
    if let Some(backing) = &sandbox.volume
        && backing.is_attached()
    {
        return Some(format!("/dev/loop{} still holds its volume", backing.device.number));
    }
    if let Some(device) = sandbox.kept_loop
        && sandbox.kept_mount.is_none()
        && device == volume::Device::of(device.number)
        && let Some(spec::KeptVolumeSpec::Ext4 { image, .. } | spec::KeptVolumeSpec::Mounted { image }) =
            sandbox.kept.as_ref().map(|lease| &lease.source)
        && volume::loop_backing(device.number).is_some_and(|backing| backing == *image)
    {
        return Some(format!("/dev/loop{} still holds its kept volume", device.number));
    }
    match remove(&sandbox.dir) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Some(format!("`{}` cannot be removed: {e}", sandbox.dir.display()))
        }
        _ => None,
    }
}

/// Removes the usual content by name, and everything else only if the directory is still not empty.
fn remove(dir: &Path) -> io::Result<()> {
    let _ = fs::remove_file(dir.join(apply::SOCKET));
    fs::remove_dir(dir).or_else(|_| fs::remove_dir_all(dir))
}

fn write_maps(sandbox: &SandboxRecord) -> io::Result<()> {
    let (Some(pid), Some(control)) = (sandbox.pid, &sandbox.control) else {
        return Err(io::Error::other("the process is gone"));
    };
    let proc = PathBuf::from(format!("/proc/{}", pid.as_raw_nonzero()));
    if !sandbox.map.may_set_groups() {
        fs::write(proc.join("setgroups"), "deny")?;
    }
    fs::write(proc.join("uid_map"), sandbox.map.lines())?;
    fs::write(proc.join("gid_map"), sandbox.map.lines())?;
    rustix::net::send(control, b"go", SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
    Ok(())
}
