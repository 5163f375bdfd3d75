//! The warm interpreter: started once, with everything imported, and forked into sandboxes.
//!
//! This is the launcher's side: it starts the process, asks it for forks, hands each to the guest of its sandbox, and replaces it when
//! it dies or has made many. Never waits for it: an order has a number and a deadline. What happens between the order and the
//! kernel is in the `zygote` crate, which the interpreter loads; what a kernel gives up is in [`crate::confine`].

use std::collections::{BTreeMap, VecDeque};
use std::ffi::CString;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::fs::{Mode, OFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, Shutdown, SocketFlags, SocketType, recvmsg, sendmsg, shutdown, socketpair,
};
use rustix::process::{Pid, Signal, pidfd_send_signal};
use serde::{Deserialize, Serialize};

use crate::apply;
use crate::confine::ConfineStep;
use crate::keeper::{CONTROL, KINDS, LOG, LOG_BYTES};
use crate::launcher::{log, relay};
use crate::plan::Plan;
use crate::sys::{self, Cloned};
use crate::wire::{self, LauncherReply};

/// The imports of a data stack, on a machine that is busy.
const START_TIME: Duration = Duration::from_secs(120);
/// For the interpreter to begin a fork, or it is killed and started again; and for the fork to come to an end, or it is given up, which
/// costs nobody but the sandbox it was for.
const FORK_TIME: Duration = Duration::from_secs(10);
/// Orders that are with the interpreter at a time: so many that it never waits for the next, so few that they do not grow old there.
const AT_ONCE: usize = 2;
const MAX_QUEUE: usize = 4096;
/// Between a death and the next start: at first, and at most.
const PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// An interpreter that lived so long did not die of what it was started with.
const STABLE: Duration = Duration::from_secs(30);

/// Kernels of one interpreter share its hash seed and the places of its code: it is replaced after so many, but not more often than
/// that, and after so long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rotation {
    pub forks: u32,
    pub not_before: Duration,
    pub after: Duration,
}

impl Default for Rotation {
    fn default() -> Self {
        Self { forks: 1000, not_before: Duration::from_secs(300), after: Duration::from_secs(3600) }
    }
}

/// How an interpreter is started.
#[derive(Debug)]
pub struct Recipe {
    pub plan: Plan,
    pub argv: Vec<CString>,
    pub environment: Vec<CString>,
    /// What it loads to be forked.
    pub library: OwnedFd,
    pub rotation: Rotation,
}

/// What the launcher tells the interpreter. The descriptors: the kernel's end of its channel, the guest, the v2 cgroup if there is one,
/// the v1 cgroups.
#[derive(Debug, Serialize, Deserialize)]
pub struct ForkOrder {
    pub number: u64,
    pub v2: bool,
    pub steps: Vec<ConfineStep>,
}

/// What the interpreter tells the launcher.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ZygoteMessage {
    Ready,
    /// A process is on its way to the sandbox, a descriptor of which comes with this; the interpreter is free for the next.
    Begun {
        number: u64,
    },
    /// From the interpreter's own driver, before it is ready: modules that it was to import, and why it could not.
    NotImported(BTreeMap<String, String>),
    /// The kernel's number in its sandbox; it comes with a descriptor of the process.
    Forked {
        number: u64,
        pid: u32,
    },
    Refused {
        number: u64,
        message: String,
    },
    /// As [`apply::Report::Note`].
    Note {
        message: String,
    },
    /// A step of its plan (see [`apply::Report`]), or the whole.
    Failed {
        step: usize,
        message: String,
    },
}

/// A process that was put into a sandbox, for its guest.
#[derive(Debug)]
pub struct Fork {
    pub pid: u32,
    pub process: OwnedFd,
    /// Where it waits to be told what it is to do.
    pub channel: OwnedFd,
}

/// What it is.
#[derive(Debug)]
pub enum Arrival {
    /// A fork of the warm interpreter, which waits for its descriptors.
    Kernel(Fork),
    /// Drives the browser. With the leash, which ends it when the last copy is closed: its uid is another, so that a guest could not
    /// kill it.
    Driver(Fork, OwnedFd),
}

/// Two ends of the way from the launcher to one guest: the guest can only read.
pub fn guest_channel() -> io::Result<(OwnedFd, OwnedFd)> {
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    shutdown(&ours, Shutdown::Read)?;
    Ok((ours, theirs))
}

/// The first byte of an arrival; the number of the process follows.
const KERNEL: u8 = b'k';
const DRIVER: u8 = b'd';

impl Arrival {
    /// Without waiting: a guest that does not take what comes gets no more.
    pub fn send(&self, way: impl AsFd) -> io::Result<()> {
        let (kind, fork, leash) = match self {
            Self::Kernel(fork) => (KERNEL, fork, None),
            Self::Driver(fork, leash) => (DRIVER, fork, Some(leash)),
        };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds: Vec<_> = [&fork.process, &fork.channel].into_iter().chain(leash).map(AsFd::as_fd).collect();
        control.push(SendAncillaryMessage::ScmRights(&fds));
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        sendmsg(way, &[IoSlice::new(&[kind]), IoSlice::new(&fork.pid.to_le_bytes())], &mut control, flags)?;
        Ok(())
    }

    /// The oldest that was not taken yet.
    pub fn receive(way: impl AsFd) -> io::Result<Self> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let (mut kind, mut pid) = ([0], [0; 4]);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        recvmsg(way, &mut [IoSliceMut::new(&mut kind), IoSliceMut::new(&mut pid)], &mut control, flags)?;
        let rights = |m| if let RecvAncillaryMessage::ScmRights(fds) = m { Some(fds) } else { None };
        let mut fds = control.drain().filter_map(rights).flatten();
        let (Some(process), Some(channel)) = (fds.next(), fds.next()) else {
            return Err(io::Error::other("nothing was put into this sandbox"));
        };
        let fork = Fork { pid: u32::from_le_bytes(pid), process, channel };
        match (kind, fds.next()) {
            ([KERNEL], None) => Ok(Self::Kernel(fork)),
            ([DRIVER], Some(leash)) => Ok(Self::Driver(fork, leash)),
            _ => Err(io::Error::other("nobody knows what was put into this sandbox")),
        }
    }
}

/// A fork that was asked for.
#[derive(Debug)]
pub struct ForkRequest {
    pub request: u64,
    /// The sandbox's number.
    pub cell: u64,
    pub guest: OwnedFd,
    /// The v2 cgroup that it is born into, and those of v1 that it goes to by itself.
    pub v2: Option<OwnedFd>,
    pub tasks: Vec<OwnedFd>,
    pub steps: Vec<ConfineStep>,
}

/// What the launcher has to do about it.
#[derive(Debug)]
pub enum ForkOutcome {
    Answer(u64, LauncherReply),
    /// To be handed to the guest, then answered.
    Forked {
        request: u64,
        cell: u64,
        fork: Fork,
    },
}

#[derive(Debug)]
struct Sent {
    request: u64,
    cell: u64,
    channel: OwnedFd,
    /// Who brings the kernel in, once the interpreter has made it.
    begun: Option<OwnedFd>,
    until: Instant,
}

impl Sent {
    /// It does not come to an end, or there is nobody to tell.
    fn give_up(self, why: &str) -> ForkOutcome {
        if let Some(process) = &self.begun {
            let _ = pidfd_send_signal(process, Signal::KILL);
        }
        ForkOutcome::Answer(self.request, unavailable(why))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ZygoteState {
    Starting {
        until: Instant,
    },
    Ready {
        since: Instant,
    },
    /// Another has taken over; it ends when it owes nothing.
    Retired {
        since: Instant,
    },
}

#[derive(Debug)]
struct Zygote {
    key: u64,
    pid: Pid,
    process: OwnedFd,
    socket: OwnedFd,
    log: OwnedFd,
    logged: usize,
    /// For whoever asks why it did not start.
    last_words: String,
    state: ZygoteState,
    forks: u32,
    sent: BTreeMap<u64, Sent>,
}

impl Zygote {
    fn kill(&self) {
        let _ = pidfd_send_signal(&self.process, Signal::KILL);
    }
}

/// The interpreter that serves, and the one that takes over from it.
#[derive(Debug)]
pub struct ZygoteSupervisor {
    recipe: Option<Recipe>,
    zygotes: Vec<Zygote>,
    /// Who waits for the first to be ready.
    waiting: Vec<u64>,
    queue: VecDeque<ForkRequest>,
    next: u64,
    again: Option<Instant>,
    pause: Duration,
    forks: u64,
    restarts: u64,
    not_imported: BTreeMap<String, String>,
    outcomes: Vec<ForkOutcome>,
}

/// Events of this number and above are ours, those below belong to sandboxes.
const FIRST_KEY: u64 = 1 << 48;

impl Default for ZygoteSupervisor {
    fn default() -> Self {
        Self {
            recipe: None,
            zygotes: Vec::new(),
            waiting: Vec::new(),
            queue: VecDeque::new(),
            next: FIRST_KEY,
            again: None,
            pause: PAUSE,
            forks: 0,
            restarts: 0,
            not_imported: BTreeMap::new(),
            outcomes: Vec::new(),
        }
    }
}

impl ZygoteSupervisor {
    /// Starts an interpreter in place of the one before; answered when it can be forked.
    pub fn warm(&mut self, epoll: &OwnedFd, request: u64, recipe: Recipe) {
        self.end();
        self.recipe = Some(recipe);
        self.not_imported.clear();
        self.pause = PAUSE;
        self.waiting.push(request);
        self.start(epoll);
    }

    /// No more of them; what was asked for is answered when they are gone.
    pub fn end(&mut self) {
        self.recipe = None;
        self.again = None;
        self.fail_all("it is being replaced");
        for zygote in &mut self.zygotes {
            zygote.state = ZygoteState::Retired { since: Instant::now() };
            zygote.kill();
        }
    }

    pub fn is_gone(&self) -> bool {
        self.zygotes.is_empty()
    }

    pub fn figures(&self) -> LauncherReply {
        let not_imported = self.not_imported.clone();
        LauncherReply::Warmth {
            ready: self.ready().is_some(),
            forks: self.forks,
            restarts: self.restarts,
            not_imported,
        }
    }

    pub fn fork(&mut self, wanted: ForkRequest) {
        if self.ready().is_none() || self.queue.len() >= MAX_QUEUE {
            let why = if self.recipe.is_some() { "it is not ready" } else { "there is none" };
            return self.outcomes.push(ForkOutcome::Answer(wanted.request, unavailable(why)));
        }
        self.queue.push_back(wanted);
        self.send();
    }

    /// The sandbox ends, and with it whoever is on the way there.
    pub fn leave(&mut self, cell: u64) {
        let begun = |_: &u64, sent: &mut Sent| sent.cell == cell && sent.begun.is_some();
        let given_up = self.zygotes.iter_mut().flat_map(|zygote| zygote.sent.extract_if(.., begun));
        self.outcomes.extend(given_up.map(|(_, sent)| sent.give_up("the sandbox is ending")));
    }

    pub fn outcomes(&mut self) -> Vec<ForkOutcome> {
        std::mem::take(&mut self.outcomes)
    }

    pub fn is_ours(key: u64) -> bool {
        key >= FIRST_KEY
    }

    pub fn event(&mut self, key: u64, kind: u64) {
        match kind {
            CONTROL => while self.hear(key) {},
            LOG => self.relay(key),
            _ => {}
        }
    }

    /// True when the process was one of ours.
    pub fn reaped(&mut self, pid: Pid) -> bool {
        let Some(at) = self.zygotes.iter().position(|z| z.pid == pid) else { return false };
        // What it said last may still wait to be read.
        while self.hear(self.zygotes[at].key) {}
        let zygote = self.zygotes.remove(at);
        self.outcomes.extend(zygote.sent.into_values().map(|sent| sent.give_up("it has ended")));
        let stable = match zygote.state {
            ZygoteState::Retired { .. } => return true,
            ZygoteState::Starting { .. } => {
                let why = format!("it ended before it was ready: {}", zygote.last_words);
                log(&format!("launcher: the warm interpreter: {why}"));
                if self.ready().is_none() {
                    self.fail_all(&why);
                }
                false
            }
            ZygoteState::Ready { since } => {
                log("launcher: the warm interpreter has ended; another is started");
                self.restarts += 1;
                self.fail_all("it has ended");
                since.elapsed() >= STABLE
            }
        };
        if stable {
            self.pause = PAUSE;
        }
        if self.recipe.is_some() {
            self.again = Some(Instant::now() + self.pause);
            self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        }
        true
    }

    pub fn wake_at(&self) -> Option<Instant> {
        let of = |zygote: &Zygote| {
            let own = match zygote.state {
                ZygoteState::Starting { until } => Some(until),
                ZygoteState::Ready { since } => self.rotates_at(zygote, since),
                ZygoteState::Retired { .. } => None,
            };
            zygote.sent.values().map(|sent| sent.until).chain(own).min()
        };
        self.zygotes.iter().filter_map(of).chain(self.again).min()
    }

    pub fn tick(&mut self, epoll: &OwnedFd) {
        let now = Instant::now();
        for zygote in &mut self.zygotes {
            let stuck = zygote.sent.extract_if(.., |_, sent| sent.begun.is_some() && now >= sent.until);
            self.outcomes.extend(stuck.map(|(_, sent)| sent.give_up("the sandbox kept the fork from its end")));
            let late = match zygote.state {
                ZygoteState::Starting { until } => now >= until,
                ZygoteState::Ready { .. } | ZygoteState::Retired { .. } => {
                    zygote.sent.values().any(|sent| now >= sent.until)
                }
            };
            if late {
                zygote.last_words = "it took too long".into();
                zygote.kill();
            }
        }
        if self.again.is_some_and(|at| now >= at) {
            self.again = None;
            self.start(epoll);
        }
        let starts =
            self.again.is_some() || self.zygotes.iter().any(|z| matches!(z.state, ZygoteState::Starting { .. }));
        let due = self.zygotes.iter().any(|zygote| match zygote.state {
            ZygoteState::Ready { since } => self.rotates_at(zygote, since).is_some_and(|at| now >= at),
            _ => false,
        });
        if due && !starts {
            self.start(epoll);
        }
    }

    fn rotates_at(&self, zygote: &Zygote, since: Instant) -> Option<Instant> {
        let Rotation { forks, not_before, after } = self.recipe.as_ref()?.rotation;
        let starting = |z: &Zygote| matches!(z.state, ZygoteState::Starting { .. });
        if zygote.forks == 0 || self.again.is_some() || self.zygotes.iter().any(starting) {
            return None;
        }
        Some(since + if zygote.forks >= forks { not_before } else { after })
    }

    /// The one that serves.
    fn ready(&self) -> Option<usize> {
        self.zygotes.iter().position(|z| matches!(z.state, ZygoteState::Ready { .. }))
    }

    /// Nobody is kept waiting for an interpreter that is not there.
    fn fail_all(&mut self, why: &str) {
        let waiting = self.waiting.drain(..);
        let queued = self.queue.drain(..).map(|wanted| wanted.request);
        let answers = waiting.chain(queued).map(|request| ForkOutcome::Answer(request, unavailable(why)));
        self.outcomes.extend(answers);
    }

    fn start(&mut self, epoll: &OwnedFd) {
        let Some(recipe) = &self.recipe else { return };
        let key = self.next;
        self.next += 1;
        match launch(epoll, key, recipe) {
            Ok(zygote) => self.zygotes.push(zygote),
            Err(e) => {
                let why = format!("it cannot be started: {e}");
                log(&format!("launcher: the warm interpreter: {why}"));
                self.fail_all(&why);
                self.again = Some(Instant::now() + self.pause);
                self.pause = (self.pause * 2).min(LONGEST_PAUSE);
            }
        }
    }

    /// Reads one message. False when there is none.
    fn hear(&mut self, key: u64) -> bool {
        let Some(at) = self.zygotes.iter().position(|z| z.key == key) else { return false };
        let zygote = &mut self.zygotes[at];
        let (said, fds) = match wire::receive::<ZygoteMessage>(&zygote.socket) {
            Ok(Some(message)) => message,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return false,
            // Its end, which is reaped, or nothing that it could mean.
            Ok(None) | Err(_) => {
                zygote.kill();
                return false;
            }
        };
        match said {
            ZygoteMessage::Ready => self.is_ready(at),
            // Of one that is over already nothing is to be known.
            ZygoteMessage::Begun { number } => {
                if let Some(sent) = zygote.sent.get_mut(&number) {
                    (sent.begun, sent.until) = (fds.into_iter().next(), Instant::now() + FORK_TIME);
                }
            }
            ZygoteMessage::NotImported(modules) => self.not_imported = modules,
            ZygoteMessage::Forked { number, pid } => {
                if let (Some(sent), Some(process)) = (zygote.sent.remove(&number), fds.into_iter().next()) {
                    zygote.forks += 1;
                    self.forks += 1;
                    let Sent { request, cell, channel, .. } = sent;
                    self.outcomes.push(ForkOutcome::Forked { request, cell, fork: Fork { pid, process, channel } });
                }
            }
            ZygoteMessage::Refused { number, message } => {
                if let Some(sent) = zygote.sent.remove(&number) {
                    self.outcomes.push(ForkOutcome::Answer(sent.request, unavailable(&message)));
                }
            }
            ZygoteMessage::Note { message } => log(&format!("warm interpreter: {message}")),
            ZygoteMessage::Failed { message, .. } => zygote.last_words = message,
        }
        self.send();
        true
    }

    fn is_ready(&mut self, at: usize) {
        if !matches!(self.zygotes[at].state, ZygoteState::Starting { .. }) {
            return;
        }
        for zygote in &mut self.zygotes {
            if let ZygoteState::Ready { since } = zygote.state {
                zygote.state = ZygoteState::Retired { since };
            }
        }
        self.zygotes[at].state = ZygoteState::Ready { since: Instant::now() };
        self.outcomes.extend(self.waiting.drain(..).map(|request| ForkOutcome::Answer(request, LauncherReply::Done)));
    }

    fn send(&mut self) {
        for zygote in
            self.zygotes.iter().filter(|z| matches!(z.state, ZygoteState::Retired { .. }) && z.sent.is_empty())
        {
            zygote.kill();
        }
        while let Some(at) = self.ready()
            && self.zygotes[at].sent.values().filter(|sent| sent.begun.is_none()).count() < AT_ONCE
            && let Some(wanted) = self.queue.pop_front()
        {
            let number = self.next;
            self.next += 1;
            let request = wanted.request;
            match order(&self.zygotes[at].socket, number, wanted) {
                Ok(sent) => drop(self.zygotes[at].sent.insert(number, sent)),
                Err(e) => self.outcomes.push(ForkOutcome::Answer(request, unavailable(&e.to_string()))),
            }
        }
    }

    fn relay(&mut self, key: u64) {
        let Some(zygote) = self.zygotes.iter_mut().find(|z| z.key == key) else { return };
        let mut buffer = [0; 2048];
        match rustix::io::read(&zygote.log, &mut buffer) {
            // Nothing comes any more, and a pipe without writers would be ready for ever.
            Ok(0) | Err(_) => zygote.kill(),
            Ok(got) => {
                zygote.logged += got;
                if let Some(line) = String::from_utf8_lossy(&buffer[..got]).lines().rfind(|l| !l.trim().is_empty()) {
                    zygote.last_words = line.trim().chars().take(300).collect();
                }
                if zygote.logged <= LOG_BYTES {
                    relay("warm interpreter", &buffer[..got]);
                }
            }
        }
    }
}

fn unavailable(why: &str) -> LauncherReply {
    let hint = "kernels are started anew meanwhile, which takes longer".to_owned();
    LauncherReply::Unavailable { why: format!("no warm interpreter: {why}"), hint }
}

fn order(socket: &OwnedFd, number: u64, wanted: ForkRequest) -> io::Result<Sent> {
    let ForkRequest { request, cell, guest, v2, tasks, steps } = wanted;
    let (channel, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let fds: Vec<_> = [&theirs, &guest].into_iter().chain(&v2).chain(&tasks).map(AsFd::as_fd).collect();
    wire::send(socket, &ForkOrder { number, v2: v2.is_some(), steps }, &fds)?;
    Ok(Sent { request, cell, channel, begun: None, until: Instant::now() + FORK_TIME })
}

fn launch(epoll: &OwnedFd, key: u64, recipe: &Recipe) -> io::Result<Zygote> {
    let (socket, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let (log, log_end) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    rustix::io::ioctl_fionbio(&socket, true)?;
    rustix::io::ioctl_fionbio(&log, true)?;
    match sys::clone3(libc::CLONE_NEWNS | libc::CLONE_NEWNET | libc::CLONE_NEWIPC, None)? {
        Cloned::Child => {
            sys::default_signals();
            // A panic must not return into the launcher's loop.
            let start = || become_interpreter(recipe, theirs, log_end);
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(start));
            sys::leave(1)
        }
        Cloned::Parent { pid, pidfd } => {
            for (fd, kind) in [(socket.as_fd(), CONTROL), (log.as_fd(), LOG)] {
                let data = epoll::EventData::new_u64(key * KINDS + kind);
                epoll::add(epoll, fd, data, epoll::EventFlags::IN)?;
            }
            Ok(Zygote {
                key,
                pid,
                process: pidfd,
                socket,
                log,
                logged: 0,
                last_words: "it did not say why".into(),
                state: ZygoteState::Starting { until: Instant::now() + START_TIME },
                forks: 0,
                sent: BTreeMap::new(),
            })
        }
    }
}

/// Returns only when it failed, after having told the launcher.
fn become_interpreter(recipe: &Recipe, socket: OwnedFd, log: OwnedFd) {
    let keep = [socket.as_fd(), log.as_fd(), recipe.library.as_fd()];
    let alone =
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).and_then(|()| sys::close_all_but(&keep));
    let Ok(control) = alone.and_then(|()| rustix::io::fcntl_dupfd_cloexec(&socket, 64)) else { return };
    if apply::finish(&recipe.plan, control)
        && let Err(e) = execute(recipe, &socket, &log)
    {
        let program = recipe.argv.first().map(|a| a.to_string_lossy()).unwrap_or_default();
        let _ = wire::send(&socket, &ZygoteMessage::Failed { step: 0, message: format!("`{program}`: {e}") }, &[]);
    }
}

/// 0 on `/dev/null`, 1 and 2 to the log, 3 to the launcher, 4 the library, nothing else.
fn execute(recipe: &Recipe, socket: &OwnedFd, log: &OwnedFd) -> io::Result<()> {
    let high = |fd: &OwnedFd| rustix::io::fcntl_dupfd_cloexec(fd, 64);
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    let fds = [high(&null)?, high(log)?, high(log)?, high(socket)?, high(&recipe.library)?];
    for (number, fd) in fds.iter().enumerate() {
        sys::place(fd.as_fd(), number as i32)?;
    }
    sys::close_on_exec_from(5)?;
    let program = recipe.argv.first().ok_or_else(|| io::Error::other("there is no program"))?;
    Err(sys::execve(program, &recipe.argv, &recipe.environment).into())
}
