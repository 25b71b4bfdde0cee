"""Waits of a context: sleeps, signals, approvals and children."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._execution import waits
from agent_runtime_core._execution.mailbox import MailboxReader
from agent_runtime_core.errors import InvalidArgument, RunFailed, StorageFull, WaitTimeout
from agent_runtime_core.interfaces import RunResult
from agent_runtime_core.queue import memory
from agent_runtime_core.testing import VirtualClock
from tests.support.line_count import count_lines
from tests.support.runs import Rig, Script, soon, twice


@pytest.mark.parametrize("inside", [False, True])
async def test_a_message_whose_wait_gave_up_when_it_was_recorded_goes_to_the_next_wait_alone(
    place: Path | None, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    seen: list[list[int]] = []
    all_there = asyncio.Event()
    given_up = 0

    async def body(ctx: Any) -> Any:
        async def collect() -> list[int]:
            got: list[int] = []
            while len(got) < 2:
                with contextlib.suppress(TimeoutError):
                    got.append(await bounded(ctx.wait_for_signal("go")))
            seen.append(got)
            if len(seen) == 1:
                all_there.set()
                await asyncio.Event().wait()
            return got

        return await (ctx.step("collect", collect) if inside else collect())

    async def bounded(wait: Any) -> Any:
        try:
            return await wait
        except asyncio.CancelledError:
            if given_up == 1 and not seen:
                raise TimeoutError from None  # as `asyncio.timeout` makes of it
            raise

    async with Rig(place) as rig:
        engine = rig.runner.queue.commits
        commit = engine.commit

        async def late(guard: Any, ops: Any) -> Any:
            nonlocal given_up
            results = await commit(guard, ops)
            if not given_up and any(
                op.name == "journal.append" and op.args[1][1:3] == ("done", "signal:go") for op in ops
            ):
                given_up = 1
                raise asyncio.CancelledError
            return results

        monkeypatch.setattr(engine, "commit", late)
        await rig.runner.submit("script", run_id="r")
        for number in range(3):
            await rig.runner.signal("r", "go", number)
        await rig.cut(body, all_there)
        assert await rig.value(body) == [0, 1]
        assert seen == [[0, 1], [0, 1]]


async def test_a_wait_goes_on_in_the_next_try_of_its_step(place: Path | None) -> None:
    clock, tries, limits = VirtualClock(), list[float](), list[asyncio.Timeout]()

    async def body(ctx: Any) -> Any:
        async def limited(wait: Awaitable[Any]) -> None:
            async with asyncio.timeout(None) as limit:
                limits.append(limit)
                await wait

        async def patient() -> Any:
            tries.append(clock.wall())
            if len(tries) < 3:
                await limited(ctx.approve("go"))
            await ctx.approve("go", timeout=50)
            if len(tries) < 5:
                await limited(ctx.sleep(100))
            await ctx.sleep(100)
            return clock.wall() - tries[0]

        return await ctx.step("patient", patient, retries=9, retry_delay=0)

    async with Rig(place, clock) as rig:

        async def give_up(number: int, wait: str) -> None:
            await soon(lambda: len(limits) == number)
            while not any(record.name == wait for record in await rig.records()):  # noqa: ASYNC110 - nobody rings for it
                await asyncio.sleep(0.001)
            limits[-1].reschedule(asyncio.get_running_loop().time() + 0.02)
            await soon(lambda: len(tries) == number + 1)

        running = asyncio.ensure_future(rig.value(body))
        await rig.begun()
        await give_up(1, "signal:go")
        await give_up(2, "signal:go")
        async with asyncio.timeout(10):
            while len(await rig.told("approval.requested")) < 3:  # noqa: ASYNC110 - nobody rings for it
                await asyncio.sleep(0.001)
        await rig.runner.approve("r", "go")
        await give_up(3, "sleep")
        await give_up(4, "sleep")
        clock.advance(100)
        async with asyncio.timeout(10):
            assert await running == 100
        assert len(await rig.told("approval.requested")) == 3  # each try whose wait was cancelled asks again


async def test_a_wait_is_over_though_the_clock_moved_while_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, look, moves = VirtualClock(), MailboxReader.read, [100.0]

    async def looked(mailbox: MailboxReader) -> None:
        await look(mailbox)
        asked = clock.wall

        def wall() -> float:  # next it is worked out how long to sleep
            clock.wall = asked  # type: ignore[method-assign]
            if moves:
                asyncio.get_running_loop().call_soon(clock.advance, moves.pop())
            return asked()

        clock.wall = wall  # type: ignore[method-assign]

    monkeypatch.setattr(MailboxReader, "read", looked)

    async def body(ctx: Any) -> float:
        began = clock.boot()
        await ctx.sleep(100)
        return clock.boot() - began

    async with Rig(None, clock) as rig, asyncio.timeout(10):
        assert await rig.value(body) == 100


async def test_a_wait_that_was_late_is_late_again_whatever_its_limit_is_now(place: Path | None) -> None:
    limits = iter([5.0, None])

    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            with pytest.raises(WaitTimeout) as late:
                await ctx.wait_for_signal("go", timeout=next(limits))
            return str(late.value).partition(". ")[0]

        assert await twice(rig, body) == ("signal 'go' did not arrive within 5 s", "signal 'go' did not arrive in time")


# -- waits in place


async def test_a_sleep_is_not_begun_anew(place: Path | None) -> None:
    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            await ctx.sleep(100)
            await ctx.sleep(0)
            return None

        await twice(rig, body)
        assert rig.clock.boot() == pytest.approx(100)


async def test_a_sleep_cut_short_goes_on_to_its_first_end(place: Path | None) -> None:
    clock = VirtualClock()
    async with Rig(place, clock, lease_ttl_seconds=1e6) as rig:

        async def body(ctx: Any) -> float:
            await ctx.sleep(100)
            return clock.boot()

        task = asyncio.ensure_future(rig.go(body))
        await clock.until_sleeping()
        clock.advance(60)
        task.cancel()
        await asyncio.wait({task})
        going = asyncio.ensure_future(rig.value(body))
        await clock.until_sleeping()
        assert clock.next_due == pytest.approx(40)
        clock.advance(40.1)
        assert await going == pytest.approx(100.1)


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), "1", True, None, 1e12])
async def test_a_bad_sleep_is_named(seconds: Any) -> None:
    async with Rig() as rig:

        async def body(ctx: Any) -> None:
            with pytest.raises(InvalidArgument, match="got "):
                await ctx.sleep(seconds)

        await rig.value(body)


async def test_signals_come_in_order_each_once_and_stay_recorded(place: Path | None) -> None:
    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            assert await rig.runner.signal("r", "go", {"n": 1}, message_id="one")
            assert await rig.runner.signal("r", "go", {"n": 1}, message_id="one")
            await rig.runner.signal("r", "other", "x", message_id="two")
            await rig.runner.signal("r", "go", {"n": 2}, message_id="three")
            return [
                await ctx.wait_for_signal("go"),
                await ctx.wait_for_signal("go"),
                await ctx.wait_for_signal("other"),
            ]

        assert await twice(rig, body) == ([{"n": 1}, {"n": 2}, "x"], [{"n": 1}, {"n": 2}, "x"])


async def test_the_work_of_a_signal_does_not_grow_with_the_signals_before_it() -> None:
    async def body(ctx: Any) -> Any:
        return [await ctx.wait_for_signal("go") for _ in range(ctx.input["signals"])]

    sent, heard = list[int](), list[int]()
    for signals in (25, 50):
        async with Rig() as rig:
            rig.register(body)
            run_id = await rig.runner.submit("script", {"signals": signals})
            with count_lines(memory) as sending:
                for number in range(signals):
                    await rig.runner.signal(run_id, "go", number)
            with count_lines(memory, waits) as hearing:
                await rig.runner.run_once()
            assert (await rig.runner.wait(run_id)).final_output["value"] == [*range(signals)]
            sent += sending
            heard += hearing
    assert 0 < sent[1] < 2.2 * sent[0], sent
    assert 0 < heard[1] < 2.2 * heard[0], heard


async def test_a_message_whose_wait_was_not_recorded_keeps_its_turn(
    place: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Rig(place) as rig:
        engine = rig.runner.queue.commits
        commit, refused = engine.commit, list[Any]()

        async def full(guard: Any, ops: Any) -> Any:
            if not refused and any(op.name == "journal.append" and "signal:go" in op.args[1] for op in ops):
                refused.append(ops)
                raise StorageFull("no room")
            return await commit(guard, ops)

        async def body(ctx: Any) -> Any:
            for number in range(3):
                await rig.runner.signal("r", "go", number)
            monkeypatch.setattr(engine, "commit", full)
            with pytest.raises(StorageFull):
                await ctx.wait_for_signal("go")
            return [await ctx.wait_for_signal("go") for _ in range(3)]

        assert await rig.value(body) == [0, 1, 2]


async def test_a_signal_that_does_not_come_times_out_each_time_again(place: Path | None) -> None:
    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            with pytest.raises(WaitTimeout, match="signal 'go' did not arrive within 30 s"):
                await ctx.wait_for_signal("go", timeout=30)
            return rig.clock.boot()

        first, second = await twice(rig, body)
        assert first == pytest.approx(30, abs=1)
        assert second == pytest.approx(first)


@pytest.mark.parametrize(("name", "timeout"), [("", None), (7, None), ("a", -1), ("a", float("nan")), ("a", 1e12)])
async def test_a_bad_wait_is_named(name: Any, timeout: Any) -> None:
    async with Rig() as rig:

        async def body(ctx: Any) -> None:
            with pytest.raises(InvalidArgument, match=r"(got|not) "):
                await ctx.wait_for_signal(name, timeout=timeout)

        await rig.value(body)


@pytest.mark.parametrize("given_up", [False, True])
async def test_a_message_that_comes_while_several_waits_look_is_heard(
    place: Path | None, given_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, goes_on = list[int](), [asyncio.Event() for _ in range(2)]

    async def body(ctx: Any) -> Any:
        async def other() -> Any:
            async with asyncio.timeout(None) as limit:
                limits.append(limit)
                return await ctx.wait_for_signal("other")

        return (await asyncio.gather(ctx.wait_for_signal("first"), other(), return_exceptions=True))[0]

    async with Rig(place, VirtualClock()) as rig:
        limits = list[asyncio.Timeout]()
        mail = rig.runner.queue.mail

        async def slow(*about: Any) -> Any:
            looks.append(1)
            number = len(looks)
            found = await mail(*about)
            if number == 1:  # of the first wait, which finds nothing
                await goes_on[0].wait()
            elif number == 3:  # of the other wait, which finds the message for the first
                await goes_on[1].wait()
            return found

        monkeypatch.setattr(rig.runner.queue, "mail", slow)
        running = asyncio.ensure_future(rig.value(body))
        await soon(lambda: len(looks) == 2)
        await rig.runner.signal("r", "first", 1)
        await soon(lambda: len(looks) == 3)
        goes_on[0].set()
        for _ in range(10):  # the first wait goes to sleep
            await asyncio.sleep(0)
        if given_up:
            limits[0].reschedule(0)
        else:
            goes_on[1].set()
        await soon(lambda: len(looks) > 3)
        await rig.runner.signal("r", "other", 2)
        async with asyncio.timeout(10):
            assert await running == 1


async def test_an_approval_beside_other_code_is_asked_for_though_records_lie_ahead(place: Path | None) -> None:
    lives, recorded, asked = list[int](), asyncio.Event(), asyncio.Event()

    async def body(ctx: Any) -> Any:
        lives.append(1)

        async def fetched() -> None:
            if len(lives) > 1:
                await asked.wait()  # it comes to its record later than it did in the first life
            await ctx.step("sum", int)
            recorded.set()

        async def released() -> Any:
            if len(lives) == 1:
                await asyncio.sleep(60)
            return await ctx.approve("go", {"what": "all"})

        answer, _ = await asyncio.gather(released(), fetched())
        return answer

    async with Rig(place, VirtualClock()) as rig:
        await rig.cut(body, recorded)
        running = asyncio.ensure_future(rig.value(body))
        async with asyncio.timeout(10):
            while not await rig.told("approval.requested"):  # noqa: ASYNC110 - nobody rings for it
                await asyncio.sleep(0.001)
        asked.set()
        await rig.runner.approve("r", "go", "yes")
        assert await running == "yes"
        assert len(await rig.told("approval.requested")) == 1


async def test_an_approval_asks_once_and_its_answer_fits(place: Path | None) -> None:
    schema = {"type": "object", "required": ["ok"], "properties": {"ok": {"type": "boolean"}}}
    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            return await ctx.approve("deploy", {"what": "all"}, schema=schema)

        going = asyncio.ensure_future(rig.value(body))
        await rig.begun()
        async for event in rig.runner.stream("r"):
            if event.event_type == "approval.requested":
                told = {"name": "deploy", "details": {"what": "all"}, "schema": schema}
                assert event.payload == {**told, "request_id": event.payload["request_id"]}
                with pytest.raises(InvalidArgument, match="missing required property 'ok'"):
                    await rig.runner.approve("r", "deploy", {})
                with pytest.raises(InvalidArgument, match=r"\$\.ok must be a boolean, got 'yes'"):
                    await rig.runner.approve("r", "deploy", {"ok": "yes"})
                assert await rig.runner.approve("r", "deploy", {"ok": True})
                break
        assert await going == {"ok": True}
        assert not await rig.runner.approve("r", "deploy", {"ok": True})


# -- children


async def test_a_child_runs_once_and_its_result_is_recorded(place: Path | None) -> None:
    ran: list[Any] = []

    async def child(ctx: Any) -> RunResult:
        ran.append(ctx.params["n"])
        return RunResult({"twice": ctx.params["n"] * 2}, usage={"tokens": 1})

    async with Rig(place) as rig:
        rig.register(child, "child")

        async def body(ctx: Any) -> Any:
            one = await ctx.call("child", {"params": {"n": 1}})
            two = await ctx.call(Script(child, "child"), {"params": {"n": 2}}, key="second")
            assert one.usage == {"tokens": 1}
            assert one.status == "succeeded"
            return [one.final_output["twice"], two.final_output["twice"], str(one.run_id)]

        first, second = await twice(rig, body)
        assert first == second
        assert first[:2] == [2, 4]
        assert ran == [1, 2]
        info = await rig.runner.get_run(first[2])
        parent = await rig.runner.get_run("r")
        assert info.parent_run_id == parent.run_id


async def test_a_child_that_fails_raises(place: Path | None) -> None:
    async def child(ctx: Any) -> None:
        raise ValueError("bad child")

    async with Rig(place) as rig:
        rig.register(child, "child")

        async def body(ctx: Any) -> None:
            with pytest.raises(RunFailed, match="bad child"):
                await ctx.call("child", {})

        await rig.value(body)


async def test_a_child_cut_off_is_joined_again(place: Path | None) -> None:
    inside = asyncio.Event()
    lives: list[int] = []

    async def child(ctx: Any) -> int:
        lives.append(1)
        await ctx.step("once", lambda: None)
        if len(lives) == 1:
            inside.set()
            await asyncio.Event().wait()
        return len(lives)

    async with Rig(place) as rig:
        rig.register(child, "child")

        async def body(ctx: Any) -> Any:
            return (await ctx.call("child", {})).final_output["value"]

        await rig.cut(body, inside)
        assert await rig.value(body) == 2
        assert len(await rig.runner.runs(agent="child")) == 1
