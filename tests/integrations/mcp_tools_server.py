"""An MCP server with tools as a process: `python -m tests.integrations.mcp_tools_server LOG` on standard input."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("tools", log_level="ERROR")


@server.tool()
def pid() -> int:
    """Return the process id of the server."""
    return os.getpid()


@server.tool()
async def key(ctx: Context) -> str:
    """Return the idempotency key of the call."""
    meta = ctx.request_context.meta or {}
    return str(meta.get("agent-runtime-core/idempotency-key"))


@server.tool()
def die() -> str:
    """End the server without an answer."""
    os._exit(1)


if __name__ == "__main__":
    with Path(sys.argv[1]).open("a") as log:
        log.write("started\n")
    server.run()
