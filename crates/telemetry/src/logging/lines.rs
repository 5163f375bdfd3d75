//! The log lines that dialects prescribe: `[MCP]` and `[HTTP]` of `conversation`, and one line for each call of
//! `workbench` (docs/dialects).
//!
//! The code is pure and turns a value into its text; `log` hands it to tracing. No line contains a host path, a token,
//! a value of the environment, code or the secret part of a file's link, whatever its input; bodies are logged at debug
//! level only.

use std::fmt::{self, Display, Formatter};
use std::net::SocketAddr;
use std::time::Duration;

use dialects::Dialect;
use engine::StartupStep;
use mcp::http::{HTTP_LOG, HttpEvent};
use serde_json::{Map, Value};
use text::cut;

use super::escape::escaped;

/// Tracing target of these lines. The human format prints only their messages, as it does for the transport's lines.
pub(crate) const MCP_LOG: &str = "sandpool::mcp";
/// Tracing target of the lines about the server's start. The human format prints them with their level, as the
/// `agentrun` document does.
pub(crate) const STARTUP_LOG: &str = "sandpool::startup";

/// Maximum number of characters of one client value in a line.
const SHOWN: usize = 64;
/// Maximum number of characters of a body in a line.
const BODY_SHOWN: usize = 4000;

/// The lines that `conversation` logs about a request on its way through the server, in the order of
/// docs/dialects/conversation.md. `MoreFiles` counts the files beyond the first few. `CompletedWithError` is a call
/// that succeeded although the code that it ran failed.
#[derive(Debug, Clone, Copy)]
pub(crate) enum McpLine<'a> {
    Incoming { method: &'a str, id: &'a Value },
    ProcessingInitialize,
    InitializeSuccessful,
    BuildingToolsList,
    FoundRunners(usize),
    ReturningTools(usize),
    ToolCall { tool: &'a str },
    ParsingArguments { tool: &'a str },
    RunCode(RunCode<'a>),
    UsingRunner(&'a str),
    CreatingDirectory { conversation: &'a str },
    DirectoryCreated { hex: &'a str },
    Executing(RunCode<'a>),
    ExecutionCompleted { success: bool, exit_code: i32 },
    ListingFiles,
    FoundFiles(usize),
    FileAvailable { name: &'a str, url: &'a str },
    MoreFiles(usize),
    Completed { tool: &'a str },
    CompletedWithError { tool: &'a str },
    Failed { tool: &'a str, code: &'a str },
}

/// Facts about a `sandbox.run_code`, without its code or any value of its environment.
#[derive(Debug, Clone, Copy)]
pub struct RunCode<'a> {
    pub conversation: &'a str,
    pub language: &'a str,
    /// Length of the code in bytes.
    pub code_len: usize,
    pub network: bool,
    pub env_vars: usize,
}

impl McpLine<'_> {
    pub(crate) fn log(&self) {
        tracing::info!(target: MCP_LOG, "{self}");
    }
}

/// Returns the lines that are logged before a run, after its arguments were read.
pub(crate) fn run_code_begins<'a>(run: RunCode<'a>, runner: &'a str, link_hex: &'a str) -> [McpLine<'a>; 5] {
    [
        McpLine::RunCode(run),
        McpLine::UsingRunner(runner),
        McpLine::CreatingDirectory { conversation: run.conversation },
        McpLine::DirectoryCreated { hex: link_hex },
        McpLine::Executing(run),
    ]
}

/// Maximum number of files that the log names for one call, because code in a sandbox must not decide how much is
/// logged.
const NAMED_FILES: usize = 5;

/// Returns the lines that are logged after a run. `files` are pairs of name and URL.
pub(crate) fn run_code_ended<'a>(
    success: bool,
    exit_code: i32,
    files: impl ExactSizeIterator<Item = (&'a str, &'a str)>,
) -> Vec<McpLine<'a>> {
    let mut lines = vec![McpLine::ExecutionCompleted { success, exit_code }, McpLine::ListingFiles];
    let count = files.len();
    lines.push(McpLine::FoundFiles(count));
    lines.extend(files.take(NAMED_FILES).map(|(name, url)| McpLine::FileAvailable { name, url }));
    if count > NAMED_FILES {
        lines.push(McpLine::MoreFiles(count - NAMED_FILES));
    }
    lines.push(if success {
        McpLine::Completed { tool: "run_code" }
    } else {
        McpLine::CompletedWithError { tool: "run_code" }
    });
    lines
}

impl Display for McpLine<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str("[MCP] ")?;
        match *self {
            Self::Incoming { method, id } => {
                write!(f, "Incoming request - Method: {}, ID: {}", shown(method), shown_id(id))
            }
            Self::ProcessingInitialize => f.write_str("Processing initialize request"),
            Self::InitializeSuccessful => f.write_str("Initialize successful"),
            Self::BuildingToolsList => f.write_str("Building tools list"),
            Self::FoundRunners(count) => write!(f, "Found {count} runners"),
            Self::ReturningTools(count) => write!(f, "Returning {count} tools"),
            Self::ToolCall { tool } => write!(f, "Tool call: {}", shown(tool)),
            Self::ParsingArguments { tool } => write!(f, "Parsing {} arguments", shown(tool)),
            Self::RunCode(RunCode { conversation, language, code_len, network, env_vars }) => write!(
                f,
                "run_code: conversationId={}, language={}, codeLen={code_len}, network={network}, envVars={env_vars}",
                shown(conversation),
                shown(language),
            ),
            Self::UsingRunner(runner) => write!(f, "Using runner: {}", shown(runner)),
            Self::CreatingDirectory { conversation } => {
                write!(f, "Creating sandbox directory for conversation {}", shown(conversation))
            }
            Self::DirectoryCreated { hex } => write!(f, "Sandbox directory created: {}", head(hex, 12)),
            Self::Executing(RunCode { conversation, language, network, env_vars, .. }) => write!(
                f,
                "Executing {} code for conversation {} (network: {network}, env vars: {env_vars})",
                shown(language),
                shown(conversation),
            ),
            Self::ExecutionCompleted { success, exit_code } => {
                write!(f, "Execution completed: success={success}, exitCode={exit_code}")
            }
            Self::ListingFiles => f.write_str("Listing files in sandbox"),
            Self::FoundFiles(count) => write!(f, "Found {count} files"),
            Self::FileAvailable { name, url } => {
                write!(f, "File available: {} -> {}", shown(name), cut(&escaped(&without_secret(url)), 300))
            }
            Self::MoreFiles(count) => write!(f, "{count} more files available"),
            Self::Completed { tool } => write!(f, "{} completed successfully", shown(tool)),
            Self::CompletedWithError { tool } => write!(f, "{} completed, the code failed", shown(tool)),
            Self::Failed { tool, code } => write!(f, "{} failed: {}", shown(tool), shown(code)),
        }
    }
}

/// Logs a step of the server's start in the words of its default dialect.
pub fn log_startup(dialect: &Dialect, step: &StartupStep<'_>) {
    for line in (dialect.startup)(step) {
        match step {
            StartupStep::Failed { .. } => tracing::error!(target: STARTUP_LOG, "{line}"),
            _ => tracing::info!(target: STARTUP_LOG, "{line}"),
        }
    }
}

/// Logs a line of `conversation` about the HTTP layer.
pub fn log_http(event: HttpEvent<'_>) {
    let line = HttpLine(event);
    match event {
        HttpEvent::RequestBody(_) | HttpEvent::Response(_) => tracing::debug!(target: HTTP_LOG, "{line}"),
        _ => tracing::info!(target: HTTP_LOG, "{line}"),
    }
}

/// An event of the HTTP layer as a line, which is formatted only if its level is logged.
struct HttpLine<'a>(HttpEvent<'a>);

impl Display for HttpLine<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self.0 {
            HttpEvent::Request { peer } => write!(f, "[HTTP] MCP request from {peer}"),
            HttpEvent::RequestBody(body) => write!(f, "[HTTP] Request body: {}", redacted(body)),
            HttpEvent::Parsed { method, id } => {
                write!(f, "[HTTP] Parsed JSON-RPC request: method={}, id={}", shown(method), shown_id(id))
            }
            HttpEvent::Sending { method } => write!(f, "[HTTP] Sending response for method={}", shown(method)),
            HttpEvent::Response(body) => write!(f, "[HTTP] Response: {}", redacted(body)),
        }
    }
}

/// Logs refused requests; `count` is their number since the last such line.
pub(crate) fn log_refused(peer: SocketAddr, message: &str, count: u64) {
    match count {
        1 => tracing::info!(target: HTTP_LOG, "[HTTP] Refused {peer}: {message}"),
        _ => tracing::info!(target: HTTP_LOG, "[HTTP] Refused {count} requests, the last of {peer}: {message}"),
    }
}

/// Logs refused requests of a tenant that makes too many; `count` is their number since the last such line.
pub(crate) fn log_throttled(tenant: &str, message: &str, count: u64) {
    let (name, requests) = (shown(tenant), if count == 1 { "request" } else { "requests" });
    tracing::warn!(target: HTTP_LOG, tenant, count, "[HTTP] Throttled tenant {name}: {count} {requests} refused: {message}");
}

/// The line that `workbench` prescribes for each call: tool, duration, shortened and redacted key arguments, error
/// code, sandbox.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ToolLine<'a> {
    pub tool: &'a str,
    pub took: Duration,
    pub args: &'a Map<String, Value>,
    /// Code of the error if the call failed.
    pub error: Option<&'a str>,
    pub sandbox: Option<&'a str>,
}

impl ToolLine<'_> {
    pub(crate) fn log(&self) {
        let took_ms = self.took.as_millis();
        tracing::info!(target: MCP_LOG, tool = self.tool, took_ms, error = self.error, sandbox = self.sandbox, "{self}");
    }
}

impl Display for ToolLine<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let outcome = if self.error.is_some() { "failed" } else { "ok" };
        write!(f, "[MCP] {} {outcome} in {} ms", shown(self.tool), self.took.as_millis())?;
        if let Some(code) = self.error {
            write!(f, ": {}", shown(code))?;
        }
        let sandbox = self.sandbox.map(|id| format!("sandbox={}", shown(id)));
        let args = self.args.iter().map(|(name, value)| format!("{}={}", shown(name), shown_argument(name, value)));
        let facts: Vec<String> = sandbox.into_iter().chain(args.take(20)).collect();
        if facts.is_empty() { Ok(()) } else { write!(f, " ({})", facts.join(", ")) }
    }
}

/// Arguments whose value helps to find a fault and is not secret. All others are shown by their size.
const KEY_ARGUMENTS: &[&str] = &[
    "action",
    "background",
    "button",
    "context",
    "context_id",
    "conversationId",
    "cursor",
    "direction",
    "encoding",
    "filename",
    "flavor",
    "language",
    "maxTextLen",
    "name",
    "network",
    "path",
    "run",
    "sandbox_id",
    "selector",
    "session_id",
    "size",
    "target",
    "template",
    "timeout",
    "wait",
    "within",
];

fn shown_argument(name: &str, value: &Value) -> String {
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => value.to_string(),
        Value::String(url) if name == "url" => shown(&site(url)),
        // A path may be the address of a link.
        Value::String(text) if KEY_ARGUMENTS.contains(&name) => shown(&without_links(text)),
        Value::String(text) => format!("<{} bytes>", text.len()),
        Value::Array(items) => format!("<{} items>", items.len()),
        Value::Object(members) => format!("<{} members>", members.len()),
    }
}

fn shown(text: &str) -> String {
    escaped(&cut(text, SHOWN))
}

fn shown_id(id: &Value) -> String {
    match id {
        Value::String(text) => shown(text),
        other => shown(&other.to_string()),
    }
}

/// Shortens the name of a directory as the documents do, because everyone who knows the whole name may read the files.
fn head(secret: &str, most: usize) -> String {
    let head: String = secret.chars().take(most).collect();
    format!("{}...", escaped(&head))
}

/// Returns the scheme and host of an address. The path and the query are left out, because they may contain a secret or
/// content of a page; for a `data:` address only the scheme remains.
pub fn site(url: &str) -> String {
    match url.split_once("://") {
        Some((scheme, after)) => {
            let authority = &after[..after.find(['/', '?', '#', '\\']).unwrap_or(after.len())];
            format!("{scheme}://{}", authority.rsplit('@').next().unwrap_or_default())
        }
        None => match url.split_once(':') {
            Some((scheme, _)) => format!("{scheme}:"),
            None => format!("<{} bytes>", url.len()),
        },
    }
}

/// Returns a URL without the parts that give access: user and password, the query, the secret directory of a file's
/// link.
fn without_secret(url: &str) -> String {
    let (url, rest) = match url.find(['?', '#']) {
        Some(at) => (&url[..at], "?…"),
        None => (url, ""),
    };
    let plain = match url.split_once("://") {
        Some((scheme, after)) => {
            let authority = after.find('/').unwrap_or(after.len());
            let host = after[..authority].rfind('@').map_or(0, |at| at + 1);
            format!("{scheme}://{}", &after[host..])
        }
        None => url.to_owned(),
    };
    without_links(&plain) + rest
}

/// Shortens the hex digits of every `/files/<64 hex>/` and `/upload/<32 hex>` in a text.
fn without_links(text: &str) -> String {
    const MARKS: [&str; 2] = ["/files/", "/upload/"];
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(end) = MARKS.iter().filter_map(|mark| Some(rest.find(mark)? + mark.len())).min() {
        let (before, after) = rest.split_at(end);
        out.push_str(before);
        let hex = after.bytes().take_while(u8::is_ascii_hexdigit).count();
        if hex >= 32 {
            out.push_str(&head(&after[..hex], 6));
            rest = &after[hex..];
        } else {
            rest = after;
        }
    }
    out + rest
}

/// Returns a redacted and shortened body for the debug log.
fn redacted(body: &Value) -> String {
    escaped(&cut(&without_secrets(body.clone()).to_string(), BODY_SHOWN))
}

/// Removes values of environments, members with names of secrets, text typed into a page, and links.
pub(crate) fn without_secrets(value: Value) -> Value {
    match value {
        Value::Object(members) => {
            Value::Object(members.into_iter().map(|(name, value)| redacted_member(name, value)).collect())
        }
        Value::Array(items) => items.into_iter().map(without_secrets).collect(),
        // A result often contains JSON within a text.
        Value::String(text) => Value::String(without_links(&text)),
        other => other,
    }
}

fn redacted_member(name: String, value: Value) -> (String, Value) {
    const HIDDEN: &str = "[redacted]";
    const SECRETS: &[&str] = &["token", "secret", "password", "passwd", "authorization", "api_key", "apikey", "cookie"];
    let lower = name.to_ascii_lowercase();
    let value = match value {
        Value::Object(variables) if matches!(lower.as_str(), "environment" | "env") => {
            Value::Object(variables.into_iter().map(|(name, _)| (name, HIDDEN.into())).collect())
        }
        Value::String(_) if SECRETS.iter().any(|secret| lower.contains(secret)) => HIDDEN.into(),
        // Text typed into a page may be a password.
        Value::String(ref text) if matches!(lower.as_str(), "text" | "key") && !text.starts_with('{') => HIDDEN.into(),
        other => without_secrets(other),
    };
    (name, value)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::logging::LogFormat;
    use crate::logging::testing::{logged, worded};

    const HEX: &str = "abc123def4567890abc123def4567890abc123def4567890abc123def4567890";

    /// Lines as docs/dialects/conversation.md prints them, except the line with the host path.
    const DOCUMENT: &str = "\
[MCP] Incoming request - Method: initialize, ID: 1
[MCP] Processing initialize request
[MCP] Initialize successful
[MCP] Incoming request - Method: tools/list, ID: 2
[MCP] Building tools list
[MCP] Found 2 runners
[MCP] Returning 2 tools
[MCP] Incoming request - Method: tools/call, ID: 3
[MCP] Tool call: sandbox.run_code
[MCP] Parsing run_code arguments
[MCP] run_code: conversationId=user-123, language=python, codeLen=150, network=false, envVars=1
[MCP] Using runner: mcp-sandbox-runner-python:latest
[MCP] Creating sandbox directory for conversation user-123
[MCP] Sandbox directory created: abc123def456...
[MCP] Executing python code for conversation user-123 (network: false, env vars: 1)
[MCP] Execution completed: success=true, exitCode=0
[MCP] Listing files in sandbox
[MCP] Found 1 files
[MCP] File available: plot.png -> https://example.com/files/abc123.../plot.png
[MCP] run_code completed successfully
";

    fn document() {
        let ids = [json!(1), json!(2), json!(3)];
        let run = RunCode { conversation: "user-123", language: "python", code_len: 150, network: false, env_vars: 1 };
        let url = format!("https://example.com/files/{HEX}/plot.png");
        let mut lines = vec![
            McpLine::Incoming { method: "initialize", id: &ids[0] },
            McpLine::ProcessingInitialize,
            McpLine::InitializeSuccessful,
            McpLine::Incoming { method: "tools/list", id: &ids[1] },
            McpLine::BuildingToolsList,
            McpLine::FoundRunners(2),
            McpLine::ReturningTools(2),
            McpLine::Incoming { method: "tools/call", id: &ids[2] },
            McpLine::ToolCall { tool: "sandbox.run_code" },
            McpLine::ParsingArguments { tool: "run_code" },
        ];
        lines.extend(run_code_begins(run, "mcp-sandbox-runner-python:latest", HEX));
        lines.extend(run_code_ended(true, 0, [("plot.png", url.as_str())].into_iter()));
        lines.iter().for_each(McpLine::log);
    }

    #[test]
    fn the_mcp_lines_are_the_document_s() {
        assert_eq!(worded(document), DOCUMENT);
    }

    #[test]
    fn w27_a_call_with_many_files_names_the_first_few_and_counts_the_rest() {
        let url = format!("https://example.com/files/{HEX}/{}", "n".repeat(200));
        let files: Vec<(String, String)> = (0..100).map(|n| (format!("file-{n}"), url.clone())).collect();
        let given = files.iter().map(|(name, url)| (name.as_str(), url.as_str()));
        let lines: Vec<String> = run_code_ended(true, 0, given).iter().map(McpLine::to_string).collect();
        assert_eq!(lines.iter().filter(|line| line.starts_with("[MCP] File available: file-")).count(), 5);
        assert_eq!(lines[2], "[MCP] Found 100 files");
        assert_eq!(lines[8], "[MCP] 95 more files available");
        assert!(lines.iter().map(String::len).sum::<usize>() < 4096, "{lines:?}");
        // Up to five files are all named.
        let few = files[..5].iter().map(|(name, url)| (name.as_str(), url.as_str()));
        assert!(!run_code_ended(true, 0, few).iter().any(|line| line.to_string().contains("more files")));
    }

    #[test]
    fn code_that_fails_is_not_called_a_success() {
        let lines: Vec<String> = run_code_ended(false, 1, [].into_iter()).iter().map(McpLine::to_string).collect();
        let expected = [
            "[MCP] Execution completed: success=false, exitCode=1",
            "[MCP] Listing files in sandbox",
            "[MCP] Found 0 files",
            "[MCP] run_code completed, the code failed",
        ];
        assert_eq!(lines, expected);
    }

    #[test]
    fn the_json_form_has_the_same_words() {
        let log = logged(LogFormat::Json, document);
        let message = |line: &str| serde_json::from_str::<Value>(line).unwrap()["message"].as_str().unwrap().to_owned();
        assert_eq!(log.lines().map(message).collect::<Vec<_>>(), DOCUMENT.lines().collect::<Vec<_>>());
    }

    #[test]
    fn the_http_lines_are_the_document_s() {
        let body = json!({"jsonrpc": "2.0"});
        let id = json!(1);
        let log = worded(|| {
            log_http(HttpEvent::Request { peer: "127.0.0.1:54321".parse().unwrap() });
            log_http(HttpEvent::RequestBody(&body));
            log_http(HttpEvent::Parsed { method: "initialize", id: &id });
            log_http(HttpEvent::Sending { method: "initialize" });
            log_http(HttpEvent::Response(&body));
        });
        let document = "\
[HTTP] MCP request from 127.0.0.1:54321
[HTTP] Request body: {\"jsonrpc\":\"2.0\"}
[HTTP] Parsed JSON-RPC request: method=initialize, id=1
[HTTP] Sending response for method=initialize
[HTTP] Response: {\"jsonrpc\":\"2.0\"}
";
        assert_eq!(log, document);
    }

    #[test]
    fn a_call_of_002_is_tool_duration_key_arguments_code_and_sandbox() {
        let args = json!({"language": "python", "code": "print('x')", "timeout": 5});
        let line = |error, sandbox| {
            let took = Duration::from_micros(12_345);
            ToolLine { tool: "code_run", took, args: args.as_object().unwrap(), error, sandbox }.to_string()
        };
        assert_eq!(
            line(None, Some("sbx-1")),
            "[MCP] code_run ok in 12 ms (sandbox=sbx-1, code=<10 bytes>, language=python, timeout=5)"
        );
        assert_eq!(
            line(Some("TIMEOUT"), None),
            "[MCP] code_run failed in 12 ms: TIMEOUT (code=<10 bytes>, language=python, timeout=5)"
        );
    }

    #[test]
    fn of_an_address_only_the_site_is_logged() {
        assert_eq!(site("https://a:b@shop.test:8443/path/token?q=1#f"), "https://shop.test:8443");
        assert_eq!(site("http://shop.test?q=a@b"), "http://shop.test");
        assert_eq!(site("data:text/html,<p>secret"), "data:");
        assert_eq!(site("javascript:alert('secret')"), "javascript:");
        assert_eq!(site("shop.test/secret"), "<16 bytes>");
    }

    #[test]
    fn no_secret_and_no_foreign_line_gets_into_a_line() {
        let secret = "hunter2";
        let long = "x".repeat(500);
        let args = json!({
            "code": secret, "content": secret, "text": secret, "command": secret, "args": [secret],
            "environment": {"API_KEY": secret}, "env": {"A": secret}, "token": secret, "selector": long,
            "key": secret, "expression": secret, "find": secret, "options": [secret], "files": [secret],
            "url": format!("https://{secret}:{secret}@example.com/files/{HEX}/a?sig={secret}#{secret}"),
            "context_id": "ctx\n[INFO] forged\x1b[2J", "path": format!("http://h/files/{HEX}/a"),
        });
        let upload = format!("http://h/upload/{}", &HEX[..32]);
        let answer = json!({"content": [{"type": "text", "text": format!("{{\"url\":\"/files/{HEX}/a {upload}\"}}")}]});
        let request = json!({"params": {"arguments": {"environment": {"API_KEY": secret}, "text": secret,
            "env": {"A": secret}, "token": secret, "Authorization": secret, "key": secret}}});
        let log = logged(LogFormat::Human, || {
            let args = args.as_object().unwrap();
            ToolLine { tool: "t", took: Duration::ZERO, args, error: None, sandbox: None }.log();
            McpLine::FileAvailable { name: "a\nb", url: args["url"].as_str().unwrap() }.log();
            McpLine::Incoming { method: "a\r\nb", id: &json!("1\n2\x1b") }.log();
            log_http(HttpEvent::RequestBody(&request));
            log_http(HttpEvent::Response(&answer));
        });
        assert_eq!(log.lines().count(), 5, "{log}");
        assert!(
            !log.contains(secret) && !log.contains(&HEX[..16]) && !log.contains(&long) && !log.contains('\x1b'),
            "{log}"
        );
        assert!(log.contains("url=https://example.com)"), "{log}");
        assert!(log.contains("File available: a\\nb -> https://example.com/files/abc123.../a?…"), "{log}");
        assert!(log.contains("context_id=ctx\\n[INFO] forged\\u{1b}[2J"), "{log}");
    }
}
