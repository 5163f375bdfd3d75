//! The `sandpool` dialect: what an agent is handed.

use std::time::Duration;

use dialects::{ArgError, Block, Links, Options, RenderInput, Reply, sandpool};
use engine::op::browser::{BrowserAction as Ask, MouseButton, TabAsk};
use engine::op::{Command, ContextSelector, EngineError, FileOwner, Language, Op, Size};
use serde_json::{Value, json};

use crate::mcp_fake;
use crate::tools::Tools;

#[test]
fn the_tools_are_those_of_the_table_and_no_other() {
    let tools = sandpool::DIALECT.tools.iter();
    let fields = tools.map(|row| {
        let fields = row.fields.iter().map(|f| format!("{}{}", f.name, if f.required { "" } else { "?" }));
        format!("{} {{{}}}", row.name, fields.collect::<Vec<_>>().join(", "))
    });
    assert_eq!(
        fields.collect::<Vec<_>>(),
        [
            "run_code {code, language?, context?, timeout?, env?, network?, background?}",
            "run_command {command, context?, timeout?, env?, network?, background?}",
            "wait_run {run, cursor?, wait?}",
            "cancel_run {run}",
            "create_context {name?, language?, size?}",
            "list_contexts {}",
            "stop_context {context}",
            "read_file {path, context?, encoding?, offset?, limit?}",
            "write_file {path, content, context?, encoding?}",
            "list_files {path?, depth?, context?}",
            "edit_file {path, old_string, new_string, replace_all?, context?}",
            "search_files {text?, regex?, glob?, path?, context?}",
            "upload_link {path, context?}",
            "browser_open {url, context?, timeout?}",
            "browser_act {action, target?, text?, submit?, append?, slowly?, key?, button?, double?, options?, files?, \
             direction?, pixels?, gone?, tab?, url?, close?, expression?, changes?, context?, timeout?}",
            "browser_snapshot {context?, max_chars?, from?, since?, find?, within?}",
            "browser_screenshot {context?, target?, full_page?}",
        ]
    );
}

/// What E2B's old client does with the answer to `{code}`.
#[tokio::test]
async fn code_alone_is_answered_with_the_json_that_e2b_s_client_reads() {
    let tools = Tools::with_links(&sandpool::DIALECT);
    tools.answer("run_code", json!({ "code": "x = Hello World" })).await;
    let answer = tools.answer("run_code", json!({ "code": "print(x)" })).await;
    let Block::Text(text) = &answer.blocks[0] else { panic!() };
    assert_eq!(text, r#"{"stdout":"Hello World\n","stderr":"","success":true,"execution_time":0.012}"#);
    let output: Value = serde_json::from_str(text).unwrap();
    assert_eq!(output, answer.structured);
}

#[tokio::test]
async fn a_session() {
    let tools = Tools::with_links(&sandpool::DIALECT);
    let said = tools
        .transcript(&[
            ("list_contexts", json!({})),
            ("run_code", json!({ "code": "x = 42" })),
            ("run_code", json!({ "code": "x" })),
            ("run_code", json!({ "code": "console.log(x)", "language": "javascript" })),
            ("run_code", json!({ "code": "1 / 0", "context": "default" })),
            ("run_command", json!({ "command": "ls" })),
            ("run_code", json!({ "code": "ls -l", "language": "bash" })),
            ("run_command", json!({ "command": "exit 2" })),
            ("run_code", json!({ "code": "warned", "env": { "A": "b" }, "timeout": 300 })),
            ("create_context", json!({ "name": "big", "language": "typescript", "size": "large" })),
            ("create_context", json!({})),
            ("run_code", json!({ "code": "x", "context": "big" })),
            ("list_contexts", json!({})),
            ("stop_context", json!({ "context": "big" })),
            ("stop_context", json!({ "context": "big" })),
            ("run_code", json!({ "code": "x", "context": "big" })),
            ("run_code", json!({ "code": "spilled" })),
            ("run_code", json!({ "code": "picture" })),
            ("run_code", json!({ "code": "markup" })),
            ("run_code", json!({ "code": "rich" })),
            ("run_code", json!({ "code": "late" })),
            ("run_code", json!({ "code": "notice" })),
        ])
        .await;
    insta::assert_snapshot!(said);
}

/// W26.
#[tokio::test]
async fn what_earlier_calls_left_running_prints_into_late_output() {
    let tools = Tools::with_links(&sandpool::DIALECT);
    let answer = tools.answer("run_code", json!({ "code": "strays" })).await;
    assert_eq!(answer.structured["late_output"], "[printed by what earlier calls left running]\nstray\n");
    assert_eq!(answer.structured["stdout"], "");
}

#[tokio::test]
async fn a_background_run_is_begun_followed_and_ended() {
    let tools = Tools::with_links(&sandpool::DIALECT);
    let said = tools
        .transcript(&[
            ("run_code", json!({ "code": "forever", "background": true })),
            ("wait_run", json!({ "run": "run-1", "wait": 0 })),
            ("wait_run", json!({ "run": "run-1", "cursor": 7, "wait": 0 })),
            ("cancel_run", json!({ "run": "run-1" })),
            ("wait_run", json!({ "run": "run-1" })),
            ("cancel_run", json!({ "run": "run-1" })),
            ("run_command", json!({ "command": "exit 3", "background": true })),
            ("wait_run", json!({ "run": "run-2" })),
            ("run_code", json!({ "code": "1 / 0", "background": true })),
            ("wait_run", json!({ "run": "run-3" })),
            ("run_code", json!({ "code": "timeout kept", "background": true })),
            ("wait_run", json!({ "run": "run-4" })),
            ("run_code", json!({ "code": "busy", "background": true })),
            ("wait_run", json!({ "run": "run-5" })),
            ("run_code", json!({ "code": "denied", "background": true })),
            ("wait_run", json!({ "run": "run-6" })),
            ("wait_run", json!({ "run": "run-nobody" })),
            ("cancel_run", json!({ "run": "run-nobody" })),
        ])
        .await;
    insta::assert_snapshot!(said);
}

#[tokio::test]
async fn a_denial_is_stated_once_and_a_missing_network_too() {
    let tools = Tools::with_links(&sandpool::DIALECT);
    let answer = tools.answer("run_code", json!({ "code": "denied aloud" })).await;
    let Block::Text(text) = &answer.blocks[0] else { panic!() };
    assert_eq!(text.matches("no rule allows it").count(), 1, "{text}");
    assert_eq!(answer.structured["denied"], json!([mcp_fake::DENIED]));
    let short = "CONNECT evil.test:443 was denied";
    assert_eq!(answer.structured["stderr"], format!("retrying: {short}\n"));
    assert_eq!(answer.structured["error"]["value"], format!("OSError: {short}, caused by OSError: {short}"));
    assert_eq!(answer.structured["result"], format!("{{\"error\": \"{short}\"}}"));

    let answer = tools.answer("run_code", json!({ "code": "offline" })).await;
    assert_eq!(answer.structured["note"], "Network access is off: the operator gives none.");
    let answer = tools.answer("run_code", json!({ "code": "offline, but wrong" })).await;
    assert_eq!(answer.structured.get("note"), None);
}

#[tokio::test]
async fn every_end_of_a_run_says_what_happened_and_what_to_do() {
    let tools = Tools::with_links(&sandpool::DIALECT);
    let mut said = String::new();
    for code in [
        "exit",
        "timeout kept",
        "timeout lost",
        "interrupted",
        "memory",
        "exited",
        "crashed",
        "lost",
        "busy",
        "queue full",
        "not ready",
        "back end",
    ] {
        said += &tools.transcript(&[("run_code", json!({ "code": code }))]).await;
        if !["exit", "timeout lost", "busy", "queue full", "not ready", "back end"].contains(&code) {
            said += &tools.transcript(&[("run_command", json!({ "command": code }))]).await;
        }
    }
    insta::assert_snapshot!(said);
}

#[tokio::test]
async fn files_go_in_and_out() {
    let tools = Tools::with_links(&sandpool::DIALECT);
    let said = tools
        .transcript(&[
            ("list_files", json!({})),
            ("write_file", json!({ "path": "data/in.csv", "content": "a,b\n1,2\n3,4\n" })),
            ("write_file", json!({ "path": "/workspace/raw.bin", "content": "AP/+\nAQ", "encoding": "base64" })),
            ("write_file", json!({ "path": "plot.png", "content": (mcp_fake::PNG), "encoding": "base64" })),
            ("write_file", json!({ "path": "empty", "content": "" })),
            ("list_files", json!({})),
            ("list_files", json!({ "path": "data" })),
            ("read_file", json!({ "path": "data/in.csv" })),
            ("read_file", json!({ "path": "data/in.csv", "offset": 2, "limit": 1 })),
            ("read_file", json!({ "path": "data/in.csv", "offset": 3 })),
            ("read_file", json!({ "path": "data/in.csv", "offset": 4 })),
            ("read_file", json!({ "path": "data/in.csv", "encoding": "base64" })),
            ("read_file", json!({ "path": "empty" })),
            ("read_file", json!({ "path": "raw.bin" })),
            ("read_file", json!({ "path": "raw.bin", "encoding": "base64" })),
            ("read_file", json!({ "path": "raw.bin", "encoding": "utf-8" })),
            ("read_file", json!({ "path": "plot.png" })),
            ("read_file", json!({ "path": "nowhere" })),
            ("write_file", json!({ "path": "x", "content": "no base64!", "encoding": "base64" })),
            ("write_file", json!({ "path": "../out", "content": "x" })),
            ("read_file", json!({ "path": "/etc/passwd" })),
            ("read_file", json!({ "path": "" })),
            ("list_files", json!({ "context": "nobody" })),
        ])
        .await;
    insta::assert_snapshot!(said);
}

#[tokio::test]
async fn files_are_edited_searched_and_uploaded() {
    let tools = Tools::with_links(&sandpool::DIALECT);
    let said = tools
        .transcript(&[
            ("write_file", json!({ "path": "a.py", "content": "x = 1\ny = x\nz = x\n" })),
            ("write_file", json!({ "path": "raw.bin", "content": "AP/+\nAQ", "encoding": "base64" })),
            ("edit_file", json!({ "path": "a.py", "old_string": "x = 1", "new_string": "x = 2" })),
            ("edit_file", json!({ "path": "a.py", "old_string": " = x", "new_string": " = 3" })),
            ("edit_file", json!({ "path": "a.py", "old_string": " = x", "new_string": "", "replace_all": true })),
            ("edit_file", json!({ "path": "a.py", "old_string": "nowhere", "new_string": "" })),
            ("edit_file", json!({ "path": "b.py", "old_string": "x", "new_string": "" })),
            ("search_files", json!({ "text": "x" })),
            ("search_files", json!({ "glob": "*.py", "path": "/tmp/d/" })),
            ("search_files", json!({ "text": "(", "regex": true })),
            ("upload_link", json!({ "path": "in/data.csv" })),
            ("upload_link", json!({ "path": "/tmp/data.csv" })),
            ("read_file", json!({ "path": "/tmp/a.py" })),
            ("read_file", json!({ "path": "/outputs/nothing.txt" })),
            ("read_file", json!({ "path": format!("http://127.0.0.1:8775/files/{}/a.py", "0".repeat(64)) })),
        ])
        .await;
    insta::assert_snapshot!(said);
}

/// Where each path leads. `/tmpx` and the like are not below `/tmp`.
#[test]
fn paths_below_other_directories_and_links_are_read() {
    let owner = |path: &str| match lower("read_file", json!({ "path": path })) {
        Ok(Op::ReadFile { owner: FileOwner::Context(_, root), path }) => format!("{root:?} {path}"),
        Ok(Op::ReadLink { key, path, .. }) => format!("link {} {path}", &key[..2]),
        Ok(other) => panic!("{other:?}"),
        Err(refused) => refused.message,
    };
    let key = "ab".repeat(32);
    for (path, leads) in [
        ("a", "Workspace a"),
        ("tmp/a", "Workspace tmp/a"),
        ("/workspace/tmp/a", "Workspace tmp/a"),
        ("/tmp/a/b", "Tmp a/b"),
        ("/data/a", "Data a"),
        ("/outputs/stdout-1.txt", "Outputs stdout-1.txt"),
        ("/tmp", "Tmp ."),
        ("/tmpx/a", "path /tmpx/a is refused: path must be relative to /workspace"),
        ("/tmp/../etc/passwd", "path /tmp/../etc/passwd is refused: path cannot lead out of /tmp"),
        ("/etc/passwd", "path /etc/passwd is refused: path must be relative to /workspace"),
        (&format!("http://h/files/{key}/a%20b?expires=1"), "link ab a b"),
    ] {
        assert_eq!(owner(path), leads, "{path}");
    }
    let refused = owner(&format!("http://h/files/{key}/../x"));
    assert!(refused.contains("cannot lead out"), "{refused}");
    // Uploads and other writes go to the workspace alone.
    for tool in ["upload_link", "write_file"] {
        let refused = lower(tool, json!({ "path": "/tmp/a", "content": "" })).err().unwrap().message;
        assert!(refused.contains("must be relative to /workspace"), "{tool}: {refused}");
    }
}

#[test]
fn errors_name_paths_below_other_directories_as_the_client_passed_them() {
    let (options, links, fence) = (Options::default(), Links::default(), crate::tools::fence());
    let said = |tool: &str, path: &str, error: &EngineError| {
        let row = sandpool::DIALECT.find(tool).unwrap();
        let Value::Object(args) = json!({ "path": path }) else { unreachable!() };
        let input = RenderInput { tool: row.name, args: &args, options: &options, links: &links, fence: &fence };
        let Reply::Answer(answer) = (row.render_error)(&input, error) else { panic!("an error of JSON-RPC") };
        answer.structured["error"].as_str().unwrap().to_owned()
    };
    let invalid = EngineError::InvalidPath { path: "a/b".into(), why: "`a/b` is a directory".into() };
    let large = EngineError::FileTooLarge { path: "a/b".into(), limit: 9 };
    let failed = EngineError::Sandbox("cannot open `a/b`: Permission denied".into());
    for tool in ["read_file", "edit_file", "search_files"] {
        let refused = "The path /tmp/a/b is refused: `/tmp/a/b` is a directory.";
        assert_eq!(said(tool, "/tmp/a/b", &invalid), refused, "{tool}");
        assert!(said(tool, "/data/a/b", &large).starts_with("/data/a/b is over the limit of 9 bytes"), "{tool}");
        assert!(said(tool, "/tmp/a/b", &failed).contains("cannot open `/tmp/a/b`: Permission denied"), "{tool}");
        assert!(said(tool, "/tmp/a/b", &EngineError::FileNotFound("a/b".into())).contains("no file /tmp/a/b;"));
        assert_eq!(said(tool, "a/b", &invalid), "The path a/b is refused: `a/b` is a directory.", "{tool}");
    }
}

/// A text longer than one answer is read in pages that miss nothing, whatever its lines are like.
#[tokio::test]
async fn a_long_text_is_read_page_by_page() {
    let tools = Tools::with_links(&sandpool::DIALECT);
    let long_line = "ü".repeat(30_000);
    let text: String = (0..5000).map(|n| format!("line {n}\n")).chain([long_line.clone()]).collect();
    tools.answer("write_file", json!({ "path": "f", "content": text })).await;
    let (mut read, mut next) = (String::new(), 1);
    loop {
        let page = tools.answer("read_file", json!({ "path": "f", "offset": next })).await;
        let content = page.structured["content"].as_str().unwrap();
        assert!(content.chars().count() <= 20_100);
        assert_eq!(page.blocks[0], Block::Text(content.into()));
        read += content;
        match page.structured["next_line"].as_u64() {
            Some(line) => next = line,
            None => {
                assert!(page.structured["note"].as_str().unwrap().contains("5001 has 30000 characters"));
                break;
            }
        }
    }
    assert!(read.starts_with(text.strip_suffix(&long_line).unwrap()));
}

#[tokio::test]
async fn a_file_too_large_for_an_answer_is_refused() {
    let tools = Tools::with_links(&sandpool::DIALECT);
    tools.answer("write_file", json!({ "path": "f", "content": "x".repeat(3 << 20) })).await;
    let answer = tools.answer("read_file", json!({ "path": "f", "encoding": "base64" })).await;
    assert!(answer.is_error && !answer.fits);
}

/// However much is displayed, the answer stays far below what clients read.
#[tokio::test]
async fn texts_that_are_displayed_have_one_budget_together() {
    let tools = Tools::with_links(&sandpool::DIALECT);
    let answer = tools.answer("run_code", json!({ "code": "displays" })).await;
    let displays = answer.structured["displays"].as_array().unwrap();
    assert_eq!(displays.len(), 1);
    assert_eq!(answer.structured["result"], "the end");
    let Block::Text(text) = &answer.blocks[0] else { panic!() };
    assert!(text.chars().count() <= 20_000);
}

fn lower(tool: &str, arguments: Value) -> Result<Op, ArgError> {
    let row = sandpool::DIALECT.find(tool).unwrap();
    let Value::Object(mut args) = arguments else { panic!("arguments are an object") };
    sandpool::DIALECT.prepare(row, &mut args);
    sandpool::DIALECT.lower(row, &args, &Options::default()).map(|lowered| lowered.op)
}

#[test]
fn without_a_context_everything_goes_to_one_that_makes_itself() {
    let target = |op: Op| match op {
        Op::RunCode(run) => run.target,
        Op::RunCommand(run) => run.target,
        Op::ReadFile { owner: FileOwner::Context(target, _), .. }
        | Op::WriteFile { owner: FileOwner::Context(target, _), .. }
        | Op::ListFiles { owner: FileOwner::Context(target, _), .. }
        | Op::EditFile { owner: FileOwner::Context(target, _), .. }
        | Op::SearchFiles { owner: FileOwner::Context(target, _), .. }
        | Op::UploadLink { target, .. } => target,
        other => panic!("{other:?}"),
    };
    for (tool, mut arguments) in [
        ("run_code", json!({ "code": "1" })),
        ("run_command", json!({ "command": "1" })),
        ("read_file", json!({ "path": "a" })),
        ("write_file", json!({ "path": "a", "content": "" })),
        ("list_files", json!({})),
        ("edit_file", json!({ "path": "a", "old_string": "a", "new_string": "" })),
        ("search_files", json!({})),
        ("upload_link", json!({ "path": "a" })),
    ] {
        let made = target(lower(tool, arguments.clone()).unwrap());
        assert_eq!(made.which, ContextSelector::Named("default".into()));
        assert_eq!(made.make.unwrap().name, "default");
        arguments["context"] = json!("a");
        let named = target(lower(tool, arguments).unwrap());
        assert_eq!((named.which, named.make), (ContextSelector::Named("a".into()), None));
    }
}

#[test]
fn arguments_become_operations() {
    let Op::RunCode(run) = lower("run_code", json!({ "code": "1", "language": "typescript", "timeout": 5.0 })).unwrap()
    else {
        panic!()
    };
    assert_eq!((run.language, run.timeout.unwrap().as_secs(), run.background), (Some(Language::Typescript), 5, false));
    // Nobody waits for a background run: it gets the longest time.
    let Op::RunCode(run) = lower("run_code", json!({ "code": "1", "background": true })).unwrap() else { panic!() };
    assert_eq!((run.language, run.timeout.unwrap().as_secs()), (None, 1800));
    let Op::RunCommand(run) =
        lower("run_code", json!({ "code": "ls", "language": "sh", "env": { "A": "b" } })).unwrap()
    else {
        panic!()
    };
    assert_eq!((run.command, run.env.0["A"].as_str()), (Command::Bash("ls".into()), "b"));
    let Op::CreateContext(new) = lower("create_context", json!({ "name": "данные_1", "size": "small" })).unwrap()
    else {
        panic!()
    };
    assert_eq!((new.name.as_str(), new.size), ("данные_1", Some(Size::Small)));
}

#[test]
fn refusals_say_what_would_be_right() {
    for (tool, arguments, why) in [
        ("run_code", json!({ "code": "" }), "code is required"),
        ("run_code", json!({ "code": null }), "code must be a string, got null"),
        ("run_code", json!({ "code": 5 }), "code must be a string, got 5"),
        (
            "run_code",
            json!({ "code": "1", "language": "ruby" }),
            "language must be one of 'python', 'javascript', 'typescript', 'bash', got 'ruby'",
        ),
        (
            "run_code",
            json!({ "code": "1", "language": "pyhton" }),
            "language must be one of 'python', 'javascript', 'typescript', 'bash', got 'pyhton'; did you mean 'python'?",
        ),
        (
            "run_code",
            json!({ "code": "1", "language": 3 }),
            "language must be a string, one of python, javascript, typescript, bash, got 3",
        ),
        (
            "run_code",
            json!({ "code": "1", "timeout": 301 }),
            "timeout must be a whole number from 1 to 300, got 301; background=true allows up to 1800",
        ),
        (
            "run_code",
            json!({ "code": "1", "timeout": "-5" }),
            "timeout must be a whole number from 1 to 300, got -5; background=true allows up to 1800",
        ),
        (
            "run_code",
            json!({ "code": "1", "timeout": "5 minutes" }),
            "timeout must be a whole number [1–300; background 1–1800], got '5 minutes'",
        ),
        (
            "run_command",
            json!({ "command": "1", "timeout": 1801, "background": true }),
            "timeout must be a whole number from 1 to 1800, got 1801",
        ),
        ("run_command", json!({ "command": "1", "network": "on" }), "network must be true or false, got 'on'"),
        ("run_command", json!({ "command": "1", "env": "A=b" }), "env must be an object of strings, got 'A=b'"),
        ("run_command", json!({ "command": "1", "env": { "A": 1.5 } }), "env.A must be a string, got a number"),
        ("wait_run", json!({ "run": "a", "wait": 51 }), "wait must be a whole number from 0 to 50, got 51"),
        ("wait_run", json!({ "run": "a", "wait": "long" }), "wait must be a whole number from 0 to 50, got 'long'"),
        (
            "create_context",
            json!({ "name": "a b" }),
            "name cannot be empty or contain special characters: use letters, digits, '-', '_' and '.', got 'a b'",
        ),
        (
            "create_context",
            json!({ "name": "default" }),
            "name cannot be `default`: that context makes itself when a call leaves `context` out",
        ),
        (
            "browser_act",
            json!({ "action": "click_element", "target": "a" }),
            "action must be one of 'click', 'type', 'press', 'select', 'hover', 'scroll', 'back', 'forward', 'reload', \
             'wait', 'upload', 'tab', 'evaluate', 'log', got 'click_element'; did you mean 'click'?",
        ),
    ] {
        assert_eq!(lower(tool, arguments).unwrap_err().message, why);
    }
}

/// What models write, and what it means. The limits stay those of the plain spelling.
#[test]
fn sp70_clear_spellings_are_accepted() {
    for (tool, written, meant) in [
        (
            "run_code",
            json!({ "code": "1", "language": "Python", "timeout": "30", "background": "true", "context": null }),
            json!({ "code": "1", "language": "python", "timeout": 30, "background": true }),
        ),
        ("run_code", json!({ "code": "1", "language": " js " }), json!({ "code": "1", "language": "javascript" })),
        ("run_code", json!({ "code": "1", "language": "TS" }), json!({ "code": "1", "language": "typescript" })),
        ("run_code", json!({ "code": "1", "language": "python3" }), json!({ "code": "1", "language": "python" })),
        ("run_code", json!({ "code": "ls", "language": "shell" }), json!({ "code": "ls", "language": "bash" })),
        ("run_code", json!({ "script": "1", "lang": "py" }), json!({ "code": "1", "language": "python" })),
        (
            "run_code",
            json!({ "code": "1", "context": "", "language": "", "timeout": "", "env": "", "network": "" }),
            json!({ "code": "1" }),
        ),
        (
            "run_command",
            json!({ "cmd": "ls", "env": "{\"A\": \"b\", \"N\": 1}", "network": "False", "timeoutSeconds": 5.0 }),
            json!({ "command": "ls", "env": { "A": "b", "N": "1" }, "network": false, "timeout": 5 }),
        ),
        (
            "run_command",
            json!({ "command": "ls", "env": { "PORT": 8080, "DEBUG": true } }),
            json!({ "command": "ls", "env": { "PORT": "8080", "DEBUG": "true" } }),
        ),
        ("read_file", json!({ "file_path": "a", "encoding": "UTF8" }), json!({ "path": "a", "encoding": "utf-8" })),
        ("list_files", json!({ "path": "" }), json!({})),
        (
            "edit_file",
            json!({ "filePath": "a", "oldString": "b", "new_str": "", "replaceAll": "true" }),
            json!({ "path": "a", "old_string": "b", "new_string": "", "replace_all": true }),
        ),
        (
            "browser_act",
            json!({ "action": "select", "selector": "a", "options": "one" }),
            json!({ "action": "select", "target": "a", "options": ["one"] }),
        ),
        (
            "browser_act",
            json!({ "action": "Select", "target": "a", "options": "[\"one\", \"two\"]" }),
            json!({ "action": "select", "target": "a", "options": ["one", "two"] }),
        ),
        // An empty text that a tool takes is not absent.
        (
            "browser_act",
            json!({ "action": "type", "target": "a", "text": "", "key": "" }),
            json!({ "action": "type", "target": "a", "text": "" }),
        ),
        // Some versions of n8n add these to the arguments of the model.
        (
            "run_code",
            json!({ "code": "1", "toolCallId": "x", "sessionId": "y", "chatInput": "z", "action": "sendMessage" }),
            json!({ "code": "1" }),
        ),
    ] {
        let [written, meant] = [written, meant].map(|args| format!("{:?}", lower(tool, args).unwrap()));
        assert_eq!(written, meant);
    }
}

#[test]
fn sp71_unknown_arguments_are_refused_with_what_was_meant() {
    let takes = "run_code takes code; optional: language, context, timeout, env, network, background";
    for (tool, arguments, why) in [
        (
            "run_code",
            json!({ "code": "1", "timeout_ms": 5, "cwd": "/" }),
            format!(
                "cwd is no argument of run_code\ntimeout_ms is no argument of run_code; did you mean timeout?\n{takes}"
            ),
        ),
        // Every mistake has its line.
        (
            "run_code",
            json!({ "langauge": "python", "timeout": "soon", "network": 1 }),
            format!(
                "code is required\ntimeout must be a whole number [1–300; background 1–1800], got 'soon'\n\
                 network must be true or false, got 1\nlangauge is no argument of run_code; did you mean language?\n{takes}"
            ),
        ),
        // An argument cannot be given twice.
        (
            "stop_context",
            json!({ "context": "a", "context_id": "b" }),
            "context_id is no argument of stop_context; did you mean context?\nstop_context takes context".into(),
        ),
        (
            "list_contexts",
            json!({ "name": "a" }),
            "name is no argument of list_contexts\nlist_contexts takes no arguments".into(),
        ),
        (
            "list_files",
            json!({ "recursive": true }),
            "recursive is no argument of list_files\nlist_files takes, all optional: path, depth, context".into(),
        ),
    ] {
        assert_eq!(lower(tool, arguments).unwrap_err().message, why);
    }
}

/// However many and however long they are, what is said of wrong arguments is short. A comparison of whole texts would
/// take hours here.
#[test]
fn sp71_refusals_are_bounded() {
    let long = "x".repeat(1 << 20);
    let mut arguments =
        json!({ "code": [long], "language": long, "timeout": long, "env": "[".repeat(1 << 20), "network": long });
    for number in 0..10_000 {
        arguments[format!("timeot{number}{long:.200}")] = json!(long.get(..100));
    }
    let said = lower("run_code", arguments).unwrap_err().message;
    assert!(said.len() < 3_000, "{} bytes", said.len());
    assert!(said.contains("9995 more are no arguments of run_code"), "{said}");
}

#[test]
fn an_unknown_tool_is_named_with_the_one_that_was_meant() {
    assert_eq!(sandpool::DIALECT.tool_hint("runCode"), "; did you mean run_code?");
    assert_eq!(sandpool::DIALECT.tool_hint("browser_snapshop"), "; did you mean browser_snapshot?");
    assert!(sandpool::DIALECT.tool_hint("python").starts_with("; the tools are run_code, run_command, wait_run, "));
    assert_eq!(dialects::workbench::DIALECT.tool_hint("sandbox_exce"), "");
}

#[tokio::test]
async fn an_environment_that_the_engine_refuses_is_an_invalid_argument() {
    let tools = Tools::with_links(&sandpool::DIALECT);
    let reply = tools.reply("run_code", json!({ "code": "bad environment", "env": { "A=": "b" } })).await;
    let Reply::Answer(answer) = reply else { panic!("{reply:?}") };
    assert_eq!(answer.blocks, [Block::Text("env is refused: the name `A=`".into())]);
    assert!(answer.is_error && !answer.fits);
    assert_eq!(answer.structured["code"], "INVALID_ARGUMENT");
}

/// A07: whatever a path is, lowering it keeps it a relative path without a step upwards, or refuses it.
#[test]
fn paths_stay_below_the_workspace() {
    let parts = ["..", ".", "", "a", "%2e%2e", "%252e", "..\\", "a.", "a ", "\"", "/", "//", "workspace", "é"];
    for a in parts {
        for b in parts {
            for path in [format!("{a}/{b}"), format!("/{a}/{b}"), format!("/workspace/{a}/{b}"), format!("{a}{b}")] {
                match lower("read_file", json!({ "path": path })) {
                    Ok(Op::ReadFile { path, .. }) => {
                        assert!(!path.starts_with('/') && path.split('/').all(|part| part != ".."), "{path}");
                    }
                    Ok(other) => panic!("{other:?}"),
                    Err(refused) => assert!(refused.message.contains("path"), "{}", refused.message),
                }
            }
        }
    }
}

#[tokio::test]
async fn pages() {
    let tools = Tools::with_links(&sandpool::DIALECT);
    let act = |arguments: Value| ("browser_act", arguments);
    let said = tools
        .transcript(&[
            ("browser_open", json!({ "url": "http://shop.test/" })),
            ("browser_snapshot", json!({})),
            ("browser_snapshot", json!({ "max_chars": 50, "since": 6 })),
            ("browser_snapshot", json!({ "find": "Basket" })),
            ("browser_screenshot", json!({ "full_page": true })),
            ("browser_screenshot", json!({ "target": "#huge" })),
            act(json!({ "action": "click", "target": "#everything" })),
            act(json!({ "action": "click", "target": "#download" })),
            act(json!({ "action": "type", "target": "ref_1", "text": "secret", "submit": true })),
            act(json!({ "action": "tab" })),
            act(json!({ "action": "evaluate", "expression": "document.title" })),
            act(json!({ "action": "log" })),
            ("run_code", json!({ "code": "denied" })),
            ("browser_open", json!({ "url": "http://again.test/" })),
            // What goes wrong.
            ("browser_open", json!({ "url": "http://evil.test/" })),
            ("browser_open", json!({ "url": "http://off.test/" })),
            ("browser_open", json!({ "url": "http://gone.test/" })),
            ("browser_open", json!({ "url": "http://none.test/" })),
            ("browser_open", json!({ "url": "http://shop.test/", "context": "nowhere" })),
            act(json!({ "action": "click", "target": "ref_99" })),
            act(json!({ "action": "click", "target": "button" })),
            act(json!({ "action": "click", "target": "#covered" })),
            act(json!({ "action": "click", "target": "#slow" })),
            act(json!({ "action": "click", "target": "#crash" })),
            act(json!({ "action": "click", "target": "<" })),
            act(json!({ "action": "wait", "text": "Done" })),
            act(json!({ "action": "evaluate", "expression": "no" })),
            act(json!({ "action": "dance" })),
        ])
        .await;
    insta::assert_snapshot!(said);
}

/// Each action with what it cannot do without, and what it becomes.
#[test]
fn actions_become_requests() {
    let lower = |arguments: Value| {
        lower("browser_act", arguments).map(|op| match op {
            Op::Browse(browse) => browse,
            other => panic!("{other:?}"),
        })
    };
    let ask = |arguments: Value| lower(arguments.clone()).unwrap_or_else(|e| panic!("{arguments}: {e:?}")).ask;
    let why = |arguments: Value| lower(arguments).unwrap_err().message;
    let at = || Some("ref_1".to_owned());

    let click = ask(json!({ "action": "click", "target": "ref_1", "button": "right", "double": true }));
    assert_eq!(click, Ask::Click { at: "ref_1".into(), button: MouseButton::Right, double: true });
    let typed = ask(json!({ "action": "type", "target": "ref_1", "text": "", "submit": true, "slowly": true }));
    assert_eq!(typed, Ask::Type { at: "ref_1".into(), text: String::new(), append: false, submit: true, keys: true });
    assert_eq!(ask(json!({ "action": "press", "key": "Enter" })), Ask::Press { key: "Enter".into(), at: None });
    assert_eq!(
        ask(json!({ "action": "select", "target": "ref_1", "options": ["a"] })),
        Ask::Select { at: "ref_1".into(), options: vec!["a".into()] }
    );
    let scrolled = |arguments: Value| match ask(arguments) {
        Ask::Scroll { at, right, down } => (at, right, down),
        other => panic!("{other:?}"),
    };
    assert_eq!(scrolled(json!({ "action": "scroll" })), (None, 0, 600));
    assert_eq!(scrolled(json!({ "action": "scroll", "target": "ref_1" })), (at(), 0, 0));
    assert_eq!(scrolled(json!({ "action": "scroll", "target": "ref_1", "direction": "up" })), (at(), 0, -600));
    assert_eq!(scrolled(json!({ "action": "scroll", "direction": "left", "pixels": 5 })), (None, -5, 0));
    let tab = |arguments: Value| match ask(arguments) {
        Ask::Tab { tab } => tab,
        other => panic!("{other:?}"),
    };
    assert_eq!(tab(json!({ "action": "tab" })), TabAsk::List);
    assert_eq!(tab(json!({ "action": "tab", "tab": 2 })), TabAsk::Select { tab: 2 });
    assert_eq!(tab(json!({ "action": "tab", "tab": 2, "close": true })), TabAsk::Close { tab: 2 });
    assert_eq!(
        tab(json!({ "action": "tab", "url": "http://a.test" })),
        TabAsk::New { url: Some("http://a.test".into()) }
    );
    let upload = json!({ "action": "upload", "target": "ref_1", "files": ["/workspace/a.txt", "b/c"] });
    assert_eq!(lower(upload).unwrap().uploads, ["a.txt", "b/c"]);
    assert_eq!(lower(json!({ "action": "back" })).unwrap().timeout, Duration::from_secs(30));
    assert_eq!(lower(json!({ "action": "hover", "target": "a" })).unwrap().timeout, Duration::from_secs(10));
    assert_eq!(lower(json!({ "action": "forward", "timeout": 3 })).unwrap().timeout, Duration::from_secs(3));

    assert_eq!(why(json!({ "action": "click" })), "target is required for the action click");
    assert_eq!(why(json!({ "action": "type", "target": "a" })), "text is required for the action type");
    assert_eq!(why(json!({ "action": "press", "text": "a" })), "key is required for the action press");
    assert_eq!(why(json!({ "action": "select", "target": "a" })), "options is required for the action select");
    assert_eq!(why(json!({ "action": "wait", "text": "" })), "text is required for the action wait");
    assert_eq!(
        why(json!({ "action": "upload", "target": "a", "files": [] })),
        "files is required for the action upload"
    );
    assert_eq!(why(json!({ "action": "evaluate" })), "expression is required for the action evaluate");
    assert_eq!(why(json!({ "action": "tab", "close": true })), "tab is required to close one");
    assert_eq!(why(json!({ "action": "tab", "tab": 1, "url": "a" })), "url is for a new tab: leave tab and close out");
    let outside = why(json!({ "action": "upload", "target": "a", "files": ["../a"] }));
    assert_eq!(outside, "files: path ../a is refused: path cannot lead out of /workspace");
    let many = vec!["a"; 21];
    assert_eq!(why(json!({ "action": "upload", "target": "a", "files": many })), "files cannot be more than 20");
}
