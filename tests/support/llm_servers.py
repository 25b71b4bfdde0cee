"""The model clients that the contract is run over, each with the script on the wire of its provider."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest

from agent_runtime_core.errors import (
    AuthenticationFailed,
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
from agent_runtime_core.interfaces import LLMClient, LLMResponse, LLMStreamChunk
from agent_runtime_core.llm import AnthropicClient, LiteLLMClient, OpenAIClient, Retries, Timeouts
from agent_runtime_core.testing import MockLLMClient
from agent_runtime_core.testing.contracts.llm import (
    KEY,
    Call,
    Disconnect,
    Echo,
    Embedding,
    Hang,
    HttpError,
    Reply,
    TextReply,
    TokenUsage,
    Verdict,
)
from tests.contract.third_party import their_client
from tests.support.litellm_cleanup import settled
from tests.support.provider_server import Script, script, serving, stream

Body = dict[str, Any]


def silence(replies: Sequence[Reply]) -> float:
    """Seconds without a word after which a client gives up: many, but where a stall is all there is to be heard."""
    return 0.3 if all(isinstance(reply, Hang) for reply in replies) else 10.0


def asking(replies: Sequence[Reply]) -> dict[str, Any]:
    """The options of a client."""
    timeouts = Timeouts(connect=5.0, first_byte=10.0, between_chunks=silence(replies), total=10.0)
    return {"retries": Retries(tries=1), "timeouts": timeouts}


@dataclass(frozen=True)
class Finished:
    """A finished answer whose response ends badly.

    `how` is "closed" (without the event that ends a stream), "cut" (with an error) or "open". Without `usage`, the
    provider reports none of a stream.
    """

    says: TextReply
    how: str
    usage: bool = True


# -- OpenAI's wire, which litellm speaks too


def openai_script(reply: Reply | Finished, asked: Body) -> Script:
    match reply:
        case Finished():
            whole = script(_completion(reply.says))
            if asked.get("stream"):
                whole = _openai_stream(reply.says, end=True, usage=reply.usage, last="")
            return badly_ended(reply, whole)
        case TextReply():
            return _openai_stream(reply, end=True) if asked.get("stream") else script(_completion(reply))
        case Echo():
            return openai_script(TextReply(json.dumps(asked)), asked)
        case HttpError():
            error = {"message": reply.message, "type": "scripted", "code": None}
            return script({"error": error}, status=reply.status, headers=_headers(reply))
        case Embedding():
            data = [{"object": "embedding", "index": n, "embedding": each} for n, each in enumerate(reply.vectors)]
            usage = {"prompt_tokens": 2, "total_tokens": 2}
            return script({"object": "list", "data": data, "model": "m", "usage": usage})
        case Verdict():
            verdict = {"flagged": reply.flagged, "categories": {}, "category_scores": {}}
            return script({"id": "modr_1", "model": "m", "results": [verdict]})
        case TokenUsage():
            raise NotSupported("OpenAI has no address where tokens are counted")
        case Disconnect() | Hang():
            whole = _openai_stream(reply.says, end=False) if asked.get("stream") else script(_completion(reply.says))
            return unfinished(reply, whole)


def _completion(says: TextReply) -> Body:
    message: Body = {"role": "assistant", "content": says.text or None}
    if says.tool_calls:
        message["tool_calls"] = [_openai_call(call) for call in says.tool_calls]
    choice = {"index": 0, "message": message, "finish_reason": says.finish_reason}
    about = {"id": "c", "object": "chat.completion", "created": 1, "model": says.model}
    return about | {"choices": [choice], "usage": _openai_usage(says)}


def _openai_stream(says: TextReply, *, end: bool, usage: bool = True, last: str = "data: [DONE]\n\n") -> Script:
    about = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": says.model}

    def chunk(delta: Body, finish_reason: str | None = None) -> Body:
        return about | {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}

    chunks = [chunk({"role": "assistant"})] + [chunk({"content": piece}) for piece in says.streamed]
    for index, call in enumerate(says.tool_calls):
        told = _openai_call(call)
        arguments = told["function"].pop("arguments")
        chunks.append(chunk({"tool_calls": [{"index": index, **told}]}))
        for piece in (arguments[:5], arguments[5:]):
            chunks.append(chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]}))
    if not end:
        return stream(*chunks, end="")
    counts = [about | {"choices": [], "usage": _openai_usage(says)}] if usage else []
    return stream(*chunks, chunk({}, says.finish_reason), *counts, end=last)


def _openai_call(call: Call) -> Body:
    arguments = json.dumps(call.arguments)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _openai_usage(says: TextReply) -> Body:
    usage = says.usage
    told: Body = {"prompt_tokens": usage.prompt, "completion_tokens": usage.completion}
    told["total_tokens"] = usage.prompt + usage.completion
    if usage.cached is not None:
        told["prompt_tokens_details"] = {"cached_tokens": usage.cached}
    if usage.reasoning is not None:
        told["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning}
    return told


# -- Anthropic's wire

_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def anthropic_script(reply: Reply | Finished, asked: Body) -> Script:
    match reply:
        case Finished():
            whole = script(_message(reply.says))
            if asked.get("stream"):
                whole = _anthropic_stream(reply.says, end=True, usage=reply.usage, last=False)
            return badly_ended(reply, whole)
        case TextReply():
            return _anthropic_stream(reply, end=True) if asked.get("stream") else script(_message(reply))
        case Echo():
            return anthropic_script(TextReply(json.dumps(asked)), asked)
        case HttpError():
            error = {"type": "error", "error": {"type": "scripted_error", "message": reply.message}}
            return script(error, status=reply.status, headers=_headers(reply))
        case TokenUsage():
            return script({"input_tokens": reply.tokens})
        case Embedding() | Verdict():
            raise NotSupported("Anthropic only talks")
        case Disconnect() | Hang():
            whole = _anthropic_stream(reply.says, end=False) if asked.get("stream") else script(_message(reply.says))
            return unfinished(reply, whole)


def _message(says: TextReply) -> Body:
    content: list[Body] = [{"type": "text", "text": says.text}] if says.text else []
    content += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments} for call in says.tool_calls
    ]
    usage: Body = {"input_tokens": says.usage.prompt - (says.usage.cached or 0), "output_tokens": says.usage.completion}
    if says.usage.cached is not None:
        usage["cache_read_input_tokens"] = says.usage.cached
    if says.usage.reasoning is not None:
        usage["output_tokens_details"] = {"thinking_tokens": says.usage.reasoning}
    about = {"id": "msg_1", "type": "message", "role": "assistant", "model": says.model, "stop_sequence": None}
    stop = _STOPS.get(says.finish_reason, says.finish_reason)
    return about | {"content": content, "stop_reason": stop, "usage": usage}


def _anthropic_stream(says: TextReply, *, end: bool, usage: bool = True, last: bool = True) -> Script:
    whole = _message(says)
    begun = whole | {"content": [], "stop_reason": None, "usage": whole["usage"] | {"output_tokens": 0}}
    told: list[Body] = [{"type": "message_start", "message": begun}]
    for index, block in enumerate(whole["content"]):
        if block["type"] == "text":
            start, deltas = block | {"text": ""}, [{"type": "text_delta", "text": piece} for piece in says.streamed]
        else:
            start, text = block | {"input": {}}, json.dumps(block["input"])
            deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in (text[:5], text[5:])]
        told.append({"type": "content_block_start", "index": index, "content_block": start})
        told += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        told.append({"type": "content_block_stop", "index": index})
    if end:
        stopped = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
        told.append({"type": "message_delta", "delta": stopped, "usage": whole["usage"] if usage else {}})
        told += [{"type": "message_stop"}] if last else []
    return stream(*((each["type"], each) for each in told), end="")


# -- what the two have in common


def unfinished(reply: Disconnect | Hang, whole: Script) -> Script:
    streamed = whole.content_type == "text/event-stream"
    body = whole.body if streamed else whole.body[: len(whole.body) // 2]
    if isinstance(reply, Hang):
        return Script(body, content_type=whole.content_type, stall=len(body) if streamed else 0)
    return Script(body, content_type=whole.content_type, broken=not reply.clean)


def badly_ended(reply: Finished, whole: Script) -> Script:
    stall = len(whole.body) if reply.how == "open" else None
    return replace(whole, broken=reply.how == "cut", stall=stall)


def _headers(refuses: HttpError) -> dict[str, str]:
    return {} if refuses.retry_after is None else {"retry-after": f"{refuses.retry_after:g}"}


@asynccontextmanager
async def served(
    wire: Callable[[Reply, Body], Script], client_at: Callable[[str], Any], replies: Sequence[Reply]
) -> AsyncIterator[LLMClient]:
    for reply in replies:
        wire(reply, {})  # NotSupported comes before anybody asks
    async with serving(*(functools.partial(wire, reply) for reply in replies)) as server:
        client = client_at(server.url)
        try:
            yield client
        finally:
            await client.close()


def openai(replies: Sequence[Reply]) -> Any:
    return served(openai_script, lambda url: OpenAIClient(KEY, "m", base_url=url, **asking(replies)), replies)


def anthropic(replies: Sequence[Reply]) -> Any:
    return served(anthropic_script, lambda url: AnthropicClient(KEY, "m", url, **asking(replies)), replies)


@asynccontextmanager
async def litellm(replies: Sequence[Reply]) -> AsyncIterator[LLMClient]:
    async with AsyncExitStack() as stack:
        stack.push_async_callback(settled)
        client = await stack.enter_async_context(
            served(openai_script, lambda url: LiteLLMClient("openai/m", url, api_key=KEY, **asking(replies)), replies)
        )
        await client.warm_up()  # type: ignore[attr-defined]
        yield client


# -- the mock, which has no provider


class _Silent(Exception):
    """In the place of an answer that does not come; `said` did."""

    def __init__(self, said: TextReply) -> None:
        self.said = said


class StallingMock(MockLLMClient):
    """A mock that can also be silent, and that, other than the mock itself, does not let itself be asked nothing."""

    patience = 0.0

    async def generate(self, messages: list[Any], **options: Any) -> LLMResponse:
        _some(messages)
        try:
            return await super().generate(messages, **options)
        except _Silent:
            await asyncio.Event().wait()
            raise

    async def stream(self, messages: list[Any], **options: Any) -> AsyncIterator[LLMStreamChunk]:
        _some(messages)
        try:
            async for chunk in super().stream(messages, **options):
                yield chunk
        except _Silent as silent:
            for piece in silent.said.streamed:
                yield LLMStreamChunk(piece)
            with suppress(TimeoutError):
                async with asyncio.timeout(self.patience):
                    await asyncio.Event().wait()
            raise ProviderTimeout("the mock is silent") from None


def _some(messages: list[Any]) -> None:
    if not messages:
        raise InvalidArgument("messages=[] asks nothing")


@asynccontextmanager
async def mock(replies: Sequence[Reply]) -> AsyncIterator[LLMClient]:
    numbers = iter(range(10_000))

    def answer(messages: list[Any]) -> Any:
        return _mocked(replies[min(next(numbers), len(replies) - 1)], client.get_calls()[-1])

    client = StallingMock(response_fn=answer)
    client.patience = silence(replies)
    yield client


_REFUSED = {
    400: RequestRefused,
    401: AuthenticationFailed,
    403: AuthenticationFailed,
    404: ModelNotFound,
    429: RateLimited,
}


def _mocked(reply: Reply, call: Body) -> Any:
    match reply:
        case TextReply():
            message: Body = {"role": "assistant", "content": reply.text}
            if reply.tool_calls:
                message["tool_calls"] = [_openai_call(each) for each in reply.tool_calls]
            usage = _openai_usage(reply)
            usage |= usage.pop("prompt_tokens_details", {}) | usage.pop("completion_tokens_details", {})
            return LLMResponse(message, usage, reply.model, reply.finish_reason)
        case Echo():
            return _mocked(TextReply(json.dumps(call)), call)
        case HttpError():
            kind: type[ProviderError] = _REFUSED.get(reply.status, ProviderUnavailable)
            return kind(f"said {reply.status}", status=reply.status, retry_after=reply.retry_after)
        case Disconnect():
            return StreamCut("broke off")
        case Hang():
            return _Silent(reply.says)
        case _:
            raise NotSupported("a mock only talks")


def _needing(package: str, make: Callable[..., Any]) -> Any:
    missing = importlib.util.find_spec(package) is None
    marks = [pytest.mark.skipif(missing, reason=f"{package} is not installed")]
    if package == "litellm":
        # litellm 1.106 reads it with pydantic 2.11 and later.
        marks.append(pytest.mark.filterwarnings("ignore:Accessing the 'model_:DeprecationWarning"))
        # So does pydantic itself, where litellm's types are made late.
        marks.append(pytest.mark.filterwarnings("ignore:Item '.*' on TypedDict class:UserWarning"))
    return pytest.param(make, id=package, marks=marks)


CLIENTS = [
    pytest.param(mock, id="mock"),
    *(_needing(make.__name__, make) for make in (openai, anthropic, litellm)),
    pytest.param(their_client.make, id="theirs"),
]
