"""A fork that comes to a guarded step of another run, while stores fail and processes are killed."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import EffectAlreadyDone
from agent_runtime_core._engines.sqlite.engine import SQLiteEngine
from agent_runtime_core.errors import StorageBusy, StorageError, StorageFull
from agent_runtime_core.events import SQLiteEventBus
from agent_runtime_core.queue import SQLiteQueue
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, open_run
from agent_runtime_core.state import SQLiteStateStore
from tests.fault.test_failing_fork import LAYOUTS, Counted
from tests.support.backends import POSTGRES
from tests.support.fault_runs import Agent, settings
from tests.support.processes import Child

#: By policy: how the fork ends, how often both runs have paid, and what the fork tells of it.
OUTCOMES = {
    "refuse": ("EffectAlreadyDone", 1, "refused"),
    "reuse": (None, 1, "reused"),
    "repeat": (None, 2, "repeated"),
}


@pytest.mark.parametrize(("error", "after"), [(StorageFull, False), (StorageBusy, True), (StorageBusy, False)])
@pytest.mark.parametrize("policy", OUTCOMES)
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_the_nth_failing_call_repeats_nothing(
    layout: str, policy: str, error: type[StorageError], after: bool, tmp_path: Path
) -> None:
    paid: list[str] = []

    async def body(ctx: Any) -> Any:
        async def pay() -> int:
            paid.append(str(ctx.run_id))
            return 1

        await ctx.step("first", lambda: 1)
        return await ctx.step("pay", pay, on_in_doubt="fail")

    agents = Registry()
    agents.register(agent := Agent("a", body))
    places = {each: SQLiteEngine.open(tmp_path / f"{each}.db", durability="normal") for each in set(layout)}
    queue, bus, state = (places[each] for each in layout)
    backends = (SQLiteQueue(engine=queue), SQLiteEventBus(engine=bus), SQLiteStateStore(engine=state))
    async with AgentRunner(*backends, settings(), registry=agents) as runner:
        faults = [Counted(each) for each in places.values()]
        n, calls = 0, 1
        while calls >= n:
            n += 1
            paid.clear()
            source, fork = f"source {n}", f"fork {n}"
            await runner.execute(agent, source)
            assert len(paid) == 1
            await runner.fork(source, "first", new_run_id=fork, effects=policy)
            Counted.shared = 0
            for each in faults:
                each.arm(n, 1, error, after=after)
            with contextlib.suppress(error):
                await runner.execute(agent, fork)
            calls = Counted.shared
            for each in faults:
                each.arm(0, 0, error, after=after)
            if (await runner.get_run(fork)).status not in ("failed", "succeeded"):
                await runner.execute(agent, fork)
            result = await runner.wait(fork, timeout=5)
            ends, most, action = OUTCOMES[policy]
            kind = None if result.error is None else result.error.type
            assert kind in (ends, "StepInDoubt" if policy == "repeat" else ends), n
            assert len(paid) <= most, (n, paid)
            told = [
                e.payload["action"] for e in await runner.event_bus.get_events(fork) if e.event_type == "step.effect"
            ]
            assert told == [action], n
        assert n > 5, "each call of the fork failed once"
    for engine in places.values():
        await engine.close()


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("redis", marks=pytest.mark.redis), POSTGRES])
async def test_what_a_killed_process_began_is_refused(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    where = str(tmp_path / "jobs.db") if kind == "sqlite" else request.getfixturevalue(f"{kind}_url")
    with Child("paying", where, "one") as child:
        child.expect("paying")
        assert child.kill()
    runner = AgentRunner.open(where)
    paid: list[int] = []

    async def pay(run_id: str) -> None:
        async with open_run(where, run_id) as ctx:
            assert await ctx.step("first", lambda: 2) == 1
            await ctx.step("pay", lambda: paid.append(1), on_in_doubt="fail")

    try:
        for policy in ("refuse", "reuse", "repeat"):
            await runner.fork("one", "first", new_run_id=policy, effects=policy)
        for policy in ("refuse", "reuse"):
            with pytest.raises(EffectAlreadyDone, match=r"started in run 'one'.* its outcome is unknown") as told:
                await pay(policy)
            assert told.value.status == "begun"
        assert paid == []
        await pay("repeat")
        assert paid == [1]
    finally:
        await runner.close()
