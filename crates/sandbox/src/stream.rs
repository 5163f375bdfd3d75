//! This module implements the connection to a guest without needless wake-ups. A Unix socket reports that it is
//! writable every time the peer has read, but only a writer that waits for room needs that event.

use std::io;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};

pub(crate) struct Stream {
    socket: AsyncFd<UnixStream>,
    /// A duplicate of the socket that waits for room, present while the socket is full.
    full: Option<AsyncFd<OwnedFd>>,
}

impl Stream {
    pub(crate) fn new(socket: UnixStream) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        #[expect(
            deprecated,
            reason = "its successor is unsafe for types that do not own their descriptor; this one does"
        )]
        let socket = AsyncFd::with_interest(socket, Interest::READABLE)?;
        Ok(Self { socket, full: None })
    }

    /// Returns a duplicate of the socket that is registered for writability.
    fn waiting_for_room(&self) -> io::Result<AsyncFd<OwnedFd>> {
        let same = OwnedFd::from(self.socket.get_ref().try_clone()?);
        #[expect(deprecated, reason = "as above")]
        AsyncFd::with_interest(same, Interest::WRITABLE)
    }
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            let mut ready = ready!(self.socket.poll_read_ready(cx))?;
            let unfilled = buffer.initialize_unfilled();
            match rustix::net::recv(ready.get_inner(), &mut *unfilled, RecvFlags::empty()) {
                Ok((_, read)) => {
                    // A short read has emptied the socket: nothing more can be read until the next readiness event.
                    if read > 0 && read < unfilled.len() {
                        ready.clear_ready();
                    }
                    buffer.advance(read);
                    return Poll::Ready(Ok(()));
                }
                Err(Errno::AGAIN) => ready.clear_ready(),
                Err(Errno::INTR) => {}
                Err(error) => return Poll::Ready(Err(error.into())),
            }
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        loop {
            match rustix::net::send(self.socket.get_ref(), bytes, SendFlags::NOSIGNAL) {
                Ok(written) => {
                    self.full = None;
                    return Poll::Ready(Ok(written));
                }
                Err(Errno::AGAIN) => {}
                Err(Errno::INTR) => continue,
                Err(error) => return Poll::Ready(Err(error.into())),
            }
            let full = match self.full.take() {
                Some(full) => full,
                None => self.waiting_for_room()?,
            };
            ready!(self.full.insert(full).poll_write_ready(cx))?.clear_ready();
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.socket.get_ref().shutdown(Shutdown::Write))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn more_than_the_socket_holds_goes_both_ways() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (mut ours, mut theirs) = (Stream::new(ours).unwrap(), Stream::new(theirs).unwrap());
        let sent: Vec<u8> = (0..3_000_000u32).map(|n| n as u8).collect();
        for _ in 0..3 {
            let mut got = vec![0; sent.len()];
            let (written, read) = tokio::join!(ours.write_all(&sent), theirs.read_exact(&mut got));
            written.unwrap();
            read.unwrap();
            assert_eq!(got, sent);
            assert!(ours.full.is_none(), "nobody waits for room any more");
            std::mem::swap(&mut ours, &mut theirs);
        }
        ours.shutdown().await.unwrap();
        assert_eq!(theirs.read(&mut [0; 16]).await.unwrap(), 0);
    }
}
