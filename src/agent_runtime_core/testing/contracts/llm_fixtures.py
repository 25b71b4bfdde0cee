"""What the cases of a model client share: what its provider answers, and ways to ask the client."""

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

#: What the client is made with where its provider wants a key; no error may tell it.
KEY = "sk-contract-0123456789abcdef"
#: What the provider calls the model that answered.
MODEL = "contract-model"


@dataclass(frozen=True)
class Call:
    """A tool call of the model; `arguments` are a JSON object."""

    id: str
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Usage:
    """Tokens as the provider counts them: `cached` ones are part of the prompt, `reasoning` of the completion.

    None: the provider does not tell.
    """

    prompt: int = 7
    completion: int = 5
    cached: int | None = None
    reasoning: int | None = None


@dataclass(frozen=True)
class TextReply:
    """The model answers: its text, streamed in `pieces` if there are any, then its tool calls.

    `finish_reason` is in OpenAI's words: stop, length, tool_calls.
    """

    text: str = ""
    pieces: tuple[str, ...] = ()
    tool_calls: tuple[Call, ...] = ()
    usage: Usage = Usage()
    finish_reason: str = "stop"
    model: str = MODEL

    @property
    def streamed(self) -> tuple[str, ...]:
        """The text as a stream gives it."""
        return self.pieces or ((self.text,) if self.text else ())


@dataclass(frozen=True)
class Echo:
    """The model's text is the request as the provider received it: a text of JSON, in whatever form it came."""


@dataclass(frozen=True)
class Disconnect:
    """The connection ends when all of `says` is sent but not that it ended: no finish reason, usage or end mark.

    What is not streamed is sent by half. `clean`: it looks like the regular end of the response, else like a fault.
    """

    says: TextReply = TextReply()
    clean: bool = False


@dataclass(frozen=True)
class Hang:
    """As Breaks, but the connection stays open, and nothing more comes. What is not streamed does not even begin."""

    says: TextReply = TextReply()


@dataclass(frozen=True)
class HttpError:
    """An HTTP error; `retry_after` are the seconds in its Retry-After header."""

    status: int
    message: str = "the scripted provider refuses"
    retry_after: float | None = None


@dataclass(frozen=True)
class Embedding:
    """The answer to a request for embeddings."""

    vectors: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Verdict:
    """The answer to a request for a verdict on a text."""

    flagged: bool


@dataclass(frozen=True)
class TokenUsage:
    """The answer to a request to count tokens."""

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


class MissingSDK(BaseException):
    """The client does not have what a case is about, and need not: no error of the client's, which cases look at."""


def optional(case: Case) -> Case:
    """A case that is passed over where `make`, or the operation it is about, raises NotSupported."""

    @functools.wraps(case)
    async def run(make: Make) -> None:
        with contextlib.suppress(MissingSDK):
            await case(functools.partial(_offered, make))

    return run


@contextlib.asynccontextmanager
async def _offered(make: Make, script: Sequence[Reply]) -> AsyncIterator[LLMClient]:
    async with contextlib.AsyncExitStack() as stack:
        try:
            client = await stack.enter_async_context(make(script))
        except NotSupported:
            raise MissingSDK from None
        yield client


@contextlib.asynccontextmanager
async def opened(make: Make, *script: Reply) -> AsyncIterator[LLMClient]:
    """A client whose provider answers the n-th request with the n-th reply, and all later ones with the last."""
    async with asyncio.timeout(PATIENCE), make(script) as client:
        yield client


async def there(answer: Awaitable[T]) -> T:
    """What an optional operation gives."""
    try:
        return await answer
    except NotSupported as error:
        if not str(error):
            raise AssertionError("NotSupported says nothing: name the operation") from error
        raise MissingSDK from None


async def failed(answer: Awaitable[object], what: str) -> ProviderError:
    """The error with which a call ended."""
    try:
        await answer
    except ProviderError as error:
        return error
    except Exception as other:
        raise AssertionError(f"{what}: ProviderError was expected, not {other!r:.400}") from other
    raise AssertionError(f"{what}: ProviderError was not raised")


async def poured(
    client: LLMClient, messages: list[Any] | None = None, **options: Any
) -> AsyncGenerator[LLMStreamChunk, None]:
    """A stream as an agent loop reads it; Lacking where the client has none."""
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
        raise MissingSDK from None
    finally:
        if close := getattr(stream, "aclose", None):
            await close()


def received(echo: Any) -> list[Any]:
    """Every name and value in a request that was echoed, those inside texts of JSON too."""
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


def told(call: Any) -> tuple[Any, Any, Any]:
    """Id, name and arguments of a call as an object; of arguments that are JSON text, what they say."""
    arguments = getattr(call, "arguments", None)
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise AssertionError(f"the arguments of a call are JSON text, not {arguments!r:.200}") from error
    return getattr(call, "id", None), getattr(call, "name", None), arguments
