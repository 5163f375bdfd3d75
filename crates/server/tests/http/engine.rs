//! The real handler behind the transport: who calls, and from where, is what the engine is told.

use std::sync::{Arc, Mutex};

use dialects::{Links, Options, agentrun};
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
    for (headers, list) in [(Vec::new(), list), (borrowed(&headers), modern)] {
        let expected = plain.post(&headers, &list).await;
        assert!(expected.json()["result"]["tools"].as_array().unwrap().len() > 3, "{expected:?}");
        for _ in 0..2 {
            assert_eq!(prepared.post(&headers, &list).await.body, expected.body);
        }
    }
    prepared.stop().await;
    plain.stop().await;
}
