"""What `agent-runtime doctor` found."""

from __future__ import annotations

from typing import Final, NamedTuple

OK: Final = "ok"
WARNING: Final = "warning"
ERROR: Final = "error"


class Finding(NamedTuple):
    """The result of one check."""

    status: str
    check: str
    detail: str
    fix: str = ""
