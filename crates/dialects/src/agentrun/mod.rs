//! `agentrun`: the dialect of the AgentRun document, with the four tools that it prints and the three that it planned.

use std::time::Duration;

use engine::op::{ContextSelector, FileOwner, Language, NewContext, Op, RunCode, Target};
use engine::{Realm, RealmConfig};
use serde_json::Value;
use text::shown;

use super::args::{self, ArgError, Args, FieldError};
use super::shared::LANGUAGES;
use super::shared::files::{Encoding, WORKSPACE, decode, file_schema, listing_schema, path_below, written_schema};
use super::{Dialect, Field, Hints, Lang, LimitHelp, Options, SchemaForm, ToolRow};

mod render;
mod startup;

pub const REALM: Realm = Realm("agentrun");

const LIMIT_HELP: LimitHelp = LimitHelp {
    memory: "Memory of all contexts of a tenant together",
    cpus: "Processor time of all contexts of a tenant together, in cores",
    pool: "Sandboxes kept ready; as many runs execute at once",
    ..LimitHelp::USUAL
};

/// Rules of the engine for this dialect. All contexts of a tenant share one budget of memory and processors, which
/// stands for the interpreter of the document.
pub fn realm() -> RealmConfig {
    let usual = RealmConfig::usual(REALM);
    RealmConfig {
        timeout: Duration::from_secs(30),
        group_memory_bytes: Some(usual.limits.memory_bytes),
        group_cpu_millis: Some(usual.limits.cpu_millis),
        runs_at_once: 3,
        max_contexts: 50,
        one_language: true,
        browser: None,
        ..usual
    }
}

/// The dialect with `run_code {code, context_id}`, as the body of the document has it.
pub static DIALECT: Dialect =
    dialect(&[RUN_CODE, CREATE_CONTEXT, STOP_CONTEXT, LIST_CONTEXTS, UPLOAD_FILE, DOWNLOAD_FILE, LIST_FILES]);

/// The dialect with `run_code {code}`, as the appendix of the document has it. The code runs in a context named
/// `default`, which the first call creates.
pub static WITH_DEFAULT_CONTEXT: Dialect = dialect(&[
    RUN_CODE_IN_DEFAULT,
    CREATE_CONTEXT,
    STOP_CONTEXT,
    LIST_CONTEXTS,
    UPLOAD_FILE,
    DOWNLOAD_FILE,
    LIST_FILES,
]);

const fn dialect(tools: &'static [ToolRow]) -> Dialect {
    Dialect {
        id: REALM.0,
        realm,
        limit_help: LIMIT_HELP,
        startup: startup::lines,
        server_name: "agentrun-mcp-server",
        default_lang: Lang::Zh,
        tools,
        aliases: &[],
        unknown_tool_code: -32602,
        prose_en: include_str!("prose.en.md"),
        prose_zh: include_str!("prose.zh.md"),
        refuse: render::refusal,
        background: None,
    }
}

const READS: Hints = Hints { read_only: true, destructive: false, idempotent: true };
const ENCODINGS: &[&str] = &["utf-8", "base64"];

const RUN_CODE: ToolRow = ToolRow {
    name: "run_code",
    prose: "run_code",
    fields: &[Field::required("code"), Field::required("context_id")],
    form: SchemaForm::Full,
    output_schema: render::ran_schema,
    hints: Hints { read_only: false, destructive: true, idempotent: false },
    lower: run_code,
    render: render::ran,
    render_error: render::run_error,
};

const RUN_CODE_IN_DEFAULT: ToolRow = ToolRow {
    prose: "run_code (default context)",
    fields: &[Field::required("code")],
    lower: run_code_in_default,
    ..RUN_CODE
};

const CREATE_CONTEXT: ToolRow = ToolRow {
    name: "create_context",
    prose: "create_context",
    fields: &[
        Field::required("name"),
        Field::one_of("language", &["python", "javascript"]),
        Field::optional("description"),
    ],
    form: SchemaForm::Full,
    output_schema: render::created_schema,
    hints: Hints { read_only: false, destructive: false, idempotent: false },
    lower: create_context,
    render: render::created,
    render_error: render::create_error,
};

const STOP_CONTEXT: ToolRow = ToolRow {
    name: "stop_context",
    prose: "stop_context",
    fields: &[Field::required("context_id")],
    form: SchemaForm::Full,
    output_schema: render::stopped_schema,
    hints: Hints { read_only: false, destructive: true, idempotent: true },
    lower: |args, _| Ok(Op::StopContext { which: ContextSelector::Named(required(args, "context_id")?.to_owned()) }),
    render: render::stopped,
    render_error: render::stop_error,
};

const LIST_CONTEXTS: ToolRow = ToolRow {
    name: "list_contexts",
    prose: "list_contexts",
    fields: &[],
    form: SchemaForm::Full,
    output_schema: render::contexts_schema,
    hints: READS,
    lower: |_, _| Ok(Op::ListContexts),
    render: render::contexts,
    render_error: render::error,
};

const UPLOAD_FILE: ToolRow = ToolRow {
    name: "upload_file",
    prose: "upload_file",
    fields: &[
        Field::required("context_id"),
        Field::required("path"),
        Field::required("content"),
        Field::one_of("encoding", ENCODINGS),
    ],
    form: SchemaForm::Full,
    output_schema: written_schema,
    hints: Hints { read_only: false, destructive: true, idempotent: true },
    lower: upload_file,
    render: render::written,
    render_error: render::upload_error,
};

const DOWNLOAD_FILE: ToolRow = ToolRow {
    name: "download_file",
    prose: "download_file",
    fields: &[Field::required("context_id"), Field::required("path"), Field::one_of("encoding", ENCODINGS)],
    form: SchemaForm::Full,
    output_schema: file_schema,
    hints: READS,
    lower: download_file,
    render: render::file,
    render_error: render::error,
};

const LIST_FILES: ToolRow = ToolRow {
    name: "list_files",
    prose: "list_files",
    fields: &[Field::required("context_id"), Field::optional("path")],
    form: SchemaForm::Full,
    output_schema: listing_schema,
    hints: READS,
    lower: list_files,
    render: render::files,
    render_error: render::error,
};

fn invalid(why: impl std::fmt::Display) -> ArgError {
    ArgError { code: "INVALID_PARAMS", message: format!("Invalid arguments: {why}") }
}

fn optional<'a>(args: &'a Args, field: &str) -> Result<Option<&'a str>, ArgError> {
    args::text(args, field).map_err(invalid)
}

fn given<'a>(args: &'a Args, field: &str) -> Result<&'a str, ArgError> {
    args::given(args, field).map_err(invalid)
}

fn required<'a>(args: &'a Args, field: &str) -> Result<&'a str, ArgError> {
    args::required(args, field).map_err(invalid)
}

/// Converts `run_code`. The document has one message for both fields, missing or invalid; a wrong type is added to it.
fn run_code(args: &Args, _: &Options) -> Result<Op, ArgError> {
    const BOTH: &str = "code and context_id are required";
    let part = |field| match args.get(field) {
        None | Some(Value::Null) => Err(invalid(BOTH)),
        _ => match args::text(args, field) {
            Ok(Some(text)) if !text.is_empty() => Ok(text.to_owned()),
            Ok(_) => Err(invalid(BOTH)),
            Err(FieldError(why)) => Err(invalid(format!("{BOTH}; {why}"))),
        },
    };
    let code = part("code")?;
    Ok(Op::RunCode(RunCode::new(Target::existing(ContextSelector::Named(part("context_id")?)), code)))
}

fn run_code_in_default(args: &Args, _: &Options) -> Result<Op, ArgError> {
    let code = required(args, "code")?;
    // A call may still name a context; the field is just not advertised.
    let target = match optional(args, "context_id")? {
        Some(context) => Target::existing(ContextSelector::Named(context.to_owned())),
        None => Target {
            which: ContextSelector::Named(DEFAULT_CONTEXT.to_owned()),
            make: Some(NewContext::named(DEFAULT_CONTEXT, Language::Python)),
        },
    };
    Ok(Op::RunCode(RunCode::new(target, code)))
}

const DEFAULT_CONTEXT: &str = "default";

fn create_context(args: &Args, _: &Options) -> Result<Op, ArgError> {
    let name = given(args, "name")?;
    args::check_name(name).map_err(|why| ArgError {
        code: "INVALID_CONTEXT_NAME",
        message: format!("Invalid context name: name {why}"),
    })?;
    let language = language(args.get("language"))?;
    let description = optional(args, "description")?.unwrap_or_default();
    if description.chars().count() > MAX_DESCRIPTION {
        return Err(invalid(format!("description is longer than {MAX_DESCRIPTION} characters")));
    }
    Ok(Op::CreateContext(NewContext { description: description.to_owned(), ..NewContext::named(name, language) }))
}

/// Maximum length of a description. Descriptions appear in every list: fifty of them must stay far below the size of an
/// answer.
const MAX_DESCRIPTION: usize = 4096;

/// Returns the language of a context. A value that is not a string is refused like an unknown language.
fn language(value: Option<&Value>) -> Result<Language, ArgError> {
    let given = match value {
        None => return Ok(Language::Python),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    };
    match LANGUAGES.iter().find(|(name, _)| *name == given) {
        Some((_, language)) => Ok(*language),
        None => Err(ArgError {
            code: "INVALID_LANGUAGE",
            message: format!("Unsupported language: {}. Must be 'python' or 'javascript'", shown(&given)),
        }),
    }
}

fn encoding(args: &Args) -> Result<Option<Encoding>, ArgError> {
    match optional(args, "encoding")? {
        None => Ok(None),
        Some("utf-8") => Ok(Some(Encoding::Utf8)),
        Some("base64") => Ok(Some(Encoding::Base64)),
        Some(other) => Err(invalid(format!("encoding must be 'utf-8' or 'base64', got '{}'", shown(other)))),
    }
}

fn path(text: &str) -> Result<String, ArgError> {
    path_below(WORKSPACE, text)
        .map_err(|why| ArgError { code: "INVALID_PATH", message: format!("Invalid path: {}: {why}", shown(text)) })
}

fn upload_file(args: &Args, _: &Options) -> Result<Op, ArgError> {
    let place = holder(args)?;
    let path = path(given(args, "path")?)?;
    // Empty files are allowed.
    let content = given(args, "content")?;
    let content = match encoding(args)? {
        None | Some(Encoding::Utf8) => content.as_bytes().to_vec(),
        Some(Encoding::Base64) => decode(content).map_err(|why| invalid(format!("content is not base64: {why}")))?,
    };
    Ok(Op::WriteFile { place, path, content })
}

fn download_file(args: &Args, _: &Options) -> Result<Op, ArgError> {
    encoding(args)?;
    Ok(Op::ReadFile { place: holder(args)?, path: path(given(args, "path")?)? })
}

fn list_files(args: &Args, _: &Options) -> Result<Op, ArgError> {
    Ok(Op::ListFiles { place: holder(args)?, path: directory(args)? })
}

fn holder(args: &Args) -> Result<FileOwner, ArgError> {
    Ok(FileOwner::Context(Target::existing(ContextSelector::Named(required(args, "context_id")?.to_owned()))))
}

fn directory(args: &Args) -> Result<String, ArgError> {
    optional(args, "path")?.map_or(Ok(".".to_owned()), path)
}
