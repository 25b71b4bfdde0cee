"""Where the runs of a unit test are kept: in memory, and in a SQLite file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.backends import backends


@pytest.fixture(params=backends(["memory", "sqlite"], default=["sqlite"]))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    """None for memory, or the path of a file that is not there yet."""
    return tmp_path / "runs.db" if request.param == "sqlite" else None
