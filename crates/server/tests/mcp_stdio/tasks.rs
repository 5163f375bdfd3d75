//! Runs that become tasks of clients that know them.

use std::time::Duration;

use dialects::sandpool;
use mcp::stdio::StdioOptions;
use serde_json::{Value, json};

use crate::{Client, MODERN};

const TASKS: &str = "io.modelcontextprotocol/tasks";

/// A request of a modern client, which declares what it can do with every one.
async fn modern(client: &mut Client, tasks: bool, method: &str, mut params: Value) -> Value {
    let extensions = if tasks { json!({ TASKS: {} }) } else { json!({}) };
    params["_meta"] = json!({
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": { "extensions": extensions },
        "io.modelcontextprotocol/clientInfo": { "name": "t", "version": "1" },
    });
    client.request(1, method, params).await
}

fn code_to_run(code: &str) -> Value {
    json!({ "name": "run_code", "arguments": { "code": code } })
}

/// Of the moments only the form is known.
fn without_moments(mut answer: Value) -> Value {
    for name in ["createdAt", "lastUpdatedAt"] {
        let moment = answer["result"][name].take();
        assert!(moment.as_str().is_some_and(|text| text.len() == 20 && text.ends_with('Z')), "{moment}");
    }
    answer
}

/// The object of a run in `sandpool`, which is in the first block alone.
fn run_of(answer: &Value) -> Value {
    assert_eq!(answer["result"].get("structuredContent"), None, "{answer}");
    serde_json::from_str(answer["result"]["content"][0]["text"].as_str().unwrap()).unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_run_that_lasts_becomes_a_task_of_a_client_that_knows_them() {
    let mut client = Client::with(&sandpool::DIALECT, StdioOptions::default());
    let task = modern(&mut client, true, "tools/call", code_to_run("lasting")).await;
    let mut shown = without_moments(task.clone());
    // It covers the longest background run and an hour after it, from the start of the run.
    let ttl = shown["result"]["ttlMs"].take();
    assert!(ttl.as_u64().is_some_and(|ttl| ttl >= 5 * 3_600_000), "{ttl}");
    insta::assert_snapshot!("task_begun", format!("{shown:#}"));
    let id = &task["result"]["taskId"];
    let working = modern(&mut client, true, "tasks/get", json!({ "taskId": id })).await;
    assert_eq!(working["result"]["status"], "working", "{working}");
    let updated = modern(&mut client, true, "tasks/update", json!({ "taskId": id, "inputResponses": {} })).await;
    assert_eq!(updated["result"]["resultType"], "complete", "{updated}");
    tokio::time::sleep(Duration::from_secs(5)).await;
    let completed = modern(&mut client, true, "tasks/get", json!({ "taskId": id })).await;
    insta::assert_snapshot!("task_completed", format!("{:#}", without_moments(completed)));
    client.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_task_can_be_cancelled() {
    let mut client = Client::with(&sandpool::DIALECT, StdioOptions::default());
    let task = modern(&mut client, true, "tools/call", code_to_run("forever")).await;
    let id = &task["result"]["taskId"];
    let acknowledged = modern(&mut client, true, "tasks/cancel", json!({ "taskId": id })).await;
    assert_eq!(acknowledged["result"]["resultType"], "complete", "{acknowledged}");
    let cancelled = modern(&mut client, true, "tasks/get", json!({ "taskId": id })).await;
    assert_eq!(cancelled["result"]["status"], "cancelled", "{cancelled}");
    for method in ["tasks/get", "tasks/cancel", "tasks/update"] {
        let unknown = modern(&mut client, true, method, json!({ "taskId": "run-9", "inputResponses": {} })).await;
        assert_eq!(unknown["error"], json!({ "code": -32602, "message": "task not found: run-9" }));
        let without = modern(&mut client, true, method, json!({})).await;
        assert_eq!(without["error"]["code"], -32602, "{without}");
    }
    client.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_run_that_ends_soon_is_answered_as_ever() {
    let mut client = Client::with(&sandpool::DIALECT, StdioOptions::default());
    for tasks in [true, false] {
        let answer = modern(&mut client, tasks, "tools/call", code_to_run("1 / 0")).await;
        let result = &answer["result"];
        assert_eq!((&result["resultType"], &result["isError"]), (&json!("complete"), &json!(true)), "{answer}");
        assert_eq!(run_of(&answer)["error"]["name"], "ZeroDivisionError");
        assert_eq!(run_of(&answer).get("run"), None);
    }
    // The client's own background run is its own business.
    let call = json!({ "name": "run_code", "arguments": { "code": "forever", "background": true } });
    let answer = modern(&mut client, true, "tools/call", call).await;
    assert_eq!(run_of(&answer)["status"], "running", "{answer}");
    client.end().await;
}

/// A wrong argument is a mistake of the model, which reads results and not the errors of the protocol.
#[tokio::test(start_paused = true)]
async fn refused_arguments_are_results_and_never_tasks() {
    let mut client = Client::with(&sandpool::DIALECT, StdioOptions::default());
    for tasks in [true, false] {
        for (arguments, said) in [
            (json!({ "code": "lasting", "timeout": "soon" }), "timeout must be a whole number ["),
            (
                json!({ "code": "lasting", "lnguage": "js" }),
                "lnguage is no argument of run_code; did you mean language?\n",
            ),
            (json!({ "code": "bad environment", "env": { "A=": "b" } }), "env is refused: the name `A=`"),
        ] {
            let call = json!({ "name": "run_code", "arguments": arguments });
            let answer = modern(&mut client, tasks, "tools/call", call).await;
            let result = &answer["result"];
            assert_eq!((&result["resultType"], &result["isError"]), (&json!("complete"), &json!(true)), "{answer}");
            assert!(result["content"][0]["text"].as_str().unwrap().starts_with(said), "{answer}");
            assert_eq!(result.get("structuredContent"), None, "{answer}");
        }
    }
    let answer = modern(&mut client, true, "tools/call", json!({ "name": "runcode", "arguments": {} })).await;
    assert_eq!(answer["error"], json!({ "code": -32602, "message": "Unknown tool: runcode; did you mean run_code?" }));
    client.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_client_that_does_not_know_tasks_sees_nothing_of_them() {
    let mut client = Client::with(&sandpool::DIALECT, StdioOptions::default());
    let answer = modern(&mut client, false, "tasks/get", json!({ "taskId": "run-1" })).await;
    assert_eq!(answer["error"]["code"], -32021, "{answer}");
    let legacy = |capabilities: Value| {
        json!({
            "protocolVersion": "2025-11-25", "capabilities": capabilities, "clientInfo": { "name": "t", "version": "1" }
        })
    };
    // The Inspector declares the extension here as well, but does not know the answer.
    for declared in [json!({}), json!({ "extensions": { TASKS: {} } })] {
        let answer = client.request(1, "initialize", legacy(declared)).await;
        assert_eq!(answer["result"]["capabilities"], json!({ "resources": {}, "tools": {} }));
    }
    let answer = client.request(1, "tools/call", code_to_run("lasting")).await;
    assert_eq!(run_of(&answer)["success"], true, "{answer}");
    client.end().await;

    // Where runs cannot go on in the background, there are no tasks.
    let mut client = Client::new();
    let answer = modern(&mut client, true, "tasks/get", json!({ "taskId": "run-1" })).await;
    assert_eq!(answer["error"]["code"], -32601, "{answer}");
    client.end().await;
}

/// Before the client has a task, it is the call that it cancels.
#[tokio::test(start_paused = true)]
async fn a_call_cancelled_before_it_became_a_task_ends_its_run() {
    let mut client = Client::with(&sandpool::DIALECT, StdioOptions::default());
    let meta = format!("{MODERN},").replace("{}", &format!("{{\"extensions\":{{\"{TASKS}\":{{}}}}}}"));
    let call = format!(
        r#"{{"jsonrpc":"2.0","id":"c","method":"tools/call","params":{{{meta}"name":"run_code","arguments":{{"code":"forever"}}}}}}"#
    );
    client.write(format!("{call}\n").as_bytes()).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    client
        .write(b"{\"jsonrpc\":\"2.0\",\"method\":\"notifications/cancelled\",\"params\":{\"requestId\":\"c\"}}\n")
        .await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let task = modern(&mut client, true, "tasks/get", json!({ "taskId": "run-1" })).await;
    assert_eq!(task["result"]["status"], "cancelled", "{task}");
    client.end().await;
}
