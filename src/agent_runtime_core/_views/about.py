"""What a page has to know about its server before it shows anything."""

from __future__ import annotations

import platform
import sqlite3
from collections.abc import Iterable
from typing import Any

from .._core.lazy_import import load
from ..runner.run_client import RunClient


def about_view(runner: RunClient, scopes: Iterable[str], live: str, *, hide_store: bool = False) -> dict[str, Any]:
    """Return the store, the versions and what the caller may do.

    Args:
        runner: The runner on the store.
        scopes: The scopes of the caller.
        live: How the page follows a run: "stream" (server-sent events) or "poll" (requests that wait).
        hide_store: Leave out the location of the store.

    Returns:
        {"version", "python", "sqlite", "store", "backend", "durability", "read_only", "scopes", "live", "now"}.
        `durability` is "full" or "normal" for a SQLite file, else None.
    """
    engine = runner.queue.commits
    return {
        "version": load("agent_runtime_core:__version__"), "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "store": None if hide_store else str(getattr(engine, "path", type(runner.queue).__name__)),
        "backend": type(runner.queue).__name__.removesuffix("Queue"),
        "durability": getattr(engine, "durability", None), "read_only": bool(getattr(engine, "read_only", False)),
        "scopes": sorted(scopes), "live": live,
    }  # fmt: skip
