"""An agent that uses the tools of an MCP server, and is itself a tool of another MCP server. It needs no key.

    python examples/mcp_tools.py            # the agent calls the tools of a server that it starts
    python examples/mcp_tools.py --serve    # an MCP server on standard input and output, with the agent as a tool

Runs are stored in mcp_tools.db. Kill it anywhere and start it again: recorded calls are not repeated. A script replaces
the model.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from typing import Any

from mcp import StdioServerParameters
from mcp.server.mcpserver import MCPServer
from mcp_types import ToolAnnotations

from agent_runtime_core import AgentRunner, MockLLMClient, register_runtime
from agent_runtime_core.integrations.mcp import MCPAgent, MCPTools
from agent_runtime_core.integrations.mcp_server import create_mcp_server, serve_stdio

STORE = "mcp_tools.db"
CALLS = [("price", {"of": "tea"}), ("price", {"of": "cake"})]

shop = MCPServer("shop", log_level="ERROR")


@shop.tool(annotations=ToolAnnotations(read_only_hint=True))
def price(of: str) -> int:
    """Return the price of something, in cents."""
    print(f"price({of!r}) runs in process {os.getpid()}", file=sys.stderr)
    return {"tea": 250, "cake": 400}[of]


class Shopper(MCPAgent):
    """Answers questions about prices."""

    key = "shopper"
    system_prompt = "You answer questions about prices."
    mcp_servers = (MCPTools(StdioServerParameters(command=sys.executable, args=[__file__, "--shop"]), name="shop"),)

    def get_llm_client(self) -> MockLLMClient:
        return MockLLMClient(response_fn=answer)


def answer(messages: list[dict[str, Any]]) -> Any:
    found = [int(each["content"]) for each in messages if each["role"] == "tool"]
    if len(found) == len(CALLS):
        return f"Tea and cake are {sum(found)} cents."
    name, arguments = CALLS[len(found)]
    return MockLLMClient.calls(name, **arguments)


async def ask() -> None:
    agent = Shopper()
    message = {"role": "user", "content": "How much are tea and cake?"}
    async with AgentRunner.open(STORE) as runner:
        result = await runner.execute(agent, run_id="tea", input_data={"messages": [message]}, raise_on_error=True)
        await agent.close()
    print(result.final_output["response"])


async def serve() -> None:
    register_runtime(Shopper())
    async with AgentRunner.open(STORE) as runner:
        await serve_stdio(create_mcp_server(runner))


if __name__ == "__main__":
    logging.disable(logging.INFO)
    if "--shop" in sys.argv:
        shop.run()
    else:
        asyncio.run(serve() if "--serve" in sys.argv else ask())
