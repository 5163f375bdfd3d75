//! The interface of the engine: an [`Op`] goes in, an [`Outcome`] or an [`EngineError`] comes out.
//!
//! This module knows no MCP and no dialect. A dialect lowers its arguments to an [`Op`] and renders an [`Outcome`],
//! both without side effects.

mod call;
mod error;
mod notice;
mod operation;
mod outcome;
mod stage;

// Types of the wire protocol that are part of this interface. A dialect renders them and must not import `proto`
// itself.
pub use proto::browser;
pub use proto::{Ended, FileEntry, FileKind, FoundLine, FoundLines, Language, MimeBundle, Root, SearchBound, Stream};
pub use sandbox::SharedVolume;

pub use call::{Call, Event, EventSink, Quota, Realm, Tenant, Waiting};
pub use error::{EngineError, LimitKind};
pub use notice::{Notice, NoticeKind, StartupStep};
pub use operation::{
    Browse, Command, ContextSelector, Edit, Environment, FileOwner, Network, NewContext, Op, RunCode, RunCommand,
    RunOnce, Search, Size, Target,
};
pub use outcome::{
    Browsed, Captured, CellError, ContextInfo, Edited, FileListing, Health, KeptOutput, Outcome, Ran, RecentFile,
    RunInfo, RunOutcome, RunProgress, RuntimeInfo, StoppedContext, UploadLink,
};
pub(crate) use stage::StageInProgress;
pub use stage::{FoundContext, PassedStage, RecordStages, Stage, Stages};
