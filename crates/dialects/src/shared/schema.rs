//! Output schemas: an object at the root and plain types below it, which every client can read.

use serde_json::{Value, json};

/// Returns the schema of an object that has all these members.
pub(crate) fn object(properties: Value) -> Value {
    let required: Vec<&String> = properties.as_object().into_iter().flat_map(|p| p.keys()).collect();
    json!({ "type": "object", "properties": properties, "required": required })
}

/// Returns the schema of an object in which the members named in `optional` may be absent.
pub(crate) fn object_with(properties: Value, optional: &[&str]) -> Value {
    let mut object = object(properties);
    if let Some(required) = object["required"].as_array_mut() {
        required.retain(|name| name.as_str().is_none_or(|name| !optional.contains(&name)));
    }
    object
}

pub(crate) fn string() -> Value {
    json!({ "type": "string" })
}

pub(crate) fn integer() -> Value {
    json!({ "type": "integer" })
}

pub(crate) fn number() -> Value {
    json!({ "type": "number" })
}

pub(crate) fn boolean() -> Value {
    json!({ "type": "boolean" })
}

pub(crate) fn array(items: Value) -> Value {
    json!({ "type": "array", "items": items })
}
