//! Splits bytes into lines within a limit. A line over the limit is never in memory as a whole, and it does not affect
//! the next line.

/// Maximum length of a line in bytes.
pub(super) const MAX_LINE: usize = 24 << 20;

/// Number of bytes that are stored of each end of a line over the limit, in order to find the id of its request.
const ENDS: usize = 4096;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum InputLine {
    Whole(Vec<u8>),
    TooLong { length: usize, head: Vec<u8>, tail: Vec<u8> },
}

#[derive(Debug)]
pub(super) struct LineSplitter {
    limit: usize,
    /// The line so far, or only its head once it is over the limit.
    buffer: Vec<u8>,
    /// Length and last bytes of a line over the limit.
    over: Option<(usize, Vec<u8>)>,
}

impl LineSplitter {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, buffer: Vec::new(), over: None }
    }

    /// Returns the lines that `bytes` complete.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Vec<InputLine> {
        let mut lines = Vec::new();
        let mut rest = bytes;
        while let Some(end) = rest.iter().position(|b| *b == b'\n') {
            self.extend(&rest[..end]);
            lines.extend(self.take());
            rest = &rest[end + 1..];
        }
        self.extend(rest);
        lines
    }

    /// Returns the line after the last newline, at the end of input.
    pub(super) fn finish(&mut self) -> Option<InputLine> {
        self.take()
    }

    fn extend(&mut self, bytes: &[u8]) {
        if self.over.is_none() {
            if self.buffer.len() + bytes.len() <= self.limit {
                self.buffer.extend_from_slice(bytes);
                return;
            }
            let length = self.buffer.len();
            let tail = self.buffer[length.saturating_sub(ENDS)..].to_vec();
            self.buffer.extend_from_slice(&bytes[..bytes.len().min(ENDS.saturating_sub(length))]);
            self.buffer.truncate(ENDS);
            self.buffer.shrink_to_fit();
            self.over = Some((length, tail));
        }
        if let Some((length, tail)) = &mut self.over {
            *length += bytes.len();
            tail.extend_from_slice(&bytes[bytes.len().saturating_sub(ENDS)..]);
            tail.drain(..tail.len().saturating_sub(ENDS));
        }
    }

    /// Returns the line unless it is blank. A `\r` before the newline is part of the line end.
    fn take(&mut self) -> Option<InputLine> {
        let mut buffer = std::mem::take(&mut self.buffer);
        if let Some((length, tail)) = self.over.take() {
            return Some(InputLine::TooLong { length, head: buffer, tail });
        }
        if buffer.last() == Some(&b'\r') {
            buffer.pop();
        }
        (!buffer.iter().all(u8::is_ascii_whitespace)).then_some(InputLine::Whole(buffer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(text: &str) -> InputLine {
        InputLine::Whole(text.as_bytes().to_vec())
    }

    #[test]
    fn lines_come_out_however_the_bytes_were_cut() {
        let bytes = b"one\r\n\n  \ntwo\nthree";
        for cut in 1..bytes.len() {
            let mut lines = LineSplitter::new(100);
            let mut seen: Vec<InputLine> = bytes.chunks(cut).flat_map(|chunk| lines.push(chunk)).collect();
            seen.extend(lines.finish());
            assert_eq!(seen, [whole("one"), whole("two"), whole("three")], "cut at {cut}");
        }
    }

    #[test]
    fn a_line_over_the_limit_is_counted_and_dropped_and_the_next_one_is_read() {
        for cut in [1, 3, 7, 1000] {
            let mut lines = LineSplitter::new(8);
            let bytes = b"12345678\n123456789\nnext\n";
            let seen: Vec<InputLine> = bytes.chunks(cut).flat_map(|chunk| lines.push(chunk)).collect();
            let long = InputLine::TooLong { length: 9, head: b"123456789".to_vec(), tail: b"123456789".to_vec() };
            assert_eq!(seen, [whole("12345678"), long, whole("next")], "cut at {cut}");
        }
    }

    #[test]
    fn of_a_hundred_megabytes_only_the_ends_are_kept() {
        let mut lines = LineSplitter::new(MAX_LINE);
        for _ in 0..100 {
            assert!(lines.push(&vec![b'x'; 1 << 20]).is_empty());
            assert!(lines.buffer.capacity() <= 2 * MAX_LINE);
        }
        assert!(lines.buffer.capacity() <= ENDS);
        let Some(InputLine::TooLong { length, head, tail }) = lines.push(b"y\n").pop() else { panic!("not too long") };
        assert_eq!((length, head.len(), tail.len(), tail.last()), ((100 << 20) + 1, ENDS, ENDS, Some(&b'y')));
    }
}
