//! A small web of our own on loopback, for tests of the browser and to look at by hand: what pages do, and what servers do wrong.
//!
//! One thread a connection and one request a connection: what is sent, to the byte, is what a route says. Every name leads to the
//! same pages, so that `pages.test` and `other.test`, or `127.0.0.1` and `localhost`, are two sites.

mod made;
mod routes;

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a silent client is borne.
const PATIENCE: Duration = Duration::from_secs(30);
/// Of what was asked, this much is remembered.
const REMEMBERED: usize = 10_000;
const MAX_BODY: u64 = 16 << 20;

/// The server. It ends when this is dropped.
pub struct Pages {
    pub port: u16,
    stop: Arc<AtomicBool>,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Pages {
    /// On a free port of loopback.
    pub fn start() -> io::Result<Self> {
        Self::start_at(0)
    }

    pub fn start_at(port: u16) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port))?;
        let port = listener.local_addr()?.port();
        let pages = Self { port, stop: Arc::default(), asked: Arc::default() };
        let (stop, asked) = (pages.stop.clone(), pages.asked.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                let (Ok(stream), stop, asked) = (stream, stop.clone(), asked.clone()) else { continue };
                // A client that goes away in the middle is no error of the server.
                std::thread::spawn(move || serve(stream, &stop, &asked).ok());
            }
        });
        Ok(pages)
    }

    /// `http://127.0.0.1:PORT/path`.
    pub fn url(&self, path: &str) -> String {
        self.url_at("127.0.0.1", path)
    }

    /// The same page under a name, which has to lead here.
    pub fn url_at(&self, host: &str, path: &str) -> String {
        format!("http://{host}:{}/{}", self.port, path.trim_start_matches('/'))
    }

    /// What was asked for so far, in lines such as `GET pages.test /forms`, oldest first.
    pub fn asked(&self) -> Vec<String> {
        lock(&self.asked).clone()
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // Wakes the thread that accepts.
        let _ = TcpStream::connect(SocketAddr::from((Ipv4Addr::LOCALHOST, self.port)));
    }
}

/// One request.
struct Asked {
    method: String,
    path: String,
    query: Vec<(String, String)>,
    /// Without the port.
    host: String,
    port: u16,
    cookie: String,
    body: Vec<u8>,
}

impl Asked {
    fn parameter(&self, name: &str) -> Option<&str> {
        self.query.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    fn number(&self, name: &str, default: u64) -> u64 {
        self.parameter(name).and_then(|value| value.parse().ok()).unwrap_or(default)
    }

    /// These pages again, as another site.
    fn other_origin(&self) -> String {
        let host = match self.host.as_str() {
            "localhost" => "127.0.0.1",
            "127.0.0.1" => "localhost",
            _ => "other.test",
        };
        format!("http://{host}:{}", self.port)
    }

    /// The form that was sent.
    fn form(&self) -> Vec<(String, String)> {
        pairs(&String::from_utf8_lossy(&self.body))
    }
}

/// What a route may do with a connection besides answering well.
struct Wire<'a> {
    stream: &'a mut TcpStream,
    stop: &'a AtomicBool,
}

impl Wire<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    fn answer(&mut self, status: &str, headers: &[(&str, &str)], body: &[u8]) -> io::Result<()> {
        let mut head = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n", body.len());
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        self.write(&[head.as_bytes(), b"\r\n", body].concat())
    }

    fn html(&mut self, body: &str) -> io::Result<()> {
        self.answer("200 OK", &[("content-type", "text/html; charset=utf-8")], body.as_bytes())
    }

    fn json(&mut self, body: &str) -> io::Result<()> {
        self.answer("200 OK", &[("content-type", "application/json")], body.as_bytes())
    }

    fn redirect(&mut self, to: &str) -> io::Result<()> {
        self.answer("302 Found", &[("location", to)], b"")
    }

    /// A delay that a route is about; cut short when the server ends.
    fn pause(&self, time: Duration) {
        let end = Instant::now() + time;
        while Instant::now() < end && !self.stop.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(10).min(end.saturating_duration_since(Instant::now())));
        }
    }
}

fn serve(mut stream: TcpStream, stop: &AtomicBool, log: &Mutex<Vec<String>>) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.set_nodelay(true)?;
    let Some(asked) = read(&stream)? else { return Ok(()) };
    {
        let mut log = lock(log);
        if log.len() < REMEMBERED {
            log.push(format!("{} {} {}", asked.method, asked.host, asked.path));
        }
    }
    routes::answer(&asked, &mut Wire { stream: &mut stream, stop })
}

/// None when the client only connected.
fn read(stream: &TcpStream) -> io::Result<Option<Asked>> {
    let mut reader = BufReader::new(stream);
    let first = line(&mut reader)?;
    let mut words = first.split(' ');
    let (Some(method), Some(target)) = (words.next().filter(|word| !word.is_empty()), words.next()) else {
        return Ok(None);
    };
    let (mut host, mut cookie, mut length) = (String::new(), String::new(), 0);
    loop {
        let line = line(&mut reader)?;
        let Some((name, value)) = line.split_once(':') else { break };
        match name.to_ascii_lowercase().as_str() {
            "host" => host = value.trim().to_owned(),
            "cookie" => cookie = value.trim().to_owned(),
            "content-length" => length = value.trim().parse().unwrap_or(0),
            _ => {}
        }
    }
    let mut body = Vec::new();
    reader.take(length.min(MAX_BODY)).read_to_end(&mut body)?;
    // A proxy asks with the whole address.
    let target = target.strip_prefix("http://").map_or(target, |rest| rest.find('/').map_or("/", |at| &rest[at..]));
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let port = stream.local_addr()?.port();
    let host = host.rsplit_once(':').map_or(host.as_str(), |(host, _)| host).to_owned();
    Ok(Some(Asked { method: method.into(), path: path.into(), query: pairs(query), host, port, cookie, body }))
}

fn line(reader: &mut impl BufRead) -> io::Result<String> {
    let mut line = Vec::new();
    reader.take(64 << 10).read_until(b'\n', &mut line)?;
    Ok(String::from_utf8_lossy(&line).trim_end().to_owned())
}

/// `a=1&b=2`, decoded.
fn pairs(text: &str) -> Vec<(String, String)> {
    let pairs = text.split('&').filter(|pair| !pair.is_empty()).map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    pairs.map(|(key, value)| (decoded(key), decoded(value))).collect()
}

fn decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        let hex = after.get(..2).and_then(|hex| u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok());
        rest = after;
        match (byte, hex) {
            (b'%', Some(value)) => {
                bytes.push(value);
                rest = &after[2..];
            }
            (b'+', _) => bytes.push(b' '),
            _ => bytes.push(byte),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
