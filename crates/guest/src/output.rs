//! This module handles one output stream of a process: it reads the descriptor, coalesces, counts and truncates.
//!
//! While a call runs, the stream belongs to that call. Between calls it fills a small tail, which the next call
//! receives as late output. The module knows no kernels and never waits. The constants here bound its memory, no matter
//! how much is written.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use proto::{FrameKind, FromGuest, KeptOutput, RunEnd, RunStatus, Stream};
use rustix::buffer::spare_capacity;
use rustix::io::Errno;
use rustix::pipe::PipeFlags;

use crate::host::{Host, NOBODY};
use crate::outputs::{Draft, Outputs};
use crate::process::ChildFds;

/// Size at which a chunk is sent.
const CHUNK: usize = 32 << 10;
/// Age of its first byte at which a smaller chunk is sent.
const CHUNK_AGE: Duration = Duration::from_millis(5);
/// Number of bytes that are stored from the end of output that is not forwarded.
const TAIL: usize = 64 << 10;
/// Size below which a read is followed by a pause, so that a program that writes byte by byte does not cause one
/// wake-up per byte.
const TRICKLE: usize = 4 << 10;
/// Time for which the output of a new call is not polled. A call that ends sooner wakes the guest once, at its end, and
/// its output is read then. The output of a longer call is read from this time on.
const NEW_CALL_PAUSE: Duration = Duration::from_millis(2);
/// Pause between reads while no call receives the output.
const IDLE_PAUSE: Duration = Duration::from_millis(20);

/// The last bytes of a long stream.
#[derive(Debug, Default)]
struct Tail {
    bytes: Vec<u8>,
    dropped: u64,
}

impl Tail {
    fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        if self.bytes.len() > 2 * TAIL {
            self.cut();
        }
    }

    fn cut(&mut self) {
        let surplus = self.bytes.len().saturating_sub(TAIL);
        self.bytes.drain(..surplus);
        self.dropped += surplus as u64;
    }

    /// Takes the bytes and the number of bytes that were dropped before them, and resets both.
    fn take(&mut self) -> (Vec<u8>, u64) {
        self.cut();
        let Self { bytes, dropped } = std::mem::take(self);
        (bytes, dropped)
    }
}

/// Determines which output of a call is forwarded and kept.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Share {
    /// Maximum number of bytes of a stream that are forwarded.
    pub forward_bytes: u64,
    /// Length above which a stream becomes kept output; `None` disables this.
    pub keep_over: Option<u64>,
}

/// The call to which a stream currently belongs.
#[derive(Debug, Clone, Copy)]
struct Owner {
    call: u64,
    forward_bytes: u64,
}

#[derive(Debug)]
struct Output {
    fd: Option<OwnedFd>,
    outputs: Outputs,
    draft: Option<Draft>,
    stream: Stream,
    owner: Option<Owner>,
    pending: Vec<u8>,
    pending_since: Option<Instant>,
    quiet_until: Option<Instant>,
    total: u64,
    tail: Tail,
}

impl Output {
    fn new(stream: Stream, fd: Option<OwnedFd>, outputs: &Outputs) -> Self {
        Self {
            fd,
            outputs: outputs.clone(),
            draft: None,
            stream,
            owner: None,
            pending: Vec::new(),
            pending_since: None,
            quiet_until: None,
            total: 0,
            tail: Tail::default(),
        }
    }

    fn begin(&mut self, call: u64, share: Share, now: Instant) {
        self.owner = Some(Owner { call, forward_bytes: share.forward_bytes });
        self.draft = share.keep_over.map(|over| self.outputs.draft(over));
        self.total = 0;
        self.quiet_until = self.fd.is_some().then(|| now + NEW_CALL_PAUSE);
    }

    fn abandon(&mut self) {
        if let Some(owner) = &mut self.owner {
            owner.call = NOBODY;
        }
        self.draft = None;
    }

    /// Sends everything that is left for the call and ends the stream's part in it. Returns the length of the stream,
    /// and the file in which it is kept.
    fn finish(&mut self, host: &mut Host) -> (u64, Option<KeptOutput>) {
        self.flush(host);
        if let Some(owner) = self.owner.take() {
            let (bytes, dropped) = self.tail.take();
            if dropped > 0 {
                host.send(owner.call, &FromGuest::Gap { stream: self.stream, bytes: dropped });
            }
            host.send_data(self.kind(), owner.call, &bytes);
        }
        self.pending = Vec::new();
        self.quiet_until = None;
        let kept = self.draft.take().and_then(|draft| draft.finish(self.stream, self.total));
        (self.total, kept)
    }

    /// Returns the descriptor to poll, unless the stream pauses or has ended.
    fn fd(&self, now: Instant) -> Option<BorrowedFd<'_>> {
        if self.quiet_until.is_some_and(|until| now < until) {
            return None;
        }
        self.fd.as_ref().map(AsFd::as_fd)
    }

    fn wake_at(&self) -> Option<Instant> {
        let flush_at = self.pending_since.map(|since| since + CHUNK_AGE);
        [flush_at, self.quiet_until].into_iter().flatten().min()
    }

    fn tick(&mut self, now: Instant, host: &mut Host) {
        let Some(at) = self.wake_at() else { return };
        if now < at {
            return;
        }
        if self.quiet_until.take().is_some() && !host.is_full() {
            self.read(now, host);
        }
        if self.pending_since.is_some_and(|since| now >= since + CHUNK_AGE) {
            self.flush(host);
        }
    }

    /// Reads once.
    fn read(&mut self, now: Instant, host: &mut Host) {
        let read = self.read_up_to(CHUNK, host);
        if self.owner.is_none() {
            self.quiet_until = Some(now + IDLE_PAUSE);
        } else if read < TRICKLE && self.fd.is_some() {
            self.quiet_until = Some(now + CHUNK_AGE);
        }
    }

    /// Reads exactly what is in the pipe at this moment: everything that was written before the event that is being
    /// handled, and nothing that a flooding process adds meanwhile.
    fn drain(&mut self, host: &mut Host) {
        // A short read has emptied the pipe.
        if self.read_up_to(CHUNK, host) < CHUNK {
            return;
        }
        let Some(fd) = &self.fd else { return };
        let mut left = rustix::io::ioctl_fionread(fd).unwrap_or(0) as usize;
        while left > 0 {
            match self.read_up_to(left.min(CHUNK), host) {
                0 => break,
                read => left -= read.min(left),
            }
        }
    }

    fn flush(&mut self, host: &mut Host) {
        self.pending_since = None;
        if let Some(owner) = self.owner {
            host.send_data(self.kind(), owner.call, &self.pending);
        }
        self.pending.clear();
    }

    fn read_up_to(&mut self, limit: usize, host: &mut Host) -> usize {
        let Some(fd) = &self.fd else { return 0 };
        let mut bytes = Vec::with_capacity(limit);
        match rustix::io::read(fd, spare_capacity(&mut bytes)) {
            Ok(0) => self.fd = None,
            Ok(_) => self.accept(&bytes, host),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(_) => self.fd = None,
        }
        bytes.len()
    }

    fn accept(&mut self, bytes: &[u8], host: &mut Host) {
        let before = self.total;
        self.total += bytes.len() as u64;
        let Some(owner) = self.owner else { return self.tail.push(bytes) };
        if let Some(draft) = &mut self.draft {
            draft.push(bytes);
        }
        let room = usize::try_from(owner.forward_bytes.saturating_sub(before)).unwrap_or(usize::MAX);
        let (send, keep) = bytes.split_at(room.min(bytes.len()));
        self.tail.push(keep);
        if send.is_empty() {
            return;
        }
        self.pending.extend_from_slice(send);
        self.pending_since.get_or_insert_with(Instant::now);
        if self.pending.len() >= CHUNK {
            self.flush(host);
        }
    }

    fn kind(&self) -> FrameKind {
        match self.stream {
            Stream::Stdout => FrameKind::Stdout,
            Stream::Stderr => FrameKind::Stderr,
        }
    }
}

/// Holds both output streams of a process, standard output first.
#[derive(Debug)]
pub(crate) struct Streams([Output; 2]);

impl Streams {
    /// Returns both streams of a child, and its descriptors 1 and 2. With `merge` the descriptors are one pipe, and the
    /// second stream stays empty.
    pub(crate) fn new(merge: bool, outputs: &Outputs) -> std::io::Result<(Self, ChildFds)> {
        let (stdout, one) = pipe_from_child()?;
        let (stderr, two) = if merge {
            (None, one.try_clone()?)
        } else {
            let (reader, writer) = pipe_from_child()?;
            (Some(reader), writer)
        };
        let streams = [(Stream::Stdout, Some(stdout)), (Stream::Stderr, stderr)];
        Ok((Self(streams.map(|(stream, fd)| Output::new(stream, fd, outputs))), vec![(1, one), (2, two)]))
    }

    /// Assigns everything that is read from now on to `call`.
    pub(crate) fn begin(&mut self, call: u64, share: Share, now: Instant) {
        self.0.iter_mut().for_each(|output| output.begin(call, share, now));
    }

    /// Detaches the streams from the host that requested the call; the call itself continues.
    pub(crate) fn abandon(&mut self) {
        self.0.iter_mut().for_each(Output::abandon);
    }

    /// Returns the descriptors to poll.
    pub(crate) fn fds(&self, now: Instant) -> impl Iterator<Item = (Stream, BorrowedFd<'_>)> {
        self.0.iter().filter_map(move |output| Some((output.stream, output.fd(now)?)))
    }

    pub(crate) fn wake_at(&self) -> Option<Instant> {
        self.0.iter().filter_map(Output::wake_at).min()
    }

    pub(crate) fn tick(&mut self, now: Instant, host: &mut Host) {
        self.0.iter_mut().for_each(|output| output.tick(now, host));
    }

    /// Reads one of the streams once.
    pub(crate) fn read(&mut self, stream: Stream, now: Instant, host: &mut Host) {
        let output = self.0.iter_mut().find(|output| output.stream == stream);
        output.into_iter().for_each(|output| output.read(now, host));
    }

    /// Reads exactly what is in the pipes at this moment.
    pub(crate) fn drain(&mut self, host: &mut Host) {
        self.0.iter_mut().for_each(|output| output.drain(host));
    }

    /// Sends the bytes that wait for a full chunk.
    pub(crate) fn flush(&mut self, host: &mut Host) {
        self.0.iter_mut().for_each(|output| output.flush(host));
    }

    /// Takes the output that was written while no call ran, and the number of bytes of it that are lost.
    pub(crate) fn take_late(&mut self) -> [(Vec<u8>, u64); 2] {
        self.0.each_mut().map(|output| output.tail.take())
    }

    /// Sends everything that is left for a call that began at `started`, and its end.
    pub(crate) fn finish(&mut self, call: u64, status: RunStatus, started: Instant, host: &mut Host) {
        let [(stdout_bytes, stdout_kept), (stderr_bytes, stderr_kept)] =
            self.0.each_mut().map(|output| output.finish(host));
        let micros = u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX);
        let end = RunEnd { status, micros, stdout_bytes, stderr_bytes, stdout_kept, stderr_kept };
        host.send(call, &FromGuest::RunEnd { end });
    }
}

/// Creates a pipe whose reading end never blocks. The two ends are separate file descriptions, so the writer is not
/// affected.
pub(crate) fn pipe_from_child() -> std::io::Result<(OwnedFd, OwnedFd)> {
    let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    rustix::fs::fcntl_setfl(&reader, rustix::fs::OFlags::NONBLOCK)?;
    Ok((reader, writer))
}

/// Creates a pipe whose writing end never blocks.
pub(crate) fn pipe_to_child() -> std::io::Result<(OwnedFd, OwnedFd)> {
    let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    rustix::fs::fcntl_setfl(&writer, rustix::fs::OFlags::NONBLOCK)?;
    Ok((reader, writer))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tail_keeps_the_last_bytes_and_counts_the_others() {
        let mut tail = Tail::default();
        for i in 0..1000u32 {
            tail.push(&vec![i as u8; 1000]);
        }
        let (bytes, dropped) = tail.take();
        assert_eq!((bytes.len(), dropped), (TAIL, 1_000_000 - TAIL as u64));
        assert!(bytes.ends_with(&[999u32 as u8; 1000]));
        assert_eq!(tail.take(), (Vec::new(), 0));
    }
}
