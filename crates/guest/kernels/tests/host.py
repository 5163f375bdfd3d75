"""The guest's part of the driver protocol, for tests: pipes, events, the drain rule, the interrupt ladder."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import struct
import subprocess
import termios
import time
from dataclasses import dataclass, field
from typing import Any


def reserve(numbers: tuple[int, ...]) -> None:
    """Keeps these descriptors open. `subprocess` refuses numbers in `pass_fds` that are not open in this process, too; the
    threads of the tests open and close descriptors all the time, so that by chance one of them would not be."""
    for number in numbers:
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDONLY)
            if opened != number:
                os.dup2(opened, number, inheritable=False)
                os.close(opened)


reserve((3, 4, 5))


@dataclass
class Outcome:
    """What one cell gave. `order` has streams and events as the guest would put them."""

    stdout: str = ""
    stderr: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    order: list[tuple[str, str]] = field(default_factory=list)
    status: str = ""  # of `done`; or `died <returncode>`, `killed`, `silent`
    ms: float = 0.0
    after_interrupt: float = 0.0  # seconds

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["t"] == kind]

    @property
    def result(self) -> str | None:
        found = self.of("result")
        return found[-1]["data"].get("text/plain") if found else None

    @property
    def error(self) -> str | None:
        found = self.of("error")
        return found[-1]["text"] if found else None


def chosen(env: dict[str, str]) -> dict[str, str]:
    """The whole environment of a kernel."""
    # With a language, as in a sandbox: without one Python sets a variable of its own, which no fork is asked for.
    return {"LANG": "C.UTF-8", **{k: v for k, v in os.environ.items() if k in ("PATH", "TMPDIR")}, **env}


class Warm:
    """A warm interpreter, and this process in the place of the launcher and of PID 1."""

    def __init__(self, argv: list[str], env: dict[str, str]) -> None:
        subreaper = 36
        assert ctypes.CDLL(None).prctl(subreaper, 1, 0, 0, 0) == 0
        self.launcher, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def place() -> None:
            os.dup2(high, 3, inheritable=True)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 4, inheritable=True)

        high = fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD, 200)
        self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, cwd="/", pass_fds=(3, 4), preexec_fn=place, env=chosen(env))
        os.close(high)
        theirs.close()
        self.not_imported: dict[str, str] | None = None

    def reports(self) -> dict[str, str]:
        """What it could not import, which is the first thing that it says."""
        if self.not_imported is None:
            kind, *report = self.launcher.recv(1 << 16).partition(b"j")[1:]
            assert kind == b"j", "the warm interpreter ended"
            self.not_imported = json.loads(report[0])["not_imported"]
        return self.not_imported

    def fork_into(self, channel: socket.socket) -> Forked:
        self.reports()
        socket.send_fds(self.launcher, [b"f"], [channel.fileno()])
        channel.close()
        return Forked(int.from_bytes(self.launcher.recv(4), "little"))

    def fork(self, env: dict[str, str], cwd: str, descriptors: list[int]) -> Forked:
        guest, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        forked = self.fork_into(channel)
        with guest:
            socket.send_fds(guest, [json.dumps({"env": env, "cwd": cwd}).encode()], descriptors)
        return forked

    def close(self) -> int:
        self.launcher.close()
        return self.process.wait(10)


class Forked:
    """As much of `subprocess.Popen` as is used here."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = 10) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.002)
        return code

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


class Kernel:
    def __init__(self, argv: list[str] | Warm, env: dict[str, str] | None = None, cwd: str | None = None,
                 interrupt_pipe: bool = False, merged: bool = False) -> None:
        req_r, self.req = os.pipe()
        self.evt, evt_w = os.pipe()
        int_r, self.int = os.pipe()
        self.out, out_w = os.pipe()
        self.err, err_w = os.pipe()
        if merged:
            os.dup2(out_w, err_w)
        self.interrupt_pipe = interrupt_pipe
        wanted = {3: req_r, 4: evt_w, 5: int_r}
        high = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, 200) for number, fd in wanted.items()}

        def place() -> None:
            for number, fd in high.items():
                os.dup2(fd, number, inheritable=True)

        env = chosen({"KREQ": "3", "KEVT": "4", "KINT": "5", **(env or {})})
        self.started = time.perf_counter()
        self.process: subprocess.Popen[bytes] | Forked
        if isinstance(argv, Warm):
            self.process = argv.fork(env, cwd or "/", [out_w, err_w, req_r, evt_w])
        else:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out_w, stderr=err_w, cwd=cwd, start_new_session=True,
                pass_fds=(3, 4, 5), preexec_fn=place, env=env)
        for fd in (req_r, evt_w, int_r, out_w, err_w, *high.values()):
            os.close(fd)
        self.n = 0
        self.buffer = b""
        self.log: list[dict[str, Any]] = []

    def ready(self, timeout: float = 30) -> Outcome:
        return self.wait("ready", timeout)

    def run(self, code: str, timeout: float = 20, interrupt: float | None = None, grace: float = 4,
            map: str | None = None, stale: bool = False, env: dict[str, str] | None = None) -> Outcome:
        """`stale`: the interrupt of the cell before comes only now."""
        self.n += 1
        request = {"t": "run", "n": self.n, "code": code}
        if map is not None:
            request["map"] = map
        if env is not None:
            request["env"] = env
        data = json.dumps(request).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self.req, data):]
        except BrokenPipeError:
            return self.died(Outcome())
        if stale:
            self.nudge(self.n - 1)
        return self.wait("done", timeout, interrupt, grace)

    def nudge(self, n: int) -> None:
        os.write(self.int, struct.pack("<I", n))

    def wait(self, until: str, timeout: float, interrupt: float | None = None, grace: float = 4) -> Outcome:
        outcome = Outcome()
        start = time.perf_counter()
        sent = escalated = None
        while True:
            now = time.perf_counter() - start
            if interrupt is not None and sent is None and now >= interrupt:
                os.kill(self.process.pid, signal.SIGINT)
                sent = now
            if sent is not None and escalated is None and self.interrupt_pipe and now - sent > 0.1:
                self.nudge(self.n)
                escalated = now
            if sent is not None and now - sent > grace:
                self.stop()
                outcome.status = "killed"
                return outcome
            if now > timeout:
                outcome.status = "silent"
                return outcome
            readable, _, _ = select.select([self.out, self.err, self.evt], [], [], 0.02)
            for fd, name in ((self.out, "stdout"), (self.err, "stderr")):
                if fd in readable:
                    self.take(outcome, fd, name, 65536)
            if self.evt in readable:
                data = os.read(self.evt, 1 << 20)
                if not data:
                    return self.died(outcome)
                self.buffer += data
            while b"\n" in self.buffer:
                line, self.buffer = self.buffer.split(b"\n", 1)
                assert len(line) < 12_000_000, f"a line of {len(line)} bytes"
                event = json.loads(line.decode("utf-8", "strict"))
                self.drain(outcome)
                outcome.events.append(event)
                outcome.order.append(("event", event["t"]))
                self.log.append(event)
                if event["t"] == until:
                    outcome.status = event.get("status", until)
                    outcome.ms = (time.perf_counter() - start) * 1000
                    if sent is not None:
                        outcome.after_interrupt = time.perf_counter() - start - sent
                    return outcome

    def take(self, outcome: Outcome, fd: int, name: str, size: int) -> int:
        data = os.read(fd, size)
        text = data.decode("utf-8", "surrogateescape")
        setattr(outcome, name, getattr(outcome, name) + text)
        if outcome.order and outcome.order[-1][0] == name:
            text = outcome.order.pop()[1] + text
        outcome.order.append((name, text))
        return len(data)

    def drain(self, outcome: Outcome) -> None:
        """Exactly what the pipes hold now: nobody can keep this from ending."""
        for fd, name in ((self.out, "stdout"), (self.err, "stderr")):
            held = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0" * 4))[0]
            while held > 0:
                held -= self.take(outcome, fd, name, held)

    def died(self, outcome: Outcome) -> Outcome:
        try:
            outcome.status = f"died {self.process.wait(5)}"
        except subprocess.TimeoutExpired:
            outcome.status = "hung"
            self.stop()
        self.drain(outcome)
        return outcome

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.stop()
        for fd in (self.req, self.evt, self.int, self.out, self.err):
            os.close(fd)
