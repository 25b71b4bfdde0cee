"""Every document store keeps the contract, on its own and below the claims of runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_runtime_core._load import pick
from agent_runtime_core.persistence.documents.base import DocumentStore
from agent_runtime_core.testing.contracts.persistence.documents import CASES, OURS, Case, Make
from tests.contract.places import places

DOCUMENTS = {
    "memory": ".memory:MemoryDocuments",
    "sqlite": ".sqlite:SQLiteDocuments",
    "redis": ".redis:RedisDocuments",
}
MARKS = {"redis": [pytest.mark.redis]}


@pytest.fixture(params=[pytest.param(kind, id=kind, marks=MARKS.get(kind, [])) for kind in DOCUMENTS])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    place = places(request, tmp_path)
    cls = pick(DOCUMENTS, request.param, package="agent_runtime_core.persistence.documents", what="document store")

    def new(**options: object) -> DocumentStore:
        documents: DocumentStore = cls(**place(request.param), **options)
        return documents

    return new


@pytest.mark.parametrize("case", [*CASES, *OURS], ids=lambda case: case.__name__)
async def test_contract(case: Case, make: Make) -> None:
    await case(make)
