//! Starts the built binary as `sandpool serve`, with variables of the test's own.

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use testkit::host::StateDir;
use testkit::http::{Account, Era, Mcp};

use crate::support::program;

/// Longer than anything the server may take for one thing.
const WATCHDOG: Duration = Duration::from_secs(120);

/// Of every server here that wants one.
pub const TOKEN: &str = "a-token-of-this-test";

pub struct Serve {
    child: Child,
    pub address: SocketAddr,
    pub state: Arc<StateDir>,
    token: Option<String>,
    log: PathBuf,
}

impl Serve {
    pub fn start(name: &str, variables: &[(&str, &str)]) -> Self {
        Self::in_state(Arc::new(StateDir::new(name)), variables)
    }

    pub fn in_state(state: Arc<StateDir>, variables: &[(&str, &str)]) -> Self {
        Self::with_settings(state, "", variables)
    }

    /// On a free port of loopback unless the variables say otherwise.
    pub fn with_settings(state: Arc<StateDir>, settings: &str, variables: &[(&str, &str)]) -> Self {
        let find = |name| variables.iter().find(|(variable, _)| *variable == name).map(|(_, value)| *value);
        let host = find("MCP_SERVER_HOST").unwrap_or("127.0.0.1");
        let port = find("MCP_SERVER_PORT").map_or_else(|| free_port().to_string(), str::to_owned);
        let listen = find("SANDPOOL_LISTEN").map_or_else(|| format!("{host}:{port}"), str::to_owned);
        let (config, log) = (state.0.join("sandpool.toml"), state.0.join("log"));
        std::fs::write(&config, format!("[serve]\nlisten = \"127.0.0.1:{port}\"\n{settings}")).unwrap();
        let mut command = program();
        command.arg("serve").env("SANDPOOL_CONFIG", config).env("SANDPOOL_STATE_DIR", state.0.join("state"));
        // Relative paths start in the test's own directory.
        command.current_dir(&state.0);
        command.envs(variables.iter().copied()).stdin(Stdio::null()).stderr(std::fs::File::create(&log).unwrap());
        let ways = ["SANDPOOL_API_TOKEN", "MCP_API_TOKEN", "SANDPOOL_TOKEN_FILE", "SANDPOOL_TENANTS"];
        let token = ways.into_iter().find_map(find).map(|_| TOKEN.to_owned());
        let address = listen.parse().unwrap();
        let mut server = Self { child: command.spawn().unwrap(), address, state, token, log };
        eventually("the server is ready", || {
            if let Some(status) = server.child.try_wait().unwrap() {
                panic!("the server ended ({status}): {}", server.log());
            }
            server.account().ask("GET", "/readyz", &[], b"").is_ok_and(|answer| answer.status == 200)
        });
        server
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    pub fn account(&self) -> Account {
        Account { address: self.address, token: self.token.clone(), forbidden: Arc::new([]) }
    }

    pub fn client(&self, dialect: &str) -> Mcp {
        Mcp::new(&self.account(), dialect, Era::Bare)
    }

    /// The tools of a dialect, by name.
    pub fn tool(&self, dialect: &str, name: &str) -> Value {
        let list = self.client(dialect).request("tools/list", serde_json::json!({}));
        let tools = list["result"]["tools"].as_array().unwrap().iter();
        tools.clone().find(|tool| tool["name"] == name).unwrap_or_else(|| panic!("no {name}: {list}")).clone()
    }

    /// Asks it to end, and waits for that.
    pub fn finish(mut self) -> ExitStatus {
        self.end()
    }

    fn end(&mut self) -> ExitStatus {
        let pid = Pid::from_child(&self.child);
        let begun = Instant::now();
        let _ = kill_process(pid, Signal::TERM);
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            if begun.elapsed() > WATCHDOG {
                let _ = kill_process(pid, Signal::KILL);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        // After `finish` there is nobody left to ask.
        if matches!(self.child.try_wait(), Ok(None)) {
            self.end();
        }
    }
}

pub fn free_port() -> u16 {
    TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port()
}

/// Waits for what has to become true.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + WATCHDOG;
    while !condition() {
        assert!(Instant::now() < end, "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
