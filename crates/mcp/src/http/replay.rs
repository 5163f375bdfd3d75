//! A stream that its client may resume. Its events are stored while the call runs and for a while after its answer.
//!
//! Memory is bounded: only the latest events of a long stream are stored, and only a limited number of finished
//! streams.

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use engine::Memory;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use uuid::Uuid;

use super::exchange::{AnswerBytes, Exchange, ExchangeEvent};
use super::session::Session;
use super::share::Share;
use super::sse::{self, EventSource};

/// Maximum number of stored events of a stream.
const MAX_EVENTS: usize = 64;

/// How long a finished stream is stored.
const RETENTION: Duration = Duration::from_secs(30);

/// Minimum number of bytes that are counted for a finished stream.
const LEAST: usize = 64 << 10;
/// Budgets for the bytes of finished streams: for one tenant, and for all tenants together.
static FINISHED: LazyLock<Memory> = LazyLock::new(|| Memory::new(16 << 20, 64 << 20));

pub(super) struct Replay {
    pub id: String,
    log: Mutex<Log>,
    state: watch::Sender<ReplayState>,
}

#[derive(Default)]
struct Log {
    /// Number of the first stored event.
    first: u64,
    events: VecDeque<Bytes>,
}

#[derive(Clone, Copy, Default)]
struct ReplayState {
    /// Number of events so far.
    events: u64,
    finished: bool,
    /// Number of the latest reader, which is the only one that is served.
    reader: u64,
    attached: bool,
}

impl Replay {
    /// Takes over an exchange and stores its events. The exchange is dropped when the stream has had no reader for
    /// `resume_within`.
    pub(super) fn begin(
        session: &Arc<Session>,
        exchange: Exchange,
        share: Arc<Share>,
        first: Option<AnswerBytes>,
        resume_within: Duration,
    ) -> Reader {
        let id = Uuid::new_v4().simple().to_string();
        let replay = Arc::new(Self { id, log: Mutex::default(), state: watch::Sender::default() });
        let primed = format!("{}/0", replay.id);
        replay.push(sse::priming(&primed));
        if let Some(first) = first {
            replay.push_message(first);
        }
        session.add_replay(replay.clone());
        let reader = replay.read(None);
        tokio::spawn(replay.pump(session.clone(), (exchange, share), resume_within));
        reader
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the exchange until its end. The exchange keeps its share of the tenant's requests in flight, because it
    /// continues after its client has disconnected.
    async fn pump(
        self: Arc<Self>,
        session: Arc<Session>,
        (mut exchange, share): (Exchange, Arc<Share>),
        resume_within: Duration,
    ) {
        // One wait covers the whole call, because a message of the call does not mean that its client is back.
        let mut abandoned = pin!(self.abandoned(resume_within));
        loop {
            let event = tokio::select! {
                event = exchange.next() => event,
                () = &mut abandoned => None,
            };
            match event {
                Some(ExchangeEvent::Meanwhile(message)) => self.push_message(message),
                Some(ExchangeEvent::Last(last)) => {
                    self.push_message(last.answer);
                    break;
                }
                None => break,
            }
        }
        drop((exchange, share));
        self.state.send_modify(|state| state.finished = true);
        let length = self.log().events.iter().map(Bytes::len).sum::<usize>().max(LEAST);
        let room = FINISHED.hold_all_of(session.tenant());
        if room.set(length).is_ok() {
            tokio::select! {
                () = sleep(RETENTION) => {}
                () = session.ended.cancelled() => {}
            }
        }
        session.remove_replay(&self);
    }

    fn push_message(&self, message: AnswerBytes) {
        let id = format!("{}/{}", self.id, self.state.borrow().events);
        self.push(message.event(Some(&id)));
    }

    fn push(&self, event: Bytes) {
        let mut log = self.log();
        if log.events.len() >= MAX_EVENTS {
            log.events.pop_front();
            log.first += 1;
        }
        log.events.push_back(event);
        drop(log);
        self.state.send_modify(|state| state.events += 1);
    }

    /// Returns a reader of the events after `seen`; earlier readers get no more events.
    pub(super) fn read(self: &Arc<Self>, seen: Option<u64>) -> Reader {
        self.state.send_modify(|state| {
            state.reader += 1;
            state.attached = true;
        });
        let mut state = self.state.subscribe();
        let number = state.borrow_and_update().reader;
        Reader { replay: self.clone(), state, number, next: seen.map_or(0, |seen| seen.saturating_add(1)) }
    }

    /// Returns when the stream has had no reader for `patience`.
    async fn abandoned(&self, patience: Duration) {
        let mut state = self.state.subscribe();
        loop {
            let _ = state.wait_for(|state| !state.attached).await;
            if timeout(patience, state.wait_for(|state| state.attached)).await.is_err() {
                return;
            }
        }
    }
}

pub(super) struct Reader {
    replay: Arc<Replay>,
    state: watch::Receiver<ReplayState>,
    number: u64,
    next: u64,
}

impl EventSource for Reader {
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            let state = *self.state.borrow_and_update();
            if state.reader != self.number {
                return None;
            }
            let event = {
                let log = self.replay.log();
                self.next = self.next.max(log.first);
                usize::try_from(self.next - log.first).ok().and_then(|at| log.events.get(at).cloned())
            };
            if let Some(event) = event {
                self.next += 1;
                return Some(event);
            }
            if state.finished || self.state.changed().await.is_err() {
                return None;
            }
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.replay.state.send_if_modified(|state| {
            let ours = state.reader == self.number;
            state.attached &= !ours;
            ours
        });
    }
}
