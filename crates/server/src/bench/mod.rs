//! `sandpool bench`: how fast this program is on this machine, as ratios to floors and alternatives that are measured in the same run.
//!
//! Each figure is a straight line of interleaved rounds in `figures`; `stats` makes medians and ratios of them, `report` the table,
//! `plot` the picture. Knows the server only from outside, through its own command line and MCP.

mod alternatives;
mod browser;
mod client;
mod figures;
mod floors;
mod machine;
mod memory;
mod plot;
mod process;
mod report;
mod server;
mod site;
mod stats;

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

pub use figures::NAMES;
pub use plot::svg;
pub use process::Children;
pub use report::Report;

use crate::config::{Config, Environment};
use process::Workplace;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("interrupted")]
    Interrupted,
    /// An answer that is no success.
    #[error("{0}")]
    Refused(String),
    #[error("{0}")]
    Said(String),
    #[error("{what}: {source}")]
    Io { what: String, source: std::io::Error },
}

impl Error {
    fn io(what: &str) -> impl Fn(std::io::Error) -> Self {
        move |source| Self::Io { what: what.into(), source }
    }
}

/// How much is measured.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    pub rounds: usize,
    /// Warm calls in a round.
    pub calls: usize,
    /// New contexts in a round.
    pub creates: usize,
    /// Live contexts of the figure `many`.
    pub many: usize,
    /// Creates at once.
    pub burst: usize,
    /// Contexts under load, and kernels of the alternative.
    pub loaded: usize,
    pub load: Duration,
    /// Between two creates: a pool refills meanwhile, and the unit of measure is not taken while it does.
    pub pause: Duration,
}

impl Plan {
    pub const FULL: Self = Self {
        rounds: 10,
        calls: 50,
        creates: 12,
        many: 1000,
        burst: 50,
        loaded: 64,
        load: Duration::from_secs(3),
        pause: Duration::from_millis(200),
    };
    /// A look, not a measurement.
    pub const QUICK: Self = Self {
        rounds: 2,
        calls: 10,
        creates: 3,
        many: 20,
        burst: 5,
        loaded: 4,
        load: Duration::from_millis(500),
        pause: Duration::from_millis(100),
    };
}

/// What a run needs to know.
pub struct Options {
    pub plan: Plan,
    pub quick: bool,
    /// Names of `NAMES`; all if empty.
    pub only: Vec<String>,
    /// What `scripts/bench` installed.
    pub alternatives: Option<PathBuf>,
    /// The server under test.
    pub executable: PathBuf,
    pub python: PathBuf,
    pub node: Option<PathBuf>,
    /// Chromium.
    pub browser: Option<PathBuf>,
    pub versions: Vec<(String, String)>,
    pub config: Config,
    pub environment: Environment,
    pub children: Children,
    /// A line of progress.
    pub say: Box<dyn Fn(&str) + Send>,
}

/// A run of the benchmark.
struct Bench {
    plan: Plan,
    alternatives: Option<PathBuf>,
    executable: PathBuf,
    python: PathBuf,
    node: Option<PathBuf>,
    browser: Option<PathBuf>,
    config: Config,
    environment: Environment,
    children: Children,
    workplace: Workplace,
    numbers: AtomicUsize,
    say: Box<dyn Fn(&str) + Send>,
}

impl Bench {
    /// For names that are used once.
    fn next_number(&self) -> usize {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    fn pause(&self) -> Result<(), Error> {
        std::thread::sleep(self.plan.pause);
        self.children.check()
    }
}

/// Measures. Blocks for minutes; `children` can end it from another thread.
pub fn run(options: Options) -> Result<Report, Error> {
    let Options { plan, quick, only, alternatives, executable, python, node, browser, .. } = options;
    let versions = machine::versions(options.versions, alternatives.as_deref(), &options.children);
    let bench = Bench {
        plan,
        alternatives,
        executable,
        python,
        node,
        browser,
        config: options.config,
        environment: options.environment,
        children: options.children,
        workplace: Workplace::new()?,
        numbers: AtomicUsize::new(0),
        say: options.say,
    };
    let wanted: Vec<_> = figures::ALL.iter().filter(|f| only.is_empty() || only.iter().any(|o| o == f.name)).collect();
    let mut measured = Vec::new();
    for (number, figure) in wanted.iter().enumerate() {
        (bench.say)(&format!("[{}/{}] {}: {}", number + 1, wanted.len(), figure.name, figure.title));
        measured.push((figure.measure)(&bench)?);
    }
    Ok(Report {
        build: if cfg!(debug_assertions) { "debug" } else { "release" },
        quick,
        rounds: bench.plan.rounds,
        machine: machine::describe(),
        versions,
        figures: measured,
    })
}
