"""Every event bus in the table, and one of a third party, keeps the contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.events import BACKENDS, EventBus, get_event_bus
from agent_runtime_core.testing.contracts.events import CASES, Case, Make
from tests.support.codec import kind_of
from tests.support.storage import kinds, places

THEIRS = "tests.contract.third_party.their_bus:TheirBus"


@pytest.fixture(params=kinds(BACKENDS, THEIRS))
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    kind, place = kind_of(request), places(request, tmp_path)

    def new(**options: Any) -> EventBus:
        return get_event_bus(kind, **place(kind), **options)

    return new


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_contract(case: Case, make: Make) -> None:
    await case(make)
