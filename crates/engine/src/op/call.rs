//! The description of one request: on whose behalf it is made, and how to reach the client while the work goes on.

use std::fmt;
use std::time::Duration;

use proto::Stream;
use tokio_util::sync::CancellationToken;

use super::stage::{FoundContext, Stages};
use crate::memory::Hold;

/// Describes one request: its tenant, the rules that apply, and how to reach the client while the work goes on. The
/// transport builds it.
#[derive(Debug, Clone)]
pub struct Call {
    pub tenant: Tenant,
    pub realm: Realm,
    /// Id of the client's connection, if it has one that lasts: the process over stdio, or a session over HTTP.
    /// [`super::ContextSelector::Current`] refers to it.
    pub connection: Option<String>,
    pub cancel: CancellationToken,
    pub events: EventSink,
    /// Memory that the call occupies in this process.
    pub memory: Hold,
    /// Recorder of the stages of the call, if the caller wants to know how long they take.
    pub stages: Stages,
    pub found: FoundContext,
}

/// A dialect's part of the engine. A context is visible only in the realm in which it was created. Each realm has
/// limits, lifetimes and id prefixes, which are set in [`crate::config::RealmConfig`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Realm(pub &'static str);

#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tenant(pub String);

impl Tenant {
    /// Returns the only tenant of stdio and of a server without tokens.
    pub fn local() -> Self {
        Self("local".into())
    }
}

/// Sends progress and output to the client while an operation runs. It is the only way in which the engine calls its
/// caller. The channel is bounded: a slow reader loses events but never delays a cell.
#[derive(Debug, Clone, Default)]
pub struct EventSink(pub Option<tokio::sync::mpsc::Sender<Event>>);

impl EventSink {
    pub fn send(&self, event: Event) {
        if let Some(sender) = &self.0 {
            let _ = sender.try_send(event);
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    Output {
        stream: Stream,
        text: String,
    },
    /// The call waits.
    Waiting(Waiting),
    /// The call has waited, and goes on.
    Resumed,
}

/// What a call or a background run waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Waiting {
    /// A background run has the turn.
    Run { run: String, running: Duration },
    /// Another call has the turn.
    Call { running: Duration },
    /// Other runs have all permits of the realm, which are so many, or those of the tenant.
    Permits(usize),
    /// Something else, in words.
    Other(String),
}

impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Run { run, running } => {
                write!(f, "the background run {run} has been running in this context for {} s", running.as_secs())
            }
            Self::Call { running } => {
                write!(f, "an earlier call has been running in this context for {} s", running.as_secs())
            }
            Self::Permits(_) => f.write_str("other runs use all that may run at once"),
            Self::Other(why) => f.write_str(why),
        }
    }
}

/// Bounds on what one tenant may have in all realms together. `None` stands for the operator's general limit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Quota {
    pub contexts: Option<usize>,
    /// Maximum number of runs that execute at the same time.
    pub runs: Option<usize>,
    /// Memory of all sandboxes of the tenant together, enforced by a cgroup around them.
    pub memory_bytes: Option<u64>,
    /// Policy that narrows the network of the realms.
    pub network: Option<egress::Policy>,
}
