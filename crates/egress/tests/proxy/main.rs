//! The proxy, by sockets: what gets through, what does not, and what either is told.

mod http;
mod limits;
mod namespaces;
mod place;
mod tunnels;
