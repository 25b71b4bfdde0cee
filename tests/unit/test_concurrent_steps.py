"""Steps of one context that run side by side, and steps that a run went on without."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._execution.recorded_calls import RecordedCalls
from agent_runtime_core.errors import JournalMismatch, StepExecutionError
from agent_runtime_core.steps import Step, StepExecutor
from tests.support.runs import Rig, Script, twice


class SideBySide:
    """Steps of one name without keys, each in a task of its own, that are asked for one after the other."""

    def __init__(self, within: bool) -> None:
        self.within = within

    async def __call__(self, ctx: Any, *order: int, answer: bool = True) -> Any:
        gates = {n: asyncio.Event() for n in order}

        async def one(n: int) -> Any:
            await gates[n].wait()
            try:
                return await ctx.step("p", lambda n: n * 10, n)
            finally:
                for after in order[order.index(n) + 1 :][:1]:
                    gates[after].set()

        async def all_of_them() -> list[Any]:
            gates[order[0]].set()
            values = await asyncio.gather(*(one(n) for n in sorted(order)), return_exceptions=True)
            for value in values:
                if isinstance(value, BaseException):
                    raise value
            if not answer:
                raise ConnectionError
            return values

        return await (ctx.step("around", all_of_them) if self.within else all_of_them())


@pytest.mark.parametrize("within", [False, True], ids=["between", "within"])
async def test_steps_of_one_name_that_ran_at_once_without_keys_answer_in_the_same_order_only(
    place: Path | None, within: bool
) -> None:
    steps = SideBySide(within)
    async with Rig(place) as rig:
        await rig.go(lambda ctx: steps(ctx, 0, 1, 2, answer=False))
        result = await rig.go(lambda ctx: steps(ctx, 2, 1, 0))
        assert result.error is not None
        assert "key=str(i)" in result.error.message
        assert result.error.type == "JournalMismatch"
        assert await rig.value(lambda ctx: steps(ctx, 0, 1, 2)) == [0, 10, 20]


async def test_one_that_ran_at_once_with_one_in_doubt_answers_for_none_of_other_arguments(place: Path | None) -> None:
    inside = asyncio.Event()

    async def work(n: int) -> int:
        if n == 1 and not inside.is_set():
            inside.set()
            await asyncio.Event().wait()
        return n * 10

    async def body(ctx: Any, *order: int) -> list[int]:
        return list(await asyncio.gather(*(ctx.step("p", work, n) for n in order)))

    async with Rig(place) as rig:
        await rig.cut(lambda ctx: body(ctx, 0, 1), inside)
        result = await rig.go(lambda ctx: body(ctx, 1, 0))
        assert result.error is not None
        assert result.error.type == "JournalMismatch"


async def test_the_only_step_of_its_name_answers_for_other_arguments_beside_others_too(place: Path | None) -> None:
    steps = SideBySide(within=False)
    async with Rig(place) as rig:
        await rig.go(lambda ctx: steps(ctx, 1, answer=False))
        assert await rig.value(lambda ctx: steps(ctx, 2)) == [10]
        assert [payload["input_changed"] for _, payload in await rig.told("step.skipped")] == [True]


async def test_steps_side_by_side_are_known_by_their_keys(place: Path | None) -> None:
    order = iter([[2, 0, 1], [0, 1, 2]])
    calls: list[int] = []

    async def item(n: int) -> int:
        calls.append(n)
        return n * 10

    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            values = await asyncio.gather(*(ctx.step("item", item, n, key=str(n)) for n in next(order)))
            return sorted(values)

        assert await twice(rig, body) == ([0, 10, 20], [0, 10, 20])
        assert sorted(calls) == [0, 1, 2]


@pytest.mark.parametrize("inside", [(), ("one", "two"), ("one",)], ids=["between steps", "in two steps", "in one"])
async def test_a_keyed_step_asked_for_by_two_tasks_at_once_is_done_once(
    place: Path | None, inside: tuple[str, ...]
) -> None:
    calls: list[int] = []

    async def work(n: int) -> int:
        calls.append(n)
        await asyncio.sleep(0)
        return n

    async def body(ctx: Any) -> Any:
        async def asked() -> Any:
            return await ctx.step("work", work, 1, key="k")

        parts = [ctx.step(name, asked) for name in inside]
        return await asyncio.gather(*parts, *(asked() for _ in range(2 - len(parts))))

    async with Rig(place) as rig:
        assert await twice(rig, body) == ([1, 1], [1, 1])
        assert calls == [1]
        done = [record.key for record in await rig.records() if (record.kind, record.name) == ("done", "work")]
        assert done == ["k:k"]
        told = [kind for kind, about in await rig.told("step.") if about["step_name"] == "work"]
        assert told == ["step.started", "step.completed"]


async def test_steps_of_other_names_side_by_side_need_no_keys(place: Path | None) -> None:
    turn = iter([1, 0])

    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            slow = next(turn)

            async def step(n: int) -> int:
                for _ in range(20 if n == slow else 1):
                    await asyncio.sleep(0)
                return n

            values = await asyncio.gather(ctx.step("left", step, 0), ctx.step("right", step, 1))
            return [*values, await ctx.step("after", step, 2)]

        assert await twice(rig, body) == ([0, 1, 2], [0, 1, 2])


async def test_steps_of_tasks_side_by_side_may_come_in_another_order(place: Path | None) -> None:
    """No two of them are in flight at once, in either life."""
    turn = iter([{"left": 1, "right": 2}, {"left": 2, "right": 1}, {"left": 1, "right": 2}])

    async def same(value: str) -> str:
        return value

    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            sooner = asyncio.Event()
            order = next(turn)

            async def branch(name: str) -> list[str]:
                if order[name] == 2:
                    await sooner.wait()
                values = [await ctx.step(name, same, name), await ctx.step(f"{name} again", same, name)]
                sooner.set()
                return values

            values = await asyncio.gather(branch("left"), branch("right"))
            return [*values, await ctx.step("after", same, "after")]

        values = [["left", "left"], ["right", "right"], "after"]
        assert await twice(rig, body) == (values, values)


async def test_what_follows_steps_side_by_side_keeps_its_place(place: Path | None) -> None:
    async def same(value: str) -> str:
        return value

    async with Rig(place) as rig:

        async def body(ctx: Any, last: str = "end") -> None:
            await asyncio.gather(ctx.step("left", same, "l"), ctx.step("right", same, "r"))
            await ctx.step(last, same, "e")
            raise ConnectionError("cut")

        async def changed(ctx: Any) -> None:
            with pytest.raises(JournalMismatch) as caught:
                await body(ctx, "finish")
            assert (caught.value.recorded, caught.value.found) == ("end", "finish")

        await rig.go(body)
        await rig.value(changed)


async def test_a_step_that_failed_beside_others_is_tried_afresh(place: Path | None) -> None:
    """Another task goes on before the run hears of the failure: that is not the caller who went on without the step."""
    tries: list[str] = []

    async def flaky() -> str:
        tries.append("flaky")
        if len(tries) == 1:
            raise ConnectionError("down")
        return "up"

    async def same(value: str) -> str:
        return value

    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            failed = asyncio.Event()

            async def left() -> str:
                try:
                    return str(await ctx.step("left", flaky))
                finally:
                    failed.set()

            async def right() -> str:
                await failed.wait()
                return str(await ctx.step("right", same, "r"))

            values = await asyncio.gather(left(), right(), return_exceptions=True)
            for value in values:
                if isinstance(value, Exception):
                    raise value
            return values

        await rig.go(body)
        assert await rig.value(body) == ["up", "r"]
        assert len(tries) == 2


@pytest.mark.parametrize("beside", ["step", "list", "graph", "map", "now", "sleep", "signal", "call", "model"])
async def test_a_step_that_failed_is_tried_afresh_whatever_comes_beside_it(place: Path | None, beside: str) -> None:
    tries: list[str] = []

    async def flaky() -> str:
        tries.append("flaky")
        if len(tries) == 1:
            raise ConnectionError("down")
        return "up"

    async def one(*_: Any) -> int:
        return 1

    async def other(ctx: Any) -> Any:
        match beside:
            case "step":
                return await ctx.step("other", one)
            case "list":
                return await StepExecutor(ctx).run([Step("other", one)])
            case "graph":
                return await StepExecutor(ctx).run([Step("other", one), Step("last", one, depends_on=["other"])])
            case "map":
                return await StepExecutor(ctx).map("other", one, [1])
            case "now":
                return await ctx.now()
            case "sleep":
                return await ctx.sleep(0.01)
            case "signal":
                return await ctx.wait_for_signal("go")
            case "call":
                return await ctx.call(Script(body_of_child, "child"), {})
            case _:
                return await RecordedCalls(ctx).run("model", "turn", lambda attempt: one())

    async def body_of_child(ctx: Any) -> Any:
        return 1

    async def body(ctx: Any) -> Any:
        failed = asyncio.Event()

        async def fails() -> Any:
            try:
                return await ctx.step("a", flaky)
            finally:
                failed.set()

        async def follows() -> Any:
            await failed.wait()
            return (
                RecordedCalls(ctx).recorded("model", "turn")
                if len(tries) > 1 and beside == "model"
                else await other(ctx)
            )

        value, _ = await asyncio.gather(fails(), follows())
        return value

    async with Rig(place, max_retries=3, retry_backoff_base=0) as rig:
        await rig.runner.submit("script", run_id="r")
        await rig.runner.signal("r", "go")
        assert await rig.value(body) == "up"
        assert len(tries) == 2


@pytest.mark.parametrize("instead", ["list", "graph", "map", "now"])
async def test_a_step_that_was_gone_on_without_fails_again_whatever_came_instead(
    place: Path | None, instead: str
) -> None:
    tries: list[str] = []

    def flaky() -> None:
        tries.append("flaky")
        raise ConnectionError("down")

    async def one(*_: Any) -> int:
        return 1

    async def body(ctx: Any) -> Any:
        with pytest.raises(StepExecutionError):
            await ctx.step("a", flaky)
        match instead:
            case "list":
                await StepExecutor(ctx).run([Step("other", one)])
            case "graph":
                await StepExecutor(ctx).run([Step("other", one), Step("last", one, depends_on=["other"])])
            case "map":
                await StepExecutor(ctx).map("other", one, [1])
            case _:
                await ctx.now()
        return await ctx.step("b", one)

    async with Rig(place) as rig:
        cut = ConnectionError("cut")

        async def cut_off(ctx: Any) -> Any:
            await body(ctx)
            raise cut

        await rig.go(cut_off)
        assert await rig.value(body) == 1
        assert tries == ["flaky"]


async def test_a_step_that_failed_in_a_task_of_its_own_and_was_gone_on_without_fails_again(place: Path | None) -> None:
    """As under `asyncio.wait_for`, which makes a task of what it is given before Python 3.12."""
    tries: list[str] = []

    async def flaky() -> str:
        tries.append("flaky")
        if len(tries) == 1:
            raise ConnectionError("down")
        return "up"

    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            try:
                value = await asyncio.ensure_future(ctx.step("left", flaky))
            except StepExecutionError:
                value = "without"
            value += await ctx.step("after", lambda: " it")
            if tries == ["flaky"] and not once:
                once.append(True)
                raise ConnectionError("cut")
            return value

        once: list[bool] = []
        await rig.go(body)
        assert await rig.value(body) == "without it"
        assert tries == ["flaky"]


async def test_a_failure_the_code_went_on_without_is_as_recorded_as_a_result(place: Path | None) -> None:
    calls: list[str] = []

    def step(name: str, fails: bool = False) -> Any:
        def fn() -> str:
            calls.append(name)
            if fails:
                raise ValueError(f"{name} failed")
            return name

        return fn

    async with Rig(place) as rig:

        def body(last: bool) -> Any:
            async def run(ctx: Any) -> Any:
                with pytest.raises(
                    StepExecutionError, match=r"step 'try' failed after 2 attempt.*try failed"
                ) as caught:
                    await ctx.step("try", step("try", len(calls) < 2), retries=1, retry_delay=0)
                assert caught.value.attempts == 2
                await ctx.step("instead", step("instead"))
                return await ctx.step("last", step("last", not last))

            return run

        await rig.go(body(False))
        assert calls == ["try", "try", "instead", "last"]
        assert await rig.value(body(True)) == "last"
        assert calls == ["try", "try", "instead", "last", "last"]


async def test_a_failure_that_ended_the_attempt_is_tried_afresh(place: Path | None) -> None:
    calls: list[int] = []

    def fn() -> int:
        calls.append(1)
        if len(calls) < 3:
            raise ConnectionError
        return len(calls)

    async with Rig(place, max_retries=3) as rig:
        assert await rig.value(lambda ctx: ctx.step("a", fn)) == 3
