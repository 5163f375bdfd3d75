//! Paths, encodings, listings, and the size of an answer that contains a file.

use base64::Engine as _;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
pub(crate) use engine::WORKSPACE;
use engine::op::{FileEntry, FileKind, FileListing};
use text::iso8601;

use crate::Block;
use crate::output::output;

/// Maximum length of file content in an answer. The content appears twice (as text and in the object), and base64 or
/// escapes make it longer.
pub(crate) const FILE_BUDGET: usize = 3 << 20;

/// Upper bound of the length of a listing row without its path: member names, indents, a size of twenty digits, a time.
const FILE_ROW: usize = 200;

/// Returns `text` as a path relative to `root`, or the reason why it is not below `root`. An absolute path below `root`
/// is accepted, because models write it and mean the same.
pub(crate) fn path_below(root: &str, text: &str) -> Result<String, String> {
    let below = match text.strip_prefix(root) {
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
        return Err(format!("path must be relative to {root}"));
    }
    if below.split('/').any(|part| part == "..") {
        return Err(format!("path cannot lead out of {root}"));
    }
    if below.len() > 4095 {
        return Err("path is too long".into());
    }
    Ok(below.to_owned())
}

/// The representation of bytes in an argument or an answer.
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

/// Returns half of an upper bound of the bytes that `text` takes in an answer, which contains it twice: as a JSON
/// string, and as a JSON string inside the JSON of a text block. A quote takes 2 and 4 bytes, a control character 6 and
/// 7.
pub(crate) fn written_length(text: &str) -> usize {
    text.bytes()
        .map(|byte| match byte {
            b'"' | b'\\' | b'\n' | b'\r' | b'\t' => 3,
            0..0x20 => 7,
            _ => 1,
        })
        .sum()
}

output! {
    /// Describes a file that was read, with its content or with the address to fetch it from.
    struct FileFacts {
        path: String,
        size: u64,
        encoding: Option<&'static str>,
        content: Option<String>,
        link: Option<String>,
    }

    struct Written { path: String, size: u64 }

    /// Lists the entries of a directory as far as they fit into an answer. `total` also counts those that do not fit.
    struct Listing { files: Vec<FileRow>, total: u64 }
    struct FileRow { path: String, size: u64, kind as "type": &'static str, modified: String }
}

impl FileFacts {
    /// Returns the content, or a link if the content is too large for an answer; `None` if there is no link either.
    pub fn new(
        path: &str,
        size: u64,
        encoding: &'static str,
        content: Option<String>,
        link: Option<&Block>,
    ) -> Option<Self> {
        let content = content.filter(|content| written_length(content) <= FILE_BUDGET);
        let link = if content.is_none() { Some(Block::address(link)?) } else { None };
        Some(Self { path: path.to_owned(), size, encoding: content.is_some().then_some(encoding), content, link })
    }
}

impl Listing {
    pub fn of(directory: &str, files: FileListing) -> Self {
        Self { files: rows(directory, files.entries), total: files.total }
    }
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
        kind: match entry.kind {
            FileKind::File => "file",
            FileKind::Directory => "directory",
            FileKind::Symlink => "symlink",
            FileKind::Other => "other",
        },
        modified: iso8601(entry.modified),
    };
    entries.into_iter().take_while(fits).map(row).collect()
}
