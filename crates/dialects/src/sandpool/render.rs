//! Renders outcomes for agents: one object for every run, whether it was answered at once or continued in the
//! background.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use engine::op::{ContextInfo, Ended, EngineError, MimeBundle, Outcome, Ran, RunInfo, RunOutcome, RunProgress};
use serde::Serialize;
use serde_json::{Value, json};
use text::{clipped, shown};

use super::{directory, encoding, is_shell, lines};
use crate::shared::files::{Encoding, FILE_BUDGET, Listing};
use crate::shared::run::{
    PICTURE_BUDGET, RunWording, VISIBLE, add_denied, command_ending, ending, exit_code, picture, pictures, succeeded,
};
use crate::shared::schema::{array, boolean, integer, number, object, object_with, string};
use crate::shared::{TEXT_BUDGET, add_lines, moment, seconds};
use crate::{Answer, ArgError, Block, RenderInput, Reply, mime};

const INVALID_PARAMS: i32 = -32602;

pub(super) fn refusal(_: &RenderInput<'_>, refused: &ArgError) -> Reply {
    invalid(refused.message.clone())
}

fn invalid(message: String) -> Reply {
    Reply::Error { code: INVALID_PARAMS, message, data: None }
}

/// Renders a failure as a sentence in place of an object.
fn failure(sentence: String) -> Answer {
    let structured = json!({ "error": sentence });
    Answer { blocks: vec![Block::Text(sentence)], structured, ..Answer::default() }.failed()
}

/// Answers an outcome that does not belong to the operation. That is a defect of this server, and it is reported rather
/// than hidden.
pub(super) fn mismatch() -> Answer {
    failure("The engine gave another kind of answer than was asked for.".into())
}

pub(super) fn error(_: &RenderInput<'_>, error: &EngineError) -> Reply {
    failure(sentence(error)).into()
}

/// Says what happened and what to do next.
pub(super) fn sentence(error: &EngineError) -> String {
    use EngineError as E;
    match error {
        E::ContextNotFound(context) => format!(
            "There is no context {}: it was stopped, was idle for too long, or never existed. list_contexts shows those there \
             are; leave context out to use the default one, or make one with create_context.",
            shown(context)
        ),
        E::AmbiguousName { name, ids } => format!(
            "{} is the name of several contexts; pass one of the ids {} as context.",
            shown(name),
            ids.join(", ")
        ),
        E::ContextLimit(most) => {
            format!("There are {most} contexts already, which is the most; remove one with stop_context first.")
        }
        E::OverLimit { what, limit } => format!(
            "Over the limit {what} of {limit}; wait until other runs have ended, or remove contexts with stop_context."
        ),
        E::RunNotFound(run) => format!(
            "There is no run {}: results are kept for a while after the end, and only runs started with background=true have \
             one.",
            shown(run)
        ),
        E::NoBrowser(why) => {
            format!("There is no browser: {why}. Work without one: run_code and run_command are there.")
        }
        E::NetworkOff(why) => {
            format!("Network access is off: {why}. Leave network out, or ask the operator of this server for it.")
        }
        E::Busy(waited) => format!("The server was busy for {}; try again later.", seconds(*waited)),
        E::QueueFull(most) => format!("{most} runs wait for their turn already; try again later."),
        E::NotReady(why) => format!("The server is not ready: {why}. Try again in a moment."),
        E::ResultDropped(why) => format!(
            "It was done, but its result was dropped: {why}. Do not repeat it for its effects; print or read less at once."
        ),
        E::ShuttingDown => "The server is shutting down; try again later.".into(),
        E::CreateFailed(why) => format!("The context could not be made: {why}. Try again."),
        E::StopFailed(why) => format!("The context could not be stopped: {why}. Try again."),
        E::FileNotFound(path) => format!("There is no file {}; list_files shows what there is.", shown(path)),
        E::InvalidPath { path, why } => format!("The path {} is refused: {why}.", shown(path)),
        E::FileTooLarge { path, limit } => format!(
            "{} is over the limit of {limit} bytes for one call; read or write it in parts with run_code.",
            shown(path)
        ),
        E::NoSpace => "No space is left in the context; delete files with run_command first.".into(),
        E::Cancelled => "Cancelled by the client.".into(),
        E::Sandbox(why) => format!(
            "The sandbox failed: {why}. Whether variables were kept is unknown: try again, or make a new context with \
             create_context."
        ),
        other @ (E::NoCurrent { .. } | E::OtherLanguage { .. } | E::InUse(_) | E::InvalidEnvironment(_)) => {
            format!("The call failed: {other}.")
        }
    }
}

// ---- runs

/// The object of every tool that runs something. Clients of older servers read the first four members.
#[derive(Default, Serialize)]
struct Run {
    #[serde(skip_serializing_if = "Option::is_none")]
    stdout: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stderr: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    success: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    execution_time: Option<f64>,
    status: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    exit_code: Option<i32>,
    /// The last value of the cell.
    #[serde(skip_serializing_if = "Option::is_none")]
    result: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<ErrorOutput>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    displays: Vec<Display>,
    /// Output of processes, threads and timers that earlier calls left behind.
    #[serde(skip_serializing_if = "Option::is_none")]
    late_output: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    truncated: Vec<CutStream>,
    /// Denials of the network.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    denied: Vec<String>,
    /// Whether variables were kept; present only if they could have been lost.
    #[serde(skip_serializing_if = "Option::is_none")]
    variables_kept: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    context: Option<String>,
    /// Whether this call created the context.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    context_created: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    run: Option<String>,
    /// Both streams since the requested cursor, present while the run continues.
    #[serde(skip_serializing_if = "Option::is_none")]
    output: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cursor: Option<u64>,
}

#[derive(Serialize)]
struct ErrorOutput {
    name: String,
    value: String,
    traceback: String,
}

#[derive(Serialize)]
struct Display {
    r#type: &'static str,
    text: String,
}

/// A stream of which only the head and the tail are shown.
#[derive(Serialize)]
struct CutStream {
    stream: &'static str,
    bytes: u64,
    /// Address of the whole stream, valid for an hour.
    #[serde(skip_serializing_if = "Option::is_none")]
    url: Option<String>,
}

/// Returns the output that arrived late. Threads and timers say which call they belong to; processes do not.
fn late(ran: &Ran) -> Option<String> {
    let texts: Vec<&str> = ran.late.iter().chain(&ran.strays).map(String::as_str).collect();
    (!texts.is_empty()).then(|| clipped(&texts.concat(), TEXT_BUDGET).into_owned())
}

pub(super) fn run_schema() -> Value {
    let error = object(json!({ "name": string(), "value": string(), "traceback": string() }));
    let display = object(json!({ "type": string(), "text": string() }));
    let cut = object_with(json!({ "stream": string(), "bytes": integer(), "url": string() }), &["url"]);
    let members = json!({
        "stdout": string(),
        "stderr": string(),
        "success": boolean(),
        "execution_time": number(),
        "status": string(),
        "exit_code": integer(),
        "result": string(),
        "error": error,
        "displays": array(display),
        "late_output": string(),
        "truncated": array(cut),
        "denied": array(string()),
        "variables_kept": boolean(),
        "note": string(),
        "context": string(),
        "context_created": boolean(),
        "run": string(),
        "output": string(),
        "cursor": integer(),
    });
    let names: Vec<String> = members.as_object().into_iter().flat_map(|members| members.keys().cloned()).collect();
    let optional: Vec<&str> = names.iter().map(String::as_str).filter(|name| *name != "status").collect();
    object_with(members, &optional)
}

/// What was run, as far as its answer depends on it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RunKind {
    Code,
    Command,
}

pub(super) fn code(scene: &RenderInput<'_>, outcome: Outcome) -> Answer {
    run(scene, outcome, if is_shell(scene.args) { RunKind::Command } else { RunKind::Code })
}

pub(super) fn command(scene: &RenderInput<'_>, outcome: Outcome) -> Answer {
    run(scene, outcome, RunKind::Command)
}

fn run(scene: &RenderInput<'_>, outcome: Outcome, what: RunKind) -> Answer {
    match outcome {
        Outcome::Ran(ran) => ended(scene, *ran, what, None),
        Outcome::Started(started) => begun(started),
        _ => mismatch(),
    }
}

pub(super) fn progress(scene: &RenderInput<'_>, outcome: Outcome) -> Answer {
    let Outcome::Progress(progress) = outcome else { return mismatch() };
    let what = if progress.command { RunKind::Command } else { RunKind::Code };
    match progress.end {
        Some(Ok(ran)) => ended(scene, *ran, what, Some(progress.run)),
        Some(Err(error)) => not_run(&error, Some(progress.run)),
        None => goes_on(progress),
    }
}

/// Renders an error if the run did not take place or if its outcome is gone. The answer is the same object, for clients
/// that read only its members.
pub(super) fn run_error(_: &RenderInput<'_>, error: &EngineError) -> Reply {
    match error {
        EngineError::InvalidEnvironment(why) => invalid(format!("env is refused: {why}")),
        other => not_run(other, None).into(),
    }
}

fn not_run(error: &EngineError, run: Option<String>) -> Answer {
    let object = Run {
        stdout: Some(String::new()),
        stderr: Some(String::new()),
        success: Some(false),
        status: if matches!(error, EngineError::ResultDropped(_)) { "result_dropped" } else { "not_run" },
        note: Some(sentence(error)),
        run,
        ..Run::default()
    };
    Answer::json(&object).unsuccessful()
}

fn begun(started: RunInfo) -> Answer {
    Answer::json(&Run {
        status: "running",
        note: Some(format!("Call wait_run with run {} for its output and result; cancel_run stops it.", started.run)),
        context: Some(started.context.id),
        context_created: started.created,
        run: Some(started.run),
        ..Run::default()
    })
}

fn goes_on(progress: RunProgress) -> Answer {
    let mut note = String::from("It still runs: call wait_run again with this cursor.");
    if progress.dropped > 0 {
        note.push_str(&format!(" {} bytes before this output are left out.", progress.dropped));
    }
    Answer::json(&Run {
        status: "running",
        note: Some(note),
        context: Some(progress.context_id),
        run: Some(progress.run),
        output: Some(progress.output),
        cursor: Some(progress.cursor),
        ..Run::default()
    })
}

fn ended(scene: &RenderInput<'_>, mut ran: Ran, what: RunKind, run: Option<String>) -> Answer {
    let success = match what {
        RunKind::Code => succeeded(&ran.end),
        RunKind::Command => exit_code(&ran.end) == 0,
    };
    let pictures = pictures(&ran);
    let (truncated, links) = cuts(scene, &ran);
    let note = note(&ran, what, run.is_some());
    let mut stderr = std::mem::take(&mut ran.stderr.text);
    add_denied(&mut stderr, &ran);
    let object = Run {
        success: Some(success),
        execution_time: Some((ran.duration.as_secs_f64() * 1e6).round() / 1e6),
        status: status(&ran.end),
        exit_code: status_code(&ran.end, what),
        result: ran.value.as_ref().and_then(readable).map(|(_, text)| clipped(&text, TEXT_BUDGET).into_owned()),
        displays: displays(&ran.displays),
        variables_kept: if what == RunKind::Code { variables_kept(&ran.end) } else { None },
        late_output: late(&ran),
        error: ran.error.map(|error| ErrorOutput {
            name: error.name,
            value: clipped(&error.value, TEXT_BUDGET).into_owned(),
            traceback: clipped(&error.text, TEXT_BUDGET).into_owned(),
        }),
        truncated,
        denied: ran.denied,
        note,
        context: Some(ran.context.id),
        context_created: ran.created,
        run,
        stdout: Some(ran.stdout.text),
        stderr: Some(stderr),
        output: None,
        cursor: None,
    };
    let mut answer = Answer::json(&object);
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
        RunOutcome::OutOfMemory { .. } => "out_of_memory",
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
        RunOutcome::OutOfMemory { .. } | RunOutcome::Ended { .. } | RunOutcome::SandboxLost { .. } => Some(false),
    }
}

const WORDS: RunWording =
    RunWording { place: "context", anew: "with context left out, or in a new one made with create_context" };

/// Says what was lost before, how the run ended if that needs words, and what to do next.
fn note(ran: &Ran, what: RunKind, in_background: bool) -> Option<String> {
    let mut note = ran.notice.clone().unwrap_or_default();
    let ending = match what {
        RunKind::Code => ending(&ran.end, &WORDS),
        RunKind::Command => command_ending(&ran.end, &WORDS),
    };
    if let Some(mut sentence) = ending {
        if matches!(ran.end, RunOutcome::TimedOut { .. }) && !in_background {
            sentence.push_str(" Or give it a longer timeout with background=true and poll with wait_run.");
        }
        add_lines(&mut note, &sentence);
    }
    let note = note.trim_end();
    (!note.is_empty()).then(|| note.to_owned())
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
    let plain = text("text/plain");
    // Such a text is only the name of an object: `<IPython.core.display.HTML object>`.
    let is_name = |text: &str| text.starts_with('<') && text.ends_with('>') && !text.contains('\n');
    match plain {
        Some((_, ref shown)) if !is_name(shown) => plain,
        _ => RICH.into_iter().find_map(text).or(plain),
    }
}

/// Returns the displays as far as they fit into one budget.
fn displays(bundles: &[MimeBundle]) -> Vec<Display> {
    let mut left = TEXT_BUDGET;
    let fitting = bundles.iter().filter_map(readable).map_while(|(mime, text)| {
        let shown = clipped(&text, left).into_owned();
        let display = (left > 0).then_some(Display { r#type: mime, text: shown });
        left = left.saturating_sub(text.chars().count());
        display
    });
    fitting.collect()
}

fn address(link: Option<&Block>) -> Option<String> {
    match link {
        Some(Block::Link { uri, .. }) => Some(uri.clone()),
        _ => None,
    }
}

/// Returns the streams of which a part is left out, and links to their kept output.
fn cuts(scene: &RenderInput<'_>, ran: &Ran) -> (Vec<CutStream>, Vec<Block>) {
    let cut = [("stdout", &ran.stdout), ("stderr", &ran.stderr)].into_iter().filter(|(_, stream)| stream.truncated);
    let (cuts, links): (Vec<CutStream>, Vec<Option<Block>>) = cut
        .map(|(stream, captured)| {
            let kept = captured.kept.as_ref();
            let link = kept.and_then(|kept| scene.link(&kept.key, &kept.name, Some(kept.bytes)));
            (CutStream { stream, bytes: captured.total_bytes, url: address(link.as_ref()) }, link)
        })
        .unzip();
    (cuts, links.into_iter().flatten().collect())
}

#[derive(Serialize)]
struct Cancelled {
    run: String,
    was_running: bool,
}

pub(super) fn cancelled_schema() -> Value {
    object(json!({ "run": string(), "was_running": boolean() }))
}

pub(super) fn cancelled(_: &RenderInput<'_>, outcome: Outcome) -> Answer {
    let Outcome::Cancelled { run, was_running } = outcome else { return mismatch() };
    Answer::json(&Cancelled { run, was_running })
}

// ---- contexts

#[derive(Serialize)]
struct ContextRow {
    context: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    name: String,
    language: &'static str,
    status: &'static str,
    memory_mb: u64,
    cpus: f64,
    created_at: String,
    last_used: String,
}

impl From<ContextInfo> for ContextRow {
    fn from(context: ContextInfo) -> Self {
        Self {
            context: context.id,
            name: context.name,
            language: context.language.name(),
            status: if context.busy { "busy" } else { "idle" },
            memory_mb: context.limits.memory_bytes >> 20,
            cpus: f64::from(context.limits.cpu_millis) / 1000.0,
            created_at: moment(context.created_at),
            last_used: moment(context.last_used),
        }
    }
}

pub(super) fn created_schema() -> Value {
    let members = json!({
        "context": string(),
        "name": string(),
        "language": string(),
        "status": string(),
        "memory_mb": integer(),
        "cpus": number(),
        "created_at": string(),
        "last_used": string(),
    });
    object_with(members, &["name"])
}

pub(super) fn created(_: &RenderInput<'_>, outcome: Outcome) -> Answer {
    let Outcome::Created(context) = outcome else { return mismatch() };
    Answer::json(&ContextRow::from(context))
}

#[derive(Serialize)]
struct Contexts {
    contexts: Vec<ContextRow>,
    total: usize,
}

pub(super) fn contexts_schema() -> Value {
    object(json!({ "contexts": array(created_schema()), "total": integer() }))
}

pub(super) fn contexts(_: &RenderInput<'_>, outcome: Outcome) -> Answer {
    let Outcome::Contexts(contexts) = outcome else { return mismatch() };
    let total = contexts.len();
    Answer::json(&Contexts { contexts: contexts.into_iter().map(ContextRow::from).collect(), total })
}

#[derive(Serialize)]
struct Stopped {
    context: String,
    status: &'static str,
}

pub(super) fn stopped_schema() -> Value {
    object(json!({ "context": string(), "status": string() }))
}

pub(super) fn stopped(_: &RenderInput<'_>, outcome: Outcome) -> Answer {
    let Outcome::Stopped { context_id } = outcome else { return mismatch() };
    Answer::json(&Stopped { context: context_id, status: "stopped" })
}

// ---- files

#[derive(Serialize)]
struct Written {
    path: String,
    size: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    url: Option<String>,
}

pub(super) fn written_schema() -> Value {
    object_with(json!({ "path": string(), "size": integer(), "url": string() }), &["url"])
}

pub(super) fn written(scene: &RenderInput<'_>, outcome: Outcome) -> Answer {
    let Outcome::Written { path, size, key } = outcome else { return mismatch() };
    let link = scene.link(&key, &path, Some(size));
    let mut answer = Answer::json(&Written { path, size, url: address(link.as_ref()) });
    answer.blocks.extend(link);
    answer
}

#[derive(Default, Serialize)]
struct File {
    path: String,
    size: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    encoding: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_line: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    next_line: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    total_lines: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    url: Option<String>,
}

pub(super) fn file_schema() -> Value {
    let members = json!({
        "path": string(),
        "size": integer(),
        "encoding": string(),
        "content": string(),
        "first_line": integer(),
        "next_line": integer(),
        "total_lines": integer(),
        "note": string(),
        "url": string(),
    });
    object_with(members, &["encoding", "content", "first_line", "next_line", "total_lines", "note", "url"])
}

pub(super) fn file(scene: &RenderInput<'_>, outcome: Outcome) -> Answer {
    let Outcome::File { path, content, size, key } = outcome else { return mismatch() };
    let link = scene.link(&key, &path, Some(size));
    let file = File { size, url: address(link.as_ref()), path, ..File::default() };
    if content.len() as u64 != size {
        let note = match link {
            Some(_) => {
                "Too large for an answer: fetch it from the url, or read parts of it with run_command (head, tail, sed)."
            }
            None => "Too large for an answer: read parts of it with run_command (head, tail, sed).",
        };
        let mut answer = Answer::json(&File { note: Some(note.into()), ..file });
        answer.blocks.extend(link);
        return answer;
    }
    let asked = encoding(scene.args).ok().flatten();
    let mut answer = match (asked, String::from_utf8(content)) {
        (None | Some(Encoding::Utf8), Ok(text)) => text_file(scene, file, &text),
        (Some(Encoding::Base64), content) => {
            bytes_file(file, &content.map_or_else(|e| e.into_bytes(), String::into_bytes))
        }
        (Some(Encoding::Utf8), Err(_)) => {
            return failure(format!("{} is not text in UTF-8; read it with encoding base64.", shown(&file.path)));
        }
        (None, Err(content)) => other_file(file, content.as_bytes()),
    };
    answer.blocks.extend(link);
    answer
}

/// Renders the content unchanged in a separate block, then the other facts. The object has both.
fn with_content(file: &File, content: String) -> Answer {
    let mut answer = Answer::json(file);
    answer.structured["content"] = json!(content);
    answer.blocks.insert(0, Block::Text(content));
    answer
}

/// Returns as many of the requested lines as fit.
fn text_file(scene: &RenderInput<'_>, file: File, text: &str) -> Answer {
    let (offset, limit) = lines(scene.args).unwrap_or_default();
    let count = |lines: u64| usize::try_from(lines).unwrap_or(usize::MAX);
    let first = offset.map_or(1, count);
    let total = text.split_inclusive('\n').count();
    if first > total.max(1) {
        return failure(format!("{} has {total} lines; offset {first} is beyond its end.", shown(&file.path)));
    }
    let mut content = String::new();
    let mut room = TEXT_BUDGET;
    let mut next = first;
    let mut note = None;
    for line in text.split_inclusive('\n').skip(first - 1).take(limit.map_or(usize::MAX, count)) {
        let length = line.chars().count();
        if length > room && next > first {
            break;
        }
        if length > room {
            note = Some(format!(
                "Line {first} has {length} characters, of which some are left out; read it with run_code."
            ));
        }
        content.push_str(&clipped(line, room));
        room = room.saturating_sub(length);
        next += 1;
    }
    let next_line = (next <= total).then_some(next);
    let first_line = (first > 1 || next_line.is_some()).then_some(first);
    let file = File { encoding: Some("utf-8"), first_line, next_line, total_lines: Some(total), note, ..file };
    with_content(&file, content)
}

fn bytes_file(file: File, bytes: &[u8]) -> Answer {
    let content = STANDARD.encode(bytes);
    if content.len() > FILE_BUDGET {
        return failure(format!(
            "{} has {} bytes, too many for one answer; read it in parts with run_code{}.",
            shown(&file.path),
            file.size,
            if file.url.is_some() { ", or download it from the link" } else { "" }
        ));
    }
    with_content(&File { encoding: Some("base64"), ..file }, content)
}

/// Renders a file that is not text: a picture is shown if possible; of other bytes only the facts are useful to a
/// reader.
fn other_file(file: File, bytes: &[u8]) -> Answer {
    let mime = mime::of(&file.path);
    let data = VISIBLE.contains(&mime).then(|| STANDARD.encode(bytes)).filter(|data| data.len() <= PICTURE_BUDGET);
    let Some(data) = data else {
        let note = "Not text: work on it with run_code, or read it with encoding base64.";
        return Answer::json(&File { note: Some(note.into()), ..file });
    };
    let mut answer = Answer::json(&File { note: Some("The picture follows as an image block.".into()), ..file });
    answer.blocks.push(Block::Image { data, mime });
    answer
}

pub(super) fn files(scene: &RenderInput<'_>, outcome: Outcome) -> Answer {
    let Outcome::Files(files) = outcome else { return mismatch() };
    let directory = directory(scene.args).unwrap_or_else(|_| ".".into());
    Answer::json(&Listing::of(&directory, files))
}
