//! Runs a cell in a context: waits for the turn of its kernel and a permit, runs the cell, and decides what its end
//! means.
//!
//! However a run goes, it ends with exactly one outcome and leaves its context ready for the next run. A dead kernel is
//! started again, a lost sandbox is replaced, and the next result says what was lost.

use std::sync::Arc;
use std::time::Duration;

use proto::{Ended, GuestFailure, KernelId, Language};
use tokio::sync::OwnedMutexGuard;
use tokio::time::Instant;

use super::admit::Admitted;
use super::{OpContext, ResolvedContext};
use crate::background::Background;
use crate::cell::{CellReport, CellRun, StartRefused, TOO_LONG};
use crate::context::{Context, ContextState};
use crate::op::{
    Call, CellError, Command, ContextInfo, EngineError, Environment, Network, Outcome, Ran, RunCode, RunOutcome,
    Waiting,
};
use crate::provision::Provisioner;
use crate::registry::{LiveSandbox, SandboxFailure};

const SIGKILL: i32 = 9;

/// Maximum length of one argument of a program: 128 KiB with the zero byte at its end.
const LONGEST_ARGUMENT: usize = (128 << 10) - 1;

/// Runs shorter than this share their queries for memory kills.
const BRIEF: Duration = Duration::from_millis(20);
/// Time during which short runs share one query for memory kills.
const OOM_QUERY_DELAY: Duration = Duration::from_secs(1);

/// Code or a command to run in a context, with the conditions of the run.
pub(super) struct Run {
    pub(super) work: RunInput,
    pub(super) env: Environment,
    pub(super) timeout: Option<Duration>,
    pub(super) network: Network,
    pub(super) background: bool,
}

pub(super) enum RunInput {
    Code { code: String, language: Option<Language> },
    Command(Command),
}

impl OpContext {
    pub(super) async fn run_code(&self, call: &Call, run: RunCode) -> Result<Outcome, EngineError> {
        let RunCode { target, language, code, timeout, env, network, background } = run;
        self.check_env_and_network(&env, network)?;
        // An existing context has its own language. A context that is created for this run gets the one that the run
        // names.
        let wanted = language.or_else(|| target.make.as_ref().map(|make| make.language));
        let resolved = self.resolve(call, target, wanted).await?;
        self.same_language(&resolved, language)?;
        let run = Run { work: RunInput::Code { code, language }, env, timeout, network, background };
        self.start(call, resolved, run).await
    }

    pub(super) fn same_language(&self, resolved: &ResolvedContext, asked: Option<Language>) -> Result<(), EngineError> {
        let context = &resolved.context;
        match asked {
            Some(asked) if asked != context.language && self.tenancy.config().one_language => {
                Err(EngineError::OtherLanguage { context: context.id.clone(), is: context.language, asked })
            }
            _ => Ok(()),
        }
    }

    /// Runs the code or command, or starts it in the background.
    pub(super) async fn start(&self, call: &Call, resolved: ResolvedContext, run: Run) -> Result<Outcome, EngineError> {
        let exclusive = resolved.exclusive();
        let result = match run.background {
            true => self.start_background(call, resolved, run).await,
            false => self.run_here(call, resolved, run, None).await.map(Outcome::Ran),
        };
        self.dismiss_exclusive(exclusive, result.is_err());
        result
    }

    pub(super) async fn run_here(
        &self,
        call: &Call,
        mut resolved: ResolvedContext,
        run: Run,
        record: Option<&Background>,
    ) -> Result<Box<Ran>, EngineError> {
        if let Some(refused) = self.too_long(run.work.length(), run.work.longest(), resolved.context.info()) {
            return Ok(Box::new(Ran { created: resolved.new_notice.report(), ..refused }));
        }
        if let RunInput::Code { language, .. } = &run.work {
            self.check_language(language.unwrap_or(resolved.context.language))?;
        }
        let running = resolved.context.run();
        let _share = self.unless_over(call, resolved.context.runs_over.clone().read_owned()).await?;
        let (admitted, waited) = self.admit_in_time(call, &mut resolved, &run, record).await?;
        if let Some(record) = record {
            record.begin();
        }
        let context = resolved.context.context().clone();
        let asked = self.time_for(&run);
        let timeout = asked.saturating_sub(waited).max(Duration::from_millis(1));
        let attempt = RunAttempt { ops: self, call, context: &context, timeout, network: run.network, record };
        let result = match run.work {
            RunInput::Code { code, language } => {
                attempt.code(language.unwrap_or(context.language), &code, &run.env).await
            }
            RunInput::Command(command) => attempt.command(&command, &run.env).await,
        };
        context.used();
        drop((admitted, running));
        let mut ran = result?;
        if let RunOutcome::TimedOut { after, .. } = &mut ran.end {
            *after = asked;
        }
        self.notify_of_end(&context.id, &ran.end);
        if context.gone.is_cancelled() && matches!(ran.end, RunOutcome::Cancelled { .. }) {
            // The stop of the context cancelled the run, so the state of the kernel is lost too.
            ran.end = RunOutcome::SandboxLost { why: "its context was stopped".into() };
        }
        ran.created = resolved.new_notice.report();
        ran.misses_earlier = context.is_missing_earlier(&ran);
        ran.context = context.info();
        Ok(Box::new(ran))
    }

    /// Waits for admission. Returns the time that counts towards the timeout of the run, which is none in realms where
    /// waiting does not count, and for background runs, because nobody waits for them.
    async fn admit_in_time(
        &self,
        call: &Call,
        resolved: &mut ResolvedContext,
        run: &Run,
        record: Option<&Background>,
    ) -> Result<(Admitted, Duration), EngineError> {
        let config = self.tenancy.config();
        let turn = match &run.work {
            _ if config.one_run_at_a_time => Some(resolved.context.cell_turn(resolved.context.language)),
            RunInput::Code { language, .. } => {
                Some(resolved.context.cell_turn(language.unwrap_or(resolved.context.language)))
            }
            RunInput::Command(_) => None,
        };
        if let Some(record) = record {
            record.wait_for(turn.clone());
        }
        let admission = self.admit(call, resolved, turn.clone(), record.map(|record| record.id.clone()));
        if run.background || !config.waiting_counts {
            return Ok((admission.await?, Duration::ZERO));
        }
        let (begun, timeout) = (Instant::now(), self.time_for(run));
        match tokio::time::timeout(timeout, admission).await {
            Ok(admitted) => Ok((admitted?, begun.elapsed())),
            Err(_) => {
                let occupant = turn.and_then(|turn| turn.occupant());
                Err(EngineError::NotStarted {
                    timeout,
                    running: occupant.as_ref().map(|occupant| occupant.since.elapsed()),
                    run: occupant.and_then(|occupant| occupant.run),
                })
            }
        }
    }

    /// Returns the usual conditions of a run in this realm.
    pub(super) fn cell<'a>(&'a self, call: &'a Call, sandbox: &'a LiveSandbox) -> CellRun<'a> {
        let config = self.tenancy.config();
        let (timeout, budget) = (config.timeout.max(Duration::from_millis(1)), config.text_budget);
        CellRun { inner: &self.inner, call, sandbox, timeout, network: Network::Usual, budget, record: None }
    }

    fn time_for(&self, run: &Run) -> Duration {
        let config = self.tenancy.config();
        let most = match run.work {
            _ if run.background => config.max_background,
            RunInput::Code { .. } => config.max_timeout,
            RunInput::Command(_) => config.max_command_timeout,
        };
        let usual = if run.background { most } else { config.timeout };
        run.timeout.unwrap_or(usual).clamp(Duration::from_millis(1), most)
    }

    /// Records the number of memory kills after a while, so that later ones can be distinguished from them. No run waits
    /// for this.
    fn record_oom_kills(&self, context: &Arc<Context>, delay: Duration) {
        let (context, closing) = (context.clone(), self.inner.closing.clone());
        self.inner.tasks.spawn(async move {
            tokio::select! {
                () = tokio::time::sleep(delay) => {}
                () = context.gone.cancelled() => return,
                () = closing.cancelled() => return,
            }
            let Some(sandbox) = context.live_sandbox() else { return };
            let stats = sandbox.stats().await;
            let mut state = context.state.lock().await;
            state.oom_query_scheduled = false;
            if let Some(stats) = stats.filter(|_| state.sandbox.as_ref().is_some_and(|now| Arc::ptr_eq(now, &sandbox)))
            {
                state.oom_kills = state.oom_kills.max(stats.oom_kills);
            }
        });
    }

    /// Returns the result of code or a command that is too long to be run, if it is.
    pub(super) fn too_long(&self, length: usize, most: usize, context: ContextInfo) -> Option<Ran> {
        let limit = self.inner.config.max_code_bytes.min(most);
        (length > limit).then(|| {
            let value = format!(
                "the code has {length} bytes, at most {limit} are run in one call; write it to a file and run that"
            );
            let error = Some(CellError { name: TOO_LONG.into(), text: value.clone(), value });
            Ran { error, ..Ran::empty(context, RunOutcome::Error) }
        })
    }
}

impl RunInput {
    pub(super) fn length(&self) -> usize {
        match self {
            Self::Code { code, .. } => code.len(),
            Self::Command(Command::Shell(line) | Command::Bash(line)) => line.len(),
            Self::Command(Command::Argv(argv)) => argv.iter().map(String::len).sum(),
        }
    }
}

impl RunInput {
    /// Returns the maximum length of what a program takes as one argument, or `usize::MAX` if it is not an argument.
    fn longest(&self) -> usize {
        match self {
            Self::Command(Command::Bash(_)) => LONGEST_ARGUMENT,
            _ => usize::MAX,
        }
    }
}

/// A run that was admitted.
pub(super) struct RunAttempt<'a> {
    pub(super) ops: &'a OpContext,
    pub(super) call: &'a Call,
    pub(super) context: &'a Arc<Context>,
    pub(super) timeout: Duration,
    pub(super) network: Network,
    pub(super) record: Option<&'a Background>,
}

/// A live kernel, and the number of memory kills in its sandbox before a run.
struct ReadyKernel {
    sandbox: Arc<LiveSandbox>,
    kernel: KernelId,
    oom_kills: u64,
}

impl RunAttempt<'_> {
    pub(super) fn cell<'a>(&'a self, sandbox: &'a LiveSandbox) -> CellRun<'a> {
        let Self { ops, call, timeout, network, record, .. } = *self;
        CellRun { timeout, network, record, ..ops.cell(call, sandbox) }
    }

    async fn code(&self, language: Language, code: &str, env: &Environment) -> Result<Ran, EngineError> {
        let ready = self.ready_kernel(language).await?;
        if self.call.cancel.is_cancelled() {
            return Err(EngineError::Cancelled);
        }
        match self.cell_in(&ready, language, code, env).await {
            Ok(ran) => return Ok(ran),
            Err(refused) if refused.failure == GuestFailure::Environment => return Err(refused.into()),
            Err(refused) => {
                tracing::debug!(context = self.context.id, refused.why, "the interpreter took no cell");
            }
        }
        // The code did not start. A kernel that accepts no cell is replaced once.
        let _ = ready.sandbox.stop_kernel(ready.kernel).await;
        let mut state = self.context.state.lock().await;
        state.kernel_ended(language, ready.kernel);
        let lost = || "[the interpreter had to be started again: variables are lost, files are kept]".into();
        state.kernel_notices.entry(language).or_insert_with(lost);
        drop(state);
        Ok(self.cell_in(&self.ready_kernel(language).await?, language, code, env).await?)
    }

    async fn cell_in(
        &self,
        ready: &ReadyKernel,
        language: Language,
        code: &str,
        env: &Environment,
    ) -> Result<Ran, StartRefused> {
        let ReadyKernel { sandbox, kernel, oom_kills } = ready;
        let cell = self.cell(sandbox);
        let mut report = cell.code(*kernel, code, env, true).await?;
        let end = report.outcome();
        Ok(self.finish(report, end, sandbox, *oom_kills, Some((language, *kernel))).await)
    }

    /// Applies the end of a run to the context and builds its result. `oom_kills` is the number of memory kills before
    /// the run.
    pub(super) async fn finish(
        &self,
        report: CellReport<'_>,
        end: RunOutcome,
        sandbox: &Arc<LiveSandbox>,
        oom_kills: u64,
        kernel: Option<(Language, KernelId)>,
    ) -> Ran {
        // The launcher is asked before the lock is taken, because other runs wait for the lock.
        let stats = match may_be_out_of_memory(&end) {
            true => sandbox.stats().await,
            false => None,
        };
        let mut state = self.context.state.lock().await;
        match end {
            // A stop ends the sandbox of its context itself.
            RunOutcome::SandboxLost { .. } if !self.context.gone.is_cancelled() => state.sandbox_lost(sandbox),
            RunOutcome::TimedOut { state_kept: false, .. }
            | RunOutcome::Cancelled { state_kept: false }
            | RunOutcome::Ended { .. } => {
                kernel.into_iter().for_each(|(language, kernel)| state.kernel_ended(language, kernel));
            }
            _ => {}
        }
        let end = state.explain(end, stats, oom_kills);
        // The notice is shown only with a run that took place, and not with one whose result nobody may read.
        let notice = match self.record {
            None => state.take_notice(kernel.map(|(language, _)| language)),
            Some(_) => None,
        };
        let why_lost = match &end {
            RunOutcome::SandboxLost { why } => Some(why.clone()),
            RunOutcome::SandboxOutOfMemory { limit_bytes } => Some(over_memory(*limit_bytes)),
            _ => None,
        };
        if let Some(why) = why_lost.filter(|_| self.record.is_some() || self.context.running() > 1) {
            state.notice = Some(self.context.lost_notice(&why));
        }
        let ran = report.ran(end, self.context.info(), Some(&self.context.keys.outputs));
        // A very short run has hardly filled any memory, so many of them share one query.
        let query_after = match ran.duration < BRIEF {
            false => Some(Duration::ZERO),
            true => (!std::mem::replace(&mut state.oom_query_scheduled, true)).then_some(OOM_QUERY_DELAY),
        };
        drop(state);
        query_after.into_iter().for_each(|delay| self.ops.record_oom_kills(self.context, delay));
        Ran { notice, ..ran }
    }

    /// Waits for the state of the context while another run makes its sandbox or starts a kernel, but no longer than the
    /// timeout of this run.
    pub(super) async fn state(&self) -> Result<OwnedMutexGuard<ContextState>, EngineError> {
        let Self { ops, call, context, timeout, .. } = *self;
        if let Ok(state) = context.state.clone().try_lock_owned() {
            return Ok(state);
        }
        let over = (&context.gone, context.not_found());
        let why = || Waiting::Other("the sandbox of this context is being made".into());
        let state = tokio::time::timeout(timeout, context.state.clone().lock_owned());
        ops.wait(call, &over, why, state).await?.map_err(|_| EngineError::Busy(timeout))
    }

    async fn ready_kernel(&self, language: Language) -> Result<ReadyKernel, EngineError> {
        let mut state = self.state().await?;
        let (sandbox, kernel) = self.live_kernel(&mut state, language).await?;
        Ok(ReadyKernel { sandbox, kernel, oom_kills: state.oom_kills })
    }

    /// Returns a sandbox with a live kernel. If the kernel cannot be started in a sandbox that has no other, the
    /// context moves to a new one.
    async fn live_kernel(
        &self,
        state: &mut ContextState,
        language: Language,
    ) -> Result<(Arc<LiveSandbox>, KernelId), EngineError> {
        let (ops, context) = (self.ops, self.context);
        let sandbox = ops.ensure_sandbox(context, state, Some(language)).await?;
        if let Some(&kernel) = state.kernels.get(&language) {
            match sandbox.guest.take_exited(kernel) {
                None => return Ok((sandbox, kernel)),
                Some(how) => state.kernel_ended_between_runs(language, how),
            }
        }
        let provisioner = ops.inner.provisioner()?;
        let failure = match state.start_kernel(provisioner, &sandbox, language).await {
            Ok(kernel) => return Ok((sandbox, kernel)),
            Err(failure) => failure,
        };
        tracing::warn!(context = context.id, why = failure.log, "an interpreter cannot be started");
        if !state.kernels.is_empty() && !sandbox.guest.is_lost() {
            return Err(EngineError::Sandbox(failure.public));
        }
        let _ = sandbox.destroy("its interpreter could not be started again").await;
        let sandbox = ops.ensure_sandbox(context, state, Some(language)).await?;
        let kernel = match state.kernels.get(&language) {
            Some(kernel) => Ok(*kernel),
            // The new sandbox is one of the pool, with only a Python kernel.
            None => state.start_kernel(provisioner, &sandbox, language).await,
        };
        Ok((sandbox, kernel.map_err(|failure| EngineError::Sandbox(failure.public))?))
    }
}

/// Returns whether a run may have ended because memory was used up: by the signal that the Linux kernel then sends, or
/// with its sandbox.
pub(super) fn may_be_out_of_memory(end: &RunOutcome) -> bool {
    matches!(end, RunOutcome::Ended { how: Ended::Signaled { signal: SIGKILL } } | RunOutcome::SandboxLost { .. })
}

/// Says why a sandbox was ended that exceeded its memory limit.
pub(super) fn over_memory(limit_bytes: u64) -> String {
    format!("it used more than its limit of {} MB of memory", limit_bytes >> 20)
}

impl ContextState {
    /// Returns the end of a run that was killed, which is `OutOfMemory` if the counter of the sandbox shows a memory
    /// kill that came after the `before` kills at the start of the run and explains no other run. If the sandbox was
    /// ended for its memory, that explains the end of every run in it.
    pub(super) fn explain(&mut self, end: RunOutcome, stats: Option<sandbox::Stats>, before: u64) -> RunOutcome {
        if let Some(limit_bytes) = stats.and_then(|stats| stats.ended_at_bytes) {
            return RunOutcome::SandboxOutOfMemory { limit_bytes };
        }
        if !matches!(end, RunOutcome::Ended { .. }) {
            return end;
        }
        let known = before.max(self.oom_explained);
        let Some(stats) = stats.filter(|stats| stats.oom_kills > known) else { return end };
        self.oom_kills = self.oom_kills.max(stats.oom_kills);
        self.oom_explained = known + 1;
        RunOutcome::OutOfMemory { limit_bytes: stats.oom_limit_bytes }
    }

    async fn start_kernel(
        &mut self,
        provisioner: &Provisioner,
        sandbox: &LiveSandbox,
        language: Language,
    ) -> Result<KernelId, SandboxFailure> {
        self.last_kernel += 1;
        let kernel = self.last_kernel;
        let _waiting = provisioner.caller_waits();
        provisioner.start_kernel(sandbox, kernel, language).await?;
        self.kernels.insert(language, kernel);
        Ok(kernel)
    }
}
