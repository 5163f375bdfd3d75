//! What is logged of a request, in the words and the order of the document.

use std::io::Write;
use std::sync::{Arc, Mutex};

use serde_json::json;
use tracing_subscriber::fmt::MakeWriter;

use crate::client::{Server, call, request};

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

/// One thread: what the server's tasks log is this test's.
#[tokio::test(flavor = "current_thread")]
async fn a_request_is_told_in_the_document_s_lines() {
    let lines = Lines::default();
    let log = tracing_subscriber::fmt().json().with_env_filter("sandpool=debug").with_writer(lines.clone()).finish();
    let guard = tracing::subscriber::set_default(log);
    let server = Server::start().await;
    server.post(&[("x-tenant", "alice")], &request(1, "initialize", json!({ "protocolVersion": "2024-11-05" }))).await;
    server.post(&[], &call("x\ny", "echo", json!({ "text": "t", "environment": { "KEY": "secret-value" } }))).await;
    server.stop().await;
    drop(guard);
    let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
    assert!(!text.contains("secret-value"), "{text}");
    let events: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let ours: Vec<_> = events.iter().filter(|event| event["target"] == "sandpool::http").collect();
    let told: Vec<_> = ours
        .iter()
        .map(|event| {
            let message = event["fields"]["message"].as_str().unwrap();
            let message = message.split_once(" from 127.0.0.1:").map_or(message, |(head, _)| head);
            let message = message.split_once(": {").map_or(message, |(head, _)| head);
            (event["level"].as_str().unwrap(), message)
        })
        .collect();
    assert_eq!(
        told,
        [
            ("INFO", "[HTTP] MCP request"),
            ("DEBUG", "[HTTP] Request body"),
            ("INFO", "[HTTP] Parsed JSON-RPC request: method=initialize, id=1"),
            ("INFO", "[HTTP] Sending response for method=initialize"),
            ("DEBUG", "[HTTP] Response"),
            ("INFO", "[HTTP] MCP request"),
            ("DEBUG", "[HTTP] Request body"),
            ("INFO", "[HTTP] Parsed JSON-RPC request: method=tools/call, id=x\\ny"),
            ("INFO", "[HTTP] Sending response for method=tools/call"),
            ("DEBUG", "[HTTP] Response"),
        ]
    );
    let spans: Vec<_> = ours.iter().map(|event| (&event["span"]["request_id"], &event["span"]["tenant"])).collect();
    assert!(spans[..5].iter().all(|span| *span == spans[0] && span.0.is_string() && span.1 == "alice"), "{spans:?}");
    assert!(spans[5..].iter().all(|span| *span == spans[5] && span.0 != spans[0].0), "{spans:?}");
}
