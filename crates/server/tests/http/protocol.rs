//! What is said, and with which status.

use std::time::Duration;

use engine::Memory;
use mcp::http::HttpOptions;
use serde_json::{Value, json};

use crate::client::{
    Answer, BOTH, Server, borrowed, call, eventually, initialize, modern, notification, request, session,
};
use crate::toy::LINK;

async fn body(server: &Server, bytes: &[u8]) -> Answer {
    server.client().await.ask("POST", "/mcp", &[("content-type", "application/json")], bytes).await
}

#[tokio::test]
async fn the_documents_plain_requests_are_served_without_a_session() {
    let server = Server::start().await;
    let initialize = request(1, "initialize", json!({ "protocolVersion": "2024-11-05" }));
    let answer = server.post(&[], &initialize).await;
    assert_eq!((answer.status, answer.header("content-type")), (200, Some("application/json")));
    assert_eq!(answer.json()["result"]["protocolVersion"], "2024-11-05");
    let answer = server.post(&[], &json!({ "jsonrpc": "2.0", "id": 2, "method": "tools/list" })).await;
    assert_eq!(answer.json()["result"]["tools"][0]["name"], "echo");
    assert_eq!(answer.json()["result"].get("resultType"), None, "a member of a later revision");
    let answer = server.post(&[], &call(3, "echo", json!({ "text": "hello" }))).await;
    assert_eq!((answer.status, answer.tool_text().as_str(), &answer.json()["id"]), (200, "hello", &json!(3)));
    assert_eq!(server.post(&[], &notification("notifications/initialized", json!({}))).await.status, 202);
    server.stop().await;
}

#[tokio::test]
async fn the_form_of_an_answer_is_what_was_asked_for() {
    let server = Server::start().await;
    let list = request(1, "tools/list", json!({}));
    for (accept, kind) in [
        ("*/*", "application/json"),
        ("application/json", "application/json"),
        ("Application/JSON;q=0.9, text/event-stream", "application/json"),
        ("application/*", "application/json"),
        ("text/event-stream", "text/event-stream"),
    ] {
        let answer = server.post(&[("accept", accept)], &list).await;
        assert_eq!((answer.status, answer.header("content-type")), (200, Some(kind)), "{accept}");
    }
    let answer = server.post(&[("accept", "text/html")], &list).await;
    assert_eq!(answer.refusal(), (406, -32000));
    server.stop().await;
}

/// A02, A03, A05.
#[tokio::test]
async fn what_is_no_message_is_refused_with_a_reason() {
    let server = Server::start().await;
    let deep = "[".repeat(100_000);
    let wide = format!("[{}1]", "1,".repeat(1_000_000));
    let long_id = format!(r#"{{"jsonrpc":"2.0","id":"{}","method":"ping"}}"#, "x".repeat(2000));
    let cases: &[(&[u8], (u16, i64))] = &[
        (b"junk", (400, -32700)),
        (b"", (400, -32700)),
        (br#"{"jsonrpc":"2.0","id":1,"method":"ping""#, (400, -32700)),
        (b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"\xff\"}", (400, -32700)),
        (br#"{"jsonrpc":"2.0","id":1,"method":"\ud800"}"#, (400, -32700)),
        (deep.as_bytes(), (400, -32700)),
        (wide.as_bytes(), (200, -32600)),
        (br#"{"jsonrpc":"2.0","id":1,"method":"ping","method":"tools/list"}"#, (200, -32600)),
        (br#"{"jsonrpc":"2.0","id":1,"id":2,"method":"ping"}"#, (200, -32600)),
        (br#"{"jsonrpc":"1.0","id":1,"method":"ping"}"#, (200, -32600)),
        (br#"{"jsonrpc":"2.0","id":null,"method":"ping"}"#, (200, -32600)),
        (br#"{"jsonrpc":"2.0","id":1.5,"method":"ping"}"#, (200, -32600)),
        (long_id.as_bytes(), (200, -32600)),
        (br#"{"jsonrpc":"2.0","id":1}"#, (200, -32600)),
        (b"7", (200, -32600)),
        (br#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{}}"#, (200, -32602)),
        (br#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"echo","arguments":"x"}}"#, (200, -32602)),
        (br#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":[]}"#, (200, -32602)),
        (br#"{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":5}}"#, (200, -32602)),
        (br#"{"jsonrpc":"2.0","id":1,"method":"no/such"}"#, (200, -32601)),
        (br#"{"jsonrpc":"2.0","id":1,"method":"prompts/list"}"#, (200, -32601)),
        (br#"{"jsonrpc":"2.0","id":1,"method":"resources/list"}"#, (200, -32601)),
        (br#"{"jsonrpc":"2.0","id":1,"method":"resources/read","params":{}}"#, (200, -32601)),
        (br#"{"jsonrpc":"2.0","id":1,"method":"completion/complete"}"#, (200, -32601)),
        (br#"{"jsonrpc":"2.0","id":1,"method":"logging/setLevel","params":{"level":"info"}}"#, (200, -32601)),
        (br#"{"jsonrpc":"2.0","id":1,"result":{}}"#, (400, -32600)),
    ];
    for (bytes, refusal) in cases {
        let answer = body(&server, bytes).await;
        let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(100)]);
        assert_eq!(answer.refusal(), *refusal, "{shown}: {}", answer.json());
        assert_eq!(answer.header("content-type"), Some("application/json"), "{shown}");
    }
    let headers = [("content-type", "application/json"), ("mcp-protocol-version", "2026-07-28")];
    let modern =
        server.client().await.ask("POST", "/mcp", &headers, br#"{"jsonrpc":"1.0","id":1,"method":"ping"}"#).await;
    assert_eq!(modern.refusal(), (400, -32600));
    let marked = body(&server, b"\xef\xbb\xbf{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"ping\"}").await;
    assert_eq!((marked.status, &marked.json()["result"]), (200, &json!({})));
    server.stop().await;
}

#[tokio::test]
async fn an_id_of_any_kind_comes_back_as_it_was() {
    let server = Server::start().await;
    for id in [json!(0), json!(-7), json!(u64::MAX), json!("1"), json!("é\u{0}"), json!(9_007_199_254_740_993_i64)] {
        assert_eq!(server.post(&[], &request(id.clone(), "ping", json!({}))).await.json()["id"], id);
    }
    server.stop().await;
}

#[tokio::test]
async fn other_content_is_refused() {
    let server = Server::start().await;
    let list = request(1, "tools/list", json!({})).to_string();
    for kind in [Some("text/plain"), Some("application/x-www-form-urlencoded"), Some("application/jsonp"), None] {
        let headers: Vec<_> = kind.map(|kind| ("content-type", kind)).into_iter().collect();
        let answer = server.client().await.ask("POST", "/mcp", &headers, list.as_bytes()).await;
        assert_eq!(answer.refusal(), (415, -32000), "{kind:?}");
    }
    let zipped = [("content-type", "application/json"), ("content-encoding", "gzip")];
    assert_eq!(server.client().await.ask("POST", "/mcp", &zipped, list.as_bytes()).await.refusal(), (415, -32000));
    let headers = [("content-type", "Application/Json; charset=utf-8")];
    assert_eq!(server.client().await.ask("POST", "/mcp", &headers, list.as_bytes()).await.status, 200);
    server.stop().await;
}

#[tokio::test]
async fn a_body_over_the_limit_is_answered_with_its_id() {
    let server = Server::with(HttpOptions { max_body: 10_000, ..HttpOptions::default() }).await;
    let long = call("the id", "echo", json!({ "text": "x".repeat(20_000) })).to_string();
    let answer = body(&server, long.as_bytes()).await;
    assert_eq!(answer.refusal(), (413, -32600));
    let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains(&format!("{} bytes", long.len())) && message.contains("10000"), "{message}");
    // Where no length is announced the beginning has been read when it turns out to be too long.
    let long = long.replacen('{', r#"{"id":"the id","#, 1).replacen(r#","id":"the id""#, "", 1);
    let mut chunked = server.client().await;
    chunked.write(CHUNKED).await;
    for chunk in long.as_bytes().chunks(1000) {
        chunked.write(&[format!("{:x}\r\n", chunk.len()).as_bytes(), chunk, b"\r\n"].concat()).await;
    }
    chunked.write(b"0\r\n\r\n").await;
    let answer = chunked.answer().await;
    assert_eq!(answer.refusal(), (413, -32600));
    assert_eq!(answer.json()["id"], "the id");
    server.stop().await;
}

const CHUNKED: &[u8] =
    b"POST /mcp HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";

/// W30: nothing of it is read, and the connection is over.
#[tokio::test]
async fn w30_an_announced_body_over_the_limit_is_refused_before_it_is_sent() {
    let server = Server::start().await;
    for length in ["25165825", "1000000000000"] {
        let mut client = server.client().await;
        let head = format!(
            "POST /mcp HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
        );
        client.write(head.as_bytes()).await;
        let answer = client.answer().await;
        assert_eq!(answer.refusal(), (413, -32600), "{length}");
        assert_eq!(answer.header("connection"), Some("close"));
        client.half_close().await;
        assert!(client.is_closed().await);
    }
    // Whoever is not known may not send one, either.
    let mut stranger = server.client().await;
    let announced = [("x-tenant", "nobody"), ("content-type", "application/json"), ("content-length", "20000000")];
    stranger.send("PUT", "/mcp", &announced, b"").await;
    let answer = stranger.answer().await;
    assert_eq!((answer.status, answer.header("connection")), (401, Some("close")));
    server.stop().await;
}

/// W30: what is kept of it is its tenant's, and no more than its tenant's budget.
#[tokio::test]
async fn w30_an_endless_chunked_body_ends_at_the_limit_or_at_the_tenant_s_budget() {
    for (limit, budget, expected) in [(1 << 20, 64 << 20, (413, -32600)), (24 << 20, 1 << 20, (429, -32000))] {
        let memory = Memory::new(budget, 1 << 30);
        let options = HttpOptions { max_body: limit, memory: memory.clone(), ..HttpOptions::default() };
        let server = Server::with(options).await;
        let mut client = server.client().await;
        client.write(CHUNKED).await;
        let chunk = [&b"10000\r\n"[..], &[b' '; 0x10000], b"\r\n"].concat();
        let (mut sent, mut most) = (0, 0);
        while sent < 200 << 20 && !client.has_something().await {
            client.write(&chunk).await;
            sent += chunk.len();
            most = most.max(memory.held().0);
        }
        assert!(most <= budget.min(limit), "{most}");
        assert_eq!(client.answer().await.refusal(), expected);
        eventually("nothing is held", || memory.held() == (0, 0)).await;
        server.stop().await;
    }
}

#[tokio::test]
async fn bodies_together_have_a_limit_too() {
    let memory = Memory::new(1 << 30, 100_000);
    let server = Server::with(HttpOptions { memory, ..HttpOptions::default() }).await;
    let mut greedy = server.client().await;
    greedy
        .write(
            b"POST /mcp HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 170000\r\n\r\n",
        )
        .await;
    greedy.write(&vec![b' '; 160_000]).await;
    let echo = async |length| server.post(&[], &call(1, "echo", json!({ "text": "x".repeat(length) }))).await;
    let answer = loop {
        let answer = echo(150_000).await;
        if answer.status != 200 {
            break answer;
        }
    };
    assert_eq!(answer.refusal(), (503, -32000));
    assert_eq!(answer.header("retry-after"), Some("1"));
    assert_eq!(echo(20_000).await.status, 200, "small ones go on");
    greedy.write(&[b' '; 9999]).await;
    assert_eq!(echo(20_000).await.status, 200, "when there is no room at all, too");
    drop(greedy);
    server.stop().await;
}

/// A22, A23.
#[tokio::test]
async fn foreign_hosts_and_origins_are_refused_on_every_route() {
    let server = Server::start().await;
    for path in ["/mcp", "/mcp/toy", "/healthz", "/nowhere"] {
        let ask = async |headers: &[(&str, &str)]| server.client().await.ask("GET", path, headers, b"").await.status;
        assert_eq!(ask(&[("host", "evil.example")]).await, 403, "{path}");
        assert_eq!(ask(&[("host", "localhost"), ("host", "localhost")]).await, 400, "{path}");
        for origin in ["null", "file://", "http://localhost.evil.com", "http://evil.example"] {
            assert_eq!(ask(&[("origin", origin)]).await, 403, "{path} {origin}");
        }
        let status = ask(&[("origin", "http://localhost:3000")]).await;
        assert_eq!(status, if path == "/nowhere" { 404 } else { 200 }, "{path}");
    }
    let mut absolute = server.client().await;
    absolute.write(b"GET http://evil.example/mcp HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
    assert_eq!(absolute.answer().await.status, 403);
    let mut without = server.client().await;
    without.write(b"GET /mcp HTTP/1.1\r\n\r\n").await;
    assert_eq!(without.answer().await.status, 400);
    server.stop().await;
}

/// A25.
#[tokio::test]
async fn cross_origin_headers_are_there_only_when_switched_on() {
    let preflight = [
        ("origin", "https://app.example"),
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "content-type, mcp-param-text"),
    ];
    let off = Server::start().await;
    assert_eq!(off.client().await.ask("OPTIONS", "/mcp", &preflight, b"").await.status, 403);
    let answer = off.client().await.ask("OPTIONS", "/mcp", &[], b"").await;
    assert_eq!((answer.status, answer.header("allow")), (405, Some("GET, POST, DELETE")));
    assert_eq!(answer.header("access-control-allow-origin"), None);
    off.stop().await;

    let on = Server::with(HttpOptions { cors: true, ..HttpOptions::default() }).await;
    let answer =
        on.client().await.ask("OPTIONS", "/mcp", &[&preflight[..], &[("x-tenant", "nobody")]].concat(), b"").await;
    assert_eq!(answer.status, 204, "a preflight carries no token");
    assert_eq!(answer.header("access-control-allow-origin"), Some("*"));
    assert_eq!(answer.header("access-control-allow-methods"), Some("GET, POST, DELETE, OPTIONS"));
    let headers = answer.header("access-control-allow-headers").unwrap();
    assert!(
        headers.contains("Authorization") && headers.contains("Mcp-Session-Id") && headers.ends_with("mcp-param-text")
    );
    assert_eq!(answer.header("access-control-allow-credentials"), None);
    let answer = on.post(&[("origin", "https://app.example")], &initialize("2025-06-18")).await;
    assert_eq!((answer.status, answer.header("access-control-expose-headers")), (200, Some("Mcp-Session-Id")));
    let denied = on.post(&[("origin", "https://app.example"), ("x-tenant", "nobody")], &initialize("2025-06-18")).await;
    assert_eq!(
        (denied.status, denied.header("access-control-allow-origin")),
        (401, Some("*")),
        "readable for the page"
    );
    on.stop().await;
}

/// A27.
#[tokio::test]
async fn the_gate_is_asked_before_anything_is_told() {
    let server = Server::start().await;
    for (method, path) in
        [("POST", "/mcp"), ("GET", "/mcp"), ("DELETE", "/mcp/toy"), ("GET", "/mcp/unknown"), ("PUT", "/mcp")]
    {
        let answer = server.client().await.ask(method, path, &[("x-tenant", "nobody")], b"").await;
        assert_eq!((answer.status, answer.header("www-authenticate")), (401, Some("Bearer")), "{method} {path}");
        assert_eq!(answer.json(), json!({ "error": "who are you" }));
    }
    assert_eq!(server.client().await.ask("GET", "/healthz", &[("x-tenant", "nobody")], b"").await.body, b"ok");
    server.stop().await;
}

#[tokio::test]
async fn endpoints_are_found_by_name() {
    let server = Server::start().await;
    let list = request(1, "tools/list", json!({})).to_string();
    let headers = [("content-type", "application/json")];
    for path in ["/mcp", "/mcp/", "/mcp/toy", "/mcp/other"] {
        assert_eq!(server.client().await.ask("POST", path, &headers, list.as_bytes()).await.status, 200, "{path}");
    }
    for path in ["/mcp/unknown", "/mcp/toy/more", "/mcp/%74oy", "/mcp/../mcp"] {
        let answer = server.client().await.ask("POST", path, &headers, list.as_bytes()).await;
        assert_eq!(answer.refusal(), (404, -32000), "{path}");
    }
    assert_eq!(server.client().await.ask("POST", "/mcpx", &headers, list.as_bytes()).await.status, 404);
    assert_eq!(server.client().await.ask("PUT", "/mcp", &headers, b"").await.refusal(), (405, -32000));
    server.stop().await;
}

#[tokio::test]
async fn a_plain_get_shows_the_status() {
    let server = Server::start().await;
    let answer = server.client().await.ask("GET", "/mcp", &[("x-tenant", "alice")], b"").await;
    assert_eq!(answer.json(), json!({ "status": "fine", "tenant": "alice" }));
    let stream = server.client().await.ask("GET", "/mcp", &[("accept", "text/event-stream")], b"").await;
    assert_eq!(stream.refusal(), (405, -32000), "without a session there is no stream");
    server.stop().await;
}

/// A28.
#[tokio::test]
async fn the_modern_revision_says_everything_in_each_request() {
    let server = Server::start().await;
    let ask = async |(headers, body): (Vec<(String, String)>, Value)| server.post(&borrowed(&headers), &body).await;

    let answer = ask(modern(1, "server/discover", json!({}))).await;
    assert_eq!(answer.status, 200);
    assert!(answer.json()["result"]["supportedVersions"].as_array().unwrap().contains(&json!("2026-07-28")));
    let answer = ask(modern(2, "tools/call", json!({ "name": "echo", "arguments": { "text": "hi" } }))).await;
    assert_eq!((answer.status, answer.tool_text().as_str()), (200, "hi"));
    assert_eq!(answer.json()["result"]["resultType"], "complete");
    assert_eq!(answer.header("mcp-session-id"), None);

    let (mut headers, body) = modern(3, "tools/call", json!({ "name": "echo" }));
    headers.retain(|(name, _)| name != "mcp-method");
    assert_eq!(ask((headers.clone(), body.clone())).await.refusal(), (400, -32020));
    headers.push(("mcp-method".into(), "tools/list".into()));
    let answer = ask((headers, body)).await;
    assert_eq!((answer.refusal(), &answer.json()["id"]), ((400, -32020), &json!(3)));

    let (mut headers, body) = modern(4, "tools/call", json!({ "name": "echo" }));
    headers.retain(|(name, _)| name != "mcp-name");
    assert_eq!(ask((headers.clone(), body.clone())).await.refusal(), (400, -32020));
    headers.push(("mcp-name".into(), "=?base64?ZWNobw==?=".into()));
    assert_eq!(ask((headers.clone(), body.clone())).await.status, 200);
    headers.push(("mcp-name".into(), "echo".into()));
    assert_eq!(ask((headers, body)).await.refusal(), (400, -32020), "given twice");

    let (mut headers, body) = modern(5, "tools/list", json!({}));
    headers.retain(|(name, _)| name != "mcp-protocol-version");
    assert_eq!(ask((headers.clone(), body.clone())).await.refusal(), (400, -32020));
    headers.push(("mcp-protocol-version".into(), "2025-11-25".into()));
    assert_eq!(ask((headers.clone(), body.clone())).await.refusal(), (400, -32020));
    let mut bare = body.clone();
    bare["params"] = json!({});
    let (headers, _) = modern(5, "tools/list", json!({}));
    assert_eq!(ask((headers.clone(), bare)).await.refusal(), (400, -32602));
    let mut half = body.clone();
    half["params"]["_meta"].as_object_mut().unwrap().remove("io.modelcontextprotocol/clientCapabilities");
    assert_eq!(ask((headers, half)).await.refusal(), (400, -32602));

    let (mut headers, mut body) = modern(6, "tools/list", json!({}));
    headers[0].1 = "2099-01-01".into();
    body["params"]["_meta"]["io.modelcontextprotocol/protocolVersion"] = "2099-01-01".into();
    assert_eq!(ask((headers, body)).await.refusal(), (400, -32022));
    assert_eq!(
        server.post(&[("mcp-protocol-version", "1999-01-01")], &request(7, "ping", json!({}))).await.refusal(),
        (400, -32600)
    );

    assert_eq!(ask(modern(8, "no/such", json!({}))).await.refusal(), (404, -32601));
    assert_eq!(ask(modern(9, "prompts/list", json!({}))).await.refusal(), (404, -32601));
    assert_eq!(ask(modern(10, "subscriptions/listen", json!({ "notifications": {} }))).await.refusal(), (404, -32601));
    assert_eq!(ask(modern(11, "tools/call", json!({ "name": "nothing" }))).await.refusal(), (200, -32602));
    server.stop().await;
}

/// A28.
#[tokio::test]
async fn repeated_arguments_have_to_agree() {
    let server = Server::start().await;
    let (headers, body) = modern(1, "tools/call", json!({ "name": "repeated", "arguments": { "text": "Zürich" } }));
    let ask = async |value: Option<&str>| {
        let value = value.map(|value| ("Mcp-Param-Text", value));
        server.post(&[borrowed(&headers), value.into_iter().collect()].concat(), &body).await
    };
    assert_eq!(ask(None).await.refusal(), (400, -32020));
    assert_eq!(ask(Some("Basel")).await.refusal(), (400, -32020));
    assert_eq!(ask(Some("=?base64?!!?=")).await.refusal(), (400, -32020));
    assert_eq!(ask(Some("=?base64?WsO8cmljaA==?=")).await.tool_text(), "Zürich");
    server.stop().await;
}

#[tokio::test]
async fn batches_are_of_the_oldest_revisions() {
    let server = Server::start().await;
    let batch = json!([
        call(1, "echo", json!({ "text": "one" })),
        notification("notifications/initialized", json!({})),
        { "jsonrpc": "2.0", "id": 2 },
        request(3, "ping", json!({})),
        initialize("2024-11-05"),
    ]);
    let answer = server.post(&[], &batch).await;
    assert_eq!(answer.status, 200);
    let mut answers = answer.json().as_array().unwrap().clone();
    answers.sort_by_key(|answer| answer["id"].as_i64());
    let shape = |answer: &Value| (answer["id"].clone(), answer["error"]["code"].clone());
    assert_eq!(
        answers.iter().map(shape).collect::<Vec<_>>(),
        [(json!(0), json!(-32600)), (json!(1), Value::Null), (json!(2), json!(-32600)), (json!(3), Value::Null)]
    );
    assert_eq!(server.post(&[], &json!([notification("notifications/initialized", json!({}))])).await.status, 202);
    assert_eq!(server.post(&[], &json!([])).await.refusal(), (200, -32600));
    let many = |n: usize| Value::Array((0..n).map(|id| request(id, "ping", json!({}))).collect());
    assert_eq!(server.post(&[], &many(50)).await.json().as_array().unwrap().len(), 50);
    assert_eq!(server.post(&[], &many(51)).await.refusal(), (200, -32600));
    for (version, status) in [("2025-06-18", 200), ("2025-11-25", 200), ("2026-07-28", 400)] {
        let answer = server.post(&[("mcp-protocol-version", version)], &many(2)).await;
        assert_eq!(answer.refusal(), (status, -32600), "{version}");
    }
    let newer = session(&server, "2025-06-18", &[]).await;
    assert_eq!(server.post(&[("mcp-session-id", &newer)], &many(2)).await.refusal(), (200, -32600));
    let older = session(&server, "2025-03-26", &[]).await;
    assert_eq!(server.post(&[("mcp-session-id", &older)], &many(2)).await.status, 200);
    let stream = server.post(&[("accept", "text/event-stream")], &many(2)).await;
    assert!(String::from_utf8(stream.body).unwrap().starts_with("data: [{"));
    server.stop().await;
}

/// Every way to name a revision decides what is sent: a session, a header, the request itself, nothing, and all of these for
/// each message of a batch.
#[tokio::test]
async fn an_answer_has_only_what_the_revision_has() {
    let server = Server::start().await;
    let link = call(1, "link", json!({}));
    let kinds = |result: &Value| -> Vec<String> {
        result["content"].as_array().unwrap().iter().map(|block| block["type"].as_str().unwrap().to_owned()).collect()
    };
    let check = |how: &str, result: &Value, version: Option<&str>| {
        let (audio, links) = (version >= Some("2025-03-26"), version >= Some("2025-06-18"));
        let expected = ["text", if audio { "audio" } else { "resource" }, if links { "resource_link" } else { "text" }];
        assert_eq!(kinds(result), expected, "{how} {version:?}: {result}");
        let last = if links { &result["content"][2]["uri"] } else { &result["content"][2]["text"] };
        let text = format!("\"plot.png\" (image/png, 9 bytes): {LINK}");
        assert_eq!(last.as_str(), Some(if links { LINK } else { &text }), "{how} {version:?}: {result}");
        // The documents print it in answers to a plain POST.
        let is_structured = links || version.is_none();
        assert_eq!(result.get("structuredContent").is_some(), is_structured, "{how} {version:?}: {result}");
        assert_eq!(result.get("resultType").is_some(), version == Some("2026-07-28"), "{how} {version:?}: {result}");
    };
    check("bare", &server.post(&[], &link).await.json()["result"], None);
    check("a bare batch", &server.post(&[], &json!([link])).await.json()[0]["result"], None);
    for version in ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"] {
        let id = session(&server, version, &[]).await;
        let (of_session, named) = ([("mcp-session-id", id.as_str())], [("mcp-protocol-version", version)]);
        check("a session", &server.post(&of_session, &link).await.json()["result"], Some(version));
        check("a header", &server.post(&named, &link).await.json()["result"], Some(version));
        if version < "2025-06-18" {
            let batch = json!([link]);
            check("a batch", &server.post(&of_session, &batch).await.json()[0]["result"], Some(version));
            check("a named batch", &server.post(&named, &batch).await.json()[0]["result"], Some(version));
        }
    }
    let (headers, link) = modern(1, "tools/call", json!({ "name": "link", "arguments": {} }));
    check("itself", &server.post(&borrowed(&headers), &link).await.json()["result"], Some("2026-07-28"));
    server.stop().await;
}

#[tokio::test]
async fn a_batch_counts_as_many_requests_as_it_has_messages() {
    let server = Server::start().await;
    let batch = |n: usize| Value::Array((0..n).map(|id| request(id, "ping", json!({}))).collect());
    assert_eq!(server.post(&[("x-tenant", "hasty")], &batch(9)).await.status, 200);
    let answer = server.post(&[("x-tenant", "hasty")], &batch(2)).await;
    assert_eq!((answer.status, answer.header("retry-after")), (429, Some("1")));
    server.stop().await;
}

#[tokio::test]
async fn a_panic_is_an_answer() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let answer = client.post(&[], &call(1, "panic", json!({}))).await;
    assert_eq!(answer.refusal(), (200, -32603));
    assert_eq!(answer.json()["error"]["message"], "internal error in panic: the call was given up");
    assert_eq!(client.post(&[], &call(2, "echo", json!({ "text": "still here" }))).await.tool_text(), "still here");
    server.stop().await;
}

#[tokio::test]
async fn an_answer_over_the_limit_says_so() {
    let server = Server::start().await;
    let answer = server.post(&[BOTH], &call("big", "huge", json!({}))).await;
    assert_eq!(answer.refusal(), (200, -32603));
    assert_eq!(answer.json()["id"], "big");
    assert!(answer.json()["error"]["message"].as_str().unwrap().contains("over the limit of 8388608 bytes"));
    server.stop().await;
}

#[tokio::test]
async fn members_beside_the_content_arrive() {
    let server = Server::start().await;
    let legacy = server.post(&[], &call(1, "beside", json!({}))).await.json();
    let (headers, body) = modern(1, "tools/call", json!({ "name": "beside" }));
    let modern = server.post(&borrowed(&headers), &body).await.json();
    for answer in [legacy, modern] {
        assert_eq!(answer["result"]["session_id"], "s-1");
        assert_eq!(answer["result"]["content"][0]["text"], "and more");
    }
    server.stop().await;
}

#[tokio::test]
async fn the_caller_reaches_the_service() {
    let server = Server::start().await;
    let who = call(1, "who", json!({}));
    assert_eq!(server.post(&[], &who).await.tool_text(), "local -");
    assert_eq!(server.post(&[("x-tenant", "alice")], &who).await.tool_text(), "alice -");
    let id = session(&server, "2025-11-25", &[("x-tenant", "alice")]).await;
    let answer = server.post(&[("x-tenant", "alice"), ("mcp-session-id", &id)], &who).await;
    assert_eq!(answer.tool_text(), format!("alice {id}"));
    let (mut headers, body) = modern(1, "tools/call", json!({ "name": "who" }));
    headers.extend([("x-tenant".into(), "bob".into()), ("mcp-session-id".into(), id)]);
    assert_eq!(
        server.post(&borrowed(&headers), &body).await.tool_text(),
        "bob -",
        "since 2026-07-28 there are no sessions"
    );
    server.stop().await;
}

/// X25.
#[tokio::test]
async fn headers_of_proxies_change_nothing() {
    let server = Server::start().await;
    let spoofed = [
        ("x-user", "root"),
        ("x-forwarded-for", "10.0.0.1"),
        ("x-forwarded-host", "evil.example"),
        ("forwarded", "for=x"),
    ];
    assert_eq!(server.post(&spoofed, &call(1, "who", json!({}))).await.tool_text(), "local -");
    server.stop().await;
}

#[tokio::test]
async fn progress_makes_a_stream_for_those_who_take_one() {
    let server = Server::start().await;
    let mut ticks = call(1, "ticks", json!({}));
    ticks["params"]["_meta"] = json!({ "progressToken": "t" });
    let mut client = server.client().await;
    client.send_json(&[BOTH], &ticks).await;
    assert_eq!(client.head().await.header("content-type"), Some("text/event-stream"));
    for count in 0..3 {
        let (_, event) = client.event().await.unwrap();
        assert_eq!(
            (&event["method"], &event["params"]["progress"]),
            (&json!("notifications/progress"), &json!(f64::from(count)))
        );
        assert_eq!(event["params"]["progressToken"], "t");
    }
    let (_, event) = client.event().await.unwrap();
    assert_eq!(event["result"]["content"][0]["text"], "ticked");
    assert_eq!(client.event().await, None);
    assert_eq!(client.post(&[], &ticks).await.tool_text(), "ticked", "as JSON there is only the answer");
    server.stop().await;
}

#[tokio::test]
async fn a_long_call_shows_signs_of_life() {
    let fast = Duration::from_millis(20);
    let server = Server::with(HttpOptions { patience: fast, keep_alive: fast, ..HttpOptions::default() }).await;
    let (headers, body) = modern(1, "tools/call", json!({ "name": "sleep", "arguments": { "ms": 300 } }));
    let bare = call(1, "sleep", json!({ "ms": 300 }));
    for (headers, body) in [(borrowed(&headers), &body), (vec![BOTH], &bare)] {
        let answer = server.post(&headers, body).await;
        assert_eq!((answer.status, answer.header("content-type")), (200, Some("text/event-stream")));
        let text = String::from_utf8(answer.body).unwrap();
        assert!(text.starts_with(": alive\n\n") && text.contains("\n\ndata: {") && text.contains("slept"), "{text}");
    }
    server.stop().await;
}
