"""Where the stores of `rig` that are on Redis are, for each test that wants one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import fault_runs as rig


@pytest.fixture(autouse=True)
def _store_on_redis(request: pytest.FixtureRequest) -> Iterator[None]:
    callspec = getattr(request.node, "callspec", None)
    if callspec is not None and callspec.params.get("kind") == "redis":
        rig.REDIS["url"] = request.getfixturevalue("redis_url")
    yield
    rig.REDIS.clear()
