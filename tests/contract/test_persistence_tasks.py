"""Every task store of ours keeps the contract, and so does one of somebody else's."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_runtime_core.testing.contracts.persistence.tasks import CASES, Case, Make, check
from tests.contract.persistence.stores import SHARED, maker
from tests.contract.persistence.tasks import BUILT_IN, claims_are_not_supported
from tests.contract.third_party.plain_records import DEFECTS, PlainTasks


@pytest.fixture(params=SHARED)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    return maker("Task", request, tmp_path)


@pytest.mark.parametrize("case", [*CASES, *BUILT_IN], ids=lambda case: case.__name__)
async def test_contract(case: Case, make: Make) -> None:
    await case(make)


@pytest.mark.parametrize("case", [*CASES, claims_are_not_supported], ids=lambda case: case.__name__)
async def test_a_store_of_ones_own(case: Case) -> None:
    await case(PlainTasks)


@pytest.mark.parametrize("defect", DEFECTS[PlainTasks])
async def test_a_defect_is_found(defect: Make) -> None:
    with pytest.raises(AssertionError):
        await check(defect)
