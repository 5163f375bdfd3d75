//! The hostile rows that concern one sandbox (groups G and R), as cells sent through the built binary.
//!
//! After every row the oracle: the request got exactly one answer (the client insists), the server answers, and a canary in
//! another context is right. After all of them: the host's sysctls and hostname are what they were, and nothing is left over.
//! `make hostile` makes its report of what the rows ended in.

use serde_json::json;
use testkit::client::ToolResult;
use testkit::host::facts as host_facts;

use crate::support::{Server, StateDir, assert_no_traces, start};

/// What a cell must end in.
#[derive(Clone, Copy)]
enum Want {
    /// Success, with stdout containing this.
    Out(&'static str),
    /// Success, with stderr containing this.
    Warn(&'static str),
    /// Failure, with stderr containing this.
    Err(&'static str),
    /// One of two, where the speed of the machine decides which.
    Either(&'static Want, &'static Want),
}

use Want::{Either, Err, Out, Warn};

struct Row {
    id: &'static str,
    code: &'static str,
    want: Want,
}

const fn row(id: &'static str, code: &'static str, want: Want) -> Row {
    Row { id, code, want }
}

const PYTHON: &[Row] = &[
    // the kernel's own channel
    row(
        "G01",
        "import os\nos.write(4, os.urandom(100_000) + b'\\n' + b'{\"t\":\"done\",\"n\":999999,\"status\":\"ok\"}\\n')\nprint('on')",
        Out("on"),
    ),
    row("G01 deep JSON", "import os\nos.write(4, b'[' * 200_000 + b'\\n')\nprint('on')", Out("on")),
    row("G02 close", "import os\nos.close(4)", Err("exited with code 70")),
    row("G02 after", "print('next call works')", Out("next call works")),
    row(
        "G02 dup over",
        "import os\nos.dup2(os.open('/dev/null', os.O_RDWR), 3); os.dup2(os.open('/dev/null', os.O_RDWR), 4)\nprint('x')",
        Err("exited with code 70"),
    ),
    row("G04", "import os\nos.execv('/bin/true', ['true'])", Err("lost")),
    row("G04 sleeper", "import os\nos.execv('/bin/sleep', ['sleep', '100'])", Err("lost")),
    row("G05", "import os\nos.kill(os.getpid(), 9)", Err("SIGKILL")),
    row(
        "G06 stop pid 1",
        "import os\nfor s in (19, 9, 15, 2, 1): \n    try: os.kill(1, s)\n    except OSError: pass\nprint('still here')",
        Out("still here"),
    ),
    row("G07", "import os\nos.kill(-1, 9)\nprint('x')", Err("ProcessLookupError")),
    row("G07 after", "print('next call works')", Out("next call works")),
    // what is printed is output, whatever it looks like
    row("G09", "print('{\"t\":\"done\",\"n\":1,\"status\":\"ok\"}')\nprint('---END---')", Out("---END---")),
    row("G10", "for i in range(1000): print('{\"jsonrpc\":\"2.0\",\"id\":%d,\"result\":{}}' % i)", Out("jsonrpc")),
    row(
        "G11 None",
        "import sys\nsys.stdout = None\nprint('nowhere')",
        Warn("sys.stdout was lost and has been restored"),
    ),
    row("G11 after", "import sys\nsys.stdout = sys.__stdout__\nprint('back')", Out("back")),
    row(
        "G11 closed",
        "import os\nos.close(1); os.close(2)",
        Warn("descriptor 2 was closed by the code and has been restored"),
    ),
    row(
        "G11 raises",
        "class W:\n    def write(self, s): raise RuntimeError('no')\n    def flush(self): raise RuntimeError('no')\nimport sys\nsys.stdout = sys.stderr = W()",
        Out(""),
    ),
    row(
        "G11 mended",
        "import sys\nsys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__\nprint('mended')",
        Out("mended"),
    ),
    row("G12", "import os\nos.write(1, b'\\xff\\xfe\\x00 \\xed\\xa0\\x80 \\xe2\\x80\\xa8 \\x1b[31m ok\\n')", Out("ok")),
    row("G12 surrogates", "print('\\ud800 lone', 'done')", Out("lone done")),
    // nasty objects
    row("G14 str raises", "class E(Exception):\n    def __str__(self): raise ValueError('x')\nraise E()", Err("E")),
    row(
        "G14 str huge",
        "class E(Exception):\n    def __str__(self): return 'x' * 200_000_000\nraise E()",
        Err("left out"),
    ),
    row("G14 str not str", "class E(Exception):\n    def __str__(self): return 5\nraise E()", Err("E")),
    row("G15 repr endless", "class R:\n    def __repr__(self):\n        while True: pass\nR()", Err("kept")),
    row("G15 repr huge", "class R:\n    def __repr__(self): return 'y' * 100_000_000\nR()", Out("left out")),
    row("G15 self", "a = []; a.append(a); a", Out("[[...]]")),
    row(
        "G16",
        "import decimal, socket\n(x for x in ()), float('nan'), decimal.Decimal('1.5'), b'\\xff', {1, 2}",
        Out("nan"),
    ),
    row(
        "G17",
        "import atexit, time\natexit.register(time.sleep, 1000)\nclass D:\n    def __del__(self): time.sleep(1000)\nd = D()",
        Out(""),
    ),
    row("G19", "import sys\ndef t(*a): return t\nsys.settrace(t); sys.setprofile(t)\nprint('traced')", Out("traced")),
    row("G19 audit", "import sys\nsys.settrace(None); sys.setprofile(None)\nprint('clean')", Out("clean")),
    row("G20 never", "import asyncio\nawait asyncio.Event().wait()", Err("kept")),
    row("G20 run", "import asyncio\nasync def f(): return 5\nasyncio.run(f())", Out("5")),
    row(
        "G20 pending",
        "import asyncio\nasync def forever():\n    while True: await asyncio.sleep(0.01)\ntask = asyncio.ensure_future(forever())\nawait asyncio.sleep(0.1)\nprint('pending', not task.done())",
        Out("pending True"),
    ),
    // A call that awaits lets the task go on; after it has been cancelled nothing of it is left.
    row(
        "G20 pending on",
        "await asyncio.sleep(0.1)\nprint('still pending', not task.done())",
        Out("still pending True"),
    ),
    row(
        "G20 pending after",
        "task.cancel()\nawait asyncio.wait([task])\nprint('cancelled', task.cancelled())",
        Out("cancelled True"),
    ),
    row("G21 input", "input()", Err("EOFError")),
    row("G21 read", "import sys\nprint(repr(sys.stdin.read()))", Out("''")),
    row("G21 shell read", "!read x; echo got $?", Out("got 1")),
    row(
        "G22",
        "import signal\nfor s in (signal.SIGINT, signal.SIGALRM, signal.SIGTERM, signal.SIGCHLD): signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
        Err("was killed: variables are lost"),
    ),
    row(
        "G22 masked",
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass",
        Err("lost"),
    ),
    row("G24 files", "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))", Out("")),
    row("G24 after", "print('answered')", Out("answered")),
    row("G24 memory", "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))", Out("")),
    row("G24 fresh", "import os\nos.abort()", Err("variables are lost, files are kept")),
    row("G25", "import ctypes\nctypes.string_at(0)", Err("SIGSEGV")),
    row(
        "G26",
        "import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\nprint('parent' if pid else 'child')",
        Out("parent"),
    ),
    row(
        "G26 bomb",
        "import os\nfor i in range(20): \n    if os.fork() == 0: break\nprint('one of many')",
        Out("one of many"),
    ),
    row("G27", "import multiprocessing as m\np = m.Pool(2)\nprint(p.map(abs, [-1, -2]))", Out("[1, 2]")),
    row(
        "G31",
        "import os\nprint('env', [k for k in os.environ if 'TOKEN' in k or 'SANDPOOL' in k and k[9:] not in ('PACKAGES', 'CHROMIUM', 'ADDED')])\ntry: print(open('/proc/1/environ').read())\nexcept OSError as e: print('refused', e.errno)",
        Out("env []"),
    ),
    row(
        "G36",
        "open('sitecustomize.py', 'w').write('raise SystemExit(9)')\nopen('usercustomize.py', 'w').write('raise SystemExit(9)')\nopen('json.py', 'w').write('raise RuntimeError(\"shadowed\")')\nimport os\nos._exit(0)",
        Err("lost"),
    ),
    row("G37", "print('the runner does not import from the working directory')", Out("does not import")),
    row("G37 clean", "import os\nfor f in ('sitecustomize.py', 'usercustomize.py', 'json.py'): os.remove(f)", Out("")),
    // resources
    row(
        "R01",
        "import subprocess\nsubprocess.run(['bash', '-c', ':(){ :|:& };:'], capture_output=True)\nimport time\ntime.sleep(0.5)",
        Err("timed out after 5 s"),
    ),
    // Processes a cell leaves behind live until the context ends; this ends them, and spares the interpreter that says so.
    row("R01 cleared", "import os\nos.kill(-1, 9)", Out("")),
    row("R01 after", "print('next call works')", Out("next call works")),
    // The threads end with the row: a later row needs room for a process.
    row(
        "R02",
        "import threading\nleave, threads = threading.Event(), []\ntry:\n    while True:\n        threads.append(threading.Thread(target=leave.wait, daemon=True)); threads[-1].start()\nexcept RuntimeError: print('stopped below 300:', len(threads) < 300)\nleave.set()\nfor t in threads[:-1]: t.join()",
        Out("stopped below 300: True"),
    ),
    row(
        "R04",
        "try:\n    f = open('/dev/shm/x', 'wb')\n    while True: f.write(b'0' * (1 << 20))\nexcept OSError as e: print('errno', e.errno)",
        Out("errno 28"),
    ),
    row("R04 clean", "import os\ntry: f.close(); os.remove('/dev/shm/x')\nexcept Exception: pass", Out("")),
    row(
        "R09",
        "try:\n    f = open('fill', 'wb')\n    while True: f.write(b'0' * (1 << 20))\nexcept OSError as e: print('errno', e.errno)",
        Out("errno 28"),
    ),
    row(
        "R09 clean",
        "import os\ntry:\n    f.close()\nexcept Exception: pass\nif os.path.exists('fill'): os.remove('fill')\nopen('small', 'w').write('x'); print('room again')",
        Out("room again"),
    ),
    row(
        // A slow machine reaches the deadline before the quota.
        "R10",
        "import os\nos.makedirs('many', exist_ok=True)\ntry:\n    for i in range(10**7): open(f'many/{i}', 'w').close()\nexcept OSError as e: print('errno', e.errno)",
        Either(&Out("errno 28"), &Err("variables are kept")),
    ),
    row("R10 clean", "import subprocess\nprint(subprocess.run(['rm', '-r', 'many']).returncode)", Out("0")),
    row(
        "R11",
        "import os\ntry:\n    fd = os.open('sparse', os.O_CREAT | os.O_RDWR); os.posix_fallocate(fd, 0, 1 << 40)\nexcept OSError as e: print('refused', e.errno)",
        Out("refused"),
    ),
    row(
        "R12",
        "import os\nfds = []\ntry:\n    while True: fds.append(os.open('/dev/null', os.O_RDONLY))\nexcept OSError as e: print('errno', e.errno)\nfor f in fds: os.close(f)",
        Out("errno 24"),
    ),
    row("R14", "import os\nb = b'x' * 65536\nfor i in range(4000): os.write(1, b)", Out("left out")),
    row("R15", "import os\nb = b'x' * 65536\nfor i in range(1000): os.write(1, b); os.write(2, b)", Out("left out")),
    row("R16", "import sys\nsys.stdout.write('z' * 200_000_000)", Out("left out")),
    row("R17", "import os\nfor i in range(200_000): os.write(1, b'.')", Out("left out")),
    row(
        "R19",
        "import threading\ndef spin():\n    import time\n    end = time.time() + 1\n    while time.time() < end: pass\nts = [threading.Thread(target=spin) for _ in range(64)]\n[t.start() for t in ts]; [t.join() for t in ts]; print('spun')",
        Either(&Out("spun"), &Err("variables are kept")),
    ),
    row("R20", "sum(range(10**11))", Err("lost")),
    row("R22", "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nprint('went on')", Out("went on")),
    row(
        // Beyond the deadline, but not for ever: when the interrupt gets through, what the cell left behind goes on stopping the next.
        "R22 for good",
        "import os, signal, time\npid, end = os.getpid(), time.monotonic() + 8\nif os.fork() == 0:\n    while time.monotonic() < end: os.kill(pid, signal.SIGSTOP)\n    os._exit(0)\nwhile True: pass",
        Err("timed out after 5 s"),
    ),
    row("R24", "import subprocess\nsubprocess.Popen(['sleep', '1000'])\nprint('left a daemon')", Out("left a daemon")),
    row(
        "R24 setsid",
        "import os\nif os.fork() == 0:\n    os.setsid()\n    import time\n    time.sleep(1000)\nprint('main')",
        Out("main"),
    ),
    row(
        "R25",
        "import os\nfor i in range(100):\n    if os.fork() == 0: os._exit(0)\n    os.wait()\nprint('all reaped')",
        Out("all reaped"),
    ),
    row(
        "R27",
        "import os\nn = 0\ntry:\n    while n < 5000: os.openpty(); n += 1\nexcept OSError as e: print('stopped', n < 5000)",
        Out("stopped True"),
    ),
    row("R34", "x = bytearray(3 << 30)\nfor i in range(0, len(x), 4096): x[i] = 1", Err("emory")),
    row("R34 again", "x = [b'1' * (1 << 20) for _ in range(3000)]", Err("emory")),
    row(
        "R37",
        "import subprocess\ntry: subprocess.run(['true', 'x' * (3 << 20)])\nexcept OSError as e: print('E2BIG', e.errno)",
        Out("E2BIG 7"),
    ),
    row(
        "R05",
        "import multiprocessing.shared_memory as s, os\nm = s.SharedMemory(create=True, size=1 << 20); fd = os.memfd_create('x'); os.ftruncate(fd, 1 << 20); print('made')",
        Out("made"),
    ),
];

const JAVASCRIPT: &[Row] = &[
    row(
        "G01 js",
        "require('fs').writeSync(4, Buffer.alloc(100000, 120)); require('fs').writeSync(4, '\\n'); console.log('on')",
        Out("on"),
    ),
    row("G05 js", "process.kill(process.pid, 'SIGKILL'); await new Promise(() => {})", Err("SIGKILL")),
    row("G16 js", "[1n, Symbol('s'), new Map([[1, 2]]), NaN, () => {}]", Out("Map(1)")),
    row("G20 js never", "await new Promise(() => {})", Err("kept")),
    row(
        "G20 js microtasks",
        // Each turn takes memory, so a fast machine reaches the limit before the deadline.
        "const f = () => Promise.resolve().then(f); await f()",
        Either(&Err("Out of memory"), &Err("timed out after 5 s")),
    ),
    row("G20 js rejection", "Promise.reject(new Error('late one')); 5", Warn("late one")),
    row("G20 js after", "console.log('alive')", Out("alive")),
    row("G11 js", "process.stdout.write = () => { throw new Error('no') }; 1", Out("1")),
    row("G14 js", "throw { toString() { throw 1 }, get stack() { throw 2 } }", Err("Uncaught")),
    row("G15 js", "({ [Symbol.for('nodejs.util.inspect.custom')]() { while (true) {} } })", Err("kept")),
    row("R34 js", "const a = []; for (;;) a.push(new Array(1e6).fill(1.5))", Err("emory")),
    row(
        "G16 js pollution",
        "Object.prototype.toJSON = () => 'x'; Array.prototype.push = null; JSON.stringify = null; 7",
        Out("7"),
    ),
    row("R14 js", "for (let i = 0; i < 2000; i++) require('fs').writeSync(1, 'x'.repeat(65536))", Out("65536")),
    row("R21 js", "process.on('SIGINT', () => {}); while (true) {}", Err("variables are kept")),
    row("js last", "1 + 1", Out("2")),
];

#[test]
fn hostile_cells_cost_only_their_own_context() {
    let host = host_facts();
    let mut s = start("hostile", "[dialect.agentrun]\ntimeout = 5\nmemory_mb = 1024\ndisk_mb = 64\npids = 128\n");
    let canary = s.create(json!({"name": "canary"}));
    let marks = s.marks();
    s.print(&canary, "secret = 12345");
    for (language, rows) in [("python", PYTHON), ("javascript", JAVASCRIPT)] {
        let victim = s.create(json!({"name": format!("victim-{language}"), "language": language}));
        for row in rows {
            let result = s.run(&victim, row.code);
            check(row, &result);
            keep(language, row, &result);
            assert_eq!(s.print(&canary, "print(secret)"), "12345\n", "after {}", row.id);
        }
        s.client.call("stop_context", json!({"context_id": victim}));
    }
    assert_eq!(host_facts(), host);
    assert!(s.client.finish().success());
    drop(s.state);
    assert_no_traces(&marks);
}

fn check(row: &Row, result: &ToolResult) {
    assert!(is_met(row.want, result), "{}: {}", row.id, brief(result.json().to_string()));
}

fn is_met(want: Want, result: &ToolResult) -> bool {
    let success = result.json()["success"] == true;
    match want {
        Out(text) => success && result.field("stdout").contains(text),
        Warn(text) => success && result.field("stderr").contains(text),
        Err(text) => !success && result.field("stderr").contains(text),
        Either(one, other) => is_met(*one, result) || is_met(*other, result),
    }
}

fn keep(language: &str, row: &Row, result: &ToolResult) {
    let (out, err) = (result.field("stdout"), result.field("stderr"));
    let last = [&err, &out].into_iter().find_map(|text| text.trim_end().lines().last()).unwrap_or_default();
    report(language, row.id, result.json()["success"] == true, last);
}

/// A line for the report of `make hostile`: how the cell ended.
#[allow(clippy::disallowed_methods, reason = "a test's own switch")]
pub fn report(language: &str, row: &str, success: bool, last: &str) {
    use std::io::Write;
    let Some(dir) = std::env::var_os("SANDPOOL_HOSTILE_REPORT") else { return };
    let ended = if success { "success" } else { "failure" };
    let path = std::path::Path::new(&dir).join("cells.txt");
    let mut file = std::fs::OpenOptions::new().append(true).create(true).open(path).unwrap();
    writeln!(file, "{language}\t{row}\t{ended}\t{}", brief(last.to_owned())).unwrap();
}

/// Long outputs would bury the failure.
fn brief(text: String) -> String {
    if text.len() < 600 {
        text
    } else {
        format!("{:.300} … {}", text, &text[text.floor_char_boundary(text.len() - 200)..])
    }
}

#[test]
fn contexts_created_used_and_stopped_leave_nothing_behind() {
    let mut s = start("leaks", "");
    for round in 0..200 {
        let context = s.create(json!({"name": format!("c{round}")}));
        assert_eq!(s.print(&context, "print(1)"), "1\n");
        s.client.call("stop_context", json!({"context_id": context}));
    }
    let marks = s.marks();
    assert!(s.client.finish().success());
    drop(s.state);
    assert_no_traces(&marks);
}

#[test]
fn a_killed_server_leaves_nothing_behind() {
    let mut s = start("killed", "");
    let context = s.create(json!({"name": "c"}));
    s.print(&context, "import subprocess; p = subprocess.Popen(['sleep', '1000'])");
    let marks = s.marks();
    s.kill();
    assert_no_traces(&marks);
}

/// R34: the guest survives every one of them, and every call is answered.
#[test]
#[allow(clippy::disallowed_methods, reason = "a test's own switch")]
fn memory_bombs_one_after_another_are_each_told_as_such() {
    let rounds = if std::env::var_os("SANDPOOL_HOSTILE").is_some() { 100 } else { 5 };
    let mut s = start("bombs", "[dialect.agentrun]\nmemory_mb = 256\n");
    let context = s.create(json!({"name": "bomb"}));
    for round in 0..rounds {
        let result = s.run(&context, "x = []\nwhile True: x.append(bytearray(b'1') * (1 << 20))");
        assert!(result.field("stderr").contains("emory"), "round {round}: {}", result.json());
        assert_eq!(s.print(&context, "1"), "1\n");
    }
    assert!(s.client.finish().success());
}

#[test]
fn two_servers_side_by_side_do_not_disturb_each_other() {
    let state = StateDir::new("shared");
    let mut first = Server::in_state(&state, "");
    let mut second = Server::in_state(&state, "");
    let a = first.create(json!({"name": "same-name"}));
    let b = second.create(json!({"name": "same-name"}));
    let mut marks = state.marks();
    first.print(&a, "x = 'first'; open('f', 'w').write(x)");
    assert!(second.run(&b, "x").field("stderr").contains("NameError"));
    assert!(second.run(&b, "open('f')").field("stderr").contains("FileNotFoundError"));
    assert_eq!(second.error("run_code", json!({"code": "1", "context_id": a})).0, "CONTEXT_NOT_FOUND");
    // One ends, even by force; the other goes on, also when a third starts and sweeps what was left.
    second.kill();
    let mut third = Server::in_state(&state, "");
    let c = third.create(json!({"name": "same-name"}));
    marks.extend(state.marks());
    assert_eq!(third.print(&c, "1"), "1\n");
    assert_eq!(first.print(&a, "x"), "'first'\n");
    assert!(first.client.finish().success() && third.client.finish().success());
    drop(second);
    drop(state);
    assert_no_traces(&marks);
}
