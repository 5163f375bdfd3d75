//! This module is the launcher, the process that creates sandboxes. It has one thread, is started before the server has
//! other threads, and is the only process that forks.
//!
//! It is the same executable as the server, recognised by `argv[0]`. It serves one server over a packet socket; when
//! the socket closes, however the server ended, it destroys the sandboxes it created and exits. For an ordinary user it
//! first moves into a new user namespace and executes itself again there, because a process that was executed outside
//! that namespace could not enter the sandboxes it creates.

use std::convert::Infallible;
use std::ffi::CString;
use std::fs;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode as FileMode, OFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, WaitOptions};
use serde::{Deserialize, Serialize};

use crate::ids::Mode;
use crate::inherited;
use crate::keeper::Keeper;
use crate::survey::{Purpose, Survey, find_program, map_self};
use crate::sys;
use crate::wire::{self, LauncherCall, LauncherReply, LauncherRequest, LauncherResponse, Start};

/// `argv[0]` of the launcher.
const NAME: &str = "sandpool-launcher";
/// `argv[1]` of the launcher after it has moved into its user namespace.
const INNER: &str = "inside";

/// A started launcher: the server's end of the connection and the process.
#[derive(Debug)]
pub struct Spawned {
    pub socket: OwnedFd,
    pub process: Process,
}

/// The launcher's process. The server waits for it in the end, so that it does not remain a zombie.
#[derive(Debug)]
pub struct Process(Option<Child>);

impl Process {
    /// Waits until the launcher has ended, which happens after the connection closes or a shutdown is answered.
    pub fn wait(mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.wait();
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The launcher may have to destroy sandboxes first; nothing here has to wait for that.
        if let Some(mut child) = self.0.take() {
            std::thread::spawn(move || child.wait());
        }
    }
}

/// Starts the launcher from an executable whose `main` calls [`entry`].
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

/// Runs the launcher if this process is one, and never returns then; returns at once otherwise. `main` has to call it
/// first.
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

/// Writes a line to stderr unless that would block: a log that is not read must not stop the launcher.
pub(crate) fn log(line: &str) {
    let stderr = io::stderr();
    let mut fds = [PollFd::new(&stderr, PollFlags::OUT)];
    if poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|n| n == 1) {
        let _ = stderr.lock().write_all(format!("{line}\n").as_bytes());
    }
}

/// Logs the output of one of our processes line by line, with control characters replaced so that a terminal does not
/// interpret them.
pub(crate) fn relay(who: &str, bytes: &[u8]) {
    for line in String::from_utf8_lossy(bytes).lines() {
        let clean: String = line.chars().map(|c| if c.is_control() { '.' } else { c }).collect();
        log(&format!("{who}: {clean}"));
    }
}

fn begin() -> io::Result<()> {
    let socket = take_connection()?;
    // Leave the server's terminal: Ctrl-C is meant for the server, which ends the launcher by closing the connection.
    let _ = rustix::process::setsid();
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGPIPE, libc::SIGQUIT] {
        sys::ignore(signal);
    }
    loop {
        let Some((request, fds)) = wire::receive::<LauncherRequest>(&socket)? else { return Ok(()) };
        match request.call {
            LauncherCall::Survey { mode, cgroups } => {
                let taken = Survey::take(mode, cgroups, &ours(), Purpose::Look);
                send_reply(&socket, request.id, LauncherReply::Survey(Box::new(taken)))?;
            }
            LauncherCall::Start(start) => {
                let survey = Survey::take(start.mode, start.cgroups, &ours(), Purpose::Start);
                return match (&survey.refusal, fds.into_iter().next()) {
                    (Some(no), _) => {
                        let (why, hint) = (no.why.clone(), no.hint.clone());
                        send_reply(&socket, request.id, LauncherReply::Unavailable { why, hint })
                    }
                    (None, None) => {
                        survey.cgroup.release();
                        send_reply(&socket, request.id, failed("the guest's program is missing"))
                    }
                    (None, Some(guest)) => start_with(Resume { id: request.id, start, survey }, socket, guest),
                };
            }
            LauncherCall::Shutdown => return send_reply(&socket, request.id, LauncherReply::Done),
            _ => send_reply(&socket, request.id, failed("not started"))?,
        }
    }
}

/// Takes the connection to the server from descriptor 0, which becomes `/dev/null`: no process that is started later may
/// find the connection there.
fn take_connection() -> io::Result<OwnedFd> {
    let inherited = inherited::take_fd(0)?;
    let socket = rustix::io::fcntl_dupfd_cloexec(&inherited, 10)?;
    let _ = inherited.into_raw_fd();
    sys::place_null(0..1)?;
    Ok(socket)
}

/// Returns the pids of the server and of the launcher.
fn ours() -> Vec<Pid> {
    [Some(rustix::process::getpid()), rustix::process::getppid()].into_iter().flatten().collect()
}

pub(crate) fn failed(message: impl Into<String>) -> LauncherReply {
    LauncherReply::Failed { message: message.into() }
}

pub(crate) fn send_reply(socket: &OwnedFd, id: u64, reply: LauncherReply) -> io::Result<()> {
    send_reply_with(socket, id, reply, &[])
}

pub(crate) fn send_reply_with(
    socket: &OwnedFd,
    id: u64,
    reply: LauncherReply,
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    wire::send(socket, &LauncherResponse { id, reply }, fds)
}

/// State that the launcher passes to itself when it executes itself again.
#[derive(Serialize, Deserialize)]
struct Resume {
    /// Id of the request that is being answered.
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
            resume.survey.cgroup.release();
            let hint = "`sandpool doctor` says what this user lacks; `newuidmap` and `newgidmap` need its ranges in /etc/subuid \
                        and /etc/subgid"
                .to_owned();
            send_reply(
                &socket,
                id,
                LauncherReply::Unavailable { why: format!("no user namespace for the launcher: {e}"), hint },
            )
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
    // `newuidmap` has to be started from outside and for a namespace that exists already, so a child waits for it.
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
        let message = String::from_utf8_lossy(&output.stderr);
        return Err(io::Error::other(format!("{program}: {}", message.trim())));
    }
    Ok(())
}

/// Executes this program again inside the namespace, with the socket on 0, the guest on 3 and the saved state on 4.
fn execute_again(resume: &Resume, socket: &OwnedFd, guest: OwnedFd) -> io::Result<Infallible> {
    let exe = rustix::fs::open("/proc/self/exe", OFlags::PATH | OFlags::CLOEXEC, FileMode::empty())?;
    let memory = rustix::fs::memfd_create("sandpool-resume", rustix::fs::MemfdFlags::CLOEXEC)?;
    fs::File::from(memory.try_clone()?).write_all(&serde_json::to_vec(resume)?)?;
    let [exe] = sys::hand_over(&[(0, socket), (3, &guest), (4, &memory)], [&exe])?;
    let args = [NAME, INNER].map(|a| CString::new(a).unwrap_or_default());
    Err(sys::execveat(exe.as_fd(), &args).into())
}

fn resume() -> io::Result<()> {
    let (socket, guest) = (take_connection()?, inherited::take_fd(3)?);
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
    // Children that do not confine themselves, such as `mkfs.ext4`, must not dump core either.
    let _ = crate::rlimits::no_cores();
    // This must not happen earlier: the id maps of an undumpable process cannot be written by an ordinary user, and
    // `newuidmap` sees such a process as root's.
    crate::process::set_not_dumpable()?;
    let cgroup = survey.cgroup.clone();
    match Keeper::new(&start, survey, socket, guest) {
        Ok(keeper) => keeper.run(id),
        Err((socket, e)) => {
            cgroup.release();
            send_reply(&socket, id, LauncherReply::Failed { message: e.to_string() })
        }
    }
}

fn raise_open_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let maximum = getrlimit(Resource::Nofile).maximum;
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}
