//! `docs/settings.md` and `docs/environment.md`, made of the table of settings. `make docs` writes them.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use server::config::settings::{Fallback, SETTINGS, Setting, ValueKind};

const HEAD: &str = "# Settings of sandpool.toml

These are the keys that have no environment variable. [environment.md](environment.md) lists the others, with their flags. `sandpool config` prints all keys
with the values in effect. A test makes this page from `crates/server/src/config/settings.rs`; `make docs` writes it.

A time is a number of seconds or a text such as `\"90s\"`, `\"10m\"`, `\"1h\"`. MB means 2^20 bytes, also in names that end in `_mb`.
";

/// Headings, what stands below them, and which keys are listed there.
const SECTIONS: &[(&str, &str, &[&str])] = &[
    ("General", "", &["floor", "keep_free_mb", "mount", "ready_max", "ready_memory_mb", "workspace"]),
    ("Languages", "", &["runtimes."]),
    ("Network of sandboxes", "[network.md](network.md) explains policies and secrets.\n", &["network.", "size."]),
    ("The HTTP server", "", &["serve."]),
    (
        "Who may call",
        "[operating.md](operating.md#who-may-call) explains tokens, tenants and quotas.\n",
        &["auth.", "quota."],
    ),
    (
        "Metrics and OpenTelemetry",
        "[operating.md](operating.md#health-and-metrics) explains both.\n",
        &["metrics.", "otel."],
    ),
    ("Files and journal", "[operating.md](operating.md#the-journal) explains the journal.\n", &["files.", "journal."]),
];

const LAST_SECTION: (&str, &str, &[&str]) = ("Single dialects", "", &["agentrun.", "microsandbox.", "conversation."]);

#[test]
#[allow(clippy::disallowed_methods, reason = "`make docs` says by a variable that the pages are to be written")]
fn the_pages_of_settings_and_variables_are_those_that_the_table_makes() {
    for (name, page) in [("docs/settings.md", page()), ("docs/environment.md", server::config::environment::page())] {
        let path = super::workspace().join(name);
        if std::env::var_os("SANDPOOL_WRITE_DOCS").is_some() {
            std::fs::write(&path, &page).unwrap();
        }
        let committed = std::fs::read_to_string(path).unwrap();
        let differs = committed.lines().zip(page.lines()).find(|(committed, made)| committed != made);
        assert!(committed == page, "{name} is not what the table makes; `make docs` writes it: {differs:#?}");
    }
}

/// A host, files of the state directory, and an attribute of spans, whose names look like keys.
const NO_SETTINGS: [&str; 4] = ["files.pythonhosted.org", "journal.head", "journal.key", "network.transport"];

#[test]
fn every_setting_variable_and_make_target_that_a_document_names_exists() {
    let sections: BTreeSet<&str> = SETTINGS.iter().filter_map(|setting| Some(setting.key.split_once('.')?.0)).collect();
    let is_key = |key: &str| {
        let key = key.replace("<id>", "sandpool");
        let below = format!("{}.", key.trim_end_matches(".*").trim_end_matches(".<name>"));
        // Tables of policies and secrets have keys of their own.
        let table = |setting: &Setting| matches!(setting.kind, ValueKind::Table | ValueKind::Tables);
        SETTINGS.iter().any(|s| s.key == key || s.key.starts_with(&below) || (table(s) && below.starts_with(s.key)))
    };
    let code = super::Code::read();
    let (mut named, mut wrong) = (0, Vec::new());
    for page in super::pages() {
        for cell in page.cells() {
            for (_, token) in cell.tokens() {
                let name = token.split(' ').next().unwrap_or_default();
                let is_name = !NO_SETTINGS.contains(&name)
                    && !name.contains(['/', '(', '[', ':', '"', '…'])
                    && !name.ends_with(".rs");
                let exists = if let Some(target) = token.strip_prefix("make ") {
                    code.has(None, &format!("make {}", target.split(' ').next().unwrap_or_default()))
                } else if ["SANDPOOL_", "MSB_", "MCP_"].iter().any(|ours| name.starts_with(ours)) && is_name {
                    name.ends_with('*') || code.words.contains(name.split('=').next().unwrap_or_default())
                } else if name.split_once('.').is_some_and(|(section, _)| sections.contains(section)) && is_name {
                    is_key(name)
                } else {
                    continue;
                };
                named += 1;
                if !exists {
                    wrong.push(format!("{}:{}: there is no `{token}`", page.name, cell.line));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(named > 200, "{named}");
}

fn page() -> String {
    let mut page = String::from(HEAD);
    let mut listed = 0;
    for section in SECTIONS {
        listed += table(&mut page, section);
    }
    limits(&mut page);
    listed += table(&mut page, &LAST_SECTION);
    let all = SETTINGS.iter().filter(|setting| setting.env.is_empty() && limit(setting).is_none()).count();
    assert_eq!(listed, all, "a setting has no section");
    page
}

/// Writes the table of a section and returns the number of its rows.
fn table(page: &mut String, (heading, text, keys): &(&str, &str, &[&str])) -> usize {
    let _ = write!(page, "\n## {heading}\n{text}\n| key | default | values | meaning |\n|---|---|---|---|\n");
    let is_here = |key: &str| keys.iter().any(|part| key == *part || (part.ends_with('.') && key.starts_with(part)));
    let rows = SETTINGS.iter().filter(|setting| setting.env.is_empty() && is_here(setting.key));
    rows.map(|setting| {
        let Setting { key, help, .. } = setting;
        let _ = writeln!(page, "| `{key}` | {} | {} | {help} |", default(setting), values(setting));
    })
    .count()
}

/// Writes the table of the settings that every dialect has, with a column for each dialect.
fn limits(page: &mut String) {
    let dialects = dialects::IDS;
    let columns: String = dialects.iter().map(|id| format!(" `{id}` |")).collect();
    let lines = "---|".repeat(dialects.len() + 3);
    let _ = write!(
        page,
        "\n## Limits of each dialect\nThese keys are in `[dialect.<id>]`; a dialect does not have those with `–`.\n\n\
         | key |{columns} values | meaning |\n|{lines}\n"
    );
    let mut names: Vec<&str> = Vec::new();
    for (_, name) in SETTINGS.iter().filter_map(limit) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    for name in names {
        let of = |id: &str| SETTINGS.iter().find(|setting| limit(setting) == Some((id, name)));
        let defaults: String = dialects.iter().map(|id| format!(" {} |", of(id).map_or("–".into(), default))).collect();
        let rows: Vec<(&str, &Setting)> = dialects.iter().filter_map(|id| Some((*id, of(id)?))).collect();
        let values = common(rows.iter().map(|(id, setting)| (*id, values(setting))));
        let help = common(rows.iter().map(|(id, setting)| (*id, setting.help.to_owned())));
        let _ = writeln!(page, "| `{name}` |{defaults} {values} | {help} |");
    }
}

/// Returns the text of the first dialect, and those of other dialects where they differ from it.
fn common<'a>(mut texts: impl Iterator<Item = (&'a str, String)>) -> String {
    let (_, first) = texts.next().unwrap();
    let others = texts.filter(|(_, other)| *other != first);
    let others = others.map(|(id, other)| format!("; `{id}`: {}{}", other[..1].to_lowercase(), &other[1..]));
    first.clone() + &others.collect::<String>()
}

/// Returns the dialect and the name of a setting in `[dialect.<id>]`.
fn limit(setting: &Setting) -> Option<(&'static str, &'static str)> {
    setting.key.strip_prefix("dialect.")?.split_once('.')
}

fn default(setting: &Setting) -> String {
    match (setting.default, setting.kind) {
        (Fallback::Is(seconds), ValueKind::Time(..)) => time(seconds.parse().unwrap()),
        (Fallback::Is(value), _) => format!("`{value}`"),
        (Fallback::Unset, _) => "unset".into(),
        (Fallback::Computed(how), _) => how.into(),
    }
}

fn values(setting: &Setting) -> String {
    match setting.kind {
        ValueKind::Text | ValueKind::ConfigFile => "a text".into(),
        ValueKind::OneOf(all) => all.iter().map(|one| format!("`{one}`")).collect::<Vec<_>>().join(", "),
        ValueKind::List => "a list of texts".into(),
        ValueKind::Switch => "`true`, `false`".into(),
        ValueKind::Whole(least, most) => format!("{} to {}", whole(least), whole(most)),
        ValueKind::Number(least, most) => format!("{least} to {most}"),
        ValueKind::Time(least, most) => format!("{} to {}", time(least), time(most)),
        ValueKind::Table => format!("a table `[{}]`", setting.key),
        ValueKind::Tables => format!("tables `[[{}]]`", setting.key),
    }
}

fn whole(number: i64) -> String {
    if number >= 1 << 20 && number.count_ones() == 1 {
        return format!("2^{}", number.trailing_zeros());
    }
    let digits = number.to_string();
    let from_end = |at: usize| digits.len() - at;
    let with_commas = digits.char_indices().flat_map(|(at, digit)| {
        let comma = (at > 0 && from_end(at).is_multiple_of(3)).then_some(',');
        comma.into_iter().chain([digit])
    });
    with_commas.collect()
}

fn time(seconds: f64) -> String {
    // Up to a day in hours, up to two minutes in seconds.
    let units = [(86_400.0, 2.0, "days"), (3600.0, 1.0, "h"), (60.0, 2.0, "min")];
    let fits = |(unit, least, _): &&(f64, f64, &str)| seconds >= least * unit && seconds % unit == 0.0;
    match units.iter().find(fits) {
        Some((unit, _, name)) => format!("{} {name}", seconds / unit),
        None => format!("{seconds} s"),
    }
}
