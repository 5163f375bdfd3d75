//! This module searches names and lines of files beneath a directory. It runs in a child process (`searcher`), because
//! a pattern and a tree that hostile code chose can keep a processor busy for seconds.
//!
//! The number of files, the bytes read, the time and the size of the result are bounded. The regular expressions need a
//! time that is linear in the text, and their size is bounded too.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use jail::beneath::{DirEntry, EntryKind, Root};
use proto::{FoundLine, FoundLines, FromGuest, GuestFailure, SearchBound, SearchQuery};
use regex::bytes::{Regex, RegexBuilder};

use crate::files::FileFailure;

/// Directories that are left out below the searched one, and only counted below a listed one, because they hold what
/// tools made or fetched.
pub(crate) const LEFT_OUT: &[&str] =
    &[".git", ".hg", ".svn", "node_modules", "__pycache__", ".venv", "venv", ".packages"];
/// Maximum number of files and directories that a search visits.
const MAX_VISITED: usize = 100_000;
/// Maximum number of bytes that a search reads, and of one file.
const MAX_READ: u64 = 512 << 20;
const MAX_FILE: u64 = 32 << 20;
const BLOCK: usize = 64 << 10;
/// Maximum length of a line that is searched as a whole. A longer line is searched in pieces of this length.
const MAX_LINE: usize = 16 << 10;
/// Maximum length of the shown part of a line, and of the part of it before the place that was found.
const SHOWN: usize = 240;
const SHOWN_BEFORE: usize = 60;
/// Maximum length of a pattern, and of the automaton made from it.
pub(crate) const MAX_PATTERN: usize = 4096;
const MAX_AUTOMATON: usize = 1 << 20;

/// Runs the search that `request` describes beneath the directory `root`, and writes the reply.
pub fn serve(root: OwnedFd, request: &str, mut output: impl Write) -> io::Result<()> {
    let (path, query) = serde_json::from_str(request)?;
    output.write_all(&serde_json::to_vec(&reply(root.into(), path, query))?)
}

/// Searches in a thread, so that the time is kept even where one step takes long. What was found until then is returned.
fn reply(root: Root, path: PathBuf, query: SearchQuery) -> FromGuest {
    let until = Instant::now() + Duration::from_millis(query.after_ms);
    let found = Arc::new(Mutex::new(FoundLines::default()));
    let (sender, ended) = mpsc::channel();
    let shared = found.clone();
    let search = move || sender.send(Search::begin(root, path, &query, until, shared).map(Search::run));
    if let Err(error) = std::thread::Builder::new().spawn(search) {
        return FileFailure::io(format!("the search does not start: {error}")).into();
    }
    let ended = ended.recv_timeout(until.saturating_duration_since(Instant::now()));
    let mut found = std::mem::take(&mut *lock(&found));
    match ended {
        Ok(Ok(())) => {}
        Ok(Err(failure)) => return failure.into(),
        Err(RecvTimeoutError::Timeout) => drop(found.stopped.get_or_insert(SearchBound::Time)),
        Err(RecvTimeoutError::Disconnected) => return FileFailure::io("the search failed".into()).into(),
    }
    FromGuest::Found { found }
}

fn lock(found: &Mutex<FoundLines>) -> MutexGuard<'_, FoundLines> {
    found.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Search {
    root: Root,
    /// Directory that is searched, below `root`.
    top: PathBuf,
    /// Pattern of names, and whether it applies to the whole path.
    names: Option<(Regex, bool)>,
    text: Option<Regex>,
    /// Entries that were not visited yet, with paths below `top`; the next one is the last.
    ahead: Vec<DirEntry>,
    scan: Option<Scan>,
    visited: usize,
    /// True if a directory has more entries than could be noted.
    is_cut: bool,
    bytes_read: u64,
    until: Instant,
    max_lines: usize,
    room: usize,
    /// What was found so far. The main thread takes it when the time is over.
    found: Arc<Mutex<FoundLines>>,
}

/// A file of which a part was searched.
struct Scan {
    path: PathBuf,
    file: File,
    /// Bytes that were read and not searched, from the beginning of a line or of a piece of it.
    buffer: Vec<u8>,
    line: u64,
    /// True if an earlier piece of this line contained the text.
    line_found: bool,
    is_first_block: bool,
    /// True if the whole file was read.
    is_ended: bool,
}

impl Scan {
    fn new(path: PathBuf, file: File) -> Self {
        Self { path, file, buffer: Vec::new(), line: 1, line_found: false, is_first_block: true, is_ended: false }
    }
}

impl Search {
    fn begin(
        root: Root,
        top: PathBuf,
        query: &SearchQuery,
        until: Instant,
        found: Arc<Mutex<FoundLines>>,
    ) -> Result<Self, FileFailure> {
        let names = match &query.glob {
            Some(glob) => Some((compile(&glob_to_regex(glob)?, "glob")?, glob.contains('/'))),
            None => None,
        };
        let text = match &query.text {
            Some(text) if query.regex => Some(compile(text, "regular expression")?),
            Some(text) => Some(compile(&regex::escape(text), "text")?),
            None => None,
        };
        let mut search = Self {
            root,
            top,
            names,
            text,
            ahead: Vec::new(),
            scan: None,
            visited: 0,
            is_cut: false,
            bytes_read: 0,
            until,
            max_lines: query.max_lines as usize,
            room: query.max_bytes as usize,
            found,
        };
        // A directory that cannot be opened fails the search here; one below it is left out.
        let Err(failure) = search.open(Path::new("")) else { return Ok(search) };
        let file = search.root.read_file(&search.top).ok().filter(|_| search.text.is_some()).ok_or(failure)?;
        search.found().files = 1;
        search.scan = Some(Scan::new(PathBuf::new(), file));
        Ok(search)
    }

    fn found(&self) -> MutexGuard<'_, FoundLines> {
        lock(&self.found)
    }

    /// Searches until everything was visited or a bound is reached.
    fn run(mut self) {
        loop {
            if Instant::now() >= self.until {
                self.stop(SearchBound::Time);
            } else if self.visited >= MAX_VISITED || self.bytes_read >= MAX_READ {
                self.stop(SearchBound::Size);
            }
            if self.found().stopped.is_some() {
                return;
            }
            if !self.go_on() {
                break;
            }
        }
        if self.is_cut {
            self.stop(SearchBound::Size);
        }
    }

    fn stop(&self, bound: SearchBound) {
        self.found().stopped.get_or_insert(bound);
    }

    /// Searches more of a file or visits the next entry. Returns false at the end.
    fn go_on(&mut self) -> bool {
        if let Some(scan) = self.scan.take() {
            self.scan_on(scan);
            return true;
        }
        let Some(entry) = self.ahead.pop() else { return false };
        self.visited += 1;
        let name = entry.path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        match entry.kind {
            EntryKind::Directory if LEFT_OUT.contains(&name.as_str()) => {}
            // It was removed meanwhile, or cannot be read.
            EntryKind::Directory => drop(self.open(&entry.path)),
            EntryKind::File if self.fits(&entry.path, &name) => self.visit(entry),
            EntryKind::File | EntryKind::Symlink | EntryKind::Other => {}
        }
        true
    }

    fn open(&mut self, below: &Path) -> Result<(), FileFailure> {
        // The list of entries stays bounded, however large and deep the directories are.
        let listing = self.root.list_one(self.top.join(below), MAX_VISITED - self.ahead.len())?;
        self.is_cut |= listing.total > listing.entries.len() as u64;
        let entries = listing.entries.into_iter().rev();
        self.ahead.extend(entries.map(|entry| DirEntry { path: below.join(&entry.path), ..entry }));
        Ok(())
    }

    fn fits(&self, path: &Path, name: &str) -> bool {
        match &self.names {
            Some((names, true)) => names.is_match(path.to_string_lossy().as_bytes()),
            Some((names, false)) => names.is_match(name.as_bytes()),
            None => true,
        }
    }

    fn visit(&mut self, entry: DirEntry) {
        if self.text.is_none() {
            self.found().files += 1;
            return self.add(&entry.path, 0, "");
        }
        if entry.size > MAX_FILE {
            self.found().skipped += 1;
            return;
        }
        match self.root.read_file(self.top.join(&entry.path)) {
            Ok(file) => {
                self.found().files += 1;
                self.scan = Some(Scan::new(entry.path, file));
            }
            Err(_) => self.found().skipped += 1,
        }
    }

    /// Reads the next block of the file and searches its lines.
    fn scan_on(&mut self, mut scan: Scan) {
        if !self.read_block(&mut scan) {
            let mut found = self.found();
            found.files -= 1;
            found.skipped += 1;
            return;
        }
        let mut rest = scan.buffer.as_slice();
        let (mut line, mut is_found) = (scan.line, scan.line_found);
        while let Some((piece, is_line)) = next_piece(rest, scan.is_ended).filter(|_| self.found().stopped.is_none()) {
            if !is_found {
                is_found = self.search_piece(&scan.path, line, &rest[..piece]);
            }
            if is_line {
                (line, is_found) = (line + 1, false);
            }
            rest = &rest[piece + usize::from(is_line)..];
        }
        if !scan.is_ended {
            let buffer = rest.to_vec();
            self.scan = Some(Scan { buffer, line, line_found: is_found, ..scan });
        }
    }

    /// Reads the next block of the file. Returns false if it is not to be searched.
    fn read_block(&mut self, scan: &mut Scan) -> bool {
        let before = scan.buffer.len();
        let read = (&mut scan.file).take(BLOCK as u64).read_to_end(&mut scan.buffer);
        self.bytes_read += (scan.buffer.len() - before) as u64;
        scan.is_ended = scan.buffer.len() - before < BLOCK;
        let is_binary = std::mem::take(&mut scan.is_first_block) && scan.buffer.contains(&0);
        read.is_ok() && !is_binary
    }

    /// Searches a line or a piece of it. Returns whether it contains the text.
    fn search_piece(&mut self, path: &Path, line: u64, piece: &[u8]) -> bool {
        let piece = piece.strip_suffix(b"\r").unwrap_or(piece);
        let Some(place) = self.text.as_ref().and_then(|text| text.find(piece)) else { return false };
        let from = if piece.len() > SHOWN { place.start().saturating_sub(SHOWN_BEFORE) } else { 0 };
        let shown = String::from_utf8_lossy(&piece[from..piece.len().min(from + SHOWN)]);
        let before = if from > 0 { "…" } else { "" };
        let after = if from + SHOWN < piece.len() { "…" } else { "" };
        self.add(path, line, &format!("{before}{shown}{after}"));
        true
    }

    fn add(&mut self, path: &Path, line: u64, text: &str) {
        let path = path.to_string_lossy().into_owned();
        let needed = path.len() + text.len() + 16;
        if needed > self.room || self.found().lines.len() >= self.max_lines {
            return self.stop(SearchBound::Results);
        }
        self.room -= needed;
        self.found().lines.push(FoundLine { path, line, text: text.to_owned() });
    }
}

/// Returns the length of the next piece to search and whether a line ends after it, or `None` if more has to be read.
fn next_piece(rest: &[u8], is_ended: bool) -> Option<(usize, bool)> {
    match rest.iter().take(MAX_LINE).position(|byte| *byte == b'\n') {
        Some(end) => Some((end, true)),
        None if rest.len() >= MAX_LINE || is_ended && !rest.is_empty() => Some((rest.len().min(MAX_LINE), false)),
        None => None,
    }
}

fn compile(pattern: &str, what: &str) -> Result<Regex, FileFailure> {
    let invalid = |why: String| FileFailure { failure: GuestFailure::Pattern, message: format!("the {what} {why}") };
    if pattern.len() > MAX_PATTERN {
        return Err(invalid(format!("is longer than {MAX_PATTERN} bytes")));
    }
    let built = RegexBuilder::new(pattern).size_limit(MAX_AUTOMATON).dfa_size_limit(MAX_AUTOMATON).build();
    built.map_err(|error| match error {
        regex::Error::CompiledTooBig(_) => invalid("is too large: use fewer repetitions".into()),
        // The last line of the message says what is wrong; those before it draw an arrow.
        error => {
            let text = error.to_string();
            invalid(format!("is invalid: {}", text.lines().last().unwrap_or_default().trim_start_matches("error: ")))
        }
    })
}

/// Translates a pattern of names to a regular expression for whole names.
fn glob_to_regex(glob: &str) -> Result<String, FileFailure> {
    let mut regex = String::from("^(?s:");
    let mut depth = 0;
    let mut rest = glob.strip_prefix("./").unwrap_or(glob);
    while let Some(c) = rest.chars().next() {
        rest = &rest[c.len_utf8()..];
        match c {
            '*' if rest.starts_with("*/") => {
                rest = &rest[2..];
                regex += "(?:.*/)?";
            }
            '*' if rest.starts_with('*') => {
                rest = &rest[1..];
                regex += ".*";
            }
            '*' => regex += "[^/]*",
            '?' => regex += "[^/]",
            '{' => {
                depth += 1;
                regex += "(?:";
            }
            '}' if depth > 0 => {
                depth -= 1;
                regex.push(')');
            }
            ',' if depth > 0 => regex.push('|'),
            '[' => {
                let negated = rest.starts_with(['!', '^']);
                let inner = if negated { &rest[1..] } else { rest };
                // A bracket right after the opening one is a member of the class.
                let end = inner.char_indices().skip(1).find(|(_, c)| *c == ']').map(|(at, _)| at);
                let Some(end) = end else {
                    regex += r"\[";
                    continue;
                };
                regex += if negated { "[^/" } else { "[" };
                for member in inner[..end].chars() {
                    if matches!(member, '[' | ']' | '\\' | '^' | '&' | '~') {
                        regex.push('\\');
                    }
                    regex.push(member);
                }
                regex.push(']');
                rest = &inner[end + 1..];
            }
            other => regex += &regex::escape(other.encode_utf8(&mut [0; 4])),
        }
    }
    match depth {
        0 => Ok(regex + ")$"),
        _ => {
            let message = "the glob has a `{` without its `}`".into();
            Err(FileFailure { failure: GuestFailure::Pattern, message })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs_fit_as_in_a_shell() {
        let fits = |glob: &str, name: &str| {
            let regex = glob_to_regex(glob).ok().unwrap();
            compile(&regex, "glob").ok().unwrap().is_match(name.as_bytes())
        };
        for (glob, yes, no) in [
            ("*.py", "a.py", "a.pyc"),
            ("*.py", ".py", "d/a.py"),
            ("src/*.rs", "src/a.rs", "src/b/a.rs"),
            ("src/**/*.rs", "src/b/c/a.rs", "source/a.rs"),
            ("src/**/*.rs", "src/a.rs", "a.rs"),
            ("**/a", "x/y/a", "x/y/b"),
            ("**", "x/y", "\0none"),
            ("?.txt", "ü.txt", "ab.txt"),
            ("[a-c]x", "bx", "dx"),
            ("[!a-c]x", "dx", "bx"),
            ("*.{js,ts}", "a.ts", "a.css"),
            ("a+b(1).txt", "a+b(1).txt", "aab1.txt"),
            ("a[b", "a[b", "ab"),
            ("[]]", "]", "["),
            ("./a", "a", "./a"),
        ] {
            assert!(fits(glob, yes), "{glob} {yes}");
            assert!(no == "\0none" || !fits(glob, no), "{glob} {no}");
        }
        assert!(glob_to_regex("{a").is_err());
    }

    #[test]
    fn patterns_that_would_take_long_are_refused_at_once() {
        let why = |pattern: &str| compile(pattern, "regular expression").err().unwrap().message;
        assert_eq!(why("(a{1000}){1000}"), "the regular expression is too large: use fewer repetitions");
        assert_eq!(why("a("), "the regular expression is invalid: unclosed group");
        assert_eq!(why(r"(a)\1"), "the regular expression is invalid: backreferences are not supported");
        for usual in [r"\b\w+@\w+\.\w{2,6}\b", r"(?i)^\s*def\s+test_\w+\(", r"[A-Za-zÀ-ÿ]{1,40}: \d+"] {
            assert!(compile(usual, "regular expression").is_ok(), "{usual}");
        }
        assert!(why(&"a".repeat(MAX_PATTERN + 1)).ends_with("is longer than 4096 bytes"));
    }
}
