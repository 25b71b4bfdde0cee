"""A model that answers by a script, for tests of the agent loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from agent_runtime_core.interfaces import LLMClient, LLMResponse, LLMStreamChunk

Line = str | dict[str, Any] | BaseException | LLMResponse


def call(name: str, arguments: Any = None, id: str | None = None) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return {"id": id or f"id-{name}", "type": "function", "function": {"name": name, "arguments": text}}


def asks(*calls: dict[str, Any], content: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


class Scripted(LLMClient):
    """Says the lines one after the other; by `say`, what the messages make of it."""

    default_model = "scripted-1"

    def __init__(
        self, *lines: Line, say: Callable[[Sequence[Any]], Line] | None = None, tokens: tuple[int, int] = (100, 20),
        cost: float | None = None, pause: float = 0.0,
    ) -> None:  # fmt: skip
        self.lines = list(lines)
        self.say = say
        self.tokens = tokens
        self.cost = cost
        self.pause = pause
        self.asked: list[list[Any]] = []
        self.options: list[dict[str, Any]] = []

    async def generate(self, messages: list[Any], **options: Any) -> LLMResponse:
        self.asked.append(json.loads(json.dumps(messages)))
        self.options.append(options)
        line = self.say(messages) if self.say is not None else self.lines.pop(0)
        await asyncio.sleep(self.pause)
        if isinstance(line, BaseException):
            raise line
        if isinstance(line, LLMResponse):
            return line
        message = {"role": "assistant", "content": line} if isinstance(line, str) else line
        prompt, completion = self.tokens
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return LLMResponse(message, usage, "scripted-1", "stop", cost_usd=self.cost)

    async def stream(self, messages: list[Any], **options: Any) -> AsyncIterator[LLMStreamChunk]:
        response = await self.generate(messages, **options)
        text = response.message.get("content") or ""
        for at in range(0, len(text), 4):
            yield LLMStreamChunk(text[at : at + 4])
        yield LLMStreamChunk("", response.tool_calls or None, "stop", response.usage, response)
