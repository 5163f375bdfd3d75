//! The story of the workbench document with the real Chromium, over stdio and HTTP and in both eras: an agent opens a page, reads it,
//! types, clicks, runs code on what it downloaded and writes files, all in one sandbox.

use std::sync::Arc;
use std::thread;

use serde_json::{Value, json};
use testkit::host::StateDir;
use testkit::http::{Era, Mcp};

use crate::browsing::Web;
use crate::serve::Serve;
use crate::ways::{Said, Stdio, Way};

/// The ref of the element that reads so: `button "Book"`.
fn element(snapshot: &Said, reads: &str) -> String {
    let elements = snapshot.facts["elements"].as_str().unwrap();
    let line = elements.lines().find(|line| line.split_once("] ").is_some_and(|(_, rest)| rest.starts_with(reads)));
    let line = line.unwrap_or_else(|| panic!("no {reads} in\n{elements}"));
    line.trim_start_matches('[').split(']').next().unwrap().to_owned()
}

/// The first line, and the JSON below it, which has the same facts as the object.
fn ok(said: &Said, first: &str) {
    let (line, json) = said.text.split_once('\n').unwrap_or_else(|| panic!("one line: {}", said.text));
    assert_eq!(line, first);
    assert_eq!(serde_json::from_str::<Value>(json).unwrap(), said.facts);
}

/// The same, where both have words of a page: marked with one number.
fn page(said: &Said, tool: &str, shown: &str) {
    let (line, json) = said.text.split_once('\n').unwrap_or_else(|| panic!("one line: {}", said.text));
    let mut facts: Value = serde_json::from_str(json).unwrap();
    let members = facts.as_object_mut().unwrap();
    let end = members.remove("end_of_untrusted").unwrap_or_else(|| panic!("no mark: {}", said.text));
    let number = end.as_str().unwrap();
    assert!(members.remove("untrusted").unwrap().as_str().unwrap().starts_with(number), "{}", said.text);
    assert_eq!(line, format!("{tool} ok: [untrusted {number}] {shown} [end of untrusted {number}]"));
    // The object for programs names the page's members instead.
    let mut object = said.facts.clone();
    assert!(object.as_object_mut().unwrap().remove("untrusted").is_some(), "{}", said.facts);
    assert_eq!(facts, object);
}

fn tell(way: &mut dyn Way, web: &Web) {
    let forms = web.url("/forms");
    let early = way.bad("browser_goto", json!({ "url": forms }));
    assert_eq!(early.text, "browser_goto failed: no sandbox is running\nhint: call sandbox_create first");
    let sandbox = way.good("sandbox_create", json!({})).facts["sandbox_id"].as_str().unwrap().to_owned();

    // A form: read, filled in, sent.
    let shown = format!("{forms} (Forms)");
    page(&way.good("browser_goto", json!({ "url": forms })), "browser_goto", &shown);
    let seen = way.good("browser_snapshot", json!({}));
    page(&seen, "browser_snapshot", &shown);
    assert!(seen.facts["text"].as_str().unwrap().contains("Book a journey"), "{}", seen.text);
    assert!(!seen.text.contains("hunter2"), "a password is shown: {}", seen.text);
    let name = element(&seen, "textbox \"Name\"");
    page(&way.good("browser_type", json!({ "selector": name, "text": "Ada \"λ\"" })), "browser_type", &shown);
    let again = way.good("browser_snapshot", json!({ "maxTextLen": 50 }));
    assert_eq!(
        element(&again, "textbox \"Name\" focused required = \"Ada \\\"λ\\\"\""),
        name,
        "the ref of a node stays"
    );
    assert!(again.facts["text"].as_str().unwrap().chars().count() == 50, "{}", again.text);
    way.good("browser_click", json!({ "selector": element(&again, "button \"Book\"") }));
    let sent = way.good("browser_snapshot", json!({}));
    assert!(sent.facts["text"].as_str().unwrap().contains("Ada \"λ\""), "{}", sent.text);

    // What the document prints for a ref that is none, and one that was.
    let document = |selector: &str| {
        format!(
            "browser_click failed: element not found (selector=\"{selector}\")\n\
             hint: call browser_snapshot first and use one of the returned refs"
        )
    };
    assert_eq!(way.bad("browser_click", json!({ "selector": "ref_9999" })).text, document("ref_9999"));
    assert_eq!(way.bad("browser_click", json!({ "selector": name })).text, document(&name), "of the page before");

    // A download, which code reads; and files.
    way.good("browser_goto", json!({ "url": web.url("/downloads") }));
    let got = way.good("browser_click", json!({ "selector": "a[href='/download/report.csv']" }));
    let happened = got.facts["happened"][0].as_str().unwrap_or_else(|| panic!("{}", got.text));
    assert!(happened.starts_with("downloaded downloads/report.csv (27 bytes) from http://pages.test"), "{happened}");
    let links = |block: &Value| {
        block["type"] == "resource_link"
            || block["text"].as_str().is_some_and(|text| text.starts_with("\"report.csv\" ("))
    };
    assert!(got.blocks.iter().any(links), "{:?}", got.blocks);
    let code = "import csv\nsum(int(row['amount']) for row in csv.DictReader(open('downloads/report.csv')))";
    assert_eq!(way.good("code_run", json!({ "language": "python", "code": code })).facts["stdout"], "11\n");
    way.good("file_write", json!({ "path": "total.txt", "content": "11" }));
    assert_eq!(way.good("file_read", json!({ "path": "total.txt" })).facts["content"], "11");
    let listed = way.good("file_list", json!({})).text;
    assert!(listed.contains("downloads/report.csv") && listed.contains("total.txt"), "{listed}");

    // What is not allowed says so, for the browser and for code.
    for url in ["http://evil.test/", "https://evil.test/"] {
        let denied = way.bad("browser_goto", json!({ "url": url })).text;
        let (first, rest) = denied.split_once('\n').unwrap();
        assert!(
            first.starts_with("browser_goto failed: ") && first.contains("was denied: policy \"pages\""),
            "{denied}"
        );
        assert!(rest.contains("\nhint: ") || rest.starts_with("hint: "), "{denied}");
        assert!(denied.contains("[network.policy.pages] allow = "), "{denied}");
    }
    let code = "import urllib.request\nurllib.request.urlopen('http://evil.test/')";
    let denied = way.bad("code_run", json!({ "language": "python", "code": code }));
    assert!(denied.facts["denied"][0].as_str().unwrap().contains("evil.test"), "{}", denied.text);
    assert!(denied.facts["stderr"].as_str().unwrap().contains("\n[network] GET http://evil.test/ was denied"));
    let code = format!("curl -s {forms} | grep -c Book");
    way.good("code_run", json!({ "language": "shell", "code": code }));

    ok(&way.good("sandbox_destroy", json!({})), &format!("sandbox_destroy ok: {sandbox}"));
    way.bad("browser_snapshot", json!({}));
}

#[test]
fn the_document_s_story_in_every_way() {
    let Some(web) = Web::start() else { return };
    let state = Arc::new(StateDir::new("workbench-story"));
    thread::scope(|scope| {
        scope.spawn(|| {
            for is_modern in [false, true] {
                let mut way = Stdio::start(&state, "workbench", &web.settings(), is_modern);
                tell(&mut way, &web);
                assert!(way.client.finish().success());
            }
        });
        let server = Serve::with_settings(Arc::new(StateDir::new("workbench-http")), &web.settings(), &[]);
        for era in [Era::Legacy("2025-11-25"), Era::Modern, Era::Bare] {
            tell(&mut Mcp::new(&server.account(), "workbench", era), &web);
        }
        assert!(server.finish().success());
    });
}
