"""Responses of model clients: content, usage, cancellation, and concurrent calls."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
from typing import Any

from ...errors import AgentRuntimeError, InvalidArgument, ProviderError
from ...interfaces import LLMResponse
from .checks import Cases, refused, same
from .llm_fixtures import ASK, MODEL, WEATHER, Case, Echo, Hang, Make, TextReply, Usage, opened, received

CASES: Cases[Case] = Cases()

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
    same(
        [plain.get(name) or 0 for name in ("cached_tokens", "reasoning_tokens")],
        [0, 0],
        "details that the provider did not send",
    )
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
            same(
                await asyncio.to_thread(asyncio.run, ask_twice()),
                ["Hello"] * 2,
                f"the responses in the {loop} event loop",
            )
        same(
            (await client.generate(ASK)).message.get("content"),
            "Hello",
            "the response in the loop that created the client",
        )


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
