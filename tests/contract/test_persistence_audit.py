"""Every audit store of ours keeps the contract, and so does one of somebody else's."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_runtime_core.testing.contracts.persistence.audit import CASES, Case, Make, check
from tests.contract.persistence.audit import BUILT_IN
from tests.contract.persistence.stores import SHARED, maker
from tests.contract.third_party.plain_records import DEFECTS, PlainAudit


@pytest.fixture(params=SHARED)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    return maker("Audit", request, tmp_path)


@pytest.mark.parametrize("case", [*CASES, *BUILT_IN], ids=lambda case: case.__name__)
async def test_contract(case: Case, make: Make) -> None:
    await case(make)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_a_store_of_ones_own(case: Case) -> None:
    await case(PlainAudit)


@pytest.mark.parametrize("defect", DEFECTS[PlainAudit])
async def test_a_defect_is_found(defect: Make) -> None:
    with pytest.raises(AssertionError):
        await check(defect)
