"""The Python package `fastmcp` as a library; see driver.py."""

import os
from contextlib import asynccontextmanager

import driver
from fastmcp import Client
from fastmcp.client.transports import StdioTransport, StreamableHttpTransport
from mcp.shared.exceptions import MCPError


def plain(value):
    return value.model_dump(mode="json", by_alias=True, exclude_none=True)


class Connected:
    refusals = (MCPError,)

    def __init__(self, client):
        self.client, self.revision = client, client.protocol_version

    async def ask(self, request, progress):
        match request["op"]:
            case "list":
                return {"tools": [plain(tool) for tool in await self.client.list_tools()]}
            case "read":
                return {"contents": [plain(content) for content in await self.client.read_resource(request["uri"])]}
            case "call":
                result = await self.client.call_tool(
                    request["tool"], request["arguments"], progress_handler=progress, raise_on_error=False
                )
                content = [plain(block) for block in result.content]
                return {"content": content, "structuredContent": result.structured_content, "isError": result.is_error}


@asynccontextmanager
async def connect(where):
    if where.get("url"):
        transport = StreamableHttpTransport(where["url"], auth=where.get("token"))
    else:
        command = where["command"]
        transport = StdioTransport(command[0], command[1:], env=dict(os.environ), keep_alive=False)
    mode = "legacy" if where["era"] == "legacy" else "auto"
    async with Client(transport, mode=mode) as client:
        yield Connected(client)


driver.main(connect)
