//! Runs the probe: outside, where everything has to work, and in a sandbox, where nothing may; with the oracle after each attempt.
//!
//! A program and not a test function, because it has to be a single thread when it starts its launcher, and because it is run as
//! different users: `tests/probe.rs` starts it in each mode. It says one line per attempt and ends with 1 when something is wrong.

mod guest;
mod host;

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use guest::Guest;
use host::{Facts, Left};
use sandbox::native::{self, Cgroups, GuestBinary, Mode, Native, NativeConfig};
use sandbox::{Backend, Group, Level, Limits, SandboxSpec};
use testkit::probe::{ATTEMPTS, Attempt, Expect, Outcome, Report};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

struct Args {
    probe: PathBuf,
    guest: PathBuf,
    state: PathBuf,
    mode: Mode,
}

fn main() -> ExitCode {
    native::launcher_entry();
    match args().ok_or_else(|| "usage: hostile PROBE GUEST STATE_DIR root|sub|single".into()).and_then(run) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(wrong) => {
            say(&format!("{wrong} wrong"));
            ExitCode::FAILURE
        }
        Err(e) => {
            say(&format!("error: {e}"));
            ExitCode::FAILURE
        }
    }
}

fn args() -> Option<Args> {
    let mut words = std::env::args().skip(1);
    let (probe, guest, state) = (words.next()?.into(), words.next()?.into(), words.next()?.into());
    let mode = match words.next()?.as_str() {
        "root" => Mode::Root,
        "sub" => Mode::Sub,
        "single" => Mode::Single,
        _ => return None,
    };
    Some(Args { probe, guest, state, mode })
}

fn say(line: &str) {
    let _ = writeln!(io::stdout(), "{line}");
}

/// Returns how much was wrong.
fn run(args: Args) -> Result<usize> {
    host::become_subreaper()?;
    let launcher = native::spawn_launcher()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(attack(&args, launcher))
}

async fn attack(args: &Args, launcher: native::Launcher) -> Result<usize> {
    let canary = host::Canary::listen()?;
    let outside = match args.mode {
        Mode::Root => outside(&args.probe, canary.name())?,
        // Shown by root; a user's own privileges prove nothing more.
        Mode::Sub | Mode::Single => BTreeMap::new(),
    };
    canary.take_visitors();
    let label = format!("hostile-{}", std::process::id());
    let config = NativeConfig {
        state_dir: args.state.clone(),
        runtime_dir: Some(args.state.join("run")),
        guest: GuestBinary::Path(args.guest.clone()),
        zygote: GuestBinary::Path(args.guest.with_file_name("libsandpool_zygote.so")),
        label: label.clone(),
        exclusive: true,
        mode: Some(args.mode),
        floor: Level::Basic,
        cgroups: Cgroups::default(),
        spares: sandbox::native::SPARES,
        restarts: false,
        keep_free: sandbox::native::KeepFree::default(),
    };
    let (native, isolation) = Native::start(launcher, config).await?;
    say(&format!("mode {:?}, {:?}, missing: {:?}", native.mode(), isolation.level, isolation.missing));

    let before = Left::before(&args.state, &label);
    let mut trial = Trial { facts: Facts::gather(), wrong: 0 };
    let (attacked, peer) = (native.create(&spec()).await?, native.create(&spec()).await?);
    let (mut guest, mut other) = (Guest::open(&*attacked).await?, Guest::open(&*peer).await?);
    guest.write_file("probe", &std::fs::read(&args.probe)?).await?;
    guest.shell("chmod +x probe").await?;

    for attempt in ATTEMPTS {
        let found = inside(&mut guest, attempt, canary.name()).await?;
        trial.judge(attempt, outside.get(attempt.name), &found, args.mode == Mode::Root);
        trial.oracle(attempt.name, &mut guest, &mut other).await;
    }
    trial.check("K66", "the canary was not visited", canary.take_visitors() == 0);
    beyond_the_table(&mut trial, &mut guest, &mut other).await?;

    attacked.destroy().await?;
    other.ping().await?;
    peer.destroy().await?;
    drop((guest, other, attacked, peer));
    native.shutdown().await;
    let after = Left::count_when_settled(&args.state, &label, &before).await;
    trial.check("K55", &format!("nothing is left behind: {}", after.compared_with(&before)), after == before);
    Ok(trial.wrong)
}

fn spec() -> SandboxSpec {
    SandboxSpec {
        groups: vec![Group { name: "hostile".into(), memory_bytes: None, cpu_millis: None }],
        limits: Limits {
            memory_bytes: 512 << 20,
            cpu_millis: 2000,
            pids: 200,
            disk_bytes: 128 << 20,
            disk_inodes: 20_000,
        },
        runtime: Vec::new(),
        files: Vec::new(),
        volumes: vec![],
        kept: None,
        egress: false,
        browser: None,
    }
}

/// The probe, plainly, with a descriptor left open for it to find.
#[allow(clippy::disallowed_methods, reason = "the probe's run outside any sandbox")]
fn outside(probe: &Path, canary: &str) -> Result<BTreeMap<String, Report>> {
    let victim = std::process::id().to_string();
    let output = std::process::Command::new("/bin/sh")
        .args(["-c", r#"exec "$0" "$@" 7</"#])
        .arg(probe)
        .args(["--all", "--victim", &victim, "--canary", canary])
        .output()?;
    let reports = String::from_utf8(output.stdout)?;
    reports.lines().map(|l| Ok(serde_json::from_str::<Report>(l)?)).map(|r| r.map(|r| (r.name.clone(), r))).collect()
}

async fn inside(guest: &mut Guest, attempt: &Attempt, canary: &str) -> Result<Report> {
    let victim = std::process::id().to_string();
    let argv = ["/workspace/probe", "--row", attempt.name, "--target", "1", "--victim", &victim, "--canary", canary];
    let done = guest.exec(&argv, "/workspace").await?;
    serde_json::from_str(done.stdout.trim())
        .map_err(|e| format!("`{}`: {e}: {:?}, {}", attempt.name, done.status, done.stderr).into())
}

struct Trial {
    facts: Facts,
    wrong: usize,
}

impl Trial {
    fn check(&mut self, row: &str, what: &str, holds: bool) {
        if !holds {
            self.wrong += 1;
        }
        say(&format!("{} {row} {what}", if holds { "ok   " } else { "WRONG" }));
    }

    fn judge(&mut self, attempt: &Attempt, outside: Option<&Report>, inside: &Report, shown: bool) {
        let as_expected = match attempt.inside {
            Expect::Refused => inside.outcome != Outcome::Allowed,
            Expect::Works => inside.outcome == Outcome::Allowed,
        };
        let proof = match outside {
            Some(Report { outcome: Outcome::Allowed, .. }) => String::new(),
            Some(other) => match excuse(other) {
                Some(why) => format!(" (not shown outside: {why})"),
                None => " (FAILED OUTSIDE)".to_owned() + &other.detail,
            },
            None => " (shown as root)".to_owned(),
        };
        let proven = !shown || !proof.contains("FAILED");
        let Report { outcome, detail, .. } = inside;
        let what = format!("{}: {outcome:?}, {detail}{proof}", attempt.name);
        self.check(attempt.row, &what, as_expected && proven);
    }

    /// After every attempt: the attacked guest and its neighbour answer, and the host is as it was.
    async fn oracle(&mut self, after: &str, guest: &mut Guest, other: &mut Guest) {
        let alive = guest.ping().await.is_ok();
        let unharmed = other.shell("echo canary").await.is_ok_and(|d| d.stdout == "canary\n");
        let now = Facts::gather();
        if !alive || !unharmed || now != self.facts {
            let difference = now.compared_with(&self.facts);
            self.check(
                "oracle",
                &format!("after {after}: guest {alive}, neighbour {unharmed}, host: {difference}"),
                false,
            );
            self.facts = now;
        }
    }
}

/// Why an attempt may fail outside: the kernel was built without the thing, or even root here lacks the right.
fn excuse(outside: &Report) -> Option<&'static str> {
    match (outside.name.as_str(), outside.detail.as_str()) {
        (_, "ENOSYS" | "EAFNOSUPPORT" | "EPROTONOSUPPORT") => Some("this kernel is without it"),
        _ if outside.outcome == Outcome::Absent => Some("there is no such thing on this host"),
        ("oom_score_adj", "EACCES") => Some("root is without CAP_SYS_RESOURCE here"),
        ("tiocsti", _) => Some("dev.tty.legacy_tiocsti is off"),
        _ => None,
    }
}

/// Rows that are not one attempt of the probe's.
async fn beyond_the_table(trial: &mut Trial, guest: &mut Guest, other: &mut Guest) -> Result<()> {
    // K44: the working directory of a call is a descriptor of the guest's.
    for cwd in ["/proc/self/fd/3", "/proc/1/cwd", "/proc/1/root", "../../..", "/nowhere"] {
        let done = guest.exec(&["/bin/sh", "-c", "ls /proc/self/cwd/ && pwd"], cwd).await;
        let out = done.as_ref().map(|d| d.stdout.clone()).unwrap_or_default();
        trial.check("K44", &format!("cwd `{cwd}` leads nowhere: {:?}", out.lines().next()), !out.contains("boot"));
    }

    // K51: things that are not files where files are read.
    guest.shell("mkfifo pipe; ln -s /proc/self/environ link; ln -s /etc/passwd out; mkdir -p dir").await?;
    for path in ["pipe", "link", "out", "dir", "/etc/passwd", "../etc/passwd", "/proc/1/mem"] {
        let started = std::time::Instant::now();
        let refused = guest.read_file(path).await.is_err();
        trial.check("K51", &format!("`{path}` is refused at once"), refused && started.elapsed().as_secs() < 1);
    }

    // K14: nothing is left in a keyring or in shared memory for the neighbour.
    guest.shell("echo secret > /tmp/left; echo secret > /dev/shm/left; echo secret > /data/left").await?;
    let seen = other.shell("cat /tmp/left /dev/shm/left /data/left 2>/dev/null").await?.stdout;
    trial.check("K14", "the neighbour sees none of the attacked one's files", seen.is_empty());

    // K31: a crash leaves no core.
    let crashed = guest.exec(&["/bin/sh", "-c", "kill -SEGV $$"], "/workspace").await?;
    let cores = guest.shell("ls | grep -c core").await?.stdout;
    trial.check("K31", &format!("a crash is {:?} and leaves no core", crashed.status), cores.trim() == "0");

    // K54: a tree made to resist its removal.
    let resist = "cd /data && for i in $(seq 200); do mkdir -p d && chmod 700 d && cd d; done; \
                  touch -- '-rf' \"$(printf 'a\\nb')\"; chmod 000 . ; cd /data && mkdir locked && touch locked/x && chmod 000 locked";
    guest.shell(resist).await?;

    // K67: everything that can be signalled is; the guest stays, and so does the host.
    let _ = guest.exec(&["/bin/sh", "-c", "kill -9 1; kill -9 -1"], "/workspace").await;
    trial.oracle("kill -9 -1", guest, other).await;
    trial.check("K67", "the guest answers after kill -9 -1", guest.shell("echo on").await?.stdout == "on\n");

    // K30: a command still works after all this, as the uid it has to have.
    let id = guest.shell("id -u; id -g; cat /proc/self/uid_map").await?;
    let (inner, map) = (id.stdout.starts_with("1000\n1000\n"), !id.stdout.contains(" 0 "));
    trial.check("K30", &format!("uid 1000 inside: {:?}", id.stdout), inner && (map || host::uid() != 0));

    // K10: every signal to PID 1 from inside. Last, because a guest that heeds one is gone.
    let _ = guest.shell("for s in 1 2 3 6 10 12 13 14 15 17 21 22; do kill -$s 1; done").await;
    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    trial.check("K10", "the guest answers after signals from inside", guest.ping().await.is_ok());
    Ok(())
}
