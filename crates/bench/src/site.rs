//! Serves the page of the browser's figures on loopback: the same page under every path, over persistent connections.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::BenchError;

const PAGE: &str = include_str!("helpers/list50.html");
/// Timeout for a client that sends nothing.
const PATIENCE: Duration = Duration::from_secs(60);
/// Maximum number of lines of one request.
const LINES: usize = 200;

/// A shop with fifty things. The server ends when this value is dropped.
pub(crate) struct Site {
    pub port: u16,
    stop: Arc<AtomicBool>,
}

impl Site {
    pub(crate) fn start() -> Result<Self, BenchError> {
        let listener =
            TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(BenchError::io("cannot listen on loopback"))?;
        let port = listener.local_addr().map_err(BenchError::io("an address"))?.port();
        let site = Self { port, stop: Arc::default() };
        let stop = Arc::clone(&site.stop);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                // A client that disconnects is not an error.
                std::thread::spawn(move || serve(stream).ok());
            }
        });
        Ok(site)
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // The connection wakes the accepting thread.
        let _ = TcpStream::connect(SocketAddr::from((Ipv4Addr::LOCALHOST, self.port)));
    }
}

fn serve(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    while let Some(first) = lines.next().transpose()? {
        for line in lines.by_ref().take(LINES) {
            if line?.is_empty() {
                break;
            }
        }
        let page = if first.contains("favicon") { "" } else { PAGE };
        let length = page.len();
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncache-control: no-store\r\ncontent-length:";
        stream.write_all(format!("{head} {length}\r\n\r\n{page}").as_bytes())?;
    }
    Ok(())
}
