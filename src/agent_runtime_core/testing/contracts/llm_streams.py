"""Streams of model clients: chunks, the last chunk, interrupted and cancelled streams."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from ...errors import InvalidArgument, ProviderError
from ...interfaces import LLMClient, LLMStreamChunk
from .checks import PATIENCE, Cases, refused, same
from .llm_answers import ANY_SCRIPT, NO_MESSAGES, SENT_AFTER, next_response
from .llm_fixtures import (
    ASK,
    OSLO,
    ROME,
    WEATHER,
    Case,
    Disconnect,
    Echo,
    Hang,
    HttpError,
    Make,
    TextReply,
    Usage,
    asks_for,
    call_parts,
    failed,
    opened,
    optional,
    received,
    stream_of,
)

CASES: Cases[Case] = Cases()

TEXT = TextReply("It is 4 °C.", ("It", " is", " 4 °C", "."), usage=Usage(30, 12, 20, 8))
CALLS = asks_for(OSLO, ROME, text="Let me look.", pieces=("Let me", " look."))
#: Seconds between two checks for remaining tasks.
_POLL = 0.01


@CASES
@optional
async def pieces_joined_are_the_answer(make: Make) -> None:
    spelt = TextReply(ANY_SCRIPT, tuple(ANY_SCRIPT))
    async with opened(make, TEXT, spelt, TextReply("")) as client:
        for says in (TEXT, spelt, TextReply("")):
            chunks = await whole(client)
            same("".join(chunk.delta for chunk in chunks), says.text, "the joined deltas")
            if chunks[-1].response is not None:
                same(chunks[-1].response.message.get("content") or "", says.text, "the content of the response")


@CASES
@optional
async def the_last_piece_has_the_rest(make: Make) -> None:
    async with opened(make, TEXT) as client:
        *pieces, last = await whole(client)
        for piece in pieces:
            rest = (piece.finish_reason, piece.usage, piece.tool_calls, piece.response)
            same(rest, (None, None, None, None), "the other fields of a chunk before the last one")
        same(
            (last.finish_reason, last.tool_calls or []), ("stop", []), "finish reason and tool calls of the last chunk"
        )
        expected = {"prompt_tokens": 30, "completion_tokens": 12, "total_tokens": 42}
        expected |= {"cached_tokens": 20, "reasoning_tokens": 8}
        same({name: (last.usage or {}).get(name) for name in expected}, expected, "usage of the last chunk")
        if last.response is not None:
            same(last.response.usage, last.usage, "usage of the response")
            same(
                (last.response.finish_reason, bool(last.response.model)),
                ("stop", True),
                "its finish reason, and whether it has a model",
            )


@CASES
@optional
async def calls_come_whole_and_last(make: Make) -> None:
    async with opened(make, CALLS) as client:
        *pieces, last = await whole(client, tools=[WEATHER])
        same(
            [piece.tool_calls for piece in pieces], [None] * len(pieces), "the tool calls of chunks before the last one"
        )
        calls = [call_parts(call) for call in last.tool_calls or ()]
        same(calls, [("call_a", "weather", {"city": "Oslo"}), ("call_b", "weather", {"city": "Rome"})], "the calls")
        same([call["function"]["name"] for call in last.tool_calls or ()], ["weather"] * 2, "the calls as dicts")
        same(last.finish_reason, "tool_calls", "the finish reason")
        same("".join(each.delta for each in [*pieces, last]), "Let me look.", "the text before the calls")
        if last.response is not None:
            same(
                [dict(each) for each in last.response.tool_calls],
                [dict(each) for each in last.tool_calls or ()],
                "calls in the response",
            )


@CASES
async def an_answer_is_the_same_however_it_came(make: Make) -> None:
    for says in (TEXT, CALLS):
        async with opened(make, says) as client:
            plain = await client.generate(ASK, tools=[WEATHER])
            found = await client.generate(ASK, tools=[WEATHER], stream=True)
            for name in ("role", "content", "tool_calls"):
                same(found.message.get(name), plain.message.get(name), f"{name} of a response that was streamed")
            same(found.usage, plain.usage, "its usage")
            same(
                (found.finish_reason, bool(found.model)),
                (plain.finish_reason, True),
                "its finish reason, and whether it has a model",
            )


@CASES
@optional
async def a_stream_sends_what_it_is_given(make: Make) -> None:
    async with opened(make, Echo()) as client:
        messages = [{"role": "system", "content": "Be brief."}, *ASK]
        chunks = await whole(client, messages, tools=[WEATHER])
        sent = received("".join(chunk.delta for chunk in chunks))
        for value in ("Be brief.", ASK[0]["content"], "weather"):
            same(value in sent, True, f"whether {value!r} is in the request, got {sent!r:.300}")


@CASES
@optional
async def a_stream_of_no_messages_is_refused(make: Make) -> None:
    async with opened(make, TEXT) as client:
        for messages in NO_MESSAGES:
            with refused(InvalidArgument, f"a stream of messages={messages!r}"):
                await whole(client, messages)


@CASES
@optional
async def a_stream_left_early_leaves_nothing(make: Make) -> None:
    async with opened(make, TEXT, Hang(TEXT), TEXT) as client:
        await whole(client)
        before = asyncio.all_tasks()
        async with contextlib.aclosing(stream_of(client)) as pieces:
            same(bool((await anext(pieces)).delta), True, "whether the first chunk has text")
        await _tasks_finished(before)
        same("".join(chunk.delta for chunk in await whole(client)), TEXT.text, "the next stream")


@CASES
@optional
async def a_cancelled_stream_leaves_the_client_usable(make: Make) -> None:
    async with opened(make, TEXT, Hang(TEXT), TEXT) as client:
        await whole(client)
        before = asyncio.all_tasks()
        reading = asyncio.create_task(whole(client))
        await asyncio.wait([reading], timeout=SENT_AFTER)
        reading.cancel()
        await asyncio.wait([reading])
        same(reading.cancelled(), True, "whether reading a stream can be cancelled")
        await _tasks_finished(before)
        same(await next_response(client), TEXT.text, "the next response")


@CASES
@optional
async def a_stream_that_is_cut_is_an_error(make: Make) -> None:
    for clean in (True, False):
        for says in (TEXT, CALLS):
            async with opened(make, Disconnect(says, clean=clean)) as client:
                await _fails(client, says, "is interrupted")


@CASES
async def a_cut_stream_asked_for_whole_is_an_error(make: Make) -> None:
    for clean in (True, False):
        async with opened(make, Disconnect(CALLS, clean=clean)) as client:
            with refused(ProviderError, "generate(stream=True) with an interrupted stream"):
                await client.generate(ASK, tools=[WEATHER], stream=True)


@CASES
@optional
async def a_stream_that_stalls_is_an_error(make: Make) -> None:
    async with opened(make, Hang(CALLS)) as client:
        await _fails(client, CALLS, "stalls")


@CASES
@optional
async def a_stream_that_is_refused_says_why(make: Make) -> None:
    async with opened(make, HttpError(429, retry_after=7.0)) as client:
        error = await failed(whole(client), "a stream with status 429")
        same((type(error).__name__, error.retry_after), ("RateLimited", 7.0), "the error of a stream that is refused")


async def whole(client: LLMClient, messages: list[Any] | None = None, **options: Any) -> list[LLMStreamChunk]:
    chunks = [chunk async for chunk in stream_of(client, messages, **options)]
    same({type(chunk.delta) for chunk in chunks}, {str}, "the types of deltas")
    ends = [index for index, chunk in enumerate(chunks) if chunk.finish_reason is not None]
    same(ends, [len(chunks) - 1], "the indexes of chunks with a finish reason")
    return chunks


async def _fails(client: LLMClient, says: TextReply, what: str) -> None:
    """Check that reading ends with a retriable error, after text chunks only."""
    text = ""
    try:
        async for piece in stream_of(client, tools=[WEATHER]):
            text += piece.delta
            rest = (piece.finish_reason, piece.tool_calls, piece.response)
            same(rest, (None, None, None), f"the other fields of a chunk of a stream that {what}")
    except ProviderError as error:
        same(error.retriable, True, f"whether the error of a stream that {what} is retriable")
        same(says.text.startswith(text), True, f"whether {text!r} is the beginning of {says.text!r}")
        return
    raise AssertionError(f"a stream that {what}: ProviderError was not raised")


async def _tasks_finished(before: set[asyncio.Task[Any]]) -> None:
    """Wait until all new tasks have finished, including those of a server that waits for its client."""
    waited = 0.0
    while left := [task for task in asyncio.all_tasks() - before if not task.done()]:
        if waited > PATIENCE / 4:
            raise AssertionError(f"tasks that still run after a stream: {left!r:.400}")
        await asyncio.sleep(_POLL)
        waited += _POLL
