//! What making and ending sandboxes costs, each figure beside a fork+exec of `/bin/true` in the same rounds:
//! `making [ROUNDS [LIVE]]`, as root for all of it. The guest is taken from beside this program.
//!
//! Not a test: the machine decides absolute times. Prints a Markdown table of medians and ratios; with `LIVE`, also what it costs
//! while so many sandboxes live.

use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use proto::{Decoder, FromGuest, ToGuest, encode_message};
use sandbox::native::{Cgroups, GuestBinary, Launcher, Native, NativeConfig};
use sandbox::{Backend, Group, KeptVolume, Level, Limits, Sandbox, SandboxSpec};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;

type Error = Box<dyn std::error::Error + Send + Sync>;

const AT_ONCE: usize = 50;

fn main() -> Result<(), Error> {
    sandbox::native::launcher_entry();
    let mut words = std::env::args().skip(1);
    let rounds: usize = words.next().map_or(Ok(40), |n| n.parse())?;
    let live: usize = words.next().map_or(Ok(0), |n| n.parse())?;
    let launcher = sandbox::native::spawn_launcher()?;
    let state = std::env::temp_dir().join(format!("sandpool-making-{}", std::process::id()));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let measured = runtime.block_on(measure(launcher, &state, rounds, live));
    let _ = std::fs::remove_dir_all(&state);
    measured?.print()
}

/// Samples by name, in order of first appearance.
#[derive(Default)]
struct Table {
    rows: Vec<(String, Vec<Duration>)>,
}

const TRUE: &str = "fork+exec of /bin/true";

impl Table {
    fn add(&mut self, name: &str, sample: Duration) {
        match self.rows.iter_mut().find(|(n, _)| *n == name) {
            Some((_, samples)) => samples.push(sample),
            None => self.rows.push((name.to_owned(), vec![sample])),
        }
    }

    #[allow(clippy::disallowed_methods, reason = "the unit of measure")]
    fn unit(&mut self) -> Result<(), Error> {
        for _ in 0..3 {
            let start = Instant::now();
            Command::new("/bin/true").status()?;
            self.add(TRUE, start.elapsed());
        }
        Ok(())
    }

    fn print(mut self) -> Result<(), Error> {
        let mut out = std::io::stdout().lock();
        self.rows.iter_mut().for_each(|(_, samples)| samples.sort());
        let unit = self.rows.iter().find(|(n, _)| *n == TRUE).map_or(1.0, |(_, s)| s[s.len() / 2].as_secs_f64());
        writeln!(out, "| what | n | median | × true | p95 × true |\n|---|---|---|---|---|")?;
        for (name, samples) in &self.rows {
            let (median, late) = (samples[samples.len() / 2].as_secs_f64(), samples[samples.len() * 95 / 100]);
            let (ratio, late) = (median / unit, late.as_secs_f64() / unit);
            writeln!(out, "| {name} | {} | {:.2} ms | {ratio:.1} | {late:.1} |", samples.len(), median * 1e3)?;
        }
        Ok(())
    }
}

fn spec() -> SandboxSpec {
    SandboxSpec {
        groups: vec![Group { name: "making".into(), memory_bytes: None, cpu_millis: None }],
        limits: Limits {
            memory_bytes: 256 << 20,
            cpu_millis: 2000,
            pids: 256,
            disk_bytes: 256 << 20,
            disk_inodes: 20_000,
        },
        runtime: vec![],
        files: vec![("/opt/sandpool/driver.py".into(), guest::kernels::PYTHON_DRIVER.as_bytes().to_vec())],
        volumes: vec![],
        kept: None,
        egress: false,
        browser: None,
    }
}

fn conversation(number: usize) -> SandboxSpec {
    let kept = KeptVolume { name: format!("{number:064x}"), bytes: 64 << 20, inodes: 5000 };
    SandboxSpec { kept: Some(kept), ..spec() }
}

async fn measure(launcher: Launcher, state: &Path, rounds: usize, live: usize) -> Result<Table, Error> {
    let own = std::env::current_exe()?;
    let config = NativeConfig {
        state_dir: state.to_owned(),
        runtime_dir: None,
        guest: GuestBinary::Path(own.with_file_name("sandpool-guest")),
        zygote: GuestBinary::Path(own.with_file_name("libsandpool_zygote.so")),
        label: "making".into(),
        exclusive: false,
        mode: None,
        cgroups: Cgroups::default(),
        floor: Level::Basic,
        spares: sandbox::native::SPARES,
        restarts: false,
        keep_free: sandbox::native::KeepFree::default(),
    };
    let (native, _) = Native::start(launcher, config).await?;
    let mut table = Table::default();
    one_by_one(&native, rounds, &mut table).await?;
    conversations(&native, rounds / 2, &mut table).await?;
    at_once(&native, &mut table).await?;
    if live > 0 {
        many(&native, live, &mut table).await?;
    }
    let start = Instant::now();
    native.shutdown().await;
    table.add("shutdown", start.elapsed());
    Ok(table)
}

async fn one_by_one(native: &Native, rounds: usize, table: &mut Table) -> Result<(), Error> {
    // So that all sandboxes of the rounds find their group.
    let _first = native.create(&spec()).await?;
    for _ in 0..rounds {
        table.unit()?;
        let sandbox = made(native, &spec(), "back to back", table).await?;
        let start = Instant::now();
        sandbox.destroy().await?;
        table.add("destroy, nothing left", start.elapsed());
    }
    for _ in 0..rounds {
        // Calls rarely follow each other at once; a launcher has the time between them for itself.
        tokio::time::sleep(Duration::from_millis(40)).await;
        table.unit()?;
        made(native, &spec(), "40 ms apart", table).await?.destroy().await?;
    }
    Ok(())
}

async fn made(native: &Native, spec: &SandboxSpec, how: &str, table: &mut Table) -> Result<Box<dyn Sandbox>, Error> {
    let start = Instant::now();
    let sandbox = native.create(spec).await?;
    table.add(&format!("create, {how}"), start.elapsed());
    hello(&*sandbox).await?;
    table.add(&format!("create to guest's hello, {how}"), start.elapsed());
    Ok(sandbox)
}

async fn conversations(native: &Native, rounds: usize, table: &mut Table) -> Result<(), Error> {
    for number in 0..rounds {
        tokio::time::sleep(Duration::from_millis(40)).await;
        table.unit()?;
        made(native, &conversation(number), "a new conversation", table).await?.destroy().await?;
        for _ in 0..3 {
            tokio::time::sleep(Duration::from_millis(40)).await;
            made(native, &conversation(number), "a conversation's next call", table).await?.destroy().await?;
        }
    }
    Ok(())
}

async fn at_once(native: &Native, table: &mut Table) -> Result<(), Error> {
    let start = Instant::now();
    let all = futures_of(native, AT_ONCE, start).await?;
    let whole = start.elapsed();
    for (_, took) in &all {
        table.add(&format!("create, {AT_ONCE} at once"), *took);
    }
    table.add(&format!("share of one, {AT_ONCE} at once"), whole / AT_ONCE as u32);
    end_all(all, table, &format!("destroy, {AT_ONCE} at once, share of one")).await
}

type Timed = (Box<dyn Sandbox>, Duration);

async fn futures_of(native: &Native, count: usize, start: Instant) -> Result<Vec<Timed>, Error> {
    let spec = spec();
    let one = || async {
        let sandbox = native.create(&spec).await?;
        hello(&*sandbox).await?;
        Ok::<_, Error>((sandbox, start.elapsed()))
    };
    let mut waiting: Vec<_> = (0..count).map(|_| Box::pin(one())).collect();
    let mut done = Vec::new();
    std::future::poll_fn(|context| {
        let mut failed = None;
        waiting.retain_mut(|future| match future.as_mut().poll(context) {
            std::task::Poll::Ready(Ok(made)) => {
                done.push(made);
                false
            }
            std::task::Poll::Ready(Err(e)) => {
                failed = Some(e);
                false
            }
            std::task::Poll::Pending => true,
        });
        match failed {
            Some(e) => std::task::Poll::Ready(Err(e)),
            None if waiting.is_empty() => std::task::Poll::Ready(Ok(())),
            None => std::task::Poll::Pending,
        }
    })
    .await?;
    Ok(done)
}

async fn end_all(all: Vec<Timed>, table: &mut Table, name: &str) -> Result<(), Error> {
    let (start, count) = (Instant::now(), all.len() as u32);
    let mut ends = JoinSet::new();
    for (sandbox, _) in all {
        ends.spawn(async move { sandbox.destroy().await });
    }
    while let Some(ended) = ends.join_next().await {
        ended??;
    }
    table.add(name, start.elapsed() / count);
    Ok(())
}

async fn many(native: &Native, live: usize, table: &mut Table) -> Result<(), Error> {
    let mut all: Vec<Timed> = Vec::new();
    for target in [10, live] {
        while all.len() < target {
            all.push((native.create(&spec()).await?, Duration::ZERO));
        }
        for _ in 0..40 {
            tokio::time::sleep(Duration::from_millis(20)).await;
            table.unit()?;
            made(native, &spec(), &format!("{target} live"), table).await?.destroy().await?;
        }
    }
    end_all(all, table, &format!("destroy, {live} at once, share of one")).await
}

async fn hello(sandbox: &dyn Sandbox) -> Result<(), Error> {
    let mut stream = sandbox.connect().await?;
    let mut bytes = Vec::new();
    encode_message(&mut bytes, 1, &ToGuest::Hello { version: proto::VERSION })?;
    stream.write_all(&bytes).await?;
    let (mut decoder, mut buffer) = (Decoder::default(), vec![0; 4096]);
    loop {
        while let Some(frame) = decoder.next_frame()? {
            if matches!(frame.message::<FromGuest>()?, FromGuest::Hello { .. }) {
                return Ok(());
            }
        }
        match stream.read(&mut buffer).await? {
            0 => return Err("the guest is gone".into()),
            n => decoder.push(&buffer[..n]),
        }
    }
}
