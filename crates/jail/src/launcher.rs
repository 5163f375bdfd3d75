//! The process that makes sandboxes: one thread, started before the server has any, the only one that forks.
//!
//! The same executable, told apart by its name. It serves one server over a packet socket; when that closes, however the server
//! ended, it destroys what it made and ends. As an ordinary user it first moves into a user namespace of its own and executes itself
//! again there: a process that was executed outside could not enter the sandboxes it makes.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::{self, DirBuilder};
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::fs::{Mode as FileMode, OFlags};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, Signal, WaitOptions, pidfd_send_signal};
use serde::{Deserialize, Serialize};

use crate::apply::{self, Handles, Report};
use crate::cgroup::{Cgroup, Controller, Tree};
use crate::ids::{IdMap, Mode, Slot, Slots};
use crate::instance::{self, Instance, Record};
use crate::plan::{ROOT, plan};
use crate::spec::{Host, JailSpec, Volume};
use crate::survey::{Survey, find_program, map_self};
use crate::sys::{self, Cloned};
use crate::wire::{self, Call, Create, Reply, Request, Response, Start};
use crate::{inherited, volume};

/// `argv[0]` of the launcher.
const NAME: &str = "sandpool-launcher";
/// `argv[1]` of the launcher that has moved into its own user namespace.
const INNER: &str = "inside";

/// The namespaces of a sandbox that are there from its first instruction; cgroup and user follow when their time has come.
const NAMESPACES: i32 =
    libc::CLONE_NEWNS | libc::CLONE_NEWPID | libc::CLONE_NEWNET | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS;

const BUILD_TIME: Duration = Duration::from_secs(20);
const END_TIME: Duration = Duration::from_secs(10);
const PTYS: u32 = 64;
/// What a guest may write to the log in its life.
const LOG_BYTES: usize = 64 << 10;

/// A started launcher: the server's end of the connection, and the process.
#[derive(Debug)]
pub struct Spawned {
    pub socket: OwnedFd,
    pub process: Process,
}

/// The launcher's process, waited for in the end so that it does not stay as a zombie.
#[derive(Debug)]
pub struct Process(Option<Child>);

impl Process {
    /// Returns when it has ended, which it does after the connection is closed or a shutdown is answered.
    pub fn wait(mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.wait();
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have sandboxes to destroy first, for which nobody here has to wait.
        if let Some(mut child) = self.0.take() {
            std::thread::spawn(move || child.wait());
        }
    }
}

/// Starts the launcher. To be called before the process has a second thread.
pub fn spawn() -> io::Result<Spawned> {
    spawn_program(Path::new("/proc/self/exe"))
}

/// The same, from another executable that calls [`entry`]: for tests.
#[allow(clippy::disallowed_methods, reason = "the one place where the server starts a process: itself")]
pub fn spawn_program(program: &Path) -> io::Result<Spawned> {
    let (socket, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let process = Command::new(program)
        .arg0(NAME)
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        .spawn()?;
    Ok(Spawned { socket, process: Process(Some(process)) })
}

/// First thing in `main`: returns at once, except in the launcher, where it never does.
#[allow(clippy::exit, reason = "the launcher has no main of its own to return from")]
pub fn entry() {
    let mut args = std::env::args_os();
    if args.next().is_none_or(|name| name != NAME) {
        return;
    }
    let done = if args.next().is_some_and(|a| a == INNER) { resume() } else { begin() };
    if let Err(e) = &done {
        log(&format!("launcher: {e}"));
    }
    std::process::exit(i32::from(done.is_err()));
}

/// To stderr if that takes it at once: a log nobody reads must not stop the launcher.
fn log(line: &str) {
    let stderr = io::stderr();
    let mut fds = [PollFd::new(&stderr, PollFlags::OUT)];
    if poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|n| n == 1) {
        let _ = stderr.lock().write_all(format!("{line}\n").as_bytes());
    }
}

fn begin() -> io::Result<()> {
    let socket = inherited::take_fd(0)?;
    // 0 is to be free of meaning: nothing that is started later may find the connection there.
    let socket = rustix::io::fcntl_dupfd_cloexec(&socket, 10)?;
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, FileMode::empty())?;
    sys::place(null.as_fd(), 0)?;
    // Not of the server's terminal: Ctrl-C is for the server, which ends us by closing the connection.
    let _ = rustix::process::setsid();
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGPIPE, libc::SIGQUIT] {
        sys::ignore(signal);
    }
    let mut survey: Option<Survey> = None;
    loop {
        let Some((request, fds)) = wire::receive::<Request>(&socket)? else { return Ok(()) };
        match request.call {
            Call::Survey { mode } => {
                let taken = survey.insert(Survey::take(mode, &ours())).clone();
                answer(&socket, request.id, Reply::Survey(taken))?;
            }
            Call::Start(start) => {
                let survey = survey.unwrap_or_else(|| Survey::take(start.mode, &ours()));
                return match (&survey.refusal, fds.into_iter().next()) {
                    (Some(no), _) => {
                        let (why, hint) = (no.why.clone(), no.hint.clone());
                        answer(&socket, request.id, Reply::Unavailable { why, hint })
                    }
                    (None, None) => answer(&socket, request.id, failed("the guest's program is missing")),
                    (None, Some(guest)) => start_with(Resume { id: request.id, start, survey }, socket, guest),
                };
            }
            Call::Shutdown => return answer(&socket, request.id, Reply::Done),
            _ => answer(&socket, request.id, failed("not started"))?,
        }
    }
}

/// The server and the launcher itself.
fn ours() -> Vec<Pid> {
    [Some(rustix::process::getpid()), rustix::process::getppid()].into_iter().flatten().collect()
}

fn failed(message: impl Into<String>) -> Reply {
    Reply::Failed { message: message.into() }
}

fn answer(socket: &OwnedFd, id: u64, reply: Reply) -> io::Result<()> {
    wire::send(socket, &Response { id, reply }, &[])
}

/// What the launcher has to remember when it executes itself again.
#[derive(Serialize, Deserialize)]
struct Resume {
    /// The request that is being answered.
    id: u64,
    start: Start,
    survey: Survey,
}

fn start_with(resume: Resume, socket: OwnedFd, guest: OwnedFd) -> io::Result<()> {
    if resume.survey.mode == Mode::Root {
        return serve(resume, socket, guest);
    }
    let id = resume.id;
    match enter_namespace(&resume.survey).and_then(|()| execute_again(&resume, &socket, guest)) {
        Ok(never) => match never {},
        Err(e) => {
            let hint = "try `mode = \"single\"`, or see `sandpool doctor`".to_owned();
            answer(&socket, id, Reply::Unavailable { why: format!("no user namespace for the launcher: {e}"), hint })
        }
    }
}

fn enter_namespace(survey: &Survey) -> io::Result<()> {
    let spaces = libc::CLONE_NEWUSER | libc::CLONE_NEWNS;
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let Some(sub) = survey.sub else {
        sys::unshare(spaces)?;
        return Ok(map_self(uid, gid)?);
    };
    // newuidmap has to be started from outside, for a namespace that is there already: by a child that waits for it.
    let (wait, go) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let me = rustix::process::getpid().as_raw_nonzero().to_string();
    let Some(helper) = sys::fork()? else {
        drop(go);
        let _ = rustix::io::read(&wait, &mut [0; 1]);
        let uids = map_by_helper("newuidmap", &me, uid, sub.uids);
        let done = uids.and_then(|()| map_by_helper("newgidmap", &me, gid, sub.gids));
        if let Err(e) = &done {
            log(&format!("launcher: {e}"));
        }
        sys::leave(i32::from(done.is_err()))
    };
    sys::unshare(spaces)?;
    rustix::io::write(&go, b"g")?;
    let status = rustix::process::waitpid(Some(helper), WaitOptions::empty())?;
    match status.and_then(|(_, s)| s.exit_status()) {
        Some(0) => Ok(()),
        _ => Err(io::Error::other("newuidmap or newgidmap failed")),
    }
}

#[allow(
    clippy::disallowed_methods,
    reason = "the set-uid helper that may map a subordinate range; fixed path and arguments"
)]
fn map_by_helper(program: &str, pid: &str, own: u32, range: crate::ids::SubRange) -> io::Result<()> {
    let path = find_program(program).ok_or_else(|| io::Error::other(format!("`{program}` is not installed")))?;
    let numbers = [0, own, 1, 1, range.start, range.count].map(|n| n.to_string());
    let output = Command::new(path).arg(pid).args(numbers).env_clear().stdin(Stdio::null()).output()?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(io::Error::other(format!("{program}: {}", said.trim())));
    }
    Ok(())
}

enum Never {}

/// The same program inside the namespace: socket on 0, guest on 3, memory on 4.
fn execute_again(resume: &Resume, socket: &OwnedFd, guest: OwnedFd) -> io::Result<Never> {
    let exe = rustix::fs::open("/proc/self/exe", OFlags::PATH | OFlags::CLOEXEC, FileMode::empty())?;
    let memory = rustix::fs::memfd_create("sandpool-resume", rustix::fs::MemfdFlags::CLOEXEC)?;
    fs::File::from(memory.try_clone()?).write_all(&serde_json::to_vec(resume)?)?;
    let high = |fd: &OwnedFd| rustix::io::fcntl_dupfd_cloexec(fd, 64);
    let (exe, guest, memory, socket) = (high(&exe)?, high(&guest)?, high(&memory)?, high(socket)?);
    for (number, fd) in [(0, &socket), (3, &guest), (4, &memory)] {
        sys::place(fd.as_fd(), number)?;
    }
    sys::close_on_exec_from(5)?;
    let args = [NAME, INNER].map(|a| CString::new(a).unwrap_or_default());
    Err(sys::execveat(exe.as_fd(), &args).into())
}

fn resume() -> io::Result<()> {
    let socket = rustix::io::fcntl_dupfd_cloexec(inherited::take_fd(0)?, 10)?;
    let guest = inherited::take_fd(3)?;
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, FileMode::empty())?;
    sys::place(null.as_fd(), 0)?;
    let mut memory = fs::File::from(inherited::take_fd(4)?);
    io::Seek::rewind(&mut memory)?;
    let resume: Resume = serde_json::from_reader(memory)?;
    serve(resume, socket, guest)
}

fn serve(resume: Resume, socket: OwnedFd, guest: OwnedFd) -> io::Result<()> {
    let Resume { id, start, survey } = resume;
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    rustix::process::umask(FileMode::from_raw_mode(0o022));
    raise_open_files();
    match Launcher::new(&start, survey, socket, guest) {
        Ok(launcher) => launcher.run(id),
        Err((socket, e)) => answer(&socket, id, Reply::Failed { message: e.to_string() }),
    }
}

fn raise_open_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let maximum = getrlimit(Resource::Nofile).maximum;
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}

/// The steps before the plan's own, for the tests of the rollback: a failing step of the plan has its index plus this.
pub const LAUNCHER_STEPS: usize = 7;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Directory,
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
    group: String,
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

struct Launcher {
    socket: OwnedFd,
    guest: OwnedFd,
    epoll: OwnedFd,
    survey: Survey,
    host: Host,
    instance: Instance,
    tree: Tree,
    slots: Option<Slots>,
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

impl Launcher {
    fn new(start: &Start, survey: Survey, socket: OwnedFd, guest: OwnedFd) -> Result<Self, (OwnedFd, io::Error)> {
        match Self::prepare(start, &survey, &socket) {
            Ok((epoll, instance, tree, slots, owner)) => Ok(Self {
                socket,
                guest,
                epoll,
                survey,
                host: Host::detect(Path::new("/")),
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
        let random = instance::random_name()?;
        let tree = survey.cgroup.tree(&format!("{}-{random}", start.label));
        let instance = Instance::open(&start.state_dir, &random, start.exclusive, tree.tops())?;
        let slots = match survey.mode {
            Mode::Single => None,
            mode => Some(Slots::open(start.runtime_dir.join("slots"), mode, survey.sub.map(|s| s.uids))?),
        };
        // In the namespace of an ordinary user's launcher everybody is 0; the map says who that is outside.
        let map = fs::read_to_string("/proc/self/uid_map")?;
        let owner = map.split_whitespace().nth(1).and_then(|n| n.parse().ok()).unwrap_or(0);
        Ok((epoll, instance, tree, slots, owner))
    }

    fn run(mut self, id: u64) -> io::Result<()> {
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
            Phase::Ending { .. } if cell.pid.is_none() => Some(Duration::from_micros(500)),
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
        check_name(&create.group)?;
        if self.ending.is_some() || self.find(&create.sandbox).is_some() {
            return Err(io::Error::other("the launcher is ending, or the sandbox exists"));
        }
        let mut cell = Cell {
            dir: self.instance.dir.join(&create.sandbox),
            cgroup: self.tree.sandbox(&create.group, &create.sandbox),
            id: create.sandbox.clone(),
            group: create.group.clone(),
            map: IdMap::new(Mode::Single, 0, 1, u32::MAX).map_err(io::Error::other)?,
            _slot: None,
            pid: None,
            pidfd: None,
            control: None,
            log: None,
            logged: 0,
            loop_number: None,
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
        cell.fails(Step::Slot)?;
        let (slot, slots) = match &mut self.slots {
            Some(slots) => (Some(slots.take()?), slots.count()),
            None => (None, 1),
        };
        let number = slot.as_ref().map_or(0, |s| s.number);
        cell.map = IdMap::new(self.survey.mode, number, slots, self.owner).map_err(io::Error::other)?;
        cell._slot = slot;
        cell.fails(Step::Template)?;
        let volume = self.volume(cell, create)?;
        cell.fails(Step::Record)?;
        let record = Record { cgroups: cell.cgroup.paths(), uid: cell.map.outer(), image: cell.image() };
        record.write(&cell.dir)?;
        cell.fails(Step::Cgroup)?;
        cell.cgroup = self.tree.create((&create.group, create.group_limits), (&create.sandbox, create.limits))?;
        let spec = self.spec(cell, create, volume);
        spec.check().map_err(io::Error::other)?;
        cell.fails(Step::Clone)?;
        self.launch(key, cell, &spec)
    }

    fn volume(&self, cell: &Cell, create: &Create) -> io::Result<Volume> {
        if self.survey.ext4 {
            let dir = self.instance.state_dir.join("templates");
            let template = volume::template(&dir, create.disk_bytes, create.disk_inodes).map_err(io::Error::other)?;
            return Ok(Volume::Ext4 { template, image: cell.image() });
        }
        // Charged to the sandbox: a full volume has to say ENOSPC before memory runs out and something is killed.
        let memory = create.limits.memory_bytes.unwrap_or(u64::MAX);
        Ok(Volume::Tmpfs { bytes: create.disk_bytes.min(memory / 2), inodes: create.disk_inodes })
    }

    fn spec(&self, cell: &Cell, create: &Create, volume: Volume) -> JailSpec {
        JailSpec {
            hostname: "sandbox".into(),
            map: cell.map,
            host: self.host.clone(),
            runtime: create.runtime.clone(),
            files: create.files.clone(),
            volume,
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
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| apply::run(&plan, handles, fail_at)));
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
            (Ok(Report::WantsMaps), _) => {
                if let Err(e) = cell.fails(Step::Maps).and_then(|()| write_maps(cell)) {
                    self.fail(key, &format!("id maps: {e}"));
                }
            }
            (Ok(Report::Exec), Phase::Building { exec, .. }) => *exec = true,
            (Ok(Report::Failed { message, .. }), _) => self.fail(key, &message),
            (Err(_), Phase::Building { request, exec: true, .. }) => {
                let request = *request;
                cell.control = None;
                cell.phase = Phase::Running;
                self.answer(request, Reply::Done);
            }
            (Err(_), Phase::Building { .. }) => self.fail(key, "the process ended while it was being set up"),
            (_, _) => cell.control = None,
        }
    }

    /// A creation that did not work: taken down, then answered.
    fn fail(&mut self, key: u64, message: &str) {
        let Some(cell) = self.cells.get_mut(&key) else { return };
        cell.control = None;
        if let Phase::Building { request, .. } = cell.phase {
            self.end(key, Some((request, failed(message))));
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
        let Some(cell) = self.cells.remove(&key) else { return };
        if !self.cells.values().any(|c| c.group == cell.group) {
            self.tree.tidy(&cell.group);
        }
        if let Phase::Ending { requests, .. } = cell.phase {
            for (id, reply) in requests {
                self.answer(id, reply);
            }
        }
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

/// Names become directories and cgroups.
fn check_name(name: &str) -> io::Result<()> {
    let fine = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if name.is_empty() || name.len() > 64 || !name.chars().all(fine) {
        return Err(io::Error::other(format!("`{name}` is not a name of `a-z`, `0-9` and `-`")));
    }
    Ok(())
}
