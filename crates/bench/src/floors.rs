//! The unit of measure, and floors that are shown beside the figures. Nothing on this machine can be faster than a
//! floor.

use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::time::Instant;

use crate::process::{Process, command, run};
use crate::{Bench, BenchError};

/// The unit of measure, `T`.
pub(crate) const TRUE: &str = "fork+exec of /bin/true";
pub(crate) const PIPE: &str = "pipe ping-pong, two processes";
pub(crate) const CELL: &str = "bare run_cell";
pub(crate) const IMPORT: &str = "plain import";
pub(crate) const NODE: &str = "a new node process";

/// Measures `T` as many times as requested. It uses `posix_spawn`, the fastest way to start a process.
pub(crate) fn true_times(bench: &Bench, times: usize) -> Result<Vec<f64>, BenchError> {
    timed(bench, times, || command("/bin/true").status().map(drop).map_err(BenchError::io("cannot start `/bin/true`")))
}

pub(crate) fn timed(
    bench: &Bench,
    times: usize,
    mut work: impl FnMut() -> Result<(), BenchError>,
) -> Result<Vec<f64>, BenchError> {
    let one = |_| {
        bench.children.check()?;
        let start = Instant::now();
        work()?;
        Ok(start.elapsed().as_secs_f64())
    };
    (0..times).map(one).collect()
}

/// Sends a byte to `cat` and back.
pub(crate) struct PingPong {
    process: Process,
    pipes: (std::process::ChildStdin, std::process::ChildStdout),
}

impl PingPong {
    pub(crate) fn start(bench: &Bench) -> Result<Self, BenchError> {
        let mut process =
            Process::start(command("/bin/cat").stdin(Stdio::piped()).stdout(Stdio::piped()), &bench.children)?;
        let pipes = process.pipes().ok_or_else(|| BenchError::Said("no pipes".into()))?;
        Ok(Self { process, pipes })
    }

    pub(crate) fn times(&mut self, bench: &Bench, times: usize) -> Result<Vec<f64>, BenchError> {
        let Self { pipes: (input, output), process } = self;
        timed(bench, times, || {
            let there = input.write_all(b"x").and_then(|()| output.read_exact(&mut [0]));
            there.map_err(BenchError::io(&format!("process {}", process.id())))
        })
    }
}

/// Sets the environment that our kernels have, as far as it matters for speed and memory.
pub(crate) fn quiet(command: &mut Command, bench: &Bench) {
    for name in ["OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"] {
        command.env(name, bench.subject.threads.to_string());
    }
    command.env("HOME", bench.workplace.path()).env("TMPDIR", bench.workplace.path());
    command.env("MPLCONFIGDIR", bench.workplace.path().join("matplotlib"));
    command.env("PYTHONDONTWRITEBYTECODE", "1");
}

/// Runs a process that imports the modules that the warm interpreter has imported.
pub(crate) fn plain_import(bench: &Bench) -> Result<(), BenchError> {
    let code = format!("import IPython.core.interactiveshell, {}", bench.subject.preload.join(", "));
    let mut python = command(&bench.subject.python);
    quiet(&mut python, bench);
    run(python.args(["-I", "-B", "-c", &code]).env("MPLBACKEND", "agg"), &bench.children).map(drop)
}

pub(crate) fn plain_node(bench: &Bench) -> Result<(), BenchError> {
    let node = bench.subject.node.as_ref().ok_or_else(|| BenchError::Said("no Node on this machine".into()))?;
    run(command(node).args(["-e", "console.log(1)"]), &bench.children).map(drop)
}
