"""Fixtures for the cases of a run: backends, runners and scripted agents."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from ...events.base import EventBus
from ...interfaces import AgentRuntime, RunResult
from ...queue.base import RunQueue
from ...registry import Registry
from ...runner.runner import AgentRunner
from ...runner.settings import RunnerConfig
from ...state.base import StateStore
from ...status import RunStatus
from ...steps.model import Step
from ..clock import VirtualClock
from .checks import same

Make = Callable[..., tuple[RunQueue, EventBus, StateStore]]
Case = Callable[[Make], Awaitable[None]]

LEASE = 60.0


class Scripted(AgentRuntime):
    """An agent whose `run` is a function of the case."""

    def __init__(self, key: str, body: Callable[[Any], Awaitable[Any]]) -> None:
        self._key, self._body = key, body

    @property
    def key(self) -> str:
        return self._key

    async def run(self, ctx: Any) -> RunResult:
        return RunResult(final_output={"answer": await self._body(ctx)})


class PolledClock(VirtualClock):
    """A manual clock whose `sleep` also returns after the same number of real seconds, so that polling continues."""

    async def sleep(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await super().sleep(seconds)


class Bench:
    """Three backends and any number of runners on them. Each runner represents a process."""

    def __init__(self, make: Make) -> None:
        self.clock: VirtualClock = PolledClock()
        self.backends: tuple[RunQueue, EventBus, StateStore] = make(clock=self.clock)
        self.queue: RunQueue
        self.bus: EventBus
        self.state: StateStore
        self.queue, self.bus, self.state = self.backends
        self.runners: list[AgentRunner] = []

    def runner(self, *agents: Scripted, **settings: Any) -> AgentRunner:
        registry = Registry()
        for agent in agents:
            registry.register(agent)
        config = RunnerConfig(
            worker_id=f"w{len(self.runners)}", park_after=0, grace_seconds=0.2, lease_ttl_seconds=LEASE, **settings
        )
        runner = AgentRunner(*self.backends, config, registry=registry)
        self.runners.append(runner)
        return runner

    async def event_types(self, run_id: Any) -> list[str]:
        """The types of the run's events. Their sequences must have no gap."""
        found = await self.bus.get_events(run_id)
        same([event.sequence for event in found], list(range(len(found))), "the sequences of a run's events")
        return [event.event_type for event in found]

    async def ended(self, run_id: Any, status: str, answer: Any = None) -> None:
        """Check that queue, journal, state store and result have the same final status."""
        row = await self.queue.require(run_id)
        record = await self.state.ending(str(run_id))
        same((row.status, record and record.name), (status, status), "the final status in the queue and the journal")
        same(await self.state.get_run_status(run_id), status, "the status in the state store")
        result = await self.runners[-1].wait(run_id)
        same(result.status, RunStatus(status), "the status of the result")
        if status == "succeeded":
            same(result.final_output, {"answer": answer}, "the result")


@contextlib.asynccontextmanager
async def opened(make: Make) -> AsyncIterator[Bench]:
    bench = Bench(make)
    try:
        yield bench
    finally:
        for runner in bench.runners:
            await runner.close()


def steps(log: list[str], *names: str) -> list[Step]:
    """Steps that append their name to `log` and return it."""

    def step(name: str) -> Step:
        async def fn(ctx: Any, state: Any) -> str:
            log.append(name)
            return name

        return Step(name, fn)

    return [step(name) for name in names]
