//! Counts connections, sessions and bytes of the transport, for the server's metrics.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Handle to the counters. It is cheap to clone; all clones count together.
#[derive(Clone, Default)]
pub struct Counters(Arc<Counts>);

#[derive(Default)]
struct Counts {
    connections: AtomicU64,
    connections_open: AtomicU64,
    sessions_open: AtomicU64,
    bytes_served: AtomicU64,
}

/// The counters at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HttpTotals {
    pub connections: u64,
    pub connections_open: u64,
    pub sessions_open: u64,
    /// Bytes of bodies that were sent: answers and files.
    pub bytes_served: u64,
}

impl Counters {
    pub fn totals(&self) -> HttpTotals {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        HttpTotals {
            connections: read(&self.0.connections),
            connections_open: read(&self.0.connections_open),
            sessions_open: read(&self.0.sessions_open),
            bytes_served: read(&self.0.bytes_served),
        }
    }

    /// Counts a connection, which is open as long as the returned value lives.
    pub(super) fn connection(&self) -> Open {
        self.0.connections.fetch_add(1, Ordering::Relaxed);
        self.open(|counts| &counts.connections_open)
    }

    /// Counts an MCP session, which is open as long as the returned value lives.
    pub(super) fn session(&self) -> Open {
        self.open(|counts| &counts.sessions_open)
    }

    fn open(&self, gauge: fn(&Counts) -> &AtomicU64) -> Open {
        gauge(&self.0).fetch_add(1, Ordering::Relaxed);
        Open { counts: self.0.clone(), gauge }
    }

    pub(super) fn served(&self, bytes: u64) {
        self.0.bytes_served.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// A connection or session that is open.
#[must_use = "it counts as closed when this value is dropped"]
pub(super) struct Open {
    counts: Arc<Counts>,
    gauge: fn(&Counts) -> &AtomicU64,
}

impl Drop for Open {
    fn drop(&mut self) {
        (self.gauge)(&self.counts).fetch_sub(1, Ordering::Relaxed);
    }
}
