//! Renders outcomes as the document prints them: JSON with two-space indent, members in its order.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use engine::op::{ContextInfo, EngineError, Ran, Waiting};
use serde::Serialize;
use text::shown;

use crate::operation::FileRead;
use crate::output::output;
use crate::shared::files::{Encoding, FileFacts};
use crate::shared::run::{self, RunWording};
use crate::shared::{add_lines, moment, seconds, title};
use crate::{Answer, ArgError, RenderInput, Reply};

const WORDING: RunWording =
    RunWording { context: "context", retry: "in a new context made with create_context if this one is not found" };

#[derive(Serialize)]
struct FailureOutput<'a> {
    error: &'a str,
    code: &'a str,
}

fn failure(code: &str, error: &str) -> Answer {
    Answer::json(&FailureOutput { error, code }).failed()
}

pub(super) fn refusal(_: &RenderInput<'_>, refused: &ArgError) -> Reply {
    match refused.code {
        ArgError::INVALID => failure("INVALID_PARAMS", &format!("Invalid arguments: {}", refused.message)),
        code => failure(code, &refused.message),
    }
    .into()
}

/// Renders an error of the engine under the document's codes, for every tool.
pub(super) fn error(_: &RenderInput<'_>, error: &EngineError) -> Reply {
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
        E::Busy(waited) | E::NotStarted { timeout: waited, .. } => {
            ("BUSY", format!("All sessions were busy for {}; retry later", seconds(*waited)))
        }
        E::QueueFull(most) => ("BUSY", format!("{most} runs wait for a session already; retry later")),
        E::NotReady(why) => ("SERVER_NOT_READY", format!("AgentRun manager not initialized or not ready: {why}")),
        E::ResultDropped(why) => {
            ("EXECUTION_FAILED", format!("The operation was done, but its result was dropped: {why}"))
        }
        E::ShuttingDown => ("SERVER_NOT_READY", "AgentRun manager not initialized or not ready: shutting down".into()),
        E::NameTaken { .. } => ("CONTEXT_CREATION_FAILED", format!("Failed to create context: {error}")),
        E::CreateFailed(why) => ("CONTEXT_CREATION_FAILED", format!("Failed to create context: {why}")),
        E::StopFailed(why) => ("STOP_FAILED", format!("Failed to stop context: {why}")),
        E::FileNotFound(path) => ("FILE_NOT_FOUND", format!("File not found: {}", shown(path))),
        E::InvalidPath { path, why } => ("INVALID_PATH", format!("Invalid path: {}: {why}", shown(path))),
        E::FileTooLarge { path, limit } => {
            ("FILE_TOO_LARGE", format!("File too large: {} is over the limit of {limit} bytes", shown(path)))
        }
        E::NoSpace { .. } => {
            ("FILE_TOO_LARGE", "File too large: no space left in the context; delete files first".into())
        }
        E::OverLimit { what, limit } => {
            ("CONTEXT_CREATION_FAILED", format!("Failed to create context: over the limit {what} of {limit}"))
        }
        E::NoCurrent { .. } => ("CONTEXT_NOT_FOUND", "Context not found: none was named".into()),
        E::OtherLanguage { context, is, .. } => {
            ("INVALID_LANGUAGE", format!("Unsupported language: context {} runs {}", shown(context), is.name()))
        }
        E::RunNotFound(run) => ("RUN_NOT_FOUND", format!("Run not found: {}", shown(run))),
        E::NetworkOff(why)
        | E::NoBrowser(why)
        | E::InvalidEnvironment(why)
        | E::InvalidPattern(why)
        | E::InUse(why) => ("INVALID_PARAMS", why.clone()),
        E::Cancelled => ("CANCELLED", "Cancelled by the client".into()),
        E::Sandbox(why) | E::HostDiskFull(why) => ("SANDBOX_FAILED", format!("The sandbox failed: {why}")),
    };
    failure(code, &message)
}

/// Says what a call waits for. The document calls the permits of runs sessions.
pub(super) fn waiting(waiting: &Waiting) -> String {
    match waiting {
        Waiting::Permits(most) => format!("all {most} sessions are busy"),
        other => other.to_string(),
    }
}

pub(super) fn create_error(_: &RenderInput<'_>, e: &EngineError) -> Reply {
    let answer = match e {
        EngineError::Sandbox(why) => failure("CONTEXT_CREATION_FAILED", &format!("Failed to create context: {why}")),
        other => answer(other),
    };
    answer.into()
}

/// Renders an error of an upload. An upload creates no context, so what exceeds the limit is the uploads in progress.
pub(super) fn upload_error(_: &RenderInput<'_>, e: &EngineError) -> Reply {
    let answer = match e {
        EngineError::OverLimit { what, limit } => {
            failure("BUSY", &format!("Over the limit {what} of {limit}; retry when other uploads have ended"))
        }
        other => answer(other),
    };
    answer.into()
}

pub(super) fn stop_error(_: &RenderInput<'_>, e: &EngineError) -> Reply {
    let answer = match e {
        EngineError::Sandbox(why) => failure("STOP_FAILED", &format!("Failed to stop context: {why}")),
        other => answer(other),
    };
    answer.into()
}

/// Renders an error of a run. A failure of the back end is a result, as the document has it.
pub(super) fn run_error(_: &RenderInput<'_>, e: &EngineError) -> Reply {
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

output! {
    struct RunResult { stdout: String, stderr: String, success: bool, execution_time: Option<f64> }

    struct Created {
        context_id: String,
        name: String,
        language: &'static str,
        description: String,
        created_at: String,
        status: &'static str,
        message: String,
    }

    struct Stopped { context_id: String, status: &'static str, message: &'static str }
    struct Contexts { contexts: Vec<Listed>, total: usize }

    struct Listed {
        context_id: String,
        name: String,
        description: String,
        language: &'static str,
        status: &'static str,
        created_at: String,
        last_used: String,
    }
}

pub(super) fn ran(input: &RenderInput<'_>, ran: Ran) -> Answer {
    let kept = run::kept(input, &ran);
    // The last line always says how the run ended.
    let mut stderr = run::stderr(&ran);
    for note in [Some(kept.lines).filter(|lines| !lines.is_empty()), run::ending(&ran.end, &WORDING)].iter().flatten() {
        add_lines(&mut stderr, note);
    }
    let mut answer = Answer::json(&RunResult {
        stdout: run::stdout(&ran),
        stderr,
        success: run::succeeded(&ran.end),
        execution_time: Some((ran.duration.as_secs_f64() * 1e6).round() / 1e6),
    });
    answer.blocks.extend(run::pictures(&ran));
    answer.blocks.extend(kept.links);
    answer
}

pub(super) fn created(context: ContextInfo) -> Answer {
    Answer::json(&Created {
        context_id: context.id,
        name: context.name,
        language: context.language.name(),
        description: context.description,
        created_at: moment(context.created_at),
        status: "active",
        message: format!("{} context created successfully", title(context.language)),
    })
}

pub(super) fn contexts(contexts: Vec<ContextInfo>) -> Answer {
    let total = contexts.len();
    Answer::json(&Contexts { contexts: contexts.into_iter().map(listed).collect(), total })
}

fn listed(context: ContextInfo) -> Listed {
    Listed {
        context_id: context.id,
        name: context.name,
        description: context.description,
        language: context.language.name(),
        status: "active",
        created_at: moment(context.created_at),
        last_used: moment(context.last_used),
    }
}

pub(super) fn file(input: &RenderInput<'_>, asked: Option<Encoding>, read: FileRead) -> Answer {
    let FileRead { path, content, size, key } = read;
    let whole = content.len() as u64 == size;
    let (encoding, content) = match (asked, String::from_utf8(content)) {
        (None | Some(Encoding::Utf8), Ok(text)) => ("utf-8", text),
        (Some(Encoding::Utf8), Err(_)) if whole => {
            let why = format!("encoding 'utf-8' cannot show {}, which is not text; use 'base64'", shown(&path));
            return failure("INVALID_PARAMS", &format!("Invalid arguments: {why}"));
        }
        (_, bytes) => ("base64", STANDARD.encode(bytes.map_or_else(|e| e.into_bytes(), String::into_bytes))),
    };
    let link = input.link(&key, &path, Some(size));
    let Some(facts) = FileFacts::new(&path, size, encoding, whole.then_some(content), link.as_ref()) else {
        let why = format!(
            "File too large: {} has {size} bytes, too many for one answer; read it in parts with run_code",
            shown(&path)
        );
        return failure("FILE_TOO_LARGE", &why);
    };
    let mut answer = Answer::json(&facts);
    answer.blocks.extend(link);
    answer
}
