//! The browser driver of a sandbox: starts Chromium, speaks the DevTools protocol with it over a pipe, and reads and
//! operates pages.
//!
//! The driver runs as a separate process beside the browser, with the browser's rights and no others, so a page that
//! takes over the driver gains nothing that it could not get from the browser. The guest sends requests and receives
//! replies in `proto` frames over one socket.
#![warn(unreachable_pub)]

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
mod snapshot;
mod state;
mod workspace;

use std::io;
use std::os::unix::net::UnixStream;

/// Serves the guest until it closes the connection; the browser then ends as well. The first message has to be a
/// `proto::browser::ToDriver::Start`.
pub fn serve(guest: UnixStream) -> io::Result<()> {
    guest.set_nonblocking(true)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    tokio::task::LocalSet::new()
        .block_on(&runtime, async { serve::serve_guest(tokio::net::UnixStream::from_std(guest)?).await })
}
