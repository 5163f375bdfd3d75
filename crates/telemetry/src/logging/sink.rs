//! Writes log lines to stderr. If nobody reads stderr, lines are lost and counted, but no call is delayed.

use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Maximum number of lines that wait to be written.
const MOST: usize = 4096;

/// Time during which lines are collected and then written together. Lines come in bursts, several for each call, so a
/// call wakes the writer at most once and is not disturbed by it.
const GATHER: Duration = Duration::from_millis(5);

/// Maximum number of lines in one write.
const TOGETHER: usize = 256;

/// Minimum time between two messages about lost lines.
const PAUSE: Duration = Duration::from_secs(1);

/// Maximum time for writing the last lines.
const LAST: Duration = Duration::from_secs(1);

static QUEUE: OnceLock<Queue> = OnceLock::new();

/// Starts the thread that writes all further lines. Before that, the thread that logs a line writes it, because the
/// launcher has to be started while the process has only one thread.
pub fn detach() {
    let lost = |count| tracing::warn!("{count} lines of the log were lost: nobody reads stderr");
    if QUEUE.get().is_none()
        && let Ok(queue) = Queue::start(io::stderr(), lost)
    {
        let _ = QUEUE.set(queue);
    }
}

/// Waits until all lines logged so far are written, but no longer than `LAST`.
pub fn finish() {
    if let Some(queue) = QUEUE.get() {
        queue.finish(LAST);
    }
}

/// A writer that takes one whole line at a time.
pub(super) struct Stderr;

impl Write for Stderr {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        match QUEUE.get() {
            Some(queue) => queue.put(SinkCommand::Line(line.to_vec())),
            None => io::stderr().write_all(line)?,
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Queue {
    messages: SyncSender<SinkCommand>,
    lost: Arc<AtomicU64>,
}

enum SinkCommand {
    Line(Vec<u8>),
    /// Asks for a signal when everything before this command has been written.
    Written(SyncSender<()>),
}

impl Queue {
    fn start(mut out: impl Write + Send + 'static, report: impl Fn(u64) + Send + 'static) -> io::Result<Self> {
        let (messages, received) = sync_channel(MOST);
        let lost = Arc::<AtomicU64>::default();
        let missing = lost.clone();
        std::thread::Builder::new().name("log".into()).spawn(move || {
            let mut reported: Option<Instant> = None;
            let mut lines = Vec::new();
            while let Ok(first) = received.recv() {
                std::thread::sleep(GATHER);
                let mut written = None;
                for message in std::iter::once(first).chain(received.try_iter().take(TOGETHER - 1)) {
                    match message {
                        SinkCommand::Line(line) => lines.extend_from_slice(&line),
                        SinkCommand::Written(done) => {
                            written = Some(done);
                            break;
                        }
                    }
                }
                // If the reader is gone, the error is ignored, because nobody would see a message about it.
                let _ = out.write_all(&lines);
                lines.clear();
                if let Some(done) = written {
                    let _ = done.send(());
                }
                if missing.load(Ordering::Relaxed) > 0 && reported.is_none_or(|at| at.elapsed() >= PAUSE) {
                    reported = Some(Instant::now());
                    report(missing.swap(0, Ordering::Relaxed));
                }
            }
        })?;
        Ok(Self { messages, lost })
    }

    fn put(&self, message: SinkCommand) {
        if let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) = self.messages.try_send(message) {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Waits at most `patience` until everything before this call is written, also if the queue is full at first.
    fn finish(&self, patience: Duration) {
        let end = Instant::now() + patience;
        let (done, written) = sync_channel(1);
        let mut last = SinkCommand::Written(done);
        while let Err(TrySendError::Full(refused)) = self.messages.try_send(last) {
            if Instant::now() >= end {
                return;
            }
            last = refused;
            std::thread::sleep(GATHER);
        }
        let _ = written.recv_timeout(end.saturating_duration_since(Instant::now()));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::mpsc::{Receiver, channel};

    use super::*;

    /// Writer that blocks until the test releases it.
    struct Stuck(Receiver<()>, Arc<Mutex<Vec<u8>>>);

    impl Write for Stuck {
        fn write(&mut self, line: &[u8]) -> io::Result<usize> {
            let _ = self.0.recv(); // fails at once when the test has released the writer
            self.1.lock().unwrap().extend_from_slice(line);
            Ok(line.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// F25 of the hostile list.
    #[test]
    fn a_reader_that_does_not_read_costs_lines_and_not_time() {
        let (free, stuck) = channel();
        let (tell, told) = channel();
        let read = Arc::<Mutex<Vec<u8>>>::default();
        let queue = Queue::start(Stuck(stuck, read.clone()), move |count| tell.send(count).unwrap()).unwrap();
        for _ in 0..10 * MOST {
            queue.put(SinkCommand::Line(b"x".to_vec()));
        }
        drop(free);
        let lost = told.recv_timeout(Duration::from_secs(60)).unwrap();
        queue.finish(Duration::from_secs(60));
        let read = read.lock().unwrap().len();
        assert!((MOST..=MOST + TOGETHER).contains(&read), "{read} were kept");
        assert_eq!(lost as usize + read, 10 * MOST);
    }
}
