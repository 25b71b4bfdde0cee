"""Every event bus in the table, and one of a third party, keeps the contract."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.events import BACKENDS, EventBus, get_event_bus
from agent_runtime_core.testing.contracts.events import CASES, Case, Make

THEIRS = "tests.contract.third_party.their_bus:TheirBus"


@pytest.fixture(params=[*BACKENDS, THEIRS], ids=[*BACKENDS, "theirs"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    numbers = itertools.count()

    def new() -> EventBus:
        options: dict[str, Any] = {"path": tmp_path / f"events{next(numbers)}.db"} if request.param == "sqlite" else {}
        return get_event_bus(request.param, **options)

    return new


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_contract(case: Case, make: Make) -> None:
    await case(make)
