//! The chain of journal lines: each line has the code of the line before (`prev`) and its own code (`mac`), made with a
//! key that is stored outside of the journal's directory. An attacker who can write to the directory but lacks the key
//! can neither change a line nor replace the chain.
//!
//! Lines of an older form have no `mac`; the line after such a line has its hash.

use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use ring::hmac;
use serde::Deserialize;
use text::hex;

use super::files::hash;
use crate::persistent_secret;

/// Returns the path of the key, which lies beside the journal's directory and is named after it.
pub fn key_path(dir: &Path) -> PathBuf {
    dir.with_extension("key")
}

/// Returns the path of the note of the newest line, which lies beside the key.
pub(super) fn head_path(dir: &Path) -> PathBuf {
    dir.with_extension("head")
}

#[derive(Clone)]
pub(super) struct ChainKey(hmac::Key);

impl ChainKey {
    /// Reads the key. On first use, this creates it.
    pub(super) fn take(path: &Path) -> io::Result<Self> {
        persistent_secret::take(path).map(|secret| Self::new(&secret))
    }

    pub(super) fn read(path: &Path) -> io::Result<Option<Self>> {
        Ok(persistent_secret::read(path)?.map(|secret| Self::new(&secret)))
    }

    pub(super) fn new(secret: &[u8; 32]) -> Self {
        Self(hmac::Key::new(hmac::HMAC_SHA256, secret))
    }

    /// Adds the code of its content to the line that begins at `begin`, a JSON object without `mac`. Returns the code.
    pub(super) fn close(&self, line: &mut Vec<u8>, begin: usize) -> String {
        let mac = hex(hmac::sign(&self.0, &line[begin..]).as_ref());
        line.pop_if(|last| *last == b'}');
        line.extend_from_slice(format!("{MAC}{mac}\"}}").as_bytes());
        mac
    }

    /// Returns whether a line is as a server with this key wrote it.
    pub(super) fn fits(&self, line: &[u8], mac: &str) -> bool {
        let Some(body) = line.strip_suffix(format!("{MAC}{mac}\"}}").as_bytes()) else { return false };
        let body = [body, b"}"].concat();
        // A comparison in constant time is not needed, because the caller has the key.
        hex(hmac::sign(&self.0, &body).as_ref()) == mac
    }
}

const MAC: &str = ",\"mac\":\"";

/// The members of a line that the chain needs.
#[derive(Debug, Deserialize)]
pub(super) struct ChainLink {
    #[serde(default)]
    pub time: String,
    pub seq: u64,
    pub prev: String,
    pub event: String,
    /// In a `torn` entry, `count` is the number of bytes of the unfinished line before, and `after` is the code of the
    /// last whole line.
    pub count: Option<u64>,
    pub after: Option<String>,
    /// In an `expired` entry, the number of the last line that was deleted because of its age.
    pub through: Option<u64>,
    pub mac: Option<String>,
}

impl ChainLink {
    pub(super) fn parse(line: &[u8]) -> Option<Self> {
        serde_json::from_slice(line).ok()
    }

    /// Returns the head after this line, which the next line refers to.
    pub(super) fn head(&self, line: &[u8]) -> Head {
        Head { seq: self.seq, hash: self.mac.clone().unwrap_or_else(|| hash(line)) }
    }
}

/// The end of the chain: the number of the last line, and its code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Head {
    pub seq: u64,
    pub hash: String,
}

impl Head {
    /// Writes the note of the head and replaces the old one atomically.
    pub(super) fn write_note(&self, path: &Path) -> io::Result<()> {
        let temporary = path.with_extension("head-new");
        let mut options = std::fs::OpenOptions::new();
        let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
        io::Write::write_all(&mut file, format!("{} {}\n", self.seq, self.hash).as_bytes())?;
        file.sync_data()?;
        std::fs::rename(&temporary, path)
    }

    /// Reads the note of the head. Returns `None` if there is no note.
    pub(super) fn read_note(path: &Path) -> io::Result<Option<Self>> {
        let text = match std::fs::read_to_string(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other?,
        };
        let parsed = text.trim_end().split_once(' ').and_then(|(seq, hash)| Some((seq.parse().ok()?, hash)));
        let (seq, hash) = parsed.ok_or_else(|| io::Error::other(format!("`{}` has no head in it", path.display())))?;
        Ok(Some(Self { seq, hash: hash.into() }))
    }
}
