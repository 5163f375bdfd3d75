//! Reads the arguments of a dialect that is lenient with models: it accepts other spellings of values and names whose
//! meaning is clear, and refuses everything else with all mistakes at once. It only decides what is meant; each value
//! is then checked as in every dialect. Texts of any length arrive here, so every comparison is bounded.

use serde_json::{Number, Value};
use strsim::damerau_levenshtein;
use text::{cut, shown};

use crate::args::{ArgError, Args, kind};
use crate::operation::Lowered;
use crate::{Field, FieldKind, Options, ToolRow};

/// Other names of arguments, for tools that have the argument. Case, `_` and `-` do not count.
const NAMES: &[(&str, &str)] = &[
    ("cmd", "command"),
    ("contextid", "context"),
    ("directory", "path"),
    ("file", "path"),
    ("filename", "path"),
    ("filepath", "path"),
    ("lang", "language"),
    ("newstr", "new_string"),
    ("oldstr", "old_string"),
    ("ref", "target"),
    ("runid", "run"),
    ("script", "code"),
    ("selector", "target"),
    ("source", "code"),
    ("timeoutseconds", "timeout"),
];

/// Other names of values that an argument can choose from.
const VALUES: &[(&str, &str)] = &[
    ("js", "javascript"),
    ("node", "javascript"),
    ("nodejs", "javascript"),
    ("py", "python"),
    ("python3", "python"),
    ("sh", "bash"),
    ("shell", "bash"),
    ("ts", "typescript"),
];

/// Longest name, number or choice that is compared.
const LONGEST_WORD: usize = 40;
/// Longest text that is read as JSON. An environment is smaller.
const LONGEST_JSON: usize = 128 << 10;
/// Number of unknown arguments that a refusal names.
const MOST_NAMED: usize = 5;

/// Replaces names and values by those that the tool knows, where it is clear which are meant.
pub(crate) fn prepare(row: &ToolRow, args: &mut Args) {
    args.retain(|name, value| row.knows(name) || !is_of_n8n(name, value));
    let unknown = args.keys().filter(|name| !row.knows(name) && name.len() <= LONGEST_WORD);
    for name in unknown.take(row.fields.len()).cloned().collect::<Vec<String>>() {
        let known = word(&name).and_then(|name| same(&name, row.fields.iter().map(|field| field.name), NAMES));
        // A name that differs in case alone stays unknown, as every member of a message does.
        if let Some(known) = known.filter(|known| !args.contains_key(*known) && !known.eq_ignore_ascii_case(&name))
            && let Some(value) = args.remove(&name)
        {
            args.insert(known.to_owned(), value);
        }
    }
    for field in row.fields {
        let is_empty = args.get(field.name).is_some_and(|value| value.is_null() || value.as_str() == Some(""));
        if is_empty && !field.required && (field.check)(args, field.name).is_err() {
            args.remove(field.name);
        }
        if let Some(value) = args.get_mut(field.name) {
            read(field, value);
        }
    }
}

/// Returns whether n8n added an argument to those of the model. Its agents do so unless the schema forbids it.
fn is_of_n8n(name: &str, value: &Value) -> bool {
    matches!(name, "toolCallId" | "sessionId" | "chatInput") || (name == "action" && value == "sendMessage")
}

/// Replaces a value by the one that it spells.
fn read(field: &Field, value: &mut Value) {
    let spelled = match (field.kind, &*value) {
        (FieldKind::Text, Value::String(text)) => {
            word(text).and_then(|text| same(&text, field.choices.iter().copied(), VALUES)).map(Value::from)
        }
        (FieldKind::Flag, Value::String(text)) => match word(text).as_deref() {
            Some("true") => Some(Value::Bool(true)),
            Some("false") => Some(Value::Bool(false)),
            _ => None,
        },
        (FieldKind::Whole, Value::String(text)) if text.len() <= LONGEST_WORD => {
            serde_json::from_str::<Number>(text.trim()).ok().map(Value::Number)
        }
        (FieldKind::TextList, Value::String(text)) => {
            Some(json(text).filter(Value::is_array).unwrap_or_else(|| Value::Array(vec![text.as_str().into()])))
        }
        (FieldKind::TextMap, Value::String(text)) => json(text).filter(Value::is_object),
        _ => None,
    };
    if let Some(spelled) = spelled {
        *value = spelled;
    }
    match value {
        Value::Array(items) if field.kind == FieldKind::TextList => items.iter_mut().for_each(write),
        Value::Object(members) if field.kind == FieldKind::TextMap => members.values_mut().for_each(write),
        _ => {}
    }
}

/// Replaces a whole number or a boolean by its text. Other numbers can be written in several ways.
fn write(value: &mut Value) {
    if value.is_i64() || value.is_u64() || value.is_boolean() {
        *value = value.to_string().into();
    }
}

fn json(text: &str) -> Option<Value> {
    (text.len() <= LONGEST_JSON).then(|| serde_json::from_str(text).ok()).flatten()
}

/// Returns a short text without case, separators and space around it.
fn word(text: &str) -> Option<String> {
    let separates = |c: char| matches!(c, '_' | '-');
    (text.len() <= LONGEST_WORD).then(|| text.trim().to_lowercase().replace(separates, ""))
}

/// Returns the known name that a word spells, directly or by another name.
fn same<'a>(given: &str, mut known: impl Iterator<Item = &'a str>, others: &[(&str, &str)]) -> Option<&'a str> {
    let meant = others.iter().find(|(other, _)| *other == given).map(|(_, name)| *name);
    known.find(|known| meant == Some(*known) || word(known).is_some_and(|known| known == given))
}

/// Returns the known name that was probably meant: one with few other letters, or one that the given name contains.
pub(crate) fn nearest<'a>(given: &str, known: impl Iterator<Item = &'a str> + Clone) -> Option<&'a str> {
    let given = word(given)?;
    let near = known.clone().filter_map(|name| {
        let distance = damerau_levenshtein(&given, &word(name)?);
        (distance <= (name.len() / 3).min(2)).then_some((distance, name))
    });
    let within = known.filter(|name| name.len() > 3 && word(name).is_some_and(|name| given.contains(&name)));
    near.min_by_key(|(distance, _)| *distance).map(|(_, name)| name).or(within.max_by_key(|name| name.len()))
}

/// Converts prepared arguments to an operation, or refuses them with a line for each mistake.
pub(crate) fn lower(row: &ToolRow, args: &Args, options: &Options) -> Result<Lowered, ArgError> {
    let unknown: Vec<&str> = args.keys().map(String::as_str).filter(|name| !row.knows(name)).collect();
    let refused = match unknown.is_empty().then(|| (row.lower)(args, options)) {
        Some(Ok(lowered)) => return Ok(lowered),
        Some(Err(refused)) => Some(refused.message),
        None => None,
    };
    let mut mistakes: Vec<String> = row.fields.iter().filter_map(|field| mistake(field, args, options)).collect();
    if mistakes.is_empty() {
        mistakes.extend(refused);
    }
    mistakes.extend(unknown.iter().take(MOST_NAMED).map(|name| {
        let hint = nearest(name, row.fields.iter().map(|field| field.name));
        let hint = hint.map(|known| format!("; did you mean {known}?")).unwrap_or_default();
        format!("{} is no argument of {}{hint}", cut(name, LONGEST_WORD), row.name)
    }));
    if unknown.len() > MOST_NAMED {
        mistakes.push(format!("{} more are no arguments of {}", unknown.len() - MOST_NAMED, row.name));
    }
    if !unknown.is_empty() {
        mistakes.push(takes(row));
    }
    Err(ArgError::new(mistakes.join("\n")))
}

/// Lists the arguments of a tool.
fn takes(row: &ToolRow) -> String {
    let list = |required: bool| {
        let names: Vec<&str> = row.fields.iter().filter(|f| f.required == required).map(|f| f.name).collect();
        names.join(", ")
    };
    match (list(true).as_str(), list(false).as_str()) {
        ("", "") => format!("{} takes no arguments", row.name),
        (required, "") => format!("{} takes {required}", row.name),
        ("", optional) => format!("{} takes, all optional: {optional}", row.name),
        (required, optional) => format!("{} takes {required}; optional: {optional}", row.name),
    }
}

/// Says what is wrong with the value of a field: what it may be, what was given, and what was probably meant.
fn mistake(field: &Field, args: &Args, options: &Options) -> Option<String> {
    let message = (field.check)(args, field.name).err()?.message;
    let Some(value) = args.get(field.name) else { return Some(message) };
    let given = match value {
        Value::String(text) => format!("'{}'", shown(text)),
        Value::Bool(_) | Value::Number(_) => value.to_string(),
        other => kind(other).to_owned(),
    };
    let Some(wanted) = message.strip_suffix(&format!(", got {}", kind(value))) else {
        let hint = value.as_str().and_then(|text| nearest(text, field.choices.iter().copied()));
        return Some(match hint {
            Some(choice) => format!("{message}; did you mean '{choice}'?"),
            None => message,
        });
    };
    let allowed = match (field.bounds, field.range) {
        (Some((least, most)), _) => format!(" from {least} to {most}"),
        (None, Some(range)) => format!(" [{}]", range(options)),
        (None, None) if !field.choices.is_empty() => format!(", one of {}", field.choices.join(", ")),
        (None, None) => String::new(),
    };
    Some(format!("{wanted}{allowed}, got {given}"))
}
