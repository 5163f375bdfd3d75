//! What happens to requests, sessions and streams of a tenant that the operator removes.

use std::time::Duration;

use futures_util::FutureExt;
use mcp::http::{Endpoint, HttpOptions};
use serde_json::{Value, json};

use crate::client::{Answer, BOTH, Client, Server, call, eventually, request, session};
use crate::toy::Toy;

const STREAM: (&str, &str) = ("accept", "text/event-stream");

fn quick() -> HttpOptions {
    HttpOptions { patience: Duration::from_millis(20), ..HttpOptions::default() }
}

fn without_date(mut answer: Answer) -> Answer {
    answer.headers.retain(|(name, _)| name != "date");
    answer
}

/// Sends the head and a part of the body, and waits until the server has admitted the request.
async fn begin(server: &Server, tenant: &str, body: &str) -> Client {
    let mut client = server.client().await;
    let head = format!(
        "POST /mcp HTTP/1.1\r\nhost: localhost\r\nx-tenant: {tenant}\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n",
        body.len()
    );
    client.write(&[head.as_bytes(), &body.as_bytes()[..10]].concat()).await;
    eventually("the request is admitted", || server.gate.knows(tenant)).await;
    client
}

/// W75.
#[tokio::test]
async fn a_request_does_not_run_if_its_token_ends_while_its_body_arrives() {
    let server = Server::start().await;
    let unknown = without_date(server.post(&[("x-tenant", "nobody")], &request(1, "tools/list", json!({}))).await);
    assert_eq!(unknown.status, 401);
    let one = request(1, "tools/list", json!({}));
    let large = request(1, "tools/list", json!({ "_meta": { "x": "y".repeat(300 << 10) } }));
    for (body, again) in [(&one, false), (&one, true), (&json!([one, one]), false), (&large, false)] {
        let body = body.to_string();
        let mut client = begin(&server, "alice", &body).await;
        server.gate.remove("alice");
        if again {
            server.gate.add("alice");
        }
        client.write(&body.as_bytes()[10..]).await;
        assert_eq!(without_date(client.answer().await), unknown, "added again: {again}");
        server.gate.add("alice");
    }
    assert_eq!(server.toy.listed(), Vec::<String>::new());
    // A reload that changes nothing for the caller does not disturb its request.
    let body = one.to_string();
    let mut client = begin(&server, "alice", &body).await;
    server.gate.remove("bob");
    client.write(&body.as_bytes()[10..]).await;
    assert_eq!(client.answer().await.status, 200);
    assert_eq!(server.toy.listed(), ["alice"]);
    server.stop().await;
}

/// W76.
#[tokio::test]
async fn sessions_and_streams_end_with_their_tenant_and_are_not_its_successors() {
    let toy = Toy::default();
    let served = toy.clone();
    let server = Server::serving(quick(), toy, move || {
        let toy = served.clone();
        Endpoint::new(move |caller, _| toy.of(caller), |_| std::future::ready(Value::Null).boxed())
            .with_open_stream(true)
    })
    .await;
    let alice = ("x-tenant", "alice");
    let id = session(&server, "2025-11-25", &[alice]).await;
    let own = ("mcp-session-id", id.as_str());
    let others = session(&server, "2025-11-25", &[("x-tenant", "bob")]).await;
    let mut streams = Vec::new();
    for headers in [&[alice, own, STREAM][..], &[alice, STREAM]] {
        let mut stream = server.client().await;
        stream.send("GET", "/mcp", headers, b"").await;
        assert_eq!(stream.head().await.status, 200);
        streams.push(stream);
    }
    let mut calling = server.client().await;
    calling.send_json(&[alice, own, BOTH], &call(1, "forever", json!({}))).await;
    assert_eq!(calling.head().await.header("content-type"), Some("text/event-stream"));
    streams.push(calling);

    server.gate.remove("alice");
    for mut stream in streams {
        while stream.chunk().await.is_some() {}
    }
    eventually("the call is cancelled", || server.toy.cancelled() == 1).await;
    server.gate.add("alice");
    let ask = async |method: &str, id: &str| {
        let headers = [alice, ("mcp-session-id", id), STREAM, ("content-type", "application/json")];
        let body = request(1, "ping", json!({})).to_string();
        without_date(server.client().await.ask(method, "/mcp", &headers, body.as_bytes()).await)
    };
    for method in ["POST", "GET", "DELETE"] {
        let unknown = ask(method, "00000000-0000-4000-8000-000000000000").await;
        assert_eq!((ask(method, &id).await, unknown.status), (unknown, 404), "{method}");
    }
    let ping = server.post(&[("x-tenant", "bob"), ("mcp-session-id", &others)], &request(1, "ping", json!({}))).await;
    assert_eq!(ping.status, 200);
    server.stop().await;
}

#[tokio::test]
async fn the_session_of_a_removed_tenant_leaves_its_place_to_others() {
    let server = Server::with(HttpOptions { max_sessions: 1, ..HttpOptions::default() }).await;
    session(&server, "2025-11-25", &[("x-tenant", "alice")]).await;
    server.gate.remove("alice");
    session(&server, "2025-11-25", &[("x-tenant", "bob")]).await;
    assert_eq!(server.counters.totals().sessions_open, 1);
    server.stop().await;
}
