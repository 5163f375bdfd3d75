//! The two encodings of OTLP. A message is built once and encoded as protobuf or as JSON.
//!
//! OTLP has few messages, and the numbers of their fields never change, so this takes less code than a library and its
//! configuration would.

use std::borrow::Cow;

use serde_json::{Map, Value};
use text::hex;

/// The number of a field in protobuf, and its name in JSON.
type Field = (u32, &'static str);

/// A value of a field.
#[derive(Debug, Clone)]
pub(super) enum Node {
    Message(Message),
    /// A repeated field of messages.
    Messages(Vec<Message>),
    Text(Cow<'static, str>),
    /// An id: bytes in protobuf, hexadecimal digits in JSON.
    Id(Vec<u8>),
    /// A signed number of variable length.
    Number(i64),
    /// A value of an enumeration.
    Choice(u8),
    Switch(bool),
    Fixed32(u32),
    Fixed64(u64),
    Double(f64),
    Counts(Vec<u64>),
    Doubles(Vec<f64>),
}

/// A message, as the fields that are set.
#[derive(Debug, Clone, Default)]
pub(super) struct Message(Vec<(Field, Node)>);

impl Message {
    pub(super) fn new(fields: impl IntoIterator<Item = (Field, Node)>) -> Self {
        Self(fields.into_iter().collect())
    }

    /// Adds a field if there is a value for it.
    pub(super) fn with(mut self, field: Field, value: Option<Node>) -> Self {
        self.0.extend(value.map(|value| (field, value)));
        self
    }

    pub(super) fn json(self) -> Value {
        let fields = self.0.into_iter().map(|((_, name), value)| (name.to_owned(), value.json()));
        Value::Object(fields.collect::<Map<_, _>>())
    }

    pub(super) fn protobuf(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.write(&mut bytes);
        bytes
    }

    fn write(&self, out: &mut Vec<u8>) {
        for ((number, _), value) in &self.0 {
            value.write(*number, out);
        }
    }

    /// Writes this message as a field of another one. Its length precedes it and is known only after it was written.
    fn write_field(&self, field: u32, out: &mut Vec<u8>) {
        key(field, Kind::Bytes, out);
        let start = out.len();
        self.write(out);
        let end = out.len();
        varint((end - start) as u64, out);
        let length = out.len() - end;
        out[start..].rotate_right(length);
    }
}

/// The wire type of a field in protobuf, which determines how its length is known.
#[derive(Clone, Copy)]
enum Kind {
    Varint = 0,
    Fixed64 = 1,
    Bytes = 2,
    Fixed32 = 5,
}

impl Node {
    fn json(self) -> Value {
        match self {
            Self::Message(message) => message.json(),
            Self::Messages(messages) => messages.into_iter().map(Message::json).collect(),
            Self::Text(text) => text.into_owned().into(),
            Self::Id(bytes) => hex(&bytes).into(),
            // JSON has no whole numbers of 64 bits.
            Self::Number(number) => number.to_string().into(),
            Self::Fixed64(number) => number.to_string().into(),
            Self::Counts(counts) => counts.iter().map(u64::to_string).collect(),
            Self::Choice(number) => number.into(),
            Self::Switch(is_on) => is_on.into(),
            Self::Fixed32(number) => number.into(),
            Self::Double(number) => number.into(),
            Self::Doubles(numbers) => numbers.into_iter().collect(),
        }
    }

    fn write(&self, field: u32, out: &mut Vec<u8>) {
        let mut bytes = |bytes: &[u8]| {
            key(field, Kind::Bytes, out);
            varint(bytes.len() as u64, out);
            out.extend_from_slice(bytes);
        };
        match self {
            Self::Message(message) => message.write_field(field, out),
            Self::Messages(messages) => messages.iter().for_each(|message| message.write_field(field, out)),
            Self::Text(text) => bytes(text.as_bytes()),
            Self::Id(id) => bytes(id),
            Self::Counts(counts) => bytes(&counts.iter().flat_map(|count| count.to_le_bytes()).collect::<Vec<_>>()),
            Self::Doubles(numbers) => bytes(&numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<_>>()),
            Self::Number(number) => {
                key(field, Kind::Varint, out);
                varint(*number as u64, out);
            }
            Self::Choice(number) => {
                key(field, Kind::Varint, out);
                varint(u64::from(*number), out);
            }
            Self::Switch(is_on) => {
                key(field, Kind::Varint, out);
                varint(u64::from(*is_on), out);
            }
            Self::Fixed32(number) => {
                key(field, Kind::Fixed32, out);
                out.extend_from_slice(&number.to_le_bytes());
            }
            Self::Fixed64(number) => {
                key(field, Kind::Fixed64, out);
                out.extend_from_slice(&number.to_le_bytes());
            }
            Self::Double(number) => {
                key(field, Kind::Fixed64, out);
                out.extend_from_slice(&number.to_le_bytes());
            }
        }
    }
}

fn key(field: u32, kind: Kind, out: &mut Vec<u8>) {
    varint(u64::from(field << 3 | kind as u32), out);
}

fn varint(mut number: u64, out: &mut Vec<u8>) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_message_has_both_forms() {
        let inner = Message::new([((1, "key"), Node::Text("é".into())), ((2, "flag"), Node::Switch(true))]);
        let message = Message::new([
            ((1, "id"), Node::Id(vec![0xab, 1])),
            ((2, "number"), Node::Number(-1)),
            ((3, "time"), Node::Fixed64(1)),
            ((16, "flags"), Node::Fixed32(257)),
            ((5, "double"), Node::Double(0.5)),
            ((6, "counts"), Node::Counts(vec![1, 2])),
            ((7, "bounds"), Node::Doubles(vec![0.25])),
            ((8, "all"), Node::Messages(vec![inner.clone(), Message::default()])),
            ((9, "kind"), Node::Choice(2)),
        ])
        .with((10, "absent"), None)
        .with((11, "one"), Some(Node::Message(inner)));
        let expected = "0a02ab01\
            10ffffffffffffffffff01\
            190100000000000000\
            850101010000\
            29000000000000e03f\
            321001000000000000000200000000000000\
            3a08000000000000d03f\
            42060a02c3a91001\
            4200\
            4802\
            5a060a02c3a91001";
        assert_eq!(hex(&message.protobuf()), expected);
        assert_eq!(
            message.json(),
            json!({
                "id": "ab01", "number": "-1", "time": "1", "flags": 257, "double": 0.5, "counts": ["1", "2"],
                "bounds": [0.25], "all": [{"key": "é", "flag": true}, {}], "kind": 2, "one": {"key": "é", "flag": true},
            })
        );
    }
}
