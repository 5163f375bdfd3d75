//! What the proxy costs beside a direct connection, in one run: requests one after the other, and bytes through a tunnel.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use egress::{Egress, EgressConfig, Policy, Table};

const REQUESTS: u32 = 2000;
const BYTES: usize = 1 << 30;

/// `GET /` is answered with a few bytes, `GET /big` with very many.
fn host() -> std::io::Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = listener.local_addr()?;
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            std::thread::spawn(move || {
                let mut bytes = vec![0; 65536];
                let _ = stream.set_nodelay(true);
                while let Ok(n @ 1..) = stream.read(&mut bytes) {
                    if bytes[..n].starts_with(b"GET /big") {
                        let chunk = vec![0; 1 << 16];
                        while stream.write_all(&chunk).is_ok() {}
                        return;
                    }
                    let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello");
                }
            });
        }
    });
    Ok(address)
}

fn ask(stream: &mut TcpStream, request: &str) -> std::io::Result<()> {
    stream.write_all(request.as_bytes())?;
    let mut answer = Vec::new();
    let mut bytes = [0; 4096];
    while !answer.ends_with(b"hello") && !answer.ends_with(b"200 OK\r\n\r\n") {
        match stream.read(&mut bytes)? {
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            n => answer.extend_from_slice(&bytes[..n]),
        }
    }
    Ok(())
}

fn requests(to: SocketAddr, request: &str, anew: bool) -> std::io::Result<Duration> {
    let mut stream = TcpStream::connect(to)?;
    let start = Instant::now();
    for _ in 0..REQUESTS {
        if anew {
            stream = TcpStream::connect(to)?;
        }
        stream.set_nodelay(true)?;
        ask(&mut stream, request)?;
    }
    Ok(start.elapsed() / REQUESTS)
}

/// Of a second.
fn bytes(mut stream: TcpStream) -> std::io::Result<f64> {
    stream.write_all(b"GET /big HTTP/1.1\r\n\r\n")?;
    let (mut got, mut bytes, start) = (0, vec![0; 1 << 16], Instant::now());
    while got < BYTES {
        got += stream.read(&mut bytes)?;
    }
    Ok(got as f64 / start.elapsed().as_secs_f64())
}

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let host = host()?;
    let config = EgressConfig { hosts: [("a.test".into(), host.ip())].into(), ..EgressConfig::default() };
    let table = Table {
        name: "cost".into(),
        allow: vec!["a.test".into()],
        private: vec![host.to_string()],
        connections_per_second: Some(1_000_000),
        ..Table::default()
    };
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let proxy = listener.local_addr()?;
    let _gate = Egress::new(config)?.open(listener, "local", Policy::of(table), Arc::new(|_| {}))?;
    let measure = move || {
        let through = format!("GET http://a.test:{}/ HTTP/1.1\r\nHost: a.test\r\n\r\n", host.port());
        for (name, anew) in [("on one connection", false), ("each on a new connection", true)] {
            let direct = requests(host, "GET / HTTP/1.1\r\nHost: a.test\r\n\r\n", anew)?;
            let proxied = requests(proxy, &through, anew)?;
            let ratio = proxied.as_secs_f64() / direct.as_secs_f64();
            eprintln!("a request, {name}: direct {direct:?}, through the proxy {proxied:?}, {ratio:.2} x");
        }
        let direct = bytes(TcpStream::connect(host)?)? / 1e6;
        let mut tunnel = TcpStream::connect(proxy)?;
        ask(&mut tunnel, &format!("CONNECT a.test:{} HTTP/1.1\r\n\r\n", host.port()))?;
        let proxied = bytes(tunnel)? / 1e6;
        eprintln!("bytes: direct {direct:.0} MB/s, through a tunnel {proxied:.0} MB/s, {:.2} x", proxied / direct);
        Ok(())
    };
    tokio::task::spawn_blocking(measure).await.map_err(std::io::Error::other)?
}
