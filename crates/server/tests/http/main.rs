//! The HTTP transport over real sockets, with a small service of its own behind it: every trap of the protocol, the `A` rows
//! that concern it, and how connections and sessions are bounded.

mod client;
mod connections;
mod engine;
mod files;
mod log;
mod neighbours;
mod protocol;
mod removal;
mod sessions;
mod shutdown;
mod toy;
mod uploads;
