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

#[test]
fn what_a_model_reads_is_counted() {
    let output = bench(&["--quick", "--rounds", "1", "--only", "tokens"]);
    let (shown, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}");
    for row in ["`tools/list` ", "ten typical answers ", "a page's snapshot "] {
        let line = shown.lines().find(|line| line.starts_with(row)).unwrap_or_else(|| panic!("no {row}: {shown}"));
        assert!(line.contains(" characters"), "{shown}");
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
