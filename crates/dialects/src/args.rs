//! Reads arguments. One struct for each tool declares them with [`args!`]; the types of its members say how the schema
//! describes an argument and how its value is read. Each refusal names the field. Wrong types are never coerced, `null`
//! is a wrong type, and a field that the tool does not know is ignored; [`crate::lenient`] prepares the arguments of a
//! dialect where that differs.

use std::ops::RangeInclusive;
use std::time::Duration;

use engine::op::browser::MouseButton;
use engine::op::{Environment, Language, Size};
use serde_json::{Map, Number, Value};
use text::shown;

use crate::shared::files::Encoding;
use crate::{Field, FieldKind, Options};

pub type Args = Map<String, Value>;

/// The refusal of arguments, with an error code of the dialect and a message for the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArgError {
    pub code: &'static str,
    pub message: String,
}

impl ArgError {
    /// The code of a refusal that needs no special one. Dialects with codes replace it by theirs.
    pub(crate) const INVALID: &'static str = "INVALID_ARGUMENT";

    /// Creates a refusal whose message contains the field's name.
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self { code: Self::INVALID, message: message.into() }
    }
}

/// Describes and reads the arguments of one tool. [`args!`] implements it.
pub(crate) trait Arguments: Sized {
    const FIELDS: &'static [Field];

    /// Reads the arguments in the order in which they are declared.
    fn parse(args: &Args) -> Result<Self, ArgError>;
}

/// Declares the arguments of tools. An argument whose name is not a name in Rust is written `member as "name"`. A
/// function after `=` returns the default value that the schema names.
macro_rules! args {
    ($(
        $(#[$meta:meta])*
        struct $name:ident {
            $($(#[$doc:meta])* $field:ident $(as $wire:literal)?: $type:ty $(= $default:expr)?),* $(,)?
        }
    )*) => {$(
        $(#[$meta])*
        pub(super) struct $name {
            $($(#[$doc])* $field: $type),*
        }

        impl $crate::args::Arguments for $name {
            const FIELDS: &'static [$crate::Field] = &[$($crate::Field {
                $(default: Some($default),)?
                ..$crate::Field::of::<$type>($crate::args::wire_name!($field $($wire)?))
            }),*];

            fn parse(_args: &$crate::Args) -> Result<Self, $crate::ArgError> {
                Ok(Self { $($field: $crate::args::read(_args, $crate::args::wire_name!($field $($wire)?))?),* })
            }
        }
    )*};
}

/// Returns the name of a member in JSON.
macro_rules! wire_name {
    ($field:ident) => {
        stringify!($field)
    };
    ($field:ident $wire:literal) => {
        $wire
    };
}

/// Makes a type an argument that has one of several values, each with its name.
macro_rules! choices {
    ($type:ty { $($name:literal => $value:expr),* $(,)? }) => {
        impl $crate::args::Argument for $type {
            const CHOICES: &'static [&'static str] = &[$($name),*];

            fn parse(field: &str, value: &serde_json::Value) -> Result<Self, $crate::ArgError> {
                $crate::args::choice(field, value, &[$(($name, $value)),*])
            }
        }
    };
}

pub(crate) use {args, choices, wire_name};

/// Describes and reads one argument. Its implementations are the types that an argument can have.
pub(crate) trait Argument: Sized {
    const KIND: FieldKind = FieldKind::Text;
    const REQUIRED: bool = true;
    /// The values that the schema names; empty for free text.
    const CHOICES: &'static [&'static str] = &[];
    /// The least and the greatest number, if they are fixed.
    const BOUNDS: Option<(u64, u64)> = None;
    /// The range that the operator sets, for the description of the argument.
    const RANGE: Option<fn(&Options) -> String> = None;
    /// Whether an empty text counts as absent, and is refused even if the argument is optional.
    const FILLED: bool = false;

    fn parse(field: &str, value: &Value) -> Result<Self, ArgError>;

    fn absent(field: &str) -> Result<Self, ArgError> {
        refused(format!("{field} is required"))
    }
}

pub(crate) fn read<A: Argument>(args: &Args, field: &str) -> Result<A, ArgError> {
    args.get(field).map_or_else(|| A::absent(field), |value| A::parse(field, value))
}

/// Checks one argument without the others.
pub(crate) fn check<A: Argument>(args: &Args, field: &str) -> Result<(), ArgError> {
    read::<A>(args, field).map(|_| ())
}

fn refused<T>(why: String) -> Result<T, ArgError> {
    Err(ArgError::new(why))
}

fn wrong<T>(field: &str, wanted: &str, got: &Value) -> Result<T, ArgError> {
    refused(format!("{field} must be {wanted}, got {}", kind(got)))
}

/// An optional argument is `None` if it is absent.
impl<A: Argument> Argument for Option<A> {
    const KIND: FieldKind = A::KIND;
    const REQUIRED: bool = false;
    const CHOICES: &'static [&'static str] = A::CHOICES;
    const BOUNDS: Option<(u64, u64)> = A::BOUNDS;
    const RANGE: Option<fn(&Options) -> String> = A::RANGE;

    fn parse(field: &str, value: &Value) -> Result<Self, ArgError> {
        match value.as_str() {
            Some("") if A::FILLED => refused(format!("{field} cannot be empty; leave it out instead")),
            _ => A::parse(field, value).map(Some),
        }
    }

    fn absent(_: &str) -> Result<Self, ArgError> {
        Ok(None)
    }
}

/// A `String` is a text that is not empty.
impl Argument for String {
    const FILLED: bool = true;

    fn parse(field: &str, value: &Value) -> Result<Self, ArgError> {
        match text(field, value)? {
            "" => Self::absent(field),
            text => Ok(text.to_owned()),
        }
    }
}

/// Holds a text that may be empty.
#[derive(Debug, PartialEq)]
pub(crate) struct AnyText(pub String);

impl Argument for AnyText {
    fn parse(field: &str, value: &Value) -> Result<Self, ArgError> {
        text(field, value).map(|text| Self(text.to_owned()))
    }
}

pub(crate) fn text<'a>(field: &str, value: &'a Value) -> Result<&'a str, ArgError> {
    value.as_str().map_or_else(|| wrong(field, "a string", value), Ok)
}

/// Returns the value that has the given name in `choices`.
pub(crate) fn choice<T: Copy>(field: &str, value: &Value, choices: &[(&str, T)]) -> Result<T, ArgError> {
    let text = text(field, value)?;
    let named = choices.iter().find(|(name, _)| *name == text);
    named.map(|(_, value)| *value).ok_or_else(|| {
        let names: Vec<String> = choices.iter().map(|(name, _)| format!("'{name}'")).collect();
        ArgError::new(format!("{field} must be one of {}, got '{}'", names.join(", "), shown(text)))
    })
}

choices!(Language {
    "python" => Language::Python,
    "javascript" => Language::Javascript,
    "typescript" => Language::Typescript,
});
choices!(Size { "small" => Size::Small, "medium" => Size::Medium, "large" => Size::Large });
choices!(Encoding { "utf-8" => Encoding::Utf8, "base64" => Encoding::Base64 });
choices!(MouseButton { "left" => MouseButton::Left, "right" => MouseButton::Right, "middle" => MouseButton::Middle });

/// A flag is false if it is absent.
impl Argument for bool {
    const KIND: FieldKind = FieldKind::Flag;
    const REQUIRED: bool = false;

    fn parse(field: &str, value: &Value) -> Result<Self, ArgError> {
        value.as_bool().map_or_else(|| wrong(field, "true or false", value), Ok)
    }

    fn absent(_: &str) -> Result<Self, ArgError> {
        Ok(false)
    }
}

/// Holds a whole number in a range. `5.0` is one, as in JSON Schema.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Whole<const LEAST: u64, const MOST: u64>(pub u64);

/// A number of things. Every client can write its upper bound exactly.
pub(crate) type Count = Whole<1, { 1 << 52 }>;

impl<const LEAST: u64, const MOST: u64> Argument for Whole<LEAST, MOST> {
    const KIND: FieldKind = FieldKind::Whole;
    const BOUNDS: Option<(u64, u64)> = Some((LEAST, MOST));

    fn parse(field: &str, value: &Value) -> Result<Self, ArgError> {
        whole(field, number(field, value)?, LEAST..=MOST).map(Self)
    }
}

/// Holds a number of seconds, whose limit depends on the operator and on other arguments.
pub(crate) struct Timeout(Number);

impl Argument for Timeout {
    const KIND: FieldKind = FieldKind::Whole;

    fn parse(field: &str, value: &Value) -> Result<Self, ArgError> {
        number(field, value).cloned().map(Self)
    }
}

impl Timeout {
    pub(crate) fn up_to(timeout: Option<Self>, most: u64) -> Result<Option<Duration>, ArgError> {
        timeout.map(|Self(number)| whole("timeout", &number, 1..=most).map(Duration::from_secs)).transpose()
    }
}

fn number<'a>(field: &str, value: &'a Value) -> Result<&'a Number, ArgError> {
    value.as_number().map_or_else(|| wrong(field, "a whole number", value), Ok)
}

fn whole(field: &str, number: &Number, range: RangeInclusive<u64>) -> Result<u64, ArgError> {
    // Above 2^53 a float cannot represent every whole number; no argument needs one that large.
    let exact = |float: f64| (float.fract() == 0.0 && (0.0..9_007_199_254_740_992.0).contains(&float)).then_some(float);
    let value = number.as_u64().or_else(|| number.as_f64().and_then(exact).map(|float| float as u64));
    value.filter(|value| range.contains(value)).ok_or_else(|| {
        let (least, most, got) = (range.start(), range.end(), number.to_string());
        ArgError::new(format!("{field} must be a whole number from {least} to {most}, got {}", shown(&got)))
    })
}

impl Argument for Vec<String> {
    const KIND: FieldKind = FieldKind::TextList;
    const REQUIRED: bool = false;

    fn parse(field: &str, value: &Value) -> Result<Self, ArgError> {
        let Value::Array(items) = value else { return wrong(field, "an array of strings", value) };
        let text = |(at, item)| text(&format!("{field}[{at}]"), item).map(str::to_owned);
        items.iter().enumerate().map(text).collect()
    }

    fn absent(_: &str) -> Result<Self, ArgError> {
        Ok(Self::new())
    }
}

impl Argument for Environment {
    const KIND: FieldKind = FieldKind::TextMap;
    const REQUIRED: bool = false;

    fn parse(field: &str, value: &Value) -> Result<Self, ArgError> {
        let Value::Object(members) = value else { return wrong(field, "an object of strings", value) };
        let text = |(name, value): (&String, _)| {
            text(&format!("{field}.{}", shown(name)), value).map(|text| (name.clone(), text.to_owned()))
        };
        members.iter().map(text).collect::<Result<_, _>>().map(Self)
    }

    fn absent(_: &str) -> Result<Self, ArgError> {
        Ok(Self::default())
    }
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

/// Holds an id that the caller chose.
pub(crate) struct ChosenId(pub String);

impl Argument for ChosenId {
    const FILLED: bool = true;

    fn parse(field: &str, value: &Value) -> Result<Self, ArgError> {
        let id = String::parse(field, value)?;
        match check_name(&id) {
            Ok(()) => Ok(Self(id)),
            Err(why) => refused(format!("{field} {why}: use letters, digits, '-', '_' and '.', got '{}'", shown(&id))),
        }
    }
}

/// Names the type of a value.
pub(crate) fn kind(value: &Value) -> &'static str {
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

    fn given<A: Argument>(value: Value) -> Result<A, String> {
        let Value::Object(args) = json!({ "f": value }) else { unreachable!() };
        read(&args, "f").map_err(|refused| refused.message)
    }

    fn absent<A: Argument>() -> Result<A, String> {
        read(&Args::new(), "f").map_err(|refused| refused.message)
    }

    fn why<A: Argument>(value: Value) -> String {
        given::<A>(value).err().unwrap()
    }

    #[test]
    fn whole_numbers_are_whole_and_in_range() {
        type Number = Whole<1, 300>;
        assert_eq!(given(json!(1)), Ok(Whole::<1, 300>(1)));
        assert_eq!(given(json!(300.0)), Ok(Whole::<1, 300>(300)));
        assert_eq!(absent::<Option<Number>>(), Ok(None));
        for wrong in [json!(0), json!(301), json!(-1), json!(1.5), json!(1e300), json!(9_007_199_254_740_993_u64)] {
            assert_eq!(why::<Number>(wrong.clone()), format!("f must be a whole number from 1 to 300, got {wrong}"));
        }
        assert_eq!(why::<Number>(json!("1")), "f must be a whole number, got a string");
        assert_eq!(why::<Number>(json!(null)), "f must be a whole number, got null");
    }

    #[test]
    fn texts_in_lists_and_objects_are_named_by_their_place() {
        type List = Vec<String>;
        assert_eq!(given(json!(["a", ""])), Ok(vec!["a".to_owned(), String::new()]));
        assert_eq!(why::<List>(json!(["a", 1])), "f[1] must be a string, got a number");
        assert_eq!(why::<List>(json!({})), "f must be an array of strings, got an object");
        assert_eq!(given::<Environment>(json!({ "A": "b" })).unwrap().0["A"], "b");
        assert_eq!(why::<Environment>(json!({ "A": null })), "f.A must be a string, got null");
        assert_eq!(why::<Environment>(json!([])), "f must be an object of strings, got an array");
    }

    #[test]
    fn a_choice_names_all_of_them() {
        assert_eq!(given(json!("large")), Ok(Size::Large));
        assert_eq!(why::<Option<Size>>(json!("Large")), "f must be one of 'small', 'medium', 'large', got 'Large'");
    }

    #[test]
    fn empty_is_not_the_same_as_absent() {
        assert_eq!(why::<String>(json!("")), "f is required");
        assert_eq!(absent::<String>(), Err("f is required".into()));
        assert_eq!(why::<Option<String>>(json!("")), "f cannot be empty; leave it out instead");
        assert_eq!(absent::<Option<String>>(), Ok(None));
        assert_eq!(given(json!("")), Ok(AnyText(String::new())));
        assert_eq!(why::<AnyText>(json!(null)), "f must be a string, got null");
        assert_eq!(why::<bool>(json!(0)), "f must be true or false, got a number");
        assert_eq!(absent::<bool>(), Ok(false));
    }
}
