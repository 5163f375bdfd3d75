//! Renders outcomes as the documents have them: stdout alone in the first block, facts about the session beside
//! `content`.

use std::time::Duration;

use engine::op::{ContextInfo, EngineError, Language, Outcome, Ran, Size};
use serde::Serialize;
use serde_json::{Map, Value, json};
use text::shown;

use super::{flavor, session_id};
use crate::args::{self, Args};
use crate::shared::run::{self, RunWording};
use crate::shared::schema::{array, boolean, integer, object, object_with, string};
use crate::shared::{add_lines, moment, seconds};
use crate::{Answer, ArgError, Block, Options, RenderInput, Reply};

const WORDS: RunWording = RunWording { place: "session", anew: "with the same session_id or in a new session" };

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
        E::Busy(waited) => {
            (INVALID_REQUEST, format!("Resource limit: all runs were busy for {}; retry later", seconds(*waited)))
        }
        E::QueueFull(most) => (INVALID_REQUEST, format!("Resource limit: {most} runs wait already; retry later")),
        E::NoSpace => (INVALID_REQUEST, "Resource limit: no space left in the session; delete files first".to_owned()),
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

/// Answers an outcome that does not belong to the operation. That is a defect of this server, and it is reported rather
/// than hidden.
fn mismatch() -> Answer {
    Answer::json(&json!({ "error": "the engine gave another kind of answer than was asked for" })).failed()
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

// ---- runs

#[derive(Serialize)]
struct Executed {
    stdout: String,
    stderr: String,
    success: bool,
    #[serde(flatten)]
    command: Option<CommandFacts>,
    #[serde(flatten)]
    session: SessionFacts,
    /// Remark about the session, if there is something to say.
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
}

/// Facts about the session. They also appear beside `content`, where the document has them.
#[derive(Serialize)]
struct SessionFacts {
    session_id: String,
    execution_time_ms: u64,
    session_created: bool,
}

#[derive(Serialize)]
struct CommandFacts {
    command: String,
    args: Vec<String>,
    exit_code: i32,
}

fn executed_members() -> Map<String, Value> {
    let members = json!({
        "stdout": string(),
        "stderr": string(),
        "success": boolean(),
        "session_id": string(),
        "execution_time_ms": integer(),
        "session_created": boolean(),
        "note": string(),
    });
    members.as_object().cloned().unwrap_or_default()
}

pub(super) fn code_schema() -> Value {
    object_with(executed_members().into(), &["note"])
}

pub(super) fn command_schema() -> Value {
    let mut members = executed_members();
    members.insert("command".into(), string());
    members.insert("args".into(), array(string()));
    members.insert("exit_code".into(), integer());
    object_with(members.into(), &["note"])
}

pub(super) fn code(scene: &RenderInput<'_>, outcome: Outcome) -> Answer {
    let Outcome::Ran(ran) = outcome else { return mismatch() };
    executed(scene, &ran, None, run::ending(&ran.end, &WORDS))
}

pub(super) fn command(scene: &RenderInput<'_>, outcome: Outcome) -> Answer {
    let Outcome::Ran(ran) = outcome else { return mismatch() };
    let facts = CommandFacts {
        command: args::text(scene.args, "command").ok().flatten().unwrap_or_default().to_owned(),
        args: args::text_list(scene.args, "args").ok().flatten().unwrap_or_default(),
        exit_code: run::exit_code(&ran.end),
    };
    let ending = run::command_ending(&ran.end, &WORDS).filter(|_| !run::has_status(&ran.end));
    executed(scene, &ran, Some(facts), ending)
}

/// Renders a run: stdout alone, then marked stderr if there is any, the session, pictures and links.
fn executed(scene: &RenderInput<'_>, ran: &Ran, command: Option<CommandFacts>, ending: Option<String>) -> Answer {
    let session = SessionFacts {
        session_id: ran.context.id.clone(),
        execution_time_ms: milliseconds(ran.duration),
        session_created: ran.created,
    };
    let mut stderr = run::stderr(ran);
    if let Some(ending) = ending {
        add_lines(&mut stderr, &ending);
    }
    let kept = run::kept(scene, ran);
    let note = note(scene.args, ran, &kept.lines);
    let mut line = format!(
        "[session {}: {}, {}, {}; {} ms]",
        session.session_id,
        template(ran.context.language),
        size(&ran.context, scene.options).name(),
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
    let extra = [Some(members(&session)), command.as_ref().map(members)].into_iter().flatten().flatten().collect();
    let success = run::succeeded(&ran.end);
    let executed = Executed { stdout, stderr, success, command, session, note };
    Answer { blocks, structured: members(&executed).into(), fits: true, is_error: !success, extra }
}

/// Returns remarks about lost state, a flavor that was not applied and output that is elsewhere, none of which may
/// happen silently.
fn note(args: &Args, ran: &Ran, kept: &str) -> Option<String> {
    let mut note = String::new();
    if ran.created && session_id(args).is_ok_and(|id| id.is_some()) {
        add_lines(
            &mut note,
            "There was no live session with this id: a new one was made under it. Variables and files of an earlier one are gone.",
        );
    }
    if let (false, Ok(Some(asked)), Some(has)) = (ran.created, flavor(args), ran.context.size)
        && asked != has
    {
        add_lines(
            &mut note,
            &format!(
                "The flavor {} was ignored: this session was made as {} and keeps it; use a new session for another one.",
                asked.name(),
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

// ---- sessions

#[derive(Serialize)]
struct SessionList {
    sessions: Vec<SessionRow>,
}

#[derive(Serialize)]
struct SessionRow {
    session_id: String,
    template: &'static str,
    flavor: &'static str,
    status: &'static str,
    created_at: String,
    last_accessed: String,
}

pub(super) fn sessions_schema() -> Value {
    let session = object(json!({
        "session_id": string(),
        "template": string(),
        "flavor": string(),
        "status": string(),
        "created_at": string(),
        "last_accessed": string(),
    }));
    object(json!({ "sessions": array(session) }))
}

/// Lists the sessions. A session that does not exist gives an empty list, not an error.
pub(super) fn sessions(scene: &RenderInput<'_>, outcome: Outcome) -> Answer {
    let Outcome::Contexts(contexts) = outcome else { return mismatch() };
    let asked = session_id(scene.args).ok().flatten();
    let sessions = contexts.into_iter().filter(|context| asked.is_none_or(|id| id == context.id));
    let session = |context: ContextInfo| SessionRow {
        template: template(context.language),
        flavor: size(&context, scene.options).name(),
        status: if context.busy { "running" } else { "ready" },
        created_at: moment(context.created_at),
        last_accessed: moment(context.last_used),
        session_id: context.id,
    };
    Answer::json(&SessionList { sessions: sessions.map(session).collect() })
}

#[derive(Serialize)]
struct StoppedSession<'a> {
    success: bool,
    session_id: &'a str,
}

pub(super) fn stopped_schema() -> Value {
    object(json!({ "success": boolean(), "session_id": string() }))
}

pub(super) fn stopped(_: &RenderInput<'_>, outcome: Outcome) -> Answer {
    let Outcome::Stopped { context_id } = outcome else { return mismatch() };
    Answer::json(&StoppedSession { success: true, session_id: &context_id })
}

/// Renders an error of `stop_session`. An unknown session is not an error: it does not run, as the caller wanted.
pub(super) fn stop_error(scene: &RenderInput<'_>, e: &EngineError) -> Reply {
    match e {
        EngineError::ContextNotFound(id) => Answer::json(&StoppedSession { success: false, session_id: id }).into(),
        other => error(scene, other),
    }
}

// ---- volumes

#[derive(Serialize)]
struct Volumes {
    volume_mappings: Vec<Mapping>,
}

#[derive(Serialize)]
struct Mapping {
    #[serde(skip_serializing_if = "Option::is_none")]
    host_path: Option<String>,
    container_path: String,
}

pub(super) fn volumes_schema() -> Value {
    let mapping = object_with(json!({ "host_path": string(), "container_path": string() }), &["host_path"]);
    object(json!({ "volume_mappings": array(mapping) }))
}

/// Lists the shared volumes. This is the only place that may reveal a path of the host: as the operator wrote it, and
/// only if the operator allows it.
pub(super) fn volumes(scene: &RenderInput<'_>, outcome: Outcome) -> Answer {
    let Outcome::Volumes(volumes) = outcome else { return mismatch() };
    let mapping = |volume: engine::op::SharedVolume| Mapping {
        host_path: scene.options.show_host_paths.then(|| volume.host.to_string_lossy().into_owned()),
        container_path: volume.inside.to_string_lossy().into_owned(),
    };
    Answer::json(&Volumes { volume_mappings: volumes.into_iter().map(mapping).collect() })
}
