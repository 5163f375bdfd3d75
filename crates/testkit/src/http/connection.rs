//! One HTTP/1.1 connection over any stream: it sends exactly the bytes that it is told to and reads answers strictly.
//!
//! It knows nothing of MCP and sets no deadlines; whoever uses it bounds the waiting.

use std::io;
use std::net::SocketAddr;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

/// The answer to a request. The body is empty until it has been read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Answer {
    pub status: u16,
    /// What the status line says after the number.
    pub reason: String,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("not JSON: {} {}", self.status, self.text()))
    }

    /// The text of a tool's result.
    pub fn tool_text(&self) -> String {
        let json = self.json();
        json["result"]["content"][0]["text"].as_str().unwrap_or_else(|| panic!("no text: {json}")).to_owned()
    }

    /// The status and the code of a JSON-RPC error.
    pub fn refusal(&self) -> (u16, i64) {
        (self.status, self.json()["error"]["code"].as_i64().unwrap_or_else(|| panic!("no error: {self:?}")))
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

/// A connection to a server or a proxy.
pub struct Connection<S> {
    stream: BufReader<S>,
}

impl Connection<TcpStream> {
    pub async fn open(address: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Self::over(stream))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Connection<S> {
    pub fn over(stream: S) -> Self {
        Self { stream: BufReader::new(stream) }
    }

    /// The stream below. Bytes that were read ahead are not in it any more.
    pub fn stream(&mut self) -> &mut S {
        self.stream.get_mut()
    }

    /// The stream below, for another protocol. Nothing may have been read ahead.
    pub fn into_stream(self) -> S {
        assert!(self.stream.buffer().is_empty(), "there is more to read");
        self.stream.into_inner()
    }

    pub async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes).await
    }

    /// Sends a request with a length, a host if none is given, and nothing else that was not asked for.
    pub async fn send(&mut self, method: &str, target: &str, headers: &[(&str, &str)], body: &[u8]) -> io::Result<()> {
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
        match self.write(&[head.as_bytes(), b"\r\n", body].concat()).await {
            // The server may answer before it has read everything, and close the connection.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            written => written,
        }
    }

    pub async fn ask(
        &mut self,
        method: &str,
        target: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> io::Result<Answer> {
        self.send(method, target, headers, body).await?;
        let mut answer = self.head().await?;
        if method != "HEAD" {
            self.body(&mut answer).await?;
        }
        Ok(answer)
    }

    /// Reads the status line and the headers. The error is `UnexpectedEof` if the server closed before the first byte.
    pub async fn head(&mut self) -> io::Result<Answer> {
        let line = self.line().await?;
        let mut words = line.splitn(3, ' ').skip(1);
        let status = words.next().and_then(|status| status.parse().ok()).ok_or_else(|| broken(&line))?;
        let mut answer = Answer { status, reason: words.next().unwrap_or_default().to_owned(), ..Answer::default() };
        loop {
            let line = self.line().await?;
            if line.is_empty() {
                return Ok(answer);
            }
            let (name, value) = line.split_once(':').ok_or_else(|| broken(&line))?;
            answer.headers.push((name.to_owned(), value.trim().to_owned()));
        }
    }

    /// Reads an answer; one of which a part is missing is an error.
    pub async fn answer(&mut self) -> io::Result<Answer> {
        let mut answer = self.head().await?;
        self.body(&mut answer).await?;
        Ok(answer)
    }

    /// Reads the body that belongs to a head.
    pub async fn body(&mut self, answer: &mut Answer) -> io::Result<()> {
        if let Some(length) = answer.header("content-length") {
            answer.body = self.exactly(length.parse().map_err(|_| broken(length))?).await?;
        } else if answer.header("transfer-encoding").is_some() {
            while let Some(chunk) = self.chunk().await? {
                answer.body.extend(chunk);
            }
        }
        Ok(())
    }

    /// Reads the next piece of a chunked body; `None` is its end.
    pub async fn chunk(&mut self) -> io::Result<Option<Vec<u8>>> {
        let line = self.line().await?;
        let length = usize::from_str_radix(&line, 16).map_err(|_| broken(&line))?;
        let mut chunk = self.exactly(length + 2).await?;
        chunk.truncate(length);
        Ok((length > 0).then_some(chunk))
    }

    /// Reads a line without its end.
    pub async fn line(&mut self) -> io::Result<String> {
        let mut line = Vec::new();
        self.stream.read_until(b'\n', &mut line).await?;
        match line.as_slice() {
            [text @ .., b'\r', b'\n'] => Ok(String::from_utf8_lossy(text).into_owned()),
            [] => Err(io::ErrorKind::UnexpectedEof.into()),
            other => Err(broken(&String::from_utf8_lossy(other))),
        }
    }

    pub async fn exactly(&mut self, length: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        self.stream.read_exact(&mut bytes).await?;
        Ok(bytes)
    }

    /// Everything until the other side closes; a reset is an end, too.
    pub async fn rest(&mut self) -> Vec<u8> {
        let mut rest = Vec::new();
        let _ = self.stream.read_to_end(&mut rest).await;
        rest
    }

    /// Waits until there is something to read and returns it without taking it; nothing is the end.
    pub async fn peek(&mut self) -> &[u8] {
        self.stream.fill_buf().await.unwrap_or_default()
    }

    /// What was read ahead.
    pub fn read_ahead(&self) -> &[u8] {
        self.stream.buffer()
    }

    /// Says that nothing more will be sent.
    pub async fn half_close(&mut self) -> io::Result<()> {
        self.stream.shutdown().await
    }
}

fn broken(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("not HTTP: {what:?}"))
}
