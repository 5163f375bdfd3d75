//! A collector for OTLP/HTTP that keeps what it receives.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::Value;

/// One request.
#[derive(Debug, Clone)]
pub struct Received {
    pub path: String,
    /// The headers, with names in lower case.
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

/// A collector on loopback. It lives as long as the test.
pub struct Collector {
    pub address: SocketAddr,
    received: Arc<Mutex<Vec<Received>>>,
}

impl Collector {
    /// Answers every request with this status. Without one it reads requests and never answers.
    pub fn start(status: Option<u16>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, received) = (listener.local_addr().unwrap(), Arc::<Mutex<Vec<Received>>>::default());
        let kept = received.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let kept = kept.clone();
                std::thread::spawn(move || serve(stream, status, &kept));
            }
        });
        Self { address, received }
    }

    pub fn received(&self) -> Vec<Received> {
        self.received.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// All spans that came as JSON.
    pub fn spans(&self) -> Vec<Value> {
        self.records("/v1/traces", ["resourceSpans", "scopeSpans", "spans"])
    }

    pub fn log_lines(&self) -> Vec<Value> {
        self.records("/v1/logs", ["resourceLogs", "scopeLogs", "logRecords"])
    }

    pub fn metrics(&self) -> Vec<Value> {
        self.records("/v1/metrics", ["resourceMetrics", "scopeMetrics", "metrics"])
    }

    fn records(&self, path: &str, [by_resource, by_scope, records]: [&str; 3]) -> Vec<Value> {
        let list = |value: &Value, name: &str| value[name].as_array().cloned().unwrap_or_default();
        let all = self.received().into_iter().filter(|received| received.path == path);
        let messages = all.filter_map(|received| serde_json::from_slice::<Value>(&received.body).ok());
        let resources = messages.flat_map(|message| list(&message, by_resource));
        resources.flat_map(|resource| list(&resource, by_scope)).flat_map(|scope| list(&scope, records)).collect()
    }
}

/// The value of an attribute of a span, a log line or a value of a metric.
pub fn attribute<'a>(record: &'a Value, name: &str) -> &'a Value {
    let of = |all: &'a Value| all.as_array()?.iter().find(|one| one["key"] == name);
    let Some(found) = of(&record["attributes"]) else { return &Value::Null };
    found["value"].as_object().and_then(|value| value.values().next()).unwrap_or(&Value::Null)
}

fn serve(stream: TcpStream, status: Option<u16>, kept: &Mutex<Vec<Received>>) {
    let Ok(mut out) = stream.try_clone() else { return };
    let mut input = BufReader::new(stream);
    while let Some(received) = read(&mut input) {
        kept.lock().unwrap_or_else(PoisonError::into_inner).push(received);
        let Some(status) = status else {
            std::thread::sleep(Duration::from_secs(600));
            return;
        };
        let answer = format!("HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{{}}");
        if out.write_all(answer.as_bytes()).is_err() {
            return;
        }
    }
}

fn read(input: &mut impl BufRead) -> Option<Received> {
    let mut line = String::new();
    input.read_line(&mut line).ok().filter(|length| *length > 0)?;
    let path = line.split(' ').nth(1)?.to_owned();
    let mut headers = Vec::new();
    loop {
        let mut line = String::new();
        input.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
    let length = headers.iter().find(|(name, _)| name == "content-length").and_then(|(_, value)| value.parse().ok());
    let mut body = vec![0; length.unwrap_or(0)];
    input.read_exact(&mut body).ok()?;
    Some(Received { path, headers, body })
}
