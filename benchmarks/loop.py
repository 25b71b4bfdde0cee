"""The agent loop with a model that answers at once: what a turn of one call of the model and one tool costs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from agent_runtime_core.agents import ToolCallingAgent
from agent_runtime_core.config import configure
from agent_runtime_core.interfaces import LLMClient, LLMResponse, LLMStreamChunk
from agent_runtime_core.loop import run_turn_loop
from agent_runtime_core.runner import AgentRunner, open_run
from agent_runtime_core.tools.registry import ToolRegistry
from agent_runtime_core.tools.tool import Tool

from .chain import imperative, seconds
from .floor import Line, Size, in_turns, size_on_disk

TURNS = 200
IN_MEMORY = 0.5  # milliseconds a turn
DURABLE = 2.0  # times an imperative durable step
TEXT = 2_000  # characters a turn, in the conversation whose size is measured
GROWTH = 0.8e6  # bytes for 0.4 MB of text
WORDS = [f"{start}{end}" for start in ("ba", "co", "di", "fe", "gu", "la", "mo", "ni", "pre", "su", "tra", "ver")
         for end in ("ble", "da", "ing", "lor", "men", "nt", "ous", "rest", "s", "ta", "tion", "xy")]  # fmt: skip
USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}


async def _add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def _page(number: int) -> str:
    """A page of text."""
    # Words in no order compress less than what people write.
    return " ".join(Random(number).choices(WORDS, k=TEXT // 6))[:TEXT]


class Instant(LLMClient):
    """Asks for a tool so many times, then ends."""

    def __init__(self, tool: str, turns: int) -> None:
        self.tool, self.left = tool, turns

    async def generate(self, messages: list[Any], **options: Any) -> LLMResponse:
        self.left -= 1
        if self.left < 0:
            return LLMResponse({"role": "assistant", "content": "done"}, USAGE, "instant", "stop")
        arguments = '{"a": 1, "b": 2}' if self.tool == "_add" else f'{{"number": {self.left}}}'
        call = {"id": f"c{self.left}", "type": "function", "function": {"name": self.tool, "arguments": arguments}}
        return LLMResponse({"role": "assistant", "content": None, "tool_calls": [call]}, USAGE, "instant", "tool_calls")

    async def stream(self, messages: list[Any], **options: Any) -> AsyncIterator[LLMStreamChunk]:
        yield LLMStreamChunk(response=await self.generate(messages, **options), finish_reason="stop")


def _tools() -> ToolRegistry:
    tools = ToolRegistry()
    tools.register(Tool.from_function(_add))
    return tools


async def _turns(ctx: Any, count: int) -> None:
    done = await run_turn_loop(ctx, Instant("_add", count), _tools())
    if done.turns != count + 1:
        raise AssertionError(f"{done.turns} turns, not {count + 1}")


def _in_memory(count: int) -> float:
    async def measured() -> float:
        async with open_run("memory://", "bench") as ctx:
            since = time.perf_counter()
            await _turns(ctx, count)
            return time.perf_counter() - since

    return asyncio.run(measured()) / count * 1000


def rows(size: Size) -> Iterator[Line]:
    count = size.of(TURNS, 5)
    [memory] = in_turns(size.rounds(9), lambda: _in_memory(count))
    yield Line(f"agent loop in memory, {count} tool turns", memory, "ms/turn", most=IN_MEMORY)
    for mode in ("FULL", "NORMAL"):
        configure(durability=mode.lower())

        def ours() -> float:
            with size.file() as path:
                return seconds(path, _turns, count) / count * 1000

        def step() -> float:
            with size.file() as path:
                return seconds(path, imperative("retry"), count) / count * 1000

        mine, floor = in_turns(size.rounds(9), ours, step)
        yield Line(
            f"agent loop on SQLite {mode}, {count} tool turns", mine, "ms/turn", floor, most=DURABLE,
            note="beside an imperative durable step",
        )  # fmt: skip
    yield _growth(size)


class _Reader(ToolCallingAgent):
    key = "reader"
    system_prompt = "Read."
    tools = ToolRegistry()  # of the class; each agent has its own

    def __init__(self, count: int, page: Callable[[int], Awaitable[str]]) -> None:
        self.client, self.max_iterations, self.tools = Instant(page.__name__, count), count + 1, ToolRegistry()
        self.tools.register(Tool.from_function(page))

    def get_llm_client(self) -> LLMClient:
        return self.client


async def pages_read(path: Path, count: int, page: Callable[[int], Awaitable[str]]) -> int:
    """Let an agent read so many pages, one with each model call, and return the characters of its messages."""
    async with AgentRunner.open(path) as runner:
        done = (await runner.execute(_Reader(count, page), "bench")).raise_for_status()
    return sum(len(str(message["content"])) for message in done.final_messages)


def _growth(size: Size) -> Line:
    """What an agent's conversation leaves on disk, its result with all messages included."""
    count = size.of(TURNS, 5)
    configure(durability="normal")
    with size.file() as path:
        text = asyncio.run(pages_read(path, count, _page))
        grown = size_on_disk(path)
    return Line(
        f"store after {count} turns of an agent with {text / 1e6:.2f} MB of text",
        grown / 1e6,
        "MB",
        most=size.bar(GROWTH / 1e6),
    )
