"""What every client does the same, with its real SDK against a server nobody here wrote."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest

from agent_runtime_core.errors import (
    AuthenticationFailed,
    ContextOverflow,
    ModelNotFound,
    ProviderError,
    ProviderUnavailable,
    RateLimited,
    RequestRefused,
    StreamCut,
)
from agent_runtime_core.interfaces import LLMStreamChunk
from agent_runtime_core.llm import Retries
from tests.wire.server import Aimock
from tests.wire.sides import CLOCK, KEY, WEATHER, Side, ask, calls_of, told, user

pytestmark = pytest.mark.wire

GREET = "Greet the guests"
BERN = "What is the weather in Bern?"


async def test_text(server: Aimock, side: Side) -> None:
    server.play("text")
    async with side.client() as client:
        response = await client.generate([{"role": "system", "content": "You are a miller."}, user(GREET)])
        assert response.message["role"] == "assistant"
        assert response.message["content"] == "Good morning, and welcome to the mill."
        assert response.tool_calls == []
        assert response.finish_reason == "stop"
        assert {name: response.usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")} == {
            "prompt_tokens": 12,
            "completion_tokens": 7,
            "total_tokens": 19,
        }
        [body] = server.sent()
        assert body["messages"] == [{"role": "system", "content": "You are a miller."}, user(GREET)]
        assert not body.get("stream")
        assert not body.get("tools")


async def test_stream(server: Aimock, side: Side) -> None:
    server.play("text")
    chunks: list[LLMStreamChunk] = []
    async with side.client() as client:
        response = await ask(client, [user(GREET)], streamed=True, into=chunks)
        assert "".join(chunk.delta for chunk in chunks) == "Good morning, and welcome to the mill."
        assert len([chunk for chunk in chunks if chunk.delta]) > 3, "the text came in pieces"
        assert response.message["content"] == "Good morning, and welcome to the mill."
        for chunk in chunks[:-1]:
            assert (chunk.finish_reason, chunk.usage, chunk.tool_calls, chunk.response) == (None, None, None, None)
        assert chunks[-1].finish_reason == response.finish_reason == "stop"
        assert not chunks[-1].tool_calls
        assert chunks[-1].usage == response.usage
        assert response.usage["prompt_tokens"] == 12
        assert response.usage["completion_tokens"] == 7
        assert response.usage["total_tokens"] == 19
        [body] = server.sent()
        assert body["stream"] is True


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_tool_is_called_and_its_result_sent_back(server: Aimock, side: Side, streamed: bool) -> None:
    server.play("tools")
    async with side.client() as client:
        messages: list[Any] = [user(BERN)]
        chunks: list[LLMStreamChunk] = []
        asked = await ask(client, messages, streamed=streamed, into=chunks, tools=[WEATHER, CLOCK])
        if streamed:
            assert [chunk for chunk in chunks[:-1] if chunk.tool_calls] == [], "calls are handed out whole, and last"
            assert [dict(call) for call in chunks[-1].tool_calls or ()] == [dict(call) for call in asked.tool_calls]
            assert chunks[-1].finish_reason == "tool_calls"
            assert "".join(chunk.delta for chunk in chunks) == "Let me look."
        assert calls_of(asked) == [("call_bern", "weather", {"city": "Bern", "days": 2})]
        assert asked.message["content"] == "Let me look."
        assert asked.finish_reason == "tool_calls"
        assert (asked.usage["prompt_tokens"], asked.usage["completion_tokens"]) == (40, 21)

        # The server has an answer only for this result of this call.
        messages += [asked.message, told(asked.tool_calls[0], "14 degrees, light rain")]
        done = await client.generate(messages, tools=[WEATHER, CLOCK])
        assert done.message["content"] == "It is 14 degrees in Bern."
        assert done.tool_calls == []

        first, second = server.sent()
        assert [tool["function"] for tool in first["tools"]] == [WEATHER["function"], CLOCK["function"]]
        assert [message["role"] for message in second["messages"]] == ["user", "assistant", "tool"]
        _, assistant, tool = second["messages"]
        assert assistant["content"] == "Let me look."
        assert [call["id"] for call in assistant["tool_calls"]] == ["call_bern"]
        assert assistant["tool_calls"][0]["function"]["name"] == "weather"
        assert json.loads(assistant["tool_calls"][0]["function"]["arguments"]) == {"city": "Bern", "days": 2}
        assert (tool["tool_call_id"], tool["content"]) == ("call_bern", "14 degrees, light rain")


@pytest.mark.parametrize("streamed", [False, True])
async def test_parallel_tools(server: Aimock, side: Side, streamed: bool) -> None:
    server.play("parallel")
    async with side.client() as client:
        messages: list[Any] = [user("Which is warmer, Bern or Rome?")]
        asked = await ask(client, messages, streamed=streamed, tools=[WEATHER, CLOCK])
        assert calls_of(asked) == [
            ("call_bern", "weather", {"city": "Bern"}),
            ("call_clock", "clock", {}),
            ("call_rome", "weather", {"city": 'Rome "caput mundi" ☀'}),
        ]
        results = ["14 degrees", "noon", "20 degrees"]
        messages += [
            asked.message,
            *(told(call, result) for call, result in zip(asked.tool_calls, results, strict=True)),
        ]
        done = await client.generate(messages, tools=[WEATHER, CLOCK])
        assert done.message["content"] == "Rome is warmer than Bern."
        answered = [message for message in server.sent()[1]["messages"] if message["role"] == "tool"]
        assert [(message["tool_call_id"], message["content"]) for message in answered] == [
            ("call_bern", "14 degrees"),
            ("call_clock", "noon"),
            ("call_rome", "20 degrees"),
        ]


async def test_generate_may_stream_underneath(server: Aimock, side: Side) -> None:
    server.play("tools")
    async with side.client() as client:
        whole = await client.generate([user(BERN)], tools=[WEATHER])
        streamed = await client.generate([user(BERN)], tools=[WEATHER], stream=True)
        assert streamed.message["content"] == whole.message["content"]
        assert calls_of(streamed) == calls_of(whole)
        assert streamed.usage == whole.usage
        assert streamed.finish_reason == whole.finish_reason
        assert [bool(body.get("stream")) for body in server.sent()] == [False, True]


async def test_a_rate_limit_is_waited_out(server: Aimock, side: Side) -> None:
    server.play("limited")
    async with side.client() as client:
        response = await client.generate([user(GREET)])
        assert response.message["content"] == "Good morning, late."
        assert server.statuses() == [429, 200]
        [waited] = side.clock.slept
        assert 3.0 <= waited < 4.0, "the server said: retry after 3 seconds"


async def test_a_rate_limit_before_a_stream_is_waited_out(server: Aimock, side: Side) -> None:
    server.play("limited")
    async with side.client() as client:
        response = await ask(client, [user(GREET)], streamed=True)
        assert response.message["content"] == "Good morning, late."
        assert server.statuses() == [429, 200]


async def test_without_retries_a_rate_limit_is_told(server: Aimock, side: Side) -> None:
    server.play("limited")
    async with side.client(retries=Retries(tries=1)) as client:
        with pytest.raises(RateLimited) as raised:
            await client.generate([user(GREET)])
        assert (raised.value.status, raised.value.retry_after) == (429, 3.0)
        assert raised.value.model == side.model
        assert server.statuses() == [429], "the SDK tried again by itself"


async def test_an_error_of_the_server_is_tried_again(server: Aimock, side: Side) -> None:
    server.play("broken_once")
    async with side.client() as client:
        response = await client.generate([user(GREET)])
        assert response.message["content"] == "Good morning, after the fire."
        assert server.statuses() == [500, 200]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_broken_server_is_given_up(server: Aimock, side: Side, streamed: bool) -> None:
    server.play("broken")
    chunks: list[LLMStreamChunk] = []
    async with side.client() as client:
        with pytest.raises(ProviderUnavailable) as raised:
            await ask(client, [user(GREET)], streamed=streamed, into=chunks)
        assert raised.value.status == 500
        assert raised.value.retriable
        assert server.statuses() == [500] * Retries().tries
        assert len(side.clock.slept) == Retries().tries - 1
        assert chunks == []


async def test_a_connection_closed_before_the_answer(server: Aimock, side: Side) -> None:
    server.play("hung_up")
    async with side.client(retries=Retries(tries=2)) as client:
        with pytest.raises(ProviderUnavailable):
            await client.generate([user(GREET)])
        assert len(server.journal()) == 2


async def test_an_answer_that_is_no_json(server: Aimock, side: Side) -> None:
    server.play("garbled")
    async with side.client(retries=Retries(tries=1)) as client:
        with pytest.raises(ProviderError):
            await client.generate([user(GREET)])


async def test_a_text_that_breaks_off(server: Aimock, side: Side) -> None:
    server.play("cut_text")
    chunks: list[LLMStreamChunk] = []
    async with side.client() as client:
        with pytest.raises(StreamCut):
            await ask(client, [user(GREET)], streamed=True, into=chunks)
        text = "".join(chunk.delta for chunk in chunks)
        assert text
        assert "Good morning, and welcome to the mill by the river.".startswith(text)
        assert all(chunk.response is None and chunk.finish_reason is None and not chunk.tool_calls for chunk in chunks)
        [entry] = server.journal()
        assert entry["response"]["interrupted"] is True, "asked once: text was handed out"


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_tool_call_that_breaks_off_is_handed_to_nobody(server: Aimock, side: Side, streamed: bool) -> None:
    server.play("cut_tool")
    chunks: list[LLMStreamChunk] = []
    async with side.client(retries=Retries(tries=2)) as client:
        underneath: dict[str, Any] = {} if streamed else {"stream": True}
        with pytest.raises((StreamCut, ProviderUnavailable)):
            await ask(client, [user(BERN)], streamed=streamed, into=chunks, tools=[WEATHER], **underneath)
        assert [chunk for chunk in chunks if chunk.tool_calls or chunk.response or chunk.finish_reason] == []
        assert [entry["response"]["interrupted"] for entry in server.journal()] == [True, True]


@pytest.mark.parametrize("streamed", [False, True])
async def test_after_a_cut_the_whole_call_is_handed_out(server: Aimock, side: Side, streamed: bool) -> None:
    server.play("cut_tool_once")
    underneath: dict[str, Any] = {} if streamed else {"stream": True}
    async with side.client() as client:
        response = await ask(client, [user(BERN)], streamed=streamed, tools=[WEATHER], **underneath)
        assert calls_of(response) == [("call_bern", "weather", {"city": "Bern"})]
        assert len(server.journal()) == 2


REFUSALS: dict[str, tuple[int, dict[str, str], type[ProviderError]]] = {
    "wrong key": (
        401,
        {"message": "Incorrect API key provided.", "type": "authentication_error"},
        AuthenticationFailed,
    ),
    "no permission": (403, {"message": "Not for you.", "type": "permission_error"}, AuthenticationFailed),
    "no such model": (404, {"message": "model: no-such-model", "type": "not_found_error"}, ModelNotFound),
    "too long": (413, {"message": "Request exceeds the maximum size.", "type": "request_too_large"}, ContextOverflow),
    "not understood": (422, {"message": "Unknown field.", "type": "invalid_request_error"}, RequestRefused),
}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("what", REFUSALS)
async def test_what_is_refused_is_not_asked_twice(server: Aimock, side: Side, what: str, streamed: bool) -> None:
    status, error, expected = REFUSALS[what]
    server.script({"match": {"userMessage": GREET}, "response": {"error": error, "status": status}})
    async with side.client() as client:
        with pytest.raises(expected) as raised:
            await ask(client, [user(GREET)], streamed=streamed)
        assert type(raised.value) is expected
        assert raised.value.status == status
        assert KEY not in f"{raised.value!r} {raised.value} {raised.value.__cause__!r}"
        assert server.statuses() == [status]
        assert side.clock.slept == []


@pytest.mark.parametrize(
    "error",
    [
        {
            "message": "This model's maximum context length is 8192 tokens.",
            "type": "invalid_request_error",
            "code": "context_length_exceeded",
        },
        {"message": "prompt is too long: 210000 tokens > 200000 maximum", "type": "invalid_request_error"},
    ],
    ids=["OpenAI's words", "Anthropic's words"],
)
async def test_a_prompt_that_is_too_long(server: Aimock, side: Side, error: dict[str, str]) -> None:
    server.script({"match": {"userMessage": GREET}, "response": {"error": error, "status": 400}})
    async with side.client() as client:
        with pytest.raises(ContextOverflow):
            await client.generate([user(GREET)])
        assert server.statuses() == [400]


async def test_many_at_once_on_one_client(server: Aimock, side: Side) -> None:
    server.script(
        *(
            {"match": {"userMessage": f"question {n:02}."}, "response": {"content": f"answer {n:02}"}, "latency": 5}
            for n in range(20)
        )
    )
    async with side.client() as client:
        answers = await asyncio.gather(
            *(ask(client, [user(f"question {n:02}.")], streamed=n % 2 == 1) for n in range(20))
        )
        assert [answer.message["content"] for answer in answers] == [f"answer {n:02}" for n in range(20)]


async def test_a_stream_is_left_at_once(server: Aimock, side: Side) -> None:
    server.script({"match": {"userMessage": GREET}, "response": {"content": "mill " * 400}, "latency": 150})
    began = time.monotonic()
    async with (
        side.client() as client,
        contextlib.aclosing(cast("AsyncGenerator[Any]", client.stream([user(GREET)]))) as stream,
    ):
        async for chunk in stream:
            if chunk.delta:
                break
    assert time.monotonic() - began < 20.0, "the rest of the answer, 50 s long, was read"
