"""Tool calls of model clients and their results."""

from __future__ import annotations

import copy
import json
from typing import Any

from .checks import Cases, same
from .llm_fixtures import ASK, OSLO, ROME, WEATHER, Call, Case, Echo, Make, asks_for, call_parts, opened, received

CASES: Cases[Case] = Cases()

AWKWARD: dict[str, Any] = {
    "city": 'Köln "Mitte" 🌧',
    "days": 2,
    "at": [50.94, -6.96, None, True],
    "deep": {"a": {"b": [{}]}},
    "": "",
}


@CASES
async def a_call_is_a_dict_and_an_object(make: Make) -> None:
    async with opened(make, asks_for(OSLO)) as client:
        response = await client.generate(ASK, tools=[WEATHER])
        same(response.finish_reason, "tool_calls", "the finish reason")
        same(response.message.get("content") or "", "", "the content next to a call")
        same(len(response.tool_calls), 1, "the number of calls")
        call = response.tool_calls[0]
        same(call_parts(call), ("call_a", "weather", {"city": "Oslo"}), "a call as an object")
        same((call["id"], call.get("type")), ("call_a", "function"), "id and type of a call as a dict")
        function = call["function"]
        same((function["name"], function["arguments"]), ("weather", call.arguments), "the function of a call as a dict")
        same([dict(each) for each in response.message["tool_calls"]], [dict(call)], "the calls in the message")


@CASES
async def calls_side_by_side_are_told_apart(make: Make) -> None:
    async with opened(make, asks_for(OSLO, ROME, text="Let me look.")) as client:
        response = await client.generate(ASK, tools=[WEATHER])
        same(response.message.get("content"), "Let me look.", "the text before the calls")
        calls = [call_parts(call) for call in response.tool_calls]
        same(calls, [("call_a", "weather", {"city": "Oslo"}), ("call_b", "weather", {"city": "Rome"})], "the calls")


@CASES
async def arguments_are_as_given(make: Make) -> None:
    async with opened(make, asks_for(Call("call_a", "weather", AWKWARD), Call("call_b", "weather"))) as client:
        response = await client.generate(ASK, tools=[WEATHER])
        same([call_parts(call)[2] for call in response.tool_calls], [AWKWARD, {}], "arguments")


@CASES
async def results_of_tools_are_sent_back(make: Make) -> None:
    async with opened(make, asks_for(OSLO, ROME, text="Let me look."), Echo()) as client:
        message = (await client.generate(ASK, tools=[WEATHER])).message
        stored = json.loads(json.dumps(message))
        same(stored, message, "a message with calls after it was stored as JSON")
        results = [
            {"role": "tool", "tool_call_id": "call_a", "content": "4 °C in Oslo"},
            {"role": "tool", "tool_call_id": "call_b", "content": "21 °C in Rome", "metadata": {"is_error": False}},
        ]
        messages = [*ASK, stored, *results]
        before = copy.deepcopy(messages)
        sent = received((await client.generate(messages, tools=[WEATHER])).message["content"])
        same(messages, before, "the messages after they were sent")
        for value in ("Let me look.", "Oslo", "Rome", "4 °C in Oslo", "21 °C in Rome"):
            same(value in sent, True, f"whether {value!r} is in the second request, got {sent!r:.300}")
        for call_id in ("call_a", "call_b"):
            same(sent.count(call_id), 2, f"how often the request names {call_id}: the call and its result")
