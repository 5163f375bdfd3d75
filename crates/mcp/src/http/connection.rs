//! Accepts connections, limits their number and the duration of each phase, and closes them.
//!
//! A connection without a complete request may be closed at any time. When there are too many, the connection that has
//! waited longest is closed first, so that idle or slow clients cannot keep others out.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::Response;
use http::header::CONNECTION;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, MissedTickBehavior, Sleep, interval, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::counters::Counters;
use super::endpoint::Server;
use super::share::Share;
use super::{App, HttpOptions};

/// Maximum time for cancelled calls to send their answers during a shutdown.
const HALT_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum time for cancelled calls to send their answers when the server has to stop at once.
const NOW_TIMEOUT: Duration = Duration::from_millis(500);

/// Maximum time for which a request may still be arriving after a shutdown began.
const ARRIVAL_TIMEOUT: Duration = Duration::from_secs(1);

/// How long the server reads and discards what a client still sends after its answer.
const LINGER: Duration = Duration::from_secs(2);

/// Pause after a failed accept, in which connections may end and free their file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The answer to a client for which there is no connection.
const TOO_MANY: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Type: application/json\r\n\
Content-Length: 92\r\nConnection: close\r\n\r\n\
{\"jsonrpc\":\"2.0\",\"id\":null,\"error\":{\"code\":-32000,\"message\":\"too many connections at once\"}}";

/// The address of the client at the other end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer(pub SocketAddr);

pub(super) async fn serve(listener: TcpListener, app: App, shutdown: CancellationToken, now: CancellationToken) {
    let server = Arc::new(Server::new(app));
    let all = Arc::new(Connections::default());
    let tasks = TaskTracker::new();
    let sweeper = tokio::spawn(sweep(server.clone()));

    tokio::select! {
        () = accept(listener, &server, &all, &tasks, &shutdown) => {}
        () = shutdown.cancelled() => {}
        () = now.cancelled() => {}
    }
    tasks.close();
    shutdown.cancel();
    server.closing.cancel();
    tokio::select! {
        _ = timeout(server.options().grace, tasks.wait()) => {}
        () = now.cancelled() => {}
    }
    server.halt.cancel();
    tokio::select! {
        _ = timeout(HALT_TIMEOUT, tasks.wait()) => {}
        () = async { now.cancelled().await; sleep(NOW_TIMEOUT).await } => {}
    }
    server.sessions.close_all();
    all.close_all();
    tasks.wait().await;
    sweeper.abort();
}

async fn sweep(server: Arc<Server>) {
    let pace = (server.options().session_idle / 4).clamp(Duration::from_millis(50), Duration::from_secs(30));
    let mut ticks = interval(pace);
    loop {
        ticks.tick().await;
        server.sessions.sweep();
    }
}

/// Accepts connections until the future is dropped.
async fn accept(
    listener: TcpListener,
    server: &Arc<Server>,
    all: &Arc<Connections>,
    tasks: &TaskTracker,
    shutdown: &CancellationToken,
) {
    loop {
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                all.evict();
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let options = server.options();
        if all.count() >= options.max_connections && !all.evict() {
            // The send buffer of a new connection has room for this; a client that misses it sees a closed connection.
            let _ = stream.try_write(TOO_MANY);
            continue;
        }
        let Ok(local) = stream.local_addr() else { continue };
        if let Err(error) = prepare(&stream, options) {
            tracing::debug!(%error, "a connection was gone at once");
            continue;
        }
        let connection = Arc::new(Connection {
            peer,
            local,
            state: Mutex::new((Phase::Head, Instant::now())),
            share: Mutex::default(),
            linger: AtomicBool::new(false),
            close: CancellationToken::new(),
        });
        let slots = (all.enter(connection.clone()), server.counters().connection());
        let (server, shutdown) = (server.clone(), shutdown.clone());
        tasks.spawn(async move {
            drive(stream, server, connection, shutdown).await;
            drop(slots);
        });
    }
}

/// Configures the socket so that answers go out at once and a peer that vanished silently is noticed.
fn prepare(stream: &TcpStream, options: &HttpOptions) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, options.write_deadline.max(Duration::from_secs(1)))?;
    let wait = u32::try_from(options.write_deadline.as_millis()).unwrap_or(u32::MAX);
    sockopt::set_tcp_user_timeout(stream, wait)?;
    Ok(())
}

async fn drive(stream: TcpStream, server: Arc<Server>, connection: Arc<Connection>, shutdown: CancellationToken) {
    let options = server.options().clone();
    let patience = options.write_deadline;
    let io = DeadlineStream { stream, connection: connection.clone(), patience, stalled: None, lingering: None };
    let service = service_fn(|request| {
        let (server, connection) = (server.clone(), connection.clone());
        async move {
            let busy = connection.request();
            let response = server.answer(request, &connection).await;
            connection.linger.store(response.headers().contains_key(CONNECTION), Ordering::Relaxed);
            Ok::<Response<Body>, Infallible>(
                response.map(|body| Body::new(BusyBody { body, counters: server.counters().clone(), _busy: busy })),
            )
        }
    });
    let served = http1::Builder::new().max_header_size(options.max_header).serve_connection(TokioIo::new(io), service);
    let mut served = pin!(served);
    let mut ticks = interval(options.tick());
    // A busy server must not drop its clients for its own delay: the time counts from here, and data that has arrived
    // is handled before deadlines are checked.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    connection.enter(Phase::Head);
    let mut ending = false;
    loop {
        tokio::select! {
            biased;
            ended = served.as_mut() => {
                if let Err(error) = ended {
                    tracing::debug!(%error, "a connection broke");
                }
                return;
            }
            () = connection.close.cancelled() => return,
            () = shutdown.cancelled(), if !ending => {
                ending = true;
                served.as_mut().graceful_shutdown();
            }
            _ = ticks.tick() => {
                let late = ending && connection.waiting_since().is_some_and(|since| since.elapsed() >= ARRIVAL_TIMEOUT);
                if late || connection.is_overdue(&options) {
                    return;
                }
            }
        }
    }
}

impl HttpOptions {
    /// Returns the interval at which deadlines are checked.
    fn tick(&self) -> Duration {
        let shortest = self.header_deadline.min(self.idle_deadline);
        (shortest / 4).clamp(Duration::from_millis(10), Duration::from_secs(5))
    }
}

#[derive(Default)]
struct Connections(Mutex<(u64, HashMap<u64, Arc<Connection>>)>);

impl Connections {
    fn all(&self) -> MutexGuard<'_, (u64, HashMap<u64, Arc<Connection>>)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count(&self) -> usize {
        self.all().1.len()
    }

    fn enter(self: &Arc<Self>, connection: Arc<Connection>) -> ConnectionSlot {
        let mut all = self.all();
        all.0 += 1;
        let number = all.0;
        all.1.insert(number, connection);
        ConnectionSlot(self.clone(), number)
    }

    /// Closes the connection that has waited longest without a complete request. Returns false if there is none.
    fn evict(&self) -> bool {
        let mut all = self.all();
        let waiting = all.1.iter().filter_map(|(number, connection)| Some((connection.waiting_since()?, *number)));
        let Some((_, number)) = waiting.min() else { return false };
        if let Some(connection) = all.1.remove(&number) {
            connection.close.cancel();
        }
        true
    }

    fn close_all(&self) {
        for connection in self.all().1.values() {
            connection.close.cancel();
        }
    }
}

/// A connection's entry in [`Connections`]; dropping it removes the entry, however the connection's task ends.
struct ConnectionSlot(Arc<Connections>, u64);

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.0.all().1.remove(&self.1);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The connection is between two requests.
    Idle,
    /// The head of a request is arriving.
    Head,
    /// The body of a request is arriving; `body_deadline` bounds this phase.
    Body,
    /// A request is being answered.
    Busy,
}

pub(super) struct Connection {
    pub peer: SocketAddr,
    pub local: SocketAddr,
    state: Mutex<(Phase, Instant)>,
    /// The share of the request that is being answered.
    share: Mutex<Option<Arc<Share>>>,
    /// Whether the last answer announced the end of the connection while the client may still be writing.
    linger: AtomicBool,
    close: CancellationToken,
}

impl Connection {
    fn state(&self) -> MutexGuard<'_, (Phase, Instant)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self, phase: Phase) {
        *self.state() = (phase, Instant::now());
    }

    /// Notes that the head of a request is complete. The request is over when the returned value is dropped.
    fn request(self: &Arc<Self>) -> Busy {
        self.enter(Phase::Body);
        Busy(self.clone())
    }

    /// Stores the share until the request is over.
    pub(super) fn set_share(&self, share: Arc<Share>) {
        *self.share.lock().unwrap_or_else(PoisonError::into_inner) = Some(share);
    }

    /// Notes that the request is complete. From here on the connection is not closed to make room for others.
    pub(super) fn busy(&self) {
        self.enter(Phase::Busy);
    }

    fn waiting_since(&self) -> Option<Instant> {
        let (phase, since) = *self.state();
        (phase != Phase::Busy).then_some(since)
    }

    fn is_overdue(&self, options: &HttpOptions) -> bool {
        let (phase, since) = *self.state();
        match phase {
            Phase::Idle => since.elapsed() >= options.idle_deadline,
            Phase::Head => since.elapsed() >= options.header_deadline,
            Phase::Body | Phase::Busy => false,
        }
    }
}

struct Busy(Arc<Connection>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.share.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.0.enter(Phase::Idle);
    }
}

/// The body of a response; its connection is busy until the body has been sent.
struct BusyBody {
    body: Body,
    counters: Counters,
    _busy: Busy,
}

impl HttpBody for BusyBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        if let Poll::Ready(Some(Ok(frame))) = &polled {
            self.counters.served(frame.data_ref().map_or(0, |data| data.len() as u64));
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A TCP stream that enforces the write deadline and lingers after the last answer.
struct DeadlineStream {
    stream: TcpStream,
    connection: Arc<Connection>,
    patience: Duration,
    /// Timer that runs while the client does not read.
    stalled: Option<Pin<Box<Sleep>>>,
    /// Timer that runs after the last byte was sent.
    lingering: Option<Pin<Box<Sleep>>>,
}

impl DeadlineStream {
    fn written<T>(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        let patience = self.patience;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(sleep(patience)));
        ready!(stalled.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }

    /// Restarts the idle time when bytes were sent: a connection whose last answer is still on its way to a slow reader
    /// is not idle.
    fn sent(&self, written: &Poll<io::Result<usize>>) {
        let mut state = self.connection.state();
        if state.0 == Phase::Idle && matches!(written, Poll::Ready(Ok(1..))) {
            state.1 = Instant::now();
        }
    }

    /// Reads and discards for a while what the client still sends. Closing a connection with unread bytes resets it,
    /// and a client that is still writing might then never see the answer.
    fn poll_linger(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let lingering = self.lingering.get_or_insert_with(|| Box::pin(sleep(LINGER)));
        if lingering.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Ok(()));
        }
        let mut space = [0; 16 << 10];
        // The loop is bounded so that other tasks are polled too.
        for _ in 0..16 {
            let mut buffer = ReadBuf::new(&mut space);
            match ready!(Pin::new(&mut self.stream).poll_read(cx, &mut buffer)) {
                Ok(()) if !buffer.filled().is_empty() => {}
                _ => return Poll::Ready(Ok(())),
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

impl AsyncRead for DeadlineStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
        if buffer.filled().len() > before {
            let mut state = self.connection.state();
            if state.0 == Phase::Idle {
                *state = (Phase::Head, Instant::now());
            }
        }
        read
    }
}

impl AsyncWrite for DeadlineStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.sent(&written);
        self.written(cx, written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        self.written(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.lingering.is_none() {
            ready!(Pin::new(&mut self.stream).poll_shutdown(cx))?;
        }
        match self.connection.linger.load(Ordering::Relaxed) {
            true => self.poll_linger(cx),
            false => Poll::Ready(Ok(())),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.sent(&written);
        self.written(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
