"""The client that all providers share: time limits, retries, circuit breakers and checks of answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, TypeVar, cast

from .._core.arguments import messages_in
from .._core.clock import SYSTEM, Clock
from .._core.log import log
from .._core.validation import Shown, must, sentence
from ..config import get_config
from ..errors import (
    AgentRuntimeError,
    AuthenticationFailed,
    ContextOverflow,
    ModelNotFound,
    NotConfigured,
    ProviderError,
    ProviderTimeout,
    RateLimited,
    StreamCut,
)
from ..interfaces import LLMClient, LLMResponse, LLMStreamChunk
from ..limits import ModelLimits
from ._fallbacks import Fallbacks
from ._prices import cost_usd, price_of
from ._provider import Chunk, Completion, ProviderAdapter, Request, Timeouts
from ._retries import METER, RETRY_BUDGET, SHARED, Breakers, Retries, RetryBudget, RetryState
from ._schemas import property_names, with_renamed_properties

_LONGEST_MESSAGE = 400
_KEYS = {
    "openai": "api_key=, configure(openai_api_key=...) or OPENAI_API_KEY",
    "anthropic": "api_key=, configure(anthropic_api_key=...) or ANTHROPIC_API_KEY",
}
_FIXES: dict[type[ProviderError], str] = {
    ModelNotFound: "Check model=, the client's default_model= and configure(default_model=...)",
    ContextOverflow: "Send fewer or shorter messages, or trim them in the loop's trim hook",
    RateLimited: "Send fewer requests, or raise the limit at the provider",
}


def explained(error: ProviderError, provider: str, model: str) -> ProviderError:
    """Return the same error with provider, model and a message that says how to fix it."""
    error.provider = error.provider or provider
    error.model = error.model or model
    text = _problem(error)
    source = f"{error.provider}, model {error.model!r}" if error.model else error.provider
    fix = _fix(error)
    error.args = (f"{source}: {sentence(text)} {fix}" if fix else f"{source}: {text}",)
    return error


def _problem(error: ProviderError) -> str:
    # Some servers repeat a rejected key in their answer.
    if isinstance(error, AuthenticationFailed) and error.status == 401:
        text = "the API key was rejected with status 401"
    else:
        text = " ".join(str(error).split())
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[: _LONGEST_MESSAGE - 1]}…"


def _fix(error: ProviderError) -> str:
    if isinstance(error, AuthenticationFailed):
        where = _KEYS.get(
            error.provider, "the key of this model's provider, as api_key= or in its environment variable"
        )
        return f"Check {where}"
    return next((fix for kind, fix in _FIXES.items() if isinstance(error, kind)), "")


Names: TypeAlias = Mapping[str, Mapping[str, str]]
"""For each tool, the names that are sent for its properties."""

_CLAUDE: Final = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
#: The names that are accepted, by a word in the name of the provider or of the model. Others accept all names.
_ACCEPTED: Final = {"anthropic": _CLAUDE, "claude": _CLAUDE}
_REPLACED: Final = re.compile(r"[^a-zA-Z0-9_.-]")
_LONGEST: Final = 60


def renamed_tools(
    tools: Sequence[dict[str, Any]] | None, provider: str, model: str
) -> tuple[Sequence[dict[str, Any]] | None, Names]:
    """Return the tools with names of properties that the provider accepts, and these names."""
    asked = f"{provider} {model}".lower()
    accepted = next((pattern for word, pattern in _ACCEPTED.items() if word in asked), None)
    if not tools or accepted is None:
        return tools, {}
    changed, names = list[dict[str, Any]](), dict[str, Mapping[str, str]]()
    for tool in tools:
        function = tool.get("function")
        parameters = function.get("parameters") if isinstance(function, Mapping) else None
        found = _replacements(parameters, accepted) if isinstance(parameters, Mapping) else {}
        if found:
            assert isinstance(function, Mapping)
            names[str(function.get("name"))] = found
            tool = {**tool, "function": {**function, "parameters": with_renamed_properties(parameters or {}, found)}}
        changed.append(tool)
    return (changed, names) if names else (tools, {})


def _replacements(schema: Mapping[str, Any], accepted: re.Pattern[str]) -> dict[str, str]:
    known, found = property_names(schema), dict[str, str]()
    for name in known:
        if accepted.fullmatch(name):
            continue
        base, number = _REPLACED.sub("_", name)[:_LONGEST] or "_", 2
        new = base
        while new in known or new in found.values():
            new, number = f"{base}_{number}", number + 1
        found[name] = new
    return found


def with_sent_names(messages: Iterable[dict[str, Any]], names: Names) -> list[dict[str, Any]]:
    """Return the messages in which the arguments of earlier calls have the names that are sent."""
    return [_with_names(message, names) for message in messages]


def with_real_names(message: dict[str, Any], names: Names) -> dict[str, Any]:
    """Return an answer in which the arguments of calls have the names of the tools."""
    return _with_names(message, {tool: {new: old for old, new in each.items()} for tool, each in names.items()})


def _with_names(message: dict[str, Any], names: Names) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_renamed_call(call, names) for call in calls]}


def _renamed_call(call: Any, names: Names) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    found = names.get(str(function.get("name"))) if isinstance(function, Mapping) else None
    if found is None or not isinstance(function, Mapping):
        return call
    return {**call, "function": {**function, "arguments": _renamed_arguments(function.get("arguments"), found)}}


def _renamed_arguments(arguments: Any, names: Mapping[str, str]) -> Any:
    if not isinstance(arguments, str):
        return _renamed(arguments, names)
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    renamed = _renamed(parsed, names)
    return arguments if renamed == parsed else json.dumps(renamed, ensure_ascii=False)


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {names.get(name, name): _renamed(each, names) for name, each in value.items()}
    return [_renamed(each, names) for each in value] if isinstance(value, list) else value


__all__ = ["RETRY_BUDGET", "ChatClient", "Retries", "RetryBudget", "Timeouts", "forbid_remote"]


T = TypeVar("T")

# Seconds that closing a connection may take.
_CLOSING = 5.0
_LATE = {
    "first_byte": "the answer did not begin",
    "between_chunks": "the stream stalled",
    "total": "the answer was not complete",
}

# Why only models on this machine may be called; None if any model may be called.
_forbidden: str | None = None


def forbid_remote(reason: str | None) -> str | None:
    """Make every client of this process reject requests to other machines, with `reason`; None allows them.

    Returns:
        The previous reason, so that it can be restored.
    """
    global _forbidden
    before, _forbidden = _forbidden, reason
    return before


class ChatClient(LLMClient):
    """A model client on top of a `ProviderAdapter`.

    1. Errors of the provider become ProviderErrors that name the provider, the model and how to fix the problem. Other
       errors are raised unchanged.
    2. A request that may succeed later is retried as `retries` and the RETRY_BUDGET allow. All attempts and delays
       together take at most `timeouts.total` seconds. A stream is retried only until its first text was yielded.
    3. A provider that keeps failing gets no requests for a while (CircuitOpen). Clients of one endpoint share this
       state.
    4. An answer is complete or an error: a stream that is truncated or stalls yields no response and no tool call. If
       the provider finishes an answer, the answer counts, however its connection ends.
    5. A request with a part that the provider rejects is sent once more without it, as `fallbacks` allow.
    6. Leaving a stream early, a timeout and a cancellation close the connection.

    Args:
        wire: The adapter of the provider.
        default_model: The model of requests that name none.
        timeouts: Time limits in seconds.
        retries: How often failed requests are retried.
        clock: Source of time, for tests.
        breakers: Circuit breakers; by default the breakers of the process.
        fallbacks: What is omitted from a request after the provider rejected it.
        limits: What the provider allows. The model calls of all workers wait for room in them.
    """

    def __init__(
        self,
        wire: ProviderAdapter,
        *,
        default_model: str,
        timeouts: Timeouts | None = None,
        retries: Retries | None = None,
        clock: Clock = SYSTEM,
        breakers: Breakers | None = None,
        fallbacks: Fallbacks | None = None,
        limits: ModelLimits | None = None,
    ) -> None:
        if limits is not None and not isinstance(limits, ModelLimits):
            raise must("limits", "be ModelLimits or None", limits)
        self.default_model: str = default_model
        #: Read by the agent loop, which reserves its calls before it makes them.
        self.limits: ModelLimits | None = limits
        #: The name of the provider, in traces.
        self.provider: str = wire.provider
        self._wire = wire
        self._timeouts = timeouts or Timeouts()
        self._retries = retries or Retries()
        self._clock = clock
        self._fallbacks = fallbacks or Fallbacks()
        if breakers is None:
            breakers = SHARED if wire.endpoint and clock is SYSTEM else Breakers(clock)
        self._breakers = breakers

    async def generate(
        self,
        messages: list[Any],
        *,
        model: str | None = None,
        stream: bool = False,
        tools: list[dict[str, Any]] | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        **kwargs: Any,
    ) -> LLMResponse:
        request = self._request(messages, model, tools, temperature, max_tokens, kwargs)
        state = self._retry_state(request.model)
        answer: Completion | None = None
        while answer is None:
            try:
                answer = await (self._complete_stream if stream else self._complete)(request, state)
            except ProviderError as error:
                request = await self._next_request(request, state, error)
        return self._response(answer, request)

    async def stream(
        self,
        messages: list[Any],
        *,
        model: str | None = None,
        tools: list[dict[str, Any]] | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[LLMStreamChunk]:
        request = self._request(messages, model, tools, temperature, max_tokens, kwargs)
        state = self._retry_state(request.model)
        answer: Completion | None = None
        yielded = False
        while answer is None:
            try:
                async with contextlib.aclosing(self._one_stream(request, state)) as chunks:
                    async for chunk in chunks:
                        answer = chunk.answer
                        if chunk.text:
                            yielded = True
                            yield LLMStreamChunk(delta=chunk.text)
            except ProviderError as error:
                request = await self._next_request(request, state, error, last=yielded)
        response = self._response(answer, request)
        yield LLMStreamChunk(
            finish_reason=response.finish_reason,
            usage=response.usage,
            tool_calls=response.tool_calls or None,
            response=response,
        )

    async def embed(self, texts: Sequence[str], *, model: str | None = None) -> list[list[float]]:
        invalid_type = isinstance(texts, (str, bytes)) or not isinstance(texts, Iterable)
        if invalid_type or not all(isinstance(text, str) for text in texts):
            raise must("texts", "be a list of strings", texts)
        state = self._retry_state(model or "")
        return await self._with_retries(
            state, lambda: self._one_request(state, lambda: self._wire.embed(texts, model, self._timeouts))
        )

    async def moderate(self, text: str, *, model: str | None = None) -> dict[str, Any]:
        state = self._retry_state(model or "")
        return await self._with_retries(
            state, lambda: self._one_request(state, lambda: self._wire.moderate(text, model, self._timeouts))
        )

    async def count_tokens(self, messages: list[Any], tools: list[dict[str, Any]] | None = None) -> int:
        model = self.default_model
        tools_sent, names = renamed_tools(tools, self.provider, model)
        sent = with_sent_names(messages_in(messages), names) if names else messages_in(messages)
        state = self._retry_state(model)
        return await self._with_retries(
            state,
            lambda: self._one_request(state, lambda: self._wire.count_tokens(sent, tools_sent, model, self._timeouts)),
        )

    async def close(self) -> None:
        """Close the connections; the client cannot be used after that."""
        await self._wire.close()

    def _request(
        self,
        messages: list[Any],
        model: str | None,
        tools: list[dict[str, Any]] | None,
        temperature: float | None,
        max_tokens: int | None,
        extra: dict[str, Any],
    ) -> Request:
        name = model or self.default_model
        if not name:
            raise NotConfigured(
                f"no model for {self._wire.provider}. Pass model=, default_model= or configure(default_model=...)",
                provider=self._wire.provider,
            )
        if not messages:
            fix = "Pass at least one, as in [{'role': 'user', 'content': 'hi'}]"
            raise must("messages", "not be empty", messages, fix)
        sent, names = renamed_tools(tools or None, self.provider, name)
        request = Request(
            with_sent_names(messages_in(messages), names) if names else messages_in(messages), name, sent, temperature,
            max_tokens, extra, self._timeouts, clock=self._clock, names=names,
        )  # fmt: skip
        return self._fallbacks.known(request)

    async def _next_request(
        self, request: Request, state: RetryState, error: ProviderError, *, last: bool = False
    ) -> Request:
        """Return the request to send after an error: without what was rejected, or the same after a delay.

        Count the answer that was thrown away. If this was the `last` attempt, raise the error.
        """
        partial, state.partial, meter = state.partial, None, METER.get()
        if partial is not None and not error.usage:
            error.usage, error.cost_usd = partial.usage(), partial.cost()
        if meter is not None and (error.usage or partial is not None):
            cost = error.cost_usd
            if cost is None and error.usage:
                cost = _cost_usd(error.usage, request.model, request.model)
            meter.count(request.model, error.usage, cost)
        if last:
            raise error
        changed = self._fallbacks.after(error, request)
        if changed is None:
            await state.wait(error)
        if meter is not None:
            meter.before_request()
        return changed or request

    def _response(self, answer: Completion, request: Request) -> LLMResponse:
        self._fallbacks.remember(request)
        return _response(answer, request)

    def _retry_state(self, model: str) -> RetryState:
        key = (self._wire.provider, self._wire.endpoint, model)
        return RetryState(key, self._timeouts, self._retries, self._breakers, self._clock)

    async def _with_retries(self, state: RetryState, attempt: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await attempt()
            except ProviderError as error:
                await state.wait(error)

    async def _one_request(self, state: RetryState, ask: Callable[[], Awaitable[T]]) -> T:
        with self._one_attempt(state):
            return await _within(state, "total", ask())

    async def _complete(self, request: Request, state: RetryState) -> Completion:
        return await self._one_request(state, lambda: self._wire.request(request))

    async def _complete_stream(self, request: Request, state: RetryState) -> Completion:
        async with contextlib.aclosing(self._one_stream(request, state)) as chunks:
            *_, last = [chunk async for chunk in chunks]
        return cast("Completion", last.answer)

    async def _one_stream(self, request: Request, state: RetryState) -> AsyncGenerator[Chunk, None]:
        """Make one attempt: yield text, and finally the answer; StreamCut if the stream ends without an answer."""
        with self._one_attempt(state):
            # The stream of every adapter is a generator.
            chunks = cast("AsyncGenerator[Chunk, None]", self._wire.stream(request))
            waits_for: Literal["first_byte", "between_chunks"] = "first_byte"
            try:
                while True:
                    try:
                        chunk = await _within(state, waits_for, anext(chunks, None))
                    except ProviderTimeout:
                        answer = None if state.partial is None else state.partial.answer()
                        if answer is None:
                            raise
                        chunk = Chunk(answer=answer)
                    if chunk is None:
                        raise StreamCut(
                            "the stream ended before the answer was complete. The partial answer is discarded"
                        )
                    state.partial = chunk.partial or state.partial
                    yield chunk
                    if chunk.answer is not None:
                        return
                    waits_for = "between_chunks"
            finally:
                await _close(chunks)

    @contextlib.contextmanager
    def _one_attempt(self, state: RetryState) -> Iterator[None]:
        """Guard one request: it needs a circuit breaker's permission, and its errors are translated and counted."""
        provider, _, model = state.key
        if _forbidden is not None and self._wire.remote:
            raise NotConfigured(_forbidden, provider=provider, model=model)
        permit = self._breakers.enter(state.key)
        try:
            yield
            permit.answered()
        except AgentRuntimeError as error:
            permit.failed(error)
            if isinstance(error, ProviderError):
                explained(error, provider, model)
            raise
        except Exception as error:
            if surrogate := _lone_surrogate(error):
                fix = "Replace it with text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')"
                raise must("the request", "not contain a lone surrogate", Shown(surrogate), fix) from None
            translated = self._wire.translate(error, model)
            if translated is None:
                raise
            permit.failed(translated)
            # The SDK's error may contain the key, which some servers repeat: keep it out of tracebacks.
            raise explained(translated, provider, model) from None
        finally:
            permit.dropped()


def _lone_surrogate(error: BaseException | None) -> str | None:
    """Return the lone surrogate that could not be encoded, or that an SDK's error wraps."""
    while error is not None:
        if isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":
            return ascii(error.object[error.start])
        error = error.__cause__ or error.__context__
    return None


async def _within(
    state: RetryState, what: Literal["first_byte", "between_chunks", "total"], awaited: Awaitable[T]
) -> T:
    limit: float = getattr(state.timeouts, what)
    if state.left < limit:
        what = "total"
    time_limit = asyncio.timeout(min(limit, state.left))
    try:
        async with time_limit:
            return await awaited
    except Exception as error:
        # An SDK may replace the cancellation by a separate error; the cause is this time limit.
        if not time_limit.expired():
            raise
        seconds: float = getattr(state.timeouts, what)
        raise ProviderTimeout(f"{_LATE[what]} within timeouts.{what}={seconds:g} s", code=what) from error


async def _close(chunks: AsyncGenerator[Chunk, None]) -> None:
    try:
        async with asyncio.timeout(_CLOSING):
            await chunks.aclose()
    except Exception as error:  # noqa: BLE001 - a connection that fails to close does not change the answer
        log.debug("closing a stream failed: %s", type(error).__name__)


def _response(answer: Completion, request: Request) -> LLMResponse:
    cost = answer.cost_usd
    if cost is None:
        cost = _cost_usd(answer.usage, request.model, answer.model)
    return LLMResponse(
        message=with_real_names(answer.message, request.names) if request.names else answer.message,
        usage=dict(answer.usage),
        model=answer.model or request.model,
        finish_reason=answer.finish_reason,
        raw_response=answer.raw,
        cost_usd=cost,
    )


def _cost_usd(usage: Mapping[str, int], requested: str, answered: str) -> float | None:
    prices = get_config().model_prices
    # The limits of a run use the requested model's price; some servers report another model name.
    priced = [name for name in (requested, answered) if price_of(name, prices) is not None]
    return cost_usd(usage, priced[0] if priced else requested, prices)
