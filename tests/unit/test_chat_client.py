"""The client every provider shares, over a scripted wire: faults, retries, time limits, streams, and what it says."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import math
import pickle
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pytest

from agent_runtime_core.config import configure
from agent_runtime_core.errors import (
    AgentRuntimeError,
    AuthenticationFailed,
    CircuitOpen,
    ContextOverflow,
    InvalidArgument,
    ModelNotFound,
    NotConfigured,
    NotSupported,
    ProviderError,
    ProviderTimeout,
    ProviderUnavailable,
    RateLimited,
    RequestRefused,
    StreamCut,
)
from agent_runtime_core.interfaces import LLMResponse, LLMStreamChunk, ToolCallDict
from agent_runtime_core.llm._client import RETRY_BUDGET, ChatClient, Retries, RetryBudget, forbid_remote
from agent_runtime_core.llm._provider import Chunk, Completion, ProviderAdapter, Request, Timeouts
from agent_runtime_core.llm._retries import SHARED, Breakers
from agent_runtime_core.testing.clock import VirtualClock
from tests.support.cases import for_each

ASK = [{"role": "user", "content": "hello"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
USAGE = {"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100, "cached_tokens": 400}
ANSWER = Completion({"role": "assistant", "content": "hello there"}, USAGE, "gpt-4o-2024-08-06", "stop", raw="raw")
CALLING = Completion({"role": "assistant", "content": None, "tool_calls": [CALL]}, USAGE, "gpt-4o", "tool_calls")
# Only for an answer that never arrives. On a busy machine, one that does arrive may take longer than this.
FAST = Timeouts(first_byte=0.02, between_chunks=0.02, total=300.0)
STALLED = Timeouts(first_byte=600, between_chunks=0.02, total=300.0)
#: For an answer that never arrives, followed by one that does.
BRIEF = Timeouts(first_byte=1.0, between_chunks=1.0, total=300.0)
PATIENT = Timeouts()


class Sdk(Exception):
    """An error as an SDK raises it."""

    def __init__(self, status: int | None, text: str = "", code: str = "", retry_after: float | None = None) -> None:
        self.status, self.code, self.retry_after = status, code, retry_after
        super().__init__(text or f"it said {status}")


def _translated(error: Exception, model: str) -> ProviderError | None:
    if isinstance(error, ConnectionError):
        return ProviderUnavailable(str(error))
    if isinstance(error, TimeoutError):
        return ProviderTimeout("no connection within 10 s", code="connect")
    if not isinstance(error, Sdk):
        return None
    kinds: dict[int | None, type[ProviderError]] = {
        401: AuthenticationFailed,
        403: AuthenticationFailed,
        404: ModelNotFound,
        413: ContextOverflow,
        429: RateLimited,
        None: StreamCut,
    }
    kind = kinds.get(error.status) or (ProviderUnavailable if (error.status or 0) >= 500 else RequestRefused)
    if error.code == "context_length_exceeded":
        kind = ContextOverflow
    return kind(str(error), status=error.status, code=error.code, retry_after=error.retry_after)


HANG = object()
Turn: TypeAlias = Any
"""An error to raise, HANG, an Answer, or for a stream a list of those, texts and Pieces, one after the other."""


@dataclass
class ScriptedWire(ProviderAdapter):
    """Answers with one turn of its script after the other; the last one repeats."""

    script: Sequence[Turn]
    provider: str = "openai"
    remote: bool = True
    asked: list[Any] = field(default_factory=list)
    opened: int = 0
    closed: int = 0
    hanging: asyncio.Event = field(default_factory=asyncio.Event)

    def _turn(self, request: Any) -> Turn:
        self.asked.append(request)
        return self.script[min(len(self.asked), len(self.script)) - 1]

    async def _play(self, step: Turn) -> Any:
        if step is HANG:
            self.hanging.set()
            await asyncio.Event().wait()
        if isinstance(step, BaseException):
            raise step
        return step

    async def request(self, request: Request) -> Completion:
        turn = self._turn(request)
        for step in turn if isinstance(turn, list) else [turn]:
            answer = await self._play(step)
        assert isinstance(answer, Completion)
        return answer

    async def stream(self, request: Request) -> AsyncIterator[Chunk]:
        turn = self._turn(request)
        self.opened += 1
        try:
            for step in turn if isinstance(turn, list) else [turn]:
                told = await self._play(step)
                if isinstance(told, Completion):
                    yield Chunk(answer=told)
                else:
                    yield told if isinstance(told, Chunk) else Chunk(told)
        finally:
            await asyncio.sleep(0)  # closing takes the loop
            self.closed += 1

    def translate(self, error: Exception, model: str) -> ProviderError | None:
        return _translated(error, model)

    async def embed(self, texts: Sequence[str], model: str | None, timeouts: Timeouts) -> list[list[float]]:
        await self._play(self._turn((texts, model, timeouts)))
        return [[float(len(text))] for text in texts]

    async def close(self) -> None:
        self.closed += 1


class Hasty(VirtualClock):
    """A sleep is over at once, and time has passed."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.advance(seconds)
        await asyncio.sleep(0)


def _client(*script: Turn, clock: Hasty | None = None, **options: Any) -> tuple[ChatClient, ScriptedWire, Hasty]:
    wire, clock = ScriptedWire(script), clock or Hasty()
    options = {"timeouts": PATIENT, "default_model": "gpt-4o", **options}
    return ChatClient(wire, clock=clock, **options), wire, clock


async def _chunks(client: ChatClient, into: list[LLMStreamChunk] | None = None, **options: Any) -> list[LLMStreamChunk]:
    """What a stream gives; `into` has what it gave before it failed."""
    chunks: list[LLMStreamChunk] = [] if into is None else into
    async for chunk in client.stream(ASK, **options):
        chunks.append(chunk)
    return chunks


# Forty faults (RELIABILITY.md, F59 to F61, F64, bar 31): how one asks, what the provider does, what comes of it, and
# how often the provider is asked. "ask" is generate(), "drain" is generate(stream=True), "pour" is stream().


@dataclass
class Fault:
    what: str
    how: str
    script: list[Turn]
    outcome: type[BaseException] | str
    asked: int
    slept_at_least: float = 0.0
    timeouts: Timeouts = PATIENT
    retries: Retries = field(default_factory=Retries)


def _status(status: int | None, **about: Any) -> Sdk:
    return Sdk(status, **about)


TEXT = ["hel", "lo ", "there", ANSWER]
GONE = ConnectionResetError("connection reset by peer")
SHORT = Timeouts(first_byte=600, between_chunks=600, total=0.02)
FAULTS = [
    Fault("429 without Retry-After", "ask", [_status(429), ANSWER], "answer", 2),
    Fault("429 with Retry-After", "ask", [_status(429, retry_after=7), ANSWER], "answer", 2, 7),
    Fault("429 with Retry-After in a stream", "pour", [_status(429, retry_after=7), TEXT], "answer", 2, 7),
    Fault("429 twice with Retry-After", "ask", [_status(429, retry_after=9)] * 2 + [ANSWER], "answer", 3, 18),
    Fault("429 with Retry-After at the cap", "ask", [_status(429, retry_after=60), ANSWER], "answer", 2, 60),
    Fault("429 with Retry-After beyond the cap", "ask", [_status(429, retry_after=61)], RateLimited, 1),
    Fault("429 with Retry-After beyond the cap, drained", "drain", [_status(429, retry_after=3600)], RateLimited, 1),
    Fault("429 with Retry-After 0", "ask", [_status(429, retry_after=0), ANSWER], "answer", 2),
    Fault("429 for ever", "ask", [_status(429)], RateLimited, 4),
    Fault("500 once", "ask", [_status(500), ANSWER], "answer", 2),
    Fault("502 once, drained", "drain", [_status(502), TEXT], "answer", 2),
    Fault("503 with Retry-After", "ask", [_status(503, retry_after=3), ANSWER], "answer", 2, 3),
    Fault("529 three times", "ask", [_status(529)] * 3 + [ANSWER], "answer", 4),
    Fault("529 in a stream's first event", "pour", [[_status(529)], TEXT], "answer", 2),
    Fault("500 for ever", "ask", [_status(500)], ProviderUnavailable, 4),
    Fault("500 for ever in a stream", "pour", [_status(500)], ProviderUnavailable, 4),
    Fault("500, 429, cut, then well", "drain", [_status(500), _status(429), ["a"], TEXT], "answer", 4),
    Fault("500 and no retries", "ask", [_status(500)], ProviderUnavailable, 1, retries=Retries(tries=1)),
    Fault("connection refused once", "ask", [ConnectionRefusedError("refused"), ANSWER], "answer", 2),
    Fault("connection refused for ever", "ask", [ConnectionRefusedError("refused")], ProviderUnavailable, 4),
    Fault("connecting takes too long", "ask", [TimeoutError(), ANSWER], "answer", 2),
    Fault("no first byte once", "pour", [HANG, TEXT], "answer", 2, timeouts=BRIEF),
    Fault("no first byte ever", "pour", [HANG], ProviderTimeout, 4, timeouts=FAST),
    Fault("a stall after the first text", "pour", [["hel", HANG]], ProviderTimeout, 1, timeouts=STALLED),
    Fault("a stall after the first text, drained", "drain", [["hel", HANG], TEXT], "answer", 2, timeouts=BRIEF),
    Fault("no whole answer in the time for all", "ask", [HANG], ProviderTimeout, 1, timeouts=SHORT),
    Fault("no whole stream in the time for all", "drain", [["a", HANG]], ProviderTimeout, 1, timeouts=SHORT),
    Fault("a stream without anything", "pour", [[], TEXT], "answer", 2),
    Fault("a stream without anything, always", "pour", [[]], StreamCut, 4),
    Fault("a stream ends after its first text", "pour", [["hel"]], StreamCut, 1),
    Fault("a stream ends after its first text, drained", "drain", [["hel"], TEXT], "answer", 2),
    Fault("a connection lost after the first text", "pour", [["hel", GONE]], ProviderUnavailable, 1),
    Fault("a connection lost after the first text, drained", "drain", [["hel", GONE], TEXT], "answer", 2),
    Fault("a stream cut before its first text", "pour", [[Chunk(), _status(None)], TEXT], "answer", 2),
    Fault("401", "ask", [_status(401)], AuthenticationFailed, 1),
    Fault("403 in a stream", "pour", [_status(403)], AuthenticationFailed, 1),
    Fault("404", "ask", [_status(404)], ModelNotFound, 1),
    Fault("400", "drain", [_status(400)], RequestRefused, 1),
    Fault("context overflow", "ask", [_status(400, code="context_length_exceeded")], ContextOverflow, 1),
    Fault("an error nobody can translate", "ask", [ZeroDivisionError("ours")], ZeroDivisionError, 1),
]


async def _attempt(how: str, client: ChatClient, given: list[LLMStreamChunk]) -> LLMResponse:
    if how == "pour":
        await _chunks(client, given)
        assert given[-1].response is not None
        return given[-1].response
    return await client.generate(ASK, stream=how == "drain")


@for_each("fault", FAULTS, ids=lambda fault: fault.what)
async def test_forty_faults_end_as_the_table_says(fault: Fault) -> None:
    client, wire, clock = _client(*fault.script, timeouts=fault.timeouts, retries=fault.retries)
    given: list[LLMStreamChunk] = []
    if fault.outcome == "answer":
        response = await _attempt(fault.how, client, given)
        assert response.message == ANSWER.message
        assert "".join(chunk.delta for chunk in given) in ("", "hello there")
    else:
        assert isinstance(fault.outcome, type)
        with pytest.raises(fault.outcome) as raised:
            await _attempt(fault.how, client, given)
        if isinstance(raised.value, ProviderError):
            assert (raised.value.provider, raised.value.model) == ("openai", "gpt-4o")
            assert str(raised.value).startswith("openai, model 'gpt-4o': ")
        assert all(chunk.response is None and chunk.tool_calls is None for chunk in given)
    assert len(wire.asked) == fault.asked
    assert len(clock.slept) == fault.asked - 1
    assert sum(clock.slept) >= fault.slept_at_least
    assert wire.opened == wire.closed


def test_there_are_forty() -> None:
    assert len({fault.what for fault in FAULTS}) == len(FAULTS) == 40


# What is asked, and what is answered.


async def test_a_request_says_what_the_caller_said() -> None:
    client, wire, _ = _client(ANSWER)
    tool = {"type": "function", "function": {"name": "look"}}
    await client.generate(ASK, model="o9", tools=[tool], temperature=0.5, max_tokens=7, seed=3)
    await client.generate(ASK, tools=[])
    assert wire.asked == [
        Request(ASK, "o9", [tool], 0.5, 7, {"seed": 3}, PATIENT),
        Request(ASK, "gpt-4o", None, None, None, {}, PATIENT),
    ]


async def test_what_becomes_of_the_list_later_changes_no_request() -> None:
    client, wire, _ = _client(ANSWER)
    messages = [*ASK]
    response = await client.generate(messages)
    messages.append(response.message)
    assert wire.asked[0].messages == ASK


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_has_usage_and_cost(stream: bool) -> None:
    configure(model_prices={"gpt-4o": {"input": 2.5, "output": 10, "cached_input": 1.25}})
    client, _, _ = _client([ANSWER])
    response = await client.generate(ASK, stream=stream)
    assert response.cost_usd == pytest.approx((600 * 2.5 + 400 * 1.25 + 100 * 10) / 1e6)
    response.cost_usd = None
    said = {"role": "assistant", "content": "hello there"}
    assert response == LLMResponse(said, USAGE, "gpt-4o-2024-08-06", "stop", "raw")
    assert response.usage is not USAGE


async def test_the_price_is_that_of_the_model_asked_for_or_else_of_the_one_that_answered() -> None:
    configure(model_prices={"gpt-4o": {"input": 1, "output": 0}, "mine": {"input": 5, "output": 0}})
    client, _, _ = _client(ANSWER)
    costs = [(await client.generate(ASK, model=model)).cost_usd for model in ("mine", "an-alias", "gpt-4o")]
    assert costs == pytest.approx([0.005, 0.001, 0.001])


async def test_a_stream_gives_text_and_then_the_whole_answer() -> None:
    client, wire, _ = _client(["hel", Chunk(), "lo", CALLING])
    first, second, last = await _chunks(client)
    assert [first, second] == [LLMStreamChunk("hel"), LLMStreamChunk("lo")]
    assert (last.delta, last.finish_reason, last.usage) == ("", "tool_calls", USAGE)
    assert last.tool_calls == [CALL]
    assert isinstance(last.tool_calls[0], ToolCallDict)
    assert last.tool_calls[0].name == "look"
    assert last.response is not None
    assert last.response.message == CALLING.message
    assert (wire.opened, wire.closed) == (1, 1)


async def test_a_stream_without_tool_calls_says_none() -> None:
    client, _, _ = _client(TEXT)
    assert (await _chunks(client))[-1].tool_calls is None


async def test_streaming_takes_the_same_options() -> None:
    client, wire, _ = _client(TEXT)
    await _chunks(client, model="o9", temperature=0.1, max_tokens=9, seed=1)
    assert wire.asked == [Request(ASK, "o9", None, 0.1, 9, {"seed": 1}, PATIENT)]


@pytest.mark.parametrize("cut", range(6))
async def test_no_tool_call_comes_out_of_a_stream_that_is_cut(cut: int) -> None:
    turn = ["a", "b", Chunk(), "c", Chunk(), CALLING]
    client, wire, _ = _client([*turn[:cut], GONE], retries=Retries(tries=2))
    given: list[LLMStreamChunk] = []
    with pytest.raises(ProviderUnavailable):
        await _chunks(client, given)
    with pytest.raises(ProviderUnavailable):
        await client.generate(ASK, stream=True)
    assert all(chunk.tool_calls is None and chunk.response is None and chunk.delta for chunk in given)
    assert wire.opened == wire.closed


async def test_what_belongs_to_no_chat_is_retried_too() -> None:
    client, wire, _ = _client(_status(500), None)
    assert await client.embed(["ab", "c"]) == [[2.0], [1.0]]
    assert wire.asked[1] == (["ab", "c"], None, PATIENT)


async def test_what_a_provider_has_not_is_said_once_and_not_retried() -> None:
    client, _, clock = _client(ANSWER)
    with pytest.raises(NotSupported, match=r"openai does not support moderate\(\)"):
        await client.moderate("x")
    with pytest.raises(NotSupported, match=r"openai does not support count_tokens\(\)"):
        await client.count_tokens(ASK)
    assert clock.slept == []


async def test_a_call_that_can_ask_nothing_is_refused_here() -> None:
    client, wire, _ = _client(ANSWER, default_model="")
    with pytest.raises(NotConfigured, match=r"no model for openai. Pass model=.*configure\(default_model"):
        await client.generate(ASK)
    with pytest.raises(InvalidArgument, match="messages must not be empty"):
        await client.generate([], model="x")
    with pytest.raises(InvalidArgument, match="messages must not be empty"):
        await anext(client.stream([], model="x"))
    assert wire.asked == []


async def test_closing_closes_the_wire() -> None:
    client, wire, _ = _client(ANSWER)
    await client.close()
    assert wire.closed == 1


# Waiting and trying again.


@pytest.mark.parametrize(("n", "window"), [(0, 0.5), (1, 1.0), (2, 2.0), (6, 30.0)])
async def test_waits_are_spread_over_their_whole_window(n: int, window: float) -> None:
    clock, drawn = Hasty(), []
    for _ in range(1000):
        retries = Retries(tries=n + 2)
        breakers = Breakers(clock, after=1000)
        client, _, _ = _client(
            *[_status(500)] * (n + 1), ANSWER, clock=clock, retries=retries, breakers=breakers, timeouts=Timeouts()
        )
        clock.slept.clear()
        await client.generate(ASK)
        drawn.append(clock.slept[n])
    assert max(drawn) - min(drawn) >= 0.8 * window
    assert 0 <= min(drawn) <= max(drawn) <= window
    assert sum(drawn) / 1000 == pytest.approx(window / 2, rel=0.1)


async def test_those_told_to_come_back_together_do_not() -> None:
    clock, waits = Hasty(), []
    for _ in range(1000):
        client, _, _ = _client(_status(429, retry_after=10), ANSWER, clock=clock)
        clock.slept.clear()
        await client.generate(ASK)
        waits.append(clock.slept[0])
    assert min(waits) >= 10
    assert max(waits) <= 10.5
    assert max(waits) - min(waits) >= 0.4


async def test_a_wait_beyond_the_cap_is_said() -> None:
    client, _, clock = _client(_status(429, retry_after=90), ANSWER)
    with pytest.raises(RateLimited, match="asks to wait 90 s, more than retry_after_cap=60") as raised:
        await client.generate(ASK)
    assert raised.value.retry_after == 90
    assert clock.slept == []


async def test_no_wait_goes_beyond_the_time_for_all() -> None:
    client, wire, clock = _client(_status(429, retry_after=40), timeouts=Timeouts(total=100))
    with pytest.raises(RateLimited):
        await client.generate(ASK)
    assert len(wire.asked) == 3
    assert clock.boot() < 100


async def test_a_run_has_one_budget_of_retries_for_all_its_calls() -> None:
    client, wire, _ = _client(_status(500), ANSWER, _status(500), ANSWER, _status(500), ANSWER)
    budget = RetryBudget(left=2)
    token = RETRY_BUDGET.set(budget)
    try:
        for _ in range(2):
            await client.generate(ASK)
        assert budget.left == 0
        with pytest.raises(ProviderUnavailable):
            await client.generate(ASK)
        assert len(wire.asked) == 5
        await client.generate(ASK)
    finally:
        RETRY_BUDGET.reset(token)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_attempts", 0),
        ("max_attempts", None),
        ("tries", 0),
        ("tries", True),
        ("tries", 1.5),
        ("base", -1),
        ("cap", float("nan")),
        ("retry_after_cap", None),
    ],
)
def test_retries_that_make_no_sense_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} must be "):
        Retries(**{name: value})


@for_each("name", ["connect", "first_byte", "between_chunks", "total"])
@for_each("seconds", [0, -1, math.nan, True, "10", None])
def test_a_timeout_is_a_number_of_seconds(name: str, seconds: Any) -> None:
    with pytest.raises(
        InvalidArgument, match=f"{name} must be a number of seconds above 0, or math.inf, got {seconds!r}"
    ):
        Timeouts(**{name: seconds})
    assert getattr(Timeouts(**{name: math.inf}), name) == math.inf


@pytest.mark.parametrize("wrong", ["hello", {"role": "user", "content": "hello"}, ["hello"], [None], 5], ids=repr)
async def test_what_is_no_message_is_not_sent(wrong: Any) -> None:
    client, wire, _ = _client(ANSWER)
    for ask in (client.generate, client.count_tokens, lambda messages: anext(client.stream(messages))):
        with pytest.raises(InvalidArgument, match="messages must be a list of dicts"):
            await ask(wrong)
    assert wire.asked == []


@pytest.mark.parametrize("hidden", [False, True])
async def test_half_a_character_is_not_sent_twice(hidden: bool) -> None:
    error: Exception = UnicodeEncodeError("utf-8", "hi \ud83d", 3, 4, "surrogates not allowed")
    if hidden:
        sdk = Sdk(500, "it made something else of that")
        sdk.__context__ = error
        error = sdk
    client, wire, _ = _client(error)
    for ask in (client.generate, lambda messages: anext(client.stream(messages))):
        with pytest.raises(InvalidArgument, match=r"must not contain a lone surrogate, got '\\ud83d'"):
            await ask(ASK)
    assert len(wire.asked) == 2


@pytest.mark.parametrize("wrong", ["hello", b"hello", [1], [None], None, 5], ids=repr)
async def test_one_text_is_not_taken_for_a_list_of_letters(wrong: Any) -> None:
    client, wire, _ = _client(ANSWER)
    with pytest.raises(InvalidArgument, match="texts must be a list of strings"):
        await client.embed(wrong)
    assert wire.asked == []


# Limits of time, and letting go.


@pytest.mark.parametrize(
    ("turn", "timeouts", "how", "said"),
    [
        ([HANG], FAST, "pour", "the answer did not begin within timeouts.first_byte=0.02 s"),
        (["a", HANG], STALLED, "pour", "the stream stalled within timeouts.between_chunks=0.02 s"),
        (["a", HANG], SHORT, "pour", "the answer was not complete within timeouts.total=0.02 s"),
        ([HANG], SHORT, "ask", "the answer was not complete within timeouts.total=0.02 s"),
        ([TimeoutError()], FAST, "ask", "no connection within 10 s"),
    ],
)
async def test_a_timeout_says_which_one_it_was(turn: Turn, timeouts: Timeouts, how: str, said: str) -> None:
    client, wire, _ = _client(turn, timeouts=timeouts, retries=Retries(tries=1))
    with pytest.raises(ProviderTimeout, match=said) as raised:
        await _attempt(how, client, [])
    assert raised.value.code in {"first_byte", "between_chunks", "total", "connect"}
    assert wire.opened == wire.closed


async def test_the_time_for_a_first_byte_is_no_limit_for_an_answer_in_one_piece() -> None:
    class Slow(ScriptedWire):
        async def request(self, request: Request) -> Completion:
            await asyncio.sleep(0.05)
            return ANSWER

    client = ChatClient(Slow([]), default_model="x", timeouts=FAST, clock=Hasty())
    assert (await client.generate(ASK)).finish_reason == "stop"


async def test_signs_of_life_without_text_keep_a_stream_alive_and_allow_a_retry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    now = [loop.time()]
    monkeypatch.setattr(loop, "time", lambda: now[0])

    class Dripping(ScriptedWire):
        async def stream(self, request: Request) -> AsyncIterator[Chunk]:
            self.asked.append(request)
            for _ in range(8):
                now[0] += 0.06
                for _ in range(3):  # whatever is due comes to its turn
                    await asyncio.sleep(0)
                yield Chunk()
            if len(self.asked) == 1:
                raise GONE
            yield Chunk(answer=CALLING)

    wire = Dripping([])
    patient = Timeouts(first_byte=0.1, between_chunks=0.1)
    client = ChatClient(wire, default_model="x", timeouts=patient, clock=Hasty())
    assert [chunk.tool_calls for chunk in await _chunks(client)] == [[CALL]]
    assert len(wire.asked) == 2


async def test_an_sdk_that_turns_a_cancellation_into_its_own_error_is_a_timeout_all_the_same() -> None:
    class Stubborn(ScriptedWire):
        async def request(self, request: Request) -> Completion:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise Sdk(500) from None
            raise AssertionError

    client = ChatClient(Stubborn([]), default_model="x", timeouts=SHORT, clock=Hasty())
    with pytest.raises(ProviderTimeout, match="total"):
        await client.generate(ASK)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_stream_left_early_is_closed() -> None:
    client, wire, _ = _client(TEXT)
    stream = client.stream(ASK)
    assert (await anext(stream)).delta == "hel"
    assert (wire.opened, wire.closed) == (1, 0)
    await stream.aclose()  # type: ignore[attr-defined]
    assert wire.closed == 1


async def test_a_stream_nobody_holds_is_closed() -> None:
    client, wire, _ = _client(TEXT)
    async for _ in client.stream(ASK):
        break
    gc.collect()
    for _ in range(20):
        await asyncio.sleep(0)
    assert (wire.opened, wire.closed) == (1, 1)


@pytest.mark.parametrize("how", ["ask", "drain", "pour"])
async def test_a_cancelled_call_lets_go_and_is_cancelled(how: str) -> None:
    client, wire, clock = _client([HANG] if how == "ask" else ["a", HANG], timeouts=Timeouts())
    task = asyncio.ensure_future(_attempt(how, client, []))
    await wire.hanging.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert wire.opened == wire.closed
    assert len(wire.asked) == 1
    assert clock.slept == []


async def test_a_connection_that_does_not_close_well_spoils_no_answer() -> None:
    class Sticky(ScriptedWire):
        async def stream(self, request: Request) -> AsyncIterator[Chunk]:
            try:
                yield Chunk(answer=ANSWER)
            finally:
                raise GONE

    client = ChatClient(Sticky([]), default_model="x", clock=Hasty())
    assert (await client.generate(ASK, stream=True)).message == ANSWER.message


# The breaker.


async def test_a_provider_that_is_down_is_soon_left_alone_and_probed_once_a_window() -> None:
    client, wire, clock = _client(_status(500))
    with pytest.raises(ProviderUnavailable):
        await client.generate(ASK)
    with pytest.raises(CircuitOpen) as raised:
        await client.generate(ASK)
    assert len(wire.asked) == 5
    assert isinstance(raised.value.__cause__, ProviderUnavailable)
    assert raised.value.after == pytest.approx(30)
    for window in (30, 60, 120, 240, 300):
        for _ in range(10):
            with pytest.raises(CircuitOpen):
                await client.generate(ASK)
        before = len(wire.asked)
        clock.advance(window)
        with pytest.raises(CircuitOpen):
            await client.generate(ASK)
        assert len(wire.asked) == before + 1
    clock.advance(300)
    wire.script = [ANSWER]
    await client.generate(ASK)
    await asyncio.gather(*(client.generate(ASK) for _ in range(9)))


async def test_while_one_call_tries_it_the_others_do_not() -> None:
    client, wire, clock = _client(_status(500), timeouts=Timeouts(), retries=Retries(tries=1))
    for _ in range(5):
        with pytest.raises(ProviderUnavailable):
            await client.generate(ASK)
    clock.advance(30)
    wire.script = [HANG]
    probe = asyncio.ensure_future(client.generate(ASK))
    await wire.hanging.wait()
    for how in ("ask", "drain", "pour"):
        with pytest.raises(CircuitOpen, match="One call is probing it now"):
            await _attempt(how, client, [])
    assert len(wire.asked) == 6
    probe.cancel()
    with pytest.raises(asyncio.CancelledError):
        await probe
    wire.script = [TEXT]
    assert (await _chunks(client))[-1].response is not None
    assert (await client.generate(ASK, stream=True)).finish_reason == "stop"


async def test_leaving_a_stream_early_frees_the_probe() -> None:
    client, wire, clock = _client(_status(500), retries=Retries(tries=1))
    for _ in range(5):
        with pytest.raises(ProviderUnavailable):
            await client.generate(ASK)
    clock.advance(30)
    wire.script = [TEXT]
    stream = client.stream(ASK)
    await anext(stream)
    with pytest.raises(CircuitOpen):
        await client.generate(ASK)
    await stream.aclose()  # type: ignore[attr-defined]
    assert (await client.generate(ASK, stream=True)).finish_reason == "stop"


@pytest.mark.parametrize("how", ["ask", "drain", "pour"])
async def test_an_answer_ends_a_row_of_faults(how: str) -> None:
    client, wire, _ = _client(_status(500), retries=Retries(tries=1))
    for _ in range(5):
        for _ in range(4):
            with pytest.raises(ProviderUnavailable):
                await _attempt(how, client, [])
        wire.script = [[ANSWER]]
        await _attempt(how, client, [])
        wire.script = [_status(500)]


async def test_a_bad_request_does_not_open_it() -> None:
    client, wire, _ = _client(_status(400))
    for _ in range(20):
        with pytest.raises(RequestRefused):
            await client.generate(ASK)
    assert len(wire.asked) == 20


async def test_clients_of_one_endpoint_share_a_breaker_and_others_do_not() -> None:
    class There(ScriptedWire):
        endpoint = "https://api.example/v1/of-this-test"

    once = Retries(tries=1)
    wires = [There([_status(500)]), There([ANSWER]), ScriptedWire([_status(500)]), ScriptedWire([ANSWER])]
    down, same, elsewhere, other = (ChatClient(wire, default_model="gpt-4o", retries=once) for wire in wires)
    try:
        for _ in range(5):
            for client in (down, elsewhere):
                with pytest.raises(ProviderUnavailable):
                    await client.generate(ASK)
        with pytest.raises(CircuitOpen):
            await same.generate(ASK)
        await same.generate(ASK, model="another")
        with pytest.raises(CircuitOpen):
            await elsewhere.generate(ASK)
        await other.generate(ASK)
    finally:
        SHARED._circuits.clear()


# What is said.


@pytest.mark.parametrize(
    ("error", "ways_out"),
    [
        (_status(401), ["the API key was rejected with status 401", "configure(openai_api_key=...)", "OPENAI_API_KEY"]),
        (_status(403, text="your country is not served"), ["your country is not served", "OPENAI_API_KEY"]),
        (_status(404, text="no such model"), ["no such model", "Check model=", "configure(default_model=...)"]),
        (_status(413, text="129000 tokens"), ["129000 tokens", "Send fewer or shorter messages", "trim"]),
        (_status(429, retry_after=100), ["Send fewer requests", "asks to wait 100 s"]),
        (_status(400, text="bad\n  schema"), ["openai, model 'gpt-4o': bad schema"]),
        (_status(500, text="x" * 5000), ["xxx…"]),
    ],
)
async def test_an_error_says_who_what_and_the_way_out(error: Sdk, ways_out: list[str]) -> None:
    client, _, _ = _client(error, retries=Retries(tries=2, base=0))
    with pytest.raises(ProviderError) as raised:
        await client.generate(ASK)
    for part in ways_out:
        assert part in str(raised.value)
    assert len(str(raised.value)) < 600
    assert raised.value.status == error.status


async def test_a_wrong_key_that_a_server_repeats_is_not_shown() -> None:
    client, _, _ = _client(_status(401, text="wrong key sk-canary-123"))
    with pytest.raises(AuthenticationFailed) as raised:
        await client.generate(ASK)
    assert "canary" not in "".join(traceback.format_exception(raised.value))


async def test_an_error_that_is_not_the_providers_goes_through_as_it_is() -> None:
    mine = ZeroDivisionError("mine")
    client, wire, _ = _client(mine)
    for _ in range(9):
        with pytest.raises(ZeroDivisionError) as raised:
            await client.generate(ASK)
        assert raised.value is mine
    assert len(wire.asked) == 9


async def test_an_error_of_this_library_from_a_wire_is_kept() -> None:
    class Wired(ScriptedWire):
        def translate(self, error: Exception, model: str) -> ProviderError | None:
            raise AssertionError("it needs no translation")

    for error, kind in ((StreamCut("half an answer"), StreamCut), (InvalidArgument("an odd tool"), InvalidArgument)):
        client = ChatClient(Wired([error]), default_model="m", retries=Retries(tries=1), clock=Hasty())
        with pytest.raises(kind) as raised:
            await client.generate(ASK)
        assert isinstance(raised.value, AgentRuntimeError)
        assert raised.value is error


# Staying on this machine.


def _every_way(client: ChatClient) -> list[Callable[[], Awaitable[Any]]]:
    return [
        lambda: client.generate(ASK),
        lambda: client.generate(ASK, stream=True),
        lambda: _chunks(client),
        lambda: client.embed(["a"]),
        lambda: client.moderate("a"),
        lambda: client.count_tokens(ASK),
    ]


async def test_no_model_beyond_this_machine_is_asked_while_that_is_forbidden() -> None:
    client, wire, _ = _client([ANSWER])
    near, near_wire, _ = _client([ANSWER])
    near_wire.remote = False
    before = forbid_remote("this test asks no real model")
    try:
        for way in _every_way(client):
            with pytest.raises(NotConfigured, match="this test asks no real model"):
                await way()
        assert wire.asked == []
        await near.generate(ASK)
        assert forbid_remote(None) == "this test asks no real model"
        await client.generate(ASK)
    finally:
        forbid_remote(before)


def test_the_older_name_of_max_attempts() -> None:
    assert Retries(tries=2) == Retries(2) == Retries(max_attempts=2)
    assert (Retries(tries=2).max_attempts, Retries(max_attempts=3).tries, Retries().tries) == (2, 3, 4)
    assert dataclasses.replace(Retries(base=1), tries=2) == Retries(max_attempts=2, base=1)  # type: ignore[call-arg]
    assert pickle.loads(pickle.dumps(Retries(5, cap=1))) == Retries(max_attempts=5, cap=1)
    assert repr(Retries(1)) == "Retries(max_attempts=1, base=0.5, cap=30.0, retry_after_cap=60.0)"
