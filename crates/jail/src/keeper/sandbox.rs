//! The life of a sandbox after its process was started: its set-up, its end, and the removal of its remains.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Instant;

use rustix::net::SendFlags;

use crate::apply::{self, SetupEvent};
use crate::disk::Budget;
use crate::kept_volumes::ParkedVolume;
use crate::launcher::{answer_with, failed, relay};
use crate::spare::Backing;
use crate::spec;
use crate::volume;
use crate::wire::{self, LauncherReply};

use super::{BuildStep, END_TIME, Keeper, LOG_BYTES, Phase, SandboxRecord};

impl Keeper {
    /// Handles a message from a process that is becoming a guest, or the end of its connection.
    pub(super) fn control(&mut self, key: u64) {
        let Some(cell) = self.cells.get_mut(&key) else { return };
        let Some(control) = &cell.control else { return };
        let (report, fds) = wire::receive::<SetupEvent>(control).ok().flatten().unzip();
        let fds = fds.unwrap_or_default();
        match (report, &mut cell.phase) {
            (Some(SetupEvent::Loop { device }), _) => cell.volume = Some(Backing { device, image: cell.image() }),
            (Some(SetupEvent::KeptLoop { device }), _) => cell.kept_loop = Some(device),
            (Some(SetupEvent::KeptHeld), _) => cell.kept_held = fds.into_iter().next(),
            (Some(SetupEvent::Egress), _) => cell.egress = fds.into_iter().next(),
            (Some(SetupEvent::Note { message }), _) => cell.notes.push(message),
            (Some(SetupEvent::InUse), _) => self.fail_with(key, LauncherReply::InUse),
            (Some(SetupEvent::WantsMaps), _) => {
                if let Some(message) = self.disk.as_mut().and_then(|disk| enter_books(disk, cell).err()) {
                    return self.fail_with(key, LauncherReply::NoSpace { message });
                }
                if let Err(e) = cell.fails(BuildStep::Maps).and_then(|()| write_maps(cell)) {
                    self.fail(key, &format!("id maps: {e}"));
                }
            }
            (Some(SetupEvent::Exec), Phase::Building { exec, .. }) => *exec = true,
            (Some(SetupEvent::Failed { message, .. }), _) => self.fail(key, &message),
            (None, Phase::Building { exec: true, .. }) => self.runs(key),
            (None, Phase::Building { .. }) => self.fail(key, "the process ended while it was being set up"),
            (_, _) => cell.control = None,
        }
    }

    /// Records that the guest has started, and answers the request.
    fn runs(&mut self, key: u64) {
        let Some(cell) = self.cells.get_mut(&key) else { return };
        match cell.kept.as_mut().map_or(Ok(true), |lent| self.store.settle(lent)) {
            Ok(true) => {}
            Ok(false) => return self.fail_with(key, LauncherReply::InUse),
            Err(e) => return self.fail(key, &format!("the kept volume: {e}")),
        }
        cell.control = None;
        let (notes, egress) = (std::mem::take(&mut cell.notes), cell.egress.take());
        self.sockets.begin();
        if let Phase::Building { request, until, .. } = std::mem::replace(&mut cell.phase, Phase::Running) {
            self.deadlines.remove(&(until, key));
            let fds: Vec<_> = egress.iter().map(AsFd::as_fd).collect();
            let _ = answer_with(&self.socket, request, LauncherReply::Created { notes }, &fds);
        }
    }

    pub(super) fn fail(&mut self, key: u64, message: &str) {
        self.fail_with(key, failed(message));
    }

    /// Ends a sandbox whose creation failed. The request is answered when nothing of it is left.
    fn fail_with(&mut self, key: u64, reply: LauncherReply) {
        let Some(cell) = self.cells.get_mut(&key) else { return };
        cell.control = None;
        if let Phase::Building { request, .. } = cell.phase {
            self.end(key, Some((request, reply)));
        }
    }

    pub(super) fn guest_log(&mut self, key: u64) {
        let Some(cell) = self.cells.get_mut(&key) else { return };
        let Some(pipe) = &cell.log else { return };
        let mut buffer = [0; 2048];
        match rustix::io::read(pipe, &mut buffer) {
            Ok(0) | Err(_) => cell.log = None,
            Ok(got) => {
                cell.logged += got;
                if cell.logged <= LOG_BYTES {
                    relay(&format!("guest {}", &cell.id[..cell.id.len().min(8)]), &buffer[..got]);
                }
            }
        }
    }

    /// Kills the sandbox. The answer follows when nothing of it is left.
    pub(super) fn end(&mut self, key: u64, answer: Option<(u64, LauncherReply)>) {
        let Some(cell) = self.cells.get_mut(&key) else { return };
        cell.kill();
        self.warmth.leave(key);
        let mut waiting: Vec<(u64, LauncherReply)> = answer.into_iter().collect();
        match &mut cell.phase {
            Phase::Ending { requests, .. } => return requests.append(&mut waiting),
            // The sandbox is destroyed before it was ready, so the request that created it is answered as well.
            Phase::Building { request, .. } if waiting.first().is_none_or(|(id, _)| id != request) => {
                waiting.push((*request, failed("the sandbox was destroyed while it was being made")));
            }
            Phase::Building { .. } | Phase::Running => {}
        }
        let until = Instant::now() + END_TIME;
        let before = std::mem::replace(&mut cell.phase, Phase::Ending { requests: waiting, until });
        // A volume with an error is read-only, which its flags do not always show. Mounting it anew repairs it, so it
        // is not parked.
        let erred = cell.kept_loop.is_some_and(|device| volume::has_errors(device.number));
        let well = |mount: &OwnedFd| {
            let found = rustix::fs::fstatvfs(mount);
            !erred && found.is_ok_and(|found| !found.f_flag.contains(rustix::fs::StatVfsMountFlags::RDONLY))
        };
        let parks =
            matches!(before, Phase::Running) && self.ending.is_none() && cell.kept_held.as_ref().is_some_and(well);
        let unheld = cell.kept_held.take_if(|_| !parks);
        if let Some(before) = before.until() {
            self.deadlines.remove(&(before, key));
        }
        self.deadlines.insert((until, key));
        if cell.pid.is_none() {
            self.leaving.insert(key);
        }
        if let Some(mount) = unheld {
            self.let_go(vec![mount]);
        }
    }

    /// Removes the remains of a dead sandbox. If something is still busy, the removal is retried soon.
    pub(super) fn finish(&mut self, key: u64) {
        if let Some(cell) = self.cells.get_mut(&key) {
            cell.busy = clear(cell);
            if cell.busy.is_none() {
                self.forget(key);
            }
        }
    }

    /// Answers the waiting requests with a failure when the deadline has passed. The removal is still retried.
    pub(super) fn late(&mut self, key: u64) {
        let Some(SandboxRecord { phase: Phase::Ending { requests, until }, busy, pid, .. }) = self.cells.get_mut(&key)
        else {
            return;
        };
        *until = Instant::now() + END_TIME;
        self.deadlines.insert((*until, key));
        let busy = if pid.is_some() { "its process does not end" } else { busy.as_deref().unwrap_or("not removed") };
        let message = format!("the sandbox was killed, but {busy}; it is tried again");
        for (id, _) in std::mem::take(requests) {
            self.answer(id, failed(message.clone()));
        }
    }

    fn forget(&mut self, key: u64) {
        let Some(mut cell) = self.cells.remove(&key) else { return };
        let phase = std::mem::replace(&mut cell.phase, Phase::Running);
        self.ids.remove(&cell.id);
        self.leaving.remove(&key);
        if let Some(until) = phase.until() {
            self.deadlines.remove(&(until, key));
        }
        self.tree.tidy(&cell.groups);
        if let Some(disk) = &mut self.disk {
            volumes(&cell).for_each(|(device, _)| disk.remove(device));
        }
        if let Some(lent) = cell.kept.take() {
            self.store.take_back(&lent);
            if let (Some(mount), Some(slot), Some(device)) = (cell.kept_held.take(), cell.slot.take(), cell.kept_loop) {
                self.park(lent.name, ParkedVolume { mount, slot, device });
            }
        }
        // Free the uid and the descriptors before the requests are answered.
        drop(cell);
        if let Phase::Ending { requests, .. } = phase {
            for (id, reply) in requests {
                self.answer(id, reply);
            }
        }
    }
}

/// Returns the on-disk volumes of a sandbox, with their directories inside it.
fn volumes(cell: &SandboxRecord) -> impl Iterator<Item = (volume::Device, &'static str)> {
    let own = cell.volume.as_ref().map(|backing| (backing.device, "workspace"));
    own.into_iter().chain(cell.kept_loop.map(|device| (device, "data")))
}

/// Adds the sandbox's volumes to the disk budget before any code runs, while the process waits for its id maps in its
/// new root.
fn enter_books(disk: &mut Budget, cell: &SandboxRecord) -> Result<(), String> {
    let Some(pid) = cell.pid else { return Ok(()) };
    let root = PathBuf::from(format!("/proc/{}/root", pid.as_raw_nonzero()));
    let stat = cell.cgroup.memory_stat();
    volumes(cell).try_for_each(|(device, dir)| disk.add(device, root.join(dir), stat.clone()))
}

/// Removes cgroups and files and checks the loop devices. Returns the obstacle if something is still in use.
fn clear(cell: &SandboxRecord) -> Option<String> {
    if let Err((path, e)) = cell.cgroup.remove() {
        return Some(format!("the cgroup `{}` cannot be removed: {e}", path.display()));
    }
    if let Some(backing) = &cell.volume
        && backing.held()
    {
        return Some(format!("/dev/loop{} still holds its volume", backing.device.number));
    }
    if let Some(device) = cell.kept_loop
        && cell.kept_held.is_none()
        && device == volume::Device::of(device.number)
        && let Some(spec::KeptVolumeSpec::Ext4 { image, .. } | spec::KeptVolumeSpec::Mounted { image }) =
            cell.kept.as_ref().map(|lent| &lent.source)
        && volume::loop_backing(device.number).is_some_and(|backing| backing == *image)
    {
        return Some(format!("/dev/loop{} still holds its kept volume", device.number));
    }
    match remove(&cell.dir) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Some(format!("`{}` cannot be removed: {e}", cell.dir.display()))
        }
        _ => None,
    }
}

/// Removes the usual content by name, and everything else only if the directory is still not empty.
fn remove(dir: &Path) -> io::Result<()> {
    let _ = fs::remove_file(dir.join(apply::SOCKET));
    fs::remove_dir(dir).or_else(|_| fs::remove_dir_all(dir))
}

fn write_maps(cell: &SandboxRecord) -> io::Result<()> {
    let (Some(pid), Some(control)) = (cell.pid, &cell.control) else {
        return Err(io::Error::other("the process is gone"));
    };
    let proc = PathBuf::from(format!("/proc/{}", pid.as_raw_nonzero()));
    if !cell.map.may_set_groups() {
        fs::write(proc.join("setgroups"), "deny")?;
    }
    fs::write(proc.join("uid_map"), cell.map.lines())?;
    fs::write(proc.join("gid_map"), cell.map.lines())?;
    rustix::net::send(control, b"go", SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
    Ok(())
}
