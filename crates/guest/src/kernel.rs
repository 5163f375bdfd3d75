//! This module controls one kernel through its driver: it starts the kernel, feeds it with cells, interrupts it, kills
//! it, and forwards what it sends to the host.
//!
//! Nothing that the code in a kernel does can make a call end twice, never, or with the answer of another call: the
//! guest ends each run exactly once, at the first of `done`, the end of the process, and the kill after the deadline.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use jail::spec::DATA;
use proto::{Deadline, Ended, FromGuest, GuestFailure, KernelEvent, KernelId, KernelSpec, Language, RunStatus};
use rustix::process::Signal;
use serde::Serialize;

use crate::arrivals::{self, Fork};
use crate::deadline::{CallDeadline, Step};
use crate::event::{self, CellEnd, DriverLine};
use crate::host::{Host, NOBODY};
use crate::lines::{LineReader, Read, Writer};
use crate::output::{Share, Streams, pipe_from_child, pipe_to_child};
use crate::outputs::Outputs;
use crate::process::{ChildFds, Launch, Process};

const REQUESTS: i32 = 3;
const EVENTS: i32 = 4;
const INTERRUPTS: i32 = 5;

/// Time limit for the start of a kernel. A kernel that is not ready by then never will be.
const START_LIMIT: Duration = Duration::from_secs(60);
/// Time between the moment a driver closes its events and its kill. Such a driver is lost; if it is just exiting, this
/// is long enough to get its exit status.
const LOST_GRACE: Duration = Duration::from_millis(200);
/// Interval at which the guest checks whether a kernel that runs a cell was stopped by a signal.
const STOPPED_CHECK: Duration = Duration::from_millis(250);
/// Minimum time between two checks for damaged volumes.
const VOLUMES_CHECK: Duration = Duration::from_secs(1);
/// Maximum number of errors outside a cell that wait for the next cell. Each has at most `MAX_LATE_TEXT` bytes.
const MAX_LATE: usize = 16;
const MAX_LATE_TEXT: usize = 16 << 10;
/// Maximum size of late output from threads and timers that earlier cells left running.
const MAX_LATE_OUTPUT: usize = 256 << 10;
/// Number of bytes of standard error that are reported for a kernel that did not start.
const STDERR_SHOWN: usize = 4 << 10;
/// Number of reads that empty a full pipe. More data comes only from a process that is still writing.
const READS_PER_PIPE: usize = 17;

pub(crate) struct Kernel {
    id: KernelId,
    pub language: Language,
    process: Process,
    pub streams: Streams,
    events: LineReader,
    requests: Writer,
    interrupts: Option<Writer>,
    /// Channel on which a forked kernel reports why it could not become one.
    channel: Option<OwnedFd>,
    state: KernelState,
    /// Number of the last cell. Each event carries it, so that a late event is not attributed to the next cell.
    n: u64,
    late: Vec<String>,
    /// Time at which the driver closed its events, if it has.
    lost: Option<Instant>,
    /// `StopKernel` calls that wait for the end of the process.
    stops: Vec<u64>,
    stopped_check: Instant,
    /// Time of the last check for damaged volumes; `None` before the first check.
    volumes_check: Option<Instant>,
    /// Initial directory of the cells, which lies on the sandbox's volume.
    cwd: String,
    /// Whether standard error arrives together with standard output.
    merged: bool,
}

enum KernelState {
    Starting { call: u64, until: Instant },
    Idle,
    Running(Run),
}

struct Run {
    call: u64,
    deadline: CallDeadline,
    /// Whether the transpiler still has the cell.
    preparing: bool,
    env: BTreeMap<String, String>,
}

/// Parameters of a kernel that starts in answer to `call`.
#[derive(Clone, Copy)]
pub(crate) struct KernelStart<'a> {
    pub id: KernelId,
    pub call: u64,
    pub spec: &'a KernelSpec,
    pub now: Instant,
}

/// Parameters of a cell besides its code.
pub(crate) struct Terms {
    pub env: BTreeMap<String, String>,
    pub deadline: Deadline,
    pub share: Share,
}

#[derive(Serialize)]
struct CellRequest<'a> {
    t: &'static str,
    n: u64,
    code: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    map: Option<&'a str>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    env: &'a BTreeMap<String, String>,
}

/// The guest's ends of the pipes to a kernel.
struct Ends {
    streams: Streams,
    events: LineReader,
    requests: Writer,
}

impl Ends {
    /// Creates the pipes and returns the guest's ends and the kernel's ends.
    fn new(spec: &KernelSpec, outputs: &Outputs) -> std::io::Result<(Self, ChildFds)> {
        let (streams, mut fds) = Streams::new(spec.merge_output, outputs)?;
        let (events, events_fd) = pipe_from_child()?;
        let (requests_fd, requests) = pipe_to_child()?;
        fds.extend([(REQUESTS, requests_fd), (EVENTS, events_fd)]);
        Ok((Self { streams, events: LineReader::new(events), requests: Writer::new(requests) }, fds))
    }
}

impl Kernel {
    pub(crate) fn start(start: KernelStart<'_>, outputs: &Outputs) -> std::io::Result<Self> {
        let spec = start.spec;
        let (ends, mut fds) = Ends::new(spec, outputs)?;
        let mut env = spec.env.clone();
        env.insert("KREQ".into(), REQUESTS.to_string());
        env.insert("KEVT".into(), EVENTS.to_string());
        let interrupts = match spec.language {
            Language::Python => None,
            Language::Javascript | Language::Typescript => {
                let (interrupts_fd, interrupts) = pipe_to_child()?;
                env.insert("KINT".into(), INTERRUPTS.to_string());
                fds.push((INTERRUPTS, interrupts_fd));
                Some(Writer::new(interrupts))
            }
        };
        let process = Process::start(Launch { argv: &spec.argv, env: &env, cwd: Some(&spec.cwd), fds })?;
        process.offer_to_oom_killer();
        Ok(Self::starting(start, process, ends, interrupts))
    }

    /// Adopts a forked kernel, which already exists and waits for its environment, directory and descriptors.
    pub(crate) fn adopt(fork: Fork, start: KernelStart<'_>, outputs: &Outputs) -> std::io::Result<Self> {
        let spec = start.spec;
        let Fork { pid, process, channel } = fork;
        let process = Process::adopt(pid, process)?;
        let (ends, fds) = Ends::new(spec, outputs)?;
        arrivals::equip(&channel, &spec.env, &spec.cwd, &fds)?;
        let kernel = Self::starting(start, process, ends, None);
        Ok(Self { channel: Some(channel), ..kernel })
    }

    fn starting(start: KernelStart<'_>, process: Process, ends: Ends, interrupts: Option<Writer>) -> Self {
        let KernelStart { id, call, spec, now } = start;
        let Ends { streams, events, requests } = ends;
        Self {
            id,
            language: spec.language,
            process,
            streams,
            events,
            requests,
            interrupts,
            channel: None,
            state: KernelState::Starting { call, until: now + START_LIMIT },
            n: 0,
            late: Vec::new(),
            lost: None,
            stops: Vec::new(),
            stopped_check: now,
            volumes_check: None,
            cwd: spec.cwd.clone(),
            merged: spec.merge_output,
        }
    }

    pub(crate) fn process(&self) -> &Process {
        &self.process
    }

    pub(crate) fn process_mut(&mut self) -> &mut Process {
        &mut self.process
    }

    pub(crate) fn events(&self) -> &LineReader {
        &self.events
    }

    pub(crate) fn requests(&self) -> &Writer {
        &self.requests
    }

    pub(crate) fn write_requests(&mut self) {
        self.requests.write();
    }

    /// Returns the call of the running cell.
    pub(crate) fn running(&self) -> Option<u64> {
        match &self.state {
            KernelState::Running(run) => Some(run.call),
            KernelState::Starting { .. } | KernelState::Idle => None,
        }
    }

    pub(crate) fn id(&self) -> KernelId {
        self.id
    }

    /// Returns the number of the cell that the transpiler still has.
    pub(crate) fn preparing(&self) -> Option<u64> {
        match &self.state {
            KernelState::Running(run) if run.preparing => Some(self.n),
            KernelState::Starting { .. } | KernelState::Idle | KernelState::Running(_) => None,
        }
    }

    /// Begins a run: from here on its deadline counts and it receives the output. `submit` follows with the code, or
    /// `refuse` with an error.
    pub(crate) fn begin(&mut self, call: u64, terms: Terms, now: Instant, host: &mut Host) -> Result<(), &'static str> {
        match self.state {
            KernelState::Starting { .. } => return Err("the kernel is still starting"),
            KernelState::Running(_) => return Err("the kernel is busy with another cell"),
            KernelState::Idle => {}
        }
        self.send_late(call, host);
        self.streams.begin(call, terms.share, now);
        self.n += 1;
        self.stopped_check = now + STOPPED_CHECK;
        self.state = KernelState::Running(Run {
            call,
            deadline: CallDeadline::new(now, terms.deadline),
            preparing: true,
            env: terms.env,
        });
        Ok(())
    }

    /// Returns the number of the cell that runs or ran last.
    pub(crate) fn number(&self) -> u64 {
        self.n
    }

    pub(crate) fn submit(&mut self, code: &str, map: Option<&str>) {
        let KernelState::Running(run) = &mut self.state else { return };
        run.preparing = false;
        let env = std::mem::take(&mut run.env);
        let request = CellRequest { t: "run", n: self.n, code, map, env: &env };
        // A struct of strings and numbers always serialises.
        let Ok(mut line) = serde_json::to_vec(&request) else { return };
        line.push(b'\n');
        self.requests.push(&line);
    }

    /// Ends the run before it has reached the kernel, with an error in the code.
    pub(crate) fn refuse(&mut self, name: &str, value: String, text: String, host: &mut Host) {
        let Some(call) = self.running() else { return };
        let event = KernelEvent::Error { name: name.to_owned(), value, text };
        self.send_event(call, event, host);
        self.end_run(RunStatus::Error, host);
    }

    pub(crate) fn cancel(&mut self, now: Instant) {
        if let KernelState::Running(run) = &mut self.state {
            run.deadline.cancel(now);
        }
    }

    /// Interrupts the running cell because its host is gone. The kernel stays.
    pub(crate) fn abandon(&mut self, now: Instant) {
        self.cancel(now);
        match &mut self.state {
            KernelState::Starting { call, .. } => *call = NOBODY,
            KernelState::Running(run) => run.call = NOBODY,
            KernelState::Idle => {}
        }
        self.stops.fill(NOBODY);
        self.streams.abandon();
    }

    /// Kills the kernel. The reply to `call` is sent when the process is gone.
    pub(crate) fn stop(&mut self, call: u64) {
        self.stops.push(call);
        self.process.kill();
    }

    pub(crate) fn wake_at(&self) -> Option<Instant> {
        let own = match &self.state {
            KernelState::Starting { until, .. } => Some(*until),
            KernelState::Idle => None,
            KernelState::Running(run) => [run.deadline.wake_at(), Some(self.stopped_check)].into_iter().flatten().min(),
        };
        let lost = self.lost.map(|at| at + LOST_GRACE);
        [own, lost, self.streams.wake_at()].into_iter().flatten().min()
    }

    pub(crate) fn tick(&mut self, now: Instant, host: &mut Host) {
        self.streams.tick(now, host);
        if self.lost.is_some_and(|at| now >= at + LOST_GRACE) {
            self.lost = None;
            self.process.kill();
        }
        if matches!(&self.state, KernelState::Starting { until, .. } if now >= *until) {
            self.process.kill();
        }
        self.enforce_deadline(now, host);
    }

    fn enforce_deadline(&mut self, now: Instant, host: &mut Host) {
        let KernelState::Running(run) = &mut self.state else { return };
        if now >= self.stopped_check {
            self.stopped_check = now + STOPPED_CHECK;
            self.process.continue_if_stopped();
        }
        if run.deadline.wake_at().is_some_and(|at| now >= at) {
            // The answer may already be in the pipe. In that case the cell was in time, and an interrupt would hit the
            // next one.
            self.read_events(host);
        }
        let KernelState::Running(run) = &mut self.state else { return };
        let Some(step) = run.deadline.due(now) else { return };
        match step {
            Step::Interrupt if run.preparing => self.end_stopped(true, host),
            Step::Interrupt => {
                self.process.signal(Signal::INT);
                self.process.signal(Signal::CONT);
            }
            Step::Nudge => match &mut self.interrupts {
                // The nudge carries the number of the cell, because the cell may be over before the nudge arrives.
                Some(interrupts) => interrupts.push(&(self.n as u32).to_le_bytes()),
                None if run.deadline.stopped_early() => self.process.signal(Signal::INT),
                None => {}
            },
            // Kernels with an interrupt pipe have the nudge instead.
            Step::Again if self.interrupts.is_none() => self.process.signal(Signal::INT),
            Step::Again => {}
            Step::Kill => self.process.kill(),
        }
    }

    /// Reads events once and handles the complete lines.
    pub(crate) fn read_events(&mut self, host: &mut Host) -> Read {
        let read = self.events.read();
        if read == Read::End && self.lost.is_none() {
            self.lost = Some(Instant::now());
        }
        while let Some(line) = self.events.next_line() {
            // A line that no driver would write is ignored, like an answer without a request.
            if let Some(line) = event::parse(&line) {
                self.handle(line, host);
            }
        }
        read
    }

    fn handle(&mut self, line: DriverLine, host: &mut Host) {
        match line {
            DriverLine::Ready { version } => self.ready(version, host),
            DriverLine::Late { text, run } => self.late(text, run, host),
            DriverLine::Event { n, event } => self.event(n, event, host),
            DriverLine::Done { n, done } => self.done(n, done, host),
        }
    }

    fn ready(&mut self, version: String, host: &mut Host) {
        let KernelState::Starting { call, .. } = self.state else { return };
        self.state = KernelState::Idle;
        self.channel = None;
        // Output during the start belongs to no cell.
        self.streams.drain(host);
        self.streams.take_late();
        host.send(call, &FromGuest::KernelReady { version: shortened(version, 200) });
    }

    fn late(&mut self, text: String, run: Option<u64>, host: &mut Host) {
        // The number of a cell that never ran is a lie, which harms only the code that tells it.
        let ago = run.map(|run| self.n.saturating_sub(run).max(1));
        let text = shortened(text, if ago.is_some() { MAX_LATE_OUTPUT } else { MAX_LATE_TEXT });
        match self.running() {
            Some(call) => self.send_event(call, KernelEvent::Late { text, ago }, host),
            None if self.late.len() < MAX_LATE => self.late.push(text),
            None => {}
        }
    }

    fn event(&mut self, n: u64, event: KernelEvent, host: &mut Host) {
        if let Some(call) = self.running().filter(|_| n == self.n) {
            self.send_event(call, event, host);
        }
    }

    /// Sends an event after all output that was written before it. An event that is too large is ignored.
    fn send_event(&mut self, call: u64, event: KernelEvent, host: &mut Host) {
        self.streams.drain(host);
        self.streams.flush(host);
        let _ = host.try_send(call, &FromGuest::Event { event });
    }

    fn done(&mut self, n: u64, done: CellEnd, host: &mut Host) {
        let KernelState::Running(run) = &self.state else { return };
        if n != self.n || run.preparing {
            return;
        }
        let status = run.deadline.status(true).unwrap_or(match done {
            CellEnd::Ok => RunStatus::Ok,
            CellEnd::Error => RunStatus::Error,
            CellEnd::Interrupted => RunStatus::Interrupted,
            CellEnd::Exit { code } => RunStatus::Exit { code },
        });
        self.end_run(status, host);
    }

    fn end_stopped(&mut self, state_kept: bool, host: &mut Host) {
        let KernelState::Running(run) = &self.state else { return };
        if let Some(status) = run.deadline.status(state_kept) {
            self.end_run(status, host);
        }
    }

    fn end_run(&mut self, status: RunStatus, host: &mut Host) {
        self.streams.drain(host);
        let KernelState::Running(run) = std::mem::replace(&mut self.state, KernelState::Idle) else { return };
        self.streams.finish(run.call, status, run.deadline.started, host);
    }

    /// Handles the end of the process: every call that waits for it gets its reply.
    pub(crate) fn ended(&mut self, how: Ended, host: &mut Host) {
        // The driver may have written a `done` just before the end.
        for _ in 0..READS_PER_PIPE {
            if self.read_events(host) != Read::Some {
                break;
            }
        }
        match &self.state {
            KernelState::Starting { call, .. } => {
                let call = *call;
                self.streams.drain(host);
                let message = format!("the kernel {} before it was ready{}", described(how), self.stderr_shown());
                host.send(call, &FromGuest::Failed { failure: GuestFailure::Kernel, message });
            }
            KernelState::Idle if self.stops.is_empty() => {
                host.send(0, &FromGuest::KernelExited { kernel: self.id, how });
            }
            KernelState::Idle => {}
            KernelState::Running(run) => {
                let status = run.deadline.status(false).unwrap_or(RunStatus::Ended { how });
                self.end_run(status, host);
            }
        }
        for call in self.stops.drain(..) {
            host.send(call, &FromGuest::Done);
        }
    }

    fn send_late(&mut self, call: u64, host: &mut Host) {
        self.streams.drain(host);
        for dir in self.damaged() {
            let text = format!(
                "[the volume of `{dir}` is damaged and can only be read: what was written last may be lost; save what you need, then \
                 start a new context]\n"
            );
            host.send(call, &FromGuest::Event { event: KernelEvent::Late { text, ago: None } });
        }
        let [(stdout, lost_stdout), (stderr, lost_stderr)] = self.streams.take_late();
        if !stdout.is_empty() || !stderr.is_empty() {
            let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
            let dropped = lost_stdout + lost_stderr;
            host.send(call, &FromGuest::LateOutput { stdout: text(stdout), stderr: text(stderr), dropped });
        }
        for text in std::mem::take(&mut self.late) {
            host.send(call, &FromGuest::Event { event: KernelEvent::Late { text, ago: None } });
        }
    }

    /// Returns the directories on damaged volumes. Checks at most once a second, because a short cell costs less than
    /// reading the list of mounts.
    fn damaged(&mut self) -> Vec<String> {
        if self.volumes_check.is_some_and(|last| last.elapsed() < VOLUMES_CHECK) {
            return Vec::new();
        }
        self.volumes_check = Some(Instant::now());
        damaged(&[&self.cwd, DATA])
    }

    fn stderr_shown(&mut self) -> String {
        if let Some(reason) = self.channel.take().and_then(|channel| arrivals::failure_reason(&channel)) {
            return format!(": {reason}");
        }
        let [stdout, stderr] = self.streams.take_late();
        let (bytes, _) = if self.merged { stdout } else { stderr };
        let text = String::from_utf8_lossy(&bytes[bytes.len().saturating_sub(STDERR_SHOWN)..]).trim().to_owned();
        if text.is_empty() { text } else { format!(":\n{text}") }
    }
}

/// Returns those of the directories that lie on damaged volumes. After an error (of the disk below, for instance) the
/// Linux kernel makes a volume read-only. Since Linux 6.15 only the list of mounts shows this.
pub(crate) fn damaged(dirs: &[&str]) -> Vec<String> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let is_damaged = |dir: &&&str| mounts.lines().any(|line| is_damaged(line, dir));
    dirs.iter().filter(is_damaged).map(|dir| (*dir).to_owned()).collect()
}

/// Returns whether this line of the list of mounts describes `dir` and an ext4 file system that has become read-only.
fn is_damaged(line: &str, dir: &str) -> bool {
    let Some((mount, file_system)) = line.split_once(" - ") else { return false };
    let mut words = file_system.split(' ');
    let (kind, options) = (words.next(), words.nth(1).unwrap_or_default());
    let read_only = options.split(',').any(|option| matches!(option, "ro" | "emergency_ro"));
    mount.split(' ').nth(4) == Some(dir) && kind == Some("ext4") && read_only
}

fn described(how: Ended) -> String {
    match how {
        Ended::Exited { code } => format!("exited with status `{code}`"),
        Ended::Signaled { signal } => format!("was ended by signal `{signal}`"),
    }
}

fn shortened(mut text: String, most: usize) -> String {
    text.truncate(text.floor_char_boundary(most));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_volume_is_known_by_its_mount() {
        let line = |options: &str| {
            format!("36 35 7:3 /workspace /workspace rw,nosuid,nodev,relatime - ext4 /dev/loop3 {options}")
        };
        for (options, expected) in [("rw", false), ("rw,emergency_ro,errors=remount-ro", true), ("ro,nojournal", true)]
        {
            assert_eq!(is_damaged(&line(options), "/workspace"), expected, "{options}");
        }
        assert!(!is_damaged(&line("ro"), "/data"));
        assert!(!is_damaged("36 35 0:4 / /workspace rw - tmpfs tmpfs ro", "/workspace"));
        assert!(!is_damaged("nonsense", "/workspace"));
    }
}
