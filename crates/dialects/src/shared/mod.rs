//! Wording and objects that several dialects share. Nothing here belongs to one document.

pub(super) mod browse;
pub(super) mod files;
pub(super) mod run;
pub(super) mod untrusted;

use std::time::Duration;

use engine::op::Language;
use text::iso8601;

/// Maximum number of characters in a text field that the engine has not bounded already.
pub(super) const TEXT_BUDGET: usize = 20_000;

/// Returns the name of a language as people write it.
pub(super) fn title(language: Language) -> &'static str {
    match language {
        Language::Python => "Python",
        Language::Javascript => "JavaScript",
        Language::Typescript => "TypeScript",
    }
}

pub(super) fn moment(seconds: u64) -> String {
    iso8601(i64::try_from(seconds).unwrap_or(i64::MAX))
}

pub(super) fn seconds(duration: Duration) -> String {
    format!("{} s", duration.as_secs_f64())
}

/// Shortens `text` and replaces control characters, including line breaks, for places that hold only one line.
pub(super) fn one_line(text: &str) -> String {
    const MOST: usize = 600;
    let mut line: String = text.chars().take(MOST).map(|c| if c.is_control() { ' ' } else { c }).collect();
    if text.chars().nth(MOST).is_some() {
        line.push('…');
    }
    line
}

/// Appends `text` on separate lines.
pub(super) fn add_lines(out: &mut String, text: &str) {
    if !out.is_empty() && !out.ends_with('\n') {
        out.push('\n');
    }
    out.push_str(text);
    if !text.ends_with('\n') {
        out.push('\n');
    }
}
