//! Calls a dialect's tools as the handler does, and holds what is true of every answer.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::sync::{Arc, Mutex};

use dialects::{Answer, Block, Dialect, Fence, Links, Lowered, Options, RenderInput, Reply, ToolRow};
use engine::op::{Call, EventSink, Realm, Tenant};
use serde_json::{Map, Value};
use server::handler::Execute;
use tokio_util::sync::CancellationToken;

use crate::mcp_fake::FakeEngine;

/// Of the marks around what came from a page.
pub const NUMBER: &str = "0123456789abcdef";

pub fn fence() -> Fence {
    Fence::new(NUMBER.into())
}

pub struct Tools {
    pub engine: Arc<FakeEngine>,
    pub dialect: &'static Dialect,
    pub options: Options,
    pub links: Links,
    pub connection: Option<String>,
    /// The tools that have given a success so far.
    pub succeeded: Mutex<BTreeSet<&'static str>>,
}

impl Tools {
    pub fn new(dialect: &'static Dialect) -> Self {
        Self {
            engine: Arc::default(),
            dialect,
            options: Options::default(),
            links: Links::default(),
            connection: Some("a".into()),
            succeeded: Mutex::default(),
        }
    }

    pub fn with_links(dialect: &'static Dialect) -> Self {
        Self { links: Links { base: Some("http://127.0.0.1:8775".into()), ..Links::default() }, ..Self::new(dialect) }
    }

    pub fn row(&self, name: &str) -> &'static ToolRow {
        self.dialect.find(name).unwrap_or_else(|| panic!("no tool {name}"))
    }

    pub async fn reply(&self, tool: &str, arguments: Value) -> Reply {
        let row = self.row(tool);
        let Value::Object(mut args) = arguments else { panic!("arguments are an object") };
        self.dialect.prepare(row, &mut args);
        let scene =
            RenderInput { tool: row.name, args: &args, options: &self.options, links: &self.links, fence: &fence() };
        let reply = match self.dialect.lower(row, &args, &self.options) {
            Err(refused) => (self.dialect.refuse)(&scene, &refused),
            Ok(Lowered { op, render }) => {
                let call = Call {
                    tenant: Tenant::local(),
                    realm: Realm(self.dialect.id),
                    connection: self.connection.clone(),
                    cancel: CancellationToken::new(),
                    events: EventSink::default(),
                    memory: Default::default(),
                    stages: Default::default(),
                    found: Default::default(),
                };
                match self.engine.execute(&call, op).await {
                    Ok(outcome) => row.render(&scene, render, outcome),
                    Err(error) => (row.render_error)(&scene, &error),
                }
            }
        };
        if let Reply::Answer(answer) = &reply {
            self.check(row, answer);
        }
        reply
    }

    fn check(&self, row: &'static ToolRow, answer: &Answer) {
        assert!(matches!(answer.blocks.first(), Some(Block::Text(_))), "the first block is text");
        assert!(answer.fits || answer.is_error, "a success without its object");
        if let Some(schema) = row.output_schema.filter(|_| answer.fits) {
            fits(&schema(), &answer.structured);
        }
        if !answer.is_error {
            self.succeeded.lock().unwrap().insert(row.name);
        }
    }

    /// An answer rather than an error of the protocol.
    pub async fn answer(&self, tool: &str, arguments: Value) -> Answer {
        match self.reply(tool, arguments).await {
            Reply::Answer(answer) => answer,
            Reply::Error { message, .. } => panic!("an error of the protocol: {message}"),
        }
    }

    /// The whole answer to each of these calls, written down.
    pub async fn transcript(&self, calls: &[(&str, Value)]) -> String {
        let mut said = String::new();
        for (tool, arguments) in calls {
            writeln!(said, "> {tool} {arguments}").unwrap();
            let is_sent = self.row(tool).output_schema.is_some();
            write_reply(&mut said, &self.reply(tool, arguments.clone()).await, is_sent);
            said.push('\n');
        }
        said
    }

    pub fn assert_every_tool_succeeded_but(&self, without: &[&str]) {
        let expected: BTreeSet<&str> =
            self.dialect.tools.iter().map(|row| row.name).filter(|name| !without.contains(name)).collect();
        assert_eq!(*self.succeeded.lock().unwrap(), expected);
    }
}

/// Writes what a client receives. The object of a tool without a schema is not sent.
fn write_reply(said: &mut String, reply: &Reply, object_is_sent: bool) {
    let answer = match reply {
        Reply::Error { code, message, data } => {
            writeln!(said, "error {code}: {message}{}", data.as_ref().map_or(String::new(), Value::to_string)).unwrap();
            return;
        }
        Reply::Answer(answer) => answer,
    };
    for (number, block) in answer.blocks.iter().enumerate() {
        match block {
            Block::Text(text) => writeln!(said, "{number} text\n{text}"),
            Block::Image { data, mime } => writeln!(said, "{number} image {mime} {} bytes of base64", data.len()),
            Block::Link { uri, name, mime, size } => writeln!(said, "{number} link {name} {mime} {size:?}\n{uri}"),
        }
        .unwrap();
    }
    if !answer.extra.is_empty() {
        writeln!(said, "beside {}", Value::from(answer.extra.clone())).unwrap();
    }
    if answer.is_error {
        said.push_str("is an error\n");
    }
    if answer.fits && object_is_sent {
        writeln!(said, "structured {}", answer.structured).unwrap();
    }
}

/// Whether a value has a type of JSON Schema.
pub fn is_of_type(value: &Value, kind: &str) -> bool {
    match kind {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_u64() || value.is_i64(),
        "number" => value.is_number(),
        other => panic!("unknown type {other}"),
    }
}

/// As much of JSON Schema as the output schemas use.
pub fn fits(schema: &Value, value: &Value) {
    let kind = schema["type"].as_str().unwrap_or_else(|| panic!("no type in {schema}"));
    assert!(is_of_type(value, kind), "{value} is not {kind}");
    let empty = Map::new();
    let properties = schema.get("properties").and_then(Value::as_object).unwrap_or(&empty);
    for (key, member) in value.as_object().unwrap_or(&empty) {
        let open = schema.get("additionalProperties").is_some_and(|open| open != &Value::Bool(false));
        match properties.get(key) {
            Some(property) => fits(property, member),
            None => assert!(open, "{key} is not in the schema"),
        }
    }
    for key in schema.get("required").and_then(Value::as_array).into_iter().flatten() {
        assert!(value.get(key.as_str().unwrap()).is_some(), "{key} is missing in {value}");
    }
    for item in value.as_array().into_iter().flatten() {
        fits(&schema["items"], item);
    }
}
