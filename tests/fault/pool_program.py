"""A worker of an agent that makes three model calls within a pool. The test kills it."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from agent_runtime_core import (
    AgentRunner,
    AgentRuntime,
    LLMResponse,
    MockLLMClient,
    RunLimits,
    RunResult,
    SpendPool,
    ToolRegistry,
    configure,
    run_turn_loop,
)
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import RunnerConfig

CALLS, MOST = 3, 100  # of a run, and the tokens that a call may answer
PRICES = {"m": {"input": 7.0, "output": 333.333}}


class Client(MockLLMClient):
    """Answers after a moment, in which the process may be killed."""

    default_model = "m"

    async def generate(self, messages: list[Any], **options: Any) -> LLMResponse:
        await asyncio.sleep(0.05)
        tokens = 10 + len(messages[-1]["content"]) % 50
        usage = {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": tokens + 3}
        return LLMResponse({"role": "assistant", "content": "done"}, usage, "m")


class Spends(AgentRuntime):
    key = "spends"

    async def run(self, ctx: Any) -> RunResult:
        for number in range(CALLS):
            said = [{"role": "user", "content": "x" * (7 * number + ctx.params["n"])}]
            await run_turn_loop(ctx, Client(), ToolRegistry(), messages=said, model="m", max_tokens=MOST)
        return RunResult(usage=ctx.usage)


async def main(url: str, tokens: int) -> None:
    configure(model_prices=PRICES)
    registry = Registry()
    registry.register(Spends())
    pool = SpendPool("all", usd=1000, tokens=tokens, per="month")
    config = RunnerConfig(lease_ttl_seconds=2.0, max_crashes=1000, limits=RunLimits(pools=[pool]))
    async with AgentRunner.open(url, registry=registry, config=config) as runner:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await runner.run_loop(0.1, concurrency=4)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
