//! A blocking HTTP/1.1 client and an MCP client on top of it, for tests of the built server.
//!
//! Blocking, so that a test with many clients gives each of them a thread. Every wait is bounded. Tests in an asynchronous
//! runtime use [`Connection`], which this client is made of, too.

mod connection;

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

pub use connection::{Answer, Connection};

/// Longer than any deadline a test sets, shorter than a test runner's patience.
const PATIENCE: Duration = Duration::from_secs(120);

/// What a client that takes everything says.
pub const BOTH: &str = "application/json, text/event-stream";

/// A blocking connection.
pub struct Wire(Connection<Blocking>);

impl Wire {
    pub fn open(address: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&address, PATIENCE)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Self(Connection::over(Blocking(stream))))
    }

    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        at_once(self.0.write(bytes))
    }

    pub fn send(&mut self, method: &str, target: &str, headers: &[(&str, &str)], body: &[u8]) -> io::Result<()> {
        at_once(self.0.send(method, target, headers, body))
    }

    pub fn ask(&mut self, method: &str, target: &str, headers: &[(&str, &str)], body: &[u8]) -> io::Result<Answer> {
        at_once(self.0.ask(method, target, headers, body))
    }

    pub fn head(&mut self) -> io::Result<Answer> {
        at_once(self.0.head())
    }

    pub fn answer(&mut self) -> io::Result<Answer> {
        at_once(self.0.answer())
    }

    pub fn body(&mut self, answer: &mut Answer) -> io::Result<()> {
        at_once(self.0.body(answer))
    }

    pub fn chunk(&mut self) -> io::Result<Option<Vec<u8>>> {
        at_once(self.0.chunk())
    }

    /// Everything until the server closes; a reset is an end, too.
    pub fn rest(&mut self) -> String {
        String::from_utf8_lossy(&at_once(self.0.rest())).into_owned()
    }

    /// Says that nothing more will be sent.
    pub fn half_close(&mut self) -> io::Result<()> {
        at_once(self.0.half_close())
    }

    /// Whether nothing was sent that has not been read.
    pub fn is_quiet(&mut self) -> bool {
        let stream = &self.0.stream().0;
        let waiting = stream.set_nonblocking(true).and_then(|()| stream.peek(&mut [0]));
        let _ = stream.set_nonblocking(false);
        self.0.read_ahead().is_empty() && waiting.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }

    pub fn set_patience(&mut self, patience: Duration) -> io::Result<()> {
        self.0.stream().0.set_read_timeout(Some(patience))
    }
}

/// A socket that blocks, as an asynchronous one that is always ready.
struct Blocking(TcpStream);

impl AsyncRead for Blocking {
    fn poll_read(mut self: Pin<&mut Self>, _: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let read = uninterrupted(|| self.0.read(buffer.initialize_unfilled()));
        Poll::Ready(read.map(|length| buffer.advance(length)))
    }
}

impl AsyncWrite for Blocking {
    fn poll_write(mut self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Poll::Ready(uninterrupted(|| self.0.write(bytes)))
    }

    fn poll_flush(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.0.flush())
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.0.shutdown(Shutdown::Write))
    }
}

/// Repeats a call that a signal interrupted.
fn uninterrupted<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// The result of a future over streams that are always ready.
fn at_once<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => result,
        Poll::Pending => unreachable!("a blocking socket is always ready"),
    }
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
        // The server closes a new connection on which nothing arrives for some seconds, so the body is made first.
        let body = message.to_string();
        let wire = match self.wire.take() {
            Some(wire) => wire,
            None => Wire::open(self.account.address)?,
        };
        let wire = self.wire.insert(wire);
        wire.send("POST", &self.path, &headers, body.as_bytes())?;
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

    /// The object of a result that is no error.
    pub fn good(&mut self, tool: &str, arguments: Value) -> Value {
        let answer = self.call(tool, arguments.clone());
        assert_eq!(answer["result"]["isError"], false, "{tool} {arguments}: {answer}");
        crate::client::object_of(&answer["result"])
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
