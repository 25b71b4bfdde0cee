"""An MCP server with streamable HTTP as a process: `python -m tests.integrations.mcp_session_server LOG PORT`.

Each call of its tool adds a line with the idempotency key of the call to LOG.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("sessions", log_level="ERROR")


@server.tool()
def note(text: str, ctx: Context) -> str:
    """Write a line."""
    key = (ctx.request_context.meta or {}).get("agent-runtime-core/idempotency-key")
    with Path(sys.argv[1]).open("a") as log:
        log.write(f"{text} {key}\n")
    return f"noted {text}"


if __name__ == "__main__":
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
