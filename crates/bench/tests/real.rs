//! The benchmark end to end: that it measures and writes, not how fast anything is.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// A directory for the results of one test.
struct Results(PathBuf);

impl Results {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("sandpool-test-bench-{name}-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        Self(dir)
    }
}

impl Drop for Results {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Runs the benchmark on the server that was built beside it.
#[allow(clippy::disallowed_methods, reason = "the test starts the program it tests")]
fn bench(arguments: &[&str]) -> Output {
    let program = Path::new(env!("CARGO_BIN_EXE_sandpool-bench"));
    let sandpool = program.with_file_name("sandpool");
    assert!(sandpool.exists(), "build the workspace first: cargo build --workspace");
    Command::new(program).arg("--sandpool").arg(sandpool).args(arguments).output().unwrap()
}

#[test]
fn a_quick_look_at_one_figure_writes_all_three_files() {
    let results = Results::new("warm");
    let out = results.0.join("out");
    let output = bench(&["--quick", "--rounds", "1", "--only", "warm", "--out", out.to_str().unwrap()]);
    let (shown, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}");
    assert!(shown.contains("warm `run_code(\"print(1)\")`"), "{shown}");
    assert!(said.contains("[1/1] warm"), "{said}");

    let json = std::fs::read_to_string(out.join("results.json")).unwrap();
    let report: Value = serde_json::from_str(&json).unwrap();
    let figure = &report["figures"][0];
    assert!(figure["lines"][0]["ours"]["value"].as_f64().is_some_and(|ratio| ratio > 0.0), "{json}");
    for subject in ["sandpool", "sandpool, empty pools", "bare run_cell", "no-op tool, stdio"] {
        assert!(figure["series"][subject]["samples"].as_u64().is_some_and(|samples| samples > 0), "{subject}: {json}");
    }
    assert_eq!(figure["failed"]["ipykernel"], "not measured: no `--alternatives`", "{json}");
    assert!(!json.contains(env!("CARGO_MANIFEST_DIR")), "{json}");

    let page = std::fs::read_to_string(out.join("results.md")).unwrap();
    assert!(page.contains("| figure | ours | goal | reached |"), "{page}");
    assert!(std::fs::read_to_string(out.join("results.svg")).unwrap().ends_with("</svg>\n"));
}

#[test]
fn a_quick_look_at_the_browser_has_every_step_of_ours() {
    let results = Results::new("browser");
    let out = results.0.join("out");
    let output = bench(&["--quick", "--rounds", "1", "--only", "browser", "--out", out.to_str().unwrap()]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let json = std::fs::read_to_string(out.join("results.json")).unwrap();
    let figure = &serde_json::from_str::<Value>(&json).unwrap()["figures"][0];
    for step in ["first goto", "goto", "snapshot", "click", "type", "screenshot", "memory", "characters"] {
        let samples = figure["series"][format!("{step}, sandpool")]["samples"].as_u64();
        assert!(samples.is_some_and(|samples| samples > 0), "{step}: {json}");
    }
    assert_eq!(figure["failed"]["Playwright MCP"], "not measured: no `--alternatives`", "{json}");
}

/// Returns the table of the figure `tokens`, measured beside what is in the directory of alternatives.
fn tokens_beside(alternatives: &Results) -> String {
    let output = bench(&["--quick", "--only", "tokens", "--alternatives", alternatives.0.to_str().unwrap()]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The beginnings of the rows of the figure `tokens` in which Playwright MCP has an equivalent.
const BESIDE: [&str; 5] = [
    "`tools/list` of ",
    "answer to `browser_open`, ",
    "answer to `browser_snapshot`, ",
    "answer to `browser_act` click, ",
    "answer to `browser_act` type, ",
];

/// Speaks as much MCP as the benchmark, and answers every call with the same 57 characters.
const STAND_IN: &str = r#"
const text = "Fifty things ... Buy 50 ... Cart: 1 ... Hello a visitor ."
const tools = [{ name: "a" }, { name: "b" }]
const results = { "tools/list": { tools }, "tools/call": { content: [{ type: "text", text }] } }
require("readline").createInterface({ input: process.stdin }).on("line", line => {
    const { id, method } = JSON.parse(line)
    if (id !== undefined) console.log(JSON.stringify({ jsonrpc: "2.0", id, result: results[method] ?? {} }))
})"#;

#[test]
fn what_a_model_reads_is_counted_beside_what_it_reads_of_playwright() {
    let alternatives = Results::new("tokens");
    let package = alternatives.0.join("playwright/node_modules/@playwright/mcp");
    std::fs::create_dir_all(&package).unwrap();
    std::fs::write(package.join("cli.js"), STAND_IN).unwrap();
    std::fs::write(package.join("package.json"), r#"{ "version": "1.2.3" }"#).unwrap();
    let shown = tokens_beside(&alternatives);
    for (row, theirs) in BESIDE.into_iter().zip([27, 57, 57, 57, 57]) {
        let theirs = format!("Playwright MCP: {theirs} characters");
        let line = shown.lines().find(|line| line.starts_with(row) && line.contains(&theirs));
        let ours = line.unwrap_or_else(|| panic!("no {row}: {shown}")).split("Playwright").next().unwrap();
        assert!(ours.contains(" characters "), "{shown}");
    }
    assert!(shown.contains(" tools, against 2 tools "), "{shown}");
    let ten = shown.lines().find(|line| line.starts_with("ten answers ")).expect("a row");
    assert!(ten.contains(" characters ") && ten.contains("Playwright MCP: n/a "), "{shown}");
    assert!(shown.contains("@playwright/mcp 1.2.3"), "{shown}");
}

#[test]
fn without_playwright_each_row_says_why_and_has_our_count() {
    let alternatives = Results::new("no-playwright");
    std::fs::write(alternatives.0.join("playwright-mcp.failed"), "no network\n").unwrap();
    let shown = tokens_beside(&alternatives);
    for row in BESIDE {
        let line = shown.lines().find(|line| line.starts_with(row) && line.contains("Playwright"));
        let line = line.unwrap_or_else(|| panic!("no {row}: {shown}"));
        assert!(line.contains(" characters ") && line.contains("cannot be installed here: no network"), "{shown}");
    }
}

#[test]
fn a_figure_that_does_not_exist_is_refused() {
    let output = bench(&["--only", "wram"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("warm"), "{said}");
}

#[test]
fn two_builds_are_measured_by_turns() {
    let sandpool = Path::new(env!("CARGO_BIN_EXE_sandpool-bench")).with_file_name("sandpool");
    let output = bench(&["--quick", "--rounds", "2", "--only", "warm", "--against", sandpool.to_str().unwrap()]);
    let (shown, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}");
    assert!(shown.contains("2 rounds by turns"), "{shown}");
    let line = shown.lines().find(|line| line.starts_with("warm ") && line.contains("sandpool")).expect("a line");
    let ratio: f64 = line.split("  ").filter_map(|cell| cell.trim().parse().ok()).next().expect("a ratio");
    assert!(ratio > 0.0, "{shown}");
}
