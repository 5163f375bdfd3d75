//! The end: what was accepted is answered, and nothing stays open.

use std::time::Duration;

use mcp::http::HttpOptions;
use serde_json::json;
use tokio::net::TcpStream;

use crate::client::{BOTH, Client, Server, call, eventually, in_time, request, session};

#[tokio::test]
async fn calls_in_flight_are_answered_and_nothing_else_stays() {
    let server = Server::start().await;
    let id = session(&server, "2025-11-25", &[]).await;
    let mut listener = server.client().await;
    listener.send("GET", "/mcp", &[("mcp-session-id", &id), ("accept", "text/event-stream")], b"").await;
    listener.head().await;
    let mut idle = server.client().await;
    assert_eq!(idle.post(&[], &request(1, "ping", json!({}))).await.status, 200);
    let mut calling = Vec::new();
    for accept in [("accept", "application/json"), BOTH] {
        let mut client = server.client().await;
        client.send_json(&[("mcp-session-id", &id), accept], &call(accept.1, "sleep", json!({ "ms": 1500 }))).await;
        calling.push(client);
    }
    // Both have begun when the second's stream has.
    calling[1].head().await;
    server.shutdown.cancel();
    assert_eq!(listener.event().await, None);
    assert_eq!(idle.rest().await, "");
    assert_eq!(calling[0].answer().await.tool_text(), "slept");
    assert_eq!(calling[1].event().await.unwrap().1["result"]["content"][0]["text"], "slept");
    in_time(server.task).await.unwrap();
    assert!(TcpStream::connect(server.address).await.is_err());
}

#[tokio::test]
async fn after_the_grace_calls_are_cancelled_and_say_so() {
    let server = Server::with(HttpOptions { grace: Duration::from_millis(100), ..HttpOptions::default() }).await;
    let mut calling = server.client().await;
    calling.send_json(&[], &call(1, "forever", json!({}))).await;
    eventually("it runs", || server.toy.running() == 1).await;
    server.shutdown.cancel();
    assert_eq!(calling.answer().await.tool_text(), "cancelled");
    in_time(server.task).await.unwrap();
}

#[tokio::test]
async fn a_second_signal_waits_for_nobody() {
    let server = Server::start().await;
    let mut deaf = server.client().await;
    deaf.send_json(&[], &call(1, "deaf", json!({}))).await;
    let mut calling = server.client().await;
    calling.send_json(&[], &call(1, "forever", json!({}))).await;
    eventually("it runs", || server.toy.running() == 1).await;
    server.shutdown.cancel();
    server.now.cancel();
    assert_eq!(calling.answer().await.tool_text(), "cancelled");
    // Far below the grace of 30 s: the one that does not listen is not waited for.
    tokio::time::timeout(Duration::from_secs(10), server.task).await.expect("at once").unwrap();
    assert_eq!(deaf.rest().await, "");
}

#[tokio::test]
async fn under_load_every_call_that_was_made_is_answered() {
    let server = Server::start().await;
    let address = server.address;
    let clients: Vec<_> = (0..40)
        .map(|_| {
            tokio::spawn(async move {
                let mut client = Client::connect(address).await;
                let mut answered = 0;
                loop {
                    client.send_json(&[], &call(answered, "sleep", json!({ "ms": 5 }))).await;
                    // Closed between two requests, never within an answer.
                    if client.is_closed().await {
                        return answered;
                    }
                    assert_eq!(client.answer().await.tool_text(), "slept");
                    answered += 1;
                }
            })
        })
        .collect();
    eventually("they are at it", || server.toy.slept() > 400).await;
    server.shutdown.cancel();
    in_time(server.task).await.unwrap();
    let mut answered = 0;
    for client in clients {
        answered += in_time(client).await.unwrap();
    }
    assert_eq!(answered, server.toy.slept(), "made and answered");
}
