//! `sandpool-bench` measures a `sandpool` binary beside floors and alternatives, or beside another build of it.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use bench::{BenchError, BenchReport, Children, Comparison, NAMES, Options, Plan};
use clap::Parser;
use tokio::signal::unix::{SignalKind, signal};

/// Measure a `sandpool` binary on this machine, and compare it with floors and alternatives
///
/// Starts servers with a temporary state directory, calls them over stdio and HTTP, and prints a table: each figure with its goal, and
/// the ratio to each alternative. `make bench` builds the binary and installs the alternatives first. It takes some minutes, on a machine
/// that should do nothing else.
#[derive(Debug, Parser)]
#[command(name = "sandpool-bench", version, max_term_width = 110)]
struct Cli {
    /// The binary to measure
    #[arg(long, value_name = "BINARY")]
    sandpool: PathBuf,
    /// An older binary: measure both by turns and print the ratios of new to old, without alternatives
    #[arg(long, value_name = "BINARY", conflicts_with_all = ["alternatives", "out"])]
    against: Option<PathBuf>,
    /// Few samples: shows that it works, not how fast
    #[arg(long)]
    quick: bool,
    /// Only these figures, by name
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = clap::builder::PossibleValuesParser::new(NAMES))]
    only: Vec<String>,
    /// Interleaved rounds of each figure
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: Option<u32>,
    /// Directory of the alternatives that `scripts/bench` installed; without it, only floors are measured
    #[arg(long, value_name = "DIR")]
    alternatives: Option<PathBuf>,
    /// Directory to write `results.json`, `results.md` and `results.svg` to
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// Maximum time for the processes of the benchmark to end after Ctrl-C.
const GRACE: Duration = Duration::from_secs(30);

enum Measured {
    Report(BenchReport),
    Comparison(Comparison),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let done = done.map_err(|error| error.to_string()).and_then(|runtime| runtime.block_on(measure(&cli)));
    match done.and_then(|measured| show(measured, cli.out.as_deref())) {
        Ok(code) => code,
        Err(why) => {
            say(&format!("error: {why}"));
            ExitCode::FAILURE
        }
    }
}

fn show(measured: Option<Measured>, out: Option<&Path>) -> Result<ExitCode, String> {
    match measured {
        None => {
            say("interrupted; nothing is left running");
            return Ok(ExitCode::from(130));
        }
        Some(Measured::Comparison(comparison)) => print(&comparison.to_string()),
        Some(Measured::Report(report)) => {
            print(&report.to_string());
            if let Some(dir) = out {
                write(&report, dir)?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs the measurement. Returns `None` if the user interrupts it.
async fn measure(cli: &Cli) -> Result<Option<Measured>, String> {
    let listen = |kind| signal(kind).map_err(|error| error.to_string());
    let (mut interrupt, mut terminate) = (listen(SignalKind::interrupt())?, listen(SignalKind::terminate())?);
    let children = Children::default();
    let usual = if cli.quick { Plan::QUICK } else { Plan::FULL };
    let rounds = cli.rounds.map_or(usual.rounds, |rounds| rounds as usize);
    let alternatives = match &cli.alternatives {
        Some(dir) if !dir.is_dir() => {
            return Err(format!("`--alternatives {}`: no such directory; `make bench` makes one", dir.display()));
        }
        Some(dir) => Some(std::path::absolute(dir).map_err(|error| error.to_string())?),
        None => None,
    };
    let options = Options {
        plan: Plan { rounds, ..usual },
        quick: cli.quick,
        only: cli.only.clone(),
        alternatives,
        executable: cli.sandpool.clone(),
        children: children.clone(),
        say,
    };
    let against = cli.against.clone();
    let mut working = tokio::task::spawn_blocking(move || match against {
        Some(old) => bench::compare(options, &old).map(Measured::Comparison),
        None => bench::run(options).map(Measured::Report),
    });
    tokio::select! {
        measured = &mut working => return finished(measured.map_err(|error| error.to_string())?),
        _ = interrupt.recv() => children.stop(),
        _ = terminate.recv() => children.stop(),
    }
    // The worker notices that its children end, and ends the remaining ones itself.
    tokio::select! {
        _ = &mut working => {}
        () = tokio::time::sleep(GRACE) => children.kill(),
        _ = interrupt.recv() => children.kill(),
    }
    Ok(None)
}

fn finished(measured: Result<Measured, BenchError>) -> Result<Option<Measured>, String> {
    measured.map(Some).map_err(|error| error.to_string())
}

fn write(report: &BenchReport, dir: &Path) -> Result<(), String> {
    let failed = |path: &Path, error: std::io::Error| format!("`{}`: {error}", path.display());
    std::fs::create_dir_all(dir).map_err(|error| failed(dir, error))?;
    let json = serde_json::to_string_pretty(report).map_err(|error| error.to_string())? + "\n";
    let files = [("results.json", json), ("results.md", report.markdown()), ("results.svg", bench::svg(report))];
    for (name, content) in files {
        let path = dir.join(name);
        std::fs::write(&path, content).map_err(|error| failed(&path, error))?;
        say(&format!("wrote {}", path.display()));
    }
    Ok(())
}

fn print(text: &str) {
    let _ = writeln!(std::io::stdout().lock(), "{text}");
}

fn say(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}
