//! The document's own examples, driven through the built binary over stdio in a real sandbox.

use std::time::{Duration, Instant};

use serde_json::json;
use testkit::client::{Client, ToolResult};

use crate::support::{StateDir, pair, start, stdio};

#[test]
fn every_example_of_the_document_gives_what_the_document_says() {
    let mut s = start("document", "");

    // run_code, inputs and outputs
    let alice = s.create(json!({"name": "user-alice", "description": "Alice 的数据分析会话"}));
    assert!(alice.starts_with("ctx-"), "{alice}");
    let r = s.run(
        &alice,
        "import numpy as np\nx = np.array([1, 2, 3, 4, 5])\nprint(f'Mean: {x.mean()}')\nprint(f'Sum: {x.sum()}')",
    );
    assert_eq!((r.field("stdout"), r.field("stderr")), pair("Mean: 3.0\nSum: 15\n", ""));
    assert!(r.json()["execution_time"].as_f64().unwrap() >= 0.0);
    assert_eq!(r.0["structuredContent"], r.json());

    let r = s.run(&alice, "undefined_variable");
    assert_eq!(
        r.field("stderr"),
        "Traceback (most recent call last):\n  File \"<stdin>\", line 1, in <module>\n\
         NameError: name 'undefined_variable' is not defined\n"
    );
    assert_eq!((r.field("stdout").as_str(), &r.json()["success"]), ("", &json!(false)));

    // state kept, isolation between contexts
    let bob = s.create(json!({"name": "user-bob"}));
    assert_eq!(s.print(&bob, "x = 42"), "");
    assert_eq!(s.print(&bob, "print(x)"), "42\n");
    let carol = s.create(json!({"name": "user-carol"}));
    assert!(s.run(&carol, "print(x)").field("stderr").ends_with("NameError: name 'x' is not defined\n"));

    // the examples 1 to 4
    assert_eq!(s.print(&bob, "result = 2 + 2\nprint(f'2 + 2 = {result}')"), "2 + 2 = 4\n");
    let describe = s.print(&bob, "import pandas as pd\ndata = {'name': ['Alice', 'Bob', 'Charlie'], 'age': [25, 30, 35]}\ndf = pd.DataFrame(data)\nprint(df.describe())");
    assert!(describe.contains("mean   30.0"), "{describe}");
    assert_eq!(
        s.run(&bob, "x = 1 / 0").field("stderr"),
        "Traceback (most recent call last):\n  File \"<stdin>\", line 1, in <module>\nZeroDivisionError: division by zero\n"
    );
    assert_eq!(
        s.print(&bob, "counter = 0\nfor i in range(5):\n    counter += i\nprint(f'Counter: {counter}')"),
        "Counter: 10\n"
    );
    assert_eq!(s.print(&bob, "counter += 10\nprint(f'Counter now: {counter}')"), "Counter now: 20\n");
    assert_eq!(s.print(&bob, "x = 42"), "");
    assert_eq!(s.print(&bob, "x"), "42\n");

    // create_context
    let created = s.client.call(
        "create_context",
        json!({"name": "web-scraping-task", "language": "javascript", "description": "网页数据爬取和处理"}),
    );
    let c = created.json();
    assert_eq!(c["message"], "JavaScript context created successfully");
    assert_eq!(
        (&c["language"], &c["status"], &c["description"]),
        (&json!("javascript"), &json!("active"), &json!("网页数据爬取和处理"))
    );
    let js = created.field("context_id");
    assert_eq!(
        s.print(&js, "const data = {name: 'Alice', age: 25};\nconsole.log(JSON.stringify(data));"),
        "{\"name\":\"Alice\",\"age\":25}\n"
    );
    assert_eq!(s.print(&js, "const items = [1,2,3]; console.log(items.length);"), "3\n");
    assert_eq!(s.print(&js, "let x = 200;"), "");
    assert_eq!(s.print(&js, "let x = 201; x"), "201\n");

    // a name used as an id
    s.create(json!({"name": "data-analysis-1"}));
    assert_eq!(
        s.print("data-analysis-1", "import pandas as pd\ndf = pd.DataFrame({'a': [1,2,3]})\nprint(df.sum())"),
        "a    6\ndtype: int64\n"
    );
    s.create(json!({"name": "context-a"}));
    s.create(json!({"name": "context-b"}));
    s.print("context-a", "result = 'A'");
    s.print("context-b", "result = 'B'");
    assert_eq!(s.print("context-a", "print(result)"), "A\n");
    assert_eq!(s.print("context-b", "print(result)"), "B\n");

    // list_contexts: newest first
    let list = s.client.call("list_contexts", json!({})).json();
    let names: Vec<_> =
        list["contexts"].as_array().unwrap().iter().map(|c| c["name"].as_str().unwrap().to_owned()).collect();
    assert_eq!(
        names,
        ["context-b", "context-a", "data-analysis-1", "web-scraping-task", "user-carol", "user-bob", "user-alice"]
    );
    assert_eq!(list["total"], 7);
    for context in list["contexts"].as_array().unwrap() {
        let mut keys: Vec<_> = context.as_object().unwrap().keys().cloned().collect();
        keys.sort();
        assert_eq!(keys, ["context_id", "created_at", "description", "language", "last_used", "name", "status"]);
        assert!(context["created_at"].as_str().unwrap().ends_with('Z'));
    }

    // stop_context
    let stopped = s.client.call("stop_context", json!({"context_id": carol})).json();
    assert_eq!(stopped, json!({"context_id": carol, "status": "stopped", "message": "Context stopped successfully"}));
    assert_eq!(
        s.error("run_code", json!({"code": "1", "context_id": carol})),
        pair("CONTEXT_NOT_FOUND", &format!("Context not found: {carol}"))
    );
    assert_eq!(
        s.error("stop_context", json!({"context_id": carol})),
        pair("CONTEXT_NOT_FOUND", &format!("Context not found: {carol}"))
    );

    // every error code a caller can cause
    assert_eq!(s.error("run_code", json!({"code": "1"})).0, "INVALID_PARAMS");
    assert_eq!(
        s.error("run_code", json!({})),
        pair("INVALID_PARAMS", "Invalid arguments: code and context_id are required")
    );
    assert_eq!(
        s.error("create_context", json!({"name": "r", "language": "ruby"})),
        pair("INVALID_LANGUAGE", "Unsupported language: ruby. Must be 'python' or 'javascript'")
    );
    for name in ["", "a b", "a/b", "x\n"] {
        assert_eq!(s.error("create_context", json!({"name": name})).0, "INVALID_CONTEXT_NAME", "{name:?}");
    }
    s.create(json!({"name": "twin"}));
    s.create(json!({"name": "twin"}));
    assert_eq!(s.error("run_code", json!({"code": "1", "context_id": "twin"})).0, "CONTEXT_NOT_FOUND");

    assert!(s.client.finish().success());
}

#[test]
fn rich_results_files_and_languages() {
    let mut s = start("rich", "");
    let py = s.create(json!({"name": "py"}));

    // a figure without show()
    let r = s.run(&py, "import matplotlib.pyplot as plt\nplt.plot([1, 2, 3])\nNone");
    assert_eq!(r.images().len(), 1, "{}", r.json());
    assert_eq!(r.images()[0]["mimeType"], "image/png");
    assert!(r.images()[0]["data"].as_str().unwrap().starts_with("iVBORw0KGgo"));

    // magics, shell, await, a C extension's and a child's output
    assert_eq!(s.print(&py, "!echo from a child"), "from a child\n");
    assert_eq!(s.print(&py, "import asyncio\nawait asyncio.sleep(0)\n'awaited'"), "'awaited'\n");
    assert_eq!(s.print(&py, "import ctypes; _ = ctypes.CDLL(None).puts(b'from C')"), "from C\n");
    let r = s.run(&py, "input('name? ')");
    assert!(r.field("stderr").contains("EOFError"), "{}", r.json());

    // TypeScript
    let ts = s.create(json!({"name": "ts", "language": "typescript"}));
    assert_eq!(
        s.print(&ts, "enum Color { Red, Green }\ninterface P { x: number }\nclass A { constructor(public p: P) {} }\nconst a: A = new A({ x: 1 });\nconsole.log(a.p.x, Color[1]);"),
        "1 Green\n"
    );
    assert_eq!(s.print(&ts, "a.p.x + 1"), "2\n");

    // files
    let up = s.client.call("upload_file", json!({"context_id": py, "path": "in/a.txt", "content": "héllo\n"})).json();
    assert_eq!(up, json!({"path": "in/a.txt", "size": 7}));
    assert_eq!(s.print(&py, "print(open('in/a.txt').read(), end='')"), "héllo\n");
    s.print(&py, "open('out.bin', 'wb').write(bytes(range(256)));");
    let down =
        s.client.call("download_file", json!({"context_id": py, "path": "out.bin", "encoding": "base64"})).json();
    assert_eq!((&down["size"], &down["encoding"]), (&json!(256), &json!("base64")));
    let list = s.client.call("list_files", json!({"context_id": py})).json();
    let paths: Vec<_> =
        list["files"].as_array().unwrap().iter().map(|f| f["path"].as_str().unwrap().to_owned()).collect();
    assert!(paths.contains(&"in/a.txt".into()) && paths.contains(&"out.bin".into()), "{paths:?}");
    assert_eq!(s.error("download_file", json!({"context_id": py, "path": "none"})).0, "FILE_NOT_FOUND");
    s.print(&py, "import os; os.symlink('/etc/passwd', 'link'); os.mkfifo('fifo')");
    for path in ["../etc/passwd", "/etc/passwd", "link", "fifo", "in/../../x", ""] {
        assert_eq!(s.error("download_file", json!({"context_id": py, "path": path})).0, "INVALID_PATH", "{path:?}");
    }
    s.print(&py, "open('big', 'wb').truncate(1 << 40);");
    assert_eq!(s.error("download_file", json!({"context_id": py, "path": "big"})).0, "FILE_TOO_LARGE");
    assert!(s.client.finish().success());
}

#[test]
fn every_bad_end_of_a_cell_is_told_apart_and_the_next_call_works() {
    let mut s = start("ends", "[dialect.agentrun]\ntimeout = 5\nmemory_mb = 512\n");
    let py = s.create(json!({"name": "py"}));
    let last = |r: &ToolResult| r.field("stderr").trim_end().lines().last().unwrap_or_default().to_owned();

    // interrupted: variables kept
    s.print(&py, "kept = 1");
    let r = s.run(&py, "while True: pass");
    assert!(last(&r).contains("5 s") && last(&r).contains("kept"), "{}", r.field("stderr"));
    assert_eq!(s.print(&py, "kept"), "1\n");

    // not to be interrupted: killed, and said
    let r = s.run(&py, "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\nwhile True: pass");
    assert!(last(&r).contains("lost"), "{}", r.field("stderr"));
    assert!(s.run(&py, "kept").field("stderr").contains("NameError"));

    // memory
    let r = s.run(&py, "x = bytearray(2 << 30)\nfor i in range(0, len(x), 4096): x[i] = 1");
    assert!(last(&r).to_lowercase().contains("memory"), "{}", r.json());
    assert_eq!(s.print(&py, "1 + 1"), "2\n");

    // exit, signal, crash
    let r = s.run(&py, "import sys; sys.exit(3)");
    assert!(last(&r).contains('3'), "{}", r.json());
    let r = s.run(&py, "import os; os._exit(7)");
    assert!(last(&r).contains('7'), "{}", r.json());
    let r = s.run(&py, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)");
    assert!(last(&r).contains("SIGKILL"), "{}", r.json());
    let r = s.run(&py, "import ctypes; ctypes.string_at(0)");
    assert!(last(&r).contains("SIGSEGV"), "{}", r.json());
    assert_eq!(s.print(&py, "print('alive')"), "alive\n");

    // output floods are cut in the middle, with the size named
    let r = s.run(&py, "print('a' * 1_000_000 + 'THE END')");
    let out = r.field("stdout");
    assert!(out.chars().count() < 21_000 && out.starts_with("aaa") && out.ends_with("THE END\n"), "{}", out.len());

    let js = s.create(json!({"name": "js", "language": "javascript"}));
    s.print(&js, "let kept = 1");
    let r = s.run(&js, "while (true) {}");
    assert!(last(&r).contains("kept"), "{}", r.json());
    assert_eq!(s.print(&js, "kept"), "1\n");
    let r = s.run(&js, "await new Promise(() => {})");
    assert!(last(&r).contains("kept"), "{}", r.json());
    let r = s.run(&js, "throw new Error('no')");
    assert!(r.field("stderr").contains("Error: no"), "{}", r.json());
    assert_eq!(s.print(&js, "kept"), "1\n");
    assert!(s.client.finish().success());
}

#[test]
fn stop_waits_for_running_code_and_cancel_reaches_it() {
    let mut s = start("stop", "");
    let a = s.create(json!({"name": "a"}));
    let b = s.create(json!({"name": "b"}));

    // stop waits and does not interrupt
    let running = s
        .client
        .begin_call("run_code", json!({"code": "import time\ntime.sleep(1.5)\nprint('done')", "context_id": a}));
    s.print(&b, "1");
    let stopping = s.client.begin_call("stop_context", json!({"context_id": a}));
    // Requests are answered concurrently: the list may be made before the stop is seen, never after the code has ended.
    while s.client.call("list_contexts", json!({})).json().to_string().contains(&a) {
        assert!(!s.client.has_answer(running), "a context that is being stopped is still listed");
    }
    assert_eq!(s.client.wait_call(running).field("stdout"), "done\n");
    assert_eq!(s.client.wait_call(stopping).field("status"), "stopped");

    // cancel: the cell ends, its variables stay
    s.print(&b, "n = 5");
    let endless = s.client.begin("tools/call", json!({"name": "run_code", "arguments": {"code": "print('started', flush=True)\nwhile True: n += 0", "context_id": b}, "_meta": {"progressToken": "p"}}));
    s.client.wait_until("the cell has printed", |c| c.notifications.iter().any(|n| n.to_string().contains("started")));
    s.client.notify("notifications/cancelled", json!({"requestId": endless, "reason": "test"}));
    let begun = Instant::now();
    assert_eq!(s.print(&b, "n"), "5\n");
    assert!(begun.elapsed() < Duration::from_secs(20), "the next call waited for the cancelled one");
    assert!(s.client.finish().success());
}

#[test]
fn the_examples_also_run_without_a_context_when_the_operator_says_so() {
    let mut s = start("default", "[agentrun]\ndefault_context = true\n");
    let mut run = |code: &str| s.client.call("run_code", json!({"code": code}));
    assert_eq!(run("result = 2 + 2\nprint(f'2 + 2 = {result}')").field("stdout"), "2 + 2 = 4\n");
    let describe = run("import pandas as pd\ndf = pd.DataFrame({'age': [25, 30, 35]})\nprint(df.describe())");
    assert!(describe.field("stdout").contains("mean   30.0"), "{}", describe.json());
    let error = run("x = 1 / 0");
    assert_eq!(
        error.field("stderr"),
        "Traceback (most recent call last):\n  File \"<stdin>\", line 1, in <module>\nZeroDivisionError: division by zero\n"
    );
    run("counter = 0\nfor i in range(5):\n    counter += i\nprint(f'Counter: {counter}')");
    assert_eq!(run("counter += 10\nprint(f'Counter now: {counter}')").field("stdout"), "Counter now: 20\n");
    let list = s.client.call("list_contexts", json!({})).json();
    assert_eq!((&list["total"], &list["contexts"][0]["name"]), (&json!(1), &json!("default")));
    assert!(s.client.finish().success());
}

#[test]
fn a_context_left_alone_for_the_idle_time_is_removed() {
    let mut s = start("idle", "[dialect.agentrun]\nidle_timeout = 2\n");
    let id = s.create(json!({"name": "left-alone"}));
    let begun = Instant::now();
    while s.client.call("list_contexts", json!({})).json()["total"] != 0 {
        assert!(begun.elapsed() < Duration::from_secs(60), "it is still there");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(s.error("run_code", json!({"code": "1", "context_id": id})).0, "CONTEXT_NOT_FOUND");
    assert!(s.client.finish().success());
}

/// As the document prints them, ids and the time left open.
const START_UP: &str = "\
[INFO] AgentRun 初始化开始...
[INFO] 创建 Code Interpreter: ci-…
[INFO] 等待 Interpreter 就绪...
[INFO] Interpreter 状态: READY
[INFO] 初始化 Session 池 (大小: 3)...
[INFO] Session-1 创建成功: session-…
[INFO] Session-2 创建成功: session-…
[INFO] Session-3 创建成功: session-…
[INFO] 执行健康检查...
[INFO] ✓ Interpreter 就绪
[INFO] ✓ Session 池健康 (3/3 可用)
[INFO] ✓ 所有 Session 验证通过
[INFO] 服务器启动完成，耗时: … 秒
[INFO] MCP Server 就绪，等待请求...
";

#[test]
fn the_start_is_logged_in_the_words_of_the_document() {
    let state = StateDir::new("start-up-log");
    let log = state.0.join("log");
    let mut command = stdio(&state.0, "");
    command.stderr(std::fs::File::create(&log).unwrap());
    let mut client = Client::start(command);
    let read = || std::fs::read_to_string(&log).unwrap();
    let end = Instant::now() + Duration::from_secs(120);
    while !read().contains("就绪，等待请求") && Instant::now() < end {
        client.request("ping", json!({}));
    }
    let log = read();
    // Each line begins with its time.
    let lines =
        log.lines().filter_map(|line| Some(line.split_once("Z ")?.1)).filter(|line| line.starts_with("[INFO] "));
    let masked: String = lines.map(|line| format!("{}\n", without_figures(line))).collect();
    assert_eq!(masked, START_UP, "{log}");
}

/// Ids are hex digits, times seconds.
fn without_figures(line: &str) -> String {
    for (mark, end) in [(": ci-", ""), (": session-", ""), ("耗时: ", " 秒")] {
        if let Some((head, figure)) = line.strip_suffix(end).and_then(|line| line.split_once(mark))
            && figure.bytes().all(|b| b.is_ascii_hexdigit() || b == b'.')
        {
            return format!("{head}{mark}…{end}");
        }
    }
    line.to_owned()
}
