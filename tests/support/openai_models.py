"""Models for OpenAI Agents that answer by what they are asked, so that each process of a test answers alike."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from agents.items import ModelResponse, TResponseStreamEvent
from agents.models.interface import Model
from agents.testing import ScriptedModel
from agents.usage import Usage

Answer = Callable[[list[dict[str, Any]]], list[Any]]


def results(items: list[dict[str, Any]]) -> list[Any]:
    """The outputs of all tool calls so far."""
    return [item["output"] for item in items if item.get("type") == "function_call_output"]


class FakeModel(Model):
    """Answers with the output items that `answer` returns for the input items; keeps the inputs in `asked`."""

    def __init__(self, answer: Answer, tokens: int = 10) -> None:
        self.answer = answer
        self.tokens = tokens
        self.model = "fake-model"
        self.asked: list[list[dict[str, Any]]] = []

    def _script(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ScriptedModel:
        given = kwargs["input"] if "input" in kwargs else args[1]
        items = [{"role": "user", "content": given}] if isinstance(given, str) else [dict(each) for each in given]
        self.asked.append(items)
        half = self.tokens // 2
        usage = Usage(requests=1, input_tokens=half, output_tokens=self.tokens - half, total_tokens=self.tokens)
        return ScriptedModel([ModelResponse(output=self.answer(items), usage=usage, response_id=f"r{len(items)}")])

    async def get_response(self, *args: Any, **kwargs: Any) -> ModelResponse:
        return await self._script(args, kwargs).get_response(*args, **kwargs)

    async def stream_response(self, *args: Any, **kwargs: Any) -> AsyncIterator[TResponseStreamEvent]:
        async for event in self._script(args, kwargs).stream_response(*args, **kwargs):
            yield event
