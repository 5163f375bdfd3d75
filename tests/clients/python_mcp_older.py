"""The Python package `mcp` before revision 2025-06-18; see driver.py."""

import os
from contextlib import asynccontextmanager

import driver
from mcp import ClientSession, McpError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamablehttp_client


class Connected:
    refusals = (McpError,)

    def __init__(self, session, revision):
        self.session, self.revision = session, revision

    async def ask(self, request, progress):
        match request["op"]:
            case "list":
                result = await self.session.list_tools()
            case "call":
                result = await self.session.call_tool(request["tool"], request["arguments"], progress_callback=progress)
            case "read":
                result = await self.session.read_resource(request["uri"])
        return result.model_dump(mode="json", by_alias=True, exclude_none=True)


@asynccontextmanager
async def connect(where):
    if where.get("url"):
        headers = {"Authorization": f"Bearer {where['token']}"} if where.get("token") else {}
        server = streamablehttp_client(where["url"], headers=headers)
    else:
        server = stdio_client(StdioServerParameters(command=where["command"][0], args=where["command"][1:], env=dict(os.environ)))
    async with server as (read, write, *_), ClientSession(read, write) as session:
        hello = await session.initialize()
        yield Connected(session, hello.protocolVersion)


driver.main(connect)
