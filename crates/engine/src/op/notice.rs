//! The reports that the engine makes unasked: notices about contexts, and the steps of its start.

use std::time::Duration;

use serde::Serialize;

use super::{EngineError, Realm, Tenant};

/// Something that happened unasked, or in addition to an answer. Notices are for the journal and the metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    pub tenant: Tenant,
    pub realm: Realm,
    /// Id of the context or the conversation; empty for a sandbox in which no code has run yet.
    pub id: String,
    pub what: NoticeKind,
    /// Further information; for a denial, the sentence that explains it.
    pub detail: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NoticeKind {
    Created,
    Stopped,
    /// The context or the conversation was removed because it was not used for too long.
    Expired,
    /// The context was stopped to make room for another one.
    Evicted,
    /// The sandbox of the context was lost.
    Lost,
    TimedOut,
    OutOfMemory,
    Crashed,
    /// The network denied a request of the sandbox.
    Denied,
    /// The browser of the context ended or stopped answering.
    BrowserDied,
}

/// A step of the engine's start, for the log.
#[derive(Debug)]
pub enum StartupStep<'a> {
    /// The start has begun; `id` names this engine.
    Begun {
        id: &'a str,
    },
    /// Interpreters can be started.
    Warm,
    /// The pool is being filled with this many sandboxes.
    Filling {
        size: usize,
    },
    /// A sandbox of the pool is ready; numbers begin at 1.
    Created {
        number: usize,
        id: &'a str,
    },
    /// The pool is being checked.
    Checking,
    Checked {
        available: usize,
        size: usize,
    },
    /// Calls are served.
    Ready {
        took: Duration,
        available: usize,
    },
    Failed {
        error: &'a EngineError,
    },
}
