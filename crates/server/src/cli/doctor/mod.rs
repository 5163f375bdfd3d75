//! `sandpool doctor` reports what this machine can do: the state of every isolation layer, runtime and limit, the
//! reason, and what to do about it; and what sandboxes may reach.

mod network;
mod runtimes;

use std::collections::BTreeMap;
use std::process::ExitCode;

use self::runtimes::{Found, Trial};
use engine::op::SharedVolume;
use sandbox::native::{DiskRoom, Fact, FactState, Mode, spawn_launcher};
use sandbox::{Isolation, Level};
use serde::Serialize;

use super::{CommandEnv, CommandResult, Failed, block_on, output, wiring};
use crate::config::{Config, DialectLimits, MountConfig};

/// Report each layer of isolation, runtime and limit of this machine: on or off, why, and what to do
///
/// The exit code is 0 if sandboxes can be created here.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct DoctorReport {
    version: &'static str,
    can_run: bool,
    /// Reason why sandboxes cannot run here.
    refusal: Option<String>,
    level: Option<Level>,
    floor: Level,
    mode: Mode,
    layers: Vec<Fact>,
    runtimes: Vec<Fact>,
    /// Packages that are installed for Python, with their versions.
    packages: BTreeMap<String, String>,
    network: Vec<Fact>,
    disk: Vec<Fact>,
    limits: Vec<Limit>,
}

#[derive(Debug, Serialize)]
struct Limit {
    name: String,
    value: String,
    held: bool,
    by: String,
}

/// Packages that are worth mentioning; the others are dependencies.
const NAMED: &[&str] =
    &["ipython", "numpy", "pandas", "matplotlib", "scipy", "pillow", "requests", "openpyxl", "sympy"];

pub(crate) fn main(args: Args, context: CommandEnv) -> CommandResult {
    let launcher = spawn_launcher().map_err(|error| Failed(format!("cannot start the launcher: {error}")))?;
    let examination = launcher.survey(None, wiring::cgroups(&context.config))?;
    let (isolation, mut refusal) = match examination.outcome {
        Ok(mut isolation) => {
            if has_owners_uid(&context.config, examination.mode) {
                isolation.level = isolation.level.min(Level::Reduced);
            }
            (Some(isolation), None)
        }
        Err(error) => (None, Some(error.to_string())),
    };
    let floor = context.config.floor;
    if let Some(Isolation { level, .. }) = &isolation
        && *level < floor
    {
        refusal = Some(format!("the isolation level is below the configured floor `{}`", word(&floor)));
    }
    // Like every launcher, that of the trial has to start before there are threads.
    let trial = Trial::launch(&context.config);
    let Found { facts, packages, usable } = block_on(async { Ok(runtimes::find(&context, trial).await) })?;
    if !usable && refusal.is_none() {
        refusal = Some("there is no usable Python".into());
    }
    let report = DoctorReport {
        version: env!("CARGO_PKG_VERSION"),
        can_run: refusal.is_none(),
        refusal,
        level: isolation.map(|isolation| isolation.level),
        floor,
        mode: examination.mode,
        limits: limits(&context.config, &examination.facts),
        disk: disk(&context.config, examination.mode),
        layers: examination.facts.into_iter().chain(mounts(&context.config, examination.mode)).collect(),
        runtimes: facts,
        packages,
        network: network::facts(&context),
    };
    output::line(&if args.json { serde_json::to_string_pretty(&report)? } else { page(&report) });
    Ok(if report.can_run { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn fact(layer: &str, state: FactState, why: impl Into<String>, what_to_do: impl Into<String>) -> Fact {
    Fact { layer: layer.into(), state, why: why.into(), what_to_do: what_to_do.into() }
}

/// Returns whether contexts with mounts have the uid of this user on the host in place of a subordinate one.
fn has_owners_uid(config: &Config, mode: Mode) -> bool {
    mode == Mode::Sub && !config.mounts.is_empty()
}

/// Reports which directories of this machine contexts see, and what that means for their isolation.
fn mounts(config: &Config, mode: Mode) -> Option<Fact> {
    let shown = |mount: &MountConfig| {
        let SharedVolume { host, inside, read_only } = &mount.volume;
        format!(
            "`{}` at `{}` {}",
            host.display(),
            inside.display(),
            if *read_only { "ro" } else { "rw, without a quota" }
        )
    };
    let all: Vec<String> = config.mounts.iter().map(shown).collect();
    if all.is_empty() {
        return None;
    }
    Some(match has_owners_uid(config, mode) {
        false => fact("mounts", FactState::On, all.join(", "), ""),
        true => fact(
            "mounts",
            FactState::Off,
            format!("contexts that have {} are your own user on the host, and share it", all.join(", ")),
            "start the server as root, or remove the mounts",
        ),
    })
}

/// Reports how much disk space is free for the volumes of sandboxes, and how much has to stay free.
fn disk(config: &Config, mode: Mode) -> Vec<Fact> {
    const NAME: &str = "room for volumes";
    if mode != Mode::Root {
        return vec![fact(NAME, FactState::On, "volumes are in memory, and count as memory of their sandbox", "")];
    }
    let more = "free space, put `state_dir` on a larger file system, or lower `keep_free_mb`";
    vec![match DiskRoom::of(&config.state_dir, wiring::keep_free(config)) {
        Err(error) => fact(NAME, FactState::Off, format!("`{}`: {error}", config.state_dir.display()), ""),
        Ok(room) => {
            let why = format!("{} MB free, {} MB have to stay free (`keep_free_mb`)", room.free >> 20, room.keep >> 20);
            match room.admits() {
                Ok(()) => fact(NAME, FactState::On, why, ""),
                Err(_) => fact(NAME, FactState::Off, format!("{why}: no new sandbox is created"), more),
            }
        }
    }]
}

/// Returns each limit, and whether something on this machine enforces it.
fn limits(config: &Config, layers: &[Fact]) -> Vec<Limit> {
    let DialectLimits { timeout, memory_mb, cpus, pids, disk_mb, max_contexts, .. } =
        config.dialects.of(&config.dialect);
    let realm = wiring::default_realm(config);
    let whose = if realm.group_memory_bytes.is_some() { "a tenant" } else { "a context" };
    let on = |layer: &str| layers.iter().any(|fact| fact.layer == layer && fact.state == FactState::On);
    let by = |layer: &str| layers.iter().find(|fact| fact.layer == layer).map_or("nothing", |fact| &fact.why);
    // A figure that nothing holds would be taken for a limit.
    let limit = |name: &str, value: String, held: bool, by: &str| Limit {
        name: name.into(),
        value: if held { value } else { "none".into() },
        held,
        by: by.into(),
    };
    vec![
        limit("time of a run", format!("{} s", timeout.as_secs_f64()), true, "guest and server"),
        limit(&format!("memory of {whose}"), format!("{memory_mb} MB"), on("memory"), by("memory")),
        limit(
            &format!("processor of {whose}"),
            format!("{cpus} cores"),
            on("cgroup cpu"),
            if on("cgroup cpu") { "cgroup cpu" } else { "nothing" },
        ),
        limit("processes of a context", pids.to_string(), on("processes"), by("processes")),
        limit("disk of a context", format!("{disk_mb} MB"), true, "a separate file system"),
        limit("runs at once", realm.runs_at_once.to_string(), true, "server"),
        limit("contexts of a tenant", max_contexts.to_string(), true, "server"),
    ]
}

fn page(report: &DoctorReport) -> String {
    let facts = |facts: &[Fact]| {
        let row = |fact: &Fact| {
            let todo = if fact.what_to_do.is_empty() { String::new() } else { format!("→ {}", fact.what_to_do) };
            vec![format!("  {}", word(&fact.state)), fact.layer.clone(), [fact.why.as_str(), &todo].join("  ")]
        };
        output::table(&facts.iter().map(row).collect::<Vec<_>>())
    };
    let limits: Vec<Vec<String>> = report
        .limits
        .iter()
        .map(|limit| {
            let held = if limit.held { "on" } else { "off" };
            let by = if limit.held { format!("by {}", limit.by) } else { String::new() };
            vec![format!("  {held}"), limit.name.clone(), limit.value.clone(), by]
        })
        .collect();
    let named = NAMED.iter().filter_map(|name| Some(format!("{name} {}", report.packages.get(*name)?)));
    let named = named.collect::<Vec<_>>();
    let mut page = format!(
        "sandpool {}, mode `{}`\n\nIsolation\n{}\n\nRuntimes\n{}\n",
        report.version,
        word(&report.mode),
        facts(&report.layers),
        facts(&report.runtimes)
    );
    if !named.is_empty() {
        let more = report.packages.len() - named.len();
        page.push_str(&format!("      packages: {}, and {more} more\n", named.join(", ")));
    }
    page.push_str(&format!(
        "\nNetwork\n{}\n\nDisk\n{}\n\nLimits\n{}\n\n",
        facts(&report.network),
        facts(&report.disk),
        output::table(&limits)
    ));
    page.push_str(&match (&report.refusal, report.level) {
        (Some(why), _) => format!("Cannot run: {why}"),
        (None, Some(level)) => format!("Isolation level: {} (floor: {})", word(&level), word(&report.floor)),
        (None, None) => "Isolation level: unknown".into(),
    });
    page
}

/// Returns the name of an enum value as in JSON.
fn word(value: &impl Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Environment, Sources};

    #[test]
    fn the_limits_are_those_of_the_dialect_in_use() {
        let of = |dialect: &str| {
            let environment = Environment::of(&[("HOME", "/home/u"), ("SANDPOOL_DIALECT", dialect)]);
            let config = Config::load(&Sources { environment, flags: Vec::new(), is_root: false }).unwrap();
            let layers = ["memory", "cgroup cpu", "processes"].map(|layer| fact(layer, FactState::On, "a test", ""));
            let limits = limits(&config, &layers).into_iter();
            limits.map(|limit| format!("{}: {}", limit.name, limit.value)).collect::<Vec<_>>()
        };
        assert_eq!(of("sandpool")[..2], ["time of a run: 60 s", "memory of a context: 2048 MB"]);
        assert_eq!(of("agentrun")[..2], ["time of a run: 30 s", "memory of a tenant: 2048 MB"]);
        assert_eq!(of("conversation")[1..3], ["memory of a context: 256 MB", "processor of a context: 0.5 cores"]);
        assert_eq!([&of("sandpool")[5], &of("agentrun")[5]], ["runs at once: 32", "runs at once: 3"]);
    }

    #[test]
    fn no_figure_is_shown_for_a_limit_that_nothing_holds() {
        let environment = Environment::of(&[("HOME", "/home/u")]);
        let config = Config::load(&Sources { environment, flags: Vec::new(), is_root: false }).unwrap();
        let layers = [("memory", FactState::On), ("cgroup cpu", FactState::Off), ("processes", FactState::Off)];
        let layers = layers.map(|(layer, state)| fact(layer, state, "a watchdog", ""));
        let shown: Vec<_> =
            limits(&config, &layers).into_iter().map(|limit| (limit.name, limit.value, limit.held)).collect();
        for expected in [
            ("memory of a context", "2048 MB", true),
            ("processor of a context", "none", false),
            ("processes of a context", "none", false),
        ] {
            let (name, value, held) = expected;
            assert!(shown.contains(&(name.into(), value.into(), held)), "{expected:?}: {shown:?}");
        }
    }

    #[test]
    fn mounts_are_told_with_what_they_mean_for_the_isolation() {
        let dir = testkit::scratch::Scratch::new();
        let host = dir.0.canonicalize().unwrap();
        let load = |flags: Vec<(&'static str, String)>| {
            let environment = Environment::of(&[("HOME", "/nowhere")]);
            Config::load(&Sources { environment, flags, is_root: false }).unwrap()
        };
        assert!(mounts(&load(vec![]), Mode::Sub).is_none());
        let flag = |text: &str| ("mount", text.replace("DIR", host.to_str().unwrap()));
        let config = load(vec![flag("DIR:/data"), flag("DIR:/workspace:rw")]);
        let shown = format!("`{0}` at `/data` ro, `{0}` at `/workspace` rw, without a quota", host.display());
        for mode in [Mode::Root, Mode::Single] {
            let told = mounts(&config, mode).unwrap();
            assert_eq!((told.state, told.why), (FactState::On, shown.clone()), "{mode:?}");
        }
        let told = mounts(&config, Mode::Sub).unwrap();
        assert_eq!(told.state, FactState::Off);
        assert_eq!(told.why, format!("contexts that have {shown} are your own user on the host, and share it"));
        assert!(has_owners_uid(&config, Mode::Sub) && !has_owners_uid(&config, Mode::Root));
    }

    /// W44 of the hostile list.
    #[test]
    fn w44_the_limit_of_processes_is_told_with_what_holds_it() {
        let environment = Environment::of(&[("HOME", "/home/u")]);
        let config = Config::load(&Sources { environment, flags: Vec::new(), is_root: false }).unwrap();
        let told = |facts: &[Fact]| {
            let limits = limits(&config, facts);
            let limit = limits.into_iter().find(|limit| limit.name == "processes of a context").unwrap();
            (limit.held, limit.by)
        };
        let rlimit = [fact("cgroup pids", FactState::Off, "no", ""), fact("processes", FactState::On, "an rlimit", "")];
        assert_eq!(told(&rlimit), (true, "an rlimit".to_owned()));
        assert_eq!(told(&[fact("processes", FactState::Off, "nothing", "")]), (false, "nothing".to_owned()));
    }
}
