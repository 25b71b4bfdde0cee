"""A TurnManager that `agent-runtime serve` is started with: its model writes as much as the message asks for."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

from agent_runtime_core import AgentRunner
from agent_runtime_core.interfaces import LLMClient, LLMResponse, LLMStreamChunk
from agent_runtime_core.turns import PackSet, PersonalityInstance, TurnManager

PIECE = "x" * 16_384


class Writer(LLMClient):
    """Answers `write N` with N pieces of 16 KiB."""

    async def generate(self, messages: list[Any], **options: Any) -> LLMResponse:
        count = int(messages[-1]["content"].split()[-1])
        return LLMResponse({"role": "assistant", "content": PIECE * count})

    async def stream(self, messages: list[Any], **options: Any) -> AsyncIterator[LLMStreamChunk]:
        response = await self.generate(messages)
        for _ in range(len(response.message["content"]) // len(PIECE)):
            await asyncio.sleep(0)  # as a model does, whose pieces come over a network
            yield LLMStreamChunk(delta=PIECE)
        yield LLMStreamChunk(finish_reason="stop", response=response)


def runner() -> AgentRunner:
    """The runner of `turns`, for a worker."""
    return turns().runner


def turns() -> TurnManager:
    writer = PersonalityInstance(name="writer", system_prompt="Write.", model="gpt-4o", default=True)
    runner = AgentRunner.open(os.environ["ARC_TEST_STORE"])
    return TurnManager(runner, packs=PackSet.of({"writer": writer}), client=Writer())
