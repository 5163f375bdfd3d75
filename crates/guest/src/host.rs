//! This module is the connection to the host: incoming frames, and one bounded buffer of outgoing frames.
//!
//! It knows no kernels. Messages that are sent while no host is connected are discarded, because replies belong to the
//! host that asked.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use proto::{Decoder, Frame, FrameKind, FromGuest, MAX_CHUNK};
use rustix::buffer::spare_capacity;
use rustix::io::Errno;

/// Number of unsent bytes above which pipes and files are not read.
const HIGH_WATER: usize = 1 << 20;
const READ: usize = 64 << 10;
/// Capacity above which an empty buffer is freed.
const KEEP: usize = 64 << 10;

/// Call number of work whose host is gone. Messages for it are discarded, because the next host numbers its calls
/// independently.
pub(crate) const NOBODY: u64 = u64::MAX;

#[derive(Default)]
pub(crate) struct Host {
    stream: Option<UnixStream>,
    decoder: Decoder,
    input: Vec<u8>,
    out: Vec<u8>,
    sent: usize,
    pub greeted: bool,
}

/// The connection can no longer be used. The reason is not recorded, because it would matter only in a debugger.
#[derive(Debug)]
pub(crate) struct Broken;

impl Host {
    pub(crate) fn connect(&mut self, stream: UnixStream) -> std::io::Result<()> {
        stream.set_nonblocking(true)?;
        *self = Self { stream: Some(stream), ..Self::default() };
        Ok(())
    }

    pub(crate) fn disconnect(&mut self) {
        *self = Self::default();
    }

    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.stream.as_ref().map(AsFd::as_fd)
    }

    pub(crate) fn wants_to_write(&self) -> bool {
        self.sent < self.out.len()
    }

    /// Returns whether senders that can wait should wait before they send more.
    pub(crate) fn is_full(&self) -> bool {
        self.out.len() - self.sent > HIGH_WATER
    }

    /// Reads once. A plain `read` drops descriptors that come along; the guest accepts none.
    pub(crate) fn receive(&mut self) -> Result<(), Broken> {
        let Some(stream) = &self.stream else { return Ok(()) };
        self.input.clear();
        self.input.reserve(READ);
        match rustix::io::read(stream, spare_capacity(&mut self.input)) {
            Ok(0) => Err(Broken),
            Ok(_) => {
                self.decoder.push(&self.input);
                Ok(())
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            Err(_) => Err(Broken),
        }
    }

    pub(crate) fn next_frame(&mut self) -> Result<Option<Frame>, Broken> {
        self.decoder.next_frame().map_err(|_| Broken)
    }

    /// Appends a message to the buffer. A message that is too large for a frame is returned as an error, because the
    /// caller knows what it stood for.
    pub(crate) fn try_send(&mut self, call: u64, message: &FromGuest) -> Result<(), proto::FrameError> {
        if self.stream.is_none() || call == NOBODY {
            return Ok(());
        }
        proto::encode_message(&mut self.out, call, message)
    }

    /// Sends a message that is small by construction.
    pub(crate) fn send(&mut self, call: u64, message: &FromGuest) {
        let sent = self.try_send(call, message);
        debug_assert!(sent.is_ok());
    }

    pub(crate) fn send_data(&mut self, kind: FrameKind, call: u64, bytes: &[u8]) {
        if self.stream.is_none() || call == NOBODY {
            return;
        }
        for chunk in bytes.chunks(MAX_CHUNK) {
            proto::encode(&mut self.out, kind, call, chunk);
        }
    }

    /// Discards the sent bytes once they are more than half of the buffer, so that each byte is moved about once.
    fn forget_sent(&mut self) {
        if self.sent > self.out.len() / 2 {
            self.out.drain(..self.sent);
            self.sent = 0;
        }
    }

    /// Writes as much as the socket accepts.
    pub(crate) fn flush(&mut self) -> Result<(), Broken> {
        let Some(stream) = &self.stream else { return Ok(()) };
        while self.sent < self.out.len() {
            match rustix::net::send(stream, &self.out[self.sent..], rustix::net::SendFlags::NOSIGNAL) {
                Ok(written) => self.sent += written,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    self.forget_sent();
                    return Ok(());
                }
                Err(_) => return Err(Broken),
            }
        }
        self.sent = 0;
        self.out.clear();
        if self.out.capacity() > KEEP {
            self.out = Vec::new();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    /// HOSTILE R14: a reader that never catches up must not make the buffer grow with everything that ever passed
    /// through it.
    #[test]
    fn what_was_sent_takes_no_room_while_there_is_more_to_send() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut host = Host::default();
        host.connect(ours).unwrap();
        let (mut chunk, mut most) = (vec![0; 64 << 10], 0);
        for _ in 0..2000 {
            while !host.is_full() {
                host.send_data(FrameKind::Stdout, 1, &[b'x'; 32 << 10]);
            }
            host.flush().unwrap();
            theirs.read_exact(&mut chunk).unwrap();
            most = most.max(host.out.capacity());
        }
        assert!(most <= 4 * HIGH_WATER, "{most}");
    }
}
