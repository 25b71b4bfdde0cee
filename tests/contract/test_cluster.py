"""The contracts hold on a cluster of three nodes, whichever of them the URL names.

All cases of all suites: pytest tests/contract/test_cluster.py -m slow
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.support.contract_suites import SUITES, making
from tests.support.redis_servers import RedisCluster

pytestmark = pytest.mark.redis

ALL = [pytest.param(suite, case, id=f"{suite}-{case.__name__}") for suite, cases in SUITES.items() for case in cases]
FEW = [param for suite in SUITES for param in [p for p in ALL if p.values[0] == suite][::9]]

_PREFIXES = itertools.count(1)


async def on(cluster: RedisCluster, suite: str, case: Any) -> None:
    """The case over backends at a new prefix each time, reached through the nodes in turn."""

    def url() -> str:
        number = next(_PREFIXES)
        return f"{cluster.nodes[number % 3].url}?prefix=c{number}"

    await case(making(suite, url))


@pytest.mark.parametrize(("suite", "case"), FEW)
async def test_some_cases_on_a_cluster(suite: str, case: Any, redis_cluster: RedisCluster) -> None:
    await on(redis_cluster, suite, case)


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "case"), ALL)
async def test_all_cases_on_a_cluster(suite: str, case: Any, redis_cluster: RedisCluster) -> None:
    await on(redis_cluster, suite, case)
