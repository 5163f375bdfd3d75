//! Passes a request directly to its handler, without a service loop, task or channel, for services that send no
//! requests to their clients.
//!
//! The call is polled by the code that waits for its answer. A call that is dropped before its end is cancelled and
//! finishes in the background, so that it is still logged and recorded in the journal.

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
use crate::{Outlet, Prepared};

/// Maximum number of notifications that wait for a client that reads slowly.
const QUEUE: usize = 16;

type ServerMessage = TxJsonRpcMessage<RoleServer>;

pub(super) struct Direct {
    work: DirectCall,
    /// Notifications of the handler, if the client asked for progress.
    notifications: Option<mpsc::Receiver<ServerNotification>>,
    answer: Option<ServerMessage>,
    prepared: Prepared,
    cancel: CancellationToken,
}

impl Direct {
    /// Returns whether a request can be answered directly. Requests that open a session or a subscription need a
    /// separate peer, and thus a service loop.
    pub(super) fn takes(request: &ClientRequest) -> bool {
        !matches!(request, ClientRequest::InitializeRequest(_) | ClientRequest::SubscriptionsListenRequest(_))
    }

    /// Creates the call without polling it. `queued` is cancelled at the latest when the call ends.
    pub(super) fn new(
        service: Box<dyn DynService<RoleServer>>,
        mut request: ClientRequest,
        id: RequestId,
        peer: PeerLease,
        cancel: CancellationToken,
        queued: CancellationToken,
    ) -> Self {
        let mut context = RequestContext::new(id.clone(), peer.peer.clone());
        context.ct = cancel.clone();
        std::mem::swap(&mut context.meta, request.get_meta_mut());
        std::mem::swap(&mut context.extensions, request.extensions_mut());
        let prepared = Prepared::default();
        context.extensions.insert(prepared.clone());
        let notifications = context.meta.get_progress_token().map(|_| {
            let (outlet, notifications) = mpsc::channel(QUEUE);
            context.extensions.insert(Outlet(outlet));
            notifications
        });
        let work = async move {
            let _peer = peer;
            let _queued = queued.drop_guard();
            match service.handle_request(request, context).await {
                Ok(result) => JsonRpcMessage::response(result, id),
                Err(error) => JsonRpcMessage::error(error, Some(id)),
            }
        };
        Self { work: DirectCall::Here(Box::pin(work)), notifications, answer: None, prepared, cancel }
    }

    /// Returns the encoded result, if the handler left one (see [`Prepared`]).
    pub(super) fn prepared(&self) -> Option<&Bytes> {
        self.prepared.get()
    }

    /// Moves the call to a task, so that it continues whether or not its messages are awaited.
    pub(super) fn detach(&mut self, turn: Option<Turn>) {
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

    /// Returns the next message; the answer is the last one. The future is cancel safe.
    pub(super) async fn next(&mut self) -> Option<ServerMessage> {
        if self.answer.is_none() {
            let notified = async {
                match &mut self.notifications {
                    Some(notifications) => notifications.recv().await,
                    None => None,
                }
            };
            tokio::select! {
                biased;
                Some(notification) = notified => return Some(JsonRpcMessage::notification(notification)),
                answer = &mut self.work => self.answer = answer,
            }
        }
        // Notifications sent before the answer are delivered before it.
        match self.notifications.as_mut().and_then(|notifications| notifications.try_recv().ok()) {
            Some(notification) => Some(JsonRpcMessage::notification(notification)),
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

/// A call in progress: polled in place, running in a task, or finished.
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

/// Spare peers, which requests lease one after another. A peer describes the client to a handler. rmcp creates a peer
/// only together with a service loop, so peers whose loops have ended are used again.
#[derive(Default)]
pub(super) struct Peers(Mutex<Vec<Peer<RoleServer>>>);

impl Peers {
    /// Maximum number of spare peers.
    const MOST: usize = 64;

    fn spare(&self) -> MutexGuard<'_, Vec<Peer<RoleServer>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a spare peer, or creates one. The service loop of a new peer ends at once, so `service` may return any
    /// service of the endpoint.
    pub(super) fn lease(
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

/// A peer that one request uses.
pub(super) struct PeerLease {
    peer: Peer<RoleServer>,
    peers: Arc<Peers>,
}

impl Drop for PeerLease {
    fn drop(&mut self) {
        let mut spare = self.peers.spare();
        if spare.len() < Peers::MOST {
            spare.push(self.peer.clone());
        }
    }
}

/// A transport whose client has already disconnected.
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
