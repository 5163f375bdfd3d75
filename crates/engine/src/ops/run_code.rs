//! Runs a cell in a context: waits for the turn and a permit, runs the cell, and decides what its end means.
//!
//! However a run goes, it ends with exactly one outcome and leaves its context ready for the next run. A dead kernel is
//! started again, a lost sandbox is replaced, and the next result says what was lost.

use std::sync::Arc;
use std::time::Duration;

use proto::{Ended, GuestFailure, KernelId, Language};
use tokio::sync::OwnedMutexGuard;
use tokio::time::Instant;

use super::{OpContext, ResolvedContext};
use crate::background::Background;
use crate::cell::{CellReport, CellRun, StartRefused, TOO_LONG};
use crate::context::{Context, ContextState};
use crate::op::{
    Call, CellError, Command, ContextInfo, EngineError, Environment, Network, Outcome, Ran, RunCode, RunOutcome,
};
use crate::provision::Provisioner;
use crate::registry::{LiveSandbox, SandboxFailure};

const SIGKILL: i32 = 9;

/// A run shorter than this does not cause its own query for memory kills.
const BRIEF: Duration = Duration::from_millis(20);
/// Short runs within this time share one query for memory kills.
const SETTLE_AFTER: Duration = Duration::from_secs(1);

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
        self.check_wishes(&env, network)?;
        // An existing context has its own language. A context that is created for this run gets the one that the run
        // names.
        let wanted = language.or_else(|| target.make.as_ref().map(|make| make.language));
        let entered = self.enter(call, target, wanted).await?;
        self.same_language(&entered, language)?;
        let run = Run { work: RunInput::Code { code, language }, env, timeout, network, background };
        self.start(call, entered, run).await
    }

    pub(super) fn same_language(&self, entered: &ResolvedContext, asked: Option<Language>) -> Result<(), EngineError> {
        let context = &entered.context;
        match asked {
            Some(asked) if asked != context.language && self.tenancy.config().one_language => {
                Err(EngineError::OtherLanguage { context: context.id.clone(), is: context.language, asked })
            }
            _ => Ok(()),
        }
    }

    /// Runs the code or command, or starts it in the background.
    pub(super) async fn start(&self, call: &Call, entered: ResolvedContext, run: Run) -> Result<Outcome, EngineError> {
        let nobodys = entered.nobodys();
        let result = match run.background {
            true => self.start_background(call, entered, run).await,
            false => self.run_here(call, entered, run, None).await.map(Outcome::Ran),
        };
        self.dismiss_if_nobodys(nobodys, result.is_err());
        result
    }

    pub(super) async fn run_here(
        &self,
        call: &Call,
        mut entered: ResolvedContext,
        run: Run,
        record: Option<&Background>,
    ) -> Result<Box<Ran>, EngineError> {
        if let Some(refused) = self.too_long(run.work.length(), entered.context.info()) {
            return Ok(Box::new(Ran { created: entered.news.tell(), ..refused }));
        }
        if let RunInput::Code { language, .. } = &run.work {
            self.runs(language.unwrap_or(entered.context.language))?;
        }
        let timeout = self.time_for(&run);
        let running = entered.context.run();
        let (mut home, permits) = self.admit(call, &mut entered).await?;
        let context = entered.context.context().clone();
        let begun = Instant::now();
        let attempt = RunAttempt { world: self, call, context: &context, timeout, network: run.network, record };
        let result = match run.work {
            RunInput::Code { code, language } => {
                attempt.code(&mut home, language.unwrap_or(context.language), &code, &run.env).await
            }
            RunInput::Command(command) => attempt.command(&mut home, &command, &run.env).await,
        };
        context.used();
        drop((permits, running));
        self.settle_account(&context, home, begun.elapsed());
        let mut ran = result?;
        self.tell(&context.id, &ran.end);
        if context.gone.is_cancelled() && matches!(ran.end, RunOutcome::Cancelled { .. }) {
            // The stop of the context cancelled the run, so the state of the kernel is lost too.
            ran.end = RunOutcome::SandboxLost { why: "its context was stopped".into() };
        }
        ran.created = entered.news.tell();
        ran.context = context.info();
        Ok(Box::new(ran))
    }

    /// Returns a run under the usual conditions of the realm.
    pub(super) fn cell<'a>(&'a self, call: &'a Call, sandbox: &'a LiveSandbox) -> CellRun<'a> {
        let config = self.tenancy.config();
        let (timeout, budget) = (config.timeout.max(Duration::from_millis(1)), config.text_budget);
        CellRun { inner: &self.inner, call, sandbox, timeout, network: Network::Usual, budget, record: None }
    }

    fn time_for(&self, run: &Run) -> Duration {
        let config = self.tenancy.config();
        let most = match run.work {
            RunInput::Code { .. } if !run.background => config.max_timeout,
            _ => config.max_command_timeout,
        };
        let usual = if run.background { most } else { config.timeout };
        run.timeout.unwrap_or(usual).clamp(Duration::from_millis(1), most.max(config.timeout))
    }

    /// Records the number of memory kills so far, so that later ones can be distinguished from them. This does not
    /// delay the caller, but the turn is held meanwhile. A very short run has hardly filled any memory, so many of them
    /// share one query.
    fn settle_account(&self, context: &Arc<Context>, mut home: OwnedMutexGuard<ContextState>, took: Duration) {
        let Some(sandbox) = home.live_sandbox() else { return };
        if took >= BRIEF {
            self.inner.tasks.spawn(async move { home.settle(&sandbox).await });
        } else if !std::mem::replace(&mut home.settling, true) {
            let (context, closing) = (context.clone(), self.inner.closing.clone());
            self.inner.tasks.spawn(async move {
                tokio::select! {
                    () = tokio::time::sleep(SETTLE_AFTER) => {}
                    () = context.gone.cancelled() => return,
                    () = closing.cancelled() => return,
                }
                let mut home = context.turn.lock().await;
                home.settling = false;
                if let Some(sandbox) = home.live_sandbox() {
                    home.settle(&sandbox).await;
                }
            });
        }
    }

    /// Returns the result of code or a command that is too long to be run, if it is.
    pub(super) fn too_long(&self, length: usize, context: ContextInfo) -> Option<Ran> {
        let limit = self.inner.config.max_code_bytes;
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
            Self::Command(Command::Shell(line)) => line.len(),
            Self::Command(Command::Argv(argv)) => argv.iter().map(String::len).sum(),
        }
    }
}

/// A run that has its turn.
pub(super) struct RunAttempt<'a> {
    pub(super) world: &'a OpContext,
    pub(super) call: &'a Call,
    pub(super) context: &'a Context,
    pub(super) timeout: Duration,
    pub(super) network: Network,
    pub(super) record: Option<&'a Background>,
}

impl RunAttempt<'_> {
    pub(super) fn cell<'a>(&'a self, sandbox: &'a LiveSandbox) -> CellRun<'a> {
        let Self { world, call, timeout, network, record, .. } = *self;
        CellRun { timeout, network, record, ..world.cell(call, sandbox) }
    }

    async fn code(
        &self,
        home: &mut ContextState,
        language: Language,
        code: &str,
        env: &Environment,
    ) -> Result<Ran, EngineError> {
        let (sandbox, kernel) = self.ready_kernel(home, language).await?;
        if self.call.cancel.is_cancelled() {
            return Err(EngineError::Cancelled);
        }
        match self.cell_in(&sandbox, kernel, home, language, code, env).await {
            Ok(ran) => return Ok(ran),
            Err(refused) if refused.failure == GuestFailure::Environment => return Err(refused.into()),
            Err(refused) => {
                tracing::debug!(context = self.context.id, refused.why, "the interpreter took no cell");
            }
        }
        // The code did not start. A kernel that accepts no cell is replaced once.
        let _ = sandbox.stop_kernel(kernel).await;
        home.kernel_ended(language);
        let lost = || "[the interpreter had to be started again: variables are lost, files are kept]".into();
        home.kernel_notices.entry(language).or_insert_with(lost);
        let (sandbox, kernel) = self.ready_kernel(home, language).await?;
        Ok(self.cell_in(&sandbox, kernel, home, language, code, env).await?)
    }

    async fn cell_in(
        &self,
        sandbox: &Arc<LiveSandbox>,
        kernel: KernelId,
        home: &mut ContextState,
        language: Language,
        code: &str,
        env: &Environment,
    ) -> Result<Ran, StartRefused> {
        let cell = self.cell(sandbox);
        let mut heard = cell.code(kernel, code, env, true).await?;
        let end = heard.outcome();
        Ok(self.finish(heard, end, sandbox, home, Some(language)).await)
    }

    /// Applies the end of a run to the context and builds its result. `language` is that of its kernel, if it had one.
    pub(super) async fn finish(
        &self,
        heard: CellReport<'_>,
        end: RunOutcome,
        sandbox: &LiveSandbox,
        home: &mut ContextState,
        language: Option<Language>,
    ) -> Ran {
        match end {
            RunOutcome::SandboxLost { .. } => home.sandbox = None,
            RunOutcome::TimedOut { state_kept: false, .. }
            | RunOutcome::Cancelled { state_kept: false }
            | RunOutcome::Ended { .. } => language.into_iter().for_each(|language| home.kernel_ended(language)),
            _ => {}
        }
        let end = home.explain(end, sandbox).await;
        // The notice is shown only with a run that took place.
        let notice = home.take_notice(language);
        let ran = heard.ran(end, self.context.info(), Some(&self.context.keys.outputs));
        Ran { notice, ..ran }
    }

    /// Returns a sandbox with a live kernel. If the kernel cannot be started in a sandbox that has no other, the
    /// context moves to a new one.
    async fn ready_kernel(
        &self,
        home: &mut ContextState,
        language: Language,
    ) -> Result<(Arc<LiveSandbox>, KernelId), EngineError> {
        let (world, context) = (self.world, self.context);
        let sandbox = world.move_in(context, home, Some(language)).await?;
        if let Some(&kernel) = home.kernels.get(&language) {
            match sandbox.guest.take_exited(kernel) {
                None => return Ok((sandbox, kernel)),
                Some(how) => home.kernel_ended_between_runs(language, how),
            }
        }
        let provisioner = world.inner.provisioner()?;
        let failure = match home.start_kernel(provisioner, &sandbox, language).await {
            Ok(kernel) => return Ok((sandbox, kernel)),
            Err(failure) => failure,
        };
        tracing::warn!(context = context.id, why = failure.log, "an interpreter cannot be started");
        if !home.kernels.is_empty() && !sandbox.guest.is_lost() {
            return Err(EngineError::Sandbox(failure.public));
        }
        let _ = sandbox.destroy("its interpreter could not be started again").await;
        let sandbox = world.move_in(context, home, Some(language)).await?;
        let kernel = match home.kernels.get(&language) {
            Some(kernel) => Ok(*kernel),
            // The new sandbox is one of the pool, with only a Python kernel.
            None => home.start_kernel(provisioner, &sandbox, language).await,
        };
        Ok((sandbox, kernel.map_err(|failure| EngineError::Sandbox(failure.public))?))
    }
}

impl ContextState {
    /// Records the number of memory kills so far, and returns the statistics if there are new ones.
    async fn settle(&mut self, sandbox: &LiveSandbox) -> Option<sandbox::Stats> {
        let stats = sandbox.stats().await?;
        let before = std::mem::replace(&mut self.oom_kills, stats.oom_kills);
        (stats.oom_kills > before).then_some(stats)
    }

    /// Returns the end of a run. If a process was killed for memory, which only the sandbox's counter shows, the end
    /// says so.
    pub(super) async fn explain(&mut self, end: RunOutcome, sandbox: &LiveSandbox) -> RunOutcome {
        if end != (RunOutcome::Ended { how: Ended::Signaled { signal: SIGKILL } }) {
            return end;
        }
        let stats = self.settle(sandbox).await;
        stats.map_or(end, |stats| RunOutcome::OutOfMemory { limit_bytes: stats.oom_limit_bytes })
    }

    async fn start_kernel(
        &mut self,
        provisioner: &Provisioner,
        sandbox: &LiveSandbox,
        language: Language,
    ) -> Result<KernelId, SandboxFailure> {
        self.last_kernel += 1;
        let kernel = self.last_kernel;
        let _hurry = provisioner.hurry();
        provisioner.start_kernel(sandbox, kernel, language).await?;
        self.kernels.insert(language, kernel);
        Ok(kernel)
    }
}
