//! Two tenants' sandboxes side by side: what code in one can see of the other (X02 to X08, X15, X17).

use std::net::TcpStream;

use serde_json::json;
use testkit::http::Mcp;

use crate::support::{Service, report};

const MARK: &str = "a-mark-of-blue-8c1f";

/// Blue leaves itself everywhere it can.
const BLUE: &str = r"
import fcntl, mmap, os, socket, subprocess, time
mark = 'a-mark-of-blue-8c1f'
os.environ['MARK'] = mark
child = subprocess.Popen(['sleep', '600'], env={'MARK': mark, 'PATH': os.environ['PATH']}, executable='/bin/sleep')
argv = subprocess.Popen([mark, '600'], executable='/bin/sleep')
listeners = []
for family, address in ((socket.AF_INET, '127.0.0.1'), (socket.AF_INET, '0.0.0.0'), (socket.AF_INET6, '::1')):
    try:
        s = socket.socket(family); s.bind((address, 8000 + len(listeners))); s.listen(); listeners.append(s)
    except OSError: pass
u = socket.socket(socket.AF_UNIX); u.bind('\0' + mark); u.listen()
for directory in ('/dev/shm', '/tmp', '/workspace', '/dev/mqueue', '/run', '/var/tmp', '/home'):
    try: open(directory + '/' + mark, 'w').write(mark)
    except OSError: pass
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
shm = libc.shmget(0x5a4d, 4096, 0o1666)
sem = libc.semget(0x5a4d, 1, 0o1666)
base = os.open('/etc/passwd', os.O_RDONLY)
lock = 'locked'
try: fcntl.flock(base, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError as e: lock = e.errno
try:
    fcntl.fcntl(base, 1024, 0); lease = 'leased'
except OSError as e: lease = e.errno
print('left', len(listeners), 'shm', shm >= 0, 'lock', lock, 'lease', lease)
";

/// Green looks for it.
const GREEN: &str = r"
import ctypes, errno, fcntl, os, socket, time
mark = 'a-mark-of-' + 'blue-8c1f'
found = []
for pid in filter(str.isdigit, os.listdir('/proc')):
    for name in ('environ', 'cmdline', 'comm'):
        try:
            if mark.encode() in open(f'/proc/{pid}/{name}', 'rb').read(): found.append((pid, name))
        except OSError: pass
pids = [int(pid) for pid in os.listdir('/proc') if pid.isdigit()]
for pid in range(2, 400):
    if pid in pids: continue
    try: os.kill(pid, 0); found.append(('kill', pid))
    except ProcessLookupError: pass
mounts = [line.split()[4:6] for line in open('/proc/self/mountinfo')]
for directory in [at for at, options in mounts if options.split(',')[0] == 'rw' and not at.startswith(('/proc', '/sys'))]:
    for base, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(base, name)
            try:
                if os.lstat(path).st_uid != os.getuid(): continue
                if mark in name or (os.path.isfile(path) and mark in open(path, errors='replace').read(100_000)): found.append(path)
            except OSError: pass
for family, address in ((socket.AF_INET, '127.0.0.1'), (socket.AF_INET6, '::1')):
    for port in (8000, 8001, 8002):
        try:
            s = socket.socket(family); s.settimeout(2); s.connect((address, port)); found.append((address, port))
        except OSError: pass
try: socket.socket(socket.AF_UNIX).connect('\0' + mark); found.append('abstract')
except OSError: pass
libc = ctypes.CDLL(None, use_errno=True)
if libc.shmget(0x5a4d, 4096, 0o666) >= 0: found.append('shm')
if libc.semget(0x5a4d, 1, 0o666) >= 0: found.append('sem')
if mark in str(os.environ): found.append('env')
if mark in str([globals().get(name) for name in ('_', '__', '_i', '_ii', 'Out')]) or 'listeners' in globals(): found.append('variables')
start = time.monotonic()
open('/etc/passwd').read()
if time.monotonic() - start > 20: found.append('stalled by a lease')
print('found', found)
";

/// X17: what all tenants share cannot be written to.
const POISON: &str = r"
import os, site, sys
places = [p for p in sys.path + site.getsitepackages() if p and os.path.isdir(p) and not p.startswith('/workspace')]
places += ['/usr/lib', '/usr/local/lib', '/usr/bin', '/etc', '/opt', '/lib', os.path.dirname(sys.executable), os.path.dirname(os.__file__)]
written = []
for place in dict.fromkeys(places):
    for name in ('x.pth', 'sitecustomize.py', 'pip.conf'):
        try: open(os.path.join(place, name), 'a').close(); written.append(place)
        except OSError: pass
    try: os.utime(place, (0, 0)); written.append('utime ' + place)
    except OSError: pass
print('written', written, len(places) > 5)
";

fn run(client: &mut Mcp, context: &str, code: &str) -> String {
    client.good("run_code", json!({ "code": code, "context": context }))["stdout"].as_str().unwrap().to_owned()
}

fn context(client: &mut Mcp) -> String {
    client.good("create_context", json!({}))["context"].as_str().unwrap().to_owned()
}

#[test]
fn neighbours_see_nothing_of_each_other() {
    let service = Service::start("neighbours");
    let mut canary = service.canary();
    let (mut blue, mut green) = (service.client("blue", "sandpool"), service.client("green", "sandpool"));
    let (mine, theirs) = (context(&mut blue), context(&mut green));
    let left = run(&mut blue, &mine, BLUE);
    assert!(left.starts_with("left "), "{left}");
    assert!(!left.contains("leased"), "a lease on a shared file: {left}");
    assert_eq!(run(&mut green, &theirs, GREEN), "found []\n");
    // Another context of the same tenant is no closer.
    let second = context(&mut blue);
    assert_eq!(run(&mut blue, &second, GREEN), "found []\n");
    // The search would find it: in its own place it does.
    let own = run(&mut blue, &mine, GREEN);
    for kind in ["environ", "cmdline", "/dev/shm", "/tmp", "127.0.0.1", "abstract", "env", "variables"] {
        assert!(own.contains(kind), "{kind}: {own}");
    }
    for port in 8000..8003 {
        for address in ["127.0.0.1", "[::1]"] {
            assert!(TcpStream::connect(format!("{address}:{port}")).is_err(), "the host reaches {address}:{port}");
        }
    }
    report("X02", "environment and arguments of another context's processes: not visible");
    report("X03", "processes of another context: not listed, not there for a signal");
    report("X04", "listeners on 127.0.0.1, 0.0.0.0 and ::1 of one context: unreachable from another and from the host");
    report("X05", "shared memory, semaphores, queues and abstract sockets: separate");
    report("X08", &format!("leases on shared files are refused; locks there delay nobody who reads ({})", left.trim()));

    let poison = run(&mut blue, &mine, POISON);
    assert_eq!(poison, "written [] True\n");
    report("X17", "interpreters, packages and system files that all share: read-only");

    // X15: what comes after is new, whoever asks for it.
    blue.good("stop_context", json!({ "context": mine }));
    for client in [&mut green, &mut blue] {
        for _ in 0..10 {
            let next = context(client);
            assert_eq!(run(client, &next, GREEN), "found []\n");
            client.good("stop_context", json!({ "context": next }));
        }
    }
    report("X15", "contexts made after one that left marks in files, memory and processes: none of them is there");
    canary.sings("neighbours");
    assert!(!service.log().contains(MARK));
    service.finish();
}
