//! This module is the launcher's side of the warm interpreter (zygote), a process that is started once, imports
//! everything, and is forked into sandboxes.
//!
//! It starts the process, orders forks, hands each fork to the guest of its sandbox, and replaces the process when it
//! dies or has made many forks. It never blocks on the process: every order has a number and a deadline. The steps
//! between the order and the kernel are in the `zygote` crate, which the interpreter loads; the steps by which a kernel
//! is confined are in [`crate::confine`].

use std::collections::{BTreeMap, VecDeque};
use std::ffi::CString;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, Shutdown, SocketFlags, SocketType, recvmsg, sendmsg, shutdown, socketpair,
};
use rustix::process::{Pid, Signal, pidfd_send_signal};
use serde::{Deserialize, Serialize};

use crate::apply;
use crate::confine::ConfineStep;
use crate::keeper::LOG_BYTES;
use crate::launcher::{log, relay};
use crate::plan::Plan;
use crate::pool::Backoff;
use crate::spec::ZygoteStatus;
use crate::sys;
use crate::token::{Token, WatchedFd};
use crate::wire::{self, LauncherReply};

/// Maximum time for an interpreter to start: enough to import a data stack on a busy machine.
const START_TIME: Duration = Duration::from_secs(120);
/// Maximum time for the interpreter to begin a fork, after which it is killed and started again. The fork then has the
/// same time to complete, after which it is given up; that affects only the sandbox it was for.
const FORK_TIME: Duration = Duration::from_secs(10);
/// Maximum number of orders that the interpreter has at a time: enough that it never idles, and few enough that they do
/// not wait there for long.
const AT_ONCE: usize = 2;
const MAX_QUEUE: usize = 4096;
/// First pause between the death of an interpreter and the next start; it doubles up to [`LONGEST_PAUSE`].
const PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// An interpreter that lived at least this long did not die of something in its start.
const STABLE: Duration = Duration::from_secs(30);

/// Decides when an interpreter is replaced. Its kernels share its hash seed and its code addresses, so it is replaced
/// once it has made `forks` kernels, but not before it has served for `not_before`; with fewer kernels it is replaced
/// once it has served for `after`.
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

/// Everything that is needed to start an interpreter.
#[derive(Debug)]
pub(crate) struct Recipe {
    pub plan: Plan,
    pub argv: Vec<CString>,
    pub environment: Vec<CString>,
    /// The library that the interpreter loads to be forked.
    pub library: OwnedFd,
    pub rotation: Rotation,
}

/// An order from the launcher to the interpreter. Its descriptors are the kernel's end of its channel, the guest, the
/// v2 cgroup if there is one, and the v1 cgroups.
#[derive(Debug, Serialize, Deserialize)]
pub struct ForkOrder {
    pub number: u64,
    pub v2: bool,
    pub steps: Vec<ConfineStep>,
}

/// A message from the interpreter to the launcher.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ZygoteMessage {
    /// The interpreter has imported its modules and can be forked.
    Ready,
    /// A process is on its way to the sandbox; its descriptor comes with this message. The interpreter is free for the
    /// next order.
    Begun { number: u64 },
    /// Sent by the interpreter's driver before it is ready: the modules that could not be imported, with the reasons.
    NotImported(BTreeMap<String, String>),
    /// The kernel runs and has this pid in its sandbox. A descriptor of the process comes with this message.
    Forked { number: u64, pid: u32 },
    /// The order was not carried out.
    Refused { number: u64, message: String },
    /// The counterpart of `apply::SetupEvent::Note`.
    Note { message: String },
    /// A step of the interpreter's plan (see `apply::SetupEvent`) or its start as a whole has failed.
    Failed { step: usize, message: String },
}

/// A process that was put into a sandbox, to be handed to the guest.
#[derive(Debug)]
pub struct Fork {
    pub pid: u32,
    pub process: OwnedFd,
    /// The channel on which the process waits for its instructions.
    pub channel: OwnedFd,
}

/// A process that arrives at a guest, by kind.
#[derive(Debug)]
pub enum Arrival {
    /// A fork of the warm interpreter, which waits for its descriptors.
    Kernel(Fork),
    /// A browser driver with its leash, a pipe that ends the driver when its last copy is closed. The guest could not
    /// kill the driver, because it has a different uid.
    Driver(Fork, OwnedFd),
}

/// Creates the channel from the launcher to one guest. The guest's end can only read.
pub fn guest_channel() -> io::Result<(OwnedFd, OwnedFd)> {
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    shutdown(&ours, Shutdown::Read)?;
    Ok((ours, theirs))
}

/// The first byte of an arrival, before the pid.
const KERNEL: u8 = b'k';
const DRIVER: u8 = b'd';

impl Arrival {
    /// Sends the process without blocking: a guest that does not take its arrivals gets no more.
    pub fn send(&self, socket: impl AsFd) -> io::Result<()> {
        let (kind, fork, leash) = match self {
            Self::Kernel(fork) => (KERNEL, fork, None),
            Self::Driver(fork, leash) => (DRIVER, fork, Some(leash)),
        };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds: Vec<_> = [&fork.process, &fork.channel].into_iter().chain(leash).map(AsFd::as_fd).collect();
        control.push(SendAncillaryMessage::ScmRights(&fds));
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        sendmsg(socket, &[IoSlice::new(&[kind]), IoSlice::new(&fork.pid.to_le_bytes())], &mut control, flags)?;
        Ok(())
    }

    /// Receives the oldest arrival that was not taken yet.
    pub fn receive(socket: impl AsFd) -> io::Result<Self> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let (mut kind, mut pid) = ([0], [0; 4]);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        recvmsg(socket, &mut [IoSliceMut::new(&mut kind), IoSliceMut::new(&mut pid)], &mut control, flags)?;
        let rights = |m| if let RecvAncillaryMessage::ScmRights(fds) = m { Some(fds) } else { None };
        let mut fds = control.drain().filter_map(rights).flatten();
        let (Some(process), Some(channel)) = (fds.next(), fds.next()) else {
            return Err(io::Error::other("nothing was put into this sandbox"));
        };
        let fork = Fork { pid: u32::from_le_bytes(pid), process, channel };
        match (kind, fds.next()) {
            ([KERNEL], None) => Ok(Self::Kernel(fork)),
            ([DRIVER], Some(leash)) => Ok(Self::Driver(fork, leash)),
            _ => Err(io::Error::other("an unknown kind of process was put into this sandbox")),
        }
    }
}

/// A fork that the server has requested.
#[derive(Debug)]
pub(crate) struct ForkRequest {
    pub request: u64,
    /// The launcher's key of the sandbox.
    pub sandbox: u64,
    pub guest: OwnedFd,
    /// The v2 cgroup in which the process is created.
    pub v2: Option<OwnedFd>,
    /// The v1 cgroups, which the process joins by itself.
    pub tasks: Vec<OwnedFd>,
    pub steps: Vec<ConfineStep>,
}

/// The action that the launcher has to take as the result of a request.
#[derive(Debug)]
pub(crate) enum ForkOutcome {
    /// Reply to the request.
    Reply(u64, LauncherReply),
    /// Hand the fork to the guest, then reply.
    Forked { request: u64, sandbox: u64, fork: Fork },
}

#[derive(Debug)]
struct Sent {
    request: u64,
    sandbox: u64,
    channel: OwnedFd,
    /// The process that brings the kernel into the sandbox, once the interpreter has created it.
    begun: Option<OwnedFd>,
    until: Instant,
}

impl Sent {
    /// Gives up an order that does not complete, or whose sandbox or interpreter is gone.
    fn give_up(self, why: &str) -> ForkOutcome {
        if let Some(process) = &self.begun {
            let _ = pidfd_send_signal(process, Signal::KILL);
        }
        ForkOutcome::Reply(self.request, unavailable(why))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ZygoteState {
    /// The interpreter imports its modules and has to be ready at `until`.
    Starting { until: Instant },
    /// The interpreter can be forked.
    Ready { since: Instant },
    /// Another interpreter has taken over; this one ends when it has no open orders.
    Retired { since: Instant },
}

#[derive(Debug)]
struct Zygote {
    key: u64,
    pid: Pid,
    process: OwnedFd,
    socket: OwnedFd,
    log: OwnedFd,
    logged: usize,
    /// The last output, reported if the interpreter does not start.
    last_output: String,
    state: ZygoteState,
    forks: u32,
    sent: BTreeMap<u64, Sent>,
}

impl Zygote {
    fn kill(&self) {
        let _ = pidfd_send_signal(&self.process, Signal::KILL);
    }
}

/// Manages the interpreter that serves and the one that replaces it.
#[derive(Debug)]
pub(crate) struct ZygoteSupervisor {
    recipe: Option<Recipe>,
    zygotes: Vec<Zygote>,
    /// Requests that wait for the first interpreter to be ready.
    waiting: Vec<u64>,
    queue: VecDeque<ForkRequest>,
    next: u64,
    /// The next start after an interpreter has died or did not start.
    restart: Backoff<Instant>,
    forks: u64,
    restarts: u64,
    not_imported: BTreeMap<String, String>,
    outcomes: Vec<ForkOutcome>,
}

impl Default for ZygoteSupervisor {
    fn default() -> Self {
        Self {
            recipe: None,
            zygotes: Vec::new(),
            waiting: Vec::new(),
            queue: VecDeque::new(),
            next: 1,
            restart: Backoff::new(PAUSE, LONGEST_PAUSE),
            forks: 0,
            restarts: 0,
            not_imported: BTreeMap::new(),
            outcomes: Vec::new(),
        }
    }
}

impl ZygoteSupervisor {
    /// Starts an interpreter in place of the previous one. The request is answered when the interpreter can be forked.
    pub(crate) fn warm(&mut self, epoll: &OwnedFd, request: u64, recipe: Recipe) {
        self.end();
        self.recipe = Some(recipe);
        self.not_imported.clear();
        self.waiting.push(request);
        self.start(epoll);
    }

    /// Ends all interpreters. The replies to open orders follow when the interpreters are gone.
    pub(crate) fn end(&mut self) {
        self.recipe = None;
        self.restart.reset();
        self.fail_all("it is being replaced");
        for zygote in &mut self.zygotes {
            zygote.state = ZygoteState::Retired { since: Instant::now() };
            zygote.kill();
        }
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.zygotes.is_empty()
    }

    pub(crate) fn status(&self) -> ZygoteStatus {
        let (ready, not_imported) = (self.ready().is_some(), self.not_imported.clone());
        ZygoteStatus { ready, forks: self.forks, restarts: self.restarts, not_imported }
    }

    pub(crate) fn fork(&mut self, wanted: ForkRequest) {
        if self.ready().is_none() || self.queue.len() >= MAX_QUEUE {
            let why = if self.recipe.is_some() { "it is not ready" } else { "there is none" };
            return self.outcomes.push(ForkOutcome::Reply(wanted.request, unavailable(why)));
        }
        self.queue.push_back(wanted);
        self.send();
    }

    /// Gives up the forks that are on their way to a sandbox that is ending.
    pub(crate) fn leave(&mut self, sandbox: u64) {
        let begun = |_: &u64, sent: &mut Sent| sent.sandbox == sandbox && sent.begun.is_some();
        let given_up = self.zygotes.iter_mut().flat_map(|zygote| zygote.sent.extract_if(.., begun));
        self.outcomes.extend(given_up.map(|(_, sent)| sent.give_up("the sandbox is ending")));
    }

    pub(crate) fn outcomes(&mut self) -> Vec<ForkOutcome> {
        std::mem::take(&mut self.outcomes)
    }

    pub(crate) fn event(&mut self, fd: WatchedFd, key: u64) {
        match fd {
            WatchedFd::Control => while self.read_message(key) {},
            WatchedFd::Log => self.relay(key),
            WatchedFd::Process => {}
        }
    }

    /// Handles the end of a process. Returns true if it was an interpreter.
    pub(crate) fn reaped(&mut self, pid: Pid) -> bool {
        let Some(at) = self.zygotes.iter().position(|z| z.pid == pid) else { return false };
        // Its last messages may still be unread.
        while self.read_message(self.zygotes[at].key) {}
        let zygote = self.zygotes.remove(at);
        self.outcomes.extend(zygote.sent.into_values().map(|sent| sent.give_up("it has ended")));
        let stable = match zygote.state {
            ZygoteState::Retired { .. } => return true,
            ZygoteState::Starting { .. } => {
                let why = format!("it ended before it was ready: {}", zygote.last_output);
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
            self.restart.reset();
        }
        if self.recipe.is_some() {
            self.restart.failed(Instant::now());
        }
        true
    }

    pub(crate) fn wake_at(&self) -> Option<Instant> {
        let of = |zygote: &Zygote| {
            let own = match zygote.state {
                ZygoteState::Starting { until } => Some(until),
                ZygoteState::Ready { since } => self.rotates_at(zygote, since),
                ZygoteState::Retired { .. } => None,
            };
            zygote.sent.values().map(|sent| sent.until).chain(own).min()
        };
        self.zygotes.iter().filter_map(of).chain(self.restart.retry_at()).min()
    }

    pub(crate) fn tick(&mut self, epoll: &OwnedFd) {
        let now = Instant::now();
        for zygote in &mut self.zygotes {
            let stuck = zygote.sent.extract_if(.., |_, sent| sent.begun.is_some() && now >= sent.until);
            self.outcomes.extend(stuck.map(|(_, sent)| sent.give_up("the sandbox kept the fork from completing")));
            let late = match zygote.state {
                ZygoteState::Starting { until } => now >= until,
                ZygoteState::Ready { .. } | ZygoteState::Retired { .. } => {
                    zygote.sent.values().any(|sent| now >= sent.until)
                }
            };
            if late {
                zygote.last_output = "it took too long".into();
                zygote.kill();
            }
        }
        if self.restart.take_due(now) {
            self.start(epoll);
        }
        let starts = self.restart.retry_at().is_some()
            || self.zygotes.iter().any(|z| matches!(z.state, ZygoteState::Starting { .. }));
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
        if zygote.forks == 0 || self.restart.retry_at().is_some() || self.zygotes.iter().any(starting) {
            return None;
        }
        Some(since + if zygote.forks >= forks { not_before } else { after })
    }

    /// Returns the index of the interpreter that serves.
    fn ready(&self) -> Option<usize> {
        self.zygotes.iter().position(|z| matches!(z.state, ZygoteState::Ready { .. }))
    }

    /// Replies to all waiting requests, so that none waits for an interpreter that does not exist.
    fn fail_all(&mut self, why: &str) {
        let waiting = self.waiting.drain(..);
        let queued = self.queue.drain(..).map(|wanted| wanted.request);
        let replies = waiting.chain(queued).map(|request| ForkOutcome::Reply(request, unavailable(why)));
        self.outcomes.extend(replies);
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
                self.restart.failed(Instant::now());
            }
        }
    }

    /// Reads one message. Returns false if there is none.
    fn read_message(&mut self, key: u64) -> bool {
        let Some(at) = self.zygotes.iter().position(|z| z.key == key) else { return false };
        let zygote = &mut self.zygotes[at];
        let (message, fds) = match wire::receive::<ZygoteMessage>(&zygote.socket) {
            Ok(Some(message)) => message,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return false,
            // Either the interpreter has ended and will be reaped, or its message makes no sense.
            Ok(None) | Err(_) => {
                zygote.kill();
                return false;
            }
        };
        match message {
            ZygoteMessage::Ready => self.is_ready(at),
            // Messages about an order that is already finished are ignored.
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
                    let Sent { request, sandbox, channel, .. } = sent;
                    self.outcomes.push(ForkOutcome::Forked { request, sandbox, fork: Fork { pid, process, channel } });
                }
            }
            ZygoteMessage::Refused { number, message } => {
                if let Some(sent) = zygote.sent.remove(&number) {
                    self.outcomes.push(ForkOutcome::Reply(sent.request, unavailable(&message)));
                }
            }
            ZygoteMessage::Note { message } => log(&format!("warm interpreter: {message}")),
            ZygoteMessage::Failed { message, .. } => zygote.last_output = message,
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
        self.outcomes.extend(self.waiting.drain(..).map(|request| ForkOutcome::Reply(request, LauncherReply::Done)));
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
                Err(e) => self.outcomes.push(ForkOutcome::Reply(request, unavailable(&e.to_string()))),
            }
        }
    }

    fn relay(&mut self, key: u64) {
        let Some(zygote) = self.zygotes.iter_mut().find(|z| z.key == key) else { return };
        let mut buffer = [0; 2048];
        match rustix::io::read(&zygote.log, &mut buffer) {
            // There is no more output, and a pipe without writers would be reported as ready for ever.
            Ok(0) | Err(_) => zygote.kill(),
            Ok(got) => {
                zygote.logged += got;
                if let Some(line) = String::from_utf8_lossy(&buffer[..got]).lines().rfind(|l| !l.trim().is_empty()) {
                    zygote.last_output = line.trim().chars().take(300).collect();
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
    let ForkRequest { request, sandbox, guest, v2, tasks, steps } = wanted;
    let (channel, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let fds: Vec<_> = [&theirs, &guest].into_iter().chain(&v2).chain(&tasks).map(AsFd::as_fd).collect();
    wire::send(socket, &ForkOrder { number, v2: v2.is_some(), steps }, &fds)?;
    Ok(Sent { request, sandbox, channel, begun: None, until: Instant::now() + FORK_TIME })
}

fn launch(epoll: &OwnedFd, key: u64, recipe: &Recipe) -> io::Result<Zygote> {
    let ((socket, theirs), (log, log_end)) = (wire::connection()?, wire::log_pipe()?);
    let namespaces = libc::CLONE_NEWNS | libc::CLONE_NEWNET | libc::CLONE_NEWIPC;
    let (pid, process) = sys::spawn_child(namespaces, None, || become_interpreter(recipe, theirs, log_end))?;
    Token::Zygote(WatchedFd::Control, key).watch(epoll, &socket)?;
    Token::Zygote(WatchedFd::Log, key).watch(epoll, &log)?;
    Ok(Zygote {
        key,
        pid,
        process,
        socket,
        log,
        logged: 0,
        last_output: "it did not say why".into(),
        state: ZygoteState::Starting { until: Instant::now() + START_TIME },
        forks: 0,
        sent: BTreeMap::new(),
    })
}

/// Turns the child into the interpreter. Returns only on failure, after it has reported the error to the launcher.
fn become_interpreter(recipe: &Recipe, socket: OwnedFd, log: OwnedFd) {
    let keep = [socket.as_fd(), log.as_fd(), recipe.library.as_fd()];
    let separated = sys::separate_child(&keep);
    let Ok(control) = separated.and_then(|()| rustix::io::fcntl_dupfd_cloexec(&socket, 64)) else { return };
    if apply::finish(&recipe.plan, control)
        && let Err(e) = execute(recipe, &socket, &log)
    {
        let program = recipe.argv.first().map(|a| a.to_string_lossy()).unwrap_or_default();
        let _ = wire::send(&socket, &ZygoteMessage::Failed { step: 0, message: format!("`{program}`: {e}") }, &[]);
    }
}

/// Executes the interpreter with `/dev/null` on 0, the log on 1 and 2, the launcher's socket on 3, the library on 4,
/// and no other descriptors.
fn execute(recipe: &Recipe, socket: &OwnedFd, log: &OwnedFd) -> io::Result<()> {
    let null = sys::open_null()?;
    let [] = sys::hand_over(&[(0, &null), (1, log), (2, log), (3, socket), (4, &recipe.library)], [])?;
    let program = recipe.argv.first().ok_or_else(|| io::Error::other("there is no program"))?;
    Err(sys::execve(program, &recipe.argv, &recipe.environment).into())
}
