"""This library: runs of two agents through `AgentRunner.open`."""

from __future__ import annotations

import time

from agent_runtime_core.interfaces import AgentRuntime, RunContext, RunResult
from agent_runtime_core.queue.records import RunFilter
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, open_run
from agent_runtime_core.status import RunStatus

from . import base

# A run that failed is no run that was drained.
_OPEN = tuple(each.value for each in RunStatus if each is not RunStatus.SUCCEEDED)


class _Nothing(AgentRuntime):
    key = "nothing"

    async def run(self, ctx: RunContext) -> RunResult:
        base.nothing()
        return RunResult()


class _Tell(AgentRuntime):
    key = "tell"

    async def run(self, ctx: RunContext) -> RunResult:
        base.tell()
        return RunResult()


def place(where: str) -> str:
    """What our doors are given for the URL of a server, or for the path of a SQLite file."""
    return f"{where}?prefix=bench" if where.startswith("redis") else where


async def _value() -> int:
    return 1


class Queue(base.Queue):
    def __init__(self, where: str, durability: str = "full") -> None:
        super().__init__(where)
        registry = Registry()
        registry.register(_Nothing())
        registry.register(_Tell())
        self.runner = AgentRunner.open(place(where), registry=registry, durability=durability)

    async def enqueue(self, job: str) -> None:
        await self.runner.submit(job)

    async def left(self, at_most: int) -> int:
        return len(await self.runner.queue.find(RunFilter(_OPEN, limit=at_most)))

    async def work(self, concurrency: int) -> None:
        await self.runner.run_loop(concurrency=concurrency)

    async def chain(self, count: int) -> float:
        async with open_run(place(self.where), "chain") as ctx:
            since = time.perf_counter()
            for n in range(count):
                await ctx.step(f"step-{n}", _value)
            return time.perf_counter() - since

    async def close(self) -> None:
        await self.runner.close()
