//! SIGHUP and a changed tenants file, with contexts of several tenants alive.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};

use ring::digest::{SHA256, digest};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use testkit::host::{StateDir, traces};
use testkit::http::{Account, Era, Mcp};

use crate::support::{Service, eventually, token};

pub fn entry(tenant: &str, token: &str, rest: &str) -> String {
    let digest = text::hex(digest(&SHA256, token.as_bytes()).as_ref());
    format!("# {tenant}\n[[tenant]]\nname = \"{tenant}\"\ntoken_sha256 = \"{digest}\"\n{rest}\n")
}

pub fn write_tenants(service: &Service, entries: &[String]) {
    std::fs::write(service.state().0.join("tenants"), entries.concat()).unwrap();
}

fn status(service: &Service, token: &str) -> u16 {
    let account = Account { token: Some(token.into()), ..service.account("blue") };
    account.ask("GET", "/mcp", &[("accept", "application/json")], b"").unwrap().status
}

fn client(service: &Service, token: &str) -> Mcp {
    let account = Account { token: Some(token.into()), ..service.account("blue") };
    Mcp::new(&account, "sandpool", Era::Bare)
}

pub fn journal(dir: &Path) -> Vec<Value> {
    let files = std::fs::read_dir(dir.join("state/journal")).unwrap().flatten().map(|entry| entry.path());
    let files = files.filter(|path| path.extension().is_some_and(|kind| kind == "jsonl"));
    let texts: Vec<String> = files.map(|path| std::fs::read_to_string(path).unwrap()).collect();
    texts.iter().flat_map(|text| text.lines()).filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// How often the log has this text.
pub fn count(service: &Service, what: &str) -> usize {
    service.log().matches(what).count()
}

#[test]
fn sighup_applies_tenants_and_spares_the_contexts_of_the_others() {
    let service = Service::start("sighup");
    let mut canary = service.canary();
    let mut blue = service.client("blue", "sandpool");
    let mut green = service.client("green", "sandpool");
    let kept = blue.good("create_context", json!({ "name": "kept" }))["context"].clone();
    blue.good("run_code", json!({ "context": kept, "code": "x = 6 * 7" }));
    green.good("run_code", json!({ "code": "x = 1" }));

    let (red, canarys) = ("token-of-red-77aa21", entry("canary", &token("canary"), ""));
    let quotas = entry("blue", &token("blue"), "quotas = { contexts = 1 }");
    write_tenants(&service, &[quotas.clone(), entry("red", red, ""), canarys.clone()]);
    service.signal(Signal::HUP);
    eventually("the reload", || count(&service, "reloaded (SIGHUP)") == 1);
    let log = service.log();
    let line = log.lines().find(|line| line.contains("reloaded (SIGHUP)")).unwrap();
    for part in ["tenants added: red", "tenants removed: green (1 contexts ended)", "tenants changed: blue (quotas)"] {
        assert!(line.contains(part), "{part}: {line}");
    }
    assert_eq!((status(&service, &token("green")), status(&service, red)), (401, 200));
    canary.sings("the reload");
    let still = blue.good("run_code", json!({ "context": kept, "code": "print(x)" }));
    assert_eq!(still["stdout"], "42\n");
    let refused = blue.call("create_context", json!({ "name": "second" }));
    assert!(refused.to_string().contains("contexts"), "the new quota: {refused}");
    client(&service, red).good("run_code", json!({ "code": "print(1)" }));

    // What is not valid changes nothing, and the log says why.
    write_tenants(&service, &[quotas.clone(), "[[tenant]]\nname = \"Wrong\"\n".into()]);
    service.signal(Signal::HUP);
    eventually("the refusal", || count(&service, "not reloaded (SIGHUP)") == 1);
    assert!(service.log().contains("a name is 1 to 64 of the characters"), "{}", service.log());
    assert_eq!((status(&service, red), status(&service, &token("blue"))), (200, 200));

    // Settings: a policy applies, an address needs a restart.
    write_tenants(&service, &[quotas, entry("red", red, ""), canarys]);
    let settings = "[network]\ndefault = \"packages\"\n[serve]\nmax_sessions = 77\n";
    std::fs::write(service.state().0.join("sandpool.toml"), settings).unwrap();
    service.signal(Signal::HUP);
    eventually("the third reload", || service.log().contains("only a restart applies"));
    let log = service.log();
    assert!(log.contains("settings changed: `network.default`"), "{log}");
    assert!(log.contains("only a restart applies: `serve.max_sessions`"), "{log}");
    let code = "import os; print('HTTPS_PROXY' in os.environ)";
    let old = blue.good("run_code", json!({ "context": kept, "code": code }));
    let mut reds = client(&service, red);
    reds.good("create_context", json!({ "name": "new" }));
    let new = reds.good("run_code", json!({ "context": "new", "code": code }));
    assert_eq!((&old["stdout"], &new["stdout"]), (&json!("False\n"), &json!("True\n")));

    let state = service.state();
    eventually("the journal", || journal(&state.0).iter().filter(|line| line["event"] == "reloaded").count() == 2);
    let lines = journal(&state.0);
    let has = |event: &str, tenant: &str| lines.iter().any(|line| line["event"] == event && line["tenant"] == tenant);
    assert!(has("tenant_removed", "green") && has("tenant_added", "red") && has("tenant_changed", "blue"));
    assert!(lines.iter().any(|line| line["event"] == "reload_failed"));
    let ended = |line: &&Value| line["event"] == "context_stopped" && line["tenant"] == "green";
    assert_eq!(lines.iter().find(ended).unwrap()["why"], "its tenant was removed");
    service.finish();
    let log = std::fs::read_to_string(state.0.join("log")).unwrap();
    assert!(log.contains("SIGTERM: stopping") && log.contains("stopped"), "{log}");
}

/// Without a signal, and with a call of the removed tenant in progress.
#[test]
fn a_changed_tenants_file_is_loaded_by_itself() {
    let service = Service::start("watched");
    let mut canary = service.canary();
    let new = "another-token-of-blue-9d";
    let canarys = entry("canary", &token("canary"), "");
    let mut green = service.client("green", "sandpool");
    let hanging = std::thread::spawn(move || green.call("run_code", json!({ "code": "import time; time.sleep(300)" })));
    let metrics = service.account("canary");
    eventually("the run", || {
        let page = metrics.ask("GET", "/metrics", &[], b"").unwrap();
        String::from_utf8_lossy(&page.body).contains("sandpool_runs_in_progress 1")
    });
    // Written by an editor that replaces the file.
    let path = service.state().0.join("tenants");
    std::fs::write(path.with_extension("new"), [entry("blue", new, ""), canarys].concat()).unwrap();
    std::fs::rename(path.with_extension("new"), &path).unwrap();
    eventually("the new token", || status(&service, new) == 200);
    assert_eq!((status(&service, &token("blue")), status(&service, &token("green"))), (401, 401));
    assert!(service.log().contains("reloaded (the tenants file has changed)"), "{}", service.log());
    assert!(service.log().contains("tenants changed: blue (token)"), "{}", service.log());
    let answer = hanging.join().unwrap();
    assert!(answer.get("error").is_some() || answer["result"]["isError"] == true, "{answer}");
    canary.sings("the reload");
    service.finish();
}

/// A POST to `/mcp` whose body is sent later. The server has admitted it when it asks for the body.
struct Begun(TcpStream, String);

impl Begun {
    fn new(service: &Service, token: &str, body: Value) -> Self {
        let body = body.to_string();
        let mut stream = TcpStream::connect(service.address).unwrap();
        let (host, length) = (service.address, body.len());
        let head = format!(
            "POST /mcp HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {token}\r\ncontent-type: application/json\r\n\
             content-length: {length}\r\nexpect: 100-continue\r\nconnection: close\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).unwrap();
        let mut asked = [0; 25];
        stream.read_exact(&mut asked).unwrap();
        assert_eq!(asked, *b"HTTP/1.1 100 Continue\r\n\r\n");
        Self(stream, body)
    }

    fn finish(mut self) -> String {
        self.0.write_all(self.1.as_bytes()).unwrap();
        let mut answer = String::new();
        self.0.read_to_string(&mut answer).unwrap();
        answer
    }
}

/// W75 and W76.
#[test]
fn nothing_that_a_tenant_began_outlives_its_token_or_is_its_successors() {
    let service = Service::start("removal");
    let mut canary = service.canary();
    let canarys = entry("canary", &token("canary"), "");
    let reload = |entries: &[String], added: &str| {
        write_tenants(&service, entries);
        service.signal(Signal::HUP);
        eventually("the new token", || status(&service, added) == 200);
    };
    let run = json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/call",
        "params": { "name": "run_code", "arguments": { "code": "print(1)" } } });
    let info = json!({ "name": "test", "version": "1" });
    let initialize = json!({ "jsonrpc": "2.0", "id": 0, "method": "initialize",
        "params": { "protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": info } });
    let green = service.account("green");
    let post = |headers: &[(&str, &str)], body: &Value| {
        let headers = [&[("content-type", "application/json")], headers].concat();
        green.ask("POST", "/mcp", &headers, body.to_string().as_bytes()).unwrap()
    };
    let session = post(&[], &initialize).header("mcp-session-id").unwrap().to_owned();
    let own = ("mcp-session-id", session.as_str());
    let ping = json!({ "jsonrpc": "2.0", "id": 1, "method": "ping" });
    assert_eq!(post(&[own], &ping).status, 200);
    let begun = [token("blue"), token("green"), token("canary")].map(|token| Begun::new(&service, &token, run.clone()));
    let another = "another-token-of-blue-3c";
    reload(&[entry("blue", another, ""), canarys.clone()], another);
    let answers = begun.map(Begun::finish);
    let unknown = |answer: &str| {
        answer.starts_with("HTTP/1.1 401 ") && answer.contains("www-authenticate: Bearer ") && answer.contains("-32600")
    };
    assert!(unknown(&answers[0]) && unknown(&answers[1]), "{answers:?}");
    assert!(answers[2].starts_with("HTTP/1.1 200 "), "{answers:?}");
    // Green comes back, with the same token.
    reload(&[entry("green", &token("green"), ""), canarys], &token("green"));
    assert_eq!((post(&[own], &ping).status, post(&[], &ping).status), (404, 200));
    canary.sings("the removal");
    service.finish();
}

/// A client that closes its terminal leaves nothing behind.
#[test]
#[allow(clippy::disallowed_methods, reason = "the test starts the program it tests")]
fn sighup_ends_a_server_on_stdio_in_an_orderly_way() {
    let state = StateDir::new("hangup");
    let log = state.0.join("log");
    // The runner of the tests may ignore the signal, which its children would do then, too.
    let mut child = Command::new("env")
        .args(["--default-signal=HUP", env!("CARGO_BIN_EXE_sandpool"), "stdio", "--state-dir"])
        .arg(state.0.join("state"))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(&log).unwrap())
        .spawn()
        .unwrap();
    let text = || std::fs::read_to_string(&log).unwrap();
    eventually("it is ready", || text().contains("interpreter_ready=true"));
    let marks = state.marks();
    kill_process(Pid::from_child(&child), Signal::HUP).unwrap();
    let mut status = None;
    eventually("it ends", || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    assert!(status.unwrap().success(), "{}", text());
    assert!(text().contains("SIGHUP: stopping"), "{}", text());
    eventually("nothing is left", || traces(&marks).is_empty());
}
