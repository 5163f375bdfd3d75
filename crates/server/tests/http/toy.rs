//! A service with tools that do what transports are afraid of.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mcp::{Caller, ExtraMembers};
use rmcp::model::{
    AudioContent, CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, ErrorCode, JsonObject,
    ListToolsResult, PaginatedRequestParams, ProgressNotificationParam, Resource, ServerCapabilities, ServerConfig,
    Tool,
};
use rmcp::service::RequestContext;
use rmcp::{ErrorData, RoleServer, ServerHandler};
use serde_json::{Value, json};

/// The address in the answer of `link`.
pub const LINK: &str = "http://127.0.0.1:8775/files/k/plot.png";

#[derive(Clone, Default)]
pub struct Toy(Arc<Seen>, Option<Caller>);

#[derive(Default)]
struct Seen {
    running: AtomicUsize,
    cancelled: AtomicUsize,
    slept: AtomicUsize,
    made: AtomicUsize,
    /// Who asked for the list of tools, in the order in which they were answered.
    listed: Mutex<Vec<String>>,
}

impl Toy {
    pub fn of(&self, caller: Caller) -> Self {
        Self(self.0.clone(), Some(caller))
    }

    pub fn running(&self) -> usize {
        self.0.running.load(Ordering::SeqCst)
    }

    pub fn cancelled(&self) -> usize {
        self.0.cancelled.load(Ordering::SeqCst)
    }

    /// Calls of `sleep` that came to their end.
    pub fn slept(&self) -> usize {
        self.0.slept.load(Ordering::SeqCst)
    }

    /// Large answers.
    pub fn made(&self) -> usize {
        self.0.made.load(Ordering::SeqCst)
    }

    pub fn listed(&self) -> Vec<String> {
        self.0.listed.lock().unwrap().clone()
    }

    /// One tool wants an argument repeated in a header.
    pub fn schema(name: &str) -> Option<Arc<JsonObject>> {
        let mut schema = json!({ "type": "object", "properties": { "text": { "type": "string" } } });
        if name == "repeated" {
            schema["properties"]["text"]["x-mcp-header"] = "Text".into();
        }
        schema.as_object().cloned().map(Arc::new)
    }

    async fn until_cancelled(&self, context: &RequestContext<RoleServer>) {
        self.0.running.fetch_add(1, Ordering::SeqCst);
        context.ct.cancelled().await;
        self.0.cancelled.fetch_add(1, Ordering::SeqCst);
        self.0.running.fetch_sub(1, Ordering::SeqCst);
    }

    async fn progress(context: &RequestContext<RoleServer>, count: u32) {
        if let Some(token) = context.meta.get_progress_token() {
            let note = ProgressNotificationParam::new(token, f64::from(count)).with_message("x".repeat(1024));
            let _ = context.peer.notify_progress(note).await;
        }
    }
}

impl ServerHandler for Toy {
    fn get_info(&self) -> ServerConfig {
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let tenant = self.1.as_ref().map(|caller| caller.tenant.0.clone());
        self.0.listed.lock().unwrap().extend(tenant);
        let tools = ["echo", "repeated"].map(|name| Tool::new(name, "does as it says", Self::schema(name).unwrap()));
        Ok(ListToolsResult::with_all_items(tools.to_vec()))
    }

    #[allow(deprecated, reason = "roots are the plainest question to a client")]
    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let arguments = Value::Object(request.arguments.unwrap_or_default());
        let text = match &*request.name {
            "echo" | "repeated" => arguments["text"].as_str().unwrap_or_default().to_owned(),
            "sleep" => {
                tokio::time::sleep(Duration::from_millis(arguments["ms"].as_u64().unwrap_or(0))).await;
                self.0.slept.fetch_add(1, Ordering::SeqCst);
                "slept".into()
            }
            "forever" => {
                self.until_cancelled(&context).await;
                "cancelled".into()
            }
            "deaf" => std::future::pending().await,
            "panic" => panic!("the toy panics on purpose"),
            "huge" => "x".repeat(9 << 20),
            "large" => {
                self.0.made.fetch_add(1, Ordering::SeqCst);
                "x".repeat(7 << 20)
            }
            "ticks" => {
                for count in 0..3 {
                    Self::progress(&context, count).await;
                }
                "ticked".into()
            }
            "flood" => {
                let flood = async {
                    for count in 0.. {
                        Self::progress(&context, count).await;
                    }
                };
                tokio::select! {
                    () = flood => {}
                    () = self.until_cancelled(&context) => {}
                }
                "flooded".into()
            }
            "roots" => match context.peer.list_roots().await {
                Ok(roots) => roots.roots.into_iter().map(|root| root.uri).collect(),
                Err(error) => format!("not answered: {error}"),
            },
            "beside" => {
                let beside = json!({ "session_id": "s-1", "content": "not taken" });
                context.extensions.get::<ExtraMembers>().unwrap().put(beside.as_object().unwrap().clone());
                "and more".into()
            }
            "link" => {
                let link = Resource::new(LINK, "plot.png").with_mime_type("image/png").with_size(9);
                let audio = ContentBlock::Audio(AudioContent::new("UklGRg==", "audio/wav"));
                let blocks = vec![ContentBlock::text("drawn"), audio, ContentBlock::resource_link(link)];
                let mut result = CallToolResult::success(blocks);
                result.structured_content = Some(json!({ "drawn": true }));
                return Ok(result.into());
            }
            "who" => {
                let caller = self.1.as_ref().unwrap();
                format!("{} {}", caller.tenant.0, caller.connection.as_deref().unwrap_or("-"))
            }
            other => return Err(ErrorData::new(ErrorCode::INVALID_PARAMS, format!("Unknown tool: {other}"), None)),
        };
        Ok(CallToolResult::success(vec![ContentBlock::text(text)]).into())
    }
}
