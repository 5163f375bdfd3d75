//! The thread that sends. It tries again if the collector is busy, drops what cannot be delivered, and logs that once.

use std::io;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use super::messages::Encoder;
use super::queue::{BATCH, Records};
use super::{Otel, OtelConfig, Signal};
use crate::logging::lines::site;

/// A request to a collector.
pub struct Post<'a> {
    pub url: &'a str,
    pub content_type: &'static str,
    pub headers: &'a [(String, String)],
    pub body: &'a [u8],
}

/// Pauses before further attempts to send a batch.
const PAUSES: [Duration; 3] = [Duration::from_secs(1), Duration::from_secs(2), Duration::from_secs(4)];

/// Maximum time for sending the last records.
const LAST: Duration = Duration::from_secs(2);

impl Otel {
    /// Starts the thread. `post` sends one request and returns the status of the answer.
    pub fn start(&self, post: impl Fn(&Post<'_>) -> Result<u16, String> + Send + 'static) -> io::Result<()> {
        let OtelConfig { resource, json, .. } = &self.0.config;
        let mut sender = Sender { otel: self.clone(), encoder: Encoder::new(resource, *json), post, is_failing: false };
        std::thread::Builder::new().name("otel".into()).spawn(move || sender.run()).map(drop)
    }

    /// Sends the records that still wait, but only for a short time. Later records are dropped.
    pub fn finish(&self) {
        let (done, wait) = sync_channel(1);
        self.0.queue.close(done);
        let _ = wait.recv_timeout(LAST);
    }
}

struct Sender<P> {
    otel: Otel,
    encoder: Encoder,
    post: P,
    is_failing: bool,
}

impl<P: Fn(&Post<'_>) -> Result<u16, String>> Sender<P> {
    fn run(&mut self) {
        loop {
            let Records { spans, logs, metrics, closing, .. } = self.otel.0.queue.take(self.otel.0.config.delay);
            let (mut spans, mut logs) = (spans.into_iter(), logs.into_iter());
            while !spans.as_slice().is_empty() {
                let count = spans.as_slice().len().min(BATCH);
                let body = self.encoder.traces(spans.by_ref().take(BATCH));
                self.send(Signal::Traces, &body, count);
            }
            while !logs.as_slice().is_empty() {
                let count = logs.as_slice().len().min(BATCH);
                let body = self.encoder.logs(logs.by_ref().take(BATCH));
                self.send(Signal::Logs, &body, count);
            }
            if let Some(families) = metrics {
                let body = self.encoder.metrics(families);
                self.send(Signal::Metrics, &body, 1);
            }
            if let Some(done) = closing {
                let _ = done.send(());
                return;
            }
        }
    }

    fn send(&mut self, signal: Signal, body: &[u8], count: usize) {
        let config = &self.otel.0.config;
        let url = match signal {
            Signal::Traces => &config.traces,
            Signal::Metrics => &config.metrics,
            Signal::Logs => &config.logs,
        };
        let Some(url) = url.clone() else { return };
        let mut pauses = PAUSES.into_iter();
        let why = loop {
            let post = Post { url: &url, content_type: self.encoder.content_type(), headers: &config.headers.0, body };
            let (why, is_busy) = match (self.post)(&post) {
                Ok(200..=299) => {
                    if std::mem::take(&mut self.is_failing) {
                        tracing::info!("telemetry is delivered again");
                    }
                    return;
                }
                Ok(status) => (format!("the answer is {status}"), matches!(status, 429 | 502 | 503 | 504)),
                Err(why) => (why, true),
            };
            match pauses.next().filter(|_| is_busy) {
                Some(pause) if !self.otel.0.queue.pause(pause) => {}
                _ => break why,
            }
        };
        self.otel.0.queue.drop_some(signal, count);
        if !std::mem::replace(&mut self.is_failing, true) {
            tracing::warn!("telemetry cannot be delivered to {}: {why}; calls go on, it is dropped", site(&url));
        }
    }
}
