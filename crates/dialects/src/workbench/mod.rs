//! The dialect `workbench` of the sandbox workbench. A connection has one sandbox at a time, with code, files and a
//! browser.

use std::time::Duration;

use engine::op::browser::{BrowserAction as Ask, MouseButton, SnapshotAsk};
use engine::op::{
    Browse, Command, ContextSelector, Environment, FileOwner, Language, Network, NewContext, RunCode, RunCommand,
    Target, Waiting,
};
use engine::{Realm, RealmConfig};
use serde_json::{Value, json};

use super::args::{self, AnyText, Argument, ChosenId, Whole, args};
use super::output::Output;
use super::shared::browse::{ACTING, LOOKING, OPENING};
use super::shared::files::{FileFacts, WORKSPACE, Written, path_below};
use super::shared::one_line;
use super::{ArgError, Dialect, Hints, Lang, LimitHelp, Lowering, Options, ProtocolErrors, operation, tool};

mod page;
mod render;

use page::PageRequest;
use render::{Created, Destroyed, Directory, Executed};

pub const REALM: Realm = Realm("workbench");

const LIMIT_HELP: LimitHelp = LimitHelp::USUAL;

/// Returns the rules of the engine for this dialect.
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
    waiting: Waiting::to_string,
    server_name: "sandbox-workbench",
    default_lang: Lang::En,
    brief: false,
    tools: &[
        tool!("sandbox_create", Hints::ACTS, sandbox_create, Created::schema, render::error),
        tool!("sandbox_destroy", Hints::REPLACES, sandbox_destroy, Destroyed::schema, render::error),
        tool!("browser_goto", Hints::ACTS, browser_goto, page::page_schema, render::error),
        tool!("browser_click", Hints::ACTS, browser_click, page::page_schema, render::error),
        tool!("browser_type", Hints::ACTS, browser_type, page::page_schema, render::error),
        tool!("browser_snapshot", Hints::READS, browser_snapshot, page::snapshot_schema, render::error),
        tool!("code_run", Hints::ACTS, code_run, Executed::schema, render::error),
        tool!("file_read", Hints::READS, file_read, FileFacts::schema, render::error),
        tool!("file_write", Hints::REPLACES, file_write, Written::schema, render::error),
        tool!("file_list", Hints::READS, file_list, Directory::schema, render::error),
    ],
    aliases: &[],
    errors: ProtocolErrors::USUAL,
    open_stream: false,
    wants_token: false,
    lenient: false,
    prose_en: include_str!("prose.en.md"),
    prose_zh: include_str!("prose.zh.md"),
    refuse: render::refusal,
    background: None,
};

args! {
    struct SandboxArgs { sandbox_id: Option<ChosenId> }
    struct BrowserGotoArgs { url: String, sandbox_id: Option<ChosenId> }

    /// `selector` is a `ref_N` or a CSS selector. The browser tells them apart.
    struct BrowserClickArgs { selector: String, sandbox_id: Option<ChosenId> }

    /// An empty text empties the field.
    struct BrowserTypeArgs { selector: String, text: AnyText, sandbox_id: Option<ChosenId> }
    struct BrowserSnapshotArgs {
        text_length as "maxTextLen": Option<Whole<1, MOST_SNAPSHOT_TEXT>> = |_| json!(SNAPSHOT_TEXT),
        sandbox_id: Option<ChosenId>,
    }

    struct CodeRunArgs { language: CodeLanguage, code: String, sandbox_id: Option<ChosenId> }
    struct FileReadArgs { path: FilePath, sandbox_id: Option<ChosenId> }
    struct FileWriteArgs { path: FilePath, content: AnyText, sandbox_id: Option<ChosenId> }
    struct FileListArgs { path: Option<FilePath> = |_| json!("."), sandbox_id: Option<ChosenId> }
}

/// Usual number of characters of a page's text in a snapshot.
const SNAPSHOT_TEXT: u64 = 8_000;
const MOST_SNAPSHOT_TEXT: u64 = 100_000;

/// Number of characters for the elements of a page in a snapshot.
const SNAPSHOT_ELEMENTS: u64 = 20_000;

/// Holds the language of code, or none for a line of the shell.
struct CodeLanguage(Option<Language>);

impl Argument for CodeLanguage {
    const CHOICES: &'static [&'static str] = &["python", "javascript", "typescript", "shell"];

    fn parse(field: &str, value: &Value) -> Result<Self, ArgError> {
        const LANGUAGES: [(&str, Option<Language>); 4] = [
            ("python", Some(Language::Python)),
            ("javascript", Some(Language::Javascript)),
            ("typescript", Some(Language::Typescript)),
            ("shell", None),
        ];
        String::parse(field, value)?;
        args::choice(field, value, &LANGUAGES).map(Self)
    }
}

/// Holds a path relative to the workspace.
struct FilePath(String);

impl Argument for FilePath {
    fn parse(field: &str, value: &Value) -> Result<Self, ArgError> {
        let path = args::text(field, value)?;
        let refused = |why| ArgError::new(format!("{why} (path=\"{}\")", one_line(path)));
        path_below(WORKSPACE, path).map(Self).map_err(refused)
    }
}

/// Selects the sandbox that the call names. If it names none, this selects the sandbox of the connection.
fn which(sandbox_id: Option<ChosenId>) -> ContextSelector {
    sandbox_id.map_or(ContextSelector::Current, |id| ContextSelector::Id(id.0))
}

fn file_owner(sandbox_id: Option<ChosenId>) -> FileOwner {
    FileOwner::workspace(Target::existing(which(sandbox_id)))
}

/// Creates the sandbox of a connection. A connection has one sandbox, so a new one replaces it.
fn sandbox_create(args: SandboxArgs, _: &Options) -> Lowering {
    let id = args.sandbox_id.map(|id| id.0);
    let name = id.clone().unwrap_or_default();
    let new = NewContext { id, replace: true, browser: true, ..NewContext::named(name, Language::Python) };
    operation::create_context(new).answer(|input, (context, replaced)| render::created(input, context, replaced))
}

fn sandbox_destroy(args: SandboxArgs, _: &Options) -> Lowering {
    operation::stop_context(which(args.sandbox_id)).answer(|input, stopped| {
        let sandbox_id = stopped.context_id;
        render::succeeded(input, &sandbox_id.clone(), &Destroyed { sandbox_id })
    })
}

fn code_run(args: CodeRunArgs, _: &Options) -> Lowering {
    let (CodeLanguage(language), code) = (args.language, args.code);
    let target = Target::existing(which(args.sandbox_id));
    if language.is_some() {
        return operation::run_code(RunCode { language, ..RunCode::new(target, code) })
            .answer(move |input, ran| render::ran(input, language, &ran));
    }
    if code.contains('\0') {
        return Err(ArgError::new("code cannot contain a NUL character"));
    }
    let run = RunCommand {
        target,
        language: None,
        command: Command::Shell(code),
        timeout: None,
        env: Environment::default(),
        network: Network::Usual,
        background: false,
    };
    operation::run_command(run).answer(|input, ran| render::ran(input, None, &ran))
}

fn file_read(args: FileReadArgs, _: &Options) -> Lowering {
    operation::read_file(file_owner(args.sandbox_id), args.path.0).answer(render::file)
}

fn file_write(args: FileWriteArgs, _: &Options) -> Lowering {
    operation::write_file(file_owner(args.sandbox_id), args.path.0, args.content.0.into_bytes()).answer(render::written)
}

fn file_list(args: FileListArgs, _: &Options) -> Lowering {
    let path = args.path.map_or_else(|| ".".to_owned(), |path| path.0);
    operation::list_files(file_owner(args.sandbox_id), path.clone())
        .answer(move |input, files| render::files(input, path, files))
}

fn browse(sandbox_id: Option<ChosenId>, ask: Ask, timeout: Duration, asked: PageRequest) -> Lowering {
    let target = Target::existing(which(sandbox_id));
    operation::browse(Browse { target, ask, uploads: Vec::new(), changes: 0, timeout })
        .answer(move |input, browsed| page::browsed(input, &asked, browsed))
}

fn browser_goto(args: BrowserGotoArgs, _: &Options) -> Lowering {
    browse(args.sandbox_id, Ask::Open { url: args.url }, OPENING, PageRequest::new("url"))
}

fn browser_click(args: BrowserClickArgs, _: &Options) -> Lowering {
    let ask = Ask::Click { at: args.selector, button: MouseButton::Left, double: false };
    browse(args.sandbox_id, ask, ACTING, PageRequest::new("selector"))
}

fn browser_type(args: BrowserTypeArgs, _: &Options) -> Lowering {
    let (at, text) = (args.selector, args.text.0);
    let ask = Ask::Type { at, text, append: false, submit: false, keys: false };
    browse(args.sandbox_id, ask, ACTING, PageRequest::new("selector"))
}

fn browser_snapshot(args: BrowserSnapshotArgs, _: &Options) -> Lowering {
    // Text and elements share the browser's budget, but `maxTextLen` counts text only. The browser sends one character
    // more, so that the text is cut at exactly this length.
    let length = args.text_length.map_or(SNAPSHOT_TEXT, |length| length.0);
    let chars = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
    let (max_chars, apart) = (chars(length + SNAPSHOT_ELEMENTS), Some(chars(length + 1)));
    let ask = Ask::Snapshot(SnapshotAsk { max_chars, apart, ..SnapshotAsk::default() });
    browse(args.sandbox_id, ask, LOOKING, PageRequest { field: None, text_length: length })
}
