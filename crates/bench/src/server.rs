//! The server under test: the binary as a child process, with a separate configuration and state directory.

use std::fs::File;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::client::{self, BenchCall, Client, TimedResult};
use crate::process::{Process, command};
use crate::{Bench, BenchError};

const PATIENCE: Duration = Duration::from_secs(180);

/// How many sandboxes wait ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pool {
    /// The pool has its default configuration.
    Full,
    /// No sandbox is ever ready: every sandbox is created on request.
    Empty,
}

/// Setting that allows as many contexts as a figure creates.
const ROOM: &str = "dialect.sandpool.max_contexts = 100000\n";

impl Pool {
    fn settings(self) -> &'static str {
        match self {
            Self::Full => "",
            Self::Empty => "ready_max = 0\ndialect.sandpool.pool_size = 0\ndialect.workbench.pool_size = 0\n",
        }
    }
}

/// Starts `sandpool stdio` with a client and with additional lines of configuration.
pub(crate) fn stdio(bench: &Bench, dialect: &str, pool: Pool, more: &str) -> Result<client::Stdio, BenchError> {
    let (mut command, log) = child(bench, pool, more)?;
    command.args(["stdio", "--dialect", dialect]);
    client::Stdio::start(&mut command, &bench.children).map_err(|error| with_log(error, &log))
}

/// A running `sandpool serve` on a separate port.
pub(crate) struct Http {
    pub address: SocketAddr,
    /// The server process, which ends when this value is dropped.
    _process: Process,
}

impl Http {
    /// Starts a server with additional lines of configuration, and waits until it is ready.
    pub(crate) fn start(bench: &Bench, pool: Pool, more: &str) -> Result<Self, BenchError> {
        let (mut command, log) = child(bench, pool, more)?;
        command.args(["serve", "--listen", "127.0.0.1:0"]).stdin(Stdio::null()).stdout(Stdio::null());
        let mut process = Process::start(&mut command, &bench.children)?;
        let address = until(bench, || {
            if process.has_ended() {
                return Some(Err(with_log(BenchError::Said("the server ended".into()), &log)));
            }
            let text = std::fs::read_to_string(&log).unwrap_or_default();
            text.split("listening: http://").nth(1)?.split_once('/')?.0.parse().ok().map(Ok)
        })??;
        until(bench, || client::is_ok(address, "/readyz").then_some(()))?;
        Ok(Self { address, _process: process })
    }

    pub(crate) fn connect(&self) -> Result<client::Http, BenchError> {
        client::Http::open(self.address)
    }
}

/// Polls `look` every two milliseconds, a pause that is short compared to the time that is waited for.
fn until<T>(bench: &Bench, mut look: impl FnMut() -> Option<T>) -> Result<T, BenchError> {
    let end = Instant::now() + PATIENCE;
    while Instant::now() < end {
        bench.children.check()?;
        if let Some(found) = look() {
            return Ok(found);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Err(BenchError::Said(format!("the server was not ready within {} s", PATIENCE.as_secs())))
}

/// Returns the command and the file of its log.
fn child(bench: &Bench, pool: Pool, more: &str) -> Result<(Command, PathBuf), BenchError> {
    let name = format!("server-{}", bench.next_number());
    let config = bench
        .workplace
        .write(&format!("{name}.toml"), &[&bench.subject.settings, ROOM, pool.settings(), more].concat())?;
    let log = bench.workplace.path().join(format!("{name}.log"));
    let file = File::create(&log).map_err(BenchError::io("cannot write a temporary file"))?;
    let mut command = command(&bench.subject.executable);
    command.args(["--config".as_ref(), config.as_os_str()]);
    command.args(["--state-dir".as_ref(), bench.workplace.path().join(&name).as_os_str()]).stderr(file);
    command.envs(bench.subject.environment.iter().map(|(name, value)| (name, value)));
    Ok((command, log))
}

/// Adds the last line of the server's log to an error, because it usually says why the server ended.
fn with_log(error: BenchError, log: &PathBuf) -> BenchError {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    match (error, text.lines().rfind(|line| !line.is_empty())) {
        (BenchError::Said(why), Some(last)) => BenchError::Said(format!("{why}: {last}")),
        (error, _) => error,
    }
}

/// Creates a context in the default dialect.
pub(crate) fn create(language: &str) -> BenchCall {
    BenchCall::new("create_context", json!({ "language": language }))
}

pub(crate) fn run(context: &str, language: &str, code: &str) -> BenchCall {
    BenchCall::new("run_code", json!({ "context": context, "language": language, "code": code }))
}

pub(crate) fn stop(context: &str) -> BenchCall {
    BenchCall::new("stop_context", json!({ "context": context }))
}

/// Calls a tool that does nothing except looking into a table of the server.
pub(crate) fn no_op() -> BenchCall {
    BenchCall::new("list_contexts", json!({}))
}

/// Runs code once, in a fresh process.
pub(crate) fn one_shot(conversation: &str, code: &str) -> BenchCall {
    let arguments: Value = json!({ "conversationId": conversation, "language": "python", "code": code });
    BenchCall::new("sandbox.run_code", arguments)
}

/// Creates a context and runs its first cell; returns the context and the time of both together.
pub(crate) fn first_cell(
    client: &mut dyn Client,
    language: &str,
    code: &str,
    prints: &str,
) -> Result<(String, f64), BenchError> {
    let created = client.call(&create(language))?;
    let context = created.field("context")?;
    let answer: TimedResult = client.call(&run(&context, language, code))?.printed(prints)?;
    Ok((context, created.seconds + answer.seconds))
}
