//! This module represents a changed text as a list of pieces: ranges of the source, and new text between them. The
//! changed text and its source map are both derived from this list.

use std::borrow::Cow;
use std::ops::Range;

use oxc_sourcemap::{SourceMap, Token};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Piece {
    Source(Range<usize>),
    New(String),
}

/// Replaces a range of the source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Edit {
    pub range: Range<usize>,
    pub text: String,
}

/// Appends the range of the source with `edits` applied. Edits at the same position are applied in the order in which
/// they were made.
pub(super) fn append(pieces: &mut Vec<Piece>, range: Range<usize>, mut edits: Vec<Edit>) {
    edits.sort_by_key(|edit| (edit.range.start, edit.range.end));
    let mut at = range.start;
    for edit in edits {
        pieces.push(Piece::Source(at..edit.range.start));
        pieces.push(Piece::New(edit.text));
        at = edit.range.end;
    }
    pieces.push(Piece::Source(at..range.end));
}

pub(super) fn text(pieces: &[Piece], source: &str) -> String {
    pieces
        .iter()
        .map(|piece| match piece {
            Piece::Source(range) => &source[range.clone()],
            Piece::New(text) => text,
        })
        .collect()
}

/// Position in a text. Line and column start at 0, and columns count UTF-16 units, as in source maps.
#[derive(Debug, Clone, Copy, Default)]
struct TextPosition {
    line: u32,
    column: u32,
}

impl TextPosition {
    fn pass(&mut self, c: char) {
        if c == '\n' {
            *self = Self { line: self.line + 1, column: 0 };
        } else {
            self.column += c.len_utf16() as u32;
        }
    }
}

/// Returns the source map from the changed text to `original`. `origin` converts a position in `source` to one in
/// `original`.
pub(super) fn map(
    pieces: &[Piece],
    source: &str,
    name: &str,
    original: &str,
    origin: impl Fn(u32, u32) -> Option<(u32, u32)>,
) -> String {
    let lines: Vec<usize> = std::iter::once(0).chain(source.match_indices('\n').map(|(at, _)| at + 1)).collect();
    let mut tokens = Vec::new();
    let mut here = TextPosition::default();
    for piece in pieces {
        match piece {
            Piece::New(text) => text.chars().for_each(|c| here.pass(c)),
            Piece::Source(range) => {
                let mut there = position_of(range.start, source, &lines);
                let mut word = false;
                for c in source[range.clone()].chars() {
                    // One token per word is enough, because a look-up finds the token at or before the requested
                    // position.
                    let in_word = c.is_alphanumeric() || c == '_' || c == '$';
                    if !(c.is_whitespace() || in_word && word)
                        && let Some((line, column)) = origin(there.line, there.column)
                    {
                        tokens.push(Token::new(here.line, here.column, line, column, Some(0), None));
                    }
                    word = in_word;
                    here.pass(c);
                    there.pass(c);
                }
            }
        }
    }
    let (sources, contents) = (vec![Cow::Borrowed(name)], vec![Some(Cow::Borrowed(original))]);
    SourceMap::new(None, Vec::new(), None, sources, contents, tokens.into(), None).to_json_string()
}

fn position_of(at: usize, source: &str, lines: &[usize]) -> TextPosition {
    let line = lines.partition_point(|&start| start <= at) - 1;
    let column = source[lines[line]..at].encode_utf16().count() as u32;
    TextPosition { line: line as u32, column }
}
