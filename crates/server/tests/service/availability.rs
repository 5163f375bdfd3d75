//! Clients that want the server to themselves by doing little, slowly or very often. A canary is right all the while.

use std::net::TcpStream;
use std::panic::AssertUnwindSafe;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;
use testkit::http::{BOTH, Era, Mcp, Wire, request};

use crate::support::{Canary, Service, Setup, eventually, is_full, report};

/// The canary sings until `work` is done. How often, and its slowest answer in milliseconds.
fn meanwhile(canary: &mut Canary, work: impl FnOnce() + Send) -> (usize, f64) {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let worked = std::panic::catch_unwind(AssertUnwindSafe(work));
            done.store(true, Ordering::SeqCst);
            // A failed assertion ends the test; without the line above the canary would sing for ever.
            worked.unwrap_or_else(|failure| std::panic::resume_unwind(failure));
        });
        let (mut songs, mut slowest) = (0, 0_f64);
        while !done.load(Ordering::SeqCst) || songs == 0 {
            slowest = slowest.max(canary.timed());
            songs += 1;
        }
        (songs, slowest)
    })
}

/// slowhttptest in all of its modes at once.
#[test]
#[allow(clippy::disallowed_methods, reason = "the test starts the program that attacks")]
fn slow_clients_keep_nobody_out() {
    if Command::new("slowhttptest").arg("-h").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err() {
        assert!(std::env::var_os("CI").is_none(), "slowhttptest is missing: run `scripts/test-needs`");
        eprintln!("SKIP: slowhttptest is not installed");
        return;
    }
    let settings = "[serve]\nheader_timeout = 3\nbody_timeout = 3\nidle_timeout = 5\nwrite_timeout = 3\n";
    let service = Service::with("slow", Setup { settings, open: true, ..Setup::default() });
    let mut canary = service.canary();
    let mut blue = service.client("nobody", "conversation");
    let code = "open('big.bin', 'wb').write(bytes(8 << 20))";
    let made = blue.good("sandbox.run_code", json!({ "conversationId": "s", "language": "python", "code": code }));
    let file = made["files"][0]["url"].as_str().unwrap().to_owned();
    let (memory, descriptors) = (service.memory(), service.descriptors());
    let base = format!("http://{}", service.address);
    let seconds = if is_full() { "60" } else { "10" };
    let modes: [(&str, Vec<&str>); 4] = [
        ("slow headers", vec!["-H", "-u", &base]),
        ("slow body", vec!["-B", "-f", "application/json", "-s", "8192", "-u"]),
        ("range", vec!["-R", "-a", "10", "-b", "3000", "-u", &file]),
        ("slow read", vec!["-X", "-k", "3", "-n", "1", "-w", "256", "-y", "512", "-z", "16", "-u", &file]),
    ];
    let endpoint = format!("{base}/mcp");
    let (songs, slowest) = meanwhile(&mut canary, || {
        let attackers: Vec<_> = modes
            .iter()
            .map(|(name, arguments)| {
                let mut command = Command::new("slowhttptest");
                command.args(arguments).args((*name == "slow body").then_some(endpoint.as_str()));
                command.args(["-c", "400", "-r", "200", "-i", "1", "-l", seconds, "-p", "3", "-v", "1"]);
                (name, command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap())
            })
            .collect();
        for (name, attacker) in attackers {
            let output = attacker.wait_with_output().unwrap();
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(said.contains("service available") && !said.contains("NO"), "{name}: {said}");
        }
    });
    canary.sings("slow clients");
    eventually("all connections are given back", || service.descriptors() <= descriptors + 4);
    let after = service.memory();
    assert!(after < memory + (200 << 10), "{memory} kB, then {after} kB");
    report(
        "A17 slow",
        &format!(
            "slow headers, slow bodies, ranges and slow readers, 400 connections each: {songs} canary calls right, slowest {slowest:.0} ms; {memory} kB, then {after} kB"
        ),
    );
    service.finish();
}

/// A17.
#[test]
fn thousands_of_idle_connections_leave_room() {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
    let room = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let wanted = 5000.min(room.saturating_sub(200)) as usize;
    let service = Service::start("idle");
    let mut canary = service.canary();
    let quiet: f64 = (0..20).map(|_| canary.timed()).fold(0.0, f64::max);
    let (memory, descriptors) = (service.memory(), service.descriptors());
    let mut idle = Vec::new();
    let (songs, slowest) = meanwhile(&mut canary, || {
        for _ in 0..wanted {
            idle.push(TcpStream::connect(service.address).expect("a connection"));
        }
    });
    let during = service.memory();
    for _ in 0..20 {
        canary.sings("idle connections");
    }
    // New clients are served, too.
    service.client("blue", "sandpool").good("list_contexts", json!({}));
    assert!(during < memory + (200 << 10), "{memory} kB, then {during} kB");
    drop(idle);
    eventually("all connections are given back", || service.descriptors() <= descriptors + 4);
    canary.sings("idle connections that went");
    report(
        "A17",
        &format!(
            "{wanted} idle connections: {songs} canary calls right, slowest {slowest:.0} ms (before: {quiet:.0} ms); {memory} kB, then {during} kB"
        ),
    );
    service.finish();
}

/// A34 (CVE-2026-59951) and A35.
#[test]
fn sessions_and_notifications_without_end_are_bounded() {
    let service = Service::start("spam");
    let mut canary = service.canary();
    let blue = service.account("blue");
    let hello = json!({ "protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": { "name": "x".repeat(2000), "version": "0" } });
    let hello = request(1, "initialize", hello).to_string();
    let mut bearer = String::new();
    let headers = blue.headers(&mut bearer, &[("content-type", "application/json"), ("accept", BOTH)]);
    let spam = |count: usize| {
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let mut wire = Wire::open(service.address).unwrap();
                    for _ in 0..count / 4 {
                        let answer = wire.ask("POST", "/mcp", &headers, hello.as_bytes()).unwrap();
                        assert_eq!(answer.status, 200, "{answer:?}");
                    }
                });
            }
        });
    };
    let (all, first) = if is_full() { (100_000, 5000) } else { (8000, 2000) };
    spam(first);
    let memory = service.memory();
    meanwhile(&mut canary, || spam(all - first));
    let after = service.memory();
    assert!(after < memory + (48 << 10), "{memory} kB after {first} sessions, {after} kB after {all}");
    report("A34", &format!("{all} sessions opened and never ended: {memory} kB, then {after} kB"));

    let notes = [
        json!({ "jsonrpc": "2.0", "method": "notifications/progress", "params": { "progressToken": 1, "progress": 1 } }),
        json!({ "jsonrpc": "2.0", "method": "notifications/cancelled", "params": { "requestId": 1 } }),
        json!({ "jsonrpc": "2.0", "method": "notifications/initialized" }),
        json!({ "jsonrpc": "2.0", "method": "notifications/roots/list_changed" }),
        json!({ "jsonrpc": "2.0", "method": "notifications/nonsense", "params": { "x": "y".repeat(1000) } }),
        request(1, "ping", json!({})),
    ];
    let count = if is_full() { 50_000 } else { 8000 };
    let mut client = Mcp::new(&blue, "sandpool", Era::Legacy("2025-11-25"));
    let memory = service.memory();
    meanwhile(&mut canary, || {
        for number in 0..count {
            let answer = client.send(&notes[number % notes.len()]).unwrap();
            assert!([200, 202].contains(&answer.status), "{answer:?}");
        }
    });
    let after = service.memory();
    assert!(after < memory + (32 << 10), "{memory} kB, then {after} kB");
    report("A35", &format!("{count} notifications and pings in a row: {memory} kB, then {after} kB"));
    service.finish();
}

/// One tenant's downloads that nobody reads; another's go on.
#[test]
fn slow_readers_of_one_tenant_leave_downloads_to_others() {
    let service = Service::start("readers");
    let mut canary = service.canary();
    let shared = |tenant: &str, contexts: usize| -> Vec<String> {
        let mut client = service.client(tenant, "agentrun");
        let made = (0..contexts).map(|number| {
            let context = client.good("create_context", json!({ "name": format!("c{number}") }))["context_id"].clone();
            let code = "open('big.bin', 'wb').truncate(64 << 20)\nopen('small.txt', 'w').write('small')";
            client.good("run_code", json!({ "code": code, "context_id": context }));
            let small = client.call("download_file", json!({ "path": "small.txt", "context_id": context })).to_string();
            let link = small
                .split(['"', '\\', ' '])
                .find(|part| part.ends_with("/small.txt") && part.starts_with("http"))
                .unwrap();
            link[link.find("/files/").unwrap()..].to_owned()
        });
        made.collect()
    };
    let (blue, canarys) = (shared("blue", 9), shared("canary", 1));
    let nobody = service.account("nobody");
    let mut held = Vec::new();
    let mut turned_away = 0;
    for link in &blue {
        for _ in 0..10 {
            let mut wire = Wire::open(service.address).unwrap();
            wire.send("GET", &link.replace("small.txt", "big.bin"), &[], b"").unwrap();
            match wire.head().unwrap().status {
                200 => held.push(wire),
                503 => turned_away += 1,
                other => panic!("{other}"),
            }
        }
    }
    assert!(held.len() >= 8 && turned_away > 0, "{} held, {turned_away} turned away", held.len());
    assert_eq!(nobody.ask("GET", &canarys[0], &[], b"").unwrap().text(), "small");
    canary.sings("downloads that nobody reads");
    let held_count = held.len();
    drop(held);
    eventually("blue may download again", || nobody.ask("GET", &blue[0], &[], b"").unwrap().text() == "small");
    report(
        "A17 downloads",
        &format!(
            "{held_count} downloads of one tenant that nobody reads, {turned_away} turned away: another tenant's goes on"
        ),
    );
    service.finish();
}

/// One tenant's calls that wait, as many as there may be connections; another tenant gets in.
#[test]
fn waiting_calls_of_one_tenant_leave_connections_to_others() {
    let settings = "[serve]\nmax_connections = 200\n";
    let service = Service::with("waiting", Setup { settings, ..Setup::default() });
    let mut canary = service.canary();
    let mut blue = service.client("blue", "sandpool");
    let loops = json!({ "code": "import time\nwhile True: time.sleep(0.05)", "background": true });
    let run = blue.good("run_code", loops)["run"].clone();
    let call = json!({ "name": "wait_run", "arguments": { "run": run, "wait": 50 } });
    let mut waiting = Vec::new();
    for _ in 0..250 {
        let mut client = Mcp::new(&service.account("blue"), "sandpool", Era::Bare);
        client.begin(&request(1, "tools/call", call.clone())).unwrap();
        waiting.push(client);
    }
    canary.sings("calls that wait");
    let answer = service.account("canary").ask("GET", "/mcp", &[], b"").unwrap();
    assert_eq!(answer.status, 200, "a new connection of another tenant: {}", answer.text());
    // The others have a stream by now, or will.
    let heads = waiting.iter_mut().map(Mcp::wire).filter_map(|wire| (!wire.is_quiet()).then(|| wire.head()));
    let turned_away = heads.filter(|head| head.as_ref().is_ok_and(|head| head.status == 503)).count();
    assert!((100..250).contains(&turned_away), "{turned_away}");
    drop(waiting);
    eventually("blue gets in again", || {
        service.account("blue").ask("GET", "/mcp", &[], b"").is_ok_and(|a| a.status == 200)
    });
    blue = service.client("blue", "sandpool");
    blue.good("cancel_run", json!({ "run": run }));
    canary.sings("calls that ended");
    report(
        "A17 calls",
        &format!(
            "250 calls of one tenant that wait, 200 connections: {} turned away, another tenant gets in",
            turned_away
        ),
    );
    service.finish();
}
