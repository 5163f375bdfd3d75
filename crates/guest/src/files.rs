//! This module writes, reads, edits, lists and searches files of the sandbox for the host, beneath a few directories and
//! never outside of them.
//!
//! Large files are transferred in chunks, between the other work of the loop. The module knows no kernels.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Instant;

use jail::beneath::{self, NewFile};
use jail::spec::{DATA, WORKSPACE};
use proto::{FileEntry, FileKind, FrameKind, FromGuest, GuestFailure, ListOrder, Root, SearchQuery};

use crate::config::GuestConfig;
use crate::host::{Broken, Host};
use crate::kernel::damaged;
use crate::outputs::Outputs;
use crate::search::LEFT_OUT;
use crate::searcher::Searches;

const CHUNK: usize = 64 << 10;
/// Maximum number of chunks per file and turn of the loop.
const CHUNKS_PER_TURN: usize = 4;
/// Maximum size of a listing, which must fit into one message even if each character is escaped.
const MAX_LISTING: usize = 15 << 20;
/// Maximum number of line numbers in the reply to an edit.
const MAX_EDIT_LINES: usize = 10;

pub(crate) struct FileOperations {
    workspace: PathBuf,
    data: PathBuf,
    tmp: PathBuf,
    outputs: Outputs,
    reading: BTreeMap<u64, Reading>,
    writing: BTreeMap<u64, Writing>,
    /// Listings that have not begun.
    listing: VecDeque<List>,
    pub searches: Searches,
}

/// Part of a file to read, and the maximum size of the whole file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    pub offset: u64,
    pub length: u64,
    pub max_size: Option<u64>,
}

pub(crate) struct List {
    pub call: u64,
    pub root: Root,
    pub path: String,
    pub max_entries: u32,
    pub order: ListOrder,
}

struct Reading {
    file: File,
    offset: u64,
    left: u64,
}

struct Writing {
    file: NewFile,
    /// Number of bytes that were written.
    size: u64,
    /// Number of bytes that may still come.
    left: u64,
    end: WriteEnd,
}

/// What ends a file that is being written.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WriteEnd {
    /// Its last byte.
    Size,
    /// The host's message.
    Message,
}

/// A replacement of text in a file.
pub(crate) struct Edit<'a> {
    pub old: &'a str,
    pub new: &'a str,
    pub all: bool,
    pub max_size: u64,
}

/// A failed operation, as it is reported to the host.
pub(crate) struct FileFailure {
    pub failure: GuestFailure,
    pub message: String,
}

type Result<T> = std::result::Result<T, FileFailure>;

impl FileOperations {
    pub(crate) fn new(config: &GuestConfig, outputs: Outputs) -> Self {
        Self {
            workspace: config.workspace.clone(),
            data: config.data.clone(),
            tmp: config.tmp.clone(),
            outputs,
            reading: BTreeMap::new(),
            writing: BTreeMap::new(),
            listing: VecDeque::new(),
            searches: Searches::new(config.searcher.clone()),
        }
    }

    /// Returns whether there is something to send.
    pub(crate) fn is_busy(&self) -> bool {
        !self.reading.is_empty() || !self.listing.is_empty()
    }

    /// Drops all operations because the host is gone. No half-written file remains.
    pub(crate) fn forget(&mut self) {
        self.reading.clear();
        self.writing.clear();
        self.listing.clear();
        self.searches.forget();
    }

    // ---- writing

    pub(crate) fn write(&mut self, call: u64, root: Root, path: &str, size: u64, host: &mut Host) {
        self.begin_write(call, root, path, (size, WriteEnd::Size), host);
        self.commit_if_whole(call, host);
    }

    /// Begins a file of at most `max_size` bytes, which [`Self::end_stream`] or [`Self::abort`] ends.
    pub(crate) fn write_stream(&mut self, call: u64, root: Root, path: &str, max_size: u64, host: &mut Host) {
        self.begin_write(call, root, path, (max_size, WriteEnd::Message), host);
    }

    fn begin_write(&mut self, call: u64, root: Root, path: &str, (left, end): (u64, WriteEnd), host: &mut Host) {
        match self.resolve_writable(root, path).and_then(|(root, path)| Ok(root.create_file(path)?)) {
            Ok(file) => drop(self.writing.insert(call, Writing { file, size: 0, left, end })),
            Err(failure) => failure.send(call, host),
        }
    }

    /// Gives a streamed file its name. After a failure there is nothing to end.
    pub(crate) fn end_stream(&mut self, call: u64, host: &mut Host) {
        if self.writing.get(&call).is_some_and(|writing| writing.end == WriteEnd::Message) {
            self.commit(call, host);
        }
    }

    /// Drops the file that this call writes, and leaves nothing of it, or ends its search.
    pub(crate) fn abort(&mut self, call: u64) {
        self.writing.remove(&call);
        self.searches.abort(call);
    }

    /// Writes bytes of a file. After a failure, the remaining bytes of the file are ignored.
    pub(crate) fn receive(&mut self, call: u64, bytes: &[u8], host: &mut Host) -> std::result::Result<(), Broken> {
        let Some(writing) = self.writing.get_mut(&call) else { return Ok(()) };
        writing.left = writing.left.checked_sub(bytes.len() as u64).ok_or(Broken)?;
        writing.size += bytes.len() as u64;
        if let Err(error) = writing.file.write_all(bytes) {
            let failure = FileFailure::from(writing.file.explain(&error));
            self.writing.remove(&call);
            failure.send(call, host);
            return Ok(());
        }
        self.commit_if_whole(call, host);
        Ok(())
    }

    fn commit_if_whole(&mut self, call: u64, host: &mut Host) {
        if self.writing.get(&call).is_some_and(|writing| writing.left == 0 && writing.end == WriteEnd::Size) {
            self.commit(call, host);
        }
    }

    fn commit(&mut self, call: u64, host: &mut Host) {
        let Some(writing) = self.writing.remove(&call) else { return };
        match writing.file.commit() {
            Ok(()) => host.send(call, &FromGuest::Written { size: writing.size }),
            Err(error) => FileFailure::from(error).send(call, host),
        }
    }

    // ---- editing

    pub(crate) fn edit(&self, call: u64, root: Root, path: &str, edit: &Edit<'_>, host: &mut Host) {
        match self.edit_now(root, path, edit) {
            Ok(edited) => host.send(call, &edited),
            Err(failure) => failure.send(call, host),
        }
    }

    /// Reads the file, replaces the text and writes the file anew under its name, all within one turn of the loop.
    fn edit_now(&self, root: Root, path: &str, edit: &Edit<'_>) -> Result<FromGuest> {
        let Edit { old, new, all, max_size } = *edit;
        let too_large = || {
            let message = format!("`{path}` has, or would have, more than {max_size} bytes");
            FileFailure { failure: GuestFailure::TooLarge, message }
        };
        if old.is_empty() {
            return Err(FileFailure::path("there is no text to replace".into()));
        }
        let (root, below) = self.resolve_writable(root, path)?;
        let mut content = Vec::new();
        let read = root.read_file(below)?.take(max_size.saturating_add(1)).read_to_end(&mut content);
        read.map_err(|error| FileFailure::io(format!("cannot read `{path}`: {error}")))?;
        if content.len() as u64 > max_size {
            return Err(too_large());
        }
        let text = String::from_utf8(content).ok().filter(|text| !text.contains('\0'));
        let text = text.ok_or_else(|| FileFailure::path(format!("`{path}` is not text in UTF-8")))?;
        let found = text.matches(old).count() as u64;
        let lines = lines_of(&text, old);
        if found == 0 || found > 1 && !all {
            return Ok(FromGuest::Edited { found, replaced: 0, lines, size: text.len() as u64 });
        }
        // The size is computed first, because a short text that is replaced often could become larger than the memory.
        let kept = text.len() as u64 - found * old.len() as u64;
        let size = found.checked_mul(new.len() as u64).and_then(|added| kept.checked_add(added));
        let size = size.filter(|size| *size <= max_size).ok_or_else(too_large)?;
        let mut file = root.create_file(below)?;
        file.write_all(text.replace(old, new).as_bytes()).map_err(|error| file.explain(&error))?;
        file.commit()?;
        Ok(FromGuest::Edited { found, replaced: found, lines, size })
    }

    // ---- reading

    pub(crate) fn read(&mut self, call: u64, root: Root, path: &str, part: Part, host: &mut Host) {
        match self.begin_read(root, path, part) {
            Ok((start, reading)) => {
                host.send(call, &start);
                self.reading.insert(call, reading);
            }
            Err(failure) => failure.send(call, host),
        }
    }

    fn begin_read(&self, root: Root, path: &str, part: Part) -> Result<(FromGuest, Reading)> {
        let cannot = |error: std::io::Error| FileFailure::io(format!("cannot read `{path}`: {error}"));
        let file = match self.resolve(root, path)? {
            ResolvedPath::Beneath(root, path) => root.read_file(path)?,
            ResolvedPath::Outputs => {
                self.outputs.open(path).ok_or_else(|| FileFailure::not_found(path))?.map_err(cannot)?
            }
        };
        let metadata = file.metadata().map_err(cannot)?;
        let size = metadata.len();
        if let Some(limit) = part.max_size.filter(|limit| size > *limit) {
            let message = format!("`{path}` has {size} bytes, the limit is {limit}");
            return Err(FileFailure { failure: GuestFailure::TooLarge, message });
        }
        let modified_ns = metadata.mtime().saturating_mul(1_000_000_000).saturating_add(metadata.mtime_nsec());
        let start = FromGuest::FileStart { size, modified_ns, inode: metadata.ino() };
        let left = part.length.min(size.saturating_sub(part.offset));
        Ok((start, Reading { file, offset: part.offset, left }))
    }

    /// Continues the operations and sends as much as fits into the host's buffer.
    pub(crate) fn advance(&mut self, host: &mut Host) {
        self.reading.retain(|&call, reading| {
            for _ in 0..CHUNKS_PER_TURN {
                if host.is_full() {
                    return true;
                }
                match reading.send_chunk(call, host) {
                    Ok(true) => {}
                    Ok(false) => return false,
                    Err(failure) => {
                        failure.send(call, host);
                        return false;
                    }
                }
            }
            true
        });
        if !host.is_full()
            && let Some(list) = self.listing.pop_front()
        {
            self.list_now(&list, host);
        }
    }

    // ---- searching

    /// Starts a search, which proceeds beside the loop.
    pub(crate) fn search(&mut self, call: u64, root: Root, path: &str, query: &SearchQuery, host: &mut Host) {
        let begun = self.resolve(root, path).and_then(|resolved| match resolved {
            ResolvedPath::Beneath(root, path) => self.searches.begin(call, root, path, query, Instant::now()),
            ResolvedPath::Outputs => Err(FileFailure::path("kept output cannot be searched".into())),
        });
        if let Err(failure) = begun {
            failure.send(call, host);
        }
    }

    // ---- listing

    /// Queues a listing. Only one is made per turn of the loop, because a large tree takes a good part of a second,
    /// during which no deadline is enforced.
    pub(crate) fn list(&mut self, list: List) {
        self.listing.push_back(list);
    }

    fn list_now(&self, list: &List, host: &mut Host) {
        let most = list.max_entries as usize;
        let listed = self.resolve(list.root, &list.path).and_then(|resolved| match (resolved, list.order) {
            (ResolvedPath::Beneath(root, path), ListOrder::Path) => Ok(root.list(path, most)?),
            (ResolvedPath::Beneath(root, path), ListOrder::Newest) => Ok(root.list_newest(path, most)?),
            (ResolvedPath::Beneath(root, path), ListOrder::Levels { depth }) => {
                Ok(root.list_levels(path, most, depth, LEFT_OUT)?)
            }
            (ResolvedPath::Outputs, order) => self.list_outputs(&list.path, most, order),
        });
        match listed {
            Ok(listing) => {
                let mut room = MAX_LISTING;
                let fits = |entry: &FileEntry| {
                    let needed = 6 * entry.path.len() + 128;
                    room = room.saturating_sub(needed);
                    room > 0
                };
                let entries = listing.entries.into_iter().map(entry).take_while(fits).collect();
                host.send(list.call, &FromGuest::Files { entries, total: listing.total });
            }
            Err(failure) => failure.send(list.call, host),
        }
    }

    fn list_outputs(&self, path: &str, most: usize, order: ListOrder) -> Result<beneath::Listing> {
        if !matches!(path, "" | ".") {
            return Err(FileFailure::not_found(path));
        }
        let mut entries = Vec::new();
        self.outputs.each(|name, file| {
            let (size, modified) = file.metadata().map_or((0, 0), |metadata| (metadata.len(), metadata.mtime()));
            entries.push(beneath::DirEntry {
                path: name.into(),
                kind: beneath::EntryKind::File,
                size,
                modified,
                below: None,
            });
        });
        match order {
            ListOrder::Path | ListOrder::Levels { .. } => entries.sort_by(|a, b| a.path.cmp(&b.path)),
            ListOrder::Newest => entries.reverse(),
        }
        let total = entries.len() as u64;
        entries.truncate(most);
        Ok(beneath::Listing { entries, total })
    }

    /// Resolves a path below its root. The path is relative to the root, or absolute and begins with it.
    fn resolve<'p>(&self, root: Root, path: &'p str) -> Result<ResolvedPath<'p>> {
        let dir = match root {
            Root::Workspace => &self.workspace,
            Root::Data => &self.data,
            Root::Tmp => &self.tmp,
            Root::Outputs => return Ok(ResolvedPath::Outputs),
        };
        let given = Path::new(path);
        let below = if given.is_absolute() {
            given
                .strip_prefix(dir)
                .map_err(|_| FileFailure::path(format!("`{path}` is not below `{}`", dir.display())))?
        } else {
            given
        };
        Ok(ResolvedPath::Beneath(beneath::Root::open(dir)?, below))
    }

    fn resolve_writable<'p>(&self, root: Root, path: &'p str) -> Result<(beneath::Root, &'p Path)> {
        match self.resolve(root, path)? {
            ResolvedPath::Beneath(root, path) => Ok((root, path)),
            ResolvedPath::Outputs => {
                Err(FileFailure::path(format!("`{path}` is kept output, which cannot be written")))
            }
        }
    }
}

/// Returns the lines of the first occurrences of `old`.
fn lines_of(text: &str, old: &str) -> Vec<u64> {
    let (mut line, mut seen) = (1, 0);
    let at = text.match_indices(old).take(MAX_EDIT_LINES).map(|(at, _)| {
        line += text[seen..at].matches('\n').count() as u64;
        seen = at;
        line
    });
    at.collect()
}

/// A resolved path.
enum ResolvedPath<'p> {
    Beneath(beneath::Root, &'p Path),
    /// Kept output, which is addressed by names instead of paths: it has no directory.
    Outputs,
}

impl Reading {
    /// Sends the next chunk. Returns whether there is more to send.
    fn send_chunk(&mut self, call: u64, host: &mut Host) -> Result<bool> {
        let wanted = self.left.min(CHUNK as u64);
        let mut chunk = vec![0; wanted as usize];
        self.file.read_exact_at(&mut chunk, self.offset).map_err(|error| match error.kind() {
            std::io::ErrorKind::UnexpectedEof => {
                FileFailure::io("the file became shorter while it was read".to_owned())
            }
            _ => FileFailure::io(format!("cannot read on: {error}")),
        })?;
        self.offset += wanted;
        self.left -= wanted;
        host.send_data(FrameKind::File, call, &chunk);
        if self.left == 0 {
            host.send(call, &FromGuest::Done);
        }
        Ok(self.left > 0)
    }
}

impl FileFailure {
    pub(crate) fn io(message: String) -> Self {
        Self { failure: GuestFailure::Io, message }
    }

    pub(crate) fn path(message: String) -> Self {
        Self { failure: GuestFailure::InvalidPath, message }
    }

    fn not_found(path: &str) -> Self {
        Self { failure: GuestFailure::NotFound, message: format!("`{path}` does not exist") }
    }

    pub(crate) fn send(self, call: u64, host: &mut Host) {
        host.send(call, &self.into());
    }
}

impl From<FileFailure> for FromGuest {
    fn from(failed: FileFailure) -> Self {
        Self::Failed { failure: failed.failure, message: failed.message }
    }
}

impl From<beneath::BeneathError> for FileFailure {
    fn from(error: beneath::BeneathError) -> Self {
        let failure = match &error {
            beneath::BeneathError::NotFound { .. } => GuestFailure::NotFound,
            beneath::BeneathError::InvalidPath { .. } => GuestFailure::InvalidPath,
            beneath::BeneathError::NoSpace { .. } => GuestFailure::NoSpace,
            beneath::BeneathError::DiskFull { .. } => GuestFailure::DiskFull,
            beneath::BeneathError::Damaged { .. } => GuestFailure::Io,
            // A mount that the operator made read-only, unless the sandbox's own volume has become so.
            beneath::BeneathError::ReadOnly { path } => match damaged(&[WORKSPACE, DATA])[..] {
                [] => GuestFailure::InvalidPath,
                _ => return beneath::BeneathError::Damaged { path: path.clone() }.into(),
            },
            beneath::BeneathError::Io { source, .. } => return Self::io(format!("{error}: {source}")),
        };
        Self { failure, message: error.to_string() }
    }
}

fn entry(entry: beneath::DirEntry) -> FileEntry {
    let kind = match entry.kind {
        beneath::EntryKind::File => FileKind::File,
        beneath::EntryKind::Directory => FileKind::Directory,
        beneath::EntryKind::Symlink => FileKind::Symlink,
        beneath::EntryKind::Other => FileKind::Other,
    };
    let beneath::DirEntry { path, size, modified, below, .. } = entry;
    FileEntry { path: path.to_string_lossy().into_owned(), size, kind, modified, below }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn of_many_listings_one_is_made_in_each_turn() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        let mut host = Host::default();
        host.connect(ours).unwrap();
        let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
        let config = GuestConfig { workspace: root.clone(), ..GuestConfig::default() };
        let mut files = FileOperations::new(&config, Outputs::new(root));
        let list = |call| List {
            call,
            root: Root::Workspace,
            path: "kernels".into(),
            max_entries: 10,
            order: ListOrder::Path,
        };
        (1..=3).for_each(|call| files.list(list(call)));
        for call in 1..=3 {
            assert!(files.is_busy());
            files.advance(&mut host);
            host.flush().unwrap();
            let mut bytes = vec![0; 64 << 10];
            let read = theirs.read(&mut bytes).unwrap();
            let mut decoder = proto::Decoder::default();
            decoder.push(&bytes[..read]);
            assert_eq!(decoder.next_frame().unwrap().map(|frame| frame.call), Some(call));
            assert_eq!(decoder.next_frame().unwrap(), None);
        }
        assert!(!files.is_busy());
    }
}
