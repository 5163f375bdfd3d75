//! The journal's files: their names, their order and their lines.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use ring::digest::{SHA256, digest};
use text::{hex, iso8601};

/// Maximum length of a journal line; longer lines are treated as damaged.
pub(super) const LONGEST_LINE: u64 = 1 << 20;

/// The `prev` of the very first line, which follows no other line.
pub(super) const GENESIS: &str = "0000000000000000000000000000000000000000000000000000000000000000";

/// The name of a journal file: `2026-11-16.jsonl`, then `2026-11-16-2.jsonl`. Names sort in the order in which the
/// files were written.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Name {
    pub day: String,
    pub part: u32,
}

impl Name {
    pub(super) fn parse(name: &str) -> Option<Self> {
        let stem = name.strip_suffix(".jsonl")?;
        let (day, rest) = stem.split_at_checked(10)?;
        let is_day =
            day.bytes().enumerate().all(|(at, b)| if at == 4 || at == 7 { b == b'-' } else { b.is_ascii_digit() });
        let part = match rest.strip_prefix('-') {
            None if rest.is_empty() => 1,
            Some(part) => part.parse().ok().filter(|part| *part >= 2)?,
            None => return None,
        };
        let name = Self { day: day.into(), part };
        (is_day && name.to_string().strip_suffix(".jsonl") == Some(stem)).then_some(name)
    }

    pub(super) fn next(&self) -> Self {
        Self { day: self.day.clone(), part: self.part + 1 }
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.part {
            1 => write!(f, "{}.jsonl", self.day),
            part => write!(f, "{}-{part}.jsonl", self.day),
        }
    }
}

/// Lists the journal's files in a directory, oldest first, and ignores everything else there.
pub(super) fn list(dir: &Path) -> io::Result<Vec<Name>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        names.extend(entry?.file_name().to_str().and_then(Name::parse));
    }
    names.sort();
    Ok(names)
}

/// Formats a time as `2026-11-16T00:12:56.123Z`.
pub(super) fn time(at: SystemTime) -> String {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    let whole = iso8601(since.as_secs().try_into().unwrap_or(i64::MAX));
    format!("{}.{:03}Z", whole.trim_end_matches('Z'), since.subsec_millis())
}

/// Formats the day in UTC as `2026-11-16`.
pub(super) fn day(at: SystemTime) -> String {
    time(at)[..10].to_owned()
}

/// Returns the hash of a line without its line end.
pub(super) fn hash(line: &[u8]) -> String {
    hex(digest(&SHA256, line).as_ref())
}

/// Returns the next line without its line end, and whether it had one. Returns `None` at the end of the file.
pub(super) fn next_line(file: &mut impl BufRead) -> io::Result<Option<(Vec<u8>, bool)>> {
    let mut line = Vec::new();
    file.take(LONGEST_LINE).read_until(b'\n', &mut line)?;
    if line.is_empty() {
        return Ok(None);
    }
    let whole = line.pop_if(|last| *last == b'\n').is_some();
    Ok(Some((line, whole)))
}

/// Returns the unchanged lines of all files, oldest first.
pub fn lines(dir: &Path) -> io::Result<impl Iterator<Item = io::Result<String>> + use<>> {
    let paths: Vec<PathBuf> = list(dir)?.iter().map(|name| dir.join(name.to_string())).collect();
    Ok(paths.into_iter().flat_map(|path| FileLines { file: Some(File::open(path).map(BufReader::new)) }))
}

struct FileLines {
    file: Option<io::Result<BufReader<File>>>,
}

impl Iterator for FileLines {
    type Item = io::Result<String>;

    fn next(&mut self) -> Option<Self::Item> {
        let read = match self.file.as_mut()? {
            Ok(file) => next_line(file),
            Err(_) => return self.file.take().and_then(Result::err).map(Err),
        };
        let line = read.map(|line| line.map(|(line, _)| String::from_utf8_lossy(&line).into_owned())).transpose();
        if !matches!(line, Some(Ok(_))) {
            self.file = None;
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written_and_sort_in_the_order_of_writing() {
        let names = ["2026-11-15.jsonl", "2026-11-16.jsonl", "2026-11-16-2.jsonl", "2026-11-16-10.jsonl"];
        let parsed: Vec<Name> = names.iter().map(|name| Name::parse(name).unwrap()).collect();
        assert!(parsed.is_sorted());
        assert_eq!(parsed.iter().map(Name::to_string).collect::<Vec<_>>(), names);
        for other in
            ["lock", "x.jsonl", "2026-11-16-1.jsonl", "2026-11-16-02.jsonl", "2026-11-16x.jsonl", "2026-1-16.jsonl"]
        {
            assert_eq!(Name::parse(other), None, "{other}");
        }
    }

    #[test]
    fn days_and_times_are_utc() {
        let at = UNIX_EPOCH + std::time::Duration::from_millis(1_761_116_022_045);
        assert_eq!((time(at).as_str(), day(at).as_str()), ("2025-10-22T06:53:42.045Z", "2025-10-22"));
    }
}
