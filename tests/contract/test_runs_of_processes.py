"""Runs on three objects that were made separately from one URL, in several processes; engines that share fences."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import AgentRunner
from agent_runtime_core._engines.memory import MemoryEngine
from agent_runtime_core.errors import InvalidArgument
from agent_runtime_core.events import get_event_bus
from agent_runtime_core.queue import get_queue
from agent_runtime_core.registry import Registry
from agent_runtime_core.state import get_state_store
from agent_runtime_core.testing.clock import RunClock
from agent_runtime_core.testing.contracts import runs
from agent_runtime_core.testing.contracts.runs_fixtures import Scripted
from tests.contract.third_party.their_bus import TheirBus
from tests.contract.third_party.their_queue import TheirQueue
from tests.contract.third_party.their_store import TheirStore
from tests.support.backends import backends


def separately(name: str, options: dict[str, Any], clock: Any) -> Any:
    """A queue, a bus and a store, each opened on its own."""
    return (
        get_queue(name, clock=clock, **options),
        get_event_bus(name, clock=clock, **options),
        get_state_store(name, clock=clock, **options),
    )


@pytest.mark.parametrize("case", runs.CASES.several, ids=lambda case: case.__name__)
@pytest.mark.parametrize("kind", backends(["sqlite", "redis", "postgres"]))
async def test_processes(kind: str, case: Any, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    numbers, where = itertools.count(), dict[int, dict[str, Any]]()

    def opened(options: dict[str, Any], clock: Any) -> Any:
        three = separately(kind, options, clock)
        where[id(three[0])] = options
        return three

    def make(clock: Any) -> Any:
        if kind == "redis":
            return opened({"url": f"{request.getfixturevalue('redis_url')}-{next(numbers)}"}, clock)
        if kind == "postgres":
            return opened({"url": f"{request.getfixturevalue('postgres_url')}_{next(numbers)}"}, clock)
        return opened({"path": tmp_path / f"{next(numbers)}.db", "durability": "normal"}, clock)

    def again(three: Any) -> Any:
        # On a Redis, a clock of its own is a connection of its own.
        return opened(where[id(three[0])], RunClock(three[0].clock, ()))

    await case(make, again)


async def test_check_runs_the_cases_of_several_processes_too() -> None:
    opened = 0

    def make(clock: Any) -> Any:
        return separately("memory", {"engine": MemoryEngine(clock)}, clock)

    def again(three: Any) -> Any:
        nonlocal opened
        opened += 1
        return separately("memory", {"engine": three[0].engine}, three[0].clock)

    await runs.check(make, again=again)
    assert opened > len(runs.CASES.several)


class FencesOf:
    """The fences of a queue whose store is replaced with every commit."""

    def __init__(self, queue: TheirQueue) -> None:
        self.queue = queue

    def get(self, key: str, default: Any = None) -> Any:
        return self.queue.store.claims.get(key, default)

    def __setitem__(self, key: str, token: str) -> None:
        self.queue.store.claims[key] = token

    def pop(self, key: str, default: Any = None) -> Any:
        return self.queue.store.claims.pop(key, default)

    def __deepcopy__(self, memo: Any) -> FencesOf:
        return self


def with_fences_of_the_queue(*names: str) -> Any:
    queue, bus, store = TheirQueue(), TheirBus(), TheirStore()
    if "bus" in names:
        bus.store.claims = FencesOf(queue)  # type: ignore[assignment]
    if "store" in names:
        store.store.claims = FencesOf(queue)  # type: ignore[assignment]
    return queue, bus, store


async def body(ctx: Any) -> Any:
    return await ctx.step("one", lambda: 1)


def runner_on(backends: Any) -> AgentRunner:
    registry = Registry()
    registry.register(Scripted("agent", body))
    return AgentRunner(*backends, registry=registry)


@pytest.mark.parametrize(
    ("names", "named"), [(["bus"], "TheirBus"), (["store"], "TheirStore"), (["bus", "store"], "TheirStore")]
)
async def test_engines_that_share_fences_are_rejected_with_the_reason(names: list[str], named: str) -> None:
    runner = runner_on(with_fences_of_the_queue(*names))
    with pytest.raises(InvalidArgument, match=rf"must share one engine, got a TheirQueue and a {named} with"):
        await runner.execute("agent", run_id="report-1")
    await runner.submit("agent")
    with pytest.raises(InvalidArgument, match="Set the attribute `engine`"):
        await runner.run_once()


async def test_engines_with_fences_of_their_own_are_checked_once() -> None:
    probes = []

    class Counting(TheirStore):
        async def commit(self, guard: Any, ops: Any) -> list[Any]:
            if [op.name for op in ops] == ["fence.forget"]:
                probes.append(guard.key)
            return await super().commit(guard, ops)

    runner = runner_on((TheirQueue(), TheirBus(), Counting()))
    results = [await runner.execute("agent", run_id=name) for name in ("a", "b")]
    assert [each.final_output for each in results] == [{"answer": 1}] * 2
    assert len(probes) == 1
