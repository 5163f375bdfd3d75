//! What each revision of the protocol receives, against the revision's own schema: every tool of every dialect, the lists
//! and the notifications, through the transport.
//!
//! `fixtures/revisions` has excerpts of the protocol's `schema/<revision>/schema.json`: the definitions of what a server
//! sends, without descriptions.

use std::collections::BTreeSet;
use std::sync::Arc;

use dialects::{Dialect, Links, Options};
use engine::Hold;
use mcp::stdio::{StdioOptions, serve};
use serde_json::{Map, Value, json};
use server::handler::{Handlers, Surface};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, DuplexStream, Lines, ReadHalf, WriteHalf};
use tokio_util::sync::CancellationToken;

use crate::mcp_fake::{FakeEngine, PNG};

const BASE: &str = "http://127.0.0.1:8775";

/// A revision as a client names it, and the schema of what it receives. Without a name it is the oldest one.
#[derive(Clone, Copy)]
struct Speaks {
    named: Option<&'static str>,
    schema: &'static str,
    /// Members of results that the schema does not have. Results may have more members in every revision.
    beside: &'static [&'static str],
}

const SCHEMAS: [&str; 5] = [
    include_str!("../fixtures/revisions/2024-11-05.json"),
    include_str!("../fixtures/revisions/2025-03-26.json"),
    include_str!("../fixtures/revisions/2025-06-18.json"),
    include_str!("../fixtures/revisions/2025-11-25.json"),
    include_str!("../fixtures/revisions/2026-07-28.json"),
];
const HINTS: &[&str] = &["ttlMs", "cacheScope"];
const REVISIONS: [Speaks; 6] = [
    Speaks { named: None, schema: SCHEMAS[0], beside: &["structuredContent"] },
    Speaks { named: Some("2024-11-05"), schema: SCHEMAS[0], beside: &[] },
    Speaks { named: Some("2025-03-26"), schema: SCHEMAS[1], beside: &[] },
    Speaks { named: Some("2025-06-18"), schema: SCHEMAS[2], beside: HINTS },
    Speaks { named: Some("2025-11-25"), schema: SCHEMAS[3], beside: HINTS },
    Speaks { named: Some(MODERN), schema: SCHEMAS[4], beside: &[] },
];
const MODERN: &str = "2026-07-28";

/// What the document of `microsandbox` has beside the content.
const DOCUMENTED: [&str; 6] = ["session_id", "session_created", "execution_time_ms", "command", "args", "exit_code"];

/// Calls of every tool of a dialect, some of which fail: files, pictures, long outputs, pages, errors.
fn calls(dialect: &str) -> Vec<(&'static str, Value)> {
    match dialect {
        "agentrun" => vec![
            ("create_context", json!({ "name": "a" })),
            ("upload_file", json!({ "context_id": "a", "path": "in/a.csv", "content": "a,b\n" })),
            ("download_file", json!({ "context_id": "a", "path": "in/a.csv" })),
            ("download_file", json!({ "context_id": "a", "path": "nowhere" })),
            ("list_files", json!({ "context_id": "a" })),
            ("run_code", json!({ "context_id": "a", "code": "picture" })),
            ("run_code", json!({ "context_id": "a", "code": "spilled" })),
            ("run_code", json!({ "context_id": "a", "code": "1 / 0" })),
            ("list_contexts", json!({})),
            ("stop_context", json!({ "context_id": "a" })),
        ],
        "microsandbox" => vec![
            ("execute_code", json!({ "code": "picture", "session_id": "a" })),
            ("execute_code", json!({ "code": "spilled", "session_id": "a" })),
            ("execute_code", json!({ "code": "1 / 0", "session_id": "a" })),
            ("execute_command", json!({ "command": "ls", "session_id": "a" })),
            ("get_sessions", json!({})),
            ("get_volume_path", json!({})),
            ("stop_session", json!({ "session_id": "a" })),
        ],
        "workbench" => vec![
            ("file_list", json!({})),
            ("sandbox_create", json!({})),
            ("file_write", json!({ "path": "a/b.txt", "content": "hello\n" })),
            ("file_read", json!({ "path": "a/b.txt" })),
            ("file_list", json!({})),
            ("code_run", json!({ "language": "python", "code": "picture" })),
            ("code_run", json!({ "language": "python", "code": "spilled" })),
            ("browser_goto", json!({ "url": "http://shop.test/" })),
            ("browser_snapshot", json!({})),
            ("browser_type", json!({ "selector": "ref_3", "text": "hello" })),
            ("browser_click", json!({ "selector": "#download" })),
            ("sandbox_destroy", json!({})),
        ],
        "conversation" => vec![
            (
                "sandbox.upload_file",
                json!({ "conversationId": "a", "filename": "evil\n[end] \"x\".csv", "content": "YQ==" }),
            ),
            ("sandbox.run_code", json!({ "conversationId": "a", "language": "python", "code": "picture" })),
            ("sandbox.run_code", json!({ "conversationId": "a", "language": "python", "code": "spilled" })),
            ("sandbox.run_code", json!({ "conversationId": "a", "language": "python", "code": "1 / 0" })),
            ("sandbox.upload_file", json!({ "conversationId": "a", "filename": "b.csv", "content": "YQ==" })),
            ("sandbox.list_runners", json!({})),
        ],
        _ => vec![
            ("create_context", json!({})),
            ("write_file", json!({ "path": "a.txt", "content": "one\ntwo\n" })),
            ("write_file", json!({ "path": "raw.bin", "content": "AP/+", "encoding": "base64" })),
            ("write_file", json!({ "path": "plot.png", "content": PNG, "encoding": "base64" })),
            ("read_file", json!({ "path": "a.txt" })),
            ("read_file", json!({ "path": "raw.bin" })),
            ("read_file", json!({ "path": "plot.png" })),
            ("read_file", json!({ "path": "nowhere" })),
            ("list_files", json!({})),
            ("edit_file", json!({ "path": "a.txt", "old_string": "one", "new_string": "three" })),
            ("search_files", json!({ "text": "two" })),
            ("upload_link", json!({ "path": "up.bin" })),
            ("run_code", json!({ "code": "picture" })),
            ("run_code", json!({ "code": "spilled" })),
            ("run_code", json!({ "code": "1 / 0" })),
            ("run_command", json!({ "command": "ls" })),
            ("run_code", json!({ "code": "sleep", "background": true })),
            ("wait_run", json!({ "run": "run-1", "wait": 5 })),
            ("cancel_run", json!({ "run": "run-1" })),
            ("browser_open", json!({ "url": "http://shop.test/" })),
            ("browser_act", json!({ "action": "click", "target": "#download" })),
            ("browser_snapshot", json!({})),
            ("browser_screenshot", json!({})),
            ("list_contexts", json!({})),
            ("stop_context", json!({ "context": "ctx-1" })),
        ],
    }
}

/// A client that speaks one revision over lines.
struct Client {
    speaks: Speaks,
    definitions: Map<String, Value>,
    input: WriteHalf<DuplexStream>,
    output: Lines<BufReader<ReadHalf<DuplexStream>>>,
}

impl Client {
    async fn connect(dialect: &'static Dialect, speaks: Speaks) -> Self {
        let links = Links { base: Some(BASE.into()), ..Links::default() };
        let surface = Arc::new(Surface::new(dialect, None, Options::default(), links));
        let (ours, theirs) = tokio::io::duplex(1 << 20);
        let (input, output) = tokio::io::split(theirs);
        let (from_server, to_server) = tokio::io::split(ours);
        let make = move |caller| Handlers::new(Arc::new(FakeEngine::default()), surface).of(caller, Hold::default());
        tokio::spawn(serve(input, output, make, StdioOptions::default(), CancellationToken::new()));
        let definitions = serde_json::from_str(speaks.schema).unwrap();
        let mut client = Self { speaks, definitions, input: to_server, output: BufReader::new(from_server).lines() };
        match speaks.named {
            None => {}
            Some(MODERN) => drop(client.ask("server/discover", json!({}), "DiscoverResult").await),
            Some(version) => {
                let info = json!({ "name": "t", "version": "1" });
                let params = json!({ "protocolVersion": version, "capabilities": {}, "clientInfo": info });
                let result = client.ask("initialize", params, "InitializeResult").await;
                assert_eq!(result["protocolVersion"], version);
            }
        }
        client
    }

    async fn send(&mut self, method: &str, mut params: Value) {
        if self.speaks.named == Some(MODERN) {
            params["_meta"]["io.modelcontextprotocol/protocolVersion"] = MODERN.into();
            params["_meta"]["io.modelcontextprotocol/clientCapabilities"] = json!({});
            params["_meta"]["io.modelcontextprotocol/clientInfo"] = json!({ "name": "t", "version": "1" });
        }
        let request = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
        self.input.write_all(format!("{request}\n").as_bytes()).await.unwrap();
    }

    async fn next(&mut self) -> Value {
        let line = self.output.next_line().await.unwrap().expect("an answer, not the end");
        serde_json::from_str(&line).unwrap()
    }

    /// Asks, and checks the result against this definition of the revision.
    async fn ask(&mut self, method: &str, params: Value, definition: &str) -> Value {
        self.send(method, params).await;
        let answer = self.next().await;
        let result = answer.get("result").unwrap_or_else(|| panic!("{method}: {answer}")).clone();
        self.check(definition, &result);
        result
    }

    fn check(&self, definition: &str, sent: &Value) {
        let mut known = sent.clone();
        for member in self.speaks.beside.iter().chain(&DOCUMENTED) {
            known.as_object_mut().unwrap().remove(*member);
        }
        let schema = json!({ "$ref": format!("#/definitions/{definition}") });
        if let Err(why) = self.fits(&schema, &known) {
            panic!("{:?} {definition}: {why}\n{sent:#}", self.speaks.named);
        }
    }

    /// Returns why a value does not fit a schema. A member that the schema does not name fits only where the schema says
    /// that there may be others.
    fn fits(&self, schema: &Value, value: &Value) -> Result<(), String> {
        if let Some(name) = schema["$ref"].as_str() {
            return self.fits(&self.definitions[name.rsplit('/').next().unwrap()], value);
        }
        if let Some(any) = schema["anyOf"].as_array() {
            let whys: Vec<String> = any.iter().filter_map(|schema| self.fits(schema, value).err()).collect();
            return if whys.len() < any.len() { Ok(()) } else { Err(format!("none of: {}", whys.join("; "))) };
        }
        if let Some(only) = schema.get("const").filter(|only| *only != value) {
            return Err(format!("{value} is not {only}"));
        }
        if let Some(values) = schema["enum"].as_array().filter(|values| !values.contains(value)) {
            return Err(format!("{value} is none of {values:?}"));
        }
        let is = |kind: &str| crate::tools::is_of_type(value, kind);
        let kinds = match &schema["type"] {
            Value::Null => Vec::new(),
            Value::String(kind) => vec![kind.as_str()],
            kinds => kinds.as_array().unwrap().iter().map(|kind| kind.as_str().unwrap()).collect(),
        };
        if !kinds.is_empty() && !kinds.into_iter().any(is) {
            return Err(format!("{value:.80} is not {}", schema["type"]));
        }
        let empty = Map::new();
        for (name, member) in value.as_object().unwrap_or(&empty) {
            let others = schema.get("additionalProperties");
            match (schema["properties"].get(name), others) {
                (Some(schema), _) => self.fits(schema, member).map_err(|why| format!("{name}: {why}"))?,
                (None, Some(Value::Bool(true))) => {}
                (None, Some(schema)) if schema.is_object() => self.fits(schema, member)?,
                (None, _) if schema.get("type").is_some() => return Err(format!("{name} is unknown")),
                // A schema without a type lets everything through.
                (None, _) => {}
            }
        }
        for name in schema["required"].as_array().into_iter().flatten() {
            value.get(name.as_str().unwrap()).ok_or_else(|| format!("{name} is missing"))?;
        }
        match schema.get("items") {
            Some(schema) => value.as_array().into_iter().flatten().try_for_each(|item| self.fits(schema, item)),
            None => Ok(()),
        }
    }
}

fn dialects() -> Vec<&'static Dialect> {
    dialects::all(&Options::default()).collect()
}

fn texts(result: &Value) -> Vec<&str> {
    result["content"].as_array().unwrap().iter().filter_map(|block| block["text"].as_str()).collect()
}

fn links(result: &Value) -> Vec<&Value> {
    result["content"].as_array().unwrap().iter().filter(|block| block["type"] == "resource_link").collect()
}

#[tokio::test]
async fn a_revision_is_sent_only_what_its_schema_has() {
    for dialect in dialects() {
        for speaks in REVISIONS {
            let mut client = Client::connect(dialect, speaks).await;
            let listed = client.ask("tools/list", json!({}), "ListToolsResult").await;
            let tools: BTreeSet<&str> =
                listed["tools"].as_array().unwrap().iter().map(|tool| tool["name"].as_str().unwrap()).collect();
            let mut succeeded = BTreeSet::new();
            for (tool, arguments) in calls(dialect.id) {
                let call = json!({ "name": tool, "arguments": arguments });
                client.send("tools/call", call).await;
                let answer = client.next().await;
                if let Some(result) = answer.get("result") {
                    client.check("CallToolResult", result);
                    succeeded.extend((result["isError"] == false).then_some(tool));
                }
            }
            assert_eq!(succeeded, tools, "{} {:?}", dialect.id, speaks.named);
            client.ask("resources/list", json!({}), "ListResourcesResult").await;
            client.ask("resources/templates/list", json!({}), "ListResourceTemplatesResult").await;
        }
    }
}

/// What a client of an older revision reads holds what the newest one is sent: the address, name, type and size of every
/// file. An address is there once.
#[tokio::test]
async fn an_older_revision_loses_no_link() {
    let mut seen = 0;
    for dialect in dialects() {
        let mut newest = Client::connect(dialect, REVISIONS[4]).await;
        let mut older = Vec::new();
        for speaks in &REVISIONS[..3] {
            older.push(Client::connect(dialect, *speaks).await);
        }
        for (tool, arguments) in calls(dialect.id) {
            let call = json!({ "name": tool, "arguments": arguments });
            newest.send("tools/call", call.clone()).await;
            let expected = newest.next().await;
            for client in &mut older {
                client.send("tools/call", call.clone()).await;
                let answer = client.next().await;
                let (Some(expected), Some(result)) = (expected.get("result"), answer.get("result")) else { continue };
                assert_eq!(
                    result["content"].as_array().unwrap().len(),
                    expected["content"].as_array().unwrap().len(),
                    "{tool}"
                );
                for link in links(expected) {
                    seen += 1;
                    let all = texts(result).concat();
                    let uri = link["uri"].as_str().unwrap();
                    let details = format!(" ({}, {} bytes)", link["mimeType"].as_str().unwrap(), link["size"]);
                    let described = format!("{:?}{details}", link["name"].as_str().unwrap());
                    assert!(all.contains(uri), "{tool}: no {uri} in {all}");
                    assert!(
                        texts(result).iter().any(|text| text.starts_with(&described)),
                        "{tool}: {described}: {all}"
                    );
                    let known = texts(expected).concat().contains(uri);
                    let shown = |result| texts(result).concat().matches(uri).count();
                    assert_eq!(shown(result), shown(expected) + usize::from(!known), "{tool}: {uri}: {all}");
                }
            }
        }
    }
    assert!(seen > 10, "{seen}");
}

/// A request that names a revision changes nothing for the others of its connection.
#[tokio::test]
async fn each_request_is_answered_by_its_own_revision() {
    let dialect = dialects::find("workbench", &Options::default()).unwrap();
    let mut client = Client::connect(dialect, REVISIONS[1]).await;
    for (tool, arguments) in
        [("sandbox_create", json!({})), ("file_write", json!({ "path": "a.txt", "content": "hello" }))]
    {
        client.ask("tools/call", json!({ "name": tool, "arguments": arguments }), "CallToolResult").await;
    }
    let read = json!({ "name": "file_read", "arguments": { "path": "a.txt" } });
    let older = client.speaks;
    for speaks in [older, REVISIONS[5], older] {
        client.speaks = speaks;
        client.definitions = serde_json::from_str(speaks.schema).unwrap();
        let result = client.ask("tools/call", read.clone(), "CallToolResult").await;
        assert_eq!(links(&result).len(), usize::from(speaks.named == Some(MODERN)), "{result}");
    }
}

/// Since 2025-03-26 a progress notification has a message.
#[tokio::test]
async fn progress_is_sent_as_the_revision_has_it() {
    for speaks in REVISIONS {
        let dialect = dialects::find("sandpool", &Options::default()).unwrap();
        let mut client = Client::connect(dialect, speaks).await;
        let call = json!({ "name": "run_code", "arguments": { "code": "ticks" }, "_meta": { "progressToken": 7 } });
        client.send("tools/call", call).await;
        let mut messages = Vec::new();
        let answer = loop {
            let mut message = client.next().await;
            if message.get("result").is_some() {
                break message;
            }
            message.as_object_mut().unwrap().remove("jsonrpc");
            let jsonrpc = client.definitions["ProgressNotification"]["properties"].get("jsonrpc").is_some();
            if jsonrpc {
                message["jsonrpc"] = "2.0".into();
            }
            client.check("ProgressNotification", &message);
            messages.push(message["params"].get("message").cloned());
        };
        client.check("CallToolResult", &answer["result"]);
        assert!(!messages.is_empty());
        let has_messages = speaks.named.is_some_and(|named| named >= "2025-03-26");
        assert!(messages.iter().all(|message| message.is_some() == has_messages), "{:?} {messages:?}", speaks.named);
    }
}
