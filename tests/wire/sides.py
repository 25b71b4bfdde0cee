"""The clients as the wire tests make them: one side for each SDK, on the same server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from agent_runtime_core.interfaces import LLMResponse, LLMStreamChunk
from agent_runtime_core.llm import ChatClient, LLMClient
from agent_runtime_core.llm._stream_body import USAGE_WAIT
from agent_runtime_core.testing import VirtualClock
from tests.support.litellm_cleanup import settled

#: The server leaves credentials out of its journal; whatever else shows this text has let a secret out.
KEY = "sk-canary-of-the-wire-tests"

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "What time it is.",
        "parameters": {"type": "object", "properties": {}},
    },
}


class Noted(VirtualClock):
    """A clock that every sleep takes along and notes: retries wait no time here."""

    def __init__(self) -> None:
        super().__init__()
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        if seconds == USAGE_WAIT:  # a server that is slow must not lose its usage
            return await asyncio.sleep(seconds)
        self.slept.append(seconds)
        self.advance(seconds)
        return None


@dataclass
class Side:
    """One SDK: its client on the server, and what it is asked for."""

    name: str
    model: str
    make: Callable[..., ChatClient]
    clock: Noted = field(default_factory=Noted)

    @contextlib.asynccontextmanager
    async def client(self, **options: Any) -> AsyncIterator[ChatClient]:
        client = self.make(default_model=self.model, clock=self.clock, **options)
        try:
            yield client
        finally:
            await client.close()
            if self.name == "litellm":
                await settled()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def told(call: Any, result: str) -> dict[str, Any]:
    """The answer to a tool call."""
    return {"role": "tool", "tool_call_id": call["id"], "content": result}


def calls_of(response: LLMResponse) -> list[tuple[str, str, Any]]:
    return [(call.id, call.name, json.loads(call.arguments)) for call in response.tool_calls]


async def ask(
    client: LLMClient, messages: list[Any], *, streamed: bool, into: list[LLMStreamChunk] | None = None, **options: Any
) -> LLMResponse:
    """The answer, streamed or at once; `into` gets the pieces of a stream, also those before an error."""
    if not streamed:
        return await client.generate(messages, **options)
    chunks = [] if into is None else into
    async for chunk in client.stream(messages, **options):
        chunks.append(chunk)
    response = chunks[-1].response
    assert response is not None
    return response
