"""Workers that are busy while their store is away for a while, and what holds after it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from typing import Any
from uuid import UUID

from agent_runtime_core import AgentRunner, RunStatus
from agent_runtime_core.errors import StorageBusy
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner.backends import open_url
from tests.support.fault_runs import Agent, consistent, settings

STEPS = 6
SLOTS = 8


class Load:
    """Two workers busy with runs, and what they and their callers were told of.

    Args:
        urls: Where the store is, for each of the workers.
    """

    def __init__(self, *urls: str) -> None:
        self.over = False
        self.runs: list[UUID] = []
        self.acknowledged: dict[tuple[str, str], int] = {}
        self.ran: Counter[tuple[str, str]] = Counter()
        self.again: list[tuple[str, str]] = []
        self.events: Counter[str] = Counter()
        self.runners = [self._runner(f"w{n}", url) for n, url in enumerate(urls)]

    def _runner(self, name: str, url: str) -> AgentRunner:
        agents = Registry()
        agents.register(Agent("a", self.code))
        config = settings(worker_id=name, lease_ttl_seconds=3.0, max_retries=20, grace_seconds=5.0)
        queue, bus, state = open_url(url, max_retries=20)
        return AgentRunner(queue, bus, state, config, registry=agents)

    async def code(self, ctx: Any) -> int:
        run = str(ctx.run_id)
        for i in range(STEPS):
            about = (run, f"s{i}")

            async def act(about: tuple[str, str] = about, i: int = i) -> int:
                if about in self.acknowledged:
                    self.again.append(about)
                self.ran[about] += 1
                await asyncio.sleep(0.01)
                return i * i

            self.acknowledged[about] = await ctx.step(f"s{i}", act)
            await ctx.emit("said", {"i": i})
            self.events[run] += 1
        return STEPS

    async def submit(self) -> None:
        """Keep some runs waiting; whoever is told that it may have failed asks again under the same id."""
        numbers = itertools.count()
        while not self.over:
            self.runs.append(await self._submitted(f"run {next(numbers)}"))
            await asyncio.sleep(0.02)

    async def _submitted(self, run_id: str) -> UUID:
        while True:
            with contextlib.suppress(StorageBusy):
                return await self.runners[0].submit("a", {}, run_id=run_id)

    async def check(self, *, attempts: int | None = None, lost: bool = False) -> None:
        """Each run has succeeded, each step once.

        Args:
            attempts: How many attempts each run has used.
            lost: Whether the store has lost what was acknowledged shortly before an outage.
        """
        near = self.runners[0]
        for run in self.runs:
            result = await near.wait(run, timeout=30)
            assert (result.status, result.final_output) == (RunStatus.SUCCEEDED, {"value": STEPS})
            await consistent(near, run)
            records = [r for r in await near.state_store.records(run) if r.kind == "done"]
            assert [r.name for r in records] == [f"s{i}" for i in range(STEPS)]
            said = Counter(e.payload["i"] for e in await near.event_bus.get_events(run) if e.event_type == "said")
            assert set(said) == set(range(STEPS))
        infos = await near.runs(limit=len(self.runs) + 1)
        assert len(infos) == len(self.runs)
        assert attempts is None or {info.attempt for info in infos} == {attempts}
        assert lost or self.again == [], "what was acknowledged ran again"
