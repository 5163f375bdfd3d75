//! Files of the sandbox, for the host: written, read and listed beneath one directory, never out of it.
//!
//! Big files move in pieces between the other work of the loop. Knows no kernels.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use jail::beneath::{self, NewFile, Root};
use proto::{Failure, FileEntry, FileKind, FromGuest, Kind};

use crate::host::{Broken, Host};

const CHUNK: usize = 64 << 10;
/// Per file and turn of the loop.
const CHUNKS_PER_TURN: usize = 4;
/// A listing must fit into one message, each character escaped.
const MAX_LISTING: usize = 15 << 20;

pub struct Files {
    root: PathBuf,
    reading: BTreeMap<u64, Reading>,
    writing: BTreeMap<u64, Writing>,
    /// Listings not yet begun: calls, paths, entries wanted.
    listing: VecDeque<(u64, String, u32)>,
}

struct Reading {
    file: File,
    left: u64,
}

struct Writing {
    file: NewFile,
    size: u64,
    left: u64,
}

/// An operation that cannot be done, as the host is told.
struct Refused {
    failure: Failure,
    message: String,
}

type Result<T> = std::result::Result<T, Refused>;

impl Files {
    pub fn new(root: PathBuf) -> Self {
        Self { root, reading: BTreeMap::new(), writing: BTreeMap::new(), listing: VecDeque::new() }
    }

    /// Whether there is something to send.
    pub fn is_busy(&self) -> bool {
        !self.reading.is_empty() || !self.listing.is_empty()
    }

    /// The host is gone: nothing is left half written.
    pub fn forget(&mut self) {
        self.reading.clear();
        self.writing.clear();
        self.listing.clear();
    }

    // ---- writing

    pub fn write(&mut self, call: u64, path: &str, size: u64, host: &mut Host) {
        let begun = self.resolve(path).and_then(|(root, path)| Ok(root.create_file(path)?));
        match begun {
            Ok(file) => {
                self.writing.insert(call, Writing { file, size, left: size });
                self.commit_if_whole(call, host);
            }
            Err(refused) => refused.tell(call, host),
        }
    }

    /// Bytes for a file. After a failure the rest of its bytes come to nothing.
    pub fn receive(&mut self, call: u64, bytes: &[u8], host: &mut Host) -> std::result::Result<(), Broken> {
        let Some(writing) = self.writing.get_mut(&call) else { return Ok(()) };
        writing.left = writing.left.checked_sub(bytes.len() as u64).ok_or(Broken)?;
        if let Err(error) = writing.file.write_all(bytes) {
            let refused = Refused::from(writing.file.explain(&error));
            self.writing.remove(&call);
            refused.tell(call, host);
            return Ok(());
        }
        self.commit_if_whole(call, host);
        Ok(())
    }

    fn commit_if_whole(&mut self, call: u64, host: &mut Host) {
        if self.writing.get(&call).is_none_or(|writing| writing.left > 0) {
            return;
        }
        let Some(writing) = self.writing.remove(&call) else { return };
        match writing.file.commit() {
            Ok(()) => host.send(call, &FromGuest::Written { size: writing.size }),
            Err(error) => Refused::from(error).tell(call, host),
        }
    }

    // ---- reading

    pub fn read(&mut self, call: u64, path: &str, max_bytes: u64, host: &mut Host) {
        match self.begin_read(path, max_bytes) {
            Ok(reading) => {
                host.send(call, &FromGuest::FileStart { size: reading.left, modified_ns: 0, inode: 0 });
                self.reading.insert(call, reading);
            }
            Err(refused) => refused.tell(call, host),
        }
    }

    fn begin_read(&self, path: &str, max_bytes: u64) -> Result<Reading> {
        let (root, relative) = self.resolve(path)?;
        let file = root.read_file(relative)?;
        let size = file.metadata().map_err(|error| Refused::io(format!("cannot read `{path}`: {error}")))?.len();
        if size > max_bytes {
            let message = format!("`{path}` has {size} bytes, the limit is {max_bytes}");
            return Err(Refused { failure: Failure::TooLarge, message });
        }
        Ok(Reading { file, left: size })
    }

    /// Sends on what fits.
    pub fn advance(&mut self, host: &mut Host) {
        self.reading.retain(|&call, reading| {
            for _ in 0..CHUNKS_PER_TURN {
                if host.is_full() {
                    return true;
                }
                match reading.send_chunk(call, host) {
                    Ok(true) => {}
                    Ok(false) => return false,
                    Err(refused) => {
                        refused.tell(call, host);
                        return false;
                    }
                }
            }
            true
        });
        if !host.is_full()
            && let Some((call, path, max_entries)) = self.listing.pop_front()
        {
            self.list_now(call, &path, max_entries, host);
        }
    }

    // ---- listing

    /// One a turn of the loop: a large tree takes a good part of a second, in which no deadline is kept.
    pub fn list(&mut self, call: u64, path: String, max_entries: u32) {
        self.listing.push_back((call, path, max_entries));
    }

    fn list_now(&self, call: u64, path: &str, max_entries: u32, host: &mut Host) {
        let listed = self.resolve(path).and_then(|(root, path)| Ok(root.list(path, max_entries as usize)?));
        match listed {
            Ok(listing) => {
                let mut room = MAX_LISTING;
                let fits = |entry: &FileEntry| {
                    let needed = 6 * entry.path.len() + 128;
                    room = room.saturating_sub(needed);
                    room > 0
                };
                let entries = listing.entries.into_iter().map(entry).take_while(fits).collect();
                host.send(call, &FromGuest::Files { entries, total: listing.total });
            }
            Err(refused) => refused.tell(call, host),
        }
    }

    /// The path below the root: given so, or absolute with the root before it.
    fn resolve<'p>(&self, path: &'p str) -> Result<(Root, &'p Path)> {
        let given = Path::new(path);
        let below = if given.is_absolute() {
            given.strip_prefix(&self.root).map_err(|_| Refused {
                failure: Failure::InvalidPath,
                message: format!("`{path}` is not below `{}`", self.root.display()),
            })?
        } else {
            given
        };
        Ok((Root::open(&self.root)?, below))
    }
}

impl Reading {
    /// Whether there is more.
    fn send_chunk(&mut self, call: u64, host: &mut Host) -> Result<bool> {
        let mut chunk = Vec::new();
        let wanted = self.left.min(CHUNK as u64);
        let read = (&mut self.file).take(wanted).read_to_end(&mut chunk);
        read.map_err(|error| Refused::io(format!("cannot read on: {error}")))?;
        if (chunk.len() as u64) < wanted {
            return Err(Refused::io("the file became shorter while it was read".to_owned()));
        }
        self.left -= wanted;
        host.send_data(Kind::File, call, &chunk);
        if self.left == 0 {
            host.send(call, &FromGuest::Done);
        }
        Ok(self.left > 0)
    }
}

impl Refused {
    fn io(message: String) -> Self {
        Self { failure: Failure::Io, message }
    }

    fn tell(self, call: u64, host: &mut Host) {
        host.send(call, &FromGuest::Failed { failure: self.failure, message: self.message });
    }
}

impl From<beneath::Error> for Refused {
    fn from(error: beneath::Error) -> Self {
        let failure = match &error {
            beneath::Error::NotFound { .. } => Failure::NotFound,
            beneath::Error::InvalidPath { .. } => Failure::InvalidPath,
            beneath::Error::NoSpace { .. } => Failure::NoSpace,
            beneath::Error::Io { source, .. } => return Self::io(format!("{error}: {source}")),
        };
        Self { failure, message: error.to_string() }
    }
}

fn entry(entry: beneath::Entry) -> FileEntry {
    let kind = match entry.kind {
        beneath::Kind::File => FileKind::File,
        beneath::Kind::Directory => FileKind::Directory,
        beneath::Kind::Symlink => FileKind::Symlink,
        beneath::Kind::Other => FileKind::Other,
    };
    FileEntry { path: entry.path.to_string_lossy().into_owned(), size: entry.size, kind, modified: entry.modified }
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
        let mut files = Files::new(env!("CARGO_MANIFEST_DIR").into());
        (1..=3).for_each(|call| files.list(call, "kernels".into(), 10));
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
