//! Bounds the output of a cell while it arrives: however much a guest sends, memory and result stay small.
//!
//! This module knows bytes, characters and MIME bundles. It knows nothing of connections or contexts.

use base64::Engine as _;
use proto::{KernelEvent, MimeBundle};
use serde_json::Value;

use crate::memory::Hold;
use crate::op::{Captured, CellError, Ran};

const MAX_DISPLAYS: usize = 64;
const MAX_MIMES: usize = 16;
/// Maximum size of all displays and the value of one cell together.
const MAX_RICH_BYTES: usize = 8 << 20;
const MAX_ERROR_NAME: usize = 256;

/// Decodes bytes to text, however the bytes were split. Invalid sequences become replacement characters.
#[derive(Debug, Default)]
pub(crate) struct Utf8 {
    /// The beginning of a character whose rest has not arrived; at most 3 bytes.
    partial: Vec<u8>,
}

impl Utf8 {
    pub(crate) fn push(&mut self, bytes: &[u8]) -> String {
        let joined;
        let mut rest = if self.partial.is_empty() {
            bytes
        } else {
            joined = [std::mem::take(&mut self.partial).as_slice(), bytes].concat();
            joined.as_slice()
        };
        let mut text = String::with_capacity(rest.len());
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    return text;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    let Some(bad) = error.error_len() else {
                        self.partial = after.to_vec();
                        return text;
                    };
                    text.push(char::REPLACEMENT_CHARACTER);
                    rest = &after[bad..];
                }
            }
        }
    }

    /// Returns the replacement for an unfinished character at the end of the stream.
    pub(crate) fn finish(&mut self) -> &'static str {
        if std::mem::take(&mut self.partial).is_empty() { "" } else { "\u{fffd}" }
    }
}

/// Keeps the first three fifths and the last two fifths of a budget of characters, and counts what lies between.
#[derive(Debug)]
pub(crate) struct HeadTail {
    head: String,
    /// Number of characters that still fit into the head.
    head_room: usize,
    /// The end of the text. It exceeds its limit between two trims, so that a flood costs no more than copying it.
    tail: String,
    tail_limit: usize,
    left_out: u64,
}

impl HeadTail {
    const SLACK: usize = 64 << 10;

    pub(crate) fn new(budget: usize) -> Self {
        let head_room = budget * 3 / 5;
        Self { head: String::new(), head_room, tail: String::new(), tail_limit: budget - head_room, left_out: 0 }
    }

    pub(crate) fn push(&mut self, text: &str) {
        let mut rest = text;
        if self.head_room > 0 {
            let (head, after) = split_at_char(text, self.head_room);
            self.head.push_str(head);
            self.head_room = if after.is_empty() { self.head_room - head.chars().count() } else { 0 };
            rest = after;
        }
        self.tail.push_str(rest);
        if self.tail.len() > self.tail_limit * 4 + Self::SLACK {
            self.trim();
        }
    }

    /// Records that bytes are missing here, so that later text does not continue the earlier one.
    pub(crate) fn gap(&mut self, bytes: u64) {
        if bytes == 0 {
            return;
        }
        self.left_out = self.left_out.saturating_add(bytes).saturating_add(self.tail.len() as u64);
        self.tail.clear();
        self.head_room = 0;
    }

    /// Returns the text, and whether something was left out.
    pub(crate) fn finish(mut self) -> (String, bool) {
        self.trim();
        let mut text = self.head;
        if self.left_out > 0 {
            if !text.is_empty() && !text.ends_with('\n') {
                text.push('\n');
            }
            text.push_str(&format!("… [{} bytes left out] …\n", self.left_out));
        }
        text.push_str(&self.tail);
        (text, self.left_out > 0)
    }

    fn trim(&mut self) {
        if self.tail_limit == 0 {
            self.left_out = self.left_out.saturating_add(self.tail.len() as u64);
            self.tail.clear();
        } else if let Some((start, _)) = self.tail.char_indices().rev().nth(self.tail_limit - 1) {
            self.left_out = self.left_out.saturating_add(start as u64);
            self.tail.drain(..start);
        }
    }
}

fn split_at_char(text: &str, count: usize) -> (&str, &str) {
    text.char_indices().nth(count).map_or((text, ""), |(at, _)| text.split_at(at))
}

/// Returns `text`, or its head and tail if it exceeds the budget.
pub(crate) fn bounded(text: &str, budget: usize) -> String {
    let mut kept = HeadTail::new(budget);
    kept.push(text);
    kept.finish().0
}

/// Captures one stream of a cell.
#[derive(Debug)]
pub(crate) struct StreamCapture {
    utf8: Utf8,
    kept: HeadTail,
    total: u64,
}

impl StreamCapture {
    pub(crate) fn new(budget: usize) -> Self {
        Self { utf8: Utf8::default(), kept: HeadTail::new(budget), total: 0 }
    }

    /// Adds bytes and returns the text that they completed, for readers that follow the stream.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> String {
        self.total = self.total.saturating_add(bytes.len() as u64);
        let text = self.utf8.push(bytes);
        self.kept.push(&text);
        text
    }

    pub(crate) fn gap(&mut self, bytes: u64) {
        self.total = self.total.saturating_add(bytes);
        self.kept.push(self.utf8.finish());
        self.kept.gap(bytes);
    }

    pub(crate) fn finish(mut self) -> Captured {
        self.kept.push(self.utf8.finish());
        let (text, truncated) = self.kept.finish();
        Captured { text, total_bytes: self.total, truncated, kept: None }
    }
}

/// Collects the value, the displays, the error and the late output of a cell.
#[derive(Debug)]
pub(crate) struct Rich {
    budget: usize,
    room: usize,
    memory: Hold,
    value: Option<MimeBundle>,
    displays: Vec<Display>,
    left_out: usize,
    clear_at_next: bool,
    error: Option<CellError>,
    late: HeadTail,
    has_late: bool,
    strays: HeadTail,
    stray_bytes: u64,
}

#[derive(Debug)]
struct Display {
    id: Option<String>,
    bundle: MimeBundle,
    size: usize,
}

pub(crate) struct Shown {
    pub(crate) value: Option<MimeBundle>,
    pub(crate) displays: Vec<MimeBundle>,
    pub(crate) error: Option<CellError>,
    pub(crate) late: Option<String>,
    pub(crate) strays: Option<String>,
}

impl Rich {
    /// Creates an empty collection. The size of everything kept is added to `memory`.
    pub(crate) fn new(budget: usize, memory: Hold) -> Self {
        Self {
            budget,
            room: MAX_RICH_BYTES,
            memory,
            value: None,
            displays: Vec::new(),
            left_out: 0,
            clear_at_next: false,
            error: None,
            late: HeadTail::new(budget),
            has_late: false,
            strays: HeadTail::new(budget),
            stray_bytes: 0,
        }
    }

    pub(crate) fn event(&mut self, event: KernelEvent) {
        match event {
            KernelEvent::Result { data } => {
                let old = self.value.take().map_or(0, |bundle| size_of(&bundle));
                self.free(old);
                self.value = Some(self.admit(data).0);
            }
            KernelEvent::Display { data, id, update } => self.display(data, id, update),
            KernelEvent::Clear { wait: true } => self.clear_at_next = true,
            KernelEvent::Clear { wait: false } => self.clear(),
            KernelEvent::Error { name, value, text } => {
                self.error = Some(CellError {
                    name: bounded(&name, MAX_ERROR_NAME),
                    value: bounded(&value, self.budget),
                    text: bounded(&text, self.budget),
                });
            }
            KernelEvent::Late { text, ago: None } => self.late(&text),
            KernelEvent::Late { text, ago: Some(ago) } => self.stray(ago, &text),
        }
    }

    /// Adds output of processes that earlier cells left behind. It is shown separately, each piece on its own lines.
    pub(crate) fn late(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        self.has_late = true;
        self.late.push(text);
        if !text.ends_with('\n') {
            self.late.push("\n");
        }
    }

    /// Adds output that threads and timers of an earlier cell wrote while this one ran.
    fn stray(&mut self, ago: u64, text: &str) {
        self.stray_bytes += text.len() as u64;
        let which =
            if ago == 1 { "the call before this one".into() } else { format!("the call {ago} before this one") };
        self.strays.push(&format!("[printed by what {which} left running]\n"));
        self.strays.push(text);
        if !text.ends_with('\n') {
            self.strays.push("\n");
        }
    }

    pub(crate) fn late_gap(&mut self, bytes: u64) {
        self.has_late |= bytes > 0;
        self.late.gap(bytes);
    }

    pub(crate) fn finish(self) -> Shown {
        let mut displays: Vec<MimeBundle> = self.displays.into_iter().map(|d| d.bundle).collect();
        if self.left_out > 0 {
            displays.push(note(&format!("[{} more displays left out: at most {MAX_DISPLAYS}]", self.left_out)));
        }
        let late = self.has_late.then(|| self.late.finish().0);
        let strays = (self.stray_bytes > 0).then(|| self.strays.finish().0);
        if strays.is_some() {
            // The log mentions it because not every dialect can show it.
            tracing::info!(bytes = self.stray_bytes, "earlier calls of this context have printed during a later one");
        }
        Shown { value: self.value, displays, error: self.error, late, strays }
    }

    fn display(&mut self, data: MimeBundle, id: Option<String>, update: bool) {
        if std::mem::take(&mut self.clear_at_next) {
            self.clear();
        }
        let id = id.map(|id| bounded(&id, MAX_ERROR_NAME));
        let known = update.then(|| self.displays.iter().position(|d| d.id.is_some() && d.id == id)).flatten();
        if known.is_none() && self.displays.len() >= MAX_DISPLAYS {
            self.left_out += 1;
            return;
        }
        if let Some(at) = known {
            self.free(self.displays[at].size);
        }
        let (bundle, size) = self.admit(data);
        let display = Display { id, bundle, size };
        match known {
            Some(at) => self.displays[at] = display,
            None => self.displays.push(display),
        }
    }

    fn clear(&mut self) {
        let size = self.displays.drain(..).map(|d| d.size).sum();
        self.free(size);
        self.left_out = 0;
    }

    fn free(&mut self, size: usize) {
        self.room += size;
        self.memory.give_back(size);
    }

    /// Bounds a bundle and subtracts its size from the room that is left. Returns it with the size that was subtracted,
    /// which is what [`Self::free`] may give back.
    fn admit(&mut self, data: MimeBundle) -> (MimeBundle, usize) {
        let mut admitted = MimeBundle::new();
        let (mut notes, mut counted) = (Vec::new(), 0);
        for (mime, value) in data.into_iter().take(MAX_MIMES) {
            match admit_value(&mime, value, self.budget, self.room) {
                Ok(value) => {
                    let size = mime.len() + weight(&value);
                    if size > self.room {
                        notes.push(format!(
                            "[{mime} of {size} bytes left out: at most {MAX_RICH_BYTES} for all displays]"
                        ));
                        continue;
                    }
                    if let Err(full) = self.memory.add(size) {
                        notes.push(format!("[{mime} of {size} bytes left out: {full}]"));
                        continue;
                    }
                    self.room -= size;
                    counted += size;
                    admitted.insert(mime, value);
                }
                Err(why) => notes.push(why),
            }
        }
        if !notes.is_empty() {
            let plain = admitted.remove("text/plain").and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_default();
            // The notes are shown also where there is no room for them; they are short, and so is the list of displays.
            let size = self.room.min(notes.iter().map(String::len).sum());
            if self.memory.add(size).is_ok() {
                self.room -= size;
                counted += size;
            }
            let text: Vec<String> = std::iter::once(plain).filter(|p| !p.is_empty()).chain(notes).collect();
            admitted.insert("text/plain".into(), Value::String(text.join("\n")));
        }
        (admitted, counted)
    }
}

fn admit_value(mime: &str, value: Value, budget: usize, room: usize) -> Result<Value, String> {
    if mime.len() > MAX_ERROR_NAME || mime.chars().any(char::is_control) {
        return Err("[a display of an unreadable type was left out]".into());
    }
    match (mime, value) {
        ("image/png" | "image/jpeg", value) => picture(mime, &value, room).map(Value::String),
        (_, Value::String(text)) if mime.starts_with("image/") || mime.starts_with("text/html") => {
            // Cutting markup in the middle breaks it, so it is kept whole or left out.
            let limit = budget.saturating_mul(50).min(room);
            if text.len() > limit {
                return Err(format!("[{mime} of {} bytes left out: at most {limit}]", text.len()));
            }
            Ok(Value::String(text))
        }
        (_, Value::String(text)) => Ok(Value::String(bounded(&text, budget))),
        (_, value) => {
            let size = weight(&value);
            let limit = budget.saturating_mul(4).min(room);
            if size > limit { Err(format!("[{mime} of {size} bytes left out: at most {limit}]")) } else { Ok(value) }
        }
    }
}

/// Returns a picture only if a reader could decode it.
fn picture(mime: &str, value: &Value, room: usize) -> Result<String, String> {
    let text = value.as_str().unwrap_or_default();
    if text.len() > room {
        return Err(format!("[{mime} of {} bytes left out: at most {MAX_RICH_BYTES} for all displays]", text.len()));
    }
    let compact: String = text.split_ascii_whitespace().collect();
    let magic: &[u8] = if mime == "image/png" { b"\x89PNG\r\n\x1a\n" } else { b"\xff\xd8" };
    match base64::engine::general_purpose::STANDARD.decode(&compact) {
        Ok(bytes) if bytes.starts_with(magic) => Ok(compact),
        _ => Err(format!("[{mime} left out: not a readable picture]")),
    }
}

/// Estimates the memory of a result in bytes.
pub(crate) fn weight_of(ran: &Ran) -> usize {
    let texts = [&ran.stdout.text, &ran.stderr.text].into_iter().chain(&ran.late).chain(&ran.strays).chain(&ran.notice);
    let errors = ran.error.iter().map(|error| error.value.len() + error.text.len());
    let bundles = ran.displays.iter().chain(&ran.value).map(size_of);
    texts.map(String::len).chain(errors).chain(bundles).sum()
}

fn note(text: &str) -> MimeBundle {
    MimeBundle::from([("text/plain".into(), Value::String(text.into()))])
}

fn size_of(bundle: &MimeBundle) -> usize {
    bundle.iter().map(|(mime, value)| mime.len() + weight(value)).sum()
}

/// Estimates the size of a value in bytes without serializing it.
fn weight(value: &Value) -> usize {
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => 8,
        Value::String(text) => text.len(),
        Value::Array(items) => 8 + items.iter().map(|v| 1 + weight(v)).sum::<usize>(),
        Value::Object(members) => 8 + members.iter().map(|(k, v)| 4 + k.len() + weight(v)).sum::<usize>(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn capture(chunks: &[Vec<u8>], budget: usize) -> Captured {
        let mut stream = StreamCapture::new(budget);
        for chunk in chunks {
            stream.push(chunk);
        }
        stream.finish()
    }

    proptest! {
        #[test]
        fn however_bytes_are_cut_the_text_is_the_same(
            bytes in proptest::collection::vec(prop_oneof![any::<u8>(), Just(0xe2), Just(0x82), Just(0xac), Just(b'a')], 0..400),
            cut in 1usize..9,
        ) {
            let whole = String::from_utf8_lossy(&bytes).into_owned();
            let chunks: Vec<Vec<u8>> = bytes.chunks(cut).map(<[u8]>::to_vec).collect();
            let captured = capture(&chunks, 100_000);
            prop_assert_eq!(captured.text, whole);
            prop_assert_eq!(captured.total_bytes, bytes.len() as u64);
            prop_assert!(!captured.truncated);
        }

        #[test]
        fn a_long_text_keeps_its_head_and_tail_and_says_what_is_missing(text in "\\PC{0,300}", budget in 0usize..200, cut in 1usize..50) {
            let chunks: Vec<Vec<u8>> = text.as_bytes().chunks(cut).map(<[u8]>::to_vec).collect();
            let captured = capture(&chunks, budget);
            let count = text.chars().count();
            prop_assert_eq!(captured.truncated, count > budget);
            if count <= budget {
                prop_assert_eq!(captured.text, text);
            } else {
                let head: String = text.chars().take(budget * 3 / 5).collect();
                let tail: String = text.chars().skip(count - (budget - budget * 3 / 5)).collect();
                let left_out = text.len() - head.len() - tail.len();
                prop_assert!(captured.text.starts_with(&head));
                prop_assert!(captured.text.ends_with(&tail));
                let marker = format!("… [{left_out} bytes left out] …\n");
                prop_assert!(captured.text.contains(&marker));
            }
        }

        #[test]
        fn no_number_of_gaps_and_bytes_grows_the_kept_text(
            steps in proptest::collection::vec((any::<bool>(), any::<u64>(), proptest::collection::vec(any::<u8>(), 0..200)), 0..50),
            budget in 0usize..100,
        ) {
            let mut stream = StreamCapture::new(budget);
            for (gap, missing, bytes) in &steps {
                if *gap { stream.gap(*missing) } else { stream.push(bytes); }
            }
            prop_assert!(stream.finish().text.chars().count() <= budget + 60);
        }
    }

    fn png(bytes: usize) -> String {
        let mut data = b"\x89PNG\r\n\x1a\n".to_vec();
        data.resize(bytes.max(8), 7);
        base64::engine::general_purpose::STANDARD.encode(data)
    }

    fn show(rich: &mut Rich, mime: &str, value: Value, id: Option<&str>, update: bool) {
        rich.event(KernelEvent::Display {
            data: MimeBundle::from([(mime.into(), value)]),
            id: id.map(Into::into),
            update,
        });
    }

    #[test]
    fn a_gap_joins_what_lies_before_and_after_with_one_marker() {
        let mut stream = StreamCapture::new(20);
        stream.push(b"head\n");
        stream.gap(1000);
        stream.push(b"tail\n");
        assert_eq!(
            stream.finish(),
            Captured {
                text: "head\n… [1000 bytes left out] …\ntail\n".into(),
                total_bytes: 1010,
                truncated: true,
                kept: None
            }
        );
    }

    #[test]
    fn pictures_pass_whole_or_are_replaced_by_a_note() {
        let mut rich = Rich::new(1000, Hold::default());
        let good = png(100);
        show(&mut rich, "image/png", Value::String(format!("{good}\n")), None, false);
        show(&mut rich, "image/png", Value::String("not base64!".into()), None, false);
        show(&mut rich, "image/jpeg", Value::String(good.clone()), None, false);
        show(&mut rich, "image/png", Value::String(png(9 << 20)), None, false);
        let displays = rich.finish().displays;
        let expected = vec![
            MimeBundle::from([("image/png".into(), Value::String(good))]),
            note("[image/png left out: not a readable picture]"),
            note("[image/jpeg left out: not a readable picture]"),
            note("[image/png of 12582912 bytes left out: at most 8388608 for all displays]"),
        ];
        assert_eq!(displays, expected);
    }

    #[test]
    fn displays_are_bounded_in_number_and_in_all() {
        let mut rich = Rich::new(1000, Hold::default());
        for _ in 0..100 {
            show(&mut rich, "text/plain", Value::String("x".into()), None, false);
        }
        let displays = rich.finish().displays;
        assert_eq!(displays.len(), MAX_DISPLAYS + 1);
        assert_eq!(displays[MAX_DISPLAYS], note("[36 more displays left out: at most 64]"));

        let mut rich = Rich::new(1000, Hold::default());
        for _ in 0..30 {
            show(&mut rich, "image/png", Value::String(png(1 << 20)), None, false);
        }
        assert!(rich.finish().displays.iter().map(size_of).sum::<usize>() <= MAX_RICH_BYTES + 64 * 200);
    }

    #[test]
    fn an_update_gives_back_no_more_than_its_display_took() {
        let mut rich = Rich::new(1000, Hold::default());
        show(&mut rich, "image/png", serde_json::json!(png(MAX_RICH_BYTES / 4 * 3 - 96)), None, false);
        let (mime, large) = (format!("application/{}", "x".repeat(100)), serde_json::json!(vec![0; 10_000]));
        for update in [false, true, true] {
            show(&mut rich, &mime, large.clone(), Some("note"), update);
            let shown: usize = rich.displays.iter().map(|display| display.size).sum();
            assert_eq!(rich.room + shown, MAX_RICH_BYTES);
        }
    }

    #[test]
    fn an_update_replaces_its_display_and_a_clear_removes_all() {
        let mut rich = Rich::new(1000, Hold::default());
        show(&mut rich, "text/plain", Value::String("1 %".into()), Some("bar"), false);
        for percent in 2..=100 {
            show(&mut rich, "text/plain", Value::String(format!("{percent} %")), Some("bar"), true);
        }
        rich.event(KernelEvent::Clear { wait: true });
        assert_eq!(rich.displays.len(), 1);
        show(&mut rich, "text/plain", Value::String("new".into()), None, false);
        assert_eq!(rich.finish().displays, vec![note("new")]);
    }

    #[test]
    fn an_error_of_any_size_is_bounded() {
        let mut rich = Rich::new(100, Hold::default());
        let long = "x".repeat(1 << 20);
        rich.event(KernelEvent::Error { name: long.clone(), value: long.clone(), text: long });
        let error = rich.finish().error.unwrap();
        assert!(error.name.len() < 400 && error.value.len() < 200 && error.text.len() < 200);
    }
}
