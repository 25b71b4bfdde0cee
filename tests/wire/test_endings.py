"""How an answer ends, on each wire with the real SDK: finished, cut, refused, failed; and what is counted of it."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agent_runtime_core import (
    AgentRunner,
    RunnerConfig,
    RunStatus,
    Tool,
    ToolCallingAgent,
    ToolRegistry,
    configure,
    llm,
)
from agent_runtime_core.errors import ProviderError, ProviderUnavailable, RequestRefused, StreamCut
from agent_runtime_core.interfaces import LLMClient, TraceSink
from agent_runtime_core.llm import Retries, Timeouts
from agent_runtime_core.testing import VirtualClock
from agent_runtime_core.testing.contracts.llm import Call, Disconnect, HttpError, TextReply, Usage
from tests.support.litellm_cleanup import settled
from tests.support.llm_servers import Finished, anthropic_script, openai_script
from tests.support.provider_server import Script, Scripted, WireServer, script, serving, stream
from tests.wire.conftest import LITELLM
from tests.wire.sides import ask, user

KEY = "sk-canary-of-the-wire-tests"
ASK = [user("How warm is it in Oslo?")]
OSLO = Call("call_a", "weather", {"city": "Oslo"})
TEXT = TextReply("4 °C", ("4 ", "°C"))
CALLING = TextReply("Let me see.", tool_calls=(OSLO,), finish_reason="tool_calls")
WEATHER = Tool("weather", "The weather of a city.", {"type": "object"}, lambda city: "4 °C", has_side_effects=True)
MODELS = {"openai": "m", "anthropic": "m", "litellm": "openai/m"}
Reply = Any


class Wire:
    """One of the clients, on a server that answers with a script."""

    def __init__(self, name: str) -> None:
        self.name, self.clock = name, VirtualClock()
        self.model = MODELS[name]
        self.script: Callable[[Reply, dict[str, Any]], Script] = (
            anthropic_script if name == "anthropic" else openai_script
        )

    @asynccontextmanager
    async def asking(self, *replies: Reply, **options: Any) -> AsyncIterator[tuple[llm.ChatClient, WireServer]]:
        scripts: Sequence[Scripted] = [
            each if isinstance(each, Script) else functools.partial(self.script, each) for each in replies
        ]
        async with serving(*scripts) as server:
            make = {"openai": llm.OpenAIClient, "anthropic": llm.AnthropicClient, "litellm": llm.LiteLLMClient}
            given = {"retries": Retries(max_attempts=1), "clock": self.clock, "timeouts": Timeouts(), **options}
            client = make[self.name](api_key=KEY, base_url=server.url, default_model=self.model, **given)
            try:
                yield client, server
            finally:
                await client.close()
                if self.name == "litellm":
                    await settled()


@pytest.fixture(params=["openai", "anthropic", LITELLM])
def wire(request: pytest.FixtureRequest, sdk: Any, monkeypatch: pytest.MonkeyPatch) -> Wire:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    sdk(request.param)
    return Wire(request.param)


@pytest.fixture(params=["whole", "drained", "streamed"])
def how_asked(request: pytest.FixtureRequest) -> str:
    """`generate()`, `generate(stream=True)` or `stream()`."""
    return str(request.param)


async def answer(client: LLMClient, how: str, **options: Any) -> llm.LLMResponse:
    if how == "drained":
        options["stream"] = True
    return await ask(client, ASK, streamed=how == "streamed", **options)


# -- a finished answer counts


@pytest.mark.parametrize("says", [TEXT, CALLING], ids=["text", "call"])
@pytest.mark.parametrize("ending", ["closed", "cut", "open"])
async def test_a_finished_answer_counts_however_its_connection_ends(
    wire: Wire, how_asked: str, says: TextReply, ending: str
) -> None:
    if wire.name == "litellm" and how_asked == "whole" and ending != "closed":
        pytest.skip("litellm reads a response that is not streamed to its end")
    async with wire.asking(Finished(says, ending), retries=Retries(base=0)) as (client, server):
        response = await answer(client, how_asked)
    assert response.message["content"] == says.text
    assert [(each.id, json.loads(each.arguments)) for each in response.tool_calls] == [
        (each.id, each.arguments) for each in says.tool_calls
    ]
    assert (response.finish_reason, len(server.asked)) == (says.finish_reason, 1)
    assert {name: response.usage[name] for name in ("prompt_tokens", "completion_tokens")} == {
        "prompt_tokens": 7,
        "completion_tokens": 5,
    }


@pytest.mark.parametrize("ending", ["closed", "cut"])
async def test_a_finished_answer_counts_without_its_usage(wire: Wire, ending: str) -> None:
    async with wire.asking(Finished(CALLING, ending, usage=False), retries=Retries(base=0)) as (client, server):
        response = await answer(client, "streamed")
    assert ([each.id for each in response.tool_calls], len(server.asked)) == (["call_a"], 1)
    if wire.name != "litellm":  # which counts tokens itself
        assert "completion_tokens" not in response.usage


async def test_the_usage_of_an_open_response_is_awaited_for_two_seconds(wire: Wire) -> None:
    async with wire.asking(Finished(CALLING, "open", usage=False)) as (client, server):
        asked = asyncio.create_task(answer(client, "drained"))
        async with asyncio.timeout(60):
            await wire.clock.until_sleeping()
            wire.clock.advance(1.9)
            assert wire.clock.next_due == pytest.approx(0.1)
            wire.clock.advance(0.1)
            assert [each.id for each in (await asked).tool_calls] == ["call_a"]
            await server.let_go.wait()


async def test_a_time_limit_below_the_wait_for_the_usage_loses_no_answer(wire: Wire) -> None:
    short = Timeouts(between_chunks=0.3)
    if wire.name == "litellm":
        await llm.LiteLLMClient("openai/m").warm_up()
    async with wire.asking(Finished(TEXT, "open", usage=False), timeouts=short) as (client, server):
        response = await answer(client, "streamed")
    assert (response.message["content"], len(server.asked)) == ("4 °C", 1)


async def test_a_long_answer_of_claude_counts_however_its_connection_ends(sdk: Any) -> None:
    sdk("anthropic")
    for ending in ("closed", "cut", "open"):
        async with Wire("anthropic").asking(Finished(TEXT, ending)) as (client, server):
            response = await client.generate(ASK, max_tokens=50_000)  # streamed underneath
        assert (response.message["content"], response.usage["completion_tokens"]) == ("4 °C", 5)
        assert server.asked[0]["stream"] is True


async def test_text_after_an_early_finish_reason_belongs_to_the_answer(sdk: Any) -> None:
    sdk("openai")

    def chunk(text: str) -> dict[str, Any]:
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": "stop"}
        return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}

    pieces: list[Any] = []
    async with Wire("openai").asking(stream(*map(chunk, "abc"))) as (client, _):
        response = await ask(client, ASK, streamed=True, into=pieces)
    assert response.message["content"] == "".join(each.delta for each in pieces) == "abc"


async def test_a_call_that_is_not_finished_is_no_call(wire: Wire, how_asked: str) -> None:
    async with wire.asking(Disconnect(CALLING)) as (client, _):
        if wire.name == "litellm":
            await client.warm_up()  # type: ignore[attr-defined]
        with pytest.raises(ProviderUnavailable if how_asked == "whole" else StreamCut):
            await answer(client, how_asked)


# -- the table of endings

UNKNOWN = "unheard_of"
NOTHING = TextReply("", usage=Usage(0, 0))
LITELLM_REPLACES = "litellm replaces a reason that it does not know by stop"
FAILED = ["abort", "ABORTED", "insufficient_system_resource", "network_error", "FinishReason.INTERNAL_ERROR", "timeout"]
UNUSABLE = [
    *(pytest.param(TextReply("The total is 1", finish_reason=each), ProviderUnavailable, each) for each in FAILED),
    pytest.param(NOTHING, ProviderUnavailable, "no tokens", id="nothing"),
    pytest.param(TextReply("", usage=Usage(9, 0)), ProviderUnavailable, "no tokens", id="nothing for a prompt"),
    pytest.param(TextReply("I book it.", finish_reason="tool_calls"), RequestRefused, "contains none", id="no call"),
    pytest.param(TextReply("", finish_reason=UNKNOWN), RequestRefused, UNKNOWN, id="unknown without text"),
    pytest.param(
        TextReply("", tool_calls=(OSLO,), finish_reason=UNKNOWN), RequestRefused, UNKNOWN, id="unknown with a call"
    ),
]


@pytest.mark.parametrize(("says", "kind", "words"), UNUSABLE)
async def test_an_answer_that_is_none_is_asked_for_again_and_then_fails(
    wire: Wire, how_asked: str, says: TextReply, kind: type[ProviderError], words: str
) -> None:
    if wire.name == "litellm" and says.finish_reason == UNKNOWN:
        pytest.skip(LITELLM_REPLACES)
    async with wire.asking(says, retries=Retries(max_attempts=2, base=0)) as (client, server):
        with pytest.raises(ProviderError, match=words) as caught:
            await answer(client, how_asked)
    assert (type(caught.value), caught.value.retriable) == (kind, True)
    # Text that was streamed to the caller cannot be taken back.
    assert len(server.asked) == (1 if how_asked == "streamed" and says.text else 2)


@pytest.mark.parametrize("says", [NOTHING, TextReply("", finish_reason="tool_calls")], ids=["nothing", "no call"])
async def test_the_next_answer_may_be_a_good_one(wire: Wire, how_asked: str, says: TextReply) -> None:
    async with wire.asking(says, TEXT, retries=Retries(max_attempts=2, base=0)) as (client, server):
        assert (await answer(client, how_asked)).message["content"] == "4 °C"
    assert len(server.asked) == 2


async def test_an_unknown_reason_with_text_is_a_success_with_one_warning(
    wire: Wire, how_asked: str, caplog: pytest.LogCaptureFixture
) -> None:
    if wire.name == "litellm":
        pytest.skip(LITELLM_REPLACES)
    reason = f"unheard_of_{wire.name}_{how_asked}"
    with caplog.at_level(logging.WARNING):
        async with wire.asking(TextReply("4 °C", finish_reason=reason)) as (client, _server):
            for _ in range(2):
                response = await answer(client, how_asked)
                assert (response.message["content"], response.finish_reason) == ("4 °C", reason)
    assert [each.getMessage() for each in caplog.records if reason in each.getMessage()] == [
        f"{wire.name}, model 'contract-model': unknown finish_reason '{reason}'. The answer counts as complete"
    ]


async def test_an_empty_answer_with_tokens_is_an_answer(wire: Wire, how_asked: str) -> None:
    async with wire.asking(TextReply("", usage=Usage(7, 2))) as (client, server):
        assert (await answer(client, how_asked)).finish_reason == "stop"
    assert len(server.asked) == 1


# -- every answer that was billed is counted


def agent(client: LLMClient, **options: Any) -> ToolCallingAgent:
    registry = ToolRegistry()
    registry.register(WEATHER)
    members = {"key": "billed", "system_prompt": "s", "tools": registry, "get_llm_client": lambda self: client}
    made: ToolCallingAgent = type("Billed", (ToolCallingAgent,), {**members, **options})()
    return made


AT_ONCE = RunnerConfig(retry_backoff_max=0)
BILLED = Usage(1000, 100_000)  # 1.001 USD
THROWN_AWAY = [
    pytest.param(TextReply("", usage=BILLED, finish_reason="malformed_function_call"), id="unreadable call"),
    pytest.param(TextReply("", usage=BILLED, finish_reason="tool_calls"), id="no call"),
    pytest.param(TextReply("half", usage=BILLED, finish_reason="abort"), id="failed"),
]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("says", THROWN_AWAY)
async def test_what_was_thrown_away_counts_against_the_limit(wire: Wire, says: TextReply, streamed: bool) -> None:
    configure(model_prices={"m": {"input": 1, "output": 10}})
    retries = Retries(max_attempts=4, base=0)
    async with wire.asking(says, retries=retries) as (client, server), AgentRunner(config=AT_ONCE) as runner:
        result = await runner.execute(
            agent(client, limits={"max_cost_usd": 2.0}, stream=streamed), input_data={"messages": ASK}
        )
    assert result.status is RunStatus.FAILED
    assert result.error is not None
    assert result.error.type.endswith("LimitExceeded")
    assert len(server.asked) == 2
    assert result.usage["cost_usd"] == pytest.approx(2.002)
    assert "estimated_cost_usd" not in result.usage


async def test_the_usage_of_a_good_answer_is_added_to_what_was_thrown_away(wire: Wire) -> None:
    configure(model_prices={"m": {"input": 1, "output": 10}})
    bad = TextReply("", usage=BILLED, finish_reason="tool_calls")
    retries = Retries(max_attempts=2, base=0)
    replies = bad, CALLING, HttpError(400), TEXT
    async with wire.asking(*replies, retries=retries) as (client, server), AgentRunner(config=AT_ONCE) as runner:
        billed = agent(client)
        first = await runner.execute(billed, input_data={"messages": ASK}, run_id="r")
        assert (first.status, first.usage["prompt_tokens"]) == (RunStatus.FAILED, 1007)
        await runner.resume("r")
        result = await runner.execute(billed, input_data={"messages": ASK}, run_id="r")
    assert (result.final_output, len(server.asked)) == ({"response": "4 °C"}, 4)
    assert result.usage["prompt_tokens"] == 1014
    assert result.usage["cost_usd"] == pytest.approx(1.001 + 2 * 0.000057)


@pytest.mark.parametrize(
    ("counted", "status", "requests"), [(False, RunStatus.SUCCEEDED, 2), (True, RunStatus.FAILED, 1)]
)
async def test_a_broken_stream_without_a_usage_is_an_estimate(
    sdk: Any, counted: bool, status: RunStatus, requests: int
) -> None:
    sdk("openai")
    limits = {"max_tokens": 1000, "count_estimates": counted}
    async with (
        Wire("openai").asking(Disconnect(), TEXT, retries=Retries(max_attempts=2, base=0)) as (client, server),
        AgentRunner(config=AT_ONCE) as runner,
    ):
        result = await runner.execute(agent(client, limits=limits, stream=True), input_data={"messages": ASK})
    assert (result.status, len(server.asked)) == (status, requests)
    assert 1024 < result.usage["estimated_tokens"] < 1100


async def test_an_error_has_the_usage_of_its_answer(wire: Wire, how_asked: str) -> None:
    async with wire.asking(TextReply("x", usage=BILLED, finish_reason="tool_calls")) as (client, _):
        with pytest.raises(ProviderError) as caught:
            await answer(client, how_asked)
    assert caught.value.usage["total_tokens"] == 101_000


async def test_a_stream_that_breaks_after_its_usage_counts_it(sdk: Any) -> None:
    sdk("anthropic")
    sdk("openai")
    async with Wire("anthropic").asking(Disconnect(TEXT)) as (client, _):
        with pytest.raises(StreamCut) as cut:
            await answer(client, "drained")
    assert cut.value.usage == {"prompt_tokens": 7}
    counts = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    choice = {"index": 0, "delta": {"content": "4"}, "finish_reason": None}
    piece = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    for end in ({"error": {"message": "no", "code": 500}}, None):
        told = stream({**piece, "usage": counts}, *([end] if end else []), end="", broken=end is None)
        async with Wire("openai").asking(told) as (client, _):
            with pytest.raises(ProviderError) as caught:
                await answer(client, "drained")
        assert caught.value.usage == counts


async def test_an_error_in_an_answer_may_have_a_usage(sdk: Any) -> None:
    sdk("openai")
    body = {"error": {"message": "no", "code": 502}, "usage": {"prompt_tokens": 7, "completion_tokens": 5}}
    async with Wire("openai").asking(script(body)) as (client, _):
        with pytest.raises(ProviderUnavailable) as caught:
            await client.generate(ASK)
    assert caught.value.usage["total_tokens"] == 12


# -- traces


async def test_a_trace_names_the_provider_and_the_model_also_of_a_failed_call(wire: Wire) -> None:
    calls: list[dict[str, Any]] = []

    class Sink(TraceSink):
        async def trace(self, event: dict[str, Any]) -> None:
            if event["type"] == "llm.call":
                calls.append(event)

    async with (
        wire.asking(CALLING, HttpError(400)) as (client, _),
        AgentRunner(config=AT_ONCE, trace_sinks=[Sink()]) as runner,
    ):
        await runner.execute(agent(client), input_data={"messages": ASK})
    assert [(each["provider"], bool(each["error"])) for each in calls] == [(wire.name, False), (wire.name, True)]
    assert [each["model"] for each in calls][1:] == [wire.model]
