//! Accepts the connections of a sandbox, and finds out what they speak.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep, timeout};

use crate::gate::{Connection, State};
use crate::limits::Flow;
use crate::{http, socks};

/// For a place among those that a sandbox may have at once.
const PATIENCE: Duration = Duration::from_secs(2);
/// For the first byte. Browsers open connections before they need them.
const FIRST_BYTE: Duration = Duration::from_secs(60);

/// One connection after the other is taken, and none before there is a place for the last: the rest waits in the sandbox's own kernel
/// queue, which is bounded, and costs the server nothing.
pub async fn accept(listener: TcpListener, state: Arc<State>) {
    loop {
        state.meter.arrival().await;
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(e) => {
                // Out of descriptors, or a connection that was gone before it was taken: trying again at once would only spin.
                tracing::debug!(error = %e, "a connection of a sandbox could not be accepted");
                sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        match timeout(PATIENCE, places(&state)).await {
            Ok(Some(places)) => {
                let connection = Arc::new(Connection::new(Arc::clone(&state), places));
                let serving = serve(Arc::clone(&connection), stream);
                connection.spawn(serving);
            }
            Ok(None) => return,
            Err(_) => refuse(&state, &stream),
        }
    }
}

async fn places(state: &State) -> Option<(OwnedSemaphorePermit, OwnedSemaphorePermit)> {
    let place = |places: &Arc<Semaphore>| Arc::clone(places).acquire_owned();
    Some((place(&state.meter.places).await.ok()?, place(&state.shared.places).await.ok()?))
}

/// Too many at once. Nothing is read and nothing waited for.
fn refuse(state: &State, stream: &TcpStream) {
    let limit = &state.meter.connections;
    let refusal = limit.refusal(&format!("{} connections at once", limit.value), "max_connections");
    let sentence = state.deny("a connection", refusal).sentence;
    let answer = format!(
        "HTTP/1.1 403 Forbidden\r\n{}: 1\r\nContent-Type: text/plain\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{sentence}\n",
        http::DENIED,
        sentence.len() + 1,
    );
    let _ = stream.try_write(answer.as_bytes());
}

async fn serve(connection: Arc<Connection>, stream: TcpStream) {
    let _ = stream.set_nodelay(true);
    let mut first = [0];
    if !matches!(timeout(FIRST_BYTE, stream.peek(&mut first)).await, Ok(Ok(1))) {
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
