//! X18: one tenant runs the audit's attacks all at once. Another tenant gets right answers, loses nothing and keeps a warm interpreter.
//!
//! `make neighbours` runs the same against a release build, in quiet and noisy rounds by turns, and writes docs/neighbours.md.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::json;
use testkit::http::Mcp;
use testkit::pages::Pages;

use crate::noise::{self, Names, Noise};
use crate::support::{Service, Setup, eventually, neighbours_report, report};

/// The tenant that must not notice anything.
struct Victim {
    client: Mcp,
    context: String,
    page: String,
    /// How many files it has written. Each contains its number many times.
    files: usize,
}

/// As many as fit well into the victim's disk.
const KEPT: usize = 200;

/// What the victim does, in the words of the report.
type Deed = (&'static str, fn(&mut Victim));

const DEEDS: [Deed; 5] = [
    ("call a warm context", Victim::calls),
    ("create a context, first `import pandas`", Victim::creates),
    ("write a file and read it back", Victim::writes),
    ("list the tools", Victim::lists),
    ("look a name up and fetch a page", Victim::fetches),
];

impl Victim {
    fn new(service: &Service, page: String) -> Self {
        let mut client = service.client("canary", "sandpool");
        let made = client.good("create_context", json!({ "name": "victim" }));
        let context = made["context"].as_str().unwrap().to_owned();
        let mut victim = Self { client, context, page, files: 0 };
        victim.run("secret = 'canary-' + str(6 * 7)");
        victim
    }

    fn run(&mut self, code: &str) -> String {
        let context = self.context.clone();
        self.client.good("run_code", json!({ "code": code, "context": context }))["stdout"].as_str().unwrap().to_owned()
    }

    fn calls(&mut self) {
        assert_eq!(self.run("print(secret)"), "canary-42\n");
    }

    fn creates(&mut self) {
        let made = self.client.good("create_context", json!({}));
        let code = "import pandas\nprint(pandas.DataFrame({'n': [20, 22]}).n.sum())";
        let ran = self.client.good("run_code", json!({ "code": code, "context": made["context"] }));
        assert_eq!(ran["stdout"], "42\n", "{ran}");
        self.client.good("stop_context", json!({ "context": made["context"] }));
    }

    /// The oldest file is replaced when there are [`KEPT`] of them.
    fn path(number: usize) -> String {
        format!("kept-{}.txt", number % KEPT)
    }

    fn content(number: usize) -> String {
        format!("{number}\n").repeat(10_000)
    }

    fn writes(&mut self) {
        let (path, content) = (Self::path(self.files), Self::content(self.files));
        self.client.good("write_file", json!({ "path": path, "content": content, "context": self.context }));
        self.files += 1;
        self.reads(self.files - 1);
    }

    fn reads(&mut self, number: usize) {
        let code = format!("t = open({:?}).read()\nprint(len(t), set(t.split()))", Self::path(number));
        let expected = format!("{} {{'{number}'}}\n", Self::content(number).len());
        assert_eq!(self.run(&code), expected);
    }

    fn lists(&mut self) {
        let tools = self.client.request("tools/list", json!({}));
        assert!(tools["result"]["tools"].as_array().is_some_and(|tools| tools.len() >= 10), "{tools}");
    }

    fn fetches(&mut self) {
        let code = format!("import urllib.request\nprint(urllib.request.urlopen({:?}, timeout=60).status)", self.page);
        assert_eq!(self.run(&code), "200\n");
    }
}

/// The heading of what docs/neighbours.md says about figures that miss the goal.
const CAUSES: &str = "\n## What the goal misses, and why\n";

/// Times in milliseconds, one list for each of [`DEEDS`].
type Times = [Vec<f64>; DEEDS.len()];

fn watch(victim: &mut Victim, repeats: usize, times: &mut Times) {
    for _ in 0..repeats {
        for ((_, deed), times) in DEEDS.iter().zip(times.iter_mut()) {
            let start = Instant::now();
            deed(victim);
            times.push(start.elapsed().as_secs_f64() * 1000.0);
        }
    }
}

fn metric(service: &Service, name: &str) -> u64 {
    let page = service.account("canary").ask("GET", "/metrics", &[], b"").unwrap().text();
    let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {name}: {page}")).parse().unwrap()
}

#[test]
fn one_tenants_attacks_cost_another_tenant_nothing_but_time() {
    let pages = Pages::start().unwrap();
    let names = Names::start().unwrap();
    let settings = format!(
        "network.default = \"pages\"\n[dialect.sandpool]\ncpus = 1.0\nmemory_mb = 512\ndisk_mb = 64\npids = 128\n\
         timeout = 60\n[network.policy.pages]\nallow = [\"*.test\", \"*.test:{0}\"]\nprivate = [\"127.0.0.1:{0}\"]\n",
        pages.port
    );
    let quotas = [("blue", noise::QUOTAS)];
    let resolver = Some(names.address);
    let service = Service::with("noisy", Setup { settings: &settings, quotas: &quotas, resolver, ..Setup::default() });
    let measured = neighbours_report();
    let (rounds, repeats) = if measured.is_some() { (5, 40) } else { (1, 10) };

    let mut victim = Victim::new(&service, pages.url_at("quick.test", "/forms"));
    eventually("the warm interpreter is ready", || metric(&service, "sandpool_warm_ready") == 1);
    let memory = service.memory();
    let (attacker, url) = (service.account("blue"), pages.url_at("quick.test", "/forms"));
    let (mut quiet, mut noisy) = (Times::default(), Times::default());
    let mut made = Vec::new();
    let mut delays = Vec::new();
    for _ in 0..rounds {
        watch(&mut victim, repeats, &mut quiet);
        let noise = Noise::start(&attacker, &url, None);
        noise.begun();
        let sleeper = Sleeper::start();
        watch(&mut victim, repeats, &mut noisy);
        delays.extend(sleeper.stop());
        made.extend(noise.stop(&attacker));
    }

    // Which attack costs what: each of them alone.
    let mut alone = Vec::new();
    if measured.is_some() {
        for (name, _) in made.iter().take(made.len() / rounds) {
            let mut times = Times::default();
            let noise = Noise::start(&attacker, &url, Some(name));
            noise.begun();
            watch(&mut victim, repeats, &mut times);
            noise.stop(&attacker);
            alone.push((*name, times));
        }
    }

    // Nothing that was reported as written is lost.
    (victim.files.saturating_sub(KEPT)..victim.files).for_each(|number| victim.reads(number));
    assert_eq!(metric(&service, "sandpool_warm_restarts_total"), 0, "the warm interpreter died: {}", service.log());
    assert_eq!(metric(&service, "sandpool_warm_ready"), 1);
    let forks = metric(&service, "sandpool_warm_forks_total");
    victim.creates();
    assert!(metric(&service, "sandpool_warm_forks_total") > forks || metric(&service, "sandpool_pool_available") > 0);
    let after = service.memory();
    assert!(after < memory + (600 << 10), "{memory} kB, then {after} kB");

    let table = table(&mut quiet, &mut noisy);
    report(
        "X18",
        &format!(
            "all attacks at once: every answer right, {} files intact; {memory} kB, then {after} kB",
            victim.files
        ),
    );
    eprintln!("{table}\n{made:?}");
    if let Some(path) = measured {
        // What is written by hand below the figures stays.
        let old = std::fs::read_to_string(&path).unwrap_or_default();
        let causes = old.find(CAUSES).map_or(CAUSES, |at| &old[at..]);
        let figures =
            page(&table, &made, quiet[0].len()) + &alone_table(&mut quiet, &mut alone) + &sleepless(&mut delays);
        std::fs::write(&path, figures + causes).unwrap();
    }
    service.finish();
}

/// A thread that only sleeps, beside everything else: how late it wakes up is what the machine's scheduler costs anybody.
struct Sleeper {
    over: Arc<AtomicBool>,
    thread: JoinHandle<Vec<f64>>,
}

impl Sleeper {
    fn start() -> Self {
        const NAP: Duration = Duration::from_millis(5);
        let over = Arc::<AtomicBool>::default();
        let flag = over.clone();
        let thread = std::thread::spawn(move || {
            let mut delays = Vec::new();
            while !flag.load(Ordering::SeqCst) {
                let start = Instant::now();
                std::thread::sleep(NAP);
                delays.push((start.elapsed() - NAP).as_secs_f64() * 1000.0);
            }
            delays
        });
        Self { over, thread }
    }

    fn stop(self) -> Vec<f64> {
        self.over.store(true, Ordering::SeqCst);
        self.thread.join().expect("it only sleeps")
    }
}

fn sleepless(delays: &mut [f64]) -> String {
    let [half, most, nearly] = [at(delays, 0.5), at(delays, 0.99), at(delays, 0.999)];
    format!(
        "\n## The machine itself\n\nA thread of the test that only sleeps, and has nothing to do with Sandpool, woke up late in the noisy rounds by {half:.1} ms (p50),\n\
         {most:.1} ms (p99) and {nearly:.1} ms (p99.9). A call to a warm context is about ten such wake-ups one after another.\n"
    )
}

/// The p99 of each deed under each attack alone, against the quiet p99.
fn alone_table(quiet: &mut Times, alone: &mut [(&'static str, Times)]) -> String {
    let names: String = DEEDS.iter().map(|(name, _)| format!(" {name} |")).collect();
    let mut table = format!(
        "\n## One attack at a time\n\nThe p99 against the quiet p99, {} samples each.\n\n| attack |{names}\n|---|{}\n",
        alone.first().map_or(0, |(_, times)| times[0].len()),
        "---|".repeat(DEEDS.len())
    );
    for (name, times) in alone {
        let ratio =
            |(times, quiet): (&mut Vec<f64>, &mut Vec<f64>)| format!(" {:.1} |", at(times, 0.99) / at(quiet, 0.99));
        let ratios: String = times.iter_mut().zip(quiet.iter_mut()).map(ratio).collect();
        writeln!(table, "| {name} |{ratios}").unwrap();
    }
    table
}

fn at(times: &mut [f64], share: f64) -> f64 {
    times.sort_by(f64::total_cmp);
    times[((times.len() - 1) as f64 * share).round() as usize]
}

fn table(quiet: &mut Times, noisy: &mut Times) -> String {
    let mut table = "| what | quiet p50 | quiet p99 | noisy p50 | noisy p99 | p50 ratio | p99 ratio |\n|---|---|---|---|---|---|---|\n".to_owned();
    for ((name, _), (quiet, noisy)) in DEEDS.iter().zip(quiet.iter_mut().zip(noisy)) {
        let [a, b, c, d] = [at(quiet, 0.5), at(quiet, 0.99), at(noisy, 0.5), at(noisy, 0.99)];
        let (half, most) = (c / a, d / b);
        writeln!(table, "| {name} | {a:.1} ms | {b:.1} ms | {c:.1} ms | {d:.1} ms | {half:.1} | {most:.1} |").unwrap();
    }
    table
}

fn page(table: &str, made: &[(&'static str, u64)], samples: usize) -> String {
    let mut attacks: Vec<(&str, u64)> = Vec::new();
    for (name, rounds) in made {
        match attacks.iter_mut().find(|(known, _)| known == name) {
            Some((_, sum)) => *sum += rounds,
            None => attacks.push((name, *rounds)),
        }
    }
    let attacks: String = attacks.iter().map(|(name, rounds)| format!("| {name} | {rounds} |\n")).collect();
    format!(
        "# A noisy neighbour\n\n`make neighbours` writes the tables of this page with a release build; the last section is written by hand. Quiet and noisy\n\
         rounds alternate, with {samples} samples of each kind. In a noisy\n\
         round one tenant runs all of the attacks below at once, under its quotas ({}), while another tenant works. Every answer to that\n\
         tenant was right, no file of it was lost, and the warm interpreter was never restarted. The\n\
         attacking clients run at the lowest priority, because real clients would run on other machines. The goal is a p99 of at most five times the\n\
         quiet p99.\n\n{table}\n## The attacks\n\n| attack | rounds |\n|---|---|\n{attacks}",
        noise::QUOTAS.trim_matches(['{', '}', ' '])
    )
}
