//! Sends one request to a guest and waits for its end, which comes in time however the guest behaves.

use std::pin::pin;
use std::time::Duration;

use proto::ToGuest;
use tokio::time::Instant;

use super::{GuestClient, GuestReply};
use crate::engine::Inner;
use crate::op::Call;

/// The conditions under which a guest works on a request.
pub(crate) struct BoundedCall<'a> {
    pub(crate) inner: &'a Inner,
    pub(crate) call: &'a Call,
    pub(crate) guest: &'a GuestClient,
    pub(crate) timeout: Duration,
    /// Time that the host allows beyond the timeout and after a cancellation, in which the guest reports the end.
    pub(crate) backstop: Duration,
}

/// The end of a request.
pub(crate) enum CallEnd<T> {
    Answered(T),
    /// The message is too long for a frame. JSON encodes some characters as six bytes.
    Unsendable(String),
    /// The guest stayed silent beyond all deadlines.
    Silent {
        cancelled: bool,
    },
    /// The connection to the guest is over.
    Lost(String),
}

/// Takes the replies to one request.
pub(crate) trait ReplySink {
    type Answer;

    /// Takes a reply and returns the answer if it was the last one. An error ends the connection.
    fn take(&mut self, reply: GuestReply) -> Result<Option<Self::Answer>, &'static str>;

    /// Returns the time at which [`Self::flush`] has to be called, if it has to be called.
    fn flush_at(&self) -> Option<Instant> {
        None
    }

    fn flush(&mut self) {}
}

impl BoundedCall<'_> {
    /// Sends the request and returns exactly one end. A cancelled call interrupts the guest.
    pub(crate) async fn run<S: ReplySink>(&self, request: &ToGuest, sink: &mut S) -> CallEnd<S::Answer> {
        let mut until = pin!(tokio::time::sleep(self.timeout + self.backstop));
        let mut pending = tokio::select! {
            biased;
            sent = self.guest.call(request) => match sent {
                Ok(pending) => pending,
                Err(lost) if self.guest.is_lost() => return CallEnd::Lost(lost.0),
                Err(too_long) => return CallEnd::Unsendable(too_long.0),
            },
            () = &mut until => return CallEnd::Silent { cancelled: false },
        };
        let mut cancelled = false;
        loop {
            let flush_at = sink.flush_at();
            tokio::select! {
                biased;
                () = &mut until => return CallEnd::Silent { cancelled },
                () = self.call.cancel.cancelled(), if !cancelled => {
                    cancelled = true;
                    let sooner = until.deadline().min(Instant::now() + self.backstop);
                    until.as_mut().reset(sooner);
                    // A task sends it, because a guest that floods and does not read must still be read.
                    self.inner.tasks.spawn(pending.interrupt());
                }
                () = tokio::time::sleep_until(flush_at.unwrap_or_else(Instant::now)), if flush_at.is_some() => sink.flush(),
                reply = pending.next() => match reply.map(|reply| sink.take(reply)) {
                    Err(lost) => return CallEnd::Lost(lost.0),
                    Ok(Ok(None)) => {}
                    Ok(Ok(Some(answer))) => return CallEnd::Answered(answer),
                    Ok(Err(why)) => return CallEnd::Lost(self.guest.close(why).0),
                },
            }
        }
    }
}
