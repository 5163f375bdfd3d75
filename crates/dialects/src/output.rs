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

macro_rules! plain {
    ($($kind:literal: $($type:ty),+;)*) => {$($(
        impl Output for $type {
            fn schema() -> Value {
                json!({ "type": $kind })
            }
        }
    )+)*};
}

plain! {
    "string": String, &'static str;
    "boolean": bool;
    "integer": i32, u32, u64, usize;
    "number": f64;
}

impl<O: Output> Output for Vec<O> {
    fn schema() -> Value {
        json!({ "type": "array", "items": O::schema() })
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
}

/// Returns a list for a member that is absent if it is empty.
pub(crate) fn unless_empty<T>(list: Vec<T>) -> Option<Vec<T>> {
    (!list.is_empty()).then_some(list)
}
