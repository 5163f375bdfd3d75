//! Starts the processes of a benchmark, each in a separate process group, and ends them, whatever happens.

use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use crate::BenchError;

/// Maximum time to wait for anything measured here; whatever takes longer is broken.
const PATIENCE: Duration = Duration::from_secs(180);
/// Time for a process to end in an orderly way: a server has sandboxes to remove.
const GRACE: Duration = Duration::from_secs(20);

/// All live processes, so that an interruption reaches each of them.
#[derive(Debug, Clone, Default)]
pub struct Children(Arc<ChildrenInner>);

#[derive(Debug, Default)]
struct ChildrenInner {
    stopped: AtomicBool,
    leaders: Mutex<Vec<Pid>>,
}

impl Children {
    /// Asks all processes to end, and prevents new ones. A thread that waits for one of them sees its output end.
    pub fn stop(&self) {
        self.0.stopped.store(true, Ordering::SeqCst);
        for leader in self.leaders() {
            let _ = kill_process(leader, Signal::TERM);
        }
    }

    /// Kills the processes that did not end when they were asked to.
    pub fn kill(&self) {
        for leader in self.leaders() {
            let _ = kill_process_group(leader, Signal::KILL);
        }
    }

    pub(crate) fn check(&self) -> Result<(), BenchError> {
        if self.0.stopped.load(Ordering::SeqCst) { Err(BenchError::Interrupted) } else { Ok(()) }
    }

    fn leaders(&self) -> Vec<Pid> {
        self.0.leaders.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn add(&self, leader: Pid) -> Result<(), BenchError> {
        self.0.leaders.lock().unwrap_or_else(PoisonError::into_inner).push(leader);
        self.check()
    }

    fn remove(&self, leader: Pid) {
        self.0.leaders.lock().unwrap_or_else(PoisonError::into_inner).retain(|one| *one != leader);
    }
}

/// Creates a command without anything of the caller's environment.
#[allow(clippy::disallowed_methods, reason = "the one place in which the benchmark starts processes")]
pub(crate) fn command(program: impl AsRef<Path>) -> Command {
    let mut command = Command::new(program.as_ref());
    command.env_clear().env("PATH", "/usr/local/bin:/usr/bin:/bin").env("LANG", "C.UTF-8");
    command
}

/// A child that is ended when it is dropped: it is asked first, and killed with its group if it does not end.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    leader: Pid,
    children: Children,
}

impl Process {
    pub(crate) fn start(command: &mut Command, children: &Children) -> Result<Self, BenchError> {
        children.check()?;
        let name = PathBuf::from(command.get_program());
        let name = name.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let child = command.process_group(0).spawn().map_err(BenchError::io(&format!("cannot start `{name}`")))?;
        let leader = Pid::from_child(&child);
        let process = Self { child, leader, children: children.clone() };
        children.add(leader)?;
        Ok(process)
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns the child's input and output if they are pipes.
    pub(crate) fn pipes(&mut self) -> Option<(ChildStdin, ChildStdout)> {
        Some((self.child.stdin.take()?, self.child.stdout.take()?))
    }

    /// Returns whether the child has ended by itself.
    pub(crate) fn has_ended(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(Some(_)))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = kill_process(self.leader, Signal::TERM);
        let end = Instant::now() + GRACE;
        while !self.has_ended() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(2));
        }
        let _ = kill_process_group(self.leader, Signal::KILL);
        let _ = self.child.wait();
        self.children.remove(self.leader);
    }
}

/// Runs a short program to its end and returns its output; it must succeed.
pub(crate) fn run(command: &mut Command, children: &Children) -> Result<Output, BenchError> {
    children.check()?;
    let name = PathBuf::from(command.get_program());
    let name = name.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().map_err(BenchError::io(&format!("cannot start `{name}`")))?;
    children.check()?;
    if output.status.success() {
        return Ok(output);
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let last = stderr.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
    Err(BenchError::Said(format!("`{name}` ended with {}: {}", output.status, last.trim())))
}

/// A child that exchanges lines over its standard input and output.
#[derive(Debug)]
pub(crate) struct LineChild {
    // The input is declared before the process, so that it is closed first: most programs end when their input is
    // closed.
    input: ChildStdin,
    output: ChildStdout,
    buffer: Vec<u8>,
    /// Number of bytes of the buffer that were handed out.
    taken: usize,
    pub process: Process,
}

impl LineChild {
    pub(crate) fn start(command: &mut Command, children: &Children) -> Result<Self, BenchError> {
        let mut process = Process::start(command.stdin(Stdio::piped()).stdout(Stdio::piped()), children)?;
        let (input, output) =
            process.pipes().ok_or_else(|| BenchError::Said("its input and output are no pipes".into()))?;
        Ok(Self { input, output, buffer: Vec::new(), taken: 0, process })
    }

    pub(crate) fn write(&mut self, line: &str) -> Result<(), BenchError> {
        self.input.write_all(line.as_bytes()).map_err(|_| self.gone())
    }

    /// Returns the next line with its line end.
    pub(crate) fn read(&mut self) -> Result<&[u8], BenchError> {
        self.buffer.drain(..self.taken);
        self.taken = 0;
        let mut searched = 0;
        loop {
            if let Some(end) = self.buffer[searched..].iter().position(|byte| *byte == b'\n') {
                self.taken = searched + end + 1;
                return Ok(&self.buffer[..self.taken]);
            }
            searched = self.buffer.len();
            wait_readable(&self.output)?;
            let mut piece = [0; 8 << 10];
            match self.output.read(&mut piece) {
                Ok(0) | Err(_) => return Err(self.gone()),
                Ok(read) => self.buffer.extend(&piece[..read]),
            }
        }
    }

    fn gone(&self) -> BenchError {
        match self.process.children.check() {
            Err(interrupted) => interrupted,
            Ok(()) => BenchError::Said("the process ended in the middle".into()),
        }
    }
}

/// Waits with a timeout, because a server that hangs is a result and must not make the benchmark hang.
pub(crate) fn wait_readable(stream: &impl std::os::fd::AsFd) -> Result<(), BenchError> {
    let mut fds = [PollFd::new(stream, PollFlags::IN)];
    let patience = Timespec { tv_sec: PATIENCE.as_secs().cast_signed(), tv_nsec: 0 };
    match poll(&mut fds, Some(&patience)) {
        Ok(0) => Err(BenchError::Said(format!("no answer within {} s", PATIENCE.as_secs()))),
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(BenchError::io("poll")(error.into())),
    }
}

static NUMBER: AtomicUsize = AtomicUsize::new(0);

/// A temporary directory of the benchmark, removed with it.
#[derive(Debug)]
pub(crate) struct Workplace(PathBuf);

impl Workplace {
    pub(crate) fn new() -> Result<Self, BenchError> {
        let dir = std::env::temp_dir().join(format!(
            "sandpool-bench-{}-{}",
            std::process::id(),
            NUMBER.fetch_add(1, Ordering::Relaxed)
        ));
        std::fs::create_dir(&dir).map_err(BenchError::io("cannot make a temporary directory"))?;
        Ok(Self(dir))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn write(&self, name: &str, content: &str) -> Result<PathBuf, BenchError> {
        let path = self.0.join(name);
        std::fs::write(&path, content).map_err(BenchError::io("cannot write a temporary file"))?;
        Ok(path)
    }
}

impl Drop for Workplace {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
