//! Background runs. Each continues after its call was answered, its output is read with a cursor, and its result is
//! stored for a while.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use text::unix_now;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::capture::weight_of;
use crate::config::RealmConfig;
use crate::context::CellTurn;
use crate::guest::lock;
use crate::ids;
use crate::memory::Hold;
use crate::op::{EngineError, LimitKind, Ran, Realm, RunProgress, Waiting};

/// Maximum number of runs that are stored for one tenant.
const MAX_RUNS: usize = 100;
/// Maximum size of the stored results of one tenant together. The newest result stays whatever its size.
const MAX_WEIGHT: usize = 64 << 20;
/// Maximum number of bytes stored of the output of one run.
const RING: usize = 1 << 20;
/// Time for which a run is stored after its end.
const REMEMBERED: Duration = Duration::from_secs(60 * 60);

/// The background runs of one tenant.
#[derive(Default)]
pub(crate) struct Runs {
    all: Mutex<Vec<Arc<Background>>>,
}

impl Runs {
    pub(crate) fn add(&self, run: Arc<Background>) -> Result<(), EngineError> {
        let mut all = lock(&self.all);
        all.retain(|run| !run.is_forgotten());
        if all.len() >= MAX_RUNS {
            let Some(oldest) = first_to_remove(&all) else {
                return Err(EngineError::OverLimit { what: LimitKind::BackgroundRuns, limit: MAX_RUNS.to_string() });
            };
            all.remove(oldest);
        }
        all.push(run);
        Ok(())
    }

    /// Removes ended runs until the rest is small enough. It is called after the end of a run.
    pub(crate) fn trim(&self) {
        let mut all = lock(&self.all);
        let mut weight: usize = all.iter().map(|run| run.weight()).sum();
        while weight > MAX_WEIGHT {
            let is_last = all.iter().filter(|run| run.has_ended()).count() < 2;
            let Some(oldest) = first_to_remove(&all).filter(|_| !is_last) else { return };
            weight -= all.remove(oldest).weight();
        }
    }

    pub(crate) fn find(&self, realm: Realm, id: &str) -> Result<Arc<Background>, EngineError> {
        let mut all = lock(&self.all);
        all.retain(|run| !run.is_forgotten());
        let found = all.iter().find(|run| run.realm == realm && run.id == id);
        found.cloned().ok_or_else(|| EngineError::RunNotFound(id.into()))
    }

    /// Cancels the runs of a context that is being stopped, so that the stop does not wait for them.
    pub(crate) fn cancel_in(&self, realm: Realm, context_id: &str) {
        let all = lock(&self.all);
        let inside = all.iter().filter(|run| run.realm == realm && run.context_id == context_id);
        inside.for_each(|run| run.cancel.cancel());
    }

    /// Returns the ids of the runs of a context that have not ended.
    pub(crate) fn running_in(&self, realm: Realm, context_id: &str) -> Vec<String> {
        let all = lock(&self.all);
        let inside = all.iter().filter(|run| run.realm == realm && run.context_id == context_id && !run.has_ended());
        inside.map(|run| run.id.clone()).collect()
    }

    pub(crate) fn forget_old(&self) {
        lock(&self.all).retain(|run| !run.is_forgotten());
    }

    pub(crate) fn is_empty(&self) -> bool {
        lock(&self.all).is_empty()
    }

    pub(crate) fn running(&self) -> usize {
        lock(&self.all).iter().filter(|run| !run.has_ended()).count()
    }
}

/// Returns the index of the oldest ended run, preferring those whose end a client has seen or ordered.
fn first_to_remove(all: &[Arc<Background>]) -> Option<usize> {
    let ended = || all.iter().enumerate().filter(|(_, run)| run.has_ended());
    ended().find(|(_, run)| run.seen.load(Ordering::Relaxed)).or_else(|| ended().next()).map(|(at, _)| at)
}

pub(crate) struct Background {
    pub(crate) id: String,
    realm: Realm,
    /// Number of permits of the realm.
    runs_at_once: usize,
    pub(crate) context_id: String,
    command: bool,
    started_at: u64,
    pub(crate) cancel: CancellationToken,
    record: Mutex<Record>,
    /// True if a client has seen the end of the run or has cancelled it, so that its result is not needed any more.
    seen: AtomicBool,
    /// True if the run has begun, false while it waits for its turn or a permit.
    begun: AtomicBool,
    /// The turn that the run waits for, if it is a cell.
    turn: Mutex<Option<CellTurn>>,
    /// Token that is cancelled when the run has ended.
    finished: CancellationToken,
}

#[derive(Default)]
struct Record {
    /// The newest output. It is UTF-8, except that its beginning may be cut within a character.
    ring: VecDeque<u8>,
    /// Number of bytes that were dropped from the beginning.
    start: u64,
    end: Option<End>,
}

struct End {
    at: Instant,
    unix: u64,
    result: Result<Box<Ran>, EngineError>,
    /// Memory of the result and the output.
    _memory: Hold,
}

impl Background {
    pub(crate) fn new(config: &RealmConfig, context_id: String, command: bool, cancel: CancellationToken) -> Self {
        Self {
            id: format!("run-{}", ids::short()),
            realm: config.realm,
            runs_at_once: config.runs_at_once,
            context_id,
            command,
            started_at: unix_now(),
            cancel,
            record: Mutex::default(),
            seen: AtomicBool::new(false),
            begun: AtomicBool::new(false),
            turn: Mutex::default(),
            finished: CancellationToken::new(),
        }
    }

    pub(crate) fn push(&self, text: &str) {
        if text.is_empty() {
            return;
        }
        let mut record = lock(&self.record);
        record.ring.extend(text.as_bytes());
        let over = record.ring.len().saturating_sub(RING);
        record.ring.drain(..over);
        record.start += over as u64;
    }

    /// Stores the result. `memory` is the hold of the run; from now on it accounts for the stored result and output.
    pub(crate) fn finish(&self, mut result: Result<Box<Ran>, EngineError>, memory: Hold) {
        let mut record = lock(&self.record);
        if let Ok(ran) = &result
            && let Err(full) = memory.set(weight_of(ran) + record.ring.len())
        {
            result = Err(EngineError::ResultDropped(full.to_string()));
        }
        if result.is_err() {
            // Of a run without a result, only the output is stored.
            let _ = memory.set(record.ring.len());
        }
        record.end = Some(End { at: Instant::now(), unix: unix_now(), result, _memory: memory });
        drop(record);
        self.finished.cancel();
    }

    pub(crate) fn begin(&self) {
        self.begun.store(true, Ordering::Relaxed);
    }

    /// Records the turn that the run waits for.
    pub(crate) fn wait_for(&self, turn: Option<CellTurn>) {
        *lock(&self.turn) = turn;
    }

    /// Returns what the run waits for, if it has not begun.
    pub(crate) fn queued(&self) -> Option<Waiting> {
        if self.begun.load(Ordering::Relaxed) || self.has_ended() {
            return None;
        }
        Some(lock(&self.turn).as_ref().map_or(Waiting::Permits(self.runs_at_once), CellTurn::why))
    }

    pub(crate) fn mark_seen(&self) {
        self.seen.store(true, Ordering::Relaxed);
    }

    pub(crate) fn has_ended(&self) -> bool {
        lock(&self.record).end.is_some()
    }

    /// Returns the size of the result and the output; zero before the end.
    fn weight(&self) -> usize {
        let record = lock(&self.record);
        let ran = record.end.as_ref().and_then(|end| end.result.as_ref().ok());
        ran.map_or(0, |ran| weight_of(ran) + record.ring.len())
    }

    fn is_forgotten(&self) -> bool {
        lock(&self.record).end.as_ref().is_some_and(|end| end.at.elapsed() >= REMEMBERED)
    }

    pub(crate) async fn ended(&self) {
        self.finished.cancelled().await;
    }

    /// Returns the output since `cursor`, but at most the newest `budget` bytes.
    pub(crate) fn progress(&self, cursor: u64, budget: usize) -> RunProgress {
        let queued = self.queued();
        let record = lock(&self.record);
        let total = record.total();
        let cursor = cursor.min(total);
        let from = cursor.max(record.start).max(total.saturating_sub(budget as u64));
        let bytes: Vec<u8> = record.ring.range((from - record.start) as usize..).copied().collect();
        // The cut may lie within a character.
        let skipped = bytes.iter().take(3).take_while(|byte| **byte & 0xc0 == 0x80).count();
        RunProgress {
            run: self.id.clone(),
            context_id: self.context_id.clone(),
            command: self.command,
            queued,
            started_at: self.started_at,
            ended_at: record.end.as_ref().map(|end| end.unix),
            output: String::from_utf8_lossy(&bytes[skipped..]).into_owned(),
            dropped: from + skipped as u64 - cursor,
            cursor: total,
            end: record.end.as_ref().map(|end| end.result.clone()),
        }
    }
}

impl Record {
    fn total(&self) -> u64 {
        self.start + self.ring.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run() -> Background {
        Background::new(&RealmConfig::usual(Realm("sandpool")), "ctx".into(), false, CancellationToken::new())
    }

    fn read(run: &Background, cursor: u64, budget: usize) -> (String, u64, u64) {
        let progress = run.progress(cursor, budget);
        (progress.output, progress.dropped, progress.cursor)
    }

    #[test]
    fn a_cursor_goes_on_where_the_last_one_ended() {
        let run = run();
        run.push("one ");
        assert_eq!(read(&run, 0, 100), ("one ".into(), 0, 4));
        run.push("two");
        assert_eq!(read(&run, 4, 100), ("two".into(), 0, 7));
        assert_eq!(read(&run, 7, 100), (String::new(), 0, 7));
        assert_eq!(read(&run, u64::MAX, 100), (String::new(), 0, 7));
    }

    /// Returns a result of this size.
    fn ran(bytes: usize) -> Box<Ran> {
        let limits = sandbox::Limits { memory_bytes: 0, cpu_millis: 0, pids: 0, disk_bytes: 0, disk_inodes: 0 };
        let context = crate::op::ContextInfo {
            id: String::new(),
            name: String::new(),
            description: String::new(),
            language: proto::Language::Python,
            created_at: 0,
            last_used: 0,
            busy: false,
            size: None,
            limits,
            isolation: sandbox::Isolation {
                level: sandbox::Level::Basic,
                missing: Vec::new(),
                unheld: sandbox::UnheldLimits::default(),
            },
            mounts: Vec::new(),
            key: String::new(),
        };
        let stdout = crate::op::Captured { text: "x".repeat(bytes), ..Default::default() };
        Box::new(Ran { stdout, ..Ran::empty(context, crate::op::RunOutcome::Ok) })
    }

    #[test]
    fn of_large_results_the_newest_are_kept_and_what_runs_always() {
        let runs = Runs::default();
        let all: Vec<Arc<Background>> = (0..12).map(|_| Arc::new(run())).collect();
        for (n, run) in all.iter().enumerate() {
            runs.add(run.clone()).unwrap();
            if n > 0 {
                run.finish(Ok(ran(8 << 20)), Hold::default());
                runs.trim();
            }
        }
        let kept: Vec<bool> = all.iter().map(|run| runs.find(Realm("sandpool"), &run.id).is_ok()).collect();
        let expected: Vec<bool> = (0..12).map(|n| n == 0 || n >= 4).collect();
        assert_eq!(kept, expected, "the first still runs; eight results of 8 MiB fit");
        all[0].finish(Ok(ran(100 << 20)), Hold::default());
        runs.trim();
        assert!(runs.find(Realm("sandpool"), &all[11].id).is_ok(), "the newest is never dropped for its size");
    }

    /// A client has many quick runs that it reads at once, and one result that it has not asked for yet.
    #[test]
    fn what_nobody_has_seen_outlives_what_somebody_has() {
        let runs = Runs::default();
        let unseen = Arc::new(run());
        runs.add(unseen.clone()).unwrap();
        unseen.finish(Ok(ran(1)), Hold::default());
        for _ in 0..3 * MAX_RUNS {
            let quick = Arc::new(run());
            runs.add(quick.clone()).unwrap();
            quick.finish(Ok(ran(1 << 20)), Hold::default());
            runs.trim();
            quick.mark_seen();
        }
        assert!(runs.find(Realm("sandpool"), &unseen.id).is_ok());
        assert!(lock(&runs.all).len() <= MAX_RUNS);
    }

    #[test]
    fn what_is_no_longer_kept_is_counted_and_no_character_is_halved() {
        let run = run();
        run.push(&"é".repeat(RING));
        let (output, dropped, cursor) = read(&run, 1, usize::MAX);
        assert_eq!((output.len() as u64 + dropped + 1, cursor), (2 * RING as u64, 2 * RING as u64));
        assert!(output.chars().all(|c| c == 'é'));
        assert_eq!(read(&run, 0, 3), ("é".into(), 2 * RING as u64 - 2, 2 * RING as u64));
    }
}
