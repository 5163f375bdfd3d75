//! Exports log lines: those that the server also writes to stderr, but none below the level `info`, because the lines
//! of lower levels may contain code.

use std::cell::Cell;
use std::fmt::{self, Write as _};
use std::time::SystemTime;

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

use super::Otel;
use super::context::SpanContext;
use super::span::{AttributeValue, Attributes, RequestSpan};

/// A log line that waits to be sent.
#[derive(Debug)]
pub(super) struct LogLine {
    pub(super) time: SystemTime,
    pub(super) level: &'static str,
    /// Number of the level in OpenTelemetry.
    pub(super) severity: u8,
    pub(super) message: String,
    pub(super) attributes: Attributes,
    /// The span of the request that the line belongs to.
    pub(super) within: Option<SpanContext>,
}

thread_local! {
    /// The span of the request that this thread works on.
    static CURRENT: Cell<Option<SpanContext>> = const { Cell::new(None) };
}

/// The trace of a request, for the log lines that are written while the request is worked on.
#[derive(Clone, Copy)]
pub struct LogTrace(Option<SpanContext>);

impl LogTrace {
    pub(crate) fn of(span: Option<&RequestSpan>) -> Self {
        Self(span.map(RequestSpan::span_context))
    }

    /// Runs `work`. Log lines that it writes belong to the trace of the request.
    pub fn work<T>(self, work: impl FnOnce() -> T) -> T {
        let Some(context) = self.0 else { return work() };
        let _entered = Entered(CURRENT.replace(Some(context)));
        work()
    }
}

/// When it is dropped, restores the request that the thread worked on before.
struct Entered(Option<SpanContext>);

impl Drop for Entered {
    fn drop(&mut self) {
        CURRENT.set(self.0);
    }
}

/// A layer of the log that exports its lines.
pub(crate) struct LogExport(pub(super) Otel);

impl<S: Subscriber> Layer<S> for LogExport {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let metadata = event.metadata();
        let (level, severity) = match *metadata.level() {
            Level::ERROR => ("ERROR", 17),
            Level::WARN => ("WARN", 13),
            Level::INFO => ("INFO", 9),
            _ => return,
        };
        // Lines about failed exports would cause further ones.
        if metadata.target().starts_with(module_path!().trim_end_matches("::log")) {
            return;
        }
        // The call that logs should not allocate often. The target takes the place of the message among the attributes.
        let (message, attributes) = (String::with_capacity(128), Attributes::with_capacity(metadata.fields().len()));
        let mut fields = Fields { message, attributes };
        event.record(&mut fields);
        let Fields { message, mut attributes } = fields;
        attributes.push(("sandpool.target", metadata.target().into()));
        let (time, within) = (SystemTime::now(), CURRENT.get());
        self.0.0.queue.log(LogLine { time, level, severity, message, attributes, within });
    }
}

/// Collects the fields of an event.
struct Fields {
    message: String,
    attributes: Attributes,
}

impl Fields {
    fn add(&mut self, field: &Field, value: impl Into<AttributeValue>) {
        self.attributes.push((field.name(), value.into()));
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        match field.name() {
            "message" => drop(write!(self.message, "{value:?}")),
            _ => self.add(field, format!("{value:?}")),
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => self.message.push_str(value),
            _ => self.add(field, value.to_owned()),
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, AttributeValue::Number(i64::try_from(value).unwrap_or(i64::MAX)));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, AttributeValue::Number(value));
    }
}
