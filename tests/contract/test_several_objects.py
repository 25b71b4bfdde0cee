"""Two objects on one place, as two processes have them, are one queue, one bus, one store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._core.clock import SYSTEM, Clock
from agent_runtime_core.events import get_event_bus
from agent_runtime_core.queue import get_queue
from agent_runtime_core.state import get_state_store
from agent_runtime_core.testing.clock import RunClock
from agent_runtime_core.testing.contracts import events, queue, state
from tests.support.storage import places

MAKERS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "queue": (get_queue, queue.CASES.several),
    "events": (get_event_bus, events.CASES.several),
    "state": (get_state_store, state.CASES.several),
}
CASES = [
    pytest.param(kind, concern, case, id=f"{kind}-{concern}-{case.__name__}", marks=marks)
    for kind, marks in (("sqlite", []), ("redis", [pytest.mark.redis]), ("postgres", [pytest.mark.postgres]))
    for concern, (_, cases) in MAKERS.items()
    for case in cases
]


@pytest.mark.parametrize(("kind", "concern", "case"), CASES)
async def test_several(kind: str, concern: str, case: Any, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    place, made = places(request, tmp_path), dict[int, tuple[Any, dict[str, Any]]]()

    def opened(where: dict[str, Any], clock: Clock) -> Any:
        backend = MAKERS[concern][0](kind, clock=clock, **where)
        made[id(backend)] = backend, where
        return backend

    def make(clock: Clock = SYSTEM) -> Any:
        return opened(place(kind), clock)

    def again(backend: Any) -> Any:
        # On a Redis, a clock of its own is a connection of its own.
        return opened(made[id(backend)][1], RunClock(backend.clock, ()))

    await case(make, again)
