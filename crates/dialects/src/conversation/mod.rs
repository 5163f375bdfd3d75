//! The dialect `conversation` of the code sandbox document. Each call runs in a fresh process; the files and their
//! links belong to the conversation.

use std::time::Duration;

use engine::op::{Environment, FileOwner, Language, Network, RunOnce, Waiting};
use engine::{DATA, KeptConfig, Realm, RealmConfig};
use serde_json::Value;
use text::shown;

use super::args::{AnyText, Argument, args};
use super::output::Output;
use super::shared::files::{decode, path_below};
use super::{
    ArgError, Dialect, Hints, Lang, LimitHelp, Lowering, Options, ProtocolErrors, SchemaForm, ToolRow, operation, tool,
};

mod render;

use render::{RunResult, Runners, Uploaded};

pub const REALM: Realm = Realm("conversation");

const LIMIT_HELP: LimitHelp = LimitHelp {
    memory: "Memory of one call",
    cpus: "Processor time of one call, in cores",
    disk: "Disk quota of a conversation's `/data`",
    idle: "The files of a conversation that is not used for this time are deleted",
    contexts: "Most conversations of a tenant that have files",
    ..LimitHelp::USUAL
};

/// Returns the rules of the engine for this dialect.
pub fn realm() -> RealmConfig {
    let usual = RealmConfig::usual(REALM).limited(256, 500, 512);
    let week = Duration::from_secs(7 * 24 * 3600);
    RealmConfig {
        id_prefix: "conv-",
        timeout: Duration::from_secs(30),
        runs_at_once: 10,
        pool_size: 0,
        max_contexts: 1000,
        idle_timeout: Some(week),
        network_on_call: true,
        browser: None,
        kept: Some(KeptConfig { bytes: usual.limits.disk_bytes, inodes: 100_000, stays: week }),
        ..usual
    }
}

/// The dialect with the tool names of the document.
pub static DIALECT: Dialect = dialect(
    &[RUN_CODE, LIST_RUNNERS, UPLOAD_FILE],
    &[
        ("sandbox_run_code", "sandbox.run_code"),
        ("sandbox_list_runners", "sandbox.list_runners"),
        ("sandbox_upload_file", "sandbox.upload_file"),
    ],
);

/// The dialect for hosts that refuse a dot in a tool name.
pub static WITH_UNDERSCORES: Dialect = dialect(
    &[
        ToolRow { name: "sandbox_run_code", ..RUN_CODE },
        ToolRow { name: "sandbox_list_runners", ..LIST_RUNNERS },
        ToolRow { name: "sandbox_upload_file", ..UPLOAD_FILE },
    ],
    &[
        ("sandbox.run_code", "sandbox_run_code"),
        ("sandbox.list_runners", "sandbox_list_runners"),
        ("sandbox.upload_file", "sandbox_upload_file"),
    ],
);

const fn dialect(tools: &'static [ToolRow], aliases: &'static [(&'static str, &'static str)]) -> Dialect {
    Dialect {
        id: REALM.0,
        realm,
        limit_help: LIMIT_HELP,
        startup: crate::plain_startup,
        waiting: Waiting::to_string,
        server_name: "mcp-code-sandbox",
        default_lang: Lang::En,
        brief: false,
        tools,
        aliases,
        errors: ProtocolErrors { null_data: true, ..ProtocolErrors::USUAL },
        open_stream: true,
        wants_token: true,
        lenient: false,
        prose_en: include_str!("prose.en.md"),
        prose_zh: include_str!("prose.zh.md"),
        refuse: render::refusal,
        background: None,
    }
}

const RUN_CODE: ToolRow = ToolRow {
    prose: "run_code",
    ..tool!("sandbox.run_code", Hints::ACTS, run_code, RunResult::schema, render::run_error)
};

const LIST_RUNNERS: ToolRow = ToolRow {
    prose: "list_runners",
    form: SchemaForm::Bare,
    ..tool!("sandbox.list_runners", Hints::READS, list_runners, Runners::schema, render::runners_error)
};

const UPLOAD_FILE: ToolRow = ToolRow {
    prose: "upload_file",
    ..tool!("sandbox.upload_file", Hints::REPLACES, upload_file, Uploaded::schema, render::upload_error)
};

args! {
    struct RunCodeArgs {
        conversation as "conversationId": ConversationId,
        language: ProgramLanguage,
        code: String,
        network: Option<bool>,
        environment: Environment,
    }

    struct ListRunnersArgs {}
    struct UploadFileArgs { conversation as "conversationId": ConversationId, filename: FileName, content: AnyText }
}

/// Holds the id of a conversation. Any text that fits into a log line is valid, because the id is only hashed.
struct ConversationId(String);

impl Argument for ConversationId {
    fn parse(field: &str, value: &Value) -> Result<Self, ArgError> {
        const LONGEST: usize = 256;
        let id = String::parse(field, value)?;
        if id.chars().count() > LONGEST {
            return Err(ArgError::new(format!("{field} is longer than {LONGEST} characters")));
        }
        if id.chars().any(char::is_control) {
            return Err(ArgError::new(format!("{field} cannot contain control characters")));
        }
        Ok(Self(id))
    }
}

struct ProgramLanguage(Language);

impl Argument for ProgramLanguage {
    const CHOICES: &'static [&'static str] = &["python", "typescript"];

    fn parse(field: &str, value: &Value) -> Result<Self, ArgError> {
        let asked = String::parse(field, value)?;
        let refused = || format!("{field} is not supported: {}. Available: [python, typescript]", shown(&asked));
        Language::parse(field, value).map(Self).map_err(|_| ArgError::new(refused()))
    }
}

/// Holds a path relative to the files of the conversation.
struct FileName(String);

impl Argument for FileName {
    fn parse(field: &str, value: &Value) -> Result<Self, ArgError> {
        let name = String::parse(field, value)?;
        match path_below(DATA, &name) {
            Ok(path) if path != "." => Ok(Self(path)),
            Ok(_) => Err(ArgError::new(format!("{field} cannot be a directory"))),
            Err(why) => Err(ArgError::new(format!("{field} {} is refused: {why}", shown(&name)))),
        }
    }
}

fn run_code(args: RunCodeArgs, _: &Options) -> Lowering {
    let run = RunOnce {
        conversation: args.conversation.0,
        language: args.language.0,
        code: args.code,
        env: args.environment,
        network: Network::asked(args.network),
    };
    operation::run_once(run).answer(render::ran)
}

fn list_runners(_: ListRunnersArgs, _: &Options) -> Lowering {
    operation::list_runtimes().answer(|_, runtimes| render::runners(runtimes))
}

fn upload_file(args: UploadFileArgs, _: &Options) -> Lowering {
    let content = decode(&args.content.0).map_err(|why| ArgError::new(format!("content must be base64: {why}")))?;
    operation::write_file(FileOwner::Conversation(args.conversation.0), args.filename.0, content)
        .answer(render::uploaded)
}
