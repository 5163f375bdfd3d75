//! `sandpool admin` sends the operator's commands to the server that uses the state directory.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use ring::rand::{SecureRandom, SystemRandom};
use serde_json::Value;
use text::hex;

use super::{CommandEnv, CommandResult, Failed, output};
use crate::admin::tenants_file::{self, Change};
use crate::admin::{AdminCommand, AdminError, call};
use crate::digest::sha256;
use telemetry::journal;
use telemetry::usage::{self, DailyUsage, UsageFilter};

/// Show and manage a running server: contexts, tenants and tokens, usage, drain, reload
///
/// The commands go to the `sandpool serve` that uses the same state directory (`--state-dir`). Only root and the user of that server may
/// use them.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: AdminOrder,
}

#[derive(Debug, clap::Subcommand)]
enum AdminOrder {
    /// List the contexts of all tenants, and the conversations in which code runs
    Ps(Select),
    /// Describe one context, or a conversation in which code runs: its state, limits, memory, processes, network and mounts
    Inspect {
        /// Id of the context
        id: String,
        #[command(flatten)]
        select: Select,
    },
    /// Stop a context and everything that runs in it, or the code that runs in a conversation
    Stop {
        /// Id of the context
        id: String,
        /// Tenant of the context, if several tenants have one with this id
        #[arg(long, value_name = "NAME")]
        tenant: Option<String>,
        /// Dialect of the context, if several dialects have one with this id
        #[arg(long = "of-dialect", id = "of-dialect", value_name = "NAME")]
        dialect: Option<String>,
    },
    Drain(Drain),
    /// Load tenants, tokens, quotas, network policies and certificates again, and print what changed
    ///
    /// SIGHUP does the same. If anything in the new configuration is not valid, nothing changes.
    Reload,
    /// Add, remove and list tenants, and replace their tokens
    ///
    /// Without a running server, `add`, `rotate` and `remove` change the file that `auth.tenants` names, and `add` creates it. `list` needs a
    /// running server.
    Tenant {
        #[command(subcommand)]
        command: TenantCommand,
    },
    Usage(UsageArgs),
}

#[derive(Debug, clap::Args)]
struct Select {
    /// Only contexts of this tenant
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// Only contexts of this dialect
    #[arg(long = "of-dialect", id = "of-dialect", value_name = "NAME")]
    dialect: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Refuse new work, and wait until the work in progress has ended
///
/// The server refuses calls that begin something, and `/readyz` answers 503. Calls that only read, wait for or end something still work,
/// and contexts stay. The server stays drained until `--undo` or a restart, also if you interrupt this command.
#[derive(Debug, clap::Args)]
struct Drain {
    /// End the server when the work in progress has ended
    #[arg(long, conflicts_with = "undo")]
    exit: bool,
    /// Accept work again
    #[arg(long)]
    undo: bool,
}

#[derive(Debug, clap::Subcommand)]
enum TenantCommand {
    /// Add a tenant and print its token
    Add {
        /// Name of the tenant: 1 to 64 of the characters `a-z`, `0-9`, `-`, `_`, `.`
        name: String,
    },
    /// Give a tenant a new token and print it; the old one stops working at once
    Rotate {
        /// Name of the tenant
        name: String,
        /// Keep the old token valid as well, until `--drop-old` or the next `rotate`
        #[arg(long)]
        keep_old: bool,
        /// End the tokens that `--keep-old` kept, and make no new one
        #[arg(long, conflicts_with = "keep_old")]
        drop_old: bool,
    },
    /// Remove a tenant: its tokens stop working at once, and its contexts end
    Remove {
        /// Name of the tenant
        name: String,
    },
    /// List the tenants that the server knows by name
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// Show what each tenant used on each day (UTC): calls, processor time, memory, bytes
///
/// The figures come from the journal, so they go back for `journal.days`, and the command also works without a running server. A figure
/// that this machine cannot measure is left out.
#[derive(Debug, clap::Args)]
struct UsageArgs {
    /// First day, such as 2026-11-01
    #[arg(long, value_name = "DAY", value_parser = day)]
    since: Option<String>,
    /// Last day, which is included
    #[arg(long, value_name = "DAY", value_parser = day)]
    until: Option<String>,
    /// Only this tenant
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// Format of the output
    #[arg(long, value_enum, default_value_t = UsageFormat::Table)]
    format: UsageFormat,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum UsageFormat {
    Table,
    Csv,
    Json,
}

fn day(text: &str) -> Result<String, &'static str> {
    let is_day = text.len() == 10
        && text.bytes().enumerate().all(|(at, b)| if at == 4 || at == 7 { b == b'-' } else { b.is_ascii_digit() });
    if is_day { Ok(text.into()) } else { Err("a day is written as 2026-11-01") }
}

pub(crate) fn main(args: Args, context: &CommandEnv) -> CommandResult {
    let state_dir = context.config.state_dir.as_path();
    let order = |command| call(state_dir, command, output::error).map_err(Failed::from);
    match args.command {
        AdminOrder::Ps(Select { tenant, dialect, json }) => {
            let contexts = order(AdminCommand::Contexts { id: None, tenant, dialect })?;
            output::line(&if json { serde_json::to_string_pretty(&contexts)? } else { table_of(&contexts) });
        }
        AdminOrder::Inspect { id, select } => inspect(order, id, select)?,
        AdminOrder::Stop { id, tenant, dialect } => {
            let stopped = order(AdminCommand::Stop { id, tenant, dialect })?;
            output::line(&format!("stopped {} of {}", field(&stopped, "id"), field(&stopped, "tenant")));
        }
        AdminOrder::Drain(Drain { undo: true, .. }) => {
            order(AdminCommand::Undrain)?;
            output::line("the server accepts work again");
        }
        AdminOrder::Drain(Drain { exit, .. }) => {
            order(AdminCommand::Drain { exit })?;
            output::line(if exit { "drained; the server ends" } else { "drained; `drain --undo` accepts work again" });
        }
        AdminOrder::Reload => output::line(order(AdminCommand::Reload)?.as_str().unwrap_or_default()),
        AdminOrder::Tenant { command } => tenant(context, command)?,
        AdminOrder::Usage(args) => show_usage(state_dir, args)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn inspect(order: impl Fn(AdminCommand) -> Result<Value, Failed>, id: String, select: Select) -> Result<(), Failed> {
    let missing = Failed(format!("there is no context `{id}`"));
    let found = order(AdminCommand::Contexts { id: Some(id), tenant: select.tenant, dialect: select.dialect })?;
    let contexts = found.as_array().filter(|contexts| !contexts.is_empty()).ok_or(missing)?;
    if select.json {
        output::line(&serde_json::to_string_pretty(contexts)?);
        return Ok(());
    }
    for context in contexts {
        let members = context.as_object().into_iter().flatten();
        let rows: Vec<Vec<String>> = members.map(|(name, _)| vec![name.clone(), field(context, name)]).collect();
        output::line(&output::table(&rows));
    }
    Ok(())
}

/// Returns a member as text; `-` if it is absent.
fn field(value: &Value, name: &str) -> String {
    match &value[name] {
        Value::Null => "-".into(),
        Value::String(text) => telemetry::logging::escaped(text),
        other => other.to_string(),
    }
}

fn table_of(contexts: &Value) -> String {
    let header = ["ID", "NAME", "TENANT", "DIALECT", "STATE", "MEMORY", "CPU", "AGE", "EXPIRES"].map(str::to_owned);
    let row = |context: &Value| {
        let seconds = |name: &str| context[name].as_u64().map_or_else(|| "-".into(), duration);
        let memory = context["memory_bytes"].as_u64().map_or_else(|| "-".into(), |bytes| format!("{} MB", bytes >> 20));
        let cpu = context["cpu_seconds"].as_f64().map_or_else(|| "-".into(), |cpu| format!("{cpu:.1} s"));
        let [id, name, tenant, dialect, state] =
            ["id", "name", "tenant", "dialect", "state"].map(|name| field(context, name));
        vec![id, name, tenant, dialect, state, memory, cpu, seconds("age_seconds"), seconds("expires_in_seconds")]
    };
    let rows = contexts.as_array().into_iter().flatten().map(row);
    output::table(&std::iter::once(header.to_vec()).chain(rows).collect::<Vec<_>>())
}

fn duration(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min", seconds / 60),
        3600..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}

fn tenant(context: &CommandEnv, command: TenantCommand) -> Result<(), Failed> {
    let order = |command| call(&context.config.state_dir, command, |_| ());
    if let TenantCommand::List { json } = command {
        let known = order(AdminCommand::Tenants)?;
        output::line(&if json { serde_json::to_string_pretty(&known["tenants"])? } else { tenants_table(&known) });
        return Ok(());
    }
    let (path, is_running) = match (order(AdminCommand::Tenants), &context.config.auth.tenants) {
        (Err(AdminError::NoServer(_)), Some(path)) => (Some(path.clone()), false),
        (known, _) => (known?["file"].as_str().map(PathBuf::from), true),
    };
    let none = "the server has no tenants file; start it with `--tenants FILE`";
    let path = path.ok_or_else(|| Failed(none.into()))?;
    let token = new_token()?;
    let digest = hex(&sha256(&token));
    let (change, has_token, done) = match &command {
        TenantCommand::Add { name } => (Change::Add { name, digest: &digest }, true, format!("`{name}` was added")),
        TenantCommand::Rotate { name, drop_old: true, .. } => {
            (Change::DropOld { name }, false, format!("the old tokens of `{name}` were removed"))
        }
        TenantCommand::Rotate { name, keep_old: keep, .. } => {
            (Change::Rotate { name, digest: &digest, keep: *keep }, true, format!("`{name}` has another token"))
        }
        TenantCommand::Remove { name } => (Change::Remove { name }, false, format!("`{name}` was removed")),
        TenantCommand::List { .. } => return Ok(()),
    };
    tenants_file::edit(&path, change)?;
    output::error(&format!("{done} in `{}`", path.display()));
    if has_token {
        output::error("the token, which is stored nowhere:");
        output::line(&token);
    }
    if !is_running {
        return Ok(());
    }
    let reloaded = order(AdminCommand::Reload);
    reloaded.map(drop).map_err(|why| Failed(format!("the file is changed, but the server did not load it: {why}")))
}

fn tenants_table(known: &Value) -> String {
    let header = ["TENANT", "TOKENS", "CONTEXTS", "QUOTAS", "NETWORK"].map(str::to_owned);
    let row = |tenant: &Value| {
        let quotas = tenant["quotas"].as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
        let quotas: Vec<String> = quotas.map(|(name, value)| format!("{name}={value}")).collect();
        let network: Vec<&str> = tenant["network"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let [name, tokens, contexts] = ["name", "tokens", "contexts"].map(|name| field(tenant, name));
        let or_none = |text: String| if text.is_empty() { "-".into() } else { text };
        vec![name, tokens, contexts, or_none(quotas.join(" ")), or_none(network.join(" "))]
    };
    let rows = known["tenants"].as_array().into_iter().flatten().map(row);
    output::table(&std::iter::once(header.to_vec()).chain(rows).collect::<Vec<_>>())
}

fn new_token() -> Result<String, Failed> {
    let mut bytes = [0; 32];
    SystemRandom::new().fill(&mut bytes).map_err(|_| Failed("this machine gives no random numbers".into()))?;
    Ok(hex(&bytes))
}

fn show_usage(state_dir: &Path, args: UsageArgs) -> Result<(), Failed> {
    // A running server first writes the usage that is not in the journal yet. Without one the journal is complete.
    match call(state_dir, AdminCommand::WriteUsage, |_| ()) {
        Ok(_) | Err(AdminError::NoServer(_)) => {}
        Err(error) => return Err(error.into()),
    }
    let dir = state_dir.join("journal");
    let unreadable = |error| Failed(format!("cannot read the journal in `{}`: {error}", dir.display()));
    let UsageArgs { since, until, tenant, format } = args;
    let lines = journal::lines(&dir).map_err(unreadable)?;
    let days = usage::by_day(lines, &UsageFilter { tenant, since, until }).map_err(unreadable)?;
    match format {
        UsageFormat::Json => output::line(&serde_json::to_string_pretty(&days)?),
        UsageFormat::Csv => rows_of(&days, "").iter().for_each(|row| output::line(&row.join(","))),
        UsageFormat::Table => output::line(&output::table(&rows_of(&days, "-"))),
    }
    Ok(())
}

/// Returns a header and one row for each day and tenant. Tenant names contain no character that CSV has to quote.
fn rows_of(days: &[DailyUsage], absent: &str) -> Vec<Vec<String>> {
    const COLUMNS: [&str; 8] =
        ["day", "tenant", "calls", "cpu_seconds", "memory_gb_hours", "bytes_in", "bytes_out", "network_bytes"];
    let number = |figure: Option<f64>| figure.map_or_else(|| absent.into(), |figure| format!("{figure:.3}"));
    let row = |of: &DailyUsage| {
        let network = of.network_bytes.map_or_else(|| absent.into(), |bytes| bytes.to_string());
        let (cpu, memory) = (number(of.cpu_seconds), number(of.memory_gb_hours));
        let (calls, bytes_in, bytes_out) = (of.calls.to_string(), of.bytes_in.to_string(), of.bytes_out.to_string());
        vec![of.day.clone(), of.tenant.clone(), calls, cpu, memory, bytes_in, bytes_out, network]
    };
    std::iter::once(COLUMNS.map(str::to_owned).to_vec()).chain(days.iter().map(row)).collect()
}
