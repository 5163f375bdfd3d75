//! `agentrun` against its document: schemas member for member, results and errors as printed.

use dialects::{Args, Block, Dialect, Lang, Links, Options, RenderInput, Reply, ToolRow, agentrun};
use engine::EngineError;
use engine::op::LimitKind;
use serde_json::{Value, json};

use crate::mcp_fake;
use crate::tools::Tools;

const DOCUMENT: [(&str, &str); 4] = [
    ("run_code", include_str!("../fixtures/agentrun/run_code.json")),
    ("create_context", include_str!("../fixtures/agentrun/create_context.json")),
    ("stop_context", include_str!("../fixtures/agentrun/stop_context.json")),
    ("list_contexts", include_str!("../fixtures/agentrun/list_contexts.json")),
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
fn a_limit_of_uploads_is_not_told_as_one_of_contexts() {
    let code = |tool: &str, what| {
        let row = row(&agentrun::DIALECT, tool);
        let (options, links, fence) = (Options::default(), Links::default(), crate::tools::fence());
        let scene = RenderInput { tool: row.name, args: &Args::new(), options: &options, links: &links, fence: &fence };
        let Reply::Answer(answer) = (row.render_error)(&scene, &EngineError::OverLimit { what, limit: "9".into() })
        else {
            panic!("an error of JSON-RPC")
        };
        answer.structured["code"].clone()
    };
    assert_eq!(code("create_context", LimitKind::Contexts), "CONTEXT_CREATION_FAILED");
    assert_eq!(code("upload_file", LimitKind::UploadBytes), "BUSY");
}

#[test]
fn the_default_context_prints_the_appendix_s_run_code() {
    let appendix: Value = serde_json::from_str(include_str!("../fixtures/agentrun/tools_list_appendix.json")).unwrap();
    let printed = &appendix["result"]["tools"][0];
    let dialect = &agentrun::WITH_DEFAULT_CONTEXT;
    let row = row(dialect, "run_code");
    assert_eq!(printed["inputSchema"], dialect.input_schema(row, Lang::Zh, &Options::default()));
    assert!(dialect.description(row, Lang::Zh).starts_with(printed["description"].as_str().unwrap()));
}

/// The first block, which must be the structured content as indented JSON.
async fn text(tools: &Tools, tool: &str, arguments: Value) -> String {
    let answer = tools.answer(tool, arguments).await;
    let Block::Text(text) = &answer.blocks[0] else { panic!("the first block is text") };
    assert_eq!(serde_json::from_str::<Value>(text).unwrap(), answer.structured);
    text.clone()
}

macro_rules! calls {
    ($tools:expr, $($tool:literal $arguments:tt),+ $(,)?) => {{
        let mut transcript = String::new();
        $(
            let arguments = json!($arguments);
            transcript += &format!("> {} {arguments}\n{}\n", $tool, text(&$tools, $tool, arguments.clone()).await);
        )+
        transcript
    }};
}

#[tokio::test]
async fn a_session_as_the_document_tells_it() {
    let tools = Tools::new(&agentrun::DIALECT);
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
    let tools = Tools::new(&agentrun::DIALECT);
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
    let tools = Tools::new(&agentrun::DIALECT);
    text(&tools, "create_context", json!({ "name": "a" })).await;
    for unit in ["x", "\"", "\n", "\u{1}", "\u{7f}", "é"] {
        let mut size = 3 << 20;
        loop {
            let content = unit.repeat(size / unit.len());
            text(&tools, "upload_file", json!({ "context_id": "a", "path": "f", "content": content })).await;
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
    let tools = Tools::new(&agentrun::DIALECT);
    text(&tools, "create_context", json!({ "name": "a" })).await;
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
        "denied",
        "busy",
        "queue full",
        "not ready",
        "back end",
    ] {
        transcript +=
            &format!("{code}\n{}\n", text(&tools, "run_code", json!({ "code": code, "context_id": "a" })).await);
    }
    insta::assert_snapshot!(transcript);
}

/// W26: the document has no place for it.
#[tokio::test]
async fn what_earlier_calls_left_running_prints_into_no_answer() {
    let tools = Tools::new(&agentrun::DIALECT);
    text(&tools, "create_context", json!({ "name": "a" })).await;
    let answer = tools.answer("run_code", json!({ "code": "strays", "context_id": "a" })).await;
    assert!(!answer.structured.to_string().contains("stray"), "{}", answer.structured);
}

/// However much is displayed, the answer stays far below what clients read.
#[tokio::test]
async fn texts_that_are_displayed_have_one_budget_together() {
    let tools = Tools::new(&agentrun::DIALECT);
    text(&tools, "create_context", json!({ "name": "a" })).await;
    let answer = tools.answer("run_code", json!({ "code": "displays", "context_id": "a" })).await;
    let stdout = answer.structured["stdout"].as_str().unwrap();
    assert!(stdout.chars().count() < 20_100 && stdout.ends_with("the end\n"), "{}", stdout.chars().count());
}

#[tokio::test]
async fn a_listing_is_cut_to_what_one_answer_holds() {
    let tools = Tools::new(&agentrun::DIALECT);
    text(&tools, "create_context", json!({ "name": "a" })).await;
    let path = format!("many/{}", "x".repeat(4000));
    let answer = tools.answer("list_files", json!({ "path": path, "context_id": "a" })).await;
    let listed = answer.structured["files"].as_array().unwrap().len();
    let Block::Text(text) = &answer.blocks[0] else { panic!() };
    assert!((500..1000).contains(&listed) && text.len() < 4 << 20, "{listed} in {}", text.len());
    assert_eq!(answer.structured["total"], 123_456);
}

#[tokio::test]
async fn pictures_are_further_blocks() {
    let tools = Tools::new(&agentrun::DIALECT);
    text(&tools, "create_context", json!({ "name": "a" })).await;
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
    let tools = Tools::new(&agentrun::DIALECT);
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

/// What does not fit into an answer is still to be had, where links can be made.
#[tokio::test]
async fn large_files_and_long_output_are_given_by_link() {
    let tools = Tools::with_links(&agentrun::DIALECT);
    text(&tools, "create_context", json!({ "name": "a" })).await;
    let large = "x".repeat(4 << 20);
    text(&tools, "upload_file", json!({ "context_id": "a", "path": "größe 1.txt", "content": large })).await;
    text(&tools, "upload_file", json!({ "context_id": "a", "path": "small.csv", "content": "a,b" })).await;
    let said = tools
        .transcript(&[
            ("download_file", json!({ "context_id": "a", "path": "größe 1.txt" })),
            ("download_file", json!({ "context_id": "a", "path": "small.csv" })),
            ("run_code", json!({ "context_id": "a", "code": "spilled" })),
        ])
        .await;
    insta::assert_snapshot!(said);
}

#[tokio::test]
async fn every_tool_has_a_success_that_fits_its_schema() {
    let tools = Tools::new(&agentrun::DIALECT);
    for (tool, arguments) in [
        ("create_context", json!({ "name": "a" })),
        ("run_code", json!({ "context_id": "a", "code": "x = 1" })),
        ("list_contexts", json!({})),
        ("upload_file", json!({ "context_id": "a", "path": "f", "content": "" })),
        ("download_file", json!({ "context_id": "a", "path": "f" })),
        ("list_files", json!({ "context_id": "a" })),
        ("stop_context", json!({ "context_id": "a" })),
    ] {
        text(&tools, tool, arguments).await;
    }
    tools.assert_every_tool_succeeded_but(&[]);
}
