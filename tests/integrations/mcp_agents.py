"""An MCP server of agents as a process: `python -m tests.integrations.mcp_agents STORE LOG [PORT]`.

Without a port it serves standard input and output. Its first line in LOG is its process id, and each function of a
step that runs adds a line.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import uvicorn

from agent_runtime_core import AgentRunner, AgentRuntime, RunContext, RunResult
from agent_runtime_core.integrations.mcp_server import create_mcp_server, serve_stdio
from agent_runtime_core.registry import Registry

LOG: Path


def log(line: str) -> str:
    with LOG.open("a") as file:
        file.write(f"{line}\n")
    return line


class Order(AgentRuntime):
    """Orders what a person approves."""

    key = "order"

    async def run(self, ctx: RunContext) -> RunResult:
        what = ctx.input_messages[-1]["content"]
        await ctx.step("reserve", log, f"reserve {what}")
        approved = await ctx.approve("buy", {"what": what})
        if approved:
            await ctx.step("buy", log, f"buy {what}")
        return RunResult(final_output={"response": f"bought {what}" if approved else "not bought"})


class Endless(AgentRuntime):
    """Works until it is cancelled."""

    key = "endless"

    async def run(self, ctx: RunContext) -> RunResult:
        log("begin")
        await ctx.wait_for_signal("never")
        return RunResult()

    async def cancel(self, ctx: RunContext) -> None:
        log("cancelled")


async def main(store: str, port: str | None) -> None:
    log(str(os.getpid()))
    registry = Registry()
    registry.register(Order())
    registry.register(Endless())
    async with AgentRunner.open(store, registry=registry) as runner:
        server = create_mcp_server(runner, poll_interval=0.02)
        if port is None:
            await serve_stdio(server)
            return
        app: Any = server.streamable_http_app()
        await uvicorn.Server(uvicorn.Config(app, port=int(port), log_level="error")).serve()


if __name__ == "__main__":
    LOG = Path(sys.argv[2])
    asyncio.run(main(sys.argv[1], sys.argv[3] if len(sys.argv) > 3 else None))
