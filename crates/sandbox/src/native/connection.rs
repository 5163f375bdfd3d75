//! This module is the connection to a launcher: it pairs replies with requests and carries descriptors.

use std::collections::HashMap;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use jail::wire::{self, LauncherCall, LauncherReply, LauncherRequest, LauncherResponse};
use tokio::io::Interest;
use tokio::net::UnixDatagram;
use tokio::sync::{oneshot, watch};
use tokio::task::AbortHandle;

use crate::BackendError;

/// Connection to a launcher. It closes when its last owner is dropped, and the launcher then destroys everything it
/// created.
#[derive(Debug)]
pub(super) struct LauncherConnection {
    shared: Arc<LauncherChannel>,
    reader: AbortHandle,
}

#[derive(Debug)]
struct LauncherChannel {
    /// Packet socket. Tokio provides only its readiness; `wire` reads and writes it.
    socket: UnixDatagram,
    next: AtomicU64,
    /// Senders for the calls that wait for a reply, by request id; `None` once the launcher is gone.
    waiting: Mutex<Option<HashMap<u64, oneshot::Sender<ReplyWithFds>>>>,
    /// Becomes true once the launcher is gone.
    ended: watch::Sender<bool>,
}

/// A reply of the launcher with the descriptors that came with it.
type ReplyWithFds = (LauncherReply, Vec<OwnedFd>);

impl Drop for LauncherConnection {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

pub(super) fn lost(e: impl std::fmt::Display) -> BackendError {
    BackendError::Launcher(e.to_string())
}

/// Returns the error that an unwanted reply means.
pub(super) fn refusal(reply: LauncherReply) -> BackendError {
    match reply {
        LauncherReply::Unavailable { why, hint } => BackendError::Unavailable { why, hint },
        LauncherReply::InUse => BackendError::InUse,
        LauncherReply::NoSpace { message } => BackendError::NoSpace(message),
        LauncherReply::Failed { message } => BackendError::Launcher(message),
        other => BackendError::Launcher(format!("unexpected reply `{other:?}`")),
    }
}

impl LauncherChannel {
    async fn read(&self) {
        let receive = || wire::receive::<LauncherResponse>(&self.socket);
        while let Ok(Some((response, fds))) = self.socket.async_io(Interest::READABLE, receive).await {
            let waiter = lock(&self.waiting).as_mut().and_then(|w| w.remove(&response.id));
            if let Some(waiter) = waiter {
                let _ = waiter.send((response.reply, fds));
            }
        }
        // Dropping the senders ends the channel of every waiting call, which reports that the launcher is gone.
        *lock(&self.waiting) = None;
        self.ended.send_replace(true);
    }
}

impl LauncherConnection {
    pub(super) fn open(socket: OwnedFd) -> io::Result<Self> {
        let socket = std::os::unix::net::UnixDatagram::from(socket);
        socket.set_nonblocking(true)?;
        let shared = Arc::new(LauncherChannel {
            socket: UnixDatagram::from_std(socket)?,
            next: AtomicU64::new(1),
            waiting: Mutex::new(Some(HashMap::new())),
            ended: watch::Sender::new(false),
        });
        let reader = tokio::spawn({
            let shared = Arc::clone(&shared);
            async move { shared.read().await }
        });
        Ok(Self { shared, reader: reader.abort_handle() })
    }

    pub(super) fn is_gone(&self) -> bool {
        *self.shared.ended.borrow()
    }

    /// Returns a value that becomes true once the launcher is gone.
    pub(super) fn ended(&self) -> watch::Receiver<bool> {
        self.shared.ended.subscribe()
    }

    pub(super) async fn call(&self, call: LauncherCall, fds: &[BorrowedFd<'_>]) -> Result<LauncherReply, BackendError> {
        self.exchange(call, fds).await.map(|(reply, _)| reply)
    }

    /// Makes a call whose only result is success or failure.
    pub(super) async fn order(&self, call: LauncherCall, fds: &[BorrowedFd<'_>]) -> Result<(), BackendError> {
        match self.call(call, fds).await? {
            LauncherReply::Done => Ok(()),
            other => Err(refusal(other)),
        }
    }

    pub(super) async fn exchange(
        &self,
        call: LauncherCall,
        fds: &[BorrowedFd<'_>],
    ) -> Result<ReplyWithFds, BackendError> {
        let gone = || BackendError::Launcher("it has ended".into());
        let id = self.shared.next.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = oneshot::channel();
        lock(&self.shared.waiting).as_mut().ok_or_else(gone)?.insert(id, sender);
        let request = LauncherRequest { id, call };
        let socket = &self.shared.socket;
        let sent = socket.async_io(Interest::WRITABLE, || wire::send(socket, &request, fds)).await;
        if let Err(e) = sent {
            lock(&self.shared.waiting).as_mut().map(|w| w.remove(&id));
            return Err(lost(e));
        }
        receiver.await.map_err(|_| gone())
    }

    /// Sends a call without waiting for the reply, for values that are being dropped. If the socket is full, a spawned
    /// task waits for room.
    pub(super) fn post(self: &Arc<Self>, call: LauncherCall) {
        let id = self.shared.next.fetch_add(1, Ordering::Relaxed);
        let request = LauncherRequest { id, call };
        let full = wire::send(&self.shared.socket, &request, &[]).is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock);
        if full && let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let connection = Arc::clone(self);
            // Without a runtime the message can be lost: the connection closes soon, and the launcher then destroys
            // everything.
            runtime.spawn(async move { drop(connection.call(request.call, &[]).await) });
        }
    }
}

/// Locks a mutex, even if a holder of it has panicked.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
