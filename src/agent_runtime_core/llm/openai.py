"""OpenAI's chat completions, and every server that speaks them."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from .._core.lazy_import import load
from ..config import get_config
from ..errors import (
    MissingDependency,
    NotSupported,
    ProviderError,
    ProviderUnavailable,
    StreamCut,
)
from ._api_keys import OpenAIConfigurationError, is_loopback, refuse_sdk_options, required_key
from ._client import ChatClient
from ._client_per_loop import PerLoopClients
from ._openai_errors import of_status, translated, without_keys
from ._openai_format import ids_in, incoming, outgoing, usage_of
from ._openai_stream import Assembly, plain_text
from ._provider import Chunk, Completion, ProviderAdapter, Request, Timeouts

__all__ = ["OpenAIClient", "OpenAIConfigurationError"]

_ENDPOINT = "https://api.openai.com/v1"
_MODEL = "gpt-4o"
_EMBEDDING_MODEL = "text-embedding-3-small"
#: Models that refuse `max_tokens`, at whichever server.
_REASONING = re.compile(r"(?:.*/)?(?:o\d|gpt-[5-9])")
_OF_CHAT = frozenset({"timeouts", "retries", "clock", "breakers"})


class OpenAIClient(ChatClient):
    """OpenAI, or with `base_url` any server that speaks its chat completions.

    The key is `api_key`, else the configured one, else OPENAI_API_KEY; a server on this machine needs none. The server
    is `base_url`, else OPENAI_BASE_URL, else OpenAI's own. `timeouts`, `retries` and `clock` are the ChatClient's;
    `http_client` is one of the SDK's, for tests and proxies; other options go to the SDK's client.
    MissingDependency: the openai package is not installed; OpenAIConfigurationError: there is no key.
    """

    def __init__(
        self,
        api_key: str | None = None,
        default_model: str | None = None,
        organization: str | None = None,
        base_url: str | None = None,
        **options: Any,
    ) -> None:
        chat = {name: options.pop(name) for name in _OF_CHAT & options.keys()}
        refuse_sdk_options(options)
        sdk: Any = load("openai", needed_by=type(self).__name__)
        config = get_config()
        endpoint = base_url or os.environ.get("OPENAI_BASE_URL") or _ENDPOINT
        key = api_key or config.get_openai_api_key()
        key = required_key(key, OpenAIConfigurationError, "OpenAIClient", OpenAIWire.provider, endpoint)

        def make() -> Any:
            return sdk.AsyncOpenAI(api_key=key, organization=organization, base_url=endpoint, max_retries=0, **options)

        if default_model is None:
            default_model = config.default_model if config.model_provider == OpenAIWire.provider else _MODEL
        wire = OpenAIWire(sdk, make, endpoint, injected=options.get("http_client") is not None)
        super().__init__(wire, default_model=default_model, **chat)


class OpenAIWire(ProviderAdapter):
    """Chat completions through the openai package, 2.20 to 3.x."""

    provider = "openai"

    def __init__(self, sdk: Any, make: Callable[[], Any], endpoint: str, *, injected: bool = False) -> None:
        self._sdk = sdk
        self._clients = PerLoopClients(make, shared=injected)
        host = urlsplit(endpoint).hostname or ""
        self._own = host == "openai.com" or host.endswith(".openai.com")
        self._parameters = set(inspect.signature(self._clients.first.chat.completions.create).parameters)
        #: With an injected transport nobody knows who answers, so no breaker is shared.
        self.endpoint: str = "" if injected else endpoint
        self.remote: bool = not (injected or is_loopback(endpoint))

    async def request(self, request: Request) -> Completion:
        client = await self._clients.here()
        raw = await client.chat.completions.create(**self._asked(request))
        told = as_dict(raw)
        return answer_of(told, self.provider, request, raw)

    async def stream(self, request: Request) -> AsyncIterator[Chunk]:
        client = await self._clients.here()
        stream = await client.chat.completions.create(**self._asked(request, stream=True))
        assembly = Assembly(self.provider, request.model, ids_in(request.messages))
        async with contextlib.aclosing(poured(self, request, stream, assembly)) as pieces:
            async for piece in pieces:
                yield piece
        if answer := assembly.answer():
            yield Chunk(answer=answer)

    def translate(self, error: Exception, model: str) -> ProviderError | None:
        return translated(error, self.provider, model, (self._sdk.__name__,), self._clients.first.api_key)

    async def embed(self, texts: Sequence[str], model: str | None, timeouts: Timeouts) -> list[list[float]]:
        if not texts:
            return []
        client = await self._clients.here()
        told = await client.embeddings.create(
            model=model or _EMBEDDING_MODEL, input=list(texts), timeout=self._timeout(timeouts)
        )
        return vectors(told, len(texts), self.provider)

    async def moderate(self, text: str, model: str | None, timeouts: Timeouts) -> dict[str, Any]:
        chosen = {"model": model} if model else {}
        client = await self._clients.here()
        told = await client.moderations.create(input=text, timeout=self._timeout(timeouts), **chosen)
        results = as_dict(told).get("results")
        if not results:
            raise ProviderUnavailable("the answer holds no verdict", provider=self.provider, model=model or "")
        verdict: dict[str, Any] = results[0]
        return verdict

    async def count_tokens(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None, model: str, timeouts: Timeouts
    ) -> int:
        if not self._own:
            raise NotSupported("count_tokens() knows how OpenAI's own models count, not those behind another base_url")
        return await asyncio.to_thread(_counted, outgoing(messages, self.provider), tools, model)

    async def close(self) -> None:
        await self._clients.close()

    def _asked(self, request: Request, *, stream: bool = False) -> dict[str, Any]:
        timeout = self._timeout(request.timeouts)
        asked = asked_of(request, self.provider, timeout, limit=self._limit(request.model), stream=stream)
        # What this SDK has no name for, a server may have.
        body = {name: asked.pop(name) for name in asked.keys() - self._parameters}
        if body:
            asked["extra_body"] = {**body, **(asked.get("extra_body") or {})}
        return {name: value for name, value in asked.items() if value is not None}

    def _limit(self, model: str) -> str:
        return "max_completion_tokens" if self._own or _REASONING.match(model) else "max_tokens"

    def _timeout(self, timeouts: Timeouts) -> Any:
        return self._sdk.Timeout(None, connect=timeouts.connect)


def asked_of(
    request: Request, provider: str, timeout: Any, *, limit: str = "max_tokens", stream: bool = False
) -> dict[str, Any]:
    """Return the arguments of a chat completion; `limit` is the name of the one for the answer's length."""
    return {
        "model": request.model,
        "messages": outgoing(request.messages, provider),
        "tools": list(request.tools) if request.tools else None,
        "temperature": request.temperature,
        limit: request.max_tokens,
        "timeout": timeout,
        **({"stream_options": {"include_usage": True}} if stream else {}),
        **request.extra,
        **({"stream": True} if stream else {}),
    }


async def poured(
    wire: ProviderAdapter, request: Request, stream: Any, assembly: Assembly
) -> AsyncGenerator[Chunk, None]:
    """Feed a stream of chunks to `assembly`, yield the text of each, and close the stream."""
    try:
        async for chunk in stream:
            # Without text too: a model that only thinks or calls tools has not stalled.
            yield Chunk(assembly.take(as_dict(chunk)))
    except Exception as error:
        if told := broken_off(wire.translate(error, request.model)):
            raise told from error
        raise
    finally:
        close = getattr(stream, "aclose", None) or getattr(stream, "close", None)
        if close is not None:
            await close()


def as_dict(told: Any) -> dict[str, Any]:
    """A value of the SDK as plain data, without what was left open; nothing for one that is no such value."""
    if isinstance(told, dict):
        return told
    if not hasattr(told, "model_dump"):
        return {}
    # Servers answer with types of their own, and the SDK does not check them.
    plain: dict[str, Any] = told.model_dump(mode="json", by_alias=True, exclude_none=True, warnings=False)
    return plain


def answer_of(told: Mapping[str, Any], provider: str, request: Request, raw: Any) -> Completion:
    """The answer in a chat completion."""
    choices = told.get("choices") or [{}]
    message, finish_reason = choices[0].get("message"), choices[0].get("finish_reason") or "stop"
    if error := told.get("error") or choices[0].get("error"):
        raise answered_with(error, provider, request.model)
    if not isinstance(message, Mapping) or finish_reason == "error":
        raise ProviderUnavailable("the answer is no chat completion", provider=provider, model=request.model)
    return Completion(
        incoming(message, provider, finish_reason, ids_in(request.messages)),
        usage_of(told.get("usage")),
        told.get("model") or request.model,
        finish_reason,
        raw,
    )


def answered_with(error: Any, provider: str, model: str) -> ProviderError:
    """The error that a server put into an answer with status 200."""
    told = error if isinstance(error, Mapping) else {"message": str(error)}
    code = without_keys(str(told.get("code") or told.get("type") or ""))
    status = int(code) if code.isdecimal() and len(code) == 3 else None
    said = without_keys(str(told.get("message") or json.dumps(told)))
    return of_status(status, f"{code} {said}", said, provider, model, code)


def broken_off(told: ProviderError | None) -> StreamCut | None:
    """A failure of the connection as what it is in the middle of an answer; None for any other error."""
    if isinstance(told, ProviderUnavailable) and told.status is None and not told.code:
        return StreamCut(f"the stream broke off: {told}", provider=told.provider, model=told.model)
    return None


def vectors(told: Any, wanted: int, provider: str) -> list[list[float]]:
    """The embeddings in an answer, in the order of their texts."""
    data = sorted(as_dict(told).get("data") or (), key=lambda each: each.get("index") or 0)
    if len(data) != wanted:
        raise ProviderUnavailable(f"{len(data)} vectors came for {wanted} texts", provider=provider)
    return [[float(number) for number in each["embedding"]] for each in data]


def _counted(messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] | None, model: str) -> int:
    """Tokens as OpenAI counts them: https://cookbook.openai.com/examples/how_to_count_tokens_with_tiktoken"""
    encoding = _encoding(model)

    def tokens(value: Any) -> int:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return len(encoding.encode(text, disallowed_special=()))

    total = 3
    for message in messages:
        total += 3 + ("name" in message) + tokens(_only_text(message.get("content")))
        total += sum(tokens(value) for name, value in message.items() if name != "content" and value)
    if tools:
        total += 12 + tokens([tool.get("function", tool) for tool in tools])
    return total


def _only_text(content: Any) -> str:
    if isinstance(content, list) and any(part.get("type") != "text" for part in content):
        raise NotSupported("count_tokens() counts text, and one of these messages has a part that is none")
    return plain_text(content)


def _encoding(model: str) -> Any:
    try:
        tiktoken: Any = load("tiktoken", needed_by="count_tokens()")
    except MissingDependency as error:
        raise NotSupported(str(error)) from error
    try:
        return tiktoken.encoding_for_model(model)
    except KeyError:
        raise NotSupported(f"tiktoken does not know how {model!r} counts tokens") from None
    except OSError as error:
        raise NotSupported(f"tiktoken cannot fetch the encoding of {model!r}: {error}") from error
