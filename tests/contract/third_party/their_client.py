"""A model client as somebody else would write it: a provider that answers in parts, and the errors it may have."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import agent_runtime_core.errors as errors
from agent_runtime_core.interfaces import LLMClient, LLMResponse, LLMStreamChunk, ToolCallDict
from agent_runtime_core.testing.contracts.llm import Disconnect, Echo, Hang, HttpError, Reply, TextReply

Part = dict[str, Any]
#: Gives the parts of an answer to a request; what is not answered is an OSError.
Provider = Callable[[Part], AsyncGenerator[Part, None]]

SILENCE = 0.2  # seconds between two parts after which nothing more is expected
KINDS: dict[int, type[errors.ProviderError]] = {
    401: errors.AuthenticationFailed,
    403: errors.AuthenticationFailed,
    404: errors.ModelNotFound,
    429: errors.RateLimited,
}


class TheirClient(LLMClient):
    """Asks `provider`, once for each answer."""

    def __init__(self, provider: Provider, silence: float = SILENCE) -> None:
        self.provider, self.silence = provider, silence

    async def generate(self, messages: list[Any], *, stream: bool = False, **options: Any) -> LLMResponse:
        async for chunk in self.stream(messages, **options):
            if chunk.response is not None:
                return chunk.response
        raise errors.StreamCut("the answer has no end", provider="theirs")

    async def stream(self, messages: list[Any], **options: Any) -> AsyncIterator[LLMStreamChunk]:
        if not (isinstance(messages, list) and messages and all(isinstance(each, dict) for each in messages)):
            raise errors.InvalidArgument(f"messages={messages!r:.80} asks nothing: give a list of dicts")
        request = {"messages": messages} | {key: value for key, value in options.items() if value}
        text, calls = "", []
        async for part in self.parts(request):
            if "text" in part:
                text += part["text"]
                yield LLMStreamChunk(part["text"])
            elif "call" in part:
                calls.append(self.call(part["call"]))
            elif "end" in part:
                response = self.response(text, calls, part)
                yield LLMStreamChunk("", response.tool_calls or None, part["end"], response.usage, response)
                return
        raise errors.StreamCut("the stream has no end", provider="theirs")

    async def parts(self, request: Part) -> AsyncGenerator[Part, None]:
        """What the provider says, in errors of the library's where that is none."""
        parts = self.provider(request)
        try:
            while True:
                async with asyncio.timeout(self.silence):
                    part = await anext(parts, None)
                if part is None:
                    return
                if "status" in part:
                    raise self.refusal(part)
                yield part
        except TimeoutError:
            raise errors.ProviderTimeout(f"silent for {self.silence:g} s", provider="theirs") from None
        except OSError as error:
            raise errors.ProviderUnavailable(f"the connection failed: {error}", provider="theirs") from error
        finally:
            await parts.aclose()

    def refusal(self, part: Part) -> errors.ProviderError:
        status = part["status"]
        usual = errors.ProviderUnavailable if status >= 500 else errors.RequestRefused
        kind = KINDS.get(status, usual)
        # What the provider says may hold the key.
        return kind(f"refused with {status}", provider="theirs", status=status, retry_after=part["retry_after"])

    def call(self, told: Part) -> Part:
        function = {"name": told["name"], "arguments": json.dumps(told["arguments"])}
        return ToolCallDict({"id": told["id"], "type": "function", "function": function})

    def usage(self, told: Part) -> dict[str, int]:
        return {name: count for name, count in told.items() if count is not None}

    def response(self, text: str, calls: list[Part], part: Part) -> LLMResponse:
        message: Part = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = [dict(call) for call in calls]
        return LLMResponse(message, self.usage(part["usage"]), part["model"], part["end"])


# -- the contract's script on their provider


def scripted(script: Sequence[Reply]) -> Provider:
    """A provider that answers as the script says."""
    asked = 0

    async def provider(request: Part) -> AsyncGenerator[Part, None]:
        nonlocal asked
        reply, asked = script[min(asked, len(script) - 1)], asked + 1
        for part in _told(reply, request):
            yield part
        if isinstance(reply, Hang):
            await asyncio.Event().wait()
        if isinstance(reply, Disconnect) and not reply.clean:
            raise ConnectionResetError("the provider went away")

    return provider


def _told(reply: Reply, request: Part) -> Iterator[Part]:
    match reply:
        case HttpError():
            yield {"status": reply.status, "said": reply.message, "retry_after": reply.retry_after}
        case Echo():
            yield from _told(TextReply(json.dumps(request)), request)
        case TextReply():
            yield from _said(reply)
            usage = reply.usage
            counts = {"prompt_tokens": usage.prompt, "completion_tokens": usage.completion}
            counts |= {"total_tokens": usage.prompt + usage.completion}
            details = {"cached_tokens": usage.cached, "reasoning_tokens": usage.reasoning}
            yield {"end": reply.finish_reason, "usage": counts | details, "model": reply.model}
        case Disconnect() | Hang():
            yield from _said(reply.says)
        case _:
            raise errors.NotSupported("their provider only talks")


def _said(says: TextReply) -> Iterator[Part]:
    yield from ({"text": text} for text in says.streamed)
    yield from ({"call": vars(call)} for call in says.tool_calls)


@asynccontextmanager
async def make(script: Sequence[Reply]) -> AsyncIterator[TheirClient]:
    stalls = all(isinstance(reply, Hang) for reply in script)
    yield TheirClient(scripted(script), SILENCE if stalls else 10.0)
