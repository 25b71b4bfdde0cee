"""The scripted model and tool, the judge, and run_agent_test with a model."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent_runtime_core.errors import InvalidArgument, MissingDependency, NotConfigured, RateLimited
from agent_runtime_core.interfaces import (
    AgentRuntime,
    LLMClient,
    LLMResponse,
    LLMStreamChunk,
    RunContext,
    RunResult,
    ToolCallDict,
    ToolRegistry,
)
from agent_runtime_core.llm import AnthropicClient, get_llm_client, use_llm_client
from agent_runtime_core.llm._client import ChatClient, forbid_remote
from agent_runtime_core.llm._provider import Completion, ProviderAdapter, Request
from agent_runtime_core.testing import (
    LLMEvaluator,
    MockLLMClient,
    MockLLMResponse,
    MockTool,
    RecordingLLMClient,
    create_test_context,
    models,
    run_agent_test,
)
from agent_runtime_core.tools.invocation import answer_call
from tests.support.cases import for_each
from tests.support.provider_server import script, serving

HELLO = [{"role": "user", "content": "Hello!"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


async def said(client: LLMClient) -> str | None:
    content: str | None = (await client.generate(HELLO)).message["content"]
    return content


async def streamed(client: LLMClient, **options: Any) -> list[LLMStreamChunk]:
    return [chunk async for chunk in client.stream(HELLO, **options)]


# MockLLMClient


@pytest.mark.sentence("004", "`MockProvider`-based tests validate loop behavior without network dependencies")
async def test_responses_come_in_order_then_the_default() -> None:
    client = MockLLMClient(
        [MockLLMResponse("one"), {"role": "assistant", "content": "two"}, "three"], default_response="more"
    )
    assert [await said(client) for _ in range(5)] == ["one", "two", "three", "more", "more"]
    assert await said(MockLLMClient()) == "Mock response"


async def test_an_answer_has_a_message_usage_and_the_model_asked_for() -> None:
    client = MockLLMClient([MockLLMResponse("hi", [CALL], "length"), MockLLMResponse("hi")])
    first, second = await client.generate(HELLO), await client.generate(HELLO, model="gpt-4o")
    assert first.message == {"role": "assistant", "content": "hi", "tool_calls": [CALL]}
    assert second.message == {"role": "assistant", "content": "hi"}
    assert (first.model, second.model) == ("mock-model", "gpt-4o")
    assert (first.finish_reason, second.finish_reason) == ("length", "stop")
    assert first.usage == {"prompt_tokens": 10, "completion_tokens": 20, "total_tokens": 30}
    assert (first.tool_calls[0].id, first.tool_calls[0]["function"]["name"]) == ("c1", "add")


async def test_a_message_with_tool_calls_ends_for_them() -> None:
    client = MockLLMClient([{"tool_calls": [CALL]}])
    response = await client.generate(HELLO)
    assert response.message == {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert response.finish_reason == "tool_calls"


async def test_a_whole_response_scripts_usage_and_cost() -> None:
    whole = LLMResponse({"role": "assistant", "content": "a"}, {"prompt_tokens": 7}, cost_usd=0.5)
    given = await MockLLMClient([whole]).generate(HELLO, model="m")
    assert (given.usage, given.cost_usd, given.model) == ({"prompt_tokens": 7}, 0.5, "m")
    assert whole.model == ""


@pytest.mark.parametrize("messages", ["Hello!", HELLO[0], ["Hello!"], None])
async def test_what_no_model_can_be_asked_is_refused(messages: Any) -> None:
    client = MockLLMClient()
    with pytest.raises(InvalidArgument, match="messages"):
        await client.generate(messages)
    with pytest.raises(InvalidArgument, match="messages"):
        await anext(client.stream(messages))
    assert client.get_call_count() == 0
    assert (await client.generate([])).message["content"] == "Mock response"


async def test_an_exception_among_the_responses_is_raised_once() -> None:
    client = MockLLMClient([RateLimited("slow down", retry_after=3.0), "then this"])
    with pytest.raises(RateLimited, match="slow down") as caught:
        await client.generate(HELLO)
    assert caught.value.retry_after == 3.0
    assert await said(client) == "then this"
    assert client.get_call_count() == 2
    with pytest.raises(RateLimited):
        await streamed(MockLLMClient([RateLimited()]))


async def test_a_function_answers_every_call_and_wins() -> None:
    def answer(messages: list[Any]) -> MockLLMResponse:
        return MockLLMResponse(messages[-1]["content"].upper())

    client = MockLLMClient(["unused"], response_fn=answer)
    assert [await said(client), await said(client)] == ["HELLO!", "HELLO!"]


async def test_calls_are_noted_as_they_were() -> None:
    client = MockLLMClient()
    messages: list[Any] = [{"role": "user", "content": "a"}]
    tools = MockTool("add").to_openai_format()
    await client.generate(messages, model="m", tools=[tools], temperature=0, top_p=1)
    messages.append({"role": "assistant", "content": "b"})
    messages[0]["content"] = "changed"
    await client.generate(messages)
    first, second = client.get_calls()
    assert first == {
        "messages": [{"role": "user", "content": "a"}],
        "model": "m",
        "tools": [tools],
        "kwargs": {"temperature": 0, "top_p": 1},
    }
    assert len(second["messages"]) == 2
    assert (second["model"], second["tools"], second["kwargs"]) == (None, None, {})


async def test_reset_forgets_and_rewinds() -> None:
    client = MockLLMClient(["one", "two"])
    await said(client)
    client.reset()
    assert (client.get_calls(), client.get_call_count()) == ([], 0)
    assert await said(client) == "one"


async def test_what_an_agent_does_to_an_answer_stays_out_of_the_script() -> None:
    client = MockLLMClient([{"content": "a", "tool_calls": [CALL]}])
    (await client.generate(HELLO)).message["tool_calls"][0]["function"]["name"] = "changed"
    client.reset()
    assert (await client.generate(HELLO)).tool_calls[0].name == "add"


async def test_a_stream_comes_in_pieces_and_a_last_chunk() -> None:
    client = MockLLMClient(["one and twenty letters", {"tool_calls": [CALL]}])
    chunks = await streamed(client, model="m", temperature=0.5)
    assert [chunk.delta for chunk in chunks] == ["one and tw", "enty lette", "rs", ""]
    assert all(chunk.finish_reason is None and chunk.response is None for chunk in chunks[:-1])
    last = chunks[-1]
    assert (last.finish_reason, last.tool_calls) == ("stop", None)
    assert last.usage == {"prompt_tokens": 10, "completion_tokens": 20, "total_tokens": 30}
    assert last.response is not None
    assert last.response.message["content"] == "one and twenty letters"
    calls = await streamed(client)
    assert [chunk.delta for chunk in calls] == ["", ""]
    assert calls[-1].tool_calls == [CALL]
    assert isinstance((calls[-1].tool_calls or [])[0], ToolCallDict)
    assert client.get_calls()[0]["model"] == "m"
    assert client.get_calls()[0]["kwargs"] == {"temperature": 0.5}


def test_what_is_no_answer_is_refused_at_once() -> None:
    wrong: Any = [42]
    with pytest.raises(InvalidArgument, match=r"mock response must be .* got 42"):
        MockLLMClient(wrong)


# run_agent_test


class Asks(AgentRuntime):
    """The README's agent: it asks the configured client."""

    key = "asks"

    async def run(self, ctx: RunContext) -> RunResult:
        response = await get_llm_client().generate(ctx.input_messages)
        return RunResult(final_output={"response": response.message["content"]})


class Echo(ProviderAdapter):
    """A provider far away that would be asked."""

    provider = "far"

    async def request(self, request: Request) -> Completion:
        return Completion({"role": "assistant", "content": "from afar"}, {}, request.model, "stop")

    def stream(self, request: Request) -> Any:
        raise AssertionError

    def translate(self, error: Exception, model: str) -> None:
        return None


class AsksFar(AgentRuntime):
    """An agent with a client of its own."""

    key = "far"

    async def run(self, ctx: RunContext) -> RunResult:
        response = await ChatClient(Echo(), default_model="m").generate(ctx.input_messages)
        return RunResult(final_output={"response": response.message["content"]})


@pytest.fixture(scope="module", autouse=True)
def _only_what_is_new_is_collected() -> None:
    # With all that other tests have imported, each collection would take a second.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_other_mock() -> None:
    gc.collect()  # a failed test's traceback may hold one


async def test_the_readme_s_agent_is_driven_by_the_mock() -> None:
    ctx = create_test_context(input_messages=HELLO)
    mock_llm = MockLLMClient(responses=[{"role": "assistant", "content": "Hi there!"}])
    result = await run_agent_test(Asks(), ctx)
    assert result.final_output["response"] == "Hi there!"
    assert mock_llm.get_calls()[0]["messages"] == HELLO
    result, _ = await run_agent_test(Asks(), "Again")
    assert result.final_output["response"] == "Mock response"


async def test_the_latest_mock_somebody_holds_is_taken() -> None:
    older = MockLLMClient(["older"])
    newer = MockLLMClient(["newer"])
    assert (await run_agent_test(Asks(), "a"))[0].final_output["response"] == "newer"
    del newer
    gc.collect()
    assert (await run_agent_test(Asks(), "a"))[0].final_output["response"] == "older"
    assert older.get_call_count() == 1


async def test_a_mock_alone_changes_nothing_outside() -> None:
    mock = MockLLMClient()
    await run_agent_test(Asks(), "a")
    with pytest.raises((NotConfigured, MissingDependency)):
        get_llm_client()
    assert mock.get_call_count() == 1


@pytest.fixture
def no_mock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the mocks of other tests, which a failure or a cycle may still reference."""
    monkeypatch.setattr(models, "_living", weakref.WeakValueDictionary())


@pytest.mark.usefixtures("no_mock")
async def test_without_a_mock_a_real_client_is_refused() -> None:
    with pytest.raises(NotConfigured, match="MockLLMClient"):
        await run_agent_test(AsksFar(), "a")
    ctx = create_test_context("a")
    with pytest.raises(NotConfigured, match="use_llm_client"):
        await run_agent_test(AsksFar(), ctx)


@pytest.mark.usefixtures("no_mock")
async def test_the_refusal_holds_side_by_side_and_ends_with_the_last() -> None:
    refused: list[str] = []

    class Slow(AsksFar):
        def __init__(self) -> None:
            self.inside, self.gate = asyncio.Event(), asyncio.Event()

        async def run(self, ctx: RunContext) -> RunResult:
            self.inside.set()
            await self.gate.wait()
            try:
                return await super().run(ctx)
            except NotConfigured as error:
                refused.append(str(error))
                return RunResult()

    before = forbid_remote("the ban around")
    try:
        agents = [Slow(), Slow()]
        runs = [asyncio.ensure_future(run_agent_test(agent, "a")) for agent in agents]
        for agent in agents:
            await agent.inside.wait()
        for agent, run in zip(agents, runs, strict=True):
            agent.gate.set()
            await run
        assert forbid_remote(None) == "the ban around"
    finally:
        forbid_remote(before)
    assert len(refused) == 2
    assert all("run_agent_test" in reason for reason in refused)


async def test_with_a_mock_an_agent_s_own_client_is_its_own_business() -> None:
    before = forbid_remote(None)
    try:
        mock = MockLLMClient()
        result, _ = await run_agent_test(AsksFar(), "a")
    finally:
        forbid_remote(before)
    assert result.final_output["response"] == "from afar"
    assert mock.get_call_count() == 0


async def test_a_client_chosen_by_hand_goes_before_a_mock() -> None:
    mock, chosen = MockLLMClient(["mock"]), MockLLMClient(["chosen"])
    newest = MockLLMClient(["newest"])
    with use_llm_client(chosen):
        assert (await run_agent_test(Asks(), "a"))[0].final_output["response"] == "chosen"
    assert (mock.get_call_count(), newest.get_call_count()) == (0, 0)


# MockTool


def registry(*tools: MockTool) -> ToolRegistry:
    found = ToolRegistry()
    for tool in tools:
        found.register(tool)
    return found


@pytest.mark.sentence("004", "`MockProvider`-based tests validate loop behavior without network dependencies")
async def test_a_tool_gives_its_result_and_notes_its_calls() -> None:
    tool = MockTool("search", result={"hits": [1]}, has_side_effects=True, metadata={"m": 1})
    tools = registry(tool)
    first = await tools.execute("search", {"q": "a"})
    first["hits"].clear()
    assert await tools.execute("search", '{"q": "b"}') == {"hits": [1]}
    assert tool.calls == [{"q": "a"}, {"q": "b"}]
    assert tool.call_count == 2
    assert (tool.has_side_effects, tool.metadata) == (True, {"m": 1})
    assert "search" in repr(tool)
    assert await registry(MockTool("none")).execute("none", {}) is None


async def test_results_come_in_order_and_an_exception_is_raised() -> None:
    tool = MockTool("fetch", results=["one", ConnectionError("down"), "three"])
    tools = registry(tool)
    assert await tools.execute("fetch", {}) == "one"
    with pytest.raises(ConnectionError, match="down"):
        await tools.execute("fetch", {})
    assert await tools.execute("fetch", {}) == "three"
    with pytest.raises(AssertionError, match="MockTool 'fetch' must have a result for each call, got 3 for 4 calls"):
        await tools.execute("fetch", {})
    tool.reset()
    assert tool.calls == []
    assert await tools.execute("fetch", {}) == "one"


async def test_a_function_tells_parameters_and_gets_the_context() -> None:
    def lookup(city: str, ctx: RunContext, days: int = 1) -> str:
        """Look up the weather."""
        return f"{city} {days} {ctx.run_id}"

    async def later(city: str) -> str:
        return city.upper()

    tool, slow = MockTool("weather", fn=lookup), MockTool("later", fn=later)
    ctx = create_test_context("a", tools=[tool, slow])
    assert tool.parameters["required"] == ["city"]
    assert set(tool.parameters["properties"]) == {"city", "days"}
    assert tool.description == "Look up the weather."
    assert await ctx.tools.execute("weather", {"city": "Oslo", "days": 2}, ctx) == f"Oslo 2 {ctx.run_id}"
    assert await ctx.tools.execute("later", {"city": "Oslo"}, ctx) == "OSLO"
    tool.assert_called_with(city="Oslo", days=2)
    slow.assert_called_with(city="Oslo")
    with pytest.raises(InvalidArgument):
        await ctx.tools.execute("weather", {"town": "Oslo"}, ctx)
    assert tool.call_count == 1


async def test_assert_called_with_is_of_the_last_call() -> None:
    tool = MockTool("add", result=3)
    with pytest.raises(AssertionError, match=r"must be called with .*, got no call"):
        tool.assert_called_with(a=1)
    tools = registry(tool)
    await tools.execute("add", {"a": 1})
    await tools.execute("add", {"a": 2})
    tool.assert_called_with(a=2)
    with pytest.raises(AssertionError, match=r"last of 2 calls .* \{'a': 1\}, got \{'a': 2\}. An earlier"):
        tool.assert_called_with(a=1)
    with pytest.raises(AssertionError, match="must have the arguments"):
        tool.assert_called_with(a=2, b=3)


def test_a_tool_has_one_source_of_results() -> None:
    with pytest.raises(InvalidArgument, match="one of result=, results= and fn="):
        MockTool("t", result=None, results=[1])


async def test_a_model_s_calls_are_answered_by_it() -> None:
    tool = MockTool("fetch", results=["one", ConnectionError("down")], timeout=5.0)
    call, ctx = ToolCallDict({"id": "c1", "function": {"name": "fetch", "arguments": '{"url": "u"}'}}), None
    first = await answer_call(registry(tool), call, ctx)
    second = await answer_call(registry(tool), call, ctx)
    assert (first.ok, first.content) == (True, "one")
    assert (second.ok, second.error) == (False, "failed")
    assert "down" in second.content
    assert tool.calls == [{"url": "u"}, {"url": "u"}]


# LLMEvaluator


@for_each(
    ("reply", "passed"),
    [
        ("PASS: it greets", True),
        ("pass", True),
        ("\n Passed.", True),
        ("**PASS** it greets", True),
        ("<think>FAIL? It does greet.</think>\n\nPASS", True),
        ("<think>FAIL? It does greet.", False),
        ("PASS, without a <think> tag", True),
        ("FAIL: no", False),
        ("<think>PASS?</think>FAIL", False),
        ("It may PASS", False),
    ],
)
async def test_the_judge_passes_what_the_model_passes(reply: str, passed: bool) -> None:
    client = MockLLMClient([reply])
    verdict = await LLMEvaluator(client).evaluate("Hi", "Hello!", "It greets")
    assert verdict == (passed, reply.strip())
    (call,) = client.get_calls()
    (message,) = call["messages"]
    assert message["role"] == "user"
    assert all(text in message["content"] for text in ("Hi", "Hello!", "It greets"))
    assert (call["model"], call["kwargs"]) == (None, {})


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(("given", "model"), [(None, "claude-x"), ("claude-y", "claude-y")])
async def test_the_judge_is_the_default_model_of_the_client(
    given: str | None, model: str, wrapped: bool, tmp_path: Path
) -> None:
    pytest.importorskip("anthropic")
    answer = {
        "id": "m", "type": "message", "role": "assistant", "model": model, "stop_reason": "end_turn",
        "content": [{"type": "text", "text": "PASS"}], "usage": {"input_tokens": 3, "output_tokens": 2},
    }  # fmt: skip
    async with serving(script(answer)) as server:
        real = AnthropicClient("sk-ant-1", "claude-x", base_url=server.url)
        client = RecordingLLMClient(real, tmp_path / "a.json") if wrapped else real
        assert await LLMEvaluator(client, given).evaluate("Hi", "Hello!", "It greets") == (True, "PASS")
        await real.close()
    assert [request["model"] for request in server.asked] == [model]


def test_calls_of_tools_in_short() -> None:
    one = MockLLMClient.calls("add", a=12, b=30)
    several = MockLLMClient.calls(("add", {"a": 1}), ("look", {}))
    named = MockLLMClient.calls("add", calls=1, self=2, name="x")
    assert (one.content, one.finish_reason) == (None, "tool_calls")
    calls = [call for each in (one, several, named) for call in each.tool_calls or ()]
    assert [(each["function"]["name"], json.loads(each["function"]["arguments"])) for each in calls] == [
        ("add", {"a": 12, "b": 30}), ("add", {"a": 1}), ("look", {}), ("add", {"calls": 1, "self": 2, "name": "x"}),
    ]  # fmt: skip


async def test_calls_without_an_id_get_different_ones() -> None:
    given = {"id": "mine", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    both = MockLLMClient.calls(("add", {}), ("add", {}))
    client = MockLLMClient([both, MockLLMResponse(None, [given]), both])
    for _ in range(2):
        answers = [await client.generate([]) for _ in range(3)]
        assert [call["id"] for each in answers for call in each.tool_calls] == [
            "call_1", "call_2", "mine", "call_3", "call_4",
        ]  # fmt: skip
        client.reset()


@pytest.mark.parametrize(
    ("calls", "arguments"),
    [
        ((), {}), ((), {"a": 1}), (("add", "look"), {}), ((("add", {"a": 1}),), {"b": 2}), ((("add",),), {}),
        (((1, {}),), {}), ((("add", [1]),), {}), (("add",), {"a": {1}}), ((1,), {}),
    ],
)  # fmt: skip
def test_calls_that_name_no_tool_are_rejected(calls: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="must"):
        MockLLMClient.calls(*calls, **arguments)


async def test_tool_usage_is_judged_without_a_model() -> None:
    client = MockLLMClient()
    judge = LLMEvaluator(client, model="m")
    calls = [CALL, {"name": "search"}, SimpleNamespace(name="fetch")]
    passed, why = await judge.evaluate_tool_usage("q", calls, ["search", "add", "fetch"])
    assert passed
    assert "add, search, fetch" in why
    passed, why = await judge.evaluate_tool_usage("q", calls, ["search", "delete"])
    assert not passed
    assert "missing: delete" in why
    assert await judge.evaluate_tool_usage("q", [], []) == (True, "every expected tool was called; called: none")
    assert client.get_call_count() == 0
