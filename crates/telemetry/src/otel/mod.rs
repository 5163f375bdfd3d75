//! Exports traces, metrics and logs to an OpenTelemetry collector, over OTLP/HTTP.
//!
//! A call hands its records over and continues; one thread encodes and sends them. The records wait in queues of bounded
//! length. What does not fit, and what cannot be delivered, is dropped and counted. No record contains code, arguments,
//! results or tokens.

mod context;
mod export;
mod log;
mod messages;
mod queue;
mod sampler;
mod span;
mod wire;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

pub use self::context::{RemoteParent, RequestHeaders, resource_attributes};
pub use self::export::Post;
pub use self::log::LogTrace;
pub use self::sampler::Sampler;
pub(crate) use self::span::RequestError;
pub use self::span::RequestSpan;

use self::log::LogExport;
use self::queue::Queue;
use crate::metrics::{Gauges, Metrics};

/// The semantic conventions by which spans and metrics are named. Version 1.41.0 is the last one that contains those of
/// MCP and GenAI; later ones are in a repository without releases.
const SCHEMA_URL: &str = "https://opentelemetry.io/schemas/1.41.0";

/// The settings of the export.
#[derive(Debug, Clone, PartialEq)]
pub struct OtelConfig {
    /// Address for traces. Each signal has its own address; a signal without one is not exported.
    pub traces: Option<String>,
    pub metrics: Option<String>,
    pub logs: Option<String>,
    /// Whether messages are encoded as JSON instead of protobuf.
    pub json: bool,
    pub headers: RequestHeaders,
    /// Maximum time of one request.
    pub timeout: Duration,
    /// Attributes of the resource, which include `service.name`.
    pub resource: Vec<(String, String)>,
    pub sampler: Sampler,
    /// Time for which records are collected and then sent together.
    pub delay: Duration,
    /// Maximum number of spans, and of log lines, that wait to be sent.
    pub queue: usize,
    pub metric_interval: Duration,
}

/// A kind of telemetry: traces, metrics or logs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Signal {
    Traces,
    Metrics,
    Logs,
}

/// Names of the signals, in the order of [`Signal`].
pub(crate) const SIGNALS: [&str; 3] = ["traces", "metrics", "logs"];

/// Handle to the export. It is cheap to clone.
#[derive(Clone)]
pub struct Otel(Arc<OtelState>);

struct OtelState {
    config: OtelConfig,
    queue: Queue,
}

impl fmt::Debug for Otel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Otel")
    }
}

impl Otel {
    /// Creates the queues. Nothing is sent before [`Otel::start`], because the launcher has to be started while the
    /// process has only one thread.
    pub fn new(config: OtelConfig) -> Self {
        let queue = Queue::new(config.queue);
        Self(Arc::new(OtelState { config, queue }))
    }

    /// Begins the span of a request, if traces are exported.
    pub(crate) fn request(&self, method: &'static str, parent: RemoteParent<'_>) -> Option<RequestSpan> {
        self.0.config.traces.as_ref().map(|_| RequestSpan::begin(self, method, parent))
    }

    /// Returns a layer for the log that exports its lines, if logs are exported.
    pub(crate) fn log_layer(&self) -> Option<LogExport> {
        self.0.config.logs.as_ref().map(|_| LogExport(self.clone()))
    }

    /// Returns the interval at which [`Otel::export_metrics`] is to be called, if metrics are exported.
    pub fn metric_interval(&self) -> Option<Duration> {
        self.0.config.metrics.as_ref().map(|_| self.0.config.metric_interval)
    }

    /// Hands over the present values of the metrics.
    pub fn export_metrics(&self, metrics: &Metrics, gauges: &Gauges) {
        self.0.queue.metrics(metrics.exported(gauges));
    }

    /// Returns how many records of each signal were dropped since the start.
    pub fn dropped(&self) -> [u64; SIGNALS.len()] {
        self.0.queue.dropped.each_ref().map(|count| count.load(Ordering::Relaxed))
    }
}
