//! `microsandbox`: the dialect of the microsandbox documents, whose sessions are created when they are needed.

use std::time::Duration;

use engine::op::{
    Command, ContextSelector, Environment, Language, Network, NewContext, Op, RunCode, RunCommand, Size, Target,
};
use engine::{Realm, RealmConfig};
use serde_json::json;
use text::shown;

use super::args::{self, ArgError, Args, FieldError};
use super::{Dialect, Field, FieldKind, Hints, Lang, LimitHelp, Options, SchemaForm, ToolRow};

mod render;

pub const REALM: Realm = Realm("microsandbox");

const LIMIT_HELP: LimitHelp = LimitHelp {
    memory: "The most memory a flavor may give",
    cpus: "The most processor time a flavor may give, in cores",
    ..LimitHelp::USUAL
};

/// Rules of the engine for this dialect.
pub fn realm() -> RealmConfig {
    RealmConfig {
        id_prefix: "session-",
        timeout: Duration::from_secs(300),
        default_size: Some(Size::Small),
        runs_at_once: 10,
        max_contexts: 10,
        evict_idle: true,
        one_language: true,
        idle_timeout: Some(Duration::from_secs(1800)),
        browser: None,
        ..RealmConfig::usual(REALM).limited(4096, 4000, 1024)
    }
}

pub static DIALECT: Dialect = Dialect {
    id: REALM.0,
    realm,
    limit_help: LIMIT_HELP,
    startup: crate::plain_startup,
    server_name: "microsandbox-mcp-server",
    default_lang: Lang::En,
    tools: &[EXECUTE_CODE, EXECUTE_COMMAND, GET_SESSIONS, STOP_SESSION, GET_VOLUME_PATH],
    aliases: &[("get_volume_mappings", "get_volume_path")],
    unknown_tool_code: -32601,
    prose_en: include_str!("prose.en.md"),
    prose_zh: include_str!("prose.zh.md"),
    refuse: render::refusal,
    background: None,
};

const RUNS: Hints = Hints { read_only: false, destructive: true, idempotent: false };
const READS: Hints = Hints { read_only: true, destructive: false, idempotent: true };

const TEMPLATES: [(&str, Language); 2] = [("python", Language::Python), ("node", Language::Javascript)];
const FLAVORS: [(&str, Size); 3] = [("small", Size::Small), ("medium", Size::Medium), ("large", Size::Large)];

const TEMPLATE: Field = Field::one_of("template", &["python", "node"]).default(|_| json!("python"));
const SESSION_ID: Field = Field::optional("session_id");
const FLAVOR: Field =
    Field::one_of("flavor", &["small", "medium", "large"]).default(|options| json!(options.default_size.name()));
const TIMEOUT: Field = Field::new("timeout", FieldKind::Whole);

const EXECUTE_CODE: ToolRow = ToolRow {
    name: "execute_code",
    prose: "execute_code",
    fields: &[Field::required("code"), TEMPLATE, SESSION_ID, FLAVOR, TIMEOUT],
    form: SchemaForm::Full,
    output_schema: render::code_schema,
    hints: RUNS,
    lower: execute_code,
    render: render::code,
    render_error: render::error,
};

const EXECUTE_COMMAND: ToolRow = ToolRow {
    name: "execute_command",
    prose: "execute_command",
    fields: &[
        Field::required("command"),
        Field::new("args", FieldKind::TextList),
        SESSION_ID,
        TEMPLATE,
        FLAVOR,
        TIMEOUT,
    ],
    form: SchemaForm::Full,
    output_schema: render::command_schema,
    hints: RUNS,
    lower: execute_command,
    render: render::command,
    render_error: render::error,
};

const GET_SESSIONS: ToolRow = ToolRow {
    name: "get_sessions",
    prose: "get_sessions",
    fields: &[SESSION_ID],
    form: SchemaForm::Full,
    output_schema: render::sessions_schema,
    hints: READS,
    lower: |args, _| Ok(session_id(args).map(|_| Op::ListContexts)?),
    render: render::sessions,
    render_error: render::error,
};

const STOP_SESSION: ToolRow = ToolRow {
    name: "stop_session",
    prose: "stop_session",
    fields: &[Field::required("session_id")],
    form: SchemaForm::Full,
    output_schema: render::stopped_schema,
    hints: Hints { read_only: false, destructive: true, idempotent: true },
    lower: stop_session,
    render: render::stopped,
    render_error: render::stop_error,
};

const GET_VOLUME_PATH: ToolRow = ToolRow {
    name: "get_volume_path",
    prose: "get_volume_path",
    fields: &[],
    form: SchemaForm::Full,
    output_schema: render::volumes_schema,
    hints: READS,
    lower: |_, _| Ok(Op::ListVolumes),
    render: render::volumes,
    render_error: render::error,
};

fn execute_code(args: &Args, options: &Options) -> Result<Op, ArgError> {
    let code = args::required(args, "code")?;
    let (target, language) = session(args, options)?;
    let timeout = timeout(args, options.max_timeout)?;
    Ok(Op::RunCode(RunCode { language, timeout, ..RunCode::new(target, code) }))
}

fn execute_command(args: &Args, options: &Options) -> Result<Op, ArgError> {
    let command = command(args)?;
    let (target, language) = session(args, options)?;
    Ok(Op::RunCommand(RunCommand {
        target,
        language,
        command,
        timeout: timeout(args, options.max_command_timeout)?,
        env: Environment::default(),
        network: Network::Usual,
        background: false,
    }))
}

/// Converts the command. Without arguments it is a line for the shell. An empty list counts as no arguments, because
/// models write it in that sense.
fn command(args: &Args) -> Result<Command, FieldError> {
    let program = args::required(args, "command")?;
    let arguments = args::text_list(args, "args")?.unwrap_or_default();
    if program.contains('\0') {
        return Err(FieldError("command cannot contain a NUL character".into()));
    }
    if let Some(at) = arguments.iter().position(|argument| argument.contains('\0')) {
        return Err(FieldError(format!("args[{at}] cannot contain a NUL character")));
    }
    if arguments.is_empty() {
        return Ok(Command::Shell(program.to_owned()));
    }
    Ok(Command::Argv([vec![program.to_owned()], arguments].concat()))
}

/// Returns the session to use, how to create it if it does not exist, and the template that the call asked for. An
/// existing session keeps its template.
fn session(args: &Args, options: &Options) -> Result<(Target, Option<Language>), FieldError> {
    let template = args::choice(args, "template", &TEMPLATES)?;
    let id = session_id(args)?.map(str::to_owned);
    let make = NewContext {
        size: Some(flavor(args)?.unwrap_or(options.default_size)),
        id: id.clone(),
        ..NewContext::named(id.clone().unwrap_or_default(), template.unwrap_or(Language::Python))
    };
    let which = id.map_or(ContextSelector::New, ContextSelector::Id);
    Ok((Target { which, make: Some(make) }, template))
}

fn flavor(args: &Args) -> Result<Option<Size>, FieldError> {
    args::choice(args, "flavor", &FLAVORS)
}

fn session_id(args: &Args) -> Result<Option<&str>, FieldError> {
    args::filled(args, "session_id")?.map(checked).transpose()
}

fn checked(id: &str) -> Result<&str, FieldError> {
    args::check_name(id).map(|()| id).map_err(|why| {
        FieldError(format!("session_id {why}: use letters, digits, '-', '_' and '.', got '{}'", shown(id)))
    })
}

fn stop_session(args: &Args, _: &Options) -> Result<Op, ArgError> {
    let id = checked(args::required(args, "session_id")?)?;
    Ok(Op::StopContext { which: ContextSelector::Id(id.to_owned()) })
}

fn timeout(args: &Args, most: u64) -> Result<Option<Duration>, FieldError> {
    Ok(args::whole(args, "timeout", 1..=most)?.map(Duration::from_secs))
}
