//! Paths, encodings, listings, and the size of an answer that contains a file.

use base64::Engine as _;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
pub(crate) use engine::WORKSPACE;
use engine::op::{FileEntry, FileKind, FileListing};
use serde::Serialize;
use serde_json::{Value, json};
use text::iso8601;

use super::schema::{array, integer, object, object_with, string};
use crate::Block;

/// Maximum length of file content in an answer. The content appears twice (as text and in the object), and base64 or
/// escapes make it longer.
pub(crate) const FILE_BUDGET: usize = 3 << 20;

/// Upper bound of the length of a listing row without its path: member names, indents, a size of twenty digits, a time.
const FILE_ROW: usize = 200;

/// Returns `text` as a path relative to `home`, or the reason why it is not below `home`. An absolute path below `home`
/// is accepted, because models write it and mean the same.
pub(crate) fn path_below(home: &str, text: &str) -> Result<String, String> {
    let below = match text.strip_prefix(home) {
        Some("" | "/") => ".",
        Some(rest) => rest.strip_prefix('/').unwrap_or(text),
        None => text,
    };
    if below.is_empty() {
        return Err("path cannot be empty".into());
    }
    if below.contains('\0') {
        return Err("path cannot contain a NUL character".into());
    }
    if below.starts_with('/') {
        return Err(format!("path must be relative to {home}"));
    }
    if below.split('/').any(|part| part == "..") {
        return Err(format!("path cannot lead out of {home}"));
    }
    if below.len() > 4095 {
        return Err("path is too long".into());
    }
    Ok(below.to_owned())
}

/// How bytes are represented in an argument or an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Encoding {
    Utf8,
    Base64,
}

/// Base64 that may be padded or not, because models and libraries write both.
const LENIENT: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Decodes base64, which may be wrapped in lines.
pub(crate) fn decode(text: &str) -> Result<Vec<u8>, base64::DecodeError> {
    if text.bytes().any(|b| b.is_ascii_whitespace()) {
        return LENIENT.decode(text.bytes().filter(|b| !b.is_ascii_whitespace()).collect::<Vec<u8>>());
    }
    LENIENT.decode(text)
}

/// Returns half of an upper bound of the length as a JSON string inside a JSON string: a quote costs 2 and then 4, a
/// control character 6 and then 7.
pub(crate) fn written_length(text: &str) -> usize {
    text.bytes()
        .map(|byte| match byte {
            b'"' | b'\\' | b'\n' | b'\r' | b'\t' => 3,
            0..0x20 => 7,
            _ => 1,
        })
        .sum()
}

/// A file that was read, with its content or with the address to fetch it from.
#[derive(Serialize)]
pub(crate) struct FileFacts {
    pub path: String,
    pub size: u64,
    #[serde(flatten)]
    pub content: Content,
}

#[derive(Serialize)]
#[serde(untagged)]
pub(crate) enum Content {
    Here { encoding: &'static str, content: String },
    Elsewhere { link: String },
}

impl Content {
    /// Returns `None` if there is neither content nor a link. Content that is too large for an answer needs a link.
    pub fn new(encoding: &'static str, content: Option<String>, link: Option<&Block>) -> Option<Self> {
        match (content, link) {
            (Some(content), _) => Some(Self::Here { encoding, content }),
            (None, Some(Block::Link { uri, .. })) => Some(Self::Elsewhere { link: uri.clone() }),
            (None, _) => None,
        }
    }
}

pub(crate) fn file_schema() -> Value {
    let members = json!({
        "path": string(),
        "size": integer(),
        "encoding": string(),
        "content": string(),
        "link": string(),
    });
    object_with(members, &["encoding", "content", "link"])
}

#[derive(Serialize)]
pub(crate) struct Written {
    pub path: String,
    pub size: u64,
}

pub(crate) fn written_schema() -> Value {
    object(json!({ "path": string(), "size": integer() }))
}

/// The entries of a directory as far as they fit into an answer. `total` also counts those that do not fit.
#[derive(Serialize)]
pub(crate) struct Listing {
    files: Vec<FileRow>,
    total: u64,
}

impl Listing {
    pub fn of(directory: &str, files: FileListing) -> Self {
        Self { files: rows(directory, files.entries), total: files.total }
    }
}

pub(crate) fn listing_schema() -> Value {
    object(json!({ "files": array(row_schema()), "total": integer() }))
}

#[derive(Serialize)]
pub(crate) struct FileRow {
    pub path: String,
    pub size: u64,
    pub r#type: &'static str,
    pub modified: String,
}

pub(crate) fn row_schema() -> Value {
    object(json!({ "path": string(), "size": integer(), "type": string(), "modified": string() }))
}

/// Returns as many entries as fit into one answer. The guest names them relative to the requested directory; the rows
/// name them relative to the directory where all paths start, because the next call expects that.
pub(crate) fn rows(directory: &str, entries: Vec<FileEntry>) -> Vec<FileRow> {
    let prefix = match directory.trim_matches('/').trim_start_matches("./") {
        "" | "." => String::new(),
        below => format!("{}/", below.trim_end_matches('/')),
    };
    let mut left = FILE_BUDGET;
    let fits = |entry: &FileEntry| {
        let needed = written_length(&prefix) + written_length(&entry.path) + FILE_ROW;
        let fits = needed <= left;
        left = left.saturating_sub(needed);
        fits
    };
    let row = |entry: FileEntry| FileRow {
        path: format!("{prefix}{}", entry.path),
        size: entry.size,
        r#type: match entry.kind {
            FileKind::File => "file",
            FileKind::Directory => "directory",
            FileKind::Symlink => "symlink",
            FileKind::Other => "other",
        },
        modified: iso8601(entry.modified),
    };
    entries.into_iter().take_while(fits).map(row).collect()
}
