//! Runs one cell or command in a guest, and folds its output into a bounded result as it arrives.
//!
//! This module knows the wire protocol and the clock. The operations decide what an end means for a context.

use std::collections::BTreeMap;
use std::time::Duration;

use proto::{Deadline, FrameKind, FromGuest, GuestFailure, KernelId, RunEnd, RunStatus, Stream, ToGuest};
use tokio::time::Instant;

use crate::background::Background;
use crate::capture::{Rich, StreamCapture};
use crate::engine::Inner;
use crate::guest::{BoundedCall, CallEnd, GuestReply, ReplySink};
use crate::op::{
    Call, Captured, ContextInfo, EngineError, Environment, Event, KeptOutput, Network, Ran, RunOutcome, Stage,
    StageInProgress,
};
use crate::ops::NETWORK_OFF;
use crate::registry::{LiveSandbox, one_line};

/// Time that the host allows the guest beyond the deadline and the grace time of a run.
const BACKSTOP: Duration = Duration::from_secs(2);
/// Minimum number of bytes that the guest forwards of each stream, whatever the budget of the result.
const MIN_FORWARD: u64 = 256 << 10;
/// Minimum number of bytes forwarded of each stream of a background run, whose output is read while it runs.
const BACKGROUND_FORWARD: u64 = 64 << 20;
const MAX_KEPT_NAME: usize = 128;
/// Name of the error of code that cannot be run in one call.
pub(crate) const TOO_LONG: &str = "CodeTooLong";

/// The conditions of one cell or command: where it runs, how long, and how much of its output is captured.
pub(crate) struct CellRun<'a> {
    pub(crate) inner: &'a Inner,
    pub(crate) call: &'a Call,
    pub(crate) sandbox: &'a LiveSandbox,
    pub(crate) timeout: Duration,
    pub(crate) network: Network,
    /// Maximum number of characters kept of each stream.
    pub(crate) budget: usize,
    /// Background run that records the output for its readers.
    pub(crate) record: Option<&'a Background>,
}

/// The guest refused to start the cell or the command.
pub(crate) struct StartRefused {
    pub(crate) failure: GuestFailure,
    pub(crate) why: String,
}

impl StartRefused {
    /// Returns whether the refusal came before anything ran. A command fails only before it starts.
    fn before_it_ran(&self, request: &ToGuest) -> bool {
        matches!(request, ToGuest::Exec { .. })
            || matches!(self.failure, GuestFailure::Kernel | GuestFailure::Environment)
    }
}

impl From<StartRefused> for EngineError {
    fn from(refused: StartRefused) -> Self {
        match refused.failure {
            GuestFailure::Environment => Self::InvalidEnvironment(refused.why),
            _ => Self::Sandbox(refused.why),
        }
    }
}

/// The end of a cell or a command, as far as the guest can tell.
enum CellEnding {
    Reported(RunEnd),
    /// The request could not be sent.
    Unsendable(String),
    /// The sandbox is gone, or was destroyed because nothing it says can be relied upon.
    Lost(String),
}

impl CellRun<'_> {
    /// Runs code in a kernel. If `keep` is true, the guest keeps an output that is too long for the result.
    pub(crate) async fn code(
        &self,
        kernel: KernelId,
        code: &str,
        env: &Environment,
        keep: bool,
    ) -> Result<CellReport<'_>, StartRefused> {
        let (stage, env) = self.begin(env.0.clone());
        let request = ToGuest::Run {
            kernel,
            code: code.into(),
            env,
            deadline: self.deadline(),
            forward_bytes: self.forward_bytes(),
            keep_over: keep.then_some(self.budget as u64),
        };
        self.run(&request, stage).await
    }

    /// Begins the stage of the run, and adds the stage's variable to the environment unless the run sets it itself.
    fn begin(&self, mut env: BTreeMap<String, String>) -> (StageInProgress, BTreeMap<String, String>) {
        let stage = self.call.stages.begin(Stage::Run);
        if let Some((name, value)) = stage.variable() {
            env.entry(name.into()).or_insert(value);
        }
        (stage, env)
    }

    /// Runs a command with exactly these environment variables.
    pub(crate) async fn command(
        &self,
        argv: Vec<String>,
        env: BTreeMap<String, String>,
    ) -> Result<CellReport<'_>, StartRefused> {
        let (stage, env) = self.begin(env);
        let request = ToGuest::Exec {
            argv,
            env,
            cwd: self.inner.config.cwd.clone(),
            merge_output: false,
            deadline: self.deadline(),
            forward_bytes: self.forward_bytes(),
            keep_over: Some(self.budget as u64),
        };
        self.run(&request, stage).await
    }

    fn deadline(&self) -> Deadline {
        Deadline { after_ms: self.timeout.as_millis() as u64, grace_ms: self.inner.config.grace.as_millis() as u64 }
    }

    fn forward_bytes(&self) -> u64 {
        let least = if self.record.is_some() { BACKGROUND_FORWARD } else { MIN_FORWARD };
        (self.budget as u64 * 4).max(least)
    }

    /// Runs the request and returns exactly one end, however the guest behaves.
    async fn run(&self, request: &ToGuest, stage: StageInProgress) -> Result<CellReport<'_>, StartRefused> {
        let (timeout, guest) = (self.timeout, &self.sandbox.guest);
        let mut fold = OutputFold::new(self.budget, self.call, self.record);
        let backstop = self.inner.config.grace + BACKSTOP;
        let bounded = BoundedCall { inner: self.inner, call: self.call, guest, timeout, backstop };
        let (started, egress) = (Instant::now(), self.sandbox.run_egress(self.network, &stage));
        let end = bounded.run(request, &mut fold).await;
        drop(stage);
        let (mut duration, denied) = (started.elapsed(), egress.denied());
        let lost = match end {
            CallEnd::Answered(Ok(end)) => {
                // The guest's measurement excludes the transport, but is not trusted beyond the time that passed here.
                duration = duration.min(Duration::from_micros(end.micros));
                Ok(CellEnding::Reported(end))
            }
            CallEnd::Answered(Err(refused)) if refused.before_it_ran(request) => return Err(refused),
            CallEnd::Unsendable(why) => Ok(CellEnding::Unsendable(why)),
            // The code may or may not have run. A sandbox in doubt is not used again.
            CallEnd::Answered(Err(StartRefused { why, .. })) | CallEnd::Lost(why) => Err(why),
            CallEnd::Silent { cancelled } => {
                let what = if cancelled { "was cancelled".into() } else { format!("timed out after {timeout:?}") };
                Err(guest.close(&format!("the code {what} and its guest did not end it")).0)
            }
        };
        let ending = match lost {
            Ok(ending) => ending,
            Err(why) => {
                let _ = self.sandbox.destroy(&why).await;
                CellEnding::Lost(why)
            }
        };
        let network_off = (!self.sandbox.has_egress()).then_some(NETWORK_OFF);
        Ok(CellReport { ending, timeout, duration, denied, network_off, fold })
    }
}

/// The end of a run and the output until then.
pub(crate) struct CellReport<'a> {
    ending: CellEnding,
    timeout: Duration,
    duration: Duration,
    denied: Vec<String>,
    network_off: Option<&'static str>,
    fold: OutputFold<'a>,
}

impl CellReport<'_> {
    /// Returns how the run ended, as the guest reported it or as the host found it.
    pub(crate) fn outcome(&mut self) -> RunOutcome {
        let end = match &self.ending {
            CellEnding::Reported(end) => end,
            CellEnding::Lost(why) => return RunOutcome::SandboxLost { why: why.clone() },
            CellEnding::Unsendable(why) => {
                let text = format!("the code cannot be run in one call: {why}");
                let event = proto::KernelEvent::Error { name: TOO_LONG.into(), value: text.clone(), text };
                self.fold.rich.event(event);
                return RunOutcome::Error;
            }
        };
        match end.status {
            RunStatus::Ok => RunOutcome::Ok,
            RunStatus::Error => RunOutcome::Error,
            RunStatus::Exit { code } => RunOutcome::Exit { code },
            RunStatus::Interrupted => RunOutcome::Interrupted,
            RunStatus::TimedOut { state_kept } => RunOutcome::TimedOut { after: self.timeout, state_kept },
            RunStatus::Cancelled { state_kept } => RunOutcome::Cancelled { state_kept },
            RunStatus::Ended { how } => RunOutcome::Ended { how },
        }
    }

    /// Builds the result. `outputs` is the key of the links to kept outputs, if they are kept.
    pub(crate) fn ran(mut self, end: RunOutcome, context: ContextInfo, outputs: Option<&str>) -> Ran {
        self.fold.follow.flush();
        let shown = self.fold.rich.finish();
        let (mut stdout, mut stderr) = (self.fold.stdout.finish(), self.fold.stderr.finish());
        if let (CellEnding::Reported(end), Some(key)) = (self.ending, outputs) {
            keep(&mut stdout, key, end.stdout_kept);
            keep(&mut stderr, key, end.stderr_kept);
        }
        Ran {
            stdout,
            stderr,
            value: shown.value,
            displays: shown.displays,
            error: shown.error,
            late: shown.late,
            strays: shown.strays,
            denied: self.denied,
            network_off: self.network_off,
            duration: self.duration,
            ..Ran::empty(context, end)
        }
    }
}

/// Adds the link to a kept output. Only truncated output needs a link, and only a plain name can be part of one.
fn keep(captured: &mut Captured, key: &str, kept: Option<proto::KeptOutput>) {
    let plain = |name: &str| {
        let fits = !name.is_empty() && name.len() <= MAX_KEPT_NAME && !name.starts_with('.');
        fits && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
    };
    captured.kept = kept.filter(|kept| captured.truncated && plain(&kept.name)).map(|kept| KeptOutput {
        key: key.into(),
        name: kept.name,
        bytes: kept.bytes.min(captured.total_bytes),
    });
}

/// The last message of the guest about a run.
type CellAnswer = Result<RunEnd, StartRefused>;

/// The output of a run, folded as it arrives.
struct OutputFold<'a> {
    stdout: StreamCapture,
    stderr: StreamCapture,
    rich: Rich,
    follow: OutputFollower<'a>,
    record: Option<&'a Background>,
}

impl<'a> OutputFold<'a> {
    fn new(budget: usize, call: &'a Call, record: Option<&'a Background>) -> Self {
        Self {
            stdout: StreamCapture::new(budget),
            stderr: StreamCapture::new(budget),
            rich: Rich::new(budget, call.memory.clone()),
            follow: OutputFollower::new(call),
            record,
        }
    }

    fn message(&mut self, message: FromGuest) -> Result<Option<CellAnswer>, &'static str> {
        match message {
            FromGuest::Event { event } => self.rich.event(event),
            FromGuest::Gap { stream, bytes } => {
                self.stream(stream).gap(bytes);
                if let Some(record) = self.record.filter(|_| bytes > 0) {
                    record.push(&format!("\n… [{bytes} bytes left out] …\n"));
                }
            }
            FromGuest::LateOutput { stdout, stderr, dropped } => {
                self.rich.late_gap(dropped);
                self.rich.late(&stdout);
                self.rich.late(&stderr);
            }
            FromGuest::RunEnd { end } => return Ok(Some(Ok(end))),
            FromGuest::Failed { failure, message } => {
                return Ok(Some(Err(StartRefused { failure, why: one_line(&message) })));
            }
            _ => return Err("the guest answered a run with something else"),
        }
        Ok(None)
    }

    fn stream(&mut self, stream: Stream) -> &mut StreamCapture {
        match stream {
            Stream::Stdout => &mut self.stdout,
            Stream::Stderr => &mut self.stderr,
        }
    }

    fn output(&mut self, stream: Stream, bytes: &[u8]) {
        let text = self.stream(stream).push(bytes);
        if let Some(record) = self.record {
            record.push(&text);
        }
        self.follow.push(stream, &text);
    }
}

impl ReplySink for OutputFold<'_> {
    type Answer = CellAnswer;

    fn take(&mut self, reply: GuestReply) -> Result<Option<CellAnswer>, &'static str> {
        match reply {
            GuestReply::Data(FrameKind::Stdout, bytes) => self.output(Stream::Stdout, &bytes),
            GuestReply::Data(FrameKind::Stderr, bytes) => self.output(Stream::Stderr, &bytes),
            GuestReply::Data(..) => return Err("the guest sent a file instead of output"),
            GuestReply::Message(message) => return self.message(message),
        }
        Ok(None)
    }

    fn flush_at(&self) -> Option<Instant> {
        self.follow.has_more().then_some(self.follow.due)
    }

    fn flush(&mut self) {
        self.follow.flush();
    }
}

/// Forwards output while the cell runs: at most ten events a second, each of bounded size.
struct OutputFollower<'a> {
    call: &'a Call,
    stdout: String,
    stderr: String,
    /// No event is sent before this moment.
    due: Instant,
}

impl<'a> OutputFollower<'a> {
    /// Interval between events. Both streams may send one each time.
    const EVERY: Duration = Duration::from_millis(200);
    const MAX_TEXT: usize = 8 << 10;

    fn new(call: &'a Call) -> Self {
        Self { call, stdout: String::new(), stderr: String::new(), due: Instant::now() }
    }

    fn push(&mut self, stream: Stream, text: &str) {
        if self.call.events.0.is_none() {
            return;
        }
        let waiting = match stream {
            Stream::Stdout => &mut self.stdout,
            Stream::Stderr => &mut self.stderr,
        };
        let room = Self::MAX_TEXT.saturating_sub(waiting.len());
        // The complete text is in the result; what is forwarded meanwhile is only for display.
        waiting.push_str(&text[..text.floor_char_boundary(room)]);
    }

    fn has_more(&self) -> bool {
        !self.stdout.is_empty() || !self.stderr.is_empty()
    }

    fn flush(&mut self) {
        for (stream, waiting) in [(Stream::Stdout, &mut self.stdout), (Stream::Stderr, &mut self.stderr)] {
            if !waiting.is_empty() {
                self.call.events.send(Event::Output { stream, text: std::mem::take(waiting) });
            }
        }
        self.due = Instant::now() + Self::EVERY;
    }
}
