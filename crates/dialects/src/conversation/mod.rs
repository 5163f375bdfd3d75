//! `conversation`: the dialect of the code sandbox document. Each call runs in a fresh process, and files with links
//! belong to the conversation.

use std::time::Duration;

use engine::op::{Environment, FileOwner, Language, Network, Op, RunOnce};
use engine::{DATA, KeptConfig, Realm, RealmConfig};
use text::shown;

use super::args::{self, ArgError, Args, FieldError};
use super::shared::LANGUAGES;
use super::shared::files::{decode, path_below};
use super::{Dialect, Field, FieldKind, Hints, Lang, LimitHelp, Options, SchemaForm, ToolRow};

mod render;

pub const REALM: Realm = Realm("conversation");

const LIMIT_HELP: LimitHelp = LimitHelp {
    memory: "Memory of one call",
    cpus: "Processor time of one call, in cores",
    disk: "Disk quota of a conversation's `/data`",
    idle: "Files of a conversation are deleted so long after the last call",
    contexts: "Conversations of a tenant whose files are kept",
    ..LimitHelp::USUAL
};

/// Rules of the engine for this dialect.
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
        server_name: "mcp-code-sandbox",
        default_lang: Lang::En,
        tools,
        aliases,
        unknown_tool_code: -32602,
        prose_en: include_str!("prose.en.md"),
        prose_zh: include_str!("prose.zh.md"),
        refuse: render::refusal,
        background: None,
    }
}

const RUN_CODE: ToolRow = ToolRow {
    name: "sandbox.run_code",
    prose: "run_code",
    fields: &[
        Field::required("conversationId"),
        Field { required: true, ..Field::one_of("language", &["python", "typescript"]) },
        Field::required("code"),
        Field::new("network", FieldKind::Flag),
        Field::new("environment", FieldKind::TextMap),
    ],
    form: SchemaForm::Full,
    output_schema: render::ran_schema,
    hints: Hints { read_only: false, destructive: true, idempotent: false },
    lower: run_code,
    render: render::ran,
    render_error: render::run_error,
};

const LIST_RUNNERS: ToolRow = ToolRow {
    name: "sandbox.list_runners",
    prose: "list_runners",
    fields: &[],
    form: SchemaForm::Bare,
    output_schema: render::runners_schema,
    hints: Hints { read_only: true, destructive: false, idempotent: true },
    lower: |_, _| Ok(Op::ListRuntimes),
    render: render::runners,
    render_error: render::runners_error,
};

const UPLOAD_FILE: ToolRow = ToolRow {
    name: "sandbox.upload_file",
    prose: "upload_file",
    fields: &[Field::required("conversationId"), Field::required("filename"), Field::required("content")],
    form: SchemaForm::Full,
    output_schema: render::uploaded_schema,
    hints: Hints { read_only: false, destructive: true, idempotent: true },
    lower: upload_file,
    render: render::uploaded,
    render_error: render::upload_error,
};

fn run_code(args: &Args, _: &Options) -> Result<Op, ArgError> {
    let conversation = conversation(args)?;
    let language = language(args)?;
    let code = args::required(args, "code")?.to_owned();
    let network = Network::asked(args::flag(args, "network")?);
    let env = Environment(args::text_map(args, "environment")?.unwrap_or_default());
    Ok(Op::RunOnce(RunOnce { conversation, language, code, env, network }))
}

/// Returns the id of the conversation. Any text that fits into a log line is valid, because the id is only hashed.
fn conversation(args: &Args) -> Result<String, FieldError> {
    const LONGEST: usize = 256;
    let id = args::required(args, "conversationId")?;
    if id.chars().count() > LONGEST {
        return Err(FieldError(format!("conversationId is longer than {LONGEST} characters")));
    }
    if id.chars().any(char::is_control) {
        return Err(FieldError("conversationId cannot contain control characters".into()));
    }
    Ok(id.to_owned())
}

fn language(args: &Args) -> Result<Language, FieldError> {
    let asked = args::required(args, "language")?;
    let known = LANGUAGES.into_iter().find(|(name, _)| *name == asked);
    known.map(|(_, language)| language).ok_or_else(|| {
        FieldError(format!("language is not supported: {}. Available: [python, typescript]", shown(asked)))
    })
}

fn upload_file(args: &Args, _: &Options) -> Result<Op, ArgError> {
    let place = FileOwner::Conversation(conversation(args)?);
    let filename = args::required(args, "filename")?;
    let path = match path_below(DATA, filename) {
        Ok(path) if path != "." => path,
        Ok(_) => return Err(FieldError("filename cannot be a directory".into()).into()),
        Err(why) => return Err(FieldError(format!("filename {} is refused: {why}", shown(filename))).into()),
    };
    // Empty files are allowed.
    let content =
        decode(args::given(args, "content")?).map_err(|why| FieldError(format!("content must be base64: {why}")))?;
    Ok(Op::WriteFile { place, path, content })
}
