"""What an agent does through its context: single steps, recorded time and chance, and where it may be used."""

from __future__ import annotations

import asyncio
import datetime as dt
import enum
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core._execution.run_control import Stop
from agent_runtime_core.errors import (
    InvalidArgument,
    JournalMismatch,
    PortalMisuse,
    StepCancelledError,
    StepExecutionError,
    StepInDoubt,
    StorageClosed,
    UnserialisableResult,
)
from agent_runtime_core.interfaces import ErrorInfo, LLMResponse, RunContext, RunResult
from agent_runtime_core.persistence import Conversation, PersistenceManager, Task, TaskState
from agent_runtime_core.portal import from_thread
from agent_runtime_core.steps import AlreadyDone, Step, StepExecutor
from agent_runtime_core.steps.model import ReadOnlyState
from agent_runtime_core.testing import VirtualClock
from tests.support.runs import Rig, soon, twice, twice_values


class Size(enum.Enum):
    SMALL = "s"


@dataclass
class Box:
    size: Size
    weight: float


# -- ctx.step


async def test_a_step_is_run_once_and_answered_from_its_record(place: Path | None) -> None:
    calls: list[int] = []

    async def add(a: int, b: int) -> int:
        calls.append(a)
        return a + b

    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            return [await ctx.step("add", add, n, 1) for n in range(3)]

        assert await twice(rig, body) == ([1, 2, 3], [1, 2, 3])
        assert calls == [0, 1, 2]


async def test_types_follow_the_annotation_or_returns(place: Path | None) -> None:
    def box() -> Box:
        return Box(Size.SMALL, 1.5)

    def plain() -> Any:
        return Box(Size.SMALL, 2.5)

    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            return [
                await ctx.step("box", box),
                await ctx.step("plain", plain, returns=Box),
                await ctx.step("none", lambda: None),
                await ctx.step("tuple", lambda: (1, {2})),
            ]

        expected = [Box(Size.SMALL, 1.5), Box(Size.SMALL, 2.5), None, (1, {2})]
        made = await twice_values(rig, body)
        assert made == (expected, expected)


async def test_the_context_is_put_where_a_step_asks_for_it() -> None:
    async def middle(a: int, ctx: RunContext, b: int) -> list[Any]:
        await ctx.emit("inside", {})
        return [a, ctx.step_id is not None, b]

    def plain(ctx: RunContext) -> str:
        from_thread(ctx.emit, "inside", {})
        return str(ctx.run_id)

    async with Rig() as rig:

        async def body(ctx: Any) -> Any:
            assert await ctx.step("middle", middle, 1, 2) == [1, True, 2]
            assert await ctx.step("plain", plain) == str(ctx.run_id)
            with pytest.raises(InvalidArgument, match=r"must have 1 argument"):
                await ctx.step("short", middle)

        await rig.value(body)
        assert len(await rig.told("inside")) == 2


async def test_another_name_at_a_recorded_place_is_refused(place: Path | None) -> None:
    async with Rig(place) as rig:

        async def first(ctx: Any) -> None:
            await ctx.step("a", lambda: 1)
            await ctx.step("b", lambda: 2)
            raise ConnectionError

        await rig.go(first)

        async def other(ctx: Any) -> None:
            await ctx.step("a", lambda: 1)
            with pytest.raises(JournalMismatch, match=r"'b'.*'x'") as caught:
                await ctx.step("x", lambda: 2)
            assert (caught.value.recorded, caught.value.found) == ("b", "x")
            raise ConnectionError

        await rig.go(other)

        async def order(ctx: Any) -> None:
            with pytest.raises(JournalMismatch) as caught:
                await ctx.step("b", lambda: 2)
            assert (caught.value.recorded, caught.value.found) == ("a", "b")
            raise ConnectionError

        await rig.go(order)

        async def renamed(ctx: Any) -> Any:
            await ctx.step("a", lambda: 1)
            ctx.renamed("b", "x")
            return await ctx.step("x", lambda: 9)

        assert await rig.value(renamed) == 2


async def test_a_renamed_step_in_doubt_keeps_its_key(place: Path | None) -> None:
    inside = asyncio.Event()
    keys: list[Any] = []

    async def hangs(ctx: RunContext) -> None:
        keys.append(ctx.idempotency_key)
        inside.set()
        await asyncio.Event().wait()

    async def done(ctx: RunContext) -> None:
        keys.append(ctx.idempotency_key)

    async with Rig(place) as rig:
        await rig.cut(lambda ctx: ctx.step("pay", hangs), inside)

        async def body(ctx: Any) -> Any:
            ctx.renamed("pay", "charge")
            await ctx.step("charge", done)

        await rig.value(body)
        assert keys[0] == keys[1]


async def test_other_arguments_use_the_record_and_say_so(place: Path | None) -> None:
    async with Rig(place) as rig:

        async def first(ctx: Any) -> None:
            await ctx.step("a", lambda n: n, 1)
            raise ConnectionError

        await rig.go(first)

        async def strict(ctx: Any) -> None:
            with pytest.raises(JournalMismatch, match="other arguments"):
                await ctx.step("a", lambda n: n, 2, on_changed_input="raise")
            raise ConnectionError

        await rig.go(strict)
        assert await rig.value(lambda ctx: ctx.step("a", lambda n: n, 2)) == 1
        skipped = await rig.told("step.skipped")
        assert [payload["input_changed"] for _, payload in skipped] == [True]


async def test_arguments_without_a_json_form_stay_out_of_the_digest() -> None:
    async with Rig() as rig:

        async def body(ctx: Any) -> Any:
            return await ctx.step("a", lambda thing, n: n, object(), 1)

        assert await twice(rig, body) == (1, 1)
        assert await rig.told("step.skipped") == []


async def test_a_step_fails_with_its_attempts_and_is_retried(place: Path | None) -> None:
    left = [2]

    def flaky() -> str:
        if left[0]:
            left[0] -= 1
            raise ConnectionError("down")
        return "up"

    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            assert await ctx.step("flaky", flaky, retries=2, retry_delay=5, description="try hard") == "up"
            left[0] = 9
            with pytest.raises(StepExecutionError, match="down") as caught:
                await ctx.step("gone", flaky, retries=1, retry_delay=0)
            assert caught.value.attempts == 2
            with pytest.raises(StepExecutionError, match="timed out"):
                await ctx.step("slow", asyncio.Event().wait, timeout=0.01)

        await rig.value(body)
        assert rig.clock.boot() == 10
        started = await rig.told("step.started")
        assert started[0][1]["description"] == "try hard"
        assert started[0][1]["total_steps"] is None
        assert await rig.told("progress") == []


async def test_a_step_of_a_cancelled_run_does_not_begin() -> None:
    async with Rig() as rig:

        async def body(ctx: Any) -> None:
            assert not ctx.is_cancelled()
            ctx.control.stop(Stop.CANCEL)
            assert (ctx.cancelled(), ctx.is_cancelled()) == (True, True)
            with pytest.raises(StepCancelledError):
                await ctx.step("a", lambda: 1)

        assert (await rig.go(body)).status == "cancelled"


async def test_a_step_in_doubt_follows_its_policy(place: Path | None) -> None:
    async def hangs(inside: asyncio.Event) -> None:
        inside.set()
        await asyncio.Event().wait()

    answers: list[Any] = []
    async with Rig(place) as rig:
        for policy in ("retry", "fail", lambda: AlreadyDone("known")):
            run_id = f"r{len(answers)}"
            inside = asyncio.Event()
            await rig.cut(lambda ctx, inside=inside: ctx.step("a", hangs, inside), inside, run_id)  # type: ignore[misc]

            async def body(ctx: Any, policy: Any = policy) -> Any:
                try:
                    return await ctx.step("a", lambda: "again", on_in_doubt=policy)
                except StepInDoubt:
                    return "doubt"

            answers.append(await rig.value(body, run_id))
    assert answers == ["again", "doubt", "known"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("", str), "step name must be a non-empty string, got ''"),
        ((3, str), "step name must be a non-empty string, got 3"),
        (("a", "str"), "got 'str'"),
        (("a", "str"), "Pass the function and its arguments without calling it, as in"),
    ],
)
async def test_a_bad_step_is_named(arguments: Any, said: str) -> None:
    async with Rig() as rig:

        async def body(ctx: Any) -> None:
            with pytest.raises(InvalidArgument, match=said):
                await ctx.step(*arguments)

        await rig.value(body)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"retries": -2}, "got -2"),
        ({"timeout": 0}, "got 0"),
        ({"retries": 1, "retry_delay": "x"}, "'x'"),
        ({"on_in_doubt": "hope"}, "got 'hope'"),
        ({"on_changed_input": "shrug"}, "got 'shrug'"),
    ],
)
async def test_a_bad_option_of_a_step_is_named(options: dict[str, Any], said: str) -> None:
    async with Rig() as rig:

        async def body(ctx: Any) -> None:
            with pytest.raises(InvalidArgument, match=said):
                await ctx.step("a", str, **options)
            with pytest.raises(InvalidArgument, match="got '' and 'b'"):
                ctx.renamed("", "b")

        await rig.value(body)


async def test_a_result_without_a_json_form_is_refused_and_not_retried() -> None:
    calls: list[int] = []

    def bad() -> Any:
        calls.append(1)
        return [float("nan")]

    async with Rig() as rig:

        async def body(ctx: Any) -> None:
            with pytest.raises(UnserialisableResult, match=r"\$\[0\]"):
                await ctx.step("a", bad, retries=5)

        await rig.value(body)
        assert calls == [1]


# -- dicts of this library

CALLS = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]


async def test_the_tool_calls_of_an_answer_are_stored_as_plain_dicts(place: Path | None) -> None:
    told = {"role": "assistant", "content": None, "tool_calls": CALLS}

    async with Rig(place) as rig:

        async def body(ctx: Any) -> RunResult:
            calls = LLMResponse(told).tool_calls
            message = {**told, "tool_calls": calls}
            assert types_in(await ctx.step("asked", lambda: calls)) == {list, dict, str}
            await ctx.emit("asked", message)
            await ctx.checkpoint(message)
            return RunResult({"calls": calls}, [message])

        assert (await rig.go(body)).error is None
        recorded = await rig.go(body)
        kept = await rig.runner.state_store.get_checkpoint("r")
        event = next(each for each in await rig.runner.event_bus.get_events("r") if each.event_type == "asked")
        for stored in (recorded.final_messages[0], kept, event.payload):
            assert stored == told
            assert types_in(stored) == {list, dict, str, type(None)}


def types_in(value: Any) -> set[type]:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return {type(value)}.union(*map(types_in, inside))


# -- Enums and models


class Mood(str, enum.Enum):  # noqa: UP042 - as older code has them
    GLAD = "glad"


async def test_an_enum_is_told_and_kept_as_its_value(place: Path | None) -> None:
    told = {"own": TaskState.COMPLETE, "users": [Mood.GLAD], Mood.GLAD: 1}
    plain = {"own": "complete", "users": ["glad"], "glad": 1}

    async with Rig(place) as rig:

        async def body(ctx: Any) -> RunResult:
            assert [ctx.input["said"], ctx.metadata, types_in(ctx.input["said"])] == [plain, plain, types_in(plain)]
            await ctx.emit("told", told)
            await ctx.checkpoint(told)
            results = await StepExecutor(ctx).run(
                [Step("a", lambda ctx, state: state["said"])], initial_state={"said": told}
            )
            assert types_in(results["a"]) == types_in(plain)
            return RunResult(told)

        for _ in range(2):
            result = await rig.go(body, input_data={"said": told}, metadata=told)
            assert (result.error, result.final_output) == (None, plain)
        assert types_in(result.final_output) == types_in(plain)
        event = next(each for each in await rig.runner.event_bus.get_events("r") if each.event_type == "told")
        for stored in (event.payload, await rig.runner.state_store.get_checkpoint("r")):
            assert (stored, types_in(stored)) == (plain, types_in(plain))
    async with PersistenceManager.open("memory://") as manager:
        await manager.memory.set("told", told)
        assert types_in(await manager.memory.get("told")) == types_in(plain)


async def test_of_a_step_comes_back_what_it_gave_or_the_reason_why_not(place: Path | None) -> None:
    given = [
        TaskState.COMPLETE,
        ErrorInfo("E", "m"),
        Task(name="x", state=TaskState.CANCELLED),
        Conversation(title="t"),
    ]

    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            own = await ctx.step("own", lambda: given)
            with pytest.raises(UnserialisableResult, match=r"\$\[0\].* register_type\(Mood\)"):
                await ctx.step("users", lambda: [Mood.GLAD])
            return own

        assert await twice_values(rig, body) == (given, given)


# -- recorded time and chance


async def test_now_random_and_uuid_are_the_same_again(place: Path | None) -> None:
    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            values = [await ctx.now(), await ctx.random(), await ctx.uuid4(), await ctx.now(), await ctx.random()]
            rig.clock.random.random()
            getattr(rig.clock, "advance")(60)  # noqa: B009
            await ctx.step("a", lambda: 1)
            return values

        first, second = await twice_values(rig, body)
        assert first == second
        now, chance, uid, later, another = first
        assert isinstance(now, dt.datetime)
        assert now.tzinfo is not None
        assert now == later
        assert 0 <= chance < 1
        assert chance != another
        assert isinstance(uid, UUID)
        assert uid.version == 4
        assert await rig.told("step.skipped") == []


# -- beside


async def test_from_thread_works_only_inside_a_plain_step_function() -> None:
    async with Rig() as rig:

        async def body(ctx: Any) -> None:
            with pytest.raises(PortalMisuse, match="on the event loop would deadlock"):
                from_thread(ctx.emit, "x", {})

            def plain() -> Any:
                from_thread(ctx.emit, "x", {"n": 1})
                return from_thread(lambda: 5)

            assert await ctx.step("plain", plain) == 5

        await rig.value(body)
        assert await rig.told("x") != []


def _late(ctx: Any) -> list[asyncio.Future[Any]]:
    return [
        asyncio.ensure_future(each)
        for each in (
            ctx.emit("late", {}), ctx.checkpoint({}), ctx.get_state(), ctx.step("a", str), ctx.now(), ctx.random(),
            ctx.uuid4(), ctx.sleep(0), ctx.wait_for_signal("a"), ctx.approve("a"), ctx.call("a", {}),
            ctx.transaction("t", str), StepExecutor(ctx).run([Step("a", lambda ctx, state: None)]),
        )
    ]  # fmt: skip


async def test_a_context_whose_run_goes_on_elsewhere_never_returns_and_writes_nothing() -> None:
    async with Rig(max_retries=2) as rig:
        kept: list[Any] = []

        async def body(ctx: Any) -> None:
            kept.append(ctx)
            raise ValueError("again")

        rig.register(body)
        await rig.runner.submit("script", run_id="r")
        assert await rig.runner.run_once()
        before = len(await rig.told())
        late = _late(kept[0])
        for _ in range(20):
            await asyncio.sleep(0)
        for task in late[:-1]:
            assert not task.done()
        for task in late:
            task.cancel()
        await asyncio.wait(late)
        assert len(await rig.told()) == before


async def test_a_context_whose_run_has_ended_is_refused_and_writes_nothing(place: Path | None) -> None:
    async with Rig(place) as rig:
        kept: list[Any] = []

        async def body(ctx: Any) -> None:
            kept.append(ctx)

        await rig.value(body)
        before = len(await rig.told())
        async with asyncio.timeout(10):
            for task in _late(kept[0])[:-1]:
                with pytest.raises(
                    StorageClosed, match=r"run 'r' has finished\. Await all its tasks before run\(\) returns, and use"
                ):
                    await task
        assert len(await rig.told()) == before


def test_read_only_state_refuses_every_change() -> None:
    state = ReadOnlyState({"a": 1}, {"r": 2})
    assert (state["a"], state.results["r"]) == (1, 2)
    changes: list[Callable[[], Any]] = [
        lambda: state.__setitem__("a", 2),
        lambda: state.__delitem__("a"),
        lambda: state.__ior__({"b": 1}),
        state.clear,
        lambda: state.pop("a"),
        state.popitem,
        lambda: state.setdefault("b", 1),
        lambda: state.update(b=1),
    ]
    for change in changes:
        with pytest.raises(
            InvalidArgument, match="state must not be changed while steps run concurrently, got a change"
        ):
            change()
    assert state == {"a": 1}


async def test_the_loop_is_free_while_a_run_waits() -> None:
    async with Rig(None, VirtualClock()) as rig:
        task = asyncio.ensure_future(rig.go(lambda ctx: ctx.wait_for_signal("go")))
        await asyncio.sleep(0.01)
        assert not task.done()
        await rig.runner.signal("r", "go", 1)
        await soon(task.done)
        assert task.result().final_output == {"value": 1}


@dataclass
class Once:
    """Built the first time only: what is recorded of it cannot be read again."""

    made: list[int]

    def __post_init__(self) -> None:
        if self.made:
            raise ValueError("once only")
        self.made = [1]


async def test_a_result_that_cannot_be_read_again_is_no_result_of_its_step(place: Path | None) -> None:
    async def make() -> Once:
        return Once([])

    async with Rig(place) as rig:
        error = (await rig.go(lambda ctx: ctx.step("once", make))).error
        assert error is not None
        assert (error.type, "Once could not be constructed: ValueError: once only" in error.message) == (
            "UnserialisableResult",
            True,
        )
        assert [record.kind for record in await rig.records() if record.name == "once"][-1] == "failed"
