//! Checking the chain: every line has to carry the hash of the one before, over all files.
//!
//! Whoever can write the files can also write them all anew, and lines removed from the end leave no trace: both are seen only
//! by a hash that was noted elsewhere before.

use std::fs::File;
use std::io::{self, BufReader};
use std::path::Path;

use super::files::{GENESIS, hash, list, next_line};
use super::writer::{Head, Link};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    pub files: Vec<FileReport>,
    /// The hash of the last whole line: what to note for the next time.
    pub head: Option<String>,
    /// The last line has no end: a server is writing, or stopped while it did.
    pub unfinished: bool,
    /// The hash that was noted is not there.
    pub head_missing: bool,
}

impl Report {
    pub fn is_whole(&self) -> bool {
        !self.head_missing && self.files.iter().all(|file| file.broken.is_none())
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileReport {
    pub name: String,
    pub lines: u64,
    pub first_seq: Option<u64>,
    pub last_seq: Option<u64>,
    /// The first line that does not fit, counted from 1, and why.
    pub broken: Option<(u64, String)>,
}

/// Walks all files of a directory. `noted` is a head of an earlier time, which has to be there still.
pub fn verify(dir: &Path, noted: Option<&str>) -> io::Result<Report> {
    let mut walk = Walk { before: None, torn: None, noted, seen: false };
    let names = list(dir)?;
    let mut report = Report { files: Vec::new(), head: None, unfinished: false, head_missing: false };
    for (at, name) in names.iter().enumerate() {
        let mut file = BufReader::new(File::open(dir.join(name.to_string()))?);
        let newest = at + 1 == names.len();
        let (file, unfinished) = walk.file(name.to_string(), &mut file, newest)?;
        report.unfinished |= unfinished;
        report.files.push(file);
    }
    report.head = walk.before.map(|head| head.hash);
    report.head_missing = noted.is_some() && !walk.seen;
    Ok(report)
}

struct Walk<'a> {
    /// None until the first line: days before it may have been deleted.
    before: Option<Head>,
    /// A line that is none; right only if the next one says so. Its hash and size.
    torn: Option<(String, u64)>,
    noted: Option<&'a str>,
    seen: bool,
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

    /// The number of the line; none for one that waits for the next to explain it.
    fn line(&mut self, line: &[u8]) -> Result<Option<u64>, String> {
        let hash = hash(line);
        let torn = self.torn.take();
        let Ok(link) = serde_json::from_slice::<Link>(line) else {
            let explained = torn.is_none();
            self.torn = Some((hash, line.len() as u64));
            return if explained { Ok(None) } else { Err(NOT_A_LINE.into()) };
        };
        self.seen |= self.noted == Some(&hash);
        let before = self.before.replace(Head { seq: link.seq, hash });
        match torn {
            Some((torn, bytes)) => after_torn(before.as_ref(), &link, &torn, bytes),
            None => follows(before.as_ref(), &link),
        }
        .map(|()| Some(link.seq))
    }
}

const NOT_A_LINE: &str = "this is not a line of the journal";

fn follows(before: Option<&Head>, link: &Link) -> Result<(), String> {
    let Some(before) = before else {
        // The first line there is: the first ever, or one whose days before were deleted.
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
        return Err(format!("line {} was changed: its hash is not the one noted here", before.seq));
    }
    Ok(())
}

fn after_torn(before: Option<&Head>, link: &Link, torn: &str, bytes: u64) -> Result<(), String> {
    let tells = link.event == "torn" && link.prev == torn && link.count == Some(bytes);
    let after = match before {
        Some(before) => link.after.as_ref() == Some(&before.hash) && link.seq == before.seq + 1,
        None => link.after.is_some(),
    };
    if tells && after { Ok(()) } else { Err("the line before is not a line of the journal".into()) }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::super::writer::Writer;
    use super::super::{Entry, JournalConfig};
    use super::*;
    use crate::scratch::Scratch;

    const FILES: [&str; 3] = ["2126-11-16.jsonl", "2126-11-17.jsonl", "2126-11-18.jsonl"];

    /// Three days of four lines each.
    fn journal() -> Scratch {
        let dir = Scratch::new();
        for day in 0..3 {
            let now = SystemTime::UNIX_EPOCH + Duration::from_secs(4_950_460_800 + day * 86_400);
            let mut writer = Writer::open(JournalConfig::new(&dir.0), now).unwrap();
            for n in 0..4 {
                let entry = Entry { tool: Some(format!("tool-{n}")), ..Entry::event("call") };
                writer.append(now, &entry).unwrap();
            }
        }
        dir
    }

    fn edit(dir: &Scratch, file: usize, change: impl FnOnce(&mut Vec<String>)) {
        let path = dir.0.join(FILES[file]);
        let mut lines: Vec<String> = std::fs::read_to_string(&path).unwrap().lines().map(str::to_owned).collect();
        change(&mut lines);
        std::fs::write(path, lines.iter().map(|line| format!("{line}\n")).collect::<String>()).unwrap();
    }

    /// File, line and reason of each broken file.
    fn broken(dir: &Scratch) -> Vec<(usize, u64, String)> {
        let report = verify(&dir.0, None).unwrap();
        let index = |name: &str| FILES.iter().position(|file| *file == name).unwrap();
        report.files.iter().filter_map(|f| f.broken.clone().map(|(line, why)| (index(&f.name), line, why))).collect()
    }

    fn one(file: usize, line: u64, why: &str) -> Vec<(usize, u64, String)> {
        vec![(file, line, why.into())]
    }

    #[test]
    fn an_untouched_journal_is_whole() {
        let dir = journal();
        let report = verify(&dir.0, None).unwrap();
        assert!(report.is_whole() && !report.unfinished, "{report:?}");
        let ranges: Vec<_> = report.files.iter().map(|file| (file.first_seq, file.last_seq)).collect();
        assert_eq!(ranges, [(Some(1), Some(4)), (Some(5), Some(8)), (Some(9), Some(12))]);
    }

    #[test]
    fn changed_removed_inserted_and_reordered_lines_are_found_where_they_are() {
        let dir = journal();
        edit(&dir, 1, |lines| lines[1] = lines[1].replace("tool-1", "tool-9"));
        assert_eq!(broken(&dir), one(1, 3, "line 6 was changed: its hash is not the one noted here"));

        let dir = journal();
        edit(&dir, 1, |lines| drop(lines.remove(1)));
        assert_eq!(broken(&dir), one(1, 2, "lines 6 to 6 are missing"));

        let dir = journal();
        edit(&dir, 1, |lines| lines.insert(2, lines[1].replace("tool-1", "forged")));
        assert_eq!(broken(&dir), one(1, 3, "line 6 stands after line 6"));

        let dir = journal();
        edit(&dir, 1, |lines| lines.swap(1, 2));
        assert_eq!(broken(&dir), one(1, 2, "lines 6 to 6 are missing"));

        let dir = journal();
        edit(&dir, 1, |lines| lines[2] = "nonsense".into());
        assert_eq!(broken(&dir), one(1, 4, "the line before is not a line of the journal"));

        let dir = journal();
        edit(&dir, 0, |lines| lines[3] = lines[3].replace("tool-3", "tool-x"));
        assert_eq!(broken(&dir), one(1, 1, "line 4 was changed: its hash is not the one noted here"));

        let dir = journal();
        edit(&dir, 0, |lines| lines.truncate(3));
        assert_eq!(broken(&dir), one(1, 1, "lines 4 to 4 are missing"));

        let dir = journal();
        edit(&dir, 0, |lines| drop(lines.remove(0)));
        let shortened = verify(&dir.0, None).unwrap();
        assert!(shortened.is_whole(), "the oldest lines may have been deleted for their age: {shortened:?}");
        assert_eq!(shortened.files[0].first_seq, Some(2));
    }

    #[test]
    fn a_file_removed_in_the_middle_is_missed_and_the_oldest_is_not() {
        let dir = journal();
        std::fs::remove_file(dir.0.join(FILES[1])).unwrap();
        assert_eq!(broken(&dir), one(2, 1, "lines 5 to 8 are missing"));
        let dir = journal();
        std::fs::remove_file(dir.0.join(FILES[0])).unwrap();
        assert_eq!(broken(&dir), []);
    }

    #[test]
    fn lines_removed_from_the_end_are_missed_by_a_noted_head() {
        let dir = journal();
        let head = verify(&dir.0, None).unwrap().head.unwrap();
        assert!(verify(&dir.0, Some(&head)).unwrap().is_whole());
        let first = hash(std::fs::read_to_string(dir.0.join(FILES[0])).unwrap().lines().next().unwrap().as_bytes());
        assert!(verify(&dir.0, Some(&first)).unwrap().is_whole(), "a head of earlier is still there");
        edit(&dir, 2, |lines| lines.truncate(2));
        assert!(verify(&dir.0, None).unwrap().is_whole(), "the chain itself shows nothing");
        let report = verify(&dir.0, Some(&head)).unwrap();
        assert!(report.head_missing && !report.is_whole());
    }

    #[test]
    fn a_forged_note_of_a_torn_line_does_not_hide_a_removed_one() {
        let dir = journal();
        edit(&dir, 2, |lines| {
            let prev = hash(b"junk");
            lines[2] = "junk".into();
            lines[3] = format!(
                r#"{{"time":"2126-11-18T00:00:00.000Z","seq":11,"prev":"{prev}","event":"torn","count":4,"after":"{GENESIS}"}}"#
            );
        });
        assert_eq!(broken(&dir), one(2, 4, "the line before is not a line of the journal"));
    }

    #[test]
    fn an_empty_directory_is_whole_and_has_no_head() {
        let dir = Scratch::new();
        let report = verify(&dir.0, None).unwrap();
        assert!(report.is_whole() && report.head.is_none());
    }
}
