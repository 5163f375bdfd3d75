//! The objects of answers. [`output!`] declares each as a struct; its schema follows from the types of its members: an
//! object at the root and plain types below it, which every client can read.

use serde::Serialize;
use serde_json::{Value, json};

/// Describes the types of which the objects of answers consist.
pub(crate) trait Output: Serialize {
    /// Whether a member of this type is always present.
    const REQUIRED: bool = true;

    fn schema() -> Value;

    fn is_absent(&self) -> bool {
        false
    }

    /// Returns the number of characters that the value takes as JSON.
    fn written(&self) -> usize {
        serde_json::to_string(self).map_or(0, |json| json.chars().count())
    }

    /// Shortens the longest members of an object until it takes at most `most` characters. Returns what is left out, such
    /// as `part of stdout` and `12 of matches`.
    fn fit(&mut self, _most: usize) -> Vec<String> {
        Vec::new()
    }

    /// Shortens texts and lists until the value takes at most `most` characters, as far as it has any. Returns the number
    /// of rows that it dropped, if it is a list.
    fn shorten(&mut self, _most: usize) -> usize {
        0
    }
}

/// Declares objects of answers. A member that may be absent is an `Option`. A member whose name is not a name in Rust
/// is written `member as "name"`.
macro_rules! output {
    ($($(#[$meta:meta])* struct $name:ident { $($(#[$doc:meta])* $field:ident $(as $wire:literal)?: $type:ty),* $(,)? })*) => {$(
        $(#[$meta])*
        #[derive(serde::Serialize)]
        pub(crate) struct $name {
            $(
                $(#[$doc])*
                #[serde($(rename = $wire,)? skip_serializing_if = "crate::output::Output::is_absent")]
                pub $field: $type,
            )*
        }

        impl $name {
            pub(crate) fn members() -> Vec<$crate::output::Member> {
                vec![$($crate::output::member::<$type>($crate::args::wire_name!($field $($wire)?))),*]
            }
        }

        impl $crate::output::Output for $name {
            fn schema() -> serde_json::Value {
                $crate::output::object(Self::members())
            }

            fn fit(&mut self, most: usize) -> Vec<String> {
                let (whole, sizes) = (self.written(), [$($crate::output::Output::written(&self.$field)),*]);
                let mut left_out = Vec::new();
                if whole <= most {
                    return left_out;
                }
                let frame = whole.saturating_sub(sizes.iter().sum());
                let share = $crate::output::share(&sizes, most.saturating_sub(frame));
                let mut sizes = sizes.into_iter();
                $(if sizes.next().is_some_and(|size| size > share) {
                    let name = $crate::args::wire_name!($field $($wire)?);
                    left_out.push(match $crate::output::Output::shorten(&mut self.$field, share) {
                        0 => format!("part of {name}"),
                        rows => format!("{rows} of {name}"),
                    });
                })*
                left_out
            }

            fn shorten(&mut self, most: usize) -> usize {
                self.fit(most);
                0
            }
        }
    )*};
}

pub(crate) use output;

/// Describes a member: its name, its schema, and whether it is always present.
pub(crate) type Member = (&'static str, Value, bool);

pub(crate) fn member<O: Output>(name: &'static str) -> Member {
    (name, O::schema(), O::REQUIRED)
}

pub(crate) fn object(mut members: Vec<Member>) -> Value {
    members.sort_by_key(|(name, ..)| *name);
    let required: Vec<&str> = members.iter().filter(|(.., required)| *required).map(|(name, ..)| *name).collect();
    let properties: Value = members.iter().map(|(name, schema, _)| (*name, schema.clone())).collect();
    json!({ "type": "object", "properties": properties, "required": required })
}

/// Returns a schema that does not say which members are always present.
pub(crate) fn without_required(mut schema: Value) -> Value {
    if let Value::Object(members) = &mut schema {
        members.remove("required");
        for name in ["properties", "items"] {
            let Some(inner) = members.get_mut(name) else { continue };
            match (name, inner) {
                ("properties", Value::Object(all)) => {
                    all.values_mut().for_each(|member| *member = without_required(member.take()));
                }
                (_, items) => *items = without_required(items.take()),
            }
        }
    }
    schema
}

/// Returns the largest size that each member may have if all together may have `most`. Smaller members leave their rest to
/// the larger ones.
pub(crate) fn share(sizes: &[usize], most: usize) -> usize {
    let mut sizes = sizes.to_vec();
    sizes.sort_unstable();
    let (mut left, mut count) = (most, sizes.len());
    for size in sizes {
        if size > left / count {
            return left / count;
        }
        (left, count) = (left - size, count - 1);
    }
    most
}

macro_rules! plain {
    ($($kind:literal: $($type:ty),+;)*) => {$($(
        impl Output for $type {
            fn schema() -> Value {
                json!({ "type": $kind })
            }
        }
    )+)*};
}

impl Output for String {
    fn schema() -> Value {
        json!({ "type": "string" })
    }

    fn shorten(&mut self, most: usize) -> usize {
        *self = shortened(self, most);
        0
    }
}

/// Returns three fifths of what fits from the beginning of a text and two fifths from its end, with a line between them
/// that says how much is left out. If the text has such a line already, there is only one afterwards.
fn shortened(text: &str, most: usize) -> String {
    const BEFORE: &str = "… [";
    const AFTER: &str = " bytes left out] …\n";
    let cut = text.split_once(AFTER).and_then(|(before, tail)| {
        let (head, count) = before.rsplit_once(BEFORE)?;
        Some((head, count.parse::<usize>().ok()?, tail))
    });
    let (head, gone, tail) = cut.unwrap_or((text, 0, text));
    // Two quotes, and the line with a number of up to 20 digits and its escaped ends.
    let room = most.saturating_sub(BEFORE.len() + AFTER.len() + 26);
    let head_end = fitting(head.chars(), room / 5 * 3);
    let tail_start = tail.len() - fitting(tail.chars().rev(), room / 5 * 2);
    let tail_start = if cut.is_some() { tail_start } else { tail_start.max(head_end) };
    let gone = gone + if cut.is_some() { head.len() - head_end + tail_start } else { tail_start - head_end };
    let (head, tail) = (&head[..head_end], &tail[tail_start..]);
    let newline = if head.is_empty() || head.ends_with('\n') { "" } else { "\n" };
    format!("{head}{newline}{BEFORE}{gone}{AFTER}{tail}")
}

/// Returns the length in bytes of the first characters that take at most `most` characters in a JSON string.
fn fitting(chars: impl Iterator<Item = char>, most: usize) -> usize {
    let mut left = most;
    let fits = |c: &char| {
        let needed = match c {
            '"' | '\\' | '\n' | '\r' | '\t' => 2,
            '\0'..' ' => 6,
            _ => 1,
        };
        let fits = needed <= left;
        left = left.saturating_sub(needed);
        fits
    };
    chars.take_while(fits).map(char::len_utf8).sum()
}

plain! {
    "string": &'static str;
    "boolean": bool;
    "integer": i32, u32, u64, usize;
    "number": f64;
}

impl<O: Output> Output for Vec<O> {
    fn schema() -> Value {
        json!({ "type": "array", "items": O::schema() })
    }

    /// Keeps the first rows. If not even the first one fits, it is shortened.
    fn shorten(&mut self, most: usize) -> usize {
        let mut left = most.saturating_sub(2);
        let mut fits = |row: &O| {
            let needed = row.written() + 1;
            let fits = needed <= left;
            left = left.saturating_sub(needed);
            fits
        };
        let (all, kept) = (self.len(), self.iter().take_while(|row| fits(row)).count());
        self.truncate(kept.max(1));
        if let Some(first) = self.first_mut().filter(|_| kept == 0) {
            first.shorten(most.saturating_sub(2));
        }
        all - self.len()
    }
}

impl<O: Output> Output for Option<O> {
    const REQUIRED: bool = false;

    fn schema() -> Value {
        O::schema()
    }

    fn is_absent(&self) -> bool {
        self.is_none()
    }

    fn written(&self) -> usize {
        self.as_ref().map_or(0, Output::written)
    }

    fn shorten(&mut self, most: usize) -> usize {
        self.as_mut().map_or(0, |value| value.shorten(most))
    }
}

/// Returns a list for a member that is absent if it is empty.
pub(crate) fn unless_empty<T>(list: Vec<T>) -> Option<Vec<T>> {
    (!list.is_empty()).then_some(list)
}
