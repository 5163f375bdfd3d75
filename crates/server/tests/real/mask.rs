//! Takes out of a text what differs from one run to the next: ids, links, times, durations, ports, versions of interpreters.
//!
//! Ids and keys are numbered as they come, so that what was the same stays the same.

use std::collections::BTreeMap;

#[derive(Default)]
pub struct Mask {
    seen: BTreeMap<String, String>,
}

/// `h` is a hexadecimal digit, `d` a decimal one, anything else itself.
const UUID: &str = "hhhhhhhh-hhhh-hhhh-hhhh-hhhhhhhhhhhh";
/// Beginnings of short ids, and the number of letters and digits after them.
const SHORT: [&str; 2] = ["ctx-", "run-"];
const SHORT_LENGTH: usize = 8;
const NIL: &str = "00000000-0000-0000-0000-000000000000";
const TIME: &str = "dddd-dd-ddTdd:dd:ddZ";
const KEY_LENGTH: usize = 64;
/// Of what marks the words of a page.
const MARK_LENGTH: usize = 32;

/// A number between these is masked.
const NUMBERS: [(&str, &str); 8] = [
    ("http://127.0.0.1:", "/"),
    ("\"execution_time\": ", ""),
    ("\"execution_time\":", ""),
    ("\"execution_time_ms\":", ""),
    ("; ", " ms]"),
    (" in ", " s\n"),
    ("native/python-", ""),
    ("native/node-", ""),
];

impl Mask {
    pub fn text(&mut self, text: &str) -> String {
        let mut masked = String::new();
        let mut rest = text;
        while let Some(next) = rest.chars().next() {
            let key_shape = "h".repeat(KEY_LENGTH);
            if let Some(id) = shaped(rest, UUID) {
                masked += &self.number("#", id);
                rest = &rest[id.len()..];
            } else if let Some((prefix, id)) = short_id(rest) {
                masked += prefix;
                masked += &self.number("#", id);
                rest = &rest[prefix.len() + id.len()..];
            } else if let Some(key) = shaped(rest, &key_shape) {
                masked += &self.number("key-", key);
                rest = &rest[key.len()..];
            } else if let Some(mark) = shaped(rest, &"h".repeat(MARK_LENGTH)) {
                masked += "<mark>";
                rest = &rest[mark.len()..];
            } else if let Some(time) = shaped(rest, TIME) {
                masked += "<time>";
                rest = &rest[time.len()..];
            } else if let Some((prefix, number)) = numbered(rest) {
                masked += prefix;
                masked += "<n>";
                rest = &rest[prefix.len() + number.len()..];
            } else {
                masked.push(next);
                rest = &rest[next.len_utf8()..];
            }
        }
        masked
    }

    fn number(&mut self, kind: &str, id: &str) -> String {
        if id == NIL {
            return id.to_owned();
        }
        let number = self.seen.values().filter(|name| name.starts_with(kind)).count() + 1;
        self.seen.entry(id.to_owned()).or_insert_with(|| format!("{kind}{number}")).clone()
    }
}

fn short_id(text: &str) -> Option<(&'static str, &str)> {
    SHORT.iter().find_map(|prefix| {
        let rest = text.strip_prefix(prefix)?;
        let id = &rest[..rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '-').unwrap_or(rest.len())];
        (id.len() == SHORT_LENGTH && !id.contains('-')).then_some((*prefix, id))
    })
}

fn shaped<'a>(text: &'a str, shape: &str) -> Option<&'a str> {
    let head = text.get(..shape.len())?;
    let fits = head.chars().zip(shape.chars()).all(|(c, s)| match s {
        'h' => c.is_ascii_hexdigit(),
        'd' => c.is_ascii_digit(),
        other => c == other,
    });
    fits.then_some(head)
}

fn numbered(text: &str) -> Option<(&'static str, &str)> {
    NUMBERS.iter().find_map(|(prefix, suffix)| {
        let rest = text.strip_prefix(prefix)?;
        let number = &rest[..rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len())];
        (!number.is_empty() && rest[number.len()..].starts_with(suffix)).then_some((*prefix, number))
    })
}
