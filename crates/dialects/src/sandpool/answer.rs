//! Writes the answers of this dialect: compact JSON that stays within the text budget, whatever the tool is.

use text::clipped;

use crate::output::Output;
use crate::shared::add_lines;
use crate::{Answer, RenderInput};

/// Room within the budget for the sentence about what is left out.
const NOTE_ROOM: usize = 300;
/// Maximum number of characters of a sentence about a failure. Some quote what a caller or a program wrote.
const SENTENCE: usize = 2000;

/// Returns the answer with an object that has a note. If the object is over budget, its longest members are shortened,
/// and the note says what is left out and, with `advice`, how to get it.
pub(super) fn answer<O: Output>(
    input: &RenderInput<'_>,
    mut object: O,
    note: fn(&mut O) -> &mut Option<String>,
    advice: &str,
) -> Answer {
    let budget = input.options.text_budget;
    if object.written() > budget {
        let left_out = object.fit(budget.saturating_sub(NOTE_ROOM));
        add_note(note(&mut object), &left_out, advice);
    }
    Answer::compact(&object)
}

/// Appends what is left out to a note.
pub(super) fn add_note(note: &mut Option<String>, left_out: &[String], advice: &str) {
    if left_out.is_empty() {
        return;
    }
    let text = note.get_or_insert_default();
    add_lines(text, &format!("Left out, because the answer would be too long: {}. {advice}", left_out.join(", ")));
    text.truncate(text.trim_end().len());
}

/// Bounds a sentence about a failure.
pub(super) fn bounded(sentence: &str) -> String {
    clipped(sentence, SENTENCE).into_owned()
}
