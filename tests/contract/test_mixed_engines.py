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
]


@pytest.fixture(params=COMBINATIONS, ids=lambda names: names.replace(" ", "+"))
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
            return {"backend": kind, "engine": engines.setdefault(letter, MemoryEngine(**options))}

        queue, bus, state = request.param.split(" ")
        # Whoever polls that bus keeps the real clock: a virtual one would stand still.
        return (
            get_queue(**(their("their_queue:TheirQueue") | options if queue == "theirs" else at(queue))),
            get_event_bus(**(their("their_bus:TheirBus") if bus == "theirs" else at(bus))),
            get_state_store(**(their("their_store:TheirStore") | options if state == "theirs" else at(state))),
        )

    return new


def their(name: str) -> dict[str, Any]:
    return {"backend": f"tests.contract.third_party.{name}"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_a_run(case: Case, make: Make) -> None:
    await case(make)
