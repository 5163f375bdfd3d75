//! Drives the browser of a sandbox: starts Chromium, speaks its DevTools protocol over a pipe, reads and moves pages.
//!
//! Runs as a process of its own beside the browser, with the browser's rights and no others: whatever a page does to this process it
//! can do only to itself. Asked and answered in `proto` frames over one socket, by the guest.

mod act;
mod cdp;
mod downloads;
mod driver;
mod events;
mod launch;
mod log;
mod page;
mod serve;
mod settle;
pub mod snapshot;
mod state;

use std::io;
use std::os::unix::net::UnixStream;

/// Serves the guest until it closes the connection; the browser ends with it. The first message is a `proto::browser::ToDriver::Start`.
pub fn serve(guest: UnixStream) -> io::Result<()> {
    guest.set_nonblocking(true)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    tokio::task::LocalSet::new()
        .block_on(&runtime, async { serve::converse(tokio::net::UnixStream::from_std(guest)?).await })
}
