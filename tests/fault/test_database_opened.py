"""The database file is opened by SQLite alone: to close any other descriptor of it drops the locks of this process."""

from __future__ import annotations

from pathlib import Path

from tests.support.processes import Child


def test_python_never_opens_a_database_that_is_in_use(tmp_path: Path) -> None:
    """Whatever is done with runs, stores and commands; that no other code of ours could is in tests/test_banned.py."""
    with Child("opens", tmp_path) as child:
        said: list[str] = []
        while not said or said[-1] not in ("watched", "blind"):
            said.append(child.line())
    assert said == ["watched"]
