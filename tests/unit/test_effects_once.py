"""With `effects="refuse"`, no effect happens twice in a lineage, whatever happens to its runs."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.support.random_payments import History, Node, histories, programs
from tests.support.reencryption import Place

OPTIONS: dict[str, Any] = {
    "deadline": None, "database": None, "derandomize": True, "print_blob": False,
    "suppress_health_check": list(HealthCheck),
}  # fmt: skip


def played(kind: str, program: list[Node], actions: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(History(Place(kind, Path(folder)), program).play(actions))


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_no_effect_happens_twice(kind: str) -> None:
    @settings(max_examples=40, **OPTIONS)
    @given(programs(), histories())
    def holds(program: list[Node], actions: list[tuple[Any, ...]]) -> None:
        played(kind, program, actions)

    holds()
