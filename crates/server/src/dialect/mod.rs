//! A dialect is a table of tools: names, prose, argument schemas, how arguments become an `Op`, how an `Outcome` becomes an
//! answer. Everything here is pure: no state, no clock, no engine, no protocol library.

use std::borrow::Cow;

use engine::op::{EngineError, Op, Outcome};
use serde::Serialize;
use serde_json::{Map, Value, json};

pub mod agentrun;
mod args;
mod prose;
mod time;

pub use args::{ArgError, Args};
pub use time::iso8601;

/// One tool set, as one document describes it.
pub struct Dialect {
    pub id: &'static str,
    pub server_name: &'static str,
    /// The language of the document; used when the operator chose none.
    pub default_lang: Lang,
    pub tools: &'static [ToolRow],
    /// The JSON-RPC code for a tool that does not exist.
    pub unknown_tool_code: i32,
    pub prose_en: &'static str,
    pub prose_zh: &'static str,
    /// Refused arguments, in the dialect's own form.
    pub refuse: fn(&ArgError) -> Answer,
}

/// One tool of a dialect.
pub struct ToolRow {
    pub name: &'static str,
    /// The section of the prose file; differs from `name` where one tool has two forms.
    pub prose: &'static str,
    pub fields: &'static [Field],
    /// Object at the root, nothing but plain types: some clients refuse the whole list otherwise.
    pub output_schema: fn() -> Value,
    pub hints: Hints,
    pub lower: fn(&Args) -> Result<Op, ArgError>,
    pub render: fn(&Args, Outcome) -> Answer,
    pub render_error: fn(&EngineError) -> Answer,
    /// Makes the context that the call needs when it is not there yet; without it the call fails.
    pub missing_context: Option<fn() -> NewContext>,
}

/// A context made on demand.
pub struct NewContext {
    pub name: &'static str,
    pub create: Op,
}

/// One argument. All of them are strings so far.
pub struct Field {
    pub name: &'static str,
    pub required: bool,
    /// The values that are advertised; empty for free text.
    pub choices: &'static [&'static str],
}

#[derive(Debug, Clone, Copy)]
pub struct Hints {
    pub read_only: bool,
    pub destructive: bool,
    pub idempotent: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Lang {
    En,
    Zh,
}

impl std::str::FromStr for Lang {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "en" => Ok(Self::En),
            "zh" => Ok(Self::Zh),
            other => Err(format!("unknown language `{other}`; use `en` or `zh`")),
        }
    }
}

/// What a call gives back: blocks for those who read, an object for those who compute, both with the same facts.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    pub blocks: Vec<Block>,
    /// Fits the tool's output schema unless it is an error.
    pub structured: Value,
    pub is_error: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Block {
    Text(String),
    /// `data` is base64.
    Image {
        data: String,
        mime: &'static str,
    },
}

impl Answer {
    /// The object as JSON with two-space indent in the first block, in the order in which its type declares its members.
    pub fn json<T: Serialize>(object: &T) -> Self {
        let text = serde_json::to_string_pretty(object).expect("answers are plain data");
        let structured = serde_json::to_value(object).expect("answers are plain data");
        Self { blocks: vec![Block::Text(text)], structured, is_error: false }
    }

    pub fn failed(self) -> Self {
        Self { is_error: true, ..self }
    }
}

impl Dialect {
    pub fn find(&self, name: &str) -> Option<&'static ToolRow> {
        self.tools.iter().find(|row| row.name == name)
    }

    /// What the server says about itself to a model, in the chosen language.
    pub fn instructions(&self, lang: Lang) -> Option<&'static str> {
        prose::section(self.prose(lang), "server").map(prose::description)
    }

    pub fn description(&self, row: &ToolRow, lang: Lang) -> &'static str {
        prose::section(self.prose(lang), row.prose).map(prose::description).unwrap_or_default()
    }

    /// The schema as the document prints it: no member of ours.
    pub fn input_schema(&self, row: &ToolRow, lang: Lang) -> Value {
        let section = prose::section(self.prose(lang), row.prose).unwrap_or_default();
        let properties: Map<String, Value> =
            row.fields.iter().map(|field| (field.name.to_owned(), field.schema(section))).collect();
        let required: Vec<&str> = row.fields.iter().filter(|f| f.required).map(|f| f.name).collect();
        json!({ "type": "object", "properties": properties, "required": required })
    }

    fn prose(&self, lang: Lang) -> &'static str {
        match lang {
            Lang::En => self.prose_en,
            Lang::Zh => self.prose_zh,
        }
    }
}

impl Field {
    const fn required(name: &'static str) -> Self {
        Self { name, required: true, choices: &[] }
    }

    const fn optional(name: &'static str) -> Self {
        Self { name, required: false, choices: &[] }
    }

    const fn one_of(name: &'static str, choices: &'static [&'static str]) -> Self {
        Self { name, required: false, choices }
    }

    fn schema(&self, section: &str) -> Value {
        let mut schema =
            json!({ "type": "string", "description": prose::field(section, self.name).unwrap_or_default() });
        if !self.choices.is_empty() {
            schema["enum"] = json!(self.choices);
        }
        schema
    }
}

/// A value of the caller's, short enough to stand in a message.
pub(crate) fn shown(text: &str) -> Cow<'_, str> {
    const MOST: usize = 200;
    match text.char_indices().nth(MOST) {
        Some((cut, _)) => format!("{}… ({} characters)", &text[..cut], text.chars().count()).into(),
        None => text.into(),
    }
}

/// Head and tail of a text over budget, with what is left out named between them.
pub(crate) fn clipped(text: &str, budget: usize) -> Cow<'_, str> {
    let total = text.chars().count();
    if total <= budget {
        return text.into();
    }
    let at = |n: usize| text.char_indices().nth(n).map_or(text.len(), |(i, _)| i);
    let (head, tail) = (&text[..at(budget / 2)], &text[at(total - budget / 2)..]);
    format!("{head}\n… {} characters left out …\n{tail}", total - budget / 2 * 2).into()
}
