//! Compares two snapshots of a page, and finds what is new and what is gone.

use std::collections::{HashMap, HashSet, VecDeque};

use proto::browser::Snapshot;

use super::read::OutlineLine;

/// Maximum number of snapshots that are remembered, and the maximum length of each.
const MAX_TAKEN: usize = 8;
const MAX_CHARS: usize = 400_000;
/// Number of additional characters to read, for content that the page may have added before the known lines.
const SLACK: u32 = 20_000;

/// A snapshot that was taken.
#[derive(Debug, Clone)]
pub(super) struct Taken {
    pub number: u64,
    /// Isolated world of the main frame. If it differs, the page is another one.
    pub world: String,
    pub lines: Vec<OutlineLine>,
    /// True if the snapshot includes the end of the page.
    pub whole: bool,
}

impl Taken {
    fn chars(&self) -> usize {
        self.lines.iter().map(|line| line.text.len() + line.depth + 10).sum()
    }
}

pub(super) fn remember(all: &mut VecDeque<Taken>, taken: Taken) {
    if taken.chars() > MAX_CHARS {
        return;
    }
    if all.len() == MAX_TAKEN {
        all.pop_front();
    }
    all.push_back(taken);
}

/// Returns how many characters have to be read to find everything that an earlier snapshot showed.
pub(super) fn budget(base: &Taken) -> u32 {
    if base.whole { MAX_CHARS as u32 } else { 2 * base.chars() as u32 + SLACK }
}

/// Writes the changes into `snapshot`: new lines marked with `+`, below the lines that contain them, and the lines
/// that are gone.
pub(super) fn write(base: &Taken, now: &Taken, max_chars: usize, snapshot: &mut Snapshot) {
    let mut known: HashMap<(u64, &str), usize> = HashMap::new();
    for line in &base.lines {
        *known.entry((line.number, &line.text)).or_default() += 1;
    }
    let mut is_new = Vec::with_capacity(now.lines.len());
    for line in &now.lines {
        let count = known.entry((line.number, &line.text)).or_default();
        is_new.push(*count == 0);
        *count = count.saturating_sub(1);
    }
    // Lines after the last known one may have been cut from the earlier snapshot, so they do not count as new.
    let end = if base.whole { now.lines.len() } else { is_new.iter().rposition(|new| !new).map_or(0, |last| last + 1) };
    let (lines, all) = marked(&now.lines[..end], &is_new, max_chars);
    snapshot.elements = lines.join("\n");
    let mut left = max_chars.saturating_sub(snapshot.elements.len());
    let mut is_all = all;
    let still: HashSet<u64> = now.lines.iter().map(|line| line.number).filter(|number| *number != 0).collect();
    // Starts from the end: of several equal lines, the last ones count as gone.
    for line in base.lines.iter().rev() {
        let count = known.get_mut(&(line.number, line.text.as_str())).filter(|count| **count > 0);
        let Some(count) = count else { continue };
        *count -= 1;
        // An element whose line has changed was already shown as new, and a line without text is not missed.
        if still.contains(&line.number) || (line.number == 0 && !line.text.contains('"')) {
            continue;
        }
        let line = OutlineLine { depth: 0, ..line.clone() }.shown();
        if line.len() > left {
            is_all = false;
            break;
        }
        left -= line.len();
        snapshot.removed.push(line);
    }
    snapshot.removed.reverse();
    snapshot.next = None;
    if !is_all {
        snapshot.notes.push("more changed than can be shown: take a whole snapshot".into());
    }
}

/// Returns the changes as text of at most about `max_chars` characters.
pub(super) fn told(base: &Taken, now: &Taken, max_chars: usize) -> String {
    let mut changed = Snapshot::default();
    write(base, now, max_chars, &mut changed);
    let removed = changed.removed.iter().map(|line| format!("- {line}"));
    let more = changed.notes.iter().map(|_| "(more changed than is shown here)".to_owned());
    let lines: Vec<String> = Some(changed.elements.clone())
        .filter(|lines| !lines.is_empty())
        .into_iter()
        .chain(removed)
        .chain(more)
        .collect();
    if lines.is_empty() { "(nothing)".into() } else { lines.join("\n") }
}

/// Returns the new lines, each below the lines that contain it, as far as they fit. Also returns whether all of them
/// fit.
fn marked(lines: &[OutlineLine], is_new: &[bool], max_chars: usize) -> (Vec<String>, bool) {
    let mut around: Vec<(&OutlineLine, bool)> = Vec::new();
    let (mut out, mut used) = (Vec::new(), 0);
    for (line, &new) in lines.iter().zip(is_new) {
        while around.last().is_some_and(|(outer, _)| outer.depth >= line.depth) {
            around.pop();
        }
        if new {
            let outer = around.iter_mut().filter(|(_, written)| !written).map(|(line, written)| {
                *written = true;
                line.shown()
            });
            let mut added: Vec<String> = outer.collect();
            let shown = line.shown();
            let text = shown.trim_start_matches(' ');
            added.push(format!("{}+ {text}", &shown[..shown.len() - text.len()]));
            let cost: usize = added.iter().map(|line| line.chars().count() + 1).sum();
            if used + cost > max_chars {
                return (out, false);
            }
            used += cost;
            out.extend(added);
        }
        around.push((line, new));
    }
    (out, true)
}
