"""Walks through the agentrun dialect with the real Python client: python_client.py [--mode auto|legacy] COMMAND [ARG...].

Prints `ok <step>` for every step and exits non-zero at the first that fails. Needs the package `mcp` 2.3.0; its default mode
(`auto`) speaks revision 2026-07-28, `legacy` the handshake of 2025-11-25.
"""

import base64
import json
import os
import sys

import anyio
from mcp import Client, StdioServerParameters
from mcp.shared.exceptions import MCPError

TOOLS = ["run_code", "create_context", "stop_context", "list_contexts", "upload_file", "download_file", "list_files"]
FIGURE = "import matplotlib.pyplot as plt\nplt.plot([1, 2, 3])\nprint('drawn')"
TICKS = "import time\nfor i in range(4):\n    print('tick', i, flush=True)\n    time.sleep(0.4)"
SLEEP = "import time\ntime.sleep(25)"


def check(condition, what):
    if not condition:
        raise AssertionError(what)


def ok(step):
    print(f"ok {step}", flush=True)


class Walk:
    def __init__(self, client):
        self.client = client

    async def call(self, tool, /, **arguments):
        """The result and the object in its first block, which must be the structured content unless it is an error."""
        result = await self.client.call_tool(tool, arguments, read_timeout_seconds=60)
        text = json.loads(result.content[0].text)
        check(bool(result.is_error) == ("code" in text), f"{tool}: isError is {result.is_error} for {text}")
        check(result.structured_content == (None if result.is_error else text), f"{tool}: structured content differs from the text")
        return result, text

    async def get(self, tool, /, **arguments):
        return (await self.call(tool, **arguments))[1]

    async def run(self, context, code):
        return await self.get("run_code", code=code, context_id=context)

    async def fails(self, expected, tool, /, **arguments):
        answer = await self.get(tool, **arguments)
        check(answer.get("code") == expected, f"{tool} {arguments}: expected {expected}, got {answer}")
        return answer["error"]


async def tools(walk):
    listed = await walk.client.list_tools()
    check([t.name for t in listed.tools] == TOOLS, f"tools are {[t.name for t in listed.tools]}")
    for tool in listed.tools:
        check(tool.description and tool.output_schema["type"] == "object", tool.name)


async def state(walk, a):
    check((await walk.run(a, "x = 42"))["stdout"] == "", "an assignment prints nothing")
    check((await walk.run(a, "print(x)"))["stdout"] == "42\n", "the variable is kept")
    check((await walk.run(a, "x + 1"))["stdout"] == "43\n", "the last value is shown")
    check((await walk.run("py-a", "print(x)"))["stdout"] == "42\n", "a unique name finds the context")


async def isolation(walk, b):
    ran = await walk.run(b, "print(x)")
    check(not ran["success"] and "NameError" in ran["stderr"], f"another context sees x: {ran}")


async def javascript(walk, js):
    await walk.run(js, "let y = 20; const z = 22;")
    check((await walk.run(js, "console.log(y + z)"))["stdout"] == "42\n", "let and const are kept")


async def picture(walk, a):
    result, ran = await walk.call("run_code", code=FIGURE, context_id=a)
    check(ran["success"] and "drawn" in ran["stdout"], f"the figure failed: {ran}")
    pictures = [block for block in result.content if block.type == "image"]
    check(len(pictures) == 1 and pictures[0].mime_type == "image/png", "one PNG comes back")
    check(base64.b64decode(pictures[0].data).startswith(b"\x89PNG"), "it is a PNG")


async def errors(walk, a):
    message = await walk.fails("INVALID_PARAMS", "run_code", code="1")
    check(message == "Invalid arguments: code and context_id are required", message)
    await walk.fails("INVALID_PARAMS", "run_code", code=5, context_id=a)
    message = await walk.fails("CONTEXT_NOT_FOUND", "run_code", code="1", context_id="ctx-nobody")
    check(message == "Context not found: ctx-nobody", message)
    await walk.fails("INVALID_CONTEXT_NAME", "create_context", name="a b")
    message = await walk.fails("INVALID_LANGUAGE", "create_context", name="r", language="ruby")
    check(message == "Unsupported language: ruby. Must be 'python' or 'javascript'", message)
    ran = await walk.run(a, "1 / 0")
    check(not ran["success"] and ran["stderr"].endswith("ZeroDivisionError: division by zero\n"), str(ran))
    check('File "<stdin>", line 1' in ran["stderr"], ran["stderr"])
    try:
        await walk.client.call_tool("no_such_tool", {})
        check(False, "an unknown tool was answered")
    except MCPError as error:
        check(error.code == -32602 and "no_such_tool" in str(error), str(error))


async def order(walk, expected):
    listed = await walk.get("list_contexts")
    ids = [context["context_id"] for context in listed["contexts"]]
    check(ids == expected and listed["total"] == len(expected), f"{ids} is not newest first: {expected}")


async def files(walk, a):
    blob = bytes(range(256))
    await walk.get("upload_file", context_id=a, path="data/in.csv", content="a,b\n1,2\n")
    written = await walk.get("upload_file", context_id=a, path="raw.bin", content=base64.b64encode(blob).decode(), encoding="base64")
    check(written == {"path": "raw.bin", "size": 256}, str(written))
    ran = await walk.run(a, "print(open('data/in.csv').read(), end='')")
    check(ran["stdout"] == "a,b\n1,2\n", f"code does not see the file: {ran}")
    text = await walk.get("download_file", context_id=a, path="data/in.csv")
    check((text["encoding"], text["content"]) == ("utf-8", "a,b\n1,2\n"), str(text))
    raw = await walk.get("download_file", context_id=a, path="raw.bin")
    check(raw["encoding"] == "base64" and base64.b64decode(raw["content"]) == blob, "binary content changed")
    listed = await walk.get("list_files", context_id=a)
    paths = {file["path"] for file in listed["files"]}
    check({"data/in.csv", "raw.bin"} <= paths, f"files are {paths}")
    await walk.fails("FILE_NOT_FOUND", "download_file", context_id=a, path="nowhere.txt")
    await walk.fails("INVALID_PATH", "download_file", context_id=a, path="../../etc/passwd")


async def progress(walk, a):
    seen = []

    async def note(value, _total, message):
        seen.append((value, message))

    await walk.client.call_tool("run_code", {"code": TICKS, "context_id": a}, progress_callback=note)
    lines = "\n".join(message for _, message in seen)
    check(all(f"tick {i}" in lines for i in range(4)) and len(seen) > 1, f"progress was {seen}")
    check(sorted(value for value, _ in seen) == [value for value, _ in seen], "progress goes back")


async def cancel(walk, a):
    with anyio.move_on_after(1):
        await walk.client.call_tool("run_code", {"code": SLEEP, "context_id": a})
        check(False, "the cell ended before it was cancelled")
    with anyio.fail_after(15):
        check((await walk.run(a, "print(x)"))["stdout"] == "42\n", "a cancelled cell keeps its variables")


async def stop(walk, a, rest):
    check((await walk.get("stop_context", context_id=a))["status"] == "stopped", "stopped")
    await walk.fails("CONTEXT_NOT_FOUND", "run_code", code="1", context_id=a)
    await walk.fails("CONTEXT_NOT_FOUND", "stop_context", context_id=a)
    await order(walk, rest)


async def create(walk, name, **more):
    made = await walk.get("create_context", name=name, **more)
    title = "JavaScript" if more.get("language") == "javascript" else "Python"
    check(made["message"] == f"{title} context created successfully" and made["status"] == "active", str(made))
    return made["context_id"]


async def main(mode, command):
    # The environment is passed on, so that the server finds what the shell finds.
    server = StdioServerParameters(command=command[0], args=command[1:], env=dict(os.environ))
    async with Client(server, mode=mode) as client:
        walk = Walk(client)
        ok(f"connected with revision {client.protocol_version}")
        await tools(walk)
        ok("tools")
        a = await create(walk, "py-a", description="first")
        b = await create(walk, "py-b", language="python")
        js = await create(walk, "js-c", language="javascript")
        ok("create")
        for step, *arguments in [
            (state, a),
            (isolation, b),
            (javascript, js),
            (picture, a),
            (errors, a),
            (order, [js, b, a]),
            (files, a),
            (progress, a),
            (cancel, a),
            (stop, a, [js, b]),
        ]:
            await step(walk, *arguments)
            ok(step.__name__)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    mode = "auto"
    if arguments[:1] == ["--mode"]:
        mode, arguments = arguments[1], arguments[2:]
    if not arguments:
        sys.exit(__doc__)
    anyio.run(main, mode, arguments)
