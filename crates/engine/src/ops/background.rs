//! Starts, reads and cancels background runs. They outlive the client's connection but not the engine.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use super::run_code::{Run, RunInput};
use super::{OpContext, ResolvedContext};
use crate::background::Background;
use crate::engine::catch_panic;
use crate::op::{Call, EngineError, EventSink, Outcome, RunInfo};

/// Maximum time that a call waits for the end of a run, because clients give up on a call after a minute.
const LONGEST_WAIT: Duration = Duration::from_secs(50);

impl OpContext {
    pub(super) async fn start_background(
        &self,
        call: &Call,
        resolved: ResolvedContext,
        run: Run,
    ) -> Result<Outcome, EngineError> {
        let cancel = self.inner.closing.child_token();
        let (context_id, is_command) = (resolved.context.id.clone(), matches!(run.work, RunInput::Command(_)));
        // The run outlives the call that starts it, so it has a separate hold. The hold is filled before the run is
        // registered, because nothing would remove a refused run.
        let memory = call.memory.sibling();
        memory.add(run.work.length())?;
        let background = Arc::new(Background::new(self.tenancy.config(), context_id, is_command, cancel.clone()));
        self.tenancy.tenant.background.add(background.clone())?;
        let call = Call { cancel, events: EventSink::default(), memory, ..call.clone() };
        let (ops, context, created) = (self.clone(), resolved.context.context().clone(), resolved.new_notice.is_new());
        let record = background.clone();
        let mut work = Box::pin(async move {
            let result = catch_panic(ops.run_here(&call, resolved, run, Some(&record))).await;
            record.finish(result, call.memory);
            ops.tenancy.tenant.background.trim();
        });
        // The run is polled once here, so that it takes its turn before the next request.
        if poll_fn(|cx| Poll::Ready(work.as_mut().poll(cx))).await.is_pending() {
            self.inner.tasks.spawn(work);
        }
        let (run, queued) = (background.id.clone(), background.queued());
        let info = RunInfo { run, queued, context: context.info(), created };
        Ok(Outcome::Started(info))
    }

    pub(super) async fn wait_run(
        &self,
        call: &Call,
        run: &str,
        cursor: Option<u64>,
        wait: Duration,
    ) -> Result<Outcome, EngineError> {
        let run = self.tenancy.tenant.background.find(call.realm, run)?;
        self.found.set(&run.context_id);
        let cursor = cursor.unwrap_or(0);
        let end = tokio::time::timeout(wait.min(LONGEST_WAIT), run.ended());
        let _ = self.unless_over(call, end).await?;
        let progress = run.progress(cursor, self.tenancy.config().text_budget);
        if progress.end.is_some() {
            run.mark_seen();
        }
        Ok(Outcome::Progress(progress))
    }

    pub(super) fn cancel_run(&self, run: &str) -> Result<Outcome, EngineError> {
        let run = self.tenancy.tenant.background.find(self.tenancy.config().realm, run)?;
        self.found.set(&run.context_id);
        let was_running = !run.has_ended();
        run.cancel.cancel();
        run.mark_seen();
        Ok(Outcome::Cancelled { run: run.id.clone(), was_running })
    }
}
