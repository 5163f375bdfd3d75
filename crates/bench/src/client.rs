//! Minimal MCP clients over pipes and over HTTP/1.1 keep-alive, so that no SDK stands between the clock and the server.
//!
//! The clock runs from the first byte written to the last byte of the answer. Every answer is then read and must be a
//! success.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::BenchError;
use crate::process::{Children, LineChild};

const PATIENCE: Duration = Duration::from_secs(180);

/// A call of a tool, serialized once and sent often.
#[derive(Debug, Clone)]
pub(crate) struct BenchCall(String);

impl BenchCall {
    pub(crate) fn new(tool: &str, arguments: Value) -> Self {
        Self(json!({ "name": tool, "arguments": arguments }).to_string())
    }

    fn request(&self, id: u64) -> String {
        format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{}}}"#, self.0)
    }
}

/// The result of a tool and the time it took, in seconds.
#[derive(Debug)]
pub(crate) struct TimedResult {
    pub seconds: f64,
    pub result: Value,
}

impl TimedResult {
    /// Returns a text member of the structured result, or of the JSON in the first block of a result that has none.
    pub(crate) fn field(&self, name: &str) -> Result<String, BenchError> {
        let written = || serde_json::from_str(self.result["content"][0]["text"].as_str()?).ok();
        let object = self.result.get("structuredContent").cloned().or_else(written).unwrap_or(Value::Null);
        object[name]
            .as_str()
            .map(str::to_owned)
            .ok_or_else(|| BenchError::Said(format!("no `{name}` in an answer: {}", brief(&self.result))))
    }

    /// Checks that the code printed exactly `expected`; the dialects have two names for the output.
    pub(crate) fn printed(self, expected: &str) -> Result<Self, BenchError> {
        let printed = self.field("stdout").or_else(|_| self.field("output"))?;
        match printed.trim() == expected {
            true => Ok(self),
            false => Err(BenchError::Said(format!("expected `{expected}` on stdout: {}", brief(&self.result)))),
        }
    }
}

/// A connection to a server under test.
pub(crate) trait Client {
    fn call(&mut self, call: &BenchCall) -> Result<TimedResult, BenchError>;

    /// Repeats the call until the server can perform it; the server refuses it before that. An error other than a
    /// refusal is final.
    fn call_when_ready(&mut self, call: &BenchCall) -> Result<TimedResult, BenchError> {
        let end = Instant::now() + PATIENCE;
        loop {
            match self.call(call) {
                Err(BenchError::Refused(_)) if Instant::now() < end => std::thread::sleep(Duration::from_millis(20)),
                other => return other,
            }
        }
    }
}

/// Returns the result in an answer to `tools/call` if it is a success.
fn success(message: &Value) -> Result<Value, BenchError> {
    let result = &message["result"];
    if result.is_object() && result["isError"] != true {
        return Ok(result.clone());
    }
    Err(BenchError::Refused(format!("a call failed: {}", brief(message))))
}

fn brief(value: &Value) -> String {
    value.to_string().chars().take(300).collect()
}

fn hello(id: u64) -> String {
    let info = json!({ "name": "sandpool-bench", "version": env!("CARGO_PKG_VERSION") });
    let params = json!({ "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": info });
    json!({ "jsonrpc": "2.0", "id": id, "method": "initialize", "params": params }).to_string()
}

const INITIALIZED: &str = r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#;

/// A client over the standard input and output of a child process.
#[derive(Debug)]
pub(crate) struct Stdio {
    lines: LineChild,
    next: u64,
}

impl Stdio {
    pub(crate) fn start(command: &mut Command, children: &Children) -> Result<Self, BenchError> {
        let mut client = Self { lines: LineChild::start(command, children)?, next: 0 };
        client.lines.write(&format!("{}\n", hello(0)))?;
        client.wait(0)?;
        client.lines.write(&format!("{INITIALIZED}\n"))?;
        Ok(client)
    }

    /// Returns the process id of the server.
    pub(crate) fn id(&self) -> u32 {
        self.lines.process.id()
    }

    /// Returns the result of `tools/list`.
    pub(crate) fn list_tools(&mut self) -> Result<Value, BenchError> {
        self.next += 1;
        let id = self.next;
        self.lines
            .write(&format!("{}\n", json!({ "jsonrpc": "2.0", "id": id, "method": "tools/list", "params": {} })))?;
        success(&self.wait(id)?.1)
    }

    /// Sends a call without waiting for its answer.
    pub(crate) fn begin(&mut self, call: &BenchCall) -> Result<u64, BenchError> {
        self.next += 1;
        let mut line = call.request(self.next);
        line.push('\n');
        self.lines.write(&line)?;
        Ok(self.next)
    }

    /// Returns the next answer to any of the calls, with its id and its time of arrival.
    pub(crate) fn next(&mut self) -> Result<(u64, Instant, Value), BenchError> {
        loop {
            let line = self.lines.read()?;
            let arrived = Instant::now();
            let message: Value =
                serde_json::from_slice(line).map_err(|error| BenchError::Said(format!("not JSON: {error}")))?;
            // A request of the server has an id, too.
            if let (Some(id), None) = (message["id"].as_u64(), message.get("method")) {
                return Ok((id, arrived, message));
            }
        }
    }

    fn wait(&mut self, wanted: u64) -> Result<(Instant, Value), BenchError> {
        loop {
            let (id, arrived, message) = self.next()?;
            if id == wanted {
                return Ok((arrived, message));
            }
        }
    }

    /// Returns the result of a message from `next` if it is a success.
    pub(crate) fn result(message: &Value) -> Result<Value, BenchError> {
        success(message)
    }
}

impl Client for Stdio {
    fn call(&mut self, call: &BenchCall) -> Result<TimedResult, BenchError> {
        let start = Instant::now();
        let id = self.begin(call)?;
        let (arrived, message) = self.wait(id)?;
        Ok(TimedResult { seconds: (arrived - start).as_secs_f64(), result: success(&message)? })
    }
}

/// A client over one persistent connection with `TCP_NODELAY`.
#[derive(Debug)]
pub(crate) struct Http {
    address: SocketAddr,
    stream: BufReader<TcpStream>,
    head: String,
    next: u64,
}

fn connect(address: SocketAddr) -> Result<BufReader<TcpStream>, BenchError> {
    let stream = TcpStream::connect_timeout(&address, PATIENCE).map_err(BenchError::io("cannot connect"))?;
    let set = stream.set_nodelay(true).and_then(|()| stream.set_read_timeout(Some(PATIENCE)));
    set.map_err(BenchError::io("a socket option"))?;
    Ok(BufReader::new(stream))
}

impl Http {
    pub(crate) fn open(address: SocketAddr) -> Result<Self, BenchError> {
        let head = "POST /mcp HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
                    accept: application/json, text/event-stream\r\n";
        let mut client = Self { address, stream: connect(address)?, head: head.into(), next: 0 };
        client.post(&hello(0))?;
        let (session, _) = client.answer()?;
        if let Some(session) = session {
            client.head += &format!("mcp-session-id: {session}\r\nmcp-protocol-version: 2025-06-18\r\n");
        }
        client.post(INITIALIZED)?;
        client.answer()?;
        Ok(client)
    }

    /// Continues the session over a new connection: the server closes those that are idle for more than a minute.
    pub(crate) fn reconnect(&mut self) -> Result<(), BenchError> {
        self.stream = connect(self.address)?;
        Ok(())
    }

    pub(crate) fn stream(&self) -> &TcpStream {
        self.stream.get_ref()
    }

    fn post(&mut self, body: &str) -> Result<(), BenchError> {
        let request = format!("{}content-length: {}\r\n\r\n{body}", self.head, body.len());
        self.stream.get_mut().write_all(request.as_bytes()).map_err(BenchError::io("cannot send a request"))
    }

    /// Sends a call without waiting for its answer.
    pub(crate) fn begin(&mut self, call: &BenchCall) -> Result<(), BenchError> {
        self.next += 1;
        self.post(&call.request(self.next))
    }

    /// Waits for the answer to the call that `begin` sent.
    pub(crate) fn finish(&mut self) -> Result<(Instant, Value), BenchError> {
        let (_, body) = self.answer()?;
        let arrived = Instant::now();
        // The body is a JSON document, or a stream whose last event is the answer.
        let text = match body.first() {
            Some(b'{') => &body[..],
            _ => body.rsplit(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"data: ")).unwrap_or_default(),
        };
        let message = serde_json::from_slice(text).map_err(|error| BenchError::Said(format!("not JSON: {error}")))?;
        Ok((arrived, success(&message)?))
    }

    /// Reads an answer and returns the id of the session, if the answer contains one, and the body.
    fn answer(&mut self) -> Result<(Option<String>, Vec<u8>), BenchError> {
        let failed = BenchError::io("cannot read an answer");
        let (mut session, mut length, mut line) = (None, None, String::new());
        loop {
            line.clear();
            if self.stream.read_line(&mut line).map_err(&failed)? == 0 {
                return Err(BenchError::Said("the server closed the connection".into()));
            }
            let Some((name, value)) = line.trim_end().split_once(": ") else {
                if line == "\r\n" {
                    break;
                }
                continue; // the status line: the body says what is wrong
            };
            match name.to_ascii_lowercase().as_str() {
                "mcp-session-id" => session = Some(value.to_owned()),
                "content-length" => length = value.parse().ok(),
                _ => {}
            }
        }
        let body = match length {
            Some(length) => {
                let mut body = vec![0; length];
                self.stream.read_exact(&mut body).map_err(&failed)?;
                body
            }
            None => self.chunks().map_err(&failed)?,
        };
        Ok((session, body))
    }

    fn chunks(&mut self) -> std::io::Result<Vec<u8>> {
        let mut body = Vec::new();
        loop {
            let mut size = String::new();
            self.stream.read_line(&mut size)?;
            let size = usize::from_str_radix(size.trim_end(), 16).map_err(std::io::Error::other)?;
            let start = body.len();
            body.resize(start + size + 2, 0);
            self.stream.read_exact(&mut body[start..])?;
            body.truncate(start + size);
            if size == 0 {
                return Ok(body);
            }
        }
    }
}

impl Client for Http {
    fn call(&mut self, call: &BenchCall) -> Result<TimedResult, BenchError> {
        let start = Instant::now();
        self.begin(call)?;
        let (arrived, result) = self.finish()?;
        Ok(TimedResult { seconds: (arrived - start).as_secs_f64(), result })
    }
}

/// Returns whether a plain GET is answered with 200.
pub(crate) fn is_ok(address: SocketAddr, path: &str) -> bool {
    let asked = || -> std::io::Result<bool> {
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        stream.write_all(format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer.starts_with("HTTP/1.1 200"))
    };
    asked().unwrap_or(false)
}
