//! Text as it is to be read, of output that was written for a terminal: without escape sequences, and with the last state
//! of a line that was written over.

use std::borrow::Cow;

const ESC: char = '\u{1b}';
const BEL: char = '\u{7}';
const BACKSPACE: char = '\u{8}';
/// Maximum length of a sequence at the end of a text whose end is still awaited.
const MAX_UNFINISHED: usize = 4096;

/// Returns the text without escape sequences. Of a line that was written over, as progress bars do, only the last state
/// is left; `\r\n` becomes `\n`. Other text is returned as it is.
pub fn plain(text: &str) -> Cow<'_, str> {
    if !text.contains([ESC, '\r', BACKSPACE, BEL]) {
        return text.into();
    }
    let mut screen = Screen { shown: String::with_capacity(text.len()), line: 0, at_start: false };
    let mut rest = text;
    while let Some(next) = rest.chars().next() {
        let length = match next {
            ESC => {
                let (length, sequence) = escape(rest).unwrap_or((rest.len(), Sequence::Other));
                screen.perform(sequence);
                length
            }
            _ => {
                screen.put(next);
                next.len_utf8()
            }
        };
        rest = &rest[length..];
    }
    screen.shown.into()
}

/// Returns the number of bytes at the end of a text that belong to an escape sequence whose end is not there. A reader of
/// a stream reads them again together with what follows.
pub fn unfinished(text: &str) -> usize {
    let mut open = 0;
    // The text before an unfinished sequence may end within one itself, as before the last of two `ESC`.
    loop {
        match open_sequence(&text[..text.len() - open]) {
            0 => return open,
            _ if open >= MAX_UNFINISHED => return open,
            more => open += more,
        }
    }
}

/// Returns the length of the unfinished sequence that begins last.
fn open_sequence(text: &str) -> usize {
    let from = text.len().saturating_sub(MAX_UNFINISHED);
    let tail = text.as_bytes()[from..].iter().rposition(|byte| *byte == ESC as u8).map(|at| &text[from + at..]);
    // A string may end with `ESC \`, of which only the first byte has arrived.
    let before = tail.filter(|tail| tail.len() == 1).and_then(|tail| {
        let head = &text[..text.len() - tail.len()];
        let at = head.as_bytes()[from.min(head.len())..].iter().rposition(|byte| *byte == ESC as u8)?;
        Some(&text[from + at..]).filter(|string| escape(string).is_none())
    });
    before.or(tail).filter(|tail| escape(tail).is_none()).map_or(0, str::len)
}

/// What a terminal would show.
struct Screen {
    shown: String,
    /// Where the last line begins.
    line: usize,
    /// True if the next character is written over the line, from its beginning.
    at_start: bool,
}

enum Sequence {
    /// Goes back to the beginning of the line.
    Return,
    /// Erases the line from the cursor to the end.
    EraseRight,
    EraseLine,
    Other,
}

impl Screen {
    fn put(&mut self, next: char) {
        match next {
            '\r' => self.at_start = true,
            '\n' => {
                self.shown.push('\n');
                (self.line, self.at_start) = (self.shown.len(), false);
            }
            BACKSPACE if self.shown.len() > self.line && !self.at_start => drop(self.shown.pop()),
            BACKSPACE | BEL => {}
            other => {
                if std::mem::take(&mut self.at_start) {
                    self.shown.truncate(self.line);
                }
                self.shown.push(other);
            }
        }
    }

    fn perform(&mut self, sequence: Sequence) {
        match sequence {
            Sequence::Return => self.at_start = true,
            Sequence::EraseRight if !self.at_start => {}
            Sequence::EraseRight | Sequence::EraseLine => self.shown.truncate(self.line),
            Sequence::Other => {}
        }
    }
}

/// Returns the length and the meaning of the escape sequence at the beginning of `text`, or `None` if its end is not
/// there. Of what is no sequence, only the beginning counts, so that it hides no text.
fn escape(text: &str) -> Option<(usize, Sequence)> {
    let bytes = text.as_bytes();
    match bytes.get(1)? {
        b'[' => {
            let inner = bytes[2..].iter().take_while(|byte| matches!(byte, b' '..=b'?')).count();
            let end = *bytes.get(2 + inner)?;
            if !matches!(end, b'@'..=b'~') {
                return Some((2 + inner, Sequence::Other));
            }
            let sequence = match (end, &text[2..2 + inner]) {
                (b'G', "" | "0" | "1") => Sequence::Return,
                (b'K', "" | "0") => Sequence::EraseRight,
                (b'K', "2") => Sequence::EraseLine,
                _ => Sequence::Other,
            };
            Some((2 + inner + 1, sequence))
        }
        // A string: a title, a link, a picture. It ends with `ESC \` or BEL and has no other control character.
        b']' | b'P' | b'X' | b'^' | b'_' => {
            let inner = bytes[2..].iter().take_while(|byte| !byte.is_ascii_control()).count();
            let length = match bytes[2 + inner..] {
                [b'\x07', ..] => Some(2 + inner + 1),
                [b'\x1b', b'\\', ..] => Some(2 + inner + 2),
                [] | [b'\x1b'] if bytes.len() <= MAX_UNFINISHED => None,
                _ => Some(2),
            };
            length.map(|length| (length, Sequence::Other))
        }
        b' '..=b'/' => {
            let inner = bytes[1..].iter().take_while(|byte| matches!(byte, b' '..=b'/')).count();
            let is_end = matches!(bytes.get(1 + inner)?, b'0'..=b'~');
            Some((1 + inner + usize::from(is_end), Sequence::Other))
        }
        b'0'..=b'~' => Some((2, Sequence::Other)),
        _ => Some((1, Sequence::Other)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_a_terminal_overwrites_is_left_out() {
        for (written, read) in [
            ("a\nb\n", "a\nb\n"),
            ("a\r\nb\r\n", "a\nb\n"),
            ("10%\r20%\r100%\ndone\n", "100%\ndone\n"),
            ("\r10%\r20%", "20%"),
            ("20%\r", "20%"),
            ("loading…\r\u{1b}[Kdone\n", "done\n"),
            ("loading…\r\u{1b}[K\n", "\n"),
            ("loading\u{1b}[2K\rx", "x"),
            ("⠙\u{1b}[1G\u{1b}[0K⠹\u{1b}[1G\u{1b}[0Kadded 3 packages\n", "added 3 packages\n"),
            ("kept\u{1b}[K\n", "kept\n"),
            ("N\u{8}NA\u{8}A _\u{8}b\n", "NA b\n"),
            ("\u{8}\u{8}a\n\u{8}b", "a\nb"),
            ("bell\u{7}", "bell"),
        ] {
            assert_eq!(plain(written), read, "{written:?}");
        }
    }

    #[test]
    fn escape_sequences_of_every_kind_are_left_out() {
        for (written, read) in [
            ("\u{1b}[1;31mred\u{1b}[0m", "red"),
            ("\u{1b}[38;2;1;2;3mrgb\u{1b}[?25l\u{1b}[2J", "rgb"),
            ("\u{1b}]0;title\u{7}a", "a"),
            ("\u{1b}]8;;http://a/\u{1b}\\link\u{1b}]8;;\u{1b}\\", "link"),
            ("\u{1b}Pq#0\u{1b}\\a\u{1b}(Bb\u{1b}7c\u{1b}=d", "abcd"),
            // What is no sequence hides nothing but its beginning.
            ("\u{1b}]no end\nnext line", "no end\nnext line"),
            ("\u{1b}[12\nnext", "\nnext"),
            ("\u{1b}éa\u{1b}\u{1b}[mb", "éab"),
            // Cut at the end of the text.
            ("a\u{1b}", "a"),
            ("a\u{1b}[3", "a"),
            ("a\u{1b}]8;;http", "a"),
        ] {
            assert_eq!(plain(written), read, "{written:?}");
        }
        let long = format!("\u{1b}]{}", "x".repeat(2 * MAX_UNFINISHED));
        assert_eq!(plain(&long), &long[2..]);
    }

    #[test]
    fn text_without_any_of_that_is_not_copied() {
        assert!(matches!(plain("tabs\t, ünïcode\u{0} and \\r stay\n"), Cow::Borrowed(_)));
    }

    /// A flood of openings, each of which could be scanned to the end of the text.
    #[test]
    fn it_takes_a_time_that_is_linear_in_the_text() {
        for piece in ["\u{1b}]", "\u{1b}[", "\u{1b}P0", "x\r", "\u{1b}]x\u{1b}[1", "x\u{8}"] {
            let begun = std::time::Instant::now();
            assert!(plain(&piece.repeat(2 << 20)).len() <= 8 << 20);
            assert!(begun.elapsed() < std::time::Duration::from_secs(60), "{piece:?}");
        }
    }

    fn pieces() -> impl Strategy<Value = String> {
        let piece = prop_oneof![
            Just("\u{1b}"),
            Just("["),
            Just("]"),
            Just("\\"),
            Just("\u{7}"),
            Just("31"),
            Just("m"),
            Just("K"),
            Just("\r"),
            Just("\n"),
            Just("\u{8}"),
            Just("a"),
            Just("é"),
            Just("("),
            Just("G"),
            Just(";"),
        ];
        proptest::collection::vec(piece, 0..24).prop_map(|pieces| pieces.concat())
    }

    #[test]
    fn an_escape_before_an_unfinished_one_may_end_a_string() {
        let text = "\u{1b}][\u{1b}\u{1b}";
        assert_eq!((plain(text).as_ref(), unfinished(text)), ("[", text.len()));
        assert!(unfinished(&"\u{1b}".repeat(1 << 20)) <= MAX_UNFINISHED);
    }

    proptest! {
        #[test]
        fn no_escape_and_no_return_is_left(text in pieces()) {
            let shown = plain(&text);
            prop_assert!(!shown.contains([ESC, '\r', BEL, BACKSPACE]), "{:?}", shown);
            prop_assert_eq!(plain(&shown), &*shown);
        }

        /// A reader who stops before an unfinished sequence sees the same colours removed, wherever the stream is cut.
        #[test]
        fn a_cut_stream_without_overwriting_reads_as_the_whole(text in pieces(), at in 0_usize..64) {
            let text = text.replace(['\r', 'K', 'G', '\u{8}'], "");
            let at = (0..=at.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
            let read = at - unfinished(&text[..at]);
            let joined = format!("{}{}", plain(&text[..read]), plain(&text[read..]));
            prop_assert_eq!(&joined, &*plain(&text));
        }
    }
}
