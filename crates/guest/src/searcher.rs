//! This module is the guest's side of searches: one child process for each, with a time limit.
//!
//! The child has the limits of the context, and it can be killed by the code that runs beside it, so the guest survives
//! its death, its silence and its replies.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use jail::beneath::Root;
use proto::{FoundLines, FromGuest, GuestFailure, MAX_SEARCHES, SearchBound, SearchQuery};
use rustix::buffer::spare_capacity;
use rustix::io::Errno;

use crate::files::FileFailure;
use crate::host::Host;
use crate::output::pipe_from_child;
use crate::process::{Launch, Process};
use crate::search::MAX_PATTERN;

/// Time after which a child is killed that has not replied at the end of its own time.
const GRACE: Duration = Duration::from_secs(2);
const READ: usize = 64 << 10;

pub(crate) struct Searches {
    command: Vec<String>,
    /// Searches by their calls.
    running: BTreeMap<u64, SearchChild>,
}

struct SearchChild {
    process: Process,
    replies: OwnedFd,
    received: Vec<u8>,
    until: Instant,
}

impl Searches {
    pub(crate) fn new(command: Vec<String>) -> Self {
        Self { command, running: BTreeMap::new() }
    }

    pub(crate) fn begin(
        &mut self,
        call: u64,
        root: Root,
        path: &Path,
        query: &SearchQuery,
        now: Instant,
    ) -> Result<(), FileFailure> {
        let refused = |failure, message| Err(FileFailure { failure, message });
        if self.running.len() >= MAX_SEARCHES {
            return refused(GuestFailure::Busy, format!("{MAX_SEARCHES} searches are under way already"));
        }
        if [&query.text, &query.glob].into_iter().flatten().any(|pattern| pattern.len() > MAX_PATTERN) {
            return refused(GuestFailure::Pattern, format!("the pattern is longer than {MAX_PATTERN} bytes"));
        }
        let child = SearchChild::start(&self.command, root, path, query, now)
            .map_err(|error| FileFailure::io(format!("the search does not start: {error}")))?;
        self.running.insert(call, child);
        Ok(())
    }

    /// Ends the search of a call. Nobody waits for its reply.
    pub(crate) fn abort(&mut self, call: u64) {
        self.running.remove(&call);
    }

    pub(crate) fn forget(&mut self) {
        self.running.clear();
    }

    pub(crate) fn fds(&self) -> impl Iterator<Item = (u64, BorrowedFd<'_>)> {
        self.running.iter().map(|(&call, child)| (call, child.replies.as_fd()))
    }

    pub(crate) fn processes_mut(&mut self) -> impl Iterator<Item = &mut Process> {
        self.running.values_mut().map(|child| &mut child.process)
    }

    pub(crate) fn wake_at(&self) -> Option<Instant> {
        self.running.values().map(|child| child.until).min()
    }

    /// Reads from a child and sends its reply once it is complete or can no longer come.
    pub(crate) fn read(&mut self, call: u64, host: &mut Host) {
        let Some(reply) = self.running.get_mut(&call).and_then(SearchChild::read) else { return };
        self.running.remove(&call);
        host.send(call, &reply);
    }

    /// Ends searches that do not keep their time.
    pub(crate) fn tick(&mut self, now: Instant, host: &mut Host) {
        for (call, _) in self.running.extract_if(.., |_, child| now >= child.until) {
            let found = FoundLines { stopped: Some(SearchBound::Time), ..FoundLines::default() };
            host.send(call, &FromGuest::Found { found });
        }
    }
}

impl SearchChild {
    fn start(command: &[String], root: Root, path: &Path, query: &SearchQuery, now: Instant) -> std::io::Result<Self> {
        let (replies, replies_fd) = pipe_from_child()?;
        let argv = [command, &[serde_json::to_string(&(path, query))?]].concat();
        let fds = vec![(1, replies_fd), (3, root.into())];
        let process = Process::start(Launch { argv: &argv, env: &BTreeMap::new(), cwd: None, fds })?;
        process.offer_to_oom_killer();
        let until = now + Duration::from_millis(query.after_ms).saturating_add(GRACE);
        Ok(Self { process, replies, received: Vec::new(), until })
    }

    fn read(&mut self) -> Option<FromGuest> {
        self.received.reserve(READ);
        match rustix::io::read(&self.replies, spare_capacity(&mut self.received)) {
            Ok(1..) if self.received.len() <= proto::MAX_MESSAGE => return None,
            Err(Errno::AGAIN | Errno::INTR) => return None,
            Ok(_) | Err(_) => {}
        }
        let reply = serde_json::from_slice(&self.received).ok();
        let reply = reply.filter(|reply| matches!(reply, FromGuest::Found { .. } | FromGuest::Failed { .. }));
        Some(reply.unwrap_or_else(|| FileFailure::io("the search was killed before its end".into()).into()))
    }
}
