//! `sandpool bench`: measures this program beside floors and alternatives, and prints a table of ratios.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use super::signals::Signals;
use super::{Context, Done, Failed, block_on, output};
use crate::bench::{self, Children, NAMES, Options, Plan, Report};
use crate::runtimes::browser::{self, Browser};
use crate::runtimes::{self, Prepared, Progress};

/// Measure this program on this machine, beside what it could be at best and what else there is
///
/// Starts servers of its own with a temporary state directory, calls them over stdio and HTTP, and prints a table: each figure with its
/// goal, and the ratio to each alternative. `make bench` installs the alternatives first. Takes some minutes, on a machine that should do
/// nothing else.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Few samples: shows that it works, not how fast
    #[arg(long)]
    quick: bool,
    /// Only these figures, by name
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = clap::builder::PossibleValuesParser::new(NAMES))]
    only: Vec<String>,
    /// Interleaved rounds of each figure
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: Option<u32>,
    /// Directory of the alternatives that `scripts/bench` installed; without it only floors stand beside
    #[arg(long, value_name = "DIR")]
    alternatives: Option<PathBuf>,
    /// Directory to write `results.json`, `results.md` and `results.svg` to
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// For everything to end in order after Ctrl-C.
const GRACE: Duration = Duration::from_secs(30);

pub fn main(args: Args, context: Context) -> Done {
    if let Some(dir) = args.alternatives.as_ref().filter(|dir| !dir.is_dir()) {
        return Err(Failed(format!("`--alternatives {}`: no such directory; `make bench` makes one", dir.display())));
    }
    let out = args.out.clone();
    let Some(report) = block_on(measure(args, context))? else {
        output::error("interrupted; nothing is left running");
        return Ok(ExitCode::from(130));
    };
    output::line(&output::table(&report.rows()));
    let notes = report.notes();
    if !notes.is_empty() {
        output::line(&format!("\n{}", notes.join("\n")));
    }
    if let Some(dir) = out {
        write(&report, &dir)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Nothing, if it was interrupted.
async fn measure(args: Args, context: Context) -> Result<Option<Report>, Failed> {
    let signals = Signals::listen()?;
    let (progress, _) = Progress::new();
    let browser = browser::find(&context.config.browser, &context.environment).await.ok().flatten();
    let prepared = tokio::select! {
        prepared = runtimes::prepare(&context.config.runtimes, &context.environment, &progress, false) => prepared?,
        () = signals.first.cancelled() => return Ok(None),
    };
    let children = Children::default();
    let options = options(args, context, (&prepared, browser), children.clone())?;
    let mut working = tokio::task::spawn_blocking(move || bench::run(options));
    tokio::select! {
        report = &mut working => return Ok(Some(report??)),
        () = signals.first.cancelled() => children.stop(),
    }
    // The worker sees its children end, and ends what is left itself.
    let grace = async {
        tokio::select! {
            () = tokio::time::sleep(GRACE) => {}
            () = signals.second.cancelled() => {}
        }
    };
    tokio::select! {
        _ = &mut working => {}
        () = grace => children.kill(),
    }
    Ok(None)
}

fn options(
    args: Args,
    context: Context,
    (prepared, browser): (&Prepared, Option<Browser>),
    children: Children,
) -> Result<Options, Failed> {
    let usual = if args.quick { Plan::QUICK } else { Plan::FULL };
    let rounds = args.rounds.map_or(usual.rounds, |rounds| rounds as usize);
    let mut versions = vec![("Python".to_owned(), prepared.python.marker.version.clone())];
    versions.extend(prepared.node.as_ref().map(|node| ("Node".to_owned(), node.version().to_owned())));
    versions.extend(browser.as_ref().map(|browser| ("Chromium".to_owned(), browser.version.clone())));
    for name in ["ipython", "numpy", "pandas", "matplotlib"] {
        let version = prepared.python.marker.packages.get(name);
        versions.extend(version.map(|version| (name.to_owned(), version.clone())));
    }
    Ok(Options {
        plan: Plan { rounds, ..usual },
        quick: args.quick,
        only: args.only,
        alternatives: args.alternatives.as_deref().map(std::path::absolute).transpose()?,
        executable: std::env::current_exe()?,
        python: prepared.python.dir.join("bin/python"),
        node: prepared.node.as_ref().ok().map(runtimes::Node::binary),
        browser: browser.map(|browser| browser.program),
        versions,
        config: context.config,
        environment: context.environment,
        children,
        say: Box::new(output::error),
    })
}

fn write(report: &Report, dir: &Path) -> Result<(), Failed> {
    std::fs::create_dir_all(dir).map_err(|error| Failed(format!("`{}`: {error}", dir.display())))?;
    let json = serde_json::to_string_pretty(report)? + "\n";
    let files = [("results.json", json), ("results.md", report.markdown()), ("results.svg", bench::svg(report))];
    for (name, content) in files {
        let path = dir.join(name);
        std::fs::write(&path, content).map_err(|error| Failed(format!("`{}`: {error}", path.display())))?;
        output::error(&format!("wrote {}", path.display()));
    }
    Ok(())
}
