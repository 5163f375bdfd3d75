//! The queues between the calls and the thread that sends. Putting a record into a queue never waits.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::log::LogLine;
use super::span::FinishedSpan;
use super::{SIGNALS, Signal};
use crate::metrics::Family;

/// Maximum number of records in one request. As soon as this many wait, they are sent.
pub(super) const BATCH: usize = 512;

pub(super) struct Queue {
    waiting: Mutex<Records>,
    wake: Condvar,
    /// Maximum number of records of each signal.
    most: usize,
    pub(super) dropped: [AtomicU64; SIGNALS.len()],
}

/// Records that wait to be sent.
#[derive(Default)]
pub(super) struct Records {
    pub(super) spans: Vec<FinishedSpan>,
    pub(super) logs: Vec<LogLine>,
    /// The newest state of the metrics.
    pub(super) metrics: Option<Vec<Family>>,
    /// Channel that is signalled when everything has been sent. Once it is set, no record is accepted.
    pub(super) closing: Option<SyncSender<()>>,
    closed: bool,
}

impl Records {
    fn is_urgent(&self) -> bool {
        self.closing.is_some() || self.spans.len() >= BATCH || self.logs.len() >= BATCH
    }
}

impl Queue {
    pub(super) fn new(most: usize) -> Self {
        Self { waiting: Mutex::default(), wake: Condvar::new(), most, dropped: Default::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Records> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn drop_some(&self, signal: Signal, count: usize) {
        self.dropped[signal as usize].fetch_add(count as u64, Ordering::Relaxed);
    }

    pub(super) fn span(&self, span: FinishedSpan) {
        self.put(Signal::Traces, |records| &mut records.spans, span);
    }

    pub(super) fn log(&self, line: LogLine) {
        self.put(Signal::Logs, |records| &mut records.logs, line);
    }

    /// Replaces the state of the metrics, which is sent with the next batch. Values are totals, so nothing is lost.
    pub(super) fn metrics(&self, families: Vec<Family>) {
        self.lock().metrics = Some(families);
    }

    /// Puts a record in, or drops and counts it if there is no room. The thread is woken once for each batch, because a
    /// wake-up costs the call more than the record.
    fn put<T>(&self, signal: Signal, of: impl FnOnce(&mut Records) -> &mut Vec<T>, record: T) {
        let mut waiting = self.lock();
        let is_closed = waiting.closed;
        let records = of(&mut waiting);
        if is_closed || records.len() >= self.most {
            drop(waiting);
            return self.drop_some(signal, 1);
        }
        records.push(record);
        let is_full = records.len() == BATCH;
        drop(waiting);
        if is_full {
            self.wake.notify_one();
        }
    }

    /// Waits until there is a batch, but at most for `delay`, and takes everything out.
    pub(super) fn take(&self, delay: Duration) -> Records {
        let waiting = self.wake.wait_timeout_while(self.lock(), delay, |waiting| !waiting.is_urgent());
        let mut waiting = waiting.unwrap_or_else(PoisonError::into_inner).0;
        let closed = waiting.closed;
        std::mem::replace(&mut *waiting, Records { closed, ..Records::default() })
    }

    /// Waits for `pause`, or until the queue is closed. Returns whether it is closed.
    pub(super) fn pause(&self, pause: Duration) -> bool {
        let waiting = self.wake.wait_timeout_while(self.lock(), pause, |waiting| !waiting.closed);
        waiting.unwrap_or_else(PoisonError::into_inner).0.closed
    }

    /// Accepts no further records. `done` is signalled when those that wait have been sent.
    pub(super) fn close(&self, done: SyncSender<()>) {
        let mut waiting = self.lock();
        (waiting.closing, waiting.closed) = (Some(done), true);
        drop(waiting);
        self.wake.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_dropped_and_counted() {
        let queue = Queue::new(3);
        for _ in 0..5 {
            queue.span(FinishedSpan::example());
        }
        assert_eq!(queue.take(Duration::ZERO).spans.len(), 3);
        assert_eq!(queue.dropped[Signal::Traces as usize].load(Ordering::Relaxed), 2);
        queue.span(FinishedSpan::example());
        assert_eq!(queue.take(Duration::ZERO).spans.len(), 1, "there is room again");
    }

    #[test]
    fn a_closed_queue_takes_nothing_more() {
        let (done, _wait) = std::sync::mpsc::sync_channel(1);
        let queue = Queue::new(3);
        queue.span(FinishedSpan::example());
        queue.close(done);
        queue.span(FinishedSpan::example());
        let last = queue.take(Duration::from_secs(60));
        assert_eq!((last.spans.len(), last.closing.is_some()), (1, true));
        assert!(queue.pause(Duration::from_secs(60)));
    }
}
