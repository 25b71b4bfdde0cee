"""The n-th call of a store fails while a run is forked, n = 1, 2, 3 …: a fork is whole or is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._engines.sqlite.engine import SQLiteEngine
from agent_runtime_core.errors import StorageBusy, StorageError, StorageFull, UnknownRun
from agent_runtime_core.events import SQLiteEventBus
from agent_runtime_core.queue import SQLiteQueue
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.state import SQLiteStateStore
from tests.support.fault_runs import Agent, consistent, settings

from .test_nth_failure import Faults

LAYOUTS = ("aaa", "abc", "abb", "aba")


class Counted(Faults):
    """Faults of several engines, numbered together."""

    shared = 0

    def _fails(self) -> bool:
        Counted.shared += 1
        return Counted.shared == self.at


@pytest.mark.parametrize(("error", "after"), [(StorageFull, False), (StorageBusy, True)])
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_fork_is_whole_or_not_there(
    layout: str, error: type[StorageError], after: bool, tmp_path: Path
) -> None:
    ran: list[str] = []

    async def body(ctx: Any) -> Any:
        def note(name: str) -> str:
            ran.append(name)
            return name

        out = []
        for name in "abc":
            out.append(await ctx.step(name, note, name))
            await ctx.checkpoint({"last": name})
        return out

    agents = Registry()
    agents.register(agent := Agent("a", body))
    places = {each: SQLiteEngine.open(tmp_path / f"{each}.db", durability="normal") for each in set(layout)}
    queue, bus, state = (places[each] for each in layout)
    backends = (SQLiteQueue(engine=queue), SQLiteEventBus(engine=bus), SQLiteStateStore(engine=state))
    async with AgentRunner(*backends, settings(), registry=agents) as runner:
        await runner.execute(agent, "source")
        faults = [Counted(each) for each in places.values()]
        n, raised = 0, 0
        while n == 0 or Counted.shared >= n:
            n += 1
            name = f"fork {n}"
            Counted.shared = 0
            for each in faults:
                each.arm(n, 1, error, after=after)
            try:
                await runner.fork("source", "b", new_run_id=name)
            except error:
                raised += 1
            calls = Counted.shared
            for each in faults:
                each.arm(0, 0, error, after=after)
            try:
                there = (await runner.get_run(name)).status
            except UnknownRun:
                assert not [info for info in await runner.runs() if info.run_key == name]
                await runner.fork("source", "b", new_run_id=name)
            else:
                assert there == "pending"
            ran.clear()
            assert await runner.run_once()
            assert (await runner.wait(name, 5)).final_output == {"value": [*"abc"]}
            assert ran == ["c"]
            assert not await runner.run_once()
            await consistent(runner, name)
            Counted.shared = calls
        assert raised == n - 1 > 3
    for engine in places.values():
        await engine.close()
