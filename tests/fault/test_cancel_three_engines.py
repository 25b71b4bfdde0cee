"""Cancelling where queue, events and state are on engines of their own, and one of them gives no answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agent_runtime_core._engines.base import Op
from agent_runtime_core._engines.memory import MemoryEngine
from agent_runtime_core._journal.record import DONE, Record
from agent_runtime_core.errors import StorageBusy
from agent_runtime_core.events import InMemoryEventBus
from agent_runtime_core.events.event import payload_of
from agent_runtime_core.queue import InMemoryQueue
from agent_runtime_core.queue.records import RunUpdate
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.state import InMemoryStateStore
from agent_runtime_core.status import RunStatus
from agent_runtime_core.testing.clock import VirtualClock
from tests.support.fault_runs import Agent, settings, status, until


def apart_but(
    untold: set[str], refused: list[Any] | None = None
) -> tuple[InMemoryQueue, InMemoryEventBus, InMemoryStateStore]:
    """Three engines; the log gives no answer where it is told one of these kinds of events, and lists them."""
    clock = VirtualClock()
    queue, bus, state = InMemoryQueue(clock=clock), InMemoryEventBus(clock=clock), InMemoryStateStore(clock=clock)
    publish = bus.engine.commit

    async def commit(guard: Any, ops: Any) -> list[Any]:
        if any(kind in str(op.args) for kind in untold for op in ops):
            if refused is not None:
                refused.append(ops)
            raise StorageBusy("no answer")
        return await publish(guard, ops)

    bus.engine.commit = commit  # type: ignore[method-assign]
    return queue, bus, state


async def ended_while_refused(runner: AgentRunner, refused: list[Any]) -> None:
    """Have a worker execute a run until it waits for the log, and end the worker."""
    going = asyncio.ensure_future(runner.run_once())
    await until(lambda: len(refused) > 1)
    going.cancel()
    await asyncio.wait([going])


async def work() -> int:
    return 1


async def test_a_run_put_off_half_told_and_cancelled_then_has_all_its_events() -> None:
    """Over several engines: a step is recorded, its event is not, the run is given back for later, and cancelled."""
    untold, refused = set[str](), list[Any]()
    queue, bus, state = apart_but(untold, refused)

    async def code(ctx: Any) -> Any:
        untold.add("step.completed")
        await ctx.step("work", work)

    agents = Registry()
    agents.register(Agent("a", code))
    runner = AgentRunner(queue, bus, state, settings(), registry=agents)
    run_id = await runner.submit("a")
    await ended_while_refused(runner, refused)
    assert await status(runner, run_id) == "pending"
    untold.clear()
    assert await runner.cancel(run_id) is True
    told = [event.event_type for event in await bus.get_events(run_id)]
    assert told == ["run.started", "step.started", "step.completed", "run.cancelled"]
    assert await runner.cancel(run_id) is False
    assert len(await bus.get_events(run_id)) == len(told), "and none of them twice"


@pytest.mark.parametrize("heard", [True, False])
async def test_a_run_whose_end_was_recorded_and_not_told_has_one_end_when_it_is_cancelled(heard: bool) -> None:
    """Over several engines: the end is in the journal, the run is given back for later, and cancelled by somebody who
    hears of it, or who asks again."""
    untold, refused = set[str](), list[Any]()
    queue, bus, state = apart_but(untold, refused)

    async def code(ctx: Any) -> Any:
        await ctx.step("work", work)
        untold.add("run.succeeded")

    agents = Registry()
    agents.register(Agent("a", code))
    runner = AgentRunner(queue, bus, state, settings(), registry=agents)
    run_id = await runner.submit("a")
    await ended_while_refused(runner, refused)
    assert await status(runner, run_id) == "pending"
    untold.clear()
    if not heard:
        commits, state.engine.commit = state.engine.commit, unanswered  # type: ignore[method-assign]
        with pytest.raises(StorageBusy):
            await runner.cancel(run_id)
        state.engine.commit = commits  # type: ignore[method-assign]
    assert await runner.cancel(run_id) is heard
    told = [event.event_type for event in await bus.get_events(run_id)]
    assert told == ["run.started", "step.started", "step.completed", "run.cancelled"]
    assert (await runner.wait(run_id, 5)).status is RunStatus.CANCELLED
    assert await runner.cancel(run_id) is False
    assert len(await bus.get_events(run_id)) == len(told)


async def unanswered(guard: Any, ops: Any) -> list[Any]:
    raise StorageBusy("no answer")


async def test_a_run_is_cancelled_also_by_who_does_not_know_the_types_of_its_results() -> None:
    queue, bus, state = InMemoryQueue(), InMemoryEventBus(), InMemoryStateStore()
    async with AgentRunner(queue, bus, state, registry=Registry()) as runner:
        run_id = str(await runner.submit("theirs", {}))
        claimed = await queue.claim("w", 60)
        info = '{"tool": {"name": "t", "id": "c", "args": {}}}'
        record = Record(0, DONE, "tool", "0", claim_id=claimed.claim_id, t=20.0, info=info, nev=1,
                        result='{"ok": true, "result": {"$": "theirs.Odd", "v": {"x": 2}}}')  # fmt: skip
        await state.commit(None, [Op("journal.append", (run_id, record))])
        await queue.settle(run_id, RunUpdate(claimed.claim_id, "pending", queue.clock.wall()))
        assert await runner.cancel(run_id)
        found = await bus.get_events(run_id)
        assert [event.event_type for event in found] == ["tool.result", "run.cancelled"]
        assert payload_of(found[0])["result"] == {"$": "theirs.Odd", "v": {"x": 2}}


async def test_a_cancel_that_got_no_answer_is_made_whole_by_the_next() -> None:
    clock = VirtualClock()
    queue, bus, state = InMemoryQueue(clock=clock), InMemoryEventBus(clock=clock), InMemoryStateStore(clock=clock)
    append, away = state.engine.commit, True

    async def commit(guard: Any, ops: Any) -> list[Any]:
        if away:
            raise StorageBusy("no answer")
        return await append(guard, ops)

    state.engine.commit = commit  # type: ignore[method-assign]
    runner = AgentRunner(queue, bus, state, settings(), registry=Registry())
    run_id = await runner.submit("nobody")
    with pytest.raises(StorageBusy):
        await runner.cancel(run_id)
    assert await status(runner, run_id) == "cancelled"
    away = False
    assert await runner.cancel(run_id) is False
    assert [event.event_type for event in await bus.get_events(run_id)] == ["run.cancelled"]
    assert (await runner.wait(run_id)).status is RunStatus.CANCELLED
    assert await state.get_run_status(run_id) == "cancelled"


@pytest.mark.parametrize("apart", [False, True], ids=["one engine", "three"])
async def test_runs_that_are_each_others_parents_are_cancelled(apart: bool) -> None:
    clock = VirtualClock()
    engine = MemoryEngine(clock)
    own: Any = {"clock": clock} if apart else {"engine": engine}
    queue, bus, state = InMemoryQueue(**own), InMemoryEventBus(**own), InMemoryStateStore(**own)
    runner = AgentRunner(queue, bus, state, settings(), registry=Registry())
    for run_id, parent in (("a", "b"), ("b", "a"), ("own", "own")):
        await runner.submit("nobody", run_id=run_id, parent_run_id=parent)
    for run_id in ("a", "own"):
        assert await runner.cancel(run_id) is True
        assert await runner.cancel(run_id) is False
    assert [info.status.value for info in await runner.runs()] == ["cancelled"] * 3


async def test_two_cancels_at_once_write_one_end() -> None:
    """The queue has decided for one of them, the other makes it whole, and both write to the engine that is apart."""
    clock = VirtualClock()
    engine = MemoryEngine(clock)
    queue, bus, state = InMemoryQueue(clock=clock), InMemoryEventBus(engine=engine), InMemoryStateStore(engine=engine)
    append, both = engine.commit, asyncio.Barrier(2)

    async def commit(guard: Any, ops: Any) -> list[Any]:
        await both.wait()
        return await append(guard, ops)

    engine.commit = commit  # type: ignore[method-assign]
    runner = AgentRunner(queue, bus, state, settings(), registry=Registry())
    run_id = await runner.submit("nobody")
    async with asyncio.timeout(10):
        said = await asyncio.gather(runner.cancel(run_id), runner.cancel(run_id))
    assert [*said] == [True, False]
    assert [event.event_type for event in await bus.get_events(run_id)] == ["run.cancelled"]
    assert [record.kind for record in await state.records(run_id)] == ["ended"]


@pytest.mark.parametrize("claimed", [False, True], ids=["never claimed", "given back"])
@pytest.mark.parametrize("apart", ["bus and state", "state", "bus"])
async def test_a_run_that_is_begun_anew_while_it_is_cancelled_goes_on_by_itself(claimed: bool, apart: str) -> None:
    """The queue has cancelled it, and before the others are told, somebody executes it again: that is the story now."""
    clock = VirtualClock()
    queue, own = InMemoryQueue(clock=clock), MemoryEngine(clock)
    state = InMemoryStateStore(engine=queue.engine if apart == "bus" else own)
    bus = InMemoryEventBus(engine=own) if apart != "bus and state" else InMemoryEventBus(clock=clock)
    decide, begun = queue.engine.commit, list[asyncio.Task[Any]]()
    inside, go_on = asyncio.Event(), asyncio.Event()

    async def commit(guard: Any, ops: Any) -> list[Any]:
        results = await decide(guard, ops)
        if any(op.name == "queue.end" for op in ops):
            begun.append(asyncio.ensure_future(runner.execute("a", run_id)))
            await inside.wait()
        return results

    async def code(ctx: Any) -> Any:
        if not begun:
            raise ConnectionError("once")
        await ctx.step("first", work)
        inside.set()
        await go_on.wait()
        await ctx.step("second", work)

    agents = Registry()
    agents.register(Agent("a", code))
    runner = AgentRunner(queue, bus, state, settings(), registry=agents)
    run_id = await runner.submit("a")
    if claimed:
        assert await runner.run_once()
        assert await status(runner, run_id) == "pending"
    queue.engine.commit = commit  # type: ignore[method-assign]
    assert await runner.cancel(run_id) is True
    go_on.set()
    assert (await begun[0]).status is RunStatus.SUCCEEDED
    told = [event.event_type for event in await bus.get_events(run_id)]
    assert told[-6:] == [
        "run.started", "step.started", "step.completed", "step.started", "step.completed", "run.succeeded",
    ]  # fmt: skip
    # Where its end was recorded with the queue's, who goes on has told it; elsewhere nobody records it any more.
    assert told.count("run.cancelled") == (apart == "bus")
    assert await state.get_run_status(run_id) == "succeeded"
