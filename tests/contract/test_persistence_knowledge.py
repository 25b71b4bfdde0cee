"""Every knowledge store of ours keeps the contract, and so does one of somebody else's."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_runtime_core.errors import UnserialisableResult
from agent_runtime_core.persistence.models import Fact
from agent_runtime_core.testing.contracts.persistence.knowledge import CASES, VECTORS, Case, Make, check
from tests.contract.persistence.knowledge import BUILT_IN
from tests.contract.persistence.stores import SHARED, maker
from tests.contract.third_party.plain_records import DEFECTS, PlainKnowledge, PlainVectors


@pytest.fixture(params=SHARED)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    return maker("Knowledge", request, tmp_path)


@pytest.mark.parametrize("case", [*CASES, *VECTORS, *BUILT_IN], ids=lambda case: case.__name__)
async def test_contract(case: Case, make: Make) -> None:
    await case(make)


async def test_a_fact_that_holds_itself_is_refused_at_once(make: Make) -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    store = make()
    with pytest.raises(UnserialisableResult, match="a cycle"):
        await store.save_fact(Fact(key="k", value=cycle))
    assert await store.list_facts() == []
    await store.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_a_store_of_ones_own(case: Case) -> None:
    await case(PlainKnowledge)


@pytest.mark.parametrize("case", [*CASES, *VECTORS], ids=lambda case: case.__name__)
async def test_a_store_with_embeddings_of_ones_own(case: Case) -> None:
    await case(PlainVectors)


@pytest.mark.parametrize("defect", DEFECTS[PlainKnowledge])
async def test_a_defect_is_found(defect: Make) -> None:
    with pytest.raises(AssertionError):
        await check(defect)
