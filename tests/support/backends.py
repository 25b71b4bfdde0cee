"""The backends that a test runs on: some by default, the others with `-m all_backends`.

A case about code above the backends proves the same on each of them. What differs from backend to backend is tested by
the contract suites, which run on all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

#: The backends on a server, which the fixture "<name>_url" opens.
SERVERS = ("redis", "postgres")
#: For a test of code above the backends, beside the others.
POSTGRES = pytest.param("postgres", marks=[pytest.mark.postgres, pytest.mark.all_backends])


def backends(names: Iterable[str], *, default: Collection[str] | None = None) -> list[Any]:
    """Return a pytest parameter for each name; all but `default`, if given, have the marker `all_backends`."""
    return [
        pytest.param(
            name,
            id=name.replace(" ", "+"),
            marks=[
                *([pytest.mark.redis] if "redis" in name else []),
                *([pytest.mark.postgres] if "postgres" in name else []),
                *([] if default is None or name in default else [pytest.mark.all_backends]),
            ],
        )
        for name in names
    ]
