//! Connections to hosts for HTTP requests. The last connection stays open for the client's next request to the same
//! host. That request is resolved and judged like any other, and has to lead to the exact address of the open
//! connection, or through the same upstream proxy.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use hyper::body::{Body as _, Incoming};
use hyper::client::conn::http1::{Builder, SendRequest};
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::time::{Instant, timeout};

use crate::connect::ProxyError;
use crate::gate::{Connection, ConnectionInfo, Visibility};
use crate::http::{MAX_HEAD, MAX_HEADERS};
use crate::lock;
use crate::target::Target;
use crate::upstream_proxy::{Carries, Route};
use crate::vault::{InjectedSecrets, is_compressed};
use crate::wire::Wire;

/// Time for which an idle connection may be reused. It is shorter than hosts usually keep connections open, so that a
/// request does not meet a connection that is just being closed.
const REUSE_WITHIN: Duration = Duration::from_secs(3);
/// Maximum wait for the end of the previous response on a connection.
const READY_WAIT: Duration = Duration::from_millis(200);

/// The idle connection to a host, one for each client connection.
#[derive(Default)]
pub(crate) struct IdleUpstream(Mutex<Option<Upstream>>);

struct Upstream {
    target: Target,
    route: Route,
    sender: SendRequest<Incoming>,
    used: Instant,
}

impl IdleUpstream {
    /// Sends a request. The policy must already have allowed `info` without a route. `tls` is the name for which the
    /// host has to present a certificate. With the response comes what has to be masked in it, if an upstream proxy
    /// got credentials with the request.
    pub(crate) async fn send(
        &self,
        connection: &Connection,
        what: &str,
        info: ConnectionInfo,
        tls: Option<&str>,
        mut request: Request<Incoming>,
    ) -> Result<(Response<Incoming>, Option<InjectedSecrets>), ProxyError> {
        let carries = match (tls, &info.inside, &info.name) {
            (Some(_), ..) => Carries::Tunnel,
            (None, Visibility::Method(_), None) => Carries::Requests,
            _ => Carries::HttpTunnel,
        };
        let routes = connection.find(what, &info, carries).await?;
        let forwarder = routes.iter().find_map(|route| match route {
            Route::Forward(proxy) => Some(Arc::clone(proxy)),
            _ => None,
        });
        if let Some(proxy) = &forwarder {
            proxy.address(&info.target, &mut request)?;
        }
        let response = self.exchange(connection, what, &info, &routes, tls, request).await?;
        let Some(proxy) = forwarder else { return Ok((response, None)) };
        if response.status() == StatusCode::PROXY_AUTHENTICATION_REQUIRED {
            let error = proxy.refused(&info.target, response.status());
            connection.state.shared.routes.log(&proxy, &error);
            return Err(error);
        }
        if proxy.has_credentials() && is_compressed(response.headers()) && !response.body().is_end_stream() {
            let why = "the answer is compressed, although the request forbade it, so nobody can tell whether it shows the credentials";
            return Err(ProxyError::Upstream(why.into()));
        }
        let masked = proxy.has_credentials().then(|| proxy.masked());
        Ok((response, masked))
    }

    async fn exchange(
        &self,
        connection: &Connection,
        what: &str,
        info: &ConnectionInfo,
        routes: &[Route],
        tls: Option<&str>,
        mut request: Request<Incoming>,
    ) -> Result<Response<Incoming>, ProxyError> {
        let lost = || ProxyError::Unreachable(info.target.to_string(), "its answer is not HTTP, or was cut off");
        if let Some(mut upstream) = self.take(&info.target, routes).await {
            let reused = ConnectionInfo { route: Some(upstream.route.clone()), ..info.clone() };
            connection.cross(reused).map_err(|refusal| connection.deny(what, refusal))?;
            match upstream.sender.try_send_request(request).await {
                Ok(response) => return Ok(self.store(upstream, response)),
                // The host closed the connection before any of the request was written.
                Err(mut e) => request = e.take_message().ok_or_else(lost)?,
            }
        }
        let mut upstream = open(connection, what, info.clone(), routes, tls).await?;
        let response = upstream.sender.send_request(request).await.map_err(|_| lost())?;
        Ok(self.store(upstream, response))
    }

    fn store(&self, upstream: Upstream, response: Response<Incoming>) -> Response<Incoming> {
        *lock(&self.0) = Some(Upstream { used: Instant::now(), ..upstream });
        response
    }

    async fn take(&self, target: &Target, routes: &[Route]) -> Option<Upstream> {
        let mut upstream = lock(&self.0).take()?;
        let fits =
            upstream.target == *target && routes.contains(&upstream.route) && upstream.used.elapsed() < REUSE_WITHIN;
        (fits && matches!(timeout(READY_WAIT, upstream.sender.ready()).await, Ok(Ok(())))).then_some(upstream)
    }
}

async fn open(
    connection: &Connection,
    what: &str,
    info: ConnectionInfo,
    routes: &[Route],
    tls: Option<&str>,
) -> Result<Upstream, ProxyError> {
    let target = info.target.clone();
    let (stream, route) = connection.dial(what, info, routes).await?;
    let mut stream: Wire = Box::new(stream);
    if let Some(name) = tls {
        let lost = |_| ProxyError::Unreachable(target.to_string(), "its TLS is not to be trusted");
        stream = connection.state.shared.interceptor.connect(stream, name).await.map_err(lost)?;
    }
    let lost = |_| ProxyError::Unreachable(target.to_string(), "the connection was lost");
    let (sender, driving) = Builder::new()
        .max_headers(MAX_HEADERS)
        .max_buf_size(MAX_HEAD)
        .preserve_header_case(true)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(lost)?;
    connection.spawn(async move {
        if let Err(e) = driving.with_upgrades().await {
            tracing::debug!(error = %e, "a connection to a host ended");
        }
    });
    Ok(Upstream { target, route, sender, used: Instant::now() })
}
