//! Renders refusals and errors: what happened, and what to do next.

use std::time::Duration;

use engine::op::{EngineError, LimitKind, Waiting};
use serde_json::json;
use text::shown;

use super::answer::bounded;
use crate::shared::seconds;
use crate::{Answer, ArgError, Block, RenderInput, Reply};

/// Renders refused arguments as a result, because many clients do not show a model the errors of the protocol
/// (SEP-1303).
pub(super) fn refusal(_: &RenderInput<'_>, refused: &ArgError) -> Reply {
    // The code is for the journal; the object is not sent.
    let structured = json!({ "error": refused.message, "code": refused.code });
    Answer { structured, ..failure(refused.message.clone()) }.into()
}

/// Renders a failure as a sentence in place of an object.
pub(super) fn failure(sentence: String) -> Answer {
    let sentence = bounded(&sentence);
    let structured = json!({ "error": sentence });
    Answer { blocks: vec![Block::Text(sentence)], structured, ..Answer::default() }.failed()
}

pub(super) fn error(_: &RenderInput<'_>, error: &EngineError) -> Reply {
    failure(sentence(error)).into()
}

/// Names the limits of a disk on which a run or a write found no space.
pub(super) fn disk_full(disk_bytes: u64) -> String {
    format!("The disk of the context has {} MB, and /dev/shm half of the memory: delete files.", disk_bytes >> 20)
}

/// Says how a background run that others wait for can be ended.
pub(super) fn ends(run: &str) -> String {
    format!("cancel_run with run {run} ends it")
}

/// Says what a call waits for, since when, and how to end that or the wait.
pub(super) fn waiting(waiting: &Waiting) -> String {
    let remedy = match waiting {
        Waiting::Run { run, .. } => format!("; {}", ends(run)),
        Waiting::Call { .. } => "; stop_context ends it".into(),
        Waiting::Permits(_) | Waiting::Other(_) => String::new(),
    };
    format!("This call waits: {waiting}{remedy}. Cancel this call to stop waiting.")
}

/// Says what happened and what to do next.
pub(super) fn sentence(error: &EngineError) -> String {
    use EngineError as E;
    match error {
        E::ContextNotFound(context) => format!(
            "There is no context {}: it was stopped, was idle for too long, or never existed. list_contexts shows those there \
             are; leave context out to use the default one, or make one with create_context.",
            shown(context)
        ),
        E::AmbiguousName { name, ids } => format!(
            "{} is the name of several contexts; pass one of the ids {} as context.",
            shown(name),
            ids.join(", ")
        ),
        E::NameTaken { name, id } => format!(
            "There is a context {} already, with the id {id}: pass either as context, or choose another name.",
            shown(name)
        ),
        E::ContextLimit(most) => {
            format!("There are {most} contexts already, which is the most; remove one with stop_context first.")
        }
        E::OverLimit { what, limit } => {
            let remedy = match what {
                LimitKind::EditBytes | LimitKind::UploadFiles => "do it in smaller parts",
                LimitKind::SearchesAtOnce => "wait until one of them has ended",
                LimitKind::UploadLinks => "use an earlier link, or wait until one expires",
                LimitKind::Contexts
                | LimitKind::MaxContexts
                | LimitKind::TotalMemory
                | LimitKind::CallMemory
                | LimitKind::BackgroundRuns
                | LimitKind::CommandsAtOnce
                | LimitKind::UploadBytes => "wait until other runs have ended, or remove contexts with stop_context",
            };
            format!("Over the limit {what} of {limit}; {remedy}.")
        }
        E::RunNotFound(run) => format!(
            "There is no run {}: results are kept for a while after the end, and only runs started with background=true have \
             one.",
            shown(run)
        ),
        E::NoBrowser(why) => {
            format!("There is no browser: {why}. Work without one: run_code and run_command are there.")
        }
        E::NetworkOff(why) => {
            format!("Network access is off: {why}. Leave network out, or ask the operator of this server for it.")
        }
        E::Busy(waited) => format!("The server was busy for {}; try again later.", seconds(*waited)),
        // Without an occupant of its turn the call waited for a permit.
        E::NotStarted { timeout, running: None, .. } => format!(
            "It was not run: its timeout of {} passed while other runs used all that may run at once. Try again later.",
            seconds(*timeout)
        ),
        E::NotStarted { timeout, running: Some(running), run } => {
            let what = run.as_ref().map_or_else(|| "another call".into(), |run| format!("run {run}"));
            let remedy = run.as_deref().map_or_else(
                || "Call again when it has ended".into(),
                |run| format!("{}; wait_run follows it", ends(run)),
            );
            format!(
                "It was not run: its timeout of {} passed while it waited for {what} of the same language in this context \
                 that has been running for {}. {remedy}. Commands and other languages run beside it.",
                seconds(*timeout),
                seconds(Duration::from_secs(running.as_secs().max(1)))
            )
        }
        E::QueueFull(most) => format!("{most} runs wait for their turn already; try again later."),
        E::NotReady(why) => format!("The server is not ready: {why}. Try again in a moment."),
        E::ResultDropped(why) => format!(
            "It was done, but its result was dropped: {why}. Do not repeat it for its effects; print or read less at once."
        ),
        E::ShuttingDown => "The server is shutting down; try again later.".into(),
        E::CreateFailed(why) => format!("The context could not be made: {why}. Try again."),
        E::StopFailed(why) => format!("The context could not be stopped: {why}. Try again."),
        E::FileNotFound(path) => format!("There is no file {}; list_files shows what there is.", shown(path)),
        E::InvalidPath { path, why } => format!("The path {} is refused: {why}.", shown(path)),
        E::InvalidPattern(why) => format!("The search was not run: {why}."),
        E::FileTooLarge { path, limit } => format!(
            "{} is over the limit of {limit} bytes for one call; read or write it in parts with run_code.",
            shown(path)
        ),
        E::NoSpace { disk_bytes } => format!("No space is left. {}", disk_full(*disk_bytes)),
        E::HostDiskFull(_) => {
            "No space is left on the server's disk, although the context's has room: delete files, end \
                               contexts with stop_context, or ask the operator of this server for space."
                .into()
        }
        E::Cancelled => "Cancelled by the client.".into(),
        E::Sandbox(why) => format!(
            "The sandbox failed: {why}. Whether variables were kept is unknown: try again, or make a new context with \
             create_context."
        ),
        other @ (E::NoCurrent { .. } | E::OtherLanguage { .. } | E::InUse(_) | E::InvalidEnvironment(_)) => {
            format!("The call failed: {other}.")
        }
    }
}
