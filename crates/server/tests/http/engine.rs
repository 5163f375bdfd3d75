//! The real handler behind the transport: who calls, and from where, is what the engine is told.

use std::sync::{Arc, Mutex};

use engine::op::{Call, EngineError, Op};
use futures_util::FutureExt;
use serde_json::json;
use server::dialect::{Links, Options, agentrun};
use server::http::{Endpoint, HttpOptions};
use server::mcp::{Execute, Executing, McpServer, Surface};
use tokio_util::sync::CancellationToken;

use crate::client::{Server, call, session};
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
    let handler = McpServer::new(recorder.clone(), surface, CancellationToken::new());
    let server = Server::serving(HttpOptions::default(), Toy::default(), || {
        let handler = handler.clone();
        Endpoint::new(move || handler.clone(), |_| std::future::ready(json!({})).boxed())
    })
    .await;
    let list = call(1, "list_contexts", json!({}));
    assert!(server.post(&[("x-tenant", "alice")], &list).await.text().contains("SERVER_NOT_READY"));
    let id = session(&server, "2025-06-18", &[]).await;
    assert_eq!(server.post(&[("mcp-session-id", &id)], &list).await.status, 200);
    let calls = recorder.0.lock().unwrap().clone();
    assert_eq!(calls, [("alice".into(), "agentrun", None), ("local".into(), "agentrun", Some(id))]);
    server.stop().await;
}
