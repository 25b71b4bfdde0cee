"""Claude through Anthropic's Messages API."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from .._core.clock import SYSTEM, Clock
from .._core.lazy_import import load
from .._core.log import log
from .._core.validation import unknown
from ..config import get_config
from ..errors import AuthenticationFailed, InvalidArgument, ProviderError, StreamCut
from ..limits import ModelLimits
from ._anthropic_format import (
    PROVIDER,
    conversation_of,
    default_max_tokens,
    limit_cache_marks,
    options_of,
    schema_prompt,
    tools_called,
    tools_of,
)
from ._anthropic_response import Assembly, answer_of, usage_of
from ._client import ChatClient
from ._client_per_loop import (
    AnthropicConfigurationError,
    PerLoopClients,
    is_loopback,
    refuse_sdk_options,
    required_key,
    with_traceparent,
)
from ._openai_usage import reports_no_tokens
from ._provider import Chunk, Completion, ProviderAdapter, Request, Timeouts, counted
from ._provider_errors import ERROR_FIELDS, of_status, require_answer, translated, without_keys, words_of
from ._retries import Breakers, Retries
from ._stream_body import StreamBody, end_with_json, read_rest
from .openai import as_stream_cut

__all__ = ["AnthropicClient", "AnthropicWire"]


DEFAULT_MODEL = "claude-sonnet-5-5"
# The SDK's own limit: at 128,000 tokens an hour, a longer answer may take more than ten minutes, and some networks
# close a connection that is idle for so long.
_LONGEST_UNSTREAMED = 21_333
# The last version of the API that accepts sampling parameters.
_SAMPLING_VERSION = "2023-06-01"
_SAMPLING = ("temperature", "top_p", "top_k")
_OTHER_KEYS = ("auth_token", "credentials", "config", "profile")


class AnthropicWire(ProviderAdapter):
    """Sends requests with the anthropic package; `sampling` and the options come from AnthropicClient."""

    provider: str = PROVIDER

    def __init__(
        self,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        sampling: bool = False,
        http_client: Any = None,
        **options: Any,
    ) -> None:
        self._sdk: Any = load("anthropic", needed_by="AnthropicClient")
        self._key = api_key or ""
        self._sampling = sampling
        self._injected = http_client is not None
        self._options = {**options, "api_key": api_key, "base_url": base_url, "http_client": http_client}
        self._clients = PerLoopClients(self._new_client, shared=self._injected)
        first = self._clients.first
        url = str(first.base_url)
        self.remote: bool = not self._injected and not is_loopback(url)
        #: Empty for an injected transport, whose server is unknown.
        self.endpoint: str = "" if self._injected else url
        self._known = frozenset(inspect.signature(first.messages.create).parameters)
        self._warned = False

    async def request(self, request: Request) -> Completion:
        arguments = self._arguments(request)
        if arguments["max_tokens"] > _LONGEST_UNSTREAMED:
            return await self._streamed(request)
        client = await self._clients.here()
        async with client.messages.with_streaming_response.create(**with_traceparent(arguments)) as response:
            end_with_json(response.http_response)
            found = await response.parse()
        whole = self._dict(found)
        with counted(lambda: usage_of(whole.get("usage") or {})):
            self._raise_reported(whole, request.model)
            if not whole.get("stop_reason"):
                raise StreamCut("the answer has no stop_reason", provider=PROVIDER, model=request.model)
            return _answer(whole, False, request.model, found)

    async def _streamed(self, request: Request) -> Completion:
        assembly = _Assembly(self._sdk, request.model)
        with counted(assembly.usage):
            async with contextlib.aclosing(self._stream(request, assembly)) as chunks:
                async for chunk in chunks:
                    if chunk.answer is not None:
                        return chunk.answer
            raise StreamCut("the answer ended before it was finished", provider=PROVIDER, model=request.model)

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        assembly = _Assembly(self._sdk, request.model)
        async with contextlib.aclosing(self._stream(request, assembly)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _stream(self, request: Request, assembly: _Assembly) -> AsyncGenerator[Chunk, None]:
        client = await self._clients.here()
        events = await client.messages.create(**with_traceparent(self._arguments(request)), stream=True)
        body = StreamBody(events)
        try:
            received = aiter(events)
            while (event := await anext(received, None)) is not None:
                # Also without text, so that the time limit between chunks does not end a working stream.
                yield Chunk(self._add(assembly, self._dict(event), request.model), partial=assembly)
                if assembly.complete:
                    await read_rest(
                        received,
                        lambda event: bool(self._add(assembly, self._dict(event), request.model)),
                        lambda: assembly.has_usage,
                        request.clock,
                    )
                    break
            if unstreamed := body.whole():  # its type may be missing
                yield Chunk(self._add(assembly, {"type": "message", **unstreamed}, request.model))
        except Exception as error:
            if cut := as_stream_cut(self.translate(error, request.model)):
                raise cut from error
            raise
        finally:
            await events.close()
        if answer := assembly.answer():
            yield Chunk(answer=answer)

    def _add(self, assembly: Assembly, event: dict[str, Any], model: str) -> str:
        """Add an event; raise the error that it reports."""
        with counted(lambda: usage_of(event.get("usage") or {})):
            self._raise_reported(event, model)
        return assembly.add(event)

    def _raise_reported(self, answer: Mapping[str, Any], model: str) -> None:
        """Raise the error in an answer with status 200. Finds the error of a proxy in its own fields too."""
        of_proxy = answer.get("type") != "message_start" and "content" not in answer
        if answer.get("error") or (of_proxy and any(answer.get(name) for name in ERROR_FIELDS)):
            raise error_of(answer, None, model, key=self._key, headers={})

    async def count_tokens(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None, model: str, timeouts: Timeouts
    ) -> int:
        prompt = _prompt(messages, tools, model, {})
        client = await self._clients.here()
        counted = await client.messages.count_tokens(**prompt, model=model, timeout=self._timeout(timeouts))
        return int(counted.input_tokens)

    def translate(self, error: Exception, model: str) -> ProviderError | None:
        if isinstance(error, getattr(self._sdk, "CredentialsError", ())):
            return AuthenticationFailed(without_keys(str(error), self._key), provider=PROVIDER, model=model)
        if not isinstance(error, self._sdk.APIStatusError):
            return translated(error, PROVIDER, model, ("anthropic",), self._key)
        headers, fallback = dict(error.response.headers), str(error.message)
        return error_of(error.body, error.status_code, model, fallback=fallback, key=self._key, headers=headers)

    async def close(self) -> None:
        await self._clients.close()

    def _dict(self, value: Any) -> dict[str, Any]:
        """Return all fields that the provider sent, or {} if the value is not an object of the SDK."""
        if not isinstance(value, self._sdk.BaseModel):
            return {}
        found: dict[str, Any] = value.to_dict(mode="json", warnings=False)
        return found

    def _new_client(self) -> Any:
        options = {name: value for name, value in self._options.items() if value is not None}
        return self._sdk.AsyncAnthropic(**options, max_retries=0)

    def _timeout(self, timeouts: Timeouts) -> Any:
        return self._sdk.Timeout(None, connect=timeouts.connect)

    def _arguments(self, request: Request) -> dict[str, Any]:
        extra = dict(request.extra)
        sampling = {name: value for name in _SAMPLING if (value := extra.pop(name, None)) is not None}
        if request.temperature is not None:
            sampling["temperature"] = request.temperature
        limit = extra.pop("max_completion_tokens", None)
        options = options_of(extra, tools=request.tools)
        arguments = {
            "timeout": self._timeout(request.timeouts),
            **options,
            **_prompt(request.messages, request.tools, request.model, extra),
            "model": request.model,
            "max_tokens": request.max_tokens or limit or _default_limit(request.model, options),
        }
        if names := sorted(arguments.keys() - self._known):
            fix = "Remove it, or send it in extra_body="
            raise InvalidArgument(unknown("argument of Anthropic", names[0], self._known, fix))
        return self._with_sampling(arguments, sampling) if sampling else arguments

    def _with_sampling(self, arguments: dict[str, Any], sampling: dict[str, Any]) -> dict[str, Any]:
        if not self._sampling:
            if not self._warned:
                log.warning(
                    "not sent to Anthropic: %s, which it no longer supports. AnthropicClient(sampling=True) "
                    "sends it with version %s of the API",
                    ", ".join(sampling),
                    _SAMPLING_VERSION,
                )
            self._warned = True
            return arguments
        body, headers = arguments.get("extra_body") or {}, arguments.get("extra_headers") or {}
        return arguments | {
            "extra_body": {**sampling, **body},
            "extra_headers": {"anthropic-version": _SAMPLING_VERSION, **headers},
        }


class AnthropicClient(ChatClient):
    """A client for Claude.

        client = AnthropicClient(default_model="claude-sonnet-5-5")
        response = await client.generate([{"role": "user", "content": "Hello!"}])

    Args:
        api_key: The API key; by default the configured key, else ANTHROPIC_API_KEY. A server on this machine needs no
            key.
        default_model: The model of requests that name none; by default `claude-sonnet-5-5`.
        base_url: The server; by default ANTHROPIC_BASE_URL, else Anthropic's own.
        sampling: Whether to send temperature, top_p and top_k, with the last version of the API that accepted them. By
            default they are dropped and logged once, because Anthropic no longer supports them.
        timeouts: Time limits in seconds.
        retries: How failed requests are retried.
        clock: Source of time, for tests.
        breakers: Circuit breakers; by default the breakers of the process.
        http_client: A transport of the SDK, for tests and proxies.
        limits: What the provider allows. The model calls of all workers wait for room in them.
        **options: Further arguments of the SDK's client.

    Without `max_tokens`, an answer contains at most 20,000 tokens for Claude 3.7 or later, in addition to
    `thinking["budget_tokens"]`. It contains at most 8,192 tokens for Claude 3.5, and at most 4,096 for any other model.

    Raises:
        AnthropicConfigurationError: There is no API key.
        MissingDependency: The anthropic package is not installed.
    """

    def __init__(
        self,
        api_key: str | None = None,
        default_model: str | None = None,
        base_url: str | None = None,
        *,
        sampling: bool = False,
        timeouts: Timeouts | None = None,
        retries: Retries | None = None,
        clock: Clock = SYSTEM,
        breakers: Breakers | None = None,
        http_client: Any = None,
        limits: ModelLimits | None = None,
        **options: Any,
    ) -> None:
        refuse_sdk_options(options)
        load("anthropic", needed_by=type(self).__name__)
        if not any(options.get(name) for name in _OTHER_KEYS):
            url = base_url or os.environ.get("ANTHROPIC_BASE_URL") or ""
            key = api_key or get_config().get_anthropic_api_key()
            api_key = required_key(key, AnthropicConfigurationError, "AnthropicClient", PROVIDER, url)
        wire = AnthropicWire(api_key=api_key, base_url=base_url, sampling=sampling, http_client=http_client, **options)
        super().__init__(
            wire,
            default_model=default_model or _configured_model(),
            timeouts=timeouts,
            retries=retries,
            clock=clock,
            breakers=breakers,
            limits=limits,
        )


def _configured_model() -> str:
    config = get_config()
    # The default of the configuration is an OpenAI model.
    chosen = config.model_provider == PROVIDER and config.default_model != type(config).default_model
    return config.default_model if chosen or config.default_model.startswith("claude") else DEFAULT_MODEL


def _prompt(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None, model: str, extra: Mapping[str, Any]
) -> dict[str, Any]:
    instruction = schema_prompt(extra.get("response_format"))
    system, turns = conversation_of(messages, signed="claude" in model.lower(), instruction=instruction)
    given = tools_of(tools or ())
    # All marks of the request share one limit, including `cache_control` as an option.
    places = limit_cache_marks(
        given or tools_called(turns), system, turns, reserved=int(bool(extra.get("cache_control")))
    )
    prompt = {name: value for name, value in zip(("tools", "system", "messages"), places, strict=True) if value}
    return prompt if given or "tools" not in prompt else {**prompt, "tool_choice": {"type": "none"}}


def _default_limit(model: str, options: Mapping[str, Any]) -> int:
    # Anthropic rejects a limit that is not above the budget for thoughts.
    budget = (options.get("thinking") or {}).get("budget_tokens") or 0
    return default_max_tokens(model) + int(budget)


def _answer(whole: dict[str, Any], is_whole: bool, model: str, raw: Any) -> Completion:
    message, usage, finish_reason = answer_of(whole, call_is_whole=is_whole)
    word, model = whole.get("stop_reason"), str(whole.get("model") or model)
    no_tokens = reports_no_tokens(whole.get("usage"))
    require_answer(message, finish_reason, word, no_tokens=no_tokens, provider=PROVIDER, model=model)
    return Completion(message, usage, model, finish_reason, raw)


class _Assembly(Assembly):
    """Assembles the known part of a streamed answer."""

    def __init__(self, sdk: Any, model: str) -> None:
        super().__init__()
        self._sdk, self._model = sdk, model

    def answer(self) -> Completion | None:
        if not self.complete:
            return None
        whole, is_whole = self.whole()
        return _answer(whole, is_whole, self._model, self._sdk.types.Message.construct(**whole))

    def usage(self) -> dict[str, int]:
        whole, _ = self.whole()
        return usage_of(whole.get("usage") or {})

    def cost(self) -> None:
        """Anthropic reports no cost."""


# An error in the middle of a stream has the status of the stream, 200.
_STATUSES = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "conflict_error": 409,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}


def error_of(
    body: Any, status: int | None, model: str, *, fallback: str = "", key: str = "", headers: Mapping[str, str]
) -> ProviderError:
    """Return the ProviderError for the body of an error answer.

    Args:
        body: The body, as JSON or text.
        status: The HTTP status; below 400 for an error in a stream or in a successful answer.
        model: The requested model.
        fallback: The message if the body contains none.
        key: The API key, which is removed from the message.
        headers: The headers of the answer.
    """
    kind = _kind_in(body)
    message = without_keys(words_of(body) or fallback or kind, key)
    if status is None or status < 400:
        status = _STATUSES.get(kind) or (int(kind) if kind.isdecimal() and 400 <= int(kind) < 600 else None)
    return of_status(status, message, message, PROVIDER, model, kind, headers)


def _kind_in(body: Any) -> str:
    """Return the type of an error, or ""."""
    if isinstance(body, list):
        body = next(iter(body), None)
    if not isinstance(body, Mapping):
        return ""
    error = body.get("error")
    reported = error if isinstance(error, Mapping) else body
    kind = reported.get("type") or reported.get("status") or reported.get("code") or reported.get("__type") or ""
    return "" if kind in ("error", "message") else str(kind)
