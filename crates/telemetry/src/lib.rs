//! What a server records about its calls: log lines, the audit journal, metrics, and traces for OpenTelemetry.
//!
//! The server reports each call to an [`observe::Observer`], which decides what is recorded where.
#![warn(unreachable_pub)]

mod codes;
pub mod journal;
pub mod logging;
pub mod metrics;
pub mod observe;
pub mod otel;
pub mod persistent_secret;
pub mod transfer;
pub mod usage;
