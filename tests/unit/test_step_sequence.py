"""Lists of steps over the journal: recorded once, resumed, matched, told as events."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import datetime as dt
import enum
import pickle
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._core.codec.json import MAX_RESULT, decode, encode
from agent_runtime_core._execution.run_control import Stop
from agent_runtime_core._execution.step_runner import result_not_serializable
from agent_runtime_core.errors import (
    InvalidArgument,
    JournalMismatch,
    StepCancelledError,
    StepExecutionError,
    StepInDoubt,
    StorageBusy,
    StorageFull,
    UnserialisableResult,
)
from agent_runtime_core.interfaces import RunContext
from agent_runtime_core.portal import from_thread
from agent_runtime_core.runner import open_run, open_run_sync
from agent_runtime_core.steps import AlreadyDone, Backoff, State, Step, StepExecutor, register_type
from agent_runtime_core.testing import MockRunContext
from tests.support.cases import for_each
from tests.support.runs import Rig, soon


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Point:
    x: int
    colour: Colour


class Calls(list[str]):
    """Steps that note that they ran."""

    def step(self, name: str, value: Any = None, **options: Any) -> Step:
        async def fn(ctx: Any, state: Any) -> Any:
            self.append(name)
            return name.upper() if value is None else value

        return Step(name, fn, **options)

    def bad(self, name: str, failures: int = 99, **options: Any) -> Step:
        left = [failures]

        async def fn(ctx: Any, state: Any) -> str:
            self.append(name)
            if left[0]:
                left[0] -= 1
                raise ConnectionError(f"{name} is down")
            return name.upper()

        return Step(name, fn, retry_delay=0, **options)


async def test_a_recorded_step_is_never_run_again(place: Path | None) -> None:
    calls = Calls()
    async with Rig(place) as rig:

        async def first(ctx: Any) -> Any:
            return await StepExecutor(ctx).run([calls.step("a"), calls.bad("b"), calls.step("c")])

        async def second(ctx: Any) -> Any:
            return await StepExecutor(ctx).run([calls.step("a"), calls.step("b"), calls.step("c")])

        failed = await rig.go(first)
        assert failed.error is not None
        assert (failed.error.type, failed.status) == ("StepExecutionError", "failed")
        assert await rig.value(second) == {"a": "A", "b": "B", "c": "C"}
        assert calls == ["a", "b", "b", "c"]
        assert await rig.told("step.skipped") == [
            ("step.skipped", {"step_name": "a", "step_index": 0, "total_steps": 3, "reason": "already_completed"})
        ]


async def test_the_events_are_those_of_a_plain_context(place: Path | None) -> None:
    def steps() -> list[Step]:
        calls = Calls()
        return [
            calls.step("a", description="first"),
            calls.bad("b", failures=2, retries=2),
            calls.step("c"),
            calls.bad("d", retries=1),
        ]

    mock = MockRunContext()
    with pytest.raises(StepExecutionError) as plain:
        await StepExecutor(mock).run(steps())
    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            with pytest.raises(StepExecutionError) as durable:
                await StepExecutor(ctx).run(steps())
            assert (str(durable.value), durable.value.attempts) == (str(plain.value), plain.value.attempts)
            assert isinstance(durable.value.__cause__, ConnectionError)

        await rig.value(body)
        told = [each for each in await rig.told() if not each[0].startswith("run.")]
    for _, payload in (*told, *mock.events):
        payload.pop("duration_ms", None)
    assert told == mock.events
    progress = [payload["progress_percent"] for kind, payload in told if kind == "progress.update"]
    assert progress == [0, 25, 25, 25, 50, 75, 75]


async def test_step_events_carry_ids_that_stay_the_same() -> None:
    async with Rig() as rig:

        async def body(ctx: Any) -> Any:
            keys = []

            async def fn(ctx: RunContext, state: Any) -> None:
                keys.append((ctx.step_id, ctx.idempotency_key))
                if len(keys) < 3:
                    raise ConnectionError

            await StepExecutor(ctx).run([Step("a", fn, retries=2, retry_delay=0)])
            assert ctx.step_id is None
            assert ctx.idempotency_key is None
            assert len(set(keys)) == 1
            assert keys[0][1] == f"{ctx.run_id}:{keys[0][0]}"
            return keys[0][0]

        step_id = await rig.value(body)
        events = await rig.runner.event_bus.get_events("r")
        ours = [e.payload for e in events if e.event_type.startswith(("step.", "progress."))]
        assert len(ours) == 9
        assert {each["step_id"] for each in ours} == {step_id}
        assert {each["trace_id"] for each in ours} == {events[0].run_id.hex}


async def test_state_is_as_last_committed_for_every_try(place: Path | None) -> None:
    seen: list[list[int]] = []

    async def dirty(ctx: Any, state: State) -> None:
        seen.append(list(state["list"]))
        state["list"].append(len(seen))
        state["junk"] = len(seen)
        if len(seen) % 2:
            raise ConnectionError

    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            executor = StepExecutor(ctx)
            steps = [Step(name, dirty, retries=1, retry_delay=0) for name in "ab"]
            await executor.run(steps, initial_state={"list": []})
            assert executor.state.custom_state == {"list": [2, 4], "junk": 4}
            assert executor.state.completed_steps == ["a", "b"]
            assert executor.state.current_step_index == 2

        await rig.value(body)
    assert seen == [[], [], [2], [2]]


async def test_what_a_failed_step_wrote_is_in_no_later_list() -> None:
    seen: list[Any] = []

    async def fails(ctx: Any, state: State) -> None:
        state["dirty"] = True
        raise ValueError("no")

    async def looks(ctx: Any, state: State) -> None:
        seen.append(dict(state))

    async with Rig() as rig:

        async def body(ctx: Any) -> Any:
            executor = StepExecutor(ctx)
            with pytest.raises(StepExecutionError):
                await executor.run([Step("fails", fails)])
            seen.append(dict(executor.state.custom_state))
            await executor.run([Step("looks", looks)])

        await rig.value(body)
    assert seen == [{}, {}]


async def test_state_survives_to_the_next_life_and_results_are_read_by_name(place: Path | None) -> None:
    async def puts(ctx: Any, state: State) -> str:
        state["n"] = state["n"] + 1
        return "A"

    async def crash(ctx: Any, state: State) -> None:
        state["n"] = 99
        raise ConnectionError

    async def reads(ctx: Any, state: State) -> list[Any]:
        with pytest.raises(TypeError):
            state.results["x"] = 1  # type: ignore[index]
        return [state["n"], state.results["a"], dict(state)]

    async with Rig(place) as rig:

        def body(last: Any) -> Any:
            async def run(ctx: Any) -> Any:
                return await StepExecutor(ctx).run([Step("a", puts), Step("b", last)], initial_state={"n": 0})

            return run

        await rig.go(body(crash))
        assert await rig.value(body(reads)) == {"a": "A", "b": [1, "A", {"n": 1}]}


async def _stores_its_state(ctx: Any, *, graph: bool) -> None:
    """Steps that return, emit and checkpoint what they are given, over any context."""

    async def a(ctx: Any, state: State) -> Any:
        if not graph:
            state["n"] = 1
        return state

    async def b(ctx: Any, state: State) -> Any:
        told = {"state": state, "results": state.results}
        await ctx.emit("told", told)
        await ctx.checkpoint({**(await ctx.get_state() or {}), **told})
        assert [copy.deepcopy(state), pickle.loads(pickle.dumps(state))] == [state, state]
        return [state, state.results]

    executor = StepExecutor(ctx)
    given = await executor.run([Step("a", a), Step("b", b, depends_on=["a"] if graph else [])], initial_state={"n": 1})
    assert [given["b"], type(given["a"]), *map(type, given["b"])] == [[{"n": 1}, {"a": {"n": 1}}], dict, dict, dict]
    assert type(executor.state.custom_state) is dict
    kept = await ctx.get_state()
    assert [kept["state"], kept["results"]] == given["b"]
    assert [type(kept["state"]), type(kept["results"])] == [dict, dict]


@pytest.mark.parametrize("graph", [False, True])
async def test_state_and_results_are_plain_dicts_to_whoever_stores_them(place: Path | None, graph: bool) -> None:
    async with Rig(place) as rig:
        await rig.value(lambda ctx: _stores_its_state(ctx, graph=graph))
        told = next(each for each in await rig.runner.event_bus.get_events("r") if each.event_type == "told")
        assert told.payload == {"state": {"n": 1}, "results": {"a": {"n": 1}}} | {
            name: told.payload[name] for name in ("step_id", "trace_id")
        }
    ctx = MockRunContext()
    await _stores_its_state(ctx, graph=graph)
    assert ctx.get_events("told") == [("told", {"state": {"n": 1}, "results": {"a": {"n": 1}}})]


async def test_the_state_of_an_executor_is_a_plain_dict_also_when_a_step_failed() -> None:
    async def fails(ctx: Any, state: State) -> None:
        raise ValueError("no")

    async with Rig() as rig:

        async def body(ctx: Any) -> Any:
            executor = StepExecutor(ctx)
            with pytest.raises(StepExecutionError):
                await executor.run([Step("fails", fails)], initial_state={"n": 1})
            return executor.state.custom_state if type(executor.state.custom_state) is dict else None

        assert await rig.value(body) == {"n": 1}


async def test_what_a_step_still_holds_on_to_does_not_change_the_state() -> None:
    kept: list[Any] = []

    async def first(ctx: Any, state: State) -> None:
        state["list"] = [1]
        kept.append(state["list"])

    async def second(ctx: Any, state: State) -> Any:
        kept[0].append(2)
        return state["list"]

    async with Rig() as rig:
        value = await rig.value(lambda ctx: StepExecutor(ctx).run([Step("a", first), Step("b", second)]))
        assert value["b"] == [1]


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("journal", [False, True])
async def test_what_a_step_changes_in_a_result_is_its_own(place: Path | None, graph: bool, journal: bool) -> None:
    async def first(ctx: Any, state: State) -> Any:
        return {"list": [1]}

    async def changes(ctx: Any, state: State) -> Any:
        state.results["a"]["list"].append(2)
        tried.append([*state.results["a"]["list"]])
        if len(tried) == 1:
            raise ConnectionError("again")
        for result in state.results.values():
            result.clear()
        with pytest.raises(TypeError):
            state.results["a"] = 1  # type: ignore[index]

    async def reads(ctx: Any, state: State) -> Any:
        return [state.results["a"], dict(state.results), "a" in state.results, len(state.results), repr(state.results)]

    tried: list[Any] = []
    steps = [
        Step("a", first),
        Step("b", changes, retries=1, retry_delay=0, depends_on=["a"] if graph else ()),
        Step("c", reads, depends_on=["b"] if graph else ()),
    ]
    if journal:
        async with Rig(place) as rig:
            value = await rig.value(lambda ctx: StepExecutor(ctx).run(steps))
    else:
        value = await StepExecutor(MockRunContext()).run(steps)
    both = {"a": {"list": [1]}, "b": None}
    assert [value["a"], tried] == [both["a"], [[1], [1]]]
    assert value["c"] == [both["a"], both, True, 2, repr(both)]


@pytest.mark.parametrize("journal", [True, False])
async def test_a_state_whose_text_stays_the_same_is_handed_on_as_a_resumed_run_would_read_it(journal: bool) -> None:
    class Name(enum.StrEnum):
        X = "x"

    async def first(ctx: Any, state: State) -> None:
        state.update(text="x", inside=["x"], one=[1], same=[1])

    async def second(ctx: Any, state: State) -> None:
        state["text"] = state["inside"][0] = Name.X
        state["same"] = state["one"]

    async def third(ctx: Any, state: State) -> Any:
        state["one"].append(2)
        return [type(state["text"]) is str, type(state["inside"][0]) is str, state["same"]]

    async def last(ctx: Any, state: State) -> None:
        state["text"] = Name.X

    async def body(ctx: Any) -> Any:
        executor = StepExecutor(ctx)
        found = await executor.run([Step("a", first), Step("b", second), Step("c", third), Step("d", last)])
        return [*found["c"], type(executor.state.custom_state["text"]) is str]

    if journal:
        async with Rig() as rig:
            assert await rig.value(body) == [True, True, [1], True]
    else:
        assert await body(MockRunContext()) == [True, True, [1], True]


async def test_the_first_pass_hands_on_what_a_resumed_run_would_read(place: Path | None) -> None:
    async def point(ctx: Any, state: State) -> Point:
        return Point(1, Colour.RED)

    async def bare(ctx: Any, state: State) -> Any:
        return {"when": dt.date(2026, 1, 2), "t": (1, {2})}

    async def untyped(ctx, state):  # type: ignore[no-untyped-def]
        return Point(2, Colour.RED)

    made: list[Any] = []
    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            steps = [Step("typed", point), Step("bare", bare), Step("named", untyped, returns=Point)]
            made.append(await StepExecutor(ctx).run(steps))
            if len(made) == 1:
                raise ConnectionError

        await rig.go(body)
        await rig.go(body)
    assert made[0] == made[1]
    assert made[0]["typed"] == Point(1, Colour.RED)
    assert made[0]["bare"] == {"when": dt.date(2026, 1, 2), "t": (1, {2})}
    assert made[0]["named"] == Point(2, Colour.RED)


async def test_one_function_in_steps_of_different_types_comes_back_as_each_says(place: Path | None) -> None:
    values = iter([Point(1, Colour.RED), Point(2, Colour.RED), Colour.RED, {"x": 1}])

    async def following(ctx, state):  # type: ignore[no-untyped-def]
        return next(values)

    made: list[Any] = []
    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            types = {"point": Point, "again": Point, "colour": Colour, "bare": None}
            made.append(await StepExecutor(ctx).run([Step(name, following, returns=of) for name, of in types.items()]))
            if len(made) == 1:
                raise ConnectionError

        await rig.go(body)
        await rig.go(body)
    assert made[0] == made[1]
    assert made[1]["again"] == Point(2, Colour.RED)
    assert made[1]["colour"] is Colour.RED
    assert made[1]["bare"] == {"x": 1}


async def test_a_registered_type_is_kept_wherever_it_stands() -> None:
    @register_type
    @dataclass
    class ChainNote:
        text: str

    async def fn(ctx: Any, state: State) -> Any:
        state["note"] = ChainNote("s")
        return {"deep": [ChainNote("r")]}

    async with Rig() as rig:

        async def body(ctx: Any) -> Any:
            executor = StepExecutor(ctx)
            value = (await executor.run([Step("a", fn)]))["a"]
            assert executor.state.custom_state == {"note": ChainNote("s")}
            return value

        assert await rig.value(body) == {"deep": [ChainNote("r")]}


async def test_a_result_that_cannot_be_kept_is_refused_with_its_path(place: Path | None) -> None:
    calls: list[int] = []

    async def fn(ctx: Any, state: Any) -> Any:
        calls.append(1)
        return {"items": [1, {"when": object()}]}

    async with Rig(place) as rig:

        async def body(ctx: Any) -> None:
            with pytest.raises(UnserialisableResult, match=r"\$\.items\[1\]\.when"):
                await StepExecutor(ctx).run([Step("a", fn, retries=5)])
            raise UnserialisableResult("$", "as a run would")

        result = await rig.go(body)
        assert len(calls) == 1
        assert result.error is not None
        assert result.error.retriable is False


async def test_what_waits_for_a_checkpoint_is_written_with_the_next_one_though_its_list_failed(
    place: Path | None,
) -> None:
    calls: list[str] = []
    lives = 0

    def step(name: str, failures: int = 0, **options: Any) -> Step:
        async def fn(ctx: Any, state: Any) -> list[str]:
            calls.append(name)
            if calls.count(name) <= failures:
                raise ConnectionError("down")
            state["seen"] = [*state.get("seen", ()), name]
            return list(state["seen"])

        return Step(name, fn, **options)

    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            nonlocal lives
            lives += 1
            steps = [step("a", checkpoint=False), step("b", 1)]
            if lives == 1:
                with pytest.raises(StepExecutionError):
                    await StepExecutor(ctx).run(steps)
            done = await StepExecutor(ctx).run(steps)
            if lives == 1:
                raise ConnectionError("cut")
            return done

        await rig.go(body)
        assert await rig.value(body) == {"a": ["a"], "b": ["a", "b"]}
        assert calls == ["a", "b", "b"]
        events = await rig.runner.event_bus.get_events("r")
        assert [event.sequence for event in events] == list(range(len(events)))


@pytest.mark.parametrize("way", ["refused", "no answer", "cancelled", "cancelled twice"])
@pytest.mark.parametrize("graph", [False, True])
async def test_what_waits_for_a_checkpoint_that_does_not_land_is_written_with_the_next_one(
    graph: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    inside = asyncio.Event()
    away = True

    def step(name: str, *after: str, **options: Any) -> Step:
        async def fn(ctx: Any, state: Any) -> str:
            ran.append(name)
            if name == "hang" and ran.count(name) == 1:
                inside.set()
                await asyncio.Event().wait()
            return name

        return Step(name, fn, depends_on=after if graph else (), **options)

    async def body(ctx: Any) -> Any:
        nonlocal away
        steps = [step("a", checkpoint=False), step("b", "a")]
        for _ in range(2 if way == "cancelled twice" else 1):
            with contextlib.suppress(StorageFull, StorageBusy, asyncio.CancelledError):
                await StepExecutor(ctx).run(steps)
        away = False
        await StepExecutor(ctx).run(steps)
        return await StepExecutor(ctx).run([step("hang")])

    async with Rig() as rig:
        engine, state = rig.runner.queue.commits, rig.runner.state_store
        commit, records = engine.commit, state.records

        async def cancelled_again(*args: Any) -> Any:
            monkeypatch.setattr(state, "records", records)
            raise asyncio.CancelledError

        async def lost(guard: Any, ops: Any) -> Any:
            if away and any(op.name == "journal.append" and op.args[1][1:3] == ("done", "b") for op in ops):
                if way == "refused":
                    raise StorageFull("no room")
                if way == "no answer":
                    raise StorageBusy("did not answer")
                if way == "cancelled twice":  # while it is being found out whether it landed
                    monkeypatch.setattr(state, "records", cancelled_again)
                raise asyncio.CancelledError
            return await commit(guard, ops)

        monkeypatch.setattr(engine, "commit", lost)
        await rig.cut(body, inside)
        assert await rig.value(body) == {"hang": "hang"}
    # What was refused has no end that anybody could count on.
    assert ran == ["a", "b", *(["b"] if way == "refused" else []), "hang", "hang"]


async def test_a_state_that_cannot_be_kept_fails_the_step() -> None:
    """Its function has returned, so a guarded step is in doubt: it does not run again in the next life."""

    async def fn(ctx: Any, state: State) -> None:
        state["bad"] = object()

    async with Rig() as rig:

        def listing(**how: Any) -> Any:
            async def body(ctx: Any) -> None:
                with pytest.raises(
                    UnserialisableResult, match=r"^step 'a': state\.bad: an object has no JSON form"
                ) as caught:
                    await StepExecutor(ctx).run([Step("a", fn, **how)])
                assert (caught.value.path, caught.value.step_name) == ("state.bad", "a")
                raise ConnectionError("cut")

            return body

        for life in (1, 2):
            await rig.go(listing())
            assert [kind for kind, _ in await rig.told("step.")] == ["step.started", "step.failed"] * life
        await rig.go(listing(on_in_doubt="fail"), "guarded")
        result = await rig.go(listing(on_in_doubt="fail"), "guarded")
        assert [kind for kind, _ in await rig.told("step.", "guarded")] == ["step.started"]
        assert result.error is not None
        assert result.error.type == "StepInDoubt"


@pytest.mark.parametrize("needs", [(), ("a",)])
@pytest.mark.parametrize("journal", [True, False])
async def test_an_initial_state_that_cannot_be_kept_is_refused_as_a_state(
    needs: tuple[str, ...], journal: bool
) -> None:
    calls = Calls()

    async def body(ctx: Any) -> None:
        with pytest.raises(
            UnserialisableResult, match=r"state\.bad: an object is not JSON-serializable\. Use a dict or a dataclass"
        ):
            await StepExecutor(ctx).run(
                [calls.step("a"), calls.step("b", depends_on=needs)], initial_state={"bad": object()}
            )

    if journal:
        async with Rig() as rig:
            await rig.value(body)
    else:
        await body(MockRunContext())
    assert calls == []


async def test_a_result_that_is_refused_names_its_step_and_the_way_out(place: Path | None) -> None:
    async def large(*_: Any) -> str:
        return "x" * 2**20

    async def larger(*_: Any) -> str:
        return "x" * 2**24

    async def odd(*_: Any) -> Any:
        return {"items": [1.5, float("nan")]}

    async def first(*_: Any) -> None: ...

    def tried(ctx: Any, kind: str, fn: Any, **more: Any) -> Any:
        executor = StepExecutor(ctx)
        if kind == "step":
            return ctx.step("fetch", fn, **more)
        if kind == "map":
            return executor.map("fetch", fn, [1], **more)
        if kind == "list":
            return executor.run([Step("fetch", fn, **more)])
        return executor.run([Step("first", first), Step("fetch", fn, depends_on=["first"], **more)])

    out = r"use its address, or raise the limit of the step with max_result_bytes=, up to 16,777,216$"

    async def body(ctx: Any, *kinds: str) -> None:
        for kind in kinds:
            with pytest.raises(
                UnserialisableResult,
                match=r"^step 'fetch' returned a value that cannot be stored, at \$: larger than 1,048,576 "
                rf"bytes .*{out}",
            ):
                await tried(ctx, kind, large)
            with pytest.raises(
                UnserialisableResult,
                match=r"that cannot be stored, at \$: larger than 16,777,216 bytes as JSON: it has ",
            ):
                await tried(ctx, kind, larger, max_result_bytes=2**24)
            with pytest.raises(
                UnserialisableResult,
                match=r"step 'fetch' returned a value that cannot be stored, at \$\.items\[1\]: nan",
            ) as refused:
                await tried(ctx, kind, odd)
            assert (refused.value.step_name, refused.value.path) == ("fetch", "$.items[1]")

    async with Rig(place) as rig:
        await rig.value(lambda ctx: body(ctx, "step", "list", "graph", "map"))
    await body(MockRunContext(), "list", "graph", "map")


def test_a_larger_limit_is_not_advised_where_it_allows_no_more_parts() -> None:
    for value, advised in (([0] * 600_000, False), ({"n": [0] * 600_000, 1: 1}, False), ("x" * 2**21, True)):
        with pytest.raises(UnserialisableResult) as refused:
            encode(value, max_bytes=MAX_RESULT)
        error = result_not_serializable("fetch", refused.value)
        assert ("max_result_bytes" in str(error)) is advised


async def test_a_large_result_is_kept_where_the_step_says_so(place: Path | None) -> None:
    long = "x" * 2**20

    async def fn(*_: Any) -> str:
        return long

    async def body(ctx: Any) -> None:
        executor = StepExecutor(ctx)
        for small in (executor.run([Step("a", fn)]), ctx.step("b", fn), executor.map("c", fn, [1])):
            with pytest.raises(UnserialisableResult, match="larger than 1,048,576 bytes"):
                await small
        more: dict[str, Any] = {"max_result_bytes": 2**21}
        assert await executor.run([Step("d", fn, **more)]) == {"d": long}
        assert await ctx.step("e", fn, **more) == long
        assert await executor.map("f", fn, [1], **more) == [long]

    async with Rig(place) as rig:
        await rig.value(body)
    with pytest.raises(InvalidArgument, match="max_result_bytes"):
        Step("a", fn, max_result_bytes=0)


async def test_checkpoint_false_commits_with_the_next_checkpointed_step(place: Path | None) -> None:
    calls = Calls()
    async with Rig(place) as rig:

        def body(last: Step, *more: Step) -> Any:
            light = [calls.step("b", checkpoint=False), calls.step("c", checkpoint=False)]
            return lambda ctx: StepExecutor(ctx).run([calls.step("a"), *light, last, *more])

        await rig.go(body(calls.bad("d")))
        done = [record.name for record in await rig.records() if record.kind == "done"]
        assert done == ["a"]
        await rig.go(body(calls.step("d"), calls.bad("e")))
        done = [record.name for record in await rig.records() if record.kind == "done"]
        assert done == ["a", "b", "c", "d"]
        assert calls == ["a", "b", "c", "d", "b", "c", "d", "e"]
        await rig.value(body(calls.step("d"), calls.step("e")))
        assert calls[8:] == ["e"]
        records = await rig.records()
        assert [record.seq for record in records] == sorted({record.seq for record in records})
        events = await rig.runner.event_bus.get_events("r")
        assert [event.sequence for event in events] == list(range(len(events)))


async def test_a_list_that_ends_without_a_checkpoint_is_recorded_at_its_end(place: Path | None) -> None:
    calls = Calls()
    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            await StepExecutor(ctx).run([calls.step("a"), calls.step("b", checkpoint=False)])
            raise ConnectionError

        await rig.go(body)
        await rig.go(body)
        assert calls == ["a", "b"]


async def test_resume_false_runs_a_recorded_list_anew_and_that_stays(place: Path | None) -> None:
    calls = Calls()
    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            executor = StepExecutor(ctx)
            await executor.run([calls.step("a")], initial_state={"n": 1})
            again = await executor.run([calls.step("a", "new")], resume=False)
            if len(calls) == 2:
                raise ConnectionError
            return again

        await rig.go(body)
        assert calls == ["a", "a"]
        assert await rig.value(body) == {"a": "new"}
        # The second life was told to begin anew as well.
        assert calls == ["a", "a", "a"]


@pytest.mark.parametrize(
    ("now", "found"), [(["b", "a", "c"], "b"), (["a", "x", "c"], "x"), (["a"], None), (["x", "a", "b"], "x")]
)
async def test_another_list_than_the_recorded_one_is_refused(
    place: Path | None, now: list[str], found: str | None
) -> None:
    calls = Calls()
    async with Rig(place) as rig:
        await rig.go(lambda ctx: StepExecutor(ctx).run([calls.step("a"), calls.step("b"), calls.bad("c")]))
        before = len(calls)

        async def changed(ctx: Any) -> None:
            with pytest.raises(JournalMismatch) as caught:
                await StepExecutor(ctx).run([calls.step(name) for name in now])
            assert caught.value.found == found
            assert caught.value.recorded in ("a", "b")
            assert repr(caught.value.recorded) in str(caught.value)
            assert ("no step" if found is None else repr(found)) in str(caught.value)

        await rig.value(changed)
        assert len(calls) == before


@pytest.mark.parametrize("graph", [False, True])
async def test_lists_side_by_side_under_one_key_come_in_any_order(place: Path | None, graph: bool) -> None:
    ran, seen, turn = list[str](), set[tuple[str, Any]](), {name: asyncio.Event() for name in "ab"}
    inside, first_life = asyncio.Event(), True

    def step(name: str, **options: Any) -> Step:
        async def fn(ctx: Any, state: Any) -> str:
            if name.endswith("2") and first_life:
                if name == "a2":  # the last that is begun
                    inside.set()
                await asyncio.Event().wait()
            ran.append(name)
            if name == "b1":
                turn["a"].set()
            if name.endswith("1") and not graph:
                state["by"] = name
            seen.add((name, state.get("by")))
            return name.upper()

        return Step(name, fn, **options)

    async def body(ctx: Any) -> Any:
        async def branch(name: str) -> Any:
            steps = [step(f"{name}{n}", depends_on=[f"{name}{n - 1}"] if graph and n > 1 else []) for n in (1, 2, 3)]
            await turn[name].wait()
            return await StepExecutor(ctx).run(steps)

        before = await StepExecutor(ctx).run([step("m1")])
        return [before, *await asyncio.gather(branch("a"), branch("b")), await StepExecutor(ctx).run([step("n1")])]

    async with Rig(place) as rig:
        turn["b"].set()
        await rig.cut(body, inside)
        assert ran == ["m1", "b1", "a1"]
        seen.clear()
        first_life = False  # both may go on, and "a" is the first
        lists = [["m1"], ["a1", "a2", "a3"], ["b1", "b2", "b3"], ["n1"]]
        assert await rig.value(body) == [{name: name.upper() for name in names} for names in lists]
        assert sorted(ran) == sorted(name for names in lists for name in names)
        if not graph:  # each goes on with its own state
            assert seen >= {("a2", "a1"), ("a3", "a1"), ("b2", "b1"), ("b3", "b1")}


class Looked(dict[Any, Any]):
    """Counts the entries that are gone through."""

    def __init__(self, values: Any) -> None:
        super().__init__(values)
        self.entries = 0

    def items(self) -> Any:
        for each in super().items():
            self.entries += 1
            yield each


@pytest.mark.parametrize("apart", [False, True], ids=["one after the other", "side by side"])
@pytest.mark.parametrize("graph", [False, True], ids=["chain", "graph"])
async def test_what_a_list_looks_at_does_not_grow_with_the_lists_before_it(graph: bool, apart: bool) -> None:
    looked: list[int] = []

    async def body(ctx: Any) -> None:
        calls, lists = Calls(), ctx.input["lists"]
        ctx.journal.view.completed = Looked(ctx.journal.view.completed)
        made = [
            StepExecutor(ctx, checkpoint_key=f"key {n if apart else 0}").run(
                [calls.step(f"{n}-a"), calls.step(f"{n}-b", depends_on=[f"{n}-a"] if graph else ())]
            )
            for n in range(lists)
        ]
        if apart:
            await asyncio.gather(*made)
        else:
            for each in made:
                await each
        looked.append(ctx.journal.view.completed.entries)
        if len(looked) % 2:
            raise ConnectionError("cut")

    async with Rig() as rig:
        for lists in (20, 20, 40, 40):
            await rig.go(body, f"{lists} lists", input_data={"lists": lists})
    few, few_resumed, many, many_resumed = looked
    assert few_resumed > 0, "what was recorded is looked at"
    assert many <= 2 * few
    assert many_resumed <= 2 * few_resumed


@pytest.mark.parametrize("now", ["axb", "xb", "ba"])
async def test_a_list_beside_others_that_is_not_the_recorded_one_is_refused(place: Path | None, now: str) -> None:
    calls = Calls()

    async def lists(ctx: Any, *names: str) -> tuple[Any, ...]:
        made = [[calls.bad(name) if name in "yz" else calls.step(name) for name in of] for of in names]
        return tuple(await asyncio.gather(*(StepExecutor(ctx).run(each) for each in made), return_exceptions=True))

    async def first(ctx: Any) -> None:
        await lists(ctx, "abz", "cdy")
        raise ConnectionError

    async def changed(ctx: Any) -> None:
        refused, same, new = await lists(ctx, now, "cde", "fg")
        assert isinstance(refused, JournalMismatch)
        assert refused.recorded in ("a", "b")
        assert (list(same), list(new)) == (["c", "d", "e"], ["f", "g"])

    async with Rig(place) as rig:
        await rig.go(first)
        await rig.value(changed)
        assert sorted(calls) == sorted("abzcdyefg")


async def test_a_mismatch_fails_the_run_for_good() -> None:
    calls = Calls()
    async with Rig(max_retries=3) as rig:
        await rig.go(lambda ctx: StepExecutor(ctx).run([calls.step("a"), calls.bad("b")]))
        result = await rig.go(lambda ctx: StepExecutor(ctx).run([calls.step("z")]))
        assert result.error is not None
        assert (result.error.type, result.error.retriable) == ("JournalMismatch", False)
        assert len(await rig.told("run.started")) == 4


async def test_steps_added_at_the_end_are_fine_and_renamed_ones_with_a_word(place: Path | None) -> None:
    calls = Calls()
    async with Rig(place) as rig:
        await rig.go(lambda ctx: StepExecutor(ctx).run([calls.step("a"), calls.step("b"), calls.bad("c")]))

        async def renamed(ctx: Any) -> Any:
            ctx.renamed("b", "bb")
            return await StepExecutor(ctx).run([calls.step(name) for name in ("a", "bb", "c", "d")])

        assert await rig.value(renamed) == {"a": "A", "bb": "B", "c": "C", "d": "D"}
        assert calls == ["a", "b", "c", "c", "d"]


@for_each("old", ["a", "b"])
@for_each("lines", [["ab", "bc"], ["bc", "ab"], ["ac", "bc"], ["ab", "bc", "ca"]])
@for_each("door", ["chain", "apart", "graph", "step"])
async def test_a_step_that_was_renamed_more_than_once_is_found(old: str, lines: list[str], door: str) -> None:
    calls = Calls()

    def body(name: str, lines: list[str], *, ends: bool) -> Any:
        async def run(ctx: Any) -> Any:
            for line in lines:
                ctx.renamed(*line)
            if door == "step":
                value = {name: await ctx.step(name, lambda: calls.append(name) or name)}  # type: ignore[func-returns-value]
            else:
                steps = [calls.step("first"), calls.step(name, depends_on=["first"] if door == "graph" else ())]
                ran = StepExecutor(ctx).run(steps)
                value = await (asyncio.ensure_future(ran) if door == "apart" else ran)
            if not ends:
                raise ConnectionError
            return value["c"]

        return run

    async with Rig() as rig:
        await rig.go(body(old, [], ends=False))
        before = len(calls)
        assert await rig.value(body("c", lines, ends=True)) in (old, old.upper())
        assert len(calls) == before


async def test_two_executors_with_keys_of_their_own_do_not_meet(place: Path | None) -> None:
    calls, lives = Calls(), list[int]()
    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            lives.append(1)
            one = await StepExecutor(ctx, checkpoint_key="one").run([calls.step("a", 1)])
            two = await StepExecutor(ctx, checkpoint_key="two").run([calls.step("a", 2)])
            if len(lives) == 1:
                raise ConnectionError
            return [one, two]

        await rig.go(body)
        assert await rig.value(body) == [{"a": 1}, {"a": 2}]
        assert calls == ["a", "a"]


async def test_two_lists_of_one_executor_share_their_names() -> None:
    calls = Calls()
    async with Rig() as rig:

        async def body(ctx: Any) -> Any:
            executor = StepExecutor(ctx)
            await executor.run([calls.step("a")])
            return await executor.run([calls.step("b"), calls.step("c")])

        assert await rig.value(body) == {"b": "B", "c": "C"}


async def test_a_cancelled_run_stops_before_its_next_step(place: Path | None) -> None:
    calls = Calls()
    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            async def cancels(ctx: Any, state: Any) -> None:
                ctx.control.stop(Stop.CANCEL)

            with pytest.raises(StepCancelledError) as caught:
                await StepExecutor(ctx).run([Step("a", cancels), calls.step("b")])
            assert caught.value.step_name == "b"
            raise caught.value

        result = await rig.go(body)
        assert result.status == "cancelled"
        assert calls == []
        assert [about["step_name"] for kind, about in await rig.told("step.started")] == ["a"], "that of b never began"


async def test_a_step_that_takes_too_long_timed_out(place: Path | None) -> None:
    async def forever(ctx: Any, state: Any) -> None:
        await asyncio.Event().wait()

    async with Rig(place) as rig:

        async def body(ctx: Any) -> None:
            with pytest.raises(StepExecutionError, match=r"timed out after 0\.01 s"):
                await StepExecutor(ctx).run([Step("slow", forever, timeout=0.01)])

        await rig.value(body)


async def test_a_step_that_will_not_stop_is_abandoned_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agent_runtime_core._core.timeouts.GRACE", 0.01)
    release = asyncio.Event()

    async def stubborn(ctx: Any, state: Any) -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    async with Rig() as rig:

        async def body(ctx: Any) -> None:
            with pytest.raises(StepExecutionError, match="timed out"):
                await StepExecutor(ctx).run([Step("mule", stubborn, timeout=0.01)])

        await rig.value(body)
    assert "'mule' did not stop within 0.01 s" in caplog.text
    release.set()
    await asyncio.sleep(0)


async def test_a_thread_that_goes_on_is_named_without_a_journal_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agent_runtime_core._core.timeouts.GRACE", 0.01)
    gate = threading.Event()

    def digs(ctx: Any, state: Any) -> None:
        gate.wait()

    with pytest.raises(StepExecutionError, match="timed out"):
        await StepExecutor(MockRunContext()).run([Step("mole", digs, timeout=0.01)])
    await soon(lambda: bool(caplog.messages))
    gate.set()
    assert "step 'mole' did not stop within 0.01 s of being cancelled: it runs on in its thread" in caplog.text


async def test_backoff_takes_the_place_of_the_fixed_delay() -> None:
    calls = Calls()
    async with Rig() as rig:
        backoff = Backoff(base=10, factor=3, maximum=50, jitter="none")
        step = calls.bad("a", failures=3, retries=3, backoff=backoff)
        await rig.value(lambda ctx: StepExecutor(ctx).run([step]))
        delays = [payload["retry_delay"] for _, payload in await rig.told("step.retrying")]
        assert delays == [10, 30, 50]
        assert rig.clock.boot() == 90


async def test_retry_on_decides_what_is_tried_again() -> None:
    async with Rig() as rig:
        for n, retry_on in enumerate((ValueError, (ValueError, KeyError), lambda error: isinstance(error, ValueError))):
            calls = Calls()

            async def body(ctx: Any, retry_on: Any = retry_on, calls: Calls = calls) -> None:
                with pytest.raises(StepExecutionError):
                    await StepExecutor(ctx).run([calls.bad("a", retries=3, retry_on=retry_on)])

            await rig.value(body, f"r{n}")
            assert calls == ["a"]


# -- in doubt


async def _begun(rig: Rig, name: str = "pay", before: list[Step] | None = None) -> None:
    """A run that was taken away inside its step `name`."""
    inside = asyncio.Event()

    async def hangs(ctx: Any, state: Any) -> None:
        inside.set()
        await asyncio.Event().wait()

    await rig.cut(lambda ctx: StepExecutor(ctx).run([*(before or []), Step(name, hangs)]), inside)


async def test_a_step_in_doubt_runs_again_and_says_so(place: Path | None) -> None:
    calls = Calls()
    async with Rig(place) as rig:
        await _begun(rig)
        await rig.value(lambda ctx: StepExecutor(ctx).run([calls.step("pay")]))
        assert calls == ["pay"]
        assert ["in_doubt" in payload for _, payload in await rig.told("step.started")] == [False, True]


@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
async def test_a_step_in_doubt_may_fail(place: Path | None, later: bool) -> None:
    calls = Calls()
    before = [calls.step("before")] if later else []
    async with Rig(place, max_retries=5) as rig:
        await _begun(rig, before=before)

        async def body(ctx: Any) -> None:
            with pytest.raises(StepInDoubt) as caught:
                await StepExecutor(ctx).run([*before, calls.step("pay", on_in_doubt="fail", retries=3)])
            assert caught.value.step_name == "pay"
            raise caught.value

        result = await rig.go(body)
        assert result.error is not None
        assert (result.error.type, result.error.retriable) == ("StepInDoubt", False)
        assert "pay" not in calls


async def test_a_step_that_was_never_begun_is_not_in_doubt(place: Path | None) -> None:
    """A cancel between two steps leaves no doubt about the second."""
    calls = Calls()
    async with Rig(place) as rig:

        def body(cancel: bool) -> Any:
            async def run(ctx: Any) -> Any:
                async def first(ctx: Any, state: Any) -> None:
                    if cancel:
                        ctx.control.stop(Stop.CANCEL)

                return await StepExecutor(ctx).run([Step("a", first), calls.step("pay", on_in_doubt="fail")])

            return run

        assert (await rig.go(body(True))).status == "cancelled"
        assert await rig.value(body(False)) == {"a": None, "pay": "PAY"}


async def test_a_check_function_says_what_became_of_it(place: Path | None) -> None:
    calls = Calls()
    seen: list[Any] = []

    async def happened(ctx: RunContext) -> AlreadyDone:
        seen.append(ctx.idempotency_key)
        return AlreadyDone({"id": 7})

    def never(ctx: RunContext) -> None:
        seen.append(ctx.idempotency_key)

    async with Rig(place) as rig:
        for run_id, check, result, ran in (("y", happened, {"id": 7}, []), ("n", never, "PAY", ["pay"])):
            calls.clear()
            inside = asyncio.Event()

            async def hangs(ctx: Any, state: Any, inside: asyncio.Event = inside) -> None:
                inside.set()
                await asyncio.Event().wait()

            await rig.cut(lambda ctx, fn=hangs: StepExecutor(ctx).run([Step("pay", fn)]), inside, run_id)  # type: ignore[misc]
            value = await rig.value(
                lambda ctx, check=check: StepExecutor(ctx).run([calls.step("pay", on_in_doubt=check)]),  # type: ignore[misc]
                run_id,
            )
            assert (value, calls) == ({"pay": result}, ran)
        assert len(set(seen)) == 2
        assert all(key and key.count(":") == 1 for key in seen)


async def test_a_check_function_that_answers_something_else_is_told() -> None:
    async with Rig() as rig:
        await _begun(rig)

        async def body(ctx: Any) -> None:
            with pytest.raises(InvalidArgument, match="'yes'"):
                await StepExecutor(ctx).run([Calls().step("pay", on_in_doubt=lambda: "yes")])

        await rig.value(body)


@pytest.mark.parametrize(
    ("answer", "value", "ran"),
    [("retry", {"pay": "PAY"}, ["pay"]), ({"outcome": "done", "result": 3}, {"pay": 3}, []), ("failed", None, [])],
)
async def test_a_person_is_asked_about_a_step_in_doubt(
    place: Path | None, answer: Any, value: Any, ran: list[str]
) -> None:
    calls = Calls()
    async with Rig(place) as rig:
        await _begun(rig)

        async def body(ctx: Any) -> Any:
            return await StepExecutor(ctx).run([calls.step("pay", on_in_doubt="review")])

        going = asyncio.ensure_future(rig.go(body))
        await rig.begun()
        async for event in rig.runner.stream("r"):
            if event.event_type == "step.in_doubt":
                assert event.payload["step_name"] == "pay"
                await rig.runner.signal("r", event.payload["signal"], answer)
                break
        result = await going
        if value is None:
            assert result.error is not None
            assert "reviewed as failed" in result.error.message
        else:
            assert result.final_output["value"] == value
        assert calls == ran


async def test_a_step_whose_doubt_matters_has_its_start_recorded_before_it_runs(place: Path | None) -> None:
    async with Rig(place) as rig:
        kinds: list[Any] = []

        async def looks(ctx: Any, state: Any) -> None:
            kinds.append([(each.kind, each.name) for each in await rig.records()])

        await rig.value(lambda ctx: StepExecutor(ctx).run([Step("a", looks, on_in_doubt="fail")]))
        assert ("started", "a") in kinds[0]


# -- plain functions


async def test_plain_functions_run_in_a_thread_and_reach_back(place: Path | None) -> None:
    loop_thread = threading.get_ident()

    def plain(ctx: Any, state: State) -> bool:
        from_thread(ctx.emit, "hello", {"n": 1})
        state["n"] = 1
        return threading.get_ident() != loop_thread

    async with Rig(place) as rig:
        assert await rig.value(lambda ctx: StepExecutor(ctx).run([Step("a", plain)])) == {"a": True}
        assert await rig.told("hello") == [("hello", {"n": 1})]


async def test_a_plain_function_that_gives_a_coroutine_has_it_awaited() -> None:
    async def later() -> int:
        return 5

    async with Rig() as rig:
        assert await rig.value(lambda ctx: StepExecutor(ctx).run([Step("a", lambda ctx, state: later())])) == {"a": 5}


async def test_steps_written_as_methods_work() -> None:
    class Worker:
        async def a(self, ctx: RunContext, state: State) -> str:
            return "A"

        def b(self, ctx: RunContext, state: State) -> str:
            return "B"

        async def __call__(self, ctx: RunContext, state: State) -> str:
            return "C"

    worker = Worker()
    async with Rig() as rig:
        value = await rig.value(
            lambda ctx: StepExecutor(ctx).run([Step("a", worker.a), Step("b", worker.b), Step("c", worker)])
        )
        assert value == {"a": "A", "b": "B", "c": "C"}


async def test_an_error_inside_a_nested_list_comes_through_as_it_is() -> None:
    calls = Calls()

    async def outer(ctx: Any, state: Any) -> Any:
        return await StepExecutor(ctx, checkpoint_key="inner").run([calls.bad("leaf")])

    async with Rig() as rig:

        async def body(ctx: Any) -> None:
            with pytest.raises(StepExecutionError) as caught:
                await StepExecutor(ctx).run([Step("outer", outer)])
            assert caught.value.step_name == "leaf"

        await rig.value(body)


async def test_the_result_of_the_run_is_in_the_journal_as_it_was_returned() -> None:
    async with Rig() as rig:
        await rig.value(lambda ctx: StepExecutor(ctx).run([Calls().step("a", (1, 2))]))
        done = [record for record in await rig.records() if record.kind == "done"]
        assert decode(done[0].result or "") == (1, 2)


@pytest.mark.parametrize("graph", [False, True])
async def test_lists_inside_two_steps_are_two_and_are_resumed(place: Path | None, graph: bool) -> None:
    lives, ran = 0, list[str]()

    async def body(ctx: Any) -> Any:
        nonlocal lives
        lives += 1

        async def part(*names: str) -> dict[str, Any]:
            def fn(name: str) -> Any:
                def run(ctx: Any, state: Any) -> str:
                    ran.append(name)
                    if name == "write" and lives == 1:
                        raise ConnectionError("down")
                    return f"{names[0]} {name}"

                return run

            after = names[:1] if graph else ()
            steps = [Step(names[0], fn(names[0])), Step(names[1], fn(names[1]), depends_on=after)]
            return await StepExecutor(ctx).run(steps)

        first = await ctx.step("one", part, "load", "keep")
        second = await ctx.step("two", part, "fetch", "write")
        return [first, second, await ctx.step("three", part, "load", "write")]

    async with Rig(place) as rig:
        await rig.go(body)
        assert await rig.value(body) == [
            {"load": "load load", "keep": "load keep"},
            {"fetch": "fetch fetch", "write": "fetch write"},
            {"load": "load load", "write": "load write"},
        ]
    assert ran == ["load", "keep", "fetch", "write", "write", "load", "write"]


def test_what_is_no_context_is_refused_at_once() -> None:
    for wrong in (None, "jobs.db", open_run("memory://")):
        with pytest.raises(InvalidArgument, match="ctx must be the context of a run"):
            StepExecutor(wrong)
    with open_run_sync("memory://") as run, pytest.raises(InvalidArgument, match=r"without 'emit'\. Pass its ctx"):
        StepExecutor(run)


class _Once:
    """Lists of two steps whose run fails where it first comes to "write", and is cut off at its first "hang"."""

    def __init__(self, graph: bool) -> None:
        self.graph = graph
        self.ran: list[str] = []
        self.inside = asyncio.Event()

    async def run(self, ctx: Any, *names: str) -> dict[str, Any]:
        after = names[:1] if self.graph else ()
        steps = [Step(names[0], self._fn(names[0])), Step(names[1], self._fn(names[1]), depends_on=after)]
        return await StepExecutor(ctx).run(steps)

    def _fn(self, name: str) -> Any:
        async def run(ctx: Any, state: Any) -> str:
            self.ran.append(name)
            if name == "write" and self.ran.count(name) == 1:
                raise ConnectionError("down")
            if name == "hang" and self.ran.count(name) == 1:
                self.inside.set()
                await asyncio.Event().wait()
            return name

        return run


@pytest.mark.parametrize("graph", [False, True])
async def test_the_next_list_is_resumed_where_the_one_before_was_run_twice(place: Path | None, graph: bool) -> None:
    lists = _Once(graph)

    async def body(ctx: Any) -> Any:
        with contextlib.suppress(StepExecutionError):
            await lists.run(ctx, "load", "write")
        await lists.run(ctx, "load", "write")
        return await lists.run(ctx, "keep", "hang")

    async with Rig(place) as rig:
        await rig.cut(body, lists.inside)
        assert await rig.value(body) == {"keep": "keep", "hang": "hang"}
    assert lists.ran == ["load", "write", "write", "keep", "hang", "hang"]


@pytest.mark.parametrize("graph", [False, True])
async def test_lists_inside_a_step_that_was_tried_twice_are_resumed(place: Path | None, graph: bool) -> None:
    lists = _Once(graph)

    async def body(ctx: Any) -> Any:
        async def outer() -> Any:
            return [await lists.run(ctx, "load", "write"), await lists.run(ctx, "keep", "hang")]

        return await ctx.step("outer", outer, retries=1, retry_delay=0)

    async with Rig(place) as rig:
        await rig.cut(body, lists.inside)
        assert await rig.value(body) == [{"load": "load", "write": "write"}, {"keep": "keep", "hang": "hang"}]
    assert lists.ran == ["load", "write", "write", "keep", "hang", "hang"]


@pytest.mark.parametrize("graph", [False, True])
async def test_inside_a_step_a_list_may_take_the_place_of_one_that_failed(place: Path | None, graph: bool) -> None:
    lists = _Once(graph)

    async def body(ctx: Any) -> Any:
        async def outer() -> Any:
            try:
                first = await lists.run(ctx, "load", "write")
            except StepExecutionError:
                first = await lists.run(ctx, "instead", "hang")
            return [first, await lists.run(ctx, "keep", "tell")]

        return await ctx.step("outer", outer)

    async with Rig(place) as rig:
        await rig.cut(body, lists.inside)
        assert await rig.value(body) == [{"load": "load", "write": "write"}, {"keep": "keep", "tell": "tell"}]
    assert lists.ran == ["load", "write", "instead", "hang", "write", "keep", "tell"]


async def test_a_list_over_a_context_without_a_journal_reads_results_of_earlier_lists() -> None:
    async def first(ctx: Any, state: State) -> int:
        return 1

    async def second(ctx: Any, state: State) -> Any:
        return dict(state.results)

    ctx = MockRunContext()
    await StepExecutor(ctx).run([Step("a", first)])
    assert await StepExecutor(ctx).run([Step("b", second)]) == {"b": {"a": 1}}


async def test_a_context_without_a_journal_gets_the_end_of_a_step_without_a_checkpoint_at_once() -> None:
    calls, ctx = Calls(), MockRunContext()
    with pytest.raises(StepExecutionError):
        await StepExecutor(ctx).run([calls.step("a", checkpoint=False), calls.bad("b")])
    assert [payload["step_name"] for _, payload in ctx.get_events("step.completed")] == ["a"]
    assert ctx.get_checkpoints() == []
