"""A fork begins where another run stood: nothing recorded runs again, all else is its own."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core._core.codec.json import decode
from agent_runtime_core._core.codec.tagged import REGISTRY
from agent_runtime_core._core.codec.typed import register_type
from agent_runtime_core._execution.effects import FORKED_FROM
from agent_runtime_core.errors import IdempotencyConflict, InvalidArgument, StepExecutionError, StorageFull, UnknownRun
from agent_runtime_core.interfaces import ErrorInfo, RunResult
from agent_runtime_core.limits import RunLimits
from agent_runtime_core.loop import agent_tool, run_turn_loop
from agent_runtime_core.runner import AgentRunner, open_run
from agent_runtime_core.steps import Step, StepExecutor
from agent_runtime_core.tools.registry import ToolRegistry
from agent_runtime_core.tools.tool import Tool
from tests.support.runs import Rig, until
from tests.support.scripted_model import Scripted, asks, call


class Log:
    """What ran, and under which idempotency key."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.keys: list[str] = []

    def step(self, name: str, value: Any = None) -> Any:
        async def fn(ctx: Any) -> Any:
            self.ran.append(name)
            self.keys.append(ctx.idempotency_key)
            return name.upper() if value is None else value

        return fn

    def taken(self) -> list[str]:
        ran, self.ran = self.ran, []
        return ran


def steps_of(log: Log, names: Sequence[str] = "abcd") -> Any:
    async def body(ctx: Any) -> Any:
        return [await ctx.step(name, log.step(name), ctx) for name in names]

    return body


async def worked(rig: Rig, run_id: Any) -> RunResult:
    """What comes of a run once workers have done all there is to do."""
    while await rig.runner.run_once():
        pass
    return await rig.runner.wait(run_id, timeout=5)


async def test_only_what_comes_after_the_step_runs(place: Path | None) -> None:
    log = Log()
    async with Rig(place) as rig:
        body = steps_of(log)
        rig.register(body)
        source = await rig.runner.submit("script", {"q": 1}, metadata={"team": "blue"}, priority=3)
        await worked(rig, source)
        before, keys = await rig.records(str(source)), log.keys
        assert log.taken() == [*"abcd"]

        new = await rig.runner.fork(source, "b")
        info = await rig.runner.get_run(new)
        assert (info.status, info.attempt, info.priority, info.input) == ("pending", 1, 3, {"q": 1})
        assert info.metadata["team"] == "blue"
        assert info.metadata[FORKED_FROM]["run_id"] == str(source)
        assert info.metadata[FORKED_FROM]["step"] == "b"
        result = await worked(rig, new)

        assert log.taken() == [*"cd"]
        assert result.final_output == {"value": [*"ABCD"]}
        assert not set(keys[:4]) & set(log.keys[4:]), "its keys are its own"
        assert await rig.records(str(source)) == before
        told = [kind for kind, _ in await rig.told(run_id=str(new))]
        assert told == ["run.started", *["step.started", "step.completed"] * 2, "run.succeeded"]


@pytest.mark.parametrize(
    ("after", "ran"), [("a", "bcd"), ("d", ""), (None, ""), (("c", 0), "d"), (("c", "0"), "d"), ("id", "cd")]
)
async def test_a_step_is_named_in_several_ways(after: Any, ran: str, place: Path | None) -> None:
    log = Log()
    async with Rig(place) as rig:
        await rig.value(steps_of(log))
        log.taken()
        new = await rig.runner.fork("r", log.keys[1].split(":")[1] if after == "id" else after)
        rig.register(steps_of(log))
        await worked(rig, new)
        assert log.taken() == [*ran]


@register_type
@dataclasses.dataclass
class Odd:
    n: int


async def test_who_forks_a_run_need_not_know_its_types(place: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()

    async def body(ctx: Any) -> None:
        await ctx.emit("tool.result", {"result": Odd(1)})
        await ctx.checkpoint({"odd": Odd(2)})
        await ctx.step("a", log.step("a"), ctx)
        await ctx.checkpoint({"odd": Odd(3)})

    async with Rig(place) as rig:
        rig.register(body)
        first = await rig.runner.submit("script")
        await worked(rig, first)
        with monkeypatch.context() as elsewhere:
            elsewhere.delitem(REGISTRY.types, f"{__name__}.Odd")
            forked = await rig.runner.fork(first, after_step="a")
        kept = (await rig.runner.state_store.state(str(forked))).checkpoint
        assert kept is not None
        assert decode(kept) == {"odd": Odd(2)}


async def test_of_several_steps_of_one_name_the_last_counts_unless_the_occurrence_is_said() -> None:
    log = Log()
    async with Rig() as rig:
        await rig.value(steps_of(log, ["x", "x", "y", "x", "z"]))
        rig.register(steps_of(log, ["x", "x", "y", "x", "z"]))
        log.taken()
        await worked(rig, await rig.runner.fork("r", "x"))
        assert log.taken() == ["z"]
        await worked(rig, await rig.runner.fork("r", ("x", 1)))
        assert log.taken() == ["y", "x", "z"]


async def test_a_step_that_is_not_recorded_is_refused_with_the_nearest() -> None:
    async with Rig() as rig:
        await rig.value(steps_of(Log(), ["fetch", "count", "fetch"]))
        with pytest.raises(InvalidArgument, match=r"run 'r': unknown completed step 'fecth'\. Did you mean 'fetch'\?"):
            await rig.runner.fork("r", "fecth")
        with pytest.raises(InvalidArgument, match=r"run 'r': unknown key of step 'fetch' '7'\. Known: 0, 1"):
            await rig.runner.fork("r", ("fetch", 7))
        for wrong in (7, ("a", "b", "c"), ("a", True), ("a", 1.5)):
            with pytest.raises(InvalidArgument, match="after_step must be a step's name"):
                await rig.runner.fork("r", wrong)  # type: ignore[arg-type]
        with pytest.raises(UnknownRun):
            await rig.runner.fork("nowhere")
        waiting = await rig.runner.submit("script")
        with pytest.raises(InvalidArgument, match=r"unknown completed step 'fetch'\. None exist"):
            await rig.runner.fork(waiting, "fetch")
        assert len(await rig.runner.runs()) == 2


async def test_a_list_goes_on_with_the_state_of_that_point(place: Path | None) -> None:
    log = Log()

    def counting(name: str) -> Step:
        async def fn(ctx: Any, state: Any) -> int:
            log.ran.append(name)
            state["n"] = state.get("n", 0) + 1
            return int(state["n"])

        return Step(name, fn)

    async def body(ctx: Any) -> Any:
        executor = StepExecutor(ctx)
        results = await executor.run([counting(name) for name in "abcd"])
        return {**results, "n": executor.state.custom_state["n"]}

    async with Rig(place) as rig:
        assert await rig.value(body) == {"a": 1, "b": 2, "c": 3, "d": 4, "n": 4}
        rig.register(body)
        log.taken()
        new = await rig.runner.fork("r", "b")
        assert (await worked(rig, new)).final_output["value"] == {"a": 1, "b": 2, "c": 3, "d": 4, "n": 4}
        assert log.taken() == ["c", "d"]
        skipped = [payload["step_name"] for _, payload in await rig.told("step.skipped", str(new))]
        assert skipped == ["a", "b"]
        assert not [payload for _, payload in await rig.told("step.started", str(new)) if "in_doubt" in payload]


async def test_a_map_goes_on_with_the_items_that_are_not_copied(place: Path | None) -> None:
    ran: list[int] = []

    async def body(ctx: Any) -> Any:
        async def square(n: int) -> int:
            ran.append(n)
            return n * n

        return await StepExecutor(ctx, max_concurrency=1).map("square", square, range(5))

    async with Rig(place) as rig:
        await rig.value(body)
        rig.register(body)
        ran.clear()
        new = await rig.runner.fork("r", ("square", 2))
        assert (await worked(rig, new)).final_output["value"] == [0, 1, 4, 9, 16]
        assert ran == [3, 4]


async def test_what_was_in_flight_is_not_copied(place: Path | None) -> None:
    inside, ran = asyncio.Event(), list[str]()

    async def body(ctx: Any) -> Any:
        async def slow(ctx: Any) -> str:
            ran.append(str(ctx.run_id))
            if len(ran) == 1:
                inside.set()
                await asyncio.Event().wait()
            return "done"

        await ctx.step("first", lambda: 1)
        return await ctx.step("slow", slow, ctx)

    async with Rig(place) as rig:
        running = asyncio.ensure_future(rig.go(body))
        await until(inside)
        new = await rig.runner.fork("r")
        copied = await rig.records(str(new))
        assert [(each.kind, each.name) for each in copied] == [("forked", ""), ("done", "first")]
        rig.register(body)
        assert (await worked(rig, new)).final_output["value"] == "done"
        assert ran[1] == str(new)
        begun = next(p for kind, p in await rig.told("step.started", str(new)) if p["step_name"] == "slow")
        assert "in_doubt" not in begun
        running.cancel()
        await asyncio.wait({running})


async def test_waits_and_messages_are_copied_by_value_and_new_messages_are_new(place: Path | None) -> None:
    async def body(ctx: Any) -> Any:
        first = await ctx.wait_for_signal("go")
        await ctx.sleep(3600)
        when = await ctx.now()
        await ctx.step("between", lambda: None)
        second = await ctx.wait_for_signal("go")
        return [first, when, second]

    async with Rig(place, park_after=0) as rig:
        rig.register(body)
        source = await rig.runner.submit("script")
        for message in ("one", "two"):
            await rig.runner.signal(source, "go", message)
        while not (await rig.runner.get_run(source)).ended_at:
            await rig.runner.run_once()
            rig.clock.advance(3600)  # type: ignore[attr-defined]
        [_, when, second] = (await rig.runner.wait(source)).final_output["value"]
        assert second == "two"

        new, later = await rig.runner.fork(source, "between"), rig.clock.wall()
        assert await rig.runner.run_once()
        assert (await rig.runner.get_run(new)).status == "waiting"
        assert rig.clock.wall() == later, "nothing is slept again"
        await rig.runner.signal(new, "go", "three")
        assert (await worked(rig, new)).final_output["value"] == ["one", when, "three"]


async def test_children_are_copied_by_value(place: Path | None) -> None:
    log = Log()

    async def child(ctx: Any) -> Any:
        log.ran.append("child")
        return {"answer": 42}

    async def parent(ctx: Any) -> Any:
        result = await ctx.call("child", {})
        return [result.final_output, await ctx.step("after", log.step("after"), ctx)]

    async with Rig(place, park_after=0) as rig:
        rig.register(child, "child")
        rig.register(parent)
        source = await rig.runner.submit("script")
        expected = (await worked(rig, source)).final_output
        assert log.taken() == ["child", "after"]
        new = await rig.runner.fork(source, "call:child")
        assert (await worked(rig, new)).final_output == expected
        assert log.taken() == ["after"]
        assert len(await rig.runner.runs(agent="child")) == 1


async def test_a_child_in_flight_is_called_anew(place: Path | None) -> None:
    async def child(ctx: Any) -> Any:
        return await ctx.wait_for_signal("go")

    async def parent(ctx: Any) -> Any:
        return (await ctx.call("child", {})).final_output["value"]

    async with Rig(place, park_after=0) as rig:
        rig.register(child, "child")
        rig.register(parent)
        source = await rig.runner.submit("script")
        while await rig.runner.run_once():
            pass
        new = await rig.runner.fork(source)
        while await rig.runner.run_once():
            pass
        children = {info.parent_run_id: info.run_id for info in await rig.runner.runs(agent="child")}
        assert children.keys() == {source, new}
        for parent_id, word in ((source, "old"), (new, "new")):
            await rig.runner.signal(children[parent_id], "go", word)
        assert (await worked(rig, source)).final_output["value"] == "old"
        assert (await worked(rig, new)).final_output["value"] == "new"


async def test_failures_the_code_went_on_without_are_copied_and_others_are_tried_again(place: Path | None) -> None:
    log, broken = Log(), True

    async def body(ctx: Any) -> Any:
        def fails(name: str) -> Any:
            def fn() -> str:
                log.ran.append(name)
                if broken:
                    raise ConnectionError(name)
                return name

            return fn

        said = []
        for name in ("x", "y"):  # one failure right behind the other
            try:
                said.append(await ctx.step(name, fails(name)))
            except StepExecutionError as error:
                said.append(f"no {error.step_name}")
        said.append(await ctx.step("plan b", log.step("plan b"), ctx))
        said.append(await ctx.step("z", fails("z")))
        return said

    async with Rig(place) as rig:
        assert (await rig.go(body)).status == "failed"
        assert log.taken() == ["x", "y", "plan b", "z"]
        broken = False
        rig.register(body)
        new = await rig.runner.fork("r")
        assert (await worked(rig, new)).final_output["value"] == ["no x", "no y", "PLAN B", "z"]
        assert log.taken() == ["z"]


async def test_a_failure_that_ended_its_attempt_is_no_record(place: Path | None) -> None:
    ran: list[int] = []

    async def body(ctx: Any) -> Any:
        def sometimes() -> str:
            ran.append(ctx.attempt)
            if len(ran) == 1:
                raise ConnectionError
            return "now"

        said = await ctx.step("x", sometimes, key="x") if ctx.attempt == 1 else "later"
        return [said, await ctx.step("y", lambda: "y")]

    async with Rig(place, max_retries=2) as rig:
        assert await rig.value(body) == ["later", "y"]
        rig.register(body)
        assert (await worked(rig, await rig.runner.fork("r"))).final_output["value"] == ["now", "y"]


@pytest.mark.parametrize(("after", "state"), [("a", None), ("b", {"n": 1}), ("c", {"n": 2}), (None, {"n": 3})])
async def test_the_checkpoint_is_that_of_the_point(after: str | None, state: Any, place: Path | None) -> None:
    seen: list[Any] = []

    async def body(ctx: Any) -> Any:
        seen.append(await ctx.get_state())
        for n, name in enumerate("abc", 1):
            await ctx.step(name, lambda n=n: n)
            await ctx.checkpoint({"n": n})
        return await ctx.get_state()

    async with Rig(place) as rig:
        await rig.value(body)
        rig.register(body)
        seen.clear()
        new = await rig.runner.fork("r", after)
        assert await rig.runner.state_store.get_checkpoint(new) == state
        assert (await worked(rig, new)).final_output["value"] == {"n": 3}
        assert seen == [state]


async def test_a_list_that_was_begun_anew_keeps_its_records(place: Path | None) -> None:
    log = Log()

    async def body(ctx: Any) -> Any:
        async def fn(ctx: Any, state: Any) -> int:
            log.ran.append("step")
            return len(log.ran)

        fresh = await ctx.step("is it fresh", lambda: True)
        executor = StepExecutor(ctx)
        if fresh and not ctx.metadata.get(FORKED_FROM):
            await executor.run([Step("one", fn)])
            return await executor.run([Step("one", fn)], resume=False)
        return await executor.run([Step("one", fn)])

    async with Rig(place) as rig:
        assert await rig.value(body) == {"one": 2}
        assert log.taken() == ["step", "step"]
        rig.register(body)
        assert (await worked(rig, await rig.runner.fork("r"))).final_output["value"] == {"one": 2}
        assert log.taken() == []


async def test_a_transaction_is_not_run_again(tmp_path: Path) -> None:
    def write(conn: Any, n: int) -> int:
        conn.execute("CREATE TABLE IF NOT EXISTS mine (n INTEGER)")
        conn.execute("INSERT INTO mine VALUES (?)", (n,))
        return int(conn.execute("SELECT count(*) FROM mine").fetchone()[0])

    async def body(ctx: Any) -> Any:
        return [await ctx.transaction("one", write, 1), await ctx.transaction("two", write, 2)]

    async with Rig(tmp_path / "runs.db") as rig:
        assert await rig.value(body) == [1, 2]
        rig.register(body)
        assert (await worked(rig, await rig.runner.fork("r", "one"))).final_output["value"] == [1, 3]


# -- the agent loop


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def loop_of(client: Scripted, tools: ToolRegistry, **limits: Any) -> Any:
    async def body(ctx: Any) -> Any:
        messages = [{"role": "user", "content": "sums"}]
        done = await run_turn_loop(ctx, client, tools, RunLimits(**limits), messages=messages)
        return RunResult({"text": done.text}, done.messages, usage=done.usage)

    return body


def sums() -> tuple[Scripted, ToolRegistry, list[int]]:
    made: list[int] = []

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        made.append(a)
        return a + b

    tools = ToolRegistry()
    tools.register(Tool.from_function(add, has_side_effects=True))
    turns = [asks(call("add", {"a": n, "b": 1}, f"c{n}")) for n in range(2)]
    return Scripted(*turns, "done", cost=0.5), tools, made


async def test_a_conversation_goes_on_and_pays_for_nothing_that_was_copied(place: Path | None) -> None:
    client, tools, made = sums()
    async with Rig(place) as rig:
        whole = await rig.go(loop_of(client, tools))
        assert (whole.usage["turns"], whole.usage["tool_calls"], whole.usage["cost_usd"]) == (3, 2, 1.5)
        client.lines, client.asked = ["another end"], []
        made.clear()
        new = await rig.runner.fork("r", ("tool", "l:0:1:0"))
        # Limits count from the fork on: the two turns before it would be too many.
        rig.register(loop_of(client, tools, max_turns=1, max_tool_calls=1, max_tokens=150))
        result = await worked(rig, new)
        assert result.final_output == {"text": "another end"}
        assert (len(client.asked), made) == (1, [])
        assert result.usage == {
            "prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120, "cost_usd": 0.5, "turns": 1,
            "tool_calls": 0,
        }  # fmt: skip
        assert result.final_messages[:-1] == whole.final_messages[:-1]


async def test_the_time_of_copied_calls_does_not_count(place: Path | None) -> None:
    async with Rig(place) as rig:
        client, tools, _ = sums()
        lines = [*client.lines]

        def slowly(messages: Any) -> Any:
            rig.clock.advance(100)  # type: ignore[attr-defined]
            return lines.pop(0)

        client.say = slowly
        await rig.go(loop_of(client, tools))
        client.say, client.lines = None, ["end"]
        new = await rig.runner.fork("r", ("tool", "l:0:1:0"))
        rig.register(loop_of(client, tools, run_timeout=50))
        assert (await worked(rig, new)).status == "succeeded"


async def test_what_was_in_doubt_before_the_fork_does_not_count(place: Path | None) -> None:
    inside, hang = asyncio.Event(), True

    class Hanging(Scripted):
        async def generate(self, messages: list[Any], **options: Any) -> Any:
            if hang:
                inside.set()
                await asyncio.Event().wait()
            return await super().generate(messages, **options)

    client, (_, tools, _) = Hanging(asks(call("add", {"a": 1, "b": 1}, "c")), "end"), sums()
    body = loop_of(client, tools, max_tokens=100_000)
    async with Rig(place) as rig:
        await rig.cut(body, inside)
        hang = False
        whole = await rig.go(body)
        assert whole.usage["estimated_tokens"] > 0, "what was begun is estimated"
        client.lines = ["end"]
        rig.register(body)
        result = await worked(rig, await rig.runner.fork("r", ("model", "l:0:0"), effects="repeat"))
        assert result.usage["total_tokens"] == 120
        assert "estimated_tokens" not in result.usage


async def test_a_tool_call_whose_record_is_not_copied_is_made_and_counts(place: Path | None) -> None:
    client, tools, made = sums()
    async with Rig(place) as rig:
        await rig.go(loop_of(client, tools))
        client.lines, client.asked = ["end"], []
        made.clear()
        new = await rig.runner.fork("r", ("model", "l:0:1"), effects="repeat")
        rig.register(loop_of(client, tools))
        result = await worked(rig, new)
        assert made == [1]
        assert (result.usage["turns"], result.usage["tool_calls"], result.usage["total_tokens"]) == (1, 1, 120)
        calls = [p["tool_call_id"] for _, p in await rig.told("tool.call", str(new))]
        assert calls == ["c1"]


@pytest.mark.parametrize("fails", [False, True])
async def test_another_agent_as_a_tool_is_copied_by_value_and_costs_nothing(fails: bool, place: Path | None) -> None:
    inner, outer = Scripted("inner", cost=1.0), Scripted(asks(call("helper", {"task": "x"}, "c")), "outer", cost=0.25)
    tools = ToolRegistry()
    tools.register(agent_tool("helper"))

    async def helper(ctx: Any) -> Any:
        done = await run_turn_loop(ctx, inner, ToolRegistry())
        error = ErrorInfo("Sorry", "no", retriable=False) if fails else None
        return RunResult({"response": done.text}, usage=done.usage, error=error)

    async with Rig(place, park_after=0) as rig:
        rig.register(helper, "helper")
        rig.register(loop_of(outer, tools))
        source = await rig.runner.submit("script")
        whole = await worked(rig, source)
        assert whole.usage["cost_usd"] == 1.5
        outer.lines, outer.asked = ["again"], []
        new = await rig.runner.fork(source, "call:helper")
        result = await worked(rig, new)
        assert (result.final_output["text"], result.usage["cost_usd"]) == ("again", 0.25)
        assert len(await rig.runner.runs(agent="helper")) == 1


# -- the new run


async def test_the_same_call_with_the_same_id_is_the_same_run(place: Path | None) -> None:
    log = Log()
    async with Rig(place) as rig:
        await rig.value(steps_of(log))
        first = await rig.runner.fork("r", "b", new_run_id="mine")
        assert await rig.runner.fork("r", "b", new_run_id="mine") == first
        rig.register(steps_of(log))
        await worked(rig, first)
        log.taken()
        assert await rig.runner.fork("r", "b", new_run_id="mine") == first
        assert (await rig.runner.get_run("mine")).status == "succeeded"
        assert len(await rig.runner.runs()) == 2
        others: list[tuple[str, dict[str, Any]]] = [
            ("c", {}),
            ("b", {"input": {"other": 1}}),
            ("b", {"effects": "ask"}),
        ]
        for after, how in others:
            with pytest.raises(
                IdempotencyConflict, match=r"run id 'mine' belongs to another run\. Use another new_run_id"
            ):
                await rig.runner.fork("r", after, new_run_id="mine", **how)
        for taken in ("r", await rig.runner.submit("script")):
            with pytest.raises(IdempotencyConflict, match=r"run id '.*' belongs to another run\. Us"):
                await rig.runner.fork("r", "b", new_run_id=taken)


@pytest.mark.parametrize("late", [False, True])
async def test_a_fork_that_runs_is_not_written_to_by_the_same_call(
    late: bool, place: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, end = asyncio.Event(), asyncio.Event()

    async def body(ctx: Any) -> Any:
        await ctx.step("a", lambda: 1)
        if ctx.metadata.get(FORKED_FROM):
            await ctx.checkpoint({"mine": True})
            inside.set()
            await end.wait()
        return await ctx.get_state()

    async with Rig(place) as rig:
        await rig.value(body)
        await rig.runner.state_store.save_checkpoint((await rig.runner.get_run("r")).run_id, {"mine": False})
        rig.register(body)
        new = await rig.runner.fork("r", new_run_id="mine")
        working = asyncio.ensure_future(rig.runner.run_once())
        await until(inside)
        real, looked = rig.runner.queue.row, list[str]()

        async def row(run_id: Any) -> Any:
            looked.append(str(run_id))
            # As if it had looked before the other call was done.
            return None if looked == [str(new)] else await real(run_id)

        journal, copied = rig.runner.state_store.records, (await rig.records("mine"))[:1]

        async def records(run_id: Any, after: int = -1) -> Any:
            return copied if late and str(run_id) == str(new) else await journal(run_id, after)

        there = await real((await rig.runner.get_run("r")).run_id)
        try:
            with monkeypatch.context() as patch:
                patch.setattr(rig.runner.queue, "row", row)
                patch.setattr(rig.runner.state_store, "records", records)
                patch.setattr(rig.runner.queue, "require", lambda *_: asyncio.sleep(0, there))
                assert await rig.runner.fork("r", new_run_id="mine") == new
        finally:
            end.set()
            await working
        assert looked == [str(new)] * 2
        assert (await rig.runner.wait(new)).final_output["value"] == {"mine": True}


async def test_a_fork_has_the_concurrency_key_and_waits_for_its_turn(place: Path | None) -> None:
    inside, end = asyncio.Event(), asyncio.Event()

    async def body(ctx: Any) -> Any:
        await ctx.step("first", lambda: 1)
        inside.set()
        await end.wait()

    async with Rig(place) as rig:
        rig.register(body)
        source = await rig.runner.submit("script", concurrency_key="one at a time")
        working = asyncio.ensure_future(rig.runner.run_once())
        await until(inside)
        new = await rig.runner.fork(source)
        info = await rig.runner.get_run(new)
        assert (info.concurrency_key, info.held) == ("one at a time", True)
        assert not await rig.runner.run_once()
        end.set()
        await working
        assert (await worked(rig, new)).status == "succeeded"


async def test_execute_goes_on_with_a_fork() -> None:
    log = Log()
    async with Rig() as rig:
        agent = rig.register(steps_of(log))
        await rig.runner.execute(agent, "r", {"q": 1})
        log.taken()
        new = await rig.runner.fork("r", "c")
        result = await rig.runner.execute(agent, new, {"q": 1})
        assert (result.run_id, log.taken()) == (new, ["d"])


async def test_another_input_leaves_what_is_recorded_and_says_so(place: Path | None) -> None:
    async def body(ctx: Any) -> Any:
        who = ctx.input["who"]
        hello = await ctx.step("hello", lambda who: f"hello {who}", who)
        return [hello, await ctx.step("bye", lambda who: f"bye {who}", who)]

    async with Rig(place) as rig:
        await rig.value(body, input_data={"who": "Ann"})
        rig.register(body)
        new = await rig.runner.fork("r", "hello", input={"who": "Bob"})
        assert (await worked(rig, new)).final_output["value"] == ["hello Ann", "bye Bob"]
        [(_, skipped)] = await rig.told("step.skipped", str(new))
        assert skipped["input_changed"] is True


async def test_a_fork_can_be_forked(place: Path | None) -> None:
    log = Log()
    async with Rig(place) as rig:
        await rig.value(steps_of(log))
        first = await rig.runner.fork("r", "b")
        rig.register(steps_of(log))
        await worked(rig, first)
        log.taken()
        second = await rig.runner.fork(first, "c")
        assert (await worked(rig, second)).final_output["value"] == [*"ABCD"]
        assert log.taken() == ["d"]
        assert (await rig.runner.get_run(second)).metadata[FORKED_FROM]["run_id"] == str(first)


async def test_a_fork_of_a_fork_has_the_checkpoint_that_the_first_one_began_with(place: Path | None) -> None:
    async def body(ctx: Any) -> Any:
        for n, name in enumerate("abc", 1):
            await ctx.step(name, lambda n=n: n)
            await ctx.checkpoint({"n": n})

    async with Rig(place) as rig:
        await rig.value(body)
        rig.register(body)
        first = await rig.runner.fork("r", "b")
        await worked(rig, first)
        for after, state in (("b", {"n": 1}), ("c", {"n": 2}), (None, {"n": 3})):
            second = await rig.runner.fork(first, after)
            assert await rig.runner.state_store.get_checkpoint(second) == state


async def test_an_open_run_is_forked_and_opened(tmp_path: Path) -> None:
    path, log = tmp_path / "jobs.db", Log()

    async def work(run_id: Any) -> list[Any]:
        async with open_run(path, run_id) as ctx:
            return [await ctx.step(name, log.step(name), ctx) for name in "abc"]

    whole = await work("one")
    log.taken()
    async with AgentRunner.open(path) as runner:
        new = await runner.fork("one", "a", new_run_id="two")
    assert await work("two") == whole
    assert log.taken() == ["b", "c"]
    assert isinstance(new, UUID)


async def test_a_poisonous_fork_is_dead_after_three_crashes(place: Path | None) -> None:
    """Copied records are no progress of its own."""
    async with Rig(place, lease_ttl_seconds=10) as rig:
        client, tools, _ = sums()
        await rig.go(loop_of(client, tools))
        new = await rig.runner.fork("r")
        rig.register(steps_of(Log()))
        for _ in range(3):
            assert await rig.runner.queue.claim("doomed", 10)
            rig.clock.advance(11)  # type: ignore[attr-defined]
        result = await worked(rig, new)
        assert (result.status, result.usage) == ("dead", {})


async def test_a_crash_between_two_engines_leaves_nothing_and_the_same_call_goes_on(tmp_path: Path) -> None:
    log = Log()
    async with Rig(tmp_path / "queue.db") as queue, Rig(tmp_path / "rest.db") as rest:
        places = (queue.runner.queue, rest.runner.event_bus, rest.runner.state_store)
        runner = queue.runner = AgentRunner(*places, queue.runner.config, registry=queue.registry)
        agent = queue.register(steps_of(log))
        await runner.execute(agent, "r")
        log.taken()
        engine: Any = places[0].commits
        real = engine.commit

        async def full(guard: Any, ops: Any) -> Any:
            raise StorageFull("no space")

        engine.commit = full
        with pytest.raises(StorageFull):
            await runner.fork("r", "b", new_run_id="mine")
        engine.commit = real
        with pytest.raises(UnknownRun):
            await runner.get_run("mine")
        assert len(await runner.runs()) == 1

        with pytest.raises(
            IdempotencyConflict, match=r"run id 'mine' belongs to another fork, whose creation was interrupted\. U"
        ):
            await runner.fork("r", "a", new_run_id="mine")
        new = await runner.fork("r", "b", new_run_id="mine")
        assert [each.name for each in await runner.state_store.records(new)] == ["", "a", "b"]
        assert await runner.run_once()
        assert ((await runner.wait(new)).status, log.taken()) == ("succeeded", ["c", "d"])
