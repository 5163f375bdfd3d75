//! Runs a command in the sandbox of a context. It takes its turn among the runs of the context and sees their files.

use proto::{Ended, GuestFailure};

use super::OpContext;
use super::run_code::{Run, RunAttempt, RunInput};
use crate::cell::StartRefused;
use crate::context::ContextState;
use crate::op::{Call, Captured, Command, EngineError, Environment, Outcome, Ran, RunCommand, RunOutcome};

const SHELL: &str = "/bin/sh";
/// Exit statuses that a shell reports for a program that does not exist and for one that cannot be started.
const NOT_FOUND: i32 = 127;
const NOT_EXECUTABLE: i32 = 126;

impl OpContext {
    pub(super) async fn run_command(&self, call: &Call, run: RunCommand) -> Result<Outcome, EngineError> {
        let RunCommand { target, language, command, timeout, env, network, background } = run;
        self.check_wishes(&env, network)?;
        let mut target = target;
        if let (Some(make), Some(language)) = (&mut target.make, language) {
            make.language = language;
        }
        let entered = self.enter(call, target, None).await?;
        self.same_language(&entered, language)?;
        let run = Run { work: RunInput::Command(command), env, timeout, network, background };
        self.start(call, entered, run).await
    }
}

/// Returns a refusal for a command that no system can start. It is refused here because it cannot be sent to the guest.
fn unfit(command: &Command) -> Option<StartRefused> {
    let parts = match command {
        Command::Shell(line) => std::slice::from_ref(line),
        Command::Argv(argv) => argv,
    };
    if parts.first().is_none_or(String::is_empty) && matches!(command, Command::Argv(_)) {
        return Some(StartRefused { failure: GuestFailure::NotFound, why: String::new() });
    }
    let zero = parts.iter().any(|part| part.contains('\0'));
    zero.then(|| StartRefused { failure: GuestFailure::Io, why: "the command has a zero byte".into() })
}

impl RunAttempt<'_> {
    pub(super) async fn command(
        &self,
        home: &mut ContextState,
        command: &Command,
        env: &Environment,
    ) -> Result<Ran, EngineError> {
        let (world, context) = (self.world, self.context);
        let sandbox = world.move_in(context, home, None).await?;
        if self.call.cancel.is_cancelled() {
            return Err(EngineError::Cancelled);
        }
        if let Some(refused) = unfit(command) {
            return self.not_started(refused, command, home);
        }
        let mut whole = world.inner.provisioner()?.runtimes.command_env();
        whole.extend(world.inner.provisioner()?.env_of(&sandbox).await);
        whole.extend(env.0.clone());
        let argv = match command {
            Command::Shell(line) => vec![SHELL.into(), "-c".into(), line.clone()],
            Command::Argv(argv) => argv.clone(),
        };
        let cell = self.cell(&sandbox);
        let mut heard = match cell.command(argv, whole).await {
            Ok(heard) => heard,
            Err(refused) => return self.not_started(refused, command, home),
        };
        let end = match heard.outcome() {
            RunOutcome::Ended { how: Ended::Exited { code: 0 } } => RunOutcome::Ok,
            RunOutcome::Ended { how: Ended::Exited { code } } => RunOutcome::Exit { code },
            // A command has no variables to lose.
            RunOutcome::TimedOut { after, .. } => RunOutcome::TimedOut { after, state_kept: true },
            RunOutcome::Cancelled { .. } => RunOutcome::Cancelled { state_kept: true },
            end => end,
        };
        Ok(self.finish(heard, end, &sandbox, home, None).await)
    }

    /// Returns the result of a command that could not be started. As in a shell, this is a result and not an error.
    fn not_started(
        &self,
        refused: StartRefused,
        command: &Command,
        home: &mut ContextState,
    ) -> Result<Ran, EngineError> {
        let program = match command {
            Command::Shell(_) => SHELL,
            Command::Argv(argv) => argv.first().map_or("", String::as_str),
        };
        let (code, text) = match refused.failure {
            GuestFailure::NotFound => (NOT_FOUND, format!("{program}: command not found\n")),
            GuestFailure::Io => (NOT_EXECUTABLE, format!("{}\n", refused.why)),
            _ => return Err(refused.into()),
        };
        let stderr = Captured { total_bytes: text.len() as u64, text, ..Captured::default() };
        let ran = Ran::empty(self.context.info(), RunOutcome::Exit { code });
        Ok(Ran { stderr, notice: home.take_notice(None), ..ran })
    }
}
