//! This module is the guest's side of the transpiler: one child process, one cell at a time, with a short time limit
//! for each.
//!
//! The child runs beside hostile code and reads hostile code, so the guest survives its death, its silence and its
//! replies.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use proto::KernelId;
use rustix::buffer::spare_capacity;
use rustix::io::Errno;

use crate::lines::Writer;
use crate::output::{pipe_from_child, pipe_to_child};
use crate::process::{Launch, Process};
use crate::transpile::{self, SourceCell, TranspileReply};

/// Time limit for a cell. Most cells take a millisecond, and even a megabyte of code takes less than this.
const LIMIT: Duration = Duration::from_secs(2);
const READ: usize = 64 << 10;

/// The kernel and the cell for which code is transpiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Client {
    pub kernel: KernelId,
    /// Number of the cell.
    pub number: u64,
}

struct TranspileJob {
    client: Client,
    request: Vec<u8>,
}

struct Child {
    process: Process,
    requests: Writer,
    replies: OwnedFd,
    received: Vec<u8>,
}

pub(crate) struct Transpiler {
    command: Vec<String>,
    child: Option<Child>,
    waiting: VecDeque<TranspileJob>,
    current: Option<(Client, Instant)>,
    /// Whether the child has sent something or ended.
    readable: bool,
    /// Number of probes among the cells of each kernel. They are not cells of the user, so the names of the other cells
    /// do not count them.
    probes: BTreeMap<KernelId, u64>,
}

impl Transpiler {
    pub(crate) fn new(command: Vec<String>) -> Self {
        Self { command, child: None, waiting: VecDeque::new(), current: None, readable: false, probes: BTreeMap::new() }
    }

    /// Starts the child before the first cell. A failure is reported with that cell.
    pub(crate) fn warm_up(&mut self) {
        let _ = self.ensure_child();
    }

    pub(crate) fn process_mut(&mut self) -> Option<&mut Process> {
        self.child.as_mut().map(|child| &mut child.process)
    }

    pub(crate) fn replies_fd(&self) -> Option<BorrowedFd<'_>> {
        self.child.as_ref().map(|child| child.replies.as_fd())
    }

    pub(crate) fn requests_fd(&self) -> Option<BorrowedFd<'_>> {
        self.child.as_ref().and_then(|child| child.requests.fd())
    }

    pub(crate) fn write_requests(&mut self) {
        if let Some(child) = &mut self.child {
            child.requests.write();
        }
    }

    /// Records that `replies_fd` is readable.
    pub(crate) fn note_reply(&mut self) {
        self.readable = true;
    }

    pub(crate) fn wake_at(&self) -> Option<Instant> {
        self.current.map(|(_, until)| until)
    }

    pub(crate) fn submit(&mut self, client: Client, cell: SourceCell<'_>) {
        let probes = self.probes.entry(client.kernel).or_default();
        if client.number == 1 {
            *probes = 0;
        }
        *probes += u64::from(cell.code == transpile::PROBE);
        let number = cell.number.saturating_sub(*probes);
        self.waiting.push_back(TranspileJob { client, request: transpile::request(SourceCell { number, ..cell }) });
    }

    /// Drops a cell whose run has ended.
    pub(crate) fn forget(&mut self, client: Client) {
        self.waiting.retain(|job| job.client != client);
        if self.current.is_some_and(|(current, _)| current == client) {
            self.drop_child();
            self.current = None;
        }
    }

    /// Reads once and begins the next cell if possible. Returns the cells that are finished, successfully or not.
    pub(crate) fn advance(&mut self, now: Instant) -> Vec<(Client, TranspileReply)> {
        let mut finished = Vec::new();
        if std::mem::take(&mut self.readable)
            && let Some(reply) = self.read()
        {
            finished.extend(self.current.take().map(|(client, _)| (client, reply)));
        }
        if let Some((client, until)) = self.current
            && now >= until
        {
            self.drop_child();
            self.current = None;
            finished.push((client, TranspileReply::Broken("the transpiler took too long over this code".to_owned())));
        }
        while self.current.is_none() {
            let Some(job) = self.waiting.pop_front() else { break };
            match self.ensure_child() {
                Ok(child) => {
                    child.requests.push(&job.request);
                    self.current = Some((job.client, now + LIMIT));
                }
                Err(error) => {
                    finished
                        .push((job.client, TranspileReply::Broken(format!("the transpiler does not start: {error}"))));
                }
            }
        }
        finished
    }

    /// Returns the reply for the current cell, once it is complete or can no longer come.
    fn read(&mut self) -> Option<TranspileReply> {
        let child = self.child.as_mut()?;
        child.received.reserve(READ);
        let gone = match rustix::io::read(&child.replies, spare_capacity(&mut child.received)) {
            Ok(read) => read == 0,
            Err(Errno::AGAIN | Errno::INTR) => false,
            Err(_) => true,
        };
        let reply = match transpile::reply_from(&child.received) {
            // A reply without a request shows that something else controls the child.
            _ if self.current.is_none() && !child.received.is_empty() => None,
            Ok(None) if !gone => return None,
            Ok(Some(reply)) => {
                child.received = Vec::new();
                return Some(reply);
            }
            Ok(None) => Some(TranspileReply::Broken(
                "the transpiler ended over this code (is it nested very deeply?)".to_owned(),
            )),
            Err(why) => Some(TranspileReply::Broken(format!("the transpiler cannot be understood: {why}"))),
        };
        self.drop_child();
        reply
    }

    fn drop_child(&mut self) {
        self.child = None;
    }

    fn ensure_child(&mut self) -> std::io::Result<&mut Child> {
        let child = match self.child.take() {
            Some(child) => child,
            None => Child::start(&self.command)?,
        };
        Ok(self.child.insert(child))
    }
}

impl Child {
    fn start(command: &[String]) -> std::io::Result<Self> {
        let (requests_fd, requests) = pipe_to_child()?;
        let (replies, replies_fd) = pipe_from_child()?;
        let fds = vec![(0, requests_fd), (1, replies_fd)];
        let process = Process::start(Launch { argv: command, env: &BTreeMap::new(), cwd: None, fds })?;
        process.offer_to_oom_killer();
        Ok(Self { process, requests: Writer::new(requests), replies, received: Vec::new() })
    }
}
