"""Parked runs: held by no worker, woken once, never missing a message, and nothing of the old attempt writes after."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core._engines.base import Op
from agent_runtime_core.errors import RunFailed, StorageClosed, StorageFull, WaitTimeout
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.status import RunStatus
from agent_runtime_core.testing.clock import VirtualClock
from tests.support.fault_runs import KINDS, consistent, drop, eventually, settings, status, store, until, until_status

COLD = settings(park_after=0)
DAY = 86400.0

pytestmark = pytest.mark.parametrize("kind", KINDS)


async def events_of(runner: AgentRunner, run_id: UUID | str) -> list[str]:
    return [e.event_type for e in await runner.event_bus.get_events(run_id)]


async def test_a_sleep_of_thirty_days(kind: str, tmp_path: Path) -> None:
    clock, ran = VirtualClock(), list[str]()
    async with store(kind, tmp_path, clock) as here:

        async def monthly(ctx: Any) -> Any:
            await ctx.step("before", lambda: ran.append("before"))
            await ctx.sleep(30 * DAY)
            await ctx.step("after", lambda: ran.append("after"))
            return clock.wall()

        here.agent("monthly", monthly)
        began = clock.wall()
        runner = here.runner(COLD)
        run_id = await runner.submit("monthly")
        assert await runner.run_once()
        info = await runner.get_run(run_id)
        assert (info.status.value, info.reason) == ("waiting", "sleep")
        assert info.scheduled_at is not None
        assert info.scheduled_at.timestamp() == began + 30 * DAY
        assert not await runner.run_once()
        clock.advance(30 * DAY - 1)
        assert not await here.runner(COLD).run_once()
        clock.advance(1)
        # Another worker goes on with it.
        assert await here.runner(COLD).run_once()
        assert (await runner.wait(run_id)).final_output == {"value": began + 30 * DAY}
        assert ran == ["before", "after"]
        assert (await runner.get_run(run_id)).attempt == 1
        kinds = await events_of(runner, run_id)
        assert kinds.count("run.started") == kinds.count("run.resumed") == 1
        await consistent(runner, run_id)


async def test_a_wait_is_parked_when_what_goes_on_beside_it_has_ended(kind: str, tmp_path: Path) -> None:
    """At that moment, whatever the clock says: it stands still here."""
    clock = VirtualClock()
    async with store(kind, tmp_path, clock) as here:
        ready, done = asyncio.Event(), list[int]()

        async def steps(ctx: Any) -> None:
            for n in range(3):
                await ctx.step(f"step {n}", effect, n)

        async def effect(n: int) -> None:
            await ready.wait()
            done.append(n)

        async def both(ctx: Any) -> Any:
            await asyncio.gather(steps(ctx), ctx.wait_for_signal("go"))

        here.agent("a", both)
        runner = here.runner(COLD)
        run_id = await runner.submit("a")
        working = asyncio.ensure_future(runner.run_once())
        await until_status(runner, run_id, "running")
        await asyncio.sleep(0.05)
        assert not done
        ready.set()
        assert await working
        assert (done, await status(runner, run_id)) == ([0, 1, 2], "waiting")
        await runner.signal(run_id, "go")
        assert await runner.run_once()
        assert await status(runner, run_id) == "succeeded"
        assert done == [0, 1, 2]
        await consistent(runner, run_id)


async def test_a_wait_is_parked_when_another_has_ended(kind: str, tmp_path: Path) -> None:
    """Also where it looked for the last time while the end of the other was being written."""
    async with store(kind, tmp_path, VirtualClock()) as here:

        async def one(ctx: Any, name: str) -> Any:
            return await ctx.wait_for_signal(name)

        async def both(ctx: Any) -> Any:
            return await asyncio.gather(*(one(ctx, f"go {n}") for n in range(8)))

        here.agent("a", both)
        runner = here.runner(COLD)
        run_id = await runner.submit("a")
        assert await runner.run_once()
        for n in range(8):
            assert await status(runner, run_id) == "waiting"
            await runner.signal(run_id, f"go {n}", n)
            assert await runner.run_once()
        assert (await runner.wait(run_id)).final_output == {"value": list(range(8))}
        await consistent(runner, run_id)


async def test_the_loop_of_a_worker_wakes_at_the_hour(kind: str, tmp_path: Path) -> None:
    clock = VirtualClock()
    async with store(kind, tmp_path, clock) as here:
        here.agent("a", lambda ctx: ctx.sleep(30 * DAY))
        runner = here.runner(COLD)
        run_id = await runner.submit("a")
        working = asyncio.ensure_future(runner.run_loop(365 * DAY, handle_signals=False))
        await until_status(runner, run_id, "waiting")
        await until(lambda: clock.next_due is not None and clock.next_due <= 30 * DAY)
        clock.advance(30 * DAY)
        assert (await runner.wait(run_id, timeout=10)).status is RunStatus.SUCCEEDED
        runner.stop()
        await working


async def test_a_signal_between_look_and_park_is_never_lost(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes when the mailbox has been read, before the commit that gives the run back."""
    async with store(kind, tmp_path) as here:

        async def waits(ctx: Any) -> Any:
            return await ctx.wait_for_signal("go")

        here.agent("a", waits)
        runner = here.runner(COLD)
        run_id = await runner.submit("a")
        commit, sent = here.engine.commit, list[bool]()

        async def signal_first(guard: Any, ops: Any) -> Any:
            parks = any(op.name == "queue.settle" and op.args[1].status == "waiting" for op in ops)
            if parks and not sent:
                sent.append(True)
                assert await runner.signal(run_id, "go", "just in time")
            return await commit(guard, ops)

        monkeypatch.setattr(here.engine, "commit", signal_first)
        await runner.run_once()
        assert sent
        # The park was refused, and the run went on in place.
        assert (await runner.wait(run_id, timeout=5)).final_output == {"value": "just in time"}
        assert "run.resumed" not in await events_of(runner, run_id)


async def test_another_message_between_look_and_park_does_not_keep_it_up(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with store(kind, tmp_path) as here:

        async def waits(ctx: Any) -> Any:
            return [await ctx.wait_for_signal("go"), await ctx.wait_for_signal("other")]

        here.agent("a", waits)
        runner = here.runner(COLD)
        run_id = await runner.submit("a")
        commit, sent = here.engine.commit, list[bool]()

        async def signal_first(guard: Any, ops: Any) -> Any:
            if any(op.name == "queue.settle" for op in ops) and not sent:
                sent.append(True)
                await runner.signal(run_id, "other", 2)
            return await commit(guard, ops)

        monkeypatch.setattr(here.engine, "commit", signal_first)
        await runner.run_once()
        assert await status(runner, run_id) == "waiting"
        await runner.signal(run_id, "go", 1)
        assert await runner.run_once()
        assert (await runner.wait(run_id, timeout=5)).final_output == {"value": [1, 2]}


async def test_signals_sent_before_and_while_parked_arrive_in_order(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:

        async def waits(ctx: Any) -> Any:
            first = await ctx.wait_for_signal("go")
            await ctx.step("between", lambda: None)
            return [first, await ctx.wait_for_signal("go"), await ctx.wait_for_signal("go")]

        here.agent("a", waits)
        runner = here.runner(COLD)
        run_id = await runner.submit("a")
        await runner.signal(run_id, "go", 1)
        assert await runner.run_once()
        assert await status(runner, run_id) == "waiting"
        await runner.signal(run_id, "go", 2)
        await runner.signal(run_id, "go", 3)
        assert await runner.run_once()
        assert (await runner.wait(run_id, timeout=5)).final_output == {"value": [1, 2, 3]}
        await consistent(runner, run_id)


async def test_waits_for_one_name_have_a_message_each(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:

        async def waits(ctx: Any) -> Any:
            return await asyncio.gather(*(ctx.wait_for_signal("go") for _ in range(3)))

        here.agent("a", waits)
        runner = here.runner(COLD)
        run_id = await runner.submit("a")
        for n in range(3):
            assert await runner.signal(run_id, "go", n)
        await runner.run_once()
        assert (await runner.wait(run_id, timeout=5)).final_output == {"value": [0, 1, 2]}
        await consistent(runner, run_id)


@pytest.mark.parametrize("first", ["signal", "sleep", "long"])
async def test_of_waits_side_by_side_the_first_that_is_over_wakes_the_run(
    kind: str, first: str, tmp_path: Path
) -> None:
    clock = VirtualClock()
    async with store(kind, tmp_path, clock) as here:

        async def waits(ctx: Any) -> Any:
            each = {
                "signal": lambda: ctx.wait_for_signal("never"),
                "sleep": lambda: ctx.sleep(60),
                "long": lambda: ctx.sleep(DAY),
            }
            order = [first, *(name for name in each if name != first)]
            tasks = {asyncio.ensure_future(each[name]()): name for name in order}
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
            return [tasks[task] for task in done]

        here.agent("a", waits)
        runner = here.runner(COLD)
        run_id = await runner.submit("a")
        assert await runner.run_once()
        assert await status(runner, run_id) == "waiting"
        clock.advance(61)
        assert await runner.run_once()
        assert (await runner.wait(run_id, timeout=5)).final_output == {"value": ["sleep"]}
        await consistent(runner, run_id)


@pytest.mark.parametrize("first", ["a", "b"])
async def test_what_follows_a_wait_is_done_while_another_goes_on(kind: str, first: str, tmp_path: Path) -> None:
    ran: list[str] = []
    async with store(kind, tmp_path) as here:

        async def waits(ctx: Any) -> Any:
            async def branch(name: str) -> Any:
                value = await ctx.wait_for_signal(name)
                await ctx.step(f"after {name}", ran.append, name)
                return value

            return await asyncio.gather(branch("a"), branch("b"))

        here.agent("a", waits)
        runner = here.runner(COLD)
        run_id = await runner.submit("a")
        second = "b" if first == "a" else "a"
        assert await runner.run_once()
        for name, done in ((first, [first]), (second, [first, second])):
            assert await status(runner, run_id) == "waiting"
            assert await runner.signal(run_id, name, name)
            assert await runner.run_once()
            assert ran == done
        assert (await runner.wait(run_id, timeout=5)).final_output == {"value": ["a", "b"]}
        await consistent(runner, run_id)


async def test_the_time_limit_of_a_parked_wait(kind: str, tmp_path: Path) -> None:
    clock = VirtualClock()
    async with store(kind, tmp_path, clock) as here:
        heard: list[str] = []

        async def waits(ctx: Any) -> Any:
            try:
                await ctx.wait_for_signal("go", timeout=60)
            except WaitTimeout as error:
                heard.append(str(error))
            return await ctx.approve("then", timeout=DAY)

        here.agent("a", waits)
        runner = here.runner(COLD)
        run_id = await runner.submit("a")
        assert await runner.run_once()
        clock.advance(59)
        assert not await runner.run_once()
        clock.advance(1)
        assert await runner.run_once()
        await runner.signal(run_id, "go", "late")
        await runner.approve(run_id, "then", "yes")
        assert await runner.run_once()
        assert (await runner.wait(run_id, timeout=5)).final_output == {"value": "yes"}
        assert [each.partition(". ")[0] for each in heard] == ["signal 'go' did not arrive within 60 s"] * 2
        assert (await events_of(runner, run_id)).count("approval.requested") == 1


async def test_a_woken_run_does_not_wait_anew(kind: str, tmp_path: Path) -> None:
    """Another message wakes it half-way: the sleep still ends when it was to end at first."""
    clock = VirtualClock()
    async with store(kind, tmp_path, clock) as here:
        began = clock.wall()

        async def sleeps(ctx: Any) -> Any:
            await ctx.sleep(100)
            return clock.wall() - began

        here.agent("a", sleeps)
        runner = here.runner(COLD)
        run_id = await runner.submit("a")
        assert await runner.run_once()
        for _ in range(3):
            clock.advance(30)
            await runner.signal(run_id, "nothing")
            assert await runner.run_once()
            assert await status(runner, run_id) == "waiting"
        clock.advance(10)
        assert await runner.run_once()
        assert (await runner.wait(run_id, timeout=5)).final_output == {"value": 100.0}


async def test_what_is_called_after_a_park_never_returns_and_writes_nothing(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:
        kept: list[Any] = []
        reached: list[str] = []

        async def waits(ctx: Any) -> Any:
            kept.append(ctx)
            try:
                return await ctx.wait_for_signal("go")
            finally:
                reached.append("finally")

        here.agent("a", waits)
        runner = here.runner(COLD)
        run_id = await runner.submit("a")
        await runner.run_once()
        assert reached == ["finally"]
        assert await status(runner, run_id) == "waiting"
        before = (await runner.state_store.records(run_id), await events_of(runner, run_id))
        ctx = kept[0]

        async def step() -> None:
            reached.append("step")

        calls = [
            ctx.emit("late", {}), ctx.checkpoint({"late": 1}), ctx.get_state(), ctx.step("late", step), ctx.sleep(0),
            ctx.wait_for_signal("go"), ctx.approve("late"), ctx.call("a", {}), ctx.now(), ctx.random(), ctx.uuid4(),
            ctx.transaction("late", len, "x"),
        ]  # fmt: skip
        tasks = [asyncio.ensure_future(call) for call in calls]
        done, _ = await asyncio.wait(tasks, timeout=0.1)
        assert done == set()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert reached == ["finally"]
        assert before == (await runner.state_store.records(run_id), await events_of(runner, run_id))
        assert await runner.state_store.get_checkpoint(str(run_id)) is None


async def test_what_is_called_after_the_end_is_refused_and_writes_nothing(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:
        kept: list[Any] = []

        async def ends(ctx: Any) -> None:
            kept.append(ctx)

        here.agent("a", ends)
        runner = here.runner()
        result = await runner.execute("a")
        assert result.run_id is not None
        before = await events_of(runner, result.run_id)
        with pytest.raises(StorageClosed, match="has finished"):
            await kept[0].emit("late", {})
        assert await events_of(runner, result.run_id) == before


async def test_a_park_wakes_a_worker_for_others(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:

        async def waits(ctx: Any) -> Any:
            return await ctx.wait_for_signal("go")

        here.agent("a", waits)
        runner = here.runner(COLD)
        runs = [await runner.submit("a") for _ in range(20)]
        working = asyncio.ensure_future(runner.run_loop(5, concurrency=1, handle_signals=False))
        for run_id in runs:
            await until_status(runner, run_id, "waiting")
        for n, run_id in enumerate(runs):
            assert await runner.signal(run_id, "go", n)
        results = [await runner.wait(run_id, timeout=10) for run_id in runs]
        assert [r.final_output["value"] for r in results] == list(range(20))
        runner.stop()
        await working


# -- children


async def doubled(ctx: Any) -> Any:
    return await ctx.step("double", lambda n: 2 * n, ctx.params["n"])


async def test_a_child_run_by_a_worker(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:

        async def parent(ctx: Any) -> Any:
            first = await ctx.call("double", {"params": {"n": 4}})
            second = await ctx.call("double", {"params": {"n": 5}})
            assert first.run_id != second.run_id
            return [first.final_output["value"], second.final_output["value"]]

        here.agent("double", doubled)
        here.agent("parent", parent)
        runner = here.runner(COLD)
        run_id = await runner.submit("parent", priority=3)
        assert await runner.run_once()
        info = await runner.get_run(run_id)
        assert info.status is RunStatus.WAITING
        assert info.reason.startswith("child ")
        [child] = await runner.runs(agent="double")
        assert (child.status, child.parent_run_id, child.priority) == (RunStatus.PENDING, run_id, 3)
        while await runner.run_once():
            pass
        assert (await runner.wait(run_id, timeout=5)).final_output == {"value": [8, 10]}
        assert len(await runner.runs(agent="double")) == 2
        await consistent(runner, run_id)


async def test_a_child_run_in_place(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:

        async def parent(ctx: Any) -> Any:
            result = await ctx.call("double", {"params": {"n": 4}}, key="the one")
            return [result.status.value, result.final_output["value"]]

        here.agent("double", doubled)
        here.agent("parent", parent)
        runner = here.runner()
        result = await runner.execute("parent", "p")
        assert result.final_output == {"value": ["succeeded", 8]}
        [child] = await runner.runs(agent="double")
        assert child.parent_run_id == result.run_id
        assert (await runner.execute("parent", "p")).final_output == result.final_output
        assert len(await runner.runs(agent="double")) == 1


@pytest.mark.parametrize("worker", [True, False], ids=["worker", "in-place"])
async def test_a_child_that_fails(kind: str, worker: bool, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:

        async def fails(ctx: Any) -> Any:
            raise ValueError("no luck")

        async def parent(ctx: Any) -> Any:
            try:
                await ctx.call("fails", {})
            except RunFailed as error:
                return [error.status, str(error).split(": ", 1)[1]]

        here.agent("fails", fails)
        here.agent("parent", parent)
        runner = here.runner(settings(park_after=0, max_retries=2))
        if worker:
            run_id = await runner.submit("parent")
            while await runner.run_once():
                pass
            result = await runner.wait(run_id, timeout=5)
        else:
            result = await runner.execute("parent")
        assert result.final_output == {"value": ["failed", "ValueError: no luck"]}
        [child] = await runner.runs(agent="fails")
        assert (child.status, child.attempt) == (RunStatus.FAILED, 2)


async def test_cancelling_a_parent_cancels_what_it_called(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:

        async def grandparent(ctx: Any) -> Any:
            return await ctx.call("parent", {})

        async def parent(ctx: Any) -> Any:
            return await ctx.call("child", {})

        here.agent("grandparent", grandparent)
        here.agent("parent", parent)
        here.agent("child", lambda ctx: ctx.wait_for_signal("never"))
        runner = here.runner(COLD)
        run_id = await runner.submit("grandparent")
        while await runner.run_once():
            pass
        assert [r.status.value for r in await runner.runs()] == ["waiting"] * 3
        assert await runner.cancel(run_id)
        assert [r.status.value for r in await runner.runs()] == ["cancelled"] * 3
        assert not await runner.run_once()
        for info in await runner.runs():
            await consistent(runner, info.run_id)
            assert (await events_of(runner, info.run_id))[-1] == "run.cancelled"


async def test_cancelling_a_run_cancels_the_child_running_in_place(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:
        here.agent("child", lambda ctx: ctx.step("long", asyncio.sleep, 30))

        async def parent(ctx: Any) -> Any:
            return await ctx.call("child", {})

        here.agent("parent", parent)
        runner = here.runner()
        running = asyncio.ensure_future(runner.execute("parent", "p"))

        async def both_run() -> bool:
            return len([r for r in await runner.runs() if r.status is RunStatus.RUNNING]) == 2

        await eventually(both_run)
        assert await runner.cancel("p", wait=True) is RunStatus.CANCELLED
        assert (await running).status is RunStatus.CANCELLED
        assert [r.status.value for r in await runner.runs()] == ["cancelled"] * 2


async def test_a_child_that_is_cancelled_tells_its_parent(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:

        async def parent(ctx: Any) -> Any:
            try:
                await ctx.call("child", {})
            except RunFailed as error:
                return error.status

        here.agent("child", lambda ctx: ctx.wait_for_signal("never"))
        here.agent("parent", parent)
        runner = here.runner(COLD)
        run_id = await runner.submit("parent")
        while await runner.run_once():
            pass
        [child] = await runner.runs(agent="child")
        assert await runner.cancel(child.run_id)
        assert await runner.run_once()
        assert (await runner.wait(run_id, timeout=5)).final_output == {"value": "cancelled"}


async def test_a_child_is_spawned_once_over_a_crash(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent dies right after the commit that stores its child, and again while it waits."""
    clock = VirtualClock()
    async with store(kind, tmp_path, clock) as here:

        async def parent(ctx: Any) -> Any:
            return (await ctx.call("double", {"params": {"n": 3}})).final_output["value"]

        here.agent("parent", parent)
        here.agent("double", doubled)
        runner = here.runner(COLD)
        run_id = await runner.submit("parent")
        commit, crashes = here.engine.commit, 0

        async def crash_after(guard: Any, ops: Any) -> Any:
            nonlocal crashes
            result = await commit(guard, ops)
            if any(op.name == "queue.insert" for op in ops):
                crashes += 1
                await asyncio.get_running_loop().create_future()
            return result

        with monkeypatch.context() as patch:
            patch.setattr(here.engine, "commit", crash_after)
            dead = asyncio.ensure_future(runner.run_once())
            await until(lambda: crashes == 1)
        await drop(runner, dead, run_id)
        clock.advance(61)
        survivor = here.runner(COLD)
        while await survivor.run_once():
            pass
        assert (await survivor.wait(run_id, timeout=5)).final_output == {"value": 6}
        assert len(await survivor.runs(agent="double")) == 1
        assert (await survivor.get_run(run_id)).attempt == 2
        await consistent(survivor, run_id)
        dead.cancel()
        await asyncio.wait({dead})


async def failed(runner: AgentRunner, run_id: UUID) -> None:
    """End a run that nobody holds, whatever it called."""
    how = (str(run_id), ("pending", "waiting"), "failed", runner.queue.clock.wall(), "")
    await runner.queue.commits.commit(None, [Op("queue.end", how)])


async def test_a_resumed_parent_goes_on_with_the_child_it_was_cancelled_with(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:

        async def parent(ctx: Any) -> Any:
            return (await ctx.call("child", {})).final_output["value"]

        here.agent("parent", parent)
        here.agent("child", lambda ctx: ctx.wait_for_signal("go"))
        runner = here.runner(COLD)
        run_id = await runner.submit("parent")
        while await runner.run_once():
            pass
        [child] = await runner.runs(agent="child")
        assert await runner.cancel(run_id)
        await runner.resume(run_id)
        while await runner.run_once():
            pass
        assert (await runner.get_run(child.run_id)).generation == 2
        assert await runner.signal(child.run_id, "go", "on")
        while await runner.run_once():
            pass
        assert (await runner.wait(run_id, timeout=5)).final_output == {"value": "on"}
        await consistent(runner, run_id)
        await consistent(runner, child.run_id)


async def test_a_resumed_parent_hears_what_its_child_came_to_meanwhile(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:

        async def parent(ctx: Any) -> Any:
            return (await ctx.call("double", {"params": {"n": 3}})).final_output["value"]

        here.agent("parent", parent)
        here.agent("double", doubled)
        runner = here.runner(COLD)
        run_id = await runner.submit("parent")
        assert await runner.run_once()
        await failed(runner, run_id)
        assert await runner.run_once()
        [child] = await runner.runs(agent="double")
        assert child.status is RunStatus.SUCCEEDED
        await runner.resume(run_id)
        assert await runner.run_once()
        assert (await runner.wait(run_id, timeout=5)).final_output == {"value": 6}
        assert (await runner.get_run(child.run_id)).generation == 1


@pytest.mark.parametrize("recover", ["inline", "worker"])
async def test_a_worker_that_goes_on_with_a_run_has_the_child_it_ran_in_place(
    kind: str, recover: str, tmp_path: Path
) -> None:
    """Its process dies inside of the child; with "inline" somebody resumes it for a worker."""
    clock = VirtualClock()
    async with store(kind, tmp_path, clock) as here:
        inside = asyncio.Event()

        async def child(ctx: Any) -> Any:
            if not inside.is_set():
                inside.set()
                await asyncio.get_running_loop().create_future()
            return 5

        async def parent(ctx: Any) -> Any:
            return (await ctx.call("child", {})).final_output["value"]

        here.agent("parent", parent)
        here.agent("child", child)
        runner = here.runner(COLD)
        dead = asyncio.ensure_future(runner.execute("parent", "p", recover=recover))
        await inside.wait()
        before = await runner.runs()
        if recover == "inline":
            dead.cancel()
            await asyncio.wait({dead})
            await failed(runner, before[0].run_id)
            await runner.resume("p")
        else:
            for info in before:
                await drop(runner, dead, info.run_id)
            clock.advance(61)
        survivor = here.runner(COLD)
        while await survivor.run_once():
            pass
        assert (await survivor.wait("p", timeout=5)).final_output == {"value": 5}
        assert [info.run_id for info in await survivor.runs()] == [info.run_id for info in before]
        dead.cancel()
        await asyncio.wait({dead})


async def test_a_child_that_was_deleted_when_it_had_told_is_not_run_again(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:

        async def parent(ctx: Any) -> Any:
            return (await ctx.call("double", {"params": {"n": 3}})).final_output["value"]

        here.agent("parent", parent)
        here.agent("double", doubled)
        runner = here.runner(COLD)
        run_id = await runner.submit("parent")
        assert await runner.run_once()
        assert await runner.run_once()
        [child] = await runner.runs(agent="double")
        await runner.discard(child.run_id)
        assert await runner.run_once()
        assert (await runner.wait(run_id, timeout=5)).final_output == {"value": 6}
        assert not await runner.runs(agent="double")


async def test_a_park_that_cannot_be_written_is_written_later(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with store(kind, tmp_path) as here:

        async def waits(ctx: Any) -> Any:
            return await ctx.wait_for_signal("go")

        here.agent("a", waits)
        runner = here.runner(COLD)
        run_id = await runner.submit("a")
        commit, full = here.engine.commit, [True]

        async def refuse(guard: Any, ops: Any) -> Any:
            if full and any(op.name == "queue.settle" and op.args[1].status == "waiting" for op in ops):
                full.clear()
                raise StorageFull("injected")
            return await commit(guard, ops)

        monkeypatch.setattr(here.engine, "commit", refuse)
        assert await runner.run_once()
        info = await runner.get_run(run_id)
        assert (info.status.value, info.attempt, full) == ("waiting", 1, [])
        await runner.signal(run_id, "go", 1)
        assert await runner.run_once()
        assert (await runner.wait(run_id, timeout=5)).final_output == {"value": 1}
        gc.collect()
