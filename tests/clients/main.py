"""Every client, over stdio and HTTP, in both eras: main.py [--write] [--only WORDS]; scripts/test-clients calls it.

Prints a JSON line for every step. What came of it all is docs/clients.md: written with --write, otherwise it has to be the same.
"""

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import clients
import story

BOTH = ["modern", "legacy"]
ROWS = [
    ("Python `mcp` 2.3.0", clients.Python, BOTH),
    ("`fastmcp` 4.1.2", clients.FastMcp, BOTH),
    ("`fastmcp call`", clients.FastMcpCommand, ["modern"]),
    ("TypeScript `client` 2.4.0", clients.TypeScript, BOTH),
    ("TypeScript `sdk` 1.32.2", clients.TypeScriptSdk, ["legacy"]),
    ("Python `mcp` 1.9.4", clients.OlderPython, ["2025-03-26"]),
    ("TypeScript `sdk` 1.10.2", clients.OlderTypeScriptSdk, ["2024-11-05"]),
    ("Inspector 2.12.0 `--cli`", clients.Inspector, BOTH),
    ("`mcporter` 0.12.3", clients.McPorter, ["legacy"]),
]
DIALECTS_TOO = {clients.Python, clients.TypeScript, clients.TypeScriptSdk, clients.OlderPython, clients.OlderTypeScriptSdk}
AT_ONCE = 3
# How much of the server's log a failed step prints.
LOG_LINES = 60


class Server:
    """A server of our own, on a free port."""

    def __init__(self, program, directory, token=None):
        self.program, self.directory, self.token = program, directory, token

    def __enter__(self):
        self.directory.mkdir(parents=True)
        self.log = log = self.directory / "stderr.log"
        env = os.environ | ({"SANDPOOL_API_TOKEN": self.token} if self.token else {})
        with open(log, "wb") as to:
            command = [self.program, "serve", "--state-dir", str(self.directory / "state"), "--listen", "127.0.0.1:0"]
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=to, env=env)
        end = time.monotonic() + 60
        while not (found := re.search(r"listening: (http://\S+)/mcp ", log.read_text())):
            if self.process.poll() is not None or time.monotonic() > end:
                self.process.kill()
                raise SystemExit(f"the server did not start:\n{log.read_text()}")
            time.sleep(0.05)
        self.base = found[1]
        return self

    def __exit__(self, *_):
        self.process.terminate()
        code = self.process.wait(60)
        story.check(code == 0, f"the server ended with {code}")


class Row:
    def __init__(self, name, kind, transport, era):
        self.name, self.kind, self.transport, self.era = name, kind, transport, era
        self.title = f"{name}, {transport}, {era}"
        self.cells = {}
        self.dialects = {}

    def tell(self, world):
        self.world = world
        self.home = world.directory / re.sub(r"\W+", "-", self.title.replace("`", ""))
        self.home.mkdir()
        self.log = self.home / "server.log"
        self.client = self.kind(self.home)
        self.step(self.cells, "end", self.story)
        if self.transport == "HTTP":
            self.step(self.cells, "token", lambda: story.with_token(self.with_token))
        if self.kind in DIALECTS_TOO:
            for dialect in story.DIALECTS:
                self.step(self.dialects, dialect, lambda: self.in_dialect(dialect))
        self.step(self.cells, "end", self.client.close)

    def story(self):
        with self.connect() as client:
            tale = story.Story(client)
            for step, action in story.STEPS.items():
                self.step(self.cells, step, lambda: action(tale))

    def step(self, cells, name, action):
        begun = time.monotonic()
        try:
            action()
            cells[name], why = "yes", None
        except story.Impossible as reason:
            cells[name], why = reason, str(reason)
        except Exception:
            cells[name], why = self.failed(name), traceback.format_exc()
        line = {"client": self.title, "step": name, "result": str(cells[name]), "seconds": round(time.monotonic() - begun, 1)}
        print(json.dumps(line | ({"why": why} if why else {})), flush=True)

    def failed(self, step):
        log = self.log if self.transport == "stdio" else self.world.open.log
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        said = "\n".join(lines[-LOG_LINES:])
        self.world.failures.append(f"{self.title}: {step}\n{traceback.format_exc()}The server's log ends with:\n{said}")
        return "**no**"

    def connect(self, dialect="sandpool"):
        if self.transport == "stdio":
            state = self.home / "state"
            # The clients treat the server's standard error differently, so it goes to a file.
            command = ["sh", "-c", 'exec "$@" 2>>"$0"', str(self.log)]
            command += ["env", f"XDG_DATA_HOME={os.environ['XDG_DATA_HOME']}", self.world.program, "stdio"]
            command += ["--state-dir", str(state), "--dialect", dialect]
            return self.client.at(clients.Place(self.era, command=command))
        return self.client.at(clients.Place(self.era, url=f"{self.world.open.base}/mcp/{dialect}"))

    def with_token(self, token):
        server = self.world.closed
        token = server.token if token == "right" else token
        return self.client.at(clients.Place(self.era, url=f"{server.base}/mcp", token=token))

    def in_dialect(self, dialect):
        with self.connect(dialect) as client:
            story.in_dialect(client, dialect, f"story-{secrets.token_hex(4)}")


def page(rows):
    """Nothing in it depends on time or machine."""
    notes = []

    def shown(cell):
        if not isinstance(cell, story.Impossible):
            return cell or ""
        if str(cell) not in notes:
            notes.append(str(cell))
        return f"– ({notes.index(str(cell)) + 1})"

    def table(columns, chosen, cells):
        yield "| client | transport | revision | " + " | ".join(columns) + " |"
        yield "|---" * (3 + len(columns)) + "|"
        for row in chosen:
            values = [shown(cells(row).get(column)) for column in columns]
            yield f"| {row.name} | {row.transport} | {clients.REVISIONS[row.era]} | " + " | ".join(values) + " |"

    story_table = list(table([*story.STEPS, "token"], rows, lambda row: row.cells))
    dialects = list(table(list(story.DIALECTS), [row for row in rows if row.dialects], lambda row: row.dialects))
    lines = [
        "# Real clients, as run",
        "",
        "`scripts/test-clients --write` writes this page; every `make test` runs the clients again and compares. Each row is a client that other projects",
        "wrote. It performs the steps of `tests/clients/story.py`: list the tools, create a context, run code, see the variable in a second run, get a figure",
        "as an image, put a file, fetch its link and read it as a resource, cancel a long call and have the context free again, read the errors,",
        "stop the context and read that it is stopped. `token`: the server refuses the client without a token and with a wrong one, and serves it with the",
        "right one. If a library reports any problem, even only in its log, its row fails.",
        "",
        *story_table,
        "",
        "Not possible with this client:",
        "",
        *[f"{number}. {note}" for number, note in enumerate(notes, 1)],
        "",
        "The libraries receive progress before they cancel; Ctrl-C cancels the commands. Over stdio `mcporter` treats every refused call as the end of the",
        "server and starts a new one, so the contexts are lost; the story then continues with a new context. `fastmcp call` prints links as text.",
        "",
        "## The other dialects",
        "",
        "The list of tools, and calls whose answers are read: runs that leave files, files up and down, long outputs, pictures. The files behind the",
        "links are fetched. The libraries check each answer against the tool's schema; those of older revisions refuse a whole answer if they do not know",
        "the type of one of its blocks.",
        "",
        *dialects,
    ]
    return "\n".join(lines) + "\n"


class World:
    """What the rows share."""

    def __init__(self, program, directory):
        self.program, self.directory, self.failures = program, directory, []


def main():
    # Clients are cancelled with SIGINT, which a shell that starts this in the background leaves ignored for all of them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("document", type=pathlib.Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", help="rows whose title has these words")
    options = parser.parse_args()
    shutil.rmtree(options.directory, ignore_errors=True)
    options.directory.mkdir(parents=True)
    world = World(options.program, options.directory)
    rows = [
        Row(name, kind, transport, era)
        for name, kind, eras in ROWS
        for transport, era in itertools.product(["stdio", "HTTP"], eras)
    ]
    if options.only:
        rows = [row for row in rows if options.only in row.title.replace("`", "")]
    with contextlib.ExitStack() as servers:
        world.open = servers.enter_context(Server(world.program, world.directory / "open"))
        world.closed = servers.enter_context(Server(world.program, world.directory / "closed", secrets.token_hex(16)))
        # The slow ones are not left for last.
        by_weight = sorted(rows, key=lambda row: issubclass(row.kind, clients.Lines))
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda row: row.tell(world), by_weight))
    for failure in world.failures:
        print(failure, file=sys.stderr)
    if world.failures or options.only:
        return 1 if world.failures else 0
    text = page(rows)
    if options.write:
        options.document.write_text(text)
    elif options.document.read_text() != text:
        print(text, file=sys.stderr)
        print(f"{options.document.name} says something else: scripts/test-clients --write", file=sys.stderr)
        return 1
    return 0


sys.exit(main())
