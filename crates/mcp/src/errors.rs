//! How an endpoint words the errors of the protocol itself, where the document of its tools prescribes it.

use rmcp::ErrorData;
use rmcp::model::ErrorCode;
use serde::Serialize;
use serde_json::Value;

use super::message::Fault;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ErrorStyle {
    /// Message of the error for a message that is no JSON-RPC request, which then has no id. By default the error says
    /// what is wrong.
    pub invalid_request: Option<&'static str>,
    /// Message of the error for an unknown method. By default the error names the method.
    pub method_not_found: Option<&'static str>,
    /// Whether errors without data have the member `"data": null`.
    pub null_data: bool,
}

impl ErrorStyle {
    pub(crate) fn encode(self, fault: &Fault) -> Vec<u8> {
        #[derive(Serialize)]
        struct Body<'a> {
            code: i32,
            message: &'a str,
            #[serde(skip_serializing_if = "Option::is_none")]
            data: Option<()>,
        }
        #[derive(Serialize)]
        struct Envelope<'a> {
            jsonrpc: &'static str,
            id: &'a Value,
            error: Body<'a>,
        }
        let (id, message) = match self.invalid_request.filter(|_| fault.is_malformed) {
            Some(message) => (&Value::Null, message),
            None => (&fault.id, &*fault.message),
        };
        let error = Body { code: fault.code, message, data: self.null_data.then_some(()) };
        serde_json::to_vec(&Envelope { jsonrpc: "2.0", id, error }).expect("plain data")
    }

    /// Words an error of a service. A tool that is not found is no unknown method.
    pub(crate) fn reword(self, error: ErrorData, is_call: bool) -> ErrorData {
        let message = self.method_not_found.filter(|_| error.code == ErrorCode::METHOD_NOT_FOUND && !is_call);
        let data = error.data.or(self.null_data.then_some(Value::Null));
        ErrorData { code: error.code, message: message.map_or(error.message, Into::into), data }
    }
}
