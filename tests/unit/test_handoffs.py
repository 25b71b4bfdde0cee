"""Calls beside a handoff, calls that a server sends twice, and time limits of tools with effects."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_runtime_core._execution.loop_messages import NOT_RUN
from agent_runtime_core.agents import ToolCallingAgent
from agent_runtime_core.interfaces import RunResult
from agent_runtime_core.llm._openai_format import without_repeats
from agent_runtime_core.loop import agent_tool
from agent_runtime_core.loop.tool_calls import ToolCalls
from agent_runtime_core.runner import AgentRunner, RunnerConfig
from agent_runtime_core.status import RunStatus
from agent_runtime_core.tools.registry import ToolRegistry
from agent_runtime_core.tools.tool import Tool
from tests.support.scripted_model import Scripted, asks, call


def agent(key: str, model: Any, *tools: Tool) -> Any:
    registry = ToolRegistry()
    for each in tools:
        registry.register(each)
    fields = {"key": key, "system_prompt": key, "tools": registry, "get_llm_client": lambda self: model}
    return type(key.title(), (ToolCallingAgent,), fields)()


class Desk:
    """An agent with a tool that reads, a tool that pays, and agents to which it can hand over."""

    def __init__(self, *calls: dict[str, Any], content: str | None = None, **others: Any) -> None:
        self.done: list[str] = []
        self.first = Scripted(asks(*calls, content=content), "the first agent goes on")
        self.others = {name: self._saying(line) for name, line in (others or {"other": "hello"}).items()}
        handoffs = [agent_tool(agent(name, model), handoff=True) for name, model in self.others.items()]
        self.agent = agent(
            "desk",
            self.first,
            Tool.from_function(lambda: self.did("look", "paid on Monday"), name="look"),
            Tool.from_function(lambda: self.did("pay", "receipt 4711"), name="pay", has_side_effects=True),
            *handoffs,
        )

    @staticmethod
    def _saying(line: Any) -> Scripted:
        return Scripted(say=lambda _: line)

    def did(self, name: str, result: str) -> str:
        self.done.append(name)
        return result

    async def run(self) -> RunResult:
        async with AgentRunner(config=RunnerConfig(retry_backoff_base=0)) as runner:
            return await self.started(runner)

    async def started(self, runner: AgentRunner) -> RunResult:
        asked = {"messages": [{"role": "user", "content": "Tell me."}]}
        return await runner.execute(self.agent, "r", asked)


HAND_OVER = call("other", {"task": "Tell the state."}, id="h")


@pytest.mark.parametrize("calls", [*itertools.permutations([call("look", id="l"), call("pay", id="p"), HAND_OVER])])
async def test_a_call_beside_a_handoff_is_executed_and_the_other_agent_gets_its_result(calls: Any) -> None:
    desk = Desk(*calls, content="One moment.")
    result = await desk.run()
    assert result.status is RunStatus.SUCCEEDED, result.error
    assert result.final_output["response"] == "hello"
    assert sorted(desk.done) == ["look", "pay"]
    [seen] = desk.others["other"].asked
    ids = [each["id"] for each in calls if each is not HAND_OVER]
    answer = {"role": "assistant", "content": "One moment.", "tool_calls": [c for c in calls if c is not HAND_OVER]}
    results = {"l": "paid on Monday", "p": "receipt 4711"}
    assert seen == [
        {"role": "system", "content": "other"},
        {"role": "user", "content": "Tell me."},
        answer,
        *({"role": "tool", "tool_call_id": each, "content": results[each]} for each in ids),
        {"role": "user", "content": "Tell the state."},
    ]
    told = {each["tool_call_id"]: each["content"] for each in result.final_messages if each["role"] == "tool"}
    assert told == {**results, "h": "hello"}


async def test_a_handoff_alone_shows_the_other_agent_no_call() -> None:
    desk = Desk(HAND_OVER)
    await desk.run()
    assert [each["role"] for each in desk.others["other"].asked[0]] == ["system", "user", "user"]


async def test_after_a_handoff_the_model_is_told_that_another_one_was_not_run() -> None:
    desk = Desk(HAND_OVER, call("third", {"task": "And you?"}, id="t"), call("pay", id="p"), other="hello", third="hi")
    result = await desk.run()
    assert desk.done == ["pay"]
    assert desk.others["third"].asked == []
    [told] = [each["content"] for each in result.final_messages if each.get("tool_call_id") == "t"]
    assert told.startswith(NOT_RUN)
    assert "another agent" in told


async def test_the_next_agent_takes_over_if_the_first_handoff_fails() -> None:
    desk = Desk(
        HAND_OVER, call("third", {"task": "And you?"}, id="t"), call("look", id="l"), other=ValueError("no"), third="hi"
    )
    result = await desk.run()
    assert result.final_output["response"] == "hi"
    [seen] = desk.others["third"].asked
    assert [each["content"] for each in seen if each["role"] == "tool"][1] == "paid on Monday"
    assert "ValueError" in seen[3]["content"]


# -- one call is one effect


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_call_that_is_sent_twice_under_one_id_is_made_once(streamed: bool) -> None:
    once = call("pay", {"amount": 5}, id="c")
    again = call("pay", '{ "amount":5 }', id="c")
    other = call("pay", {"amount": 6}, id="c")  # the server numbers its calls wrongly
    paid: list[int] = []
    model = Scripted(asks(once, again, other, once), "done")

    def pay(amount: int) -> str:
        paid.append(amount)
        return f"paid {amount}"

    payer = agent("payer", model, Tool.from_function(pay, name="pay", has_side_effects=True))
    type(payer).stream = streamed
    async with AgentRunner() as runner:
        result = await runner.execute(payer, input_data={"messages": [{"role": "user", "content": "pay"}]})
    assert result.status is RunStatus.SUCCEEDED, result.error
    assert paid == [5, 6]
    [ids] = [[one["id"] for one in each["tool_calls"]] for each in result.final_messages if each.get("tool_calls")]
    assert [each["tool_call_id"] for each in result.final_messages if each["role"] == "tool"] == ids
    assert len(set(ids)) == 2


CALLS = st.builds(
    lambda id_, name, arguments: {"id": id_, "function": {"name": name, "arguments": arguments}},
    st.sampled_from(["a", "b", "", None]),
    st.sampled_from(["pay", "look"]),
    st.sampled_from(['{"n":1,"m":true}', '{"m": true, "n": 1}', '{"n":1,"m":1}', "{", "", None]),
)


@settings(deadline=None, database=None, derandomize=True)
@given(st.lists(CALLS, max_size=6))
def test_only_equal_calls_with_one_id_are_one_call(calls: list[dict[str, Any]]) -> None:
    kept = without_repeats(calls)

    def value(one: Mapping[str, Any]) -> Any:
        function = one["function"]
        try:
            arguments = json.dumps(json.loads(function["arguments"]), sort_keys=True)
        except (TypeError, ValueError):
            arguments = str(function["arguments"])
        return (one["id"], function["name"], arguments)

    assert [each for each in kept if not each["id"]] == [each for each in calls if not each["id"]]
    named = Counter(map(value, (each for each in kept if each["id"])))
    assert named.keys() == {value(each) for each in calls if each["id"]}
    assert set(named.values()) <= {1}


# -- a time limit of a tool with effects


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("effects", [True, False])
@pytest.mark.parametrize("retries", [0, 1])
async def test_the_model_is_told_that_a_timed_out_tool_may_have_taken_effect(
    is_async: bool, effects: bool, retries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_runtime_core._core.timeouts.GRACE", 0.01)
    release = threading.Event()

    async def waits() -> None:
        await asyncio.Event().wait()

    def blocks() -> None:
        release.wait()

    model = Scripted(asks(call("pay")), "done")
    tool = Tool.from_function(
        waits if is_async else blocks, name="pay", has_side_effects=effects, timeout=0.01, retries=retries,
        retry_delay=0.0,
    )  # fmt: skip
    async with AgentRunner() as runner:
        await runner.execute(agent("payer", model, tool), input_data={"messages": [{"role": "user", "content": "x"}]})
    release.set()
    told = model.asked[-1][-1]["content"]
    assert told.startswith("Error: tool 'pay' took longer than 0.01 s")
    assert ("may" in told) == (effects or not is_async)


async def test_a_handoff_that_an_earlier_release_began_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gave the other agent no calls of the same answer, and a child run has one input."""
    desk, begun = Desk(call("look", id="l"), HAND_OVER), asyncio.Event()

    async def hangs(messages: list[Any], **options: Any) -> Any:
        begun.set()
        await asyncio.Event().wait()

    other = desk.others["other"]
    with monkeypatch.context() as before:
        before.setattr(ToolCalls, "_handed_over", lambda self: self.session.messages[1:-1])
        before.setattr(other, "generate", hangs)
        async with AgentRunner.open(tmp_path / "a.db") as runner:
            task = asyncio.create_task(desk.started(runner))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    async with AgentRunner.open(tmp_path / "a.db") as runner:
        result = await desk.started(runner)
    assert result.status is RunStatus.SUCCEEDED, result.error
    assert [each["content"] for each in other.asked[0]] == ["other", "Tell me.", "Tell the state."]
