//! Reads arguments. Each refusal names the field. Wrong types are never coerced, `null` is a wrong type, and a field
//! that the tool does not know is ignored.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;

use serde_json::{Map, Value};
use text::shown;

pub type Args = Map<String, Value>;

/// Refusal of arguments: an error code of the dialect and a message for the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArgError {
    pub code: &'static str,
    pub message: String,
}

/// Reason why a field was refused; it contains the field's name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FieldError(pub String);

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Conversion for dialects that have one form for all refusals.
impl From<FieldError> for ArgError {
    fn from(refused: FieldError) -> Self {
        Self { code: "INVALID_PARAMS", message: refused.0 }
    }
}

fn refused<T>(why: String) -> Result<T, FieldError> {
    Err(FieldError(why))
}

fn wrong<T>(field: impl fmt::Display, wanted: &str, got: &Value) -> Result<T, FieldError> {
    refused(format!("{field} must be {wanted}, got {}", kind(got)))
}

/// Returns the text of a field, which may be empty, or `None` if the field is absent.
pub(super) fn text<'a>(args: &'a Args, field: &str) -> Result<Option<&'a str>, FieldError> {
    match args.get(field) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(other) => wrong(field, "a string", other),
    }
}

/// Returns the text of a required field, which may be empty.
pub(super) fn given<'a>(args: &'a Args, field: &str) -> Result<&'a str, FieldError> {
    text(args, field)?.ok_or_else(|| FieldError(format!("{field} is required")))
}

/// Returns the text of a required field, which must not be empty.
pub(super) fn required<'a>(args: &'a Args, field: &str) -> Result<&'a str, FieldError> {
    match given(args, field)? {
        "" => refused(format!("{field} is required")),
        text => Ok(text),
    }
}

/// Returns the text of an optional field, which must not be empty if it is given.
pub(super) fn filled<'a>(args: &'a Args, field: &str) -> Result<Option<&'a str>, FieldError> {
    match text(args, field)? {
        Some("") => refused(format!("{field} cannot be empty; leave it out instead")),
        text => Ok(text),
    }
}

/// Returns the value that stands beside the given text in `choices`.
pub(super) fn choice<T: Copy>(args: &Args, field: &str, choices: &[(&str, T)]) -> Result<Option<T>, FieldError> {
    let Some(text) = text(args, field)? else { return Ok(None) };
    match choices.iter().find(|(name, _)| *name == text) {
        Some((_, value)) => Ok(Some(*value)),
        None => {
            let names: Vec<String> = choices.iter().map(|(name, _)| format!("'{name}'")).collect();
            refused(format!("{field} must be one of {}, got '{}'", names.join(", "), shown(text)))
        }
    }
}

pub(super) fn flag(args: &Args, field: &str) -> Result<Option<bool>, FieldError> {
    match args.get(field) {
        None => Ok(None),
        Some(Value::Bool(flag)) => Ok(Some(*flag)),
        Some(other) => wrong(field, "true or false", other),
    }
}

/// Returns a whole number. `5.0` is one, as in JSON Schema.
pub(super) fn whole(args: &Args, field: &str, range: RangeInclusive<u64>) -> Result<Option<u64>, FieldError> {
    let number = match args.get(field) {
        None => return Ok(None),
        Some(Value::Number(number)) => number,
        Some(other) => return wrong(field, "a whole number", other),
    };
    // Above 2^53 a float cannot represent every whole number; no argument needs one that large.
    let exact = |float: f64| (float.fract() == 0.0 && (0.0..9_007_199_254_740_992.0).contains(&float)).then_some(float);
    let value = number.as_u64().or_else(|| number.as_f64().and_then(exact).map(|float| float as u64));
    match value {
        Some(value) if range.contains(&value) => Ok(Some(value)),
        _ => refused(format!(
            "{field} must be a whole number from {} to {}, got {}",
            range.start(),
            range.end(),
            shown(&number.to_string())
        )),
    }
}

pub(super) fn text_list(args: &Args, field: &str) -> Result<Option<Vec<String>>, FieldError> {
    let items = match args.get(field) {
        None => return Ok(None),
        Some(Value::Array(items)) => items,
        Some(other) => return wrong(field, "an array of strings", other),
    };
    let text = |(at, item): (usize, &Value)| match item {
        Value::String(text) => Ok(text.clone()),
        other => wrong(format_args!("{field}[{at}]"), "a string", other),
    };
    items.iter().enumerate().map(text).collect::<Result<_, _>>().map(Some)
}

pub(super) fn text_map(args: &Args, field: &str) -> Result<Option<BTreeMap<String, String>>, FieldError> {
    let members = match args.get(field) {
        None => return Ok(None),
        Some(Value::Object(members)) => members,
        Some(other) => return wrong(field, "an object of strings", other),
    };
    let text = |(name, value): (&String, &Value)| match value {
        Value::String(text) => Ok((name.clone(), text.clone())),
        other => wrong(format_args!("{field}.{}", shown(name)), "a string", other),
    };
    members.iter().map(text).collect::<Result<_, _>>().map(Some)
}

/// Checks a name or an id that the caller chose: 1 to 128 letters of any script, digits, `-`, `_` and `.`. Returns the
/// reason if it is not valid.
pub(super) fn check_name(name: &str) -> Result<(), &'static str> {
    if name.is_empty() || !name.chars().all(|c| c.is_alphanumeric() || matches!(c, '-' | '_' | '.')) {
        return Err("cannot be empty or contain special characters");
    }
    if name.chars().count() > 128 {
        return Err("cannot be longer than 128 characters");
    }
    Ok(())
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn args(value: Value) -> Args {
        let Value::Object(args) = json!({ "f": value }) else { unreachable!() };
        args
    }

    #[test]
    fn whole_numbers_are_whole_and_in_range() {
        let read = |value| whole(&args(value), "f", 1..=300);
        assert_eq!(read(json!(1)), Ok(Some(1)));
        assert_eq!(read(json!(300.0)), Ok(Some(300)));
        assert_eq!(whole(&Args::new(), "f", 1..=300), Ok(None));
        for wrong in [json!(0), json!(301), json!(-1), json!(1.5), json!(1e300), json!(9_007_199_254_740_993_u64)] {
            let why = read(wrong.clone()).unwrap_err().0;
            assert_eq!(why, format!("f must be a whole number from 1 to 300, got {wrong}"));
        }
        assert_eq!(read(json!("1")).unwrap_err().0, "f must be a whole number, got a string");
        assert_eq!(read(json!(null)).unwrap_err().0, "f must be a whole number, got null");
    }

    #[test]
    fn texts_in_lists_and_objects_are_named_by_their_place() {
        assert_eq!(text_list(&args(json!(["a", ""])), "f"), Ok(Some(vec!["a".into(), String::new()])));
        assert_eq!(text_list(&args(json!(["a", 1])), "f").unwrap_err().0, "f[1] must be a string, got a number");
        assert_eq!(text_list(&args(json!({})), "f").unwrap_err().0, "f must be an array of strings, got an object");
        assert_eq!(text_map(&args(json!({ "A": "b" })), "f").unwrap().unwrap()["A"], "b");
        assert_eq!(text_map(&args(json!({ "A": null })), "f").unwrap_err().0, "f.A must be a string, got null");
        assert_eq!(text_map(&args(json!([])), "f").unwrap_err().0, "f must be an object of strings, got an array");
    }

    #[test]
    fn a_choice_names_all_of_them() {
        let choices = [("one", 1), ("two", 2)];
        assert_eq!(choice(&args(json!("two")), "f", &choices), Ok(Some(2)));
        let why = choice(&args(json!("Two")), "f", &choices).unwrap_err().0;
        assert_eq!(why, "f must be one of 'one', 'two', got 'Two'");
    }

    #[test]
    fn empty_is_not_the_same_as_absent() {
        assert_eq!(required(&args(json!("")), "f").unwrap_err().0, "f is required");
        assert_eq!(filled(&args(json!("")), "f").unwrap_err().0, "f cannot be empty; leave it out instead");
        assert_eq!(filled(&Args::new(), "f"), Ok(None));
        assert_eq!(given(&args(json!("")), "f"), Ok(""));
        assert_eq!(given(&args(json!(null)), "f").unwrap_err().0, "f must be a string, got null");
        assert_eq!(flag(&args(json!(0)), "f").unwrap_err().0, "f must be true or false, got a number");
    }
}
