"""Installs and starts the unit file of `deploy/systemd`, and checks over HTTP that sandboxes have all they need under its restrictions,
that the restrictions are in force, and that nothing is left when it ends. A drop-in gives the unit what an operator may add, and more time
to stop, because emulation is slow."""

import contextlib
import glob
import json
import os
import re
import subprocess
import sys

from mcp import FORKS, PROGRAM, Http, cgroups, check, failed, wait_for

UNIT = "sandpool.service"
FILE = f"/etc/systemd/system/{UNIT}"
SETTINGS = """
floor = "full"
[dialect.sandpool]
memory_mb = 200
pids = 40
disk_mb = 64
timeout = 240
pool_size = 1
persist = true
[network]
allow = ["host:8775"]
[runtimes]
warm = false
[[mount]]
host = "/srv/shared"
guest = "/mnt/shared"
access = "rw"
"""
DROP_IN = """
[Service]
TimeoutStopSec=300
OOMScoreAdjust=-100
ReadWritePaths=/srv/shared
"""
# What `systemd-analyze security` calls the exposure of the unit, from 0 to 10 (docs/operating-reference.md).
EXPOSURE = 5.3
# The names of linux/capability.h, by number.
CAPABILITIES = """CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE NET_BROADCAST
NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME
SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF
CHECKPOINT_RESTORE""".split()
TERMINAL = """
import os, pty
child, terminal = pty.fork()
if not child: os._exit(7)
os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""
FETCH = "import urllib.request\nurllib.request.urlopen('http://host.sandpool.internal:8775/healthz').read()"
# The unit is more protected from the memory killer than its sandboxes may be.
PROTECT = "with open('/proc/self/oom_score_adj', 'w') as file: file.write('-100')"


def output(*command):
    return subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout.strip()


def systemctl(*words):
    return output("systemctl", *words)


def state():
    return dict(line.split("=", 1) for line in systemctl("show", UNIT, "-p", "ActiveState,MainPID,NRestarts,Result,Delegate").splitlines())


def write(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)


def bounding_set():
    """Returns the bounding set of the server, and the one that the unit file names."""
    with open(FILE) as unit, open(f"/proc/{state()['MainPID']}/status") as status:
        named = re.search("^CapabilityBoundingSet=(.+)$", unit.read(), re.M)[1].split()
        bits = int(re.search("^CapBnd:\\s*(.+)$", status.read(), re.M)[1], 16)
    return {f"CAP_{name}" for number, name in enumerate(CAPABILITIES) if bits >> number & 1}, set(named), bits >> len(CAPABILITIES)


def exposure():
    return output("systemd-analyze", "security", "--no-pager", UNIT).splitlines()[-1]


def reload():
    """Reloads the unit, which only sends a signal, and waits until the server has noted it."""
    reloads = lambda: output(PROGRAM, "journal", "show", "--last", "1000").count("reloaded")
    before = reloads()
    systemctl("reload", UNIT)
    return wait_for(reloads, lambda now: now > before) - before


def leftovers():
    found = [path for path in cgroups() if "/sandpool.service/" in path]
    for path in glob.glob("/proc/[0-9]*/exe"):
        with contextlib.suppress(OSError):
            found += [path] if "sandpool" in os.readlink(path) else []
    found += glob.glob("/sys/block/loop*/loop/backing_file") + glob.glob("/var/lib/sandpool/instances/*")
    with open("/proc/mounts") as mounts:
        found += [line for line in mounts if re.search("/(run|lib)/sandpool", line)]
    return found


def main():
    client = Http("http://127.0.0.1:8775")
    run = lambda code, **more: lambda: client.call("run_code", code=code, **more)
    command = lambda line: lambda: client.call("run_command", command=line)
    os.makedirs("/srv/shared")
    os.chown("/srv/shared", 1000, 1000)
    write("/etc/sandpool/sandpool.toml", SETTINGS)
    write(f"{FILE}.d/lab.conf", DROP_IN)
    systemctl("daemon-reload")
    check("it starts", lambda r: r["ActiveState"] == "active", lambda: systemctl("start", UNIT) or state())
    before = state()
    check("it is ready", lambda r: r is None, client.wait_until_ready)
    check("its capabilities are those that the file names", lambda r: r[0] == r[1] and not r[2], bounding_set)
    line = check(f"its exposure is {EXPOSURE} at most", lambda r: float(re.search(": ([0-9.]+)", r)[1]) <= EXPOSURE, exposure)
    print(f"     {line}")

    check("python", lambda r: r["result"] == "2", run("a = 1\na + 1"))
    check("javascript", lambda r: r["result"] == "[ 2, 4 ]", run("[1, 2].map(x => x * 2)", language="javascript"))
    check("shell, and a disk of its own", lambda r: r["exit_code"] == 0, command("echo x >x && stat -f -c %T . | grep ext"))
    check("its sandboxes are below its own cgroup", lambda r: r, lambda: [path for path in cgroups() if "/sandpool.service/" in path])
    check("devices of its own", lambda r: int(r["stdout"]) != os.stat("/dev/null").st_dev, command("stat -c %d /dev/null"))
    check("a writable mount", lambda r: r["exit_code"] == 0 and os.stat("/srv/shared/y").st_uid == 1000, command("echo y >/mnt/shared/y"))
    check("a terminal", lambda r: r["result"] == "7", run(TERMINAL))
    check("the network that the operator allows", lambda r: "ok" in r["result"], run(FETCH))
    check("process limit", lambda r: r["stdout"].split()[1] == "11" and int(r["stdout"].split()[0]) < 40, run(FORKS))
    check("it has no more protection from the memory killer", lambda r: r["error"]["name"] == "PermissionError", run(PROTECT))

    check("systemctl reload", lambda r: r == 1, reload)
    check("its contexts are kept", lambda r: r["result"] == "1", run("a"))
    check("admin ps", lambda r: [one["tenant"] for one in r] == ["local"], lambda: json.loads(output(PROGRAM, "admin", "ps", "--json")))
    check("memory limit", lambda r: r["status"] == "out_of_memory", run("x = bytearray(400 << 20)"))
    check("it answers still", lambda r: r["result"] == "4", run("2 + 2"))
    check("it stops a context", lambda r: r["status"] == "stopped", lambda: client.call("stop_context", context="default"))
    check("kept files", lambda r: r["stdout"] == "x\n", command("cat x"))
    check("it is the same process", lambda r: r == before, state)

    check("it ends", lambda r: (r["ActiveState"], r["Result"]) == ("inactive", "success"), lambda: systemctl("stop", UNIT) or state())
    check("nothing is left", lambda r: r == [], lambda: wait_for(leftovers, lambda found: found == []))
    if failed:
        print(output("journalctl", "-u", UNIT, "-n", "30", "--no-pager", "-o", "cat"))
    sys.exit(bool(failed))


main()
