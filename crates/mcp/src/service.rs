//! The wrapper around every handler on every transport. It turns a panic into an answer, refuses methods that were not
//! declared, fits results to the client's revision, and adds the members of a result for which rmcp's types have no
//! room.

use std::borrow::Cow;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::{FutureExt, TryFutureExt};
use rmcp::model::{
    ClientNotification, ClientRequest, CustomResult, ErrorCode, ProtocolVersion, ServerCapabilities, ServerConfig,
    ServerResult,
};
use rmcp::service::{NotificationContext, RequestContext, Service};
use rmcp::{ErrorData, RoleServer};
use serde_json::{Map, Value};
use text::shown;
use tokio_util::sync::CancellationToken;

use super::errors::ErrorStyle;
use crate::revision::Revision;

/// A handler in this wrapper.
pub(crate) struct Guarded<S> {
    pub service: S,
    /// Token that cancels every call that still runs, as the last step of a shutdown. Over HTTP there is none, because
    /// the calls' own tokens are children of the server's.
    pub halt: Option<CancellationToken>,
    pub errors: ErrorStyle,
}

/// Members of a result in addition to those that rmcp knows. A handler finds them in its request's extensions.
#[derive(Clone, Default)]
pub struct ExtraMembers(Arc<Mutex<Map<String, Value>>>);

impl ExtraMembers {
    pub fn put(&self, members: Map<String, Value>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(members);
    }

    fn add_to(&self, result: ServerResult) -> ServerResult {
        let members = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        if members.is_empty() {
            return result;
        }
        let mut value = serde_json::to_value(&result).expect("results are plain data");
        if let Value::Object(object) = &mut value {
            for (name, member) in members {
                object.entry(name).or_insert(member);
            }
        }
        ServerResult::CustomResult(CustomResult::new(value))
    }
}

impl<S: Service<RoleServer>> Service<RoleServer> for Guarded<S> {
    async fn handle_request(
        &self,
        request: ClientRequest,
        context: RequestContext<RoleServer>,
    ) -> Result<ServerResult, ErrorData> {
        let is_call = matches!(request, ClientRequest::CallToolRequest(_));
        self.handle(request, context).await.map_err(|error| self.errors.reword(error, is_call))
    }

    async fn handle_notification(
        &self,
        notification: ClientNotification,
        context: NotificationContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        self.service.handle_notification(notification, context).await
    }

    fn get_info(&self) -> ServerConfig {
        self.service.get_info()
    }

    fn supported_protocol_versions(&self) -> Cow<'static, [ProtocolVersion]> {
        self.service.supported_protocol_versions()
    }
}

impl<S: Service<RoleServer>> Guarded<S> {
    async fn handle(
        &self,
        request: ClientRequest,
        mut context: RequestContext<RoleServer>,
    ) -> Result<ServerResult, ErrorData> {
        if is_modern(&context) && REMOVED.contains(&request.method()) {
            return Err(not_found(request.method()));
        }
        self.refuse_undeclared(&request)?;
        let revision = context.extensions.get::<Revision>().copied().unwrap_or_default();
        let extra = ExtraMembers::default();
        context.extensions.insert(extra.clone());
        let what = match &request {
            ClientRequest::CallToolRequest(call) => shown(&call.params.name).into_owned(),
            other => shown(other.method()).into_owned(),
        };
        let cancel = context.ct.clone();
        // The future is large, and rmcp moves the future of a request several times.
        let handled = caught(Box::pin(self.service.handle_request(request, context)));
        let handled = match &self.halt {
            None => handled.await,
            Some(halt) => {
                let mut handled = pin!(handled);
                tokio::select! {
                    handled = &mut handled => handled,
                    () = halt.cancelled() => {
                        cancel.cancel();
                        handled.await
                    }
                }
            }
        };
        match handled {
            Ok(result) => result.map(|mut result| {
                revision.fit(&mut result);
                extra.add_to(result)
            }),
            Err(Panicked) => {
                tracing::error!(what, "a handler panicked");
                Err(ErrorData::internal_error(format!("internal error in {what}: the call was given up"), None))
            }
        }
    }

    /// Refuses methods whose capability was not declared, and declared methods with invalid params. rmcp answers some
    /// of the former with success and an empty list, and reports the latter as unknown methods.
    fn refuse_undeclared(&self, request: &ClientRequest) -> Result<(), ErrorData> {
        let method = request.method();
        let Some(is_declared) = capability(method) else { return Ok(()) };
        if !is_declared(&self.get_info().capabilities) {
            return Err(not_found(method));
        }
        match request {
            ClientRequest::CustomRequest(_) => {
                Err(ErrorData::invalid_params(format!("invalid params for {}", shown(method)), None))
            }
            _ => Ok(()),
        }
    }
}

/// Methods that revision 2026-07-28 removed. rmcp refuses some of them itself, but not if their params are invalid.
const REMOVED: [&str; 5] = ["initialize", "ping", "logging/setLevel", "resources/subscribe", "resources/unsubscribe"];

pub fn is_modern(context: &RequestContext<RoleServer>) -> bool {
    let version = context.meta.protocol_version();
    version.is_some_and(|version| version.as_str() >= ProtocolVersion::V_2026_07_28.as_str())
}

fn not_found(method: &str) -> ErrorData {
    ErrorData::new(ErrorCode::METHOD_NOT_FOUND, format!("method not found: {}", shown(method)), None)
}

/// Returns the check for the capability that a method belongs to.
fn capability(method: &str) -> Option<fn(&ServerCapabilities) -> bool> {
    match method {
        "completion/complete" => Some(|declared| declared.completions.is_some()),
        "logging/setLevel" => Some(|declared| declared.logging.is_some()),
        "tasks/get" | "tasks/cancel" | "tasks/update" => Some(ServerCapabilities::supports_tasks),
        "prompts/list" | "prompts/get" => Some(|declared| declared.prompts.is_some()),
        "resources/list" | "resources/templates/list" | "resources/read" => {
            Some(|declared| declared.resources.is_some())
        }
        "resources/subscribe" | "resources/unsubscribe" => {
            Some(|declared| declared.resources.as_ref().is_some_and(|declared| declared.subscribe == Some(true)))
        }
        _ => None,
    }
}

pub(crate) struct Panicked;

/// Catches a panic of the future: rmcp never answers a request whose handler panics.
pub(crate) fn caught<T>(future: impl Future<Output = T>) -> impl Future<Output = Result<T, Panicked>> {
    AssertUnwindSafe(future).catch_unwind().map_err(|_| Panicked)
}
