"""Every document store keeps the contract, on its own and below the claims of runs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._core.lazy_import import pick
from agent_runtime_core.config import get_config
from agent_runtime_core.persistence.documents.base import Collection, DocumentStore
from agent_runtime_core.testing.contracts.persistence.documents import CASES, Case, Make, rejects_a_stale_worker
from tests.support.backends import backends
from tests.support.codec import kind_of
from tests.support.storage import places

DOCUMENTS = {
    "memory": ".memory:MemoryDocuments",
    "sqlite": ".sqlite:SQLiteDocuments",
    "redis": ".redis:RedisDocuments",
    "postgres": ".postgres:PostgresDocuments",
    "files": ".files:FileDocuments",
}


def _marked(*kinds: str) -> Any:
    marks = [getattr(pytest.mark, kind) for kind in ("redis", "postgres") if kind in kinds]
    return pytest.param(kinds if len(kinds) > 1 else kinds[0], id="+".join(kinds), marks=marks)


@pytest.fixture
def new(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., DocumentStore]:
    place = places(request, tmp_path)

    def new(kind: str, **options: object) -> DocumentStore:
        cls = pick(DOCUMENTS, kind, package="agent_runtime_core.persistence.documents", what="document store")
        where = place(kind)
        documents: DocumentStore = cls(**({"root": where["project_dir"]} if kind == "files" else where), **options)
        get_config().encode_contents(documents)
        return documents

    return new


CODECS = [f"{name}+codec" for name in DOCUMENTS]


@pytest.fixture(params=backends([*DOCUMENTS, *CODECS], default=[*DOCUMENTS, *CODECS[1:]]))
def make(request: pytest.FixtureRequest, new: Callable[..., DocumentStore]) -> Make:
    return functools.partial(new, kind_of(request))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_contract(case: Case, make: Make) -> None:
    await case(make)


@pytest.mark.parametrize("kinds", [_marked(*kinds) for kinds in itertools.product(DOCUMENTS, repeat=2)])
async def test_a_stale_worker_is_rejected_wherever_its_queue_is(
    kinds: tuple[str, str], new: Callable[..., DocumentStore]
) -> None:
    documents, queue = (new(kind) for kind in kinds)
    await rejects_a_stale_worker(Collection(documents, "project", "thing"), queue.commits, f"another {kinds[1]} engine")
    await documents.close()
    await queue.close()
