//! Renders outcomes as the documents have them: stdout alone in the first block, facts about the session beside
//! `content`.

use std::time::Duration;

use engine::op::{ContextInfo, EngineError, Language, Ran, SharedVolume, Size};
use serde::Serialize;
use serde_json::{Map, Value};
use text::shown;

use super::RequestedSession;
use crate::output::{object, output};
use crate::shared::run::{self, RunWording};
use crate::shared::{add_lines, moment, seconds};
use crate::{Answer, ArgError, Block, Options, RenderInput, Reply};

const WORDING: RunWording = RunWording { context: "session", retry: "with the same session_id or in a new session" };

const INVALID_REQUEST: i32 = -32600;
const INVALID_PARAMS: i32 = -32602;
const INTERNAL: i32 = -32603;

pub(super) fn refusal(_: &RenderInput<'_>, refused: &ArgError) -> Reply {
    Reply::Error { code: INVALID_PARAMS, message: format!("Invalid params: {}", refused.message), data: None }
}

/// Renders an error of the engine. Limits are invalid requests; the other failures of the server are internal errors.
pub(super) fn error(_: &RenderInput<'_>, error: &EngineError) -> Reply {
    use EngineError as E;
    let (code, message) = match error {
        E::ContextLimit(most) => {
            (INVALID_REQUEST, format!("Resource limit: at most {most} sessions; end one with stop_session first"))
        }
        E::OverLimit { what, limit } => (INVALID_REQUEST, format!("Resource limit: {what} is limited to {limit}")),
        E::Busy(waited) | E::NotStarted { timeout: waited, .. } => {
            (INVALID_REQUEST, format!("Resource limit: all runs were busy for {}; retry later", seconds(*waited)))
        }
        E::QueueFull(most) => (INVALID_REQUEST, format!("Resource limit: {most} runs wait already; retry later")),
        E::NoSpace { .. } => {
            (INVALID_REQUEST, "Resource limit: no space left in the session; delete files first".to_owned())
        }
        E::OtherLanguage { context, is, .. } => (
            INVALID_PARAMS,
            format!(
                "Invalid params: template: session {} was made with {} and keeps it; leave template out, or use another session_id",
                shown(context),
                template(*is)
            ),
        ),
        E::ContextNotFound(id) => (INVALID_PARAMS, format!("Invalid params: session_id {} is unknown", shown(id))),
        E::CreateFailed(why) => (INTERNAL, format!("Internal error: the session could not be made: {why}")),
        E::StopFailed(why) => (INTERNAL, format!("Internal error: the session could not be stopped: {why}")),
        other => (INTERNAL, format!("Internal error: {other}")),
    };
    Reply::Error { code, message, data: None }
}

fn template(language: Language) -> &'static str {
    match language {
        Language::Python => "python",
        Language::Javascript | Language::Typescript => "node",
    }
}

fn size(context: &ContextInfo, options: &Options) -> Size {
    context.size.unwrap_or(options.default_size)
}

output! {
    struct RunFacts {
        stdout: String,
        stderr: String,
        success: bool,
        /// Remark about the session, if there is something to say.
        note: Option<String>,
    }

    /// Holds facts about the session. They also appear beside `content`, where the document has them.
    struct SessionFacts { session_id: String, execution_time_ms: u64, session_created: bool }
    struct CommandFacts { command: String, args: Vec<String>, exit_code: i32 }
    struct SessionList { sessions: Vec<SessionRow> }

    struct SessionRow {
        session_id: String,
        template: &'static str,
        flavor: &'static str,
        status: &'static str,
        created_at: String,
        last_accessed: String,
    }

    struct StoppedSession { success: bool, session_id: String }
    struct Volumes { volume_mappings: Vec<Mapping> }
    struct Mapping { host_path: Option<String>, container_path: String }
}

pub(super) fn code_schema() -> Value {
    object([RunFacts::members(), SessionFacts::members()].concat())
}

pub(super) fn command_schema() -> Value {
    object([RunFacts::members(), SessionFacts::members(), CommandFacts::members()].concat())
}

pub(super) fn code(input: &RenderInput<'_>, requested: &RequestedSession, ran: &Ran) -> Answer {
    executed(input, requested, ran, None, run::ending(&ran.end, &WORDING))
}

pub(super) fn command(input: &RenderInput<'_>, requested: &RequestedSession, ran: &Ran) -> Answer {
    // The arguments are read once more: a copy would be held for as long as the command runs.
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let command = input.args.get("command").map(text).unwrap_or_default();
    let args = input.args.get("args").and_then(Value::as_array).into_iter().flatten().map(text).collect();
    let facts = CommandFacts { command, args, exit_code: run::exit_code(&ran.end) };
    let ending = run::command_ending(&ran.end, &WORDING).filter(|_| !run::has_status(&ran.end));
    executed(input, requested, ran, Some(facts), ending)
}

/// Renders a run: stdout alone, then marked stderr if there is any, the session, pictures and links.
fn executed(
    input: &RenderInput<'_>,
    requested: &RequestedSession,
    ran: &Ran,
    command: Option<CommandFacts>,
    ending: Option<String>,
) -> Answer {
    let session = SessionFacts {
        session_id: ran.context.id.clone(),
        execution_time_ms: milliseconds(ran.duration),
        session_created: ran.created,
    };
    let mut stderr = run::stderr(ran);
    if let Some(ending) = ending {
        add_lines(&mut stderr, &ending);
    }
    let kept = run::kept(input, ran);
    let note = note(requested, ran, &kept.lines);
    let mut line = format!(
        "[session {}: {}, {}, {}; {} ms]",
        session.session_id,
        template(ran.context.language),
        size(&ran.context, input.options).name(),
        if ran.created { "new" } else { "in use" },
        session.execution_time_ms
    );
    if let Some(facts) = &command {
        line = format!("[exit code {}]\n{line}", facts.exit_code);
    }
    if let Some(note) = &note {
        add_lines(&mut line, note);
    }
    let stdout = run::stdout(ran);
    let mut blocks = vec![Block::Text(stdout.clone())];
    if !stderr.is_empty() {
        blocks.push(Block::Text(format!("[stderr]\n{stderr}")));
    }
    blocks.push(Block::Text(line));
    blocks.extend(run::pictures(ran));
    blocks.extend(kept.links);
    let extra: Map<_, _> = members(&session).into_iter().chain(command.iter().flat_map(members)).collect();
    let success = run::succeeded(&ran.end);
    let mut structured = members(&RunFacts { stdout, stderr, success, note });
    structured.extend(extra.clone());
    Answer { blocks, structured: structured.into(), fits: true, is_error: !success, extra }
}

/// Returns remarks about lost state, a flavor that was not applied and output that is elsewhere, none of which may
/// happen silently.
fn note(requested: &RequestedSession, ran: &Ran, kept: &str) -> Option<String> {
    let mut note = String::new();
    if ran.created && requested.session_id.is_some() {
        add_lines(
            &mut note,
            "There was no live session with this id: a new one was made under it. Variables and files of an earlier one are gone.",
        );
    }
    if let (false, Some(requested), Some(has)) = (ran.created, requested.flavor, ran.context.size)
        && requested != has
    {
        add_lines(
            &mut note,
            &format!(
                "The flavor {} was ignored: this session was made as {} and keeps it; use a new session for another one.",
                requested.name(),
                has.name()
            ),
        );
    }
    if !kept.is_empty() {
        add_lines(&mut note, kept);
    }
    (!note.is_empty()).then_some(note)
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn members<T: Serialize>(facts: &T) -> Map<String, Value> {
    match serde_json::to_value(facts) {
        Ok(Value::Object(members)) => members,
        _ => unreachable!("answers are plain objects"),
    }
}

pub(super) fn sessions(input: &RenderInput<'_>, contexts: Vec<ContextInfo>) -> Answer {
    let session = |context: ContextInfo| SessionRow {
        template: template(context.language),
        flavor: size(&context, input.options).name(),
        status: if context.busy { "running" } else { "ready" },
        created_at: moment(context.created_at),
        last_accessed: moment(context.last_used),
        session_id: context.id,
    };
    let list = SessionList { sessions: contexts.into_iter().map(session).collect() };
    listed(&list, &list.sessions)
}

/// Renders a list as the clients of the original read it: the list itself in the text, and an object for programs.
fn listed<T: Serialize, R: Serialize>(object: &T, rows: &[R]) -> Answer {
    let text = serde_json::to_string_pretty(rows).expect("answers are plain data");
    Answer { blocks: vec![Block::Text(text)], ..Answer::json(object) }
}

/// Renders an error of `stop_session`. An unknown session is not an error: it does not run, as the caller wanted.
pub(super) fn stop_error(input: &RenderInput<'_>, e: &EngineError) -> Reply {
    match e {
        EngineError::ContextNotFound(id) => {
            Answer::json(&StoppedSession { success: false, session_id: id.clone() }).into()
        }
        other => error(input, other),
    }
}

/// Lists the shared volumes. This is the only place that may reveal a path of the host: as the operator wrote it, and
/// only if the operator allows it.
pub(super) fn volumes(input: &RenderInput<'_>, volumes: Vec<SharedVolume>) -> Answer {
    let written = |at: usize, volume: &SharedVolume| {
        input.options.volume_paths.get(at).cloned().unwrap_or_else(|| volume.host.to_string_lossy().into_owned())
    };
    let mapping = |(at, volume): (usize, SharedVolume)| Mapping {
        host_path: input.options.show_host_paths.then(|| written(at, &volume)),
        container_path: volume.inside.to_string_lossy().into_owned(),
    };
    let volumes = Volumes { volume_mappings: volumes.into_iter().enumerate().map(mapping).collect() };
    listed(&volumes, &volumes.volume_mappings)
}
