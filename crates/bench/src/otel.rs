//! Measures what the export to OpenTelemetry costs a warm call: two servers, one with an export and one without, are
//! called by turns.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::client::Client as _;
use crate::figures::{ALL, OURS, warmed};
use crate::floors::{TRUE, true_times};
use crate::report::{Figure, Goal, ReportRow, Unit};
use crate::server::{Http, Pool};
use crate::stats::Samples;
use crate::{Bench, BenchError};

const EXPORTING: &str = "sandpool, with an export";
const NO_MATTER: &str = "a warm call needs no new sandbox";

pub(crate) fn measure(bench: &Bench) -> Result<Figure, BenchError> {
    let mut samples = Samples::default();
    let sink = Sink::start()?;
    let export = format!("otel.endpoint = \"http://{}\"\notel.metric_interval_ms = 1000\n", sink.address);
    let mut servers = Vec::new();
    for (name, more) in [(OURS, ""), (EXPORTING, export.as_str())] {
        let server = Http::start(bench, Pool::Full, more)?;
        let mut client = server.connect()?;
        let call = warmed(&mut client)?;
        servers.push((name, client, call, server));
    }
    bench.settle()?;
    for _ in bench.rounds("otel") {
        samples.begin_round();
        samples.take(TRUE, || true_times(bench, 10))?;
        let mut times = [Vec::new(), Vec::new()];
        for turn in 0..bench.plan.calls {
            // The server that comes second finds warmer caches, so both come second equally often.
            for at in if turn % 2 == 0 { [0, 1] } else { [1, 0] } {
                let (_, client, call, _) = &mut servers[at];
                bench.children.check()?;
                times[at].push(client.call(call)?.printed("1")?.seconds);
            }
        }
        for ((name, ..), times) in servers.iter().zip(times) {
            samples.take(name, || Ok(times))?;
        }
    }
    if sink.requests.load(Ordering::Relaxed) == 0 {
        return Err(BenchError::Said("the server exported nothing".into()));
    }
    let mut figure = Figure::new("otel", ALL[12].title, &samples);
    figure.lines = vec![ReportRow::new(
        "warm `run_code(\"print(1)\")`, HTTP, with an export of traces, metrics and logs, against the same without",
        samples.quantity(EXPORTING, samples.ratio(EXPORTING, OURS), Unit::Times),
        Err(NO_MATTER.into()),
        Goal::at_most(1.02, Unit::Times),
    )];
    Ok(figure)
}

/// A collector that reads everything and keeps nothing. It ends when this value is dropped.
struct Sink {
    address: SocketAddr,
    requests: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
}

impl Sink {
    fn start() -> Result<Self, BenchError> {
        let listener =
            TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(BenchError::io("cannot listen on loopback"))?;
        let address = listener.local_addr().map_err(BenchError::io("an address"))?;
        let sink = Self { address, requests: Arc::default(), stop: Arc::default() };
        let (requests, stop) = (Arc::clone(&sink.requests), Arc::clone(&sink.stop));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                let requests = Arc::clone(&requests);
                // A client that disconnects is not an error.
                std::thread::spawn(move || serve(stream, &requests).ok());
            }
        });
        Ok(sink)
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // The connection wakes the accepting thread.
        let _ = TcpStream::connect(self.address);
    }
}

fn serve(mut stream: TcpStream, requests: &AtomicU64) -> std::io::Result<()> {
    let mut input = BufReader::new(stream.try_clone()?);
    loop {
        let mut length = 0;
        let mut line = String::new();
        loop {
            line.clear();
            if input.read_line(&mut line)? == 0 {
                return Ok(());
            }
            if let Some((name, value)) = line.split_once(':')
                && name.eq_ignore_ascii_case("content-length")
            {
                length = value.trim().parse().unwrap_or(0);
            }
            if line.trim_end().is_empty() {
                break;
            }
        }
        input.read_exact(&mut vec![0; length])?;
        requests.fetch_add(1, Ordering::Relaxed);
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")?;
    }
}
