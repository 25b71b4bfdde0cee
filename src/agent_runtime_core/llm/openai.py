"""OpenAI's chat completions, and all servers that are compatible with them."""

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
from ..errors import MissingDependency, NotSupported, ProviderError, ProviderUnavailable, StreamCut
from ._client import ChatClient
from ._client_per_loop import (
    OpenAIConfigurationError,
    PerLoopClients,
    is_loopback,
    refuse_sdk_options,
    required_key,
    with_traceparent,
)
from ._fallbacks import openai_fallbacks
from ._finish_reasons import native_reason
from ._openai_format import ids_in, outgoing, text_of_answer
from ._openai_stream import Assembly, completion_of
from ._openai_usage import cost_of, merged_usage, usage_of
from ._provider import Chunk, Completion, ProviderAdapter, Request, Timeouts, counted
from ._provider_errors import ERROR_FIELDS, of_status, translated, without_keys, words_of
from ._schemas import dialect_of, with_schemas
from ._stream_body import DONE, StreamBody, end_with_json, read_rest

__all__ = ["OpenAIClient", "OpenAIConfigurationError"]

_ENDPOINT = "https://api.openai.com/v1"
_MODEL = "gpt-4o"
_EMBEDDING_MODEL = "text-embedding-3-small"
#: Models that reject `max_tokens`, on any server.
_REASONING = re.compile(r"(?:.*/)?(?:o\d|gpt-[5-9])")
_CHAT_OPTIONS = frozenset({"timeouts", "retries", "clock", "breakers", "limits"})


class OpenAIClient(ChatClient):
    """A client for OpenAI, or with `base_url` for any compatible server.

        client = OpenAIClient(base_url="http://localhost:8000/v1", default_model="local")
        response = await client.generate([{"role": "user", "content": "Hello!"}])

    Args:
        api_key: The API key; by default the configured key, else OPENAI_API_KEY. A server on this machine needs none.
        default_model: The model of requests that name none; by default the configured model.
        organization: OpenAI's organization id.
        base_url: The server; by default OPENAI_BASE_URL, else OpenAI's own.
        send_reasoning: Whether to send a model's reasoning back to the server. By default it is sent until the server
            rejects it, and not to servers that are known to reject it.
        schema_in_prompt: Whether to describe `response_format` in a system text instead of sending it. By default it
            is described after the server rejected it; False raises that error.
        **options: `timeouts`, `retries`, `clock`, `breakers` and `limits` go to ChatClient. Others go to the SDK's
            client, such as `http_client`, a transport for tests and proxies.

    Raises:
        OpenAIConfigurationError: There is no API key.
        MissingDependency: The openai package is not installed.
    """

    def __init__(
        self,
        api_key: str | None = None,
        default_model: str | None = None,
        organization: str | None = None,
        base_url: str | None = None,
        *,
        send_reasoning: bool | None = None,
        schema_in_prompt: bool | None = None,
        **options: Any,
    ) -> None:
        chat = {name: options.pop(name) for name in _CHAT_OPTIONS & options.keys()}
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
        fallbacks = openai_fallbacks(
            wire.provider, wire.endpoint, send_reasoning=send_reasoning, schema_in_prompt=schema_in_prompt
        )
        super().__init__(wire, default_model=default_model, fallbacks=fallbacks, **chat)


class OpenAIWire(ProviderAdapter):
    """Sends chat completions with the openai package, 2.20 to 3.x."""

    provider = "openai"

    def __init__(self, sdk: Any, make: Callable[[], Any], endpoint: str, *, injected: bool = False) -> None:
        self._sdk = sdk
        self._clients = PerLoopClients(make, shared=injected)
        host = urlsplit(endpoint).hostname or ""
        self._own = host == "openai.com" or host.endswith(".openai.com")
        self._parameters = set(inspect.signature(self._clients.first.chat.completions.create).parameters)
        #: Empty for an injected transport: its server is unknown, so no circuit breaker is shared.
        self.endpoint: str = "" if injected else endpoint
        self.remote: bool = not (injected or is_loopback(endpoint))

    async def request(self, request: Request) -> Completion:
        client = await self._clients.here()
        ask = client.chat.completions.with_streaming_response.create
        async with ask(**with_traceparent(self._arguments(request))) as response:
            end_with_json(response.http_response)
            raw = await response.parse()
        # The SDK returns a body that is not JSON as text.
        if isinstance(raw, str) and (streamed := streamed_answer(raw, self.provider, request)):
            return streamed
        return answer_of(as_dict(raw), self.provider, request, raw)

    async def stream(self, request: Request) -> AsyncIterator[Chunk]:
        client = await self._clients.here()
        stream = await client.chat.completions.create(**with_traceparent(self._arguments(request, stream=True)))
        assembly = Assembly(self.provider, request.model, ids_in(request.messages))
        body = StreamBody(stream)
        async with contextlib.aclosing(stream_chunks(self, request, stream, assembly, body)) as chunks:
            async for chunk in chunks:
                yield chunk
        if body.is_done():
            assembly.finish()
        if finished := assembly.answer():
            yield Chunk(answer=finished)

    def translate(self, error: Exception, model: str) -> ProviderError | None:
        return translated(error, self.provider, model, (self._sdk.__name__,), self._clients.first.api_key)

    async def embed(self, texts: Sequence[str], model: str | None, timeouts: Timeouts) -> list[list[float]]:
        if not texts:
            return []
        client = await self._clients.here()
        response = await client.embeddings.create(
            model=model or _EMBEDDING_MODEL, input=list(texts), timeout=self._timeout(timeouts)
        )
        return vectors(response, len(texts), self.provider)

    async def moderate(self, text: str, model: str | None, timeouts: Timeouts) -> dict[str, Any]:
        chosen = {"model": model} if model else {}
        client = await self._clients.here()
        response = await client.moderations.create(input=text, timeout=self._timeout(timeouts), **chosen)
        results = as_dict(response).get("results")
        if not results:
            raise ProviderUnavailable("the answer has no moderation result", provider=self.provider, model=model or "")
        verdict: dict[str, Any] = results[0]
        return verdict

    async def count_tokens(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None, model: str, timeouts: Timeouts
    ) -> int:
        if not self._own:
            raise NotSupported(
                "count_tokens() supports only OpenAI's own models, not the models of another base_url. "
                "Use the usage of answers"
            )
        return await asyncio.to_thread(_count_tokens, outgoing(messages, self.provider), tools, model)

    async def close(self) -> None:
        await self._clients.close()

    def _arguments(self, request: Request, *, stream: bool = False) -> dict[str, Any]:
        timeout = self._timeout(request.timeouts)
        limit = "max_completion_tokens" if self._own or _REASONING.match(request.model) else "max_tokens"
        arguments = chat_arguments(request, self.provider, self.endpoint, timeout, limit=limit, stream=stream)
        # The server may accept arguments that this SDK does not know.
        body = {name: arguments.pop(name) for name in arguments.keys() - self._parameters}
        if body:
            arguments["extra_body"] = {**body, **(arguments.get("extra_body") or {})}
        return {name: value for name, value in arguments.items() if value is not None}

    def _timeout(self, timeouts: Timeouts) -> Any:
        return self._sdk.Timeout(None, connect=timeouts.connect)


def chat_arguments(
    request: Request, provider: str, endpoint: str, timeout: Any, *, limit: str = "max_tokens", stream: bool = False
) -> dict[str, Any]:
    """Return the arguments of a chat completion; `limit` is the name of the argument for the length of the answer."""
    extra = dict(request.extra)
    if extra.get("tool_choice") in [tool.get("function", {}).get("name") for tool in request.tools or ()]:
        extra["tool_choice"] = {"type": "function", "function": {"name": extra["tool_choice"]}}
    arguments = {
        "model": request.model,
        "messages": outgoing(request.messages, provider),
        "tools": list(request.tools) if request.tools else None,
        "temperature": request.temperature,
        limit: request.max_tokens,
        "timeout": timeout,
        **({"stream_options": {"include_usage": True}} if stream else {}),
        **extra,
        **({"stream": True} if stream else {}),
    }
    return with_schemas(arguments, dialect_of(endpoint))


def streamed_answer(text: str, provider: str, request: Request) -> Completion | None:
    """Return the answer of a server that always streams; None if the text is not a complete stream."""
    assembly = Assembly(provider, request.model, ids_in(request.messages))
    for line in text.splitlines():
        data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        if data == DONE:
            assembly.finish()
            break
        try:
            chunk = json.loads(data or "{}")
        except (ValueError, RecursionError):
            return None
        if isinstance(chunk, dict):
            assembly.add_usage(chunk.get("usage"))
            with counted(assembly.usage, assembly.cost):
                raise_reported(chunk, provider, request.model)
            assembly.add(chunk)
    with counted(assembly.usage, assembly.cost):
        return assembly.answer()


async def stream_chunks(
    wire: ProviderAdapter, request: Request, stream: Any, assembly: Assembly, body: StreamBody
) -> AsyncGenerator[Chunk, None]:
    """Feed a stream to `assembly`, yield the text of each chunk, and close the stream.

    If the server does not stream, yield its text and its answer. A finished answer counts, however the stream ends.
    """

    def add(chunk: Any) -> str:
        received = as_dict(chunk)
        assembly.add_usage(received.get("usage"))
        with counted(assembly.usage, assembly.cost):
            raise_reported(received, wire.provider, request.model)
        return assembly.add(received)

    def grows(event: Any) -> bool:
        late[:] = [add(event)]
        return assembly.grew

    late: list[str] = []
    try:
        events = aiter(stream)
        while (event := await anext(events, None)) is not None:
            # Text is not needed: a model that only reasons or calls tools has not stalled.
            yield Chunk(add(event), partial=assembly)
            # Some servers send a finish reason with each chunk.
            while assembly.finished and await read_rest(events, grows, lambda: assembly.has_usage, request.clock):
                yield Chunk(late.pop(), partial=assembly)
            if assembly.finished:
                break
    except Exception as error:
        if not assembly.finished:
            if cut := as_stream_cut(wire.translate(error, request.model)):
                raise cut from error
            raise
    finally:
        close = getattr(stream, "aclose", None) or getattr(stream, "close", None)
        if close is not None:
            await close()
    if whole := body.whole():
        answer = answer_of(whole, wire.provider, request, whole)
        yield Chunk(text_of_answer(answer.message.get("content")))
        yield Chunk(answer=answer)


def as_dict(value: Any) -> dict[str, Any]:
    """Return a value of the SDK as plain data without unset fields; {} if it is not such a value."""
    if isinstance(value, dict):
        return value
    if not hasattr(value, "model_dump"):
        return {}
    # Compatible servers send other types, and the SDK does not check them.
    plain: dict[str, Any] = value.model_dump(mode="json", by_alias=True, exclude_none=True, warnings=False)
    return plain


def answer_of(response: Mapping[str, Any], provider: str, request: Request, raw: Any) -> Completion:
    """Return the answer in a chat completion."""
    choice = _choice_in(response)
    usage = merged_usage(response.get("usage"), choice.get("usage"))
    with counted(lambda: usage_of(usage), lambda: cost_of(usage)):
        return _answer_of(response, choice, provider, request, raw)


def _answer_of(
    response: Mapping[str, Any], choice: Mapping[str, Any], provider: str, request: Request, raw: Any
) -> Completion:
    raise_reported(response, provider, request.model)
    message = choice.get("message") or choice.get("delta")
    finish_reason = choice.get("finish_reason") or ("stop" if message else "")
    if not finish_reason or finish_reason == "error":
        words = "" if "choices" in response else without_keys(words_of(response))
        raise ProviderUnavailable(
            f"the answer is not a chat completion{words and ': '}{words}", provider=provider, model=request.model
        )
    return completion_of(
        # Gemini leaves the message out if its reasoning used all tokens.
        message if isinstance(message, Mapping) else {},
        merged_usage(response.get("usage"), choice.get("usage")),
        (finish_reason, native_reason(choice)),
        provider,
        response.get("model") or request.model,
        ids_in(request.messages),
        raw,
    )


def _choice_in(response: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = response.get("choices")
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], Mapping) else {}


def raise_reported(response: Mapping[str, Any], provider: str, model: str) -> None:
    """Raise the error that an answer or a chunk with status 200 contains instead of choices or in a choice."""
    if error := response.get("error") or _choice_in(response).get("error"):
        raise embedded_error(error, provider, model)
    has_words = "choices" not in response and any(response.get(name) for name in ERROR_FIELDS)
    if has_words and (words := words_of(response)):
        raise embedded_error({**response, "message": f"the answer is not a chat completion: {words}"}, provider, model)


def embedded_error(error: Any, provider: str, model: str) -> ProviderError:
    """Return the error that a server sent in an answer with status 200."""
    reported = error if isinstance(error, Mapping) else {"message": str(error)}
    code = without_keys(str(reported.get("code") or reported.get("type") or ""))
    status = int(code) if code.isdecimal() and len(code) == 3 else None
    message = without_keys(words_of(reported)) or code or "the provider reported an error"
    return of_status(status, f"{code} {reported.get('type') or ''} {message}", message, provider, model, code)


def as_stream_cut(error: ProviderError | None) -> StreamCut | None:
    """Return a failed connection in the middle of an answer as StreamCut; None for any other error."""
    if isinstance(error, ProviderUnavailable) and error.status is None and not error.code:
        return StreamCut(f"the stream was interrupted: {error}", provider=error.provider, model=error.model)
    return None


def vectors(response: Any, wanted: int, provider: str) -> list[list[float]]:
    """Return the embeddings in an answer, in the order of their texts."""
    data = sorted(as_dict(response).get("data") or (), key=lambda each: each.get("index") or 0)
    if len(data) != wanted:
        raise ProviderUnavailable(
            f"the answer must have {wanted} vector{'s' * (wanted != 1)}, got {len(data)}", provider=provider
        )
    return [[float(number) for number in each["embedding"]] for each in data]


def _count_tokens(messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] | None, model: str) -> int:
    """Count tokens as OpenAI does.

    Source: https://cookbook.openai.com/examples/how_to_count_tokens_with_tiktoken
    """
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
        raise NotSupported(
            "count_tokens() counts only text, but a message has another part. Remove images, files and audio"
        )
    return text_of_answer(content)


def _encoding(model: str) -> Any:
    try:
        tiktoken: Any = load("tiktoken", needed_by="count_tokens()")
    except MissingDependency as error:
        raise NotSupported(str(error)) from error
    try:
        return tiktoken.encoding_for_model(model)
    except KeyError:
        raise NotSupported(
            f"unknown model {model!r} in tiktoken. Upgrade tiktoken, or use the usage of answers"
        ) from None
    except OSError as error:
        raise NotSupported(
            f"tiktoken cannot load the encoding of {model!r}: {error}. Its first use needs a network connection"
        ) from error
