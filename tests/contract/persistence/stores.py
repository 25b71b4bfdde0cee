"""The stores of each technology, each in a place of its own, for the suites of `testing.contracts.persistence`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import persistence
from agent_runtime_core._core.clock import SYSTEM
from agent_runtime_core._engines.memory import MemoryEngine
from tests.support.backends import backends
from tests.support.codec import kind_of
from tests.support.storage import places

PREFIXES = {"memory": "InMemory", "sqlite": "SQLite", "redis": "Redis", "postgres": "Postgres", "files": "File"}

TECHNOLOGIES = backends(PREFIXES, default=PREFIXES)

#: For the stores that share their code with others: the document suite runs on all technologies, also with a codec.
SHARED = backends([*PREFIXES, "sqlite+codec"], default=["memory", "sqlite", "sqlite+codec"])


def maker(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    """`make(**options)` of a suite: `place` names where; without it, it is a new and empty place."""
    technology = kind_of(request)
    store: Any = getattr(persistence, f"{PREFIXES[technology]}{kind}Store")
    place = places(request, tmp_path)
    engines: dict[str, MemoryEngine] = {}

    def make(place_name: str | None = None, **options: Any) -> Any:
        where = place(technology, place_name)
        if technology == "memory" and place_name is not None:
            where = {"engine": engines.setdefault(place_name, MemoryEngine(options.get("clock", SYSTEM)))}
        with pytest.MonkeyPatch.context() as patch:
            if technology == "files":
                patch.setenv("HOME", f"{where['project_dir']}.home")
            return store(**where, **options)

    return lambda place=None, **options: make(place, **options)
