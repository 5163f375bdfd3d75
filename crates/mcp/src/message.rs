//! Parses one line into JSON-RPC messages. Parsing is strict: the dispatcher sees exactly what was sent, or the line is
//! refused with a reason.
//!
//! Parsing has no side effects. This module knows JSON-RPC and the shape of MCP's requests, but no sessions.

use std::fmt;

use rmcp::model::{
    CallToolRequestParams, CancelTaskParams, ClientJsonRpcMessage, ClientRequest, CustomRequest, DiscoverRequestParams,
    GetTaskParams, InitializeRequestParams, InputResponses, MetaObject, PaginatedRequestParams, Request,
    RequestMetaObject, RequestNoParam, RequestOptionalParam, UpdateTaskParams,
};
use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value, json};

use super::errors::ErrorStyle;

pub(crate) const PARSE_ERROR: i32 = -32700;
pub(crate) const INVALID_REQUEST: i32 = -32600;
pub(crate) const INVALID_PARAMS: i32 = -32602;
pub(crate) const INTERNAL_ERROR: i32 = -32603;

/// Maximum number of messages in a batch.
const MAX_BATCH: usize = 50;

/// Maximum number of values in one message. In memory, a value takes many times its length in the text.
const MAX_VALUES: usize = 100_000;

/// Maximum length of an id in bytes. Ids are echoed, and a token or a number is enough for one.
const MAX_ID: usize = 1024;

/// A JSON-RPC error answer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Fault {
    /// Id of the request; `Null` if no id could be read.
    pub id: Value,
    pub code: i32,
    pub message: String,
    /// Whether the message is JSON but no JSON-RPC request.
    pub is_malformed: bool,
}

impl Fault {
    pub(crate) fn new(id: Value, code: i32, message: impl Into<String>) -> Self {
        Self { id, code, message: message.into(), is_malformed: false }
    }

    /// Returns the error for a message that is JSON but no JSON-RPC request.
    fn malformed(id: Value, why: &str) -> Self {
        Self { is_malformed: true, ..Self::new(id, INVALID_REQUEST, why) }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        ErrorStyle::default().encode(self)
    }
}

#[derive(Debug)]
pub(crate) enum Incoming {
    One(Message),
    Batch(Vec<Result<Message, Fault>>),
}

impl Incoming {
    /// Returns the approximate memory of all messages.
    pub(crate) fn weight(&self) -> usize {
        let weight = |message: &Message| match message {
            Message::Request { weight, .. } | Message::Answer { weight, .. } => *weight,
            Message::Cancelled { .. } | Message::Ignored => 0,
        };
        match self {
            Self::One(message) => weight(message),
            Self::Batch(messages) => messages.iter().flatten().map(weight).sum(),
        }
    }
}

#[derive(Debug)]
pub(crate) enum Message {
    Request {
        id: Value,
        request: Box<ClientRequest>,
        /// Approximate memory of the request in bytes.
        weight: usize,
    },
    /// The client cancels the request with this id.
    Cancelled { id: Value, reason: Option<String> },
    /// The client's answer to a request of ours, under the id that we gave it.
    Answer { id: Value, message: Box<ClientJsonRpcMessage>, weight: usize },
    /// Any other notification, which needs no action and no answer.
    Ignored,
}

/// Reads a line. `batches` says whether the client's revision has batches.
pub(crate) fn read(line: &[u8], batches: bool) -> Result<Incoming, Fault> {
    // RFC 8259 lets a reader ignore a byte order mark, and some shells write one.
    let line = line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line);
    match parse(line)? {
        Value::Array(_) if !batches => Err(Fault::malformed(
            Value::Null,
            "batches are not part of this protocol revision; send one message a line",
        )),
        Value::Array(items) if items.is_empty() => Err(Fault::malformed(Value::Null, "the batch is empty")),
        Value::Array(items) if items.len() > MAX_BATCH => {
            let message = format!("a batch of {} messages is over the limit of {MAX_BATCH}", items.len());
            Err(Fault::new(Value::Null, INVALID_REQUEST, message))
        }
        Value::Array(items) => Ok(Incoming::Batch(items.into_iter().map(in_batch).collect())),
        value => message(value).map(Incoming::One),
    }
}

/// Returns the error for a line that is too long to be read, with the id of its request if the id is at one of the two
/// ends.
pub(crate) fn too_long(length: usize, limit: usize, head: &[u8], tail: &[u8]) -> Fault {
    let id = id_at_head(head).or_else(|| id_at_tail(tail)).unwrap_or(Value::Null);
    Fault::new(id, INVALID_REQUEST, format!("a message of {length} bytes is over the limit of {limit} bytes"))
}

fn in_batch(value: Value) -> Result<Message, Fault> {
    match message(value)? {
        Message::Request { id, request, .. } if matches!(*request, ClientRequest::InitializeRequest(_)) => {
            Err(Fault::new(id, INVALID_REQUEST, "initialize cannot be part of a batch"))
        }
        message => Ok(message),
    }
}

fn message(value: Value) -> Result<Message, Fault> {
    let bad = |id: &Value, why: &str| Fault::malformed(id.clone(), why);
    let Value::Object(mut envelope) = value else {
        return Err(bad(&Value::Null, "a message is a JSON object"));
    };
    let given = envelope.remove("id");
    let id = given.clone().filter(is_id).unwrap_or(Value::Null);
    if envelope.get("jsonrpc").and_then(Value::as_str) != Some("2.0") {
        return Err(bad(&id, "`jsonrpc` must be \"2.0\""));
    }
    let method = match envelope.remove("method") {
        Some(Value::String(method)) => method,
        None if envelope.contains_key("result") || envelope.contains_key("error") => return Ok(answer(id, envelope)),
        None => return Err(bad(&id, "`method` is missing")),
        Some(_) => return Err(bad(&id, "`method` must be a string")),
    };
    let params = envelope.remove("params");
    match given {
        None => Ok(notification(&method, params)),
        Some(_) if id.is_null() => Err(bad(&id, "`id` must be an integer or a string of at most 1024 bytes")),
        Some(_) => match request(method, params) {
            Ok((request, weight)) => Ok(Message::Request { id, request: Box::new(request), weight }),
            Err(why) => Err(Fault::new(id, INVALID_PARAMS, why)),
        },
    }
}

/// Reads an answer. A malformed one is ignored, because an answer has no answer.
fn answer(id: Value, mut envelope: Map<String, Value>) -> Message {
    let weight = object(&envelope);
    envelope.insert("id".into(), id.clone());
    match serde_json::from_value(Value::Object(envelope)) {
        Ok(message) => Message::Answer { id, message: Box::new(message), weight },
        Err(_) => Message::Ignored,
    }
}

fn is_id(value: &Value) -> bool {
    match value {
        Value::String(text) => text.len() <= MAX_ID,
        Value::Number(number) => number.is_i64() || number.is_u64(),
        _ => false,
    }
}

/// Reads a notification. A malformed one is ignored, because a notification has no answer.
fn notification(method: &str, params: Option<Value>) -> Message {
    let Some(Value::Object(mut params)) = params.filter(|_| method == "notifications/cancelled") else {
        return Message::Ignored;
    };
    // What is kept of the message is not counted, so it has to be short.
    let reason = params.get("reason").and_then(Value::as_str).map(|reason| text::shown(reason).into_owned());
    match params.remove("requestId") {
        Some(id) if is_id(&id) => Message::Cancelled { id, reason },
        _ => Message::Ignored,
    }
}

/// Converts a request to rmcp's types. A request that fits no type becomes a custom request, which is refused later.
fn request(method: String, params: Option<Value>) -> Result<(ClientRequest, usize), String> {
    let mut params = match params {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(params)) => params,
        Some(_) => return Err("`params` must be an object".into()),
    };
    let mut weight = CALL + method.len();
    let meta = match params.remove("_meta") {
        None | Some(Value::Null) => RequestMetaObject::default(),
        Some(Value::Object(meta)) => {
            let bytes = object(&meta);
            check_unsolicited("`_meta`", bytes)?;
            weight += bytes;
            RequestMetaObject(MetaObject(meta))
        }
        Some(_) => return Err("`_meta` must be an object".into()),
    };
    weight += object(&params);
    let mut request = match method.as_str() {
        "initialize" => ClientRequest::InitializeRequest(Request::new(initialize(params)?)),
        "server/discover" => ClientRequest::DiscoverRequest(Request::new(DiscoverRequestParams {})),
        "ping" => ClientRequest::PingRequest(RequestNoParam::default()),
        "tools/list" => ClientRequest::ListToolsRequest(RequestOptionalParam::with_param(page(params)?)),
        "tools/call" => ClientRequest::CallToolRequest(Request::new(call(params)?)),
        "tasks/get" => ClientRequest::GetTaskRequest(Request::new(GetTaskParams::new(task_id(&params)?))),
        "tasks/cancel" => ClientRequest::CancelTaskRequest(Request::new(CancelTaskParams::new(task_id(&params)?))),
        "tasks/update" => {
            let given = params.get("inputResponses").and_then(Value::as_object).cloned();
            let responses: InputResponses = given.unwrap_or_default().into_iter().collect();
            ClientRequest::UpdateTaskRequest(Request::new(UpdateTaskParams::new(task_id(&params)?, responses)))
        }
        _ => other(method, params),
    };
    let extensions = rmcp::model::GetExtensions::extensions_mut(&mut request);
    extensions.insert(meta);
    Ok((request, weight))
}

fn other(method: String, params: Map<String, Value>) -> ClientRequest {
    let typed = json!({ "method": method, "params": params });
    serde_json::from_value(typed)
        .unwrap_or_else(|_| ClientRequest::CustomRequest(CustomRequest::new(method, Some(Value::Object(params)))))
}

/// Reads the parameters of `initialize` and fills in members that some clients omit.
fn initialize(mut params: Map<String, Value>) -> Result<InitializeRequestParams, String> {
    params.entry("protocolVersion").or_insert_with(|| "2024-11-05".into());
    for (member, inner) in [("capabilities", &[][..]), ("clientInfo", &[("name", "unknown"), ("version", "unknown")])] {
        let value = params.entry(member).or_insert(Value::Null);
        if value.is_null() {
            *value = Value::Object(Map::new());
        }
        if let Some(object) = value.as_object_mut() {
            for (key, default) in inner {
                object.entry(*key).or_insert_with(|| Value::from(*default));
            }
        }
    }
    serde_json::from_value(Value::Object(params)).map_err(|why| format!("invalid params for initialize: {why}"))
}

fn page(params: Map<String, Value>) -> Result<PaginatedRequestParams, String> {
    match params.get("cursor") {
        None | Some(Value::Null) => Ok(PaginatedRequestParams::default()),
        Some(Value::String(cursor)) => Ok(PaginatedRequestParams::default().with_cursor(Some(cursor.clone()))),
        Some(_) => Err("`cursor` must be a string".into()),
    }
}

fn task_id(params: &Map<String, Value>) -> Result<&str, String> {
    params.get("taskId").and_then(Value::as_str).ok_or_else(|| "`taskId` must be a string: the task".into())
}

fn call(mut params: Map<String, Value>) -> Result<CallToolRequestParams, String> {
    let call = match params.remove("name") {
        Some(Value::String(name)) => CallToolRequestParams::new(name),
        Some(_) => return Err("`name` must be a string: the tool to call".into()),
        None => return Err("`name` is missing: the tool to call".into()),
    };
    let call = match params.remove("arguments") {
        None | Some(Value::Null) => call,
        Some(Value::Object(arguments)) => call.with_arguments(arguments),
        Some(_) => return Err("`arguments` must be an object".into()),
    };
    // No tool needs much data in any other member.
    for (name, value) in &params {
        check_unsolicited(&format!("`{}` of `params`", text::shown(name)), weight(value))?;
    }
    let call = match params.remove("inputResponses") {
        None | Some(Value::Null) => call,
        Some(Value::Object(responses)) => call.with_input_responses(responses.into_iter().collect()),
        Some(_) => return Err("`inputResponses` must be an object".into()),
    };
    match params.remove("requestState") {
        None | Some(Value::Null) => Ok(call),
        Some(Value::String(state)) => Ok(call.with_request_state(state)),
        Some(_) => Err("`requestState` must be a string".into()),
    }
}

/// Maximum memory of unsolicited data in a request: unknown members and arguments, and members that this server never
/// asks for.
pub const MAX_UNSOLICITED: usize = 64 << 10;

/// Bytes that are counted for every call while it is handled, in addition to its content.
const CALL: usize = 4096;

fn check_unsolicited(what: &str, weight: usize) -> Result<(), String> {
    match weight > MAX_UNSOLICITED {
        true => Err(format!("{what} takes {weight} bytes, which is over the limit of {MAX_UNSOLICITED}")),
        false => Ok(()),
    }
}

/// Returns the approximate memory of a value.
pub fn weight(value: &Value) -> usize {
    size_of::<Value>() + inside(value)
}

/// Returns the approximate memory that a value has on the heap.
fn inside(value: &Value) -> usize {
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
        Value::String(text) => text.capacity(),
        Value::Array(items) => items.capacity() * size_of::<Value>() + items.iter().map(inside).sum::<usize>(),
        Value::Object(members) => object(members),
    }
}

/// Returns the approximate memory of an object, which is a B-tree: a node has room for eleven members and is at least
/// about half full, except that of an object with few members.
fn object(members: &Map<String, Value>) -> usize {
    const NODE: usize = 11 * (size_of::<String>() + size_of::<Value>()) + 2 * size_of::<usize>();
    let heap = |(key, value): (&String, &Value)| key.capacity() + inside(value);
    members.len().div_ceil(6) * NODE + members.iter().map(heap).sum::<usize>()
}

/// Parses JSON without duplicate keys. A message with valid grammar that cannot be accepted gets an error with the id
/// it carries.
fn parse(line: &[u8]) -> Result<Value, Fault> {
    let error = match strict(line) {
        Ok(value) => return Ok(value),
        Err(error) => error,
    };
    let id = id_of(line).unwrap_or(Value::Null);
    if error.is_data() {
        return Err(Fault::new(id, INVALID_REQUEST, error.to_string()));
    }
    Err(Fault::new(id, PARSE_ERROR, format!("parse error: {error}")))
}

fn strict(line: &[u8]) -> Result<Value, serde_json::Error> {
    /// Maximum number of numbers outside the range of a double that are replaced in one message. In a message that is
    /// longer than `SHORT` such a number is an error, because each replacement means reading the whole message again.
    const REWRITES: usize = 8;
    const SHORT: usize = 8 << 10;
    let rewrites = if line.len() > SHORT { 0 } else { REWRITES };
    let mut line = std::borrow::Cow::Borrowed(line);
    for _ in 0..rewrites {
        match strict_once(&line) {
            // `1e309` is valid JSON. It is read as `null`, as JavaScript would forward it, so that the refusal can name
            // the field.
            Err(error) if error.to_string().starts_with("number out of range") => {
                let Some(number) = number_before(&line, &error) else { return Err(error) };
                line.to_mut().splice(number, *b"null");
            }
            result => return result,
        }
    }
    strict_once(&line)
}

fn strict_once(line: &[u8]) -> Result<Value, serde_json::Error> {
    let mut left = MAX_VALUES;
    let mut deserializer = serde_json::Deserializer::from_slice(line);
    let value = Strict(&mut left).deserialize(&mut deserializer)?;
    deserializer.end()?;
    Ok(value)
}

/// Returns the range of the number that ends near the position of an error, which is a line and a column from 1.
fn number_before(line: &[u8], error: &serde_json::Error) -> Option<std::ops::Range<usize>> {
    let before: usize = line.split_inclusive(|byte| *byte == b'\n').take(error.line() - 1).map(<[u8]>::len).sum();
    let column = before + error.column();
    let part_of_number = |at: &usize| matches!(line.get(*at), Some(b'0'..=b'9' | b'+' | b'-' | b'.' | b'e' | b'E'));
    let last = (column.saturating_sub(2)..=column).rev().find(part_of_number)?;
    let start = (0..=last).rev().take_while(part_of_number).last()?;
    let end = (last..line.len()).take_while(part_of_number).last()? + 1;
    Some(start..end)
}

struct Strict<'a>(&'a mut usize);

impl<'de> DeserializeSeed<'de> for Strict<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        *self.0 = self
            .0
            .checked_sub(1)
            .ok_or_else(|| D::Error::custom(format_args!("more than {MAX_VALUES} values in one message")))?;
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Strict<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut array = Vec::new();
        while let Some(item) = items.next_element_seed(Strict(self.0))? {
            array.push(item);
        }
        Ok(Value::Array(array))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(key) = members.next_key::<String>()? {
            let value = members.next_value_seed(Strict(self.0))?;
            if object.contains_key(&key) {
                return Err(A::Error::custom(format_args!("duplicate key `{}`", text::shown(&key))));
            }
            object.insert(key, value);
        }
        Ok(Value::Object(object))
    }
}

/// Returns the id of a message with valid JSON grammar. Everything else in the message is skipped, however deep or
/// large.
pub(crate) fn id_of(line: &[u8]) -> Option<Value> {
    let mut id = Seen::Not;
    let mut deserializer = serde_json::Deserializer::from_slice(line);
    deserializer.deserialize_map(IdOnly(&mut id)).ok()?;
    deserializer.end().ok()?;
    id.once()
}

/// Returns the id of a message of which only the beginning is available, if the id comes before the cut.
fn id_at_head(head: &[u8]) -> Option<Value> {
    let mut id = Seen::Not;
    let _ = serde_json::Deserializer::from_slice(head).deserialize_map(IdOnly(&mut id));
    id.once()
}

/// Returns the id of a message of which only the end is available, such as `,"id":7}`. Quotes inside a string would be
/// escaped, so in a valid message this can only be a member of the outermost object.
fn id_at_tail(tail: &[u8]) -> Option<Value> {
    let key = b"\"id\"";
    let members = tail.trim_ascii_end().strip_suffix(b"}")?;
    let at = members.windows(key.len()).rposition(|window| window == key)?;
    let value = members[at + key.len()..].trim_ascii_start().strip_prefix(b":")?;
    let follows_a_member = members[..at].trim_ascii_end().ends_with(b",");
    serde_json::from_slice(value).ok().filter(|id| follows_a_member && is_id(id))
}

enum Seen {
    Not,
    Once(Value),
    Twice,
}

impl Seen {
    fn once(self) -> Option<Value> {
        match self {
            Self::Once(id) => Some(id).filter(is_id),
            Self::Not | Self::Twice => None,
        }
    }
}

struct IdOnly<'a>(&'a mut Seen);

impl<'de> Visitor<'de> for IdOnly<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a message")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        while let Some(key) = members.next_key::<MemberKey>()? {
            if matches!(key, MemberKey::Id) {
                let id = members.next_value()?;
                *self.0 = if matches!(self.0, Seen::Not) { Seen::Once(id) } else { Seen::Twice };
            } else {
                members.next_value::<IgnoredAny>()?;
            }
        }
        Ok(())
    }
}

#[derive(serde::Deserialize)]
#[serde(rename_all = "lowercase")]
enum MemberKey {
    Id,
    #[serde(other)]
    Other,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_out_of_range_is_null_on_whichever_line_it_stands() {
        for text in
            ["{\"a\": 12345, \"b\": 1e999}", "{\"a\": 12345,\n \"b\": 1e999\n}", "{\"a\": 12345, \"b\":\n\n1e999}"]
        {
            assert_eq!(strict(text.as_bytes()).unwrap(), json!({ "a": 12345, "b": null }), "{text}");
        }
    }

    #[test]
    fn w60_a_message_that_is_not_counted_keeps_little() {
        let params = json!({ "requestId": 1, "reason": "x".repeat(1 << 20) });
        let Message::Cancelled { reason: Some(reason), .. } = notification("notifications/cancelled", Some(params))
        else {
            panic!("it names a request")
        };
        assert!(reason.len() < 1000, "{}", reason.len());
    }
}
