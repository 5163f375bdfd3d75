//! The server under test: the binary as a child process, with a configuration and a state directory of its own.

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

/// Whether sandboxes wait ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pool {
    /// As configured by default.
    Full,
    /// None is ever ready: every sandbox is made when it is asked for.
    Empty,
}

/// Room for as many contexts as a figure makes.
const ROOM: &str = "dialect.sandpool.max_contexts = 100000\n";

impl Pool {
    fn settings(self) -> &'static str {
        match self {
            Self::Full => "",
            Self::Empty => "ready_max = 0\ndialect.sandpool.pool_size = 0\ndialect.workbench.pool_size = 0\n",
        }
    }
}

/// `sandpool stdio` with a client, and lines of configuration besides.
pub fn stdio(bench: &Bench, dialect: &str, pool: Pool, more: &str) -> Result<client::Stdio, BenchError> {
    let (mut command, log) = child(bench, pool, more)?;
    command.args(["stdio", "--dialect", dialect]);
    client::Stdio::start(&mut command, &bench.children).map_err(|error| with_log(error, &log))
}

/// `sandpool serve` on a port of its own.
pub struct Http {
    pub address: SocketAddr,
    /// Ends with it.
    _process: Process,
}

impl Http {
    pub fn start(bench: &Bench, pool: Pool) -> Result<Self, BenchError> {
        let (mut command, log) = child(bench, pool, "")?;
        command.args(["serve", "--listen", "127.0.0.1:0"]).stdin(Stdio::null()).stdout(Stdio::null());
        let mut process = Process::start(&mut command, &bench.children)?;
        let address = until(bench, || {
            if process.has_ended() {
                return Some(Err(with_log(BenchError::Said("the server ended".into()), &log)));
            }
            let text = std::fs::read_to_string(&log).unwrap_or_default();
            text.split("listening: http://").nth(1)?.split_once('/')?.0.parse().ok().map(Ok)
        })??;
        Ok(Self { address, _process: process })
    }

    pub fn wait_ready(&self, bench: &Bench) -> Result<(), BenchError> {
        until(bench, || client::is_ok(self.address, "/readyz").then_some(()))
    }

    pub fn connect(&self) -> Result<client::Http, BenchError> {
        client::Http::open(self.address)
    }
}

/// Looks every other millisecond, which is little beside what is waited for.
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

/// The command, and the file its log goes to.
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

/// What the server said last is why it is gone.
fn with_log(error: BenchError, log: &PathBuf) -> BenchError {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    match (error, text.lines().rfind(|line| !line.is_empty())) {
        (BenchError::Said(why), Some(last)) => BenchError::Said(format!("{why}: {last}")),
        (error, _) => error,
    }
}

/// The calls of the default dialect.
pub fn create(language: &str) -> BenchCall {
    BenchCall::new("create_context", json!({ "language": language }))
}

pub fn run(context: &str, language: &str, code: &str) -> BenchCall {
    BenchCall::new("run_code", json!({ "context": context, "language": language, "code": code }))
}

pub fn stop(context: &str) -> BenchCall {
    BenchCall::new("stop_context", json!({ "context": context }))
}

/// The tool that does nothing: it looks into a table of the server's.
pub fn no_op() -> BenchCall {
    BenchCall::new("list_contexts", json!({}))
}

/// One-shot: a fresh process a call.
pub fn one_shot(conversation: &str, code: &str) -> BenchCall {
    let arguments: Value = json!({ "conversationId": conversation, "language": "python", "code": code });
    BenchCall::new("sandbox.run_code", arguments)
}

/// A new context that has run its first cell; how long both took together.
pub fn first_cell(
    client: &mut dyn Client,
    language: &str,
    code: &str,
    prints: &str,
) -> Result<(String, f64), BenchError> {
    let created = client.call(&create(language))?;
    let context = created.field("context")?.to_owned();
    let answer: TimedResult = client.call(&run(&context, language, code))?.printed(prints)?;
    Ok((context, created.seconds + answer.seconds))
}
