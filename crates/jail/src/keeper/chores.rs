//! This module does the work beside the requests: spares, parked volumes, and short-lived children for work that would
//! block the loop.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode as FileMode, OFlags};
use rustix::process::Pid;

use crate::cgroup::Group;
use crate::disk::Budget;
use crate::kept_volumes::ParkedVolume;
use crate::launcher::failed;
use crate::sys;
use crate::token::Token;
use crate::wire::LauncherReply;

use super::{Keeper, Phase};

impl Keeper {
    pub(super) fn may_stock(&self) -> bool {
        let building =
            || self.deadlines.iter().any(|(_, key)| matches!(self.sandboxes[key].phase, Phase::Building { .. }));
        self.ending.is_none() && self.spares.lacks() && !building() && self.admits().is_ok()
    }

    /// Checks whether the disk has room for another sandbox or spare.
    pub(super) fn admits(&self) -> Result<(), String> {
        self.disk.as_ref().map_or(Ok(()), Budget::admits)
    }

    pub(super) fn stock(&mut self) {
        let begun = self.spares.begin();
        for fd in self.spares.watched() {
            let _ = Token::Spare.watch(&self.epoll, fd);
        }
        if let Err(e) = begun {
            self.spares.failed(&e.to_string());
        }
    }

    /// Releases mounts. Unmounting takes milliseconds, which this loop cannot spare: a child holds the descriptors
    /// slightly longer than this process, so that they are unmounted when the child ends.
    pub(super) fn release_mounts(&mut self, mounts: Vec<OwnedFd>) {
        let Ok((wait, release)) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC) else { return };
        let keep: Vec<_> = mounts.iter().chain([&wait]).map(AsFd::as_fd).collect();
        self.chore(&keep, || {
            let _ = rustix::io::read(&wait, &mut [0]);
        });
        drop((mounts, release));
    }

    /// Runs `work` in a child that keeps only these descriptors of the launcher.
    pub(super) fn chore(&mut self, keep: &[BorrowedFd<'_>], work: impl FnOnce()) {
        let child = sys::spawn_child(0, None, || {
            if sys::close_all_but(keep).is_ok() {
                work();
            }
        });
        // Without a child, the work happens in this process or later.
        if let Ok((pid, pidfd)) = child {
            self.watch_chore(pid, pidfd);
        }
    }

    pub(super) fn watch_chore(&mut self, pid: Pid, pidfd: OwnedFd) {
        let _ = Token::Chore.watch(&self.epoll, &pidfd);
        self.chores.insert(pid, pidfd);
    }

    pub(super) fn discard(&mut self, name: &str) -> LauncherReply {
        if self.is_leased(name) {
            return LauncherReply::InUse;
        }
        if let Some(parked) = self.store.discard_parked(name) {
            self.release_mounts(vec![parked.mount]);
            return LauncherReply::Done;
        }
        let groups = self.store.groups_of(name).unwrap_or_default();
        match self.store.discard(name) {
            Ok(true) => {
                self.tidy(&groups);
                LauncherReply::Done
            }
            Ok(false) => LauncherReply::InUse,
            Err(e) => failed(e.to_string()),
        }
    }

    /// Removes empty cgroups around sandboxes, unless the memory of a kept volume is charged to them.
    pub(super) fn tidy(&self, groups: &[Group]) {
        if !self.store.is_charged_to(groups) {
            self.tree.tidy(groups);
        }
    }

    /// Parks a kept volume. Its data is synced now, whether or not another sandbox will use it, so that a crash later
    /// loses nothing.
    pub(super) fn park(&mut self, name: String, parked: ParkedVolume) {
        let mount = parked.mount.as_fd();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        if let Ok(dir) = rustix::fs::openat(mount, ".", flags, FileMode::empty()) {
            self.chore(&[dir.as_fd()], || {
                let _ = rustix::fs::syncfs(&dir);
            });
        }
        let watched = self.store.watch().is_some();
        for parked in self.store.park(name, parked) {
            self.release_mounts(vec![parked.mount]);
        }
        if let (false, Some(watch)) = (watched, self.store.watch()) {
            let _ = Token::VolumeImages.watch(&self.epoll, watch);
        }
    }
}
