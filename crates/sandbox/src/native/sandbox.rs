//! This module implements a sandbox of the native back end.

use std::net::TcpListener;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use jail::wire::{LauncherCall, LauncherReply};
use tokio::net::UnixStream;

use super::connection::{LauncherConnection, lock, refusal};
use crate::stream::Stream;
use crate::{BackendError, GuestStream, Isolation, Sandbox, Stats};

#[derive(Debug)]
pub(super) struct NativeSandbox {
    pub id: String,
    pub isolation: Isolation,
    pub connection: Arc<LauncherConnection>,
    pub instance: Arc<OwnedFd>,
    /// Listening socket for the egress, until `take_egress_listener` takes it.
    pub egress: Mutex<Option<TcpListener>>,
    pub destroyed: AtomicBool,
}

impl Drop for NativeSandbox {
    fn drop(&mut self) {
        if !*self.destroyed.get_mut() {
            self.connection.post(LauncherCall::Destroy { sandbox: std::mem::take(&mut self.id) });
        }
    }
}

impl NativeSandbox {
    async fn order(&self, call: LauncherCall) -> Result<(), BackendError> {
        match self.connection.call(call, &[]).await? {
            LauncherReply::Done => Ok(()),
            LauncherReply::Gone => Err(BackendError::Gone(self.id.clone())),
            other => Err(refusal(other)),
        }
    }
}

#[async_trait]
impl Sandbox for NativeSandbox {
    fn id(&self) -> &str {
        &self.id
    }

    fn isolation(&self) -> &Isolation {
        &self.isolation
    }

    async fn connect(&self) -> Result<GuestStream, BackendError> {
        // This goes through the directory's descriptor because the whole path may be too long for a socket address.
        let path = format!("/proc/self/fd/{}/{}/guest.sock", self.instance.as_raw_fd(), self.id);
        let stream = UnixStream::connect(path).await.and_then(UnixStream::into_std).and_then(Stream::new);
        Ok(Box::new(stream.map_err(|_| BackendError::Gone(self.id.clone()))?))
    }

    async fn fork_zygote(&self) -> Result<(), BackendError> {
        self.order(LauncherCall::Fork { sandbox: self.id.clone() }).await
    }

    async fn enter_browser(&self) -> Result<(), BackendError> {
        self.order(LauncherCall::EnterBrowser { sandbox: self.id.clone() }).await
    }

    fn take_egress_listener(&self) -> Option<TcpListener> {
        lock(&self.egress).take()
    }

    async fn stats(&self) -> Result<Stats, BackendError> {
        match self.connection.call(LauncherCall::Stats { sandbox: self.id.clone() }, &[]).await? {
            LauncherReply::Stats(usage) => Ok(usage),
            _ => Err(BackendError::Gone(self.id.clone())),
        }
    }

    async fn destroy(&self) -> Result<Option<Stats>, BackendError> {
        if self.destroyed.load(Ordering::Relaxed) {
            return Ok(None);
        }
        drop(self.take_egress_listener());
        let last = match self.connection.call(LauncherCall::Destroy { sandbox: self.id.clone() }, &[]).await {
            Ok(LauncherReply::Destroyed(usage)) => Some(usage),
            Ok(LauncherReply::Done) => None,
            Ok(other) => return Err(refusal(other)),
            // The sandbox ended together with its launcher.
            Err(_) if self.connection.is_gone() => None,
            Err(e) => return Err(e),
        };
        self.destroyed.store(true, Ordering::Relaxed);
        Ok(last)
    }
}
