//! The command line, with one file for each command. Arguments are parsed first, then the configuration is loaded, and
//! then the command runs.

mod admin;
mod config;
mod doctor;
mod file_secret;
mod flags;
mod journal;
mod network;
mod otel;
mod output;
mod prepare;
mod reload;
mod run;
mod serve;
mod setup;
mod signals;
mod stdio;
mod wiring;
mod workspace;

use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use runtimes::HostEnvironment;
use telemetry::logging::{self, LogFormat};
use telemetry::otel::Otel;
use tokio::runtime::Builder;

use self::flags::Flags;
pub(crate) use self::reload::Reloader;
use crate::config::{Config, Environment, Sources};

/// Runs AI agents' code in kernel sandboxes, over the Model Context Protocol.
#[derive(Debug, Parser)]
#[command(name = "sandpool", version, max_term_width = 110, propagate_version = true)]
#[command(
    after_help = "Each setting can also be set in `sandpool.toml`, and those with `env` in the environment. `sandpool config` prints each \
                        value and its source.\nOn a new machine, `sandpool doctor` reports what the machine can do, and `sandpool setup` \
                        prepares the languages."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    flags: Flags,
}

#[derive(Debug, Subcommand)]
enum Command {
    Stdio(stdio::Args),
    Serve(serve::Args),
    Run(run::Args),
    Doctor(doctor::Args),
    Setup(setup::Args),
    Config(config::Args),
    Journal(journal::Args),
    Workspace(workspace::Args),
    Admin(admin::Args),
}

/// The configuration and the environment that every command gets.
#[derive(Clone)]
struct CommandEnv {
    config: Config,
    /// The sources of the configuration, from which it can be loaded again.
    sources: Arc<Sources>,
    environment: HostEnvironment,
    /// The export to OpenTelemetry, for commands that serve.
    otel: Option<Otel>,
}

/// The failure of a command, which is shown as one line on stderr.
#[derive(Debug)]
struct Failed(String);

impl<E: std::error::Error> From<E> for Failed {
    fn from(error: E) -> Self {
        let mut text = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            let cause_text = cause.to_string();
            // Some errors already contain the text of their causes.
            if !text.ends_with(&cause_text) {
                text.push_str(&format!(": {cause_text}"));
            }
            source = cause.source();
        }
        Self(text)
    }
}

type CommandResult = Result<ExitCode, Failed>;

pub fn main() -> ExitCode {
    let cli = match Cli::command().try_get_matches().and_then(|matches| Cli::from_arg_matches(&matches)) {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    dispatch(cli).unwrap_or_else(|Failed(why)| {
        output::error(&format!("error: {why}"));
        ExitCode::FAILURE
    })
}

fn dispatch(cli: Cli) -> CommandResult {
    let environment = Environment::of_process();
    let sources = Sources { environment, flags: cli.flags.given, is_root: rustix::process::geteuid().is_root() };
    let config = Config::load(&sources)?;
    let serves = matches!(cli.command, Command::Stdio(_) | Command::Serve(_));
    let default_filter = if serves { "info" } else { "warn" };
    let colour = std::io::stderr().is_terminal() && sources.environment.get("NO_COLOR").is_none();
    let format = if config.log_json { LogFormat::Json } else { LogFormat::Human };
    let otel = config.telemetry.export.clone().filter(|_| serves).map(Otel::new);
    logging::start(config.log.as_deref().unwrap_or(default_filter), format, colour, otel.as_ref())?;
    for (name, nearest) in Environment::misspelt() {
        tracing::warn!("`{name}` is set, and there is no such variable; did you mean `{nearest}`?");
    }
    for warning in config.telemetry.warnings.iter().filter(|_| serves) {
        tracing::warn!("{warning}");
    }
    for (name, instead) in Environment::without_effect().into_iter().filter(|_| serves) {
        tracing::warn!("`{name}` is set, and has no effect here: {instead}");
    }
    let mounts = config.mounts.iter().map(|mount| &mount.volume);
    let shared = mounts.chain(config.dialects.microsandbox.volumes.iter().map(|shared| &shared.volume));
    let environment = sources.environment.for_runtimes(shared);
    let context = CommandEnv { config, sources: Arc::new(sources), environment, otel };
    match cli.command {
        Command::Stdio(args) => stdio::main(args, context),
        Command::Serve(args) => serve::main(args, context),
        Command::Run(args) => run::main(args, context),
        Command::Doctor(args) => doctor::main(args, context),
        Command::Setup(args) => setup::main(args, context),
        Command::Config(args) => config::main(args, &context),
        Command::Journal(args) => journal::main(args, &context),
        Command::Workspace(args) => workspace::main(args, &context),
        Command::Admin(args) => admin::main(args, &context),
    }
}

/// Runs `work` on several threads. They start only here, because the launcher has to be started before there are
/// threads. There are few workers, because the cores are for the interpreters: one worker keeps several interpreters
/// busy, and work that stays on one thread wakes no other.
fn block_on<T>(work: impl Future<Output = Result<T, Failed>>) -> Result<T, Failed> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    drive(Builder::new_multi_thread().worker_threads((cores / CORES_PER_WORKER).max(1)), work)
}

/// Runs `work` for a single client on this thread, so that no step of a call waits for another thread to wake up.
fn block_on_here<T>(work: impl Future<Output = Result<T, Failed>>) -> Result<T, Failed> {
    drive(&mut Builder::new_current_thread(), work)
}

const CORES_PER_WORKER: usize = 4;

fn drive<T>(runtime: &mut Builder, work: impl Future<Output = Result<T, Failed>>) -> Result<T, Failed> {
    logging::detach();
    let runtime = runtime.enable_all().build()?;
    let result = runtime.block_on(work);
    logging::finish();
    // A blocking read of stdin cannot be cancelled, so the shutdown does not wait for it.
    runtime.shutdown_background();
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_flag_may_stand_before_or_after_the_command() {
        for line in [["sandpool", "--log", "debug", "config"], ["sandpool", "config", "--log", "debug"]] {
            let cli = Cli::try_parse_from(line).unwrap();
            assert_eq!(cli.flags.given, [("log", "debug".to_owned())]);
        }
    }
}
