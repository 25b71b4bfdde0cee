"""The model's side of a turn: what it is asked, what that costs, and what is recorded of it."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from .._core.clock import Clock
from .._core.event_types import EventType
from .._execution.recorded_calls import UNRECORDED
from ..config import get_config
from ..errors import InvalidArgument, LimitExceeded, NotSupported, StreamCut, brief
from ..interfaces import LLMClient, LLMResponse, LLMStreamChunk
from ..limits import UNSEEN_TOKENS, tokens_of
from ..llm._prices import cost_usd, price_of
from ..llm._recording import recorded_form, require_price, traced
from .session import Cancelled, LoopSession
from .state import TurnState

log: logging.Logger = logging.getLogger("agent_runtime_core")

DELTA_EVERY = 0.02  # seconds of a streamed answer that are told together
CHARS_A_TOKEN = 3  # fewer than any model has on average, so that a guess is rather too large


class ModelCalls:
    """Asks the model of a talk."""

    def __init__(
        self, talk: LoopSession, model: str | None, max_tokens: int | None, options: Mapping[str, Any], *, stream: bool
    ) -> None:
        self.talk: LoopSession = talk
        self.model: str | None = model
        self.max_tokens: int | None = max_tokens
        self.options: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        self.stream: bool = stream
        self.definitions: list[dict[str, Any]] | None = talk.tools.to_openai_format() or None
        #: All that is sent beside the messages.
        self.given: dict[str, Any] = {"tools": self.definitions, **self.options}
        limits = talk.budget.strictest
        #: Whether anybody limits what the calls use, so that it matters before they have told it.
        self.limited: bool = limits.max_tokens is not None or limits.max_cost_usd is not None
        self.counted: int = 0  # messages whose length is part of `guess`
        self.guess: int = 0  # tokens that all messages so far are likely to have
        self._streamed: int = 0  # characters of the present answer that were published

    def need_price(self) -> None:
        """UnknownPrice if a limit in USD could not be kept."""
        talk = self.talk
        limits, config = talk.budget.strictest, get_config()
        require_price(limits, self._wanted() or config.default_model, config.model_prices)

    async def answer(self, key: str) -> dict[str, Any]:
        """The model's answer to the conversation so far, as it is recorded; LimitExceeded if it may not be asked."""
        talk = self.talk
        guess = self._guess() if self.limited else 0
        recorded = talk.steps.recorded("model", key)
        talk.copied = recorded is not UNRECORDED and talk.steps.from_fork("model", key)
        if recorded is UNRECORDED:
            recorded = await self._answer(key, guess)
        else:
            talk.state(TurnState.STREAMING)
            talk.add_work_time(talk.steps.duration("model", key))
            if (doubted := recorded.get("doubted")) and not talk.copied:
                talk.budget.count_in_doubt(doubted)
        talk.new_messages = []
        response: dict[str, Any] = recorded
        if not talk.copied:
            talk.budget.used(*self._spent(response, guess))
        if self.limited:
            self.guess = max(self.guess, response["usage"].get("total_tokens") or 0)
        return response

    async def _answer(self, key: str, guess: int) -> Any:
        """What the model answers now."""
        talk = self.talk
        doubted = await self._doubted(key)
        if doubted:
            talk.budget.count_in_doubt(doubted)
        if (limit := talk.budget.newly_doubtful()) is not None:
            log.warning(
                "run %s: %s=%g may be used up: %g with the estimates of interrupted model calls. The run continues; "
                "set count_estimates=True in its RunLimits to end it here",
                talk.run, limit.limit, limit.allowed, limit.used,
            )  # fmt: skip
        self._streamed = 0
        reserve = self._reserve(guess)
        talk.stop_timer()
        async with (
            nullcontext() if talk.budget.unlimited else talk.budget.reserved(reserve, waiting=talk.unless_cancelled)
        ):
            talk.start_timer()
            talk.state(TurnState.STREAMING)
            sent = talk.messages if talk.hooks.trim is None else await self._trimmed(talk.hooks.trim)
            about = {"asked": self._told_of(sent), "doubted": doubted}
            try:
                return await talk.in_time(
                    talk.steps.run("model", key, lambda attempt: self._call(sent, about), reserve=reserve)
                )
            except (asyncio.CancelledError, LimitExceeded, Cancelled):
                # Interrupted: the provider reports no usage.
                talk.budget.count_in_doubt(self._with_streamed(reserve, self._streamed))
                raise

    async def _doubted(self, key: str) -> dict[str, Any] | None:
        """Return the estimate of the calls that earlier executions of the run began for this step and did not end."""
        talk = self.talk
        doubted = talk.steps.in_doubt("model", key)
        if not doubted or not self.stream or self.max_tokens:
            return doubted
        return self._with_streamed(doubted, await talk.steps.streamed("model", key))

    def _with_streamed(self, reserve: dict[str, Any] | None, streamed: int) -> dict[str, Any] | None:
        """Add what was streamed to an estimate, unless `max_tokens` bounds the whole answer already."""
        if not reserve or not streamed or self.max_tokens:
            return reserve
        tokens = streamed // CHARS_A_TOKEN + 1
        cost = self._cost({"prompt_tokens": 0, "completion_tokens": tokens})
        more = {**reserve, "tokens": reserve["tokens"] + tokens}
        return more if cost is None else {**more, "usd": reserve.get("usd", 0.0) + cost}

    def _reserve(self, tokens: int) -> dict[str, Any] | None:
        """What this call may use at most, for the record of its start; nothing where nobody counts."""
        if not self.limited:
            return None
        answer = self._most()
        cost = self._cost({"prompt_tokens": tokens - answer, "completion_tokens": answer})
        return {"tokens": tokens} if cost is None else {"tokens": tokens, "usd": cost}

    def _spent(self, response: Mapping[str, Any], guess: int) -> tuple[Mapping[str, Any], float | None]:
        """What a call took; where a limit needs that and nobody told, a guess by the length of the texts."""
        usage, cost = response["usage"], response["cost_usd"]
        if not self.limited or tokens_of(usage):
            return usage, cost
        prompt, answer = guess - self._most(), _tokens_in(response["message"])
        usage = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
        return usage, self._cost(usage, response["model"]) if cost is None else cost

    def _wanted(self) -> str:
        """The model that is asked for, as far as anybody says."""
        return self.model or getattr(self.talk.client, "default_model", None) or ""

    def _most(self) -> int:
        return self.max_tokens or UNSEEN_TOKENS

    def _cost(self, usage: Mapping[str, Any], answered: str = "") -> float | None:
        config = get_config()
        limited = self.talk.budget.strictest.max_cost_usd is not None
        if not config.model_prices and not limited:
            return None
        # The limit went by the model that was asked for; some servers know it by another name.
        names = [name for name in (self._wanted(), answered) if name] + ([config.default_model] if limited else [])
        if not names:
            return None  # nobody has said yet which model it is
        priced = [name for name in names if price_of(name, config.model_prices) is not None]
        return cost_usd(usage, (priced or names)[0], config.model_prices)

    def _guess(self) -> int:
        """Tokens that this call is likely to have at most, the answer included."""
        talk = self.talk
        for message in talk.messages[self.counted :]:
            self.guess += _tokens_in(message)
        self.counted = len(talk.messages)
        return self.guess + self._most()

    async def _trimmed(self, trim: Callable[[list[dict[str, Any]]], Any]) -> list[dict[str, Any]]:
        # The list is theirs to change, the messages in it are not.
        trimmed = trim(list(self.talk.messages))
        if inspect.isawaitable(trimmed):
            trimmed = await trimmed
        if not isinstance(trimmed, list):
            raise InvalidArgument(f"trim returns the messages to send as a list, not {brief(trimmed)}")
        return trimmed

    def _told_of(self, sent: list[dict[str, Any]]) -> dict[str, Any]:
        """What of the request does not follow from the records before it, so that it can be told from the journal."""
        talk = self.talk
        if talk.new_messages is talk.messages:
            given = getattr(talk.ctx, "initial_messages", None) or []
            own = len(talk.messages) - len(given)
            asked: dict[str, Any] = (
                {"said": talk.messages[:own], "input": len(given)}
                if own >= 0 and talk.messages[own:] == given
                else {"said": list(talk.messages)}
            )
        else:
            asked = {"said": talk.new_messages} if talk.new_messages else {}
        if sent is not talk.messages:
            places = {id(message): place for place, message in enumerate(talk.messages)}
            kept = [places.get(id(message), -1) for message in sent]
            if -1 in kept:
                asked["sent"] = sent
            elif len(kept) != len(talk.messages) or kept != sorted(kept):
                asked["kept"] = _ranges(kept)
        return asked

    def _call(self, messages: list[dict[str, Any]], about: Mapping[str, Any]) -> Awaitable[dict[str, Any]]:
        asked, talk = self._asked(messages, about), self.talk
        return traced(talk.ctx, talk.client, messages, self.model, self.options, asked) if talk.traced else asked

    async def _asked(self, messages: list[dict[str, Any]], about: Mapping[str, Any]) -> dict[str, Any]:
        client, options = self.talk.client, self.given
        if self.stream:
            response = await streamed(client, messages, options, self._tell, self.talk.clock)
        else:
            response = await client.generate(messages=messages, **options)
        message = _with_ids(response.message)
        cost = response.cost_usd
        if cost is None:
            cost = self._cost(response.usage or {}, response.model)
        answer = recorded_form(response, message, cost)
        for name, value in about.items():
            if value:
                answer[name] = value
        return answer

    async def _tell(self, delta: str) -> None:
        self._streamed += len(delta)
        await self.talk.ctx.emit(EventType.ASSISTANT_DELTA, {"delta": delta})


async def streamed(
    client: LLMClient, messages: list[Any], options: Mapping[str, Any], tell: Callable[[str], Awaitable[None]],
    clock: Clock,
) -> LLMResponse:  # fmt: skip
    """The whole answer, told in pieces as it comes; all at once by a client that has no stream."""
    stream: Any = getattr(client, "stream", None)
    if stream is not None:
        try:
            pieces = stream(messages=messages, **options)
            # Somebody's own client may have no generator: a coroutine gives its pieces, or raises that it has none.
            if inspect.isawaitable(pieces):
                pieces = await pieces
            return await _poured(pieces, tell, clock, options.get("model"))
        except (NotImplementedError, NotSupported):
            pass
    return await client.generate(messages=messages, **options)


async def _poured(
    pieces: AsyncIterator[LLMStreamChunk], tell: Callable[[str], Awaitable[None]], clock: Clock, model: str | None
) -> LLMResponse:
    buffered, told = "", clock.boot()
    heard = StreamBuffer()
    try:
        async for piece in pieces:
            buffered += piece.delta
            heard.take(piece)
            if buffered and (piece.finish_reason is not None or clock.boot() - told >= DELTA_EVERY):
                await tell(buffered)
                buffered, told = "", clock.boot()
        if buffered:
            await tell(buffered)
    finally:
        if close := getattr(pieces, "aclose", None):
            await close()
    return heard.whole(model)


class StreamBuffer:
    """A streamed answer so far, by whichever client."""

    def __init__(self) -> None:
        self.last: LLMStreamChunk = LLMStreamChunk()  # of those with a finish_reason
        self._texts: list[str] = []
        self._calls: list[Any] = []
        self._usage: dict[str, Any] = {}

    def take(self, piece: LLMStreamChunk) -> None:
        self._texts.append(piece.delta)
        self._calls += piece.tool_calls or ()
        self._usage = piece.usage or self._usage
        if piece.finish_reason is not None:
            self.last = piece

    def whole(self, model: str | None) -> LLMResponse:
        """The answer, where no more comes; StreamCut if it asks for tools and was not finished."""
        last = self.last
        if last.response is not None:
            return last.response
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._texts) or None}
        if self._calls:
            if last.finish_reason is None:
                raise StreamCut("the stream asked for tools and ended without a finish_reason; nothing of it counts")
            message["tool_calls"] = [dict(call) for call in self._calls]
        return LLMResponse(message, self._usage, model or "", last.finish_reason or "")


def _tokens_in(message: Mapping[str, Any]) -> int:
    content = message.get("content")
    size = len(content) if isinstance(content, str) else len(str(content))
    return (size + len(str(message.get("tool_calls") or ""))) // CHARS_A_TOKEN + 4


def _ranges(places: Sequence[int]) -> list[list[int]]:
    """Places as [first, behind the last] of each stretch of them."""
    found: list[list[int]] = []
    for place in places:
        if found and found[-1][1] == place:
            found[-1][1] += 1
        else:
            found.append([place, place + 1])
    return found


def _with_ids(message: dict[str, Any]) -> dict[str, Any]:
    """The message with an id of its own for every tool call, which its result is paired by."""
    calls = message.get("tool_calls")
    if not calls:
        return {name: value for name, value in message.items() if name != "tool_calls"}
    seen: set[str] = set()
    named = []
    for place, call in enumerate(calls):
        id_ = str(call.get("id") or f"call_{place}")
        while id_ in seen:
            id_ += "_"
        seen.add(id_)
        named.append({**call, "id": id_})
    return {**message, "tool_calls": named}
