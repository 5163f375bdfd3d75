//! Files of the workspace as pages, through the built server and the real Chromium: what the page itself reads, and what no
//! other origin does.

use std::sync::Arc;

use serde_json::{Value, json};
use testkit::host::StateDir;
use testkit::http::{Era, Mcp};

use crate::browsing::Web;
use crate::serve::{Serve, eventually};
use crate::ways::Way;

const INDEX: &str = "<!doctype html><title>Report</title><link rel=stylesheet href=style.css><h1>Sales</h1>\
    <img id=picture src='img/dot.svg'><p id=said></p><script src=app.js></script>\
    <script>fetch('data.json').then(a => a.json()).then(d => said.textContent = 'total ' + d.total)</script>\
    <a id=next href=sub/next.html>Next</a><a id=missing href=none.html>Missing</a>";

fn files(way: &mut dyn Way) {
    for (path, content) in [
        ("site/index.html", INDEX),
        ("site/style.css", "h1 { color: rgb(1, 2, 3) }"),
        ("site/app.js", "window.loaded = 'app'"),
        ("site/data.json", "{\"total\": 42}"),
        ("site/img/dot.svg", "<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>"),
        ("site/sub/next.html", "<title>Next</title><p>second page</p>"),
        ("secret.txt", "the secret"),
    ] {
        way.good("write_file", json!({ "path": path, "content": content }));
    }
    way.good(
        "run_command",
        json!({ "command": "ln -s /etc/passwd site/passwd.html; ln -s ../secret.txt site/in.txt" }),
    );
}

fn evaluate(way: &mut dyn Way, expression: &str) -> Value {
    let said = way.good("browser_act", json!({ "action": "evaluate", "expression": expression, "timeout": 60 }));
    serde_json::from_str(said.facts["value"].as_str().unwrap()).unwrap()
}

#[test]
fn sp57_a_file_of_the_workspace_is_opened_as_a_page_with_its_resources() {
    let Some(_web) = Web::start() else { return };
    let server = Serve::start("browser-files", &[]);
    let mut client = Mcp::new(&server.account(), "sandpool", Era::Modern);
    let way = &mut client as &mut dyn Way;
    files(way);
    for url in ["/workspace/site/index.html", "file:///workspace/site/index.html", "site/index.html"] {
        let opened = way.good("browser_open", json!({ "url": url }));
        assert_eq!(opened.facts["title"], "Report", "{url}: {}", opened.text);
        assert_eq!(opened.facts["url"], "file:///workspace/site/index.html", "{url}");
        assert!(!opened.text.contains("internal"), "{}", opened.text);
    }
    way.good("browser_act", json!({ "action": "wait", "text": "total 42" }));
    let page = "[getComputedStyle(document.querySelector('h1')).color, loaded, picture.naturalWidth, isSecureContext]";
    assert_eq!(evaluate(way, page), json!(["rgb(1, 2, 3)", "app", 9, false]));
    let next = way.good("browser_act", json!({ "action": "click", "target": "link \"Next\"" }));
    assert_eq!(next.facts["url"], "file:///workspace/site/sub/next.html");
    assert_eq!(way.good("browser_act", json!({ "action": "back" })).facts["title"], "Report");
    assert_eq!(way.good("browser_act", json!({ "action": "reload" })).facts["title"], "Report");
    // What the page does not get: what lies above its directory, links that lead out, a list of the directory.
    for (path, status) in [("../secret.txt", 404), ("passwd.html", 404), ("img/", 404), ("none", 404), ("in.txt", 200)]
    {
        assert_eq!(evaluate(way, &format!("fetch('{path}').then(a => a.status)")), json!(status), "{path}");
    }
    let large =
        "open('site/large.bin', 'wb').write(bytes(17 << 20)); open('site/fits.bin', 'wb').write(bytes(3 << 20))";
    way.good("run_code", json!({ "code": large }));
    assert_eq!(evaluate(way, "fetch('large.bin').then(a => a.status)"), 413);
    assert_eq!(evaluate(way, "fetch('fits.bin').then(a => a.arrayBuffer()).then(a => a.byteLength)"), 3 << 20);
    assert_eq!(evaluate(way, "fetch('data.json', {method: 'POST'}).then(a => a.status, () => 'refused')"), "refused");
    // `file:` stays closed to the page.
    evaluate(way, "document.body.innerHTML = '<iframe src=file:///workspace/secret.txt></iframe>'; 0");
    evaluate(way, "location = 'file:///workspace/secret.txt'; 0");
    let shown = way.good("browser_snapshot", json!({})).text;
    assert!(!shown.contains("the secret"), "{shown}");
    // Files that are not there, or not below the workspace.
    for (url, why) in [
        ("/workspace/none.html", "none.html"),
        ("/workspace/site/passwd.html", "passwd"),
        ("file:///etc/passwd", "not opened"),
    ] {
        let refused = way.bad("browser_open", json!({ "url": url }));
        assert!(refused.facts["error"].as_str().unwrap().contains(why), "{url}: {}", refused.text);
    }
    assert!(server.finish().success());
}

/// B31: other origins, also those that the page itself embeds or leads to, read nothing of the workspace, although they know
/// the name of the private origin.
#[test]
fn b31_no_other_origin_reads_the_workspace() {
    let Some(web) = Web::start() else { return };
    let state = Arc::new(StateDir::new("browser-files-hostile"));
    let server = Serve::with_settings(state, &web.settings(), &[]);
    let mut client = Mcp::new(&server.account(), "sandpool", Era::Modern);
    let way = &mut client as &mut dyn Way;
    files(way);
    let evil = web.url("/list50");
    let frame = format!("<title>Frames</title><iframe id=frame src='{}'></iframe>", web.url("/puppet"));
    way.good("write_file", json!({ "path": "site/frames.html", "content": frame }));
    way.good("browser_open", json!({ "url": "site/index.html" }));
    let origin = evaluate(way, "location.origin");
    let origin = origin.as_str().unwrap();
    assert!(origin.starts_with("http://workspace-") && origin.len() > 48, "{origin}");

    // What a page tries that knows the name. Each answer that is not a refusal would be a leak.
    let attacks = format!(
        "(async () => {{
            const at = '{origin}', said = {{}};
            const late = ms => new Promise(done => setTimeout(done, ms, 'late'));
            const load = (tag, set) => new Promise(done => {{
                const element = document.createElement(tag);
                element.onload = () => done('loaded'); element.onerror = () => done('refused');
                set(element); document.body.append(element);
            }});
            const text = (url, options) => fetch(url, options).then(a => a.text()).then(t => t || 'opaque', () => 'refused');
            said.fetch = await text(at + '/data.json');
            said.noCors = await text(at + '/data.json', {{mode: 'no-cors'}});
            said.hidden = await text(at + '/data.json', {{referrerPolicy: 'no-referrer', mode: 'no-cors'}});
            said.redirected = await text('/redirect/to?url=' + encodeURIComponent(at + '/data.json'));
            said.redirectedNoCors = await text('/redirect/to?url=' + encodeURIComponent(at + '/data.json'), {{mode: 'no-cors'}});
            said.image = await load('img', e => e.src = at + '/img/dot.svg');
            said.script = await load('script', e => e.src = at + '/app.js');
            said.global = typeof window.loaded;
            said.style = await load('link', e => {{ e.rel = 'stylesheet'; e.href = at + '/style.css'; }});
            const frame = document.createElement('iframe');
            frame.src = at + '/index.html';
            await Promise.race([new Promise(done => {{ frame.onload = done; document.body.append(frame); }}), late(3000)]);
            try {{ said.frame = frame.contentWindow.document.body.innerText.includes('Sales') ? 'read' : 'refused'; }} catch {{ said.frame = 'refused'; }}
            try {{
                const popup = open(at + '/data.json'); await late(1000);
                said.popup = popup.document.body.innerText.includes('42') ? 'read' : 'refused';
            }} catch {{ said.popup = 'refused'; }}
            said.worker = 'serviceWorker' in navigator ? await navigator.serviceWorker.register(at + '/app.js').then(() => 'read', () => 'refused') : 'refused';
            return said;
        }})()"
    );
    // From a page that the workspace's page led to, in the same tab.
    evaluate(way, &format!("location = '{evil}'; 0"));
    way.good("browser_act", json!({ "action": "wait", "text": "Everything we have" }));
    let said = evaluate(way, &attacks);
    for (attack, answer) in said.as_object().unwrap() {
        assert!(["refused", "undefined"].contains(&answer.as_str().unwrap()), "{attack}: {said}");
    }
    // From a frame of the workspace's page, which shares its tab and its process.
    way.good("browser_open", json!({ "url": "site/frames.html" }));
    let origin = evaluate(way, "location.origin");
    let attack = format!("fetch('{}/data.json').then(a => a.text(), () => 'refused')", origin.as_str().unwrap());
    assert_eq!(evaluate(way, &attack), "{\"total\": 42}", "the page itself");
    let in_frame = format!(
        "new Promise(done => {{ onmessage = e => done(e.data); frame.contentWindow.postMessage({}, '*'); }})",
        json!(attack)
    );
    assert_eq!(evaluate(way, &in_frame), "refused");
    // Another address ends it for all tabs.
    way.good("browser_open", json!({ "url": evil }));
    let refused = way.result("browser_act", json!({ "action": "back" })).1;
    assert!(!refused.text.contains("Frames"), "{}", refused.text);
    assert!(server.finish().success());
}

/// B32, B33: a frame or a window of another origin leads the page to no other file, and leaving the page takes the files away.
#[test]
fn b32_no_other_origin_leads_the_page_to_another_file() {
    let Some(web) = Web::start() else { return };
    let state = Arc::new(StateDir::new("browser-files-led"));
    let server = Serve::with_settings(state, &web.settings(), &[]);
    let mut client = Mcp::new(&server.account(), "sandpool", Era::Modern);
    let way = &mut client as &mut dyn Way;
    let (puppet, other) = (web.url("/puppet"), web.url("/list50"));
    let report = format!(
        "<title>Report</title><a href=other.html>Own</a> <a href=downloads/saved.html>Saved</a> \
         <a target=_blank rel=opener href='{other}'>Window</a> <img id=dot src=downloads/dot.svg> \
         <iframe id=frame src='{puppet}'></iframe>"
    );
    for (path, content) in [
        ("report.html", report.as_str()),
        ("other.html", "<title>Other</title><button onclick='history.back()'>Return</button>"),
        ("downloads/saved.html", "<title>Saved</title>"),
        ("downloads/dot.svg", "<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>"),
    ] {
        way.good("write_file", json!({ "path": path, "content": content }));
    }
    way.good("browser_open", json!({ "url": "/workspace/report.html" }));
    assert_eq!(evaluate(way, "dot.naturalWidth"), 9);
    // The answers to these calls, and to those after them, until one tells of the refusal.
    let refused = |way: &mut dyn Way, calls: &[Value]| {
        let mut said = String::new();
        calls.iter().for_each(|call| said += &way.good("browser_act", call.clone()).facts.to_string());
        eventually("a refusal", || {
            said += &way.good("browser_snapshot", json!({})).facts.to_string();
            said.contains("may not open `file:///workspace/")
        });
        assert_eq!(evaluate(way, "document.title"), "Report", "{said}");
    };
    let hide = "document.head.innerHTML = '<meta name=referrer content=no-referrer>';";

    // A frame, after a click in it.
    let attack = format!(
        "{hide} document.body.innerHTML = '<button>Accept</button>';
         document.querySelector('button').onclick = () => top.location = location.ancestorOrigins[0] + '/other.html'; 'ready'"
    );
    let in_frame = format!(
        "new Promise(done => {{ onmessage = e => done(e.data); frame.contentWindow.postMessage({}, '*'); }})",
        json!(attack)
    );
    assert_eq!(evaluate(way, &in_frame), "ready");
    refused(way, &[json!({ "action": "click", "target": "button \"Accept\"" })]);
    // A redirect, which keeps the page's referrer.
    let redirect = format!(
        "new Promise(done => {{
            const frame = document.createElement('iframe');
            frame.referrerPolicy = 'unsafe-url';
            frame.src = '{}' + encodeURIComponent(location.origin + '/other.html');
            const look = left => {{
                const title = frame.contentDocument?.title;
                if (title || !left) done(title || 'refused'); else setTimeout(look, 100, left - 1);
            }};
            document.body.append(frame); look(30);
        }})",
        web.url("/redirect/to?url=")
    );
    assert_eq!(evaluate(way, &redirect), "refused");
    // What any page may have saved is no page of the report.
    refused(way, &[json!({ "action": "click", "target": "link \"Saved\"" })]);

    // The page's own ways work.
    assert_eq!(way.good("browser_act", json!({ "action": "reload" })).facts["title"], "Report");
    let own = way.good("browser_act", json!({ "action": "click", "target": "link \"Own\"" }));
    assert_eq!(own.facts["title"], "Other", "{}", own.text);
    way.good("browser_act", json!({ "action": "click", "target": "button \"Return\"" }));
    way.good("browser_act", json!({ "action": "wait", "text": "Window" }));
    assert_eq!(evaluate(way, "document.title"), "Report");

    // A window that the page opened.
    let origin = evaluate(way, "location.origin");
    let window = way.good("browser_act", json!({ "action": "click", "target": "link \"Window\"" }));
    assert_eq!(window.facts["url"], other.as_str(), "{}", window.text);
    // The window has its address before it has a document to attack with.
    way.good("browser_act", json!({ "action": "wait", "text": "Cart: 0" }));
    let attack = format!("{hide} opener.location = {origin} + '/other.html'; 0");
    refused(way, &[json!({ "action": "evaluate", "expression": attack }), json!({ "action": "tab", "tab": 1 })]);
    // The other address took the files away; only the client brings them back.
    assert_eq!(evaluate(way, "fetch('other.html').then(a => a.status)"), 404);
    way.good("browser_open", json!({ "url": "/workspace/downloads/saved.html" }));
    assert_eq!(evaluate(way, "document.title"), "Saved");
    assert!(server.finish().success());
}
