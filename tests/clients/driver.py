"""What the Python drivers share: one JSON line in for each request, one out for each answer.

In: {"op": "connect", ...} first and whenever another place is meant; {"id", "op": "list" | "call" | "read" | "cancel", ...}; a call with `progress` wants to hear of it.
Out: {"connected": revision} or {"refused": why}; {"id", "result"}, {"id", "error": {code, message}}, {"id", "progress"},
{"id", "cancelled"}; {"complaint"} is something the client did not like.
"""

import asyncio
import json
import logging
import sys


def say(**line):
    print(json.dumps(line), flush=True)


class Complaints(logging.Handler):
    """What a client logs about a message it cannot read is logged nowhere else."""

    def emit(self, record):
        say(complaint=f"{record.name}: {record.getMessage()}")


def root_cause(error):
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def answer(client, request):
    identity = request["id"]

    async def progress(value, _total, message):
        say(id=identity, progress=[value, message])

    try:
        say(id=identity, result=await client.ask(request, progress if request.get("progress") else None))
    except asyncio.CancelledError:
        say(id=identity, cancelled=True)
    except client.refusals as error:
        code = getattr(error, "code", None) or getattr(getattr(error, "error", None), "code", None)
        say(id=identity, error={"code": code, "message": str(error)})


async def next_request():
    line = await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    return json.loads(line) if line else None


async def serve(client):
    """Until there is nothing more to ask here; what comes after that."""
    running = {}
    while (request := await next_request()) and request["op"] != "connect":
        if request["op"] == "cancel":
            running[request["id"]].cancel()
        else:
            running[request["id"]] = asyncio.create_task(answer(client, request))
    await asyncio.gather(*running.values())
    return request


async def run(connect):
    where = await next_request()
    while where:
        connected = False
        try:
            async with connect(where) as client:
                connected = True
                say(connected=client.revision)
                where = await serve(client)
        except Exception as error:
            if connected:
                raise
            say(refused=str(root_cause(error)))
            where = await next_request()


def main(connect):
    """`connect` is an asynchronous context manager: where to, in; an object with `revision`, `refusals` and `ask`, out."""
    logging.basicConfig(level=logging.WARNING, handlers=[Complaints()])
    asyncio.run(run(connect))
