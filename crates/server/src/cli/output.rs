//! Writes to stdout and stderr. Errors are ignored, because they mean that the reader is gone.

use std::io::Write;

/// Writes a line of the command's result to stdout.
pub(crate) fn line(text: &str) {
    let mut stdout = std::io::stdout().lock();
    let _ = stdout.write_all(text.as_bytes()).and_then(|()| stdout.write_all(b"\n")).and_then(|()| stdout.flush());
}

/// Writes a line of additional information for the user to stderr.
pub(crate) fn error(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// Writes a text unchanged to one of the streams and flushes it.
pub(crate) fn raw(stderr: bool, text: &str) {
    let _ = if stderr {
        std::io::stderr().lock().write_all(text.as_bytes())
    } else {
        let mut stdout = std::io::stdout().lock();
        stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush())
    };
}

/// Formats rows as columns that are as wide as their widest cell; the last column is not padded.
pub(crate) fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let lines = rows.iter().map(|row| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    });
    lines.collect::<Vec<_>>().join("\n")
}
