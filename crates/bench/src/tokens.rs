//! Measures how many characters a model has to read: the list of tools, typical answers, and a page, beside Playwright
//! MCP where it has an equivalent. Four characters are about one token of English text.

use serde_json::{Value, json};

use crate::browser::{self, PLAYWRIGHT};
use crate::client::{BenchCall, Client, Stdio as Mcp};
use crate::figures::OURS;
use crate::report::{Against, Figure, Goal, ReportRow, Unit};
use crate::server::{self, Pool};
use crate::site::Site;
use crate::stats::Samples;
use crate::{Bench, BenchError};

const LIST: [&str; 2] = ["tools/list, sandpool", "tools/list, Playwright MCP"];
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

/// A call that both servers offer on the page of a shop. Each array has our side first.
struct PageCall {
    what: &'static str,
    series: [&'static str; 2],
    calls: [fn(&str) -> BenchCall; 2],
    /// Part of the answer of both.
    part: &'static str,
    /// Part of a snapshot that is taken afterwards, which shows that the call had its effect.
    effect: Option<&'static str>,
}

const PAGE: [PageCall; 4] = [
    PageCall {
        what: "answer to `browser_open`, against `browser_navigate`",
        series: ["open, sandpool", "open, Playwright MCP"],
        calls: [
            |url| BenchCall::new("browser_open", json!({ "url": url })),
            |url| BenchCall::new("browser_navigate", json!({ "url": url })),
        ],
        part: "Fifty things",
        effect: None,
    },
    PageCall {
        what: "answer to `browser_snapshot`, against `browser_snapshot`",
        series: ["snapshot, sandpool", "snapshot, Playwright MCP"],
        calls: [|_| snapshot(), |_| snapshot()],
        part: "Buy 50",
        effect: None,
    },
    PageCall {
        what: "answer to `browser_act` click, against `browser_click`",
        series: ["click, sandpool", "click, Playwright MCP"],
        calls: [
            |_| BenchCall::new("browser_act", json!({ "action": "click", "target": "#buy-3" })),
            |_| BenchCall::new("browser_click", json!({ "target": "#buy-3" })),
        ],
        part: "",
        effect: Some("Cart: 1"),
    },
    PageCall {
        what: "answer to `browser_act` type, against `browser_type`",
        series: ["type, sandpool", "type, Playwright MCP"],
        calls: [
            |_| BenchCall::new("browser_act", json!({ "action": "type", "target": "#name", "text": "a visitor" })),
            |_| BenchCall::new("browser_type", json!({ "target": "#name", "text": "a visitor" })),
        ],
        part: "",
        effect: Some("Hello a visitor"),
    },
];

fn snapshot() -> BenchCall {
    BenchCall::new("browser_snapshot", json!({}))
}

/// Numbers of tools that the two servers list, ours first.
type Tools = [Option<usize>; 2];

pub(crate) fn measure(bench: &Bench) -> Result<Figure, BenchError> {
    let mut samples = Samples::default();
    let mut tools = Tools::default();
    let site = Site::start()?;
    samples.begin_round();
    let made = server::stdio(bench, "sandpool", Pool::Full, &browser::settings(&site)).and_then(|mut client| {
        client.call_when_ready(&BenchCall::new("run_code", json!({ "code": "1" })))?;
        Ok(client)
    });
    if let Some(mut ours) = samples.need(OURS, made)? {
        samples.take(LIST[0], || list(&mut ours, &mut tools[0]))?;
        samples.take(ANSWERS, || {
            let read = |(call, part): (BenchCall, &str)| read(&mut ours, &call, part);
            Ok(vec![calls().into_iter().map(read).sum::<Result<f64, _>>()?])
        })?;
        visit(&mut samples, &mut ours, 0, &format!("http://{}:{}/", browser::NAME, site.port))?;
    }
    if let Some(mut theirs) = samples.need(PLAYWRIGHT, browser::playwright(bench, &[]))? {
        samples.take(LIST[1], || list(&mut theirs, &mut tools[1]))?;
        visit(&mut samples, &mut theirs, 1, &format!("http://127.0.0.1:{}/", site.port))?;
    }
    let mut figure = Figure::new("tokens", "what a model has to read", &samples);
    figure.lines = lines(&samples, tools);
    figure.notes = estimate(&samples).into_iter().chain([NOTE.to_owned()]).collect();
    Ok(figure)
}

/// Estimates the tokens of our side, if all of it was measured.
fn estimate(samples: &Samples) -> Option<String> {
    let tokens = |name: &str| Some(samples.median(name)? / 4.0);
    let (list, answers, page) = (tokens(LIST[0])?, tokens(ANSWERS)?, tokens(PAGE[1].series[0])?);
    Some(format!(
        "`tokens`: at four characters a token, the list of tools is about {list:.0} tokens, ten answers {answers:.0}, \
         the page {page:.0}"
    ))
}

/// What the rows beside Playwright MCP compare.
const NOTE: &str = "`tokens`: both with their default tools, the same Chromium and the same page; n/a: Playwright MCP \
                    has no tool for it. After an action ours also reports what changed on the page. Playwright MCP \
                    reports the code that it ran and, except for typing, a file with a snapshot, which is not counted";

fn lines(samples: &Samples, [ours, theirs]: Tools) -> Vec<ReportRow> {
    let characters = |name: &str| samples.quantity(name, samples.median(name), Unit::Characters);
    let beside = |what: &str, [ours, theirs]: [&str; 2]| {
        browser::beside(samples, what, &[ours, "", theirs], PLAYWRIGHT, None, &characters)
    };
    let count = |before: &str, tools: Option<usize>| tools.map(|tools| format!("{before} {tools} tools"));
    let listed = format!("`tools/list`{}", count(" of", ours).unwrap_or_default());
    let list = beside(&format!("{listed}{}", count(", against", theirs).unwrap_or_default()), LIST);
    // Playwright MCP runs no code, no commands, and has no files.
    let none = Against { name: PLAYWRIGHT, theirs: Err("n/a".into()), ratio: None };
    let answers = beside("ten answers about code, commands and files", [ANSWERS, ""]);
    let mut lines = vec![
        ReportRow::new(&listed, list.ours.clone(), list.empty.clone(), Goal::at_most(LIST_GOAL, Unit::Characters)),
        list,
        ReportRow { against: Some(none), ..answers },
    ];
    lines.extend(PAGE.iter().map(|page_call| beside(page_call.what, page_call.series)));
    lines
}

/// Measures the answers of one side, 0 for ours and 1 for theirs, about the page at `url`.
fn visit(samples: &mut Samples, client: &mut Mcp, side: usize, url: &str) -> Result<(), BenchError> {
    for page_call in &PAGE {
        samples.take(page_call.series[side], || {
            let characters = read(client, &(page_call.calls[side])(url), page_call.part)?;
            if let Some(effect) = page_call.effect {
                read(client, &snapshot(), effect)?;
            }
            Ok(vec![characters])
        })?;
    }
    Ok(())
}

/// Returns the length of the list of tools as compact JSON, and stores how many they are.
fn list(client: &mut Mcp, tools: &mut Option<usize>) -> Result<Vec<f64>, BenchError> {
    let listed = client.list_tools()?["tools"].take();
    let all = listed.as_array().ok_or_else(|| BenchError::Said("no `tools` in the answer".into()))?;
    *tools = Some(all.len());
    Ok(vec![length(&listed.to_string())])
}

/// Returns the length of the text of an answer, which has to contain `part`.
fn read(client: &mut Mcp, call: &BenchCall, part: &str) -> Result<f64, BenchError> {
    let answer: Value = browser::expect(client.call(call)?, part)?.result;
    Ok(length(&browser::text(&answer)))
}

fn length(text: &str) -> f64 {
    text.chars().count() as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::table;

    fn measured(values: &[(&'static str, f64)]) -> Samples {
        let mut samples = Samples::default();
        for (series, value) in values {
            samples.take(series, || Ok(vec![*value])).unwrap();
        }
        samples
    }

    #[test]
    fn a_row_says_what_is_compared_and_what_has_no_equivalent() {
        let mut values = vec![(LIST[0], 15_000.0), (LIST[1], 20_286.0), (ANSWERS, 3_000.0)];
        values.extend(PAGE.iter().flat_map(|page_call| page_call.series).zip([200.0, 300.0].into_iter().cycle()));
        let mut figure = Figure::new("tokens", "", &Samples::default());
        figure.lines = lines(&measured(&values), [Some(17), Some(25)]);
        insta::assert_snapshot!(table(figure), @"
        | figure | ours | goal | reached | with empty pools | alternative | ratio |
        |---|---|---|---|---|---|---|
        | `tools/list` of 17 tools | 15,000 characters | ≤ 16,000 characters | yes | – | – | – |
        | `tools/list` of 17 tools, against 25 tools | 15,000 characters | – | – | – | Playwright MCP: 20,286 characters | 1.4 × |
        | ten answers about code, commands and files | 3,000 characters | – | – | – | Playwright MCP: n/a | – |
        | answer to `browser_open`, against `browser_navigate` | 200 characters | – | – | – | Playwright MCP: 300 characters | 1.5 × |
        | answer to `browser_snapshot`, against `browser_snapshot` | 200 characters | – | – | – | Playwright MCP: 300 characters | 1.5 × |
        | answer to `browser_act` click, against `browser_click` | 200 characters | – | – | – | Playwright MCP: 300 characters | 1.5 × |
        | answer to `browser_act` type, against `browser_type` | 200 characters | – | – | – | Playwright MCP: 300 characters | 1.5 × |
        ");
    }

    #[test]
    fn a_server_that_is_missing_is_the_reason_in_each_of_its_cells() {
        let mut samples = measured(&[(LIST[0], 16_001.0)]);
        let missing = BenchError::Said("cannot be installed here: no npm".into());
        samples.need::<Mcp>(PLAYWRIGHT, Err(missing)).unwrap();
        let mut figure = Figure::new("tokens", "", &samples);
        figure.lines = lines(&samples, [Some(17), None]);
        insta::assert_snapshot!(table(figure), @"
        | figure | ours | goal | reached | with empty pools | alternative | ratio |
        |---|---|---|---|---|---|---|
        | `tools/list` of 17 tools | 16,001 characters | ≤ 16,000 characters | no | – | – | – |
        | `tools/list` of 17 tools | 16,001 characters | – | – | – | Playwright MCP: cannot be installed here: no npm | – |
        | ten answers about code, commands and files | not measured | – | – | – | Playwright MCP: n/a | – |
        | answer to `browser_open`, against `browser_navigate` | not measured | – | – | – | Playwright MCP: cannot be installed here: no npm | – |
        | answer to `browser_snapshot`, against `browser_snapshot` | not measured | – | – | – | Playwright MCP: cannot be installed here: no npm | – |
        | answer to `browser_act` click, against `browser_click` | not measured | – | – | – | Playwright MCP: cannot be installed here: no npm | – |
        | answer to `browser_act` type, against `browser_type` | not measured | – | – | – | Playwright MCP: cannot be installed here: no npm | – |
        ");
    }
}
