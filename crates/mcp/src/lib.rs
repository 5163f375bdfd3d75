//! The transports of the Model Context Protocol in front of any rmcp service: lines ([`stdio`]) and Streamable HTTP
//! ([`http`]), with all revisions of the protocol.
//!
//! This crate adds what rmcp lacks: every message is answered or deliberately ignored, no answer reaches another
//! request, a panic becomes an error, and the data of clients stays within budgets. The crate knows no dialect and no
//! tool; its caller passes in a service for each request.
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
mod errors;
pub mod http;
mod line;
mod membership;
mod message;
mod revision;
mod service;
pub mod stdio;

pub use errors::ErrorStyle;
pub use membership::Membership;
pub use message::{MAX_UNSOLICITED, weight};
pub use revision::{EncodedResult, Revision};
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
    /// The membership of the tenant. Sessions and streams end with it.
    pub membership: Membership,
}

impl Caller {
    /// Returns the local tenant's caller, for transports that do not distinguish callers.
    pub fn local(connection: Option<String>) -> Self {
        Self { tenant: Tenant::local(), connection, show_host_paths: true, membership: Membership::default() }
    }
}

/// The origin of a request. The transport puts it into the request's extensions.
#[derive(Debug, Clone, Default)]
pub struct Origin {
    /// Id that the client gave to the request.
    pub id: Value,
    /// Id that this server gave to the request. It is the same in every log line about the request.
    pub request_id: Option<String>,
    pub peer: Option<SocketAddr>,
}

/// A channel for the notifications of a request. A transport without a service loop puts it into the request's
/// extensions.
#[derive(Clone)]
pub struct Outlet(pub mpsc::Sender<ServerNotification>);

/// A slot for a result that is already encoded. A transport that can send such a result puts the slot into a request's
/// extensions. A handler that fills the slot returns an empty result.
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

/// A signal in a tool call's extensions, which is cancelled when the call has its place in the engine's queue. rmcp
/// starts the handlers of several requests in any order; a transport that waits for this signal between them keeps the
/// client's order.
#[derive(Clone)]
pub struct QueuedSignal(pub CancellationToken);
