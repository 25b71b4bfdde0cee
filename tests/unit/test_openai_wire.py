"""The OpenAI wire with the real SDK, over a transport that keeps what is asked and a raw server that misbehaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai")

from agent_runtime_core._core.codec.json import decode, encode  # noqa: E402
from agent_runtime_core._core.lazy_import import load  # noqa: E402
from agent_runtime_core.agents import ToolCallingAgent  # noqa: E402
from agent_runtime_core.config import configure  # noqa: E402
from agent_runtime_core.errors import (  # noqa: E402
    AuthenticationFailed,
    ContextOverflow,
    InvalidArgument,
    ModelNotFound,
    NotSupported,
    ProviderError,
    ProviderTimeout,
    ProviderUnavailable,
    RateLimited,
    RequestRefused,
    StreamCut,
)
from agent_runtime_core.interfaces import LLMResponse  # noqa: E402
from agent_runtime_core.llm import OpenAIClient, OpenAIConfigurationError, Retries, Timeouts, get_llm_client  # noqa: E402
from agent_runtime_core.llm._client_per_loop import is_loopback  # noqa: E402
from agent_runtime_core.llm._openai_stream import Assembly  # noqa: E402
from agent_runtime_core.llm._retries import Breakers  # noqa: E402
from agent_runtime_core.runner import AgentRunner, RunnerConfig  # noqa: E402
from agent_runtime_core.tools.registry import ToolRegistry  # noqa: E402
from tests.support.cases import for_each  # noqa: E402
from tests.support.provider_server import Script, WireServer, cut_places, events, script, serving, stream  # noqa: E402

SNAPSHOTS = Path(__file__).parent / "snapshots" / "openai"
# openai 3 speaks through httpx2, openai 2 through httpx.
httpx: Any = load(openai.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0])
KEY = "sk-canary-0123456789"
ASK = [{"role": "user", "content": "How warm is it in Oslo?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ONCE = Retries(tries=1)


@pytest.fixture(autouse=True)
def _nothing_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_BASE_URL", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.delenv(name, raising=False)


def completion(message: dict[str, Any], finish_reason: str | None = "stop", **rest: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish_reason}
    return {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "gpt-4o-2024-08-06",
        "choices": [choice],
        **rest,
    }


def chunk(delta: dict[str, Any], finish_reason: str | None = None, **rest: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "gpt-4o", "choices": [choice], **rest}


def call(call_id: str | None, name: str, arguments: Any, **rest: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}, **rest}


def delta(index: int | None, call_id: str | None = None, name: str | None = None, arguments: str | None = None) -> Any:
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    told = {"index": index, "id": call_id, "function": function}
    return {key: value for key, value in told.items() if value is not None}


def over_transport(answer: Any, asked: list[dict[str, Any]], **options: Any) -> OpenAIClient:
    """A client whose requests end in `asked`, at the provider's own address."""

    def handle(request: Any) -> Any:
        asked.append(json.loads(request.content))
        if isinstance(answer, bytes):
            return httpx.Response(200, content=answer, headers={"content-type": "text/event-stream"})
        return httpx.Response(200, json=answer)

    http_client = httpx.AsyncClient(transport=httpx.MockTransport(handle))
    return OpenAIClient(KEY, http_client=http_client, retries=ONCE, **options)


def over_server(server: WireServer, **options: Any) -> OpenAIClient:
    return OpenAIClient(KEY, base_url=server.url, **{"retries": ONCE, **options})


async def told_by(answer: Script, *, streamed: bool = False) -> LLMResponse:
    async with serving(answer) as server:
        client = over_server(server)
        try:
            return await client.generate(ASK, tools=[WEATHER], stream=streamed)
        finally:
            await client.close()


def check_snapshot(name: str, body: dict[str, Any]) -> None:
    """The body is as it was when it was committed; a new one is written once and then has to be looked at."""
    path = SNAPSHOTS / f"{name}.json"
    text = json.dumps(body, indent=2, ensure_ascii=False, sort_keys=True) + "\n"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        pytest.fail(f"{path} was missing and is written now: look at it, then commit it")
    assert text == path.read_text("utf-8")


HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    *ASK,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [call("call_a", "weather", '{"city": "Oslo"}'), call("call_b", "weather", {"city": "Rome"})],
        "provider_fields": {
            "openai": {"reasoning_content": "Two cities.", "tool_calls": {"call_a": {"extra_content": {"s": "x"}}}},
            "anthropic": {"content": [{"type": "thinking", "thinking": "secret of another"}]},
        },
    },
    {"role": "tool", "tool_call_id": "call_a", "content": "4 °C", "metadata": {"is_error": False}},
    {"role": "tool", "tool_call_id": "call_b", "content": {"celsius": 21}},
]
IMAGE = {
    "role": "user",
    "content": [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo=", "detail": "low"}},
    ],
}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "strict": True, "schema": {"type": "object", "properties": {}}},
}


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("text", {"messages": ASK, "temperature": 0.2, "max_tokens": 50}),
        ("tools", {"messages": ASK, "tools": [WEATHER], "tool_choice": "auto", "parallel_tool_calls": False}),
        ("tool_results", {"messages": HISTORY, "tools": [WEATHER]}),
        ("image", {"messages": [IMAGE]}),
        ("structured", {"messages": ASK, "response_format": SCHEMA}),
        ("reasoning", {"messages": ASK, "model": "o4-mini", "max_tokens": 9, "reasoning_effort": "low"}),
        ("own_parameter", {"messages": ASK, "top_k": 3, "extra_body": {"seed_of": "tests"}}),
    ],
)
async def test_a_request_is_sent_as_committed(name: str, asked: dict[str, Any]) -> None:
    bodies: list[dict[str, Any]] = []
    client = over_transport(completion({"content": "4"}), bodies)
    await client.generate(**asked)
    await client.close()
    check_snapshot(name, bodies[0])


async def test_a_streamed_request_is_sent_as_committed() -> None:
    bodies: list[dict[str, Any]] = []
    client = over_transport(events(chunk({"content": "4"}, "stop")), bodies)
    await client.generate(ASK, stream=True)
    await client.generate(ASK, stream=True, stream_options=None)
    await client.close()
    check_snapshot("streaming", bodies[0])
    assert bodies[1] == {key: value for key, value in bodies[0].items() if key != "stream_options"}


@pytest.mark.parametrize(("model", "name"), [("gpt-4o", "max_tokens"), ("openai/gpt-5-mini", "max_completion_tokens")])
async def test_another_server_is_told_its_own_word_for_the_limit(model: str, name: str) -> None:
    async with serving(script(completion({"content": "4"}))) as server:
        client = over_server(server)
        await client.generate(ASK, model=model, max_tokens=7)
        await client.close()
    assert server.asked[0][name] == 7
    assert len({"max_tokens", "max_completion_tokens"} & server.asked[0].keys()) == 1


async def test_a_tool_can_be_chosen_by_its_name() -> None:
    tools = [{"type": "function", "function": {"name": "find", "parameters": {}}}]
    bodies: list[dict[str, Any]] = []
    client = over_transport(completion({"content": "4"}), bodies)
    await client.generate(ASK, tools=tools, tool_choice="find")
    await client.generate(ASK, tools=tools, tool_choice="required")
    await client.close()
    assert bodies[0]["tool_choice"] == {"type": "function", "function": {"name": "find"}}
    assert bodies[1]["tool_choice"] == "required"


async def test_the_message_handed_in_is_left_alone() -> None:
    before = json.dumps(HISTORY)
    client = over_transport(completion({"content": "4"}), [])
    await client.generate(HISTORY)
    await client.close()
    assert json.dumps(HISTORY) == before


def counts(prompt: int, completion: int, **rest: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion, **rest}


async def test_text_and_usage() -> None:
    usage = {
        "prompt_tokens": 100,
        "completion_tokens": 30,
        "total_tokens": 130,
        "prompt_tokens_details": {"cached_tokens": 64, "audio_tokens": None},
        "completion_tokens_details": {"reasoning_tokens": 20},
    }
    response = await told_by(script(completion({"content": "4 °C"}, usage=usage)))
    assert response.message == {"role": "assistant", "content": "4 °C"}
    assert (response.finish_reason, response.model) == ("stop", "gpt-4o-2024-08-06")
    assert response.usage == {
        "prompt_tokens": 100,
        "completion_tokens": 30,
        "total_tokens": 130,
        "cached_tokens": 64,
        "reasoning_tokens": 20,
    }


@for_each(
    ("told", "usage"),
    [
        (None, {}),
        ({"prompt_tokens": 3, "completion_tokens": 2}, {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}),
        # Reasoning counted beside the completion belongs to it.
        (
            {
                "prompt_tokens": 3,
                "completion_tokens": 2,
                "total_tokens": 15,
                "completion_tokens_details": {"reasoning_tokens": 10},
            },
            {"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15, "reasoning_tokens": 10},
        ),
        (
            {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11, "prompt_cache_hit_tokens": 8},
            {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11, "cached_tokens": 8},
        ),
        (
            {"prompt_tokens": 9, "total_tokens": None, "prompt_tokens_details": {"cache_write_tokens": 4}},
            {"prompt_tokens": 9, "cache_write_tokens": 4},
        ),
        # Reasoning that only the total has is output.
        ({"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 50}, counts(3, 47)),
        ({"prompt_tokens": 3, "total_tokens": 50}, counts(3, 47)),
        ({"completion_tokens": 2, "total_tokens": 50}, counts(48, 2)),
        ({"total_tokens": 50}, counts(0, 50)),
        ({"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 0}, counts(3, 2)),
        ({"input_tokens": 3, "output_tokens": 2}, counts(3, 2)),
        ({"prompt_tokens": "3", "completion_tokens": "2", "reasoning_tokens": "9"}, counts(3, 11, reasoning_tokens=9)),
        ({"prompt_tokens": "3", "completion_tokens": "none", "total_tokens": math.inf}, {"prompt_tokens": 3}),
        ({"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}, {}),
        ({"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}, {"prompt_tokens": 3, "total_tokens": 3}),
        (
            {"prompt_tokens": 3, "completion_tokens": 2, "completion_tokens_details": {"reasoning_tokens": 10}},
            counts(3, 12, reasoning_tokens=10),
        ),
        # The prompt is counted without its cached tokens.
        (
            {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 105, "cache_read_input_tokens": 100},
            counts(103, 2, cached_tokens=100),
        ),
        (
            {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 100}},
            counts(103, 2, cached_tokens=100),
        ),
    ],
)
async def test_usage_of_other_servers(told: Any, usage: dict[str, int]) -> None:
    assert (await told_by(script(completion({"content": "x"}, usage=told)))).usage == usage


async def test_tool_calls_survive_the_round_trip() -> None:
    calls = [call("call_a", "weather", '{"city": "Oslo"}', extra_content={"google": {"thought_signature": "s"}})]
    message = {"content": None, "tool_calls": calls, "reasoning_content": "Ask the tool.", "annotations": []}
    bodies: list[dict[str, Any]] = []
    client = over_transport(completion(message, "tool_calls"), bodies)
    response = await client.generate(ASK, tools=[WEATHER])
    asked = response.tool_calls
    assert [(each.id, each.name, each.arguments) for each in asked] == [("call_a", "weather", '{"city": "Oslo"}')]
    assert response.message["provider_fields"]["openai"]["reasoning_content"] == "Ask the tool."
    await client.generate([*ASK, response.message, {"role": "tool", "tool_call_id": "call_a", "content": "4"}])
    await client.close()
    assert bodies[1]["messages"][1] == {"role": "assistant", **{k: v for k, v in message.items() if v != []}}


async def test_calls_without_ids_get_the_same_ones_each_time() -> None:
    calls = [
        call(None, "weather", {"city": "Oslo"}),
        call("", "weather", None),
        call("x", "a", "{}"),
        call("x", "b", ""),
    ]
    client = over_transport(completion({"tool_calls": calls}), [])
    first = await client.generate(ASK)
    again = await client.generate(ASK)
    later = await client.generate([*ASK, first.message])
    await client.close()
    assert [(each.id, each.arguments) for each in first.tool_calls] == [
        ("call_0", '{"city": "Oslo"}'),
        ("call_1", "{}"),
        ("x", "{}"),
        ("call_2", "{}"),
    ]
    assert again.message == first.message
    assert [each.id for each in later.tool_calls] == ["call_4", "call_5", "x", "call_6"]


STREAMED = [
    chunk({"role": "assistant", "content": "", "refusal": None}),
    chunk({"content": "Let me "}),
    chunk({"content": "see."}),
    chunk({"tool_calls": [delta(0, "call_a", "weather", "")]}),
    chunk({"tool_calls": [delta(0, arguments='{"city": ')]}),
    chunk({"tool_calls": [delta(0, arguments='"Oslo"}')]}),
    chunk({"tool_calls": [delta(1, "call_b", "weather", "")]}),
    chunk({"tool_calls": [delta(1, arguments='{"city": "Rome"}')]}),
    chunk({}, "tool_calls"),
    {**chunk({}), "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}},
]


async def test_a_stream_gives_its_text_in_pieces_and_the_answer_last() -> None:
    async with serving(stream(*STREAMED)) as server:
        client = over_server(server)
        chunks = [each async for each in client.stream(ASK, tools=[WEATHER])]
        await client.close()
    assert [each.delta for each in chunks] == ["Let me ", "see.", ""]
    last = chunks[-1]
    assert last.response is not None
    assert last.response.message == {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [call("call_a", "weather", '{"city": "Oslo"}'), call("call_b", "weather", '{"city": "Rome"}')],
    }
    assert (last.finish_reason, last.usage) == (
        "tool_calls",
        {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14},
    )


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("prices", [{}, {"gpt-4o": {"input": 1000, "output": 1000}}])
async def test_a_cost_that_the_server_reports_is_the_cost(prices: dict[str, Any], streamed: bool) -> None:
    configure(model_prices=prices)
    usage = {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14, "cost": 0.00011018}
    pieces = (chunk({"content": "4 °C"}), chunk({}, "stop"), {**chunk({}), "choices": [], "usage": usage})
    whole = script(completion({"content": "4 °C"}, usage=usage))
    async with serving(stream(*pieces) if streamed else whole) as server:
        client = over_server(server)
        response = await client.generate(ASK, stream=streamed)
        await client.close()
    assert response.cost_usd == 0.00011018
    assert response.usage == {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("prices", [{}, {"gpt-4o": {"input": 1000, "output": 1000}}])
async def test_the_cost_of_an_answer_that_is_thrown_away_is_the_reported_cost(
    prices: dict[str, Any], streamed: bool
) -> None:
    """Also after a resume, and each cost counts once against the limit."""
    configure(model_prices=prices)
    limits = {"max_cost_usd": 0.00034} if prices else {}
    usage = {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14, "cost": 0.00011018}
    broken = (chunk({"content": "4"}), {**chunk({}), "choices": [], "usage": usage})
    failed = stream(*broken, end="") if streamed else script(completion({}, "network_error", usage=usage))
    good = (
        stream(chunk({"content": "4 °C"}, "stop", usage=usage))
        if streamed
        else script(completion({"content": "4 °C"}, usage=usage))
    )
    agent = type(
        "Weather", (ToolCallingAgent,), {"key": "w", "system_prompt": "w", "tools": ToolRegistry(), "stream": streamed}
    )()
    async with serving(failed, failed, good, good) as server, AgentRunner(config=RunnerConfig(max_retries=1)) as runner:
        client = over_server(server)
        agent.get_llm_client = lambda: client
        runner.registry.register(agent)
        await runner.submit("w", {"messages": ASK, "limits": limits}, run_id="r")
        for spent, requests in ((0.00011018, 1), (0.00022036, 2), (0.00033054, 3)):
            assert await runner.run_once()
            result = await runner.wait("r", timeout=0)
            assert (result.usage["cost_usd"], len(server.asked)) == (spent, requests)
            if result.status != "succeeded":
                await runner.resume("r")
        assert result.status == "succeeded", result.error
        await client.close()


def assembled(*tool_calls: Sequence[Any], finish_reason: str = "tool_calls") -> list[tuple[str, str, str]]:
    assembly = Assembly("openai", "m", set())
    for each in tool_calls:
        assembly.add(chunk({"tool_calls": each}))
    assembly.add(chunk({}, finish_reason))
    answer = assembly.answer()
    assert answer is not None
    return [
        (each["id"], each["function"]["name"], each["function"]["arguments"])
        for each in answer.message.get("tool_calls", ())
    ]


TWO = [("a", "f", '{"x": 1}'), ("b", "g", '{"y": 2}')]
MADE_UP = [("call_0", "f", '{"x": 1}'), ("call_1", "g", '{"y": 2}')]


@pytest.mark.sentence("004", "regression tests for tool-call delta assembly")
@pytest.mark.parametrize(
    ("deltas", "calls"),
    [
        pytest.param(
            [
                [delta(0, "a", "f", "")],
                [delta(1, "b", "g", "")],
                [delta(0, arguments='{"x"'), delta(1, arguments='{"y"')],
                [delta(1, arguments=": 2}")],
                [delta(0, arguments=": 1}")],
            ],
            TWO,
            id="interleaved",
        ),
        pytest.param(
            [
                [delta(0, "a", "f", '{"x"')],
                [delta(0, "a", "f", ": 1}")],
                [delta(1, "b", "g", '{"y"')],
                [delta(1, "b", "g", ": 2}")],
            ],
            TWO,
            id="id and name in every delta",
        ),
        pytest.param(
            [[delta(0, "a", "f", '{"x"')], [delta(0, "other", arguments=": 1}")], [delta(1, "b", "g", '{"y": 2}')]],
            TWO,
            id="a new id in every delta",
        ),
        pytest.param([[delta(0, "a", "f", '{"x": 1}'), delta(0, "b", "g", '{"y": 2}')]], TWO, id="all at index 0"),
        pytest.param(
            [[delta(0, "a", "f", '{"x"')], [delta(0, arguments=": 1}")], [delta(0, "b", "g", '{"y": 2}')]],
            TWO,
            id="all at index 0, in pieces",
        ),
        pytest.param(
            [[delta(0, name="f", arguments='{"x": 1}')], [delta(0, name="g", arguments='{"y": 2}')]],
            MADE_UP,
            id="no id, all at index 0",
        ),
        pytest.param(
            [
                [delta(0, name="f", arguments='{"x"')],
                [delta(1, name="g")],
                [delta(0, arguments=": 1}")],
                [delta(1, arguments='{"y": 2}')],
            ],
            MADE_UP,
            id="no id, interleaved",
        ),
        pytest.param(
            [[delta(None, "a", "f", '{"x"')], [delta(None, arguments=": 1}")], [delta(None, "b", "g", '{"y": 2}')]],
            TWO,
            id="no index",
        ),
        pytest.param(
            [
                [delta(None, "a", "f"), delta(None, "b", "g")],
                [delta(None, "a", arguments='{"x": 1}')],
                [delta(None, "b", arguments='{"y": 2}')],
            ],
            TWO,
            id="no index, interleaved by id",
        ),
        pytest.param(
            [[delta(None, None, "f", ""), delta(None, None, "g", "")]],
            [("call_0", "f", "{}"), ("call_1", "g", "{}")],
            id="neither id nor index nor arguments",
        ),
        pytest.param(
            [[delta(0, "a", "f", ""), delta(0, "b", "g", "")]],
            [("a", "f", "{}"), ("b", "g", "{}")],
            id="all at index 0, no arguments",
        ),
        pytest.param(
            [[delta(1, "b", "g", '{"y": 2}')], [delta(0, "a", "f", '{"x": 1}')]], TWO[::-1], id="out of order"
        ),
        pytest.param(
            [[delta(0, "a", "get_")], [delta(0, None, "it", "{}")]], [("a", "get_it", "{}")], id="name in pieces"
        ),
        pytest.param(
            [[delta(0, "a", "f", "{}")], [delta(1, "a", "g", "{}")]],
            [("a", "f", "{}"), ("call_0", "g", "{}")],
            id="one id for two calls",
        ),
        pytest.param([[delta(0, "a", "f", "{}")], [delta(1)]], [("a", "f", "{}")], id="an empty delta"),
        pytest.param(
            [[delta(0, name="f", arguments='{"x": 1}')], [delta(0, name="f", arguments="")], [delta(0, name="f")]],
            MADE_UP[:1],
            id="no id, the name again at the end",
        ),
        pytest.param(
            [[delta(0, "a", "f", "{}")], [delta(0, arguments='{"x"')], [delta(0, arguments=": 1}")]],
            TWO[:1],
            id="an empty object before the arguments",
        ),
        pytest.param(
            [[delta(0, "a", "f", "null")], [delta(0, arguments='{"x": 1}')], [delta(0, arguments="{}")]],
            TWO[:1],
            id="null before the arguments, an empty object after them",
        ),
        pytest.param(
            [[delta(0, "a", "f", '{"x"')], [delta(0, arguments=": 1}")], [delta(0, arguments='{"x":1}')]],
            [("a", "f", '{"x": 1}')],
            id="all arguments again at the end",
        ),
        pytest.param(
            [[delta(0, "a", "f", '{"x"')], [delta(0, arguments='{"x": ')], [delta(0, arguments='{"x": 1}')]],
            TWO[:1],
            id="all arguments so far in every delta",
        ),
        pytest.param(
            [
                [delta(0, "a", "f", "")],
                [delta(0, arguments='{"x": 1}')],
                [delta(0, "b", "g", "")],
                [delta(1, arguments='{"y":')],
                [delta(1, arguments=" 2}")],
            ],
            TWO,
            id="the rest of a call under another index",
        ),
        pytest.param(
            [[delta(0, "a", "f", "{}")], [delta(1, arguments='{"x":')], [delta(1, arguments=" 1}")]],
            TWO[:1],
            id="an empty object, the rest under another index",
        ),
        pytest.param(
            [
                [delta(0, "a", "f", '{"x": 1}')],
                [delta(1, "b", "g", "")],
                [delta(0, arguments='{"y":')],
                [delta(0, arguments=" 2}")],
            ],
            TWO,
            id="the rest of a call under the index of the one before it",
        ),
        pytest.param(
            [[delta(0, "a", "f", '{"x"')], [delta(3, "a", arguments=": 1}")]], TWO[:1], id="one id under two indexes"
        ),
        pytest.param(
            [[delta(0, name="f", arguments="{}")], [delta(0, name="f", arguments="{}")]],
            [("call_0", "f", "{}"), ("call_1", "f", "{}")],
            id="no id, the same call twice at index 0",
        ),
        pytest.param(
            [[delta(0, "a", arguments='{"x"')], [delta(0, name="f", arguments=": 1}")]],
            TWO[:1],
            id="the name after the arguments",
        ),
        pytest.param(
            [[delta(0, "a", "f", "")], [delta(0, "b", "f", '{"x"')], [delta(0, "c", "f", ": 1}")]],
            TWO[:1],
            id="the name again and a new id in each delta",
        ),
        pytest.param([[None, delta(0, "a", "f", '{"x": 1}')]], TWO[:1], id="null in the list"),
        pytest.param([delta(0, "a", "f", '{"x": 1}')], TWO[:1], id="a call without a list"),
    ],
)
def test_tool_call_deltas_are_put_together(deltas: list[Any], calls: list[Any]) -> None:
    assert assembled(*deltas) == calls


@pytest.mark.parametrize("finish_reason", ["length", "content_filter"])
@pytest.mark.parametrize("arguments", ["", '{"x": ', '{"x": 1', '{"x": ' + "[" * 5000])
def test_calls_that_were_cut_short_are_left_out(finish_reason: str, arguments: str) -> None:
    whole = delta(0, "a", "f", '{"x": 1}')
    assert assembled([whole, delta(1, "b", "g", arguments)], finish_reason=finish_reason) == []
    assert assembled([whole], finish_reason=finish_reason) == TWO[:1]


async def test_a_whole_answer_cut_short_by_its_length_has_no_calls() -> None:
    message = {"content": "I will", "tool_calls": [call("a", "f", '{"x": ')]}
    response = await told_by(script(completion(message, "length")))
    truncated = {"role": "assistant", "content": "I will", "metadata": {"truncated_tool_call": True}}
    assert (response.message, response.finish_reason) == (truncated, "length")
    # An argument that a model got wrong by itself is for the tools to refuse.
    assert (await told_by(script(completion(message, "tool_calls")))).tool_calls[0].arguments == '{"x": '


def test_a_character_that_comes_by_halves_is_one() -> None:
    """A server may part a text anywhere in UTF-16; a lone surrogate could not be sent back."""
    assembly = Assembly("openai", "m", set())
    pieces = ["a\ud83d", "", "\ude00b", "\ude00", "\ud83dc", "d\ud83d"]
    told = [assembly.add(chunk({"content": each, "reasoning_content": each})) for each in pieces]
    arguments = [
        [delta(0, "a", "f", '{"x": "\ud83d')],
        [delta(0, arguments='\ude00"}')],
        [delta(1, "b", "g", '{"\ud83d": 1}')],
    ]
    for calls in arguments:
        assembly.add(chunk({"tool_calls": calls}))
    assembly.add(chunk({}, "tool_calls"))
    answer = assembly.answer()
    assert told == ["a", "", "\U0001f600b", "\ufffd", "\ufffdc", "d"]
    assert answer is not None
    message = answer.message
    assert message["content"] == "".join(told)
    assert message["provider_fields"]["openai"]["reasoning_content"] == "".join(told) + "\ufffd"
    first, second = (each["function"]["arguments"] for each in message["tool_calls"])
    assert json.loads(first) == {"x": "\U0001f600"}
    assert json.loads(second) == {"\ud83d": 1}
    assert decode(encode(message)) == message
    json.dumps(message, ensure_ascii=False).encode()


async def test_half_a_character_in_a_whole_answer_can_be_sent_back() -> None:
    message = {"content": "a\ud83d", "refusal": "\ude00", "tool_calls": [call("a", "f", '{"x": "\ud83d"}')]}
    answered = (await told_by(script(completion(message, "tool_calls")))).message
    assert (answered["content"], answered["refusal"]) == ("a\ufffd", "\ufffd")
    assert answered["tool_calls"][0]["function"]["arguments"] == '{"x": "\\ud83d"}'


def test_a_call_without_a_name_is_a_failure() -> None:
    with pytest.raises(ProviderUnavailable, match="without naming the tool"):
        assembled([delta(0, "a", None, "{}")])
    with pytest.raises(ProviderUnavailable, match="without naming the tool"):
        assembled([delta(0, "a", "f", '{"x": 1}')], [delta(1, "b", None, '{"y": 2}')])
    # The limit of the answer can cut a call before its name.
    assert assembled([delta(0, "a", None, "")], [delta(0, arguments="{")], finish_reason="length") == []


@pytest.mark.parametrize(
    "arguments", ['{}{"x": 1}', 'null {"x": 1}', '{"x": 1}{"x": 1}', '""{"x": 1}{}', r'"{\"x\": 1}"']
)
async def test_arguments_of_a_whole_answer_are_repaired_like_those_of_a_stream(arguments: str) -> None:
    response = await told_by(script(completion({"tool_calls": [call("a", "f", arguments)]}, "tool_calls")))
    assert response.tool_calls[0].arguments == '{"x": 1}'


@pytest.mark.parametrize("arguments", ['{"x": 1}{"x": 2}', '{"x": 1} done', "[1]", '{"x": ' * 3000])
async def test_arguments_that_have_no_meaning_stay_as_the_model_wrote_them(arguments: str) -> None:
    response = await told_by(script(completion({"tool_calls": [call("a", "f", arguments)]}, "tool_calls")))
    assert response.tool_calls[0].arguments == arguments


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_a_refusal_has_its_words(streamed: bool) -> None:
    pieces = [chunk({"role": "assistant", "refusal": "I can"}), chunk({"refusal": "not."}), chunk({}, "stop")]
    whole = script(completion({"content": None, "refusal": "I cannot."}))
    response = await told_by(stream(*pieces) if streamed else whole, streamed=streamed)
    assert (response.finish_reason, response.message["refusal"]) == ("refusal", "I cannot.")
    assert not response.message["content"]
    bodies: list[dict[str, Any]] = []
    client = over_transport(completion({"content": "4"}), bodies)
    await client.generate([*ASK, response.message, *ASK])
    await client.close()
    assert bodies[0]["messages"][1] == {"role": "assistant", "content": "I cannot."}


async def test_a_refusal_in_a_part_of_the_content_has_its_words() -> None:
    parts = [{"type": "refusal", "refusal": "I cannot."}]
    response = await told_by(script(completion({"content": parts})))
    assert (response.finish_reason, response.message["refusal"]) == ("refusal", "I cannot.")
    assert response.message["content"] == parts


@for_each("streamed", [False, True], ids=["whole", "streamed"])
@for_each(
    ("said", "reason"),
    [
        ("stop", "stop"),
        ("STOP", "stop"),
        ("end_turn", "stop"),
        ("eos_token", "stop"),
        ("length", "length"),
        ("max_tokens", "length"),
        ("MAX_TOKENS", "length"),
        ("FinishReason.MAX_TOKENS", "length"),
        ("model_length", "length"),
        ("content_filter", "content_filter"),
        ("SAFETY", "content_filter"),
        ("RECITATION", "content_filter"),
        ("content_filter: PROHIBITED_CONTENT", "content_filter"),
        ("guardrail_intervened", "content_filter"),
        ("sensitive", "content_filter"),
        ("refusal", "refusal"),
        ("pause_turn", "pause_turn"),
    ],
)
async def test_finish_reasons_have_one_name(said: str, reason: str, streamed: bool) -> None:
    answer = stream(chunk({"content": "x"}, said)) if streamed else script(completion({"content": "x"}, said))
    assert (await told_by(answer, streamed=streamed)).finish_reason == reason


async def test_the_reason_of_the_provider_of_a_gateway_is_known() -> None:
    answer = completion({"content": ""})
    answer["choices"][0]["native_finish_reason"] = "SAFETY"
    assert (await told_by(script(answer))).finish_reason == "content_filter"
    answer["choices"][0]["native_finish_reason"] = "completed"
    assert (await told_by(script(answer))).finish_reason == "stop"


EMPTY: list[dict[str, Any]] = [
    {"role": "assistant", "content": None},
    {"role": "assistant", "content": ""},
    {"role": "assistant", "content": " \n"},
    {"role": "assistant", "content": [], "tool_calls": []},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}]},
    {"role": "assistant", "content": "", "provider_fields": {"openai": {"reasoning_content": "hm"}}},
    {"role": "assistant", "content": "", "metadata": {"truncated_tool_call": True}},
    {"role": "system", "content": None},
    {"role": "developer", "content": ""},
]


@pytest.mark.parametrize("message", EMPTY)
async def test_an_empty_answer_or_system_prompt_is_not_sent(message: dict[str, Any]) -> None:
    bodies: list[dict[str, Any]] = []
    client = over_transport(completion({"content": "4"}), bodies)
    await client.generate([*ASK, message, *ASK])
    await client.close()
    assert bodies[0]["messages"] == [*ASK, *ASK]


@for_each(
    ("written", "sent"),
    [
        ('{"p": 1}', {"p": 1}),
        ('{"p": "x', {"INVALID_JSON": '{"p": "x'}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ("Oslo", {"INVALID_JSON": "Oslo"}),
        ('{"p": NaN}', {"INVALID_JSON": '{"p": NaN}'}),
        ("", {}),
        ("null", {}),
        (None, {}),
        ([1], {"INVALID_JSON": "[1]"}),
        ({"p": 1}, {"p": 1}),
    ],
)
async def test_arguments_are_sent_back_as_an_object(written: Any, sent: dict[str, Any]) -> None:
    message = {"role": "assistant", "content": "", "refusal": None, "annotations": [{"type": "x"}]}
    message["tool_calls"] = [call("a", "f", written)]
    bodies: list[dict[str, Any]] = []
    client = over_transport(completion({"content": "4"}), bodies)
    await client.generate([*ASK, message, {"role": "tool", "tool_call_id": "a", "content": "no JSON"}])
    await client.close()
    found = bodies[0]["messages"][1]
    assert json.loads(found["tool_calls"][0]["function"]["arguments"]) == sent
    assert found.keys() == {"role", "content", "tool_calls"}
    assert found["content"] is None


@pytest.mark.parametrize("content", ["", " \n", None, [], [{"type": "text", "text": ""}]])
async def test_a_tool_s_result_without_text_says_so(content: Any) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [call("a", "weather", "{}")]}
    bodies: list[dict[str, Any]] = []
    client = over_transport(completion({"content": "4"}), bodies)
    await client.generate([*ASK, message, {"role": "tool", "tool_call_id": "a", "content": content}])
    await client.close()
    assert bodies[0]["messages"][2] == {"role": "tool", "tool_call_id": "a", "content": "(no output)"}


async def test_fields_that_are_not_set_are_not_sent() -> None:
    message = {"role": "assistant", "content": "4", "audio": None, "function_call": None, "tool_calls": None}
    bodies: list[dict[str, Any]] = []
    client = over_transport(completion({"content": "4"}), bodies)
    await client.generate([*ASK, message, *ASK])
    await client.close()
    assert bodies[0]["messages"][1] == {"role": "assistant", "content": "4"}


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_a_call_in_its_earlier_form_is_a_tool_call(streamed: bool) -> None:
    pieces = [{"name": "weather", "arguments": '{"city":'}, {"arguments": ' "Oslo"}'}]
    deltas = [chunk({"function_call": piece}) for piece in pieces]
    whole = {"content": None, "function_call": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    answer = stream(*deltas, chunk({}, "function_call")) if streamed else script(completion(whole, "function_call"))
    response = await told_by(answer, streamed=streamed)
    assert [(each.name, each.arguments) for each in response.tool_calls] == [("weather", '{"city": "Oslo"}')]
    assert "provider_fields" not in response.message


@pytest.mark.parametrize("content_type", ["application/json", "text/event-stream", "text/plain", ""])
@pytest.mark.parametrize("calls", [[], [call("a", "weather", '{"city": "Oslo"}')]])
async def test_a_server_that_does_not_stream_is_asked_once(calls: list[Any], content_type: str) -> None:
    message = {"content": None if calls else "4 °C", "tool_calls": calls}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    answer = completion(message, "tool_calls" if calls else "stop", usage=usage)
    pretty = Script(json.dumps(answer, indent=2).encode(), content_type=content_type)
    async with serving(pretty, script(answer)) as server:
        client = over_server(server, retries=Retries(base=0))
        chunks = [each async for each in client.stream(ASK)]
        plain = await client.generate(ASK)
        await client.close()
    assert len(server.asked) == 2
    assert "".join(each.delta for each in chunks) == ("" if calls else "4 °C")
    assert chunks[-1].response is not None
    assert (chunks[-1].response.message, chunks[-1].usage) == (plain.message, usage)


@pytest.mark.parametrize("done", [True, False], ids=["done", "cut"])
@pytest.mark.parametrize(
    ("piece", "reason"),
    [
        ({"content": "4 °C"}, "stop"),
        ({"tool_calls": [{"index": 0, **call("a", "weather", "{}")}]}, "tool_calls"),
        ({"tool_calls": [{"index": 0, **call("a", "weather", '{"city"')}]}, None),
        ({}, None),
    ],
)
async def test_a_stream_without_a_finish_reason_ends_with_done(
    piece: dict[str, Any], reason: str | None, done: bool
) -> None:
    body = f"data: {json.dumps(chunk(piece))}\n\n" + ("data: [DONE]\n\n" if done else "")
    answer = Script(body.encode(), content_type="text/event-stream")
    if reason and done:
        assert (await told_by(answer, streamed=True)).finish_reason == reason
    else:
        with pytest.raises(StreamCut):
            await told_by(answer, streamed=True)


async def test_a_stream_as_the_answer_to_a_request_for_a_whole_one() -> None:
    response = await told_by(Script(RECORDED, content_type="text/event-stream"))
    assert (response.message["content"], len(response.tool_calls)) == ("Let me see.", 2)
    with pytest.raises(ProviderUnavailable, match="not a chat completion"):
        await told_by(Script(RECORDED[: len(RECORDED) // 2], content_type="text/event-stream"))


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (
            {"object": "error", "message": "maximum context length is 10", "code": 400},
            ContextOverflow,
            "context length",
        ),
        ({"object": "error", "message": "tools are unknown here", "code": 400}, RequestRefused, "tools are unknown"),
        ({"detail": "the model is gone"}, ProviderError, "the model is gone"),
        (
            {"choices": [{"index": 0, "finish_reason": "error", "error": {"message": "it died", "code": 502}}]},
            ProviderUnavailable,
            "it died",
        ),
    ],
)
async def test_an_error_with_status_200_has_its_words(
    body: dict[str, Any], kind: type[ProviderError], words: str, streamed: bool
) -> None:
    with pytest.raises(kind, match=words):
        await told_by(stream(body) if streamed else script(body), streamed=streamed)


@pytest.mark.parametrize("content_type", ["application/json", "text/plain", ""])
async def test_a_stream_with_another_content_type_is_a_stream(content_type: str) -> None:
    response = await told_by(Script(RECORDED, content_type=content_type), streamed=True)
    assert (response.message["content"], len(response.tool_calls)) == ("Let me see.", 2)


async def test_a_stream_with_the_whole_message_at_its_end_or_as_its_only_chunk() -> None:
    whole = completion({"content": "4 °C"}, usage={"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5})
    for answer in (stream(whole), stream(chunk({"content": "4 "}), chunk({"content": "°C"}), whole)):
        response = await told_by(answer, streamed=True)
        assert (response.message["content"], response.usage["total_tokens"]) == ("4 °C", 5)


@pytest.mark.parametrize("reason", ["length", "stop", "content_filter"])
async def test_a_choice_without_a_message_is_an_empty_answer(reason: str) -> None:
    usage = {"prompt_tokens": 20, "total_tokens": 4116}
    body = {**completion({}), "choices": [{"index": 0, "finish_reason": reason}], "usage": usage}
    async with serving(script(body)) as server:
        client = over_server(server, retries=Retries(base=0))
        response = await client.generate(ASK)
        await client.close()
    assert (response.finish_reason, response.message["content"], len(server.asked)) == (reason, "", 1)
    assert response.usage == {"prompt_tokens": 20, "completion_tokens": 4096, "total_tokens": 4116}


@pytest.mark.parametrize(
    "last",
    [
        chunk({}, "stop", usage={"prompt_tokens": 20, "completion_tokens": 10, "total_tokens": 500}),
        chunk({}, "stop", x_groq={"usage": {"prompt_tokens": 20, "completion_tokens": 10, "total_tokens": 500}}),
        {
            **chunk({}),
            "choices": [
                {"index": 0, "delta": {}, "finish_reason": "stop", "usage": {"prompt_tokens": 20, "total_tokens": 500}}
            ],
        },
    ],
)
async def test_the_usage_of_a_stream_is_found_wherever_it_is(last: dict[str, Any]) -> None:
    empty = {**chunk({}), "choices": [], "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}}
    response = await told_by(stream(chunk({"content": "4"}), last, empty), streamed=True)
    assert response.usage == {"prompt_tokens": 20, "completion_tokens": 480, "total_tokens": 500}


async def test_a_stream_without_usage_has_none() -> None:
    assert (await told_by(stream(chunk({"content": "4"}, "stop")), streamed=True)).usage == {}


def test_reasoning_comes_together_from_its_pieces() -> None:
    assembly = Assembly("openai", "m", set())
    details = (
        [{"index": 0, "type": "reasoning.text", "text": "Two "}],
        [{"index": 0, "type": "reasoning.text", "text": "and two"}],
    )
    for piece, detail in zip(("Two ", "and two"), details, strict=True):
        assembly.add(chunk({"reasoning_content": piece, "reasoning_details": detail, "signature_of": "x"}))
    assembly.add(chunk({"content": [{"type": "text", "text": "4"}]}, "stop"))
    answer = assembly.answer()
    assert answer is not None
    assert answer.message == {
        "role": "assistant",
        "content": "4",
        "provider_fields": {
            "openai": {
                "reasoning_content": "Two and two",
                "reasoning_details": [{"index": 0, "type": "reasoning.text", "text": "Two and two"}],
                "signature_of": "x",
            }
        },
    }


RECORDED = events(*STREAMED)


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("broken", [False, True], ids=["clean end", "broken connection"])
async def test_a_stream_cut_at_every_byte_gives_no_call_before_its_end(broken: bool, every: int) -> None:
    told_finished = RECORDED.index(b'"finish_reason": "tool_calls"')
    places = cut_places(RECORDED, every)[:-1]
    cuts = [Script(RECORDED, content_type="text/event-stream", cut=at, broken=broken) for at in places]
    answered = []
    async with serving(*cuts) as server:
        # A breaker that opens would hide the other cuts.
        client = over_server(server, breakers=Breakers(after=len(cuts)))
        for at in places:
            try:
                response = await client.generate(ASK, stream=True)
            except StreamCut:
                continue
            answered.append(at)
            assert [each.id for each in response.tool_calls] == ["call_a", "call_b"]
        await client.close()
    assert len(server.asked) == len(cuts)
    # An answer is finished with its finish reason, and the event with it ends before these bytes.
    complete = RECORDED.index(b"\n\n", told_finished)
    assert all(at > told_finished for at in answered)
    assert {at for at in places if at > complete + 1} <= set(answered)


async def test_a_stream_that_stalls_is_let_go() -> None:
    at = RECORDED.index(b"see.") + 40
    async with serving(Script(RECORDED, content_type="text/event-stream", stall=at)) as server:
        client = over_server(server, timeouts=Timeouts(between_chunks=0.2))
        with pytest.raises(ProviderTimeout, match="between_chunks"):
            await client.generate(ASK, stream=True)
        async with asyncio.timeout(5):
            await server.let_go.wait()
        await client.close()


async def test_a_stream_left_early_closes_its_connection() -> None:
    async with serving(Script(RECORDED, content_type="text/event-stream", stall=RECORDED.index(b"see."))) as server:
        client = over_server(server)
        pieces = client.stream(ASK)
        assert (await anext(pieces)).delta == "Let me "
        await pieces.aclose()  # type: ignore[attr-defined]
        async with asyncio.timeout(5):
            await server.let_go.wait()
        await client.close()


def error(code: Any, message: str = "no", kind: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "code": code}}


@for_each(
    ("answer", "kind", "retriable"),
    [
        (script(error("rate_limit_exceeded"), status=429), RateLimited, True),
        (script(error("insufficient_quota"), status=429), RateLimited, False),
        (script(error(None), status=500), ProviderUnavailable, True),
        (script(error(None), status=500, headers={"x-should-retry": "false"}), ProviderUnavailable, False),
        (script(error(None), status=529), ProviderUnavailable, True),
        (script(error(None), status=409), ProviderUnavailable, True),
        (script(error(None), status=408), ProviderTimeout, True),
        (script(error("invalid_api_key"), status=401), AuthenticationFailed, False),
        (script(error(None), status=403), AuthenticationFailed, False),
        (script(error("model_not_found"), status=403), ModelNotFound, False),
        (script(error("model_not_found"), status=404), ModelNotFound, False),
        (script(error("context_length_exceeded"), status=400), ContextOverflow, False),
        (script(error(None, "This model's maximum context length is 8192 tokens"), status=400), ContextOverflow, False),
        (script(error(None), status=413), ContextOverflow, False),
        (script(error("invalid_value"), status=400), RequestRefused, False),
        (script(error(None), status=422), RequestRefused, False),
        (script(error(429, "slow down")), RateLimited, True),
        (script(error("overloaded")), ProviderUnavailable, True),
        (script({"choices": []}), ProviderUnavailable, True),
        (script(completion({"content": ""}, "error")), ProviderUnavailable, True),
        (Script(b"<html>busy</html>", content_type="text/html"), ProviderUnavailable, True),
        (Script(b'{"id": "c", "choi'), ProviderUnavailable, True),
        (Script(b'{"id": "c"', broken=True), ProviderUnavailable, True),
    ],
)
async def test_what_a_failure_means(answer: Script, kind: type[ProviderError], retriable: bool) -> None:
    with pytest.raises(ProviderError) as caught:
        await told_by(answer)
    assert type(caught.value) is kind
    assert caught.value.retriable is retriable
    assert (caught.value.provider, caught.value.model) == ("openai", "gpt-4o")


@for_each(
    ("answer", "kind"),
    [
        (stream(STREAMED[1], error("server_error")), ProviderUnavailable),
        (stream(STREAMED[1], error("rate_limit_exceeded")), RateLimited),
        (stream(STREAMED[1], error("tool_use_failed")), RequestRefused),
        (stream(STREAMED[1], error("context_length_exceeded")), ContextOverflow),
        (stream(STREAMED[1], error(None, kind="invalid_request_error")), RequestRefused),
        (stream(STREAMED[1], error(502)), ProviderUnavailable),
        (stream(STREAMED[1], chunk({}, "error")), ProviderUnavailable),
        (stream(STREAMED[1], end=""), StreamCut),
        (stream(STREAMED[1], end="", broken=True), StreamCut),
        (stream(end=""), StreamCut),
        (script(error("server_error")), ProviderUnavailable),
    ],
)
async def test_what_a_failure_in_a_stream_means(answer: Script, kind: type[ProviderError]) -> None:
    with pytest.raises(ProviderError) as caught:
        await told_by(answer, streamed=True)
    assert type(caught.value) is kind


async def test_nobody_listens() -> None:
    # Bound, so that no other server gets the port meanwhile.
    with contextlib.closing(socket.socket()) as bound:
        bound.bind(("127.0.0.1", 0))
        client = OpenAIClient(KEY, base_url=f"http://127.0.0.1:{bound.getsockname()[1]}/v1", retries=ONCE)
        with pytest.raises(ProviderUnavailable, match="the connection failed"):
            await client.generate(ASK)
        await client.close()


async def test_an_error_that_is_not_the_providers_stays_as_it_is() -> None:
    client = over_transport({}, [])
    for wrong in (TypeError("no such argument"), LookupError("x")):
        assert client._wire.translate(wrong, "m") is None
    reset = client._wire.translate(ConnectionResetError("reset"), "m")
    assert isinstance(reset, ProviderUnavailable)
    late = client._wire.translate(openai.APITimeoutError(httpx.Request("POST", "http://x")), "m")
    assert isinstance(late, ProviderTimeout)
    await client.close()


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7),
        ({"retry-after-ms": "250", "retry-after": "1"}, 0.25),
        ({"retry-after": "Sat, 21 Nov 2026 10:00:30 GMT", "date": "Sat, 21 Nov 2026 10:00:00 GMT"}, 30),
        ({"retry-after": "Sat, 21 Nov 2026 10:00:00 GMT"}, None),
        ({"retry-after": "soon"}, None),
        ({}, None),
    ],
)
async def test_how_long_to_wait(headers: dict[str, str], seconds: float | None) -> None:
    with pytest.raises(RateLimited) as caught:
        await told_by(script(error(None), status=429, headers=headers))
    assert caught.value.retry_after == seconds
    assert caught.value.status == 429


async def test_only_one_layer_asks_again() -> None:
    failing = script(error(None), status=500)
    async with serving(failing, failing, script(completion({"content": "4"}))) as server:
        client = over_server(server, retries=Retries(tries=2, base=0))
        with pytest.raises(ProviderUnavailable):
            await client.generate(ASK)
        assert len(server.asked) == 2
        assert (await client.generate(ASK)).message["content"] == "4"
        await client.close()


async def test_embeddings_keep_the_order_of_their_texts() -> None:
    data = [{"object": "embedding", "index": 1, "embedding": [0.5, 1]}, {"index": 0, "embedding": [0.25, -1.0]}]
    async with serving(script({"object": "list", "data": data, "model": "m"})) as server:
        client = over_server(server)
        assert await client.embed(["a", "b"]) == [[0.25, -1.0], [0.5, 1.0]]
        assert await client.embed([]) == []
        with pytest.raises(ProviderUnavailable, match="must have 1 vector, got 2"):
            await client.embed(["a"], model="mine")
        await client.close()
    assert server.paths == ["/embeddings"] * 2
    assert [each["model"] for each in server.asked] == ["text-embedding-3-small", "mine"]


async def test_a_moderation_is_the_verdict() -> None:
    verdict = {"flagged": True, "categories": {"self-harm": True}, "category_scores": {"self-harm": 0.9}}
    async with serving(script({"id": "m", "model": "x", "results": [verdict]})) as server:
        client = over_server(server)
        told = await client.moderate("text")
        await client.close()
    assert (told["flagged"], told["categories"]["self-harm"], told["category_scores"]["self-harm"]) == (True, True, 0.9)
    assert server.asked == [{"input": "text"}]


class _Bytes:
    """An encoding of one token a byte."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())


async def test_tokens_are_counted_for_openais_own_models(monkeypatch: pytest.MonkeyPatch) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    monkeypatch.setattr(tiktoken, "encoding_for_model", lambda model: _Bytes())
    client = over_transport({}, [])
    plain = await client.count_tokens([{"role": "user", "content": "abc"}])
    assert plain == 3 + 3 + len("user") + len("abc")
    assert await client.count_tokens([{"role": "user", "content": [{"type": "text", "text": "abc"}]}]) == plain
    assert await client.count_tokens([{"role": "user", "content": "abc"}], [WEATHER]) > plain + 50
    with pytest.raises(NotSupported, match="counts only text"):
        await client.count_tokens([IMAGE])
    await client.close()


async def test_tokens_of_other_models_are_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(script({})) as server:
        client = over_server(server)
        with pytest.raises(NotSupported, match="base_url"):
            await client.count_tokens(ASK)
        await client.close()
    assert server.asked == []
    client = over_transport({}, [], default_model="llama-9")
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(NotSupported, match="tiktoken"):
        await client.count_tokens(ASK)
    await client.close()


@pytest.fixture
def patient() -> Iterator[str]:
    """The URL of a server that keeps its connections open, and outlives the loops of a test."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            body = json.dumps(completion({"content": "4"})).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def test_one_client_serves_one_loop_after_another(patient: str) -> None:
    client = OpenAIClient(KEY, base_url=patient, retries=ONCE)

    async def twice() -> list[Any]:
        found = [(await client.generate(ASK)).message["content"] for _ in range(2)]
        await client.close()
        return found

    async def unclosed() -> Any:
        return (await client.generate(ASK)).message["content"]

    with asyncio.Runner() as first:
        assert first.run(unclosed()) == "4"
        with ThreadPoolExecutor(1) as another:
            assert another.submit(asyncio.run, twice()).result() == ["4", "4"]
        assert first.run(twice()) == ["4", "4"]


def test_connections_end_with_the_loop_they_were_made_in(patient: str, caplog: pytest.LogCaptureFixture) -> None:
    client = OpenAIClient(KEY, base_url=patient, retries=ONCE)
    clients = client._wire._clients  # type: ignore[attr-defined]

    async def asked() -> Any:
        await asyncio.gather(*[client.generate(ASK) for _ in range(3)])
        return await clients.here()

    for _ in range(2):
        assert asyncio.run(asked()).is_closed()
        assert not clients._bound
    assert [record for record in caplog.records if record.name == "asyncio"] == []


@pytest.mark.parametrize("key", ["can\x00ary", "canäry", "can\nary"])
def test_a_key_that_no_request_can_carry_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        OpenAIConfigurationError, match="must have only printable ASCII characters, got others"
    ) as caught:
        OpenAIClient(key)
    assert "ary" not in str(caught.value)
    monkeypatch.setenv("OPENAI_API_KEY", " \n")
    with pytest.raises(OpenAIConfigurationError, match="has no API key"):
        OpenAIClient()
    assert OpenAIClient("canary\r\n")._wire._clients.first.api_key == "canary"  # type: ignore[attr-defined]


def test_no_key_is_told_when_the_client_is_made() -> None:
    with pytest.raises(OpenAIConfigurationError, match="OPENAI_API_KEY"):
        OpenAIClient()
    with pytest.raises(OpenAIConfigurationError):
        get_llm_client("openai", base_url="https://models.example/v1")


async def test_where_key_model_and_server_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(script(completion({"content": "4"}))) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-environment")
        clients = [OpenAIClient(organization="org-1")]
        configure(openai_api_key="sk-of-the-config", default_model="mine")
        clients += [OpenAIClient(), OpenAIClient("sk-of-the-call", "theirs")]
        monkeypatch.delenv("OPENAI_API_KEY")
        configure(model_provider="anthropic", default_model="claude-x")
        clients += [OpenAIClient()]
        for client in clients:
            assert not client._wire.remote
            await client.generate(ASK)
            await client.close()
    assert [each["model"] for each in server.asked] == ["gpt-4o", "mine", "theirs", "gpt-4o"]
    assert [each["authorization"] for each in server.headers] == [
        "Bearer sk-of-the-environment",
        "Bearer sk-of-the-config",
        "Bearer sk-of-the-call",
        "Bearer none",
    ]
    assert server.headers[0]["openai-organization"] == "org-1"


@pytest.mark.parametrize("option", ["max_retries", "timeout"])
def test_an_option_that_would_do_nothing_is_refused(option: str) -> None:
    options: dict[str, Any] = {option: 3}
    with pytest.raises(
        InvalidArgument, match=f"{option} must not be an option of the SDK, got 3. Pass (retries|timeouts)="
    ):
        OpenAIClient(KEY, **options)


@pytest.mark.parametrize(
    ("url", "here"),
    [
        ("http://127.0.0.1:8000/v1", True),
        ("http://localhost/v1", True),
        ("http://[::1]:1/", True),
        ("http://api.localhost", True),
        ("https://api.openai.com/v1", False),
        ("http://localhost.example.com", False),
        ("http://192.168.0.2:8000", False),
    ],
)
def test_which_server_is_this_machine(url: str, here: bool) -> None:
    assert is_loopback(url) is here


@pytest.mark.parametrize("key", ["sk-canary-0123456789", "canary of a kind nobody knows"])
@pytest.mark.parametrize("status", [400, 401, 403, 404, 500])
async def test_the_key_is_in_no_text(key: str, status: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    echo = script(error(None, f"Incorrect key {key}. Sent: Bearer {key}"), status=status)
    async with serving(echo) as server:
        client = OpenAIClient(key, base_url=server.url, retries=ONCE)
        with pytest.raises(ProviderError) as caught:
            await client.generate(ASK)
        texts = [str(caught.value), repr(caught.value), repr(client), repr(client._wire), str(vars(client._wire))]
        await client.close()
    texts += traceback.format_exception(caught.value) if status == 401 else []
    texts += [record.getMessage() for record in caplog.records if record.name.startswith("agent_runtime_core")]
    assert not [text for text in texts if key in text]


async def test_half_a_key_is_shown_to_nobody_either() -> None:
    with pytest.raises(AuthenticationFailed) as caught:
        await told_by(script(error(None, "No access for sk-proj-ab*****9xyz."), status=403))
    assert "No access for (key)" in str(caught.value)
    assert "9xyz" not in str(caught.value)
