//! Connects [`Auth`] to the HTTP transport, and serves the metadata documents.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use engine::op::Tenant;
use http::header::CONTENT_TYPE;
use http::request::Parts;
use http::{HeaderMap, HeaderValue, StatusCode};
use mcp::Caller;
use mcp::http::{Authenticator, Denied};
use telemetry::metrics::DenialReason;
use telemetry::observe::Observer;

use super::{Auth, WELL_KNOWN};

/// An authenticator that reports denied callers to an observer.
pub(crate) struct Watched {
    pub auth: Arc<Auth>,
    pub observer: Arc<Observer>,
}

impl Authenticator for Watched {
    fn admit(&self, parts: &Parts, peer: SocketAddr) -> Result<Caller, Denied> {
        let caller = self.auth.admit(parts).map_err(|denied| self.report(denied, peer))?;
        let super::Caller { tenant, quotas, membership } = caller;
        Ok(Caller { tenant, connection: None, show_host_paths: quotas.show_host_paths, membership })
    }

    fn version(&self) -> u64 {
        self.auth.version()
    }

    fn confirm(&self, parts: &Parts, peer: SocketAddr, caller: &Caller) -> Result<(), Denied> {
        self.auth.confirm(parts, &caller.membership, &caller.tenant).map_err(|denied| self.report(denied, peer))
    }

    fn throttled(&self, tenant: &Tenant, peer: SocketAddr, why: &str) {
        self.observer.throttled(DenialReason::Quota, &tenant.0, why, peer);
    }
}

impl Watched {
    fn report(&self, denied: super::Denied, peer: SocketAddr) -> Denied {
        let message = denied.message();
        match &denied {
            super::Denied::Unknown { .. } => self.observer.denied(DenialReason::Auth, &message, peer),
            super::Denied::TooFast { tenant, .. } => {
                self.observer.throttled(DenialReason::Rate, &tenant.0, &message, peer);
            }
        }
        denied.into()
    }
}

impl From<super::Denied> for Denied {
    fn from(denied: super::Denied) -> Self {
        let (name, value) = denied.header();
        let value = HeaderValue::from_str(&value).ok().map(|value| (name, value));
        Self { status: denied.status(), headers: Box::new(HeaderMap::from_iter(value)), body: denied.body() }
    }
}

/// Returns the routes of the RFC 9728 documents. They need no token, because they say where to get one.
pub(crate) fn routes(auth: Arc<Auth>) -> Router {
    Router::new()
        .route(WELL_KNOWN, get(metadata))
        .route(&format!("{WELL_KNOWN}/{{*path}}"), get(metadata))
        .with_state(auth)
}

async fn metadata(State(auth): State<Arc<Auth>>, request: Request) -> Response {
    let (parts, _) = request.into_parts();
    let path = parts.uri.path().strip_prefix(WELL_KNOWN).unwrap_or_default();
    match auth.metadata(&parts, path) {
        Some(document) => ([(CONTENT_TYPE, "application/json")], document.to_string()).into_response(),
        None => StatusCode::NOT_FOUND.into_response(),
    }
}

#[cfg(test)]
mod tests {
    use axum::body::{Body, to_bytes};
    use serde_json::{Value, json};

    use super::super::{AuthConfig, Secret};
    use super::*;
    use telemetry::metrics::Gauges;

    fn auth() -> Arc<Auth> {
        let token = Some(Secret::parse("correct-horse-battery-staple").unwrap());
        let servers = vec!["https://id.example.com".into()];
        Arc::new(Auth::open(AuthConfig { token, servers, ..AuthConfig::default() }).unwrap())
    }

    fn request(path: &str) -> Request {
        http::Request::get(path).header("host", "sandbox.example.com").body(Body::empty()).unwrap()
    }

    #[tokio::test]
    async fn the_challenge_leads_to_the_document_of_the_endpoint() {
        let (parts, _) = request("/mcp/agentrun").into_parts();
        let door = Watched { auth: auth(), observer: Arc::default() };
        let denied = door.admit(&parts, "192.0.2.7:1".parse().unwrap()).unwrap_err();
        assert_eq!(denied.status, 401);
        let page = door.observer.metrics.text(&Gauges::default());
        assert!(page.contains("sandpool_denials_total{reason=\"auth\"} 1\n"), "{page}");
        let challenge = denied.headers["www-authenticate"].to_str().unwrap();
        let url = challenge.split_once("resource_metadata=\"").unwrap().1.trim_end_matches('"');
        let path = url.strip_prefix("http://sandbox.example.com").unwrap();
        let answer = metadata(State(auth()), request(path)).await;
        assert_eq!(
            (answer.status(), answer.headers()["content-type"].to_str().unwrap()),
            (StatusCode::OK, "application/json")
        );
        let document: Value = serde_json::from_slice(&to_bytes(answer.into_body(), 4096).await.unwrap()).unwrap();
        assert_eq!(
            document,
            json!({"resource": "http://sandbox.example.com/mcp/agentrun", "resource_name": "Sandpool",
                "bearer_methods_supported": ["header"], "authorization_servers": ["https://id.example.com"]})
        );
        let nothing = metadata(State(auth()), request(&format!("{WELL_KNOWN}/files/x"))).await;
        assert_eq!(nothing.status(), StatusCode::NOT_FOUND);
    }

    #[test]
    fn the_routes_are_well_formed() {
        let _ = routes(auth()); // axum panics on a malformed route
    }
}
