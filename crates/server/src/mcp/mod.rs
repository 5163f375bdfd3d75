//! One MCP handler for every dialect and transport: rmcp's vocabulary on one side, `Op` and `Outcome` on the other.
//!
//! Behaviour is the engine's, words are the dialect's. What rmcp does not do is put right in [`Guarded`] (for all transports),
//! in [`stdio`] (for lines) and in [`crate::http`].

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;

use engine::op::{Call, EngineError, EventSink, Op, Outcome, Realm, Tenant};
use rmcp::model::{
    CacheScope, CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, CustomRequest, CustomResult,
    DiscoverResult, ErrorCode, Implementation, InitializeRequestParams, InitializeResult, ListToolsResult,
    PaginatedRequestParams, Resource, ServerCapabilities, ServerConfig, Tool, ToolAnnotations,
};
use rmcp::service::RequestContext;
use rmcp::{ErrorData, RoleServer, ServerHandler};
use serde_json::{Map, Value};
use tokio_util::sync::CancellationToken;

use crate::dialect::{Answer, Args, Block, Dialect, Lang, Links, Options, Reply, Scene, ToolRow, shown};

pub(crate) mod answer;
mod line;
pub(crate) mod message;
mod progress;
mod service;
pub mod stdio;

pub use service::{Beside, Guarded};
pub(crate) use service::{Panicked, caught};

/// The engine as this module needs it; tests put a fake in its place.
pub trait Execute: Send + Sync + 'static {
    fn execute<'a>(&'a self, call: &'a Call, op: Op) -> Executing<'a>;
}

pub type Executing<'a> = Pin<Box<dyn Future<Output = Result<Outcome, EngineError>> + Send + 'a>>;

/// The tool list of an endpoint never changes while the process lives.
const LIST_TTL_MS: u64 = 300_000;

/// What one endpoint offers: a dialect in one language, under the operator's options.
pub struct Surface {
    dialect: &'static Dialect,
    lang: Lang,
    options: Options,
    links: Links,
    tools: Vec<Tool>,
}

impl Surface {
    pub fn new(dialect: &'static Dialect, lang: Option<Lang>, options: Options, links: Links) -> Self {
        let lang = lang.unwrap_or(dialect.default_lang);
        let tools = dialect.tools.iter().map(|row| tool(dialect, row, lang, &options)).collect();
        Self { dialect, lang, options, links, tools }
    }
}

/// Who calls; put into a request's extensions by the transport.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    pub tenant: Tenant,
    /// See [`engine::op::Call::connection`].
    pub connection: Option<String>,
}

#[derive(Clone)]
pub struct McpServer {
    engine: Arc<dyn Execute>,
    surface: Arc<Surface>,
    /// Ends every call that still runs; the transport's last word.
    halt: CancellationToken,
}

impl McpServer {
    pub fn new(engine: Arc<dyn Execute>, surface: Arc<Surface>, halt: CancellationToken) -> Self {
        Self { engine, surface, halt }
    }

    /// Arguments down, outcome up, and a word now and then in between.
    async fn call(&self, row: &'static ToolRow, args: Args, context: &RequestContext<RoleServer>) -> Reply {
        let Surface { dialect, options, links, .. } = &*self.surface;
        let scene = Scene { tool: row.name, args: &args, options, links };
        let op = match (row.lower)(&args, options) {
            Ok(op) => op,
            Err(refused) => return (dialect.refuse)(&scene, &refused),
        };
        let (events, reporter) = progress::start(context);
        let caller = context.extensions.get::<Caller>().cloned();
        let Caller { tenant, connection } =
            caller.unwrap_or_else(|| Caller { tenant: Tenant::local(), connection: None });
        let call = Call {
            tenant,
            realm: Realm(dialect.id),
            connection,
            cancel: self.halt.child_token(),
            events: EventSink(events),
        };
        let done = self.engine.execute(&call, op);
        let mut done = pin!(done);
        let result = tokio::select! {
            result = &mut done => result,
            () = context.ct.cancelled() => {
                call.cancel.cancel();
                done.await
            }
        };
        reporter.finish().await;
        match result {
            Ok(outcome) => (row.render)(&scene, outcome).into(),
            Err(error) => (row.render_error)(&scene, &error),
        }
    }
}

/// Comes with a tool call and is cancelled when the call has its place in the engine's queue. rmcp starts the handlers of several
/// requests in any order; a transport that waits for this in between keeps the client's.
#[derive(Clone)]
pub(crate) struct Begun(pub(crate) CancellationToken);

impl ServerHandler for McpServer {
    fn get_info(&self) -> ServerConfig {
        let info = ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
            .with_server_info(Implementation::new(self.surface.dialect.server_name, env!("CARGO_PKG_VERSION")));
        match self.surface.dialect.instructions(self.surface.lang) {
            Some(text) => info.with_instructions(text),
            None => info,
        }
    }

    /// The version remembered for later requests is the negotiated one, not the one asked for.
    async fn initialize(
        &self,
        mut request: InitializeRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<InitializeResult, ErrorData> {
        let result = self.negotiate_initialize(&request)?;
        request.protocol_version = result.protocol_version.clone();
        context.peer.set_peer_info(request);
        Ok(result)
    }

    async fn discover(&self, _: RequestContext<RoleServer>) -> Result<DiscoverResult, ErrorData> {
        let versions = self.supported_protocol_versions().into_owned();
        Ok(DiscoverResult::from_server_info(versions, self.get_info()).with_ttl_ms(LIST_TTL_MS))
    }

    async fn list_tools(
        &self,
        page: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        if page.is_some_and(|page| page.cursor.is_some()) {
            return Err(ErrorData::invalid_params("unknown cursor: the list has one page", None));
        }
        Ok(ListToolsResult::with_all_items(self.surface.tools.to_vec())
            .with_ttl_ms(LIST_TTL_MS)
            .with_cache_scope(CacheScope::Private))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let Some(row) = self.surface.dialect.find(&request.name) else {
            let message = format!("Unknown tool: {}", shown(&request.name));
            return Err(ErrorData::new(ErrorCode(self.surface.dialect.unknown_tool_code), message, None));
        };
        let mut begun = context.extensions.get::<Begun>().cloned();
        let mut call = pin!(self.call(row, request.arguments.unwrap_or_default(), &context));
        let called = poll_fn(|task| {
            let polled = call.as_mut().poll(task);
            if let Some(Begun(begun)) = begun.take() {
                begun.cancel();
            }
            polled
        });
        match called.await {
            Reply::Answer(answer) => {
                if let Some(beside) = context.extensions.get::<Beside>() {
                    beside.put(answer.extra.clone());
                }
                Ok(to_mcp(answer).into())
            }
            Reply::Error { code, message, data } => Err(ErrorData::new(ErrorCode(code), message, data)),
        }
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        self.surface.tools.iter().find(|tool| tool.name == name).cloned()
    }

    async fn on_custom_request(
        &self,
        request: CustomRequest,
        _: RequestContext<RoleServer>,
    ) -> Result<CustomResult, ErrorData> {
        let message = format!("method not found: {}", shown(&request.method));
        Err(ErrorData::new(ErrorCode::METHOD_NOT_FOUND, message, None))
    }
}

fn tool(dialect: &Dialect, row: &ToolRow, lang: Lang, options: &Options) -> Tool {
    let hints = ToolAnnotations::new()
        .read_only(row.hints.read_only)
        .destructive(row.hints.destructive)
        .idempotent(row.hints.idempotent)
        .open_world(false);
    let mut tool = Tool::new(
        row.name,
        dialect.description(row, lang),
        Arc::new(members(dialect.input_schema(row, lang, options))),
    );
    tool.output_schema = Some(Arc::new(members((row.output_schema)())));
    tool.annotations = Some(hints);
    tool
}

fn members(schema: Value) -> Map<String, Value> {
    match schema {
        Value::Object(members) => members,
        _ => Map::new(),
    }
}

fn to_mcp(answer: Answer) -> CallToolResult {
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
    // An error does not fit the tool's output schema, and @modelcontextprotocol/sdk 1.x checks it all the same: the model would
    // read a complaint about the schema in its place.
    result.structured_content = (!answer.is_error).then_some(answer.structured);
    result.is_error = Some(answer.is_error);
    result
}
