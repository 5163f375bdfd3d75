//! Compares the browser with Playwright MCP: the same page, the same Chromium, the same client, in interleaved rounds.
//!
//! Our side includes `sandpool stdio`, a sandbox, and the proxy with a policy. Their side is a browser on the host
//! without a sandbox and a proxy.

use std::path::Path;
use std::process::Stdio;

use serde_json::{Value, json};

use crate::alternatives::installed;
use crate::client::{BenchCall, Client, Stdio as Mcp, TimedResult};
use crate::figures::{EMPTY, OURS};
use crate::floors::{TRUE, true_times};
use crate::process::command;
use crate::report::{Against, Figure, Found, Goal, ReportRow, Unit};
use crate::server::{self, Pool};
use crate::site::Site;
use crate::stats::Samples;
use crate::{Bench, BenchError, memory};

pub(crate) const PLAYWRIGHT: &str = "Playwright MCP";
/// Playwright MCP without the half second that it waits after each action.
const UNSETTLED: &str = "Playwright MCP, --timeout-settle 0";

/// Host name under which a sandbox finds the page.
pub(crate) const NAME: &str = "shop.test";

/// Number of samples of each series in a round.
const TIMES: usize = 5;
/// Number of sandboxes, or servers, whose memory is measured.
const LOOKS: usize = 3;

/// A step on an open page: the names of its series, the call that performs it, and the goal for our time relative to
/// theirs.
struct Step {
    what: &'static str,
    ours: &'static str,
    theirs: &'static str,
    /// The series with `--timeout-settle 0`, and its goal.
    unsettled: Option<(&'static str, f64)>,
    share: Option<f64>,
    perform: Perform,
}

type Perform = fn(&mut Shop) -> Result<TimedResult, BenchError>;

const fn step(what: &'static str, [ours, theirs]: [&'static str; 2], share: Option<f64>, perform: Perform) -> Step {
    Step { what, ours, theirs, unsettled: None, share, perform }
}

const STEPS: &[Step] = &[
    step("warm `browser_goto`", ["goto, sandpool", "goto, Playwright MCP"], Some(0.6), Shop::goto),
    step("`browser_snapshot`", ["snapshot, sandpool", "snapshot, Playwright MCP"], Some(1.0), Shop::snapshot),
    Step {
        unsettled: Some(("click, Playwright MCP, --timeout-settle 0", 0.7)),
        ..step("`browser_click`", ["click, sandpool", "click, Playwright MCP"], Some(0.2), Shop::click)
    },
    step("`browser_type`", ["type, sandpool", "type, Playwright MCP"], Some(1.0), Shop::type_name),
    step("screenshot", ["screenshot, sandpool", "screenshot, Playwright MCP"], None, Shop::screenshot),
];

const FIRST: [&str; 3] = ["first goto, sandpool", "first goto, sandpool, empty pools", "first goto, Playwright MCP"];
const MEMORY: [&str; 3] = ["memory, sandpool", "memory, sandpool, empty pools", "memory, Playwright MCP"];
const CHARACTERS: [&str; 2] = ["characters, sandpool", "characters, Playwright MCP"];

pub(crate) fn measure(bench: &Bench) -> Result<Figure, BenchError> {
    let mut samples = Samples::default();
    let site = Site::start()?;
    first(bench, &mut samples, &site)?;
    warm(bench, &mut samples, &site)?;
    memory_of(bench, &mut samples, &site)?;
    let mut figure = Figure::new("browser", "the browser: a shop's page with fifty things", &samples);
    figure.lines = lines(&samples);
    let notes = [
        "`browser`: ours is in a sandbox and behind the proxy, the alternative is not; both have the same Chromium",
        "`browser`: beside ours another browser waits ready and shares the program's pages; with empty pools none does",
    ];
    figure.notes = notes.map(String::from).to_vec();
    Ok(figure)
}

/// Measures a sandbox, or a server, that has not been used before. The sample is the total of all calls that an agent
/// needs until it sees the page.
fn first(bench: &Bench, samples: &mut Samples, site: &Site) -> Result<(), BenchError> {
    for _ in bench.rounds("browser, first goto") {
        samples.begin_round();
        for (name, pool) in [(FIRST[0], Pool::Full), (FIRST[1], Pool::Empty)] {
            samples.take(TRUE, || true_times(bench, 2))?;
            samples.take(name, || Ok(vec![Shop::ours(bench, site, pool)?.opened]))?;
        }
        samples.take(FIRST[2], || Ok(vec![Shop::theirs(bench, site, &[])?.opened]))?;
    }
    Ok(())
}

fn warm(bench: &Bench, samples: &mut Samples, site: &Site) -> Result<(), BenchError> {
    let shop = Shop::ours(bench, site, Pool::Full).and_then(|shop| shop.with_pictures(bench, site));
    let mut ours = samples.need(OURS, shop)?;
    let mut theirs = samples.need(PLAYWRIGHT, Shop::theirs(bench, site, &[]))?;
    let mut unsettled = samples.need(UNSETTLED, Shop::theirs(bench, site, &["--timeout-settle", "0"]))?;
    for _ in bench.rounds("browser, warm") {
        samples.begin_round();
        samples.take(TRUE, || true_times(bench, 10))?;
        for step in STEPS {
            for _ in 0..TIMES {
                let subjects = [
                    (Some(step.ours), &mut ours),
                    (Some(step.theirs), &mut theirs),
                    (step.unsettled.map(|(name, _)| name), &mut unsettled),
                ];
                for (name, shop) in subjects {
                    let (Some(name), Some(shop)) = (name, shop) else { continue };
                    samples.take(name, || Ok(vec![(step.perform)(shop)?.seconds]))?;
                    bench.children.check()?;
                }
            }
        }
        // The other two take a snapshot before they type.
        if let Some(shop) = &mut unsettled {
            shop.snapshot()?;
        }
    }
    for (name, shop) in CHARACTERS.into_iter().zip([ours, theirs]) {
        let Some(mut shop) = shop else { continue };
        samples.take(name, || {
            shop.goto()?;
            Ok(vec![text(&shop.snapshot()?.result).chars().count() as f64])
        })?;
    }
    Ok(())
}

/// Measures each browser alone, so that it shares no page of a file with another browser except those that wait ready.
fn memory_of(bench: &Bench, samples: &mut Samples, site: &Site) -> Result<(), BenchError> {
    for _ in 0..LOOKS {
        samples.begin_round();
        for (name, pool) in [(MEMORY[0], Pool::Full), (MEMORY[1], Pool::Empty)] {
            samples.take(name, || Shop::ours(bench, site, pool)?.memory(bench))?;
        }
        samples.take(MEMORY[2], || Shop::theirs(bench, site, &[])?.memory(bench))?;
    }
    Ok(())
}

fn lines(samples: &Samples) -> Vec<ReportRow> {
    let share = |share: f64| Goal::times(1.0 / share);
    let in_true = |name: &str| samples.in_true(name);
    let what = "`sandbox_create` + first `browser_goto`";
    let mut lines = vec![beside(samples, what, &FIRST, PLAYWRIGHT, share(0.7), &in_true)];
    for step in STEPS {
        let names = [step.ours, EMPTY, step.theirs];
        lines.push(beside(samples, step.what, &names, PLAYWRIGHT, step.share.and_then(share), &in_true));
        if let Some((unsettled, part)) = step.unsettled {
            let names = [step.ours, EMPTY, unsettled];
            lines.push(beside(samples, step.what, &names, UNSETTLED, share(part), &in_true));
        }
    }
    let megabytes = |name: &str| samples.quantity(name, samples.median(name).map(|bytes| bytes / 1e6), Unit::Megabytes);
    let characters = |name: &str| samples.quantity(name, samples.median(name), Unit::Characters);
    let what = "private memory with what drives it";
    lines.push(beside(samples, what, &MEMORY, PLAYWRIGHT, share(0.8), &megabytes));
    let names = [CHARACTERS[0], EMPTY, CHARACTERS[1]];
    lines.push(beside(samples, "characters of a snapshot", &names, PLAYWRIGHT, share(1.0), &characters));
    lines
}

/// Returns a row for our series, our series with empty pools if there is one, and the series of the alternative. A
/// server that did not start is the reason for every series without values.
pub(crate) fn beside(
    samples: &Samples,
    what: &str,
    [ours, empty, theirs]: &[&str; 3],
    name: &'static str,
    goal: Option<Goal>,
    quantity: &dyn Fn(&str) -> Found,
) -> ReportRow {
    let found =
        |series: &str, server: &str| quantity(series).map_err(|_| samples.why_not(&[series, server]).to_owned());
    let against = Against { name, theirs: found(theirs, name), ratio: samples.ratio(theirs, ours) };
    let empty = samples.quantity(empty, samples.ratio(theirs, empty), Unit::Times);
    ReportRow::against(what, found(ours, OURS), empty, against, goal)
}

/// A browser with the shop's page open, and the calls to use it.
struct Shop {
    client: Mcp,
    dialect: Dialect,
    url: String,
    /// Time until the first page was open, including the calls that have to come before.
    opened: f64,
    /// Number of things bought since the page was opened.
    bought: usize,
}

enum Dialect {
    /// Our server. The value is the same page in a context of another dialect, which takes the screenshots because
    /// `workbench` has no tool for them.
    Ours(Option<(Box<Mcp>, String)>),
    Theirs,
}

impl Shop {
    fn ours(bench: &Bench, site: &Site, pool: Pool) -> Result<Self, BenchError> {
        let mut client = server::stdio(bench, "workbench", pool, &settings(site))?;
        // The first sandbox shows that the server is up; afterwards the ready sandboxes are made.
        client.call_when_ready(&BenchCall::new("sandbox_create", json!({})))?;
        client.call(&BenchCall::new("sandbox_destroy", json!({})))?;
        bench.settle()?;
        bench.settle()?;
        let created = client.call(&BenchCall::new("sandbox_create", json!({})))?.seconds;
        let url = format!("http://{NAME}:{}/", site.port);
        let mut shop = Self { client, dialect: Dialect::Ours(None), url, opened: 0.0, bought: 0 };
        shop.opened = created + shop.goto()?.seconds;
        Ok(shop)
    }

    fn with_pictures(mut self, bench: &Bench, site: &Site) -> Result<Self, BenchError> {
        let mut client = server::stdio(bench, "sandpool", Pool::Full, &settings(site))?;
        let created = client.call_when_ready(&server::create("python"))?;
        let context = created.field("context")?;
        client.call(&BenchCall::new("browser_open", json!({ "context": context, "url": self.url })))?;
        self.dialect = Dialect::Ours(Some((Box::new(client), context)));
        Ok(self)
    }

    fn theirs(bench: &Bench, site: &Site, flags: &[&str]) -> Result<Self, BenchError> {
        let client = playwright(bench, flags)?;
        let url = format!("http://127.0.0.1:{}/", site.port);
        let mut shop = Self { client, dialect: Dialect::Theirs, url, opened: 0.0, bought: 0 };
        bench.settle()?;
        shop.opened = shop.goto()?.seconds;
        Ok(shop)
    }

    fn call(&mut self, ours: &str, theirs: &str, arguments: Value) -> Result<TimedResult, BenchError> {
        let tool = if matches!(self.dialect, Dialect::Theirs) { theirs } else { ours };
        self.client.call(&BenchCall::new(tool, arguments))
    }

    /// Adds the selector under the name that the dialect uses: `selector` in ours, `target` in theirs.
    fn at(&self, selector: &str, more: Value) -> Value {
        let mut arguments = more;
        let name = if matches!(self.dialect, Dialect::Theirs) { "target" } else { "selector" };
        arguments[name] = json!(selector);
        arguments
    }

    fn goto(&mut self) -> Result<TimedResult, BenchError> {
        self.bought = 0;
        let url = self.url.clone();
        expect(self.call("browser_goto", "browser_navigate", json!({ "url": url }))?, "Fifty things")
    }

    /// Takes a snapshot, which must also show the last thing in the shop and the effect of the clicks.
    fn snapshot(&mut self) -> Result<TimedResult, BenchError> {
        let answer = expect(self.call("browser_snapshot", "browser_snapshot", json!({}))?, "Buy 50")?;
        expect(answer, &format!("Cart: {}", self.bought))
    }

    fn click(&mut self) -> Result<TimedResult, BenchError> {
        let arguments = self.at("#buy-3", json!({}));
        let answer = self.call("browser_click", "browser_click", arguments)?;
        self.bought += 1;
        Ok(answer)
    }

    fn type_name(&mut self) -> Result<TimedResult, BenchError> {
        // This snapshot verifies that the clicks before took effect.
        self.snapshot()?;
        let arguments = self.at("#name", json!({ "text": "a visitor" }));
        let answer = self.call("browser_type", "browser_type", arguments)?;
        expect(self.call("browser_snapshot", "browser_snapshot", json!({}))?, "Hello a visitor")?;
        Ok(answer)
    }

    fn screenshot(&mut self) -> Result<TimedResult, BenchError> {
        let answer = match &mut self.dialect {
            Dialect::Ours(Some((client, context))) => {
                client.call(&BenchCall::new("browser_screenshot", json!({ "context": context })))?
            }
            Dialect::Ours(None) => return Err(BenchError::Said("no context to take pictures in".into())),
            Dialect::Theirs => {
                self.client.call(&BenchCall::new("browser_take_screenshot", json!({ "type": "png" })))?
            }
        };
        let content = answer.result["content"].as_array().cloned().unwrap_or_default();
        match content.iter().any(|block| block["type"] == "image") {
            true => Ok(answer),
            false => Err(BenchError::Said("a screenshot without a picture".into())),
        }
    }

    /// Measures all processes in the sandbox, or the server and its browser.
    fn memory(mut self, bench: &Bench) -> Result<Vec<f64>, BenchError> {
        let pids = match &self.dialect {
            Dialect::Ours(_) => {
                let code = json!({ "language": "shell", "code": "readlink /proc/self/ns/pid" });
                let answer = self.client.call(&BenchCall::new("code_run", code))?;
                bench.settle()?;
                memory::members(answer.field("stdout")?.trim())?
            }
            Dialect::Theirs => {
                bench.settle()?;
                memory::family(self.client.id())?
            }
        };
        Ok(vec![memory::private(&pids)?])
    }
}

/// Returns settings with one policy table, which allows only the page under its name.
pub(crate) fn settings(site: &Site) -> String {
    let port = site.port;
    format!(
        "network.default = \"bench\"\nnetwork.hosts.\"{NAME}\" = \"127.0.0.1\"\n\
         network.policy.bench = {{ allow = [\"{NAME}:{port}\"], private = [\"127.0.0.1:{port}\"] }}\n"
    )
}

pub(crate) fn playwright(bench: &Bench, flags: &[&str]) -> Result<Mcp, BenchError> {
    let program = installed(bench, "playwright-mcp")?.join("playwright/node_modules/@playwright/mcp/cli.js");
    let node = bench.subject.node.as_deref().ok_or_else(|| BenchError::Said("no Node on this machine".into()))?;
    let browser: &Path =
        bench.subject.browser.as_deref().ok_or_else(|| BenchError::Said("no Chromium on this machine".into()))?;
    let mut command = command(node);
    command.arg(program).args(["--headless", "--isolated", "--no-sandbox"]).args(flags);
    command.args(["--executable-path".as_ref(), browser.as_os_str()]);
    // It writes files below its working directory.
    command.env("HOME", bench.workplace.path()).current_dir(bench.workplace.path()).stderr(Stdio::null());
    Mcp::start(&mut command, &bench.children)
}

/// Returns the text that a model reads.
pub(crate) fn text(result: &Value) -> String {
    let blocks = result["content"].as_array().into_iter().flatten();
    blocks.filter_map(|block| block["text"].as_str()).collect::<Vec<_>>().join("\n")
}

pub(crate) fn expect(answer: TimedResult, part: &str) -> Result<TimedResult, BenchError> {
    let text = text(&answer.result);
    match text.contains(part) {
        true => Ok(answer),
        false => {
            Err(BenchError::Said(format!("no `{part}` in an answer: {}", text.chars().take(300).collect::<String>())))
        }
    }
}
