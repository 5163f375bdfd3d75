//! One cell: wait for the turn and a permit, run, fold what comes back into a bounded result.
//!
//! However a run goes, it ends with exactly one outcome and leaves its context able to take the next: a dead interpreter is
//! started again, a lost sandbox is replaced, and the next result says what was lost.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use proto::{Deadline, Ended, FromGuest, KernelId, Kind, RunEnd, RunStatus, Stream, ToGuest};
use tokio::sync::{OwnedMutexGuard, OwnedSemaphorePermit};
use tokio::time::Instant;

use super::World;
use crate::capture::{Rich, StreamCapture};
use crate::context::{Context, Home};
use crate::guest::{Answer, Lost, PendingCall};
use crate::live::Place;
use crate::op::{Call, CellError, ContextInfo, EngineError, Event, Outcome, Ran, RunOutcome};

/// After this the caller is told that it waits.
const TELL_WAITING: Duration = Duration::from_secs(1);
/// What the host allows the guest beyond the deadline and its grace time.
const BACKSTOP: Duration = Duration::from_secs(2);
const SIGKILL: i32 = 9;

impl World {
    pub(super) async fn run_code(
        &self,
        call: &Call,
        wanted: &str,
        code: String,
        timeout: Option<Duration>,
    ) -> Result<Outcome, EngineError> {
        let config = &self.inner.config;
        let context = self.holdings.find(wanted)?;
        if code.len() > config.max_code_bytes {
            return Ok(Outcome::Ran(Box::new(too_long(code.len(), config.max_code_bytes, context.info()))));
        }
        let longest = config.max_timeout.max(config.timeout);
        let timeout = timeout.unwrap_or(config.timeout).clamp(Duration::from_millis(1), longest);
        let (mut home, permit) = self.admit(call, &context).await?;
        let result = self.run_in(call, &context, &mut home, code, timeout).await;
        context.used();
        drop(permit);
        self.settle_account(home);
        result.map(|ran| Outcome::Ran(Box::new(ran)))
    }

    /// The turn first, then a permit: who waits for an earlier run of the same context takes no permit from others.
    async fn admit(
        &self,
        call: &Call,
        context: &Context,
    ) -> Result<(OwnedMutexGuard<Home>, OwnedSemaphorePermit), EngineError> {
        let config = &self.inner.config;
        let turn = context.turn.clone().try_lock_owned();
        let permit = turn.is_ok().then(|| self.holdings.permits.clone().try_acquire_owned());
        let turn = match (turn, permit) {
            (Ok(home), Some(Ok(permit))) => return Ok((home, permit)),
            // A turn that was had is not given back: another run would go first.
            (turn, _) => turn,
        };
        let _queued = self.holdings.enqueue(config.queue_length).ok_or(EngineError::QueueFull(config.queue_length))?;
        let home = match turn {
            Ok(home) => home,
            Err(_) => {
                let turn = context.turn.clone().lock_owned();
                self.wait(call, context, "an earlier run in this context is not finished", turn).await?
            }
        };
        let permit = tokio::time::timeout(config.queue_wait, self.holdings.permits.clone().acquire_owned());
        let why = format!("all {} sessions are busy", config.pool_size);
        match self.wait(call, context, &why, permit).await? {
            Ok(Ok(permit)) => Ok((home, permit)),
            Ok(Err(_)) => Err(EngineError::ShuttingDown),
            Err(_) => Err(EngineError::Busy(config.queue_wait)),
        }
    }

    async fn wait<T>(
        &self,
        call: &Call,
        context: &Context,
        why: &str,
        work: impl Future<Output = T>,
    ) -> Result<T, EngineError> {
        let mut work = pin!(work);
        let mut tell = pin!(tokio::time::sleep(TELL_WAITING));
        let mut told = false;
        loop {
            tokio::select! {
                biased;
                () = context.gone.cancelled() => return Err(context.not_found()),
                () = call.cancel.cancelled() => return Err(EngineError::Cancelled),
                () = self.inner.closing.cancelled() => return Err(EngineError::ShuttingDown),
                done = &mut work => return Ok(done),
                () = &mut tell, if !told => {
                    told = true;
                    call.events.send(Event::Waiting { why: why.into() });
                }
            }
        }
    }

    async fn run_in(
        &self,
        call: &Call,
        context: &Arc<Context>,
        home: &mut Home,
        code: String,
        timeout: Duration,
    ) -> Result<Ran, EngineError> {
        let (place, kernel) = self.ready_kernel(context, home).await?;
        if call.cancel.is_cancelled() {
            return Err(EngineError::Cancelled);
        }
        let mut cell = Cell { world: self, call, context, place, timeout, code };
        match cell.run(kernel, home).await {
            Ok(ran) => return Ok(ran),
            Err(refused) => tracing::debug!(context = context.id, refused.why, "the interpreter took no cell"),
        }
        // The code did not start. A kernel that takes no cell is replaced, once.
        let _ = cell.place.stop_kernel(kernel).await;
        home.kernel_ended();
        let lost = || "[the interpreter had to be started again: variables are lost, files are kept]".into();
        home.notice.get_or_insert_with(lost);
        let (place, kernel) = self.ready_kernel(context, home).await?;
        cell.place = place;
        cell.run(kernel, home).await.map_err(|refused| EngineError::Sandbox(refused.why))
    }

    /// A sandbox with a living interpreter. If none can be started in the old sandbox the context moves to a new one.
    async fn ready_kernel(&self, context: &Context, home: &mut Home) -> Result<(Arc<Place>, KernelId), EngineError> {
        let place = self.move_in(context, home).await?;
        if let Some(kernel) = home.kernel {
            match place.guest.take_exited(kernel) {
                None => return Ok((place, kernel)),
                Some(how) => home.kernel_ended_between_runs(how),
            }
        }
        let kernel = home.last_kernel + 1;
        home.last_kernel = kernel;
        match self.inner.maker()?.start_kernel(&place, kernel, context.language).await {
            Ok(()) => {
                home.kernel = Some(kernel);
                Ok((place, kernel))
            }
            Err(failure) => {
                tracing::warn!(
                    context = context.id,
                    why = failure.log,
                    "the interpreter cannot be started again; a new sandbox"
                );
                let _ = place.destroy("its interpreter could not be started again").await;
                let place = self.move_in(context, home).await?;
                Ok((place, home.kernel.unwrap_or(kernel)))
            }
        }
    }

    /// Memory kills so far, so that the next are told from these. Off the caller's path; the turn is held meanwhile.
    fn settle_account(&self, mut home: OwnedMutexGuard<Home>) {
        let Some(place) = home.place.clone().filter(|place| !place.guest.is_lost()) else { return };
        self.inner.tasks.spawn(async move {
            if let Some(kills) = place.oom_kills().await {
                home.oom_kills = kills;
            }
        });
    }

    fn memory_limit(&self) -> u64 {
        let config = &self.inner.config;
        config.group_memory_bytes.unwrap_or(u64::MAX).min(config.limits.memory_bytes)
    }
}

/// The guest did not start the code.
struct Refused {
    why: String,
}

struct Cell<'a> {
    world: &'a World,
    call: &'a Call,
    context: &'a Context,
    place: Arc<Place>,
    timeout: Duration,
    code: String,
}

/// How the conversation about one run ended.
enum Ending {
    Reported(RunEnd),
    /// The code never left.
    Unsendable(String),
    Refused(String),
    Failed(String),
    Lost(Lost),
}

impl Cell<'_> {
    async fn run(&self, kernel: KernelId, home: &mut Home) -> Result<Ran, Refused> {
        let config = &self.world.inner.config;
        let mut fold = Fold::new(config.text_budget, self.call);
        let started = Instant::now();
        let ending = self.converse(kernel, &mut fold).await;
        let mut duration = started.elapsed();
        let end = match ending {
            Ending::Refused(why) => return Err(Refused { why }),
            Ending::Reported(end) => {
                // The guest's own figure leaves the way here out, but is not believed beyond what passed.
                duration = duration.min(Duration::from_micros(end.micros));
                self.conclude(end.status, home).await
            }
            Ending::Unsendable(why) => fold.error("CodeTooLong", format!("the code cannot be run in one call: {why}")),
            Ending::Failed(why) => {
                // It may or may not have run: an interpreter in doubt is not used again.
                let _ = self.place.destroy(&why).await;
                home.place = None;
                RunOutcome::SandboxLost { why }
            }
            Ending::Lost(lost) => {
                let _ = self.place.destroy(&lost.0).await;
                home.place = None;
                RunOutcome::SandboxLost { why: lost.0 }
            }
        };
        // Told only with a run that happened.
        let notice = home.notice.take();
        Ok(fold.finish(end, duration, notice, self.context.info()))
    }

    async fn converse(&self, kernel: KernelId, fold: &mut Fold<'_>) -> Ending {
        let config = &self.world.inner.config;
        let deadline =
            Deadline { after_ms: self.timeout.as_millis() as u64, grace_ms: config.grace.as_millis() as u64 };
        let forward_bytes = (config.text_budget as u64 * 4).max(256 << 10);
        let code = self.code.clone();
        let request = ToGuest::Run {
            kernel,
            code,
            env: std::collections::BTreeMap::new(),
            deadline,
            forward_bytes,
            keep_over: None,
        };
        let mut until = Instant::now() + self.timeout + config.grace + BACKSTOP;
        let mut run: PendingCall = tokio::select! {
            sent = self.place.guest.call(&request) => match sent {
                Ok(run) => run,
                Err(lost) if self.place.guest.is_lost() => return Ending::Lost(lost),
                // Characters that are written as six on the way.
                Err(too_long) => return Ending::Unsendable(too_long.0),
            },
            () = tokio::time::sleep_until(until) => return self.silent(false),
        };
        let mut cancelled = false;
        loop {
            tokio::select! {
                biased;
                () = tokio::time::sleep_until(until) => return self.silent(cancelled),
                () = self.call.cancel.cancelled(), if !cancelled => {
                    cancelled = true;
                    until = until.min(Instant::now() + config.grace + BACKSTOP);
                    let interrupter = run.interrupter();
                    // Not awaited here: a guest that floods and does not read must still be read.
                    self.world.inner.tasks.spawn(async move { let _ = interrupter.interrupt().await; });
                }
                () = tokio::time::sleep_until(fold.follow.due), if fold.follow.has_more() => fold.follow.flush(),
                answer = run.next() => match answer {
                    Err(lost) => return Ending::Lost(lost),
                    Ok(answer) => match fold.take(answer) {
                        Ok(None) => {}
                        Ok(Some(ending)) => return ending,
                        Err(why) => return Ending::Lost(self.place.guest.close(why)),
                    },
                },
            }
        }
    }

    /// The guest kept silent beyond all deadlines: with it go the files.
    fn silent(&self, cancelled: bool) -> Ending {
        let what = if cancelled { "was cancelled".into() } else { format!("timed out after {:?}", self.timeout) };
        Ending::Lost(self.place.guest.close(&format!("the code {what} and its guest did not end it")))
    }

    /// What a reported end means for the context.
    async fn conclude(&self, status: RunStatus, home: &mut Home) -> RunOutcome {
        match status {
            RunStatus::Ok => RunOutcome::Ok,
            RunStatus::Error => RunOutcome::Error,
            RunStatus::Exit { code } => RunOutcome::Exit { code },
            RunStatus::Interrupted => RunOutcome::Interrupted,
            RunStatus::TimedOut { state_kept } => {
                forget_kernel_unless(state_kept, home);
                RunOutcome::TimedOut { after: self.timeout, state_kept }
            }
            RunStatus::Cancelled { state_kept } => {
                forget_kernel_unless(state_kept, home);
                RunOutcome::Cancelled { state_kept }
            }
            RunStatus::Ended { how } => {
                home.kernel_ended();
                if how == (Ended::Signaled { signal: SIGKILL })
                    && self.place.oom_kills().await.is_some_and(|kills| kills > home.oom_kills)
                {
                    return RunOutcome::OutOfMemory { limit_bytes: self.world.memory_limit() };
                }
                RunOutcome::Ended { how }
            }
        }
    }
}

fn forget_kernel_unless(state_kept: bool, home: &mut Home) {
    if !state_kept {
        home.kernel_ended();
    }
}

/// Everything a run says, folded as it arrives.
struct Fold<'a> {
    stdout: StreamCapture,
    stderr: StreamCapture,
    rich: Rich,
    follow: Follow<'a>,
}

impl<'a> Fold<'a> {
    fn new(budget: usize, call: &'a Call) -> Self {
        Self {
            stdout: StreamCapture::new(budget),
            stderr: StreamCapture::new(budget),
            rich: Rich::new(budget),
            follow: Follow::new(call),
        }
    }

    fn take(&mut self, answer: Answer) -> Result<Option<Ending>, &'static str> {
        match answer {
            Answer::Data(Kind::Stdout, bytes) => self.output(Stream::Stdout, &bytes),
            Answer::Data(Kind::Stderr, bytes) => self.output(Stream::Stderr, &bytes),
            Answer::Data(..) => return Err("the guest sent a file instead of output"),
            Answer::Message(message) => return self.message(message),
        }
        Ok(None)
    }

    fn message(&mut self, message: FromGuest) -> Result<Option<Ending>, &'static str> {
        match message {
            FromGuest::Event { event } => self.rich.event(event),
            FromGuest::Gap { stream, bytes } => self.stream(stream).gap(bytes),
            FromGuest::LateOutput { stdout, stderr, dropped } => {
                self.rich.late_gap(dropped);
                self.rich.late(&stdout);
                self.rich.late(&stderr);
            }
            FromGuest::RunEnd { end } => return Ok(Some(Ending::Reported(end))),
            FromGuest::Failed { failure: proto::Failure::Kernel, message } => {
                return Ok(Some(Ending::Refused(crate::live::one_line(&message))));
            }
            FromGuest::Failed { message, .. } => return Ok(Some(Ending::Failed(crate::live::one_line(&message)))),
            _ => return Err("the guest answered a run with something else"),
        }
        Ok(None)
    }

    fn error(&mut self, name: &str, message: String) -> RunOutcome {
        self.rich.event(proto::KernelEvent::Error { name: name.into(), value: message.clone(), text: message });
        RunOutcome::Error
    }

    fn stream(&mut self, stream: Stream) -> &mut StreamCapture {
        match stream {
            Stream::Stdout => &mut self.stdout,
            Stream::Stderr => &mut self.stderr,
        }
    }

    fn output(&mut self, stream: Stream, bytes: &[u8]) {
        let text = self.stream(stream).push(bytes);
        self.follow.push(stream, &text);
    }

    fn finish(mut self, end: RunOutcome, duration: Duration, notice: Option<String>, context: ContextInfo) -> Ran {
        self.follow.flush();
        let shown = self.rich.finish();
        Ran {
            context,
            created: false,
            files: None,
            stdout: self.stdout.finish(),
            stderr: self.stderr.finish(),
            value: shown.value,
            displays: shown.displays,
            error: shown.error,
            late: shown.late,
            notice,
            end,
            duration,
        }
    }
}

/// Passes output on while the cell runs: at most ten events a second, each of bounded size.
struct Follow<'a> {
    call: &'a Call,
    stdout: String,
    stderr: String,
    /// No event before this.
    due: Instant,
}

impl<'a> Follow<'a> {
    /// Both streams may have one each time.
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
        // The whole is in the result; what is shown meanwhile is for the eye.
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

fn too_long(length: usize, limit: usize, context: ContextInfo) -> Ran {
    let value =
        format!("the code has {length} bytes, at most {limit} are run in one call; write it to a file and run that");
    Ran {
        context,
        created: false,
        files: None,
        stdout: Default::default(),
        stderr: Default::default(),
        value: None,
        displays: Vec::new(),
        error: Some(CellError { name: "CodeTooLong".into(), text: value.clone(), value }),
        late: None,
        notice: None,
        end: RunOutcome::Error,
        duration: Duration::ZERO,
    }
}
