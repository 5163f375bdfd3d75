//! One command: runs to the end of its process, not of its pipes, which a process left behind may hold open for ever.

use std::collections::BTreeMap;
use std::time::Instant;

use proto::{Deadline, Ended, FromGuest, RunEnd, RunStatus, Stream};
use rustix::process::Signal;

use crate::host::{Host, NOBODY};
use crate::kernel::micros_since;
use crate::output::Output;
use crate::process::{Launch, Process};
use crate::term::{Step, Term};

pub struct Job {
    call: u64,
    process: Process,
    pub stdout: Output,
    pub stderr: Output,
    term: Term,
}

/// What a command needs to start.
pub struct Order<'a> {
    pub argv: &'a [String],
    pub env: &'a BTreeMap<String, String>,
    pub cwd: &'a str,
    pub deadline: Deadline,
    pub forward_bytes: u64,
}

impl Job {
    pub fn start(call: u64, order: &Order<'_>, now: Instant) -> std::io::Result<Self> {
        let (mut stdout, stdout_fd) = Output::new(Stream::Stdout)?;
        let (mut stderr, stderr_fd) = Output::new(Stream::Stderr)?;
        let fds = vec![(1, stdout_fd), (2, stderr_fd)];
        let process = Process::start(Launch { argv: order.argv, env: order.env, cwd: Some(order.cwd), fds })?;
        process.offer_to_oom_killer();
        stdout.begin(call, order.forward_bytes);
        stderr.begin(call, order.forward_bytes);
        Ok(Self { call, process, stdout, stderr, term: Term::new(now, order.deadline) })
    }

    pub fn call(&self) -> u64 {
        self.call
    }

    pub fn process(&self) -> &Process {
        &self.process
    }

    pub fn process_mut(&mut self) -> &mut Process {
        &mut self.process
    }

    pub fn cancel(&mut self, now: Instant) {
        self.term.cancel(now);
    }

    /// Its host is gone.
    pub fn abandon(&mut self, now: Instant) {
        self.cancel(now);
        self.call = NOBODY;
        self.stdout.abandon();
        self.stderr.abandon();
    }

    pub fn wake_at(&self) -> Option<Instant> {
        [self.term.wake_at(), self.stdout.wake_at(), self.stderr.wake_at()].into_iter().flatten().min()
    }

    pub fn tick(&mut self, now: Instant, host: &mut Host) {
        self.stdout.tick(now, host);
        self.stderr.tick(now, host);
        match self.term.due(now) {
            // To the group, as a terminal does: a shell by itself waits for its child first.
            Some(Step::Interrupt) => {
                self.process.signal_group(Signal::INT);
                self.process.signal_group(Signal::CONT);
            }
            Some(Step::Kill) => self.process.kill(),
            Some(Step::Nudge) | None => {}
        }
    }

    pub fn ended(&mut self, how: Ended, host: &mut Host) {
        self.stdout.drain(host);
        self.stderr.drain(host);
        let (stdout_bytes, stderr_bytes) = (self.stdout.finish(host), self.stderr.finish(host));
        let killed = how == Ended::Signaled { signal: Signal::KILL.as_raw() };
        let status = self.term.status(!killed).unwrap_or(RunStatus::Ended { how });
        let end = RunEnd {
            status,
            micros: micros_since(self.term.started),
            stdout_bytes,
            stderr_bytes,
            stdout_kept: None,
            stderr_kept: None,
        };
        host.send(self.call, &FromGuest::RunEnd { end });
    }
}
