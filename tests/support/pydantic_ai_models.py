"""Scripted models of Pydantic AI that count their calls, and runs of agents that are resumed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, FunctionModel
from pydantic_ai.usage import RequestUsage

from agent_runtime_core import AgentRunner, AgentRuntime, RunnerConfig, RunResult
from tests.support.runs import Script

Part = str | tuple[str, dict[str, Any]]
Body = Callable[[Any], Awaitable[Any]]


def turn_of(messages: Sequence[ModelMessage]) -> int:
    """The number of the next answer in this conversation, from 1."""
    return sum(isinstance(message, ModelResponse) for message in messages) + 1


class Turns:
    """A model with an answer for each turn: a text, or tool calls as (name, arguments). An error is raised.

    Attributes:
        calls: The turns of the real calls.
    """

    def __init__(self, *turns: Sequence[Part] | Exception, tokens: int = 10) -> None:
        self.turns, self.tokens = turns, tokens
        self.calls: list[int] = []
        self.same_ids = False  # as of servers that number the calls of each answer
        self.model = FunctionModel(self.answer, stream_function=self._stream, model_name="scripted")

    def _next(self, messages: list[ModelMessage]) -> tuple[int, Sequence[Part]]:
        number = turn_of(messages)
        self.calls.append(number)
        turn = self.turns[number - 1]
        if isinstance(turn, Exception):
            raise turn
        return number, turn

    def answer(self, messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        number, turn = self._next(messages)
        parts = [
            TextPart(part)
            if isinstance(part, str)
            else ToolCallPart(part[0], part[1], tool_call_id=f"call-{1 if self.same_ids else number}-{index}")
            for index, part in enumerate(turn)
        ]
        return ModelResponse(parts, usage=RequestUsage(input_tokens=self.tokens, output_tokens=self.tokens))

    async def _stream(
        self, messages: list[ModelMessage], info: AgentInfo
    ) -> AsyncIterator[str | dict[int, DeltaToolCall]]:
        number, turn = self._next(messages)
        for index, part in enumerate(turn):
            if isinstance(part, str):
                for word in part.split(" "):
                    yield f"{word} "
            else:
                yield {index: DeltaToolCall(part[0], json.dumps(part[1]), tool_call_id=f"call-{number}-{index}")}


class Stopped(Exception):
    """Ends an execution of a run after its agent."""


class Resumed:
    """An agent that fails at the end of its first execution, and succeeds when it is resumed."""

    def __init__(self, body: Body, *, key: str = "resumed") -> None:
        self.executions = 0
        self._body = body
        self.agent = Script(self._run, key=key)

    async def _run(self, ctx: Any) -> Any:
        self.executions += 1
        value = await self._body(ctx)
        if self.executions == 1:
            raise Stopped
        return value


async def twice(body: Body, place: str | Path = "memory://") -> Any:
    """What a body returns in an execution that finds the records of an earlier one."""
    resumed = Resumed(body)
    async with AgentRunner.open(place, config=RunnerConfig(max_retries=1)) as runner:
        first = await runner.execute(resumed.agent, "r")
        assert first.error is not None
        assert first.error.type == "Stopped", first.error
        second = await runner.execute(resumed.agent, "r", raise_on_error=True)
    assert resumed.executions == 2
    return second.final_output["value"]


async def once(agent: AgentRuntime | Body, run_id: str = "r") -> RunResult:
    """The result of one execution."""
    async with AgentRunner.open("memory://", config=RunnerConfig(max_retries=1)) as runner:
        return await runner.execute(agent if isinstance(agent, AgentRuntime) else Script(agent), run_id)
