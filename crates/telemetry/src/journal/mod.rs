//! The audit journal records who did what and when, with sizes and outcomes, and without contents unless the operator
//! asks for them.
//!
//! The journal consists of JSON lines, one file for each day. Each line has its own code and that of the line before.
//! One thread writes; a call hands over its entry and continues. If the journal cannot keep up or the disk is full,
//! entries are lost but calls are not affected. Lost entries are counted, and the count is written as soon as there is
//! room. A tenant that makes more entries than can be written loses its own.

mod chain;
mod files;
mod queue;
pub mod verify;
mod writer;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::time::{Duration, Instant, SystemTime};

use engine::op::{Notice, NoticeKind};
use serde::Serialize;
use serde_json::{Map, Value, json};
use text::cut;

pub use self::chain::key_path;
pub use self::files::lines;
use self::queue::{Cause, Places};
pub use self::verify::{VerifyReport, verify};
pub use self::writer::JournalError;
use self::writer::Writer;

#[derive(Debug, Clone)]
pub struct JournalConfig {
    pub dir: PathBuf,
    /// Whether arguments and results are also recorded, shortened.
    pub contents: bool,
    pub keep_days: u32,
    /// File size at which another file of the same day is started.
    pub file_bytes: u64,
    /// Maximum number of entries that wait to be written.
    pub queue: usize,
}

impl JournalConfig {
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into(), contents: false, keep_days: 30, file_bytes: 64 << 20, queue: 10_000 }
    }
}

/// One event. Members that are `None` or empty are left out of the line.
#[derive(Debug, Clone, Default, Serialize)]
pub struct JournalEntry {
    /// `call`, or the name of an event that is not a call: `context_created`, `usage`, …
    pub event: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dialect: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool: Option<String>,
    /// Id of the context or conversation, whatever the dialect calls it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run: Option<String>,
    /// For a browser tool, the action and the site that was opened; in an `admin` entry, the operator's command.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub did: Option<String>,
    /// Arguments by name, with the size of each; see [`sizes`].
    #[serde(rename = "args", skip_serializing_if = "BTreeMap::is_empty")]
    pub sizes: BTreeMap<String, u64>,
    /// `ok`, or the code of the error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outcome: Option<String>,
    #[serde(rename = "ms", serialize_with = "milliseconds", skip_serializing_if = "Option::is_none")]
    pub took: Option<Duration>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_out: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_in: Option<u64>,
    /// In a `usage` entry, the number of calls.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub calls: Option<u64>,
    /// In a `usage` entry, the processor time of the tenant's sandboxes in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_ms: Option<u64>,
    /// In a `usage` entry, the memory of the tenant's sandboxes multiplied by time, in megabyte seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_mb_s: Option<u64>,
    /// In a `usage` entry, the bytes between the tenant's sandboxes and the outside.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network_bytes: Option<u64>,
    #[serde(rename = "request", skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer: Option<SocketAddr>,
    /// Number of lost entries in a `gap`, of bytes in a `torn`, and of refused requests in a `denied`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub count: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// Arguments and results, recorded only if the operator asked for them; see `Journal::wants_contents`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub contents: Option<Value>,
    /// In a `torn` entry, the code of the last whole line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after: Option<String>,
    /// In an `expired` entry, the number of the last line that was deleted because of its age.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub through: Option<u64>,
}

fn milliseconds<S: serde::Serializer>(took: &Option<Duration>, out: S) -> Result<S::Ok, S::Error> {
    // Microseconds are exact enough, and more digits would only make lines longer.
    let micros = took.map(|took| took.as_micros() as f64).unwrap_or_default();
    out.serialize_f64(micros / 1000.0)
}

impl JournalEntry {
    pub fn event(event: &'static str) -> Self {
        Self { event, ..Self::default() }
    }

    /// Returns the entry for a notice of the engine.
    pub fn notice(notice: &Notice) -> Self {
        let event = match notice.what {
            NoticeKind::Created => "context_created",
            NoticeKind::Stopped => "context_stopped",
            NoticeKind::Expired => "context_expired",
            NoticeKind::Evicted => "context_evicted",
            NoticeKind::Lost => "context_lost",
            NoticeKind::TimedOut => "timed_out",
            NoticeKind::OutOfMemory => "out_of_memory",
            NoticeKind::Crashed => "crashed",
            NoticeKind::Denied => "network_denied",
            NoticeKind::BrowserDied => "browser_died",
        };
        let (tenant, context) = (Some(notice.tenant.0.clone()), Some(notice.id.clone()));
        Self { tenant, dialect: Some(notice.realm.0), context, why: notice.detail.clone(), ..Self::event(event) }
    }

    fn gap(count: u64, why: &str) -> Self {
        Self { count: Some(count), why: Some(why.into()), ..Self::event("gap") }
    }

    fn torn(bytes: u64, after: String) -> Self {
        let why = Some("the line before was not finished: the server or the machine stopped".into());
        Self { count: Some(bytes), after: Some(after), why, ..Self::event("torn") }
    }

    fn expired(through: u64) -> Self {
        Self { through: Some(through), ..Self::event("expired") }
    }

    /// Shortens all texts, so that a line stays short whatever a client sent.
    fn bounded(mut self, contents: bool) -> Self {
        for text in [
            &mut self.tenant,
            &mut self.tool,
            &mut self.context,
            &mut self.run,
            &mut self.did,
            &mut self.outcome,
            &mut self.request_id,
        ]
        .into_iter()
        .flatten()
        {
            *text = cut(text, 256);
        }
        self.contents = self.contents.filter(|_| contents).map(|contents| {
            let bytes = contents.to_string().len();
            if bytes <= MOST_CONTENTS { contents } else { json!({"left_out_bytes": bytes}) }
        });
        self
    }
}

const MOST_CONTENTS: usize = 256 << 10;
const QUEUE_WITH_CONTENTS: usize = 200;

/// Returns the arguments of a call by name, with their sizes in bytes.
pub fn sizes(args: &Map<String, Value>) -> BTreeMap<String, u64> {
    let size = |value: &Value| match value {
        Value::String(text) => text.len() as u64,
        other => other.to_string().len() as u64,
    };
    args.iter().take(32).map(|(name, value)| (cut(name, 64), size(value))).collect()
}

/// Handle through which entries are recorded. It is cheap to clone.
#[derive(Clone)]
pub struct Journal {
    queue: Sender<WriterCommand>,
    places: Arc<Places>,
    counts: Arc<Counts>,
    contents: bool,
}

/// Counters of the entries that were lost.
#[derive(Default)]
struct Counts {
    /// Lost entries that no `gap` reports yet.
    unwritten: AtomicU64,
    /// Lost entries since the start.
    lost: AtomicU64,
}

impl Counts {
    fn unwritten(&self) -> u64 {
        self.unwritten.load(Ordering::Relaxed)
    }

    fn lose(&self, entries: u64) {
        self.unwritten.fetch_add(entries, Ordering::Relaxed);
        self.lost.fetch_add(entries, Ordering::Relaxed);
    }
}

enum WriterCommand {
    Entry(SystemTime, Cause, Box<JournalEntry>),
    Flush(SyncSender<()>),
    Close(SyncSender<()>),
}

impl Journal {
    /// Continues the chain where the last server left it, and starts the writing thread.
    pub fn open(config: JournalConfig) -> Result<Self, JournalError> {
        // Contents make an entry large, and entries that wait for the disk have to fit into memory.
        let most = if config.contents { QUEUE_WITH_CONTENTS } else { usize::MAX };
        let places = Arc::new(Places::new(config.queue.clamp(1, most)));
        let (queue, messages) = channel();
        let (counts, contents) = (Arc::<Counts>::default(), config.contents);
        let mut writer = Writer::open(config, SystemTime::now())?;
        let shared = (places.clone(), counts.clone());
        let thread = std::thread::Builder::new().name("journal".into());
        thread.spawn(move || write_loop(&mut writer, &messages, &shared.0, &shared.1)).map_err(JournalError::Thread)?;
        Ok(Self { queue, places, counts, contents })
    }

    /// Returns whether callers should collect [`JournalEntry::contents`].
    pub(crate) fn wants_contents(&self) -> bool {
        self.contents
    }

    /// Records an entry that a client caused. It never waits and never fails; an entry for which its tenant has no place
    /// in the queue is counted as lost.
    pub fn record(&self, entry: JournalEntry) {
        self.put(Cause::Client, entry);
    }

    /// Records an entry that no client can cause at will: the use of a tenant, or something that the operator did. It has
    /// a place however many entries of clients wait.
    pub fn record_own(&self, entry: JournalEntry) {
        self.put(Cause::Server, entry);
    }

    fn put(&self, cause: Cause, entry: JournalEntry) {
        let entry = Box::new(entry.bounded(self.contents));
        if !self.places.take(cause, entry.tenant.as_deref())
            || self.queue.send(WriterCommand::Entry(SystemTime::now(), cause, entry)).is_err()
        {
            self.counts.lose(1);
        }
    }

    /// Counts entries that were lost before they could be recorded.
    pub fn lose(&self, entries: u64) {
        self.counts.lose(entries);
    }

    /// Returns the number of lost entries since the start, for the metrics.
    pub fn lost(&self) -> u64 {
        self.counts.lost.load(Ordering::Relaxed)
    }

    /// Writes the waiting entries and syncs them to the disk. This blocks.
    pub fn flush(&self) {
        let (done, wait) = sync_channel(1);
        if self.queue.send(WriterCommand::Flush(done)).is_ok() {
            let _ = wait.recv();
        }
    }

    /// Writes the waiting entries and syncs them to the disk. This blocks; entries recorded afterwards are lost.
    pub fn close(&self) {
        let (done, wait) = sync_channel(1);
        if self.queue.send(WriterCommand::Close(done)).is_ok() {
            let _ = wait.recv();
        }
    }
}

/// Maximum time until a line is synced to the disk, and interval at which expired days are looked for.
const IDLE: Duration = Duration::from_secs(5);

/// Time during which entries are collected and then written together, so that calls in quick succession wake the thread
/// only once.
const GATHER: Duration = Duration::from_millis(5);

/// Maximum number of entries that are written together.
const TOGETHER: usize = 64;

/// Minimum time between two `gap` entries, so that under a flood one line reports many lost entries.
const GAP_PAUSE: Duration = Duration::from_secs(1);

fn write_loop(writer: &mut Writer, messages: &Receiver<WriterCommand>, places: &Places, counts: &Counts) {
    let mut gap_tried: Option<Instant> = None;
    let mut tidied = Instant::now();
    let mut gathers = true;
    loop {
        // The check stands before the wait, because there may always be something to write.
        if tidied.elapsed() >= IDLE {
            tidied = Instant::now();
            let written = write_gap(writer, counts).and_then(|()| writer.sync());
            note_result(written, writer, counts, 0);
            writer.expire(SystemTime::now());
        }
        let (mut waiting, mut closes) = (None, false);
        let mut entries = Vec::new();
        match messages.recv_timeout(IDLE) {
            Ok(first) => {
                if gathers {
                    std::thread::sleep(GATHER);
                }
                for message in std::iter::once(first).chain(messages.try_iter().take(TOGETHER - 1)) {
                    match message {
                        WriterCommand::Entry(time, cause, entry) => {
                            places.give_back(cause, entry.tenant.as_deref());
                            entries.push((time, entry));
                        }
                        WriterCommand::Flush(done) => waiting = Some(done),
                        WriterCommand::Close(done) => (waiting, closes) = (Some(done), true),
                    }
                    if waiting.is_some() {
                        break;
                    }
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                let _ = write_gap(writer, counts).and_then(|()| writer.sync());
                return;
            }
        }
        // After so many, others wait already.
        gathers = entries.len() < TOGETHER;
        if !entries.is_empty() {
            let mut written = Ok(());
            if counts.unwritten() > 0 && gap_tried.is_none_or(|at| at.elapsed() >= GAP_PAUSE) {
                gap_tried = Some(Instant::now());
                written = write_gap(writer, counts);
            }
            let all = entries.iter().map(|(time, entry)| (*time, &**entry));
            let written = written.and_then(|()| writer.append_all(all));
            note_result(written, writer, counts, entries.len() as u64);
        }
        if let Some(done) = waiting {
            let written = write_gap(writer, counts).and_then(|()| writer.sync());
            note_result(written, writer, counts, 0);
            let _ = done.send(());
        }
        if closes {
            return;
        }
    }
}

/// Records how many entries are missing around this point.
fn write_gap(writer: &mut Writer, counts: &Counts) -> std::io::Result<()> {
    let missing = counts.unwritten();
    if missing == 0 {
        return Ok(());
    }
    let why = writer.why.clone().unwrap_or_else(|| "there were more entries than could be written".into());
    writer.append(SystemTime::now(), &JournalEntry::gap(missing, &why))?;
    writer.why = None;
    counts.unwritten.fetch_sub(missing, Ordering::Relaxed);
    tracing::warn!("the journal has a gap of {missing} entries: {why}");
    Ok(())
}

/// Counts entries that could not be written, and logs the beginning and the end of the failure once each.
fn note_result(written: std::io::Result<()>, writer: &mut Writer, counts: &Counts, entries: u64) {
    match written {
        Ok(()) => {
            if std::mem::take(&mut writer.failing) {
                tracing::info!("the journal is written again");
            }
        }
        Err(error) => {
            counts.lose(entries);
            if !std::mem::replace(&mut writer.failing, true) {
                tracing::error!("the journal cannot be written: {error}; calls go on, and the gap will be noted");
            }
            writer.why = Some(error.to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use testkit::scratch::Scratch;

    fn call(tool: &str) -> JournalEntry {
        JournalEntry {
            tenant: Some("blue".into()),
            tool: Some(tool.into()),
            outcome: Some("ok".into()),
            ..JournalEntry::event("call")
        }
    }

    fn read(dir: &std::path::Path) -> Vec<Value> {
        lines(dir).unwrap().map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect()
    }

    #[test]
    fn a_line_has_what_is_known_of_a_call_and_no_contents() {
        let dir = Scratch::new();
        let journal = Journal::open(JournalConfig::new(dir.0.join("journal"))).unwrap();
        assert!(!journal.wants_contents());
        let args = json!({"code": "print('hunter2')", "context_id": "ctx-1", "timeout": 30});
        journal.record(JournalEntry {
            dialect: Some("agentrun"),
            context: Some("ctx-1".into()),
            run: Some("run-1".into()),
            sizes: sizes(args.as_object().unwrap()),
            outcome: Some("TIMEOUT".into()),
            took: Some(Duration::from_micros(12_345)),
            bytes_out: Some(210),
            request_id: Some("r-1".into()),
            peer: Some("192.0.2.7:4242".parse().unwrap()),
            contents: Some(args.clone()),
            ..call("run_code")
        });
        journal.close();
        let mut lines = read(&dir.0.join("journal"));
        let line = lines.remove(0);
        let time = line["time"].as_str().unwrap();
        assert!(time.len() == 24 && time.ends_with('Z'), "{time}");
        assert_eq!(
            line,
            json!({"time": time, "seq": 1, "prev": "0".repeat(64), "mac": line["mac"], "event": "call", "tenant": "blue", "dialect": "agentrun",
                "tool": "run_code", "context": "ctx-1", "run": "run-1", "args": {"code": 16, "context_id": 5, "timeout": 2},
                "outcome": "TIMEOUT", "ms": 12.345, "bytes_out": 210, "request": "r-1", "peer": "192.0.2.7:4242"})
        );
        assert_eq!(lines.len(), 0);
    }

    #[test]
    fn contents_are_written_when_asked_for_and_cut() {
        let dir = Scratch::new();
        let journal =
            Journal::open(JournalConfig { contents: true, ..JournalConfig::new(dir.0.join("journal")) }).unwrap();
        assert!(journal.wants_contents());
        journal.record(JournalEntry { contents: Some(json!({"code": "1+1"})), ..call("a") });
        journal.record(JournalEntry { contents: Some("x".repeat(300 << 10).into()), ..call(&"long".repeat(100)) });
        journal.close();
        let lines = read(&dir.0.join("journal"));
        assert_eq!(lines[0]["contents"], json!({"code": "1+1"}));
        assert_eq!(lines[1]["contents"], json!({"left_out_bytes": (300 << 10) + 2}));
        assert_eq!(lines[1]["tool"].as_str().unwrap().chars().count(), 257);
    }

    #[test]
    fn entries_of_many_threads_make_one_chain() {
        let dir = Scratch::new();
        let config = JournalConfig { file_bytes: 20_000, ..JournalConfig::new(dir.0.join("journal")) };
        let journal = Journal::open(config).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let journal = journal.clone();
                scope.spawn(move || (0..100).for_each(|n| journal.record(call(&format!("tool-{thread}-{n}")))));
            }
        });
        journal.close();
        let report = verify(&dir.0.join("journal"), &key_path(&dir.0.join("journal")), None).unwrap();
        assert!(report.is_whole() && report.files.len() > 3, "{report:?}");
        assert_eq!(report.files.iter().map(|file| file.lines).sum::<u64>(), 800);
        assert_eq!(journal.lost(), 0);
    }

    #[test]
    fn what_does_not_fit_the_queue_is_counted_and_the_gap_is_written() {
        let dir = Scratch::new();
        let mut writer = Writer::open(JournalConfig::new(dir.0.join("journal")), SystemTime::now()).unwrap();
        let (queue, messages) = channel();
        let places = Arc::new(Places::new(8));
        let journal = Journal { queue, places, counts: Arc::default(), contents: false };
        for n in 0..10 {
            journal.record(call(&format!("tool-{n}"))); // the writer does not run yet
        }
        assert_eq!(journal.lost(), 6);
        let closing = journal.clone();
        let closer = std::thread::spawn(move || closing.close());
        write_loop(&mut writer, &messages, &journal.places, &journal.counts);
        closer.join().unwrap();
        let lines = read(&dir.0.join("journal"));
        assert_eq!(lines.len(), 5);
        assert_eq!((&lines[0]["event"], &lines[0]["count"]), (&json!("gap"), &json!(6)));
        assert!(verify(&dir.0.join("journal"), &key_path(&dir.0.join("journal")), None).unwrap().is_whole());
        drop(messages);
        journal.record(call("late"));
        assert_eq!(journal.lost(), 7);
    }

    /// W90: one tenant's flood costs neither the entries of another tenant, nor the record of what it used itself.
    #[test]
    fn w90_a_flood_of_one_tenant_costs_only_its_own_entries() {
        let dir = Scratch::new();
        let mut writer = Writer::open(JournalConfig::new(dir.0.join("journal")), SystemTime::now()).unwrap();
        let (queue, messages) = channel();
        let places = Arc::new(Places::new(100));
        let journal = Journal { queue, places, counts: Arc::default(), contents: false };
        (0..1000).for_each(|_| journal.record(call("flood"))); // the writer does not run yet
        let of = |tenant: &str, event| JournalEntry { tenant: Some(tenant.into()), ..JournalEntry::event(event) };
        journal.record(of("green", "call"));
        journal.record_own(of("blue", "usage"));
        journal.record_own(JournalEntry::event("admin"));
        journal.lose(7);
        let closing = journal.clone();
        let closer = std::thread::spawn(move || closing.close());
        write_loop(&mut writer, &messages, &journal.places, &journal.counts);
        closer.join().unwrap();
        let lines = read(&dir.0.join("journal"));
        let has = |tenant: &Value, event: &str| {
            lines.iter().filter(|line| line["tenant"] == *tenant && line["event"] == event).count()
        };
        assert_eq!((has(&json!("green"), "call"), has(&json!("blue"), "usage"), has(&Value::Null, "admin")), (1, 1, 1));
        assert_eq!((has(&json!("blue"), "call"), journal.lost()), (50, 957));
        let told: u64 =
            lines.iter().filter(|line| line["event"] == "gap").filter_map(|line| line["count"].as_u64()).sum();
        assert_eq!(told, 957);
    }

    /// Uses `/dev/full`, where every write fails for lack of space.
    #[test]
    fn a_full_disk_costs_entries_and_no_call_and_the_gap_is_written_when_there_is_room() {
        let dir = Scratch::new();
        let mut writer = Writer::open(JournalConfig::new(dir.0.join("journal")), SystemTime::now()).unwrap();
        let counts = Counts::default();
        let write = |writer: &mut Writer, tool: &str| {
            let written = write_gap(writer, &counts).and_then(|()| writer.append(SystemTime::now(), &call(tool)));
            note_result(written, writer, &counts, 1);
        };
        write(&mut writer, "before");
        let real = writer.swap_file(std::fs::OpenOptions::new().append(true).open("/dev/full").unwrap());
        for tool in ["lost-1", "lost-2", "lost-3"] {
            write(&mut writer, tool);
        }
        writer.swap_file(real);
        write(&mut writer, "after");
        writer.sync().unwrap();
        let lines = read(&dir.0.join("journal"));
        let events: Vec<_> = lines.iter().map(|line| line["tool"].as_str().unwrap_or("gap")).collect();
        assert_eq!(events, ["before", "gap", "after"]);
        assert_eq!(lines[1]["count"], 3);
        assert!(lines[1]["why"].as_str().unwrap().contains("No space left"), "{}", lines[1]["why"]);
        assert!(verify(&dir.0.join("journal"), &key_path(&dir.0.join("journal")), None).unwrap().is_whole());
    }
}
