//! The dialect `agentrun` of the AgentRun document, with the four tools that it describes and the three that it plans.

use std::time::Duration;

use engine::op::{ContextSelector, FileOwner, Language, NewContext, RunCode, Target};
use engine::{Realm, RealmConfig};
use serde_json::Value;
use text::shown;

use super::args::{self, AnyText, Argument, args};
use super::output::Output;
use super::shared::files::{Encoding, FileFacts, Listing, WORKSPACE, Written, decode, path_below};
use super::{
    Answer, ArgError, Dialect, Field, Hints, Lang, LimitHelp, Lowering, Options, ProtocolErrors, ToolRow, operation,
    tool,
};

mod render;
mod startup;

use render::{Contexts, Created, RunResult, Stopped};

pub const REALM: Realm = Realm("agentrun");

const LIMIT_HELP: LimitHelp = LimitHelp {
    memory: "Memory of all contexts of a tenant together",
    cpus: "Processor time of all contexts of a tenant together, in cores",
    pool: "Ready sandboxes that are always kept; also the most runs at once",
    ..LimitHelp::USUAL
};

/// Returns the rules of the engine for this dialect. All contexts of a tenant share one limit of memory and processors,
/// because the document has one interpreter for all contexts.
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

const RUN_CODE: ToolRow = tool!("run_code", Hints::ACTS, run_code, RunResult::schema, render::run_error);
const RUN_CODE_IN_DEFAULT: ToolRow = ToolRow {
    prose: "run_code (default context)",
    fields: &[Field::of::<String>("code")],
    ..tool!("run_code", Hints::ACTS, run_code_in_default, RunResult::schema, render::run_error)
};
const CREATE_CONTEXT: ToolRow =
    tool!("create_context", Hints::ADDS, create_context, Created::schema, render::create_error);
const STOP_CONTEXT: ToolRow = tool!("stop_context", Hints::REPLACES, stop_context, Stopped::schema, render::stop_error);
const LIST_CONTEXTS: ToolRow = tool!("list_contexts", Hints::READS, list_contexts, Contexts::schema, render::error);
const UPLOAD_FILE: ToolRow = tool!("upload_file", Hints::REPLACES, upload_file, Written::schema, render::upload_error);
const DOWNLOAD_FILE: ToolRow = tool!("download_file", Hints::READS, download_file, FileFacts::schema, render::error);
const LIST_FILES: ToolRow = tool!("list_files", Hints::READS, list_files, Listing::schema, render::error);

const fn dialect(tools: &'static [ToolRow]) -> Dialect {
    Dialect {
        id: REALM.0,
        realm,
        limit_help: LIMIT_HELP,
        startup: startup::lines,
        waiting: render::waiting,
        server_name: "agentrun-mcp-server",
        default_lang: Lang::Zh,
        brief: false,
        tools,
        aliases: &[],
        errors: ProtocolErrors::USUAL,
        open_stream: false,
        wants_token: false,
        lenient: false,
        prose_en: include_str!("prose.en.md"),
        prose_zh: include_str!("prose.zh.md"),
        refuse: render::refusal,
        background: None,
    }
}

args! {
    struct RunCodeArgs { code: Needed, context_id: Needed }

    struct RunInDefaultArgs {
        code: String,
        /// A call may still name a context, although the schema does not have the field.
        context_id: Option<AnyText>,
    }

    struct CreateContextArgs { name: ContextName, language: Option<ContextLanguage>, description: Option<AnyText> }
    struct StopContextArgs { context_id: String }
    struct ListContextsArgs {}
    struct UploadFileArgs { context_id: String, path: FilePath, content: AnyText, encoding: Option<FileEncoding> }
    struct DownloadFileArgs { context_id: String, path: FilePath, encoding: Option<FileEncoding> }
    struct ListFilesArgs { context_id: String, path: Option<FilePath> }
}

/// Holds an argument of `run_code`. The document has one message for both arguments, whether missing or invalid. A
/// wrong type is added to that message.
struct Needed(String);

const BOTH: &str = "code and context_id are required";

impl Argument for Needed {
    fn parse(field: &str, value: &Value) -> Result<Self, ArgError> {
        match value {
            Value::Null => Self::absent(field),
            Value::String(text) if text.is_empty() => Self::absent(field),
            _ => AnyText::parse(field, value)
                .map(|text| Self(text.0))
                .map_err(|why| ArgError::new(format!("{BOTH}; {}", why.message))),
        }
    }

    fn absent(_: &str) -> Result<Self, ArgError> {
        Err(ArgError::new(BOTH))
    }
}

struct ContextName(String);

impl Argument for ContextName {
    fn parse(field: &str, value: &Value) -> Result<Self, ArgError> {
        let name = args::text(field, value)?;
        let refused = |why| format!("Invalid context name: name {why}");
        args::check_name(name)
            .map(|()| Self(name.to_owned()))
            .map_err(|why| ArgError { code: "INVALID_CONTEXT_NAME", message: refused(why) })
    }
}

/// Holds the language of a context. A value that is not a string is refused like an unknown language.
struct ContextLanguage(Language);

impl Argument for ContextLanguage {
    const CHOICES: &'static [&'static str] = &["python", "javascript"];

    fn parse(field: &str, value: &Value) -> Result<Self, ArgError> {
        let given = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let message = format!("Unsupported language: {}. Must be 'python' or 'javascript'", shown(&given));
        Language::parse(field, value).map(Self).map_err(|_| ArgError { code: "INVALID_LANGUAGE", message })
    }
}

struct FileEncoding(Encoding);

impl Argument for FileEncoding {
    const CHOICES: &'static [&'static str] = Encoding::CHOICES;

    fn parse(field: &str, value: &Value) -> Result<Self, ArgError> {
        let given = args::text(field, value)?;
        let refused = || format!("{field} must be 'utf-8' or 'base64', got '{}'", shown(given));
        Encoding::parse(field, value).map(Self).map_err(|_| ArgError::new(refused()))
    }
}

/// Holds a path relative to the workspace.
struct FilePath(String);

impl Argument for FilePath {
    fn parse(field: &str, value: &Value) -> Result<Self, ArgError> {
        let path = args::text(field, value)?;
        let refused = |why| format!("Invalid path: {}: {why}", shown(path));
        path_below(WORKSPACE, path).map(Self).map_err(|why| ArgError { code: "INVALID_PATH", message: refused(why) })
    }
}

/// Maximum length of a description. Descriptions appear in every list: fifty of them must stay far below the size of an
/// answer.
const MAX_DESCRIPTION: usize = 4096;

fn existing(context_id: String) -> Target {
    Target::existing(ContextSelector::Named(context_id))
}

fn run_code(args: RunCodeArgs, _: &Options) -> Lowering {
    operation::run_code(RunCode::new(existing(args.context_id.0), args.code.0)).answer(render::ran)
}

fn run_code_in_default(args: RunInDefaultArgs, _: &Options) -> Lowering {
    const NAME: &str = "default";
    let target = args.context_id.map_or_else(
        || Target { make: Some(NewContext::named(NAME, Language::Python)), ..existing(NAME.into()) },
        |context| existing(context.0),
    );
    operation::run_code(RunCode::new(target, args.code)).answer(render::ran)
}

fn create_context(args: CreateContextArgs, _: &Options) -> Lowering {
    let language = args.language.map_or(Language::Python, |language| language.0);
    let description = args.description.map(|text| text.0).unwrap_or_default();
    if description.chars().count() > MAX_DESCRIPTION {
        return Err(ArgError::new(format!("description is longer than {MAX_DESCRIPTION} characters")));
    }
    operation::create_context(NewContext { description, ..NewContext::named(args.name.0, language) })
        .answer(|_, (context, _)| render::created(context))
}

fn stop_context(args: StopContextArgs, _: &Options) -> Lowering {
    operation::stop_context(ContextSelector::Named(args.context_id)).answer(|_, stopped| {
        Answer::json(&Stopped {
            context_id: stopped.context_id,
            status: "stopped",
            message: "Context stopped successfully",
        })
    })
}

fn list_contexts(_: ListContextsArgs, _: &Options) -> Lowering {
    operation::list_contexts().answer(|_, contexts| render::contexts(contexts))
}

fn upload_file(args: UploadFileArgs, _: &Options) -> Lowering {
    let AnyText(content) = args.content;
    let content = match args.encoding {
        None | Some(FileEncoding(Encoding::Utf8)) => content.into_bytes(),
        Some(FileEncoding(Encoding::Base64)) => {
            decode(&content).map_err(|why| ArgError::new(format!("content is not base64: {why}")))?
        }
    };
    operation::write_file(FileOwner::workspace(existing(args.context_id)), args.path.0, content)
        .answer(|_, file| Answer::json(&Written { path: file.path, size: file.size }))
}

fn download_file(args: DownloadFileArgs, _: &Options) -> Lowering {
    let encoding = args.encoding.map(|encoding| encoding.0);
    operation::read_file(FileOwner::workspace(existing(args.context_id)), args.path.0)
        .answer(move |input, read| render::file(input, encoding, read))
}

fn list_files(args: ListFilesArgs, _: &Options) -> Lowering {
    let directory = args.path.map_or_else(|| ".".to_owned(), |path| path.0);
    operation::list_files(FileOwner::workspace(existing(args.context_id)), directory.clone())
        .answer(move |_, files| Answer::json(&Listing::of(&directory, files)))
}
