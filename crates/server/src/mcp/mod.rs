//! One MCP handler for every dialect and transport: rmcp's vocabulary on one side, `Op` and `Outcome` on the other.
//!
//! Behaviour is the engine's, words are the dialect's. What rmcp does not do is put right here (for all transports) and in
//! [`stdio`] (for lines).

use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;

use engine::op::{Call, EngineError, EventSink, Op, Outcome, Tenant};
use rmcp::model::{
    CacheScope, CallToolRequestParams, CallToolResponse, CallToolResult, CompleteRequestMethod, CompleteRequestParams,
    CompleteResult, ContentBlock, CustomRequest, CustomResult, DiscoverResult, ErrorCode, Implementation,
    InitializeRequestParams, InitializeResult, ListPromptsRequestMethod, ListPromptsResult,
    ListResourceTemplatesRequestMethod, ListResourceTemplatesResult, ListResourcesRequestMethod, ListResourcesResult,
    ListToolsResult, PaginatedRequestParams, ServerCapabilities, ServerConfig, Tool, ToolAnnotations,
};
use rmcp::service::RequestContext;
use rmcp::{ErrorData, RoleServer, ServerHandler};
use serde_json::{Map, Value};
use tokio_util::sync::CancellationToken;

use crate::dialect::{Answer, Args, Block, Dialect, Lang, ToolRow, shown};

mod line;
mod message;
mod progress;
pub mod stdio;

/// The engine as this module needs it; tests put a fake in its place.
pub trait Execute: Send + Sync + 'static {
    fn execute<'a>(&'a self, call: &'a Call, op: Op) -> Executing<'a>;
}

pub type Executing<'a> = Pin<Box<dyn Future<Output = Result<Outcome, EngineError>> + Send + 'a>>;

/// The tool list of an endpoint never changes while the process lives.
const LIST_TTL_MS: u64 = 300_000;

#[derive(Clone)]
pub struct McpServer {
    engine: Arc<dyn Execute>,
    dialect: &'static Dialect,
    lang: Lang,
    tools: Arc<[Tool]>,
    /// Ends every call that still runs; the transport's last word.
    halt: CancellationToken,
    /// Held while a context is made on demand, so that two calls do not make two.
    making: Arc<tokio::sync::Mutex<()>>,
}

impl McpServer {
    pub fn new(
        engine: Arc<dyn Execute>,
        dialect: &'static Dialect,
        lang: Option<Lang>,
        halt: CancellationToken,
    ) -> Self {
        let lang = lang.unwrap_or(dialect.default_lang);
        let tools = dialect.tools.iter().map(|row| tool(dialect, row, lang)).collect();
        Self { engine, dialect, lang, tools, halt, making: Arc::default() }
    }

    /// Arguments down, outcome up, and a word now and then in between.
    async fn call(&self, row: &'static ToolRow, args: Args, context: &RequestContext<RoleServer>) -> Answer {
        let op = match (row.lower)(&args) {
            Ok(op) => op,
            Err(refused) => return (self.dialect.refuse)(&refused),
        };
        let (events, reporter) = progress::start(context);
        let call = Call { tenant: Tenant::local(), cancel: self.halt.child_token(), events: EventSink(events) };
        let done = self.run(row, &call, op);
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
            Ok(outcome) => (row.render)(&args, outcome),
            Err(error) => (row.render_error)(&error),
        }
    }

    async fn run(&self, row: &ToolRow, call: &Call, op: Op) -> Result<Outcome, EngineError> {
        let Some(missing) = row.missing_context else { return self.engine.execute(call, op).await };
        match self.engine.execute(call, op.clone()).await {
            Err(EngineError::ContextNotFound(context)) if context == missing().name => {
                self.make_context(call, missing().name, missing().create).await?;
                self.engine.execute(call, op).await
            }
            result => result,
        }
    }

    /// Makes the context unless another call was quicker.
    async fn make_context(&self, call: &Call, name: &str, create: Op) -> Result<(), EngineError> {
        let _one_at_a_time = self.making.lock().await;
        let there = match self.engine.execute(call, Op::ListContexts).await? {
            Outcome::Contexts(contexts) => contexts.iter().any(|context| context.name == name),
            _ => false,
        };
        if !there {
            self.engine.execute(call, create).await?;
        }
        Ok(())
    }
}

/// Comes with a tool call and is cancelled when the call has its place in the engine's queue. rmcp starts the handlers of several
/// requests in any order; a transport that waits for this in between keeps the client's.
#[derive(Clone)]
struct Begun(CancellationToken);

impl ServerHandler for McpServer {
    fn get_info(&self) -> ServerConfig {
        let info = ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
            .with_server_info(Implementation::new(self.dialect.server_name, env!("CARGO_PKG_VERSION")));
        match self.dialect.instructions(self.lang) {
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
        Ok(ListToolsResult::with_all_items(self.tools.to_vec())
            .with_ttl_ms(LIST_TTL_MS)
            .with_cache_scope(CacheScope::Private))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let Some(row) = self.dialect.find(&request.name) else {
            let message = format!("Unknown tool: {}", shown(&request.name));
            return Err(ErrorData::new(ErrorCode(self.dialect.unknown_tool_code), message, None));
        };
        let mut begun = context.extensions.get::<Begun>().cloned();
        let mut call = pin!(caught(self.call(row, request.arguments.unwrap_or_default(), &context)));
        let called = poll_fn(|task| {
            let polled = call.as_mut().poll(task);
            if let Some(Begun(begun)) = begun.take() {
                begun.cancel();
            }
            polled
        });
        match called.await {
            Ok(answer) => Ok(to_mcp(answer).into()),
            Err(Panicked) => {
                tracing::error!(tool = row.name, "a handler panicked");
                Err(ErrorData::internal_error(format!("internal error in {}: the call was given up", row.name), None))
            }
        }
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        self.tools.iter().find(|tool| tool.name == name).cloned()
    }

    // rmcp answers these with success and an empty list although nothing was declared.

    async fn complete(
        &self,
        _: CompleteRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<CompleteResult, ErrorData> {
        Err(ErrorData::method_not_found::<CompleteRequestMethod>())
    }

    async fn list_prompts(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListPromptsResult, ErrorData> {
        Err(ErrorData::method_not_found::<ListPromptsRequestMethod>())
    }

    async fn list_resources(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        Err(ErrorData::method_not_found::<ListResourcesRequestMethod>())
    }

    async fn list_resource_templates(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        Err(ErrorData::method_not_found::<ListResourceTemplatesRequestMethod>())
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

fn tool(dialect: &Dialect, row: &ToolRow, lang: Lang) -> Tool {
    let hints = ToolAnnotations::new()
        .read_only(row.hints.read_only)
        .destructive(row.hints.destructive)
        .idempotent(row.hints.idempotent)
        .open_world(false);
    let mut tool =
        Tool::new(row.name, dialect.description(row, lang), Arc::new(members(dialect.input_schema(row, lang))));
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
    });
    let mut result = CallToolResult::success(blocks.collect());
    // An error does not fit the tool's output schema, and @modelcontextprotocol/sdk 1.x checks it all the same: the model would
    // read a complaint about the schema in its place.
    result.structured_content = (!answer.is_error).then_some(answer.structured);
    result.is_error = Some(answer.is_error);
    result
}

struct Panicked;

/// rmcp never answers a request whose handler panics.
async fn caught<T>(future: impl Future<Output = T>) -> Result<T, Panicked> {
    let mut future = pin!(future);
    poll_fn(|context| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context))) {
        Ok(Poll::Ready(value)) => Poll::Ready(Ok(value)),
        Ok(Poll::Pending) => Poll::Pending,
        Err(_) => Poll::Ready(Err(Panicked)),
    })
    .await
}
