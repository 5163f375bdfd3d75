//! Serves MCP over lines: connects the client's bytes to rmcp's service loop.
//!
//! rmcp does not answer, or stops, on many inputs of real clients. Here every line is answered or deliberately ignored:
//! malformed JSON, bad envelopes, batches, endless lines, ids used twice, calls before `initialize`, the end of input
//! with calls in flight. Internally this module gives every request a new id, so that an answer can never reach another
//! request.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rmcp::RoleServer;
use rmcp::model::{
    CancelledNotification, CancelledNotificationParam, ClientJsonRpcMessage, ClientNotification, ClientRequest,
    GetExtensions, GetMeta, JsonRpcMessage, ProtocolVersion, RequestId, ServerResult,
};
use rmcp::service::{RxJsonRpcMessage, Service, TxJsonRpcMessage, serve_directly_with_ct};
use rmcp::transport::Transport;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::timeout;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::answer::{self, MAX_ANSWER};
use super::line::{InputLine, LineSplitter, MAX_LINE};
use super::message::{self, Fault, INVALID_REQUEST, Incoming, Message};
use super::{Caller, ErrorStyle, Guarded, Origin, QueuedSignal, Revision};

/// Maximum number of requests without an answer. The next request is read when one of them is answered.
const MAX_IN_FLIGHT: u32 = 256;

/// Maximum time for cancelled calls to end, and then for output to be written to a client that does not read.
const END_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Copy)]
pub struct StdioOptions {
    /// How long calls in flight may continue after the end of input or a shutdown.
    pub grace: Duration,
    pub errors: ErrorStyle,
}

impl Default for StdioOptions {
    fn default() -> Self {
        Self { grace: Duration::from_secs(30), errors: ErrorStyle::default() }
    }
}

/// The reason why serving ended. All of these ends are orderly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StdioEnd {
    /// The client closed its end of the input.
    EndOfInput,
    /// The client no longer reads the output.
    ClientGone,
    Shutdown,
}

#[derive(Debug, thiserror::Error)]
pub enum StdioError {
    #[error("cannot read standard input")]
    Read(#[source] io::Error),
    #[error("the protocol task failed")]
    Task(#[from] tokio::task::JoinError),
}

/// Serves this process's standard input and output until the client leaves or `shutdown` is cancelled. All calls have
/// ended when this returns. Nothing else may write to standard output.
pub async fn serve_stdio<S: Service<RoleServer>>(
    make: impl FnOnce(Caller) -> S,
    options: StdioOptions,
    shutdown: CancellationToken,
) -> Result<StdioEnd, StdioError> {
    let (input, output) = rmcp::transport::io::stdio_pipes();
    serve(input, output, make, options, shutdown).await
}

/// Serves any pair of streams in the same way as [`serve_stdio`]. `make` returns the service for the only caller.
pub async fn serve<S: Service<RoleServer>>(
    input: impl AsyncRead + Unpin,
    output: impl AsyncWrite + Unpin + Send + 'static,
    make: impl FnOnce(Caller) -> S,
    options: StdioOptions,
    shutdown: CancellationToken,
) -> Result<StdioEnd, StdioError> {
    let halt = CancellationToken::new();
    let gone = CancellationToken::new();
    let (out, lines_out) = mpsc::channel(16);
    let writer = tokio::spawn(write_lines(output, lines_out, gone.clone()));
    let (to_service, from_client) = mpsc::channel(1);
    let connection = Arc::new(StdioConnection::new(out, options.errors));
    // There is one client in one process.
    let caller = Caller::local(Some("stdio".into()));
    let service = serve_directly_with_ct(
        Guarded { service: make(caller), halt: Some(halt.clone()), errors: options.errors },
        ServiceTransport { connection: connection.clone(), from_client },
        None,
        CancellationToken::new(),
    );

    let end = tokio::select! {
        end = read_lines(input, &connection, &to_service) => end,
        () = shutdown.cancelled() => Ok(StdioEnd::Shutdown),
        () = gone.cancelled() => Ok(StdioEnd::ClientGone),
    };
    tokio::select! {
        _ = timeout(options.grace, connection.idle()) => {}
        () = gone.cancelled() => {}
    }
    halt.cancel();
    let _ = timeout(END_TIMEOUT, connection.idle()).await;
    drop(to_service);
    service.waiting().await?;
    drop(connection);
    finish(writer).await;
    end
}

/// Waits for the remaining output to be written, but not for a client that does not read.
async fn finish(mut writer: tokio::task::JoinHandle<()>) {
    if timeout(END_TIMEOUT, &mut writer).await.is_err() {
        writer.abort();
    }
}

async fn read_lines(
    mut input: impl AsyncRead + Unpin,
    connection: &Arc<StdioConnection>,
    service: &mpsc::Sender<ClientJsonRpcMessage>,
) -> Result<StdioEnd, StdioError> {
    let mut lines = LineSplitter::new(MAX_LINE);
    let mut buffer = vec![0; 64 << 10];
    loop {
        let length = input.read(&mut buffer).await.map_err(StdioError::Read)?;
        let complete = if length == 0 { lines.finish().into_iter().collect() } else { lines.push(&buffer[..length]) };
        for line in complete {
            connection.take_line(line, service).await;
        }
        if length == 0 {
            return Ok(StdioEnd::EndOfInput);
        }
    }
}

/// Writes all lines. Nothing else writes to the output. It returns when all senders are gone, and cancels `gone` if the
/// client no longer reads.
async fn write_lines(mut output: impl AsyncWrite + Unpin, mut lines: mpsc::Receiver<Vec<u8>>, gone: CancellationToken) {
    while let Some(mut line) = lines.recv().await {
        line.push(b'\n');
        let written = async {
            output.write_all(&line).await?;
            output.flush().await
        };
        if let Err(error) = written.await {
            tracing::info!(%error, "the client no longer reads");
            gone.cancel();
            return;
        }
    }
}

/// The client's connection and the requests that wait for an answer.
struct StdioConnection {
    out: mpsc::Sender<Vec<u8>>,
    errors: ErrorStyle,
    waiting: Mutex<Waiting>,
    room: Arc<Semaphore>,
}

#[derive(Default)]
struct Waiting {
    last: i64,
    /// Waiting requests by our id.
    calls: HashMap<i64, Waiter>,
    /// Our ids by the client's id as JSON, so that `1` and `"1"` differ.
    ids: HashMap<String, i64>,
    /// The revision that `initialize` negotiated, or asked for if it has no answer yet.
    negotiated: Revision,
    /// The revision that a request named last.
    named: Revision,
}

impl Waiting {
    fn negotiate(&mut self, version: &ProtocolVersion) {
        self.negotiated = Revision::of(version.as_str());
        self.named = self.negotiated;
    }
}

/// A request without its answer.
struct Waiter {
    id: Value,
    batch: Option<Arc<Batch>>,
    /// Permit that is released when the answer is queued for the client.
    _room: OwnedSemaphorePermit,
    /// Guard that ends the wait for the call's place in the engine's queue, because a call with an answer needs none.
    _queued: DropGuard,
}

impl StdioConnection {
    fn new(out: mpsc::Sender<Vec<u8>>, errors: ErrorStyle) -> Self {
        Self { out, errors, waiting: Mutex::default(), room: Arc::new(Semaphore::new(MAX_IN_FLIGHT as usize)) }
    }

    fn waiting(&self) -> std::sync::MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns when every request has its answer.
    async fn idle(&self) {
        let _all = self.room.acquire_many(MAX_IN_FLIGHT).await;
    }

    async fn take_line(&self, line: InputLine, service: &mpsc::Sender<ClientJsonRpcMessage>) {
        let incoming = match line {
            InputLine::Whole(line) => message::read(&line, self.waiting().named.has_batches()),
            InputLine::TooLong { length, head, tail } => Err(message::too_long(length, MAX_LINE, &head, &tail)),
        };
        match incoming {
            Ok(Incoming::One(message)) => self.take(message, None, service).await,
            Ok(Incoming::Batch(messages)) => self.take_batch(messages, service).await,
            Err(fault) => self.deliver(None, self.errors.encode(&fault)).await,
        }
    }

    async fn take_batch(&self, messages: Vec<Result<Message, Fault>>, service: &mpsc::Sender<ClientJsonRpcMessage>) {
        let batch = Arc::new(Batch::default());
        // The batch expects one additional answer, so that it is not complete before all of its messages were read.
        batch.expect();
        for message in messages {
            match message {
                Ok(message) => self.take(message, Some(&batch), service).await,
                Err(fault) => {
                    batch.expect();
                    self.deliver(Some(&batch), self.errors.encode(&fault)).await;
                }
            }
        }
        if let Some(line) = batch.arrived(None) {
            self.write(line).await;
        }
    }

    async fn take(&self, message: Message, batch: Option<&Arc<Batch>>, service: &mpsc::Sender<ClientJsonRpcMessage>) {
        match message {
            Message::Request { id, request, .. } => self.forward(id, request, batch, service).await,
            Message::Cancelled { id, reason } => self.cancel(&id, reason, service).await,
            // The server asks the client nothing over lines.
            Message::Answer { .. } | Message::Ignored => {}
        }
    }

    async fn forward(
        &self,
        id: Value,
        mut request: Box<ClientRequest>,
        batch: Option<&Arc<Batch>>,
        service: &mpsc::Sender<ClientJsonRpcMessage>,
    ) {
        if let Some(batch) = batch {
            batch.expect();
        }
        let Ok(room) = self.room.clone().acquire_owned().await else { return };
        // The slot is reserved first: after `enter` this future cannot be dropped before the request is sent, so no
        // request is forgotten.
        let Ok(slot) = service.reserve().await else { return };
        let queued = CancellationToken::new();
        let Some(ours) = self.enter(&id, batch, room, queued.clone().drop_guard()) else {
            let fault = Fault::new(id, INVALID_REQUEST, "a request with this `id` is still running");
            return self.deliver(batch, self.errors.encode(&fault)).await;
        };
        let is_call = matches!(*request, ClientRequest::CallToolRequest(_));
        request.extensions_mut().insert(QueuedSignal(queued.clone()));
        request.extensions_mut().insert(Origin { id: id.clone(), ..Origin::default() });
        let revision = self.revision_of(&request);
        request.extensions_mut().insert(revision);
        slot.send(ClientJsonRpcMessage::request(*request, RequestId::Number(ours)));
        if is_call {
            tokio::select! {
                () = queued.cancelled() => {}
                () = service.closed() => {}
            }
        }
    }

    /// Returns the revision by which a request is answered: its own, or the connection's.
    fn revision_of(&self, request: &ClientRequest) -> Revision {
        let mut waiting = self.waiting();
        if let ClientRequest::InitializeRequest(request) = request {
            waiting.negotiate(&request.params.protocol_version);
        } else if let Some(version) = request.get_meta().protocol_version() {
            waiting.named = Revision::of(version.as_str());
            return waiting.named;
        }
        waiting.negotiated
    }

    /// Returns our id for a request of the client, or `None` if a request with the client's id still runs.
    fn enter(
        &self,
        id: &Value,
        batch: Option<&Arc<Batch>>,
        room: OwnedSemaphorePermit,
        queued: DropGuard,
    ) -> Option<i64> {
        let mut waiting = self.waiting();
        let key = id.to_string();
        if waiting.ids.contains_key(&key) {
            return None;
        }
        waiting.last += 1;
        let ours = waiting.last;
        waiting.ids.insert(key, ours);
        waiting.calls.insert(ours, Waiter { id: id.clone(), batch: batch.cloned(), _room: room, _queued: queued });
        Some(ours)
    }

    fn leave(&self, ours: i64) -> Option<Waiter> {
        let mut waiting = self.waiting();
        let waiter = waiting.calls.remove(&ours)?;
        waiting.ids.remove(&waiter.id.to_string());
        Some(waiter)
    }

    /// Cancels a request. It gets no answer, as the protocol demands; rmcp drops the answer.
    async fn cancel(&self, id: &Value, reason: Option<String>, service: &mpsc::Sender<ClientJsonRpcMessage>) {
        let ours = self.waiting().ids.get(&id.to_string()).copied();
        let Some((ours, waiter)) = ours.and_then(|ours| Some((ours, self.leave(ours)?))) else { return };
        let params = CancelledNotificationParam::new(Some(RequestId::Number(ours)), reason);
        let notification = ClientNotification::CancelledNotification(CancelledNotification::new(params));
        let _ = service.send(ClientJsonRpcMessage::notification(notification)).await;
        if let Some(line) = waiter.batch.and_then(|batch| batch.arrived(None)) {
            self.write(line).await;
        }
    }

    /// Sends a message of the service to the request that it belongs to.
    async fn send(&self, mut message: TxJsonRpcMessage<RoleServer>) {
        let ours = match &message {
            JsonRpcMessage::Response(response) => Some(&response.id),
            JsonRpcMessage::Error(error) => error.id.as_ref(),
            JsonRpcMessage::Notification(_) | JsonRpcMessage::Request(_) => {
                let revision = self.waiting().named;
                if revision.fit_message(&mut message) {
                    self.write(answer::encode(&Value::Null, &message)).await;
                }
                return;
            }
        };
        let Some(RequestId::Number(ours)) = ours else { return };
        if let JsonRpcMessage::Response(response) = &message
            && let ServerResult::InitializeResult(result) = &response.result
        {
            self.waiting().negotiate(&result.protocol_version);
        }
        let Some(waiter) = self.leave(*ours) else { return };
        let bytes = answer::encode(&waiter.id, &message);
        self.deliver(waiter.batch.as_ref(), bytes).await;
    }

    async fn deliver(&self, batch: Option<&Arc<Batch>>, answer: Vec<u8>) {
        let line = match batch {
            None => Some(answer),
            Some(batch) => batch.arrived(Some(answer)),
        };
        if let Some(line) = line {
            self.write(line).await;
        }
    }

    /// Queues a line for the writer, which notices a client that has disconnected.
    async fn write(&self, line: Vec<u8>) {
        let _ = self.out.send(line).await;
    }
}

/// Answers of one batch, which are sent together.
#[derive(Default)]
struct Batch(Mutex<Parts>);

#[derive(Default)]
struct Parts {
    missing: usize,
    /// Encoded answers, separated by commas.
    answers: Vec<u8>,
}

impl Batch {
    fn parts(&self) -> std::sync::MutexGuard<'_, Parts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn expect(&self) {
        self.parts().missing += 1;
    }

    /// Notes that one expected answer arrived or will not come. Returns the whole line after the last one, unless no
    /// message of the batch has an answer.
    fn arrived(&self, answer: Option<Vec<u8>>) -> Option<Vec<u8>> {
        let mut parts = self.parts();
        parts.missing -= 1;
        if let Some(mut answer) = answer {
            if parts.answers.len() + answer.len() > MAX_ANSWER {
                answer = answer::over_limit(message::id_of(&answer).unwrap_or(Value::Null), answer.len());
            }
            if !parts.answers.is_empty() {
                parts.answers.push(b',');
            }
            parts.answers.append(&mut answer);
        }
        let complete = parts.missing == 0 && !parts.answers.is_empty();
        complete.then(|| [b"[", &parts.answers[..], b"]"].concat())
    }
}

/// The service loop's transport to the client.
struct ServiceTransport {
    connection: Arc<StdioConnection>,
    from_client: mpsc::Receiver<ClientJsonRpcMessage>,
}

impl Transport<RoleServer> for ServiceTransport {
    type Error = io::Error;

    fn send(&mut self, message: TxJsonRpcMessage<RoleServer>) -> impl Future<Output = io::Result<()>> + Send + 'static {
        let connection = self.connection.clone();
        async move {
            connection.send(message).await;
            Ok(())
        }
    }

    async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleServer>> {
        self.from_client.recv().await
    }

    async fn close(&mut self) -> io::Result<()> {
        Ok(())
    }
}
