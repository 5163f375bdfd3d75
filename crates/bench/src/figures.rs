//! The figures. Each function measures one figure in interleaved rounds and returns its rows of the table.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::{Value, json};

use crate::alternatives::{self, BUBBLEWRAP, GATEWAY, Helper, IPYKERNEL, ORDINARY, RUN_PYTHON};
use crate::client::{self, BenchCall, Client};
use crate::floors::{self, CELL, IMPORT, NODE, PIPE, PingPong, TRUE, timed, true_times};
use crate::report::{Against, Figure, Found, Goal, Quantity, ReportRow, Unit};
use crate::server::{self, Pool, first_cell, no_op, one_shot, stop};
use crate::stats::Samples;
use crate::{Bench, BenchError, browser, memory, otel, tokens};

pub(crate) const OURS: &str = "sandpool";
pub(crate) const EMPTY: &str = "sandpool, empty pools";
const NO_OP: &str = "no-op tool, stdio";
const NO_OP_HTTP: &str = "no-op tool, HTTP";
const BOTH: [(&str, Pool); 2] = [(OURS, Pool::Full), (EMPTY, Pool::Empty)];

const PANDAS: &str = "import pandas\nprint(1)";
const STACK: &str = "import numpy, pandas, matplotlib.pyplot, os\nprint(os.readlink('/proc/self/ns/pid'))";
/// Pause before the first sample, in which the pool fills and caches warm up.
const SETTLE: Duration = Duration::from_secs(1);

/// A figure that the user can select.
pub(crate) struct Row {
    pub name: &'static str,
    pub title: &'static str,
    pub measure: fn(&Bench) -> Result<Figure, BenchError>,
}

pub(crate) const ALL: &[Row] = &[
    Row { name: "first", title: "create_context + first run_code with import pandas, over stdio", measure: first },
    Row { name: "warm", title: "warm run_code over stdio", measure: warm },
    Row { name: "http", title: "warm run_code over HTTP keep-alive", measure: http },
    Row { name: "javascript", title: "JavaScript: create_context + first console.log", measure: javascript },
    Row { name: "oneshot", title: "one-shot call of a conversation, a fresh process each", measure: oneshot },
    Row { name: "memory", title: "private memory of an idle context with the data stack", measure: memory_of },
    Row { name: "many", title: "many live contexts", measure: many },
    Row { name: "burst", title: "creates at once", measure: burst },
    Row { name: "load", title: "warm calls a second over HTTP", measure: load },
    Row { name: "start", title: "server start to ready", measure: start },
    Row { name: "browser", title: "the browser beside another one for agents", measure: browser::measure },
    Row { name: "tokens", title: "what a model has to read", measure: tokens::measure },
    Row { name: "otel", title: "warm run_code with an export to OpenTelemetry", measure: otel::measure },
];

/// Names of the figures, for the help and for errors.
pub const NAMES: [&str; 13] = [
    "first",
    "warm",
    "http",
    "javascript",
    "oneshot",
    "memory",
    "many",
    "burst",
    "load",
    "start",
    "browser",
    "tokens",
    "otel",
];

impl Bench {
    pub(crate) fn rounds<'a>(&'a self, name: &'a str) -> impl Iterator<Item = usize> + 'a {
        let all = self.plan.rounds;
        (0..all).inspect(move |round| (self.say)(&format!("  {name}: round {} of {all}", round + 1)))
    }

    pub(crate) fn settle(&self) -> Result<(), BenchError> {
        std::thread::sleep(SETTLE);
        self.children.check()
    }

    /// Starts a server over stdio and waits until it has run something.
    fn ready(&self, dialect: &str, pool: Pool, probe: &BenchCall) -> Result<client::Stdio, BenchError> {
        let mut client = server::stdio(self, dialect, pool, "")?;
        client.call_when_ready(probe)?;
        Ok(client)
    }

    fn contexts(&self, pool: Pool) -> Result<client::Stdio, BenchError> {
        self.ready("sandpool", pool, &server::create("python"))
    }
}

/// Derives quantities and rows from the samples of a figure.
impl Samples {
    pub(crate) fn quantity(&self, subject: &str, value: Option<f64>, unit: Unit) -> Found {
        value.map(|value| Quantity { value, unit }).ok_or_else(|| self.why_not(&[subject]).to_owned())
    }

    /// Returns the median in units of `T`.
    pub(crate) fn in_true(&self, subject: &str) -> Found {
        self.quantity(subject, self.ratio(subject, TRUE), Unit::T)
    }

    fn tail_in_true(&self, subject: &str, at: f64) -> Found {
        self.quantity(subject, self.tail_ratio(subject, at, TRUE), Unit::T)
    }

    /// Returns a row for our median.
    fn ours(&self, what: &str, goal: f64) -> ReportRow {
        ReportRow::new(what, self.in_true(OURS), self.in_true(EMPTY), Goal::at_most(goal, Unit::T))
    }

    /// Returns a row for a tail of two series: ours, and ours with empty pools.
    fn tail(&self, what: &str, at: f64, [ours, empty]: [&str; 2], goal: Option<Goal>) -> ReportRow {
        ReportRow::new(what, self.tail_in_true(ours, at), self.tail_in_true(empty, at), goal)
    }

    /// Returns a row beside an alternative that takes longer.
    fn beside(&self, what: &str, name: &'static str, goal: Option<Goal>) -> ReportRow {
        let empty = self.quantity(EMPTY, self.ratio(name, EMPTY), Unit::Times);
        let against = Against { name, theirs: self.in_true(name), ratio: self.ratio(name, OURS) };
        ReportRow::against(what, self.in_true(OURS), empty, against, goal)
    }

    fn floors(&self, names: &[&'static str]) -> Vec<(&'static str, Quantity)> {
        names.iter().filter_map(|name| Some((*name, self.in_true(name).ok()?))).collect()
    }
}

type Servers<T> = Vec<(&'static str, Option<T>)>;

/// Starts a server with full pools and one with empty pools.
fn both<T>(samples: &mut Samples, start: impl Fn(Pool) -> Result<T, BenchError>) -> Result<Servers<T>, BenchError> {
    BOTH.into_iter().map(|(name, pool)| Ok((name, samples.need(name, start(pool))?))).collect()
}

/// Measures creates by both servers in turn, with pauses.
fn creates_by_both(
    bench: &Bench,
    samples: &mut Samples,
    servers: &mut Servers<client::Stdio>,
    language: &str,
    code: &str,
) -> Result<(), BenchError> {
    for _ in 0..bench.plan.creates {
        for (name, server) in &mut *servers {
            bench.pause()?;
            samples.take(TRUE, || true_times(bench, 2))?;
            samples.take_from(name, server, |server| creates(bench, server, language, code))?;
        }
    }
    Ok(())
}

/// Measures the creation of one context with its first cell, and stops the context again.
fn creates(bench: &Bench, client: &mut dyn Client, language: &str, code: &str) -> Result<Vec<f64>, BenchError> {
    let (context, seconds) = first_cell(client, language, code, "1")?;
    client.call(&stop(&context))?;
    bench.children.check()?;
    Ok(vec![seconds])
}

fn first(bench: &Bench) -> Result<Figure, BenchError> {
    let mut samples = Samples::default();
    let mut servers = both(&mut samples, |pool| bench.contexts(pool))?;
    let mut kernels = samples.need(IPYKERNEL, Helper::ipykernel(bench))?;
    let mut gateway = samples.need(GATEWAY, Helper::gateway(bench))?;
    bench.settle()?;
    for round in bench.rounds("first") {
        samples.begin_round();
        creates_by_both(bench, &mut samples, &mut servers, "python", PANDAS)?;
        let ordinary = json!({ "do": "start_ordinary", "code": PANDAS });
        samples.take_from(IPYKERNEL, &mut kernels, |kernels| kernels.first(PANDAS))?;
        samples.take_from(ORDINARY, &mut kernels, |kernels| kernels.values(&ordinary))?;
        samples.take_from(GATEWAY, &mut gateway, |gateway| gateway.first(PANDAS))?;
        // Each sample takes seconds, and it has no pandas: a few are enough for the order of magnitude.
        if round < 3 {
            samples.take(RUN_PYTHON, || {
                let start = Instant::now();
                alternatives::run_python_call(&mut alternatives::run_python(bench)?)?;
                Ok(vec![start.elapsed().as_secs_f64()])
            })?;
        }
    }
    let mut figure = Figure::new("first", ALL[0].title, &samples);
    figure.lines = vec![
        samples.ours("create_context + first `import pandas`, stdio", 12.0),
        samples.tail("… its p99", 0.99, [OURS, EMPTY], Goal::at_most(40.0, Unit::T)),
        samples.beside("… against a start + the same import", IPYKERNEL, Goal::times(60.0)),
        samples.beside("… against the same through its ordinary client", ORDINARY, None),
        samples.beside("… against a new kernel + the same import", GATEWAY, None),
        samples.beside("… against a start + `print(1)`", RUN_PYTHON, None),
    ];
    Ok(figure)
}

/// Measures warm calls of one context.
fn warm_calls(bench: &Bench, client: &mut dyn Client, call: &BenchCall) -> Result<Vec<f64>, BenchError> {
    let one = |_| {
        bench.children.check()?;
        Ok(client.call(call)?.printed("1")?.seconds)
    };
    (0..bench.plan.calls).map(one).collect()
}

fn no_ops(bench: &Bench, client: &mut dyn Client) -> Result<Vec<f64>, BenchError> {
    (0..bench.plan.calls).map(|_| Ok(client.call(&no_op())?.seconds)).collect()
}

/// Creates a separate context and runs cells in it until it is warm.
pub(crate) fn warmed(client: &mut dyn Client) -> Result<BenchCall, BenchError> {
    let context = client.call_when_ready(&server::create("python"))?.field("context")?;
    let call = server::run(&context, "python", "print(1)");
    for _ in 0..10 {
        client.call(&call)?.printed("1")?;
    }
    Ok(call)
}

fn warm(bench: &Bench) -> Result<Figure, BenchError> {
    let mut samples = Samples::default();
    let mut servers = both(&mut samples, |pool| {
        let mut client = server::stdio(bench, "sandpool", pool, "")?;
        let call = warmed(&mut client)?;
        Ok((client, call))
    })?;
    let mut pipe = samples.need(PIPE, PingPong::start(bench))?;
    let mut bare = samples.need(CELL, Helper::bare(bench))?;
    let mut kernels = samples.need(IPYKERNEL, Helper::ipykernel(bench))?;
    if let Some(kernels) = &mut kernels {
        samples.need(IPYKERNEL, kernels.open(1, "print(1)"))?;
    }
    let mut run_python = samples.need(RUN_PYTHON, alternatives::run_python(bench))?;
    bench.settle()?;
    for _ in bench.rounds("warm") {
        samples.begin_round();
        samples.take(TRUE, || true_times(bench, 10))?;
        samples.take_from(PIPE, &mut pipe, |pipe| pipe.times(bench, bench.plan.calls))?;
        samples.take_from(CELL, &mut bare, |bare| bare.values(&json!({ "times": bench.plan.calls })))?;
        for (name, server) in &mut servers {
            let Some((client, call)) = server else { continue };
            if *name == OURS {
                samples.take(NO_OP, || no_ops(bench, client))?;
            }
            samples.take(name, || warm_calls(bench, client, call))?;
        }
        let ordinary = json!({ "do": "call_ordinary", "times": bench.plan.calls, "code": "print(1)" });
        samples.take_from(IPYKERNEL, &mut kernels, |kernels| kernels.calls(bench.plan.calls))?;
        samples.take_from(ORDINARY, &mut kernels, |kernels| kernels.values(&ordinary))?;
        samples.take_from(RUN_PYTHON, &mut run_python, |server| {
            (0..bench.plan.calls).map(|_| alternatives::run_python_call(server)).collect()
        })?;
    }
    let allowed = [(NO_OP, 1.0), (CELL, 2.0)];
    let part = |subject| samples.quantity(subject, samples.ratio_to_sum(subject, &allowed), Unit::Times);
    let mut figure = Figure::new("warm", ALL[1].title, &samples);
    figure.lines = vec![
        ReportRow::new(
            "warm `run_code(\"print(1)\")`, stdio, against no-op tool + 2 bare `run_cell`",
            part(OURS),
            part(EMPTY),
            Goal::at_most(1.0, Unit::Times),
        ),
        samples.beside("… against a warm call", IPYKERNEL, Goal::times(10.0)),
        samples.beside("… against the same through its ordinary client", ORDINARY, None),
        samples.beside("… against a warm call (stateless)", RUN_PYTHON, None),
    ];
    figure.floors = samples.floors(&[PIPE, NO_OP, CELL]);
    Ok(figure)
}

fn http(bench: &Bench) -> Result<Figure, BenchError> {
    let mut samples = Samples::default();
    let mut servers = both(&mut samples, |pool| {
        let server = server::Http::start(bench, pool, "")?;
        let mut client = server.connect()?;
        let call = warmed(&mut client)?;
        Ok((client, call, server))
    })?;
    let mut kernels = samples.need(IPYKERNEL, Helper::ipykernel(bench))?;
    if let Some(kernels) = &mut kernels {
        samples.need(IPYKERNEL, kernels.open(1, "print(1)"))?;
    }
    let mut gateway = samples.need(GATEWAY, Helper::gateway(bench))?;
    bench.settle()?;
    for _ in bench.rounds("http") {
        samples.begin_round();
        samples.take(TRUE, || true_times(bench, 10))?;
        for (name, server) in &mut servers {
            let Some((client, call, _)) = server else { continue };
            if *name == OURS {
                samples.take(NO_OP_HTTP, || no_ops(bench, client))?;
            }
            samples.take(name, || warm_calls(bench, client, call))?;
        }
        samples.take_from(IPYKERNEL, &mut kernels, |kernels| kernels.calls(bench.plan.calls))?;
        samples.take_from(GATEWAY, &mut gateway, |gateway| gateway.calls(bench.plan.calls.div_ceil(5)))?;
    }
    let mut figure = Figure::new("http", ALL[2].title, &samples);
    figure.lines = vec![
        samples.beside(
            "warm `run_code(\"print(1)\")`, HTTP keep-alive, against a warm call",
            IPYKERNEL,
            Goal::times(8.0),
        ),
        samples.beside("… against a warm call over its websocket", GATEWAY, Goal::times(100.0)),
    ];
    figure.floors = samples.floors(&[NO_OP_HTTP]);
    Ok(figure)
}

fn javascript(bench: &Bench) -> Result<Figure, BenchError> {
    let mut samples = Samples::default();
    let mut servers = both(&mut samples, |pool| bench.contexts(pool))?;
    bench.settle()?;
    for _ in bench.rounds("javascript") {
        samples.begin_round();
        creates_by_both(bench, &mut samples, &mut servers, "javascript", "console.log(1)")?;
        samples.take(NODE, || timed(bench, 3, || floors::plain_node(bench)))?;
    }
    let mut figure = Figure::new("javascript", ALL[3].title, &samples);
    figure.lines = vec![
        samples.ours("JavaScript: create_context + first `console.log`, stdio", 15.0),
        samples.beside("… against a process of its own (no sandbox)", NODE, None),
    ];
    figure.floors = samples.floors(&[NODE]);
    Ok(figure)
}

const NEW: &str = "sandpool, new conversations";
const EMPTY_NEW: &str = "sandpool, new conversations, empty pools";

/// The reason why the figure `oneshot` has no value with empty pools for a conversation that continues.
const AHEAD: &str = "a conversation that goes on has its next sandbox made ahead, whatever the pools are";

fn oneshot(bench: &Bench) -> Result<Figure, BenchError> {
    let mut samples = Samples::default();
    let mut servers = Vec::new();
    for ((name, pool), new) in BOTH.into_iter().zip([NEW, EMPTY_NEW]) {
        let ready = bench.ready("conversation", pool, &one_shot("same", "print(1)"));
        servers.push((name, new, samples.need(name, ready)?));
    }
    bench.settle()?;
    let call = |server: &mut client::Stdio, id: &str| {
        let answer = server.call(&one_shot(id, "print(1)"))?;
        bench.children.check()?;
        Ok(vec![answer.printed("1")?.seconds])
    };
    for _ in bench.rounds("oneshot") {
        samples.begin_round();
        for _ in 0..bench.plan.creates {
            for (name, new, server) in &mut servers {
                let Some(server) = server else { continue };
                bench.pause()?;
                samples.take(TRUE, || true_times(bench, 2))?;
                samples.take(name, || call(server, "same"))?;
                bench.pause()?;
                samples.take(new, || call(server, &format!("new-{}", bench.next_number())))?;
            }
        }
        samples.take(BUBBLEWRAP, || timed(bench, 3, || alternatives::bubblewrap(bench)))?;
    }
    let mut figure = Figure::new("oneshot", ALL[4].title, &samples);
    figure.lines = vec![
        ReportRow::new(
            "one-shot conversation call, fresh Python, same conversation",
            samples.in_true(OURS),
            Err(AHEAD.into()),
            Goal::at_most(12.0, Unit::T),
        ),
        ReportRow::new(
            "… a new conversation each time",
            samples.in_true(NEW),
            samples.in_true(EMPTY_NEW),
            Goal::at_most(12.0, Unit::T),
        ),
        ReportRow {
            empty: Err(AHEAD.into()), ..samples.beside("… against a fresh sandbox a call", BUBBLEWRAP, None)
        },
    ];
    figure.notes = vec![format!("`oneshot`: {AHEAD}; a new conversation shows the way without")];
    Ok(figure)
}

/// Measures the private memory of contexts, and then of kernels, that have imported the data stack.
fn memory_of(bench: &Bench) -> Result<Figure, BenchError> {
    const CONTEXTS: usize = 8;
    let mut samples = Samples::default();
    samples.begin_round();
    for (name, pool) in BOTH {
        let Some(mut client) = samples.need(name, bench.contexts(pool))? else { continue };
        bench.settle()?;
        samples.take(name, || {
            let mut namespaces = Vec::new();
            for _ in 0..CONTEXTS {
                let context = client.call(&server::create("python"))?.field("context")?;
                let answer = client.call(&server::run(&context, "python", STACK))?;
                namespaces.push(answer.field("stdout")?.trim().to_owned());
            }
            bench.settle()?;
            namespaces.iter().map(|one| memory::private(&memory::members(one)?)).collect()
        })?;
    }
    if let Some(mut kernels) = samples.need(IPYKERNEL, Helper::ipykernel(bench))? {
        samples.take(IPYKERNEL, || {
            kernels.open(CONTEXTS / 2, STACK)?;
            bench.settle()?;
            let answer = kernels.ask(&json!({ "do": "pids" }))?;
            let pids = answer["pids"].as_array().cloned().unwrap_or_default();
            let pids = pids.iter().filter_map(Value::as_u64).filter_map(|pid| u32::try_from(pid).ok());
            pids.map(|pid| memory::private(&[pid])).collect()
        })?;
    }
    let megabytes =
        |subject: &str| samples.quantity(subject, samples.median(subject).map(|bytes| bytes / 1e6), Unit::Megabytes);
    let mut figure = Figure::new("memory", ALL[5].title, &samples);
    let what = "private memory of a whole idle context, numpy, pandas and matplotlib loaded";
    let against = Against { name: IPYKERNEL, theirs: megabytes(IPYKERNEL), ratio: samples.ratio(IPYKERNEL, OURS) };
    let empty = samples.quantity(EMPTY, samples.ratio(IPYKERNEL, EMPTY), Unit::Times);
    figure.lines = vec![
        ReportRow::new(what, megabytes(OURS), megabytes(EMPTY), Goal::at_most(6.0, Unit::Megabytes)),
        ReportRow::against(
            "… against a kernel with the same imports",
            megabytes(OURS),
            empty,
            against,
            Goal::times(15.0),
        ),
    ];
    Ok(figure)
}

const FEW: usize = 10;
/// Series of the figure `many`: create and call, with few and with many other contexts alive.
const MANY: [(Pool, [&str; 4]); 2] = [
    (Pool::Full, ["create, few", "call, few", "create, many", "call, many"]),
    (
        Pool::Empty,
        ["create, few, empty pools", "call, few, empty pools", "create, many, empty pools", "call, many, empty pools"],
    ),
];

fn many(bench: &Bench) -> Result<Figure, BenchError> {
    let mut samples = Samples::default();
    let mut notes = Vec::new();
    for (pool, names) in MANY {
        let made = server::Http::start(bench, pool, "").and_then(|server| Ok((server.connect()?, server)));
        // A failure is shown in place of the result.
        let Some((mut client, _server)) = samples.need(names[2], made)? else { continue };
        bench.settle()?;
        let before = memory::available();
        let mut contexts = Vec::new();
        for (count, create, call) in [(FEW, names[0], names[1]), (bench.plan.many, names[2], names[3])] {
            let grown = grow(bench, &mut client, &mut contexts, count);
            if samples.need(create, grown)?.is_none() {
                break;
            }
            bench.settle()?;
            crowd(bench, &mut samples, &mut client, &contexts, create, call)?;
        }
        if let (Pool::Full, Some(before), Some(after)) = (pool, before, memory::available()) {
            // This includes the memory that the Linux kernel needs for namespaces, mounts and page tables.
            let each = (before - after) / contexts.len().max(1) as f64 / 1e6;
            let count = contexts.len();
            notes.push(format!(
                "`many`: {count} contexts alive; the machine's available memory fell by {each:.1} MB a context, all told"
            ));
        }
    }
    let times = |few: &str, many: &str| {
        let ratio = samples.median(many).zip(samples.median(few)).map(|(many, few)| many / few);
        samples.quantity(many, ratio, Unit::Times)
    };
    let [(_, full), (_, empty)] = MANY;
    let mut figure = Figure::new("many", ALL[6].title, &samples);
    let what = format!("create_context + first cell with {} contexts alive, against {FEW}", bench.plan.many);
    figure.lines = vec![
        ReportRow::new(&what, times(full[0], full[2]), times(empty[0], empty[2]), Goal::at_most(2.0, Unit::Times)),
        ReportRow::new(
            "… a warm call of any of them, against any of those",
            times(full[1], full[3]),
            times(empty[1], empty[3]),
            Goal::at_most(2.0, Unit::Times),
        ),
    ];
    figure.notes = notes;
    Ok(figure)
}

/// Creates more contexts, and runs a first cell in each.
fn grow(bench: &Bench, client: &mut client::Http, contexts: &mut Vec<String>, count: usize) -> Result<(), BenchError> {
    while contexts.len() < count {
        bench.children.check()?;
        if contexts.len().is_multiple_of(100) {
            (bench.say)(&format!("  many: {} of {count} contexts", contexts.len()));
        }
        let (context, _) = first_cell(client, "python", "print(1)", "1")
            .map_err(|error| BenchError::Said(format!("after {} contexts: {error}", contexts.len())))?;
        contexts.push(context);
    }
    Ok(())
}

/// Measures creates with pauses, and calls to each context in turn, with these other contexts alive.
fn crowd(
    bench: &Bench,
    samples: &mut Samples,
    client: &mut client::Http,
    contexts: &[String],
    create: &'static str,
    call: &'static str,
) -> Result<(), BenchError> {
    let calls: Vec<BenchCall> = contexts.iter().map(|id| server::run(id, "python", "print(1)")).collect();
    let mut next = calls.iter().cycle();
    for _ in bench.rounds(create) {
        samples.begin_round();
        for _ in 0..bench.plan.creates {
            bench.pause()?;
            samples.take(TRUE, || true_times(bench, 1))?;
            samples.take(create, || creates(bench, client, "python", "print(1)"))?;
        }
        bench.pause()?;
        samples.take(call, || {
            let around = next.by_ref().take(bench.plan.calls * 2);
            around.map(|call| Ok(client.call(call)?.printed("1")?.seconds)).collect()
        })?;
    }
    Ok(())
}

const CELLS: &str = "create + first cell";
const EMPTY_CELLS: &str = "create + first cell, empty pools";
const AGAIN: &str = "sandpool, the second time";

/// Measures a burst. A pool follows demand, so each round uses a new server, which has not seen a burst.
fn burst(bench: &Bench) -> Result<Figure, BenchError> {
    let mut samples = Samples::default();
    for _ in bench.rounds("burst").take(5) {
        samples.begin_round();
        for ((name, pool), cells) in BOTH.into_iter().zip([CELLS, EMPTY_CELLS]) {
            let Some(mut server) = samples.need(name, bench.contexts(pool))? else { continue };
            bench.settle()?;
            samples.take(TRUE, || true_times(bench, 10))?;
            let mut first_cells = Vec::new();
            samples.take(name, || {
                let (created, printed) = at_once(bench, &mut server)?;
                first_cells = printed;
                Ok(created)
            })?;
            samples.take(cells, || Ok(first_cells))?;
            if pool == Pool::Full {
                bench.settle()?;
                bench.settle()?;
                samples.take(AGAIN, || Ok(at_once(bench, &mut server)?.0))?;
            }
        }
    }
    let mut figure = Figure::new("burst", ALL[7].title, &samples);
    let what = format!("{} create_context at once, stdio, p95", bench.plan.burst);
    figure.lines = vec![
        samples.tail(&what, 0.95, [OURS, EMPTY], Goal::at_most(120.0, Unit::T)),
        samples.tail("… until each has printed something, p95", 0.95, [CELLS, EMPTY_CELLS], None),
        ReportRow::new(
            "… the same again two seconds later, p95",
            samples.tail_in_true(AGAIN, 0.95),
            samples.quantity(AGAIN, None, Unit::T),
            None,
        ),
    ];
    Ok(figure)
}

/// Sends all creates before it reads any answer, and a first cell after each answer. Times count from the first byte
/// sent.
fn at_once(bench: &Bench, server: &mut client::Stdio) -> Result<(Vec<f64>, Vec<f64>), BenchError> {
    let (mut created, mut printed) = (Vec::new(), Vec::new());
    let mut cells: HashMap<u64, String> = HashMap::new();
    let start = Instant::now();
    for _ in 0..bench.plan.burst {
        server.begin(&server::create("python"))?;
    }
    let mut contexts = Vec::new();
    while printed.len() < bench.plan.burst {
        let (id, arrived, message) = server.next()?;
        let result = client::Stdio::result(&message)?;
        let seconds = (arrived - start).as_secs_f64();
        if let Some(context) = cells.remove(&id) {
            printed.push(seconds);
            contexts.push(context);
            continue;
        }
        created.push(seconds);
        let context = result["structuredContent"]["context"].as_str().unwrap_or_default().to_owned();
        let cell = server.begin(&server::run(&context, "python", "print(1)"))?;
        cells.insert(cell, context);
    }
    for context in contexts {
        server.call(&stop(&context))?;
    }
    Ok((created, printed))
}

fn load(bench: &Bench) -> Result<Figure, BenchError> {
    let mut samples = Samples::default();
    let mut notes = Vec::new();
    let mut kernels = samples.need(IPYKERNEL, Helper::ipykernel(bench))?;
    if let Some(kernels) = &mut kernels {
        (bench.say)("  load: starting kernels");
        if let Some((count, why)) = samples.need(IPYKERNEL, kernels.open(bench.plan.loaded, "print(1)"))? {
            let why = why.map(|why| format!(", no more because: {why}")).unwrap_or_default();
            notes.push(format!("`load`: {count} kernels of ipykernel{why}"));
        }
    }
    let mut servers = both(&mut samples, |pool| {
        let server = server::Http::start(bench, pool, "")?;
        let connect = |_| {
            let mut client = server.connect()?;
            let call = warmed(&mut client)?;
            Ok((client, call))
        };
        let clients: Result<Vec<_>, BenchError> = (0..bench.plan.loaded).map(connect).collect();
        Ok((clients?, server))
    })?;
    bench.settle()?;
    for _ in bench.rounds("load").take(5) {
        samples.begin_round();
        for (name, server) in &mut servers {
            samples.take_from(name, server, |(clients, _)| Ok(vec![rate(bench, clients)?]))?;
        }
        let request = json!({ "do": "load", "seconds": bench.plan.load.as_secs_f64(), "code": "print(1)" });
        samples.take_from(IPYKERNEL, &mut kernels, |kernels| kernels.values(&request))?;
    }
    let rate = |subject: &str| samples.quantity(subject, samples.median(subject), Unit::PerSecond);
    let mut figure = Figure::new("load", ALL[8].title, &samples);
    let empty = samples.quantity(EMPTY, samples.ratio(EMPTY, IPYKERNEL), Unit::Times);
    let against = Against { name: IPYKERNEL, theirs: rate(IPYKERNEL), ratio: samples.ratio(OURS, IPYKERNEL) };
    let what = format!("warm calls a second, HTTP, {} contexts", bench.plan.loaded);
    figure.lines = vec![ReportRow::against(&what, rate(OURS), empty, against, Goal::times(10.0))];
    figure.notes = notes;
    Ok(figure)
}

/// Keeps one call in progress on each connection, and returns the number of answers per second.
fn rate(bench: &Bench, clients: &mut [(client::Http, BenchCall)]) -> Result<f64, BenchError> {
    clients.iter_mut().try_for_each(|(client, _)| client.reconnect())?;
    let start = Instant::now();
    for (client, call) in clients.iter_mut() {
        client.begin(call)?;
    }
    let mut done = 0_u32;
    while start.elapsed() < bench.plan.load {
        for index in readable(clients)? {
            let (client, call) = &mut clients[index];
            client.finish()?;
            done += 1;
            client.begin(call)?;
        }
    }
    let rate = f64::from(done) / start.elapsed().as_secs_f64();
    for (client, _) in clients.iter_mut() {
        client.finish()?;
    }
    bench.children.check()?;
    Ok(rate)
}

fn readable(clients: &[(client::Http, BenchCall)]) -> Result<Vec<usize>, BenchError> {
    let mut fds: Vec<PollFd<'_>> =
        clients.iter().map(|(client, _)| PollFd::new(client.stream(), PollFlags::IN)).collect();
    let second = Timespec { tv_sec: 1, tv_nsec: 0 };
    poll(&mut fds, Some(&second)).map_err(|error| BenchError::io("poll")(error.into()))?;
    Ok(fds.iter().enumerate().filter(|(_, fd)| !fd.revents().is_empty()).map(|(index, _)| index).collect())
}

fn start(bench: &Bench) -> Result<Figure, BenchError> {
    let mut samples = Samples::default();
    floors::plain_import(bench)?; // fills the page cache
    for _ in bench.rounds("start") {
        samples.begin_round();
        samples.take(TRUE, || true_times(bench, 10))?;
        samples.take(IMPORT, || timed(bench, 1, || floors::plain_import(bench)))?;
        for (name, pool) in BOTH {
            samples.take(name, || {
                let start = Instant::now();
                let _server = server::Http::start(bench, pool, "")?;
                Ok(vec![start.elapsed().as_secs_f64()])
            })?;
        }
    }
    let against_import = |subject: &str| samples.quantity(subject, samples.ratio(subject, IMPORT), Unit::Times);
    let mut figure = Figure::new("start", ALL[9].title, &samples);
    figure.lines = vec![ReportRow::new(
        "server start to ready, against the plain import of what it preloads",
        against_import(OURS),
        against_import(EMPTY),
        Goal::at_most(1.5, Unit::Times),
    )];
    figure.floors = samples.floors(&[IMPORT]);
    Ok(figure)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_are_those_of_the_figures() {
        assert_eq!(ALL.iter().map(|row| row.name).collect::<Vec<_>>(), NAMES);
    }
}
