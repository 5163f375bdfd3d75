//! A cell of JavaScript or TypeScript becomes what V8's REPL mode can hold.
//!
//! Two steps: TypeScript is stripped to JavaScript (`strip`), then a few places of the text are changed (`rewrite`):
//! imports become calls, exports vanish, `var` and `function` become redeclarable. Text, not tree: what is not touched stays
//! where it was, and the source map leads back. Pure; it runs in a child (`child`), because a parser of hostile input has no
//! place in PID 1.

mod child;
mod pieces;
mod rewrite;
mod strip;
#[cfg(test)]
mod tests;

pub use child::{MAX_ANSWER, TranspileReply, answer_from, request, serve};

use oxc::diagnostics::OxcDiagnostic;
use proto::Language;

/// A larger cell gets no source map: the map would be several times its size.
const MAX_MAPPED: usize = 1 << 20;

/// Asks whether an interpreter still answers. No cell of the user's: it stays as it is and is not counted.
pub const PROBE: &str = ";";

#[derive(Debug, Clone, Copy)]
pub struct SourceCell<'a> {
    pub language: Language,
    pub number: u64,
    pub code: &'a str,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    pub code: String,
    /// Leads back to the cell; absent if nothing was changed.
    pub map: Option<String>,
}

/// Why a cell cannot run, for its author.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TranspileError {
    /// What is wrong, in a few words.
    pub value: String,
    /// The same with the place.
    pub text: String,
}

pub fn transpile(cell: SourceCell<'_>) -> Result<Output, TranspileError> {
    match cell.language {
        Language::Javascript | Language::Typescript if cell.code == PROBE => Ok(cell.unchanged()),
        Language::Python => Ok(cell.unchanged()),
        Language::Javascript => {
            let pieces = rewrite::rewrite(cell.code).map_err(|found| cell.refusal(&found))?;
            Ok(cell.output(&pieces, cell.code, |line, column| Some((line, column))))
        }
        Language::Typescript => {
            let stripped = strip::strip(cell.code).map_err(|found| cell.refusal(&found))?;
            // Stripped code that does not parse is our fault; the place in it means nothing to the author.
            let pieces = rewrite::rewrite(&stripped.code).map_err(|found| TranspileError {
                value: found.message.clone(),
                text: format!("{}\nSyntaxError: {}\n", cell.name(), found.message),
            })?;
            Ok(cell.output(&pieces, &stripped.code, |line, column| stripped.origin(line, column)))
        }
    }
}

/// A fault and its place in the cell, in bytes.
#[derive(Debug)]
pub struct Fault {
    message: String,
    at: Option<usize>,
}

impl Fault {
    fn first_of<'d>(found: impl IntoIterator<Item = &'d OxcDiagnostic>) -> Option<Self> {
        let found = found.into_iter().next()?;
        let help = found.help.as_deref().map(|help| format!(" ({help})")).unwrap_or_default();
        // A second declaration is at fault, not the first, which is named first.
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
        let (line, column, shown) = place(self.code, at);
        let indent: String = shown.chars().take(column - 1).map(|c| if c == '\t' { '\t' } else { ' ' }).collect();
        let text = format!("{}:{line}:{column}\n{shown}\n{indent}^\n\nSyntaxError: {value}\n", self.name());
        TranspileError { value, text }
    }
}

/// Line and column (in characters, from 1) of a byte, and the line itself, cut if it is very long.
fn place(code: &str, at: usize) -> (usize, usize, &str) {
    const SHOWN: usize = 400;
    let at = code.floor_char_boundary(at.min(code.len()));
    let start = code[..at].rfind('\n').map_or(0, |newline| newline + 1);
    let end = code[at..].find('\n').map_or(code.len(), |newline| at + newline);
    let line = code[start..end].trim_end_matches('\r');
    let shown = &line[..line.floor_char_boundary(SHOWN)];
    (code[..start].matches('\n').count() + 1, code[start..at].chars().count() + 1, shown)
}
