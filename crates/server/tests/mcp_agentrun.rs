//! The `agentrun` dialect against its document: schemas member for member, results and errors as printed.

mod mcp_fake;

use std::sync::Arc;

use engine::op::Op;
use mcp_fake::FakeEngine;
use serde_json::{Map, Value, json};
use server::dialect::{Answer, Block, Dialect, Lang, Links, Options, Reply, Scene, ToolRow, agentrun};
use server::mcp::Execute;

const DOCUMENT: [(&str, &str); 4] = [
    ("run_code", include_str!("fixtures/agentrun/run_code.json")),
    ("create_context", include_str!("fixtures/agentrun/create_context.json")),
    ("stop_context", include_str!("fixtures/agentrun/stop_context.json")),
    ("list_contexts", include_str!("fixtures/agentrun/list_contexts.json")),
];

fn row(dialect: &Dialect, name: &str) -> &'static ToolRow {
    dialect.find(name).unwrap()
}

#[test]
fn names_and_schemas_equal_the_document_s() {
    for (name, printed) in DOCUMENT {
        let printed: Value = serde_json::from_str(printed).unwrap();
        let row = row(&agentrun::DIALECT, name);
        assert_eq!(printed["name"], row.name);
        assert_eq!(printed["inputSchema"], agentrun::DIALECT.input_schema(row, Lang::Zh, &Options::default()));
        let description = agentrun::DIALECT.description(row, Lang::Zh);
        assert!(description.starts_with(printed["description"].as_str().unwrap()), "{description}");
    }
    let names: Vec<&str> = agentrun::DIALECT.tools.iter().map(|row| row.name).collect();
    assert_eq!(names[..4], DOCUMENT.map(|(name, _)| name));
    assert_eq!(names[4..], ["upload_file", "download_file", "list_files"]);
}

#[test]
fn the_default_context_prints_the_appendix_s_run_code() {
    let appendix: Value = serde_json::from_str(include_str!("fixtures/agentrun/tools_list_appendix.json")).unwrap();
    let printed = &appendix["result"]["tools"][0];
    let dialect = &agentrun::WITH_DEFAULT_CONTEXT;
    let row = row(dialect, "run_code");
    assert_eq!(printed["inputSchema"], dialect.input_schema(row, Lang::Zh, &Options::default()));
    assert!(dialect.description(row, Lang::Zh).starts_with(printed["description"].as_str().unwrap()));
}

/// Both languages say everything, and neither changes more than words.
#[test]
fn every_tool_has_prose_in_both_languages() {
    for dialect in [&agentrun::DIALECT, &agentrun::WITH_DEFAULT_CONTEXT] {
        for lang in [Lang::En, Lang::Zh] {
            assert!(dialect.instructions(lang).is_some());
            for row in dialect.tools {
                assert!(!dialect.description(row, lang).is_empty(), "{} {lang:?}", row.name);
                let schema = dialect.input_schema(row, lang, &Options::default());
                for (field, property) in schema["properties"].as_object().unwrap() {
                    assert!(!property["description"].as_str().unwrap().is_empty(), "{}.{field} {lang:?}", row.name);
                }
            }
        }
    }
}

/// What breaks clients and model providers, in either schema.
#[test]
fn schemas_are_plain() {
    fn check(schema: &Value) {
        if let Some(members) = schema.as_object() {
            for (key, value) in members {
                assert!(
                    !["$ref", "$schema", "format", "title", "additionalProperties"].contains(&key.as_str()),
                    "{key}"
                );
                assert!(key != "type" || value.is_string() || value.is_object(), "{value}");
                check(value);
            }
        }
    }
    for row in agentrun::DIALECT.tools {
        let output = (row.output_schema)();
        assert_eq!(output["type"], "object");
        check(&output);
        check(&agentrun::DIALECT.input_schema(row, Lang::En, &Options::default()));
        assert!(row.name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') && row.name.len() <= 64);
    }
}

#[test]
fn the_texts_of_the_tools() {
    let mut text = String::new();
    for row in agentrun::DIALECT.tools {
        let schema = agentrun::DIALECT.input_schema(row, Lang::En, &Options::default());
        let description = agentrun::DIALECT.description(row, Lang::En);
        text += &format!("## {}\n{description}\n{schema:#}\n{:#}\n\n", row.name, (row.output_schema)());
    }
    insta::assert_snapshot!(text);
}

struct Tools {
    engine: Arc<FakeEngine>,
    dialect: &'static Dialect,
}

impl Tools {
    fn new() -> Self {
        Self { engine: Arc::default(), dialect: &agentrun::DIALECT }
    }

    async fn answer(&self, tool: &str, arguments: Value) -> Answer {
        let row = row(self.dialect, tool);
        let Value::Object(args) = arguments else { panic!("arguments are an object") };
        let (options, links) = (Options::default(), Links::default());
        let scene = Scene { tool: row.name, args: &args, options: &options, links: &links };
        let reply = match (row.lower)(&args, &options) {
            Err(refused) => (self.dialect.refuse)(&scene, &refused),
            Ok(op) => match self.engine.execute(&mcp_fake::call(self.dialect), op).await {
                Ok(outcome) => (row.render)(&scene, outcome).into(),
                Err(error) => (row.render_error)(&scene, &error),
            },
        };
        match reply {
            Reply::Answer(answer) => answer,
            Reply::Error { message, .. } => panic!("an error of the protocol: {message}"),
        }
    }

    /// The first block, which must be the structured content as indented JSON that fits the output schema.
    async fn text(&self, tool: &str, arguments: Value) -> String {
        let answer = self.answer(tool, arguments).await;
        let Block::Text(text) = &answer.blocks[0] else { panic!("the first block is text") };
        assert_eq!(serde_json::from_str::<Value>(text).unwrap(), answer.structured);
        if !answer.is_error {
            fits(&(row(self.dialect, tool).output_schema)(), &answer.structured);
        }
        text.clone()
    }
}

/// As much of JSON Schema as the output schemas use.
fn fits(schema: &Value, value: &Value) {
    let kind = schema["type"].as_str().unwrap();
    let right = match kind {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_u64() || value.is_i64(),
        "number" => value.is_number(),
        other => panic!("unknown type {other}"),
    };
    assert!(right, "{value} is not {kind}");
    let empty = Map::new();
    for (key, property) in schema.get("properties").and_then(Value::as_object).unwrap_or(&empty) {
        if let Some(member) = value.get(key) {
            fits(property, member);
        }
    }
    for key in schema.get("required").and_then(Value::as_array).into_iter().flatten() {
        assert!(value.get(key.as_str().unwrap()).is_some(), "{key} is missing in {value}");
    }
    for item in value.as_array().into_iter().flatten() {
        fits(&schema["items"], item);
    }
}

macro_rules! calls {
    ($tools:expr, $($tool:literal $arguments:tt),+ $(,)?) => {{
        let mut transcript = String::new();
        $(
            let arguments = json!($arguments);
            transcript += &format!("> {} {arguments}\n{}\n", $tool, $tools.text($tool, arguments.clone()).await);
        )+
        transcript
    }};
}

#[tokio::test]
async fn a_session_as_the_document_tells_it() {
    let tools = Tools::new();
    let said = calls!(
        tools,
        "list_contexts" {},
        "create_context" { "name": "user-alice-session", "description": "Alice 的数据分析会话" },
        "create_context" { "name": "web-scraping-task", "language": "javascript", "description": "网页数据爬取和处理" },
        "create_context" { "name": "типы.数据_1", "language": "typescript" },
        "run_code" { "code": "x = 42", "context_id": "ctx-1" },
        "run_code" { "code": "print(x)", "context_id": "ctx-1" },
        "run_code" { "code": "x", "context_id": "user-alice-session" },
        "run_code" { "code": "print('a', end=''); 7", "context_id": "ctx-1" },
        "run_code" { "code": "console.log(x)", "context_id": "ctx-2" },
        "run_code" { "code": "1 / 0", "context_id": "ctx-1" },
        "list_contexts" {},
        "stop_context" { "context_id": "ctx-1" },
        "stop_context" { "context_id": "ctx-1" },
        "run_code" { "code": "print(x)", "context_id": "ctx-1" },
    );
    insta::assert_snapshot!(said);
}

#[tokio::test]
async fn files_go_in_and_out() {
    let tools = Tools::new();
    let said = calls!(
        tools,
        "create_context" { "name": "a" },
        "upload_file" { "context_id": "a", "path": "data/in.csv", "content": "a,b\n1,2\n" },
        "upload_file" { "context_id": "a", "path": "/workspace/raw.bin", "content": "AP/+\nAQ", "encoding": "base64" },
        "upload_file" { "context_id": "a", "path": "empty", "content": "" },
        "list_files" { "context_id": "a" },
        "list_files" { "context_id": "a", "path": "./data/" },
        "download_file" { "context_id": "a", "path": "data/in.csv" },
        "download_file" { "context_id": "a", "path": "data/in.csv", "encoding": "base64" },
        "download_file" { "context_id": "a", "path": "raw.bin" },
        "download_file" { "context_id": "a", "path": "raw.bin", "encoding": "utf-8" },
        "download_file" { "context_id": "a", "path": "nowhere" },
        "upload_file" { "context_id": "a", "path": "x", "content": "not base64!", "encoding": "base64" },
        "upload_file" { "context_id": "a", "path": "x", "content": "x", "encoding": "latin-1" },
        "upload_file" { "context_id": "a", "path": "../out", "content": "x" },
        "upload_file" { "context_id": "a", "path": "/etc/passwd", "content": "x" },
        "upload_file" { "context_id": "a", "path": "/workspacex", "content": "x" },
        "upload_file" { "context_id": "a", "path": "a\u{0}b", "content": "x" },
        "upload_file" { "context_id": "a", "path": "", "content": "x" },
        "list_files" { "context_id": "a", "path": "/workspace/../.." },
        "list_files" { "context_id": "nobody" },
    );
    insta::assert_snapshot!(said);
}

#[tokio::test]
async fn a_file_too_large_for_an_answer_is_refused_whatever_it_holds() {
    let tools = Tools::new();
    tools.text("create_context", json!({ "name": "a" })).await;
    for unit in ["x", "\"", "\n", "\u{1}", "\u{7f}", "é"] {
        let mut size = 3 << 20;
        loop {
            let content = unit.repeat(size / unit.len());
            tools.text("upload_file", json!({ "context_id": "a", "path": "f", "content": content })).await;
            let answer = tools.answer("download_file", json!({ "context_id": "a", "path": "f" })).await;
            if !answer.is_error {
                let Block::Text(text) = &answer.blocks[0] else { panic!() };
                let length = json!({ "text": text, "structured": answer.structured }).to_string().len();
                assert!(length < 8 << 20, "{unit:?}: {length}");
                break;
            }
            assert_eq!(answer.structured["code"], "FILE_TOO_LARGE");
            size -= size / 4;
        }
    }
}

#[tokio::test]
async fn every_end_of_a_run_says_what_happened_and_what_to_do() {
    let tools = Tools::new();
    tools.text("create_context", json!({ "name": "a" })).await;
    let mut transcript = String::new();
    for code in [
        "exit",
        "timeout kept",
        "timeout lost",
        "interrupted",
        "memory",
        "exited",
        "crashed",
        "lost",
        "late",
        "notice",
        "markup",
        "busy",
        "queue full",
        "not ready",
        "back end",
    ] {
        transcript +=
            &format!("{code}\n{}\n", tools.text("run_code", json!({ "code": code, "context_id": "a" })).await);
    }
    insta::assert_snapshot!(transcript);
}

/// However much is displayed, the answer stays far below what clients read.
#[tokio::test]
async fn texts_that_are_displayed_have_one_budget_together() {
    let tools = Tools::new();
    tools.text("create_context", json!({ "name": "a" })).await;
    let answer = tools.answer("run_code", json!({ "code": "displays", "context_id": "a" })).await;
    let stdout = answer.structured["stdout"].as_str().unwrap();
    assert!(stdout.chars().count() < 20_100 && stdout.ends_with("the end\n"), "{}", stdout.chars().count());
}

#[tokio::test]
async fn a_listing_is_cut_to_what_one_answer_holds() {
    let tools = Tools::new();
    tools.text("create_context", json!({ "name": "a" })).await;
    let path = format!("many/{}", "x".repeat(4000));
    let answer = tools.answer("list_files", json!({ "path": path, "context_id": "a" })).await;
    let listed = answer.structured["files"].as_array().unwrap().len();
    let Block::Text(text) = &answer.blocks[0] else { panic!() };
    assert!((500..1000).contains(&listed) && text.len() < 4 << 20, "{listed} in {}", text.len());
    assert_eq!(answer.structured["total"], 123_456);
}

#[tokio::test]
async fn pictures_are_further_blocks() {
    let tools = Tools::new();
    tools.text("create_context", json!({ "name": "a" })).await;
    let answer = tools.answer("run_code", json!({ "code": "picture", "context_id": "a" })).await;
    let [Block::Text(json), Block::Image { data, mime }, Block::Text(forged), Block::Text(huge)] = &answer.blocks[..]
    else {
        panic!("{:?}", answer.blocks.len())
    };
    assert_eq!(serde_json::from_str::<Value>(json).unwrap()["stdout"], "drawn\n   a\n0  1\n");
    assert_eq!((data.as_str(), *mime), (mcp_fake::PNG, "image/png"));
    assert_eq!(forged, "picture 2 is left out: it is not base64");
    assert_eq!(huge, "picture 3 is left out: 6291456 bytes of base64 are over the limit of 5242880 for one answer");
}

#[tokio::test]
async fn every_error_of_the_document() {
    let tools = Tools::new();
    let long = "n".repeat(129);
    let said = calls!(
        tools,
        "run_code" {},
        "run_code" { "code": "1" },
        "run_code" { "context_id": "ctx-1" },
        "run_code" { "code": null, "context_id": "ctx-1" },
        "run_code" { "code": "", "context_id": "ctx-1" },
        "run_code" { "code": 5, "context_id": "ctx-1" },
        "run_code" { "code": "1", "context_id": ["ctx-1"] },
        "run_code" { "code": "1", "context_id": "ctx-abc123" },
        "run_code" { "code": "1", "context_id": (long) },
        "create_context" {},
        "create_context" { "name": null },
        "create_context" { "name": "" },
        "create_context" { "name": "a b" },
        "create_context" { "name": "a/b" },
        "create_context" { "name": (long) },
        "create_context" { "name": "a", "language": "ruby" },
        "create_context" { "name": "a", "language": "Python" },
        "create_context" { "name": "a", "language": "" },
        "create_context" { "name": "a", "language": null },
        "create_context" { "name": "a", "language": 5 },
        "create_context" { "name": "a", "description": 5 },
        "create_context" { "name": "one-too-many" },
        "create_context" { "name": "broken" },
        "stop_context" {},
        "stop_context" { "context_id": "" },
        "stop_context" { "context_id": true },
        "stop_context" { "context_id": "ctx-unstoppable" },
        "create_context" { "name": "twin" },
        "create_context" { "name": "twin" },
        "run_code" { "code": "1", "context_id": "twin" },
    );
    insta::assert_snapshot!(said);
}

/// A04: every wrong value for every field of every tool is refused in the dialect's form, with the field's name.
#[test]
fn wrong_values_are_refused_with_the_field_s_name() {
    let wrong = [
        json!(null),
        json!(0),
        json!(-1),
        json!(9_007_199_254_740_993_u64),
        json!(1.5),
        json!(true),
        json!([]),
        json!({}),
        json!(["a"]),
    ];
    for row in agentrun::DIALECT.tools {
        for field in row.fields {
            for value in &wrong {
                let mut args: Map<String, Value> =
                    row.fields.iter().filter(|f| f.required).map(|f| (f.name.into(), json!("a"))).collect();
                args.insert(field.name.into(), value.clone());
                let refused = (row.lower)(&args, &Options::default()).expect_err(field.name);
                let code = if field.name == "language" { "INVALID_LANGUAGE" } else { "INVALID_PARAMS" };
                assert_eq!(refused.code, code, "{}.{} = {value}", row.name, field.name);
                assert!(refused.message.contains(field.name), "{}", refused.message);
            }
        }
    }
}

/// A07: whatever a path is, lowering it keeps it a relative path without a step upwards, or refuses it.
#[test]
fn paths_stay_below_the_workspace() {
    let parts = ["..", ".", "", "a", "%2e%2e", "%252e", "..\\", "a.", "a ", "\"", "/", "//", "workspace", "é"];
    let row = row(&agentrun::DIALECT, "download_file");
    for a in parts {
        for b in parts {
            for path in [format!("{a}/{b}"), format!("/{a}/{b}"), format!("/workspace/{a}/{b}"), format!("{a}{b}")] {
                let args = json!({ "context_id": "a", "path": path });
                match (row.lower)(args.as_object().unwrap(), &Options::default()) {
                    Ok(Op::ReadFile { path, .. }) => {
                        assert!(!path.starts_with('/') && path.split('/').all(|part| part != ".."), "{path}");
                    }
                    Ok(other) => panic!("{other:?}"),
                    Err(refused) => assert_eq!(refused.code, "INVALID_PATH"),
                }
            }
        }
    }
}
