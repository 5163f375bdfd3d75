//! Connects to what was asked for: to the very address that was checked.

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
/// Of the addresses of a name.
const TRIED: usize = 3;

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum Stop {
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
    pub fn status(&self) -> StatusCode {
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
    pub fn deny(&self, what: &str, refusal: DenyReason) -> Stop {
        Stop::Denied(self.state.deny(what, refusal))
    }

    /// Resolves, and judges what was found. `crossing` was judged already as far as it goes without an address. A name that has allowed
    /// and other addresses has the allowed ones only.
    pub async fn find(&self, what: &str, crossing: &ConnectionInfo) -> Result<Vec<SocketAddr>, Stop> {
        let Target { host, port } = &crossing.target;
        let found = self.state.shared.resolver.addresses(host, &self.state.tenant, &self.state.lookups).await?;
        let (mut allowed, mut refused) = (Vec::new(), None);
        for address in found.into_iter().map(|ip| SocketAddr::new(ip, *port)) {
            match self.state.judge(|judge| judge.connected(&crossing.target, address)) {
                Ok(()) => allowed.push(address),
                Err(refusal) => {
                    // For the operator's eyes: the sandbox is not told where a name leads.
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

    /// Connects to the first of these that answers.
    pub async fn dial(
        &self,
        what: &str,
        mut crossing: ConnectionInfo,
        addresses: &[SocketAddr],
    ) -> Result<(Flow<TcpStream>, SocketAddr), Stop> {
        let name = crossing.target.to_string();
        let mut stop = None;
        for address in addresses.iter().take(TRIED) {
            self.state.meter.dial().await;
            crossing.address = Some(*address);
            self.cross(crossing.clone()).map_err(|refusal| self.deny(what, refusal))?;
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

/// Nothing of the host's that the system's own text might have.
fn words(error: &std::io::Error) -> &'static str {
    match error.kind() {
        std::io::ErrorKind::ConnectionRefused => "the connection was refused",
        std::io::ErrorKind::HostUnreachable | std::io::ErrorKind::NetworkUnreachable => "there is no way to it",
        std::io::ErrorKind::ConnectionReset => "the connection was reset",
        _ => "it failed",
    }
}
