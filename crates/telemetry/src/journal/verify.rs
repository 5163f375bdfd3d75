//! Verifies the chain: over all files, every line has to carry the code of the line before and a valid code of its
//! content. The newest line, which is noted outside of the directory, has to be there. Lines may be missing from the
//! beginning only if they have expired.
//!
//! An attacker who has the key, or who can write both the directory and the note beside it, can write another journal
//! or restore an earlier state of this one. Only a head that was stored elsewhere reveals that.

use std::fs::File;
use std::io::{self, BufReader};
use std::path::Path;

use super::chain::{ChainKey, ChainLink, Head, head_path};
use super::files::{GENESIS, hash, list, next_line};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifyReport {
    pub files: Vec<FileReport>,
    /// Code of the last whole line. The operator can store it for the next verification.
    pub head: Option<String>,
    /// Whether the last line has no end, because a server is writing it or stopped while it did.
    pub unfinished: bool,
    /// Number of lines in the older form, which has no key.
    pub old_form: u64,
    /// Faults of the journal as a whole.
    pub broken: Vec<String>,
}

impl VerifyReport {
    pub fn is_whole(&self) -> bool {
        self.broken.is_empty() && self.files.iter().all(|file| file.broken.is_none())
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileReport {
    pub name: String,
    pub lines: u64,
    pub first_seq: Option<u64>,
    pub last_seq: Option<u64>,
    /// The first line that does not fit, counted from 1, and the reason.
    pub broken: Option<(u64, String)>,
}

/// Verifies all files of a directory with the key at `key`. `noted` is a head from an earlier time, which the journal
/// still has to contain.
pub fn verify(dir: &Path, key: &Path, noted: Option<&str>) -> io::Result<VerifyReport> {
    // The note is read first, because a running server may write further lines meanwhile.
    let newest = Head::read_note(&head_path(dir))?;
    let mut walk = Walk { key: ChainKey::read(key)?, noted, newest: newest.as_ref(), ..Walk::default() };
    let names = list(dir)?;
    let mut files = Vec::new();
    let mut unfinished = false;
    for (at, name) in names.iter().enumerate() {
        let mut file = BufReader::new(File::open(dir.join(name.to_string()))?);
        let newest = at + 1 == names.len();
        let (file, open) = walk.file(name.to_string(), &mut file, newest)?;
        unfinished |= open;
        files.push(file);
    }
    let broken = walk.faults();
    Ok(VerifyReport { files, head: walk.before.map(|head| head.hash), unfinished, old_form: walk.old_form, broken })
}

#[derive(Default)]
struct Walk<'a> {
    /// Key of the chain; `None` if it is missing.
    key: Option<ChainKey>,
    /// Head before the next line; `None` until the first line, because the days before it may have been deleted.
    before: Option<Head>,
    /// Hash and size of bytes that are not a valid line. They are accepted only if the next line explains them.
    torn: Option<(String, u64)>,
    noted: Option<&'a str>,
    seen: bool,
    /// The head that the server noted last.
    newest: Option<&'a Head>,
    newest_seen: bool,
    old_form: u64,
    keyed: u64,
    /// Number of the first line, unless it is of the old form.
    first: Option<u64>,
    /// Number of the last line that expired.
    through: u64,
}

impl Walk<'_> {
    fn file(&mut self, name: String, file: &mut BufReader<File>, newest: bool) -> io::Result<(FileReport, bool)> {
        let mut report = FileReport { name, lines: 0, first_seq: None, last_seq: None, broken: None };
        while let Some((line, whole)) = next_line(file)? {
            if !whole && newest {
                return Ok((report, true));
            }
            report.lines += 1;
            match self.line(&line) {
                Ok(Some(seq)) => {
                    report.first_seq.get_or_insert(seq);
                    report.last_seq = Some(seq);
                }
                Ok(None) => {}
                Err(why) if report.broken.is_none() => report.broken = Some((report.lines, why)),
                Err(_) => {}
            }
        }
        if self.torn.take().is_some() && report.broken.is_none() {
            report.broken = Some((report.lines, NOT_A_LINE.into()));
        }
        Ok((report, false))
    }

    /// Checks a line and returns its number, or `None` if the next line has to explain it.
    fn line(&mut self, line: &[u8]) -> Result<Option<u64>, String> {
        let torn = self.torn.take();
        let Some(link) = ChainLink::parse(line) else {
            let first = torn.is_none();
            self.torn = Some((hash(line), line.len() as u64));
            return if first { Ok(None) } else { Err(NOT_A_LINE.into()) };
        };
        let head = link.head(line);
        self.seen |= self.noted == Some(&head.hash);
        self.newest_seen |= self.newest == Some(&head);
        let authentic = self.authentic(line, &link);
        let before = self.before.replace(head);
        match torn {
            Some((torn, bytes)) => after_torn(before.as_ref(), &link, &torn, bytes),
            None => follows(before.as_ref(), &link),
        }
        .and(authentic)
        .map(|()| Some(link.seq))
    }

    /// Checks that a server with the key wrote the line as it is.
    fn authentic(&mut self, line: &[u8], link: &ChainLink) -> Result<(), String> {
        let Some(mac) = &link.mac else {
            self.old_form += 1;
            return if self.keyed == 0 { Ok(()) } else { Err(format!("line {} has no code", link.seq)) };
        };
        if self.before.is_none() {
            self.first = Some(link.seq);
        }
        self.keyed += 1;
        // Without the key there is nothing to compare; the report says that once for the whole journal.
        if self.key.as_ref().is_some_and(|key| !key.fits(line, mac)) {
            return Err(format!("line {} was changed, or made with another key", link.seq));
        }
        self.through = self.through.max(link.through.filter(|_| link.event == "expired").unwrap_or(0));
        Ok(())
    }

    fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        if self.keyed > 0 && self.key.is_none() {
            faults.push("the key is missing, so it cannot be checked who wrote these lines".into());
        }
        if let Some(first) = self.first.filter(|first| *first > self.through + 1) {
            faults.push(format!(
                "lines {} to {} are missing from the beginning, and have not expired",
                self.through + 1,
                first - 1
            ));
        }
        let last = self.before.as_ref().map_or(0, |head| head.seq);
        // A server that creates a key notes a head at once. A head that the caller kept is better evidence.
        if self.key.is_some() && self.newest.is_none() && self.noted.is_none() && self.before.is_some() {
            let how = "pass a head from the log or from an earlier run with --head";
            faults.push(format!(
                "the record of the newest line is missing, so lines may have been cut from the end; {how}"
            ));
        }
        if let Some(newest) = self.newest.filter(|newest| newest.seq > 0 && !self.newest_seen) {
            faults.push(match newest.seq > last {
                true => format!("lines {} to {} are missing from the end", last + 1, newest.seq),
                false => format!("line {} is not the one that was written", newest.seq),
            });
        }
        if self.noted.is_some() && !self.seen {
            let why = "newer lines were removed, all lines were written again, or the head has expired";
            faults.push(format!("the given head is not in the journal: {why}"));
        }
        faults
    }
}

const NOT_A_LINE: &str = "this is not a line of the journal";

fn follows(before: Option<&Head>, link: &ChainLink) -> Result<(), String> {
    let Some(before) = before else {
        // The first line here is either the first ever or one before which days were deleted.
        let first = (link.seq == 1) == (link.prev == GENESIS);
        return if first { Ok(()) } else { Err("the first line's number and hash do not fit together".into()) };
    };
    if link.seq > before.seq + 1 {
        return Err(format!("lines {} to {} are missing", before.seq + 1, link.seq - 1));
    }
    if link.seq <= before.seq {
        return Err(format!("line {} stands after line {}", link.seq, before.seq));
    }
    if link.prev != before.hash {
        return Err(format!("line {} was changed: its hash is not the one in the next line", before.seq));
    }
    Ok(())
}

fn after_torn(before: Option<&Head>, link: &ChainLink, torn: &str, bytes: u64) -> Result<(), String> {
    let explains = link.event == "torn" && link.prev == torn && link.count == Some(bytes);
    let after = match before {
        Some(before) => link.after.as_ref() == Some(&before.hash) && link.seq == before.seq + 1,
        None => link.after.is_some(),
    };
    if explains && after { Ok(()) } else { Err("the line before is not a line of the journal".into()) }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::time::{Duration, SystemTime};

    use super::super::chain::key_path;
    use super::super::writer::Writer;
    use super::super::{JournalConfig, JournalEntry};
    use super::*;
    use testkit::scratch::Scratch;

    const FILES: [&str; 3] = ["2126-11-16.jsonl", "2126-11-17.jsonl", "2126-11-18.jsonl"];

    fn day(day: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(4_950_460_800 + day * 86_400)
    }

    /// A journal, with its key and its head beside it.
    struct Kept {
        dir: PathBuf,
        _scratch: Scratch,
    }

    impl Kept {
        fn empty() -> Self {
            let scratch = Scratch::new();
            let dir = scratch.0.join("journal");
            std::fs::create_dir(&dir).unwrap();
            Self { dir, _scratch: scratch }
        }

        /// Creates a journal with three days of four lines each.
        fn new() -> Self {
            let kept = Self::empty();
            (0..3).for_each(|day| kept.write(day, 4));
            kept
        }

        fn write(&self, number: u64, lines: u64) {
            let now = day(number);
            let mut writer = Writer::open(JournalConfig::new(&self.dir), now).unwrap();
            for n in 0..lines {
                let entry = JournalEntry { tool: Some(format!("tool-{n}")), ..JournalEntry::event("call") };
                writer.append(now, &entry).unwrap();
            }
            writer.sync().unwrap();
        }

        /// Creates a journal with three days as servers wrote them before there was a key.
        fn old_form() -> Self {
            let kept = Self::empty();
            let mut prev = GENESIS.to_owned();
            for seq in 1..=12_usize {
                let line =
                    format!(r#"{{"time":"2126-11-16T00:00:00.000Z","seq":{seq},"prev":"{prev}","event":"call"}}"#);
                prev = hash(line.as_bytes());
                let path = kept.dir.join(FILES[(seq - 1) / 4]);
                let before = std::fs::read_to_string(&path).unwrap_or_default();
                std::fs::write(path, format!("{before}{line}\n")).unwrap();
            }
            kept
        }

        fn edit(&self, file: usize, change: impl FnOnce(&mut Vec<String>)) {
            let path = self.dir.join(FILES[file]);
            let mut lines: Vec<String> = std::fs::read_to_string(&path).unwrap().lines().map(str::to_owned).collect();
            change(&mut lines);
            std::fs::write(path, lines.iter().map(|line| format!("{line}\n")).collect::<String>()).unwrap();
        }

        fn verify(&self, noted: Option<&str>) -> VerifyReport {
            verify(&self.dir, &key_path(&self.dir), noted).unwrap()
        }

        /// Returns file, line and reason of each broken file.
        fn broken(&self) -> Vec<(usize, u64, String)> {
            let index = |name: &str| FILES.iter().position(|file| *file == name).unwrap();
            let files = self.verify(None).files.into_iter();
            files.filter_map(|f| f.broken.map(|(line, why)| (index(&f.name), line, why))).collect()
        }
    }

    fn one(file: usize, line: u64, why: &str) -> Vec<(usize, u64, String)> {
        vec![(file, line, why.into())]
    }

    #[test]
    fn an_untouched_journal_is_whole() {
        let report = Kept::new().verify(None);
        assert!(report.is_whole() && !report.unfinished && report.old_form == 0, "{report:?}");
        let ranges: Vec<_> = report.files.iter().map(|file| (file.first_seq, file.last_seq)).collect();
        assert_eq!(ranges, [(Some(1), Some(4)), (Some(5), Some(8)), (Some(9), Some(12))]);
    }

    #[test]
    fn changed_removed_inserted_and_reordered_lines_are_found_where_they_are() {
        let kept = Kept::new();
        kept.edit(1, |lines| lines[1] = lines[1].replace("tool-1", "tool-9"));
        assert_eq!(kept.broken(), one(1, 2, "line 6 was changed, or made with another key"));

        let kept = Kept::new();
        kept.edit(1, |lines| drop(lines.remove(1)));
        assert_eq!(kept.broken(), one(1, 2, "lines 6 to 6 are missing"));

        let kept = Kept::new();
        kept.edit(1, |lines| lines.insert(2, lines[1].replace("tool-1", "forged")));
        assert_eq!(kept.broken(), one(1, 3, "line 6 stands after line 6"));

        let kept = Kept::new();
        kept.edit(1, |lines| lines.swap(1, 2));
        assert_eq!(kept.broken(), one(1, 2, "lines 6 to 6 are missing"));

        let kept = Kept::new();
        kept.edit(1, |lines| lines[2] = "nonsense".into());
        assert_eq!(kept.broken(), one(1, 4, "the line before is not a line of the journal"));

        let kept = Kept::new();
        kept.edit(0, |lines| lines.truncate(3));
        assert_eq!(kept.broken(), one(1, 1, "lines 4 to 4 are missing"));
    }

    #[test]
    fn w31_lines_cut_from_the_end_are_missed() {
        let kept = Kept::new();
        kept.edit(2, |lines| lines.truncate(2));
        assert_eq!(kept.broken(), []);
        assert_eq!(kept.verify(None).broken, ["lines 11 to 12 are missing from the end"]);
        let kept = Kept::new();
        std::fs::remove_file(kept.dir.join(FILES[2])).unwrap();
        assert_eq!(kept.verify(None).broken, ["lines 9 to 12 are missing from the end"]);
        FILES[..2].iter().for_each(|file| std::fs::remove_file(kept.dir.join(file)).unwrap());
        assert_eq!(kept.verify(None).broken, ["lines 1 to 12 are missing from the end"]);
        // The last line itself is covered by no other line.
        let kept = Kept::new();
        kept.edit(2, |lines| lines[3] = lines[3].replace("tool-3", "tool-x"));
        assert_eq!(kept.broken(), one(2, 4, "line 12 was changed, or made with another key"));
    }

    #[test]
    fn w31_lines_cut_from_the_end_are_missed_also_after_the_next_start() {
        let kept = Kept::new();
        kept.edit(2, |lines| lines.truncate(2));
        kept.write(2, 3);
        assert_eq!(kept.broken(), one(2, 3, "lines 11 to 12 are missing"));
    }

    /// W56: an unfinished line in place of the newest one does not hide that the newest one was there.
    #[test]
    fn w56_a_newest_line_that_was_cut_in_the_middle_is_missed_also_after_the_next_start() {
        let kept = Kept::new();
        let path = kept.dir.join(FILES[2]);
        let length = std::fs::metadata(&path).unwrap().len();
        File::options().write(true).open(&path).unwrap().set_len(length - 20).unwrap();
        kept.write(2, 3);
        assert_eq!(kept.broken(), one(2, 5, "the line before is not a line of the journal"));
        // Nothing is missing if only the line end was cut.
        let kept = Kept::new();
        let path = kept.dir.join(FILES[2]);
        File::options().write(true).open(&path).unwrap().set_len(length - 1).unwrap();
        kept.write(2, 3);
        let report = kept.verify(None);
        assert!(report.is_whole(), "{report:?}");
    }

    #[test]
    fn w31_a_beginning_may_be_missing_only_where_days_have_expired() {
        let kept = Kept::new();
        kept.edit(0, |lines| drop(lines.remove(0)));
        assert_eq!(kept.verify(None).broken, ["lines 1 to 1 are missing from the beginning, and have not expired"]);
        let kept = Kept::new();
        std::fs::remove_file(kept.dir.join(FILES[0])).unwrap();
        assert_eq!(kept.verify(None).broken, ["lines 1 to 4 are missing from the beginning, and have not expired"]);

        // After 31 days the first of the three days expires, and the journal says so.
        let kept = Kept::new();
        kept.write(31, 1);
        assert!(!kept.dir.join(FILES[0]).exists() && kept.dir.join(FILES[1]).exists());
        let report = kept.verify(None);
        assert!(report.is_whole(), "{report:?}");
        assert_eq!(report.files[0].first_seq, Some(5));
        std::fs::remove_file(kept.dir.join(FILES[1])).unwrap();
        assert_eq!(kept.verify(None).broken, ["lines 5 to 8 are missing from the beginning, and have not expired"]);
    }

    /// W55: an attacker without the key gives days that are not old the names of old ones, or puts lines of its own
    /// there. The server neither signs that they expired nor deletes them.
    #[test]
    fn w55_only_lines_that_a_server_wrote_long_ago_expire() {
        let old = "2000-01-01.jsonl";
        let kept = Kept::new();
        std::fs::rename(kept.dir.join(FILES[0]), kept.dir.join(old)).unwrap();
        kept.write(2, 1);
        assert!(kept.dir.join(old).exists());
        std::fs::remove_file(kept.dir.join(old)).unwrap();
        assert_eq!(kept.verify(None).broken, ["lines 1 to 4 are missing from the beginning, and have not expired"]);

        let time = "2000-01-01T00:00:00.000Z";
        let prev = GENESIS;
        let forged = [
            format!(r#"{{"time":"{time}","seq":999,"prev":"{prev}","event":"call"}}"#),
            format!(r#"{{"time":"{time}","seq":999,"prev":"{prev}","event":"call","mac":"{prev}"}}"#),
        ];
        for line in forged {
            let kept = Kept::new();
            std::fs::write(kept.dir.join(old), line + "\n").unwrap();
            std::fs::remove_file(kept.dir.join(FILES[0])).unwrap();
            kept.write(2, 1);
            assert!(kept.dir.join(old).exists());
            std::fs::remove_file(kept.dir.join(old)).unwrap();
            assert_eq!(kept.verify(None).broken, ["lines 1 to 4 are missing from the beginning, and have not expired"]);
        }

        // A forged line does not keep what has expired, and an empty file goes.
        let kept = Kept::new();
        std::fs::write(kept.dir.join(old), "").unwrap();
        kept.edit(1, |lines| lines.push(lines[3].replace("\"seq\":8", "\"seq\":999")));
        kept.write(32, 1);
        let left: Vec<String> = list(&kept.dir).unwrap().iter().map(ToString::to_string).collect();
        assert_eq!(left, [FILES[1], FILES[2], "2126-12-18.jsonl"]);
        assert!(kept.verify(None).broken.is_empty(), "line 4 is the last that expired");
    }

    #[test]
    fn w55_days_of_the_old_form_go_with_the_first_day_that_has_codes() {
        let kept = Kept::old_form();
        kept.write(2, 2);
        kept.write(32, 1);
        assert!(kept.dir.join(FILES[0]).exists(), "nobody vouches for it");
        kept.write(33, 1);
        let report = kept.verify(None);
        assert!(report.is_whole(), "{report:?}");
        assert_eq!((report.files.len(), report.files[0].first_seq), (2, Some(15)));
    }

    #[test]
    fn w31_a_chain_that_was_computed_anew_without_the_key_is_found() {
        let forge = |kept: &Kept, key: Option<ChainKey>| {
            let mut prev = GENESIS.to_owned();
            for file in FILES {
                let path = kept.dir.join(file);
                let mut forged = Vec::new();
                for line in std::fs::read_to_string(&path).unwrap().lines() {
                    let mut entry: serde_json::Map<String, serde_json::Value> = serde_json::from_str(line).unwrap();
                    entry.remove("mac");
                    entry.insert("prev".into(), prev.clone().into());
                    entry.insert("tool".into(), "forged".into());
                    let begin = forged.len();
                    serde_json::to_writer(&mut forged, &entry).unwrap();
                    prev = match &key {
                        Some(key) => key.close(&mut forged, begin),
                        None => hash(&forged[begin..]),
                    };
                    forged.push(b'\n');
                }
                std::fs::write(path, forged).unwrap();
            }
        };
        let kept = Kept::new();
        forge(&kept, Some(ChainKey::new(&[7; 32])));
        let report = kept.verify(None);
        assert_eq!(report.files[0].broken, Some((1, "line 1 was changed, or made with another key".into())));
        assert_eq!(report.broken, ["line 12 is not the one that was written"]);
        // A forgery in the form that needs no key.
        let kept = Kept::new();
        forge(&kept, None);
        let report = kept.verify(None);
        assert_eq!(report.broken, ["line 12 is not the one that was written"]);
        std::fs::remove_file(head_path(&kept.dir)).unwrap();
        assert!(!kept.verify(None).is_whole());
        // A forgery of only the newest line in the old form.
        let kept = Kept::new();
        kept.edit(2, |lines| {
            let prev = &lines[2].split_once("\"mac\":\"").unwrap().1[..64];
            lines[3] = format!(r#"{{"time":"2126-11-18T00:00:00.000Z","seq":12,"prev":"{prev}","event":"call"}}"#);
        });
        assert_eq!(kept.broken(), one(2, 4, "line 12 has no code"));
    }

    #[test]
    fn w31_without_its_key_a_journal_does_not_verify() {
        let kept = Kept::new();
        std::fs::remove_file(key_path(&kept.dir)).unwrap();
        let report = kept.verify(None);
        assert!(!report.is_whole());
        assert_eq!(report.broken, ["the key is missing, so it cannot be checked who wrote these lines"]);
        assert_eq!(kept.broken(), []);
        // A new server creates another key and continues.
        kept.write(3, 1);
        let report = kept.verify(None);
        assert_eq!(report.files[0].broken, Some((1, "line 1 was changed, or made with another key".into())));
        assert_eq!(report.files[3].broken, None);
    }

    #[test]
    fn w31_a_journal_of_the_old_form_verifies_and_says_so() {
        let kept = Kept::old_form();
        let report = kept.verify(None);
        assert!(report.is_whole(), "{report:?}");
        assert_eq!((report.old_form, report.files.len()), (12, 3));
        // A current server continues the journal, and the lines that it adds have codes.
        kept.write(2, 2);
        let report = kept.verify(None);
        assert!(report.is_whole(), "{report:?}");
        assert_eq!((report.old_form, report.files[2].last_seq), (12, Some(14)));
        kept.edit(1, |lines| lines[1] = lines[1].replace("call", "none"));
        assert_eq!(kept.broken(), one(1, 3, "line 6 was changed: its hash is not the one in the next line"));
    }

    #[test]
    fn a_file_removed_in_the_middle_is_missed() {
        let kept = Kept::new();
        std::fs::remove_file(kept.dir.join(FILES[1])).unwrap();
        assert_eq!(kept.broken(), one(2, 1, "lines 5 to 8 are missing"));
    }

    #[test]
    fn a_head_that_was_noted_elsewhere_has_to_be_there() {
        let kept = Kept::new();
        let head = kept.verify(None).head.unwrap();
        assert!(kept.verify(Some(&head)).is_whole());
        let text = std::fs::read_to_string(kept.dir.join(FILES[0])).unwrap();
        let first = ChainLink::parse(text.lines().next().unwrap().as_bytes()).unwrap().mac.unwrap();
        assert!(kept.verify(Some(&first)).is_whole(), "a head of earlier is still there");
        // An attacker who can also write beside the directory can restore an earlier state of both.
        kept.edit(2, |lines| lines.truncate(2));
        std::fs::remove_file(head_path(&kept.dir)).unwrap();
        assert!(kept.verify(None).broken[0].starts_with("the record of the newest line is missing"));
        assert!(kept.verify(Some(&first)).is_whole());
        let report = kept.verify(Some(&head));
        assert!(!report.is_whole());
        assert!(report.broken[0].starts_with("the given head is not in the journal"), "{report:?}");
    }

    #[test]
    fn a_forged_note_of_a_torn_line_does_not_hide_a_removed_one() {
        let kept = Kept::new();
        kept.edit(2, |lines| {
            let prev = hash(b"junk");
            lines[2] = "junk".into();
            lines[3] = format!(
                r#"{{"time":"2126-11-18T00:00:00.000Z","seq":11,"prev":"{prev}","event":"torn","count":4,"after":"{GENESIS}"}}"#
            );
        });
        assert_eq!(kept.broken(), one(2, 4, "the line before is not a line of the journal"));
    }

    #[test]
    fn an_empty_directory_is_whole_and_has_no_head() {
        let report = Kept::empty().verify(None);
        assert!(report.is_whole() && report.head.is_none());
    }
}
