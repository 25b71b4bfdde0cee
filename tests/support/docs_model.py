"""The model that answers in the README and the docs, where nobody has a key."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from agent_runtime_core import LLMClient, LLMResponse, LLMStreamChunk, configure
from agent_runtime_core.testing import MockLLMClient, MockLLMResponse


def answer(messages: list[Any]) -> MockLLMResponse:
    """Uses a tool for a question about the weather, and else says what it was told."""
    last = messages[-1]
    if last["role"] == "tool":
        return MockLLMResponse(content=str(last["content"]))
    if "sunny" in str(last["content"]).lower():
        function = {"name": "get_weather", "arguments": '{"location": "Delft"}'}
        return MockLLMResponse(content="", tool_calls=[{"id": "call-1", "type": "function", "function": function}])
    return MockLLMResponse(content=f"You said: {last['content']}")


class DocsModel(LLMClient):
    """As `MockLLMClient`, but none that `run_agent_test` would find."""

    async def generate(self, messages: list[Any], **options: Any) -> LLMResponse:
        mock = MockLLMClient(response_fn=answer)
        return await mock.generate(messages, **options)

    async def stream(self, messages: list[Any], **options: Any) -> AsyncIterator[LLMStreamChunk]:
        async for chunk in MockLLMClient(response_fn=answer).stream(messages, **options):
            yield chunk


configure(model_provider="tests.support.docs_model:DocsModel")
