"""Claude: Anthropic's Messages API behind the client that all providers share."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from .._core.clock import SYSTEM, Clock
from .._core.lazy_import import load
from ..config import get_config
from ..errors import AuthenticationFailed, ProviderError, RequestRefused, StreamCut
from ._anthropic_format import PROVIDER, conversation_of
from ._anthropic_options import options_of, tools_of
from ._anthropic_response import Assembly, answer_of
from ._api_keys import AnthropicConfigurationError, is_loopback, refuse_sdk_options, required_key
from ._circuit_breaker import Breakers
from ._client import ChatClient
from ._client_per_loop import PerLoopClients
from ._openai_errors import of_status, translated, without_keys
from ._provider import Chunk, Completion, ProviderAdapter, Request, Timeouts
from ._retries import Retries
from .openai import broken_off

__all__ = ["AnthropicClient", "AnthropicWire"]

log: logging.Logger = logging.getLogger("agent_runtime_core")

DEFAULT_MODEL = "claude-sonnet-5-5"
DEFAULT_MAX_TOKENS = 4096
# The SDK's own bound: at 128 000 tokens an hour, more may take longer than ten minutes, and idle connections do not
# live that long everywhere.
_LONGEST_UNSTREAMED = 21_333
# The last version of the API that takes them.
_SAMPLING_VERSION = "2023-06-01"
_SAMPLING = ("temperature", "top_p", "top_k")
_OTHER_KEYS = ("auth_token", "credentials", "config", "profile")
# Seconds for the end of a connection's last message, which nearly always comes with it.
_REST = 0.1
# An error in the middle of a stream comes with the status of the stream: 200.
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


class AnthropicWire(ProviderAdapter):
    """`sampling` and the SDK's options as AnthropicClient says."""

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
        self._clients = PerLoopClients(self._made, shared=self._injected)
        first = self._clients.first
        url = str(first.base_url)
        self.remote: bool = not self._injected and not is_loopback(url)
        #: Whom breakers are about; an injected transport may lead anywhere.
        self.endpoint: str = "" if self._injected else url
        self._known = frozenset(inspect.signature(first.messages.create).parameters)
        self._said = False

    async def request(self, request: Request) -> Completion:
        arguments = self._arguments(request)
        if arguments["max_tokens"] > _LONGEST_UNSTREAMED:
            async with contextlib.aclosing(self.stream(request)) as pieces:
                async for piece in pieces:
                    if piece.answer is not None:
                        return piece.answer
            raise StreamCut("the answer ended before it was finished", provider=PROVIDER, model=request.model)
        client = await self._clients.here()
        found = await client.messages.create(**arguments)
        whole = self._dict(found)
        if not whole.get("stop_reason"):
            raise StreamCut("the answer has no stop_reason", provider=PROVIDER, model=request.model)
        return _answer(whole, False, request.model, found)

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        assembly = Assembly()
        client = await self._clients.here()
        events = await client.messages.create(**self._arguments(request), stream=True)
        try:
            async for event in events:
                # Also where there is no text: whoever waits is told that the answer is still coming.
                yield Chunk(assembly.take(self._dict(event)))
                if assembly.ended:
                    await _read_out(events)
                    break
        except Exception as error:
            if told := broken_off(self.translate(error, request.model)):
                raise told from error
            raise
        finally:
            await events.close()
        if assembly.ended:
            whole, is_whole = assembly.whole()
            raw = self._sdk.types.Message.construct(**whole)
            yield Chunk(answer=_answer(whole, is_whole, request.model, raw))

    async def count_tokens(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None, model: str, timeouts: Timeouts
    ) -> int:
        said = _prompt(messages, tools)
        client = await self._clients.here()
        counted = await client.messages.count_tokens(**said, model=model, timeout=self._timeout(timeouts))
        return int(counted.input_tokens)

    def translate(self, error: Exception, model: str) -> ProviderError | None:
        if isinstance(error, getattr(self._sdk, "CredentialsError", ())):
            return AuthenticationFailed(without_keys(str(error), self._key), provider=PROVIDER, model=model)
        if not isinstance(error, self._sdk.APIStatusError):
            return translated(error, PROVIDER, model, ("anthropic",), self._key)
        told = error.body.get("error") if isinstance(error.body, Mapping) else None
        told = told if isinstance(told, Mapping) else {}
        kind = str(told.get("type") or "")
        said = without_keys(str(told.get("message") or error.message), self._key)
        status = error.status_code if error.status_code >= 400 else _STATUSES.get(kind)
        # "prompt is too long", or "input length and `max_tokens` exceed context limit".
        evidence = said.replace("context limit", "context window")
        return of_status(status, evidence, said, PROVIDER, model, kind, dict(error.response.headers))

    async def close(self) -> None:
        await self._clients.close()

    def _dict(self, told: Any) -> dict[str, Any]:
        """What the provider sent, all of it; nothing where that was no object."""
        if not isinstance(told, self._sdk.BaseModel):
            return {}
        found: dict[str, Any] = told.to_dict(mode="json", warnings=False)
        return found

    def _made(self) -> Any:
        given = {name: value for name, value in self._options.items() if value is not None}
        return self._sdk.AsyncAnthropic(**given, max_retries=0)

    def _timeout(self, timeouts: Timeouts) -> Any:
        return self._sdk.Timeout(None, connect=timeouts.connect)

    def _arguments(self, request: Request) -> dict[str, Any]:
        extra = dict(request.extra)
        sampling = {name: value for name in _SAMPLING if (value := extra.pop(name, None)) is not None}
        if request.temperature is not None:
            sampling["temperature"] = request.temperature
        most = extra.pop("max_completion_tokens", None)
        arguments = {
            "timeout": self._timeout(request.timeouts),
            **options_of(extra, tools=bool(request.tools)),
            **_prompt(request.messages, request.tools),
            "model": request.model,
            "max_tokens": request.max_tokens or most or DEFAULT_MAX_TOKENS,
        }
        if unknown := sorted(arguments.keys() - self._known):
            raise RequestRefused(
                f"Anthropic has no argument {', '.join(unknown)}: leave it out, or send it all the same in extra_body=",
                provider=PROVIDER,
                model=request.model,
            )
        return self._with_sampling(arguments, sampling) if sampling else arguments

    def _with_sampling(self, arguments: dict[str, Any], sampling: dict[str, Any]) -> dict[str, Any]:
        if not self._sampling:
            if not self._said:
                log.warning(
                    "Anthropic takes no %s any more: it is left out from now on; AnthropicClient(sampling=True) "
                    "sends it to version %s of the API",
                    ", ".join(sampling),
                    _SAMPLING_VERSION,
                )
            self._said = True
            return arguments
        body, headers = arguments.get("extra_body") or {}, arguments.get("extra_headers") or {}
        return arguments | {
            "extra_body": {**sampling, **body},
            "extra_headers": {"anthropic-version": _SAMPLING_VERSION, **headers},
        }


class AnthropicClient(ChatClient):
    """A client for Claude, by default `claude-sonnet-5-5`.

    The key is `api_key`, else the configured one, else ANTHROPIC_API_KEY; the endpoint `base_url`, else
    ANTHROPIC_BASE_URL, else Anthropic's own; one on this machine needs no key. An answer has at most 4096 tokens unless
    `max_tokens` says otherwise. Anthropic takes no temperature any more: one is left out, which the log says once,
    unless `sampling` is set; then it is sent with the last version of the API that took it. `timeouts`, `retries` and
    `clock` are the ChatClient's; `http_client` is one of the SDK's, for tests and proxies; other `options` go to the
    SDK's client.

    AnthropicConfigurationError: there is no key. MissingDependency: the anthropic package is not installed.
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
        )


def _configured_model() -> str:
    config = get_config()
    # The configuration's own default is a model of OpenAI's.
    chosen = config.model_provider == PROVIDER and config.default_model != type(config).default_model
    return config.default_model if chosen or config.default_model.startswith("claude") else DEFAULT_MODEL


def _prompt(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> dict[str, Any]:
    system, turns = conversation_of(messages)
    said: dict[str, Any] = {"messages": turns}
    if system:
        said["system"] = system
    if tools:
        said["tools"] = tools_of(tools)
    return said


def _answer(whole: dict[str, Any], is_whole: bool, model: str, raw: Any) -> Completion:
    message, usage, finish_reason = answer_of(whole, call_is_whole=is_whole)
    return Completion(message, usage, str(whole.get("model") or model), finish_reason, raw)


async def _read_out(events: Any) -> None:
    """Up to the end of the response, so that its connection can be used again; the answer is there already."""
    with contextlib.suppress(Exception):
        async with asyncio.timeout(_REST):
            async for _ in events:
                pass
