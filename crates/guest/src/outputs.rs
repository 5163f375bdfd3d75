//! This module keeps long outputs of cells and commands whole, so that they can be read later.
//!
//! The files have no name in the file system (`O_TMPFILE`). Only the guest holds their descriptors, and nothing in the
//! sandbox can look into the guest: code in the sandbox can neither read nor change nor replace kept output, and there
//! is no path that it could redirect. The files count against the sandbox's volume; if the volume is full, nothing is
//! kept.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use proto::{KeptOutput, MAX_KEPT, Stream};
use rustix::fs::{Mode, OFlags};

/// Number of bytes of one stream that stay in memory before a file is created for it.
const IN_MEMORY: usize = 16 << 10;
/// Maximum size of all kept outputs together. They are also limited to their file system's size divided by
/// `MOST_OF_VOLUME`.
const MOST_BYTES: u64 = 256 << 20;
const MOST_OF_VOLUME: u64 = 4;
/// Maximum number of kept outputs. Each holds a descriptor.
const MOST_FILES: usize = 64;
/// Time for which an output is kept.
const LIFE: Duration = Duration::from_secs(3600);

/// All kept outputs. Every stream has a handle to them.
#[derive(Debug, Clone)]
pub(crate) struct Outputs(Rc<RefCell<Shelf>>);

#[derive(Debug)]
struct Shelf {
    dir: PathBuf,
    most_bytes: u64,
    /// Kept outputs, oldest first.
    kept: VecDeque<KeptFile>,
    /// Total size of the kept outputs and of those that are being written.
    bytes: u64,
    next: u64,
}

#[derive(Debug)]
struct KeptFile {
    name: String,
    file: File,
    bytes: u64,
    until: Instant,
}

impl Outputs {
    pub(crate) fn new(dir: PathBuf) -> Self {
        Self(Rc::new(RefCell::new(Shelf { dir, most_bytes: MOST_BYTES, kept: VecDeque::new(), bytes: 0, next: 0 })))
    }

    pub(crate) fn draft(&self, over: u64) -> Draft {
        Draft { outputs: self.clone(), over, state: DraftState::InMemory(Vec::new()), bytes: 0 }
    }

    pub(crate) fn open(&self, name: &str) -> Option<std::io::Result<File>> {
        self.0.borrow().kept.iter().find(|kept| kept.name == name).map(|kept| kept.file.try_clone())
    }

    /// Calls `visit` with the name and the file of each kept output, oldest first.
    pub(crate) fn each(&self, mut visit: impl FnMut(&str, &File)) {
        self.0.borrow().kept.iter().for_each(|kept| visit(&kept.name, &kept.file));
    }

    pub(crate) fn wake_at(&self) -> Option<Instant> {
        self.0.borrow().kept.front().map(|oldest| oldest.until)
    }

    pub(crate) fn tick(&self, now: Instant) {
        let mut shelf = self.0.borrow_mut();
        while shelf.kept.front().is_some_and(|oldest| oldest.until <= now) {
            shelf.drop_oldest();
        }
    }
}

impl Shelf {
    fn create(&self) -> rustix::io::Result<File> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::EXCL | OFlags::CLOEXEC;
        rustix::fs::open(&self.dir, flags, Mode::from_raw_mode(0o600)).map(File::from)
    }

    fn most(&self) -> u64 {
        match rustix::fs::statvfs(&self.dir).map_or(0, |stat| stat.f_blocks.saturating_mul(stat.f_frsize)) {
            // The file system reports no size.
            0 => self.most_bytes,
            size => self.most_bytes.min(size / MOST_OF_VOLUME),
        }
    }

    fn drop_oldest(&mut self) -> bool {
        let oldest = self.kept.pop_front();
        self.bytes -= oldest.as_ref().map_or(0, |oldest| oldest.bytes);
        oldest.is_some()
    }

    /// Reserves room for `bytes` more bytes, dropping the oldest outputs if necessary. Returns `false` if they do not
    /// fit beside the outputs that are being written.
    fn claim(&mut self, bytes: u64) -> bool {
        let most = self.most();
        while self.bytes + bytes > most {
            if !self.drop_oldest() {
                return false;
            }
        }
        self.bytes += bytes;
        true
    }
}

/// A stream that becomes kept output if it is longer than `over`.
#[derive(Debug)]
pub(crate) struct Draft {
    outputs: Outputs,
    over: u64,
    state: DraftState,
    /// Number of bytes in the file.
    bytes: u64,
}

#[derive(Debug)]
enum DraftState {
    InMemory(Vec<u8>),
    Writing(File),
    /// The file is as large as it may be.
    Full(File),
    /// There is no file, because it could not be created or written.
    GivenUp,
}

impl Draft {
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        match &mut self.state {
            DraftState::InMemory(buffered) => {
                buffered.extend_from_slice(bytes);
                if buffered.len() > IN_MEMORY {
                    self.begin_file();
                }
            }
            DraftState::Writing(_) => self.write(bytes),
            DraftState::Full(_) | DraftState::GivenUp => {}
        }
    }

    /// Ends the stream after `total` bytes. Returns the kept output, if there is one.
    pub(crate) fn finish(mut self, stream: Stream, total: u64) -> Option<KeptOutput> {
        if total <= self.over {
            return None;
        }
        if matches!(self.state, DraftState::InMemory(_)) {
            self.begin_file();
        }
        let (DraftState::Writing(file) | DraftState::Full(file)) =
            std::mem::replace(&mut self.state, DraftState::GivenUp)
        else {
            return None;
        };
        // From here on the bytes belong to the shelf.
        let bytes = std::mem::take(&mut self.bytes);
        let mut shelf = self.outputs.0.borrow_mut();
        shelf.next += 1;
        let name = match stream {
            Stream::Stdout => format!("stdout-{}.txt", shelf.next),
            Stream::Stderr => format!("stderr-{}.txt", shelf.next),
        };
        if shelf.kept.len() >= MOST_FILES {
            shelf.drop_oldest();
        }
        shelf.kept.push_back(KeptFile { name: name.clone(), file, bytes, until: Instant::now() + LIFE });
        Some(KeptOutput { name, bytes })
    }

    fn begin_file(&mut self) {
        let created = self.outputs.0.borrow().create();
        let next = created.map_or(DraftState::GivenUp, DraftState::Writing);
        if let DraftState::InMemory(buffered) = std::mem::replace(&mut self.state, next) {
            self.write(&buffered);
        }
    }

    fn write(&mut self, bytes: &[u8]) {
        let DraftState::Writing(file) = &mut self.state else { return };
        let room = usize::try_from(MAX_KEPT - self.bytes).unwrap_or(usize::MAX);
        let fitting = &bytes[..room.min(bytes.len())];
        let claimed = self.outputs.0.borrow_mut().claim(fitting.len() as u64);
        if claimed {
            self.bytes += fitting.len() as u64;
            if file.write_all(fitting).is_err() {
                return self.give_up();
            }
        }
        if !claimed || fitting.len() < bytes.len() {
            let DraftState::Writing(file) = std::mem::replace(&mut self.state, DraftState::GivenUp) else { return };
            self.state = DraftState::Full(file);
        }
    }

    fn give_up(&mut self) {
        self.state = DraftState::GivenUp;
        self.outputs.0.borrow_mut().bytes -= std::mem::take(&mut self.bytes);
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        self.give_up();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outputs(most_bytes: u64) -> Outputs {
        let outputs = Outputs::new(std::env::temp_dir());
        outputs.0.borrow_mut().most_bytes = most_bytes;
        outputs
    }

    fn keep(outputs: &Outputs, bytes: usize) -> Option<KeptOutput> {
        let mut draft = outputs.draft(10);
        vec![b'x'; bytes].chunks(30_000).for_each(|chunk| draft.push(chunk));
        draft.finish(Stream::Stdout, bytes as u64)
    }

    fn state(outputs: &Outputs) -> (Vec<String>, u64) {
        let shelf = outputs.0.borrow();
        (shelf.kept.iter().map(|kept| kept.name.clone()).collect(), shelf.bytes)
    }

    #[test]
    fn the_oldest_make_room_for_the_newest() {
        let outputs = outputs(250_000);
        (0..3).for_each(|_| assert_eq!(keep(&outputs, 100_000).unwrap().bytes, 100_000));
        assert_eq!(state(&outputs), (vec!["stdout-2.txt".into(), "stdout-3.txt".into()], 200_000));
        for _ in 0..2 * MOST_FILES {
            keep(&outputs, 1000).unwrap();
        }
        let (names, bytes) = state(&outputs);
        assert_eq!((names.len(), bytes), (MOST_FILES, 1000 * MOST_FILES as u64));
    }

    #[test]
    fn what_is_being_written_counts_and_is_given_back() {
        let outputs = outputs(250_000);
        let mut first = outputs.draft(10);
        first.push(&vec![b'a'; 200_000]);
        let mut second = outputs.draft(10);
        second.push(&vec![b'b'; 40_000]);
        second.push(&vec![b'b'; 40_000]);
        assert_eq!(
            second.finish(Stream::Stderr, 80_000),
            Some(KeptOutput { name: "stderr-1.txt".into(), bytes: 40_000 })
        );
        assert_eq!(state(&outputs).1, 240_000);
        drop(first);
        assert_eq!(state(&outputs).1, 40_000);
        let mut short = outputs.draft(1_000_000);
        short.push(&vec![b'c'; 100_000]);
        assert_eq!((short.finish(Stream::Stdout, 100_000), state(&outputs).1), (None, 40_000));
    }

    #[test]
    fn little_is_held_in_memory() {
        let outputs = outputs(MOST_BYTES);
        let mut draft = outputs.draft(u64::MAX);
        for _ in 0..IN_MEMORY {
            draft.push(b"x");
        }
        assert!(matches!(&draft.state, DraftState::InMemory(buffered) if buffered.capacity() <= IN_MEMORY));
        draft.push(b"x");
        assert!(matches!(draft.state, DraftState::Writing(_)));
        assert_eq!(draft.bytes, IN_MEMORY as u64 + 1);
    }

    #[test]
    fn nothing_is_kept_for_ever() {
        let outputs = outputs(MOST_BYTES);
        keep(&outputs, 100).unwrap();
        let until = outputs.wake_at().unwrap();
        outputs.tick(until - Duration::from_millis(1));
        assert_eq!(state(&outputs), (vec!["stdout-1.txt".into()], 100));
        outputs.tick(until);
        assert_eq!((state(&outputs), outputs.wake_at()), ((Vec::new(), 0), None));
    }
}
