//! This module turns a cell of JavaScript or TypeScript into code that V8's REPL mode accepts.
//!
//! First `strip` converts TypeScript to JavaScript, then `rewrite` changes a few places of the text: imports become
//! calls, exports are removed, and `var` and `function` become redeclarable. It edits text instead of a syntax tree, so
//! untouched code stays where it was, and the source map leads back to the cell. The conversion is pure. It runs in a
//! child process (`child`), because a parser of hostile input has no place in PID 1.

mod child;
mod pieces;
mod rewrite;
mod strip;
#[cfg(test)]
mod tests;

pub use child::serve;
pub(crate) use child::{TranspileReply, reply_from, request};

use oxc::diagnostics::OxcDiagnostic;
use proto::Language;

/// Maximum size of a cell that gets a source map. The map is several times as large as its cell.
const MAX_MAPPED: usize = 1 << 20;

/// Code that checks whether a kernel still responds. It is not a cell of the user, so it is neither changed nor
/// counted.
pub(crate) const PROBE: &str = ";";

#[derive(Debug, Clone, Copy)]
pub(crate) struct SourceCell<'a> {
    pub language: Language,
    pub number: u64,
    pub code: &'a str,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Output {
    pub code: String,
    /// Source map that leads back to the cell. It is absent if nothing was changed or the cell is too large.
    pub map: Option<String>,
}

/// Explains to the author of a cell why it cannot run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TranspileError {
    /// Short description of the error.
    pub value: String,
    /// Description of the error with its position.
    pub text: String,
}

pub(crate) fn transpile(cell: SourceCell<'_>) -> Result<Output, TranspileError> {
    match cell.language {
        Language::Javascript | Language::Typescript if cell.code == PROBE => Ok(cell.unchanged()),
        Language::Python => Ok(cell.unchanged()),
        Language::Javascript => {
            let pieces = rewrite::rewrite(cell.code).map_err(|found| cell.refusal(&found))?;
            Ok(cell.output(&pieces, cell.code, |line, column| Some((line, column))))
        }
        Language::Typescript => {
            let stripped = strip::strip(cell.code).map_err(|found| cell.refusal(&found))?;
            // If stripped code does not parse, the transpiler is at fault, and a position in that code means nothing to
            // the author.
            let pieces = rewrite::rewrite(&stripped.code).map_err(|found| TranspileError {
                value: found.message.clone(),
                text: format!("{}\nSyntaxError: {}\n", cell.name(), found.message),
            })?;
            Ok(cell.output(&pieces, &stripped.code, |line, column| stripped.origin(line, column)))
        }
    }
}

/// An error and its position in the cell, in bytes.
#[derive(Debug)]
struct Fault {
    message: String,
    at: Option<usize>,
}

impl Fault {
    fn first_of<'d>(found: impl IntoIterator<Item = &'d OxcDiagnostic>) -> Option<Self> {
        let found = found.into_iter().next()?;
        let help = found.help.as_deref().map(|help| format!(" ({help})")).unwrap_or_default();
        // Of two declarations, the second is at fault, but the diagnostic names the first one first.
        let twice = found.message.ends_with("has already been declared");
        let label = if twice { found.labels.last() } else { found.labels.first() };
        let at = label.map(|label| label.offset() as usize);
        Some(Self { message: format!("{}{help}", found.message), at })
    }
}

impl SourceCell<'_> {
    fn name(&self) -> String {
        let extension = if self.language == Language::Typescript { "ts" } else { "js" };
        format!("cell-{}.{extension}", self.number)
    }

    fn unchanged(&self) -> Output {
        Output { code: self.code.to_owned(), map: None }
    }

    fn output(
        &self,
        pieces: &[pieces::Piece],
        source: &str,
        origin: impl Fn(u32, u32) -> Option<(u32, u32)>,
    ) -> Output {
        let code = pieces::text(pieces, source);
        let changed = code != self.code;
        let map = (changed && self.code.len() <= MAX_MAPPED)
            .then(|| pieces::map(pieces, source, &self.name(), self.code, origin));
        Output { code, map }
    }

    fn refusal(&self, fault: &Fault) -> TranspileError {
        let value = fault.message.clone();
        let Some(at) = fault.at else {
            return TranspileError { text: format!("{}\nSyntaxError: {value}\n", self.name()), value };
        };
        let (line, column, shown) = position(self.code, at);
        let indent: String = shown.chars().take(column - 1).map(|c| if c == '\t' { '\t' } else { ' ' }).collect();
        let text = format!("{}:{line}:{column}\n{shown}\n{indent}^\n\nSyntaxError: {value}\n", self.name());
        TranspileError { value, text }
    }
}

/// Returns the line and column of a byte (in characters, starting at 1), and the text of the line, truncated if it is
/// very long.
fn position(code: &str, at: usize) -> (usize, usize, &str) {
    const SHOWN: usize = 400;
    let at = code.floor_char_boundary(at.min(code.len()));
    let start = code[..at].rfind('\n').map_or(0, |newline| newline + 1);
    let end = code[at..].find('\n').map_or(code.len(), |newline| at + newline);
    let line = code[start..end].trim_end_matches('\r');
    let shown = &line[..line.floor_char_boundary(SHOWN)];
    (code[..start].matches('\n').count() + 1, code[start..at].chars().count() + 1, shown)
}
