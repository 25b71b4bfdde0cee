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

# Queue, events, state: an engine's kind and a letter, the same letter for the same engine.
COMBINATIONS = [
    "memory-a memory-a memory-a",
    "memory-a memory-b memory-c",
    "sqlite-a sqlite-a sqlite-a",
    "sqlite-a sqlite-b sqlite-c",
    "sqlite-a sqlite-b sqlite-b",
    "memory-a memory-a sqlite-b",
    "memory-a sqlite-b sqlite-b",
    "sqlite-a memory-b memory-b",
    "sqlite-a memory-b sqlite-a",
    "sqlite-a theirs memory-b",
    "theirs sqlite-a sqlite-a",
    "sqlite-a sqlite-a theirs",
    "theirs theirs theirs",
    "redis-a redis-a redis-a",
    "redis-a redis-b redis-c",
    "redis-a redis-a sqlite-b",
    "redis-a sqlite-b sqlite-b",
    "sqlite-a redis-b redis-b",
    "sqlite-a redis-b sqlite-a",
    "redis-a memory-b redis-a",
    "theirs redis-a theirs",
]


def _marked(names: str) -> Any:
    return pytest.param(names, id=names.replace(" ", "+"), marks=[pytest.mark.redis] if "redis" in names else [])


@pytest.fixture(params=map(_marked, COMBINATIONS))
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    numbers = itertools.count()

    def new(**options: Any) -> tuple[RunQueue, EventBus, StateStore]:
        place = next(numbers)
        engines: dict[str, MemoryEngine] = {}

        def at(name: str) -> dict[str, Any]:
            kind, _, letter = name.partition("-")
            if kind == "sqlite":
                where = {"path": tmp_path / f"{place}{letter}.db", "durability": "normal"}
                return {"backend": kind, **where, **options}
            if kind == "redis":
                return {"backend": kind, "url": f"{request.getfixturevalue('redis_url')}-{place}{letter}", **options}
            return {"backend": kind, "engine": engines.setdefault(letter, MemoryEngine(**options))}

        queue, bus, state = request.param.split(" ")
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
