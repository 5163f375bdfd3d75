//! The dialect `microsandbox` of the microsandbox documents. A session is created by the first call that names it.

use std::time::Duration;

use engine::op::{
    Command, ContextSelector, Environment, Language, Network, NewContext, RunCode, RunCommand, Size, Target, Waiting,
};
use engine::{Realm, RealmConfig};
use serde_json::{Value, json};

use super::args::{self, Argument, ChosenId, Timeout, args};
use super::output::Output;
use super::{Answer, ArgError, Dialect, Hints, Lang, LimitHelp, Lowering, Options, ProtocolErrors, operation, tool};

mod render;

use render::{SessionList, StoppedSession, Volumes};

pub const REALM: Realm = Realm("microsandbox");

const LIMIT_HELP: LimitHelp = LimitHelp {
    memory: "The most memory a flavor may give",
    cpus: "The most processor time a flavor may give, in cores",
    ..LimitHelp::USUAL
};

/// Returns the rules of the engine for this dialect.
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
        ready_wait: Duration::from_secs(180),
        browser: None,
        ..RealmConfig::usual(REALM).limited(4096, 4000, 1024)
    }
}

pub static DIALECT: Dialect = Dialect {
    id: REALM.0,
    realm,
    limit_help: LIMIT_HELP,
    startup: crate::plain_startup,
    waiting: Waiting::to_string,
    server_name: "microsandbox-mcp-server",
    default_lang: Lang::En,
    brief: false,
    tools: &[
        tool!("execute_code", Hints::ACTS, execute_code, render::code_schema, render::error),
        tool!("execute_command", Hints::ACTS, execute_command, render::command_schema, render::error),
        tool!("get_sessions", Hints::READS, get_sessions, SessionList::schema, render::error),
        tool!("stop_session", Hints::REPLACES, stop_session, StoppedSession::schema, render::stop_error),
        tool!("get_volume_path", Hints::READS, get_volume_path, Volumes::schema, render::error),
    ],
    aliases: &[("get_volume_mappings", "get_volume_path")],
    errors: ProtocolErrors {
        unknown_tool: |name| (-32601, format!("Tool {name} not found")),
        invalid_request: Some("Invalid Request"),
        method_not_found: Some("Method not found"),
        null_data: false,
    },
    open_stream: false,
    wants_token: false,
    lenient: false,
    prose_en: include_str!("prose.en.md"),
    prose_zh: include_str!("prose.zh.md"),
    refuse: render::refusal,
    background: None,
};

args! {
    struct ExecuteCodeArgs {
        code: String,
        template: Option<Template> = |_| json!("python"),
        session_id: Option<ChosenId>,
        flavor: Option<Size> = |options| json!(options.default_size.name()),
        timeout: Option<Timeout>,
    }

    struct ExecuteCommandArgs {
        command: String,
        args: Vec<String>,
        session_id: Option<ChosenId>,
        template: Option<Template> = |_| json!("python"),
        flavor: Option<Size> = |options| json!(options.default_size.name()),
        timeout: Option<Timeout>,
    }

    struct GetSessionsArgs { session_id: Option<ChosenId> }
    struct StopSessionArgs { session_id: ChosenId }
    struct GetVolumePathArgs {}
}

struct Template(Language);

impl Argument for Template {
    const CHOICES: &'static [&'static str] = &["python", "node"];

    fn parse(field: &str, value: &Value) -> Result<Self, ArgError> {
        args::choice(field, value, &[("python", Language::Python), ("node", Language::Javascript)]).map(Self)
    }
}

fn execute_code(args: ExecuteCodeArgs, options: &Options) -> Lowering {
    let requested = RequestedSession { session_id: args.session_id.map(|id| id.0), flavor: args.flavor };
    let language = args.template.map(|template| template.0);
    let timeout = Timeout::up_to(args.timeout, options.max_timeout)?;
    let run = RunCode { language, timeout, ..RunCode::new(requested.target(language, options), args.code) };
    operation::run_code(run).answer(move |input, ran| render::code(input, &requested, &ran))
}

fn execute_command(args: ExecuteCommandArgs, options: &Options) -> Lowering {
    let (program, arguments) = (args.command, args.args);
    if program.contains('\0') {
        return Err(ArgError::new("command cannot contain a NUL character"));
    }
    if let Some(at) = arguments.iter().position(|argument| argument.contains('\0')) {
        return Err(ArgError::new(format!("args[{at}] cannot contain a NUL character")));
    }
    // A command without arguments is a line for the shell. An empty list counts as no arguments, because models write
    // it in that sense.
    let command = if arguments.is_empty() {
        Command::Shell(program)
    } else {
        Command::Argv(std::iter::once(program).chain(arguments).collect())
    };
    let requested = RequestedSession { session_id: args.session_id.map(|id| id.0), flavor: args.flavor };
    let language = args.template.map(|template| template.0);
    let run = RunCommand {
        target: requested.target(language, options),
        language,
        command,
        timeout: Timeout::up_to(args.timeout, options.max_command_timeout)?,
        env: Environment::default(),
        network: Network::Usual,
        background: false,
    };
    operation::run_command(run).answer(move |input, ran| render::command(input, &requested, &ran))
}

/// The session that a call asks for.
struct RequestedSession {
    session_id: Option<String>,
    flavor: Option<Size>,
}

impl RequestedSession {
    /// Returns the session to use, and how to create it if it does not exist. An existing session keeps its template.
    fn target(&self, template: Option<Language>, options: &Options) -> Target {
        let id = self.session_id.clone();
        let make = NewContext {
            size: Some(self.flavor.unwrap_or(options.default_size)),
            id: id.clone(),
            ..NewContext::named(id.clone().unwrap_or_default(), template.unwrap_or(Language::Python))
        };
        Target { which: id.map_or(ContextSelector::New, ContextSelector::Id), make: Some(make) }
    }
}

/// Lists the sessions. A session that does not exist gives an empty list, not an error.
fn get_sessions(args: GetSessionsArgs, _: &Options) -> Lowering {
    operation::list_contexts().answer(move |input, mut contexts| {
        contexts.retain(|context| args.session_id.as_ref().is_none_or(|id| id.0 == context.id));
        render::sessions(input, contexts)
    })
}

fn stop_session(args: StopSessionArgs, _: &Options) -> Lowering {
    operation::stop_context(ContextSelector::Id(args.session_id.0))
        .answer(|_, stopped| Answer::json(&StoppedSession { success: true, session_id: stopped.context_id }))
}

fn get_volume_path(_: GetVolumePathArgs, _: &Options) -> Lowering {
    operation::list_volumes().answer(render::volumes)
}
