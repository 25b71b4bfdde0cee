"""Waiting in place: sleeps, signals, approvals, their time limits, and the slot that is free meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.errors import InvalidArgument, UnknownRun, WaitTimeout
from agent_runtime_core.status import RunStatus
from agent_runtime_core.testing.clock import VirtualClock
from tests.support.fault_runs import KINDS, consistent, eventually, settings, status, store

HOT = settings(park_after=1e6)

pytestmark = pytest.mark.parametrize("kind", KINDS)


async def begun(runner: Any, run_id: Any, name: str) -> None:
    """Until the wait of that name is in the journal."""

    async def there() -> bool:
        return any(r.kind == "started" and r.name == name for r in await runner.state_store.records(run_id))

    await eventually(there)


async def test_a_sleep_in_place_ends_with_its_time(kind: str, tmp_path: Path) -> None:
    clock = VirtualClock()
    async with store(kind, tmp_path, clock) as here:

        async def nap(ctx: Any) -> Any:
            before = clock.wall()
            await ctx.sleep(90)
            return clock.wall() - before

        here.agent("nap", nap)
        runner = here.runner(HOT)
        run_id = await runner.submit("nap")
        working = asyncio.ensure_future(runner.run_once())
        await clock.until_sleeping()
        clock.advance(89)
        await asyncio.sleep(0.02)
        assert await status(runner, run_id) == "running"
        clock.advance(1)
        await working
        assert (await runner.wait(run_id)).final_output == {"value": 90.0}
        await consistent(runner, run_id)


async def test_a_wait_in_place_gives_its_signals_in_order(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:
        here.agent("a", lambda ctx: two(ctx))

        async def two(ctx: Any) -> Any:
            return [
                await ctx.wait_for_signal("go"),
                await ctx.wait_for_signal("go"),
                await ctx.wait_for_signal("other"),
            ]

        runner = here.runner(HOT)
        run_id = await runner.submit("a")
        assert await runner.signal(run_id, "go", {"n": 1})  # before there is anybody to wait for it
        assert await runner.signal(run_id, "go", {"n": 1}, message_id="twice")
        assert await runner.signal(run_id, "go", {"n": 1}, message_id="twice")
        working = asyncio.ensure_future(runner.run_once())
        await begun(runner, run_id, "signal:other")
        assert await runner.signal(run_id, "other", [1, 2])
        await working
        assert (await runner.wait(run_id)).final_output == {"value": [{"n": 1}, {"n": 1}, [1, 2]]}
        mail = await runner.queue.mail(str(run_id))
        assert [(m.seq, m.name) for m in mail] == [(1, "go"), (2, "go"), (3, "other")]


async def test_a_signal_of_an_ended_or_unknown_run_is_told_as_such(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:
        here.agent("a", lambda ctx: asyncio.sleep(0))
        runner = here.runner()
        result = await runner.execute("a")
        assert result.run_id is not None
        assert not await runner.signal(result.run_id, "late")
        with pytest.raises(UnknownRun, match="nobody"):
            await runner.signal("nobody", "x")
        with pytest.raises(InvalidArgument, match="''"):
            await runner.signal(result.run_id, "")


async def test_a_time_limit_is_recorded_and_replayed(kind: str, tmp_path: Path) -> None:
    clock = VirtualClock()
    async with store(kind, tmp_path, clock) as here:
        heard: list[str] = []

        async def patient(ctx: Any) -> Any:
            try:
                await ctx.wait_for_signal("go", timeout=30)
            except WaitTimeout as error:
                heard.append(str(error))
            if len(heard) < 3:
                raise RuntimeError("again")
            return await ctx.wait_for_signal("go", timeout=30)

        here.agent("a", patient)
        runner = here.runner(HOT)
        run_id = await runner.submit("a")
        working = asyncio.ensure_future(runner.run_once())
        await clock.until_sleeping()
        clock.advance(30)
        await working
        # Too late for the first wait, whose end is recorded; there for the second one.
        await runner.signal(run_id, "go", "late")
        assert await runner.run_once()
        assert await runner.run_once()
        assert [each.partition(". ")[0] for each in heard] == ["signal 'go' did not arrive within 30 s"] * 3
        assert (await runner.wait(run_id)).final_output == {"value": "late"}
        await consistent(runner, run_id)


async def test_an_answer_must_fit_what_was_asked(kind: str, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    async with store(kind, tmp_path) as here:

        async def asks(ctx: Any) -> Any:
            return await ctx.approve("pay", {"amount": 12}, schema=schema)

        here.agent("a", asks)
        runner = here.runner(HOT)
        run_id = await runner.submit("a")
        working = asyncio.ensure_future(runner.run_once())
        await begun(runner, run_id, "signal:pay")
        for wrong in (True, {"ok": "yes"}, {}):
            with pytest.raises(InvalidArgument, match="'pay'"):
                await runner.approve(run_id, "pay", wrong)
        assert [each.kind for each in await runner.queue.mail(str(run_id))] == ["question"]
        assert await runner.approve(run_id, "pay", {"ok": True})
        await working
        assert (await runner.wait(run_id)).final_output == {"value": {"ok": True}}
        asked = [e.payload for e in await runner.event_bus.get_events(run_id) if e.event_type == "approval.requested"]
        [told] = asked
        assert told == {"name": "pay", "details": {"amount": 12}, "schema": schema, "request_id": told["request_id"]}


@pytest.mark.parametrize("bad", [-1, float("nan"), True, "1", 1e300])
async def test_a_wait_of_no_length_is_refused(kind: str, tmp_path: Path, bad: Any) -> None:
    async with store(kind, tmp_path) as here:

        async def sleeps(ctx: Any) -> None:
            with pytest.raises(InvalidArgument, match="seconds must be from 0 to 100,000,000,000"):
                await ctx.sleep(bad)

        here.agent("a", sleeps)
        result = await here.runner().execute("a")
        assert result.status is RunStatus.SUCCEEDED, result.error


async def test_a_wait_inside_a_step_stays_in_place(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:
        runs: list[int] = []

        async def asks(ctx: Any) -> Any:
            runs.append(1)
            return await ctx.step("ask", lambda: ctx.wait_for_signal("go"))

        here.agent("a", asks)
        runner = here.runner(settings(park_after=0))
        run_id = await runner.submit("a")
        working = asyncio.ensure_future(runner.run_once())
        await begun(runner, run_id, "signal:go")
        await asyncio.sleep(0.05)
        assert await status(runner, run_id) == "running"
        await runner.signal(run_id, "go", 7)
        await working
        assert (await runner.wait(run_id)).final_output == {"value": 7}
        assert runs == [1]


async def test_a_wait_beside_a_step_stays_in_place_until_that_is_recorded(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:
        gate, ran = asyncio.Event(), list[str]()

        async def slow() -> str:
            ran.append("slow")
            await gate.wait()
            return "done"

        async def both(ctx: Any) -> Any:
            return await asyncio.gather(ctx.step("slow", slow), ctx.wait_for_signal("go"))

        here.agent("a", both)
        runner = here.runner(settings(park_after=0))
        run_id = await runner.submit("a")
        working = asyncio.ensure_future(runner.run_once())
        await begun(runner, run_id, "signal:go")
        await asyncio.sleep(0.1)
        assert await status(runner, run_id) == "running"
        gate.set()
        await working
        info = await runner.get_run(run_id)
        assert (info.status.value, info.reason) == ("waiting", "signal go")
        await runner.signal(run_id, "go", 1)
        assert await runner.run_once()
        assert (await runner.wait(run_id)).final_output == {"value": ["done", 1]}
        assert ran == ["slow"]
        await consistent(runner, run_id)


async def test_a_worker_of_one_slot_runs_others_while_one_waits_in_place(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:
        at_once, most = 0, 0

        async def waits(ctx: Any) -> Any:
            return await ctx.wait_for_signal("go")

        async def works(ctx: Any) -> None:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            await asyncio.sleep(0.002)
            at_once -= 1

        here.agent("waits", waits)
        here.agent("works", works)
        runner = here.runner(HOT)
        waiting = await runner.submit("waits", priority=9)
        others = [await runner.submit("works") for _ in range(8)]
        working = asyncio.ensure_future(runner.run_loop(0.05, concurrency=1, handle_signals=False))
        for each in others:
            await runner.wait(each, timeout=10)
        assert await status(runner, waiting) == "running"
        await runner.signal(waiting, "go")
        await runner.wait(waiting, timeout=10)
        runner.stop()
        await working
        assert most == 1
        assert runner._worker.slots.busy == 0


async def test_time_in_place_is_no_run_time(kind: str, tmp_path: Path) -> None:
    clock = VirtualClock()
    async with store(kind, tmp_path, clock) as here:

        async def waits(ctx: Any) -> Any:
            await ctx.sleep(400)
            await asyncio.sleep(0.5)  # by then it has been looked at whether it is late
            return "in time"

        async def works(ctx: Any) -> None:
            clock.advance(0.2)
            await asyncio.sleep(30)

        here.agent("waits", waits)
        here.agent("works", works)
        runner = here.runner(settings(park_after=1e6, run_timeout_seconds=0.15))
        running = asyncio.ensure_future(runner.execute("waits"))
        await clock.until_sleeping()
        clock.advance(400)
        result = await running
        assert result.status is RunStatus.SUCCEEDED, result.error
        late = await runner.execute("works")
        assert late.status is RunStatus.TIMED_OUT
        assert late.error is not None
        assert late.error.message == "the attempt took more than 0.15 s (run_timeout_seconds of the runner)"
        assert late.run_id is not None
        events = await runner.event_bus.get_events(late.run_id)
        assert [(e.event_type, e.payload) for e in events][-1] == ("run.timed_out", {"timeout_seconds": 0.15})


async def test_execute_never_parks(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:

        async def waits(ctx: Any) -> Any:
            return await ctx.wait_for_signal("go")

        here.agent("a", waits)
        runner = here.runner(settings(park_after=0))
        running = asyncio.ensure_future(runner.execute("a", "one"))
        await known(runner)
        key = (await runner.get_run("one")).run_id
        await begun(runner, key, "signal:go")
        await asyncio.sleep(0.05)
        assert await status(runner, "one") == "running"
        await runner.signal("one", "go", 1)
        assert (await running).final_output == {"value": 1}


async def known(runner: Any) -> None:
    async def there() -> bool:
        return bool(await runner.runs())

    await eventually(there)


async def test_two_waits_at_once_are_known_by_their_order(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:

        async def both(ctx: Any) -> Any:
            return await asyncio.gather(ctx.wait_for_signal("a"), ctx.wait_for_signal("b"))

        here.agent("x", both)
        runner = here.runner(settings(park_after=0))
        run_id = await runner.submit("x")
        assert await runner.run_once()
        assert await status(runner, run_id) == "waiting"
        await runner.signal(run_id, "b", 2)
        assert await runner.run_once()
        assert await status(runner, run_id) == "waiting"
        await runner.signal(run_id, "a", 1)
        assert await runner.run_once()
        assert (await runner.wait(run_id)).final_output == {"value": [1, 2]}
        await consistent(runner, run_id)


async def test_a_request_to_cancel_between_look_and_park_is_heard(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mailbox shows it and the row says so, but the heart has not told the run yet."""
    async with store(kind, tmp_path) as here:

        async def waits(ctx: Any) -> Any:
            return await ctx.wait_for_signal("go")

        here.agent("a", waits)
        runner = here.runner(settings(park_after=0, heartbeat_interval_seconds=0.1))
        run_id = await runner.submit("a")
        mail, asked, told = runner.queue.mail, list[bool](), list[Callable[[], None]]()

        async def cancelled_first(key: str, after: int = 0) -> Any:
            held = runner.heartbeat._leased[key]
            if not asked:
                told.append(held.cancel)
                held.cancel = lambda: None  # type: ignore[method-assign]
                asked.append(bool(await runner.cancel(run_id)))
            else:  # it was not parked, and looks again; with its next beat the heart tells it
                held.cancel = told[0]  # type: ignore[method-assign]
            return await mail(key, after)

        monkeypatch.setattr(runner.queue, "mail", cancelled_first)
        await runner.run_once()
        assert asked == [True]
        assert await status(runner, run_id) == "cancelled"
        await consistent(runner, run_id)
