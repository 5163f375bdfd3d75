//! Starts the built binary with a state directory and settings of the test's own.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use testkit::client::{Client, ToolResult};
pub use testkit::host::{StateDir, assert_no_traces};

pub struct Server {
    pub client: Client,
    /// Removed with the server, unless several share it.
    pub state: Option<StateDir>,
}

/// The binary under test, with a state directory of its own and whatever settings the test wants.
pub fn stdio(state: &Path, settings: &str) -> Command {
    stdio_of("agentrun", state, settings)
}

/// The binary under test, without the variables of the test run. The program would warn about those.
#[allow(clippy::disallowed_methods, reason = "the test starts the program it tests")]
pub fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sandpool"));
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| name.starts_with("SANDPOOL_")) {
            command.env_remove(name);
        }
    }
    command
}

pub fn stdio_of(dialect: &str, state: &Path, settings: &str) -> Command {
    let config = state.join("sandpool.toml");
    std::fs::write(&config, settings).unwrap();
    let mut command = program();
    command.args(["stdio", "--dialect", dialect, "--config"]).arg(config).arg("--state-dir").arg(state.join("state"));
    command
}

pub fn start(name: &str, settings: &str) -> Server {
    let state = StateDir::new(name);
    Server { client: Client::start(stdio(&state.0, settings)), state: Some(state) }
}

impl Server {
    /// One of several servers over the same state directory.
    pub fn in_state(state: &StateDir, settings: &str) -> Self {
        Self { client: Client::start(stdio(&state.0, settings)), state: None }
    }

    /// What to look for on this machine once the server has ended.
    pub fn marks(&self) -> Vec<String> {
        self.state.as_ref().unwrap().marks()
    }

    /// Ends the server without giving it a chance to clean up.
    pub fn kill(&self) {
        let pid = rustix::process::Pid::from_raw(self.client.pid() as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    }

    pub fn create(&mut self, arguments: Value) -> String {
        self.client.call("create_context", arguments).field("context_id")
    }

    pub fn run(&mut self, context: &str, code: &str) -> ToolResult {
        self.client.call("run_code", json!({"code": code, "context_id": context}))
    }

    /// stdout of a cell that must succeed.
    pub fn print(&mut self, context: &str, code: &str) -> String {
        let result = self.run(context, code);
        assert_eq!(result.json()["success"], true, "{code}: {}", result.json());
        result.field("stdout")
    }

    pub fn error(&mut self, tool: &str, arguments: Value) -> (String, String) {
        let result = self.client.call(tool, arguments);
        assert!(result.is_error(), "{tool} did not fail: {}", result.0);
        (result.field("code"), result.field("error"))
    }
}

pub fn pair(code: &str, text: &str) -> (String, String) {
    (code.into(), text.into())
}
