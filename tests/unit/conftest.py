"""Where the runs of a unit test are kept: in memory, and in a SQLite file."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(params=["memory", "sqlite"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    """None for memory, or the path of a file that is not there yet."""
    return tmp_path / "runs.db" if request.param == "sqlite" else None
