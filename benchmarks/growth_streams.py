"""Replay of the events of a finished run, and turns of a long conversation."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any
from uuid import UUID, uuid4

from agent_runtime_core.agents import ToolCallingAgent
from agent_runtime_core.config import configure
from agent_runtime_core.events.event import Event
from agent_runtime_core.interfaces import AgentRuntime, LLMClient, RunContext, RunResult
from agent_runtime_core.persistence import Conversation, ConversationMessage, PersistenceManager
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.tools.registry import ToolRegistry

from .floor import Hold, Line, Size, in_turns
from .loop import Instant

EVENTS = 100_000
REPLAYED = {"memory": 1e6, "SQLite": 300e3}  # events a second
PER_COMMIT = 1_000
LENGTHS = 10, 1_000, 5_000  # messages
TURN, TURN_HOLD = 15.0, 5.0  # milliseconds; the second one above that of the shortest conversation
TURNS = 15
TEXT = "a sentence or two of what somebody asks, and what is answered to it " * 4


# -- replay


class _Ends(AgentRuntime):
    key = "ends"

    async def run(self, ctx: RunContext) -> RunResult:
        return RunResult()


async def _finished_run(runner: AgentRunner, count: int) -> UUID:
    """Return the id of a finished run with so many events."""
    agent = _Ends()
    run_id = await runner.submit(agent, {}, run_id="replayed")
    for start in range(0, count, PER_COMMIT):
        rows = [(f"event-{n}", "word", {"text": "a word or two", "n": n}) for n in range(start, start + PER_COMMIT)]
        await runner.event_bus.commits.commit(None, [runner.event_bus.publishing(run_id, rows[: count - start])])
    await runner.execute(agent, "replayed", {}, raise_on_error=True)
    return run_id


async def _rate(events: AsyncIterator[Event], first: int, count: int) -> float:
    """Return how many events arrive in a second. The sequences from `first` to `count` must have no gap."""
    seen = first
    since = time.perf_counter()
    async for event in events:
        assert event.sequence == seen, f"event {event.sequence} arrived instead of {seen}"
        seen += 1
        if seen == count:
            break
    took = time.perf_counter() - since
    assert seen == count, f"{seen} of {count} events arrived"
    return count / took


def replay(size: Size) -> Iterator[Line]:
    """All events of a finished run through `runner.stream`."""
    configure(durability="normal")
    count = size.of(EVENTS, 200)
    with size.file() as path:
        for name, place in (("memory", "memory://"), ("SQLite", path)):
            with asyncio.Runner() as loop:
                runner = AgentRunner.open(place)
                run_id = loop.run(_finished_run(runner, count))
                total = loop.run(runner.event_bus.head(run_id))

                async def streamed() -> float:
                    return await _rate(runner.stream(run_id), 0, total)  # noqa: B023

                async def subscribed() -> float:
                    async with aclosing(runner.event_bus.subscribe(run_id, 0)) as events:  # noqa: B023
                        return await _rate(events, 0, total)  # noqa: B023

                rate, beside = in_turns(size.rounds(7), lambda: loop.run(streamed()), lambda: loop.run(subscribed()))
                loop.run(runner.close())
            yield Line(f"runner.stream of {total} events, {name}", rate, "/s", least=size.bar(REPLAYED[name]),
                       beside=beside, note="bus.subscribe")  # fmt: skip


# -- conversation


class _Chat(ToolCallingAgent):
    key = "chat"
    system_prompt = "Answer."
    tools = ToolRegistry()

    def get_llm_client(self) -> LLMClient:
        return Instant("", 0)


def _messages(count: int) -> list[ConversationMessage]:
    return [ConversationMessage(role="assistant" if n % 2 else "user", content=TEXT) for n in range(count)]


class _Talk:
    """A conversation of a length, and how long its turns held the loop."""

    def __init__(self, runner: AgentRunner, length: int) -> None:
        self.runner = runner
        self.conversation = Conversation(id=uuid4(), agent_key=_Chat.key, messages=_messages(length))
        self.held: list[float] = []

    async def begin(self) -> None:
        """Store the messages. The first turn has to read all of them."""
        await self.runner.persistence.conversations.save(self.conversation)

    async def turn(self) -> float:
        """Return the milliseconds of one turn."""
        given: dict[str, Any] = {
            "conversation_id": str(self.conversation.id),
            "messages": [{"role": "user", "content": TEXT}],
        }
        async with Hold() as hold:
            await asyncio.sleep(0.005)
            since = time.perf_counter()
            result = await self.runner.execute(_Chat(), str(uuid4()), given, raise_on_error=True)
            took = time.perf_counter() - since
            await asyncio.sleep(0.005)
        assert len(result.final_messages) >= len(self.conversation.messages)
        self.held.append(hold.longest * 1e3)
        return took * 1e3


def conversation(size: Size) -> Iterator[Line]:
    """A turn of a conversation, after few and many messages."""
    configure(durability="normal")
    lengths = [size.of(length, 4 * (n + 1)) for n, length in enumerate(LENGTHS)]
    with size.file() as path, asyncio.Runner() as loop:
        stores = PersistenceManager.open(path)
        runner = AgentRunner.open(path, persistence=stores)
        talks = [_Talk(runner, length) for length in lengths]
        for talk in talks:
            loop.run(talk.begin())
        first = in_turns(1, *(lambda talk=talk: loop.run(talk.turn()) for talk in talks))[-1]
        first_held = [talk.held.pop() for talk in talks][-1]
        taken = in_turns(size.rounds(TURNS), *(lambda talk=talk: loop.run(talk.turn()) for talk in talks))
        held = [statistics.median(talk.held) for talk in talks]
        loop.run(runner.close())
        loop.run(stores.close())
    yield Line(
        f"the first turn of a process after {lengths[-1]} messages", first, "ms", note=f"loop held {first_held:.1f} ms"
    )
    for length, took, longest in zip(lengths, taken, held, strict=True):
        last = length == lengths[-1]
        name = f"a turn after {length} messages"
        yield Line(
            name, took, "ms", most=size.bar(TURN) if last else None, beside=taken[0], note=f"{lengths[0]} messages"
        )
        yield Line(f"{name}, loop held", longest, "ms", most=size.bar(held[0] + TURN_HOLD) if last else None,
                   beside=held[0], note=f"{lengths[0]} messages")  # fmt: skip
