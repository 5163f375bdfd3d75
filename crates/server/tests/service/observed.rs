//! Who may read the metrics, what they say about tenants, and what the journal says about contexts.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;

use rustix::process::Signal;
use serde_json::{Value, json};
use testkit::http::{Account, request};

use crate::support::{Service, Setup, eventually, token};

fn journal(service: &Service) -> Vec<Value> {
    let dir = service.state().0.join("state/journal");
    let read = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
    let mut files: Vec<_> = std::fs::read_dir(dir).unwrap().flatten().map(|entry| entry.path()).collect();
    files.sort();
    let text: String = files.iter().map(|path| read(path)).collect();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

fn read_metrics(address: SocketAddr, token: Option<&str>) -> (u16, String) {
    let account = Account { address, token: token.map(str::to_owned), forbidden: [].into() };
    let answer = account.ask("GET", "/metrics", &[], b"").unwrap();
    (answer.status, answer.text())
}

/// The token of the metrics reads them, and a tenant's does not.
#[test]
fn metrics_have_a_token_of_their_own() {
    let state = std::sync::Arc::new(testkit::host::StateDir::new("metrics-token"));
    let file = state.0.join("metrics-token");
    std::fs::write(&file, "readers-only-7d1f\n").unwrap();
    let settings = format!("[metrics]\ntoken_file = '{}'\n", file.display());
    let setup = Setup { settings: &settings, state: Some(state), ..Setup::default() };
    let service = Service::with("metrics-token", setup);
    assert_eq!(read_metrics(service.address, None).0, 401);
    assert_eq!(read_metrics(service.address, Some(&token("blue"))).0, 401);
    let (status, page) = read_metrics(service.address, Some("readers-only-7d1f"));
    assert!(status == 200 && page.contains("sandpool_build_info"), "{status} {page}");
    // It opens nothing else.
    let reader = Account { token: Some("readers-only-7d1f".into()), ..service.account("blue") };
    assert_eq!(reader.ask("GET", "/mcp", &[], b"").unwrap().status, 401);
    // A reload replaces it.
    std::fs::write(&file, "readers-only-9e42\n").unwrap();
    service.signal(Signal::HUP);
    eventually("the reload", || service.log().contains("settings changed: `metrics.token`"));
    assert_eq!(read_metrics(service.address, Some("readers-only-7d1f")).0, 401);
    assert_eq!(read_metrics(service.address, Some("readers-only-9e42")).0, 200);
    service.finish();
}

/// With a listener of their own, the metrics are there and nowhere else, and nothing else is there.
#[test]
fn metrics_have_a_listener_of_their_own() {
    let setup = Setup { settings: "[metrics]\nlisten = '127.0.0.1:0'\n", ..Setup::default() };
    let service = Service::with("metrics-listen", setup);
    let line = |log: String| Some(log.split("metrics: http://").nth(1)?.split('/').next()?.to_owned());
    let address: SocketAddr = line(service.log()).expect("the log names the listener").parse().unwrap();
    assert_ne!(address, service.address);
    let (status, page) = read_metrics(address, None);
    assert!(status == 200 && page.contains("sandpool_build_info"), "{status} {page}");
    assert_eq!(read_metrics(service.address, Some(&token("blue"))).0, 404);
    let there = Account { address, ..service.account("blue") };
    assert_eq!(there.ask("GET", "/readyz", &[], b"").unwrap().status, 200);
    let body = request(1, "tools/list", json!({})).to_string();
    let headers = [("content-type", "application/json"), ("accept", "application/json")];
    assert_eq!(there.ask("POST", "/mcp", &headers, body.as_bytes()).unwrap().status, 404);
    service.finish();
}

/// W95: without a token, the listener of the metrics is for this machine alone, also where the server itself has any name.
#[test]
fn w95_a_page_does_not_read_the_metrics_under_a_name_of_its_own() {
    let settings = "[serve]\nallowed_hosts = ['*']\n[metrics]\nlisten = '127.0.0.1:0'\n";
    let service = Service::with("metrics-rebinding", Setup { settings, ..Setup::default() });
    let line = |log: String| Some(log.split("metrics: http://").nth(1)?.split('/').next()?.to_owned());
    let address: SocketAddr = line(service.log()).expect("the log names the listener").parse().unwrap();
    let status = |host: &str| {
        let mut stream = TcpStream::connect(address).unwrap();
        write!(stream, "GET /metrics HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer.split(' ').nth(1).unwrap().to_owned()
    };
    assert_eq!(["localhost", "127.0.0.1", "evil.example"].map(status), ["200", "200", "403"]);
    service.finish();
}

/// A tenant that is throttled is named in the metrics, once in the log, and in the journal.
#[test]
fn a_throttled_tenant_is_named() {
    let quotas = [("green", "{ calls_per_second = 2 }")];
    let settings = "[metrics]\ntenants = 2\n";
    let service = Service::with("throttled", Setup { settings, quotas: &quotas, ..Setup::default() });
    let mut green = service.client("green", "sandpool");
    let mut refused = 0;
    for _ in 0..30 {
        refused += u32::from(green.send(&request(1, "tools/list", json!({}))).unwrap().status == 429);
    }
    assert!(refused > 1, "thirty calls at once are too many for two a second");
    for tenant in ["blue", "canary"] {
        service.client(tenant, "sandpool").good("list_contexts", json!({}));
    }
    let page = read_metrics(service.address, Some(&token("blue"))).1;
    let denials = format!("sandpool_denials_total{{reason=\"rate\",tenant=\"green\"}} {refused}");
    assert!(page.contains(&denials), "{page}");
    let calls = |tenant: &str| {
        let labels = "dialect=\"sandpool\",tool=\"list_contexts\",outcome=\"ok\"";
        page.contains(&format!("sandpool_calls_total{{{labels},tenant=\"{tenant}\"}} 1"))
    };
    // There is room for two: the throttled one and the first of the others.
    assert!(calls("blue") && calls("(others)") && !calls("canary"), "{page}");
    let log = service.log();
    let lines: Vec<&str> = log.lines().filter(|line| line.contains("Throttled tenant green")).collect();
    assert!(!lines.is_empty() && lines.len() < 4, "{lines:?}");
    let is_denial = |entry: &Value| entry["event"] == "denied" && entry["tenant"] == "green";
    eventually("the journal names the tenant", || journal(&service).iter().any(is_denial));
    let entry = journal(&service).into_iter().find(is_denial).unwrap();
    assert_eq!((&entry["outcome"], entry["count"].is_u64()), (&json!("rate"), true), "{entry}");
    service.finish();
}

/// Each entry about a call in a context names the context, however the call ended.
#[test]
fn each_journal_entry_names_its_context() {
    let service = Service::start("journal-contexts");
    let mut blue = service.client("blue", "sandpool");
    let context = blue.good("create_context", json!({ "name": "work" }))["context"].as_str().unwrap().to_owned();
    let at = |rest: Value| {
        let mut all = json!({ "context": context });
        all.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
        all
    };
    blue.good("write_file", at(json!({ "path": "a.txt", "content": "one" })));
    blue.good("read_file", at(json!({ "path": "a.txt" })));
    blue.good("list_files", at(json!({})));
    blue.good("search_files", at(json!({ "text": "one" })));
    blue.good("edit_file", at(json!({ "path": "a.txt", "old_string": "one", "new_string": "two" })));
    let link = blue.good("upload_link", at(json!({ "path": "b.txt" })));
    let by_name = blue.good("read_file", json!({ "context": "work", "path": "a.txt" }));
    blue.call("read_file", at(json!({ "path": "missing.txt" })));
    blue.call("run_code", at(json!({ "code": "1", "language": "cobol" })));
    blue.call("run_code", at(json!({ "code": "1 / 0" })));
    let started = blue.good("run_code", at(json!({ "code": "import time\ntime.sleep(60)", "background": true })));
    let run = started["run"].as_str().unwrap_or_else(|| panic!("{started}")).to_owned();
    blue.call("wait_run", json!({ "run": run }));
    blue.call("cancel_run", json!({ "run": run }));
    let url = link["url"].as_str().unwrap_or_else(|| panic!("{link}")).to_owned();
    let upload = format!("/{}", url.splitn(4, '/').nth(3).unwrap());
    assert!((200..300).contains(&service.account("blue").ask("PUT", &upload, &[], b"new").unwrap().status));
    blue.good("stop_context", at(json!({})));
    assert!(by_name.to_string().contains("two"), "{by_name}");

    let concerns = |entry: &Value| {
        entry["tenant"] == "blue" && !["list_contexts"].contains(&entry["tool"].as_str().unwrap_or_default())
            || entry["event"] == "file_uploaded"
    };
    eventually("the journal is written", || journal(&service).iter().any(|entry| entry["tool"] == "stop_context"));
    let entries: Vec<Value> = journal(&service).into_iter().filter(concerns).collect();
    assert!(entries.len() > 15, "{entries:#?}");
    let without: Vec<&Value> = entries.iter().filter(|entry| entry["context"] != context.as_str()).collect();
    assert!(without.is_empty(), "{without:#?}");
    let uploaded = entries.iter().find(|entry| entry["event"] == "file_uploaded").expect("an entry of the upload");
    assert_eq!(uploaded["tenant"], "blue", "{uploaded}");
    service.finish();
}
