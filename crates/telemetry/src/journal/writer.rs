//! Appends to the journal: extends the chain, starts new files, repairs the end after a crash and deletes expired days.

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::{FlockOperation, OFlags, flock};
use serde::Serialize;

use super::chain::{ChainKey, ChainLink, Head, head_path, key_path};
use super::files::{GENESIS, LONGEST_LINE, Name, day, hash, list, next_line, time};
use super::{JournalConfig, JournalEntry};

#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    #[error("cannot open the journal in `{dir}`")]
    Open { dir: PathBuf, source: io::Error },
    #[error("another server writes the journal in `{dir}`; give this one another `--state-dir`")]
    InUse { dir: PathBuf },
    #[error("cannot start the journal's thread")]
    Thread(#[source] io::Error),
}

#[derive(Serialize)]
struct JournalLine<'a> {
    time: String,
    seq: u64,
    prev: &'a str,
    #[serde(flatten)]
    entry: &'a JournalEntry,
}

pub(super) struct Writer {
    config: JournalConfig,
    name: Name,
    file: File,
    /// Length of the valid part of the file; bytes after it are left from a failed write.
    length: u64,
    unsynced: bool,
    key: ChainKey,
    head: Head,
    /// Number of the head that was logged last, and when it was logged.
    logged_head: (u64, Instant),
    expired_on: String,
    /// Whether the last write failed.
    pub failing: bool,
    /// Reason for the last failure, until a `gap` reports it.
    pub why: Option<String>,
    /// Lock of the directory, which this server keeps as long as it writes there.
    _lock: File,
}

impl Writer {
    pub(super) fn open(config: JournalConfig, now: SystemTime) -> Result<Self, JournalError> {
        let dir = config.dir.clone();
        let opened = |source| JournalError::Open { dir: dir.clone(), source };
        let lock = lock(&dir).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => JournalError::InUse { dir: dir.clone() },
            _ => opened(error),
        })?;
        let mut writer = Self::resume(config, now, lock).map_err(opened)?;
        writer.expire(now);
        Ok(writer)
    }

    fn resume(config: JournalConfig, now: SystemTime, lock: File) -> io::Result<Self> {
        let names = list(&config.dir)?;
        let newest = names.last().cloned();
        // A clock that was set back must not put new lines before old ones.
        let name = newest.filter(|newest| newest.day >= day(now)).unwrap_or(Name { day: day(now), part: 1 });
        let file = open_file(&config.dir, &name)?;
        let length = file.metadata()?.len();
        let head = Head { seq: 0, hash: GENESIS.into() };
        let key = ChainKey::take(&key_path(&config.dir))?;
        let mut writer = Self {
            config,
            name,
            file,
            length,
            unsynced: false,
            key,
            head,
            logged_head: (0, Instant::now()),
            expired_on: String::new(),
            failing: false,
            why: None,
            _lock: lock,
        };
        let unfinished = writer.find_end(&names)?;
        // The note is compared before anything is written: a line of this server must not stand in for a removed one.
        writer.compare_note()?;
        for (name, rest) in unfinished {
            writer.close_off(&name, &rest, now)?;
        }
        writer.log_head();
        Ok(writer)
    }

    /// Compares the end of the journal with the note, and reports lines that were cut while no server ran. The next
    /// line then follows the noted one, so that `verify` shows the gap from then on. If there is no note, this writes
    /// the first one, so that a missing note is noticed later.
    fn compare_note(&mut self) -> io::Result<()> {
        let path = head_path(&self.config.dir);
        match Head::read_note(&path) {
            Ok(Some(noted)) if noted.seq > self.head.seq => {
                tracing::error!(
                    "the journal ends at line {}, but line {} was written: lines were removed (`sandpool journal verify`)",
                    self.head.seq,
                    noted.seq
                );
                self.head = noted;
            }
            Ok(Some(_)) => {}
            Ok(None) => {
                if self.head.seq > 0 {
                    tracing::error!("the journal's record of its last line is missing: lines may have been removed");
                }
                self.head.write_note(&path)?;
            }
            Err(error) => tracing::warn!("the journal's head cannot be read: {error}"),
        }
        Ok(())
    }

    /// Logs the head for `verify --head`, because the log may be stored on another machine.
    fn log_head(&mut self) {
        if self.head.seq > self.logged_head.0 {
            tracing::info!(seq = self.head.seq, head = self.head.hash, "journal");
        }
        self.logged_head = (self.head.seq, Instant::now());
    }

    /// Finds the newest line, after which this server continues. Returns the unfinished lines after it, each with the
    /// name of its file, oldest first.
    fn find_end(&mut self, names: &[Name]) -> io::Result<Vec<(Name, Vec<u8>)>> {
        let mut unfinished = Vec::new();
        for name in names.iter().rev() {
            let end = end_of(&self.config.dir.join(name.to_string()))?;
            unfinished.extend(end.unfinished.map(|rest| (name.clone(), rest)));
            if let Some(head) = end.head {
                self.head = head;
                break;
            }
        }
        unfinished.reverse();
        Ok(unfinished)
    }

    /// Ends an unfinished line, which stays in the file for inspection, and continues the chain after it.
    fn close_off(&mut self, name: &Name, rest: &[u8], now: SystemTime) -> io::Result<()> {
        tracing::warn!("the journal ends in an unfinished line of {} bytes; a new line follows it", rest.len());
        let current = self.name.clone();
        if *name != current {
            self.switch_to(name.clone())?;
        }
        self.file.write_all(b"\n")?;
        self.length = self.file.metadata()?.len();
        // If only its line end was missing, the line is the head already.
        if ChainLink::parse(rest).is_none() {
            let before = std::mem::replace(&mut self.head.hash, hash(rest));
            self.append_here([(now, &JournalEntry::torn(rest.len() as u64, before))])?;
        }
        if *name != current { self.switch_to(current) } else { Ok(()) }
    }

    /// Appends one line, completely or not at all.
    pub(super) fn append(&mut self, at: SystemTime, entry: &JournalEntry) -> io::Result<()> {
        self.append_all([(at, entry)])
    }

    /// Appends lines, all of them completely or none at all.
    pub(super) fn append_all<'a>(
        &mut self,
        entries: impl IntoIterator<Item = (SystemTime, &'a JournalEntry)>,
    ) -> io::Result<()> {
        let mut entries = entries.into_iter().peekable();
        let Some((first, _)) = entries.peek() else { return Ok(()) };
        let today = day(SystemTime::now().max(*first));
        if today > self.name.day {
            self.switch_to(Name { day: today, part: 1 })?;
        } else if self.length >= self.config.file_bytes {
            self.switch_to(self.name.next())?;
        }
        self.append_here(entries)
    }

    fn append_here<'a>(&mut self, entries: impl IntoIterator<Item = (SystemTime, &'a JournalEntry)>) -> io::Result<()> {
        let mut head = self.head.clone();
        let mut bytes = Vec::new();
        for (at, entry) in entries {
            let begin = bytes.len();
            let line = JournalLine { time: time(at), seq: head.seq + 1, prev: &head.hash, entry };
            serde_json::to_writer(&mut bytes, &line)?;
            head = Head { seq: head.seq + 1, hash: self.key.close(&mut bytes, begin) };
            bytes.push(b'\n');
        }
        if let Err(error) = self.file.write_all(&bytes) {
            // On a full disk a part of a line may have been written.
            let _ = self.file.set_len(self.length);
            return Err(error);
        }
        self.length += bytes.len() as u64;
        self.unsynced = true;
        self.head = head;
        Ok(())
    }

    fn switch_to(&mut self, name: Name) -> io::Result<()> {
        self.sync()?;
        self.log_head();
        let file = open_file(&self.config.dir, &name)?;
        self.length = file.metadata()?.len();
        (self.file, self.name) = (file, name);
        Ok(())
    }

    pub(super) fn sync(&mut self) -> io::Result<()> {
        if self.unsynced {
            self.file.sync_data()?;
            self.unsynced = false;
            // The note is written after the lines, so that a crash never leaves a note of lines that do not exist.
            self.head.write_note(&head_path(&self.config.dir))?;
        }
        if self.logged_head.1.elapsed() >= LOG_HEAD_INTERVAL {
            self.log_head();
        }
        Ok(())
    }

    /// Deletes the files of expired days. It does so at most once a day.
    pub(super) fn expire(&mut self, now: SystemTime) {
        let today = day(now);
        if self.expired_on == today {
            return;
        }
        self.expired_on = today;
        let kept = Duration::from_secs(86_400 * u64::from(self.config.keep_days));
        let first_kept = now.checked_sub(kept).map(day).unwrap_or_default();
        let names = list(&self.config.dir).unwrap_or_default();
        let old: Vec<&Name> = names.iter().filter(|name| name.day < first_kept && **name < self.name).collect();
        let end = |name: &Name| end_of(&self.config.dir.join(name.to_string()));
        let ends: Vec<(&Name, End)> = old.into_iter().filter_map(|name| Some((name, end(name).ok()?))).collect();
        let through = ends.iter().filter_map(|(_, end)| self.expired(end, &first_kept)).max().unwrap_or(0);
        // The expiry is recorded before the files are deleted: a missing beginning without such a record was cut.
        if through > 0 {
            // The file of an earlier day must not end with a line of today, because it would not expire in time.
            let recorded = self.append(now, &JournalEntry::expired(through)).and_then(|()| self.sync());
            if let Err(error) = recorded {
                tracing::warn!("cannot delete expired files of the journal: {error}");
                return;
            }
        }
        for (name, end) in ends {
            if end.head.is_some_and(|head| head.seq > through) {
                tracing::warn!("the journal keeps `{name}`: its last line has not expired, or is not of this journal");
            } else if let Err(error) = std::fs::remove_file(self.config.dir.join(name.to_string())) {
                tracing::warn!("cannot delete the journal's file `{name}`: {error}");
            }
        }
    }

    /// Returns the number of a file's last line if a server with the key wrote it before the day `first_kept`. The
    /// name of the file proves nothing, because files can be renamed without the key.
    fn expired(&self, end: &End, first_kept: &str) -> Option<u64> {
        let link = ChainLink::parse(&end.line)?;
        let is_old = !link.time.is_empty() && link.time.as_str() < first_kept;
        (is_old && self.key.fits(&end.line, link.mac.as_deref()?)).then_some(link.seq)
    }

    #[cfg(test)]
    pub(super) fn swap_file(&mut self, file: File) -> File {
        std::mem::replace(&mut self.file, file)
    }
}

/// Interval at which the head is logged if it has changed.
const LOG_HEAD_INTERVAL: Duration = Duration::from_secs(3600);

fn lock(dir: &Path) -> io::Result<File> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    std::fs::set_permissions(dir, Permissions::from_mode(0o700))?;
    let lock = options().write(true).open(dir.join("lock"))?;
    flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
    Ok(lock)
}

fn open_file(dir: &Path, name: &Name) -> io::Result<File> {
    options().append(true).open(dir.join(name.to_string()))
}

fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.create(true).mode(0o600).custom_flags(OFlags::NOFOLLOW.bits().cast_signed());
    options
}

#[derive(Debug, Default)]
struct End {
    /// Head after the last line; `None` if the file has no line.
    head: Option<Head>,
    /// The last line itself.
    line: Vec<u8>,
    /// Bytes without a line end. They may be the last line.
    unfinished: Option<Vec<u8>>,
}

/// Returns the end of a file, reading only its last lines.
fn end_of(path: &Path) -> io::Result<End> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    // This covers two lines of maximum length: the last one, and the one before it if the last is not finished.
    let start = length.saturating_sub(2 * LONGEST_LINE);
    file.seek(SeekFrom::Start(start))?;
    let mut file = BufReader::new(file.take(2 * LONGEST_LINE));
    let mut end = End::default();
    let mut first = start > 0; // the first line may be incomplete
    while let Some((line, whole)) = next_line(&mut file)? {
        match ChainLink::parse(&line) {
            Some(link) => {
                let (head, unfinished) = (Some(link.head(&line)), (!whole).then(|| line.clone()));
                end = End { head, line, unfinished };
            }
            None if first || whole => {}
            None => end.unfinished = Some(line),
        }
        first = false;
    }
    Ok(end)
}

#[cfg(test)]
mod tests {
    use super::super::VerifyReport;
    use super::*;
    use testkit::scratch::Scratch;

    /// A journal's directory inside a scratch directory, which also contains the key.
    struct Dir(PathBuf, #[allow(dead_code, reason = "removes it")] Scratch);

    impl Dir {
        fn new() -> Self {
            let scratch = Scratch::new();
            let dir = scratch.0.join("journal");
            std::fs::create_dir(&dir).unwrap();
            Self(dir, scratch)
        }

        fn verify(&self) -> VerifyReport {
            super::super::verify(&self.0, &key_path(&self.0), None).unwrap()
        }
    }

    fn at(day: &str) -> SystemTime {
        let days = match day {
            "11-16" => 0,
            "11-17" => 1,
            "12-15" => 29,
            "12-17" => 31,
            other => panic!("{other}"),
        };
        // 2126-11-16 is later than any current date, because a file never has a day before that of its writing.
        SystemTime::UNIX_EPOCH + Duration::from_secs(4_950_460_800 + days * 86_400)
    }

    fn open(dir: &Dir, now: SystemTime) -> Writer {
        Writer::open(JournalConfig { file_bytes: 1000, ..JournalConfig::new(&dir.0) }, now).unwrap()
    }

    fn names(dir: &Dir) -> Vec<String> {
        list(&dir.0).unwrap().iter().map(Name::to_string).collect()
    }

    #[test]
    fn a_day_has_its_file_a_large_one_has_several_and_a_new_server_goes_on() {
        let dir = Dir::new();
        for now in [at("11-16"), at("11-16"), at("11-17")] {
            let mut writer = open(&dir, now);
            for _ in 0..4 {
                writer
                    .append(now, &JournalEntry { why: Some("x".repeat(200)), ..JournalEntry::event("call") })
                    .unwrap();
            }
        }
        assert_eq!(
            names(&dir),
            ["2126-11-16.jsonl", "2126-11-16-2.jsonl", "2126-11-16-3.jsonl", "2126-11-17.jsonl", "2126-11-17-2.jsonl"]
        );
        let report = dir.verify();
        assert!(report.is_whole(), "{report:?}");
        assert_eq!(report.files.iter().map(|file| file.lines).collect::<Vec<_>>(), [3, 3, 2, 3, 1]);
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&dir.0), mode(&dir.0.join("2126-11-16.jsonl"))), (0o700, 0o600));
    }

    #[test]
    fn old_days_go_and_the_rest_still_verifies() {
        let dir = Dir::new();
        for now in [at("11-16"), at("11-17"), at("12-15")] {
            open(&dir, now).append(now, &JournalEntry::event("call")).unwrap();
        }
        assert_eq!(names(&dir).len(), 3);
        let mut writer = open(&dir, at("12-17"));
        assert_eq!(names(&dir), ["2126-11-17.jsonl", "2126-12-15.jsonl", "2126-12-17.jsonl"]);
        writer.append(at("12-17"), &JournalEntry::event("call")).unwrap();
        let report = dir.verify();
        assert!(report.is_whole(), "{report:?}");
        assert_eq!(report.files[0].first_seq, Some(2));
    }

    #[test]
    fn a_clock_that_was_set_back_does_not_break_the_chain() {
        let dir = Dir::new();
        for now in [at("11-17"), at("11-16")] {
            open(&dir, now).append(now, &JournalEntry::event("call")).unwrap();
        }
        assert_eq!(names(&dir), ["2126-11-17.jsonl"]);
        assert!(dir.verify().is_whole());
    }

    #[test]
    fn an_unfinished_line_is_closed_off_and_the_chain_goes_on() {
        for (what, rest) in
            [("half a line", "{\"time\":\"2126-11"), ("zeros", "\0\0\0\0"), ("no end", "{\"seq\":3,\"prev\":\"")]
        {
            // The next server starts on the same day, or on the next, when the end is in another file.
            for next in [at("11-16"), at("11-17")] {
                let dir = Dir::new();
                let mut writer = open(&dir, at("11-16"));
                (0..2).for_each(|_| writer.append(at("11-16"), &JournalEntry::event("call")).unwrap());
                drop(writer);
                OpenOptions::new()
                    .append(true)
                    .open(dir.0.join("2126-11-16.jsonl"))
                    .unwrap()
                    .write_all(rest.as_bytes())
                    .unwrap();
                let unfinished = dir.verify();
                assert!(unfinished.is_whole() && unfinished.unfinished, "{what}: {unfinished:?}");
                open(&dir, next).append(next, &JournalEntry::event("call")).unwrap();
                let report = dir.verify();
                assert!(report.is_whole() && !report.unfinished, "{what}: {report:?}");
                let lines: Vec<String> = super::super::lines(&dir.0).unwrap().map(Result::unwrap).collect();
                assert_eq!(lines.len(), 5, "{what}");
                let torn: serde_json::Value = serde_json::from_str(&lines[3]).unwrap();
                assert_eq!((&torn["event"], &torn["count"]), (&"torn".into(), &rest.len().into()), "{what}");
                assert_eq!(torn["after"], ChainLink::parse(lines[1].as_bytes()).unwrap().mac.unwrap(), "{what}");
            }
        }
    }

    #[test]
    fn a_file_that_was_only_begun_is_gone_over() {
        for begun in ["", "{\"time\":\"2126-11"] {
            let dir = Dir::new();
            open(&dir, at("11-16")).append(at("11-16"), &JournalEntry::event("call")).unwrap();
            std::fs::write(dir.0.join("2126-11-17.jsonl"), begun).unwrap();
            open(&dir, at("11-17")).append(at("11-17"), &JournalEntry::event("call")).unwrap();
            let report = dir.verify();
            assert!(report.is_whole(), "{report:?}");
            assert_eq!(report.files[1].first_seq, Some(2));
        }
    }

    #[test]
    fn two_servers_do_not_write_one_journal() {
        let dir = Dir::new();
        let first = open(&dir, at("11-16"));
        let second = Writer::open(JournalConfig::new(&dir.0), at("11-16"));
        assert!(matches!(second.err(), Some(JournalError::InUse { .. })));
        drop(first);
        open(&dir, at("11-16"));
    }
}
