//! What the documents print, said to the built server byte for byte: the steps for n8n, and the requests and answers of the
//! microsandbox server.

use std::sync::Arc;

use serde_json::{Value, json};
use testkit::host::StateDir;
use testkit::http::Account;

use crate::mask::Mask;
use crate::serve::{Serve, TOKEN};
use crate::variables::volume;

const JSON: (&str, &str) = ("content-type", "application/json");

const INITIALIZE: &str = r#"{
  "jsonrpc": "2.0",
  "id": 1,
  "method": "initialize",
  "params": {
    "protocolVersion": "2024-11-05"
  }
}"#;

const LIST: &str = r#"{
  "jsonrpc": "2.0",
  "id": 2,
  "method": "tools/list"
}"#;

/// n8n puts in what stands in double braces.
const CALL: &str = r#"{
  "jsonrpc": "2.0",
  "id": 3,
  "method": "tools/call",
  "params": {
    "name": "sandbox.run_code",
    "arguments": {
      "conversationId": "{{$json.sessionId}}",
      "language": "python",
      "code": "{{$json.code}}"
    }
  }
}"#;

/// The example of the tool's own section.
const PLOT: &str = r#"{
  "jsonrpc": "2.0",
  "id": 3,
  "method": "tools/call",
  "params": {
    "name": "sandbox.run_code",
    "arguments": {
      "conversationId": "user-123-session-456",
      "language": "python",
      "code": "import matplotlib.pyplot as plt\nimport numpy as np\n\nx = np.linspace(0, 10, 100)\ny = np.sin(x)\n\nplt.plot(x, y)\nplt.savefig('/data/plot.png')\nprint('Plot saved!')",
      "network": false,
      "environment": {
        "API_KEY": "secret-value"
      }
    }
  }
}"#;

const RUNNERS: &str = r#"{
  "jsonrpc": "2.0",
  "id": 4,
  "method": "tools/call",
  "params": {
    "name": "sandbox.list_runners",
    "arguments": {}
  }
}"#;

/// A plain POST, as `curl` and the HTTP node send it: no session, no revision. Every answer to what parses has status 200.
fn post(account: &Account, body: &str) -> Value {
    let answer = account.ask("POST", "/mcp", &[JSON, ("accept", "*/*")], body.as_bytes()).unwrap();
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert!(answer.header("content-type").is_some_and(|kind| kind.starts_with("application/json")), "{answer:?}");
    answer.json()
}

fn members(value: &Value) -> Vec<&str> {
    value.as_object().unwrap_or_else(|| panic!("no object: {value}")).keys().map(String::as_str).collect()
}

#[test]
fn the_steps_for_n8n() {
    let server = Serve::start("n8n", &[("SANDPOOL_API_TOKEN", TOKEN), ("SANDPOOL_DIALECT", "conversation")]);
    let n8n = server.account();
    let nobody = Account { token: None, ..server.account() };
    assert_eq!(nobody.ask("POST", "/mcp", &[JSON], INITIALIZE.as_bytes()).unwrap().status, 401);

    let hello = post(&n8n, INITIALIZE);
    assert_eq!((&hello["jsonrpc"], &hello["id"]), (&json!("2.0"), &json!(1)));
    assert_eq!(hello["result"]["protocolVersion"], "2024-11-05");
    assert_eq!(hello["result"]["serverInfo"]["name"], "mcp-code-sandbox");
    assert!(hello["result"]["capabilities"]["tools"].is_object(), "{hello}");

    let tools = post(&n8n, LIST);
    let names: Vec<_> = tools["result"]["tools"].as_array().unwrap().iter().map(|tool| &tool["name"]).collect();
    assert_eq!(names, ["sandbox.run_code", "sandbox.list_runners", "sandbox.upload_file"]);

    let filled = CALL.replace("{{$json.sessionId}}", "n8n-1").replace("{{$json.code}}", "print(6 * 7)");
    let ran = post(&n8n, &filled);
    assert_eq!(ran["id"], 3);
    let data = json!({ "success": true, "output": "42\n", "files": [] });
    assert_eq!(ran["result"]["structuredContent"], data);
    let block = &ran["result"]["content"][0];
    assert_eq!(serde_json::from_str::<Value>(block["text"].as_str().unwrap()).unwrap(), data);
    // Not filled in, it is still a call, with a name that does not exist in Python.
    assert_eq!(post(&n8n, CALL)["result"]["structuredContent"]["success"], false);

    let plot = post(&n8n, PLOT)["result"]["structuredContent"].clone();
    assert_eq!((&plot["success"], &plot["output"]), (&json!(true), &json!("Plot saved!\n")), "{plot}");
    assert_eq!(plot["files"][0]["name"], "plot.png");
    let url = plot["files"][0]["url"].as_str().unwrap();
    let path = url.strip_prefix(&format!("http://{}", server.address)).unwrap_or_else(|| panic!("{url}"));
    assert_eq!(path.split('/').nth(2).map(str::len), Some(64), "{path}");
    // The link is itself the permission.
    let picture = nobody.ask("GET", path, &[], b"").unwrap();
    assert_eq!((picture.status, picture.header("content-type")), (200, Some("image/png")));
    assert!(picture.body.starts_with(b"\x89PNG"));

    let runners = post(&n8n, RUNNERS)["result"]["structuredContent"].clone();
    let languages: Vec<_> = runners["languages"].as_array().unwrap().iter().map(|runner| &runner["language"]).collect();
    assert_eq!(languages, ["python", "typescript"]);

    let missing = r#"{"jsonrpc": "2.0", "id": 5, "method": "tools/call", "params": {"name": "sandbox.run_code", "arguments": {"language": "python", "code": "1"}}}"#;
    let error = post(&n8n, missing);
    assert_eq!((&error["id"], &error["error"]["code"]), (&json!(5), &json!(-32602)));
    assert_eq!(error["error"], json!({ "code": -32602, "message": "conversationId is required", "data": null }));
    assert!(!server.log().contains("THERE IS NO TOKEN"), "{}", server.log());
    assert!(server.finish().success());
}

#[test]
fn old_variables_and_a_missing_token_are_named_at_the_start() {
    let old = [("FILE_SECRET", "x"), ("MCP_HTTP_ADDR", ":8080"), ("MSB_SERVER_URL", "http://x")];
    let variables = [&[("SANDPOOL_DIALECT", "conversation")], &old[..]].concat();
    let server = Serve::start("old-variables", &variables);
    let log = server.log();
    for line in [
        "`FILE_SECRET` is set, and has no effect here: set `SANDPOOL_FILE_SECRET`",
        "`MCP_HTTP_ADDR` is set, and has no effect here: set `SANDPOOL_LISTEN`",
        "`MSB_SERVER_URL` is set, and has no effect here: unset it: this program makes the sandboxes itself",
    ] {
        assert!(log.lines().any(|logged| logged.contains(" WARN ") && logged.ends_with(line)), "{line}\n{log}");
    }
    let warning = log.lines().find(|line| line.contains("THERE IS NO TOKEN")).unwrap_or_else(|| panic!("{log}"));
    assert!(warning.contains(" WARN ") && warning.contains("`SANDPOOL_API_TOKEN`"), "{warning}");
    assert!(server.finish().success());
}

#[test]
fn the_requests_and_answers_of_the_microsandbox_server() {
    let variables =
        [("SANDPOOL_DIALECT", "microsandbox"), ("MSB_MAX_SESSIONS", "1"), ("MSB_ENABLE_LRU_EVICTION", "false")];
    let server = Serve::start("microsandbox-walk", &variables);
    let account = server.account();
    let call = |tool: &str, arguments: Value| {
        let params = json!({ "name": tool, "arguments": arguments });
        post(&account, &json!({ "jsonrpc": "2.0", "id": "a", "method": "tools/call", "params": params }).to_string())
    };

    // The status of the server.
    let status = account.ask("GET", "/mcp", &[("accept", "application/json")], b"").unwrap();
    assert_eq!((status.status, &status.json()["name"]), (200, &json!("microsandbox-mcp-server")));
    let text = String::from_utf8_lossy(&status.body).into_owned();
    assert!(text.contains(r#","status":"healthy","tools_count":5,"#), "{text}");
    assert_eq!(account.ask("PUT", "/mcp", &[], b"").unwrap().status, 405);

    let tools = post(&account, r#"{"jsonrpc": "2.0", "id": 1, "method": "tools/list"}"#);
    let names: Vec<_> = tools["result"]["tools"].as_array().unwrap().iter().map(|tool| &tool["name"]).collect();
    assert_eq!(names, ["execute_code", "execute_command", "get_sessions", "stop_session", "get_volume_path"]);

    // What the document's tool returns, where it returns it.
    let ran = call("execute_code", json!({ "code": "print('hi')", "template": "python", "flavor": "small" }));
    assert_eq!(members(&ran), ["id", "jsonrpc", "result"]);
    let result = &ran["result"];
    assert_eq!(
        members(result),
        ["content", "execution_time_ms", "isError", "session_created", "session_id", "structuredContent"]
    );
    assert_eq!(result["content"][0], json!({ "type": "text", "text": "hi\n" }));
    assert_eq!((&result["isError"], &result["session_created"]), (&json!(false), &json!(true)));
    assert!(result["execution_time_ms"].is_u64() && result["session_id"].is_string(), "{result}");
    let session = result["session_id"].clone();
    let again = call("execute_code", json!({ "code": "1 / 0", "session_id": session }));
    assert_eq!((&again["result"]["isError"], &again["result"]["session_created"]), (&json!(true), &json!(false)));

    // Its errors, with status 200 where a message was understood.
    let code = |answer: Value| {
        assert_eq!(members(&answer), ["error", "id", "jsonrpc"]);
        answer["error"]["code"].as_i64().unwrap()
    };
    let no_message = account.ask("POST", "/mcp", &[JSON], br#"{"id": 1, "method": "tools/list"}"#).unwrap();
    assert_eq!((no_message.status, code(no_message.json())), (200, -32600), "what is no message of the protocol");
    assert_eq!(code(call("execute_code", json!({ "code": "1" }))), -32600, "a limit");
    assert_eq!(code(post(&account, r#"{"jsonrpc": "2.0", "id": 1, "method": "tools/walk"}"#)), -32601);
    assert_eq!(code(call("execute_nothing", json!({}))), -32601);
    assert_eq!(code(call("execute_code", json!({ "code": 5 }))), -32602);
    assert!(server.finish().success());
}

/// What the code of the document is asked and answers, as bytes: sessions and volumes as lists in the text, and its errors. The
/// volumes are those of the original's own example.
#[test]
fn the_microsandbox_document_byte_for_byte() {
    let state = Arc::new(StateDir::new("microsandbox-document"));
    let (data, shared) = (volume(&state, "data"), volume(&state, "shared"));
    let variables = [
        ("SANDPOOL_DIALECT", "microsandbox"),
        ("MSB_SHARED_VOLUME_PATH", r#"["./data:/workspace", "./shared:/sandbox/shared"]"#),
    ];
    let server = Serve::in_state(state, &variables);
    let account = server.account();
    let call = |tool: &str, arguments: &str| {
        format!(
            r#"{{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {{"name": "{tool}", "arguments": {arguments}}}}}"#
        )
    };
    let write = r#"{"code": "open('a.txt', 'w').write('kept')\nopen('/sandbox/shared/b.txt', 'w').write('shared')\nprint(6 * 7)", "template": "python", "session_id": "mine", "flavor": "small"}"#;
    let requests = [
        call("get_sessions", "{}"),
        call("execute_code", write),
        call("get_sessions", "{}"),
        call("get_sessions", r#"{"session_id": "other"}"#),
        call("get_volume_path", "{}"),
        call("stop_session", r#"{"session_id": "mine"}"#),
        r#"{"id": 1, "method": "tools/list"}"#.to_owned(),
        r#"{"jsonrpc": "2.0", "id": 1, "method": "tools/walk"}"#.to_owned(),
        call("execute_nothing", "{}"),
        call("execute_code", "{}"),
    ];
    let (mut mask, mut text) = (Mask::default(), String::new());
    for request in &requests {
        let answer = account.ask("POST", "/mcp", &[JSON], request.as_bytes()).unwrap();
        text += &format!("> {request}\n{} {}\n\n", answer.status, mask.text(&String::from_utf8_lossy(&answer.body)));
    }
    assert_eq!(std::fs::read_to_string(data.join("a.txt")).unwrap(), "kept");
    assert_eq!(std::fs::read_to_string(shared.join("b.txt")).unwrap(), "shared");
    insta::with_settings!({ omit_expression => true, prepend_module_to_snapshot => false, snapshot_path => "../transcripts" }, {
        insta::assert_snapshot!("microsandbox-document", text);
    });
    assert!(server.finish().success());
}
