//! Sessions: whose they are, how many, how long, and what happens to their calls.

use std::time::Duration;

use mcp::http::HttpOptions;
use serde_json::{Value, json};

use crate::client::{
    BOTH, Client, Server, borrowed, call, eventually, initialize, modern, notification, request, session,
};

fn quick() -> HttpOptions {
    HttpOptions { patience: Duration::from_millis(20), ..HttpOptions::default() }
}

fn cancelled(id: impl Into<Value>) -> Value {
    notification("notifications/cancelled", json!({ "requestId": id.into(), "reason": "test" }))
}

#[tokio::test]
async fn a_session_begins_works_and_ends() {
    let server = Server::start().await;
    for version in ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"] {
        let id = session(&server, version, &[]).await;
        let headers = [("mcp-session-id", id.as_str()), ("mcp-protocol-version", version), BOTH];
        assert_eq!(server.post(&headers, &notification("notifications/initialized", json!({}))).await.status, 202);
        assert_eq!(server.post(&headers, &call(1, "echo", json!({ "text": "x" }))).await.tool_text(), "x");
        assert_eq!(server.client().await.ask("DELETE", "/mcp", &headers, b"").await.status, 204);
        let answer = server.post(&headers, &request(2, "tools/list", json!({}))).await;
        assert_eq!((answer.refusal(), &answer.json()["id"]), ((404, -32001), &json!(2)), "{version}");
        assert_eq!(server.client().await.ask("DELETE", "/mcp", &headers, b"").await.status, 404);
    }
    assert_eq!(server.client().await.ask("DELETE", "/mcp", &[], b"").await.status, 405);
    server.stop().await;
}

/// X12.
#[tokio::test]
async fn a_foreign_session_looks_like_none() {
    let server = Server::with(quick()).await;
    let id = session(&server, "2025-11-25", &[("x-tenant", "alice")]).await;
    let ask = async |tenant: &str, id: &str, path: &str, method: &str| {
        let headers = [
            ("x-tenant", tenant),
            ("mcp-session-id", id),
            ("content-type", "application/json"),
            ("accept", "text/event-stream"),
        ];
        let body = call(1, "echo", json!({ "text": "x" })).to_string();
        let mut answer = server.client().await.ask(method, path, &headers, body.as_bytes()).await;
        answer.headers.retain(|(name, _)| name != "date");
        answer
    };
    for method in ["POST", "GET", "DELETE"] {
        let unknown = ask("bob", "00000000-0000-4000-8000-000000000000", "/mcp", method).await;
        assert_eq!(unknown.status, 404);
        assert_eq!(ask("bob", &id, "/mcp", method).await, unknown, "{method}");
        assert_eq!(ask("alice", &id, "/mcp/other", method).await, unknown, "{method} at another endpoint");
        for confusable in [id.to_uppercase(), format!("{id}0"), id[1..].to_owned(), format!("0{id}")] {
            assert_eq!(ask("alice", &confusable, "/mcp", method).await, unknown, "{method} {confusable}");
        }
    }
    assert_eq!(ask("alice", &id, "/mcp", "POST").await.status, 200, "still there");
    server.stop().await;
}

/// A34.
#[tokio::test]
async fn sessions_are_bounded_and_the_least_used_goes_first() {
    let options = HttpOptions { max_sessions_per_tenant: 3, max_sessions: 5, ..HttpOptions::default() };
    let server = Server::with(options).await;
    let ping = async |tenant: &str, id: &str| {
        server.post(&[("x-tenant", tenant), ("mcp-session-id", id)], &request(1, "ping", json!({}))).await.status
    };
    let used = session(&server, "2025-06-18", &[("x-tenant", "alice")]).await;
    assert_eq!(ping("alice", &used).await, 200);
    let unused = session(&server, "2025-06-18", &[("x-tenant", "alice")]).await;
    let bob = session(&server, "2025-06-18", &[("x-tenant", "bob")]).await;
    let mut last = String::new();
    for _ in 0..1000 {
        last = session(&server, "2025-06-18", &[("x-tenant", "alice")]).await;
    }
    assert_eq!((ping("alice", &unused).await, ping("alice", &used).await, ping("alice", &last).await), (404, 200, 200));
    assert_eq!(ping("bob", &bob).await, 200, "another tenant's flood is not his");
    let answer = server.post(&[("x-tenant", "carol")], &initialize("2025-06-18")).await;
    assert_eq!((answer.status, answer.header("mcp-session-id").is_some()), (200, true));
    let answer = server.post(&[("x-tenant", "dave")], &initialize("2025-06-18")).await;
    assert_eq!((answer.status, answer.header("mcp-session-id")), (200, None), "no room: without a session");
    server.stop().await;
}

#[tokio::test]
async fn a_client_that_tells_too_much_is_not_remembered() {
    let server = Server::start().await;
    let mut large = initialize("2025-06-18");
    large["params"]["capabilities"]["experimental"] = json!({ "x": { "y": "z".repeat(100_000) } });
    let answer = server.post(&[], &large).await;
    assert_eq!((answer.status, answer.header("mcp-session-id")), (200, None));
    server.stop().await;
}

#[tokio::test]
async fn an_idle_session_ends_and_a_busy_one_does_not() {
    let options = HttpOptions { session_idle: Duration::from_millis(300), ..quick() };
    let server = Server::with(options).await;
    let busy = session(&server, "2025-06-18", &[]).await;
    let mut calling = server.client().await;
    calling.send_json(&[("mcp-session-id", &busy)], &call(1, "sleep", json!({ "ms": 1500 }))).await;
    let listening = session(&server, "2025-06-18", &[]).await;
    let mut listener = server.client().await;
    listener.send("GET", "/mcp", &[("mcp-session-id", &listening), ("accept", "text/event-stream")], b"").await;
    assert_eq!(listener.head().await.status, 200);
    let idle = session(&server, "2025-06-18", &[]).await;
    let ping = async |id: &str| server.post(&[("mcp-session-id", id)], &request(2, "ping", json!({}))).await.status;
    // Asking would keep it alive; the answer of the busy one comes long after the idle time.
    assert_eq!(calling.answer().await.tool_text(), "slept");
    assert_eq!((ping(&idle).await, ping(&busy).await, ping(&listening).await), (404, 200, 200));
    server.stop().await;
}

#[tokio::test]
async fn a_cancelled_call_ends_whatever_its_form() {
    let server = Server::with(quick()).await;
    let alice = session(&server, "2025-11-25", &[]).await;
    let other = session(&server, "2025-11-25", &[]).await;
    for (round, accept) in [("accept", "application/json"), BOTH].into_iter().enumerate() {
        let mut calling = server.client().await;
        calling.send_json(&[("mcp-session-id", &alice), accept], &call("mine", "forever", json!({}))).await;
        eventually("it runs", || server.toy.running() == 1).await;
        for (id, session) in [("mine", &other), ("not mine", &alice)] {
            assert_eq!(server.post(&[("mcp-session-id", session)], &cancelled(id)).await.status, 202);
        }
        assert_eq!(server.post(&[], &cancelled("mine")).await.status, 202, "without a session it is about nothing");
        assert_eq!(server.toy.cancelled(), round, "only its own session may");
        assert_eq!(server.post(&[("mcp-session-id", &alice)], &cancelled("mine")).await.status, 202);
        eventually("it is cancelled", || server.toy.cancelled() == round + 1).await;
        let answer = calling.answer().await;
        let text = String::from_utf8(answer.body).unwrap();
        assert!(!text.contains("result") && !text.contains("error"), "a cancelled call has no answer: {text}");
    }
    server.stop().await;
}

#[tokio::test]
async fn the_end_of_a_session_ends_its_calls() {
    let server = Server::with(quick()).await;
    let id = session(&server, "2025-11-25", &[]).await;
    let mut calling = server.client().await;
    calling.send_json(&[("mcp-session-id", &id), BOTH], &call(1, "forever", json!({}))).await;
    eventually("it runs", || server.toy.running() == 1).await;
    assert_eq!(server.client().await.ask("DELETE", "/mcp", &[("mcp-session-id", &id)], b"").await.status, 204);
    eventually("it is cancelled", || server.toy.cancelled() == 1).await;
    server.stop().await;
}

/// A19.
#[tokio::test]
async fn a_client_that_goes_takes_its_call_with_it() {
    let server = Server::with(quick()).await;
    let older = session(&server, "2025-06-18", &[]).await;
    let newer = session(&server, "2025-11-25", &[]).await;
    let (modern, modern_body) = modern(1, "tools/call", json!({ "name": "forever", "arguments": {} }));
    let body = call(1, "forever", json!({}));
    let cases = [
        (vec![], &body, false),
        (vec![BOTH], &body, true),
        (vec![("mcp-session-id", older.as_str()), BOTH], &body, true),
        (vec![("mcp-session-id", older.as_str())], &body, false),
        (vec![("mcp-session-id", newer.as_str())], &body, false),
        (borrowed(&modern), &modern_body, true),
    ];
    for (round, (headers, body, streams)) in cases.iter().enumerate() {
        let mut calling = server.client().await;
        calling.send_json(headers, body).await;
        eventually("it runs", || server.toy.running() == 1).await;
        if *streams {
            assert_eq!(calling.head().await.header("content-type"), Some("text/event-stream"), "{round}");
        }
        drop(calling);
        eventually("it is cancelled", || server.toy.cancelled() == round + 1).await;
    }
    let mut closing = server.client().await;
    closing.send_json(&[], &body).await;
    eventually("it runs", || server.toy.running() == 1).await;
    closing.half_close().await;
    eventually("half a connection is none", || server.toy.cancelled() == cases.len() + 1).await;
    server.stop().await;
}

/// Begins a call that takes a while, and loses its stream after the first event.
async fn lost(server: &Server, id: &str, ms: u64) -> String {
    let mut calling = server.client().await;
    calling.send_json(&[("mcp-session-id", id), BOTH], &call(7, "sleep", json!({ "ms": ms }))).await;
    assert_eq!(calling.head().await.header("content-type"), Some("text/event-stream"));
    let primed = String::from_utf8(calling.chunk().await.unwrap()).unwrap();
    assert!(primed.contains("retry: ") && primed.ends_with("data: \n\n"), "{primed}");
    primed.lines().find_map(|line| line.strip_prefix("id: ")).unwrap().to_owned()
}

async fn resumed(server: &Server, id: &str, event: &str, tenant: &str) -> Client {
    let mut client = server.client().await;
    let headers =
        [("mcp-session-id", id), ("accept", "text/event-stream"), ("last-event-id", event), ("x-tenant", tenant)];
    client.send("GET", "/mcp", &headers, b"").await;
    client
}

/// X13.
#[tokio::test]
async fn a_lost_stream_is_resumed_by_its_owner_alone() {
    let server = Server::with(quick()).await;
    let id = session(&server, "2025-11-25", &[]).await;
    let event = lost(&server, &id, 700).await;
    assert_eq!(resumed(&server, &id, &event, "mallory").await.answer().await.status, 404);
    let foreign = session(&server, "2025-11-25", &[("x-tenant", "mallory")]).await;
    let mut mallory = resumed(&server, &foreign, &event, "mallory").await;
    assert_eq!((mallory.head().await.status, mallory.event().await), (200, None), "nothing is delivered");
    let mut owner = resumed(&server, &id, &event, "local").await;
    assert_eq!(owner.head().await.status, 200);
    let (seen, answer) = owner.event().await.unwrap();
    assert_eq!((&answer["id"], &answer["result"]["content"][0]["text"]), (&json!(7), &json!("slept")));
    assert_eq!(owner.event().await, None, "the answer is the end");
    let mut late = resumed(&server, &id, &event, "local").await;
    late.head().await;
    assert_eq!(late.event().await.unwrap().1, answer, "a while later it is still there");
    let mut done = resumed(&server, &id, &seen.unwrap(), "local").await;
    done.head().await;
    assert_eq!(done.event().await, None);
    server.stop().await;
}

#[tokio::test]
async fn a_stream_that_nobody_comes_back_for_is_given_up() {
    let server = Server::with(HttpOptions { resume_within: Duration::from_millis(100), ..quick() }).await;
    let id = session(&server, "2025-11-25", &[]).await;
    let mut calling = server.client().await;
    calling.send_json(&[("mcp-session-id", &id), BOTH], &call(1, "forever", json!({}))).await;
    calling.head().await;
    assert_eq!(server.toy.running(), 1);
    drop(calling);
    eventually("it is cancelled", || server.toy.cancelled() == 1).await;
    server.stop().await;
}

#[tokio::test]
async fn progress_that_nobody_reads_keeps_no_call_alive() {
    let server = Server::with(HttpOptions { resume_within: Duration::from_millis(100), ..quick() }).await;
    let id = session(&server, "2025-11-25", &[]).await;
    let mut flood = call(1, "flood", json!({}));
    flood["params"]["_meta"] = json!({ "progressToken": 1 });
    let mut calling = server.client().await;
    calling.send_json(&[("mcp-session-id", &id), BOTH], &flood).await;
    calling.head().await;
    drop(calling);
    eventually("it is cancelled", || server.toy.cancelled() == 1).await;
    server.stop().await;
}

#[tokio::test]
async fn a_service_can_ask_its_client() {
    let server = Server::with(quick()).await;
    let id = session(&server, "2025-11-25", &[]).await;
    let mut calling = server.client().await;
    calling.send_json(&[("mcp-session-id", &id), BOTH], &call(1, "roots", json!({}))).await;
    calling.head().await;
    let (_, question) = calling.event().await.unwrap();
    assert_eq!(question["method"], "roots/list");
    let answer = json!({ "jsonrpc": "2.0", "id": question["id"], "result": { "roots": [{ "uri": "file:///here" }] } });
    let other = session(&server, "2025-11-25", &[]).await;
    assert_eq!(server.post(&[("mcp-session-id", &other)], &answer).await.status, 202, "nobody was asked there");
    assert_eq!(server.post(&[("mcp-session-id", &id)], &answer).await.status, 202);
    let (_, answer) = calling.event().await.unwrap();
    assert_eq!(answer["result"]["content"][0]["text"], "file:///here");
    let unasked = server.post(&[("mcp-session-id", &id)], &call(2, "roots", json!({}))).await;
    assert!(unasked.tool_text().starts_with("not answered"), "a client that takes only JSON cannot be asked");
    server.stop().await;
}

#[tokio::test]
async fn an_id_in_use_is_refused() {
    let server = Server::with(quick()).await;
    let id = session(&server, "2025-11-25", &[]).await;
    let headers = [("mcp-session-id", id.as_str())];
    let mut calling = server.client().await;
    calling.send_json(&headers, &call(1, "forever", json!({}))).await;
    eventually("it runs", || server.toy.running() == 1).await;
    assert_eq!(server.post(&headers, &request(1, "ping", json!({}))).await.refusal(), (200, -32600));
    assert_eq!(server.post(&headers, &request("1", "ping", json!({}))).await.status, 200, "a string is another id");
    drop(calling);
    eventually("it is cancelled", || server.toy.cancelled() == 1).await;
    server.stop().await;
}

#[tokio::test]
async fn a_stream_of_its_own_lasts_as_long_as_its_session() {
    let server = Server::start().await;
    let id = session(&server, "2025-11-25", &[]).await;
    let headers = [("mcp-session-id", id.as_str()), ("accept", "text/event-stream")];
    let mut listeners = Vec::new();
    for _ in 0..8 {
        let mut listener = server.client().await;
        listener.send("GET", "/mcp", &headers, b"").await;
        assert_eq!(listener.head().await.header("content-type"), Some("text/event-stream"));
        listeners.push(listener);
    }
    let totals = server.counters.totals();
    assert_eq!((totals.sessions_open, totals.connections_open), (1, 8));
    assert_eq!(server.client().await.ask("GET", "/mcp", &headers, b"").await.refusal(), (409, -32000));
    assert_eq!(server.client().await.ask("DELETE", "/mcp", &headers[..1], b"").await.status, 204);
    for mut listener in listeners {
        assert_eq!(listener.event().await, None);
    }
    eventually("it is counted out", || server.counters.totals().sessions_open == 0).await;
    server.stop().await;
}

/// X14.
#[tokio::test]
async fn two_clients_with_the_same_ids_get_their_own_answers() {
    let server = Server::start().await;
    let client = async |tenant: &'static str| {
        let id = session(&server, "2025-11-25", &[("x-tenant", tenant)]).await;
        let mut client = server.client().await;
        for number in 0..1000 {
            let marker = format!("{tenant} {number}");
            let body = call(number, "echo", json!({ "text": marker }));
            let answer = client.post(&[("x-tenant", tenant), ("mcp-session-id", &id), BOTH], &body).await;
            assert_eq!((answer.tool_text(), &answer.json()["id"]), (marker, &json!(number)));
        }
    };
    tokio::join!(client("alice"), client("bob"), client("carol"), client("dave"));
    server.stop().await;
}
