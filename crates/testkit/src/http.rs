//! An HTTP/1.1 client that sends exactly the bytes it is told to, and an MCP client on top of it, for tests of the built server.
//!
//! Blocking, so that a test with many clients gives each of them a thread. Every wait is bounded.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};

/// Longer than any deadline a test sets, shorter than a test runner's patience.
const PATIENCE: Duration = Duration::from_secs(120);

/// What a client that takes everything says.
pub const BOTH: &str = "application/json, text/event-stream";

/// One connection.
pub struct Wire {
    stream: BufReader<TcpStream>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("not JSON: {} {}", self.status, self.text()))
    }

    /// The JSON-RPC messages in it, whether it is one document or a stream.
    pub fn messages(&self) -> Vec<Value> {
        let is_stream = self.header("content-type").is_some_and(|kind| kind.starts_with("text/event-stream"));
        if !is_stream {
            return if self.body.is_empty() { Vec::new() } else { vec![self.json()] };
        }
        let text = self.text();
        let data = text.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| !data.is_empty());
        data.map(|data| serde_json::from_str(data).unwrap_or_else(|e| panic!("{e}: {data}"))).collect()
    }
}

impl Wire {
    pub fn open(address: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&address, PATIENCE)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Self { stream: BufReader::new(stream) })
    }

    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.get_mut().write_all(bytes)
    }

    /// A request with a length, a host if none is given, and nothing else that was not asked for.
    pub fn send(&mut self, method: &str, target: &str, headers: &[(&str, &str)], body: &[u8]) -> io::Result<()> {
        let mut head = format!("{method} {target} HTTP/1.1\r\n");
        if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
            head += "host: localhost\r\n";
        }
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        if method == "POST" || !body.is_empty() {
            head += &format!("content-length: {}\r\n", body.len());
        }
        self.write(&[head.as_bytes(), b"\r\n", body].concat())
    }

    pub fn ask(&mut self, method: &str, target: &str, headers: &[(&str, &str)], body: &[u8]) -> io::Result<Answer> {
        self.send(method, target, headers, body)?;
        let mut answer = self.head()?;
        if method != "HEAD" {
            self.body(&mut answer)?;
        }
        Ok(answer)
    }

    /// Status line and headers. An error of the kind `UnexpectedEof` if the server closed before the first byte.
    pub fn head(&mut self) -> io::Result<Answer> {
        let line = self.line()?;
        let status = line.split(' ').nth(1).and_then(|status| status.parse().ok());
        let mut answer = Answer { status: status.ok_or_else(|| broken(&line))?, ..Answer::default() };
        loop {
            let line = self.line()?;
            if line.is_empty() {
                return Ok(answer);
            }
            let (name, value) = line.split_once(':').ok_or_else(|| broken(&line))?;
            answer.headers.push((name.to_owned(), value.trim().to_owned()));
        }
    }

    /// An answer of which a part is missing is an error.
    pub fn answer(&mut self) -> io::Result<Answer> {
        let mut answer = self.head()?;
        self.body(&mut answer)?;
        Ok(answer)
    }

    /// The body that belongs to a head.
    pub fn body(&mut self, answer: &mut Answer) -> io::Result<()> {
        if let Some(length) = answer.header("content-length") {
            let length: usize = length.parse().map_err(|_| broken(length))?;
            answer.body.resize(length, 0);
            self.stream.read_exact(&mut answer.body)?;
        } else if answer.header("transfer-encoding").is_some() {
            while let Some(chunk) = self.chunk()? {
                answer.body.extend(chunk);
            }
        }
        Ok(())
    }

    /// The next piece of a chunked body.
    pub fn chunk(&mut self) -> io::Result<Option<Vec<u8>>> {
        let line = self.line()?;
        let length = usize::from_str_radix(&line, 16).map_err(|_| broken(&line))?;
        let mut chunk = vec![0; length + 2];
        self.stream.read_exact(&mut chunk)?;
        chunk.truncate(length);
        Ok((length > 0).then_some(chunk))
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = Vec::new();
        self.stream.read_until(b'\n', &mut line)?;
        match line.as_slice() {
            [text @ .., b'\r', b'\n'] => Ok(String::from_utf8_lossy(text).into_owned()),
            [] => Err(io::ErrorKind::UnexpectedEof.into()),
            other => Err(broken(&String::from_utf8_lossy(other))),
        }
    }

    /// Everything until the server closes; a reset is an end, too.
    pub fn rest(&mut self) -> String {
        let mut rest = Vec::new();
        let _ = self.stream.read_to_end(&mut rest);
        String::from_utf8_lossy(&rest).into_owned()
    }

    /// Nothing more will be sent.
    pub fn half_close(&self) -> io::Result<()> {
        self.stream.get_ref().shutdown(Shutdown::Write)
    }

    /// Nothing was sent that has not been read.
    pub fn is_quiet(&mut self) -> bool {
        let stream = self.stream.get_ref();
        let waiting = stream.set_nonblocking(true).and_then(|()| stream.peek(&mut [0]));
        let _ = stream.set_nonblocking(false);
        self.stream.buffer().is_empty() && waiting.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }

    pub fn set_patience(&self, patience: Duration) -> io::Result<()> {
        self.stream.get_ref().set_read_timeout(Some(patience))
    }
}

fn broken(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("not HTTP: {what:?}"))
}

/// In what way a client speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Era {
    /// 2026-07-28: everything is said in each request.
    Modern,
    /// An older revision, with `initialize` and a session.
    Legacy(&'static str),
    /// The documents' plain POST: no revision, no session.
    Bare,
}

pub const ERAS: [Era; 4] = [Era::Modern, Era::Legacy("2025-11-25"), Era::Legacy("2025-03-26"), Era::Bare];

/// Whose requests these are, and what no answer may ever show.
#[derive(Clone)]
pub struct Account {
    pub address: SocketAddr,
    pub token: Option<String>,
    pub forbidden: Arc<[String]>,
}

impl Account {
    pub fn headers<'a>(&'a self, bearer: &'a mut String, more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
        let mut headers = Vec::new();
        if let Some(token) = &self.token {
            *bearer = format!("Bearer {token}");
            headers.push(("authorization", bearer.as_str()));
        }
        headers.extend(more);
        headers
    }

    /// One request on a connection of its own.
    pub fn ask(&self, method: &str, target: &str, headers: &[(&str, &str)], body: &[u8]) -> io::Result<Answer> {
        let mut bearer = String::new();
        let answer = Wire::open(self.address)?.ask(method, target, &self.headers(&mut bearer, headers), body)?;
        self.inspect(&answer);
        Ok(answer)
    }

    /// A43: whatever a client can see.
    pub fn inspect(&self, answer: &Answer) {
        let text = answer.text();
        let head: String = answer.headers.iter().map(|(name, value)| format!("{name}: {value}\n")).collect();
        for word in self.forbidden.iter() {
            let shown = text.find(word.as_str()).map(|at| &text[text.floor_char_boundary(at.saturating_sub(200))..]);
            assert!(shown.is_none(), "an answer shows `{word}`: {:.600}", shown.unwrap_or_default());
            assert!(!head.contains(word.as_str()), "a header shows `{word}`: {head}");
        }
    }
}

/// A client of one endpoint on one connection. Its requests have the ids 0, 1, 2 and so on.
pub struct Mcp {
    pub account: Account,
    pub path: String,
    pub era: Era,
    pub session: Option<String>,
    /// Declares the Tasks extension.
    pub tasks: bool,
    /// In what form it takes answers.
    pub accept: &'static str,
    wire: Option<Wire>,
    next: u64,
}

impl Mcp {
    pub fn new(account: &Account, dialect: &str, era: Era) -> Self {
        let mut client = Self {
            account: account.clone(),
            path: format!("/mcp/{dialect}"),
            era,
            session: None,
            tasks: false,
            accept: BOTH,
            wire: None,
            next: 0,
        };
        if let Era::Legacy(version) = era {
            let info = json!({ "name": "testkit", "version": "0" });
            let hello = json!({ "protocolVersion": version, "capabilities": {}, "clientInfo": info });
            let id = client.next_id();
            let answer = client.send(&request(id, "initialize", hello)).expect("an answer");
            assert_eq!(answer.json()["result"]["protocolVersion"], version, "{}", answer.text());
            client.session = answer.header("mcp-session-id").map(str::to_owned);
            assert!(client.session.is_some(), "{answer:?}");
        }
        client
    }

    pub fn next_id(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    /// A message as this client would say it.
    pub fn begin(&mut self, message: &Value) -> io::Result<&mut Wire> {
        let mut message = message.clone();
        let method = message["method"].as_str().unwrap_or_default().to_owned();
        let mut own = vec![("content-type", "application/json".to_owned()), ("accept", self.accept.to_owned())];
        match self.era {
            Era::Modern => {
                let capabilities = match self.tasks {
                    true => json!({ "extensions": { "io.modelcontextprotocol/tasks": {} } }),
                    false => json!({}),
                };
                let meta = &mut message["params"]["_meta"];
                meta["io.modelcontextprotocol/protocolVersion"] = "2026-07-28".into();
                meta["io.modelcontextprotocol/clientCapabilities"] = capabilities;
                meta["io.modelcontextprotocol/clientInfo"] = json!({ "name": "testkit", "version": "0" });
                own.push(("mcp-protocol-version", "2026-07-28".into()));
                own.push(("mcp-method", method));
                let params = &message["params"];
                let name = ["name", "uri", "taskId"].iter().find_map(|key| params[key].as_str());
                if let Some(name) = name {
                    own.push(("mcp-name", header_text(name)));
                }
            }
            Era::Legacy(version) if self.session.is_some() => {
                own.push(("mcp-protocol-version", version.into()));
                own.extend(self.session.clone().map(|session| ("mcp-session-id", session)));
            }
            Era::Legacy(_) | Era::Bare => {}
        }
        let own: Vec<(&str, &str)> = own.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let mut bearer = String::new();
        let headers = self.account.headers(&mut bearer, &own);
        let wire = match self.wire.take() {
            Some(wire) => wire,
            None => Wire::open(self.account.address)?,
        };
        let wire = self.wire.insert(wire);
        wire.send("POST", &self.path, &headers, message.to_string().as_bytes())?;
        Ok(wire)
    }

    /// The next message goes over a new connection.
    pub fn reconnect(&mut self) {
        self.wire = None;
    }

    /// The connection of what was begun.
    pub fn wire(&mut self) -> &mut Wire {
        self.wire.as_mut().expect("something was begun")
    }

    pub fn send(&mut self, message: &Value) -> io::Result<Answer> {
        let answer = self.begin(message)?.answer()?;
        self.account.inspect(&answer);
        if answer.header("connection") == Some("close") {
            self.wire = None;
        }
        Ok(answer)
    }

    /// The answer to a request: exactly one, with its id.
    pub fn try_request(&mut self, method: &str, params: Value) -> io::Result<Value> {
        let id = self.next_id();
        let answer = self.send(&request(id, method, params))?;
        Ok(only(&answer, id))
    }

    pub fn request(&mut self, method: &str, params: Value) -> Value {
        self.try_request(method, params).unwrap_or_else(|error| panic!("{method}: {error}"))
    }

    /// What a tool answers, result or error.
    pub fn call(&mut self, tool: &str, arguments: Value) -> Value {
        self.request("tools/call", json!({ "name": tool, "arguments": arguments }))
    }

    /// A result that is no error, as `structuredContent` has it.
    pub fn good(&mut self, tool: &str, arguments: Value) -> Value {
        let answer = self.call(tool, arguments.clone());
        assert_eq!(answer["result"]["isError"], false, "{tool} {arguments}: {answer}");
        answer["result"]["structuredContent"].clone()
    }

    pub fn notify(&mut self, method: &str, params: Value) -> Answer {
        self.send(&json!({ "jsonrpc": "2.0", "method": method, "params": params })).expect("an answer")
    }
}

/// A header carries plain text only; the rest as the protocol has it.
fn header_text(text: &str) -> String {
    let plain = text.bytes().all(|byte| (0x20..0x7f).contains(&byte)) && text.trim() == text;
    if plain { text.to_owned() } else { format!("=?base64?{}?=", BASE64_STANDARD.encode(text)) }
}

pub fn request(id: impl Into<Value>, method: &str, params: Value) -> Value {
    json!({ "jsonrpc": "2.0", "id": id.into(), "method": method, "params": params })
}

/// The one answer to `id`. Another id, a second answer or none is a failure.
pub fn only(answer: &Answer, id: u64) -> Value {
    let mut answers: Vec<Value> = answer.messages().into_iter().filter(|message| message.get("id").is_some()).collect();
    assert_eq!(answers.len(), 1, "{answer:?}");
    let one = answers.remove(0);
    assert_eq!(one["id"], id, "{one}");
    one
}
