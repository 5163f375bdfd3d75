//! The real handler behind the transport: who calls, and from where, is what the engine is told.

use std::sync::{Arc, Mutex};

use dialects::{Dialect, Links, Options, agentrun, conversation, microsandbox};
use engine::op::{Call, EngineError, Op};
use futures_util::FutureExt;
use mcp::http::{Endpoint, HttpOptions};
use serde_json::json;
use server::handler::{Execute, Executing, Handlers, Surface};

use crate::client::{Server, borrowed, call, modern, request, session};
use crate::toy::Toy;

#[derive(Default)]
struct Recorder(Mutex<Vec<(String, &'static str, Option<String>)>>);

impl Execute for Recorder {
    fn execute<'a>(&'a self, call: &'a Call, _: Op) -> Executing<'a> {
        self.0.lock().unwrap().push((call.tenant.0.clone(), call.realm.0, call.connection.clone()));
        std::future::ready(Err(EngineError::NotReady("nothing is".into()))).boxed()
    }
}

#[tokio::test]
async fn the_engine_is_told_who_calls_and_from_where() {
    let recorder = Arc::new(Recorder::default());
    let surface = Arc::new(Surface::new(&agentrun::DIALECT, None, Options::default(), Links::default()));
    let handlers = Handlers::new(recorder.clone(), surface);
    let server = Server::serving(HttpOptions::default(), Toy::default(), || {
        let handlers = handlers.clone();
        Endpoint::new(move |caller, memory| handlers.of(caller, memory), |_| std::future::ready(json!({})).boxed())
    })
    .await;
    let list = call(1, "list_contexts", json!({}));
    assert!(server.post(&[("x-tenant", "alice")], &list).await.tool_text().contains("SERVER_NOT_READY"));
    let id = session(&server, "2025-06-18", &[]).await;
    assert_eq!(server.post(&[("mcp-session-id", &id)], &list).await.status, 200);
    let calls = recorder.0.lock().unwrap().clone();
    assert_eq!(calls, [("alice".into(), "agentrun", None), ("local".into(), "agentrun", Some(id))]);
    server.stop().await;
}

async fn served(recorder: &Arc<Recorder>, direct: bool) -> Server {
    let surface = Arc::new(Surface::new(&agentrun::DIALECT, None, Options::default(), Links::default()));
    let handlers = Handlers::new(recorder.clone(), surface);
    Server::serving(HttpOptions::default(), Toy::default(), || {
        let handlers = handlers.clone();
        let make = move |caller, memory| handlers.of(caller, memory);
        let endpoint = Endpoint::new(make, |_| std::future::ready(json!({})).boxed());
        if direct { endpoint.direct() } else { endpoint }
    })
    .await
}

/// W32: whatever is asked for, by whichever way, is asked for by whom the gate let in. A handler without a caller does not compile.
#[tokio::test]
async fn w32_every_request_is_its_caller_s() {
    for direct in [true, false] {
        let recorder = Arc::new(Recorder::default());
        let server = served(&recorder, direct).await;
        let asked = [
            call(1, "list_contexts", json!({})),
            request(2, "resources/list", json!({})),
            json!([call(3, "list_contexts", json!({})), request(4, "resources/list", json!({}))]),
        ];
        for message in &asked {
            assert_eq!(server.post(&[("x-tenant", "alice")], message).await.status, 200);
        }
        let calls = recorder.0.lock().unwrap().clone();
        assert_eq!(calls.len(), 4, "direct: {direct}");
        assert!(calls.iter().all(|(tenant, ..)| tenant == "alice"), "direct: {direct}: {calls:?}");
        server.stop().await;
    }
}

/// W29: the list is encoded once, and the same bytes as if it were encoded each time.
#[tokio::test]
async fn w29_a_prepared_list_is_the_list() {
    let recorder = Arc::new(Recorder::default());
    let (prepared, plain) = (served(&recorder, true).await, served(&recorder, false).await);
    let list = request("an id", "tools/list", json!({}));
    let (headers, modern) = modern("an id", "tools/list", json!({}));
    let older = ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"];
    let older = older.map(|version| (vec![("mcp-protocol-version", version)], list.clone()));
    for (headers, list) in [(Vec::new(), list), (borrowed(&headers), modern)].into_iter().chain(older) {
        let expected = plain.post(&headers, &list).await;
        assert!(expected.json()["result"]["tools"].as_array().unwrap().len() > 3, "{expected:?}");
        for _ in 0..2 {
            assert_eq!(prepared.post(&headers, &list).await.body, expected.body);
        }
    }
    prepared.stop().await;
    plain.stop().await;
}

/// Serves a dialect as `sandpool serve` does.
async fn serving(dialect: &'static Dialect) -> Server {
    let surface = Arc::new(Surface::new(dialect, None, Options::default(), Links::default()));
    let errors = surface.error_style();
    let handlers = Handlers::new(Arc::new(Recorder::default()), surface);
    Server::serving(HttpOptions::default(), Toy::default(), || {
        let handlers = handlers.clone();
        Endpoint::new(move |caller, memory| handlers.of(caller, memory), |_| std::future::ready(json!({})).boxed())
            .direct()
            .with_errors(errors)
            .with_open_stream(dialect.open_stream)
    })
    .await
}

/// Posts each text, and compares the bytes of the answer.
async fn assert_answers(server: &Server, texts: &[(&str, &str)]) {
    let json = [("content-type", "application/json")];
    for (text, expected) in texts {
        let answer = server.client().await.ask("POST", "/mcp", &json, text.as_bytes()).await;
        assert_eq!((answer.status, &*String::from_utf8_lossy(&answer.body)), (200, *expected), "{text}");
    }
}

/// The errors that the code of the microsandbox document makes, byte for byte.
#[tokio::test]
async fn the_errors_of_the_microsandbox_document() {
    let server = serving(&microsandbox::DIALECT).await;
    let invalid = r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":"Invalid Request"}}"#;
    let call = r#"{"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "execute_nothing", "arguments": {}}}"#;
    assert_answers(
        &server,
        &[
            (r#"{"id": 1, "method": "tools/list"}"#, invalid),
            (r#"{"jsonrpc": "1.0", "id": 1, "method": "tools/list"}"#, invalid),
            (r#"{"jsonrpc": "2.0", "id": 1}"#, invalid),
            (r#"{"jsonrpc": "2.0", "id": 1, "method": 5}"#, invalid),
            ("[]", invalid),
            ("\"tools/list\"", invalid),
            (
                r#"[{"id": 1, "method": "tools/list"}]"#,
                r#"[{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":"Invalid Request"}}]"#,
            ),
            (
                r#"{"jsonrpc": "2.0", "id": "a", "method": "tools/walk"}"#,
                r#"{"jsonrpc":"2.0","id":"a","error":{"code":-32601,"message":"Method not found"}}"#,
            ),
            (
                r#"{"jsonrpc": "2.0", "id": 3, "method": "prompts/list"}"#,
                r#"{"jsonrpc":"2.0","id":3,"error":{"code":-32601,"message":"Method not found"}}"#,
            ),
            (call, r#"{"jsonrpc":"2.0","id":7,"error":{"code":-32601,"message":"Tool execute_nothing not found"}}"#),
        ],
    )
    .await;
    server.stop().await;
}

/// The error that the document of `conversation` prints, and others in its form.
#[tokio::test]
async fn errors_of_a_conversation_have_data() {
    let server = serving(&conversation::DIALECT).await;
    let call = |arguments: &str| {
        format!(
            r#"{{"jsonrpc": "2.0", "id": 5, "method": "tools/call", "params": {{"name": "sandbox.run_code", "arguments": {arguments}}}}}"#
        )
    };
    let missing =
        r#"{"jsonrpc":"2.0","id":5,"error":{"code":-32602,"message":"conversationId is required","data":null}}"#;
    assert_answers(
        &server,
        &[
            (&call(r#"{"language": "python", "code": "1"}"#), missing),
            (
                r#"{"jsonrpc": "2.0", "id": 1, "method": "tools/walk"}"#,
                r#"{"jsonrpc":"2.0","id":1,"error":{"code":-32601,"message":"method not found: tools/walk","data":null}}"#,
            ),
            (
                r#"{"jsonrpc": "2.0", "id": 1}"#,
                r#"{"jsonrpc":"2.0","id":1,"error":{"code":-32600,"message":"`method` is missing","data":null}}"#,
            ),
        ],
    )
    .await;
    server.stop().await;
}

#[tokio::test]
async fn the_stream_of_a_conversation_needs_no_session() {
    let server = serving(&conversation::DIALECT).await;
    let stream = [("accept", "text/event-stream")];
    let mut client = server.client().await;
    client.send("GET", "/mcp", &stream, b"").await;
    let head = client.head().await;
    assert_eq!((head.status, head.header("content-type")), (200, Some("text/event-stream")));
    // A revision without such streams, and a session that does not exist, are still refused.
    let modern = [stream[0], ("mcp-protocol-version", "2026-07-28")];
    assert_eq!(server.client().await.ask("GET", "/mcp", &modern, b"").await.refusal(), (405, -32000));
    let unknown = [stream[0], ("mcp-session-id", "no-such-session")];
    assert_eq!(server.client().await.ask("GET", "/mcp", &unknown, b"").await.status, 404);
    server.stop().await;

    let server = serving(&agentrun::DIALECT).await;
    assert_eq!(server.client().await.ask("GET", "/mcp", &stream, b"").await.refusal(), (405, -32000));
    server.stop().await;
}
