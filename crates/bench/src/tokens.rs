//! Measures how many characters a model has to read: the list of tools, typical answers, and a page, beside Playwright
//! MCP. Four characters are about one token of English text.

use serde_json::{Value, json};

use crate::browser::{self, PLAYWRIGHT};
use crate::client::{BenchCall, Client, Stdio as Mcp};
use crate::report::{Figure, Goal, ReportRow, Unit};
use crate::server::{self, Pool};
use crate::site::Site;
use crate::stats::Samples;
use crate::{Bench, BenchError};

const LIST: [&str; 2] = ["tools/list, sandpool", "tools/list, Playwright MCP"];
const PAGE: [&str; 2] = ["snapshot, sandpool", "snapshot, Playwright MCP"];
const ANSWERS: &str = "ten answers, sandpool";

/// Maximum length of the list of tools.
const LIST_GOAL: f64 = 16_000.0;

/// Files as a package manager leaves them, and one of the user's own.
const FILES: &str = "import os
for n in range(2000):
    os.makedirs(f'node_modules/package{n % 40}/lib', exist_ok=True)
    open(f'node_modules/package{n % 40}/lib/{n}.js', 'w').write('x')
open('notes.txt', 'w').write('\\n'.join(f'note {n}' for n in range(100)))";
const PROGRESS: &str = "for n in range(1001): print(f'\\r{n / 10:.1f}% ' + '#' * (n // 20), end='')
print('\\ndone')";

/// Ten calls as agents make them, with a part of each answer.
fn calls() -> [(BenchCall, &'static str); 10] {
    let code = |code: &str| BenchCall::new("run_code", json!({ "code": code }));
    [
        (code("print('hello')"), "hello"),
        (code("import pandas as pd\npd.DataFrame({'n': range(5), 'square': [n * n for n in range(5)]})"), "square"),
        (code(FILES), "success"),
        (code(PROGRESS), "done"),
        (BenchCall::new("run_command", json!({ "command": "seq 1 100" })), "100"),
        (BenchCall::new("list_files", json!({})), "notes.txt"),
        (BenchCall::new("read_file", json!({ "path": "notes.txt" })), "note 99"),
        (BenchCall::new("search_files", json!({ "text": "note 9" })), "note 90"),
        (BenchCall::new("write_file", json!({ "path": "a.py", "content": "print(1)" })), "a.py"),
        (BenchCall::new("create_context", json!({ "name": "second" })), "second"),
    ]
}

pub(crate) fn measure(bench: &Bench) -> Result<Figure, BenchError> {
    let mut samples = Samples::default();
    let site = Site::start()?;
    samples.begin_round();
    let mut ours = server::stdio(bench, "sandpool", Pool::Full, &browser::settings(&site))?;
    ours.call_when_ready(&BenchCall::new("run_code", json!({ "code": "1" })))?;
    samples.take(LIST[0], || listed(&mut ours))?;
    samples.take(ANSWERS, || {
        let read = |(call, part): (BenchCall, &str)| read(&mut ours, &call, part);
        Ok(vec![calls().into_iter().map(read).sum::<Result<f64, _>>()?])
    })?;
    let url = format!("http://{}:{}/", browser::NAME, site.port);
    samples.take(PAGE[0], || {
        read(&mut ours, &BenchCall::new("browser_open", json!({ "url": url })), "Fifty things")?;
        Ok(vec![read(&mut ours, &BenchCall::new("browser_snapshot", json!({})), "Buy 50")?])
    })?;
    if let Some(mut theirs) = samples.need(PLAYWRIGHT, browser::playwright(bench, &[]))? {
        let url = format!("http://127.0.0.1:{}/", site.port);
        samples.take(LIST[1], || listed(&mut theirs))?;
        samples.take(PAGE[1], || {
            read(&mut theirs, &BenchCall::new("browser_navigate", json!({ "url": url })), "Fifty things")?;
            Ok(vec![read(&mut theirs, &BenchCall::new("browser_snapshot", json!({})), "Buy 50")?])
        })?;
    }
    let mut figure = Figure::new("tokens", "what a model has to read", &samples);
    let characters = |name: &str| samples.quantity(name, samples.median(name), Unit::Characters);
    let goal = Goal::at_most(LIST_GOAL, Unit::Characters);
    let none = || Err("not measured".to_owned());
    figure.lines = vec![
        ReportRow::new("`tools/list`", characters(LIST[0]), none(), goal),
        browser::beside(&samples, "`tools/list`", &[LIST[0], "", LIST[1]], PLAYWRIGHT, None, &characters),
        ReportRow::new("ten typical answers", characters(ANSWERS), none(), None),
        browser::beside(&samples, "a page's snapshot", &[PAGE[0], "", PAGE[1]], PLAYWRIGHT, None, &characters),
    ];
    let tokens = |name: &str| samples.median(name).map_or(0.0, |characters| characters / 4.0);
    figure.notes = vec![format!(
        "`tokens`: at four characters a token, the list of tools is about {:.0} tokens, ten answers {:.0}, the page {:.0}",
        tokens(LIST[0]),
        tokens(ANSWERS),
        tokens(PAGE[0])
    )];
    Ok(figure)
}

/// Returns the length of the list of tools as a client receives it.
fn listed(client: &mut Mcp) -> Result<Vec<f64>, BenchError> {
    Ok(vec![length(&client.list_tools()?.to_string())])
}

/// Returns the length of the text of an answer, which has to contain `part`.
fn read(client: &mut Mcp, call: &BenchCall, part: &str) -> Result<f64, BenchError> {
    let answer: Value = browser::expect(client.call(call)?, part)?.result;
    Ok(length(&browser::text(&answer)))
}

fn length(text: &str) -> f64 {
    text.chars().count() as f64
}
