//! `microsandbox` against its documents: the schema they print, where the facts stand, which error has which code.

use dialects::{Block, Lang, Options, Reply, microsandbox};
use engine::op::{Op, Size};
use serde_json::{Value, json};

use crate::mcp_fake;
use crate::tools::Tools;

const DOCUMENT: &str = include_str!("../fixtures/microsandbox/execute_code.json");

fn tools() -> Tools {
    Tools::new(&microsandbox::DIALECT)
}

/// `timeout` is the one addition.
#[test]
fn the_schema_equals_the_document_s() {
    let printed: Value = serde_json::from_str(DOCUMENT).unwrap();
    let dialect = &microsandbox::DIALECT;
    let row = tools().row("execute_code");
    let mut schema = dialect.input_schema(row, Lang::En, &Options::default());
    let timeout = schema["properties"].as_object_mut().unwrap().remove("timeout").unwrap();
    assert_eq!(timeout["type"], "integer");
    assert_eq!(schema, printed["inputSchema"]);
    assert!(dialect.description(row, Lang::En).starts_with(printed["description"].as_str().unwrap()));
    let names: Vec<&str> = dialect.tools.iter().map(|row| row.name).collect();
    assert_eq!(names, ["execute_code", "execute_command", "get_sessions", "stop_session", "get_volume_path"]);
    assert_eq!(dialect.find("get_volume_mappings").unwrap().name, "get_volume_path");
}

#[test]
fn the_default_flavor_is_the_operator_s() {
    let options = Options { default_size: Size::Large, ..Options::default() };
    let row = tools().row("execute_code");
    let schema = microsandbox::DIALECT.input_schema(row, Lang::En, &options);
    assert_eq!(schema["properties"]["flavor"]["default"], "large");
    let args = json!({ "code": "1" });
    let Ok(Op::RunCode(run)) = (row.lower)(args.as_object().unwrap(), &options).map(|lowered| lowered.op) else {
        panic!()
    };
    assert_eq!(run.target.make.unwrap().size, Some(Size::Large));
}

#[tokio::test]
async fn sessions_are_made_kept_and_told_of() {
    let tools = tools();
    let said = tools
        .transcript(&[
            ("execute_code", json!({ "code": "x = 42" })),
            ("execute_code", json!({ "code": "print(x)", "session_id": "session-1" })),
            ("execute_code", json!({ "code": "x", "session_id": "session-1", "template": "python", "timeout": 300 })),
            ("execute_code", json!({ "code": "x", "session_id": "session-1", "flavor": "large" })),
            ("execute_code", json!({ "code": "x", "session_id": "session-1", "template": "node" })),
            (
                "execute_code",
                json!({ "code": "warned", "session_id": "会话.a-1", "flavor": "medium", "template": "node" }),
            ),
            ("execute_code", json!({ "code": "1 / 0", "session_id": "session-1" })),
            ("execute_code", json!({ "code": "denied", "session_id": "session-1" })),
            ("execute_code", json!({ "code": "timeout lost", "session_id": "session-1" })),
            ("execute_code", json!({ "code": "notice", "session_id": "session-1" })),
            ("execute_code", json!({ "code": "picture", "session_id": "session-1" })),
            ("get_sessions", json!({})),
            ("get_sessions", json!({ "session_id": "session-1" })),
            ("get_sessions", json!({ "session_id": "nobody" })),
            ("stop_session", json!({ "session_id": "session-1" })),
            ("stop_session", json!({ "session_id": "session-1" })),
            ("execute_command", json!({ "command": "ls -l | wc" })),
            ("execute_command", json!({ "command": "ls", "args": [] })),
            ("execute_command", json!({ "command": "ls", "args": ["-l", "a b; id"], "session_id": "会话.a-1" })),
            ("execute_command", json!({ "command": "exit 3", "session_id": "会话.a-1" })),
            ("execute_command", json!({ "command": "timeout lost", "timeout": 1800 })),
            ("execute_command", json!({ "command": "crashed" })),
            ("get_volume_mappings", json!({})),
        ])
        .await;
    insta::assert_snapshot!(said);
    tools.assert_every_tool_succeeded_but(&[]);
}

#[tokio::test]
async fn errors_have_the_documents_codes() {
    let long = "n".repeat(129);
    let said = tools()
        .transcript(&[
            ("execute_code", json!({})),
            ("execute_code", json!({ "code": "" })),
            ("execute_code", json!({ "code": "1", "template": "ruby" })),
            ("execute_code", json!({ "code": "1", "flavor": "Small" })),
            ("execute_code", json!({ "code": "1", "session_id": "a b" })),
            ("execute_code", json!({ "code": "1", "session_id": "" })),
            ("execute_code", json!({ "code": "1", "session_id": "../a" })),
            ("execute_code", json!({ "code": "1", "session_id": long })),
            ("execute_code", json!({ "code": "1", "timeout": 301 })),
            ("execute_code", json!({ "code": "1", "timeout": 0 })),
            ("execute_command", json!({ "command": "ls", "timeout": 1801 })),
            ("execute_command", json!({ "command": "ls", "args": ["-l", 1] })),
            ("execute_command", json!({ "command": "ls", "args": "-l" })),
            ("execute_command", json!({ "command": "l\u{0}s" })),
            ("execute_command", json!({ "command": "ls", "args": ["a", "\u{0}"] })),
            ("execute_code", json!({ "code": "1", "session_id": "one-too-many" })),
            ("execute_code", json!({ "code": "1", "session_id": "broken" })),
            ("execute_code", json!({ "code": "busy" })),
            ("execute_code", json!({ "code": "queue full" })),
            ("execute_code", json!({ "code": "not ready" })),
            ("execute_code", json!({ "code": "back end" })),
            ("stop_session", json!({})),
            ("stop_session", json!({ "session_id": "ctx-unstoppable" })),
        ])
        .await;
    insta::assert_snapshot!(said);
}

/// The one place where a path of the host may stand, and only if the operator wants it.
#[tokio::test]
async fn host_paths_can_be_withheld() {
    let mut tools = tools();
    tools.options.show_host_paths = false;
    let answer = tools.answer("get_volume_path", json!({})).await;
    let expected =
        json!({ "volume_mappings": [{ "container_path": "/shared/data" }, { "container_path": "/shared/out" }] });
    assert_eq!(answer.structured, expected);
    assert!(!format!("{answer:?}").contains("/srv"));
}

#[tokio::test]
async fn long_output_is_given_by_link() {
    let tools = Tools::with_links(&microsandbox::DIALECT);
    insta::assert_snapshot!(tools.transcript(&[("execute_code", json!({ "code": "spilled" }))]).await);
}

/// A44: output that looks like the server's lines stays in its own block, and the facts are the engine's.
#[tokio::test]
async fn output_cannot_pass_for_the_server() {
    let tools = tools();
    for (tool, field) in [("execute_code", "code"), ("execute_command", "command")] {
        let Reply::Answer(answer) = tools.reply(tool, json!({ field: "forge", "session_id": "mine" })).await else {
            panic!()
        };
        let [Block::Text(stdout), Block::Text(session)] = &answer.blocks[..] else { panic!("{:?}", answer.blocks) };
        assert_eq!(stdout, mcp_fake::FORGED);
        assert!(session.contains("[session mine: ") && !session.contains("evil"));
        assert_eq!((&answer.extra["session_id"], &answer.structured["session_id"]), (&json!("mine"), &json!("mine")));
        assert!(!answer.is_error && answer.structured["success"] == true);
    }
}
