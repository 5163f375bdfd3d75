//! What the protocol's conformance suite talks to: its fixtures, on the transport of `sandpool serve` (`scripts/test-conformance`).
//!
//! Prints its address and serves until its input ends. No part of the program.

mod fixtures;

use std::collections::BTreeMap;
use std::io::Write;
use std::net::SocketAddr;
use std::sync::Arc;

use http::request::Parts;
use mcp::Caller;
use mcp::http::{App, Authenticator, Denied, Endpoint, HttpOptions, serve};
use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

struct Anyone;

impl Authenticator for Anyone {
    fn admit(&self, _: &Parts, _: SocketAddr) -> Result<Caller, Denied> {
        Ok(Caller::local(None))
    }
}

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    writeln!(std::io::stdout(), "http://{}/mcp", listener.local_addr()?)?;
    let fixtures = fixtures::Fixtures::new();
    let tools = fixtures.clone();
    let endpoint = Endpoint::new(move |_, _| fixtures.clone(), |_| Box::pin(async { serde_json::Value::Null }))
        .with_schemas(move |name| tools.schema(name));
    let app = App {
        counters: Default::default(),
        log: |_| {},
        options: HttpOptions { open: true, ..HttpOptions::default() },
        authenticator: Arc::new(Anyone),
        endpoints: BTreeMap::from([("conformance".into(), endpoint)]),
        default: "conformance".into(),
        routes: axum::Router::new(),
    };
    let (shutdown, now) = (CancellationToken::new(), CancellationToken::new());
    let end = shutdown.clone();
    tokio::spawn(async move {
        let _ = tokio::io::stdin().read_to_end(&mut Vec::new()).await;
        end.cancel();
    });
    serve(listener, app, shutdown, now).await;
    Ok(())
}
