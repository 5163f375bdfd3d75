//! A small MCP client over a child's stdin and stdout, for transcript tests of the built binary.
//!
//! Legacy era (`initialize`), or no handshake at all. Every wait is bounded.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Longer than any deadline a test sets, shorter than a test runner's patience.
const PATIENCE: Duration = Duration::from_secs(120);

pub struct Client {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<Value>,
    answers: HashMap<u64, Value>,
    pub notifications: Vec<Value>,
    next: u64,
}

impl Client {
    /// Starts the server and shakes hands. The caller builds the command: arguments and environment are the test's business.
    pub fn start(command: Command) -> Self {
        let mut client = Self::connect(command);
        let hello = client.request(
            "initialize",
            json!({"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "testkit", "version": "0"}}),
        );
        assert!(hello["result"]["serverInfo"].is_object(), "{hello}");
        client.notify("notifications/initialized", json!({}));
        client
    }

    /// Starts the server and says nothing: for requests of the modern era, each of which says everything itself.
    pub fn connect(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the server starts");
        let stdout = BufReader::new(child.stdout.take().expect("stdout is piped"));
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                let value = serde_json::from_str(&line)
                    .unwrap_or_else(|e| json!({"not": "JSON-RPC", "line": line, "error": e.to_string()}));
                if sender.send(value).is_err() {
                    return;
                }
            }
        });
        let stdin = child.stdin.take();
        Self { child, stdin, lines, answers: HashMap::new(), notifications: Vec::new(), next: 0 }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn send_raw(&mut self, line: &str) {
        let stdin = self.stdin.as_mut().expect("stdin is open");
        stdin.write_all(line.as_bytes()).and_then(|()| stdin.write_all(b"\n")).expect("the server reads");
    }

    pub fn notify(&mut self, method: &str, params: Value) {
        self.send_raw(&json!({"jsonrpc": "2.0", "method": method, "params": params}).to_string());
    }

    /// Sends a request and does not wait for its answer.
    pub fn begin(&mut self, method: &str, params: Value) -> u64 {
        self.next += 1;
        let id = self.next;
        self.send_raw(&json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}).to_string());
        id
    }

    /// The answer to `id`; a second answer to the same request is a failure.
    pub fn wait(&mut self, id: u64) -> Value {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(answer) = self.answers.remove(&id) {
                return answer;
            }
            match self.lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(line) => self.sort(line),
                Err(RecvTimeoutError::Timeout) => panic!("no answer to request {id} within {PATIENCE:?}"),
                Err(RecvTimeoutError::Disconnected) => panic!("the server closed its output before it answered {id}"),
            }
        }
    }

    /// Whether `id` was answered among what has been read so far.
    pub fn has_answer(&self, id: u64) -> bool {
        self.answers.contains_key(&id)
    }

    /// Takes what has arrived until `done` is true.
    pub fn wait_until(&mut self, what: &str, mut done: impl FnMut(&Self) -> bool) {
        let end = Instant::now() + PATIENCE;
        while !done(self) {
            let left = end.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left).unwrap_or_else(|e| panic!("waiting until {what}: {e}"));
            self.sort(line);
        }
    }

    fn sort(&mut self, line: Value) {
        match line["id"].as_u64() {
            Some(id) => assert!(self.answers.insert(id, line).is_none(), "request {id} was answered twice"),
            None => self.notifications.push(line),
        }
    }

    pub fn request(&mut self, method: &str, params: Value) -> Value {
        let id = self.begin(method, params);
        self.wait(id)
    }

    pub fn begin_call(&mut self, tool: &str, arguments: Value) -> u64 {
        self.begin("tools/call", json!({"name": tool, "arguments": arguments}))
    }

    /// Calls a tool; the answer must be a result.
    pub fn call(&mut self, tool: &str, arguments: Value) -> ToolResult {
        let id = self.begin_call(tool, arguments);
        self.wait_call(id)
    }

    pub fn wait_call(&mut self, id: u64) -> ToolResult {
        let answer = self.wait(id);
        assert!(answer["result"].is_object(), "{answer}");
        ToolResult(answer["result"].clone())
    }

    /// Closes stdin and waits for the server's end.
    pub fn finish(mut self) -> std::process::ExitStatus {
        drop(self.stdin.take());
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end {
            if let Some(status) = self.child.try_wait().expect("the child can be waited for") {
                return status;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("the server did not end within {PATIENCE:?} after end of file");
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // A failed test: end of file first, so that the server cleans up; then no mercy.
        drop(self.stdin.take());
        for _ in 0..400 {
            if matches!(self.child.try_wait(), Ok(Some(_))) {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A tool's result, with the JSON of its first block.
#[derive(Debug, Clone)]
pub struct ToolResult(pub Value);

impl ToolResult {
    /// The JSON in `content[0].text`.
    pub fn json(&self) -> Value {
        let text = self.0["content"][0]["text"].as_str().unwrap_or_else(|| panic!("no text block: {}", self.0));
        serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"))
    }

    /// The object of the answer; see [`object_of`].
    pub fn facts(&self) -> Value {
        object_of(&self.0)
    }

    pub fn is_error(&self) -> bool {
        self.0["isError"] == true
    }

    pub fn field(&self, name: &str) -> String {
        self.json()[name].as_str().unwrap_or_else(|| panic!("no text member `{name}` in {}", self.json())).to_owned()
    }

    pub fn images(&self) -> Vec<&Value> {
        self.0["content"].as_array().map_or(Vec::new(), |c| c.iter().filter(|b| b["type"] == "image").collect())
    }
}

/// The object of a tool's result: `structuredContent`, or the JSON of a text block in a tool that sends it there alone. If
/// another text stands before that block, it is the member `content`.
pub fn object_of(result: &Value) -> Value {
    if let Some(object) = result.get("structuredContent") {
        return object.clone();
    }
    let texts: Vec<&str> =
        result["content"].as_array().into_iter().flatten().filter_map(|b| b["text"].as_str()).collect();
    let parsed = texts.iter().enumerate().rev().find_map(|(at, text)| {
        let object: Value = serde_json::from_str(text).ok()?;
        object.is_object().then_some((at, object))
    });
    match parsed {
        Some((0, object)) => object,
        Some((_, mut object)) => {
            object["content"] = texts[0].into();
            object
        }
        None => Value::Null,
    }
}
