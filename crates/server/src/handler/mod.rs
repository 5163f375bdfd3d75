//! The one MCP handler for every dialect and transport. It translates between rmcp's types and `Op` and `Outcome`.
//!
//! The engine defines the behaviour, the dialect defines the wording, and the crate `mcp` has the transports.

use std::future::{Future, poll_fn};
use std::ops::Deref;
use std::pin::{Pin, pin};
use std::sync::Arc;

use dialects::{
    Answer, ArgError, Args, Block, Dialect, Fence, Hints, Lang, Links, Lowered, Options, ProtocolErrors, RenderInput,
    Reply, ToolRow,
};
use engine::Hold;
use engine::op::{Call, EngineError, EventSink, FoundContext, Op, Outcome, Realm, Stages};
use mcp::{
    Caller, EncodedResult, ErrorStyle, ExtraMembers, MAX_UNSOLICITED, Origin, Prepared, QueuedSignal, Revision, weight,
};
use rmcp::model::{
    CacheScope, CallToolRequestParams, CallToolResponse, CallToolResult, CancelTaskParams, ContentBlock,
    CreateTaskResult, CustomRequest, CustomResult, DiscoverResult, ErrorCode, GetTaskParams, GetTaskResult,
    Implementation, InitializeRequestParams, InitializeResult, ListResourceTemplatesResult, ListResourcesResult,
    ListToolsResult, PaginatedRequestParams, ReadResourceRequestParams, ReadResourceResponse, Resource,
    ServerCapabilities, ServerConfig, ServerResult, TASKS_EXTENSION_ID, Task, Tool, ToolAnnotations, UpdateTaskParams,
};
use rmcp::service::RequestContext;
use rmcp::{ErrorData, RoleServer, ServerHandler};
use serde_json::{Map, Value};
use telemetry::observe::{Ended, Facts, ObservedCall, Observer, RequestFacts};
use telemetry::otel::RemoteParent;
use text::{shown, unix_now};

mod progress;
mod resources;
mod tasks;

/// The part of the engine that this module needs. Tests replace it with a fake.
pub trait Execute: Send + Sync + 'static {
    fn execute<'a>(&'a self, call: &'a Call, op: Op) -> Executing<'a>;
}

pub type Executing<'a> = Pin<Box<dyn Future<Output = Result<Outcome, EngineError>> + Send + 'a>>;

type McpContext = RequestContext<RoleServer>;
type PageParams = Option<PaginatedRequestParams>;
type McpResult<T> = Result<T, ErrorData>;

/// How long a client may cache a list. The tool list of an endpoint never changes while the process lives.
const LIST_TTL_MS: u64 = 300_000;

/// The tools that one endpoint offers: a dialect in one language, with the operator's options.
pub struct Surface {
    dialect: &'static Dialect,
    lang: Lang,
    options: Options,
    links: Links,
    tools: Vec<Tool>,
    /// The encoded result of `tools/list`.
    listed: EncodedResult,
    observer: Arc<Observer>,
}

impl Surface {
    pub fn new(dialect: &'static Dialect, lang: Option<Lang>, options: Options, links: Links) -> Self {
        let lang = lang.unwrap_or(dialect.default_lang);
        let tools = dialect.offered(&options).map(|row| tool(dialect, row, lang, &options)).collect();
        Self { dialect, lang, options, links, tools, listed: Default::default(), observer: Arc::default() }
    }

    /// Returns how the errors of the protocol are worded.
    pub fn error_style(&self) -> ErrorStyle {
        let ProtocolErrors { invalid_request, method_not_found, null_data, .. } = self.dialect.errors;
        ErrorStyle { invalid_request, method_not_found, null_data }
    }

    pub(crate) fn watched_by(self, observer: Arc<Observer>) -> Self {
        Self { observer, ..self }
    }

    fn list(&self) -> ListToolsResult {
        ListToolsResult::with_all_items(self.tools.clone())
            .with_ttl_ms(LIST_TTL_MS)
            .with_cache_scope(CacheScope::Private)
    }
}

/// State that the handlers of one endpoint share.
#[derive(Clone)]
pub struct Handlers {
    engine: Arc<dyn Execute>,
    surface: Arc<Surface>,
}

impl Handlers {
    pub fn new(engine: Arc<dyn Execute>, surface: Arc<Surface>) -> Self {
        Self { engine, surface }
    }

    /// Returns the handler for one request of this caller, with the memory that the request holds. There is no handler
    /// without a caller.
    pub fn of(&self, caller: Caller, memory: Hold) -> impl ServerHandler + use<> {
        McpServer { shared: self.clone(), caller, memory }
    }
}

struct McpServer {
    shared: Handlers,
    caller: Caller,
    memory: Hold,
}

impl Deref for McpServer {
    type Target = Handlers;

    fn deref(&self) -> &Handlers {
        &self.shared
    }
}

impl McpServer {
    /// Converts the arguments to an operation, executes it with progress notifications, and renders the outcome.
    async fn call(
        &self,
        row: &'static ToolRow,
        mut args: Args,
        context: &McpContext,
        observed: ObservedCall,
    ) -> CallResult {
        let Surface { dialect, options, observer, .. } = &*self.surface;
        dialect.prepare(row, &mut args);
        let (caller, origin) = (&self.caller, origin(context));
        let show_host_paths = options.show_host_paths && caller.show_host_paths;
        let (options, links) = (Options { show_host_paths, ..options.clone() }, self.links());
        let fence = fence();
        let input = RenderInput { tool: row.name, args: &args, options: &options, links: &links, fence: &fence };
        let tenant = caller.tenant.0.clone();
        let (stages, found) = (observed.stages(), FoundContext::default());
        let end = |called: CallResult, facts, refused, cancelled| {
            let reply = match &called {
                CallResult::Reply(reply) => Some(reply),
                CallResult::Task(_) => None,
            };
            let (input, origin, found) = (&input, &origin, found.get());
            let ended = Ended { tenant: &tenant, input, origin, facts, found, reply, refused, cancelled };
            observed.end(observer, ended);
            called
        };
        let known = if dialect.lenient { Ok(()) } else { check_unknown(row, &args) };
        let Lowered { op, render } = match known.and_then(|()| dialect.lower(row, &args, &options)) {
            Ok(lowered) => lowered,
            Err(refused) => {
                let reply = (dialect.refuse)(&input, &refused);
                return end(CallResult::Reply(reply), Facts::refused(&refused), true, false);
            }
        };
        let (events, reporter) = progress::start(context, dialect.waiting);
        let call = Call { stages, found: found.clone(), ..self.engine_call(context, EventSink(events)) };
        observer.lowered(&call, &op);
        let result = tasks::execute(&*self.engine, &call, op, self.may_last(context), self.longest_run()).await;
        reporter.finish().await;
        let cancelled = call.cancel.is_cancelled();
        match result {
            Ok(tasks::CallDone::Task(task)) => end(CallResult::Task(task), Facts::default(), false, cancelled),
            Ok(tasks::CallDone::Outcome(outcome)) => {
                let facts = Facts::of(&outcome);
                end(CallResult::Reply(row.render(&input, render, outcome)), facts, false, cancelled)
            }
            Err(error) => {
                observer.failed(&tenant, &error);
                let reply = (row.render_error)(&input, &error);
                end(CallResult::Reply(reply), Facts::failed(&error), false, cancelled)
            }
        }
    }

    /// Returns what is known of a request when it arrives.
    fn facts<'a>(&'a self, context: &'a McpContext, origin: &'a Origin) -> RequestFacts<'a> {
        let (tenant, dialect) = (self.caller.tenant.0.as_str(), self.surface.dialect.id);
        let meta = &context.meta;
        let parent = RemoteParent { traceparent: meta.get_traceparent(), tracestate: meta.get_tracestate() };
        let revision = self.surface.observer.has_traces().then(|| context.protocol_version()).flatten();
        let revision = revision.map(|version| version.as_str().to_owned());
        RequestFacts { tenant, dialect, origin, parent, revision }
    }

    /// Answers a request that is not a tool call, and traces it if traces are exported.
    async fn traced<T>(
        &self,
        method: &'static str,
        context: &McpContext,
        work: impl Future<Output = McpResult<T>>,
    ) -> McpResult<T> {
        let observer = &self.surface.observer;
        let begin = || observer.request(method, &self.facts(context, &origin(context)));
        let span = observer.has_traces().then(begin).flatten();
        let result = work.await;
        if let Some(span) = span {
            span.answered(result.as_ref().err().map(|error| error.code.0));
        }
        result
    }

    /// Returns the settings for links that are written now.
    fn links(&self) -> Links {
        self.surface.links.at(unix_now())
    }

    fn engine_call(&self, context: &McpContext, events: EventSink) -> Call {
        let Caller { tenant, connection, .. } = self.caller.clone();
        let (realm, cancel) = (Realm(self.surface.dialect.id), context.ct.clone());
        let (memory, stages, found) = (self.memory.clone(), Stages::default(), FoundContext::default());
        Call { tenant, realm, connection, cancel, events, memory, stages, found }
    }
}

/// Creates new marks for every answer, because a page that knew their number could end its untrusted section itself.
fn fence() -> Fence {
    Fence::new(uuid::Uuid::new_v4().simple().to_string())
}

fn origin(context: &McpContext) -> Origin {
    context.extensions.get::<Origin>().cloned().unwrap_or_default()
}

fn only_page(page: PageParams) -> McpResult<()> {
    match page.and_then(|page| page.cursor) {
        Some(_) => Err(ErrorData::invalid_params("unknown cursor: the list has one page", None)),
        None => Ok(()),
    }
}

/// Refuses arguments that the tool of a strict dialect does not know if they are large, because the server would have to
/// keep them in memory. Small ones are ignored.
fn check_unknown(row: &ToolRow, args: &Args) -> Result<(), ArgError> {
    let (most, mut all) = (MAX_UNSOLICITED, 0);
    for (name, value) in args.iter().filter(|(name, _)| !row.knows(name)) {
        all += name.len() + weight(value);
        if all > most {
            let message = format!(
                "{} is no argument of {}, and arguments that it does not know may take {most} bytes",
                shown(name),
                row.name
            );
            return Err(ArgError { code: "INVALID_PARAMS", message });
        }
    }
    Ok(())
}

/// The result of a tool call.
enum CallResult {
    Reply(Reply),
    Task(Task),
}

impl ServerHandler for McpServer {
    fn get_info(&self) -> ServerConfig {
        let mut capabilities = ServerCapabilities::builder().enable_tools().enable_resources().build();
        if self.surface.has_tasks() {
            capabilities.extensions.get_or_insert_default().insert(TASKS_EXTENSION_ID.into(), Map::new());
        }
        let info = ServerConfig::new(capabilities)
            .with_server_info(Implementation::new(self.surface.dialect.server_name, env!("CARGO_PKG_VERSION")));
        match self.surface.dialect.instructions(self.surface.lang) {
            Some(text) => info.with_instructions(text),
            None => info,
        }
    }

    /// Negotiates the version and sets it as the client's version for later requests, in place of the requested one.
    async fn initialize(
        &self,
        mut request: InitializeRequestParams,
        context: McpContext,
    ) -> McpResult<InitializeResult> {
        let negotiated = async { self.negotiate_initialize(&request) };
        let result = self.traced("initialize", &context, negotiated).await?;
        self.surface.observer.initialize(&origin(&context));
        request.protocol_version = result.protocol_version.clone();
        context.peer.set_peer_info(request);
        Ok(result)
    }

    async fn discover(&self, _: McpContext) -> McpResult<DiscoverResult> {
        let versions = self.supported_protocol_versions().into_owned();
        Ok(DiscoverResult::from_server_info(versions, self.get_info()).with_ttl_ms(LIST_TTL_MS))
    }

    async fn list_tools(&self, page: PageParams, context: McpContext) -> McpResult<ListToolsResult> {
        self.traced("tools/list", &context, async { only_page(page) }).await?;
        self.surface.observer.tools_listed(&origin(&context), self.surface.dialect.id, self.surface.tools.len());
        let Some(result) = context.extensions.get::<Prepared>() else { return Ok(self.surface.list()) };
        let revision = context.extensions.get::<Revision>().copied().unwrap_or_default();
        result.set(self.surface.listed.get(revision, || ServerResult::ListToolsResult(self.surface.list())));
        Ok(ListToolsResult::default())
    }

    async fn list_resources(&self, page: PageParams, context: McpContext) -> McpResult<ListResourcesResult> {
        let listing = async {
            only_page(page)?;
            resources::list(self, &context).await.map(ListResourcesResult::with_all_items)
        };
        self.traced("resources/list", &context, listing).await
    }

    async fn list_resource_templates(&self, page: PageParams, _: McpContext) -> McpResult<ListResourceTemplatesResult> {
        only_page(page)?;
        Ok(ListResourceTemplatesResult::with_all_items(resources::templates(&self.surface.links))
            .with_ttl_ms(LIST_TTL_MS)
            .with_cache_scope(CacheScope::Private))
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        context: McpContext,
    ) -> McpResult<ReadResourceResponse> {
        let reading = resources::read(self, &request.uri, &context);
        self.traced("resources/read", &context, reading).await.map(ReadResourceResponse::from)
    }

    async fn call_tool(&self, request: CallToolRequestParams, context: McpContext) -> McpResult<CallToolResponse> {
        self.surface.observer.tool_called(&origin(&context), &request.name);
        let Some(row) = self.surface.dialect.find(&request.name) else {
            let dialect = self.surface.dialect;
            let (code, message) = (dialect.errors.unknown_tool)(&shown(&request.name));
            let message = message + &dialect.tool_hint(&request.name);
            let error = ErrorData::new(ErrorCode(code), message, None);
            return self.traced("tools/call", &context, async { Err(error) }).await;
        };
        let mut queued = context.extensions.get::<QueuedSignal>().cloned();
        let observed = self.surface.observer.begin(row.name, &self.facts(&context, &origin(&context)));
        let trace = observed.trace();
        let mut call = pin!(self.call(row, request.arguments.unwrap_or_default(), &context, observed));
        let called = poll_fn(|task| {
            let polled = trace.work(|| call.as_mut().poll(task));
            if let Some(QueuedSignal(queued)) = queued.take() {
                queued.cancel();
            }
            polled
        });
        match called.await {
            CallResult::Reply(Reply::Answer(answer)) => {
                if let Some(extra) = context.extensions.get::<ExtraMembers>() {
                    extra.put(answer.extra.clone());
                }
                Ok(to_mcp(row, answer).into())
            }
            CallResult::Reply(Reply::Error { code, message, data }) => {
                Err(ErrorData::new(ErrorCode(code), message, data))
            }
            CallResult::Task(task) => Ok(CreateTaskResult::new(task).into()),
        }
    }

    async fn get_task(&self, request: GetTaskParams, context: McpContext) -> McpResult<GetTaskResult> {
        self.traced("tasks/get", &context, tasks::get(self, request.task_id, &context)).await
    }

    async fn cancel_task(&self, request: CancelTaskParams, context: McpContext) -> McpResult<()> {
        self.traced("tasks/cancel", &context, tasks::cancel(self, request.task_id, &context)).await
    }

    async fn update_task(&self, request: UpdateTaskParams, context: McpContext) -> McpResult<()> {
        self.traced("tasks/update", &context, tasks::update(self, request.task_id, &context)).await
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        self.surface.tools.iter().find(|tool| tool.name == name).cloned()
    }

    async fn on_custom_request(&self, request: CustomRequest, _: McpContext) -> McpResult<CustomResult> {
        let message = format!("method not found: {}", shown(&request.method));
        Err(ErrorData::new(ErrorCode::METHOD_NOT_FOUND, message, None))
    }
}

fn tool(dialect: &Dialect, row: &ToolRow, lang: Lang, options: &Options) -> Tool {
    let Hints { read_only, destructive, idempotent } = row.hints;
    let mut hints = ToolAnnotations::new().read_only(read_only).destructive(destructive).idempotent(idempotent);
    hints = hints.open_world(false);
    if dialect.brief {
        hints.read_only_hint = hints.read_only_hint.filter(|read_only| *read_only);
        // What only reads destroys nothing, and may be repeated.
        hints.destructive_hint = hints.destructive_hint.filter(|destructive| !*destructive && !read_only);
        hints.idempotent_hint = hints.idempotent_hint.filter(|idempotent| *idempotent && !read_only);
    }
    let mut tool = Tool::new(
        row.name,
        dialect.description(row, lang),
        Arc::new(members(dialect.input_schema(row, lang, options))),
    );
    tool.output_schema = dialect.output_schema(row).map(|schema| Arc::new(members(schema)));
    tool.annotations = Some(hints);
    tool
}

fn members(schema: Value) -> Map<String, Value> {
    match schema {
        Value::Object(members) => members,
        _ => Map::new(),
    }
}

fn to_mcp(row: &ToolRow, answer: Answer) -> CallToolResult {
    let blocks = answer.blocks.into_iter().map(|block| match block {
        Block::Text(text) => ContentBlock::text(text),
        Block::Image { data, mime } => ContentBlock::image(data, mime),
        Block::Link { uri, name, mime, size } => {
            let mut resource = Resource::new(uri, name).with_mime_type(mime);
            resource.size = size;
            ContentBlock::resource_link(resource)
        }
    });
    let mut result = CallToolResult::success(blocks.collect());
    // @modelcontextprotocol/sdk 1.x also validates the object of an error, so the model would read a complaint about
    // the schema instead of the error's text.
    result.structured_content = (answer.fits && row.output_schema.is_some()).then_some(answer.structured);
    result.is_error = Some(answer.is_error);
    result
}
