//! Connects to a target, using exactly the address that was checked.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper::StatusCode;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::denial::Denial;
use crate::gate::{Connection, ConnectionInfo};
use crate::limits::{Flow, Metered};
use crate::policy::DenyReason;
use crate::resolve::ResolveError;
use crate::target::Target;
use crate::upstream_proxy::{Carries, Route, UpstreamProxy};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout for a connection through an upstream proxy, which itself may have to wait for the host.
const UPSTREAM_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum number of addresses of a name that are tried.
const MAX_TRIED: usize = 3;

/// The reason why the proxy did not serve a request.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProxyError {
    #[error("{}", .0.sentence)]
    Denied(Denial),
    #[error("{0}")]
    Unresolved(#[from] ResolveError),
    #[error("{0} could not be reached: {1}")]
    Unreachable(String, &'static str),
    #[error("{0} did not answer in time")]
    TimedOut(String),
    #[error("the upstream proxy of this server failed: {0}")]
    Upstream(String),
    #[error("the upstream proxy of this server did not answer in time")]
    UpstreamTimedOut,
    #[error("{0}")]
    Malformed(String),
    #[error("the server has too many connections of all its sandboxes; try again later")]
    Busy,
}

impl ProxyError {
    pub(crate) fn status(&self) -> StatusCode {
        match self {
            Self::Denied(_) => StatusCode::FORBIDDEN,
            Self::Unresolved(ResolveError::NotFound(_)) | Self::Unreachable(..) | Self::Upstream(_) => {
                StatusCode::BAD_GATEWAY
            }
            Self::Unresolved(ResolveError::TimedOut(_)) | Self::TimedOut(_) | Self::UpstreamTimedOut => {
                StatusCode::GATEWAY_TIMEOUT
            }
            Self::Malformed(_) => StatusCode::BAD_REQUEST,
            Self::Busy => StatusCode::SERVICE_UNAVAILABLE,
        }
    }
}

impl Connection {
    pub(crate) fn deny(&self, what: &str, refusal: DenyReason) -> ProxyError {
        ProxyError::Denied(self.state.deny(what, refusal))
    }

    /// Returns the ways to the target that are allowed: its addresses, or an upstream proxy. The policy must already
    /// have allowed `info` without a route.
    pub(crate) async fn find(
        &self,
        what: &str,
        info: &ConnectionInfo,
        carries: Carries,
    ) -> Result<Vec<Route>, ProxyError> {
        let (Target { host, port }, shared) = (&info.target, &self.state.shared);
        if shared.routes.is_proxy(&info.target) {
            let remedy = "Ask for the host behind it, which the server then asks it for".into();
            let rule = "this is the upstream proxy of the server itself".into();
            return Err(self.deny(what, DenyReason { rule, remedy }));
        }
        if let Some(route) = shared.routes.upstream(&info.target, carries)
            && !shared.resolver.is_fixed(host)
        {
            let judged = self.state.judge(|policy| policy.routed(&info.target, &route));
            return judged.map(|()| vec![route]).map_err(|refusal| self.deny(what, refusal));
        }
        let found = shared.resolver.addresses(host, &self.state.tenant, &self.state.lookups).await?;
        let (mut allowed, mut refused) = (Vec::new(), None);
        for address in found.into_iter().map(|ip| SocketAddr::new(ip, *port)) {
            let route = Route::Direct(address);
            match self.state.judge(|policy| policy.routed(&info.target, &route)) {
                Ok(()) => allowed.push(route),
                Err(refusal) => {
                    // Only the log shows the address, because the sandbox must not learn where a name leads.
                    tracing::debug!(%host, %address, "a name leads to an address that is not allowed");
                    refused = refused.or(Some(refusal));
                }
            }
        }
        match refused {
            Some(refusal) if allowed.is_empty() => Err(self.deny(what, refusal)),
            _ => Ok(allowed),
        }
    }

    /// Connects by the first of `routes` that accepts a connection.
    pub(crate) async fn dial(
        &self,
        what: &str,
        mut info: ConnectionInfo,
        routes: &[Route],
    ) -> Result<(Flow<TcpStream>, Route), ProxyError> {
        let name = info.target.to_string();
        let mut error = None;
        for route in routes.iter().take(MAX_TRIED) {
            self.state.meter.dial().await;
            info.route = Some(route.clone());
            self.cross(info.clone()).map_err(|refusal| self.deny(what, refusal))?;
            let connected = match route {
                Route::Direct(address) => match timeout(CONNECT_TIMEOUT, TcpStream::connect(address)).await {
                    Ok(connected) => connected.map_err(|e| ProxyError::Unreachable(name.clone(), describe(&e))),
                    Err(_) => Err(ProxyError::TimedOut(name.clone())),
                },
                Route::Tunnel(proxy) => self.dial_upstream(proxy, Some(&info.target)).await,
                Route::Forward(proxy) => self.dial_upstream(proxy, None).await,
            };
            match connected {
                Ok(stream) => {
                    let _ = stream.set_nodelay(true);
                    let metered: Arc<dyn Metered> = Arc::clone(&self.state) as _;
                    return Ok((Flow::new(stream, Some(metered)), route.clone()));
                }
                Err(failed) => error = Some(failed),
            }
        }
        Err(error.unwrap_or(ProxyError::Unresolved(ResolveError::NotFound(name))))
    }

    /// Connects to an upstream proxy, and opens a tunnel to `target` if there is one.
    async fn dial_upstream(&self, proxy: &UpstreamProxy, target: Option<&Target>) -> Result<TcpStream, ProxyError> {
        let state = &self.state;
        let connecting = async {
            let found = state.shared.resolver.addresses(proxy.host(), &state.tenant, &state.lookups).await;
            let found = found.map_err(|e| match e {
                ResolveError::NotFound(_) => ProxyError::Upstream("its name was not found".into()),
                ResolveError::TimedOut(_) => ProxyError::UpstreamTimedOut,
            })?;
            let mut error = ProxyError::Upstream("its name was not found".into());
            for ip in found.into_iter().take(MAX_TRIED) {
                match TcpStream::connect(SocketAddr::new(ip, proxy.port())).await {
                    Ok(mut stream) => {
                        if let Some(target) = target {
                            proxy.open_tunnel(&mut stream, target).await?;
                        }
                        return Ok(stream);
                    }
                    Err(e) => error = ProxyError::Upstream(describe(&e).into()),
                }
            }
            Err(error)
        };
        let connected = timeout(UPSTREAM_TIMEOUT, connecting).await.unwrap_or(Err(ProxyError::UpstreamTimedOut));
        connected.inspect_err(|error| state.shared.routes.log(proxy, error))
    }
}

/// Describes an error in fixed words, because the operating system's own text might reveal details of the host.
fn describe(error: &std::io::Error) -> &'static str {
    match error.kind() {
        std::io::ErrorKind::ConnectionRefused => "the connection was refused",
        std::io::ErrorKind::HostUnreachable | std::io::ErrorKind::NetworkUnreachable => "there is no way to it",
        std::io::ErrorKind::ConnectionReset => "the connection was reset",
        _ => "it failed",
    }
}
