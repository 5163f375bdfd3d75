//! Measures how fast a `sandpool` binary is on this machine, as ratios to floors and alternatives that are measured in
//! the same run.
//!
//! Each figure is a plain sequence of interleaved rounds in `figures`; `stats` computes medians and ratios, `report`
//! makes the table and `plot` the picture. The benchmark knows the server only from outside, through its command line
//! and MCP.
#![warn(unreachable_pub)]

mod alternatives;
mod browser;
mod client;
mod compare;
mod figures;
mod floors;
mod machine;
mod memory;
mod otel;
mod plot;
mod process;
mod report;
mod server;
mod site;
mod stats;
mod subject;
mod tokens;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

pub use compare::Comparison;
pub use figures::NAMES;
pub use plot::svg;
pub use process::Children;
pub use report::BenchReport;

use figures::Row;
use process::Workplace;
use subject::Subject;

#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    #[error("interrupted")]
    Interrupted,
    /// The server answered a call with a failure.
    #[error("{0}")]
    Refused(String),
    #[error("{0}")]
    Said(String),
    #[error("{what}: {source}")]
    Io { what: String, source: std::io::Error },
}

impl BenchError {
    fn io(what: &str) -> impl Fn(std::io::Error) -> Self {
        move |source| Self::Io { what: what.into(), source }
    }
}

/// How much is measured.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    pub rounds: usize,
    /// Number of warm calls in a round.
    pub calls: usize,
    /// Number of new contexts in a round.
    pub creates: usize,
    /// Number of live contexts in the figure `many`.
    pub many: usize,
    /// Number of simultaneous creates.
    pub burst: usize,
    /// Number of contexts under load, and of kernels of the alternative.
    pub loaded: usize,
    pub load: Duration,
    /// Pause between two creates, in which the pool refills. `T` is measured after the pause.
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
    /// A quick check that everything works, not a measurement.
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

/// Options of a run.
pub struct Options {
    pub plan: Plan,
    pub quick: bool,
    /// Names from `NAMES`; all figures if empty.
    pub only: Vec<String>,
    /// Directory of the alternatives that `scripts/bench` installed.
    pub alternatives: Option<PathBuf>,
    /// The binary under test.
    pub executable: PathBuf,
    pub children: Children,
    /// Shows a line of progress.
    pub say: fn(&str),
}

/// State of a run of the benchmark.
struct Bench {
    plan: Plan,
    alternatives: Option<PathBuf>,
    subject: Subject,
    children: Children,
    workplace: Workplace,
    numbers: AtomicUsize,
    say: fn(&str),
}

impl Bench {
    /// Returns a number for names that are used once.
    fn next_number(&self) -> usize {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    fn pause(&self) -> Result<(), BenchError> {
        std::thread::sleep(self.plan.pause);
        self.children.check()
    }
}

impl Bench {
    fn new(options: &Options, executable: &Path) -> Result<Self, BenchError> {
        Ok(Self {
            plan: options.plan.clone(),
            alternatives: options.alternatives.clone(),
            subject: Subject::of(executable, &options.children)?,
            children: options.children.clone(),
            workplace: Workplace::new()?,
            numbers: AtomicUsize::new(0),
            say: options.say,
        })
    }
}

impl Options {
    fn wanted(&self) -> Vec<&'static Row> {
        figures::ALL.iter().filter(|f| self.only.is_empty() || self.only.iter().any(|only| only == f.name)).collect()
    }
}

/// Measures one binary. It blocks for minutes; `children` can end it from another thread.
pub fn run(options: Options) -> Result<BenchReport, BenchError> {
    let bench = Bench::new(&options, &options.executable)?;
    let versions = machine::versions(bench.subject.versions.clone(), bench.alternatives.as_deref(), &bench.children);
    let wanted = options.wanted();
    let mut measured = Vec::new();
    for (number, figure) in wanted.iter().enumerate() {
        (bench.say)(&format!("[{}/{}] {}: {}", number + 1, wanted.len(), figure.name, figure.title));
        measured.push((figure.measure)(&bench)?);
    }
    Ok(BenchReport {
        build: if cfg!(debug_assertions) { "debug" } else { "release" },
        quick: options.quick,
        rounds: bench.plan.rounds,
        machine: machine::describe(),
        versions,
        figures: measured,
    })
}

/// Number of contexts of the figure `many` in a comparison, which creates them anew in every round.
const MANY_COMPARED: usize = 200;

/// Measures two binaries alternately, one round each, and prints the ratios of each figure when it is done.
pub fn compare(options: Options, old: &Path) -> Result<Comparison, BenchError> {
    let rounds = options.plan.rounds;
    let many = options.plan.many.min(MANY_COMPARED);
    let options = Options { plan: Plan { rounds: 1, many, ..options.plan }, alternatives: None, ..options };
    let (new, old) = (Bench::new(&options, &options.executable)?, Bench::new(&options, old)?);
    let mut comparison = Comparison::new(rounds);
    for figure in options.wanted() {
        for round in 0..rounds {
            (options.say)(&format!("{}: round {} of {rounds}", figure.name, round + 1));
            // The build that begins may find the machine in another state than the second one.
            let (measured_new, measured_old) = if round % 2 == 0 {
                let first = (figure.measure)(&new)?;
                (first, (figure.measure)(&old)?)
            } else {
                let first = (figure.measure)(&old)?;
                ((figure.measure)(&new)?, first)
            };
            comparison.add(&measured_new, &measured_old);
        }
        (options.say)(&comparison.lines_of(figure.name));
    }
    Ok(comparison)
}
