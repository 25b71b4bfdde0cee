"""The slots of a worker: who uses one, who leaves it, and who comes next."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._execution.run_control import RunControl
from agent_runtime_core.queue import InMemoryQueue
from agent_runtime_core.queue.records import RunRow
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.runner.worker import REGAIN_TIMEOUT, ConcurrencySlots
from agent_runtime_core.status import RunStatus
from agent_runtime_core.testing import VirtualClock
from tests.support.runs import Rig, soon, until


class Crew:
    """Steps that say when they are in flight, and end when they may."""

    def __init__(self) -> None:
        self.inside: list[str] = []
        self.begun: list[str] = []
        self.leave: dict[str, asyncio.Event] = {}

    async def step(self, ctx: Any, name: str) -> None:
        await ctx.step(f"work on {name}", self.work, name)

    async def work(self, name: str) -> None:
        self.inside.append(name)
        self.begun.append(name)
        await self.leave.setdefault(name, asyncio.Event()).wait()
        self.inside.remove(name)

    def let(self, *names: str) -> None:
        for name in names:
            self.leave.setdefault(name, asyncio.Event()).set()

    async def becomes(self, *names: str) -> None:
        """Just these are in flight, and stay the only ones."""
        await soon(lambda: self.inside == [*names])
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert self.inside == [*names]

    async def works(self, ctx: Any) -> None:
        await self.step(ctx, ctx.run_key)

    async def waits(self, ctx: Any) -> None:
        await ctx.wait_for_signal("go")
        await self.step(ctx, ctx.run_key)


class Here:
    """A worker with few slots, and runs that wait in place for as long as they have to."""

    def __init__(self, rig: Rig, clock: VirtualClock) -> None:
        self.rig, self.clock, self.crew = rig, clock, Crew()
        self.runner = rig.runner
        rig.register(self.crew.works, "works")
        rig.register(self.crew.waits, "waits")

    @property
    def slots(self) -> ConcurrencySlots:
        return self.runner._worker.slots

    async def waiting(self, *names: str) -> None:
        """Runs of these names wait in place for their signal, and use no slot."""
        busy = self.slots.busy
        for name in names:
            await self.runner.submit("waits", run_id=name)
            await self.rig.begun(name)
            await soon(lambda: self.slots.busy == busy)

    async def coming_back(self, *names: str) -> None:
        """They have their signal, one after the other, and no slot is free."""
        for name in names:
            there = len(self.slots.waiting)
            await self.runner.signal(name, "go")
            await soon(lambda: len(self.slots.waiting) == there + 1)  # noqa: B023 - it is over before the next one
            await asyncio.sleep(0)  # its patience begins a turn later

    async def ended(self, *names: str) -> None:
        for name in names:
            assert (await self.runner.wait(name, 10)).status is RunStatus.SUCCEEDED
        await soon(lambda: self.slots.busy == 0)


@asynccontextmanager
async def worker(place: Path | None, concurrency: int = 1, **config: Any) -> AsyncIterator[Here]:
    clock = VirtualClock()
    settings = {"park_after": 1e9, "grace_seconds": 0, "lease_ttl_seconds": 1e9, **config}
    async with Rig(place, clock, **settings) as rig:
        here = Here(rig, clock)
        loop = asyncio.ensure_future(rig.runner.run_loop(1e9, concurrency=concurrency, handle_signals=False))
        await soon(lambda: rig.runner._worker._wake_event is not None)
        yield here
        rig.runner.stop()
        async with asyncio.timeout(20):
            await loop


async def test_what_comes_back_from_a_wait_has_a_slot_in_order_and_before_new_runs(place: Path | None) -> None:
    async with worker(place) as here:
        crew = here.crew
        await here.waiting("a", "b", "c")
        await here.runner.submit("works", run_id="first")
        await crew.becomes("first")
        await here.coming_back("b", "c", "a")
        await here.runner.submit("works", run_id="new")
        await crew.becomes("first")
        for now, then in (("first", "b"), ("b", "c"), ("c", "a"), ("a", "new")):
            crew.let(now)
            await crew.becomes(then)
        crew.let("new")
        await here.ended("a", "b", "c", "first", "new")


async def test_runs_that_all_wake_at_once_go_on_as_slots_allow(place: Path | None) -> None:
    async with worker(place, 2) as here:
        crew = here.crew

        async def sleeps(ctx: Any) -> None:
            await ctx.sleep(1)
            await crew.step(ctx, ctx.run_key)

        here.rig.register(sleeps, "sleeps")
        names = [f"r{n}" for n in range(12)]
        for name in names:
            await here.runner.submit("sleeps", run_id=name)
        await here.clock.until_sleeping(len(names) + 1)  # and the worker itself
        here.clock.advance(1)
        for n in range(0, len(names), 2):
            await soon(lambda: len(crew.begun) == n + 2)  # noqa: B023 - it is over before the next one
            for _ in range(10):
                await asyncio.sleep(0.001)
            assert len(crew.inside) == 2
            crew.let(*crew.inside)
        await here.ended(*names)


async def test_a_wait_that_is_over_goes_on_at_once_where_a_slot_is_free() -> None:
    slots, place = ConcurrencySlots(VirtualClock(), lambda: None), RunControl()
    slots.resize(1)
    slots.take(place)
    slots.release(place)
    with pytest.raises(StopIteration) as ended:
        slots.regain(place).send(None)
    assert ended.value.value is True
    assert (slots.busy, place.without_slot) == (1, False)


@pytest.mark.parametrize("lost", [False, True], ids=["cancelled", "lost"])
async def test_a_run_that_waits_for_a_slot_hears_that_it_is_cancelled_or_lost(place: Path | None, lost: bool) -> None:
    async with worker(place) as here:
        crew = here.crew
        await here.waiting("a", "b")
        await here.runner.submit("works", run_id="first")
        await crew.becomes("first")
        await here.coming_back("a", "b")
        if lost:
            drive = next(
                drive for drive in here.runner._worker._executions.values() if drive.control in here.slots.waiting
            )
            drive.claim.lose(drive.claim.row.claim_id)
        else:
            await here.runner.cancel("a", wait=True)
        await soon(lambda: len(here.slots.waiting) == 1)
        await soon(lambda: len(here.runner._worker._executions) == 2)
        crew.let("first", "b")
        await here.ended("first", "b")
        assert crew.begun == ["first", "b"]
        assert here.slots.waiting == {}


async def test_what_waits_for_a_slot_is_given_back_at_once_where_the_worker_is_told_to_stop(place: Path | None) -> None:
    async with worker(place, grace_seconds=1e9) as here:
        crew = here.crew
        await here.waiting("a", "b")
        await here.runner.submit("works", run_id="first")
        await crew.becomes("first")
        await here.coming_back("a")
        here.runner.stop()
        await becomes_pending(here.runner, "a")
        await here.runner.signal("b", "go")
        await becomes_pending(here.runner, "b")
        for name in "ab":
            info = await here.runner.get_run(name)
            assert (info.attempt, info.reason) == (1, "handed back")
        await crew.becomes("first")
        crew.let("first")
        await here.ended("first")


async def becomes_pending(runner: AgentRunner, name: str) -> None:
    async with asyncio.timeout(10):
        while (await runner.get_run(name)).status is not RunStatus.PENDING:  # noqa: ASYNC110 - nobody rings for it
            await asyncio.sleep(0.001)


async def test_a_run_that_waited_long_for_a_slot_goes_to_a_worker_that_has_one(place: Path | None) -> None:
    async with worker(place) as here:
        crew = here.crew
        await here.waiting("a")
        await here.runner.submit("works", run_id="first")
        await crew.becomes("first")
        await here.coming_back("a")
        assert not await here.rig.another().run_once()
        here.clock.advance(REGAIN_TIMEOUT)
        await becomes_pending(here.runner, "a")
        other = asyncio.ensure_future(here.rig.another().run_once())
        await crew.becomes("first", "a")
        crew.let("first", "a")
        assert await other
        await here.ended("first", "a")
        assert [payload["reason"] for _, payload in await here.rig.told("run.resumed", "a")] == ["handed back"]


async def test_the_time_for_which_a_run_waits_for_a_slot_is_not_its_own(
    place: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_runtime_core.runner.worker.REGAIN_TIMEOUT", 1e6)
    async with worker(place, run_timeout_seconds=50) as here:
        crew = here.crew
        await here.waiting("a")
        here.clock.advance(100)
        await here.runner.submit("works", run_id="first")
        await crew.becomes("first")
        await here.coming_back("a")
        [waiting] = here.slots.waiting
        here.clock.advance(40)
        crew.let("first")
        await crew.becomes("a")
        assert waiting.paused_seconds == pytest.approx(140)
        assert waiting.paused_at is None
        crew.let("a")
        await here.ended("first", "a")


async def test_a_step_that_begins_while_its_run_waits_has_a_slot_first(place: Path | None) -> None:
    async with worker(place) as here:
        crew, kept = here.crew, list[tuple[Any, contextvars.Context]]()

        async def waits(ctx: Any) -> None:
            kept.append((ctx, contextvars.copy_context()))
            await ctx.wait_for_signal("go")

        here.rig.register(waits, "waits")
        await here.waiting("r")
        await here.runner.submit("works", run_id="first")
        await crew.becomes("first")
        [(ctx, context)] = kept
        later = asyncio.get_running_loop().create_task(crew.step(ctx, "later"), context=context)
        await crew.becomes("first")
        crew.let("first")
        await crew.becomes("later")
        await here.runner.submit("works", run_id="second")
        await crew.becomes("later")
        crew.let("later")
        await later
        await crew.becomes("second")  # while the run only waits again
        crew.let("second")
        await here.runner.signal("r", "go")
        await here.ended("r", "first", "second")


async def test_of_two_waits_the_second_leaves_the_slot_again_that_the_first_came_back_to(place: Path | None) -> None:
    async with worker(place) as here:
        crew = here.crew

        async def both(ctx: Any) -> None:
            async def one() -> None:
                await ctx.wait_for_signal("one")
                await crew.step(ctx, "after one")

            await asyncio.gather(one(), ctx.wait_for_signal("two"))

        here.rig.register(both, "both")
        await here.runner.submit("both", run_id="r")
        await here.rig.begun("r")
        await soon(lambda: here.slots.busy == 0)
        await here.runner.signal("r", "one")
        await crew.becomes("after one")
        assert here.slots.busy == 1
        crew.let("after one")
        await here.runner.submit("works", run_id="first")
        await crew.becomes("first")
        await here.runner.signal("r", "two")
        await soon(lambda: len(here.slots.waiting) == 1)
        crew.let("first")
        await here.ended("r", "first")


class Hasty:
    """An agent that gives its wait up when its time limits fire, and goes on without it."""

    def __init__(self, crew: Crew) -> None:
        self.crew, self.limits = crew, list[asyncio.Timeout]()

    async def __call__(self, ctx: Any) -> str:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None) as outer, asyncio.timeout(None) as inner:
                self.limits = [inner, outer]
                await ctx.wait_for_signal("go")
        assert ctx.control.paused_at is None, "from now on its time is its own"
        self.crew.inside.append("without")
        await self.crew.leave.setdefault("without", asyncio.Event()).wait()  # plain work, which is no step
        self.crew.inside.remove("without")
        return "without it"

    async def fire(self, limit: int) -> None:
        self.limits[limit].reschedule(asyncio.get_running_loop().time())
        await soon(self.limits[limit].expired)


@pytest.mark.parametrize("has_come", [False, True], ids=["no signal", "a signal that came"])
async def test_what_gives_a_wait_up_goes_on_when_its_run_has_a_slot_again(place: Path | None, has_come: bool) -> None:
    async with worker(place) as here:
        crew, hasty = here.crew, Hasty(here.crew)
        here.rig.register(hasty, "waits")
        await here.waiting("r")
        await here.runner.submit("works", run_id="first")
        await crew.becomes("first")
        if has_come:
            await here.coming_back("r")
        await hasty.fire(0)
        await crew.becomes("first")
        assert len(here.slots.waiting) == 1
        crew.let("first")
        await crew.becomes("without")
        assert (here.slots.busy, here.slots.waiting) == (1, {})
        await here.runner.submit("works", run_id="new")
        await crew.becomes("without")
        crew.let("without")
        await crew.becomes("new")
        crew.let("new")
        assert (await here.runner.wait("r", 10)).final_output == {"value": "without it"}
        await here.ended("r", "first", "new")


async def test_what_is_cancelled_while_it_waits_for_a_slot_keeps_none_and_has_none_to_give(place: Path | None) -> None:
    async with worker(place) as here:
        crew, hasty = here.crew, Hasty(here.crew)
        here.rig.register(hasty, "waits")
        await here.waiting("r")
        await here.runner.submit("works", run_id="first")
        await crew.becomes("first")
        await hasty.fire(0)
        await hasty.fire(1)
        await crew.becomes("first", "without")
        assert here.slots.waiting == {}
        await here.runner.submit("works", run_id="new")
        crew.let("without")
        assert (await here.runner.wait("r", 10)).final_output == {"value": "without it"}
        await crew.becomes("first")
        crew.let("first", "new")
        await here.ended("first", "new")


async def test_a_parent_has_its_slot_back_when_its_children_have_ended_in_it(place: Path | None) -> None:
    async with worker(place) as here:

        async def child(ctx: Any) -> int:
            assert here.slots.busy == 1
            return int(await ctx.step("double", lambda n: 2 * n, ctx.params["n"]))

        async def parent(ctx: Any) -> list[Any]:
            calls = [ctx.call("child", {"params": {"n": n}}, key=str(n)) for n in range(3)]
            return [each.final_output["value"] for each in await asyncio.gather(*calls)]

        here.rig.register(child, "child")
        here.rig.register(parent, "parent")
        run_id = await here.runner.submit("parent")
        assert (await here.runner.wait(run_id, 10)).final_output == {"value": [0, 2, 4]}
        await soon(lambda: here.slots.busy == 0)


async def test_what_a_claim_under_way_may_bring_has_its_slots(
    place: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with worker(place) as here:
        crew, claiming, gate = here.crew, asyncio.Event(), asyncio.Event()
        await here.waiting("a")
        claim = here.runner.queue.claim_rows

        async def slow(*args: Any, **options: Any) -> list[RunRow]:
            claiming.set()
            await gate.wait()
            return await claim(*args, **options)

        monkeypatch.setattr(here.runner.queue, "claim_rows", slow)
        await here.runner.submit("works", run_id="new")
        await until(claiming)
        await here.coming_back("a")
        gate.set()
        await crew.becomes("new")
        crew.let("new")
        await crew.becomes("a")
        crew.let("a")
        await here.ended("a", "new")


async def test_a_claim_does_not_stand_while_a_run_may_come_back_to_the_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    stands: list[bool] = []
    claim_rows = InMemoryQueue.claim_rows

    class Standing:
        async def close(self) -> None: ...

    async def claimed(
        queue: InMemoryQueue, *args: Any, blocking: Any = None, wait_seconds: float = 0, **options: Any
    ) -> Any:
        stands.append(blocking is not None)
        return await claim_rows(queue, *args, **options)

    monkeypatch.setattr(InMemoryQueue, "blocking_claims", lambda queue, given: Standing())
    monkeypatch.setattr(InMemoryQueue, "claim_rows", claimed)
    async with worker(None) as here:
        await soon(lambda: stands == [True])
        await here.waiting("a")
        here.runner._worker.wake()
        await soon(lambda: len(stands) > 2)
        assert not any(stands[-1:])
        here.crew.let("a")
        await here.runner.signal("a", "go")
        await here.ended("a")
        await soon(lambda: stands[-1])
