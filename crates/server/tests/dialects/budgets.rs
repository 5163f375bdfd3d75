//! `sandpool` answers in few characters: no tool exceeds the text budget, nothing is sent twice, and the texts of runs are
//! those that a reader of a terminal would see.

use std::collections::BTreeMap;

use dialects::{Answer, Block, Lowered, Options, RenderInput, Reply, sandpool};
use engine::op::browser::{BrowseResult, PageEvent, PageInfo, ReplyExtras, Snapshot, TabInfo};
use engine::op::{
    Browsed, Call, Captured, CellError, Edited, EngineError, EventSink, FileListing, FoundLine, FoundLines, Outcome,
    Ran, Realm, RunInfo, RunOutcome, RunProgress, StoppedContext, Tenant, UploadLink,
};
use serde_json::{Value, json};
use server::handler::Execute;
use tokio_util::sync::CancellationToken;

use crate::tools::{Tools, fence};

/// What a client receives: the text of the blocks, and the object if the tool sends one.
struct Sent {
    answer: Answer,
    texts: Vec<String>,
    object: Option<String>,
}

impl Sent {
    fn note(&self) -> String {
        self.answer.structured["note"].as_str().unwrap_or_default().to_owned()
    }
}

fn tools() -> Tools {
    Tools::with_links(&sandpool::DIALECT)
}

/// The engine's own outcome of a call, which tests then make large.
async fn outcome(tools: &Tools, tool: &str, args: &Value) -> Outcome {
    let call = Call {
        tenant: Tenant::local(),
        realm: Realm("sandpool"),
        connection: None,
        cancel: CancellationToken::new(),
        events: EventSink::default(),
        memory: Default::default(),
        stages: Default::default(),
        found: Default::default(),
    };
    let Ok(Lowered { op, .. }) = (tools.row(tool).lower)(args.as_object().unwrap(), &tools.options) else { panic!() };
    tools.engine.execute(&call, op).await.unwrap()
}

fn render(tools: &Tools, tool: &str, args: &Value, outcome: Result<Outcome, EngineError>) -> Sent {
    let (row, args) = (tools.row(tool), args.as_object().unwrap());
    let input = RenderInput { tool: row.name, args, options: &tools.options, links: &tools.links, fence: &fence() };
    let Ok(Lowered { render, .. }) = (row.lower)(args, &tools.options) else { panic!("{tool} {args:?}") };
    let reply = match outcome {
        Ok(outcome) => row.render(&input, render, outcome),
        Err(error) => (row.render_error)(&input, &error),
    };
    let answer = match reply {
        Reply::Answer(answer) => answer,
        Reply::Error { message, .. } => Answer { blocks: vec![Block::Text(message)], ..Answer::default() },
    };
    let text = |block: &Block| match block {
        Block::Text(text) => Some(text.clone()),
        Block::Image { .. } => None,
        Block::Link { uri, .. } => Some(uri.clone()),
    };
    let texts = answer.blocks.iter().filter_map(text).collect();
    let object = (answer.fits && row.output_schema.is_some()).then(|| answer.structured.to_string());
    Sent { answer, texts, object }
}

fn length(text: &str) -> usize {
    text.chars().count()
}

/// Lines with quotes and characters of several bytes, so that JSON and UTF-8 need more than a character for some.
fn long() -> String {
    "a \"line\" of ünïcode\n".repeat(2_500)
}

fn row(path: &str) -> engine::op::FileEntry {
    engine::op::FileEntry { path: path.into(), size: 1, kind: engine::op::FileKind::File, modified: 0, below: None }
}

async fn huge_run(tools: &Tools) -> Ran {
    let Outcome::Ran(ran) = outcome(tools, "run_code", &json!({ "code": "x = 1" })).await else { panic!() };
    let stream = || Captured { text: long(), total_bytes: 1, ..Captured::default() };
    let bundle = || BTreeMap::from([("text/plain".to_owned(), json!(long()))]);
    Ran {
        stdout: stream(),
        stderr: stream(),
        value: Some(bundle().into_iter().collect()),
        displays: (0..20).map(|_| bundle().into_iter().collect()).collect(),
        error: Some(CellError { name: "E".repeat(256), value: long(), text: long() }),
        late: Some(long()),
        strays: Some(long()),
        notice: Some("a notice".into()),
        denied: (0..100).map(|n| format!("GET http://{n}.test/ was denied: {}", "x".repeat(500))).collect(),
        end: RunOutcome::Error,
        ..*ran
    }
}

async fn huge_page(tools: &Tools, result: BrowseResult) -> Outcome {
    let open = json!({ "url": "http://shop.test/" });
    let Outcome::Browsed(browsed) = outcome(tools, "browser_open", &open).await else { panic!() };
    let page = PageInfo { url: long(), title: long(), tab: 1, tabs: 2 };
    let happened = (0..100).map(|_| PageEvent::Dialog { kind: "alert".into(), message: long() }).collect();
    let extras = ReplyExtras { candidates: Vec::new(), changed: Some(long()) };
    let denied = vec!["x".repeat(5000); 100];
    Outcome::Browsed(Box::new(Browsed { page: Some(page), happened, denied, result: Ok(result), extras, ..*browsed }))
}

/// A background run up to `cursor`, which has ended if it has a result.
fn progress(output: String, cursor: u64, ran: Option<Ran>) -> RunProgress {
    RunProgress {
        run: "run-1".into(),
        context_id: "ctx-1".into(),
        command: false,
        queued: None,
        started_at: 0,
        ended_at: None,
        output,
        dropped: 0,
        cursor,
        end: ran.map(|ran| Ok(Box::new(ran))),
    }
}

/// Every tool with an outcome that is much larger than an answer may be, and what the answer says about the rest.
async fn huge(tools: &Tools) -> Vec<(&'static str, Value, Outcome, &'static str)> {
    let ran = huge_run(tools).await;
    let context = ran.context.clone();
    let contexts = (0..1000).map(|n| engine::op::ContextInfo { name: format!("context-{n}"), ..context.clone() });
    let progress = |ran| RunProgress { dropped: 5, ..progress(long(), 1 << 30, ran) };
    let listing = (0..10_000).map(|n| row(&format!("directory/with/a/long/name/{n:05}"))).collect();
    let found = FoundLine { path: "x".repeat(200), line: 1, text: "y".repeat(240) };
    let tab = |n| TabInfo { tab: n, url: long(), title: long(), shown: false };
    let deep = format!("{}a", "directory/".repeat(300));
    let snapshot = Snapshot {
        number: 1,
        text: String::new(),
        text_is_cut: false,
        elements: "line\n".repeat(4_000),
        next: Some(long()),
        removed: vec![long(); 50],
        notes: vec![long(); 50],
    };
    let picture = BrowseResult::Screenshot { png: "AAAA".into(), width: 1, height: 1, clipped: false };
    let file =
        |content: Vec<u8>| Outcome::File { path: "f".into(), size: content.len() as u64, content, key: "k".into() };
    let run = || json!({ "run": "run-1" });
    vec![
        ("run_code", json!({ "code": "1" }), Outcome::Ran(Box::new(ran.clone())), "part of stdout"),
        ("run_command", json!({ "command": "1" }), Outcome::Ran(Box::new(ran.clone())), "19 of displays"),
        (
            "run_code",
            json!({ "code": "1", "background": true }),
            Outcome::Started(RunInfo { run: "run-1".into(), queued: None, context: context.clone(), created: true }),
            "wait_run",
        ),
        ("wait_run", run(), Outcome::Progress(progress(None)), "part of output"),
        ("wait_run", run(), Outcome::Progress(progress(Some(ran.clone()))), "part of stderr"),
        (
            "wait_run",
            json!({ "run": "run-1", "cursor": 9 }),
            Outcome::Progress(progress(Some(ran.clone()))),
            "part of output",
        ),
        ("cancel_run", run(), Outcome::Cancelled { run: "run-1".into(), was_running: true }, ""),
        ("create_context", json!({}), Outcome::Created(context.clone()), ""),
        ("list_contexts", json!({}), Outcome::Contexts(contexts.collect()), "of contexts"),
        (
            "stop_context",
            json!({ "context": "a" }),
            Outcome::Stopped(StoppedContext {
                ended_runs: vec!["run-12345678".into(); 5000],
                ..StoppedContext::default()
            }),
            "of ended_runs",
        ),
        ("read_file", json!({ "path": "f" }), file(long().into_bytes()), ""),
        ("read_file", json!({ "path": "f", "encoding": "base64" }), file(vec![7; 1 << 20]), ""),
        ("read_file", json!({ "path": "f" }), file("x".repeat(1 << 20).into_bytes()), "characters, of which"),
        (
            "write_file",
            json!({ "path": "f", "content": "" }),
            Outcome::Written { path: deep.clone(), size: 0, key: "k".into() },
            "",
        ),
        (
            "list_files",
            json!({}),
            Outcome::Files(FileListing { entries: listing, total: 123_456, key: String::new() }),
            "of files. List a subdirectory",
        ),
        (
            "edit_file",
            json!({ "path": "f", "old_string": "a", "new_string": "b" }),
            Outcome::Edited(Edited {
                path: deep.clone(),
                found: 1 << 40,
                replaced: 0,
                lines: vec![1 << 40; 10],
                size: 0,
            }),
            "",
        ),
        (
            "search_files",
            json!({ "text": "y", "path": deep }),
            Outcome::Found(FoundLines { lines: vec![found; 500], ..FoundLines::default() }),
            "of matches. Search for something rarer",
        ),
        (
            "upload_link",
            json!({ "path": "f" }),
            Outcome::UploadLink(UploadLink { id: "0".repeat(32), path: deep, max_bytes: 1, expires_at: 1 }),
            "",
        ),
        ("browser_open", json!({ "url": "a" }), huge_page(tools, BrowseResult::Done).await, "of happened"),
        (
            "browser_act",
            json!({ "action": "tab" }),
            huge_page(tools, BrowseResult::Tabs { tabs: (0..100).map(tab).collect() }).await,
            "of tabs",
        ),
        (
            "browser_act",
            json!({ "action": "evaluate", "expression": "1" }),
            huge_page(tools, BrowseResult::Value { json: long(), truncated: false }).await,
            "part of value",
        ),
        (
            "browser_act",
            json!({ "action": "log" }),
            huge_page(tools, BrowseResult::Log { lines: vec![long(); 100], dropped: 1 }).await,
            "earlier lines are left out",
        ),
        ("browser_snapshot", json!({}), huge_page(tools, BrowseResult::Snapshot(snapshot)).await, "of removed"),
        ("browser_screenshot", json!({}), huge_page(tools, picture).await, "of happened"),
    ]
}

#[tokio::test]
async fn no_tool_exceeds_the_text_budget() {
    for text_budget in [20_000, 3_000] {
        let tools = Tools { options: Options { text_budget, ..Options::default() }, ..tools() };
        let mut tried: Vec<&str> = Vec::new();
        for (tool, args, outcome, said) in huge(&tools).await {
            let sent = render(&tools, tool, &args, Ok(outcome));
            // A snapshot has the length that its call asks for, beside the rest.
            // An answer repeats the path that it is about, as long as that is.
            let asked = match tool {
                "browser_snapshot" => 20_000,
                "write_file" | "upload_link" => 6_200,
                _ => 0,
            };
            let all: usize = sent.texts.iter().map(|text| length(text)).sum();
            // The frame: names, numbers, a link, the marks around what came from a page.
            assert!(
                all <= text_budget + asked + 1_000,
                "{tool} {args}: {all} characters with a budget of {text_budget}"
            );
            let object = sent.object.as_deref().map_or(0, length);
            assert!(object <= text_budget + asked + 1_000, "{tool} {args}: an object of {object} characters");
            if text_budget == 20_000 {
                assert!(sent.note().contains(said), "{tool} {args}: {}", sent.note());
            }
            tried.push(tool);
        }
        for row in sandpool::DIALECT.tools {
            assert!(tried.contains(&row.name), "{} was not tried", row.name);
        }
    }
}

#[tokio::test]
async fn no_error_exceeds_a_few_lines() {
    let tools = tools();
    let args = |tool: &str| match tool {
        "run_code" => json!({ "code": "1" }),
        "run_command" => json!({ "command": "1" }),
        "wait_run" | "cancel_run" => json!({ "run": "run-1" }),
        "stop_context" => json!({ "context": "a" }),
        "read_file" | "upload_link" => json!({ "path": "f" }),
        "write_file" => json!({ "path": "f", "content": "" }),
        "edit_file" => json!({ "path": "f", "old_string": "a", "new_string": "" }),
        "browser_open" => json!({ "url": "a" }),
        "browser_act" => json!({ "action": "back" }),
        _ => json!({}),
    };
    for row in sandpool::DIALECT.tools {
        for error in [
            EngineError::Sandbox(long()),
            EngineError::CreateFailed(long()),
            EngineError::InvalidPattern(long()),
            EngineError::InvalidEnvironment(long()),
            EngineError::ContextNotFound(long()),
            EngineError::AmbiguousName { name: long(), ids: vec!["ctx-12345678".into(); 1000] },
            EngineError::InvalidPath { path: long(), why: long() },
        ] {
            let sent = render(&tools, row.name, &args(row.name), Err(error));
            let all: usize = sent.texts.iter().map(|text| length(text)).sum();
            assert!(all <= 3_000, "{}: {all} characters", row.name);
        }
    }
}

/// However a text is shortened, the answer says so in one place of it.
#[tokio::test]
async fn a_stream_that_is_cut_twice_has_one_mark() {
    let tools = tools();
    let ran = huge_run(&tools).await;
    let text = format!("{}\n… [1000000 bytes left out] …\n{}", "a\n".repeat(6000), "b\n".repeat(4000));
    let stdout = Captured { text, total_bytes: 1_020_000, truncated: true, kept: None };
    let ran = Ran { stdout, ..Ran { stderr: Captured::default(), displays: Vec::new(), ..ran } };
    let sent = render(&tools, "run_code", &json!({ "code": "1" }), Ok(Outcome::Ran(Box::new(ran))));
    let stdout = sent.answer.structured["stdout"].as_str().unwrap();
    assert_eq!(stdout.matches("bytes left out").count(), 1, "{stdout}");
    let (head, rest) = stdout.split_once("… [").unwrap();
    let (gone, tail) = rest.split_once(" bytes left out] …\n").unwrap();
    assert!(head.starts_with("a\n") && tail.ends_with("b\n"), "{stdout}");
    assert_eq!(gone.parse::<usize>().unwrap() + head.len() + tail.len(), 1_020_001, "{gone}");
}

/// Text and pictures come as blocks alone; several clients show nothing else once there is an object.
#[test]
fn tools_that_answer_with_text_or_pictures_have_no_output_schema() {
    let without = sandpool::DIALECT.tools.iter().filter(|row| row.output_schema.is_none());
    assert_eq!(
        without.map(|row| row.name).collect::<Vec<_>>(),
        [
            "run_code",
            "run_command",
            "wait_run",
            "read_file",
            "list_files",
            "search_files",
            "browser_snapshot",
            "browser_screenshot"
        ]
    );
}

#[tokio::test]
async fn nothing_large_and_no_link_is_sent_twice() {
    let tools = tools();
    for (tool, args) in [
        ("write_file", json!({ "path": "a.txt", "content": "secret words" })),
        ("read_file", json!({ "path": "a.txt" })),
        ("run_code", json!({ "code": "spilled" })),
        ("run_code", json!({ "code": "1 / 0" })),
    ] {
        let outcome = outcome(&tools, tool, &args).await;
        let sent = render(&tools, tool, &args, Ok(outcome));
        let all = sent.texts.concat();
        let links: Vec<&str> = all.split("http://").skip(1).map(|link| link.split('"').next().unwrap()).collect();
        for link in &links {
            assert_eq!(links.iter().filter(|other| *other == link).count(), 1, "{tool}: {link} in {all}");
        }
        assert!(all.matches("secret words").count() <= 1, "{tool}: {all}");
        assert!(!all.contains(": ") || !all.contains("{\n"), "{tool} has spaces: {all}");
        assert!(!all.contains("null") && !all.contains("[]"), "{tool} has empty members: {all}");
    }
}

async fn shown(stdout: &str) -> String {
    let tools = tools();
    let Outcome::Ran(ran) = outcome(&tools, "run_code", &json!({ "code": "x = 1" })).await else { panic!() };
    let ran = Ran { stdout: Captured { text: stdout.into(), ..Captured::default() }, ..*ran };
    let sent = render(&tools, "run_code", &json!({ "code": "1" }), Ok(Outcome::Ran(Box::new(ran))));
    let object: Value = serde_json::from_str(&sent.texts[0]).unwrap();
    object["stdout"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn progress_bars_and_colours_are_left_out_of_results() {
    let bar: String = (0..=100).map(|n| format!("\r{n:3}% {}", "#".repeat(n / 4))).collect();
    assert_eq!(
        shown(&format!("start\n{bar}\n\u{1b}[32mdone\u{1b}[0m\r\n")).await,
        format!("start\n100% {}\ndone\n", "#".repeat(25))
    );
    assert_eq!(shown("a\tb\n\\r stays\n").await, "a\tb\n\\r stays\n");
}

/// A client that follows a run gets every character once, whatever the answers end with: an escape sequence that is cut
/// comes whole with the next answer.
#[tokio::test]
async fn a_client_that_follows_a_run_reads_everything_once() {
    let tools = tools();
    let Outcome::Ran(ran) = outcome(&tools, "run_code", &json!({ "code": "x = 1" })).await else { panic!() };
    let written = "one\n\u{1b}[31mtwo\u{1b}[0m\n\u{1b}]0;title\u{7}three\nfour";
    for cut in 1..written.len() {
        let (mut cursor, mut read) = (0, String::new());
        for (total, ends) in [(cut, false), (written.len(), false), (written.len(), true)] {
            let args = json!({ "run": "run-1", "cursor": cursor });
            let stdout = Captured { text: written.into(), ..Captured::default() };
            let ran = ends.then(|| Ran { stdout, ..*ran.clone() });
            let progress = progress(written[cursor..total].into(), total as u64, ran);
            let sent = render(&tools, "wait_run", &args, Ok(Outcome::Progress(progress)));
            let object = sent.answer.structured;
            read += object["output"].as_str().unwrap_or_default();
            assert_eq!(object.get("stdout"), None, "{object}");
            cursor = object["cursor"].as_u64().map_or(total, |cursor| cursor as usize);
        }
        assert_eq!(read, "one\ntwo\nthree\nfour", "cut at {cut}");
    }
}
