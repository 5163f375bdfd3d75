//! Twenty tenants call all the time while the operator reloads, replaces tokens, and removes and adds a tenant.
//! `make load` runs this for ten minutes, and `make test` for one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};
use testkit::client::object_of;
use testkit::http::{Account, ERAS, Mcp, only, request};

use crate::admin::{done, json_of};
use crate::reload::{count, entry, journal, write_tenants};
use crate::support::{Service, Setup, eventually, load_seconds, token};

const CLIENTS: usize = 20;
/// The tenant with a small rate of calls.
const THROTTLED: usize = 7;
/// The tenant that is removed and added again. Its client has no session, which would end with the tenant.
const REMOVED: usize = 12;
/// The tenant whose quota changes in the file.
const CHANGED: usize = 2;
/// The operator does something in each of these intervals.
const INTERVAL: Duration = Duration::from_secs(10);
/// The orders of the operator, in turn.
const ORDERS: [&str; 6] =
    ["SIGHUP", "file changed", "token replaced, old one kept", "removed and added", "admin reload", "token replaced"];
/// Each client makes each kind of call at least this often. On a slow machine the test takes longer for it.
const ROUNDS: usize = 3;
/// All tenants give their context the same name.
const CONTEXT: &str = "work";
/// Processor time that each round burns, in seconds.
const BURN: f64 = 0.03;
/// Most processor seconds of a sandbox that its code does not see: a part of its start, and remainders of clock ticks.
const START: f64 = 0.5;
/// Part by which the reported processor time may differ from the one that code sees.
const TOLERANCE: f64 = 0.02;

/// Defines what the cells use. `spent` returns the processor time of all processes of the sandbox, ended ones too.
const PRELUDE: &str = r"
import os, time
count = 0
def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end: pass
def spent():
    ticks = 0
    for pid in filter(str.isdigit, os.listdir('/proc')):
        try:
            ticks += sum(map(int, open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[11:15]))
        except OSError:
            pass
    return ticks / os.sysconf('SC_CLK_TCK')
";

/// The state of one tenant that its client and the operator share.
struct Seat {
    name: String,
    token: Mutex<String>,
    /// The token with which the last request was let in.
    used: Mutex<String>,
    /// Changes when the tenant is removed and when it is added again; odd while it does not exist.
    life: AtomicUsize,
    rounds: AtomicUsize,
    /// Requests that were answered with 401.
    unauthorized: AtomicUsize,
}

impl Seat {
    fn new(number: usize) -> Self {
        let name = format!("t{number:02}");
        let (token, used) = (Mutex::new(token(&name)), Mutex::default());
        Self { name, token, used, life: 0.into(), rounds: 0.into(), unauthorized: 0.into() }
    }

    fn token(&self) -> String {
        locked(&self.token).clone()
    }

    fn life(&self) -> usize {
        self.life.load(Ordering::SeqCst)
    }

    fn unauthorized(&self) -> usize {
        self.unauthorized.load(Ordering::SeqCst)
    }
}

fn locked(text: &Mutex<String>) -> MutexGuard<'_, String> {
    text.lock().unwrap()
}

/// Ends all threads when one of them ends, also by a panic.
struct EndsAll<'a>(&'a AtomicBool);

impl Drop for EndsAll<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// The work of one client by its own count.
#[derive(Debug, Default)]
struct Tally {
    calls: u64,
    bytes_in: u64,
    bytes_out: u64,
    /// Bytes of downloads that broke off because the tenant was removed.
    broken_off: u64,
    throttled: usize,
    /// Processor seconds that its cells burned.
    burned: f64,
    /// Processor seconds of all its sandboxes, as their own code saw them last.
    spent: f64,
    sandboxes: usize,
}

struct Client<'a> {
    seat: &'a Seat,
    mcp: Mcp,
    life: usize,
    nonces: usize,
    /// Cells that ran in the context; none if there is no context.
    cells: Option<usize>,
    /// Processor seconds that were seen in the contexts before this one.
    before: f64,
    tally: Tally,
}

impl Client<'_> {
    fn was_removed(&self) -> bool {
        self.seat.life() != self.life
    }

    fn nonce(&mut self) -> String {
        self.nonces += 1;
        format!("{}-nonce-{}", self.seat.name, self.nonces)
    }

    /// Sends a request once with this token. Returns its status, and its answer if it was let in.
    fn ask(&mut self, token: &str, method: &str, params: Value) -> (u16, Result<Value, Duration>) {
        self.mcp.account.token = Some(token.into());
        let id = self.mcp.next_id();
        let answer = self.mcp.send(&request(id, method, params));
        let answer = answer.unwrap_or_else(|error| panic!("{} lost an answer: {error}", self.seat.name));
        match answer.status {
            200 => {
                *locked(&self.seat.used) = token.into();
                return (200, Ok(only(&answer, id)));
            }
            401 => drop(self.seat.unauthorized.fetch_add(1, Ordering::SeqCst)),
            429 => self.tally.throttled += 1,
            _ => panic!("{}: {answer:?}", self.seat.name),
        }
        let wait = answer.header("retry-after").map(|seconds| Duration::from_secs(seconds.parse().unwrap()));
        assert_eq!(wait.is_some(), answer.status == 429, "{answer:?}");
        (answer.status, Err(wait.unwrap_or_default()))
    }

    /// Returns the answer to a request, or `None` if the tenant was removed. It waits as long as the server demands,
    /// and takes the new token if the old one has ended.
    fn request(&mut self, method: &str, params: Value) -> Option<Value> {
        loop {
            let token = self.seat.token();
            match self.ask(&token, method, params.clone()) {
                (_, Ok(answer)) => return Some(answer),
                (429, Err(wait)) => std::thread::sleep(wait),
                _ => eventually("a token that works", || self.was_removed() || self.seat.token() != token),
            }
            if self.was_removed() {
                return None;
            }
        }
    }

    /// Returns the object that a tool answers, or `None` if the tenant was removed. Any other error fails the test.
    fn call(&mut self, tool: &str, arguments: Value) -> Option<Value> {
        let answer = self.request("tools/call", json!({ "name": tool, "arguments": arguments }))?;
        self.tally.calls += 1;
        self.tally.bytes_in += arguments.as_object().unwrap().values().map(argument_bytes).sum::<u64>();
        self.tally.bytes_out += answer_bytes(&answer);
        if answer["result"]["isError"] != false {
            assert!(self.was_removed(), "{}: {tool} {arguments}: {answer}", self.seat.name);
            return None;
        }
        Some(object_of(&answer["result"]))
    }

    fn in_context(&mut self, tool: &str, mut arguments: Value) -> Option<Value> {
        arguments["context"] = CONTEXT.into();
        self.call(tool, arguments)
    }

    /// Makes one call of each kind. Each answer has to have the nonce of its call.
    fn round(&mut self) -> Option<()> {
        if self.cells.is_none() {
            self.call("create_context", json!({ "name": CONTEXT }))?;
            self.tally.sandboxes += 1;
            let code = format!("{PRELUDE}owner = '{}'", self.seat.name);
            self.in_context("run_code", json!({ "code": code }))?;
            self.cells = Some(0);
        }
        self.cell(BURN)?;
        let nonce = self.nonce();
        let ran = self.in_context("run_command", json!({ "command": format!("echo {nonce}") }))?;
        assert_eq!(ran["stdout"], format!("{nonce}\n"), "{ran}");

        let nonce = self.nonce();
        let written = self.in_context("write_file", json!({ "path": "note.txt", "content": nonce }))?;
        let read = self.in_context("read_file", json!({ "path": "note.txt" }))?;
        assert_eq!(read["content"], nonce, "{read}");
        self.download(&written, &nonce)?;

        let nonce = self.nonce();
        let code = json!({ "code": format!("print('{nonce}', owner)"), "background": true });
        let run = self.in_context("run_code", code)?["run"].clone();
        let ended = loop {
            let ended = self.call("wait_run", json!({ "run": run }))?;
            if ended.get("success").is_some() {
                break ended;
            }
        };
        assert_eq!(ended["stdout"], format!("{nonce} {}\n", self.seat.name), "{ended}");

        let listed = self.call("list_contexts", json!({}))?;
        assert_eq!((&listed["total"], &listed["contexts"][0]["name"]), (&json!(1), &json!(CONTEXT)), "{listed}");
        // This is a request, but no call.
        let tools = self.request("tools/list", json!({}))?;
        assert!(tools["result"]["tools"].is_array(), "{tools}");
        self.seat.rounds.fetch_add(1, Ordering::SeqCst);
        Some(())
    }

    /// Runs code that burns processor time, uses the state of the context, and says how much time was spent.
    fn cell(&mut self, seconds: f64) -> Option<()> {
        let nonce = self.nonce();
        let code = format!("count += 1\nburn({seconds})\nprint('{nonce}', owner, count, spent())");
        let ran = self.in_context("run_code", json!({ "code": code }))?;
        let cells = self.cells.insert(self.cells.unwrap_or(0) + 1);
        let expected = format!("{nonce} {} {cells} ", self.seat.name);
        let spent = ran["stdout"].as_str().and_then(|text| text.strip_prefix(&expected));
        let spent: f64 = spent.unwrap_or_else(|| panic!("no `{expected}`: {ran}")).trim().parse().unwrap();
        self.tally.spent = self.before + spent;
        self.tally.burned += seconds;
        Some(())
    }

    /// Fetches a file by its link, which needs no token.
    fn download(&mut self, written: &Value, content: &str) -> Option<()> {
        let url = written["url"].as_str().unwrap_or_else(|| panic!("no link: {written}"));
        let account = Account { token: None, ..self.mcp.account.clone() };
        let file = match account.ask("GET", &url[url.find("/files/").unwrap()..], &[], b"") {
            Ok(file) if file.status == 200 => file,
            failed => {
                assert!(self.was_removed(), "{} lost a download: {failed:?}", self.seat.name);
                // A download that breaks off counts the bytes that were sent.
                self.tally.broken_off += if failed.is_err() { content.len() as u64 } else { 0 };
                return None;
            }
        };
        assert_eq!(file.text(), content);
        self.tally.bytes_out += content.len() as u64;
        Some(())
    }

    /// Waits until the removed tenant exists again. Its old token never works again, and its context is gone.
    fn begin_again(&mut self) {
        let old = self.mcp.account.token.clone().unwrap();
        eventually("the tenant is added again", || {
            let away = self.seat.life() % 2 == 1;
            let (status, _) = self.ask(&old, "tools/list", json!({}));
            assert!(status == 401 || away, "the token of a removed tenant works");
            !away
        });
        self.life = self.seat.life();
        (self.cells, self.before) = (None, self.tally.spent);
        let listed = self.call("list_contexts", json!({})).unwrap();
        assert_eq!(listed["total"], 0, "{listed}");
    }

    /// Calls until it is told to stop, and measures its processor time once more then.
    fn work(mut self, over: &AtomicBool) -> Tally {
        let _end = EndsAll(over);
        while !over.load(Ordering::SeqCst) {
            if self.round().is_none() {
                self.begin_again();
            }
        }
        if self.cells.is_some() {
            self.cell(0.0).unwrap();
        }
        assert!(self.mcp.wire().is_quiet(), "{} got an answer too many", self.seat.name);
        self.tally
    }
}

/// The size of an argument as usage counts it.
fn argument_bytes(value: &Value) -> u64 {
    value.as_str().map_or_else(|| value.to_string().len(), str::len) as u64
}

/// The size of an answer as usage counts it: the content of its blocks, or the message of an error.
fn answer_bytes(answer: &Value) -> u64 {
    let blocks = answer["result"]["content"].as_array().into_iter().flatten();
    let contents = blocks.flat_map(|block| ["text", "data", "uri"].map(|name| &block[name]));
    contents.chain([&answer["error"]["message"]]).filter_map(Value::as_str).map(|text| text.len() as u64).sum()
}

struct Operator<'a> {
    service: &'a Service,
    seats: &'a [Seat],
    over: &'a AtomicBool,
    /// All tokens that were ever valid.
    tokens: Vec<String>,
    /// Requests of the operator with a token that has ended.
    probes: usize,
    /// Tenants of which a token has ended.
    concerned: BTreeSet<String>,
    /// Memory of the server after the first order, in kilobytes.
    memory: u64,
    given: BTreeMap<&'static str, usize>,
}

impl Operator<'_> {
    /// Waits for something that does not happen if a client has failed.
    fn wait(&self, what: &str, mut condition: impl FnMut() -> bool) {
        eventually(what, || self.over.load(Ordering::SeqCst) || condition());
    }

    /// Gives an order in each interval until the time is over, and ends when all clients have made enough calls.
    fn work(&mut self, time: Duration) {
        let _end = EndsAll(self.over);
        let start = Instant::now();
        let orders = (time.as_secs() / INTERVAL.as_secs()) as usize;
        for turn in 0..orders.max(ORDERS.len()) {
            let at = start + INTERVAL * turn as u32 + INTERVAL / 2;
            while Instant::now() < at && !self.over.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(50));
            }
            if self.over.load(Ordering::SeqCst) {
                return;
            }
            self.give(turn);
            // What is asked for in between must not be counted twice.
            done(self.service, &["usage"]);
            if turn == 0 {
                self.memory = self.service.memory();
            }
        }
        self.wait("the end", || start.elapsed() >= time);
        let seats = self.seats;
        self.wait("all rounds", || seats.iter().all(|seat| seat.rounds.load(Ordering::SeqCst) >= ROUNDS));
    }

    fn give(&mut self, turn: usize) {
        let order = ORDERS[turn % ORDERS.len()];
        let seat = &self.seats[(turn * 7 + 3) % CLIENTS];
        match order {
            "SIGHUP" => self.reloads("reloaded (SIGHUP)", || self.service.signal(Signal::HUP)),
            "file changed" => self.reloads("reloaded (the tenants file has changed)", || self.change_file()),
            "admin reload" => self.reloads("reloaded (sandpool admin)", || drop(done(self.service, &["reload"]))),
            "removed and added" => self.remove_and_add(&self.seats[REMOVED]),
            "token replaced" => {
                let old = self.replace(seat, &["tenant", "rotate", &seat.name]);
                self.expect_ended(seat, &old);
            }
            _ => {
                let before = seat.unauthorized();
                let old = self.replace(seat, &["tenant", "rotate", &seat.name, "--keep-old"]);
                self.wait("the client takes the new token", || *locked(&seat.used) == seat.token());
                assert_eq!(seat.unauthorized(), before, "both tokens work");
                done(self.service, &["tenant", "rotate", &seat.name, "--drop-old"]);
                self.expect_ended(seat, &old);
            }
        }
        *self.given.entry(order).or_default() += 1;
    }

    /// Gives an order, and waits until the log says that it was obeyed.
    fn reloads(&self, line: &str, order: impl FnOnce()) {
        let before = count(self.service, line);
        order();
        eventually(line, || count(self.service, line) > before);
    }

    /// Gives a tenant the token that a command prints. Returns the old one.
    fn replace(&mut self, seat: &Seat, arguments: &[&str]) -> String {
        let new = done(self.service, arguments).trim().to_owned();
        self.tokens.push(new.clone());
        self.concerned.insert(seat.name.clone());
        std::mem::replace(&mut *locked(&seat.token), new)
    }

    fn expect_ended(&mut self, seat: &Seat, old: &str) {
        let account = Account { token: Some(old.into()), ..self.service.account("canary") };
        let status = account.ask("GET", "/mcp", &[("accept", "application/json")], b"").unwrap().status;
        assert_eq!(status, 401, "an old token of {} works", seat.name);
        self.probes += 1;
    }

    /// Replaces the file, as an editor does, by one with another quota.
    fn change_file(&self) {
        let path = self.service.state().0.join("tenants");
        let text = std::fs::read_to_string(&path).unwrap();
        let (two, three) = ("contexts = 2", "contexts = 3");
        let changed = if text.contains(two) { text.replace(two, three) } else { text.replace(three, two) };
        assert_ne!(text, changed);
        std::fs::write(path.with_extension("new"), changed).unwrap();
        std::fs::rename(path.with_extension("new"), &path).unwrap();
    }

    fn remove_and_add(&mut self, seat: &Seat) {
        let before = seat.unauthorized();
        seat.life.fetch_add(1, Ordering::SeqCst);
        done(self.service, &["tenant", "remove", &seat.name]);
        self.wait("the client is refused", || seat.unauthorized() > before);
        let contexts = json_of(self.service, &["ps", "--tenant", &seat.name, "--json"]);
        assert_eq!(contexts, json!([]));
        self.replace(seat, &["tenant", "add", &seat.name]);
        seat.life.fetch_add(1, Ordering::SeqCst);
    }
}

/// The use of a tenant as the server reports it, over all days.
#[derive(Debug, Default, Clone, PartialEq)]
struct Reported {
    calls: u64,
    bytes_in: u64,
    bytes_out: u64,
    network_bytes: u64,
    cpu_seconds: f64,
}

impl Reported {
    /// Compares the report with the client's count: calls and bytes are equal, and the processor time is plausible.
    fn check(&self, name: &str, tally: &Tally) {
        let Self { calls, bytes_in, bytes_out, network_bytes, cpu_seconds } = *self;
        assert_eq!(
            (calls, bytes_in, network_bytes),
            (tally.calls, tally.bytes_in, 0),
            "{name}: reported, and done by the client"
        );
        let bytes = tally.bytes_out..=tally.bytes_out + tally.broken_off;
        assert!(bytes.contains(&bytes_out), "{name}: {self:?} {tally:?}");
        // The last round of a removed tenant is not seen.
        let most = tally.spent * (1.0 + TOLERANCE) + (START + BURN) * tally.sandboxes as f64;
        assert!(
            cpu_seconds >= tally.burned && cpu_seconds >= tally.spent * (1.0 - TOLERANCE),
            "{name}: {self:?} {tally:?}"
        );
        assert!(cpu_seconds <= most, "{name}: {self:?} {tally:?}");
    }
}

fn reported(service: &Service) -> BTreeMap<String, Reported> {
    let mut all = BTreeMap::<String, Reported>::new();
    for day in json_of(service, &["usage", "--format", "json"]).as_array().unwrap() {
        let sum = all.entry(day["tenant"].as_str().unwrap().to_owned()).or_default();
        let number = |name: &str| day[name].as_u64().unwrap_or_else(|| panic!("no {name}: {day}"));
        sum.calls += number("calls");
        sum.bytes_in += number("bytes_in");
        sum.bytes_out += number("bytes_out");
        sum.network_bytes += number("network_bytes");
        sum.cpu_seconds += day["cpu_seconds"].as_f64().unwrap_or_else(|| panic!("no processor time: {day}"));
    }
    all
}

/// The metrics count each refusal, and each is one that a client saw.
fn check_refusals(service: &Service, throttled: (&str, usize), unauthorized: usize) {
    let page = service.account("canary").ask("GET", "/metrics", &[], b"").unwrap().text();
    let (name, count) = throttled;
    for line in [
        format!("sandpool_denials_total{{reason=\"rate\",tenant=\"{name}\"}} {count}"),
        format!("sandpool_denials_total{{reason=\"auth\"}} {unauthorized}"),
    ] {
        assert!(page.lines().any(|found| found == line), "no `{line}`: {page}");
    }
    assert!(service.log().contains(&format!("Throttled tenant {name}")), "the log names it");
    let is_denial = |entry: &Value| entry["event"] == "denied" && entry["tenant"] == name;
    eventually("the journal names it", || journal(&service.state().0).iter().any(is_denial));
}

#[test]
fn twenty_tenants_lose_nothing_while_the_operator_works_and_usage_adds_up() {
    let settings = "[metrics]\ntenants = 30\n[dialect.sandpool]\nmemory_mb = 256\ndisk_mb = 64\ncpus = 1.0\n";
    let mut service = Service::with("many-tenants", Setup { settings, ..Setup::default() });
    let seats: Vec<Seat> = (0..CLIENTS).map(Seat::new).collect();
    let quotas = |number| match number {
        THROTTLED => "quotas = { calls_per_second = 1 }",
        CHANGED => "quotas = { contexts = 2 }",
        _ => "",
    };
    let entries = seats.iter().enumerate().map(|(number, seat)| entry(&seat.name, &seat.token(), quotas(number)));
    write_tenants(&service, &entries.chain([entry("canary", &token("canary"), "")]).collect::<Vec<_>>());
    service.signal(Signal::HUP);
    eventually("the tenants", || count(&service, "reloaded (SIGHUP)") == 1);

    let over = AtomicBool::new(false);
    let tokens = seats.iter().map(Seat::token).collect();
    let (concerned, given) = (BTreeSet::new(), BTreeMap::new());
    let mut operator =
        Operator { service: &service, seats: &seats, over: &over, tokens, probes: 0, concerned, memory: 0, given };
    let tallies: Vec<Tally> = std::thread::scope(|scope| {
        let clients: Vec<_> = seats
            .iter()
            .enumerate()
            .map(|(number, seat)| {
                let account = Account { token: Some(seat.token()), ..service.account("canary") };
                let mcp = Mcp::new(&account, "sandpool", ERAS[number % ERAS.len()]);
                let (tally, over) = (Tally::default(), &over);
                let client = Client { seat, mcp, life: 0, nonces: 0, cells: None, before: 0.0, tally };
                scope.spawn(move || client.work(over))
            })
            .collect();
        operator.work(Duration::from_secs(load_seconds()));
        clients.into_iter().map(|client| client.join().expect("the client has said what is wrong")).collect()
    });
    let Operator { tokens, probes, concerned, memory, given, .. } = operator;
    let after = service.memory();
    assert!(after < memory + (memory / 2).max(32 << 10), "{memory} kB after the first order, {after} kB at the end");

    let all = reported(&service);
    print_table(&seats, &tallies, &all, &given);
    for (seat, tally) in seats.iter().zip(&tallies) {
        let of = &all[&seat.name];
        of.check(&seat.name, tally);
        assert_eq!(tally.throttled > 0, seat.name == seats[THROTTLED].name, "{}: {tally:?}", seat.name);
        assert!(seat.unauthorized() == 0 || concerned.contains(&seat.name), "{} was refused", seat.name);
    }
    let throttled = &tallies[THROTTLED];
    let unauthorized = seats.iter().map(Seat::unauthorized).sum::<usize>() + probes;
    check_refusals(&service, (&seats[THROTTLED].name, throttled.throttled), unauthorized);
    let log = service.log();
    assert!(tokens.iter().all(|token| !log.contains(token)), "the log has a token");
    let calls: u64 = tallies.iter().map(|tally| tally.calls).sum();
    let orders: usize = given.values().sum();
    eprintln!("{calls} calls of {CLIENTS} tenants during {orders} orders: none lost or crossed, all reported");
    eprintln!("memory of the server: {memory} kB after the first order, {after} kB at the end");

    service.signal(Signal::TERM);
    assert!(service.wait().success(), "{}", service.log());
    for (name, after) in reported(&service) {
        let before = &all[&name];
        assert!(after.cpu_seconds >= before.cpu_seconds, "{name}: {before:?} {after:?}");
        assert_eq!(
            Reported { cpu_seconds: before.cpu_seconds, ..after },
            *before,
            "{name}, after the end of the server"
        );
    }
    service.nothing_left();
}

fn print_table(
    seats: &[Seat],
    tallies: &[Tally],
    all: &BTreeMap<String, Reported>,
    given: &BTreeMap<&'static str, usize>,
) {
    eprintln!("tenant   calls  reported   bytes in  bytes out  429  401  burned s  seen s  reported s");
    for (seat, tally) in seats.iter().zip(tallies) {
        let of = all.get(&seat.name).cloned().unwrap_or_default();
        eprintln!(
            "{:<6} {:>7}  {:>8}  {:>9}  {:>9}  {:>3}  {:>3}  {:>8.2}  {:>6.2}  {:>10.2}",
            seat.name,
            tally.calls,
            of.calls,
            tally.bytes_in,
            tally.bytes_out,
            tally.throttled,
            seat.unauthorized(),
            tally.burned,
            tally.spent,
            of.cpu_seconds
        );
    }
    let orders: Vec<String> = given.iter().map(|(order, times)| format!("{order}: {times}")).collect();
    eprintln!("{}", orders.join("; "));
}
