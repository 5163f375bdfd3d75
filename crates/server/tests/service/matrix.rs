//! Two tenants: whatever green tries with what belongs to blue gets the answer that an absent thing would get.
//!
//! Generated from the dialects' tables: a new tool is covered as soon as it is a row (X10, X12, X13, X20, X22 to X25, A20).

use std::collections::HashSet;
use std::time::Duration;

use dialects::{Field, FieldKind, Options, ToolRow};
use serde_json::{Map, Value, json};
use testkit::http::{Account, Answer, Era, Mcp, Wire, request};
use uuid::Uuid;

use crate::support::{Service, Setup, eventually, report, text, token};

const SECRET: &str = "what-only-blue-knows";

/// Room for the sessions that microsandbox makes for every id it does not know.
const SETTINGS: &str = "[dialect.microsandbox]\nmax_contexts = 200\n";

/// An argument that says which thing is meant.
fn is_id(field: &Field) -> bool {
    let name = field.name;
    matches!(name, "context" | "run" | "session" | "task") || name.ends_with("_id") || name.ends_with("Id")
}

/// A value that the tool takes.
fn value(field: &Field) -> Value {
    match (field.name, field.kind) {
        (_, FieldKind::Text) if !field.choices.is_empty() => field.choices[0].into(),
        ("path" | "filename", _) => "blue.txt".into(),
        // Text and base64 at once.
        ("content", _) => "eA==".into(),
        ("code", _) => "1".into(),
        ("command", _) => "true".into(),
        ("url", _) => "about:blank".into(),
        ("network", _) => false.into(),
        ("args", _) => json!([]),
        (_, FieldKind::Text) => "x".into(),
        (_, FieldKind::Flag) => true.into(),
        (_, FieldKind::Whole) => 1.into(),
        (_, FieldKind::TextList) => json!(["x"]),
        (_, FieldKind::TextMap) => json!({ "X": "x" }),
    }
}

/// Arguments for a tool: what it needs, or all it knows.
fn arguments(row: &ToolRow, all: bool) -> Map<String, Value> {
    let given = row.fields.iter().filter(|field| (field.required || all) && !is_id(field));
    given.map(|field| (field.name.to_owned(), value(field))).collect()
}

/// Every tool with every argument that names something, minimal and complete.
fn cases() -> impl Iterator<Item = (&'static str, &'static ToolRow, &'static str, Map<String, Value>)> {
    let dialects: Vec<_> = dialects::all(&Options::default()).collect();
    dialects.into_iter().flat_map(|dialect| {
        dialect.tools.iter().flat_map(move |row| {
            let ids = row.fields.iter().filter(|field| is_id(field)).map(|field| field.name);
            ids.flat_map(move |id| [false, true].map(|all| (dialect.id, row, id, arguments(row, all))))
        })
    })
}

/// An answer without what differs between any two calls: the id itself, times, random ids, keys.
fn masked(text: &str, id: &str) -> String {
    let text = text.replace(escaped(id).as_str(), "<id>").replace(id, "<id>");
    let mut masked = String::new();
    let mut run = String::new();
    for c in text.chars().chain(['\n']) {
        if c.is_ascii_hexdigit() || (c == '-' && !run.is_empty()) {
            run.push(c);
            continue;
        }
        match run.len() {
            32.. => masked += "<random>",
            _ => masked.extend(run.chars().map(|c| if c.is_ascii_digit() { '0' } else { c })),
        }
        run.clear();
        masked.push(c);
    }
    let mut squeezed = masked.replace("00", "0");
    while squeezed.contains("00") {
        squeezed = squeezed.replace("00", "0");
    }
    squeezed
}

/// As it stands in JSON.
fn escaped(id: &str) -> String {
    let quoted = Value::from(id).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

fn shape(answer: &Answer, id: &str) -> (u16, Vec<String>, String) {
    let names = answer.headers.iter().map(|(name, _)| name.to_ascii_lowercase()).collect();
    (answer.status, names, masked(&answer.text(), id))
}

/// A thing of the same form that nobody has; the same one each time.
fn absent(like: &str) -> String {
    let swap =
        |c: char| if c.is_ascii_hexdigit() { char::from_digit(15 - c.to_digit(16).unwrap(), 16).unwrap() } else { c };
    match like.len().checked_sub(36).filter(|at| Uuid::parse_str(&like[*at..]).is_ok()) {
        Some(at) => format!("{}{}", &like[..at], like[at..].chars().map(swap).collect::<String>()),
        None if like.len() == 64 => like.chars().map(swap).collect(),
        None => like.chars().rev().collect(),
    }
}

/// What blue has.
struct Blue {
    account: Account,
    /// By dialect and argument.
    ids: Vec<(&'static str, &'static str, String)>,
    links: Vec<String>,
    run: String,
}

impl Blue {
    fn new(service: &Service) -> Self {
        let account = service.account("blue");
        let client = |dialect| Mcp::new(&account, dialect, Era::Bare);
        let mut ids = Vec::new();
        let mut links = Vec::new();

        let mut own = client("sandpool");
        let context = named(&own.good("create_context", json!({ "name": "blue-name" })), "context");
        own.good("run_code", json!({ "code": format!("x = '{SECRET}'"), "context": context }));
        own.good("write_file", json!({ "path": "blue.txt", "content": SECRET, "context": context }));
        let busy = named(&own.good("create_context", json!({ "name": "blue-busy" })), "context");
        let loops = "import time\nwhile True: time.sleep(0.05)";
        let run = named(&own.good("run_code", json!({ "code": loops, "context": busy, "background": true })), "run");
        ids.extend([("sandpool", "context", context), ("sandpool", "context", "blue-name".into())]);
        ids.push(("sandpool", "run", run.clone()));
        links.extend(linked(&own.request("resources/list", json!({}))));

        let mut agentrun = client("agentrun");
        let context = named(&agentrun.good("create_context", json!({ "name": "blue-name" })), "context_id");
        agentrun.good("run_code", json!({ "code": format!("x = '{SECRET}'"), "context_id": context }));
        agentrun.good("upload_file", json!({ "path": "blue.txt", "content": SECRET, "context_id": context }));
        links.extend(linked(&agentrun.call("download_file", json!({ "path": "blue.txt", "context_id": context }))));
        ids.extend([("agentrun", "context_id", context), ("agentrun", "context_id", "blue-name".into())]);

        let mut sessions = client("microsandbox");
        let session = named(&sessions.good("execute_code", json!({ "code": format!("x = '{SECRET}'") })), "session_id");
        ids.push(("microsandbox", "session_id", session));

        let mut workbench = client("workbench");
        let sandbox = named(&workbench.good("sandbox_create", json!({})), "sandbox_id");
        workbench.good("file_write", json!({ "path": "blue.txt", "content": SECRET, "sandbox_id": sandbox }));
        let code = format!("x = '{SECRET}'");
        workbench.good("code_run", json!({ "language": "python", "code": code, "sandbox_id": sandbox }));
        ids.push(("workbench", "sandbox_id", sandbox));

        let mut conversation = client("conversation");
        let id = format!("blue-talk-{}", Uuid::new_v4());
        let code = format!("open('blue.txt', 'w').write('{SECRET}')");
        let call = json!({ "conversationId": id, "language": "python", "code": code });
        links.extend(linked(&conversation.call("sandbox.run_code", call)));
        ids.push(("conversation", "conversationId", id));

        for dialect in dialects::IDS {
            assert!(ids.iter().any(|(of, ..)| of == dialect), "blue has nothing in `{dialect}`");
        }
        assert!(links.len() >= 3, "{links:?}");
        Self { account, ids, links, run }
    }

    fn of(&self, dialect: &str, field: &str) -> Vec<&str> {
        let own: Vec<&str> =
            self.ids.iter().filter(|(d, f, _)| *d == dialect && *f == field).map(|(.., id)| id.as_str()).collect();
        assert!(!own.is_empty(), "blue has no `{field}` in `{dialect}`: the test does not know how to get one");
        own
    }

    /// What only blue's own answers may show, besides what `sent` has in it.
    fn secrets(&self, sent: &str) -> Vec<String> {
        let keys = self.links.iter().filter_map(|link| link.split('/').find(|part| part.len() == 64));
        let ids = self.ids.iter().map(|(.., id)| id.as_str());
        let all = ids.chain(keys).chain([SECRET]).filter(|secret| !sent.contains(secret));
        all.map(str::to_owned).collect()
    }

    /// Everything blue has is as it was, and was not touched meanwhile.
    fn is_whole(&self) -> Vec<Value> {
        let client = |dialect| Mcp::new(&self.account, dialect, Era::Bare);
        let lists = [("sandpool", "list_contexts"), ("agentrun", "list_contexts"), ("microsandbox", "get_sessions")];
        let lists: Vec<Value> =
            lists.into_iter().map(|(dialect, tool)| client(dialect).good(tool, json!({}))).collect();
        let mut own = client("sandpool");
        let context = self.of("sandpool", "context")[0];
        let read = own.good("read_file", json!({ "path": "blue.txt", "context": context }));
        assert_eq!(read["content"], SECRET, "{read}");
        let progress = own.good("wait_run", json!({ "run": self.run, "wait": 0 }));
        assert_eq!(progress["status"], "running", "{progress}");
        let read = client("workbench")
            .good("file_read", json!({ "path": "blue.txt", "sandbox_id": self.of("workbench", "sandbox_id")[0] }));
        assert_eq!(read["content"], SECRET, "{read}");
        for link in &self.links {
            let answer = self.account.ask("GET", path_of(link), &[], b"").unwrap();
            assert_eq!((answer.status, answer.text().as_str()), (200, SECRET), "{link}");
        }
        lists
    }

    /// Variables are kept. Moves the time of last use, so it comes last.
    fn remembers(&self) {
        let client = |dialect| Mcp::new(&self.account, dialect, Era::Bare);
        let id = |dialect, field| self.of(dialect, field)[0];
        let calls = [
            ("sandpool", "run_code", json!({ "code": "print(x)", "context": id("sandpool", "context") })),
            ("agentrun", "run_code", json!({ "code": "print(x)", "context_id": id("agentrun", "context_id") })),
            (
                "microsandbox",
                "execute_code",
                json!({ "code": "print(x)", "session_id": id("microsandbox", "session_id") }),
            ),
            (
                "workbench",
                "code_run",
                json!({ "language": "python", "code": "print(x)", "sandbox_id": id("workbench", "sandbox_id") }),
            ),
        ];
        for (dialect, tool, arguments) in calls {
            let answer = client(dialect).call(tool, arguments);
            assert!(answer.to_string().contains(SECRET), "{dialect}: {answer}");
        }
    }
}

fn named(structured: &Value, member: &str) -> String {
    structured[member].as_str().unwrap_or_else(|| panic!("no `{member}`: {structured}")).to_owned()
}

/// The links to blue's file in an answer.
fn linked(answer: &Value) -> Vec<String> {
    let text = answer.to_string();
    let links: HashSet<String> = text
        .split(['"', '\\', ' '])
        .filter(|part| part.starts_with("http://") && part.ends_with("/blue.txt"))
        .map(str::to_owned)
        .collect();
    links.into_iter().collect()
}

fn path_of(link: &str) -> &str {
    let rest = link.split_once("://").map_or(link, |(_, rest)| rest);
    &rest[rest.find('/').unwrap()..]
}

/// Calls a tool twice, with an id and with one that nobody has: the answers are the same, and show nothing of blue's.
fn same_as_absent(client: &mut Mcp, blue: &Blue, method: &str, params: impl Fn(&str) -> Value, id: &str, none: &str) {
    // Streams begin when an answer takes long, which says nothing here.
    client.accept = "application/json";
    let mut ask = |id: &str| {
        let number = client.next_id();
        client.send(&request(number, method, params(id))).unwrap_or_else(|error| panic!("{method} {id:.80}: {error}"))
    };
    let (theirs, nobodys) = (ask(id), ask(none));
    let what = format!("{method} {:.400}", params(id).to_string());
    let (got, wanted) = (shape(&theirs, id), shape(&nobodys, none));
    assert_eq!(got, wanted, "{what}");
    let shown = theirs.text();
    for secret in blue.secrets(id) {
        assert!(!shown.contains(&secret), "{what} shows {secret}: {shown}");
    }
}

/// X10, X22, X23, and X12, X13, A20, X25 with the real engine behind the transport.
#[test]
fn a_foreign_thing_cannot_be_told_from_an_absent_one() {
    let service = Service::with("matrix", Setup { settings: SETTINGS, ..Setup::default() });
    let mut canary = service.canary();
    let blue = Blue::new(&service);
    let before = blue.is_whole();
    let mut tried = 0;
    for era in [Era::Bare, Era::Modern] {
        for (dialect, row, field, arguments) in cases() {
            let mut green = Mcp::new(&service.account("green"), dialect, era);
            for id in blue.of(dialect, field) {
                let none = absent(id);
                let params = |id: &str| {
                    let mut arguments = arguments.clone();
                    arguments.insert(field.to_owned(), id.into());
                    json!({ "name": row.name, "arguments": arguments })
                };
                same_as_absent(&mut green, &blue, "tools/call", params, id, &none);
                tried += 1;
            }
        }
        others(&service, &blue, era);
    }
    lists_show_own_things_only(&service, &blue);
    assert_eq!(blue.is_whole(), before, "green's calls left a trace at blue's");
    the_owner_sees_a_difference(&blue);
    sessions_belong_to_their_tenant(&service, &blue);
    headers_say_nothing_about_who_calls(&service, &blue);
    blue.remembers();
    canary.sings("the matrix");
    report("X10", &format!("{tried} calls of every tool with a foreign id: the answer an absent one gets"));
    report("X23", "no tool stops, cancels or overwrites what is another tenant's");
    service.finish();
}

/// Or the comparison would prove nothing.
fn the_owner_sees_a_difference(blue: &Blue) {
    for (dialect, row, field, arguments) in cases().filter(|(_, row, ..)| row.hints.read_only) {
        let mut own = Mcp::new(&blue.account, dialect, Era::Bare);
        let id = blue.of(dialect, field)[0];
        let mut ask = |id: &str| {
            let mut arguments = arguments.clone();
            arguments.insert(field.to_owned(), id.into());
            masked(&own.call(row.name, arguments.into()).to_string(), id)
        };
        assert_ne!(ask(id), ask(&absent(id)), "{dialect} {}", row.name);
    }
}

/// Resources and tasks, by address and by id.
fn others(service: &Service, blue: &Blue, era: Era) {
    let tasks = Era::Modern == era;
    for dialect in dialects::IDS {
        let mut green = Mcp::new(&service.account("green"), dialect, era);
        green.tasks = tasks;
        for link in &blue.links {
            let key = link.split('/').find(|part| part.len() == 64).unwrap();
            let none = absent(key);
            for method in ["resources/read", "resources/subscribe", "resources/unsubscribe"] {
                let uri = |key: &str| json!({ "uri": format!("sandpool://files/{key}/blue.txt") });
                same_as_absent(&mut green, blue, method, uri, key, &none);
                let uri = |key: &str| json!({ "uri": format!("http://{}/files/{key}/blue.txt", service.address) });
                same_as_absent(&mut green, blue, method, uri, key, &none);
            }
        }
        for method in ["tasks/get", "tasks/cancel", "tasks/update", "tasks/result"] {
            let params = |id: &str| json!({ "taskId": id, "inputResponses": {} });
            same_as_absent(&mut green, blue, method, params, &blue.run, &absent(&blue.run));
        }
    }
    report("X10", "resources and tasks of another tenant: the answer an absent one gets");
}

/// X22.
fn lists_show_own_things_only(service: &Service, blue: &Blue) {
    for dialect in dialects::all(&Options::default()) {
        let mut green = service.client("green", dialect.id);
        let mut lists: Vec<(&str, Value)> = vec![
            ("resources/list", json!({})),
            ("resources/templates/list", json!({})),
            ("tasks/list", json!({})),
            ("prompts/list", json!({})),
        ];
        let plain = dialect.tools.iter().filter(|row| row.hints.read_only && !row.fields.iter().any(|f| f.required));
        lists.extend(plain.map(|row| ("tools/call", json!({ "name": row.name, "arguments": {} }))));
        for (method, params) in lists {
            let answer = green.request(method, params.clone()).to_string();
            // Green has things of its own under blue's ids by now, where a tool makes what it does not find.
            let own: Vec<&str> = blue.of_makers().collect();
            for secret in blue.secrets("").iter().filter(|secret| !own.contains(&secret.as_str())) {
                assert!(!answer.contains(secret.as_str()), "{method} {params} shows {secret}: {answer}");
            }
        }
        let status = service.account("green").ask("GET", &format!("/mcp/{}", dialect.id), &[], b"").unwrap();
        assert!(status.json()["contexts"].is_u64(), "{}", status.text());
    }
    report("X22", "lists of tools, resources and status show the caller's own");
}

impl Blue {
    /// Ids under which a tool makes what it does not find.
    fn of_makers(&self) -> impl Iterator<Item = &str> {
        let makers = ["microsandbox", "conversation"];
        self.ids.iter().filter(move |(dialect, ..)| makers.contains(dialect)).map(|(.., id)| id.as_str())
    }
}

/// X12 (CVE-2026-52869), X13, A20.
fn sessions_belong_to_their_tenant(service: &Service, blue: &Blue) {
    const VERSION: &str = "2025-11-25";
    let mut own = Mcp::new(&blue.account, "sandpool", Era::Legacy(VERSION));
    let session = own.session.clone().unwrap();
    let green = service.account("green");
    let ask = |method: &str, session: &str, more: &[(&str, &str)], body: &[u8]| {
        let headers = [
            &[("mcp-session-id", session), ("content-type", "application/json"), ("accept", testkit::http::BOTH)],
            more,
        ]
        .concat();
        green.ask(method, "/mcp/sandpool", &headers, body).unwrap()
    };
    let none = absent(&session);
    let list = request(1, "tools/list", json!({})).to_string();
    for (method, body) in [("POST", list.as_bytes()), ("GET", b"" as &[u8]), ("DELETE", b"")] {
        let (theirs, nobodys) = (ask(method, &session, &[], body), ask(method, &none, &[], body));
        assert_eq!(theirs.status, 404, "{method}: {}", theirs.text());
        assert_eq!(shape(&theirs, &session), shape(&nobodys, &none), "{method}");
    }

    // A call of blue's is under way; green tries to hear of it, to answer in its place and to cancel it.
    let id = own.next_id();
    let code = "import time\ntime.sleep(3)\nprint(x)";
    let context = blue.of("sandpool", "context")[0];
    let call = json!({ "name": "run_code", "arguments": { "code": code, "context": context } });
    let wire = own.begin(&request(id, "tools/call", call)).unwrap();
    assert_eq!(wire.head().unwrap().status, 200);
    let primed = String::from_utf8(wire.chunk().unwrap().unwrap()).unwrap();
    let event = primed.lines().find_map(|line| line.strip_prefix("id: ")).expect("an event to resume from").to_owned();
    let mut theirs = Mcp::new(&green, "sandpool", Era::Legacy(VERSION));
    let green_session = theirs.session.clone().unwrap();
    let foreign = ask("GET", &session, &[("last-event-id", &event)], b"");
    assert_eq!(shape(&foreign, &session), shape(&ask("GET", &none, &[("last-event-id", &event)], b""), &none));
    let heard = ask("GET", &green_session, &[("last-event-id", &event)], b"");
    let silence = ask("GET", &green_session, &[("last-event-id", &format!("{}/1", Uuid::new_v4()))], b"");
    assert_eq!((heard.status, heard.body.as_slice()), (silence.status, silence.body.as_slice()));
    assert!(heard.messages().is_empty(), "{}", heard.text());
    assert_eq!(theirs.notify("notifications/cancelled", json!({ "requestId": id })).status, 202);
    let cancelled = json!({ "jsonrpc": "2.0", "method": "notifications/cancelled", "params": { "requestId": id } });
    assert_eq!(ask("POST", &session, &[], cancelled.to_string().as_bytes()).status, 404);
    for unknown in [json!(999), json!("no such"), json!(null), json!(1e300), json!([1])] {
        theirs.notify("notifications/cancelled", json!({ "requestId": unknown }));
    }
    let mut heard = String::new();
    let wire = own.wire();
    while let Some(chunk) = wire.chunk().unwrap() {
        heard += &String::from_utf8(chunk).unwrap();
    }
    assert!(heard.contains(SECRET), "blue's own call was disturbed: {heard}");
    report("X12", "another tenant's Mcp-Session-Id: 404, as for one that never was; no side effect");
    report("X13", "another tenant's Last-Event-ID: nothing is delivered");
    report("A20", "cancelling unknown, finished and foreign requests changes nothing");
}

/// X25: only the token counts.
fn headers_say_nothing_about_who_calls(service: &Service, blue: &Blue) {
    let green = service.account("green");
    let blues = token("blue");
    let spoofs = [
        ("x-user", "blue"),
        ("x-tenant", "blue"),
        ("x-tenant-id", "blue"),
        ("x-forwarded-user", "blue"),
        ("x-forwarded-for", "127.0.0.1"),
        ("x-real-ip", "127.0.0.1"),
        ("forwarded", "for=blue;host=localhost"),
        ("x-api-key", &blues),
        ("proxy-authorization", "Bearer blue"),
        ("cookie", "tenant=blue; session=blue"),
        ("x-original-url", "/metrics"),
        ("x-http-method-override", "DELETE"),
        ("mcp-session-id-owner", "blue"),
    ];
    let context = blue.of("sandpool", "context")[0];
    let call = json!({ "name": "run_code", "arguments": { "code": "print(x)", "context": context } });
    let body = request(1, "tools/call", call).to_string();
    let ask = |headers: &[(&str, &str)]| {
        let headers = [&[("content-type", "application/json")], headers].concat();
        green.ask("POST", "/mcp/sandpool", &headers, body.as_bytes()).unwrap()
    };
    let plain = ask(&[]);
    assert!(plain.text().contains("not found") || plain.text().contains("no context"), "{}", plain.text());
    for spoof in spoofs {
        assert_eq!(shape(&ask(&[spoof]), context), shape(&plain, context), "{spoof:?}");
    }
    report("X25", &format!("{} headers that claim another tenant or address: ignored", spoofs.len()));
}

/// X24: exact bytes and nothing else.
#[test]
fn an_id_is_its_bytes_and_nothing_like_them() {
    let service = Service::with("confusable", Setup { settings: SETTINGS, ..Setup::default() });
    let mut canary = service.canary();
    let blue = Blue::new(&service);
    // The same name to the eye, once composed and once not.
    let mut own = service.client("blue", "sandpool");
    own.good("create_context", json!({ "name": "caf\u{e9}" }));
    assert_eq!(own.call("run_code", json!({ "code": "1", "context": "cafe\u{301}" }))["result"]["isError"], true);
    own.good("run_code", json!({ "code": "1", "context": "caf\u{e9}" }));
    let mutations: [fn(&str) -> String; 14] = [
        |id| id.to_uppercase(),
        |id| format!(" {id}"),
        |id| format!("{id} "),
        |id| format!("{id}\n"),
        |id| format!("{id}\0"),
        |id| format!("\u{feff}{id}"),
        |id| format!("{id}\u{200b}"),
        |id| format!("0{id}"),
        |id| id.replacen('-', "-0", 1),
        |id| id.replace('-', "\u{2010}"),
        |id| id.replacen('e', "\u{435}", 1).replacen('a', "\u{430}", 1),
        |id| format!("{id}{}", "x".repeat(100_000)),
        |id| id.replace('-', "%2d"),
        |id| format!("./{id}"),
    ];
    let mut tried = 0;
    for (dialect, row, field, arguments) in cases().step_by(2) {
        let id = blue.of(dialect, field)[0];
        let none = absent(id);
        let mut own = service.client("blue", dialect);
        own.accept = "application/json";
        for mutate in mutations {
            let params = |id: &str| {
                let mut arguments = arguments.clone();
                arguments.insert(field.to_owned(), id.into());
                json!({ "name": row.name, "arguments": arguments })
            };
            let (like, unlike) = (mutate(id), mutate(&none));
            if like == id {
                continue;
            }
            let mut ask = |id: &str| {
                let number = own.next_id();
                own.send(&request(number, "tools/call", params(id))).unwrap()
            };
            let (theirs, nobodys) = (ask(&like), ask(&unlike));
            let (got, wanted) = (shape(&theirs, &like), shape(&nobodys, &unlike));
            // Long ids are cut in messages, so there they are not masked.
            let same = got == wanted || got.0 == wanted.0 && theirs.body.len() == nobodys.body.len();
            assert!(same, "{dialect} {} {:.300}\n{:.500}\n{:.500}", row.name, like, got.2, wanted.2);
            tried += 1;
        }
    }
    blue.is_whole();
    blue.remembers();
    canary.sings("confusable ids");
    report("X24", &format!("{tried} calls with ids that look alike: none is taken for the other"));
    service.finish();
}

/// X20 and X09: a link is good for what it names while that exists, and for nothing else.
#[test]
fn a_link_ends_with_what_it_names_and_cannot_be_bent() {
    let settings = format!("{SETTINGS}[files]\nlink_ttl = 3600\n");
    let service = Service::with("links", Setup { settings: &settings, ..Setup::default() });
    let mut canary = service.canary();
    let blue = service.account("blue");
    let mut own = service.client("blue", "sandpool");
    let context = named(&own.good("create_context", json!({ "name": "one" })), "context");
    own.good("write_file", json!({ "path": "blue.txt", "content": SECRET, "context": context }));
    own.good("write_file", json!({ "path": "other.txt", "content": "other", "context": context }));
    let read = own.call("read_file", json!({ "path": "blue.txt", "context": context }));
    let link = read.to_string();
    let link = link
        .split('"')
        .find(|part| part.starts_with("http://") && part.contains("/files/"))
        .unwrap_or_else(|| panic!("{read}"));
    let link = path_of(link.trim_end_matches('\\')).to_owned();
    let get = |method: &str, path: &str| service.account("nobody").ask(method, path, &[], b"").unwrap();
    assert_eq!(get("GET", &link).text(), SECRET);
    let none = get("GET", &link.replace("/files/", "/files/0"));
    assert_eq!(none.status, 404);
    let (path, query) = link.split_once('?').expect("links end here");
    let (expires, signature) = query.split_once("&signature=").unwrap();
    let key = path.split('/').nth(2).unwrap();
    let until: u64 = expires.trim_start_matches("expires=").parse().unwrap();
    let flipped = |text: &str| {
        let last = text.chars().last().unwrap();
        format!("{}{}", &text[..text.len() - 1], if last == '0' { '1' } else { '0' })
    };
    let bent = [
        path.to_owned(),
        format!("{path}?expires={}&signature={signature}", until + 1),
        format!("{path}?expires=0{until}&signature={signature}"),
        format!("{path}?expires={until}"),
        format!("{path}?signature={signature}&expires={until}"),
        format!("{path}?expires={until}&signature={}", flipped(signature)),
        format!("{path}?expires={until}&signature={}", signature.to_uppercase()),
        format!("{path}?expires={until}&signature={signature}&more=1"),
        format!("{path}?expires={until}&signature="),
        link.replace("blue.txt", "other.txt"),
        link.replace("blue.txt", "Blue.txt"),
        link.replace("blue.txt", "./blue.txt"),
        link.replace("blue.txt", "blue.txt/"),
        link.replace(key, &flipped(key)),
        link.replace(key, &key.to_uppercase()),
        link.replace(key, &absent(key)),
        link.replace("/files/", "/files//"),
        link.replace("/files/", "/Files/"),
    ];
    for link in &bent {
        let answer = get("GET", link);
        assert_eq!((answer.status, answer.header("content-type")), (404, answer.header("content-type")), "{link}");
        assert!(!answer.text().contains(SECRET));
    }
    for method in ["PUT", "POST", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"] {
        let answer = get(method, &link);
        assert!([405, 501].contains(&answer.status) && !answer.text().contains(SECRET), "{method}: {answer:?}");
    }
    own.good("stop_context", json!({ "context": context }));
    assert_eq!((get("GET", &link).status, get("HEAD", &link).status), (404, 404));
    // The same name again is another context with another key.
    let again = named(&own.good("create_context", json!({ "name": "one" })), "context");
    own.good("write_file", json!({ "path": "blue.txt", "content": "new", "context": again }));
    assert_eq!(get("GET", &link).status, 404);
    keys_are_not_guessable(&mut own);
    canary.sings("links");
    drop(blue);
    report(
        "X20",
        &format!("{} mutations of a signed link, 7 methods, and the link after its context: refused", bent.len()),
    );
    service.finish();
}

/// X09: random ids of 39 bits, which only their tenant can use, and keys of 256 bits; no two alike.
fn keys_are_not_guessable(own: &mut Mcp) {
    let mut ids = HashSet::new();
    let rounds = 40;
    for round in 0..rounds {
        let context = named(&own.good("create_context", json!({ "name": format!("n{round}") })), "context");
        let random = context.strip_prefix("ctx-").unwrap().to_owned();
        assert!(random.len() == 8 && random.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit()), "{random}");
        assert!(ids.insert(random));
        own.good("stop_context", json!({ "context": context }));
    }
    for place in 0..8 {
        let symbols: HashSet<u8> = ids.iter().map(|id| id.as_bytes()[place]).collect();
        assert!(symbols.len() > 8, "place {place} has {} symbols in {rounds} ids", symbols.len());
    }
    report("X09", "ids are random and found by tenant alone, keys are HMAC-SHA-256; every place varies, none repeats");
}

/// X20: the end of a link.
#[test]
fn an_expired_link_says_so_and_nothing_more() {
    let service = Service::with("expiry", Setup { settings: "[files]\nlink_ttl = 1\n", ..Setup::default() });
    let mut own = service.client("blue", "conversation");
    let call = json!({ "conversationId": "c", "language": "python", "code": format!("open('blue.txt', 'w').write('{SECRET}')") });
    let answer = own.call("sandbox.run_code", call);
    let link = text(&answer).split('"').find(|part| part.contains("/files/")).unwrap().to_owned();
    let get = || service.account("nobody").ask("GET", path_of(&link), &[], b"").unwrap();
    eventually("the link ends", || get().status == 403);
    assert!(!get().text().contains(SECRET));
    let mut idle = Wire::open(service.address).unwrap();
    idle.set_patience(Duration::from_secs(5)).unwrap();
    idle.send("GET", path_of(&link), &[], b"").unwrap();
    assert_eq!(idle.answer().unwrap().status, 403);
    report("X20", "a link over its time: 403");
    service.finish();
}
