//! The spans of a request: one for the whole request, which the conventions of MCP describe, and one for each stage.

use std::sync::Arc;
use std::time::SystemTime;

use engine::op::{PassedStage, RecordStages, Stages};

use super::Otel;
use super::context::{RemoteParent, SpanContext, new_span, new_trace};

/// A value of an attribute.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum AttributeValue {
    Text(String),
    Name(&'static str),
    Number(i64),
}

impl From<String> for AttributeValue {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<&'static str> for AttributeValue {
    fn from(name: &'static str) -> Self {
        Self::Name(name)
    }
}

impl From<u16> for AttributeValue {
    fn from(number: u16) -> Self {
        Self::Number(number.into())
    }
}

pub(crate) type Attributes = Vec<(&'static str, AttributeValue)>;

/// A span that waits to be sent.
#[derive(Debug)]
pub(super) struct FinishedSpan {
    pub(super) trace: u128,
    pub(super) span: u64,
    pub(super) parent: Option<u64>,
    pub(super) state: Option<String>,
    pub(super) name: &'static str,
    /// Second word of the span's name, such as the name of a tool.
    pub(super) target: Option<&'static str>,
    /// Whether the span covers a whole request of a client, and not only a stage of it.
    pub(super) is_server: bool,
    pub(super) began: SystemTime,
    pub(super) ended: SystemTime,
    pub(super) attributes: Attributes,
    pub(super) failed: bool,
}

#[cfg(test)]
impl FinishedSpan {
    pub(super) fn example() -> Self {
        let now = SystemTime::now();
        Self {
            trace: 1,
            span: 2,
            parent: None,
            state: None,
            name: "tools/call",
            target: None,
            is_server: true,
            began: now,
            ended: now,
            attributes: Attributes::new(),
            failed: false,
        }
    }
}

/// The trace that a request belongs to, with the span of the request.
#[derive(Debug)]
pub(super) struct RequestTrace {
    otel: Otel,
    context: SpanContext,
    state: Option<String>,
}

impl RecordStages for RequestTrace {
    fn next_id(&self) -> u64 {
        new_span()
    }

    /// Returns the environment variable with which programs in the sandbox continue the trace.
    fn variable(&self, id: u64) -> (&'static str, String) {
        ("TRACEPARENT", SpanContext { span: id, ..self.context }.traceparent())
    }

    fn passed(&self, stage: PassedStage) {
        let PassedStage { stage, id, within, began, ended, target } = stage;
        let Self { otel, context, state } = self;
        if !context.sampled {
            return;
        }
        let mut attributes = Attributes::new();
        if let Some((host, port)) = target {
            attributes.push(("server.address", host.into()));
            attributes.push(("server.port", port.into()));
        }
        otel.0.queue.span(FinishedSpan {
            trace: context.trace,
            span: id,
            parent: Some(within.unwrap_or(context.span)),
            state: state.clone(),
            name: stage.name(),
            target: None,
            is_server: false,
            began,
            ended,
            attributes,
            failed: false,
        });
    }
}

/// The span of a request that is being answered. If it is dropped before its end, the request counts as cancelled.
#[derive(Debug)]
pub struct RequestSpan {
    trace: Arc<RequestTrace>,
    parent: Option<u64>,
    method: &'static str,
    tool: Option<&'static str>,
    began: SystemTime,
    attributes: Attributes,
    ended: bool,
}

/// Number of attributes for which a request has room from the start.
const USUAL_ATTRIBUTES: usize = 16;

/// The value of `error.type` for a tool that answers with `isError`.
const TOOL_ERROR: &str = "tool_error";
const CANCELLED: &str = "cancelled";

/// How a request failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RequestError {
    /// The tool answered with `isError`.
    Tool,
    /// The answer is an error of JSON-RPC with this code.
    Protocol(i32),
    Cancelled,
}

impl RequestSpan {
    pub(super) fn begin(otel: &Otel, method: &'static str, parent: RemoteParent<'_>) -> Self {
        let remote = parent.context();
        let trace = remote.map_or_else(new_trace, |remote| remote.trace);
        let sampled = otel.0.config.sampler.takes(remote, trace);
        let state = remote.and_then(|_| parent.state());
        let context = SpanContext { trace, span: new_span(), sampled };
        Self {
            trace: Arc::new(RequestTrace { otel: otel.clone(), context, state }),
            parent: remote.map(|remote| remote.span),
            method,
            tool: None,
            began: SystemTime::now(),
            attributes: Attributes::with_capacity(if sampled { USUAL_ATTRIBUTES } else { 0 }),
            ended: false,
        }
    }

    /// Returns the recorder of the request's stages.
    pub(crate) fn stages(&self) -> Stages {
        Stages(Some(self.trace.clone()))
    }

    pub(super) fn span_context(&self) -> SpanContext {
        self.trace.context
    }

    pub(crate) fn set_tool(&mut self, tool: &'static str) {
        self.tool = Some(tool);
    }

    pub(crate) fn add(&mut self, name: &'static str, value: impl Into<AttributeValue>) {
        if self.trace.context.sampled {
            self.attributes.push((name, value.into()));
        }
    }

    /// Ends the span of a request that was answered with a result, or with this error code of JSON-RPC.
    pub fn answered(self, error: Option<i32>) {
        self.end(error.map(RequestError::Protocol));
    }

    pub(crate) fn end(mut self, error: Option<RequestError>) {
        self.record(error);
    }

    fn record(&mut self, error: Option<RequestError>) {
        self.ended = true;
        let RequestTrace { otel, context, state } = &*self.trace;
        if !context.sampled {
            return;
        }
        let mut attributes = std::mem::take(&mut self.attributes);
        attributes.push(("mcp.method.name", self.method.into()));
        if let Some(tool) = self.tool {
            attributes.push(("gen_ai.tool.name", tool.into()));
            attributes.push(("gen_ai.operation.name", "execute_tool".into()));
        }
        match error {
            Some(RequestError::Tool) => attributes.push(("error.type", TOOL_ERROR.into())),
            Some(RequestError::Cancelled) => attributes.push(("error.type", CANCELLED.into())),
            Some(RequestError::Protocol(code)) => {
                attributes.push(("error.type", code.to_string().into()));
                attributes.push(("rpc.response.status_code", code.to_string().into()));
            }
            None => {}
        }
        otel.0.queue.span(FinishedSpan {
            trace: context.trace,
            span: context.span,
            parent: self.parent,
            state: state.clone(),
            name: self.method,
            target: self.tool,
            is_server: true,
            began: self.began,
            ended: SystemTime::now(),
            attributes,
            failed: error.is_some(),
        });
    }
}

impl Drop for RequestSpan {
    fn drop(&mut self) {
        if !self.ended {
            self.record(Some(RequestError::Cancelled));
        }
    }
}
