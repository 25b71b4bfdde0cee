"""A support agent on a priced model that is killed inside a call: python -m tests.fault.jobs.costly DB EFFECTS STREAM.

The first process hangs in its second call of the model, after the refund, and is killed there.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from agent_runtime_core import AgentRunner, ToolCallingAgent, ToolRegistry, configure
from agent_runtime_core.interfaces import LLMClient, LLMResponse, LLMStreamChunk
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import RunnerConfig
from agent_runtime_core.tools.tool import Tool

PRICE = {"input": 2.5, "output": 10.0}  # USD for a million tokens
STREAMED = "x" * 3000


class Model(LLMClient):
    default_model = "priced"

    def __init__(self, hangs: bool) -> None:
        self.hangs = hangs
        self.options: dict[str, Any] = {}

    async def generate(self, messages: list[Any], **options: Any) -> LLMResponse:
        self.options = options
        usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
        if messages[-1]["role"] == "tool":
            if self.hangs:
                await self.hang()
            return LLMResponse({"role": "assistant", "content": "refunded"}, usage, "priced", "stop")
        call = {"id": "c1", "type": "function", "function": {"name": "refund", "arguments": "{}"}}
        return LLMResponse({"role": "assistant", "content": None, "tool_calls": [call]}, usage, "priced", "tool_calls")

    async def stream(self, messages: list[Any], **options: Any) -> AsyncIterator[LLMStreamChunk]:
        if self.hangs and messages[-1]["role"] == "tool":
            yield LLMStreamChunk(STREAMED)
            await asyncio.sleep(0.05)
            yield LLMStreamChunk(STREAMED)
            yield LLMStreamChunk("")
        response = await self.generate(messages, **options)
        yield LLMStreamChunk(response.message["content"] or "", response.tool_calls or None, "stop", response.usage)

    async def hang(self) -> None:
        await asyncio.sleep(0.3)  # what waits to be written is
        sys.stdout.write("inside\n")
        sys.stdout.flush()
        await asyncio.sleep(600)


class Support(ToolCallingAgent):
    key = "support"
    system_prompt = "You refund."
    tools = ToolRegistry()
    max_tokens: int | None = None

    def __init__(
        self, effects: str, *, hangs: bool, stream: bool = False, max_tokens: int | None = None, limits: Any = None
    ) -> None:
        self.model_client = Model(hangs)
        self.stream, self.max_tokens, self.limits = stream, max_tokens, limits or {"max_cost_usd": 0.01}

        def refund() -> str:
            with open(effects, "a") as file:
                file.write("refund\n")
            return "done"

        self.tools = ToolRegistry()
        self.tools.register(Tool.from_function(refund, has_side_effects=True))

    def get_llm_client(self) -> LLMClient:
        return self.model_client


def runner(db: str | Path, agent: Support) -> AgentRunner:
    configure(model_prices={"priced": PRICE})
    registry = Registry()
    registry.register(agent)
    return AgentRunner.open(db, config=RunnerConfig(), registry=registry)


async def main() -> None:
    db, effects, attributes = sys.argv[1:]
    async with runner(db, Support(effects, hangs=True, **json.loads(attributes))) as mine:
        await mine.execute("support", "r", {"messages": [{"role": "user", "content": "refund me"}]}, recover="worker")
    os._exit(1)  # it was to be killed


if __name__ == "__main__":
    asyncio.run(main())
