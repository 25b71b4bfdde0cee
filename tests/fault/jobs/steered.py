"""An agent of five model calls that goes on when it is told to: steered.py URL.

It says "call", or "last", when the model was called, and "tool" when its tool runs, each with a number. Then it waits
for a line with that number.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

from agent_runtime_core import AgentRunner, RunnerConfig, ToolCallingAgent
from agent_runtime_core.interfaces import LLMClient, LLMResponse, LLMStreamChunk, Tool, ToolRegistry
from tests.fault.jobs.effects import say
from tests.support.scripted_model import asks, call

CHAT = "room"
CALLS = 5  # model calls, if no message arrives
SETTINGS = RunnerConfig(worker_id="one", lease_ttl_seconds=1, max_retries=1000)


class Orders:
    """The lines that the agent is told."""

    def __init__(self) -> None:
        self.lines: asyncio.Queue[str] = asyncio.Queue()
        self.number = 0

    async def wait(self, what: str) -> None:
        """Say where the agent is, and wait for the answer to just that: a call that was interrupted leaves its own."""
        self.number += 1
        number = f"{self.number}"
        say(f"{what} {number}")
        while (await self.lines.get()).strip() != number:
            pass


class Paced(LLMClient):
    """Streams a word, waits for a line, and streams the rest; it asks for the tool in all calls but the last."""

    default_model = "paced"

    def __init__(self, orders: Orders) -> None:
        self.orders = orders

    async def generate(self, messages: list[Any], **options: Any) -> LLMResponse:
        raise NotImplementedError

    async def stream(self, messages: list[Any], **options: Any) -> AsyncIterator[LLMStreamChunk]:
        said = sum(bool(each.get("tool_calls")) for each in messages)
        yield LLMStreamChunk("Well, ")
        await self.orders.wait("last" if said >= CALLS - 1 else "call")
        message = asks(call("look", id=f"look-{said}"), content="Well, I look")
        if said >= CALLS - 1:
            message = {"role": "assistant", "content": "Well, done"}
        usage = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
        response = LLMResponse(message, usage, "paced", "stop")
        yield LLMStreamChunk(message["content"].removeprefix("Well, "))
        yield LLMStreamChunk("", response.tool_calls or None, "stop", usage, response)


class Steered(ToolCallingAgent):
    key = "steered"
    system_prompt = "You look."
    tools = ToolRegistry()
    stream = True
    max_iterations = 1000

    def __init__(self, orders: Orders) -> None:
        self.client = Paced(orders)
        self.tools = ToolRegistry()

        async def look() -> str:
            """Look."""
            await orders.wait("tool")
            return "seen"

        self.tools.register(Tool.from_function(look))

    def get_llm_client(self) -> LLMClient:
        return self.client


async def main(url: str) -> None:
    orders = Orders()
    loop = asyncio.get_running_loop()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(orders.lines.put_nowait, line)

    threading.Thread(target=read, daemon=True).start()
    async with AgentRunner.open(url, config=SETTINGS) as runner:
        asked = {"messages": [{"role": "user", "content": "hello"}], "conversation_id": CHAT}
        result = await runner.execute(Steered(orders), "steered", asked, raise_on_error=True)
    say("done " + json.dumps(result.final_messages))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
