"""AnthropicClient with the real SDK, over a scripted transport and a scripted server."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.config import configure
from agent_runtime_core.errors import (
    AuthenticationFailed,
    ContextOverflow,
    InvalidArgument,
    MissingDependency,
    ModelNotFound,
    NotSupported,
    ProviderError,
    ProviderTimeout,
    ProviderUnavailable,
    RateLimited,
    RequestRefused,
    StreamCut,
)
from agent_runtime_core.interfaces import LLMResponse, LLMStreamChunk
from agent_runtime_core.llm._client import Retries, Timeouts
from agent_runtime_core.llm._client_per_loop import AnthropicConfigurationError
from agent_runtime_core.llm._provider import Request
from agent_runtime_core.llm._retries import Breakers
from agent_runtime_core.llm.anthropic import AnthropicClient, AnthropicWire
from agent_runtime_core.loop import run_turn_loop
from agent_runtime_core.testing import MockRunContext
from agent_runtime_core.testing.clock import VirtualClock
from agent_runtime_core.tools import ToolRegistry
from tests.support.cases import for_each
from tests.support.provider_server import Script, WireServer, cut_places, events, script, serving, stream

anthropic = pytest.importorskip("anthropic")
httpx2 = pytest.importorskip("httpx2")

SNAPSHOTS = Path(__file__).parent / "snapshots" / "anthropic"
KEY = "sk-ant-canary-0123456789"
HELLO = [{"role": "user", "content": "hello"}]
ONCE = Retries(tries=1)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather at a place.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}
THOUGHT = {"type": "thinking", "thinking": "Two places.", "signature": "c2lnbmVk"}
USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"at": "Köln"}}
USE_TOO = {"type": "tool_use", "id": "toolu_2", "name": "weather", "input": {"at": "Bonn"}}


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in os.environ if each.startswith("ANTHROPIC_")]:
        monkeypatch.delenv(name)


def said(content: list[dict[str, Any]], stop: str = "end_turn", **usage: Any) -> dict[str, Any]:
    """A whole answer as Anthropic sends it."""
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude-sonnet-5-5",
        "content": content,
        "stop_reason": stop,
        "stop_sequence": None,
        "usage": {"input_tokens": 10, "output_tokens": 5, **usage},
    }


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def told(content: list[dict[str, Any]], stop: str = "end_turn", **usage: Any) -> list[tuple[str, dict[str, Any]]]:
    """The same answer as the events of a stream, every text and input in pieces of five."""
    whole = said([], stop, **usage) | {"stop_reason": None}
    found: list[dict[str, Any]] = [{"type": "message_start", "message": whole}, {"type": "ping"}]
    for index, block in enumerate(content):
        start, deltas = dict(block), list[dict[str, Any]]()
        if block["type"] == "text":
            start["text"] = ""
            deltas = [{"type": "text_delta", "text": each} for each in fives(block["text"])]
        elif block["type"] == "tool_use":
            start["input"] = {}
            pieces = fives(json.dumps(block["input"], ensure_ascii=False))
            deltas = [{"type": "input_json_delta", "partial_json": each} for each in ["", *pieces]]
        elif block["type"] == "thinking":
            start |= {"thinking": "", "signature": ""}
            deltas = [{"type": "thinking_delta", "thinking": each} for each in fives(block["thinking"])]
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
        found.append({"type": "content_block_start", "index": index, "content_block": start})
        found += [{"type": "content_block_delta", "index": index, "delta": each} for each in deltas]
        found.append({"type": "content_block_stop", "index": index})
    ended = {"stop_reason": stop, "stop_sequence": None}
    found += [{"type": "message_delta", "delta": ended, "usage": {"output_tokens": 5}}, {"type": "message_stop"}]
    return [(each["type"], each) for each in found]


def fives(words: str) -> list[str]:
    return [words[at : at + 5] for at in range(0, len(words), 5)]


def failed(kind: str, message: str = "no", **more: Any) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message, **more}, "request_id": "req_1"}


class Transport:
    """Answers each request with the next of `answers`, and keeps what it was asked."""

    def __init__(self, *answers: Any) -> None:
        self._answers: Iterator[Any] = iter(answers)
        self.requests: list[Any] = []

    def __call__(self, request: Any) -> Any:
        self.requests.append(request)
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, dict):
            return httpx2.Response(200, json=answer)
        if isinstance(answer, list):
            return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=events(*answer, end=""))
        return answer

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(each.content) for each in self.requests]


@asynccontextmanager
async def client_of(handler: Callable[[Any], Any], **options: Any) -> AsyncIterator[AnthropicClient]:
    async with httpx2.AsyncClient(transport=httpx2.MockTransport(handler)) as http:
        yield AnthropicClient(**{"api_key": KEY, "http_client": http, "retries": ONCE, **options})


@asynccontextmanager
async def client_at(server: WireServer, **options: Any) -> AsyncIterator[AnthropicClient]:
    client = AnthropicClient(**{"api_key": KEY, "base_url": server.url, "retries": ONCE, **options})
    try:
        yield client
    finally:
        await client.close()


async def drained(client: AnthropicClient, messages: list[Any], **options: Any) -> tuple[list[str], LLMResponse]:
    chunks: list[LLMStreamChunk] = [chunk async for chunk in client.stream(messages, **options)]
    assert [chunk.response is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].response is not None
    return [chunk.delta for chunk in chunks[:-1]], chunks[-1].response


async def gathered(client: AnthropicClient) -> tuple[list[LLMStreamChunk], ProviderError | None]:
    """What a stream gives, and what it ends with if it breaks off."""
    chunks: list[LLMStreamChunk] = []
    try:
        async for chunk in client.stream(HELLO):
            chunks.append(chunk)
    except ProviderError as error:
        return chunks, error
    return chunks, None


# Answers.


async def test_text() -> None:
    transport = Transport(said([text("hi")], cache_read_input_tokens=30, cache_creation_input_tokens=2))
    async with client_of(transport) as client:
        response = await client.generate(HELLO)
    assert response.message == {"role": "assistant", "content": "hi"}
    assert (response.model, response.finish_reason) == ("claude-sonnet-5-5", "stop")
    assert response.usage == {
        "prompt_tokens": 42,
        "completion_tokens": 5,
        "total_tokens": 47,
        "cached_tokens": 30,
        "cache_write_tokens": 2,
    }
    assert response.raw_response.id == "msg_1"
    assert transport.requests[0].url == "https://api.anthropic.com/v1/messages"
    assert transport.requests[0].headers["accept"] == "application/json"


@pytest.mark.parametrize("content", [[text("a little longer")], [text("so"), USE, USE_TOO], [THOUGHT, text("so"), USE]])
async def test_a_streamed_answer_is_the_same_as_one_at_once(content: list[dict[str, Any]]) -> None:
    stop = "tool_use" if USE in content else "end_turn"
    usage = {"cache_read_input_tokens": 7, "cache_creation_input_tokens": 0}
    transport = Transport(said(content, stop, **usage), told(content, stop, **usage), told(content, stop, **usage))
    async with client_of(transport) as client:
        once = await client.generate(HELLO)
        deltas, streamed = await drained(client, HELLO)
        through = await client.generate(HELLO, stream=True)
    assert "".join(deltas) == once.message["content"]
    for response in (streamed, through):
        assert response.message == once.message
        assert response.usage == once.usage
        assert (response.model, response.finish_reason) == (once.model, once.finish_reason)
        assert response.raw_response.to_dict()["content"] == once.raw_response.to_dict()["content"]
    assert [body.get("stream", False) for body in transport.bodies] == [False, True, True]


async def test_thoughts_show_that_the_answer_is_still_coming() -> None:
    async with httpx2.AsyncClient(transport=httpx2.MockTransport(Transport(told([THOUGHT, text("so")])))) as http:
        wire = AnthropicWire(api_key=KEY, http_client=http)
        pieces = [piece async for piece in wire.stream(Request(HELLO, "claude-sonnet-5-5"))]
    first = next(place for place, piece in enumerate(pieces) if piece.text)
    assert first > len(fives(THOUGHT["thinking"]))
    assert [piece.answer is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]


async def test_parallel_tools_go_round_and_their_thoughts_with_them() -> None:
    content = [THOUGHT, text("Both."), USE, USE_TOO]
    transport = Transport(told(content, "tool_use"), said([text("Sun in both.")]))
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, *HELLO]
    async with client_of(transport) as client:
        _, response = await drained(client, messages, tools=[WEATHER])
        assert [(each.id, each.name, json.loads(each.arguments)) for each in response.tool_calls] == [
            ("toolu_1", "weather", {"at": "Köln"}),
            ("toolu_2", "weather", {"at": "Bonn"}),
        ]
        messages.append(json.loads(json.dumps(response.message)))
        messages += [{"role": "tool", "tool_call_id": each.id, "content": "sun"} for each in response.tool_calls]
        await client.generate(messages, tools=[WEATHER])
    assert transport.bodies[1]["messages"][1:] == [
        {"role": "assistant", "content": content},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sun"},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "sun"},
            ],
        },
    ]


async def test_thoughts_go_back_with_a_call_whose_property_has_another_name() -> None:
    schema = {"type": "object", "properties": {"filter[at]": {"type": "string"}}, "required": ["filter[at]"]}
    tool = {"type": "function", "function": {"name": "weather", "description": "x", "parameters": schema}}
    content: list[dict[str, Any]] = [THOUGHT, {**USE, "input": {"filter_at_": "Köln"}}]
    transport = Transport(told(content, "tool_use"), said([text("Sun.")]))
    async with client_of(transport) as client:
        _, response = await drained(client, HELLO, tools=[tool])
        assert [json.loads(each.arguments) for each in response.tool_calls] == [{"filter[at]": "Köln"}]
        result = {"role": "tool", "tool_call_id": "toolu_1", "content": "sun"}
        await client.generate([*HELLO, response.message, result], tools=[tool])
    assert list(transport.bodies[0]["tools"][0]["input_schema"]["properties"]) == ["filter_at_"]
    assert transport.bodies[1]["messages"][1] == {"role": "assistant", "content": content}


async def test_earlier_calls_have_a_definition_in_a_request_without_tools() -> None:
    transport = Transport(said([text("Sun.")]), said([text("Sun.")]))
    call = {"id": "toolu_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "toolu_1", "content": "sun"})
    async with client_of(transport) as client:
        await client.generate(messages)
        await client.generate(HELLO)
    body, other = transport.bodies
    assert body["tools"] == [{"name": "weather", "description": "Not available.", "input_schema": {"type": "object"}}]
    assert body["tool_choice"] == {"type": "none"}
    assert not {"tools", "tool_choice"} & other.keys()


async def test_blocks_the_sdk_does_not_know_go_round_too() -> None:
    new = {"type": "from_the_future", "payload": {"n": None, "deep": [1, {"x": "y"}]}}
    content = [new, text("so"), {**USE, "note": "kept"}]
    transport = Transport(said(content, "tool_use"), said([text("ok")]))
    async with client_of(transport) as client:
        response = await client.generate(HELLO)
        result = {"role": "tool", "tool_call_id": "toolu_1", "content": "sun"}
        await client.generate([*HELLO, response.message, result])
    assert transport.bodies[1]["messages"][1]["content"] == content


async def test_an_answer_cut_by_the_limit_says_so_and_calls_nothing() -> None:
    cut = told([text("so"), USE], "max_tokens")
    # Without the last piece of the input.
    cut.pop(-4)
    transport = Transport(cut, said([text("so"), {**USE, "input": {"at": "K"}}], "max_tokens"))
    async with client_of(transport) as client:
        _, streamed = await drained(client, HELLO)
        once = await client.generate(HELLO)
    for response in (streamed, once):
        flag = {"truncated_tool_call": True}
        assert response.message == {"role": "assistant", "content": "so", "metadata": flag}
        assert response.finish_reason == "length"


async def test_a_long_answer_is_streamed_underneath() -> None:
    transport = Transport(told([text("a long answer")]), told([text("and")])[:-2])
    async with client_of(transport) as client:
        response = await client.generate(HELLO, max_tokens=200_000)
        assert response.message["content"] == "a long answer"
        with pytest.raises(StreamCut):
            await client.generate(HELLO, max_tokens=200_000)
    assert transport.bodies[0]["stream"] is True


async def test_an_answer_that_is_none() -> None:
    page = httpx2.Response(200, text="<html>", headers={"content-type": "text/html"})
    broken = httpx2.Response(200, content=b'{"id": "msg_1', headers={"content-type": "application/json"})
    transport = Transport(page, broken, said([text("x")], "end_turn") | {"stop_reason": None})
    async with client_of(transport) as client:
        for _ in range(3):
            with pytest.raises((StreamCut, ProviderUnavailable)) as caught:
                await client.generate(HELLO)
            assert caught.value.retriable


# Requests.


async def test_tokens_are_counted_by_the_api_and_nothing_is_embedded() -> None:
    transport = Transport({"input_tokens": 17})
    async with client_of(transport) as client:
        assert await client.count_tokens([{"role": "system", "content": "Be brief."}, *HELLO], [WEATHER]) == 17
        with pytest.raises(NotSupported, match=r"anthropic does not support embed\(\)"):
            await client.embed(["x"])
        with pytest.raises(NotSupported, match=r"anthropic does not support moderate\(\)"):
            await client.moderate("x")
    assert transport.requests[0].url.path == "/v1/messages/count_tokens"
    assert transport.bodies[0].keys() == {"messages", "model", "system", "tools"}


SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
REQUESTS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "text": ([{"role": "system", "content": "Be brief."}, *HELLO], {}),
    "streaming": (HELLO, {"stream": True, "max_tokens": 100}),
    "tools": (HELLO, {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}),
    "tool_results": (
        [
            *HELLO,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": each, "type": "function", "function": {"name": "weather", "arguments": '{"at": "Köln"}'}}
                    for each in ("call_1", "call_2")
                ],
                "provider_fields": {"openai": {"reasoning_content": "not Anthropic's"}},
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
            {"role": "tool", "tool_call_id": "call_2", "content": "no answer", "metadata": {"is_error": True}},
        ],
        {"tools": [WEATHER]},
    ),
    "thinking": (
        [
            *HELLO,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "toolu_1", "type": "function", "function": {"name": "weather", "arguments": '{"at":"Köln"}'}}
                ],
                "provider_fields": {"anthropic": {"content": [THOUGHT, USE]}},
            },
            {"role": "tool", "tool_call_id": "toolu_1", "content": "sun"},
        ],
        {"tools": [WEATHER], "thinking": {"type": "adaptive"}, "reasoning_effort": "low"},
    ),
    "images": (
        [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "What is it?"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
                    {"type": "image_url", "image_url": {"url": "https://example.com/a.jpg"}},
                ],
            }
        ],
        {},
    ),
    "structured_output": (
        HELLO,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}},
    ),
}


@pytest.mark.parametrize("name", sorted(REQUESTS))
async def test_request_bodies(name: str) -> None:
    """Written anew with WRITE_SNAPSHOTS=1 in the environment."""
    messages, options = REQUESTS[name]
    before = json.dumps(messages)
    transport = Transport(told([text("ok")]) if options.get("stream") else said([text("ok")]))
    async with client_of(transport) as client:
        await client.generate(messages, **options)
    path = SNAPSHOTS / f"{name}.json"
    if os.environ.get("WRITE_SNAPSHOTS"):
        path.write_text(json.dumps(transport.bodies[0], indent=2, ensure_ascii=False) + "\n", "utf-8")
    assert transport.bodies[0] == json.loads(path.read_text("utf-8"))
    assert json.dumps(messages) == before


async def test_sampling_is_left_out_and_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    transport = Transport(*[said([text("ok")])] * 3)
    async with client_of(transport) as client:
        for _ in range(2):
            await client.generate(HELLO, temperature=0.2, top_p=0.9)
        await client.generate(HELLO, extra_body={"temperature": 0.3})
    assert ["temperature" in body for body in transport.bodies] == [False, False, True]
    assert [record.getMessage() for record in caplog.records if "temperature" in record.getMessage()] == [
        "not sent to Anthropic: top_p, temperature, which it no longer supports. AnthropicClient(sampling=True) "
        "sends it with version 2023-06-01 of the API"
    ]


async def test_sampling_is_sent_to_the_version_that_takes_it() -> None:
    transport = Transport(*[said([text("ok")])] * 2)
    async with client_of(transport, sampling=True) as client:
        await client.generate(HELLO, temperature=0.0, top_k=5, extra_body={"top_k": 6}, extra_headers={"x-mine": "1"})
        await client.generate(HELLO)
    with_it, without = transport.requests
    assert (transport.bodies[0]["temperature"], transport.bodies[0]["top_k"]) == (0.0, 6)
    assert (with_it.headers["anthropic-version"], with_it.headers["x-mine"]) == ("2023-06-01", "1")
    assert "temperature" not in transport.bodies[1]
    newest = without.headers["anthropic-version"]
    assert newest != "2023-06-01" or anthropic.__version__.startswith("1.")


async def test_an_argument_anthropic_does_not_have_is_refused_by_name() -> None:
    transport = Transport(said([text("ok")]))
    async with client_of(transport) as client:
        with pytest.raises(
            InvalidArgument, match=r"unknown argument of Anthropic 'logit_bias'. Known: .* Remove it, or .* extra_body="
        ):
            await client.generate(HELLO, seed=1, logit_bias={})
        with pytest.raises(NotSupported, match="must have a schema for Anthropic"):
            await client.generate(HELLO, response_format={"type": "json_object"})
        assert transport.requests == []
        await client.generate(HELLO, max_completion_tokens=50, extra_body={"seed": 1})
    assert (transport.bodies[0]["seed"], transport.bodies[0]["max_tokens"]) == (1, 50)


async def test_no_default_limit_is_below_the_budget_for_thoughts() -> None:
    thinking = {"type": "enabled", "budget_tokens": 1000}
    transport = Transport(*[said([text("ok")])] * 3)
    async with client_of(transport) as client:
        await client.generate(HELLO, thinking=thinking)
        await client.generate(HELLO, thinking=thinking, max_tokens=1500)
        await client.generate(HELLO, model="claude-3-haiku-20240307")
    assert [body["max_tokens"] for body in transport.bodies] == [21_000, 1500, 4096]


async def test_a_schema_without_an_equivalent_is_in_the_prompt() -> None:
    schema = {"type": "object", "additionalProperties": {"type": "integer"}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    transport = Transport(said([text('{"a": 1}')]))
    async with client_of(transport) as client:
        await client.generate([{"role": "system", "content": "Be brief."}, *HELLO], response_format=wanted)
    assert "output_config" not in transport.bodies[0]
    assert transport.bodies[0]["system"].startswith("Be brief.")
    assert json.dumps(schema) in transport.bodies[0]["system"]


async def test_at_most_four_cache_marks_are_sent() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "system", "content": "s", **mark},
        *({"role": "user", "content": str(n), **mark} for n in range(4)),
    ]
    transport = Transport(*[said([text("ok")])] * 2)
    async with client_of(transport) as client:
        await client.generate(messages, tools=[{**WEATHER, **mark}])
        await client.generate(messages, tools=[{**WEATHER, **mark}], cache_control=mark["cache_control"])
    for body, kept in zip(transport.bodies, (["1", "2", "3"], ["2", "3"]), strict=True):
        assert "cache_control" in body["tools"][0]
        assert "cache_control" not in body["system"][0]
        assert [block["text"] for block in body["messages"][0]["content"] if "cache_control" in block] == kept


@pytest.mark.parametrize("stream", [False, True])
async def test_a_typed_answer_with_bounds_is_checked_and_repaired_here(stream: bool) -> None:
    wanted = {"type": "object", "properties": {"score": {"type": "integer", "maximum": 5}}, "required": ["score"]}
    answers = [[text(f'{{"score": {score}}}')] for score in (9, 3)]
    transport = Transport(*(told(each) if stream else said(each) for each in answers))
    async with client_of(transport) as client:
        context = MockRunContext(input_messages=HELLO)
        result = await run_turn_loop(context, client, ToolRegistry(), output_type=wanted, stream=stream)
    assert result.output == {"score": 3}
    sent = transport.bodies[0]["output_config"]["format"]["schema"]["properties"]["score"]
    assert sent == {"type": "integer", "description": "{maximum: 5}"}
    assert '"maximum": 5' in transport.bodies[1]["messages"][-1]["content"]


# Errors.


@for_each(
    ("status", "kind", "message", "wanted"),
    [
        (400, "invalid_request_error", "messages: too odd", RequestRefused),
        (400, "invalid_request_error", "prompt is too long: 205000 tokens > 200000 maximum", ContextOverflow),
        (
            400,
            "invalid_request_error",
            "input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000",
            ContextOverflow,
        ),
        (401, "authentication_error", f"invalid key {KEY}", AuthenticationFailed),
        (402, "billing_error", "no money", RequestRefused),
        (403, "permission_error", f"not for {KEY}", AuthenticationFailed),
        (404, "not_found_error", "model: claude-none", ModelNotFound),
        (413, "request_too_large", "too large", ContextOverflow),
        (429, "rate_limit_error", "slow down", RateLimited),
        (500, "api_error", "oops", ProviderUnavailable),
        (503, "", "", ProviderUnavailable),
        (529, "overloaded_error", "Overloaded", ProviderUnavailable),
    ],
)
async def test_errors(status: int, kind: str, message: str, wanted: type[ProviderError]) -> None:
    answers = [
        httpx2.Response(status, json=failed(kind, message), headers={"retry-after": "3"})
        if kind
        else httpx2.Response(status, text="<html>gateway</html>")
        for _ in range(2)
    ]
    transport = Transport(*answers)
    async with client_of(transport) as client:
        for asked in (client.generate(HELLO), drained(client, HELLO)):
            with pytest.raises(ProviderError) as caught:
                await asked
            error = caught.value
            assert type(error) is wanted
            assert (error.provider, error.model, error.status) == ("anthropic", "claude-sonnet-5-5", status)
            if kind:
                assert (error.code, error.retry_after) == (kind, 3.0)
            assert KEY not in f"{error!r} {error} {error.__cause__!r}"
    # The SDK itself asks only once.
    assert len(transport.requests) == 2


IN_STREAM: list[tuple[str, str, type[ProviderError], int | None]] = [
    ("overloaded_error", "Overloaded", ProviderUnavailable, 529),
    ("rate_limit_error", "slow down", RateLimited, 429),
    ("api_error", "oops", ProviderUnavailable, 500),
    ("timeout_error", "late", ProviderUnavailable, 504),
    ("authentication_error", "expired", AuthenticationFailed, 401),
    ("invalid_request_error", "prompt is too long: 9 tokens", ContextOverflow, 400),
    ("invalid_request_error", "odd", RequestRefused, 400),
    ("something_new", "?", ProviderUnavailable, None),
]


@pytest.mark.parametrize(("kind", "message", "wanted", "status"), IN_STREAM)
async def test_an_error_in_the_stream(kind: str, message: str, wanted: type[ProviderError], status: int | None) -> None:
    broken = [*told([text("so"), USE], "tool_use")[:8], ("error", failed(kind, message))]
    async with client_of(Transport(broken)) as client:
        with pytest.raises(ProviderError) as caught:
            await client.generate(HELLO, stream=True)
    assert type(caught.value) is wanted
    assert (caught.value.status, caught.value.code) == (status, kind)


PAGE = """<html><head><title>502 Bad Gateway</title><style>b {color: red}</style></head>
<body><script>track("x")</script><h1>Bad&nbsp;Gateway</h1><p>try &amp; wait</p></body></html>"""


@for_each(
    ("body", "words"),
    [
        ({"message": "The model is not ready."}, "The model is not ready."),
        ({"Message": "no access"}, "no access"),
        ({"error": "model 'x' not found, try pulling it first"}, "try pulling it first"),
        (
            {"error": {"message": "litellm.BadRequestError: no", "type": None, "code": "400"}},
            "litellm.BadRequestError: no",
        ),
        ({"detail": "Not here"}, "Not here"),
        ({"detail": [{"loc": ["body"], "msg": "field required"}, {"msg": "too short"}]}, "field required; too short"),
        ([{"error": {"code": 400, "message": "vertex says no", "status": "INVALID_ARGUMENT"}}], "vertex says no"),
        ({"error": {"message": '{"type":"error","error":{"type":"x","message":"nested"}}'}}, "nested"),
        ({"error": {"code": 7}}, "code 7"),
        ({"odd": f"for {KEY}"}, "odd: for (key)"),
        ("plain words", "plain words"),
        (PAGE, "502 Bad Gateway Bad Gateway try & wait"),
        ("{broken", "{broken"),
    ],
)
async def test_the_words_of_any_error_are_kept(body: Any, words: str) -> None:
    sent = {"text": body} if isinstance(body, str) else {"json": body}
    async with client_of(Transport(*[httpx2.Response(400, **sent) for _ in range(2)])) as client:
        for asked in (client.generate(HELLO), drained(client, HELLO)):
            with pytest.raises(ProviderError) as caught:
                await asked
            assert words in str(caught.value)
            assert caught.value.status == 400
            assert "track" not in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        "Input is too long for requested model.",
        "prompt is too long: 205000 tokens > 200000 maximum",
        "input length and max_tokens exceed context limit: 190000 + 20000 > 200000",
        "The model returned the following errors: prompt is too long: 1 tokens",
    ],
)
async def test_a_prompt_that_is_too_long_for_any_server_of_claude(words: str) -> None:
    for body in (failed("invalid_request_error", words), {"message": words}, {"error": {"message": words}}):
        async with client_of(Transport(httpx2.Response(400, json=body))) as client:
            with pytest.raises(ContextOverflow):
                await client.generate(HELLO)


async def test_an_error_in_a_successful_answer() -> None:
    transport = Transport(failed("overloaded_error", "Overloaded"), failed("rate_limit_error", "slow down"))
    async with client_of(transport) as client:
        with pytest.raises(ProviderUnavailable, match="Overloaded"):
            await client.generate(HELLO)
        with pytest.raises(RateLimited, match="slow down"):
            await client.generate(HELLO, stream=True)


@pytest.mark.parametrize(
    "body",
    [
        {"detail": "it does not run"},
        {"type": "invalid", "message": "it does not run"},
        {"error": {"code": 400, "message": "it does not run"}},
    ],
)
async def test_an_error_of_a_proxy_in_a_successful_answer(body: dict[str, Any]) -> None:
    transport = Transport(httpx2.Response(200, json=body), httpx2.Response(200, json=body))
    async with client_of(transport) as client:
        for stream in (False, True):
            with pytest.raises(ProviderError, match="it does not run"):
                await client.generate(HELLO, stream=stream)


@pytest.mark.parametrize("content_type", ["application/json", "text/event-stream", "text/plain"])
@pytest.mark.parametrize("missing", [None, "type"])
async def test_a_whole_answer_to_a_request_to_stream(missing: str | None, content_type: str) -> None:
    content = [THOUGHT, text("so"), USE]
    whole = said(content, "tool_use")
    answer = {name: value for name, value in whole.items() if name != missing}
    headers = {"content-type": content_type}
    transport = Transport(*[httpx2.Response(200, headers=headers, json=answer) for _ in range(2)], whole)
    async with client_of(transport) as client:
        deltas, streamed = await drained(client, HELLO)
        through = await client.generate(HELLO, stream=True)
        once = await client.generate(HELLO)
    assert deltas == ["so"]
    for response in (streamed, through):
        assert (response.message, response.usage, response.finish_reason) == (once.message, once.usage, "tool_calls")
    assert len(transport.requests) == 3


async def test_a_whole_answer_as_the_only_event_of_a_stream() -> None:
    async with client_of(Transport([("message", said([text("so")]))])) as client:
        deltas, response = await drained(client, HELLO)
    assert (deltas, response.message["content"]) == (["so"], "so")


async def test_a_stream_with_the_content_type_of_json() -> None:
    body = events(*told([text("so")]), end="")
    answer = httpx2.Response(200, headers={"content-type": "application/json"}, content=body)
    async with client_of(Transport(answer)) as client:
        assert (await drained(client, HELLO))[1].message["content"] == "so"


async def test_connections_that_fail() -> None:
    transport = Transport(httpx2.ConnectError("refused"), httpx2.ConnectTimeout("slow"))
    async with client_of(transport) as client:
        with pytest.raises(ProviderUnavailable, match="refused"):
            await client.generate(HELLO)
        with pytest.raises(ProviderTimeout):
            await client.generate(HELLO)


def test_what_is_not_the_providers_error_goes_on_as_it_is() -> None:
    wire = AnthropicWire(api_key=KEY)
    for error in (ZeroDivisionError("ours"), TypeError("ours"), ValueError("ours"), NotSupported("ours")):
        assert wire.translate(error, "m") is None
    if hasattr(anthropic, "CredentialsError"):
        meant = wire.translate(anthropic.CredentialsError(f"no profile {KEY}"), "m")
        assert isinstance(meant, AuthenticationFailed)
        assert KEY not in str(meant)


async def test_a_refused_try_is_made_again() -> None:
    clock = VirtualClock()
    late = httpx2.Response(429, json=failed("rate_limit_error"), headers={"retry-after": "7"})
    busy = httpx2.Response(529, json=failed("overloaded_error"))
    transport = Transport(late, busy, told([text("at last")]))
    async with client_of(transport, retries=Retries(tries=3), clock=clock) as client:
        asked = asyncio.create_task(drained(client, HELLO))
        await clock.until_sleeping()
        assert (clock.next_due or 0) >= 7
        for _ in range(2):
            await clock.until_sleeping()
            clock.advance(60)
        assert (await asked)[1].message["content"] == "at last"
    assert len(transport.requests) == 3


# A server of bytes.


async def test_over_a_real_connection() -> None:
    content = [THOUGHT, text("Sunny in Köln."), USE]
    async with (
        serving(stream(*told(content, "tool_use"), end=""), script(said([text("ok")]))) as server,
        client_at(server) as client,
    ):
        deltas, response = await drained(client, HELLO)
        await client.generate(HELLO)
    assert "".join(deltas) == "Sunny in Köln."
    assert [each.name for each in response.tool_calls] == ["weather"]
    assert server.paths == ["/v1/messages", "/v1/messages"]
    sent = server.headers[0]
    assert KEY in (sent.get("authorization", "") + sent.get("x-api-key", ""))


async def test_retry_after_in_milliseconds() -> None:
    busy = script(failed("rate_limit_error"), status=429, headers={"retry-after-ms": "1500"})
    async with serving(busy) as server, client_at(server) as client:
        with pytest.raises(RateLimited) as caught:
            await client.generate(HELLO)
    assert caught.value.retry_after == 1.5


@pytest.mark.parametrize("broken", [False, True])
async def test_a_disconnect_in_the_middle(broken: bool) -> None:
    whole = events(*told([text("Sunny in Köln."), USE], "tool_use"), end="")
    cut = whole.index(b"input_json_delta")
    script = Script(whole[:cut] if broken else whole, content_type="text/event-stream", cut=cut, broken=broken)
    async with serving(script) as server, client_at(server) as client:
        chunks, error = await gathered(client)
    assert isinstance(error, StreamCut)
    assert "".join(chunk.delta for chunk in chunks) == "Sunny in Köln."
    assert all(chunk.tool_calls is None and chunk.response is None for chunk in chunks)


async def test_leaving_a_stream_closes_its_connection() -> None:
    whole = events(*told([text("Sunny in Köln.")]), end="")
    held = Script(whole, content_type="text/event-stream", stall=whole.index(b"message_delta"))
    async with serving(held) as server, client_at(server) as client:
        async for chunk in client.stream(HELLO):
            assert chunk.delta == "Sunny"
            break
        async with asyncio.timeout(10):
            await server.let_go.wait()


async def test_a_stall_is_a_timeout() -> None:
    whole = events(*told([text("Sunny in Köln.")]), end="")
    held = Script(whole, content_type="text/event-stream", stall=whole.index(b"message_delta"))
    short = Timeouts(between_chunks=0.05)
    async with serving(held) as server, client_at(server, timeouts=short) as client:
        with pytest.raises(ProviderTimeout, match="between_chunks"):
            await client.generate(HELLO, stream=True)
        async with asyncio.timeout(10):
            await server.let_go.wait()


async def test_a_server_that_holds_on_after_the_end_holds_nobody_up() -> None:
    whole = events(*told([text("done")]), end="")
    held = Script(whole + b"more", content_type="text/event-stream", stall=len(whole))
    async with serving(held) as server, client_at(server) as client:
        assert (await client.generate(HELLO, stream=True)).message["content"] == "done"
        async with asyncio.timeout(10):
            await server.let_go.wait()


RECORDED = events(
    *told([THOUGHT, text("Sunny in Köln or 東京? ☀"), USE, USE_TOO], "tool_use", cache_read_input_tokens=3), end=""
)


class Cut(httpx2.AsyncByteStream):  # type: ignore[misc,name-defined]
    """The first bytes of a body, in two pieces; then it ends, cleanly or not."""

    def __init__(self, end: int, error: Exception | None) -> None:
        self._end, self._error = end, error

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield RECORDED[: self._end // 2]
        yield RECORDED[self._end // 2 : self._end]
        if self._error:
            raise self._error


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("error", [None, httpx2.RemoteProtocolError("cut")])
async def test_a_stream_cut_at_every_byte_calls_no_tool(error: Exception | None, every: int) -> None:
    places = cut_places(RECORDED, every)
    cuts = iter(places)

    def answer(request: Any) -> Any:
        headers = {"content-type": "text/event-stream"}
        return httpx2.Response(200, headers=headers, stream=Cut(next(cuts), error))

    finished = []
    async with client_of(answer, breakers=Breakers(after=len(RECORDED) + 2)) as client:
        for cut in places:
            chunks, broken = await gathered(client)
            if broken is None:
                finished.append(cut)
                assert [each["id"] for each in chunks[-1].tool_calls or ()] == ["toolu_1", "toolu_2"]
                continue
            assert isinstance(broken, StreamCut)
            assert all(chunk.tool_calls is None and chunk.response is None for chunk in chunks)
            assert "Sunny in Köln or 東京? ☀".startswith("".join(chunk.delta for chunk in chunks))
    # An answer is complete with its stop reason; the last event adds nothing.
    complete = RECORDED.index(b"event: message_stop")
    assert finished == [cut for cut in places if cut >= complete]


# Construction.


def test_without_a_key() -> None:
    with pytest.raises(AnthropicConfigurationError, match=r"Pass api_key=.*configure.*ANTHROPIC_API_KEY"):
        AnthropicClient()
    assert issubclass(AnthropicConfigurationError, ValueError)


@pytest.mark.parametrize("key", ["can\x00ary", "canäry", "can\nary"])
def test_a_key_that_no_request_can_carry_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        AnthropicConfigurationError, match="must have only printable ASCII characters, got others"
    ) as caught:
        AnthropicClient(key)
    assert "ary" not in str(caught.value)
    monkeypatch.setenv("ANTHROPIC_API_KEY", " \n")
    with pytest.raises(AnthropicConfigurationError, match="has no API key"):
        AnthropicClient()
    assert AnthropicClient("canary\r\n")._wire._clients.first.api_key == "canary"  # type: ignore[attr-defined]


def test_where_the_key_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(**options: Any) -> Any:
        return AnthropicClient(**options)._wire._clients.first.api_key  # type: ignore[attr-defined]

    monkeypatch.setenv("ANTHROPIC_API_KEY", "from-environment")
    assert key() == "from-environment"
    configure(anthropic_api_key="from-config")
    assert key() == "from-config"
    assert key(api_key="from-argument") == "from-argument"
    assert KEY not in repr(AnthropicClient(api_key=KEY)) + repr(AnthropicClient(api_key=KEY)._wire)


def test_which_model(monkeypatch: pytest.MonkeyPatch) -> None:
    assert AnthropicClient(api_key=KEY).default_model == "claude-sonnet-5-5"
    assert AnthropicClient(api_key=KEY, default_model="claude-haiku-5-5").default_model == "claude-haiku-5-5"
    configure(model_provider="anthropic")
    assert AnthropicClient(api_key=KEY).default_model == "claude-sonnet-5-5"
    configure(model_provider="anthropic", default_model="gateway-model")
    assert AnthropicClient(api_key=KEY).default_model == "gateway-model"
    configure(model_provider="openai", default_model="gpt-5")
    assert AnthropicClient(api_key=KEY).default_model == "claude-sonnet-5-5"


@pytest.mark.parametrize(
    ("base_url", "remote", "needs_a_key"),
    [
        (None, True, True),
        ("https://gateway.example", True, True),
        ("http://127.0.0.1:8000", False, False),
        ("http://localhost:8000/anthropic", False, False),
        ("http://[::1]:8000", False, False),
    ],
)
def test_which_endpoint(base_url: str | None, remote: bool, needs_a_key: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    wire = AnthropicWire(api_key=KEY, base_url=base_url)
    assert wire.remote is remote
    assert wire.endpoint.startswith(base_url or "https://api.anthropic.com")
    if base_url:
        monkeypatch.setenv("ANTHROPIC_BASE_URL", base_url)
        assert AnthropicWire(api_key=KEY).endpoint == wire.endpoint
    if needs_a_key:
        with pytest.raises(AnthropicConfigurationError):
            AnthropicClient(base_url=base_url)
    else:
        AnthropicClient(base_url=base_url)


async def test_an_injected_transport_is_not_remote_and_stays_open() -> None:
    async with httpx2.AsyncClient(transport=httpx2.MockTransport(Transport(said([text("ok")])))) as http:
        client = AnthropicClient(api_key=KEY, http_client=http)
        assert client._wire.remote is False
        await client.close()
        assert not http.is_closed
        await client.generate(HELLO)


@pytest.mark.parametrize(("name", "instead"), [("max_retries", "retries="), ("timeout", "timeouts=")])
def test_what_the_sdk_must_not_do_is_said(name: str, instead: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} must not be an option of the SDK, got 3. Pass {instead}"):
        AnthropicClient(KEY, **dict[str, Any]({name: 3}))


def test_one_client_in_two_loops_keeps_their_connections_apart() -> None:
    wire = AnthropicWire(api_key=KEY)
    loops = [asyncio.new_event_loop() for _ in range(2)]

    async def own() -> list[Any]:
        return [await wire._clients.here() for _ in range(2)]

    (first, again), (second, _) = [loop.run_until_complete(own()) for loop in loops]
    for loop in loops:
        loop.close()
    assert first is again
    assert first is not second


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "anthropic", None)
    with pytest.raises(MissingDependency, match=r"AnthropicClient needs .*agent-runtime-core\[anthropic\]"):
        AnthropicClient(KEY)
    with pytest.raises(MissingDependency, match="anthropic"):  # which is said before that there is no key
        AnthropicClient()
