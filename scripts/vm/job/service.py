"""Installs and starts the unit file of `deploy/systemd`, and checks that it answers over HTTP and that a sandbox at its memory limit
loses only its own run."""

import subprocess
import sys

from mcp import Http, cgroups, check, failed

UNIT = "sandpool.service"


def systemctl(*words):
    return subprocess.run(["systemctl", *words], stdout=subprocess.PIPE, text=True).stdout.strip()


def state():
    return dict(line.split("=", 1) for line in systemctl("show", UNIT, "-p", "ActiveState,MainPID,NRestarts,Result,Delegate").splitlines())


def main():
    client = Http("http://127.0.0.1:8775")
    systemctl("daemon-reload")
    check("it starts", lambda r: r["ActiveState"] == "active", lambda: systemctl("start", UNIT) or state())
    before = state()
    check("it is ready", lambda r: r is None, client.wait_until_ready)
    check("it answers", lambda r: r["result"] == "2", lambda: client.call("run_code", code="1 + 1"))
    check("it has a disk of its own", lambda r: r["exit_code"] == 0, lambda: client.call("run_command", command="echo x >/workspace/x && cat /workspace/x"))
    base = lambda: [path for path in cgroups() if "/sandpool.service/" in path]
    check("its sandboxes are below its own cgroup", lambda r: r, base)
    check("a sandbox at its limit", lambda r: r["status"] == "out_of_memory", lambda: client.call("run_code", code="x = bytearray(400 << 20)"))
    check("it is the same process", lambda r: r == before, state)
    check("it answers still", lambda r: r["result"] == "4", lambda: client.call("run_code", code="2 + 2"))
    check("it ends", lambda r: (r["ActiveState"], r["Result"]) == ("inactive", "success"), lambda: systemctl("stop", UNIT) or state())
    check("nothing is left", lambda r: r == [], base)
    if failed:
        print(subprocess.run(["journalctl", "-u", UNIT, "-n", "30", "--no-pager", "-o", "cat"], stdout=subprocess.PIPE, text=True).stdout)
    sys.exit(bool(failed))


main()
