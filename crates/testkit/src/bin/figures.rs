//! Figures of the first way, each beside a fork+exec of `/bin/true` in the same rounds: `figures SANDPOOL PYTHON [ROUNDS]`.
//!
//! Not a test: the machine decides absolute times. Prints a Markdown table of medians and ratios.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use proto::{Deadline, Decoder, FromGuest, KernelSpec, Language, ToGuest, encode_message};
use sandbox::native::{Cgroups, GuestBinary, Launcher, Native, NativeConfig};
use sandbox::{Backend, Group, GuestStream, Level, Limits, SandboxSpec};
use serde_json::json;
use testkit::client::Client;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

type Error = Box<dyn std::error::Error>;

fn main() -> Result<(), Error> {
    sandbox::native::launcher_entry();
    let mut words = std::env::args().skip(1);
    let (Some(sandpool), Some(python)) = (words.next(), words.next()) else {
        return Err("usage: figures SANDPOOL PYTHON [ROUNDS]".into());
    };
    let rounds: usize = words.next().map_or(Ok(20), |n| n.parse())?;
    let launcher = sandbox::native::spawn_launcher()?;
    let state = std::env::temp_dir().join(format!("sandpool-figures-{}", std::process::id()));
    let mut table = Table::default();
    let cold = tokio::runtime::Runtime::new()?.block_on(cold(launcher, &state, &python, rounds, &mut table));
    let warm = cold.and_then(|()| over_stdio(&sandpool, &state, rounds, &mut table));
    let _ = std::fs::remove_dir_all(&state);
    warm?;
    table.print()?;
    Ok(())
}

/// Samples by name, in order of first appearance.
#[derive(Default)]
struct Table {
    rows: Vec<(&'static str, Vec<Duration>)>,
    memory: Vec<String>,
}

impl Table {
    fn add(&mut self, name: &'static str, sample: Duration) {
        match self.rows.iter_mut().find(|(n, _)| *n == name) {
            Some((_, samples)) => samples.push(sample),
            None => self.rows.push((name, vec![sample])),
        }
    }

    fn print(mut self) -> Result<(), Error> {
        let mut out = std::io::stdout().lock();
        for (_, samples) in &mut self.rows {
            samples.sort();
        }
        let unit = self.rows.iter().find(|(n, _)| *n == TRUE).map_or(Duration::ZERO, |(_, s)| s[s.len() / 2]);
        writeln!(out, "| what | median | × true |\n|---|---|---|")?;
        for (name, samples) in &self.rows {
            let median = samples[samples.len() / 2];
            let ratio = median.as_secs_f64() / unit.as_secs_f64();
            writeln!(out, "| {name} | {:.2} ms | {ratio:.2} |", median.as_secs_f64() * 1e3)?;
        }
        self.memory.iter().try_for_each(|line| writeln!(out, "{line}"))?;
        Ok(())
    }
}

const TRUE: &str = "fork+exec of /bin/true";

#[allow(clippy::disallowed_methods, reason = "the unit of measure, and the program that is measured")]
fn time_true(table: &mut Table) -> Result<(), Error> {
    for _ in 0..5 {
        let start = Instant::now();
        Command::new("/bin/true").status()?;
        table.add(TRUE, start.elapsed());
    }
    Ok(())
}

/// Sandbox, cold interpreter, first print, end: through the back end itself, no pool.
async fn cold(launcher: Launcher, state: &Path, python: &str, rounds: usize, table: &mut Table) -> Result<(), Error> {
    let own = std::env::current_exe()?;
    let config = NativeConfig {
        state_dir: state.to_owned(),
        runtime_dir: None,
        guest: GuestBinary::Path(own.with_file_name("sandpool-guest")),
        zygote: GuestBinary::Path(own.with_file_name("libsandpool_zygote.so")),
        label: "figures".into(),
        exclusive: false,
        mode: None,
        cgroups: Cgroups::default(),
        floor: Level::Basic,
        spares: sandbox::native::SPARES,
        restarts: false,
        keep_free: sandbox::native::KeepFree::default(),
    };
    let (native, _) = Native::start(launcher, config).await?;
    let venv = Path::new(python).parent().and_then(Path::parent).ok_or("PYTHON is not in an environment")?;
    let spec = SandboxSpec {
        groups: vec![Group { name: "figures".into(), memory_bytes: None, cpu_millis: None }],
        limits: Limits {
            memory_bytes: 2 << 30,
            cpu_millis: 2000,
            pids: 256,
            disk_bytes: 1 << 30,
            disk_inodes: 100_000,
        },
        runtime: vec![venv.to_owned()].into_iter().chain(base_of(venv)).filter(|p| !p.starts_with("/usr")).collect(),
        files: vec![("/opt/sandpool/driver.py".into(), guest::kernels::PYTHON_DRIVER.as_bytes().to_vec())],
        volumes: vec![],
        kept: None,
        egress: false,
        browser: None,
    };
    for _ in 0..rounds {
        time_true(table)?;
        let start = Instant::now();
        let sandbox = native.create(&spec).await?;
        let mut guest = Guest { stream: sandbox.connect().await?, decoder: Decoder::default() };
        guest.ask(1, &ToGuest::Hello { version: proto::VERSION }).await?;
        table.add("sandbox: create to guest's hello", start.elapsed());
        guest.ask(2, &ToGuest::StartKernel { kernel: 1, spec: kernel(python), warm: false }).await?;
        let deadline = Deadline { after_ms: 30_000, grace_ms: 1000 };
        let run = ToGuest::Run {
            kernel: 1,
            code: "print(1)".into(),
            env: std::collections::BTreeMap::new(),
            deadline,
            forward_bytes: 1 << 20,
            keep_over: None,
        };
        guest.ask(3, &run).await?;
        table.add("sandbox: create to first print, cold Python", start.elapsed());
        let start = Instant::now();
        guest.ask(4, &run).await?;
        table.add("warm `print(1)`, guest and kernel alone", start.elapsed());
        let start = Instant::now();
        sandbox.destroy().await?;
        table.add("sandbox: destroy, nothing left", start.elapsed());
    }
    native.shutdown().await;
    Ok(())
}

fn base_of(venv: &Path) -> Option<PathBuf> {
    let text = std::fs::read_to_string(venv.join("pyvenv.cfg")).ok()?;
    let home = text.lines().find_map(|l| l.strip_prefix("home = "))?;
    Path::new(home).parent().map(Path::to_owned)
}

fn kernel(python: &str) -> KernelSpec {
    let env =
        [("PATH", "/usr/bin:/bin"), ("HOME", "/workspace"), ("OPENBLAS_NUM_THREADS", "1"), ("IPYTHONDIR", "/tmp/i")];
    KernelSpec {
        language: Language::Python,
        argv: [python, "-I", "-X", "utf8", "/opt/sandpool/driver.py"].map(String::from).to_vec(),
        env: env.map(|(k, v)| (k.to_owned(), v.to_owned())).into(),
        cwd: "/workspace".into(),
        merge_output: false,
    }
}

struct Guest {
    stream: GuestStream,
    decoder: Decoder,
}

impl Guest {
    /// Sends one request and reads up to the answer that ends it.
    async fn ask(&mut self, call: u64, message: &ToGuest) -> Result<(), Error> {
        let mut bytes = Vec::new();
        encode_message(&mut bytes, call, message)?;
        self.stream.write_all(&bytes).await?;
        let mut buffer = vec![0; 64 << 10];
        loop {
            while let Some(frame) = self.decoder.next_frame()? {
                if frame.kind != proto::FrameKind::Message {
                    continue;
                }
                match frame.message::<FromGuest>()? {
                    FromGuest::Failed { message, .. } => return Err(message.into()),
                    FromGuest::Hello { .. } | FromGuest::KernelReady { .. } | FromGuest::RunEnd { .. } => return Ok(()),
                    _ => {}
                }
            }
            match self.stream.read(&mut buffer).await? {
                0 => return Err("the guest is gone".into()),
                n => self.decoder.push(&buffer[..n]),
            }
        }
    }
}

/// The same as a client sees it.
#[allow(clippy::disallowed_methods, reason = "the unit of measure, and the program that is measured")]
fn over_stdio(sandpool: &str, state: &Path, rounds: usize, table: &mut Table) -> Result<(), Error> {
    let mut command = Command::new(sandpool);
    command.args(["stdio", "--dialect", "agentrun", "--log", "warn", "--state-dir"]).arg(state);
    let mut client = Client::start(command);
    // Wait for the pool: a first context.
    let first = client.call("create_context", json!({"name": "first"})).field("context_id");
    client.call("run_code", json!({"context_id": first, "code": "print(1)"}));
    for round in 0..rounds {
        time_true(table)?;
        let start = Instant::now();
        let id = client.call("create_context", json!({"name": format!("c{round}")})).field("context_id");
        table.add("stdio: create_context (from the pool when it is full)", start.elapsed());
        client.call("run_code", json!({"context_id": id, "code": "print(1)"}));
        table.add("stdio: create_context + first `print(1)`", start.elapsed());
        for _ in 0..20 {
            let start = Instant::now();
            client.call("run_code", json!({"context_id": first, "code": "print(1)"}));
            table.add("stdio: warm `print(1)`", start.elapsed());
            let start = Instant::now();
            client.call("list_contexts", json!({}));
            table.add("stdio: list_contexts (no sandbox)", start.elapsed());
        }
        if round == 0 {
            table.memory = memory(client.pid());
        }
        let start = Instant::now();
        client.call("stop_context", json!({"context_id": id}));
        table.add("stdio: stop_context", start.elapsed());
    }
    client.finish();
    Ok(())
}

/// Private memory of the guests and kernels below the server.
fn memory(server: u32) -> Vec<String> {
    let mut lines = vec![];
    for (name, want) in [("guest", "sandpool-guest"), ("Python kernel, after a cell", "driver.py")] {
        let sizes: Vec<u64> = descendants(server)
            .into_iter()
            .filter(|pid| {
                std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|c| String::from_utf8_lossy(&c).contains(want))
            })
            .filter_map(private_kb)
            .collect();
        if let Some(most) = sizes.iter().max() {
            lines.push(format!("private memory of a {name}: {most} KiB (largest of {})", sizes.len()));
        }
    }
    lines
}

fn descendants(root: u32) -> Vec<u32> {
    let children = |pid: u32| -> Vec<u32> {
        std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))
            .unwrap_or_default()
            .split_whitespace()
            .filter_map(|p| p.parse().ok())
            .collect()
    };
    let mut found = children(root);
    let mut next = 0;
    while let Some(&pid) = found.get(next) {
        found.extend(children(pid));
        next += 1;
    }
    found
}

fn private_kb(pid: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let field = |name: &str| -> u64 {
        text.lines()
            .find_map(|l| l.strip_prefix(name))
            .and_then(|l| l.split_whitespace().next()?.parse().ok())
            .unwrap_or(0)
    };
    Some(field("Private_Clean:") + field("Private_Dirty:"))
}
