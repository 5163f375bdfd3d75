//! This module reads lines from a pipe that anything in the sandbox may write to, and queues bytes that are written
//! into one.
//!
//! A line that is too long is skipped and counted, so that garbage cannot use up memory.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::buffer::spare_capacity;
use rustix::io::Errno;

/// Maximum length of a line. A driver never writes a longer one.
const MAX_LINE: usize = 12 << 20;
const READ: usize = 64 << 10;

#[derive(Debug)]
pub(crate) struct LineReader {
    fd: Option<OwnedFd>,
    buffer: Vec<u8>,
    /// Position up to which the buffer contains no further line end.
    searched: usize,
    start: usize,
    /// Whether the reader is in the middle of a line that is too long.
    skipping: bool,
    pub skipped: u64,
}

/// Result of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Read {
    Some,
    Nothing,
    End,
}

impl LineReader {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self { fd: Some(fd), buffer: Vec::new(), searched: 0, start: 0, skipping: false, skipped: 0 }
    }

    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }

    /// Reads once from the pipe.
    pub(crate) fn read(&mut self) -> Read {
        let Some(fd) = &self.fd else { return Read::End };
        self.buffer.drain(..self.start);
        self.searched -= self.start;
        self.start = 0;
        self.buffer.reserve(READ);
        match rustix::io::read(fd, spare_capacity(&mut self.buffer)) {
            Ok(0) => {
                self.fd = None;
                Read::End
            }
            Ok(_) => Read::Some,
            Err(Errno::AGAIN | Errno::INTR) => Read::Nothing,
            Err(_) => {
                self.fd = None;
                Read::End
            }
        }
    }

    /// Returns the next complete line of what has been read.
    pub(crate) fn next_line(&mut self) -> Option<Vec<u8>> {
        loop {
            let Some(at) = self.buffer[self.searched..].iter().position(|&b| b == b'\n') else {
                self.searched = self.buffer.len();
                self.bound();
                return None;
            };
            let end = self.searched + at;
            let line = (!self.skipping).then(|| self.buffer[self.start..end].to_vec());
            self.start = end + 1;
            self.searched = self.start;
            self.skipping = false;
            if line.is_some() {
                return line;
            }
        }
    }

    fn bound(&mut self) {
        if self.skipping || self.buffer.len() - self.start > MAX_LINE {
            self.skipped += u64::from(!self.skipping);
            self.skipping = true;
            self.buffer = Vec::new();
            (self.start, self.searched) = (0, 0);
        } else if self.start == self.buffer.len() {
            self.buffer.clear();
            (self.start, self.searched) = (0, 0);
            if self.buffer.capacity() > READ {
                self.buffer = Vec::new();
            }
        }
    }
}

/// A queue of bytes that are written into a pipe.
#[derive(Debug)]
pub(crate) struct Writer {
    fd: Option<OwnedFd>,
    bytes: Vec<u8>,
    written: usize,
}

impl Writer {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self { fd: Some(fd), bytes: Vec::new(), written: 0 }
    }

    /// Returns the descriptor to poll while there is something to write.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().filter(|_| self.written < self.bytes.len()).map(AsFd::as_fd)
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        self.write();
    }

    /// Writes as much as fits. If the reader is gone, the bytes are dropped here; its end is noticed elsewhere.
    pub(crate) fn write(&mut self) {
        let Some(fd) = &self.fd else { return };
        while self.written < self.bytes.len() {
            match rustix::io::write(fd, &self.bytes[self.written..]) {
                Ok(written) => self.written += written,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(_) => {
                    self.fd = None;
                    break;
                }
            }
        }
        self.bytes = Vec::new();
        self.written = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::pipe_from_child;

    #[test]
    fn lines_come_back_however_they_were_written() {
        let (reader, writer) = pipe_from_child().unwrap();
        let mut lines = LineReader::new(reader);
        let mut got = Vec::new();
        for part in ["one\ntw", "o\n", "\nthr", "ee", "\n"] {
            rustix::io::write(&writer, part.as_bytes()).unwrap();
            assert_eq!(lines.read(), Read::Some);
            got.extend(std::iter::from_fn(|| lines.next_line()));
        }
        assert_eq!(got, [&b"one"[..], b"two", b"", b"three"]);
        assert_eq!(lines.read(), Read::Nothing);
        drop(writer);
        assert_eq!(lines.read(), Read::End);
    }

    #[test]
    fn a_line_without_end_is_skipped_and_takes_no_memory() {
        let (reader, writer) = pipe_from_child().unwrap();
        let mut lines = LineReader::new(reader);
        let mut most = 0;
        for _ in 0..(3 * MAX_LINE / READ) {
            rustix::io::write(&writer, &[b'x'; 60_000]).unwrap();
            lines.read();
            assert_eq!(lines.next_line(), None);
            most = most.max(lines.buffer.capacity());
        }
        assert!(most <= 2 * MAX_LINE + 2 * READ, "{most}");
        rustix::io::write(&writer, b"end\nnext\n").unwrap();
        lines.read();
        assert_eq!(lines.next_line().unwrap(), b"next");
        assert_eq!(lines.skipped, 1);
    }
}
