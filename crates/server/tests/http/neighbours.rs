//! One tenant that takes what it can, and another that must not notice.

use std::time::Duration;

use engine::Memory;
use mcp::http::HttpOptions;
use serde_json::{Value, json};

use crate::client::{BOTH, Client, Server, call, eventually, request, session};

const MB: usize = 1 << 20;

fn of(tenant: &str) -> [(&str, &str); 1] {
    [("x-tenant", tenant)]
}

fn large(tool: &str) -> Value {
    call(1, tool, json!({ "text": "x".repeat(3 * MB) }))
}

async fn server_with(memory: &Memory) -> Server {
    // However slow the machine is: nobody is cut who does not read.
    let (write_deadline, idle_deadline) = (Duration::from_secs(600), Duration::from_secs(600));
    let memory = memory.clone();
    Server::with(HttpOptions { memory, write_deadline, idle_deadline, ..HttpOptions::default() }).await
}

/// W22: arguments are held as long as their call waits.
#[tokio::test]
async fn w22_arguments_of_waiting_calls_are_their_tenant_s_memory() {
    let memory = Memory::new(20 * MB, 100 * MB);
    let server = server_with(&memory).await;
    let mut waiting = Vec::new();
    let refused = loop {
        let (mut client, before) = (server.client().await, waiting.len());
        client.send_json(&of("blue"), &large("forever")).await;
        while server.toy.running() == before && !client.has_something().await {}
        if server.toy.running() == before {
            break client.answer().await;
        }
        waiting.push(client);
    };
    assert!((1..4).contains(&waiting.len()), "{} calls of 6 MB", waiting.len());
    assert_eq!(refused.refusal(), (429, -32000));
    assert_eq!(refused.header("retry-after"), Some("1"));
    assert!(memory.held().0 <= 20 * MB);
    // Small calls go on, those of others anyway.
    assert_eq!(server.post(&of("blue"), &call(1, "echo", json!({ "text": "small" }))).await.tool_text(), "small");
    assert_eq!(server.post(&of("green"), &large("echo")).await.tool_text().len(), 3 * MB);
    drop(waiting);
    eventually("everything is given back", || memory.held() == (0, 0)).await;
    assert_eq!(server.post(&of("blue"), &large("echo")).await.tool_text().len(), 3 * MB);
    server.stop().await;
}

/// W22: an answer is held until its last byte has been written to the socket.
#[tokio::test]
async fn w22_answers_that_nobody_reads_are_their_tenant_s_memory() {
    let memory = Memory::new(30 * MB, 200 * MB);
    let server = server_with(&memory).await;
    let mut unread: Vec<Client> = Vec::new();
    let ask = call(1, "large", json!({}));
    while server.toy.made() < 20 {
        let (mut client, before) = (server.client().await, server.toy.made());
        client.send_json(&of("blue"), &ask).await;
        eventually("it is answered", || server.toy.made() > before).await;
        unread.push(client);
        assert!(memory.held().0 <= 30 * MB, "{}", memory.held().0);
    }
    // What the sockets took is not ours any more; the rest cannot be more than the budget: some got an error.
    assert_eq!(server.post(&of("green"), &ask).await.tool_text().len(), 7 * MB, "a neighbour has a budget of its own");
    let (mut whole, mut dropped) = (0, 0);
    for mut client in unread {
        let answer = client.answer().await;
        match answer.json()["error"]["message"].as_str() {
            Some(message) => {
                assert!(message.contains("was dropped: your calls hold"), "{message}");
                dropped += 1;
            }
            None => {
                assert_eq!(answer.tool_text().len(), 7 * MB);
                whole += 1;
            }
        }
    }
    assert!(whole > 0 && dropped > 0, "{whole} whole, {dropped} dropped");
    eventually("everything is given back", || memory.held() == (0, 0)).await;
    server.stop().await;
}

/// W22: what no one knows is not carried along.
#[tokio::test]
async fn w22_large_members_that_nobody_knows_are_refused() {
    let server = Server::start().await;
    let pad = "x".repeat(100_000);
    let params = [
        json!({ "name": "echo", "arguments": {}, "pad": pad }),
        json!({ "name": "echo", "arguments": {}, "_meta": { "pad": pad } }),
        json!({ "name": "echo", "arguments": {}, "requestState": pad }),
    ];
    for params in params {
        let answer = server.post(&[], &request(1, "tools/call", params)).await;
        assert_eq!(answer.refusal(), (200, -32602));
        let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains("over the limit of 65536"), "{message}");
    }
    let small = json!({ "name": "echo", "arguments": { "text": "x" }, "pad": "y".repeat(1000) });
    assert_eq!(server.post(&[], &request(1, "tools/call", small)).await.tool_text(), "x");
    server.stop().await;
}

/// W22: what a call carries beside its arguments is its tenant's memory, too, in a batch from the first byte.
#[tokio::test]
async fn w22_members_beside_the_arguments_are_counted() {
    let memory = Memory::new(2 * MB, 100 * MB);
    let server = server_with(&memory).await;
    let beside = json!({ "pad": "x".repeat(60_000) });
    let call = |id: usize| {
        request(id as i64, "tools/call", json!({ "name": "forever", "arguments": { "text": "x" }, "_meta": beside }))
    };
    let mut client = server.client().await;
    client.send_json(&of("blue"), &json!([call(1), call(2)])).await;
    eventually("a call of the batch waits", || server.toy.running() > 0).await;
    assert!(memory.held().0 >= 60_000, "{:?}", memory.held());
    drop(client);
    eventually("everything is given back", || memory.held() == (0, 0)).await;
    server.stop().await;
}

/// W30: to find the id in a long message is to read all of it.
#[tokio::test]
async fn w30_a_long_message_of_an_unknown_session_is_not_read() {
    let server = Server::start().await;
    let headers = [("x-tenant", "blue"), ("mcp-session-id", "nobody's")];
    let (short, long) = (request(7, "tools/list", json!({})), call(7, "echo", json!({ "text": "x".repeat(MB) })));
    for (body, id) in [(short, json!(7)), (long, Value::Null)] {
        let answer = server.post(&headers, &body).await;
        assert_eq!((answer.status, &answer.json()["id"]), (404, &id));
    }
    server.stop().await;
}

/// Returns an argument that takes many times the memory of its text: objects in objects, 64 deep.
fn nested(objects: usize) -> Value {
    let deep = || (0..64).fold(Value::Null, |inner, _| json!({ "": inner }));
    (0..objects / 64).map(|_| deep()).collect()
}

/// W57: what a batch holds is counted before its first message waits.
#[tokio::test]
async fn w57_the_messages_of_a_batch_are_counted_while_they_wait() {
    let memory = Memory::new(100 * MB, 100 * MB);
    let server = server_with(&memory).await;
    let mut client = server.client().await;
    let batch = json!([call(1, "forever", json!({})), call(2, "echo", json!({ "text": "", "x": nested(6_400) }))]);
    assert!(batch.to_string().len() < 64 << 10);
    client.send_json(&of("blue"), &batch).await;
    eventually("the first call runs", || server.toy.running() == 1).await;
    let (held, _) = memory.held();
    assert!(held > 2 * 6_400 * 600, "{held} bytes for 6,400 objects");
    drop(client);
    eventually("everything is given back", || memory.held() == (0, 0)).await;
    server.stop().await;
}

/// W59: a call whose client has hung up, but may come back, is still one of its tenant's requests.
#[tokio::test]
async fn w59_calls_that_may_be_resumed_keep_their_share() {
    let (patience, resume_within) = (Duration::from_millis(20), Duration::from_secs(600));
    let options = HttpOptions { patience, resume_within, max_requests_per_tenant: 3, ..HttpOptions::default() };
    let server = Server::with(options).await;
    let id = session(&server, "2025-11-25", &[]).await;
    let headers = [("mcp-session-id", id.as_str()), BOTH];
    for number in 1..=3 {
        let mut calling = server.client().await;
        calling.send_json(&headers, &call(number, "forever", json!({}))).await;
        calling.head().await;
        drop(calling);
    }
    assert_eq!(server.post(&headers, &request(4, "ping", json!({}))).await.refusal(), (503, -32000));
    eventually("all three go on", || server.toy.running() == 3).await;
    server.stop().await;
}

/// W29: the neighbour is served after a few of the flood's requests, not after all that were there before its own.
#[tokio::test]
async fn w29_pipelined_requests_of_one_tenant_let_the_next_one_pass() {
    the_next_one_passes(1).await;
}

/// As many requests in one body as are allowed there.
#[tokio::test]
async fn w29_batches_of_one_tenant_let_the_next_one_pass() {
    the_next_one_passes(50).await;
}

async fn the_next_one_passes(batch: usize) {
    const CONNECTIONS: usize = 40;
    const EACH: usize = 100;
    let server = Server::start().await;
    let list: Vec<Value> = (0..batch).map(|id| request(id, "tools/list", json!({}))).collect();
    let list = if batch == 1 { list[0].to_string() } else { json!(list).to_string() };
    let posts = EACH / batch;
    let one = format!(
        "POST /mcp HTTP/1.1\r\nhost: localhost\r\nx-tenant: flood\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{list}",
        list.len()
    );
    // Connected and known before the flood; all of the flood has arrived before the neighbour asks.
    let mut canary = server.client().await;
    assert_eq!(canary.post(&of("canary"), &request(1, "ping", json!({}))).await.status, 200);
    let mut flood = Vec::new();
    for _ in 0..CONNECTIONS {
        let mut client = server.client().await;
        client.write(one.repeat(posts).as_bytes()).await;
        flood.push(tokio::spawn(async move {
            for _ in 0..posts {
                client.answer().await;
            }
        }));
    }
    let before = server.toy.listed().len();
    canary.post(&of("canary"), &request(1, "tools/list", json!({}))).await;
    let listed = server.toy.listed();
    let place = listed.iter().position(|tenant| tenant == "canary").unwrap();
    assert!(listed.len() < CONNECTIONS * EACH / 2, "the flood was over too soon to tell: {}", listed.len());
    // One round in which all connections are looked at, and a turn or two. By connections alone it would be sixteen of each.
    let waited = place.saturating_sub(before);
    assert!(waited <= CONNECTIONS, "{waited} requests of the flood came before the canary's");
    for client in flood {
        client.await.unwrap();
    }
    assert_eq!(server.toy.listed().len(), CONNECTIONS * EACH + 1);
    server.stop().await;
}
