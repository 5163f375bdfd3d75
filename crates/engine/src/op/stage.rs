//! The stages of a call, for a caller that records how long each of them took.

use std::fmt;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

/// A part of the work for a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// The call waits for its turn or for a permit.
    Queue,
    /// The call gets a sandbox, a ready one or a new one.
    Create,
    /// Code or a command runs.
    Run,
    /// The browser performs an action.
    Browser,
    /// A program in the sandbox has a connection to the outside.
    Egress,
}

impl Stage {
    pub fn name(self) -> &'static str {
        match self {
            Self::Queue => "queue",
            Self::Create => "create",
            Self::Run => "run",
            Self::Browser => "browser",
            Self::Egress => "egress",
        }
    }
}

/// One stage from its beginning to its end.
#[derive(Debug, Clone)]
pub struct PassedStage {
    pub stage: Stage,
    /// Number that the recorder gave to the stage.
    pub id: u64,
    /// Number of the stage in which this one took place; `None` if it took place directly in the call.
    pub within: Option<u64>,
    pub began: SystemTime,
    pub ended: SystemTime,
    /// Host and port of the other side of a connection.
    pub target: Option<(String, u16)>,
}

/// Records the stages of one call. It must not block.
pub trait RecordStages: fmt::Debug + Send + Sync {
    /// Returns a number for a stage that begins.
    fn next_id(&self) -> u64;

    /// Returns an environment variable that tells programs of this stage to what they belong.
    fn variable(&self, id: u64) -> (&'static str, String);

    fn passed(&self, stage: PassedStage);
}

/// The recorder of a call's stages, if there is one.
#[derive(Debug, Clone, Default)]
pub struct Stages(pub Option<Arc<dyn RecordStages>>);

impl Stages {
    /// Begins a stage, which ends when the returned value is dropped.
    pub(crate) fn begin(&self, stage: Stage) -> StageInProgress {
        StageInProgress(self.0.as_ref().map(|recorder| {
            let began = SystemTime::now();
            let id = recorder.next_id();
            (recorder.clone(), PassedStage { stage, id, within: None, began, ended: began, target: None })
        }))
    }
}

/// The id of the context or conversation that a call concerns. The engine sets it as soon as it knows it, so that it is
/// also known of a call that fails.
#[derive(Debug, Clone, Default)]
pub struct FoundContext(Arc<OnceLock<String>>);

impl FoundContext {
    /// Sets the id. Only the first one counts.
    pub(crate) fn set(&self, id: &str) {
        let _ = self.0.get_or_init(|| id.to_owned());
    }

    pub fn get(&self) -> Option<&str> {
        self.0.get().map(String::as_str)
    }
}

/// A stage that has not ended.
#[must_use = "a stage ends when this value is dropped"]
pub(crate) struct StageInProgress(Option<(Arc<dyn RecordStages>, PassedStage)>);

impl StageInProgress {
    /// Returns the variable for programs of this stage.
    pub(crate) fn variable(&self) -> Option<(&'static str, String)> {
        self.0.as_ref().map(|(recorder, stage)| recorder.variable(stage.id))
    }

    /// Returns a function that records connections as parts of this stage, at most `most` of them.
    pub(crate) fn connections(&self, most: usize) -> Option<egress::ConnectionSink> {
        let (recorder, within) = self.0.as_ref().map(|(recorder, stage)| (recorder.clone(), Some(stage.id)))?;
        let left = AtomicUsize::new(most);
        let take = move || left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_ok();
        Some(Arc::new(move |passed: egress::PassedConnection| {
            if take() {
                let egress::PassedConnection { began, ended, target } = passed;
                let (stage, id) = (Stage::Egress, recorder.next_id());
                recorder.passed(PassedStage { stage, id, within, began, ended, target });
            }
        }))
    }
}

impl Drop for StageInProgress {
    fn drop(&mut self) {
        if let Some((recorder, stage)) = self.0.take() {
            recorder.passed(PassedStage { ended: SystemTime::now(), ..stage });
        }
    }
}
