"""Attacks on limits that only a machine with cgroup v2 can show, by a real client: rows of docs/hostile-catalogue.md. Each fails where the
fault is present. The limits are those of `checks.py`: 300 MB of memory, 40 processes."""

import glob
import threading
import time

from mcp import cgroups, check, counted

MB = 1 << 20
# The memory that the machine may lose during an attack beyond what the servers' cgroups are charged with. Without the limits, the
# attacks below take more than twice as much.
UNCHARGED = 100 * MB

# W01. A request that the kernel does not know is answered with a copy of it, and nobody reads the answers.
NETLINK = """
import socket, struct
held, refused = [], None
message = struct.pack("=IHHII", 16 + 400_000, 0x7fff, 1, 1, 0) + bytes(400_000)
try:
    for _ in range(500):
        one = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
        held.append(one)
        for size in (socket.SO_RCVBUF, socket.SO_SNDBUF): one.setsockopt(socket.SOL_SOCKET, size, 1 << 22)
        one.setblocking(False)
        for _ in range(2): one.send(message)
except OSError as error:
    refused = error
print(len(held), refused)
"""

# W03. Connections and datagrams that nobody reads, some 250 MB of each. Shown to fail on a kernel that is told `cgroup.memory=nosocket`.
TCP = """
import socket
held, sent, chunk = [], 0, bytes(1 << 16)
listener = socket.create_server(("127.0.0.1", 0), backlog=200)
for _ in range(150):
    one = socket.create_connection(listener.getsockname())
    held += [one, listener.accept()[0]]
    one.setblocking(False)
    try:
        while True: sent += one.send(chunk)
    except BlockingIOError: pass
print(sent)
"""
UDP = """
import socket
held, sent, chunk = [], 0, bytes(1 << 15)
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sender.setblocking(False)
for _ in range(900):
    one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    one.bind(("127.0.0.1", 0))
    held.append(one)
    for _ in range(12):
        try: sent += sender.sendto(chunk, one.getsockname())
        except OSError: break
print(sent)
"""

# W10. Memory that no process is blamed for, up to the limit; then the interpreter ends, and the next one is forked into the sandbox. Once
# with processes that hold the memory and go on asking for more, once with a file and shared memory, which stay when their makers have gone.
HELD = """
import os
if not os.fork():
    os.setsid()
    os.dup2(os.memfd_create("full"), 9)
    os.set_inheritable(9, True)
    for fd in range(3): os.dup2(os.open("/dev/null", os.O_RDWR), fd)
    os.execv("/bin/sh", ["sh", "-c", "sleep 600 & while :; do head -c 1000000 /dev/zero >&9; done"])
"""
LEFT = """
import ctypes, os
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
libc.shmat.argtypes = ctypes.c_int, ctypes.c_void_p, ctypes.c_int
with open("/dev/shm/full", "wb") as file:
    try:
        for _ in range(1000): file.write(bytes(1 << 20))
    except OSError: pass
if not os.fork():
    os.setsid()
    segment = libc.shmget(0, 1 << 30, 0o1600)
    if segment >= 0: ctypes.memset(libc.shmat(segment, None, 0), 1, 1 << 30)
    os._exit(0)
"""


class Watch:
    """Measures the most memory that the machine lost without charging the servers' cgroups, and how much they were charged."""

    def __enter__(self):
        self.most, self.charged, self.over = 0, 0, threading.Event()
        self.before = self.uncharged()
        self.thread = threading.Thread(target=self.look)
        self.thread.start()
        return self

    def look(self):
        while not self.over.wait(0.1):
            self.most = max(self.most, self.uncharged() - self.before)
            self.charged = max(self.charged, all_charged())

    def __exit__(self, *_):
        self.most = max(self.most, self.uncharged() - self.before)
        self.over.set()
        self.thread.join()

    @staticmethod
    def uncharged():
        with open("/proc/meminfo") as file:
            facts = {name: int(rest.split()[0]) * 1024 for name, rest in (line.split(":") for line in file)}
        return facts["MemTotal"] - facts["MemAvailable"] - all_charged()


def charged(path):
    try:
        with open(f"{path}/memory.current") as file:
            return int(file.read())
    except OSError:  # gone, or without memory
        return 0


def all_charged():
    return sum(charged(path) for path in cgroups())


def settled():
    """Waits until no more memory is given back, and returns how much is charged."""
    last = all_charged()
    while True:
        time.sleep(0.5)
        now = all_charged()
        if now >= last:
            return now
        last = now


def objects(server):
    """Runs each kind of `charged.py` in one context. The kernel memory of each kind has to be charged, or its number bounded."""
    server.call("create_context", name="objects")
    with open("/opt/job/charged.py") as file:
        server.call("write_file", context="objects", path="charged.py", content=file.read())
    take = lambda kind: server.call("run_command", context="objects", command=f"python3 charged.py {kind}")
    for kind in take("")["stdout"].split():
        check(f"{kind} of the kernel: charged, or bounded in number", within, lambda: held_objects(take, kind))
    server.call("stop_context", context="objects")


def held_objects(take, kind):
    before = settled()
    with Watch() as watch:
        answer = take(kind)
    return {"charged_kb": (watch.charged - before) // 1024, **answer}


def within(answer):
    count, most, least, _ = answer["stdout"].split()
    return (most == "-" or int(count) <= int(most)) and answer["charged_kb"] >= int(least) * 2 // 3


def watched(server, name, code):
    server.call("create_context", name=name)
    with Watch() as watch:
        answer = server.call("run_code", context=name, code=code)
    server.call("stop_context", context=name)
    return {"uncharged_mb": watch.most // MB, **answer}


def held(answer):
    """Returns whether the attack ran to its end or to its limit, and the machine lost no memory that nobody is charged for."""
    return answer["uncharged_mb"] < UNCHARGED // MB and answer["status"] in ("ok", "error", "out_of_memory")


def interpreters():
    """Returns the warm interpreters, which are processes of a runtime's Python in no sandbox."""
    found = {}
    for path in glob.glob("/proc/[0-9]*"):
        try:
            with open(f"{path}/cmdline", "rb") as line, open(f"{path}/status") as status:
                words = line.read()
                spaces = next(line for line in status if line.startswith("NSpid:")).split()[1:]
        except (OSError, StopIteration):
            continue
        if words.split(b"\0")[0] == b"/opt/sandpool/runtime/bin/python" and len(spaces) == 1:
            found[int(spaces[0])] = words.replace(b"\0", b" ").decode(errors="replace")[:80]
    return found


def full():
    """Returns how often a sandbox of any server was at its limit."""
    return counted("memory.events", "max")


def a_full_sandbox(server, name, code):
    before, at_first = interpreters(), full()
    server.call("create_context", name=name)
    server.call("run_code", context=name, code=code)
    end = time.time() + 120
    while full() == at_first and time.time() < end:
        time.sleep(0.2)
    answers = [server.call("run_code", context=name, code="import os; os._exit(0)").get("status") for _ in range(5)]
    after, times = interpreters(), full() - at_first
    server.call("stop_context", context=name)
    return {"before": before, "after": after, "times_full": times, "answers": answers}


def spared(seen):
    """Returns whether there were warm interpreters, and all of them survived."""
    return seen["before"] and seen["before"].keys() <= seen["after"].keys()


def all(server):
    check("W01: unread netlink answers are charged or refused", held, lambda: watched(server, "w01", NETLINK))
    check("W03: unread TCP is charged", held, lambda: watched(server, "w03-tcp", TCP))
    check("W03: unread UDP is charged", held, lambda: watched(server, "w03-udp", UDP))
    objects(server)
    full_and_spared = lambda seen: seen["times_full"] > 0 and spared(seen)
    check("W10: a sandbox full of held memory spares the warm interpreter", full_and_spared, lambda: a_full_sandbox(server, "w10-held", HELD))
    # A policy without System V shared memory keeps it from getting full.
    check("W10: so does one full of memory that nobody holds", spared, lambda: a_full_sandbox(server, "w10-left", LEFT))
    check("alive after the attacks", lambda r: r["result"] == "2", lambda: server.call("run_code", code="1 + 1"))
