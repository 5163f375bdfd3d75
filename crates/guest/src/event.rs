//! This module parses the events that a driver sends, one JSON object per line. Anything in the sandbox can write such
//! a line, so its content is only a claim.
//!
//! The module knows no pipes. The JSON parser bounds the nesting, and this module bounds the number of values.

use std::collections::BTreeMap;
use std::fmt;

use proto::{KernelEvent, MimeBundle};
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

/// A line that a driver has sent.
#[derive(Debug, PartialEq)]
pub(crate) enum DriverLine {
    /// The driver can run cells.
    Ready { version: String },
    /// Something that cell `n` produced.
    Event { n: u64, event: KernelEvent },
    /// An error outside a cell, or output of an earlier cell; `run` is the number of that cell if it is output.
    Late { text: String, run: Option<u64> },
    /// Cell `n` has ended.
    Done { n: u64, done: CellEnd },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CellEnd {
    Ok,
    Error,
    Interrupted,
    Exit { code: i32 },
}

/// Fields of all kinds of lines in one struct, because serde would buffer a tagged enum twice.
#[derive(Deserialize)]
struct Raw {
    t: EventKind,
    #[serde(default)]
    n: u64,
    #[serde(default)]
    version: String,
    #[serde(default, deserialize_with = "bundle")]
    data: MimeBundle,
    #[serde(default)]
    id: Option<String>,
    #[serde(default)]
    update: Option<bool>,
    #[serde(default)]
    wait: bool,
    #[serde(default)]
    name: String,
    #[serde(default)]
    value: String,
    #[serde(default)]
    text: String,
    #[serde(default)]
    status: Option<Status>,
    #[serde(default)]
    code: Option<i64>,
    #[serde(default)]
    run: Option<u64>,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum EventKind {
    Ready,
    Result,
    Display,
    Clear,
    Error,
    Late,
    Done,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Status {
    Ok,
    Error,
    Interrupted,
    Exit,
}

/// Parses a line. Returns `None` if it is not a line that a driver writes.
pub(crate) fn parse(line: &[u8]) -> Option<DriverLine> {
    let Raw { t, n, version, data, id, update, wait, name, value, text, status, code, run } =
        serde_json::from_slice(line).ok()?;
    let event = match t {
        EventKind::Ready => return Some(DriverLine::Ready { version }),
        EventKind::Late => return Some(DriverLine::Late { text, run }),
        EventKind::Done => return Some(DriverLine::Done { n, done: done(status?, code) }),
        EventKind::Result => KernelEvent::Result { data },
        EventKind::Display => KernelEvent::Display { data, id, update: update.unwrap_or(false) },
        EventKind::Clear => KernelEvent::Clear { wait },
        EventKind::Error => KernelEvent::Error { name, value, text },
    };
    Some(DriverLine::Event { n, event })
}

fn done(status: Status, code: Option<i64>) -> CellEnd {
    match status {
        Status::Ok => CellEnd::Ok,
        Status::Error => CellEnd::Error,
        Status::Interrupted => CellEnd::Interrupted,
        Status::Exit => CellEnd::Exit { code: code.and_then(|c| i32::try_from(c).ok()).unwrap_or(0) },
    }
}

fn bundle<'de, D: Deserializer<'de>>(deserializer: D) -> Result<MimeBundle, D::Error> {
    let mut budget = proto::MAX_VALUES;
    match (Bounded { budget: &mut budget }).deserialize(deserializer)? {
        Value::Object(map) => Ok(map.into_iter().collect::<BTreeMap<_, _>>()),
        Value::Null => Ok(MimeBundle::new()),
        _ => Err(D::Error::custom("a mime bundle is an object")),
    }
}

/// Builds a `Value` that consists of at most `budget` values.
struct Bounded<'b> {
    budget: &'b mut usize,
}

impl<'de> DeserializeSeed<'de> for Bounded<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        *self.budget = self.budget.checked_sub(1).ok_or_else(|| D::Error::custom("too many values"))?;
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Bounded<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E: Error>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(Bounded { budget: &mut *self.budget })? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut map = serde_json::Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            map.insert(key, entries.next_value_seed(Bounded { budget: &mut *self.budget })?);
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_protocol_are_understood() {
        let event = |event| Some(DriverLine::Event { n: 3, event });
        let data: MimeBundle = [("text/plain".to_owned(), Value::from("2"))].into();
        assert_eq!(
            parse(br#"{"t":"result","n":3,"data":{"text/plain":"2"}}"#),
            event(KernelEvent::Result { data: data.clone() })
        );
        assert_eq!(
            parse(br#"{"t":"display","n":3,"data":{"text/plain":"2"},"id":"a","update":true}"#),
            event(KernelEvent::Display { data: data.clone(), id: Some("a".into()), update: true })
        );
        assert_eq!(
            parse(br#"{"t":"display","n":3,"data":{"text/plain":"2"},"id":null,"update":null}"#),
            event(KernelEvent::Display { data, id: None, update: false })
        );
        assert_eq!(parse(br#"{"t":"clear","n":3,"wait":true}"#), event(KernelEvent::Clear { wait: true }));
        assert_eq!(
            parse(br#"{"t":"ready","n":0,"version":"3.11"}"#),
            Some(DriverLine::Ready { version: "3.11".into() })
        );
        assert_eq!(
            parse(br#"{"t":"done","n":3,"status":"exit","ms":1.5,"code":7}"#),
            Some(DriverLine::Done { n: 3, done: CellEnd::Exit { code: 7 } })
        );
    }

    #[test]
    fn garbage_is_nothing() {
        let deep = format!(r#"{{"t":"result","n":1,"data":{}}}"#, "[".repeat(100_000));
        let wide = format!(r#"{{"t":"result","n":1,"data":{{"a":[0{}]}}}}"#, ",0".repeat(1_000_000));
        for line in
            ["", "x", "[]", "null", r#"{"t":"what"}"#, r#"{"t":"done","n":1}"#, r#"{"t":"done","n":-1}"#, &deep, &wide]
        {
            assert_eq!(parse(line.as_bytes()), None, "{:.50}", line);
        }
        assert_eq!(parse(b"\xff\xfe"), None);
    }
}
