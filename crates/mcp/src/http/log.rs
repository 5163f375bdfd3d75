//! The events of a request that the transport logs. The server decides their wording.

use std::net::SocketAddr;

use serde_json::Value;

/// Tracing target of the transport's log lines and spans.
pub const HTTP_LOG: &str = "sandpool::http";

/// A step of a request on its way through the transport. Bodies are logged only at the debug level.
#[derive(Debug, Clone, Copy)]
pub enum HttpEvent<'a> {
    Request { peer: SocketAddr },
    RequestBody(&'a Value),
    Parsed { method: &'a str, id: &'a Value },
    Sending { method: &'a str },
    Response(&'a Value),
}
