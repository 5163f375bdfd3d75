//! Many clients at once, and the end of a server that has much to do.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use testkit::host::traces;
use testkit::http::{ERAS, Era, Mcp, request};

use crate::support::{Service, Setup, eventually, report};

const CLIENTS: usize = 40;
const CALLS: usize = 20_000;
/// Contexts of each of the two tenants; the clients share them.
const CONTEXTS: usize = 3;

struct Client {
    number: usize,
    mcp: Mcp,
    /// The same things are called differently in the two tool sets.
    dialect: &'static str,
    context: String,
    made: usize,
}

impl Client {
    fn in_context(&self, mut arguments: Value) -> Value {
        let name = if self.dialect == "sandpool" { "context" } else { "context_id" };
        arguments[name] = self.context.as_str().into();
        arguments
    }

    /// Does something cheap and insists on its own answer.
    fn step(&mut self) {
        self.made += 1;
        let marker = format!("client-{}-call-{}", self.number, self.made);
        let path = format!("of-{}.txt", self.number);
        let (write, read) = match self.dialect {
            "sandpool" => ("write_file", "read_file"),
            _ => ("upload_file", "download_file"),
        };
        match self.made % 10 {
            0 | 1 => {
                let code = self.in_context(json!({ "code": format!("print('{marker}')") }));
                let ran = self.mcp.good("run_code", code);
                assert_eq!(ran["stdout"], format!("{marker}\n"), "{ran}");
            }
            2 => drop(self.mcp.good(write, self.in_context(json!({ "path": path, "content": marker })))),
            3 => {
                let before = format!("client-{}-call-{}", self.number, self.made - 1);
                let file = self.mcp.good(read, self.in_context(json!({ "path": path })));
                assert_eq!(file["content"], before, "{file}");
            }
            4 | 5 => {
                // What is asked for comes back in the error.
                let answer = self.mcp.call(&marker, json!({}));
                assert!(answer["error"]["message"].as_str().unwrap().contains(&marker), "{answer}");
            }
            6 => {
                let listed = self.mcp.good("list_contexts", json!({}));
                assert!(listed.to_string().contains(&self.context), "{listed}");
            }
            _ => {
                let listed = self.mcp.request("tools/list", json!({}));
                assert!(listed["result"]["tools"].is_array(), "{listed}");
            }
        }
    }
}

/// X14 (CVE-2026-25536): every client counts its requests from 0.
#[test]
fn forty_clients_at_once_get_their_own_answers() {
    let settings = "[dialect.agentrun]\npool_size = 8\n";
    let service = Service::with("load", Setup { settings, ..Setup::default() });
    let mut canary = service.canary();
    let mut contexts = Vec::new();
    for (tenant, dialect) in [("blue", "sandpool"), ("green", "sandpool"), ("blue", "agentrun"), ("green", "agentrun")]
    {
        let mut own = service.client(tenant, dialect);
        for number in 0..CONTEXTS {
            let made = own.good("create_context", json!({ "name": format!("{tenant}-{number}") }));
            let id = made.get("context").or(made.get("context_id")).and_then(Value::as_str).unwrap().to_owned();
            contexts.push((tenant, dialect, id));
        }
    }
    let mut clients: Vec<Client> = (0..CLIENTS)
        .map(|number| {
            let (tenant, dialect, context) = contexts[number % contexts.len()].clone();
            let mcp = Mcp::new(&service.account(tenant), dialect, ERAS[number / 3 % ERAS.len()]);
            Client { number, mcp, dialect, context, made: 0 }
        })
        .collect();

    let calls = |clients: &mut Vec<Client>, each: usize| {
        std::thread::scope(|scope| {
            for client in clients.iter_mut() {
                scope.spawn(move || (0..each).for_each(|_| client.step()));
            }
        });
    };
    calls(&mut clients, CALLS / CLIENTS / 4);
    let (memory, descriptors) = (service.memory(), service.descriptors());
    calls(&mut clients, CALLS / CLIENTS * 3 / 4);
    let after = service.memory();
    let made: usize = clients.iter().map(|client| client.made).sum();
    assert_eq!(made, CALLS);
    assert!(clients.iter_mut().all(|client| client.mcp.wire().is_quiet()), "an answer too many");
    assert!(after < memory + (memory / 2).max(32 << 10), "{memory} kB after a quarter, {after} kB at the end");
    assert!(service.descriptors() <= descriptors + 8, "{descriptors} descriptors, then {}", service.descriptors());
    canary.sings("the load");
    let figures =
        format!("{made} calls of {CLIENTS} clients: none lost, crossed or doubled; {memory} kB, then {after} kB");
    report("X14", &figures);
    drop(clients);
    service.finish();
}

/// How a call ended for its client.
#[derive(Debug, PartialEq, Eq)]
enum End {
    Answered,
    /// Without a byte of an answer.
    Closed,
}

/// One call; half an answer is a failure.
fn call(client: &mut Mcp, code: &str) -> End {
    let id = client.next_id();
    let call = json!({ "name": "run_code", "arguments": { "code": code } });
    let Ok(wire) = client.begin(&request(id, "tools/call", call)) else { return End::Closed };
    let mut answer = match wire.head() {
        Ok(head) => head,
        Err(error) => {
            let gone = [io::ErrorKind::UnexpectedEof, io::ErrorKind::ConnectionReset, io::ErrorKind::BrokenPipe];
            assert!(gone.contains(&error.kind()), "{error}");
            return End::Closed;
        }
    };
    wire.body(&mut answer).unwrap_or_else(|error| panic!("half an answer: {error}: {answer:?}"));
    assert!(answer.status == 503 || !answer.messages().is_empty(), "{answer:?}");
    End::Answered
}

/// F04: whoever was heard gets an answer, or sees that there will be none.
#[test]
fn sigterm_under_load_answers_or_ends_every_call() {
    let settings = "[dialect.sandpool]\nshutdown_grace = 3\n";
    let mut service = Service::with("term", Setup { settings, ..Setup::default() });
    service.client("blue", "sandpool").good("run_code", json!({ "code": "1" }));
    let answered = Arc::new(AtomicUsize::new(0));
    let over = Arc::new(AtomicBool::new(false));
    let mut threads = Vec::new();
    for number in 0..20 {
        let (account, answered, over) = (service.account("blue"), answered.clone(), over.clone());
        threads.push(std::thread::spawn(move || {
            let mut client = Mcp::new(&account, "sandpool", ERAS[number % ERAS.len()]);
            let mut ends = Vec::new();
            while ends.last() != Some(&End::Closed) && !(over.load(Ordering::SeqCst) && ends.len() > 10_000) {
                ends.push(call(&mut client, "print('short')"));
                answered.fetch_add(1, Ordering::SeqCst);
            }
            ends.len()
        }));
    }
    // Longer than the grace: these are cancelled, and say so or close.
    let long = Arc::new(Mutex::new(Vec::new()));
    for era in ERAS {
        let (account, long) = (service.account("green"), long.clone());
        threads.push(std::thread::spawn(move || {
            let mut client = Mcp::new(&account, "sandpool", era);
            let context = client.good("create_context", json!({}))["context"].as_str().unwrap().to_owned();
            let id = client.next_id();
            let arguments = json!({ "code": "import time\ntime.sleep(250)", "context": context, "timeout": 280 });
            let message = request(id, "tools/call", json!({ "name": "run_code", "arguments": arguments }));
            let wire = client.begin(&message).unwrap();
            long.lock().unwrap().push(era);
            let Ok(mut answer) = wire.head() else { return 1 };
            wire.body(&mut answer).unwrap_or_else(|error| panic!("half an answer in {era:?}: {error}"));
            1
        }));
    }
    eventually("all clients are busy", || answered.load(Ordering::SeqCst) > 100 && long.lock().unwrap().len() == 4);
    service.signal(Signal::TERM);
    over.store(true, Ordering::SeqCst);
    assert!(service.wait().success(), "{}", service.log());
    let calls: usize = threads.into_iter().map(|thread| thread.join().expect("every call ended cleanly")).sum();
    service.nothing_left();
    report(
        "F04",
        &format!("SIGTERM with {calls} calls of 24 clients made: each was answered or saw a closed connection; exit 0"),
    );
}

/// F05: the second signal does not wait. The grace is longer than the test's patience.
#[test]
fn a_second_signal_means_now() {
    let settings = "[dialect.sandpool]\nshutdown_grace = 600\n";
    let mut service = Service::with("twice", Setup { settings, ..Setup::default() });
    let account = service.account("blue");
    let mut client = Mcp::new(&account, "sandpool", Era::Modern);
    client.good("run_code", json!({ "code": "1" }));
    let id = client.next_id();
    let arguments = json!({ "code": "import time\ntime.sleep(250)", "timeout": 280 });
    client.begin(&request(id, "tools/call", json!({ "name": "run_code", "arguments": arguments }))).unwrap();
    assert_eq!(client.wire().head().unwrap().status, 200, "the call has begun, and is answered by a stream");
    service.signal(Signal::TERM);
    eventually("nobody is let in", || account.ask("GET", "/healthz", &[], b"").is_err());
    service.signal(Signal::TERM);
    assert!(service.wait().success(), "{}", service.log());
    client.wire().rest();
    service.nothing_left();
    report("F05", "a second SIGTERM during a call: the server ends at once, exit 0");
}

/// F02: with its launcher, so that nobody is left to clean up but the next server.
#[test]
fn what_a_killed_server_leaves_is_cleaned_up_by_the_next() {
    let mut service = Service::start("killed-service");
    for dialect in ["sandpool", "agentrun"] {
        let mut own = service.client("blue", dialect);
        own.good("create_context", json!({ "name": "a" }));
    }
    let code = "import subprocess\nsubprocess.Popen(['sleep', '1000'])";
    service.client("blue", "sandpool").good("run_code", json!({ "code": code }));
    let talk = |service: &Service, code: &str| {
        let arguments = json!({ "conversationId": "talk", "language": "python", "code": code });
        service.client("blue", "conversation").good("sandbox.run_code", arguments)
    };
    let link = talk(&service, "open('kept.txt', 'w').write('kept')")["files"][0]["url"].as_str().unwrap().to_owned();
    let (marks, state) = (service.state().instances(), service.state());
    assert!(!traces(&marks).is_empty());
    for launcher in &service.launcher {
        kill_process(Pid::from_raw(*launcher as i32).unwrap(), Signal::KILL).unwrap();
    }
    service.signal(Signal::KILL);
    assert!(!service.wait().success());
    let next = Service::with("killed-service", Setup { state: Some(state), ..Setup::default() });
    eventually("what the first one left is gone", || traces(&marks).is_empty());
    assert!(marks.iter().all(|mark| !next.state().instances().contains(mark)));
    // What is kept is kept: the conversation's files, and the key of their links.
    assert_eq!(talk(&next, "print(open('kept.txt').read())")["output"], "kept\n");
    let path = &link[link.find("/files/").unwrap()..];
    assert_eq!(next.account("nobody").ask("GET", path, &[], b"").unwrap().text(), "kept");
    let lost = next.client("blue", "agentrun").call("run_code", json!({ "code": "1", "context_id": "a" }));
    assert!(lost.to_string().contains("CONTEXT_NOT_FOUND"), "{lost}");
    report(
        "F02",
        "server and launcher killed with SIGKILL: the next server removes every trace and keeps the conversations",
    );
    next.finish();
}

/// F14, F15: large requests and answers of many clients at once cost what the limits say, and no more.
#[test]
fn large_bodies_and_outputs_at_once_are_bounded() {
    let service = Service::start("large");
    let mut canary = service.canary();
    let contexts: Vec<String> = (0..4)
        .map(|number| {
            let made =
                service.client("blue", "sandpool").good("create_context", json!({ "name": format!("large-{number}") }));
            made["context"].as_str().unwrap().to_owned()
        })
        .collect();
    let before = service.memory();
    let content = "x".repeat(8 << 20);
    let most = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for number in 0..24 {
            let (service, context, content, most) = (&service, &contexts[number % 4], &content, &most);
            scope.spawn(move || {
                let mut client = Mcp::new(&service.account("blue"), "sandpool", ERAS[number % ERAS.len()]);
                for round in 0..2 {
                    // Answered, or told to come again: never a wrong answer, never none.
                    let path = format!("f{}", number % 4);
                    let write = json!({ "path": path, "content": content, "context": context });
                    let id = client.next_id();
                    let message = request(id, "tools/call", json!({ "name": "write_file", "arguments": write }));
                    let answer =
                        client.send(&message).unwrap_or_else(|error| panic!("client {number}, {round}: {error}"));
                    assert!([200, 429, 503].contains(&answer.status), "{answer:?}");
                    let code = "import os\nfor _ in range(200): os.write(1, b'y' * 100_000)";
                    client.call("run_code", json!({ "code": code, "context": context }));
                    most.fetch_max(service.memory() as usize, Ordering::SeqCst);
                }
            });
        }
        canary.sings("large requests");
    });
    let most = most.load(Ordering::SeqCst) as u64;
    // Each body is in memory as bytes and as text, and some answers are on their way.
    assert!(most < before + (900 << 10), "{before} kB, at most {most} kB");
    canary.sings("large requests and answers");
    report(
        "F15",
        &format!(
            "24 clients write 8 MB and print 20 MB at once: {before} kB, at most {most} kB, {} kB afterwards",
            service.memory()
        ),
    );
    service.finish();
}

/// F14: one tenant makes and stops contexts as fast as it can; another makes one, too.
#[test]
fn making_contexts_without_end_keeps_nobody_from_making_one() {
    let service = Service::start("making");
    let mut canary = service.canary();
    let over = AtomicBool::new(false);
    let made = AtomicUsize::new(0);
    let slowest = std::thread::scope(|scope| {
        for number in 0..12 {
            let (service, over, made) = (&service, &over, &made);
            scope.spawn(move || {
                let mut client = service.client("blue", "sandpool");
                while !over.load(Ordering::SeqCst) {
                    let context =
                        client.good("create_context", json!({ "name": format!("m{number}") }))["context"].clone();
                    client.good("run_code", json!({ "code": "1", "context": context }));
                    client.good("stop_context", json!({ "context": context }));
                    made.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        eventually("it has begun", || made.load(Ordering::SeqCst) > 5);
        let mut green = service.client("green", "sandpool");
        let mut slowest = std::time::Duration::ZERO;
        for round in 0..5 {
            let start = std::time::Instant::now();
            let context = green.good("create_context", json!({ "name": format!("g{round}") }))["context"].clone();
            let ran = green.good("run_code", json!({ "code": "print('here')", "context": context }));
            assert_eq!(ran["stdout"], "here\n");
            slowest = slowest.max(start.elapsed());
            canary.sings("contexts in a row");
        }
        over.store(true, Ordering::SeqCst);
        slowest
    });
    let made = made.load(Ordering::SeqCst);
    report(
        "F14",
        &format!("one tenant makes and stops {made} contexts: another's takes {} ms at most", slowest.as_millis()),
    );
    service.finish();
}
