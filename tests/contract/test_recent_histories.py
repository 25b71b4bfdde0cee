"""The conversation stores of this package keep decoded histories, which are never out of date."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_runtime_core.testing.contracts.persistence.conversations import Case, Make
from tests.contract.persistence.histories import HISTORIES
from tests.contract.persistence.stores import TECHNOLOGIES, maker


@pytest.fixture(params=TECHNOLOGIES)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    return maker("Conversation", request, tmp_path)


@pytest.mark.parametrize("case", HISTORIES, ids=lambda case: case.__name__)
async def test_history(case: Case, make: Make) -> None:
    await case(make)
