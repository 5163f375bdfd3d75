//! What holds for every tool of every dialect, read from the tables.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use dialects::{ArgError, Block, Dialect, Field, FieldKind, Lang, Links, Options, RenderInput, Reply, ToolRow};
use engine::op::{Op, Waiting};
use serde_json::{Map, Value, json};

/// Each in every form in which it can be offered.
fn dialects() -> Vec<&'static Dialect> {
    let plain = Options::default();
    let other = Options { default_context: true, underscores: true, ..Options::default() };
    let mut all: Vec<&Dialect> = dialects::all(&plain).collect();
    all.extend(dialects::all(&other).filter(|other| !dialects::all(&plain).any(|plain| std::ptr::eq(plain, *other))));
    all
}

#[test]
fn every_dialect_is_found_by_its_id_in_the_form_that_was_chosen() {
    for id in dialects::IDS {
        assert_eq!(dialects::find(id, &Options::default()).unwrap().id, *id);
    }
    assert!(dialects::find("nonsense", &Options::default()).is_none());
    assert_eq!(dialects().len(), dialects::IDS.len() + 2);
}

/// Only the document of `agentrun` calls the permits of runs sessions.
#[test]
fn a_call_that_waits_for_a_permit_is_told_so_in_the_words_of_its_dialect() {
    for dialect in dialects() {
        let said = (dialect.waiting)(&Waiting::Permits(3));
        match dialect.id {
            "agentrun" => assert_eq!(said, "all 3 sessions are busy"),
            id => assert!(said.contains("other runs use all that may run at once"), "{id}: {said}"),
        }
    }
}

#[test]
fn every_tool_and_every_field_has_prose_in_both_languages() {
    for dialect in dialects() {
        for lang in [Lang::En, Lang::Zh] {
            assert!(dialect.instructions(lang).is_some(), "{}", dialect.id);
            for row in dialect.tools {
                let name = format!("{} {} {lang:?}", dialect.id, row.name);
                assert!(!dialect.description(row, lang).is_empty(), "{name}");
                let schema = dialect.input_schema(row, lang, &Options::default());
                for (field, property) in schema.get("properties").and_then(Value::as_object).into_iter().flatten() {
                    // The document prints none there.
                    let is_printed =
                        (dialect.id, row.name, field.as_str()) != ("microsandbox", "execute_code", "flavor");
                    if is_printed && !is_explained(dialect, row, lang, field) {
                        assert!(!property["description"].as_str().unwrap_or_default().is_empty(), "{name} {field}");
                    }
                }
            }
        }
    }
}

/// In `sandpool` a field needs no words of its own if the description of its tool names it, or if `run_code` describes it.
fn is_explained(dialect: &Dialect, row: &ToolRow, lang: Lang, field: &str) -> bool {
    let words = dialect.description(row, lang);
    let is_named = || words.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').any(|word| word == field);
    let as_in_run_code = || ["context", "env", "network", "background"].contains(&field) && row.name != "run_code";
    dialect.id == "sandpool" && (is_named() || as_in_run_code())
}

/// What breaks clients and model providers, in either schema.
#[test]
fn schemas_are_plain() {
    const PLAIN: [&str; 8] =
        ["type", "properties", "required", "items", "description", "enum", "default", "additionalProperties"];
    fn check(schema: &Value) {
        for (key, value) in schema.as_object().unwrap() {
            assert!(PLAIN.contains(&key.as_str()), "{key}");
            match key.as_str() {
                "type" => assert!(value.is_string(), "{value}"),
                "additionalProperties" => assert_eq!(*value, json!({ "type": "string" })),
                "properties" => value.as_object().unwrap().values().for_each(check),
                "items" => check(value),
                _ => {}
            }
        }
    }
    for dialect in dialects() {
        for row in dialect.tools {
            if let Some(output) = dialect.output_schema(row) {
                assert_eq!(output["type"], "object");
                check(&output);
            }
            check(&dialect.input_schema(row, Lang::En, &Options::default()));
            // Dots are the document's own; hosts that refuse them have the other form.
            let dots = dialect.id == "conversation" && row.name.contains('.');
            let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || (dots && c == '.');
            assert!(row.name.chars().all(plain) && row.name.len() <= 64, "{}", row.name);
        }
    }
}

/// What a model reads of the list of tools, a sentence a line: a changed sentence is a changed line.
/// The start is logged in the words of one document only in its own dialect.
#[test]
fn only_agentrun_starts_in_its_own_words() {
    let step = engine::StartupStep::Begun { id: "abc123def456" };
    for dialect in dialects() {
        let lines = (dialect.startup)(&step);
        assert_eq!(
            lines.first().is_some_and(|line| line.starts_with("AgentRun")),
            dialect.id == "agentrun",
            "{lines:?}"
        );
    }
}

#[test]
fn the_prose_of_the_tools() {
    for dialect in dialects::all(&Options::default()) {
        for lang in [Lang::En, Lang::Zh] {
            let mut text = sentences(dialect.instructions(lang).unwrap());
            for row in dialect.tools {
                write!(text, "\n## {}\n{}", row.name, sentences(dialect.description(row, lang))).unwrap();
                for (field, description) in descriptions(&dialect.input_schema(row, lang, &Options::default())) {
                    write!(text, "- {field}: {}", sentences(&description)).unwrap();
                }
                for (field, description) in
                    dialect.output_schema(row).map_or_else(Vec::new, |schema| descriptions(&schema))
                {
                    write!(text, "- answer, {field}: {}", sentences(&description)).unwrap();
                }
            }
            insta::assert_snapshot!(format!("the_prose_of_{}_{lang:?}", dialect.id).to_lowercase(), text);
        }
    }
}

/// What a client checks calls and answers against, without the prose, so the same in every language.
#[test]
fn the_schemas_of_the_tools() {
    for dialect in dialects::all(&Options::default()) {
        let mut text = String::new();
        for row in dialect.tools {
            let [input, other] =
                [Lang::En, Lang::Zh].map(|lang| without_prose(dialect.input_schema(row, lang, &Options::default())));
            assert_eq!(input, other, "{}", row.name);
            writeln!(text, "## {}\n{:?}\ninput {input:#}", row.name, row.hints).unwrap();
            match dialect.output_schema(row) {
                Some(schema) => writeln!(text, "output {:#}\n", without_prose(schema)).unwrap(),
                None => writeln!(text, "no output schema\n").unwrap(),
            }
        }
        insta::assert_snapshot!(format!("the_schemas_of_{}", dialect.id), text);
    }
}

/// Each sentence on a line; the second and later ones of a paragraph are indented.
fn sentences(text: &str) -> String {
    let mut lines = String::new();
    for paragraph in text.lines() {
        let broken = paragraph.replace(". ", ".\n  ").replace('\u{3002}', "\u{3002}\n  ");
        writeln!(lines, "{}", broken.trim_end()).unwrap();
    }
    lines
}

/// The fields of a schema that have a description, with those of objects and lists inside it.
fn descriptions(schema: &Value) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for (name, field) in schema.get("properties").and_then(Value::as_object).into_iter().flatten() {
        found.extend(field["description"].as_str().map(|text| (name.clone(), text.to_owned())));
        for inner in [Some(field), field.get("items")].into_iter().flatten() {
            found.extend(descriptions(inner).into_iter().map(|(path, text)| (format!("{name}.{path}"), text)));
        }
    }
    found
}

/// A schema without its descriptions. A property may be called so, too; then its value is no text.
fn without_prose(mut schema: Value) -> Value {
    match &mut schema {
        Value::Object(map) => {
            map.retain(|key, value| key != "description" || !value.is_string());
            map.values_mut().for_each(|value| *value = without_prose(value.take()));
        }
        Value::Array(values) => values.iter_mut().for_each(|value| *value = without_prose(value.take())),
        _ => {}
    }
    schema
}

/// A value that the field takes.
fn right(field: &Field) -> Value {
    match field.kind {
        // A name, a path, code, and base64 all the same.
        FieldKind::Text => json!(field.choices.first().unwrap_or(&"YWFh")),
        FieldKind::Flag => json!(false),
        FieldKind::Whole => json!(1),
        FieldKind::TextList => json!(["a"]),
        FieldKind::TextMap => json!({ "A": "a" }),
    }
}

fn wrong(dialect: &Dialect, row: &ToolRow, field: &Field) -> Vec<Value> {
    let precise = json!(9_007_199_254_740_993_u64);
    let mut values = vec![json!(null)];
    match field.kind {
        FieldKind::Text => {
            values.extend([json!(0), json!(-1), precise, json!(1.5), json!(1e300), json!(true)]);
            values.extend([json!([]), json!({}), json!(["a"])]);
            if !may_be_empty(dialect, row, field) {
                values.push(json!(""));
            }
            if !field.choices.is_empty() {
                values.extend([json!("nonsense"), json!(field.choices[0].to_uppercase())]);
            }
        }
        FieldKind::Flag => values.extend([json!(0), json!(1), json!("true"), json!(""), json!([]), json!({})]),
        FieldKind::Whole => {
            values.extend([json!("1"), json!(""), json!(-1), json!(1e300), json!(true), json!([]), json!({})]);
            if field.kind == FieldKind::Whole {
                values.push(json!(1.5));
            }
            // Positions in a stream may be large; nothing else may.
            if !["cursor", "offset"].contains(&field.name) {
                values.push(precise);
            }
        }
        FieldKind::TextList => {
            values.extend([json!("a"), json!(""), json!(0), json!(true), json!({}), json!([1]), json!([null])]);
        }
        FieldKind::TextMap => {
            values.extend([json!("a"), json!(""), json!(0), json!([]), json!({ "A": 1 }), json!({ "A": null })]);
        }
    }
    values.retain(|value| !(dialect.lenient && is_clear(field, value)));
    values
}

/// Whether a lenient dialect accepts the value.
fn is_clear(field: &Field, value: &Value) -> bool {
    let absent = !field.required && (value.is_null() || value == "");
    let spelled = match field.kind {
        FieldKind::Text => field.choices.iter().any(|choice| value == &choice.to_uppercase()),
        FieldKind::Flag => value == "true",
        FieldKind::Whole => value == "1",
        FieldKind::TextList => *value == json!([1]) || value.as_str().is_some_and(|text| !text.is_empty()),
        FieldKind::TextMap => *value == json!({ "A": 1 }),
    };
    absent || spelled
}

/// Files without content, and texts that say nothing.
fn may_be_empty(dialect: &Dialect, row: &ToolRow, field: &Field) -> bool {
    matches!(field.name, "content" | "new_string")
        || (dialect.id, row.name, field.name) == ("agentrun", "create_context", "description")
        || (dialect.id, row.name, field.name) == ("workbench", "browser_type", "text")
        || (dialect.id, row.name, field.name) == ("sandpool", "browser_act", "text")
}

/// A04: every wrong value for every field of every tool is refused in the dialect's form, with the field's name.
/// (`1e309` arrives here as `null`, `NaN` not at all: both are the transport's.)
#[test]
fn wrong_values_are_refused_with_the_field_s_name() {
    let mut tried = 0;
    for dialect in dialects() {
        for row in dialect.tools {
            for field in row.fields {
                for value in wrong(dialect, row, field) {
                    let mut args: Map<String, Value> =
                        row.fields.iter().filter(|f| f.required).map(|f| (f.name.into(), right(f))).collect();
                    args.insert(field.name.into(), value.clone());
                    assert_refused(dialect, row, field.name, &args, &value);
                    tried += 1;
                }
                if field.required {
                    let others = row.fields.iter().filter(|f| f.required && f.name != field.name);
                    let args = others.map(|f| (f.name.into(), right(f))).collect();
                    assert_refused(dialect, row, field.name, &args, &json!("nothing"));
                    tried += 1;
                }
            }
        }
    }
    assert!(tried > 800, "{tried}");
}

fn lower(dialect: &Dialect, row: &ToolRow, args: &Map<String, Value>) -> Result<Op, ArgError> {
    let mut args = args.clone();
    dialect.prepare(row, &mut args);
    dialect.lower(row, &args, &Options::default()).map(|lowered| lowered.op)
}

fn assert_refused(dialect: &Dialect, row: &ToolRow, field: &str, args: &Map<String, Value>, value: &Value) {
    let place = format!("{} {}.{field} = {value}", dialect.id, row.name);
    let options = Options::default();
    let scene = RenderInput {
        tool: row.name,
        args,
        options: &options,
        links: &Links::default(),
        fence: &crate::tools::fence(),
    };
    let refused = lower(dialect, row, args).map(|op| panic!("{place} became {op:?}")).unwrap_err();
    match (dialect.id, (dialect.refuse)(&scene, &refused)) {
        ("agentrun", Reply::Answer(answer)) => {
            let codes = match field {
                "language" => ["INVALID_LANGUAGE"; 2],
                "name" => ["INVALID_PARAMS", "INVALID_CONTEXT_NAME"],
                _ => ["INVALID_PARAMS", "INVALID_PATH"],
            };
            assert!(answer.is_error && codes.map(Value::from).contains(&answer.structured["code"]), "{place}");
            assert!(answer.structured["error"].as_str().unwrap().contains(field), "{place}: {}", answer.structured);
        }
        ("workbench", Reply::Answer(answer)) => {
            let Block::Text(text) = &answer.blocks[0] else { panic!("{place}") };
            let (first, hint) = text.split_once('\n').unwrap();
            assert!(answer.is_error && hint.starts_with("hint: "), "{place}: {text}");
            assert!(first.starts_with(&format!("{} failed: ", row.name)) && first.contains(field), "{place}: {text}");
        }
        ("sandpool", Reply::Answer(answer)) => {
            let Block::Text(text) = &answer.blocks[0] else { panic!("{place}") };
            assert!(answer.is_error && !answer.fits && text.contains(field), "{place}: {text}");
            assert_eq!(answer.structured["code"], "INVALID_ARGUMENT", "{place}");
        }
        ("sandpool", other) => panic!("{place}: {other:?}"),
        (_, Reply::Error { code: -32602, message, .. }) => assert!(message.contains(field), "{place}: {message}"),
        (_, other) => panic!("{place}: {other:?}"),
    }
}

/// A07: whatever a path is, it is lowered to one below where all paths start, or refused.
#[test]
fn paths_stay_below_where_they_start() {
    let parts = ["..", ".", "", "a", "%2e%2e", "%252e", "..\\", "a.", "a ", "\"", "/", "//", "workspace", "data", "é"];
    let mut tried = 0;
    for dialect in dialects() {
        for row in dialect.tools {
            let Some(field) = row.fields.iter().find(|f| ["path", "filename"].contains(&f.name)) else { continue };
            for path in parts.iter().flat_map(|a| parts.iter().flat_map(move |b| spellings(a, b))) {
                let mut args: Map<String, Value> =
                    row.fields.iter().filter(|f| f.required).map(|f| (f.name.into(), right(f))).collect();
                args.insert(field.name.into(), json!(path));
                match lower(dialect, row, &args) {
                    Ok(
                        Op::ReadFile { path, .. }
                        | Op::WriteFile { path, .. }
                        | Op::ListFiles { path, .. }
                        | Op::EditFile { path, .. }
                        | Op::SearchFiles { path, .. }
                        | Op::UploadLink { path, .. },
                    ) => {
                        assert!(!path.starts_with('/') && path.split('/').all(|part| part != ".."), "{path}");
                    }
                    Ok(other) => panic!("{other:?}"),
                    Err(_) => assert_refused(dialect, row, field.name, &args, &json!(path)),
                }
                tried += 1;
            }
        }
    }
    assert!(tried > 5_000, "{tried}");
}

fn spellings(a: &str, b: &str) -> [String; 5] {
    [
        format!("{a}/{b}"),
        format!("/{a}/{b}"),
        format!("/workspace/{a}/{b}"),
        format!("/data/{a}/{b}"),
        format!("{a}{b}"),
    ]
}

/// A39: all that a caller can say, each looked at once. Nothing here names a mount, a user, a capability, an image, a device or a
/// limit of the operator's, and nothing switches isolation off. Whoever adds an argument adds it here, with the reason why it is safe.
const REVIEWED: [(&str, &str); 61] = [
    ("action", "one of those there are"),
    ("append", "how text is typed"),
    ("args", "passed to the program as they are, inside the sandbox"),
    ("background", "the run counts as any other"),
    ("button", "one of three"),
    ("changes", "whether an action reports what it changed on its page"),
    ("close", "of the context's own tabs"),
    ("code", "runs inside the sandbox"),
    ("command", "runs inside the sandbox"),
    ("content", "becomes a file inside"),
    ("context", "found among the tenant's own"),
    ("context_id", "found among the tenant's own"),
    ("conversationId", "hashed together with the tenant"),
    ("cursor", "a position in the run's own output"),
    ("depth", "of a listing, bounded"),
    ("description", "told back, bounded"),
    ("direction", "one of four"),
    ("double", "how the page is clicked"),
    ("encoding", "one of two"),
    ("env", "variables of one run, checked by the engine"),
    ("environment", "variables of one run, checked by the engine"),
    ("expression", "runs in the page, inside the sandbox"),
    ("filename", "below /data, resolved inside"),
    ("files", "below /workspace, resolved inside"),
    ("find", "compared with the page's lines, inside"),
    ("flavor", "one of three sizes that the operator's limits bound"),
    ("from", "a position in the page"),
    ("full_page", "bounded"),
    ("glob", "compared with names, inside; its size is bounded"),
    ("gone", "what the page is waited for"),
    ("key", "pressed in the page"),
    ("language", "one of those that are installed"),
    ("limit", "of bytes to read"),
    ("max_chars", "bounded"),
    ("maxTextLen", "bounded"),
    ("name", "told back, bounded"),
    ("new_string", "becomes text of a file inside"),
    ("network", "true or false: asks for what the operator's policy allows, and nothing else"),
    ("offset", "a position in a file"),
    ("old_string", "compared with a file, inside"),
    ("options", "chosen in the page"),
    ("path", "below /workspace, /tmp or /data, or a kept output of the tenant's own; resolved inside"),
    ("pixels", "bounded"),
    ("regex", "a linear-time engine of bounded size, inside"),
    ("replace_all", "how often a text is replaced"),
    ("run", "found among the tenant's own"),
    ("sandbox_id", "found among the tenant's own"),
    ("selector", "used by the page alone"),
    ("session_id", "found among the tenant's own"),
    ("since", "the number of a snapshot of the same page"),
    ("size", "one of three sizes that the operator's limits bound"),
    ("slowly", "how text is typed"),
    ("submit", "presses a key in the page"),
    ("tab", "of the context's own browser"),
    ("target", "used by the page alone"),
    ("template", "one of two"),
    ("text", "typed into the page, or compared with lines, inside"),
    ("timeout", "up to the operator's limit"),
    ("url", "opened by the browser inside, under the operator's policy"),
    ("wait", "bounded"),
    ("within", "used by the page alone"),
];

#[test]
fn no_argument_weakens_isolation() {
    let reviewed: BTreeSet<&str> = REVIEWED.iter().map(|(name, _)| *name).collect();
    let fields = || dialects().into_iter().flat_map(|dialect| dialect.tools).flat_map(|row| row.fields);
    let used: BTreeSet<&str> = fields().map(|field| field.name).collect();
    assert_eq!(used, reviewed);
    for field in fields() {
        match field.name {
            // Not a text, in which one could write `host`.
            "network" | "background" => assert_eq!(field.kind, FieldKind::Flag),
            "timeout" | "wait" | "limit" => assert_eq!(field.kind, FieldKind::Whole),
            "size" | "flavor" => assert_eq!(field.choices, ["small", "medium", "large"]),
            _ => {}
        }
    }
}

/// What a tool does not know it does not do: no argument outside the schema reaches an operation. A lenient dialect
/// refuses the call.
#[test]
fn arguments_that_a_tool_does_not_have_change_nothing() {
    let extra =
        ["privileged", "mounts", "volumes", "user", "image", "runtime", "cap_add", "network_mode", "memory", "cpus"];
    for dialect in dialects() {
        for row in dialect.tools {
            let args: Map<String, Value> =
                row.fields.iter().filter(|f| f.required).map(|f| (f.name.into(), right(f))).collect();
            let mut more = args.clone();
            for name in extra {
                more.insert(name.into(), json!("host"));
            }
            let (plain, more) = (lower(dialect, row, &args), lower(dialect, row, &more));
            if dialect.lenient {
                let said = more.unwrap_err().message;
                assert!(said.contains(&format!("is no argument of {}", row.name)), "{said}");
            } else {
                assert_eq!(plain, more, "{} {}", dialect.id, row.name);
            }
        }
    }
}
