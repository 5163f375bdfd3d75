//! Ties each operation of the engine to the type of its outcome, so that a tool cannot render another outcome.

use std::time::Duration;

use engine::op::{
    Browse, Browsed, ContextInfo, ContextSelector, Edit, Edited, FileListing, FileOwner, FoundLines, NewContext, Op,
    Outcome, Ran, RunCode, RunCommand, RunInfo, RunOnce, RunProgress, RuntimeInfo, Search, SharedVolume,
    StoppedContext, Target, UploadLink,
};

use crate::{Answer, ArgError, RenderInput};

/// Describes a call whose arguments were read: the operation, and how to render its outcome.
pub struct Lowered {
    pub op: Op,
    pub render: Renderer,
}

/// Renders the outcome of one call. It returns `None` for an outcome that does not belong to the operation.
pub(crate) type Renderer = Box<dyn FnOnce(&RenderInput<'_>, Outcome) -> Option<Answer> + Send>;

/// Ties an operation to the `T` that its outcome holds.
pub(crate) struct Operation<T> {
    op: Op,
    outcome: fn(Outcome) -> Option<T>,
}

impl<T: 'static> Operation<T> {
    pub fn answer(
        self,
        render: impl FnOnce(&RenderInput<'_>, T) -> Answer + Send + 'static,
    ) -> Result<Lowered, ArgError> {
        let render: Renderer = Box::new(move |input, outcome| Some(render(input, (self.outcome)(outcome)?)));
        Ok(Lowered { op: self.op, render })
    }
}

/// The outcome of a run that has ended, or that continues in the background.
pub(crate) enum RunReply {
    Ended(Box<Ran>),
    Started(Box<RunInfo>),
}

pub(crate) struct FileWritten {
    pub path: String,
    pub size: u64,
    pub key: String,
}

pub(crate) struct FileRead {
    pub path: String,
    pub content: Vec<u8>,
    /// Size of the whole file. `content` is empty if the file is too large for an answer.
    pub size: u64,
    pub key: String,
}

macro_rules! operations {
    ($($name:ident($($arg:ident: $arg_type:ty),*) = $op:expr, $type:ty { $($outcome:pat => $value:expr),+ $(,)? })*) => {$(
        pub(crate) fn $name($($arg: $arg_type),*) -> Operation<$type> {
            let outcome = |outcome| match outcome {
                $($outcome => Some($value),)+
                _ => None,
            };
            Operation { op: $op, outcome }
        }
    )*};
}

operations! {
    run_code(run: RunCode) = Op::RunCode(run), Ran { Outcome::Ran(ran) => *ran }
    run_command(run: RunCommand) = Op::RunCommand(run), Ran { Outcome::Ran(ran) => *ran }
    run_once(run: RunOnce) = Op::RunOnce(run), Ran { Outcome::Ran(ran) => *ran }
    start_code(run: RunCode) = Op::RunCode(run), RunReply {
        Outcome::Ran(ran) => RunReply::Ended(ran),
        Outcome::Started(started) => RunReply::Started(Box::new(started)),
    }
    start_command(run: RunCommand) = Op::RunCommand(run), RunReply {
        Outcome::Ran(ran) => RunReply::Ended(ran),
        Outcome::Started(started) => RunReply::Started(Box::new(started)),
    }
    wait_run(run: String, cursor: Option<u64>, wait: Duration) = Op::WaitRun { run, cursor, wait }, RunProgress {
        Outcome::Progress(progress) => progress,
    }
    cancel_run(run: String) = Op::CancelRun { run }, (String, bool) {
        Outcome::Cancelled { run, was_running } => (run, was_running),
    }
    create_context(new: NewContext) = Op::CreateContext(new), (ContextInfo, Option<String>) {
        Outcome::Created(context) => (context, None),
        Outcome::Replaced { context, old } => (context, Some(old)),
    }
    list_contexts() = Op::ListContexts, Vec<ContextInfo> { Outcome::Contexts(contexts) => contexts }
    stop_context(which: ContextSelector) = Op::StopContext { which }, StoppedContext {
        Outcome::Stopped(stopped) => stopped,
    }
    browse(browse: Browse) = Op::Browse(browse), Browsed { Outcome::Browsed(browsed) => *browsed }
    write_file(owner: FileOwner, path: String, content: Vec<u8>) = Op::WriteFile { owner, path, content }, FileWritten {
        Outcome::Written { path, size, key } => FileWritten { path, size, key },
    }
    read_file(owner: FileOwner, path: String) = Op::ReadFile { owner, path }, FileRead {
        Outcome::File { path, content, size, key } => FileRead { path, content, size, key },
    }
    list_files(owner: FileOwner, path: String) = Op::ListFiles { owner, path, depth: None }, FileListing {
        Outcome::Files(files) => files,
    }
    list_levels(owner: FileOwner, path: String, depth: u32) = Op::ListFiles { owner, path, depth: Some(depth) }, FileListing {
        Outcome::Files(files) => files,
    }
    read_link(key: String, path: String, max_bytes: u64) = Op::ReadLink { key, path, max_bytes }, FileRead {
        Outcome::File { path, content, size, key } => FileRead { path, content, size, key },
    }
    edit_file(owner: FileOwner, path: String, edit: Edit) = Op::EditFile { owner, path, edit }, Edited {
        Outcome::Edited(edited) => edited,
    }
    search_files(owner: FileOwner, path: String, search: Search) = Op::SearchFiles { owner, path, search }, FoundLines {
        Outcome::Found(found) => found,
    }
    upload_link(target: Target, path: String) = Op::UploadLink { target, path }, UploadLink {
        Outcome::UploadLink(link) => link,
    }
    list_volumes() = Op::ListVolumes, Vec<SharedVolume> { Outcome::Volumes(volumes) => volumes }
    list_runtimes() = Op::ListRuntimes, Vec<RuntimeInfo> { Outcome::Runtimes(runtimes) => runtimes }
}
