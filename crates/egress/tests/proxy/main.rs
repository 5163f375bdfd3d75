//! The proxy, by sockets: what gets through, what does not, and what either is told.

mod http;
mod limits;
mod loopback;
mod namespaces;
mod place;
mod tunnels;
mod upstream;
