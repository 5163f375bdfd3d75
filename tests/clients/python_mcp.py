"""The Python package `mcp`; see driver.py."""

import os
from contextlib import asynccontextmanager

import driver
import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError


class Connected:
    refusals = (MCPError,)

    def __init__(self, client):
        self.client, self.revision = client, client.protocol_version

    async def ask(self, request, progress):
        match request["op"]:
            case "list":
                result = await self.client.list_tools()
            case "call":
                result = await self.client.call_tool(request["tool"], request["arguments"], progress_callback=progress)
            case "read":
                result = await self.client.read_resource(request["uri"])
        return result.model_dump(mode="json", by_alias=True, exclude_none=True)


@asynccontextmanager
async def connect(where):
    mode = "legacy" if where["era"] == "legacy" else "auto"
    headers = {"Authorization": f"Bearer {where['token']}"} if where.get("token") else {}
    async with httpx2.AsyncClient(headers=headers, timeout=httpx2.Timeout(30, read=300)) as http:
        if where.get("url"):
            server = streamable_http_client(where["url"], http_client=http)
        else:
            server = StdioServerParameters(command=where["command"][0], args=where["command"][1:], env=dict(os.environ))
        async with Client(server, mode=mode) as client:
            yield Connected(client)


driver.main(connect)
