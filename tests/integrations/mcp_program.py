"""An agent with three tools of an MCP server; see tests/support/framework_kills.py."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from mcp.server.mcpserver import MCPServer
from mcp_types import ToolAnnotations

from agent_runtime_core import AgentRunner, LLMResponse, MockLLMClient
from agent_runtime_core.integrations.mcp import MCPAgent, MCPTools
from tests.support.framework_kills import begin, called, finish

CALLS: list[tuple[str, str]] = [("add", '{"a": 1, "b": 2}'), ("double", '{"number": 3}'), ("note", '{"text": "6"}')]

#: A crash may repeat a read-only call, whose result is saved together with a later one.
ADDS = ToolAnnotations(destructive_hint=False)
#: In this process, so that a kill takes the server with it, at any point of its work too.
server = MCPServer("numbers", log_level="ERROR")


@server.tool(annotations=ADDS)
def add(a: int, b: int) -> int:
    called(f"add {a} {b}")
    return a + b


@server.tool(annotations=ADDS)
def double(number: int) -> int:
    called(f"double {number}")
    return 2 * number


@server.tool(annotations=ADDS)
def note(text: str) -> str:
    called(f"note {text}")
    return f"noted {text}"


def answer(messages: list[dict[str, Any]]) -> Any:
    done = [each for each in messages if each["role"] == "tool"]
    called(f"model {len(done)}")
    if len(done) == len(CALLS):
        return LLMResponse({"role": "assistant", "content": ", ".join(str(each["content"]) for each in done)})
    name, arguments = CALLS[len(done)]
    call = {"id": f"call_{len(done)}", "type": "function", "function": {"name": name, "arguments": arguments}}
    return LLMResponse({"role": "assistant", "content": None, "tool_calls": [call]})


class Numbers(MCPAgent):
    key = "numbers"
    system_prompt = "You calculate."

    def get_llm_client(self) -> MockLLMClient:
        return MockLLMClient(response_fn=answer)


class Listing(MCPTools):
    async def _listed(self) -> list[dict[str, Any]]:
        called("list of tools")
        return await super()._listed()


async def main() -> None:
    store = begin()
    logging.disable(logging.INFO)
    Numbers.mcp_servers = [Listing(server, name="numbers")]
    async with AgentRunner.open(store) as runner:
        agent = Numbers()
        message = {"role": "user", "content": "Calculate!"}
        result = await runner.execute(agent, run_id="numbers", input_data={"messages": [message]}, raise_on_error=True)
        await agent.close()
    finish(result.final_output)


if __name__ == "__main__":
    asyncio.run(main())
