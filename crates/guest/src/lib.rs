//! This crate is the guest, PID 1 of a sandbox. It starts kernels and commands, moves files, reaps processes, enforces
//! deadlines, and serves `proto`.
//!
//! It holds no secret and trusts nothing that runs beside it. It has one thread and no async runtime: every sandbox has
//! a guest, so its memory is paid for as often as there are sandboxes.
#![warn(unreachable_pub)]

mod arrivals;
mod browser;
mod command;
mod config;
mod deadline;
mod event;
mod files;
mod host;
mod kernel;
pub mod kernels;
mod lines;
mod output;
mod outputs;
mod process;
mod search;
mod searcher;
mod server;
mod transpile;
mod transpiler;
mod uploads;

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};

pub use config::GuestConfig;
pub use search::serve as serve_search;
pub use transpile::serve as serve_transpiler;

/// Serves one connection in the calling thread until it closes. Kernels and commands end with it.
pub fn serve(stream: UnixStream, config: GuestConfig) -> io::Result<()> {
    server::Server::on_stream(stream, config)?.run()
}

/// Serves one host after the other, until none has come for the adoption grace time or SIGTERM arrives. `forks`
/// delivers the processes that the launcher puts into the sandbox.
pub fn serve_listener(
    listener: UnixListener,
    signals: OwnedFd,
    forks: Option<OwnedFd>,
    config: GuestConfig,
) -> io::Result<()> {
    server::Server::on_listener(listener, signals, forks, config)?.run()
}
