//! Pure functions that write text in the same way everywhere: shortened text, plain text, hex digits, escapes of
//! addresses, times.
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

/// Decodes the percent escapes of an address. A `%` that begins no escape stays as it is. Returns `None` for bytes that are
/// not UTF-8.
pub fn percent_decoded(text: &str) -> Option<String> {
    let mut parts = text.split('%');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let digits = part.get(..2).filter(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit()));
        match digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                bytes.extend_from_slice(&part.as_bytes()[2..]);
            }
            None => {
                bytes.push(b'%');
                bytes.extend_from_slice(part.as_bytes());
            }
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_decoded_once_and_other_signs_stay() {
        for (text, decoded) in [
            ("", Some("")),
            ("a%20b", Some("a b")),
            ("%E6%8A%A5%zz%4", Some("报%zz%4")),
            ("%2541", Some("%41")),
            ("%", Some("%")),
            ("%+1%é", Some("%+1%é")),
            ("%ff", None),
        ] {
            assert_eq!(percent_decoded(text).as_deref(), decoded, "{text}");
        }
    }
}
