"""A step, or a run, that ends before the record of its start was written: one record stands for both."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._journal.record import Record
from agent_runtime_core.loop import run_turn_loop
from agent_runtime_core.steps import Step, StepExecutor
from agent_runtime_core.testing import MockLLMClient, MockLLMResponse
from agent_runtime_core.tools.registry import ToolRegistry
from agent_runtime_core.tools.tool import Tool
from tests.support.runs import PATIENT, Body, Rig, Told


async def value(n: int = 1) -> int:
    return n


async def first(ctx: Any, state: Any) -> int:
    state["seen"] = 1
    return 1


async def _imperative(ctx: Any) -> None:
    await ctx.step("a", value, 1, description="what it does")
    await ctx.step("b", value, 2)
    await asyncio.gather(*(ctx.step("c", value, n, key=str(n)) for n in range(3)))


async def _tried_twice(ctx: Any) -> None:
    tries: list[int] = []

    async def fails_once() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise OSError("not yet")

    await ctx.step("a", fails_once, retries=1)


async def _chain(ctx: Any) -> None:
    await StepExecutor(ctx).run([Step("a", first, description="the first"), Step("b", first)])


async def _unsaved(ctx: Any) -> None:
    await StepExecutor(ctx).run([Step("a", first, checkpoint=False), Step("b", first)])


async def _map(ctx: Any) -> None:
    await StepExecutor(ctx).map("m", value, list(range(5)))


async def _nested(ctx: Any) -> None:
    async def outer() -> Any:
        return await ctx.step("inner", value, key="k")

    await ctx.step("outer", outer)


def _tools(tool: Tool) -> ToolRegistry:
    tools = ToolRegistry()
    tools.register(tool)
    return tools


async def _add(a: int, began: str = "no") -> int:
    """Add one."""
    return a + 1


async def _loop(ctx: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "_add", "arguments": '{"a":1,"began":"{}"}'}}
    client = MockLLMClient([MockLLMResponse(tool_calls=[call]), "done"])
    await run_turn_loop(ctx, client, _tools(Tool.from_function(_add)))


def _plain(told: list[Told]) -> list[Told]:
    return [(kind, {name: v for name, v in payload.items() if name != "duration_ms"}) for kind, payload in told]


@pytest.mark.parametrize(
    ("body", "starts"),
    [(_imperative, 0), (_tried_twice, 1), (_chain, 0), (_unsaved, 0), (_nested, 1), (_loop, 0)],
    ids=lambda each: getattr(each, "__name__", None),
)
async def test_events_are_the_same_as_with_two_records(body: Body, starts: int, tmp_path: Path) -> None:
    async with Rig() as apart, Rig(tmp_path / "runs.db", linger=PATIENT) as rig:
        await apart.value(body)
        await rig.value(body)
        assert any(record.kind == "started" for record in await apart.records())
        records = await rig.records()
        assert sum(record.kind == "started" for record in records) == starts
        told, other = _plain(await rig.told()), _plain(await apart.told())
        if body in (_imperative, _unsaved):
            # Where steps end later than the next ones begin, a start may come together with its end, or before.
            told, other = sorted(told, key=repr), sorted(other, key=repr)
        assert told == other
        _whole(records)


async def test_items_of_a_map(tmp_path: Path) -> None:
    async with Rig() as apart, Rig(tmp_path / "runs.db") as rig:
        await apart.value(_map)
        await rig.value(_map)
        told, other = _plain(await rig.told()), _plain(await apart.told())
        assert sorted(told, key=repr) == sorted(other, key=repr)
        _whole(await rig.records())


def _whole(records: list[Record]) -> None:
    assert [record.seq for record in records] == sorted(record.seq for record in records)
    told = [record for record in records if record.nev]
    assert [record.ev for record in told] == [sum(r.nev for r in told[:place]) for place in range(len(told))]


async def test_steps_in_a_row_leave_no_places_free(tmp_path: Path) -> None:
    async with Rig(tmp_path / "runs.db", linger=PATIENT) as rig:

        async def body(ctx: Any) -> None:
            for n in range(4):
                await ctx.step("a", value, n)

        await rig.value(body)
        records = await rig.records()
        assert [record.seq for record in records] == list(range(len(records)))
        assert [record.kind for record in records] == ["attempt", *["done"] * 4, "ended"]


async def test_a_step_that_held_the_loop_has_a_start_of_its_own(tmp_path: Path) -> None:
    async with Rig(tmp_path / "runs.db") as rig:

        async def body(ctx: Any) -> None:
            async def holds() -> None:
                rig.clock.advance(1)  # type: ignore[attr-defined]

            await ctx.step("a", holds)

        await rig.value(body)
        events = await rig.runner.event_bus.get_events("r")
        started, completed = (e for e in events if e.event_type.startswith("step."))
        assert (completed.timestamp - started.timestamp).total_seconds() == 1
        assert completed.payload["duration_ms"] == 1000


async def _nothing(ctx: Any) -> None:
    pass


async def _failing(ctx: Any) -> None:
    raise ValueError('a "began": [] of its own')


@pytest.mark.parametrize("body", [_nothing, _failing], ids=lambda each: each.__name__)
async def test_a_run_that_ends_at_once_has_one_record(body: Body, tmp_path: Path) -> None:
    async with Rig() as apart, Rig(tmp_path / "runs.db", linger=PATIENT) as rig:
        results = [await each.go(body) for each in (apart, rig)]
        assert results[0] == results[1]
        assert [record.kind for record in await apart.records()] == ["attempt", "ended"]
        (record,) = await rig.records()
        assert (record.seq, record.kind, record.ev, record.nev) == (0, "ended", 0, 2)
        told = await rig.told()
        assert [kind for kind, _ in told] == ["run.started", "run.succeeded" if body is _nothing else "run.failed"]
        assert told == await apart.told()
        assert await rig.go(body) == results[1]
        _whole(await rig.records())


async def test_a_run_that_goes_on_and_ends_at_once(tmp_path: Path) -> None:
    async def body(ctx: Any) -> Any:
        return await ctx.wait_for_signal("go")

    async with Rig(park_after=0) as apart, Rig(tmp_path / "runs.db", park_after=0) as rig:
        for each in (apart, rig):
            each.register(body)
            await each.runner.submit("script", run_id="r")
            assert await each.runner.run_once()
            await each.runner.signal("r", "go", "now")
            assert await each.runner.run_once()
        assert await rig.told() == await apart.told()
        assert [kind for kind, _ in await rig.told("run.")] == ["run.started", "run.resumed", "run.succeeded"]
        _whole(await rig.records())


async def test_a_run_that_held_the_loop_has_a_beginning_of_its_own(tmp_path: Path) -> None:
    async with Rig(tmp_path / "runs.db") as rig:

        async def body(ctx: Any) -> None:
            rig.clock.advance(1)  # type: ignore[attr-defined]

        await rig.value(body)
        began, ended = await rig.runner.event_bus.get_events("r")
        assert (ended.timestamp - began.timestamp).total_seconds() == 1


async def test_a_run_that_ends_at_once_is_traced_once(tmp_path: Path) -> None:
    heard: list[str] = []

    async with Rig(tmp_path / "runs.db", linger=PATIENT) as rig:

        async def body(ctx: Any) -> None:
            ctx.journal.writer.on_events = lambda make: heard.extend(kind for kind, _ in make())

        await rig.value(body)
        assert len(await rig.records()) == 1
        assert heard == ["run.succeeded"]


async def test_what_hears_of_it_hears_of_the_start_once(tmp_path: Path) -> None:
    async with Rig(tmp_path / "runs.db") as rig:
        heard: list[str] = []

        async def body(ctx: Any) -> None:
            ctx.journal.writer.on_events = lambda make: heard.extend(kind for kind, _ in make())
            await ctx.step("a", value)
            await StepExecutor(ctx).run([Step("b", first)])

        await rig.value(body)
        assert heard[:5] == ["step.started", "step.completed", "step.started", "progress.update", "step.completed"]


async def test_an_argument_may_have_the_name_of_what_a_start_tells(tmp_path: Path) -> None:
    """A tool call that was cut off, whose arguments are called "until" and "reserve"."""
    inside = asyncio.Event()

    def body(again: bool) -> Body:
        async def remind(until: str, reserve: int) -> str:
            """Say it later."""
            if not again:
                inside.set()
                await asyncio.Event().wait()
            return f"at {until}"

        async def run(ctx: Any) -> str:
            arguments = '{"until":"noon","reserve":3}'
            call = {"id": "c1", "type": "function", "function": {"name": "remind", "arguments": arguments}}
            client = MockLLMClient(["done"] if again else [MockLLMResponse(tool_calls=[call])])
            done = await run_turn_loop(ctx, client, _tools(Tool.from_function(remind)))
            return str(done.messages[-2]["content"])

        return run

    async with Rig(tmp_path / "runs.db") as rig:
        await rig.cut(body(again=False), inside)
        assert await rig.value(body(again=True)) == "at noon"
