//! A request given straight to its handler: no loop, no task, no channel. For services that ask their clients nothing.
//!
//! The call is polled where its answer is waited for. Left alone before its end it is cancelled and ends by itself, so that what
//! has to be written down of it is.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use rmcp::RoleServer;
use rmcp::model::{
    ClientRequest, GetExtensions, GetMeta, InitializeRequestParams, JsonRpcMessage, RequestId, ServerNotification,
};
use rmcp::service::{DynService, Peer, RequestContext, RxJsonRpcMessage, TxJsonRpcMessage, serve_directly_with_ct};
use rmcp::transport::Transport;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use super::turns::{Turn, during};
use crate::mcp::{Outlet, Prepared};

/// Notifications that may wait for a client that reads slowly.
const QUEUE: usize = 16;

type ServerMessage = TxJsonRpcMessage<RoleServer>;

pub(super) struct Direct {
    work: DirectCall,
    /// What the handler says meanwhile, if the client wants to hear it.
    notes: Option<mpsc::Receiver<ServerNotification>>,
    answer: Option<ServerMessage>,
    prepared: Prepared,
    cancel: CancellationToken,
}

impl Direct {
    /// Whether a request can be answered like this: what opens a session or a subscription talks to a peer of its own.
    pub(super) fn takes(request: &ClientRequest) -> bool {
        !matches!(request, ClientRequest::InitializeRequest(_) | ClientRequest::SubscriptionsListenRequest(_))
    }

    /// `begun` is cancelled at the latest when the call is over.
    pub(super) fn new(
        service: Box<dyn DynService<RoleServer>>,
        mut request: ClientRequest,
        id: RequestId,
        peer: PeerLease,
        cancel: CancellationToken,
        begun: CancellationToken,
    ) -> Self {
        let mut context = RequestContext::new(id.clone(), peer.peer.clone());
        context.ct = cancel.clone();
        std::mem::swap(&mut context.meta, request.get_meta_mut());
        std::mem::swap(&mut context.extensions, request.extensions_mut());
        let prepared = Prepared::default();
        context.extensions.insert(prepared.clone());
        let notes = context.meta.get_progress_token().map(|_| {
            let (outlet, notes) = mpsc::channel(QUEUE);
            context.extensions.insert(Outlet(outlet));
            notes
        });
        let work = async move {
            let _peer = peer;
            let _begun = begun.drop_guard();
            match service.handle_request(request, context).await {
                Ok(result) => JsonRpcMessage::response(result, id),
                Err(error) => JsonRpcMessage::error(error, Some(id)),
            }
        };
        Self { work: DirectCall::Here(Box::pin(work)), notes, answer: None, prepared, cancel }
    }

    /// See [`Prepared`].
    pub(super) fn prepared(&self) -> Option<&Bytes> {
        self.prepared.get()
    }

    /// From here on the call goes on whether or not anybody waits for it.
    pub(super) fn go_on(&mut self, turn: Option<Turn>) {
        self.work = match std::mem::replace(&mut self.work, DirectCall::Over) {
            DirectCall::Here(work) => {
                let work = async {
                    match turn {
                        Some(turn) => during(turn, work).await,
                        None => work.await,
                    }
                };
                DirectCall::Apart(tokio::spawn(work.in_current_span()))
            }
            other => other,
        };
    }

    /// The next message, the answer last. Giving up the wait loses nothing.
    pub(super) async fn next(&mut self) -> Option<ServerMessage> {
        if self.answer.is_none() {
            let noted = async {
                match &mut self.notes {
                    Some(notes) => notes.recv().await,
                    None => None,
                }
            };
            tokio::select! {
                biased;
                Some(note) = noted => return Some(JsonRpcMessage::notification(note)),
                answer = &mut self.work => self.answer = answer,
            }
        }
        // What was said before the answer is heard before it.
        match self.notes.as_mut().and_then(|notes| notes.try_recv().ok()) {
            Some(note) => Some(JsonRpcMessage::notification(note)),
            None => self.answer.take(),
        }
    }
}

impl Drop for Direct {
    fn drop(&mut self) {
        self.cancel.cancel();
        if let (DirectCall::Here(work), Ok(runtime)) =
            (std::mem::replace(&mut self.work, DirectCall::Over), Handle::try_current())
        {
            runtime.spawn(work.in_current_span());
        }
    }
}

/// A call on its way.
enum DirectCall {
    Here(BoxFuture<'static, ServerMessage>),
    Apart(JoinHandle<ServerMessage>),
    Over,
}

impl Future for DirectCall {
    type Output = Option<ServerMessage>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<ServerMessage>> {
        let polled = match &mut *self {
            Self::Here(work) => work.as_mut().poll(cx).map(Some),
            Self::Apart(work) => Pin::new(work).poll(cx).map(Result::ok),
            Self::Over => return Poll::Ready(None),
        };
        if polled.is_ready() {
            *self = Self::Over;
        }
        polled
    }
}

/// By a peer a handler knows who asks. rmcp makes one only together with a loop, so that those of loops that are over are lent to
/// one request after the other.
#[derive(Default)]
pub(super) struct Peers(Mutex<Vec<Peer<RoleServer>>>);

impl Peers {
    /// So many wait to be lent.
    const KEPT: usize = 64;

    fn spare(&self) -> MutexGuard<'_, Vec<Peer<RoleServer>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `service` is any that could answer.
    pub(super) fn lend(
        self: &Arc<Self>,
        info: InitializeRequestParams,
        service: impl FnOnce() -> Box<dyn DynService<RoleServer>>,
    ) -> PeerLease {
        let spare = self.spare().pop();
        let peer = match spare {
            Some(peer) => {
                peer.set_peer_info(info);
                peer
            }
            None => serve_directly_with_ct(service(), Closed, Some(info), CancellationToken::new()).peer().clone(),
        };
        PeerLease { peer, peers: self.clone() }
    }
}

/// A peer for one request.
pub(super) struct PeerLease {
    peer: Peer<RoleServer>,
    peers: Arc<Peers>,
}

impl Drop for PeerLease {
    fn drop(&mut self) {
        let mut spare = self.peers.spare();
        if spare.len() < Peers::KEPT {
            spare.push(self.peer.clone());
        }
    }
}

/// A client that is gone before it said anything.
struct Closed;

impl Transport<RoleServer> for Closed {
    type Error = std::io::Error;

    fn send(&mut self, _: ServerMessage) -> impl Future<Output = std::io::Result<()>> + Send + 'static {
        std::future::ready(Ok(()))
    }

    async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleServer>> {
        None
    }

    async fn close(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
