//! Files that move over HTTP by their links. The bytes count for the owner of the link as they move, so that a transfer
//! that breaks off, and one that takes long, are counted rightly; the journal has an entry when the transfer is over.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::journal::JournalEntry;
use crate::observe::Observer;
use crate::usage::CallUsage;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    Download,
    Upload,
}

/// One download or upload, which is over when this is dropped.
pub struct Transfer {
    observer: Arc<Observer>,
    direction: Direction,
    /// Owner of the files when the transfer began; its context may be gone at the end.
    tenant: Option<String>,
    context: String,
    /// The client's address, if the transport provides it.
    peer: Option<SocketAddr>,
    bytes: AtomicU64,
    is_complete: AtomicBool,
}

impl Transfer {
    /// Begins a transfer by a link with this key.
    pub fn begin(observer: &Arc<Observer>, direction: Direction, key: &str, peer: Option<SocketAddr>) -> Self {
        let (tenant, context) = observer.owner_of(key);
        let (bytes, is_complete) = (AtomicU64::new(0), AtomicBool::new(false));
        Self { observer: observer.clone(), direction, tenant, context, peer, bytes, is_complete }
    }

    /// Counts bytes that were handed to the connection, or that came from it.
    pub fn add(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        if let Some(tenant) = &self.tenant {
            let (bytes_in, bytes_out) = self.direction.split(bytes);
            self.observer.count(tenant, CallUsage { calls: 0, bytes_in, bytes_out });
        }
    }

    pub fn complete(&self) {
        self.is_complete.store(true, Ordering::Relaxed);
    }
}

impl Direction {
    /// Returns the bytes in and the bytes out.
    fn split(self, bytes: u64) -> (u64, u64) {
        match self {
            Self::Download => (0, bytes),
            Self::Upload => (bytes, 0),
        }
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        let Some(journal) = self.observer.journal() else { return };
        let (bytes, is_complete) = (*self.bytes.get_mut(), *self.is_complete.get_mut());
        let event = match (self.direction, is_complete) {
            (Direction::Download, _) => "file_read",
            (Direction::Upload, true) => "file_uploaded",
            (Direction::Upload, false) => "upload_failed",
        };
        let (bytes_in, bytes_out) = self.direction.split(bytes);
        let is_download = self.direction == Direction::Download;
        journal.record(JournalEntry {
            tenant: self.tenant.take(),
            context: Some(std::mem::take(&mut self.context)),
            bytes_in: (!is_download).then_some(bytes_in),
            bytes_out: is_download.then_some(bytes_out),
            outcome: (is_download && !is_complete).then(|| "incomplete".into()),
            peer: self.peer,
            ..JournalEntry::event(event)
        });
    }
}
