"""Where the stores of `rig` that are on a server are, for each test that wants one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import fault_runs as rig
from tests.support.backends import SERVERS


@pytest.fixture(autouse=True)
def _store_on_server(request: pytest.FixtureRequest) -> Iterator[None]:
    callspec = getattr(request.node, "callspec", None)
    if callspec is not None and (kind := callspec.params.get("kind")) in SERVERS:
        rig.SERVER["url"] = request.getfixturevalue(f"{kind}_url")
    yield
    rig.SERVER.clear()
