//! Pure functions that write text in the same way everywhere: shortened text, plain text, hex digits, times.
#![warn(unreachable_pub)]

use std::borrow::Cow;
use std::fmt::Write as _;

mod plain;
mod time;

pub use plain::{plain, unfinished};
pub use time::{iso8601, unix_now};

/// Shortens a value from a caller for use in a message.
pub fn shown(text: &str) -> Cow<'_, str> {
    const MOST: usize = 200;
    match text.char_indices().nth(MOST) {
        Some((cut, _)) => format!("{}… ({} characters)", &text[..cut], text.chars().count()).into(),
        None => text.into(),
    }
}

/// Returns at most the first `most` characters of a text, followed by `…` if there are more.
pub fn cut(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}

/// Returns the head and the tail of a text that is over budget, with a line between them that says how much is left
/// out.
pub fn clipped(text: &str, budget: usize) -> Cow<'_, str> {
    let total = text.chars().count();
    if total <= budget {
        return text.into();
    }
    let at = |n: usize| text.char_indices().nth(n).map_or(text.len(), |(i, _)| i);
    let (head, tail) = (&text[..at(budget / 2)], &text[at(total - budget / 2)..]);
    format!("{head}\n… {} characters left out …\n{tail}", total - budget / 2 * 2).into()
}

/// Writes bytes as lower-case hex digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut digits, byte| {
        let _ = write!(digits, "{byte:02x}");
        digits
    })
}
