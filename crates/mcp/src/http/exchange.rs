//! One HTTP request and everything that is sent for it. Messages go out to the client; the client's answers to our
//! questions and its cancellation come in. The request goes directly to its handler, or through a service loop if the
//! handler may ask the client something.
//!
//! Dropping an [`Exchange`] cancels the call, because a client that has disconnected cannot cancel it.

use std::io;
use std::sync::Arc;

use bytes::Bytes;
use engine::Hold;
use engine::memory::Full;
use http::StatusCode;
use rmcp::RoleServer;
use rmcp::model::{
    ClientJsonRpcMessage, ClientRequest, ErrorCode, InitializeRequestParams, JsonRpcMessage, RequestId, ServerResult,
};
use rmcp::service::{DynService, RxJsonRpcMessage, TxJsonRpcMessage, serve_directly_with_ct};
use rmcp::transport::Transport;
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::direct::{Direct, PeerLease};
use super::session::{Session, SessionCall};
use super::turns::Turn;
use super::{SERVER_ERROR, sse};
use crate::answer;
use crate::message::{Fault, INTERNAL_ERROR};
use crate::{QueuedSignal, Revision};

/// Maximum number of messages that wait for a client that reads slowly.
const QUEUE: usize = 16;

/// Everything that a call needs besides its request.
pub(super) struct ExchangeParts {
    pub service: Box<dyn DynService<RoleServer>>,
    pub peer: ClientPeer,
    /// The revision by which the request is answered.
    pub revision: Revision,
    /// The session through which the client's answers to our questions arrive, if the client can be asked.
    pub session: Option<Arc<Session>>,
    /// The call's entry in its session.
    pub entry: Option<SessionCall>,
    /// Token that the server cancels to end every call.
    pub halt: CancellationToken,
    /// The memory of the request, and then of its answer.
    pub hold: Hold,
}

/// The client of an exchange as its handler sees it: by the negotiated parameters of a legacy client, otherwise by the
/// request itself.
pub(super) enum ClientPeer {
    /// The handler may send requests to the client, which needs a service loop.
    Loop(Box<InitializeRequestParams>),
    Direct(PeerLease),
}

pub(super) struct Exchange {
    id: Value,
    revision: Revision,
    source: MessageSource,
    over: bool,
    /// Token that is cancelled when the request has its place in the engine's queue, or its answer.
    queued: CancellationToken,
    entry: Option<SessionCall>,
    hold: Hold,
}

/// The source of an exchange's messages. Dropping it cancels the call.
#[allow(clippy::large_enum_variant, reason = "the large variant is the usual one")]
enum MessageSource {
    Loop { messages: mpsc::Receiver<TxJsonRpcMessage<RoleServer>>, _cancel: DropGuard },
    Direct(Direct),
}

impl MessageSource {
    async fn next(&mut self) -> Option<TxJsonRpcMessage<RoleServer>> {
        match self {
            Self::Loop { messages, .. } => messages.recv().await,
            Self::Direct(direct) => direct.next().await,
        }
    }

    /// Returns the result if the handler has already encoded it.
    fn prepared(&self) -> Option<&Bytes> {
        match self {
            Self::Loop { .. } => None,
            Self::Direct(direct) => direct.prepared(),
        }
    }
}

/// Bytes for a client. They count towards their tenant's memory until the last of them has been sent.
pub(super) struct AnswerBytes {
    pub bytes: Vec<u8>,
    hold: Hold,
}

impl AnswerBytes {
    /// Counts the bytes in `hold` and takes the hold over. Returns the hold with an error if there is no memory for the
    /// bytes.
    pub(super) fn new(bytes: Vec<u8>, hold: Hold) -> Result<Self, (Full, Hold)> {
        match hold.set(bytes.len()) {
            Ok(()) => Ok(Self { bytes, hold }),
            Err(full) => Err((full, hold)),
        }
    }

    /// Returns an answer, or an error in its place if there is no memory for the answer.
    pub(super) fn last(id: &Value, bytes: Vec<u8>, hold: Hold) -> Self {
        let length = bytes.len();
        Self::new(bytes, hold).unwrap_or_else(|(full, hold)| {
            let why = format!("an answer of {length} bytes was dropped: {full}");
            let bytes = Fault::new(id.clone(), SERVER_ERROR, why).encode();
            // The error is smaller than the part of a call that is not counted.
            let _ = hold.set(0);
            Self { bytes, hold }
        })
    }

    pub(super) fn plain(self) -> Bytes {
        Bytes::from_owner(self)
    }

    pub(super) fn event(self, id: Option<&str>) -> Bytes {
        Self { bytes: sse::event(id, &self.bytes), hold: self.hold }.plain()
    }
}

impl AsRef<[u8]> for AnswerBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// A message that an exchange produces.
pub(super) enum ExchangeEvent {
    /// A notification or a question that precedes the answer.
    Meanwhile(AnswerBytes),
    /// The answer, after which the exchange is over.
    Last(FinalAnswer),
}

pub(super) struct FinalAnswer {
    pub answer: AnswerBytes,
    /// The code of the error, if the answer is an error.
    pub error: Option<ErrorCode>,
    /// The negotiated protocol version, if the answer is to `initialize`.
    pub initialized: Option<rmcp::model::ProtocolVersion>,
}

impl FinalAnswer {
    /// Returns the HTTP status that revision 2026-07-28 requires; older revisions use 200 for every answer.
    pub(super) fn modern_status(&self, meta_is_malformed: bool) -> StatusCode {
        match self.error {
            Some(
                ErrorCode::UNSUPPORTED_PROTOCOL_VERSION
                | ErrorCode::MISSING_REQUIRED_CLIENT_CAPABILITY
                | ErrorCode::HEADER_MISMATCH,
            ) => StatusCode::BAD_REQUEST,
            Some(ErrorCode::INVALID_PARAMS) if meta_is_malformed => StatusCode::BAD_REQUEST,
            Some(ErrorCode::METHOD_NOT_FOUND) => StatusCode::NOT_FOUND,
            _ => StatusCode::OK,
        }
    }
}

impl Exchange {
    pub(super) fn start(id: Value, mut request: ClientRequest, parts: ExchangeParts) -> Self {
        let queued = CancellationToken::new();
        let cancel = parts.halt.child_token();
        rmcp::model::GetExtensions::extensions_mut(&mut request).insert(QueuedSignal(queued.clone()));
        // Some notifications show the id, so it is the client's id wherever rmcp's type can hold it.
        let inner = match &id {
            Value::String(text) => RequestId::String(text.as_str().into()),
            other => other.as_i64().map_or_else(|| RequestId::String(other.to_string().into()), RequestId::Number),
        };
        let source = match parts.peer {
            ClientPeer::Direct(peer) => {
                MessageSource::Direct(Direct::new(parts.service, request, inner, peer, cancel, queued.clone()))
            }
            ClientPeer::Loop(info) => {
                let (to_client, messages) = mpsc::channel(QUEUE);
                let (to_service, from_client) = mpsc::channel(QUEUE);
                let transport = LoopTransport {
                    request: Some(ClientJsonRpcMessage::request(request, inner)),
                    from_client,
                    to_client,
                    answered: CancellationToken::new(),
                    queued: queued.clone(),
                    asking: parts.session.map(|session| (session, to_service)),
                };
                let running = serve_directly_with_ct(parts.service, transport, Some(*info), cancel.clone());
                tokio::spawn(running.waiting());
                MessageSource::Loop { messages, _cancel: cancel.drop_guard() }
            }
        };
        Self { id, revision: parts.revision, source, over: false, queued, entry: parts.entry, hold: parts.hold }
    }

    /// Lets the call continue while its next message is not awaited. A call that has not begun begins in the given
    /// turn.
    pub(super) fn detach(&mut self, turn: Option<Turn>) {
        if let MessageSource::Direct(direct) = &mut self.source {
            direct.detach(turn);
        }
    }

    /// Returns the next message, or `None` after the answer or when the client cancelled its request.
    pub(super) async fn next(&mut self) -> Option<ExchangeEvent> {
        loop {
            if let Some(event) = self.next_event().await {
                return event;
            }
        }
    }

    /// Waits for one message. The outer `None` means that the message was dropped.
    async fn next_event(&mut self) -> Option<Option<ExchangeEvent>> {
        if self.over {
            return Some(None);
        }
        let message = match &self.entry {
            None => self.source.next().await,
            Some(entry) => tokio::select! {
                biased;
                () = entry.withdrawn() => {
                    self.over = true;
                    return Some(None);
                }
                message = self.source.next() => message,
            },
        };
        let Some(mut message) = message else {
            self.over = true;
            let fault = Fault::new(self.id.clone(), INTERNAL_ERROR, "the call ended without an answer");
            let error = Some(ErrorCode::INTERNAL_ERROR);
            let answer = AnswerBytes::last(&self.id, fault.encode(), self.hold.clone());
            return Some(Some(ExchangeEvent::Last(FinalAnswer { answer, error, initialized: None })));
        };
        if !self.revision.fit_message(&mut message) {
            return None;
        }
        let bytes = match (&message, self.source.prepared()) {
            (JsonRpcMessage::Response(_), Some(result)) => answer::around(&self.id, result),
            _ => answer::encode(&self.id, &message),
        };
        let (error, initialized) = match message {
            JsonRpcMessage::Notification(_) | JsonRpcMessage::Request(_) => {
                // A notification for which there is no memory is dropped.
                return AnswerBytes::new(bytes, self.hold.apart())
                    .ok()
                    .map(|message| Some(ExchangeEvent::Meanwhile(message)));
            }
            JsonRpcMessage::Error(error) => (Some(error.error.code), None),
            JsonRpcMessage::Response(response) => match response.result {
                ServerResult::InitializeResult(result) => (None, Some(result.protocol_version)),
                _ => (None, None),
            },
        };
        self.over = true;
        // The request and its result are gone, so only the answer is counted.
        let answer = AnswerBytes::last(&self.id, bytes, self.hold.clone());
        Some(Some(ExchangeEvent::Last(FinalAnswer { answer, error, initialized })))
    }

    /// Waits for the answer and discards the messages before it.
    pub(super) async fn last(&mut self) -> Option<FinalAnswer> {
        loop {
            match self.next().await? {
                ExchangeEvent::Meanwhile(_) => {}
                ExchangeEvent::Last(last) => return Some(last),
            }
        }
    }

    /// Completes when the call has its place in the engine's queue, so that every call started afterwards comes after
    /// it.
    pub(super) fn queued(&self) -> impl Future<Output = ()> + Send + use<> {
        self.queued.clone().cancelled_owned()
    }
}

/// The service loop's transport to the client.
struct LoopTransport {
    request: Option<ClientJsonRpcMessage>,
    from_client: mpsc::Receiver<ClientJsonRpcMessage>,
    to_client: mpsc::Sender<TxJsonRpcMessage<RoleServer>>,
    answered: CancellationToken,
    queued: CancellationToken,
    asking: Option<(Arc<Session>, mpsc::Sender<ClientJsonRpcMessage>)>,
}

impl Transport<RoleServer> for LoopTransport {
    type Error = io::Error;

    fn send(
        &mut self,
        mut message: TxJsonRpcMessage<RoleServer>,
    ) -> impl Future<Output = io::Result<()>> + Send + 'static {
        let asked = match (&mut message, &self.asking) {
            (JsonRpcMessage::Request(request), Some((session, answers))) => {
                session.ask(&mut request.id, answers.clone())
            }
            (JsonRpcMessage::Request(_), None) => false,
            _ => true,
        };
        let is_answer = matches!(message, JsonRpcMessage::Response(_) | JsonRpcMessage::Error(_));
        let tokens = is_answer.then(|| (self.answered.clone(), self.queued.clone()));
        let to_client = self.to_client.clone();
        async move {
            if !asked {
                return Err(io::Error::other("this client cannot be asked"));
            }
            // A client that has disconnected is not an error: its call is being cancelled.
            let _ = to_client.send(message).await;
            if let Some((answered, queued)) = tokens {
                answered.cancel();
                queued.cancel();
            }
            Ok(())
        }
    }

    async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleServer>> {
        if let Some(request) = self.request.take() {
            return Some(request);
        }
        tokio::select! {
            () = self.answered.cancelled() => None,
            Some(message) = self.from_client.recv() => Some(message),
        }
    }

    async fn close(&mut self) -> io::Result<()> {
        self.queued.cancel();
        Ok(())
    }
}
