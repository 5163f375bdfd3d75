//! Connects to what was asked for: to the very address that was checked.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper::StatusCode;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::denial::Denial;
use crate::gate::{Connection, Crossing};
use crate::limits::{Flow, Metered};
use crate::policy::Refusal;
use crate::resolve::Lost;

const PATIENCE: Duration = Duration::from_secs(10);
/// Of the addresses of a name.
const TRIED: usize = 3;

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum Stop {
    #[error("{}", .0.sentence)]
    Denied(Denial),
    #[error("{0}")]
    Lost(#[from] Lost),
    #[error("{0} could not be reached: {1}")]
    Unreachable(String, &'static str),
    #[error("{0} did not answer in time")]
    TimedOut(String),
    #[error("{0}")]
    Malformed(String),
}

impl Stop {
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Denied(_) => StatusCode::FORBIDDEN,
            Self::Lost(Lost::NotFound(_)) | Self::Unreachable(..) => StatusCode::BAD_GATEWAY,
            Self::Lost(Lost::TimedOut(_)) | Self::TimedOut(_) => StatusCode::GATEWAY_TIMEOUT,
            Self::Malformed(_) => StatusCode::BAD_REQUEST,
        }
    }
}

impl Connection {
    pub fn deny(&self, what: &str, refusal: Refusal) -> Stop {
        Stop::Denied(self.state.deny(what, refusal))
    }

    /// Resolves, judges what was found, and connects to the first that is allowed and answers. `crossing` was judged already as far
    /// as it goes without an address. Names that have allowed and other addresses have the allowed ones only.
    pub async fn connect(&self, what: &str, mut crossing: Crossing) -> Result<(Flow<TcpStream>, SocketAddr), Stop> {
        let target = crossing.target.clone();
        let found = self.state.shared.resolver.addresses(&target.host, &self.state.lookups).await?;
        let mut stop = None;
        let mut tried = 0;
        for ip in found {
            let address = SocketAddr::new(ip, target.port);
            crossing.address = Some(address);
            if let Err(refusal) = self.cross(crossing.clone()) {
                stop = stop.or(Some(Err(refusal)));
                continue;
            }
            match timeout(PATIENCE, TcpStream::connect(address)).await {
                Ok(Ok(stream)) => {
                    let _ = stream.set_nodelay(true);
                    let metered: Arc<dyn Metered> = Arc::clone(&self.state) as _;
                    return Ok((Flow::new(stream, Some(metered)), address));
                }
                Ok(Err(e)) => stop = Some(Ok(Stop::Unreachable(target.to_string(), words(&e)))),
                Err(_) => stop = Some(Ok(Stop::TimedOut(target.to_string()))),
            }
            tried += 1;
            if tried == TRIED {
                break;
            }
        }
        match stop {
            Some(Ok(stop)) => Err(stop),
            Some(Err(refusal)) => Err(self.deny(what, refusal)),
            None => Err(Lost::NotFound(target.host.to_string()).into()),
        }
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
