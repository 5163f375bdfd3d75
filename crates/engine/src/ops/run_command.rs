//! Runs a command in the sandbox of a context, beside its kernels and other commands.

use proto::{Ended, GuestFailure, MAX_COMMANDS};

use super::OpContext;
use super::run_code::{Run, RunAttempt, RunInput};
use crate::cell::StartRefused;
use crate::op::{Call, Captured, Command, EngineError, Environment, LimitKind, Outcome, Ran, RunCommand, RunOutcome};

const SHELL: &str = "/bin/sh";
const BASH: &str = "/bin/bash";
/// Exit statuses that a shell reports for a program that does not exist and for one that cannot be started.
const NOT_FOUND: i32 = 127;
const NOT_EXECUTABLE: i32 = 126;

impl OpContext {
    pub(super) async fn run_command(&self, call: &Call, run: RunCommand) -> Result<Outcome, EngineError> {
        let RunCommand { target, language, command, timeout, env, network, background } = run;
        self.check_env_and_network(&env, network)?;
        let mut target = target;
        if let (Some(make), Some(language)) = (&mut target.make, language) {
            make.language = language;
        }
        let resolved = self.resolve(call, target, None).await?;
        self.same_language(&resolved, language)?;
        let run = Run { work: RunInput::Command(command), env, timeout, network, background };
        self.start(call, resolved, run).await
    }
}

/// Returns the refusal of a command that no system can start. The host refuses it, because it cannot be sent to the
/// guest.
fn unstartable(command: &Command) -> Option<StartRefused> {
    let parts = match command {
        Command::Shell(line) | Command::Bash(line) => std::slice::from_ref(line),
        Command::Argv(argv) => argv,
    };
    if parts.first().is_none_or(String::is_empty) && matches!(command, Command::Argv(_)) {
        return Some(StartRefused { failure: GuestFailure::NotFound, why: String::new() });
    }
    let zero = parts.iter().any(|part| part.contains('\0'));
    zero.then(|| StartRefused { failure: GuestFailure::Io, why: "the command has a zero byte".into() })
}

impl RunAttempt<'_> {
    pub(super) async fn command(&self, command: &Command, env: &Environment) -> Result<Ran, EngineError> {
        let (ops, context) = (self.ops, self.context);
        let mut state = self.state().await?;
        let sandbox = ops.ensure_sandbox(context, &mut state, None).await?;
        let oom_kills = state.oom_kills;
        drop(state);
        if self.call.cancel.is_cancelled() {
            return Err(EngineError::Cancelled);
        }
        if let Some(refused) = unstartable(command) {
            return self.not_started(refused, command).await;
        }
        let mut full_env = ops.inner.provisioner()?.runtimes.command_env();
        full_env.extend(ops.inner.provisioner()?.env_of(&sandbox).await);
        full_env.extend(env.0.clone());
        let in_shell = |shell: &str, line: &String| vec![shell.into(), "-c".into(), line.clone()];
        let cell = self.cell(&sandbox);
        let started = match command {
            Command::Shell(line) => cell.command(in_shell(SHELL, line), full_env).await,
            Command::Argv(argv) => cell.command(argv.clone(), full_env).await,
            Command::Bash(line) => match cell.command(in_shell(BASH, line), full_env.clone()).await {
                Err(refused) if refused.failure == GuestFailure::NotFound => {
                    cell.command(in_shell(SHELL, line), full_env).await
                }
                started => started,
            },
        };
        let mut report = match started {
            Ok(report) => report,
            Err(refused) => return self.not_started(refused, command).await,
        };
        let end = match report.outcome() {
            RunOutcome::Ended { how: Ended::Exited { code: 0 } } => RunOutcome::Ok,
            RunOutcome::Ended { how: Ended::Exited { code } } => RunOutcome::Exit { code },
            // A command has no variables to lose.
            RunOutcome::TimedOut { after, .. } => RunOutcome::TimedOut { after, state_kept: true },
            RunOutcome::Cancelled { .. } => RunOutcome::Cancelled { state_kept: true },
            end => end,
        };
        Ok(self.finish(report, end, &sandbox, oom_kills, None).await)
    }

    /// Returns the result of a command that could not be started. As in a shell, this is a result and not an error.
    async fn not_started(&self, refused: StartRefused, command: &Command) -> Result<Ran, EngineError> {
        let program = match command {
            Command::Shell(_) => SHELL,
            Command::Bash(_) => BASH,
            Command::Argv(argv) => argv.first().map_or("", String::as_str),
        };
        let (code, text) = match refused.failure {
            GuestFailure::NotFound => (NOT_FOUND, format!("{program}: command not found\n")),
            GuestFailure::Io => (NOT_EXECUTABLE, format!("{}\n", refused.why)),
            GuestFailure::Busy => {
                return Err(EngineError::OverLimit {
                    what: LimitKind::CommandsAtOnce,
                    limit: MAX_COMMANDS.to_string(),
                });
            }
            _ => return Err(refused.into()),
        };
        let stderr = Captured { total_bytes: text.len() as u64, text, ..Captured::default() };
        let ran = Ran::empty(self.context.info(), RunOutcome::Exit { code });
        Ok(Ran { stderr, notice: self.context.state.lock().await.take_notice(None), ..ran })
    }
}
