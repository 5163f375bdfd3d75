//! Describes the machine of a measurement: enough to compare results, without anything that identifies the machine.

use std::path::Path;

use serde::Serialize;

use crate::memory::kilobytes;
use crate::process::{Children, command, run};

#[derive(Debug, Clone, Serialize)]
pub(crate) struct Machine {
    pub processor: String,
    pub cores: usize,
    pub memory_gib: f64,
    pub kernel: String,
}

pub(crate) fn describe() -> Machine {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let cpus = read("/proc/cpuinfo");
    let model = cpus.lines().find(|line| line.starts_with("model name"));
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let kib = kilobytes(&read("/proc/meminfo"), "MemTotal:").unwrap_or(0.0);
    Machine {
        processor: model.and_then(|line| line.split(": ").nth(1)).unwrap_or("unknown").trim().to_owned(),
        cores: std::thread::available_parallelism().map_or(1, Into::into),
        memory_gib: (kib / 104_857.6).round() / 10.0,
        // The suffixes that distributors or providers add are removed.
        kernel: release.split(|c: char| c != '.' && !c.is_ascii_digit()).next().unwrap_or_default().to_owned(),
    }
}

/// Returns the versions of everything that is measured.
pub(crate) fn versions(
    mut versions: Vec<(String, String)>,
    alternatives: Option<&Path>,
    children: &Children,
) -> Vec<(String, String)> {
    let Some(dir) = alternatives else { return versions };
    let code = "from importlib.metadata import distributions as all\n\
                for d in all(): print(d.name.lower().replace('_', '-'), d.version)";
    let mut python = command(dir.join("python/bin/python"));
    let listed = run(python.args(["-I", "-c", code]), children).map(|output| output.stdout).unwrap_or_default();
    let listed = String::from_utf8_lossy(&listed).into_owned();
    for name in ["ipykernel", "jupyter-client", "pyzmq", "jupyter-kernel-gateway", "mcp-run-python", "deno"] {
        let version = listed.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        versions.extend(version.map(|version| (name.into(), version.into())));
    }
    let playwright = dir.join("playwright/node_modules/@playwright/mcp/package.json");
    let package = std::fs::read_to_string(playwright).ok().and_then(|text| serde_json::from_str(&text).ok());
    let package: serde_json::Value = package.unwrap_or_default();
    versions.extend(package["version"].as_str().map(|version| ("@playwright/mcp".into(), version.into())));
    if let Ok(output) = run(command("bwrap").arg("--version"), children) {
        let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        versions.extend(text.split_once(' ').map(|(name, version)| (name.to_owned(), version.to_owned())));
    }
    versions
}
