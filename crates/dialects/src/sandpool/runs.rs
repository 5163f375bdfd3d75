//! The tools that run code or commands. They answer with one kind of object, whether the run was answered at once or
//! continues in the background.

use std::time::Duration;

use engine::op::{
    Command, ContextInfo, Ended, EngineError, Environment, Language, MimeBundle, Network, Ran, RunCode, RunCommand,
    RunInfo, RunOutcome, RunProgress, SharedVolume, Waiting,
};
use serde_json::Value;
use text::{cut, plain, unfinished};

use super::answer::{answer, bounded};
use super::errors::{disk_full, ends, refusal, sentence};
use super::files::OUTPUTS;
use super::{DEFAULT_CONTEXT, network, target};
use crate::args::{Argument, Timeout, Whole, args, choices};
use crate::operation::{self, RunReply};
use crate::output::{output, unless_empty};
use crate::shared::add_lines;
use crate::shared::run::{RunWording, command_ending, ending, exit_code, picture, pictures, succeeded};
use crate::{Answer, ArgError, Block, FieldKind, Lowering, Options, RenderInput, Reply};

args! {
    struct RunCodeArgs {
        code: String,
        language: Option<CodeLanguage>,
        context: Option<String>,
        timeout: Option<RunTimeout>,
        env: Environment,
        network: Option<bool>,
        background: bool,
    }

    struct RunCommandArgs {
        command: String,
        context: Option<String>,
        timeout: Option<RunTimeout>,
        env: Environment,
        network: Option<bool>,
        background: bool,
    }

    struct WaitRunArgs { run: String, cursor: Option<Whole<0, { 1 << 52 }>>, wait: Option<Whole<0, LONGEST_WAIT>> }
    struct CancelRunArgs { run: String }
}

/// Time for a run, up to the longest time in the background.
struct RunTimeout(Timeout);

impl Argument for RunTimeout {
    const KIND: FieldKind = Timeout::KIND;
    const RANGE: Option<fn(&Options) -> String> =
        Some(|options| format!("1–{}; background 1–{}", options.max_timeout, options.max_background));

    fn parse(field: &str, value: &Value) -> Result<Self, ArgError> {
        Timeout::parse(field, value).map(Self)
    }
}

/// The language of the code. Code for a shell runs as a command does.
#[derive(Clone, Copy)]
enum CodeLanguage {
    Shell,
    Kernel(Language),
}

choices!(CodeLanguage {
    "python" => CodeLanguage::Kernel(Language::Python),
    "javascript" => CodeLanguage::Kernel(Language::Javascript),
    "typescript" => CodeLanguage::Kernel(Language::Typescript),
    "bash" => CodeLanguage::Shell,
});

/// Maximum wait of one `wait_run`, below the 60 s after which many clients give up.
const LONGEST_WAIT: u64 = 50;
const USUAL_WAIT: u64 = 20;

/// Maximum length of an error's value that its traceback repeats.
const LONG_VALUE: usize = 300;

pub(super) fn run_code(args: RunCodeArgs, options: &Options) -> Lowering {
    let RunCodeArgs { code, language, context, timeout, env, network, background } = args;
    let language = match language {
        Some(CodeLanguage::Shell) => {
            return run_command(RunCommandArgs { command: code, context, timeout, env, network, background }, options);
        }
        Some(CodeLanguage::Kernel(language)) => Some(language),
        None => None,
    };
    let run = RunCode {
        target: target(context),
        language,
        code,
        timeout: time(timeout, background, options)?,
        env,
        network: Network::asked(network),
        background,
    };
    operation::start_code(run).answer(|input, reply| replied(input, reply, RunKind::Code))
}

pub(super) fn run_command(args: RunCommandArgs, options: &Options) -> Lowering {
    let run = RunCommand {
        target: target(args.context),
        language: None,
        command: Command::Bash(args.command),
        timeout: time(args.timeout, args.background, options)?,
        env: args.env,
        network: Network::asked(args.network),
        background: args.background,
    };
    operation::start_command(run).answer(|input, reply| replied(input, reply, RunKind::Command))
}

/// Returns the timeout. Nobody waits for a run in the background, so its default is the longest timeout.
fn time(asked: Option<RunTimeout>, background: bool, options: &Options) -> Result<Option<Duration>, ArgError> {
    let longest = if background { options.max_background } else { options.max_timeout };
    let asked = Timeout::up_to(asked.map(|timeout| timeout.0), longest);
    let asked = asked.map_err(|refused| match background || options.max_background <= options.max_timeout {
        true => refused,
        false => ArgError::new(format!("{}; background=true allows up to {}", refused.message, options.max_background)),
    })?;
    Ok(asked.or(background.then_some(Duration::from_secs(longest))))
}

pub(super) fn wait_run(args: WaitRunArgs, _: &Options) -> Lowering {
    let wait = Duration::from_secs(args.wait.map_or(USUAL_WAIT, |wait| wait.0));
    let cursor = args.cursor.map_or(0, |cursor| cursor.0);
    operation::wait_run(args.run, Some(cursor), wait).answer(move |input, run| progress(input, run, cursor))
}

pub(super) fn cancel_run(args: CancelRunArgs, _: &Options) -> Lowering {
    operation::cancel_run(args.run).answer(|_, (run, was_running)| Answer::compact(&Cancelled { run, was_running }))
}

output! {
    /// The answer of every tool that runs something. Clients of older servers read the first four members.
    #[derive(Default)]
    struct Run {
        stdout: Option<String>,
        stderr: Option<String>,
        success: Option<bool>,
        /// In seconds.
        execution_time: Option<f64>,
        /// How it ended, or that it has not ended; absent after a success.
        status: Option<&'static str>,
        /// Exit status other than 0.
        exit_code: Option<i32>,
        /// The last value of the cell.
        result: Option<String>,
        error: Option<ErrorOutput>,
        displays: Option<Vec<Display>>,
        /// Output of processes, threads and timers that earlier calls left behind.
        late_output: Option<String>,
        truncated: Option<Vec<CutStream>>,
        /// Denials of the network.
        denied: Option<Vec<String>>,
        /// Whether variables were kept; present only if they could have been lost.
        variables_kept: Option<bool>,
        note: Option<String>,
        /// Id of the context, unless it is the default one.
        context: Option<String>,
        /// Whether this call created the context.
        context_created: Option<bool>,
        run: Option<String>,
        /// Both streams since the requested cursor, for a client that follows the run.
        output: Option<String>,
        cursor: Option<u64>,
    }

    struct ErrorOutput { name: String, value: String, traceback: String }
    struct Display {
        /// Type of the text, if it is not plain.
        kind as "type": Option<&'static str>,
        text: String,
    }

    /// Describes a stream of which only the head and the tail are shown.
    struct CutStream {
        stream: &'static str,
        bytes: u64,
        /// Path of the whole stream for `read_file`, valid for an hour.
        path: Option<String>,
        /// Address of the whole stream.
        url: Option<String>,
    }

    struct Cancelled { run: String, was_running: bool }
}

/// Returns the output that arrived late. Threads and timers say which call they belong to; processes do not.
fn late(ran: &Ran) -> Option<String> {
    let texts: Vec<&str> = ran.late.iter().chain(&ran.strays).map(String::as_str).collect();
    (!texts.is_empty()).then(|| plain(&texts.concat()).into_owned())
}

/// What was run, as far as the answer depends on it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RunKind {
    Code,
    Command,
}

fn replied(input: &RenderInput<'_>, reply: RunReply, what: RunKind) -> Answer {
    match reply {
        RunReply::Ended(ran) => ended(input, *ran, what, RunOrigin::Call),
        RunReply::Started(started) => begun(input, *started),
    }
}

/// Renders a background run for a client that has read its output up to `cursor`. What it has read is not sent again.
fn progress(input: &RenderInput<'_>, mut progress: RunProgress, cursor: u64) -> Answer {
    let what = if progress.command { RunKind::Command } else { RunKind::Code };
    match progress.end.take() {
        Some(Ok(ran)) => {
            let read = (cursor > 0).then_some((progress.output, progress.dropped));
            ended(input, *ran, what, RunOrigin::Background { read })
        }
        Some(Err(error)) => not_run(&error),
        None => goes_on(input, progress),
    }
}

/// How a client learns of the end of a run.
enum RunOrigin {
    /// It waited for it.
    Call,
    /// It followed the run. If it has read a part of the output, `read` has the rest, and how much is missing before it.
    Background { read: Option<(String, u64)> },
}

/// Says that there was more output than is stored.
fn missing(bytes: u64) -> Option<String> {
    (bytes > 0).then(|| format!("{bytes} bytes before this output are left out."))
}

/// Renders an error if the run did not take place or if its outcome is gone. The answer is the same object, for clients
/// that read only its members.
pub(super) fn error(input: &RenderInput<'_>, error: &EngineError) -> Reply {
    match error {
        EngineError::InvalidEnvironment(why) => refusal(input, &ArgError::new(format!("env is refused: {why}"))),
        other => not_run(other).into(),
    }
}

fn not_run(error: &EngineError) -> Answer {
    let object = Run {
        stdout: Some(String::new()),
        stderr: Some(String::new()),
        success: Some(false),
        status: Some(if matches!(error, EngineError::ResultDropped(_)) { "result_dropped" } else { "not_run" }),
        note: Some(bounded(&sentence(error))),
        ..Run::default()
    };
    Answer::compact(&object).unsuccessful()
}

fn begun(input: &RenderInput<'_>, started: RunInfo) -> Answer {
    let waits = started.queued.as_ref().map(|waiting| format!("{} ", waits(waiting))).unwrap_or_default();
    let object = Run {
        status: Some(if started.queued.is_some() { "queued" } else { "running" }),
        run: Some(started.run),
        note: Some(format!("{waits}wait_run returns its output and result; cancel_run stops it.")),
        context: named(started.context),
        context_created: started.created.then_some(true),
        ..Run::default()
    };
    run_answer(input, object)
}

fn run_answer(input: &RenderInput<'_>, run: Run) -> Answer {
    let advice = "Write long output and values to a file, and read that in parts with read_file.";
    answer(input, run, |run| &mut run.note, advice)
}

/// Returns the id of a context other than the default one, which a call need not name.
fn named(context: ContextInfo) -> Option<String> {
    (context.name != DEFAULT_CONTEXT).then_some(context.id)
}

/// Says what a background run waits for.
fn waits(waiting: &Waiting) -> String {
    match waiting {
        Waiting::Run { run, .. } => format!("It waits: {waiting} ({}).", ends(run)),
        other => format!("It waits: {other}."),
    }
}

fn goes_on(input: &RenderInput<'_>, progress: RunProgress) -> Answer {
    let waits = progress.queued.as_ref().map(waits);
    // The next call reads an unfinished escape sequence together with its end.
    let unread = unfinished(&progress.output);
    let output = &progress.output[..progress.output.len() - unread];
    let object = Run {
        status: Some(if waits.is_some() { "queued" } else { "running" }),
        note: waits.or_else(|| missing(progress.dropped)),
        output: Some(plain(output).into_owned()),
        cursor: Some(progress.cursor.saturating_sub(unread as u64)),
        ..Run::default()
    };
    run_answer(input, object)
}

fn ended(input: &RenderInput<'_>, mut ran: Ran, what: RunKind, origin: RunOrigin) -> Answer {
    let success = match what {
        RunKind::Code => succeeded(&ran.end),
        RunKind::Command => exit_code(&ran.end) == 0,
    };
    for bundle in ran.displays.iter_mut().chain(&mut ran.value) {
        if let Some(drawn) = bundle.remove(SVG_PICTURE) {
            bundle.entry("image/png".into()).or_insert(drawn);
        }
    }
    let pictures = pictures(&ran);
    let truncated = cuts(input, &ran);
    let links = pages(input, &ran);
    let mut note = note(&ran, what, matches!(origin, RunOrigin::Background { .. }));
    if network::off(&ran).is_some() {
        ran.stderr.text = network::without_pip_note(&ran.stderr.text);
    }
    let denied = std::mem::take(&mut ran.denied);
    let brief = |text: String| network::shortened(plain(&text).into_owned(), &denied);
    let late_output = late(&ran);
    let (stdout, stderr, output) = match origin {
        RunOrigin::Background { read: Some((rest, dropped)) } => {
            note = note.or_else(|| missing(dropped));
            (None, None, Some(brief(rest)).filter(|rest| !rest.is_empty()))
        }
        RunOrigin::Background { read: None } | RunOrigin::Call => {
            (Some(brief(ran.stdout.text)), Some(brief(ran.stderr.text)), None)
        }
    };
    let object = Run {
        success: Some(success),
        execution_time: Some((ran.duration.as_secs_f64() * 1e3).round() / 1e3),
        status: Some(status(&ran.end)).filter(|status| *status != "ok"),
        exit_code: status_code(&ran.end, what).filter(|code| *code != 0),
        result: ran.value.as_ref().and_then(readable).map(|(_, text)| brief(text)),
        displays: unless_empty(displays(&ran.displays)),
        variables_kept: if what == RunKind::Code { variables_kept(&ran.end) } else { None },
        late_output,
        error: ran.error.map(|error| {
            // The end of a traceback repeats the value.
            let most = if error.text.contains(&error.value) { LONG_VALUE } else { usize::MAX };
            ErrorOutput { name: error.name, value: cut(&brief(error.value), most), traceback: brief(error.text) }
        }),
        truncated: unless_empty(truncated),
        note,
        context: named(ran.context),
        context_created: ran.created.then_some(true),
        run: None,
        stdout,
        stderr,
        output,
        denied: unless_empty(denied),
        cursor: None,
    };
    let mut answer = run_answer(input, object);
    answer.blocks.extend(pictures);
    answer.blocks.extend(links);
    if success { answer } else { answer.unsuccessful() }
}

fn status(end: &RunOutcome) -> &'static str {
    match end {
        RunOutcome::Ok | RunOutcome::Exit { code: 0 } => "ok",
        RunOutcome::Error => "error",
        RunOutcome::Exit { .. } | RunOutcome::Ended { how: Ended::Exited { .. } } => "exited",
        RunOutcome::Ended { how: Ended::Signaled { .. } } => "crashed",
        RunOutcome::TimedOut { .. } => "timed_out",
        RunOutcome::Cancelled { .. } => "cancelled",
        RunOutcome::Interrupted => "interrupted",
        RunOutcome::OutOfMemory { .. } | RunOutcome::SandboxOutOfMemory { .. } => "out_of_memory",
        RunOutcome::SandboxLost { .. } => "lost",
    }
}

/// Returns the exit status: of every command that had one, and of code only if it ended by exiting.
fn status_code(end: &RunOutcome, what: RunKind) -> Option<i32> {
    match end {
        RunOutcome::Exit { code } | RunOutcome::Ended { how: Ended::Exited { code } } => Some(*code),
        RunOutcome::SandboxLost { .. } => None,
        other => (what == RunKind::Command).then(|| exit_code(other)),
    }
}

fn variables_kept(end: &RunOutcome) -> Option<bool> {
    match end {
        RunOutcome::Ok | RunOutcome::Error => None,
        RunOutcome::Exit { .. } | RunOutcome::Interrupted => Some(true),
        RunOutcome::TimedOut { state_kept, .. } | RunOutcome::Cancelled { state_kept } => Some(*state_kept),
        RunOutcome::OutOfMemory { .. }
        | RunOutcome::SandboxOutOfMemory { .. }
        | RunOutcome::Ended { .. }
        | RunOutcome::SandboxLost { .. } => Some(false),
    }
}

const WORDING: RunWording =
    RunWording { context: "context", retry: "with context left out, or in a new one made with create_context" };

/// Returns what was lost before the run, how the run ended if that needs an explanation, and what to do next.
fn note(ran: &Ran, what: RunKind, in_background: bool) -> Option<String> {
    let mut note = ran.notice.clone().unwrap_or_default();
    let ending = match what {
        RunKind::Code => ending(&ran.end, &WORDING),
        RunKind::Command => command_ending(&ran.end, &WORDING),
    };
    if let Some(mut sentence) = ending {
        if matches!(ran.end, RunOutcome::TimedOut { .. }) && !in_background {
            sentence.push_str(" Or give it a longer timeout with background=true and poll with wait_run.");
        }
        add_lines(&mut note, &sentence);
    }
    if ran.misses_earlier {
        add_lines(&mut note, &what_is_new(&ran.context, ran.created));
    }
    if is_disk_full(ran) {
        let mut sentence = disk_full(ran.context.limits.disk_bytes);
        if ran.context.mounts.iter().any(|mount| !mount.read_only) {
            sentence.push_str(" A mounted directory has what is free on the host.");
        }
        add_lines(&mut note, &sentence);
    }
    if let Some(sentence) = network::off(ran) {
        add_lines(&mut note, &sentence);
    }
    let note = note.trim_end();
    (!note.is_empty()).then(|| note.to_owned())
}

/// Says what a new context does not have, for a model that remembers an earlier one.
fn what_is_new(context: &ContextInfo, created: bool) -> String {
    let kept = |mount: &SharedVolume| (!mount.read_only).then(|| mount.inside.display().to_string());
    let kept: Vec<String> = context.mounts.iter().filter_map(kept).collect();
    let made = match created {
        true => "This call made the context: it has no variables",
        false => "A recent call made the context anew: it has no variables",
    };
    match kept.join(", ").as_str() {
        "" => format!("{made}, packages or files of earlier calls."),
        kept => format!("{made} of earlier calls, but their files in {kept}."),
    }
}

/// Returns whether a run that failed says that it found no space.
fn is_disk_full(ran: &Ran) -> bool {
    const SAYS: [&str; 2] = ["No space left on device", "ENOSPC: no space"];
    let texts = [ran.error.as_ref().map(|error| &error.value), Some(&ran.stderr.text)];
    !matches!(ran.end, RunOutcome::Ok)
        && texts.into_iter().flatten().any(|text| SAYS.iter().any(|says| text.contains(says)))
}

/// Returns the readable form of a bundle that is not a picture: its text if that says something, otherwise its source.
fn readable(bundle: &MimeBundle) -> Option<(&'static str, String)> {
    const RICH: [&str; 5] = ["text/html", "image/svg+xml", "text/markdown", "text/latex", "application/json"];
    if picture(bundle).is_some() {
        return None;
    }
    let text = |mime: &'static str| match bundle.get(mime)? {
        Value::String(text) => Some((mime, text.clone())),
        other => Some((mime, other.to_string())),
    };
    let plain = text(PLAIN);
    // A text such as `<IPython.core.display.HTML object>` is only the name of an object.
    let is_name = |text: &str| text.starts_with('<') && text.ends_with('>') && !text.contains('\n');
    match plain {
        Some((_, ref shown)) if !is_name(shown) => plain,
        _ => RICH.into_iter().find_map(text).or(plain),
    }
}

const PLAIN: &str = "text/plain";
/// Type under which a kernel sends the picture of an SVG drawing, and type of the name of a chart's page in `/workspace`.
const SVG_PICTURE: &str = "image/png;from=svg";
const PAGE: &str = "application/vnd.sandpool.page";

/// Returns links to the pages of the charts that were shown.
fn pages(input: &RenderInput<'_>, ran: &Ran) -> Vec<Block> {
    let names = ran.displays.iter().chain(&ran.value).filter_map(|bundle| bundle.get(PAGE)?.as_str());
    names.filter_map(|name| input.link(&ran.context.key, name, None)).collect()
}

fn displays(bundles: &[MimeBundle]) -> Vec<Display> {
    let display = |(mime, text): (&'static str, String)| match mime {
        PLAIN => Display { kind: None, text: plain(&text).into_owned() },
        mime => Display { kind: Some(mime), text },
    };
    bundles.iter().filter_map(readable).map(display).collect()
}

/// Returns the streams of which a part is left out, and where their kept output is.
fn cuts(input: &RenderInput<'_>, ran: &Ran) -> Vec<CutStream> {
    let cut = [("stdout", &ran.stdout), ("stderr", &ran.stderr)].into_iter().filter(|(_, stream)| stream.truncated);
    cut.map(|(stream, captured)| {
        let kept = captured.kept.as_ref();
        let path = kept.map(|kept| format!("{OUTPUTS}/{}", kept.name));
        let url = kept.and_then(|kept| input.links.to(&kept.key, &kept.name));
        CutStream { stream, bytes: captured.total_bytes, path, url }
    })
    .collect()
}
