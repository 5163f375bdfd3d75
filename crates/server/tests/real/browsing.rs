//! The browser of a sandbox through the built server: logins, uploads, dialogs, tenants, a browser that is killed, no network.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use ring::digest::{SHA256, digest};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use testkit::host::StateDir;
use testkit::http::{Account, Era, Mcp};
use testkit::pages::Pages;

use crate::serve::Serve;
use crate::ways::{Said, Way};

/// Pages on loopback that sandboxes reach by name.
pub struct Web(Pages);

impl Web {
    /// None where there is no browser to look at them with.
    #[allow(clippy::disallowed_methods, reason = "a test asks whether it may be left out")]
    pub fn start() -> Option<Self> {
        let shell = Path::new("/usr/lib/chromium/chromium-headless-shell");
        if !shell.exists() && !Path::new("/usr/lib/chromium/chromium").exists() {
            assert!(std::env::var_os("CI").is_none(), "Chromium is not installed");
            eprintln!("SKIP: Chromium is not installed");
            return None;
        }
        Some(Self(Pages::start().unwrap()))
    }

    pub fn url(&self, path: &str) -> String {
        self.0.url_at("pages.test", path)
    }

    /// What lets sandboxes go there, and nowhere else.
    pub fn settings(&self) -> String {
        let port = self.0.port;
        format!(
            "[network]\ndefault = \"pages\"\n\
             [network.policy.pages]\nallow = [\"pages.test\", \"other.test\"]\nprivate = [\"127.0.0.1:{port}\"]\n\
             [network.hosts]\n\"pages.test\" = \"127.0.0.1\"\n\"other.test\" = \"127.0.0.1\"\n"
        )
    }
}

const TENANTS: [&str; 2] = ["blue", "green"];

fn token(tenant: &str) -> String {
    format!("the-token-of-{tenant}")
}

fn tenants_file(state: &StateDir) -> String {
    let file = state.0.join("tenants");
    let entry = |tenant| {
        let hash = text::hex(digest(&SHA256, token(tenant).as_bytes()).as_ref());
        format!("[[tenant]]\nname = \"{tenant}\"\ntoken_sha256 = \"{hash}\"\n")
    };
    std::fs::write(&file, TENANTS.map(entry).concat()).unwrap();
    std::fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
    file.to_str().unwrap().to_owned()
}

fn act(way: &mut dyn Way, arguments: Value) -> Said {
    way.good("browser_act", arguments)
}

fn outline(way: &mut dyn Way) -> String {
    way.good("browser_snapshot", json!({})).text
}

/// The browsers of a server: those of its processes that are Chromium's first.
fn browsers(server: u32) -> Vec<Pid> {
    let parent = |pid: i32| -> Option<i32> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
    };
    let is_ours = |pid: i32| {
        std::iter::successors(Some(pid), |pid| parent(*pid)).take(10).any(|ancestor| ancestor == server as i32)
    };
    let is_first = |pid: i32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line);
        line.split('\0').next().is_some_and(|program| program.contains("chromium")) && !line.contains("--type=")
    };
    let pids = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| is_first(*pid) && is_ours(*pid)).filter_map(Pid::from_raw).collect()
}

#[test]
fn a_browser_in_a_context() {
    let Some(web) = Web::start() else { return };
    let state = Arc::new(StateDir::new("browsing"));
    let server = Serve::with_settings(state.clone(), &web.settings(), &[("SANDPOOL_TENANTS", &tenants_file(&state))]);
    let client = |tenant: &str, era| {
        let account = Account { token: Some(token(tenant)), ..server.account() };
        Mcp::new(&account, "sandpool", era)
    };
    let blue = &mut client("blue", Era::Modern) as &mut dyn Way;

    // A login, whose cookie stays.
    let opened = blue.good("browser_open", json!({ "url": web.url("/account") }));
    assert_eq!((&opened.facts["title"], &opened.facts["context_created"]), (&json!("Login"), &json!(true)));
    act(blue, json!({ "action": "type", "target": "input[name=user]", "text": "ada" }));
    act(blue, json!({ "action": "type", "target": "input[name=password]", "text": "lovelace", "submit": true }));
    assert!(outline(blue).contains("Welcome, Ada"), "{}", outline(blue));
    act(blue, json!({ "action": "tab", "url": web.url("/account") }));
    assert!(outline(blue).contains("Welcome, Ada"), "in another tab");
    act(blue, json!({ "action": "tab", "tab": 2, "close": true }));

    // Another tenant's browser knows nothing of it.
    let green = &mut client("green", Era::Legacy("2025-11-25")) as &mut dyn Way;
    assert_eq!(green.good("browser_open", json!({ "url": web.url("/account") })).facts["title"], "Login");
    let listed = blue.good("list_contexts", json!({})).facts["contexts"][0]["context"].clone();
    let foreign = json!({ "url": web.url("/"), "context": listed });
    assert!(green.bad("browser_open", foreign).facts["error"].as_str().unwrap().starts_with("There is no context"));

    // Files of the context's go into a page.
    blue.good("write_file", json!({ "path": "notes/a.txt", "content": "from the workspace" }));
    blue.good("browser_open", json!({ "url": web.url("/files") }));
    act(blue, json!({ "action": "upload", "target": "#one", "files": ["notes/a.txt"] }));
    act(blue, json!({ "action": "wait", "text": "from the workspace" }));
    let missing = blue.bad("browser_act", json!({ "action": "upload", "target": "#one", "files": ["none"] }));
    assert!(missing.facts["error"].as_str().unwrap().contains("none"), "{}", missing.text);

    // What a page does unasked is told.
    blue.good("browser_open", json!({ "url": web.url("/dialogs") }));
    let dialog = act(blue, json!({ "action": "click", "target": "button:nth-of-type(2)" }));
    assert_eq!(dialog.facts["happened"], json!(["a dialog (confirm) was dismissed: Are you sure?"]));
    assert!(outline(blue).contains("confirm: false"));
    blue.good("browser_open", json!({ "url": web.url("/popups") }));
    let popup = act(blue, json!({ "action": "click", "target": "button:first-of-type" }));
    assert!(popup.facts["happened"][0].as_str().unwrap().starts_with("the page opened tab "), "{}", popup.text);

    // What it looks like.
    let picture = blue.good("browser_screenshot", json!({}));
    let image = picture.blocks.iter().find(|block| block["type"] == "image").unwrap();
    assert!(image["data"].as_str().unwrap().starts_with("iVBORw0KGgo"), "{}", picture.text);

    // Killed from outside, it is there again with the next call, which says so.
    let was = browsers(server.pid());
    assert!(!was.is_empty());
    for pid in was {
        kill_process(pid, Signal::KILL).unwrap();
    }
    let (is_error, first) = blue.result("browser_open", json!({ "url": web.url("/account") }));
    // Asked before the server has heard of it, the call itself says so.
    let recovered = if is_error {
        assert!(first.facts["error"].as_str().unwrap().contains("the next call starts another"), "{}", first.text);
        blue.good("browser_open", json!({ "url": web.url("/account") }))
    } else {
        first
    };
    assert_eq!(recovered.facts["title"], "Login", "the login was the dead browser's");
    let notice = recovered.facts["notice"].as_str().unwrap_or_else(|| panic!("{}", recovered.text));
    assert!(notice.contains("restarted"), "{notice}");
    assert_eq!(blue.good("read_file", json!({ "path": "notes/a.txt" })).text, "from the workspace", "files are kept");

    // What a call may not do, and that it was written down; never what was typed.
    let off = json!({ "command": format!("curl -sS {}", web.url("/")), "network": false });
    let denied = blue.good("run_command", off);
    assert!(denied.facts["denied"][0].as_str().unwrap().contains("this call asked for no network"), "{}", denied.text);
    blue.bad("browser_open", json!({ "url": "https://evil.test/" }));
    let log = server.log();
    assert!(server.finish().success());
    let journal = journal(&state.0.join("state"));
    assert!(journal.contains("network_denied") && journal.contains("evil.test"), "{journal}");
    assert!(journal.contains(&format!("\"did\":\"{}\"", web.url("/").trim_end_matches('/'))), "{journal}");
    for text in [log, journal] {
        assert!(!text.contains("lovelace") && !text.contains("/account"), "{text}");
    }
}

/// All that was written down, as text.
fn journal(state: &Path) -> String {
    let mut text = String::new();
    let mut directories = vec![state.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                directories.push(path);
            } else if path.extension().is_some_and(|extension| extension == "jsonl") {
                text += &std::fs::read_to_string(path).unwrap_or_default();
            }
        }
    }
    text
}

/// By default: only what the sandbox itself serves.
#[test]
fn without_a_network_the_browser_has_the_sandbox_s_own_pages() {
    let Some(web) = Web::start() else { return };
    let server = Serve::start("browsing-off", &[]);
    let mut client = Mcp::new(&server.account(), "workbench", Era::Legacy("2025-11-25"));
    let way = &mut client as &mut dyn Way;
    way.good("sandbox_create", json!({}));
    let off = way.bad("browser_goto", json!({ "url": web.url("/") })).text;
    assert!(off.contains("network access is off") && off.contains("network.default"), "{off}");
    assert!(web.0.asked().is_empty(), "{:?}", web.0.asked());
    let port = web.0.port;
    let outside = way.bad("browser_goto", json!({ "url": format!("http://127.0.0.1:{port}/") })).text;
    assert!(outside.contains("ERR_CONNECTION_REFUSED"), "the host's loopback is not the sandbox's: {outside}");
    let serve = "import http.server, threading\nopen('index.html', 'w').write('<title>Mine</title>')\n\
                 class Quiet(http.server.SimpleHTTPRequestHandler):\n    def log_message(self, *_): pass\n\
                 server = http.server.ThreadingHTTPServer(('127.0.0.1', 8000), Quiet)\n\
                 threading.Thread(target=server.serve_forever, daemon=True).start()";
    way.good("code_run", json!({ "language": "python", "code": serve }));
    assert_eq!(way.good("browser_goto", json!({ "url": "http://localhost:8000/" })).facts["title"], "Mine");
    assert!(server.finish().success());
}
