"""Cases of answers that a client returns whole, or as a stream."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
from typing import Any

from ...errors import AgentRuntimeError, InvalidArgument, ProviderError
from ...interfaces import LLMClient, LLMResponse, LLMStreamChunk
from .checks import PATIENCE, Cases, refused, same
from .llm_fixtures import (
    ASK,
    MODEL,
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
STREAMS: Cases[Case] = Cases()

#: Seconds after which a request was sent.
SENT_AFTER = 0.05
ANY_SCRIPT = "naïve, 東京, e\u0301, \u202b\ufdfd\u202c, \U0001f469\u200d\U0001f467 \u2028 \U0001f327 \\ \" ' \t."
NO_MESSAGES: tuple[Any, ...] = ([], "Hello!", {"role": "user", "content": "Hello!"}, ["Hello!"], [None])


@CASES
async def a_text_is_an_answer(make: Make) -> None:
    async with opened(make, TextReply("It is 4 °C.")) as client:
        response = await client.generate(ASK)
        same(isinstance(response, LLMResponse), True, "whether generate() returns an LLMResponse")
        same(response.message.get("role"), "assistant", "the role of the message")
        same(response.message.get("content"), "It is 4 °C.", "its content")
        same(response.tool_calls, [], "the tool calls of a text response")
        same(response.finish_reason, "stop", "the finish reason")
        same(response.model, MODEL, "the model of the response")


@CASES
async def an_answer_may_be_empty(make: Make) -> None:
    async with opened(make, TextReply("")) as client:
        response = await client.generate(ASK)
        same(response.message.get("content") or "", "", "the content of an empty response")
        same((response.tool_calls, response.finish_reason), ([], "stop"), "tool calls and finish reason")


@CASES
async def a_message_goes_back_as_it_is(make: Make) -> None:
    async with opened(make, TextReply("It is 4 °C."), Echo()) as client:
        message = (await client.generate(ASK)).message
        same(json.loads(json.dumps(message)), message, "the message after it was stored as JSON")
        before = copy.deepcopy(message)
        messages = [*ASK, message, {"role": "user", "content": "And in Rome?"}]
        sent = received((await client.generate(messages)).message["content"])
        same(message, before, "a message after it was sent back")
        for text in (ASK[0]["content"], "It is 4 °C.", "And in Rome?"):
            same(text in sent, True, f"whether {text!r} is in the second request, got {sent!r:.300}")


@CASES
async def what_is_asked_is_sent(make: Make) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *ASK]
    async with opened(make, Echo()) as client:
        response = await client.generate(messages, tools=[WEATHER], temperature=0.5, max_tokens=321)
        sent = received(response.message["content"])
        for value in ("Be brief.", ASK[0]["content"], "weather", "The weather of a city.", "city", 321):
            same(value in sent, True, f"whether {value!r} is in the request, got {sent!r:.300}")


@CASES
async def what_is_given_is_left_alone(make: Make) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {**ASK[0], "metadata": {"mine": [1]}}]
    tools = [copy.deepcopy(WEATHER)]
    before = copy.deepcopy((messages, tools))
    async with opened(make, TextReply("It is 4 °C.")) as client:
        first = await client.generate(messages, tools=tools)
        same((messages, tools), before, "messages and tools after they were sent")
        first.message["content"] = "changed"
        second = await client.generate(messages, tools=tools)
        same(second.message.get("content"), "It is 4 °C.", "a response after an earlier one was changed")


@CASES
async def usage_is_counted_in_one_way(make: Make) -> None:
    async with opened(
        make, TextReply("Hi", usage=Usage(30, 12)), TextReply("Hi", usage=Usage(30, 12, 20, 8))
    ) as client:
        plain = (await client.generate(ASK)).usage
        detailed = (await client.generate(ASK)).usage
    expected = {"prompt_tokens": 30, "completion_tokens": 12, "total_tokens": 42}
    same({name: plain.get(name) for name in expected}, expected, "usage")
    same([plain.get(name) or 0 for name in ("cached_tokens", "reasoning_tokens")], [0, 0], "details that were not sent")
    expected |= {"cached_tokens": 20, "reasoning_tokens": 8}
    same({name: detailed.get(name) for name in expected}, expected, "usage with cached and reasoning tokens in it")
    types = {type(count) for count in [*plain.values(), *detailed.values()]}
    same(types, {int}, "the types of counts")


@CASES
async def an_answer_that_was_cut_short_says_so(make: Make) -> None:
    async with opened(make, TextReply("It is", finish_reason="length")) as client:
        response = await client.generate(ASK, max_tokens=2)
        same((response.message.get("content"), response.finish_reason), ("It is", "length"), "text and finish reason")


@CASES
async def text_in_any_script_goes_there_and_back(make: Make) -> None:
    async with opened(make, TextReply(ANY_SCRIPT), Echo()) as client:
        same((await client.generate(ASK)).message.get("content"), ANY_SCRIPT, "the text of the response")
        sent = received((await client.generate([{"role": "user", "content": ANY_SCRIPT}])).message["content"])
        same(ANY_SCRIPT in sent, True, f"whether {ANY_SCRIPT!r} is in the request, got {sent!r:.300}")


@CASES
async def a_lone_surrogate_is_sent_or_refused(make: Make) -> None:
    messages = [{"role": "user", "content": "half an emoji: \ud83d"}]
    async with opened(make, TextReply("Hello")) as client:
        try:
            await client.generate(messages)
        except (InvalidArgument, ProviderError) as error:
            same(getattr(error, "retriable", False), False, "whether the error is retriable")
        except Exception as error:
            raise AssertionError(f"a lone surrogate: must raise InvalidArgument, got {error!r:.300}") from error
        same((await client.generate(ASK)).message.get("content"), "Hello", "the next response")


@CASES
async def what_are_no_messages_is_refused(make: Make) -> None:
    async with opened(make, TextReply("Hello")) as client:
        for messages in NO_MESSAGES:
            with refused(InvalidArgument, f"messages={messages!r}"):
                await client.generate(messages)
        same((await client.generate(ASK)).message.get("content"), "Hello", "the next response")


@CASES
async def several_may_ask_at_once(make: Make) -> None:
    async with opened(make, TextReply("Hello")) as client:
        answers = await asyncio.gather(*(client.generate(ASK) for _ in range(5)))
        same([each.message.get("content") for each in answers], ["Hello"] * 5, "the responses to five concurrent calls")


@CASES
async def a_cancelled_call_leaves_the_client_usable(make: Make) -> None:
    async with opened(make, Hang(), TextReply("Hello")) as client:
        call = asyncio.create_task(client.generate(ASK))
        done, _ = await asyncio.wait([call], timeout=SENT_AFTER)
        same(len(done), 0, "the number of finished calls while the provider is silent")
        call.cancel()
        await asyncio.wait([call])
        same(call.cancelled(), True, "whether the call was cancelled")
        same(await next_response(client), "Hello", "the next response")


@CASES
async def a_call_that_runs_out_of_time_is_let_go(make: Make) -> None:
    async with opened(make, Hang(), TextReply("Hello")) as client:
        with refused(TimeoutError, "a call in an expired asyncio.timeout block"):
            async with asyncio.timeout(SENT_AFTER):
                await client.generate(ASK)
        same(await next_response(client), "Hello", "the next response")


@CASES
async def event_loops_take_turns(make: Make) -> None:
    async with opened(make, TextReply("Hello")) as client:

        async def ask_twice() -> list[Any]:
            return [(await client.generate(ASK)).message.get("content") for _ in range(2)]

        for loop in ("first", "second"):
            same(await asyncio.to_thread(asyncio.run, ask_twice()), ["Hello"] * 2, f"responses in the {loop} loop")
        same((await client.generate(ASK)).message.get("content"), "Hello", "the response in the loop of the client")


@CASES
async def an_option_of_none_is_no_option(make: Make) -> None:
    async with opened(make, TextReply("Hello")) as client:
        response = await client.generate(messages=ASK, model=None, stream=False, tools=None, temperature=None)
        same(response.message.get("content"), "Hello", "the response when every option is None")
        cost = response.cost_usd
        same(cost is None or (isinstance(cost, (int, float)) and cost >= 0), True, f"cost_usd={cost!r}")


async def next_response(client: Any) -> Any:
    """The next response. A cancelled request may not have used its scripted reply, so up to two calls may fail."""
    for _ in range(2):
        with contextlib.suppress(AgentRuntimeError):
            return (await client.generate(ASK)).message.get("content")
    return (await client.generate(ASK)).message.get("content")


TEXT = TextReply("It is 4 °C.", ("It", " is", " 4 °C", "."), usage=Usage(30, 12, 20, 8))
CALLS = asks_for(OSLO, ROME, text="Let me look.", pieces=("Let me", " look."))
#: Seconds between two checks for remaining tasks.
_POLL = 0.01


@STREAMS
@optional
async def pieces_joined_are_the_answer(make: Make) -> None:
    spelt = TextReply(ANY_SCRIPT, tuple(ANY_SCRIPT))
    async with opened(make, TEXT, spelt, TextReply("")) as client:
        for says in (TEXT, spelt, TextReply("")):
            chunks = await whole(client)
            same("".join(chunk.delta for chunk in chunks), says.text, "the joined deltas")
            if chunks[-1].response is not None:
                same(chunks[-1].response.message.get("content") or "", says.text, "the content of the response")


@STREAMS
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
            ending = (last.response.finish_reason, bool(last.response.model))
            same(ending, ("stop", True), "its finish reason, and whether it has a model")


@STREAMS
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


@STREAMS
async def an_answer_is_the_same_however_it_came(make: Make) -> None:
    for says in (TEXT, CALLS):
        async with opened(make, says) as client:
            plain = await client.generate(ASK, tools=[WEATHER])
            found = await client.generate(ASK, tools=[WEATHER], stream=True)
            for name in ("role", "content", "tool_calls"):
                same(found.message.get(name), plain.message.get(name), f"{name} of a response that was streamed")
            same(found.usage, plain.usage, "its usage")
            ending = (found.finish_reason, bool(found.model))
            same(ending, (plain.finish_reason, True), "its finish reason, and whether it has a model")


@STREAMS
@optional
async def a_stream_sends_what_it_is_given(make: Make) -> None:
    async with opened(make, Echo()) as client:
        messages = [{"role": "system", "content": "Be brief."}, *ASK]
        chunks = await whole(client, messages, tools=[WEATHER])
        sent = received("".join(chunk.delta for chunk in chunks))
        for value in ("Be brief.", ASK[0]["content"], "weather"):
            same(value in sent, True, f"whether {value!r} is in the request, got {sent!r:.300}")


@STREAMS
@optional
async def a_stream_of_no_messages_is_refused(make: Make) -> None:
    async with opened(make, TEXT) as client:
        for messages in NO_MESSAGES:
            with refused(InvalidArgument, f"a stream of messages={messages!r}"):
                await whole(client, messages)


@STREAMS
@optional
async def a_stream_left_early_leaves_nothing(make: Make) -> None:
    async with opened(make, TEXT, Hang(TEXT), TEXT) as client:
        await whole(client)
        before = asyncio.all_tasks()
        async with contextlib.aclosing(stream_of(client)) as pieces:
            same(bool((await anext(pieces)).delta), True, "whether the first chunk has text")
        await _tasks_finished(before)
        same("".join(chunk.delta for chunk in await whole(client)), TEXT.text, "the next stream")


@STREAMS
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


@STREAMS
@optional
async def a_stream_that_is_cut_is_an_error(make: Make) -> None:
    for clean in (True, False):
        for says in (TEXT, CALLS):
            async with opened(make, Disconnect(says, clean=clean)) as client:
                await _fails(client, says, "is interrupted")


@STREAMS
async def a_cut_stream_asked_for_whole_is_an_error(make: Make) -> None:
    for clean in (True, False):
        async with opened(make, Disconnect(CALLS, clean=clean)) as client:
            with refused(ProviderError, "generate(stream=True) with an interrupted stream"):
                await client.generate(ASK, tools=[WEATHER], stream=True)


@STREAMS
@optional
async def a_stream_that_stalls_is_an_error(make: Make) -> None:
    async with opened(make, Hang(CALLS)) as client:
        await _fails(client, CALLS, "stalls")


@STREAMS
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
    """Wait until all new tasks are finished, including tasks of a server that waits for its client."""
    waited = 0.0
    while left := [task for task in asyncio.all_tasks() - before if not task.done()]:
        if waited > PATIENCE / 4:
            raise AssertionError(f"tasks that still run after a stream: {left!r:.400}")
        await asyncio.sleep(_POLL)
        waited += _POLL
