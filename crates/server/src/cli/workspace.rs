//! `sandpool workspace` lists, shows and removes the workspaces of named contexts that outlive their servers.

use std::process::ExitCode;

use engine::Tenant;
use sandbox::{StoredWorkspace, WorkspaceOwner};
use telemetry::logging::escaped;

use super::{CommandEnv, CommandResult, Failed, output};

/// List, show or remove the workspaces that `persist` keeps
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: WorkspaceCommand,
}

#[derive(Debug, clap::Subcommand)]
enum WorkspaceCommand {
    List(List),
    /// Print one workspace as JSON
    Show(Selection),
    /// Delete one workspace with its files; this fails while a server has it open
    Remove(Selection),
}

/// Print all workspaces with their owners, sizes and last use
#[derive(Debug, clap::Args)]
struct List {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Names one workspace.
#[derive(Debug, clap::Args)]
struct Selection {
    /// Name of the context that had the workspace
    #[arg(value_name = "NAME")]
    context: String,
    /// Tenant that owns the workspace
    #[arg(long, value_name = "NAME", default_value_t = Tenant::local().0)]
    tenant: String,
}

pub(crate) fn main(args: Args, context: &CommandEnv) -> CommandResult {
    let state_dir = &context.config.state_dir;
    let failed = |error: std::io::Error| Failed(format!("`{}`: {error}", state_dir.display()));
    let all = sandbox::workspaces(state_dir).map_err(failed)?;
    match args.command {
        WorkspaceCommand::List(List { json: true }) => output::line(&serde_json::to_string_pretty(&all)?),
        WorkspaceCommand::List(_) if all.is_empty() => output::line("there is no workspace"),
        WorkspaceCommand::List(_) => output::line(&output::table(&all.iter().map(row).collect::<Vec<_>>())),
        WorkspaceCommand::Show(wanted) => output::line(&serde_json::to_string_pretty(find(&all, &wanted)?)?),
        WorkspaceCommand::Remove(wanted) => {
            let found = find(&all, &wanted)?;
            if !sandbox::remove_workspace(state_dir, &found.name).map_err(failed)? {
                return Err(Failed("a server has it open; stop the context or the server first".into()));
            }
            output::line(&format!("removed {}", escaped(&found.owner.context)));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn find<'a>(all: &'a [StoredWorkspace], wanted: &Selection) -> Result<&'a StoredWorkspace, Failed> {
    let is_it = |owner: &WorkspaceOwner| (&owner.tenant, &owner.context) == (&wanted.tenant, &wanted.context);
    all.iter().find(|stored| is_it(&stored.owner)).ok_or_else(|| {
        Failed(format!(
            "tenant `{}` has no workspace of a context `{}`; `sandpool workspace list` shows all",
            wanted.tenant, wanted.context
        ))
    })
}

fn row(stored: &StoredWorkspace) -> Vec<String> {
    let StoredWorkspace { owner, quota_bytes, used_bytes, last_used, in_use, .. } = stored;
    vec![
        escaped(&owner.context),
        format!("of {}", escaped(&owner.tenant)),
        format!("{} of {} MB", used_bytes >> 20, quota_bytes >> 20),
        format!("last used {}", text::iso8601(i64::try_from(*last_used).unwrap_or(0))),
        if *in_use { "open".into() } else { String::new() },
    ]
}
