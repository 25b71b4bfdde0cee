"""Where the backends of a table are kept for a test, each in a place of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest


def kinds(table: Iterable[str], theirs: str) -> list[Any]:
    """A parameter for each backend of a table, and for one of a third party, without and with a codec.

    One module encodes for all backends, and the one in memory keeps what it gets: with a codec it repeats the others.
    """
    names = [*((name, name) for name in table), (theirs, "theirs")]
    return [
        pytest.param(
            f"{name}{codec}",
            id=f"{short}{codec}",
            marks=[
                *([pytest.mark.redis] if name == "redis" else []),
                *([pytest.mark.postgres] if name == "postgres" else []),
                *([pytest.mark.all_backends] if codec and name == "memory" else []),
            ],
        )
        for codec in ("", "+codec")
        for name, short in names
    ]


def places(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Options of a backend by its kind: a new place each time, or that of a name given before."""
    numbers = itertools.count()
    known: dict[tuple[str, str], dict[str, Any]] = {}

    def place(kind: str, name: str | None = None) -> dict[str, Any]:
        key = (kind, f"{next(numbers)}" if name is None else name)
        if key not in known:
            known[key] = where(kind, key[1])
        return known[key]

    def where(kind: str, name: str) -> dict[str, Any]:
        if kind == "sqlite":
            return {"path": tmp_path / f"{name}.db"}
        if kind == "redis":
            return {"url": f"{request.getfixturevalue('redis_url')}-{name}"}
        if kind == "postgres":
            return {"url": f"{request.getfixturevalue('postgres_url')}_{name}"}
        if kind == "files":
            return {"project_dir": tmp_path / name}
        return {}

    return place
