//! This module makes spares: root, volume, devices and network of sandboxes, in advance, for the kinds that were
//! requested recently.
//!
//! A spare is the base of a plan ([`crate::plan::Plan::base`]), applied by a child process that hands over two
//! descriptors: a tree of mounts that is attached nowhere, and a network namespace. A spare is unused until a sandbox
//! takes it, and is never returned. It has no name in a file system: when the launcher ends, however that happens, the
//! Linux kernel frees the mounts, the loop device and the image together with the descriptors.

use std::collections::VecDeque;
use std::fs::DirBuilder;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, pidfd_send_signal, waitid};

use crate::apply::{self, PreparedBase, SetupEvent};
use crate::plan::plan;
use crate::pool::{Backoff, RecentDemand};
use crate::spec::{BrowserJail, JailSpec, Volume};
use crate::sys;
use crate::volume::Device;
use crate::wire;

/// Number of spares for a kind after its first request.
const FEWEST: usize = 2;
/// Maximum number of kinds that have spares.
const KINDS: usize = 4;
/// Maximum time to make a spare; after that the attempt is given up.
const MAKING: Duration = Duration::from_secs(20);
/// Pause after a failed attempt; it doubles with each further failure, up to [`LONGEST_PAUSE`].
const PAUSE: Duration = Duration::from_secs(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(3600);

/// The image behind a loop device, which is watched until the device has released it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Backing {
    pub device: Device,
    pub image: PathBuf,
}

impl Backing {
    /// Returns whether this image is still attached to the device.
    pub(crate) fn is_attached(&self) -> bool {
        self.device == Device::of(self.device.number)
            && crate::volume::loop_backing(self.device.number).is_some_and(|backing| backing == self.image)
    }
}

/// A prepared base that can become a sandbox, at most once.
#[derive(Debug)]
pub(crate) struct Spare {
    pub prepared: PreparedBase,
    pub volume: Option<Backing>,
    /// Messages about layers that are weaker than they could be.
    pub notes: Vec<String>,
}

#[derive(Debug)]
struct SpareShelf {
    spec: JailSpec,
    /// The spares of this kind, oldest first.
    ready: VecDeque<Spare>,
    demand: RecentDemand<Instant>,
}

impl SpareShelf {
    fn lacks(&self) -> bool {
        self.ready.len() < self.demand.wanted
    }
}

#[derive(Debug)]
struct Making {
    kind: JailSpec,
    pid: Pid,
    pidfd: OwnedFd,
    /// Connection to the child process; `None` once the child has closed its end.
    control: Option<OwnedFd>,
    /// Whether the child has reported success or failure.
    reported: bool,
    volume: Option<Backing>,
    notes: Vec<String>,
    until: Instant,
}

#[derive(Debug)]
pub(crate) struct Spares {
    dir: PathBuf,
    /// Maximum number of spares of one kind.
    most: usize,
    kinds: Vec<SpareShelf>,
    making: Option<Making>,
    started: u64,
    backoff: Backoff<Instant>,
}

impl Spares {
    /// Creates an empty collection. `instance` is the launcher's instance directory.
    pub(crate) fn new(instance: &Path, most: usize) -> Self {
        let backoff = Backoff::new(PAUSE, LONGEST_PAUSE);
        Self { dir: instance.join("spare"), most, kinds: vec![], making: None, started: 0, backoff }
    }

    /// Takes a spare for this sandbox if there is one. In either case the kind is recorded as requested.
    pub(crate) fn take(&mut self, spec: &JailSpec) -> Option<Spare> {
        let now = Instant::now();
        match self.kinds.iter_mut().find(|kind| alike(&kind.spec, spec)) {
            Some(kind) => {
                let spare = kind.ready.pop_front();
                kind.demand.request(spare.is_some(), self.most, now);
                spare
            }
            None => {
                let demand = RecentDemand::new(FEWEST.min(self.most), now);
                self.kinds.push(SpareShelf { spec: general(spec), ready: VecDeque::new(), demand });
                None
            }
        }
    }

    /// Returns whether a spare should be made once the launcher has nothing else to do.
    pub(crate) fn lacks(&self) -> bool {
        self.making.is_none() && self.backoff.allows(Instant::now()) && self.kinds.iter().any(SpareShelf::lacks)
    }

    /// Returns the time at which [`Spares::tick`] has to be called at the latest.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let lulls = self.kinds.iter().map(|kind| kind.demand.falls_at());
        let retry = self.backoff.retry_at().filter(|_| self.kinds.iter().any(SpareShelf::lacks));
        lulls.chain(self.making.iter().map(|making| making.until)).chain(retry).min()
    }

    /// Returns the descriptors to watch of the process that makes a spare: its connection and its pidfd.
    pub(crate) fn watched(&self) -> impl Iterator<Item = &OwnedFd> {
        self.making.iter().flat_map(|making| making.control.iter().chain([&making.pidfd]))
    }

    /// Starts a child process that makes a spare.
    pub(crate) fn begin(&mut self) -> io::Result<()> {
        let Some(kind) = self.kinds.iter().find(|kind| kind.lacks()) else { return Ok(()) };
        match DirBuilder::new().mode(0o700).create(&self.dir) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
            _ => {}
        }
        self.started += 1;
        let spec = self.next_spec(&kind.spec);
        let plan = plan(&spec);
        let (ours, control) = wire::connection()?;
        let (pid, pidfd) = sys::spawn_child(0, None, || prepare_in_child(&plan, control))?;
        let (kind, until) = (kind.spec.clone(), Instant::now() + MAKING);
        let (control, notes) = (Some(ours), Vec::new());
        self.making = Some(Making { kind, pid, pidfd, control, reported: false, volume: None, notes, until });
        Ok(())
    }

    /// Returns the specification of the next spare of this kind, with the paths at which it is made.
    fn next_spec(&self, kind: &JailSpec) -> JailSpec {
        let volume = match &kind.volume {
            Volume::Ext4 { template, .. } => {
                Volume::Ext4 { template: template.clone(), image: image(&self.dir, self.started) }
            }
            tmpfs @ Volume::Tmpfs { .. } => tmpfs.clone(),
        };
        JailSpec { dir: self.dir.clone(), volume, ..kind.clone() }
    }

    /// Reads one message from the process that makes a spare. Returns false if there is none.
    pub(crate) fn read_event(&mut self) -> bool {
        let Some(making) = &mut self.making else { return false };
        let Some(control) = &making.control else { return false };
        match wire::receive::<SetupEvent>(control) {
            Ok(Some((SetupEvent::Loop { device }, _))) => {
                making.volume = Some(Backing { device, image: image(&self.dir, self.started) });
            }
            Ok(Some((SetupEvent::Note { message }, _))) => making.notes.push(message),
            Ok(Some((SetupEvent::Prepared, fds))) => {
                making.reported = true;
                let mut fds = fds.into_iter();
                if let (Some(root), Some(network)) = (fds.next(), fds.next())
                    && let Some(kind) = self.kinds.iter_mut().find(|kind| alike(&kind.spec, &making.kind))
                {
                    let (prepared, notes) = (PreparedBase { root, network }, std::mem::take(&mut making.notes));
                    kind.ready.push_back(Spare { prepared, volume: making.volume.take(), notes });
                    self.backoff.reset();
                }
            }
            Ok(Some((SetupEvent::Failed { message, .. }, _))) => {
                making.reported = true;
                self.failed(&message);
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return false,
            _ => making.control = None,
        }
        true
    }

    pub(crate) fn reaped(&mut self, pid: Pid) {
        if self.making.as_ref().is_some_and(|making| making.pid == pid) {
            // Its last messages may still be unread.
            while self.read_event() {}
            if self.making.take().is_some_and(|making| !making.reported) {
                self.failed("the process that makes it ended");
            }
        }
    }

    /// Logs the failure and delays the next attempt. Until then sandboxes are created without a spare.
    pub(crate) fn failed(&mut self, why: &str) {
        crate::launcher::log(&format!("launcher: no spare sandbox: {why}"));
        self.backoff.failed(Instant::now());
    }

    /// Reduces the spares of kinds without recent requests, and removes kinds that were not requested for long. Returns
    /// the spares that are given up.
    #[must_use = "unmounting takes long, so a child process has to drop the spares"]
    pub(crate) fn tick(&mut self) -> Vec<Spare> {
        let now = Instant::now();
        if let Some(making) = &self.making
            && now > making.until
        {
            let _ = pidfd_send_signal(&making.pidfd, Signal::KILL);
            self.making = None;
            self.failed("it was not ready in time");
        }
        let mut given_up = vec![];
        for kind in &mut self.kinds {
            if kind.demand.fall(now) {
                given_up.extend(kind.ready.drain(kind.demand.wanted.min(kind.ready.len())..));
            }
        }
        while self.kinds.len() > KINDS
            && let Some(oldest) = (0..self.kinds.len()).min_by_key(|n| self.kinds[*n].demand.asked)
        {
            given_up.extend(self.kinds.swap_remove(oldest).ready);
        }
        self.kinds.retain(|kind| kind.demand.wanted > 0);
        given_up
    }

    /// Kills the process that makes a spare, if there is one, and waits for its end.
    pub(crate) fn close(&mut self) {
        if let Some(making) = self.making.take() {
            let _ = pidfd_send_signal(&making.pidfd, Signal::KILL);
            let _ = waitid(WaitId::PidFd(making.pidfd.as_fd()), WaitIdOptions::EXITED);
        }
        self.kinds.clear();
    }
}

fn image(dir: &Path, number: u64) -> PathBuf {
    dir.join(format!("{number}.img"))
}

/// Returns the specification without the parts that differ between sandboxes of a kind.
fn general(spec: &JailSpec) -> JailSpec {
    let browser = spec.browser.map(|_| BrowserJail { processes: None });
    JailSpec { cgroup_tasks: vec![], processes: None, browser, ..spec.clone() }
}

/// Returns whether the plans of both specifications have the same base, apart from names that matter only while the
/// spare is made.
fn alike(a: &JailSpec, b: &JailSpec) -> bool {
    let volume = match (&a.volume, &b.volume) {
        (Volume::Ext4 { template: a, .. }, Volume::Ext4 { template: b, .. }) => a == b,
        (a, b) => a == b,
    };
    volume
        && a.kept_dir() == b.kept_dir()
        && a.browser.is_some() == b.browser.is_some()
        && a.shm_bytes == b.shm_bytes
        && (&a.runtime, &a.shared, &a.files, &a.host) == (&b.runtime, &b.shared, &b.files, &b.host)
}

/// Makes the spare in the child. Like every child of the launcher, it closes the launcher's descriptors first.
fn prepare_in_child(plan: &crate::plan::Plan, control: OwnedFd) {
    let separated = sys::separate_child(&[control.as_fd()])
        .and_then(|()| rustix::process::setpriority_process(None, BACKGROUND))
        .and_then(|()| sys::unshare(libc::CLONE_NEWNS | libc::CLONE_NEWNET));
    if separated.is_ok() {
        apply::prepare(plan, control);
    }
}

/// Nice value of the child: requests take precedence over spares.
const BACKGROUND: i32 = 10;
