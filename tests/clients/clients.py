"""The clients, each as an object with four methods: `list`, `call`, `read` and `cancelled`, for the place it is `at`.

The libraries are driven by a process of their own that speaks lines (driver.py, typescript.mjs). The others are commands, one for
each call; there a person cancels with Ctrl-C.
"""

import contextlib
import json
import os
import queue
import re
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from story import Impossible, Refused, check

HERE = Path(__file__).parent
PATIENCE = 120
# The revision of each era. A client that speaks only one older revision names it as its era.
REVISIONS = {"modern": "2026-07-28", "legacy": "2025-11-25", "2025-03-26": "2025-03-26", "2024-11-05": "2024-11-05"}


class Place:
    """Where the server is, a command or an address and perhaps a token, and how to talk to it."""

    def __init__(self, era, command=None, url=None, token=None):
        self.era, self.command, self.url, self.token = era, command, url, token


class Lines:
    """A driver. Nothing that the client complains of is overlooked."""

    argv = []
    one_server = True
    restarts = False

    def __init__(self, home):
        self.count = 0
        self.log = open(home / "stderr.log", "ab")
        self.process = subprocess.Popen(
            self.argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True
        )
        self.lines = queue.Queue()
        threading.Thread(target=self.pump, daemon=True).start()

    @contextlib.contextmanager
    def at(self, place):
        where = {"era": place.era, "command": place.command, "url": place.url, "token": place.token}
        self.write(where | {"op": "connect"})
        first = self.next()
        if "refused" in first:
            raise Refused(first["refused"])
        self.revision = REVISIONS[place.era]
        check(first == {"connected": self.revision}, f"{first}")
        yield self

    def close(self):
        self.process.stdin.close()
        try:
            code = self.process.wait(30)
        finally:
            self.process.kill()
            self.log.close()
        check(code == 0, f"the driver ended with {code}; see {self.log.name}")
        while (line := self.lines.get(timeout=PATIENCE)) is not None:
            check("complaint" not in json.loads(line), line)

    def pump(self):
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def next(self):
        line = self.lines.get(timeout=PATIENCE)
        check(line is not None, f"the driver ended; see {self.log.name}")
        said = json.loads(line)
        check("complaint" not in said, line)
        return said

    def write(self, line):
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()

    def send(self, op, **more):
        self.count += 1
        self.write({"id": self.count, "op": op} | more)

    def ask(self, op, **more):
        self.send(op, **more)
        said = self.next()
        check(said["id"] == self.count, f"another answer was expected: {said}")
        if "error" in said:
            raise Refused(said["error"]["message"], said["error"]["code"])
        return said["result"]

    def list(self):
        return self.ask("list")["tools"]

    def call(self, tool, arguments):
        return self.ask("call", tool=tool, arguments=arguments)

    def read(self, uri):
        return self.ask("read", uri=uri)["contents"]

    def cancelled(self, tool, arguments, _begun):
        """After three notifications of progress, each further on than the one before."""
        self.send("call", tool=tool, arguments=arguments, progress=True)
        seen = [self.next()["progress"] for _ in range(3)]
        said = [message or "" for _, message in seen]
        # The oldest revision has no messages.
        check(("tick 0" in said[0]) if self.revision > "2024-11-05" else not any(said), f"progress was {seen}")
        check(seen[0][0] < seen[1][0] < seen[2][0], f"progress was {seen}")
        self.write({"id": self.count, "op": "cancel"})
        while "progress" in (said := self.next()):
            pass
        check(said == {"id": self.count, "cancelled": True}, f"{said}")


class Python(Lines):
    argv = [os.environ["PYTHON_CLIENTS"] + "/python", str(HERE / "python_mcp.py")]


class OlderPython(Lines):
    argv = [os.environ["OLDER_PYTHON_CLIENTS"] + "/python", str(HERE / "python_mcp_older.py")]

    def cancelled(self, _tool, _arguments, _begun):
        raise Impossible("it has no way to cancel a call")


class FastMcp(Lines):
    argv = [os.environ["PYTHON_CLIENTS"] + "/python", str(HERE / "fastmcp_library.py")]


class TypeScript(Lines):
    argv = ["node", str(HERE / "typescript.mjs"), "client"]


class TypeScriptSdk(Lines):
    argv = ["node", str(HERE / "typescript.mjs"), "sdk"]


class OlderTypeScriptSdk(Lines):
    argv = ["node", str(HERE / "typescript.mjs"), "sdk-2024"]


class Command:
    """A client that is started anew for each call."""

    settings = {}
    restarts = False

    def __init__(self, home):
        self.home = home
        self.config = home / "mcp.json"
        self.env = os.environ | {"HOME": str(home), "NO_COLOR": "1", "COLUMNS": "100000"} | self.settings

    @contextlib.contextmanager
    def at(self, place):
        self.place = place
        self.revision = REVISIONS[place.era]
        self.one_server = place.url is not None
        self.config.write_text(json.dumps({"mcpServers": {"sandpool": self.server()}, "imports": []}))
        yield self

    def server(self):
        """As it stands in many clients' configuration."""
        if self.place.url:
            headers = {"Authorization": f"Bearer {self.place.token}"} if self.place.token else {}
            return {"type": "http", "url": self.place.url, "headers": headers}
        return {"type": "stdio", "command": self.place.command[0], "args": self.place.command[1:]}

    def close(self):
        pass

    def start(self, *arguments):
        return subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.env,
            cwd=self.home, start_new_session=True,
        )  # fmt: skip

    def run(self, *arguments):
        process = self.start(*arguments)
        try:
            out, err = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
        return process.returncode, out, err

    def cancelled(self, tool, arguments, begun):
        process = self.start(*self.line(tool, arguments))
        try:
            end = time.monotonic() + PATIENCE
            while not begun():
                check(process.poll() is None, "it ended by itself")
                check(time.monotonic() < end, "the cell did not begin")
                time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=PATIENCE)
        finally:
            process.kill()


class FastMcpCommand(Command):
    """`fastmcp list` and `fastmcp call`; both speak the modern revision."""

    program = os.environ["PYTHON_CLIENTS"] + "/fastmcp"

    def place_and_auth(self):
        if self.place.url:
            return [self.place.url, "--auth", self.place.token or "none"]
        return ["--command", shlex.join(self.place.command)]

    def line(self, tool, arguments):
        # With `--command` the first word is taken for the server, so the target is named.
        return [self.program, "call", *self.place_and_auth(), "--target", tool, "--input-json", json.dumps(arguments), "--json"]

    def answer(self, *line):
        _, out, err = self.run(*line)
        try:
            return json.loads(out)
        except ValueError:
            raise Refused(out + err) from None

    def list(self):
        return self.answer(self.program, "list", *self.place_and_auth(), "--json", "--input-schema")["tools"]

    def call(self, tool, arguments):
        said = self.answer(*self.line(tool, arguments))
        content = [self.block(block) for block in said["content"]]
        return {"content": content, "structuredContent": said.get("structured_content"), "isError": said["is_error"]}

    def block(self, block):
        """It prints a link as Python does, as `name='…' uri='…'`."""
        if block["type"] != "unknown":
            return block
        members = dict(re.findall(r"(\w+)=('[^']*'|\w+)", block["value"]))
        text = {name: value.strip("'") for name, value in members.items()}
        return {"type": text["type"], "name": text["name"], "uri": text["uri"], "mimeType": text["mime_type"], "size": int(text["size"])}

    def read(self, uri):
        said = self.answer(self.program, "call", *self.place_and_auth(), "--target", uri, "--json")
        return said if isinstance(said, list) else said["contents"]


class Inspector(Command):
    """`mcp-inspector --cli`."""

    settings = {"MCP_INSPECTOR_SECRET_STORE": "memory"}

    def base(self):
        line = ["mcp-inspector", "--cli", "--config", str(self.config), "--server", "sandpool"]
        return line + ["--protocol-era", self.place.era, "--format", "json", "--quiet", "--stored-auth-only"]

    def line(self, tool, arguments):
        return [*self.base(), "--method", "tools/call", "--tool-name", tool, "--tool-args-json", json.dumps(arguments)]

    def answer(self, *line):
        _, out, err = self.run(*line)
        if out:
            return json.loads(out)["result"]
        try:
            raise Refused(json.loads(err)["error"]["message"])
        except ValueError:
            raise Refused(err) from None

    def list(self):
        return self.answer(*self.base(), "--method", "tools/list")["tools"]

    def call(self, tool, arguments):
        return self.answer(*self.line(tool, arguments))

    def read(self, uri):
        return self.answer(*self.base(), "--method", "resources/read", "--uri", uri)["contents"]

    def cancelled(self, tool, arguments, begun):
        if self.place.era == "modern":
            raise Impossible("it declares tasks, so a long call becomes a task, and it exits without cancelling the task")
        super().cancelled(tool, arguments, begun)


class McPorter(Command):
    """`mcporter call`. Over stdio its daemon keeps the server."""

    def __init__(self, home):
        super().__init__(home)
        # The socket's path has to be short.
        self.daemon = tempfile.TemporaryDirectory(prefix="mcporter-")
        self.env |= {"MCPORTER_DAEMON_DIR": self.daemon.name}

    @contextlib.contextmanager
    def at(self, place):
        with super().at(place):
            self.one_server = True
            # Its daemon takes every refused call for the end of the server.
            self.restarts = not place.url
            try:
                yield self
            finally:
                if not place.url:
                    self.run(*self.base(), "daemon", "stop")

    def server(self):
        return super().server() | {"lifecycle": "ephemeral" if self.place.url else "keep-alive"}

    def close(self):
        self.daemon.cleanup()

    def base(self):
        return ["mcporter", "--config", str(self.config)]

    def line(self, tool, arguments):
        selector = ["--server", "sandpool", "--tool", tool, "--args", json.dumps(arguments)]
        return [*self.base(), "call", *selector, "--output", "raw", "--no-oauth"]

    def list(self):
        _, out, err = self.run(*self.base(), "list", "sandpool", "--json", "--schema", "--no-oauth")
        said = json.loads(out)
        if said["status"] != "ok":
            raise Refused(out + err)
        return said["tools"]

    def call(self, tool, arguments):
        _, out, err = self.run(*self.line(tool, arguments))
        return self.raw(out, err)

    def read(self, uri):
        _, out, err = self.run(*self.base(), "resource", "sandpool", uri, "--raw", "--no-oauth")
        return self.raw(out, err)["contents"]

    def raw(self, out, err):
        """The whole result is printed as JavaScript and not as JSON; an error is JSON."""
        with contextlib.suppress(ValueError):
            raise Refused(json.loads(out)["error"])
        script = 'process.stdout.write(JSON.stringify(require("vm").runInNewContext(`(${require("fs").readFileSync(0)})`)))'
        read = subprocess.run(["node", "-e", script], input=out, capture_output=True, text=True)
        if read.returncode:
            raise Refused(out + err)
        return json.loads(read.stdout)

    def cancelled(self, tool, arguments, begun):
        if not self.place.url:
            raise Impossible("its daemon continues the call; only a time-out ends the call, and the server with it")
        super().cancelled(tool, arguments, begun)
