//! What calls of one tenant hold in the server's memory: no more than its budget, and nothing when they are over.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::net::{AddressFamily, SocketType, connect, socket, sockopt};
use serde_json::{Value, json};

use crate::support::{Service, Setup, eventually, report, token};

/// Budgets of these tests: of a tenant, and of all. The defaults are four and eight times as large, and so are the attacks.
const SETTINGS: &str = "[quota]\ncall_memory_mb = 64\n[serve]\ncall_memory_mb = 128\n";
const BUDGET_KB: u64 = 64 << 10;

/// Above the budget: pages of the program that it had not touched before, what is copied on its way from one form to the next,
/// and blocks of the allocator's.
const SLACK_KB: u64 = 160 << 10;

/// What may be left of it afterwards.
const LEFT_KB: u64 = 64 << 10;

/// A connection whose receiver takes next to nothing.
fn narrow(address: SocketAddr) -> TcpStream {
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    sockopt::set_socket_recv_buffer_size(&socket, 4096).unwrap();
    connect(&socket, &address).unwrap();
    TcpStream::from(socket)
}

fn post(dialect: &str, tenant: &str, length: usize) -> String {
    format!(
        "POST /mcp/{dialect} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n",
        token(tenant)
    )
}

fn call(tool: &str, arguments: Value) -> Vec<u8> {
    let params = json!({ "name": tool, "arguments": arguments });
    json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params }).to_string().into_bytes()
}

/// The most memory that the server has while `work` goes on.
fn peak(service: &Service, work: impl FnOnce()) -> u64 {
    let (over, most) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::SeqCst) {
                most.fetch_max(service.memory(), Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        work();
        over.store(true, Ordering::SeqCst);
    });
    most.load(Ordering::SeqCst)
}

/// W22: calls that wait for a busy context, each with as much as a request may have.
#[test]
fn w22_waiting_calls_hold_no_more_than_their_tenant_s_budget() {
    const CALLS: usize = 120;
    let service = Service::with("w22-arguments", Setup { settings: SETTINGS, ..Setup::default() });
    let mut canary = service.canary();
    let mut blue = service.client("blue", "sandpool");
    let context = blue.good("create_context", json!({}))["context"].clone();
    // Everything is there once before the figures count.
    blue.good("run_code", json!({ "code": "1", "context": context }));
    let before = service.memory();
    let sleep = "import time\ntime.sleep(250)";
    let busy = json!({ "code": sleep, "context": context, "timeout": 280, "background": true });
    let busy = blue.good("run_code", busy)["run"].clone();
    let large = "x".repeat(23 << 20);
    let bodies = [
        (
            "a field that the tool does not know",
            call("run_code", json!({ "code": "1", "context": context, "pad": large })),
        ),
        (
            "code that waits for its turn",
            call("run_code", json!({ "code": format!("#{}", &large[..7 << 20]), "context": context })),
        ),
        ("a field beside the arguments", {
            let params = json!({ "name": "run_code", "arguments": { "code": "1", "context": context }, "pad": large });
            json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params }).to_string().into_bytes()
        }),
    ];
    drop(large);
    for (what, body) in bodies {
        let (sent, statuses) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
        let waiting: Mutex<Vec<TcpStream>> = Mutex::default();
        let most = peak(&service, || {
            std::thread::scope(|scope| {
                for _ in 0..CALLS {
                    scope.spawn(|| {
                        let mut stream = TcpStream::connect(service.address).unwrap();
                        // A refusal may come before all of it is written.
                        let _ = stream
                            .write_all(post("sandpool", "blue", body.len()).as_bytes())
                            .and_then(|()| stream.write_all(&body));
                        sent.fetch_add(1, Ordering::SeqCst);
                        stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
                        let mut head = [0; 12];
                        match stream.read_exact(&mut head) {
                            Ok(()) => statuses.lock().unwrap().push(String::from_utf8_lossy(&head[9..]).into_owned()),
                            Err(_) => waiting.lock().unwrap().push(stream),
                        }
                    });
                }
                canary.sings(what);
            });
        });
        let statuses = statuses.into_inner().unwrap();
        let waiting = waiting.into_inner().unwrap();
        assert!(statuses.iter().all(|status| ["200", "429", "503"].contains(&status.as_str())), "{what}: {statuses:?}");
        let refused = statuses.iter().filter(|status| *status == "429").count();
        canary.sings(what);
        let bound = before + BUDGET_KB + SLACK_KB;
        assert!(most < bound, "{what}: {before} kB, at most {most} kB ({} calls wait)", waiting.len());
        let held = waiting.len();
        drop(waiting);
        eventually("its memory is given back", || service.memory() < before + LEFT_KB);
        report(
            "W22",
            &format!(
                "{CALLS} calls with {what}, {} MB each: {refused} refused by 429, {held} wait; {before} kB, at most {most} kB, {} kB afterwards",
                body.len() >> 20,
                service.memory()
            ),
        );
    }
    canary.sings("everything");
    blue.reconnect();
    blue.good("cancel_run", json!({ "run": busy }));
    service.finish();
}

/// W22: answers that nobody reads.
#[test]
fn w22_unread_answers_hold_no_more_than_their_tenant_s_budget() {
    const READERS: usize = 200;
    let service = Service::with("w22-answers", Setup { settings: SETTINGS, ..Setup::default() });
    let mut canary = service.canary();
    let mut blue = service.client("blue", "agentrun");
    let context = blue.good("create_context", json!({ "name": "large" }))["context_id"].clone();
    let write = "open('large.txt', 'w').write('x' * 2_500_000)";
    blue.good("run_code", json!({ "code": write, "context_id": context }));
    let read = json!({ "path": "large.txt", "context_id": context });
    let whole = blue.call("download_file", read.clone()).to_string().len();
    assert!(whole > 5_000_000, "{whole}");
    let before = service.memory();
    let body = call("download_file", read);
    let request = Arc::new([post("agentrun", "blue", body.len()).into_bytes(), body].concat());
    let mut readers = Vec::new();
    let most = peak(&service, || {
        for _ in 0..READERS {
            let mut stream = narrow(service.address);
            stream.write_all(&request).unwrap();
            readers.push(stream);
        }
        // Each has an answer, of which one byte is read.
        for reader in &mut readers {
            reader.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            reader.read_exact(&mut [0]).unwrap();
        }
        canary.sings("answers that nobody reads");
    });
    let bound = before + BUDGET_KB + SLACK_KB;
    assert!(most < bound, "{before} kB, at most {most} kB");
    drop(readers);
    eventually("its memory is given back", || service.memory() < before + LEFT_KB);
    // And the tenant can go on.
    eventually("there is room again", || {
        let answer = blue.call("download_file", json!({ "path": "large.txt", "context_id": context })).to_string();
        assert!(!answer.contains("File not found"), "the context was lost with its readers");
        answer.len() > 5_000_000
    });
    canary.sings("everything");
    report(
        "W22",
        &format!(
            "{READERS} readers of 5 MB that do not read: {before} kB, at most {most} kB, {} kB afterwards",
            service.memory()
        ),
    );
    service.finish();
}
