//! Encodes answers under the client's id and within the size limit, in the same way for every transport.

use rmcp::RoleServer;
use rmcp::model::JsonRpcMessage;
use rmcp::service::TxJsonRpcMessage;
use serde::Serialize;
use serde_json::Value;

use super::message::{Fault, INTERNAL_ERROR};

/// Maximum length of an answer in bytes. TypeScript clients close the connection at 10 MiB.
pub(crate) const MAX_ANSWER: usize = 8 << 20;

/// Encodes a message of the service: a result or an error under the id that the client gave, anything else unchanged.
pub(crate) fn encode(id: &Value, message: &TxJsonRpcMessage<RoleServer>) -> Vec<u8> {
    let body = match message {
        JsonRpcMessage::Response(response) => Body::Result(&response.result),
        JsonRpcMessage::Error(error) => Body::Error(&error.error),
        JsonRpcMessage::Notification(_) | JsonRpcMessage::Request(_) => return bytes(message),
    };
    let answer = bytes(&Envelope { jsonrpc: "2.0", id, body });
    if answer.len() > MAX_ANSWER { over_limit(id.clone(), answer.len()) } else { answer }
}

/// Encodes an answer around a result that is already encoded.
pub(crate) fn around(id: &Value, result: &[u8]) -> Vec<u8> {
    let id = bytes(id);
    let mut answer = Vec::with_capacity(result.len() + id.len() + 40);
    for part in [&b"{\"jsonrpc\":\"2.0\",\"id\":"[..], &id, b",\"result\":", result, b"}"] {
        answer.extend_from_slice(part);
    }
    answer
}

pub(crate) fn over_limit(id: Value, length: usize) -> Vec<u8> {
    let message =
        format!("an answer of {length} bytes is over the limit of {MAX_ANSWER} bytes; ask for less at a time");
    Fault::new(id, INTERNAL_ERROR, message).encode()
}

#[derive(Serialize)]
struct Envelope<'a, R, E> {
    jsonrpc: &'static str,
    id: &'a Value,
    #[serde(flatten)]
    body: Body<'a, R, E>,
}

#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum Body<'a, R, E> {
    Result(&'a R),
    Error(&'a E),
}

fn bytes<T: Serialize>(message: &T) -> Vec<u8> {
    serde_json::to_vec(message).expect("messages are plain data")
}
