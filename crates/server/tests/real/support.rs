//! Starts the built binary with a state directory and settings of the test's own.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use testkit::client::{Client, ToolResult};

pub struct Server {
    pub client: Client,
    /// Removed with the server, unless several share it.
    pub state: Option<StateDir>,
}

pub struct StateDir(pub PathBuf);

impl StateDir {
    pub fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("sandpool-test-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }
}

impl Drop for StateDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The binary under test, with a state directory of its own and whatever settings the test wants.
#[allow(clippy::disallowed_methods, reason = "the test starts the program it tests")]
pub fn stdio(state: &Path, settings: &str) -> Command {
    let config = state.join("sandpool.toml");
    std::fs::write(&config, settings).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_sandpool"));
    command
        .args(["stdio", "--dialect", "agentrun", "--config"])
        .arg(config)
        .arg("--state-dir")
        .arg(state.join("state"));
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

/// Everything of ours the host can count: sandbox processes, mounts, cgroups, loop devices.
#[derive(Debug, PartialEq, Eq)]
pub struct Leftovers {
    processes: usize,
    mounts: usize,
    cgroups: usize,
    loops: usize,
}

impl Leftovers {
    pub fn count() -> Self {
        Self {
            processes: processes(),
            mounts: mounts(),
            cgroups: cgroups(Path::new("/sys/fs/cgroup"), 0),
            loops: loops(),
        }
    }

    /// Waits (bounded) until the counts are what they were.
    pub fn assert_same(&self) {
        for _ in 0..1000 {
            if Self::count() == *self {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        assert_eq!(&Self::count(), self, "left over");
    }
}

/// Whatever runs in a cgroup of ours: guests, interpreters, and what code has started. (By name would find other tests' guests.)
fn processes() -> usize {
    let Ok(processes) = std::fs::read_dir("/proc") else { return 0 };
    processes
        .flatten()
        .filter_map(|p| std::fs::read_to_string(p.path().join("cgroup")).ok())
        .filter(|cgroups| cgroups.contains("/sandpool"))
        .count()
}

fn mounts() -> usize {
    std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default().lines().count()
}

fn cgroups(dir: &Path, depth: usize) -> usize {
    let Ok(entries) = std::fs::read_dir(dir) else { return 0 };
    entries
        .flatten()
        .filter(|e| depth < 8 && e.file_type().is_ok_and(|t| t.is_dir()))
        .map(|e| usize::from(e.path().to_string_lossy().contains("sandpool")) + cgroups(&e.path(), depth + 1))
        .sum()
}

fn loops() -> usize {
    let Ok(devices) = std::fs::read_dir("/sys/block") else { return 0 };
    devices.flatten().filter(|d| d.path().join("loop/backing_file").exists()).count()
}
