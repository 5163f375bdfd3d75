//! Connections: how many, how slow, how malformed.

use std::time::Duration;

use mcp::http::HttpOptions;
use serde_json::json;

use crate::client::{BOTH, Client, Server, call, eventually, request, session};

const HEAD: &[u8] = b"POST /mcp HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";

fn short() -> HttpOptions {
    let deadline = Duration::from_millis(200);
    HttpOptions {
        header_deadline: deadline,
        body_deadline: deadline,
        idle_deadline: deadline,
        write_deadline: deadline,
        ..HttpOptions::default()
    }
}

/// A17.
#[tokio::test]
async fn slow_clients_are_cut() {
    let server = Server::with(short()).await;
    let mut silent = server.client().await;
    assert_eq!(silent.rest().await, "");
    let mut slow_head = server.client().await;
    slow_head.write(b"POST /mcp HTTP/1.1\r\nhost:").await;
    assert_eq!(slow_head.rest().await, "");
    let mut dripping = server.client().await;
    dripping.write(b"POST /mcp HTTP/1.1\r\n").await;
    let mut cut = false;
    for _ in 0..2000 {
        dripping.write(b"x: y\r\n").await;
        tokio::time::sleep(Duration::from_millis(5)).await;
        cut = server_closed(&mut dripping).await;
        if cut {
            break;
        }
    }
    assert!(cut, "a header now and then is no reason to wait");
    let mut slow_body = server.client().await;
    slow_body.write(&[HEAD, b"content-length: 100\r\n\r\n{"].concat()).await;
    let rest = slow_body.rest().await;
    assert!(rest.starts_with("HTTP/1.1 408 ") && rest.contains("was not complete within"), "{rest}");
    let mut idle = server.client().await;
    assert_eq!(idle.post(&[], &request(1, "ping", json!({}))).await.status, 200);
    assert_eq!(idle.rest().await, "");
    server.stop().await;
}

async fn server_closed(client: &mut Client) -> bool {
    tokio::time::timeout(Duration::from_millis(1), client.rest()).await.is_ok()
}

#[tokio::test]
async fn a_call_outlives_the_deadlines_of_idle_connections() {
    let server = Server::with(short()).await;
    let mut client = server.client().await;
    assert_eq!(client.post(&[], &call(1, "sleep", json!({ "ms": 1000 }))).await.tool_text(), "slept");
    assert_eq!(client.post(&[BOTH], &call(2, "sleep", json!({ "ms": 1000 }))).await.status, 200);
    server.stop().await;
}

#[tokio::test]
async fn a_client_that_does_not_read_is_cut() {
    let server = Server::with(short()).await;
    let mut flooded = server.client().await;
    let mut flood = call(1, "flood", json!({}));
    flood["params"]["_meta"] = json!({ "progressToken": 1 });
    flooded.send_json(&[BOTH], &flood).await;
    eventually("it runs", || server.toy.running() == 1).await;
    eventually("it is cut", || server.toy.cancelled() == 1).await;
    server.stop().await;
}

/// A17.
#[tokio::test]
async fn idle_connections_keep_nobody_out() {
    let server = Server::with(HttpOptions { max_connections: 20, ..HttpOptions::default() }).await;
    let mut held = Vec::new();
    for number in 0..200 {
        let mut client = server.client().await;
        match number % 3 {
            0 => client.write(b"POST /mcp HTTP/1.1\r\n").await,
            1 => client.write(&[HEAD, b"content-length: 100\r\n\r\n{"].concat()).await,
            _ => {}
        }
        held.push(client);
        if number % 10 == 0 {
            assert_eq!(server.post(&[], &request(1, "ping", json!({}))).await.status, 200, "after {number}");
        }
    }
    server.stop().await;
}

/// Else one tenant could take all connections with streams on which nothing is ever said.
#[tokio::test]
async fn silent_streams_keep_nobody_out() {
    let server = Server::with(HttpOptions { max_connections: 8, ..HttpOptions::default() }).await;
    let id = session(&server, "2025-11-25", &[]).await;
    let headers = [("mcp-session-id", id.as_str()), ("accept", "text/event-stream")];
    let mut listeners = Vec::new();
    for _ in 0..8 {
        let mut listener = server.client().await;
        listener.send("GET", "/mcp", &headers, b"").await;
        assert_eq!(listener.head().await.status, 200);
        listeners.push(listener);
    }
    assert_eq!(server.post(&[], &request(1, "ping", json!({}))).await.status, 200);
    assert!(listeners[0].is_closed().await, "the oldest made room");
    server.stop().await;
}

#[tokio::test]
async fn when_all_connections_are_busy_the_next_is_told() {
    let server = Server::with(HttpOptions { max_connections: 3, ..HttpOptions::default() }).await;
    let mut busy = Vec::new();
    for number in 1..=3 {
        let mut client = server.client().await;
        client.send_json(&[], &call(number, "forever", json!({}))).await;
        eventually("it runs", || server.toy.running() == number).await;
        busy.push(client);
    }
    let mut shed = server.client().await;
    let rest = shed.rest().await;
    assert!(
        rest.starts_with("HTTP/1.1 503 ") && rest.contains("Retry-After: 1") && rest.contains("too many connections"),
        "{rest}"
    );
    let body = rest.split("\r\n\r\n").nth(1).unwrap();
    assert!(rest.contains(&format!("Content-Length: {}\r\n", body.len())));
    drop(busy);
    eventually("they end", || server.toy.cancelled() == 3).await;
    server.stop().await;
}

/// A29.
#[tokio::test]
async fn a_smuggled_request_is_none() {
    let server = Server::start().await;
    let inner = "POST /mcp HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 97\r\n\r\n";
    let smuggled = format!("0\r\n\r\n{inner}");
    let corpus = [
        format!("content-length: {}\r\ntransfer-encoding: chunked\r\n\r\n{smuggled}", smuggled.len()),
        format!("transfer-encoding: chunked\r\ncontent-length: {}\r\n\r\n{smuggled}", smuggled.len()),
        format!("content-length: 5\r\ncontent-length: {}\r\n\r\n{smuggled}", smuggled.len()),
        format!("content-length: +5\r\n\r\n{smuggled}"),
        format!("content-length: 5, 5\r\n\r\n{smuggled}"),
        format!("content-length: 0x5\r\n\r\n{smuggled}"),
        format!("transfer-encoding: xchunked\r\n\r\n{smuggled}"),
        format!("transfer-encoding: chunked, identity\r\n\r\n{smuggled}"),
        format!("transfer-encoding : chunked\r\n\r\n{smuggled}"),
        format!("x: y\r\n folded: z\r\n\r\n{smuggled}"),
        format!("transfer-encoding: chunked\r\n\r\n5;{}\r\n", "x".repeat(100_000)),
        format!("transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n{smuggled}"),
        format!("transfer-encoding: chunked\r\n\r\n-1\r\n{smuggled}"),
        format!("bad header\r\n\r\n{smuggled}"),
        format!("nul: \0\r\n\r\n{smuggled}"),
    ];
    for tail in corpus {
        let mut client = server.client().await;
        client.write(&[HEAD, tail.as_bytes()].concat()).await;
        client.half_close().await;
        let rest = client.rest().await;
        let shown = &tail[..tail.len().min(80)];
        let answers = rest.matches("HTTP/1.1 ").count();
        assert!(answers <= 1 && !rest.contains("HTTP/1.1 2"), "{shown:?}: {rest}");
        assert!(
            answers == 0 || rest.starts_with("HTTP/1.1 400") || rest.starts_with("HTTP/1.1 413"),
            "{shown:?}: {rest}"
        );
    }
    server.stop().await;
}

/// A30.
#[tokio::test]
async fn what_is_not_http_1_is_refused() {
    let server = Server::start().await;
    for bytes in [
        &b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..],
        b"GET /mcp HTTP/9.9\r\nhost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        b"GET\r\n\r\n",
    ] {
        let mut client = server.client().await;
        client.write(bytes).await;
        client.half_close().await;
        let rest = client.rest().await;
        assert!(rest.is_empty() || rest.starts_with("HTTP/1.1 4") || rest.starts_with("HTTP/1.1 505"), "{rest}");
    }
    let mut large = server.client().await;
    large.write(&[HEAD, b"x: ", &vec![b'y'; 100_000], b"\r\n\r\n"].concat()).await;
    assert!(large.rest().await.starts_with("HTTP/1.1 431 "));
    let mut many = server.client().await;
    many.write(&[HEAD, "x: y\r\n".repeat(1000).as_bytes(), b"\r\n"].concat()).await;
    assert!(many.rest().await.starts_with("HTTP/1.1 431 "));
    let upgrade = [("connection", "upgrade"), ("upgrade", "websocket"), ("origin", "http://evil.example")];
    assert_eq!(server.client().await.ask("GET", "/mcp", &upgrade, b"").await.status, 403);
    assert_eq!(server.client().await.ask("GET", "/mcp", &upgrade[..2], b"").await.status, 200, "nothing is upgraded");
    server.stop().await;
}

#[tokio::test]
async fn requests_in_a_row_are_answered_in_a_row() {
    let server = Server::start().await;
    let mut client = server.client().await;
    for number in 0..20 {
        client.send_json(&[], &call(number, "echo", json!({ "text": "x" }))).await;
    }
    for number in 0..20 {
        assert_eq!(client.answer().await.json()["id"], number);
    }
    server.stop().await;
}
