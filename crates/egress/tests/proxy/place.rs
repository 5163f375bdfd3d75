//! A proxy, a client that writes bytes, hosts that write down what they hear.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use egress::{Denial, Egress, EgressConfig, Gate, Policy, Table};
use testkit::http::{Answer, Connection};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Whatever is waited for comes long before.
pub const PATIENCE: Duration = Duration::from_secs(30);

pub struct Place {
    pub gate: Option<Gate>,
    pub proxy: SocketAddr,
    pub told: Arc<Mutex<Vec<String>>>,
}

pub fn strings(entries: &[&str]) -> Vec<String> {
    entries.iter().map(ToString::to_string).collect()
}

impl Place {
    /// `a.test`, `b.test` and `other.test` are this machine, where these ports may be reached by the first two names.
    pub fn new(ports: &[u16], change: impl FnOnce(&mut Table)) -> Self {
        let mut table = Table {
            name: "t".into(),
            allow: strings(&["a.test", "b.test"]),
            private: ports.iter().map(|port| format!("127.0.0.1:{port}")).collect(),
            ..Table::default()
        };
        change(&mut table);
        Self::with(Policy::of(table))
    }

    pub fn with(policy: Policy) -> Self {
        let local = IpAddr::from(Ipv4Addr::LOCALHOST);
        let hosts = ["a.test", "b.test", "other.test"].map(|name| (name.to_owned(), local)).into();
        let egress = Egress::new(EgressConfig { hosts, ..EgressConfig::default() }).unwrap();
        Self::of(&egress, "blue", policy)
    }

    /// One of several ways out of one server.
    pub fn of(egress: &Egress, tenant: &str, policy: Policy) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let proxy = listener.local_addr().unwrap();
        let told: Arc<Mutex<Vec<String>>> = Arc::default();
        let sink = Arc::clone(&told);
        let sink = Arc::new(move |denial: &Denial| sink.lock().unwrap().push(denial.sentence.clone()));
        let gate = egress.open(listener, tenant, policy, sink).unwrap();
        Self { gate: Some(gate), proxy, told }
    }

    pub fn gate(&self) -> &Gate {
        self.gate.as_ref().unwrap()
    }

    pub async fn client(&self) -> Client {
        Client::to(self.proxy).await
    }

    /// One request on a connection of its own.
    pub async fn ask(&self, request: &str) -> Answer {
        let mut client = self.client().await;
        client.send(request).await;
        client.answer().await
    }

    pub fn sentences(&self) -> Vec<String> {
        self.told.lock().unwrap().clone()
    }
}

/// A connection on which nothing may take long, and an answer that is missing ends the test.
pub struct Client(pub Connection<TcpStream>);

impl Client {
    pub async fn to(address: SocketAddr) -> Self {
        Self(Connection::open(address).await.unwrap())
    }

    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.0.write(bytes.as_ref()).await.unwrap();
    }

    /// Status, reason, headers.
    pub async fn head(&mut self) -> Answer {
        timeout(PATIENCE, self.0.head()).await.expect("an answer in time").unwrap()
    }

    pub async fn answer(&mut self) -> Answer {
        timeout(PATIENCE, self.0.answer()).await.expect("an answer in time").unwrap()
    }

    /// The next piece of a chunked body; an empty one is its end.
    pub async fn chunk(&mut self) -> String {
        let chunk = timeout(PATIENCE, self.0.chunk()).await.expect("a chunk in time").unwrap();
        String::from_utf8_lossy(&chunk.unwrap_or_default()).into_owned()
    }

    pub async fn exactly(&mut self, length: usize) -> String {
        let bytes = timeout(PATIENCE, self.0.exactly(length)).await.expect("bytes in time").unwrap();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Everything until the other side is done, however it ends.
    pub async fn rest(&mut self) -> Vec<u8> {
        timeout(PATIENCE, self.0.rest()).await.expect("an end in time")
    }
}

/// What a host heard: for each connection, all its bytes so far.
#[derive(Clone, Default)]
pub struct Heard(Arc<Mutex<Vec<Vec<u8>>>>);

impl Heard {
    pub fn connections(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    pub fn texts(&self) -> Vec<String> {
        self.0.lock().unwrap().iter().map(|bytes| String::from_utf8_lossy(bytes).into_owned()).collect()
    }

    pub fn begin(&self) -> usize {
        let mut heard = self.0.lock().unwrap();
        heard.push(Vec::new());
        heard.len() - 1
    }

    pub fn add(&self, connection: usize, bytes: &[u8]) {
        self.0.lock().unwrap()[connection].extend_from_slice(bytes);
    }
}

/// Answers each request head on a connection with `answer`.
pub async fn host(answer: &'static str) -> (u16, Heard) {
    let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    (port, host_on(listener, answer))
}

pub fn host_on(listener: tokio::net::TcpListener, answer: &'static str) -> Heard {
    let heard = Heard::default();
    let own = heard.clone();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let heard = own.clone();
            let connection = heard.begin();
            tokio::spawn(async move {
                let mut bytes = vec![0; 65536];
                let mut head = Vec::new();
                while let Ok(n @ 1..) = stream.read(&mut bytes).await {
                    heard.add(connection, &bytes[..n]);
                    head.extend_from_slice(&bytes[..n]);
                    if head.windows(4).any(|end| end == b"\r\n\r\n") {
                        head.clear();
                        if stream.write_all(answer.as_bytes()).await.is_err() {
                            break;
                        }
                    }
                }
            });
        }
    });
    heard
}

/// Sends back what it gets.
pub async fn echo() -> u16 {
    let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut read, mut write) = stream.split();
                let _ = tokio::io::copy(&mut read, &mut write).await;
            });
        }
    });
    port
}
