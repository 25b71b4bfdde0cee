"""Answers that are not complete: truncated, refused, blocked. None of them is a success or is sent back."""

from __future__ import annotations

import asyncio
import enum
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, ToolCallingAgent, ToolRegistry, agent_tool, run_turn_loop
from agent_runtime_core.errors import AnswerRefused, InvalidArgument, OutputMismatch, PlanningError, RunFailed
from agent_runtime_core.interfaces import LLMResponse, RunContext
from agent_runtime_core.llm._finish_reasons import normal_reason
from agent_runtime_core.loop.answers import flaw_of
from agent_runtime_core.loop.model_calls import free_choice
from agent_runtime_core.loop.state import TurnState
from agent_runtime_core.planning import LLMPlanner, Plan, PlanStep, StepKind, execute_plan
from agent_runtime_core.runner import open_run
from agent_runtime_core.status import RunStatus
from agent_runtime_core.testing import LLMEvaluator, MockLLMClient, MockRunContext
from agent_runtime_core.tools.tool import Tool
from tests.support.cases import for_each
from tests.support.scripted_model import Scripted, asks, call

HELLO = [{"role": "user", "content": "hello"}]
TYPED = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


def answer(content: Any = None, finish: Any = "stop", **fields: Any) -> LLMResponse:
    return LLMResponse({"role": "assistant", "content": content, **fields}, {"total_tokens": 7}, "m", finish)


def dropped(content: Any = None) -> LLMResponse:
    """What a client returns for an answer whose tool call was cut."""
    return answer(content, "length", metadata={"truncated_tool_call": True})


def cut_call(arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "write", "arguments": arguments}}


class _Reason(enum.Enum):
    SAFETY = "SAFETY"


@for_each(
    ("given", "reason"),
    [
        ("length", "length"),
        ("max_tokens", "length"),
        ("MAX_TOKENS", "length"),
        ("FinishReason.MAX_TOKENS", "length"),
        ("FINISH_REASON_MAX_TOKENS", "length"),
        ("maxTokens", "length"),
        ("model_length", "length"),
        ("model_context_window_exceeded", "length"),
        ("refusal", "refusal"),
        ("content_filter", "content_filter"),
        ("SAFETY", "content_filter"),
        (_Reason.SAFETY, "content_filter"),
        ("RECITATION", "content_filter"),
        ("PROHIBITED_CONTENT", "content_filter"),
        ("content_filtered", "content_filter"),
        ("guardrail_intervened", "content_filter"),
        ("MALFORMED_FUNCTION_CALL", "malformed_tool_call"),
        ("stop", "stop"),
        ("end_turn", "stop"),
        ("tool_calls", "tool_calls"),
        ("pause_turn", "pause_turn"),
        ("x", "x"),
        ("", ""),
        (None, ""),
    ],
)
def test_finish_reasons_of_providers_have_one_spelling(given: Any, reason: str) -> None:
    assert normal_reason(given) == reason


@for_each(
    ("message", "finish", "flaws"),  # flaws: without and with accept_truncated
    [
        ({"content": "done"}, "stop", (None, None)),
        ({"content": ""}, "stop", (None, None)),
        ({"content": "some"}, "length", ("length", None)),
        ({"content": "some"}, "MAX_TOKENS", ("length", None)),
        ({"content": [{"type": "text", "text": "some"}]}, "length", ("length", None)),
        ({"content": ""}, "length", ("length", "length")),
        ({"content": None}, "length", ("length", "length")),
        ({"content": "x", "metadata": {"truncated_tool_call": True}}, "length", ("length", "length")),
        ({"content": "x", "metadata": {"truncated_tool_call": True}}, "stop", ("length", "length")),
        ({"content": None, "tool_calls": [cut_call("{}")]}, "length", (None, None)),
        ({"content": None, "tool_calls": [cut_call('{"a": 1}')]}, "length", (None, None)),
        ({"content": None, "tool_calls": [cut_call('{"a": ')]}, "length", ("length", "length")),
        ({"content": None, "tool_calls": [cut_call("")]}, "length", ("length", "length")),
        ({"content": None, "tool_calls": [cut_call('{"a": ')]}, "tool_calls", (None, None)),
        ({"content": None, "refusal": "No."}, "stop", ("refusal", "refusal")),
        ({"content": None, "refusal": ""}, "stop", (None, None)),
        ({"content": "No."}, "refusal", ("refusal", "refusal")),
        ({"content": None}, "content_filter", ("content_filter", "content_filter")),
        ({"content": "half"}, "SAFETY", ("content_filter", "content_filter")),
        ({"content": None, "tool_calls": [cut_call("{}")]}, "content_filter", ("content_filter", "content_filter")),
        ({"content": None}, "MALFORMED_FUNCTION_CALL", ("malformed_tool_call", "malformed_tool_call")),
    ],
)
def test_what_an_answer_lacks(message: dict[str, Any], finish: str, flaws: tuple[str | None, str | None]) -> None:
    found = [flaw_of(message, finish), flaw_of(message, finish, accept_truncated=True)]
    assert tuple(each and each.reason for each in found) == flaws


# -- in a loop and in an agent


WROTE: list[str] = []


def write(path: str) -> str:
    """Write a file."""
    WROTE.append(path)
    return "written"


def agent(client: Any, *tools: Any, **fields: Any) -> ToolCallingAgent:
    registry = ToolRegistry()
    for each in tools:
        registry.register(each if isinstance(each, Tool) else Tool.from_function(each))
    fields = {"key": "a", "system_prompt": "secret", "tools": registry, **fields}
    kind: type[ToolCallingAgent] = type("A", (ToolCallingAgent,), {**fields, "get_llm_client": lambda self: client})
    return kind()


CASES = [
    (answer("once upon", "length"), "OutputMismatch", "max_tokens", "once upon"),
    (answer(None, "length"), "OutputMismatch", "max_tokens", None),
    (dropped("I will write."), "OutputMismatch", "max_tokens", "I will write."),
    (answer(None, "length", tool_calls=[cut_call('{"path": "a')]), "OutputMismatch", "length", None),
    (answer(None, refusal="I cannot."), "AnswerRefused", "I cannot.", "I cannot."),
    (answer("I cannot.", "refusal"), "AnswerRefused", "I cannot.", "I cannot."),
    (answer(None, "content_filter"), "AnswerRefused", "blocked", None),
    (answer("half", "SAFETY", tool_calls=[cut_call('{"path": "a"}')]), "AnswerRefused", "blocked", "half"),
]


@for_each("typed", [False, True])
@for_each("stream", [False, True])
@for_each(("given", "kind", "words", "response"), CASES)
async def test_an_incomplete_answer_fails_the_run_after_one_request(
    given: LLMResponse, kind: str, words: str, response: str | None, stream: bool, typed: bool, tmp_path: Path
) -> None:
    WROTE.clear()
    client = Scripted(given)
    made = agent(client, write, stream=stream, output_type=TYPED if typed else None)
    async with AgentRunner.open(tmp_path / "runs.db") as runner:
        result = await runner.execute(made, "r", {"messages": HELLO})
    assert (result.status, len(client.asked), WROTE) == (RunStatus.FAILED, 1, [])
    assert result.error is not None
    assert (result.error.type, result.error.retriable) == (kind, False)
    assert words in result.error.message
    assert result.error.details["finish_reason"] in ("length", "refusal", "content_filter")
    assert result.final_output == {"response": response}
    assert result.usage["total_tokens"] == 7
    assert "secret" not in str(result.final_messages)
    calls = [each["id"] for message in result.final_messages for each in message.get("tool_calls") or ()]
    assert [each["tool_call_id"] for each in result.final_messages if each["role"] == "tool"] == calls


async def test_an_answer_that_was_cut_after_complete_calls_is_used(tmp_path: Path) -> None:
    WROTE.clear()
    client = Scripted(answer(None, "length", tool_calls=[cut_call('{"path": "a"}')]), "done")
    async with AgentRunner.open(tmp_path / "runs.db") as runner:
        result = await runner.execute(agent(client, write), "r", {"messages": HELLO})
    assert (result.final_output, WROTE) == ({"response": "done"}, ["a"])


async def test_an_agent_may_accept_a_truncated_text() -> None:
    async with AgentRunner() as runner:
        made = agent(Scripted(answer("once upon", "length")), on_truncated="accept")
        result = await runner.execute(made, input_data={"messages": HELLO})
        assert result.final_output == {"response": "once upon"}
        made = agent(Scripted(dropped("I will")), on_truncated="accept")
        result = await runner.execute(made, input_data={"messages": HELLO})
        assert result.status is RunStatus.FAILED
        made = agent(Scripted("hi"), on_truncated="yes")
        result = await runner.execute(made, input_data={"messages": HELLO})
        assert result.error is not None
        assert "on_truncated must be 'fail' or 'accept', got 'yes'" in result.error.message


async def test_a_loop_returns_a_truncated_text_with_its_reason_unless_it_must_fail() -> None:
    cut = answer("once upon", "MAX_TOKENS")
    done = await run_turn_loop(MockRunContext(), Scripted(cut), messages=HELLO)
    assert (done.state, done.text, done.finish_reason) == (TurnState.YIELDING, "once upon", "length")
    with pytest.raises(OutputMismatch) as caught:
        await run_turn_loop(MockRunContext(), Scripted(cut), messages=HELLO, on_truncated="fail")
    assert (caught.value.text, caught.value.finish_reason) == ("once upon", "length")
    done = await run_turn_loop(
        MockRunContext(), Scripted(answer('{"a": "b"}', "length")), messages=HELLO, output_type=TYPED
    )
    assert done.output == {"a": "b"}
    client = Scripted(answer('{"a": "', "length"), '{"a": "b"}')
    with pytest.raises(OutputMismatch, match="length"):
        await run_turn_loop(MockRunContext(), client, messages=HELLO, output_type=TYPED)
    assert len(client.asked) == 1


@pytest.mark.parametrize(("given", "kind"), [(each[0], each[1]) for each in CASES])
async def test_a_replayed_answer_fails_in_the_same_way(given: LLMResponse, kind: str, tmp_path: Path) -> None:
    client = Scripted(given)
    errors: list[OutputMismatch] = []

    async def life() -> None:
        async with open_run(tmp_path / "runs.db", "r", input={"messages": HELLO}) as ctx:
            try:
                await run_turn_loop(ctx, client, on_truncated="fail")
            except OutputMismatch as error:
                errors.append(error)
                raise asyncio.CancelledError from None  # the process is stopped here

    for _ in range(2):
        with pytest.raises(asyncio.CancelledError):
            await life()
    assert len(client.asked) == 1
    assert [type(each).__name__ for each in errors] == [kind, kind]
    assert str(errors[0]) == str(errors[1])


async def test_a_journal_in_which_a_truncated_answer_was_repaired_still_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier versions sent such an answer back."""
    client = Scripted(answer('{"a": "', "length"), '{"a": "b"}')

    async def life(stop: bool) -> Any:
        async with open_run(tmp_path / "runs.db", "r", input={"messages": HELLO}) as ctx:
            done = await run_turn_loop(ctx, client, output_type=TYPED)
            if stop:
                raise asyncio.CancelledError
            return done.output

    with monkeypatch.context() as earlier:
        earlier.setattr("agent_runtime_core.loop.turn_loop.flaw_of", lambda *args, **options: None)
        with pytest.raises(asyncio.CancelledError):
            await life(stop=True)
    assert await life(stop=False) == {"a": "b"}
    assert len(client.asked) == 2


# -- elsewhere


@pytest.mark.parametrize("given", [answer('{"steps": [', "length"), answer(None, refusal="No.")])
async def test_a_plan_that_was_cut_or_refused_is_not_sent_back(given: LLMResponse) -> None:
    client = Scripted(given)
    with pytest.raises(PlanningError, match=r"truncated|No\."):
        await LLMPlanner(client).create_plan("do it", ToolRegistry())
    assert len(client.asked) == 1


async def test_a_model_call_of_a_plan_must_be_complete(tmp_path: Path) -> None:
    for number, (given, kind) in enumerate(
        [(answer("half", "length"), OutputMismatch), (answer(None, refusal="No."), AnswerRefused)]
    ):
        client = Scripted(given)
        plan = Plan([PlanStep(1, "", {"prompt": "tell"}, kind=StepKind.LLM_CALL)], "tell")
        with pytest.raises(kind):
            async with open_run(tmp_path / f"{number}.db", "r") as ctx:
                await execute_plan(ctx, plan, ToolRegistry(), client=client, max_retries=3, backoff_base=0)
        assert len(client.asked) == 1


async def test_a_judge_that_refuses_has_no_verdict_and_sends_no_temperature() -> None:
    client = MockLLMClient([answer("PASS, it is", "length"), answer(None, refusal="No."), answer("PASS")])
    judge = LLMEvaluator(client)
    assert await judge.evaluate("2+2?", "4", "is right") == (True, "PASS, it is")
    with pytest.raises(AnswerRefused, match="No"):
        await judge.evaluate("2+2?", "4", "is right")
    await LLMEvaluator(client, temperature=0.2).evaluate("2+2?", "4", "is right")
    assert [each["kwargs"] for each in client.get_calls()] == [{}, {}, {"temperature": 0.2}]


@pytest.mark.parametrize("text", ["", "<think>Is it right? It may PASS", "The"])
async def test_a_judge_that_was_truncated_before_its_verdict_raises(text: str) -> None:
    with pytest.raises(OutputMismatch, match="truncated"):
        await LLMEvaluator(MockLLMClient([answer(text, "length")])).evaluate("2+2?", "4", "is right")


# -- a forced tool choice


NAMED = {"type": "function", "function": {"name": "write"}}


@for_each("stream", [False, True])
@for_each("choice", ["required", "any", NAMED, {"type": "any"}, {"type": "tool", "name": "write"}])
async def test_a_forced_choice_applies_until_a_tool_was_called(choice: Any, stream: bool) -> None:
    client = Scripted(asks(call("write", {"path": "a"})), asks(call("write", {"path": "b"}, "c2")), "done")
    registry = ToolRegistry()
    registry.register(Tool.from_function(write))
    done = await run_turn_loop(MockRunContext(), client, registry, messages=HELLO, tool_choice=choice, stream=stream)
    assert done.text == "done"
    assert [each["tool_choice"] for each in client.options] == [choice, "auto", "auto"]


@pytest.mark.parametrize(
    ("choice", "free"),
    [
        ("auto", "auto"),
        ("none", "none"),
        ({"type": "auto"}, {"type": "auto"}),
        ({"type": "any", "disable_parallel_tool_use": True}, {"type": "auto", "disable_parallel_tool_use": True}),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [1]}},
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [1]}},
        ),
    ],
)
def test_a_freed_choice_keeps_its_other_options(choice: Any, free: Any) -> None:
    assert free_choice(choice) == free


async def test_without_tools_no_option_about_them_is_sent() -> None:
    client = Scripted("done", "done")
    for choice in ("auto", "required"):
        options: dict[str, Any] = {"tool_choice": choice, "parallel_tool_calls": False, "seed": 1}
        await run_turn_loop(MockRunContext(), client, ToolRegistry(), messages=HELLO, **options)
    # A choice that cannot be made is for the provider to reject.
    assert client.options == [{"tools": None, "seed": 1}, {"tools": None, "seed": 1, "tool_choice": "required"}]


async def test_a_resumed_loop_sends_the_freed_choice(tmp_path: Path) -> None:
    client = Scripted(asks(call("write", {"path": "a"})), ValueError("once"), "done")
    registry = ToolRegistry()
    registry.register(Tool.from_function(write))
    with pytest.raises(ValueError, match="once"):
        async with open_run(tmp_path / "runs.db", "r", input={"messages": HELLO}) as ctx:
            await run_turn_loop(ctx, client, registry, tool_choice="required")
    async with open_run(tmp_path / "runs.db", "r", input={"messages": HELLO}) as ctx:
        assert (await run_turn_loop(ctx, client, registry, tool_choice="required")).text == "done"
    assert [each["tool_choice"] for each in client.options] == ["required", "auto", "auto"]


# -- a handoff


@pytest.mark.parametrize("role", ["system", "developer"])
async def test_a_handoff_shows_no_prompt_of_the_first_agent(role: str, tmp_path: Path) -> None:
    second = MockLLMClient(responses=["from b"])
    other = agent(second, key="b", system_prompt="You are b.", temperature=0.3)
    first = Scripted(asks(call("b", {"task": "do it"})))
    parent = agent(
        first, agent_tool(other, description="d", handoff=True), system_prompt="The code is 1234.",
        max_tokens=5, tool_choice="required", stop="END",
    )  # fmt: skip
    messages = [{"role": role, "content": "only for a"}, *HELLO]
    async with AgentRunner.open(tmp_path / "runs.db") as runner:
        result = await runner.execute(parent, "r", {"messages": messages, "params": {"model_settings": {"seed": 7}}})
    assert result.final_output == {"response": "from b"}
    [sent] = second.get_calls()
    assert [(each["role"], each["content"]) for each in sent["messages"]] == [
        ("system", "You are b."),
        ("user", "hello"),
        ("user", "do it"),
    ]
    assert sent["kwargs"] == {"temperature": 0.3}


# -- the key of the messages


@pytest.mark.parametrize(
    "name", ["message", "Messages", "msgs", "prompt", "message_list", "messsages", "mesages", "chat_messages"]
)
async def test_messages_under_a_similar_key_are_rejected(name: str) -> None:
    client = Scripted("hi")
    async with AgentRunner() as runner:
        result = await runner.execute(agent(client), input_data={name: HELLO})
    assert result.error is not None
    assert result.error.type == "InvalidArgument"
    assert f"must be 'messages', got {name!r}" in result.error.message
    assert client.asked == []
    with pytest.raises((InvalidArgument, RunFailed), match=name):
        async with open_run("memory://", input={name: "hi"}) as ctx:
            await run_turn_loop(ctx, client)


@pytest.mark.parametrize("given", [{}, {"topic": "x"}, {"messages": HELLO, "message": "x"}, {"metadata": {}}])
async def test_an_input_without_messages_is_accepted(given: dict[str, Any]) -> None:
    async with AgentRunner() as runner:
        result = await runner.execute(agent(Scripted("hi")), input_data=given)
    assert result.final_output == {"response": "hi"}


async def test_an_agent_that_reads_its_input_itself_may_name_it_as_it_likes() -> None:
    client = Scripted("hi", "hi")

    async def before_run(self: Any, ctx: RunContext) -> None:
        ctx.input_messages.append({"role": "user", "content": ctx.input["prompt"]})  # type: ignore[attr-defined]

    async with AgentRunner() as runner:
        result = await runner.execute(agent(client, before_run=before_run), input_data={"prompt": "hey"})
    assert result.final_output == {"response": "hi"}
    assert client.asked[0][-1]["content"] == "hey"


@pytest.mark.parametrize("hook", ["before_run", "trim"])
async def test_an_agent_with_hooks_may_read_other_keys_of_its_input(hook: str) -> None:
    async def before_run(self: Any, ctx: RunContext) -> None:
        self.question = ctx.input["prompt"]  # type: ignore[attr-defined]

    def trim(self: Any, messages: list[Any]) -> list[Any]:
        return [*messages, {"role": "user", "content": "hey"}]

    client = MockLLMClient(responses=["done"])
    async with AgentRunner() as runner:
        made = agent(client, **{hook: {"before_run": before_run, "trim": trim}[hook]})
        result = await runner.execute(made, input_data={"prompt": "hey"})
    assert result.final_output == {"response": "done"}
