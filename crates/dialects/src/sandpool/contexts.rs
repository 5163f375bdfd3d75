//! The tools that create, list and remove contexts.

use engine::op::{ContextInfo, ContextSelector, Language, NewContext, SharedVolume, Size};
use serde_json::Value;

use super::DEFAULT_CONTEXT;
use super::answer::answer;
use crate::args::{Argument, ChosenId, args};
use crate::operation;
use crate::output::{output, unless_empty};
use crate::shared::moment;
use crate::{ArgError, Lowering, Options};

args! {
    struct CreateContextArgs { name: Option<ContextName>, language: Option<Language>, size: Option<Size> }
    struct ListContextsArgs {}
    struct StopContextArgs { context: String }
}

struct ContextName(String);

impl Argument for ContextName {
    fn parse(field: &str, value: &Value) -> Result<Self, ArgError> {
        let ChosenId(name) = ChosenId::parse(field, value)?;
        if name == DEFAULT_CONTEXT {
            let why = "cannot be `default`: that context makes itself when a call leaves `context` out";
            return Err(ArgError::new(format!("{field} {why}")));
        }
        Ok(Self(name))
    }
}

output! {
    struct ContextRow {
        context: String,
        name: Option<String>,
        /// Language of code that names none, if it is not Python.
        language: Option<&'static str>,
        /// `busy` while something runs in it.
        status: Option<&'static str>,
        memory_mb: u64,
        /// Left out if nothing on this host limits the processors.
        cpus: Option<f64>,
        created_at: String,
        last_used: String,
        /// Directories of the host, each with `ro` or `rw`.
        mounts: Option<Vec<String>>,
        note: Option<String>,
    }

    struct Contexts { contexts: Vec<ContextRow>, total: usize, note: Option<String> }
    struct Stopped {
        context: String,
        status: &'static str,
        /// Background runs that this call ended.
        ended_runs: Option<Vec<String>>,
        note: Option<String>,
    }
}

impl From<ContextInfo> for ContextRow {
    fn from(context: ContextInfo) -> Self {
        Self {
            // A context without a name is named by its id.
            name: Some(context.name).filter(|name| !name.is_empty() && *name != context.id),
            context: context.id,
            language: Some(context.language).filter(|language| *language != Language::Python).map(Language::name),
            status: context.busy.then_some("busy"),
            memory_mb: context.limits.memory_bytes >> 20,
            cpus: (!context.isolation.unheld.cpu).then_some(f64::from(context.limits.cpu_millis) / 1000.0),
            created_at: moment(context.created_at),
            last_used: moment(context.last_used),
            note: without_quota(&context.mounts),
            mounts: unless_empty(context.mounts.iter().map(mount_row).collect()),
        }
    }
}

fn mount_row(mount: &SharedVolume) -> String {
    format!("{} {}", mount.inside.display(), if mount.read_only { "ro" } else { "rw" })
}

/// Says where the disk quota of a context does not hold.
fn without_quota(mounts: &[SharedVolume]) -> Option<String> {
    let writable = mounts.iter().filter(|mount| !mount.read_only);
    let paths: Vec<String> = writable.map(|mount| mount.inside.display().to_string()).collect();
    (!paths.is_empty()).then(|| format!("No disk quota holds in {}: files there are the host's.", paths.join(", ")))
}

pub(super) fn create_context(args: CreateContextArgs, _: &Options) -> Lowering {
    let name = args.name.map(|name| name.0).unwrap_or_default();
    let language = args.language.unwrap_or(Language::Python);
    operation::create_context(NewContext { size: args.size, ..NewContext::named(name, language) })
        .answer(|input, (context, _)| answer(input, context.into(), |row: &mut ContextRow| &mut row.note, ""))
}

pub(super) fn list_contexts(_: ListContextsArgs, _: &Options) -> Lowering {
    operation::list_contexts().answer(|input, contexts| {
        let total = contexts.len();
        let rows = Contexts { contexts: contexts.into_iter().map(ContextRow::from).collect(), total, note: None };
        answer(input, rows, |rows| &mut rows.note, "Remove contexts that are not needed with stop_context.")
    })
}

pub(super) fn stop_context(args: StopContextArgs, _: &Options) -> Lowering {
    operation::stop_context(ContextSelector::Named(args.context)).answer(|input, stopped| {
        let note = match stopped.ended_calls {
            0 => None,
            1 => Some("A call that was running in it was ended.".to_owned()),
            calls => Some(format!("{calls} calls that were running in it were ended.")),
        };
        let ended_runs = unless_empty(stopped.ended_runs);
        let object = Stopped { context: stopped.context_id, status: "stopped", ended_runs, note };
        answer(input, object, |object| &mut object.note, "")
    })
}
