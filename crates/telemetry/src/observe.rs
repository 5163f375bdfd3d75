//! Observes each call and writes log lines, a journal entry and metrics about it.
//!
//! The handler reports that a call begins and how it ended; this module decides what is recorded where. The
//! content of a call goes only to the journal, and only if the operator asked for it.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use dialects::{ArgError, Args, Block, RenderInput, Reply};
use engine::TenantUsage;
use engine::op::{Call, EngineError, Op, Outcome, RunOnce, RunOutcome, RuntimeInfo, Stages, StoppedContext, Tenant};
use mcp::Origin;
use serde_json::{Value, json};
use text::cut;

use crate::codes;
use crate::journal::{Journal, JournalEntry, sizes};
use crate::logging::lines::{self, McpLine, RunCode, ToolLine};
use crate::metrics::{CallEnd, DenialReason, InProgress, Metrics};
use crate::otel::{LogTrace, Otel, RemoteParent, RequestError, RequestSpan};
use crate::usage::{self, CallMeter, CallUsage};

/// A function that returns the key of a conversation's files, given the tenant and the conversation.
type KeyOf = dyn Fn(&str, &str) -> String + Send + Sync;

/// A function that returns the tenant and the context of the files behind a link, given its key.
type OwnerOf = dyn Fn(&str) -> Option<(Tenant, String)> + Send + Sync;

/// The observer of all calls. A server has one.
#[derive(Default)]
pub struct Observer {
    pub metrics: Metrics,
    journal: Option<Journal>,
    /// The runtimes, once they are ready.
    runtimes: OnceLock<Vec<RuntimeInfo>>,
    conversation_key: Option<Box<KeyOf>>,
    link_owner: Option<Box<OwnerOf>>,
    denials: Mutex<DenialLog>,
    calls: CallMeter,
    /// Refused requests of each throttled tenant.
    throttled: Mutex<BTreeMap<String, DenialLog>>,
    otel: Option<Otel>,
}

/// The facts about a request that are known when it arrives.
pub struct RequestFacts<'a> {
    pub tenant: &'a str,
    pub dialect: &'static str,
    pub origin: &'a Origin,
    pub parent: RemoteParent<'a>,
    /// Revision of the protocol, if it is known and traces are exported.
    pub revision: Option<String>,
}

impl Observer {
    pub fn new(journal: Option<Journal>) -> Self {
        Self { journal, ..Self::default() }
    }

    /// Uses these metrics.
    pub fn with_metrics(mut self, metrics: Metrics) -> Self {
        self.metrics = metrics;
        self
    }

    /// Sets the function that returns the owner of the files behind a link.
    pub fn with_link_owners(mut self, of: impl Fn(&str) -> Option<(Tenant, String)> + Send + Sync + 'static) -> Self {
        self.link_owner = Some(Box::new(of));
        self
    }

    /// Sets the function that returns the key of a tenant's conversation.
    pub fn with_conversation_keys(mut self, of: impl Fn(&str, &str) -> String + Send + Sync + 'static) -> Self {
        self.conversation_key = Some(Box::new(of));
        self
    }

    /// Also exports traces of the requests, if `otel` is set.
    pub fn with_otel(mut self, otel: Option<Otel>) -> Self {
        self.otel = otel;
        self
    }

    pub fn has_traces(&self) -> bool {
        self.otel.is_some()
    }

    pub fn set_runtimes(&self, runtimes: Vec<RuntimeInfo>) {
        let _ = self.runtimes.set(runtimes);
    }

    pub fn journal(&self) -> Option<&Journal> {
        self.journal.as_ref()
    }

    pub fn initialize(&self, origin: &Origin) {
        McpLine::Incoming { method: "initialize", id: &origin.id }.log();
        McpLine::ProcessingInitialize.log();
        McpLine::InitializeSuccessful.log();
    }

    pub fn tools_listed(&self, origin: &Origin, dialect: &str, tools: usize) {
        McpLine::Incoming { method: "tools/list", id: &origin.id }.log();
        McpLine::BuildingToolsList.log();
        // Before the runtimes are ready, their number is not known.
        if let Some(runtimes) = self.runtimes.get().filter(|_| dialect == CONVERSATION) {
            McpLine::FoundRunners(runtimes.iter().filter(|runtime| is_runner(runtime)).count()).log();
        }
        McpLine::ReturningTools(tools).log();
    }

    pub fn tool_called(&self, origin: &Origin, tool: &str) {
        McpLine::Incoming { method: "tools/call", id: &origin.id }.log();
        McpLine::ToolCall { tool }.log();
    }

    /// Begins a call, which counts as in progress until [`ObservedCall::end`].
    pub fn begin(&self, tool: &'static str, request: &RequestFacts<'_>) -> ObservedCall {
        let dialect = request.dialect;
        if dialect == CONVERSATION {
            McpLine::ParsingArguments { tool: short(tool) }.log();
        }
        let mut span = self.request("tools/call", request);
        if let Some(span) = &mut span {
            span.set_tool(tool);
        }
        ObservedCall { dialect, in_progress: self.metrics.begin(dialect, tool, request.tenant), span }
    }

    /// Begins the span of a request, if traces are exported. The span contains nothing of the request's arguments.
    pub fn request(&self, method: &'static str, request: &RequestFacts<'_>) -> Option<RequestSpan> {
        let RequestFacts { tenant, dialect, origin, parent, revision } = request;
        let mut span = self.otel.as_ref()?.request(method, *parent)?;
        span.add("sandpool.tenant", cut(tenant, LONGEST_ATTRIBUTE));
        span.add("sandpool.dialect", *dialect);
        match &origin.id {
            Value::Null => {}
            Value::String(id) => span.add("jsonrpc.request.id", cut(id, LONGEST_ATTRIBUTE)),
            id => span.add("jsonrpc.request.id", cut(&id.to_string(), LONGEST_ATTRIBUTE)),
        }
        if let Some(id) = &origin.request_id {
            span.add("sandpool.request.id", id.clone());
        }
        if let Some(revision) = revision {
            span.add("mcp.protocol.version", cut(revision, LONGEST_ATTRIBUTE));
        }
        match origin.peer {
            Some(peer) => {
                span.add("network.transport", "tcp");
                span.add("network.protocol.name", "http");
                span.add("client.address", peer.ip().to_string());
                span.add("client.port", peer.port());
            }
            None => span.add("network.transport", "pipe"),
        }
        Some(span)
    }

    /// Logs a call whose arguments have been converted to an operation.
    pub fn lowered(&self, call: &Call, op: &Op) {
        let Op::RunOnce(run) = op else { return };
        let runner = self.runtimes.get().and_then(|all| all.iter().find(|r| r.language == run.language));
        let key = self.conversation_key.as_ref().map(|of| of(&call.tenant.0, &run.conversation)).unwrap_or_default();
        for line in lines::run_code_begins(described(run), runner.map_or("native", |r| &r.name), &key) {
            line.log();
        }
    }

    pub fn failed(&self, tenant: &str, error: &EngineError) {
        if matches!(error, EngineError::OverLimit { .. } | EngineError::ContextLimit(_)) {
            self.metrics.denied(DenialReason::Quota, Some(tenant));
        }
    }

    /// Returns the tenant and the context behind a link. If they are not known any more, the context is the beginning of
    /// the key.
    pub(crate) fn owner_of(&self, key: &str) -> (Option<String>, String) {
        match self.link_owner.as_ref().and_then(|of| of(key)) {
            Some((tenant, context)) => (Some(tenant.0), context),
            None => (None, head(key)),
        }
    }

    /// Counts the use of a tenant. Without a journal nothing would take the counts.
    pub(crate) fn count(&self, tenant: &str, more: CallUsage) {
        if self.journal.is_some() {
            self.calls.add(tenant, more);
        }
    }

    /// Records that a tenant read a file as a resource, with the number of bytes in the answer; `None` if it got none.
    pub fn resource_read(
        &self,
        tenant: &str,
        dialect: &'static str,
        key: &str,
        origin: &Origin,
        bytes_out: Option<u64>,
    ) {
        let Some(journal) = &self.journal else { return };
        self.count(tenant, CallUsage { calls: 0, bytes_in: 0, bytes_out: bytes_out.unwrap_or(0) });
        journal.record(JournalEntry {
            tenant: Some(tenant.to_owned()),
            dialect: Some(dialect),
            context: Some(self.owner_of(key).1),
            outcome: Some(if bytes_out.is_some() { "ok" } else { "error" }.into()),
            bytes_out,
            request_id: origin.request_id.clone(),
            peer: origin.peer,
            ..JournalEntry::event("resource_read")
        });
    }

    /// Records what each tenant used since the last call: its own calls, which were observed, and `of_sandboxes`, the
    /// usage of its sandboxes.
    pub fn record_usage(&self, of_sandboxes: BTreeMap<Tenant, TenantUsage>) {
        let Some(journal) = &self.journal else { return };
        for entry in usage::entries(self.calls.take(), of_sandboxes) {
            journal.record_own(entry);
        }
    }

    /// Records a refused request of a stranger. Each refusal is counted, but at most one a second is written, with the
    /// number of refusals since the last one, because strangers must not be able to fill the disk.
    pub fn denied(&self, why: DenialReason, message: &str, peer: SocketAddr) {
        self.metrics.denied(why, None);
        let count = self.denials.lock().unwrap_or_else(PoisonError::into_inner).count(DENIALS_PAUSE);
        let Some(count) = count else { return };
        lines::log_refused(peer, message, count);
        self.record_denial(JournalEntry { count: Some(count), ..denial(why, peer) });
    }

    /// Records a refused request of a tenant that makes too many. Each refusal is counted, but at most one of each tenant
    /// is written in an interval, with the number of refusals since the last one.
    pub fn throttled(&self, why: DenialReason, tenant: &str, message: &str, peer: SocketAddr) {
        self.metrics.denied(why, Some(tenant));
        let mut throttled = self.throttled.lock().unwrap_or_else(PoisonError::into_inner);
        if throttled.len() >= MOST_THROTTLED && !throttled.contains_key(tenant) {
            throttled.retain(|_, log| !log.is_due(THROTTLED_PAUSE));
        }
        // If very many tenants are throttled at once, the further ones share a line.
        let name = if throttled.len() < MOST_THROTTLED || throttled.contains_key(tenant) { tenant } else { "" };
        let count = throttled.entry(name.to_owned()).or_default().count(THROTTLED_PAUSE);
        drop(throttled);
        let Some(count) = count else { return };
        lines::log_throttled(tenant, message, count);
        let tenant = Some(tenant.to_owned());
        self.record_denial(JournalEntry { tenant, count: Some(count), ..denial(why, peer) });
    }

    fn record_denial(&self, entry: JournalEntry) {
        if let Some(journal) = &self.journal {
            journal.record(entry);
        }
    }
}

/// Returns the beginning of a key. It is enough to find the files again; the whole key is the permission to read them.
fn head(key: &str) -> String {
    format!("{}…", key.chars().take(12).collect::<String>())
}

/// Maximum number of characters of an attribute whose value comes from a client.
const LONGEST_ATTRIBUTE: usize = 64;

const DENIALS_PAUSE: Duration = Duration::from_secs(1);

/// Minimum time between two lines about the same throttled tenant.
const THROTTLED_PAUSE: Duration = Duration::from_secs(10);

/// Maximum number of throttled tenants whose refusals are counted separately.
const MOST_THROTTLED: usize = 1000;

#[derive(Default)]
struct DenialLog {
    unwritten: u64,
    written: Option<Instant>,
}

impl DenialLog {
    fn is_due(&self, pause: Duration) -> bool {
        self.written.is_none_or(|at| at.elapsed() >= pause)
    }

    /// Counts a refusal. Returns the number of refusals to write, or `None` if the last ones were written a short time
    /// ago.
    fn count(&mut self, pause: Duration) -> Option<u64> {
        self.unwritten += 1;
        if !self.is_due(pause) {
            return None;
        }
        let count = self.unwritten;
        *self = Self { unwritten: 0, written: Some(Instant::now()) };
        Some(count)
    }
}

fn denial(why: DenialReason, peer: SocketAddr) -> JournalEntry {
    JournalEntry { outcome: Some(why.name().into()), peer: Some(peer), ..JournalEntry::event("denied") }
}

const CONVERSATION: &str = "conversation";

/// Returns whether a runtime is listed as a runner. `conversation` accepts JavaScript but does not offer it.
fn is_runner(runtime: &RuntimeInfo) -> bool {
    runtime.language != engine::op::Language::Javascript
}

fn described(run: &RunOnce) -> RunCode<'_> {
    RunCode {
        conversation: &run.conversation,
        language: run.language.name(),
        code_len: run.code.len(),
        network: run.network == engine::op::Network::On,
        env_vars: run.env.0.len(),
    }
}

/// Returns the short name of a tool: `run_code` for `sandbox.run_code`.
fn short(tool: &str) -> &str {
    tool.strip_prefix("sandbox.").or_else(|| tool.strip_prefix("sandbox_")).unwrap_or(tool)
}

/// A call in progress that is being observed.
pub struct ObservedCall {
    dialect: &'static str,
    in_progress: InProgress,
    span: Option<RequestSpan>,
}

/// The facts of an outcome that are needed after it has been rendered.
#[derive(Debug, Default)]
pub struct Facts {
    pub context: Option<String>,
    pub run: Option<String>,
    /// Code of the failure, if the call failed.
    code: Option<&'static str>,
    /// Result of a run in a conversation: whether it succeeded, its status, its files, and the key of the files.
    once: Option<(bool, i32, Vec<String>, String)>,
}

impl Facts {
    /// Returns the facts of a call whose arguments were refused.
    pub fn refused(refused: &ArgError) -> Self {
        Self { code: Some(refused.code), ..Self::default() }
    }

    /// Returns the facts of a call that the engine did not complete.
    pub fn failed(error: &EngineError) -> Self {
        Self { code: Some(codes::of_error(error)), ..Self::default() }
    }

    pub fn of(outcome: &Outcome) -> Self {
        match outcome {
            Outcome::Ran(ran) => {
                let once = ran.files.as_ref().map(|files| {
                    let (success, status) = match ran.end {
                        RunOutcome::Ok => (true, 0),
                        RunOutcome::Exit { code } => (code == 0, code),
                        _ => (false, 1),
                    };
                    (success, status, files.entries.iter().map(|f| f.path.clone()).collect(), files.key.clone())
                });
                Self { context: Some(ran.context.id.clone()), run: None, code: codes::of_run(&ran.end), once }
            }
            Outcome::Browsed(browsed) => {
                let code = browsed.result.as_ref().err().map(|error| codes::of_browsing(error.why));
                Self { context: Some(browsed.context.id.clone()), code, ..Self::default() }
            }
            Outcome::Created(context) | Outcome::Replaced { context, .. } => {
                Self { context: Some(context.id.clone()), ..Self::default() }
            }
            Outcome::Stopped(StoppedContext { context_id, .. }) => {
                Self { context: Some(context_id.clone()), ..Self::default() }
            }
            Outcome::Started(started) => {
                let (context, run) = (started.context.id.clone(), started.run.clone());
                Self { context: Some(context), run: Some(run), ..Self::default() }
            }
            Outcome::Progress(progress) => {
                let (context, run) = (progress.context_id.clone(), progress.run.clone());
                Self { context: Some(context), run: Some(run), ..Self::default() }
            }
            // Only an answer that has no room for the file is a failure.
            Outcome::File { .. } => Self { code: Some("FILE_TOO_LARGE"), ..Self::default() },
            Outcome::Cancelled { run, .. } => Self { run: Some(run.clone()), ..Self::default() },
            _ => Self::default(),
        }
    }
}

/// The facts about a call that has its answer.
pub struct Ended<'a> {
    pub tenant: &'a str,
    pub input: &'a RenderInput<'a>,
    pub origin: &'a Origin,
    pub facts: Facts,
    /// The context that the engine found for the call.
    pub found: Option<&'a str>,
    /// The reply; `None` for a call that became a task.
    pub reply: Option<&'a Reply>,
    pub refused: bool,
    pub cancelled: bool,
}

impl ObservedCall {
    /// Returns the recorder of the call's stages.
    pub fn stages(&self) -> Stages {
        self.span.as_ref().map(RequestSpan::stages).unwrap_or_default()
    }

    /// Returns the trace of the call, for its log lines.
    pub fn trace(&self) -> LogTrace {
        LogTrace::of(self.span.as_ref())
    }

    pub fn end(self, observer: &Observer, ended: Ended<'_>) {
        let code = ended.reply.and_then(|reply| error_code(reply, &ended.facts));
        let how = match (&code, ended.cancelled, ended.refused) {
            (_, true, _) => CallEnd::Cancelled,
            (_, _, true) => CallEnd::Refused,
            (Some(_), ..) => CallEnd::Failed,
            (None, ..) => CallEnd::Ok,
        };
        let took = self.in_progress.end(how);
        if let Some(span) = self.span {
            span.end(request_error(how, ended.reply));
        }
        self::log(self.dialect, took, &ended, code.as_deref());
        let Some(journal) = &observer.journal else { return };
        let (sizes, bytes_out) = (sizes(ended.input.args), ended.reply.map(size));
        let moved = CallUsage { calls: 1, bytes_in: sizes.values().sum(), bytes_out: bytes_out.unwrap_or(0) };
        observer.count(ended.tenant, moved);
        let outcome = if ended.cancelled { "cancelled".into() } else { code.unwrap_or_else(|| "ok".into()) };
        journal.record(JournalEntry {
            tenant: Some(ended.tenant.to_owned()),
            dialect: Some(self.dialect),
            tool: Some(ended.input.tool.to_owned()),
            context: ended.facts.context.or_else(|| ended.found.map(str::to_owned)).or_else(|| named(ended.input.args)),
            run: ended.facts.run.or_else(|| text_of(ended.input.args, &RUN_ARGUMENTS)),
            did: did(ended.input),
            sizes,
            outcome: Some(outcome),
            took: Some(took),
            bytes_out,
            request_id: ended.origin.request_id.clone(),
            peer: ended.origin.peer,
            contents: journal.wants_contents().then(|| contents(ended.input.args, ended.reply)),
            ..JournalEntry::event("call")
        });
    }
}

fn log(dialect: &str, took: Duration, ended: &Ended<'_>, code: Option<&str>) {
    let RenderInput { tool, args, links, .. } = ended.input;
    if dialect != CONVERSATION {
        let sandbox = ended.facts.context.as_deref();
        return ToolLine { tool, took, args, error: code, sandbox }.log();
    }
    if let Some((success, status, names, key)) = &ended.facts.once {
        let files: Vec<(&str, String)> =
            names.iter().map(|name| (name.as_str(), links.to(key, name).unwrap_or_default())).collect();
        for line in lines::run_code_ended(*success, *status, files.iter().map(|(name, url)| (*name, url.as_str()))) {
            line.log();
        }
        return;
    }
    match code {
        Some(code) => McpLine::Failed { tool: short(tool), code }.log(),
        None => McpLine::Completed { tool: short(tool) }.log(),
    }
}

/// Arguments of the dialects that name a context or a conversation, and a background run.
const CONTEXT_ARGUMENTS: [&str; 5] = ["context", "context_id", "sandbox_id", "session_id", "conversationId"];
const RUN_ARGUMENTS: [&str; 1] = ["run"];

/// Returns the context that the arguments name, for a call that ended before the engine looked for it.
fn named(args: &Args) -> Option<String> {
    text_of(args, &CONTEXT_ARGUMENTS)
}

fn text_of(args: &Args, names: &[&str]) -> Option<String> {
    names.iter().find_map(|name| args.get(*name)?.as_str()).map(str::to_owned)
}

/// Describes the use of a browser tool: the action, and the site of an address. It never contains typed text or
/// anything of a page.
fn did(input: &RenderInput<'_>) -> Option<String> {
    if !input.tool.starts_with("browser_") {
        return None;
    }
    let text = |name| input.args.get(name).and_then(Value::as_str);
    match (text("action"), text("url").map(lines::site)) {
        (Some(action), Some(site)) => Some(format!("{action} {site}")),
        (None, Some(site)) => Some(site),
        (action, None) => action.map(str::to_owned),
    }
}

fn request_error(how: CallEnd, reply: Option<&Reply>) -> Option<RequestError> {
    match (how, reply) {
        (CallEnd::Cancelled, _) => Some(RequestError::Cancelled),
        (_, Some(Reply::Error { code, .. })) => Some(RequestError::Protocol(*code)),
        (_, Some(Reply::Answer(answer))) if answer.is_error => Some(RequestError::Tool),
        _ => None,
    }
}

/// Returns the code of a failure: the one that the client sees if there is one, otherwise that of its cause.
fn error_code(reply: &Reply, facts: &Facts) -> Option<String> {
    match reply {
        Reply::Error { code, .. } => Some(code.to_string()),
        Reply::Answer(answer) if answer.is_error => {
            let shown = answer.structured.get("code").and_then(Value::as_str);
            Some(shown.or(facts.code).unwrap_or("error").to_owned())
        }
        Reply::Answer(_) => None,
    }
}

fn size(reply: &Reply) -> u64 {
    match reply {
        Reply::Answer(answer) => answer.blocks.iter().map(block_size).sum(),
        Reply::Error { message, .. } => message.len() as u64,
    }
}

fn block_size(block: &Block) -> u64 {
    let text = match block {
        Block::Text(text) => text,
        Block::Image { data, .. } => data,
        Block::Link { uri, .. } => uri,
    };
    text.len() as u64
}

fn contents(args: &Args, reply: Option<&Reply>) -> Value {
    let answer = match reply {
        Some(Reply::Answer(answer)) => answer.structured.clone(),
        Some(Reply::Error { message, .. }) => json!(message),
        None => Value::Null,
    };
    lines::without_secrets(json!({ "arguments": args, "answer": answer }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::logging::testing::worded;

    #[test]
    fn what_the_journal_keeps_of_a_call_has_no_value_of_an_environment_in_it() {
        let args = json!({ "code": "1", "environment": { "KEY": "hunter2" } });
        let kept = contents(args.as_object().unwrap(), None);
        let redacted = json!({ "code": "1", "environment": { "KEY": "[redacted]" } });
        assert_eq!(kept, json!({ "arguments": redacted, "answer": null }));
    }

    #[test]
    fn of_the_browser_the_journal_keeps_the_action_and_the_site() {
        let did = |tool, args: Value| {
            let args = args.as_object().unwrap();
            let (options, links) = (Default::default(), Default::default());
            let fence = dialects::Fence::new("0".into());
            did(&RenderInput { tool, args, options: &options, links: &links, fence: &fence })
        };
        let login = json!({ "url": "https://u:hunter2@shop.test/a?token=hunter2" });
        assert_eq!(did("browser_open", login.clone()).as_deref(), Some("https://shop.test"));
        assert_eq!(did("browser_goto", login).as_deref(), Some("https://shop.test"));
        let typed = json!({ "action": "type", "target": "ref_1", "text": "hunter2" });
        assert_eq!(did("browser_act", typed).as_deref(), Some("type"));
        assert_eq!(did("browser_type", json!({ "selector": "ref_1", "text": "hunter2" })), None);
        assert_eq!(did("run_code", json!({ "url": "https://shop.test" })), None);
    }

    #[test]
    fn a_failure_is_logged_with_the_code_of_its_cause() {
        use engine::op::browser::BrowseFailure;
        let failed =
            |structured: Value| Reply::Answer(dialects::Answer { structured, is_error: true, ..Default::default() });
        let plain = failed(json!({ "error": "no", "hint": "yes" }));
        let code = |reply: &Reply, facts: Facts| error_code(reply, &facts).unwrap();
        assert_eq!(code(&plain, Facts::failed(&EngineError::NoCurrent { ids: Vec::new() })), "NO_CONTEXT");
        assert_eq!(code(&plain, Facts::failed(&EngineError::FileNotFound("a".into()))), "FILE_NOT_FOUND");
        let refused = ArgError { code: "INVALID_ARGUMENT", message: "code is required".into() };
        assert_eq!(code(&plain, Facts::refused(&refused)), "INVALID_ARGUMENT");
        let end = RunOutcome::TimedOut { after: Duration::from_secs(1), state_kept: true };
        assert_eq!(codes::of_run(&end), Some("TIMEOUT"));
        assert_eq!(codes::of_browsing(BrowseFailure::Stale), "ELEMENT_STALE");
        // A code that the client sees is the one that is logged.
        let shown = failed(json!({ "code": "CONTEXT_NOT_FOUND" }));
        assert_eq!(code(&shown, Facts::failed(&EngineError::NoCurrent { ids: Vec::new() })), "CONTEXT_NOT_FOUND");
        let rpc = Reply::Error { code: -32602, message: "no".into(), data: None };
        assert_eq!(code(&rpc, Facts::refused(&refused)), "-32602");
        assert_eq!(error_code(&Reply::Answer(Default::default()), &Facts::default()), None);
    }

    #[test]
    fn runners_are_counted_only_when_the_runtimes_are_ready() {
        let observer = Observer::default();
        let list = || worded(|| observer.tools_listed(&Origin::default(), CONVERSATION, 3));
        let before = "[MCP] Incoming request - Method: tools/list, ID: null\n[MCP] Building tools list\n";
        assert_eq!(list(), format!("{before}[MCP] Returning 3 tools\n"));
        let runtime = |language, name: &str| RuntimeInfo { language, name: name.into() };
        observer.set_runtimes(vec![
            runtime(engine::op::Language::Python, "native/python-3.11"),
            runtime(engine::op::Language::Javascript, "native/node-22"),
            runtime(engine::op::Language::Typescript, "native/node-22"),
        ]);
        assert_eq!(list(), format!("{before}[MCP] Found 2 runners\n[MCP] Returning 3 tools\n"));
    }

    #[test]
    fn a_flood_of_strangers_is_one_line() {
        let observer = Observer::default();
        let peer = "192.0.2.7:4242".parse().unwrap();
        let log = worded(|| (0..100).for_each(|_| observer.denied(DenialReason::Auth, "who is it?", peer)));
        assert_eq!(log, "[HTTP] Refused 192.0.2.7:4242: who is it?\n");
        let later = worded(|| lines::log_refused(peer, "who is it?", 99));
        assert_eq!(later, "[HTTP] Refused 99 requests, the last of 192.0.2.7:4242: who is it?\n");
    }

    #[test]
    fn a_throttled_tenant_is_one_line_and_does_not_hide_another() {
        let observer = Observer::default();
        let peer = "192.0.2.7:4242".parse().unwrap();
        let log = worded(|| {
            for tenant in ["blue", "green", "blue", "blue"] {
                observer.throttled(DenialReason::Rate, tenant, "too fast", peer);
            }
        });
        let line = |tenant| format!("[HTTP] Throttled tenant {tenant}: 1 request refused: too fast");
        assert_eq!(log.lines().count(), 2, "{log}");
        assert!(log.contains(&line("blue")) && log.contains(&line("green")), "{log}");
    }
}
