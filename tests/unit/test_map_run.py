"""One function over many items: each item recorded by itself."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from agent_runtime_core._execution.run_control import Stop
from agent_runtime_core.errors import (
    InvalidArgument,
    StepCancelledError,
    StepExecutionError,
    StepInDoubt,
    StorageBusy,
    StorageFull,
)
from agent_runtime_core.interfaces import RunContext
from agent_runtime_core.steps import StepExecutor
from agent_runtime_core.testing import MockRunContext
from tests.support.runs import Rig


@dataclass
class Square:
    side: int


async def test_results_come_in_the_order_of_the_items(place: Path | None) -> None:
    async def later(n: int) -> int:
        for _ in range(10 - n):
            await asyncio.sleep(0)
        return n * n

    async with Rig(place) as rig:
        assert await rig.value(lambda ctx: StepExecutor(ctx).map("sq", later, range(10))) == [n * n for n in range(10)]
        assert await rig.value(lambda ctx: StepExecutor(ctx).map("sq", later, []), "empty") == []


async def test_items_that_are_none_are_refused(place: Path | None) -> None:
    async with Rig(place) as rig:

        async def body(ctx: Any) -> None:
            for executor in (StepExecutor(ctx), StepExecutor(MockRunContext())):
                with pytest.raises(InvalidArgument, match=r"map 'sq': items must be a list or another iterable, got 5"):
                    await executor.map("sq", str, cast("list[int]", 5))

        await rig.value(body)


async def test_a_result_that_is_changed_while_it_is_recorded_is_handed_on_as_recorded(place: Path | None) -> None:
    shared: list[int] = []

    async def item(n: int) -> list[int]:
        shared.append(n)
        return shared

    async with Rig(place) as rig:
        first = await rig.value(lambda ctx: StepExecutor(ctx).map("m", item, range(5)))
        assert first == [list(range(n + 1)) for n in range(5)]


async def test_no_more_run_at_once_than_asked_for(place: Path | None) -> None:
    now, most = 0, 0

    async def item(n: int) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        for _ in range(5):
            await asyncio.sleep(0)
        now -= 1

    async with Rig(place) as rig:
        await rig.value(lambda ctx: StepExecutor(ctx, max_concurrency=3).map("m", item, range(12)))
    assert most == 3


async def test_only_items_without_a_record_run_again(place: Path | None) -> None:
    calls: list[str] = []
    bad = {"c"}

    async def item(name: str) -> str:
        calls.append(name)
        if name in bad:
            raise ConnectionError("no")
        return name.upper()

    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            return await StepExecutor(ctx, max_concurrency=2).map("up", item, "abcd", key=str)

        failed = await rig.go(body)
        assert failed.error is not None
        assert failed.error.type == "StepExecutionError"
        recorded = {record.key for record in await rig.records() if record.kind == "done"}
        bad.clear()
        assert await rig.value(body) == ["A", "B", "C", "D"]
        assert {f"m:{name}" for name in "abcd" if calls.count(name) == 1} >= recorded
        skipped = await rig.told("step.skipped")
        assert len(skipped) == len(recorded)
        assert all(payload["reason"] == "already_completed" for _, payload in skipped)
        events = await rig.runner.event_bus.get_events("r")
        assert [event.sequence for event in events] == list(range(len(events)))


async def test_when_one_fails_those_in_flight_are_recorded_and_no_other_begins(place: Path | None) -> None:
    begun: list[int] = []
    both, failing = asyncio.Event(), asyncio.Event()

    async def item(n: int) -> int:
        begun.append(n)
        if n == 0:
            await both.wait()
            failing.set()
            raise ConnectionError("no")
        both.set()
        await failing.wait()
        for _ in range(20):
            await asyncio.sleep(0.001)
        return n

    async with Rig(place) as rig:
        await rig.go(lambda ctx: StepExecutor(ctx, max_concurrency=2).map("m", item, range(6)))
        assert begun == [0, 1]
        assert [record.key for record in await rig.records() if record.kind == "done"] == ["m:1"]


async def test_an_item_keeps_its_record_under_its_key_wherever_it_stands(place: Path | None) -> None:
    calls: list[str] = []

    async def item(name: str) -> str:
        calls.append(name)
        return name.upper()

    async with Rig(place) as rig:

        def body(names: str, fail: bool) -> Any:
            async def run(ctx: Any) -> Any:
                value = await StepExecutor(ctx).map("m", item, names, key=str)
                if fail:
                    raise ConnectionError
                return value

            return run

        await rig.go(body("abc", True))
        assert await rig.value(body("cxa", False)) == ["C", "X", "A"]
        assert sorted(calls) == ["a", "b", "c", "x"]


async def test_maps_under_two_checkpoint_keys_are_two(place: Path | None) -> None:
    calls: list[str] = []

    def upper(name: str) -> str:
        calls.append(name)
        return name.upper()

    async def body(ctx: Any) -> Any:
        one, two = StepExecutor(ctx), StepExecutor(ctx, checkpoint_key="two")
        found = [
            await one.map("up", upper, "ab"),
            await two.map("up", upper, "cd"),
            await two.map("by", upper, "ef", key=str),
        ]
        if len(calls) == 6:
            raise ConnectionError
        return found

    async with Rig(place) as rig:
        await rig.go(body)
        calls.append("resumed")
        assert await rig.value(body) == [["A", "B"], ["C", "D"], ["E", "F"]]
    assert sorted(calls[:6]) == list("abcdef")
    assert calls[6:] == ["resumed"]


async def test_maps_inside_two_steps_are_two(place: Path | None) -> None:
    lives = 0

    async def body(ctx: Any) -> Any:
        nonlocal lives
        lives += 1

        async def part(letters: str) -> list[str]:
            found: list[str] = await StepExecutor(ctx).map("up", str.upper, letters)
            if letters == "cd" and lives == 1:
                raise ConnectionError
            return found

        return [await ctx.step("part", part, letters) for letters in ("ab", "cd")]

    async with Rig(place) as rig:
        await rig.go(body)
        assert await rig.value(body) == [["A", "B"], ["C", "D"]]
        skipped = [payload["step_name"] for _, payload in await rig.told("step.skipped")]
        assert skipped == ["up", "up"]


@pytest.mark.parametrize("where", ["in two steps", "between steps", "by place between steps"])
@pytest.mark.parametrize("failing", [False, True])
async def test_an_item_of_two_maps_at_once_is_done_once(place: Path | None, where: str, failing: bool) -> None:
    calls: list[int] = []

    async def item(n: int) -> int:
        calls.append(n)
        for _ in range(n % 5):
            await asyncio.sleep(0)
        if failing and calls == [0]:
            raise ConnectionError
        return n

    async def body(ctx: Any) -> Any:
        async def both(count: int) -> Any:
            key = None if where.startswith("by place") else str
            return await StepExecutor(ctx, max_concurrency=3).map("each", item, range(count), key=key)

        asked = [ctx.step(f"part {n}", both, n) if where == "in two steps" else both(n) for n in (20, 30)]
        return await asyncio.gather(*asked, return_exceptions=failing)

    async with Rig(place) as rig:
        found = await rig.value(lambda ctx: _lengths(body(ctx)))
        assert found == ([None, 30] if failing else [20, 30])
        assert sorted(calls) == [*([0] if failing else []), *range(30)]
        done = [record.key for record in await rig.records() if record.kind == "done" and record.name == "each"]
        assert sorted(done) == sorted(f"m:{n}" for n in range(30))
        told = [e for e in await rig.runner.event_bus.get_events("r") if e.payload.get("step_name") == "each"]
        for kind, more in (("step.started", failing), ("step.completed", 0)):
            ids = [e.payload["step_id"] for e in told if e.event_type == kind]
            assert len(ids) == 30 + more
            assert len(set(ids)) == 30


async def test_an_item_whose_doubt_matters_to_one_of_two_maps_is_begun_by_itself(
    place: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    holding, begun = asyncio.Event(), asyncio.Event()

    async def body(ctx: Any) -> Any:
        async def item(n: int) -> int:
            return n

        async def careful(n: int) -> list[str]:
            begun.set()
            return [record.key for record in await rig.records() if record.kind == "started"]

        async def other() -> Any:
            await holding.wait()
            return await StepExecutor(ctx).map("m", careful, [1], key=str, on_in_doubt="fail")

        return await asyncio.gather(StepExecutor(ctx, max_concurrency=1).map("m", item, [0, 1], key=str), other())

    async with Rig(place) as rig, asyncio.timeout(10):
        engine = rig.runner.queue.commits
        commit = engine.commit

        async def slow(guard: Any, ops: Any) -> Any:
            if any(op.name == "journal.append" and op.args[1].next for op in ops):
                holding.set()
                await begun.wait()
            return await commit(guard, ops)

        monkeypatch.setattr(engine, "commit", slow)
        (_, by_map), (by_other,) = await rig.value(body)
        assert by_map == by_other
        assert "m:1" in by_other


@pytest.mark.parametrize("landed", [False, True])
async def test_a_commit_that_is_not_answered_while_others_go_on_costs_nothing(
    place: Path | None, monkeypatch: pytest.MonkeyPatch, landed: bool
) -> None:
    ran: list[int] = []
    last, stalled = asyncio.Event(), 0

    async def item(n: int) -> int:
        ran.append(n)
        return n

    async with Rig(place) as rig, asyncio.timeout(10):
        engine = rig.runner.queue.commits
        commit = engine.commit

        async def stall(guard: Any, ops: Any) -> Any:
            nonlocal stalled
            ends = [op.args[1].result for op in ops if op.name == "journal.append" and op.args[1].kind == "done"]
            if "0" in ends and not stalled:
                stalled += 1
                if landed:
                    await commit(guard, ops)
                await last.wait()
                raise StorageBusy("did not answer")
            answers = await commit(guard, ops)
            if "5" in ends:
                last.set()
            return answers

        monkeypatch.setattr(engine, "commit", stall)
        items = list(range(6))
        assert await rig.value(lambda ctx: StepExecutor(ctx, max_concurrency=2).map("m", item, items)) == items
        assert (sorted(ran), stalled) == (items, 1)
        done = [record.key for record in await rig.records() if record.kind == "done"]
        assert sorted(done) == [f"m:{n}" for n in items]
        told = [about["step_index"] for _, about in await rig.told("step.completed")]
        assert sorted(told) == items


async def test_an_item_whose_start_did_not_land_with_the_one_before_it_is_told_to_begin(
    place: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[Any] = []

    async def item(n: int) -> int:
        return n

    async def body(ctx: Any) -> Any:
        executor = StepExecutor(ctx, max_concurrency=1)
        with pytest.raises(StorageFull):
            await executor.map("m", item, [0, 1])
        return await executor.map("m", item, [0, 1])

    async with Rig(place) as rig:
        engine = rig.runner.queue.commits
        commit = engine.commit

        async def full(guard: Any, ops: Any) -> Any:
            if not refused and any(op.name == "journal.append" and op.args[1].next for op in ops):
                refused.append(ops)
                raise StorageFull("no room")
            return await commit(guard, ops)

        monkeypatch.setattr(engine, "commit", full)
        assert await rig.value(body) == [0, 1]
        assert 1 in [about["step_index"] for _, about in await rig.told("step.started")]


async def _lengths(asked: Any) -> list[int | None]:
    return [None if isinstance(each, Exception) else len(each) for each in await asked]


async def test_another_item_at_a_recorded_place_is_told(place: Path | None) -> None:
    async with Rig(place) as rig:

        def body(items: list[int], fail: bool) -> Any:
            async def run(ctx: Any) -> Any:
                value = await StepExecutor(ctx).map("m", str, items)
                if fail:
                    raise ConnectionError
                return value

            return run

        await rig.go(body([1, 2], True))
        assert await rig.value(body([1, 9], False)) == ["1", "2"]
        marks = [payload.get("input_changed") for _, payload in await rig.told("step.skipped")]
        assert marks == [None, True]


async def test_types_are_rebuilt_and_the_context_is_injected(place: Path | None) -> None:
    async def typed(n: int, ctx: RunContext) -> Square:
        assert ctx.step_id is not None
        return Square(n)

    def untyped(n: int) -> Any:
        return Square(n)

    async with Rig(place) as rig:
        lives: list[Any] = []

        async def body(ctx: Any) -> None:
            executor = StepExecutor(ctx)
            lives.append([await executor.map("t", typed, [1]), await executor.map("u", untyped, [2], returns=Square)])
            if len(lives) == 1:
                raise ConnectionError

        await rig.go(body)
        await rig.value(body)
        assert lives[0] == lives[1] == [[Square(1)], [Square(2)]]


async def test_each_item_is_retried_by_itself(place: Path | None) -> None:
    left = {1: 2, 2: 1}

    async def item(n: int) -> int:
        if left.get(n):
            left[n] -= 1
            raise ConnectionError("no")
        return n

    async with Rig(place) as rig:
        assert await rig.value(lambda ctx: StepExecutor(ctx).map("m", item, [0, 1, 2], retries=2, retry_delay=0)) == [
            0,
            1,
            2,
        ]
        retrying = [payload["step_index"] for _, payload in await rig.told("step.retrying")]
        assert sorted(retrying) == [1, 1, 2]


async def test_an_item_in_doubt_follows_the_policy(place: Path | None) -> None:
    inside = asyncio.Event()

    async def hangs(n: int) -> None:
        inside.set()
        await asyncio.Event().wait()

    async with Rig(place) as rig:
        await rig.cut(lambda ctx: StepExecutor(ctx).map("m", hangs, [0]), inside)

        async def body(ctx: Any) -> None:
            with pytest.raises(StepInDoubt):
                await StepExecutor(ctx).map("m", str, [0], on_in_doubt="fail")

        await rig.value(body)


async def test_an_item_that_was_never_begun_is_not_in_doubt(place: Path | None) -> None:
    """A failure elsewhere stops the fan-out: what it had not begun is simply missing."""
    fail = asyncio.Event()
    broken = True

    async def item(n: int) -> int:
        if n == 0 and broken:
            await fail.wait()
            raise ConnectionError("no")
        if n == 1:
            asyncio.get_running_loop().call_soon(fail.set)
        return n

    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            return await StepExecutor(ctx, max_concurrency=2).map("m", item, range(8), on_in_doubt="fail")

        failed = await rig.go(body)
        assert failed.error is not None
        assert failed.error.message.endswith("no")
        broken = False
        assert await rig.value(body) == list(range(8))


async def test_a_cancelled_run_begins_no_other_item(place: Path | None) -> None:
    begun: list[int] = []
    async with Rig(place) as rig:

        async def body(ctx: Any) -> None:
            async def item(n: int) -> None:
                begun.append(n)
                ctx.control.stop(Stop.CANCEL)

            with pytest.raises(StepCancelledError):
                await StepExecutor(ctx, max_concurrency=1).map("m", item, range(3))

        await rig.go(body)
        assert begun == [0]
        assert [about["step_index"] for kind, about in await rig.told("step.started")] == [0]


async def test_cancelling_the_caller_lets_every_item_go() -> None:
    inside, ended = asyncio.Event(), list[int]()

    async def hangs(n: int) -> None:
        if n == 2:
            inside.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(n)

    async with Rig() as rig:
        await rig.cut(lambda ctx: StepExecutor(ctx).map("m", hangs, range(3)), inside)
    assert sorted(ended) == [0, 1, 2]


async def test_what_landed_while_its_caller_gave_up_is_not_run_again(place: Path | None) -> None:
    """The caller is cancelled in the commit of an item, and asks for all of them again in the same life."""
    calls: list[int] = []

    async def item(n: int) -> int:
        calls.append(n)
        return n

    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            commit = ctx.journal.writer.record

            async def cut(records: Any) -> Any:
                done = await commit(records)
                if any(record.kind == "done" and record.key == "m:2" for record in records):
                    ctx.journal.writer.record = commit
                    raise asyncio.CancelledError
                return done

            ctx.journal.writer.record = cut
            with pytest.raises(asyncio.CancelledError):
                await StepExecutor(ctx).map("m", item, range(4))
            return await StepExecutor(ctx).map("m", item, range(4))

        assert await rig.value(body) == [0, 1, 2, 3]
        assert sorted(calls) == [0, 1, 2, 3]
        keys = [record.key for record in await rig.records() if record.kind == "done"]
        assert sorted(keys) == ["m:0", "m:1", "m:2", "m:3"]


async def test_other_items_under_a_name_are_not_answered_with_the_results_of_the_first(place: Path | None) -> None:
    async def same(n: int) -> int:
        return n

    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            executor = StepExecutor(ctx)
            first = await executor.map("m", same, [1, 2])
            assert await executor.map("m", same, [1, 2, 3]) == [*first, 3]
            with pytest.raises(InvalidArgument, match=r"map 'm': position 1 must have the same item.*key="):
                await executor.map("m", same, [1, 4])
            return [await executor.map("k", same, batch, key=str) for batch in ([1, 2], [3, 4])]

        assert await rig.value(body) == [[1, 2], [3, 4]]


async def test_keys_are_unique_and_errors_name_the_item() -> None:
    async with Rig() as rig:

        async def body(ctx: Any) -> None:
            executor = StepExecutor(ctx)
            with pytest.raises(InvalidArgument, match="keys of items must be unique, got 'x' twice"):
                await executor.map("m", str, ["x", "y", "x"], key=str)
            with pytest.raises(InvalidArgument, match="keys of items must be unique, got '1' twice"):
                await executor.map("m", str, [1, "1"], key=lambda item: item)
            with pytest.raises(InvalidArgument, match="got -1"):
                await executor.map("m", str, [1], retries=-1)
            with pytest.raises(StepExecutionError, match="division"):
                await executor.map("z", lambda n: 1 // n, [0])

        await rig.value(body)
