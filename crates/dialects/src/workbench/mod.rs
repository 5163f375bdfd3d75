//! `workbench`: the dialect of the sandbox workbench: one sandbox at a time, with code, files and a browser.

use std::time::Duration;

use engine::op::browser::{BrowserAction as Ask, MouseButton, SnapshotAsk};
use engine::op::{
    Browse, Command, ContextSelector, Environment, FileOwner, Language, Network, NewContext, Op, RunCode, RunCommand,
    Target,
};
use engine::{Realm, RealmConfig};
use serde_json::json;
use text::shown;

use super::args::{self, ArgError, Args, FieldError};
use super::shared::browse::{ACTING, LOOKING, OPENING};
use super::shared::files::{WORKSPACE, file_schema, path_below, written_schema};
use super::shared::one_line;
use super::{Dialect, Field, FieldKind, Hints, Lang, LimitHelp, Options, SchemaForm, ToolRow};

mod page;
mod render;

pub const REALM: Realm = Realm("workbench");

const LIMIT_HELP: LimitHelp = LimitHelp::USUAL;

/// Rules of the engine for this dialect.
pub fn realm() -> RealmConfig {
    RealmConfig {
        id_prefix: "sbx-",
        timeout: Duration::from_secs(30),
        max_timeout: Duration::from_secs(60),
        runs_at_once: 10,
        max_contexts: 50,
        idle_timeout: Some(Duration::from_secs(3600)),
        browser_first: true,
        ..RealmConfig::usual(REALM)
    }
}

pub static DIALECT: Dialect = Dialect {
    id: REALM.0,
    realm,
    limit_help: LIMIT_HELP,
    startup: crate::plain_startup,
    server_name: "sandbox-workbench",
    default_lang: Lang::En,
    tools: &[
        SANDBOX_CREATE,
        SANDBOX_DESTROY,
        BROWSER_GOTO,
        BROWSER_CLICK,
        BROWSER_TYPE,
        BROWSER_SNAPSHOT,
        CODE_RUN,
        FILE_READ,
        FILE_WRITE,
        FILE_LIST,
    ],
    aliases: &[],
    unknown_tool_code: -32602,
    prose_en: include_str!("prose.en.md"),
    prose_zh: include_str!("prose.zh.md"),
    refuse: render::refusal,
    background: None,
};

const READS: Hints = Hints { read_only: true, destructive: false, idempotent: true };
const ACTS: Hints = Hints { read_only: false, destructive: true, idempotent: false };
const SANDBOX_ID: Field = Field::optional("sandbox_id");

const SANDBOX_CREATE: ToolRow = ToolRow {
    name: "sandbox_create",
    prose: "sandbox_create",
    fields: &[SANDBOX_ID],
    form: SchemaForm::Full,
    output_schema: render::created_schema,
    hints: ACTS,
    lower: sandbox_create,
    render: render::created,
    render_error: render::error,
};

const SANDBOX_DESTROY: ToolRow = ToolRow {
    name: "sandbox_destroy",
    prose: "sandbox_destroy",
    fields: &[SANDBOX_ID],
    form: SchemaForm::Full,
    output_schema: render::destroyed_schema,
    hints: Hints { read_only: false, destructive: true, idempotent: true },
    lower: |args, _| Ok(Op::StopContext { which: which(args)? }),
    render: render::destroyed,
    render_error: render::error,
};

const BROWSER_GOTO: ToolRow = ToolRow {
    name: "browser_goto",
    prose: "browser_goto",
    fields: &[Field::required("url"), SANDBOX_ID],
    form: SchemaForm::Full,
    output_schema: page::page_schema,
    hints: ACTS,
    lower: |args, _| browse(args, Ask::Open { url: args::required(args, "url")?.to_owned() }, OPENING),
    render: page::browsed,
    render_error: render::error,
};

const BROWSER_CLICK: ToolRow = ToolRow {
    name: "browser_click",
    prose: "browser_click",
    fields: &[Field::required("selector"), SANDBOX_ID],
    lower: browser_click,
    ..BROWSER_GOTO
};

const BROWSER_TYPE: ToolRow = ToolRow {
    name: "browser_type",
    prose: "browser_type",
    fields: &[Field::required("selector"), Field::required("text"), SANDBOX_ID],
    lower: browser_type,
    ..BROWSER_GOTO
};

const BROWSER_SNAPSHOT: ToolRow = ToolRow {
    name: "browser_snapshot",
    prose: "browser_snapshot",
    fields: &[Field::new("maxTextLen", FieldKind::Whole).default(|_| json!(SNAPSHOT_TEXT)), SANDBOX_ID],
    output_schema: page::snapshot_schema,
    hints: READS,
    lower: browser_snapshot,
    ..BROWSER_GOTO
};

const CODE_RUN: ToolRow = ToolRow {
    name: "code_run",
    prose: "code_run",
    fields: &[
        Field { required: true, ..Field::one_of("language", &["python", "javascript", "typescript", "shell"]) },
        Field::required("code"),
        SANDBOX_ID,
    ],
    form: SchemaForm::Full,
    output_schema: render::ran_schema,
    hints: ACTS,
    lower: code_run,
    render: render::ran,
    render_error: render::error,
};

const FILE_READ: ToolRow = ToolRow {
    name: "file_read",
    prose: "file_read",
    fields: &[Field::required("path"), SANDBOX_ID],
    form: SchemaForm::Full,
    output_schema: file_schema,
    hints: READS,
    lower: |args, _| Ok(Op::ReadFile { place: holder(args)?, path: path(args::given(args, "path")?)? }),
    render: render::file,
    render_error: render::error,
};

const FILE_WRITE: ToolRow = ToolRow {
    name: "file_write",
    prose: "file_write",
    fields: &[Field::required("path"), Field::required("content"), SANDBOX_ID],
    form: SchemaForm::Full,
    output_schema: written_schema,
    hints: Hints { read_only: false, destructive: true, idempotent: true },
    lower: file_write,
    render: render::written,
    render_error: render::error,
};

const FILE_LIST: ToolRow = ToolRow {
    name: "file_list",
    prose: "file_list",
    fields: &[Field::optional("path").default(|_| json!(".")), SANDBOX_ID],
    form: SchemaForm::Full,
    output_schema: render::files_schema,
    hints: READS,
    lower: |args, _| Ok(Op::ListFiles { place: holder(args)?, path: directory(args)? }),
    render: render::files,
    render_error: render::error,
};

/// Usual number of characters of a page's text in a snapshot.
const SNAPSHOT_TEXT: u64 = 8_000;
const MOST_SNAPSHOT_TEXT: u64 = 100_000;

/// Number of characters for the elements of a page in a snapshot.
const SNAPSHOT_ELEMENTS: u64 = 20_000;

fn text_length(args: &Args) -> Result<u64, FieldError> {
    Ok(args::whole(args, "maxTextLen", 1..=MOST_SNAPSHOT_TEXT)?.unwrap_or(SNAPSHOT_TEXT))
}

fn sandbox_id(args: &Args) -> Result<Option<&str>, FieldError> {
    let id = args::filled(args, "sandbox_id")?;
    let check = |id| {
        args::check_name(id).map(|()| id).map_err(|why| {
            FieldError(format!("sandbox_id {why}: use letters, digits, '-', '_' and '.', got '{}'", shown(id)))
        })
    };
    id.map(check).transpose()
}

/// Selects the sandbox that the call names, otherwise the sandbox of the connection.
fn which(args: &Args) -> Result<ContextSelector, FieldError> {
    Ok(sandbox_id(args)?.map_or(ContextSelector::Current, |id| ContextSelector::Id(id.to_owned())))
}

fn holder(args: &Args) -> Result<FileOwner, FieldError> {
    Ok(FileOwner::Context(Target::existing(which(args)?)))
}

/// Creates the sandbox of a connection. A connection has one sandbox, so a new one replaces it.
fn sandbox_create(args: &Args, _: &Options) -> Result<Op, ArgError> {
    let id = sandbox_id(args)?.map(str::to_owned);
    let name = id.clone().unwrap_or_default();
    Ok(Op::CreateContext(NewContext { id, replace: true, browser: true, ..NewContext::named(name, Language::Python) }))
}

fn code_run(args: &Args, _: &Options) -> Result<Op, ArgError> {
    const LANGUAGES: [(&str, Option<Language>); 4] = [
        ("python", Some(Language::Python)),
        ("javascript", Some(Language::Javascript)),
        ("typescript", Some(Language::Typescript)),
        ("shell", None),
    ];
    args::required(args, "language")?;
    let language = args::choice(args, "language", &LANGUAGES)?.flatten();
    let code = args::required(args, "code")?;
    let target = Target::existing(which(args)?);
    if language.is_some() {
        return Ok(Op::RunCode(RunCode { language, ..RunCode::new(target, code) }));
    }
    if code.contains('\0') {
        return Err(FieldError("code cannot contain a NUL character".into()).into());
    }
    Ok(Op::RunCommand(RunCommand {
        target,
        language: None,
        command: Command::Shell(code.to_owned()),
        timeout: None,
        env: Environment::default(),
        network: Network::Usual,
        background: false,
    }))
}

fn path(text: &str) -> Result<String, FieldError> {
    path_below(WORKSPACE, text).map_err(|why| FieldError(format!("{why} (path=\"{}\")", one_line(text))))
}

fn directory(args: &Args) -> Result<String, FieldError> {
    args::text(args, "path")?.map_or(Ok(".".to_owned()), path)
}

fn file_write(args: &Args, _: &Options) -> Result<Op, ArgError> {
    let path = path(args::given(args, "path")?)?;
    // Empty files are allowed.
    let content = args::given(args, "content")?.as_bytes().to_vec();
    Ok(Op::WriteFile { place: holder(args)?, path, content })
}

fn browse(args: &Args, ask: Ask, timeout: Duration) -> Result<Op, ArgError> {
    Ok(Op::Browse(Browse { target: Target::existing(which(args)?), ask, uploads: Vec::new(), timeout }))
}

/// Returns a `ref_N` or a CSS selector. The browser tells them apart.
fn selector(args: &Args) -> Result<String, FieldError> {
    args::required(args, "selector").map(str::to_owned)
}

fn browser_click(args: &Args, _: &Options) -> Result<Op, ArgError> {
    browse(args, Ask::Click { at: selector(args)?, button: MouseButton::Left, double: false }, ACTING)
}

fn browser_type(args: &Args, _: &Options) -> Result<Op, ArgError> {
    // An empty text empties the field.
    let text = args::given(args, "text")?.to_owned();
    browse(args, Ask::Type { at: selector(args)?, text, append: false, submit: false, keys: false }, ACTING)
}

fn browser_snapshot(args: &Args, _: &Options) -> Result<Op, ArgError> {
    // Text and elements share the browser's budget, but `maxTextLen` counts text only.
    let max_chars = u32::try_from(text_length(args)? + SNAPSHOT_ELEMENTS).unwrap_or(u32::MAX);
    browse(args, Ask::Snapshot(SnapshotAsk { max_chars, apart: true, ..SnapshotAsk::default() }), LOOKING)
}
