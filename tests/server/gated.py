"""A run whose events the test asks for."""

from __future__ import annotations

import asyncio
from typing import Any

from agent_runtime_core.interfaces import RunResult
from agent_runtime_core.runner import AgentRunner
from tests.support.runs import Script


class Gated:
    """An agent that emits events as `emit` asks for them, until `finish`."""

    def __init__(self, runner: AgentRunner) -> None:
        self.runner = runner
        self.asked: asyncio.Queue[tuple[str, dict[str, Any]] | None] = asyncio.Queue()
        self.begun = asyncio.Event()
        runner.registry.register(Script(self._body, "gated"))

    async def _body(self, ctx: Any) -> RunResult:
        self.begun.set()
        while (event := await self.asked.get()) is not None:
            await ctx.emit(*event)
            self.asked.task_done()
        self.asked.task_done()
        return RunResult()

    async def start(self, run_id: str) -> asyncio.Task[Any]:
        running = asyncio.ensure_future(self.runner.execute("gated", run_id=run_id))
        await self.begun.wait()
        self.begun.clear()
        return running

    async def emit(self, count: int = 1, kind: str = "test.event", **payload: Any) -> None:
        for _ in range(count):
            self.asked.put_nowait((kind, payload))
        await self.asked.join()

    def finish(self) -> None:
        self.asked.put_nowait(None)


async def finished(gated: Gated, run_id: str = "r", count: int = 3, **payload: Any) -> None:
    """A finished run with `count` + 2 events."""
    running = await gated.start(run_id)
    await gated.emit(count, **payload)
    gated.finish()
    await running
