//! The results of a benchmark, and the table that shows them. A figure has rows, each with its goal.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use serde::{Serialize, Serializer};

use crate::machine::Machine;
use crate::stats::{Samples, Summary};

#[derive(Debug, Serialize)]
pub struct BenchReport {
    pub(crate) build: &'static str,
    pub(crate) quick: bool,
    pub(crate) rounds: usize,
    pub(crate) machine: Machine,
    pub(crate) versions: Vec<(String, String)>,
    pub(crate) figures: Vec<Figure>,
}

/// One figure: what the table shows, and the measurements behind it (seconds, bytes, or calls per second).
#[derive(Debug, Serialize)]
pub(crate) struct Figure {
    pub name: &'static str,
    pub title: &'static str,
    pub lines: Vec<ReportRow>,
    pub floors: Vec<(&'static str, Quantity)>,
    pub notes: Vec<String>,
    pub series: BTreeMap<&'static str, Summary>,
    pub failed: BTreeMap<&'static str, String>,
}

impl Figure {
    pub(crate) fn new(name: &'static str, title: &'static str, samples: &Samples) -> Self {
        let (series, failed) = (samples.summaries(), samples.failures());
        Self { name, title, lines: vec![], floors: vec![], notes: vec![], series, failed }
    }
}

/// One row of the table.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct ReportRow {
    pub what: String,
    #[serde(serialize_with = "found")]
    pub ours: Found,
    pub goal: Option<Goal>,
    pub reached: Option<bool>,
    /// The same quantity, or the same ratio, measured while no sandbox was ready.
    #[serde(serialize_with = "found")]
    pub empty: Found,
    pub against: Option<Against>,
}

/// A value, or the reason why there is none.
pub(crate) type Found = Result<Quantity, String>;

/// An alternative beside ours, and how many times better ours is.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Against {
    pub name: &'static str,
    #[serde(serialize_with = "found")]
    pub theirs: Found,
    pub ratio: Option<f64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Quantity {
    pub value: f64,
    pub unit: Unit,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) enum Unit {
    /// Multiples of a fork+exec of `/bin/true`.
    T,
    /// Multiples of something that the line names.
    Times,
    Megabytes,
    PerSecond,
    Characters,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) enum Goal {
    AtMost(Quantity),
    AtLeast(Quantity),
}

fn found<S: Serializer>(found: &Found, serializer: S) -> Result<S::Ok, S::Error> {
    match found {
        Ok(quantity) => quantity.serialize(serializer),
        Err(why) => serializer.serialize_str(why),
    }
}

impl Goal {
    pub(crate) fn at_most(value: f64, unit: Unit) -> Option<Self> {
        Some(Self::AtMost(Quantity { value, unit }))
    }

    /// Returns the goal to be `value` times better than an alternative.
    pub(crate) fn times(value: f64) -> Option<Self> {
        Some(Self::AtLeast(Quantity { value, unit: Unit::Times }))
    }

    fn holds(self, value: f64) -> bool {
        match self {
            Self::AtMost(bound) => value <= bound.value,
            Self::AtLeast(bound) => value >= bound.value,
        }
    }
}

impl ReportRow {
    /// Creates a row for our value alone, to which the goal applies.
    pub(crate) fn new(what: &str, ours: Found, empty: Found, goal: Option<Goal>) -> Self {
        let reached = goal.map(|goal| ours.as_ref().is_ok_and(|ours| goal.holds(ours.value)));
        Self { what: what.into(), ours, goal, reached, empty, against: None }
    }

    /// Creates a row beside an alternative; the goal applies to the ratio.
    pub(crate) fn against(what: &str, ours: Found, empty: Found, against: Against, goal: Option<Goal>) -> Self {
        let reached = goal.and_then(|goal| Some(goal.holds(against.ratio?)));
        Self { what: what.into(), ours, goal, reached, empty, against: Some(against) }
    }
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = match self.unit {
            Unit::T => " T",
            Unit::Times => " ×",
            Unit::Megabytes => " MB",
            Unit::PerSecond => " /s",
            Unit::Characters => " characters",
        };
        write!(f, "{}{unit}", number(self.value))
    }
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtMost(bound) => write!(f, "≤ {bound}"),
            Self::AtLeast(bound) => write!(f, "≥ {bound}"),
        }
    }
}

/// Formats a number with about three significant digits and separated thousands.
pub(crate) fn number(value: f64) -> String {
    let digits = match value.abs() {
        0.0..0.995 => 2,
        0.995..9.95 => 1,
        _ => 0,
    };
    let text = format!("{value:.digits$}");
    let text = if digits > 0 { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text };
    if text.len() <= 3 || digits > 0 {
        return text;
    }
    let digits: Vec<char> = text.chars().rev().collect();
    let groups: Vec<String> = digits.chunks(3).map(|group| group.iter().collect()).collect();
    groups.join(",").chars().rev().collect()
}

const HEADINGS: [&str; 7] = ["figure", "ours", "goal", "reached", "with empty pools", "alternative", "ratio"];

/// Prints the table, the notes and the versions for a terminal.
impl fmt::Display for BenchReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = self.rows();
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..HEADINGS.len()).map(width).collect();
        for row in &rows {
            let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
            writeln!(f, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
        }
        self.notes().iter().try_for_each(|note| write!(f, "\n{note}"))?;
        write!(f, "\n\n{}", self.versions())
    }
}

impl BenchReport {
    /// Returns the rows of the table.
    pub(crate) fn rows(&self) -> Vec<Vec<String>> {
        let lines = self.figures.iter().flat_map(|figure| &figure.lines).map(row);
        std::iter::once(HEADINGS.map(String::from).to_vec()).chain(lines).collect()
    }

    pub(crate) fn floors(&self) -> Vec<Vec<String>> {
        let floors = self.figures.iter().flat_map(|figure| &figure.floors);
        let mut rows: Vec<Vec<String>> =
            floors.map(|(name, quantity)| vec![(*name).into(), quantity.to_string()]).collect();
        rows.dedup_by(|one, other| one[0] == other[0]);
        rows
    }

    /// Returns what was noticed during the measurement, and what could not be measured.
    pub(crate) fn notes(&self) -> Vec<String> {
        let failed = self.figures.iter().flat_map(|figure| {
            figure.failed.iter().map(|(subject, why)| format!("`{}`, {subject}: {why}", figure.name))
        });
        let seen = self.figures.iter().flat_map(|figure| figure.notes.iter().cloned());
        seen.chain(failed).collect()
    }

    /// Returns the names and versions of everything that was measured.
    fn versions(&self) -> String {
        let versions: Vec<String> = self.versions.iter().map(|(name, version)| format!("{name} {version}")).collect();
        versions.join(", ")
    }

    pub fn markdown(&self) -> String {
        let mut page = String::from("# How fast it is\n\nWritten by `make bench`. ");
        if self.build != "release" || self.quick {
            let _ = write!(
                page,
                "**A {} build{}: not for comparison.** ",
                self.build,
                if self.quick { ", a quick look" } else { "" }
            );
        }
        page.push_str(METHOD);
        markdown_table(&mut page, &self.rows());
        page.push_str("\n![Ratios](results.svg)\n");
        let floors = self.floors();
        if !floors.is_empty() {
            page.push_str("\n## Floors measured beside\n");
            let heading = vec!["what".to_owned(), "median".to_owned()];
            markdown_table(&mut page, &[vec![heading], floors].concat());
        }
        let notes = self.notes();
        if !notes.is_empty() {
            page.push_str("\n## Seen in this run\n");
            notes.iter().for_each(|note| page.push_str(&format!("- {note}\n")));
        }
        let Machine { processor, cores, memory_gib, kernel } = &self.machine;
        let _ = writeln!(page, "\n## The machine\n{processor}, {cores} cores, {memory_gib} GiB, Linux {kernel}. ");
        let _ = writeln!(page, "{}. {} rounds.\n\n{HOW}", self.versions(), self.rounds);
        page
    }
}

const METHOD: &str = include_str!("pages/method.md");

const HOW: &str = include_str!("pages/how.md");

fn row(line: &ReportRow) -> Vec<String> {
    let shown = |found: &Found| found.as_ref().map_or_else(|why| short(why), Quantity::to_string);
    let against = line.against.as_ref();
    vec![
        line.what.clone(),
        shown(&line.ours),
        line.goal.map_or("–".into(), |goal| goal.to_string()),
        match line.reached {
            Some(true) => "yes".into(),
            Some(false) => "no".into(),
            None => "–".into(),
        },
        line.empty.as_ref().map_or("–".into(), Quantity::to_string),
        against.map_or("–".into(), |against| format!("{}: {}", against.name, shown(&against.theirs))),
        against.and_then(|against| against.ratio).map_or("–".into(), |ratio| format!("{} ×", number(ratio))),
    ]
}

/// Shortens a reason; the whole text is printed below the table.
fn short(why: &str) -> String {
    const MOST: usize = 60;
    match why.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}…", why[..end].trim_end()),
        None => why.to_owned(),
    }
}

fn markdown_table(page: &mut String, rows: &[Vec<String>]) {
    for (index, row) in rows.iter().enumerate() {
        let cells: Vec<String> = row.iter().map(|cell| cell.replace('|', "\\|")).collect();
        let _ = writeln!(page, "{}| {} |", if index == 0 { "\n" } else { "" }, cells.join(" | "));
        if index == 0 {
            let _ = writeln!(page, "|{}", "---|".repeat(row.len()));
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns a report that contains everything that can be in one.
    pub(crate) fn example() -> BenchReport {
        let quantity = |value, unit| Ok(Quantity { value, unit });
        let mut first = Figure::new("first", "create_context + first import pandas, stdio", &Samples::default());
        first.lines = vec![
            ReportRow::new(
                "create + `import pandas`",
                quantity(8.42, Unit::T),
                quantity(31.0, Unit::T),
                Goal::at_most(12.0, Unit::T),
            ),
            ReportRow::new("… p99", quantity(52.0, Unit::T), Err("not measured".into()), Goal::at_most(40.0, Unit::T)),
            ReportRow::against(
                "…",
                quantity(8.42, Unit::T),
                quantity(23.4, Unit::Times),
                Against { name: "ipykernel", theirs: quantity(893.0, Unit::T), ratio: Some(106.1) },
                Goal::times(60.0),
            ),
            ReportRow::against(
                "…",
                quantity(8.42, Unit::T),
                Err("not measured".into()),
                Against {
                    name: "mcp-run-python",
                    theirs: Err("cannot be installed here: no network".into()),
                    ratio: None,
                },
                None,
            ),
        ];
        first.floors = vec![("pipe ping-pong", Quantity { value: 0.0421, unit: Unit::T })];
        let mut load = Figure::new("load", "warm calls a second", &Samples::default());
        load.lines = vec![ReportRow::against(
            "calls a second, 64 contexts",
            quantity(4210.0, Unit::PerSecond),
            Err("not measured".into()),
            Against { name: "ipykernel", theirs: quantity(397.0, Unit::PerSecond), ratio: Some(10.6) },
            Goal::times(10.0),
        )];
        load.notes = vec!["64 kernels of ipykernel".into()];
        BenchReport {
            build: "release",
            quick: false,
            rounds: 10,
            machine: Machine { processor: "Some CPU".into(), cores: 2, memory_gib: 23.5, kernel: "6.18.44".into() },
            versions: vec![("sandpool".into(), "0.1.0".into()), ("ipykernel".into(), "7.4.0".into())],
            figures: vec![first, load],
        }
    }

    /// Returns the tables of a page.
    fn tables(page: &str) -> String {
        page.lines().filter(|line| line.starts_with('|')).map(|line| format!("{line}\n")).collect()
    }

    /// Returns the table with the rows of one figure.
    pub(crate) fn table(figure: Figure) -> String {
        tables(&BenchReport { figures: vec![figure], ..example() }.markdown())
    }

    #[test]
    fn a_terminal_shows_the_table_the_notes_and_the_versions() {
        let shown = example().to_string();
        assert!(shown.starts_with("figure "), "{shown}");
        assert!(shown.ends_with("\n64 kernels of ipykernel\n\nsandpool 0.1.0, ipykernel 7.4.0"), "{shown}");
    }

    #[test]
    fn the_page_is_easy_to_read() {
        let page = example().markdown();
        insta::assert_snapshot!(tables(&page), @"
        | figure | ours | goal | reached | with empty pools | alternative | ratio |
        |---|---|---|---|---|---|---|
        | create + `import pandas` | 8.4 T | ≤ 12 T | yes | 31 T | – | – |
        | … p99 | 52 T | ≤ 40 T | no | – | – | – |
        | … | 8.4 T | ≥ 60 × | yes | 23 × | ipykernel: 893 T | 106 × |
        | … | 8.4 T | – | – | – | mcp-run-python: cannot be installed here: no network | – |
        | calls a second, 64 contexts | 4,210 /s | ≥ 10 × | yes | – | ipykernel: 397 /s | 11 × |
        | what | median |
        |---|---|
        | pipe ping-pong | 0.04 T |
        ");
        assert!(page.contains("\n- 64 kernels of ipykernel\n"), "{page}");
        assert!(!page.contains("not for comparison"), "{page}");
        let debug = BenchReport { build: "debug", ..example() }.markdown();
        assert!(debug.contains("**A debug build: not for comparison.**"), "{debug}");
    }

    #[test]
    fn a_number_has_the_digits_that_count() {
        let shown = [0.0421, 0.5, 1.0, 8.42, 31.4, 106.1, 4210.0, 1_234_567.0].map(number);
        assert_eq!(shown, ["0.04", "0.5", "1", "8.4", "31", "106", "4,210", "1,234,567"]);
    }

    #[test]
    fn the_json_has_values_and_reasons() {
        let json = serde_json::to_value(example()).unwrap();
        let lines = &json["figures"][0]["lines"];
        assert_eq!(lines[0]["ours"], serde_json::json!({ "value": 8.42, "unit": "T" }));
        assert_eq!(lines[0]["reached"], true);
        assert_eq!(lines[1]["reached"], false);
        assert_eq!(lines[3]["against"]["theirs"], "cannot be installed here: no network");
    }
}
