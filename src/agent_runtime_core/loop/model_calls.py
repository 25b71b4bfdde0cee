"""The model calls of a loop: request, cost, and what is recorded."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from .._core.clock import Clock
from .._core.context_vars import restore
from .._core.event_types import EventType
from .._core.log import log
from .._core.validation import must
from .._execution.pools import PooledCalls
from .._execution.recorded_calls import UNRECORDED
from ..config import get_config
from ..errors import LimitExceeded, NotSupported, StreamCut
from ..interfaces import LLMClient, LLMResponse, LLMStreamChunk
from ..limits import UNSEEN_TOKENS, reservation_of, sum_usd, tokens_of, usd_of
from ..llm._openai_format import without_repeats
from ..llm._prices import CallMeter, cost_usd, price_of, recorded_form, require_price, traced
from ..llm._retries import METER
from .session import INTERRUPTED, Cancelled, LoopSession
from .state import TurnState

DELTA_EVERY = 0.02  # seconds of a streamed answer that are published as one event
MOST_OF_DELTA = 32_768  # characters of one delta, unless the client's chunk is longer: readers wait for whole events
CHARS_A_TOKEN = 3  # fewer than for any model on average, so that estimates are too large rather than too small


class ModelCalls:
    """Calls the model of a loop."""

    def __init__(
        self,
        session: LoopSession,
        model: str | None,
        max_tokens: int | None,
        options: Mapping[str, Any],
        *,
        stream: bool,
    ) -> None:
        self.session: LoopSession = session
        self.model: str | None = model
        self.max_tokens: int | None = max_tokens
        self.options: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        self.stream: bool = stream
        self.definitions: list[dict[str, Any]] | None = session.tools.to_openai_format() or None
        if self.definitions is None:
            # OpenAI rejects both options without tools. An agent without tools may inherit them.
            self.options.pop("parallel_tool_calls", None)
            if self.options.get("tool_choice") in ("auto", "none"):
                del self.options["tool_choice"]
        #: All arguments of a request except the messages.
        self.request_options: dict[str, Any] = {"tools": self.definitions, **self.options}
        limits = session.budget.strictest
        #: What reserves the calls in pools; None without pools.
        self.pooled: PooledCalls | None = session.steps.pooled(session.budget, session.client, self._requested_model)
        #: Whether tokens or cost are limited, so that the usage of a call must be estimated before it.
        self.usage_limited: bool = (
            limits.max_tokens is not None or limits.max_cost_usd is not None or self.pooled is not None
        )
        self.counted: int = 0  # messages that are part of `estimated_prompt`
        self.estimated_prompt: int = 0  # tokens of all messages so far
        self._streamed: int = 0  # characters of the current answer that were published
        self._reserved: dict[str, Any] | None = None  # for the current call
        self._meter = CallMeter(
            session.steps, session.budget, self._cost, lambda: self._with_streamed(self._reserved, self._streamed)
        )

    def need_price(self) -> None:
        """Raise UnknownPrice if a limit in USD could not be enforced."""
        session = self.session
        limits, config = session.budget.strictest, get_config()
        require_price(limits, self._requested_model() or config.default_model, config.model_prices)

    def release_tool_choice(self) -> None:
        """Let the model decide from now on whether it calls tools: otherwise a forced choice would never end."""
        given = self.options.get("tool_choice")
        if given is not None and (free := free_choice(given)) != given:
            self.options["tool_choice"] = self.request_options["tool_choice"] = free

    async def answer(self, key: str) -> dict[str, Any]:
        """Return the model's answer to the conversation so far, as it is recorded.

        Raises:
            LimitExceeded: A limit forbids the call.
        """
        session = self.session
        recorded = session.steps.recorded("model", key)
        session.copied = recorded is not UNRECORDED and session.steps.from_fork("model", key)
        if recorded is UNRECORDED:
            await session.received.take()
        else:
            session.received.replay(recorded)
        estimate = self._estimate_tokens() if self.usage_limited else 0
        if charged := session.steps.charged("model", key):
            session.budget.add_counted(charged)
        if recorded is UNRECORDED:
            try:
                recorded = await self._call_now(key, estimate)
            except BaseException:
                session.received.give_back(key)
                raise
        else:
            session.state(TurnState.STREAMING)
            session.add_work_time(session.steps.duration("model", key))
            if (in_doubt := recorded.get("doubted")) and not session.copied:
                session.budget.count_in_doubt(in_doubt)
        session.new_messages = []
        response: dict[str, Any] = recorded
        if not session.copied:
            session.budget.used(*self._usage_of(response, estimate))
        if self.usage_limited:
            self.estimated_prompt = max(self.estimated_prompt, response["usage"].get("total_tokens") or 0)
        return response

    async def _call_now(self, key: str, estimate: int) -> Any:
        """Call the model, because the journal contains no answer."""
        session = self.session
        # What calls for this step are estimated to have used that earlier executions started and did not finish.
        in_doubt = session.steps.in_doubt("model", key)
        if in_doubt:
            if self.stream and not self.max_tokens:
                in_doubt = self._with_streamed(in_doubt, await session.steps.streamed("model", key))
            session.budget.count_in_doubt(in_doubt)
        if (limit := session.budget.newly_doubtful()) is not None:
            log.warning(
                "run %s: %s=%g may be reached: used %g with estimates of interrupted model calls. The run continues. "
                "To end it here, set count_estimates=True in its RunLimits",
                session.run, limit.limit, limit.allowed, limit.used,
            )  # fmt: skip
        self._streamed = 0
        reserve = self._reserved = self._reserve(estimate) if self.usage_limited else None
        if self.pooled is None:
            return await self._within_budget(key, in_doubt)
        assert reserve is not None
        session.stop_timer()
        async with self.pooled.reserved(key, reserve, session.unless_cancelled) as pools:
            session.start_timer()
            return await self._within_budget(key, in_doubt, pools)

    async def _within_budget(self, key: str, in_doubt: dict[str, Any] | None, pools: Sequence[str] = ()) -> Any:
        session, reserve = self.session, self._reserved
        if session.budget.unlimited:
            return await self._recorded(key, in_doubt, pools)
        session.stop_timer()
        async with session.budget.reserved(reserve, waiting=session.unless_cancelled):
            session.start_timer()
            return await self._recorded(key, in_doubt, pools)

    async def _recorded(self, key: str, in_doubt: dict[str, Any] | None, pools: Sequence[str]) -> Any:
        """Call the model as a recorded step, and return its answer."""
        session, reserve = self.session, self._reserved
        session.state(TurnState.STREAMING)
        sent = session.messages if session.hooks.trim is None else await self._trimmed(session.hooks.trim)
        extra_fields = {"asked": self._request_record(sent), "doubted": in_doubt}
        call = self._traced_request if session.traced else self._request
        try:
            return await session.in_time(
                session.steps.run(
                    "model",
                    key,
                    lambda attempt: (
                        call(sent, extra_fields)
                        if self.pooled is None
                        else self._counted(key, call(sent, extra_fields))
                    ),
                    reserve=reserve,
                    mail=session.received.numbers,
                    pools=pools,
                )
            )
        except (asyncio.CancelledError, LimitExceeded, Cancelled) as error:
            if error is self._meter.spent:
                raise
            # Interrupted: the provider reports no usage.
            session.budget.count_in_doubt(self._with_streamed(reserve, self._streamed))
            raise

    async def _counted(self, key: str, call: Awaitable[dict[str, Any]]) -> dict[str, Any]:
        """Return the answer of a call, and have what it has used counted in the pools."""
        answer = await call
        assert self.pooled is not None
        usage, cost = self._usage_of(answer, self._reserved["tokens"] if self._reserved else 0)
        self.pooled.used(key, usage, cost)
        return answer

    def _with_streamed(self, reserve: dict[str, Any] | None, streamed: int) -> dict[str, Any] | None:
        """Add what was streamed to an estimate, unless `max_tokens` already bounds the whole answer."""
        if not reserve or not streamed or self.max_tokens:
            return reserve
        tokens = streamed // CHARS_A_TOKEN + 1
        cost = self._cost({"prompt_tokens": 0, "completion_tokens": tokens})
        reserved = usd_of(reserve.get("usd"))
        cost = reserved if cost is None else sum_usd(reserved or 0.0, cost)
        return reservation_of(reserve["tokens"] + tokens, cost)

    def _reserve(self, tokens: int) -> dict[str, Any]:
        """Return the most that this call may use, for the record of its start."""
        answer = self._max_answer()
        cost = self._cost({"prompt_tokens": tokens - answer, "completion_tokens": answer})
        return reservation_of(tokens, cost)

    def _usage_of(self, response: Mapping[str, Any], estimate: int) -> tuple[Mapping[str, Any], float | None]:
        """Return usage and cost of a call; if a limit needs them and they were not reported, estimates."""
        usage, cost = response["usage"], response["cost_usd"]
        cost = None if cost is None else usd_of(cost)
        if not self.usage_limited:
            return usage, cost
        if tokens_of(usage):
            if usage.get("completion_tokens") is not None or tokens_of(usage) != usage.get("prompt_tokens"):
                return usage, cost
            answer = _tokens_in(response["message"])  # some servers report only the prompt
            usage = {**usage, "completion_tokens": answer, "total_tokens": tokens_of(usage) + answer}
            return usage, self._cost(usage, response["model"])
        prompt, answer = estimate - self._max_answer(), _tokens_in(response["message"])
        usage = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
        return usage, self._cost(usage, response["model"]) if cost is None else cost

    def _requested_model(self) -> str:
        """Return the requested model, or "" if it is unknown."""
        return self.model or getattr(self.session.client, "default_model", None) or ""

    def _max_answer(self) -> int:
        return self.max_tokens or UNSEEN_TOKENS

    def _cost(self, usage: Mapping[str, Any], answered: str = "") -> float | None:
        config = get_config()
        limits = self.session.budget.strictest
        limited = limits.max_cost_usd is not None or bool(limits.pools)
        if not config.model_prices and not limited:
            return None
        # The limit used the requested model's price; some servers report another model name.
        names = [name for name in (self._requested_model(), answered) if name] + (
            [config.default_model] if limited else []
        )
        if not names:
            return None  # the model is not known yet
        priced = [name for name in names if price_of(name, config.model_prices) is not None]
        return cost_usd(usage, (priced or names)[0], config.model_prices)

    def _estimate_tokens(self) -> int:
        """Return the estimated tokens of this call, including the answer."""
        session = self.session
        for message in session.messages[self.counted :]:
            self.estimated_prompt += _tokens_in(message)
        self.counted = len(session.messages)
        return self.estimated_prompt + self._max_answer()

    async def _trimmed(self, trim: Callable[[list[dict[str, Any]]], Any]) -> list[dict[str, Any]]:
        # A copy: the hook may change the list, but not the messages in it.
        trimmed = trim(list(self.session.messages))
        if inspect.isawaitable(trimmed):
            trimmed = await trimmed
        if not isinstance(trimmed, list):
            raise must("trim", "return a list of messages", trimmed)
        return with_whole_exchanges(trimmed, self.session.messages)

    def _request_record(self, sent: list[dict[str, Any]]) -> dict[str, Any]:
        """Return those parts of the request that earlier records do not imply, so that the journal can reproduce it."""
        session = self.session
        received = session.received.current
        if session.new_messages is session.messages:
            first = session.messages[: len(session.messages) - len(received)]
            initial = getattr(session.ctx, "initial_messages", None) or []
            added = len(first) - len(initial)
            record: dict[str, Any] = (
                {"said": first[:added], "input": len(initial)}
                if added >= 0 and first[added:] == initial
                else {"said": first}
            )
        else:
            record = {"said": session.new_messages} if session.new_messages else {}
        if received:
            record["received"] = received
        if getattr(session.ctx, "owns_conversation", False):
            record["owned"] = True
        if sent is not session.messages:
            indexes = {id(message): index for index, message in enumerate(session.messages)}
            kept = [indexes.get(id(message), -1) for message in sent]
            if -1 in kept:
                record["sent"] = sent
            elif len(kept) != len(session.messages) or kept != sorted(kept):
                record["kept"] = _ranges(kept)
        return record

    def _traced_request(
        self, messages: list[dict[str, Any]], extra_fields: Mapping[str, Any]
    ) -> Awaitable[dict[str, Any]]:
        request, session = self._request(messages, extra_fields), self.session
        return traced(session.ctx, session.client, messages, self.model, self.options, request)

    async def _request(self, messages: list[dict[str, Any]], extra_fields: Mapping[str, Any]) -> dict[str, Any]:
        client, options = self.session.client, self.request_options
        partial = StreamBuffer() if self.stream else None
        token = METER.set(self._meter)
        try:
            response = await self.session.received.unless_interrupted(
                client.generate(messages=messages, **options)
                if partial is None
                else streamed(client, messages, options, self._publish, self.session.clock, partial)
            )
        finally:
            restore(METER, token)
        interrupted = response is None
        if response is None:
            response = await self._interrupted("" if partial is None else partial.text)
        message = _with_ids(response.message)
        cost = response.cost_usd
        if cost is None and not interrupted:
            cost = self._cost(response.usage or {}, response.model)
        answer = recorded_form(response, message, cost)
        for name, value in extra_fields.items():
            if value:
                answer[name] = value
        return answer

    async def _interrupted(self, text: str) -> LLMResponse:
        """Return the answer of a call that a message interrupted: what was streamed of its text."""
        if unpublished := text[self._streamed :]:
            await self._publish(unpublished)
        message = {"role": "assistant", "content": text, "metadata": {"partial": True}}
        return LLMResponse(message, {}, self._requested_model(), INTERRUPTED)

    async def _publish(self, delta: str) -> None:
        self._streamed += len(delta)
        await self.session.ctx.emit(EventType.ASSISTANT_DELTA, {"delta": delta})


async def streamed(
    client: LLMClient, messages: list[Any], options: Mapping[str, Any], publish: Callable[[str], Awaitable[None]],
    clock: Clock, received: StreamBuffer | None = None,
) -> LLMResponse:  # fmt: skip
    """Stream an answer, publish its text, and return it; a client without a stream answers with the whole text.

    `received` contains what was streamed so far, even if this is cancelled.
    """
    stream: Any = getattr(client, "stream", None)
    if stream is not None:
        try:
            chunks = stream(messages=messages, **options)
            # In a custom client, `stream` may be a coroutine that returns the chunks or raises NotSupported.
            if inspect.isawaitable(chunks):
                chunks = await chunks
            return await _stream_chunks(chunks, publish, clock, options.get("model"), received or StreamBuffer())
        except (NotImplementedError, NotSupported):
            pass
    return await client.generate(messages=messages, **options)


async def _stream_chunks(
    chunks: AsyncIterator[LLMStreamChunk], publish: Callable[[str], Awaitable[None]], clock: Clock, model: str | None,
    received: StreamBuffer,
) -> LLMResponse:  # fmt: skip
    buffered, published_at = "", clock.boot()
    try:
        async for chunk in chunks:
            buffered += chunk.delta
            received.take(chunk)
            is_due = len(buffered) >= MOST_OF_DELTA or clock.boot() - published_at >= DELTA_EVERY
            if buffered and (chunk.finish_reason is not None or is_due):
                await publish(buffered)
                buffered, published_at = "", clock.boot()
        if buffered:
            await publish(buffered)
    finally:
        if close := getattr(chunks, "aclose", None):
            await close()
    return received.whole(model)


class StreamBuffer:
    """Assembles a streamed answer of any client."""

    def __init__(self) -> None:
        self.last: LLMStreamChunk = LLMStreamChunk()  # the last chunk with a finish_reason
        self._texts: list[str] = []
        self._calls: list[Any] = []
        self._usage: dict[str, Any] = {}

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    def take(self, chunk: LLMStreamChunk) -> None:
        """Add a chunk."""
        self._texts.append(chunk.delta)
        self._calls += chunk.tool_calls or ()
        self._usage = chunk.usage or self._usage
        if chunk.finish_reason is not None:
            self.last = chunk

    def whole(self, model: str | None) -> LLMResponse:
        """Return the complete answer; StreamCut if it requests tools and was not finished."""
        last = self.last
        if last.response is not None:
            return last.response
        message: dict[str, Any] = {"role": "assistant", "content": self.text or None}
        if self._calls:
            if last.finish_reason is None:
                raise StreamCut(
                    "the stream requested tools and ended without a finish_reason. The partial answer is discarded"
                )
            message["tool_calls"] = [dict(call) for call in self._calls]
        return LLMResponse(message, self._usage, model or "", last.finish_reason or "")


def free_choice(choice: Any) -> Any:
    """Return a `tool_choice` that forces no call, with the other options of `choice`."""
    if choice in ("auto", "none") or (isinstance(choice, Mapping) and choice.get("type") in ("auto", "none")):
        return choice
    if not isinstance(choice, Mapping):
        return "auto"
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("allowed_tools"), Mapping):
        return {**choice, "allowed_tools": {**choice["allowed_tools"], "mode": "auto"}}
    if "disable_parallel_tool_use" in choice:  # Anthropic's own format
        return {"type": "auto", "disable_parallel_tool_use": choice["disable_parallel_tool_use"]}
    return "auto"


def _tokens_in(message: Mapping[str, Any]) -> int:
    content = message.get("content")
    size = len(content) if isinstance(content, str) else len(str(content))
    return (size + len(str(message.get("tool_calls") or ""))) // CHARS_A_TOKEN + 4


def _ranges(indexes: Sequence[int]) -> list[list[int]]:
    """Return indexes as [first, end] for each consecutive range; `end` is exclusive."""
    ranges: list[list[int]] = []
    for index in indexes:
        if ranges and ranges[-1][1] == index:
            ranges[-1][1] += 1
        else:
            ranges.append([index, index + 1])
    return ranges


def _with_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with a unique id for every tool call, because results refer to it.

    A call that a server sends twice counts as one call.
    """
    calls = message.get("tool_calls")
    if not calls:
        return {name: value for name, value in message.items() if name != "tool_calls"}
    seen: set[str] = set()
    named = []
    for index, call in enumerate(without_repeats(calls)):
        id_ = str(call.get("id") or f"call_{index}")
        while id_ in seen:
            id_ += "_"
        seen.add(id_)
        named.append({**call, "id": id_})
    return {**message, "tool_calls": named}


_CALL, _RESULT = "tool_use", "tool_result"
_EXCHANGE: Final = frozenset({_CALL, _RESULT})


def with_whole_exchanges(trimmed: Sequence[Any], whole: Sequence[Any]) -> list[Any]:
    """Return trimmed messages that keep each tool call with its result, and each result with its call.

    Providers reject other messages. A call without its result is removed together with its other results. A result
    without its call is removed too. Results that the model has not seen yet stay: without them, it would call again.

    Args:
        trimmed: What a trim hook returned.
        whole: The messages before.
    """
    cut = _cut(trimmed, _Owners(whole))
    if not cut:
        return list(trimmed)
    unseen = _unseen(whole)
    restored = [each for each in _parts(trimmed, unseen, whole) if each in cut]
    found: list[Any] = []
    for at, message in enumerate(trimmed):
        if restored and at == restored[0]:
            kept = [trimmed[each] for each in restored]
            found += [next((one for one in kept if _ids(one) == _ids(each)), each) for each in unseen]
        if at in restored:
            continue
        rest = _without_exchange(message) if at in cut else message
        if rest is not None:
            found.append(rest)
    return found


class _Owners:
    """Which answer requested the calls of a result.

    The ids are not enough: some servers number the calls of each answer from the beginning.
    """

    def __init__(self, messages: Sequence[Any]) -> None:
        self._pairs = [
            (messages[each], messages[answer])
            for answer, results, _ in _exchanges(messages)
            if answer is not None
            for each in results
        ]
        self._answers = {id(result): answer for result, answer in self._pairs}

    def fit(self, results: Sequence[Any], answer: Any) -> bool:
        """Return whether results may belong to an answer with their ids. A hook may have copied or changed them."""
        owners = [found for each in results if (found := self._of(each))]
        if any(answer == each for _, each in self._pairs):
            return all(answer in each for each in owners)
        return not owners or any(all(each in other for other in owners) for each in owners[0])

    def _of(self, result: Any) -> list[Any]:
        owner = self._answers.get(id(result))
        return [answer for each, answer in self._pairs if each == result] if owner is None else [owner]


def _cut(messages: Sequence[Any], owners: _Owners) -> set[int]:
    """Return the positions of calls without all of their results, and of results without their call."""
    cut = set[int]()
    for answer, results, missing in _exchanges(messages):
        if answer is None:
            cut.update(results)
        elif missing or not owners.fit([messages[each] for each in results], messages[answer]):
            cut |= {answer, *results}
    return cut


def _exchanges(messages: Sequence[Any]) -> Iterator[tuple[int | None, list[int], set[Any]]]:
    """Yield the positions of an answer with calls and of the results after it, and the ids of calls without a result.

    For a result that belongs to no call, the answer is None.
    """
    answer: int | None = None
    results: list[int] = []
    missing: set[Any] = set()
    for at, message in enumerate(messages):
        calls, found = _ids(message)
        if found and answer is not None and found <= missing:
            results.append(at)
            missing -= found
        elif found:
            yield None, [at], set()
        if not found or calls:  # the results of an answer follow it directly
            if answer is not None:
                yield answer, results, missing
            answer, results, missing = (at if calls else None), [], set(calls)
    if answer is not None:
        yield answer, results, missing


def _unseen(messages: Sequence[Any]) -> list[Any]:
    """Return the last answer and the results of its calls, if no other answer follows."""
    exchanges = [each for each in _exchanges(messages) if each[0] is not None]
    if not exchanges:
        return []
    answer, results, _ = exchanges[-1]
    assert answer is not None
    if any(_role(each) == "assistant" for each in messages[answer + 1 :]):
        return []
    return [messages[answer], *(messages[each] for each in results)]


def _parts(trimmed: Sequence[Any], unseen: Sequence[Any], whole: Sequence[Any]) -> list[int]:
    """Return the positions of the messages of `unseen`, or of the messages by which a hook replaced them."""
    calls = _ids(unseen[0])[0] if unseen else frozenset[Any]()
    found: list[int] = []
    for at in range(len(trimmed) - 1, -1, -1):
        message = trimmed[at]
        requested, answered = _ids(message)
        ids = requested | answered
        if ids and ids <= calls and (message in unseen or message not in whole):
            found.append(at)
        if _role(message) == "assistant":
            break
    return found[::-1]


def _ids(message: Any) -> tuple[frozenset[Any], frozenset[Any]]:
    """Return the ids of the calls that a message requests, and the ids of the calls whose results it contains."""
    if not isinstance(message, Mapping):
        return frozenset(), frozenset()
    content = message.get("content")
    blocks = [each for each in content if isinstance(each, Mapping)] if isinstance(content, list) else []
    calls = [each.get("id") for each in message.get("tool_calls") or () if isinstance(each, Mapping)]
    calls += [each.get("id") for each in blocks if each.get("type") == _CALL]
    results = [each.get("tool_use_id") for each in blocks if each.get("type") == _RESULT]
    if message.get("role") == "tool":
        results.append(message.get("tool_call_id"))
    return frozenset(calls), frozenset(results)


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _without_exchange(message: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what a message says besides tool calls and results; None if that is nothing."""
    if message.get("role") == "tool":
        return None
    content = message.get("content")
    if isinstance(content, list):
        content = [each for each in content if not (isinstance(each, Mapping) and each.get("type") in _EXCHANGE)]
    if not content or (isinstance(content, str) and not content.strip()):
        return None
    rest = {name: value for name, value in message.items() if name not in ("tool_calls", "provider_fields")}
    return {**rest, "content": content}
