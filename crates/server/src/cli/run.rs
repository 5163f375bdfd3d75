//! `sandpool run` runs one program in a fresh sandbox, prints its output as it arrives, and reports success in the exit
//! code.

mod files;
mod program;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use engine::op::{
    ContextSelector, Ended, Environment, FileOwner, Language, MimeBundle, Network, NewContext, Ran, RunCode,
    RunCommand, RunOutcome, Stream, Target,
};
use engine::{Call, Engine, Event, EventSink, Op, Outcome, Tenant, WORKSPACE};
use runtimes::{Progress, RuntimeConfig};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use self::files::{Destination, GivenFiles, MAX_GIVEN};
use self::program::{Program, ProgramLanguage, STDIN};
use super::file_secret::file_secret;
use super::signals::Signals;
use super::wiring::{self, Native, TransportKind};
use super::{CommandEnv, CommandResult, Failed, block_on, network, output};
use crate::config::{ALL_TENANTS, Config, MountConfig};

/// Run code in a sandbox
///
/// The exit code is 0 on success, 1 after an uncaught error, the argument of exit() if the code called it, 124 after a timeout, 130
/// after an interrupt, and 137 if the memory ran out. With FILE or -c, the code can read the standard input of this command, unless
/// that is a terminal. The code sees none of your files, except those that --file, --mount and --workspace give it.
#[derive(Debug, clap::Args)]
#[command(override_usage = "sandpool run [OPTIONS] [FILE | -c CODE | -] [-- ARGUMENT...]")]
pub(crate) struct Args {
    /// File to run; with `-` or no file, the code is read from standard input
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
    /// Code to run
    #[arg(short = 'c', value_name = "CODE", conflicts_with = "file", allow_hyphen_values = true)]
    code: Option<String>,
    /// Language: `python`, `javascript`, `typescript` or `bash` [default: by the file's extension, else Python]
    #[arg(long, short = 'l', value_name = "LANGUAGE", value_parser = ProgramLanguage::parse)]
    language: Option<ProgramLanguage>,
    /// Time limit in seconds [default: `timeout` of the dialect, 60 for `sandpool`]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    timeout: Option<Duration>,
    /// Save the pictures that the code displays (PNG, JPEG, SVG, PDF) in this directory
    #[arg(long, value_name = "DIR")]
    save: Option<PathBuf>,
    /// Copy this file into the code's directory before the code runs; can be repeated
    #[arg(long = "file", value_name = "IN")]
    files: Vec<PathBuf>,
    /// Copy new and changed files from the code's directory to this one afterwards; existing files are not replaced
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Arguments of the code: `sys.argv[1:]`, `process.argv.slice(2)`, `"$@"`
    #[arg(last = true, value_name = "ARGUMENT")]
    args: Vec<String>,
}

/// Maximum length of each stream. The middle of a longer stream is left out.
const TEXT_BUDGET: usize = 64 << 20;
/// Maximum number of events that wait for the terminal. Further ones are dropped, so that a slow terminal never slows
/// down the cell.
const EVENTS: usize = 1 << 16;

pub(crate) fn main(args: Args, context: CommandEnv) -> CommandResult {
    let program = Program::read(args.code.as_deref(), args.file.as_deref(), args.language, &args.args)?;
    let workspace = workspace(&context.config);
    let given = files::given(&args.files, workspace)?;
    if program.stdin.is_some() {
        files::check_stdin(workspace)?;
    }
    let native = Native::launch(&context.config, TransportKind::Stdio)?;
    // After the launcher has started, which must not have these directories open.
    let open =
        |dir: &Option<PathBuf>| dir.as_deref().map(|dir| Destination::open(dir, &context.environment)).transpose();
    let (save, out) = (open(&args.save)?, open(&args.out)?);
    let job = Job { program, given, timeout: args.timeout, out };
    block_on(run(job, save, context, native))
}

/// Returns the directory of this machine that is the workspace of the code, if there is one.
fn workspace(config: &Config) -> Option<&Path> {
    let is_local = |tenant: &String| tenant == ALL_TENANTS || *tenant == Tenant::local().0;
    let is_used = |mount: &&MountConfig| {
        mount.volume.inside == Path::new(WORKSPACE)
            && mount.dialects.contains(&config.dialect.as_str())
            && (mount.tenants.is_empty() || mount.tenants.iter().any(is_local))
    };
    config.mounts.iter().find(is_used).map(|mount| mount.volume.host.as_path())
}

async fn run(job: Job, save: Option<Destination>, context: CommandEnv, native: Native) -> CommandResult {
    let signals = Signals::listen()?;
    let (progress, _watch) = Progress::new();
    let config = &context.config;
    let prepared = tokio::select! {
        prepared = runtimes::prepare(&config.runtimes, &context.environment, &progress) => prepared?,
        () = signals.first.cancelled() => return Ok(ExitCode::from(130)),
    };
    let language = job.program.language;
    if language.of_context() != Language::Python
        && let Err(why) = prepared.node
    {
        return Err(why.into());
    }
    let mut limits = engine::EngineConfig {
        // This command creates only one context.
        ready_max: 0,
        max_file_bytes: MAX_GIVEN,
        ..wiring::engine_config(config, TransportKind::Stdio, file_secret(config)?, network::egress(config)?)
    };
    if let Some(realm) = limits.realm_mut(limits.pool_realm) {
        // The one context of this command is an ordinary one, also in a dialect with conversations or shared volumes.
        (realm.pool_size, realm.text_budget, realm.kept, realm.volumes) = (0, TEXT_BUDGET, None, Vec::new());
        realm.persist = None;
        // The user of the command line is the operator and may allow more time than clients have.
        realm.max_timeout = realm.max_timeout.max(job.timeout.unwrap_or_default());
        realm.max_command_timeout = realm.max_command_timeout.max(job.timeout.unwrap_or_default());
    }
    // `sandpool doctor` says what is missing; a warning at each run would only be noise in the output of the code.
    let engine = Engine::new(limits, native.start_quietly().await?.0);
    let work = async {
        // Importing all libraries is not worthwhile for one cell.
        let cold = RuntimeConfig { warm: false, ..config.runtimes.clone() };
        engine.start_pool(prepared.kernels(&cold, None), &|_| {}).await?;
        job.run(&engine, &signals.first).await
    };
    let result = tokio::select! {
        result = work => result,
        () = signals.second.cancelled() => Err(Failed("interrupted".into())),
    };
    engine.shutdown(Duration::ZERO).await;
    let ran = result?;
    show(&ran, language);
    save_pictures(&ran, save.as_ref())?;
    Ok(ExitCode::from(exit_code(&ran.end)))
}

/// What the command does with its one context.
struct Job {
    program: Program,
    given: GivenFiles,
    timeout: Option<Duration>,
    /// Directory for the files that the code left.
    out: Option<Destination>,
}

impl Job {
    async fn run(&self, engine: &Engine, interrupt: &CancellationToken) -> Result<Ran, Failed> {
        let quiet = Call { cancel: interrupt.clone(), ..wiring::call_of(Tenant::local(), engine.config().pool_realm) };
        let create = Op::CreateContext(NewContext::named("run", self.program.language.of_context()));
        let Outcome::Created(made) = engine.execute(&quiet, create).await? else {
            return Err(Failed("the engine created no context".into()));
        };
        let target = Target::existing(ContextSelector::Id(made.id));
        let owner = FileOwner::workspace(target.clone());
        files::give(engine, &quiet, &owner, &self.given).await?;
        if let Some(stdin) = &self.program.stdin {
            files::give(engine, &quiet, &owner, &[(STDIN.to_owned(), stdin.clone())].into()).await?;
        }
        if let Some(cell) = self.program.preparation() {
            let prepared = execute(engine, &quiet, Op::RunCode(RunCode::new(target.clone(), cell))).await?;
            if prepared.end != RunOutcome::Ok {
                let why = prepared.error.map_or_else(|| format!("{:?}", prepared.end), |error| error.value);
                return Err(Failed(format!("the arguments and the standard input could not be passed: {why}")));
            }
        }
        let ran = self.shown(engine, interrupt, target).await?;
        if let Some(out) = &self.out {
            // After an interrupt the files are still wanted.
            let call = wiring::call_of(Tenant::local(), engine.config().pool_realm);
            let config = engine.config();
            let disk_bytes = config.realm(config.pool_realm).map_or(0, |realm| realm.limits.disk_bytes);
            files::save(engine, &call, &owner, &self.given, (out, disk_bytes)).await?;
        }
        Ok(ran)
    }

    /// Runs the program and prints its output as it arrives.
    async fn shown(&self, engine: &Engine, interrupt: &CancellationToken, target: Target) -> Result<Ran, Failed> {
        let (sender, mut events) = mpsc::channel(EVENTS);
        let call = Call {
            cancel: interrupt.clone(),
            events: EventSink(Some(sender)),
            ..wiring::call_of(Tenant::local(), engine.config().pool_realm)
        };
        // Printing runs on a separate thread, because the terminal may be slow.
        let printing = tokio::task::spawn_blocking(move || {
            let mut printed = [0u64; 2];
            while let Some(event) = events.blocking_recv() {
                if let Event::Output { stream, text } = event {
                    output::raw(stream == Stream::Stderr, &text);
                    printed[usize::from(stream == Stream::Stderr)] += text.len() as u64;
                }
            }
            printed
        });
        let op = match self.program.command() {
            Some(command) => Op::RunCommand(RunCommand {
                target,
                language: None,
                command,
                timeout: self.timeout,
                env: Environment::default(),
                network: Network::Usual,
                background: false,
            }),
            None => Op::RunCode(RunCode { timeout: self.timeout, ..RunCode::new(target, self.program.code.clone()) }),
        };
        let ran = execute(engine, &call, op).await;
        drop(call);
        let printed = printing.await?;
        let ran = ran?;
        for (captured, printed) in [&ran.stdout, &ran.stderr].into_iter().zip(printed) {
            if captured.total_bytes > printed {
                output::error(&format!("sandpool: {} bytes of output were left out", captured.total_bytes - printed));
            }
        }
        Ok(ran)
    }
}

async fn execute(engine: &Engine, call: &Call, run: Op) -> Result<Ran, Failed> {
    match engine.execute(call, run).await? {
        Outcome::Ran(ran) => Ok(*ran),
        _ => Err(Failed("the engine returned no result".into())),
    }
}

/// Prints everything that is not part of a stream: the last value, the error, and how the run ended.
fn show(ran: &Ran, language: ProgramLanguage) {
    if let Some(text) = ran.value.as_ref().and_then(|value| value.get("text/plain")).and_then(|text| text.as_str()) {
        output::line(text);
    }
    if let Some(error) = &ran.error {
        output::error(error.text.trim_end());
    }
    // The exit code of a command is also the exit code of this one.
    let exited =
        matches!(ran.end, RunOutcome::Ended { how: Ended::Exited { .. } }) && language == ProgramLanguage::Bash;
    if let Some(ending) = how_it_ended(&ran.end).filter(|_| !exited) {
        output::error(&format!("sandpool: {ending}"));
    }
}

/// Says how a run ended, unless the output of the code shows it already.
fn how_it_ended(end: &RunOutcome) -> Option<String> {
    Some(match end {
        RunOutcome::Ok | RunOutcome::Error | RunOutcome::Exit { .. } => return None,
        RunOutcome::TimedOut { after, .. } => format!("timed out after {} s", after.as_secs_f64()),
        RunOutcome::Cancelled { .. } | RunOutcome::Interrupted => "interrupted".into(),
        RunOutcome::OutOfMemory { limit_bytes: Some(bytes) } => {
            format!("killed: it needed more than {} MB of memory", bytes >> 20)
        }
        RunOutcome::SandboxOutOfMemory { limit_bytes } => {
            format!("killed: it needed more than {} MB of memory", limit_bytes >> 20)
        }
        RunOutcome::OutOfMemory { limit_bytes: None } => {
            "killed: the memory ran out outside of the sandbox, at a limit of the server or of the machine".into()
        }
        RunOutcome::Ended { how: Ended::Exited { code } } => format!("the interpreter ended with exit code {code}"),
        RunOutcome::Ended { how: Ended::Signaled { signal } } => {
            format!("the interpreter was ended by signal {signal}")
        }
        RunOutcome::SandboxLost { why } => format!("the sandbox was lost: {why}"),
    })
}

fn exit_code(end: &RunOutcome) -> u8 {
    let low = |code: i32| u8::try_from(code & 0xff).unwrap_or(1);
    match end {
        RunOutcome::Ok => 0,
        RunOutcome::Error | RunOutcome::SandboxLost { .. } => 1,
        RunOutcome::Exit { code } | RunOutcome::Ended { how: Ended::Exited { code } } => low(*code),
        RunOutcome::TimedOut { .. } => 124,
        RunOutcome::Cancelled { .. } | RunOutcome::Interrupted => 130,
        RunOutcome::OutOfMemory { .. } | RunOutcome::SandboxOutOfMemory { .. } => 137,
        RunOutcome::Ended { how: Ended::Signaled { signal } } => low(128 + signal),
    }
}

/// Saves pictures as files `figure-1.png`, …. Without a directory it only mentions them.
fn save_pictures(ran: &Ran, save: Option<&Destination>) -> Result<(), Failed> {
    let pictures: Vec<(&str, Vec<u8>)> = ran.displays.iter().chain(&ran.value).filter_map(picture).collect();
    let Some(dir) = save else {
        if !pictures.is_empty() {
            output::error(&format!("sandpool: {} picture(s) not saved; `--save DIR` saves them", pictures.len()));
        }
        return Ok(());
    };
    let mut numbered = pictures.iter().zip(1..);
    numbered.try_for_each(|((extension, bytes), number)| dir.replace(&format!("figure-{number}.{extension}"), bytes))
}

/// Returns the best picture of a display as its file extension and bytes.
fn picture(bundle: &MimeBundle) -> Option<(&'static str, Vec<u8>)> {
    let text = |mime: &str| bundle.get(mime).and_then(|value| value.as_str());
    let binary = |mime: &str| STANDARD.decode(text(mime)?).ok();
    binary("image/png")
        .map(|bytes| ("png", bytes))
        .or_else(|| Some(("jpg", binary("image/jpeg")?)))
        .or_else(|| Some(("pdf", binary("application/pdf")?)))
        .or_else(|| Some(("svg", text("image/svg+xml")?.as_bytes().to_vec())))
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.001..=86_400.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "give a number of seconds, up to 86400".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exit_code_tells_how_it_ended() {
        let after = Duration::from_secs(1);
        let cases = [
            (RunOutcome::Ok, 0),
            (RunOutcome::Error, 1),
            (RunOutcome::Exit { code: 7 }, 7),
            (RunOutcome::Exit { code: -1 }, 255),
            (RunOutcome::TimedOut { after, state_kept: true }, 124),
            (RunOutcome::Cancelled { state_kept: true }, 130),
            (RunOutcome::OutOfMemory { limit_bytes: None }, 137),
            (RunOutcome::Ended { how: Ended::Signaled { signal: 11 } }, 139),
        ];
        for (end, code) in cases {
            assert_eq!(exit_code(&end), code, "{end:?}");
        }
    }

    /// W45 of the hostile list.
    #[test]
    fn w45_a_memory_kill_names_the_limit_that_was_hit_or_none() {
        let said = |limit_bytes| how_it_ended(&RunOutcome::OutOfMemory { limit_bytes }).unwrap();
        assert_eq!(said(Some(250 << 20)), "killed: it needed more than 250 MB of memory");
        assert!(!said(None).contains("MB"), "{}", said(None));
    }

    #[test]
    fn a_picture_is_taken_in_its_best_form() {
        let bundle =
            |pairs: &[(&str, &str)]| pairs.iter().map(|(mime, value)| ((*mime).into(), (*value).into())).collect();
        assert_eq!(
            picture(&bundle(&[("image/svg+xml", "<svg/>"), ("image/png", "aGk=")])),
            Some(("png", b"hi".to_vec()))
        );
        assert_eq!(picture(&bundle(&[("image/svg+xml", "<svg/>")])), Some(("svg", b"<svg/>".to_vec())));
        assert_eq!(picture(&bundle(&[("text/plain", "x")])), None);
    }
}
