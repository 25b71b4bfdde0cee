"""The client every provider shares: what is asked, for how long, how often, and what becomes of a broken answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeVar, cast

from .._core.clock import SYSTEM, Clock
from ..config import get_config
from ..errors import (
    AgentRuntimeError,
    InvalidArgument,
    NotConfigured,
    ProviderError,
    ProviderTimeout,
    StreamCut,
    brief,
)
from ..interfaces import LLMClient, LLMResponse, LLMStreamChunk, messages_in
from ._circuit_breaker import SHARED, Breakers
from ._error_messages import explained
from ._prices import cost_usd, price_of
from ._provider import Chunk, Completion, ProviderAdapter, Request, Timeouts
from ._retries import RETRY_BUDGET, Retries, RetryBudget, RetryState

__all__ = ["RETRY_BUDGET", "ChatClient", "Retries", "RetryBudget", "Timeouts", "forbid_remote"]

log: logging.Logger = logging.getLogger("agent_runtime_core")

T = TypeVar("T")

# Seconds a connection has to close; the answer is complete or lost by then.
_CLOSING = 5.0
_LATE = {
    "first_byte": "the answer did not begin",
    "between_chunks": "the answer stopped coming",
    "total": "there was no whole answer",
}

# Why no model may be asked that is not on this machine; None, the default, when any may.
_forbidden: str | None = None


def forbid_remote(reason: str | None) -> str | None:
    """From now on every client of this process refuses to ask beyond this machine, with `reason`; None allows it.

    Returns the reason that stood before, to be put back.
    """
    global _forbidden
    before, _forbidden = _forbidden, reason
    return before


class ChatClient(LLMClient):
    """A model behind a Wire.

    1. Errors of the provider are ProviderErrors that name it, the model and the way out; other errors go through.
    2. What may succeed another time is asked again as `retries` say and a RETRY_BUDGET allows, all tries and waits
       together within `timeouts.total`; a stream only until its first text was handed out.
    3. A provider that keeps failing is not asked for a while: CircuitOpen. Clients of one endpoint share that.
    4. An answer is whole or an error: a stream that is cut, stalls or ends too early gives no response and no tool
       call.
    5. Leaving a stream early, a timeout and a cancellation close the connection.
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
    ) -> None:
        self.default_model: str = default_model
        self._wire = wire
        self._timeouts = timeouts or Timeouts()
        self._retries = retries or Retries()
        self._clock = clock
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
        tries = self._tries(request.model)
        if stream:
            answer = await self._persist(tries, lambda: self._drained(request, tries))
        else:
            answer = await self._persist(tries, lambda: self._asked(tries, lambda: self._wire.request(request)))
        return _response(answer, request)

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
        tries = self._tries(request.model)
        answer: Completion | None = None
        handed_out = False
        while answer is None:
            try:
                async with contextlib.aclosing(self._poured(request, tries)) as pieces:
                    async for piece in pieces:
                        answer = piece.answer
                        if piece.text:
                            handed_out = True
                            yield LLMStreamChunk(delta=piece.text)
            except ProviderError as error:
                if handed_out:
                    raise
                await tries.wait(error)
        response = _response(answer, request)
        yield LLMStreamChunk(
            finish_reason=response.finish_reason,
            usage=response.usage,
            tool_calls=response.tool_calls or None,
            response=response,
        )

    async def embed(self, texts: Sequence[str], *, model: str | None = None) -> list[list[float]]:
        no_list = isinstance(texts, (str, bytes)) or not isinstance(texts, Iterable)
        if no_list or not all(isinstance(text, str) for text in texts):
            raise InvalidArgument(f"texts are a list of texts, not {brief(texts)}")
        tries = self._tries(model or "")
        return await self._persist(
            tries, lambda: self._asked(tries, lambda: self._wire.embed(texts, model, self._timeouts))
        )

    async def moderate(self, text: str, *, model: str | None = None) -> dict[str, Any]:
        tries = self._tries(model or "")
        return await self._persist(
            tries, lambda: self._asked(tries, lambda: self._wire.moderate(text, model, self._timeouts))
        )

    async def count_tokens(self, messages: list[Any], tools: list[dict[str, Any]] | None = None) -> int:
        model, sent = self.default_model, messages_in(messages)
        tries = self._tries(model)
        return await self._persist(
            tries, lambda: self._asked(tries, lambda: self._wire.count_tokens(sent, tools, model, self._timeouts))
        )

    async def close(self) -> None:
        """Let go of connections; the client is not used after that."""
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
                f"{self._wire.provider} was told no model: give model=, default_model= or configure(default_model=...)",
                provider=self._wire.provider,
            )
        if not messages:
            raise InvalidArgument("messages=[] asks nothing: give at least one message")
        return Request(messages_in(messages), name, tools or None, temperature, max_tokens, extra, self._timeouts)

    def _tries(self, model: str) -> RetryState:
        key = (self._wire.provider, self._wire.endpoint, model)
        return RetryState(key, self._timeouts, self._retries, self._breakers, self._clock)

    async def _persist(self, tries: RetryState, attempt: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await attempt()
            except ProviderError as error:
                await tries.wait(error)

    async def _asked(self, tries: RetryState, ask: Callable[[], Awaitable[T]]) -> T:
        with self._one_try(tries):
            return await _within(tries, "total", ask())

    async def _drained(self, request: Request, tries: RetryState) -> Completion:
        async with contextlib.aclosing(self._poured(request, tries)) as pieces:
            *_, last = [piece async for piece in pieces]
        return cast("Completion", last.answer)

    async def _poured(self, request: Request, tries: RetryState) -> AsyncGenerator[Chunk, None]:
        """One try: some text, and last the answer; StreamCut where there is none."""
        with self._one_try(tries):
            # Every wire's is a generator.
            pieces = cast("AsyncGenerator[Chunk, None]", self._wire.stream(request))
            waits_for: Literal["first_byte", "between_chunks"] = "first_byte"
            try:
                while True:
                    piece = await _within(tries, waits_for, anext(pieces, None))
                    if piece is None:
                        raise StreamCut("the stream ended before the answer did; nothing of it counts")
                    yield piece
                    if piece.answer is not None:
                        return
                    waits_for = "between_chunks"
            finally:
                await _let_go(pieces)

    @contextlib.contextmanager
    def _one_try(self, tries: RetryState) -> Iterator[None]:
        """Leave to ask once; what goes wrong then is told to the breaker, and in the words of this library."""
        provider, _, model = tries.key
        if _forbidden is not None and self._wire.remote:
            raise NotConfigured(_forbidden, provider=provider, model=model)
        permit = self._breakers.enter(tries.key)
        try:
            yield
            permit.answered()
        except AgentRuntimeError as error:
            permit.failed(error)
            if isinstance(error, ProviderError):
                explained(error, provider, model)
            raise
        except Exception as error:
            if half := _half_a_character(error):
                raise InvalidArgument(
                    f"the request holds {half}, half of a character, which cannot be sent: replace it, as with "
                    f"text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')"
                ) from None
            translated = self._wire.translate(error, model)
            if translated is None:
                raise
            permit.failed(translated)
            # What the SDK says may hold the key, as some servers send it back; a traceback would tell it on.
            raise explained(translated, provider, model) from None
        finally:
            permit.dropped()


def _half_a_character(error: BaseException | None) -> str | None:
    """The lone surrogate because of which a request could not be encoded, also where an SDK hides that."""
    while error is not None:
        if isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":
            return ascii(error.object[error.start])
        error = error.__cause__ or error.__context__
    return None


async def _within(
    tries: RetryState, what: Literal["first_byte", "between_chunks", "total"], awaited: Awaitable[T]
) -> T:
    limit: float = getattr(tries.timeouts, what)
    if tries.left < limit:
        what = "total"
    guard = asyncio.timeout(min(limit, tries.left))
    try:
        async with guard:
            return await awaited
    except Exception as error:
        # Whatever an SDK makes of the cancellation, it was this limit.
        if not guard.expired():
            raise
        seconds: float = getattr(tries.timeouts, what)
        raise ProviderTimeout(f"{_LATE[what]} within timeouts.{what}={seconds:g} s", code=what) from error


async def _let_go(pieces: AsyncGenerator[Chunk, None]) -> None:
    try:
        async with asyncio.timeout(_CLOSING):
            await pieces.aclose()
    except Exception as error:  # noqa: BLE001 - a connection that cannot even be closed changes nothing in the answer
        log.debug("a stream did not close: %s", type(error).__name__)


def _response(answer: Completion, request: Request) -> LLMResponse:
    prices = get_config().model_prices
    # The limits of a run go by the model that was asked for; some servers know it by another name.
    priced = [name for name in (request.model, answer.model) if price_of(name, prices) is not None]
    return LLMResponse(
        message=answer.message,
        usage=dict(answer.usage),
        model=answer.model or request.model,
        finish_reason=answer.finish_reason,
        raw_response=answer.raw,
        cost_usd=cost_usd(answer.usage, priced[0] if priced else request.model, prices),
    )
