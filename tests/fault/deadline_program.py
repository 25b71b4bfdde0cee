"""The worker of a turn and a provider worker, each in its process, on a clock that the test sets.

Arguments: "turn" or "provider", the kind of store, its folder, the URL of the Redis server or "-", and for a provider
worker when it is killed: "first" (before it executes the request), "last" (after its answer) or "never".
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

from agent_runtime_core import RunnerConfig, Tool
from agent_runtime_core._core.clock import Clock
from agent_runtime_core.persistence import PersistenceConfig, PersistenceManager
from agent_runtime_core.planning import Plan, PlanStep
from agent_runtime_core.planning.plan import BasePlanner
from agent_runtime_core.tools import ToolRegistry
from agent_runtime_core.turns import EventPublisherSubscriber, ProviderSteps, StepRequest, StepResultChunk, TurnManager
from tests.support.fault_runs import SERVER, Store

DEADLINE = 1000.0
LEASE = 5000.0
KINDS = ("tool_call",)


class SharedClock(Clock):
    """Its wall clock is ahead by what a file says, in all processes of a test. A sleep ends when it says so."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.file = folder / "ahead"
        system = Clock()
        self.wall = lambda: system.wall() + self._ahead()[0]
        self.boot = lambda: system.boot() + self._ahead()[1]

    def _ahead(self) -> list[float]:
        return [float(each) for each in self.file.read_text().split()]

    def set_ahead(self, wall: float, *, leases_end: bool = False) -> None:
        new = self.file.with_suffix(f".{os.getpid()}")
        new.write_text(f"{wall!r} {2 * LEASE if leases_end else 0}")
        new.replace(self.file)

    async def sleep(self, seconds: float) -> None:
        over, until = time.monotonic() + seconds, self.wall() + seconds
        while (left := over - time.monotonic()) > 0 and self.wall() < until:  # noqa: ASYNC110 - nobody rings when the file changes
            await asyncio.sleep(min(left, 0.02))
        await asyncio.sleep(0)


class OneCharge(BasePlanner):
    async def create_plan(self, prompt: str, available_tools: object) -> Plan:
        return Plan([PlanStep(1, "charge", {})], prompt)


def noted(folder: Path) -> list[str]:
    """Who has executed the tool, once for each time."""
    return (folder / "noted").read_text().split()


def note(folder: Path, who: str) -> str:
    with (folder / "noted").open("a") as file:
        file.write(f"{who}\n")
    return who


def manager_of(store: Store, folder: Path) -> TurnManager:
    config = RunnerConfig(lease_ttl_seconds=LEASE, max_retries=5)
    runner = store.runner(config, persistence=PersistenceManager(PersistenceConfig.on(store.engine)))

    def charge() -> str:
        return note(folder, "here")

    tools = ToolRegistry()
    tools.register(Tool.from_function(charge, has_side_effects=True))
    settings = ProviderSteps(kinds=KINDS, deadline=DEADLINE, fallback="here")
    return TurnManager(runner, planner=OneCharge(), tools=tools, provider_steps=settings)


async def provide(store: Store, folder: Path, killed: str) -> None:
    runner = store.runner()
    topics = EventPublisherSubscriber(runner.event_bus, runner.state_store)
    async for envelope in topics.subscribe("agent.steps", consumer="provider"):
        request, ids = envelope.payload, {"turn_id": envelope.turn_id, "step_id": envelope.step_id}
        if isinstance(request, StepRequest):
            if killed == "first":
                os.kill(os.getpid(), signal.SIGKILL)
            if "provider" not in noted(folder) and store.clock.wall() < request.deadline:
                note(folder, "provider")
            if "provider" in noted(folder):
                done = StepResultChunk(
                    step_number=1, attempt=request.attempt, final=True, status="completed", result="provider"
                )
                await topics.tell(done, event_id=f"{envelope.event_id}:answer", **ids)
            if killed == "last":
                os.kill(os.getpid(), signal.SIGKILL)
        assert envelope.offset is not None
        await topics.commit("agent.steps", "provider", envelope.offset)


async def main(role: str, kind: str, folder: Path, url: str, killed: str = "never") -> None:
    SERVER["url"] = url
    store = Store(kind, folder, SharedClock(folder))
    manager = manager_of(store, folder) if role == "turn" else None
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if manager is None:
        await provide(store, folder, killed)
    else:
        await manager.runner.run_loop(0.1)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:]))
