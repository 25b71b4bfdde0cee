"""Conformance tests for LLMClients. Run one of `CASES` with `await case(make)`, or all with `await check(make)`.

`make(script)` is an async context manager. It yields a client whose provider answers the n-th request with the n-th
reply of the script, and all later requests with the last reply; it closes both. The replies are plain values
(`TextReply`, `Echo`, `Disconnect`, `Hang`, `HttpError`; `Embedding`, `Verdict`, `TokenUsage`) that you map to your
provider's wire format, in a server on loopback or in a transport of the client. The client must not retry, or retry
with almost no delay. It must give up on a silent stream after at most a second. Its API key, if any, is `KEY`.

stream, embed, moderate and count_tokens are optional: a case is skipped if the client, or `make` for its script,
raises NotSupported. A failing case raises AssertionError, or the unexpected error of the client.
"""

from __future__ import annotations

import contextlib
import copy
import json
import traceback
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from ..._core.lazy_exports import lazy_exports
from ...errors import (
    AuthenticationFailed,
    InvalidArgument,
    ModelNotFound,
    ProviderError,
    ProviderUnavailable,
    RateLimited,
    RequestRefused,
)
from ...interfaces import LLMClient
from .checks import Cases, refused, same
from .llm_answers import CASES as ANSWERS
from .llm_answers import STREAMS
from .llm_fixtures import (
    ASK,
    KEY,
    MODEL,
    OSLO,
    ROME,
    WEATHER,
    Call,
    Case,
    Disconnect,
    Echo,
    Embedding,
    Hang,
    HttpError,
    Make,
    Reply,
    TextReply,
    TokenUsage,
    Usage,
    Verdict,
    asks_for,
    call_parts,
    failed,
    opened,
    optional,
    received,
    stream_of,
    supported,
)

__all__ = [
    "CASES",
    "KEY",
    "MODEL",
    "Call",
    "Case",
    "Disconnect",
    "Echo",
    "Embedding",
    "Hang",
    "HttpError",
    "Make",
    "Reply",
    "TextReply",
    "TokenUsage",
    "Usage",
    "Verdict",
    "check",
]

CASES: Cases[Case] = Cases(ANSWERS)
check: Callable[[Make], Awaitable[None]] = CASES.check


REFUSALS: tuple[tuple[int, type[ProviderError], bool], ...] = (
    (400, RequestRefused, False),
    (401, AuthenticationFailed, False),
    (403, AuthenticationFailed, False),
    (404, ModelNotFound, False),
    (429, RateLimited, True),
    (500, ProviderUnavailable, True),
    (503, ProviderUnavailable, True),
    (529, ProviderUnavailable, True),
)


@CASES
async def a_refusal_has_its_type(make: Make) -> None:
    for status, kind, retriable in REFUSALS:
        async with opened(make, HttpError(status)) as client:
            error = await failed(client.generate(ASK), f"status {status}")
            if not isinstance(error, kind):
                same(type(error).__name__, kind.__name__, f"the type of the error for status {status}")
            same((error.status, error.retriable), (status, retriable), f"status and retriable for status {status}")
            same(bool(str(error)), True, f"whether the error for status {status} has a message")


@CASES
async def the_wait_a_provider_asks_for_is_told(make: Make) -> None:
    for status in (429, 503):
        async with opened(make, HttpError(status, retry_after=1800.0)) as client:
            error = await failed(client.generate(ASK), f"status {status}")
            same(error.retry_after, 1800.0, f"retry_after of status {status}")
        async with opened(make, HttpError(status)) as client:
            error = await failed(client.generate(ASK), f"status {status}")
            same(error.retry_after, None, f"retry_after of status {status} without a Retry-After header")


@CASES
async def a_broken_connection_is_an_error(make: Make) -> None:
    for broken in (
        Disconnect(),
        Disconnect(TextReply("It is 4 °C.")),
        Disconnect(TextReply("It is 4 °C."), clean=True),
    ):
        async with opened(make, broken) as client:
            error = await failed(client.generate(ASK), "a connection that broke")
            same(error.retriable, True, "whether the error is retriable")


@CASES
async def a_failure_is_over_with_the_next_answer(make: Make) -> None:
    for failure in (HttpError(500), HttpError(400), Disconnect()):
        async with opened(make, failure, TextReply("Hello")) as client:
            with contextlib.suppress(ProviderError):
                await client.generate(ASK)
            same((await client.generate(ASK)).message.get("content"), "Hello", f"the response after {failure}")


@CASES
async def the_key_is_in_no_error(make: Make) -> None:
    for status in (400, 401, 403, 404, 429, 500):
        async with opened(make, HttpError(status, f"Incorrect API key provided: {KEY}.")) as client:
            _has_no_key(await failed(client.generate(ASK), f"status {status}"))
            same(KEY in repr(client), False, "whether the key is in the repr of the client")


@CASES
@optional
async def the_key_is_in_no_error_of_a_stream(make: Make) -> None:
    for status in (401, 500):
        async with opened(make, HttpError(status, f"Incorrect API key provided: {KEY}.")) as client:
            _has_no_key(await failed(_read(client), f"a stream with status {status}"))


async def _read(client: LLMClient) -> None:
    async for _ in stream_of(client):
        pass


def _has_no_key(error: ProviderError) -> None:
    # A printed traceback also shows the causes of the error.
    shown = f"{error}{error!r}{error.code}" + "".join(traceback.format_exception(error, limit=0))
    same(KEY in shown, False, f"whether the key is in {type(error).__name__} or in its causes")


@CASES
@optional
async def each_text_has_a_vector(make: Make) -> None:
    async with opened(make, Embedding(((0.5, -1.0, 2.0), (0.25, 0.0, -0.125)))) as client:
        vectors = await supported(client.embed(["first", "second"]))
        same(vectors, [[0.5, -1.0, 2.0], [0.25, 0.0, -0.125]], "the vectors of two texts")
        same({type(number) for vector in vectors for number in vector}, {float}, "the types of numbers in them")


@CASES
@optional
async def what_are_no_texts_is_refused(make: Make) -> None:
    async with opened(make, Embedding(((0.5,),))) as client:
        await supported(client.embed(["a text"]))
        wrong: tuple[Any, ...] = ("a text", [b"bytes"], [None], None)
        for texts in wrong:
            with refused(InvalidArgument, f"embed({texts!r})"):
                await client.embed(texts)


@CASES
@optional
async def vectors_that_are_refused_say_why(make: Make) -> None:
    async with opened(make, HttpError(429, retry_after=7.0)) as client:
        with refused(RateLimited, "embed() with status 429"):
            await supported(client.embed(["a text"]))


@CASES
@optional
async def a_verdict_is_a_dict(make: Make) -> None:
    for flagged in (True, False):
        async with opened(make, Verdict(flagged)) as client:
            verdict = await supported(client.moderate("a text"))
            same(isinstance(verdict, dict) and verdict.get("flagged"), flagged, f"flagged in the verdict {verdict!r}")


@CASES
@optional
async def tokens_are_counted(make: Make) -> None:
    async with opened(make, TokenUsage(11)) as client:
        count = await supported(client.count_tokens(ASK))
        same(type(count) is int and count > 0, True, f"whether {count!r} is a number of tokens")
        count = await supported(client.count_tokens(ASK, [WEATHER]))
        same(type(count) is int and count > 0, True, f"whether {count!r} is a number of tokens")


@CASES
@optional
async def tokens_of_no_messages_are_not_counted(make: Make) -> None:
    async with opened(make, TokenUsage(11)) as client:
        await supported(client.count_tokens(ASK))
        wrong: tuple[Any, ...] = ("Hello!", ["Hello!"], None)
        for messages in wrong:
            with refused(InvalidArgument, f"count_tokens({messages!r})"):
                await client.count_tokens(messages)


AWKWARD: dict[str, Any] = {
    "city": 'Köln "Mitte" 🌧',
    "days": 2,
    "at": [50.94, -6.96, None, True],
    "deep": {"a": {"b": [{}]}},
    "": "",
}


@CASES
async def a_call_is_a_dict_and_an_object(make: Make) -> None:
    async with opened(make, asks_for(OSLO)) as client:
        response = await client.generate(ASK, tools=[WEATHER])
        same(response.finish_reason, "tool_calls", "the finish reason")
        same(response.message.get("content") or "", "", "the content next to a call")
        same(len(response.tool_calls), 1, "the number of calls")
        call = response.tool_calls[0]
        same(call_parts(call), ("call_a", "weather", {"city": "Oslo"}), "a call as an object")
        same((call["id"], call.get("type")), ("call_a", "function"), "id and type of a call as a dict")
        function = call["function"]
        same((function["name"], function["arguments"]), ("weather", call.arguments), "the function of a call as a dict")
        same([dict(each) for each in response.message["tool_calls"]], [dict(call)], "the calls in the message")


@CASES
async def calls_side_by_side_are_told_apart(make: Make) -> None:
    async with opened(make, asks_for(OSLO, ROME, text="Let me look.")) as client:
        response = await client.generate(ASK, tools=[WEATHER])
        same(response.message.get("content"), "Let me look.", "the text before the calls")
        calls = [call_parts(call) for call in response.tool_calls]
        same(calls, [("call_a", "weather", {"city": "Oslo"}), ("call_b", "weather", {"city": "Rome"})], "the calls")


@CASES
async def arguments_are_as_given(make: Make) -> None:
    async with opened(make, asks_for(Call("call_a", "weather", AWKWARD), Call("call_b", "weather"))) as client:
        response = await client.generate(ASK, tools=[WEATHER])
        same([call_parts(call)[2] for call in response.tool_calls], [AWKWARD, {}], "arguments")


@CASES
async def results_of_tools_are_sent_back(make: Make) -> None:
    async with opened(make, asks_for(OSLO, ROME, text="Let me look."), Echo()) as client:
        message = (await client.generate(ASK, tools=[WEATHER])).message
        stored = json.loads(json.dumps(message))
        same(stored, message, "a message with calls after it was stored as JSON")
        results = [
            {"role": "tool", "tool_call_id": "call_a", "content": "4 °C in Oslo"},
            {"role": "tool", "tool_call_id": "call_b", "content": "21 °C in Rome", "metadata": {"is_error": False}},
        ]
        messages = [*ASK, stored, *results]
        before = copy.deepcopy(messages)
        sent = received((await client.generate(messages, tools=[WEATHER])).message["content"])
        same(messages, before, "the messages after they were sent")
        for value in ("Let me look.", "Oslo", "Rome", "4 °C in Oslo", "21 °C in Rome"):
            same(value in sent, True, f"whether {value!r} is in the second request, got {sent!r:.300}")
        for call_id in ("call_a", "call_b"):
            same(sent.count(call_id), 2, f"how often the request names {call_id}: the call and its result")


CASES += STREAMS

#: Names of 0.6.0.
if not TYPE_CHECKING:
    __getattr__ = lazy_exports(
        __name__,
        {},
        renamed={
            "Breaks": "Disconnect",
            "Counts": "TokenUsage",
            "Echoes": "Echo",
            "Embeds": "Embedding",
            "Judges": "Verdict",
            "Refuses": "HttpError",
            "Says": "TextReply",
            "Stalls": "Hang",
        },
    )[1]
