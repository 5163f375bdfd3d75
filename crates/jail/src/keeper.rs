//! This module is the launcher's loop: it handles the server's requests and watches the processes that are, or become,
//! sandboxes.
//!
//! Slow work happens in the child that becomes the guest. This side only creates cgroups, writes id maps and watches,
//! so that one sandbox never waits for another. There is a single way to end a sandbox, and a creation that fails at
//! any step takes it too.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, DirBuilder};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};
use rustix::process::{Pid, Signal, pidfd_send_signal};

use crate::apply::PreparedBase;
use crate::cgroup::{Cgroup, Controller, Group, Tree, Usage};
use crate::confine::ConfineStep;
use crate::disk::Budget;
use crate::driver::PendingDrivers;
use crate::ids::{IdMap, Mode, Slot, Slots};
use crate::instance::{self, Instance};
use crate::kept_volumes::{VolumeLease, VolumeStore, memory_of_machine};
use crate::launcher::{failed, log, send_reply};
use crate::memory::{Excess, MemoryWatch, WatchedSandbox};
use crate::spare::{Backing, Spares};
use crate::spec::Host;
use crate::survey::Survey;
use crate::token::{Token, WatchedFd};
use crate::wire::{self, LauncherCall, LauncherReply, LauncherRequest, Start};
use crate::zygote::ZygoteSupervisor;
use crate::{inherited, seccomp, sockets, sys, volume};

mod build;
mod chores;
mod enter;
mod sandbox;

/// The namespaces in which a sandbox's first process starts. The plan adds the cgroup and user namespaces later.
const NAMESPACES: i32 =
    libc::CLONE_NEWNS | libc::CLONE_NEWPID | libc::CLONE_NEWNET | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS;

/// [`NAMESPACES`] without the network, which comes from the spare.
const NAMESPACES_WITH_A_SPARE: i32 = NAMESPACES & !libc::CLONE_NEWNET;

const BUILD_TIME: Duration = Duration::from_secs(20);
const END_TIME: Duration = Duration::from_secs(10);
const MAX_GROUPS: usize = 3;
/// Bytes that the imports of the warm interpreter may leave in `/tmp`.
const WARM_TMP: u64 = 64 << 20;
/// Bytes that a guest may write to the log in its lifetime.
pub(crate) const LOG_BYTES: usize = 64 << 10;

/// Number of steps before those of the plan. Rollback tests select a failing step of the plan by its index plus this.
pub(crate) const LAUNCHER_STEPS: usize = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BuildStep {
    Directory,
    Kept,
    Slot,
    Template,
    Cgroup,
    Spare,
    Clone,
    Maps,
}

/// Parts that a sandbox does not have to create: its base, and the mount of its kept volume.
type ReusedParts = (Option<PreparedBase>, Option<OwnedFd>);

/// Name of the directory in the instance's directory on which roots are mounted.
const ROOT: &str = "root";

#[derive(Debug)]
enum Phase {
    /// The sandbox is being created for `request` and has to be ready at `until`.
    Building { request: u64, until: Instant, exec: bool },
    /// The guest was executed.
    Running,
    /// The sandbox is being destroyed. At `until` the waiting requests are answered with a failure if it still exists.
    Ending { requests: Vec<(u64, LauncherReply)>, until: Instant },
}

impl Phase {
    fn until(&self) -> Option<Instant> {
        match self {
            Self::Building { until, .. } | Self::Ending { until, .. } => Some(*until),
            Self::Running => None,
        }
    }
}

struct SandboxRecord {
    id: String,
    groups: Vec<Group>,
    memory_limit: u64,
    /// The limit for which the watchdog ended the sandbox.
    ended_at_bytes: Option<u64>,
    dir: PathBuf,
    cgroup: Cgroup,
    map: IdMap,
    slot: Option<Slot>,
    browser_slot: Option<Slot>,
    pid: Option<Pid>,
    pidfd: Option<OwnedFd>,
    control: Option<OwnedFd>,
    /// Channel to the guest for kernels that are forked into the sandbox, and the steps by which such a kernel confines
    /// itself.
    forks: Option<OwnedFd>,
    entry: Vec<ConfineStep>,
    /// The steps by which a browser driver confines itself, if the sandbox has room for a browser.
    browser_entry: Option<Vec<ConfineStep>>,
    /// The driver that was last put into the sandbox.
    driver: Option<OwnedFd>,
    log: Option<OwnedFd>,
    logged: usize,
    volume: Option<Backing>,
    kept: Option<VolumeLease>,
    kept_loop: Option<volume::Device>,
    /// The launcher's own mount of the kept volume, which keeps it mounted after the sandbox has ended.
    kept_mount: Option<OwnedFd>,
    /// The listening socket of the sandbox's egress, until the server receives it.
    egress: Option<OwnedFd>,
    notes: Vec<String>,
    fail_at: Option<usize>,
    /// The last counters of its cgroup.
    last_usage: Usage,
    /// The obstacle that the last attempt to remove the sandbox met.
    busy: Option<String>,
    phase: Phase,
}

impl SandboxRecord {
    fn image(&self) -> PathBuf {
        self.dir.join("volume.img")
    }

    fn fail_in_test(&self, step: BuildStep) -> io::Result<()> {
        if cfg!(debug_assertions) && self.fail_at == Some(step as usize) {
            return Err(io::Error::other(format!("{step:?}: a failure was asked for")));
        }
        Ok(())
    }

    fn kill(&self) {
        if let Some(pidfd) = &self.pidfd {
            let _ = pidfd_send_signal(pidfd, Signal::KILL);
        }
    }
}

/// The state of the launcher: the sandboxes that exist, and those that are being created or destroyed.
pub(crate) struct Keeper {
    socket: OwnedFd,
    guest: OwnedFd,
    epoll: OwnedFd,
    /// Delivers SIGCHLD. If the outside parent of a process in a sandbox is killed, the launcher has to reap that
    /// process, and the sandbox's PID 1 does not end before that.
    children: OwnedFd,
    survey: Survey,
    host: Host,
    instance: Instance,
    tree: Tree,
    slots: Option<Slots>,
    store: VolumeStore,
    /// The disk budget, if volumes are on disk.
    disk: Option<Budget>,
    sockets: sockets::Watch,
    /// Holds the memory limits, where no cgroup does.
    memory: Option<MemoryWatch>,
    /// Directories that only servers may access: the state and the locks.
    private: [PathBuf; 2],
    owner: u32,
    /// Directory on which every root is mounted during its creation, each in a separate mount namespace.
    mount_point: PathBuf,
    spares: Spares,
    zygote: ZygoteSupervisor,
    /// Browser drivers that are being started.
    drivers: PendingDrivers,
    sandboxes: BTreeMap<u64, SandboxRecord>,
    /// The keys of the sandboxes by id and by pid.
    ids: HashMap<String, u64>,
    pids: HashMap<Pid, u64>,
    /// Short-lived children, with the pidfds that report their end.
    chores: HashMap<Pid, OwnedFd>,
    /// Deadlines of the sandboxes that are being created or destroyed, and the sandboxes whose process is dead but of
    /// which something is left.
    deadlines: BTreeSet<(Instant, u64)>,
    leaving: BTreeSet<u64>,
    /// Key in `leaving` at which the next removals start.
    next_removal: u64,
    next: u64,
    /// Set during shutdown: the request to answer (none if the server is gone), and the deadline.
    ending: Option<(Option<u64>, Instant)>,
}

/// Maximum number of events handled per turn, and of dead sandboxes removed per turn.
const EVENTS: usize = 256;
const REMOVALS: usize = 16;
/// Spares are created after this much time without events.
const IDLE: Duration = Duration::from_millis(1);

impl Keeper {
    pub(crate) fn new(
        start: &Start,
        survey: Survey,
        socket: OwnedFd,
        guest: OwnedFd,
    ) -> Result<Self, (OwnedFd, io::Error)> {
        match Self::prepare(start, &survey, &socket) {
            Ok((epoll, children, instance, tree, slots, owner)) => Ok(Self {
                socket,
                guest,
                epoll,
                children,
                mount_point: instance.dir.join(ROOT),
                spares: Spares::new(&instance.dir, start.spares),
                zygote: ZygoteSupervisor::default(),
                drivers: PendingDrivers::default(),
                sockets: sockets::Watch::default(),
                memory: (!survey.cgroup.has(Controller::Memory)).then(MemoryWatch::default),
                ids: HashMap::new(),
                pids: HashMap::new(),
                chores: HashMap::new(),
                deadlines: BTreeSet::new(),
                leaving: BTreeSet::new(),
                next_removal: 0,
                host: Host::detect(Path::new("/")),
                disk: survey.ext4.then(|| {
                    let name = instance.dir.file_name().unwrap_or_default().to_string_lossy();
                    Budget::new(&instance.dir, &start.runtime_dir, start.keep_free, &name)
                }),
                store: VolumeStore::new(
                    survey.ext4,
                    survey.mode,
                    &instance.state_dir,
                    &instance.dir,
                    memory_of_machine(&tree.tops()),
                ),
                private: [start.state_dir.clone(), start.runtime_dir.clone()],
                survey,
                instance,
                tree,
                slots,
                owner,
                sandboxes: BTreeMap::new(),
                next: 1,
                ending: None,
            }),
            Err(e) => Err((socket, e)),
        }
    }

    #[allow(clippy::type_complexity, reason = "the parts of `Self` that can fail")]
    fn prepare(
        start: &Start,
        survey: &Survey,
        socket: &OwnedFd,
    ) -> io::Result<(OwnedFd, OwnedFd, Instance, Tree, Option<Slots>, u32)> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        Token::Server.watch(&epoll, socket)?;
        let children = inherited::signal_fd(&[libc::SIGCHLD])?;
        Token::Child.watch(&epoll, &children)?;
        check_name(&start.label)?;
        let random = instance::random_name()?;
        let tree = survey.cgroup.tree(&format!("{}-{random}", start.label));
        let instance = Instance::open(&start.state_dir, &random, start.exclusive, tree.tops())?;
        tree.open()?;
        DirBuilder::new().mode(0o700).create(instance.dir.join(ROOT))?;
        // Compile the filters once here instead of in every child.
        for profile in seccomp::Profile::ALL {
            seccomp::compile(profile);
        }
        let slots = match survey.mode {
            Mode::Single => None,
            mode => {
                // A slot is both a uid and a gid.
                let subordinate = survey.sub.map_or(0, |s| s.uids.count.min(s.gids.count));
                Some(Slots::open(&start.runtime_dir, mode, subordinate)?)
            }
        };
        // In the user namespace of an ordinary user's launcher the own uid is 0; the map shows the uid outside.
        let map = fs::read_to_string("/proc/self/uid_map")?;
        let owner = map.split_whitespace().nth(1).and_then(|n| n.parse().ok()).unwrap_or(0);
        Ok((epoll, children, instance, tree, slots, owner))
    }

    /// Answers request `id`, then serves until the server disappears or requests a shutdown.
    pub(crate) fn run(mut self, id: u64) -> io::Result<()> {
        let instance = self.instance.dir.clone();
        self.reply(id, LauncherReply::Started { instance, survey: Box::new(self.survey.clone()) });
        let mut events = Vec::with_capacity(EVENTS);
        while self.ending.is_none() || !self.sandboxes.is_empty() || !self.zygote.is_gone() {
            events.clear();
            let timeout = self.timeout();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
            for token in events.iter().filter_map(Token::of) {
                self.event(token);
            }
            // The cost of looking for dead children grows with the number of children.
            if events.is_empty() || events.iter().filter_map(Token::of).any(Token::may_mean_exit) {
                self.reap();
            }
            self.tick();
            self.zygote.tick(&self.epoll);
            self.reply_forks();
            self.reply_drivers();
            if events.is_empty() && self.may_stock() {
                self.stock();
            }
            if let Some((_, until)) = self.ending
                && Instant::now() > until
            {
                log("launcher: not everything could be removed; the next server will");
                return Ok(());
            }
        }
        self.store.close();
        self.spares.close();
        self.instance.remove();
        self.survey.cgroup.release();
        if let Some((Some(id), _)) = self.ending {
            self.reply(id, LauncherReply::Done);
        }
        Ok(())
    }

    /// Returns the time to wait for events: short while something is being removed (a cgroup stays busy for a moment)
    /// or a spare has to be created, otherwise until the next deadline.
    fn timeout(&self) -> Option<Timespec> {
        let now = Instant::now();
        // Retry less often the longer something stays busy (for example because a process on the host holds it).
        let again = |key: &u64| match self.sandboxes.get(key)? {
            SandboxRecord { busy: None, .. } => Some(Duration::ZERO),
            SandboxRecord { phase: Phase::Ending { until, .. }, .. } => {
                let waited = END_TIME.saturating_sub(until.saturating_duration_since(now));
                Some((waited / 8).max(Duration::from_micros(500)))
            }
            _ => None,
        };
        let deadline = self.deadlines.first().map(|(until, _)| *until).into_iter();
        let deadline = deadline
            .chain(self.spares.deadline())
            .chain(self.zygote.wake_at())
            .chain(self.store.deadline())
            .chain(self.disk.as_ref().and_then(Budget::deadline))
            .chain(self.sockets.deadline())
            .chain(self.memory.as_ref().and_then(MemoryWatch::deadline))
            .chain(self.drivers.deadline())
            .min();
        let shortest = self
            .leaving
            .iter()
            .filter_map(again)
            .chain(deadline.map(|until| until.saturating_duration_since(now)))
            .chain(self.may_stock().then_some(IDLE))
            .min()?;
        Some(Timespec { tv_sec: shortest.as_secs() as i64, tv_nsec: i64::from(shortest.subsec_nanos()) })
    }

    fn reply(&self, id: u64, reply: LauncherReply) {
        // If the server is gone, the reply can be lost: the loop will notice the closed connection.
        let _ = send_reply(&self.socket, id, reply);
    }

    fn event(&mut self, token: Token) {
        match token {
            Token::Server => self.request(),
            Token::Spare => drop(self.spares.read_event()),
            Token::Child => while rustix::io::read(&self.children, &mut [0; 512]).is_ok_and(|got| got > 0) {},
            Token::VolumeImages => {
                for parked in self.store.wanted_by_others() {
                    self.release_mounts(vec![parked.mount]);
                }
            }
            Token::Zygote(fd, key) => self.zygote.event(fd, key),
            Token::Sandbox(WatchedFd::Control, key) => self.control(key),
            Token::Sandbox(WatchedFd::Log, key) => self.guest_log(key),
            // The loop reaps these processes and collects the drivers' results after the events.
            Token::Chore | Token::Driver | Token::Sandbox(WatchedFd::Process, _) => {}
        }
    }

    fn request(&mut self) {
        let (request, fds) = match wire::receive::<LauncherRequest>(&self.socket) {
            Ok(Some(request)) => request,
            Ok(None) | Err(_) => return self.end_all(None),
        };
        if let Some(reply) = self.handle(request.id, request.call, fds) {
            self.reply(request.id, reply);
        }
    }

    /// Handles a request. Returns the reply, or `None` if the reply follows later or was sent already.
    fn handle(&mut self, id: u64, call: LauncherCall, fds: Vec<OwnedFd>) -> Option<LauncherReply> {
        let failure = |e: io::Error| failed(e.to_string());
        Some(match call {
            LauncherCall::Create(create) => return self.create(id, *create).err().map(failure),
            LauncherCall::Destroy { sandbox } => match self.find(&sandbox) {
                Some(key) => {
                    self.end(key, Some((id, LauncherReply::Done)));
                    return None;
                }
                None => LauncherReply::Done,
            },
            LauncherCall::Stats { sandbox } => {
                self.find(&sandbox).map_or(LauncherReply::Gone, |key| LauncherReply::Stats(self.usage(key)))
            }
            LauncherCall::Kept => self.store.list().map_or_else(failure, LauncherReply::Kept),
            LauncherCall::Discard { name } => self.discard(&name),
            LauncherCall::SweepOthers => self.instance.sweep_others().map_or_else(failure, |()| LauncherReply::Done),
            LauncherCall::Warm { spec, rotation } => match self.recipe(*spec, rotation, fds.into_iter().next()) {
                Ok(recipe) => {
                    self.zygote.warm(&self.epoll, id, recipe);
                    return None;
                }
                Err(e) => failed(format!("the warm interpreter: {e}")),
            },
            LauncherCall::Fork { sandbox } => match self.find(&sandbox) {
                Some(key) => return self.fork(id, key).err().map(failure),
                None => LauncherReply::Gone,
            },
            LauncherCall::EnterBrowser { sandbox } => match self.find(&sandbox) {
                Some(key) => return self.enter_browser(id, key).err().map(failure),
                None => LauncherReply::Gone,
            },
            LauncherCall::ZygoteStatus => LauncherReply::ZygoteStatus(self.zygote.status()),
            LauncherCall::Survey { .. } => LauncherReply::Survey(Box::new(self.survey.clone())),
            LauncherCall::Start(_) => failed("already started"),
            LauncherCall::Shutdown => {
                self.end_all(Some(id));
                return None;
            }
        })
    }

    fn usage(&self, key: u64) -> Usage {
        let sandbox = &self.sandboxes[&key];
        Usage { ended_at_bytes: sandbox.ended_at_bytes, ..sandbox.cgroup.usage() }
    }

    fn find(&self, sandbox: &str) -> Option<u64> {
        self.ids.get(sandbox).copied()
    }

    fn end_all(&mut self, request: Option<u64>) {
        if request.is_none() {
            let _ = epoll::delete(&self.epoll, &self.socket);
        }
        self.ending = Some((request.or(self.ending.and_then(|(r, _)| r)), Instant::now() + END_TIME));
        self.zygote.end();
        let keys: Vec<u64> = self.sandboxes.keys().copied().collect();
        for key in keys {
            self.end(key, None);
        }
    }

    /// Reaps every dead child: guests, and the processes that the launcher inherits as their subreaper.
    fn reap(&mut self) {
        while let Some(pid) = sys::reap_any() {
            self.spares.reaped(pid);
            self.chores.remove(&pid);
            self.zygote.reaped(pid);
            let Some(key) = self.pids.remove(&pid) else { continue };
            let Some(sandbox) = self.sandboxes.get_mut(&key) else { continue };
            sandbox.pid = None;
            sandbox.pidfd = None;
            match &sandbox.phase {
                // Its last messages may still be unread.
                Phase::Building { .. } => {
                    while self.sandboxes.get(&key).is_some_and(|c| c.control.is_some()) {
                        self.control(key);
                    }
                }
                Phase::Ending { .. } => drop(self.leaving.insert(key)),
                Phase::Running => {}
            }
        }
    }

    fn tick(&mut self) {
        let now = Instant::now();
        // Remove a few per turn, so that a thousand sandboxes that end do not delay one that starts.
        let some: Vec<u64> =
            self.leaving.range(self.next_removal..).chain(&self.leaving).copied().take(REMOVALS).collect();
        self.next_removal = some.last().map_or(0, |key| key + 1);
        some.into_iter().for_each(|key| self.finish(key));
        while let Some((until, key)) = self.deadlines.first().copied()
            && until < now
        {
            self.deadlines.pop_first();
            match self.sandboxes.get(&key).map(|sandbox| &sandbox.phase) {
                Some(Phase::Building { .. }) => self.fail(key, "the sandbox was not ready in time"),
                Some(Phase::Ending { .. }) => self.late(key),
                _ => {}
            }
        }
        let spares = self.spares.tick().into_iter().flat_map(|spare| [spare.prepared.root, spare.prepared.network]);
        let parked = self.store.expired().into_iter().map(|parked| parked.mount);
        let given_up: Vec<_> = spares.chain(parked).collect();
        if !given_up.is_empty() {
            self.release_mounts(given_up);
        }
        let running = self.sandboxes.iter().filter(|(_, sandbox)| matches!(sandbox.phase, Phase::Running));
        for key in self.sockets.tick(running.filter_map(|(key, sandbox)| Some((*key, sandbox.pid?)))) {
            log(&format!(
                "launcher: sandbox {} is ended: it has over {} sockets",
                self.sandboxes[&key].id,
                sockets::MOST
            ));
            self.sandboxes[&key].kill();
        }
        self.hold_memory();
        let trim = self.disk.as_mut().map_or_else(Vec::new, Budget::tick);
        if !trim.is_empty() {
            let keep: Vec<_> = trim.iter().map(AsFd::as_fd).collect();
            self.chore(&keep, || {
                for dir in &trim {
                    let _ = sys::trim(dir.as_fd());
                }
            });
        }
    }
}

impl Keeper {
    /// Ends the sandboxes that exceed a memory limit which no cgroup holds.
    fn hold_memory(&mut self) {
        let Some(watch) = &mut self.memory else { return };
        let running = self.sandboxes.iter().filter(|(_, sandbox)| matches!(sandbox.phase, Phase::Running));
        let watched = running.filter_map(|(key, SandboxRecord { pid, pidfd, memory_limit, groups, .. })| {
            Some(WatchedSandbox {
                key: *key,
                pid: (*pid)?,
                pidfd: pidfd.as_ref()?.as_fd(),
                limit: *memory_limit,
                groups,
            })
        });
        let found = watch.tick(&watched.collect::<Vec<_>>());
        for (key, excess) in found {
            let Some(sandbox) = self.sandboxes.get_mut(&key) else { continue };
            let why = match excess {
                Excess::Over { limit, used } => {
                    sandbox.ended_at_bytes = Some(limit);
                    format!("it uses {} MB of memory, and its limit is {} MB", used >> 20, limit >> 20)
                }
                Excess::Unmeasurable => "its memory cannot be measured".into(),
            };
            log(&format!("launcher: sandbox {} is ended: {why}", sandbox.id));
            sandbox.kill();
        }
    }
}

/// Checks a name that becomes part of directory and cgroup names.
fn check_name(name: &str) -> io::Result<()> {
    let fine = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if name.is_empty() || name.len() > 64 || !name.chars().all(fine) {
        return Err(io::Error::other(format!("`{name}` is not a name of `a-z`, `0-9` and `-`")));
    }
    Ok(())
}
