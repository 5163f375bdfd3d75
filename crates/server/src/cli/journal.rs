//! `sandpool journal` reads the audit journal and verifies that nobody changed it.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde_json::{Map, Value};
use telemetry::journal::{self, VerifyReport};
use telemetry::logging::escaped;

use super::{CommandEnv, CommandResult, Failed, output};

/// Show the audit journal (who called which tool, when, with which outcome), or check that nobody changed it
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Verify(Verify),
    Show(Show),
}

/// Check that every line is as it was written, and that none is missing
///
/// Each line has a code that is computed from the line, the code of the line before it, and a key beside the journal's directory. The
/// check finds lines that were changed, removed, inserted or moved, a beginning that is missing although it has not expired, and an end
/// that was cut off. It prints the code of the last line, which is the head of the journal. Store the head on another machine and pass it
/// as `--head` later: the check then also notices if somebody replaced the journal with an earlier state of it.
#[derive(Debug, clap::Args)]
struct Verify {
    /// Directory of the journal [default: `journal` in the state directory]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Key of the journal [default: the file beside its directory with the same name and `.key`]
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// Head that you stored, from an earlier check or from the log; the journal has to contain it
    #[arg(long, value_name = "CODE", value_parser = hash)]
    head: Option<String>,
}

/// Print the newest entries
#[derive(Debug, clap::Args)]
struct Show {
    /// Directory of the journal [default: `journal` in the state directory]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Print only entries of this tenant
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// Number of entries to print
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    last: u32,
}

pub(crate) fn main(args: Args, context: &CommandEnv) -> CommandResult {
    let default = context.config.state_dir.join("journal");
    match args.command {
        Command::Verify(args) => {
            let dir = args.dir.unwrap_or(default);
            let key = args.key.unwrap_or_else(|| journal::key_path(&dir));
            verify(&dir, &key, args.head.as_deref())
        }
        Command::Show(args) => {
            show(&args.dir.unwrap_or(default), args.tenant.as_deref(), args.last as usize)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn hash(text: &str) -> Result<String, &'static str> {
    let fits = text.len() == 64 && text.bytes().all(|b| b.is_ascii_hexdigit());
    if fits { Ok(text.to_ascii_lowercase()) } else { Err("a hash is 64 hex digits") }
}

fn verify(dir: &Path, key: &Path, head: Option<&str>) -> CommandResult {
    let report = journal::verify(dir, key, head).map_err(|error| unreadable(dir, &error))?;
    output::line(report_text(&report).trim_end());
    Ok(if report.is_whole() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn unreadable(dir: &Path, error: &io::Error) -> Failed {
    match error.kind() {
        io::ErrorKind::NotFound => Failed(format!("there is no journal in `{}`", dir.display())),
        _ => Failed(format!("cannot read the journal in `{}`: {error}", dir.display())),
    }
}

fn report_text(report: &VerifyReport) -> String {
    let mut text = String::new();
    for file in &report.files {
        let range = match (file.first_seq, file.last_seq) {
            (Some(first), Some(last)) => format!("entries {first} to {last}"),
            _ => "no entries".into(),
        };
        let _ = match &file.broken {
            None => writeln!(text, "{}  ok, {range}", file.name),
            Some((line, why)) => writeln!(text, "{}  BROKEN at line {line}: {why}", file.name),
        };
    }
    if report.unfinished {
        text.push_str("the last line is not finished: a server is writing it, or stopped while writing it\n");
    }
    if report.old_form > 0 {
        let _ = writeln!(
            text,
            "{} entries have the old form, without a key: whether lines before them were removed cannot be checked",
            report.old_form
        );
    }
    for why in &report.broken {
        let _ = writeln!(text, "BROKEN: {why}");
    }
    match &report.head {
        Some(head) => text + "head " + head + "\n",
        None => text + "the journal is empty\n",
    }
}

fn show(dir: &Path, tenant: Option<&str>, last: usize) -> Result<(), Failed> {
    let mut newest = VecDeque::new();
    for line in journal::lines(dir).map_err(|error| unreadable(dir, &error))? {
        let line = line.map_err(|error| unreadable(dir, &error))?;
        let entry: Map<String, Value> = serde_json::from_str(&line).unwrap_or_default();
        if tenant.is_some_and(|tenant| entry.get("tenant").and_then(Value::as_str) != Some(tenant)) {
            continue;
        }
        if newest.len() == last {
            newest.pop_front();
        }
        newest.push_back(entry);
    }
    for entry in newest {
        output::line(&entry_text(&entry));
    }
    Ok(())
}

/// Formats an entry as one line: the fixed members in columns, the others by name.
fn entry_text(entry: &Map<String, Value>) -> String {
    if entry.is_empty() {
        return "(not a line of the journal)".into();
    }
    let text = |value: &Value| match value {
        Value::String(text) => escaped(text),
        Value::Object(members) => {
            let members: Vec<String> = members.iter().map(|(name, size)| format!("{}:{size}", escaped(name))).collect();
            members.join(",")
        }
        other => other.to_string(),
    };
    let shown = |name: &str| entry.get(name).map_or_else(|| "-".into(), text);
    let what = if entry.contains_key("tool") { "tool" } else { "event" };
    let mut line =
        [shown("time"), format!("#{}", shown("seq")), shown("tenant"), shown(what), shown("outcome")].join("  ");
    let ms = entry.get("ms").and_then(Value::as_f64).map(|ms| format!("  {ms} ms"));
    line.push_str(&ms.unwrap_or_default());
    const OTHERS: &str = "dialect context run did args calls cpu_ms memory_mb_s network_bytes bytes_out bytes_in count why \
                          request peer";
    for name in OTHERS.split_ascii_whitespace() {
        if let Some(value) = entry.get(name) {
            let _ = write!(line, "  {name}={}", text(value));
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use telemetry::journal::verify::FileReport;

    #[test]
    fn a_report_names_file_line_and_reason_and_ends_with_the_head() {
        let file = |name: &str, broken| FileReport {
            name: name.into(),
            lines: 4,
            first_seq: Some(5),
            last_seq: Some(8),
            broken,
        };
        let report = VerifyReport {
            files: vec![
                file("2026-11-15.jsonl", None),
                file("2026-11-16.jsonl", Some((3, "lines 6 to 6 are missing".into()))),
            ],
            head: Some("ab".repeat(32)),
            unfinished: true,
            old_form: 4,
            broken: vec!["lines 9 to 12 are missing from the end".into()],
        };
        assert_eq!(
            report_text(&report),
            format!(
                "2026-11-15.jsonl  ok, entries 5 to 8\n\
                 2026-11-16.jsonl  BROKEN at line 3: lines 6 to 6 are missing\n\
                 the last line is not finished: a server is writing it, or stopped while writing it\n\
                 4 entries have the old form, without a key: whether lines before them were removed cannot be checked\n\
                 BROKEN: lines 9 to 12 are missing from the end\n\
                 head {}\n",
                "ab".repeat(32)
            )
        );
    }

    #[test]
    fn an_entry_is_one_line_whatever_is_in_it() {
        let entry = json!({"time": "2026-11-16T00:12:56.123Z", "seq": 17, "prev": "x", "event": "call", "tenant": "blue",
            "dialect": "agentrun", "tool": "run_code", "context": "ctx\n\u{1b}[2J", "args": {"code": 150}, "outcome": "ok",
            "ms": 12.345, "bytes_out": 210, "request": "r-1", "peer": "127.0.0.1:9"});
        assert_eq!(
            entry_text(entry.as_object().unwrap()),
            "2026-11-16T00:12:56.123Z  #17  blue  run_code  ok  12.345 ms  dialect=agentrun  context=ctx\\n\\u{1b}[2J  \
             args=code:150  bytes_out=210  request=r-1  peer=127.0.0.1:9"
        );
        let gap = json!({"time": "t", "seq": 18, "event": "gap", "count": 3, "why": "No space left"});
        assert_eq!(entry_text(gap.as_object().unwrap()), "t  #18  -  gap  -  count=3  why=No space left");
    }
}
