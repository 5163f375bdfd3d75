//! `sandpool admin` against a running server.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};
use testkit::host::StateDir;
use testkit::http::{Account, Era, Mcp};

use crate::reload::journal;
use crate::support::{Service, Setup, eventually};

/// `sandpool admin` for the server with this state directory.
#[allow(clippy::disallowed_methods, reason = "the test starts the program it tests")]
fn program(state: &StateDir, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sandpool"));
    // The program would warn about the variables of the test run.
    command.env_remove("SANDPOOL_TEST_PYTHON").env_remove("SANDPOOL_TEST_NODE");
    command.arg("admin").args(arguments).arg("--state-dir").arg(state.0.join("state"));
    command
}

fn command(service: &Service, arguments: &[&str]) -> Command {
    program(&service.state(), arguments)
}

fn admin(service: &Service, arguments: &[&str]) -> Output {
    command(service, arguments).output().unwrap()
}

pub fn done(service: &Service, arguments: &[&str]) -> String {
    let output = admin(service, arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn refused(service: &Service, arguments: &[&str]) -> String {
    let output = admin(service, arguments);
    assert!(!output.status.success(), "{arguments:?}");
    String::from_utf8(output.stderr).unwrap()
}

pub fn json_of(service: &Service, arguments: &[&str]) -> Value {
    serde_json::from_str(&done(service, arguments)).unwrap()
}

#[test]
fn contexts_of_all_tenants_are_listed_described_and_stopped() {
    let service = Service::start("admin");
    let mut canary = service.canary();
    let mut blue = service.client("blue", "sandpool");
    let code = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass";
    let made = blue.good("create_context", json!({ "name": "work" }));
    let id = made["context"].as_str().unwrap();
    blue.good("run_code", json!({ "context": id, "code": code }));
    let all = json_of(&service, &["ps", "--json"]);
    assert_eq!(all.as_array().unwrap().len(), 2, "{all}");
    let own = json_of(&service, &["ps", "--tenant", "blue", "--json"]);
    let context = &own[0];
    for (name, value) in [("tenant", "blue"), ("dialect", "sandpool"), ("name", "work"), ("state", "idle")] {
        assert_eq!(context[name], value, "{own}");
    }
    assert!(context["cpu_seconds"].as_f64().unwrap() >= 0.3, "{own}");
    assert!(context["memory_bytes"].as_u64().unwrap() > 1 << 20, "{own}");
    assert!(context["expires_in_seconds"].as_u64().unwrap() > 0, "{own}");
    assert_eq!(context.get("key"), None, "it is the permission to read files");
    let table = done(&service, &["ps"]);
    assert!(table.starts_with("ID ") && table.contains(id) && table.contains("canary"), "{table}");
    let described = done(&service, &["inspect", context["id"].as_str().unwrap()]);
    assert!(described.contains("limits") && described.contains("blue"), "{described}");
    assert!(refused(&service, &["inspect", "ctx-none"]).contains("there is no context `ctx-none`"));

    done(&service, &["stop", context["id"].as_str().unwrap()]);
    assert_eq!(json_of(&service, &["ps", "--tenant", "blue", "--json"]), json!([]));
    assert!(refused(&service, &["stop", context["id"].as_str().unwrap()]).contains("there is no context"));
    // An id is unique in a dialect only.
    for dialect in ["workbench", "microsandbox"] {
        let mut blue = service.client("blue", dialect);
        match dialect {
            "workbench" => blue.good("sandbox_create", json!({ "sandbox_id": "same" })),
            _ => blue.good("execute_code", json!({ "code": "1", "session_id": "same" })),
        };
    }
    assert!(refused(&service, &["stop", "same"]).contains("--tenant blue --of-dialect workbench"));
    done(&service, &["stop", "same", "--of-dialect", "workbench"]);
    done(&service, &["stop", "same"]);
    canary.sings("a stop");
    let state = service.state();
    eventually("the journal", || {
        journal(&state.0).iter().any(|line| line["why"] == "the operator stopped its context")
    });
    assert!(journal(&state.0).iter().any(|line| line["event"] == "admin" && line["did"] == "stop"));
    service.finish();
}

#[test]
fn tenants_are_added_rotated_and_removed_in_their_file() {
    let service = Service::start("tenants");
    let path = service.state().0.join("tenants");
    let before = format!("# Comments stay.\n{}", std::fs::read_to_string(&path).unwrap());
    std::fs::write(&path, &before).unwrap();
    let status = |token: &str| {
        let account = Account { token: Some(token.trim().into()), ..service.account("blue") };
        account.ask("GET", "/mcp", &[("accept", "application/json")], b"").unwrap().status
    };
    let first = done(&service, &["tenant", "add", "red"]);
    assert_eq!((first.trim().len(), status(&first)), (64, 200), "it works at once");
    assert!(std::fs::read_to_string(&path).unwrap().starts_with(&before));
    assert!(!std::fs::read_to_string(&path).unwrap().contains(first.trim()), "only its hash is stored");
    assert!(refused(&service, &["tenant", "add", "red"]).contains("there is a tenant `red` already"));
    assert!(refused(&service, &["tenant", "add", "Red"]).contains("1 to 64"));
    let second = done(&service, &["tenant", "rotate", "red", "--keep-old"]);
    assert_eq!([status(&first), status(&second)], [200, 200]);
    done(&service, &["tenant", "rotate", "red", "--drop-old"]);
    assert_eq!([status(&first), status(&second)], [401, 200]);
    let third = done(&service, &["tenant", "rotate", "red"]);
    assert_eq!([status(&second), status(&third)], [401, 200]);

    let account = Account { token: Some(third.trim().into()), ..service.account("blue") };
    Mcp::new(&account, "sandpool", Era::Bare).good("run_code", json!({ "code": "1" }));
    let listed = json_of(&service, &["tenant", "list", "--json"]);
    let red = listed.as_array().unwrap().iter().find(|tenant| tenant["name"] == "red").unwrap();
    assert_eq!((&red["tokens"], &red["contexts"]), (&json!(1), &json!(1)), "{listed}");
    done(&service, &["tenant", "remove", "red"]);
    assert_eq!(status(&third), 401);
    assert_eq!(json_of(&service, &["ps", "--tenant", "red", "--json"]), json!([]));
    assert_eq!(std::fs::read_to_string(&path).unwrap().trim_end(), before.trim_end());
    assert!(done(&service, &["reload"]).contains("nothing has changed"));
    service.finish();
}

#[test]
fn a_drained_server_begins_nothing_and_ends_when_it_is_told_to() {
    let mut service = Service::start("drain");
    let mut blue = service.client("blue", "sandpool");
    blue.good("run_code", json!({ "code": "x = 1" }));
    let started = blue.good("run_code", json!({ "code": "import time; time.sleep(600)", "background": true }));
    let run = started["run"].clone();
    let draining = command(&service, &["drain"]).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    eventually("the drain begins", || service.log().contains("draining"));
    let ready = service.account("blue");
    assert_eq!(ready.ask("GET", "/readyz", &[], b"").unwrap().status, 503);
    let no = blue.call("run_code", json!({ "code": "print(x)" }));
    assert!(no.to_string().contains("accepts no new work"), "{no}");
    assert!(!service.log().contains("drained"), "it waits for the background run");
    blue.good("cancel_run", json!({ "run": run }));
    let output = draining.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("waiting for 0 calls and 1 background runs"),
        "{output:?}"
    );
    let fetched = blue.call("wait_run", json!({ "run": run }));
    assert!(fetched.to_string().contains("Execution was cancelled"), "results can be fetched: {fetched}");
    done(&service, &["drain", "--undo"]);
    assert_eq!(blue.good("run_code", json!({ "code": "print(x)" }))["stdout"], "1\n");
    done(&service, &["drain", "--exit"]);
    assert!(service.wait().success(), "{}", service.log());
    assert!(refused(&service, &["ps"]).contains("no server runs with the state directory"));
    service.nothing_left();
}

/// What was used is in the journal, also of contexts that have ended and of a server before this one.
#[test]
fn the_use_of_each_tenant_is_metered_and_outlives_the_server() {
    let service = Service::start("usage");
    let mut blue = service.client("blue", "sandpool");
    let code = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass";
    blue.good("create_context", json!({ "name": "ended" }));
    blue.good("run_code", json!({ "context": "ended", "code": code }));
    blue.good("stop_context", json!({ "context": "ended" }));
    blue.good("run_code", json!({ "code": code }));
    service.client("green", "sandpool").good("run_code", json!({ "code": "1" }));
    // A stop does not wait for the end of its sandbox.
    let of = |service: &Service, tenant: &str| json_of(service, &["usage", "--tenant", tenant, "--format", "json"]);
    eventually("both contexts are counted", || {
        of(&service, "blue").as_array().unwrap().iter().filter_map(|day| day["cpu_seconds"].as_f64()).sum::<f64>()
            >= 1.0
    });
    let before = of(&service, "blue");
    let day = &before[0];
    assert_eq!(day["calls"], 4, "{before}");
    assert!(day["memory_gb_hours"].as_f64().unwrap() > 0.0, "{before}");
    assert!(day["bytes_in"].as_u64().unwrap() > 100 && day["bytes_out"].as_u64().unwrap() > 0, "{before}");
    let date = day["day"].as_str().unwrap();
    let csv = done(&service, &["usage", "--format", "csv", "--since", date]);
    assert!(
        csv.starts_with("day,tenant,calls,cpu_seconds,memory_gb_hours,bytes_in,bytes_out,network_bytes\n"),
        "{csv}"
    );
    assert!(csv.lines().count() >= 3, "{csv}");
    assert_eq!(json_of(&service, &["usage", "--until", "2000-01-01", "--format", "json"]), json!([]));
    let state = service.state();
    service.finish();
    let next = Service::with("usage", Setup { state: Some(state), ..Setup::default() });
    let after = of(&next, "blue");
    assert!(after[0]["cpu_seconds"].as_f64().unwrap() >= day["cpu_seconds"].as_f64().unwrap(), "{after}");
    assert!(done(&next, &["usage"]).contains("blue"));
    next.finish();
}

/// W78: bytes that moved count, whether the file was complete or not.
#[test]
fn files_that_were_moved_only_in_part_count_the_bytes_that_moved() {
    let service = Service::start("usage-of-files");
    let mut blue = service.client("blue", "sandpool");
    let used = || {
        let days = json_of(&service, &["usage", "--tenant", "blue", "--format", "json"]);
        ["bytes_in", "bytes_out"]
            .map(|name| days.as_array().unwrap().iter().map(|day| day[name].as_u64().unwrap()).sum())
    };
    let path_of = |link: &Value| format!("/{}", link["url"].as_str().unwrap().splitn(4, '/').nth(3).unwrap());
    blue.good("run_code", json!({ "code": "open('big', 'wb').truncate(200 << 20)\nopen('small', 'w').write('abc')" }));
    let small = blue.good("read_file", json!({ "path": "small" }));
    let uri = small["url"].as_str().unwrap_or_else(|| panic!("{small}")).to_owned();
    let big = format!("/files/{}/big", uri.split('/').nth(4).unwrap());
    let upload = path_of(&blue.good("upload_link", json!({ "path": "up" })));
    let before: [u64; 2] = used();
    let read = blue.request("resources/read", json!({ "uri": uri }));
    let content = &read["result"]["contents"][0];
    let length = content["text"].as_str().or(content["blob"].as_str()).unwrap_or_else(|| panic!("{read}")).len() as u64;
    assert_eq!(used(), [before[0], before[1] + length]);

    let send = |request: String| {
        let mut stream = TcpStream::connect(service.address).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        stream
    };
    let host = service.address;
    let broken =
        send(format!("PUT {upload} HTTP/1.1\r\nhost: {host}\r\ncontent-length: 1000\r\n\r\n{}", "x".repeat(400)));
    eventually("the part of the upload", || used()[0] == before[0] + 400);
    drop(broken);
    eventually("the journal", || journal(&service.state().0).iter().any(|line| line["event"] == "upload_failed"));

    let mut broken = send(format!("GET {big} HTTP/1.1\r\nhost: {host}\r\n\r\n"));
    broken.read_exact(&mut [0; 100_000]).unwrap();
    drop(broken);
    let is_read = |line: &Value| line["event"] == "file_read" && line["outcome"] == "incomplete";
    eventually("the journal", || journal(&service.state().0).iter().any(is_read));
    let lines = journal(&service.state().0);
    let sent = lines.iter().find(|line| is_read(line)).unwrap()["bytes_out"].as_u64().unwrap();
    assert!((100_000..200 << 20).contains(&sent), "{sent}");
    assert_eq!(used(), [before[0] + 400, before[1] + length + sent]);
    service.finish();
}

#[test]
fn code_that_runs_in_a_conversation_is_listed_described_and_stopped() {
    let service = Service::start("admin-conversations");
    let mut blue = service.client("blue", "conversation");
    let run = |code: &str| json!({ "conversationId": "talk", "language": "python", "code": code });
    blue.good("sandbox.run_code", run("open('/data/kept.txt', 'w').write('kept')"));
    let listed = || json_of(&service, &["ps", "--of-dialect", "conversation", "--json"]);
    assert_eq!(listed(), json!([]));
    let hanging = std::thread::spawn({
        let (mut blue, code) = (service.client("blue", "conversation"), run("import time; time.sleep(25)"));
        move || blue.call("sandbox.run_code", code)
    });
    eventually("the run is listed", || listed().as_array().unwrap().len() == 1);
    let all = listed();
    for (name, value) in [("id", "talk"), ("tenant", "blue"), ("dialect", "conversation"), ("state", "running")] {
        assert_eq!(all[0][name], value, "{all}");
    }
    assert!(all[0]["memory_bytes"].as_u64().unwrap() > 1 << 20 && all[0].get("key").is_none(), "{all}");
    assert!(done(&service, &["inspect", "talk"]).contains("limits"));
    assert!(refused(&service, &["stop", "talk", "--tenant", "green"]).contains("there is no context"));
    assert_eq!(done(&service, &["stop", "talk"]), "stopped talk of blue\n");
    let answer = hanging.join().unwrap();
    assert!(answer.to_string().contains("the operator stopped it"), "{answer}");
    assert_eq!(listed(), json!([]));
    let kept = blue.good("sandbox.run_code", run("print(open('/data/kept.txt').read())"));
    assert!(kept.to_string().contains("kept"), "{kept}");
    service.finish();
}

#[test]
fn the_socket_is_the_users_own_and_takes_no_nonsense() {
    let service = Service::start("socket");
    let dir = service.state().0.join("state/admin");
    let mode = |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&dir), mode(&dir.join("socket"))), (0o700, 0o600));
    let answer = |bytes: &[u8]| {
        let mut stream = UnixStream::connect(dir.join("socket")).unwrap();
        stream.write_all(bytes).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut text = String::new();
        let _ = stream.read_to_string(&mut text);
        text
    };
    for (request, why) in [
        (&b"nonsense\n"[..], "a request is a JSON object"),
        (b"{\"version\":1,\"command\":\"reload\"", "a request is one line"),
        (b"{\"version\":2,\"command\":\"reload\"}\n", "the server speaks version 1"),
        (b"{\"version\":1,\"command\":\"format_disk\"}\n", "unknown variant"),
        (&[b' '; 20_000], "a request is one line of at most 16384 bytes"),
    ] {
        let text = answer(request);
        assert!(text.contains(why) && text.starts_with("{\"failed\":"), "{why}: {text}");
    }
    // Many that say nothing do not keep the operator out for long, and the server goes on.
    let silent: Vec<UnixStream> = (0..40).map(|_| UnixStream::connect(dir.join("socket")).unwrap()).collect();
    drop(silent);
    eventually("the next command", || admin(&service, &["ps"]).status.success());
    service.finish();
}

/// The tenants file is made before the first start of a server that needs it.
#[test]
fn the_first_tenant_is_added_without_a_server() {
    let state = StateDir::new("first-tenant");
    let (file, config) = (state.0.join("tenants.toml"), state.0.join("sandpool.toml"));
    std::fs::write(&config, format!("[auth]\ntenants = '{}'\n", file.display())).unwrap();
    let run = |arguments: &[&str]| {
        let output = program(&state, arguments).arg("--config").arg(&config).output().unwrap();
        (output.status.success(), String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let (done, token, said) = run(&["tenant", "add", "ana"]);
    assert!(done && token.trim().len() == 64 && said.contains("`ana` was added"), "{token} {said}");
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(text.contains("name = \"ana\"") && !text.contains(token.trim()), "{text}");
    assert!(run(&["tenant", "add", "ben"]).0);
    assert!(!run(&["tenant", "rotate", "cho"]).0, "there is no such tenant");
    let (listed, _, said) = run(&["tenant", "list"]);
    assert!(!listed && said.contains("no server runs"), "{said}");
}
