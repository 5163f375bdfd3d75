"""A client of one server, over stdio or HTTP, and the lines that a check prints, for the scripts in this directory."""

import contextlib
import glob
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request

PROGRAM = "/opt/job/sandpool"
PATIENCE = 300
# Prints how many processes code could start, and the error of the next one.
FORKS = """
import os, time
made = []
try:
    for _ in range(200):
        child = os.fork()
        if not child:
            time.sleep(1000); os._exit(0)
        made.append(child)
except OSError as error:
    print(len(made), error.errno)
for child in made: os.kill(child, 9); os.waitpid(child, 0)
"""


class Client:
    """The part of a client that both transports share."""

    def call(self, tool, **arguments):
        answer = self.ask("tools/call", {"name": tool, "arguments": arguments})
        text = "\n".join(part.get("text", "") for part in answer.get("result", {}).get("content", []))
        try:
            found = json.loads(text)
        except ValueError:
            return {"text": text or json.dumps(answer)}
        # A run that succeeded leaves these out.
        usual = {"status": "ok", "exit_code": 0} if isinstance(found, dict) and found.get("success") is True else {}
        return {**usual, **found} if usual else found

    def wait_until_ready(self):
        end = time.time() + PATIENCE
        while self.call("run_code", code="1").get("status") == "not_run" and time.time() < end:
            time.sleep(1)


class Stdio(Client):
    def __init__(self, settings):
        self.config = tempfile.NamedTemporaryFile("w", suffix=".toml")
        self.config.write(settings)
        self.config.flush()
        self.log = tempfile.TemporaryFile("w+")
        command = [PROGRAM, "--config", self.config.name, "stdio"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True)
        self.number = 0
        hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "checks", "version": "1"}}
        self.ask("initialize", hello)
        self.send({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def send(self, message):
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def ask(self, method, params):
        self.number += 1
        self.send({"jsonrpc": "2.0", "id": self.number, "method": method, "params": params})
        for line in self.process.stdout:
            message = json.loads(line)
            if message.get("id") == self.number:
                return message
        self.log.seek(0)
        sys.exit("FAIL the server ended:\n" + self.log.read()[-2000:])

    def end(self):
        self.process.stdin.close()
        return self.process.wait(60)


class Http(Client):
    def __init__(self, address):
        self.address = address

    def wait_until_ready(self):
        end = time.time() + PATIENCE
        while True:
            try:
                with urllib.request.urlopen(f"{self.address}/readyz", timeout=10):
                    return
            except OSError:
                if time.time() > end:
                    raise
                time.sleep(0.5)

    def ask(self, method, params):
        body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode()
        request = urllib.request.Request(f"{self.address}/mcp", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return json.load(answer)


failed = []


def check(name, expected, act):
    """Prints whether `expected` holds for the result of `act`. A check that raises an error has failed."""
    begun = time.time()
    try:
        got = act()
    except Exception as error:
        got = {"exception": repr(error)}
    try:
        well = bool(expected(got))
    except Exception:
        well = False
    if not well:
        failed.append(name)
    shown = "" if well else "  " + json.dumps(got, default=str)[:1500]
    print(f"{'ok  ' if well else 'FAIL'} {time.time() - begun:6.1f} s  {name}{shown}", flush=True)
    return got


def wait_for(act, holds):
    """Repeats `act` until `holds` is true of its result. Returns the last result."""
    end = time.time() + PATIENCE
    while not holds(got := act()) and time.time() < end:
        time.sleep(0.5)
    return got


def passed(since, what):
    print(f"     {time.time() - since:6.1f} s  {what}", flush=True)


def counted(file, name):
    """Returns the sum of a counter in this file of every cgroup below the topmost cgroups of servers."""
    times = 0
    for top in cgroups():
        for path in glob.glob(f"{top}/**/{file}", recursive=True):
            with contextlib.suppress(OSError), open(path) as lines:
                times += sum(int(line.split()[1]) for line in lines if line.startswith(f"{name} "))
    return times


def cgroups():
    """Returns the topmost cgroups of servers, which contain all their sandboxes."""
    found = []
    for top, names, _ in os.walk("/sys/fs/cgroup"):
        own = [name for name in names if name.startswith("sandpool-")]
        found += [os.path.join(top, name) for name in own]
        names[:] = [name for name in names if name not in own]
    return found
