//! The launcher at work: one loop over the server's requests and over the processes that are sandboxes or become them.
//!
//! What takes time happens in the child that becomes the guest; this side only makes cgroups, writes id maps and watches, so one
//! sandbox never waits for another. There is one way out for all of them: a creation that fails at any step is ended like any sandbox.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};
use rustix::fs::{Mode as FileMode, OFlags};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, Signal, pidfd_send_signal};

use crate::apply::{self, Handles, Report};
use crate::cgroup::{Cgroup, Controller, Group, Tree};
use crate::ids::{IdMap, Mode, Slot, Slots};
use crate::instance::{self, Instance, Record};
use crate::kept::{Lent, Store, Wanted};
use crate::launcher::{answer, failed, log};
use crate::plan::{Plan, ROOT, plan};
use crate::spec::{self, Host, JailSpec, Volume};
use crate::survey::Survey;
use crate::sys::{self, Cloned};
use crate::volume::{self, Purpose};
use crate::wire::{self, Call, Create, Reply, Request, Start};

/// The namespaces of a sandbox that are there from its first instruction; cgroup and user follow when their time has come.
const NAMESPACES: i32 =
    libc::CLONE_NEWNS | libc::CLONE_NEWPID | libc::CLONE_NEWNET | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS;

const BUILD_TIME: Duration = Duration::from_secs(20);
const END_TIME: Duration = Duration::from_secs(10);
const PTYS: u32 = 64;
const MAX_GROUPS: usize = 3;
/// What a guest may write to the log in its life.
const LOG_BYTES: usize = 64 << 10;

/// The steps before the plan's own, for the tests of the rollback: a failing step of the plan has its index plus this.
pub const LAUNCHER_STEPS: usize = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Directory,
    Kept,
    Slot,
    Template,
    Record,
    Cgroup,
    Clone,
    Maps,
}

#[derive(Debug)]
enum Phase {
    /// Who asked for it, and until when it has to be ready.
    Building {
        request: u64,
        until: Instant,
        exec: bool,
    },
    Running,
    /// Who waits for the end; when it is to be told that the end does not come.
    Ending {
        requests: Vec<(u64, Reply)>,
        until: Instant,
    },
}

struct Cell {
    id: String,
    groups: Vec<Group>,
    dir: PathBuf,
    cgroup: Cgroup,
    map: IdMap,
    _slot: Option<Slot>,
    pid: Option<Pid>,
    pidfd: Option<OwnedFd>,
    control: Option<OwnedFd>,
    log: Option<OwnedFd>,
    logged: usize,
    loop_number: Option<u32>,
    kept: Option<Lent>,
    kept_loop: Option<volume::Device>,
    notes: Vec<String>,
    fail_at: Option<usize>,
    phase: Phase,
}

impl Cell {
    fn image(&self) -> PathBuf {
        self.dir.join("volume.img")
    }

    fn fails(&self, step: Step) -> io::Result<()> {
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

/// The launcher at work: what exists, and what is on its way in or out.
pub struct Keeper {
    socket: OwnedFd,
    guest: OwnedFd,
    epoll: OwnedFd,
    survey: Survey,
    host: Host,
    instance: Instance,
    tree: Tree,
    slots: Option<Slots>,
    store: Store,
    /// Where only servers may look: the state and the locks.
    private: [PathBuf; 2],
    owner: u32,
    cells: BTreeMap<u64, Cell>,
    next: u64,
    /// Set when everything is to end: the request to answer (none when the server is gone), and until when.
    ending: Option<(Option<u64>, Instant)>,
}

/// What an event belongs to: a cell's number and one of these.
const CONTROL: u64 = 0;
const PIDFD: u64 = 1;
const LOG: u64 = 2;
const KINDS: u64 = 4;
const SERVER: u64 = u64::MAX;

impl Keeper {
    pub fn new(start: &Start, survey: Survey, socket: OwnedFd, guest: OwnedFd) -> Result<Self, (OwnedFd, io::Error)> {
        match Self::prepare(start, &survey, &socket) {
            Ok((epoll, instance, tree, slots, owner)) => Ok(Self {
                socket,
                guest,
                epoll,
                host: Host::detect(Path::new("/")),
                store: Store::new(survey.ext4, survey.mode, &instance.state_dir, &instance.dir),
                private: [start.state_dir.clone(), start.runtime_dir.clone()],
                survey,
                instance,
                tree,
                slots,
                owner,
                cells: BTreeMap::new(),
                next: 1,
                ending: None,
            }),
            Err(e) => Err((socket, e)),
        }
    }

    #[allow(clippy::type_complexity, reason = "the parts of one struct, which cannot be made before they are")]
    fn prepare(
        start: &Start,
        survey: &Survey,
        socket: &OwnedFd,
    ) -> io::Result<(OwnedFd, Instance, Tree, Option<Slots>, u32)> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, socket, epoll::EventData::new_u64(SERVER), epoll::EventFlags::IN)?;
        check_name(&start.label)?;
        let random = instance::random_name()?;
        let tree = survey.cgroup.tree(&format!("{}-{random}", start.label));
        let instance = Instance::open(&start.state_dir, &random, start.exclusive, tree.tops())?;
        let slots = match survey.mode {
            Mode::Single => None,
            mode => {
                // A slot is a uid and a gid.
                let subordinate = survey.sub.map_or(0, |s| s.uids.count.min(s.gids.count));
                Some(Slots::open(start.runtime_dir.join("slots"), mode, subordinate)?)
            }
        };
        // In the namespace of an ordinary user's launcher everybody is 0; the map says who that is outside.
        let map = fs::read_to_string("/proc/self/uid_map")?;
        let owner = map.split_whitespace().nth(1).and_then(|n| n.parse().ok()).unwrap_or(0);
        Ok((epoll, instance, tree, slots, owner))
    }

    /// Serves until the server is gone or says so; answers request `id` first.
    pub fn run(mut self, id: u64) -> io::Result<()> {
        let instance = self.instance.dir.clone();
        self.answer(id, Reply::Started { instance, survey: self.survey.clone() });
        let mut events = Vec::with_capacity(64);
        while self.ending.is_none() || !self.cells.is_empty() {
            events.clear();
            let timeout = self.timeout();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
            for event in &events {
                self.event(event.data.u64());
            }
            self.reap();
            self.tick();
            if let Some((_, until)) = self.ending
                && Instant::now() > until
            {
                log("launcher: not everything could be removed; the next server will");
                return Ok(());
            }
        }
        self.store.close();
        self.instance.remove();
        if let Some((Some(id), _)) = self.ending {
            self.answer(id, Reply::Done);
        }
        Ok(())
    }

    /// Soon when something is being taken down (a cgroup stays busy for a moment), else when the next deadline comes.
    fn timeout(&self) -> Option<Timespec> {
        let now = Instant::now();
        let of = |cell: &Cell| match &cell.phase {
            // What is in the way for long (somebody on the host holds it) is not asked for a thousand times a second.
            Phase::Ending { until, .. } if cell.pid.is_none() => {
                let waited = END_TIME.saturating_sub(until.saturating_duration_since(now));
                Some((waited / 8).max(Duration::from_micros(500)))
            }
            Phase::Building { until, .. } | Phase::Ending { until, .. } => Some(until.saturating_duration_since(now)),
            Phase::Running => None,
        };
        let shortest = self.cells.values().filter_map(of).min()?;
        Some(Timespec { tv_sec: shortest.as_secs() as i64, tv_nsec: i64::from(shortest.subsec_nanos()) })
    }

    fn answer(&self, id: u64, reply: Reply) {
        // Without a server there is nobody to tell; the loop will see the end of the connection.
        let _ = answer(&self.socket, id, reply);
    }

    fn event(&mut self, data: u64) {
        if data == SERVER {
            return self.request();
        }
        let (key, kind) = (data / KINDS, data % KINDS);
        match kind {
            CONTROL => self.control(key),
            LOG => self.guest_log(key),
            // The process is reaped below, with all others.
            _ => {}
        }
    }

    fn request(&mut self) {
        let (request, _fds) = match wire::receive::<Request>(&self.socket) {
            Ok(Some(request)) => request,
            Ok(None) | Err(_) => return self.end_all(None),
        };
        let id = request.id;
        match request.call {
            Call::Create(create) => {
                if let Err(e) = self.create(id, *create) {
                    self.answer(id, failed(e.to_string()));
                }
            }
            Call::Destroy { sandbox } => match self.find(&sandbox) {
                Some(key) => self.end(key, Some((id, Reply::Done))),
                None => self.answer(id, Reply::Done),
            },
            Call::Stats { sandbox } => {
                let reply =
                    self.find(&sandbox).map_or(Reply::Gone, |key| Reply::Stats(self.cells[&key].cgroup.usage()));
                self.answer(id, reply);
            }
            Call::Kept => {
                let reply = self.store.list().map_or_else(|e| failed(e.to_string()), Reply::Kept);
                self.answer(id, reply);
            }
            Call::Discard { name } => {
                let reply = self.discard(&name);
                self.answer(id, reply);
            }
            Call::SweepOthers => {
                let reply = self.instance.sweep_others().map_or_else(|e| failed(e.to_string()), |()| Reply::Done);
                self.answer(id, reply);
            }
            Call::List => self.answer(id, Reply::List(self.cells.values().map(|c| c.id.clone()).collect())),
            Call::Survey { .. } => self.answer(id, Reply::Survey(self.survey.clone())),
            Call::Start(_) => self.answer(id, failed("already started")),
            Call::Shutdown => self.end_all(Some(id)),
        }
    }

    fn find(&self, sandbox: &str) -> Option<u64> {
        self.cells.iter().find(|(_, cell)| cell.id == sandbox).map(|(key, _)| *key)
    }

    fn create(&mut self, request: u64, create: Create) -> io::Result<()> {
        check_name(&create.sandbox)?;
        self.check_shared(&create)?;
        if let Some(Wanted { name, .. }) = &create.kept
            && self.lends(name)
        {
            self.answer(request, Reply::InUse);
            return Ok(());
        }
        if create.groups.is_empty() || create.groups.len() > MAX_GROUPS {
            return Err(io::Error::other(format!("a sandbox has one to {MAX_GROUPS} groups around it")));
        }
        create.groups.iter().try_for_each(|group| check_name(&group.name))?;
        if self.ending.is_some() || self.find(&create.sandbox).is_some() {
            return Err(io::Error::other("the launcher is ending, or the sandbox exists"));
        }
        let mut cell = Cell {
            dir: self.instance.dir.join(&create.sandbox),
            cgroup: self.tree.sandbox(&create.groups, &create.sandbox),
            id: create.sandbox.clone(),
            groups: create.groups.clone(),
            map: IdMap::new(Mode::Single, 0, 1, u32::MAX).map_err(io::Error::other)?,
            _slot: None,
            pid: None,
            pidfd: None,
            control: None,
            log: None,
            logged: 0,
            loop_number: None,
            kept: None,
            kept_loop: None,
            notes: self.notes(&create),
            fail_at: create.fail_at,
            phase: Phase::Building { request, until: Instant::now() + BUILD_TIME, exec: false },
        };
        let key = self.next;
        self.next += 1;
        match self.build(key, &mut cell, &create) {
            Ok(()) => drop(self.cells.insert(key, cell)),
            // Whatever exists by now goes the way of every sandbox; the answer follows when nothing is left.
            Err(e) => {
                self.cells.insert(key, cell);
                self.end(key, Some((request, failed(e.to_string()))));
            }
        }
        Ok(())
    }

    fn build(&mut self, key: u64, cell: &mut Cell, create: &Create) -> io::Result<()> {
        cell.fails(Step::Directory)?;
        DirBuilder::new().mode(0o700).create(&cell.dir)?;
        DirBuilder::new().mode(0o700).create(cell.dir.join(ROOT))?;
        cell.fails(Step::Kept)?;
        cell.kept = create.kept.as_ref().map(|wanted| self.lend(cell, wanted, create)).transpose()?;
        cell.fails(Step::Slot)?;
        let brought = cell.kept.as_ref().and_then(|lent| lent.slot);
        let slots = self.slots.as_ref().map_or(1, Slots::count);
        let slot = match &mut self.slots {
            Some(slots) if brought.is_none() => Some(slots.take()?),
            _ => None,
        };
        let number = brought.or(slot.as_ref().map(|s| s.number)).unwrap_or(0);
        cell.map = IdMap::new(self.survey.mode, number, slots, self.owner).map_err(io::Error::other)?;
        cell._slot = slot;
        cell.fails(Step::Template)?;
        let volume = self.volume(cell, create)?;
        cell.fails(Step::Record)?;
        let record = Record { cgroups: cell.cgroup.paths(), uid: cell.map.outer(), image: cell.image() };
        record.write(&cell.dir)?;
        cell.fails(Step::Cgroup)?;
        cell.cgroup = self.tree.create(&create.groups, (&create.sandbox, create.limits))?;
        let spec = self.spec(cell, create, volume);
        spec.check().map_err(io::Error::other)?;
        cell.fails(Step::Clone)?;
        self.launch(key, cell, &spec)
    }

    /// What is shared must not hold the sockets of other sandboxes, the images of their volumes or the locks of their uids.
    fn check_shared(&self, create: &Create) -> io::Result<()> {
        for shared in &create.shared {
            let host = &shared.host;
            let absent = |e: io::Error| io::Error::other(format!("shared directory `{}`: {e}", host.display()));
            let real = host.canonicalize().map_err(absent)?;
            let ours = self.private.iter().filter_map(|dir| dir.canonicalize().ok());
            if ours.into_iter().any(|dir| dir.starts_with(&real) || real.starts_with(dir)) {
                return Err(io::Error::other(format!("`{}` holds the server's own files", host.display())));
            }
        }
        Ok(())
    }

    fn notes(&self, create: &Create) -> Vec<String> {
        let strangers = self.survey.mode == Mode::Sub && !create.shared.is_empty();
        let note =
            "shared volumes: with subordinate uids a sandbox has there what everybody has (start the server as root)";
        strangers.then(|| note.to_owned()).into_iter().collect()
    }

    fn lends(&self, name: &str) -> bool {
        self.cells.values().filter_map(|cell| cell.kept.as_ref()).any(|lent| lent.name == name)
    }

    fn lend(&mut self, cell: &Cell, wanted: &Wanted, create: &Create) -> io::Result<Lent> {
        let bytes = if self.survey.ext4 { wanted.bytes } else { wanted.bytes.min(half_the_memory(create)) };
        self.store.lend(&Wanted { bytes, ..wanted.clone() }, &cell.dir, self.slots.as_mut())
    }

    fn volume(&self, cell: &Cell, create: &Create) -> io::Result<Volume> {
        if self.survey.ext4 {
            let dir = self.instance.state_dir.join("templates");
            let template = volume::template(&dir, Purpose::Own, create.disk_bytes, create.disk_inodes);
            let template = template.map_err(io::Error::other)?;
            return Ok(Volume::Ext4 { template, image: cell.image() });
        }
        Ok(Volume::Tmpfs { bytes: create.disk_bytes.min(half_the_memory(create)), inodes: create.disk_inodes })
    }

    fn spec(&self, cell: &Cell, create: &Create, volume: Volume) -> JailSpec {
        JailSpec {
            hostname: "sandbox".into(),
            map: cell.map,
            host: self.host.clone(),
            runtime: create.runtime.clone(),
            files: create.files.clone(),
            volume,
            kept: cell.kept.as_ref().map(|lent| lent.source.clone()),
            shared: create.shared.clone(),
            shm_bytes: create.limits.memory_bytes.map_or(64 << 20, |memory| memory / 2),
            ptys: PTYS,
            cgroup_tasks: cell.cgroup.tasks(),
            processes: self.process_limit(create),
            dir: cell.dir.clone(),
            die_with_launcher: true,
        }
    }

    fn process_limit(&self, create: &Create) -> Option<u64> {
        let counted = self.survey.cgroup.has(Controller::Pids);
        let countable = self.survey.counts_processes || self.survey.mode == Mode::Sub;
        create.limits.pids.filter(|_| !counted && countable).map(u64::from)
    }

    fn launch(&self, key: u64, cell: &mut Cell, spec: &JailSpec) -> io::Result<()> {
        let plan = plan(spec);
        let (ours, control) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let (log_end, log) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        rustix::io::ioctl_fionbio(&log_end, true)?;
        let guest = self.guest.try_clone()?;
        let fail_at = cell.fail_at.filter(|_| cfg!(debug_assertions)).and_then(|step| step.checked_sub(LAUNCHER_STEPS));
        let open = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let cgroup = cell.cgroup.v2().map(|dir| rustix::fs::open(dir, open, FileMode::empty())).transpose()?;
        match sys::clone3(NAMESPACES, cgroup.as_ref().map(AsFd::as_fd))? {
            Cloned::Child => {
                sys::default_signals();
                let handles = Handles { control, guest, log };
                // A panic must not return into the launcher's loop.
                let _ =
                    std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| build_in_child(&plan, handles, fail_at)));
                sys::leave(1)
            }
            Cloned::Parent { pid, pidfd } => {
                cell.pid = Some(pid);
                for (fd, kind) in [(ours.as_fd(), CONTROL), (pidfd.as_fd(), PIDFD), (log_end.as_fd(), LOG)] {
                    let data = epoll::EventData::new_u64(key * KINDS + kind);
                    epoll::add(&self.epoll, fd, data, epoll::EventFlags::IN)?;
                }
                cell.pidfd = Some(pidfd);
                cell.control = Some(ours);
                cell.log = Some(log_end);
                Ok(())
            }
        }
    }

    /// A word from a process that is becoming a guest, or the end of them.
    fn control(&mut self, key: u64) {
        let Some(cell) = self.cells.get_mut(&key) else { return };
        let Some(control) = &cell.control else { return };
        let mut buffer = [0; 4096];
        let got = rustix::net::recv(control, &mut buffer, RecvFlags::DONTWAIT).map_or(0, |(n, _)| n);
        let report = serde_json::from_slice::<Report>(&buffer[..got]);
        match (report, &mut cell.phase) {
            (Ok(Report::Loop { number }), _) => cell.loop_number = Some(number),
            (Ok(Report::KeptLoop { device }), _) => cell.kept_loop = Some(device),
            (Ok(Report::Note { message }), _) => cell.notes.push(message),
            (Ok(Report::InUse), _) => self.fail_with(key, Reply::InUse),
            (Ok(Report::WantsMaps), _) => {
                if let Err(e) = cell.fails(Step::Maps).and_then(|()| write_maps(cell)) {
                    self.fail(key, &format!("id maps: {e}"));
                }
            }
            (Ok(Report::Exec), Phase::Building { exec, .. }) => *exec = true,
            (Ok(Report::Failed { message, .. }), _) => self.fail(key, &message),
            (Err(_), Phase::Building { exec: true, .. }) => self.runs(key),
            (Err(_), Phase::Building { .. }) => self.fail(key, "the process ended while it was being set up"),
            (_, _) => cell.control = None,
        }
    }

    /// The guest has started.
    fn runs(&mut self, key: u64) {
        let Some(cell) = self.cells.get_mut(&key) else { return };
        match cell.kept.as_mut().map_or(Ok(true), |lent| self.store.settle(lent)) {
            Ok(true) => {}
            Ok(false) => return self.fail_with(key, Reply::InUse),
            Err(e) => return self.fail(key, &format!("the kept volume: {e}")),
        }
        cell.control = None;
        let notes = std::mem::take(&mut cell.notes);
        if let Phase::Building { request, .. } = std::mem::replace(&mut cell.phase, Phase::Running) {
            self.answer(request, Reply::Created { notes });
        }
    }

    fn fail(&mut self, key: u64, message: &str) {
        self.fail_with(key, failed(message));
    }

    /// A creation that did not work: taken down, then answered.
    fn fail_with(&mut self, key: u64, reply: Reply) {
        let Some(cell) = self.cells.get_mut(&key) else { return };
        cell.control = None;
        if let Phase::Building { request, .. } = cell.phase {
            self.end(key, Some((request, reply)));
        }
    }

    fn discard(&mut self, name: &str) -> Reply {
        if self.lends(name) {
            return Reply::InUse;
        }
        match self.store.discard(name) {
            Ok(true) => Reply::Done,
            Ok(false) => Reply::InUse,
            Err(e) => failed(e.to_string()),
        }
    }

    fn guest_log(&mut self, key: u64) {
        let Some(cell) = self.cells.get_mut(&key) else { return };
        let Some(pipe) = &cell.log else { return };
        let mut buffer = [0; 2048];
        match rustix::io::read(pipe, &mut buffer) {
            Ok(0) | Err(_) => cell.log = None,
            Ok(got) => {
                cell.logged += got;
                if cell.logged <= LOG_BYTES {
                    let text = String::from_utf8_lossy(&buffer[..got]);
                    let name = &cell.id[..cell.id.len().min(8)];
                    for line in text.lines() {
                        let clean: String = line.chars().map(|c| if c.is_control() { '.' } else { c }).collect();
                        log(&format!("guest {name}: {clean}"));
                    }
                }
            }
        }
    }

    /// Kills the sandbox; the answer follows when nothing of it is left.
    fn end(&mut self, key: u64, answer: Option<(u64, Reply)>) {
        let Some(cell) = self.cells.get_mut(&key) else { return };
        cell.kill();
        let mut waiting: Vec<(u64, Reply)> = answer.into_iter().collect();
        match &mut cell.phase {
            Phase::Ending { requests, .. } => return requests.append(&mut waiting),
            // Destroyed before it was ready: its creator is told.
            Phase::Building { request, .. } if waiting.first().is_none_or(|(id, _)| id != request) => {
                waiting.push((*request, failed("the sandbox was destroyed while it was being made")));
            }
            Phase::Building { .. } | Phase::Running => {}
        }
        cell.phase = Phase::Ending { requests: waiting, until: Instant::now() + END_TIME };
        if cell.pid.is_none() {
            self.finish(key);
        }
    }

    fn end_all(&mut self, request: Option<u64>) {
        if request.is_none() {
            let _ = epoll::delete(&self.epoll, &self.socket);
        }
        self.ending = Some((request.or(self.ending.and_then(|(r, _)| r)), Instant::now() + END_TIME));
        let keys: Vec<u64> = self.cells.keys().copied().collect();
        for key in keys {
            self.end(key, None);
        }
    }

    /// Every dead child: guests, and whatever fell to us as their subreaper.
    fn reap(&mut self) {
        while let Some(pid) = sys::reap_any() {
            let Some((key, cell)) = self.cells.iter_mut().find(|(_, cell)| cell.pid == Some(pid)) else { continue };
            let key = *key;
            cell.pid = None;
            cell.pidfd = None;
            match &cell.phase {
                // Its last words may still wait to be read.
                Phase::Building { .. } => {
                    while self.cells.get(&key).is_some_and(|c| c.control.is_some()) {
                        self.control(key);
                    }
                }
                Phase::Ending { .. } => self.finish(key),
                Phase::Running => {}
            }
        }
    }

    fn tick(&mut self) {
        let now = Instant::now();
        let keys: Vec<u64> = self.cells.keys().copied().collect();
        for key in keys {
            match &self.cells[&key].phase {
                Phase::Building { until, .. } if now > *until => self.fail(key, "the sandbox was not ready in time"),
                Phase::Ending { .. } => self.finish(key),
                _ => {}
            }
        }
    }

    /// Removes what is left of a dead sandbox; tried again soon when something is still busy.
    fn finish(&mut self, key: u64) {
        let Some(cell) = self.cells.get(&key) else { return };
        match if cell.pid.is_some() { Some("its process does not end".into()) } else { clear(cell) } {
            Some(busy) => self.complain(key, &busy),
            None => self.forget(key),
        }
    }

    /// When the time is over: whoever waits is told, and it is tried again.
    fn complain(&mut self, key: u64, busy: &str) {
        let Some(Cell { phase: Phase::Ending { requests, until }, .. }) = self.cells.get_mut(&key) else { return };
        if Instant::now() < *until {
            return;
        }
        *until = Instant::now() + END_TIME;
        for (id, _) in std::mem::take(requests) {
            self.answer(id, failed(format!("the sandbox was killed, but {busy}; it is tried again")));
        }
    }

    fn forget(&mut self, key: u64) {
        let Some(mut cell) = self.cells.remove(&key) else { return };
        let phase = std::mem::replace(&mut cell.phase, Phase::Running);
        self.tree.tidy(&cell.groups);
        cell.kept.iter().for_each(|lent| self.store.take_back(lent));
        // Its uid and descriptors are free before anybody is told that nothing is left.
        drop(cell);
        if let Phase::Ending { requests, .. } = phase {
            for (id, reply) in requests {
                self.answer(id, reply);
            }
        }
    }
}

/// First of all it lets go of the launcher's descriptors: with the other end of its own connection open it would wait for a dead
/// launcher for ever, with the server's connection and the locks nobody would notice that death.
fn build_in_child(plan: &Plan, handles: Handles, fail_at: Option<usize>) {
    let keep = [handles.control.as_fd(), handles.guest.as_fd(), handles.log.as_fd()];
    let alone =
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).and_then(|()| sys::close_all_but(&keep));
    if alone.is_ok() {
        apply::run(plan, handles, fail_at);
    }
}

/// Cgroups, loop device, files; says what is still in the way.
fn clear(cell: &Cell) -> Option<String> {
    if let Err((path, e)) = cell.cgroup.remove() {
        return Some(format!("the cgroup `{}` cannot be removed: {e}", path.display()));
    }
    if let Some(number) = cell.loop_number
        && volume::loop_backing(number).is_some_and(|backing| backing == cell.image())
    {
        return Some(format!("/dev/loop{number} still holds its volume"));
    }
    if let Some(device) = cell.kept_loop
        && device == volume::Device::of(device.number)
        && let Some(spec::Kept::Ext4 { image, .. }) = cell.kept.as_ref().map(|lent| &lent.source)
        && volume::loop_backing(device.number).is_some_and(|backing| backing == *image)
    {
        return Some(format!("/dev/loop{} still holds its kept volume", device.number));
    }
    match fs::remove_dir_all(&cell.dir) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Some(format!("`{}` cannot be removed: {e}", cell.dir.display()))
        }
        _ => None,
    }
}

fn write_maps(cell: &Cell) -> io::Result<()> {
    let (Some(pid), Some(control)) = (cell.pid, &cell.control) else {
        return Err(io::Error::other("the process is gone"));
    };
    let proc = PathBuf::from(format!("/proc/{}", pid.as_raw_nonzero()));
    if !cell.map.may_set_groups() {
        fs::write(proc.join("setgroups"), "deny")?;
    }
    fs::write(proc.join("uid_map"), cell.map.line())?;
    fs::write(proc.join("gid_map"), cell.map.line())?;
    rustix::net::send(control, b"go", SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
    Ok(())
}

/// What is charged to the sandbox: a full volume has to say ENOSPC before memory runs out and something is killed.
fn half_the_memory(create: &Create) -> u64 {
    create.limits.memory_bytes.unwrap_or(u64::MAX) / 2
}

/// Names become directories and cgroups.
fn check_name(name: &str) -> io::Result<()> {
    let fine = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if name.is_empty() || name.len() > 64 || !name.chars().all(fine) {
        return Err(io::Error::other(format!("`{name}` is not a name of `a-z`, `0-9` and `-`")));
    }
    Ok(())
}
