//! Implements the Tasks extension (`io.modelcontextprotocol/tasks`, SEP-2663) for clients that declare it. Other
//! clients never see a task.
//!
//! A task is a background run of the engine. Its id is the run's id, which only its tenant can use, and its result is
//! the tool's answer. This module has no state, so any connection of the tenant can ask for a task.

use std::time::Duration;

use dialects::{Args, RenderInput, Reply};
use engine::op::{Call, EngineError, EventSink, Op, Outcome, RunCode, RunCommand, RunOutcome, RunProgress};
use mcp::is_modern;
use rmcp::ErrorData;
use rmcp::model::{ClientCapabilities, DetailedTask, GetTaskResult, Task, TaskPayload, TaskStatus};
use serde_json::{Map, Value};
use text::{iso8601, shown, unix_now};
use tokio_util::sync::CancellationToken;

use super::{Execute, McpContext, McpResult, McpServer, Surface, to_mcp};

/// A call that ends within this time is answered in the ordinary way, because a task costs the client at least one more
/// request.
const PATIENCE: Duration = Duration::from_secs(5);

const POLL_INTERVAL_MS: u64 = 1000;

/// Time for which the engine keeps a run after its end.
const KEPT: Duration = Duration::from_secs(60 * 60);

/// Maximum number of characters of the last line of output, which is the status message of a task.
const LINE: usize = 200;

/// The result of a call.
pub(super) enum CallDone {
    Outcome(Outcome),
    /// The run takes long and continues as a task.
    Task(Task),
}

impl Surface {
    /// Returns whether runs can continue in the background.
    pub(super) fn has_tasks(&self) -> bool {
        self.dialect.background.is_some()
    }
}

impl McpServer {
    /// Returns how long a run may last as a task, if the client supports tasks and says so in this request. The
    /// Inspector declares the extension in `initialize` too, but then does not understand the answer, because revisions
    /// before 2026-07-28 have no `resultType`.
    pub(super) fn may_last(&self, context: &McpContext) -> Option<Duration> {
        let declared = || context.client_capabilities().as_ref().is_some_and(ClientCapabilities::supports_tasks);
        (self.surface.has_tasks() && is_modern(context) && declared())
            .then(|| Duration::from_secs(self.surface.options.max_timeout))
    }

    /// Returns the longest time that any run may last.
    pub(super) fn longest_run(&self) -> Duration {
        let options = &self.surface.options;
        Duration::from_secs(options.max_timeout.max(options.max_command_timeout).max(options.max_background))
    }
}

/// Executes an operation. If `may_last` is set, a long run becomes a task, and `may_last` is the timeout of a run that
/// names none. `longest` is the longest time that any run may last.
pub(super) async fn execute(
    engine: &dyn Execute,
    call: &Call,
    op: Op,
    may_last: Option<Duration>,
    longest: Duration,
) -> Result<CallDone, EngineError> {
    // A background run without a timeout gets more time than a call would.
    let op = match (op, may_last) {
        (Op::RunCode(run), Some(usual)) if !run.background => {
            Op::RunCode(RunCode { background: true, timeout: run.timeout.or(Some(usual)), ..run })
        }
        (Op::RunCommand(run), Some(usual)) if !run.background => {
            Op::RunCommand(RunCommand { background: true, timeout: run.timeout.or(Some(usual)), ..run })
        }
        (other, _) => return engine.execute(call, other).await.map(CallDone::Outcome),
    };
    match engine.execute(call, op).await? {
        Outcome::Started(started) => wait_briefly(engine, call, started.run, longest).await,
        other => Ok(CallDone::Outcome(other)),
    }
}

/// Waits briefly for the end of a run. Until the client has a task, cancelling the call cancels the run.
async fn wait_briefly(
    engine: &dyn Execute,
    call: &Call,
    run: String,
    longest: Duration,
) -> Result<CallDone, EngineError> {
    let progress = tokio::select! {
        // Cancellation is checked first, because the same token also ends the wait for the run.
        biased;
        () = call.cancel.cancelled() => {
            let call = Call { cancel: CancellationToken::new(), ..call.clone() };
            engine.execute(&call, Op::CancelRun { run }).await?;
            return Err(EngineError::Cancelled);
        }
        progress = wait_run(engine, call, run.clone(), PATIENCE) => match progress {
            // There is no memory for the result at the moment, so the client has to ask for the task later.
            Err(EngineError::OverLimit { .. } | EngineError::NotReady(_)) => {
                return Ok(CallDone::Task(working(&run, unix_now(), unix_now(), longest)));
            }
            progress => progress?,
        },
    };
    match progress.end {
        Some(ended) => ended.map(|ran| CallDone::Outcome(Outcome::Ran(ran))),
        None => Ok(CallDone::Task(task(&progress, longest))),
    }
}

async fn wait_run(engine: &dyn Execute, call: &Call, run: String, wait: Duration) -> Result<RunProgress, EngineError> {
    match engine.execute(call, Op::WaitRun { run, cursor: None, wait }).await? {
        Outcome::Progress(progress) => Ok(progress),
        _ => Err(EngineError::Sandbox("the engine gave another kind of answer than was asked for".into())),
    }
}

/// Describes a task that may go on for `left` after it was updated. Its result is kept after that.
fn working(run: &str, started: u64, updated: u64, left: Duration) -> Task {
    let moment = |seconds: u64| iso8601(i64::try_from(seconds).unwrap_or(i64::MAX));
    let updated = updated.max(started);
    let lasts = Duration::from_secs(updated - started) + left + KEPT;
    Task::new(run, TaskStatus::Working, moment(started), moment(updated))
        .with_ttl_ms(u64::try_from(lasts.as_millis()).unwrap_or(u64::MAX))
        .with_poll_interval_ms(POLL_INTERVAL_MS)
}

fn task(progress: &RunProgress, longest: Duration) -> Task {
    let (updated, left) = progress.ended_at.map_or_else(|| (unix_now(), longest), |ended| (ended, Duration::ZERO));
    let task = working(&progress.run, progress.started_at, updated, left);
    match last_line(&progress.output) {
        Some(line) => task.with_status_message(line),
        None => task,
    }
}

fn last_line(output: &str) -> Option<String> {
    let line = output.lines().rev().find(|line| !line.trim().is_empty())?;
    Some(line.chars().take(LINE).collect())
}

/// Answers `tasks/get`.
pub(super) async fn get(server: &McpServer, id: String, context: &McpContext) -> McpResult<GetTaskResult> {
    let call = server.engine_call(context, EventSink::default());
    let progress = wait_run(&*server.engine, &call, id, Duration::ZERO).await.map_err(refused)?;
    let task = task(&progress, server.longest_run());
    let payload = match &progress.end {
        None => TaskPayload::Working,
        Some(Ok(ran)) if matches!(ran.end, RunOutcome::Cancelled { .. }) => TaskPayload::Cancelled,
        Some(_) => TaskPayload::Completed { result: result(&server.surface, progress) },
    };
    Ok(GetTaskResult::new(DetailedTask::new(task, payload)))
}

/// Answers `tasks/cancel`. The run ends a little later.
pub(super) async fn cancel(server: &McpServer, id: String, context: &McpContext) -> McpResult<()> {
    let call = server.engine_call(context, EventSink::default());
    server.engine.execute(&call, Op::CancelRun { run: id }).await.map(|_| ()).map_err(refused)
}

/// Answers `tasks/update`. The server never asks the client for input, so the client's responses are ignored.
pub(super) async fn update(server: &McpServer, id: String, context: &McpContext) -> McpResult<()> {
    get(server, id, context).await.map(|_| ())
}

/// Renders the result of a task, which is the answer that the tool would give.
fn result(surface: &Surface, progress: RunProgress) -> Map<String, Value> {
    let Surface { dialect, options, links, .. } = surface;
    let Some(row) = dialect.background else { return Map::new() };
    let args = Args::from_iter([("run".to_owned(), progress.run.clone().into())]);
    let Ok(lowered) = (row.lower)(&args, options) else { return Map::new() };
    let (links, fence) = (links.at(unix_now()), super::fence());
    let input = RenderInput { tool: row.name, args: &args, options, links: &links, fence: &fence };
    let Reply::Answer(answer) = row.render(&input, lowered.render, Outcome::Progress(progress)) else {
        return Map::new();
    };
    match serde_json::to_value(to_mcp(row, answer)) {
        Ok(Value::Object(members)) => members,
        _ => Map::new(),
    }
}

/// Converts an error. A task of another tenant gets exactly the same answer as an absent one.
fn refused(error: EngineError) -> ErrorData {
    match error {
        EngineError::RunNotFound(id) => ErrorData::invalid_params(format!("task not found: {}", shown(&id)), None),
        other => ErrorData::internal_error(other.to_string(), None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_lives_as_long_as_its_run_may_last_and_its_result_is_kept() {
        let (longest, now) = (Duration::from_secs(4 * 3600), unix_now());
        let progress = |started_at, ended_at| RunProgress {
            run: "r".into(),
            context_id: "c".into(),
            command: false,
            queued: None,
            started_at,
            ended_at,
            output: String::new(),
            dropped: 0,
            cursor: 0,
            end: None,
        };
        let ttl = |progress: &RunProgress| {
            let task = serde_json::to_value(task(progress, longest)).unwrap();
            task["ttlMs"].as_u64().unwrap_or_else(|| panic!("{task}")) / 1000
        };
        assert!(ttl(&progress(now, None)) >= 5 * 3600);
        // It may have waited for other runs before it began.
        assert!(ttl(&progress(now - 3 * 3600, None)) >= 8 * 3600);
        assert_eq!(ttl(&progress(now - 3 * 3600, Some(now - 3600))), 3 * 3600);
    }
}
