//! Observes each call and writes log lines, a journal entry and metrics about it.
//!
//! The handler reports that a call begins and how it ended; this module decides what is recorded where. The
//! content of a call goes only to the journal, and only if the operator asked for it.

use std::net::SocketAddr;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use dialects::{Args, Block, RenderInput, Reply};
use engine::op::{Call, EngineError, Op, Outcome, RunOnce, RunOutcome, RuntimeInfo, StoppedContext};
use mcp::Origin;
use serde_json::{Value, json};

use crate::journal::{Journal, JournalEntry, sizes};
use crate::logging::lines::{self, McpLine, RunCode, ToolLine};
use crate::metrics::{CallEnd, DenialReason, InProgress, Metrics};

/// A function that returns the key of a conversation's files, given the tenant and the conversation.
type KeyOf = dyn Fn(&str, &str) -> String + Send + Sync;

/// A file that is sent to a client that had its link, or that came from one.
pub struct ServedFile<'a> {
    pub key: &'a str,
    /// The client's address, if the transport provides it.
    pub peer: Option<SocketAddr>,
    pub bytes: u64,
}

/// The observer of all calls. A server has one.
#[derive(Default)]
pub struct Observer {
    pub metrics: Metrics,
    journal: Option<Journal>,
    /// The runtimes, once they are ready.
    runtimes: OnceLock<Vec<RuntimeInfo>>,
    conversation_key: Option<Box<KeyOf>>,
    denials: Mutex<DenialLog>,
}

impl Observer {
    pub fn new(journal: Option<Journal>) -> Self {
        Self { journal, ..Self::default() }
    }

    /// Sets the function that returns the key of a tenant's conversation.
    pub fn with_conversation_keys(mut self, of: impl Fn(&str, &str) -> String + Send + Sync + 'static) -> Self {
        self.conversation_key = Some(Box::new(of));
        self
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
        if dialect == CONVERSATION {
            McpLine::FoundRunners(self.runtimes.get().map_or(0, |all| all.iter().filter(|r| is_runner(r)).count()))
                .log();
        }
        McpLine::ReturningTools(tools).log();
    }

    pub fn tool_called(&self, origin: &Origin, tool: &str) {
        McpLine::Incoming { method: "tools/call", id: &origin.id }.log();
        McpLine::ToolCall { tool }.log();
    }

    /// Begins a call, which counts as in progress until [`ObservedCall::end`].
    pub fn begin(&self, dialect: &'static str, tool: &'static str) -> ObservedCall {
        if dialect == CONVERSATION {
            McpLine::ParsingArguments { tool: short(tool) }.log();
        }
        ObservedCall { dialect, in_progress: self.metrics.begin(dialect, tool) }
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

    pub fn failed(&self, error: &EngineError) {
        if matches!(error, EngineError::OverLimit { .. } | EngineError::ContextLimit(_)) {
            self.metrics.denied(DenialReason::Quota);
        }
    }

    /// Records that a file was fetched by its link.
    pub fn file_served(&self, served: &ServedFile<'_>) {
        let bytes_out = Some(served.bytes);
        self.file_moved(served, JournalEntry { bytes_out, ..JournalEntry::event("file_read") });
    }

    /// Records that a file was uploaded by a link.
    pub fn file_received(&self, received: &ServedFile<'_>) {
        let bytes_in = Some(received.bytes);
        self.file_moved(received, JournalEntry { bytes_in, ..JournalEntry::event("file_uploaded") });
    }

    fn file_moved(&self, file: &ServedFile<'_>, entry: JournalEntry) {
        if let Some(journal) = &self.journal {
            journal.record(JournalEntry { context: Some(head(file.key)), peer: file.peer, ..entry });
        }
    }

    /// Records that a tenant read a file as a resource.
    pub fn resource_read(&self, tenant: &str, dialect: &'static str, key: &str, origin: &Origin, ok: bool) {
        let Some(journal) = &self.journal else { return };
        journal.record(JournalEntry {
            tenant: Some(tenant.to_owned()),
            dialect: Some(dialect),
            context: Some(head(key)),
            outcome: Some(if ok { "ok" } else { "error" }.into()),
            request_id: origin.request_id.clone(),
            peer: origin.peer,
            ..JournalEntry::event("resource_read")
        });
    }

    /// Records a refused request. Each refusal is counted, but at most one a second is written, with the number of
    /// refusals since the last one, because strangers must not be able to fill the disk.
    pub fn denied(&self, why: DenialReason, message: &str, peer: SocketAddr) {
        self.metrics.denied(why);
        let mut denials = self.denials.lock().unwrap_or_else(PoisonError::into_inner);
        denials.unwritten += 1;
        if denials.written.is_some_and(|at| at.elapsed() < DENIALS_PAUSE) {
            return;
        }
        let count = denials.unwritten;
        *denials = DenialLog { unwritten: 0, written: Some(Instant::now()) };
        drop(denials);
        lines::log_refused(peer, message, count);
        if let Some(journal) = &self.journal {
            let (count, outcome) = (Some(count), Some(why.name().into()));
            journal.record(JournalEntry { count, outcome, peer: Some(peer), ..JournalEntry::event("denied") });
        }
    }
}

/// Returns the beginning of a key. It is enough to find the files again; the whole key is the permission to read them.
fn head(key: &str) -> String {
    format!("{}…", key.chars().take(12).collect::<String>())
}

const DENIALS_PAUSE: Duration = Duration::from_secs(1);

#[derive(Default)]
struct DenialLog {
    unwritten: u64,
    written: Option<Instant>,
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
}

/// The facts of an outcome that are needed after it has been rendered.
#[derive(Debug, Default)]
pub struct Facts {
    pub context: Option<String>,
    pub run: Option<String>,
    /// Result of a run in a conversation: whether it succeeded, its status, its files, and the key of the files.
    once: Option<(bool, i32, Vec<String>, String)>,
}

impl Facts {
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
                Self { context: Some(ran.context.id.clone()), run: None, once }
            }
            Outcome::Browsed(browsed) => Self { context: Some(browsed.context.id.clone()), ..Self::default() },
            Outcome::Created(context) | Outcome::Replaced { context, .. } => {
                Self { context: Some(context.id.clone()), ..Self::default() }
            }
            Outcome::Stopped(StoppedContext { context_id, .. }) => {
                Self { context: Some(context_id.clone()), ..Self::default() }
            }
            Outcome::Started(started) => {
                Self { context: Some(started.context.id.clone()), run: Some(started.run.clone()), once: None }
            }
            Outcome::Progress(progress) => {
                Self { context: Some(progress.context_id.clone()), run: Some(progress.run.clone()), once: None }
            }
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
    /// The reply; `None` for a call that became a task.
    pub reply: Option<&'a Reply>,
    pub refused: bool,
    pub cancelled: bool,
}

impl ObservedCall {
    pub fn end(self, observer: &Observer, ended: Ended<'_>) {
        let code = ended.reply.and_then(error_code);
        let how = match (&code, ended.cancelled, ended.refused) {
            (_, true, _) => CallEnd::Cancelled,
            (_, _, true) => CallEnd::Refused,
            (Some(_), ..) => CallEnd::Failed,
            (None, ..) => CallEnd::Ok,
        };
        let took = self.in_progress.end(how);
        self::log(self.dialect, took, &ended, code.as_deref());
        let Some(journal) = &observer.journal else { return };
        let outcome = if ended.cancelled { "cancelled".into() } else { code.unwrap_or_else(|| "ok".into()) };
        journal.record(JournalEntry {
            tenant: Some(ended.tenant.to_owned()),
            dialect: Some(self.dialect),
            tool: Some(ended.input.tool.to_owned()),
            context: ended.facts.context,
            run: ended.facts.run,
            did: did(ended.input),
            sizes: sizes(ended.input.args),
            outcome: Some(outcome),
            took: Some(took),
            bytes_out: ended.reply.map(size),
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

fn error_code(reply: &Reply) -> Option<String> {
    match reply {
        Reply::Error { code, .. } => Some(code.to_string()),
        Reply::Answer(answer) if answer.is_error => {
            Some(answer.structured.get("code").and_then(Value::as_str).unwrap_or("error").to_owned())
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
    use crate::logging::LogFormat;
    use crate::logging::testing::logged;

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
    fn a_flood_of_strangers_is_one_line() {
        let observer = Observer::default();
        let peer = "192.0.2.7:4242".parse().unwrap();
        let log =
            logged(LogFormat::Human, || (0..100).for_each(|_| observer.denied(DenialReason::Auth, "who is it?", peer)));
        assert_eq!(log, "[HTTP] Refused 192.0.2.7:4242: who is it?\n");
        let later = logged(LogFormat::Human, || lines::log_refused(peer, "who is it?", 99));
        assert_eq!(later, "[HTTP] Refused 99 requests, the last of 192.0.2.7:4242: who is it?\n");
    }
}
