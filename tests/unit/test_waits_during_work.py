"""A wait in one task is no wait of the run: slots, time limits and parks heed the tasks that work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._core.timeouts import wait_cancelled
from agent_runtime_core.errors import WaitTimeout
from agent_runtime_core.interfaces import RunResult
from agent_runtime_core.status import RunStatus
from agent_runtime_core.testing import VirtualClock
from tests.support.runs import Rig, soon
from tests.unit.test_concurrency_slots import Here, worker

Work = Callable[[], Awaitable[None]]


class Plain:
    """Work between steps, which ends when it may."""

    def __init__(self) -> None:
        self.began, self.ended, self.inside, self.most = 0, 0, 0, 0
        self.gate = asyncio.Event()
        self.thread = threading.Event()

    async def __call__(self) -> None:
        with self._counted():
            await self.gate.wait()

    async def in_thread(self) -> None:
        with self._counted():
            await asyncio.to_thread(self.thread.wait, 30)

    def let(self) -> None:
        self.gate.set()
        self.thread.set()

    def _counted(self) -> Any:
        return _Counted(self)


class _Counted:
    def __init__(self, work: Plain) -> None:
        self.work = work

    def __enter__(self) -> None:
        self.work.began += 1
        self.work.inside += 1
        self.work.most = max(self.work.most, self.work.inside)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.work.inside -= 1
        self.work.ended += kind is None


async def main_works(ctx: Any, work: Plain) -> None:
    stop = asyncio.create_task(ctx.wait_for_signal("go"))
    await work()
    await stop


async def gathered(ctx: Any, work: Plain) -> None:
    await asyncio.gather(ctx.wait_for_signal("go"), work())


async def grouped(ctx: Any, work: Plain) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(ctx.wait_for_signal("go"))
        group.create_task(work())


async def all_awaited(ctx: Any, work: Plain) -> None:
    await asyncio.wait({asyncio.create_task(ctx.wait_for_signal("go")), asyncio.create_task(work())})


async def side_works(ctx: Any, work: Plain) -> None:
    side = asyncio.create_task(work())
    await ctx.wait_for_signal("go")
    await side


async def nested(ctx: Any, work: Plain) -> None:
    await asyncio.create_task(gathered(ctx, work))


async def in_a_thread(ctx: Any, work: Plain) -> None:
    await asyncio.gather(ctx.wait_for_signal("go"), work.in_thread())


async def of_several_waits(ctx: Any, work: Plain) -> None:
    await asyncio.gather(ctx.wait_for_signal("go"), ctx.sleep(3600), ctx.wait_for_signal("more"), work())


async def with_a_child(ctx: Any, work: Plain) -> None:
    await asyncio.gather(ctx.call("child", {}), work())


async def after_a_failure(ctx: Any, work: Plain) -> None:
    async def fails() -> None:
        await work()
        raise ValueError

    await asyncio.gather(ctx.wait_for_signal("go"), fails(), return_exceptions=True)


KINDS = [
    main_works, gathered, grouped, all_awaited, side_works, nested, in_a_thread, of_several_waits, with_a_child,
    after_a_failure,
]  # fmt: skip


async def child(ctx: Any) -> None:
    await ctx.wait_for_signal("go")


def agent(here: Here, kind: Any, work: Plain) -> None:
    here.rig.register(lambda ctx: kind(ctx, work), "both")
    here.rig.register(child, "child")


async def turns() -> None:
    for _ in range(30):
        await asyncio.sleep(0.001)


async def becomes(here: Here, run_id: str, status: RunStatus) -> None:
    async with asyncio.timeout(10):
        while (await here.runner.get_run(run_id)).status is not status:  # noqa: ASYNC110 - nobody rings for it
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_run_that_works_during_a_wait_is_parked_when_its_work_has_ended(place: Path | None, kind: Any) -> None:
    work = Plain()
    async with worker(place, 2, park_after=0) as here:
        agent(here, kind, work)
        await here.runner.submit("both", run_id="r")
        await soon(lambda: work.inside == 1)
        await turns()
        assert (await here.runner.get_run("r")).status is RunStatus.RUNNING
        work.let()
        await becomes(here, "r", RunStatus.WAITING)
        assert (work.began, work.ended) == (1, 1)


@pytest.mark.parametrize("kind", [each for each in KINDS if each is not with_a_child])
async def test_a_run_that_works_during_a_wait_keeps_its_slot_and_leaves_it_when_its_work_has_ended(
    place: Path | None, kind: Any
) -> None:
    work = Plain()
    async with worker(place) as here:
        agent(here, kind, work)
        for number in range(8):
            await here.runner.submit("both", run_id=f"r{number}")
        await soon(lambda: work.inside == 1)
        await turns()
        assert (work.began, here.slots.busy) == (1, 1)
        [drive] = here.runner._worker._executions.values()
        assert drive.control.paused_at is None
        work.let()
        await soon(lambda: work.ended == 8)
        assert work.most == 1
        await soon(lambda: here.slots.busy == 0)
        assert all(drive.control.paused_at is not None for drive in here.runner._worker._executions.values())


async def test_the_time_limit_of_a_run_counts_while_it_works_during_a_wait(place: Path | None) -> None:
    clock = VirtualClock()
    async with Rig(place, clock, run_timeout_seconds=0.15) as rig:

        async def body(ctx: Any) -> None:
            stop = asyncio.create_task(ctx.wait_for_signal("stop"))
            await asyncio.sleep(0)
            clock.advance(0.2)
            await asyncio.Event().wait()
            stop.cancel()

        assert (await rig.go(body)).status is RunStatus.TIMED_OUT


@pytest.mark.parametrize("kind", [gathered, grouped, all_awaited, side_works, main_works])
async def test_the_time_limit_of_a_run_is_suspended_while_all_its_tasks_wait(place: Path | None, kind: Any) -> None:
    clock, work = VirtualClock(), Plain()
    work.let()
    async with Rig(place, clock, run_timeout_seconds=0.15) as rig:
        running = asyncio.ensure_future(rig.go(lambda ctx: kind(ctx, work)))
        held = rig.runner.heartbeat._leased
        await soon(lambda: any(each.control.paused_at is not None for each in held.values()))
        clock.advance(1000)
        await asyncio.sleep(0.3)  # by then the limit was looked at
        await rig.runner.signal("r", "go")
        assert (await running).status is RunStatus.SUCCEEDED


async def test_what_the_limits_of_the_code_itself_wake_has_a_slot_at_once(place: Path | None) -> None:
    """No wait ends: a task that joined some others goes on without them."""
    work, limits = Plain(), list[asyncio.Timeout]()
    async with worker(place) as here:

        async def both(ctx: Any) -> None:
            tasks = {asyncio.create_task(ctx.wait_for_signal("go"))}
            with suppress(TimeoutError):
                async with asyncio.timeout(None) as limit:
                    limits.append(limit)
                    await asyncio.wait(tasks)
            await work()
            await asyncio.wait(tasks)

        here.rig.register(both, "both")
        await here.runner.submit("both", run_id="r")
        await soon(lambda: len(limits) == 1)
        await soon(lambda: here.slots.busy == 0)
        limits[0].reschedule(asyncio.get_running_loop().time())
        await soon(lambda: here.slots.busy == 1)
        [drive] = here.runner._worker._executions.values()
        assert drive.control.paused_at is None
        work.let()
        await soon(lambda: here.slots.busy == 0)
        await here.runner.signal("r", "go")
        await here.ended("r")


async def test_a_wait_with_a_time_limit_of_the_code_keeps_its_run_in_memory(place: Path | None) -> None:
    async with worker(place, park_after=0) as here:

        async def both(ctx: Any) -> str:
            tasks = {asyncio.create_task(ctx.wait_for_signal("go"))}
            done, _ = await asyncio.wait(tasks, timeout=0.05)
            return "done" if done else "late"

        here.rig.register(both, "both")
        await here.runner.submit("both", run_id="r")
        assert (await here.runner.wait("r", 10)).final_output == {"value": "late"}


async def test_a_wait_for_the_same_message_twice_is_no_work(place: Path | None) -> None:
    """The second use of a key waits for the first."""
    async with worker(place, park_after=0) as here:

        async def both(ctx: Any) -> list[Any]:
            return list(await asyncio.gather(*(ctx.wait_for_signal("go", key="one") for _ in range(2))))

        here.rig.register(both, "both")
        await here.runner.submit("both", run_id="r")
        await becomes(here, "r", RunStatus.WAITING)
        await here.runner.signal("r", "go", 1)
        assert (await here.runner.wait("r", 10)).final_output == {"value": [1, 1]}


async def test_a_limit_of_a_wait_ends_it_during_work(place: Path | None) -> None:
    work = Plain()
    async with worker(place, park_after=0) as here:

        async def both(ctx: Any) -> str:
            wait = asyncio.create_task(ctx.wait_for_signal("go", timeout=10))
            await work()
            try:
                await wait
            except WaitTimeout:
                return "late"
            return "in time"

        here.rig.register(both, "both")
        await here.runner.submit("both", run_id="r")
        await soon(lambda: work.inside == 1)
        await turns()
        here.clock.advance(11)
        work.let()
        assert (await here.runner.wait("r", 10)).final_output == {"value": "late"}


# -- what is left of a run when it goes no further


class Left:
    """A side task that cleans up with awaits."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def side(self, ctx: Any, what: Callable[[], Awaitable[Any]]) -> None:
        try:
            await what()
        finally:
            self.seen.append("began")
            await asyncio.sleep(0)
            with suppress(asyncio.CancelledError):
                await ctx.emit("cleaned", {})
            self.seen.append("cleaned up")


async def forever() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("main_joins", [False, True])
async def test_a_park_ends_the_other_tasks_of_its_run(place: Path | None, main_joins: bool) -> None:
    left = Left()
    async with worker(place, park_after=0) as here:

        async def both(ctx: Any) -> None:
            side = asyncio.create_task(left.side(ctx, lambda: ctx.wait_for_signal("side")))
            await asyncio.sleep(0)
            await (asyncio.wait({side}) if main_joins else left.side(ctx, lambda: ctx.wait_for_signal("go")))

        here.rig.register(both, "both")
        await here.runner.submit("both", run_id="r")
        await becomes(here, "r", RunStatus.WAITING)
        await soon(lambda: not here.runner._worker._executions)
        tasks = 1 if main_joins else 2
        assert sorted(left.seen) == ["began"] * tasks + ["cleaned up"] * tasks


@pytest.mark.parametrize("parks", [True, False])
async def test_gathered_tasks_that_clean_up_at_different_speeds_are_cancelled_once(
    place: Path | None, parks: bool
) -> None:
    """asyncio.gather cancels all of its tasks, and ends when the first of them has ended."""
    cleaned = list[int]()
    async with worker(place, park_after=0 if parks else 60) as here:

        async def side(ctx: Any, iterations: int) -> None:
            try:
                await ctx.wait_for_signal("go", key=str(iterations))
            finally:
                for _ in range(iterations):
                    await asyncio.sleep(0)
                cleaned.append(iterations)

        async def both(ctx: Any) -> None:
            await asyncio.gather(side(ctx, 1), side(ctx, 50))

        here.rig.register(both, "both")
        await here.runner.submit("both", run_id="r")
        if parks:
            await becomes(here, "r", RunStatus.WAITING)
        else:
            await here.rig.begun("r")
            await turns()
            await here.runner.cancel("r")
        await soon(lambda: not here.runner._worker._executions)
        assert cleaned == [1, 50]


async def test_a_task_that_continued_after_an_earlier_cancellation_is_cancelled_again(
    place: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_runtime_core.runner.execution.wait_cancelled", partial(wait_cancelled, grace=0.05))
    ended = asyncio.Event()
    async with worker(place, park_after=60) as here:

        async def continues() -> None:
            with suppress(asyncio.CancelledError):
                await forever()
            try:
                await forever()
            finally:
                ended.set()

        async def both(ctx: Any) -> None:
            side = asyncio.create_task(continues())
            await asyncio.sleep(0)
            side.cancel()
            await ctx.wait_for_signal("go")

        here.rig.register(both, "both")
        await here.runner.submit("both", run_id="r")
        await here.rig.begun("r")
        await turns()
        await here.runner.cancel("r", wait=True)
        async with asyncio.timeout(10):
            await ended.wait()


@pytest.mark.parametrize("how", ["cancelled", "timed out", "handed back", "lost"])
async def test_a_run_that_goes_no_further_ends_its_other_tasks(place: Path | None, how: str) -> None:
    left = Left()
    async with worker(place, run_timeout_seconds=0.1 if how == "timed out" else 100) as here:

        async def both(ctx: Any) -> None:
            side = asyncio.create_task(left.side(ctx, forever))
            await asyncio.sleep(0)
            here.clock.advance(1 if how == "timed out" else 0)
            await asyncio.wait({side})

        here.rig.register(both, "both")
        await here.runner.submit("both", run_id="r")
        await here.rig.begun("r")
        [drive] = here.runner._worker._executions.values()
        if how == "cancelled":
            await here.runner.cancel("r")
        elif how == "handed back":
            drive.claim.request_release()
        elif how == "lost":
            drive.claim.lose(drive.claim.row.claim_id)
        await soon(lambda: bool(left.seen))
        await soon(lambda: drive not in here.runner._worker._executions.values())
        assert left.seen == ["began", "cleaned up"]


async def test_what_belongs_to_no_run_or_to_another_goes_on_after_a_park(place: Path | None) -> None:
    others = list[asyncio.Task[Any]]()
    async with worker(place, 2, park_after=0) as here:

        async def waits(ctx: Any) -> None:
            await ctx.wait_for_signal("go")

        async def works(ctx: Any) -> None:
            others.append(asyncio.create_task(forever()))
            await others[0]

        here.rig.register(waits, "both")
        here.rig.register(works, "other")
        others_run = await here.runner.submit("other")
        await soon(lambda: len(others) == 1)
        others.append(asyncio.create_task(forever()))
        await here.runner.submit("both", run_id="r")
        await becomes(here, "r", RunStatus.WAITING)
        await soon(lambda: len(here.runner._worker._executions) == 1)
        assert not any(task.done() for task in others)
        others[1].cancel()
        await here.runner.cancel(others_run, wait=True)


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("fails", [True, False])
async def test_the_end_of_an_attempt_ends_the_waits_that_it_leaves(
    place: Path | None, fails: bool, inline: bool
) -> None:
    left, kept = Left(), list[asyncio.Task[Any]]()
    async with worker(place, max_retries=1) as here:

        async def both(ctx: Any) -> None:
            kept.append(asyncio.create_task(left.side(ctx, lambda: ctx.wait_for_signal("never"))))
            await turns()
            if fails:
                raise ValueError("no")

        here.rig.register(both, "both")
        if inline:
            result = await here.runner.execute("both", "r", {})
        else:
            await here.runner.submit("both", run_id="r")
            result = await here.runner.wait("r", 10)
        assert result.status is (RunStatus.FAILED if fails else RunStatus.SUCCEEDED)
        assert left.seen == ["began", "cleaned up"]


async def test_a_task_that_outlives_a_run_which_returned_is_not_ended(place: Path | None) -> None:
    """It is the agent's to await; what it asks of the context is refused."""
    left = list[asyncio.Task[Any]]()
    async with Rig(place) as rig:

        async def returns(ctx: Any) -> RunResult:
            left.append(asyncio.create_task(forever()))
            return RunResult()

        await rig.go(returns)
        assert not left[0].done()
        left[0].cancel()
