//! Editing, searching and uploading files, and reading what was cut, in real sandboxes.

use std::net::SocketAddr;

use serde_json::{Value, json};
use testkit::client::Client;
use testkit::http::{Answer, Wire};

use crate::support::{StateDir, stdio_of};

fn start(state: &StateDir) -> Client {
    Client::start(stdio_of("sandpool", &state.0, "[dialect.sandpool]\ndisk_mb = 64\n"))
}

fn good(client: &mut Client, tool: &str, arguments: Value) -> Value {
    let result = client.call(tool, arguments);
    assert!(!result.is_error(), "{tool}: {}", result.0);
    result.facts()
}

/// What is said about a call that must fail, in whichever form.
fn bad(client: &mut Client, tool: &str, arguments: Value) -> String {
    let answer = client.request("tools/call", json!({ "name": tool, "arguments": arguments }));
    let failed = answer["error"].is_object() || answer["result"]["isError"] == true;
    assert!(failed, "{tool}: {answer}");
    let text = answer["error"]["message"].as_str().or(answer["result"]["content"][0]["text"].as_str());
    text.unwrap().to_owned()
}

fn command(client: &mut Client, line: &str) -> String {
    let result = client.call("run_command", json!({ "command": line, "timeout": 60 }));
    assert_eq!(result.json()["success"], true, "{line}: {}", result.0);
    result.field("stdout")
}

#[test]
fn files_are_edited_and_searched_where_code_finds_them() {
    let state = StateDir::new("edit-search");
    let mut client = start(&state);
    let tools = client.request("tools/list", json!({}))["result"]["tools"].clone();
    for name in ["edit_file", "search_files", "upload_link"] {
        let tool = tools.as_array().unwrap().iter().find(|tool| tool["name"] == name).unwrap().to_string();
        assert!(tool.chars().count() <= 800, "{} characters: {tool}", tool.chars().count());
    }
    let make = "mkdir -p src node_modules/x /tmp/t; printf 'def f():\\n    return 1\\n' > src/a.py; chmod 755 src/a.py
        echo 'def f' > node_modules/x/i.js; echo 'def f' > /tmp/t/b.txt; ln -s /etc/passwd out; ln -s src/a.py inside
        printf 'def f\\0' > bin; echo 'x x' > two";
    command(&mut client, make);
    let edit = |path: &str, old: &str, new: &str| json!({ "path": path, "old_string": old, "new_string": new });
    let edited = good(&mut client, "edit_file", edit("/workspace/src/a.py", "return 1", "return 2"));
    assert_eq!(edited, json!({ "path": "src/a.py", "replaced": 1, "size": 22 }));
    assert_eq!(
        command(&mut client, "stat -c %a src/a.py; cat src/a.py; ls -A src"),
        "755\ndef f():\n    return 2\na.py\n"
    );
    let twice = bad(&mut client, "edit_file", edit("two", "x", "y"));
    assert!(twice.starts_with("old_string occurs 2 times in two (lines 1, 1): "), "{twice}");
    for path in ["out", "inside", "bin", "/etc/passwd", "../x", "/tmp/../etc/passwd", "/proc/self/environ"] {
        bad(&mut client, "edit_file", edit(path, "def", "x"));
    }
    assert_eq!(good(&mut client, "edit_file", edit("/tmp/t/b.txt", "def", "let"))["path"], "/tmp/t/b.txt");
    // The quota holds for edits, and the old content stays whole.
    command(&mut client, "head -c 100M /dev/zero > filler || true");
    let full = bad(&mut client, "edit_file", edit("src/a.py", "return 2", &"z".repeat(1 << 20)));
    assert!(full.starts_with("No space is left. The disk of the context has 64 MB"), "{full}");
    assert_eq!(command(&mut client, "rm filler; cat src/a.py; ls -A src"), "def f():\n    return 2\na.py\n");

    let found = good(&mut client, "search_files", json!({ "text": "def f" }));
    assert_eq!(found["matches"], json!(["src/a.py:1: def f():"]), "{found}");
    let found = good(&mut client, "search_files", json!({ "text": r"^\s+return \d$", "regex": true, "glob": "*.py" }));
    assert_eq!(found["matches"], json!(["src/a.py:2:     return 2"]));
    let found = good(&mut client, "search_files", json!({ "text": "let", "path": "/tmp/t" }));
    assert_eq!(found["matches"], json!(["/tmp/t/b.txt:1: let f"]));
    let found = good(&mut client, "search_files", json!({ "glob": "*.js", "path": "node_modules" }));
    assert_eq!(found["matches"], json!(["node_modules/x/i.js"]));
    for path in ["out", "..", "/etc", "/proc/self"] {
        bad(&mut client, "search_files", json!({ "text": "root", "path": path }));
    }
    assert!(client.finish().success());
}

#[test]
fn a_cut_output_and_files_outside_the_workspace_are_read() {
    let state = StateDir::new("cut-output");
    let mut client = start(&state);
    let run =
        client.call("run_command", json!({ "command": "seq 1 20000; echo t > /tmp/t.txt; echo d > /data/d.txt" }));
    let cut = run.json()["truncated"][0].clone();
    let path = cut["path"].as_str().unwrap_or_else(|| panic!("{}", run.0)).to_owned();
    assert_eq!(path, "/outputs/stdout-1.txt");
    let page = good(&mut client, "read_file", json!({ "path": path, "offset": 10_000, "limit": 2 }));
    assert_eq!(page["content"], "10000\n10001\n", "{page}");
    let url = cut["url"].as_str().unwrap();
    let page = good(&mut client, "read_file", json!({ "path": url, "offset": 19_999 }));
    assert_eq!(page["content"], "19999\n20000\n", "{page}");
    assert_eq!(good(&mut client, "read_file", json!({ "path": "/tmp/t.txt" }))["content"], "t\n");
    assert_eq!(good(&mut client, "read_file", json!({ "path": "/data/d.txt" }))["content"], "d\n");
    command(&mut client, "ln -s /etc/passwd /tmp/link; ln -s /proc/self/environ /data/link");
    for path in ["/tmp/link", "/data/link", "/tmp/../etc/passwd", "/outputs/../x", "/outputs/nothing", "/etc/passwd"] {
        bad(&mut client, "read_file", json!({ "path": path }));
    }
    assert!(client.finish().success());
}

fn ask(method: &str, url: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
    let (host, path) = url.strip_prefix("http://").unwrap().split_once('/').unwrap();
    let address: SocketAddr = host.parse().unwrap();
    assert!(address.ip().is_loopback());
    Wire::open(address).unwrap().ask(method, &format!("/{path}"), headers, body).unwrap()
}

#[test]
fn a_file_comes_into_the_workspace_by_its_link_over_stdio() {
    let state = StateDir::new("upload");
    let mut client = start(&state);
    let mut link =
        |path: &str| good(&mut client, "upload_link", json!({ "path": path }))["url"].as_str().unwrap().to_owned();
    let (first, form, large, taken, linked) =
        (link("in/data.bin"), link("form.txt"), link("large"), link("dir/x"), link("sym/passwd"));
    let bytes: Vec<u8> = (0..5_000_000u32).map(|n| (n / 3) as u8).collect();
    assert_eq!(ask("GET", &first, &[], b"").status, 200);
    let stored = ask("PUT", &first, &[], &bytes);
    assert_eq!((stored.status, stored.text().as_str()), (201, "5000000 bytes are stored as /workspace/in/data.bin\n"));
    assert_eq!(ask("PUT", &first, &[], &bytes).status, 410);
    let body = "--q\r\nContent-Disposition: form-data; name=\"file\"; filename=\"x\"\r\n\r\nhello\r\n--q--\r\n";
    let sent = ask("POST", &form, &[("content-type", "multipart/form-data; boundary=q")], body.as_bytes());
    assert_eq!(sent.status, 201, "{}", sent.text());
    let digest =
        "python3 -c \"d=open('in/data.bin','rb').read(); print(len(d), d==bytes((n//3)&255 for n in range(5000000)))\"";
    assert_eq!(command(&mut client, digest), "5000000 True\n");
    assert_eq!(command(&mut client, "cat form.txt; stat -c %a form.txt"), "hello644\n");

    // The quota holds, and nothing of the file remains.
    command(&mut client, "head -c 100M /dev/zero > filler || true");
    let full = ask("PUT", &large, &[], &vec![1; 1 << 20]);
    assert_eq!((full.status, full.text().as_str()), (507, "no space is left in the sandbox, whose disk has 64 MB\n"));
    command(&mut client, "rm filler");
    // What code puts in the way does not lead elsewhere.
    command(&mut client, "touch dir; ln -s /etc sym");
    assert_eq!(ask("PUT", &taken, &[], b"x").status, 422);
    assert_eq!(ask("PUT", &linked, &[], b"x").status, 422);
    assert_eq!(command(&mut client, "ls -A -I downloads; ls -A in"), "dir\nform.txt\nin\nsym\ndata.bin\n");
    assert!(client.finish().success());
}
