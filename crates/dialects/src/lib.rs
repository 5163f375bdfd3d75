//! A dialect is a table of tools: names, prose, argument schemas, the conversion of arguments to an `Op` and of an
//! `Outcome` to an answer. Everything here is pure: it uses no state, no clock, no engine and no protocol library.

use engine::op::{EngineError, Outcome, Size, Waiting};
use engine::{RealmConfig, StartupStep};
use serde::Serialize;
use serde_json::{Map, Value, json};

pub mod agentrun;
mod args;
pub mod conversation;
mod lenient;
pub mod links;
pub mod microsandbox;
pub mod mime;
mod operation;
mod output;
mod prose;
pub mod sandpool;
mod shared;
pub mod workbench;

pub use args::{ArgError, Args};
pub use links::Links;
pub use operation::Lowered;
pub use shared::untrusted::Fence;

/// One dialect, as its document describes it.
pub struct Dialect {
    /// Name of the dialect, and of its realm in the engine.
    pub id: &'static str,
    /// Rules of the dialect's realm, which the operator's settings change.
    pub realm: fn() -> RealmConfig,
    /// Help texts of the settings in `[dialect.<id>]` for this dialect.
    pub limit_help: LimitHelp,
    /// Log lines of the server's start, if this is the default dialect.
    pub startup: fn(&StartupStep<'_>) -> Vec<String>,
    /// Says what a call waits for, in its progress messages.
    pub waiting: fn(&Waiting) -> String,
    pub server_name: &'static str,
    /// Language of the document, used if the operator chose none.
    pub default_lang: Lang,
    /// Whether the list of tools leaves out what the protocol and JSON Schema say anyway: annotations that are the default,
    /// which members of an answer are always present, and an empty list of required arguments.
    pub brief: bool,
    pub tools: &'static [ToolRow],
    /// Other names of tools, which are accepted but not advertised.
    pub aliases: &'static [(&'static str, &'static str)],
    pub errors: ProtocolErrors,
    /// Whether the document opens the stream of GET without a session.
    pub open_stream: bool,
    /// Whether the document demands a token on every request.
    pub wants_token: bool,
    /// Whether arguments may be written in other ways whose meaning is clear. Unknown arguments are then refused;
    /// otherwise they are ignored.
    pub lenient: bool,
    pub prose_en: &'static str,
    pub prose_zh: &'static str,
    /// Renders refused arguments in the form of the dialect.
    pub refuse: fn(&RenderInput<'_>, &ArgError) -> Reply,
    /// The tool that queries a background run. In a dialect that has one, long runs can become tasks for clients that
    /// support them.
    pub background: Option<&'static ToolRow>,
}

/// How a dialect words the errors of the protocol itself.
#[derive(Debug, Clone, Copy)]
pub struct ProtocolErrors {
    /// JSON-RPC error code and message for a tool that does not exist.
    pub unknown_tool: fn(&str) -> (i32, String),
    /// Whole message for a message that is no JSON-RPC request, if the document prescribes one.
    pub invalid_request: Option<&'static str>,
    /// Whole message for an unknown method, if the document prescribes one.
    pub method_not_found: Option<&'static str>,
    /// Whether errors without data have the member `"data": null`.
    pub null_data: bool,
}

impl ProtocolErrors {
    const USUAL: Self = Self {
        unknown_tool: |name| (-32602, format!("Unknown tool: {name}")),
        invalid_request: None,
        method_not_found: None,
        null_data: false,
    };
}

/// Help texts of the settings whose meaning differs between dialects.
#[derive(Debug, Clone, Copy)]
pub struct LimitHelp {
    pub memory: &'static str,
    pub cpus: &'static str,
    pub disk: &'static str,
    pub pool: &'static str,
    pub idle: &'static str,
    pub contexts: &'static str,
}

impl LimitHelp {
    const USUAL: Self = Self {
        memory: "Memory of a context",
        cpus: "Processor time of a context, in cores",
        disk: "Disk quota of a context",
        pool: "Ready sandboxes that are always kept if this is the default dialect",
        idle: "A context that is not used for this time is removed",
        contexts: "Most contexts of a tenant",
    };
}

/// Returns the lines of the server's start in a dialect whose document prescribes none.
fn plain_startup(step: &StartupStep<'_>) -> Vec<String> {
    match step {
        StartupStep::Filling { size } => vec![format!("starting {size} sandboxes")],
        StartupStep::Ready { took, available } => {
            vec![format!("ready after {:.1} s, with {available} sandboxes", took.as_secs_f64())]
        }
        StartupStep::Failed { error } => vec![format!("the start failed: {error}")],
        _ => Vec::new(),
    }
}

/// One tool of a dialect.
pub struct ToolRow {
    pub name: &'static str,
    /// Section of the prose file; it differs from `name` if one tool has two forms.
    pub prose: &'static str,
    pub fields: &'static [Field],
    pub(crate) form: SchemaForm,
    /// Schema with an object at the root and plain types only: some clients refuse the whole list of tools otherwise. A
    /// tool that answers mainly with text or pictures has none, and its answers have no `structuredContent`.
    pub output_schema: Option<fn() -> Value>,
    /// Whether the tool is listed only if the operator allows a browser.
    pub(crate) for_browser: bool,
    pub hints: Hints,
    pub lower: fn(&Args, &Options) -> Result<Lowered, ArgError>,
    pub render_error: fn(&RenderInput<'_>, &EngineError) -> Reply,
}

/// Makes a row from a tool's name, its hints, the function that its arguments are passed to, the schema of its answers if
/// they have one, and the function that renders errors. The type of the function's first parameter declares the arguments.
macro_rules! tool {
    ($name:literal, $hints:expr, $call:path, $output:expr, $error:path) => {
        $crate::ToolRow { output_schema: Some($output), ..$crate::tool!($name, $hints, $call, $error) }
    };
    ($name:literal, $hints:expr, $call:path, $error:path) => {
        $crate::ToolRow {
            name: $name,
            prose: $name,
            fields: $crate::fields_of($call),
            form: $crate::SchemaForm::Full,
            output_schema: None,
            for_browser: false,
            hints: $hints,
            lower: |args, options| $call($crate::args::Arguments::parse(args)?, options),
            render_error: $error,
        }
    };
}

pub(crate) use tool;

/// What the function of a tool returns: the operation of a call, or the refusal of its arguments.
pub(crate) type Lowering = Result<Lowered, ArgError>;

const fn fields_of<A: args::Arguments>(_: fn(A, &Options) -> Lowering) -> &'static [Field] {
    A::FIELDS
}

impl ToolRow {
    /// Renders an outcome. An outcome that does not belong to the operation is a defect of this server, and is reported
    /// as an error.
    pub fn render(&self, input: &RenderInput<'_>, render: operation::Renderer, outcome: Outcome) -> Reply {
        render(input, outcome).map(Reply::Answer).unwrap_or_else(|| {
            let why = "the engine gave another kind of answer than was asked for";
            (self.render_error)(input, &EngineError::Sandbox(why.into()))
        })
    }

    /// Returns whether the tool has an argument of this name.
    pub fn knows(&self, name: &str) -> bool {
        self.fields.iter().any(|field| field.name == name)
    }
}

/// Choices of the operator that concern dialects; they are the same for all calls.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// Makes `run_code` of the agentrun dialect run in a context named `default` if it names no context.
    pub default_context: bool,
    /// Flavor of a microsandbox session whose call names none.
    pub default_size: Size,
    /// Makes the conversation dialect advertise `sandbox_run_code` in place of `sandbox.run_code`.
    pub underscores: bool,
    /// Maximum timeout that a call may ask for, in seconds.
    pub max_timeout: u64,
    pub max_command_timeout: u64,
    /// Maximum timeout of a background run, in seconds.
    pub max_background: u64,
    /// Whether clients may see the path of a shared volume on the host.
    pub show_host_paths: bool,
    /// Paths of the shared volumes on the host as the operator wrote them, in the order of the volumes.
    pub volume_paths: Vec<String>,
    /// Maximum number of characters of text in an answer.
    pub text_budget: usize,
    /// Whether the operator allows a browser.
    pub browser: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            default_context: false,
            default_size: Size::Small,
            underscores: false,
            max_timeout: 300,
            max_command_timeout: 1800,
            max_background: 1800,
            show_host_paths: true,
            volume_paths: Vec::new(),
            text_budget: 20_000,
            browser: true,
        }
    }
}

/// Input of rendering besides the outcome.
pub struct RenderInput<'a> {
    /// Name of the tool as it is advertised.
    pub tool: &'static str,
    pub args: &'a Args,
    pub options: &'a Options,
    pub links: &'a Links,
    /// Marks for content that came from a page.
    pub fence: &'a Fence,
}

impl RenderInput<'_> {
    /// Returns a block with the address of a file, if links can be made.
    pub fn link(&self, key: &str, path: &str, size: Option<u64>) -> Option<Block> {
        let name = path.rsplit('/').next().unwrap_or(path).to_owned();
        let uri = self.links.to(key, path)?;
        Some(Block::Link { uri, mime: mime::of(&name), name, size })
    }
}

/// The reply to a call: an answer, or an error of JSON-RPC.
#[derive(Debug, Clone, PartialEq)]
pub enum Reply {
    Answer(Answer),
    /// An error of JSON-RPC.
    Error {
        code: i32,
        message: String,
        data: Option<Value>,
    },
}

impl From<Answer> for Reply {
    fn from(answer: Answer) -> Self {
        Self::Answer(answer)
    }
}

/// How the document prints the arguments of a tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SchemaForm {
    /// A schema with `properties` and `required`, even if they are empty.
    Full,
    /// The schema `{"type": "object"}` without further members.
    Bare,
}

/// One argument of a tool.
pub struct Field {
    pub name: &'static str,
    pub required: bool,
    pub kind: FieldKind,
    /// Values that are advertised; empty for free text.
    pub choices: &'static [&'static str],
    /// The least and the greatest number, if they are fixed.
    pub(crate) bounds: Option<(u64, u64)>,
    /// The range that the operator sets. The description names it, because clients refuse schemas with `maximum`.
    pub range: Option<fn(&Options) -> String>,
    pub default: Option<fn(&Options) -> Value>,
    /// Checks the value of this argument, or its absence.
    pub(crate) check: fn(&Args, &str) -> Result<(), ArgError>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FieldKind {
    Text,
    Flag,
    Whole,
    TextList,
    /// An object whose values are strings.
    TextMap,
}

#[derive(Debug, Clone, Copy)]
pub struct Hints {
    pub read_only: bool,
    pub destructive: bool,
    pub idempotent: bool,
}

impl Hints {
    const READS: Self = Self { read_only: true, destructive: false, idempotent: true };
    const ADDS: Self = Self { read_only: false, destructive: false, idempotent: false };
    const ACTS: Self = Self { read_only: false, destructive: true, idempotent: false };
    /// A call that is repeated has no further effect.
    const REPLACES: Self = Self { read_only: false, destructive: true, idempotent: true };
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Lang {
    En,
    Zh,
}

impl std::str::FromStr for Lang {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "en" => Ok(Self::En),
            "zh" => Ok(Self::Zh),
            other => Err(format!("unknown language `{other}`; use `en` or `zh`")),
        }
    }
}

/// The answer to a call: blocks for readers and an object for programs, both with the same facts.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Answer {
    pub blocks: Vec<Block>,
    pub structured: Value,
    /// Whether `structured` has the shape of a success. Another one is not sent, because some clients check it against the
    /// schema even in an error.
    pub fits: bool,
    pub is_error: bool,
    /// Further members of the result beside `content`, which some documents have.
    pub extra: Map<String, Value>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Block {
    Text(String),
    /// A picture; `data` is base64.
    Image {
        data: String,
        mime: &'static str,
    },
    /// A file that a client can fetch by its address or as a resource.
    Link {
        uri: String,
        name: String,
        mime: &'static str,
        size: Option<u64>,
    },
}

impl Block {
    /// Returns the address of a link.
    fn address(link: Option<&Self>) -> Option<String> {
        match link? {
            Self::Link { uri, .. } => Some(uri.clone()),
            _ => None,
        }
    }
}

impl Answer {
    /// Writes the object as JSON with two-space indent into the first block, with members in the order in which its
    /// type declares them.
    pub fn json<T: Serialize>(object: &T) -> Self {
        let text = serde_json::to_string_pretty(object).expect("answers are plain data");
        let structured = serde_json::to_value(object).expect("answers are plain data");
        Self { blocks: vec![Block::Text(text)], structured, fits: true, ..Self::default() }
    }

    /// Writes the object as JSON without spaces into the first block.
    pub(crate) fn compact<T: Serialize>(object: &T) -> Self {
        let text = serde_json::to_string(object).expect("answers are plain data");
        let structured = serde_json::to_value(object).expect("answers are plain data");
        Self { blocks: vec![Block::Text(text)], structured, fits: true, ..Self::default() }
    }

    /// Marks the answer as an error whose object has another shape than that of a success.
    pub fn failed(self) -> Self {
        Self { is_error: true, fits: false, ..self }
    }

    /// Marks the answer as an error whose object has the shape of a success and says itself that it is an error.
    pub(crate) fn unsuccessful(self) -> Self {
        Self { is_error: true, ..self }
    }
}

/// Ids of the dialects, in the order in which they are shown.
pub const IDS: &[&str] = &["sandpool", "agentrun", "microsandbox", "workbench", "conversation"];

/// Returns the dialect with this id, in the form that the operator chose.
pub fn find(id: &str, options: &Options) -> Option<&'static Dialect> {
    match id {
        "sandpool" => Some(&sandpool::DIALECT),
        "agentrun" if options.default_context => Some(&agentrun::WITH_DEFAULT_CONTEXT),
        "agentrun" => Some(&agentrun::DIALECT),
        "microsandbox" => Some(&microsandbox::DIALECT),
        "workbench" => Some(&workbench::DIALECT),
        "conversation" if options.underscores => Some(&conversation::WITH_UNDERSCORES),
        "conversation" => Some(&conversation::DIALECT),
        _ => None,
    }
}

/// Returns the rules of all dialects' realms, without settings of an operator.
pub fn realms() -> Vec<RealmConfig> {
    all(&Options::default()).map(|dialect| (dialect.realm)()).collect()
}

/// Returns all dialects, in the form that the operator chose.
pub fn all(options: &Options) -> impl Iterator<Item = &'static Dialect> {
    IDS.iter().filter_map(|id| find(id, options))
}

impl Dialect {
    pub fn find(&self, name: &str) -> Option<&'static ToolRow> {
        let alias = self.aliases.iter().find(|(alias, _)| *alias == name);
        let name = alias.map_or(name, |(_, name)| name);
        self.tools.iter().find(|row| row.name == name)
    }

    /// Says which tool was probably meant by an unknown name. A strict dialect says nothing, as its document does.
    pub fn tool_hint(&self, name: &str) -> String {
        let names = self.tools.iter().map(|row| row.name);
        match lenient::nearest(name, names.clone()) {
            _ if !self.lenient => String::new(),
            Some(known) => format!("; did you mean {known}?"),
            None => format!("; the tools are {}", names.collect::<Vec<_>>().join(", ")),
        }
    }

    /// Rewrites the arguments of a call as the tool knows them, if the dialect is lenient.
    pub fn prepare(&self, row: &ToolRow, args: &mut Args) {
        if self.lenient {
            lenient::prepare(row, args);
        }
    }

    /// Converts the prepared arguments of a call to an operation.
    pub fn lower(&self, row: &ToolRow, args: &Args, options: &Options) -> Result<Lowered, ArgError> {
        if self.lenient { lenient::lower(row, args, options) } else { (row.lower)(args, options) }
    }

    /// Returns the tools that are listed. What the operator turned off is not, but still answers with the reason.
    pub fn offered(&self, options: &Options) -> impl Iterator<Item = &'static ToolRow> + use<> {
        let browser = options.browser;
        self.tools.iter().filter(move |row| browser || !row.for_browser)
    }

    /// Returns the server's instructions for a model, in the chosen language.
    pub fn instructions(&self, lang: Lang) -> Option<&'static str> {
        prose::section(self.prose(lang), "server").map(prose::description)
    }

    pub fn description(&self, row: &ToolRow, lang: Lang) -> &'static str {
        prose::section(self.prose(lang), row.prose).map(prose::description).unwrap_or_default()
    }

    /// Returns the schema as the document prints it, without additional members.
    pub fn input_schema(&self, row: &ToolRow, lang: Lang, options: &Options) -> Value {
        if row.form == SchemaForm::Bare {
            return json!({ "type": "object" });
        }
        let section = prose::section(self.prose(lang), row.prose).unwrap_or_default();
        let properties: Map<String, Value> =
            row.fields.iter().map(|field| (field.name.to_owned(), field.schema(section, options))).collect();
        let required: Vec<&str> = row.fields.iter().filter(|f| f.required).map(|f| f.name).collect();
        match required.is_empty() && self.brief {
            true => json!({ "type": "object", "properties": properties }),
            false => json!({ "type": "object", "properties": properties, "required": required }),
        }
    }

    /// Returns the schema of a tool's answers as it is listed.
    pub fn output_schema(&self, row: &ToolRow) -> Option<Value> {
        let schema = (row.output_schema?)();
        Some(if self.brief { output::without_required(schema) } else { schema })
    }

    fn prose(&self, lang: Lang) -> &'static str {
        match lang {
            Lang::En => self.prose_en,
            Lang::Zh => self.prose_zh,
        }
    }
}

impl Field {
    /// Describes an argument of the type `A`.
    const fn of<A: args::Argument>(name: &'static str) -> Self {
        Self {
            name,
            required: A::REQUIRED,
            kind: A::KIND,
            choices: A::CHOICES,
            bounds: A::BOUNDS,
            range: A::RANGE,
            default: None,
            check: args::check::<A>,
        }
    }

    /// Returns the schema of a field. It has a description only if the prose has one, because some documents print
    /// none.
    fn schema(&self, section: &str, options: &Options) -> Value {
        let text = || json!({ "type": "string" });
        let mut schema = match self.kind {
            FieldKind::Text => text(),
            FieldKind::Flag => json!({ "type": "boolean" }),
            FieldKind::Whole => json!({ "type": "integer" }),
            FieldKind::TextList => json!({ "type": "array", "items": text() }),
            FieldKind::TextMap => json!({ "type": "object", "additionalProperties": text() }),
        };
        if let Some(description) = prose::field(section, self.name) {
            let range = self.range.map(|range| format!(" [{}]", range(options))).unwrap_or_default();
            schema["description"] = json!(format!("{description}{range}"));
        }
        if !self.choices.is_empty() {
            schema["enum"] = json!(self.choices);
        }
        if let Some(default) = self.default {
            schema["default"] = default(options);
        }
        schema
    }
}
