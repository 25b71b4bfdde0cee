"""A worker of an agent that notes the ticks of its schedule. The test kills it."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from agent_runtime_core import AgentRunner, AgentRuntime, RunResult
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import RunnerConfig


class Note(AgentRuntime):
    key = "note"

    async def run(self, ctx: Any) -> RunResult:
        await ctx.step("note", lambda: ctx.scheduled_at.isoformat())
        return RunResult()


async def main(url: str) -> None:
    registry = Registry()
    registry.register(Note())
    config = RunnerConfig(lease_ttl_seconds=2.0, max_crashes=1000)
    async with AgentRunner.open(url, registry=registry, config=config) as runner:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await runner.run_loop(0.1, concurrency=4)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
