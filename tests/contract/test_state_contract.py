"""Every state store in the table, and one of a third party, keeps the contract."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.state import BACKENDS, StateStore, get_state_store
from agent_runtime_core.testing.contracts.state import CASES, Case, Make

THEIRS = "tests.contract.third_party.their_store:TheirStore"


@pytest.fixture(params=[*BACKENDS, THEIRS], ids=[*BACKENDS, "theirs"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    numbers = itertools.count()

    def new(**options: Any) -> StateStore:
        if request.param == "sqlite":
            options["path"] = tmp_path / f"state{next(numbers)}.db"
        return get_state_store(request.param, **options)

    return new


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_contract(case: Case, make: Make) -> None:
    await case(make)
