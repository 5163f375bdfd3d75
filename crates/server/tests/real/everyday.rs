//! What people and models do first with the default dialect.

use serde_json::{Value, json};
use testkit::client::{Client, ToolResult};

use crate::support::{StateDir, assert_no_traces, stdio_of};

fn start(state: &StateDir) -> Client {
    Client::start(stdio_of("sandpool", &state.0, "[dialect.sandpool]\ndisk_mb = 64\n"))
}

fn command(client: &mut Client, line: &str) -> ToolResult {
    client.call("run_command", json!({ "command": line, "timeout": 30 }))
}

#[test]
fn a_server_in_the_background_is_reached_by_code_and_commands_until_its_context_stops() {
    let state = StateDir::new("everyday");
    let mut client = start(&state);
    assert_eq!(command(&mut client, "echo hello > page.html").json()["success"], true);
    let line = "exec python3 -m http.server 8000 --bind 127.0.0.1";
    let server = client.call("run_command", json!({ "command": line, "background": true }));
    assert_eq!(server.json()["status"], "running", "{}", server.0);
    let fetch = "until exec 3<>/dev/tcp/127.0.0.1/8000; do sleep 0.1; done 2>/dev/null
        printf 'GET /page.html HTTP/1.0\\r\\n\\r\\n' >&3; tail -n 1 <&3";
    let fetched = command(&mut client, fetch);
    assert_eq!(
        (fetched.field("stdout"), fetched.json()["success"].as_bool()),
        ("hello\n".into(), Some(true)),
        "{}",
        fetched.0
    );
    let code = "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:8000/page.html').read()";
    let read = client.call("run_code", json!({ "code": code }));
    assert_eq!(read.field("result"), "b'hello\\n'", "{}", read.0);

    let marks = state.marks();
    let run = server.field("run");
    let stopped = client.call("stop_context", json!({ "context": "default" }));
    assert_eq!(stopped.json()["ended_runs"], json!([run]), "{}", stopped.0);
    let end = client.call("wait_run", json!({ "run": run }));
    assert_eq!(end.json()["status"], "lost", "{}", end.0);
    assert!(client.finish().success());
    drop(state);
    assert_no_traces(&marks);
}

#[test]
fn commands_run_in_bash_and_a_full_disk_names_its_limit() {
    let state = StateDir::new("bash");
    let mut client = start(&state);
    let bash = command(&mut client, "a=(x y); [[ ${a[1]} == y ]] && echo ${#a[@]}");
    assert_eq!(bash.field("stdout"), "2\n", "{}", bash.0);
    let failed = client.call("run_code", json!({ "code": "echo before\nfalse", "language": "bash" }));
    assert!(failed.is_error(), "{}", failed.0);
    assert_eq!((failed.field("stdout"), failed.json()["exit_code"].as_i64()), ("before\n".into(), Some(1)));

    let full = "The disk of the context has 64 MB, and /dev/shm half of the memory: delete files.";
    let code = client.call("run_code", json!({ "code": "with open('x', 'wb') as f: f.write(bytes(100 << 20))" }));
    assert_eq!(code.field("note"), full, "{}", code.0);
    let line = command(&mut client, "head -c 100M /dev/zero > y");
    assert_eq!(line.field("note"), format!("The command exited with code 1.\n{full}"), "{}", line.0);
    let file = client.call("write_file", json!({ "path": "z", "content": "x".repeat(1 << 20) }));
    assert!(file.is_error() && file.0.to_string().contains(&format!("No space is left. {full}")), "{}", file.0);
    assert!(client.finish().success());
}

/// A call that has to wait says what it waits for, since when, and how to end that.
#[test]
fn a_call_that_waits_says_for_what_and_how_to_cancel_it() {
    let state = StateDir::new("waits");
    let mut client = start(&state);
    let sleeping = json!({ "code": "import time\nprint('begun', flush=True)\ntime.sleep(600)", "background": true });
    let run = client.call("run_code", sleeping).field("run");
    let (waits, ends) = (
        format!("the background run {run} has been running in this context for "),
        format!("cancel_run with run {run} ends it"),
    );
    let queued = client.call("run_code", json!({ "code": "1", "background": true }));
    assert_eq!(queued.json()["status"], "queued", "{}", queued.0);
    let note = queued.field("note");
    assert!(note.contains(&waits) && note.contains(&ends), "{note}");
    let still = client.call("wait_run", json!({ "run": queued.field("run"), "wait": 0 }));
    assert!(still.field("note").contains(&waits), "{}", still.0);

    let call = json!({ "name": "run_code", "arguments": { "code": "2" }, "_meta": { "progressToken": "t" } });
    let waiting = client.begin("tools/call", call);
    let said = format!("This call waits: {waits}");
    let says = |note: &Value| {
        note["params"]["message"].as_str().is_some_and(|text| text.contains(&said) && text.contains(&ends))
    };
    client.wait_until("the call says that it waits", |client| client.notifications.iter().any(says));
    client.call("cancel_run", json!({ "run": run }));
    assert_eq!(client.wait_call(waiting).field("result"), "2");
    assert!(client.finish().success());
}

/// The runtime lies in the user's home, whose path has the user's name in it.
#[test]
fn tracebacks_show_no_path_of_the_host() {
    let state = StateDir::new("paths");
    let mut client = start(&state);
    let failed = client.call("run_code", json!({ "code": "from pandas import nothing_at_all" }));
    let command = command(&mut client, "python3 -c 'import pandas; pandas.DataFrame()[1]'");
    let shown = [failed.0.to_string(), command.0.to_string()];
    for text in &shown {
        assert!(text.contains("/opt/sandpool/runtime/lib/python3"), "{text}");
        assert!(!text.contains("/runtimes/python-"), "{text}");
    }
    let inside = "const Papa = require('papaparse')\nPapa.parse('a', { step() { throw new Error('inside') } })";
    for language in ["javascript", "typescript"] {
        let failed = client.call("run_code", json!({ "code": inside, "language": language })).0.to_string();
        assert!(failed.contains("/opt/sandpool/npm/node_modules/papaparse/"), "{failed}");
        assert!(!failed.contains("/runtimes/"), "{failed}");
    }
    let installed = client.call("run_command", json!({ "command": "command -v python3 pip && pip --version" }));
    assert!(installed.field("stdout").starts_with("/opt/sandpool/runtime/bin/python3\n"), "{}", installed.0);
    assert_eq!(installed.json()["success"], true, "{}", installed.0);
    assert!(client.finish().success());
}

#[test]
fn named_imports_find_what_a_commonjs_package_assigns_in_a_loop() {
    let state = StateDir::new("imports");
    let mut client = start(&state);
    let package =
        "const all = function () {}; for (const name of ['chunk']) all[name] = (list) => [list]; module.exports = all;";
    let made = command(
        &mut client,
        &format!("mkdir -p node_modules/looped && echo \"{package}\" > node_modules/looped/index.js"),
    );
    assert_eq!(made.json()["success"], true, "{}", made.0);
    for (language, code) in [
        ("javascript", "import { chunk } from 'looped'\nJSON.stringify(chunk([1]))"),
        (
            "typescript",
            "import looped, { chunk as c } from 'looped'\nconst made: number[][] = c([1]); JSON.stringify([made, typeof looped])",
        ),
    ] {
        let ran = client.call("run_code", json!({ "code": code, "language": language }));
        assert!(ran.field("result").contains("[[1]]"), "{}", ran.0);
    }
    assert!(client.finish().success());
}

/// SP-13, SP-60 to SP-62: what fills answers elsewhere does not fill them here.
#[test]
fn answers_are_short_and_say_everything_once() {
    let state = StateDir::new("short");
    let mut client = start(&state);
    let bar = "for n in range(2001): print(f'\\r{n / 20:.1f}% ' + '#' * (n // 100), end='')\nprint('\\n\\x1b[32mdone\\x1b[0m')";
    let ran = client.call("run_code", json!({ "code": bar }));
    // The capture is bounded before it is made plain, so a mark may stand between two states of the bar.
    let printed = ran.field("stdout");
    assert!(printed.ends_with("100.0% ####################\ndone\n") && printed.len() < 200, "{}", ran.0);
    assert_eq!(ran.0.get("structuredContent"), None, "{}", ran.0);

    let many = "import os\nfor n in range(3000):\n    os.makedirs(f'node_modules/p{n % 30}', exist_ok=True)\n    \
                open(f'node_modules/p{n % 30}/{n}.js', 'w').close()\nos.makedirs('src/deep')\n\
                _ = open('src/deep/a.py', 'w').write('x')";
    assert_eq!(client.call("run_code", json!({ "code": many })).json()["success"], true);
    let listed = client.call("list_files", json!({})).json();
    assert_eq!(listed, json!({ "files": ["downloads/ 0 entries", "node_modules/ 3030 entries", "src/ 2 entries"] }));
    let deeper = client.call("list_files", json!({ "depth": 3, "path": "src" })).json();
    assert_eq!(deeper, json!({ "files": ["src/deep/", "src/deep/a.py 1"] }));
    let modules = client.call("list_files", json!({ "depth": 2, "path": "node_modules" }));
    assert!(modules.json()["note"].as_str().unwrap().contains("of files. List a subdirectory"), "{}", modules.0);
    assert!(modules.0["content"].to_string().chars().count() < 25_000);

    let code = "import time\nprint('first', flush=True)\ntime.sleep(600)";
    let run = client.call("run_code", json!({ "code": code, "background": true })).field("run");
    assert!(run.len() == 12 && run.starts_with("run-"), "{run}");
    let mut look = || client.call("wait_run", json!({ "run": run, "wait": 1 })).json();
    let seen = (0..60).map(|_| look()).find(|seen| seen["output"] == "first\n").expect("the first line");
    let cursor = seen["cursor"].as_u64().unwrap();
    client.call("cancel_run", json!({ "run": run }));
    let end = client.call("wait_run", json!({ "run": run, "cursor": cursor })).json();
    assert_eq!((&end["status"], end.get("stdout"), end.get("output")), (&json!("cancelled"), None, None), "{end}");
    let whole = client.call("wait_run", json!({ "run": run })).json();
    assert_eq!(whole["stdout"], "first\n", "{whole}");
    assert!(client.finish().success());
}
