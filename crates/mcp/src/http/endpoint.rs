//! Handles requests below `/mcp`: finds the caller and the revision, and chooses the form of the answer.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use engine::Hold;
use engine::memory::Full;
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, join_all};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use hyper::body::Incoming as IncomingBody;
use rmcp::model::{
    ClientCapabilities, ClientRequest, GetExtensions, Implementation, InitializeRequestParams, ProtocolVersion,
};
use serde_json::Value;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tower_service::Service as _;
use tracing::Instrument;
use uuid::Uuid;

use super::body::{Bodies, busy, over};
use super::connection::Connection;
use super::counters::Counters;
use super::direct::{Direct, Peers};
use super::exchange::{AnswerBytes, ClientPeer, Exchange, ExchangeEvent, ExchangeParts, FinalAnswer};
use super::guard::Guard;
use super::log::{HTTP_LOG, HttpEvent};
use super::replay::Replay;
use super::revision::{self, Era};
use super::session::{self, Listener, Session, Sessions};
use super::share::{Share, Shares};
use super::sse::{self, EventSource};
use super::turns::{Turn, Turns, during};
use super::{App, Caller, Denied, Endpoint, Peer, SERVER_ERROR, empty, json, refuse, refused, reworded};
use crate::Origin;
use crate::answer::{self, MAX_ANSWER};
use crate::message::{self, Fault, INTERNAL_ERROR, INVALID_REQUEST, Incoming, Message, PARSE_ERROR};
use crate::service::{Panicked, caught};

const SESSION: &str = "mcp-session-id";
const LAST_EVENT: &str = "last-event-id";
const METHODS: &str = "GET, POST, DELETE";

pub(super) struct Server {
    app: App,
    guard: Guard,
    bodies: Bodies,
    pub sessions: Sessions,
    shares: Arc<Shares>,
    turns: Arc<Turns>,
    /// Turns for large messages, which are read on separate threads.
    large_turns: Arc<Turns>,
    peers: Arc<Peers>,
    /// Token that cancels all calls.
    pub halt: CancellationToken,
    /// Token that ends the streams that belong to no call.
    pub closing: CancellationToken,
}

/// The endpoint of a request, its caller, and everything else that is known before its body is read.
struct RequestInfo<'a> {
    endpoint: &'a Endpoint,
    name: &'a str,
    headers: &'a HeaderMap,
    caller: Caller,
    /// The version of the authenticator when the caller was admitted.
    version: u64,
    /// The memory of the request, and then of its answer.
    hold: Hold,
    /// The request's share of the tenant's requests in flight.
    share: Arc<Share>,
    request_id: String,
    peer: SocketAddr,
}

/// A POST whose body has been read.
struct PostedRequest<'a> {
    info: RequestInfo<'a>,
    form: Form,
    session: Option<Arc<Session>>,
}

/// One request of a body, with the hold for its memory and that of its answer.
struct BatchItem {
    id: Value,
    request: ClientRequest,
    hold: Hold,
}

/// One message of a batch that has an effect.
#[allow(clippy::large_enum_variant, reason = "the large variant is the usual one")]
enum BatchStep {
    Start(BatchItem),
    Withdraw(Value),
}

/// The forms of an answer that the client accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Json,
    Stream,
    Either,
}

impl Server {
    pub(super) fn new(app: App) -> Self {
        let options = &app.options;
        Self {
            guard: Guard::new(options),
            bodies: Bodies::new(options.max_body, options.body_deadline),
            sessions: Sessions::new(options, app.counters.clone()),
            shares: Shares::new(options.max_requests_per_tenant),
            turns: Turns::for_runtime(),
            large_turns: Turns::for_runtime(),
            peers: Arc::default(),
            halt: CancellationToken::new(),
            closing: CancellationToken::new(),
            app,
        }
    }

    pub(super) fn options(&self) -> &super::HttpOptions {
        &self.app.options
    }

    fn log(&self, event: HttpEvent<'_>) {
        (self.app.log)(event);
    }

    fn log_answer(&self, method: &str, bytes: &[u8]) {
        self.log(HttpEvent::Sending { method });
        log_body(bytes, |body| self.log(HttpEvent::Response(body)));
    }

    pub(super) fn counters(&self) -> &Counters {
        &self.app.counters
    }

    pub(super) async fn answer(&self, request: Request<IncomingBody>, connection: &Arc<Connection>) -> Response<Body> {
        let request_id = Uuid::new_v4();
        let span = tracing::info_span!(target: HTTP_LOG, "http", %request_id, tenant = tracing::field::Empty);
        let answered = caught(self.route(request, connection, request_id)).instrument(span);
        answered.await.unwrap_or_else(|Panicked| {
            tracing::error!(%request_id, "a request's handling panicked");
            let fault = Fault::new(Value::Null, INTERNAL_ERROR, "internal error: the request was given up");
            refuse(StatusCode::INTERNAL_SERVER_ERROR, &fault)
        })
    }

    async fn route(
        &self,
        request: Request<IncomingBody>,
        connection: &Arc<Connection>,
        request_id: Uuid,
    ) -> Response<Body> {
        let (parts, body) = request.into_parts();
        let cors = match self.guard.check(&parts, connection.local) {
            Ok(cors) => cors,
            Err(refusal) => return refused(refusal.status, refusal.why),
        };
        let mut response = self.dispatch(parts, body, connection, request_id).await;
        cors.apply(response.headers_mut());
        response
    }

    async fn dispatch(
        &self,
        mut parts: Parts,
        body: IncomingBody,
        connection: &Arc<Connection>,
        request_id: Uuid,
    ) -> Response<Body> {
        if parts.method == Method::OPTIONS
            && let Some(preflight) = self.guard.preflight(&parts)
        {
            return preflight;
        }
        let Some(name) = endpoint_name(parts.uri.path()).map(str::to_owned) else {
            connection.busy();
            parts.extensions.insert(Peer(connection.peer));
            let request = Request::from_parts(parts, Body::new(body));
            return self.app.routes.clone().call(request).await.unwrap_or_else(|never| match never {});
        };
        let version = self.app.authenticator.version();
        let caller = match self.app.authenticator.admit(&parts, connection.peer) {
            Ok(caller) => caller,
            Err(denied) => return self.bodies.unread(body, denied_response(denied)).await,
        };
        tracing::Span::current().record("tenant", &caller.tenant.0);
        let Some(share) = self.shares.take(&caller.tenant) else {
            let why = "too many requests of yours are under way; retry when some have ended";
            self.app.authenticator.throttled(&caller.tenant, connection.peer, why);
            return self.bodies.unread(body, busy(why)).await;
        };
        let share = Arc::new(share);
        connection.set_share(share.clone());
        let name = if name.is_empty() { &self.app.default } else { &name };
        let Some((name, endpoint)) = self.app.endpoints.get_key_value(name) else {
            let names = self.app.endpoints.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            let why = format!("no such set of tools; there are {names}");
            return refused(StatusCode::NOT_FOUND, why);
        };
        let hold = self.options().memory.hold(&caller.tenant);
        let info = RequestInfo {
            endpoint,
            name,
            headers: &parts.headers,
            caller,
            version,
            hold,
            share,
            request_id: request_id.to_string(),
            peer: connection.peer,
        };
        let response = match parts.method {
            Method::POST => self.post(info, &parts, body, connection).await,
            Method::GET | Method::HEAD => self.get(info, connection).await,
            Method::DELETE => self.delete(&info),
            _ => not_allowed("this method is not served here"),
        };
        reworded(response, endpoint.errors)
    }

    async fn post(
        &self,
        info: RequestInfo<'_>,
        parts: &Parts,
        body: IncomingBody,
        connection: &Arc<Connection>,
    ) -> Response<Body> {
        let headers = info.headers;
        self.log(HttpEvent::Request { peer: connection.peer });
        let Some(form) = Form::of(headers) else {
            let why = "the answer is application/json or text/event-stream; Accept allows neither";
            return refused(StatusCode::NOT_ACCEPTABLE, why);
        };
        if !is_json(headers) {
            let why = "the body must be application/json, not compressed";
            return refused(StatusCode::UNSUPPORTED_MEDIA_TYPE, why);
        }
        let bytes = match self.bodies.read(headers, body, &info.hold).await {
            Ok(bytes) => bytes,
            Err(refusal) => return refusal,
        };
        connection.busy();
        // While it is parsed, the request is in memory twice: as bytes and as a message.
        if let Err(full) = info.hold.add(bytes.len()) {
            return self.over(&info, full);
        }
        // Large messages have a separate queue, so that messages read on this thread do not wait for one read on
        // another.
        let is_large = bytes.len() >= LARGE;
        let turn = if is_large { &self.large_turns } else { &self.turns }.take(&info.caller.tenant).await;
        if let Err(denied) = self.confirm(&info, parts) {
            return denied_response(denied);
        }
        log_body(&bytes, |body| self.log(HttpEvent::RequestBody(body)));
        let session = match self.session(&info) {
            Ok(session) => session,
            // Finding the id would mean reading the whole large message on this thread.
            Err(unknown) if is_large => return unknown.answer(Value::Null),
            Err(unknown) => return unknown.answer(message::id_of(&bytes).unwrap_or_default()),
        };
        let batches = match &session {
            Some(session) => session.revision().has_batches(),
            None => revision::has_batches(headers),
        };
        let (read, turn) = if is_large {
            match read_on_thread(bytes, batches, info.hold.clone(), turn).await {
                Ok(read) => (read, self.turns.take(&info.caller.tenant).await),
                Err(full) => return self.over(&info, full),
            }
        } else {
            (message::read(&bytes, batches), turn)
        };
        if let Err(denied) = self.confirm(&info, parts) {
            return denied_response(denied);
        }
        match read {
            Ok(Incoming::One(message)) => during(turn, self.one(PostedRequest { info, form, session }, message)).await,
            Ok(Incoming::Batch(messages)) => {
                // Each message of a batch counts as one request towards the caller's rate.
                for _ in 1..messages.len() {
                    if let Err(denied) = self.app.authenticator.admit(parts, connection.peer) {
                        return denied_response(denied);
                    }
                }
                during(turn, self.batch(PostedRequest { info, form, session }, messages)).await
            }
            Err(fault) => refuse(status_of(&fault, headers), &fault),
        }
    }

    /// Refuses a request whose token was removed or replaced while its body arrived or waited for its turn.
    fn confirm(&self, info: &RequestInfo<'_>, parts: &Parts) -> Result<(), Denied> {
        let authenticator = &self.app.authenticator;
        match authenticator.version() == info.version {
            true => Ok(()),
            false => authenticator.confirm(parts, info.peer, &info.caller),
        }
    }

    /// Refuses a request for which there is no memory, and reports a tenant that has used up its share.
    fn over(&self, info: &RequestInfo<'_>, full: Full) -> Response<Body> {
        if matches!(full, Full::Tenant(_)) {
            self.app.authenticator.throttled(&info.caller.tenant, info.peer, &full.to_string());
        }
        over(full)
    }

    async fn one(&self, posted: PostedRequest<'_>, message: Message) -> Response<Body> {
        let PostedRequest { info, form, session } = posted;
        let (id, request) = match message {
            Message::Request { id, request, weight } => match info.hold.set(memory_of(weight)) {
                Ok(()) => (id, *request),
                Err(full) => return self.over(&info, full),
            },
            Message::Answer { id, message, .. } => return answered(session, &id, *message).await,
            Message::Cancelled { id, .. } => {
                if let Some(session) = session {
                    session.withdraw(&id);
                }
                return empty(StatusCode::ACCEPTED);
            }
            Message::Ignored => return empty(StatusCode::ACCEPTED),
        };
        let method = request.method().to_owned();
        self.log(HttpEvent::Parsed { method: &method, id: &id });
        let opening = match &request {
            ClientRequest::InitializeRequest(initialize) => Some(initialize.params.clone()),
            _ => None,
        };
        let session = session.filter(|_| opening.is_none());
        let item = BatchItem { id, request, hold: info.hold.clone() };
        let (mut exchange, era) = match self.begin(&info, session.as_ref(), item, form != Form::Json) {
            Ok(started) => started,
            Err((status, fault)) => {
                self.log_answer(&method, &info.endpoint.errors.encode(&fault));
                return refuse(status, &fault);
            }
        };
        match opening {
            Some(params) if matches!(era, Era::Legacy { .. }) => {
                let Some(last) = exchange.last().await else { return empty(StatusCode::ACCEPTED) };
                self.log_answer(&method, &last.answer.bytes);
                self.open(&info, params, form, last)
            }
            _ => {
                let resumable = session.filter(|session| session.is_resumable()).map(|session| (session, info.share));
                self.reply(&method, Answers::One(exchange), form, &era, resumable).await
            }
        }
    }

    /// Starts a request, or returns the status and the error with which it is refused.
    fn begin(
        &self,
        info: &RequestInfo<'_>,
        session: Option<&Arc<Session>>,
        item: BatchItem,
        can_ask: bool,
    ) -> Result<(Exchange, Era), (StatusCode, Fault)> {
        let BatchItem { id, mut request, hold } = item;
        let era = revision::era(info.headers, &id, &request, &info.endpoint.schemas)
            .map_err(|fault| (StatusCode::BAD_REQUEST, fault))?;
        let session = session.filter(|_| matches!(era, Era::Legacy { .. }));
        let revision = session.map_or_else(|| era.revision(), |session| session.revision());
        let peer = match (&era, session, &request) {
            (_, _, ClientRequest::InitializeRequest(initialize)) => initialize.params.clone(),
            (_, Some(session), _) => session.info.clone(),
            (Era::Legacy { version }, None, _) => {
                unknown_peer(version.clone().unwrap_or(ProtocolVersion::V_2024_11_05))
            }
            (Era::Modern { version, .. }, None, _) => unknown_peer(version.clone()),
        };
        let entry = match session {
            Some(session) => Some(session.enter(&id)?),
            None => None,
        };
        let connection = session.map(|session| session.id.clone());
        let caller = Caller { connection, ..info.caller.clone() };
        request.extensions_mut().insert(Origin {
            id: id.clone(),
            request_id: Some(info.request_id.clone()),
            peer: Some(info.peer),
        });
        request.extensions_mut().insert(revision);
        let peer = match info.endpoint.direct && Direct::takes(&request) {
            true => {
                ClientPeer::Direct(self.peers.lease(peer, || info.endpoint.service(caller.clone(), Hold::default())))
            }
            false => ClientPeer::Loop(Box::new(peer)),
        };
        let parts = ExchangeParts {
            service: info.endpoint.service(caller, hold.clone()),
            peer,
            revision,
            session: session.filter(|_| can_ask).cloned(),
            entry,
            halt: self.halt.clone(),
            hold,
        };
        Ok((Exchange::start(id, request, parts), era))
    }

    /// Answers `initialize`. If there is no room for a session, the client continues without one.
    fn open(
        &self,
        info: &RequestInfo<'_>,
        params: InitializeRequestParams,
        form: Form,
        last: FinalAnswer,
    ) -> Response<Body> {
        let mut response = whole(form, StatusCode::OK, last.answer);
        let stored = last.initialized.and_then(|negotiated| session::stored_info(params, negotiated));
        let session = stored.and_then(|stored| self.sessions.open(&info.caller, info.name, stored));
        if let Some(session) = session {
            let id = HeaderValue::from_str(&session.id).expect("a UUID is plain text");
            response.headers_mut().insert(SESSION, id);
        }
        response
    }

    async fn batch(&self, posted: PostedRequest<'_>, messages: Vec<Result<Message, Fault>>) -> Response<Body> {
        let PostedRequest { info, form, session } = posted;
        // From here on the bytes of the body are counted in the holds of its messages. All of them are counted before
        // the first one waits for its turn.
        let (hold, errors) = (info.hold.clone(), info.endpoint.errors);
        let _ = hold.set(0);
        let mut refusals = Vec::new();
        let mut steps = Vec::new();
        for message in messages {
            match message {
                Ok(Message::Request { id, request, weight }) => {
                    self.log(HttpEvent::Parsed { method: request.method(), id: &id });
                    // Each request has a separate hold, because the requests do not end together.
                    let hold = info.hold.apart();
                    match hold.set(memory_of(weight)) {
                        Ok(()) => steps.push(BatchStep::Start(BatchItem { id, request: *request, hold })),
                        Err(full) => refusals.push(errors.encode(&Fault::new(id, SERVER_ERROR, full.to_string()))),
                    }
                }
                Ok(Message::Cancelled { id, .. }) => steps.push(BatchStep::Withdraw(id)),
                Ok(Message::Answer { .. } | Message::Ignored) => {}
                Err(fault) => refusals.push(errors.encode(&fault)),
            }
        }
        let mut exchanges = Vec::new();
        for step in steps {
            match step {
                BatchStep::Start(item) => {
                    let is_call = matches!(item.request, ClientRequest::CallToolRequest(_));
                    match self.begin(&info, session.as_ref(), item, false) {
                        Ok((mut exchange, _)) => {
                            exchange.detach(Some(self.turns.take(&info.caller.tenant).await));
                            if is_call {
                                exchange.queued().await;
                            }
                            exchanges.push(exchange);
                        }
                        Err((_, fault)) => refusals.push(errors.encode(&fault)),
                    }
                }
                BatchStep::Withdraw(id) => {
                    if let Some(session) = &session {
                        session.withdraw(&id);
                    }
                }
            }
        }
        let answers = async move {
            let rest = join_all(exchanges.iter_mut().map(Exchange::last)).await;
            let mut all = BatchAnswer::default();
            refusals.iter().for_each(|refusal| all.add(refusal));
            rest.into_iter().flatten().for_each(|last| all.add(&last.answer.bytes));
            all.finish().map(|bytes| AnswerBytes::last(&Value::Null, bytes, hold))
        };
        let era = Era::Legacy { version: None };
        self.reply("batch", Answers::Batch(Some(answers.boxed())), form, &era, None).await
    }

    /// Sends the answer as one JSON document if it comes soon or the client accepts nothing else, and as a stream
    /// otherwise.
    async fn reply(
        &self,
        method: &str,
        mut answers: Answers,
        form: Form,
        era: &Era,
        resumable: Option<(Arc<Session>, Arc<Share>)>,
    ) -> Response<Body> {
        let options = self.options();
        let status = |last: &FinalAnswer| match era {
            Era::Legacy { .. } => StatusCode::OK,
            Era::Modern { meta_is_malformed, .. } => last.modern_status(*meta_is_malformed),
        };
        let first = loop {
            let patience = if form == Form::Json { Duration::MAX } else { options.patience };
            match timeout(patience, answers.next()).await {
                Ok(Some(ExchangeEvent::Last(last))) => {
                    self.log_answer(method, &last.answer.bytes);
                    // An error with a specific status is for readers that do not parse the body, so it is
                    // never streamed.
                    let status = status(&last);
                    let form = if status == StatusCode::OK { form } else { Form::Json };
                    return whole(form, status, last.answer);
                }
                // The client cancelled the request.
                Ok(None) => return empty(StatusCode::ACCEPTED),
                Ok(Some(ExchangeEvent::Meanwhile(_))) if form == Form::Json => {}
                Ok(Some(ExchangeEvent::Meanwhile(message))) => break Some(message),
                Err(_) => break None,
            }
        };
        self.log(HttpEvent::Sending { method });
        if let Answers::One(exchange) = &mut answers {
            exchange.detach(None);
        }
        match (resumable, answers) {
            (Some((session, share)), Answers::One(exchange)) => {
                let reader = Replay::begin(&session, exchange, share, first, options.resume_within);
                sse::response(reader, options.keep_alive, CancellationToken::new())
            }
            (_, answers) => sse::response(Plain { first, answers }, options.keep_alive, CancellationToken::new()),
        }
    }

    async fn get(&self, info: RequestInfo<'_>, connection: &Connection) -> Response<Body> {
        if !accepts_stream(info.headers) {
            connection.busy();
            let turn = self.turns.take(&info.caller.tenant).await;
            let status = during(turn, (info.endpoint.status)(info.caller)).await;
            return json(StatusCode::OK, status.to_string());
        }
        let session = match self.session(&info) {
            Ok(Some(session)) => session,
            // The stream counts as one of the caller's requests in flight.
            Ok(None) if info.endpoint.open_stream && !revision::is_modern(info.headers) => {
                let source = IdleStream { _listener: None, ended: info.caller.membership.token() };
                return sse::response(source, self.options().keep_alive, self.closing.clone());
            }
            Ok(None) => return not_allowed("a stream of its own belongs to a session; there is none"),
            Err(unknown) => return unknown.answer(Value::Null),
        };
        let keep_alive = self.options().keep_alive;
        if let Some(seen) = info.headers.get(LAST_EVENT).and_then(|value| value.to_str().ok()) {
            connection.busy();
            return match session.replay(seen) {
                Some((replay, number)) => sse::response(replay.read(Some(number)), keep_alive, session.ended.clone()),
                // The answer is a stream that ends at once, because an error would make some clients retry again and
                // again.
                None => sse::response(EmptyStream, keep_alive, CancellationToken::new()),
            };
        }
        // The connection is not marked busy: nothing is ever sent on this stream, so it may be closed when others need
        // the connection.
        match session.listen() {
            Some(listener) => {
                let source = IdleStream { _listener: Some(listener), ended: session.ended.clone() };
                sse::response(source, keep_alive, self.closing.clone())
            }
            None => refused(StatusCode::CONFLICT, "this session has too many streams already"),
        }
    }

    fn delete(&self, info: &RequestInfo<'_>) -> Response<Body> {
        match self.session(info) {
            Ok(Some(session)) => {
                self.sessions.close(&session);
                // The Python client treats every status other than 200 and 204 as a failure.
                empty(StatusCode::NO_CONTENT)
            }
            Ok(None) => not_allowed("DELETE ends a session; Mcp-Session-Id names none"),
            Err(unknown) => unknown.answer(Value::Null),
        }
    }

    /// Returns the session that the headers name. Revision 2026-07-28 and later have no sessions.
    fn session(&self, info: &RequestInfo<'_>) -> Result<Option<Arc<Session>>, UnknownSession> {
        if revision::is_modern(info.headers) {
            return Ok(None);
        }
        let mut ids = info.headers.get_all(SESSION).iter();
        match (ids.next(), ids.next()) {
            (None, _) => Ok(None),
            (Some(id), None) => {
                let found = id.to_str().ok().and_then(|id| self.sessions.find(id, &info.caller, info.name));
                found.map(Some).ok_or(UnknownSession)
            }
            (Some(_), Some(_)) => Err(UnknownSession),
        }
    }
}

/// Messages of at least this length are read on a separate thread, so that other requests are answered meanwhile.
const LARGE: usize = 256 << 10;

/// Reads a large message on a separate thread. The reading continues after the client has disconnected, and keeps its
/// hold and its turn until it ends. The message is counted before it waits for anything, because it can take many times
/// the memory of its bytes.
async fn read_on_thread(bytes: Bytes, batches: bool, hold: Hold, turn: Turn) -> Result<Result<Incoming, Fault>, Full> {
    let reading = tokio::task::spawn_blocking(move || {
        let read = message::read(&bytes, batches);
        let counted = hold.set(memory_of(read.as_ref().map_or(0, Incoming::weight)));
        drop((bytes, hold, turn));
        counted.map(|()| read)
    });
    let given_up = |_| Ok(Err(Fault::new(Value::Null, INTERNAL_ERROR, "internal error: the request was given up")));
    reading.await.unwrap_or_else(given_up)
}

fn denied_response(denied: Denied) -> Response<Body> {
    let mut response = json(denied.status, denied.body.to_string());
    response.headers_mut().extend(*denied.headers);
    response
}

struct UnknownSession;

impl UnknownSession {
    fn answer(self, id: Value) -> Response<Body> {
        let (status, fault) = session::not_found(id);
        refuse(status, &fault)
    }
}

/// Returns the name of the endpoint: `Some("")` for `/mcp` itself, `None` for a path that is not below it.
fn endpoint_name(path: &str) -> Option<&str> {
    let rest = path.strip_prefix("/mcp")?;
    if rest.is_empty() { Some(rest) } else { rest.strip_prefix('/') }
}

async fn answered(
    session: Option<Arc<Session>>,
    id: &Value,
    message: rmcp::model::ClientJsonRpcMessage,
) -> Response<Body> {
    let Some(session) = session else {
        let fault = Fault::new(Value::Null, INVALID_REQUEST, "nothing was asked outside of a session");
        return refuse(StatusCode::BAD_REQUEST, &fault);
    };
    session.answer(id, message).await;
    empty(StatusCode::ACCEPTED)
}

/// The source of an answer: one exchange or a batch.
#[allow(clippy::large_enum_variant, reason = "the large variant is the usual one")]
enum Answers {
    One(Exchange),
    Batch(Option<BoxFuture<'static, Option<AnswerBytes>>>),
}

impl Answers {
    async fn next(&mut self) -> Option<ExchangeEvent> {
        match self {
            Self::One(exchange) => exchange.next().await,
            Self::Batch(answers) => {
                let answer = answers.as_mut()?.await;
                *answers = None;
                Some(ExchangeEvent::Last(FinalAnswer { answer: answer?, error: None, initialized: None }))
            }
        }
    }
}

/// A stream that cannot be resumed.
struct Plain {
    first: Option<AnswerBytes>,
    answers: Answers,
}

impl EventSource for Plain {
    async fn next(&mut self) -> Option<Bytes> {
        if let Some(first) = self.first.take() {
            return Some(first.event(None));
        }
        match self.answers.next().await? {
            ExchangeEvent::Meanwhile(message) => Some(message.event(None)),
            ExchangeEvent::Last(last) => Some(last.answer.event(None)),
        }
    }
}

/// A stream that belongs to no request; the server never sends a message on it.
struct IdleStream {
    /// The stream's place among those of its session, if it has one.
    _listener: Option<Listener>,
    ended: CancellationToken,
}

impl EventSource for IdleStream {
    async fn next(&mut self) -> Option<Bytes> {
        self.ended.cancelled().await;
        None
    }
}

struct EmptyStream;

impl EventSource for EmptyStream {
    async fn next(&mut self) -> Option<Bytes> {
        None
    }
}

impl Form {
    /// Returns the accepted forms. A stream has to be named explicitly. Returns `None` if the client accepts neither
    /// form.
    fn of(headers: &HeaderMap) -> Option<Self> {
        let json = !headers.contains_key(header::ACCEPT)
            || accepted(headers).any(|kind| matches!(&*kind, "application/json" | "application/*" | "*/*"));
        match (json, accepts_stream(headers)) {
            (true, true) => Some(Self::Either),
            (true, false) => Some(Self::Json),
            (false, true) => Some(Self::Stream),
            (false, false) => None,
        }
    }
}

fn accepts_stream(headers: &HeaderMap) -> bool {
    accepted(headers).any(|kind| kind == "text/event-stream")
}

fn accepted(headers: &HeaderMap) -> impl Iterator<Item = String> {
    let values = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(essence)
}

fn is_json(headers: &HeaderMap) -> bool {
    let given = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    given.is_some_and(|given| essence(given) == "application/json") && !headers.contains_key(header::CONTENT_ENCODING)
}

/// Returns a media type without its parameters, in lower case.
fn essence(text: &str) -> String {
    text.split(';').next().unwrap_or_default().trim().to_ascii_lowercase()
}

/// Returns the response for an answer that is complete.
fn whole(form: Form, status: StatusCode, answer: AnswerBytes) -> Response<Body> {
    match form {
        Form::Json | Form::Either => json(status, answer.plain()),
        Form::Stream => {
            let mut response = json(status, answer.event(None));
            response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
            response
        }
    }
}

/// The answers of a batch, joined into one JSON document.
#[derive(Default)]
struct BatchAnswer(Vec<u8>);

impl BatchAnswer {
    fn add(&mut self, answer: &[u8]) {
        let all = &mut self.0;
        all.push(if all.is_empty() { b'[' } else { b',' });
        if all.len() + answer.len() > MAX_ANSWER {
            all.extend(answer::over_limit(message::id_of(answer).unwrap_or_default(), answer.len()));
        } else {
            all.extend_from_slice(answer);
        }
    }

    /// Returns the document, or `None` if no message of the batch had an answer.
    fn finish(self) -> Option<Vec<u8>> {
        let Self(mut all) = self;
        (!all.is_empty()).then(|| {
            all.push(b']');
            all
        })
    }
}

/// Returns the memory of a request while it is handled: its arguments as received, and once more as the operation
/// made from them.
fn memory_of(weight: usize) -> usize {
    2 * weight
}

/// Returns 400 for a body that is not JSON. A message that could be read is answered with 200 even if the answer is an
/// error; the newest revision requires 400 for an invalid request too.
fn status_of(fault: &Fault, headers: &HeaderMap) -> StatusCode {
    let refused = fault.code == PARSE_ERROR || fault.code == INVALID_REQUEST && revision::is_modern(headers);
    if refused { StatusCode::BAD_REQUEST } else { StatusCode::OK }
}

fn not_allowed(why: &str) -> Response<Body> {
    let mut response = refuse(StatusCode::METHOD_NOT_ALLOWED, &Fault::new(Value::Null, SERVER_ERROR, why));
    response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(METHODS));
    response
}

/// Returns the parameters of a client of which only the revision is known.
pub(super) fn unknown_peer(version: ProtocolVersion) -> InitializeRequestParams {
    let mut peer =
        InitializeRequestParams::new(ClientCapabilities::default(), Implementation::new("unknown", "unknown"));
    peer.protocol_version = version;
    peer
}

/// Parses and logs a body only if the log level shows bodies.
fn log_body(bytes: &[u8], log: impl FnOnce(&Value)) {
    if tracing::enabled!(target: HTTP_LOG, tracing::Level::DEBUG)
        && let Ok(body) = serde_json::from_slice(bytes)
    {
        log(&body);
    }
}

#[cfg(test)]
mod tests {
    use engine::Memory;
    use engine::op::Tenant;

    use super::*;

    /// W58: a message of many objects is counted as soon as it is read, and not when its turn comes.
    #[tokio::test]
    async fn w58_a_large_message_is_counted_where_it_is_read() {
        let memory = Memory::new(64 << 20, 64 << 20);
        let tenant = Tenant::local();
        let objects = format!("{}1{}", "{\"\":".repeat(100), "}".repeat(100));
        let body = |objects: &str| {
            format!(
                r#"{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"x","arguments":{{"a":[{objects}]}}}}}}"#
            )
        };
        let read = async |objects: &str| {
            let hold = memory.hold_all_of(&tenant);
            let turn = Turns::for_runtime().take(&tenant).await;
            (read_on_thread(body(objects).into(), false, hold.clone(), turn).await, hold)
        };
        let (few, hold) = read(&objects).await;
        assert!(matches!(few, Ok(Ok(Incoming::One(_)))));
        assert!(memory.held().0 > 2 * 100 * 600, "{:?}", memory.held());
        drop(hold);
        let (many, _hold) = read(&vec![objects; 900].join(",")).await;
        assert!(matches!(many, Err(Full::Tenant(_))));
    }
}
