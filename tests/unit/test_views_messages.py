"""The messages of a run: text that a retry invalidated, and the steps that the messages belong to."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, ToolCallingAgent
from agent_runtime_core._core.clock import Clock
from agent_runtime_core._views import messages
from agent_runtime_core._views.export import export
from agent_runtime_core._views.messages import messages_view
from agent_runtime_core._views.timeline import timeline_view
from agent_runtime_core.interfaces import LLMStreamChunk, RunContext
from agent_runtime_core.registry import Registry
from agent_runtime_core.tools import Tool, ToolRegistry
from tests.support.runs import Rig
from tests.support.scripted_model import Scripted, asks, call

QUESTION = {"role": "user", "content": "How is it?"}


@pytest.fixture(params=["memory", "sqlite"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "runs.db" if request.param == "sqlite" else None


class Cut(Scripted):
    """Streams `cut` and then fails, for each text before its lines."""

    clock: Clock

    def __init__(self, cuts: list[str], *lines: Any) -> None:
        super().__init__(*lines)
        self.cuts = cuts

    async def stream(self, messages: list[Any], **options: Any) -> AsyncIterator[LLMStreamChunk]:
        if self.lines and self.lines[0] == "cut":
            self.lines.pop(0)
            await self.clock.sleep(1)  # what was streamed is published after a while
            yield LLMStreamChunk(self.cuts.pop(0))
            raise ConnectionError("cut")
        async for each in super().stream(messages, **options):
            yield each


def weather(city: str) -> str:
    """Tell the weather.

    Args:
        city: The city.
    """
    return f"sunny in {city}"


class Agent(ToolCallingAgent):
    """Answers by a script."""

    key = "agent"
    system_prompt = "You know the weather."
    stream = True
    tools = ToolRegistry()

    def __init__(self, cuts: list[str], *lines: Any) -> None:
        self.client = Cut(cuts, *lines)

    def get_llm_client(self) -> Any:
        return self.client


Agent.tools.register(Tool.from_function(weather))


async def view(rig: Rig, run_id: str = "r", **how: Any) -> dict[str, Any]:
    found = await messages_view(rig.runner, await rig.runner.queue.require(run_id), **how)
    assert json.loads(json.dumps(found)) == found
    assert len(found["step_ids"]) == len(found["items"])
    return found


async def execute(rig: Rig, agent: Agent, run_id: str = "r") -> None:
    agent.client.clock = rig.clock
    rig.registry.register(agent)
    await rig.runner.execute(agent, run_id, {"messages": [QUESTION]})


async def test_text_that_a_retry_invalidated_is_before_the_answer(place: Path | None) -> None:
    async with Rig(place, max_retries=3) as rig:
        await execute(
            rig, Agent(["It is su", "It is"], asks(call("weather", {"city": "Rome"})), "cut", "cut", "Sunny.")
        )
        found = await view(rig)
        plain = await view(rig, invalidated=False)
        row = await rig.runner.queue.require("r")
        live = await messages_view(rig.runner, row._replace(status="running"))
        exported = [each["message"] async for each in export(rig.runner, row) if each["kind"] == "message"]
        rows = timeline_view(row, await rig.records())["items"]
        pages, after = list[Any](), -1
        while True:
            page = await view(rig, after=after, limit=2)
            pages += page["items"]
            if page["next"] is None:
                break
            after = page["next"]
    assert [(each["role"], each.get("content"), each.get("attempt")) for each in found["items"]] == [
        ("user", "How is it?", None), ("assistant", None, None), ("tool", "sunny in Rome", None),
        ("assistant", "It is su", 1), ("assistant", "It is", 2), ("assistant", "Sunny.", None),
    ]  # fmt: skip
    assert [each.get("invalidated") for each in found["items"]] == [None, None, None, True, True, None]
    assert plain["items"] == exported == [each for each in found["items"] if "invalidated" not in each]
    assert live == found
    assert pages == found["items"]
    by_kind = {each["key"]: each["step_id"] for each in rows}
    first, tool, second = (by_kind[key] for key in ("l:0:0", "l:0:0:0", "l:0:1"))
    assert found["step_ids"] == [None, first, tool, second, second, second]


class LyingAgent(Agent):
    """Says that its run starts and resumes, when it does not."""

    key = "liar"

    async def before_run(self, ctx: RunContext) -> None:
        for kind in ("run.started", "run.resumed", "run.succeeded"):
            await ctx.emit(kind, {"attempt": 9})


async def test_what_an_agent_emits_about_its_run_invalidates_no_text(place: Path | None) -> None:
    async with Rig(place, max_retries=3) as rig:
        for agent in (Agent, LyingAgent):
            await execute(rig, agent(["It is su", "It is"], "cut", "cut", "Sunny."), agent.__name__)
        found, lied = [(await view(rig, run))["items"] for run in ("Agent", "LyingAgent")]
    assert [each.get("attempt") for each in found] == [None, 1, 2, None]
    assert lied == found


async def test_text_without_an_answer_is_invalidated_when_the_run_has_finished(place: Path | None) -> None:
    async with Rig(place) as rig:
        await execute(rig, Agent(["It is su"], "cut"))
        found = await view(rig)
        row = await rig.runner.queue.require("r")
        live = await messages_view(rig.runner, row._replace(status="running"))
        assert found["items"] == [
            QUESTION,
            {"role": "assistant", "content": "It is su", "invalidated": True, "attempt": 1},
        ]
        assert live["items"] == [QUESTION]  # the answer may still come
        await rig.runner.resume("r")
        row = await rig.runner.queue.require("r")
        assert (await messages_view(rig.runner, row))["items"] == [QUESTION]  # nobody has started again


async def test_a_very_long_log_is_not_read(place: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Rig(place, max_retries=2) as rig:
        await execute(rig, Agent(["It is su"], "cut", "Sunny."))
        assert len((await view(rig))["items"]) == 3
        monkeypatch.setattr(
            messages, "MOST_EVENTS", await rig.runner.event_bus.head((await rig.runner.get_run("r")).run_id) - 1
        )
        assert len((await view(rig))["items"]) == 2


async def test_the_log_of_a_run_without_retries_is_not_read(
    place: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Rig(place) as rig:
        await execute(rig, Agent([], "Sunny."))

        async def get_events(*_: Any) -> Any:
            raise AssertionError

        monkeypatch.setattr(rig.runner.event_bus, "get_events", get_events)
        monkeypatch.setattr(rig.runner.event_bus, "head", get_events)
        assert [each["content"] for each in (await view(rig))["items"]] == ["How is it?", "Sunny."]


async def test_equal_messages_have_the_steps_of_their_own_turns(place: Path | None) -> None:
    conversation = "5f0a3c1e-7d44-4b7e-9a53-2c1f0b6e8d91"
    url = "memory://" if place is None else str(place)
    async with AgentRunner.open(url, registry=Registry()) as runner:
        for number in range(2):
            given = {"messages": [QUESTION], "conversation_id": conversation}
            await runner.execute(Agent([], "Same."), f"r{number}", given)
        found = await messages_view(runner, await runner.queue.require("r1"))
    assert [each["content"] for each in found["items"]] == ["How is it?", "Same."] * 2
    assert [each is None for each in found["step_ids"]] == [True, True, True, False]


async def test_code_that_emits_deltas_of_its_own_adds_nothing(place: Path | None) -> None:
    async def body(ctx: Any) -> Any:
        for payload in ({"delta": 3}, {"delta": "x", "step_id": ["y"]}, {}, {"delta": "x", "step_id": "unknown"}):
            await ctx.emit("assistant.delta", payload)
        raise ValueError("no")

    async with Rig(place, max_retries=1) as rig:
        await rig.go(body)
        assert (await view(rig))["items"] == []
