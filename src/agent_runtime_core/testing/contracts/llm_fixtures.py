"""Fixtures for the cases of a model client: scripted replies, and helpers that call the client."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ...errors import NotSupported, ProviderError
from ...interfaces import LLMClient, LLMStreamChunk
from .checks import PATIENCE

T = TypeVar("T")

#: The API key of the client, if it needs a key. No error may contain it.
KEY = "sk-contract-0123456789abcdef"
#: The model name in the provider's responses.
MODEL = "contract-model"


@dataclass(frozen=True)
class Call:
    """A tool call of the model; `arguments` are a JSON object."""

    id: str
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Usage:
    """Token counts: `cached` is part of the prompt, `reasoning` of the completion; None if the provider sends none."""

    prompt: int = 7
    completion: int = 5
    cached: int | None = None
    reasoning: int | None = None


@dataclass(frozen=True)
class TextReply:
    """A response: the text, streamed in `pieces` if there are any, then the tool calls.

    `finish_reason` is one of OpenAI's values: stop, length, tool_calls.
    """

    text: str = ""
    pieces: tuple[str, ...] = ()
    tool_calls: tuple[Call, ...] = ()
    usage: Usage = Usage()
    finish_reason: str = "stop"
    model: str = MODEL

    @property
    def streamed(self) -> tuple[str, ...]:
        """The deltas of the text in a stream."""
        return self.pieces or ((self.text,) if self.text else ())


@dataclass(frozen=True)
class Echo:
    """A response whose text is the request as the provider received it, as JSON in the provider's format."""


@dataclass(frozen=True)
class Disconnect:
    """The connection closes after all of `says`, without finish reason, usage or end marker.

    A response that is not streamed is sent by half. `clean`: the connection closes regularly, else with an error.
    """

    says: TextReply = TextReply()
    clean: bool = False


@dataclass(frozen=True)
class Hang:
    """Like Disconnect, but the connection stays open and silent. A response that is not streamed does not start."""

    says: TextReply = TextReply()


@dataclass(frozen=True)
class HttpError:
    """An HTTP error; `retry_after` are the seconds in its Retry-After header."""

    status: int
    message: str = "the scripted provider refuses"
    retry_after: float | None = None


@dataclass(frozen=True)
class Embedding:
    """The reply to an embeddings request."""

    vectors: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Verdict:
    """The reply to a moderation request."""

    flagged: bool


@dataclass(frozen=True)
class TokenUsage:
    """The reply to a token count request."""

    tokens: int


Reply = TextReply | Echo | Disconnect | Hang | HttpError | Embedding | Verdict | TokenUsage
Make = Callable[[Sequence[Reply]], AbstractAsyncContextManager[LLMClient]]
Case = Callable[[Make], Awaitable[None]]

ASK: list[dict[str, Any]] = [{"role": "user", "content": "How warm is it?"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
OSLO = Call("call_a", "weather", {"city": "Oslo"})
ROME = Call("call_b", "weather", {"city": "Rome"})


def asks_for(*calls: Call, text: str = "", **more: Any) -> TextReply:
    return TextReply(text, tool_calls=calls, finish_reason="tool_calls", **more)


class Unsupported(BaseException):
    """The client does not support an optional operation. A BaseException, because cases catch the client's errors."""


def optional(case: Case) -> Case:
    """Skip a case if `make` or the tested operation raises NotSupported."""

    @functools.wraps(case)
    async def run(make: Make) -> None:
        with contextlib.suppress(Unsupported):
            await case(functools.partial(_supported, make))

    return run


@contextlib.asynccontextmanager
async def _supported(make: Make, script: Sequence[Reply]) -> AsyncIterator[LLMClient]:
    async with contextlib.AsyncExitStack() as stack:
        try:
            client = await stack.enter_async_context(make(script))
        except NotSupported:
            raise Unsupported from None
        yield client


@contextlib.asynccontextmanager
async def opened(make: Make, *script: Reply) -> AsyncIterator[LLMClient]:
    """Open a client whose provider sends the n-th reply for the n-th request, and the last reply for later requests."""
    async with asyncio.timeout(PATIENCE), make(script) as client:
        yield client


async def supported(call: Awaitable[T]) -> T:
    """Await an optional operation; skip the case if it is not supported."""
    try:
        return await call
    except NotSupported as error:
        if not str(error):
            raise AssertionError("NotSupported must have a message. Name the operation in it") from error
        raise Unsupported from None


async def failed(call: Awaitable[object], what: str) -> ProviderError:
    """Return the error of a call that must fail."""
    try:
        await call
    except ProviderError as error:
        return error
    except Exception as other:
        raise AssertionError(f"{what}: must raise ProviderError, got {other!r:.400}") from other
    raise AssertionError(f"{what}: ProviderError was not raised")


async def stream_of(
    client: LLMClient, messages: list[Any] | None = None, **options: Any
) -> AsyncGenerator[LLMStreamChunk, None]:
    """Read a stream as an agent loop does; skip the case if the client does not stream."""
    began, stream = False, None
    try:
        found: Any = client.stream(ASK if messages is None else messages, **options)
        stream = await found if inspect.isawaitable(found) else found
        async for piece in stream:
            began = True
            yield piece
    except (NotSupported, NotImplementedError):
        if began:
            raise
        raise Unsupported from None
    finally:
        if close := getattr(stream, "aclose", None):
            await close()


def received(echo: Any) -> list[Any]:
    """All names and values in an echoed request, including those in JSON strings."""
    return list(_values(json.loads(str(echo))))


def _values(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield name
            yield from _values(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _values(inner)
    else:
        yield value
        if isinstance(value, str) and value.startswith(("{", "[")):
            with contextlib.suppress(ValueError):
                yield from _values(json.loads(value))


def call_parts(call: Any) -> tuple[Any, Any, Any]:
    """Id, name and decoded arguments of a tool call object."""
    arguments = getattr(call, "arguments", None)
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise AssertionError(f"the arguments of a call must be JSON, got {arguments!r:.200}") from error
    return getattr(call, "id", None), getattr(call, "name", None), arguments
