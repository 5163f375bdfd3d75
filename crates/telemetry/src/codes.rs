//! The codes of failures in the log and the journal, for answers that have no code themselves.

use engine::op::browser::BrowseFailure;
use engine::op::{EngineError, RunOutcome};

pub(crate) fn of_error(error: &EngineError) -> &'static str {
    use EngineError as E;
    match error {
        E::ContextNotFound(_) => "CONTEXT_NOT_FOUND",
        E::AmbiguousName { .. } => "AMBIGUOUS_NAME",
        E::NameTaken { .. } => "NAME_TAKEN",
        E::ContextLimit(_) => "CONTEXT_LIMIT",
        E::OverLimit { .. } => "OVER_LIMIT",
        E::NoCurrent { .. } => "NO_CONTEXT",
        E::OtherLanguage { .. } => "OTHER_LANGUAGE",
        E::NetworkOff(_) => "NETWORK_OFF",
        E::NoBrowser(_) => "NO_BROWSER",
        E::RunNotFound(_) => "RUN_NOT_FOUND",
        E::InvalidEnvironment(_) => "INVALID_ENVIRONMENT",
        E::InUse(_) => "IN_USE",
        E::Busy(_) | E::NotStarted { .. } => "BUSY",
        E::QueueFull(_) => "QUEUE_FULL",
        E::NotReady(_) => "SERVER_NOT_READY",
        E::ResultDropped(_) => "RESULT_DROPPED",
        E::CreateFailed(_) => "CONTEXT_CREATION_FAILED",
        E::StopFailed(_) => "STOP_FAILED",
        E::FileNotFound(_) => "FILE_NOT_FOUND",
        E::InvalidPath { .. } => "INVALID_PATH",
        E::InvalidPattern(_) => "INVALID_PATTERN",
        E::FileTooLarge { .. } => "FILE_TOO_LARGE",
        E::NoSpace { .. } => "NO_SPACE",
        E::HostDiskFull(_) => "HOST_DISK_FULL",
        E::Cancelled => "CANCELLED",
        E::ShuttingDown => "SHUTTING_DOWN",
        E::Sandbox(_) => "SANDBOX_FAILED",
    }
}

/// Returns the code of a run that did not succeed.
pub(crate) fn of_run(end: &RunOutcome) -> Option<&'static str> {
    match end {
        RunOutcome::Ok => None,
        RunOutcome::Error => Some("EXCEPTION"),
        RunOutcome::Exit { .. } => Some("EXIT"),
        RunOutcome::TimedOut { .. } => Some("TIMEOUT"),
        RunOutcome::Cancelled { .. } => Some("CANCELLED"),
        RunOutcome::Interrupted => Some("INTERRUPTED"),
        RunOutcome::OutOfMemory { .. } | RunOutcome::SandboxOutOfMemory { .. } => Some("OUT_OF_MEMORY"),
        RunOutcome::Ended { .. } => Some("INTERPRETER_ENDED"),
        RunOutcome::SandboxLost { .. } => Some("SANDBOX_LOST"),
    }
}

pub(crate) fn of_browsing(failure: BrowseFailure) -> &'static str {
    match failure {
        BrowseFailure::NotFound => "ELEMENT_NOT_FOUND",
        BrowseFailure::Stale => "ELEMENT_STALE",
        BrowseFailure::Ambiguous => "ELEMENT_AMBIGUOUS",
        BrowseFailure::NotReady => "ELEMENT_NOT_READY",
        BrowseFailure::Navigation => "NAVIGATION_FAILED",
        BrowseFailure::TimedOut => "TIMEOUT",
        BrowseFailure::Crashed => "PAGE_CRASHED",
        BrowseFailure::Threw => "EXCEPTION",
        BrowseFailure::Invalid => "INVALID_ARGUMENT",
        BrowseFailure::Cancelled => "CANCELLED",
        BrowseFailure::NoBrowser => "NO_BROWSER",
    }
}
