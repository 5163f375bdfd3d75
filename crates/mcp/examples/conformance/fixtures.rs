//! The tools, resources and prompts that the conformance suite expects, as it describes them.
#![allow(deprecated, reason = "the older revisions have what the newest one dropped")]

use std::sync::Arc;
use std::time::Duration;

use ring::hmac;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, CompleteRequestParams, CompleteResult, CompletionInfo,
    ContentBlock, ErrorData, GetPromptRequestParams, GetPromptResponse, GetPromptResult, Implementation,
    InputRequiredResult, InputResponses, JsonObject, ListPromptsResult, ListResourceTemplatesResult,
    ListResourcesResult, ListToolsResult, LoggingLevel, LoggingMessageNotificationParam, PaginatedRequestParams,
    ProgressNotificationParam, ReadResourceRequestParams, ReadResourceResponse, ReadResourceResult, ServerCapabilities,
    ServerConfig, ServerRequest, SetLevelRequestParams, SubscribeRequestParams, SubscriptionFilter,
    UnsubscribeRequestParams,
};
use rmcp::service::{RequestContext, SubscriptionContext};
use rmcp::{RoleServer, ServerHandler};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::broadcast;

/// One red pixel.
const PNG: &str = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC";
/// The header of a sound of no length.
const WAV: &str = "UklGRiQAAABXQVZFZm10IBAAAAABAAEAQB8AAIA+AAACABAAZGF0YQAAAAA=";

/// Between two messages of a tool, so that they arrive one by one.
const PAUSE: Duration = Duration::from_millis(50);

type Context = RequestContext<RoleServer>;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Changed {
    Tools,
    Prompts,
}

#[derive(Clone)]
pub struct Fixtures {
    changes: broadcast::Sender<Changed>,
    seal: hmac::Key,
}

impl Fixtures {
    pub fn new() -> Self {
        let (changes, _) = broadcast::channel(16);
        Self { changes, seal: hmac::Key::new(hmac::HMAC_SHA256, b"the fixtures guard nothing") }
    }

    pub fn schema(&self, tool: &str) -> Option<Arc<JsonObject>> {
        let tool = tools().into_iter().find(|row| row["name"] == tool)?;
        tool["inputSchema"].as_object().cloned().map(Arc::new)
    }

    /// State that the client carries for us: readable, not forgeable.
    fn seal(&self, state: &str) -> String {
        let tag: String =
            hmac::sign(&self.seal, state.as_bytes()).as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{state}.{tag}")
    }

    fn open(&self, sealed: Option<&str>) -> Result<Option<String>, ErrorData> {
        let Some(sealed) = sealed else { return Ok(None) };
        let state = sealed.rsplit_once('.').map(|(state, _)| state).filter(|state| self.seal(state) == sealed);
        let state =
            state.ok_or_else(|| ErrorData::invalid_params("requestState is not the one that was sent", None))?;
        Ok(Some(state.into()))
    }

    /// Tools that ask for more in their result (2026-07-28). `None` for all others.
    fn ask(&self, name: &str, given: &Given, context: &Context) -> Option<CallToolResponse> {
        let named = |key: &str| given.content(key, "name").map(|name| format!("Hello, {name}!"));
        let asks: &[(&str, Value)] = &match name {
            "test_input_required_result_elicitation" | "test_streaming_elicitation" => match named("user_name") {
                Some(greeting) => return Some(text(greeting)),
                None => [("user_name", elicit("What is your name?", "name", "string"))].to_vec(),
            },
            "test_input_required_result_sampling" => match given.get("capital_question", "/content/text") {
                Some(answer) => return Some(text(answer)),
                None => [("capital_question", sample("What is the capital of France?", 100))].to_vec(),
            },
            "test_input_required_result_list_roots" => match given.get("client_roots", "/roots") {
                Some(roots) => return Some(text(format!("roots: {roots}"))),
                None => [("client_roots", roots())].to_vec(),
            },
            "test_input_required_result_request_state" | "test_input_required_result_tampered_state" => {
                if given.content("confirm", "ok").is_some() && given.state.as_deref() == Some(name) {
                    return Some(text("state-ok"));
                }
                let asked = [("confirm", elicit("Please confirm", "ok", "boolean"))];
                return Some(required(&asked, Some(self.seal(name))));
            }
            "test_input_required_result_multiple_inputs" => {
                let all =
                    ["user_name", "greeting", "client_roots"].iter().all(|key| given.responses.contains_key(*key));
                if all && given.state.as_deref() == Some(name) {
                    return Some(text("all inputs are here"));
                }
                let asked = [
                    ("user_name", elicit("What is your name?", "name", "string")),
                    ("greeting", sample("Generate a greeting", 50)),
                    ("client_roots", roots()),
                ];
                return Some(required(&asked, Some(self.seal(name))));
            }
            "test_input_required_result_multi_round" => {
                let second = [("step2", elicit("Step 2: What is your favorite color?", "color", "string"))];
                let first = [("step1", elicit("Step 1: What is your name?", "name", "string"))];
                return Some(match given.state.as_deref() {
                    Some("round 2") if given.content("step2", "color").is_some() => text("both steps are done"),
                    Some("round 2") => required(&second, Some(self.seal("round 2"))),
                    Some("round 1") if given.content("step1", "name").is_some() => {
                        required(&second, Some(self.seal("round 2")))
                    }
                    _ => required(&first, Some(self.seal("round 1"))),
                });
            }
            "test_input_required_result_capabilities" => {
                let declared = context.client_capabilities().unwrap_or_default();
                let mut asked = Vec::new();
                if declared.elicitation.is_some() {
                    asked.push(("user_name", elicit("What is your name?", "name", "string")));
                }
                if declared.sampling.is_some() {
                    asked.push(("greeting", sample("Generate a greeting", 50)));
                }
                asked
            }
            _ => return None,
        };
        Some(required(asks, None))
    }

    /// Tools that ask the client while they run (before 2026-07-28).
    async fn converse(&self, name: &str, args: &Value, context: &Context) -> Option<Result<String, ErrorData>> {
        let form = |message: &Value, schema: Value| json!({ "method": "elicitation/create", "params": { "message": message, "requestedSchema": schema } });
        let request = match name {
            "test_sampling" => sample(args["prompt"].as_str().unwrap_or_default(), 100),
            "test_elicitation" => form(&args["message"], credentials()),
            "test_elicitation_sep1034_defaults" => form(&json!("Please review"), defaults()),
            "test_elicitation_sep1330_enums" => form(&json!("Please choose"), enums()),
            _ => return None,
        };
        let answer = async {
            let request: ServerRequest = parsed(request);
            let answer = context.peer.send_request(request).await;
            let answer = answer.map_err(|error| ErrorData::internal_error(error.to_string(), None))?;
            let answer = serde_json::to_value(answer).unwrap_or_default();
            Ok(match name {
                "test_sampling" => format!("LLM response: {}", answer["content"]["text"]),
                "test_elicitation" => format!("User response: {answer}"),
                _ => format!("Elicitation completed: action={}, content={}", answer["action"], answer["content"]),
            })
        };
        Some(answer.await)
    }
}

/// What came with a retry.
struct Given {
    responses: InputResponses,
    /// Already opened.
    state: Option<String>,
}

impl Given {
    fn get(&self, key: &str, pointer: &str) -> Option<String> {
        let value = self.responses.get(key)?.pointer(pointer)?;
        Some(value.as_str().map_or_else(|| value.to_string(), str::to_owned))
    }

    /// A field of a form that was filled in.
    fn content(&self, key: &str, field: &str) -> Option<String> {
        self.get(key, "/action").filter(|action| action == "accept")?;
        self.get(key, &format!("/content/{field}"))
    }
}

fn parsed<T: DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("fixtures are well-formed")
}

fn text(text: impl Into<String>) -> CallToolResponse {
    CallToolResult::success(vec![ContentBlock::text(text)]).into()
}

fn required(asks: &[(&str, Value)], state: Option<String>) -> CallToolResponse {
    let requests = asks.iter().map(|(key, request)| ((*key).to_owned(), parsed(request.clone()))).collect();
    InputRequiredResult::new(Some(requests), state).into()
}

fn elicit(message: &str, field: &str, kind: &str) -> Value {
    let schema = json!({ "type": "object", "properties": { field: { "type": kind } }, "required": [field] });
    json!({ "method": "elicitation/create", "params": { "message": message, "requestedSchema": schema } })
}

fn sample(prompt: &str, max_tokens: u32) -> Value {
    let message = json!({ "role": "user", "content": { "type": "text", "text": prompt } });
    json!({ "method": "sampling/createMessage", "params": { "messages": [message], "maxTokens": max_tokens } })
}

fn roots() -> Value {
    json!({ "method": "roots/list", "params": {} })
}

fn credentials() -> Value {
    json!({
        "type": "object",
        "properties": {
            "username": { "type": "string", "description": "User's response" },
            "email": { "type": "string", "description": "User's email address" },
        },
        "required": ["username", "email"],
    })
}

fn defaults() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": { "type": "string", "default": "John Doe" },
            "age": { "type": "integer", "default": 30 },
            "score": { "type": "number", "default": 95.5 },
            "status": { "type": "string", "enum": ["active", "inactive", "pending"], "default": "active" },
            "verified": { "type": "boolean", "default": true },
        },
    })
}

fn enums() -> Value {
    let titled = |what: &str| {
        ["First", "Second", "Third"]
            .iter()
            .zip(1..)
            .map(|(nth, n)| json!({ "const": format!("value{n}"), "title": format!("{nth} {what}") }))
            .collect::<Vec<_>>()
    };
    let plain = ["option1", "option2", "option3"];
    json!({
        "type": "object",
        "properties": {
            "untitledSingle": { "type": "string", "enum": plain },
            "titledSingle": { "type": "string", "oneOf": titled("Option") },
            "legacyEnum": {
                "type": "string",
                "enum": ["opt1", "opt2", "opt3"],
                "enumNames": ["Option One", "Option Two", "Option Three"],
            },
            "untitledMulti": { "type": "array", "items": { "type": "string", "enum": plain } },
            "titledMulti": { "type": "array", "items": { "anyOf": titled("Choice") } },
        },
    })
}

/// Tools that give a fixed answer.
fn fixed(name: &str) -> Option<CallToolResult> {
    let image = json!({ "type": "image", "data": PNG, "mimeType": "image/png" });
    let resource = |uri: &str, mime: &str, text: &str| json!({ "type": "resource", "resource": { "uri": uri, "mimeType": mime, "text": text } });
    let text = |text: &str| json!({ "type": "text", "text": text });
    let content = match name {
        "test_simple_text" => json!([text("This is a simple text response for testing.")]),
        "test_image_content" => json!([image]),
        "test_audio_content" => json!([{ "type": "audio", "data": WAV, "mimeType": "audio/wav" }]),
        "test_embedded_resource" => {
            json!([resource("test://embedded-resource", "text/plain", "This is an embedded resource content.")])
        }
        "test_custom_headers" | "json_schema_2020_12_tool" => json!([text("accepted")]),
        "test_multiple_content_types" => json!([
            text("Multiple content types test:"),
            image,
            resource("test://mixed-content-resource", "application/json", r#"{"test":"data","value":123}"#),
        ]),
        "test_error_handling" => {
            let content = text("This tool intentionally returns an error for testing");
            return Some(CallToolResult::error(parsed(json!([content]))));
        }
        _ => return None,
    };
    Some(CallToolResult::success(parsed(content)))
}

/// Always in the same order.
fn tools() -> Vec<Value> {
    let without_arguments = [
        "test_simple_text",
        "test_image_content",
        "test_audio_content",
        "test_embedded_resource",
        "test_multiple_content_types",
        "test_error_handling",
        "test_tool_with_logging",
        "test_logging_tool",
        "test_tool_with_progress",
        "test_elicitation_sep1034_defaults",
        "test_elicitation_sep1330_enums",
        "test_missing_capability",
        "test_streaming_elicitation",
        "test_trigger_tool_change",
        "test_trigger_prompt_change",
        "test_input_required_result_elicitation",
        "test_input_required_result_sampling",
        "test_input_required_result_list_roots",
        "test_input_required_result_request_state",
        "test_input_required_result_tampered_state",
        "test_input_required_result_multiple_inputs",
        "test_input_required_result_multi_round",
        "test_input_required_result_capabilities",
    ];
    let tool = |name: &str, schema: Value| json!({ "name": name, "description": format!("The fixture {name}"), "inputSchema": schema });
    let one =
        |field: &str| json!({ "type": "object", "properties": { field: { "type": "string" } }, "required": [field] });
    let mut tools = without_arguments.map(|name| tool(name, json!({ "type": "object" }))).to_vec();
    tools.push(tool("test_sampling", one("prompt")));
    tools.push(tool("test_elicitation", one("message")));
    let region = json!({ "region": { "type": "string", "x-mcp-header": "Region" } });
    tools.push(tool("test_custom_headers", json!({ "type": "object", "properties": region })));
    tools.push(tool("json_schema_2020_12_tool", rich_schema()));
    tools
}

/// Has to reach the client word for word.
fn rich_schema() -> Value {
    let text = || json!({ "type": "string" });
    let address = json!({ "street": text(), "city": text() });
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "$defs": { "address": { "$anchor": "addressDef", "type": "object", "properties": address } },
        "properties": {
            "name": text(),
            "address": { "$ref": "#/$defs/address" },
            "contactMethod": { "type": "string", "enum": ["phone", "email"] },
            "phone": text(),
            "email": text(),
        },
        "allOf": [{ "anyOf": [{ "required": ["phone"] }, { "required": ["email"] }] }],
        "if": { "properties": { "contactMethod": { "const": "phone" } }, "required": ["contactMethod"] },
        "then": { "required": ["phone"] },
        "else": { "required": ["email"] },
        "additionalProperties": false,
    })
}

fn prompts() -> Value {
    let argument =
        |name: &str| json!({ "name": name, "description": format!("The argument {name}"), "required": true });
    let prompt = |name: &str, arguments: Vec<Value>| json!({ "name": name, "description": format!("The fixture {name}"), "arguments": arguments });
    json!([
        prompt("test_simple_prompt", vec![]),
        prompt("test_prompt_with_arguments", vec![argument("arg1"), argument("arg2")]),
        prompt("test_prompt_with_embedded_resource", vec![argument("resourceUri")]),
        prompt("test_prompt_with_image", vec![]),
        prompt("test_input_required_result_prompt", vec![]),
    ])
}

fn resource(uri: &str) -> Option<Value> {
    if let Some(id) = uri.strip_prefix("test://template/").and_then(|rest| rest.strip_suffix("/data")) {
        let text = json!({ "id": id, "templateTest": true, "data": format!("Data for ID: {id}") }).to_string();
        return Some(json!({ "uri": uri, "mimeType": "application/json", "text": text }));
    }
    match uri {
        "test://static-text" => {
            let text = "This is the content of the static text resource.";
            Some(json!({ "uri": uri, "mimeType": "text/plain", "text": text }))
        }
        "test://static-binary" => Some(json!({ "uri": uri, "mimeType": "image/png", "blob": PNG })),
        "test://watched-resource" => Some(json!({ "uri": uri, "mimeType": "text/plain", "text": "watched" })),
        _ => None,
    }
}

impl ServerHandler for Fixtures {
    fn get_info(&self) -> ServerConfig {
        let capabilities = ServerCapabilities::builder()
            .enable_tools()
            .enable_tool_list_changed()
            .enable_prompts()
            .enable_prompts_list_changed()
            .enable_resources()
            .enable_resources_subscribe()
            .enable_completions()
            .enable_logging()
            .build();
        ServerConfig::new(capabilities).with_server_info(Implementation::new("sandpool-conformance", "0"))
    }

    async fn list_tools(&self, _: Option<PaginatedRequestParams>, _: Context) -> Result<ListToolsResult, ErrorData> {
        Ok(ListToolsResult::with_all_items(parsed(json!(tools()))))
    }

    async fn call_tool(&self, request: CallToolRequestParams, context: Context) -> Result<CallToolResponse, ErrorData> {
        let name = request.name.as_ref();
        if let Some(result) = fixed(name) {
            return Ok(result.into());
        }
        let state = self.open(request.request_state.as_deref())?;
        let given = Given { responses: request.input_responses.unwrap_or_default(), state };
        if let Some(response) = self.ask(name, &given, &context) {
            return Ok(response);
        }
        let args = request.arguments.map(Value::Object).unwrap_or_default();
        if let Some(answer) = self.converse(name, &args, &context).await {
            return answer.map(text);
        }
        match name {
            "test_tool_with_logging" | "test_logging_tool" => log(&context).await,
            "test_tool_with_progress" => progress(&context).await,
            "test_trigger_tool_change" => drop(self.changes.send(Changed::Tools)),
            "test_trigger_prompt_change" => drop(self.changes.send(Changed::Prompts)),
            "test_missing_capability" => {
                if context.client_capabilities().is_none_or(|declared| declared.sampling.is_none()) {
                    return Err(ErrorData::missing_required_client_capability(parsed(json!({ "sampling": {} }))));
                }
            }
            _ => return Err(ErrorData::invalid_params(format!("Unknown tool: {name}"), None)),
        }
        Ok(text(format!("{name} is done")))
    }

    async fn list_resources(
        &self,
        _: Option<PaginatedRequestParams>,
        _: Context,
    ) -> Result<ListResourcesResult, ErrorData> {
        let listed = ["test://static-text", "test://static-binary", "test://watched-resource"].map(|uri| {
            let mime = resource(uri).map(|resource| resource["mimeType"].clone());
            json!({ "uri": uri, "name": uri, "description": format!("The fixture {uri}"), "mimeType": mime })
        });
        Ok(ListResourcesResult::with_all_items(parsed(json!(listed))))
    }

    async fn list_resource_templates(
        &self,
        _: Option<PaginatedRequestParams>,
        _: Context,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        let template = json!({
            "uriTemplate": "test://template/{id}/data",
            "name": "template",
            "description": "A resource for each id",
            "mimeType": "application/json",
        });
        Ok(ListResourceTemplatesResult::with_all_items(parsed(json!([template]))))
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        _: Context,
    ) -> Result<ReadResourceResponse, ErrorData> {
        match resource(&request.uri) {
            Some(content) => Ok(ReadResourceResult::new(parsed(json!([content]))).into()),
            None => Err(ErrorData::resource_not_found("Resource not found", Some(json!({ "uri": request.uri })))),
        }
    }

    async fn subscribe(&self, _: SubscribeRequestParams, _: Context) -> Result<(), ErrorData> {
        Ok(())
    }

    async fn unsubscribe(&self, _: UnsubscribeRequestParams, _: Context) -> Result<(), ErrorData> {
        Ok(())
    }

    async fn list_prompts(
        &self,
        _: Option<PaginatedRequestParams>,
        _: Context,
    ) -> Result<ListPromptsResult, ErrorData> {
        Ok(ListPromptsResult::with_all_items(parsed(prompts())))
    }

    async fn get_prompt(&self, request: GetPromptRequestParams, _: Context) -> Result<GetPromptResponse, ErrorData> {
        let argument = |name: &str| {
            let given = request.arguments.as_ref().and_then(|arguments| arguments.get(name)?.as_str());
            given.map(str::to_owned).ok_or_else(|| ErrorData::invalid_params(format!("{name} is required"), None))
        };
        let text = |text: String| json!({ "type": "text", "text": text });
        let contents = match request.name.as_str() {
            "test_simple_prompt" => vec![text("This is a simple prompt for testing.".into())],
            "test_prompt_with_arguments" => {
                let (first, second) = (argument("arg1")?, argument("arg2")?);
                vec![text(format!("Prompt with arguments: arg1='{first}', arg2='{second}'"))]
            }
            "test_prompt_with_embedded_resource" => {
                let (uri, content) = (argument("resourceUri")?, "Embedded resource content for testing.");
                let embedded = json!({ "uri": uri, "mimeType": "text/plain", "text": content });
                let embedded = json!({ "type": "resource", "resource": embedded });
                vec![embedded, text("Please process the embedded resource above.".into())]
            }
            "test_prompt_with_image" => {
                let image = json!({ "type": "image", "data": PNG, "mimeType": "image/png" });
                vec![image, text("Please analyze the image above.".into())]
            }
            "test_input_required_result_prompt" => {
                let given = Given { responses: request.input_responses.unwrap_or_default(), state: None };
                let Some(chosen) = given.content("user_context", "context") else {
                    let ask = elicit("What context should the prompt use?", "context", "string");
                    let asks = [("user_context".to_owned(), parsed(ask))].into();
                    return Ok(InputRequiredResult::from_input_requests(asks).into());
                };
                vec![text(format!("Use this context: {chosen}"))]
            }
            other => return Err(ErrorData::invalid_params(format!("Unknown prompt: {other}"), None)),
        };
        let messages: Vec<Value> =
            contents.into_iter().map(|content| json!({ "role": "user", "content": content })).collect();
        Ok(GetPromptResult::new(parsed(json!(messages))).into())
    }

    async fn complete(&self, request: CompleteRequestParams, _: Context) -> Result<CompleteResult, ErrorData> {
        let known = ["paris", "park", "party"].into_iter().filter(|word| word.starts_with(&request.argument.value));
        let values = CompletionInfo::with_all_values(known.map(str::to_owned).collect());
        values.map(CompleteResult::new).map_err(|error| ErrorData::internal_error(error, None))
    }

    async fn set_level(&self, _: SetLevelRequestParams, _: Context) -> Result<(), ErrorData> {
        Ok(())
    }

    fn accepted_subscription_filter(&self, requested: &SubscriptionFilter) -> Option<SubscriptionFilter> {
        Some(requested.supported_by(&self.get_info().capabilities))
    }

    async fn listen(&self, context: SubscriptionContext) -> Result<(), ErrorData> {
        let mut changes = self.changes.subscribe();
        loop {
            let changed = tokio::select! {
                changed = changes.recv() => changed,
                () = context.cancelled() => return Ok(()),
            };
            // The sink refuses what this subscription did not ask for.
            let _ = match changed {
                Ok(Changed::Tools) => context.sink().notify_tool_list_changed().await,
                Ok(Changed::Prompts) => context.sink().notify_prompt_list_changed().await,
                Err(_) => return Ok(()),
            };
        }
    }
}

/// The newest revision wants no word unless the request set a level; in the older ones the level is the session's.
async fn log(context: &Context) {
    let modern = context.meta.protocol_version().is_some();
    for data in ["Tool execution started", "Tool processing data", "Tool execution completed"] {
        if !modern || context.meta.log_level().is_some() {
            let message = LoggingMessageNotificationParam::new(LoggingLevel::Info, json!(data));
            let _ = context.peer.notify_logging_message(message).await;
        }
        tokio::time::sleep(PAUSE).await;
    }
}

async fn progress(context: &Context) {
    for done in [0.0, 50.0, 100.0] {
        if let Some(token) = context.meta.get_progress_token() {
            let _ = context.peer.notify_progress(ProgressNotificationParam::new(token, done).with_total(100.0)).await;
        }
        tokio::time::sleep(PAUSE).await;
    }
}
