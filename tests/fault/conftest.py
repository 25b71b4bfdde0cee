"""Where the stores of `rig` that are on Redis are, for each test that wants one."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest

from tests.fault import rig

STANDSTILL = 15.0  # seconds that the server of these tests may get no time from its machine


@pytest.fixture(autouse=True)
def _store_on_redis(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    callspec = getattr(request.node, "callspec", None)
    if callspec is not None and callspec.params.get("kind") == "redis":
        rig.REDIS["url"] = request.getfixturevalue("redis_url")
        # None of these tests is about a server that is away: the engine is not to take it for that.
        for module, name in (("redis_line", "ANSWER"), ("redis", "PATIENCE")):
            monkeypatch.setattr(importlib.import_module(f"agent_runtime_core._engines.{module}"), name, STANDSTILL)
    yield
    rig.REDIS.clear()
