//! `sandpool bench` end to end: that it measures and writes, not how fast anything is.

use std::process::Command;

use serde_json::Value;

use crate::support::StateDir;

#[test]
#[allow(clippy::disallowed_methods, reason = "the test starts the program it tests")]
fn a_quick_look_at_one_figure_writes_all_three_files() {
    let state = StateDir::new("bench");
    let out = state.0.join("out");
    let output = Command::new(env!("CARGO_BIN_EXE_sandpool"))
        .args(["bench", "--quick", "--rounds", "1", "--only", "warm", "--out"])
        .arg(&out)
        .output()
        .unwrap();
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
#[allow(clippy::disallowed_methods, reason = "the test starts the program it tests")]
fn a_quick_look_at_the_browser_has_every_step_of_ours() {
    let state = StateDir::new("bench-browser");
    let out = state.0.join("out");
    let output = Command::new(env!("CARGO_BIN_EXE_sandpool"))
        .args(["bench", "--quick", "--rounds", "1", "--only", "browser", "--out"])
        .arg(&out)
        .output()
        .unwrap();
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
#[allow(clippy::disallowed_methods, reason = "the test starts the program it tests")]
fn a_figure_that_does_not_exist_is_refused() {
    let output = Command::new(env!("CARGO_BIN_EXE_sandpool")).args(["bench", "--only", "wram"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("warm"), "{said}");
}
