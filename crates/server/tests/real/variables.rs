//! Each variable of the environment shows its effect on the built server. Several a server, since each start fills a pool.

use std::fs::Permissions;
use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ring::digest::{SHA256, digest};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use testkit::client::Client;
use testkit::host::StateDir;
use testkit::http::{Account, Mcp};

use crate::serve::{Serve, TOKEN, eventually, free_port};
use crate::support::{program, stdio_of};

fn with_host<'a>(host: &'a str, more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    [&[("host", host)], more].concat()
}

fn error(answer: &Value) -> (i64, String) {
    let error = answer.get("error").unwrap_or_else(|| panic!("no error: {answer}"));
    (error["code"].as_i64().unwrap(), error["message"].as_str().unwrap().to_owned())
}

/// The key in the link of a conversation's file.
fn key(client: &mut Mcp, conversation: &str) -> (String, String) {
    let arguments = json!({ "conversationId": conversation, "filename": "a.txt", "content": "aGk=" });
    let file = client.good("sandbox.upload_file", arguments);
    let url = file["file"]["url"].as_str().unwrap();
    let (base, rest) = url.split_once("/files/").unwrap();
    (base.to_owned(), rest.split('/').next().unwrap().to_owned())
}

fn sessions(client: &mut Mcp) -> Vec<String> {
    let list = client.good("get_sessions", json!({}));
    let ids = list["sessions"].as_array().unwrap().iter().map(|session| session["session_id"].as_str().unwrap());
    ids.map(str::to_owned).collect()
}

fn run(client: &mut Mcp, session: &str, code: &str) -> Value {
    client.call("execute_code", json!({ "code": code, "session_id": session }))
}

#[test]
fn address_token_origins_links_and_language_under_both_names() {
    // The names of other servers.
    let port = free_port().to_string();
    let server = Serve::start(
        "web-theirs",
        &[
            ("MCP_SERVER_HOST", "127.0.0.2"),
            ("MCP_SERVER_PORT", &port),
            ("MCP_ENABLE_CORS", "true"),
            ("MCP_API_TOKEN", TOKEN),
            ("PUBLIC_BASE_URL", "https://sandbox.example.com/box/"),
            ("SANDPOOL_DIALECT", "conversation"),
            ("SANDPOOL_LANG", "zh"),
            ("SANDPOOL_FILE_SECRET", "a secret that both servers know"),
            ("SANDPOOL_LOG_FORMAT", "json"),
        ],
    );
    assert_eq!(server.address.to_string(), format!("127.0.0.2:{port}"));
    let elsewhere = Account { address: ([127, 0, 0, 1], server.address.port()).into(), ..server.account() };
    assert!(elsewhere.ask("GET", "/healthz", &[], b"").is_err(), "it listens on the other address, too");

    let nobody = Account { token: None, ..server.account() };
    let refused = nobody.ask("GET", "/mcp", &[], b"").unwrap();
    assert_eq!(refused.status, 401);
    assert!(refused.header("www-authenticate").is_some_and(|how| how.starts_with("Bearer")), "{refused:?}");
    let wrong = Account { token: Some("another".into()), ..server.account() };
    assert_eq!(wrong.ask("GET", "/mcp", &[], b"").unwrap().status, 401);
    let status = server.account().ask("GET", "/mcp", &[("origin", "https://any.example")], b"").unwrap();
    assert_eq!(status.json()["dialect"], "conversation");

    assert_eq!(status.header("access-control-allow-origin"), Some("*"));
    let asks = [
        ("origin", "https://any.example"),
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "authorization, content-type"),
    ];
    let preflight = nobody.ask("OPTIONS", "/mcp", &asks, b"").unwrap();
    assert_eq!(preflight.header("access-control-allow-origin"), Some("*"), "{preflight:?}");
    assert_eq!(preflight.header("access-control-allow-methods"), Some("GET, POST, DELETE, OPTIONS"));
    assert!(preflight.header("access-control-allow-headers").unwrap().contains("Authorization"));
    assert_eq!(preflight.header("access-control-allow-credentials"), None);

    // The host of the public address is one of ours.
    assert_eq!(nobody.ask("GET", "/healthz", &with_host("sandbox.example.com", &[]), b"").unwrap().status, 200);
    let (base, secret_key) = key(&mut server.client("conversation"), "the same");
    assert_eq!(base, "https://sandbox.example.com/box");
    let description = server.tool("conversation", "sandbox.run_code")["description"].to_string();
    assert!(description.contains("代码"), "{description}");
    let log = server.log();
    let lines = log.lines().map(serde_json::from_str::<Value>);
    assert!(lines.clone().count() > 0 && lines.clone().all(|line| line.is_ok_and(|line| line.is_object())), "{log}");
    assert!(server.finish().success());

    // Our own, and another state directory.
    let listen = format!("127.0.0.1:{}", free_port());
    let variables = [
        ("SANDPOOL_LISTEN", listen.as_str()),
        ("SANDPOOL_CORS", "true"),
        ("SANDPOOL_ALLOWED_ORIGINS", "https://app.example"),
        ("SANDPOOL_ALLOWED_HOSTS", "box.example"),
        ("SANDPOOL_API_TOKEN", TOKEN),
        ("SANDPOOL_PUBLIC_URL", "https://other.example.com"),
        ("SANDPOOL_FILE_SECRET", "a secret that both servers know"),
        ("SANDPOOL_LANG", "en"),
        ("SANDPOOL_LOG", "warn"),
    ];
    let server = Serve::start("web-ours", &variables);
    assert_eq!(server.address.to_string(), listen);
    assert_eq!(server.account().ask("GET", "/mcp", &[], b"").unwrap().json()["dialect"], "sandpool");
    let (base, again) = key(&mut server.client("conversation"), "the same");
    assert_eq!((base.as_str(), &again), ("https://other.example.com", &secret_key), "the same secret, the same link");
    assert_ne!(key(&mut server.client("conversation"), "another").1, secret_key);
    let origin = |origin: &str| {
        let answer = server.account().ask("GET", "/mcp", &[("origin", origin)], b"").unwrap();
        (answer.status, answer.header("access-control-allow-origin").map(str::to_owned))
    };
    assert_eq!(origin("https://app.example"), (200, Some("https://app.example".into())));
    assert_eq!(origin("https://any.example").0, 403);
    let host = |host: &str| server.account().ask("GET", "/healthz", &with_host(host, &[]), b"").unwrap().status;
    assert_eq!((host("box.example"), host("other.example.com"), host("localhost")), (200, 200, 200));
    assert_eq!(host("evil.example"), 403);
    let description = server.tool("agentrun", "run_code")["description"].to_string();
    assert!(description.is_ascii(), "{description}");
    assert!(!server.log().contains("INFO"), "{}", server.log());
    assert!(server.finish().success());
}

/// The kernel's own figure for the sandbox in which a process with this argument runs: bytes of memory.
fn memory_limit(argument: &str) -> u64 {
    let processes = std::fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
    let is_it = |path: &PathBuf| {
        let line = std::fs::read(path.join("cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0).any(|word| word == argument.as_bytes())
    };
    let process = processes.filter(|path| path.join("cmdline").exists()).find(is_it).expect("the process runs");
    let groups = std::fs::read_to_string(process.join("cgroup")).unwrap();
    let file = groups.lines().find_map(|line| match line.splitn(3, ':').collect::<Vec<_>>()[..] {
        [_, "memory", path] => Some(format!("/sys/fs/cgroup/memory{path}/memory.limit_in_bytes")),
        ["0", "", path] if path != "/" => Some(format!("/sys/fs/cgroup{path}/memory.max")),
        _ => None,
    });
    let file = file.unwrap_or_else(|| panic!("no memory cgroup: {groups}"));
    std::fs::read_to_string(&file).unwrap().trim().parse().unwrap()
}

pub fn volume(state: &StateDir, name: &str) -> PathBuf {
    let dir = state.0.join(name);
    std::fs::create_dir(&dir).unwrap();
    // A volume that can be written to may not belong to root.
    if rustix::process::geteuid().is_root() {
        chown(&dir, Some(4711), Some(4711)).unwrap();
    }
    dir
}

#[test]
fn flavors_volumes_and_the_number_of_sessions() {
    let state = Arc::new(StateDir::new("sessions"));
    let (shared, fixed) = (volume(&state, "shared"), volume(&state, "fixed"));
    std::fs::write(fixed.join("a.txt"), "from outside").unwrap();
    let list = format!("{}:/shared,{}:/fixed:ro", shared.display(), fixed.display());
    let server = Serve::in_state(
        state.clone(),
        &[
            ("SANDPOOL_DIALECT", "microsandbox"),
            ("MSB_DEFAULT_FLAVOR", "medium"),
            ("MSB_MAX_SESSIONS", "2"),
            ("MSB_EXECUTION_TIMEOUT", "2"),
            ("MSB_SHARED_VOLUME_PATH", &list),
        ],
    );
    let mut client = server.client("microsandbox");

    // The default flavor: in the schema, and in the kernel.
    let schema = &server.tool("microsandbox", "execute_code")["inputSchema"]["properties"]["flavor"];
    assert_eq!(schema["default"], "medium");
    let mark = format!("600.{}", server.address.port());
    let start = format!("import subprocess\np = subprocess.Popen(['sleep', '{mark}'])");
    assert_eq!(run(&mut client, "first", &start)["result"]["isError"], false);
    assert_eq!(memory_limit(&mark), 2048 << 20);

    // How long code may take that names no time.
    let late = run(&mut client, "first", "import time\ntime.sleep(600)");
    assert!(late["result"]["structuredContent"]["stderr"].as_str().unwrap().contains("timed out after 2 s"), "{late}");

    // Volumes, one to write to.
    let both = "open('/shared/b.txt', 'w').write('from inside')\nprint(open('/fixed/a.txt').read())\nopen('/fixed/b.txt', 'w')";
    let answer = run(&mut client, "first", both);
    let said = &answer["result"]["structuredContent"];
    assert_eq!(said["stdout"], "from outside\n", "{answer}");
    assert!(said["stderr"].as_str().unwrap().contains("Read-only file system"), "{answer}");
    assert_eq!(std::fs::read_to_string(shared.join("b.txt")).unwrap(), "from inside");
    let mappings = client.good("get_volume_path", json!({}));
    assert_eq!(
        mappings["volume_mappings"],
        json!([
            { "host_path": shared, "container_path": "/shared" },
            { "host_path": fixed, "container_path": "/fixed" },
        ])
    );

    // At the limit the idle one makes room, though the busy one was not used for longer.
    let path = shared.join("go");
    let busy = "import os, time\nopen('/shared/busy', 'w')\nwhile not os.path.exists('/shared/go'): time.sleep(0.01)\nprint('done')";
    let arguments = json!({ "code": busy, "session_id": "busy", "timeout": 120 });
    std::thread::scope(|scope| {
        let running = scope.spawn(|| server.client("microsandbox").good("execute_code", arguments));
        eventually("the code runs", || shared.join("busy").exists());
        assert_eq!(sessions(&mut client), ["busy", "first"]);
        run(&mut client, "first", "1");
        run(&mut client, "third", "1");
        assert_eq!(sessions(&mut client), ["third", "busy"]);
        std::fs::write(path, "").unwrap();
        assert_eq!(running.join().unwrap()["stdout"], "done\n");
    });
    assert!(server.finish().success());
}

#[test]
fn memory_of_all_sessions_and_none_evicted() {
    let state = Arc::new(StateDir::new("memory"));
    let shared = volume(&state, "shared");
    let list = json!([format!("{}:/one", shared.display()), format!("{}:/two:ro", shared.display())]).to_string();
    let tenants = state.0.join("tenants");
    let hash = text::hex(digest(&SHA256, TOKEN.as_bytes()).as_ref());
    std::fs::write(&tenants, format!("[[tenant]]\nname = \"blue\"\ntoken_sha256 = \"{hash}\"\n")).unwrap();
    std::fs::set_permissions(&tenants, Permissions::from_mode(0o600)).unwrap();
    let server = Serve::in_state(
        state.clone(),
        &[
            ("SANDPOOL_TENANTS", tenants.to_str().unwrap()),
            ("MSB_ENABLE_LRU_EVICTION", "false"),
            ("MSB_MAX_SESSIONS", "2"),
            ("MSB_MAX_TOTAL_MEMORY_MB", "3000"),
            ("MSB_SHARED_VOLUME_PATH", &list),
            ("MSB_CLEANUP_INTERVAL", "7"),
            ("MSB_ORPHAN_CLEANUP_INTERVAL", "1"),
            ("MSB_SANDBOX_START_TIMEOUT", "5"),
        ],
    );
    let mut client = server.client("microsandbox");
    let make = |client: &mut Mcp, session: &str, flavor: &str| {
        client.call("execute_code", json!({ "code": "1", "session_id": session, "flavor": flavor }))
    };
    assert_eq!(make(&mut client, "a", "small")["result"]["isError"], false);
    let over = error(&make(&mut client, "b", "medium"));
    assert!(over.0 == -32600 && over.1.contains("max_total_memory_mb") && over.1.contains("3000"), "{over:?}");
    assert_eq!(make(&mut client, "b", "small")["result"]["isError"], false);
    let full = error(&run(&mut client, "c", "1"));
    assert!(full.0 == -32600 && full.1.contains('2'), "{full:?}");
    assert_eq!(sessions(&mut client), ["b", "a"]);

    // A token decides who somebody is; where volumes lie on this machine is not for tenants.
    let nobody = Account { token: None, ..server.account() };
    assert_eq!(nobody.ask("GET", "/mcp", &[], b"").unwrap().status, 401);
    let mappings = client.good("get_volume_path", json!({}));
    assert_eq!(mappings["volume_mappings"], json!([{ "container_path": "/one" }, { "container_path": "/two" }]));

    // As a JSON array.
    let answer = run(&mut client, "a", "_ = open('/one/x', 'w').write('x')\nprint(open('/two/x').read())");
    assert_eq!(answer["result"]["structuredContent"]["stdout"], "x\n", "{answer}");

    // A sandbox that does not start in time: its maker sleeps, and none of its kind waits ready.
    client.good("stop_session", json!({ "session_id": "b" }));
    let launcher = children(server.pid())[0];
    kill_process(launcher, Signal::STOP).unwrap();
    let late = json!({ "code": "1", "session_id": "late", "template": "node" });
    let late = error(&client.call("execute_code", late));
    kill_process(launcher, Signal::CONT).unwrap();
    assert!(late.0 == -32603 && late.1.contains("within 5s"), "{late:?}");
    assert_eq!(run(&mut client, "late", "1")["result"]["isError"], false);

    // What a killed server left is found while this one runs. Its launcher goes first, or it would clean up itself.
    let other = Client::start(stdio_of("microsandbox", &server.state.0, ""));
    let instances = server.state.0.join("state/instances");
    let count = |dir: &Path| std::fs::read_dir(dir).unwrap().count();
    assert_eq!(count(&instances), 2);
    let pid = Pid::from_raw(other.pid() as i32).unwrap();
    for child in children(other.pid()) {
        kill_process(child, Signal::KILL).unwrap();
    }
    kill_process(pid, Signal::KILL).unwrap();
    eventually("the dead server's are gone", || count(&instances) == 1);
    assert_eq!(sessions(&mut client), ["late", "a"], "and nobody else's");
    assert!(server.finish().success());
}

#[test]
fn an_unused_session_ends_and_links_stay_the_same_without_a_secret() {
    let state = Arc::new(StateDir::new("idle"));
    let file = state.0.join("token");
    std::fs::write(&file, format!("{TOKEN}\n")).unwrap();
    std::fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
    let by_file = ("SANDPOOL_TOKEN_FILE", file.to_str().unwrap());
    let short = [by_file, ("MSB_SESSION_TIMEOUT", "1"), ("MSB_CLEANUP_INTERVAL", "1")];
    let server = Serve::in_state(state.clone(), &short);
    let nobody = Account { token: None, ..server.account() };
    assert_eq!(nobody.ask("GET", "/mcp", &[], b"").unwrap().status, 401);
    let mut client = server.client("microsandbox");
    run(&mut client, "short", "x = 1");
    eventually("the session is gone", || sessions(&mut client).is_empty());
    let again = run(&mut client, "short", "x");
    assert_eq!(again["result"]["session_created"], true, "{again}");
    assert!(again.to_string().contains("NameError") && again.to_string().contains("earlier one are gone"), "{again}");
    // Conversations are not sessions.
    let before = key(&mut server.client("conversation"), "kept");
    assert!(server.finish().success());

    let server = Serve::in_state(state.clone(), &[by_file]);
    let after = key(&mut server.client("conversation"), "kept");
    assert_eq!(before.1, after.1, "the secret is in the state directory");
    let code = "import os\nprint(os.listdir('/data'))";
    let arguments = json!({ "conversationId": "kept", "language": "python", "code": code });
    assert_eq!(server.client("conversation").good("sandbox.run_code", arguments)["output"], "['a.txt']\n");
    assert!(server.finish().success());
}

#[test]
fn interpreters_are_forks_of_one_that_has_imported_what_it_is_told() {
    let question = "import sys\nprint('colorsys' in sys.modules, 'pandas' in sys.modules)";
    for (variable, value, expected) in
        [("SANDPOOL_PRELOAD", "colorsys,no_such_module", "True False\n"), ("SANDPOOL_WARM", "false", "False False\n")]
    {
        let server = Serve::start("warm", &[("SANDPOOL_DIALECT", "microsandbox"), (variable, value)]);
        let answer = run(&mut server.client("microsandbox"), "one", question);
        assert_eq!(answer["result"]["structuredContent"]["stdout"], expected, "{variable}: {answer}");
        assert!(server.finish().success());
    }
}

/// What it says and how it ends, when it does not come to serving.
fn refusal(state: &StateDir, variables: &[(&str, &str)]) -> String {
    let mut command = program();
    command.arg("serve").env("SANDPOOL_STATE_DIR", state.0.join("state")).env("SANDPOOL_CONFIG", "/dev/null");
    let ended = command.envs(variables.iter().copied()).output().unwrap();
    let said = String::from_utf8(ended.stderr).unwrap();
    assert!(!ended.status.success(), "{said}");
    assert_eq!(said.trim_end().lines().count(), 1, "{said}");
    said
}

#[test]
fn what_cannot_be_served_is_refused_in_one_line() {
    let state = StateDir::new("refused");
    // Taken, so that none of these can ever listen.
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let everywhere = format!("0.0.0.0:{}", taken.local_addr().unwrap().port());
    let open = refusal(&state, &[("SANDPOOL_LISTEN", &everywhere)]);
    assert!(open.contains("SANDPOOL_API_TOKEN") && open.contains("--no-auth"), "{open}");
    let allowed = refusal(&state, &[("SANDPOOL_LISTEN", &everywhere), ("SANDPOOL_NO_AUTH", "true")]);
    assert!(allowed.contains("cannot listen on") && allowed.contains("in use"), "{allowed}");

    let other = refusal(&state, &[("SANDPOOL_BACKEND", "docker")]);
    assert!(other.contains("SANDPOOL_BACKEND") && other.contains("native"), "{other}");
    for (variable, wrong) in [
        ("MCP_SERVER_PORT", "http"),
        ("MCP_ENABLE_CORS", "perhaps"),
        ("MSB_DEFAULT_FLAVOR", "huge"),
        ("MSB_MAX_SESSIONS", "0"),
        ("MSB_SESSION_TIMEOUT", "soon"),
        ("MSB_CLEANUP_INTERVAL", "-1"),
        ("MSB_SHARED_VOLUME_PATH", "data:shared"),
        ("SANDPOOL_WARM", "lukewarm"),
        // Its effect shows where there is a systemd: in the lab.
        ("SANDPOOL_SYSTEMD_SCOPE", "perhaps"),
        ("SANDPOOL_PRELOAD", "pandas,--help"),
        ("SANDPOOL_NETWORK_ALLOW", "https://a.example/"),
    ] {
        let said = refusal(&state, &[(variable, wrong)]);
        assert!(said.contains(variable), "{said}");
    }
    let volume = refusal(&state, &[("MSB_SHARED_VOLUME_PATH", "/no/such/place:/shared")]);
    assert!(volume.contains("/no/such/place") && volume.contains("No such file"), "{volume}");
}

#[test]
fn network_and_browser() {
    let state = StateDir::new("variables-network");
    let mut command = stdio_of("sandpool", &state.0, "");
    command.env("SANDPOOL_NETWORK_ALLOW", "a.example").env("SANDPOOL_BROWSER", "off");
    let mut client = Client::start(command);
    let opened = client.call("browser_open", json!({ "url": "http://a.example/" }));
    assert!(opened.is_error() && opened.0.to_string().contains("browser"), "{}", opened.0);
    let ran = client.call("run_command", json!({ "command": "curl -s http://10.1.2.3/" }));
    let denied = ran.json()["denied"][0].as_str().unwrap_or_default().to_owned();
    assert!(denied.contains("policy \"command-line\""), "{}", ran.0);
    assert!(client.finish().success());
}

/// The effects of these are tested with a collector (`service otel::`, `service observed::`) and with a proxy
/// (`egress::proxy upstream::`); here each of them arrives.
#[test]
fn variables_of_the_export_the_metrics_and_the_proxy_arrive() {
    let state = StateDir::new("variables-arrive");
    let token = state.0.join("token");
    std::fs::write(&token, "a-token-of-a-reader-of-metrics").unwrap();
    std::fs::set_permissions(&token, Permissions::from_mode(0o600)).unwrap();
    let token = token.display().to_string();
    let variables = [
        ("SANDPOOL_NETWORK_UPSTREAM", "http://proxy.test:3128"),
        ("SANDPOOL_NETWORK_FAKE_IP_DNS", "true"),
        ("SANDPOOL_METRICS_TOKEN", "a-token-of-a-reader-of-metrics"),
        ("SANDPOOL_METRICS_TOKEN_FILE", &token),
        ("SANDPOOL_METRICS_LISTEN", "127.0.0.1:9464"),
        ("OTEL_SDK_DISABLED", "true"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:4318/t"),
        ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "http://127.0.0.1:4318/m"),
        ("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", "http://127.0.0.1:4318/l"),
        ("OTEL_TRACES_EXPORTER", "none"),
        ("OTEL_METRICS_EXPORTER", "none"),
        ("OTEL_LOGS_EXPORTER", "none"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "x-key=value"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "2000"),
        ("OTEL_SERVICE_NAME", "pool-of-a-test"),
        ("OTEL_RESOURCE_ATTRIBUTES", "deployment=test"),
        ("OTEL_TRACES_SAMPLER", "traceidratio"),
        ("OTEL_TRACES_SAMPLER_ARG", "0.5"),
        ("OTEL_BSP_SCHEDULE_DELAY", "100"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "10"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "1000"),
    ];
    for (name, value) in variables {
        let mut command = program();
        command.arg("config").arg("--state-dir").arg(state.0.join("state")).env(name, value);
        let output = command.output().unwrap();
        let page = String::from_utf8_lossy(&output.stdout).into_owned();
        let line = page.lines().find(|line| line.ends_with(&format!("# ${name}")));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let line = line.unwrap_or_else(|| panic!("{name} has no effect: {said}{page}"));
        let is_secret = name.ends_with("_TOKEN") || name.ends_with("_HEADERS");
        assert_eq!(line.contains(value), !is_secret, "{line}");
    }
}

/// A variable that comes to the program has to come here, too.
#[test]
fn no_variable_of_a_setting_is_forgotten() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/environment.md")).unwrap();
    let settings = page.split("\n## ").find(|part| part.starts_with("Settings")).unwrap();
    let names = settings.lines().filter_map(|line| line.strip_prefix("| `")?.split(" | ").next());
    let names = names.flat_map(|names| names.split('`').filter(|name| name.contains('_')));
    let (mut count, here) = (0, concat!(include_str!("variables.rs"), include_str!("serve.rs")));
    for name in names {
        assert!(here.contains(&format!("\"{name}\"")), "{name} has no test");
        count += 1;
    }
    assert!(count > 20, "the page has another form: {count}");
}

fn children(pid: u32) -> Vec<Pid> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let lists = tasks.map(|task| std::fs::read_to_string(task.path().join("children")).unwrap_or_default());
    let pids: Vec<i32> =
        lists.flat_map(|list| list.split(' ').filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>()).collect();
    pids.into_iter().filter_map(Pid::from_raw).collect()
}
