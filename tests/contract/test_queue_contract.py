"""Every queue in the table, and one of a third party, keeps the contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.queue import BACKENDS, RunQueue, get_queue
from agent_runtime_core.testing.contracts.queue import CASES, Case, Make
from tests.support.codec import kind_of
from tests.support.storage import kinds, places

THEIRS = "tests.contract.third_party.their_queue:TheirQueue"


@pytest.fixture(params=kinds(BACKENDS, THEIRS))
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    kind, place = kind_of(request), places(request, tmp_path)

    def new(**options: Any) -> RunQueue:
        return get_queue(kind, **place(kind), **options)

    return new


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_contract(case: Case, make: Make) -> None:
    await case(make)
