"""The contracts hold on a cluster of three nodes, whichever of them the URL names.

All cases of all suites: pytest tests/contract/test_cluster.py -m slow
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from agent_runtime_core._load import load
from agent_runtime_core.events import get_event_bus
from agent_runtime_core.queue import get_queue
from agent_runtime_core.state import get_state_store
from agent_runtime_core.testing.contracts import events, queue, runs, state
from agent_runtime_core.testing.contracts.persistence import documents
from tests.servers import RedisCluster

pytestmark = pytest.mark.redis

SUITES: dict[str, list[Any]] = {
    "queue": queue.CASES,
    "events": events.CASES,
    "state": state.CASES,
    "documents": [*documents.CASES, *documents.OURS],
    "runs": runs.CASES,
}
ALL = [pytest.param(suite, case, id=f"{suite}-{case.__name__}") for suite, cases in SUITES.items() for case in cases]
FEW = [param for suite in SUITES for param in [p for p in ALL if p.values[0] == suite][::9]]

_PREFIXES = itertools.count(1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with RedisCluster() as cluster:
        yield cluster


async def on(cluster: RedisCluster, suite: str, case: Any) -> None:
    """The case over backends at a new prefix each time, reached through the nodes in turn."""

    def where() -> dict[str, str]:
        number = next(_PREFIXES)
        return {"url": f"{cluster.nodes[number % 3].url}?prefix=c{number}"}

    def make(**options: Any) -> Any:
        place = where()
        match suite:
            case "queue":
                return get_queue("redis", **place, **options)
            case "events":
                return get_event_bus("redis", **place, **options)
            case "state":
                return get_state_store("redis", **place, **options)
            case "documents":
                store: Any = load("agent_runtime_core.persistence.documents.redis:RedisDocuments")
                return store(**place, **options)
            case _:
                return (
                    get_queue("redis", **place, **options),
                    get_event_bus("redis", **place, **options),
                    get_state_store("redis", **place, **options),
                )

    await case(make)


@pytest.mark.parametrize(("suite", "case"), FEW)
async def test_some_cases_on_a_cluster(suite: str, case: Any, cluster: RedisCluster) -> None:
    await on(cluster, suite, case)


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "case"), ALL)
async def test_all_cases_on_a_cluster(suite: str, case: Any, cluster: RedisCluster) -> None:
    await on(cluster, suite, case)
