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

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
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
    #[error("{0}")]
    Malformed(String),
    #[error("the server has too many connections of all its sandboxes; try again later")]
    Busy,
}

impl ProxyError {
    pub(crate) fn status(&self) -> StatusCode {
        match self {
            Self::Denied(_) => StatusCode::FORBIDDEN,
            Self::Unresolved(ResolveError::NotFound(_)) | Self::Unreachable(..) => StatusCode::BAD_GATEWAY,
            Self::Unresolved(ResolveError::TimedOut(_)) | Self::TimedOut(_) => StatusCode::GATEWAY_TIMEOUT,
            Self::Malformed(_) => StatusCode::BAD_REQUEST,
            Self::Busy => StatusCode::SERVICE_UNAVAILABLE,
        }
    }
}

impl Connection {
    pub(crate) fn deny(&self, what: &str, refusal: DenyReason) -> ProxyError {
        ProxyError::Denied(self.state.deny(what, refusal))
    }

    /// Resolves the target and returns those of its addresses that are allowed. The policy must already have allowed
    /// `info` without an address.
    pub(crate) async fn find(&self, what: &str, info: &ConnectionInfo) -> Result<Vec<SocketAddr>, ProxyError> {
        let Target { host, port } = &info.target;
        let found = self.state.shared.resolver.addresses(host, &self.state.tenant, &self.state.lookups).await?;
        let (mut allowed, mut refused) = (Vec::new(), None);
        for address in found.into_iter().map(|ip| SocketAddr::new(ip, *port)) {
            match self.state.judge(|policy| policy.connected(&info.target, address)) {
                Ok(()) => allowed.push(address),
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

    /// Connects to the first of `addresses` that accepts a connection.
    pub(crate) async fn dial(
        &self,
        what: &str,
        mut info: ConnectionInfo,
        addresses: &[SocketAddr],
    ) -> Result<(Flow<TcpStream>, SocketAddr), ProxyError> {
        let name = info.target.to_string();
        let mut error = None;
        for address in addresses.iter().take(MAX_TRIED) {
            self.state.meter.dial().await;
            info.address = Some(*address);
            self.cross(info.clone()).map_err(|refusal| self.deny(what, refusal))?;
            match timeout(CONNECT_TIMEOUT, TcpStream::connect(address)).await {
                Ok(Ok(stream)) => {
                    let _ = stream.set_nodelay(true);
                    let metered: Arc<dyn Metered> = Arc::clone(&self.state) as _;
                    return Ok((Flow::new(stream, Some(metered)), *address));
                }
                Ok(Err(e)) => error = Some(ProxyError::Unreachable(name.clone(), describe(&e))),
                Err(_) => error = Some(ProxyError::TimedOut(name.clone())),
            }
        }
        Err(error.unwrap_or(ProxyError::Unresolved(ResolveError::NotFound(name))))
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
