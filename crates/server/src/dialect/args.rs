//! Reading arguments: each refusal names the field. Wrong types are never coerced.

use serde_json::{Map, Value};

pub type Args = Map<String, Value>;

/// Arguments refused: a code of the dialect and a message for the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArgError {
    pub code: &'static str,
    pub message: String,
}

/// The text of a field, `None` when it is not given, or why it is not text.
pub(super) fn text<'a>(args: &'a Args, field: &str) -> Result<Option<&'a str>, String> {
    match args.get(field) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(other) => Err(format!("{field} must be a string, got {}", kind(other))),
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}
