"""Each promise of a model client, broken on purpose in somebody's, is found by the case that guards it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agent_runtime_core.errors import (
    AgentRuntimeError,
    InvalidArgument,
    NotSupported,
    ProviderError,
    ProviderUnavailable,
    StreamCut,
)
from agent_runtime_core.interfaces import LLMClient, LLMResponse, LLMStreamChunk
from agent_runtime_core.testing.contracts import llm, llm_answers
from agent_runtime_core.testing.contracts.llm import Case, HttpError, Make, Reply
from tests.contract.third_party.their_client import Part, Provider, TheirClient, make, scripted

PARTS = (llm_answers, llm)


class UserAnswers(TheirClient):
    def response(self, text: str, calls: list[Part], part: Part) -> LLMResponse:
        response = super().response(text, calls, part)
        response.message["role"] = "user"
        return response


class NoModel(TheirClient):
    def response(self, text: str, calls: list[Part], part: Part) -> LLMResponse:
        return super().response(text, calls, part | {"model": ""})


class NeverSilent(TheirClient):
    def response(self, text: str, calls: list[Part], part: Part) -> LLMResponse:
        return super().response(text or "(no answer)", calls, part)


class NeedsNumbers(TheirClient):
    async def stream(self, messages: list[Any], **options: Any) -> AsyncIterator[LLMStreamChunk]:
        if "temperature" in options:
            options["temperature"] = float(options["temperature"])
        async for chunk in super().stream(messages, **options):
            yield chunk


class TheirWords(TheirClient):
    def response(self, text: str, calls: list[Part], part: Part) -> LLMResponse:
        return super().response(text, calls, part | {"end": "max_tokens" if part["end"] == "length" else part["end"]})


class OddMessage(TheirClient):
    """Its messages hold what no journal keeps."""

    def response(self, text: str, calls: list[Part], part: Part) -> LLMResponse:
        response = super().response(text, calls, part)
        response.message["parts"] = (text,)
        return response


class LosesOptions(TheirClient):
    async def stream(self, messages: list[Any], **options: Any) -> AsyncIterator[LLMStreamChunk]:
        async for chunk in super().stream(messages, tools=options.get("tools")):
            yield chunk


class LosesTools(TheirClient):
    async def stream(self, messages: list[Any], **options: Any) -> AsyncIterator[LLMStreamChunk]:
        async for chunk in super().stream(messages):
            yield chunk


class TidiesMessages(TheirClient):
    async def stream(self, messages: list[Any], **options: Any) -> AsyncIterator[LLMStreamChunk]:
        for message in messages:
            message.pop("metadata", None)
        async for chunk in super().stream(messages, **options):
            yield chunk


class CachedApart(TheirClient):
    def usage(self, told: Part) -> dict[str, int]:
        return super().usage(told | {"prompt_tokens": told["prompt_tokens"] - (told["cached_tokens"] or 0)})


class TheirCounts(TheirClient):
    def usage(self, told: Part) -> dict[str, int]:
        return {"input_tokens": told["prompt_tokens"], "output_tokens": told["completion_tokens"]}


class CountsNone(TheirClient):
    def usage(self, told: Part) -> Any:
        return told


class OnlyAscii(TheirClient):
    async def stream(self, messages: list[Any], **options: Any) -> AsyncIterator[LLMStreamChunk]:
        plain = json.loads(json.dumps(messages, ensure_ascii=False).encode("ascii", "replace"))
        async for chunk in super().stream(plain, **options):
            yield chunk


class Encodes(TheirClient):
    async def stream(self, messages: list[Any], **options: Any) -> AsyncIterator[LLMStreamChunk]:
        if isinstance(messages, list):
            json.dumps(messages, ensure_ascii=False).encode()
        async for chunk in super().stream(messages, **options):
            yield chunk


class SendsAnything(TheirClient):
    async def stream(self, messages: list[Any], **options: Any) -> AsyncIterator[LLMStreamChunk]:
        try:
            async for chunk in super().stream(messages, **options):
                yield chunk
        except InvalidArgument:
            yield LLMStreamChunk(finish_reason="stop", response=LLMResponse({"role": "assistant", "content": ""}))


class OneAtATime(TheirClient):
    busy = False

    async def generate(self, messages: list[Any], **options: Any) -> LLMResponse:
        if self.busy:
            raise ProviderUnavailable("busy")
        self.busy = True
        await asyncio.sleep(0)
        response = await super().generate(messages, **options)
        self.busy = False
        return response


class BusyAfterCancel(TheirClient):
    busy = False

    async def generate(self, messages: list[Any], **options: Any) -> LLMResponse:
        if self.busy:
            raise ProviderUnavailable("busy")
        self.busy = True
        response = await super().generate(messages, **options)
        self.busy = False
        return response


class SwallowsCancel(TheirClient):
    async def generate(self, messages: list[Any], **options: Any) -> LLMResponse:
        try:
            return await super().generate(messages, **options)
        except asyncio.CancelledError:
            return LLMResponse({"role": "assistant", "content": ""})


class BoundToALoop(TheirClient):
    home: Any = None

    async def generate(self, messages: list[Any], **options: Any) -> LLMResponse:
        self.home = self.home or asyncio.get_running_loop()
        if self.home is not asyncio.get_running_loop():
            raise RuntimeError("attached to a different loop")
        return await super().generate(messages, **options)


class Renumbers(TheirClient):
    def call(self, told: Part) -> Part:
        return super().call(told | {"id": "call_0"})


class PlainCalls(TheirClient):
    async def stream(self, messages: list[Any], **options: Any) -> AsyncIterator[LLMStreamChunk]:
        async for chunk in super().stream(messages, **options):
            chunk.tool_calls = chunk.tool_calls and [dict(call) for call in chunk.tool_calls]
            yield chunk


class NumberedCalls(TheirClient):
    def call(self, told: Part) -> Part:
        call = super().call(told)
        call["function"]["arguments"] = list(told["arguments"].items())
        return call


class ReprArguments(TheirClient):
    def call(self, told: Part) -> Part:
        call = super().call(told)
        call["function"]["arguments"] = repr(told["arguments"])
        return call


class FirstCallOnly(TheirClient):
    def response(self, text: str, calls: list[Part], part: Part) -> LLMResponse:
        return super().response(text, calls[:1], part)


class LosesResults(TheirClient):
    async def stream(self, messages: list[Any], **options: Any) -> AsyncIterator[LLMStreamChunk]:
        kept = [each for each in messages if each["role"] != "tool"] if isinstance(messages, list) else messages
        async for chunk in super().stream(kept, **options):
            yield chunk


class LosesAPiece(TheirClient):
    async def stream(self, messages: list[Any], **options: Any) -> AsyncIterator[LLMStreamChunk]:
        async for chunk in super().stream(messages, **options):
            yield LLMStreamChunk(chunk.delta.strip(), chunk.tool_calls, chunk.finish_reason, chunk.usage)


class AllAtOnce(TheirClient):
    async def stream(self, messages: list[Any], **options: Any) -> AsyncIterator[LLMStreamChunk]:
        for chunk in [chunk async for chunk in super().stream(messages, **options)]:
            yield chunk


class AnotherWhole(TheirClient):
    async def generate(self, messages: list[Any], *, stream: bool = False, **options: Any) -> LLMResponse:
        response = await super().generate(messages, **options)
        return LLMResponse(response.message, finish_reason="stop", model="m") if stream else response


class EndsWhenCancelled(TheirClient):
    async def stream(self, messages: list[Any], **options: Any) -> AsyncIterator[LLMStreamChunk]:
        try:
            async for chunk in super().stream(messages, **options):
                yield chunk
        except asyncio.CancelledError:
            yield LLMStreamChunk(finish_reason="stop")


class CallsInTheMiddle(TheirClient):
    async def stream(self, messages: list[Any], **options: Any) -> AsyncIterator[LLMStreamChunk]:
        async for chunk in super().stream(messages, **options):
            if chunk.tool_calls:
                yield LLMStreamChunk(tool_calls=chunk.tool_calls)
                chunk.tool_calls = None
            yield chunk


class NoUsageInStreams(TheirClient):
    async def stream(self, messages: list[Any], **options: Any) -> AsyncIterator[LLMStreamChunk]:
        async for chunk in super().stream(messages, **options):
            yield LLMStreamChunk(chunk.delta, chunk.tool_calls, chunk.finish_reason)


class EndsAnyway(TheirClient):
    """Takes the end of the connection for the end of the answer."""

    async def parts(self, request: Part) -> AsyncGenerator[Part, None]:
        ended = False
        async for part in super().parts(request):
            ended = ended or "end" in part
            yield part
        if not ended:
            yield {"end": "stop", "usage": {}, "model": llm.MODEL}


class CallsAsTheyCome(TheirClient):
    """Gives each tool call as soon as it is there."""

    async def stream(self, messages: list[Any], **options: Any) -> AsyncIterator[LLMStreamChunk]:
        async for part in self.parts({"messages": messages}):
            if "call" in part:
                yield LLMStreamChunk(tool_calls=[self.call(part["call"])])
        raise StreamCut("the stream has no end")


class WaitsForEver(TheirClient):
    async def parts(self, request: Part) -> AsyncGenerator[Part, None]:
        async for part in self.provider(request):
            yield part


class LeavesATask(TheirClient):
    """Reads ahead in a task, and lets that go on."""

    async def parts(self, request: Part) -> AsyncGenerator[Part, None]:
        ready: asyncio.Queue[Part | None] = asyncio.Queue()

        async def read() -> None:
            async for part in self.provider(request):
                await ready.put(part)
            await ready.put(None)

        self.reader = asyncio.create_task(read())
        while (part := await ready.get()) is not None:
            yield part


class OneKindOfError(TheirClient):
    def refusal(self, part: Part) -> ProviderError:
        return ProviderUnavailable("it did not work", status=part["status"])


class RetriesNothing(TheirClient):
    def refusal(self, part: Part) -> ProviderError:
        error = super().refusal(part)
        error.retriable = False
        return error


class ForgetsTheWait(TheirClient):
    def refusal(self, part: Part) -> ProviderError:
        return super().refusal(part | {"retry_after": None})


class TellsTheKey(TheirClient):
    def refusal(self, part: Part) -> ProviderError:
        error = super().refusal(part)
        error.args = (part["said"],)
        return error


class TellsTheKeyBelow(TheirClient):
    def refusal(self, part: Part) -> ProviderError:
        error = super().refusal(part)
        error.__cause__ = RuntimeError(part["said"])
        return error


class ForeignErrors(TheirClient):
    async def generate(self, messages: list[Any], **options: Any) -> LLMResponse:
        try:
            return await super().generate(messages, **options)
        except ProviderUnavailable as error:
            raise ConnectionError(str(error)) from error


class BrokenForGood(TheirClient):
    broken = False

    async def generate(self, messages: list[Any], **options: Any) -> LLMResponse:
        if self.broken:
            raise ProviderUnavailable("closed")
        try:
            return await super().generate(messages, **options)
        except ProviderError:
            self.broken = True
            raise


class EmbedsUnordered(TheirClient):
    async def embed(self, texts: Any, *, model: str | None = None) -> list[list[float]]:
        return [[0.25, 0.0, -0.125], [0.5, -1.0, 2.0]]


class EmbedsLetters(TheirClient):
    async def embed(self, texts: Any, *, model: str | None = None) -> list[list[float]]:
        return [[0.5] for _ in texts]


class EmbedsLater(TheirClient):
    async def embed(self, texts: Any, *, model: str | None = None) -> list[list[float]]:
        raise ProviderUnavailable("not now")


class CountsAnything(TheirClient):
    async def count_tokens(self, messages: list[Any], tools: Any = None) -> Any:
        return len(str(messages))


class SilentVerdict(TheirClient):
    async def moderate(self, text: str, *, model: str | None = None) -> Any:
        return None


class CountsNothing(TheirClient):
    async def count_tokens(self, messages: list[Any], tools: Any = None) -> Any:
        return 0.5


class CannotCount(TheirClient):
    async def count_tokens(self, messages: list[Any], tools: Any = None) -> int:
        raise NotImplementedError


DEFECTS: list[tuple[type[TheirClient], Case]] = [
    (UserAnswers, llm_answers.a_text_is_an_answer),
    (NoModel, llm_answers.a_text_is_an_answer),
    (NeverSilent, llm_answers.an_answer_may_be_empty),
    (NeedsNumbers, llm_answers.an_option_of_none_is_no_option),
    (OddMessage, llm_answers.a_message_goes_back_as_it_is),
    (LosesOptions, llm_answers.what_is_asked_is_sent),
    (LosesTools, llm_answers.what_is_asked_is_sent),
    (TidiesMessages, llm_answers.what_is_given_is_left_alone),
    (CachedApart, llm_answers.usage_is_counted_in_one_way),
    (TheirCounts, llm_answers.usage_is_counted_in_one_way),
    (CountsNone, llm_answers.usage_is_counted_in_one_way),
    (TheirWords, llm_answers.an_answer_that_was_cut_short_says_so),
    (OnlyAscii, llm_answers.text_in_any_script_goes_there_and_back),
    (Encodes, llm_answers.a_lone_surrogate_is_sent_or_refused),
    (SendsAnything, llm_answers.what_are_no_messages_is_refused),
    (OneAtATime, llm_answers.several_may_ask_at_once),
    (BusyAfterCancel, llm_answers.a_cancelled_call_leaves_the_client_usable),
    (SwallowsCancel, llm_answers.a_cancelled_call_leaves_the_client_usable),
    (BusyAfterCancel, llm_answers.a_call_that_runs_out_of_time_is_let_go),
    (BoundToALoop, llm_answers.event_loops_take_turns),
    (PlainCalls, llm_answers.calls_come_whole_and_last),
    (NumberedCalls, llm.a_call_is_a_dict_and_an_object),
    (Renumbers, llm.calls_side_by_side_are_told_apart),
    (FirstCallOnly, llm.calls_side_by_side_are_told_apart),
    (ReprArguments, llm.arguments_are_as_given),
    (LosesResults, llm.results_of_tools_are_sent_back),
    (LosesAPiece, llm_answers.pieces_joined_are_the_answer),
    (AllAtOnce, llm_answers.a_stream_left_early_leaves_nothing),
    (AnotherWhole, llm_answers.an_answer_is_the_same_however_it_came),
    (EndsWhenCancelled, llm_answers.a_cancelled_stream_leaves_the_client_usable),
    (CallsInTheMiddle, llm_answers.calls_come_whole_and_last),
    (NoUsageInStreams, llm_answers.the_last_piece_has_the_rest),
    (LosesTools, llm_answers.a_stream_sends_what_it_is_given),
    (SendsAnything, llm_answers.a_stream_of_no_messages_is_refused),
    (LeavesATask, llm_answers.a_stream_left_early_leaves_nothing),
    (EndsAnyway, llm_answers.a_stream_that_is_cut_is_an_error),
    (EndsAnyway, llm_answers.a_cut_stream_asked_for_whole_is_an_error),
    (CallsAsTheyCome, llm_answers.a_stream_that_is_cut_is_an_error),
    (CallsAsTheyCome, llm_answers.a_stream_that_stalls_is_an_error),
    (ForgetsTheWait, llm_answers.a_stream_that_is_refused_says_why),
    (OneKindOfError, llm.a_refusal_has_its_type),
    (RetriesNothing, llm.a_refusal_has_its_type),
    (ForgetsTheWait, llm.the_wait_a_provider_asks_for_is_told),
    (ForeignErrors, llm.a_broken_connection_is_an_error),
    (BrokenForGood, llm.a_failure_is_over_with_the_next_answer),
    (TellsTheKey, llm.the_key_is_in_no_error),
    (TellsTheKeyBelow, llm.the_key_is_in_no_error),
    (TellsTheKey, llm.the_key_is_in_no_error_of_a_stream),
    (EmbedsUnordered, llm.each_text_has_a_vector),
    (EmbedsLetters, llm.what_are_no_texts_is_refused),
    (EmbedsLater, llm.vectors_that_are_refused_say_why),
    (CountsAnything, llm.tokens_of_no_messages_are_not_counted),
    (SilentVerdict, llm.a_verdict_is_a_dict),
    (CountsNothing, llm.tokens_are_counted),
    (CannotCount, llm.tokens_are_counted),
]


def made_by(client: Callable[[Provider], LLMClient]) -> Make:
    @asynccontextmanager
    async def make(script: Sequence[Reply]) -> AsyncIterator[LLMClient]:
        yield client(scripted(script))

    return make


@pytest.mark.parametrize(("defect", "case"), DEFECTS, ids=[f"{d.__name__}-{c.__name__}" for d, c in DEFECTS])
async def test_a_defect_is_found(defect: type[TheirClient], case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    # What is seen by waiting is waited for a little less.
    monkeypatch.setattr(llm_answers, "PATIENCE", 1.0)
    await case(make)
    with pytest.raises((AssertionError, AgentRuntimeError, RuntimeError, NotImplementedError, TypeError)):
        await case(made_by(defect))


async def test_a_client_that_waits_for_ever_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_runtime_core.testing.contracts.llm_fixtures.PATIENCE", 0.3)
    with pytest.raises(TimeoutError):
        await llm_answers.a_stream_that_stalls_is_an_error(made_by(WaitsForEver))


async def test_a_client_need_not_stream() -> None:
    class Whole(TheirClient):
        async def generate(self, messages: list[Any], **options: Any) -> LLMResponse:
            async for chunk in TheirClient.stream(self, messages, **{**options, "stream": None}):
                if chunk.response is not None:
                    return chunk.response
            raise StreamCut("the answer has no end")

        def stream(self, messages: list[Any], **options: Any) -> Any:
            raise NotSupported("Whole has no stream()")

    await llm.check(made_by(Whole))


async def test_what_a_script_cannot_say_is_passed_over_only_where_it_is_optional() -> None:
    @asynccontextmanager
    async def only_text(script: Sequence[Reply]) -> AsyncIterator[LLMClient]:
        if any(isinstance(reply, HttpError) for reply in script):
            raise NotSupported("this provider refuses nothing")
        yield TheirClient(scripted(script))

    await llm_answers.a_stream_that_is_refused_says_why(only_text)
    with pytest.raises(NotSupported):
        await llm.a_refusal_has_its_type(only_text)


def test_every_case_is_in_the_table() -> None:
    functions = [
        each for part in PARTS for each in vars(part).values() if getattr(each, "__module__", "") == part.__name__
    ]
    cases = {each for each in functions if each.__annotations__ == {"make": "Make", "return": "None"}}
    assert cases == set(llm.CASES)
    assert len({case.__name__ for case in llm.CASES}) == len(llm.CASES)
    assert cases == {case for _, case in DEFECTS}


async def test_check_runs_every_case() -> None:
    await llm.check(make)
    with pytest.raises(AssertionError):
        await llm.check(made_by(UserAnswers))
