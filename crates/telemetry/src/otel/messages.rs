//! Converts records to the messages of OTLP.

use std::borrow::Cow;
use std::time::{SystemTime, UNIX_EPOCH};

use super::SCHEMA_URL;
use super::log::LogLine;
use super::span::{AttributeValue, FinishedSpan};
use super::wire::{Message, Node};
use crate::metrics::{Family, FamilyKind, Sample, SampleValue};

/// The flag of a sampled span. The next two flags say whether the parent is in another process.
const SAMPLED: u32 = 1;
const HAS_IS_REMOTE: u32 = 0x100;
const IS_REMOTE: u32 = 0x200;

/// Kinds of spans.
const INTERNAL: u8 = 1;
const SERVER: u8 = 2;

/// The status of a span that failed.
const ERROR: u8 = 2;

/// The aggregation temporality of counters that count from the start of the server.
const CUMULATIVE: u8 = 2;

/// Encodes messages for one collector.
pub(super) struct Encoder {
    resource: Message,
    json: bool,
    /// Time at which the counters began to count.
    started: SystemTime,
}

impl Encoder {
    pub(super) fn new(resource: &[(String, String)], json: bool) -> Self {
        let attributes = resource.iter().cloned().map(|(name, value)| attribute(name, text(value))).collect();
        let resource = Message::new([((1, "attributes"), Node::Messages(attributes))]);
        Self { resource, json, started: SystemTime::now() }
    }

    pub(super) fn content_type(&self) -> &'static str {
        if self.json { "application/json" } else { "application/x-protobuf" }
    }

    pub(super) fn traces(&self, spans: impl Iterator<Item = FinishedSpan>) -> Vec<u8> {
        self.request(["resourceSpans", "scopeSpans", "spans"], spans.map(FinishedSpan::into_message).collect())
    }

    pub(super) fn logs(&self, lines: impl Iterator<Item = LogLine>) -> Vec<u8> {
        self.request(["resourceLogs", "scopeLogs", "logRecords"], lines.map(LogLine::into_message).collect())
    }

    pub(super) fn metrics(&self, families: Vec<Family>) -> Vec<u8> {
        let times = [(2, "startTimeUnixNano", self.started), (3, "timeUnixNano", SystemTime::now())];
        let times = times.map(|(number, name, time)| ((number, name), nanoseconds(time)));
        let metrics = families.into_iter().map(|family| metric(family, &times)).collect();
        self.request(["resourceMetrics", "scopeMetrics", "metrics"], metrics)
    }

    /// Builds and encodes a request. All three kinds have the same form.
    fn request(&self, [by_resource, by_scope, records]: [&'static str; 3], all: Vec<Message>) -> Vec<u8> {
        let scope = Message::new([((1, "name"), text("sandpool")), ((2, "version"), text(env!("CARGO_PKG_VERSION")))]);
        let schema = || ((3, "schemaUrl"), text(SCHEMA_URL));
        let of_scope =
            Message::new([((1, "scope"), Node::Message(scope)), ((2, records), Node::Messages(all)), schema()]);
        let of_resource = Message::new([
            ((1, "resource"), Node::Message(self.resource.clone())),
            ((2, by_scope), Node::Messages(vec![of_scope])),
            schema(),
        ]);
        let request = Message::new([((1, by_resource), Node::Messages(vec![of_resource]))]);
        match self.json {
            true => request.json().to_string().into_bytes(),
            false => request.protobuf(),
        }
    }
}

fn text(text: impl Into<Cow<'static, str>>) -> Node {
    Node::Text(text.into())
}

fn attribute(name: impl Into<Cow<'static, str>>, value: Node) -> Message {
    let field = match value {
        Node::Number(_) => (3, "intValue"),
        _ => (1, "stringValue"),
    };
    Message::new([((1, "key"), text(name)), ((2, "value"), Node::Message(Message::new([(field, value)])))])
}

fn attributes(all: Vec<(&'static str, AttributeValue)>) -> Node {
    let value = |value| match value {
        AttributeValue::Text(value) => text(value),
        AttributeValue::Name(name) => text(name),
        AttributeValue::Number(number) => Node::Number(number),
    };
    Node::Messages(all.into_iter().map(|(name, of)| attribute(name, value(of))).collect())
}

/// Returns the nanoseconds since 1970.
fn nanoseconds(time: SystemTime) -> Node {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    Node::Fixed64(u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
}

fn span_id(id: u64) -> Node {
    Node::Id(id.to_be_bytes().to_vec())
}

fn trace_id(id: u128) -> Node {
    Node::Id(id.to_be_bytes().to_vec())
}

impl FinishedSpan {
    fn into_message(self) -> Message {
        let remote = match (self.parent, self.is_server) {
            (Some(_), true) => IS_REMOTE,
            _ => 0,
        };
        let name = match self.target {
            Some(target) => text(format!("{} {target}", self.name)),
            None => text(self.name),
        };
        Message::new([
            ((1, "traceId"), trace_id(self.trace)),
            ((2, "spanId"), span_id(self.span)),
            ((5, "name"), name),
            ((6, "kind"), Node::Choice(if self.is_server { SERVER } else { INTERNAL })),
            ((7, "startTimeUnixNano"), nanoseconds(self.began)),
            ((8, "endTimeUnixNano"), nanoseconds(self.ended)),
            ((9, "attributes"), attributes(self.attributes)),
            ((16, "flags"), Node::Fixed32(SAMPLED | HAS_IS_REMOTE | remote)),
        ])
        .with((3, "traceState"), self.state.map(text))
        .with((4, "parentSpanId"), self.parent.map(span_id))
        .with((15, "status"), self.failed.then(|| Node::Message(Message::new([((3, "code"), Node::Choice(ERROR))]))))
    }
}

impl LogLine {
    fn into_message(self) -> Message {
        let body = Message::new([((1, "stringValue"), text(self.message))]);
        Message::new([
            ((1, "timeUnixNano"), nanoseconds(self.time)),
            ((11, "observedTimeUnixNano"), nanoseconds(self.time)),
            ((2, "severityNumber"), Node::Choice(self.severity)),
            ((3, "severityText"), text(self.level)),
            ((5, "body"), Node::Message(body)),
            ((6, "attributes"), attributes(self.attributes)),
        ])
        .with((9, "traceId"), self.within.map(|span| trace_id(span.trace)))
        .with((10, "spanId"), self.within.map(|span| span_id(span.span)))
        .with((8, "flags"), self.within.map(|span| Node::Fixed32(u32::from(span.sampled))))
    }
}

type Times = [((u32, &'static str), Node); 2];

fn metric(family: Family, times: &Times) -> Message {
    let Family { name, help, unit, kind, samples } = family;
    let points = Node::Messages(samples.into_iter().map(|sample| point(sample, times)).collect());
    let points = Message::new([((1, "dataPoints"), points)]);
    let temporality = Some(Node::Choice(CUMULATIVE));
    let (field, data) = match kind {
        FamilyKind::Gauge => ((5, "gauge"), points),
        FamilyKind::Counter => {
            let sum = points.with((2, "aggregationTemporality"), temporality);
            ((7, "sum"), sum.with((3, "isMonotonic"), Some(Node::Switch(true))))
        }
        FamilyKind::Histogram => ((9, "histogram"), points.with((2, "aggregationTemporality"), temporality)),
    };
    Message::new([((1, "name"), text(name)), ((2, "description"), text(help)), (field, Node::Message(data))])
        .with((3, "unit"), unit.map(text))
}

fn point(sample: Sample, times: &Times) -> Message {
    let labels = sample.labels.into_iter().map(|(name, value)| attribute(name, text(value))).collect();
    let message = Message::new(times.clone());
    match sample.value {
        SampleValue::Number(number) => {
            let number = Node::Fixed64(number);
            message.with((7, "attributes"), Some(Node::Messages(labels))).with((6, "asInt"), Some(number))
        }
        SampleValue::Histogram { buckets, bounds, sum, count } => message
            .with((9, "attributes"), Some(Node::Messages(labels)))
            .with((4, "count"), Some(Node::Fixed64(count)))
            .with((5, "sum"), Some(Node::Double(sum)))
            .with((6, "bucketCounts"), Some(Node::Counts(buckets)))
            .with((7, "explicitBounds"), Some(Node::Doubles(bounds.to_vec()))),
    }
}
