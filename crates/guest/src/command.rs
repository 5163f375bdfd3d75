//! This module runs one command. The run lasts until the command's process ends, not until its pipes close, because a
//! process that the command left behind may hold them open for ever.

use std::collections::BTreeMap;
use std::time::Instant;

use proto::{Deadline, Ended, RunStatus};
use rustix::process::Signal;

use crate::deadline::{CallDeadline, Step};
use crate::host::{Host, NOBODY};
use crate::output::{Share, Streams};
use crate::outputs::Outputs;
use crate::process::{Launch, Process};

pub(crate) struct Job {
    call: u64,
    process: Process,
    pub streams: Streams,
    deadline: CallDeadline,
}

/// Parameters of a command.
pub(crate) struct CommandSpec<'a> {
    pub argv: &'a [String],
    pub env: &'a BTreeMap<String, String>,
    pub cwd: &'a str,
    pub merge_output: bool,
    pub deadline: Deadline,
    pub share: Share,
}

impl Job {
    pub(crate) fn start(call: u64, spec: &CommandSpec<'_>, outputs: &Outputs, now: Instant) -> std::io::Result<Self> {
        let (mut streams, fds) = Streams::new(spec.merge_output, outputs)?;
        let process = Process::start(Launch { argv: spec.argv, env: spec.env, cwd: Some(spec.cwd), fds })?;
        process.offer_to_oom_killer();
        streams.begin(call, spec.share, now);
        Ok(Self { call, process, streams, deadline: CallDeadline::new(now, spec.deadline) })
    }

    pub(crate) fn call(&self) -> u64 {
        self.call
    }

    pub(crate) fn process(&self) -> &Process {
        &self.process
    }

    pub(crate) fn process_mut(&mut self) -> &mut Process {
        &mut self.process
    }

    pub(crate) fn cancel(&mut self, now: Instant) {
        self.deadline.cancel(now);
    }

    /// Cancels the command because its host is gone, and sends nothing more for it.
    pub(crate) fn abandon(&mut self, now: Instant) {
        self.cancel(now);
        self.call = NOBODY;
        self.streams.abandon();
    }

    pub(crate) fn wake_at(&self) -> Option<Instant> {
        [self.deadline.wake_at(), self.streams.wake_at()].into_iter().flatten().min()
    }

    pub(crate) fn tick(&mut self, now: Instant, host: &mut Host) {
        self.streams.tick(now, host);
        match self.deadline.due(now) {
            // The signal goes to the group, as from a terminal, because a shell on its own waits for its child first.
            // It is sent again because a shell that is just starting a program loses it.
            Some(Step::Interrupt | Step::Again) => {
                self.process.signal_group(Signal::INT);
                self.process.signal_group(Signal::CONT);
            }
            Some(Step::Kill) => self.process.kill(),
            Some(Step::Nudge) | None => {}
        }
    }

    pub(crate) fn ended(&mut self, how: Ended, host: &mut Host) {
        let stopped = self.deadline.status(true).is_some();
        if stopped {
            // What the command started in the background ignores the interrupt.
            self.process.kill_group();
        }
        self.streams.drain(host);
        let killed = how == Ended::Signaled { signal: Signal::KILL.as_raw() };
        let status = self.deadline.status(!killed).unwrap_or(RunStatus::Ended { how });
        self.streams.finish(self.call, status, self.deadline.started, host);
    }
}
