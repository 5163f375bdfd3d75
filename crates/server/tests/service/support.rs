//! The built server with tenants of the test's own, a canary, and the oracle that holds after every case.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ring::digest::{SHA256, digest};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use testkit::client::object_of;
use testkit::host::{StateDir, facts, traces};
use testkit::http::{Account, Era, Mcp};

/// Longer than anything the server may take for one thing.
const WATCHDOG: Duration = Duration::from_secs(120);

/// Tenants of every server here. The last is the one that must not notice anything.
pub const TENANTS: [&str; 3] = ["blue", "green", "canary"];

pub struct Service {
    child: Child,
    pub address: SocketAddr,
    state: Arc<StateDir>,
    log: PathBuf,
    /// What its belongings are named after.
    marks: Vec<String>,
    pub launcher: Vec<u32>,
    facts: Vec<String>,
}

/// What to start a server with.
#[derive(Default)]
pub struct Setup<'a> {
    pub settings: &'a str,
    /// Quotas of a tenant, as in the file of tenants.
    pub quotas: &'a [(&'a str, &'a str)],
    pub arguments: &'a [&'a str],
    /// Without tokens: everybody is the one tenant.
    pub open: bool,
    /// Of a server before this one.
    pub state: Option<Arc<StateDir>>,
    /// The name server to ask instead of the machine's own.
    pub resolver: Option<IpAddr>,
}

pub fn token(tenant: &str) -> String {
    format!("token-of-{tenant}-6f1c0b")
}

/// Waits for what has to become true.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + WATCHDOG;
    while !condition() {
        assert!(Instant::now() < end, "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The hostile rows in full, or what is enough for every change.
#[allow(clippy::disallowed_methods, reason = "a test's own switch")]
pub fn is_full() -> bool {
    std::env::var_os("SANDPOOL_HOSTILE").is_some()
}

/// A line for the report of `make hostile`.
#[allow(clippy::disallowed_methods, reason = "a test's own switch")]
pub fn report(row: &str, ended: &str) {
    use std::io::Write;
    eprintln!("{row}: {ended}");
    let Some(dir) = std::env::var_os("SANDPOOL_HOSTILE_REPORT") else { return };
    let path = std::path::Path::new(&dir).join("service.txt");
    let mut file = std::fs::OpenOptions::new().append(true).create(true).open(path).unwrap();
    writeln!(file, "{row}\t{ended}").unwrap();
}

/// Returns the seconds for which tenants make calls in `many_tenants`. `make load` sets more than the other runs of the tests.
#[allow(clippy::disallowed_methods, reason = "a test's own switch")]
pub fn load_seconds() -> u64 {
    std::env::var_os("SANDPOOL_LOAD_SECONDS").map_or(60, |seconds| seconds.to_str().unwrap().parse().unwrap())
}

/// Where `make neighbours` wants its page. It also says which binary to measure.
#[allow(clippy::disallowed_methods, reason = "a test's own switch")]
pub fn neighbours_report() -> Option<PathBuf> {
    std::env::var_os("SANDPOOL_NEIGHBOURS").map(PathBuf::from)
}

#[allow(clippy::disallowed_methods, reason = "a test's own switch")]
fn binary() -> PathBuf {
    std::env::var_os("SANDPOOL_NEIGHBOURS_BINARY").map_or_else(|| env!("CARGO_BIN_EXE_sandpool").into(), PathBuf::from)
}

/// Starts the server in a mount namespace in which `/etc/resolv.conf` names this resolver. Needs root, like the namespaces of the network's tests.
#[allow(clippy::disallowed_methods, reason = "the test starts the program it tests")]
fn with_resolver(resolver: IpAddr, dir: &Path) -> Command {
    let file = dir.join("resolv.conf");
    std::fs::write(&file, format!("nameserver {resolver}\noptions timeout:5 attempts:2\n")).unwrap();
    let mut command = Command::new("unshare");
    let script = "mount --bind \"$1\" /etc/resolv.conf && shift && exec \"$@\"";
    command.args(["--mount", "--propagation", "private", "sh", "-c", script, "sh"]).arg(file).arg(binary());
    command
}

impl Service {
    pub fn start(name: &str) -> Self {
        Self::with(name, Setup::default())
    }

    #[allow(clippy::disallowed_methods, reason = "the test starts the program it tests")]
    pub fn with(name: &str, setup: Setup<'_>) -> Self {
        let facts = facts();
        let state = setup.state.unwrap_or_else(|| Arc::new(StateDir::new(name)));
        let (config, tenants, log) = (state.0.join("sandpool.toml"), state.0.join("tenants"), state.0.join("log"));
        std::fs::write(&config, setup.settings).unwrap();
        std::fs::write(&tenants, tenants_file(setup.quotas)).unwrap();
        let mut command = match setup.resolver {
            Some(resolver) => with_resolver(resolver, &state.0),
            None => Command::new(binary()),
        };
        command.args(["serve", "--listen", "127.0.0.1:0", "--config"]).arg(config);
        if !setup.open {
            command.arg("--tenants").arg(tenants);
        }
        command.arg("--state-dir").arg(state.0.join("state")).args(setup.arguments);
        command.stdin(std::process::Stdio::null()).stderr(std::fs::File::create(&log).unwrap());
        let child = command.spawn().unwrap();
        let address = ([127, 0, 0, 1], 0).into();
        let mut service = Self { child, address, state, log, marks: Vec::new(), launcher: Vec::new(), facts };
        eventually("the server says where it listens", || service.find_address());
        let ready = service.account("canary");
        eventually("the server is ready", || ready.ask("GET", "/readyz", &[], b"").is_ok_and(|a| a.status == 200));
        service.marks = service.state.marks();
        service.launcher = children(service.pid());
        assert!(!service.launcher.is_empty(), "nothing to look for at the end");
        service
    }

    /// After another launcher was started.
    pub fn look_again(&mut self) {
        self.launcher = children(self.pid());
        let new: Vec<_> = self.state.instances().into_iter().filter(|name| !self.marks.contains(name)).collect();
        self.marks.extend(new);
    }

    fn find_address(&mut self) -> bool {
        let log = self.log();
        if let Some(status) = self.child.try_wait().unwrap() {
            panic!("the server ended ({status}): {log}");
        }
        let address = log.split("http://").nth(1).and_then(|rest| rest.split('/').next());
        match address.and_then(|address| address.parse().ok()) {
            Some(address) => {
                self.address = address;
                true
            }
            None => false,
        }
    }

    pub fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    pub fn state(&self) -> Arc<StateDir> {
        self.state.clone()
    }

    /// Of a tenant; nobody's for another name.
    pub fn account(&self, tenant: &str) -> Account {
        let own = [self.state.0.display().to_string(), env!("CARGO_MANIFEST_DIR").to_owned()];
        let tokens = TENANTS.map(token);
        let signs = ["panicked", "thread '", "stack backtrace", "RUST_BACKTRACE", "/.cargo/", "sandpool-test-", ".rs:"];
        let forbidden = own.into_iter().chain(tokens).chain(signs.map(str::to_owned)).collect();
        let token = TENANTS.contains(&tenant).then(|| token(tenant));
        Account { address: self.address, token, forbidden }
    }

    pub fn client(&self, tenant: &str, dialect: &str) -> Mcp {
        Mcp::new(&self.account(tenant), dialect, Era::Bare)
    }

    pub fn canary(&self) -> Canary {
        let mut client = self.client("canary", "sandpool");
        client.good("run_code", json!({ "code": "secret = 'canary-' + str(6 * 7)" }));
        Canary(client)
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// In kilobytes: the server's own memory, without the launcher and the sandboxes.
    pub fn memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }

    pub fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid())).unwrap().count()
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.pid() as i32).unwrap(), signal).unwrap();
    }

    pub fn wait(&mut self) -> ExitStatus {
        let mut ended = None;
        eventually("the server ends", || {
            ended = self.child.try_wait().unwrap();
            ended.is_some()
        });
        ended.unwrap()
    }

    /// The end of every test: the server stops when told to, says nothing secret in its log, and leaves the host as it was.
    pub fn finish(mut self) {
        self.signal(Signal::TERM);
        assert!(self.wait().success(), "{}", self.log());
        self.nothing_left();
    }

    /// Cgroups, mounts, loop devices, processes, instances; sysctls and names.
    pub fn nothing_left(&self) {
        let end = Instant::now() + Duration::from_secs(20);
        let left = loop {
            let alive = self.launcher.iter().filter(|pid| std::path::Path::new(&format!("/proc/{pid}")).exists());
            let left: Vec<String> = traces(&self.marks)
                .into_iter()
                .chain(self.state.instances().into_iter().map(|name| format!("instance: {name}")))
                .chain(alive.map(|pid| format!("launcher: {pid}")))
                .collect();
            if left.is_empty() || Instant::now() > end {
                break left;
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        assert!(left.is_empty(), "left over: {left:#?}");
        assert_eq!(facts(), self.facts);
        let log = self.log();
        for tenant in TENANTS {
            assert!(!log.contains(&token(tenant)), "the log has the token of {tenant}");
        }
        assert!(!log.contains("panicked"), "{log}");
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // A failed test: the server cleans up if it can.
        if matches!(self.child.try_wait(), Ok(None)) {
            self.signal(Signal::TERM);
            self.signal(Signal::TERM);
            for _ in 0..1000 {
                if !matches!(self.child.try_wait(), Ok(None)) {
                    return;
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

pub fn children(pid: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let lists = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    lists.flat_map(|list| list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>()).collect()
}

fn tenants_file(quotas: &[(&str, &str)]) -> String {
    let entry = |tenant: &str| {
        let digest = text::hex(digest(&SHA256, token(tenant).as_bytes()).as_ref());
        let quotas: String =
            quotas.iter().filter(|(of, _)| *of == tenant).map(|(_, quotas)| format!("quotas = {quotas}\n")).collect();
        format!("[[tenant]]\nname = \"{tenant}\"\ntoken_sha256 = \"{digest}\"\n{quotas}\n")
    };
    TENANTS.map(entry).concat()
}

/// Another tenant's state, which nothing that others do may touch.
pub struct Canary(Mcp);

impl Canary {
    /// The oracle: the server answers, and the canary's answer is right.
    pub fn sings(&mut self, after: &str) {
        let call = json!({ "name": "run_code", "arguments": { "code": "print(secret)" } });
        // An idle connection may be closed at any time, as every client knows.
        let answer = self.0.try_request("tools/call", call.clone()).or_else(|_| {
            self.0.reconnect();
            self.0.try_request("tools/call", call)
        });
        let answer = answer.unwrap_or_else(|error| panic!("after {after}: {error}"));
        assert_eq!(object_of(&answer["result"])["stdout"], "canary-42\n", "after {after}: {answer}");
    }

    /// How long one answer takes, in milliseconds.
    pub fn timed(&mut self) -> f64 {
        let start = Instant::now();
        self.sings("a look at the clock");
        start.elapsed().as_secs_f64() * 1000.0
    }
}

/// The text of the first block of a result.
pub fn text(answer: &Value) -> &str {
    answer["result"]["content"][0]["text"].as_str().unwrap_or_else(|| panic!("no text: {answer}"))
}
