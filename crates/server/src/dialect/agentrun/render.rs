//! Outcomes as the document prints them: JSON with two-space indent, members in its order.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use engine::op::{
    ContextInfo, Ended, EngineError, FileEntry, FileKind, Language, MimeBundle, Outcome, Ran, RunOutcome,
};
use serde::Serialize;
use serde_json::{Value, json};

use super::{Encoding, decode, directory, encoding, invalid};
use crate::dialect::{Answer, ArgError, Block, Reply, Scene, clipped, iso8601, shown};

/// Characters of one text field that the engine has not bounded itself.
const TEXT_BUDGET: usize = 20_000;

/// All pictures of one answer, in base64. TypeScript clients close the connection at a message of 10 MiB.
const PICTURE_BUDGET: usize = 5 << 20;

/// A file's content stands in the answer twice (text and object), and base64 or escapes make it longer.
const FILE_BUDGET: usize = 3 << 20;

/// A row of a listing without its path: names of members, indents, a size of twenty digits, a time.
const FILE_ROW: usize = 200;

#[derive(Serialize)]
struct Failure<'a> {
    error: &'a str,
    code: &'a str,
}

fn failure(code: &str, error: &str) -> Answer {
    Answer::json(&Failure { error, code }).failed()
}

pub(super) fn refusal(_: &Scene<'_>, refused: &ArgError) -> Reply {
    failure(refused.code, &refused.message).into()
}

/// The engine's errors under the document's codes, for every tool.
pub(super) fn error(_: &Scene<'_>, error: &EngineError) -> Reply {
    answer(error).into()
}

fn answer(error: &EngineError) -> Answer {
    use EngineError as E;
    let (code, message) = match error {
        E::ContextNotFound(id) => ("CONTEXT_NOT_FOUND", format!("Context not found: {}", shown(id))),
        E::AmbiguousName { name, ids } => (
            "CONTEXT_NOT_FOUND",
            format!(
                "Context not found: {} is the name of several contexts; use one of the ids {}",
                shown(name),
                ids.join(", ")
            ),
        ),
        E::ContextLimit(most) => (
            "CONTEXT_CREATION_FAILED",
            format!("Failed to create context: at most {most} contexts; stop one with stop_context first"),
        ),
        E::Busy(waited) => ("BUSY", format!("All sessions were busy for {}; retry later", seconds(*waited))),
        E::QueueFull(most) => ("BUSY", format!("{most} runs wait for a session already; retry later")),
        E::NotReady(why) => ("SERVER_NOT_READY", format!("AgentRun manager not initialized or not ready: {why}")),
        E::ShuttingDown => ("SERVER_NOT_READY", "AgentRun manager not initialized or not ready: shutting down".into()),
        E::CreateFailed(why) => ("CONTEXT_CREATION_FAILED", format!("Failed to create context: {why}")),
        E::StopFailed(why) => ("STOP_FAILED", format!("Failed to stop context: {why}")),
        E::FileNotFound(path) => ("FILE_NOT_FOUND", format!("File not found: {}", shown(path))),
        E::InvalidPath { path, why } => ("INVALID_PATH", format!("Invalid path: {}: {why}", shown(path))),
        E::FileTooLarge { path, limit } => {
            ("FILE_TOO_LARGE", format!("File too large: {} is over the limit of {limit} bytes", shown(path)))
        }
        E::NoSpace => ("FILE_TOO_LARGE", "File too large: no space left in the context; delete files first".into()),
        E::OverLimit { what, limit } => {
            ("CONTEXT_CREATION_FAILED", format!("Failed to create context: over the limit {what} of {limit}"))
        }
        E::NoCurrent { .. } => ("CONTEXT_NOT_FOUND", "Context not found: none was named".into()),
        E::OtherLanguage { context, is, .. } => {
            ("INVALID_LANGUAGE", format!("Unsupported language: context {} runs {}", shown(context), is.name()))
        }
        E::RunNotFound(run) => ("RUN_NOT_FOUND", format!("Run not found: {}", shown(run))),
        E::NetworkOff(why) | E::InvalidEnvironment(why) | E::InUse(why) => ("INVALID_PARAMS", why.clone()),
        E::Cancelled => ("CANCELLED", "Cancelled by the client".into()),
        E::Sandbox(why) => ("SANDBOX_FAILED", format!("The sandbox failed: {why}")),
    };
    failure(code, &message)
}

pub(super) fn create_error(_: &Scene<'_>, e: &EngineError) -> Reply {
    let answer = match e {
        EngineError::Sandbox(why) => failure("CONTEXT_CREATION_FAILED", &format!("Failed to create context: {why}")),
        other => answer(other),
    };
    answer.into()
}

pub(super) fn stop_error(_: &Scene<'_>, e: &EngineError) -> Reply {
    let answer = match e {
        EngineError::Sandbox(why) => failure("STOP_FAILED", &format!("Failed to stop context: {why}")),
        other => answer(other),
    };
    answer.into()
}

/// A back end that fails is a result, as the document has it.
pub(super) fn run_error(_: &Scene<'_>, e: &EngineError) -> Reply {
    let answer = match e {
        EngineError::Sandbox(why) => Answer::json(&RunResult {
            stdout: String::new(),
            stderr: format!(
                "The sandbox failed: {why}. Whether variables were kept is unknown: run the code again, or make a new context \
                 with create_context.\n"
            ),
            success: false,
            execution_time: None,
        }),
        other => answer(other),
    };
    answer.into()
}

/// An outcome that does not belong to the operation: a defect of ours, answered rather than hidden.
fn mismatch() -> Answer {
    failure("INTERNAL_ERROR", "The engine gave another kind of answer than was asked for")
}

fn object(properties: Value) -> Value {
    let required: Vec<&String> = properties.as_object().into_iter().flat_map(|p| p.keys()).collect();
    json!({ "type": "object", "properties": properties, "required": required })
}

fn string() -> Value {
    json!({ "type": "string" })
}

// ---- run_code

#[derive(Serialize)]
struct RunResult {
    stdout: String,
    stderr: String,
    success: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    execution_time: Option<f64>,
}

pub(super) fn ran_schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "stdout": string(),
            "stderr": string(),
            "success": { "type": "boolean" },
            "execution_time": { "type": "number" },
        },
        "required": ["stdout", "stderr", "success"],
    })
}

pub(super) fn ran(_: &Scene<'_>, outcome: Outcome) -> Answer {
    let Outcome::Ran(ran) = outcome else { return mismatch() };
    let mut answer = Answer::json(&RunResult {
        stdout: stdout(&ran),
        stderr: stderr(&ran),
        success: matches!(ran.end, RunOutcome::Ok | RunOutcome::Exit { code: 0 }),
        execution_time: Some((ran.duration.as_secs_f64() * 1e6).round() / 1e6),
    });
    answer.blocks.extend(pictures(&ran));
    answer
}

/// What was printed, then what was displayed as text, then the last value as the REPL prints it.
fn stdout(ran: &Ran) -> String {
    let mut shown = String::new();
    for bundle in ran.displays.iter().filter(|bundle| picture(bundle).is_none()).chain(&ran.value) {
        if let Some(text) = bundle.get("text/plain").or_else(|| bundle.values().next()).and_then(Value::as_str) {
            add_lines(&mut shown, text);
        }
    }
    let mut out = ran.stdout.text.clone();
    if !shown.is_empty() {
        add_lines(&mut out, &clipped(&shown, TEXT_BUDGET));
    }
    out
}

/// What was lost before, what went to stderr, then the traceback, then how it ended if that needs a word: always the last line.
fn stderr(ran: &Ran) -> String {
    let mut out = String::new();
    if let Some(notice) = &ran.notice {
        add_lines(&mut out, notice);
    }
    if let Some(late) = &ran.late {
        add_lines(
            &mut out,
            &format!("[printed by background processes since the last call]\n{}", clipped(late, TEXT_BUDGET)),
        );
    }
    out.push_str(&ran.stderr.text);
    if let Some(error) = &ran.error {
        add_lines(&mut out, &clipped(&error.text, TEXT_BUDGET));
    }
    if let Some(note) = ending(&ran.end) {
        add_lines(&mut out, &note);
    }
    out
}

/// On lines of its own.
fn add_lines(out: &mut String, text: &str) {
    if !out.is_empty() && !out.ends_with('\n') {
        out.push('\n');
    }
    out.push_str(text);
    if !text.ends_with('\n') {
        out.push('\n');
    }
}

/// What happened, whether variables were kept, what to do next.
fn ending(end: &RunOutcome) -> Option<String> {
    const AFRESH: &str =
        "variables are lost, files are kept; the context can be used again: run the code that defines them first";
    Some(match end {
        RunOutcome::Ok | RunOutcome::Error => return None,
        RunOutcome::Exit { code } => {
            format!("The code called exit with code {code}: variables are kept, the context can be used further.")
        }
        RunOutcome::TimedOut { after, state_kept: true } => format!(
            "Execution timed out after {} and was interrupted: variables are kept; do the work in shorter steps.",
            seconds(*after)
        ),
        RunOutcome::TimedOut { after, state_kept: false } => {
            format!("Execution timed out after {} and was killed: {AFRESH}, in shorter steps.", seconds(*after))
        }
        RunOutcome::Cancelled { state_kept: true } => "Execution was cancelled: variables are kept.".into(),
        RunOutcome::Cancelled { state_kept: false } => format!("Execution was cancelled and killed: {AFRESH}."),
        RunOutcome::Interrupted => {
            "Execution was interrupted: variables are kept; run it again if it should complete.".into()
        }
        RunOutcome::OutOfMemory { limit_bytes } => format!(
            "Out of memory: the interpreter was killed at the limit of {} MB: {AFRESH}, with less data at a time.",
            limit_bytes >> 20
        ),
        RunOutcome::Ended { how: Ended::Exited { code } } => {
            format!("The interpreter exited with code {code}: {AFRESH}.")
        }
        RunOutcome::Ended { how: Ended::Signaled { signal } } => {
            format!("The interpreter crashed with signal {signal}{}: {AFRESH}.", signal_name(*signal))
        }
        RunOutcome::SandboxLost { why } => format!(
            "The sandbox was lost ({why}): variables and files are lost; run the code that makes them again, in a new context \
             made with create_context if this one is not found."
        ),
    })
}

fn signal_name(signal: i32) -> &'static str {
    match signal {
        4 => " (SIGILL)",
        6 => " (SIGABRT)",
        7 => " (SIGBUS)",
        8 => " (SIGFPE)",
        9 => " (SIGKILL)",
        11 => " (SIGSEGV)",
        15 => " (SIGTERM)",
        31 => " (SIGSYS)",
        _ => "",
    }
}

fn seconds(duration: Duration) -> String {
    format!("{} s", duration.as_secs_f64())
}

/// The picture of a bundle, of the kinds that models can see.
fn picture(bundle: &MimeBundle) -> Option<(&'static str, &str)> {
    ["image/png", "image/jpeg", "image/webp", "image/gif"]
        .into_iter()
        .find_map(|mime| Some((mime, bundle.get(mime)?.as_str()?)))
}

/// Pictures in the order in which they were made. Data that is not base64 would make clients throw the whole answer away.
fn pictures(ran: &Ran) -> Vec<Block> {
    let mut left = PICTURE_BUDGET;
    let mut blocks = Vec::new();
    for (number, (mime, data)) in ran.displays.iter().chain(&ran.value).filter_map(picture).enumerate() {
        let note = |why: String| Block::Text(format!("picture {} is left out: {why}", number + 1));
        blocks.push(if data.len() > left {
            note(format!("{} bytes of base64 are over the limit of {PICTURE_BUDGET} for one answer", data.len()))
        } else if let Ok(bytes) = decode(data) {
            left -= data.len();
            Block::Image { data: STANDARD.encode(bytes), mime }
        } else {
            note("it is not base64".into())
        });
    }
    blocks
}

// ---- contexts

fn language(language: Language) -> (&'static str, &'static str) {
    match language {
        Language::Python => ("python", "Python"),
        Language::Javascript => ("javascript", "JavaScript"),
        Language::Typescript => ("typescript", "TypeScript"),
    }
}

fn moment(seconds: u64) -> String {
    iso8601(i64::try_from(seconds).unwrap_or(i64::MAX))
}

#[derive(Serialize)]
struct Created {
    context_id: String,
    name: String,
    language: &'static str,
    description: String,
    created_at: String,
    status: &'static str,
    message: String,
}

pub(super) fn created_schema() -> Value {
    object(json!({
        "context_id": string(),
        "name": string(),
        "language": string(),
        "description": string(),
        "created_at": string(),
        "status": string(),
        "message": string(),
    }))
}

pub(super) fn created(_: &Scene<'_>, outcome: Outcome) -> Answer {
    let Outcome::Created(context) = outcome else { return mismatch() };
    let (language, title) = language(context.language);
    Answer::json(&Created {
        context_id: context.id,
        name: context.name,
        language,
        description: context.description,
        created_at: moment(context.created_at),
        status: "active",
        message: format!("{title} context created successfully"),
    })
}

#[derive(Serialize)]
struct Stopped {
    context_id: String,
    status: &'static str,
    message: &'static str,
}

pub(super) fn stopped_schema() -> Value {
    object(json!({ "context_id": string(), "status": string(), "message": string() }))
}

pub(super) fn stopped(_: &Scene<'_>, outcome: Outcome) -> Answer {
    let Outcome::Stopped { context_id } = outcome else { return mismatch() };
    Answer::json(&Stopped { context_id, status: "stopped", message: "Context stopped successfully" })
}

#[derive(Serialize)]
struct Contexts {
    contexts: Vec<Listed>,
    total: usize,
}

#[derive(Serialize)]
struct Listed {
    context_id: String,
    name: String,
    description: String,
    language: &'static str,
    status: &'static str,
    created_at: String,
    last_used: String,
}

pub(super) fn contexts_schema() -> Value {
    let context = object(json!({
        "context_id": string(),
        "name": string(),
        "description": string(),
        "language": string(),
        "status": string(),
        "created_at": string(),
        "last_used": string(),
    }));
    object(json!({ "contexts": { "type": "array", "items": context }, "total": { "type": "integer" } }))
}

pub(super) fn contexts(_: &Scene<'_>, outcome: Outcome) -> Answer {
    let Outcome::Contexts(contexts) = outcome else { return mismatch() };
    let total = contexts.len();
    Answer::json(&Contexts { contexts: contexts.into_iter().map(listed).collect(), total })
}

fn listed(context: ContextInfo) -> Listed {
    Listed {
        context_id: context.id,
        name: context.name,
        description: context.description,
        language: language(context.language).0,
        status: "active",
        created_at: moment(context.created_at),
        last_used: moment(context.last_used),
    }
}

// ---- files

#[derive(Serialize)]
struct Written {
    path: String,
    size: u64,
}

pub(super) fn written_schema() -> Value {
    object(json!({ "path": string(), "size": { "type": "integer" } }))
}

pub(super) fn written(_: &Scene<'_>, outcome: Outcome) -> Answer {
    let Outcome::Written { path, size, .. } = outcome else { return mismatch() };
    Answer::json(&Written { path, size })
}

#[derive(Serialize)]
struct Downloaded {
    path: String,
    size: usize,
    encoding: &'static str,
    content: String,
}

pub(super) fn file_schema() -> Value {
    object(json!({ "path": string(), "size": { "type": "integer" }, "encoding": string(), "content": string() }))
}

pub(super) fn file(scene: &Scene<'_>, outcome: Outcome) -> Answer {
    let Outcome::File { path, content, key, .. } = outcome else { return mismatch() };
    let size = content.len();
    let (encoding, content) = match (encoding(scene.args).ok().flatten(), String::from_utf8(content)) {
        (None | Some(Encoding::Utf8), Ok(text)) => ("utf-8", text),
        (Some(Encoding::Utf8), Err(_)) => {
            let refused =
                invalid(format!("encoding 'utf-8' cannot show {}, which is not text; use 'base64'", shown(&path)));
            return failure(refused.code, &refused.message);
        }
        (_, bytes) => ("base64", STANDARD.encode(bytes.map_or_else(|e| e.into_bytes(), String::into_bytes))),
    };
    if written_length(&content) > FILE_BUDGET {
        let why = format!(
            "File too large: {} has {size} bytes, too many for one answer; read it in parts with run_code",
            shown(&path)
        );
        return failure("FILE_TOO_LARGE", &why);
    }
    let link = scene.link(&key, &path, Some(size as u64));
    let mut answer = Answer::json(&Downloaded { path, size, encoding, content });
    answer.blocks.extend(link);
    answer
}

/// Upper bound of the length as a JSON string inside a JSON string, halved: a quote costs 2 and then 4, a control character 6 and then 7.
fn written_length(text: &str) -> usize {
    text.bytes()
        .map(|byte| match byte {
            b'"' | b'\\' | b'\n' | b'\r' | b'\t' => 3,
            0..0x20 => 7,
            _ => 1,
        })
        .sum()
}

#[derive(Serialize)]
struct Files {
    files: Vec<FileRow>,
    total: u64,
}

#[derive(Serialize)]
struct FileRow {
    path: String,
    size: u64,
    r#type: &'static str,
    modified: String,
}

pub(super) fn files_schema() -> Value {
    let file =
        object(json!({ "path": string(), "size": { "type": "integer" }, "type": string(), "modified": string() }));
    object(json!({ "files": { "type": "array", "items": file }, "total": { "type": "integer" } }))
}

pub(super) fn files(scene: &Scene<'_>, outcome: Outcome) -> Answer {
    let Outcome::Files(engine::op::Files { entries, total, .. }) = outcome else { return mismatch() };
    // The guest names entries relative to the directory asked for; the next call wants them relative to /workspace.
    let directory = directory(scene.args).unwrap_or_else(|_| ".".into());
    let prefix = match directory.trim_matches('/').trim_start_matches("./") {
        "" | "." => String::new(),
        below => format!("{}/", below.trim_end_matches('/')),
    };
    let mut left = FILE_BUDGET;
    let fits = |entry: &FileEntry| {
        let needed = written_length(&prefix) + written_length(&entry.path) + FILE_ROW;
        let fits = needed <= left;
        left = left.saturating_sub(needed);
        fits
    };
    // `total` tells of those that do not fit.
    let files = entries.into_iter().take_while(fits).map(|entry| FileRow {
        path: format!("{prefix}{}", entry.path),
        size: entry.size,
        r#type: match entry.kind {
            FileKind::File => "file",
            FileKind::Directory => "directory",
            FileKind::Symlink => "symlink",
            FileKind::Other => "other",
        },
        modified: iso8601(entry.modified),
    });
    Answer::json(&Files { files: files.collect(), total })
}
