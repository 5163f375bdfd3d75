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

const PATIENCE: Duration = Duration::from_secs(10);
/// Maximum number of addresses of a name that are tried.
const TRIED: usize = 3;

/// The reason why no connection was made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Stop {
    #[error("{}", .0.sentence)]
    Denied(Denial),
    #[error("{0}")]
    Lost(#[from] ResolveError),
    #[error("{0} could not be reached: {1}")]
    Unreachable(String, &'static str),
    #[error("{0} did not answer in time")]
    TimedOut(String),
    #[error("{0}")]
    Malformed(String),
    #[error("the server has too many connections of all its sandboxes; try again later")]
    Busy,
}

impl Stop {
    pub(crate) fn status(&self) -> StatusCode {
        match self {
            Self::Denied(_) => StatusCode::FORBIDDEN,
            Self::Lost(ResolveError::NotFound(_)) | Self::Unreachable(..) => StatusCode::BAD_GATEWAY,
            Self::Lost(ResolveError::TimedOut(_)) | Self::TimedOut(_) => StatusCode::GATEWAY_TIMEOUT,
            Self::Malformed(_) => StatusCode::BAD_REQUEST,
            Self::Busy => StatusCode::SERVICE_UNAVAILABLE,
        }
    }
}

impl Connection {
    pub(crate) fn deny(&self, what: &str, refusal: DenyReason) -> Stop {
        Stop::Denied(self.state.deny(what, refusal))
    }

    /// Resolves the target and returns its allowed addresses; the policy must already have allowed `info` without
    /// an address. If a name has both allowed and other addresses, only the allowed ones are returned.
    pub(crate) async fn find(&self, what: &str, info: &ConnectionInfo) -> Result<Vec<SocketAddr>, Stop> {
        let Target { host, port } = &info.target;
        let found = self.state.shared.resolver.addresses(host, &self.state.tenant, &self.state.lookups).await?;
        let (mut allowed, mut refused) = (Vec::new(), None);
        for address in found.into_iter().map(|ip| SocketAddr::new(ip, *port)) {
            match self.state.judge(|policy| policy.connected(&info.target, address)) {
                Ok(()) => allowed.push(address),
                Err(refusal) => {
                    // Logged for the operator only: the sandbox must not learn where a name leads.
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
    ) -> Result<(Flow<TcpStream>, SocketAddr), Stop> {
        let name = info.target.to_string();
        let mut stop = None;
        for address in addresses.iter().take(TRIED) {
            self.state.meter.dial().await;
            info.address = Some(*address);
            self.cross(info.clone()).map_err(|refusal| self.deny(what, refusal))?;
            match timeout(PATIENCE, TcpStream::connect(address)).await {
                Ok(Ok(stream)) => {
                    let _ = stream.set_nodelay(true);
                    let metered: Arc<dyn Metered> = Arc::clone(&self.state) as _;
                    return Ok((Flow::new(stream, Some(metered)), *address));
                }
                Ok(Err(e)) => stop = Some(Stop::Unreachable(name.clone(), words(&e))),
                Err(_) => stop = Some(Stop::TimedOut(name.clone())),
            }
        }
        Err(stop.unwrap_or(Stop::Lost(ResolveError::NotFound(name))))
    }
}

/// Describes an error in fixed words, because the operating system's own text might reveal details of the host.
fn words(error: &std::io::Error) -> &'static str {
    match error.kind() {
        std::io::ErrorKind::ConnectionRefused => "the connection was refused",
        std::io::ErrorKind::HostUnreachable | std::io::ErrorKind::NetworkUnreachable => "there is no way to it",
        std::io::ErrorKind::ConnectionReset => "the connection was reset",
        _ => "it failed",
    }
}
