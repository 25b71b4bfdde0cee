"""What a context tells and shows: events, checkpoints, its run, its tools and its conversation."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core.errors import InvalidArgument, UnserialisableResult
from agent_runtime_core.interfaces import EventType, RunContext, Tool, ToolRegistry
from agent_runtime_core.steps import Step, StepExecutor
from agent_runtime_core.testing import MockRunContext
from tests.support.runs import Rig, Script, twice

# -- events and checkpoints


async def test_what_was_emitted_is_absorbed_while_replaying(place: Path | None) -> None:
    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            await ctx.emit("one", {"n": 1})
            await ctx.step("a", lambda: 1)
            await ctx.emit("two", {"n": 2})
            await ctx.step("b", lambda: 1)
            await ctx.emit(EventType.ASSISTANT_MESSAGE, {"content": "3"})
            return ctx.attempt

        await twice(rig, body)
        told = [kind for kind, _ in await rig.told()]
        assert told.count("one") == 1
        assert told.count("two") == 1
        assert told.index("one") < told.index("step.started") < told.index("two")


async def test_other_events_of_the_library_and_names_that_look_alike_are_emitted(place: Path | None) -> None:
    kinds = [
        "run.progress",
        "run.",
        "runs.failed",
        "Run.failed",
        "run",
        "myapp.run.failed",
        EventType.STEP_STARTED,
        EventType.PROGRESS_UPDATE,
    ]
    ctx = MockRunContext()
    for kind in kinds:
        await ctx.emit(kind, {})
    async with Rig(place) as rig:

        async def body(ctx: Any) -> None:
            for kind in kinds:
                await ctx.emit(kind, {})

        await rig.value(body)
        told = [kind for kind, _ in await rig.told()]
        assert told[1:-1] == [str(getattr(kind, "value", kind)) for kind in kinds]


@pytest.mark.parametrize("before", ["now", "sleep", "list", "step", "nothing"])
async def test_what_is_emitted_last_comes_once_however_the_run_was_cut(place: Path | None, before: str) -> None:
    async with Rig(place) as rig:
        inside = asyncio.Event()

        async def body(ctx: Any) -> None:
            match before:
                case "now":
                    await ctx.now()
                case "sleep":
                    await ctx.sleep(1)
                case "list":
                    await StepExecutor(ctx).run([Step(name, lambda ctx, state: 1) for name in "ab"])
                case "step":
                    await ctx.step("a", lambda: 1)
            await ctx.emit("after", {})
            if not inside.is_set():
                inside.set()
                await asyncio.Event().wait()

        await rig.cut(body, inside)
        await rig.value(body)
        assert len(await rig.told("after")) == 1


async def test_what_was_not_emitted_before_the_cut_is_emitted_after_it(place: Path | None) -> None:
    async with Rig(place) as rig:
        lives: list[int] = []

        async def body(ctx: Any) -> None:
            async def outer() -> None:
                await ctx.step("inner", lambda: 1)

            lives.append(1)
            await ctx.step("outer", outer)
            if len(lives) == 1:
                raise ConnectionError
            await ctx.emit("after", {})

        await rig.go(body)
        await rig.value(body)
        assert len(await rig.told("after")) == 1


async def test_events_of_a_step_carry_its_ids_and_come_again_with_each_try() -> None:
    left = [1]

    async def step(ctx: RunContext) -> None:
        await ctx.emit("inside", {"n": 1})
        if left[0]:
            left[0] -= 1
            raise ConnectionError

    async with Rig() as rig:
        await rig.value(lambda ctx: ctx.step("a", step, retries=1, retry_delay=0))
        events = [e for e in await rig.runner.event_bus.get_events("r") if e.event_type == "inside"]
        assert len(events) == 2
        assert all(set(e.payload) == {"n", "step_id", "trace_id"} for e in events)


@pytest.mark.parametrize(
    ("kind", "payload", "said"),
    [
        ("", {}, "event_type must be a string of 1 to 255 printable characters, got ''"),
        (3, {}, "event_type must be .*, got 3"),
        ("own", [1], "payload must be a dict, got a list"),
        ("own", "text", "payload must be a dict, got a str"),
    ],
)
async def test_what_is_no_event_is_refused(place: Path | None, kind: Any, payload: Any, said: str) -> None:
    async with Rig(place) as rig:

        async def body(ctx: Any) -> None:
            for inside in (False, True):

                async def tells() -> None:
                    with pytest.raises(InvalidArgument, match=said):
                        await ctx.emit(kind, payload)

                await (ctx.step("step", tells) if inside else tells())
            with pytest.raises(InvalidArgument, match="got 'soon'"):
                await ctx.wait_for_signal("go", timeout="soon")

        await rig.value(body)
        assert await rig.told("own") == []


async def test_a_checkpoint_is_kept_told_and_read_again(place: Path | None) -> None:
    async with Rig(place) as rig:
        states: list[Any] = []

        async def body(ctx: Any) -> None:
            states.append(await ctx.get_state())
            state = {"done": [1], "t": (1, 2)}
            await ctx.checkpoint(state)
            state["done"].append(2)  # type: ignore[attr-defined]
            states.append(await ctx.get_state())
            with pytest.raises(InvalidArgument, match=r"state must be a dict, got \[1\]"):
                await ctx.checkpoint([1])
            if len(states) == 2:
                raise ConnectionError

        await rig.go(body)
        await rig.value(body)
        assert states == [None, *[{"done": [1], "t": (1, 2)}] * 3]
        told = await rig.told("state.checkpoint")
        assert told[0] == ("state.checkpoint", {"state": {"done": [1], "t": (1, 2)}})


async def test_an_event_without_a_json_form_is_refused() -> None:
    async with Rig() as rig:

        async def body(ctx: Any) -> None:
            with pytest.raises(UnserialisableResult, match="bad"):
                await ctx.emit("a", {"bad": object()})
            await ctx.emit("empty")

        await rig.value(body)
        assert await rig.told("empty") == [("empty", {})]


# -- what a context shows


async def test_a_context_shows_its_run(place: Path | None) -> None:
    conversation = UUID(int=5)
    async with Rig(place) as rig:

        async def body(ctx: Any) -> None:
            assert ctx.run_key == "r"
            assert ctx.trace_id == ctx.run_id.hex
            assert ctx.input_messages == [{"role": "user"}]
            assert ctx.params == {"p": 1, "q": 2}
            assert ctx.conversation_id == conversation
            assert ctx.metadata == {"m": 1}
            assert ctx.attempt == 1
            assert (ctx.step_id, ctx.idempotency_key) == (None, None)

        given = {"messages": [{"role": "user"}], "params": {"p": 0, "q": 2}, "conversation_id": conversation}
        await rig.value(body, input_data=given, metadata={"m": 1}, params={"p": 1})

        async def bare(ctx: Any) -> None:
            assert (ctx.input_messages, ctx.params, ctx.conversation_id) == ([], {}, None)

        await rig.value(bare, "bare", input_data={"messages": None, "conversation_id": None})


async def test_tools_are_the_agents_own_or_else_the_runners() -> None:
    def mine() -> None:
        """Mine."""

    class Armed(Script):
        tools = ToolRegistry()

    Armed.tools.register(Tool.from_function(mine))
    seen: list[Any] = []

    async def body(ctx: Any) -> None:
        assert ctx.tools is ctx.tool_registry
        seen.append(ctx.tools)

    async with Rig() as rig:
        shared = rig.runner.tools
        await rig.runner.execute(Script(body))
        await rig.runner.execute(Armed(body))
        empty = Armed(body)
        empty.tools = ToolRegistry()
        await rig.runner.execute(empty)
        assert seen == [shared, Armed.tools, empty.tools]


async def test_a_conversation_may_have_any_name(tmp_path: Path) -> None:
    async with Rig(tmp_path / "runs.db") as rig:
        ids = [
            await rig.value(_conversation_of, f"r{n}", input_data={"conversation_id": name})
            for n, name in enumerate(("support-7", "support-7", "support-8", "5bd5bb05-9e0c-4ac2-a1ba-9a2be0f8a1ce", 7))
        ]
        assert ids[0] == ids[1] != ids[2]
        assert ids[3] == "5bd5bb05-9e0c-4ac2-a1ba-9a2be0f8a1ce"
        assert len(set(ids)) == 4


async def test_an_empty_name_is_no_conversation(tmp_path: Path) -> None:
    """Else all who have none would share one."""
    async with Rig(tmp_path / "runs.db") as rig:
        assert await rig.value(_conversation_of, input_data={"conversation_id": ""}) == "None"


async def _conversation_of(ctx: Any) -> str:
    return str(ctx.conversation_id)


HALF = "half \ud83d"


@pytest.mark.parametrize(
    "ask",
    [
        lambda ctx: ctx.step(HALF, lambda: 1),
        lambda ctx: ctx.step("a", lambda: 1, key=HALF),
        lambda ctx: ctx.emit(HALF, {}),
        lambda ctx: ctx.wait_for_signal(HALF),
        lambda ctx: StepExecutor(ctx).map(HALF, lambda item: item, [1]),
        lambda ctx: StepExecutor(ctx).map("m", lambda item: item, [1], key=lambda item: HALF),
        lambda ctx: StepExecutor(ctx).run([Step(HALF, lambda ctx, state: 1)]),
    ],
    ids=["step", "key", "event", "signal", "map", "key of an item", "list"],
)
async def test_a_name_that_no_store_keeps_is_refused_and_told(place: Path | None, ask: Any) -> None:
    async with Rig(place) as rig:

        async def body(ctx: Any) -> str:
            with pytest.raises(InvalidArgument, match=r", got 'half \\ud83d'"):
                await ask(ctx)
            return str(await ctx.step("whole", lambda: "on it goes"))

        assert await rig.value(body) == "on it goes"
