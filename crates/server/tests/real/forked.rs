//! The hostile rows that concern kernels which are forked from a warm interpreter: such a kernel is held before it reads anything, has
//! what a cold one has and no more, draws its own random numbers, and cannot be reached while it comes in.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

use crate::hostile::report;
use crate::support::{Server, start};

/// What a kernel can find out about itself, as JSON in pieces that fit an answer.
const FACTS: &str = include_str!("facts.py");
/// Runs beside a kernel and lays hands on every process that appears, until it is told to stop.
const HANDS: &str = include_str!("hands.py");

/// A context of a server, with its kernel.
fn context(name: &str, settings: &str) -> (Server, String) {
    let mut server = start(name, settings);
    let context = server.create(json!({"name": "c"}));
    (server, context)
}

fn json_of(server: &mut Server, context: &str, code: &str) -> Value {
    let whole = server.print(context, code);
    serde_json::from_str(&whole).unwrap_or_else(|e| panic!("{e}: {whole}"))
}

fn is_forked(server: &mut Server, context: &str) -> bool {
    server.print(context, "print('--warm' in open('/proc/self/cmdline').read())") == "True\n"
}

/// X02, X05, X08: what is not in the list of its facts, it shares with nobody.
#[test]
fn a_forked_kernel_has_what_a_cold_one_has_and_no_more() {
    let settings = "[dialect.agentrun]\nmemory_mb = 512\n";
    let mut seen = Vec::new();
    for warm in [true, false] {
        let name = if warm { "forked" } else { "cold" };
        let (mut server, context) = context(name, &format!("{settings}[runtimes]\nwarm = {warm}\n"));
        assert_eq!(is_forked(&mut server, &context), warm);
        server.print(&context, FACTS);
        let names = json_of(&mut server, &context, "print(json.dumps(sorted(FACTS)))");
        let fact = |name: &Value| {
            let name = name.as_str().unwrap().to_owned();
            let value = json_of(&mut server, &context, &format!("print(json.dumps(FACTS[{name:?}]))"));
            (name, value)
        };
        seen.push(names.as_array().unwrap().iter().map(fact).collect::<BTreeMap<_, _>>());
        assert!(server.client.finish().success());
    }
    let (cold, forked) = (seen.pop().unwrap(), seen.pop().unwrap());
    assert!(cold.len() > 20, "{cold:?}");
    for (name, value) in &cold {
        assert_eq!(&forked[name], value, "{name}: forked, then cold");
    }
    assert_eq!(forked.len(), cold.len());
    assert_eq!(forked["writable shared mappings"], json!([]));
    report("python", "G31 forked", true, &format!("{} facts are those of a cold kernel", forked.len()));
}

/// G41.
#[test]
fn a_hundred_forks_draw_a_hundred_different_numbers() {
    let mut server = start("draws", "[dialect.agentrun]\nmax_contexts = 200\n");
    let draw = "import json, multiprocessing, os, random, secrets, sqlite3, ssl, tempfile, uuid
import numpy as np
print(json.dumps({
    'random': random.random(), 'choices': ''.join(random.choices('0123456789abcdef', k=16)), 'Random()': random.Random().random(),
    'numpy': np.random.rand(), 'numpy bytes': np.random.bytes(8).hex(), 'default_rng': np.random.default_rng().random(),
    'RandomState()': np.random.RandomState().rand(), 'uuid1': str(uuid.uuid1()), 'uuid4': str(uuid.uuid4()),
    'secrets': secrets.token_hex(16), 'SystemRandom': secrets.SystemRandom().random(), 'urandom': os.urandom(16).hex(),
    'ssl': ssl.RAND_bytes(16).hex(), 'authkey': bytes(multiprocessing.current_process().authkey).hex(),
    'tempfile': os.path.basename(tempfile.mkdtemp()), 'mktemp': tempfile.mktemp(),
    'sqlite': sqlite3.connect(':memory:').execute('select hex(randomblob(16))').fetchone()[0]}))";
    let mut drawn: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut pids = BTreeSet::new();
    for number in 0..100 {
        let context = server.create(json!({"name": format!("c{number}")}));
        assert!(is_forked(&mut server, &context), "context {number}");
        for (name, value) in json_of(&mut server, &context, draw).as_object().unwrap() {
            let new = drawn.entry(name.clone()).or_default().insert(value.to_string());
            assert!(new, "context {number}: {name} {value} was drawn before");
        }
        pids.insert(server.print(&context, "print(os.getpid())"));
        server.client.call("stop_context", json!({"context_id": context}));
    }
    assert_eq!(drawn.len(), 17);
    // Else a generator that knows a fork by its pid would have passed.
    assert!(pids.len() < 20, "{pids:?}");
    report("python", "G41", true, &format!("100 kernels, {} generators, nothing drawn twice", drawn.len()));
    assert!(server.client.finish().success());
}

/// G39: whatever can be seen of it on its way has the sandbox's filter already, and cannot be looked into before it is there.
#[test]
fn nobody_in_the_sandbox_reaches_a_kernel_that_is_coming_in() {
    let (mut server, context) = context("coming", "[dialect.agentrun]\npids = 64\n");
    let hands = format!(
        "import subprocess, sys\nopen('hands.py', 'w').write({HANDS:?})\n\
         p = subprocess.Popen([sys.executable, 'hands.py'], stdout=subprocess.PIPE, start_new_session=True)\nprint(p.stdout.readline())"
    );
    assert!(server.print(&context, &hands).contains("ready"));
    // On a busy machine some come in while it does not look.
    let seen = "import os\nprint(open('seen').read() if os.path.exists('seen') else 0)";
    for round in 0..200 {
        let ended = server.run(&context, "import os; os._exit(0)");
        assert_eq!(ended.json()["success"], false, "round {round}");
        assert!(is_forked(&mut server, &context), "round {round}");
        if round >= 9 && server.print(&context, seen).trim().parse().is_ok_and(|seen: u32| seen >= 10) {
            break;
        }
    }
    server.print(&context, "open('stop', 'w').close()\nimport json, os, time");
    server.print(&context, "while not os.path.exists('told.json'): time.sleep(0.01)");
    let told = json_of(&mut server, &context, "print(open('told.json').read())");
    assert_eq!(told["reached"], json!([]), "{told}");
    // It did see some on their way, and it can do what it tried where nothing is in the way.
    assert!(told["seen"].as_u64().unwrap() >= 10, "{told}");
    assert_eq!(told["own child"], json!(["mem"]), "{told}");
    report("python", "G39 from beside", true, "none of the kernels that came in could be read, traced or robbed");
    assert!(server.client.finish().success());
}

/// The warm interpreter of a server: what its launcher has started that says so.
fn interpreter(server: &Server) -> u32 {
    let parent = |pid: u32| -> Option<u32> {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()
    };
    let is_it = |pid: &u32| {
        let launcher = parent(*pid);
        launcher.and_then(parent) == Some(server.client.pid())
            && fs::read(format!("/proc/{pid}/cmdline"))
                .is_ok_and(|line| line.split(|b| *b == 0).any(|w| w == b"--warm"))
    };
    let processes = fs::read_dir("/proc").unwrap().flatten();
    processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).find(is_it).expect("a warm interpreter")
}

/// The system calls of a process and of what it forks; `None` without the program for it.
#[allow(clippy::disallowed_methods, reason = "a test's own tool and switch")]
fn traced(pid: u32, into: &std::path::Path) -> Option<Child> {
    let mut command = Command::new("strace");
    command.args(["-f", "-s", "200", "-o"]).arg(into).args(["-p", &pid.to_string()]);
    let Ok(mut strace) = command.stderr(Stdio::piped()).spawn() else {
        assert!(std::env::var_os("CI").is_none(), "strace is missing: run `scripts/test-needs`");
        eprintln!("SKIP: strace is not installed");
        return None;
    };
    let mut said = String::new();
    BufReader::new(strace.stderr.as_mut().unwrap()).read_line(&mut said).unwrap();
    assert!(said.contains("attached"), "{said}");
    Some(strace)
}

/// G39: in the order of its system calls.
#[test]
fn a_forked_kernel_is_held_before_it_reads_its_first_byte() {
    let (mut server, context) = context("order", "");
    let file = server.state.as_ref().unwrap().0.join("calls");
    let Some(mut strace) = traced(interpreter(&server), &file) else { return };
    server.run(&context, "import os; os._exit(0)");
    assert_eq!(server.print(&context, "print('first ' + 'byte')"), "first byte\n");
    rustix::process::kill_process(rustix::process::Pid::from_child(&strace), rustix::process::Signal::TERM).unwrap();
    strace.wait().unwrap();

    let calls = fs::read_to_string(&file).unwrap();
    let mut kernels: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (pid, call) in calls.lines().filter_map(|line| line.split_once(' ')) {
        kernels.entry(pid).or_default().push(call.trim_start());
    }
    // A call during which another process made one is shown in two parts.
    let is_read = |call: &str| call.starts_with("read(3, ") || call.starts_with("<... read resumed>");
    let reads_code = |calls: &&Vec<&str>| calls.iter().any(|call| is_read(call) && call.contains("'first '"));
    let kernel = kernels.values().find(reads_code).unwrap_or_else(|| panic!("no kernel in {calls}"));
    let landlock = !calls.contains("LANDLOCK_CREATE_RULESET_VERSION) = -1");
    let steps = [
        "close_range(",
        "setns(",
        "setresgid(1000",
        "setresuid(1000",
        "keyctl(KEYCTL_JOIN_SESSION_KEYRING",
        "prctl(PR_SET_DUMPABLE, SUID_DUMP_DISABLE",
        "capset(",
        "prctl(PR_SET_NO_NEW_PRIVS, 1",
        "landlock_restrict_self(",
        "seccomp(SECCOMP_SET_MODE_FILTER",
        // Only now somebody is born in the sandbox.
        "clone(",
    ];
    let steps: Vec<&str> = steps.into_iter().filter(|step| landlock || !step.starts_with("landlock")).collect();
    let in_order = |steps: &[&str], calls: &[&str]| -> Vec<usize> {
        let first = |step: &&str| calls.iter().position(|call| call.starts_with(step));
        let found = |step| first(step).unwrap_or_else(|| panic!("no {step} in {calls:#?}"));
        let places: Vec<usize> = steps.iter().map(found).collect();
        assert!(places.is_sorted(), "{places:?} in {calls:#?}");
        places
    };
    let from_outside = |call: &str| {
        let reads = ["read", "pread", "recv"].iter().any(|name| call.starts_with(name));
        reads || call.starts_with("mmap(") && !call.contains("MAP_ANONYMOUS")
    };
    // Whoever joins a sandbox is held, and reads nothing, before it has a child there. One that is still on its way at the end of
    // the trace has no child yet.
    let made = |calls: &[&str], call: &str| calls.iter().any(|made| made.starts_with(call));
    let bringers: Vec<_> = kernels.values().filter(|calls| made(calls, "setns(") && made(calls, "clone(")).collect();
    assert!(!bringers.is_empty() && !bringers.contains(&kernel), "{calls}");
    let mut held = 0;
    for bringer in bringers {
        held = *in_order(&steps, bringer).last().unwrap();
        let early: Vec<&&str> = bringer[..held].iter().filter(|call| from_outside(call)).collect();
        assert!(early.is_empty(), "{early:?}");
    }
    // The kernel only becomes one that may be looked at, and then waits to be told what it is.
    let own = ["setpgid(0, 0", "close_range(3", "prctl(PR_SET_DUMPABLE, SUID_DUMP_USER", "recvmsg("];
    let arrived = in_order(&own, kernel)[2];
    let early: Vec<&&str> = kernel[..arrived].iter().filter(|call| from_outside(call)).collect();
    assert!(early.is_empty(), "{early:?}");
    report(
        "python",
        "G39",
        true,
        &format!("{held} system calls before a kernel is born in the sandbox, the filter at their end, read nothing"),
    );
    assert!(server.client.finish().success());
}
