//! The alternatives to Sandpool that are measured. `scripts/bench` installs them. Helpers in Python talk to those whose
//! protocol only Python libraries implement; they exchange lines of JSON with the benchmark, so that their rounds can
//! be interleaved with ours.

use std::path::Path;
use std::process::Stdio;

use serde_json::{Value, json};

use crate::client::{BenchCall, Client, Stdio as Mcp};
use crate::floors::quiet;
use crate::process::{LineChild, command, run};
use crate::{Bench, BenchError};

pub(crate) const IPYKERNEL: &str = "ipykernel";
pub(crate) const ORDINARY: &str = "ipykernel by jupyter_client";
pub(crate) const GATEWAY: &str = "Kernel Gateway";
pub(crate) const BUBBLEWRAP: &str = "bubblewrap + python";
pub(crate) const RUN_PYTHON: &str = "mcp-run-python";

/// Returns the directory of the installed alternatives, or an error if this one could not be installed.
pub(crate) fn installed<'a>(bench: &'a Bench, name: &str) -> Result<&'a Path, BenchError> {
    let dir = bench.alternatives.as_deref();
    let dir = dir.ok_or_else(|| BenchError::Said("not measured: no `--alternatives`".into()))?;
    match std::fs::read_to_string(dir.join(format!("{name}.failed"))) {
        Ok(why) => Err(BenchError::Said(format!("cannot be installed here: {}", why.trim()))),
        Err(_) => Ok(dir),
    }
}

/// A process that measures an alternative and replies with its measurements.
pub(crate) struct Helper(LineChild);

impl Helper {
    /// Starts the helper for kernels of ipykernel.
    pub(crate) fn ipykernel(bench: &Bench) -> Result<Self, BenchError> {
        let python = installed(bench, "ipykernel")?.join("python/bin/python");
        Self::start(bench, &python, "kernels.py", include_str!("helpers/kernels.py"))
    }

    pub(crate) fn gateway(bench: &Bench) -> Result<Self, BenchError> {
        let python = installed(bench, "kernel-gateway")?.join("python/bin/python");
        Self::start(bench, &python, "gateway.py", include_str!("helpers/gateway.py"))
    }

    /// Starts the helper for IPython's shell without a protocol around it, in the runtime that sandboxes use.
    pub(crate) fn bare(bench: &Bench) -> Result<Self, BenchError> {
        Self::start(bench, &bench.subject.python, "bare.py", include_str!("helpers/bare.py"))
    }

    fn start(bench: &Bench, python: &Path, name: &str, program: &str) -> Result<Self, BenchError> {
        let program = bench.workplace.write(name, program)?;
        let mut command = command(python);
        quiet(&mut command, bench);
        LineChild::start(command.arg("-I").arg(program).stderr(Stdio::null()), &bench.children).map(Self)
    }

    pub(crate) fn ask(&mut self, request: &Value) -> Result<Value, BenchError> {
        self.0.write(&format!("{request}\n"))?;
        let answer: Value =
            serde_json::from_slice(self.0.read()?).map_err(|error| BenchError::Said(format!("not JSON: {error}")))?;
        match answer["error"].as_str() {
            Some(why) => Err(BenchError::Said(why.to_owned())),
            None => Ok(answer),
        }
    }

    /// Returns the measured values.
    pub(crate) fn values(&mut self, request: &Value) -> Result<Vec<f64>, BenchError> {
        let answer = self.ask(request)?;
        let values =
            answer["values"].as_array().ok_or_else(|| BenchError::Said("the helper measured nothing".into()))?;
        Ok(values.iter().filter_map(Value::as_f64).collect())
    }

    /// Measures the time from nothing to the result of a first cell.
    pub(crate) fn first(&mut self, code: &str) -> Result<Vec<f64>, BenchError> {
        self.values(&json!({ "do": "start", "code": code }))
    }

    pub(crate) fn calls(&mut self, times: usize) -> Result<Vec<f64>, BenchError> {
        self.values(&json!({ "do": "call", "times": times, "code": "print(1)" }))
    }

    /// Opens kernels that stay alive. Returns how many there are now, and why there are no more.
    pub(crate) fn open(&mut self, count: usize, code: &str) -> Result<(u64, Option<String>), BenchError> {
        let answer = self.ask(&json!({ "do": "open", "count": count, "code": code }))?;
        Ok((answer["kernels"].as_u64().unwrap_or(0), answer["why"].as_str().map(str::to_owned)))
    }
}

/// Runs Python once in a sandbox of bubblewrap.
pub(crate) fn bubblewrap(bench: &Bench) -> Result<(), BenchError> {
    installed(bench, "bubblewrap")?;
    let mut command = command("bwrap");
    command.args(["--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]);
    command.args(["--tmpfs", "/tmp"]).arg(&bench.subject.python).args(["-I", "-B", "-c", "print(1)"]);
    let output = run(&mut command, &bench.children)?;
    if output.stdout == b"1\n" { Ok(()) } else { Err(BenchError::Said("it did not print 1".into())) }
}

/// Starts the MCP server mcp-run-python. Its start is measured, too.
pub(crate) fn run_python(bench: &Bench) -> Result<Mcp, BenchError> {
    let bin = installed(bench, "mcp-run-python")?.join("python/bin");
    let mut command = command(bin.join("mcp-run-python"));
    quiet(&mut command, bench);
    let path = format!("{}:/usr/local/bin:/usr/bin:/bin", bin.display());
    // The files that it downloaded during its installation are in the user's cache.
    command
        .envs(bench.subject.environment.iter().map(|(name, value)| (name, value)))
        .env("PATH", path)
        .arg("stdio")
        .stderr(Stdio::null());
    Mcp::start(&mut command, &bench.children)
}

pub(crate) fn run_python_call(server: &mut Mcp) -> Result<f64, BenchError> {
    let answer = server.call(&BenchCall::new("run_python_code", json!({ "python_code": "print(1)" })))?;
    match answer.result["content"][0]["text"].as_str().is_some_and(|text| text.contains("<output>\n1\n")) {
        true => Ok(answer.seconds),
        false => Err(BenchError::Said("it did not print 1".into())),
    }
}
