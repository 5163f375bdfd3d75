//! The Model Context Protocol's transports, in front of any rmcp service: lines ([`stdio`]) and Streamable HTTP
//! ([`http`]), with all revisions of the protocol.
//!
//! This crate adds what rmcp lacks: every message is answered or deliberately ignored, no answer reaches another
//! request, a panic is an error, and what clients send is within budgets. It knows no dialect and no tool; a service for
//! each request is passed in.
#![warn(unreachable_pub)]

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use engine::op::Tenant;
use rmcp::model::ServerNotification;
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

mod answer;
pub mod http;
mod line;
mod message;
mod service;
pub mod stdio;

pub use message::{MAX_ASIDE, weight};
pub use service::{ExtraMembers, is_modern};

use service::Guarded;

/// The tenant and connection of one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    pub tenant: Tenant,
    /// Id of the client's connection; see [`engine::op::Call::connection`].
    pub connection: Option<String>,
    /// Whether the caller may learn where shared volumes are on this machine.
    pub show_host_paths: bool,
}

impl Caller {
    /// Returns the local tenant's caller, for transports that do not distinguish callers.
    pub fn local(connection: Option<String>) -> Self {
        Self { tenant: Tenant::local(), connection, show_host_paths: true }
    }
}

/// Origin of a request; the transport puts it into the request's extensions.
#[derive(Debug, Clone, Default)]
pub struct Origin {
    /// Id that the client gave to the request.
    pub id: Value,
    /// Id that this server gave to the request; it is the same in every line about it.
    pub request_id: Option<String>,
    pub peer: Option<SocketAddr>,
}

/// Channel for the notifications of a request; a transport without a service loop puts it into the request's
/// extensions.
#[derive(Clone)]
pub struct Outlet(pub mpsc::Sender<ServerNotification>);

/// A slot for a result that is already encoded. A transport that can send such a result puts the slot into a request's
/// extensions; a handler that fills it returns an empty result.
#[derive(Clone, Default)]
pub struct Prepared(Arc<OnceLock<Bytes>>);

impl Prepared {
    /// Fills the slot. Only the first result counts.
    pub fn set(&self, result: Bytes) {
        let _ = self.0.set(result);
    }

    fn get(&self) -> Option<&Bytes> {
        self.0.get()
    }
}

/// Signal in a tool call's extensions that is cancelled when the call has its place in the engine's queue. rmcp starts
/// the handlers of several requests in any order; a transport that waits for this signal between them keeps the
/// client's order.
#[derive(Clone)]
pub struct QueuedSignal(pub CancellationToken);
