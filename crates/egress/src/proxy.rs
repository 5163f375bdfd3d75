//! Accepts the connections of a sandbox and detects their protocol.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep, timeout};

use crate::connect::ProxyError;
use crate::gate::{Connection, GateState};
use crate::limits::Flow;
use crate::{http, socks};

/// Maximum time that a connection waits for each of its permits.
const PERMIT_WAIT: Duration = Duration::from_secs(2);
/// Timeout for the first byte. It is long because browsers open connections before they need them.
const FIRST_BYTE_TIMEOUT: Duration = Duration::from_secs(60);

/// Accepts connections one by one, each only after the previous one has its permits. Further connections wait in the
/// backlog of the sandbox's socket, which is bounded and costs the server nothing.
pub(crate) async fn accept(listener: TcpListener, state: Arc<GateState>) {
    loop {
        state.meter.arrival().await;
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(e) => {
                // The process is out of descriptors, or the client closed the connection before it was accepted.
                // Retrying at once would only spin.
                tracing::debug!(error = %e, "a connection of a sandbox could not be accepted");
                sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        match permits(&state).await {
            Ok(permits) => {
                let connection = Arc::new(Connection::new(Arc::clone(&state), permits));
                let serving = serve(Arc::clone(&connection), stream);
                connection.spawn(serving);
            }
            // The refusal is sent without reading the request, and without waiting for the client.
            Err(error) => drop(stream.try_write(&http::raw_response(&error))),
        }
    }
}

/// Acquires one permit of the sandbox and one of the whole server.
async fn permits(state: &GateState) -> Result<(OwnedSemaphorePermit, OwnedSemaphorePermit), ProxyError> {
    let permit = |permits: &Arc<Semaphore>| timeout(PERMIT_WAIT, Arc::clone(permits).acquire_owned());
    let Ok(Ok(own)) = permit(&state.meter.permits).await else {
        let limit = &state.meter.connections;
        let refusal = limit.refusal(&format!("{} connections at once", limit.value), "max_connections");
        return Err(ProxyError::Denied(state.deny("a connection", refusal)));
    };
    match permit(&state.shared.permits).await {
        Ok(Ok(shared)) => Ok((own, shared)),
        _ => Err(ProxyError::Busy),
    }
}

async fn serve(connection: Arc<Connection>, stream: TcpStream) {
    let _ = stream.set_nodelay(true);
    let mut first = [0];
    if !matches!(timeout(FIRST_BYTE_TIMEOUT, stream.peek(&mut first)).await, Ok(Ok(1))) {
        return;
    }
    let stream = Flow::new(stream, None);
    let served: io::Result<()> = match first[0] {
        socks::VERSION => socks::serve(connection, stream).await,
        _ => http::serve(connection, stream, None).await.map_err(io::Error::other),
    };
    if let Err(e) = served {
        tracing::debug!(error = %e, "a connection of a sandbox ended");
    }
}
