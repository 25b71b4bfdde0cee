"""A trimmed conversation has each tool call with its result, or neither, in the shape of every wire."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_runtime_core.agents import ToolCallingAgent
from agent_runtime_core.errors import RequestRefused
from agent_runtime_core.interfaces import LLMResponse, ToolRegistry
from agent_runtime_core.llm._anthropic_format import conversation_of, message_of
from agent_runtime_core.llm._openai_format import outgoing
from agent_runtime_core.loop.model_calls import with_whole_exchanges
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.status import RunStatus
from agent_runtime_core.tools.tool import Tool
from tests.support.scripted_model import Scripted, asks, call

NO_RESULT = "No result: the call was interrupted."


def chat_turn(ids: list[str], speaks: bool, turn: int) -> list[dict[str, Any]]:
    """An answer with calls in OpenAI's format, and its results."""
    answer = asks(*(call("look", id=each) for each in ids), content=f"text {turn}" if speaks else None)
    return [answer, *({"role": "tool", "tool_call_id": each, "content": f"result {turn} {each}"} for each in ids)]


def claude_turn(ids: list[str], speaks: bool, turn: int) -> list[dict[str, Any]]:
    """The same with the blocks of Claude that are sent back to it unchanged, as the loop has them."""
    said: list[dict[str, Any]] = [{"type": "thinking", "thinking": "hm", "signature": "s"}]
    said += [{"type": "text", "text": f"text {turn}"}] if speaks else []
    blocks: list[dict[str, Any]] = [
        *said,
        *({"type": "tool_use", "id": each, "name": "look", "input": {}} for each in ids),
    ]
    return [message_of(blocks), *chat_turn(ids, speaks, turn)[1:]]


def block_turn(ids: list[str], speaks: bool, turn: int) -> list[dict[str, Any]]:
    """The same with Claude's blocks as contents: all results in one message, perhaps with words of the user."""
    answer: list[Any] = [{"type": "tool_use", "id": each, "name": "look", "input": {}} for each in ids]
    results: list[Any] = [{"type": "tool_result", "tool_use_id": each, "content": f"result {turn}"} for each in ids]
    if speaks:
        answer.insert(0, {"type": "text", "text": f"text {turn}"})
        results.append({"type": "text", "text": f"and {turn}"})
    return [{"role": "assistant", "content": answer}, {"role": "user", "content": results}]


@st.composite
def histories(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A conversation in the shape of one wire. Some servers number the calls of each answer from the beginning."""
    make = draw(st.sampled_from([chat_turn, claude_turn, block_turn]))
    renumbers, number = draw(st.booleans()), 0
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    for _ in range(draw(st.integers(1, 4))):
        if draw(st.booleans()):
            messages.append({"role": "user", "content": f"question {len(messages)}"})
        if draw(st.integers(0, 3)):
            count = draw(st.integers(1, 3))
            ids = [f"call_{n if renumbers else number + n}" for n in range(count)]
            number += count
            messages += make(ids, draw(st.booleans()), len(messages))
        else:
            messages.append({"role": "assistant", "content": f"answer {len(messages)}"})
    if draw(st.booleans()):
        messages.append({"role": "user", "content": "a late message"})
    return messages


@st.composite
def trims(draw: st.DrawFn, whole: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a hook may return: the last messages, the first and the last ones, any of them, or copies."""
    kind = draw(st.sampled_from(["last", "ends", "any"]))
    most = len(whole)
    if kind == "last":
        found = whole[most - draw(st.integers(0, most)) :]
    elif kind == "ends":
        first = draw(st.integers(0, most))
        found = whole[:first] + whole[max(first, most - draw(st.integers(0, most))) :]
    else:
        found = [each for each in whole if draw(st.booleans())]
    how = draw(st.sampled_from(["same", "copied", "changed"]))
    if how == "changed":  # for example without the data of a provider
        return [{**each, "changed": True} if each["role"] == "assistant" else each for each in found]
    return copy.deepcopy(found) if how == "copied" else found


def ids_of(message: dict[str, Any], kind: str) -> list[Any]:
    blocks = message["content"] if isinstance(message.get("content"), list) else []
    if kind == "tool_use":
        return [each["id"] for each in (*message.get("tool_calls", ()), *(b for b in blocks if b["type"] == kind))]
    found = [each["tool_use_id"] for each in blocks if each["type"] == kind]
    return [*found, message["tool_call_id"]] if message["role"] == "tool" else found


def is_valid(messages: list[dict[str, Any]]) -> bool:
    """Whether the results of each answer, and no others, follow it directly: OpenAI and Claude reject the rest."""
    waiting: list[Any] = []
    for message in messages:
        results = ids_of(message, "tool_result")
        if bool(results) != bool(waiting) or not set(results) <= set(waiting):
            return False
        waiting = [each for each in waiting if each not in results]
        waiting += ids_of(message, "tool_use")
    return not waiting


def units(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Split a valid conversation into its exchanges and single messages."""
    found: list[list[dict[str, Any]]] = []
    for message in messages:
        if ids_of(message, "tool_result"):
            found[-1].append(message)
        else:
            found.append([message])
    return found


def plain(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in each.items() if name != "changed"} for each in messages]


@settings(
    max_examples=200, deadline=None, database=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(data=st.data(), whole=histories())
def test_each_call_stays_with_its_results_or_both_go(data: Any, whole: list[dict[str, Any]]) -> None:
    assert is_valid(whole)
    trimmed = data.draw(trims(whole))
    before = copy.deepcopy(trimmed)
    sent = with_whole_exchanges(trimmed, whole)
    assert trimmed == before
    assert is_valid(sent)
    assert with_whole_exchanges(sent, whole) == sent
    if is_valid(trimmed) and all(unit in units(whole) for unit in units(plain(trimmed))):
        assert sent == trimmed
    for unit in units(whole):  # what the hook has kept as a whole stays
        if len(unit) == 1 and unit[0] in plain(trimmed) and not ids_of(unit[0], "tool_use"):
            assert unit[0] in plain(sent)
    last: list[Any] = next((unit for unit in reversed(units(whole)) if unit[0]["role"] == "assistant"), [])
    tail = trimmed[max((at for at, each in enumerate(trimmed) if each["role"] == "assistant"), default=-1) + 1 :]
    if len(last) > 1 and any(each in tail for each in last[1:]):  # the model has not seen these results
        assert all(each in plain(sent) for each in last)
    assert is_valid(outgoing(copy.deepcopy(sent), "openai"))
    if any(each["role"] != "system" for each in sent):
        assert NO_RESULT not in str(conversation_of(copy.deepcopy(sent)))


class Strict(Scripted):
    """A model whose server rejects a call without its result, and a result without its call."""

    async def generate(self, messages: list[Any], **options: Any) -> LLMResponse:
        if not is_valid(messages):
            raise RequestRefused("tool_use ids were found without tool_result blocks immediately after")
        return await super().generate(messages, **options)


@pytest.mark.parametrize("kept", range(1, 7))
async def test_an_agent_that_sends_only_the_last_messages_finishes_and_pays_once(kept: int) -> None:
    paid: list[int] = []

    def say(messages: Sequence[Any]) -> Any:
        if any("paid" in str(each["content"]) for each in messages if each["role"] == "tool"):
            return "done"
        return asks(call("look", id="a"), call("pay", id="b"), call("look", id="c"))

    registry = ToolRegistry()

    def pay() -> str:
        paid.append(1)
        return "paid"

    registry.register(Tool.from_function(pay, has_side_effects=True))
    registry.register(Tool.from_function(lambda: "seen", name="look"))
    model = Strict(say=say)

    class Trimming(ToolCallingAgent):
        key, system_prompt, tools = "trimming", "Be brief.", registry

        def get_llm_client(self) -> Strict:
            return model

        def trim(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [messages[0], *messages[len(messages) - kept :]] if kept < len(messages) else messages

    async with AgentRunner() as runner:
        result = await runner.execute(Trimming(), input_data={"messages": [{"role": "user", "content": "pay"}]})
    assert result.status is RunStatus.SUCCEEDED, result.error
    assert len(paid) == 1
