"""The values agents exchange, and what their base classes do by themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core import interfaces
from agent_runtime_core._core.event_types import EventType
from agent_runtime_core.errors import NotSupported, RunFailed
from agent_runtime_core.interfaces import (
    AgentRuntime,
    ErrorInfo,
    LLMClient,
    LLMResponse,
    LLMStreamChunk,
    Message,
    RunContext,
    RunResult,
    ToolCallDict,
    TraceSink,
)
from agent_runtime_core.status import RunStatus
from agent_runtime_core.testing import MockRunContext
from agent_runtime_core.tools import Tool, ToolDefinition, ToolRegistry

RUN = UUID(int=7)


class Agent(AgentRuntime):
    key = "x"

    async def run(self, ctx: RunContext) -> RunResult:
        return RunResult()


class Model(LLMClient):
    async def generate(self, messages: list[Any], **kwargs: Any) -> LLMResponse:
        return LLMResponse({"role": "assistant", "content": "hi"})

    async def stream(self, messages: list[Any], **kwargs: Any) -> AsyncIterator[LLMStreamChunk]:
        yield LLMStreamChunk("hi")


def test_the_vocabulary_is_importable_from_one_place() -> None:
    assert interfaces.EventType is EventType
    assert (interfaces.Tool, interfaces.ToolDefinition, interfaces.ToolRegistry) == (Tool, ToolDefinition, ToolRegistry)


def _fields(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def test_fields_stand_in_their_order() -> None:
    assert _fields(RunResult)[:5] == ["final_output", "final_messages", "usage", "artifacts", "error"]
    assert _fields(ErrorInfo) == ["type", "message", "stack", "retriable", "details"]
    assert _fields(LLMResponse) == ["message", "usage", "model", "finish_reason", "raw_response", "cost_usd"]
    assert _fields(LLMStreamChunk) == ["delta", "tool_calls", "finish_reason", "usage", "response"]
    assert set(Message.__annotations__) == {"role", "content", "name", "tool_call_id", "tool_calls", "metadata"}
    assert Message.__total__ is False


def test_defaults_are_empty_and_not_shared() -> None:
    result, error, response, chunk = RunResult(), ErrorInfo("T", "m"), LLMResponse({}), LLMStreamChunk()
    assert (result.final_output, result.final_messages, result.usage, result.artifacts) == ({}, [], {}, {})
    assert (result.error, result.status, result.run_id) == (None, None, None)
    assert (error.stack, error.retriable, error.details) == ("", True, {})
    assert (response.usage, response.model, response.finish_reason, response.raw_response) == ({}, "", "", None)
    assert (chunk.delta, chunk.tool_calls, chunk.finish_reason, chunk.usage) == ("", None, None, None)
    result.final_output["a"] = 1
    assert RunResult().final_output == {}


def test_raise_for_status_gives_the_result_of_a_run_that_succeeded() -> None:
    for result in (RunResult(), RunResult(status=RunStatus.SUCCEEDED, run_id=RUN)):
        assert result.raise_for_status() is result


def test_raise_for_status_tells_why() -> None:
    error = ErrorInfo("ValueError", "no luck")
    with pytest.raises(RunFailed, match=f"run '{RUN}' failed: ValueError: no luck") as caught:
        RunResult(status=RunStatus.FAILED, run_id=RUN, error=error).raise_for_status()
    assert (caught.value.status, caught.value.error) == ("failed", error)
    with pytest.raises(RunFailed, match="the run was cancelled") as caught:
        RunResult(status=RunStatus.CANCELLED).raise_for_status()
    assert (caught.value.status, caught.value.error) == ("cancelled", None)
    with pytest.raises(RunFailed, match="the run failed: ValueError"):
        RunResult(error=error).raise_for_status()


def test_tool_calls_are_dicts_and_objects() -> None:
    message = {
        "role": "assistant",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
    }
    (call,) = LLMResponse(message).tool_calls
    assert (call["id"], call["function"]["name"], call["function"]["arguments"]) == ("c1", "add", '{"a": 1}')
    assert (call.id, call.name, call.arguments) == ("c1", "add", '{"a": 1}')
    assert call == message["tool_calls"][0]


def test_a_flat_tool_call_answers_too() -> None:
    call = ToolCallDict(id="c1", name="add", arguments={"a": 1})
    assert (call.id, call.name, call.arguments) == ("c1", "add", {"a": 1})
    assert (ToolCallDict().id, ToolCallDict().name, ToolCallDict().arguments) == ("", "", None)


@pytest.mark.parametrize("message", [{}, {"tool_calls": None}, {"tool_calls": []}])
def test_no_tool_calls_is_an_empty_list(message: dict[str, Any]) -> None:
    assert LLMResponse(message).tool_calls == []


def test_key_and_run_are_what_an_agent_must_have() -> None:
    assert AgentRuntime.__abstractmethods__ == {"key", "run"}
    assert Agent().key == "x"


async def test_an_agent_s_optional_parts_do_the_expected() -> None:
    agent, ctx = Agent(), MockRunContext()
    await agent.cancel(ctx)
    try:
        raise ValueError("no luck")
    except ValueError as error:
        info = await agent.on_error(ctx, error)
    assert info is not None
    assert (info.type, info.message, info.retriable, info.details) == ("ValueError", "no luck", True, {})
    assert 'raise ValueError("no luck")' in info.stack


async def test_a_client_needs_two_methods_and_says_what_it_cannot() -> None:
    assert LLMClient.__abstractmethods__ == {"generate", "stream"}
    model = Model()
    with pytest.raises(NotSupported, match=r"Model does not support embed\(\)"):
        await model.embed(["a"])
    with pytest.raises(NotSupported, match=r"Model does not support moderate\(\)"):
        await model.moderate("a")
    with pytest.raises(NotSupported, match=r"Model does not support count_tokens\(\)"):
        await model.count_tokens([])


async def test_a_sink_may_implement_trace_alone() -> None:
    class Sink(TraceSink):
        def __init__(self) -> None:
            self.seen: list[dict[str, Any]] = []

        async def trace(self, event: dict[str, Any]) -> None:
            self.seen.append(event)

    sink = Sink()
    sink.start_run(RUN, {})
    sink.log_event(RUN, "run.started", {})
    sink.end_run(RUN, "succeeded")
    sink.flush()
    await sink.trace({"a": 1})
    assert sink.seen == [{"a": 1}]


async def test_a_sink_may_implement_the_older_methods_alone() -> None:
    class Sink(TraceSink):
        def end_run(self, run_id: UUID, outcome: str, metadata: dict[str, Any] | None = None) -> None:
            self.outcome = outcome

    sink = Sink()
    await sink.trace({})
    sink.end_run(RUN, "failed")
    assert sink.outcome == "failed"
