"""The story that every client tells, in ten steps and a token, and what has to come of each.

A client is an object with `list`, `call`, `read` and `cancelled` (see clients.py). A step returns nothing when all was as expected,
raises `Impossible` with the reason when the client has no way to do it, and any other exception when the server or client is wrong.
"""

import base64
import json
import re
import time
import urllib.error
import urllib.request

TOOLS = [
    "run_code", "run_command", "wait_run", "cancel_run", "create_context", "list_contexts", "stop_context",
    "read_file", "write_file", "list_files", "edit_file", "search_files", "upload_link",
    "browser_open", "browser_act", "browser_snapshot", "browser_screenshot",
]  # fmt: skip
# Those that answer with text and pictures alone.
TEXT_TOOLS = {
    "run_code", "run_command", "wait_run", "read_file", "list_files", "search_files", "browser_snapshot", "browser_screenshot",
}  # fmt: skip
FIGURE = "import matplotlib.pyplot as plt\nplt.plot([1, 2, 3])\nprint('drawn')"
TABLE = "n,square\n1,1\n2,4\nüber,∞\n"
# It would go on for minutes. The file shows those who see no progress that it has begun.
LONG = """import time
open('begun.txt', 'w').write('yes')
for i in range(1200):
    print('tick', i, flush=True)
    time.sleep(0.1)"""
LONG_SECONDS = 200

# A page of the sandbox's own, which needs no network.
PAGE = """<title>Shop</title><label>Who <input id=who></label><button onclick="document.title = who.value">Go</button>
<a href=list.csv>List</a>"""
SERVE = f"""import http.server, threading
open('index.html', 'w').write({PAGE!r})
open('list.csv', 'w').write('tea,4')
class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(('127.0.0.1', 8000), Quiet)
threading.Thread(target=server.serve_forever, daemon=True).start()"""
MINE = {"sandbox_id": "{unique}"}

# It leaves a file behind.
LEAVE = "import pathlib\nlength = pathlib.Path('{}/a.txt').write_text('left behind')"
# A long output, which is cut, and the words at the end of the whole of it.
LONG_OUTPUT = "print('x' * 100_000, 'the end')"
CUT = "bytes left out"

# What to call in each of the other dialects, what the answer's text has to hold, and perhaps what the file behind its link has to
# hold, or PICTURE.
PICTURE = object()
DIALECTS = {
    "agentrun": [
        ("create_context", {"name": "{unique}"}, "created successfully"),
        ("list_contexts", {}, "{unique}"),
        ("upload_file", {"context_id": "{unique}", "path": "in/a.csv", "content": "n,square\n"}, '"size": 9'),
        ("run_code", {"context_id": "{unique}", "code": LEAVE.format("/workspace")}, '"success": true'),
        ("download_file", {"context_id": "{unique}", "path": "in/a.csv"}, "n,square", "n,square\n"),
        ("download_file", {"context_id": "{unique}", "path": "a.txt"}, "left behind", "left behind"),
        ("run_code", {"context_id": "{unique}", "code": LONG_OUTPUT}, CUT, "the end"),
        ("run_code", {"context_id": "{unique}", "code": FIGURE}, "drawn", PICTURE),
    ],
    "microsandbox": [
        ("execute_code", {"code": "print(6 * 7)", "session_id": "{unique}"}, "42"),
        ("execute_code", {"code": LONG_OUTPUT, "session_id": "{unique}"}, CUT, "the end"),
        ("stop_session", {"session_id": "{unique}"}, "{unique}"),
    ],
    "workbench": [
        ("sandbox_create", MINE, "sandbox_create ok"),
        ("code_run", MINE | {"language": "python", "code": SERVE}, "code_run ok"),
        ("browser_goto", MINE | {"url": "http://localhost:8000/"}, "http://localhost:8000/ (Shop) [end of untrusted "),
        ("browser_snapshot", MINE, '[ref_1] textbox \\"Who\\"'),
        ("browser_type", MINE | {"selector": "ref_1", "text": "Ada"}, "browser_type ok"),
        ("browser_click", MINE | {"selector": "ref_2"}, "http://localhost:8000/ (Ada) [end of untrusted "),
        ("browser_click", MINE | {"selector": "a"}, "downloaded downloads/list.csv (5 bytes)"),
        ("code_run", MINE | {"language": "shell", "code": "cat downloads/list.csv"}, "tea,4"),
        ("file_write", MINE | {"path": "note.txt", "content": "tea"}, "file_write ok: note.txt"),
        ("file_read", MINE | {"path": "note.txt"}, '"content": "tea"', "tea"),
        ("code_run", MINE | {"language": "python", "code": LONG_OUTPUT}, CUT, "the end"),
        ("browser_click", MINE | {"selector": "ref_99"}, "hint: call browser_snapshot first"),
        ("sandbox_destroy", MINE, "sandbox_destroy ok"),
    ],
    "conversation": [
        ("sandbox.run_code", {"conversationId": "{unique}", "language": "python", "code": "print(6 * 7)"}, "42"),
        ("sandbox.run_code", {"conversationId": "{unique}", "language": "python", "code": LEAVE.format("/data")}, '"name": "a.txt"', "left behind"),
        ("sandbox.run_code", {"conversationId": "{unique}", "language": "python", "code": LONG_OUTPUT}, CUT),
        ("sandbox.list_runners", {}, "native/python"),
    ],
}


class Impossible(Exception):
    """The client has no way to do this."""


class Refused(Exception):
    """What a client says of a call that it or the server refused."""

    def __init__(self, message, code=None):
        super().__init__(message)
        self.code = code


def check(condition, what):
    if not condition:
        raise AssertionError(what)


def text(result):
    return "\n".join(block["text"] for block in result["content"] if block["type"] == "text")


def pictures(result):
    """The bytes of each picture."""
    return [base64.b64decode(block["data"]) for block in result["content"] if block["type"] == "image"]


def links(result):
    """The addresses of files, in blocks or, in older revisions, in the text."""
    blocks = [block["uri"] for block in result["content"] if block["type"] == "resource_link"]
    return blocks or re.findall(r"http://127\.0\.0\.1:\d+/files/[^\s\"\\\]]+", text(result))


def fetch(url):
    """Content type and bytes, without any proxy: the link has to work by itself."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=30) as answer:
        return answer.headers["Content-Type"], answer.read()


class Story:
    def __init__(self, client):
        self.client = client
        self.context = None
        self.link = None

    def get(self, tool, failed=False, **arguments):
        """The object in the first block, which is the structured content as well in the tools that have an output schema."""
        if self.context and tool != "create_context":
            arguments["context"] = self.context
        result = self.client.call(tool, arguments)
        check(bool(result.get("isError")) == failed, f"{tool}: {result}")
        facts = json.loads(result["content"][0]["text"])
        is_text = tool in TEXT_TOOLS or self.client.revision < "2025-06-18"
        expected = None if is_text else facts
        check(result.get("structuredContent") == expected, f"{tool}: structured content differs from the text: {result}")
        return facts, result

    def run(self, code, **more):
        return self.get("run_code", code=code, **more)

    def needs_one_server(self):
        if not self.client.one_server:
            raise Impossible("each call of this client starts a new server, which has no context")

    def list(self):
        tools = self.client.list()
        check([tool["name"] for tool in tools] == TOOLS, f"tools are {tools}")
        for tool in tools:
            check(tool["description"] and tool["inputSchema"]["type"] == "object", f"{tool}")

    def create(self):
        made, _ = self.get("create_context", language="python")
        check(made["context"].startswith("ctx-"), f"{made}")
        self.context = made["context"] if self.client.one_server else None

    def run_once(self):
        ran, _ = self.run("x = 41")
        check((ran["success"], ran["stdout"]) == (True, ""), f"{ran}")

    def state(self):
        self.needs_one_server()
        ran, _ = self.run("print(x + 1)")
        check(ran["stdout"] == "42\n", f"{ran}")

    def picture(self):
        ran, result = self.run(FIGURE)
        check(ran["stdout"] == "drawn\n", f"{ran}")
        kinds = [block["mimeType"] for block in result["content"] if block["type"] == "image"]
        check(kinds == ["image/png"], f"one PNG is expected: {result}")
        check(pictures(result)[0].startswith(b"\x89PNG"), "the picture is no PNG")

    def upload(self):
        written, result = self.get("write_file", path="data/table.csv", content=TABLE)
        size = len(TABLE.encode())
        check((written["path"], written["size"]) == ("data/table.csv", size), f"{written}")
        check([block["type"] for block in result["content"]] == ["text"], f"the link is there once: {result}")
        self.link = written["url"]
        if self.client.one_server:
            ran, _ = self.run("print(len(open('data/table.csv').read()))")
            check(ran["stdout"] == f"{len(TABLE)}\n", f"{ran}")

    def fetched(self):
        self.needs_one_server()
        kind, content = fetch(self.link)
        check(kind.split(";")[0] == "text/csv" and content == TABLE.encode(), f"{kind} {content!r}")
        [content] = self.client.read(self.link)
        check((content["uri"], content["mimeType"], content["text"]) == (self.link, "text/csv", TABLE), f"{content}")

    def cancel(self):
        self.needs_one_server()
        arguments = {"code": LONG, "timeout": LONG_SECONDS, "context": self.context}
        self.client.cancelled("run_code", arguments, self.begun)
        begun = time.monotonic()
        ran, _ = self.run("print(x + 1, i < 1000)")
        check(ran["stdout"] == "42 True\n", f"a cancelled cell is interrupted and keeps its variables: {ran}")
        check(time.monotonic() - begun < 60, "the cell went on for long")

    def begun(self):
        try:
            return fetch(self.link.replace("data/table.csv", "begun.txt"))[1] == b"yes"
        except urllib.error.HTTPError:
            return False

    def errors(self):
        ran, _ = self.run("1 / 0", failed=True)
        check(ran["error"]["traceback"].endswith("ZeroDivisionError: division by zero\n"), f"{ran}")
        # A wrong argument is a result, which the model reads. An unknown tool is an error of the protocol.
        result = self.client.call("run_code", {"code": 5})
        check(result["isError"] and text(result).startswith("code must be a string"), f"{result}")
        try:
            result = self.client.call("no_such_tool", {})
            check(False, f"it was answered: {result}")
        except Refused as refused:
            check(refused.code in (None, -32602) and "no_such_tool" in str(refused), f"{refused.code} {refused}")

    def stop(self):
        self.needs_one_server()
        if self.client.restarts:
            self.create()
        self.get("stop_context")
        ran, _ = self.run("1", failed=True)
        check(ran["note"].startswith(f"There is no context {self.context}: it was stopped"), f"{ran}")


STEPS = {
    "list": Story.list,
    "create": Story.create,
    "run": Story.run_once,
    "state": Story.state,
    "picture": Story.picture,
    "file up": Story.upload,
    "link": Story.fetched,
    "cancel": Story.cancel,
    "error": Story.errors,
    "stop": Story.stop,
}


def with_token(connect):
    """`connect(token)` gives a client of the server that wants one."""
    for wrong in [None, "wrong"]:
        try:
            with connect(wrong) as client:
                client.list()
        except Refused as refused:
            said = str(refused).lower()
            check("401" in said or "unauthorized" in said or "token" in said, f"not clear: {refused}")
        else:
            check(False, f"the token {wrong} was enough")
    with connect("right") as client:
        check([tool["name"] for tool in client.list()] == TOOLS, "tools differ")
        check('"stdout":"42\\n"' in text(client.call("run_code", {"code": "print(6 * 7)"})), "it did not run")


def in_dialect(client, dialect, unique):
    check(client.list(), "no tools")
    for tool, arguments, expected, *more in DIALECTS[dialect]:
        filled = json.loads(json.dumps(arguments).replace("{unique}", unique))
        result = client.call(tool, filled)
        said = text(result)
        check(expected.replace("{unique}", unique) in said, f"{tool}: {said}")
        for content in more:
            if content is PICTURE:
                check([picture[:4] for picture in pictures(result)] == [b"\x89PNG"], f"{tool}: one PNG is expected: {said}")
            else:
                check(content.encode() in b"".join(fetch(link)[1] for link in links(result)), f"{tool}: {result}")
