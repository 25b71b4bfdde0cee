"""The litellm wire with the real package: what it makes up itself, and a server that misbehaves."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agent_runtime_core.errors import (
    AuthenticationFailed,
    ContextOverflow,
    InvalidArgument,
    MissingDependency,
    ModelNotFound,
    NotConfigured,
    NotSupported,
    ProviderError,
    ProviderTimeout,
    ProviderUnavailable,
    RateLimited,
    RequestRefused,
    StreamCut,
)
from agent_runtime_core.interfaces import LLMResponse
from agent_runtime_core.llm import LiteLLMClient, Retries, Timeouts, get_llm_client
from agent_runtime_core.llm._openai_stream import Assembly
from tests.support.litellm_cleanup import settled
from tests.support.provider_server import Script, Scripted, WireServer, script, serving, stream

# Not importorskip: the import takes seconds and is the wire's to make.
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("litellm") is None, reason="litellm is not installed"),
    # litellm 1.106 reads it with pydantic 2.11 and later.
    pytest.mark.filterwarnings("ignore:Accessing the 'model_:DeprecationWarning"),
]

KEY = "sk-canary-0123456789"
ASK = [{"role": "user", "content": "How warm is it in Oslo?"}]
CALLS = [
    {"id": "call_a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
    {"id": "call_b", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}},
]


@asynccontextmanager
async def asking(*answers: Scripted, **options: Any) -> AsyncIterator[tuple[LiteLLMClient, WireServer]]:
    """A client of a server with these answers; afterwards litellm lets go of its connections and tasks."""
    async with serving(*answers) as server:
        client = LiteLLMClient(
            "openai/m", base_url=server.url, **{"api_key": KEY, "retries": Retries(tries=1), **options}
        )
        try:
            yield client, server
        finally:
            await settled()


def completion(message: dict[str, Any], finish_reason: str = "stop", **rest: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish_reason}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], **rest}


def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


def test_a_missing_package_is_told_when_the_client_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "litellm", None)
    with pytest.raises(MissingDependency, match=r"agent-runtime-core\[litellm\]"):
        get_llm_client("litellm")


@pytest.mark.parametrize("option", ["max_retries", "num_retries", "timeout"])
def test_an_option_that_would_fight_with_ours_is_refused(option: str) -> None:
    options: dict[str, Any] = {option: 3}
    with pytest.raises(InvalidArgument, match=f"{option} must not be an option of litellm, got 3"):
        LiteLLMClient("m", **options)


def test_a_key_that_no_request_can_carry_is_refused() -> None:
    with pytest.raises(NotConfigured, match="must have only printable ASCII characters, got others"):
        LiteLLMClient("m", api_key="can\nary")
    assert LiteLLMClient("m", api_key="canary\n")._wire._options["api_key"] == "canary"  # type: ignore[attr-defined]


async def test_what_litellm_makes_up() -> None:
    client = LiteLLMClient("gpt-4o", mock_response="4 °C")
    assert not client._wire.remote
    response = await client.generate(ASK)
    assert response.message["content"] == "4 °C"
    assert response.usage["prompt_tokens"] + response.usage["completion_tokens"] == response.usage["total_tokens"] > 0
    streamed = [each async for each in client.stream(ASK)]
    assert "".join(each.delta for each in streamed) == "4 °C"
    assert streamed[-1].response is not None
    called = await LiteLLMClient("gpt-4o").generate(ASK, mock_response="", mock_tool_calls=CALLS)
    assert [(each.id, each.name, each.arguments) for each in called.tool_calls] == [
        ("call_a", "weather", '{"city": "Oslo"}'),
        ("call_b", "weather", '{"city": "Rome"}'),
    ]
    await settled()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("RateLimitError", RateLimited),
        ("InternalServerError", ProviderUnavailable),
        ("ContextWindowExceededError", ContextOverflow),
    ],
)
async def test_errors_that_litellm_makes_up(name: str, kind: type[ProviderError]) -> None:
    client = LiteLLMClient("gpt-4o", mock_response=f"litellm.{name}", retries=Retries(tries=1))
    with pytest.raises(ProviderError) as caught:
        await client.generate(ASK)
    assert type(caught.value) is kind
    await settled()


async def test_tools_reasoning_and_usage_survive_the_round_trip() -> None:
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 5,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }
    told = completion({"content": None, "tool_calls": CALLS, "reasoning_content": "Ask."}, "tool_calls", usage=usage)
    async with asking(script(told), drop_params=True) as (client, server):
        first = await client.generate(ASK, temperature=0.5, max_tokens=9)
        results = [{"role": "tool", "tool_call_id": each["id"], "content": "4"} for each in CALLS]
        await client.generate([*ASK, first.message, *results])
    assert first.message["tool_calls"] == CALLS
    assert first.message["provider_fields"]["litellm"]["reasoning_content"] == "Ask."
    assert first.usage == {
        "prompt_tokens": 9,
        "completion_tokens": 5,
        "total_tokens": 14,
        "cached_tokens": 4,
        "reasoning_tokens": 3,
    }
    assert (server.asked[0]["temperature"], server.asked[0]["max_tokens"]) == (0.5, 9)
    sent = server.asked[1]["messages"]
    assert sent[1]["tool_calls"] == CALLS
    assert "provider_fields" not in sent[1]
    assert sent[2:] == results


async def streamed(client: LiteLLMClient) -> LLMResponse:
    return await client.generate(ASK, stream=True)


async def test_a_stream_with_two_calls() -> None:
    deltas = [
        chunk({"role": "assistant", "content": "Let me see."}),
        *[chunk({"tool_calls": [{**each, "index": index}]}) for index, each in enumerate(CALLS)],
        chunk({}, "tool_calls"),
        {**chunk({}), "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}},
    ]
    async with asking(stream(*deltas), stream(*deltas[:3], end="")) as (client, _):
        response = await streamed(client)
        assert response.message == {"role": "assistant", "content": "Let me see.", "tool_calls": CALLS}
        assert (response.finish_reason, response.usage["total_tokens"]) == ("tool_calls", 14)
        # litellm itself says "stop" where the server never did.
        with pytest.raises(StreamCut):
            await streamed(client)


@pytest.mark.parametrize(
    "answer",
    [
        stream(chunk({"content": "h"}), end="", broken=True),
        stream(chunk({"content": "h"}), {"error": {"message": "no", "code": "server_error"}}, end=""),
    ],
)
async def test_a_stream_that_breaks_off(answer: Script) -> None:
    async with asking(answer) as (client, _):
        with pytest.raises(StreamCut):
            await streamed(client)


async def test_a_stream_that_stalls_is_let_go() -> None:
    told = stream(chunk({"content": "h"}), chunk({"content": "i"}))
    stalling = Script(told.body, content_type=told.content_type, stall=len(told.body) - 20)
    async with asking(stalling, timeouts=Timeouts(between_chunks=0.2)) as (client, server):
        with pytest.raises(ProviderTimeout, match="between_chunks"):
            await streamed(client)
        async with asyncio.timeout(5):
            await server.let_go.wait()


async def test_a_stream_left_early_closes_its_connection() -> None:
    told = stream(chunk({"content": "h"}), chunk({"content": "i"}))
    stalling = Script(told.body, content_type=told.content_type, stall=len(told.body) - 20)
    async with asking(stalling) as (client, server):
        pieces = client.stream(ASK)
        assert (await anext(pieces)).delta == "h"
        await pieces.aclose()  # type: ignore[attr-defined]
        async with asyncio.timeout(5):
            await server.let_go.wait()


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (500, None, ProviderUnavailable),
        (401, None, AuthenticationFailed),
        (404, None, ModelNotFound),
        (400, None, RequestRefused),
        (400, "context_length_exceeded", ContextOverflow),
        (429, None, RateLimited),
    ],
)
async def test_what_a_failure_means_and_that_it_is_asked_once(
    status: int, code: str | None, kind: type[ProviderError]
) -> None:
    body = {"error": {"message": f"no, {KEY}", "code": code}}
    async with asking(script(body, status=status, headers={"retry-after": "3"})) as (client, server):
        with pytest.raises(ProviderError) as caught:
            await client.generate(ASK)
    assert type(caught.value) is kind
    assert caught.value.retry_after == 3
    assert KEY not in str(caught.value)
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    "body", [{"error": "The words"}, {"detail": "The words"}, [{"error": {"message": "The words"}}], "The words"]
)
async def test_the_words_of_a_server_are_in_the_error(body: Any) -> None:
    async with asking(script(body, status=400)) as (client, _):
        with pytest.raises(RequestRefused, match="HTTP 400: The words"):
            await client.generate(ASK)


@pytest.mark.parametrize("stream_it", [False, True], ids=["whole", "streamed"])
async def test_a_refusal_and_reasoning_that_only_the_total_counts(stream_it: bool) -> None:
    usage = {"prompt_tokens": 20, "completion_tokens": 10, "total_tokens": 500}
    pieces = [chunk({"refusal": "I can"}), chunk({"refusal": "not."}), chunk({}, "stop")]
    whole = script(completion({"content": None, "refusal": "I cannot."}, usage=usage))
    answer = stream(*pieces, {**chunk({}), "choices": [], "usage": usage}) if stream_it else whole
    async with asking(answer) as (client, _):
        response = await client.generate(ASK, stream=stream_it)
    assert (response.finish_reason, response.message["refusal"]) == ("refusal", "I cannot.")
    assert (response.usage["completion_tokens"], response.usage["total_tokens"]) == (480, 500)


async def test_a_streamed_text_in_parts() -> None:
    parts = [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "4 °C"}]
    async with asking(stream(chunk({"content": parts}), chunk({}, "stop"))) as (client, _):
        assert (await client.generate(ASK, stream=True)).message["content"] == "4 °C"


async def test_a_context_overflow_in_a_stream_is_not_retried() -> None:
    answer = stream({"error": "the input exceeds the context length"})
    async with asking(answer, retries=Retries(tries=2, base=0)) as (client, server):
        with pytest.raises(ContextOverflow):
            await client.generate(ASK, stream=True)
    assert len(server.asked) == 1


@pytest.mark.parametrize("stream_it", [False, True], ids=["whole", "streamed"])
async def test_a_malformed_call_is_asked_for_again(stream_it: bool) -> None:
    reason = "MALFORMED_FUNCTION_CALL"
    answer = stream(chunk({}, reason)) if stream_it else script(completion({"content": None}, reason))
    async with asking(answer, retries=Retries(tries=2, base=0)) as (client, server):
        with pytest.raises(RequestRefused, match="malformed tool call"):
            await client.generate(ASK, stream=stream_it)
    assert len(server.asked) == 2


@pytest.mark.parametrize("content_type", ["application/json", "text/event-stream", "text/plain"])
async def test_a_server_that_does_not_stream_is_asked_once(content_type: str) -> None:
    async with asking(script(completion({"content": "4 °C"}), content_type=content_type), retries=Retries(base=0)) as (
        client,
        server,
    ):
        assert (await streamed(client)).message["content"] == "4 °C"
    assert len(server.asked) == 1


async def test_a_choice_without_a_message_is_asked_for_once() -> None:
    body = {**completion({}), "choices": [{"index": 0, "finish_reason": "length"}]}
    async with asking(script(body), retries=Retries(base=0)) as (client, server):
        with pytest.raises(RequestRefused, match="max_tokens"):
            await client.generate(ASK)
    assert len(server.asked) == 1


@pytest.mark.parametrize("stream_it", [False, True], ids=["whole", "streamed"])
async def test_reasoning_that_a_server_rejects_is_sent_once(stream_it: bool) -> None:
    def answer(asked: dict[str, Any]) -> Script:
        if any("reasoning_content" in message for message in asked["messages"]):
            return script({"detail": "reasoning_content: Extra inputs are not permitted"}, status=422)
        return stream(chunk({"content": "4"}, "stop")) if stream_it else script(completion({"content": "4"}))

    told: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": CALLS[:1]}
    told["provider_fields"] = {"litellm": {"reasoning_content": "I think"}}
    result = {"role": "tool", "tool_call_id": "call_a", "content": "4"}
    async with asking(answer) as (client, server):
        for _ in range(2):
            assert (await client.generate([*ASK, told, result], stream=stream_it)).message["content"] == "4"
    assert len(server.asked) == 3


async def test_a_model_without_a_provider() -> None:
    with pytest.raises(ModelNotFound, match="provider/model"):
        await LiteLLMClient("nobody/nothing").generate(ASK)
    await settled()


async def test_embeddings_and_what_litellm_has_not() -> None:
    data = [{"object": "embedding", "index": i, "embedding": [i + 0.5]} for i in (1, 0)]
    async with asking(script({"object": "list", "data": data, "model": "m"})) as (client, server):
        assert await client.embed(["a", "b"], model="openai/e") == [[0.5], [1.5]]
        assert await client.embed([]) == []
        assert await client.count_tokens(ASK) > 5
        with pytest.raises(NotSupported, match="moderate"):
            await client.moderate("x")
    assert server.asked[0]["input"] == ["a", "b"]


async def test_embeddings_are_asked_for_once() -> None:
    refused = script({"error": {"message": "slow down"}}, status=429, headers={"retry-after": "30"})
    async with asking(refused) as (client, server):
        with pytest.raises(RateLimited) as caught:
            await client.embed(["a"])
    assert caught.value.retry_after == 30.0
    assert len(server.asked) == 1


async def test_fields_that_say_nothing_are_not_kept() -> None:
    async with asking(script(completion({"content": "4 °C"}))) as (client, _):
        assert (await client.generate(ASK)).message == {"role": "assistant", "content": "4 °C"}


async def test_warm_up_imports_without_the_network() -> None:
    await LiteLLMClient("m").warm_up()
    assert os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] == "True"
    assert sys.modules["litellm"].suppress_debug_info is True


def test_thinking_comes_together_from_its_pieces() -> None:
    assembly = Assembly("litellm", "m", set())
    pieces = [
        {"type": "thinking", "thinking": "One "},
        {"type": "thinking", "thinking": "two", "signature": ""},
        {"type": "thinking", "thinking": "", "signature": "s1"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "thinking", "thinking": "Three", "signature": "s2"},
    ]
    for piece in pieces:
        assembly.add(chunk({"thinking_blocks": [piece]}))
    assembly.add(chunk({"content": "4"}, "stop"))
    answer = assembly.answer()
    assert answer is not None
    assert answer.message["provider_fields"]["litellm"]["thinking_blocks"] == [
        {"type": "thinking", "thinking": "One two", "signature": "s1"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "thinking", "thinking": "Three", "signature": "s2"},
    ]


async def test_schemas_are_sent_as_openai_accepts_them() -> None:
    parameters = {"anyOf": [{"properties": {"a": {"type": "array"}}}]}
    async with asking(script(completion({"content": "4 °C"}))) as (client, server):
        await client.generate(ASK, tools=[{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    (sent,) = server.asked[0]["tools"]
    assert sent["function"]["parameters"]["type"] == "object"
    assert sent["function"]["parameters"]["properties"] == {"a": {"type": "array", "items": {}}}


@pytest.mark.parametrize("stream_it", [False, True], ids=["whole", "streamed"])
async def test_messages_of_one_role_in_a_row_are_joined_for_a_server_that_rejects_them(stream_it: bool) -> None:
    def answer(asked: dict[str, Any]) -> Script:
        if len(asked["messages"]) > 1:
            return script({"message": "Conversation roles must alternate user/assistant/...", "code": 400}, status=400)
        return stream(chunk({"content": "4"}, "stop")) if stream_it else script(completion({"content": "4"}))

    async with asking(answer) as (client, server):
        for _ in range(2):
            assert (await client.generate([*ASK, *ASK], stream=stream_it)).message["content"] == "4"
    assert [len(asked["messages"]) for asked in server.asked] == [2, 1, 1]
