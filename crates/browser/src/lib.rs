//! Drives the browser of a sandbox: starts Chromium, speaks its DevTools protocol over a pipe, reads and moves pages.
//!
//! Runs as a process of its own beside the browser, with the browser's rights and no others: whatever a page does to this process it
//! can do only to itself. Asked and answered in `proto` frames over one socket, by the guest.

pub mod snapshot;

use std::io;
use std::os::unix::net::UnixStream;

/// Serves the guest until it closes the connection; the browser ends with it. The first message is a `proto::browser::ToDriver::Start`.
pub fn serve(_guest: UnixStream) -> io::Result<()> {
    Err(io::Error::other("there is no browser yet"))
}
