//! Escapes untrusted text in a log line, which must not end the line, colour it or reverse it.

use std::fmt::{self, Write};

/// Writer that passes on harmless characters and escapes the others as in a Rust literal.
pub(super) struct Escaped<W>(pub W);

impl<W: Write> Write for Escaped<W> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let mut rest = text;
        while let Some((at, c)) = rest.char_indices().find(|(_, c)| is_harmful(*c)) {
            self.0.write_str(&rest[..at])?;
            write!(self.0, "{}", c.escape_default())?;
            rest = &rest[at + c.len_utf8()..];
        }
        self.0.write_str(rest)
    }
}

/// Returns whether a character is a control character (including ESC and the one-byte CSI), another line end, or one
/// that reorders text.
fn is_harmful(c: char) -> bool {
    c.is_control() || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

pub fn escaped(text: &str) -> String {
    let mut out = Escaped(String::with_capacity(text.len()));
    let _ = out.write_str(text); // writing to a String cannot fail
    out.0
}

#[cfg(test)]
mod tests {
    use super::escaped;

    #[test]
    fn plain_text_of_any_script_stays_and_the_rest_is_spelt_out() {
        assert_eq!(escaped("plain, 就绪 ✓ é \"q\" \\"), "plain, 就绪 ✓ é \"q\" \\");
        assert_eq!(escaped("a\r\nb\tc\x1b[0m\0\u{202e}"), "a\\r\\nb\\tc\\u{1b}[0m\\u{0}\\u{202e}");
    }
}
