//! Sessions of the legacy revisions: records of their tenant, the negotiated parameters and the calls in flight.
//!
//! A session id is not a permission: a session answers only to the tenant that opened it, at the endpoint where it was
//! opened. It ends when its tenant is removed, and a tenant that is added again under the same name does not get it. An
//! unknown id gets the same answer as another tenant's id.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use engine::op::Tenant;
use http::StatusCode;
use rmcp::model::{ClientJsonRpcMessage, InitializeRequestParams, JsonRpcMessage, ProtocolVersion, RequestId};
use serde_json::Value;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::HttpOptions;
use super::counters::{Counters, Open};
use super::replay::Replay;
use crate::message::{Fault, INVALID_REQUEST};
use crate::{Caller, Membership, Revision};

/// Error code for an unknown session, as the official SDKs use it.
const NOT_FOUND: i32 = -32001;

/// Maximum number of requests of one session that run at once.
const MAX_CALLS: usize = 256;

/// Maximum number of questions to the client that wait for an answer.
const MAX_ASKED: usize = 64;

/// Maximum number of streams of one session that belong to no request.
const MAX_LISTENERS: usize = 8;

/// Maximum length, as JSON, of the parameters of `initialize` that a session stores.
const MAX_INFO: usize = 4096;

pub(super) struct Sessions {
    all: Mutex<HashMap<String, Arc<Session>>>,
    most: usize,
    most_per_tenant: usize,
    idle: Duration,
    counters: Counters,
}

pub(super) struct Session {
    pub id: String,
    pub info: InitializeRequestParams,
    tenant: Tenant,
    membership: Membership,
    endpoint: String,
    state: Mutex<SessionState>,
    /// Cancelled when the session or its tenant's membership ends; its streams and calls end with it.
    pub ended: CancellationToken,
    _counted: Open,
}

struct SessionState {
    touched: Instant,
    /// Whether any request came after `initialize`.
    used: bool,
    listeners: usize,
    /// Calls in flight by the client's id as JSON, so that `1` and `"1"` differ.
    calls: HashMap<String, CancellationToken>,
    last_asked: i64,
    asked: HashMap<i64, PendingQuestion>,
    replays: Vec<Arc<Replay>>,
}

/// A question to the client: the id that the service loop gave it, and the channel for its answer.
struct PendingQuestion(RequestId, mpsc::Sender<ClientJsonRpcMessage>);

impl Sessions {
    pub(super) fn new(options: &HttpOptions, counters: Counters) -> Self {
        Self {
            all: Mutex::default(),
            most: options.max_sessions,
            most_per_tenant: options.max_sessions_per_tenant,
            idle: options.session_idle,
            counters,
        }
    }

    fn all(&self) -> MutexGuard<'_, HashMap<String, Arc<Session>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a session. At the limit it replaces the tenant's most dispensable session: one that was never used, or
    /// else the least recently used one. Returns `None` if the tenant has no session that is not busy.
    pub(super) fn open(&self, caller: &Caller, endpoint: &str, info: InitializeRequestParams) -> Option<Arc<Session>> {
        let session = Arc::new(Session {
            id: Uuid::new_v4().to_string(),
            info,
            tenant: caller.tenant.clone(),
            membership: caller.membership.clone(),
            endpoint: endpoint.to_owned(),
            state: Mutex::new(SessionState {
                touched: Instant::now(),
                used: false,
                listeners: 0,
                calls: HashMap::new(),
                last_asked: 0,
                asked: HashMap::new(),
                replays: Vec::new(),
            }),
            ended: caller.membership.token(),
            _counted: self.counters.session(),
        });
        let mut all = self.all();
        if all.len() >= self.most {
            all.retain(|_, session| !session.ended.is_cancelled());
        }
        let own = all.values().filter(|other| other.tenant == session.tenant);
        if all.len() >= self.most || own.clone().count() >= self.most_per_tenant {
            let spare = own.filter_map(|other| Some((other.state().spare()?, &other.id))).min();
            let (_, spare) = spare?;
            let spare = all.get(spare).filter(|spare| spare.end_if(|_| true))?.id.clone();
            all.remove(&spare);
        }
        all.insert(session.id.clone(), session.clone());
        Some(session)
    }

    /// Returns the session if it belongs to the caller's tenant and to this endpoint, and has not ended.
    pub(super) fn find(&self, id: &str, caller: &Caller, endpoint: &str) -> Option<Arc<Session>> {
        let session = self.all().get(id).cloned()?;
        let is_own = session.tenant == caller.tenant && session.membership == caller.membership;
        (is_own && session.endpoint == endpoint && !session.ended.is_cancelled()).then(|| {
            session.touch();
            session
        })
    }

    pub(super) fn close(&self, session: &Session) {
        self.all().remove(&session.id);
        session.ended.cancel();
    }

    /// Ends the sessions that were idle for too long, and removes those that have ended.
    pub(super) fn sweep(&self) {
        let now = Instant::now();
        let is_over = |session: &Session| {
            session.ended.is_cancelled() || session.end_if(|touched| now.duration_since(touched) >= self.idle)
        };
        self.all().retain(|_, session| !is_over(session));
    }

    pub(super) fn close_all(&self) {
        for (_, session) in self.all().drain() {
            session.ended.cancel();
        }
    }
}

/// Returns the parameters of `initialize` that a session stores, or `None` if the client's description of itself is too
/// long.
pub(super) fn stored_info(
    mut info: InitializeRequestParams,
    negotiated: ProtocolVersion,
) -> Option<InitializeRequestParams> {
    info.meta = None;
    info.protocol_version = negotiated;
    info.client_info.icons = None;
    info.client_info.description = None;
    info.client_info.website_url = None;
    let length = serde_json::to_string(&info).map_or(usize::MAX, |text| text.len());
    (length <= MAX_INFO).then_some(info)
}

/// Returns the answer to a request that names a session that does not exist.
pub(super) fn not_found(id: Value) -> (StatusCode, Fault) {
    let why = "session not found: it ended, or never was; initialize again";
    (StatusCode::NOT_FOUND, Fault::new(id, NOT_FOUND, why))
}

impl SessionState {
    /// Returns a key by which sessions are sorted, the most dispensable first; `None` while the session is busy.
    fn spare(&self) -> Option<(bool, Instant)> {
        (self.calls.is_empty() && self.listeners == 0).then_some((self.used, self.touched))
    }
}

impl Session {
    fn state(&self) -> MutexGuard<'_, SessionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn tenant(&self) -> &Tenant {
        &self.tenant
    }

    fn touch(&self) {
        let mut state = self.state();
        state.touched = Instant::now();
        state.used = true;
    }

    /// Ends the session unless it is busy, and returns whether it ended. A concurrent call either comes first and keeps
    /// the session, or finds it ended.
    fn end_if(&self, idle_since: impl FnOnce(Instant) -> bool) -> bool {
        let state = self.state();
        let ends = state.spare().is_some_and(|(_, touched)| idle_since(touched));
        if ends {
            self.ended.cancel();
        }
        ends
    }

    /// Returns whether streams of the session's revision begin with an event that lets the client resume them.
    pub(super) fn is_resumable(&self) -> bool {
        self.revision() >= Revision::V2025_11_25
    }

    /// Returns the revision that the session negotiated.
    pub(super) fn revision(&self) -> Revision {
        Revision::of(self.info.protocol_version.as_str())
    }

    /// Records a call, unless a call with its id still runs or the session has just ended.
    pub(super) fn enter(self: &Arc<Self>, id: &Value) -> Result<SessionCall, (StatusCode, Fault)> {
        let mut state = self.state();
        let key = id.to_string();
        let refused = |why: String| (StatusCode::OK, Fault::new(id.clone(), INVALID_REQUEST, why));
        if self.ended.is_cancelled() {
            return Err(not_found(id.clone()));
        }
        if state.calls.len() >= MAX_CALLS {
            return Err(refused(format!("{MAX_CALLS} requests of this session are running already")));
        }
        if state.calls.contains_key(&key) {
            return Err(refused("a request with this `id` is still running".into()));
        }
        let withdrawn = self.ended.child_token();
        state.calls.insert(key.clone(), withdrawn.clone());
        Ok(SessionCall { session: self.clone(), key, withdrawn })
    }

    /// Cancels a request that the client takes back. Unknown ids are ignored.
    pub(super) fn withdraw(&self, id: &Value) {
        if let Some(withdrawn) = self.state().calls.get(&id.to_string()) {
            withdrawn.cancel();
        }
    }

    /// Gives a question to the client an id that is unique in the session. Returns false if too many questions wait
    /// already.
    pub(super) fn ask(&self, id: &mut RequestId, answers: mpsc::Sender<ClientJsonRpcMessage>) -> bool {
        let mut state = self.state();
        state.asked.retain(|_, PendingQuestion(_, answers)| !answers.is_closed());
        if state.asked.len() >= MAX_ASKED {
            return false;
        }
        state.last_asked += 1;
        let ours = state.last_asked;
        let inner = std::mem::replace(id, RequestId::Number(ours));
        state.asked.insert(ours, PendingQuestion(inner, answers));
        true
    }

    /// Forwards the client's answer to the call that asked.
    pub(super) async fn answer(&self, id: &Value, mut message: ClientJsonRpcMessage) {
        let asked = id.as_i64().and_then(|id| self.state().asked.remove(&id));
        let Some(PendingQuestion(inner, answers)) = asked else { return };
        match &mut message {
            JsonRpcMessage::Response(response) => response.id = inner,
            JsonRpcMessage::Error(error) => error.id = Some(inner),
            JsonRpcMessage::Request(_) | JsonRpcMessage::Notification(_) => return,
        }
        let _ = answers.send(message).await;
    }

    /// Registers a stream that belongs to no request.
    pub(super) fn listen(self: &Arc<Self>) -> Option<Listener> {
        let mut state = self.state();
        (state.listeners < MAX_LISTENERS).then(|| {
            state.listeners += 1;
            Listener(self.clone())
        })
    }

    pub(super) fn add_replay(&self, replay: Arc<Replay>) {
        self.state().replays.push(replay);
    }

    pub(super) fn remove_replay(&self, replay: &Replay) {
        self.state().replays.retain(|other| other.id != replay.id);
    }

    /// Returns the stream that an event belongs to, and the event's number in it.
    pub(super) fn replay(&self, event: &str) -> Option<(Arc<Replay>, u64)> {
        let (stream, number) = event.split_once('/')?;
        let number = number.parse().ok()?;
        let replay = self.state().replays.iter().find(|replay| replay.id == stream).cloned()?;
        Some((replay, number))
    }
}

/// A call in flight. Its session does not end by idleness while the call lasts.
pub(super) struct SessionCall {
    session: Arc<Session>,
    key: String,
    withdrawn: CancellationToken,
}

impl SessionCall {
    pub(super) async fn withdrawn(&self) {
        self.withdrawn.cancelled().await;
    }
}

impl Drop for SessionCall {
    fn drop(&mut self) {
        let mut state = self.session.state();
        state.calls.remove(&self.key);
        state.touched = Instant::now();
    }
}

pub(super) struct Listener(Arc<Session>);

impl Drop for Listener {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.listeners -= 1;
        state.touched = Instant::now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sessions(most: usize) -> Sessions {
        let options = HttpOptions { max_sessions: most, session_idle: Duration::ZERO, ..HttpOptions::default() };
        Sessions::new(&options, Counters::default())
    }

    fn open(sessions: &Sessions) -> Option<Arc<Session>> {
        sessions.open(&Caller::local(None), "toy", super::super::endpoint::unknown_peer(ProtocolVersion::V_2025_11_25))
    }

    #[tokio::test]
    async fn a_session_ends_before_a_call_begins_or_not_at_all() {
        let sessions = sessions(1);
        let first = open(&sessions).unwrap();
        let entry = first.enter(&1.into()).unwrap();
        assert!(open(&sessions).is_none(), "a busy session makes no room");
        sessions.sweep();
        assert!(!first.ended.is_cancelled(), "nor is it idle");
        drop(entry);
        let second = open(&sessions).unwrap();
        let (status, fault) = first.enter(&2.into()).err().unwrap();
        assert_eq!((status, fault.id), (StatusCode::NOT_FOUND, 2.into()), "found before it ended");
        sessions.sweep();
        assert!(second.ended.is_cancelled());
    }
}
