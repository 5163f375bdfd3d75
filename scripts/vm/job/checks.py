"""Checks one server over MCP on stdio: what a sandbox offers, which limits it enforces, and how attacks on them end. Prints one line for
each check; the exit code is 1 if one fails. Arguments: `attacks` also runs the attacks; `no-javascript` is for machines without Node."""

import sys
import time

import attacks
from mcp import FORKS, Stdio, cgroups, check, counted, failed, passed

SETTINGS = """
[dialect.sandpool]
memory_mb = 300
cpus = 1.0
pids = 40
disk_mb = 64
timeout = 240
pool_size = 1
"""
BURN = """
import os, time
def burn(seconds):
    end = time.time() + seconds
    while time.time() < end: pass
children = []
for _ in range(2):
    child = os.fork()
    if not child:
        burn(6); os._exit(0)
    children.append(child)
for child in children: os.waitpid(child, 0)
"""
FILL = """
try:
    with open("/workspace/full", "wb") as file:
        for _ in range(200): file.write(bytes(1 << 20))
    print("no limit")
except OSError as error:
    print(error.errno)
import os; os.remove("/workspace/full")
"""


def stopped():
    """Returns the number of periods in which a sandbox, or all sandboxes of a tenant together, reached the limit."""
    return counted("cpu.stat", "nr_throttled")


def burned(run):
    before = stopped()
    answer = run()
    return {"stopped": stopped() - before, **answer}


def typescript(server):
    """Runs TypeScript, repeatedly at first: under emulation, a debug build may need longer than the guest waits for its transpiler."""
    end = time.time() + 60
    while True:
        answer = server.call("run_code", code="enum C { Red, Green }; C[1]", language="typescript")
        if "took too long" not in str(answer.get("error")) or time.time() > end:
            return answer


def main():
    begun = time.time()
    server = Stdio(SETTINGS)
    server.wait_until_ready()
    passed(begun, "the server is ready")
    run = lambda code, **more: lambda: server.call("run_code", code=code, **more)
    check("pandas", lambda r: "3" in r["result"], run("import pandas as pd\npd.DataFrame({'n': range(3)}).n.sum()"))
    check("state is kept", lambda r: r["result"] == "4", run("a = 4\na"))
    if "no-javascript" not in sys.argv:
        check("javascript", lambda r: r["result"] == "[ 2, 4 ]", run("[1, 2].map(x => x * 2)", language="javascript"))
        check("typescript", lambda r: r["result"] == "'Green'", lambda: typescript(server))
    check("shell", lambda r: r["exit_code"] == 0, lambda: server.call("run_command", command="id"))
    check("no network", lambda r: r["error"]["name"] == "OSError", run("import socket; socket.create_connection(('1.1.1.1', 80), 3)"))
    check("no host files", lambda r: r["error"]["name"] == "FileNotFoundError", run("open('/etc/shadow')"))
    check("disk limit", lambda r: r["stdout"].strip() == "28", run(FILL))
    check("process limit", lambda r: r["stdout"].split()[1] == "11" and int(r["stdout"].split()[0]) < 40, run(FORKS))
    # Two processes want two processors, and one is allowed. Times inside mean nothing where the emulator waits for its host; the
    # kernel's own count of periods in which they were stopped does.
    check("cpu limit", lambda r: r["stopped"] > 0 and r["status"] == "ok", lambda: burned(run(BURN)))
    check("time limit", lambda r: r["status"] == "timed_out", run("while True: pass", timeout=5))
    check("alive after the time limit", lambda r: r["result"] == "4", run("a"))
    check("memory limit", lambda r: r["status"] == "out_of_memory", run("x = bytearray(600 << 20)"))
    check("alive after the memory limit", lambda r: r["result"] == "2", run("1 + 1"))
    if "attacks" in sys.argv:
        attacks.all(server)
    begun = time.time()
    code = server.end()
    passed(begun, f"the server ended with {code}")
    check("nothing is left", lambda r: r == [], lambda: [path for path in cgroups() if not path.endswith("/sandpool-server")])
    sys.exit(bool(failed))


main()
