//! A stream that its client may resume: events are kept while the call runs and for a while after its answer.
//!
//! Memory is bounded: only the latest events of a long stream are kept, and only a limited number of finished streams.

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

/// Maximum number of events that are kept of a stream.
const MAX_EVENTS: usize = 64;

/// How long a finished stream is kept.
const KEPT: Duration = Duration::from_secs(30);

/// Number of bytes that the smallest finished stream counts for.
const LEAST: usize = 64 << 10;
/// Budgets for the bytes of finished streams: for one tenant, and for all tenants together.
static FINISHED: LazyLock<Memory> = LazyLock::new(|| Memory::new(16 << 20, 64 << 20));

pub(super) struct Replay {
    pub id: String,
    log: Mutex<Log>,
    news: watch::Sender<ReplayState>,
}

#[derive(Default)]
struct Log {
    /// Number of the first event that is kept.
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
    /// Takes over an exchange. Its events go into the log, and the exchange is dropped when nothing has been read for
    /// `resume_within`.
    pub(super) fn begin(
        session: &Arc<Session>,
        exchange: Exchange,
        share: Arc<Share>,
        first: Option<AnswerBytes>,
        resume_within: Duration,
    ) -> Reader {
        let id = Uuid::new_v4().simple().to_string();
        let replay = Arc::new(Self { id, log: Mutex::default(), news: watch::Sender::default() });
        let primed = format!("{}/0", replay.id);
        replay.push(sse::priming(&primed));
        if let Some(first) = first {
            replay.say(first);
        }
        session.keep(replay.clone());
        let reader = replay.read(None);
        tokio::spawn(replay.pump(session.clone(), (exchange, share), resume_within));
        reader
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the exchange until its end. The exchange keeps its share of what the tenant may have in flight, because it
    /// goes on when its client has hung up.
    async fn pump(
        self: Arc<Self>,
        session: Arc<Session>,
        (mut exchange, share): (Exchange, Arc<Share>),
        resume_within: Duration,
    ) {
        // There is one wait for the whole call, because messages that the call sends do not bring its client back.
        let mut abandoned = pin!(self.abandoned(resume_within));
        loop {
            let said = tokio::select! {
                said = exchange.next() => said,
                () = &mut abandoned => None,
            };
            match said {
                Some(ExchangeEvent::Meanwhile(words)) => self.say(words),
                Some(ExchangeEvent::Last(last)) => {
                    self.say(last.words);
                    break;
                }
                None => break,
            }
        }
        drop((exchange, share));
        self.news.send_modify(|news| news.finished = true);
        let length = self.log().events.iter().map(Bytes::len).sum::<usize>().max(LEAST);
        let room = FINISHED.hold_all_of(session.tenant());
        if room.set(length).is_ok() {
            tokio::select! {
                () = sleep(KEPT) => {}
                () = session.ended.cancelled() => {}
            }
        }
        session.forget(&self);
    }

    fn say(&self, words: AnswerBytes) {
        let id = format!("{}/{}", self.id, self.news.borrow().events);
        self.push(words.event(Some(&id)));
    }

    fn push(&self, event: Bytes) {
        let mut log = self.log();
        if log.events.len() >= MAX_EVENTS {
            log.events.pop_front();
            log.first += 1;
        }
        log.events.push_back(event);
        drop(log);
        self.news.send_modify(|news| news.events += 1);
    }

    /// Returns a reader of the events after `seen`; earlier readers get no more events.
    pub(super) fn read(self: &Arc<Self>, seen: Option<u64>) -> Reader {
        self.news.send_modify(|news| {
            news.reader += 1;
            news.attached = true;
        });
        let mut news = self.news.subscribe();
        let number = news.borrow_and_update().reader;
        Reader { replay: self.clone(), news, number, next: seen.map_or(0, |seen| seen.saturating_add(1)) }
    }

    /// Returns when the stream has had no reader for `patience`.
    async fn abandoned(&self, patience: Duration) {
        let mut news = self.news.subscribe();
        loop {
            let _ = news.wait_for(|news| !news.attached).await;
            if timeout(patience, news.wait_for(|news| news.attached)).await.is_err() {
                return;
            }
        }
    }
}

pub(super) struct Reader {
    replay: Arc<Replay>,
    news: watch::Receiver<ReplayState>,
    number: u64,
    next: u64,
}

impl EventSource for Reader {
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            let news = *self.news.borrow_and_update();
            if news.reader != self.number {
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
            if news.finished || self.news.changed().await.is_err() {
                return None;
            }
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.replay.news.send_if_modified(|news| {
            let ours = news.reader == self.number;
            news.attached &= !ours;
            ours
        });
    }
}
