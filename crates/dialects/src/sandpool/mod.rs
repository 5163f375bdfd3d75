//! `sandpool`: the dialect of this project. Code, commands and files share one context that is created on demand; long
//! runs continue in the background.

use std::time::Duration;

use engine::op::{
    Command, ContextSelector, Environment, FileOwner, Language, Network, NewContext, Op, RunCode, RunCommand, Size,
    Target,
};
use engine::{Realm, RealmConfig};
use text::shown;

use super::args::{self, ArgError, Args, FieldError};
use super::shared::LANGUAGES;
use super::shared::files::{Encoding, WORKSPACE, decode, listing_schema, path_below};
use super::{Dialect, Field, FieldKind, Hints, Lang, LimitHelp, Options, SchemaForm, ToolRow};

mod browser;
mod page;
mod render;

use browser::{BROWSER_ACT, BROWSER_OPEN, BROWSER_SCREENSHOT, BROWSER_SNAPSHOT};

pub const REALM: Realm = Realm("sandpool");

const LIMIT_HELP: LimitHelp = LimitHelp::USUAL;

/// Rules of the engine for this dialect.
pub fn realm() -> RealmConfig {
    RealmConfig::usual(REALM)
}

pub static DIALECT: Dialect = Dialect {
    id: REALM.0,
    realm,
    limit_help: LIMIT_HELP,
    startup: crate::plain_startup,
    server_name: "sandpool",
    default_lang: Lang::En,
    tools: &[
        RUN_CODE,
        RUN_COMMAND,
        WAIT_RUN,
        CANCEL_RUN,
        CREATE_CONTEXT,
        LIST_CONTEXTS,
        STOP_CONTEXT,
        READ_FILE,
        WRITE_FILE,
        LIST_FILES,
        BROWSER_OPEN,
        BROWSER_ACT,
        BROWSER_SNAPSHOT,
        BROWSER_SCREENSHOT,
    ],
    aliases: &[],
    unknown_tool_code: -32602,
    prose_en: include_str!("prose.en.md"),
    prose_zh: include_str!("prose.zh.md"),
    refuse: render::refusal,
    background: Some(&WAIT_RUN),
};

const CHANGES: Hints = Hints { read_only: false, destructive: true, idempotent: false };
const READS: Hints = Hints { read_only: true, destructive: false, idempotent: true };

const LANGUAGE: Field = Field::one_of("language", &["python", "javascript", "typescript"]);
const CONTEXT: Field = Field::optional("context");
const ENCODING: Field = Field::one_of("encoding", &["utf-8", "base64"]);
const TIMEOUT: Field = Field::new("timeout", FieldKind::Whole);
const ENV: Field = Field::new("env", FieldKind::TextMap);
const NETWORK: Field = Field::new("network", FieldKind::Flag);
const BACKGROUND: Field = Field::new("background", FieldKind::Flag);

const RUN_CODE: ToolRow = ToolRow {
    name: "run_code",
    prose: "run_code",
    fields: &[Field::required("code"), LANGUAGE, CONTEXT, TIMEOUT, ENV, NETWORK, BACKGROUND],
    form: SchemaForm::Full,
    output_schema: render::run_schema,
    hints: CHANGES,
    lower: run_code,
    render: render::code,
    render_error: render::run_error,
};

const RUN_COMMAND: ToolRow = ToolRow {
    name: "run_command",
    prose: "run_command",
    fields: &[Field::required("command"), CONTEXT, TIMEOUT, ENV, NETWORK, BACKGROUND],
    lower: run_command,
    render: render::command,
    ..RUN_CODE
};

const WAIT_RUN: ToolRow = ToolRow {
    name: "wait_run",
    prose: "wait_run",
    fields: &[Field::required("run"), Field::new("cursor", FieldKind::Whole), Field::new("wait", FieldKind::Whole)],
    hints: READS,
    lower: wait_run,
    render: render::progress,
    ..RUN_CODE
};

const CANCEL_RUN: ToolRow = ToolRow {
    name: "cancel_run",
    prose: "cancel_run",
    fields: &[Field::required("run")],
    form: SchemaForm::Full,
    output_schema: render::cancelled_schema,
    hints: Hints { read_only: false, destructive: true, idempotent: true },
    lower: |args, _| Ok(Op::CancelRun { run: args::required(args, "run")?.to_owned() }),
    render: render::cancelled,
    render_error: render::error,
};

const CREATE_CONTEXT: ToolRow = ToolRow {
    name: "create_context",
    prose: "create_context",
    fields: &[Field::optional("name"), LANGUAGE, Field::one_of("size", &["small", "medium", "large"])],
    form: SchemaForm::Full,
    output_schema: render::created_schema,
    hints: Hints { read_only: false, destructive: false, idempotent: false },
    lower: create_context,
    render: render::created,
    render_error: render::error,
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

const STOP_CONTEXT: ToolRow = ToolRow {
    name: "stop_context",
    prose: "stop_context",
    fields: &[Field::required("context")],
    form: SchemaForm::Full,
    output_schema: render::stopped_schema,
    hints: Hints { read_only: false, destructive: true, idempotent: true },
    lower: |args, _| Ok(Op::StopContext { which: ContextSelector::Named(args::required(args, "context")?.to_owned()) }),
    render: render::stopped,
    render_error: render::error,
};

const READ_FILE: ToolRow = ToolRow {
    name: "read_file",
    prose: "read_file",
    fields: &[
        Field::required("path"),
        CONTEXT,
        ENCODING,
        Field::new("offset", FieldKind::Whole),
        Field::new("limit", FieldKind::Whole),
    ],
    form: SchemaForm::Full,
    output_schema: render::file_schema,
    hints: READS,
    lower: read_file,
    render: render::file,
    render_error: render::error,
};

const WRITE_FILE: ToolRow = ToolRow {
    name: "write_file",
    prose: "write_file",
    fields: &[Field::required("path"), Field::required("content"), CONTEXT, ENCODING],
    form: SchemaForm::Full,
    output_schema: render::written_schema,
    hints: Hints { read_only: false, destructive: true, idempotent: true },
    lower: write_file,
    render: render::written,
    render_error: render::error,
};

const LIST_FILES: ToolRow = ToolRow {
    name: "list_files",
    prose: "list_files",
    fields: &[Field::optional("path"), CONTEXT],
    form: SchemaForm::Full,
    output_schema: listing_schema,
    hints: READS,
    lower: list_files,
    render: render::files,
    render_error: render::error,
};

/// Context of calls that name none.
const DEFAULT_CONTEXT: &str = "default";

/// Returns the context of a call. A named context has to exist, because a typing error must not look like lost
/// variables.
fn target(args: &Args) -> Result<Target, FieldError> {
    let name = args::filled(args, "context")?.unwrap_or(DEFAULT_CONTEXT);
    let make = (name == DEFAULT_CONTEXT).then(|| NewContext::named(DEFAULT_CONTEXT, Language::Python));
    Ok(Target { which: ContextSelector::Named(name.to_owned()), make })
}

fn run_code(args: &Args, options: &Options) -> Result<Op, ArgError> {
    let code = args::required(args, "code")?.to_owned();
    let language = match args::text(args, "language")? {
        None => None,
        Some(_) if is_shell(args) => return Ok(shell(args, options, code)?),
        Some(_) => args::choice(args, "language", &LANGUAGES)?,
    };
    let background = args::flag(args, "background")?.unwrap_or_default();
    let longest = if background { options.max_command_timeout } else { options.max_timeout };
    Ok(Op::RunCode(RunCode {
        target: target(args)?,
        language,
        code,
        timeout: timeout(args, background, longest)?,
        env: env(args)?,
        network: Network::asked(args::flag(args, "network")?),
        background,
    }))
}

/// Returns whether the language is a shell. Models write it when they mean `run_command`, and it gives the same kind of
/// answer.
fn is_shell(args: &Args) -> bool {
    matches!(args::text(args, "language"), Ok(Some("bash" | "sh" | "shell")))
}

fn run_command(args: &Args, options: &Options) -> Result<Op, ArgError> {
    let command = args::required(args, "command")?.to_owned();
    Ok(shell(args, options, command)?)
}

fn shell(args: &Args, options: &Options, command: String) -> Result<Op, FieldError> {
    let background = args::flag(args, "background")?.unwrap_or_default();
    Ok(Op::RunCommand(RunCommand {
        target: target(args)?,
        language: None,
        command: Command::Shell(command),
        timeout: timeout(args, background, options.max_command_timeout)?,
        env: env(args)?,
        network: Network::asked(args::flag(args, "network")?),
        background,
    }))
}

/// Returns the timeout. In the background nobody waits for the run, so the longest timeout is the default there.
fn timeout(args: &Args, background: bool, longest: u64) -> Result<Option<Duration>, FieldError> {
    let asked = args::whole(args, "timeout", 1..=longest)?;
    Ok(asked.or(background.then_some(longest)).map(Duration::from_secs))
}

fn env(args: &Args) -> Result<Environment, FieldError> {
    Ok(Environment(args::text_map(args, "env")?.unwrap_or_default()))
}

/// Maximum wait of one `wait_run`, below the 60 s after which many clients give up.
const LONGEST_WAIT: u64 = 50;
const USUAL_WAIT: u64 = 20;

fn wait_run(args: &Args, _: &Options) -> Result<Op, ArgError> {
    Ok(Op::WaitRun {
        run: args::required(args, "run")?.to_owned(),
        cursor: args::whole(args, "cursor", 0..=1 << 52)?,
        wait: Duration::from_secs(args::whole(args, "wait", 0..=LONGEST_WAIT)?.unwrap_or(USUAL_WAIT)),
    })
}

fn create_context(args: &Args, _: &Options) -> Result<Op, ArgError> {
    let name = args::text(args, "name")?;
    if let Some(name) = name {
        args::check_name(name).map_err(|why| FieldError(format!("name {why}")))?;
    }
    if name == Some(DEFAULT_CONTEXT) {
        let why = "name cannot be `default`: that context makes itself when a call leaves `context` out";
        return Err(FieldError(why.into()).into());
    }
    let language = args::choice(args, "language", &LANGUAGES)?.unwrap_or(Language::Python);
    let size = args::choice(args, "size", &Size::ALL.map(|size| (size.name(), size)))?;
    Ok(Op::CreateContext(NewContext { size, ..NewContext::named(name.unwrap_or_default(), language) }))
}

fn encoding(args: &Args) -> Result<Option<Encoding>, FieldError> {
    args::choice(args, "encoding", &[("utf-8", Encoding::Utf8), ("base64", Encoding::Base64)])
}

/// Returns the first line, counted from 1, and the number of lines, as the call asks for them.
fn lines(args: &Args) -> Result<(Option<u64>, Option<u64>), FieldError> {
    let counted = 1..=1 << 52;
    Ok((args::whole(args, "offset", counted.clone())?, args::whole(args, "limit", counted)?))
}

fn path(text: &str) -> Result<String, FieldError> {
    path_below(WORKSPACE, text).map_err(|why| FieldError(format!("path {} is refused: {why}", shown(text))))
}

fn read_file(args: &Args, _: &Options) -> Result<Op, ArgError> {
    let path = path(args::required(args, "path")?)?;
    encoding(args)?;
    lines(args)?;
    Ok(Op::ReadFile { place: FileOwner::Context(target(args)?), path })
}

fn write_file(args: &Args, _: &Options) -> Result<Op, ArgError> {
    let path = path(args::required(args, "path")?)?;
    // Empty files are allowed.
    let content = args::given(args, "content")?;
    let content = match encoding(args)? {
        None | Some(Encoding::Utf8) => content.as_bytes().to_vec(),
        Some(Encoding::Base64) => decode(content).map_err(|why| FieldError(format!("content is not base64: {why}")))?,
    };
    Ok(Op::WriteFile { place: FileOwner::Context(target(args)?), path, content })
}

fn directory(args: &Args) -> Result<String, FieldError> {
    args::filled(args, "path")?.map_or(Ok(".".to_owned()), path)
}

fn list_files(args: &Args, _: &Options) -> Result<Op, ArgError> {
    Ok(Op::ListFiles { path: directory(args)?, place: FileOwner::Context(target(args)?) })
}
