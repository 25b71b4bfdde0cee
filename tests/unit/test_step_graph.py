"""Lists whose steps say what they depend on: side by side, recorded once, resumed, told as events."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._execution.run_control import Stop
from agent_runtime_core.errors import (
    InvalidArgument,
    JournalMismatch,
    LeaseLost,
    Postponed,
    StepCancelledError,
    StepExecutionError,
    StepInDoubt,
    StorageBusy,
)
from agent_runtime_core.steps import AlreadyDone, Step, StepExecutor
from agent_runtime_core.steps.graph import Graph
from agent_runtime_core.testing import MockRunContext
from tests.support.runs import Rig, until


class Work:
    """Steps that note when they begin and end, and give a text of what they read."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.most = 0
        self.broken: set[str] = set()

    def step(self, name: str, needs: Sequence[str] = (), turns: int = 1, **options: Any) -> Step:
        async def fn(ctx: Any, state: Any) -> str:
            self.begun.append(name)
            self.most = max(self.most, len(self.begun) - len(self.ended))
            for _ in range(turns):
                await asyncio.sleep(0)
            self.ended.append(name)
            if name in self.broken:
                raise ConnectionError(f"{name} is down")
            return f"{name}({' '.join(state.results[each] for each in needs)})"

        return Step(name, fn, depends_on=needs, retry_delay=0, **options)

    def diamond(self, **options: Any) -> list[Step]:
        return [
            self.step("a"),
            self.step("b", ["a"], turns=9),
            self.step("c", ["a"], **options),
            self.step("d", ["b", "c"]),
        ]


DIAMOND = {"a": "a()", "b": "b(a())", "c": "c(a())", "d": "d(b(a()) c(a()))"}


def running(steps: Sequence[Step], **options: Any) -> Any:
    async def body(ctx: Any) -> Any:
        return await StepExecutor(ctx, **options).run(steps)

    return body


async def test_steps_begin_when_what_they_depend_on_is_done_and_side_by_side(place: Path | None) -> None:
    work = Work()
    async with Rig(place) as rig:
        result = await rig.value(running(work.diamond()))
    assert result == DIAMOND
    assert [*result] == ["a", "b", "c", "d"]
    assert work.begun == ["a", "b", "c", "d"]
    assert work.ended == ["a", "c", "b", "d"]


async def test_a_step_may_depend_on_a_later_one_of_the_list(place: Path | None) -> None:
    work = Work()
    async with Rig(place) as rig:
        result = await rig.value(running([work.step("last", ["first"]), work.step("first")]))
    assert [*result.items()] == [("last", "last(first())"), ("first", "first()")]
    assert work.begun == ["first", "last"]


async def test_a_step_begins_only_when_all_it_depends_on_is_durable(place: Path | None) -> None:
    work = Work()
    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            state, commit = ctx._writer._state, ctx._writer._state.commit

            async def held(guard: Any, ops: Any) -> Any:
                if any(op.name == "journal.append" and op.args[1][1:3] == ("done", "a") for op in ops):
                    for _ in range(50):
                        await asyncio.sleep(0.001)
                    assert work.ended == ["a", "b", "c"]
                return await commit(guard, ops)

            state.commit = held
            steps = [work.step("a"), work.step("b"), work.step("c", ["b"]), work.step("d", ["a", "b"])]
            return await StepExecutor(ctx).run(steps)

        assert (await rig.value(body))["d"] == "d(a() b())"


async def test_no_more_run_at_once_than_asked_for_and_the_first_of_the_list_first(place: Path | None) -> None:
    work = Work()
    names = [f"s{i}" for i in range(40)]
    steps = [work.step("end", names), *(work.step(name) for name in names)]
    async with Rig(place) as rig:
        await rig.value(running(steps))
        assert work.most == 16
        work = Work()
        steps = [work.step("end", names), *(work.step(name) for name in names)]
        await rig.value(running(steps, max_concurrency=1), "one by one")
        assert (work.most, work.begun) == (1, [*names, "end"])


async def test_a_step_that_becomes_ready_goes_before_later_ones_of_the_list(place: Path | None) -> None:
    work = Work()
    steps = [work.step("a"), work.step("b", ["a"]), work.step("c"), work.step("d", ["c"]), work.step("e", ["b"])]
    async with Rig(place) as rig:
        await rig.value(running(steps, max_concurrency=1))
    assert work.begun == ["a", "b", "c", "d", "e"]


async def test_the_events_are_those_of_a_plain_context_and_progress_tells_how_many_are_done(place: Path | None) -> None:
    def steps(work: Work) -> list[Step]:
        work.broken = {"c"}
        return work.diamond(retries=1, description="fails")

    mock = MockRunContext()
    with pytest.raises(StepExecutionError) as plain:
        await StepExecutor(mock, max_concurrency=1).run(steps(Work()))
    async with Rig(place) as rig:

        async def body(ctx: Any) -> None:
            with pytest.raises(StepExecutionError) as durable:
                await StepExecutor(ctx, max_concurrency=1).run(steps(Work()))
            assert str(durable.value) == str(plain.value)

        await rig.value(body)
        told = [each for each in await rig.told() if not each[0].startswith("run.")]
        events = await rig.runner.event_bus.get_events("r")
    for _, payload in (*told, *mock.events):
        payload.pop("duration_ms", None)
    assert told == mock.events
    assert [event.sequence for event in events] == list(range(len(events)))
    progress = [(p["step_name"], p["progress_percent"]) for kind, p in told if kind == "progress.update"]
    assert progress == [("a", 0), ("b", 25), ("c", 50), ("c", 50)]
    assert told[-1] == (
        "step.skipped",
        {"step_name": "d", "step_index": 3, "total_steps": 4, "reason": "dependency_failed", "dependency": "c"},
    )


async def test_progress_counts_what_is_done_and_not_the_place_in_the_list(place: Path | None) -> None:
    work = Work()
    async with Rig(place) as rig:
        await rig.value(running([work.step("c", ["b"]), work.step("b", ["a"]), work.step("a"), work.step("d", ["c"])]))
        progress = [(p["step_name"], p["progress_percent"]) for _, p in await rig.told("progress")]
    assert progress == [("a", 0), ("b", 25), ("c", 50), ("d", 75)]


@pytest.mark.parametrize("kind", ["journal", "plain"])
async def test_a_failure_stops_what_depends_on_it_and_nothing_else(kind: str) -> None:
    work = Work()
    work.broken = {"x", "y"}
    steps = [
        work.step("a"), work.step("slow", ["a"], turns=60), work.step("y", ["a"], turns=30), work.step("x", ["a"]),
        work.step("of both", ["x", "y"]), work.step("later", ["of both"]), work.step("after slow", ["slow"]),
    ]  # fmt: skip
    async with Rig() as rig:

        async def body(ctx: Any) -> None:
            with pytest.raises(StepExecutionError, match="y is down") as failed:
                await StepExecutor(ctx if kind == "journal" else mock).run(steps)
            assert failed.value.step_name == "y"  # x failed before it, and stands behind it in the list

        mock = MockRunContext()
        await rig.value(body)
        told = await rig.told("step.skipped") if kind == "journal" else mock.get_events("step.skipped")
    assert sorted(work.begun) == ["a", "after slow", "slow", "x", "y"]
    assert [(p["step_name"], p["reason"], p["dependency"]) for _, p in told] == [
        ("of both", "dependency_failed", "x"),
        ("later", "dependency_failed", "x"),
    ]


async def test_after_a_failure_only_what_is_missing_runs(place: Path | None) -> None:
    work = Work()
    work.broken = {"b"}
    async with Rig(place) as rig:
        failed = await rig.go(running(work.diamond()))
        assert failed.error is not None
        assert (failed.error.type, failed.status) == ("StepExecutionError", "failed")
        assert sorted(work.begun) == ["a", "b", "c"]
        work.broken = set()
        work.begun.clear()
        assert await rig.value(running(work.diamond())) == DIAMOND
        assert work.begun == ["b", "d"]
        skips = [p for _, p in await rig.told("step.skipped")]
        assert [(p["step_name"], p["reason"]) for p in skips] == [
            ("d", "dependency_failed"),
            ("a", "already_completed"),
            ("c", "already_completed"),
        ]
        started = [p["step_name"] for _, p in await rig.told("progress")]
        assert started == ["a", "b", "c", "b", "d"]


def test_what_can_never_begin_is_refused_before_anything_runs() -> None:
    def step(name: str, *needs: str) -> Step:
        return Step(name, print, depends_on=needs)

    cases = [
        ([step("a", "b"), step("b", "a")], "a -> b -> a"),
        ([step("x"), step("c", "a"), step("b", "c", "x"), step("a", "b"), step("z", "a")], "c -> a -> b -> c"),
        ([step("a"), step("b", "b", "a")], "b -> b"),
        ([step("load"), step("b", "laod")], "step 'b': depends_on: unknown step 'laod'. Did you mean 'load'?"),
        ([step("load"), step("b", "qqq")], "Name a step of the same list"),
    ]
    for steps, message in cases:
        with pytest.raises(InvalidArgument, match=message.replace("?", r"\?")):
            Graph(steps)
    long = [Step(f"s{i}", print, depends_on=[f"s{(i + 1) % 3000}"]) for i in range(3000)]
    with pytest.raises(InvalidArgument, match="s0 -> s1 -> s2"):
        Graph(long)


@pytest.mark.parametrize("wrong", ["load", b"load", None, 3, [3], ["a", None]])
def test_bad_dependencies_are_named(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match="step 'b': depends_on must be a list of step names"):
        Step("b", print, depends_on=wrong)


async def test_a_refused_list_has_run_nothing(place: Path | None) -> None:
    work = Work()
    async with Rig(place) as rig:

        async def body(ctx: Any) -> None:
            for context in (ctx, MockRunContext()):
                with pytest.raises(InvalidArgument, match="b -> c -> b"):
                    await StepExecutor(context).run([work.step("a"), work.step("b", ["c"]), work.step("c", ["b"])])

        await rig.value(body)
        assert not [record for record in await rig.records() if record.name in ("a", "b", "c")]
    assert work.begun == []


def test_a_graph_of_any_shape_is_ordered_by_its_edges() -> None:
    chance = random.Random(5)
    for size in range(1, 60):
        names = [f"n{i}" for i in range(size)]
        ranks = names[:]
        chance.shuffle(ranks)
        steps = [
            Step(name, print, depends_on=[each for each in ranks[: ranks.index(name)] if chance.random() < 2 / size])
            for name in names
        ]
        graph = Graph(steps)
        seen: set[int] = set()
        for place in graph.order:
            assert set(graph.needs[place]) <= seen
            seen.add(place)
        assert seen == set(range(size))
        for place in range(size):
            above = {each for each in range(size) if place in graph.dependents(each)}
            assert set(graph.results(place, {})) == {names[each] for each in above}
            assert len(graph.results(place, {})) == len(above)


@pytest.mark.parametrize("kind", ["journal", "plain"])
async def test_state_is_read_only_and_results_are_of_what_it_depends_on(kind: str) -> None:
    seen: dict[str, Any] = {}

    async def first(ctx: Any, state: Any) -> int:
        changes: list[Any] = [lambda: state.update(x=1), lambda: state.pop("given"), lambda: state.__setitem__("x", 1)]
        for change in changes:
            with pytest.raises(
                InvalidArgument, match="state must not be changed while steps run concurrently, got a change"
            ):
                change()
        state["given"].append(2)  # its own copy
        return 1

    async def second(ctx: Any, state: Any) -> None:
        seen["state"] = dict(state)
        seen["results"] = dict(state.results)
        assert ("first" in state.results, "other" in state.results, "nowhere" in state.results) == (True, False, False)
        assert state.results.get("nowhere") is None
        with pytest.raises(KeyError):
            state.results["nowhere"]
        with pytest.raises(InvalidArgument, match="step 'second' must depend on each step whose result it reads, got"):
            state.results["other"]

    steps = [
        Step("other", lambda ctx, state: 5),
        Step("first", first),
        Step("between", lambda ctx, state: 2, depends_on=["first"]),
        Step("second", second, depends_on=["between"]),
    ]
    async with Rig() as rig:

        async def body(ctx: Any) -> Any:
            executor = StepExecutor(ctx if kind == "journal" else MockRunContext())
            await executor.run(steps, initial_state={"given": [1]})
            return executor.state.to_dict()

        kept = await rig.value(body)
    assert seen == {"state": {"given": [1]}, "results": {"first": 1, "between": 2}}
    assert kept["custom_state"] == {"given": [1]}
    assert sorted(kept["completed_steps"]) == ["between", "first", "other", "second"]
    assert kept["current_step_index"] == 4


async def test_a_chain_of_a_graph_takes_one_commit_for_each_step(place: Path | None) -> None:
    work = Work()
    names = [f"s{i}" for i in range(20)]
    steps = [work.step(name, names[max(i - 1, 0) : i]) for i, name in enumerate(names)]
    async with Rig(place) as rig:

        async def body(ctx: Any) -> int:
            commits, commit = 0, type(rig.runner.queue.commits).commit

            async def counted(engine: Any, guard: Any, ops: Any) -> Any:
                nonlocal commits
                commits += any(op.name == "journal.append" for op in ops)
                return await commit(engine, guard, ops)

            ctx._writer._state.commit = counted.__get__(ctx._writer._state)
            await StepExecutor(ctx).run(steps)
            return commits

        assert await rig.value(body) == 20
        records = [record for record in await rig.records() if record.name in names]
        assert len(records) <= 21
        assert all(record.next is not None for record in records if record.kind == "done" and record.name != "s19")


@pytest.mark.parametrize("change", ["edges", "order", "more"])
async def test_edges_order_and_new_steps_may_change(place: Path | None, change: str) -> None:
    work = Work()
    work.broken = {"c"}
    async with Rig(place) as rig:
        await rig.go(running(work.diamond()))
        work.broken = set()
        work.begun.clear()
        again = Work.diamond(work)
        if change == "edges":
            again[1:] = [work.step("b", ["d"]), work.step("c"), work.step("d", ["c", "a"])]
        elif change == "order":
            again.reverse()
        else:
            again.insert(0, work.step("e", ["d", "a"]))
        result = await rig.value(running(again))
        assert (result["a"], result["b"]) == ("a()", "b(a())")
        assert work.begun == (["c", "d", "e"] if change == "more" else ["c", "d"])


async def test_a_recorded_step_that_is_gone_is_refused(place: Path | None) -> None:
    work = Work()
    work.broken = {"d"}
    async with Rig(place) as rig:
        await rig.go(running(work.diamond()))
        other = [work.step("a"), work.step("b2", ["a"]), work.step("c", ["a"]), work.step("d", ["b2", "c"])]

        async def refused(ctx: Any) -> None:
            with pytest.raises(JournalMismatch, match=r"list must have step 'b'.*ctx.renamed\('b', 'b2'\)") as wrong:
                await StepExecutor(ctx).run(other)
            mismatch.append((wrong.value.recorded, wrong.value.found))
            raise ConnectionError

        mismatch: list[Any] = []
        await rig.go(refused)
        assert mismatch == [("b", "b2")]
        work.broken = set()
        work.begun.clear()

        async def renamed(ctx: Any) -> Any:
            ctx.renamed("b", "b2")
            return await StepExecutor(ctx).run(other)

        assert (await rig.value(renamed))["b2"] == "b(a())"
        assert work.begun == ["d"]


async def test_a_chain_may_become_a_graph(place: Path | None) -> None:
    work = Work()
    work.broken = {"c"}
    async with Rig(place) as rig:
        await rig.go(running([work.step("a"), work.step("b"), work.step("c")]))
        work.broken = set()
        work.begun.clear()
        await rig.value(running([work.step("a"), work.step("b", ["a"]), work.step("c", ["a"])]))
        assert work.begun == ["c"]


async def test_resume_false_begins_anew(place: Path | None) -> None:
    work = Work()
    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            executor = StepExecutor(ctx)
            first = await executor.run(work.diamond())
            assert await StepExecutor(ctx).run(work.diamond(), resume=False) == first
            return await StepExecutor(ctx).run(work.diamond())

        assert await rig.value(body) == DIAMOND
    assert work.begun == ["a", "b", "c", "d"] * 2


async def test_checkpoint_false_commits_with_the_next_checkpointed_step(place: Path | None) -> None:
    work = Work()
    work.broken = {"d"}
    async with Rig(place) as rig:

        def steps() -> list[Step]:
            return [
                work.step("a", checkpoint=False),
                work.step("b", ["a"], checkpoint=False),
                work.step("c", ["a"], turns=9),
                work.step("d", ["c"]),
                work.step("e", ["c"], checkpoint=False, turns=30),
            ]

        await rig.go(running(steps()))
        done = [record.name for record in await rig.records() if record.kind == "done"]
        assert done == ["a", "b", "c"]  # e had no checkpoint behind it
        work.broken = set()
        work.begun.clear()
        await rig.value(running(steps()))
        assert work.begun == ["d", "e"]
        done = [record.name for record in await rig.records() if record.kind == "done"]
        assert done == ["a", "b", "c", "d", "e"]
        events = await rig.runner.event_bus.get_events("r")
        assert [event.sequence for event in events] == list(range(len(events)))


class Quiet:
    """Tells when the loop has turned fifty times without another start: what is tried again at once was given up."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def start(self, tell: Callable[[], None]) -> None:
        async def turn() -> None:
            for _ in range(50):
                await asyncio.sleep(0)
            tell()

        self._task = asyncio.ensure_future(turn())

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


@pytest.mark.parametrize("landed", [False, True])
@pytest.mark.parametrize("beside", [False, True])
async def test_what_waited_for_a_checkpoint_that_was_not_answered_is_recorded_once(
    place: Path | None, monkeypatch: pytest.MonkeyPatch, beside: bool, landed: bool
) -> None:
    """By the step that runs beside it, or by the next pass."""
    unheard, there, begun = asyncio.Event(), asyncio.Event(), list[str]()

    def step(name: str, needs: Sequence[str] = (), *, waits: bool = False, **options: Any) -> Step:
        async def fn(ctx: Any, state: Any) -> str:
            begun.append(name)
            if waits:
                there.set()
                await unheard.wait()
            elif name == "b" and beside:
                await there.wait()
            return name

        return Step(name, fn, depends_on=needs, **options)

    async with Rig(place) as rig:
        commit = rig.runner.queue.commits.commit

        async def busy(guard: Any, ops: Any) -> Any:
            ends = [op.args[1].name for op in ops if op.name == "journal.append" and op.args[1].kind == "done"]
            if "b" in ends and not unheard.is_set():
                given_up.cancel()
                if landed:
                    await commit(guard, ops)
                given_up.start(unheard.set)
                raise StorageBusy("did not answer")
            return await commit(guard, ops)

        given_up = Quiet()

        async def body(ctx: Any) -> Any:
            steps = [step("a", checkpoint=False), step("b", ["a"])]
            if beside:
                steps.append(step("c", ["a"], waits=True))
            with contextlib.suppress(StorageBusy):  # settled at once where "c" has a place behind it already
                await StepExecutor(ctx).run(steps)
            unheard.set()
            return await StepExecutor(ctx).run(steps)

        monkeypatch.setattr(rig.runner.queue.commits, "commit", busy)
        names = ["a", "b", "c"] if beside else ["a", "b"]
        assert await rig.value(body) == {name: name for name in names}
        done = [record.name for record in await rig.records() if record.kind == "done"]
        assert done == names
        assert begun == names


async def test_each_step_is_retried_and_timed_by_itself(place: Path | None) -> None:
    left = {"b": 2}

    async def flaky(ctx: Any, state: Any) -> str:
        if left["b"]:
            left["b"] -= 1
            raise ConnectionError("no")
        return "B"

    async def hangs(ctx: Any, state: Any) -> None:
        await asyncio.Event().wait()

    work = Work()
    async with Rig(place) as rig:

        async def body(ctx: Any) -> None:
            steps = [
                work.step("a"),
                Step("b", flaky, depends_on=["a"], retries=2, retry_delay=0),
                Step("c", hangs, depends_on=["a"], timeout=0.01),
                work.step("d", ["b"]),
            ]
            with pytest.raises(StepExecutionError, match=r"'c' failed after 1 attempt.*timed out"):
                await StepExecutor(ctx).run(steps)

        await rig.value(body)
        assert work.begun == ["a", "d"]
        assert [p["step_name"] for _, p in await rig.told("step.retrying")] == ["b", "b"]


async def test_plain_functions_run_in_threads(place: Path | None) -> None:
    def add(ctx: Any, state: Any) -> int:
        return int(sum(state.results.values())) + 1

    async with Rig(place) as rig:
        steps = [Step("a", add), Step("b", add), Step("c", add, depends_on=["a", "b"])]
        assert await rig.value(running(steps)) == {"a": 1, "b": 1, "c": 3}


@pytest.mark.parametrize("policy", ["fail", "retry", "check"])
async def test_a_step_in_doubt_follows_its_policy(place: Path | None, policy: str) -> None:
    inside, both = asyncio.Event(), 0

    def steps(hang: bool) -> list[Step]:
        async def side(ctx: Any, state: Any) -> str:
            nonlocal both
            both += 1
            if hang:
                if both == 2:
                    inside.set()
                await asyncio.Event().wait()
            return "ran"

        async def happened() -> AlreadyDone:
            return AlreadyDone("found")

        doubt: Any = happened if policy == "check" else policy
        return [
            Step("a", lambda ctx, state: 1),
            Step("b", side, depends_on=["a"], on_in_doubt=doubt),
            Step("c", side, depends_on=["a"]),
            Step("d", lambda ctx, state: 4, depends_on=["c"]),
        ]

    async with Rig(place) as rig:
        await rig.cut(running(steps(True)), inside)

        async def body(ctx: Any) -> Any:
            if policy != "fail":
                return await StepExecutor(ctx).run(steps(False))
            with pytest.raises(StepInDoubt):
                await StepExecutor(ctx).run(steps(False))
            return {record.name for record in await rig.records() if record.kind == "done"}

        found = await rig.value(body)
        if policy == "fail":
            assert found == {"a", "c", "d"}
        else:
            assert found == {"a": 1, "b": "found" if policy == "check" else "ran", "c": "ran", "d": 4}
        doubted = {p["step_name"] for _, p in await rig.told("step.started") if p.get("in_doubt")}
        assert doubted == ({"c", "b"} if policy == "retry" else {"c"})


async def test_a_step_that_was_never_begun_is_not_in_doubt(place: Path | None) -> None:
    """A run that ends while others wait for their turn leaves no doubt about those."""
    work, inside = Work(), asyncio.Event()

    async def hangs(ctx: Any, state: Any) -> None:
        inside.set()
        await asyncio.Event().wait()

    async with Rig(place) as rig:
        later = [work.step(name, ["a"], on_in_doubt="fail") for name in "cde"]
        first = [work.step("a"), Step("b", hangs, depends_on=["a"]), *later]
        await rig.cut(running(first, max_concurrency=1), inside)
        again = [work.step("a"), work.step("b", ["a"]), *later]
        assert [*await rig.value(running(again))] == ["a", "b", "c", "d", "e"]


async def test_a_cancelled_run_begins_nothing_more_and_records_what_runs(place: Path | None) -> None:
    work = Work()
    async with Rig(place) as rig:

        async def body(ctx: Any) -> None:
            async def stop(ctx: Any, state: Any) -> None:
                await asyncio.sleep(0)
                ctx.control.stop(Stop.CANCEL)

            steps = [Step("a", stop), work.step("b", turns=20), work.step("c", ["a"]), work.step("d", ["b"])]
            with pytest.raises(StepCancelledError):
                await StepExecutor(ctx).run(steps)

        await rig.go(body)
        assert work.begun == work.ended == ["b"]
        assert [record.name for record in await rig.records() if record.kind == "done"] == ["a", "b"]
        assert await rig.told("step.skipped") == []
        assert {about["step_name"] for kind, about in await rig.told("step.started")} == {"a", "b"}


async def test_cancelling_the_caller_lets_every_step_go(place: Path | None) -> None:
    inside, ended = asyncio.Event(), list[str]()

    def hangs(name: str) -> Step:
        async def fn(ctx: Any, state: Any) -> None:
            if name == "c":
                inside.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ended.append(name)
                if name != "b":
                    raise  # b does not listen, and no step may begin after it all the same

        return Step(name, fn)

    work = Work()
    async with Rig(place) as rig:
        await rig.cut(running([hangs("a"), hangs("b"), hangs("c"), work.step("d", ["b"])]), inside)
    assert sorted(ended) == ["a", "b", "c"]
    assert work.begun == []


async def test_a_wait_in_one_step_holds_up_no_other_and_is_its_own(place: Path | None) -> None:
    """Siblings wait in any order: on a resume each finds its own wait, however far the others came."""
    lives = 0

    def waiting(name: str, seconds: float) -> Step:
        async def fn(ctx: Any, state: Any) -> list[float]:
            before = rig.clock.wall()
            await ctx.sleep(seconds)
            slept = rig.clock.wall() - before
            if name == "b" and lives == 1:
                raise ConnectionError
            return [slept, await ctx.random()]

        return Step(name, fn)

    work = Work()
    async with Rig(place, park_after=0) as rig:

        async def body(ctx: Any) -> Any:
            nonlocal lives
            lives += 1
            steps = [waiting("b", 100), waiting("a", 7), work.step("c"), work.step("d", ["c"])]
            return await StepExecutor(ctx).run(steps)

        await rig.go(body)
        assert work.begun == ["c", "d"]
        result = await rig.value(body)
        waits = [record for record in await rig.records() if record.name == "sleep" and record.kind == "done"]
        assert len(waits) == 2
        assert result["b"][0] == 0  # it was over in the first life
        assert result["a"][1] != result["b"][1]


async def test_a_signal_reaches_the_step_that_waits_while_others_run(place: Path | None) -> None:
    work = Work()

    async def asks(ctx: Any, state: Any) -> Any:
        return await ctx.wait_for_signal("go")

    async with Rig(place) as rig:

        async def answers(ctx: Any, state: Any) -> None:
            await rig.runner.signal(ctx.run_id, "go", "yes")

        steps = [Step("ask", asks), work.step("b"), Step("answer", answers, depends_on=["b"]), work.step("c", ["b"])]
        result = await rig.value(running(steps))
        assert result["ask"] == "yes"


async def test_a_postponed_step_puts_the_run_off_and_fails_nothing(place: Path | None) -> None:
    class Later(Postponed):
        after = 30.0

    work, tries = Work(), 0

    async def provider(ctx: Any, state: Any) -> str:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise Later("not now")
        return "P"

    async with Rig(place) as rig:
        rig.register(running([Step("p", provider), work.step("b"), work.step("c", ["b"]), work.step("d", ["p", "c"])]))
        run_id = await rig.runner.submit("script", {})
        assert await rig.runner.run_once()
        assert work.begun == ["b", "c"]
        assert (await rig.runner.get_run(run_id)).status == "pending"
        rig.clock.advance(60)  # type: ignore[attr-defined]
        assert await rig.runner.run_once()
        result = await rig.runner.wait(run_id)
        assert result.final_output["value"]["d"] == "d(P c(b()))"
        assert await rig.told("step.failed", str(run_id)) == []
        assert [p["reason"] for _, p in await rig.told("step.skipped", str(run_id))] == ["already_completed"] * 2


async def test_a_lost_claim_stops_everything(place: Path | None) -> None:
    work = Work()
    async with Rig(place) as rig:

        async def body(ctx: Any) -> None:
            async def taken(ctx: Any, state: Any) -> None:
                raise LeaseLost(str(ctx.run_id))

            steps = [Step("a", taken), *(work.step(f"s{i}", ["a"]) for i in range(4))]
            with pytest.raises(LeaseLost):
                await StepExecutor(ctx).run(steps)

        await rig.value(body)
        assert work.begun == []


async def test_a_fork_has_what_was_recorded_until_then(place: Path | None) -> None:
    work = Work()
    async with Rig(place) as rig:
        rig.register(running(work.diamond()))
        assert await rig.value(running(work.diamond()), "first") == DIAMOND
        # c was recorded before b, which took longer.
        for step, runs_again in (("b", ["d"]), ("c", ["b", "d"]), ("a", ["b", "c", "d"])):
            new = await rig.runner.fork("first", step)
            work.begun.clear()
            assert await rig.runner.run_once()
            result = (await rig.runner.wait(new)).raise_for_status()
            assert result.final_output["value"] == DIAMOND
            assert work.begun == runs_again


# -- over a context without a journal


async def test_a_plain_context_resumes_a_graph() -> None:
    work, ctx = Work(), MockRunContext()
    work.broken = {"c"}
    with pytest.raises(StepExecutionError):
        await StepExecutor(ctx).run(work.diamond())
    assert sorted(work.begun) == ["a", "b", "c"]
    work.broken = set()
    work.begun.clear()
    ctx.events.clear()
    assert await StepExecutor(ctx).run(work.diamond()) == DIAMOND
    assert work.begun == ["c", "d"]
    assert [(k, p["step_name"]) for k, p in ctx.events if k == "step.skipped"] == [
        ("step.skipped", "a"),
        ("step.skipped", "b"),
    ]


async def test_a_plain_context_never_loses_a_result_that_was_saved() -> None:
    """Steps that end at once save one after the other: the last checkpoint has them all."""

    class Slow(MockRunContext):
        turns = 9

        async def checkpoint(self, state: dict[str, Any]) -> None:
            self.turns -= 1
            for _ in range(self.turns):  # the later, the quicker
                await asyncio.sleep(0)
            await super().checkpoint(state)

    work, ctx = Work(), Slow()
    await StepExecutor(ctx).run([*(work.step(name) for name in "abcdefg"), work.step("h", ["a"])])
    sizes = [len(each["_step_executor_state"]["completed_steps"]) for each in ctx.get_checkpoints()]
    assert sizes == sorted(sizes)
    assert sizes[-1] == 8


async def test_a_plain_context_that_is_cancelled_begins_nothing_more() -> None:
    work, ctx = Work(), MockRunContext()

    async def stop(ctx: Any, state: Any) -> None:
        ctx.cancel()

    with pytest.raises(StepCancelledError):
        await StepExecutor(ctx).run([Step("a", stop), work.step("b", ["a"]), work.step("c", ["a"])])
    assert work.begun == []


async def test_a_graph_within_a_step_is_a_list_of_its_own(place: Path | None) -> None:
    work = Work()
    work.broken = {"y"}
    async with Rig(place) as rig:

        def outer(name: str) -> Step:
            async def fn(ctx: Any, state: Any) -> Any:
                return await StepExecutor(ctx, checkpoint_key=name).run([work.step("x"), work.step("y", ["x"])])

            return Step(name, fn)

        steps = [outer("left"), outer("right"), Step("end", lambda ctx, state: 1, depends_on=["left", "right"])]
        await rig.go(running(steps))
        assert sorted(work.begun) == ["x", "x", "y", "y"]
        work.broken = set()
        work.begun.clear()
        assert (await rig.value(running(steps)))["right"] == {"x": "x()", "y": "y(x())"}
        assert work.begun == ["y", "y"]


async def test_chains_within_steps_tell_each_start_once(place: Path | None) -> None:
    work = Work()
    async with Rig(place) as rig:

        def outer(name: str, turns: int) -> Step:
            async def fn(ctx: Any, state: Any) -> Any:
                names = [f"{name}{i}" for i in range(5)]
                return await StepExecutor(ctx, checkpoint_key=name).run(
                    [work.step(each, turns=turns) for each in names]
                )

            return Step(name, fn)

        await rig.value(running([outer("x", 1), outer("y", 3), Step("end", lambda ctx, state: 1, depends_on=["x"])]))
        started = [p["step_name"] for _, p in await rig.told("step.started")]
    assert len(started) == len(set(started)) == 13


async def test_the_cut_run_is_taken_up_where_it_was(place: Path | None) -> None:
    inside = asyncio.Event()
    work = Work()

    async def hangs(ctx: Any, state: Any) -> None:
        await until(recorded)
        inside.set()
        await asyncio.Event().wait()

    async def marks(ctx: Any, state: Any) -> None:
        recorded.set()

    recorded = asyncio.Event()
    async with Rig(place) as rig:
        first = [work.step("a"), Step("b", hangs), work.step("c", ["a"]), Step("d", marks, depends_on=["c"])]
        await rig.cut(running(first), inside)
        work.begun.clear()
        second = [work.step("a"), work.step("b"), work.step("c", ["a"]), work.step("d", ["c"])]
        await rig.value(running(second))
        assert work.begun in (["b"], ["b", "d"])  # d may have been cut off on its way to the journal


async def test_a_graph_that_outlives_its_run_is_collected_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda about: said.append(about.exc_value))

    async def body(ctx: Any) -> None:
        begun = asyncio.Event()

        async def hang(ctx: Any, state: Any) -> None:
            begun.set()
            await asyncio.get_running_loop().create_future()

        async def go(ctx: Any, state: Any) -> None: ...

        _ = asyncio.ensure_future(StepExecutor(ctx).run([Step("a", hang), Step("b", go, depends_on=["a"])]))  # noqa: RUF006
        await begun.wait()

    async with Rig() as rig:
        await rig.value(body)
        gc.collect()
    assert said == []


async def test_a_plain_context_saves_the_initial_state_of_a_graph_whose_first_step_fails() -> None:
    work, ctx = Work(), MockRunContext()
    work.broken = {"a"}
    with pytest.raises(StepExecutionError):
        await StepExecutor(ctx).run([work.step("a"), work.step("b"), work.step("c", ["a"])], initial_state={"n": 1})
    saved = ctx.get_checkpoints()[-1]["_step_executor_state"]
    assert (saved["completed_steps"], saved["custom_state"]) == (["b"], {"n": 1})
