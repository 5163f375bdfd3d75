//! The console output and network requests of a page, as a bounded list of lines.

use std::collections::VecDeque;

use crate::state::shorten;

const MAX_LINES: usize = 1000;
const MAX_LINE: usize = 1000;

#[derive(Default)]
pub(crate) struct Log {
    lines: VecDeque<String>,
    dropped: u64,
}

impl Log {
    pub(crate) fn push(&mut self, line: &str) {
        if self.lines.len() == MAX_LINES {
            self.lines.pop_front();
            self.dropped += 1;
        }
        self.lines.push_back(shorten(line, MAX_LINE));
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Returns the last `most` lines, oldest first, and the number of lines before them.
    pub(crate) fn last(&self, most: usize) -> (Vec<String>, u64) {
        let skipped = self.lines.len().saturating_sub(most);
        (self.lines.iter().skip(skipped).cloned().collect(), self.dropped + skipped as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_lines_are_kept_and_the_others_counted() {
        let mut log = Log::default();
        (0..1500).for_each(|n| log.push(&format!("line {n}")));
        assert_eq!(log.last(2), (vec!["line 1498".into(), "line 1499".into()], 1498));
        assert_eq!(log.last(5000).0.len(), MAX_LINES);
        assert_eq!(log.last(5000).1, 500);
    }
}
