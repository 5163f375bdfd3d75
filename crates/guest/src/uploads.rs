//! This module copies files that the browser is to upload to where it may read them, and removes them again.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use jail::beneath::{NewFile, Root};
use proto::GuestFailure;

use crate::files::FileFailure;

/// Number of calls whose files are retained. A form may be sent long after its file was chosen.
const MAX_RETAINED: usize = 8;
/// Maximum size of all files of one call together.
const MAX_BYTES: u64 = 256 << 20;
const CHUNK: usize = 64 << 10;
const CHUNKS_PER_TURN: usize = 16;

/// Manages the files that are given to the browser: copies them to where the browser may read them, and removes them.
pub(crate) struct Uploads {
    from: PathBuf,
    to: PathBuf,
    next: u64,
    retained: VecDeque<Directory>,
}

/// Directory with the files of one call. The files are removed when this value is dropped.
pub(crate) struct Directory {
    path: PathBuf,
    names: Vec<String>,
}

/// A copy of files that proceeds in chunks.
pub(crate) struct Copy {
    pub names: Vec<String>,
    root: Root,
    /// Files whose copy has not begun.
    ahead: VecDeque<(File, PathBuf)>,
    current: Option<(File, NewFile)>,
    left: u64,
    /// Destination of the files. This field is dropped last, when no half-written file is left in the directory.
    pub directory: Directory,
}

impl Uploads {
    pub(crate) fn new(from: PathBuf, to: PathBuf) -> Self {
        Self { from, to, next: 0, retained: VecDeque::new() }
    }

    /// Opens all files that have to be copied. Returns `None` if there are none.
    pub(crate) fn begin(&mut self, files: &[String]) -> Result<Option<Copy>, FileFailure> {
        if files.is_empty() {
            return Ok(None);
        }
        self.next += 1;
        let directory = PathBuf::from(self.next.to_string());
        let from = Root::open(&self.from)?;
        let mut copy = Copy {
            directory: Directory { path: self.to.join(&directory), names: Vec::new() },
            names: Vec::new(),
            root: Root::open(&self.to)?,
            ahead: VecDeque::new(),
            current: None,
            left: MAX_BYTES,
        };
        for file in files {
            let path = Path::new(file);
            let below = path.strip_prefix(&self.from).unwrap_or(path);
            let name = below.file_name().and_then(|name| name.to_str());
            let name = name.ok_or_else(|| FileFailure::path(format!("`{file}` is not a file's path")))?;
            if copy.names.iter().any(|one| one == name) {
                return Err(FileFailure::path(format!("two of the files are named `{name}`")));
            }
            copy.names.push(name.to_owned());
            copy.ahead.push_back((from.read_file(below)?, directory.join(name)));
        }
        copy.directory.names.clone_from(&copy.names);
        Ok(Some(copy))
    }

    /// Retains the files of a call for a while and returns the path of their directory.
    pub(crate) fn keep(&mut self, directory: Directory) -> String {
        let path = directory.path.display().to_string();
        self.retained.push_back(directory);
        if self.retained.len() > MAX_RETAINED {
            self.retained.pop_front();
        }
        path
    }

    /// Removes the files of all calls because the browser that used them is gone.
    pub(crate) fn forget(&mut self) {
        self.retained.clear();
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        // Remove only what the guest wrote, because anything may have been put beside it.
        for name in &self.names {
            let _ = std::fs::remove_file(self.path.join(name));
        }
        let _ = std::fs::remove_dir(&self.path);
    }
}

impl Copy {
    /// Copies the next chunks. Returns whether all files are complete.
    pub(crate) fn advance(&mut self) -> Result<bool, FileFailure> {
        let mut chunk = vec![0; CHUNK];
        for _ in 0..CHUNKS_PER_TURN {
            if self.current.is_none() {
                let Some((from, to)) = self.ahead.pop_front() else { return Ok(true) };
                self.current = Some((from, self.root.create_file(to)?));
            }
            let Some((from, to)) = &mut self.current else { return Ok(true) };
            let read =
                from.read(&mut chunk).map_err(|error| FileFailure::io(format!("cannot read a file: {error}")))?;
            self.left = self.left.checked_sub(read as u64).ok_or_else(|| FileFailure {
                failure: GuestFailure::TooLarge,
                message: format!("more than {MAX_BYTES} bytes cannot be uploaded at once"),
            })?;
            to.write_all(&chunk[..read]).map_err(|error| to.explain(&error))?;
            if read == 0
                && let Some((_, to)) = self.current.take()
            {
                to.commit()?;
            }
        }
        Ok(false)
    }
}
