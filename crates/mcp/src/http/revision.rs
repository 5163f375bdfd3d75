//! Determines the protocol revision of a request and checks that the request's headers agree with its body.
//!
//! Nothing here has side effects. Up to revision 2025-11-25 a handshake decides the revision. Since 2026-07-28 each
//! request states its revision and repeats its subject in headers that intermediaries may read.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use http::HeaderMap;
use rmcp::model::{ClientRequest, ErrorCode, GetMeta, JsonObject, ProtocolVersion};
use serde_json::Value;

use crate::Revision;
use crate::message::{Fault, INVALID_PARAMS, INVALID_REQUEST};

pub(super) const VERSION: &str = "mcp-protocol-version";
const METHOD: &str = "mcp-method";
const NAME: &str = "mcp-name";
const PARAM: &str = "mcp-param-";

#[derive(Debug, PartialEq)]
pub(super) enum Era {
    /// A revision up to 2025-11-25, as the session negotiated it or as the header names it.
    Legacy { version: Option<ProtocolVersion> },
    /// Revision 2026-07-28 or later, as the request itself states.
    Modern { version: ProtocolVersion, meta_is_malformed: bool },
}

impl Era {
    /// Returns the revision by which a request outside of a session is answered.
    pub(super) fn revision(&self) -> Revision {
        match self {
            Self::Legacy { version } => {
                version.as_ref().map_or(Revision::Unstated, |version| Revision::of(version.as_str()))
            }
            Self::Modern { version, .. } => Revision::of(version.as_str()),
        }
    }
}

/// Returns whether the header names revision 2026-07-28 or later.
pub(super) fn is_modern(headers: &HeaderMap) -> bool {
    text(headers, VERSION).ok().flatten().is_some_and(|version| version >= ProtocolVersion::V_2026_07_28.as_str())
}

/// Returns whether the client may send batches in the revision that the header names.
pub(super) fn has_batches(headers: &HeaderMap) -> bool {
    text(headers, VERSION).is_ok_and(|version| version.map_or(Revision::Unstated, Revision::of).has_batches())
}

pub(super) fn era(
    headers: &HeaderMap,
    id: &Value,
    request: &ClientRequest,
    schema: impl FnOnce(&str) -> Option<std::sync::Arc<JsonObject>>,
) -> Result<Era, Fault> {
    let refuse = |code: i32, why: String| Fault::new(id.clone(), code, why);
    let mismatch = |why: String| refuse(ErrorCode::HEADER_MISMATCH.0, why);
    let header = text(headers, VERSION).map_err(|why| refuse(INVALID_REQUEST, why))?;
    let has_standard_headers = header.is_some_and(|v| v >= ProtocolVersion::STANDARD_HEADERS.as_str());

    // An `initialize` with a version in its `_meta` belongs to a revision that has no such method, and is refused as
    // such a request.
    if let ClientRequest::InitializeRequest(initialize) = request
        && request.get_meta().protocol_version().is_none()
    {
        let asked = initialize.params.protocol_version.as_str();
        if let Some(header) = header.filter(|header| *header != asked) {
            let why = format!("MCP-Protocol-Version says `{header}`, initialize asks for `{asked}`");
            return Err(refuse(INVALID_REQUEST, why));
        }
        if has_standard_headers && headers.contains_key(METHOD) {
            method(headers, "initialize").map_err(mismatch)?;
        }
        return Ok(Era::Legacy { version: None });
    }

    let meta = request.get_meta();
    let missing = meta.missing_required_keys(&ProtocolVersion::V_2026_07_28);
    let Some(version) = meta.protocol_version() else {
        if has_standard_headers || matches!(request, ClientRequest::DiscoverRequest(_)) {
            let why = format!("request _meta is missing or has malformed required fields: {}", missing.join(", "));
            return Err(refuse(INVALID_PARAMS, why));
        }
        let version = match header {
            None => None,
            Some(header) => Some(known(header).ok_or_else(|| {
                let known = ProtocolVersion::KNOWN_VERSIONS.iter().map(ProtocolVersion::as_str).collect::<Vec<_>>();
                refuse(INVALID_REQUEST, format!("MCP-Protocol-Version is none of {}", known.join(", ")))
            })?),
        };
        return Ok(Era::Legacy { version });
    };
    match header {
        None => {
            return Err(mismatch(
                "the MCP-Protocol-Version header is missing; the request's _meta names a version".into(),
            ));
        }
        Some(header) if header != version.as_str() => {
            let why = format!("MCP-Protocol-Version says `{header}`, the request's _meta says `{version}`");
            return Err(mismatch(why));
        }
        Some(_) => {}
    }
    if has_standard_headers {
        method(headers, request.method()).map_err(mismatch)?;
        name(headers, request).map_err(mismatch)?;
        if let ClientRequest::CallToolRequest(call) = request
            && let Some(schema) = schema(&call.params.name)
        {
            arguments(headers, &schema, call.params.arguments.as_ref()).map_err(mismatch)?;
        }
    }
    Ok(Era::Modern { version, meta_is_malformed: !missing.is_empty() })
}

pub(super) fn known(version: &str) -> Option<ProtocolVersion> {
    ProtocolVersion::KNOWN_VERSIONS.iter().find(|known| known.as_str() == version).cloned()
}

fn method(headers: &HeaderMap, method: &str) -> Result<(), String> {
    match text(headers, METHOD)? {
        Some(header) if header == method => Ok(()),
        Some(header) => Err(format!("Mcp-Method says `{header}`, the body `{method}`")),
        None => Err("the Mcp-Method header is missing".into()),
    }
}

fn name(headers: &HeaderMap, request: &ClientRequest) -> Result<(), String> {
    let name: &str = match request {
        ClientRequest::CallToolRequest(request) => &request.params.name,
        ClientRequest::GetPromptRequest(request) => &request.params.name,
        ClientRequest::ReadResourceRequest(request) => &request.params.uri,
        ClientRequest::SubscribeRequest(request) => &request.params.uri,
        ClientRequest::UnsubscribeRequest(request) => &request.params.uri,
        ClientRequest::GetTaskRequest(request) => &request.params.task_id,
        ClientRequest::UpdateTaskRequest(request) => &request.params.task_id,
        ClientRequest::CancelTaskRequest(request) => &request.params.task_id,
        _ => return Ok(()),
    };
    match text(headers, NAME)? {
        None => Err(format!("the Mcp-Name header is missing; {} needs it", request.method())),
        Some(header) if decoded(NAME, header)? == name => Ok(()),
        Some(header) => Err(format!("Mcp-Name says `{header}`, the body names another")),
    }
}

/// Checks the headers that have to repeat arguments according to the tool's schema.
fn arguments(headers: &HeaderMap, schema: &JsonObject, given: Option<&JsonObject>) -> Result<(), String> {
    let properties = schema.get("properties").and_then(Value::as_object);
    for (property, schema) in properties.into_iter().flatten() {
        let value = given.and_then(|given| given.get(property));
        if let Some(header) = schema.get("x-mcp-header").and_then(Value::as_str).filter(|header| !header.is_empty()) {
            argument(headers, &format!("{PARAM}{}", header.to_ascii_lowercase()), property, value)?;
        }
        if let Some(inner) = schema.as_object() {
            arguments(headers, inner, value.and_then(Value::as_object))?;
        }
    }
    Ok(())
}

fn argument(headers: &HeaderMap, header: &str, property: &str, value: Option<&Value>) -> Result<(), String> {
    let value = match value {
        Some(Value::String(text)) => Some(text.clone()),
        Some(Value::Bool(flag)) => Some(flag.to_string()),
        Some(Value::Number(number)) => Some(number.to_string()),
        _ => None,
    };
    match (text(headers, header)?, value) {
        (None, None) => Ok(()),
        (Some(_), None) => Err(format!("{header} is there, `{property}` is not")),
        (None, Some(_)) => Err(format!("{header} is missing for `{property}`")),
        (Some(given), Some(value)) if decoded(header, given)? == value => Ok(()),
        (Some(_), Some(_)) => Err(format!("{header} differs from `{property}`")),
    }
}

/// Returns the only value of a header. Two values are refused, because two machines could read them differently.
fn text<'a>(headers: &'a HeaderMap, name: &str) -> Result<Option<&'a str>, String> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (None, _) => Ok(None),
        (Some(value), None) => value.to_str().map(Some).map_err(|_| format!("{name} is not plain text")),
        (Some(_), Some(_)) => Err(format!("{name} is given twice")),
    }
}

/// Decodes `=?base64?…?=`, which represents a value that a header cannot carry.
fn decoded(name: &str, value: &str) -> Result<String, String> {
    let Some(inner) = value.strip_prefix("=?base64?").and_then(|value| value.strip_suffix("?=")) else {
        return Ok(value.to_owned());
    };
    let bytes = BASE64_STANDARD.decode(inner).ok();
    bytes.and_then(|bytes| String::from_utf8(bytes).ok()).ok_or_else(|| format!("{name} is not valid Base64"))
}
