"""Questions to people: each is answered once, by an answer that fits; and what counts as a yes."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import pytest

from agent_runtime_core._core.codec.json import decode
from agent_runtime_core.errors import InvalidArgument, WaitTimeout
from agent_runtime_core.events import InMemoryEventBus
from agent_runtime_core.queue import InMemoryQueue
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunnerConfig
from agent_runtime_core.state import InMemoryStateStore
from agent_runtime_core.status import RunStatus
from agent_runtime_core.testing import VirtualClock, crash_everywhere
from tests.support.runs import Rig, Script

SCHEMA = {"type": "object", "required": ["ok"]}


async def questions(runner: AgentRunner, count: int, run_id: str = "r") -> list[dict[str, Any]]:
    """The first questions of the run, once there are so many."""
    asked: list[dict[str, Any]] = []
    async with asyncio.timeout(10):
        async for event in runner.stream(run_id):
            if event.event_type == "approval.requested":
                asked.append(event.payload)
                if len(asked) == count:
                    break
    return asked


async def twice(ctx: Any) -> list[Any]:
    return [await ctx.approve("pay", {"amount": amount}) for amount in (5, 5000)]


async def test_a_second_answer_to_a_question_is_none_to_the_next() -> None:
    async with Rig() as rig:
        going = asyncio.ensure_future(rig.value(twice))
        await rig.begun()
        await questions(rig.runner, 1)
        assert await rig.runner.approve("r", "pay", "yes")
        assert not await rig.runner.approve("r", "pay", "yes, I said"), "it was answered before"
        await questions(rig.runner, 2)
        assert not going.done()
        assert await rig.runner.approve("r", "pay", "no")
        assert await going == ["yes", "no"]


@pytest.mark.parametrize("engines", [1, 2, 3])
async def test_whoever_reads_the_event_of_a_question_may_answer_it_immediately(engines: int) -> None:
    """The event names the request, so `approve` must know that request: also the second of a name, on any engines."""
    clock = VirtualClock()
    queue = InMemoryQueue(clock=clock)
    bus = InMemoryEventBus(engine=queue.engine if engines == 1 else None, clock=clock)
    state = InMemoryStateStore(engine=bus.engine if engines < 3 else None, clock=clock)
    answered: list[bool] = []
    async with AgentRunner(queue, bus, state, RunnerConfig(), registry=Registry()) as runner:
        commit = bus.engine.commit

        async def answers(guard: Any, ops: Any) -> Any:
            results = await commit(guard, ops)
            rows = [row for op in ops if op.name == "events.publish" for row in op.args[1]]
            for payload in (cast("Any", decode(text)) for _, kind, text, _ in rows if kind == "approval.requested"):
                answered.append(await runner.approve("r", "pay", len(answered), request_id=payload["request_id"]))
            return results

        async def body(ctx: Any) -> Any:
            return [await twice(ctx), await runner.approvals()]

        bus.engine.commit = answers  # type: ignore[method-assign]
        assert (await runner.execute(Script(body), "r")).final_output == {"value": [[0, 1], []]}
        assert answered == [True, True]


async def test_the_same_answer_given_again_is_to_the_same_question() -> None:
    async with Rig() as rig:
        going = asyncio.ensure_future(rig.value(twice))
        await rig.begun()
        await questions(rig.runner, 1)
        assert await rig.runner.approve("r", "pay", "yes", message_id="m-1")
        await questions(rig.runner, 2)
        assert await rig.runner.approve("r", "pay", "yes", message_id="m-1"), "its reply was lost, say"
        assert await rig.runner.approve("r", "pay", "no", message_id="m-2")
        assert await going == ["yes", "no"]


async def test_of_several_questions_that_are_open_one_is_named() -> None:
    async def body(ctx: Any) -> Any:
        return await asyncio.gather(ctx.approve("pay", 1, key="a"), ctx.approve("pay", 2, key="b"))

    async with Rig() as rig:
        going = asyncio.ensure_future(rig.value(body))
        await rig.begun()
        first, second = await questions(rig.runner, 2)
        with pytest.raises(InvalidArgument, match=f"about 1, 2. Known: {first['request_id']}, {second['request_id']}"):
            await rig.runner.approve("r", "pay", "which?")
        assert await rig.runner.approve("r", "pay", "one", request_id=first["request_id"])
        assert not await rig.runner.approve("r", "pay", "one more", request_id=first["request_id"])
        with pytest.raises(InvalidArgument, match="Leave it out if only one is open"):
            await rig.runner.approve("r", "pay", "what", request_id="x")
        assert await rig.runner.approve("r", "pay", "two"), "the one that is open yet"
        assert second["details"] == 2
        assert await going == ["one", "two"]


async def test_what_came_before_the_question_or_by_another_way_has_to_fit_too(caplog: pytest.LogCaptureFixture) -> None:
    async def body(ctx: Any) -> Any:
        await ctx.wait_for_signal("go")
        return await ctx.approve("deploy", schema=SCHEMA)

    async with Rig() as rig:
        going = asyncio.ensure_future(rig.value(body))
        await rig.begun()
        assert await rig.runner.approve("r", "deploy", "early, and no object")
        with caplog.at_level(logging.WARNING):
            await rig.runner.signal("r", "go")
            await questions(rig.runner, 1)
            await rig.runner.signal("r", "deploy", {"nothing": "that fits"})
            await rig.runner.signal("r", "deploy", {"ok": True})
            assert await going == {"ok": True}
        said = [each.getMessage() for each in caplog.records if "ignored an invalid answer" in each.getMessage()]
        assert len(said) == 2
        assert "'deploy'" in said[0]
        assert "missing required property 'ok'" in said[1]


async def test_an_answer_that_came_early_is_kept() -> None:
    async def body(ctx: Any) -> Any:
        await ctx.wait_for_signal("go")
        return await ctx.approve("deploy", schema=SCHEMA)

    async with Rig() as rig:
        going = asyncio.ensure_future(rig.value(body))
        await rig.begun()
        assert await rig.runner.approve("r", "deploy", {"ok": False})
        await rig.runner.signal("r", "go")
        assert await going == {"ok": False}
        assert (await rig.runner.get_run("r")).status is RunStatus.SUCCEEDED


async def test_somebody_elses_event_of_that_type_is_no_question() -> None:
    async def body(ctx: Any) -> Any:
        await ctx.emit("approval.requested", {"name": "pay"})
        return await ctx.wait_for_signal("pay")

    async with Rig() as rig:
        going = asyncio.ensure_future(rig.value(body))
        await rig.begun()
        await questions(rig.runner, 1)
        assert await rig.runner.approve("r", "pay", "yes")
        assert await going == "yes"


async def test_a_crash_at_any_write_leaves_the_same_answers() -> None:
    """Also between a question, its end and the record of its wait."""

    async def asks(ctx: Any) -> Any:
        first = await ctx.approve("plan", {"amount": 5}, schema=SCHEMA)
        try:
            late: Any = await ctx.approve("nobody", timeout=30)
        except WaitTimeout:
            late = "late"
        both = await asyncio.gather(ctx.approve("pay", key="a"), ctx.approve("send", key="b"))
        return {"first": first, "late": late, "both": both}

    answers = {"plan": {"ok": True}, "pay": 1, "send": 2}
    report = await crash_everywhere(lambda: Script(asks), signals=answers)
    assert report.outcome.final_output == {"value": {"first": {"ok": True}, "late": "late", "both": [1, 2]}}
    assert report.kills > 0
