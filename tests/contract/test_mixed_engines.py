"""A run keeps its promises over every combination of backends: of one engine, of several, and of a third party."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._engines.memory import MemoryEngine
from agent_runtime_core.events import EventBus, get_event_bus
from agent_runtime_core.queue import RunQueue, get_queue
from agent_runtime_core.state import StateStore, get_state_store
from agent_runtime_core.testing.contracts.runs import CASES, Case, Make
from tests.support.backends import SERVERS, backends
from tests.support.codec import kind_of

# Queue, events, state: an engine's kind and a letter, the same letter for the same engine.
# A run depends on which of the three share an engine and on the kinds of engines: each way to share is here by default
# once, and each kind alone.
DEFAULT = [
    "memory-a memory-a memory-a",
    "sqlite-a sqlite-a sqlite-a",
    "redis-a redis-a redis-a",
    "theirs theirs theirs",
    "sqlite-a sqlite-b sqlite-c",
    "memory-a memory-a sqlite-b",
    "sqlite-a redis-b redis-b",
    "sqlite-a memory-b sqlite-a",
    "theirs sqlite-a sqlite-a",
]
MORE = [
    "memory-a memory-b memory-c",
    "sqlite-a sqlite-b sqlite-b",
    "memory-a sqlite-b sqlite-b",
    "sqlite-a memory-b memory-b",
    "sqlite-a theirs memory-b",
    "sqlite-a sqlite-a theirs",
    "redis-a redis-b redis-c",
    "redis-a redis-a sqlite-b",
    "postgres-a postgres-a postgres-a",
    "postgres-a postgres-b postgres-c",
    "postgres-a redis-b sqlite-c",
    "sqlite-a postgres-b postgres-b",
    "redis-a postgres-b redis-a",
    "memory-a postgres-b postgres-b",
    "theirs postgres-a postgres-a",
    "redis-a sqlite-b sqlite-b",
    "sqlite-a redis-b sqlite-a",
    "redis-a memory-b redis-a",
    "theirs redis-a theirs",
]


# With a payload codec, operations and reads differ by component: one engine, several, and backends of a third party.
ENCODED = [
    "memory-a memory-a memory-a+aes",
    "sqlite-a sqlite-a sqlite-a+aes",
    "redis-a redis-a redis-a+aes",
    "postgres-a postgres-a postgres-a+aes",
    "sqlite-a redis-b redis-b+aes",
    "theirs theirs theirs+aes",
]


@pytest.fixture(params=backends([*DEFAULT, *MORE, *ENCODED], default=[*DEFAULT, *ENCODED]))
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    numbers, components = itertools.count(), kind_of(request).split(" ")

    def new(**options: Any) -> tuple[RunQueue, EventBus, StateStore]:
        place = next(numbers)
        engines: dict[str, MemoryEngine] = {}

        def at(name: str) -> dict[str, Any]:
            kind, _, letter = name.partition("-")
            if kind == "sqlite":
                where = {"path": tmp_path / f"{place}{letter}.db", "durability": "normal"}
                return {"backend": kind, **where, **options}
            if kind in SERVERS:
                url = request.getfixturevalue(f"{kind}_url")
                return {"backend": kind, "url": f"{url}_{place}{letter}", **options}
            return {"backend": kind, "engine": engines.setdefault(letter, MemoryEngine(**options))}

        queue, bus, state = components
        return (
            get_queue(**(their("their_queue:TheirQueue") | options if queue == "theirs" else at(queue))),
            get_event_bus(**(their("their_bus:TheirBus") | options if bus == "theirs" else at(bus))),
            get_state_store(**(their("their_store:TheirStore") | options if state == "theirs" else at(state))),
        )

    return new


def their(name: str) -> dict[str, Any]:
    return {"backend": f"tests.contract.third_party.{name}"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_a_run(case: Case, make: Make) -> None:
    await case(make)
