"""Looks for processes that appear, and tries to get into each while it is not yet held."""

import ctypes
import json
import os
import signal

libc = ctypes.CDLL(None, use_errno=True)
PTRACE_SEIZE, PTRACE_DETACH, PIDFD_OPEN, PIDFD_GETFD = 0x4206, 17, 434, 438


def status(pid: int) -> dict[str, str]:
    with open(f"/proc/{pid}/status") as lines:
        return dict(line.rstrip("\n").split(":\t", 1) for line in lines if ":\t" in line)


def reach(pid: int) -> list[str]:
    """What of it can be had."""
    had = []
    for name, flags in (("mem", os.O_RDWR), ("environ", os.O_RDONLY), ("maps", os.O_RDONLY)):
        try:
            fd = os.open(f"/proc/{pid}/{name}", flags)
        except OSError:
            continue
        # Of a process that has ended everything can be opened, and nothing is in it.
        if name == "mem" or readable(fd):
            had.append(name)
        os.close(fd)
    if libc.ptrace(PTRACE_SEIZE, pid, 0, 0) == 0:
        had.append("ptrace")
        os.kill(pid, signal.SIGKILL)
    process = libc.syscall(PIDFD_OPEN, pid, 0)
    if process >= 0:
        for fd in range(3, 12):
            if libc.syscall(PIDFD_GETFD, process, fd, 0) >= 0:
                had.append(f"descriptor {fd}")
        os.close(process)
    return had


def readable(fd: int) -> bool:
    try:
        return os.read(fd, 1) != b""
    except OSError:
        return False


def own_child() -> list[str]:
    child = os.fork()
    if child == 0:
        signal.pause()
    had = reach(child)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return [name for name in had if name == "mem"]


told = {"own child": own_child(), "seen": 0, "reached": []}
print("ready", flush=True)
last = os.getpid()
known: set[int] = set()
while not os.path.exists("stop"):
    for pid in range(last + 1, last + 8):
        try:
            found = status(pid)
            held = found["Seccomp"] == "2"
            if pid not in known:
                known.add(pid)
                told["seen"] += 1
                with open("seen", "w") as count:
                    count.write(str(told["seen"]))
            had = [] if held else reach(pid)
            # It may have been held, and an ordinary process of the sandbox, by the time of the attempt.
            if had and status(pid)["Seccomp"] != "2":
                told["reached"].append([pid, found["Uid"], had])
        except (OSError, KeyError, ValueError):
            continue
    last = max(known, default=last) - 1 if known else last
with open("told.tmp", "w") as file:
    json.dump(told, file)
os.rename("told.tmp", "told.json")
