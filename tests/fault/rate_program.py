"""A worker of an agent whose runs are started by a rate limit."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from agent_runtime_core import AgentRunner, AgentRuntime, RunResult
from agent_runtime_core.registry import Registry


class Mailer(AgentRuntime):
    key = "mailer"

    async def run(self, ctx: Any) -> RunResult:
        return RunResult()


async def main(url: str) -> None:
    registry = Registry()
    registry.register(Mailer())
    async with AgentRunner.open(url, registry=registry) as runner:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await runner.run_loop(0.1, concurrency=8)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
