"""The suites of contracts, and what each is made of on a Redis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agent_runtime_core._core.lazy_import import load
from agent_runtime_core.events import get_event_bus
from agent_runtime_core.queue import get_queue
from agent_runtime_core.state import get_state_store
from agent_runtime_core.testing.contracts import events, queue, runs, state
from agent_runtime_core.testing.contracts.persistence import documents

SUITES: dict[str, list[Any]] = {
    "queue": queue.CASES,
    "events": events.CASES,
    "state": state.CASES,
    "documents": documents.CASES,
    "runs": runs.CASES,
}


def making(suite: str, url: Callable[[], str]) -> Callable[..., Any]:
    """What a case of that suite is given: backends at another URL each time."""

    def make(**options: Any) -> Any:
        place = {"url": url()}
        match suite:
            case "queue":
                return get_queue("redis", **place, **options)
            case "events":
                return get_event_bus("redis", **place, **options)
            case "state":
                return get_state_store("redis", **place, **options)
            case "documents":
                store: Any = load("agent_runtime_core.persistence.documents.redis:RedisDocuments")
                return store(**place, **options)
            case _:
                return (
                    get_queue("redis", **place, **options),
                    get_event_bus("redis", **place, **options),
                    get_state_store("redis", **place, **options),
                )

    return make
