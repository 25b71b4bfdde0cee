"""A loop with approvals, edits, parallel calls, a handoff and broken streams, killed at each of its writes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any
from uuid import UUID

import httpx
import pytest

from agent_runtime_core.agents import ToolCallingAgent
from agent_runtime_core.interfaces import RunContext
from agent_runtime_core.loop import agent_tool
from agent_runtime_core.persistence import ConversationMessage
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunnerConfig
from agent_runtime_core.testing import crash_everywhere
from agent_runtime_core.tools.registry import ToolRegistry
from agent_runtime_core.tools.tool import Tool
from tests.support.provider_server import events
from tests.support.scripted_model import Scripted, call

pytest.importorskip("openai")

from agent_runtime_core.llm.openai import OpenAIClient

ROOM = "00000000-0000-4000-8000-000000000001"
ASKED = {"messages": [{"role": "user", "content": "Pay me."}], "conversation_id": ROOM}
CONFIG = RunnerConfig(park_after=0, retry_backoff_base=0)
FIRST = [
    call("look", {"at": 1}, "a"), call("look", {"at": 2}, "b"), call("look", {"at": 1}, "a"),
    call("pay", {"amount": 20}, "c"), call("pay", {"amount": 140}, "d"), call("pay", {"amount": 140}, "d"),
    call("refund", {"orders": "[7, 8]"}, "e"), call("count", {"orders": "[7, 8]"}, "f"),
]  # fmt: skip
SECOND = [call("clerk", {"task": "Tell it."}, "g"), call("pay", {"amount": 30}, "h"), call("look", {"at": 3}, "i")]
#: The answers to the questions, in the other order than the questions.
ANSWERS = {
    "tool:refund": {"approved": True, "tool_args": {"orders": [9]}},
    "tool:pay": {"approved": True, "arguments": {"amount": 37}},
    "allowed": True,
}
#: Role, text and arguments of the calls.
MESSAGES: list[list[Any]] = [
    ["user", "Pay me."],
    [
        "assistant", "I look.", {"at": 1}, {"at": 2}, {"amount": 20}, {"amount": 37}, {"orders": [9]},
        {"orders": "[7, 8]"},
    ],
    ["tool", "looked at 1"], ["tool", "looked at 2"], ["tool", "paid 20.0"], ["tool", "paid 37.0"],
    ["tool", "refunded [9]"], ["tool", "2"],
    ["assistant", "I hand over.", {"task": "Tell it."}, {"amount": 30}, {"at": 3}],
    ["tool", "You were paid."], ["tool", "paid 30.0"], ["tool", "looked at 3"],
    ["assistant", "You were paid."],
]  # fmt: skip

effects: dict[str | None, Any] = {}
requests: list[dict[str, Any]] = []


async def pay(amount: float, ctx: RunContext) -> str:
    effects[ctx.idempotency_key] = amount  # the service recognizes the key
    return f"paid {amount}"


async def refund(orders: list[int], ctx: RunContext) -> str:
    effects[ctx.idempotency_key] = orders
    return f"refunded {orders}"


def count(orders: list[int]) -> int:
    return len(orders)


def above_100(arguments: dict[str, Any], ctx: Any) -> bool:
    return bool(arguments["amount"] > 100)


def events_of(text: str, calls: Sequence[Any] = (), reason: str | None = None) -> bytes:
    deltas: list[Any] = [{"content": text}, *({"tool_calls": [{"index": n, **each}]} for n, each in enumerate(calls))]
    if reason is not None:
        deltas.append({})
    choices: list[Any] = [{"index": 0, "delta": each, "finish_reason": None} for each in deltas]
    choices[-1]["finish_reason"] = reason
    return events(*({"id": "c", "model": "gpt-4o", "choices": [each]} for each in choices), end="")


class Front(ToolCallingAgent):
    key, system_prompt, tools, stream = "front", "front", ToolRegistry(), True
    tools.register(Tool.from_function(lambda at: f"looked at {at}", name="look"))
    tools.register(Tool.from_function(count))
    tools.register(agent_tool("clerk", handoff=True))
    tools.register(Tool.from_function(pay, has_side_effects=True, requires_confirmation=above_100))
    tools.register(Tool.from_function(refund, has_side_effects=True, requires_confirmation=True))
    breaks = False

    def __init__(self) -> None:
        transport = httpx.AsyncClient(transport=httpx.MockTransport(self.answers))
        self.client = OpenAIClient("sk-test", http_client=transport)

    def get_llm_client(self) -> OpenAIClient:
        return self.client

    async def before_run(self, ctx: Any) -> None:
        self.breaks = ctx.failures == 0

    async def on_tool_call(self, ctx: RunContext, tool_name: str, tool_args: dict[str, Any]) -> None:
        if tool_args == {"amount": 20}:
            await ctx.approve("allowed", key="allowed")

    def answers(self, request: httpx.Request) -> httpx.Response:
        """Each stream breaks off: the first one after its finish reason, the second one before it if `breaks`."""
        requests.append(json.loads(request.content))
        is_first = requests[-1]["messages"][-1]["role"] == "user"
        body = (
            events_of("I look.", FIRST, "tool_calls") if is_first else events_of("I hand over.", SECOND, "tool_calls")
        )

        async def sent() -> AsyncIterator[bytes]:
            yield events_of("I hand") if self.breaks and not is_first else body
            raise httpx.ReadError("the connection was closed")

        return httpx.Response(200, content=sent(), headers={"content-type": "text/event-stream"})


class Clerk(ToolCallingAgent):
    key, system_prompt, tools = "clerk", "clerk", ToolRegistry()

    def get_llm_client(self) -> Scripted:
        def say(messages: Sequence[Any]) -> str:
            told = {str(each["content"]) for each in messages}
            return "You were paid." if {"paid 37.0", "refunded [9]", "paid 30.0", "looked at 3"} <= told else "?"

        return Scripted(say=say)


def shown(message: Any) -> list[Any]:
    if isinstance(message, ConversationMessage):
        return [message.role, message.content, *(each.arguments for each in message.tool_calls)]
    calls = [json.loads(each["function"]["arguments"]) for each in message.get("tool_calls") or ()]
    return [message["role"], message["content"], *calls]


@pytest.mark.slow  # tests of `crash_everywhere` kill loops that do one of these things
async def test_a_loop_killed_at_any_write_has_one_outcome_and_each_effect_once() -> None:
    report = await crash_everywhere(
        Front, ASKED, agents=[Clerk], config=CONFIG, persistence=True, signals=ANSWERS,
        effects=lambda: dict(effects), reset=effects.clear,
    )  # fmt: skip
    assert report.kills == 2 * report.writes > 60
    assert [shown(each) for each in report.outcome.final_messages if each["role"] != "system"] == MESSAGES
    assert [*effects.values()] == [20, 37, [9], 30]


async def test_its_conversation_has_each_message_once_and_finished_answers_are_not_asked_for_again() -> None:
    """The undisturbed run, with which `crash_everywhere` compares the conversations of the others."""
    requests.clear()
    agents = Registry()
    agents.register(Front())
    agents.register(Clerk())
    async with AgentRunner.open("memory://", registry=agents, config=CONFIG) as runner:
        await runner.submit("front", ASKED, run_id="r")
        while (await runner.get_run("r")).status != "succeeded":
            while await runner.run_once():
                pass
            asked = {each.name: each.request_id for each in await runner.approvals()}
            for name in [each for each in ANSWERS if each in asked][:1]:
                await runner.approve("r", name, ANSWERS[name], request_id=asked[name])
        found = await runner.persistence.conversations.history(UUID(ROOM))
    assert [shown(each) for each in found] == MESSAGES
    assert [each["messages"][-1]["role"] for each in requests] == ["user", "tool", "tool"]
