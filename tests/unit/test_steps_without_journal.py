"""Steps over a context without a journal: what code written for 0.5.2 relies on."""

from __future__ import annotations

import asyncio
import copy
import datetime as dt
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core.errors import InvalidArgument, StepCancelledError, StepExecutionError, UnserialisableResult
from agent_runtime_core.interfaces import EventType, RunContext
from agent_runtime_core.steps import ExecutionState, State, Step, StepExecutor, StepResult, StepStatus
from agent_runtime_core.testing import MockRunContext
from tests.support.cases import for_each

KEY = "_step_executor_state"


def returning(value: Any) -> Any:
    async def fn(ctx: Any, state: dict[str, Any]) -> Any:
        return value

    return fn


class Flaky:
    """Fails so many times, then gives `value`."""

    def __init__(self, failures: int, value: Any = "ok") -> None:
        self.left, self.value, self.calls = failures, value, 0

    async def __call__(self, ctx: Any, state: dict[str, Any]) -> Any:
        self.calls += 1
        if self.left:
            self.left -= 1
            raise ConnectionError("down")
        return self.value


def of(ctx: MockRunContext, kind: str) -> list[dict[str, Any]]:
    return [payload for _, payload in ctx.get_events(kind)]


async def test_results_come_by_name_and_in_order() -> None:
    ctx = MockRunContext()
    order: list[str] = []

    async def first(ctx: RunContext, state: dict[str, Any]) -> int:
        order.append("first")
        return 1

    def second(ctx: RunContext, state: State) -> int:
        order.append("second")
        return int(state.results["first"]) + 1

    assert await StepExecutor(ctx).run([Step("first", first), Step("second", second)]) == {"first": 1, "second": 2}
    assert order == ["first", "second"]


class Foreign:
    """A context of somebody else's: what it is given, it looks at."""

    def __init__(self) -> None:
        self.kinds: list[EventType] = []

    async def emit(self, event_type: EventType, payload: dict[str, Any]) -> None:
        assert type(event_type) is EventType
        self.kinds.append(event_type)

    async def checkpoint(self, state: dict[str, Any]) -> None:
        self.state = state

    async def get_state(self) -> dict[str, Any] | None:
        return getattr(self, "state", None)

    def cancelled(self) -> bool:
        return False


async def test_events_are_told_to_other_contexts_as_members_of_event_type() -> None:
    ctx = Foreign()
    for _ in range(2):
        await StepExecutor(ctx).run([Step("a", Flaky(1), retries=1, retry_delay=0)])
        await StepExecutor(ctx).map("m", str, [1])
        with pytest.raises(StepExecutionError):
            await StepExecutor(ctx, checkpoint_key="graph").run(
                [Step("bad", Flaky(9)), Step("b", returning(1), depends_on=["bad"]), Step("c", returning(1))]
            )
    assert {kind.name for kind in ctx.kinds} == {
        "STEP_STARTED", "PROGRESS_UPDATE", "STEP_COMPLETED", "STEP_FAILED", "STEP_RETRYING", "STEP_SKIPPED",
    }  # fmt: skip


async def test_the_checkpoint_holds_the_whole_state_beside_what_was_there() -> None:
    ctx = MockRunContext()
    await ctx.checkpoint({"mine": [1]})

    async def fn(ctx: Any, state: dict[str, Any]) -> str:
        state["seen"] = True
        return "A"

    executor = StepExecutor(ctx)
    await executor.run([Step("a", fn), Step("b", returning(None))])
    before, first, second = ctx.get_checkpoints()
    assert before == {"mine": [1]}
    assert first["mine"] == [1]
    assert (first[KEY]["completed_steps"], second[KEY]["completed_steps"]) == (["a"], ["a", "b"])
    assert set(first[KEY]) == {
        "execution_id", "current_step_index", "completed_steps", "step_results", "started_at", "custom_state",
    }  # fmt: skip
    assert first[KEY]["step_results"] == {"a": "A"}
    assert second[KEY]["custom_state"] == {"seen": True}
    assert (first[KEY]["current_step_index"], second[KEY]["current_step_index"]) == (1, 2)
    assert second[KEY] == executor.state.to_dict()


async def test_a_key_of_its_own_keeps_two_executors_apart() -> None:
    ctx = MockRunContext()
    await StepExecutor(ctx, checkpoint_key="left").run([Step("a", returning(1))])
    await StepExecutor(ctx, checkpoint_key="right").run([Step("a", returning(2))])
    last = await ctx.get_state()
    assert last is not None
    assert (last["left"]["step_results"], last["right"]["step_results"]) == ({"a": 1}, {"a": 2})


async def test_a_new_executor_resumes_and_says_what_it_skips() -> None:
    ctx = MockRunContext()
    bad, good = Flaky(99), Flaky(0, "B")
    with pytest.raises(StepExecutionError):
        await StepExecutor(ctx).run([Step("a", returning("A")), Step("b", bad)])
    ctx.events.clear()
    results = await StepExecutor(ctx).run([Step("a", bad), Step("b", good)])
    assert results == {"a": "A", "b": "B"}
    assert bad.calls == 1
    assert ctx.get_events()[0] == (
        "step.skipped",
        {"step_name": "a", "step_index": 0, "total_steps": 2, "reason": "already_completed"},
    )


async def test_resume_false_begins_anew() -> None:
    ctx = MockRunContext()
    counted = Flaky(0)
    steps = [Step("a", counted)]
    await StepExecutor(ctx).run(steps)
    await StepExecutor(ctx).run(steps)
    assert counted.calls == 1
    await StepExecutor(ctx).run(steps, resume=False)
    assert counted.calls == 2
    assert len(of(ctx, "step.skipped")) == 1


async def test_progress_is_0_25_50_75_for_four_steps() -> None:
    ctx = MockRunContext()
    await StepExecutor(ctx).run([Step(name, returning(None), description=name.upper()) for name in "abcd"])
    progress = of(ctx, "progress.update")
    assert [each["progress_percent"] for each in progress] == [0, 25, 50, 75]
    assert progress[1]["step_name"] == "b"
    started = of(ctx, "step.started")[2]
    assert started == {
        "step_name": "c", "step_index": 2, "total_steps": 4, "attempt": 1, "max_attempts": 1, "description": "C",
    }  # fmt: skip
    completed = of(ctx, "step.completed")[3]
    assert completed["duration_ms"] >= 0
    assert (completed["step_name"], completed["attempt"]) == ("d", 1)


async def test_two_failures_and_a_success_are_two_retries() -> None:
    ctx = MockRunContext()
    flaky = Flaky(2)
    assert await StepExecutor(ctx).run([Step("a", flaky, retries=2, retry_delay=0)]) == {"a": "ok"}
    assert flaky.calls == 3
    assert [name for name, _ in ctx.get_events()] == [
        "step.started", "progress.update", "step.retrying",
        "step.started", "progress.update", "step.retrying",
        "step.started", "progress.update", "step.completed",
    ]  # fmt: skip
    retrying = of(ctx, "step.retrying")
    assert [(each["attempt"], each["error"], each["retry_delay"]) for each in retrying] == [
        (1, "down", 0),
        (2, "down", 0),
    ]
    assert [each["attempt"] for each in of(ctx, "step.started")] == [1, 2, 3]
    assert of(ctx, "step.completed")[0]["attempt"] == 3


async def test_an_exhausted_step_says_which_and_how_often() -> None:
    ctx = MockRunContext()
    with pytest.raises(StepExecutionError) as caught:
        await StepExecutor(ctx).run([Step("a", Flaky(9), retries=2, retry_delay=0)])
    assert (caught.value.step_name, caught.value.attempts) == ("a", 3)
    assert "down" in str(caught.value)
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert of(ctx, "step.failed") == [
        {"step_name": "a", "step_index": 0, "total_steps": 1, "attempts": 3, "error": "down"}
    ]


async def test_an_error_without_a_text_is_told_by_its_class() -> None:
    async def fn(ctx: Any, state: Any) -> None:
        raise KeyError

    with pytest.raises(StepExecutionError, match="KeyError"):
        await StepExecutor(MockRunContext()).run([Step("a", fn)])


async def test_a_step_that_takes_too_long_timed_out() -> None:
    async def forever(ctx: Any, state: Any) -> None:
        await asyncio.Event().wait()

    with pytest.raises(StepExecutionError, match=r"timed out after 0\.01 s") as caught:
        await StepExecutor(MockRunContext()).run([Step("slow", forever, timeout=0.01, retries=1, retry_delay=0)])
    assert caught.value.attempts == 2


async def test_retry_on_decides_what_is_tried_again() -> None:
    for retry_on in (ValueError, (ValueError, KeyError), lambda error: isinstance(error, ValueError)):
        flaky = Flaky(1)
        with pytest.raises(StepExecutionError):
            await StepExecutor(MockRunContext()).run([Step("a", flaky, retries=3, retry_delay=0, retry_on=retry_on)])
        assert flaky.calls == 1


async def test_a_cancelled_context_stops_before_the_next_step() -> None:
    ctx = MockRunContext()

    async def last(ctx: MockRunContext, state: Any) -> None:
        ctx.cancel()

    with pytest.raises(StepCancelledError) as caught:
        await StepExecutor(ctx).run([Step("a", last), Step("b", returning(1))])
    assert caught.value.step_name == "b"
    assert [each["step_name"] for each in of(ctx, "step.completed")] == ["a"]


async def test_a_running_step_is_ended_when_the_context_is_cancelled() -> None:
    ctx = MockRunContext()
    stopped = asyncio.Event()

    async def waits(ctx: MockRunContext, state: Any) -> None:
        ctx.cancel()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    with pytest.raises(StepCancelledError):
        await StepExecutor(ctx, cancel_check_interval=0.005).run([Step("a", waits, retries=3)])
    assert stopped.is_set()
    assert len(of(ctx, "step.started")) == 1


@pytest.mark.parametrize("how", ["list", "graph", "map"])
async def test_a_context_that_is_cancelled_ends_the_wait_for_the_next_try(how: str) -> None:
    ctx = MockRunContext()
    tries: list[int] = []

    async def fails(*_: Any) -> None:
        tries.append(1)
        ctx.cancel()
        raise ConnectionError("down")

    executor = StepExecutor(ctx, cancel_check_interval=0.005)
    needs = [Step("b", returning(1), depends_on=["a"])] if how == "graph" else []
    steps = [Step("a", fails, retries=3, retry_delay=60), *needs]
    work = executor.map("a", fails, [1], retries=3, retry_delay=60) if how == "map" else executor.run(steps)
    with pytest.raises(StepCancelledError, match="a"):
        await asyncio.wait_for(work, 10)
    assert (len(tries), len(of(ctx, "step.retrying")), of(ctx, "step.failed")) == (1, 1, [])


async def test_a_step_whose_state_cannot_be_saved_is_not_told_as_completed() -> None:
    ctx = MockRunContext()

    async def spoils(ctx: Any, state: State) -> None:
        state["odd"] = object()

    executor = StepExecutor(ctx)
    with pytest.raises(UnserialisableResult, match=r"cannot be stored, at state\.odd: an object is not"):
        await executor.run([Step("a", spoils, retries=2, retry_delay=0)])
    assert [kind for kind, _ in ctx.get_events() if kind.startswith("step.")] == ["step.started", "step.failed"]
    assert executor.state.custom_state == {}


async def test_cancelling_the_task_stays_a_cancellation() -> None:
    ctx = MockRunContext()
    inside, stopped = asyncio.Event(), asyncio.Event()

    async def waits(ctx: Any, state: Any) -> None:
        inside.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    task = asyncio.ensure_future(StepExecutor(ctx).run([Step("a", waits)]))
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stopped.is_set()
    assert of(ctx, "step.failed") == []


async def test_what_code_writes_into_state_is_seen() -> None:
    ctx = MockRunContext()
    executor = StepExecutor(ctx)
    executor.options.state = ExecutionState(custom_state={"user": "ada"})
    assert executor.state.custom_state == {"user": "ada"}
    executor.update_custom_state({"n": 1})

    async def reads(ctx: Any, state: dict[str, Any]) -> dict[str, Any]:
        state["n"] += 1
        return dict(state)

    assert (await executor.run([Step("a", reads)], initial_state={"extra": 0}))["a"] == {
        "user": "ada",
        "n": 2,
        "extra": 0,
    }
    assert executor.state.custom_state["n"] == 2


async def test_a_failed_try_leaves_no_mark_on_the_state() -> None:
    seen: list[dict[str, Any]] = []

    async def dirty(ctx: Any, state: dict[str, Any]) -> None:
        seen.append({"list": [*state["list"]]})
        state["list"].append(len(seen))
        if len(seen) < 3:
            raise ConnectionError

    executor = StepExecutor(MockRunContext())
    steps = [Step("a", dirty, retries=1, retry_delay=0)]
    with pytest.raises(StepExecutionError):
        await executor.run(steps, initial_state={"list": []})
    assert executor.state.custom_state == {"list": []}
    await executor.run(steps)
    assert seen == [{"list": []}, {"list": []}, {"list": []}]
    assert executor.state.custom_state == {"list": [3]}


async def test_checkpoint_false_is_not_in_an_earlier_checkpoint() -> None:
    ctx = MockRunContext()
    light = Flaky(0)
    with pytest.raises(StepExecutionError):
        await StepExecutor(ctx).run([Step("a", returning(1)), Step("b", light, checkpoint=False), Step("c", Flaky(1))])
    assert [each[KEY]["completed_steps"] for each in ctx.get_checkpoints()] == [["a"]]
    await StepExecutor(ctx).run([Step("a", returning(1)), Step("b", light, checkpoint=False), Step("c", returning(3))])
    assert light.calls == 2
    assert ctx.get_checkpoints()[-1][KEY]["completed_steps"] == ["a", "b", "c"]


@pytest.mark.parametrize("needs", [(), ("a",)])
async def test_what_waits_for_a_checkpoint_is_saved_at_the_end_of_its_list(needs: tuple[str, ...]) -> None:
    ctx = MockRunContext()
    light = Flaky(0)
    steps = [Step("a", returning(1)), Step("b", light, checkpoint=False, depends_on=needs)]
    for _ in range(2):
        assert await StepExecutor(ctx).run(steps) == {"a": 1, "b": "ok"}
    assert light.calls == 1
    assert [each[KEY]["completed_steps"] for each in ctx.get_checkpoints()] == [["a"], ["a", "b"]]


async def test_a_result_is_handed_on_as_a_resumed_run_would_read_it() -> None:
    ctx = MockRunContext()
    results = await StepExecutor(ctx).run([Step("a", returning({"t": (1, 2), "s": {3}}))])
    assert results == {"a": {"t": (1, 2), "s": {3}}}
    again = await StepExecutor(ctx).run([Step("a", returning(None))])
    assert again == results


@dataclass
class Point:
    x: int
    when: dt.datetime


async def test_a_result_has_the_type_that_its_step_returns() -> None:
    point = Point(1, dt.datetime(2026, 1, 1, tzinfo=dt.UTC))

    async def annotated(ctx: Any, state: Any) -> Point:
        return point

    async def item(number: int) -> Point:
        return point

    ctx = MockRunContext()
    steps = [Step("annotated", annotated), Step("said", returning(point), returns=Point)]
    for graph in ([], [Step("beside", returning(point), returns=Point, depends_on=["said"])]):
        for _ in ("first", "again"):
            found = await StepExecutor(ctx).run([*steps, *graph])
            assert list(found.values()) == [point] * len(found)
            assert await StepExecutor(ctx).map("map", item, [1, 2]) == [point, point]
            assert await StepExecutor(ctx).map("any", returning_one(point), [1], returns=Point) == [point]


def returning_one(value: Any) -> Any:
    async def fn(item: Any) -> Any:
        return value

    return fn


async def test_what_is_saved_is_json_and_comes_back_as_it_was() -> None:
    values = {"set": {1}, "when": dt.datetime(2026, 1, 1, tzinfo=dt.UTC), "pair": (1, b"2")}

    async def fn(ctx: Any, state: dict[str, Any]) -> Any:
        state.update(values)
        return values

    class JsonContext(MockRunContext):
        async def checkpoint(self, state: dict[str, Any]) -> None:
            await super().checkpoint(json.loads(json.dumps(state)))

    ctx = JsonContext()
    assert await StepExecutor(ctx).run([Step("a", fn)]) == {"a": values}
    executor = StepExecutor(ctx)
    assert await executor.run([Step("a", fn)]) == {"a": values}
    assert executor.state.custom_state == values


async def test_results_that_fit_one_by_one_are_all_kept() -> None:
    large = "x" * 900_000
    steps = [Step(name, returning(large)) for name in "abc"]
    ctx = MockRunContext()
    assert await StepExecutor(ctx).run(steps) == dict.fromkeys("abc", large)
    assert await StepExecutor(ctx).run(steps) == dict.fromkeys("abc", large)


async def test_steps_may_come_from_any_iterable() -> None:
    assert await StepExecutor(MockRunContext()).run(Step(name, returning(name)) for name in "ab") == {
        "a": "a",
        "b": "b",
    }


@pytest.mark.parametrize("steps", [None, 3, Step("a", returning(1))])
async def test_what_is_no_list_of_steps_is_refused(steps: Any) -> None:
    with pytest.raises(InvalidArgument, match="steps must be "):
        await StepExecutor(MockRunContext()).run(steps)


async def test_an_initial_state_that_is_no_dict_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="initial_state must be a dict"):
        await StepExecutor(MockRunContext()).run([], initial_state=[1])  # type: ignore[arg-type]


async def test_a_result_without_a_json_form_is_refused() -> None:
    flaky = Flaky(0, {"bad": object()})
    with pytest.raises(UnserialisableResult, match="bad"):
        await StepExecutor(MockRunContext()).run([Step("a", flaky, retries=5, retry_delay=0)])
    assert flaky.calls == 1


async def test_two_steps_of_one_name_are_refused() -> None:
    ctx = MockRunContext()
    with pytest.raises(InvalidArgument, match="step names must be unique in a list, got 'a' twice"):
        await StepExecutor(ctx).run([Step("a", returning(1)), Step("a", returning(2))])
    assert ctx.get_events() == []


async def test_map_keeps_each_item_and_resumes() -> None:
    ctx = MockRunContext()
    calls: list[int] = []
    fail = True

    async def square(n: int) -> int:
        calls.append(n)
        if n == 3 and fail:
            raise ConnectionError("no")
        return n * n

    with pytest.raises(StepExecutionError, match="no"):
        await StepExecutor(ctx, max_concurrency=1).map("sq", square, [1, 2, 3, 4])
    assert calls == [1, 2, 3]
    fail = False
    assert await StepExecutor(ctx, max_concurrency=1).map("sq", square, [1, 2, 3, 4]) == [1, 4, 9, 16]
    assert calls == [1, 2, 3, 3, 4]
    assert [each["step_index"] for each in of(ctx, "step.skipped")] == [0, 1]


async def test_map_over_nothing_is_nothing_and_keys_are_unique() -> None:
    executor = StepExecutor(MockRunContext())
    assert await executor.map("none", str, []) == []
    assert await executor.map("names", str.upper, ["b", "a"], key=str) == ["B", "A"]
    with pytest.raises(InvalidArgument, match="keys of items must be unique, got 'x' twice"):
        await executor.map("twice", str, ["x", "x"], key=str)


async def test_map_stops_when_the_context_is_cancelled() -> None:
    ctx = MockRunContext()

    async def item(n: int) -> int:
        ctx.cancel()
        return n

    with pytest.raises(StepCancelledError):
        await StepExecutor(ctx, max_concurrency=1).map("m", item, [1, 2])
    last = await ctx.get_state()
    assert last is not None
    assert last[KEY]["step_results"] == {"m[0]": 1}


class Failing(MockRunContext):
    """Its store, or its word of what is skipped, fails once."""

    failing: str | None = None

    def fail(self, what: str) -> None:
        if self.failing == what:
            self.failing = None
            raise OSError("disk")

    async def checkpoint(self, state: dict[str, Any]) -> None:
        self.fail("checkpoint")
        await super().checkpoint(state)

    async def emit(self, event_type: Any, payload: dict[str, Any]) -> None:
        if event_type == EventType.STEP_SKIPPED:
            self.fail("emit")
        await super().emit(event_type, payload)


@pytest.mark.parametrize(("what", "in_flight"), [("checkpoint", [0, 1, 3]), ("emit", [])])
async def test_map_finishes_and_keeps_what_is_in_flight_when_its_context_fails(what: str, in_flight: list[int]) -> None:
    ctx = Failing()
    await ctx.checkpoint({KEY: {"completed_steps": ["m[2]"], "step_results": {"m[2]": 2}}})
    ctx.failing = what
    begun, ended = list[int](), list[int]()

    async def item(n: int) -> int:
        begun.append(n)
        for _ in range(9 * (n + 1)):
            await asyncio.sleep(0)
        ended.append(n)
        return n

    with pytest.raises(OSError, match="disk"):
        await StepExecutor(ctx, max_concurrency=3).map("m", item, range(9))
    assert begun == ended == in_flight
    kept = await ctx.get_state()
    assert kept is not None
    assert kept[KEY]["step_results"] == {f"m[{n}]": n for n in (2, *in_flight)}


async def test_map_puts_the_context_where_it_is_asked_for() -> None:
    ctx = MockRunContext()

    async def item(n: int, context: RunContext) -> bool:
        return context is ctx

    assert await StepExecutor(ctx).map("m", item, [1]) == [True]


def test_the_execution_state_goes_to_plain_values_and_back() -> None:
    state = ExecutionState(completed_steps=["a"], step_results={"a": 1}, custom_state={"k": [1]}, current_step_index=1)
    data = state.to_dict()
    back = ExecutionState.from_dict(data)
    assert back == state
    assert back.to_dict() == data
    data["completed_steps"].append("b")
    assert state.completed_steps == ["a"]
    assert isinstance(data["started_at"], str)
    assert state.started_at.tzinfo is not None
    fresh = ExecutionState.from_dict({})
    assert (fresh.current_step_index, fresh.completed_steps, fresh.step_results) == (0, [], {})
    assert fresh.execution_id != state.execution_id
    assert fresh.execution_id == fresh.execution_id
    assert isinstance(fresh.execution_id, UUID)
    assert ExecutionState("given").execution_id == "given"
    for given in (UUID(int=7), str(UUID(int=7))):
        state = ExecutionState(execution_id=given)
        assert state.execution_id == UUID(int=7)
        assert ExecutionState.from_dict(json.loads(json.dumps(state.to_dict()))) == state
    assert ExecutionState.from_dict({"started_at": state.started_at}).started_at == state.started_at


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])
def test_a_copy_of_a_state_is_of_the_same_execution(copied: Callable[[ExecutionState], ExecutionState]) -> None:
    state = ExecutionState(custom_state={"k": [1]})
    other = copied(state)
    assert other.execution_id == state.execution_id
    assert other == state
    assert other.execution_id != ExecutionState().execution_id


async def test_a_step_that_a_written_state_names_as_completed_is_skipped_without_a_result_too() -> None:
    for steps in (
        [Step("a", returning(1)), Step("b", returning(2))],
        [Step("a", returning(1)), Step("b", returning(2), depends_on=["a"])],
    ):
        ctx = MockRunContext()
        await ctx.checkpoint({"_step_executor_state": ExecutionState(completed_steps=["a"]).to_dict()})
        assert await StepExecutor(ctx).run(steps) == {"a": None, "b": 2}
        assert [payload["step_name"] for _, payload in ctx.get_events("step.skipped")] == ["a"]


@pytest.mark.parametrize("saved", [5, "text", [1], {"completed_steps": 5}, {"step_results": [1]}, {"started_at": "x"}])
async def test_what_is_no_state_under_the_checkpoint_key_is_refused_by_name(saved: Any) -> None:
    ctx = MockRunContext()
    await ctx.checkpoint({"mine": saved})
    executor = StepExecutor(ctx, checkpoint_key="mine")
    with pytest.raises(InvalidArgument, match=r"checkpoint's 'mine' must be the state of a .* resume=False"):
        await executor.run([Step("a", returning(1))])
    assert await executor.run([Step("a", returning(1))], resume=False) == {"a": 1}


def test_a_step_result_has_its_fields() -> None:
    result = StepResult("a", StepStatus.COMPLETED)
    assert (result.result, result.error, result.attempts) == (None, None, 1)
    assert (result.started_at, result.completed_at, result.duration_ms) == (None, None, None)


def test_a_step_has_the_defaults_of_the_signature() -> None:
    step = Step("a", returning(1))
    assert (step.retries, step.retry_delay, step.timeout, step.description, step.checkpoint) == (
        0,
        1.0,
        None,
        None,
        True,
    )
    assert (step.retry_on, step.backoff, step.on_in_doubt, step.returns) == (Exception, None, "retry", None)


@for_each(
    ("arguments", "said"),
    [
        ({"name": ""}, "step name must be a non-empty string, got ''"),
        ({"name": 7}, "step name must be a non-empty string, got 7"),
        ({"fn": "no"}, "got 'no'"),
        ({"retries": -1}, "got -1"),
        ({"retries": True}, "got True"),
        ({"retries": 1.5}, r"got 1\.5"),
        ({"retry_delay": -0.5}, r"-0\.5"),
        ({"retry_delay": float("nan")}, "nan"),
        ({"timeout": 0}, "got 0"),
        ({"timeout": -3}, "got -3"),
        ({"timeout": float("inf")}, "got inf"),
        ({"timeout": "1"}, "got '1'"),
        ({"on_in_doubt": "maybe"}, "got 'maybe'"),
        ({"retry_on": "ValueError"}, "got 'ValueError'"),
        ({"retry_on": (ValueError, 3)}, "an exception class"),
        ({"retry_on": int}, "of the error, got the class"),
        ({"backoff": 2.0}, r"got 2\.0"),
    ],
)
def test_a_bad_value_of_a_step_is_named(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        Step(**{"name": "a", "fn": returning(1), **arguments})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"max_concurrency": 0}, "got 0"),
        ({"max_concurrency": "2"}, "got '2'"),
        ({"checkpoint_key": 5}, "checkpoint_key must be a string, got 5"),
        ({"cancel_check_interval": "1"}, "got '1'"),
        ({"cancel_check_interval": 0}, "got 0"),
        ({"cancel_check_interval": -1.5}, r"got -1\.5"),
        ({"cancel_check_interval": float("nan")}, "got nan"),
    ],
)
def test_a_bad_value_of_an_executor_is_named(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        StepExecutor(MockRunContext(), **arguments)


async def test_what_is_no_step_is_refused() -> None:
    not_a_step: Any = "a"
    with pytest.raises(InvalidArgument, match="got 'a'"):
        await StepExecutor(MockRunContext()).run([not_a_step])
