//! What ties lines together: each has the code of the one before (`prev`) and one of its own (`mac`), made with a key that does not
//! lie in the journal's directory. Who writes there without the key can neither change a line nor put another chain in its place.
//!
//! Lines of an older form have no `mac`; the next line has their hash.

use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use ring::hmac;
use serde::Deserialize;

use super::files::hash;
use crate::dialect::links::hex;
use crate::persistent_secret;

/// Beside the journal's directory, with its name.
pub fn key_path(dir: &Path) -> PathBuf {
    dir.with_extension("key")
}

/// Where the newest line is noted, in the same place.
pub fn head_path(dir: &Path) -> PathBuf {
    dir.with_extension("head")
}

#[derive(Clone)]
pub struct ChainKey(hmac::Key);

impl ChainKey {
    /// Made on first use.
    pub fn take(path: &Path) -> io::Result<Self> {
        persistent_secret::take(path).map(|secret| Self::new(&secret))
    }

    pub fn read(path: &Path) -> io::Result<Option<Self>> {
        Ok(persistent_secret::read(path)?.map(|secret| Self::new(&secret)))
    }

    pub fn new(secret: &[u8; 32]) -> Self {
        Self(hmac::Key::new(hmac::HMAC_SHA256, secret))
    }

    /// Ends a line, a JSON object without its `mac`, with the code of what stands before it; answers the code.
    pub fn close(&self, line: &mut Vec<u8>, begin: usize) -> String {
        let mac = hex(hmac::sign(&self.0, &line[begin..]).as_ref());
        line.pop_if(|last| *last == b'}');
        line.extend_from_slice(format!("{MAC}{mac}\"}}").as_bytes());
        mac
    }

    /// Whether the line is as it was written.
    pub fn fits(&self, line: &[u8], mac: &str) -> bool {
        let Some(body) = line.strip_suffix(format!("{MAC}{mac}\"}}").as_bytes()) else { return false };
        let body = [body, b"}"].concat();
        // A plain comparison is enough: who asks has the key.
        hex(hmac::sign(&self.0, &body).as_ref()) == mac
    }
}

const MAC: &str = ",\"mac\":\"";

/// What the chain needs of a line.
#[derive(Debug, Deserialize)]
pub struct ChainLink {
    pub seq: u64,
    pub prev: String,
    pub event: String,
    /// In a `torn`: bytes of the unfinished line before, and the code of the last whole one.
    pub count: Option<u64>,
    pub after: Option<String>,
    /// In an `expired`: the last line that was deleted for its age.
    pub through: Option<u64>,
    pub mac: Option<String>,
}

impl ChainLink {
    pub fn parse(line: &[u8]) -> Option<Self> {
        serde_json::from_slice(line).ok()
    }

    /// What the next line has for the one before.
    pub fn head(&self, line: &[u8]) -> Head {
        Head { seq: self.seq, hash: self.mac.clone().unwrap_or_else(|| hash(line)) }
    }
}

/// Where the chain stands: the number of the last line, and its code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    pub seq: u64,
    pub hash: String,
}

impl Head {
    /// The note of it, replaced as a whole.
    pub fn note(&self, path: &Path) -> io::Result<()> {
        let half = path.with_extension("head-new");
        let mut options = std::fs::OpenOptions::new();
        let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&half)?;
        io::Write::write_all(&mut file, format!("{} {}\n", self.seq, self.hash).as_bytes())?;
        file.sync_data()?;
        std::fs::rename(&half, path)
    }

    pub fn noted(path: &Path) -> io::Result<Option<Self>> {
        let text = match std::fs::read_to_string(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other?,
        };
        let parsed = text.trim_end().split_once(' ').and_then(|(seq, hash)| Some((seq.parse().ok()?, hash)));
        let (seq, hash) = parsed.ok_or_else(|| io::Error::other(format!("`{}` has no head in it", path.display())))?;
        Ok(Some(Self { seq, hash: hash.into() }))
    }
}
