"""A message appended to a long conversation, beside one appended to a short one."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

from agent_runtime_core.errors import MissingDependency
from agent_runtime_core.persistence import InMemoryConversationStore, RedisConversationStore, SQLiteConversationStore
from agent_runtime_core.persistence.document_stores.conversations import StoredConversations
from agent_runtime_core.persistence.models import Conversation, ConversationMessage

from .floor import Line, Size, in_turns
from .peers.server import NoServer, started

FLAT = 1.5
SHORT = 10
TEXT = "a sentence or two of what somebody asks, and what is answered to it " * 4


def _message(n: int) -> ConversationMessage:
    return ConversationMessage(role="assistant" if n % 2 else "user", content=TEXT)


def _appends(store: StoredConversations, runner: asyncio.Runner, length: int, count: int) -> Callable[[], float]:
    """A measure of microseconds an append, to a conversation that is of that length at first."""
    conversation = Conversation(messages=[_message(n) for n in range(length)])
    runner.run(store.save(conversation))

    async def once() -> float:
        messages = [_message(n) for n in range(count)]
        since = time.perf_counter()
        for message in messages:
            await store.add_message(conversation.id, message)
        return (time.perf_counter() - since) / count * 1e6

    return lambda: runner.run(once())


def _row(size: Size, name: str, make: Callable[[], StoredConversations]) -> Line:
    many, count, rounds = size.of(10_000, 20), size.of(20, 2), size.rounds(15)
    with asyncio.Runner() as runner:
        store = make()
        try:
            short = [_appends(store, runner, SHORT, count) for _ in range(rounds)]
            long = _appends(store, runner, many, count)
            taken, floor = in_turns(rounds, long, lambda: short.pop()())
        finally:
            runner.run(store.close())
    row = f"append of message {many}, {name}, against message {SHORT}"
    return Line(row, taken, "µs", floor, most=None if size.tiny else FLAT)


def rows(size: Size) -> Iterator[Line]:
    yield _row(size, "memory", InMemoryConversationStore)
    for durability in ("normal", "full"):
        with size.file() as path:
            yield _row(size, f"SQLite {durability}", lambda: SQLiteConversationStore(path, durability=durability))  # noqa: B023
    with contextlib.suppress(NoServer, MissingDependency), started() as url:
        yield _row(size, "Redis", lambda: RedisConversationStore(url))
