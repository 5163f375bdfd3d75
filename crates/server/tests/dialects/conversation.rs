//! The `conversation` dialect against its document.

use dialects::{Block, Lang, Options, conversation};
use serde_json::{Value, json};

use crate::mcp_fake;
use crate::tools::Tools;

const DOCUMENT: &str = include_str!("../fixtures/conversation/tools_list.json");

#[test]
fn names_texts_and_schemas_equal_the_document_s() {
    let document: Value = serde_json::from_str(DOCUMENT).unwrap();
    let printed = document["result"]["tools"].as_array().unwrap();
    let dialect = &conversation::DIALECT;
    for (printed, row) in printed.iter().zip(dialect.tools) {
        assert_eq!(printed["name"], row.name);
        assert_eq!(printed["inputSchema"], dialect.input_schema(row, Lang::En, &Options::default()));
        let description = dialect.description(row, Lang::En);
        assert_eq!(description.lines().next(), printed["description"].as_str());
    }
    let ours: Vec<&str> = dialect.tools[printed.len()..].iter().map(|row| row.name).collect();
    assert_eq!(ours, ["sandbox.upload_file"]);
}

#[test]
fn dots_are_advertised_and_underscores_accepted_or_the_other_way_round() {
    let dotted: Vec<&str> = conversation::DIALECT.tools.iter().map(|row| row.name).collect();
    let plain: Vec<&str> = conversation::WITH_UNDERSCORES.tools.iter().map(|row| row.name).collect();
    assert_eq!(dotted, ["sandbox.run_code", "sandbox.list_runners", "sandbox.upload_file"]);
    assert_eq!(plain, ["sandbox_run_code", "sandbox_list_runners", "sandbox_upload_file"]);
    for (dotted, plain) in dotted.into_iter().zip(plain) {
        assert_eq!(conversation::DIALECT.find(plain).unwrap().name, dotted);
        assert_eq!(conversation::WITH_UNDERSCORES.find(dotted).unwrap().name, plain);
    }
    assert!(conversation::DIALECT.find("run_code").is_none());
}

fn run(code: &str) -> Value {
    json!({ "conversationId": "user-123", "language": "python", "code": code })
}

#[tokio::test]
async fn a_conversation_as_the_document_tells_it() {
    let tools = Tools::with_links(&conversation::DIALECT);
    let said = tools
        .transcript(&[
            ("sandbox.list_runners", json!({})),
            ("sandbox.run_code", json!({ "conversationId": "user-123", "language": "python", "code": "print(x)" })),
            (
                "sandbox.upload_file",
                json!({ "conversationId": "user-123", "filename": "in/täglich 1.csv", "content": "YSxiCjEsMgo=" }),
            ),
            ("sandbox_upload_file", json!({ "conversationId": "user-123", "filename": "/data/empty", "content": "" })),
            (
                "sandbox.run_code",
                json!({
                    "conversationId": "user-123", "language": "typescript", "code": "warned",
                    "network": false, "environment": { "API_KEY": "secret-value" }
                }),
            ),
            (
                "sandbox_run_code",
                json!({ "conversationId": "other", "language": "javascript", "code": "print('a', end=''); 7" }),
            ),
            ("sandbox.run_code", json!({ "conversationId": "other", "language": "python", "code": "1 / 0" })),
            ("sandbox.run_code", json!({ "conversationId": "other", "language": "python", "code": "spilled" })),
        ])
        .await;
    insta::assert_snapshot!(said);
}

#[tokio::test]
async fn every_refusal() {
    let tools = Tools::with_links(&conversation::DIALECT);
    let long = "c".repeat(257);
    let said = tools
        .transcript(&[
            ("sandbox.run_code", json!({})),
            ("sandbox.run_code", json!({ "conversationId": "" })),
            ("sandbox.run_code", json!({ "conversationId": 7, "language": "python", "code": "1" })),
            ("sandbox.run_code", json!({ "conversationId": (long), "language": "python", "code": "1" })),
            ("sandbox.run_code", json!({ "conversationId": "a\nb", "language": "python", "code": "1" })),
            ("sandbox.run_code", json!({ "conversationId": "a" })),
            ("sandbox.run_code", json!({ "conversationId": "a", "language": "ruby", "code": "1" })),
            ("sandbox.run_code", json!({ "conversationId": "a", "language": "python" })),
            ("sandbox.run_code", json!({ "conversationId": "a", "language": "python", "code": "1", "network": "yes" })),
            (
                "sandbox.run_code",
                json!({ "conversationId": "a", "language": "python", "code": "1", "environment": { "A": 1 } }),
            ),
            ("sandbox.run_code", json!({ "conversationId": "a", "language": "python", "code": "1", "network": true })),
            ("sandbox.upload_file", json!({ "conversationId": "a", "filename": "x" })),
            ("sandbox.upload_file", json!({ "conversationId": "a", "filename": "x", "content": "no base64!" })),
            ("sandbox.upload_file", json!({ "conversationId": "a", "filename": "../x", "content": "" })),
            ("sandbox.upload_file", json!({ "conversationId": "a", "filename": "/etc/passwd", "content": "" })),
            ("sandbox.upload_file", json!({ "conversationId": "a", "filename": "/data", "content": "" })),
        ])
        .await;
    insta::assert_snapshot!(said);
}

#[tokio::test]
async fn every_end_of_a_program_says_what_happened() {
    let tools = Tools::with_links(&conversation::DIALECT);
    let mut said = String::new();
    for code in [
        "exit",
        "timeout kept",
        "timeout lost",
        "interrupted",
        "memory",
        "exited",
        "crashed",
        "lost",
        "notice",
        "markup",
        "denied",
        "busy",
        "queue full",
        "not ready",
        "back end",
    ] {
        said += &tools.transcript(&[("sandbox.run_code", run(code))]).await;
    }
    insta::assert_snapshot!(said);
}

#[tokio::test]
async fn pictures_and_then_links_follow_the_json() {
    let tools = Tools::with_links(&conversation::DIALECT);
    tools
        .answer(
            "sandbox.upload_file",
            json!({ "conversationId": "user-123", "filename": "a.png", "content": mcp_fake::PNG }),
        )
        .await;
    let answer = tools.answer("sandbox.run_code", run("picture")).await;
    let kinds: Vec<&str> = answer.blocks.iter().map(kind).collect();
    assert_eq!(kinds, ["text", "image", "text", "text", "link"]);
    let Block::Text(json) = &answer.blocks[0] else { panic!() };
    assert_eq!(serde_json::from_str::<Value>(json).unwrap(), answer.structured);
    assert_eq!(answer.structured["files"][0]["name"], "a.png");
}

fn kind(block: &Block) -> &'static str {
    match block {
        Block::Text(_) => "text",
        Block::Image { .. } => "image",
        Block::Link { .. } => "link",
    }
}

/// Over stdio without a listener there may be no address to give.
#[tokio::test]
async fn without_links_files_are_still_named() {
    let tools = Tools::new(&conversation::DIALECT);
    tools.answer("sandbox.upload_file", json!({ "conversationId": "user-123", "filename": "a", "content": "" })).await;
    let answer = tools.answer("sandbox.run_code", run("pass")).await;
    assert_eq!(answer.structured, json!({ "success": true, "output": "", "files": [{ "name": "a" }] }));
    assert_eq!(answer.blocks.len(), 1);
}

#[tokio::test]
async fn of_many_files_the_newest_hundred_are_named_and_the_rest_counted() {
    let tools = Tools::with_links(&conversation::DIALECT);
    for n in 0..103 {
        let file = json!({ "conversationId": "user-123", "filename": format!("{n:03}"), "content": "" });
        tools.answer("sandbox.upload_file", file).await;
    }
    let answer = tools.answer("sandbox.run_code", run("pass")).await;
    assert_eq!(answer.structured["files"].as_array().unwrap().len(), 100);
    assert_eq!(answer.structured["moreFiles"], 3);
    let links = answer.blocks.iter().filter(|block| kind(block) == "link").count();
    assert_eq!(links, 100);
    assert!(answer.blocks.contains(&Block::Text("3 more files in /data are not listed.".into())));
}

/// Names as long as a file system has them stay within an answer, by their number.
#[tokio::test]
async fn long_names_do_not_make_an_answer_too_long() {
    let tools = Tools::with_links(&conversation::DIALECT);
    for n in 0..100 {
        let filename = format!("{}{n:03}", "ü/".repeat(1300));
        let file = json!({ "conversationId": "user-123", "filename": filename, "content": "" });
        tools.answer("sandbox.upload_file", file).await;
    }
    let answer = tools.answer("sandbox.run_code", run("pass")).await;
    let named = answer.structured["files"].as_array().unwrap().len();
    assert_eq!(answer.structured["moreFiles"], 100 - named);
    assert!((5..50).contains(&named), "{named}");
}
