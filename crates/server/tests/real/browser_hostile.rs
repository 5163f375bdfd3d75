//! The hostile rows of the browser (group B), by pages that attack it, through the built binary and the real Chromium.
//!
//! After each: the call was answered (the client insists), the server goes on, and a canary in another context is right.

use std::io::{Read, Write};
use std::net::{TcpListener, UdpSocket};
use std::path::Path;

use serde_json::{Value, json};
use testkit::client::{Client, ToolResult};
use testkit::pages::Pages;

use crate::support::{StateDir, assert_no_traces, stdio_of};

/// The whole of it takes minutes: `make hostile`.
#[allow(clippy::disallowed_methods, reason = "a test's own switch")]
fn full() -> bool {
    std::env::var_os("SANDPOOL_HOSTILE").is_some()
}

struct Web {
    client: Client,
    pages: Pages,
    state: StateDir,
}

const CONTEXT: &str = "victim";

impl Web {
    /// A server whose sandboxes reach the test's pages, and `more` ports of this machine's loopback under the name `more.test`.
    fn start(name: &str, more: &[u16], settings: &str) -> Self {
        let pages = Pages::start().unwrap();
        let (mut allow, mut private) = (vec![format!("pages.test:{}", pages.port)], vec![]);
        allow.extend(more.iter().map(|port| format!("more.test:{port}")));
        private.extend([pages.port].iter().chain(more).map(|port| format!("127.0.0.1:{port}")));
        let settings = format!(
            "network.default = \"pages\"\ndialect.sandpool.pool_size = 0\nready_max = 0\n{settings}\n\
             [network.hosts]\n\"pages.test\" = \"127.0.0.1\"\n\"more.test\" = \"127.0.0.1\"\n\
             [network.policy.pages]\nallow = {allow:?}\nprivate = {private:?}\n"
        );
        let state = StateDir::new(name);
        let client = Client::start(stdio_of("sandpool", &state.0, &settings));
        let mut web = Self { client, pages, state };
        web.create("canary");
        web.create(CONTEXT);
        web.code("canary", "secret = 12345");
        web
    }

    fn create(&mut self, name: &str) {
        let created = self.client.call("create_context", json!({ "name": name }));
        assert!(!created.is_error(), "{}", created.0);
    }

    fn call(&mut self, tool: &str, mut arguments: Value) -> Value {
        arguments["context"] = json!(CONTEXT);
        self.client.call(tool, arguments).facts()
    }

    fn code(&mut self, context: &str, code: &str) -> String {
        let result = self.client.call("run_code", json!({ "context": context, "code": code }));
        result.facts()["stdout"].as_str().unwrap_or_default().to_owned()
    }

    /// Code in the context whose browser is attacked.
    fn run(&mut self, code: &str) -> String {
        self.code(CONTEXT, code)
    }

    fn open(&mut self, url: &str) -> Value {
        self.call("browser_open", json!({ "url": url }))
    }

    fn visit(&mut self, path: &str) -> Value {
        let url = self.pages.url_at("pages.test", path);
        self.open(&url)
    }

    /// What an expression comes to in the page's own world, or the error.
    fn evaluate(&mut self, expression: &str) -> Value {
        let answer = self.call("browser_act", json!({ "action": "evaluate", "expression": expression, "timeout": 60 }));
        match answer["value"].as_str() {
            Some(text) => serde_json::from_str(text).unwrap_or_else(|_| json!(text)),
            None => answer["error"].clone(),
        }
    }

    fn snapshot(&mut self) -> ToolResult {
        self.client.call("browser_snapshot", json!({ "context": CONTEXT }))
    }

    /// The outline of what is shown.
    fn text(&mut self) -> String {
        self.snapshot().0["content"][0]["text"].as_str().unwrap_or_default().to_owned()
    }

    fn tabs(&mut self) -> Vec<Value> {
        let answer = self.call("browser_act", json!({ "action": "tab" }));
        answer["tabs"].as_array().cloned().unwrap_or_else(|| panic!("no tabs: {answer}"))
    }

    /// The row was survived.
    fn survived(&mut self, row: &str, seen: &str) {
        assert_eq!(self.code("canary", "print(secret)"), "12345\n", "after {row}");
        report(row, seen);
    }

    /// And the browser is as good as before.
    fn usable(&mut self) {
        // A call that finds the browser gone says so; the next one has another.
        let opened = [self.visit("/forms"), self.visit("/forms")];
        assert_eq!(opened[1]["success"], true, "{opened:?}");
        assert!(self.text().contains("heading"), "{}", self.text());
    }

    fn finish(self) {
        assert!(self.client.finish().success());
    }
}

/// A line for the report of `make hostile`.
#[allow(clippy::disallowed_methods, reason = "a test's own switch")]
fn report(row: &str, seen: &str) {
    let Some(dir) = std::env::var_os("SANDPOOL_HOSTILE_REPORT") else { return };
    let path = Path::new(&dir).join("browser_hostile.txt");
    let mut file = std::fs::OpenOptions::new().append(true).create(true).open(path).unwrap();
    writeln!(file, "{row}\t{}", seen.replace('\n', " ")).unwrap();
}

fn is_web(url: &Value) -> bool {
    let url = url.as_str().unwrap_or_default();
    url.is_empty()
        || ["http:", "https:", "data:", "about:blank", "chrome-error:"].iter().any(|kind| url.starts_with(kind))
}

/// B01, B03: no file and none of the browser's own pages is shown, whoever leads there.
#[test]
fn no_page_leads_to_a_file_or_to_the_browsers_own_pages() {
    let mut web = Web::start("b01", &[], "");
    let targets =
        ["file:///etc/passwd", "file:///proc/self/environ", "chrome://version", "view-source:file:///etc/passwd"];
    for target in targets {
        let answer = web.open(target);
        assert_eq!(answer["success"], false, "{target}: {answer}");
        assert!(!web.text().contains("root:"), "{target}");
    }
    web.survived("B01", "refused by the browser's driver");
    for target in targets {
        let encoded = target.replace(':', "%3A").replace('/', "%2F");
        web.visit(&format!("/redirect/to?url={encoded}"));
        web.visit(&format!("/refresh?url={encoded}"));
        web.visit("/forms");
        web.evaluate(&format!("location = '{target}'; 0"));
        web.evaluate(&format!("window.open('{target}'); 0"));
        web.evaluate(&format!(
            "document.body.innerHTML = '<iframe src=\"{target}\"></iframe><a id=go href=\"{target}\">go</a>'; 0"
        ));
        web.call("browser_act", json!({ "action": "click", "target": "#go" }));
        web.open(&format!(
            "data:text/html,<iframe src='{target}'></iframe><a id=go href='{target}'>go</a><embed src='{target}'>"
        ));
        web.call("browser_act", json!({ "action": "click", "target": "#go" }));
        let tabs = web.tabs();
        assert!(tabs.iter().all(|tab| is_web(&tab["url"])), "{target}: {tabs:?}");
        for tab in &tabs {
            web.call("browser_act", json!({ "action": "tab", "tab": tab["tab"] }));
            let text = web.text();
            assert!(!text.contains("root:") && !text.contains("PATH="), "{target}: {text}");
        }
        let body = web.evaluate(
            "[...document.querySelectorAll('iframe')].map(f => f.contentDocument?.body?.innerText ?? '').join('')",
        );
        assert!(!body.to_string().contains("root:"), "{target}: {body}");
    }
    web.usable();
    web.survived("B03", "by redirect, refresh, script, frame, popup and link: not shown");
    web.finish();
}

/// Answers each request with a question for a name and a password.
fn asks_for_a_password() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(
                b"HTTP/1.1 401 Unauthorized\r\nwww-authenticate: Basic realm=\"x\"\r\ncontent-length: 6\r\nconnection: close\r\n\r\nsecret",
            );
        }
    });
    port
}

/// Code in the sandbox that serves a page on its own loopback, which is a secure context.
const SERVE: &str = "
import http.server, threading
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        kind = 'text/javascript' if self.path.endswith('.js') else 'text/html'
        body = b'' if self.path.endswith('.js') else b'<title>own</title><h1>own</h1><input type=file id=file>'
        self.send_response(200); self.send_header('content-type', kind); self.send_header('content-length', str(len(body)))
        self.end_headers(); self.wfile.write(body)
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(('127.0.0.1', 8000), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print('serving')";

/// B06, B08, B10, B20: nobody is there to be asked, and nothing that asks, turns in circles or never ends holds a call up.
#[test]
fn a_page_that_asks_or_never_rests_holds_no_call_up() {
    let asks = asks_for_a_password();
    let mut web = Web::start("b06", &[asks], "");
    web.visit("/forms");
    let done = web
        .evaluate("for (let i = 0; i < 1000; i++) alert(i); [confirm('sure?'), prompt('name?'), print() ?? 'printed']");
    assert_eq!(done, json!([false, null, "printed"]));
    web.evaluate("addEventListener('beforeunload', e => { e.preventDefault(); e.returnValue = 'stay'; }); 0");
    web.call("browser_act", json!({ "action": "click", "target": "h1" }));
    web.usable();
    web.survived("B06", "1,000 alerts, confirm, prompt, print and beforeunload answered by themselves");

    let answer = web.open(&format!("http://more.test:{asks}/"));
    assert!(answer["success"].is_boolean(), "{answer}");
    assert_eq!(web.run(SERVE), "serving\n");
    assert_eq!(web.open("http://localhost:8000/")["success"], true);
    let asked = web.evaluate(
        "const soon = promise => Promise.race([promise, new Promise(late => setTimeout(late, 5000, 'pending'))]);
         Promise.all([
             globalThis.Notification?.requestPermission() ?? 'denied',
             new Promise(done => navigator.geolocation.getCurrentPosition(() => done('granted'), () => done('denied'))),
             navigator.mediaDevices.getUserMedia({ video: true }).then(() => 'granted', () => 'denied'),
             navigator.clipboard.readText().then(() => 'granted', () => 'denied'),
             navigator.permissions.query({ name: 'midi' }).then(found => found.state),
         ].map(soon))",
    );
    let asked = asked.as_array().cloned().unwrap_or_else(|| panic!("{asked}"));
    assert!(asked.iter().all(|one| *one == "denied" || *one == "pending" || *one == "prompt"), "{asked:?}");
    let clicked = web.call("browser_act", json!({ "action": "click", "target": "#file" }));
    assert!(clicked["success"].is_boolean(), "{clicked}");
    for scheme in ["mailto:a@b.test", "ssh://b.test", "intent://x", "tel:1"] {
        web.evaluate(&format!("location = '{scheme}'; 0"));
        assert!(is_web(&web.snapshot().facts()["url"]), "{scheme}");
    }
    web.usable();
    web.survived("B08", "permissions, a password, a file chooser and other programs' addresses: none is asked for");

    let looped = web.visit("/redirect/loop");
    assert_eq!(looped["success"], false, "{looped}");
    assert!(looped["error"].as_str().unwrap().contains("TOO_MANY_REDIRECTS"), "{looped}");
    web.visit("/refresh");
    web.text();
    web.visit("/forms");
    web.evaluate("setInterval(() => history.pushState({}, '', '#' + Math.random()), 0); 0");
    web.text();
    web.evaluate("setInterval(() => location.reload(), 0); 0");
    web.text();
    web.usable();
    web.survived("B10", "a circle of redirects is an error; of refreshes, reloads and history entries an answer");

    assert_eq!(web.visit("/busy")["success"], true);
    let clicked = web.call("browser_act", json!({ "action": "click", "target": "#press" }));
    assert_eq!(clicked["success"], true, "{clicked}");
    assert!(web.text().contains("Pressed"), "{}", web.text());
    web.survived("B20", "a page that polls and paints for ever is opened, clicked and read");
    web.finish();
}

/// The processes of the victim's sandbox as this machine sees them: number, state, command line.
fn processes(namespace: &str) -> Vec<(i32, String, String)> {
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    let numbers = all.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let inside = |number: &i32| {
        std::fs::read_link(format!("/proc/{number}/ns/pid")).is_ok_and(|found| found == Path::new(namespace))
    };
    let described = numbers.filter(inside).filter_map(|number| {
        let stat = std::fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
        let state = stat.rsplit_once(')')?.1.split_whitespace().next()?.to_owned();
        let line = std::fs::read_to_string(format!("/proc/{number}/cmdline")).ok()?;
        Some((number, state, line.replace('\0', " ")))
    });
    described.collect()
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    for _ in 0..1000 {
        if done() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("waiting until {what}");
}

const NAMESPACE: &str = "import os; print(os.readlink('/proc/self/ns/pid'))";

/// B11, B25: whatever of the browser dies, the next call has a page, and nothing of it stays.
#[test]
fn a_page_or_a_browser_that_dies_costs_one_call_and_leaves_nothing() {
    let mut web = Web::start("b11", &[], "");
    let marks = web.state.marks();
    web.visit("/forms");
    let namespace = web.run(NAMESPACE).trim().to_owned();
    let kill = |kind: &dyn Fn(&str) -> bool| {
        let found = processes(&namespace).into_iter().find(|(_, _, line)| line.contains("chrom") && kind(line));
        let (number, _, _) = found.unwrap_or_else(|| panic!("no such process: {:?}", processes(&namespace)));
        rustix::process::kill_process(rustix::process::Pid::from_raw(number).unwrap(), rustix::process::Signal::KILL)
            .unwrap();
    };
    let answer = web.open("chrome://crash");
    assert_eq!(answer["success"], false, "{answer}");
    for round in 0..3 {
        kill(&|line| line.contains("--type=renderer"));
        web.usable();
        kill(&|line| !line.contains("--type="));
        web.usable();
        web.survived("B11", &format!("a page's and the browser's process killed {} times", round + 1));
    }
    web.evaluate("const all = []; for (;;) all.push(new Uint8Array(64 << 20).fill(1));");
    web.usable();
    web.survived("B11 memory", "a page that takes all memory; the next call has a page");
    wait_until("the dead are buried", || processes(&namespace).iter().all(|(_, state, _)| state != "Z"));
    let left = web.run("import os; print([name for name in os.listdir('/tmp') if 'chrom' in name.lower()])");
    assert_eq!(left, "[]\n");
    web.client.call("stop_context", json!({ "context": CONTEXT }));
    wait_until("its processes are gone", || processes(&namespace).is_empty());
    web.survived("B25", "no zombie, no file in /tmp, no process after the context's end");
    web.finish();
    assert_no_traces(&marks);
}

/// B09, B13, B21: what is too much is cut, and said to be.
#[test]
fn what_a_page_has_too_much_of_is_cut() {
    let mut web = Web::start("b13", &[], "");
    web.visit("/forms");
    web.evaluate("for (let i = 0; i < 1000; i++) open('about:blank'); 0");
    let tabs = web.tabs();
    assert!(tabs.len() <= 32, "{} tabs", tabs.len());
    web.usable();
    web.survived("B09", &format!("1,000 popups, {} tabs", tabs.len()));

    let (nodes, megabytes) = if full() { (1_000_000, 100) } else { (100_000, 5) };
    for path in [format!("/big?n={nodes}"), "/deep?n=50000".into(), format!("/text?n={megabytes}")] {
        web.visit(&path);
        let snapshot = web.snapshot();
        let length = snapshot.0.to_string().len();
        assert!(length < 200_000, "{path}: {length} bytes");
        web.survived(&format!("B13 {path}"), &format!("an answer of {length} bytes"));
    }
    web.usable();

    web.evaluate("document.body.innerHTML = '<div style=\"height: 100000px; width: 50000px\">tall</div>'; 0");
    let answer = web.client.call("browser_screenshot", json!({ "context": CONTEXT, "full_page": true }));
    let (length, told) = (answer.0.to_string().len(), answer.facts());
    assert!(length < 16 << 20, "{length} bytes");
    assert!(told["note"].is_string() || told["error"].is_string(), "{told}");
    web.usable();
    web.survived("B21", &format!("{} x {} pixels, {length} bytes", told["width"], told["height"]));
    web.finish();
}

/// B15: what a page keeps goes with the context, and another context sees none of it.
#[test]
fn nothing_that_a_page_keeps_outlives_its_context() {
    const KEEP: &str = "(async () => {
        localStorage.setItem('k', 'v'); document.cookie = 'k=v; max-age=9999';
        await new Promise(done => { const r = indexedDB.open('k'); r.onsuccess = r.onerror = done; });
        await caches.open('k');
        await navigator.serviceWorker.register('/worker.js');
        await navigator.serviceWorker.ready;
        return 'kept';
    })()";
    const SEEN: &str = "(async () => [localStorage.length, document.cookie, (await indexedDB.databases()).length, (await caches.keys()).length,
        (await navigator.serviceWorker.getRegistrations()).length])()";
    let mut web = Web::start("b15", &[], "");
    assert_eq!(web.run(SERVE), "serving\n");
    web.open("http://localhost:8000/");
    assert_eq!(web.evaluate(KEEP), "kept");
    assert_eq!(web.evaluate(SEEN), json!([1, "k=v", 1, 1, 1]));
    web.client.call("stop_context", json!({ "context": CONTEXT }));
    web.create(CONTEXT);
    assert_eq!(web.run(SERVE), "serving\n");
    web.open("http://localhost:8000/");
    assert_eq!(web.evaluate(SEEN), json!([0, "", 0, 0, 0]));
    web.survived("B15", "storage, cookies, databases, caches and workers are gone");
    web.finish();
}

/// B18: a page that takes every processor and all memory it can get costs its own context alone.
#[test]
fn a_greedy_page_costs_its_own_context() {
    let mut web = Web::start("b18", &[], "");
    web.visit("/forms");
    web.evaluate(
        "for (let i = 0; i < 32; i++) new Worker(URL.createObjectURL(new Blob(['for (;;) Math.random()'])));
         document.createElement('canvas').getContext('webgl'); 0",
    );
    web.evaluate("setInterval(() => { (window.all ??= []).push(new Uint8Array(32 << 20).fill(1)); }, 1); 0");
    for _ in 0..50 {
        assert_eq!(web.code("canary", "print(secret)"), "12345\n");
    }
    assert_eq!(web.run("print('code beside it goes on')"), "code beside it goes on\n");
    web.usable();
    web.survived("B18", "50 calls of another context and code of its own were answered meanwhile");
    web.finish();
}

/// B04, B19: there is no port of the browser's, and no page reaches a listener of this machine.
#[test]
fn pages_reach_no_listener_of_this_machine_and_the_browser_has_none() {
    let canary = TcpListener::bind("0.0.0.0:0").unwrap();
    let datagrams = UdpSocket::bind("0.0.0.0:0").unwrap();
    canary.set_nonblocking(true).unwrap();
    datagrams.set_nonblocking(true).unwrap();
    let (port, udp) = (canary.local_addr().unwrap().port(), datagrams.local_addr().unwrap().port());
    let probe = UdpSocket::bind("0.0.0.0:0").unwrap();
    let own = probe
        .connect("192.0.2.1:9")
        .and_then(|()| probe.local_addr())
        .map_or("127.0.0.1".into(), |found| found.ip().to_string());
    let mut web = Web::start("b19", &[], "");
    web.visit("/forms");
    let hosts = [
        "127.0.0.1",
        "localhost",
        "[::1]",
        "0.0.0.0",
        "[::ffff:127.0.0.1]",
        "2130706433",
        "0x7f.1",
        "127.1",
        "pages.test",
        "more.test",
        own.as_str(),
        "169.254.169.254",
        "[fe80::1]",
        "10.0.0.1",
        "metadata.google.internal",
    ];
    for host in hosts {
        let tried = web.evaluate(&format!(
            "{{ const at = '{host}:{port}', soon = p => Promise.race([p, new Promise(late => setTimeout(late, 3000, 'late'))]);
             document.head.insertAdjacentHTML('beforeend', `<link rel=dns-prefetch href=//${{at}}><link rel=preconnect href=http://${{at}}>`);
             navigator.sendBeacon(`http://${{at}}/beacon`, 'x');
             Promise.all([
                 soon(fetch(`http://${{at}}/`, {{ mode: 'no-cors' }}).then(r => r.status === 0 || r.ok ? 'answered' : 'denied', () => 'failed')),
                 soon(new Promise(done => {{ const i = new Image(); i.onload = () => done('answered'); i.onerror = () => done('failed'); i.src = `http://${{at}}/i.png`; }})),
                 soon(new Promise(done => {{ const s = new WebSocket(`ws://${{at}}/`); s.onopen = () => done('answered'); s.onerror = () => done('failed'); }})),
             ]) }}"
        ));
        assert!(tried.is_array(), "{host}: {tried}");
    }
    let candidates = web.evaluate(&format!(
        "new Promise(done => {{
             const found = [], peer = new RTCPeerConnection({{ iceServers: [{{ urls: 'stun:{own}:{udp}' }}] }});
             peer.onicecandidate = e => e.candidate ? found.push(e.candidate.candidate) : done(found);
             peer.createDataChannel('x'); peer.createOffer().then(offer => peer.setLocalDescription(offer));
             setTimeout(done, 3000, found);
         }})"
    ));
    assert!(!candidates.to_string().contains(&own) || own == "127.0.0.1", "{candidates}");
    assert!(canary.accept().is_err(), "a page reached a listener of this machine");
    assert!(datagrams.recv(&mut [0; 64]).is_err(), "a page reached a socket of this machine");
    web.usable();
    web.survived("B19", "fetch, image, WebSocket, beacon, prefetch and WebRTC to 15 addresses: no hit");

    let listening = web.run(
        "for name in ('tcp', 'tcp6'):
    for line in open('/proc/net/' + name).readlines()[1:]:
        if line.split()[3] == '0A': print(name, line.split()[1])",
    );
    assert_eq!(listening.trim(), "tcp 0100007F:0C38", "only the way out listens");
    web.survived("B04", "a pipe; in the sandbox nothing listens but its way out");
    web.finish();
}

/// B23, B24: what is asked of the browser is what the tools offer, and what it is given are files of the context.
#[test]
fn the_browser_is_no_way_to_more_than_its_tools() {
    let mut web = Web::start("b23", &[], "");
    let tools = web.client.request("tools/list", json!({}));
    let names: Vec<&str> =
        tools["result"]["tools"].as_array().unwrap().iter().filter_map(|tool| tool["name"].as_str()).collect();
    assert!(names.iter().all(|name| !name.contains("cdp") && !name.contains("devtools")), "{names:?}");
    web.visit("/files");
    let found = web.evaluate(
        "[typeof Browser, typeof Target, typeof sandpool, typeof globalThis.chrome?.debugger, typeof require]",
    );
    assert_eq!(found, json!(["undefined", "undefined", "undefined", "undefined", "undefined"]));
    for expression in [
        "Browser.close()",
        "Target.createTarget({url: 'file:///'})",
        "0}); process.exit(1); ({",
        "\u{0}",
        "(() => { while (true) {} })()",
    ] {
        let answer = web.call("browser_act", json!({ "action": "evaluate", "expression": expression, "timeout": 2 }));
        assert_eq!(answer["success"], false, "{expression:?}: {answer}");
    }
    web.usable();
    web.survived("B23", "no tool and no expression speaks the browser's protocol");

    web.visit("/files");
    web.run("import os; os.symlink('/etc/passwd', '/workspace/link'); os.symlink('/browser', '/workspace/home')");
    for file in ["/etc/passwd", "../../etc/passwd", "link", "home/profile", "/proc/self/environ", "no-such-file"] {
        let arguments = json!({ "context": CONTEXT, "action": "upload", "target": "#one", "files": [file] });
        let answer = web.client.request("tools/call", json!({ "name": "browser_act", "arguments": arguments }));
        assert!(answer["error"].is_object() || answer["result"]["isError"] == true, "{file}: {answer}");
    }
    web.usable();
    web.survived("B24", "only files below /workspace, and none through a link");
    web.finish();
}
